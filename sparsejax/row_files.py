"""Parquet files that hold rows of embedding tables: a column of ids and columns of numbers."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ID = "id"


class NotRowsError(ValueError):
    """The file does not hold rows of a table."""


def type_of(array: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> pa.DataType:
    """The Arrow type with which a file stores a row of an array."""
    kind = pa.from_numpy_dtype(dtype_of(array))
    return kind if array.ndim == 1 else pa.list_(kind, array.shape[1])


def dtype_of(array: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> np.dtype:
    """The dtype with which a file stores the numbers of an array: 16 bits become float32."""
    return np.dtype(np.float32) if array.dtype.itemsize == 2 else array.dtype


def in_file(array: Any) -> Any:
    """Converts an array, of NumPy or JAX, to the dtype with which a file stores it."""
    return array.astype(dtype_of(array), copy=False)


def numpy_type(kind: pa.DataType) -> np.dtype:
    """The NumPy dtype of the numbers in a column, also in a column of lists."""
    return np.dtype(getattr(kind, "value_type", kind).to_pandas_dtype())


def write(
    file: BinaryIO,
    columns: Mapping[str, pa.DataType],
    pieces: Iterable[tuple[np.ndarray, list[np.ndarray]]],
    metadata: Mapping[bytes, bytes] | None = None,
    *,
    ids: pa.DataType | None = None,
) -> None:
    """Writes a Parquet file with a column of ids and the given columns.

    Args:
      file: binary file that is open for writing.
      columns: type of each column, by name; see `type_of`.
      pieces: consecutive blocks of rows: their ids, and an array for each column.
      metadata: metadata of the schema.
      ids: type of the ids; uint64 by default.
    """
    fields = [(ID, ids or pa.uint64()), *columns.items()]
    schema = pa.schema(fields, metadata=dict(metadata or {}))
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for some, arrays in pieces:
            data = [pa.array(some), *map(_column, arrays)]
            writer.write_table(pa.Table.from_arrays(data, schema=schema))


def _column(values: np.ndarray | list[str | None]) -> pa.Array:
    if isinstance(values, list):
        return pa.array(values, pa.large_string())
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def read(content: bytes) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Reads the ids and the columns, by name, of a file that `write` made.

    Raises:
      NotRowsError: the content is not a Parquet file.
    """
    try:
        data = pq.read_table(io.BytesIO(content))
    except pa.ArrowInvalid as error:
        raise NotRowsError(f"is not a Parquet file that can be read: {error}") from None
    names = [name for name in data.column_names if name != ID]
    return data.column(ID).to_numpy(), {n: numbers(data.column(n)) for n in names}


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    """The values of a column as an array: `[rows]`, or `[rows, n]` for lists of a fixed size."""
    kind: Any = column.type
    whole = column.combine_chunks()
    is_list = pa.types.is_fixed_size_list(kind)
    if isinstance(whole, pa.ChunkedArray):  # a column without rows has no chunks
        return np.zeros((0, kind.list_size) if is_list else 0, numpy_type(kind))
    if not is_list:
        return whole.to_numpy(zero_copy_only=False)
    flat = whole.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(-1, kind.list_size)
