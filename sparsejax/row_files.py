"""Parquet files of ids with numbers: the rows of tables, or some of them."""

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
    """A file is not one of rows."""


def type_of(array: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> pa.DataType:
    """The type in a file of the rows of an array."""
    kind = pa.from_numpy_dtype(dtype_of(array))
    return kind if array.ndim == 1 else pa.list_(kind, array.shape[1])


def dtype_of(array: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> np.dtype:
    """The dtype in a file of the numbers of an array: 16 bits become float32."""
    return np.dtype(np.float32) if array.dtype.itemsize == 2 else array.dtype


def in_file(array: Any) -> Any:
    """An array, of NumPy or JAX, in the dtype that a file has."""
    return array.astype(dtype_of(array), copy=False)


def numpy_type(kind: pa.DataType) -> np.dtype:
    """The dtype of the numbers of a column."""
    return np.dtype(getattr(kind, "value_type", kind).to_pandas_dtype())


def write(
    file: BinaryIO,
    columns: Mapping[str, pa.DataType],
    pieces: Iterable[tuple[np.ndarray, list[np.ndarray]]],
    metadata: Mapping[bytes, bytes] | None = None,
    *,
    ids: pa.DataType | None = None,
) -> None:
    """Writes ids, and for each id a row of the columns.

    Args:
      file: binary file that is open for writing.
      columns: their names and types, see `type_of`.
      pieces: ids, and an array for each column, some rows at a time.
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
    """The ids and columns in a file of `write`.

    Raises:
      NotRowsError: it is no such file.
    """
    try:
        data = pq.read_table(io.BytesIO(content))
    except pa.ArrowInvalid as error:
        raise NotRowsError(f"is not a Parquet file that can be read: {error}") from None
    names = [name for name in data.column_names if name != ID]
    return data.column(ID).to_numpy(), {n: numbers(data.column(n)) for n in names}


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    """The values of a column: `[rows]`, or `[rows, n]` of lists of a fixed size."""
    kind: Any = column.type
    whole = column.combine_chunks()
    is_list = pa.types.is_fixed_size_list(kind)
    if isinstance(whole, pa.ChunkedArray):  # of no rows
        return np.zeros((0, kind.list_size) if is_list else 0, numpy_type(kind))
    if not is_list:
        return whole.to_numpy(zero_copy_only=False)
    flat = whole.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(-1, kind.list_size)
