"""Softmax cross-entropy of a linear layer over very many items, without its scores."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from pallas_kernels.matmul_tiles import STEP
from pallas_kernels.score_tiles import TILE_ITEMS
from sparsejax.losses import SoftmaxCrossEntropy
from sparsejax.mesh.promotion import promoting
from sparsejax.ops.chunked_loss import operand_dtype
from sparsejax.ops.implementations import (
    HOPPER,
    Implementation,
    check_implementation,
    custom_call_can_run,
)
from sparsejax.ops.item_chunks import accumulator, arrays, check_layer
from sparsejax.ops.output_loss import output_loss_in_chunks
from sparsejax.ops.precision import Precision, check_precision
from sparsejax.ops.targets import IGNORED, as_targets, check_targets


@promoting()
def linear_cross_entropy(
    h: Float[Array, "*batch hidden"],
    kernel: Float[Array, "items hidden"],
    targets: jax.Array | np.ndarray,
    *,
    bias: Float[Array, "items"] | None = None,
    scale: Float[Array, "items"] | None = None,
    weights: Float[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: int | None = None,
    kernel_spec: P | None = None,
    implementation: Implementation = None,
    precision: Precision = None,
) -> Float[Array, ""]:
    """Mean softmax cross-entropy of one target a row, over all items.

    >>> h, kernel = jnp.zeros((2, 3, 8)), jnp.ones((1000, 8))
    >>> targets = jnp.array([[5, 0, 999], [7, -1, -1]])
    >>> round(float(linear_cross_entropy(h, kernel, targets)), 4)  # log(1000)
    6.9078

    With e `label_smoothing` and z `z_loss`, for each row r of the batch, of any shape::

        s_i     = (h_r . kernel_i) scale_i + bias_i
        lse     = log(sum_i exp(s_i))
        loss_r  = lse - (1 - e) s_target - e mean_i(s_i) + z lse^2

        result  = sum_r weights_r loss_r / sum_r weights_r      over rows with a target

    It is the mean of `optax.softmax_cross_entropy_with_integer_labels(h @ kernel.T,
    targets)`, but scores exist for a chunk of items at a time: beyond the gradients,
    memory does not grow with the number of items. As in `output_loss`, the forward pass
    makes the gradients too if they are wanted, in four matrix products. It is
    differentiable in reverse mode in `h`, `kernel`, `bias`, `scale` and `weights`. Losses
    and sums are float32.

    Rows with target -1 are ignored: they add nothing to loss and gradients, whatever values
    they have. They take almost no time if `targets` is a NumPy array (on one device), and
    little time in the two forms below. Otherwise they are computed: if many rows are ignored, remove them
    from `h` first. If all rows are ignored or have weight 0, the result and the gradients
    are 0.

    Without `scale` and smoothing, Hopper GPUs compute the gradients in one of two forms. Vectors
    of up to 256 numbers take two passes over the scores, and no score is written. Wider
    vectors in bfloat16 take three products: the scores of some rows, as many as fit in 1 GB,
    are kept (if these are 1,024 rows, or all, and at least a sixteenth of all). Then the errors
    of the gradients are .2 to .5 % of their norm, otherwise .2 %.

    Args:
      h: hidden vectors.
      kernel: a row for each item.
      targets: `[*batch]` integers: an item, or -1. In a NumPy array any other number is an
        error. In a JAX array, which may be on a device, it makes the loss NaN.
      bias: numbers added to the scores. -inf excludes an item, which no row may have as its
        target. Smoothing leaves excluded items out of the mean. None is 0.
      scale: factor of the scores, such as 1 / norm for cosines. None is 1.
      weights: factors of the rows' losses. None is 1 for each.
      label_smoothing: share of each target's weight that is spread over all items.
      z_loss: weight of `lse^2`.
      num_items: the kernel's rows from this one on are padding; None if there are none.
      kernel_spec: how the kernel is divided over the mesh that is set, see `output_loss`:
        `P("model")` or `P(("model", "data"))`. Rows of the batch may be divided over "data".
      implementation: "mosaic_gpu", "xla" or "xla_gpu", as in `output_loss`; None picks
        the fastest here. "mosaic_gpu" takes a kernel whose rows are a multiple of 256,
        and `hidden` a multiple of 64. Here operands of other sizes are padded with
        zeros, which copies the kernel; not on a mesh. XLA's forms take every size.
      precision: precision of the products of float32 operands, as in `output_loss`.

    Raises:
      ValueError: shapes do not match, a target in a NumPy array is no item (the message says
        where), or `output_loss` raises it.
      TypeError: targets are not integers, or `h` and `kernel` differ in dtype.
      NotImplementedError: "mosaic_gpu" cannot take these operands, or the loss itself
        is differentiated in forward mode.
    """
    rule = SoftmaxCrossEntropy(label_smoothing=label_smoothing, z_loss=z_loss)
    check_implementation(implementation)
    precision = check_precision(precision)
    h, kernel, bias, scale, weights = arrays(h, kernel, bias, scale, weights)
    if h.ndim < 1 or kernel.ndim != 2 or h.shape[-1] != kernel.shape[1]:
        raise ValueError(
            "expected h [..., hidden] and kernel [items, hidden], got "
            f"{h.shape} and {kernel.shape}"
        )
    batch = h.shape[:-1]
    if num_items is None:
        num_items = len(kernel)
    if not 0 < num_items <= len(kernel):
        raise ValueError(
            f"num_items is {num_items:,} but the kernel has {len(kernel):,} rows; there "
            "must be an item, and a row for each"
        )
    check_targets(targets, batch, num_items)
    if weights is not None and weights.shape != batch:
        raise ValueError(
            f"weights has shape {weights.shape}; one for each hidden vector: {batch}"
        )
    rows = h.reshape(math.prod(batch), h.shape[-1])
    check_layer(rows, kernel, bias, scale)
    dtype = accumulator(h.dtype)
    if weights is None:
        share = jnp.ones(len(rows), dtype)
    else:
        share = weights.reshape(-1).astype(dtype)
    if isinstance(targets, np.ndarray) and kernel_spec is None:
        some = _with_targets(targets.reshape(-1))
        targets = targets.reshape(-1)[some]
        rows, share = (
            x.at[some].get(unique_indices=True, indices_are_sorted=True)
            for x in (rows, share)
        )
    labels = as_targets(targets, num_items)
    kept = labels.columns != IGNORED
    total = jnp.sum(jnp.where(kept, share, 0))
    nothing = total == 0
    # The selection comes last, so that an ignored row may have any values, and its gradient is 0.
    share = jnp.where(kept & ~nothing, share / jnp.where(nothing, 1, total), 0)
    if kernel_spec is None:
        operands = rows, kernel, bias, scale
        rows, kernel, bias, scale = _padded(operands, implementation, precision)
    return output_loss_in_chunks(
        rows,
        kernel,
        bias,
        labels,
        loss=rule,
        scale=scale,
        weights=share,
        kernel_spec=kernel_spec,
        implementation=implementation,
        precision=precision,
    )


def _with_targets(targets: np.ndarray) -> np.ndarray:
    """The indices of all rows with targets, filled up with other rows to one of eight sizes."""
    wanted, others = (
        np.flatnonzero(x) for x in (targets != IGNORED, targets == IGNORED)
    )
    step = -(-len(targets) // 8)
    size = min(len(targets), max(1, -(-len(wanted) // step)) * step)
    return np.sort(np.concatenate([wanted, others[: size - len(wanted)]]))


def _padded(operands, implementation: Implementation, precision: Precision):
    """Pads the operands with zeros to sizes that the GPU programs support, if these are used."""
    h, kernel, bias, scale = operands
    if implementation is None and custom_call_can_run(HOPPER):
        dtype = operand_dtype(precision, h.dtype, len(h), len(kernel))
        runs = dtype == jnp.bfloat16
    else:
        runs = implementation == "mosaic_gpu"
    if not runs:
        return operands
    items, hidden = -len(kernel) % TILE_ITEMS, -kernel.shape[1] % STEP
    if hidden:
        h = jnp.pad(h, ((0, 0), (0, hidden)))
    if items or hidden:
        kernel = jnp.pad(kernel, ((0, items), (0, hidden)))
    bias, scale = (None if x is None else jnp.pad(x, (0, items)) for x in (bias, scale))
    return h, kernel, bias, scale
