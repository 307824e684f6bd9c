"""CSR against SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from matrices import csrs, dense, oracle, random_csr

from sparsejax.sparse import CSR


def small(**overrides) -> CSR:
    leaves = {
        "data": np.array([1.0, 2, 3, 4, 5], np.float32),
        "indices": np.array([0, 2, 0, 1, 3], np.int32),
        "indptr": np.array([0, 2, 2, 5], np.int32),
    } | overrides
    return CSR(leaves["data"], leaves["indices"], leaves["indptr"], num_cols=4)


DENSE = np.array([[1, 0, 2, 0], [0, 0, 0, 0], [3, 4, 0, 5.0]])


def test_dense_and_scipy_forms():
    matrix = small()
    assert matrix.shape == (3, 4)
    assert matrix.nse == 5
    np.testing.assert_array_equal(matrix.todense(), DENSE)
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), DENSE)
    np.testing.assert_array_equal(matrix.row_ids(), [0, 0, 2, 2, 2])
    np.testing.assert_array_equal(matrix.row_lengths(), [2, 0, 3])
    np.testing.assert_array_equal(small(data=None).todense(), DENSE != 0)


def test_from_scipy_sorts_and_sums_duplicates():
    coo = scipy.sparse.coo_array(([1.0, 2, 4], ([0, 0, 0], [3, 1, 3])), shape=(2, 5))
    matrix = CSR.from_scipy(coo, nse=6)
    np.testing.assert_array_equal(matrix.indices[:2], [1, 3])
    np.testing.assert_array_equal(matrix.todense()[0], [0, 2, 0, 5, 0])
    assert matrix.nse == 6
    assert CSR.from_scipy(coo.astype(bool)).data is None


def test_from_scipy_does_not_change_its_argument():
    unsorted = scipy.sparse.csr_array(([1.0, 2], [3, 1], [0, 2]), shape=(1, 4))
    CSR.from_scipy(unsorted)
    np.testing.assert_array_equal(unsorted.indices, [3, 1])


@given(csrs())
def test_dense_form_of_awkward_matrices(matrix):
    np.testing.assert_allclose(dense(matrix), oracle(matrix), atol=1e-5)


@given(csrs())
def test_transpose(matrix):
    transposed = transpose(matrix)
    assert transposed.shape == matrix.shape[::-1]
    np.testing.assert_allclose(dense(transposed), oracle(matrix).T, atol=1e-5)
    rows = np.asarray(transposed.indices, np.int64)[: int(transposed.indptr[-1])]
    starts = np.asarray(transposed.indptr)[1:-1]
    falls = np.flatnonzero(np.diff(rows) < 0) + 1
    assert set(falls) <= set(starts)  # rows ascend within a column


transpose = jax.jit(CSR.transpose)
take = jax.jit(lambda matrix, rows: matrix.take(rows, nse=400))


@given(csrs(rows=5), st.lists(st.integers(0, 4), min_size=7, max_size=7))
def test_take(matrix, rows):
    rows = np.array(rows, np.int32)
    expected = oracle(matrix)[rows]
    roomy = take(matrix, rows)
    np.testing.assert_allclose(dense(roomy), expected, atol=1e-5)


def test_take_with_the_exact_capacity():
    matrix = random_csr(5, 9, extra=0)
    for rows in ([4, 0, 0], [2], []):
        taken = matrix.take(np.array(rows, np.int32))
        assert taken.nse == int(taken.indptr[-1])
        np.testing.assert_array_equal(taken.todense(), oracle(matrix)[rows])


def test_take_is_differentiable_in_data():
    matrix = random_csr(5, 9, valued=True)
    rows = jnp.array([3, 1, 3])

    def loss(data):
        taken = CSR(data, matrix.indices, matrix.indptr, num_cols=9).take(rows, nse=30)
        return jnp.sum(taken.todense() ** 2)

    times = np.repeat([0, 1, 0, 2, 0], np.diff(matrix.indptr))
    values = np.nan_to_num(np.asarray(matrix.data))
    gradient = jax.grad(loss)(values)[: len(times)]
    np.testing.assert_allclose(gradient, 2 * times * values[: len(times)], rtol=1e-6)


def test_take_too_small():
    matrix = jax.tree.map(jnp.asarray, small())
    with pytest.raises(ValueError, match="hold 5 entries but nse=4"):
        matrix.take(np.array([0, 2]), nse=4)
    taken = jax.jit(lambda m: m.take(jnp.array([0, 2, 1]), nse=4))(matrix)
    result = np.asarray(taken.todense())
    np.testing.assert_array_equal(result[0], DENSE[0])
    assert np.isnan(result[1]).all()
    with pytest.raises(ValueError, match="overfull"):
        taken.to_scipy()
    again = taken.take(jnp.array([1, 0, 1]), nse=9)  # where there would be room
    result = np.asarray(again.todense())
    np.testing.assert_array_equal(result[1], DENSE[0])
    assert np.isnan(result[[0, 2]]).all()
    with pytest.raises(ValueError, match="column -1 is outside"):
        again.to_scipy()


def test_take_from_no_capacity_at_all():
    none = jax.jit(lambda m: m.take(jnp.array([0, 1, 2]), nse=0))(small())
    empty = np.flatnonzero(np.diff(small().indptr) == 0)
    result = np.asarray(none.take(np.arange(3)).todense())
    np.testing.assert_array_equal(np.isnan(result).all(1), ~np.isin(range(3), empty))


def test_take_errors():
    with pytest.raises(ValueError, match="row 3 does not exist"):
        small().take(np.array([0, 3]))
    for rows in ([[0, 1]], [0.0], [True, False, True], 0):
        with pytest.raises(ValueError, match="rows must be a vector of integers, got"):
            small().take(np.array(rows))
    assert small().take(np.array([])).shape == (0, 4)
    with pytest.raises(ValueError, match="needs nse"):
        jax.jit(lambda m: m.take(jnp.array([0])))(small())


def test_out_of_range_index_is_nan_not_wrong():
    matrix = jax.tree.map(jnp.asarray, small())
    matrix = CSR(matrix.data, matrix.indices + 2, matrix.indptr, num_cols=4)
    nan = np.isnan(np.asarray(matrix.todense()))
    np.testing.assert_array_equal(nan.all(1), [True, False, True])
    assert not nan[1].any()


def test_columns_that_do_not_count():
    """The first beyond the last, a negative one, and padding."""
    indices, indptr = jnp.array([0, 3, 4, -1, 2]), jnp.array([0, 2, 4])
    matrix = CSR(None, indices, indptr, num_cols=4)
    assert matrix.columns(padding=9).tolist() == [0, 3, 9, 9, 9]


def check_transposed(matrix: CSR) -> None:
    by_column = jax.tree.map(np.asarray, matrix.transposed)
    used = by_column.indptr[-1]
    count, indices = int(matrix.indptr[-1]), np.asarray(matrix.indices)
    order = np.argsort(indices[:count], kind="stable")
    assert used == count
    np.testing.assert_array_equal(by_column.order[:used], order)
    np.testing.assert_array_equal(by_column.columns[:used], indices[order])
    np.testing.assert_array_equal(by_column.columns[used:], matrix.num_cols)
    rows = np.repeat(np.arange(matrix.num_rows), np.diff(matrix.indptr))
    np.testing.assert_array_equal(by_column.rows[:used], rows[order])
    counts = np.unique(indices[:count], return_counts=True)[1]
    expected = np.full(min(matrix.nse, matrix.num_cols) + 1, count)
    expected[: len(counts)] = np.cumsum(counts) - counts
    np.testing.assert_array_equal(by_column.indptr, expected)


@given(csrs())
def test_with_transposed(matrix):
    check_transposed(jax.jit(CSR.with_transposed)(matrix))


@pytest.mark.parametrize("num_cols", [9, 2**31 - 1])  # in one sort, and one for each
@pytest.mark.parametrize("deterministic", [False, True])  # makes a difference on a GPU
def test_with_transposed_of_a_stack(num_cols, deterministic):
    parts = [random_csr(4, 9, density, extra=40) for density in (0.1, 0.5, 0.0)]
    parts = [
        CSR(None, part.indices[:40], part.indptr, num_cols=num_cols) for part in parts
    ]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    options = {"xla_gpu_deterministic_ops": deterministic}
    transposed = jax.jit(CSR.with_transposed, compiler_options=options)
    # Scatters that add integers aside, none is for XLA to rewrite.
    text = transposed.lower(stack).as_text()
    assert text.count("unique_indices = true") == 1
    stack = transposed(stack)
    for i in range(3):
        check_transposed(jax.tree.map(lambda leaf, i=i: leaf[i], stack))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"indices": np.array([0, 4, 0, 1, 3], np.int32)}, "row 0, column 4: the col"),
        ({"indices": np.array([0, -1, 0, 1, 3], np.int32)}, "row 0, column -1"),
        ({"indices": np.array([0, 2, 1, 0, 3], np.int32)}, "row 2, column 0 follows"),
        ({"indices": np.array([0.0, 2, 0, 1, 3])}, "indices must be integers"),
        ({"indptr": np.array([0, 3, 2, 5], np.int32)}, "falls from 3 to 2 at row 1"),
        ({"indptr": np.array([1, 2, 2, 5], np.int32)}, "start with 0"),
        ({"indptr": np.array([0, 2, 2, 6], np.int32)}, "ends at 6 but there are 5"),
        ({"data": np.array([1, 2, 3, np.nan, 5])}, "row 2, column 1: the value is nan"),
        ({"data": np.array([1, 2, np.inf, 4, 5])}, "row 2, column 0: the value is inf"),
        ({"data": np.ones(4)}, r"data has shape \(4,\), indices \(5,\)"),
    ],
)
def test_host_input_is_checked(overrides, message):
    with pytest.raises(ValueError, match=message):
        small(**overrides)


def test_from_scipy_errors():
    with pytest.raises(TypeError, match="SciPy sparse matrix, got ndarray"):
        CSR.from_scipy(np.eye(3))
    with pytest.raises(ValueError, match="row 1, column 1: the value is nan"):
        CSR.from_scipy(scipy.sparse.csr_array(np.diag([1, np.nan])))
    with pytest.raises(ValueError, match="row 1, column 1: the value is inf"):
        CSR.from_scipy(scipy.sparse.csr_array(np.diag([1, 1e300])))
    with pytest.raises(ValueError, match="3 entries do not fit in nse=2"):
        CSR.from_scipy(scipy.sparse.eye_array(3), nse=2)
    with pytest.raises(TypeError, match="must be real"):
        CSR.from_scipy(scipy.sparse.csr_array([[1j]]))
    with pytest.raises(ValueError, match="expected a matrix, got the shape"):
        CSR.from_scipy(scipy.sparse.coo_array([1.0, 0.0]))
    with pytest.raises(ValueError, match="4,294,967,296 columns do not fit in int32"):
        CSR.from_scipy(scipy.sparse.csr_array((1, 2**32)))


def test_padding_is_not_checked():
    small(
        data=np.array([1, 2, 3, 4, 5, np.nan], np.float32),
        indices=np.array([0, 2, 0, 1, 3, -9], np.int32),
    )


def test_pytree():
    matrix = small()
    leaves, tree = jax.tree.flatten(matrix)
    assert len(leaves) == 3
    assert jax.tree.unflatten(tree, [None, None, None]).num_cols == 4
    assert jax.tree.map(jnp.shape, matrix).indptr == (4,)  # holds anything, unchecked


def test_scan_carry_and_steps():
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), small())
    assert stack.shape == (3, 4)

    def step(carry, matrix):
        return carry, matrix.todense() + carry.todense()

    carried, total = jax.lax.scan(step, jax.tree.map(jnp.asarray, small()), stack)
    np.testing.assert_array_equal(total[1], 2 * DENSE)
    np.testing.assert_array_equal(carried.todense(), DENSE)


def test_nnx_argument():
    scale = nnx.Param(jnp.float32(3))
    result = nnx.jit(lambda p, m: p[...] * m.todense())(scale, small())
    np.testing.assert_array_equal(result, 3 * DENSE)
