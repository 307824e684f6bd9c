"""The training loop of `fit`, for all kinds of models."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from sparsejax.callers import warn_caller
from sparsejax.engine.train import dispatch as dispatching
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.engine.train.dispatch import Epochs, Program
from sparsejax.engine.train.job import Job, Measure
from sparsejax.engine.train.progress import EarlyStopping, Estimate, Progress, Saver
from sparsejax.engine.train.resident import Trainable
from sparsejax.engine.train.streaming import Stream
from sparsejax.mesh import interrupts, processes
from sparsejax.mesh.layout import (
    axes_are_explicit,
    axis_sizes,
    put_on_mesh,
    using_auto_axes,
)
from sparsejax.optimizers import inplace
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.training import Looping

# Options that must not change when training resumes.
_SETTINGS = "batch_size", "seed", "shuffle", "fused", "deterministic"


class How(Looping):
    """Options of training in which the numbers of examples per step and of epochs are set."""

    batch_size: int
    num_epochs: int


def train(
    model: Any,
    optimizer: Optimizer,
    job: Job,
    how: How,
    checkpoints: Checkpoints | None,
) -> list[dict[str, float]]:
    """Trains a model in place, and returns a history entry for each epoch, see `fit`."""
    examples = job.examples
    settings = {**{name: getattr(how, name) for name in _SETTINGS}, **job.settings}
    if job.metric is not None:  # the metric's value is the score in checkpoints
        settings["metric"] = job.metric
    # The default size of a chunk depends on the memory of the devices.
    if isinstance(examples, Stream):
        settings["chunk_rows"] = examples.chunk_rows
    epochs = Epochs(
        examples,
        batch_size=how.batch_size,
        num_epochs=how.num_epochs,
        seed=how.seed,
        shuffle=how.shuffle,
    )
    overflows = None if job.exchange is None else job.exchange(epochs.batch_size)
    # The program is made before a checkpoint is read: it places the arrays, and the checkpoint's
    # arrays are read with this placement.
    program = Program(
        cast(Trainable, model),
        optimizer,
        fused=how.fused,
        deterministic=how.deterministic,
    )
    measure = None if job.prepare is None else job.prepare(epochs.batch_size)
    if checkpoints is not None or jax.process_count() > 1:
        settings["data"] = examples.fingerprint()
        _check_same_everywhere(settings)
    stopping = how.early_stopping
    restores = stopping is not None and stopping.restore_best
    if restores and checkpoints is None and optimizer.host_rows(model):
        raise ValueError(
            "early_stopping restores the best epoch, whose rows in host memory need a "
            "folder: give checkpoint_dir, or EarlyStopping(restore_best=False)"
        )
    saver = Saver(checkpoints, program.modules, how.checkpoint_seconds)
    progress = _begun(Progress(settings), saver, how.resume)
    training = _Training(
        epochs, program, progress, saver, how, measure, overflows, job.rates
    )
    unsaved = lambda: saver.has_unsaved(training.progress)
    with contextlib.closing(examples), training.bar, interrupts.deferred(unsaved):
        training.run_epochs()
    if how.early_stopping is not None:
        training.end_with_best(how.early_stopping)
    optimizer.flush(model, deterministic=how.deterministic)
    return training.progress.history


@contextlib.contextmanager
def on_auto_axes(model: Any, optimizer: Optimizer) -> Generator[None]:
    """Makes mesh axes Auto while this context is open; then restores the arrays on the user's
    mesh.
    """
    if not axes_are_explicit():
        yield
        return
    axis_sizes()  # raises an error for an unsupported mesh
    try:
        with using_auto_axes():
            yield
    finally:
        nnx.update((model, optimizer), put_on_mesh(nnx.state((model, optimizer))))


@contextlib.contextmanager
def alone(
    directory: str | pathlib.Path | Checkpoints | None,
) -> Generator[Checkpoints | None]:
    """Opens the checkpoints of a directory and locks it against trainings of other processes."""
    if directory is None:
        yield None
        return
    if not isinstance(directory, Checkpoints):
        directory = Checkpoints(directory)
    with directory.held():
        yield directory


def _check_same_everywhere(settings: Mapping[str, Any]) -> None:
    """Raises ValueError if the data differs between processes."""
    if not processes.is_same_everywhere(settings["data"]):
        raise ValueError("the processes were given different data")
    if not processes.is_same_everywhere(str(settings.get("chunk_rows"))):
        raise ValueError(
            "the processes would train on chunks of different sizes, as their devices "
            "differ in memory; name chunk_rows in scan_parquet"
        )


def _begun(progress: Progress, saver: Saver, resume: bool) -> Progress:
    """The progress at the start: read from a checkpoint if training resumes, else empty."""
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


def finite(losses: jax.Array, progress: Progress, saver: Saver) -> np.ndarray:
    """Waits for a dispatch and returns its losses.

    Raises:
      FloatingPointError: a loss is not finite.
    """
    host = np.asarray(losses)
    bad = np.flatnonzero(~np.isfinite(host))
    if bad.size:
        kept, checkpoints = "", saver.checkpoints
        if checkpoints is not None and checkpoints.steps():
            kept = f"; {checkpoints.directory} holds step {checkpoints.steps()[-1]}"
        raise FloatingPointError(
            f"the loss is {host[bad[0]]} in epoch {progress.epoch + 1}, step "
            f"{progress.position + bad[0] + 1} of it{kept}. Lower the learning "
            "rate, or look for extreme values in the data"
        )
    return host


class _Training:
    """The state of one call of `fit`, after its arguments were checked."""

    def __init__(
        self,
        epochs: Epochs,
        program: Program,
        progress: Progress,
        saver: Saver,
        how: How,
        measure: Measure | None,
        overflows: Callable[[], int] | None,
        rates: Callable[[], Callable[[], Mapping[str, float]]] | None,
    ):
        self._rates = rates
        self._overflows, self._warned = overflows, False
        self.epochs, self.program, self.how = epochs, program, how
        self.measure = measure
        self.progress, self.saver = progress, saver
        # The losses of each dispatch that may still run, and the number of examples in each of its
        # steps.
        self._waiting: list[tuple[jax.Array, np.ndarray]] = []
        self._best: inplace.HostCopy | None = None
        done = progress.epoch * epochs.num_rows + progress.position * epochs.batch_size
        self._done, self._total = done, epochs.num_epochs * epochs.num_rows
        self._estimate = Estimate()
        self.bar = tqdm(
            total=self._total,
            initial=done,
            unit=" examples",
            unit_scale=True,
            disable=not (sys.stderr.isatty() and processes.is_first()),
        )

    def run_epochs(self) -> None:
        """Trains until the last epoch, or until training is stopped."""
        progress = self.progress
        while progress.epoch < self.epochs.num_epochs and not progress.stopped:
            began, before = time.monotonic(), progress.examples
            crowded = self._crowded()
            rates = None if self._rates is None else self._rates()
            self._run_epoch()
            seconds = time.monotonic() - began
            steps = progress.position
            entry = progress.end_epoch((progress.examples - before) / seconds)
            if self._overflows is not None:
                entry["overflows"] = self._crowded() - crowded
                self._warn_if_crowded(entry["overflows"], steps)
            if rates is not None:
                entry.update(rates())
            self._end_epoch(entry)

    def _crowded(self) -> int:
        """How many lookups so far had ids that did not fit into the exchange."""
        return 0 if self._overflows is None else self._overflows()

    def _warn_if_crowded(self, overflows: float, steps: int) -> None:
        """Warns, once, if too many steps of an epoch were slow because ids did not fit."""
        if overflows <= steps / 100 or self._warned or not processes.is_first():
            return
        self._warned = True
        warn_caller(
            f"in {overflows:,.0f} of {steps:,} steps the devices had too few places for the "
            "ids that they exchange, and gathered all of them, which takes longer; give "
            "fit a larger exchange_room"
        )

    def _run_epoch(self) -> None:
        """Trains on an epoch; after a resume, only on its remaining steps."""
        progress, ahead = self.progress, 1 if dispatching.launches_ahead() else 0
        for dispatch in self.epochs.dispatches(
            progress.epoch, position=progress.position
        ):
            self._waiting.append((self.program.launch(dispatch), dispatch.examples))
            self._await_all_but(ahead)
            self._save_or_end()
            # Frees the dispatch's data, to make memory for the next chunk.
            if dispatch.is_last:
                self._await_all_but(0)
                del dispatch

    def _await_all_but(self, ahead: int) -> None:
        """Waits for all dispatches except the last `ahead` ones."""
        progress = self.progress
        while len(self._waiting) > ahead:
            losses, examples = self._waiting.pop(0)
            progress.add(finite(losses, progress, self.saver), examples)
            self.bar.set_postfix(
                epoch=f"{progress.epoch + 1}/{self.epochs.num_epochs}",
                loss=f"{progress.loss_sum / progress.examples:.4g}",
                refresh=False,
            )
            self.bar.update(int(examples.sum()))
            self._done += int(examples.sum())
            said = self._estimate.after(self._done, self._total)
            if said is not None and processes.is_first():
                tqdm.write(said, file=sys.stderr)

    def _save_or_end(self) -> None:
        """Called between dispatches: saves a checkpoint if it is due, and exits if a process
        must exit.
        """
        told, due = self._is_told_and_due()
        if told or due:
            self._await_all_but(0)
            if told or self.progress.examples < self.epochs.num_rows:
                self.saver.save(self.progress)
        if told:
            raise KeyboardInterrupt("a process was told to end")

    def _is_told_and_due(self) -> list[bool]:
        """Whether any process must exit, and whether a checkpoint is due."""
        told, due = interrupts.is_told_to_end(), self.saver.is_due()
        return processes.true_anywhere(told, due)

    def _end_epoch(self, entry: dict[str, float]) -> None:
        """Measures the model, logs the entry and saves a checkpoint."""
        progress, score = self.progress, None
        if self.measure is not None:
            model, optimizer = self.program.modules
            found = self.measure(
                model, optimizer=optimizer, deterministic=self.how.deterministic
            )
            entry.update(found)
            score = progress.judge(entry, self.how.early_stopping)
        if self.how.log is not None and processes.is_first():
            self.how.log(progress.step, entry)
        if self.how.after_epoch is not None:
            self.how.after_epoch(progress.epoch)
        last = progress.epoch == self.epochs.num_epochs or progress.stopped
        told, due = self._is_told_and_due()
        if last or told or due or score is not None:
            self.saver.save(progress, score)
        if told and not last:
            raise KeyboardInterrupt("a process was told to end")
        stopping = self.how.early_stopping
        keeps = stopping is not None and stopping.restore_best and not last
        if keeps and score is not None and self.saver.checkpoints is None:
            self._best = inplace.HostCopy(self.program.variables)

    def end_with_best(self, stopping: EarlyStopping) -> None:
        """Restores the best epoch if `stopping` asks for it, and reports which epoch it was."""
        progress, kept = self.progress, self.progress.epoch
        if stopping.restore_best and progress.best_epoch not in (0, kept):
            if self._best is not None:
                self._best.restore()
                kept = progress.best_epoch
            else:
                kept = self.saver.restore_best() or progress.best_epoch
        if processes.is_first():
            print(progress.outcome(stopping, kept), file=sys.stderr)
