"""The best items of an output layer, without `[batch, items]`."""

from __future__ import annotations

import functools
import numbers
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.ops import item_chunks
from sparsejax.sparse import CSR

Implementation = Literal["xla"] | None

# Measured on two CPU cores, batch 512, hidden 256, 40,960 items.
# Scores in a chunk: at k 20, 2^19 takes 1.3 times as long, 2^20 and 2^22 1.1 times.
_CHUNK_ELEMENTS = 2**21
# Items in a chunk for each of the k old candidates that are sorted with it.
_CHUNK_PER_K = 16
# Items in a group, see `_merge`: 16 to 64 differ little.
_GROUP = 32
# Groups in a chunk for each of the k chosen; with as few as 1, grouping loses at k 100.
_GROUPS_PER_K = 4


def top_k(
    h: Float[Array, "batch hidden"],
    kernel: Float[Array, "items hidden"],
    bias: Float[Array, "items"] | None,
    k: int,
    *,
    scale: Float[Array, "items"] | None = None,
    exclude: CSR | None = None,
    num_items: int | None = None,
    implementation: Implementation = None,
) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
    """Ids and scores of the `k` best items of each row, best first.

    ::

        score_bi = (h_b . kernel_i) scale_i + bias_i        -inf for excluded items

    Exact: a full sort by descending score, then ascending id, would give the same.
    Operands are used as they are, scores are made and ranked in float32. NaN ranks
    above everything and comes back as NaN. An item whose score is -inf is never
    returned: where items run out (`k` may exceed their number), the id is -1 and the
    score -inf. A bias of -inf denies an item, and like exclusion does so
    where its score would be NaN.

    Scores exist for a chunk of items at a time: memory does not grow with the number of
    items; it is some 16 times the result, or the chunk.

    Args:
      h: hidden vectors.
      kernel: one row for each item; it, `bias` and `scale` may have further rows, which
        are padding and never returned.
      bias: added to the scores. None is 0.
      k: how many, at least 1.
      scale: factor of the scores, such as 1 / norm for cosines. None is 1.
      exclude: `[batch, items]`, items not to be returned; values are not looked at. A
        row that does not fit in an overfull CSR, or has an index outside the items,
        gets scores of NaN; its ids mean nothing.
      num_items: how many of the kernel's rows are items; by default as many as
        `exclude` has columns, or all.
      implementation: None picks the best there is; "xla" is the reference.

    Raises:
      ValueError: `k` is no integer or below 1, shapes that do not match, an unknown
        implementation.
      TypeError: `h` and `kernel` differ in dtype.
    """
    item_chunks.check_implementation(implementation)
    item_chunks.check_layer(h, kernel, bias, scale)
    if not isinstance(k, numbers.Integral) or k < 1:
        raise ValueError(f"k must be an integer and at least 1, got {k!r}")
    k = int(k)
    num_items = _num_items(h, kernel, exclude, num_items)
    batch = h.shape[0]
    budget = max(_CHUNK_ELEMENTS, batch * k * _CHUNK_PER_K)
    size = item_chunks.chunk_size(batch, num_items, budget)
    group = _GROUP if size >= k * _GROUP * _GROUPS_PER_K else size
    return _xla(
        h,
        kernel,
        bias,
        scale,
        exclude,
        k=k,
        num_items=num_items,
        size=size,
        group=group,
    )


def _num_items(
    h: jax.Array, kernel: jax.Array, exclude: CSR | None, num_items: int | None
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


# XLA implementation


@functools.partial(jax.jit, static_argnames=("k", "num_items", "size", "group"))
def _xla(
    h: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    exclude: CSR | None,
    *,
    k: int,
    num_items: int,
    size: int,
    group: int,
) -> tuple[jax.Array, jax.Array]:
    rows = None if exclude is None else exclude.row_ids()

    def step(start, size, best):
        scores = item_chunks.scores(h, kernel, bias, scale, start, size)
        # The sort below is by bits: one NaN and one zero are wanted, not two.
        scores = jnp.where(jnp.isnan(scores), jnp.nan, scores)
        scores = jnp.where(scores == 0, 0, scores)
        if bias is not None:
            denied = item_chunks.slice_rows(bias, start, size) == -jnp.inf
            scores = jnp.where(denied[None], -jnp.inf, scores)
        if exclude is not None:
            columns = item_chunks.local_columns(exclude, start, size)
            scores = scores.at[rows, columns].set(-jnp.inf, mode="drop")
        return _merge(best, scores, start, group)

    nothing = (
        jnp.full((h.shape[0], k), -1, jnp.int32),
        jnp.full((h.shape[0], k), -jnp.inf, item_chunks.accumulator(h.dtype)),
    )
    ids, scores = item_chunks.fold(step, nothing, num_items, size)
    ids = jnp.where(scores == -jnp.inf, -1, ids)
    if exclude is not None:
        broken = item_chunks.broken_rows(exclude)
        scores = jnp.where(broken[:, None], jnp.nan, scores)
    return ids, scores


def _merge(
    best: tuple[jax.Array, jax.Array],
    scores: jax.Array,
    start: jax.typing.ArrayLike,
    group: int,
) -> tuple[jax.Array, jax.Array]:
    """The k best of `best`, whose ids are all below `start`, and of a chunk's scores.

    Where the chunk has more than k groups of `group` items, only the k groups with the
    largest maxima, ties to the lower group, are looked into. They hold the k best: let
    x be in another group. Each of the k has a maximum that is larger than that of x's
    group, or equal to it and of a lower id. So k elements come before x.
    """
    best_ids, best_scores = best
    batch, k = best_ids.shape
    size = scores.shape[1]
    ids = jnp.arange(size, dtype=jnp.int32)[None] + start
    if size // group > k:
        split = size // group * group
        grouped = scores[:, :split].reshape(batch, -1, group)
        _, chosen = lax.top_k(jnp.max(grouped, axis=2), k)
        # In order of id, because `lax.top_k` breaks ties by position.
        chosen = jnp.sort(chosen, axis=1)[:, :, None]
        inside = jnp.take_along_axis(grouped, chosen, axis=1)
        scores = jnp.concatenate([inside.reshape(batch, -1), scores[:, split:]], axis=1)
        inside = chosen * group + ids[:, None, :group]
        rest = jnp.broadcast_to(ids[:, split:], (batch, size - split))
        ids = jnp.concatenate([inside.reshape(batch, -1), rest], axis=1)
    ids = jnp.concatenate([best_ids, jnp.broadcast_to(ids, scores.shape)], axis=1)
    scores = jnp.concatenate([best_scores, scores], axis=1)
    scores, places = lax.top_k(scores, k)
    return jnp.take_along_axis(ids, places, axis=1), scores
