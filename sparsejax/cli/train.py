"""The commands `sparsejax train` and `sparsejax plan`."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax

from sparsejax import codec, optimizers
from sparsejax.cli import flags, kind, linear_parts, printing, run
from sparsejax.cli.kind import Commands, Source, commands_for, commands_of
from sparsejax.cli.reading import meanwhile
from sparsejax.data.files import shown
from sparsejax.engine.train.dispatch import Epochs, Program, check_seed
from sparsejax.engine.train.progress import EarlyStopping
from sparsejax.kinds.kind import Defaults, kind_of, used
from sparsejax.mesh import kept_programs, processes
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.verbs import plan as planning
from sparsejax.verbs.fit import fit
from sparsejax.verbs.place import place
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
    config = config_of(command)
    commands = commands_of(config)
    commands.check(command)
    stopping = _early_stopping(command, commands)
    source = source_of(command, commands)
    config, chosen = commands.suited(config, command, source)
    if chosen:
        print(chosen, file=sys.stderr)
    check_seed(command.seed)
    settings = settings_of(command, config, source)
    restored = command.resume and run.has_checkpoints(command.run)
    if command.origin is None or restored:
        keeps = command.compilation.compilation_cache
        linear_part = None if restored else linear_part_of(settings, source, keep=keeps)
        computed = None if linear_part is None else meanwhile(linear_part)
        model, optimizer = settings.build(source.known)
        if computed is not None:
            _compile_meanwhile(command, settings, source, model, optimizer)
            model.output.linear.set_to(*computed())
    else:
        model, optimizer = _continued(command, settings, source)
    cutoff = {"k": None if source.heldout is None else command.k}
    with (
        run.begun(
            command.run, settings, source.known, resume=command.resume
        ) as checkpoints,
        _logging(command, settings.num_epochs, new_writer) as log,
    ):
        printing.print_summary(commands.account(source.data), model)
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
            **used(commands.kind, "fit", cutoff),
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
    memory, config = command.memory, config_of(command)
    commands = commands_of(config)
    commands.check(command)
    name, options = _rule(command, commands.kind.defaults)
    batch_size = command.batch_size
    if batch_size is None:
        batch_size = commands.kind.defaults.batch_size
    text, fits = commands.planned(
        config,
        command,
        rule=optimizers.get(name, learning_rate=LEARNING_RATE, **options),
        batch_size=batch_size,
        data=data,
        model=model,
        memory=None if memory is None else planning.read_bytes(memory),
    )
    if fits is None:
        raise ValueError("the device here does not say its memory: pass --memory 141GB")
    print(text)
    return fits


def config_of(command: flags.Train | flags.Plan) -> Any:
    """The configuration that a file, a run or the flags describe, without what depends on
    the data.
    """
    model, origin = command.kind, getattr(command, "origin", None)
    if command.config is not None:
        config = _load_config(command.config)
        found = getattr(config, "model", flags.DEFAULT_MODEL)
        if model not in (None, found):
            raise ValueError(f"--model {model}: {command.config} describes {found}")
    elif origin is not None:
        config = run.load_run(origin)[0].network
    else:
        config = commands_for(model).described(command)
    return commands_of(config).negatives(config, command)


def _load_config(path: pathlib.Path) -> Any:
    """Reads a JSON file. Errors name the file."""
    try:
        return kind.config_of(codec.parse(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def source_of(command: flags.Train, commands: Commands) -> Source:
    """Reads or scans the data, and what is held out."""
    if command.chunk_rows is not None:
        return commands.scanned(command)
    before = None if command.origin is None else run.load_run(command.origin)[1]
    return commands.source(command, before)


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


def settings_of(command: flags.Train, config: Any, source: Source) -> run.Run:
    """The settings that `run.json` will hold."""
    defaults = kind_of(config).defaults
    epochs, batch_size = command.epochs, command.batch_size
    if batch_size is None:
        batch_size = defaults.batch_size
    steps = steps_of_epoch(source.chunks, batch_size)
    if epochs is None:
        epochs = defaults.num_epochs(steps)
    return run.Run(
        network=config,
        optimizer=rule_of(command, defaults, steps, epochs),
        num_features=source.num_features,
        num_epochs=epochs,
        batch_size=batch_size,
        seed=command.seed,
        deterministic=command.deterministic,
        indicator=source.indicator,
        data=shown(command.data),
        data_fingerprint=source.fingerprint,
        vocabulary_fingerprint=commands_of(config).fingerprint_of(source.known),
        validation=source.validation,
        validation_split=source.split,
        k=command.k,
        patience=command.patience,
        origin=None if command.origin is None else str(command.origin),
    )


def linear_part_of(
    settings: run.Run, source: Source, *, keep: bool
) -> Callable[[], linear_parts.Arrays] | None:
    """A function that finds or computes the linear part; None if the network has none."""
    linear = getattr(settings.network, "linear", None)
    if linear is None:
        return None
    return functools.partial(
        linear_parts.linear_part,
        source.data,
        linear,
        fingerprint=settings.data_fingerprint,
        keep=keep,
    )


def _compile_meanwhile(
    command: flags.Train,
    settings: run.Run,
    source: Source,
    model: Any,
    optimizer: Optimizer,
) -> None:
    """Compiles the training program while the linear part is computed.

    Its numbers make no difference to the program.
    """
    linear: Any = getattr(settings.network, "linear", None)
    if not kept_programs.are_kept() or linear_parts.is_kept(
        source.data, linear, fingerprint=settings.data_fingerprint
    ):
        return
    epochs = Epochs(
        place(source.data),
        batch_size=settings.batch_size,
        num_epochs=settings.num_epochs,
        seed=settings.seed,
    )
    program = Program(
        model, optimizer, fused=command.fused, deterministic=command.deterministic
    )
    program.compile_ahead(next(epochs.dispatches(0)))


def _continued(
    command: flags.Train, settings: run.Run, source: Source
) -> tuple[Any, Optimizer]:
    """The model of `--from` with the items that are new, and the optimizer."""
    assert command.origin is not None
    before, known = run.load_run(command.origin)
    model, optimizer, kept = run.continued(
        command.origin, before, known, settings, source.data
    )
    added = settings.num_features - before.num_features
    what = "goes on with its state" if kept else "begins anew"
    print(
        f"{command.origin}: {before.num_features:,} items are known, {added:,} are new; "
        f"the optimizer {what}",
        file=sys.stderr,
    )
    return model, optimizer


def _early_stopping(command: flags.Train, commands: Commands) -> EarlyStopping | None:
    if command.patience is None:
        return None
    if command.validation is None:
        raise ValueError("--patience needs --validation, the data to stop on")
    return EarlyStopping(metric=commands.metric(command.k), patience=command.patience)


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
