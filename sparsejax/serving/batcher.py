"""Dynamic batches: what waits while the device works is the next batch.

Requests are served first in, first out. While the device is idle nothing waits. While it
works, the next batch fills; a batch that is full is packed on the host meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np

from sparsejax.predictors.runtime import Rows
from sparsejax.serving.engine import Engine, Shape, Size

Answer = list[np.ndarray]


class BusyError(RuntimeError):
    """So many rows wait already that a further request is refused."""


class ClosedError(RuntimeError):
    """The batcher takes no further requests."""


class DeviceError(RuntimeError):
    """The device could not run a batch."""


class Failures:
    """Batches in a row that a device could not run, of all batchers that have this count.

    Attributes:
      count: number of them.
    """

    def __init__(self):
        self.count, self._lock = 0, threading.Lock()

    def tell(self, *, failed: bool) -> None:
        """Counts a batch. One that ran begins anew."""
        with self._lock:
            self.count = self.count + 1 if failed else 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch that ran, for metrics.

    Attributes:
      shape: of its program.
      rows: that are of requests; the others are padding.
      entries: of the sparse input that has most.
      waited: seconds in the queue, of each part of a request.
      packing: seconds on the host.
      device: seconds on the device, with copies.
    """

    shape: Shape
    rows: int
    entries: int
    waited: list[float]
    packing: float
    device: float


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    future: Future[Answer]
    deadline: float | None
    queued: float
    answers: list[Answer | None]


@dataclasses.dataclass(eq=False, slots=True)
class _Piece:
    """Rows of a request that go into one batch."""

    request: _Request
    number: int
    size: Size
    given: Sequence[Rows]


@dataclasses.dataclass(eq=False, slots=True)
class _Packed:
    pieces: list[_Piece]
    size: Size
    shape: Shape
    arguments: list[Any]
    taken: float
    packing: float


class Batcher:
    """Puts requests together to batches, and runs them on one engine.

    Attributes:
      engine: that runs them.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_wait: float = 0.0,
        max_rows: int = 4096,
        observe: Callable[[Batch], None] = lambda batch: None,
        failures: Failures | None = None,
    ):
        """Starts two threads, which pack and run.

        Args:
          engine: runs the batches.
          max_wait: seconds that a batch which is not full may wait on an idle device.
          max_rows: that may wait; further requests are refused.
          observe: is told of each batch, in a thread of the batcher.
          failures: a count that it shares with other batchers of the device.

        Raises:
          ValueError: `max_wait` is negative, or `max_rows` not positive.
        """
        if not max_wait >= 0 or max_rows < 1:
            raise ValueError(
                "expected max_wait of 0 or more and max_rows of 1 or more, got "
                f"{max_wait} and {max_rows}"
            )
        self.engine = engine
        self._failures = Failures() if failures is None else failures
        self._max_wait, self._max_rows, self._observe = max_wait, max_rows, observe
        self._changed = threading.Condition()
        self._queue: collections.deque[_Piece] = collections.deque()
        self._rows = self._entries = 0  # of the queue
        self._next: _Packed | None = None
        self._working = self._closed = self._all_packed = False
        self._full_rows = max(shape.rows for shape in engine.shapes)
        self._full_entries = max(shape.entries for shape in engine.shapes)
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._pack, self._run)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, given: Sequence[Rows], *, deadline: float | None = None
    ) -> Future[Answer]:
        """Asks for the outputs of some rows, as the predictor's `rows_of_...` makes them.

        A future that is cancelled costs no device time any more, unless it is on the device.

        Args:
          given: for each input of the programs its rows.
          deadline: on the clock of `time.monotonic`.

        Returns:
          The outputs in order, each `[rows, ...]`. The future raises FloatingPointError if
          one is NaN, TimeoutError if the deadline passed before the rows were on the
          device, and DeviceError if the device failed.

        Raises:
          BusyError: too many rows wait.
          ClosedError: the batcher was closed.
          TooLargeError: no shape holds one of the rows.
        """
        pieces = self.engine.pieces(given)
        future: Future[Answer] = Future()
        if not pieces:
            future.set_result(self._no_rows())
            return future
        request = _Request(future, deadline, time.monotonic(), [None] * len(pieces))
        asked = [_Piece(request, n, *piece) for n, piece in enumerate(pieces)]
        rows = sum(piece.size.rows for piece in asked)
        with self._changed:
            if self._closed:
                raise ClosedError("this service ends and takes no further requests")
            # A request that is larger than the queue is taken if nothing waits.
            if self._rows and self._rows + rows > self._max_rows:
                raise BusyError(
                    f"{self._rows:,} rows wait already, of {self._max_rows:,} that may; "
                    "try again later"
                )
            for piece in asked:
                self._count(piece, 1)
            self._queue += asked
            self._changed.notify_all()
        return future

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Takes what this thread submits in the block when the block is done."""
        with self._changed:
            yield

    @property
    def failures(self) -> int:
        """Batches in a row that the device could not run."""
        return self._failures.count

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return self._rows

    def close(self) -> None:
        """Takes no further requests, and returns when those it has are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _no_rows(self) -> Answer:
        outputs = self.engine.predictor.signature.outputs
        return [np.zeros((0, *each.shape), each.dtype) for each in outputs]

    def _count(self, piece: _Piece, sign: int) -> None:
        self._rows += sign * piece.size.rows
        self._entries += sign * max(piece.size.entries, default=0)

    def _is_full(self) -> bool:
        return self._rows >= self._full_rows or self._entries >= self._full_entries

    def _may_pack(self) -> bool:
        if not self._queue or self._next is not None:
            return False
        if self._closed or self._is_full():
            return True
        waited = time.monotonic() - self._queue[0].request.queued
        return not self._working and waited >= self._max_wait

    def _pack(self) -> None:
        """The work of the first thread."""
        while True:
            with self._changed:
                while not self._may_pack():
                    if self._closed and not self._queue:
                        self._all_packed = True
                        self._changed.notify_all()
                        return
                    self._changed.wait(self._patience())
                late, batch = self._take()
            for piece in late:
                text = "the deadline passed before the request was on the device"
                _fail([piece], TimeoutError(text))
            if batch is not None:
                self._hand_over(*batch)

    def _patience(self) -> float | None:
        """Seconds until an idle device begins what waits; None while there is nothing."""
        if not self._queue or self._working or self._next is not None:
            return None
        begins = self._queue[0].request.queued + self._max_wait
        return max(begins - time.monotonic(), 0.0)

    def _take(self) -> tuple[list[_Piece], tuple[list[_Piece], Size, Shape] | None]:
        """Takes the next batch from the queue; before it those that came too late.

        As many rows as a shape holds, in their order. If they are not worth it (see
        `Engine.is_filled`), and some of them a smaller one, the others wait for the next batch.
        """
        now, late = time.monotonic(), []
        taken: list[_Piece] = []
        size = shape = best = None
        while self._queue:
            piece = self._queue[0]
            deadline = piece.request.deadline
            is_late = deadline is not None and deadline <= now
            if is_late or piece.request.future.done():
                self._count(self._queue.popleft(), -1)
                late += [piece] * is_late
                continue
            together = piece.size if size is None else size + piece.size
            found = self.engine.shape_for(together)
            if found is None:
                break
            taken.append(self._queue.popleft())
            size, shape = together, found
            if self.engine.is_filled(shape, size.rows):
                best = len(taken), size, shape
        if size is None or shape is None:
            return late, None
        count, size, shape = best or (len(taken), size, shape)
        self._queue.extendleft(reversed(taken[count:]))
        for piece in taken[:count]:
            self._count(piece, -1)
        return late, (taken[:count], size, shape)

    def _hand_over(self, pieces: list[_Piece], size: Size, shape: Shape) -> None:
        """Packs a batch for the second thread."""
        taken = time.monotonic()
        try:
            arguments = self.engine.packed(shape, [piece.given for piece in pieces])
        except Exception as error:  # noqa: BLE001 - the futures raise it
            _fail(pieces, error)
            return
        packing = time.monotonic() - taken
        with self._changed:
            self._next = _Packed(pieces, size, shape, arguments, taken, packing)
            self._changed.notify_all()

    def _run(self) -> None:
        """The work of the second thread."""
        while True:
            with self._changed:
                while self._next is None:
                    if self._all_packed:
                        return
                    self._changed.wait()
                packed, self._next, self._working = self._next, None, True
                self._changed.notify_all()
            begun, failed, found = time.monotonic(), None, []
            try:
                found = self.engine.run(packed.shape, packed.arguments)
            except Exception as error:  # noqa: BLE001 - JAX raises many kinds
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                failed = DeviceError(f"the device failed: {reason}")
            device = time.monotonic() - begun
            with self._changed:  # the next batch begins before answers are given
                self._working = False
                self._changed.notify_all()
            self._failures.tell(failed=failed is not None)
            if failed is None:
                _answer(packed.pieces, found)
            else:
                _fail(packed.pieces, failed)
            waited = [packed.taken - piece.request.queued for piece in packed.pieces]
            entries = max(packed.size.entries, default=0)
            times = {"waited": waited, "packing": packed.packing, "device": device}
            self._observe(Batch(packed.shape, packed.size.rows, entries, **times))


def _fail(pieces: Sequence[_Piece], error: Exception) -> None:
    for piece in pieces:
        with contextlib.suppress(InvalidStateError):  # it was cancelled
            piece.request.future.set_exception(error)


def _answer(pieces: Sequence[_Piece], found: Answer) -> None:
    """Gives each request its rows. One with NaN fails alone."""
    start = 0
    for piece in pieces:
        part = slice(start, start + piece.size.rows)
        start = part.stop
        # Copies, so that an answer does not hold the whole batch.
        answer = [array[part].copy() for array in found]
        if any(np.isnan(array).any() for array in answer if array.dtype.kind == "f"):
            text = (
                "the model gives NaN; its weights or the values of a row are not finite"
            )
            _fail([piece], FloatingPointError(text))
            continue
        request = piece.request
        request.answers[piece.number] = answer
        parts = [each for each in request.answers if each is not None]
        if len(parts) == len(request.answers):
            whole = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
            with contextlib.suppress(InvalidStateError):
                request.future.set_result(parts[0] if len(parts) == 1 else whole)
