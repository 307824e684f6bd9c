"""Duplicates in SciPy matrices are summed correctly, for all dtypes and formats."""

import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj
from sparsejax.nn.closed_form import closed_form
from sparsejax.nn.linear_part import LinearConfig
from sparsejax.sparse import summed

TYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"]


def repeated(dtype, format, count=300, value=100):
    """A matrix in which one entry occurs many times, and another one once."""
    rows, columns = (
        np.append(np.zeros(count, int), 1),
        np.append(np.ones(count, int), 0),
    )
    values = np.append(np.full(count, value), 3).astype(dtype)
    if format == "coo":
        return scipy.sparse.coo_array((values, (rows, columns)), shape=(3, 2))
    if format == "bsr":
        arrays = values.reshape(-1, 1, 1), columns, [0, count, count + 1, count + 1]
        return scipy.sparse.bsr_array(arrays, shape=(3, 2), blocksize=(1, 1))
    if format == "csc":
        order, ends = np.argsort(columns, kind="stable"), [0, 1, count + 1]
        arrays = values[order], rows[order], ends
        return scipy.sparse.csc_array(arrays, shape=(3, 2))
    arrays = values, columns, [0, count, count + 1, count + 1]
    return scipy.sparse.csr_array(arrays, shape=(3, 2))


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "bsr"])
@pytest.mark.parametrize("dtype", TYPES)
def test_sums(format, dtype):
    value = 127 if dtype == "i1" else 200 if dtype == "u1" else 30_000
    matrix = repeated(dtype, format, value=value)
    before = matrix.data.copy()
    expected = np.array([[0, 300.0 * value], [3, 0], [0, 0]])
    for found in (
        sj.SparseDataset.from_scipy(matrix).to_scipy(),
        sj.CSR.from_scipy(matrix).to_scipy(),
        sj.CSR.from_scipy(matrix, nse=7).to_scipy(),
        summed(matrix),
    ):
        np.testing.assert_array_equal(found.toarray(), expected)
        assert found.nnz == 2
    np.testing.assert_array_equal(matrix.data, before)


def test_sums_are_checked_and_keep_their_type():
    ones = repeated(np.float32, "coo", count=2**24 + 3, value=1)
    found = sj.CSR.from_scipy(ones)
    assert found.data.dtype == np.float32  # pyrefly: ignore
    assert found.data.tolist() == [np.float32(2**24 + 3), 3]  # pyrefly: ignore
    assert sj.CSR.from_scipy(repeated(np.float64, "csr")).data.dtype == np.float64  # pyrefly: ignore
    large = np.array([2e38, 2e38], np.float32)
    both = scipy.sparse.coo_array((large, ([0, 0], [0, 0])), shape=(1, 1))
    with pytest.raises(ValueError, match="row 0, column 0: the value is inf"):
        sj.CSR.from_scipy(both)
    alike = repeated(bool, "coo")
    assert sj.CSR.from_scipy(alike).data is None and sj.CSR.from_scipy(alike).nse == 2


def test_the_linear_part_adds_them_up():
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 3, (30, 6)) * 200
    row, column = dense.nonzero()
    value = np.concatenate([dense[row, column] // 2] * 2).astype(np.uint8)
    at = np.concatenate([row, row]), np.concatenate([column, column])
    twice = scipy.sparse.coo_array((value, at), shape=dense.shape)
    config = LinearConfig(rank=2)
    expected = closed_form(scipy.sparse.csr_array(dense), config)
    for one, other in zip(closed_form(twice, config), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
