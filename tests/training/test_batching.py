"""Batches of rows, and the capacities for their entries."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from sparsejax.engine.batching import Batches, bucket, largest_batch, on_device
from sparsejax.sparse import CSR


def test_buckets_are_few_and_close():
    counts = range(100_000)
    sizes = [bucket(n) for n in range(3000)]
    assert all(size >= n and size % 8 == 0 for n, size in enumerate(sizes))
    assert sizes == sorted(sizes)
    distinct = sorted({bucket(n) for n in counts})
    assert distinct[:6] == [16, 24, 32, 40, 56, 72]
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(distinct))
    large = [size for size in distinct if size > 1000]
    assert all(b < 1.26 * a for a, b in itertools.pairwise(large))
    assert all(bucket(size) == size for size in distinct)


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_largest_batch(array):
    lengths = array([3, 0, 5, 2])
    assert largest_batch(lengths, array([[0, 1], [2, -1], [3, -1]])) == 5
    assert largest_batch(lengths, array([[0, 3], [2, -1], [2, 3]])) == 7
    assert largest_batch(lengths, array([[-1, -1]])) == 0
    assert largest_batch(array([], np.int32), array([[-1]])) == 0


@pytest.mark.parametrize("host", [True, False])
def test_batches_hold_the_rows_in_order(host):
    rng = np.random.default_rng(0)
    dense = (rng.random((9, 30)) < 0.4) * rng.random((9, 30)).astype(np.float32)
    matrix = CSR.from_scipy(scipy.sparse.csr_array(dense), nse=150)
    matrix = on_device(matrix if host else jax.tree.map(jnp.asarray, matrix))
    rows = np.array([7, -1, 0, 2, 8])
    batches = Batches.of(matrix, rows, 2)
    assert batches.rows.tolist() == [[7, -1], [0, 2], [8, -1]]
    nothing = np.zeros(30)
    wanted = [[dense[7], nothing], [dense[0], dense[2]], [dense[8], nothing]]
    for batch, some in zip(batches, wanted, strict=True):
        taken = jax.jit(lambda batch: batch.take())(batch)
        assert taken.nse == batches.nse
        np.testing.assert_array_equal(taken.todense(), some)


def test_no_rows():
    matrix = on_device(CSR.from_scipy(scipy.sparse.csr_array((0, 3))))
    assert list(Batches.of(matrix, np.arange(0), 4)) == []
