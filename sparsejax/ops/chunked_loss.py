"""Losses over all items and updates from their gradients, one chunk of items at a time."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from pallas_kernels import output_loss as mosaic
from pallas_kernels import score_tiles as tiles
from pallas_kernels.slopes_product import MAX_HIDDEN, slopes_product
from sparsejax import losses
from sparsejax.mesh.layout import call_on_each_device
from sparsejax.ops import item_chunks, softmax
from sparsejax.ops.implementations import (
    HOPPER,
    Implementation,
    custom_call_can_run,
    xla_is_for_gpu,
)
from sparsejax.ops.item_chunks import Shard
from sparsejax.ops.precision import Precision, Word, check_precision
from sparsejax.ops.targets import Labels, TargetColumns, Targets

# Number of scores in a chunk. A step reads and writes them several times, and 4 MB stay in the
# cache of a CPU. 2^18 to 2^21 are within 10 % of each other (two cores; batch 64 to 4,096).
CPU_CHUNK_SCORES = 2**20
# A CPU keeps the scores of a softmax between its two passes if there are at most this many
# (.13 GB in float32). Writing and reading them takes a fifth of the time of their product.
_KEPT_SCORES = 2**25
# On a GPU a chunk has to be large enough for its products to be fast. A score takes about
# ten bytes with XLA, and two with the Mosaic programs.
GPU_CHUNK_SCORES = 2**25
MOSAIC_CHUNK_SCORES = 2**27
# The first number is the least number of items in a chunk: with fewer, the program that computes
# the kernel's gradient has too few tiles for all SMs. The second is the largest number of scores
# in a chunk: more would take memory without saving time.
_MOSAIC_CHUNK_ITEMS, _MOST_MOSAIC_SCORES = 2**14, 2**28
# With more scores than this, float32 operands are rounded for the Mosaic programs. With
# fewer, XLA's TF32 products win: a step takes .4 ms longer (1,024 x 27,278, hidden 1,024),
# but they are lowered and compiled 3 s sooner (H200). At 2^30 a step takes 12 ms longer.
ROUNDED_SCORES = 2**27


# (first item, slopes [batch, size], h [batch, hidden], carry) -> carry, sums [size]
type UpdateKernel[Carry] = Callable[
    [jax.typing.ArrayLike, jax.Array, jax.Array, Carry], tuple[Carry, jax.Array | None]
]


class Layer(NamedTuple):
    """The operands of the scores, for all items or a chunk; or the gradients in these operands."""

    kernel: jax.Array
    bias: jax.Array | None
    scale: jax.Array | None


class LossBatch(NamedTuple):
    """Rows whose loss is computed.

    Attributes:
      h: hidden vectors.
      labels: `[batch, items]`.
      weights: factors of the examples' losses. None is 1 for each.
    """

    h: Float[Array, "batch hidden"]
    labels: Labels
    weights: Float[Array, "batch"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """The static settings that say how a loss is computed.

    Attributes:
      rule: the loss.
      kernel_spec: how the kernel's rows are divided over the mesh, as in `output_loss`.
      implementation: "mosaic_gpu", "xla" or "xla_gpu"; None picks the fastest here.
      chunk_scores: about how many scores a chunk has (`batch` times its items). None
        chooses the fastest one here.
      precision: precision of the products of float32 operands, as in `output_loss`.
      form: "chunks" computes the scores of a chunk of items at a time, "gram" replaces the
        scores by Gram matrices (see `gram_loss`), "kept" keeps all scores of some rows (see
        `kept_scores`), and "twice" writes no score (see `two_passes`). None picks the fastest
        form here.
    """

    rule: losses.LossRule
    kernel_spec: P | None = None
    implementation: Implementation = None
    chunk_scores: int | None = None
    precision: Word = "default"
    form: Literal["chunks", "gram", "kept", "twice"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updates[Carry]:
    """The functions that use the gradients of a chunk.

    Attributes:
      layer: function that takes the operands of the scores from the carry, or returns
        constants.
      update: `update(start, gradients, carry)` returns the new carry. None if only the
        losses are wanted.
      update_kernel: a function that updates the kernel in place of `update`, where its
        gradient is the product `slopes^T h` of a chunk's slopes and `h`. It is called as
        `update_kernel(start, slopes, h, carry)`, with bfloat16 arrays whose number of rows
        is a multiple of 128. The kernel gradient that `update` gets then has no rows.
        With a bias, `update_kernel` also returns the bias's gradient: the slopes, summed
        over the batch in float32.
      gradient_dtype: dtype of the kernel's gradient that `update` gets. The default, and
        the dtype of the gradients of bias and scale, is that of the sums of products.
    """

    layer: Callable[[Carry], Layer]
    update: Callable[[jax.typing.ArrayLike, Layer, Carry], Carry] | None
    update_kernel: UpdateKernel[Carry] | None = None
    gradient_dtype: jnp.dtype | None = None


def loss_and_updates[Carry](
    method: Method,
    batch: LossBatch,
    carry: Carry,
    updates: Updates[Carry],
    shard: Shard | None = None,
) -> tuple[Float[Array, "batch"], Float[Array, "batch hidden"] | None, Carry]:
    """Computes the losses, and applies an update for the gradient of each chunk of items.

    ::

        for each chunk of items, start .. start + size - 1:
            read rows start .. start + size - 1 of layer(carry)
            gradients = those of sum_b weights_b loss_b in these rows      (a `Layer`)
            carry = update(start, gradients, carry)

    `update` can write a gradient into an array. It can also apply an optimizer's rule to
    the rows of parameters and state in the carry: then no gradient of the kernel's size
    ever exists. A chunk's rows are read before they are updated, and each row is in one
    chunk. Softmax reads all rows once before the first update. Padding rows in a chunk
    have a gradient of 0. Padding rows outside all chunks are never updated.

    Not differentiable. On a mesh (see `over_items`), operands are the parts that the
    device has, except for labels that are not in blocks: these are all rows and columns.
    The device works on its items for all rows of the batch.

    Args:
      method: how the loss is computed.
      batch: the rows.
      carry: a tree of arrays that `update` changes, possibly empty.
      updates: functions that receive the gradients of each chunk.
      shard: the part of a mesh's work that this device does.

    Returns:
      The unweighted losses; the gradient of `h`, None without `update`; the carry.
    """
    rule, labels, shard = method.rule, batch.labels, shard or Shard()
    layer, update = updates.layer, updates.update
    whole = layer(carry)
    rows, dtype = len(whole.kernel), item_chunks.accumulator(batch.h.dtype)
    entries, broken = item_chunks.labels_of(labels, shard, rows)
    weights = jnp.ones(len(batch.h), dtype)
    if weighted := batch.weights is not None:
        weights = batch.weights.astype(dtype)
    ignored = None
    if isinstance(labels, Targets):
        ignored, weighted = labels.ignored, True
        weights = jnp.where(ignored, 0, weights)
    weights = jnp.where(broken & (weights != 0), jnp.nan, weights)
    h, weights = shard.all_rows((batch.h, weights))
    num_rows = len(h)
    by_mosaic = with_mosaic(method, h, whole, labels)
    limit = labels.num_cols - shard.first_item(rows)
    with_values = not isinstance(rule, losses.SoftmaxCrossEntropy)
    chunks: Chunks
    if by_mosaic:
        h = h.astype(jnp.bfloat16)
        chunks = MosaicChunks(
            h, entries, limit, with_values=with_values, with_product=update is not None
        )
    else:
        for_gpu = xla_is_for_gpu(method.implementation)
        chunks = XlaChunks(
            h, entries, limit, for_gpu=for_gpu, precision=method.precision
        )
    num_items = rows
    if not shard.items:
        num_items = item_chunks.rounded_items(labels.num_cols, rows)
    size = chunks.size(num_items, method.chunk_scores)
    is_product = by_mosaic and whole.scale is None
    update_kernel = updates.update_kernel if is_product else None

    def fold(step, carry):
        return item_chunks.fold(step, carry, num_items, size)

    h_live = h
    if weighted:  # rows with weight 0 become 0, because 0 * inf would be NaN
        h_live = jnp.where((weights != 0)[:, None], h, 0)

    dot = functools.partial(item_chunks.dot, precision=method.precision)

    def gradients(chunk: Layer, delta, product) -> tuple[Layer, jax.Array]:
        # `update_kernel` computes the kernel's gradient, so `layer_gradients` must not.
        slopes = delta if update_kernel is None else delta[:, :0]
        out = updates.gradient_dtype
        return layer_gradients(chunk, delta, slopes, product, h_live, dot, out)

    def finish(per_example, dh, carry):
        per_example = jnp.where(broken, jnp.nan, shard.own_rows(per_example))
        if ignored is not None:
            per_example = jnp.where(ignored, 0, per_example)
        return per_example, None if dh is None else shard.own_sums(dh), carry

    zeros = jnp.zeros(num_rows, dtype)
    dh = None if update is None else jnp.zeros(h.shape, dtype)
    if isinstance(rule, losses.SoftmaxCrossEntropy):
        start_of = chunks.no_scores()
        keeping, may_keep = None, update is not None and method.chunk_scores is None
        if may_keep and isinstance(chunks, XlaChunks) and chunks.can_keep(num_items):
            keeping = chunks
            start_of.append(lax.empty((num_rows, num_items), dtype))
        found = item_chunks.fold(
            lambda start, size, known: chunks.normalise(start, size, whole, known),
            start_of,
            num_items,
            chunks.size_to_normalise(num_items, size, whole),
        )
        if keeping is not None:
            chunks = keeping = dataclasses.replace(keeping, kept=found.pop())
        found = [x[:, :num_rows] for x in found]
        if isinstance(entries, TargetColumns):
            parts = found[0].shape[0]
            of_targets = softmax.target_scores(h, whole, entries, limit)
            found[2:] = [jnp.pad(x[None], ((0, parts - 1), (0, 0))) for x in of_targets]
        elif keeping is not None:
            found[2:] = [x[None] for x in keeping.label_sums()]
        found, means = softmax.Normaliser.merge(found), None
        if rule.label_smoothing:
            means = softmax.mean_scores(h, whole, limit, shard)
        made = softmax.loss_and_slopes(rule, found, weights, means, shard)
        per_example, function, vectors = made
        if update is None:
            return finish(per_example, None, carry)
    else:
        vectors = (weights,)
        function = functools.partial(_elementwise, rule)
        if by_mosaic and rule == losses.SigmoidBinaryCrossEntropy():
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
            # The barrier orders all reads of these rows before the update, so that it is done in
            # place.
            made, delta, dh = lax.optimization_barrier((made, delta, dh + more))
            if update_kernel is not None:
                pad = item_chunks.pad_rows
                carry, dbias = update_kernel(start, pad(delta), pad(h_live), carry)
                made = made._replace(bias=dbias)
            carry = update(start, made, carry)
        return total, dh, carry

    total, dh, carry = fold(step, (zeros, dh, carry))
    return finish(per_example + shard.sum_over_items(total), dh, carry)


def layer_gradients(
    chunk: Layer,
    delta: Float[Array, "batch size"],
    slopes: Float[Array, "batch size"] | Float[Array, "batch 0"],
    product: jax.Array | None,
    h: Float[Array, "batch hidden"],
    dot: Callable[..., jax.Array],
    gradient_dtype: jnp.dtype | None = None,
) -> tuple[Layer, Float[Array, "batch hidden"]]:
    """The gradients in a chunk of items and in `h`, computed from the score gradients.

    Args:
      chunk: the operands of the scores.
      delta: the gradient of the loss in each score.
      slopes: the array `delta` again; or `[batch, 0]`, if kernel and bias need no
        gradient.
      product: the product of `delta` with the kernel, if it is computed already;
        otherwise None.
      h: hidden vectors; 0 in rows whose weight is 0.
      dot: a product, as `item_chunks.dot`.
      gradient_dtype: dtype of the kernel's gradient; by default that of the sums of
        products.
    """
    dtype = item_chunks.accumulator(h.dtype)
    out = dtype if chunk.scale is not None else gradient_dtype or dtype
    dkernel = dot(slopes, h, (0, 0), out)
    dbias = dscale = None
    kernel = chunk.kernel
    if chunk.bias is not None and slopes is delta:
        dbias = jnp.sum(delta, axis=0, dtype=dtype)
    if chunk.scale is not None:
        # d score_bi / d scale_i = h_b . kernel_i: summed over b, a row of `dkernel`
        # before scaling times a row of `kernel`.
        dscale = jnp.sum(dkernel * kernel, axis=1)
        scale = chunk.scale[:, None]
        kernel = kernel * scale
        dkernel = (dkernel * scale).astype(gradient_dtype or dtype)
    if product is None:
        product = dot(delta, kernel.astype(h.dtype), (1, 0))
    return Layer(dkernel, dbias, dscale), product


def over_items(
    f: Callable[[Shard, LossBatch, Any], tuple[Array, Array | None, Any]],
    batch: LossBatch,
    arrays: Any,
    kernel_spec: P | None = None,
) -> tuple[Array, Array | None, Any]:
    """Calls `f(shard, batch, arrays)` on each device with the device's parts of the arguments.

    Args:
      f: function that returns, as `loss_and_updates` does: an array with a row for each row of
        the batch; another such array, or None; and a tree of arrays with a row for each item,
        or None.
      batch: the rows.
      arrays: a tree of arrays with a row for each item.
      kernel_spec: how the kernel's rows are divided over the mesh, as in `output_loss`.
    """
    labels = batch.labels
    num_rows = len(jax.tree.leaves(arrays)[0])
    shard = item_chunks.shard_of(kernel_spec, labels, len(batch.h), num_rows)
    if shard is None:
        return f(Shard(), batch, arrays)
    rows, items = shard.rows_spec, shard.items_spec
    specs: Any = rows, item_chunks.entries_spec(labels, shard), rows
    return call_on_each_device(
        functools.partial(f, shard),
        (batch._replace(labels=dataclasses.replace(labels, transposed=None)), arrays),
        (LossBatch(*specs), items),
        (rows, rows, items),
    )


def weighted_sum(per_example: jax.Array, weights: jax.Array | None) -> jax.Array:
    """`sum_b weights_b loss_b`; a loss with weight 0 may be NaN."""
    if weights is None:
        return jnp.sum(per_example)
    weights = weights.astype(per_example.dtype)
    return jnp.sum(jnp.where(weights == 0, 0, weights * per_example))


# --- functions for `Chunks.slopes`, which ignores the slopes of rows with weight 0 ---


def _elementwise(rule, scores, labels, listed, weights):
    """Values of an elementwise loss, and its weighted derivatives with respect to the scores."""
    values, slopes = jax.jvp(
        lambda scores: rule(scores, labels, listed), (scores,), (jnp.ones_like(scores),)
    )
    return values, weights * slopes


def _sigmoid(scores, labels, listed, weights):
    """The sigmoid cross-entropy with labels 1, as `_elementwise` computes it; a function for the
    GPU program.
    """
    del labels
    scores = jnp.where(listed, -scores, scores)
    odds = jnp.exp(-jnp.abs(scores))
    slopes = jnp.square(lax.rsqrt(1 + odds))
    slopes = jnp.where(scores > 0, slopes, slopes * odds)
    return jnp.maximum(scores, 0), odds, jnp.where(listed, -weights, weights) * slopes


@dataclasses.dataclass(frozen=True)
class Chunks(abc.ABC):
    """How an implementation computes with the scores of a chunk of items.

    Attributes:
      h: hidden vectors.
      entries: entries of the labels: rows, columns and values.
      limit: kernel rows from this one on are padding, not items.
    """

    h: Float[Array, "batch hidden"]
    entries: item_chunks.Entries | TargetColumns
    limit: jax.typing.ArrayLike

    @abc.abstractmethod
    def size(self, num_items: int, chunk_scores: int | None) -> int:
        """The number of items in a chunk of about `chunk_scores` scores (None: the fastest)."""

    def size_to_normalise(self, num_items: int, size: int, layer: Layer) -> int:
        """The number of items in a chunk for `normalise`, where other chunks have `size` items."""
        del num_items, layer
        return size

    @abc.abstractmethod
    def slopes(
        self,
        start: jax.typing.ArrayLike,
        size: int,
        layer: Layer,
        function: Callable[..., Any],
        vectors: Sequence[Float[Array, "batch"]],
    ) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
        """Sums the values of a function of the scores over the items, and returns its slopes.

        The function gets the scores, the labels, a mask that is true where an entry has a label,
        and the `vectors` as columns. The first vector holds the weights: where a weight is
        0, the slopes are 0.

        Returns:
          The values summed over the items, or None; the slopes `[batch, size]`; and the
          product of the slopes with the kernel if it costs nothing more, or None.
        """

    @abc.abstractmethod
    def no_scores(self) -> list[Float[Array, "parts padded"]]:
        """The initial value of `normalise`: the sums of softmax for each part of the items.

        These are the arrays of a `softmax.Normaliser`. The label terms are optional
        when each row has one label.
        """

    @abc.abstractmethod
    def normalise(
        self,
        start: jax.typing.ArrayLike,
        size: int,
        layer: Layer,
        known: list[Float[Array, "parts padded"]],
    ) -> list[Float[Array, "parts padded"]]:
        """Adds the scores of this chunk to the sums `known`, and returns them."""


@final
@dataclasses.dataclass(frozen=True)
class XlaChunks(Chunks):
    """Chunks whose scores are written to memory.

    Attributes:
      for_gpu: whether XLA's operations have the form that is fast on GPUs.
      precision: precision of the products of float32 operands.
      kept: all scores, if `normalise` keeps them: it returns this array after its sums.
    """

    for_gpu: bool = dataclasses.field(kw_only=True)
    precision: Word = dataclasses.field(kw_only=True)
    kept: Float[Array, "batch items"] | None = None

    def size(self, num_items, chunk_scores):
        if chunk_scores is None:
            chunk_scores = GPU_CHUNK_SCORES if self.for_gpu else CPU_CHUNK_SCORES
        return item_chunks.chunk_size(len(self.h), num_items, chunk_scores)

    def can_keep(self, num_items: int) -> bool:
        """Whether all scores are few enough to be kept, and make more than one chunk.

        XLA computes a single chunk once for both passes. On a mesh, each device would keep so
        many scores, so none are kept there.
        """
        scores = len(self.h) * num_items
        several = self.size(num_items, None) < num_items
        few = scores <= _KEPT_SCORES and jax.sharding.get_abstract_mesh().empty
        return not self.for_gpu and several and few

    def scores(self, start, size, layer: Layer):
        """The scores of a chunk."""
        return item_chunks.scores(self.h, *layer, start, size, precision=self.precision)

    def labels(self, start, scores):
        """The labels of a chunk, and a mask that is true where there is a label."""
        listed = self.entries.dense(True, start, scores.shape)
        labels = jnp.ones_like(scores)
        if self.entries.data is not None:
            data = self.entries.data.astype(scores.dtype)
            labels = self.entries.dense(data, start, scores.shape)
        return labels, listed

    def inside(self, start, size):
        """A mask of the columns that are items, not padding."""
        return (start + jnp.arange(size, dtype=jnp.int32) < self.limit)[None]

    def slopes(self, start, size, layer, function, vectors):
        columns = [vector[:, None] for vector in vectors]
        inside = self.inside(start, size)
        if self.kept is not None:
            slopes = self._slopes_of_kept(start, size, function, columns)
            slopes = jnp.where(inside & (columns[0] != 0), slopes, 0)
            return None, slopes.astype(self.h.dtype), None
        scores = self.scores(start, size, layer)
        operands = scores, *self.labels(start, scores)
        values, slopes = function(*operands, *columns)
        slopes = jnp.where(inside & (columns[0] != 0), slopes, 0).astype(self.h.dtype)
        if values is not None and self.for_gpu:
            # Without the barrier, XLA fuses this with the sum of the values, and takes more than
            # twice as long.
            *operands, slopes = lax.optimization_barrier((*operands, slopes))
            values, _ = function(*operands, *columns)
        if values is not None:
            values = jnp.sum(jnp.where(inside, values, 0), axis=1)
        return values, slopes, None

    def _slopes_of_kept(self, start, size, function, columns):
        """Computes slopes without labels, then overwrites the slopes of entries that have
        labels.
        """
        assert self.kept is not None
        scores = lax.dynamic_slice_in_dim(self.kept, start, size, 1)
        none = jnp.zeros((), scores.dtype), jnp.zeros((), bool)
        _, slopes = function(scores, *none, *columns)
        entries, _, score, labels = self._kept_entries()
        row, place = entries.places(start, (len(self.h), size))
        given = [column[row, 0] for column in columns]
        _, of_entries = function(score, labels, jnp.ones((), bool), *given)
        return slopes.at[row, place].set(of_entries, mode="drop", unique_indices=True)

    def _kept_entries(self):
        """The entries with labels, a mask of those among the device's items, their scores, and
        their labels.
        """
        assert self.kept is not None
        entries, dtype = self.entries, self.kept.dtype
        if isinstance(entries, TargetColumns):
            rows = jnp.arange(len(self.h), dtype=jnp.int32)
            entries = item_chunks.Entries(rows, entries.columns, None)
        here = (entries.rows >= 0) & (entries.columns >= 0)
        here &= entries.columns < self.kept.shape[1]
        at = (jnp.where(here, x, 0) for x in (entries.rows, entries.columns))
        score = self.kept[*at]
        labels = jnp.ones_like(score)
        if entries.data is not None:
            labels = entries.data.astype(dtype)
        return entries, here, score, labels

    def label_sums(self) -> list[Float[Array, "batch"]]:
        """Sums of labels, and of labels times kept scores."""
        entries, here, score, labels = self._kept_entries()
        rows = jnp.where(here, entries.rows, len(self.h))
        labels = jnp.where(here, labels, 0)
        zeros = jnp.zeros(len(self.h), score.dtype)
        found = losses.times_labels(score, labels)
        return [zeros.at[rows].add(x, mode="drop") for x in (labels, found)]

    def no_scores(self):
        zeros = jnp.zeros((1, len(self.h)), item_chunks.accumulator(self.h.dtype))
        return [zeros - jnp.inf, zeros, zeros, zeros]

    def normalise(self, start, size, layer, known):
        scores = self.scores(start, size, layer)
        known, kept = known[:4], known[4:]
        if kept:
            kept = [lax.dynamic_update_slice_in_dim(kept[0], scores, start, 1)]
        scores = jnp.where(self.inside(start, size), scores, -jnp.inf)
        largest = jnp.max(scores, axis=1)
        total = jnp.sum(jnp.exp(scores - softmax.finite(largest)[:, None]), axis=1)
        of_labels = [jnp.zeros_like(total)] * 2
        if not kept and not isinstance(self.entries, TargetColumns):
            labels, listed = self.labels(start, scores)
            found = losses.times_labels(scores, labels)
            of_labels = [
                jnp.sum(jnp.where(listed, x, 0), axis=1) for x in (labels, found)
            ]
        new = largest, total, *of_labels
        parts = (
            jnp.concatenate([old, x[None]]) for old, x in zip(known, new, strict=True)
        )
        return [x[None] for x in softmax.Normaliser.merge(parts)] + kept


@final
@dataclasses.dataclass(frozen=True)
class MosaicChunks(Chunks):
    """Chunks whose scores exist only in tiles; the batch is padded to whole tiles.

    `h` is bfloat16. A float32 kernel is rounded, a chunk at a time.

    Attributes:
      with_values: whether the function of the scores has values.
      with_product: whether the product of the score gradients with the kernel is
        wanted.
    """

    with_values: bool = dataclasses.field(kw_only=True)
    with_product: bool = dataclasses.field(kw_only=True)

    def size(self, num_items, chunk_scores):
        batch = len(item_chunks.pad_rows(self.h))
        size = item_chunks.chunk_size(
            batch, num_items, chunk_scores or mosaic_chunk_scores(batch)
        )
        return -(-size // tiles.TILE_ITEMS) * tiles.TILE_ITEMS

    def size_to_normalise(self, num_items, size, layer):
        # With one label for each row, the GPU program needs no mask of a chunk's labels.
        one_label = isinstance(self.entries, TargetColumns)
        return num_items if one_label and layer.kernel.dtype == self.h.dtype else size

    def _arguments(self, start, size, layer: Layer) -> dict[str, Any]:
        """The arguments that both GPU programs have."""
        h, limit = item_chunks.pad_rows(self.h), self.limit
        if layer.kernel.dtype != h.dtype:
            layer = jax.tree.map(
                lambda x: item_chunks.slice_rows(x, start, size), layer
            )
            layer = layer._replace(kernel=layer.kernel.astype(h.dtype))
            start, limit = 0, limit - start
        bias, scale = (
            None if x is None else x.astype(jnp.float32)
            for x in (layer.bias, layer.scale)
        )
        return {
            "h": h,
            "kernel": layer.kernel,
            "bias": bias,
            "scale": scale,
            "start": start,
            "size": size,
            "limit": limit,
        }

    def slopes(self, start, size, layer, function, vectors):
        arguments = self._arguments(start, size, layer)
        shape = len(arguments["h"]), size
        arguments |= {
            "labels": self.entries.words(start, shape, counted=True),
            "vectors": [item_chunks.pad_rows(vector) for vector in vectors],
            "with_values": self.with_values,
        }
        batch, product = len(self.h), None
        if self.with_product and layer.scale is None and self.h.shape[1] <= MAX_HIDDEN:
            del arguments["scale"]
            values, slopes, product = slopes_product(function, **arguments)
            assert slopes is not None
            product = jnp.sum(product, axis=0)[:batch]
        else:
            values, slopes = mosaic.slopes(function, **arguments)
        values = None if values is None else jnp.sum(values, axis=0)[:batch]
        return values, slopes[:batch], product

    def no_scores(self):
        with_labels = not isinstance(self.entries, TargetColumns)
        rows = len(item_chunks.pad_rows(self.h))
        return mosaic.no_scores(rows, with_labels=with_labels)

    def normalise(self, start, size, layer, known):
        arguments, words = self._arguments(start, size, layer), None
        if not isinstance(self.entries, TargetColumns):
            shape = len(arguments["h"]), size
            words = self.entries.words(start, shape, counted=True)
        return mosaic.normalise(known=known, words=words, **arguments)


def mosaic_chunk_scores(batch: int) -> int:
    """About how many scores a chunk of the GPU programs has."""
    most = min(batch * _MOSAIC_CHUNK_ITEMS, _MOST_MOSAIC_SCORES)
    return max(MOSAIC_CHUNK_SCORES, most)


def operand_dtype(
    precision: Precision, dtype: jnp.dtype, batch: int, items: int
) -> jnp.dtype:
    """The dtype that operands have in the fastest products on a Hopper GPU."""
    rounds = dtype == jnp.float32 and check_precision(precision) == "default"
    if rounds and batch * items > ROUNDED_SCORES:
        return jnp.dtype(jnp.bfloat16)
    return dtype


def with_mosaic(method: Method, h, layer: Layer, labels: Labels) -> bool:
    """Whether the GPU programs compute the scores.

    Raises:
      NotImplementedError: "mosaic_gpu" was chosen, and cannot take these operands.
    """
    why = _unsupported(h, layer, labels, method.precision)
    if method.implementation == "mosaic_gpu" and why:
        raise NotImplementedError(f'the kernel "mosaic_gpu" {why}; use "xla"')
    if method.implementation is not None:
        return method.implementation == "mosaic_gpu"
    ours = type(method.rule).__module__ == losses.__name__
    if why or not ours or not custom_call_can_run(HOPPER):
        return False
    dtype = operand_dtype(method.precision, h.dtype, len(h), len(layer.kernel))
    return dtype == jnp.bfloat16


def _unsupported(h, layer: Layer, labels: Labels, precision: Word) -> str | None:
    """The reason why the GPU programs cannot be used; None if they can be used."""
    if labels.data is not None:
        return "takes labels without values"
    dtype = h.dtype
    if dtype == jnp.float32:
        if precision != "default":
            return (
                f'rounds float32 operands to bfloat16, but precision is "{precision}"'
            )
        dtype = jnp.dtype(jnp.bfloat16)
    return tiles.unsupported(h.shape[1], len(layer.kernel), dtype)
