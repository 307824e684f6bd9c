"""A search for the rows of 64-bit keys in an index of buckets: a Mosaic GPU program.

A thread searches for one key. It reads the tags of the key's two buckets, then the row and the
key of each slot whose tag equals the key's: usually four reads of 32 bytes. The tags
are read at once; each further read waits for the one before. So the program needs
many threads, and few registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int, UInt32

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import rem
from pallas_kernels.row_sums import compiler_params
from pallas_kernels.teams import Team, on_teams

SLOTS = 16  # number of slots in a bucket
_WORDS = SLOTS // 4
# Function from a key's table, high and low word to its part, its two buckets, and its tag.
Places = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any]]


def find(
    places: Places,
    tags: UInt32[Array, "parts buckets 4"],
    slots: Int[Array, "parts slots"],
    keys: UInt32[Array, "parts rows 2"],
    ranges: Int[Array, "tables 2"],
    table: Int[Array, "keys"],
    high: UInt32[Array, "keys"],
    low: UInt32[Array, "keys"],
    first_part: Int[Array, ""],
) -> Int[Array, "keys"]:
    """Finds the row of each key, counted over all parts in order; -1 for a key that is not found.

    Args:
      places: function that returns for a key its part, its two buckets in that part, which must
        differ if there are two, and its tag, 1 to 255.
      tags: 4 tags in a word, the first in the lowest bits; 0 is a slot without a row.
      slots: the row of each slot.
      keys: low and high word of each row's key.
      ranges: first row of each table in every part, and the end of its rows.
      table: the table of each key; -1 for a key that is not searched for.
      high: the upper 32 bits of each key.
      low: the lower 32 bits of each key.
      first_part: number of the first part.
    """
    if len(table) == 0:
        return jnp.zeros(0, jnp.int32)

    def found(team, *operands):
        return _found(team, places, keys.shape[:2], *operands)

    return on_teams(
        found,
        Team(1, _WORDS, _WORDS),
        tags.reshape(-1, _WORDS),
        slots.reshape(-1),
        keys.reshape(-1, 2),
        ranges,
        table,
        high,
        low,
        jnp.reshape(first_part, 1),
    )


def _found(team, places, shape, tags, slots, keys, ranges, table, high, low, first):
    parts, rows = shape
    buckets, count = len(tags) // parts, len(table)
    pair = Team(1, 2, 2, alone=team.alone)

    def hash_index_find(
        tags_gmem,
        slots_gmem,
        keys_gmem,
        ranges_gmem,
        table_gmem,
        high_gmem,
        low_gmem,
        first_gmem,
        found_gmem,
    ):
        i = team.number()

        def look(number, words, part, tag, one, two):
            begin, end = ranges_gmem[number, 0], ranges_gmem[number, 1]
            both = [part * buckets + bucket for bucket in (one, two)]
            loaded = [team.load(tags_gmem.at[bucket]) for bucket in both]
            # Bit 8 b + w is set if the tag in byte b of word w is equal, for both buckets.
            left = jnp.uint32(0)
            for bucket, four in enumerate(loaded):
                for w, word in enumerate(team.elements(four)):
                    same = _zero_bytes(word ^ tag * jnp.uint32(0x01010101))
                    left = left | same >> jnp.uint32(7 - bucket * _WORDS - w)

            def compare(state):
                left, found = state
                bit = jnp.int32(31) - lax.clz(left).astype(jnp.int32)
                w, byte = bit & 7, bit >> 3
                bucket = jnp.where(w < _WORDS, both[0], both[1])
                row = slots_gmem[bucket * SLOTS + rem(w, _WORDS) * 4 + byte]
                place = part * rows + row
                its_low, its_high = pair.elements(pair.load(keys_gmem.at[place]))
                same = (its_high == words[0]) & (its_low == words[1])
                same = same & (row >= begin) & (row < end)
                left = left ^ (jnp.uint32(1) << bit.astype(jnp.uint32))
                # Either the last compared key is equal, or no key is.
                left = jnp.where(same, jnp.uint32(0), left)
                return left, jnp.where(same, place, found)

            state = left, jnp.int32(0) - 1
            return lax.while_loop(lambda s: s[0] != jnp.uint32(0), compare, state)[1]

        @pl.when(i < count)
        def _():
            number, words = table_gmem[i], (high_gmem[i], low_gmem[i])
            part, one, two, tag = places(number, *words)
            part = part - first_gmem[0]
            mine = (number >= 0) & (part >= 0) & (part < parts)
            found_gmem[i] = lax.cond(
                mine,
                lambda: look(number, words, part, tag, one, two),
                lambda: jnp.int32(0) - 1,
            )

    return plgpu.kernel(
        hash_index_find,
        out_type=jax.ShapeDtypeStruct((count,), jnp.int32),
        grid=(pl.cdiv(count, team.count),),
        grid_names=("program",),
        compiler_params=compiler_params(),
    )(tags, slots, keys, ranges, table, high, low, first)


def _zero_bytes(word: jax.Array) -> jax.Array:
    """Sets the highest bit of each byte that is zero."""
    most = jnp.uint32(0x7F7F7F7F)
    return ~((word & most) + most | word | most)
