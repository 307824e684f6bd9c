"""An output layer's loss against sparse labels, without an array `[batch, items]`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from pallas_kernels.weight_gradient import TILE, tile_columns, weight_gradient
from sparsejax import losses
from sparsejax.mesh.layout import reshard_if_explicit
from sparsejax.mesh.promotion import promoting
from sparsejax.ops import item_chunks, kept_scores, two_passes
from sparsejax.ops.chunked_loss import (
    Layer,
    LossBatch,
    Method,
    Updates,
    over_items,
    weighted_sum,
)
from sparsejax.ops.gram_loss import loss_and_updates
from sparsejax.ops.implementations import Implementation, check_implementation
from sparsejax.ops.precision import Precision, check_precision
from sparsejax.ops.targets import Labels


@promoting()
def output_loss(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: Labels,
    *,
    loss: str | losses.LossRule = "sigmoid_binary_cross_entropy",
    scale: Float[Array, "items"] | None = None,
    weights: Float[Array, "batch"] | None = None,
    kernel_spec: P | None = None,
    implementation: Implementation = None,
    precision: Precision = None,
) -> Float[Array, ""]:
    """Loss of an output layer over all items against sparse labels.

    >>> labels = CSR.from_scipy(scipy.sparse.csr_array([[True, False], [False, True]]))
    >>> float(output_loss(jnp.eye(2), jnp.eye(2), None, labels, loss="l2_loss"))
    0.0

    ::

        score_bi = (h_b . kernel_i) scale_i + bias_i
        result   = sum_b weights_b loss_b(score_b, labels_b)

    The loss is one weighted scalar (a mean is `weights = 1 / batch`). So under
    differentiation the forward pass makes the gradients too, and the backward pass only
    scales them. The forward pass takes three matrix products for an elementwise loss and
    four for softmax. Differentiable in reverse mode, in everything except the labels,
    whose values count as constants. With "xla" the gradients are also differentiable in
    forward mode (`jax.hessian`).

    Scores exist for a chunk of items at a time: memory beyond the gradients does not
    grow with the number of items. (A CPU keeps up to 2^25 scores of a softmax, which takes
    134 MB and saves one of the four products.) Products are summed, and losses computed, in
    float32. Operands are used as they are, except for float32 on a GPU, see `precision`.
    With bfloat16 operands the score gradients are rounded to bfloat16 before their
    two products. Each gradient has the dtype of its operand.
    For large batches with few labels, "l2_loss" over all items makes no scores: Gram
    matrices give the same loss and gradients (see `gram_loss`). The rounding error of the
    loss is then relative to the terms of its sums, which may be larger than the loss, and
    the gradients are not differentiable in reverse mode.

    An example with weight 0 contributes nothing, even if its values are NaN. The gradient of
    its weight is still its loss. A row of labels that does not fit in an overfull CSR, or has
    an index outside the items, makes the result NaN.

    Args:
      h: hidden vectors.
      kernel: one row for each item. `kernel`, `bias` and `scale` may have more rows than
        `labels` has columns. These rows are padding: no loss, and a gradient of zeros.
      bias: numbers added to the scores. -inf excludes an item: its loss is 0, or infinite if
        the item has a label. None is 0.
      labels: `[batch, items]`, indices unique in a row. Labels in blocks on a mesh also
        say how the operands are divided: the kernel's rows (a multiple of 256) over
        "model" and then "data", `h` over "data".
      loss: name of a rule in `sparsejax.losses`, or a rule.
      scale: factor of the scores, such as 1 / norm for cosines. None is 1.
      weights: factors of the examples' losses. None is 1 for each.
      kernel_spec: how the kernel is divided over the mesh that is set, for labels that
        are not in blocks: `P("model")` divides the items over the mesh's axis "model".
        Each device works on its own items, for all examples. Where the mesh has an axis
        "data", the items are divided over that axis, too. A kernel that is sharded by
        `P(("model", "data"))` need not move: only `h` and its gradient do.
      implementation: "mosaic_gpu" is the program for Hopper GPUs, for operands that are
        bfloat16 or may be rounded to it, labels without values, and the rules of
        `sparsejax.losses`. "xla" is the reference, "xla_gpu" the reference as GPUs run
        it. None chooses the fastest one here.
      precision: precision of the products of float32 operands. "highest" is float32.
        "high" has errors of about 2^-16 on a GPU: three products of bfloat16 matrices.
        "default" or None takes TF32 on a GPU (errors of 2^-11), by XLA. With more than
        134 million scores on a Hopper GPU, "mosaic_gpu" runs instead: it rounds `h`,
        the kernel and the derivative in the scores to bfloat16 (2^-9), a chunk of items
        at a time. On a CPU all of them are float32.

    Raises:
      ValueError: shapes do not match, an unknown loss, implementation or precision, or a
        spec that does not fit the mesh.
      TypeError: `h` and `kernel` differ in dtype.
      NotImplementedError: "mosaic_gpu" cannot take these operands; or the loss itself is
        differentiated in forward mode.
    """
    rule, precision = losses.get(loss), check_precision(precision)
    h, kernel, bias, scale = item_chunks.arrays(h, kernel, bias, scale)
    (weights,) = item_chunks.arrays(weights)
    _check(h, kernel, bias, labels, scale, implementation)
    if weights is not None and weights.shape != h.shape[:1]:
        raise ValueError(
            f"weights has shape {weights.shape}; one for each of {h.shape[0]:,} rows"
        )
    return output_loss_in_chunks(
        h,
        kernel,
        bias,
        labels,
        loss=rule,
        scale=scale,
        weights=weights,
        kernel_spec=kernel_spec,
        implementation=implementation,
        precision=precision,
    )


def output_loss_in_chunks(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: Labels,
    *,
    loss: losses.LossRule,
    scale: Float[Array, "items"] | None = None,
    weights: Float[Array, "batch"] | None = None,
    precision: Precision = None,
    **options: Any,
) -> Float[Array, ""]:
    """Computes `output_loss` from checked arguments; `options` are further fields of `Method`."""
    how = Method(rule=loss, precision=check_precision(precision), **options)
    (h, weights), layer = _typed(how, labels, (h, weights), (kernel, bias, scale))
    with _forward_mode_refused():
        return _weighted(how, h, *layer, weights, labels)


@promoting()
def output_loss_per_example(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: Labels,
    *,
    loss: str | losses.LossRule = "sigmoid_binary_cross_entropy",
    scale: Float[Array, "items"] | None = None,
    kernel_spec: P | None = None,
    implementation: Implementation = None,
    precision: Precision = None,
) -> Float[Array, "batch"]:
    """The loss of each row, `loss_b` of `output_loss`, for evaluation; it takes equal arguments.

    >>> labels = CSR.from_scipy(scipy.sparse.csr_array([[True, False], [False, False]]))
    >>> kernel = jnp.eye(2)
    >>> output_loss_per_example(kernel, kernel, None, labels, loss="l2_loss").tolist()
    [0.0, 0.5]

    Differentiable, but the scores are then computed once more: for training, a weighted
    sum by `output_loss` is cheaper.
    """
    rule, precision = losses.get(loss), check_precision(precision)
    h, kernel, bias, scale = item_chunks.arrays(h, kernel, bias, scale)
    _check(h, kernel, bias, labels, scale, implementation)
    return output_loss_per_example_in_chunks(
        h,
        kernel,
        bias,
        labels,
        loss=rule,
        scale=scale,
        kernel_spec=kernel_spec,
        implementation=implementation,
        precision=precision,
    )


def output_loss_per_example_in_chunks(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: Labels,
    *,
    loss: losses.LossRule,
    scale: Float[Array, "items"] | None = None,
    precision: Precision = None,
    **options: Any,
) -> Float[Array, "batch"]:
    """Computes `output_loss_per_example` from checked arguments; see `output_loss_in_chunks`."""
    how = Method(rule=loss, precision=check_precision(precision), **options)
    h, layer = _typed(how, labels, h, (kernel, bias, scale))
    with _forward_mode_refused():
        return _per_example(how, h, *layer, labels)


@contextlib.contextmanager
def _forward_mode_refused() -> Iterator[None]:
    """While this context is open, JAX's error about forward mode is replaced by a clearer one."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise NotImplementedError(
            "output_loss has derivatives in reverse mode: use jax.grad, jax.vjp or "
            "jax.jacrev, not jax.jvp, jax.linearize or jax.jacfwd of the loss itself "
            "(jax.hessian, and jax.jvp of a gradient, work)"
        ) from error


def _check(h, kernel, bias, labels, scale, implementation) -> None:
    check_implementation(implementation)
    item_chunks.check_layer(h, kernel, bias, scale)
    item_chunks.check_matrix("labels", labels, h, kernel)


def _write_gradients(start, chunk: Layer, gradients: Any) -> Any:
    """An `update` for chunks: rounds a chunk's gradients, and writes them into arrays for all
    items.
    """

    def write(array, rows):
        return item_chunks.write_rows(array, rows, start)

    return jax.tree.map(write, gradients, chunk)


def _write_kernel_gradient(
    start, slopes, h, gradients: Any
) -> tuple[Any, jax.Array | None]:
    """Writes a chunk of the kernel's gradient, where possible by a GPU program, in place."""
    kernel, with_sums = gradients.kernel, gradients.bias is not None
    whole = slopes.shape[1] == len(kernel)
    if whole or _by_parts_of_the_batch(slopes, h):
        made = item_chunks.dot(slopes, h, (0, 0), kernel.dtype)
        kernel = made if whole else item_chunks.write_rows(kernel, made, start)
        sums = jnp.sum(slopes, axis=0, dtype=jnp.float32) if with_sums else None
    else:
        kernel, sums = weight_gradient(slopes, h, kernel, start, with_sums=with_sums)
    return gradients._replace(kernel=kernel), sums


def _by_parts_of_the_batch(slopes: jax.Array, h: jax.Array) -> bool:
    """Whether XLA's product is faster: a chunk has too few tiles for all SMs in a large batch.

    XLA then sums several parts of the batch in parallel. With 16,384 rows and 8,192 items our
    program took twice as long as with enough tiles (hidden 256, H200).
    """
    batch, hidden = h.shape
    tiles = slopes.shape[1] // TILE * (hidden // tile_columns(hidden))
    return batch > 2**13 and tiles < 96


# --- derivatives, and choice of the implementation ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(how, h, kernel, bias, scale, weights, labels):
    per_example, _ = _run(how, h, kernel, bias, scale, weights, labels, False)
    return weighted_sum(per_example, weights)


def _weighted_forward(how, h, kernel, bias, scale, weights, labels):
    per_example, gradients = _run(how, h, kernel, bias, scale, weights, labels, True)
    if weights is None:
        dweights = None
    else:
        dweights = per_example.astype(weights.dtype)
    return weighted_sum(per_example, weights), (*gradients, dweights)


def _weighted_backward(how, gradients, cotangent):
    return *jax.tree.map(lambda g: (cotangent * g).astype(g.dtype), gradients), None


_weighted.defvjp(_weighted_forward, _weighted_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_example(how, h, kernel, bias, scale, labels):
    return _run(how, h, kernel, bias, scale, None, labels, False)[0]


def _per_example_forward(how, *operands):
    # Forward mode does not support `_per_example`, so it is not called here.
    h, kernel, bias, scale, labels = operands
    return _run(how, h, kernel, bias, scale, None, labels, False)[0], operands


def _per_example_backward(how, operands, cotangents):
    h, kernel, bias, scale, labels = operands
    _, gradients = _run(how, h, kernel, bias, scale, cotangents, labels, True)
    return *gradients, None


_per_example.defvjp(_per_example_forward, _per_example_backward)


@functools.partial(jax.jit, static_argnames=("how", "differentiate"))
def _compiled(
    h, kernel, bias, scale, weights, labels, *, how: Method, differentiate: bool
):
    """The losses `[batch]` without weights, and the gradients of their weighted sum."""

    def local(shard, batch, whole):
        if differentiate and (
            rows := kept_scores.rows_of_block(how, batch, whole, shard)
        ):
            per_example, dh, gradients = kept_scores.loss_and_gradients(
                how, batch, whole, shard, rows
            )
            return per_example, dh.astype(h.dtype), gradients
        if differentiate and two_passes.is_chosen(how, batch, whole):
            per_example, dh, gradients = two_passes.loss_and_gradients(
                how, batch, whole, shard
            )
            return per_example, dh.astype(h.dtype), gradients

        # Padding rows may be in no chunk. Then they are not written.
        written = item_chunks.rounded_items(labels.num_cols, len(kernel))
        everything = shard.items or written == len(kernel)
        unwritten = _empty_like if everything else jnp.zeros_like

        per_example, dh, gradients = loss_and_updates(
            how,
            batch,
            jax.tree.map(unwritten, whole) if differentiate else None,
            Updates(
                layer=lambda _: whole,
                update=_write_gradients if differentiate else None,
                update_kernel=_write_kernel_gradient,
                gradient_dtype=kernel.dtype,
            ),
            shard,
            at_once=how.chunk_scores is None,
        )
        return per_example, None if dh is None else dh.astype(h.dtype), gradients

    per_example, dh, gradients = over_items(
        local,
        LossBatch(h, labels, weights),
        Layer(kernel, bias, scale),
        how.kernel_spec,
    )
    return per_example, None if gradients is None else (dh, *gradients)


def _typed(how: Method, labels: Labels, rows, items):
    """Adds the mesh axes of the gradients to the types of arrays with a row for each example or
    item.
    """
    num_rows = len(items[0])
    shard = item_chunks.shard_of(how.kernel_spec, labels, labels.num_rows, num_rows)
    if shard is None:
        return rows, items
    rows = reshard_if_explicit(rows, shard.rows_spec)
    return rows, reshard_if_explicit(items, shard.items_spec)


def _empty_like(array):
    return lax.empty(array.shape, array.dtype)


def _run(how, h, kernel, bias, scale, weights, labels, differentiate):
    arguments = h, kernel, bias, scale, weights, labels
    return _compiled(*arguments, how=how, differentiate=differentiate)
