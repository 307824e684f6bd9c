"""Requests that arrive while the device is busy form the next batch; a client that disconnects
costs nothing.
"""

import threading
import time
import types
from concurrent.futures import Future

import numpy as np
import pytest
from served import NAMES, until

from sparsejax.predictors.signature import Array
from sparsejax.serving import batcher
from sparsejax.serving.batcher import (
    Batcher,
    BusyError,
    ClosedError,
    DeviceError,
    Failures,
)
from sparsejax.serving.engine import Engine, Shape, Size

DENSE = Array(name="x", dtype="float32", shape=(1,))


class Doubling(Engine):
    """An engine that doubles numbers when its gate is open, and records its batches."""

    def __init__(self, *shapes: int, alike: int = 1, queues: bool = False):
        self._alike, self.queues = alike, queues
        self.shapes = tuple(Shape(rows, 1) for rows in shapes)
        self._programs = types.SimpleNamespace(inputs=(DENSE,))
        self.batches: list[list[float]] = []
        self.packed_batches = 0
        self.gate, self.begun = threading.Event(), threading.Semaphore(0)
        self.fails = False

    def packed(self, shape, parts):
        self.packed_batches += 1
        return [np.concatenate([part[0] for part in parts])]

    def started(self, shape, packed):
        self.batches.append(packed[0][:, 0].tolist())
        self.begun.release()
        return packed

    def fetched(self, shape, outputs):
        assert self.gate.wait(60)
        if self.fails:
            raise RuntimeError("out of memory")
        return [2 * outputs[0]]


def given(*numbers: float) -> list[np.ndarray]:
    return [np.array(numbers, np.float32)[:, None]]


def numbers(future: Future) -> list[float]:
    return future.result(60)[0][:, 0].tolist()


@pytest.fixture
def engine():
    engine = Doubling(1, 4)
    yield engine
    engine.gate.set()


def begun(engine: Doubling) -> None:
    assert engine.begun.acquire(timeout=60)


def test_the_next_batch_fills_while_the_device_works(engine):
    service = Batcher(engine)
    first = service.submit(given(1))
    begun(engine)  # at once, and alone
    others = [service.submit(given(n)) for n in (2, 3, 4)]
    engine.gate.set()
    assert [numbers(f) for f in (first, *others)] == [[2], [4], [6], [8]]
    assert engine.batches == [[1], [2, 3, 4]]
    service.close()


def test_a_gpu_is_given_the_next_batch_before_it_is_done():
    engine = Doubling(1, 4, queues=True)
    service = Batcher(engine)
    futures = []
    for n in (1, 2):
        futures.append(service.submit(given(n)))
        begun(engine)
    futures += [service.submit(given(n)) for n in (3, 4)]  # no more than two
    assert not engine.begun.acquire(timeout=0.05)
    engine.gate.set()
    assert [numbers(f) for f in futures] == [[2], [4], [6], [8]]
    assert engine.batches[:2] == [[1], [2]] and len(engine.batches) <= 4
    service.close()


def test_company_is_not_waited_for_longer_where_a_batch_is_on_a_gpu():
    class Asking(Doubling):
        def started(self, shape, packed):
            if not self.batches:  # the next row comes before the device is free again
                futures.append(service.submit(given(2)))
                time.sleep(0.05)  # the other thread has seen it, and waits
            return super().started(shape, packed)

    engine = Asking(1, 4, queues=True)
    service = Batcher(engine, max_wait=0.2)
    futures = [service.submit(given(1))]
    begun(engine)
    begun(engine)  # while the first one is on the device
    engine.gate.set()
    assert [numbers(f) for f in futures] == [[2], [4]]
    service.close()


def test_first_in_first_out(engine):
    service = Batcher(engine)
    futures = [service.submit(given(1))]
    begun(engine)
    # Two and three rows do not fit together, so the last one has to wait, too.
    futures += [service.submit(given(*some)) for some in ([2, 2], [3, 3, 3], [4])]
    engine.gate.set()
    assert [len(numbers(f)) for f in futures] == [1, 2, 3, 1]
    assert engine.batches == [[1], [2, 2], [3, 3, 3, 4]]
    service.close()


def test_a_batch_is_half_full_or_smaller():
    engine = Doubling(1, 2, 16)
    service = Batcher(engine)
    futures = [service.submit(given(0))]
    begun(engine)
    futures += [service.submit(given(n)) for n in range(1, 6)]
    engine.gate.set()
    assert [numbers(f) for f in futures] == [[2 * n] for n in range(6)]
    assert engine.batches == [[0], [1, 2], [3, 4], [5]]
    service.close()


def test_a_batch_need_not_be_half_full_where_rows_cost_nothing():
    """On a GPU small programs take as long as that of one row."""
    engine = Doubling(1, 16, 64, alike=16)
    assert [size.rows for size, _ in engine.pieces(given(*range(5)))] == [5]
    assert [size.rows for size, _ in engine.pieces(given(*range(21)))] == [16, 5]
    assert [size.rows for size, _ in engine.pieces(given(*range(32)))] == [32]
    service = Batcher(engine)
    futures = [service.submit(given(0))]
    begun(engine)
    futures += [service.submit(given(n)) for n in range(1, 23)]
    engine.gate.set()
    assert [numbers(f) for f in futures] == [[2 * n] for n in range(23)]
    assert engine.batches == [[0], [*range(1, 17)], [*range(17, 23)]]
    service.close()


def test_a_full_batch_is_packed_while_the_device_works(engine):
    service = Batcher(engine)
    first = service.submit(given(1))
    begun(engine)
    service.submit(given(2, 2, 2))
    assert engine.packed_batches == 1  # the next batch may still grow
    service.submit(given(3))
    until(lambda: engine.packed_batches == 2)
    assert len(engine.batches) == 1
    engine.gate.set()
    service.close()
    assert numbers(first) == [2]  # the device did not fail meanwhile
    assert engine.batches == [[1], [2, 2, 2, 3]]


class ByEntries(Doubling):
    """An engine in which each number says how many entries its row has. Ten entries fill a
    batch.
    """

    def __init__(self):
        super().__init__(1, 4)
        self.shapes = tuple(Shape(shape.rows, 10) for shape in self.shapes)

    def size_of(self, given):
        return Size(len(given[0]), (int(np.sum(given[0])),))


def test_a_batch_with_all_entries_is_packed_while_the_device_works():
    engine = ByEntries()
    service = Batcher(engine)
    first = service.submit(given(1))
    begun(engine)
    service.submit(given(4))
    assert engine.packed_batches == 1  # the next batch may still grow
    service.submit(given(6))
    until(lambda: engine.packed_batches == 2)
    engine.gate.set()
    service.close()
    assert numbers(first) == [2]  # the device did not fail meanwhile
    assert engine.batches == [[1], [4, 6]]


def test_late_and_cancelled_requests_cost_no_device_time(engine):
    service = Batcher(engine)
    service.submit(given(1))
    begun(engine)
    late = service.submit(given(2), deadline=time.monotonic())
    gone, stays = service.submit(given(3)), service.submit(given(4))
    assert gone.cancel()
    engine.gate.set()
    assert numbers(stays) == [8]
    with pytest.raises(TimeoutError, match="deadline passed"):
        late.result(60)
    assert engine.batches == [[1], [4]]
    service.close()
    assert service.waiting == 0


def test_the_queue_is_bounded(engine):
    service = Batcher(engine, max_rows=3)
    service.submit(given(1))
    begun(engine)
    service.submit(given(2, 2))
    with pytest.raises(BusyError, match="2 rows wait already, of 3"):
        service.submit(given(3, 3))
    last = service.submit(given(4))
    engine.gate.set()
    assert numbers(last) == [8]
    service.close()


def test_one_bad_row_fails_its_own_request(engine):
    service = Batcher(engine)
    service.submit(given(1))
    begun(engine)
    futures = [service.submit(given(*some)) for some in ([2], [np.nan], [4, 4])]
    engine.gate.set()
    assert (numbers(futures[0]), numbers(futures[2])) == ([4], [8, 8])
    with pytest.raises(FloatingPointError, match="NaN"):
        futures[1].result(60)
    assert len(engine.batches) == 2
    service.close()


def test_a_device_that_fails(engine):
    service = Batcher(engine)
    engine.gate.set()
    engine.fails = True
    for count in (1, 2):
        with pytest.raises(DeviceError, match="out of memory"):
            service.submit(given(1)).result(60)
        until(lambda count=count: service.failures == count)
    engine.fails = False
    assert numbers(service.submit(given(1))) == [2]
    assert service.failures == 0
    service.close()


def test_a_batch_that_ran_ends_the_failures_of_both_batchers(engine):
    failures, other = Failures(), Doubling(1)
    broken, good = (Batcher(each, failures=failures) for each in (engine, other))
    engine.gate.set()
    other.gate.set()
    engine.fails = True
    for _ in range(2):
        with pytest.raises(DeviceError, match="out of memory"):
            broken.submit(given(1)).result(60)
    assert (broken.failures, good.failures) == (2, 2)
    assert numbers(good.submit(given(1))) == [2]
    assert (broken.failures, good.failures) == (0, 0)
    broken.close()
    good.close()


def test_a_large_request_goes_in_parts(engine):
    service = Batcher(engine, max_rows=1)
    engine.gate.set()
    assert numbers(service.submit(given(*range(9)))) == [2 * n for n in range(9)]
    service.close()


def test_closing_answers_what_waits(engine):
    service = Batcher(engine, max_wait=1e6)
    futures = [service.submit(given(n)) for n in range(3)]
    assert not engine.batches  # a batch that is not full waits so long
    engine.gate.set()
    service.close()
    assert [numbers(f) for f in futures] == [[0], [2], [4]]
    with pytest.raises(ClosedError):
        service.submit(given(1))


def test_an_idle_device_waits_for_company(engine):
    seen: list[batcher.Batch] = []
    service = Batcher(engine, max_wait=0.05, observe=seen.append)
    engine.gate.set()
    futures = [service.submit(given(n)) for n in range(2)]
    assert [numbers(f) for f in futures] == [[0], [2]]
    service.close()
    assert engine.batches == [[0, 1]]
    assert seen[0].rows == 2 and seen[0].shape == Shape(4, 1)
    assert max(seen[0].waited) >= 0.05


def test_no_rows(predictor):
    service = Batcher(Engine(predictor, [Shape(1, 256)]))
    given, _ = predictor.model.rows_of_names([])
    ids, scores = service.submit(given).result(60)
    assert ids.shape == scores.shape == (0, 5)
    service.close()


def test_many_requests_at_once_on_a_device(predictor):
    """Threads ask; each has the bits that its row has alone in the shape."""
    engine = Engine(predictor, [Shape(4, 256)])
    service = Batcher(engine)
    rows = [predictor.model.rows_of_names([[name]])[0] for name in NAMES]
    alone = [service.submit(row).result(60) for row in rows]
    futures = [service.submit(rows[n % 9]) for n in range(500)]
    for n, future in enumerate(futures):
        for found, expected in zip(future.result(60), alone[n % 9], strict=True):
            np.testing.assert_array_equal(found, expected)
    service.close()


def test_wrong_settings(engine):
    for wait, rows in ((-1, 1), (float("nan"), 1), (0, 0)):
        with pytest.raises(ValueError, match="expected max_wait of 0 or more"):
            Batcher(engine, max_wait=wait, max_rows=rows)
