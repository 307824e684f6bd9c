"""Training on data that lives on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from tqdm import tqdm

from sparsejax.data import ScannedDataset
from sparsejax.data.clicks import ClickDataset
from sparsejax.data.scan_clicks import ScannedClicks
from sparsejax.data.scan_sequences import ScannedSequences
from sparsejax.data.sequences import SequenceDataset
from sparsejax.data.sources import Source, Sources
from sparsejax.mesh import interrupts, processes
from sparsejax.mesh.layout import (
    axes_are_explicit,
    axis_sizes,
    put_on_mesh,
    using_auto_axes,
)
from sparsejax.mesh.promotion import promoting
from sparsejax.optimizers import inplace
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.prediction.arguments import kind_of, refused
from sparsejax.prediction.click_scores import ClickModel
from sparsejax.prediction.next_items import HistoryModel
from sparsejax.prediction.recommender import Recommender
from sparsejax.training import dispatch as dispatching
from sparsejax.training.checkpoint import Checkpoints
from sparsejax.training.clicks import click_job
from sparsejax.training.dispatch import Epochs, Program
from sparsejax.training.items import item_job
from sparsejax.training.job import Measure
from sparsejax.training.progress import EarlyStopping, Progress, Saver
from sparsejax.training.resident import Targets, Trainable
from sparsejax.training.sequences import sequence_job
from sparsejax.training.streaming import Stream


@runtime_checkable
class Fittable(Trainable, Recommender, Protocol):
    """What `fit` needs of an item model: an `nnx.Module` with the methods of both.

    `FeedForward` has them.
    """


def _on_auto_axes[Fit: Callable[..., Any]](fit: Fit) -> Fit:
    """`fit` with Auto axes inside, also under a mesh with Explicit axes."""

    @functools.wraps(fit)
    def wrapped(model, optimizer, *args, **kwargs):
        if not axes_are_explicit():
            return fit(model, optimizer, *args, **kwargs)
        axis_sizes()  # checks the mesh
        try:
            with using_auto_axes():
                return fit(model, optimizer, *args, **kwargs)
        finally:
            nnx.update((model, optimizer), put_on_mesh(nnx.state((model, optimizer))))

    return cast(Fit, wrapped)


def _alone[Fit: Callable[..., Any]](fit: Fit) -> Fit:
    """`fit`, during which no other process works in the directory of its checkpoints."""

    @functools.wraps(fit)
    def wrapped(*args, checkpoint_dir=None, **kwargs):
        if checkpoint_dir is None:
            return fit(*args, **kwargs)
        if not isinstance(checkpoint_dir, Checkpoints):
            checkpoint_dir = Checkpoints(checkpoint_dir)
        with checkpoint_dir.held():
            return fit(*args, checkpoint_dir=checkpoint_dir, **kwargs)

    return cast(Fit, wrapped)


@promoting
@_on_auto_axes
@refused("inputs", kind_of, {"clicks": ("k",)})
@_alone
def fit(
    model: Fittable | HistoryModel | ClickModel,
    optimizer: Optimizer,
    inputs: Sources
    | ScannedDataset
    | SequenceDataset
    | ScannedSequences
    | ClickDataset
    | ScannedClicks,
    targets: Targets | ScannedDataset = None,
    *,
    weights: ArrayLike | None = None,
    batch_size: int = 512,
    num_epochs: int = 20,
    seed: int = 0,
    shuffle: bool = True,
    validation: Source | SequenceDataset | ClickDataset | ScannedClicks | None = None,
    k: int | None = None,
    early_stopping: EarlyStopping | None = None,
    checkpoint_dir: str | pathlib.Path | Checkpoints | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
    fused: bool = False,
    deterministic: bool = False,
    log: Callable[[int, Mapping[str, float]], None] | None = None,
    after_epoch: Callable[[int], None] | None = None,
) -> list[dict[str, float]]:
    """Trains a model, in place, to predict `targets` from `inputs`.

    >>> history = fit(model, optimizer, train, num_epochs=1, validation=heldout)
    >>> sorted(history[0])[:3]
    ['coverage@20', 'epoch', 'examples_per_second']

    The loss of a step is the mean of `weights_b loss_b` over the examples of the batch.
    The data is copied to the device once. Several steps at a time then run as one compiled
    program, which picks its rows there. The order of examples depends on `seed`, the epoch
    and the batch size only. At the end rows are brought up to date (`Optimizer.flush`).

    Parameters and state are overwritten in place. Anything else that holds them, such as
    a copy by `nnx.clone`, keeps its values. After any exception, including Ctrl-C, the
    model is as the last dispatch left it.

    Under `jax.set_mesh(make_mesh(...))` the data is divided over the devices, and the
    batches are the same. Make the model and the optimizer there, too::

        with jax.set_mesh(make_mesh(data=2, model=4)):
            model = FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
            optimizer = Optimizer(model, optimizers.adam(1e-3))
            fit(model, optimizer, train)

    A model of histories is trained on a `SequenceDataset`, or what `scan_sequences` gives,
    to predict each item from those before it. Of each row it learns from the last
    `max_length + 1` items::

        train, heldout = histories.split_last()
        model = SASRec(SASRecConfig(), items=train.num_features, rngs=nnx.Rngs(0))
        optimizer = Optimizer(model, optimizers.adam(1e-3))
        fit(model, optimizer, train, validation=heldout, early_stopping=EarlyStopping())

    A click model is trained on a `ClickDataset` or `ScannedClicks`. Its loss is the binary
    cross-entropy of the logits `model(dense, ids)`::

        model = DLRM(DLRMConfig(), num_dense=13, features=train.num_ids, rngs=nnx.Rngs(0))
        optimizer = Optimizer(model, optimizers.adam(5e-4))
        fit(model, optimizer, train, validation=heldout, early_stopping=EarlyStopping())

    While it runs on a terminal, a bar shows loss, examples per second and time left.

    Args:
      model: a `FeedForward`, or a module with the methods of `Fittable`; for histories a
        `SASRec`, or a module with the methods of `HistoryModel`; for clicks a `DLRM` or
        another click model, or a module that is called as `model(dense, ids)`.
      optimizer: the optimizer of this model.
      inputs: `[rows, features]`: a `SparseDataset`, a `CSR` or a SciPy matrix; or what
        `scan_parquet` gives, which is read from disk a chunk at a time; or histories, also
        of `scan_sequences`; or clicks, also of `scan_clicks`, from Parquet; or several by
        name, `{name: source}`, among them `DenseDataset`s and arrays `[rows, ...]`. The
        rows are those of the first source with row names. The other sources are matched
        by row name, or by position if they have no names.
      targets: `[rows, items]`, matched by row name if both have names; or the name of a
        sparse input. By default the single input itself (an autoencoder). Or several
        by name, `{name: source}`, for a model whose `loss` takes such a dict of labels.
      weights: `[rows]`, weight of each example; 1 by default.
      batch_size: examples a step; a multiple of 64 on a mesh that divides batches. The
        last batch of an epoch may be smaller.
      num_epochs: passes over the data, those before a resume included.
      seed: seed of the order of examples.
      shuffle: False trains on the rows in the order of the data, the same in each epoch.
      validation: held-out entries of the rows of `inputs`. After each epoch they are
        ranked among all items that the row does not have in the targets. Of histories: a
        `SequenceDataset`, as `split_last` makes it; if some history of `inputs` has an item
        twice, items that a row has are ranked, too. Of clicks: examples of the same
        columns, read with the same vocabularies.
      k: cut-off of the validation metrics of items; 20 by default.
      early_stopping: stop on a validation metric, and end with the best epoch's weights.
      checkpoint_dir: where to save checkpoints. Only one training at a time can use it.
      checkpoint_seconds: save when this much time has passed since the last checkpoint,
        when an epoch is the best so far, and at the end. 0 saves as often as possible.
      resume: continue from the newest sound checkpoint in `checkpoint_dir`, if there is
        one. The result has the same bits as without the interruption; on a GPU this needs
        `deterministic=True`.
      fused: apply the gradient of each chunk of the output's items where it is made, so
        that no array of the size of its kernel exists beside the kernel and its state.
        The result is the same, up to rounding.
      deterministic: give the same bits in every process on the same kind of GPU, which
        can make steps slower. Without it XLA chooses programs by their time, and adds
        some terms in any order. A resume must keep it.
      log: called after each epoch with the step number and that epoch's history entry,
        by the first process if there are several. It can use model and optimizer. Rows
        may not be up to date: pass `optimizer=optimizer` to `evaluate` and `recommend`.
      after_epoch: called after each epoch with its number, from 1, by every process. It
        can use model and optimizer as `log` can, also for what all processes have to do
        together, such as to measure or to export. It may change the parameters.

    Returns:
      One entry per epoch: "epoch", "step", "loss", "examples_per_second", and the
      validation metrics.

    Raises:
      FloatingPointError: the loss is not finite. The message names epoch and step. The
        last good checkpoint stays.
      TypeError: the model or the optimizer has another type.
      ValueError: shapes, names, values or settings do not fit; this kind of data has no
        use for an argument; a checkpoint is of other data.
      NotImplementedError: `fused` with a tied output, with several targets, or with a
        model that has no `SparseOutput` of its own; one of several inputs is scanned;
        scanned clicks are text; histories have `weights`.
      FileExistsError: `checkpoint_dir` holds checkpoints and `resume` is False.
      BlockingIOError: another process trains into `checkpoint_dir`. The message says
        which one.
      KeyboardInterrupt: Ctrl-C. The steps that were running have ended, and a checkpoint
        was saved. A second Ctrl-C does not wait for these steps. With several processes,
        one of them was told to end by Ctrl-C or SIGTERM, and all have saved.
    """
    dispatching.check_modules(model, optimizer)
    dispatching.check_epochs(batch_size, num_epochs, seed)
    if not checkpoint_seconds >= 0:
        raise ValueError(f"{checkpoint_seconds=} must not be negative")
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "fused": fused,
        "deterministic": deterministic,
    }
    if validation is None and early_stopping is not None:
        raise ValueError("early_stopping needs validation=... to measure its metric on")
    if validation is None and k is not None:
        raise ValueError("k is the cut-off of validation metrics: give validation, too")
    k = 20 if k is None else k
    if fused and isinstance(targets, Mapping):
        raise NotImplementedError("several targets cannot have a fused update")
    of_data: list[Any] = [targets, weights, validation, early_stopping]
    if isinstance(inputs, ClickDataset | ScannedClicks):
        job = click_job(model, inputs, *of_data)
    elif isinstance(inputs, SequenceDataset | ScannedSequences):
        job = sequence_job(model, inputs, *of_data, k=k)
    else:
        job = item_job(model, inputs, *of_data, k=k)
    examples = job.examples
    if job.metric is not None:  # it is the score of checkpoints
        settings["metric"] = job.metric
    if isinstance(examples, Stream):  # by default it depends on the devices' memory
        settings["chunk_rows"] = examples.chunk_rows
    epochs = Epochs(
        examples,
        batch_size=batch_size,
        num_epochs=num_epochs,
        seed=seed,
        shuffle=shuffle,
    )
    # Made before a checkpoint is read: it places the arrays, and reading keeps the places.
    program = Program(
        cast(Trainable, model), optimizer, fused=fused, deterministic=deterministic
    )
    measure = None if job.prepare is None else job.prepare(epochs.batch_size)
    checkpoints = cast(Checkpoints | None, checkpoint_dir)
    if checkpoints is not None or jax.process_count() > 1:
        settings["data"] = examples.fingerprint()
        _check_same_everywhere(settings)
    saver = Saver(checkpoints, program.modules, checkpoint_seconds)
    training = _Training(
        epochs,
        program,
        _begun(Progress(settings), saver, resume),
        saver,
        _AfterEpochs(measure, early_stopping, deterministic, log, after_epoch),
    )
    with contextlib.closing(examples), training.bar, interrupts.deferred():
        training.run_epochs()
    if early_stopping is not None:
        training.end_with_best(early_stopping)
    optimizer.flush(model, deterministic=deterministic)
    return training.progress.history


def _check_same_everywhere(settings: Mapping[str, Any]) -> None:
    """Raises ValueError if the processes have different data."""
    if not processes.is_same_everywhere(settings["data"]):
        raise ValueError("the processes were given different data")
    if not processes.is_same_everywhere(str(settings.get("chunk_rows"))):
        raise ValueError(
            "the processes would train on chunks of different sizes, as their devices "
            "differ in memory; name chunk_rows in scan_parquet"
        )


def _begun(progress: Progress, saver: Saver, resume: bool) -> Progress:
    """The progress from which training goes on."""
    if saver.checkpoints is None:
        if resume:
            raise ValueError("resume=True needs checkpoint_dir=...")
        return progress
    if resume:
        return saver.resume(progress)
    if saver.checkpoints.steps():
        raise FileExistsError(
            f"{saver.checkpoints.directory} holds checkpoints; pass resume=True to "
            "continue from them, or name another directory"
        )
    return progress


@dataclasses.dataclass(frozen=True)
class _AfterEpochs:
    """What to do after each epoch."""

    measure: Measure | None
    stopping: EarlyStopping | None
    deterministic: bool
    log: Callable[[int, Mapping[str, float]], None] | None
    call: Callable[[int], None] | None


class _Training:
    """What one call of `fit` does after its arguments were checked."""

    def __init__(
        self,
        epochs: Epochs,
        program: Program,
        progress: Progress,
        saver: Saver,
        after: _AfterEpochs,
    ):
        self.epochs, self.program, self.after = epochs, program, after
        self.progress, self.saver = progress, saver
        # For each dispatch that may be running: its losses, and the examples of its steps.
        self._waiting: list[tuple[jax.Array, np.ndarray]] = []
        self._best: inplace.HostCopy | None = None
        done = progress.epoch * epochs.num_rows + progress.position * epochs.batch_size
        self.bar = tqdm(
            total=epochs.num_epochs * epochs.num_rows,
            initial=done,
            unit=" examples",
            unit_scale=True,
            disable=not (sys.stderr.isatty() and processes.is_first()),
        )

    def run_epochs(self) -> None:
        """Trains to the end, or until it is stopped."""
        progress = self.progress
        while progress.epoch < self.epochs.num_epochs and not progress.stopped:
            began, before = time.monotonic(), progress.examples
            self._run_epoch()
            seconds = time.monotonic() - began
            entry = progress.end_epoch((progress.examples - before) / seconds)
            self._end_epoch(entry)

    def _run_epoch(self) -> None:
        """Trains on an epoch; after a resume, on what is left of it."""
        progress, ahead = self.progress, 1 if dispatching.launches_ahead() else 0
        for dispatch in self.epochs.dispatches(
            progress.epoch, position=progress.position
        ):
            self._waiting.append((self.program.launch(dispatch), dispatch.examples))
            self._await_all_but(ahead)
            self._save_or_end()
            if dispatch.is_last:  # free its data, to make room for the next chunk
                self._await_all_but(0)
                del dispatch

    def _await_all_but(self, ahead: int) -> None:
        """Waits for all dispatches except the last `ahead`."""
        progress = self.progress
        while len(self._waiting) > ahead:
            losses, examples = self._waiting.pop(0)
            progress.add(self._checked(losses), examples)
            self.bar.set_postfix(
                epoch=f"{progress.epoch + 1}/{self.epochs.num_epochs}",
                loss=f"{progress.loss_sum / progress.examples:.4g}",
                refresh=False,
            )
            self.bar.update(int(examples.sum()))

    def _checked(self, losses) -> np.ndarray:
        """The losses of a dispatch, once it has ended."""
        host = np.asarray(losses)
        bad = np.flatnonzero(~np.isfinite(host))
        if bad.size:
            kept, checkpoints = "", self.saver.checkpoints
            if checkpoints is not None and checkpoints.steps():
                kept = f"; {checkpoints.directory} holds step {checkpoints.steps()[-1]}"
            raise FloatingPointError(
                f"the loss is {host[bad[0]]} in epoch {self.progress.epoch + 1}, step "
                f"{self.progress.position + bad[0] + 1} of it{kept}. Lower the learning "
                "rate, or look for extreme values in the data"
            )
        return host

    def _save_or_end(self) -> None:
        """Within an epoch: saves if it is time to, and ends if a process has to."""
        told, due = self._is_told_and_due()
        if told or due:
            self._await_all_but(0)
            if told or self.progress.examples < self.epochs.num_rows:
                self.saver.save(self.progress)
        if told:
            raise KeyboardInterrupt("a process was told to end")

    def _is_told_and_due(self) -> list[bool]:
        """Whether some process has to end, and whether it is time to save."""
        told, due = interrupts.is_told_to_end(), self.saver.is_due()
        return processes.true_anywhere(told, due)

    def _end_epoch(self, entry: dict[str, float]) -> None:
        """Measures, logs and saves."""
        progress, score = self.progress, None
        if self.after.measure is not None:
            model, optimizer = self.program.modules
            found = self.after.measure(
                model, optimizer=optimizer, deterministic=self.after.deterministic
            )
            entry.update(found)
            score = progress.judge(entry, self.after.stopping)
        if self.after.log is not None and processes.is_first():
            self.after.log(progress.step, entry)
        if self.after.call is not None:
            self.after.call(progress.epoch)
        last = progress.epoch == self.epochs.num_epochs or progress.stopped
        told, due = self._is_told_and_due()
        if last or told or due or score is not None:
            self.saver.save(progress, score)
        if told and not last:
            raise KeyboardInterrupt("a process was told to end")
        stopping = self.after.stopping
        keeps = stopping is not None and stopping.restore_best and not last
        if keeps and score is not None and self.saver.checkpoints is None:
            self._best = inplace.HostCopy(self.program.variables)

    def end_with_best(self, stopping: EarlyStopping) -> None:
        """Restores the best epoch, if that is wanted, and says which it was."""
        progress, kept = self.progress, self.progress.epoch
        if stopping.restore_best and progress.best_epoch not in (0, kept):
            if self._best is not None:
                self._best.restore()
                kept = progress.best_epoch
            else:
                kept = self.saver.restore_best() or progress.best_epoch
        if processes.is_first():
            print(progress.outcome(stopping, kept), file=sys.stderr)
