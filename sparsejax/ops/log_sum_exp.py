"""The softmax's normaliser over items whose vectors are computed in parts and not stored.

Two passes over the parts compute it and its gradient, with the chunks of `chunked_loss`::

    first   lse_b = log sum_i exp(s_bi)                 `with_scores`, then `of_scores`
    second  slope_bi = weight_b exp(s_bi - lse_b)       `gradients_of_part`
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.ops import item_chunks, softmax
from sparsejax.ops.chunked_loss import (
    Chunks,
    Layer,
    Method,
    MosaicChunks,
    XlaChunks,
    layer_gradients,
    with_mosaic,
)
from sparsejax.ops.implementations import xla_is_for_gpu
from sparsejax.ops.targets import IGNORED, TargetColumns, as_targets


def _by_mosaic(method: Method, h: jax.Array, layer: Layer) -> bool:
    none = as_targets(jnp.full(len(h), IGNORED, jnp.int32), len(layer.kernel))
    return with_mosaic(method, h, layer, none)


def _chunks(method: Method, h, layer: Layer, limit, *, with_product: bool) -> Chunks:
    # The index -1 means that a row has no label.
    labels = TargetColumns(jnp.full(len(h), -1, jnp.int32))
    if _by_mosaic(method, h, layer):
        h = h.astype(jnp.bfloat16)
        options = {"with_values": False, "with_product": with_product}
        return MosaicChunks(h, labels, limit, **options)
    for_gpu = xla_is_for_gpu(method.implementation)
    return XlaChunks(h, labels, limit, for_gpu=for_gpu, precision=method.precision)


def no_scores(
    method: Method, h: Float[Array, "batch hidden"], layer: Layer
) -> list[Float[Array, "parts padded"]]:
    """The initial `known` of `with_scores`; only shapes and dtypes of the layer are read."""
    return _chunks(method, h, layer, 0, with_product=False).no_scores()


def with_scores(
    method: Method,
    h: Float[Array, "batch hidden"],
    layer: Layer,
    limit: jax.typing.ArrayLike,
    known: list[Float[Array, "parts padded"]],
) -> list[Float[Array, "parts padded"]]:
    """Adds the scores of one part's items to `known`, and returns it.

    Args:
      method: how scores are computed.
      h: hidden vectors.
      layer: the layer of the items of the part.
      limit: items of the part from this one on are padding.
      known: arrays that the last call returned, or `no_scores`.
    """
    chunks, items = (
        _chunks(method, h, layer, limit, with_product=False),
        len(layer.kernel),
    )
    size = chunks.size(items, method.chunk_scores)
    return item_chunks.fold(
        lambda start, size, known: chunks.normalise(start, size, layer, known),
        known,
        items,
        chunks.size_to_normalise(items, size, layer),
    )


def of_scores(
    known: list[Float[Array, "parts padded"]], batch: int, axes: Any
) -> Float[Array, "batch"]:
    """The logarithm of each row's sum, over the devices along `axes` (None: one device)."""
    largest, total = (x[:, :batch] for x in known[:2])
    found = softmax.Normaliser.merge([largest, total, *[jnp.zeros_like(total)] * 2])
    if axes is not None:
        found = softmax.Normaliser.merge(lax.all_gather(tuple(found), axes))
    return softmax.finite(found.largest) + jnp.log(found.total)


def target_scores(
    method: Method,
    h: Float[Array, "batch hidden"],
    layer: Layer,
    limit: jax.typing.ArrayLike,
    columns: Int[Array, "batch"],
) -> Float[Array, "batch"]:
    """The score of each row's target, rounded as in the products; 0 if another part has it."""
    if _by_mosaic(method, h, layer):
        h = h.astype(jnp.bfloat16)
    return softmax.target_scores(h, layer, TargetColumns(columns), limit)[1]


def gradients_of_part(
    method: Method,
    h: Float[Array, "batch hidden"],
    layer: Layer,
    limit: jax.typing.ArrayLike,
    log_sums: Float[Array, "batch"],
    weights: Float[Array, "batch"],
) -> tuple[Layer, Float[Array, "batch hidden"]]:
    """The gradients of `sum_b weights_b lse_b` in a part's layer, and this part's term in `h`.

    Args:
      method: how scores are computed.
      h: hidden vectors.
      layer: the layer of the items of the part.
      limit: items of the part from this one on are padding.
      log_sums: the logarithm of each row's sum over all parts, returned by `of_scores`.
      weights: factors of the rows. A row of weight 0 adds nothing to the gradients.
    """
    chunks = _chunks(method, h, layer, limit, with_product=True)
    items, dtype = len(layer.kernel), item_chunks.accumulator(h.dtype)
    # Rows with weight 0 become 0, because 0 * inf would be NaN.
    h = jnp.where((weights != 0)[:, None], chunks.h, 0)
    dot = functools.partial(item_chunks.dot, precision=method.precision)

    def step(start, size, state):
        gradients, dh = state
        _, delta, product = chunks.slopes(
            start, size, layer, _slopes, (weights, log_sums)
        )
        chunk = jax.tree.map(lambda x: item_chunks.slice_rows(x, start, size), layer)
        made, more = layer_gradients(chunk, delta, delta, product, h, dot)

        def write(array, rows):
            return item_chunks.write_rows(array, rows, start)

        return jax.tree.map(write, gradients, made), dh + more

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), layer)
    size = chunks.size(items, method.chunk_scores)
    return item_chunks.fold(
        step, (zeros, jnp.zeros(h.shape, dtype)), items, min(size, items)
    )


def _slopes(scores, labels, listed, weights, log_sums):
    """Score gradients for `Chunks.slopes`, without values of the loss."""
    del labels, listed
    return None, weights * jnp.exp(scores - log_sums)
