"""Row gradients and dense gradients against SciPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from matrices import csrs, oracle, random_csr, sizes
from memory import temporary_bytes
from tolerances import assert_close

from sparsejax.ops.scatter_gradient import dense_gradient, row_gradient
from sparsejax.sparse import CSR

# On a CPU None is "xla", which adds entry by entry.
IMPLEMENTATIONS = None, "xla_gpu", "cusparse"


@functools.partial(jax.jit, static_argnums=(2, 3))
def sums_of(xs: list[CSR], dys, num_rows: int, implementation=None):
    return row_gradient(xs, dys, num_rows, implementation=implementation)


def rows_of(x: CSR, dy, num_rows: int, implementation=None):
    return sums_of([x], [dy], num_rows, implementation)


@functools.partial(jax.jit, static_argnums=(2, 3))
def both_of(x: CSR, dy, num_rows: int, implementation=None):
    """Ids and values of `row_gradient`, and `dense_gradient`, computed by one program."""
    rows = row_gradient([x], [dy], num_rows, implementation=implementation)
    return *rows, dense_gradient(x, dy, num_rows, implementation=implementation)


def slopes(rows: int, hidden: int, seed: int = 3) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((rows, hidden), np.float32))


def dense_of(ids, values, num_rows: int) -> np.ndarray:
    dense = np.zeros((num_rows + 1, values.shape[1]))
    np.add.at(dense, np.asarray(ids), np.asarray(values, np.float64))
    assert (dense[num_rows] == 0).all()  # padding holds zeros
    return dense[:num_rows]


def check(actual, xs: list[CSR], dys: list[jax.Array]) -> None:
    """Asserts that `actual` is `sum_k xs[k]^T dys[k]`, followed by zeros."""
    dense = np.concatenate([oracle(x) for x in xs]).T
    magnitude = np.concatenate([sizes(x) for x in xs]).T
    dy = np.concatenate([np.asarray(dy, np.float64) for dy in dys])
    pad = ((0, actual.shape[0] - dense.shape[0]), (0, 0))
    expected, magnitude = dense @ dy, magnitude @ np.abs(dy)
    terms = max(int(x.indptr[-1]) for x in xs) + 1
    assert_close(
        actual,
        np.pad(expected, pad),
        terms=terms,
        magnitude=np.pad(magnitude, pad),
        dtype=np.float32,
    )


def check_ids(ids, x: CSR, num_rows: int) -> None:
    touched = np.unique(np.asarray(x.indices)[: int(x.indptr[-1])])
    np.testing.assert_array_equal(ids[: len(touched)], touched)
    assert (np.asarray(ids[len(touched) :]) == num_rows).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(x=csrs())
def test_equals_scipy(implementation, x):
    # Few sizes, since each is compiled. With 7000 by a sort, on a CPU too.
    valued = x.data is not None
    hidden, extra_rows = {7: (5, 3), 1: (1, 0), 40: (5, 7000 * valued)}[x.num_cols]
    num_rows = x.num_cols + extra_rows
    dy = slopes(x.num_rows, hidden)

    ids, values, dense = both_of(x, dy, num_rows, implementation)
    check_ids(ids, x, num_rows)
    check(dense_of(ids, values, num_rows), [x], [dy])
    check(dense, [x], [dy])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(x=csrs(rows=5))
def test_transposed_ahead_of_time(implementation, x):
    # Of as many rows as the matrix has columns, and of more.
    num_rows = {1: 1, 40: 43}[x.num_cols]
    dy = slopes(x.num_rows, 4)
    x = jax.jit(CSR.with_transposed)(x)
    ids, values, dense = both_of(x, dy, num_rows, implementation)
    check_ids(ids, x, num_rows)
    check(dense_of(ids, values, num_rows), [x], [dy])
    check(dense, [x], [dy])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_columns_that_most_rows_have(implementation):
    """One column has as many entries as there are rows, and others have few."""
    x = random_csr(700, 90, 0.01, valued=True, seed=3)
    often = scipy.sparse.csr_array(np.ones((700, 1)))
    host = CSR.from_scipy(scipy.sparse.hstack([x.to_scipy(), often], format="csr"))
    dy = slopes(700, 3)
    ids, values = rows_of(jax.tree.map(jnp.asarray, host), dy, 91, implementation)
    check_ids(ids, host, 91)
    check(dense_of(ids, values, 91), [host], [dy])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_uses_of_one_kernel_are_summed(implementation):
    xs = [random_csr(4, 12, seed=1), random_csr(3, 12, valued=True, seed=2)]
    dys = [slopes(4, 3, seed=4), slopes(3, 3, seed=5)]
    ids, values = sums_of(xs, dys, 12, implementation)
    check(dense_of(ids, values, 12), xs, dys)


def test_capacity_cannot_overflow():
    x = random_csr(50, 8, 0.9)
    ids, values = row_gradient([x], [slopes(50, 2)], 8)
    assert ids.shape == (8,) and values.shape == (8, 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_rows", [7, 7000])
def test_entries_that_do_not_exist_add_nothing(implementation, num_rows):
    # Row 0 holds an index out of range, row 1 does not fit: both are NaN in the forward
    # pass, and here leave all other rows as they are.
    indices = jnp.array([2, 9, -3, 4], jnp.int32)
    x = CSR(None, indices, jnp.array([0, 3, 6], jnp.int32), num_cols=7)
    dy = jnp.ones((2, 2))
    ids, values, every = both_of(x, dy, num_rows, implementation)
    dense = dense_of(ids, values, num_rows)
    assert set(np.flatnonzero(dense[:, 0])) == {2, 4}
    assert set(np.flatnonzero(np.asarray(every)[:, 0])) == {2, 4}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_does_not_spread_nan(implementation):
    x = random_csr(3, 6, 0.5, extra=20)
    dy = (
        slopes(3, 2).at[-1].set(jnp.nan)
    )  # padding is counted to the last row; its slope must not leak
    touched = set(np.asarray(x.indices[x.indptr[2] : x.indptr[3]]))
    ids, values, dense = both_of(x, dy, 6, implementation)
    nan = set(np.asarray(ids)[np.isnan(np.asarray(values)).any(1)])
    assert nan == touched
    assert set(np.flatnonzero(np.isnan(dense).any(1))) == touched


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_same_bits_every_time(implementation):
    x = random_csr(64, 30, 0.5, valued=True)
    dy = slopes(64, 16)
    results = {
        np.asarray(rows_of(x, dy, 30, implementation)[1]).tobytes() for _ in range(3)
    }
    assert len(results) == 1


def test_memory_is_of_the_touched_rows():
    def temporary(num_rows):
        x = CSR(None, jnp.zeros(300, int), jnp.zeros(9, int), num_cols=num_rows)
        dy = jax.ShapeDtypeStruct((8, 64), jnp.float32)
        return temporary_bytes(lambda x, dy: row_gradient([x], [dy], num_rows), x, dy)

    assert temporary(4000) < 4000 * 64 * 4 / 2
    assert temporary(400_000) - temporary(4000) < 400_000


def test_lowers_for_cuda():
    x = random_csr(4, 9, valued=True)
    traced = jax.jit(lambda x, dy: row_gradient([x], [dy], 9)).trace(x, slopes(4, 3))
    assert "stablehlo" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_errors():
    with pytest.raises(ValueError, match="0 matrices but 0 gradients"):
        row_gradient([], [], 4)
