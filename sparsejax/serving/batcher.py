"""Dynamic batches: requests that wait while the device works form the next batch.

Requests are served in order of arrival. While the device is idle, no request waits. While it
is busy, the next batch fills up; a full batch is packed on the host meanwhile. A device
that queues work counts as free as soon as a batch is started on it.

Each batch is taken, packed, run and answered in one thread. Passing it to
another thread would cost tens of microseconds, and more when Python is busy.
"""

from __future__ import annotations

import asyncio
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
# Futures for an answer, which another thread or an asyncio loop awaits.
Waiting = Future[Answer] | asyncio.Future[Answer]
# A future, and the answer or the error that it will get.
_Settled = tuple[Waiting, Answer | Exception]


class BusyError(RuntimeError):
    """A request is refused because too many rows are waiting already."""


class ClosedError(RuntimeError):
    """The batcher is closed and accepts no further requests."""


class DeviceError(RuntimeError):
    """The device could not run a batch."""


class Failures:
    """A count of successive batches that the device could not run, shared by batchers.

    Attributes:
      count: number of these batches.
    """

    def __init__(self):
        self.count, self._lock = 0, threading.Lock()

    def tell(self, *, failed: bool) -> None:
        """Counts a failed batch. A batch that ran resets the count."""
        with self._lock:
            self.count = self.count + 1 if failed else 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """Facts about a batch that ran, for metrics.

    Attributes:
      shape: shape of its program.
      rows: number of rows that belong to requests; the others are padding.
      entries: number of entries of the sparse input that has most.
      waited: seconds in the queue, for each part of a request.
      packing: seconds of packing on the host.
      device: seconds on the device, with copies. On a GPU it includes waiting for the previous
        batch.
    """

    shape: Shape
    rows: int
    entries: int
    waited: list[float]
    packing: float
    device: float


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    future: Waiting
    deadline: float | None
    queued: float
    answers: list[Answer | None]


@dataclasses.dataclass(eq=False, slots=True)
class _Piece:
    """Rows of a request that are put into the same batch."""

    request: _Request
    number: int
    size: Size
    given: Sequence[Rows]


class Batcher:
    """Combines requests to batches, and runs them on one engine.

    Attributes:
      engine: the engine that runs the batches.
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
        """Starts two threads: one packs the next batch while the device runs the other's batch.

        Args:
          engine: engine that runs the batches.
          max_wait: seconds for which an incomplete batch may wait while the device is idle.
          max_rows: number of rows that may wait; further requests are refused.
          observe: function that is called with each batch, in a thread of the batcher.
          failures: a count that is shared with other batchers of the device.

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
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # the queue has changed
        self._idle = threading.Condition(lock)  # the device has become free
        self._queue: collections.deque[_Piece] = collections.deque()
        self._rows = self._entries = 0  # numbers of rows and entries in the queue
        # `_working`: the device runs a batch. `_ahead`: a thread has taken the batch after it.
        self._working = self._ahead = self._closed = False
        self._full_rows = max(shape.rows for shape in engine.shapes)
        self._full_entries = max(shape.entries for shape in engine.shapes)
        self._threads = [
            threading.Thread(target=self._work, name=f"batches {n}", daemon=True)
            for n in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, given: Sequence[Rows], *, deadline: float | None = None
    ) -> Future[Answer]:
        """Queues a request for the outputs of some rows, and returns a future; see `ask`."""
        future: Future[Answer] = Future()
        self.ask(given, future, deadline=deadline)
        return future

    def ask(
        self, given: Sequence[Rows], future: Waiting, *, deadline: float | None = None
    ) -> None:
        """Queues a request for the outputs of rows, made by the predictor's `rows_of_...`.

        If its future is cancelled before the rows are on the device, they are not computed.

        Args:
          given: for each input of the programs its rows.
          future: future that receives the outputs in order, each `[rows, ...]`. It raises
            FloatingPointError if one is NaN, TimeoutError if the deadline passed before the
            rows were on the device, and DeviceError if the device failed.
          deadline: latest time, on the clock of `time.monotonic`.

        Raises:
          BusyError: too many rows wait.
          ClosedError: the batcher was closed.
          TooLargeError: no shape holds one of the rows.
        """
        pieces = self.engine.pieces(given)
        if not pieces:
            future.set_result(self._no_rows())
            return
        request = _Request(future, deadline, time.monotonic(), [None] * len(pieces))
        asked = [_Piece(request, n, *piece) for n, piece in enumerate(pieces)]
        rows = sum(piece.size.rows for piece in asked)
        with self._changed:
            if self._closed:
                raise ClosedError("this service ends and takes no further requests")
            # An empty queue accepts any request, even one with more rows than the queue may have.
            if self._rows and self._rows + rows > self._max_rows:
                raise BusyError(
                    f"{self._rows:,} rows wait already, of {self._max_rows:,} that may; "
                    "try again later"
                )
            for piece in asked:
                self._count(piece, 1)
            self._queue += asked
            # While the device is busy, a thread needs to wake up only if a full batch is waiting.
            if self._max_wait or self._may_pack():
                self._changed.notify()

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Submits all requests that this thread makes in this context when it is closed."""
        with self._changed:
            yield

    @property
    def failures(self) -> int:
        """Number of successive batches that the device could not run."""
        return self._failures.count

    @property
    def waiting(self) -> int:
        """Number of rows in the queue."""
        return self._rows

    def close(self) -> None:
        """Refuses further requests, and returns when all queued requests are answered."""
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
        if not self._queue or self._ahead:
            return False
        if self._closed or self._is_full():
            return True
        waited = time.monotonic() - self._queue[0].request.queued
        return not self._working and waited >= self._max_wait

    def _work(self) -> None:
        """Takes batches and runs them until the batcher is closed and its queue empty."""
        while True:
            with self._changed:
                while not self._may_pack():
                    if self._closed and not self._queue:
                        return
                    self._changed.wait(self._patience())
                late, batch = self._take()
                self._ahead = batch is not None
            if late:
                text = "the deadline passed before the request was on the device"
                _settle([(it, TimeoutError(text)) for it in late])
            if batch is not None:
                self._serve(*batch)

    def _patience(self) -> float | None:
        """Seconds until a batch is taken for the idle device; None if there is none to take."""
        if not self._queue or self._working or self._ahead:
            return None
        begins = self._queue[0].request.queued + self._max_wait
        return max(begins - time.monotonic(), 0.0)

    def _take(self) -> tuple[list[Waiting], tuple[list[_Piece], Size, Shape] | None]:
        """Takes the next batch from the queue, and removes requests whose deadline has passed.

        The batch gets waiting rows in order, as many as the largest shape can hold. If they do not
        fill their shape (see `Engine.is_filled`), but the first of them fill a smaller one, the
        others stay in the queue.
        """
        now = time.monotonic()
        late: list[Waiting] = []
        taken: list[_Piece] = []
        size = shape = best = None
        while self._queue:
            piece = self._queue[0]
            deadline = piece.request.deadline
            is_late = deadline is not None and deadline <= now
            if is_late or piece.request.future.done():
                self._count(self._queue.popleft(), -1)
                late += [piece.request.future] * is_late
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

    def _free(self) -> None:
        """Marks the device as free, so that it can run the next batch."""
        with self._changed:
            self._working = False
            self._idle.notify()  # the thread that has packed the next batch
            # While this thread waits for its batch, the other thread may pack the next one. Before
            # that, it waits at most `max_wait` for more requests.
            if self.engine.queues and self._queue and not self._ahead:
                self._changed.notify()

    def _serve(self, pieces: list[_Piece], size: Size, shape: Shape) -> None:
        """Packs a batch, runs it once the device is free, and answers its requests."""
        taken = time.monotonic()
        error: Exception | None = None
        arguments: list[Any] = []
        try:
            arguments = self.engine.packed(shape, [piece.given for piece in pieces])
        except Exception as found:  # noqa: BLE001 - the futures raise it
            error = found
        packing = time.monotonic() - taken
        with self._changed:
            while self._working:
                self._idle.wait()
            self._working, self._ahead = error is None, False
            if self._may_pack():  # the other thread packs while the device works
                self._changed.notify()
        if error is not None:
            _settle([(piece.request.future, error) for piece in pieces])
            return
        begun, outputs, is_free = time.monotonic(), [], False
        try:
            found = self.engine.started(shape, arguments)
            if self.engine.queues:
                self._free()
                is_free = True
            outputs = self.engine.fetched(shape, found)
        except Exception as found:  # noqa: BLE001 - JAX raises many kinds
            reason = (str(found).splitlines() or [type(found).__name__])[0]
            error = DeviceError(f"the device failed: {reason}")
        device = time.monotonic() - begun
        if not is_free:
            self._free()
        self._failures.tell(failed=error is not None)
        if error is None:
            _settle(_divided(pieces, outputs))
        else:
            _settle([(piece.request.future, error) for piece in pieces])
        waited = [taken - piece.request.queued for piece in pieces]
        entries = max(size.entries, default=0)
        times = {"waited": waited, "packing": packing, "device": device}
        self._observe(Batch(shape, size.rows, entries, **times))


def _divided(pieces: Sequence[_Piece], found: Answer) -> list[_Settled]:
    """Pairs of futures and answers of complete requests. NaN is an error of its request alone."""
    bad = np.zeros(len(found[0]), bool)
    for array in found:
        if array.dtype.kind == "f" and (is_bad := np.isnan(array)).any():
            bad |= is_bad.any(axis=tuple(range(1, array.ndim)))
    bad_rows = np.flatnonzero(bad).tolist()
    settled: list[_Settled] = []
    start = 0
    for piece in pieces:
        end = start + piece.size.rows
        request, answer = piece.request, [array[start:end] for array in found]
        if any(start <= row < end for row in bad_rows):
            text = (
                "the model gives NaN; its weights or the values of a row are not finite"
            )
            settled.append((request.future, FloatingPointError(text)))
        elif len(request.answers) == 1:
            settled.append((request.future, answer))
        else:
            # The arrays are copied: views would keep the whole batch in memory while a request
            # waits for its other pieces.
            request.answers[piece.number] = [array.copy() for array in answer]
            parts = [each for each in request.answers if each is not None]
            if len(parts) == len(request.answers):
                whole = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
                settled.append((request.future, whole))
        start = end
    return settled


def _settle(settled: Sequence[_Settled]) -> None:
    """Sets the results of futures. Each asyncio loop is called once for all of its futures."""
    of_loops: dict[asyncio.AbstractEventLoop, list[_Settled]] = {}
    others = []
    for pair in settled:
        future, _ = pair
        if isinstance(future, Future):
            others.append(pair)
        else:
            of_loops.setdefault(future.get_loop(), []).append(pair)
    for loop, pairs in of_loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set, pairs)
    _set(others)


def _set(settled: Sequence[_Settled]) -> None:
    for future, found in settled:
        # The future may be cancelled, or have the error of another piece of its request.
        with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)
