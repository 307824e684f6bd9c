"""Trains on each file that appears in a folder, once, until a signal arrives.

Batches contain the rows of a file in order, and no batch has rows of two files. So the result
depends on the files alone, not on their times of arrival or on interruptions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import numpy as np

from sparsejax import ending
from sparsejax.engine.batching import bucket
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.engine.train.dispatch import (
    Dispatch,
    Program,
    entries_of_step,
    epoch_order,
    sorts_ahead,
    step_size,
    steps_per_dispatch,
)
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.loop import finite
from sparsejax.engine.train.progress import Progress, Saver
from sparsejax.engine.train.resident import Examples, Resident, Sizes, Trainable
from sparsejax.mesh import interrupts
from sparsejax.mesh.layout import parts_of_axes, put_on_mesh
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.training import Exact, Saved
from sparsejax.sparse import CSR, host_rows, with_room

_KEPT = 1000  # number of newest history entries that are kept
# Seconds between two checks for a signal, while there is no file to train on.
_NAP = 0.25


@dataclasses.dataclass
class Followed(Progress):
    """The progress of following. Each file counts as an epoch.

    Attributes:
      files: names of the files that were trained on and still exist.
      file: name of the file that is being trained on; empty between two files.
    """

    files: list[str] = dataclasses.field(default_factory=list)
    file: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feed:
    """A source of files that appear over time.

    Attributes:
      names: function that returns the names of the existing files, in the order to train on them;
          None if they are unknown at the moment.
      read: function that reads the file with a given name. It returns None for a file without
          rows.
      seconds: seconds between two checks for new files, while there is no file to train on.
    """

    names: Callable[[], Sequence[str] | None]
    read: Callable[[str], Job | None]
    seconds: float


class How(Exact, Saved):
    """Options for training on files.

    Attributes:
      batch_size: number of examples in a step; the last step of a file may have fewer.
      export_seconds: seconds between two exports.
    """

    batch_size: int
    export_seconds: float


@runtime_checkable
class Exports(Protocol):
    """Exports the trained model repeatedly."""

    def __call__(self) -> None:
        """Starts an export."""

    def has_failed(self) -> bool:
        """Whether the last export has ended with an error."""
        ...


def follow(
    model: Any,
    optimizer: Optimizer,
    feed: Feed,
    how: How,
    checkpoints: Checkpoints,
    export: Exports | None,
) -> None:
    """Trains a model in place on the existing and future files of a feed.

    It returns after SIGINT, or after SIGTERM inside `interrupts.noted`. Then it has finished the
    running steps and written a checkpoint and an export. It does not wait after a second signal.

    Args:
      model: model to train.
      optimizer: the model's optimizer.
      feed: source of the files.
      how: options of training. `how.log` is called after each file.
      checkpoints: checkpoints to resume from and to write. The first is written before the first
          file is read.
      export: function that starts an export. It is called before the first file is read, and at
          the end. In between it is called when `how.export_seconds` have passed, if there are new
          steps or the last export failed.
        once more at the end.

    Raises:
      FloatingPointError: a loss is not finite.
      ValueError: the file of an interrupted training has fewer rows than at the checkpoint; or a
          file cannot be read. The checkpoint and the export contain the training before it.
    """
    program = Program(
        cast(Trainable, model), optimizer, deterministic=how.deterministic
    )
    saver = Saver(checkpoints, program.modules, how.checkpoint_seconds)
    begun = Followed({"batch_size": how.batch_size, "follow": True})
    progress = cast(Followed, saver.resume(begun))
    following = _Following(program, progress, saver, feed, how.batch_size, how.log)
    following.exports = _Exports(export, how.export_seconds, progress.step)
    told = False
    try:
        with interrupts.deferred(following.is_worth_saving):
            try:
                following.save_and_export()
                following.is_ready = True
                following.run()
            except Exception:
                if following.is_whole:
                    following.save_and_export()
                raise
            following.save_and_export()
            told = interrupts.is_told_to_end()
    except KeyboardInterrupt:
        if not told:  # the second signal has already raised an exception
            raise
        # The command now exports and ends as it does without a signal.
        ending.answered()


class _Exports:
    """Starts exports at intervals of some seconds."""

    def __init__(self, call: Exports | None, seconds: float, step: int):
        self._call, self._seconds = call, seconds
        self._last, self._step = -float("inf"), step - 1

    def do(self, step: int, *, if_due: bool = False) -> None:
        """Starts an export if there are new steps, or if the last export failed.

        Args:
          step: number of steps done so far.
          if_due: whether to export only if the interval has passed.
        """
        if self._call is None:
            return
        is_new = self._call.has_failed() or step > self._step
        waited = time.monotonic() - self._last
        if is_new and (waited >= self._seconds or not if_due):
            self._last, self._step = time.monotonic(), step
            self._call()


class _Following:
    """The state of one call of `follow`."""

    exports: _Exports

    def __init__(
        self,
        program: Program,
        progress: Followed,
        saver: Saver,
        feed: Feed,
        batch_size: int,
        log: Callable[[int, Mapping[str, float]], None] | None,
    ):
        self.program, self.progress, self.saver = program, progress, saver
        self.feed, self.log = feed, log
        self._parts = parts_of_axes()[0]
        self._asked = batch_size
        # Rows of a step, steps of a dispatch, and the row numbers of each step; one program serves
        # all files.
        self._sizes: tuple[int, int, np.ndarray] | None = None
        self._room: dict[int, int] = {}
        # Whether the model's arrays agree with the progress. They do not while steps run.
        self.is_whole = True
        # Whether the first checkpoint and the first export were made.
        self.is_ready = False

    def is_worth_saving(self) -> bool:
        """Whether to delay a signal until a checkpoint and an export are written.

        This is False while the first step compiles: then the last checkpoint is still complete.
        """
        unsaved = self.saver.has_unsaved(self.progress)
        return self.is_ready and (self.is_whole or unsaved)

    def run(self) -> None:
        """Trains until a signal arrives."""
        while not interrupts.is_told_to_end():
            name = self._next()
            if name is None:
                self._look_at_clock()
                self._wait()
            else:
                self._train_on(name)

    def save_and_export(self) -> None:
        """Writes a checkpoint and an export, if there are new steps."""
        self._save()
        self.exports.do(self.progress.step)

    def _save(self) -> None:
        checkpoints = self.saver.checkpoints
        assert checkpoints is not None
        if self.progress.step not in checkpoints.steps():
            self.saver.save(self.progress)

    def _next(self) -> str | None:
        """The name of the next file to train on, or None."""
        names, progress = self.feed.names(), self.progress
        if names is None:
            return None
        known = set(progress.files)
        if names:  # an empty folder may mean that its disk is not mounted
            progress.files = [name for name in names if name in known]
        if progress.file:
            if progress.file not in names:
                raise ValueError(
                    f"{progress.file} was trained on in part, and is not there any more: "
                    "put it back until it is done"
                )
            return progress.file
        return next((name for name in names if name not in known), None)

    def _wait(self) -> None:
        end = time.monotonic() + self.feed.seconds
        while not interrupts.is_told_to_end():
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _NAP))

    def _train_on(self, name: str) -> None:
        """Trains on a file. After a resume, trains only on the rows that are left."""
        progress = self.progress
        job = self.feed.read(name)
        num_rows = 0 if job is None else job.examples.num_rows
        if progress.examples > num_rows:
            raise ValueError(
                f"{name} has {num_rows:,} rows, but {progress.examples:,} of it were trained "
                "on: it was changed. Write new rows to new files"
            )
        if job is not None:
            examples = job.examples
            assert isinstance(examples, Examples)
            if self._sizes is None:
                self._sizes = self._begin(examples)
            rates = None if job.rates is None else job.rates()
            began, before = time.monotonic(), progress.examples
            progress.file = name
            while progress.examples < examples.num_rows:
                self._steps(examples)
                if progress.examples < examples.num_rows:
                    self._look_at_clock()
                    if interrupts.is_told_to_end():
                        return
            entry = progress.end_epoch(
                (examples.num_rows - before) / (time.monotonic() - began)
            )
            if rates is not None:
                entry.update(rates())
            del progress.history[:-_KEPT]
            if self.log is not None:
                self.log(progress.step, entry)
        progress.file = ""
        progress.files.append(name)
        self._look_at_clock()

    def _begin(self, examples: Examples) -> tuple[int, int, np.ndarray]:
        """Chooses the sizes of the single program that trains on all files.

        The exchange of ids over a mesh is not planned from the first file: after a resume this
        would be another file, and sums in another order would differ in their last bits.
        """
        size = step_size(self._asked, self._asked, self._parts)
        like = [1 if isinstance(x, CSR) else x[:1].size for x in examples.matrices]
        entries = entries_of_step([size * n for n in like], self._parts, ())
        steps = steps_per_dispatch(entries)
        order = epoch_order(
            jax.random.key(0), 0, steps * size, size, self._parts, shuffle=False
        )
        return size, steps, np.asarray(order)

    def _steps(self, examples: Examples) -> None:
        """Runs the next steps of a file: as many as one dispatch has."""
        assert self._sizes is not None
        size, steps, order = self._sizes
        start = self.progress.examples
        count = min(examples.num_rows - start, steps * size)
        rows = np.arange(start, start + steps * size)
        rows = np.where(rows < examples.num_rows, rows, -1)
        matrices, room = [], []
        for i, matrix in enumerate(examples.matrices):
            if isinstance(matrix, CSR):
                found, most = self._padded(i, host_rows(matrix, rows), size)
            else:
                part = matrix[start : start + count]
                more = [(0, len(rows) - count)] + [(0, 0)] * (matrix.ndim - 1)
                found, most = np.pad(part, more), bucket(size * part[:1].size)
            matrices.append(found)
            room.append(most)
        data = Resident.of(Examples(examples.roles, tuple(matrices), None))
        here = np.where(order < count, order, -1).astype(np.int32)
        done = np.minimum(size, count - np.arange(-(-count // size)) * size)
        dispatch = Dispatch(
            data=data,
            rows=put_on_mesh(jax.numpy.asarray(here)),
            first=0,
            examples=done,
            sizes=Sizes(tuple(room), steps, sorts_ahead()),
            is_last=count < len(rows),
        )
        self.is_whole = False
        losses = self.program.launch(dispatch)
        self.progress.add(finite(losses, self.progress, self.saver), done)
        self.is_whole = True

    def _padded(self, number: int, matrix: CSR, size: int) -> tuple[CSR, int]:
        """Pads a CSR to a capacity; returns it, and the capacity for the entries of a batch.

        Capacities never shrink, so that few programs are compiled.
        """
        lengths = np.diff(matrix.indptr)
        most = int(lengths.reshape(-1, size).sum(axis=1).max())
        room = max(self._room.get(number, 0), bucket(most))
        self._room[number] = room
        return with_room(matrix, room * (len(lengths) // size)), room

    def _look_at_clock(self) -> None:
        """Writes a checkpoint or an export if its time interval has passed."""
        if self.saver.is_due():
            self._save()
        self.exports.do(self.progress.step, if_due=True)
