"""The vectors of items with content: computed for all items at once, or for some at a time.

The function `_of_chunk` defines them. `all_vectors` stores all vectors. If there is not enough
memory, `rows_at` and `softmax_sums` compute the vectors of a part of the items when they need
them, in the forward and again in the backward pass, so that no array of all vectors exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sparsejax.mesh.layout import call_on_each_device
from sparsejax.ops import log_sum_exp as sums
from sparsejax.ops.chunked_loss import Layer, Method
from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.ops.implementations import Implementation
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.scatter_gradient import dense_gradient
from sparsejax.sparse import CSR

# Most items whose content is computed at once: 200 MB of float32 for vectors of 768 numbers.
CHUNK_ITEMS = 2**16
# Most tags that are sorted together for the gradient of T, which takes about 40 bytes for each
# tag. For each such part, sums of all tags are added, so there should be few parts.
SORTED_TAGS = 2**23
# A vector with a smaller norm has no direction: its cosine with any vector is near 0.
_MIN_NORM = 1e-6


class Learned(NamedTuple):
    """The parameters that all items share; None where there is no such content."""

    log_half: jax.Array
    tag_kernel: jax.Array | None
    vector_kernel: jax.Array | None


class Fixed(NamedTuple):
    """The items' numbers of entries, tags in blocks, and content vectors."""

    entries: jax.Array
    tags: CSR | None
    given: jax.Array | None


class How(NamedTuple):
    """The result's dtype, the mesh axes that divide the items, and whether tags are gathered."""

    dtype: jnp.dtype
    axes: Any
    implementation: Implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_vectors(how: How, kernel, learned: Learned, fixed: Fixed) -> jax.Array:
    dtype, axes, _ = how

    def part(kernel, learned, fixed):
        learned = _with_operands(how, kernel, learned)

        def chunk(_, own):
            return None, _of_chunk(how, learned, *own).astype(dtype)

        _, made = lax.scan(chunk, None, _chunks(kernel, fixed))
        return made.reshape(kernel.shape)

    specs = P(axes), P(), P(axes)
    if axes is None:
        return part(kernel, learned, fixed)
    return call_on_each_device(part, (kernel, learned, fixed), specs, P(axes))


def _backward(how: How, residuals, slopes: jax.Array):
    axes = how.axes

    def part(kernel, learned, fixed, slopes):
        tag_kernel = learned.tag_kernel
        if fixed.tags is not None:
            tag_kernel = _of_tags(how, fixed.tags, slopes, tag_kernel)
        # Chunks are computed without tags. The part of the tags is added afterwards.
        learned, fixed = learned._replace(tag_kernel=None), fixed._replace(tags=None)

        def chunk(carry, part):
            sums, found = carry
            number, own = part
            wide = accumulator(own[0].dtype)
            _, pull = jax.vjp(
                lambda learned, rows: _of_chunk(how, learned, rows, *own[1:]),
                learned,
                own[0],
            )
            of_learned, of_rows = pull(found[number].astype(wide))
            # The gradient of the rows overwrites the gradient of the vectors, in the same memory.
            found = found.at[number].set(of_rows.astype(found.dtype))
            return (jax.tree.map(jnp.add, sums, of_learned), found), None

        own = _chunks(kernel, fixed)
        by_chunk = slopes.reshape(own[0].shape).astype(kernel.dtype)
        zeros = jax.tree.map(jnp.zeros_like, learned)
        numbers = jnp.arange(len(own[0]))
        (sums, of_rows), _ = lax.scan(chunk, (zeros, by_chunk), (numbers, own))
        sums = sums._replace(tag_kernel=tag_kernel)
        if axes is not None:
            sums = lax.psum(sums, axes)
        return of_rows.reshape(kernel.shape), sums

    arguments = *residuals, slopes
    if axes is None:
        found = part(*arguments)
    else:
        found = call_on_each_device(
            part, arguments, (P(axes), P(), P(axes), P(axes)), (P(axes), P())
        )
    return *found, None


all_vectors.defvjp(lambda how, *x: (all_vectors(how, *x), x), _backward)


def _with_operands(how: How, kernel: jax.Array, learned: Learned) -> Learned:
    """Converts T to the dtype of products once, instead of in each chunk."""
    if learned.tag_kernel is None:
        return learned
    kind = _operand(how.dtype, kernel.dtype)
    return learned._replace(tag_kernel=learned.tag_kernel.astype(kind))


def _of_chunk(how: How, learned: Learned, rows, entries, tags, given) -> jax.Array:
    """Computes the vectors of some items, in the dtype of sums. This function defines item
    vectors.
    """
    wide, operand = accumulator(rows.dtype), _operand(how.dtype, rows.dtype)
    weight = entries / (entries + jnp.exp(learned.log_half))
    made = weight.astype(wide)[:, None] * rows.astype(wide)
    if given is not None:
        assert learned.vector_kernel is not None
        made += jnp.dot(
            given.astype(operand),
            learned.vector_kernel.astype(operand),
            preferred_element_type=wide,
        )
    if tags is not None:
        assert learned.tag_kernel is not None
        made += gather_matmul(
            _joined(tags),
            learned.tag_kernel,
            dtype=wide,
            implementation=how.implementation,
        )
    return made


def _operand(dtype, stored) -> jnp.dtype:
    """The dtype of T and V in products, if the rows are stored with the dtype `stored`."""
    return jnp.dtype(jnp.bfloat16) if dtype == jnp.bfloat16 else accumulator(stored)


def _of_tags(how: How, tags: CSR, slopes: jax.Array, tag_kernel) -> jax.Array:
    """The gradient of T, computed from the gradient of all vectors. Tags are sorted in parts."""
    blocks, nse = jnp.shape(tags.indices)
    count = 1
    while blocks % (2 * count) == 0 and blocks * nse > count * SORTED_TAGS:
        count *= 2

    def divided(array):
        return array.reshape(count, len(array) // count, *array.shape[1:])

    def add(total, part):
        (some, slopes), form = part, how.implementation
        found = dense_gradient(_joined(some), slopes, len(total), implementation=form)
        return total + found, None

    zeros = jnp.zeros(tag_kernel.shape, accumulator(slopes.dtype))
    total, _ = lax.scan(add, zeros, jax.tree.map(divided, (tags, slopes)))
    return total.astype(tag_kernel.dtype)


def _chunks(kernel: jax.Array, fixed: Fixed):
    """Reshapes the kernel's rows and the items' arrays to `[chunks, ...]`."""
    rows = len(kernel)
    count = 1
    # The number of chunks is a power of 2, so that each has whole blocks of tags.
    while rows // count > CHUNK_ITEMS and rows % (2 * count) == 0:
        if fixed.tags is not None and len(fixed.tags.indptr) < 2 * count:
            break
        count *= 2

    def divided(array):
        return array.reshape(count, len(array) // count, *array.shape[1:])

    return jax.tree.map(divided, (kernel, *fixed))


def _joined(blocks: CSR) -> CSR:
    """Concatenates blocks `[count, ...]` into one matrix; each block keeps its whole capacity."""
    count, nse = jnp.shape(blocks.indices)
    starts = jnp.arange(count, dtype=jnp.int32) * nse
    indptr = jnp.asarray(blocks.indptr)
    # The padding of a block becomes a part of its last row, with values of 0.
    begins = (indptr[:, :-1] + starts[:, None]).reshape(-1)
    indptr = jnp.append(begins, jnp.int32(count * nse))
    flat = jax.tree.map(lambda x: x.reshape(-1), (blocks.data, blocks.indices))
    return CSR.tree_unflatten(blocks.num_cols, (*flat, indptr, None))


# --- vectors that are computed where they are used, and not stored ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows_at(
    how: How,
    kernel: Float[Array, "rows width"],
    learned: Learned,
    fixed: Fixed,
    ids: Int[Array, "count"],
) -> tuple[Float[Array, "count width"], Float[Array, "rows width"]]:
    """The vectors of some items: `all_vectors(...)[ids]`; zeros for an id of -1.

    Also returns the kernel. Later operations should read the returned kernel: then the gradient of
    this function is added in place to the gradients of these operations.
    """

    def part(kernel, learned, fixed, ids):
        learned = _with_operands(how, kernel, learned)

        def chunk(found, part):
            start, own = part
            here, inside = _places(ids, start, len(own[0]))
            made = _of_chunk(how, learned, *own).astype(how.dtype)[here]
            return jnp.where(inside[:, None], made, found), None

        own, starts = _chunks_from(how, kernel, fixed)
        found = jnp.zeros((len(ids), kernel.shape[1]), how.dtype)
        found, _ = lax.scan(chunk, found, (starts, own))
        return _summed(how, found)

    given = kernel, learned, fixed, ids
    return _on_each_device(how, part, given, "iwiw", "w"), kernel


def _rows_backward(how: How, operands, slopes):
    def part(kernel, learned, fixed, ids, slopes, of_kernel):
        def use(start, made, carry, extra):
            here, inside = _places(ids, start, len(made))
            here = jnp.where(inside, here, len(made))
            found = jnp.zeros_like(made).at[here].add(slopes, mode="drop")
            return found, carry, None

        given = kernel, learned, fixed
        of_rows, of_learned, *_ = _pulled(how, *given, use, None, None, of_kernel)
        return of_rows, of_learned

    given = *operands, *slopes
    return *_on_each_device(how, part, given, "iwiwwi", "iw"), None, None


rows_at.defvjp(lambda how, *x: (rows_at(how, *x), x), _rows_backward)


class Scoring(NamedTuple):
    """How scores are computed from vectors; all of it is static.

    Attributes:
      method: how the products of vectors are computed.
      num_items: rows of the kernel from this one on are padding.
      temperature: number by which cosines are divided, or None for dot products.
    """

    method: Method
    num_items: int
    temperature: float | None

    def layer(self, made: jax.Array, bias: jax.Array | None, like: jax.Array) -> Layer:
        """A layer that scores items by their vectors `made`, in the dtype of `like`."""
        scale = None
        if self.temperature is not None:
            scale = inverse_norm(made) / self.temperature
        return Layer(made.astype(like.dtype), bias, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def softmax_sums(
    how: How,
    scoring: Scoring,
    kernel: Float[Array, "rows width"],
    learned: Learned,
    fixed: Fixed,
    bias: Float[Array, "rows"] | None,
    h: Float[Array, "batch width"],
    targets: Int[Array, "batch"],
) -> tuple[Float[Array, "batch"], Float[Array, "batch"]]:
    """The logarithm of the sum of exponentials of each row's scores over all items.

    Also returns the score of each row's target, which is 0 for a target of -1.
    """

    def part(kernel, learned, fixed, bias, h, targets):
        learned = _with_operands(how, kernel, learned)
        (own, bias), starts = _chunks_from(how, kernel, fixed, bias)

        def chunk(state, part):
            known, found = state
            start, own, bias = part
            made = _of_chunk(how, learned, *own).astype(how.dtype)
            layer = scoring.layer(made, bias, h)
            limit = scoring.num_items - start
            known = sums.with_scores(scoring.method, h, layer, limit, known)
            here = _among(targets, start)
            more = sums.target_scores(scoring.method, h, layer, limit, here)
            return (known, found + more), None

        some: Any = jax.ShapeDtypeStruct(own[0].shape[1:], h.dtype)
        known = sums.no_scores(scoring.method, h, Layer(some, None, None))
        zeros = jnp.zeros(len(h), accumulator(h.dtype))
        (known, found), _ = lax.scan(chunk, (known, zeros), (starts, own, bias))
        return sums.of_scores(known, len(h), how.axes), _summed(how, found)

    given = kernel, learned, fixed, bias, h, targets
    return _on_each_device(how, part, given, "iwiiww", "ww")


def _sums_forward(how: How, scoring: Scoring, *operands):
    found = softmax_sums(how, scoring, *operands)
    return found, (*operands, found[0])


def _sums_backward(how: How, scoring: Scoring, residuals, slopes):
    method = scoring.method

    def part(kernel, learned, fixed, bias, h, targets, found, slopes, of_targets):
        def use(start, made, dh, bias):
            def of_target(h, layer):
                return sums.target_scores(method, h, layer, limit, here)

            limit, here = scoring.num_items - start, _among(targets, start)
            layer, pull = jax.vjp(
                lambda made, bias: scoring.layer(made.astype(how.dtype), bias, h),
                made,
                bias,
            )
            gradients, more = sums.gradients_of_part(
                method, h, layer, limit, found, slopes
            )
            _, pull_target = jax.vjp(of_target, h, layer)
            of_h, of_layer = pull_target(of_targets)
            gradients = jax.tree.map(
                lambda x, y: (x + y.astype(x.dtype)).astype(y.dtype),
                gradients,
                of_layer,
            )
            of_made, of_bias = pull(gradients)
            return of_made, dh + more + of_h.astype(dh.dtype), of_bias

        dh = jnp.zeros(h.shape, accumulator(h.dtype))
        of_rows, of_learned, dh, of_bias = _pulled(
            how, kernel, learned, fixed, use, dh, bias
        )
        return of_rows, of_learned, of_bias, _summed(how, dh).astype(h.dtype)

    given = *residuals, *slopes
    of_rows, of_learned, of_bias, dh = _on_each_device(
        how, part, given, "iwiiwwwww", "iwiw"
    )
    return of_rows, of_learned, None, of_bias, dh, None


softmax_sums.defvjp(_sums_forward, _sums_backward)


def inverse_norm(vectors: Float[Array, "*batch width"]) -> Float[Array, "*batch"]:
    """`1 / max(|v|, eps)` of each row. Below eps the gradient is 0, not NaN."""
    wide = accumulator(vectors.dtype)
    square = jnp.sum(jnp.square(vectors.astype(wide)), axis=-1)
    return lax.rsqrt(jnp.maximum(square, _MIN_NORM**2))


def _pulled(
    how: How,
    kernel: jax.Array,
    learned: Learned,
    fixed: Fixed,
    use: Callable[..., tuple[jax.Array, Any, Any]],
    carry: Any,
    beside: Any,
    before: jax.Array | None = None,
):
    """Gradients through the vectors of all chunks, which are computed a second time.

    Args:
      how: how vectors are computed.
      kernel: the rows of this device.
      learned: the learned parameters T, V and `log_half`.
      fixed: the items' tags, vectors and numbers of entries, which are not learned.
      use: function `use(start, made, carry, beside)` that returns the gradients in a chunk's
        vectors `made`, the new carry, and the results for the chunk's items.
      carry: the carry of the first chunk.
      beside: arrays with a row for each item. `use` gets the chunk's rows.
      before: a gradient of the rows, to which the computed gradient is added in place.

    Returns:
      The gradients of rows and of the parameters, the carry, and the results for the
      items.
    """
    operands = _with_operands(how, kernel, learned)
    # Tags are differentiated elsewhere, because sums in bfloat16 would lose too much.
    alone = learned._replace(tag_kernel=None)
    (own, beside), starts = _chunks_from(how, kernel, fixed, beside)

    def chunk(state, part):
        (sums, of_tags), carry, before = state
        number, start, (rows, entries, tags, given), beside = part
        made = _of_chunk(how, operands, rows, entries, tags, given)
        _, pull = jax.vjp(
            lambda learned, rows: _of_chunk(how, learned, rows, entries, None, given),
            alone,
            rows,
        )
        slopes, carry, more = use(start, made, carry, beside)
        slopes = slopes.astype(made.dtype)
        if tags is not None:
            of_tags += _of_tags(how, tags, slopes, learned.tag_kernel)
        of_learned, of_rows = pull(slopes)
        sums = jax.tree.map(jnp.add, sums, of_learned)
        of_rows = of_rows.astype(kernel.dtype)
        if before is not None:
            before, of_rows = before.at[number].add(of_rows), None
        return ((sums, of_tags), carry, before), (of_rows, more)

    zeros = jax.tree.map(jnp.zeros_like, (alone, learned.tag_kernel))
    if before is not None:
        before = before.reshape(own[0].shape)
    numbers = jnp.arange(len(starts))
    state, (of_rows, more) = lax.scan(
        chunk, (zeros, carry, before), (numbers, starts, own, beside)
    )
    (of_learned, of_tags), carry, before = state
    of_rows = of_rows if before is None else before
    of_learned = _summed(how, of_learned._replace(tag_kernel=of_tags))
    more = jax.tree.map(lambda x: x.reshape(-1), more)
    return of_rows.reshape(kernel.shape), of_learned, carry, more


def _chunks_from(how: How, kernel: jax.Array, fixed: Fixed, *more):
    """Does the work of `_chunks` for further arrays, too; also returns the first item of each
    chunk.
    """
    own = _chunks(kernel, fixed)
    count, rows = own[0].shape[:2]
    first = 0 if how.axes is None else lax.axis_index(how.axes) * len(kernel)
    starts = first + jnp.arange(count, dtype=jnp.int32) * rows
    if more:
        more = jax.tree.map(lambda x: x.reshape(count, rows, *x.shape[1:]), more)
        return (own, *more), starts
    return own, starts


def _places(ids: jax.Array, start: jax.Array, size: int):
    """The positions of ids in the chunk that begins at `start`, and whether the ids are in it."""
    here = ids - start
    inside = (ids >= 0) & (here >= 0) & (here < size)
    return jnp.where(inside, here, 0), inside


def _among(ids: jax.Array, start: jax.Array) -> jax.Array:
    """Positions of ids, counted from `start`; -1 stays -1."""
    return jnp.where(ids < 0, -1, ids - start)


def _summed(how: How, tree: Any) -> Any:
    return tree if how.axes is None else lax.psum(tree, how.axes)


def _on_each_device(how: How, part, arguments, given: str, made: str):
    """Calls `part(*arguments)` on each device of a mesh with its items.

    Each argument and each result has a letter: "i" is divided like the items, "w" is replicated.
    """
    if how.axes is None:
        return part(*arguments)
    specs, out = (
        tuple(P(how.axes) if letter == "i" else P() for letter in letters)
        for letters in (given, made)
    )
    return call_on_each_device(part, arguments, specs, out if len(out) > 1 else out[0])
