"""Training on data that lives on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import ArrayLike
from tqdm import tqdm

from sparsejax.data import ScannedDataset
from sparsejax.data.batching import bucket
from sparsejax.data.sources import Inputs, Source, Sources, check_inputs, features_of
from sparsejax.losses import LossRule
from sparsejax.mesh import interrupts, processes
from sparsejax.mesh.layout import (
    axes_are_explicit,
    axis_sizes,
    mesh_is_set,
    put_on_mesh,
    shardings_of,
    using_auto_axes,
    with_shardings,
)
from sparsejax.optimizers import inplace
from sparsejax.optimizers.gradients import row_params
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.prediction.evaluation import Evaluation, Setup, metric_names, prepare
from sparsejax.prediction.recommender import Recommender
from sparsejax.sparse import CSR
from sparsejax.training import fused as fused_output
from sparsejax.training.checkpoint import Checkpoints
from sparsejax.training.resident import Examples, Resident, epoch_order, step_size
from sparsejax.training.streaming import Stream

# Epochs for whose largest batch a program is compiled.
_PLANNED_EPOCHS = 32

# Entries of the batches of a dispatch: some 300 MB, and several milliseconds of work.
_DISPATCH_ENTRIES = 2**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when a validation metric has not risen for some epochs.

    >>> EarlyStopping(metric="recall@20", patience=3).restore_best
    True

    A line on stderr says when training stopped and which epoch was the best.

    Attributes:
      metric: a key of the validation metrics, as "recall@20"; higher is better. By
        default "ndcg@k", with the `k` of `fit`.
      patience: epochs without a new best before training stops.
      restore_best: end with model and optimizer as they were after the best epoch, also
        if training was not stopped. They come from its checkpoint, if there is a
        `checkpoint_dir`; else from a copy in the host's memory, which is made after each
        epoch that is the best so far.
    """

    metric: str | None = None
    patience: int = 5
    restore_best: bool = True

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")


@runtime_checkable
class Trainable(Recommender, Protocol):
    """What `fit` needs of a model: an `nnx.Module` with these, as `FeedForward` is."""

    def loss(
        self, x: Any, labels: CSR, *, weights: jax.Array | None = None
    ) -> jax.Array:
        """`sum_b weights_b loss_b`, a scalar. `x` is a `CSR`, or a dict of inputs."""
        ...

    def train(self) -> None:
        """Switches noise on, as `nnx.Module.train` does."""
        ...


def _on_auto_axes[Fit: Callable[..., Any]](fit: Fit) -> Fit:
    """`fit`, to which all axes are Auto, also those of a mesh where they are Explicit."""

    @functools.wraps(fit)
    def wrapped(model, optimizer, *args, **kwargs):
        if not axes_are_explicit():
            return fit(model, optimizer, *args, **kwargs)
        axis_sizes()  # it is a mesh as ours
        try:
            with using_auto_axes():
                return fit(model, optimizer, *args, **kwargs)
        finally:
            nnx.update((model, optimizer), put_on_mesh(nnx.state((model, optimizer))))

    return cast(Fit, wrapped)


def _alone[Fit: Callable[..., Any]](fit: Fit) -> Fit:
    """`fit`, which alone works in the directory of its checkpoints."""

    @functools.wraps(fit)
    def wrapped(*args, checkpoint_dir=None, **kwargs):
        if checkpoint_dir is None:
            return fit(*args, **kwargs)
        if not isinstance(checkpoint_dir, Checkpoints):
            checkpoint_dir = Checkpoints(checkpoint_dir)
        with checkpoint_dir.held():
            return fit(*args, checkpoint_dir=checkpoint_dir, **kwargs)

    return cast(Fit, wrapped)


@_on_auto_axes
@_alone
def fit(
    model: Trainable,
    optimizer: Optimizer,
    inputs: Sources | ScannedDataset,
    targets: Source | ScannedDataset | str | None = None,
    *,
    weights: ArrayLike | None = None,
    batch_size: int = 512,
    num_epochs: int = 20,
    seed: int = 0,
    validation: Source | None = None,
    k: int = 20,
    early_stopping: EarlyStopping | None = None,
    checkpoint_dir: str | pathlib.Path | Checkpoints | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
    fused: bool = False,
    log: Callable[[int, Mapping[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Trains a model, in place, to predict `targets` from `inputs`.

    >>> history = fit(model, optimizer, train, num_epochs=1, validation=heldout)
    >>> sorted(history[0])[:3]
    ['coverage@20', 'epoch', 'examples_per_second']

    The loss of a step is the mean of `weights_b loss_b` over the examples of the batch.
    The data is copied to the device once; some steps at a time then run as one compiled
    program that draws its rows there. The order of examples depends on `seed`, the epoch
    and the batch size only. At the end rows are brought up to date (`Optimizer.flush`).

    Parameters and state are overwritten in place. What else has them, as a copy by
    `nnx.clone`, keeps the values it has. After any exception, Ctrl-C too, the model is
    that of the last dispatch.

    Under `jax.set_mesh(make_mesh(...))` the data is divided over the devices, and the
    batches are the same. Make the model and the optimizer there, too::

        with jax.set_mesh(make_mesh(data=2, model=4)):
            model = FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
            optimizer = Optimizer(model, optimizers.adam(1e-3))
            fit(model, optimizer, train)

    While it runs on a terminal, a bar shows loss, examples per second and time left.

    Args:
      model: a `FeedForward`, or a module with the methods of `Trainable`.
      optimizer: of this model.
      inputs: `[rows, features]`: a `SparseDataset`, a `CSR` or a SciPy matrix; or what
        `scan_parquet` gives, which is read from disk a chunk at a time; or several by
        name, `{name: source}`, among them `DenseDataset`s and arrays `[rows, ...]`. The
        rows are those of the first source with row names; the other ones are matched by
        name, and by position where one has none.
      targets: `[rows, items]`, its rows matched by name where both have names; or the
        name of a sparse input; a single input itself by default (an autoencoder).
      weights: `[rows]`, weight of each example; 1 by default.
      batch_size: examples a step; a multiple of 64 on a mesh that divides batches. The
        last batch of an epoch may be smaller.
      num_epochs: passes over the data, those before a resume included.
      seed: of the order of examples.
      validation: held-out entries of the rows of `inputs`. After each epoch they are
        ranked among all items that the row does not have in the targets.
      k: cut-off of the validation metrics.
      early_stopping: stop on a validation metric, and end with the best epoch's weights.
      checkpoint_dir: where to save checkpoints; one process at a time.
      checkpoint_seconds: save when this much time has passed since the last, and when
        an epoch is the best so far, and at the end. 0 saves as often as possible.
      resume: continue from the newest sound checkpoint in `checkpoint_dir`, if any. The
        result has the same bits as an uninterrupted run's; on a GPU only under
        `XLA_FLAGS=--xla_gpu_autotune_level=0`: without it each process picks its matrix
        products by timing them.
      fused: apply the gradient of each chunk of the output's items where it is made, so
        that no array of the size of its kernel exists beside the kernel and its state.
        The result is the same, up to rounding.
      log: called after each epoch with the step number and that epoch's history entry,
        by the first process if there are several. Model and optimizer can be used in it;
        rows may be behind: pass `optimizer=optimizer` to `evaluate` and `recommend`.

    Returns:
      One entry per epoch: "epoch", "step", "loss", "examples_per_second", and the
      validation metrics.

    Raises:
      FloatingPointError: the loss is not finite; names epoch and step. The last good
        checkpoint stays.
      TypeError: the model or the optimizer is something else.
      ValueError: shapes, names, values or settings do not fit; a checkpoint of other
        data.
      NotImplementedError: `fused` with a tied output, or with a model that has no
        `SparseOutput` of its own; one of several inputs is scanned.
      FileExistsError: `checkpoint_dir` holds checkpoints and `resume` is False.
      BlockingIOError: another process trains into `checkpoint_dir`; says which.
      KeyboardInterrupt: Ctrl-C; a checkpoint was saved, when the steps that were under
        way were done. A second Ctrl-C does not wait for these. Of several processes one
        was told to end, also by SIGTERM: all have saved.
    """
    _check_modules(model, optimizer)
    if batch_size < 1 or num_epochs < 1:
        raise ValueError(f"{batch_size=} and {num_epochs=} must be positive")
    check_seed(seed)
    if not checkpoint_seconds >= 0:
        raise ValueError(f"{checkpoint_seconds=} must not be negative")
    settings: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "fused": fused}
    if validation is not None:  # what scores of checkpoints are
        settings["metric"] = _metric(early_stopping, k)
    elif early_stopping is not None:
        raise ValueError("early_stopping needs validation=... to measure its metric on")
    check = functools.partial(_check_labels, getattr(model, "loss_rule", None))
    examples = _examples_of(model, inputs, targets, weights, validation, check)
    parts = axis_sizes()[0] if mesh_is_set() else 1
    if isinstance(examples, Stream):  # by default a matter of the devices' memory
        settings["chunk_rows"] = examples.chunk_rows
    batch_size = step_size(batch_size, max(examples.chunks), parts)
    if fused:
        fused_output.check(model, optimizer)
    modules = model, optimizer
    # Before a checkpoint is read, which puts arrays where they are.
    inplace.unshare(inplace.variables_of(modules))  # placed, they may share memory
    nnx.update(modules, put_on_mesh(nnx.state(modules)))
    _check_divided(model)
    evaluation = None
    if validation is not None:
        assert isinstance(examples, Examples)  # not scanned, as there is a validation
        setup = Setup(
            k=k,
            exclude="inputs" if targets is None else cast(Source | str, targets),
            popularity=None,
            batch_size=batch_size,
        )
        evaluation = prepare(examples.inputs, validation, setup)
    run, checkpoints = _Run(settings), cast(Checkpoints | None, checkpoint_dir)
    if checkpoint_dir is not None or jax.process_count() > 1:
        settings["data"] = examples.fingerprint()
        _check_same_everywhere(settings)
    if checkpoints is not None:
        run = _resumed(run, checkpoints, modules, resume)
    elif resume:
        raise ValueError("resume=True needs checkpoint_dir=...")
    model.train()
    training = _Training(
        model,
        optimizer,
        examples,
        run,
        _Saver(checkpoints, modules, checkpoint_seconds),
        batch_size=batch_size,
        num_epochs=num_epochs,
        seed=seed,
        parts=parts,
        fused=fused,
        evaluation=evaluation,
        early_stopping=early_stopping,
        log=log,
    )
    with contextlib.closing(examples), training.bar, interrupts.deferred():
        training.run_epochs()
    if early_stopping is not None:
        training.end_with_best(early_stopping)
    optimizer.flush(model)
    return run.history


def _check_modules(model: Any, optimizer: Any) -> None:
    """Raises TypeError if they are something else."""
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer)
        raise TypeError(
            "fit needs a sparsejax.Optimizer, as sparsejax.Optimizer(model, "
            f"sparsejax.optimizers.adam(1e-3)), got {kind.__module__}.{kind.__name__}; "
            "with an optax rule write the loop yourself, with nnx.Optimizer and "
            "nnx.value_and_grad"
        )
    lacks = [name for name in ("loss", "train") if not hasattr(model, name)]
    if lacks:
        raise TypeError(
            "fit needs a model with the methods of Trainable, as FeedForward has; "
            f"{type(model).__name__} has no {' and no '.join(lacks)}"
        )


def _metric(early_stopping: EarlyStopping | None, k: int) -> str:
    """What decides which epoch is the best.

    Raises:
      ValueError: there is no such metric.
    """
    metric = f"ndcg@{k}"
    if early_stopping is not None and early_stopping.metric is not None:
        metric = early_stopping.metric
    known = metric_names(k)
    if metric not in known:
        raise ValueError(
            f"early_stopping: with {k=} there is no validation metric {metric!r}; there "
            f"are {', '.join(known)}"
        )
    return metric


def _check_same_everywhere(settings: Mapping[str, Any]) -> None:
    """Raises ValueError if the processes have different data."""
    if not processes.is_same_everywhere(settings["data"]):
        raise ValueError("the processes were given different data")
    if not processes.is_same_everywhere(str(settings.get("chunk_rows"))):
        raise ValueError(
            "the processes would train on chunks of different sizes, as their devices "
            "differ in memory; name chunk_rows in scan_parquet"
        )


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that JAX would cut."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"{seed=} must be from 0 to 2**32 - 1")


@dataclasses.dataclass
class _Run:
    """How far training has come: what a checkpoint keeps beside the arrays."""

    settings: dict[str, Any]
    epoch: int = 0
    position: int = 0  # steps done in this epoch
    step: int = 0  # steps done in all
    loss_sum: float = 0.0
    examples: int = 0
    best: float = -math.inf
    best_epoch: int = 0
    waited: int = 0
    stopped: bool = False
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def add(self, losses: np.ndarray, examples: np.ndarray) -> None:
        self.loss_sum += float(np.dot(losses.astype(np.float64), examples))
        self.examples += int(examples.sum())
        self.position += len(losses)
        self.step += len(losses)

    def end_epoch(self, examples_per_second: float) -> dict[str, float]:
        self.epoch += 1
        entry = {
            "epoch": self.epoch,
            "step": self.step,
            "loss": self.loss_sum / self.examples,
            "examples_per_second": examples_per_second,
        }
        self.history.append(entry)
        self.position, self.loss_sum, self.examples = 0, 0.0, 0
        return entry

    def judge(self, entry, early_stopping) -> float | None:
        """The score if it is the best so far; decides whether to stop."""
        metric = self.settings["metric"]
        if entry[metric] > self.best:
            self.best, self.best_epoch, self.waited = entry[metric], self.epoch, 0
            return self.best
        self.waited += 1
        if early_stopping is not None:
            self.stopped = self.waited >= early_stopping.patience
        return None


class _Saver:
    """Saves checkpoints of modules, if there is a folder for them."""

    def __init__(
        self, checkpoints: Checkpoints | None, modules: tuple[Any, ...], seconds: float
    ):
        self.checkpoints, self._modules = checkpoints, modules
        self._seconds, self._saved = seconds, time.monotonic()

    def save(self, run: _Run, score: float | None = None) -> None:
        if self.checkpoints is not None:
            progress = dataclasses.asdict(run)
            self.checkpoints.save(run.step, self._modules, progress, score=score)
            self._saved = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to save."""
        # One clock decides, as all processes have to save.
        waits = self.checkpoints is not None and processes.is_first()
        return waits and time.monotonic() - self._saved >= self._seconds


class _Training:
    """What one call of `fit` does, its arguments being checked."""

    def __init__(
        self,
        model: Trainable,
        optimizer: Optimizer,
        examples: Examples | Stream,
        run: _Run,
        saver: _Saver,
        *,
        batch_size: int,
        num_epochs: int,
        seed: int,
        parts: int,
        fused: bool,
        evaluation: Evaluation | None,
        early_stopping: EarlyStopping | None,
        log: Callable[[int, Mapping[str, float]], None] | None,
    ):
        self.model, self.optimizer, self.examples = model, optimizer, examples
        self.run, self.saver = run, saver
        self.batch_size, self.num_epochs, self.seed = batch_size, num_epochs, seed
        self.parts, self.fused = parts, fused
        self.evaluation, self.early_stopping, self.log = evaluation, early_stopping, log
        self._key = put_on_mesh(jax.random.key(seed))
        self._variables = inplace.variables_of((model, optimizer))
        self._graphdef, state = nnx.split((model, optimizer))
        self._structure, self._layout = jax.tree.structure(state), shardings_of(state)
        # Of each dispatch that is not awaited its losses, and the examples of its steps.
        self._waiting: list[tuple[jax.Array, np.ndarray]] = []
        self._planned: dict[tuple[int, int], tuple[int, ...]] = {}
        self._best: inplace.HostCopy | None = None
        self.bar = tqdm(
            total=num_epochs * examples.num_rows,
            initial=run.epoch * examples.num_rows + run.position * batch_size,
            unit=" examples",
            unit_scale=True,
            disable=not (sys.stderr.isatty() and processes.is_first()),
        )

    def run_epochs(self) -> None:
        """Trains to the end, or until it is stopped."""
        run = self.run
        while run.epoch < self.num_epochs and not run.stopped:
            began, before = time.monotonic(), run.examples
            self._run_chunks()
            seconds = time.monotonic() - began
            self._end_epoch(run.end_epoch((run.examples - before) / seconds))

    def _run_chunks(self) -> None:
        """Trains on what a resume has left of an epoch."""
        chunks, epoch = self.examples.order(self.seed, self.run.epoch), self.run.epoch
        # The next epoch's first is read while this one's last is trained on.
        more = epoch + 1 < self.num_epochs
        after = self.examples.order(self.seed, epoch + 1)[:1] if more else [None]
        start = 0
        for chunk, following in zip(chunks, chunks[1:] + after, strict=True):
            end = start + math.ceil(self.examples.chunks[chunk] / self.batch_size)
            if self.run.position < end:
                self._run_chunk(chunk, following, start)
            start = end

    def _run_chunk(self, chunk: int, following: int | None, start: int) -> None:
        """Trains on a chunk whose first step is the epoch's step `start`."""
        data = self.examples.resident(chunk, following)
        capacities = self._capacities(data, chunk)
        order, _ = self._order(data, chunk, self.run.epoch)
        entries = entries_of_step(capacities, self.parts, data.sparse_inputs)
        most = _steps_per_dispatch(entries)
        ahead = 1 if _launches_ahead() else 0
        for position in range(self.run.position - start, len(order), most):
            count = min(most, len(order) - position)
            losses = self._launch(data, order, position, count, capacities, most)
            rows = self.examples.chunks[chunk]
            done = _examples(position, count, self.batch_size, rows)
            self._waiting.append((losses, done))
            self._await_all_but(ahead)
            self._save_or_end()
        self._await_all_but(0)

    def _order(self, data: Resident, chunk: int, epoch: int):
        # An exception of a signal's handler would become another one in JAX's caches.
        with interrupts.uninterrupted():
            return _epoch(self._key, epoch, data, chunk, self.batch_size, self.parts)

    def _capacities(self, data: Resident, chunk: int) -> tuple[int, ...]:
        """Of each matrix the room for the largest of many epochs' batches.

        For all of them one program is compiled.
        """
        period = self.run.epoch // _PLANNED_EPOCHS
        if (chunk, period) not in self._planned:
            first = period * _PLANNED_EPOCHS
            last = min(first + _PLANNED_EPOCHS, self.num_epochs)
            needed = [
                [int(n) for n in self._order(data, chunk, epoch)[1]]
                for epoch in range(first, last)
            ]
            largest = map(max, zip(*needed, strict=True))
            self._planned[chunk, period] = tuple(map(bucket, largest))
        return self._planned[chunk, period]

    def _launch(self, data, order, position, count, capacities, most) -> jax.Array:
        """Runs some steps of an epoch; returns their losses."""

        def program():
            arrays = [variable.get_raw_value() for variable in self._variables]
            state, losses = _dispatch(
                self._graphdef,
                jax.tree.unflatten(self._structure, arrays),
                data,
                order,
                position,
                count,
                capacities,
                most,
                self.fused,
                self._layout,
            )
            return jax.tree.leaves(state), losses

        return inplace.overwrite(self._variables, program)

    def _await_all_but(self, ahead: int) -> None:
        """Waits for all dispatches but the last ones."""
        run = self.run
        while len(self._waiting) > ahead:
            losses, done = self._waiting.pop(0)
            run.add(_checked(losses, len(done), run, self.saver.checkpoints), done)
            self.bar.set_postfix(
                epoch=f"{run.epoch + 1}/{self.num_epochs}",
                loss=f"{run.loss_sum / run.examples:.4g}",
                refresh=False,
            )
            self.bar.update(int(done.sum()))

    def _save_or_end(self) -> None:
        """In the midst of an epoch: saves if it is time, ends if a process has to."""
        told, due = self._is_told_and_due()
        if told or due:
            self._await_all_but(0)
            if told or self.run.examples < self.examples.num_rows:
                self.saver.save(self.run)
        if told:
            raise KeyboardInterrupt("a process was told to end")

    def _is_told_and_due(self) -> list[bool]:
        """Whether some process has to end, and whether it is time to save."""
        told, due = interrupts.is_told_to_end(), self.saver.is_due()
        return processes.true_anywhere(told, due)

    def _end_epoch(self, entry: dict[str, float]) -> None:
        """Measures, logs and saves."""
        run, score = self.run, None
        if self.evaluation is not None:
            measured = self.evaluation.run(self.model, optimizer=self.optimizer)
            entry.update({m: v for m, v in measured.items() if "@" in m})
            score = run.judge(entry, self.early_stopping)
        if self.log is not None and processes.is_first():
            self.log(run.step, entry)
        last = run.epoch == self.num_epochs or run.stopped
        told, due = self._is_told_and_due()
        if last or told or due or score is not None:
            self.saver.save(run, score)
        if told and not last:
            raise KeyboardInterrupt("a process was told to end")
        stopping = self.early_stopping
        keeps = stopping is not None and stopping.restore_best and not last
        if keeps and score is not None and self.saver.checkpoints is None:
            self._best = inplace.HostCopy(self._variables)

    def end_with_best(self, stopping: EarlyStopping) -> None:
        """Restores the best epoch, if that is wanted, and says which it was."""
        run, kept = self.run, self.run.epoch
        if stopping.restore_best and run.best_epoch not in (0, kept):
            kept = run.best_epoch
            if self._best is not None:
                self._best.restore()
            elif self.saver.checkpoints is not None:
                modules = (self.model, self.optimizer)
                progress = self.saver.checkpoints.restore(modules, best=True)
                if progress is not None:  # of another epoch, if the best is damaged
                    kept = progress["epoch"]
        if processes.is_first():
            print(_outcome(run, stopping, kept), file=sys.stderr)


def _outcome(run: _Run, stopping: EarlyStopping, kept: int) -> str:
    """Why training ended, and which epoch the model is of."""
    metric, why = run.settings["metric"], ""
    if run.stopped:
        why = f", as {metric} has not risen for {stopping.patience} epochs"
    best = "no epoch"
    if run.best_epoch:  # the metric was a number
        best = f"epoch {run.best_epoch} ({metric} {run.best:.4f})"
    return (
        f"training ended after epoch {run.epoch}{why}; {best} was the best, the model is "
        f"that of epoch {kept}"
    )


def _resumed(run, checkpoints, modules, resume: bool) -> _Run:
    if not resume:
        if checkpoints.steps():
            raise FileExistsError(
                f"{checkpoints.directory} holds checkpoints; pass resume=True to "
                "continue from them, or name another directory"
            )
        return run
    progress = checkpoints.restore(modules)
    if progress is None:
        return run
    before = _Run(**progress)
    for name, value in run.settings.items():
        if before.settings.setdefault(name, value) != value:
            what = "other data" if name == "data" else f"{name} {value!r}"
            raise ValueError(
                f"cannot resume with {what}: the run in {checkpoints.directory} has "
                f"{name} {before.settings[name]!r}"
            )
    checkpoints.delete_after(before.step)
    return before


def _check_labels(rule: object, labels: CSR, *, whole: bool) -> None:
    """Raises ValueError if the values of labels, of all or some, mean nothing."""
    count = int(labels.indptr[-1])
    if labels.data is None or count == 0:
        return
    least, most = float(labels.data[:count].min()), float(labels.data[:count].max())
    if whole and least == most == 0:
        raise ValueError(
            f"all {count:,} values of the targets are 0, so there is nothing to learn; "
            "leave the values out if each entry counts"
        )
    if not isinstance(rule, LossRule):
        return
    low, high = rule.labels
    if not (low <= least and most <= high):
        name = getattr(rule, "name", type(rule).__name__)
        raise ValueError(
            f"the targets have values from {least:g} to {most:g}, but the loss {name} "
            f"takes values from {low:g} to {high:g}, others mean nothing to it. Leave "
            "the values out if each entry counts, scale them, or choose another loss "
            "(l2_loss takes any)"
        )


def _check_divided(model: Any) -> None:
    """Raises ValueError if a kernel is whole on every device of a mesh."""
    if not mesh_is_set() or axis_sizes()[1] == 1:
        return
    for path, kernel in row_params(model).items():
        if kernel[...].sharding.is_fully_replicated:
            raise ValueError(
                f"'{'.'.join(map(str, path))}' is not divided over the mesh's axis "
                '"model"; make the model and the optimizer under the same '
                "`with jax.set_mesh(mesh):`"
            )


def _steps_per_dispatch(entries: int) -> int:
    """Enough to hide the launch; on a CPU few, since there a step may take seconds.

    The batches of all steps of a dispatch, of so many `entries` each, exist at once and
    are sorted together, which takes about 40 bytes an entry.
    """
    if jax.default_backend() == "cpu":
        return 16
    return steps_on_gpu(entries)


def entries_of_step(
    capacities: Sequence[int], parts: int, sparse_inputs: Collection[int] = (0,)
) -> int:
    """Entries that a device has to do with, its block of each matrix having this room.

    Of the sparse inputs it sorts those of its columns in all parts of the batch.
    """
    return sum(
        room * (parts if i in sparse_inputs else 1) for i, room in enumerate(capacities)
    )


def steps_on_gpu(entries: int) -> int:
    """Steps of a dispatch whose batches have so many entries."""
    return max(1, min(64, _DISPATCH_ENTRIES // max(1, entries)))


def _sorts_ahead() -> bool:
    """Whether a dispatch sorts the inputs of all its steps by column, for their row
    gradients. On a CPU there are quicker ways, a step at a time."""
    return jax.default_backend() != "cpu"


def _launches_ahead() -> bool:
    """Whether a dispatch is launched before the losses of the last one are read.

    Several processes ask each other something after each, for which they wait for it. A
    CPU that runs a dispatch is not idle while the host works.
    """
    return jax.process_count() == 1 and jax.default_backend() != "cpu"


def _examples(position: int, count: int, batch_size: int, num_rows: int) -> np.ndarray:
    """Number of examples in each of `count` steps."""
    starts = (position + np.arange(count)) * batch_size
    return np.minimum(batch_size, num_rows - starts)


def _checked(
    losses: jax.Array, count: int, run: _Run, checkpoints: Checkpoints | None
) -> np.ndarray:
    # Cut here: on the device that would wait for the dispatch after this one.
    host = np.asarray(losses)[:count]
    bad = np.flatnonzero(~np.isfinite(host))
    if bad.size:
        kept = ""
        if checkpoints is not None and checkpoints.steps():
            kept = f"; {checkpoints.directory} holds step {checkpoints.steps()[-1]}"
        raise FloatingPointError(
            f"the loss is {host[bad[0]]} in epoch {run.epoch + 1}, step "
            f"{run.position + bad[0] + 1} of it{kept}. Lower the learning rate, or look "
            "for extreme values in the data"
        )
    return host


def _examples_of(
    model, inputs, targets, weights, validation, check
) -> Examples | Stream:
    """What to train on; `check` is called with the matrix of labels."""
    if not isinstance(inputs, ScannedDataset):
        if isinstance(targets, ScannedDataset):
            raise TypeError("targets is scanned, so inputs must be scanned too")
        inputs = Inputs.of(inputs)
        check_inputs(inputs, features_of(model))
        examples = Examples.of(inputs, targets, weights)
        check(examples.matrices[examples.roles.labels], whole=True)
        return examples
    if targets is not None and not isinstance(targets, ScannedDataset):
        raise TypeError("inputs is scanned, so targets must be scanned too")
    if validation is not None:
        raise ValueError(
            "validation needs the inputs in host memory, and these are scanned; call "
            "evaluate with some rows of them, for example in log=..."
        )
    return Stream(inputs, targets, weights, functools.partial(check, whole=False))


@functools.partial(jax.jit, static_argnames=("batch_size", "parts"))
def _epoch(key, epoch, data: Resident, chunk, batch_size: int, parts: int):
    """`epoch_order` of a chunk, and for each matrix the entries of its largest batch."""
    if data.contiguous:  # there are others
        key = jax.random.fold_in(key, chunk)
    order = epoch_order(
        key, epoch, data.num_rows, batch_size, parts, contiguous=data.contiguous
    )
    return order, data.needed(order)


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "capacities", "most", "fused", "layout"),
    donate_argnames=("state",),
)
def _dispatch(
    graphdef, state, data, order, position, count, capacities, most, fused, layout
):
    """Runs steps `position .. position + count - 1` of an epoch, `count <= most`.

    `count` is not static: one program serves every dispatch of an epoch. On a mesh the
    state keeps its layout, and every device has the losses.
    """
    steps = position + jnp.arange(most)
    rows = order.at[steps].get(mode="fill", fill_value=-1)
    batches = data.take(rows, capacities)
    if _sorts_ahead():
        for i in data.sparse_inputs:
            batches[i] = batches[i].with_transposed()
    means = data.means(rows)

    def step(i, carry):
        state, losses, derived = carry
        used = [jax.tree.map(lambda leaf: leaf[i], batch) for batch in batches]
        x, labels = data.roles.of(used)
        model, optimizer = nnx.merge(graphdef, state, copy=True)

        def loss_fn(model):
            return model.loss(x, labels, weights=means[i])

        if fused:
            loss, derived = fused_output.train_step(
                model, optimizer, x, labels, means[i], derived
            )
        else:
            loss, grads = optimizer.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
        state = with_shardings(nnx.state((model, optimizer)), layout)
        return state, losses.at[i].set(loss), derived

    derived = None
    if fused:
        derived = fused_output.derive(nnx.merge(graphdef, state, copy=True)[0])
    losses = jnp.zeros(most, jnp.float32)
    state, losses, _ = lax.fori_loop(0, count, step, (state, losses, derived))
    if layout is not None:
        losses = lax.with_sharding_constraint(losses, jax.P())
    return with_shardings(state, layout), losses
