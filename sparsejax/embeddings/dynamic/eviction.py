"""Eviction: which ids lose their rows when a part has too few free rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from sparsejax.embeddings.config import DynamicTableConfig
from sparsejax.embeddings.dynamic.state import EVICTED, State, counted
from sparsejax.embeddings.row_numbers import ordered, policy
from sparsejax.ops import hash_index
from sparsejax.ops.hash_index import Layout

# Fraction of the rows that is freed at once (one in 32), so that eviction is not needed in each
# step.
_SHARE = 32
_DIGIT = 4  # number of bits that are examined in one pass
_DIGITS = 32 // _DIGIT
_GROUP = 128  # number of rows whose counts fit into 8 bits


def evict(
    configs: Sequence[DynamicTableConfig],
    layout: Layout,
    state: State,
    needed: Int[Array, "parts tables"],
    kept: Bool[Array, "parts rows"],
    now: jax.Array,
) -> State:
    """Frees rows in those parts of tables that need more rows than are free.

    All rows whose `time_to_live` has passed are freed. Then rows with the lowest (score, key) are
    freed, until a 32nd of the part's rows is free, or the needed number, if that is more.

    Args:
      configs: configurations of the tables.
      layout: layout of the index.
      state: state of the parts on this device.
      needed: number of new ids in each part and table.
      kept: bool: rows that must not be freed.
      now: current time of the clock.
    """
    index, numbers = state.index, dict(state.numbers)
    # `at[:, rows].set` inside a branch on several GPUs crashes XLA's compiler (0.12).
    gone = jnp.zeros_like(index.used)
    parts = len(gone)
    for first, tables in _alike(configs):
        # Rows of one table in one part are compared with each other.
        config, size = configs[first], layout.sizes[first]
        rows = slice(layout.firsts[first], layout.firsts[first] + tables * size)

        def of_tables(array, rows=rows, shape=(parts * tables, size)):
            return array[:, rows].reshape(*shape, *array.shape[2:])

        which = slice(first, first + tables)
        lacking = (needed[:, which] - index.num_free[:, which]).reshape(-1)
        can = of_tables(index.used) & ~of_tables(kept) & (lacking > 0)[:, None]
        last = of_tables(state.numbers["last"])
        expired = jnp.zeros_like(can)
        if config.time_to_live is not None:
            # An age that overflows int32 fits into uint32.
            age = lax.bitcast_convert_type(now - last, jnp.uint32)
            most = np.uint32(min(config.time_to_live, 2**32 - 1))
            expired = can & (last < now) & (age > most)
        lowest = jnp.zeros_like(can)
        number = policy(config.evict)
        if number is not None:
            values = of_tables(numbers[number.name])
            score = ordered(number.score(values, now))
            keys = of_tables(index.keys)
            words = score, keys[..., 1], keys[..., 0]
            wanted = jnp.maximum(lacking, -(-size // _SHARE))
            wanted -= jnp.sum(expired, axis=1, dtype=jnp.int32)
            lowest = _lowest(words, can & ~expired, jnp.maximum(wanted, 0))
        mine = (expired | lowest).reshape(parts, -1)
        gone = lax.dynamic_update_slice_in_dim(gone, mine, rows.start, 1)
        if number is not None and number.fades:
            mine = of_tables(numbers[number.name])
            faded = jnp.where((lacking > 0)[:, None], number.faded(mine), mine)
            numbers[number.name] = lax.dynamic_update_slice_in_dim(
                numbers[number.name], faded.reshape(parts, -1), rows.start, 1
            )
    freed = layout.per_table(gone.astype(jnp.int32))
    index = hash_index.remove(layout, index, gone)
    return counted(state._replace(index=index, numbers=numbers), EVICTED, freed)


def _alike(configs: Sequence[DynamicTableConfig]) -> list[tuple[int, int]]:
    """Adjacent tables with equal size and policy: for each group its first table and its size."""
    kinds = [(c.num_rows, c.evict, c.time_to_live) for c in configs]
    found, first = [], 0
    for _, members in itertools.groupby(kinds):
        count = len(list(members))
        found.append((first, count))
        first += count
    return found


def _lowest(
    words: Sequence[UInt32[Array, "parts rows"]],
    candidates: Bool[Array, "parts rows"],
    wanted: Int[Array, "parts"],
) -> Bool[Array, "parts rows"]:
    """For each part, the `wanted` candidates with the lowest words; the first word is most
    significant.

    For each word a limit is found. Candidates below it are taken; those equal to it are compared
    by the next word, unless all of them are wanted. No two candidates have equal words.
    """
    wanted = jnp.minimum(wanted, jnp.sum(candidates, axis=1, dtype=jnp.int32))
    left, tied, limits = wanted, candidates, []
    for word in words:
        limit, shift, left = _limit(word, tied, left)
        digits = word >> shift
        limits.append((digits, limit[:, None], (left == 0)[:, None]))
        tied &= (digits == limit[:, None]) & (left > 0)[:, None]
    taken = jnp.zeros_like(candidates)
    for digits, limit, all_at_it in reversed(limits):
        taken = (digits < limit) | (digits == limit) & (all_at_it | taken)
    # If `wanted` is 0, the limit is the highest value, so all are masked here.
    return taken & candidates & (wanted > 0)[:, None]


def _limit(
    word: UInt32[Array, "parts rows"],
    tied: Bool[Array, "parts rows"],
    left: Int[Array, "parts"],
) -> tuple[UInt32[Array, "parts"], UInt32[Array, ""], Int[Array, "parts"]]:
    """The leading digits of the largest wanted word in each part, where `left` of the `tied` are
    wanted.

    Digits are found from the highest on, until in each part they decide which words are wanted.
    Each iteration reads the word and `tied` once.

    Returns:
      The digits; the number of bits below them that were not examined; and how many of the words
      with exactly these digits are still wanted: none if all of them are.
    """

    def goes_on(state):
        i, _, left = state
        return (i < _DIGITS) & jnp.any(left > 0)

    def narrow(state):
        i, limit, left = state
        digits = word >> (32 - _DIGIT - _DIGIT * i).astype(jnp.uint32)
        here = tied & (digits >> _DIGIT == limit[:, None])
        upto = jnp.cumsum(_counts(here, digits & (2**_DIGIT - 1)), axis=1)
        last = jnp.sum(upto < left[:, None], axis=1, dtype=jnp.int32)
        ends = jnp.pad(upto, ((0, 0), (1, 0)))
        below, at = (
            jnp.take_along_axis(ends, place[:, None], axis=1)[:, 0]
            for place in (last, last + 1)
        )
        # In a finished part, all words that begin with its digits are wanted.
        last = jnp.where(left > 0, last, 2**_DIGIT - 1).astype(jnp.uint32)
        left = jnp.where(at == left, 0, jnp.where(left > 0, left - below, 0))
        return i + 1, limit << _DIGIT | last, left

    more = (0, 0), (0, -word.shape[1] % _GROUP)
    # padded once, not in each iteration
    word, tied = jnp.pad(word, more), jnp.pad(tied, more)
    state = jnp.int32(0), jnp.zeros(len(word), jnp.uint32), left
    i, limit, left = lax.while_loop(goes_on, narrow, state)
    return limit, (32 - _DIGIT * i).astype(jnp.uint32), left


def _counts(
    counts: Bool[Array, "parts rows"], digit: UInt32[Array, "parts rows"]
) -> Int[Array, "parts digits"]:
    """Counts how often each digit occurs where `counts` is true. `rows` is a multiple of `_GROUP`.

    Four 8-bit counters are summed in one word, so that a GPU reads the rows once and makes four
    sums. Sixteen separate sums took five times as long.
    """
    digit = digit.reshape(len(digit), -1, _GROUP)
    one = jnp.where(counts.reshape(digit.shape), jnp.uint32(1) << 8 * (digit & 3), 0)
    found = []
    for first in range(0, 2**_DIGIT, 4):
        mine = jnp.where(digit >> 2 == first // 4, one, 0)
        words = jnp.sum(mine, axis=2, dtype=jnp.uint32)
        for i in range(4):
            counter = (words >> 8 * i & 255).astype(jnp.int32)
            found.append(jnp.sum(counter, axis=1, dtype=jnp.int32))
    return jnp.stack(found, axis=1)
