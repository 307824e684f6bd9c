"""Runs the commands, except `train`, `plan`, `tune`, `serve`, `demo`, `predict --parts`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from sparsejax import codec, whole_files
from sparsejax.cli import flags
from sparsejax.cli.printing import print_metrics
from sparsejax.cli.reading import read_features, users_of
from sparsejax.cli.shell import names_of
from sparsejax.data import ClickDataset, SequenceDataset, SparseDataset, read_clicks
from sparsejax.data.files import stored
from sparsejax.data.files.names import as_names
from sparsejax.data.files.opening import shown
from sparsejax.data.prepared import preparation
from sparsejax.data.sets import writers
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.engine.rank import recommendation_files
from sparsejax.kinds.kind import kind_called
from sparsejax.kinds.reading import is_saved, read_file, read_histories, with_times
from sparsejax.kinds.source import item_names
from sparsejax.mesh import processes
from sparsejax.metrics import comparison
from sparsejax.options.measuring import Evaluate
from sparsejax.options.models import Clicks
from sparsejax.options.option import Options
from sparsejax.options.reading import BY_NAME, Prepare, Reading
from sparsejax.options.staging import (
    EvaluateJoined,
    ExportJoined,
    Joining,
    RecommendJoined,
)
from sparsejax.runs import uses
from sparsejax.runs.folders import Folder
from sparsejax.verbs import vectors as vector_files

# The largest `k` of a service that serves a run.
_MOST_SERVED = 100


def evaluate(command: flags.Evaluate) -> None:
    """`sparsejax evaluate`."""
    if command.second_stage is None:
        measured = _measured(Folder.of(command.run), command, command)
    else:
        both, asked = _two_stages(command, EvaluateJoined)
        measured = both.evaluate(**asked)
    print_metrics(measured)
    print(json.dumps(measured))


def compare(command: flags.Compare) -> None:
    """`sparsejax compare`."""
    runs = [Folder.of(run) for run in (command.run, command.other)]
    # With these classes, errors about the options name flags of the command line.
    asked = command.as_type(flags.Evaluate, run=command.run).replaced(keep_rows=True)
    both = zip(runs, _of_same_targets(runs, asked, command), strict=True)
    found = comparison.compare(
        *(
            _measured(run, _for_run(run, runs, each), _for_run(run, runs, command))
            for run, each in both
        )
    )
    print(found)
    print(found.to_json())


def _for_run[T: Options](run: Folder, runs: Sequence[Folder], options: T) -> T:
    """Options for `run`, without the table of users if only the other run reads such a table."""
    reads = {
        id(each) for each in runs if getattr(each.known, "users", None) is not None
    }
    if id(run) in reads or not reads:
        return options
    given = options.given - {"user_features"}
    return options.replaced(user_features=None).noting(given=given)


def _of_same_targets(
    runs: Sequence[Folder], asked: Evaluate, reading: Reading
) -> list[Evaluate]:
    """Options to measure each run. If one run has targets, the other is measured on these, too.

    Raises:
      ValueError: the targets of the runs differ.
    """
    stated = [(run.settings.targets, run.settings.weights) for run in runs]
    [first, second], nothing = stated, (None, None)
    if nothing not in stated and first != second:
        raise ValueError(
            f"{runs[0].directory} was trained on the targets and weights {first}, and "
            f"{runs[1].directory} on {second}: compare runs with equal ones, or with a run "
            "that has none"
        )
    if first == second:
        return [asked, asked]
    [one] = [run for run, each in zip(runs, stated, strict=True) if each != nothing]
    [rival] = [run for run in runs if run is not one]
    own = _for_run(one, runs, reading)
    heldout = one.settings.kind.targets_alone(asked, own, one, rival)
    other = asked.replaced(heldout=heldout)
    return [other if each == nothing else asked for each in stated]


def _two_stages(
    command: flags.Evaluate | flags.Predict | flags.Export, asked: type[Options]
) -> tuple[Any, dict[str, Any]]:
    """Combines the runs of a command to a two-stage model, and makes its method's arguments.

    Raises:
      ValueError: a given flag does not apply to two stages.
    """
    from sparsejax.runs.run import Run
    from sparsejax.runs.two_stages import TwoStage

    command.check_effect()
    shell = (Reading, flags.SecondStage, flags.Compilation)
    known = asked.option_names().union(*(each.option_names() for each in shell))
    if useless := sorted(command.given - known - {"run", "out", "compile"}):
        name = command.spelled(useless[0])
        raise ValueError(f"{name} is of no use with --second-stage: leave it out")

    def given(options: type[Options], *others: str) -> dict[str, Any]:
        names = (options.option_names() - {*others}) & command.given
        return {name: getattr(command, name) for name in names}

    assert command.second_stage is not None
    one = Run.load(command.run, **given(Reading))
    other, joining = Run.load(command.second_stage), given(Joining)
    both = TwoStage(one, other, candidates=command.num_candidates, **joining)
    return both, given(asked, *joining)


def _measured(opened: Folder, asked: Evaluate, reading: Reading) -> Any:
    """Measures a run. Errors name flags of the command line."""
    kind = opened.settings.kind
    asked = kind.asked_in_shell(asked)
    asked.check_kind(kind.name)
    return uses.measured(asked, reading, opened)


def predict(command: flags.Predict) -> None:
    """`sparsejax predict` without `--parts`."""
    if command.part is not None or command.finish:
        raise ValueError("--part and --finish go with --parts, the number of all parts")
    if command.workers is not None:
        raise ValueError("--workers goes with --parts, the number of all parts")
    whole_files.check_writable(command.out)
    if command.second_stage is not None:
        both, asked = _two_stages(command, RecommendJoined)
        if isinstance(command.users, str):
            asked["users"] = names_of(command.users)
        found = both.recommend(**asked)
        names = found.row_names, found, found.item_names
        write = recommendation_files.save_recommendations
        processes.in_first(functools.partial(write, command.out, *names))
        return
    opened = _opened(command)
    kind = opened.settings.kind
    if kind.ranks_items:
        save = _recommended(command, opened)
    else:
        found = kind.probabilities(command.inputs, command, opened)
        save = functools.partial(
            writers.save_numbers, command.out, "probability", found
        )
    processes.in_first(save)


def _recommended(command: flags.Predict, opened: Folder) -> Callable[[], None]:
    """Ranks items for the rows of a file; returns a function that writes them."""
    users, hint, out = command.users, "", command.out
    names = item_names(opened.known)
    if isinstance(users, str):
        if not os.path.isfile(users):
            hint = f"; there is no file called {users} either"
        users = names_of(users)
    rows, found = uses.recommended(
        command.replaced(users=users),
        command,
        opened,
        lambda rows: recommendation_files.check_recommendation_names(out, rows, names),
        hint,
    )
    which = "without" if command.exclude_seen else "also"
    print(f"{command.k} items a row, {which} those that it has", file=sys.stderr)
    return lambda: recommendation_files.save_recommendations(out, rows, found, names)


def _opened(
    command: flags.Predict
    | flags.Export
    | flags.Report
    | flags.Vectors
    | flags.Similar,
) -> Folder:
    """Opens a command's run. Raises ValueError if a flag is not for the run's kind of model."""
    opened = Folder.of(command.run)
    kind = opened.settings.kind
    command.check_kind(kind.name)
    if isinstance(command, flags.Vectors | flags.Similar) and not kind.ranks_items:
        raise ValueError("a model of clicks has no items, and no vectors of them")
    return opened


def export(command: flags.Export) -> None:
    """`sparsejax export`."""
    from sparsejax.predictors.files import load_predictor

    if command.compile and not command.compilation_cache:
        raise ValueError("--compile keeps programs: leave out --no-compilation-cache")
    if command.second_stage is None:
        opened = _opened(command)
        whole_files.check_writable(command.path)
        uses.export(command, Reading().noting(told=command.say), opened)
    else:
        both, asked = _two_stages(command, ExportJoined)
        whole_files.check_writable(command.path)
        both.export(**asked)
    print(f"the predictor is in {command.path}", file=sys.stderr)
    if command.compile:
        load_predictor(command.path).warm_up(rows=command.batch_size)


@contextlib.contextmanager
def exported(command: flags.Serve) -> Generator[flags.Serve]:
    """Exports a run to a temporary predictor, and yields the command that serves it."""
    from sparsejax.verbs.export import export_predictor

    run = pathlib.Path(command.model)
    opened = Folder.of(run)
    k: dict[str, Any] = {"k": _MOST_SERVED} if opened.settings.kind.ranks_items else {}
    name = command.name or run.absolute().name
    with whole_files.temporary_folder(tempfile.gettempdir()) as folder:
        path = os.path.join(folder, "model.predictor")
        export_predictor(opened.model(), path, names=opened.known, **k)
        yield command.replaced(model=path, name=name)


def convert(command: flags.Convert) -> None:
    """`sparsejax convert`."""
    to = command.to or _format_of(command.output)
    whole_files.check_writable(command.output)
    features = (
        None if command.features is None else read_features(str(command.features))
    )
    data = read_file(command.input, command.as_type(Reading), features=features)
    if to == "parquet":
        data.save(command.output)
        return
    with whole_files.whole_text_file(command.output) as file:
        match to:
            case "text":
                writers.write_text(file, data)
            case "adjacency":
                writers.write_adjacency(file, data)
            case "pairs":
                comma = ".csv" in command.output.suffixes
                writers.write_pairs(file, data, delimiter="," if comma else "\t")


def prepare(command: flags.Prepare) -> None:
    """`sparsejax prepare`."""
    command.check_effect()  # its errors name flags
    features = (
        None if command.features is None else read_features(str(command.features))
    )
    time = None if command.split_time is None else _number(str(command.split_time))
    values = command.values_of(Prepare) | {"features": features, "split_time": time}
    if command.schema is not None:
        values["schema"] = codec.load(str(command.schema), EventSchema.from_json)
    given = {name: value for name, value in values.items() if name in command.given}
    manifest = preparation.prepare(**given)
    print(f"{shown(command.out)}: {manifest}", file=sys.stderr)


def split(command: flags.Split) -> None:
    """`sparsejax split`."""
    _check_split(command)
    files = {"train": "train.parquet", "heldout": "heldout.parquet"}
    whole_files.check_new(command.out, files.values())
    data, indptr = _data_to_split(command)
    short = ""
    repeats = {} if command.repeats is None else {"repeats": command.repeats}
    if command.by == "last":
        n = 1 if command.n is None else command.n
        parts = data.split_last(n, **repeats)
        few = np.diff(indptr) <= n
        if getattr(data, "weights", None) is not None:  # only targets are held out
            few = np.diff(parts.heldout.indptr) < n
        short = f", rows too short: {np.sum(few):,}"
    elif command.by == "time":
        at = None if command.at is None else _time(command.at, data)
        parts = data.split_at(at, fraction=command.fraction, **repeats)
    else:
        assert command.fraction is not None  # checked before
        names = {"random": "split", "rows": "split_rows", "items": "split_items"}
        choose = getattr(data, names[command.by])
        parts = choose(command.fraction, seed=command.seed or 0)
    with whole_files.whole_folder(command.out, names=files.values()) as folder:
        parts.train.save(folder / files["train"])
        parts.heldout.save(folder / files["heldout"])
    print(f"{parts}{short}", file=sys.stderr)


def report(command: flags.Report) -> None:
    """`sparsejax report`."""
    out = command.run / "report.html" if command.out is None else command.out
    opened = _opened(command)
    whole_files.check_writable(out)
    title = command.run.resolve().name
    uses.report(out, title, command, command, opened, command.say)
    print(f"the report is in {out}", file=sys.stderr)


def vectors(command: flags.Vectors) -> None:
    """`sparsejax vectors`."""
    vector_files.check_ending(command.out)
    whole_files.check_writable(command.out)
    opened = _opened(command)
    if command.data is None:
        found = vector_files.item_vectors(opened.model())
        names = item_names(opened.known)
    else:
        found, names = uses.vectors_of(command.data, command, opened, command.context)
    vector_files.save_vectors(command.out, found, names)


def similar(command: flags.Similar) -> None:
    """`sparsejax similar`."""
    if not command.items:
        raise ValueError(
            "name an ITEM after the folder, for example: sparsejax similar run/ tea"
        )
    opened = _opened(command)
    model, names = opened.model(), item_names(opened.known)
    found = vector_files.similar_items(model, command.items, command.k, names=names)
    recommendation_files.write_recommendations(
        sys.stdout, as_names(command.items), found, names
    )


def _data_to_split(command: flags.Split) -> tuple[Any, np.ndarray]:
    """Reads the data to split. Returns it with the offsets of its rows."""
    clicks = command.label is not None or is_saved(command.data, stored.CLICKS)
    if command.histories and not clicks:
        command.check_kind("histories")
        schema = kind_called("histories").schema(command)
        command = command.replaced(user_features=users_of(command))
        histories = read_histories(command.data, command, events=schema)
        if command.targets is not None:
            histories = histories.with_targets(command.targets)
        return histories, histories.indptr
    if _are_clicks(command):
        return _clicks_to_split(command), np.zeros(1)
    rows = read_file(command.data, command)
    if command.by in ("last", "time"):
        with_times(rows, command.data)
    return rows, np.asarray(rows.matrix.indptr)


def _are_clicks(command: flags.Split) -> bool:
    """Whether the data to split is clicks: it is a saved data set of clicks, or flags for clicks
    are given.
    """
    given = command.given & Clicks.option_names()
    return bool(given) or is_saved(command.data, stored.CLICKS)


def _clicks_to_split(command: flags.Split) -> ClickDataset:
    """Reads examples, with their times if they are split by time."""
    time = None if command.time is BY_NAME else command.time
    columns = Reading.option_names() - {"delimiter", "skip_bad_lines"}
    columns -= set() if time is None else {"time"}
    if command.by not in ("time", "rows"):
        raise ValueError(f"--by {command.by} is of no use for clicks: time or rows")
    if command.given & {"histories", "repeats", *columns}:
        raise ValueError(
            "--histories, --repeats, --format, --user, --item, --value, --no-value, --no-time, "
            "--separator and --time-format are of no use for clicks: leave them out"
        )
    if command.dynamic is not None:
        raise ValueError(
            "--dynamic is of no use here: a column of 64-bit ids is of the kind key in --schema"
        )
    schema = kind_called(Clicks.describes).schema(command)
    if schema is None:
        if time is not None:
            raise ValueError("a saved data set knows its columns: leave out --time")
        data = ClickDataset.load(command.data)
        if command.by == "time" and data.times is None:
            raise ValueError(
                f"{shown(command.data)}: has no times; split the file that it was read "
                "from, with --schema and --time"
            )
    else:
        if isinstance(time, int):
            raise ValueError(f"--time {time}: columns of clicks go by their names")
        if time is not None:
            schema = dataclasses.replace(schema, time=time)
        if command.by == "time" and schema.time is None:
            raise ValueError("--by time needs --time, the column of times")
        data = read_clicks(command.data, schema, skip_bad_lines=command.skip_bad_lines)
    print(f"{shown(command.data)}: {data!r}", file=sys.stderr)
    return data


def _check_split(command: flags.Split) -> None:
    """Raises ValueError if flags contradict each other."""
    command.check_effect()
    if command.user_features is not None and not command.histories:
        raise ValueError("--user-features is for histories: give --histories, too")
    wanted = {
        "last": ("n", "repeats") if command.histories else ("n",),
        "time": ("at", "fraction", "repeats"),
        "random": ("fraction", "seed"),
        "rows": ("fraction", "seed"),
        "items": ("fraction", "seed"),
    }[command.by]
    for name in ("n", "at", "fraction", "seed", "repeats"):
        if getattr(command, name) is not None and name not in wanted:
            needs = (
                " without --histories"
                if (name, command.by) == ("repeats", "last")
                else ""
            )
            raise ValueError(f"--{name} does not go with --by {command.by}{needs}")
    if command.by == "time":
        if (command.at is None) == (command.fraction is None):
            raise ValueError("--by time needs the time, --at, or a share, --fraction")
    elif command.by != "last" and command.fraction is None:
        raise ValueError(
            f"--by {command.by} needs --fraction, the share that stays in train"
        )


def _time(
    text: str, data: SparseDataset | SequenceDataset | ClickDataset
) -> int | float | str:
    """Converts text to a number if the times of the data are numbers; otherwise returns it."""
    if data.times is not None and data.times.dtype.kind == "M":
        return text
    return _number(text)


def _number(text: str) -> int | float | str:
    """Converts text to a number if it is one; otherwise returns it."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _format_of(path: pathlib.Path) -> flags.Format:
    """The format of a file by the suffix of its name."""
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".csv"):
        return "pairs"
    raise ValueError(
        f"{path}: the name does not tell the format; pass --to text, pairs, adjacency "
        "or parquet"
    )
