"""Softmax of one target a row, computed without writing scores or score gradients.

With narrow vectors, writing the score gradients would take long compared with the
products. So two passes over all scores compute them in registers, and both gradients::

    r      the score of each row's target                   computed before all other scores
    e_i    = exp(s_i - r)
    first  sum_i e_i  and  e kernel     in one program       dh = f (e kernel) - w kernel_t
    f      = w exp(r - lse)             slope_i = f e_i, and - w for the target t
    second (f e)^T h                    in the same program, with items in place of rows
                                        dkernel = (f e)^T h, and - w h in row t

All items of a row have one reference r, so no sums of exponentials are needed before the first
pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import output_loss as mosaic
from pallas_kernels.score_tiles import TILE_ROWS
from pallas_kernels.slopes_product import MAX_HIDDEN, slopes_product
from sparsejax.losses import SoftmaxCrossEntropy
from sparsejax.ops import item_chunks, kept_scores, softmax
from sparsejax.ops.chunked_loss import Layer, LossBatch, Method
from sparsejax.ops.item_chunks import Shard
from sparsejax.ops.scatter_gradient import row_gradient
from sparsejax.sparse import CSR

# Most items in a chunk. Its gradient is in float32, and its rows are rounded if they have another
# dtype.
CHUNK_ITEMS = 2**19


def is_chosen(method: Method, batch: LossBatch, layer: Layer) -> bool:
    """Whether this form can compute the loss and is the fastest here."""
    if method.form == "twice":
        return True
    return (
        method.form is None
        and method.chunk_scores is None
        and batch.h.shape[1] <= MAX_HIDDEN
        and kept_scores.is_plain(method, batch, layer)
    )


def loss_and_gradients(
    method: Method, batch: LossBatch, layer: Layer, shard: Shard
) -> tuple[Float[Array, "batch"], Float[Array, "batch hidden"], Layer]:
    """The losses, and the gradients of their weighted sum in `h` and the layer.

    The second pass takes no time for ignored rows, and the first pass half as long if half of
    the rows are ignored. Each device calls this function like `chunked_loss.loss_and_updates`.

    Args:
      method: how the loss is computed. Its rule is a softmax without smoothing.
      batch: vectors, and targets.
      layer: kernel and bias of the device's items.
      shard: the part of a mesh's work that this device does.
    """
    rule = method.rule
    assert isinstance(rule, SoftmaxCrossEntropy)
    rows, wanted, limit, finish = kept_scores.packed_rows(
        batch, layer, shard, TILE_ROWS
    )
    dtype = rows.weights.dtype
    total, product, reference = _first_pass(rows, wanted, layer, limit, shard)
    one, score = rows.found
    known = softmax.Normaliser(reference, total, one, score)
    losses, _, (_, lse, factor) = softmax.loss_and_slopes(
        rule, known, rows.weights, None, Shard()
    )
    slope = jnp.where(factor == 0, 0, factor * jnp.exp(reference - lse))
    of_target = jnp.where(rows.weights == 0, 0, -rows.weights * one)
    columns = rows.columns
    inside = (columns >= 0) & (columns < jnp.minimum(limit, len(layer.kernel)))
    vectors = layer.kernel.at[jnp.where(inside, columns, 0)].get(mode="clip")
    vectors = jnp.where(inside[:, None], vectors.astype(jnp.bfloat16), 0)
    dh = product * slope[:, None] + of_target[:, None] * vectors.astype(dtype)
    gradients = _second_pass(rows, wanted, layer, limit, factor, lse)
    gradients = _with_targets(gradients, rows, inside, of_target)
    return *finish(losses, dh), gradients


def _chunk(layer: Layer, start, size: int) -> Layer:
    """A chunk of items, in the dtypes that the GPU programs require."""
    kernel = item_chunks.slice_rows(layer.kernel, start, size).astype(jnp.bfloat16)
    bias = layer.bias
    if bias is not None:
        bias = item_chunks.slice_rows(bias, start, size).astype(jnp.float32)
    return Layer(kernel, bias, None)


def _fold(step, carry, layer: Layer, size: int):
    """Folds `carry = step(start, size, chunk, carry)` over chunks of items."""
    return item_chunks.fold(
        lambda start, size, carry: step(start, size, _chunk(layer, start, size), carry),
        carry,
        len(layer.kernel),
        size,
    )


def _first_pass(
    rows: kept_scores.ScoredRows, wanted, layer: Layer, limit, shard: Shard
):
    """The sums of exponentials over all items, `e kernel` over the device's items, and the
    references.

    If a row's largest score exceeds its target's by far, the largest score becomes the reference.
    """
    items, h = len(layer.kernel), rows.h
    size = items if layer.kernel.dtype == h.dtype else min(items, CHUNK_ITEMS)

    def largest():
        def step(start, size, chunk, known):
            return mosaic.normalise(
                *(h, chunk.kernel, chunk.bias, None, None, known),
                start=0,
                size=size,
                limit=limit - start,
            )

        known = mosaic.no_scores(len(h), with_labels=False)
        found = jnp.max(_fold(step, known, layer, size)[0], axis=0)
        return softmax.finite(lax.pmax(found, shard.items) if shard.items else found)

    def sums(h, reference):
        def step(start, size, chunk, carry):
            values, _, product = slopes_product(
                kept_scores.exponential,
                *(h, chunk.kernel, chunk.bias),
                kept_scores.no_labels(len(h), size),
                [jnp.ones_like(reference), reference],
                start=0,
                size=size,
                limit=limit - start,
                with_slopes=False,
            )
            assert values is not None
            made = jnp.sum(values, axis=0), jnp.sum(product, axis=0)
            return jax.tree.map(jnp.add, carry, made)

        zeros = jnp.zeros_like(reference), jnp.zeros(h.shape, reference.dtype)
        return _fold(step, zeros, layer, size)

    def made(state):
        attempt, reference, *_ = state
        reference = lax.cond(attempt > 0, largest, lambda: reference)
        half = len(h) // (2 * TILE_ROWS) * TILE_ROWS

        def of_half():
            found = sums(h[:half], reference[:half])
            more = len(h) - half
            return jax.tree.map(
                lambda x: jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1))), found
            )

        if half:
            found = lax.cond(wanted <= half, of_half, lambda: sums(h, reference))
        else:
            found = sums(h, reference)
        return attempt + 1, reference, shard.sum_over_items(found[0]), found[1]

    def is_missing(state):
        attempt, _, total, _ = state
        again = kept_scores.out_of_range(total, rows.skipped)
        return (attempt == 0) | ((attempt == 1) & again)

    zeros = jnp.zeros_like(rows.reference), jnp.zeros(h.shape, rows.reference.dtype)
    first = jnp.zeros((), jnp.int32), rows.reference, *zeros
    _, reference, total, product = lax.while_loop(is_missing, made, first)
    return total, product, reference


def _second_pass(
    rows: kept_scores.ScoredRows, wanted, layer: Layer, limit, factor, lse
):
    """Computes `slopes^T h` and the sums of the slopes, without the term `-w` of the targets."""
    # Rows with factor 0 become 0, because 0 * inf would be NaN.
    h = jnp.where((factor != 0)[:, None], rows.h, 0)
    items, signs = len(layer.kernel), 1 + jnp.any(factor < 0).astype(jnp.int32)
    with_sums = layer.bias is not None

    def of_sign(i, gradients: Layer) -> Layer:
        """Adds the terms of rows with positive factors (i = 0) or negative factors (i = 1)."""
        sign = (1 - 2 * i).astype(factor.dtype)
        kept = (factor * sign > 0) | jnp.isnan(factor)
        shift = jnp.where(kept, jnp.log(jnp.abs(factor)) - lse, -jnp.inf)

        def step(start, size, chunk, gradients):
            inside = jnp.arange(size, dtype=jnp.int32) < limit - start
            vectors = [inside.astype(jnp.float32)]
            values, _, product = slopes_product(
                _slopes_of_item,
                *(chunk.kernel, h, shift),
                kept_scores.no_labels(size, len(h)),
                vectors if chunk.bias is None else [*vectors, chunk.bias],
                start=0,
                size=len(h),
                limit=wanted,
                with_values=with_sums,
                with_slopes=False,
            )
            kernel = _added(gradients.kernel, sign * jnp.sum(product, axis=0), start)
            bias = gradients.bias
            if bias is not None and values is not None:
                values = jnp.where(inside, jnp.sum(values, axis=0), 0)
                bias = _added(bias, sign * values, start)
            return Layer(kernel, bias, None)

        return _fold(step, gradients, layer, min(items, CHUNK_ITEMS))

    return lax.fori_loop(0, signs, of_sign, jax.tree.map(jnp.zeros_like, layer))


def _slopes_of_item(scores, labels, listed, inside, *bias):
    """Slopes for `slopes_product`, which is called with items as rows; `scores` already include
    the shift.
    """
    del labels, listed, inside
    for x in bias:
        scores = scores + x
    e = jnp.exp(scores)
    return e, e


def _added(array: jax.Array, rows: jax.Array, start) -> jax.Array:
    """Adds `rows` to `array` from row `start` on."""
    before = item_chunks.slice_rows(array, start, len(rows)).astype(rows.dtype)
    return item_chunks.write_rows(array, before + rows, start)


def _with_targets(
    gradients: Layer, rows: kept_scores.ScoredRows, inside, of_target
) -> Layer:
    """Adds the term `-w` of the targets to the gradients."""
    items = len(gradients.kernel)
    columns = jnp.where(inside, rows.columns, items)
    indptr = jnp.arange(len(columns) + 1, dtype=jnp.int32)
    labels = CSR(None, columns, indptr, num_cols=items)
    h = jnp.where((of_target != 0)[:, None], rows.h, 0).astype(of_target.dtype)
    terms = [h * of_target[:, None]]
    if gradients.bias is not None:
        terms.append(of_target[:, None])
    ids, values = row_gradient([labels], [jnp.concatenate(terms, axis=1)], items)
    width = h.shape[1]

    def added(array, values):
        known = array.at[ids].get(mode="fill", fill_value=0).astype(values.dtype)
        return array.at[ids].set(
            (known + values).astype(array.dtype), mode="drop", unique_indices=False
        )

    bias = gradients.bias
    if bias is not None:
        bias = added(bias, values[:, width])
    return Layer(added(gradients.kernel, values[:, :width]), bias, None)
