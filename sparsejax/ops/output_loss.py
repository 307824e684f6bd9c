"""Output projection and loss against sparse labels, without `[batch, items]`."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sparsejax import losses
from sparsejax.ops import item_chunks
from sparsejax.sparse import CSR

Implementation = Literal["xla"] | None

# Scores in a chunk, which a step reads and writes several times: 4 MB stay in the cache
# of a CPU. 2^18 to 2^21 are within 10 % of each other (two cores; batch 64 to 4,096).
_CHUNK_ELEMENTS = 2**20


def output_loss(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: CSR,
    *,
    loss: str | losses.LossRule = "sigmoid_binary_cross_entropy",
    scale: Float[Array, "items"] | None = None,
    weights: Float[Array, "batch"] | None = None,
    implementation: Implementation = None,
) -> Float[Array, ""]:
    """Loss of an output layer over all items against sparse labels.

    ::

        score_bi = (h_b . kernel_i) scale_i + bias_i
        result   = sum_b weights_b loss_b(score_b, labels_b)

    The loss is one weighted scalar (a mean is `weights = 1 / batch`), so under
    differentiation the forward pass makes the gradients too, at three matrix products
    for an elementwise loss and four for softmax, and the backward pass only scales
    them. Differentiable once, in reverse, in everything but the labels, whose values
    count as constants.

    Scores exist for a chunk of items at a time: memory beyond the gradients does not
    grow with the number of items. Operands are used as they are, products are summed
    in float32 (float32 operands: at full precision), losses are made in float32. With
    bfloat16 operands the derivative in the scores is rounded to bfloat16 before its two
    products. Gradients have the dtypes of what they belong to.

    An example with weight 0 contributes nothing, whatever is in it; the same row of
    `weights`' gradient, its loss, is what it is. A row of labels that does not fit in
    an overfull CSR, or has an index outside the items, makes the result NaN.

    Args:
      h: hidden vectors.
      kernel: one row for each item; it, `bias` and `scale` may have more rows than
        `labels` has columns. Those are padding: no loss, and a gradient of zeros.
      bias: added to the scores; -inf denies an item. None is 0.
      labels: `[batch, items]`, indices unique in a row.
      loss: name of a rule in `sparsejax.losses`, or a rule.
      scale: factor of the scores, such as 1 / norm for cosines. None is 1.
      weights: of the examples. None is 1.
      implementation: None picks the best there is; "xla" is the reference.

    Raises:
      ValueError: shapes do not match, or an unknown loss or implementation.
      TypeError: `h` and `kernel` differ in dtype.
    """
    rule = losses.get(loss)
    _check(h, kernel, bias, labels, scale, implementation)
    if weights is not None and weights.shape != h.shape[:1]:
        raise ValueError(
            f"weights has shape {weights.shape}; one for each of {h.shape[0]:,} rows"
        )
    return _weighted(rule, h, kernel, bias, scale, weights, labels)


def output_loss_per_example(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: CSR,
    *,
    loss: str | losses.LossRule = "sigmoid_binary_cross_entropy",
    scale: Float[Array, "items"] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "batch"]:
    """`loss_b` of `output_loss`, for evaluation; the arguments are the same.

    Differentiable, at the price of computing the scores once more: for training, a
    weighted sum by `output_loss` is cheaper.
    """
    rule = losses.get(loss)
    _check(h, kernel, bias, labels, scale, implementation)
    return _per_example(rule, h, kernel, bias, scale, labels)


def _check(h, kernel, bias, labels, scale, implementation) -> None:
    item_chunks.check_implementation(implementation)
    item_chunks.check_layer(h, kernel, bias, scale)
    item_chunks.check_matrix("labels", labels, h, kernel)


# XLA implementation


class _Gradients(NamedTuple):
    """Of the weighted loss, in the order of `_Problem`'s operands."""

    h: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    scale: jax.Array | None


class _Problem(NamedTuple):
    """Operands, and what is derived from them once for all chunks."""

    h: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    scale: jax.Array | None
    weights: jax.Array  # NaN where the labels are broken
    labels: CSR
    rows: jax.Array  # [nse], batch for padding
    values: jax.Array  # [nse]
    size: int

    def fold(self, step, carry):
        return item_chunks.fold(step, carry, self.labels.num_cols, self.size)

    def scores(self, start, size):
        """Scores of a chunk, and where in it the labels are."""
        scores = item_chunks.scores(
            self.h, self.kernel, self.bias, self.scale, start, size
        )
        return scores, item_chunks.local_columns(self.labels, start, size)

    def at_labels(self, scores, columns):
        """`[nse]` scores of the labels; 0 for those that are not in this chunk."""
        return scores.at[self.rows, columns].get(mode="fill", fill_value=0)

    def sum_labels(self, values):
        """`[nse]` values summed over the labels of each row."""
        return jax.ops.segment_sum(values, self.rows, num_segments=len(self.weights))

    def of_row(self, values):
        """`[nse]` the value of each label's row; 0 for padding."""
        return values.at[self.rows].get(mode="fill", fill_value=0)

    def no_gradients(self) -> _Gradients:
        return _Gradients(
            jnp.zeros(self.h.shape, self.weights.dtype),
            jnp.zeros_like(self.kernel),
            None if self.bias is None else jnp.zeros_like(self.bias),
            None if self.scale is None else jnp.zeros_like(self.scale),
        )

    def add_chunk(self, gradients, start, columns, slopes, label_slopes) -> _Gradients:
        """Gradients so far and those of a chunk, from its loss's slopes in the scores.

        `slopes [batch, size]` are right but for the labels, which have theirs in
        `label_slopes [nse]`.
        """
        dtype = self.h.dtype
        size = slopes.shape[1]
        live = self.weights != 0
        weights = self.weights[:, None]
        delta = jnp.where(live[:, None], weights * slopes, 0).astype(dtype)
        label_weights = self.of_row(self.weights)
        label_delta = jnp.where(label_weights != 0, label_weights * label_slopes, 0)
        delta = delta.at[self.rows, columns].set(label_delta.astype(dtype), mode="drop")

        kernel = item_chunks.slice_rows(self.kernel, start, size)
        h = jnp.where(live[:, None], self.h, 0)  # 0 * inf would be NaN
        dkernel = item_chunks.dot(delta, h, (0, 0))
        dbias, dscale = gradients.bias, gradients.scale
        if dbias is not None:
            chunk = jnp.sum(delta, axis=0, dtype=self.weights.dtype)
            dbias = _write(dbias, chunk, start)
        if self.scale is not None:
            # d score_bi / d scale_i = h_b . kernel_i: summed over b, a row of `dkernel`
            # before scaling times a row of `kernel`.
            dscale = _write(dscale, jnp.sum(dkernel * kernel, axis=1), start)
            scale = item_chunks.slice_rows(self.scale, start, size)[:, None]
            kernel = (kernel * scale).astype(dtype)
            dkernel = dkernel * scale
        dh = gradients.h + item_chunks.dot(delta, kernel, (1, 0))
        return _Gradients(dh, _write(gradients.kernel, dkernel, start), dbias, dscale)


def _write(array: jax.Array, chunk: jax.Array, start) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, chunk.astype(array.dtype), start, 0)


def _elementwise(
    rule: losses.ElementwiseLoss, problem: _Problem, gradients: _Gradients | None
) -> tuple[jax.Array, _Gradients | None]:
    """One pass: as if no item had a label, then put right where one has."""

    def step(start, size, carry):
        total, found, gradients = carry
        scores, columns = problem.scores(start, size)
        label_scores = problem.at_labels(scores, columns)
        found = jnp.where(columns < size, label_scores, found)
        values, slopes = _derivative(rule.absent, scores)
        if gradients is not None:
            _, label_slopes = _derivative(listed, label_scores)
            gradients = problem.add_chunk(
                gradients, start, columns, slopes, label_slopes
            )
        return total + jnp.sum(values, axis=1), found, gradients

    def listed(scores):
        return rule.listed(scores, problem.values)

    zeros = jnp.zeros_like(problem.weights)
    carry = zeros, jnp.zeros_like(problem.values), gradients
    total, found, gradients = problem.fold(step, carry)
    total += problem.sum_labels(listed(found) - rule.absent(found))
    return total, gradients


def _softmax(
    problem: _Problem, gradients: _Gradients | None
) -> tuple[jax.Array, _Gradients | None]:
    """A pass for the log-sum-exp and one for the gradients.

    Each makes the scores; where one chunk holds all items XLA makes them once.
    """

    def log_sum_exp_step(start, size, carry):
        largest, total, found = carry
        scores, columns = problem.scores(start, size)
        found = jnp.where(columns < size, problem.at_labels(scores, columns), found)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        shift = jnp.where(new == -jnp.inf, 0, new)  # -inf - -inf would be NaN
        total *= jnp.exp(largest - shift)
        total += jnp.sum(jnp.exp(scores - shift[:, None]), axis=1)
        return new, total, found

    zeros = jnp.zeros_like(problem.weights)
    carry = zeros - jnp.inf, zeros, jnp.zeros_like(problem.values)
    largest, total, found = problem.fold(log_sum_exp_step, carry)
    log_sum_exp = jnp.where(largest == -jnp.inf, 0, largest) + jnp.log(total)
    label_sum = problem.sum_labels(problem.values)
    # A row without labels costs nothing, even where all its items are denied.
    nothing = (label_sum == 0) & jnp.isinf(log_sum_exp)
    log_sum_exp = jnp.where(nothing, 0, log_sum_exp)
    result = label_sum * log_sum_exp - problem.sum_labels(problem.values * found)
    if gradients is None:
        return result, None

    def slopes(scores, log_sum_exp, label_sum):
        return label_sum * jnp.exp(scores - log_sum_exp)

    def gradient_step(start, size, gradients):
        scores, columns = problem.scores(start, size)
        dense = slopes(scores, log_sum_exp[:, None], label_sum[:, None])
        at_labels = (
            slopes(
                problem.at_labels(scores, columns),
                problem.of_row(log_sum_exp),
                problem.of_row(label_sum),
            )
            - problem.values
        )
        return problem.add_chunk(gradients, start, columns, dense, at_labels)

    return result, problem.fold(gradient_step, gradients)


def _derivative(function, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Value and derivative of a function that works element by element."""
    return jax.jvp(function, (x,), (jnp.ones_like(x),))


@functools.partial(jax.jit, static_argnames=("rule", "size", "differentiate"))
def _xla(
    h: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    weights: jax.Array | None,
    labels: CSR,
    *,
    rule: losses.LossRule,
    size: int,
    differentiate: bool,
) -> tuple[jax.Array, _Gradients | None]:
    """Losses `[batch]`, unweighted, and the gradients of their weighted sum."""
    dtype = item_chunks.accumulator(h.dtype)
    broken = item_chunks.broken_rows(labels)
    weights = jnp.ones(len(h), dtype) if weights is None else weights.astype(dtype)
    if labels.data is None:
        values = jnp.ones(labels.nse, dtype)
    else:
        values = jnp.asarray(labels.data, dtype)
    problem = _Problem(
        h,
        kernel,
        bias,
        scale,
        jnp.where(broken & (weights != 0), jnp.nan, weights),
        labels,
        labels.row_ids(),
        values,
        size,
    )
    gradients = problem.no_gradients() if differentiate else None
    if isinstance(rule, losses.SoftmaxCrossEntropy):
        result, gradients = _softmax(problem, gradients)
    else:
        result, gradients = _elementwise(rule, problem, gradients)
    return jnp.where(broken, jnp.nan, result), gradients


# Derivatives, and the choice of the implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(rule, h, kernel, bias, scale, weights, labels):
    per_example, _ = _run(rule, h, kernel, bias, scale, weights, labels, False)
    return _weighted_sum(per_example, weights)


def _weighted_forward(rule, h, kernel, bias, scale, weights, labels):
    per_example, gradients = _run(rule, h, kernel, bias, scale, weights, labels, True)
    if weights is None:
        dweights = None
    else:
        dweights = per_example.astype(weights.dtype)
    gradients = _cast(gradients, (h, kernel, bias, scale))
    return _weighted_sum(per_example, weights), (*gradients, dweights)


def _weighted_backward(rule, gradients, cotangent):
    scaled = jax.tree.map(lambda g: (cotangent * g).astype(g.dtype), gradients)
    return *scaled, None


_weighted.defvjp(_weighted_forward, _weighted_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_example(rule, h, kernel, bias, scale, labels):
    return _run(rule, h, kernel, bias, scale, None, labels, False)[0]


def _per_example_forward(rule, *operands):
    return _per_example(rule, *operands), operands


def _per_example_backward(rule, operands, cotangents):
    h, kernel, bias, scale, labels = operands
    _, gradients = _run(rule, h, kernel, bias, scale, cotangents, labels, True)
    return *_cast(gradients, (h, kernel, bias, scale)), None


_per_example.defvjp(_per_example_forward, _per_example_backward)


def _run(rule, h, kernel, bias, scale, weights, labels, differentiate):
    """The only implementation there is so far, with its chunk size."""
    size = item_chunks.chunk_size(len(h), labels.num_cols, _CHUNK_ELEMENTS)
    return _xla(
        h,
        kernel,
        bias,
        scale,
        weights,
        labels,
        rule=rule,
        size=size,
        differentiate=differentiate,
    )


def _weighted_sum(per_example: jax.Array, weights: jax.Array | None) -> jax.Array:
    if weights is None:
        return jnp.sum(per_example)
    return jnp.sum(jnp.where(weights == 0, 0, weights * per_example))


def _cast(gradients, operands):
    return jax.tree.map(lambda g, x: g.astype(x.dtype), tuple(gradients), operands)
