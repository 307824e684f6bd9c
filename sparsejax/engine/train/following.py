"""Trains on files as they appear, each once, until a signal ends it.

The batches of a file are its rows in their order, and no batch has rows of two files.
So the result depends on the files alone, not on when they came or on how often it was
interrupted.
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

_KEPT = 1000  # newest entries of the history that are kept
_NAP = 0.25  # seconds after which a waiting process looks for a signal


@dataclasses.dataclass
class Followed(Progress):
    """How far following has come. An epoch is a file.

    Attributes:
      files: names of the files that were trained on, and are there still.
      file: name of the one that is trained on; empty between two.
    """

    files: list[str] = dataclasses.field(default_factory=list)
    file: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feed:
    """Files that appear.

    Attributes:
      names: function that returns the names of the files that exist, in the order in which they
        count; None if that is unknown now.
      read: function that reads the file with a name. A file without rows gives None.
      seconds: between two looks, while there is nothing to do.
    """

    names: Callable[[], Sequence[str] | None]
    read: Callable[[str], Job | None]
    seconds: float


class How(Exact, Saved):
    """How to train on files.

    Attributes:
      batch_size: examples of a step; the last one of a file may have fewer.
      export_seconds: seconds between two exports.
    """

    batch_size: int
    export_seconds: float


@runtime_checkable
class Exports(Protocol):
    """Exports of the trained model, one after the other."""

    def __call__(self) -> None:
        """Begins the next one."""

    def has_failed(self) -> bool:
        """Whether the last one has ended and was not written."""
        ...


def follow(
    model: Any,
    optimizer: Optimizer,
    feed: Feed,
    how: How,
    checkpoints: Checkpoints,
    export: Exports | None,
) -> None:
    """Trains a model in place on the files that a feed has and will have.

    Returns after SIGINT, or within `interrupts.noted` SIGTERM. Then the steps that ran
    have ended, a checkpoint has them, and so has an export. A second signal does not
    wait.

    Args:
      model: the model.
      optimizer: its optimizer.
      feed: source of the files.
      how: how it trains. `how.log` is called after each file.
      checkpoints: checkpoints to go on from, and to write. There is one before the first file
        is read.
      export: function that is called when `how.export_seconds` have passed since the last call, if
        there were steps since then or it has failed; first before the first file is read, and
        once more at the end.

    Raises:
      FloatingPointError: a loss is not finite.
      ValueError: the file that was trained on at the last checkpoint has fewer rows now; or a
        file cannot be read. The training before it is in the checkpoint and the export.
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
        if not told:  # by the second signal
            raise
        ending.answered()  # the command exports, and ends as it does without a signal


class _Exports:
    """Exports that are some seconds apart."""

    def __init__(self, call: Exports | None, seconds: float, step: int):
        self._call, self._seconds = call, seconds
        self._last, self._step = -float("inf"), step - 1

    def do(self, step: int, *, if_due: bool = False) -> None:
        """Exports the new steps, and the rows that the last export has not written.

        Args:
          step: how many were done.
          if_due: do it only if it is time to.
        """
        if self._call is None:
            return
        is_new = self._call.has_failed() or step > self._step
        waited = time.monotonic() - self._last
        if is_new and (waited >= self._seconds or not if_due):
            self._last, self._step = time.monotonic(), step
            self._call()


class _Following:
    """The work of one call of `follow`."""

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
        # Rows of a step, steps of a dispatch, and which rows each has: there is one program.
        self._sizes: tuple[int, int, np.ndarray] | None = None
        self._room: dict[int, int] = {}
        # Whether the arrays are those that the progress says: not while steps run.
        self.is_whole = True
        self.is_ready = False  # there is a first checkpoint, and an export

    def is_worth_saving(self) -> bool:
        """Whether a signal waits for a checkpoint and an export.

        It does not while the first step compiles: the earlier checkpoint lacks nothing.
        """
        unsaved = self.saver.has_unsaved(self.progress)
        return self.is_ready and (self.is_whole or unsaved)

    def run(self) -> None:
        """Trains until a signal ends it."""
        while not interrupts.is_told_to_end():
            name = self._next()
            if name is None:
                self._look_at_clock()
                self._wait()
            else:
                self._train_on(name)

    def save_and_export(self) -> None:
        """Writes a checkpoint and an export, if there is something new."""
        self._save()
        self.exports.do(self.progress.step)

    def _save(self) -> None:
        checkpoints = self.saver.checkpoints
        assert checkpoints is not None
        if self.progress.step not in checkpoints.steps():
            self.saver.save(self.progress)

    def _next(self) -> str | None:
        """The name of the file to train on, if there is one."""
        names, progress = self.feed.names(), self.progress
        if names is None:
            return None
        known = set(progress.files)
        if names:  # an empty folder may be that of a disk that is not there now
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
        """Trains on a file; after a resume, on the rest of it."""
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
        """Settles the sizes of the one program that trains on all files.

        How ids cross a mesh is not planned by a file: a resume begins with another file, and
        sums would have other bits.
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
        """Does the next steps of a file, as many as a dispatch has."""
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
        """A matrix of lists with room for more, and the room of a batch.

        Rooms only grow, so there are few programs.
        """
        lengths = np.diff(matrix.indptr)
        most = int(lengths.reshape(-1, size).sum(axis=1).max())
        room = max(self._room.get(number, 0), bucket(most))
        self._room[number] = room
        return with_room(matrix, room * (len(lengths) // size)), room

    def _look_at_clock(self) -> None:
        """Saves and exports, if it is time to."""
        if self.saver.is_due():
            self._save()
        self.exports.do(self.progress.step, if_due=True)
