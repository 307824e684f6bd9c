"""Integers beyond int32 are read correctly, or raise an error."""

import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj

# Names of rows and features.
A, X, XY = np.array(["a"]), np.array(["x"]), np.array(["x", "y"])

# Truncated to int32, these are 1, 0 or -1.
WRAPPED = [2**32 + 1, 2**32, 2**31, -(2**32) + 1]


@pytest.mark.parametrize("big", WRAPPED)
def test_indices(big):
    indptr, indices = np.array([0, 1]), np.array([big])
    with pytest.raises(ValueError, match=f"feature {big}, but there are 2 features"):
        sj.SequenceDataset(indptr, indices, A, XY)
    with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
        sj.CSR(None, indices, indptr, num_cols=2)
    leaves = (None, indices, indptr, None)
    # Made without checks, as `jax.tree.map` makes it.
    unchecked = sj.CSR.tree_unflatten(2, leaves)
    with pytest.raises(ValueError, match="does not fit in int32|outside"):
        sj.SparseDataset(unchecked, A, XY)
    with pytest.raises(ValueError, match="does not fit in int32"):
        sj.data.Histories(indptr, indices).padded(2)
    if big > 0:
        matrix = scipy.sparse.csr_array((1, 2))
        matrix.data, matrix.indices, matrix.indptr = np.ones(1), indices, indptr
        with pytest.raises(ValueError, match="does not fit in int32"):
            sj.CSR.from_scipy(matrix)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("big", [2**32 + 1, 2**31])
@pytest.mark.usefixtures("wrong_types")
def test_indptr(big, dtype):
    one = np.zeros(1, np.int32)
    for wrong in ([0, big], [0, big, 1], [big - 1, 1]):
        indptr = np.array(wrong, dtype)
        names = ["a", "b", "c"][: len(wrong) - 1]
        with pytest.raises(
            ValueError, match="indptr must rise from 0 to the 1 entries"
        ):
            sj.SequenceDataset(indptr, one, names, X)  # pyrefly: ignore
        with pytest.raises(ValueError, match="indptr"):
            sj.CSR(None, one, indptr, num_cols=1)


@pytest.mark.parametrize("wrong", [[2**32 + 3], [-1], [1.5], [float("nan")], [2**31]])
def test_left_out(wrong):
    data = sj.SequenceDataset(np.array([0, 1]), np.array([0]), A, X)
    sparse = data.to_sparse()
    message = "left_out must be a count for each of the 1 rows"
    with pytest.raises(ValueError, match=message):
        sj.SequenceDataset(data.indptr, data.indices, A, X, None, np.array(wrong))
    with pytest.raises(ValueError, match=message):
        sj.SparseDataset(sparse.matrix, A, X, np.array(wrong))


def test_counts_that_are_added():
    sparse = sj.SequenceDataset(np.array([0, 1]), np.array([0]), A, X).to_sparse()
    large = sj.SparseDataset(sparse.matrix, A, X, np.array([2**31 - 1]))
    assert large.left_out is not None and large.left_out.tolist() == [2**31 - 1]
    with pytest.raises(ValueError, match="left_out must be a count"):
        large.merge(large)  # the sum would be -2


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.uint16, np.uint64])
def test_integers_of_any_width(dtype):
    data = sj.SequenceDataset(np.array([0, 2], dtype), np.array([1, 0], dtype), A, XY)
    assert data.indptr.dtype == data.indices.dtype == np.int32
    assert data.padded(3).tolist() == [[1, 0, -1]]
    matrix = sj.CSR(None, np.array([0, 1], dtype), np.array([0, 2], dtype), num_cols=2)
    assert sj.SparseDataset(matrix, A, XY).matrix.indices.dtype == np.int32
