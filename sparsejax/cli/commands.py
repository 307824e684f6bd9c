"""What each command does, except `train`, `plan`, `tune`, `demo` and `predict --parts`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import sys
from typing import Any

import numpy as np

from sparsejax import whole_files
from sparsejax.baselines.models import BASELINES
from sparsejax.cli import flags, run
from sparsejax.cli import report as reports
from sparsejax.cli.flags import Reading
from sparsejax.cli.printing import print_metrics
from sparsejax.cli.reading import (
    meanwhile,
    read_features,
    read_file,
    read_heldout,
    read_histories,
    with_times,
)
from sparsejax.data import SequenceDataset, SparseDataset, preparation, writers
from sparsejax.data.files import lines_of, shown
from sparsejax.data.names import Names, as_names, find_names, quoted
from sparsejax.data.vocabulary import popularity_ranks
from sparsejax.engine.rank import recommendation_files
from sparsejax.engine.rank.evaluation import Evaluation
from sparsejax.kinds.items.evaluation import prepared_for
from sparsejax.mesh import processes
from sparsejax.verbs import evaluate as evaluation
from sparsejax.verbs import recommend as recommendation
from sparsejax.verbs import vectors as vector_files
from sparsejax.verbs.export import export_predictor


def evaluate(command: flags.Evaluate) -> None:
    """`sparsejax evaluate`."""
    if (command.test is None) == (command.fold_in is None):
        raise ValueError("name the TEST file, or hold out a part of TRAIN by --fold-in")
    if command.test is None and command.history:
        raise ValueError("--history goes with TEST; leave it out with --fold-in")
    if command.baselines and command.test is None and command.popularity is None:
        raise ValueError(
            "--baselines with --fold-in needs --popularity, the file of the interactions "
            "that the model was trained on"
        )
    settings, names = run.load_run(command.run)
    if settings.of_histories:
        _evaluate_histories(command, settings, names)
        return
    data = meanwhile(lambda: _data_to_evaluate(command, settings, names))
    model = run.restored_model(command.run, settings)
    given = data()
    prepared = prepared_for(
        **given,
        k=command.k,
        fold_in=command.fold_in,
        features=None if command.fold_in is None else names,
        seed=command.seed,
        exclude=None if command.counting.keep_seen else "inputs",
        unknown=command.counting.unknown,
        unknown_users=command.counting.unknown_users,
    )
    measured = prepared.run(model)
    if command.baselines:
        measured = _of_baselines(prepared, given["popularity"]) | measured
    print_metrics(measured)
    print(json.dumps(measured))


def _evaluate_histories(
    command: flags.Evaluate, settings: run.Run, names: Names
) -> None:
    """`sparsejax evaluate` of a model of histories."""
    unused = {
        "--fold-in": command.fold_in is not None,
        "--seed": command.seed is not None,
        "--history": bool(command.history),
        "--candidates": command.candidates is not None,
        "--baselines": command.baselines,
        "--popularity": command.popularity is not None,
    }
    for flag, given in unused.items():
        if given:
            raise ValueError(f"{flag} is of no use for a model of histories")
    model = run.restored_model(command.run, settings)
    train = read_histories(command.train, command, features=names)
    assert command.test is not None  # as was checked
    measured = evaluation.evaluate(
        model,
        train,
        read_heldout(command.test, command, train, command.train),
        k=command.k,
        exclude=None if command.counting.keep_seen else "inputs",
        unknown=command.counting.unknown,
        unknown_users=command.counting.unknown_users,
    )
    print_metrics(measured)
    print(json.dumps(measured))


def _of_baselines(prepared: Evaluation, train: SparseDataset) -> dict[str, float]:
    """The metrics of each baseline, with its name before that of the metric."""
    measured = {}
    for name, baseline in BASELINES.items():
        try:
            model = baseline(train)
        except MemoryError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        found = prepared.run(model)
        measured |= {
            f"{name}_{n}": found[n] for n in found if f"popularity_{n}" in found
        }
    return measured


def _data_to_evaluate(
    command: flags.Evaluate, settings: run.Run, names: Names
) -> dict[str, Any]:
    """What is read from files, as arguments of `evaluate`."""
    read_ = functools.partial(read_file, command=command)
    valued = functools.partial(read_, indicator=settings.indicator)
    given: dict[str, Any] = {}
    if command.test is None:
        # With its own features until it is split.
        given["inputs"] = valued(command.train)
    else:
        train = valued(command.train, features=names)
        more = (valued(path, features=names) for path in command.history)
        files = " or ".join([command.train, *command.history])
        given["inputs"] = shown = train.merge(*more)
        given["heldout"] = read_heldout(command.test, command, shown, files)
        given["popularity"] = train
    for name, path in (
        ("candidates", command.candidates),
        ("popularity", command.popularity),
    ):
        if path is not None:
            given[name] = read_(path, features=names, indicator=True)
    return given


def predict(command: flags.Predict) -> None:
    """`sparsejax predict` without `--parts`."""
    if command.part is not None or command.finish:
        raise ValueError("--part and --finish go with --parts, the number of all parts")
    if command.workers is not None:
        raise ValueError("--workers goes with --parts, the number of all parts")
    settings, names = run.load_run(command.run)
    whole_files.check_writable(command.out)
    reading = meanwhile(lambda: _read_shown(command.data, command, settings, names))
    model = run.restored_model(command.run, settings)
    data = reading()
    if command.users is not None:
        data = _some_rows(data, command.users)
    recommendation_files.check_recommendation_names(command.out, data.row_names, names)
    exclude = data if command.exclude_seen else None
    if command.exclude is not None:
        if isinstance(data, SequenceDataset):
            unwanted = read_histories(command.exclude, command, features=names)
            unwanted, seen = unwanted.to_sparse(), data.to_sparse()
        else:
            unwanted = read_file(
                command.exclude, command, features=names, indicator=True
            )
            seen = data.without_values()
        exclude = seen.merge(unwanted) if command.exclude_seen else unwanted
    found = recommendation.recommend(model, data, command.k, exclude=exclude)
    processes.in_first(
        lambda: recommendation_files.save_recommendations(
            command.out, data.row_names, found, names
        )
    )


def _read_shown(
    path: str, command: Reading, settings: run.Run, names: Names
) -> SparseDataset | SequenceDataset:
    """Reads what a model is shown."""
    if settings.of_histories:
        return read_histories(path, command, features=names)
    return read_file(path, command, features=names, indicator=settings.indicator)


def export(command: flags.Export) -> None:
    """`sparsejax export`."""
    settings, names = run.load_run(command.run)
    whole_files.check_writable(command.out)
    model = run.restored_model(command.run, settings)
    if getattr(model, "uses_times", False):
        print(
            "note: the predictor recommends without times; export_predictor in Python, "
            "with the data as names, makes one that reads them",
            file=sys.stderr,
        )
    export_predictor(
        model, command.out, k=command.k, names=names, batch_size=command.batch_size
    )
    print(f"the predictor is in {command.out}", file=sys.stderr)


def convert(command: flags.Convert) -> None:
    """`sparsejax convert`."""
    to = command.to or _format_of(command.output)
    whole_files.check_writable(command.output)
    features = None if command.features is None else read_features(command.features)
    data = read_file(command.input, command, features=features)
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
    if command.columns.no_time:
        raise ValueError(
            "--no-time is of no use for prepare, which reads times only if they are needed"
        )
    features = None if command.features is None else read_features(command.features)
    time = None if command.split_time is None else _number(command.split_time)
    manifest = preparation.prepare(
        command.events,
        command.out,
        user=command.columns.user,
        item=command.columns.item,
        value=command.columns.value,
        time=command.columns.time,
        format=command.format,
        delimiter=command.columns.delimiter,
        duplicates=command.duplicates,
        min_user=command.min_user,
        min_item=command.min_item,
        features=features,
        indicator=command.columns.no_value,
        split_time=time,
        split_last=command.split_last,
        split_fraction=command.split_fraction,
        seed=command.seed,
        skip_bad=command.skip_bad,
        memory=command.memory,
    )
    print(f"{shown(command.out)}: {manifest}", file=sys.stderr)


def split(command: flags.Split) -> None:
    """`sparsejax split`."""
    _check_split(command)
    files = {"train": "train.parquet", "heldout": "heldout.parquet"}
    whole_files.check_new(command.out, files.values())
    data: SparseDataset | SequenceDataset
    if command.histories:
        data = read_histories(command.data, command)
        indptr = data.indptr
    else:
        data = read_file(command.data, command)
        indptr = data.matrix.indptr
        if command.by in ("last", "time"):
            with_times(data, command.data)
    short = ""
    if command.by == "last":
        n = 1 if command.n is None else command.n
        parts = data.split_last(n)
        short = f", rows too short: {np.sum(np.diff(indptr) <= n):,}"
    elif command.by == "time":
        at = None if command.at is None else _time(command.at, data)
        parts = data.split_at(at, fraction=command.fraction)
    else:
        assert command.fraction is not None  # as was checked
        choose = data.split if command.by == "random" else data.split_rows
        parts = choose(command.fraction, seed=command.seed or 0)
    with whole_files.whole_folder(command.out, names=files.values()) as folder:
        parts.train.save(folder / files["train"])
        parts.heldout.save(folder / files["heldout"])
    print(f"{parts}{short}", file=sys.stderr)


def report(command: flags.Report) -> None:
    """`sparsejax report`."""
    if command.test is not None and command.train is None:
        raise ValueError(
            "--test needs --train, the file of the interactions that the model is shown"
        )
    out = command.run / "report.html" if command.out is None else command.out
    settings, names = run.load_run(command.run)
    whole_files.check_writable(out)
    model = run.restored_model(command.run, settings)
    progress = run.checkpoints_of(command.run, settings).progress() or {}
    # Without data: by the order of the vocabulary, which popularity decided.
    counts, shown, heldout, measured = -popularity_ranks(len(names)), None, None, None
    if command.train is not None:
        shown = _read_shown(command.train, command, settings, names)
        if isinstance(shown, SequenceDataset):
            indices = shown.indices
        else:
            indices = shown.matrix.indices
        counts = np.bincount(indices, minlength=len(names))
        if command.test is not None:
            heldout = read_heldout(command.test, command, shown, command.train)
            measured = evaluation.evaluate(
                model,
                shown,
                heldout,
                k=command.k,
                exclude=None if command.counting.keep_seen else "inputs",
                unknown=command.counting.unknown,
                unknown_users=command.counting.unknown_users,
            )
    reports.write_report(
        out,
        model,
        progress.get("history", []),
        title=str(command.run),
        measured=measured,
        examples=[]
        if shown is None
        else reports.examples_of(
            model, shown, heldout, keep_seen=command.counting.keep_seen
        ),
        similar=reports.similar_to_popular(model, names, counts),
        settings=settings.described(),
    )
    print(f"the report is in {out}", file=sys.stderr)


def vectors(command: flags.Vectors) -> None:
    """`sparsejax vectors`."""
    vector_files.check_ending(command.out)
    whole_files.check_writable(command.out)
    settings, names = run.load_run(command.run)
    model = run.restored_model(command.run, settings)
    if command.data is None:
        vector_files.save_vectors(command.out, vector_files.item_vectors(model), names)
        return
    if settings.of_histories:
        raise NotImplementedError(
            "--data: a model of histories has vectors of items only; leave it out"
        )
    data = read_file(
        command.data, command, features=names, indicator=settings.indicator
    )
    found = vector_files.user_vectors(model, data)
    vector_files.save_vectors(command.out, found, data.row_names)


def similar(command: flags.Similar) -> None:
    """`sparsejax similar`."""
    if not command.items:
        raise ValueError(
            "name an ITEM after the folder, for example: sparsejax similar run/ tea"
        )
    settings, names = run.load_run(command.run)
    model = run.restored_model(command.run, settings)
    found = vector_files.similar_items(model, command.items, command.k, names=names)
    recommendation_files.write_recommendations(
        sys.stdout, as_names(command.items), found, names
    )


def _some_rows(
    data: SparseDataset | SequenceDataset, users: str
) -> SparseDataset | SequenceDataset:
    """The rows that `--users` names: the lines of a file, or names between commas."""
    if is_file := os.path.isfile(users):
        names = lines_of(users)
    else:
        names = users.split(",")
    wanted = as_names(dict.fromkeys(names))
    unknown = wanted[find_names(wanted, data.row_names) < 0]
    if unknown.size:
        hint = "" if is_file else f"; there is no file called {users} either"
        raise ValueError(
            f"--users: {unknown.size:,} of {wanted.size:,} names are no users of DATA: "
            f"{quoted(unknown)}; leave them out{hint}"
        )
    return data.align_rows(wanted)


def _check_split(command: flags.Split) -> None:
    """Raises ValueError for flags that do not go together."""
    wanted = {
        "last": ("n",),
        "time": ("at", "fraction"),
        "random": ("fraction", "seed"),
        "rows": ("fraction", "seed"),
    }[command.by]
    for name in ("n", "at", "fraction", "seed"):
        if getattr(command, name) is not None and name not in wanted:
            raise ValueError(f"--{name} does not go with --by {command.by}")
    if command.by == "time":
        if (command.at is None) == (command.fraction is None):
            raise ValueError("--by time needs the time, --at, or a share, --fraction")
    elif command.by != "last" and command.fraction is None:
        raise ValueError(
            f"--by {command.by} needs --fraction, the share that stays in train"
        )


def _time(text: str, data: SparseDataset | SequenceDataset) -> int | float | str:
    """The time as a number if the times of the data are numbers, else as it is."""
    if data.times is not None and data.times.dtype.kind == "M":
        return text
    return _number(text)


def _number(text: str) -> int | float | str:
    """The number that the text is, or the text."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _format_of(path: pathlib.Path) -> flags.Format:
    """The format that the name of a file says."""
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".csv"):
        return "pairs"
    raise ValueError(
        f"{path}: the name does not tell the format; pass --to text, pairs, adjacency "
        "or parquet"
    )
