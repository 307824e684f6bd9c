"""Converts NumPy arrays to Arrow arrays, and back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sparsejax.data.files import arrow


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float64])
def test_numbers_of_a_slice(dtype):
    values = np.random.default_rng(0).integers(0, 2, 37).astype(dtype)
    whole = pa.array(values)
    for start, count in [(0, 37), (0, 8), (3, 9), (8, 16), (13, 24), (36, 1), (5, 0)]:
        found = arrow.numbers(whole.slice(start, count))
        np.testing.assert_array_equal(found, values[start : start + count])
        assert found.dtype == dtype


def test_nulls_are_filled():
    some = pa.array([3, None, 5])
    assert arrow.numbers(arrow.filled(some, 0)).tolist() == [3, 0, 5]
    none = pa.array([1, 2]).slice(1)
    assert arrow.filled(none, 0) is none
    with_null = pa.array([True, None, False])
    assert arrow.numbers(with_null).tolist() == [True, None, False]
