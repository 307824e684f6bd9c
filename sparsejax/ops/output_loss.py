"""Output projection and loss against sparse labels, without `[batch, items]`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from pallas_kernels import output_loss as kernels
from pallas_kernels import score_tiles as tiles
from pallas_kernels.slopes_product import MAX_HIDDEN, slopes_product
from pallas_kernels.weight_gradient import weight_gradient
from sparsejax import losses
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import call_on_each_device, reshard_if_explicit
from sparsejax.ops import item_chunks
from sparsejax.ops.implementations import (
    HOPPER,
    Implementation,
    check_implementation,
    mosaic_can_run,
)
from sparsejax.ops.item_chunks import Shard

# Scores in a chunk, which a step reads and writes several times: 4 MB stay in the cache
# of a CPU. 2^18 to 2^21 are within 10 % of each other (two cores; batch 64 to 4,096).
_CHUNK_ELEMENTS = 2**20
# On a GPU a chunk has to be large enough for its products to be fast. With the kernel
# it takes two bytes a score, without it about ten.
_GPU_CHUNK_ELEMENTS = 2**25
_KERNEL_CHUNK_ELEMENTS = 2**27


def output_loss(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: SparseRows,
    *,
    loss: str | losses.LossRule = "sigmoid_binary_cross_entropy",
    scale: Float[Array, "items"] | None = None,
    weights: Float[Array, "batch"] | None = None,
    kernel_spec: P | None = None,
    implementation: Implementation = None,
) -> Float[Array, ""]:
    """Loss of an output layer over all items against sparse labels.

    >>> labels = CSR.from_scipy(scipy.sparse.csr_array([[True, False], [False, True]]))
    >>> float(output_loss(jnp.eye(2), jnp.eye(2), None, labels, loss="l2_loss"))
    0.0

    ::

        score_bi = (h_b . kernel_i) scale_i + bias_i
        result   = sum_b weights_b loss_b(score_b, labels_b)

    The loss is one weighted scalar (a mean is `weights = 1 / batch`), so under
    differentiation the forward pass makes the gradients too, at three matrix products
    for an elementwise loss and four for softmax, and the backward pass only scales
    them. Differentiable in reverse, in everything but the labels, whose values count as
    constants; gradients also in forward mode (`jax.hessian`), with "xla".

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
      bias: added to the scores; -inf denies an item: it costs nothing, or infinitely if
        it has a label. None is 0.
      labels: `[batch, items]`, indices unique in a row. In blocks on a mesh, they say
        how all lies there: the kernel's rows, as many as a multiple of 256, over
        "model", `h` over "data".
      loss: name of a rule in `sparsejax.losses`, or a rule.
      scale: factor of the scores, such as 1 / norm for cosines. None is 1.
      weights: of the examples. None is 1.
      kernel_spec: how the kernel lies on the mesh that is set, for labels that are not
        in blocks: `P("model")` divides the items over the mesh's axis "model". Then each
        device works on its own items, and on its own examples where the mesh has an axis
        "data".
      implementation: "mosaic_gpu" is the Hopper kernel, for bfloat16 operands, labels
        without values, and the rules of `sparsejax.losses`; "xla" the reference. None
        picks what is fastest here.

    Raises:
      ValueError: shapes do not match, an unknown loss or implementation, or a spec that
        does not fit the mesh.
      TypeError: `h` and `kernel` differ in dtype.
      NotImplementedError: the kernel is asked for what it cannot do; or derivatives of
        the loss itself in forward mode.
    """
    rule = losses.get(loss)
    _check(h, kernel, bias, labels, scale, implementation)
    if weights is not None and weights.shape != h.shape[:1]:
        raise ValueError(
            f"weights has shape {weights.shape}; one for each of {h.shape[0]:,} rows"
        )
    how = _How(rule, kernel_spec, implementation)
    (h, weights), layer = _typed(how, labels, (h, weights), (kernel, bias, scale))
    with _forward_mode_refused():
        return _weighted(how, h, *layer, weights, labels)


def output_loss_per_example(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    labels: SparseRows,
    *,
    loss: str | losses.LossRule = "sigmoid_binary_cross_entropy",
    scale: Float[Array, "items"] | None = None,
    kernel_spec: P | None = None,
    implementation: Implementation = None,
) -> Float[Array, "batch"]:
    """`loss_b` of `output_loss`, for evaluation; the arguments are the same.

    >>> labels = CSR.from_scipy(scipy.sparse.csr_array([[True, False], [False, False]]))
    >>> kernel = jnp.eye(2)
    >>> output_loss_per_example(kernel, kernel, None, labels, loss="l2_loss").tolist()
    [0.0, 0.5]

    Differentiable, at the price of computing the scores once more: for training, a
    weighted sum by `output_loss` is cheaper.
    """
    rule = losses.get(loss)
    _check(h, kernel, bias, labels, scale, implementation)
    how = _How(rule, kernel_spec, implementation)
    h, layer = _typed(how, labels, h, (kernel, bias, scale))
    with _forward_mode_refused():
        return _per_example(how, h, *layer, labels)


@contextlib.contextmanager
def _forward_mode_refused() -> Iterator[None]:
    """Says for JAX what its error is about."""
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


# A chunk of items at a time


# (first item, slopes [batch, size], h [batch, hidden], carry) -> carry, sums [size]
type UpdateKernel[Carry] = Callable[
    [jax.typing.ArrayLike, jax.Array, jax.Array, Carry],
    tuple[Carry, jax.Array | None],
]


class Layer(NamedTuple):
    """What scores are made of, for all items or a chunk; or gradients of these."""

    kernel: jax.Array
    bias: jax.Array | None
    scale: jax.Array | None


def loss_and_updates[Carry](
    rule: losses.LossRule,
    h: Float[Array, "batch hidden"],
    labels: SparseRows,
    weights: Float[Array, "batch"] | None,
    carry: Carry,
    *,
    layer: Callable[[Carry], Layer],
    update: Callable[[jax.typing.ArrayLike, Layer, Carry], Carry] | None,
    update_kernel: UpdateKernel[Carry] | None = None,
    gradient_dtype: jnp.dtype | None = None,
    shard: Shard | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "batch"], Float[Array, "batch hidden"] | None, Carry]:
    """The losses, and the gradient of each chunk of items where it is made.

    ::

        for each chunk of items, start .. start + size - 1:
            read rows start .. start + size - 1 of layer(carry)
            gradients = of sum_b weights_b loss_b in these rows      (a `Layer`)
            carry = update(start, gradients, carry)

    So `update` can write a gradient into an array, or apply an optimizer's rule to the
    rows of parameters and state in the carry, and then no gradient of the size of the
    kernel ever exists. A chunk's rows are read before they are updated; each row is in
    one chunk. Softmax reads all rows once before the first update. Padding rows may be
    in a chunk and have a gradient of 0; those in none are never updated.

    Not differentiable. On a mesh (see `over_items`), operands are what the device has,
    but for labels that are not in blocks: they are of all rows and all columns.
    Gradients are summed over the parts of the batch before they reach `update`.

    Args:
      rule: the loss.
      h: hidden vectors.
      labels: `[batch, items]`.
      weights: of the examples. None is 1.
      carry: what `update` changes: a tree of arrays, or an empty one.
      layer: what of the carry (or of what is constant) makes the scores.
      update: None if only the losses are wanted.
      update_kernel: what may be called in place of `update` with the kernel's gradient,
        where it is the product of a chunk's slopes and `h`: `update_kernel(start, slopes,
        h, carry)` with two bfloat16 arrays whose product `slopes^T h` it is, of rows in a
        multiple of 128. Then the kernel that `update` gets has no rows. Where there is a
        bias, it also returns that gradient: the slopes, summed over the batch in float32.
      gradient_dtype: of the kernel's gradient as `update` gets it; by default, and for
        bias and scale always, that in which products are summed.
      shard: which part of a mesh's work this is.
      implementation: see `output_loss`.

    Returns:
      The unweighted losses; the gradient of `h`, None without `update`; the carry.
    """
    whole, shard = layer(carry), shard or Shard()
    if implementation is None:
        fast = type(rule).__module__ == losses.__name__ and mosaic_can_run(HOPPER)
        fast = fast and not _unsupported(h, whole, labels)
        implementation = "mosaic_gpu" if fast else "xla"
    elif implementation == "mosaic_gpu" and (why := _unsupported(h, whole, labels)):
        raise NotImplementedError(f'the kernel "mosaic_gpu" {why}; use "xla"')

    batch, rows = len(h), len(whole.kernel)
    dtype = item_chunks.accumulator(h.dtype)
    entries, broken = item_chunks.entries_of(labels, shard, batch, rows)
    weighted = weights is not None
    weights = jnp.ones(batch, dtype) if weights is None else weights.astype(dtype)
    weights = jnp.where(broken & (weights != 0), jnp.nan, weights)
    with_kernel = implementation == "mosaic_gpu"
    limit = labels.num_cols - shard.first_item(rows)
    with_values = not isinstance(rule, losses.SoftmaxCrossEntropy)
    make = _KernelChunks if with_kernel else _Chunks
    data = None if labels.data is None else jnp.ravel(labels.data)
    chunks = make(h, data, entries, limit, with_values, update is not None)
    num_items = rows
    if shard.items is None:
        num_items = item_chunks.rounded_items(labels.num_cols, rows)
    size = chunks.size(num_items)
    if not with_kernel or whole.scale is not None or shard.rows is not None:
        update_kernel = None

    def fold(step, carry):
        return item_chunks.fold(step, carry, num_items, size)

    h_live = h
    if weighted:  # 0 * inf would be NaN
        h_live = jnp.where((weights != 0)[:, None], h, 0)

    def gradients(chunk: Layer, delta, product) -> tuple[Layer, jax.Array]:
        out = (
            dtype
            if gradient_dtype is None or chunk.scale is not None
            else gradient_dtype
        )
        # `update_kernel` makes it.
        slopes = delta if update_kernel is None else delta[:, :0]
        dkernel = item_chunks.dot(slopes, h_live, (0, 0), out)
        dbias = dscale = None
        kernel = chunk.kernel
        if chunk.bias is not None and update_kernel is None:
            dbias = jnp.sum(delta, axis=0, dtype=dtype)
        if chunk.scale is not None:
            # d score_bi / d scale_i = h_b . kernel_i: summed over b, a row of `dkernel`
            # before scaling times a row of `kernel`.
            dscale = jnp.sum(dkernel * kernel, axis=1)
            scale = chunk.scale[:, None]
            kernel = (kernel * scale).astype(h.dtype)
            dkernel = (dkernel * scale).astype(gradient_dtype or dtype)
        made = shard.sum_over_rows(Layer(dkernel, dbias, dscale))
        if product is None:
            product = item_chunks.dot(delta, kernel, (1, 0))
        return made, product

    def finish(per_example, dh, carry):
        per_example = jnp.where(broken, jnp.nan, per_example)
        return per_example, None if dh is None else shard.sum_over_items(dh), carry

    zeros = jnp.zeros(batch, dtype)
    dh = None if update is None else jnp.zeros(h.shape, dtype)
    if isinstance(rule, losses.SoftmaxCrossEntropy):
        found = fold(
            lambda start, size, known: chunks.normalise(start, size, whole, known),
            chunks.no_scores(),
        )
        found = _Normaliser.merge([x[:, :batch] for x in found])
        per_example, log_sum_exp, label_sum = _softmax_loss(found, shard)
        if update is None:
            return finish(per_example, None, carry)
        vectors = weights, log_sum_exp, weights * label_sum
        function = _softmax_slopes
    else:
        vectors = (weights,)
        function = functools.partial(_elementwise, rule)
        if with_kernel and rule == losses.SigmoidBinaryCrossEntropy():
            function = _sigmoid
        per_example = zeros

    def step(start, size, state):
        total, dh, carry = state
        current = layer(carry)
        values, delta, product = chunks.slopes(start, size, current, function, vectors)
        if values is not None:
            total += values
        if update is not None:
            chunk = jax.tree.map(
                lambda x: item_chunks.slice_rows(x, start, size), current
            )
            made, more = gradients(chunk, delta, product)
            # All reads of these rows come first: so they can be updated in place.
            made, delta, dh = lax.optimization_barrier((made, delta, dh + more))
            if update_kernel is not None:
                pad = item_chunks.pad_rows
                carry, dbias = update_kernel(start, pad(delta), pad(h_live), carry)
                made = made._replace(bias=dbias)
            carry = update(start, made, carry)
        return total, dh, carry

    total, dh, carry = fold(step, (zeros, dh, carry))
    return finish(per_example + shard.sum_over_items(total), dh, carry)


def _write_gradients(start, chunk: Layer, gradients: Any) -> Any:
    """An `update` that writes the gradients, rounded, into arrays of all items."""

    def write(array, rows):
        return item_chunks.write_rows(array, rows, start)

    return jax.tree.map(write, gradients, chunk)


def _write_kernel_gradient(
    start, slopes, h, gradients: Any
) -> tuple[Any, jax.Array | None]:
    """The same of the kernel. XLA would copy a chunk after its product."""
    kernel, with_sums = gradients.kernel, gradients.bias is not None
    if slopes.shape[1] == len(kernel):
        kernel = item_chunks.dot(slopes, h, (0, 0), kernel.dtype)
        sums = jnp.sum(slopes, axis=0, dtype=jnp.float32) if with_sums else None
    else:
        kernel, sums = weight_gradient(slopes, h, kernel, start, with_sums=with_sums)
    return gradients._replace(kernel=kernel), sums


# Functions for `_Chunks.slopes`: where the weight is 0, what they say of slopes is ignored.


def _elementwise(rule, scores, labels, listed, weights):
    """Values, and the weighted derivatives in the scores."""
    values, slopes = jax.jvp(
        lambda scores: rule(scores, labels, listed), (scores,), (jnp.ones_like(scores),)
    )
    return values, weights * slopes


def _sigmoid(scores, labels, listed, weights):
    """`_elementwise` of the sigmoid cross-entropy, if labels are 1, for the kernel."""
    del labels
    scores = jnp.where(listed, -scores, scores)
    odds = jnp.exp(-jnp.abs(scores))
    slopes = jnp.square(lax.rsqrt(1 + odds))
    slopes = jnp.where(scores > 0, slopes, slopes * odds)
    return jnp.maximum(scores, 0), odds, jnp.where(listed, -weights, weights) * slopes


def _softmax_slopes(scores, labels, listed, weights, log_sum_exp, label_sum):
    """The same of softmax, without values; `label_sum` is weighted."""
    slopes = label_sum * jnp.exp(scores - log_sum_exp)
    return None, jnp.where(listed, slopes - weights * labels, slopes)


class _Normaliser(NamedTuple):
    """Of softmax, `[batch]`, for the items that were seen so far."""

    largest: jax.Array
    total: jax.Array  # sum of exp(score - largest)
    label_sum: jax.Array
    label_scores: jax.Array  # sum of label times score

    @classmethod
    def merge(cls, known: Iterable[Float[Array, "parts batch"]]) -> _Normaliser:
        """Of all parts of the items, from the same for each."""

        largest, total, label_sum, label_scores = known
        all_largest = jnp.max(largest, axis=0)
        shift = _finite(all_largest)  # -inf - -inf would be NaN
        total = jnp.sum(total * jnp.exp(largest - shift[None]), axis=0)
        return cls(
            all_largest,
            total,
            jnp.sum(label_sum, axis=0),
            jnp.sum(label_scores, axis=0),
        )


def _finite(largest):
    return jnp.where(largest == -jnp.inf, 0, largest)


def _softmax_loss(found: _Normaliser, shard: Shard):
    """Losses, log-sum-exp and sum of the labels of each row."""
    if shard.items is not None:
        found = _Normaliser.merge(lax.all_gather(tuple(found), shard.items))
    log_sum_exp = _finite(found.largest) + jnp.log(found.total)
    # A row without labels costs nothing, even where all its items are denied.
    nothing = (found.label_sum == 0) & jnp.isinf(log_sum_exp)
    log_sum_exp = jnp.where(nothing, 0, log_sum_exp)
    per_example = found.label_sum * log_sum_exp - found.label_scores
    return per_example, log_sum_exp, found.label_sum


class _Chunks(NamedTuple):
    """What is done with the scores of a chunk, by XLA."""

    h: jax.Array
    data: jax.Array | None  # of the labels
    entries: item_chunks.Entries
    limit: jax.typing.ArrayLike  # rows of the kernel from here on are no items
    with_values: bool
    with_product: bool

    def size(self, num_items: int) -> int:
        """Items in a chunk."""
        on_gpu = jax.default_backend() == "gpu"
        budget = _GPU_CHUNK_ELEMENTS if on_gpu else _CHUNK_ELEMENTS
        return item_chunks.chunk_size(len(self.h), num_items, budget)

    def scores(self, start, size, layer: Layer):
        """Scores, labels, where there is one, and where there is an item."""
        scores = item_chunks.scores(self.h, *layer, start, size)
        shape = len(self.h), size
        listed = self.entries.dense(True, start, shape)
        labels = jnp.ones_like(scores)
        if self.data is not None:
            data = jnp.asarray(self.data, scores.dtype)
            labels = self.entries.dense(data, start, shape)
        inside = start + jnp.arange(size, dtype=jnp.int32) < self.limit
        return scores, labels, listed, inside[None]

    def slopes(
        self, start, size, layer: Layer, function, vectors
    ) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
        """Values summed over the items, and slopes, of a function of scores.

        The function gets the `vectors [batch]`, of which weights are the first, as columns;
        where they are 0, so are the slopes. Third comes the product of the
        slopes with the kernel, if it is wanted and was no more work, or None.
        """
        *operands, inside = self.scores(start, size, layer)
        columns = [vector[:, None] for vector in vectors]
        values, slopes = function(*operands, *columns)
        slopes = jnp.where(inside & (columns[0] != 0), slopes, 0).astype(self.h.dtype)
        if values is not None and jax.default_backend() == "gpu":
            # In one kernel with the sum of the values, XLA takes more than twice as long.
            *operands, slopes = lax.optimization_barrier((*operands, slopes))
            values, _ = function(*operands, *columns)
        if values is not None:
            values = jnp.sum(jnp.where(inside, values, 0), axis=1)
        return values, slopes, None

    def no_scores(self) -> list[Float[Array, "parts batch"]]:
        """What `normalise` begins with: of parts of the items, as `_Normaliser`."""
        zeros = jnp.zeros((1, len(self.h)), item_chunks.accumulator(self.h.dtype))
        return [zeros - jnp.inf, zeros, zeros, zeros]

    def normalise(
        self, start, size, layer: Layer, known: list[Float[Array, "parts batch"]]
    ) -> list[Float[Array, "parts batch"]]:
        scores, labels, listed, inside = self.scores(start, size, layer)
        scores = jnp.where(inside, scores, -jnp.inf)
        largest = jnp.max(scores, axis=1)
        new = (
            largest,
            jnp.sum(jnp.exp(scores - _finite(largest)[:, None]), axis=1),
            jnp.sum(jnp.where(listed, labels, 0), axis=1),
            jnp.sum(jnp.where(listed, losses.times_labels(scores, labels), 0), axis=1),
        )
        parts = (
            jnp.concatenate([old, x[None]]) for old, x in zip(known, new, strict=True)
        )
        return [x[None] for x in _Normaliser.merge(parts)]


class _KernelChunks(_Chunks):
    """The same by the kernels; rows are padded to whole tiles."""

    def size(self, num_items):
        batch = len(item_chunks.pad_rows(self.h))
        size = item_chunks.chunk_size(batch, num_items, _KERNEL_CHUNK_ELEMENTS)
        return -(-size // tiles.TILE_ITEMS) * tiles.TILE_ITEMS

    def _arguments(self, start, size, layer: Layer) -> dict[str, Any]:
        """What both kernels take."""
        h = item_chunks.pad_rows(self.h)
        bias, scale = (
            None if x is None else x.astype(jnp.float32)
            for x in (layer.bias, layer.scale)
        )
        return {
            "h": h,
            "kernel": layer.kernel,
            "bias": bias,
            "scale": scale,
            "words": self.entries.words(start, (len(h), size), counted=True),
            "start": start,
            "size": size,
            "limit": self.limit,
        }

    def slopes(self, start, size, layer, function, vectors):
        arguments = self._arguments(start, size, layer) | {
            "vectors": [item_chunks.pad_rows(vector) for vector in vectors],
            "with_values": self.with_values,
        }
        batch, product = len(self.h), None
        if self.with_product and layer.scale is None and self.h.shape[1] <= MAX_HIDDEN:
            del arguments["scale"]
            values, slopes, product = slopes_product(function, **arguments)
            product = jnp.sum(product, axis=0)[:batch]
        else:
            values, slopes = kernels.slopes(function, **arguments)
        values = None if values is None else jnp.sum(values, axis=0)[:batch]
        return values, slopes[:batch], product

    def no_scores(self):
        return kernels.no_scores(len(item_chunks.pad_rows(self.h)))

    def normalise(self, start, size, layer, known):
        return kernels.normalise(known=known, **self._arguments(start, size, layer))


def _unsupported(h, layer: Layer, labels: SparseRows) -> str | None:
    """Why the kernel cannot be used, if so."""
    if labels.data is not None:
        return "takes labels without values"
    return tiles.unsupported(h.shape[1], len(layer.kernel), h.dtype)


# Derivatives, and the choice of the implementation


class _How(NamedTuple):
    """What of the arguments is static."""

    rule: losses.LossRule
    kernel_spec: P | None
    implementation: Implementation


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
    scaled = jax.tree.map(lambda g: (cotangent * g).astype(g.dtype), gradients)
    return *scaled, None


_weighted.defvjp(_weighted_forward, _weighted_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_example(how, h, kernel, bias, scale, labels):
    return _run(how, h, kernel, bias, scale, None, labels, False)[0]


def _per_example_forward(how, *operands):
    # Not `_per_example`, which has no derivative in forward mode.
    h, kernel, bias, scale, labels = operands
    return _run(how, h, kernel, bias, scale, None, labels, False)[0], operands


def _per_example_backward(how, operands, cotangents):
    h, kernel, bias, scale, labels = operands
    _, gradients = _run(how, h, kernel, bias, scale, cotangents, labels, True)
    return *gradients, None


_per_example.defvjp(_per_example_forward, _per_example_backward)


@functools.partial(jax.jit, static_argnames=("how", "differentiate"))
def _compiled(
    h, kernel, bias, scale, weights, labels, *, how: _How, differentiate: bool
):
    """Losses `[batch]`, unweighted, and the gradients of their weighted sum."""

    def local(shard, h, labels, weights, whole):
        # Padding rows may be in no chunk.
        written = item_chunks.rounded_items(labels.num_cols, len(kernel))
        everything = shard.items is not None or written == len(kernel)
        unwritten = _empty_like if everything else jnp.zeros_like

        per_example, dh, gradients = loss_and_updates(
            how.rule,
            h,
            labels,
            weights,
            jax.tree.map(unwritten, whole) if differentiate else None,
            layer=lambda _: whole,
            update=_write_gradients if differentiate else None,
            update_kernel=_write_kernel_gradient,
            gradient_dtype=kernel.dtype,
            shard=shard,
            implementation=how.implementation,
        )
        return per_example, None if dh is None else dh.astype(h.dtype), gradients

    per_example, dh, gradients = over_items(
        local, h, labels, weights, Layer(kernel, bias, scale), how.kernel_spec
    )
    return per_example, None if gradients is None else (dh, *gradients)


def _typed(how: _How, labels: SparseRows, rows, items):
    """What has a row for each example, and for each item, of the gradients' types."""
    shard = item_chunks.shard_of(how.kernel_spec, labels, labels.num_rows)
    if shard is None:
        return rows, items
    return reshard_if_explicit(rows, P(shard.rows)), reshard_if_explicit(
        items, P(shard.items)
    )


def over_items(
    f: Callable[..., tuple[Array, Array | None, Any]],
    h: Float[Array, "batch hidden"],
    labels: SparseRows,
    weights: Float[Array, "batch"] | None,
    tables: Any,
    kernel_spec: P | None = None,
) -> tuple[Array, Array | None, Any]:
    """`f(shard, h, labels, weights, tables)`, by each device of its part.

    Args:
      f: returns an array for each row of `h`, another or None, and a tree of arrays with
        a row for each item, or None; as `loss_and_updates` does.
      h: hidden vectors.
      labels: `[batch, items]`.
      weights: of the examples.
      tables: a tree of arrays with a row for each item.
      kernel_spec: see `output_loss`.
    """
    shard = item_chunks.shard_of(kernel_spec, labels, len(h))
    if shard is None:
        return f(Shard(), h, labels, weights, tables)
    rows, items = P(shard.rows), P(shard.items)
    return call_on_each_device(
        functools.partial(f, shard),
        h,
        dataclasses.replace(labels, transposed=None),
        weights,
        tables,
        in_specs=(rows, item_chunks.entries_spec(labels), rows, items),
        out_specs=(rows, rows, items),
    )


def _empty_like(array):
    return lax.empty(array.shape, array.dtype)


def _run(how, h, kernel, bias, scale, weights, labels, differentiate):
    arguments = h, kernel, bias, scale, weights, labels
    return _compiled(*arguments, how=how, differentiate=differentiate)


def weighted_sum(per_example: jax.Array, weights: jax.Array | None) -> jax.Array:
    """`sum_b weights_b loss_b`; a loss that weighs nothing may be NaN."""
    if weights is None:
        return jnp.sum(per_example)
    weights = weights.astype(per_example.dtype)
    return jnp.sum(jnp.where(weights == 0, 0, weights * per_example))
