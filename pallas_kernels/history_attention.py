"""Causal attention within histories, forward and backward: Mosaic GPU, Hopper.

The formula is that of `sparsejax.ops.history_attention`. Histories are concatenated,
so that a tile of 128 entries may have many of them, or a part of one. Each entry has a range
of others: a query those keys from the first of its history up to itself, a
key those queries from itself to the last of its history. All programs have one structure:

        program  64 entries a warpgroup        reads tiles of    computes
        norms    queries                       keys              the logarithms of softmax's sums
        forward  queries                       keys              y
        queries  queries, slopes of y          keys              dq, the biases' gradients
        keys     keys                          queries, slopes   dk, dv

Each program computes the scores again, and nothing of their size is written. No
program adds to another program's results. Softmax has a program for its sums, which
takes one more product; the other programs then need no maximum of scores, and work for both
activations.

The bias by distance is constant along diagonals, so that a tile needs 127 numbers of a
table. The bias by time is looked up in a table by the difference of the times. Its gradient
needs the buckets between the tile's smallest and largest difference: each thread adds slopes
to a sum of its own for each of these, and two threads then add up the sums of a bucket. If there
are few buckets, the tile is read once for each of them.
The biases are common to all heads: two heads of a tile are computed together, as far as
registers suffice, and the slopes of both are added before the gradients of the biases are
computed from them.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as plgpu
from pallas_kernels.integers import div, rem
from pallas_kernels.matmul_tiles import ROWS, call, num_programs, store, transforms
from pallas_kernels.score_tiles import row_vector, spread_columns, spread_rows

TILE = 128  # number of entries in a program's tile
DIM = 64  # number of elements in a head's vector
_WARPGROUPS = TILE // ROWS
_WARPS = 4  # number of warps in a warpgroup
# Number of the low bits of a float32 that do not affect its quarter of an octave.
_CELL_BITS = 21
_FIRST_CELL = 127 << 2  # the number of the quarter of an octave that starts at 1.0
# Elements from one row to the next in memory whose diagonals are summed: 64 zeros, 64 numbers, and
# 8 more, so that a warp that writes 8 rows uses all banks of memory equally.
_PITCH = TILE + 8
# Number of sums that each thread has for buckets, in the memory of these rows.
_SLOTS = 64
_FEW = 4  # with at most this many buckets, a tile is read once for each bucket
_RATIO = 0.301  # the constant `TIME_RATIO` of `sparsejax.ops.history_attention`
_LOG2E = math.log2(math.e)
_FEW_TILES = 2048  # up to this many tiles are ordered by counting, without a sort
# Lower than any score, but finite, so that a difference of two such numbers is finite.
_LEAST = -3e38


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
      columns: entries in the tiles that a program reads, 64 or 128.
      stages: number of tiles that are copied in advance.
      interpretable: whether to avoid operations that JAX's interpreter lacks: products
        of operands in registers, and references to shared memory with another shape.
    """

    columns: int = 64
    stages: int = 4
    interpretable: bool = False


class Spans:
    """The entries that count for each entry, and the ranges of tiles that follow.

    Args:
      starts: `[tokens]`: the first entry of each entry's history; `tokens` or more if it has
        none; -1 minus the first entry if the history is invalid, and is ignored.
      ends: `[tokens]`: the entry after the last of each entry's history. Entries
        without a history come last; they have the number of entries before them.
      times: float32, ascending within a history, or None.
    """

    def __init__(
        self,
        starts: Int[Array, "tokens"],
        ends: Int[Array, "tokens"],
        times: Float[Array, "tokens"] | None,
    ):
        tokens = len(starts)
        place = jnp.arange(tokens, dtype=jnp.int32)
        self.starts, self.ends, self.times = starts, ends, times
        self.inside = (starts >= 0) & (starts < tokens)
        self.used = jnp.minimum(ends[-1], tokens)
        far = jnp.int32(2 * tokens + TILE)
        first = jnp.where(self.inside, starts, far)
        # For each row, the range of its columns: (low, high).
        self.of_queries = first, jnp.where(self.inside, place, -far)
        last = jnp.where(self.inside, ends - 1, -far)
        self.of_keys = jnp.where(self.inside, place, far), last

    def orders(self, columns: int) -> Int[Array, "2 tiles"]:
        """Orders row tiles, those with most work first: row 0 has tiles of queries, row 1 of keys.

        The work of a tile is the number of tiles of `columns` entries that it is multiplied with.
        """
        tiles = len(self.starts) // TILE
        tile = jnp.arange(tiles, dtype=jnp.int32)
        rows = [tile * TILE + w * ROWS for w in range(_WARPGROUPS)]
        steps = []
        for of_queries in (True, False):
            of_rows = self.starts if of_queries else self.ends
            known = [
                of_rows[self.number_at(row, self.used, of_queries, len(of_rows))]
                for row in rows
            ]
            ranges = ranges_of(rows, known, self.used, of_queries, columns)
            start, stop = joined(ranges)
            steps.append(stop - start)
        steps = jnp.stack(steps)
        if tiles > _FEW_TILES:
            return jnp.argsort(-steps, axis=1).astype(jnp.int32)
        # Ranks are counted, which is faster than a sort. All keys differ.
        key = steps * tiles - tile[None]
        before = key[:, None] > key[:, :, None]
        rank = jnp.sum(before, axis=2, dtype=jnp.int32)
        mine = rank[:, None] == tile[None, :, None]
        return jnp.sum(jnp.where(mine, tile[None, None], 0), axis=2, dtype=jnp.int32)

    @staticmethod
    def number_at(row, used, of_queries: bool, tokens: int):
        """The entry whose history bounds the columns for the 64 rows from `row` on."""
        if of_queries:
            return row
        return jnp.clip(jnp.minimum(row + ROWS, used) - 1, 0, tokens - 1)

    def apart(self, of_queries: bool):
        """The largest and the smallest time difference within a history, for each 64 rows."""
        assert self.times is not None
        times, tokens = self.times, len(self.times)
        place = jnp.arange(tokens)
        raw = jnp.where(self.inside, self.starts, place)
        if of_queries:
            apart = times - times[raw]
        else:
            apart = times[jnp.clip(self.ends - 1, 0, tokens - 1)] - times
        apart = jnp.where(self.inside, apart, 0).reshape(-1, ROWS)
        # Time difference to the previous entry (for queries) or the next one (for keys).
        gap = jnp.where(
            self.inside & (place > raw), times - jnp.roll(times, 1), jnp.inf
        )
        gap = gap if of_queries else jnp.append(gap[1:], jnp.inf)
        return jnp.max(apart, axis=1), jnp.min(gap.reshape(-1, ROWS), axis=1)


def ranges_of(rows, known, used, of_queries: bool, columns: int):
    """For each warpgroup of a tile, the first tile of its columns, and the end of these tiles.

    Args:
      rows: the first row of each warpgroup.
      known: for queries the starts of histories, for keys the ends, as
        `Spans.number_at` finds them.
      used: number of entries that are not padding.
      of_queries: whether rows are queries.
      columns: number of columns of a tile.
    """
    found = []
    for row, its in zip(rows, known, strict=True):
        if of_queries:
            first = jnp.minimum(jnp.where(its < 0, -1 - its, its), row)
            last = jnp.minimum(row + ROWS, used) - 1
        else:
            first, last = row, jnp.maximum(jnp.minimum(its, used) - 1, row)
        start, stop = div(first, columns), div(last, columns) + 1
        # An empty warpgroup gets an empty range at an end of the other warpgroup's range.
        empty = row >= used
        start = jnp.where(empty, found[0][0] if found else 0, start)
        found.append((start, jnp.where(empty, start, stop)))
    return found


def joined(ranges):
    """The first tile of columns of all warpgroups, and the end of these tiles."""
    starts, stops = zip(*ranges, strict=True)
    return functools.reduce(jnp.minimum, starts), functools.reduce(jnp.maximum, stops)


def unsupported(q: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """The reason why the programs do not support these operands; None if they do."""
    if q.dtype != jnp.bfloat16:
        return f"takes bfloat16 operands, not {q.dtype}"
    if q.shape[2] != DIM:
        return f"takes heads of {DIM} numbers, not {q.shape[2]}"
    if q.shape[0] % TILE or not q.shape[0]:
        return f"takes a multiple of {TILE} tokens, not {q.shape[0]:,}"
    return None


# A separate jit: the blocks of a model have equal programs, which are then traced, lowered and (as
# they have one name) compiled once. JAX 0.11 would number the names, and compile each.
@functools.partial(
    jax.jit, static_argnames=("thresholds", "activation", "scale", "divisor", "config")
)
def attend(
    q: Float[Array, "tokens heads dim"],
    k: Float[Array, "tokens heads dim"],
    v: Float[Array, "tokens heads dim"],
    starts: Int[Array, "tokens"],
    ends: Int[Array, "tokens"],
    place_bias: Float[Array, "places"] | None,
    times: Float[Array, "tokens"] | None,
    time_bias: Float[Array, "buckets"] | None,
    thresholds: tuple[float, ...] | None,
    *,
    activation: str,
    scale: float,
    divisor: float,
    config: Config | None = None,
) -> tuple[Float[Array, "tokens heads dim"], Float[Array, "heads tokens"] | None]:
    """Computes `y`, and for softmax the base-2 logarithms of its sums, which `slopes` needs.

    Rows without entries are 0, and NaN if `starts` is negative.

    Args:
      q: `[tokens, heads, dim]` queries, with a shape that `unsupported` allows, as for
        `k`, `v`.
      starts: `[tokens]`: the first entry that counts for each entry, as in `Spans`.
      ends: `[tokens]`: the entry after the last of each entry's history, as in `Spans`.
      place_bias: float32, or None.
      times: float32, or None.
      time_bias: float32, or None.
      thresholds: bounds of the buckets, float32 numbers.
      activation: "silu" or "softmax".
      scale: factor of the products `q . k`.
      divisor: number by which the results are divided.
      config: how the work is divided.
    """
    # With biases, which are looked up for each tile, six stages are slower.
    biased = place_bias is not None or time_bias is not None
    config = config or Config(stages=4 if biased else 6)
    step = _Scores(place_bias, times, time_bias, thresholds, scale, config.columns)
    spans = Spans(starts, ends, times)
    softmax = activation == "softmax"
    norms = _norms(q, k, step, spans, config) if softmax else None

    def work(scores, rows_smem, columns, sums, bias, carry):
        (q_smem,), (k_smem, v_smem) = rows_smem, columns
        (y,) = sums

        def products(raw):
            plgpu.wgmma(raw, q_smem, k_smem.transpose((1, 0)))
            return scores.bias(bias), *_arrived(raw)

        bias, raw = pl.run_scoped(products, plgpu.ACC((ROWS, config.columns)))
        scores.arrived()
        if softmax:
            weights = scores.softmax(raw, bias)
        else:
            half = scores.half(raw, bias)
            weights = half + half * jnp.tanh(half)
        scores.multiply(y, scores.masked(weights).astype(q.dtype), v_smem)
        return carry, bias, None

    def finish(sums, carry, row, spoilt, outputs, head):
        (y,) = sums
        (out,) = outputs
        out(0, y * (1 / divisor) + spread_rows(spoilt, q.shape[2]))

    (y,) = _run(
        "history_attention",
        step,
        spans,
        work,
        finish,
        rows=[q],
        columns=[k, v],
        sums=1,
        of_queries=True,
        by_head=[norms] if norms is not None else [],
        may_be_wrong=True,
        config=config,
        together=2,
    )
    return y, norms


def _norms(q, k, step: _Scores, spans: Spans, config: Config):
    """The base-2 logarithms of the sums of softmax, `[heads, tokens]`; 0 for an empty sum."""

    def start():
        layout = plgpu.Layout.WGMMA.reduce(1)
        least, zero = (jnp.full(ROWS, x, jnp.float32) for x in (_LEAST, 0.0))
        return tuple(plgpu.layout_cast(x, layout) for x in (least, zero))

    def work(scores, rows_smem, columns, sums, bias, carry):
        (q_smem,), (k_smem,) = rows_smem, columns
        largest, total = carry

        def products(raw):
            plgpu.wgmma(raw, q_smem, k_smem.transpose((1, 0)))
            return scores.bias(bias), *_arrived(raw)

        bias, raw = pl.run_scoped(products, plgpu.ACC((ROWS, config.columns)))
        scores.arrived()
        mine = scores.masked(_LOG2E * scores.whole(raw, bias), -jnp.inf)
        top = jnp.maximum(largest, jnp.max(mine, axis=1))
        weights = jnp.exp2(mine - spread_rows(top, config.columns))
        total = total * jnp.exp2(largest - top) + jnp.sum(weights, axis=1)
        return (top, total), bias, None

    def finish(sums, carry, row, spoilt, outputs, head):
        (norms_gmem,) = outputs
        largest, total = carry
        norm = largest + _LOG2E * jnp.log(total)
        norms_gmem[head, pl.ds(row, ROWS)] = jnp.where(total == 0, 0.0, norm)

    (norms,) = _run(
        "history_attention_norms",
        step,
        spans,
        work,
        finish,
        rows=[q],
        columns=[k],
        sums=0,
        of_queries=True,
        by_head=[],
        config=config,
        start=start,
    )
    return norms


@functools.partial(
    jax.jit, static_argnames=("thresholds", "scale", "divisor", "of_queries", "of_keys")
)
def slopes(
    q: Float[Array, "tokens heads dim"],
    k: Float[Array, "tokens heads dim"],
    v: Float[Array, "tokens heads dim"],
    dy: Float[Array, "tokens heads dim"],
    starts: Int[Array, "tokens"],
    ends: Int[Array, "tokens"],
    place_bias: Float[Array, "places"] | None,
    times: Float[Array, "tokens"] | None,
    time_bias: Float[Array, "buckets"] | None,
    thresholds: tuple[float, ...] | None,
    *,
    y: Float[Array, "tokens heads dim"] | None = None,
    norms: Float[Array, "heads tokens"] | None = None,
    scale: float,
    divisor: float,
    of_queries: Config | None = None,
    of_keys: Config | None = None,
):
    """dq, dk, dv, and the gradients of the biases: by distance `[distances]`, by bucket.

    If `y` and `norms`, which `attend` returned, are given, the gradients are those of
    softmax. The other arguments are those of `attend`.
    """
    biased = place_bias is not None or time_bias is not None
    # With sums for biases, shared memory is too small for more stages.
    of_queries = of_queries or Config(stages=2 if biased else 4)
    of_keys = of_keys or Config()
    spans = Spans(starts, ends, times)
    arguments = place_bias, times, time_bias, thresholds, scale
    inverse = 1 / divisor
    by_head = []
    if norms is not None:
        assert y is not None
        # The sum of y dy is subtracted from all slopes of a query. Padding may have any values.
        of_y = jnp.where(spans.inside[:, None, None], y.astype(jnp.float32), 0)
        products = jnp.where(of_y == 0, 0, dy * of_y)
        by_head = [norms, divisor * jnp.sum(products, axis=2).T]

    # The factor is applied to sums of slopes, not to each slope.
    factor = inverse if by_head else 0.5 * inverse

    def pull(scores, raw, bias, pulled):
        """The gradients of scores, without `factor`; and the weights."""
        if by_head:
            weights = scores.softmax(raw, bias)
            return weights * (pulled - scores.vector(1)), weights
        half = scores.half(raw, bias)
        t = jnp.tanh(half)
        more = t + half * (1.0 - t * t)
        return pulled + pulled * more, half + half * t

    def work_on_queries(scores, rows_smem, columns, sums, bias, carry):
        (q_smem, dy_smem), (k_smem, v_smem) = rows_smem, columns
        (dq,) = sums
        size = plgpu.ACC((ROWS, of_queries.columns))

        def products(raw, pulled):
            plgpu.wgmma(raw, q_smem, k_smem.transpose((1, 0)))
            plgpu.wgmma(pulled, dy_smem, v_smem.transpose((1, 0)))
            return scores.bias(bias), *_arrived(raw, pulled)

        bias, raw, pulled = pl.run_scoped(products, size, size)
        scores.arrived()
        ds = scores.masked(pull(scores, raw, bias, pulled)[0])
        scores.multiply(dq, ds.astype(q.dtype), k_smem)
        return carry, bias, ds

    def finish_queries(sums, carry, row, spoilt, outputs, head):
        (dq,) = sums
        (out,) = outputs
        out(0, (scale * factor) * dq)

    dq, *of_biases = _run(
        "history_attention_queries",
        _Scores(*arguments, of_queries.columns),
        spans,
        work_on_queries,
        finish_queries,
        rows=[q, dy],
        columns=[k, v],
        sums=1,
        of_queries=True,
        by_head=by_head,
        config=of_queries,
        with_biases=biased,
        together=2,
    )

    def work_on_keys(scores, rows_smem, columns, sums, bias, carry):
        (k_smem, v_smem), (q_smem, dy_smem) = rows_smem, columns
        dk, dv = sums
        size = plgpu.ACC((ROWS, of_keys.columns))

        def products(raw, pulled):
            plgpu.wgmma(raw, k_smem, q_smem.transpose((1, 0)))
            plgpu.wgmma(pulled, v_smem, dy_smem.transpose((1, 0)))
            return scores.bias(bias), *_arrived(raw, pulled)

        bias, raw, pulled = pl.run_scoped(products, size, size)
        scores.arrived()
        ds, weights = map(scores.masked, pull(scores, raw, bias, pulled))
        scores.multiply(dv, weights.astype(q.dtype), dy_smem)
        scores.multiply(dk, ds.astype(q.dtype), q_smem, 1)
        return carry, bias, None

    def finish_keys(sums, carry, row, spoilt, outputs, head):
        dk, dv = sums
        (out,) = outputs
        out(0, (scale * factor) * dk)
        out(1, inverse * dv)

    dk, dv = _run(
        "history_attention_keys",
        _Scores(*arguments, of_keys.columns, of_queries=False),
        spans,
        work_on_keys,
        finish_keys,
        rows=[k, v],
        columns=[q, dy],
        sums=2,
        of_queries=False,
        by_head=by_head,
        config=of_keys,
    )
    dplace = dtime = None
    if place_bias is not None:
        # Element e of tile n has the distance 64 n + 63 - e.
        tiles = factor * jnp.sum(of_biases.pop(0), axis=(0, 1))
        later, earlier = tiles[:, :ROWS][:, ::-1], tiles[:, ROWS:][:, ::-1]
        dplace = later.reshape(-1)
        # Distances up to 64 n - 1 belong to the previous tile.
        dplace = dplace.at[:-ROWS].add(earlier[1:].reshape(-1))
    if time_bias is not None:
        sums = jnp.sum(of_biases.pop(0), axis=(0, 1)).reshape(-1, _WARPS)
        dtime = factor * jnp.sum(sums, axis=1)[: len(time_bias)]
    return dq, dk, dv, dplace, dtime


def _arrived(*sums):
    """Returns the sums of a product after it has ended.

    Without the barrier, LLVM may use a register before the instruction that waits for the product.
    It does so if the other operand of an addition was loaded earlier.
    """
    return lax.optimization_barrier([x[...] for x in sums])


class _Scores:
    """Computes and masks the scores of a warpgroup's 64 rows and a tile's columns, for all
    programs.

    The method `at` selects the position; it is called for each step.
    """

    def __init__(
        self,
        place_bias,
        times,
        time_bias,
        thresholds,
        scale,
        columns,
        *,
        of_queries=True,
    ):
        self.scale, self.columns, self.of_queries = scale, columns, of_queries
        self.scratch: Any = None
        self.table: Any = None
        self.time_bias: Any = None
        self.thresholds: Any = None
        self.cells: Any = None
        self.cells_smem: Any = None
        self.buckets = 0 if time_bias is None else len(time_bias)
        # A sum for each warp, and the memory that `add_sums_of_slots` may write to,
        # rounded up.
        sums = (self.buckets + _SLOTS) * _WARPS
        self.sums_of_buckets = -(-sums // TILE) * TILE
        self.arrays, self.names, self.tiles = [], [], 0
        if place_bias is not None:
            self.tiles = -(-len(place_bias) // ROWS) + 2
            table = _table_of_places(place_bias, self.tiles, of_queries)
            self.arrays.append(table)
            self.names.append("table")
        if time_bias is not None:
            cells, self.count_of_cells = _cells(time_bias, thresholds)
            thresholds = jnp.asarray(thresholds, jnp.float32)
            self.arrays += [time_bias, thresholds, cells]
            self.names += ["time_bias", "thresholds", "cells"]

    def bind(self, refs):
        """Stores the references to `arrays`, and returns the other references."""
        mine = dict(zip(self.names, refs[: len(self.names)], strict=True))
        self.table = mine.get("table")
        self.time_bias, self.thresholds = mine.get("time_bias"), mine.get("thresholds")
        self.cells = mine.get("cells")
        return refs[len(self.names) :]

    def at(self, row, column, of_rows) -> None:
        self.row, self.column = row, column
        self.low, self.high, self.all_low, self.all_high, *of_times = of_rows
        self.longest, self.gap, self.own, self.times_of_rows = of_times
        last = column + self.columns - 1
        self.full = (column >= self.all_low) & (last <= self.all_high)

    def of_head(self, head, by_head, of_heads, times, arrived) -> None:
        """Selects the head.

        `times` are those of the columns, or None. `arrived` is called when all products that
        were started before have ended.
        """
        self.head, self.by_head, self.of_heads = head, by_head, of_heads
        self.times, self.arrived = times, arrived

    def multiply(self, sums, weights, columns_smem, n=0) -> None:
        """Starts the n-th product of a tile."""
        if self.scratch is not None:
            own = self.scratch.at[lax.axis_index("warpgroup"), n]
            own[...] = weights
            plgpu.commit_smem()
            weights = own
        plgpu.wgmma(sums, weights, columns_smem)

    def vector(self, n):
        """The n-th number of each query, as an array `[64, columns]`."""
        if self.of_queries:
            return spread_rows(self.of_heads[n], self.columns)
        return spread_columns(self.by_head[n].at[self.head], self.column, self.columns)

    def softmax(self, raw, bias):
        """The softmax weights; arbitrary where a column does not count."""
        return jnp.exp2(_LOG2E * self.whole(raw, bias) - self.vector(0))

    def whole(self, raw, bias):
        """The scores, including the bias."""
        whole = raw * self.scale
        return whole if bias is None else whole + bias

    def half(self, raw, bias):
        """Half of the scores, including the bias."""
        half = raw * (0.5 * self.scale)
        return half if bias is None else half + 0.5 * bias

    def masked(self, values, rest=0.0):
        """Replaces `values` by `rest` if a column does not count for a row."""

        def mask(values):
            shape, layout = (ROWS, self.columns), plgpu.Layout.WGMMA
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
            low = spread_rows(self.low - self.column, self.columns)
            high = spread_rows(self.high - self.column, self.columns)
            return jnp.where((column >= low) & (column <= high), values, rest)

        return lax.cond(self.full, lambda: values, lambda: mask(values))

    def bias(self, known):
        """The sum of the biases, `[64, columns]`, or None. It is equal for all heads."""
        return self._bias() if known is None else known

    def _bias(self):
        parts = []
        if self.table is not None:
            parts = [self._place_bias(c) for c in range(0, self.columns, ROWS)]
        bias = None
        if parts:
            bias = parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)
        if self.time_bias is None:
            return bias
        found = self.time_bias_of_pairs()
        return found if bias is None else bias + found

    def _place_bias(self, c):
        """The bias by distance, `[64, 64]`, for the columns from c on."""
        first = ROWS * self.distance(c)
        if self.of_queries:
            first = ROWS * (self.tiles - 1) - first
        part = self.table.at[pl.ds(first, TILE)]
        if self.scratch is not None:
            place = jnp.arange(ROWS)
            return part[...][ROWS - 1 + place[None] - place[:, None]]
        from pallas_kernels import lanes

        return lanes.diagonals(part, ROWS - 1)

    def time_bias_of_pairs(self):
        """The bias by time of each pair, `[64, columns]`."""
        since = self.since()
        if self.scratch is None:
            edge, _, before, after = self.cell_of(since, 4)
            return jnp.where(since >= edge, after, before)
        first, second, last = self.range_of_buckets()
        zeros = jnp.zeros((ROWS, self.columns), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

        def later(b, found):
            return jnp.where(since >= self.thresholds[b], self.time_bias[b], found)

        return lax.fori_loop(second, last + 1, later, zeros + self.time_bias[first])

    def cell_of(self, since, count):
        """The first `count` numbers that the table of `_cells` has for each time difference."""
        # Imported late, because it loads Mosaic GPU: see `mosaic`.
        from pallas_kernels import lanes

        bits = lax.bitcast_convert_type(jnp.maximum(since, 1.0), jnp.int32)
        # Padding may have any values.
        cell = jnp.clip((bits >> _CELL_BITS) - _FIRST_CELL, 0, self.count_of_cells - 1)
        size = math.prod(self.cells_smem.shape)
        table = self.cells_smem.reshape(size)
        return lanes.look_up_ends(table, cell, plgpu.Layout.WGMMA, count)

    def distance(self, c):
        """The number of the tile in the table of biases by distance, for the columns from c on."""
        apart = self.row - self.column - c
        apart = apart if self.of_queries else -apart
        return jnp.clip(div(jnp.maximum(apart, 0), ROWS), 0, self.tiles - 1)

    def since(self):
        """Time differences between rows and columns."""
        columns = spread_columns(self.times, 0, self.columns)
        rows = spread_rows(self.own, self.columns)
        return rows - columns if self.of_queries else columns - rows

    def range_of_buckets(self):
        """The first, the second and the last bucket of the tile's pairs."""
        a, b = (self.times_of_rows[i] for i in (0, ROWS - 1))
        c, d = (self.times[i] for i in (0, self.columns - 1))
        if self.of_queries:
            least, largest, one = a - d, b - c, self.column >= self.all_low
        else:
            least, largest = c - b, d - a
            one = self.column + self.columns - 1 <= self.all_high
        # The pair of an entry with itself is in the first bucket. Other pairs are in the bucket of
        # the gap, or later.
        least = jnp.where(self.full, least, self.gap)
        largest = jnp.where(one, largest, self.longest)

        def bucket(x, more):
            bucket = jnp.log(jnp.clip(x, 1.0, 1e18)) * (1 / _RATIO) + more
            return jnp.clip(bucket.astype(jnp.int32), 0, self.buckets - 1)

        # The logarithm is inexact, so the range is widened. A superfluous bucket costs less than
        # reading its threshold.
        least, last = bucket(least, -1e-3), bucket(largest, 1e-3)
        first = jnp.where(self.full, least, 0)
        return first, jnp.maximum(least, first + 1), last

    def add_to_biases(self, ds, refs) -> None:
        """Adds a tile's slopes to the gradients of the biases of this warpgroup."""
        skewed, places, sums = refs
        if self.table is not None:
            for c in range(0, self.columns, ROWS):
                self._add_to_places(ds[:, c : c + ROWS], c, skewed, places)
        if self.time_bias is None:
            return
        first, second, last = self.range_of_buckets()
        if self.scratch is not None:
            self._add_to_buckets(ds, sums, first, second, last)
            return
        apart = last - second
        lax.cond(
            (apart >= _FEW) & (apart < _SLOTS - 1),
            lambda: self._add_to_slots(ds, skewed, sums, first, second, last),
            lambda: self._add_to_buckets(ds, sums, first, second, last),
        )

    def _add_to_places(self, ds, c, skewed, places) -> None:
        """Sums diagonals: rows are written with a larger row distance than they are read with.

        Rows that are 8 apart have equal diagonals, and are added first.
        """
        layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
        mine = places.at[self.distance(c)]
        # Loaded long before it is used, to hide the latency.
        before = plgpu.load(mine, layout=layout)
        plgpu.commit_smem()  # waits until all threads have read the last tile
        if self.scratch is not None:
            store(skewed.at[pl.ds(0, ROWS), pl.ds(ROWS, ROWS)], ds)
            plgpu.commit_smem()
            ends = [(skewed[r][r + 1 :], skewed[r + 1][...]) for r in range(ROWS)]
            parts = [jnp.concatenate(x)[:TILE] for x in ends]
            store(mine, before + functools.reduce(jnp.add, parts))
            return
        from pallas_kernels import lanes

        lanes.store_folded(skewed, ds, ROWS, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        flat = skewed.reshape((ROWS + 1) * _PITCH)
        sums = [before]
        for n, row in enumerate(r for r in range(ROWS) if not r & 8):
            part = flat.at[pl.ds(n * _PITCH + row + 1, TILE)]
            part = plgpu.load(part, layout=layout)
            # Several independent sums, because each addition waits for the one before.
            sums = [*sums, part] if n < 3 else [*sums[1:], sums[0] + part]
        lanes.store(mine, functools.reduce(jnp.add, sums), layout)

    def _add_to_slots(self, ds, skewed, sums, first, second, last) -> None:
        """Adds gradients to sums of each thread, one sum for each bucket of the tile."""
        from pallas_kernels import lanes

        layout = plgpu.Layout.WG_STRIDED((4 * TILE,), vec_size=4)
        zeros = plgpu.layout_cast(jnp.zeros(4 * TILE, jnp.float32), layout)
        flat = skewed.reshape((ROWS + 1) * _PITCH)
        slots = flat.at[pl.ds(0, _SLOTS * TILE)]

        count = last - second + 2

        def clear():
            plgpu.commit_smem()  # waits until all threads have read everything

            @pl.loop(0, div(count + 3, 4))
            def _(n):
                part = flat.at[pl.ds(n * 4 * TILE, 4 * TILE)]
                lanes.store(part, zeros, layout)

            plgpu.commit_smem()

        since = self.since()
        edge, bucket = self.cell_of(since, 2)
        bucket = lax.bitcast_convert_type(bucket, jnp.int32)
        bucket += jnp.where(since >= edge, jnp.int32(1), jnp.int32(0))
        # The first bucket may be far from the second. Pairs that do not count are 0.
        slot = jnp.clip(bucket - (second - 1), 0, count - 1)
        clear()
        lanes.add_to_slots(slots, ds, slot, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        of_first = sums.at[pl.ds(first * _WARPS, 2)]
        others = sums.at[pl.ds((second - 1) * _WARPS, _SLOTS * _WARPS)]
        lanes.add_sums_of_slots(of_first, others, slots, count)
        clear()  # `_add_to_places` requires zeros next to its tile

    def _add_to_buckets(self, ds, sums, first, second, last) -> None:
        """Adds gradients by bucket, as differences of sums over all entries before a time."""
        since = self.since()
        interpreted = self.scratch is not None

        def total(values):
            if interpreted:
                return jnp.sum(values, axis=1)
            from pallas_kernels import lanes

            return lanes.sum_of_thread(values, plgpu.Layout.WGMMA)

        def add(b, values):
            mine = sums.at[pl.ds(b * _WARPS, _WARPS)]
            if interpreted:
                mine[...] += jnp.sum(values.reshape(_WARPS, -1), axis=1)
                return
            from pallas_kernels import lanes

            lanes.add_sums_of_warps(mine, values)

        def later(b, carry):
            bucket, before = carry
            rest = total(jnp.where(since >= self.thresholds[b], ds, 0.0))
            add(bucket, before - rest)
            return b, rest

        add(*lax.fori_loop(second, last + 1, later, (first, total(ds))))


def _table_of_places(bias: Float[Array, "places"], tiles: int, of_queries: bool):
    """A table of biases by distance, from -63 upwards; for queries from the largest distance
    downwards.

    Its last tile has only distances larger than those of the bias.
    """
    place = jnp.arange(ROWS * (tiles + 1))
    apart = ROWS * tiles - 1 - place if of_queries else place - (ROWS - 1)
    return bias[jnp.clip(apart, 0, len(bias) - 1)]


def _cells(bias: Float[Array, "buckets"], thresholds: Sequence[float]):
    """A table by quarters of octaves of time differences. Each contains at most one threshold.

    For each quarter the table has the threshold, the bucket before it, and the biases before and
    after it, in rows of 128 numbers. Also returns the number of quarters.
    """
    fraction, octave = math.frexp(math.exp(_RATIO * (len(bias) - 1)))
    count = 4 * (octave - 1) + int(4 * (2 * fraction - 1)) + 2
    size = -(-count // ROWS) * ROWS
    starts = [2.0 ** (n // 4) * (1 + n % 4 / 4) for n in range(min(size, 512))]
    starts += [math.inf] * (size - len(starts))
    bucket = [bisect.bisect(thresholds, x) - 1 for x in starts]
    edges = [(*thresholds, math.inf)[b + 1] for b in bucket]
    edges, bucket = jnp.asarray(edges, jnp.float32), jnp.asarray(bucket, jnp.int32)
    before = lax.bitcast_convert_type(bucket, jnp.float32)
    after = jnp.minimum(bucket + 1, len(bias) - 1)
    table = jnp.stack([edges, before, bias[bucket], bias[after]], axis=1)
    return table.reshape(-1, TILE), count


def _run(
    name,
    scores: _Scores,
    spans: Spans,
    work,
    finish,
    *,
    rows,
    columns,
    sums: int,
    of_queries: bool,
    by_head,
    config: Config,
    may_be_wrong: bool = False,
    with_biases: bool = False,
    together: int = 1,
    start: Callable[[], tuple] = tuple,
):
    """Runs a program of the structure that the module's text describes.

    Args:
      name: the name that a profiler shows.
      scores: object that computes the scores of such tiles.
      spans: the columns that count for a row.
      work: function that is called for a tile and a head: (scores, blocks of rows, blocks of
        columns, sums, the biases or None, carry). It returns the carry for the next tile, the
        biases for the next head, and the slopes of the scores.
      finish: function that is called with the sums and the carry after a row's last tile.
      rows: arrays `[tokens, heads, dim]`, of which a warpgroup has 64 rows.
      columns: arrays `[tokens, heads, dim]`, whose tiles are read in order.
      sums: number of `[64, dim]` sums, and of results. Without sums the result is
        `[heads, tokens]` float32, and `finish` writes it.
      of_queries: whether rows are queries.
      by_head: arrays `[heads, tokens]` float32 for the queries, for `scores.vector`.
      may_be_wrong: whether `finish` needs NaN if the history is invalid, and 0 otherwise.
      config: how the work is divided.
      with_biases: whether the gradients of the biases are made.
      together: most heads whose sums a program has at once, if there are biases, which
        are looked up once for these heads.
      start: function that makes the carry before a row's first tile.
    """
    tokens, heads, dim = rows[0].shape
    dtype, size, stages = rows[0].dtype, config.columns, config.stages
    orders, number_of_order = spans.orders(size), 0 if of_queries else 1
    low, high = spans.of_queries if of_queries else spans.of_keys
    # Padding may have any values, and 0 * NaN is NaN. The last rows are read from `tails`.
    tail = div(spans.used, ROWS) * ROWS
    tails = [_tail(x, tail, spans.used) for x in (*rows, *columns)]
    # A program computes all heads of a tile in order, if there are enough tiles for all programs.
    tiles = tokens // TILE
    together = math.gcd(heads, together) if scores.arrays else 1
    parts = heads // together
    group = parts if tiles >= 2 * num_programs() else 1
    units = tiles * parts // group
    programs = num_programs()
    # With sums for biases, shared memory is too small for the next rows.
    row_slots = 1 if with_biases else 2
    timed = scores.buckets > 0
    looks_up = timed and not config.interpretable
    of_rows = [low, high]
    if spans.times is not None and timed:
        of_rows.append(spans.times)
    of_rows += [spans.starts] if may_be_wrong else []
    # On a GPU, look-ups do not need the range of buckets.
    ranged = timed and (with_biases or config.interpretable)
    apart = spans.apart(of_queries) if ranged else ()
    operands = [
        orders,
        spans.starts,
        spans.ends,
        *of_rows,
        *apart,
        *rows,
        *columns,
        *tails,
        *by_head,
        *scores.arrays,
    ]
    of_places = with_biases and scores.tiles > 0
    of_times = with_biases and scores.buckets > 0
    outs = [jax.ShapeDtypeStruct((tokens, heads, dim), dtype)] * sums
    if not sums:
        outs = [jax.ShapeDtypeStruct((heads, tokens), jnp.float32)]
    results = len(outs)
    if of_places:
        shape = programs, _WARPGROUPS, scores.tiles, TILE
        outs.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    if of_times:
        shape = programs, _WARPGROUPS, scores.sums_of_buckets
        outs.append(jax.ShapeDtypeStruct(shape, jnp.float32))

    def body(*refs):
        refs = list(refs)

        def take(count):
            taken, refs[:] = refs[:count], refs[count:]
            return taken

        orders, starts, ends = take(3)
        of_rows_gmem, apart_gmem = take(len(of_rows)), take(len(apart))
        rows_gmem, columns_gmem = take(len(rows)), take(len(columns))
        rows_tail, columns_tail = take(len(rows)), take(len(columns))
        by_head_gmem = take(len(by_head))
        refs[:] = scores.bind(refs)
        outs_gmem = take(results)
        places_gmem: Any = take(1)[0] if of_places else None
        times_gmem: Any = take(1)[0] if of_times else None
        warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
        used = jnp.minimum(ends[tokens - 1], tokens)
        tail = div(used, ROWS) * ROWS
        numbers_at = starts if of_queries else ends

        def each_item(function):
            """Calls `function(row, part, first, count, done, i, ranges)` for each item.

            `part` is a number of heads that are computed together, `done` is the number
            of tiles before, and `ranges` are the ranges of the warpgroups.
            """
            # Items are sorted by size. Alternating the direction gives each program a fair share.
            whole, more = divmod(units, programs)
            back = programs - 1 - program
            last = program if whole % 2 == 0 else back
            count = group * (whole + jnp.where(last < more, jnp.int32(1), jnp.int32(0)))

            def place_of(i):
                turn = div(i, group)
                number = turn * programs + jnp.where(rem(turn, 2) == 0, program, back)
                if group == 1:
                    return div(number, parts), rem(number, parts)
                return number, rem(i, group)

            # The numbers are loaded some items before they are used.
            def row_of(i):
                at = jnp.minimum(place_of(i)[0], tiles - 1)
                return orders[number_of_order, at] * TILE

            def known_of(row):
                rows = [row + w * ROWS for w in range(_WARPGROUPS)]
                at = [spans.number_at(r, used, of_queries, tokens) for r in rows]
                return tuple(numbers_at[i] for i in at)

            def item(i, carry):
                done, row, known, following = carry
                after, known_after = row_of(i + 2), known_of(following)
                rows = [row + w * ROWS for w in range(_WARPGROUPS)]
                ranges = ranges_of(rows, known, used, of_queries, size)
                first, stop = joined(ranges)
                function(row, place_of(i)[1], first, stop - first, done, i, ranges)
                return done + stop - first, following, known_after, after

            zero, one = jnp.int32(0), jnp.int32(1)
            row = row_of(zero)
            start = zero, row, known_of(row), row_of(one)
            lax.fori_loop(zero, count, item, start)

        def load(
            rows_smem,
            columns_smem,
            vectors_smem,
            rows_full,
            rows_free,
            full,
            free,
            ready,
        ):
            of_rows_smem, times_smem, cells_smem = vectors_smem
            if looks_up:
                plgpu.copy_gmem_to_smem(scores.cells, cells_smem, ready)

            def copy(gmem, tail_gmem, row, head, smem, barrier):
                @pl.when(row < tail)
                def _():
                    plgpu.copy_gmem_to_smem(
                        gmem.at[pl.ds(row, ROWS), head], smem, barrier
                    )

                @pl.when(row >= tail)
                def _():
                    plgpu.copy_gmem_to_smem(tail_gmem.at[:, head], smem, barrier)

            def of_item(row, part, first, count, done, i, ranges):
                place = rem(i, row_slots)

                @pl.when(i >= row_slots)
                def _():
                    plgpu.barrier_wait(rows_free.at[place])

                for gmem, rest, smem in zip(
                    rows_gmem, rows_tail, rows_smem, strict=True
                ):
                    for w, h in itertools.product(range(_WARPGROUPS), range(together)):
                        copy(
                            gmem,
                            rest,
                            row + w * ROWS,
                            part * together + h,
                            smem.at[place, w, h],
                            rows_full.at[place],
                        )

                for gmem, smem in zip(of_rows_gmem, of_rows_smem, strict=True):
                    plgpu.copy_gmem_to_smem(
                        gmem.at[pl.ds(row, TILE)], smem.at[place], rows_full.at[place]
                    )

                @pl.loop(0, count * together)
                def _(n):
                    j, head = div(n, together), part * together + rem(n, together)
                    n = done * together + n
                    slot = rem(n, stages)

                    @pl.when(n >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for gmem, rest, smem in zip(
                        columns_gmem, columns_tail, columns_smem, strict=True
                    ):
                        for c in range(0, size, ROWS):
                            column = (first + j) * size + c
                            block = smem.at[slot, pl.ds(c, ROWS)]
                            copy(gmem, rest, column, head, block, full.at[slot])
                    if timed:
                        plgpu.copy_gmem_to_smem(
                            of_rows_gmem[2].at[pl.ds((first + j) * size, size)],
                            times_smem.at[slot],
                            full.at[slot],
                        )

            each_item(of_item)

        def compute(
            rows_smem,
            columns_smem,
            vectors_smem,
            out_smem,
            biases,
            scratch,
            rows_full,
            rows_free,
            full,
            free,
            ready,
        ):
            scores.scratch = scratch
            of_rows_smem, times_smem, scores.cells_smem = vectors_smem
            if looks_up:
                plgpu.barrier_wait(ready)

            def leave(barrier):
                if config.interpretable:
                    # Hopper's copies wait for earlier reads; the interpreter needs a
                    # barrier.
                    plgpu.commit_smem()
                plgpu.barrier_arrive(barrier)

            refs = None
            if with_biases:
                refs = start_biases(
                    *(None if x is None else x.at[warpgroup] for x in biases)
                )

            def of_item(row, part, first, count, done, i, ranges):
                own = [
                    jnp.where(warpgroup == 0, a, b)
                    for a, b in zip(*ranges, strict=True)
                ]
                row = row + warpgroup * ROWS
                block = div(row, ROWS)
                of_block = [x[block] for x in apart_gmem] or [None, None]
                all_heads = [part * together + h for h in range(together)]
                of_heads = [
                    [
                        row_vector(ref.at[head], row)
                        for ref in by_head_gmem
                        if of_queries
                    ]
                    for head in all_heads
                ]
                place = rem(i, row_slots)
                mine = [
                    [smem.at[place, warpgroup, h] for smem in rows_smem]
                    for h in range(together)
                ]
                plgpu.barrier_wait(rows_full.at[place])
                vectors = [
                    x.at[place, pl.ds(warpgroup * ROWS, ROWS)] for x in of_rows_smem
                ]
                low, high, *others = [row_vector(x, 0) for x in vectors]
                # If the rows belong to two histories, no tile has columns that count for all rows.
                all_rows = vectors[0][ROWS - 1], vectors[1][0]
                own_times = [others.pop(0), vectors[2]] if timed else [None, None]
                spoilt = None
                if may_be_wrong:
                    spoilt = jnp.where(others[0] < 0, jnp.nan, 0.0)
                of_row = [low, high, *all_rows, *of_block, *own_times]

                def multiply(*made):
                    of_each = [made[h * sums : (h + 1) * sums] for h in range(together)]

                    def slot(j, h=0):
                        return rem((done + j) * together + h, stages)

                    def leave_slot(slot):
                        leave(free.at[slot])

                    # Whether a tile's last product may still run when the next tile begins. With
                    # several heads, other heads of the tile hide it.
                    late = together == 1

                    def leave_before(j, h):
                        if h:
                            leave_slot(slot(j, h - 1))
                        elif late:
                            pl.when(j > begin)(
                                lambda: leave_slot(slot(j - 1, together - 1))
                            )

                    def skip(begin, end):
                        @pl.loop(begin * together, end * together)
                        def _(n):
                            here = rem(done * together + n, stages)
                            plgpu.barrier_wait(full.at[here])
                            leave_slot(here)

                    begin, end = own[0] - first, own[1] - first
                    skip(0, begin)

                    def tile(j, carries):
                        carries = list(carries)
                        scores.at(row, (first + j) * size, of_row)
                        bias = total = None
                        for h, head in enumerate(all_heads):
                            here = slot(j, h)
                            plgpu.barrier_wait(full.at[here])
                            # Called when the previous tile may be overwritten.
                            arrived = partial(leave_before, j, h)
                            times = times_smem.at[here] if timed else None
                            scores.of_head(
                                head, by_head_gmem, of_heads[h], times, arrived
                            )
                            columns = [smem.at[here] for smem in columns_smem]
                            carries[h], bias, slopes = work(
                                scores, mine[h], columns, of_each[h], bias, carries[h]
                            )
                            total = slopes if total is None else total + slopes
                        if refs is not None:
                            scores.add_to_biases(total, refs)
                        if not late:
                            plgpu.wgmma_wait(0)
                            leave_slot(slot(j, together - 1))
                        return tuple(carries)

                    carries = tuple(start() for _ in all_heads)
                    carries = lax.fori_loop(begin, end, tile, carries)
                    plgpu.wgmma_wait(0)
                    leave_before(end, 0)
                    skip(end, count)
                    return _arrived(*made), carries

                made = [plgpu.ACC((ROWS, dim))] * (sums * together)
                found, carries = pl.run_scoped(multiply, *made) if made else multiply()
                leave(rows_free.at[place])
                for h, head in enumerate(all_heads):

                    def out(n, values, head=head):
                        target = out_smem.at[warpgroup, n]
                        target[...] = values.astype(dtype)
                        plgpu.commit_smem()
                        result = outs_gmem[n].at[pl.ds(row, ROWS), head]
                        plgpu.copy_smem_to_gmem(target, result)

                    # Waits until earlier copies from the buffer have ended.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    mine = found[h * sums : (h + 1) * sums]
                    target = out if sums else outs_gmem[0]
                    finish(mine, carries[h], row, spoilt, [target], head)

            each_item(of_item)
            if with_biases:
                end_biases(refs)
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        def start_biases(skewed, sums):
            """Sets sums to zero; returns the references of this warpgroup."""
            places = None
            if of_places:
                places = places_gmem.at[program, warpgroup]
                layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
                zeros = plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), layout)

                @pl.loop(0, scores.tiles)
                def _(n):
                    store(places.at[n], zeros)

                @pl.loop(0, ROWS + 1)
                def _(n):
                    for at in (0, _PITCH - TILE):
                        store(skewed.at[n, pl.ds(at, TILE)], zeros)

            if of_times:
                layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
                zeros = plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), layout)

                @pl.loop(0, scores.sums_of_buckets // TILE)
                def _(n):
                    store(sums.at[pl.ds(n * TILE, TILE)], zeros)

            plgpu.commit_smem()  # other threads add to these sums

            return skewed, places, sums

        def end_biases(refs):
            if of_times:
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(refs[2], times_gmem.at[program, warpgroup])

        def scope(
            rows_smem, columns_smem, vectors_smem, out_smem, biases, scratch, *barriers
        ):
            @pl.when(warpgroup == _WARPGROUPS)
            def _():
                plgpu.set_max_registers(_REGISTERS[1], action="decrease")
                load(rows_smem, columns_smem, vectors_smem, *barriers)

            @pl.when(warpgroup < _WARPGROUPS)
            def _():
                plgpu.set_max_registers(_REGISTERS[0], action="increase")
                buffers = rows_smem, columns_smem, vectors_smem, out_smem
                compute(*buffers, biases, scratch, *barriers)

        def smem(*shape):
            return plgpu.SMEM((*shape, dim), dtype, transforms=transforms())

        f32 = jnp.float32
        pl.run_scoped(
            scope,
            [smem(row_slots, _WARPGROUPS, together, ROWS)] * len(rows),
            [smem(stages, size)] * len(columns),
            (
                [plgpu.SMEM((row_slots, TILE), x.dtype) for x in of_rows],
                plgpu.SMEM((stages, size), f32) if timed else None,
                plgpu.SMEM(scores.arrays[-1].shape, f32) if looks_up else None,
            ),
            smem(_WARPGROUPS, sums, ROWS) if sums else None,
            [
                plgpu.SMEM((_WARPGROUPS, ROWS + 1, _PITCH), f32)
                if with_biases
                else None,
                plgpu.SMEM((_WARPGROUPS, scores.sums_of_buckets), f32)
                if of_times
                else None,
            ],
            plgpu.SMEM(
                (_WARPGROUPS, max(1, sums), ROWS, size), dtype, transforms=transforms()
            )
            if config.interpretable
            else None,
            plgpu.Barrier(
                num_arrivals=len(rows) * _WARPGROUPS * together + len(of_rows),
                num_barriers=row_slots,
            ),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=row_slots),
            plgpu.Barrier(
                num_arrivals=len(columns) * (size // ROWS) + timed, num_barriers=stages
            ),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1) if looks_up else None,
            collective_axes="warpgroup",
        )

    return call(name, body, outs, _WARPGROUPS, *operands)


# Registers of each computing thread, and of each copying thread; see `matmul_tiles`.
_REGISTERS = 240, 24


def _tail(x, tail, used):
    """The 64 rows from `tail` on, in which padding is replaced by zeros."""
    rows = jnp.minimum(tail, len(x) - ROWS) + jnp.arange(ROWS, dtype=jnp.int32)
    kept = (rows >= tail) & (rows < used)
    return jnp.where(kept[:, None, None], x[rows], 0)
