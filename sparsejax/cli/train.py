"""What `sparsejax train` and `sparsejax plan` do."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sparsejax import codec, optimizers
from sparsejax.cli import flags, linear_parts, printing, run
from sparsejax.cli.reading import (
    meanwhile,
    read_file,
    read_heldout,
    read_histories,
    time_column,
    with_times,
)
from sparsejax.data import (
    ScannedDataset,
    ScannedSequences,
    SequenceDataset,
    SequenceSplit,
    SparseDataset,
    Split,
    scan_parquet,
    scan_sequences,
)
from sparsejax.data.files import shown
from sparsejax.data.names import Names, find_names
from sparsejax.data.scan_tables import chunk_ends
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.engine.train.dispatch import check_seed
from sparsejax.engine.train.progress import EarlyStopping
from sparsejax.engine.train.streaming import Stream
from sparsejax.kinds.histories.footprint import assumed_lengths
from sparsejax.kinds.items.job import ScannedItems
from sparsejax.kinds.kind import Defaults, kind_of
from sparsejax.mesh import processes
from sparsejax.nn.config import LinearConfig, NetworkConfig, temperature_for
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sequence.config import SequenceConfig
from sparsejax.verbs import plan as planning
from sparsejax.verbs.fit import fit
from sparsejax.verbs.recipe import (
    LEARNING_RATE,
    learning_rate,
    steps_of_epoch,
)

Log = Callable[[int, Mapping[str, float]], None]


def train(command: flags.Train) -> None:
    """`sparsejax train`."""
    check = functools.partial(run.check_folder, command.run, resume=command.resume)
    processes.in_first(check)
    new_writer = None if command.tensorboard is None else _summary_writer()
    stopping = _early_stopping(command)
    network = config_of(command)
    of_histories = isinstance(network, SequenceConfig)
    if command.chunk_rows is not None:
        source = _scanned(command, of_histories=of_histories)
    else:
        source = whole(command, of_histories=of_histories)
    network, chosen = suited(network, command, source)
    if chosen:
        print(chosen, file=sys.stderr)
    check_seed(command.seed)
    settings = settings_of(command, network, source)
    restored = command.resume and run.has_checkpoints(command.run)
    if command.origin is None or restored:
        keeps = command.compilation.compilation_cache
        linear_part = None if restored else linear_part_of(settings, source, keep=keeps)
        if linear_part is not None:  # computed while the first program is compiled
            linear_part = meanwhile(linear_part)
        model, optimizer = settings.build(linear_part)
    else:
        model, optimizer = _continued(command, settings, source)
    features = source.data.feature_names
    with (
        run.begun(
            command.run, settings, features, resume=command.resume
        ) as checkpoints,
        _logging(command, settings.num_epochs, new_writer) as log,
    ):
        printing.print_summary(source.data, model)
        fit(
            model,
            optimizer,
            source.data,
            batch_size=settings.batch_size,
            fused=command.fused,
            deterministic=command.deterministic,
            num_epochs=settings.num_epochs,
            seed=command.seed,
            validation=source.heldout,
            k=None if source.heldout is None else command.k,
            early_stopping=stopping,
            checkpoint_dir=checkpoints,
            checkpoint_seconds=command.checkpoint_seconds,
            resume=command.resume,
            log=log,
        )
    print(f"the model is in {command.run}", file=sys.stderr)


def plan(command: flags.Plan) -> bool:
    """`sparsejax plan`: whether it fits."""
    data, model = processes.axes_of(command.mesh)
    if command.compile and data * model > 1:
        _pretend_devices(data * model)
    memory = command.memory
    network = config_of(command)
    defaults = kind_of(network).defaults
    if isinstance(network, SequenceConfig):
        if command.features is not None:
            raise ValueError(
                "the targets of histories are their own items; leave out --features"
            )
        if command.config is None:
            lengths = assumed_lengths(command.rows, command.entries)
            network = network.suited_to_lengths(lengths)
            print(f"max_length {network.max_length}", file=sys.stderr)
    elif command.features is None and _chooses(command, "linear"):
        sizes = command.rows, command.items, command.entries
        linear, _ = LinearConfig.for_data(*sizes)
        network = dataclasses.replace(network, linear=linear)
    name, options = _rule(command, defaults)
    batch_size = command.batch_size
    planned = planning.plan(
        network,
        optimizers.get(name, learning_rate=LEARNING_RATE, **options),
        inputs=command.items if command.features is None else command.features,
        outputs=None if command.features is None else command.items,
        rows=command.rows,
        entries=command.entries,
        target_entries=command.target_entries,
        values=command.values,
        times=command.times,
        batch_size=defaults.batch_size if batch_size is None else batch_size,
        fused=command.fused,
        data=data,
        model=model,
        memory=None if memory is None else planning.read_bytes(memory),
        compile=command.compile,
    )
    if planned.fits is None:
        raise ValueError("the device here does not say its memory: pass --memory 141GB")
    print(planned.table())
    return planned.fits


def config_of(command: flags.Train | flags.Plan) -> NetworkConfig | SequenceConfig:
    """The network that a file or the flags describe; without a linear part and a
    temperature that depend on the data.
    """
    config, negatives = _described(command), command.negatives
    if isinstance(config, SequenceConfig):
        # Of a run that is continued, the loss is that of the flags.
        if negatives is not None or _origin_of(command) is not None:
            config = dataclasses.replace(config, negatives=negatives)
    elif negatives is not None:
        raise ValueError("--negatives is for models of histories; leave it out")
    return config


def _described(command: flags.Train | flags.Plan) -> NetworkConfig | SequenceConfig:
    model, origin = command.kind, _origin_of(command)
    if command.config is not None:
        config = _load_config(command.config)
        found = getattr(config, "model", "autoencoder")
        if model not in (None, found):
            raise ValueError(f"--model {model}: {command.config} describes {found}")
        return config
    if origin is not None:
        return run.load_run(origin)[0].network
    if model not in (None, "autoencoder"):
        return SequenceConfig.from_json({"version": 1, "model": model})
    options, rank = dict(vars(command.network)), command.network.linear
    options["linear"] = LinearConfig(rank=rank) if isinstance(rank, int) else None
    if options["temperature"] == "auto":
        del options["temperature"]
    return NetworkConfig.autoencoder(**options)


def _origin_of(command: flags.Train | flags.Plan) -> pathlib.Path | None:
    return command.origin if isinstance(command, flags.Train) else None


def _load_config(path: pathlib.Path) -> NetworkConfig | SequenceConfig:
    """Reads a JSON file. Errors name the file."""
    try:
        return run.config_of(codec.parse(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def suited(
    network: NetworkConfig | SequenceConfig, command: flags.Train, source: Source
) -> tuple[NetworkConfig | SequenceConfig, str]:
    """The network as it suits the data, and what to say about it."""
    if isinstance(network, SequenceConfig):
        described = command.config is not None or command.origin is not None
        if described or not isinstance(source.data, SequenceDataset):
            return network, ""
        network = network.suited_to(source.data)
        return network, f"max_length {network.max_length}"
    data, said = source.data, []
    if _chooses(command, "temperature"):
        temperature, why = temperature_for(data.num_features)
        network = network.with_temperature(temperature)
        said.append(why)
    if _chooses(command, "linear"):
        if isinstance(data, ScannedDataset):
            why = "no linear part: it needs all of the data in memory"
        else:
            sizes = data.num_rows, data.num_features, data.num_entries
            linear, why = LinearConfig.for_data(*sizes)
            network = dataclasses.replace(network, linear=linear)
        said.append(why)
    return network, "\n".join(said)


def _chooses(command: flags.Train | flags.Plan, flag: str) -> bool:
    """Whether this setting of the network depends on the data."""
    if _origin_of(command) is not None:
        return False
    return command.config is None and getattr(command.network, flag) == "auto"


def rule_of(
    command: flags.Train, defaults: Defaults, steps: int, epochs: int
) -> optimizers.Rule:
    """The optimizer's rule. A schedule counts the steps that `fit` does.

    Args:
      command: the flags.
      defaults: for what the flags do not say.
      steps: of an epoch.
      epochs: number of epochs.

    Raises:
      ValueError: the optimizer does not take these options.
    """
    (name, options), peak = _rule(command, defaults), command.learning_rate
    if command.weight_decay is not None:
        options["weight_decay"] = command.weight_decay
    peak = LEARNING_RATE if peak is None else peak
    optimizers.get(name, learning_rate=peak, **options)  # checks them
    decays = command.decay == "cosine"
    is_number = 0 <= command.warmup_epochs < math.inf
    warmup = round(command.warmup_epochs * steps) if is_number else 0
    if not is_number or (decays and warmup and warmup >= epochs * steps):
        raise ValueError(
            f"--warmup-epochs is {command.warmup_epochs}; it must be 0 or more, and with "
            f"--decay cosine below the {epochs} epochs"
        )
    rate = learning_rate(peak, epochs * steps, warmup=warmup, decay=decays)
    return optimizers.get(name, learning_rate=rate, **options)


def _rule(
    command: flags.Train | flags.Plan, defaults: Defaults
) -> tuple[str, dict[str, Any]]:
    """Name and options of the optimizer that the flags name, or of the default."""
    name = command.optimizer or defaults.optimizer
    return name, dict(defaults.options) if name == defaults.optimizer else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The data to train on.

    Attributes:
      data: the rows, in memory or on disk; or histories.
      chunks: number of rows in each chunk of the data.
      indicator: whether the data has no values, or its values are ignored.
      heldout: entries to rank after each epoch, if there are any.
      validation: `fingerprint` of the held-out entries, each in its row.
      split: how the held-out entries were chosen from the data, unless a file has them.
    """

    data: SparseDataset | ScannedDataset | SequenceDataset | ScannedSequences
    chunks: Sequence[int]
    indicator: bool
    heldout: SparseDataset | SequenceDataset | None = None
    validation: str | None = None
    split: str | None = None


def whole(command: flags.Train, *, of_histories: bool = False) -> Source:
    """Reads all of the data and the held-out entries."""
    if of_histories:
        return _whole_histories(command)
    data = read_file(command.data, command)
    if command.origin is not None:
        data = data.append_features(run.load_run(command.origin)[1])
    heldout = validation = split = None
    indicator, chunks = data.matrix.data is None, [data.num_rows]
    if command.validation is not None:
        parts = _validation_split(command, data)
        if parts is None:
            heldout = read_heldout(command.validation, command, data, command.data)
        else:
            assert isinstance(parts, Split)
            data, heldout = parts.train, parts.heldout.without_values()
            split = command.validation
            print(f"validation: {parts}", file=sys.stderr)
        validation = _fingerprint_of(heldout, data.row_names)
    return Source(
        data=data,
        chunks=chunks,
        indicator=indicator,
        heldout=heldout,
        validation=validation,
        split=split,
    )


def _whole_histories(command: flags.Train) -> Source:
    """`whole`, for a model of histories."""
    data = read_histories(command.data, command)
    if command.origin is not None:
        data = data.append_features(run.load_run(command.origin)[1])
    heldout = validation = split = None
    if command.validation is not None:
        parts = _validation_split(command, data)
        if parts is None:
            heldout = read_heldout(command.validation, command, data, command.data)
        else:
            assert isinstance(parts, SequenceSplit)
            data, heldout = parts
            split = command.validation
            print(f"validation: {parts}", file=sys.stderr)
        validation = _fingerprint_of(heldout.to_sparse(), data.row_names)
    return Source(
        data=data,
        chunks=[int(np.sum(np.diff(data.indptr) > 1))],  # as `fit` has them
        indicator=True,
        heldout=heldout,
        validation=validation,
        split=split,
    )


def _fingerprint_of(heldout: SparseDataset, row_names: Names) -> str:
    """`fingerprint` of the held-out entries of known rows, each in its row."""
    found = find_names(heldout.row_names, row_names)
    rows = np.sort(found[found >= 0])
    aligned = heldout.align_rows(row_names[rows])
    left_out = [] if aligned.left_out is None else [aligned.left_out]
    return fingerprint(aligned.matrix, rows, *left_out)


def _validation_split(
    command: flags.Train, data: SparseDataset | SequenceDataset
) -> Split | SequenceSplit | None:
    """What `--validation` holds out of DATA; None if it names a file."""
    text = command.validation or ""
    if text == "last":
        if isinstance(data, SequenceDataset):
            return data.split_last()
        return with_times(data, command.data).split_last()
    if not re.fullmatch(r"[-+]?\d*\.?\d+", text):
        return None
    if not 0 < float(text) < 1:
        raise ValueError(
            f"--validation {text}: a share must be between 0 and 1; a file of this name "
            f"is written ./{text}"
        )
    # Not --seed, so that models of several seeds are compared on the same entries.
    return data.split(1 - float(text), seed=0)


def _scanned(command: flags.Train, *, of_histories: bool) -> Source:
    """Scans the file of data that is read in chunks while training."""
    if command.validation is not None:
        raise ValueError("--validation needs all of the data; leave out --chunk-rows")
    if command.origin is not None:
        raise ValueError("--from needs all of the data; leave out --chunk-rows")
    if of_histories:
        histories = scan_sequences(
            command.data,
            user=command.columns.user,
            item=command.columns.item,
            time=time_column(command),
            chunk_rows=command.chunk_rows,
        )
        ends = chunk_ends(histories.groups, command.chunk_rows or 1)
        return Source(
            data=histories, chunks=np.diff([0, *ends]).tolist(), indicator=True
        )
    if command.columns.time is not None or command.columns.no_time:
        raise ValueError(
            "--time and --no-time are for data in memory; leave out --chunk-rows"
        )
    assert command.chunk_rows is not None
    data = scan_parquet(
        command.data,
        user=command.columns.user,
        item=command.columns.item,
        value=command.columns.value,
        indicator=command.columns.no_value,
        chunk_rows=command.chunk_rows,
    )
    chunks = Stream(ScannedItems(data), None).chunks
    return Source(data=data, chunks=chunks, indicator=data.indicator)


def settings_of(
    command: flags.Train, network: NetworkConfig | SequenceConfig, source: Source
) -> run.Run:
    """What `run.json` will hold."""
    data = source.data
    if isinstance(data, ScannedDataset | ScannedSequences):
        data_fingerprint = data.fingerprint()
    elif isinstance(data, SequenceDataset):
        times = [] if data.times is None else [data.times.view(np.int64)]
        data_fingerprint = fingerprint(data.indptr, data.indices, *times)
    else:
        data_fingerprint = fingerprint(data.matrix)
    defaults = kind_of(network).defaults
    epochs, batch_size = command.epochs, command.batch_size
    if batch_size is None:
        batch_size = defaults.batch_size
    steps = steps_of_epoch(source.chunks, batch_size)
    if epochs is None:
        epochs = defaults.num_epochs(steps)
    return run.Run(
        network=network,
        optimizer=rule_of(command, defaults, steps, epochs),
        num_features=data.num_features,
        num_epochs=epochs,
        batch_size=batch_size,
        seed=command.seed,
        deterministic=command.deterministic,
        indicator=source.indicator,
        data=shown(command.data),
        data_fingerprint=data_fingerprint,
        vocabulary_fingerprint=fingerprint(data.feature_names),
        validation=source.validation,
        validation_split=source.split,
        k=command.k,
        patience=command.patience,
        origin=None if command.origin is None else str(command.origin),
    )


def linear_part_of(
    settings: run.Run, source: Source, *, keep: bool
) -> Callable[[], linear_parts.Arrays] | None:
    """What finds or computes the linear part; None if the network has none."""
    network = settings.network
    if isinstance(network, SequenceConfig) or network.linear is None:
        return None
    return functools.partial(
        linear_parts.linear_part,
        source.data,
        network.linear,
        fingerprint=settings.data_fingerprint,
        keep=keep,
    )


def _continued(
    command: flags.Train, settings: run.Run, source: Source
) -> tuple[Any, Optimizer]:
    """The model of `--from` with the items that are new, and the optimizer."""
    assert command.origin is not None
    before, _ = run.load_run(command.origin)
    model, optimizer, kept = run.continued(
        command.origin, before, settings, source.data
    )
    added = settings.num_features - before.num_features
    what = "goes on with its state" if kept else "begins anew"
    print(
        f"{command.origin}: {before.num_features:,} items are known, {added:,} are new; "
        f"the optimizer {what}",
        file=sys.stderr,
    )
    return model, optimizer


def _early_stopping(command: flags.Train) -> EarlyStopping | None:
    if command.patience is None:
        return None
    if command.validation is None:
        raise ValueError("--patience needs --validation, the data to stop on")
    return EarlyStopping(metric=f"ndcg@{command.k}", patience=command.patience)


def _summary_writer() -> Callable[..., Any]:
    """The class that writes TensorBoard's files."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard needs another package: pip install 'sparsejax[tensorboard]'"
        ) from None
    return SummaryWriter


@contextlib.contextmanager
def _logging(
    command: flags.Train, epochs: int, new_writer: Callable[..., Any] | None
) -> Generator[Log]:
    """A function for `fit` to call after each epoch. It prints and writes the metrics."""
    with contextlib.ExitStack() as stack:
        writer = None
        if new_writer is not None and processes.is_first():
            writer = stack.enter_context(new_writer(command.tensorboard))

        def log(step: int, entry: Mapping[str, float]) -> None:
            printing.print_epoch(epochs, step, entry)
            if writer is not None:
                for name, value in entry.items():
                    writer.add_scalar(name, value, step)

        yield log


def _pretend_devices(count: int) -> None:
    """Makes the CPU appear as this many devices, unless JAX has been used already."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
