"""Which ids lose their rows, where a part has too few for new ones."""

from __future__ import annotations

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
    ranges = zip(configs, layout.firsts, layout.sizes, strict=True)
    for table, (config, first, size) in enumerate(ranges):
        rows = slice(first, first + size)
        lacking = needed[:, table] - index.num_free[:, table]
        can = index.used[:, rows] & ~kept[:, rows] & (lacking > 0)[:, None]
        last = state.last[:, rows]
        expired = jnp.zeros_like(can)
        if config.time_to_live is not None:
            # Not `now - last`, which may not fit.
            expired = can & (last < now - config.time_to_live)
        lowest = jnp.zeros_like(can)
        if config.evict is not None:
            score = last if config.evict == "lru" else count[:, rows]
            # As unsigned numbers in the same order.
            score = lax.bitcast_convert_type(score, jnp.uint32) ^ jnp.uint32(1 << 31)
            keys = index.keys[:, rows]
            words = jnp.stack([score, keys[..., 1], keys[..., 0]])
            wanted = jnp.maximum(lacking, -(-size // _SHARE))
            wanted -= jnp.sum(expired, axis=1, dtype=jnp.int32)
            lowest = _lowest(words, can & ~expired, jnp.maximum(wanted, 0))
        gone = gone.at[:, rows].set(expired | lowest)
        if config.evict == "lfu":
            mine = count[:, rows]
            halved = jnp.where((lacking > 0)[:, None], mine // 2, mine)
            count = count.at[:, rows].set(halved)
    freed = layout.per_table(gone.astype(jnp.int32))
    index = hash_index.remove(layout, index, gone)
    return counted(state._replace(index=index, count=count), EVICTED, freed)


def _lowest(
    words: UInt32[Array, "words parts rows"],
    candidates: Bool[Array, "parts rows"],
    wanted: Int[Array, "parts"],
) -> Bool[Array, "parts rows"]:
    """The `wanted` candidates of each part with the lowest words, the first word counting most.

    By the digits of the words, from the highest one on: candidates below the digit of the
    last one wanted are taken, those that have it are looked at further.
    """

    def narrow(i, state):
        taken, tied, wanted = state
        word = lax.dynamic_index_in_dim(words, i // _DIGITS, keepdims=False)
        shift = (32 - _DIGIT - _DIGIT * (i % _DIGITS)).astype(jnp.uint32)
        digit = (word >> shift & (2**_DIGIT - 1)).astype(jnp.int32)
        values = jnp.arange(2**_DIGIT, dtype=jnp.int32)
        has = tied[..., None] & (digit[..., None] == values[None, None])
        upto = jnp.cumsum(jnp.sum(has, axis=1, dtype=jnp.int32), axis=1)
        last = jnp.sum(upto <= wanted[:, None], axis=1, dtype=jnp.int32)[:, None]
        below = jnp.pad(upto, ((0, 0), (1, 0)))
        below = jnp.take_along_axis(below, last, axis=1)[:, 0]
        return taken | (tied & (digit < last)), tied & (digit == last), wanted - below

    state = jnp.zeros_like(candidates), candidates, wanted
    return lax.fori_loop(0, len(words) * _DIGITS, narrow, state)[0]
