"""Which ids lose their rows, where a part has too few for new ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from sparsejax.embeddings.config import DynamicTableConfig
from sparsejax.embeddings.dynamic.state import EVICTED, State, counted
from sparsejax.ops import hash_index
from sparsejax.ops.hash_index import Layout

# This part of the rows loses its ids at once, so that it need not be done at each step.
_SHARE = 32
_DIGIT = 4  # bits that are looked at together
_DIGITS = 32 // _DIGIT


def evict(
    configs: Sequence[DynamicTableConfig],
    layout: Layout,
    state: State,
    needed: Int[Array, "parts tables"],
    kept: Bool[Array, "parts rows"],
    now: jax.Array,
) -> State:
    """Makes room in parts of tables that need more rows than are free.

    Rows whose time is over are freed, all of them; then those of the lowest (score, key),
    until a 32nd of the part's rows is free, or what is needed if that is more.

    Args:
      configs: of the tables.
      layout: of the index.
      state: of some parts.
      needed: how many new ids each part has of each table.
      kept: rows that stay.
      now: the clock.
    """
    index, count = state.index, state.count
    gone = jnp.zeros_like(index.used)
    parts = len(gone)
    for first, tables in _alike(configs):
        # The rows of a table in a part are what is looked at together.
        config, size = configs[first], layout.sizes[first]
        rows = slice(layout.firsts[first], layout.firsts[first] + tables * size)

        def of_tables(array, rows=rows, shape=(parts * tables, size)):
            return array[:, rows].reshape(*shape, *array.shape[2:])

        which = slice(first, first + tables)
        lacking = (needed[:, which] - index.num_free[:, which]).reshape(-1)
        can = of_tables(index.used) & ~of_tables(kept) & (lacking > 0)[:, None]
        last = of_tables(state.last)
        expired = jnp.zeros_like(can)
        if config.time_to_live is not None:
            # Not `now - last`, which may not fit.
            expired = can & (last < now - config.time_to_live)
        lowest = jnp.zeros_like(can)
        if config.evict is not None:
            score = last if config.evict == "lru" else of_tables(count)
            # As unsigned numbers in the same order.
            score = lax.bitcast_convert_type(score, jnp.uint32) ^ jnp.uint32(1 << 31)
            keys = of_tables(index.keys)
            words = jnp.stack([score, keys[..., 1], keys[..., 0]])
            wanted = jnp.maximum(lacking, -(-size // _SHARE))
            wanted -= jnp.sum(expired, axis=1, dtype=jnp.int32)
            lowest = _lowest(words, can & ~expired, jnp.maximum(wanted, 0))
        gone = gone.at[:, rows].set((expired | lowest).reshape(parts, -1))
        if config.evict == "lfu":
            mine = of_tables(count)
            halved = jnp.where((lacking > 0)[:, None], mine // 2, mine)
            count = count.at[:, rows].set(halved.reshape(parts, -1))
    freed = layout.per_table(gone.astype(jnp.int32))
    index = hash_index.remove(layout, index, gone)
    return counted(state._replace(index=index, count=count), EVICTED, freed)


def _alike(configs: Sequence[DynamicTableConfig]) -> list[tuple[int, int]]:
    """Neighbours of one size and policy: the first table, and how many there are."""
    kinds = [(c.num_rows, c.evict, c.time_to_live) for c in configs]
    found, first = [], 0
    for _, members in itertools.groupby(kinds):
        count = len(list(members))
        found.append((first, count))
        first += count
    return found


def _lowest(
    words: UInt32[Array, "words parts rows"],
    candidates: Bool[Array, "parts rows"],
    wanted: Int[Array, "parts"],
) -> Bool[Array, "parts rows"]:
    """The `wanted` candidates of each part with the lowest words, the first word counting most.

    By the digits of the words, from the highest one on: candidates below the digit of the
    last one wanted are taken, those that have it are looked at further, until none is wanted.
    """

    def goes_on(state):
        i, _, _, wanted = state
        return (i < len(words) * _DIGITS) & jnp.any(wanted > 0)

    def narrow(state):
        i, taken, tied, wanted = state
        word = lax.dynamic_index_in_dim(words, i // _DIGITS, keepdims=False)
        shift = (32 - _DIGIT - _DIGIT * (i % _DIGITS)).astype(jnp.uint32)
        digit = (word >> shift & (2**_DIGIT - 1)).astype(jnp.int32)
        values = jnp.arange(2**_DIGIT, dtype=jnp.int32)
        has = tied[..., None] & (digit[..., None] == values[None, None])
        upto = jnp.cumsum(jnp.sum(has, axis=1, dtype=jnp.int32), axis=1)
        last = jnp.sum(upto <= wanted[:, None], axis=1, dtype=jnp.int32)[:, None]
        below = jnp.pad(upto, ((0, 0), (1, 0)))
        below = jnp.take_along_axis(below, last, axis=1)[:, 0]
        taken |= tied & (digit < last)
        return i + 1, taken, tied & (digit == last), wanted - below

    # Where nothing is wanted, nothing is looked at.
    tied = candidates & (wanted > 0)[:, None]
    state = jnp.int32(0), jnp.zeros_like(candidates), tied, wanted
    return lax.while_loop(goes_on, narrow, state)[1]
