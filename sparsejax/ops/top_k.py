"""The best items of an output layer, without an array `[batch, items]`."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from pallas_kernels import score_tiles as tiles
from pallas_kernels import top_k as kernels
from pallas_kernels.selection import best_places, best_places_inside, members, pick
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import call_on_each_device
from sparsejax.mesh.promotion import promoting
from sparsejax.ops import item_chunks
from sparsejax.ops.implementations import (
    HOPPER,
    Implementation,
    check_implementation,
    custom_call_can_run,
    xla_is_for_gpu,
)
from sparsejax.ops.item_chunks import Shard
from sparsejax.ops.precision import Precision, Word, check_precision


class Tuning(NamedTuple):
    """Numbers on which the time and memory of `top_k` depend, but not its result.

    Attributes:
      chunk_scores: approximate number of scores in a chunk: `batch` times its items.
      group: number of neighbouring scores in a group of `select`, if there are at least
        `many` scores for each of the k.
      small_group: number of scores in a group if there are fewer than `many` for each of the k.
      many: number of scores for each of the k from which on `group` replaces
        `small_group`.
      direct: up to this many scores for each of the k are sorted without groups.
      chunk_items: least number of items in a chunk for each of the k, as the k best items
        of previous chunks are sorted with each chunk.
      written: with at most this many items for each of the k and each element of a hidden
        vector, the GPU program writes the scores. With more items it is faster to compute
        the scores of the best groups again.
      whole: with at most this many scores there is a single chunk.
    """

    chunk_scores: int
    group: int
    small_group: int
    many: int
    direct: int
    chunk_items: int = 16
    written: int = 5
    whole: int = 0


# Measured on two cores with k 20, batch 512, hidden 256 and 40,960 items. Chunks of 2^19 scores
# take 1.3 times as long as 2^21; 2^20 and 2^22 take 1.1 times as long. Sorting is cheap: groups of
# 16 to 64 differ little, and fewer than four groups for each of the k are slower. With 64 rows,
# two chunks, each with a copy of its vectors, take 1.4 times as long as one.
CPU = Tuning(
    chunk_scores=2**21, group=32, small_group=32, many=0, direct=127, whole=2**22
)
# On a GPU the best of a large chunk are found as fast as those of a small one, so a chunk has
# 1 GiB of scores. Sorting 512 numbers takes 25 us, 2,048 five times that (H200, batch 1,024).
GPU = Tuning(chunk_scores=2**28, group=16, small_group=4, many=64, direct=8)


@promoting()
def top_k(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    k: int,
    *,
    bias: Float[Array, "items"] | None = None,
    scale: Float[Array, "items"] | None = None,
    exclude: SparseRows | None = None,
    num_items: int | None = None,
    kernel_spec: P | None = None,
    implementation: Implementation = None,
    precision: Precision = None,
) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
    """Ids and scores of the `k` best items of each row, best first.

    >>> h, kernel = jnp.ones((1, 1)), jnp.array([[1.0], [3.0], [2.0]])
    >>> ids, scores = top_k(h, kernel, 2)
    >>> ids.tolist(), scores.tolist()
    ([[1, 2]], [[3.0, 2.0]])

    ::

        score_bi = (h_b . kernel_i) scale_i + bias_i        -inf for excluded items

    Exact: the result is that of a full sort by descending score, then ascending id.
    Operands are used as they are, except for float32 on a GPU, see `precision`. Scores
    are summed and ranked in float32. NaN ranks above everything and is returned as NaN.
    An item whose score is -inf is never returned: where items run out (`k` may exceed
    their number), the id is -1 and the score -inf. A bias of -inf excludes an item in
    all rows. Excluded items are never returned, even if their score would be NaN.

    Scores exist for a chunk of items at a time, so memory does not grow with the number of
    items. With "mosaic_gpu" and many items, only the maximum of each 16 scores exists. Memory
    is that of a chunk (on a GPU up to 1 GiB), or about 16 times the result if that is more.

    Args:
      h: hidden vectors.
      kernel: one row for each item. It, `bias` and `scale` may have further rows, which
        are padding and never returned.
      k: number of items in each row of the result, at least 1.
      bias: numbers that are added to the scores. None is 0.
      scale: factor of the scores, such as 1 / norm for cosines. None is 1.
      exclude: `[batch, items]`, items not to be returned; values are ignored. A row that
        does not fit in an overfull CSR, or has an index outside the items, gets scores of
        NaN and arbitrary ids. In blocks on a mesh, it says how the operands are
        divided, like `labels` of `sparsejax.output_loss`.
      num_items: number of the kernel's rows that are items; by default the number of columns
        of `exclude`, or all rows.
      kernel_spec: how the kernel is divided over the mesh that is set, see
        `sparsejax.output_loss`. The best of each part are merged.
      implementation: "mosaic_gpu" is the program for Hopper GPUs, for bfloat16 operands.
        "xla" is the reference, "xla_gpu" the reference as GPUs run it. None chooses the fastest
        one here.
      precision: precision of the products of float32 operands. "highest" is float32.
        "high" has errors of about 2^-16 on a GPU: three products of bfloat16 matrices.
        "default" or None takes TF32 on a GPU, with errors of 2^-11. On a CPU all of
        them are float32.

    Raises:
      ValueError: `k` is no integer or below 1, shapes that do not match, an unknown
        implementation or precision, a spec that does not fit the mesh.
      TypeError: `h` and `kernel` differ in dtype.
      NotImplementedError: "mosaic_gpu" cannot take these operands.
    """
    check_implementation(implementation)
    precision = check_precision(precision)
    h, kernel, bias, scale = item_chunks.arrays(h, kernel, bias, scale)
    item_chunks.check_layer(h, kernel, bias, scale)
    if not isinstance(k, numbers.Integral) or k < 1:
        raise ValueError(f"k must be an integer and at least 1, got {k!r}")
    num_items = _num_items(h, kernel, exclude, num_items)
    if implementation is None and custom_call_can_run(HOPPER):
        why = tiles.unsupported(h.shape[1], kernel.shape[0], h.dtype)
        implementation = "xla" if why else "mosaic_gpu"
    return top_k_tuned(
        h,
        kernel,
        bias,
        int(k),
        scale=scale,
        exclude=exclude,
        num_items=num_items,
        kernel_spec=kernel_spec,
        implementation=implementation,
        precision=precision,
        tuning=GPU if xla_is_for_gpu(implementation) else CPU,
    )


def top_k_tuned(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    k: int,
    *,
    scale: Float[Array, "items"] | None = None,
    exclude: SparseRows | None = None,
    num_items: int,
    kernel_spec: P | None = None,
    implementation: Implementation = None,
    precision: Precision = None,
    tuning: Tuning,
) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
    """Computes `top_k` from checked arguments.

    `implementation` None is "xla" here, as is "xla_gpu": only `tuning` differs.
    """
    with_mosaic, word = implementation == "mosaic_gpu", check_precision(precision)
    how = _How(k, num_items, kernel_spec, word, tuning, with_mosaic)
    return _compiled(h, kernel, bias, scale, exclude, how=how)


def _num_items(
    h: jax.Array, kernel: jax.Array, exclude: SparseRows | None, num_items: int | None
) -> int:
    if exclude is not None:
        item_chunks.check_matrix("exclude", exclude, h, kernel)
        if num_items not in (None, exclude.num_cols):
            raise ValueError(
                f"exclude has {exclude.num_cols:,} columns but num_items is "
                f"{num_items:,}; one column for each item"
            )
        return exclude.num_cols
    if num_items is None:
        num_items = kernel.shape[0]
    if not 1 <= num_items <= kernel.shape[0]:
        raise ValueError(
            f"num_items must be between 1 and the kernel's {kernel.shape[0]:,} rows, "
            f"got {num_items:,}"
        )
    return num_items


class _How(NamedTuple):
    """Static arguments of `top_k_tuned`."""

    k: int
    num_items: int
    kernel_spec: P | None
    precision: Word
    tuning: Tuning
    with_mosaic: bool


@functools.partial(jax.jit, static_argnames="how")
def _compiled(
    h: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    exclude: SparseRows | None,
    *,
    how: _How,
) -> tuple[jax.Array, jax.Array]:
    shard = item_chunks.shard_of(how.kernel_spec, exclude, len(h), len(kernel))
    best = functools.partial(_best, how, shard or Shard())
    if shard is None:
        return best(h, kernel, bias, scale, exclude)
    if exclude is not None:
        exclude = dataclasses.replace(exclude, transposed=None)
    batch, items = shard.rows_spec, shard.items_spec
    return call_on_each_device(
        best,
        (h, kernel, bias, scale, exclude),
        (batch, items, items, items, item_chunks.entries_spec(exclude, shard)),
        (batch, batch),
    )


def _best(how: _How, shard: Shard, h, kernel, bias, scale, exclude):
    """The k best items among the items of all devices, for this device's rows of the batch."""
    k, num_items, _, precision, tuning, with_mosaic = how
    broken = jnp.zeros(len(h), bool)
    h = shard.all_rows(h)
    batch, rows = len(h), len(kernel)
    why = tiles.unsupported(h.shape[1], rows, h.dtype)
    if with_mosaic and why:
        raise NotImplementedError(f'the kernel "mosaic_gpu" {why}; use "xla"')
    here = rows
    if not shard.items:
        here = item_chunks.rounded_items(num_items, rows)
    least = batch * k * tuning.chunk_items
    usual = tuning.whole if batch * here <= tuning.whole else tuning.chunk_scores
    size = item_chunks.chunk_size(batch, here, max(usual, least))
    again = False
    if with_mosaic:
        # A chunk may be larger here, as only the maxima of groups are stored, and a mask of
        # excluded items, which takes half as much memory as the maxima.
        larger = max(tuning.chunk_scores * kernels.GROUP // 2, least)
        larger = item_chunks.chunk_size(batch, here, larger)
        again = larger > tuning.written * k * h.shape[1]
        size = larger if again else size
        size = min(here, tiles.rounded_items(size))
    first_item = shard.first_item(rows)
    excluded = None
    if exclude is not None:
        excluded, broken = item_chunks.entries_of(exclude, shard, rows)

    def step_with_mosaic(start, size, best):
        # If there are few rows, half of the scores of the usual tiles would be padding.
        rows = tiles.rows_for(batch, size) if again else None
        padded = item_chunks.pad_rows(h, rows)
        operands = (
            padded,
            kernel,
            None if bias is None else bias.astype(jnp.float32),
            None if scale is None else scale.astype(jnp.float32),
            None
            if excluded is None
            else excluded.words(start, (len(padded), size), counted=True),
        )
        options = {"start": start, "limit": num_items - first_item}
        largest, more = (
            x[:batch]
            for x in kernels.maxima(
                *operands, **options, size=size, with_scores=not again
            )
        )
        if again:
            groups = best_places_inside(more, largest, k)
            scores = kernels.scores_of_groups(*operands, groups, **options)
        else:
            groups = best_places(largest, k)
            scores = pick(more, groups, kernels.GROUP)
        places = members(groups, kernels.GROUP)
        found = best_places(scores, k)
        places, scores = pick(places, found), one_of_each(pick(scores, found))
        return join(best, (places + first_item + start, scores), k)

    def step(start, size, best):
        scores = item_chunks.scores(
            h, kernel, bias, scale, start, size, precision=precision
        )
        if excluded is not None:
            place = excluded.places(start, (batch, size))
            scores = scores.at[place].set(-jnp.inf, mode="drop", unique_indices=True)
        scores = one_of_each(scores)
        if bias is not None:
            denied = item_chunks.slice_rows(bias, start, size) == -jnp.inf
            scores = jnp.where(denied[None], -jnp.inf, scores)
        inside = first_item + start + jnp.arange(size, dtype=jnp.int32) < num_items
        scores = jnp.where(inside[None], scores, -jnp.inf)
        places = jnp.arange(size, dtype=jnp.int32)[None]
        places = jnp.broadcast_to(places, scores.shape)
        if size > tuning.direct * k:  # with fewer scores, `join` sorts all of them
            places, scores = select(scores, k, tuning)
        return join(best, (places + first_item + start, scores), k)

    # With a single chunk, the initial list only fills up for missing items, so less is sorted.
    width = k if size < here else max(0, k - size)
    nothing = (
        jnp.full((batch, width), -1, jnp.int32),
        jnp.full((batch, width), -jnp.inf, item_chunks.accumulator(h.dtype)),
    )
    step = step_with_mosaic if with_mosaic else step
    ids, scores = item_chunks.fold(step, nothing, here, size)
    if shard.items:
        ids, scores = (
            shard.own_rows(jnp.moveaxis(lax.all_gather(x, shard.items), 0, 1))
            for x in (ids, scores)
        )
        ids, scores = (x.reshape(len(x), -1) for x in (ids, scores))
        ids, scores = join((ids[:, :0], scores[:, :0]), (ids, scores), k)
    ids = jnp.where(scores == -jnp.inf, -1, ids)
    return ids, jnp.where(broken[:, None], jnp.nan, scores)


def one_of_each(scores):
    """Replaces all NaN by one NaN, and -0 by 0, because `lax.top_k` compares bits."""
    scores = jnp.where(jnp.isnan(scores), jnp.nan, scores)
    # `scores - stop_gradient(scores)` is 0 with a derivative; the constant 0 has none.
    return jnp.where(scores == 0, scores - lax.stop_gradient(scores), scores)


def join(best, more, k: int):
    """The k best of two lists (ids, scores). On a tie the item of `best` comes first."""
    ids, scores = (
        jnp.concatenate(pair, axis=1) for pair in zip(best, more, strict=True)
    )
    scores, places = lax.top_k(scores, k)
    return jnp.take_along_axis(ids, places, axis=1), scores


def largest_of(grouped: jax.Array) -> jax.Array:
    """Maxima over the last axis; NaN if any element is NaN."""
    if jax.default_backend() != "cpu":
        return jnp.max(grouped, axis=2)
    # On a CPU, XLA's maximum of some thousand numbers ignores NaN. The maximum of their bits does
    # not, since a positive NaN has the largest bits. It also takes half the time of a NaN test.
    grouped = jnp.where(jnp.isnan(grouped), jnp.nan, grouped)
    kind = jnp.dtype(f"int{8 * grouped.dtype.itemsize}")
    bits = jnp.max(_in_order(lax.bitcast_convert_type(grouped, kind)), axis=2)
    return lax.bitcast_convert_type(_in_order(bits), grouped.dtype)


def _in_order(bits: jax.Array) -> jax.Array:
    """Converts the bits of floats to integers with equal order. Applied twice, it restores the
    bits.
    """
    is_negative = bits >> (8 * bits.dtype.itemsize - 1)
    return bits ^ (is_negative & jnp.iinfo(bits.dtype).max)


def select(
    scores: Float[Array, "batch size"], k: int, tuning: Tuning
) -> tuple[Int[Array, "batch found"], Float[Array, "batch found"]]:
    """Positions and scores of the k best of each row, or of all if there are fewer.

    If there are many scores, they are put into groups of neighbours. Only the k groups
    with the largest maxima (ties go to the lower group) are sorted, and these groups are
    found in the same way. They hold the k best. Proof: let x be in another group. Each of
    the k groups has a maximum that is larger than that of x's group, or equal to it and at
    a lower position. So k elements come before x.
    """
    batch, size = scores.shape
    if size <= tuning.direct * k:
        scores, places = lax.top_k(scores, min(k, size))
        return places, scores
    group = tuning.group if size >= tuning.many * k else tuning.small_group
    split = size // group * group
    grouped = scores[:, :split].reshape(batch, -1, group)
    chosen, _ = select(largest_of(grouped), k, tuning)
    # Groups are sorted by position, because `lax.top_k` breaks ties by it.
    chosen = jnp.sort(chosen, axis=1)
    inside = jnp.take_along_axis(grouped, chosen[:, :, None], axis=1)
    inside = jnp.concatenate([inside.reshape(batch, -1), scores[:, split:]], axis=1)
    rest = jnp.arange(split, size, dtype=jnp.int32)[None]
    rest = jnp.broadcast_to(rest, (batch, size - split))
    places = jnp.concatenate([members(chosen, group), rest], axis=1)
    found, scores = select(inside, k, tuning)
    return jnp.take_along_axis(places, found, axis=1), scores
