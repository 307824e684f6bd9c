"""Softmax loss of one target a row in three matrix products: some scores are kept.

A block of rows keeps the scores of all items at once, as exponentials `e` in bfloat16::

    r     the score of each row's target                    computed before all other scores
    e_i   = exp(s_i - r),  and  sum_i e_i  in float32       one program of the GPU
    f     = weight exp(r - lse)                             slope_i = f e_i
    dh    = f (e kernel),   dkernel += e^T (f h)

The slope of the target also has the term `- weight`: one number a row is overwritten in `e`.
With few rows in a block, adding up the kernel's gradient would cost more than a fourth product.
With many blocks the gradient's error would be larger: it is rounded to bfloat16 after each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import output_loss as mosaic
from pallas_kernels.score_tiles import TILE_ROWS
from pallas_kernels.slopes_product import MAX_HIDDEN
from sparsejax.losses import SoftmaxCrossEntropy
from sparsejax.ops import item_chunks, softmax
from sparsejax.ops.chunked_loss import Layer, LossBatch, Method, with_mosaic
from sparsejax.ops.item_chunks import Shard
from sparsejax.ops.targets import TargetColumns, Targets
from sparsejax.sparse import sums_so_far

# Number of exponentials in a block: 0.9 GB; with wide vectors slightly more, as their kernel's
# gradient takes longer to add up (8,192 x 2,304 x 256,000: 39.8 ms with 2,048 rows, 42.8 with
# 1,664).
_BLOCK_SCORES, _WIDE, _BLOCK_SCORES_OF_WIDE = 9 * 10**8 // 2, 1024, 2**29
# With fewer rows in a block, another form is faster, unless a single block has all rows.
_LEAST_ROWS = 1024
# Rounding the kernel's gradient this many times causes an error of 0.5 % of its norm.
_MOST_BLOCKS = 16
# If the logarithm of a sum of `e` is farther from 0 than this, the sum is computed again with
# another reference.
_MOST = 60.0


def block_rows(batch: int, items: int, hidden: int) -> int | None:
    """The number of rows of a block; None if it is too small, or there are too many blocks."""
    scores = _BLOCK_SCORES_OF_WIDE if hidden >= _WIDE else _BLOCK_SCORES
    most = scores // items // TILE_ROWS * TILE_ROWS
    if most < min(batch, _LEAST_ROWS):
        return None
    blocks = -(-batch // most)
    if blocks > _MOST_BLOCKS:
        return None
    return -(-batch // (blocks * TILE_ROWS)) * TILE_ROWS


def is_plain(method: Method, batch: LossBatch, layer: Layer) -> bool:
    """Whether both GPU programs of this module can compute the loss."""
    rule = method.rule
    return (
        isinstance(batch.labels, Targets)
        and isinstance(rule, SoftmaxCrossEntropy)
        and not rule.label_smoothing
        and layer.scale is None
        and with_mosaic(method, batch.h, layer, batch.labels)
    )


def rows_of_block(
    method: Method, batch: LossBatch, layer: Layer, shard: Shard
) -> int | None:
    """The number of rows of a block if this form is the fastest here; otherwise None."""
    if method.form == "kept":
        return TILE_ROWS
    wide = batch.h.shape[1] > MAX_HIDDEN
    if not wide or method.chunk_scores is not None or method.form is not None:
        return None
    if layer.kernel.dtype != jnp.bfloat16 or not is_plain(method, batch, layer):
        return None
    devices = lax.axis_size(shard.batch) if shard.batch else 1
    return block_rows(len(batch.h) * devices, *layer.kernel.shape)


class ScoredRows(NamedTuple):
    """The rows of the whole batch, sorted: rows with a target, other rows, then padding.

    Attributes:
      h: vectors in bfloat16, 0 where a row is skipped.
      weights: 0 where a row is skipped.
      found: whether the target is an item of any device, as 1 or 0; and the target's score.
      reference: the score of the target, or 0 if it is not finite.
      skipped: mask of the rows without a target.
      columns: column of each row's target, among the device's items.
    """

    h: Float[Array, "padded hidden"]
    weights: Float[Array, "padded"]
    found: tuple[Float[Array, "padded"], Float[Array, "padded"]]
    reference: Float[Array, "padded"]
    skipped: Bool[Array, "padded"]
    columns: Int[Array, "padded"]


class Packed(NamedTuple):
    """The arrays from which both forms of the softmax of targets start.

    Attributes:
      rows: the rows of the batch.
      wanted: number of rows with a target.
      limit: kernel rows of the device from this one on are padding.
      finish: function that converts the losses and the gradient of `h` from the order of `rows`
        to that of the batch.
    """

    rows: ScoredRows
    wanted: jax.Array
    limit: Any
    finish: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def packed_rows(batch: LossBatch, layer: Layer, shard: Shard, multiple: int) -> Packed:
    """Sorts the rows with targets first, and pads their number to a multiple of `multiple`."""
    dtype, labels = item_chunks.accumulator(batch.h.dtype), batch.labels
    assert isinstance(labels, Targets)
    targets, broken = item_chunks.labels_of(labels, shard, len(layer.kernel))
    assert isinstance(targets, TargetColumns)
    ignored = labels.ignored
    weights = jnp.ones(len(ignored), dtype)
    if batch.weights is not None:
        weights = batch.weights.astype(dtype)
    weights = jnp.where(broken & (weights != 0), jnp.nan, weights)
    weights = jnp.where(ignored, 0, weights)
    h, weights, skipped = shard.all_rows((batch.h, weights, ignored))
    limit = labels.num_cols - shard.first_item(len(layer.kernel))
    order, place = _wanted_first(skipped, -(-len(h) // multiple) * multiple)

    def packed(array, fill: Any = 0):
        return array.at[order].get(mode="fill", fill_value=fill)

    found = softmax.target_scores(h.astype(jnp.bfloat16), layer, targets, limit)
    found = shard.sum_over_items(found)
    h = jnp.where(skipped[:, None], 0, h)
    reference = jnp.where(jnp.isfinite(found[1]), found[1], 0)
    rows = ScoredRows(
        packed(h.astype(jnp.bfloat16)),
        packed(weights),
        (packed(found[0]), packed(found[1])),
        packed(reference),
        packed(skipped, True),
        packed(targets.columns, -1),
    )

    def finish(losses, dh):
        losses = jnp.where(broken, jnp.nan, shard.own_rows(losses[place]))
        dh = jnp.where((weights != 0)[:, None], dh[place], 0)
        return jnp.where(ignored, 0, losses), shard.own_sums(dh)

    wanted = jnp.sum((~skipped).astype(jnp.int32))
    return Packed(rows, wanted, limit, finish)


def loss_and_gradients(
    method: Method, batch: LossBatch, layer: Layer, shard: Shard, rows: int
) -> tuple[Float[Array, "batch"], Float[Array, "batch hidden"], Layer]:
    """The losses, and the gradients of their weighted sum in `h` and the layer.

    Blocks in which all rows are ignored take no time. The function is called on each device,
    like `chunked_loss.loss_and_updates`.

    Args:
      method: how the loss is computed. Its rule is a softmax without smoothing.
      batch: bfloat16 vectors, and targets.
      layer: kernel and bias of the device's items.
      shard: the part of a mesh's work that this device does.
      rows: number of rows in a block, a multiple of 128.
    """
    assert isinstance(method.rule, SoftmaxCrossEntropy)
    rule, dtype = method.rule, item_chunks.accumulator(batch.h.dtype)
    of_rows, wanted, limit, finish = packed_rows(batch, layer, shard, rows)
    padded = len(of_rows.h)
    bias = None if layer.bias is None else layer.bias.astype(jnp.float32)
    start = {"start": 0, "size": len(layer.kernel), "limit": limit}

    def block(i, state):
        losses, dh, dkernel, dbias = state
        mine = jax.tree.map(
            lambda x: item_chunks.slice_rows(x, i * rows, rows), of_rows
        )
        factor, columns, (one, score) = mine.weights, mine.columns, mine.found
        e, total, reference = _exponentials(mine, layer.kernel, bias, start, shard)
        known = softmax.Normaliser(reference, total, one, score)
        loss, _, (factor, lse, slope) = softmax.loss_and_slopes(
            rule, known, factor, None, Shard()
        )
        slope = jnp.where(factor == 0, 0, slope * jnp.exp(reference - lse))
        # The target's exponential minus the weight, divided by the factor of `e`.
        of_target = jnp.exp(score - reference) - jnp.where(
            factor == 0, 0, factor * one / slope
        )
        inside = (columns >= 0) & (columns < limit) & (factor != 0)
        at = jnp.where(inside, columns, e.shape[1])
        e = e.at[jnp.arange(rows, dtype=jnp.int32), at].set(
            of_target.astype(e.dtype), mode="drop", unique_indices=True
        )
        part = item_chunks.dot(e, layer.kernel, (1, 0)) * slope[:, None]
        dh = item_chunks.write_rows(dh, part, i * rows)
        scaled = (mine.h.astype(dtype) * slope[:, None]).astype(mine.h.dtype)
        # Rows with slope 0 become 0, because 0 * inf would be NaN.
        scaled = jnp.where((slope == 0)[:, None], 0, scaled)
        dkernel += item_chunks.dot(e, scaled, (0, 0), dkernel.dtype)
        if dbias is not None:
            dbias += jnp.sum(e.astype(dtype) * slope[:, None], axis=0)
        return item_chunks.write_rows(losses, loss, i * rows), dh, dkernel, dbias

    start_of = (
        jnp.zeros(padded, dtype),
        jnp.zeros(of_rows.h.shape, dtype),
        jnp.zeros_like(layer.kernel),
        None if bias is None else jnp.zeros_like(bias),
    )
    blocks = lax.div(wanted + rows - 1, rows)
    losses, dh, dkernel, dbias = lax.fori_loop(0, blocks, block, start_of)
    gradients = layer._replace(kernel=dkernel, bias=dbias)
    return *finish(losses, dh), gradients


def _wanted_first(
    skipped: Bool[Array, "batch"], size: int
) -> tuple[Int[Array, "size"], Int[Array, "batch"]]:
    """The rows in the order of the blocks, padded with `batch`; and the new position of each
    row.
    """
    batch = len(skipped)
    wanted = sums_so_far(~skipped) - 1
    place = jnp.where(skipped, wanted[-1] + sums_so_far(skipped), wanted)
    order = jnp.full(size, batch, jnp.int32)
    numbers = jnp.arange(batch, dtype=jnp.int32)
    return order.at[place].set(numbers, unique_indices=True), place


def _exponentials(rows: ScoredRows, kernel, bias, start, shard: Shard):
    """Computes `e` for the device's items, its sums over all items, and the reference of each row.

    If a row's largest score exceeds its target's by far, the largest score becomes the reference.
    This takes two more products.
    """

    h = rows.h

    def largest():
        known = mosaic.no_scores(len(h), with_labels=False)
        found, _ = mosaic.normalise(h, kernel, bias, None, None, known, **start)
        found = jnp.max(found, axis=0)
        return softmax.finite(lax.pmax(found, shard.items) if shard.items else found)

    def made(state):
        attempt, reference, _, _ = state
        reference = lax.cond(attempt > 0, largest, lambda: reference)
        sums, e = mosaic.slopes(
            exponential,
            h,
            kernel,
            bias,
            None,
            no_labels(len(h), len(kernel)),
            [rows.weights, reference],
            **start,
        )
        assert sums is not None
        total = shard.sum_over_items(jnp.sum(sums, axis=0))
        return attempt + 1, reference, e, total

    def is_missing(state):
        attempt, _, _, total = state
        return (attempt == 0) | ((attempt == 1) & out_of_range(total, rows.skipped))

    none, zero = lax.empty((len(h), len(kernel)), h.dtype), jnp.zeros((), jnp.int32)
    first = zero, rows.reference, none, jnp.zeros_like(rows.reference)
    _, reference, e, total = lax.while_loop(is_missing, made, first)
    return e, total, reference


def out_of_range(
    total: Float[Array, "rows"], skipped: Bool[Array, "rows"]
) -> Bool[Array, ""]:
    """Whether a reference is too far from the largest score of its row."""
    outside = (total > math.exp(_MOST)) | (total < math.exp(-_MOST))
    return jnp.any(outside & ~skipped)


def exponential(scores, labels, listed, weights, reference):
    """Computes `e`, as both values and slopes, for `mosaic.slopes`."""
    del labels, listed, weights
    e = jnp.exp(scores - reference)
    return e, e


def no_labels(rows: int, items: int) -> mosaic.Targets:
    """The labels for `mosaic.slopes` if no row has a label."""
    blocks = rows // mosaic.ROWS, items // mosaic.SLOPES_COLUMNS
    columns = jnp.full(rows, -1, jnp.int32)
    return mosaic.Targets(columns, jnp.zeros(blocks, jnp.int32))
