"""The commands `sparsejax train` and `sparsejax plan`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

import jax

from sparsejax import codec, optimizers
from sparsejax.callers import needing
from sparsejax.cli import flags, printing
from sparsejax.cli.reading import content_of, users_of
from sparsejax.data import ItemFeatures, read_item_features
from sparsejax.kinds.content import sizes_among
from sparsejax.kinds.kind import DataSizes, Kind, kind_for, kind_of
from sparsejax.kinds.kind import config_of as read_config
from sparsejax.mesh import processes
from sparsejax.options.planning import Sized
from sparsejax.runs import folders, publishing, training
from sparsejax.runs.training import named_rule
from sparsejax.verbs import plan as planning


def train(command: flags.Train) -> None:
    """`sparsejax train`."""
    processes.in_first(
        lambda: folders.check_folder(command.directory, resume=command.resume)
    )
    gate = None if command.gate is None else publishing.Gate.parse(command.gate)
    new_writer = None
    if command.tensorboard is not None:
        with needing("--tensorboard needs another package", "tensorboard"):
            from tensorboardX import SummaryWriter as new_writer
    asked = training_of(command)
    if command.export_to is not None:
        kind = kind_of(asked.config)
        publishing.check(command.export_to, gate, kind, validation=asked.validation)
    with _logging(command, new_writer) as log:
        source = training.train(
            command.directory, asked, log=log, summary=printing.print_summary
        )
    print(f"the model is in {command.directory}", file=sys.stderr)
    if command.export_to is not None:
        where, k = command.export_to, command.k
        said = publishing.publish(command.directory, source, where, gate, k)
        print(said, file=sys.stderr)


def training_of(command: flags.Train) -> flags.Train:
    """The options of the training, with the content of the files that flags name."""
    config, suited = config_of(command)
    kind = kind_of(config)
    schema = kind.schema(command)
    if schema is not None:  # the schema decides on separators
        command = command.noting(given=command.given - {"delimiter"})
    command.check_kind(kind.name)
    return command.replaced(
        config=config,
        suited=suited,
        schema=schema,
        item_features=content_of(command),
        user_features=users_of(command),
        keep_linear=command.compilation_cache,
    )


def plan(command: flags.Plan) -> bool:
    """`sparsejax plan`; returns whether the training fits."""
    data, model = processes.axes_of(command.mesh)
    if command.compile and data * model > 1:
        _pretend_devices(data * model)
    memory, (config, suited) = command.memory, config_of(command)
    kind = kind_of(config)
    command.check_kind(kind.name)
    defaults = kind.defaults
    name, options = named_rule(command.optimizer, defaults)
    batch_size = command.batch_size
    if batch_size is None:
        batch_size = defaults.batch_size
    how = {
        "rule": optimizers.get(name, learning_rate=defaults.learning_rate, **options),
        "batch_size": batch_size,
        "data": data,
        "model": model,
        "memory": None if memory is None else planning.read_bytes(memory),
    }
    columns = kind.schema(command), command.examples
    tables = kind.tables(config, how["rule"], *columns)
    if tables is None:
        how |= kind.columns_to_plan(*columns, users_of(command))
        planned = _planned(kind, config, suited, command, how)
        text, fits = planned.table(), planned.fits
    else:
        from sparsejax.kinds.clicks.planner import plan_embeddings

        placed = plan_embeddings(*tables, **how)
        # If the tables did not fit, `plan_embeddings` would have raised an error.
        text, fits = str(placed), None if placed.memory is None else True
    if fits is None:
        raise ValueError("the device here does not say its memory: pass --memory 141GB")
    print(text)
    return fits


def _planned(
    kind: Kind,
    config: Any,
    suited: Collection[str],
    command: flags.Plan,
    how: Mapping[str, Any],
) -> planning.Plan:
    """Plans the memory of a model that ranks items, for data whose sizes are given by flags."""
    for name in ("items", "rows", "entries"):
        if getattr(command, name) is None:
            raise ValueError(f"name the sizes of the data: --{name} is missing")
    items, rows, entries = command.items, command.rows, command.entries
    assert items is not None and rows is not None and entries is not None
    features = command.features
    content = content_of(command)
    if content is not None and not isinstance(content, ItemFeatures):
        content = read_item_features(content)
    config, said = kind.suited_to_sizes(
        config, suited, DataSizes(rows, items, entries, features)
    )
    if said:
        print(said, file=sys.stderr)
    return planning.plan(
        config,
        inputs=items if features is None else features,
        outputs=None if features is None else items,
        rows=rows,
        entries=entries,
        content=None if content is None else sizes_among(content, items),
        **command.values_of(Sized),
        **how,
    )


def config_of(command: flags.Train | flags.Plan) -> tuple[Any, Collection[str]]:
    """The configuration given by a file, a run or flags, and its settings that data decides."""
    model, origin = command.model, getattr(command, "origin", None)
    suited: Collection[str] = ()
    if command.config is not None:
        config = codec.load(command.config, read_config)
        found = getattr(config, "model", flags.DEFAULT_MODEL)
        if model not in (None, found):
            raise ValueError(f"--model {model}: {command.config} describes {found}")
    elif origin is not None:
        config = folders.load_run(origin)[0].network
        found = getattr(config, "model", flags.DEFAULT_MODEL)
        if model not in (None, found):
            raise ValueError(
                f"--model {model}: --from goes on with the model of {origin}, which is "
                f"{found}; leave out --model, or --from"
            )
    else:
        named = model or flags.DEFAULT_MODEL
        config, suited = kind_for(named).described(named, command)
    kind, continued = kind_of(config), origin is not None
    config = kind.with_dynamic(config, command.dynamic)
    return kind.with_negatives(config, command.negatives, continued), suited


@contextlib.contextmanager
def _logging(
    command: flags.Train, new_writer: Callable[..., Any] | None
) -> Generator[training.Log]:
    """Yields a function that prints and writes the metrics. It is called after each epoch."""
    with contextlib.ExitStack() as stack:
        writer, left = None, printing.TimeLeft()

        def log(epochs: int, step: int, entry: Mapping[str, float]) -> None:
            nonlocal writer
            if command.follow:
                printing.print_file(step, entry)
            else:
                printing.print_epoch(epochs, step, entry)
                left.epoch_ended(int(entry["epoch"]), epochs)
            # The writer's folder may be inside the run's folder, which exists after the first
            # epoch.
            if writer is None and new_writer is not None and processes.is_first():
                writer = stack.enter_context(new_writer(command.tensorboard))
            if writer is not None:
                for name, value in entry.items():
                    writer.add_scalar(name, value, step)

        yield log


def _pretend_devices(count: int) -> None:
    """Makes JAX simulate `count` CPU devices, unless JAX has been initialized already."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
