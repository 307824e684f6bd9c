"""Edits of a hash index by the host: removes keys from their rows, and assigns rows to other
keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sparsejax.mesh.layout import call_with_auto_axes, jit_sharded
from sparsejax.mesh.per_device import found_anywhere, on_each, own_place
from sparsejax.ops import hash_index
from sparsejax.ops.hash_index import PARTS, Index, Layout, TableKeys
from sparsejax.sparse import MAX_ENTRIES
from sparsejax.wide_ids import WideIds, joined

# Number of keys that are added at a time.
_BLOCK = 65_536


def block(count: int) -> int:
    """The size of a block of `count` keys. There are few sizes, so that few programs compile."""
    bits = max(8, max(0, count - 1).bit_length())
    return min(_BLOCK, 1 << -(-bits // 4) * 4)


def blocks(
    rows: np.ndarray, values: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields blocks of row numbers and their values; padding rows are out of range."""
    size = block(len(rows))
    for start in range(0, len(rows), size):
        some, data = rows[start : start + size], values[start : start + size]
        more = size - len(some)
        at = np.pad(some, (0, more), constant_values=MAX_ENTRIES).astype(np.int32)
        yield at, np.pad(data, ((0, more), *((0, 0),) * (data.ndim - 1)))


def rows_of(
    layout: Layout, table: int, used: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a table in ascending order, and the row of each, numbered over all parts."""
    rows = rows_in(layout, table, used)
    words = keys.reshape(-1, 2)[rows]
    ids = joined(words[:, 0], words[:, 1])
    order = np.argsort(ids)
    return ids[order], rows[order]


def rows_in(layout: Layout, table: int, mask: np.ndarray) -> np.ndarray:
    """The rows of a table for which a mask of all rows is true."""
    first = layout.firsts[table]
    mine = mask.reshape(PARTS, -1)[:, first : first + layout.sizes[table]]
    part, row = np.nonzero(mine)
    return (part * layout.rows + first + row).astype(np.int32)


def check_room(
    path: str | os.PathLike[str], layout: Layout, table: int, name: str, ids: np.ndarray
) -> None:
    """Raises ValueError if a part of a table has fewer rows than these ids need.

    Args:
      path: the file from which the ids were read, for errors.
      layout: sizes of the index.
      table: number of the table.
      name: name of the table, for errors.
      ids: ids that the table will hold.
    """
    size = layout.sizes[table]
    most = int(np.bincount(hash_index.part_of(_keys(table, ids)), minlength=1).max())
    if most > size:
        raise ValueError(
            f"{path} has {len(ids):,} ids, {most:,} of them in one of 256 parts, of which "
            f"each has {size:,} rows in the table {name!r}: make it for at least "
            f"{most * PARTS:,} rows"
        )


def _keys(table: int, ids: np.ndarray) -> TableKeys:
    words = WideIds.of(ids)
    return TableKeys(np.full(len(ids), table, np.int32), words.high, words.low)


def replace(
    layout: Layout, table: int, index: Index, gone: np.ndarray, ids: np.ndarray
) -> tuple[Index, np.ndarray]:
    """Removes the keys of some rows from an index, and inserts new keys.

    Args:
      layout: sizes of the index.
      table: number of the table of the new keys.
      index: the whole index, with all parts.
      gone: a mask of all rows: true for a row that loses its key.
      ids: the new keys; the index has none of them.

    Returns:
      The index, and the row of each id, numbered over all parts; -1 if there is no free slot.
    """
    remove = jit_sharded(_removed, P("model"), static=(0,))
    index = remove(layout, index, gone.reshape(PARTS, -1))
    add, size, rows = jax.jit(_added, static_argnums=0), block(len(ids)), []
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        wanted = np.arange(size) < len(some)
        keys = _keys(table, np.pad(some, (0, size - len(some))))
        index, found = add(layout, index, keys, wanted)
        rows.append(np.asarray(found)[: len(some)])
    return index, np.concatenate(rows) if rows else np.zeros(0, np.int32)


def _removed(layout: Layout, index: Index, gone: ArrayLike) -> Index:
    return call_with_auto_axes(
        lambda index, gone: hash_index.remove(layout, index, jnp.asarray(gone)),
        index,
        gone,
        out_specs=P("model"),
    )


def _added(
    layout: Layout, index: Index, keys: TableKeys, wanted: jax.Array
) -> tuple[Index, jax.Array]:
    def part(index, keys, wanted):
        first = own_place() * len(index.used)
        of_part = hash_index.part_of(keys) - first
        mine = wanted & (of_part >= 0) & (of_part < len(index.used))
        of, _ = hash_index.distinct(layout, keys, mine.astype(jnp.int32))
        index, rows = hash_index.insert(layout, index, of, of.first, first)
        rows = jnp.full(len(rows), -1, jnp.int32).at[of.place].set(rows)
        return index, found_anywhere(rows, first * layout.rows)

    by_parts = P("model")
    return on_each(part, (index, keys, wanted), (by_parts, P(), P()), (by_parts, P()))


def changed(
    path: str | os.PathLike[str],
    layout: Layout,
    table: int,
    name: str,
    index: Index,
    known: tuple[np.ndarray, np.ndarray],
    *,
    ids: np.ndarray,
    removed: np.ndarray | None,
) -> tuple[Index, np.ndarray]:
    """An index with changed ids, and the rows of `ids`, numbered over all parts.

    Args:
      path: the file from which the ids were read, for errors.
      layout: sizes of the index.
      table: number of the table.
      name: name of the table, for errors.
      index: the whole index, with all parts.
      known: the table's ids and rows, as `rows_of` returns them.
      ids: ids that will have a row.
      removed: ids that lose their row. None removes all ids that are not in `ids`.

    Raises:
      ValueError: there is no room for the ids.
    """
    here, places = known
    kept = np.zeros(len(here), bool)
    if removed is not None:
        kept = np.isin(here, ids) | ~np.isin(here, removed)
    gone = np.zeros(PARTS * layout.rows, bool)
    gone[places[~kept]] = True
    here, places = here[kept], places[kept]
    check_room(path, layout, table, name, np.union1d(here, ids))
    rows = np.full(len(ids), -1, np.int32)
    _, of_ids, of_here = np.intersect1d(ids, here, True, return_indices=True)
    rows[of_ids] = places[of_here]
    new = rows < 0
    index, rows[new] = replace(layout, table, index, gone, ids[new])
    if (rows < 0).any():
        raise ValueError(
            f"{path}: {np.sum(rows < 0):,} ids found no slot of the index of table "
            f"{name!r}, whose buckets were full: make the table larger"
        )
    return index, rows
