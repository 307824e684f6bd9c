"""Softmax of one target a row, in three matrix products: scores are kept for a while.

A block of rows has its scores for all items at once, as exponentials `e` in bfloat16::

    r     the score of each row's target                    before any other score is made
    e_i   = exp(s_i - r),  and  sum_i e_i  in float32       one program of the GPU
    f     = weight exp(r - lse)                             slope_i = f e_i
    dh    = f (e kernel),   dkernel += e^T (f h)

The slope of the target also has `- weight`: one number a row is written over in `e`. If each
block had few rows, adding up the kernel's gradient would cost more than the fourth product.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import output_loss as mosaic
from pallas_kernels.score_tiles import TILE_ROWS
from pallas_kernels.slopes_product import MAX_HIDDEN
from sparsejax.losses import SoftmaxCrossEntropy
from sparsejax.ops import item_chunks, softmax
from sparsejax.ops.chunked_loss import Batch, Layer, Method, with_mosaic
from sparsejax.ops.item_chunks import Shard
from sparsejax.ops.targets import Columns, Targets

# Exponentials in a block: .9 GB.
_BLOCK_SCORES = 9 * 10**8 // 2
# With fewer rows in a block, the other form is faster, unless these are all rows.
_LEAST_ROWS = 1024
# Exponents of `e` are at most this, so that sums over any number of items are finite.
_MOST = 60.0


def block_rows(batch: int, items: int) -> int | None:
    """Rows of a block; None if they are too few for this form."""
    most = _BLOCK_SCORES // items // TILE_ROWS * TILE_ROWS
    if most < min(batch, _LEAST_ROWS):
        return None
    blocks = -(-batch // most)
    return -(-batch // (blocks * TILE_ROWS)) * TILE_ROWS


def rows_of_block(
    method: Method, batch: Batch, layer: Layer, shard: Shard
) -> int | None:
    """Rows of a block, if this form can compute the loss and is the fastest here."""
    rule = method.rule
    if (
        method.form not in (None, "kept")
        or not isinstance(batch.labels, Targets)
        or not isinstance(rule, SoftmaxCrossEntropy)
        or rule.label_smoothing
        or layer.scale is not None
        or layer.kernel.dtype != jnp.bfloat16
        or not with_mosaic(method, batch.h, layer, batch.labels)
    ):
        return None
    if method.form == "kept":
        return TILE_ROWS
    if method.chunk_scores is not None or batch.h.shape[1] <= MAX_HIDDEN:
        return None
    devices = lax.axis_size(shard.batch) if shard.batch else 1
    return block_rows(len(batch.h) * devices, len(layer.kernel))


def loss_and_gradients(
    rule: SoftmaxCrossEntropy, batch: Batch, layer: Layer, shard: Shard, rows: int
) -> tuple[Float[Array, "batch"], Float[Array, "batch hidden"], Layer]:
    """The losses, and the gradients of their weighted sum in `h` and the layer.

    Blocks in which all rows are ignored cost nothing. It is called as
    `chunked_loss.loss_and_updates` is, on each device.

    Args:
      rule: the loss.
      batch: bfloat16 vectors, and targets.
      layer: kernel and bias of the device's items.
      shard: the part of a mesh's work that this device does.
      rows: of a block, a multiple of 128.
    """
    dtype, labels = item_chunks.accumulator(batch.h.dtype), batch.labels
    assert isinstance(labels, Targets)
    targets, broken = item_chunks.labels_of(labels, shard, len(layer.kernel))
    assert isinstance(targets, Columns)
    ignored = labels.ignored
    weights = jnp.ones(len(ignored), dtype)
    if batch.weights is not None:
        weights = batch.weights.astype(dtype)
    weights = jnp.where(broken & (weights != 0), jnp.nan, weights)
    weights = jnp.where(ignored, 0, weights)
    h, weights, skipped = shard.all_rows((batch.h, weights, ignored))
    limit = labels.num_cols - shard.first_item(len(layer.kernel))
    order, place = _wanted_first(skipped, -(-len(h) // rows) * rows)

    def packed(array, fill: Any = 0):
        return array.at[order].get(mode="fill", fill_value=fill)

    of_targets = softmax.target_scores(h, layer, targets, limit)
    label_sum, label_scores = shard.sum_over_items(of_targets)
    reference = jnp.where(jnp.isfinite(label_scores), label_scores, 0)
    h = jnp.where((weights != 0)[:, None], h, 0)  # 0 * inf would be NaN
    of_rows = [packed(x) for x in (h, weights, label_sum, label_scores, reference)]
    of_rows += [packed(skipped, True), packed(targets.columns, -1)]
    bias = None if layer.bias is None else layer.bias.astype(jnp.float32)
    start = {"start": 0, "size": len(layer.kernel), "limit": limit}

    def block(i, state):
        losses, dh, dkernel, dbias = state
        mine, factor, one, score, reference, skipped, columns = (
            item_chunks.slice_rows(x, i * rows, rows) for x in of_rows
        )
        e, total, reference = _exponentials(
            mine, layer.kernel, bias, factor, reference, skipped, start, shard
        )
        known = softmax.Normaliser(reference, total, one, score)
        loss, _, (factor, lse, slope) = softmax.loss_and_slopes(
            rule, known, factor, None, Shard()
        )
        slope = jnp.where(factor == 0, 0, slope * jnp.exp(reference - lse))
        # -weight of the target, in the units of `e`.
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
        scaled = (mine.astype(dtype) * slope[:, None]).astype(h.dtype)
        dkernel += item_chunks.dot(e, scaled, (0, 0), dkernel.dtype)
        if dbias is not None:
            dbias += jnp.sum(e.astype(dtype) * slope[:, None], axis=0)
        return item_chunks.write_rows(losses, loss, i * rows), dh, dkernel, dbias

    wanted = jnp.sum((~skipped).astype(jnp.int32))
    start_of = (
        jnp.zeros(len(order), dtype),
        jnp.zeros((len(order), h.shape[1]), dtype),
        jnp.zeros_like(layer.kernel),
        None if bias is None else jnp.zeros_like(bias),
    )
    blocks = lax.div(wanted + rows - 1, rows)
    losses, dh, dkernel, dbias = lax.fori_loop(0, blocks, block, start_of)
    losses = jnp.where(broken, jnp.nan, shard.own_rows(losses[place]))
    dh = jnp.where((weights != 0)[:, None], dh[place], 0)
    gradients = layer._replace(kernel=dkernel, bias=dbias)
    return jnp.where(ignored, 0, losses), shard.own_sums(dh), gradients


def _wanted_first(
    skipped: Bool[Array, "batch"], size: int
) -> tuple[Int[Array, "size"], Int[Array, "batch"]]:
    """The rows in the order of the blocks, `batch` for none; and the place of each row."""
    batch = len(skipped)
    wanted = jnp.cumsum(~skipped) - 1
    place = jnp.where(skipped, wanted[-1] + jnp.cumsum(skipped), wanted)
    place = place.astype(jnp.int32)
    order = jnp.full(size, batch, jnp.int32)
    numbers = jnp.arange(batch, dtype=jnp.int32)
    return order.at[place].set(numbers, unique_indices=True), place


def _exponentials(h, kernel, bias, weights, reference, skipped, start, shard: Shard):
    """`e` of the device's items, its sums over all items, and the reference of each row.

    If a score exceeds the target's by far, the largest one of each row becomes the
    reference, which takes two more products.
    """

    def largest():
        known = mosaic.no_scores(len(h), with_labels=False)
        found, _ = mosaic.normalise(h, kernel, bias, None, None, known, **start)
        found = jnp.max(found, axis=0)
        return softmax.finite(lax.pmax(found, shard.items) if shard.items else found)

    def made(state):
        attempt, reference, _, _ = state
        reference = lax.cond(attempt > 0, largest, lambda: reference)
        sums, e = mosaic.slopes(
            _exponential,
            h,
            kernel,
            bias,
            None,
            _no_labels(len(h), len(kernel)),
            [weights, reference],
            **start,
        )
        total = shard.sum_over_items(jnp.sum(sums, axis=0))
        return attempt + 1, reference, e, total

    def is_missing(state):
        attempt, _, _, total = state
        outside = (total > jnp.exp(_MOST)) | (total < jnp.exp(-_MOST))
        return (attempt == 0) | ((attempt == 1) & jnp.any(outside & ~skipped))

    none = lax.empty((len(h), len(kernel)), h.dtype)
    first = jnp.zeros((), jnp.int32), reference, none, jnp.zeros_like(reference)
    _, reference, e, total = lax.while_loop(is_missing, made, first)
    return e, total, reference


def _exponential(scores, labels, listed, weights, reference):
    """A function for `mosaic.slopes`: values and slopes are both `e`."""
    del labels, listed, weights
    e = jnp.exp(jnp.minimum(scores - reference, _MOST + 5))
    return e, e


def _no_labels(rows: int, items: int) -> mosaic.Targets:
    """Labels of rows that have none."""
    blocks = rows // mosaic.ROWS, items // mosaic.SLOPES_COLUMNS
    columns = jnp.full(rows, -1, jnp.int32)
    return mosaic.Targets(columns, jnp.zeros(blocks, jnp.int32))
