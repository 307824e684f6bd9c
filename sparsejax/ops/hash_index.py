"""An index from 64-bit keys to rows: a hash table of arrays, changed by pure functions.

A key belongs to a table, and is two words of 32 bits. The hash of a key chooses one of 256
*parts*, and in the part two *buckets* of 16 *slots*. A device has consecutive parts. A slot has
a row number, and a tag of 8 bits by which most other keys are rejected. The row has the key::

    tags [parts, buckets, 4]   4 tags a word; 0 is a slot without a row
    slots [parts, 16 buckets]  the row of each slot
    keys [parts, rows, 2]      the key of each row: low word, high word
    used [parts, rows]         whether the row has a key
    free [parts, rows]         the first `num_free` of each table's range: rows without a key
    num_free [parts, tables]

There are two slots for each row, so a table fills to its last row. The results depend only on
the index and the set of its keys, not on the order of keys or the number of devices. Two keys
never write the same element, except by an integer addition or maximum.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from pallas_kernels import hash_index as mosaic
from sparsejax.mesh.layout import ROW_MULTIPLE, varying_axes
from sparsejax.ops.implementations import (
    HOPPER_OR_NEWER,
    Implementation,
    custom_call_can_run,
)
from sparsejax.sparse import MAX_ENTRIES, sums_so_far

PARTS = ROW_MULTIPLE
SLOTS = mosaic.SLOTS
_WORDS = SLOTS // 4
# Sort key of entries that belong to no group; they come last.
_LAST = np.uint32(0xFFFFFFFF)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of an index.

    Attributes:
      rows: number of rows in each part. Rows after the ranges of the tables are never
        used.
      firsts: for each table, its first row in every part.
      sizes: for each table, its number of rows in every part.
    """

    rows: int
    firsts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.buckets * SLOTS * PARTS > MAX_ENTRIES:
            raise ValueError(
                f"tables of {sum(self.sizes) * PARTS:,} rows have an index of "
                f"{self.buckets * SLOTS * PARTS:,} slots, more than int32 can number "
                "(2^31 - 1); make them smaller, or give them different widths"
            )

    @property
    def buckets(self) -> int:
        """Number of buckets in a part, which has two slots for each row."""
        return -(-2 * sum(self.sizes) // SLOTS)

    def table_of_rows(self) -> Int[Array, "rows"]:
        """The table of each row of a part; arbitrary for rows that are never used."""
        row = jnp.arange(self.rows, dtype=jnp.int32)
        first = jnp.asarray(self.firsts, jnp.int32)
        return jnp.sum(row[:, None] >= first[None, 1:], axis=1, dtype=jnp.int32)

    def per_table(self, values: Int[Array, "parts rows"]) -> Int[Array, "parts tables"]:
        """Sums of the values over the rows of each table."""
        ranges = zip(self.firsts, self.sizes, strict=True)
        sums = [jnp.sum(values[:, f : f + s], axis=1) for f, s in ranges]
        return jnp.stack(sums, axis=1)


class TableKeys(NamedTuple):
    """Keys with their tables. The arrays `[keys]` are JAX's or NumPy's.

    Attributes:
      table: number of the table, int32.
      high: the upper 32 bits, uint32.
      low: the lower 32 bits.
    """

    table: Any
    high: Any
    low: Any


class Index(NamedTuple):
    """The arrays of an index, as the module says. A device may have some of the parts."""

    tags: UInt32[Array, "parts buckets 4"]
    slots: Int[Array, "parts slots"]
    keys: UInt32[Array, "parts rows 2"]
    used: Bool[Array, "parts rows"]
    free: Int[Array, "parts rows"]
    num_free: Int[Array, "parts tables"]


class Distinct(NamedTuple):
    """Keys in ascending order of (part, table, key), see `distinct`.

    Attributes:
      keys: the keys, some of them several times.
      part: the part to which each key belongs.
      first: whether the key is counted and is the first of equal keys.
      start: position of the first of equal keys.
      group: ascending numbers of (part, table).
      place: position of each key before sorting.
    """

    keys: TableKeys
    part: Int[Array, "keys"]
    first: Bool[Array, "keys"]
    start: Int[Array, "keys"]
    group: UInt32[Array, "keys"]
    place: Int[Array, "keys"]


def empty(layout: Layout, parts: int = PARTS) -> Index:
    """An index without keys."""
    free = np.zeros(layout.rows, np.int32)
    for first, size in zip(layout.firsts, layout.sizes, strict=True):
        free[first : first + size] = np.arange(first + size, first, -1) - 1
    return Index(
        tags=jnp.zeros((parts, layout.buckets, _WORDS), jnp.uint32),
        slots=jnp.zeros((parts, layout.buckets * SLOTS), jnp.int32),
        keys=jnp.zeros((parts, layout.rows, 2), jnp.uint32),
        used=jnp.zeros((parts, layout.rows), bool),
        free=jnp.broadcast_to(jnp.asarray(free), (parts, layout.rows)),
        num_free=jnp.broadcast_to(
            jnp.asarray(layout.sizes, jnp.int32), (parts, len(layout.sizes))
        ),
    )


def part_of(keys: TableKeys) -> Any:
    """The part of each key, 0 to 255. The arrays may be NumPy's."""
    return (spread(keys) >> 24).astype(np.int32)


def spread(keys: TableKeys) -> Any:
    """A 32-bit number for each key; its highest 8 bits are the key's part."""
    return hashed(keys, 1)


def hashed(keys: TableKeys, seed: int) -> Any:
    """A 32-bit hash (MurmurHash3) of each key and its table; the arrays are NumPy's or JAX's."""
    total = np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for word in (keys.low, keys.high, keys.table.astype(np.uint32)):
        word = word * np.uint32(0xCC9E2D51)
        word = word << np.uint32(15) | word >> np.uint32(17)
        total = total ^ word * np.uint32(0x1B873593)
        total = total << np.uint32(13) | total >> np.uint32(19)
        total = total * np.uint32(5) + np.uint32(0xE6546B64)
    # The hash function mixes in the length of its input, 12 bytes.
    total = total ^ np.uint32(12)
    total = (total ^ total >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    total = (total ^ total >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return total ^ total >> np.uint32(16)


def find(
    layout: Layout,
    index: Index,
    keys: TableKeys,
    wanted: Bool[Array, "keys"],
    first_part: int | jax.Array = 0,
    *,
    implementation: Implementation = None,
) -> Int[Array, "keys"]:
    """The row of each key, counted over these parts in order; -1 if the index lacks the key.

    Args:
      layout: sizes of the index.
      index: some of the index's parts.
      keys: keys, which may belong to any part.
      wanted: which keys are searched for; the others get -1.
      first_part: number of the first of these parts.
      implementation: "xla" or "mosaic_gpu", see `implementations`.
    """
    if implementation is None and _program_can_run(index, keys):
        implementation = "mosaic_gpu"
    if implementation == "mosaic_gpu":
        return _find_by_program(layout, index, keys, wanted, first_part)
    part, first, second, tag = _places(layout, keys)
    buckets = jnp.stack([first, second], axis=1).astype(jnp.int32)
    part = part - first_part
    wanted &= (part >= 0) & (part < len(index.used))
    part = jnp.where(wanted, part, 0)
    buckets = part[:, None] * layout.buckets + buckets
    # A mask over the slots of both buckets: whether the slot's tag equals the key's.
    same = _bytes(index.tags.reshape(-1, _WORDS)[buckets]) == tag[:, None, None]
    bits = jnp.arange(2 * SLOTS, dtype=jnp.uint32).reshape(1, 2, SLOTS)
    left = jnp.sum(same.astype(jnp.uint32) << bits, axis=(1, 2), dtype=jnp.uint32)
    left = jnp.where(wanted, left, 0)
    first = jnp.asarray(layout.firsts, jnp.int32)[keys.table]
    size = jnp.asarray(layout.sizes, jnp.int32)[keys.table]

    def compare(state):
        left, found = state
        lowest = lax.population_count((left & (~left + 1)) - 1).astype(jnp.int32)
        bucket = jnp.where(lowest < SLOTS, buckets[:, 0], buckets[:, 1])
        # Keys whose search has ended all read one slot, so that it stays in a cache.
        slot = jnp.where(left != 0, bucket * SLOTS + lowest % SLOTS, 0)
        row = index.slots.reshape(-1)[slot]
        place = jnp.where(left != 0, part * layout.rows + row, 0)
        key = index.keys.reshape(-1, 2)[place]
        hit = (left != 0) & (key[:, 0] == keys.low) & (key[:, 1] == keys.high)
        hit &= (row >= first) & (row < first + size)
        return jnp.where(hit, 0, left & (left - 1)), jnp.where(hit, place, found)

    found = jnp.full(part.shape, -1, jnp.int32)
    return lax.while_loop(lambda state: jnp.any(state[0] != 0), compare, (left, found))[
        1
    ]


def _program_can_run(index: Index, keys: TableKeys) -> bool:
    # The GPU program cannot state the mesh axes over which its results vary.
    return not varying_axes((index, keys)) and custom_call_can_run(HOPPER_OR_NEWER)


def _find_by_program(
    layout: Layout,
    index: Index,
    keys: TableKeys,
    wanted: Bool[Array, "keys"],
    first_part: int | jax.Array,
) -> Int[Array, "keys"]:
    def places(table, high, low):
        part, first, second, tag = _places(layout, TableKeys(table, high, low))
        return part, first.astype(jnp.int32), second.astype(jnp.int32), tag

    firsts, sizes = np.array(layout.firsts), np.array(layout.sizes)
    return mosaic.find(
        places,
        index.tags,
        index.slots,
        index.keys,
        jnp.asarray(np.stack([firsts, firsts + sizes], axis=1), jnp.int32),
        jnp.where(wanted, keys.table, -1),
        jnp.asarray(keys.high),
        jnp.asarray(keys.low),
        jnp.asarray(first_part, jnp.int32),
    )


def distinct(
    layout: Layout, keys: TableKeys, times: Int[Array, "keys"]
) -> tuple[Distinct, Int[Array, "keys"]]:
    """The keys that occur, in ascending order, and the number of occurrences of each.

    The number of occurrences is the sum of `times` over equal keys, stored at the first of them.
    """
    part, tables = part_of(keys), np.uint32(len(layout.sizes))
    group = part.astype(jnp.uint32) * tables + keys.table.astype(jnp.uint32)
    group = jnp.where(times > 0, group, _LAST)
    place = jnp.arange(len(group), dtype=jnp.int32)
    group, high, low, place = lax.sort((group, keys.high, keys.low, place), num_keys=3)
    first = _differs(group) | _differs(high) | _differs(low)
    start = lax.cummax(jnp.where(first, jnp.arange(len(group), dtype=jnp.int32), 0))
    counts = jnp.zeros(len(group), jnp.int32).at[start].add(times[place])
    used = group != _LAST
    found = TableKeys((group % tables).astype(jnp.int32), high, low)
    part = jnp.where(used, group // tables, 0).astype(jnp.int32)
    return Distinct(found, part, first & used, start, group, place), counts


def insert(
    layout: Layout,
    index: Index,
    of: Distinct,
    new: Bool[Array, "keys"],
    first_part: int | jax.Array = 0,
) -> tuple[Index, Int[Array, "keys"]]:
    """Assigns rows to new keys; returns the row of each key, as `find` does, or -1.

    In ascending order, the keys of a (part, table) take its free rows until none is left.
    Then, in ascending order too, each takes a slot in the bucket that has more free slots.
    Keys that found no slot there try again. A key gets no row if both its buckets are full.

    Args:
      layout: sizes of the index.
      index: some of the index's parts.
      of: keys that are not in the index.
      new: which of the keys get a row. Each is in these parts, and the first of equal keys.
      first_part: number of the first of these parts.
    """
    tables = len(layout.sizes)
    part = jnp.where(new, of.part - first_part, 0)
    group = part * tables + of.keys.table
    num_free = index.num_free.reshape(-1)[group]
    left = new & (_rank(new, of.group) < num_free)
    _, *both, tag = _places(layout, of.keys)
    buckets = jnp.stack(both, axis=1).astype(jnp.int32)
    buckets = part[:, None] * layout.buckets + buckets
    order = jnp.arange(len(new), dtype=jnp.int32)

    def goes_on(state):
        return jnp.any(state[1])

    def place(state):
        tags, left, slot = state
        taken = _bytes(tags[buckets]) != 0
        room = SLOTS - jnp.sum(taken, axis=2, dtype=jnp.int32)
        choice = (room[:, 1] > room[:, 0]).astype(jnp.int32)
        room = jnp.maximum(room[:, 0], room[:, 1])
        left &= room > 0
        bucket = jnp.take_along_axis(buckets, choice[:, None], axis=1)[:, 0]
        # The rank of each key among the keys of its bucket.
        at = jnp.where(left, bucket, MAX_ENTRIES).astype(jnp.uint32)
        at, key = lax.sort((at, order), num_keys=2)
        ranks = order - lax.cummax(jnp.where(_differs(at), order, 0))
        rank = jnp.zeros_like(ranks).at[key].set(ranks, unique_indices=True)
        fits = left & (rank < room)
        free = ~jnp.take_along_axis(taken, choice[:, None, None], axis=1)[:, 0]
        nth = sums_so_far(free) == rank[:, None] + 1
        inside = jnp.argmax(nth & free, axis=1).astype(jnp.int32)
        slot = jnp.where(fits, bucket * SLOTS + inside, slot)
        # The slot's byte is 0, so adding the tag leaves the word's other tags unchanged.
        shifted = tag << (8 * (inside % 4)).astype(jnp.uint32)
        at = jnp.where(fits, bucket, len(tags))
        tags = tags.at[at, inside // 4].add(shifted, mode="drop")
        return tags, left & ~fits, slot

    tags = index.tags.reshape(-1, _WORDS)
    slot = jnp.full(len(new), -1, jnp.int32)
    tags, _, slot = lax.while_loop(goes_on, place, (tags, left, slot))
    placed = slot >= 0
    # Rows are taken from the end of the free rows, so that the others keep their positions.
    first = jnp.asarray(layout.firsts, jnp.int32)[of.keys.table]
    at = first + num_free - 1 - _rank(placed, of.group)
    at = jnp.where(placed, part * layout.rows + at, 0)
    row = index.free.reshape(-1)[at]
    place_of = part * layout.rows + row
    nowhere = MAX_ENTRIES - order  # indices that are out of range, and unique
    to_slot = jnp.where(placed, slot, nowhere)
    to_row = jnp.where(placed, place_of, nowhere)
    words = jnp.stack([of.keys.low, of.keys.high], axis=1)
    options = {"mode": "drop", "unique_indices": True}
    gone = jnp.zeros(index.num_free.size, jnp.int32)
    gone = gone.at[jnp.where(placed, group, gone.size)].add(1, mode="drop")
    changed = Index(
        tags=tags.reshape(index.tags.shape),
        slots=index.slots.reshape(-1).at[to_slot].set(row, **options),
        keys=index.keys.reshape(-1, 2).at[to_row].set(words, **options),
        used=index.used.reshape(-1).at[to_row].set(True, **options),
        free=index.free,
        num_free=index.num_free - gone.reshape(index.num_free.shape),
    )
    shaped = (a.reshape(b.shape) for a, b in zip(changed, index, strict=True))
    return Index(*shaped), jnp.where(placed, place_of, -1)


def remove(layout: Layout, index: Index, gone: Bool[Array, "parts rows"]) -> Index:
    """Removes the keys of rows; rows without a key do not change."""
    parts = len(index.used)
    gone &= index.used
    of_slot = jnp.take_along_axis(gone, index.slots, axis=1)
    of_slot = of_slot.reshape(parts, layout.buckets, _WORDS, 4)
    shift = jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape(1, 1, 1, 4)
    mask = jnp.where(of_slot, jnp.uint32(255) << shift, 0)
    cleared = jnp.sum(mask, axis=3, dtype=jnp.uint32)
    # The freed rows of a table are appended to its free rows, in ascending order.
    before = sums_so_far(gone) - gone
    table, first = layout.table_of_rows(), jnp.asarray(layout.firsts, jnp.int32)
    rank = before - before[:, first][:, table]
    at = (first[None] + index.num_free)[:, table] + rank
    part = jnp.arange(parts, dtype=jnp.int32)[:, None]
    row = jnp.arange(layout.rows, dtype=jnp.int32)[None]
    # A flat index is needed, see `mesh.xla_options.DETERMINISTIC`. Indices out of range are
    # unique, too.
    nowhere = MAX_ENTRIES - (part * layout.rows + row)
    at = jnp.where(gone, part * layout.rows + at, nowhere)
    free = (
        index.free.reshape(-1)
        .at[at]
        .set(jnp.broadcast_to(row, gone.shape), mode="drop", unique_indices=True)
    )
    return index._replace(
        tags=index.tags & ~cleared,
        used=index.used & ~gone,
        free=free.reshape(index.free.shape),
        num_free=index.num_free + layout.per_table(gone.astype(jnp.int32)),
    )


def _places(layout: Layout, keys: TableKeys) -> tuple[Any, Any, Any, Any]:
    """The part of each key, its two buckets in the part, and its tag (1 to 255).

    The arguments may also be values inside a GPU program.
    """
    one, two, below = spread(keys), hashed(keys, 2), np.uint32(0xFFFFFF)
    buckets = np.uint32(layout.buckets)
    first, second = lax.rem(one & below, buckets), lax.rem(two & below, buckets)
    next_one = lax.rem(first + np.uint32(1), buckets)
    second = jnp.where(second == first, next_one, second)
    tag = lax.rem(two >> np.uint32(24), np.uint32(255)) + np.uint32(1)
    return (one >> np.uint32(24)).astype(np.int32), first, second, tag


def _bytes(words: UInt32[Array, "*n words"]) -> UInt32[Array, "*n bytes"]:
    shift = jnp.arange(0, 32, 8, dtype=jnp.uint32)
    shift = shift.reshape(*(1 for _ in words.shape), 4)
    found = words[..., None] >> shift & 255
    return found.reshape(*words.shape[:-1], words.shape[-1] * 4)


def _differs(values: jax.Array) -> Bool[Array, "keys"]:
    """Whether each value differs from the one before it."""
    return jnp.concatenate(
        [jnp.ones(min(1, len(values)), bool), values[1:] != values[:-1]]
    )


def _rank(
    counts: Bool[Array, "keys"], group: UInt32[Array, "keys"]
) -> Int[Array, "keys"]:
    """Counts for each entry the earlier entries of its group that count. Entries of a group must
    be adjacent.
    """
    before = sums_so_far(counts) - counts
    return before - lax.cummax(jnp.where(_differs(group), before, 0))
