"""The squared loss over all items by Gram matrices: no score is computed."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import gram_loss as mosaic
from pallas_kernels.row_update import row_update
from sparsejax import losses
from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.ops import chunked_loss, item_chunks
from sparsejax.ops.chunked_loss import Layer, LossBatch, Method, Updates
from sparsejax.ops.gather_sum import by_loop, gather_sum, mosaic_is_fastest
from sparsejax.ops.implementations import (
    HOPPER,
    Implementation,
    custom_call_can_run,
    xla_is_for_gpu,
)
from sparsejax.ops.item_chunks import Shard, accumulator
from sparsejax.ops.piece_sum import by_pieces
from sparsejax.ops.precision import Word, of_xla
from sparsejax.ops.scatter_gradient import Terms
from sparsejax.ops.targets import Targets
from sparsejax.sparse import CSR, Transposed

# Fewest items in a block of the Gram matrix. Each block is summed separately, and then the sums
# are added, so that no sum has too many terms: tensor cores round towards zero with every
# addition. Smaller blocks write more `[hidden, hidden]` arrays.
_BLOCK_ITEMS = 4096
# Most blocks. The number of rows of a layer's kernel is a multiple of it.
_MOST_BLOCKS = 256
# Number of elements in the gradient of a chunk of items, if the gradient of all items is not
# stored.
_CPU_CHUNK, _GPU_CHUNK = 2**20, 2**26
# Number of rows with labels that are updated together in a chunk.
_CHANGED_ROWS = 8192
# Cost of one label entry, expressed in scores that `chunked_loss` computes. Measured with
# bfloat16 operands on an H200, and float32 operands on a CPU: see benchmarks/notes/output_loss.md.
_CPU_LABEL, _GPU_LABEL = 32, 512


def loss_and_updates[Carry](
    method: Method,
    batch: LossBatch,
    carry: Carry,
    updates: Updates[Carry],
    shard: Shard | None = None,
    *,
    at_once: bool = False,
) -> tuple[Float[Array, "batch"], Float[Array, "batch hidden"] | None, Carry]:
    """Computes `chunked_loss.loss_and_updates`, by Gram matrices where they are faster.

    With the labels y_bi (0 where there is none), weights w_b, and any vector m::

        G = W^T W      g = sum_i b_i W_i      z_b = sum over the labels of b of  y_bi W_i

        loss_b = sum_i (h_b . W_i + b_i - y_bi)^2 / 2
               = h_b . (G h_b / 2 + g - z_b) + sum_i b_i^2 / 2
                 + sum over the labels of b of  y_bi (y_bi / 2 - b_i)
        dh_b   = w_b (G h_b + g - z_b)

        c_b = w_b (h_b - m)      C = sum_b c_b (h_b - m)^T      u_i = W_i . m + b_i

        db_i = sum_b w_b (h_b . W_i + b_i)  - sum over the labels of i of  y_bi w_b
        dW_i = C W_i + u_i sum_b c_b + db_i m  - sum over the labels of i of  y_bi c_b

    `G` and `C` are `[hidden, hidden]`, and the labels are few. So there are two products
    of `items hidden^2` multiplications, where scores need three of `batch items hidden`.
    The kernel is read twice and its gradient written once. An excluded item counts as
    an item with a kernel row and a bias of 0.

    Sums are made in float32. The loss is a difference of sums: its error is a few float32
    eps of the sum of the sizes of its terms, `|h_b| . |W|^T |W| |h_b|`, not of the loss.
    Tensor cores round sums towards zero, so with bfloat16 operands on a GPU `G` is too small
    by 2e-5. `G` is summed in blocks, without which the error would be larger. `C` is rounded
    to the operands' dtype before its product. If m is the mean of the rows, this is as
    accurate as the form that computes scores, which rounds the score gradients. With m = 0
    the error of a gradient was .14 in place of .002.

    Args:
      method: how the loss is computed. Its `form` picks a form; None picks the fastest.
      batch: the rows: hidden vectors, labels and weights.
      carry: a tree of arrays that `update` changes, possibly empty.
      updates: functions that receive the gradients of each chunk. Here `update` also
        gets the kernel's gradient.
      shard: the part of a mesh's work that this device does; None for all of it.
      at_once: whether memory suffices for the gradient of all items at once.

    Raises:
      ValueError: `form` is "gram", and the loss is no squared loss or has a `scale`.
    """
    layer = updates.layer(carry)
    form = method.form
    if form == "gram" and not _is_squared(method.rule, layer):
        raise ValueError(
            f"Gram matrices make l2_loss without a scale, not {method.rule}"
        )
    if form is None and _is_faster(method, batch, layer, shard or Shard()):
        # From slopes, a GPU program may compute the kernel's gradient and update the kernel at
        # once. That saves as much time as Gram matrices do.
        form = "gram" if at_once or not _can_update(method, layer) else "chunks"
    if form != "gram":
        return chunked_loss.loss_and_updates(method, batch, carry, updates, shard)
    return _by_gram(method, batch, carry, updates, shard or Shard(), at_once)


# --- form in XLA's operations ---

# Products in full precision: the loss is a small difference of sums, so rounding errors of the
# small matrices would show.
_exact_dot = functools.partial(item_chunks.dot, precision="highest")


class _Labels(NamedTuple):
    """The labels of a device's items.

    Attributes:
      by_row: `[batch, items]`.
      by_item: entries of `by_row`, in the order of their items.
      of_item: values in the order of `by_item`, or None if all are 1.
    """

    by_row: CSR
    by_item: Transposed
    of_item: jax.Array | None


def _by_gram(method, batch: LossBatch, carry, updates: Updates, shard: Shard, at_once):
    implementation, update = method.implementation, updates.update
    whole = updates.layer(carry)
    kernel, rows, hidden = whole.kernel, *whole.kernel.shape
    dtype = accumulator(batch.h.dtype)
    labels = batch.labels
    if isinstance(labels, Targets):
        raise NotImplementedError(
            "Gram matrices take sparse rows, not one target a row"
        )
    limit = labels.num_cols - shard.first_item(rows)
    parts = math.prod(lax.axis_size(axis) for axis in shard.items)
    # The most padding rows that any device has.
    padding = min(rows, rows * parts - labels.num_cols)
    weights = jnp.ones(len(batch.h), dtype)
    if batch.weights is not None:
        weights = batch.weights.astype(dtype)
    entries, broken = item_chunks.entries_of(labels, shard, rows)
    weights = jnp.where(broken & (weights != 0), jnp.nan, weights)
    h, weights = shard.all_rows((batch.h, weights))
    wide = h.astype(dtype)

    inside = jnp.arange(rows, dtype=jnp.int32) < limit
    bias = denied = some = None
    # -inf marks items that contribute neither loss nor gradient.
    offsets = jnp.where(inside, jnp.zeros(rows, dtype), -jnp.inf)
    if whole.bias is not None:
        bias = whole.bias.astype(dtype)
        denied = bias == -jnp.inf
        some = jnp.any(denied)
        offsets = jnp.where(inside, bias, -jnp.inf)
    kept = offsets > -jnp.inf
    own = _labels(labels, entries, shard, len(h), rows, denied)

    for_gpu = xla_is_for_gpu(implementation)
    precision = method.precision
    gram = _gram(kernel, kept, limit, padding, some, precision, for_gpu=for_gpu)
    z = gather_sum(own.by_row, kernel, implementation, wide=True)
    slopes = _exact_dot(wide, gram, (1, 0))
    total = jnp.sum(wide * (slopes / 2 - z), axis=1)
    total += _loss_of_labels(own.by_row, bias, dtype)
    slopes -= z
    if bias is not None:
        bias = jnp.where(kept, bias, 0)
        linear = _times_columns(bias, kernel, for_gpu)
        total += (
            _exact_dot(wide, linear[:, None], (1, 0))[:, 0] + jnp.sum(bias * bias) / 2
        )
        slopes += linear[None]
    total = shard.sum_over_items(total)
    # The loss is negative only through rounding. NaN stays NaN.
    per_example = jnp.where(broken, jnp.nan, shard.own_rows(jnp.maximum(total, 0)))
    if update is None:
        return per_example, None, carry

    # Rows with weight 0 become 0, because 0 * inf would be NaN.
    used = (weights != 0)[:, None]
    dh = shard.own_sums(jnp.where(used, weights[:, None] * slopes, 0))
    moments = _moments(jnp.where(used, wide, 0), weights)
    terms = Terms(own.by_item, own.of_item, moments.centred, rows)
    of_labels = _sums_by_item(terms, None if batch.weights is None else weights)
    num_items = (
        rows if shard.items else item_chunks.rounded_items(labels.num_cols, rows)
    )
    size = num_items
    if not at_once:
        size = _chunk(method, len(h), hidden, num_items)
    change = _changes(terms, implementation, whole_size=size == num_items)
    # Without the barrier, rows of the carry could be overwritten before they are read, so XLA
    # would copy them.
    carry, per_example, dh, moments = lax.optimization_barrier(
        (carry, per_example, dh, moments)
    )
    out = updates.gradient_dtype or dtype

    def step(start, size, carry):
        current = updates.layer(carry)
        dkernel, dbias = _gradients(
            current.kernel,
            moments,
            offsets,
            of_labels,
            start,
            size,
            out,
            implementation,
            precision,
        )
        # The barrier orders all reads before the first write.
        dkernel, dbias = lax.optimization_barrier((change(dkernel, start), dbias))
        dbias = None if bias is None else dbias
        return update(start, Layer(dkernel, dbias, None), carry)

    return per_example, dh, item_chunks.fold(step, carry, num_items, size)


def _labels(labels, entries, shard: Shard, batch: int, rows: int, denied) -> _Labels:
    """The labels of this device's items. Entries whose index is not an item are omitted."""

    def values(data, columns):
        if denied is None:
            return data
        # For a label of an excluded item, the loss and the gradient are infinite.
        y = jnp.ones(columns.shape, jnp.float32) if data is None else data
        hit = denied.at[columns].get(mode="clip") & (y != 0)
        return jnp.where(hit, jnp.inf, y)

    if isinstance(labels, CSR) and not shard.items:
        by_item = labels.by_column()
        data = None if labels.data is None else jnp.asarray(labels.data)
        of_item = None if data is None else data[by_item.order]
        of_item = values(of_item, by_item.columns)
        return _Labels(dataclasses.replace(labels, transposed=None), by_item, of_item)
    inside = (entries.rows >= 0) & (entries.columns >= 0) & (entries.columns < rows)
    columns = jnp.where(inside, entries.columns, rows)
    by_item = Transposed.of(columns, entries.rows, rows)
    row = jnp.where(inside, entries.rows, batch)
    data, order = entries.data, by_item.order
    of_item = values(None if data is None else data[order], by_item.columns)
    row, place = lax.sort_key_val(row, jnp.arange(row.shape[0], dtype=jnp.int32))
    counts = jnp.searchsorted(row, jnp.arange(batch + 1, dtype=jnp.int32))
    by_row = CSR(
        None if data is None else data[place],
        columns[place],
        counts.astype(jnp.int32),
        num_cols=rows,
    )
    return _Labels(by_row, by_item, of_item)


def _loss_of_labels(x: CSR, bias, dtype) -> Float[Array, "batch"]:
    """`sum over the labels of  y (y / 2 - b)`"""
    if x.data is None and bias is None:
        return x.row_lengths().astype(dtype) / 2
    y = jnp.ones(x.nse, dtype) if x.data is None else jnp.asarray(x.data, dtype)
    term = y * y / 2
    if bias is not None:
        term = jnp.where(y == 0, 0, term - y * bias.at[x.indices].get(mode="clip"))
    return _sums(dataclasses.replace(x, data=term), jnp.ones(1, dtype))


def _sums(x: CSR, column: Float[Array, "n"]) -> Float[Array, "rows"]:
    """The product of a sparse matrix and a column vector."""
    # All entries are multiplied by the only number of the column.
    if column.shape[0] == 1:
        x = dataclasses.replace(x, indices=jnp.zeros_like(x.indices), num_cols=1)
    return lax.platform_dependent(x, column[:, None], cpu=by_loop, default=by_pieces)[
        :, 0
    ]


def _sums_by_item(
    terms: Terms, weights: Float[Array, "batch"] | None
) -> Float[Array, "rows"]:
    """Sums for each item i over its labels: of `y_bi w_b`, or without weights of `y_bi`."""
    by_item, dtype = terms.by_column, terms.dy.dtype
    if terms.data is None and weights is None:
        sums = jnp.diff(by_item.indptr).astype(dtype)
    else:
        ones = jnp.ones(len(terms.dy), dtype)
        x = CSR(terms.data, by_item.rows, by_item.indptr, num_cols=len(ones))
        sums = _sums(x, ones if weights is None else weights)
    zeros = jnp.zeros(terms.num_rows, dtype)
    return zeros.at[terms.ids()].set(
        sums, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def _gram(kernel, kept, limit, padding: int, denied, precision: Word, *, for_gpu: bool):
    """The Gram matrix `W^T W` of the rows below `limit` that are not `denied`."""
    rows, hidden = kernel.shape
    dot = functools.partial(item_chunks.dot, precision=precision)
    blocks = math.gcd(rows, _MOST_BLOCKS)
    while blocks > 1 and rows // blocks < _BLOCK_ITEMS:
        blocks //= 2

    def in_turn():
        """Adds the products of the blocks one after the other."""

        def add(start, size, total):
            part, mask = (
                item_chunks.slice_rows(x, start, size) for x in (kernel, kept)
            )
            part = jnp.where(mask[:, None], part, 0)
            return total + dot(part, part, (0, 0))

        zeros = jnp.zeros((hidden, hidden), accumulator(kernel.dtype))
        return item_chunks.fold(add, zeros, rows, min(rows, _BLOCK_ITEMS))

    def at_once():
        """Multiplies all blocks at once; the block with padding is computed again without it."""
        size = rows // blocks
        stack = kernel.reshape(blocks, size, hidden)
        products = lax.dot_general(
            stack,
            stack,
            (((1,), (1,)), ((0,), (0,))),
            precision=of_xla(precision, kernel.dtype),
            preferred_element_type=accumulator(kernel.dtype),
        )
        if not padding:
            return jnp.sum(products, axis=0)
        whole = (jnp.arange(blocks, dtype=jnp.int32) + 1) * size <= limit
        place = jnp.clip(limit // size, 0, blocks - 1)
        part, mask = (
            item_chunks.slice_rows(x, place * size, size) for x in (kernel, kept)
        )
        part = jnp.where(mask[:, None], part, 0)
        last = jnp.where(whole[place], 0, dot(part, part, (0, 0)))
        return jnp.sum(jnp.where(whole[:, None, None], products, 0), axis=0) + last

    if not for_gpu or rows // blocks > 4 * _BLOCK_ITEMS:
        return in_turn()
    return at_once() if denied is None else lax.cond(denied, in_turn, at_once)


def _times_columns(bias, kernel, for_gpu: bool):
    """The sum of `b_i W_i` over all items, without padding rows, which may have any values."""
    if not for_gpu:

        def add(start, size, total):
            part, factors = (
                item_chunks.slice_rows(x, start, size) for x in (kernel, bias)
            )
            part = jnp.where(factors[:, None] != 0, part, 0).astype(bias.dtype)
            return total + _exact_dot(factors[None], part, (1, 0))[0]

        zeros = jnp.zeros(kernel.shape[1], bias.dtype)
        return item_chunks.fold(add, zeros, len(kernel), min(len(kernel), _BLOCK_ITEMS))
    terms = jnp.where(bias[:, None] == 0, 0, kernel.astype(bias.dtype) * bias[:, None])
    return jnp.sum(terms, axis=0)


class _Moments(NamedTuple):
    """The sums over the batch that the kernel's gradient needs, in float32.

    With m the mean of the rows (or anything near to it), and w_b the weights::

        centred = w_b (h_b - m)        outer = sum_b w_b (h_b - m) (h_b - m)^T
        rest    = sum_b centred_b      total = sum_b w_b h_b      weight = sum_b w_b

    If rows have a large mean, `outer` has no large elements that cancel in its products.
    """

    centred: Float[Array, "batch hidden"]
    centre: Float[Array, "hidden"]
    outer: Float[Array, "hidden hidden"]
    rest: Float[Array, "hidden"]
    total: Float[Array, "hidden"]
    weight: Float[Array, ""]


def _moments(
    h: Float[Array, "batch hidden"], weights: Float[Array, "batch"]
) -> _Moments:
    sizes = jnp.abs(weights)  # absolute values, because cotangents may be negative
    centre = sizes @ h / jnp.maximum(jnp.sum(sizes), jnp.finfo(h.dtype).tiny)
    moved = jnp.where((weights != 0)[:, None], h - centre[None], 0)
    centred = weights[:, None] * moved
    return _Moments(
        centred,
        centre,
        _exact_dot(moved, centred, (0, 0)),
        jnp.sum(centred, axis=0),
        jnp.sum(weights[:, None] * h, axis=0),
        jnp.sum(weights),
    )


def _gradients(
    kernel,
    moments: _Moments,
    offsets: Float[Array, "items"],
    of_labels: Float[Array, "items"],
    start: jax.typing.ArrayLike,
    size: int,
    dtype: jnp.dtype,
    implementation: Implementation,
    precision: Word,
) -> tuple[Float[Array, "size hidden"], Float[Array, "size"]]:
    """The gradients of a chunk, without the term of the labels in the kernel's gradient.

    ::

        mean_i     = W_i . centre + b_i
        dbias_i    = W_i . total + weight b_i - sum over the labels of i of  y_bi w_b
        gradient_i = W_i outer + mean_i rest + dbias_i centre
    """
    if _product_with_mosaic(kernel, size, implementation):
        return mosaic.squared_gradient(
            kernel,
            moments.outer.astype(kernel.dtype),
            moments.centre,
            moments.total,
            moments.rest,
            offsets,
            of_labels,
            moments.weight,
            start=start,
            size=size,
            dtype=dtype,
        )
    chunk, offsets, of_labels = (
        item_chunks.slice_rows(x, start, size) for x in (kernel, offsets, of_labels)
    )
    nothing = (offsets == -jnp.inf) & (of_labels < jnp.inf)
    offsets = jnp.where(offsets == -jnp.inf, 0, offsets)
    pair = jnp.stack([moments.centre, moments.total])
    means, totals = _times_vectors(chunk, pair, implementation)
    dbias = totals + moments.weight * offsets - of_labels
    dbias = jnp.where(nothing, 0, dbias)
    outer = moments.outer.astype(chunk.dtype)
    gradient = item_chunks.dot(chunk, outer, (1, 0), dtype, precision=precision)
    gradient = gradient.astype(dbias.dtype)
    gradient += (means + offsets)[:, None] * moments.rest[None]
    gradient += dbias[:, None] * moments.centre[None]
    return jnp.where(nothing[:, None], 0, gradient).astype(dtype), dbias


def _times_vectors(chunk, vectors: Float[Array, "n hidden"], implementation):
    """The products `W_i . v` of each row with each vector."""
    chunk = chunk.astype(vectors.dtype)
    # As a sum of products: XLA fuses it, so that no float32 copy is written.
    if xla_is_for_gpu(implementation):
        return [jnp.sum(chunk * vector[None], axis=1) for vector in vectors]
    return _exact_dot(vectors, chunk, (1, 1))


def _changes(terms: Terms, implementation: Implementation, *, whole_size: bool):
    """Makes a function that subtracts the sums of the terms from rows of a gradient, in place.

    The function is called with a chunk of the gradient, and the number of the chunk's first row.
    """
    if terms.by_column.columns.shape[0] == 0:
        return lambda gradient, start: gradient
    # The GPU program updates the rows of all terms, so it needs the gradient of all items.
    if whole_size and _with_mosaic(terms, implementation):
        return lambda gradient, start: _change_by_mosaic(gradient, terms)
    ids, sums = terms.ids(), terms.values(implementation)

    def subtract(gradient, places, sums):
        old = gradient.at[places].get(mode="clip")
        new = (old.astype(sums.dtype) - sums).astype(gradient.dtype)
        # Without the barrier XLA reads rows while it writes them, and so copies the array.
        gradient, new = lax.optimization_barrier((gradient, new))
        return gradient.at[places].set(
            new, mode="drop", unique_indices=True, indices_are_sorted=True
        )

    def change(gradient, start):
        if whole_size:
            return subtract(gradient, ids, sums)
        # `ids` ascend, so the rows of a chunk are neighbours.
        first, end = jnp.searchsorted(ids, jnp.stack([start, start + len(gradient)]))
        size = min(_CHANGED_ROWS, ids.shape[0])

        def block(i, gradient):
            place = first + i * size + jnp.arange(size, dtype=jnp.int32)
            target = ids.at[place].get(mode="clip") - start
            beyond = len(gradient) + jnp.arange(size, dtype=jnp.int32)
            target = jnp.where(place < end, target, beyond)
            return subtract(gradient, target, sums.at[place].get(mode="clip"))

        return lax.fori_loop(0, -(-(end - first) // size), block, gradient)

    return change


def _change_by_mosaic(gradient, terms: Terms):
    """Subtracts the sums of the terms for all items, by the GPU program that updates rows."""
    by_item = terms.by_column
    (gradient,) = row_update(
        lambda arrays, sums, lag, scalars, mean: [arrays[0] - sums],
        [gradient],
        terms.data,
        by_item.rows,
        by_item.indptr,
        by_item.ends(),
        None,
        terms.dy,
    )
    return gradient


# --- choice of the form ---


def _is_squared(rule: losses.LossRule, layer: Layer) -> bool:
    return rule == losses.L2Loss() and layer.scale is None


def _is_faster(method: Method, batch: LossBatch, layer: Layer, shard: Shard) -> bool:
    """Whether Gram matrices take less time than the scores of all items."""
    if not _is_squared(method.rule, layer) or isinstance(batch.labels, Targets):
        return False
    rows, hidden = layer.kernel.shape
    parts = lax.axis_size(shard.batch) if shard.batch else 1
    size, labels = parts * len(batch.h), batch.labels
    nse = labels.nse
    if isinstance(labels, ShardedCSR):
        nse = parts * labels.blocks.nse
    # The work that does not depend on the sizes takes about as long as one chunk of scores.
    label, fixed = _CPU_LABEL, chunked_loss.CPU_CHUNK_SCORES
    if xla_is_for_gpu(method.implementation):
        label, fixed = _GPU_LABEL, chunked_loss.GPU_CHUNK_SCORES
    return rows * (size - hidden) > label * nse + fixed


def _can_update(method: Method, layer: Layer) -> bool:
    """Whether a GPU program can update the kernel while it computes the gradient."""
    if method.implementation == "mosaic_gpu":
        return True
    half = layer.kernel.dtype == jnp.bfloat16
    return method.implementation is None and half and custom_call_can_run(HOPPER)


def _chunk(method: Method, batch: int, hidden: int, num_items: int) -> int:
    """The number of items in a chunk."""
    if method.chunk_scores is not None:
        return item_chunks.chunk_size(batch, num_items, method.chunk_scores)
    for_gpu = xla_is_for_gpu(method.implementation)
    budget = _GPU_CHUNK if for_gpu else _CPU_CHUNK
    return item_chunks.chunk_size(hidden, num_items, budget)


def _product_with_mosaic(kernel, size: int, implementation: Implementation) -> bool:
    """Whether a GPU program of `pallas_kernels` computes the gradients of a chunk."""
    if implementation not in (None, "mosaic_gpu") or mosaic.unsupported(kernel, size):
        return False
    return implementation is not None or custom_call_can_run(HOPPER)


def _with_mosaic(terms: Terms, implementation: Implementation) -> bool:
    """Whether a GPU program of `pallas_kernels` updates the rows that have labels."""
    nse, hidden = terms.by_column.columns.shape[0], terms.dy.shape[1]
    if implementation is None:
        return hidden % 128 == 0 and mosaic_is_fastest(terms.dy, nse)
    return implementation == "mosaic_gpu" and hidden % 128 == 0
