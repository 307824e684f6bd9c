"""Dynamic tables as Parquet files: ids with their vectors, in ascending order of ids."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sparsejax import row_files
from sparsejax.embeddings import table_files
from sparsejax.mesh.layout import call_with_auto_axes, jit_sharded, replicated
from sparsejax.ops import index_edits
from sparsejax.whole_files import check_writable, whole_file
from sparsejax.wide_ids import joined

# Key in the metadata of the file's schema: steps of the optimizer whose state is in the file.
_STEPS = b"sparsejax.steps"
# Prefix of the names of optimizer arrays.
STATE = "state."
_ID_TYPES = pa.uint64(), pa.int64(), pa.int32()
# Number of rows that are read or written at a time.
BLOCK = 65_536


def is_number(column: str) -> bool:
    """Whether a column belongs to a `RowNumber`, whose arrays are divided into parts."""
    return column != "row" and not column.startswith(STATE)


class Rows(NamedTuple):
    """The rows of a table in a file.

    Attributes:
      ids: ids with a row, uint64, ascending.
      names: names of the columns.
      steps: steps of the optimizer whose state is among the columns; None without state.
      blocks: function that reads the columns in blocks of rows: it yields positions in `ids`, and
          an array for each column, `[rows]`, `[rows, 1]` or `[rows, dim]`.
    """

    ids: np.ndarray
    names: tuple[str, ...]
    steps: int | None
    blocks: Callable[[], Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]]


def save(
    path: str | os.PathLike[str],
    columns: Mapping[str, jax.ShapeDtypeStruct],
    pieces: Iterator[tuple[np.ndarray, list[np.ndarray]]],
    steps: int | None,
) -> None:
    """Writes ids with their columns; see `EmbeddingCollection.save_table`.

    Args:
      path: the file.
      columns: types of the columns, by name.
      pieces: blocks of ascending ids with their columns.
      steps: number of steps of the optimizer whose state is among the columns; None without state.
    """
    path = pathlib.Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: ids with their state are written to .parquet files")
    check_writable(path)
    types = {name: row_files.type_of(array) for name, array in columns.items()}
    metadata = {} if steps is None else {_STEPS: str(steps).encode()}

    def write() -> None:
        with whole_file(path) as file:
            row_files.write(file, types, pieces, metadata)

    table_files.write_in_first(write, pieces)


def flat(array: jax.Array) -> jax.Array:
    """Reshapes `[parts, rows of a part]` to `[rows]`."""
    return jit_sharded(_flat, P("model"), static=())(array)


def flattened(columns: Mapping[str, Any]) -> list[jax.Array]:
    """The columns of all rows, one number or list for each row."""
    return [flat(a[...]) if is_number(n) else a[...] for n, a in columns.items()]


def keys_at(keys: jax.Array, rows: np.ndarray) -> np.ndarray:
    """The ids of some rows, whose words are `keys`."""
    found = [np.zeros(0, np.uint64)]
    for some, (words,) in gathered(rows, [keys]):
        words = np.asarray(words)[: some.stop - some.start]
        found.append(joined(words[:, 0], words[:, 1]))
    return np.concatenate(found)


def _flat(array: jax.Array) -> jax.Array:
    return call_with_auto_axes(lambda a: a.reshape(-1), array, out_specs=P("model"))


def gathered(
    rows: np.ndarray, arrays: Sequence[jax.Array]
) -> Iterator[tuple[slice, list[jax.Array]]]:
    """Copies rows of arrays in blocks, padded with zeros; yields the slice of each block, and
    copies.
    """
    read, size = jit_sharded(_read, None, static=()), index_edits.block(len(rows))
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        at = np.pad(some, (0, size - len(some))).astype(np.int32)
        found = read([*arrays], at) if len(arrays) else []
        yield slice(start, start + len(some)), found


def _read(arrays: list[jax.Array], rows: ArrayLike) -> list[jax.Array]:
    def read(arrays, rows):
        return [replicated(row_files.in_file(array[rows])) for array in arrays]

    return call_with_auto_axes(read, arrays, rows, out_specs=P())


def read(
    path: str | os.PathLike[str],
    like: Mapping[str, jax.ShapeDtypeStruct],
    *,
    with_state: bool,
) -> Rows:
    """Opens the rows of a file. Its columns must be among those of `like`.

    Args:
      path: the file.
      like: arrays of all rows by column.
      with_state: whether an optimizer is given, whose arrays are then in `like`.

    Raises:
      ValueError: the file has another format, width or dtype, has a repeated id, or the state of
          another rule; or, raised by `blocks`, a number is missing or not finite.
    """
    path = pathlib.Path(path)
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            _check_columns(path, schema, like)
            keys = file.read([row_files.ID]).column(0)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path} is not a Parquet file that can be read, as save_table writes it: "
            f"{error}"
        ) from None
    _check_complete(path, keys)
    ids, places = ranked(path, keys.to_numpy())
    names = tuple(name for name in like if name in schema.names)

    def blocks() -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        start = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BLOCK, columns=[*names]):
                columns = {}
                for name in names:
                    column = pa.chunked_array([batch.column(name)])
                    _check_complete(path, column)
                    columns[name] = checked(path, name, row_files.numbers(column))
                yield places[start : start + len(batch)], columns
                start += len(batch)

    steps = _steps(path, schema, like) if with_state else None
    return Rows(ids, names, steps, blocks)


def _check_columns(
    path: pathlib.Path, schema: pa.Schema, like: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    for name in (row_files.ID, "row"):
        if name not in schema.names:
            raise ValueError(
                f"{path} has the columns {schema.names}, expected one {name!r}, as "
                "save_table writes it"
            )
    if (kind := schema.field(row_files.ID).type) not in _ID_TYPES:
        raise ValueError(f"{path}: ids must be uint64, int64 or int32, got {kind}")
    for name, array in like.items():
        expected = row_files.type_of(array)
        if name in schema.names and (found := schema.field(name).type) != expected:
            raise ValueError(
                f"{path}: the column {name!r} has {found}, expected {expected}, as the "
                "table has them"
            )


def _check_complete(path: pathlib.Path, column: pa.ChunkedArray) -> None:
    if column.null_count:
        raise ValueError(f"{path} has missing values; every id needs its numbers")


def ranked(path: pathlib.Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a file in ascending order, and the rank of each row's id in this order."""
    if ids.dtype.kind == "i" and (ids < 0).any():
        raise ValueError(f"{path}: id {ids.min()} is negative; write ids as uint64")
    order = np.argsort(ids, kind="stable")
    places = np.empty(len(ids), np.int64)
    places[order] = np.arange(len(ids))
    ids = ids.astype(np.uint64)[order]
    if len(twice := np.flatnonzero(ids[1:] == ids[:-1])):
        raise ValueError(f"{path} has the id {ids[twice[0]]} twice")
    return ids, places


def checked(path: pathlib.Path, name: str, values: np.ndarray) -> np.ndarray:
    """The values of a column; raises ValueError unless all are finite."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError(f"{path}: the column {name!r} has a number that is not finite")
    return values


def _steps(
    path: pathlib.Path, schema: pa.Schema, like: Mapping[str, jax.ShapeDtypeStruct]
) -> int | None:
    """The number of optimizer steps stored in the file; None if it has no optimizer state."""
    given, expected = (
        sorted(name.removeprefix(STATE) for name in names if name.startswith(STATE))
        for names in (schema.names, like)
    )
    told = (schema.metadata or {}).get(_STEPS)
    if told is None and not given:
        return None
    if given != expected:
        raise ValueError(
            f"{path} has the state of another rule: it has {given}, expected {expected}; "
            "load it with optimizer=None, or save it without an optimizer"
        )
    if told is None:
        raise ValueError(
            f"{path} has the state of an optimizer, but its metadata do not say after how "
            f"many steps ({_STEPS.decode()!r}): keep the metadata when you write the file "
            f"anew, or leave out the columns {STATE}*"
        )
    return int(told) if given else None


def overwritten(
    array: jax.Array, rows: np.ndarray, values: np.ndarray, spec: P, *, by_parts: bool
) -> jax.Array:
    """An array in which some rows are replaced, reusing its memory.

    Args:
      array: `[rows, ...]`, or `[parts, rows of a part]`.
      rows: numbers of the rows to replace; with `by_parts`, counted over all parts.
      values: new values of these rows.
      spec: sharding of the array.
      by_parts: whether `array` has the second form.
    """
    write = jit_sharded(_written, spec, static=(0, 1), donate=(2,))
    for at, data in index_edits.blocks(rows, values):
        array = write(by_parts, spec, array, at, data)
    return array


def _written(
    by_parts: bool, spec: P, array: jax.Array, rows: ArrayLike, values: ArrayLike
) -> jax.Array:
    def written(array, rows, values):
        flat = array.reshape(-1) if by_parts else array
        flat = flat.at[rows].set(values.astype(flat.dtype), mode="drop")
        return flat.reshape(array.shape)

    return call_with_auto_axes(written, array, rows, values, out_specs=spec)
