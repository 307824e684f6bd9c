"""Admission: which new ids get a row.

A count-min sketch stores how often each id without a row was seen: 4 counters of 8 bits for each
id, shared with other ids of its part. The estimate is the smallest of them. Only counters below
the new estimate are raised to it, so an estimate is never too small. It is too large if all 4
counters are shared with more frequent ids. With `m` ids and `w` counters in each of the 4 rows of
a part, the share of such ids is at most `(1 - exp(-m / w))^4`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt8

from sparsejax.embeddings.config import MOST_COUNTED, DynamicTableConfig
from sparsejax.ops import hash_index
from sparsejax.ops.hash_index import PARTS, Distinct, TableKeys

_DEPTH = 4
# Counters in each row of the sketch, for each row of the tables.
_WIDTH = 4
# Seeds of hash functions; the index uses other seeds.
_FIRST, _STEP, _DRAW, _AGAIN = 3, 4, 5, 6


def empty(configs: Sequence[DynamicTableConfig]) -> UInt8[Array, "parts depth width"]:
    """An empty sketch for tables that count ids."""
    rows = sum(c.num_rows for c in configs if c.admit and c.admit.count)
    # At least 1, because an empty array would be replicated.
    width = max(1, _WIDTH * rows // PARTS)
    return jnp.zeros((PARTS, _DEPTH, width), jnp.uint8)


def halved(sketch: UInt8[Array, "parts depth width"]) -> jax.Array:
    """Halves all counts, so that old observations count less."""
    return sketch // 2


def admit(
    configs: Sequence[DynamicTableConfig],
    sketch: UInt8[Array, "parts depth width"],
    of: Distinct,
    counts: Int[Array, "keys"],
    seed: jax.Array,
    now: jax.Array,
    first_part: int | jax.Array,
) -> tuple[UInt8[Array, "parts depth width"], Bool[Array, "keys"]]:
    """Counts ids in the sketch, and decides which of them get a row.

    Args:
      configs: configurations of the tables.
      sketch: counters of the parts on this device.
      of: ids without a row.
      counts: number of occurrences of each id.
      seed: two words of 32 bits.
      now: current time of the clock.
      first_part: number of the first part on this device.
    """
    admitted = jnp.ones(len(counts), bool)
    thresholds = [c.admit.count or 0 if c.admit else 0 for c in configs]
    if any(thresholds):
        threshold = jnp.asarray(thresholds, jnp.int32)[of.keys.table]
        counting = of.first & (threshold > 0)
        depth, width = sketch.shape[1:]
        one = hash_index.hashed(of.keys, _FIRST)[:, None]
        two = hash_index.hashed(of.keys, _STEP)[:, None] | np.uint32(1)
        row = jnp.arange(depth, dtype=jnp.int32)[None]
        column = (one + row.astype(jnp.uint32) * two) % np.uint32(width)
        column = column.astype(jnp.int32)
        part = jnp.where(counting, of.part - first_part, 0)
        # Indexed by three axes: int32 cannot number all counters of a large table.
        seen = jnp.min(sketch[part[:, None], row, column], axis=1).astype(jnp.int32)
        # Limits each count, so that their sum does not overflow.
        counts = jnp.minimum(counts, MOST_COUNTED)
        seen = jnp.minimum(seen + counts, MOST_COUNTED)
        part = jnp.where(counting, part, len(sketch))
        raised = jnp.broadcast_to(seen[:, None].astype(jnp.uint8), column.shape)
        sketch = sketch.at[part[:, None], row, column].max(raised, mode="drop")
        admitted &= (threshold == 0) | (seen >= threshold)
    shares = [(c.admit.probability or 1.0) if c.admit else 1.0 for c in configs]
    if any(share < 1 for share in shares):
        limits = [min(int(share * 2**32), 2**32 - 1) for share in shares]
        limit = jnp.asarray(np.array(limits, np.uint32))[of.keys.table]
        always = jnp.asarray([share >= 1 for share in shares])[of.keys.table]
        low = hash_index.hashed(of.keys, _DRAW) ^ seed[0]
        again = TableKeys(
            jnp.broadcast_to(now, low.shape), low, jnp.broadcast_to(seed[1], low.shape)
        )
        admitted &= always | (hash_index.hashed(again, _AGAIN) < limit)
    return sketch, admitted
