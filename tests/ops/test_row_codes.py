"""Rows as 8-bit codes: error bounds, and sums of rows."""

import itertools

import jax
import numpy as np
import pytest
from tolerances import relative_error

import sparsejax as sj
from sparsejax.ops import row_codes


def awkward_rows(dim=16):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, dim)) * 10.0 ** rng.integers(-6, 7, (40, 1))
    rows[0], rows[1], rows[2] = 0, 3.25, -1e-30
    rows[3, 0], rows[4] = 1e6, np.where(np.arange(dim) % 2, 3e38, -3e38)
    return rows.astype(np.float32)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_codes_are_within_their_bounds(kind):
    rows = awkward_rows()
    codes = row_codes.coded(rows, kind)
    assert tuple(a.dtype for a in codes if a is not None) == row_codes.coded_dtypes(
        kind
    )
    decoded = codes.codes.astype(np.float64) * codes.scale.astype(np.float64)[:, None]
    if codes.offset is not None:
        decoded += codes.offset.astype(np.float64)[:, None]
    exact = rows.astype(np.float64)
    largest = np.abs(exact).max(1, keepdims=True)
    if kind == "int8":
        bound = np.ptp(exact, axis=1)[:, None] / 510
    else:
        bound = np.maximum(np.abs(exact) / 16, largest / 458752)
    assert (np.abs(decoded - exact) <= bound + 1e-6 * largest).all()
    ids = np.random.default_rng(1).integers(0, len(rows), 30).astype(np.int32)
    indptr = np.array([0, 0, 7, 8, 28], np.int32)
    x = sj.CSR.tree_unflatten(len(rows), (None, ids, indptr, None))
    found = jax.jit(row_codes.summed_codes)(x, codes)
    for row, (start, end) in zip(found, itertools.pairwise(indptr), strict=True):
        terms = decoded[ids[start:end]]
        # A code and its offset may be larger than their sum.
        size = np.abs(exact[ids[start:end]]).max(initial=0) * len(terms)
        error = np.abs(np.asarray(row, np.float64) - terms.sum(0))
        assert (error <= 2 * relative_error(np.float32, 20) * size).all()


def test_codes_of_rows_that_are_not_finite_or_short():
    rows = awkward_rows()
    rows[5, 3] = np.nan
    with pytest.raises(ValueError, match="row 5 has a number that is not finite"):
        row_codes.coded(rows, "int8")
    assert not row_codes.saves_memory("int8", 2, np.dtype(np.float32))
    assert row_codes.saves_memory("int8", 4, np.dtype(np.float32))
    with pytest.raises(ValueError, match=r"table_dtype is one of .*, got"):
        row_codes.check_table_dtype("int4")
