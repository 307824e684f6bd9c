"""Sums of gathered rows by XLA's operations without a scatter, for GPUs.

`by_pieces` is the fast form, `by_steps` the form for programs that are exported.

::

    entries of a row    |--------|--------|--------|--------|--------|----|
                          first    piece    piece    piece    piece   piece
    level 1                        p0       p1       p2       p3      p4
    level 2                        q0 = p0 + p1 + p2 + p3 + p4

    result = sum of the first entries + the one node of the row's highest level

The first entries of a row are added where the result is computed. The other entries are
cut into pieces of equal size. A node of level 1 is the sum of a piece, and a node of a
further level is the sum of several nodes of the level below. The last level of a row is the
one where it has a single node. So few programs add rows of any length, and each program
has a fixed number of terms for each of its rows. XLA fuses such a sum with its gathers: no
`[nse, hidden]` array is written. A scatter of gathered rows would have a collision for each
entry of a row, and would add in an order that differs from run to run.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sparsejax.ops.item_chunks import accumulator
from sparsejax.sparse import CSR, MAX_ENTRIES

# Number of entries in a piece: about as many as a row has on average. With smaller pieces more
# nodes are written, with larger pieces more positions are empty.
_SMALLEST, _LARGEST = 4, 32
# How many nodes of the level below are added to a node of level 2, of level 3, and of each further
# level. Level 2 may have up to half as many nodes as level 1, so its nodes add few.
_FAN_IN = 8, 32, 64
# How many entries of a row are added in a step of `by_steps`: as many as a row usually has. With
# few rows a step has more, so that one long row is one step; with very many rows it has fewer.
_STEP, _LEAST_STEP = 64, 8
_LEAST_TERMS, _MOST_TERMS = 2**10, 2**16
# Special values in place of a row id: there is no entry, or the entry's row does not exist.
_NOTHING, _OUTSIDE = -1, -2


class _Level(NamedTuple):
    """Nodes of one size.

    Attributes:
      over: a row has nodes of this level if it has more pieces than this.
      pieces: number of pieces that a node adds.
      fan_in: number of nodes of the level below that a node adds; for level 1, of entries.
      capacity: upper bound on the number of nodes of all rows together.
    """

    over: int
    pieces: int
    fan_in: int
    capacity: int


class _Entries(NamedTuple):
    """The rows of `w` to add for each row of a result.

    Attributes:
      ids: the row to read; `_NOTHING` if there is no entry.
      values: factors; None if they are all 1.
      broken: rows with an entry that does not exist, which are NaN.
    """

    ids: Int[Array, "rows terms"]
    values: Float[Array, "rows terms"] | None
    broken: Bool[Array, "rows"]

    def sum(self, w: Float[Array, "features hidden"]) -> Float[Array, "rows hidden"]:
        """The sums of the rows of `w`, in order."""
        total = jnp.zeros((), accumulator(w.dtype))
        # Unrolled, so that XLA makes one program, which loads several rows before it adds the
        # first.
        for term in range(self.ids.shape[1]):
            ids = lax.slice_in_dim(self.ids, term, term + 1, axis=1)
            rows = _rows(w, ids).astype(total.dtype)
            if self.values is not None:
                rows = rows * lax.slice_in_dim(self.values, term, term + 1, axis=1)
            # A selection, not a factor of 0: the row that padding reads may be NaN.
            total = total + jnp.where(ids >= 0, rows, 0)
        return jnp.where(self.broken[:, None], jnp.nan, total)


def by_pieces(
    x: CSR, w: Float[Array, "features hidden"], dtype: jnp.dtype | None = None
) -> Float[Array, "batch hidden"]:
    """`gather_matmul` with the combiner "sum", without a derivative.

    The terms of a piece are added in order, and so are the pieces. With pieces of `p`
    entries, memory is about `nse / p + nse / 2 p` rows of `hidden` numbers. `p` is the average
    length of a row, but at least 4 and at most 32. The dtype of the result is `dtype`, by
    default that of `w`.
    """
    num_rows, nse, dtype = x.num_rows, x.nse, dtype or w.dtype
    if 0 in (num_rows, nse, w.shape[0]):
        # There are no entries, or `w` has no rows. In the latter case rows with entries are NaN.
        y = jnp.where(x.row_lengths() > 0, jnp.nan, 0).astype(dtype)
        return jnp.broadcast_to(y[:, None], (num_rows, w.shape[1]))
    # Without this barrier and those below, XLA may compute integers again for each of the
    # `hidden` sums; in a row gradient they come from a cumulative sum.
    x = lax.optimization_barrier(dataclasses.replace(x, transposed=None))
    piece = _piece(nse, num_rows)
    levels = _levels(nse, piece)
    indptr = jnp.minimum(jnp.asarray(x.indptr), nse)
    starts, lengths = indptr[:-1], jnp.diff(indptr)
    first = _entries(x, w, starts, jnp.minimum(lengths, piece), piece)
    y = first.sum(w)
    if levels:
        y = y + _rest(x, w, starts, lengths, piece, levels)
    return jnp.where(x.overfull_rows()[:, None], jnp.nan, y).astype(dtype)


def by_steps(
    x: CSR, w: Float[Array, "features hidden"], dtype: jnp.dtype | None = None
) -> Float[Array, "batch hidden"]:
    """`by_pieces` as a small program, for any number of entries.

    The number of entries is a symbol in an exported program. `by_pieces` would then need
    levels for the largest possible number, and a GPU's compiler would take many seconds.
    This is a loop, mostly with one step: each step adds the next entries of all rows, and
    the steps are added in order.
    """
    num_rows, dtype = x.num_rows, dtype or w.dtype
    if 0 in (num_rows, x.nse, w.shape[0]):
        return by_pieces(x, w, dtype)
    x = dataclasses.replace(x, transposed=None)
    size = max(
        min(_STEP, _MOST_TERMS // num_rows), _LEAST_TERMS // num_rows, _LEAST_STEP
    )
    indptr = jnp.minimum(jnp.asarray(x.indptr, jnp.int32), x.nse)
    starts, lengths = indptr[:-1], jnp.diff(indptr)
    longest, sums = jnp.max(lengths), accumulator(w.dtype)

    def step(carry):
        done, total = carry
        counts = jnp.clip(lengths - done, 0, size)
        found = _entries(x, w, starts + done, counts, size)
        terms = w.at[found.ids].get(mode="clip").astype(sums)
        if found.values is not None:
            terms = terms * found.values[:, :, None]
        terms = jnp.where(found.ids[:, :, None] >= 0, terms, 0)
        more = jnp.where(found.broken[:, None], jnp.nan, jnp.sum(terms, axis=1))
        return done + size, total + more

    nothing = jnp.int32(0), jnp.zeros((num_rows, w.shape[1]), sums)
    _, y = lax.while_loop(lambda carry: carry[0] < longest, step, nothing)
    return jnp.where(x.overfull_rows()[:, None], jnp.nan, y).astype(dtype)


def _rest(x, w, starts, lengths, piece, levels):
    """The sum of each row's entries after its first piece."""
    num_rows = x.num_rows
    pieces = jnp.maximum(lengths - 1, 0) // piece
    counts = jnp.stack(
        [
            jnp.where(pieces > level.over, (pieces - 1) // level.pieces + 1, 0)
            for level in levels
        ]
    )
    ends = lax.optimization_barrier(_sums_so_far(counts))
    firsts = ends - counts
    offsets = [0, *itertools.accumulate(level.capacity for level in levels)]
    # The nodes of all levels are numbered together, so that one search finds their rows.
    bounds = [end + offset for end, offset in zip(ends, offsets, strict=False)]
    nodes = jnp.arange(offsets[-1], dtype=jnp.int32)
    found = lax.optimization_barrier(_passed(jnp.concatenate(bounds), nodes))
    total = below = jnp.zeros((), accumulator(w.dtype))
    for k, level in enumerate(levels):
        row = found[offsets[k] : offsets[k + 1]] - k * num_rows
        exists, row = row < num_rows, jnp.minimum(row, num_rows - 1)
        place = jnp.arange(level.capacity, dtype=jnp.int32) - firsts[k][row]
        before = place * level.fan_in
        if k == 0:
            before = before + piece
            start, count = starts[row], lengths[row]
        else:
            start, count = firsts[k - 1][row], counts[k - 1][row]
        count = jnp.where(exists, jnp.clip(count - before, 0, level.fan_in), 0)
        if k == 0:
            below = _entries(x, w, start + before, count, piece).sum(w)
        else:
            below = _sum_of_nodes(below, start + before, count, level.fan_in)
        below = lax.optimization_barrier(below)
        highest = (pieces > level.over) & (pieces <= level.pieces)
        node = _rows(below, firsts[k][:, None])
        total = total + jnp.where(highest[:, None], node, 0)
    return total


def _sums_so_far(counts: Int[Array, "levels rows"]) -> Int[Array, "levels rows"]:
    """`jnp.cumsum(counts, axis=1)`, also in programs that are exported.

    JAX 0.12 lowers a `cumsum` for CUDA to a custom call that exported StableHLO cannot
    contain.
    """
    rows = counts.shape[1]
    return lax.reduce_window(
        counts.astype(jnp.int32),
        jnp.int32(0),
        lax.add,
        window_dimensions=(1, rows),
        window_strides=(1, 1),
        padding=((0, 0), (rows - 1, 0)),
    )


def _piece(nse: int, num_rows: int) -> int:
    """Number of entries in a piece, a power of 2."""
    average = -(-nse // num_rows)
    return min(max(1 << (average - 1).bit_length(), _SMALLEST), _LARGEST)


def _levels(nse: int, piece: int) -> list[_Level]:
    """The levels that are needed to sum rows with `nse` entries in total."""
    pieces = (nse - 1) // piece
    levels, over, size, fan_in = [], 0, 1, piece
    fan_ins = itertools.chain(_FAN_IN, itertools.repeat(_FAN_IN[-1]))
    while pieces > over:
        # A row with n nodes here has at least `n (over + 1)` pieces.
        levels.append(_Level(over, size, fan_in, pieces // (over + 1)))
        fan_in = next(fan_ins)
        over, size = size, min(size * fan_in, MAX_ENTRIES)
    return levels


def _entries(x: CSR, w, starts, counts, size: int) -> _Entries:
    """The `counts` entries that begin at each of `starts`, at most `size` for each row."""
    place = jnp.arange(size, dtype=jnp.int32)[None]
    entry, used = starts[:, None] + place, place < counts[:, None]
    ids = jnp.asarray(x.indices).at[entry].get(mode="clip")
    outside = (ids < 0) | (ids >= x.num_cols)
    ids = jnp.where(used, jnp.where(outside, _OUTSIDE, ids), _NOTHING)
    values = None
    if x.data is not None:
        data = jnp.asarray(x.data, accumulator(w.dtype))
        values = data.at[entry].get(mode="clip")
    broken = jnp.any(used & outside, axis=1)
    return lax.optimization_barrier(_Entries(ids, values, broken))


def _sum_of_nodes(
    nodes: Float[Array, "_ hidden"],
    starts: Int[Array, "rows"],
    counts: Int[Array, "rows"],
    size: int,
) -> Float[Array, "rows hidden"]:
    """Sums `counts` nodes that begin at each of `starts`; each count is at most `size`."""
    place = jnp.arange(size, dtype=jnp.int32)[None]
    used = place < counts[:, None]
    # Unused terms all read one row, which stays in the cache.
    ids = jnp.where(used, starts[:, None] + place, 0)
    ids, used = lax.optimization_barrier((ids, used))
    terms = nodes.at[ids].get(mode="clip")
    return jnp.sum(jnp.where(used[:, :, None], terms, 0), axis=1)


def _rows(
    array: Float[Array, "_ hidden"], ids: Int[Array, "rows 1"]
) -> Float[Array, "rows hidden"]:
    """Reads the rows with these ids; an id out of range reads an arbitrary row."""
    return lax.gather(
        array,
        ids,
        lax.GatherDimensionNumbers(
            offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
        ),
        slice_sizes=(1, array.shape[1]),
        mode=lax.GatherScatterMode.CLIP,
    )


def _passed(
    ends: Int[Array, "segments"], positions: Int[Array, "size"]
) -> Int[Array, "size"]:
    """Counts for each position the `ends`, which ascend, that are at most this position.

    It is a binary search, unrolled so that XLA makes one program of it.
    """
    size = ends.shape[0]
    passed = jnp.zeros_like(positions)
    for bit in reversed(range(size.bit_length())):
        more = passed + (1 << bit)
        end = ends.at[more - 1].get(mode="clip")
        passed = jnp.where((more <= size) & (end <= positions), more, passed)
    return passed
