"""What each command of the command line does."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from sparsejax import optimizers, whole_files
from sparsejax.cli import main as cli
from sparsejax.cli import report as reports
from sparsejax.cli import run
from sparsejax.data import (
    DataError,
    ScannedDataset,
    SparseDataset,
    Split,
    read,
    scan_parquet,
    writers,
)
from sparsejax.data.assemble import Features
from sparsejax.data.columns import account_of
from sparsejax.data.files import lines_of, shown
from sparsejax.data.names import as_names, find_names, quoted
from sparsejax.data.vocabulary import popularity_ranks
from sparsejax.mesh import processes
from sparsejax.nn.config import NetworkConfig
from sparsejax.prediction import evaluate as evaluation
from sparsejax.prediction import recommend as recommendation
from sparsejax.prediction import recommendation_files
from sparsejax.prediction import vectors as vector_files
from sparsejax.prediction.export import export_predictor
from sparsejax.training import fit as training
from sparsejax.training import plan as planning
from sparsejax.training.checkpoint import fingerprint
from sparsejax.training.streaming import Stream


def train(flags: cli.Train) -> None:
    """`sparsejax train`."""
    check = functools.partial(run.check_folder, flags.run, resume=flags.resume)
    processes.in_first(check)
    new_writer = None if flags.tensorboard is None else _summary_writer()
    stopping = None
    if flags.patience is not None:
        if flags.validation is None:
            raise ValueError("--patience needs --validation, the data to stop on")
        stopping = training.EarlyStopping(
            metric=f"ndcg@{flags.k}", patience=flags.patience
        )
    network = _network(flags)
    heldout = validation = split = None
    if flags.chunk_rows is None:
        data = _read(flags.data, flags)
        indicator, chunks = data.matrix.data is None, [data.num_rows]
        if flags.validation is not None:
            split = _validation_split(flags, data)
            if split is None:
                heldout = _heldout(flags.validation, flags, data, flags.data)
            else:
                data, heldout = split.train, split.heldout.without_values()
                print(f"validation: {split}", file=sys.stderr)
            validation = _fingerprint(heldout, data)
    elif flags.validation is not None:
        raise ValueError("--validation needs all of the data; leave out --chunk-rows")
    else:
        if flags.columns.time is not None:
            raise ValueError("--time is for data in memory; leave out --chunk-rows")
        data = scan_parquet(
            flags.data,
            user=flags.columns.user,
            item=flags.columns.item,
            value=flags.columns.value,
            indicator=flags.columns.no_value,
            chunk_rows=flags.chunk_rows,
        )
        indicator, chunks = data.indicator, Stream(data, None, None).chunks
    training.check_seed(flags.seed)
    settings = run.Run(
        network=network,
        optimizer=_rule(flags, chunks),
        num_features=data.num_features,
        num_epochs=flags.epochs,
        batch_size=flags.batch_size,
        seed=flags.seed,
        indicator=indicator,
        data=shown(flags.data),
        data_fingerprint=(
            data.fingerprint()
            if isinstance(data, ScannedDataset)
            else fingerprint(data.matrix)
        ),
        vocabulary_fingerprint=fingerprint(data.feature_names),
        validation=validation,
        validation_split=None if split is None else flags.validation,
        k=flags.k,
        patience=flags.patience,
    )
    model, optimizer = settings.build()
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            run.begun(flags.run, settings, data.feature_names, resume=flags.resume)
        )
        writer = None
        if new_writer is not None and processes.is_first():
            writer = stack.enter_context(new_writer(flags.tensorboard))

        def log(step: int, entry: Mapping[str, float]) -> None:
            print_epoch(flags.epochs, step, entry)
            if writer is not None:
                for name, value in entry.items():
                    writer.add_scalar(name, value, step)

        print_summary(data, model)
        training.fit(
            model,
            optimizer,
            data,
            batch_size=flags.batch_size,
            fused=flags.fused,
            num_epochs=flags.epochs,
            seed=flags.seed,
            validation=heldout,
            k=flags.k,
            early_stopping=stopping,
            checkpoint_dir=checkpoints,
            checkpoint_seconds=flags.checkpoint_seconds,
            resume=flags.resume,
            log=log,
        )
    print(f"the model is in {flags.run}", file=sys.stderr)


def _summary_writer() -> Callable[..., Any]:
    """What makes a writer of TensorBoard's files."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard needs another package: pip install 'sparsejax[tensorboard]'"
        ) from None
    return SummaryWriter


def evaluate(flags: cli.Evaluate) -> None:
    """`sparsejax evaluate`."""
    if (flags.test is None) == (flags.fold_in is None):
        raise ValueError("name the TEST file, or hold out a part of TRAIN by --fold-in")
    settings, names = run.load_run(flags.run)
    model = run.restored_model(flags.run, settings)
    read_ = functools.partial(_read, flags=flags)
    valued = functools.partial(read_, indicator=settings.indicator)
    heldout = candidates = None
    popularity: Any = "inputs"
    if flags.test is None:
        if flags.history:
            raise ValueError(
                "--history is shown beside TRAIN; leave it out of --fold-in"
            )
        shown = valued(flags.train)  # in its own features until it is split
    else:
        train = valued(flags.train, features=names)
        more = (valued(path, features=names) for path in flags.history)
        shown, popularity = train.merge(*more), train
        files = " or ".join([flags.train, *flags.history])
        heldout = _heldout(flags.test, flags, shown, files)
    if flags.candidates is not None:
        candidates = read_(flags.candidates, features=names, indicator=True)
    if flags.popularity is not None:
        popularity = read_(flags.popularity, features=names, indicator=True)
    measured = evaluation.evaluate(
        model,
        shown,
        heldout,
        k=flags.k,
        fold_in=flags.fold_in,
        features=None if flags.fold_in is None else names,
        seed=flags.seed,
        exclude=None if flags.counting.keep_seen else "inputs",
        unknown=flags.counting.unknown,
        candidates=candidates,
        popularity=popularity,
    )
    print(table(measured))
    print(json.dumps(measured))


def predict(flags: cli.Predict) -> None:
    """`sparsejax predict`."""
    settings, names = run.load_run(flags.run)
    whole_files.check_writable(flags.out)
    model = run.restored_model(flags.run, settings)
    data = _read(flags.data, flags, features=names, indicator=settings.indicator)
    if flags.users is not None:
        data = _some_rows(data, flags.users)
    recommendation_files.check_recommendation_names(flags.out, data.row_names, names)
    exclude = data if flags.exclude_seen else None
    if flags.exclude is not None:
        unwanted = _read(flags.exclude, flags, features=names, indicator=True)
        seen = data.without_values()
        exclude = seen.merge(unwanted) if flags.exclude_seen else unwanted
    found = recommendation.recommend(model, data, flags.k, exclude=exclude)
    processes.in_first(
        lambda: recommendation_files.save_recommendations(
            flags.out, data.row_names, found, names
        )
    )


def export(flags: cli.Export) -> None:
    """`sparsejax export`."""
    settings, names = run.load_run(flags.run)
    whole_files.check_writable(flags.out)
    model = run.restored_model(flags.run, settings)
    export_predictor(
        model, flags.out, k=flags.k, names=names, batch_size=flags.batch_size
    )
    print(f"the predictor is in {flags.out}", file=sys.stderr)


def convert(flags: cli.Convert) -> None:
    """`sparsejax convert`."""
    to = flags.to or _format_of(flags.output)
    whole_files.check_writable(flags.output)
    features = None if flags.features is None else read(flags.features)
    data = _read(flags.input, flags, features=features)
    if to == "parquet":
        data.save(flags.output)
        return
    with whole_files.whole_text_file(flags.output) as file:
        match to:
            case "text":
                writers.write_text(file, data)
            case "adjacency":
                writers.write_adjacency(file, data)
            case "pairs":
                comma = ".csv" in flags.output.suffixes
                writers.write_pairs(file, data, delimiter="," if comma else "\t")


def split(flags: cli.Split) -> None:
    """`sparsejax split`."""
    _check_split(flags)
    whole_files.check_new(flags.out)
    data = _read(flags.data, flags)
    short = ""
    if flags.by == "last":
        n = 1 if flags.n is None else flags.n
        parts = _timed(data, flags.data).split_last(n)
        short = f", rows too short: {np.sum(np.diff(data.matrix.indptr) <= n):,}"
    elif flags.by == "time":
        at = None if flags.at is None else _time(flags.at, data)
        parts = _timed(data, flags.data).split_at(at, fraction=flags.fraction)
    else:
        assert flags.fraction is not None  # as was checked
        choose = data.split if flags.by == "random" else data.split_rows
        parts = choose(flags.fraction, seed=flags.seed or 0)
    with whole_files.whole_folder(flags.out) as folder:
        parts.train.save(folder / "train.parquet")
        parts.heldout.save(folder / "heldout.parquet")
    print(f"{parts}{short}", file=sys.stderr)


def _check_split(flags: cli.Split) -> None:
    """Raises ValueError for flags that do not go together."""
    wanted = {
        "last": ("n",),
        "time": ("at", "fraction"),
        "random": ("fraction", "seed"),
        "rows": ("fraction", "seed"),
    }[flags.by]
    for name in ("n", "at", "fraction", "seed"):
        if getattr(flags, name) is not None and name not in wanted:
            raise ValueError(f"--{name} does not go with --by {flags.by}")
    if flags.by == "time":
        if (flags.at is None) == (flags.fraction is None):
            raise ValueError("--by time needs the time, --at, or a share, --fraction")
    elif flags.by != "last" and flags.fraction is None:
        raise ValueError(
            f"--by {flags.by} needs --fraction, the share that stays in train"
        )


def report(flags: cli.Report) -> None:
    """`sparsejax report`."""
    if flags.test is not None and flags.train is None:
        raise ValueError("--test needs --train, what the model is shown of its rows")
    out = flags.run / "report.html" if flags.out is None else flags.out
    settings, names = run.load_run(flags.run)
    whole_files.check_writable(out)
    model = run.restored_model(flags.run, settings)
    progress = run.checkpoints_of(flags.run, settings).progress() or {}
    # Without data: by the popularity that the order of the vocabulary goes by.
    counts, shown, heldout, measured = -popularity_ranks(len(names)), None, None, None
    if flags.train is not None:
        shown = _read(flags.train, flags, features=names, indicator=settings.indicator)
        counts = np.bincount(shown.matrix.indices, minlength=len(names))
        if flags.test is not None:
            heldout = _heldout(flags.test, flags, shown, flags.train)
            measured = evaluation.evaluate(
                model,
                shown,
                heldout,
                k=flags.k,
                exclude=None if flags.counting.keep_seen else "inputs",
                unknown=flags.counting.unknown,
            )
    reports.write_report(
        out,
        model,
        progress.get("history", []),
        title=str(flags.run),
        measured=measured,
        examples=[] if shown is None else reports.examples_of(model, shown, heldout),
        similar=reports.similar_to_popular(model, names, counts),
        settings=settings.described(),
    )
    print(f"the report is in {out}", file=sys.stderr)


def vectors(flags: cli.Vectors) -> None:
    """`sparsejax vectors`."""
    vector_files.check_ending(flags.out)
    whole_files.check_writable(flags.out)
    settings, names = run.load_run(flags.run)
    model = run.restored_model(flags.run, settings)
    if flags.data is None:
        vector_files.save_vectors(flags.out, vector_files.item_vectors(model), names)
        return
    data = _read(flags.data, flags, features=names, indicator=settings.indicator)
    found = vector_files.user_vectors(model, data)
    vector_files.save_vectors(flags.out, found, data.row_names)


def similar(flags: cli.Similar) -> None:
    """`sparsejax similar`."""
    if not flags.items:
        raise ValueError(
            "name an ITEM behind the folder, as: sparsejax similar run/ tea"
        )
    settings, names = run.load_run(flags.run)
    model = run.restored_model(flags.run, settings)
    found = vector_files.similar_items(model, flags.items, flags.k, names=names)
    recommendation_files.write_recommendations(
        sys.stdout, as_names(flags.items), found, names
    )


def plan(flags: cli.Plan) -> bool:
    """`sparsejax plan`: whether it fits."""
    data, model = processes.axes_of(flags.mesh)
    if flags.compile and data * model > 1:
        _pretend_devices(data * model)
    planned = planning.plan(
        _network(flags),
        optimizers.get(flags.optimizer, learning_rate=1e-3),
        inputs=flags.items if flags.features is None else flags.features,
        outputs=None if flags.features is None else flags.items,
        rows=flags.rows,
        entries=flags.entries,
        target_entries=flags.target_entries,
        values=flags.values,
        batch_size=flags.batch_size,
        fused=flags.fused,
        data=data,
        model=model,
        memory=None if flags.memory is None else planning.read_bytes(flags.memory),
        compile=flags.compile,
    )
    if planned.fits is None:
        raise ValueError("the device here does not say its memory: pass --memory 141GB")
    print(planned.table())
    return planned.fits


def _pretend_devices(count: int) -> None:
    """Makes the CPU so many devices, unless JAX has begun already."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def print_summary(data: SparseDataset | ScannedDataset, model: nnx.Module) -> None:
    """Says on stderr what is trained on what."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    parameters = sum(leaf.size for leaf in leaves)
    print(
        f"{data.num_rows:,} rows, {data.num_features:,} features, "
        f"{data.num_entries:,} entries, {parameters:,} parameters",
        file=sys.stderr,
    )


def print_epoch(num_epochs: int, step: int, entry: Mapping[str, float]) -> None:
    """Says on stderr how an epoch went; `fit` calls it. A progress bar stays below."""
    shown = [name for name in entry if name.startswith(("recall@", "ndcg@"))]
    metrics = "".join(f"  {name} {entry[name]:.4f}" for name in shown)
    tqdm.write(
        f"epoch {entry['epoch']}/{num_epochs}  loss {entry['loss']:.5g}  "
        f"{entry['examples_per_second']:,.0f} examples/s{metrics}",
        file=sys.stderr,
    )


def table(measured: Mapping[str, float]) -> str:
    """Metrics as text, the model's beside those of the popularity baseline."""
    names = [name for name in measured if f"popularity_{name}" in measured]
    width = max(map(len, names))
    lines = [f"{'':{width}}  {'model':>10}  {'popularity':>10}"]
    for name in names:
        model, popularity = measured[name], measured[f"popularity_{name}"]
        lines.append(f"{name:{width}}  {model:>10.4f}  {popularity:>10.4f}")
    return "\n".join([*lines, reports.means_over(measured)])


def _network(flags: cli.Train | cli.Plan) -> NetworkConfig:
    if flags.config is None:
        return NetworkConfig.autoencoder(**vars(flags.network))
    return NetworkConfig.load(flags.config)


def _rule(flags: cli.Train, chunks: Sequence[int]) -> optimizers.Rule:
    """The optimizer's rule; a schedule counts the steps that `fit` does.

    Args:
      flags: of the command.
      chunks: rows that it trains on at a time, all of which are an epoch.
    """
    options: dict[str, Any] = {"learning_rate": flags.learning_rate}
    if flags.weight_decay is not None:
        options["weight_decay"] = flags.weight_decay
    optimizers.get(flags.optimizer, **options)  # checks them
    epoch = sum(math.ceil(rows / max(flags.batch_size, 1)) for rows in chunks)
    peak, decay = flags.learning_rate, flags.epochs * epoch
    is_number = 0 <= flags.warmup_epochs < math.inf
    warmup = round(flags.warmup_epochs * epoch) if is_number else 0
    if not is_number or (flags.cosine_decay and warmup >= decay):
        raise ValueError(
            f"warmup_epochs is {flags.warmup_epochs}; it must be 0 or more, and with "
            f"--cosine-decay below the {flags.epochs} epochs"
        )
    match warmup > 0, flags.cosine_decay:
        case True, True:
            options["learning_rate"] = optimizers.schedule(
                "warmup_cosine_decay_schedule",
                init_value=0.0,
                peak_value=peak,
                warmup_steps=warmup,
                decay_steps=decay,
            )
        case True, False:
            options["learning_rate"] = optimizers.schedule(
                "warmup_constant_schedule",
                init_value=0.0,
                peak_value=peak,
                warmup_steps=warmup,
            )
        case False, True:
            options["learning_rate"] = optimizers.schedule(
                "cosine_decay_schedule", init_value=peak, decay_steps=decay
            )
    return optimizers.get(flags.optimizer, **options)


def _read(
    path: str,
    flags: cli.Reading,
    *,
    features: Features = None,
    indicator: bool = False,
) -> SparseDataset:
    """Reads a file of a command, and says on stderr what was read."""
    data = read(
        path,
        format=flags.format,
        user=flags.columns.user,
        item=flags.columns.item,
        value=flags.columns.value,
        time=flags.columns.time,
        delimiter=flags.columns.delimiter,
        features=features,
        indicator=indicator or flags.columns.no_value,
    )
    account = str(data.columns or account_of(data.matrix))
    print(f"{shown(path)}: {cli.as_flags(account)}", file=sys.stderr)
    return data


def _heldout(
    path: str,
    flags: cli.Reading,
    data: SparseDataset,
    data_path: str,
) -> SparseDataset:
    """Held-out entries of rows of `data`; those of other rows are left out, aloud."""
    heldout = _read(path, flags, features=data, indicator=True)
    unknown = find_names(heldout.row_names, data.row_names) < 0
    if unknown.any():
        names = heldout.row_names[unknown]
        text = (
            f"{path}: {names.size:,} of {heldout.num_rows:,} rows are not in "
            f"{data_path}: {quoted(names)}"
        )
        if unknown.all():
            raise DataError(text)
        warnings.warn(f"{text}; they are left out", stacklevel=2)
        heldout = heldout.align_rows(heldout.row_names[~unknown])
    return heldout


def _some_rows(data: SparseDataset, users: str) -> SparseDataset:
    """The rows that `--users` names: a file's lines, or names with commas between."""
    if is_file := os.path.isfile(users):
        names = lines_of(users)
    else:
        names = users.split(",")
    try:
        return data.align_rows(dict.fromkeys(names))
    except ValueError as error:
        hint = "" if is_file else f"; there is no file of this name, {users}, either"
        raise ValueError(f"--users: {error}{hint}") from error


def _validation_split(flags: cli.Train, data: SparseDataset) -> Split | None:
    """What `--validation` holds out of DATA; None if it names a file."""
    text = flags.validation or ""
    if text == "last":
        return _timed(data, flags.data).split_last()
    if not re.fullmatch(r"[-+]?\d*\.?\d+", text):
        return None
    if not 0 < float(text) < 1:
        raise ValueError(
            f"--validation {text}: a share must lie in (0, 1); a file of this name is "
            f"./{text}"
        )
    # Not by --seed: models of several seeds are compared on the same entries.
    return data.split(1 - float(text), seed=0)


def _timed(data: SparseDataset, path: str) -> SparseDataset:
    """The data set, if it has times."""
    if data.times is None:
        raise DataError.at(path, "has no times; name their column: --time COLUMN")
    return data


def _time(text: str, data: SparseDataset) -> int | float | str:
    """A number where times are numbers, else as it is."""
    if data.times is not None and data.times.dtype.kind == "M":
        return text
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _fingerprint(heldout: SparseDataset, data: SparseDataset) -> str:
    """Of the held-out entries, each in its row of the data."""
    rows = np.sort(find_names(heldout.row_names, data.row_names))
    aligned = heldout.align_rows(data.row_names[rows])
    return fingerprint(aligned.matrix, rows)


def _format_of(path: pathlib.Path) -> cli.Format:
    """The format that a file's name asks for."""
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".csv"):
        return "pairs"
    raise ValueError(
        f"{path}: the name does not tell the format; pass --to text, pairs, adjacency "
        "or parquet"
    )
