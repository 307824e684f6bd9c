"""Parts of the softmax over all items: sums of exponentials, loss, and score gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sparsejax.losses import SoftmaxCrossEntropy
from sparsejax.ops.item_chunks import Shard, accumulator
from sparsejax.ops.targets import TargetColumns


class Normaliser(NamedTuple):
    """The sums of softmax, `[batch]` each, over the items that were seen so far."""

    largest: jax.Array
    total: jax.Array  # sum of exp(score - largest)
    label_sum: jax.Array
    label_scores: jax.Array  # sum of label times score

    @classmethod
    def merge(cls, known: Iterable[Float[Array, "parts batch"]]) -> Normaliser:
        """The normaliser of all items, merged from the normalisers of parts of the items."""
        largest, total, label_sum, label_scores = known
        all_largest = jnp.max(largest, axis=0)
        shift = finite(all_largest)  # if all scores are -inf, -inf - -inf would be NaN
        total = jnp.sum(total * jnp.exp(largest - shift[None]), axis=0)
        return cls(
            all_largest,
            total,
            jnp.sum(label_sum, axis=0),
            jnp.sum(label_scores, axis=0),
        )


def finite(largest: jax.Array) -> jax.Array:
    """The largest score, or 0 where all scores are -inf."""
    return jnp.where(largest == -jnp.inf, 0, largest)


def loss_and_slopes(
    rule: SoftmaxCrossEntropy,
    found: Normaliser,
    weights: Float[Array, "batch"],
    smoothing: tuple[Float[Array, "batch"], Float[Array, ""]] | None,
    shard: Shard,
) -> tuple[Float[Array, "batch"], Callable[..., Any], list[Float[Array, "batch"]]]:
    """The losses; a function and vectors from which `Chunks.slopes` computes the score
    gradients.

    Args:
      rule: the loss.
      found: sums over the device's items.
      weights: factors of the rows' losses.
      smoothing: the results of `mean_scores`, if the rule smooths labels; otherwise
        None.
      shard: the part of a mesh's work that this device does.
    """
    if shard.items:
        found = Normaliser.merge(lax.all_gather(tuple(found), shard.items))
    log_sum_exp = finite(found.largest) + jnp.log(found.total)
    # A row without labels has loss 0, even if all items are excluded.
    nothing = (found.label_sum == 0) & jnp.isinf(log_sum_exp)
    log_sum_exp = jnp.where(nothing, 0, log_sum_exp)
    # XLA turns a product with a sum that is 0 or 1 into a selection, which would hide NaN.
    factor = jnp.where(jnp.isnan(weights), weights, weights * found.label_sum)
    loss = log_sum_exp
    kept, vectors = 1 - rule.label_smoothing, []
    if rule.z_loss:
        loss = loss + rule.z_loss * jnp.square(log_sum_exp)
    if smoothing is not None:
        means, num_items = smoothing
        loss = loss - rule.label_smoothing * jnp.where(nothing, 0, means)
        vectors.append(factor * (rule.label_smoothing / num_items))
    if rule.z_loss:
        factor = factor * (1 + 2 * rule.z_loss * log_sum_exp)
    label_scores = found.label_scores
    if rule.label_smoothing:  # the check avoids 0 * -inf, which would be NaN
        label_scores = jnp.where(kept == 0, 0, kept * label_scores)
    per_example = found.label_sum * loss - label_scores

    def slopes(scores, labels, listed, weights, log_sum_exp, factor, *shares):
        """Returns no values, and the weighted derivatives; `factor` includes the weights."""
        slopes = factor * jnp.exp(scores - log_sum_exp)
        for share in shares:
            slopes = slopes - jnp.where(scores == -jnp.inf, 0.0, share)
            labels = labels * kept
        return None, jnp.where(listed, slopes - weights * labels, slopes)

    return per_example, slopes, [weights, log_sum_exp, factor, *vectors]


def mean_scores(
    h: Float[Array, "batch hidden"],
    layer: Any,
    limit: jax.typing.ArrayLike,
    shard: Shard,
) -> tuple[Float[Array, "batch"], Float[Array, ""]]:
    """The mean score of the items that are not excluded, and the number of these items.

    ::

        mean_b = h_b . (sum_i scale_i kernel_i) / n + (sum_i bias_i) / n

    The kernel is read once; no score is made.

    Args:
      h: hidden vectors.
      layer: kernel, bias and scale of the device's items.
      limit: kernel rows from this one on are padding.
      shard: the part of a mesh's work that this device does.
    """
    dtype = accumulator(h.dtype)
    kernel, bias, scale = layer
    counted = jnp.arange(len(kernel), dtype=jnp.int32) < limit
    if bias is not None:
        counted &= bias != -jnp.inf
    rows = kernel.astype(dtype)
    if scale is not None:
        rows = rows * scale.astype(dtype)[:, None]
    vector = jnp.sum(jnp.where(counted[:, None], rows, 0), axis=0)
    constant = jnp.zeros((), dtype)
    if bias is not None:
        constant = jnp.sum(jnp.where(counted, bias.astype(dtype), 0))
    count = jnp.sum(counted.astype(dtype))
    vector, constant, count = shard.sum_over_items((vector, constant, count))
    means = jnp.sum(h.astype(dtype) * vector[None], axis=1) + constant
    return means / count, count


def target_scores(
    h: Float[Array, "batch hidden"],
    layer: Any,
    targets: TargetColumns,
    limit: jax.typing.ArrayLike,
) -> tuple[Float[Array, "batch"], Float[Array, "batch"]]:
    """Whether each row's target is one of the device's items, as 1 or 0; and its score.

    The function gathers one row of the kernel for each row of the batch, so that the pass
    over all scores need not search for labels.
    """
    dtype = accumulator(h.dtype)
    kernel, bias, scale = layer
    columns = targets.columns
    inside = (columns >= 0) & (columns < jnp.minimum(limit, len(kernel)))
    place = jnp.where(inside, columns, 0)

    def of_targets(array):
        return array.at[place].get(mode="clip")

    # The kernel is rounded here, as it is in the matrix products.
    rows = of_targets(kernel).astype(h.dtype).astype(dtype)
    found = jnp.sum(h.astype(dtype) * rows, axis=1)
    if scale is not None:
        found = found * of_targets(scale).astype(dtype)
    if bias is not None:
        found = found + of_targets(bias).astype(dtype)
    return inside.astype(dtype), jnp.where(inside, found, 0)
