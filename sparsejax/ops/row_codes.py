"""Rows of a table, quantized to int8 or float8 codes, and sums of such rows.

::

    int8       row = codes scale + offset      scale = (max - min) / 255, offset = min + 128 scale
    float8     row = codes scale               scale = max |row| / 448

Each row has its own scale and offset, in float32. The codes of float8 are e4m3. The error of a
number is at most

::

    int8       (max - min) / 510
    float8     max(|number| / 16, max |row| / 458752)

plus float32's rounding error.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.sparse import CSR

TableDtype = Literal["int8", "float8"]

_DTYPES: dict[str, np.dtype] = {
    "int8": np.dtype(np.int8),
    "float8": np.dtype(jnp.float8_e4m3fn),
}
# The largest finite number of e4m3.
_LARGEST = 448.0


class RowCodes(NamedTuple):
    """Quantized rows, as NumPy or JAX arrays.

    Attributes:
      codes: `[rows, dim]` int8 or float8_e4m3fn.
      scale: `[rows]` float32.
      offset: `[rows]` float32; None for float8.
    """

    codes: np.ndarray | jax.Array
    scale: np.ndarray | jax.Array
    offset: np.ndarray | jax.Array | None


def check_table_dtype(table_dtype: str | None) -> None:
    """Raises ValueError if `table_dtype` is not a dtype for quantized rows."""
    if table_dtype is not None and table_dtype not in get_args(TableDtype):
        known = ", ".join(map(repr, get_args(TableDtype)))
        raise ValueError(
            f"table_dtype is one of {known}, or None for tables as they are, got "
            f"{table_dtype!r}"
        )


def coded_dtypes(kind: TableDtype) -> tuple[np.dtype, ...]:
    """The dtypes of the arrays in `RowCodes`."""
    numbers = (np.dtype(np.float32),) * (2 if kind == "int8" else 1)
    return (_DTYPES[kind], *numbers)


def saves_memory(kind: TableDtype, dim: int, dtype: np.dtype) -> bool:
    """Whether codes take less memory than the rows; not for rows with few numbers."""
    codes, *numbers = coded_dtypes(kind)
    coded = dim * codes.itemsize + sum(d.itemsize for d in numbers)
    return coded < dim * dtype.itemsize


def coded(rows: Float[np.ndarray, "rows dim"], kind: TableDtype) -> RowCodes:
    """Quantizes rows.

    Raises:
      ValueError: a number is not finite.
    """
    wide = np.asarray(rows, np.float32)
    if not np.isfinite(wide).all():
        row = int(np.argmin(np.isfinite(wide).all(axis=1)))
        raise ValueError(f"row {row:,} has a number that is not finite")
    if kind == "float8":
        scale = np.max(np.abs(wide), axis=1) / np.float32(_LARGEST)
        codes = _divided(wide, scale).clip(-_LARGEST, _LARGEST)
        return RowCodes(codes.astype(_DTYPES[kind]), scale, None)
    # In float64, because a difference of very large float32 numbers may overflow in float32.
    exact = wide.astype(np.float64)
    low = exact.min(axis=1)
    scale = ((exact.max(axis=1) - low) / 255).astype(np.float32)
    offset = (low + 128 * scale.astype(np.float64)).astype(np.float32)
    codes = np.rint(_divided(exact - offset[:, None], scale)).clip(-128, 127)
    return RowCodes(codes.astype(np.int8), scale, offset)


def _divided(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`rows / scale`, with 0 for rows whose scale is 0."""
    return rows / np.where(scale == 0, np.inf, scale)[:, None].astype(rows.dtype)


def summed_codes(x: CSR, rows: RowCodes) -> Float[Array, "batch dim"]:
    """`gather_matmul(x, w)` in float32, where `w` is the dequantized table.

    Only rows that have an entry are read and dequantized, `[nse, dim]` of them.

    Args:
      x: matrix whose entries are all columns of the table.
      rows: quantized table.
    """
    ids = jnp.asarray(x.indices)
    codes = jnp.asarray(rows.codes)[ids].astype(jnp.float32)
    scale = jnp.asarray(rows.scale)[ids][:, None]
    decoded = codes * scale
    if rows.offset is not None:
        decoded += jnp.asarray(rows.offset)[ids][:, None]
    # Each entry refers to its own dequantized row from here on.
    by_entry = x.with_indices(jnp.arange(x.nse, dtype=jnp.int32), x.nse)
    return gather_matmul(by_entry, decoded, implementation="xla")
