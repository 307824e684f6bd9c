"""Converts Arrow arrays from and to NumPy without importing pandas.

`pyarrow.array`, `pyarrow.scalar` and `to_numpy` import pandas where it is installed. That
takes 0.2 to 0.5 s, which most commands need not spend.
"""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa


def numbers(array: pa.Array) -> np.ndarray:
    """Converts an array of numbers or booleans to NumPy, with the result of `to_numpy`."""
    plain = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if array.null_count or not (plain or pa.types.is_boolean(array.type)):
        return array.to_numpy(zero_copy_only=False)
    if plain:
        return np.from_dlpack(array)
    if not len(array):
        return np.zeros(0, bool)
    byte, first = divmod(array.offset, 8)
    bits = np.frombuffer(array.buffers()[1], np.uint8)[byte:]
    bits = np.unpackbits(bits, count=first + len(array), bitorder="little")
    return bits[first:].astype(bool)


def filled(array: pa.Array, value: object) -> pa.Array:
    """`array.fill_null(value)`; an array without nulls is returned as it is.

    `fill_null` makes a scalar, which imports pandas.
    """
    return array.fill_null(value) if array.null_count else array


def from_numbers(values: np.ndarray) -> pa.Array:
    """Converts `[n]` integers, floats or times to an Arrow array."""
    values = np.ascontiguousarray(values)
    buffers = [None, pa.py_buffer(values.view(np.uint8))]
    type_ = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(type_, len(values), buffers)


def one(column: pa.ChunkedArray) -> pa.Array:
    """Concatenates the chunks of a column to one array."""
    return pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def is_text(array: pa.Array | pa.ChunkedArray) -> bool:
    """Whether an array has strings, perhaps as a dictionary, and no nulls."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_string and not array.null_count


def texts(array: pa.Array | pa.ChunkedArray) -> list[str]:
    """Converts an array of strings without nulls to Python strings."""
    if isinstance(array, pa.ChunkedArray):
        return [text for chunk in array.chunks for text in texts(chunk)]
    if not len(array):
        return []
    array = array.cast(pa.large_string())
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset :][: len(array) + 1].tolist()
    encoded = data.to_pybytes()
    if encoded.isascii():
        whole = encoded.decode()
        return [whole[start:end] for start, end in itertools.pairwise(ends)]
    return [encoded[start:end].decode() for start, end in itertools.pairwise(ends)]
