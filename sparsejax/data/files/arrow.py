"""Arrow's arrays from NumPy's, and back, without pandas.

`pyarrow.array`, `pyarrow.scalar` and `to_numpy` import pandas where it is installed. That
takes .2 to .5 s, which most commands can do without.
"""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa


def numbers(array: pa.Array) -> np.ndarray:
    """The values of an array as `to_numpy` gives them."""
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
    """`fill_null`, which makes a scalar, where there are nulls."""
    return array.fill_null(value) if array.null_count else array


def from_numbers(values: np.ndarray) -> pa.Array:
    """`[n]` integers, floats or times as an Arrow array."""
    values = np.ascontiguousarray(values)
    buffers = [None, pa.py_buffer(values.view(np.uint8))]
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), buffers
    )


def one(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    return pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def is_text(array: pa.Array | pa.ChunkedArray) -> bool:
    """Whether this is an array of texts without nulls."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_string and not array.null_count


def texts(array: pa.Array | pa.ChunkedArray) -> list[str]:
    """The texts of an array of texts without nulls."""
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
