"""Tables as files, written some rows at a time."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sparsejax import row_files
from sparsejax.embeddings.placement import Stack, StackedTable
from sparsejax.mesh import processes
from sparsejax.mesh.layout import call_with_auto_axes, jit_sharded, replicated
from sparsejax.whole_files import check_writable, whole_file

FORMATS = (".npy", ".parquet")

# How many numbers are read at a time: 64 MB in float32. Host memory has one block, and its Parquet
# form.
BLOCK_NUMBERS = 2**24


def table_rows(
    stack: Stack, pieces: tuple[StackedTable, ...], kernel: jax.Array
) -> Iterator[np.ndarray]:
    """The rows of a table in the order of ids, in blocks `[n, dim]`.

    With several processes, each must iterate over all blocks.

    Args:
      stack: the stack that the table is in.
      pieces: the pieces of the table, each with some of its columns.
      kernel: array with the rows of the stack.
    """
    rows, dim = pieces[0].config.num_rows, pieces[0].config.dim
    count = min(rows, max(1, BLOCK_NUMBERS // dim))
    read = jit_sharded(_rows_from, None, static=(0, 1, 2))
    for start in range(0, rows, count):
        some = read(stack, pieces, count, kernel, np.int32(start))
        yield np.asarray(some)[: rows - start]


def _rows_from(
    stack: Stack,
    pieces: tuple[StackedTable, ...],
    count: int,
    kernel: jax.Array,
    start: ArrayLike,
) -> jax.Array:
    last = pieces[0].config.num_rows - 1

    def rows(kernel, start):
        ids = jnp.minimum(start + jnp.arange(count, dtype=jnp.int32), last)
        parts = [kernel[stack.row_of(ids, piece.place)] for piece in pieces]
        return replicated(jnp.concatenate(parts, axis=1))

    return call_with_auto_axes(rows, kernel, start, out_specs=P())


def save_table(
    path: str | os.PathLike[str],
    pieces: Iterator[np.ndarray],
    like: jax.ShapeDtypeStruct,
    names: Sequence[object] | None,
) -> None:
    """Writes a table given in blocks; see `EmbeddingCollection.save_table`."""
    path = pathlib.Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: tables are written to {', '.join(FORMATS)} files")
    if names is not None:
        if path.suffix == ".npy":
            raise ValueError(
                f"{path}: .npy has no names; write .parquet, or leave out names"
            )
        if len(names) > like.shape[0]:
            raise ValueError(
                f"{len(names):,} names, but the table has {like.shape[0]:,} rows"
            )
    check_writable(path)
    # bfloat16 is converted to float32, which both formats support.
    dtype = np.dtype(np.float64 if like.dtype.itemsize == 8 else np.float32)
    wide = (np.ascontiguousarray(piece, dtype) for piece in pieces)
    write = functools.partial(_write, path, wide, like.shape, dtype, names)
    write_in_first(write, wide)


def write_in_first(write: Callable[[], object], pieces: Iterator[Any]) -> None:
    """Calls `write`, which iterates over all pieces, in the first process.

    Other processes only iterate.
    """
    if not processes.is_first():
        _take_all(pieces)
    processes.in_first(lambda: _or_take_all(write, pieces))


def _or_take_all(write: Callable[[], object], pieces: Iterator[Any]) -> None:
    try:
        write()
    except Exception:
        # The other processes iterate too, because each read is a collective operation. Then they
        # wait for process 0.
        _take_all(pieces)
        raise


def _take_all(pieces: Iterator[Any]) -> None:
    for _ in pieces:
        pass


def _write(path: pathlib.Path, pieces, shape, dtype: np.dtype, names) -> None:
    with whole_file(path) as file:
        if path.suffix == ".npy":
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(piece.data for piece in pieces)
            return
        rows, dim = shape
        columns = {} if names is None else {"name": pa.large_string()}
        columns["row"] = pa.list_(pa.from_numpy_dtype(dtype), dim)
        given = _with_ids(pieces, rows, names)
        row_files.write(file, columns, given, ids=pa.int32())


def _with_ids(
    pieces: Iterator[np.ndarray], rows: int, names: Sequence[object] | None
) -> Iterator[tuple[np.ndarray, list[Any]]]:
    """Adds ids to blocks of rows, and names if there are any. Names belong to the last rows."""
    stop, without = 0, rows - len(names or ())
    for piece in pieces:
        start, stop = stop, stop + len(piece)
        columns: list[Any] = [piece]
        if names is not None:
            known = names[max(start - without, 0) : max(stop - without, 0)]
            nameless = [None] * (len(piece) - len(known))
            columns.insert(0, [*nameless, *map(str, known)])
        yield np.arange(start, stop, dtype=np.int32), columns
