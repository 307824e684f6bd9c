"""The best items of an output layer, found with an int8 copy of it, which has fewer bytes.

::

    score_bi  <=  (q_b . q_i + margin_b) unit_b scale_i + bias_i        q in int8

A first pass finds the groups of items whose bounds are the largest. The scores of these items
are then computed from the items themselves. The k best of them are the best of all items if
the lowest of the k is above the bounds of all other groups. Otherwise `top_k` is called.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8

from pallas_kernels import score_tiles as tiles
from pallas_kernels import top_k as kernels
from pallas_kernels.selection import best_places, best_places_inside, members, pick
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
from sparsejax.ops.precision import Precision
from sparsejax.ops.top_k import CPU, GPU, join, largest_of, one_of_each, top_k_tuned
from sparsejax.sparse import CSR

# How many groups are ranked by exact scores, for each of the k items. With random vectors, 2 to 4
# are enough to prove that the result is exact.
_GROUPS = 4
_LARGEST = 127  # the largest number in int8 that is used
_LEAST = 1e-30  # a vector whose numbers are all smaller than this is rounded to 0
_ROWS = 2**16  # number of rows that are rounded at a time
_SAFE = 1 + 1e-5  # factor that makes up for the rounding error of norms in float32


class CoarseItems(NamedTuple):
    """The items of an output layer in int8.

    Attributes:
      values: `values[i]` is about the vector of item i divided by `scale[i]`; its sign
        is flipped where the factor of the item's scores is negative.
      scale: the unit of each item's integers, times the size of the factor of its
        scores. It is not negative.
      limits: two maxima over all items: the norm of the rounding error of a vector,
        divided by its unit, and the norm of `values`.
    """

    values: Int8[Array, "items hidden"]
    scale: Float[Array, "items"]
    limits: Float[Array, "2"]

    @classmethod
    def of(
        cls, kernel: Float[Array, "items hidden"], scale: Float[Array, "items"] | None
    ) -> CoarseItems:
        """Rounds the items of a layer to int8. The arguments are as in `top_k`."""
        return _rounded(kernel, scale)


@jax.jit
def _rounded(kernel: jax.Array, scale: jax.Array | None) -> CoarseItems:
    items, hidden = kernel.shape
    rows = next(n for n in (_ROWS, 4096, 256, 128, 1) if items % n == 0)

    def some(i, made):
        x = item_chunks.slice_rows(kernel, i * rows, rows).astype(jnp.float32)
        unit, values = _in_int8(x)
        lost = jnp.linalg.norm(x / unit - values, axis=1)
        # A vector of zeros has score 0. A larger bound would hide other items.
        factor = jnp.where(jnp.any(x != 0, axis=1), unit[:, 0], 0)
        if scale is not None:
            of_scores = item_chunks.slice_rows(scale, i * rows, rows)
            of_scores = of_scores.astype(jnp.float32)
            factor *= jnp.abs(of_scores)
            values = jnp.where(of_scores[:, None] < 0, -values, values)
        limits = jnp.stack([jnp.max(lost), jnp.max(jnp.linalg.norm(values, axis=1))])
        return CoarseItems(
            item_chunks.write_rows(made.values, values, i * rows),
            item_chunks.write_rows(made.scale, factor, i * rows),
            jnp.maximum(made.limits, limits * _SAFE),
        )

    nothing = CoarseItems(
        jnp.zeros((items, hidden), jnp.int8),
        jnp.zeros(items, jnp.float32),
        jnp.zeros(2, jnp.float32),
    )
    return lax.fori_loop(0, items // rows, some, nothing)


def _in_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds rows to int8: returns a unit for each row `[rows, 1]`, and the integers."""
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    unit = jnp.where(largest < _LEAST, 1, largest / _LARGEST)
    return unit, jnp.clip(jnp.round(x / unit), -_LARGEST, _LARGEST)


class _Bounds(NamedTuple):
    """A batch's rows in int8, with the numbers that bound the errors of their scores."""

    values: jax.Array
    margins: tuple[jax.Array, jax.Array]

    @classmethod
    def of(cls, h: jax.Array, coarse: CoarseItems) -> _Bounds:
        """Rounds the rows to int8, and computes the margin and the unit of each row.

        With h = unit (q + r) and an item x = scale (p + s), where q and p are in int8::

            |h . x - unit scale q . p|  <=  scale (|h| |s| + unit |r| |p|)

        The last bits that float32 loses, in this sum and in the score itself, are added.
        """
        h = h.astype(jnp.float32)
        unit, values = _in_int8(h)
        lost, largest = coarse.limits
        exact = jnp.linalg.norm(h / unit, axis=1)
        rounding = jnp.linalg.norm(h / unit - values, axis=1)
        hidden = h.shape[1]
        lost_bits = (hidden + 4) * 2.0**-22
        margin = exact * lost + rounding * largest
        margin += lost_bits * exact * (lost + largest)
        margin = margin * _SAFE + lost_bits * _LARGEST**2
        # The scores of a row of zeros have no error.
        margin = jnp.where(jnp.any(h != 0, axis=1), margin, 0)
        return cls(values.astype(jnp.int8), (margin, unit[:, 0]))


def is_of_use(shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Whether the program for an int8 copy of the items can run here, and is faster.

    Args:
      shape: shape of the kernel.
      dtype: dtype of the layer.
    """
    return custom_call_can_run(HOPPER) and not unsupported(shape, dtype)


def unsupported(shape: tuple[int, ...], dtype: jnp.dtype) -> str | None:
    """Why the int8 program cannot take a layer, as the end of a sentence; None if it can."""
    items, hidden = shape
    in_int8 = tiles.unsupported(hidden, items, jnp.int8, jnp.int8)
    return in_int8 or tiles.unsupported(hidden, items, dtype)


@promoting()
def coarse_top_k(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    k: int,
    *,
    bias: Float[Array, "items"] | None = None,
    coarse: CoarseItems,
    scale: Float[Array, "items"] | None,
    exclude: CSR,
    implementation: Implementation = None,
    precision: Precision = None,
) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"], Bool[Array, ""]]:
    """Finds the items that `top_k` finds, and returns whether `top_k` had to be called.

    It works on one device. The arguments are those of `top_k`, and `coarse`, the items in int8.
    """
    check_implementation(implementation)
    why = unsupported(kernel.shape, h.dtype)
    if implementation is None:
        can_run = custom_call_can_run(HOPPER) and not why
        implementation = "mosaic_gpu" if can_run else "xla"
    if implementation == "mosaic_gpu" and why:
        raise NotImplementedError(f'the kernel "mosaic_gpu" {why}; use "xla"')
    tuning = GPU if xla_is_for_gpu(implementation) else CPU
    num_items = exclude.num_cols

    def whole():
        ids, scores = top_k_tuned(
            h,
            kernel,
            bias,
            k,
            scale=scale,
            exclude=exclude,
            num_items=num_items,
            implementation=implementation,
            precision=precision,
            tuning=tuning,
        )
        return ids, scores, jnp.array(True)

    excluded, broken = item_chunks.entries_of(exclude, Shard(), len(kernel))
    find = functools.partial(
        _best_with_mosaic if implementation == "mosaic_gpu" else _best,
        num_items=num_items,
        excluded=excluded,
    )
    bounds = _Bounds.of(h, coarse)
    ids, scores, rest = find(h, kernel, bias, scale, coarse, bounds, k)
    lowest = scores[:, -1]
    slack = 2.0**-22 * (jnp.abs(lowest) + jnp.abs(rest))
    # If no bound has a margin, the chosen groups contain the best items, as shown in
    # `top_k.select`.
    margin, _ = bounds.margins
    proved = (lowest > rest + slack) | (rest == -jnp.inf) | (margin == 0)
    proved &= jnp.isfinite(margin)
    ids = jnp.where(scores == -jnp.inf, -1, ids)
    scores = jnp.where(broken[:, None], jnp.nan, scores)
    return lax.cond(
        jnp.all(proved | broken), lambda: (ids, scores, jnp.array(False)), whole
    )


def _chunk(batch: int, num_items: int, rows: int, scores: int) -> tuple[int, int]:
    """The padded number of items, and the number in a chunk of about `scores` scores."""
    here = item_chunks.rounded_items(num_items, rows)
    size = item_chunks.chunk_size(batch, here, scores)
    return here, min(here, tiles.rounded_items(size))


def _nothing(batch: int, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    lowest = jnp.full((batch, k), -jnp.inf, jnp.float32)
    return jnp.full((batch, k), -1, jnp.int32), lowest, lowest[:, 0]


def _of_others(largest: jax.Array, groups: jax.Array) -> jax.Array:
    """A bound for each row on the scores of all groups that are not in `groups`."""
    if groups.shape[1] == largest.shape[1]:
        return jnp.full(len(largest), -jnp.inf)
    return jnp.min(pick(largest, groups), axis=1)


def _best_with_mosaic(
    h, kernel, bias, scale, coarse, bounds, k, *, num_items, excluded
):
    """Returns ids and scores of the k best items in the chosen groups, and a bound on all other
    scores.
    """
    batch = len(h)
    more = GPU.chunk_scores * kernels.GROUP // 2
    here, size = _chunk(batch, num_items, len(kernel), more)
    bias, scale = (None if x is None else x.astype(jnp.float32) for x in (bias, scale))

    def step(start, size, best):
        rows = tiles.rows_for(batch, size)
        padded, values, margin, unit = (
            item_chunks.pad_rows(x, rows) for x in (h, bounds.values, *bounds.margins)
        )
        words = excluded.words(start, (len(padded), size), counted=True)
        options = {"start": start, "limit": num_items}
        largest, larger = (
            x[:batch]
            for x in kernels.maxima(
                values,
                coarse.values,
                bias,
                coarse.scale,
                words,
                **options,
                size=size,
                with_scores=False,
                margins=(margin, unit),
            )
        )
        groups = best_places_inside(larger, largest, _GROUPS * k)
        scores = kernels.scores_of_groups(
            padded, kernel, bias, scale, words, groups, **options
        )
        rest = _of_others(largest, groups)
        places = members(groups, kernels.GROUP)
        found = best_places(scores, k)
        found = start + pick(places, found), one_of_each(pick(scores, found))
        ids, scores, of_others = best
        return *join((ids, scores), found, k), jnp.maximum(of_others, rest)

    return item_chunks.fold(step, _nothing(batch, k), here, size)


def _best(h, kernel, bias, scale, coarse, bounds, k, *, num_items, excluded):
    """Does the work of `_best_with_mosaic` by XLA's operations."""
    batch = len(h)
    here, size = _chunk(batch, num_items, len(kernel), CPU.chunk_scores)
    margin, unit = (x[:, None] for x in bounds.margins)
    dtype = item_chunks.accumulator(h.dtype)

    def step(start, size, best):
        def sliced(array):
            return item_chunks.slice_rows(array, start, size)[None].astype(dtype)

        products = item_chunks.dot(
            bounds.values.astype(dtype), sliced(coarse.values)[0], (1, 1)
        )
        largest = (products + margin) * unit * sliced(coarse.scale)
        if bias is not None:
            largest += sliced(bias)
        place = excluded.places(start, (batch, size))
        denied = jnp.zeros((batch, size), bool)
        denied = denied.at[place].set(True, mode="drop", unique_indices=True)
        denied |= start + jnp.arange(size, dtype=jnp.int32)[None] >= num_items
        if bias is not None:
            denied |= sliced(bias) == -jnp.inf
        missing = (0, 0), (0, -size % kernels.GROUP)
        denied = jnp.pad(denied, missing, constant_values=True)
        largest = jnp.where(denied, -jnp.inf, jnp.pad(largest, missing))
        largest = largest_of(largest.reshape(batch, -1, kernels.GROUP))
        _, groups = lax.top_k(largest, min(_GROUPS * k, largest.shape[1]))
        # Sorted, so that among items with equal scores the lower id comes first.
        groups = jnp.sort(groups, axis=1)
        places = members(groups, kernels.GROUP)

        def of_row(row):
            h, places = row
            return jnp.sum(kernel[start + places].astype(dtype) * h[None], axis=1)

        scores = lax.map(of_row, (h.astype(dtype), places))
        if scale is not None:
            scores *= scale[start + places].astype(dtype)
        if bias is not None:
            scores += bias[start + places].astype(dtype)
        scores = jnp.where(pick(denied, places), -jnp.inf, scores)
        found = start + places, one_of_each(scores)
        ids, scores, of_others = best
        rest = _of_others(largest, groups)
        return *join((ids, scores), found, k), jnp.maximum(of_others, rest)

    return item_chunks.fold(step, _nothing(batch, k), here, size)
