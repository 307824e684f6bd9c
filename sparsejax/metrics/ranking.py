"""Ranking metrics, from the recommended ids and the held-out labels.

All metrics take `ids: [batch, k_max]`, the items of each row, best first. -1 is an
empty rank, as in the result of `sparsejax.top_k`. The entries of `labels: [batch, items]`
are the held-out items; their values are ignored. Let `hit_r` be 1 if the item at rank r
is a label, else 0, and n the number of labels of the row, including those without an item
number (`left_out`)::

    recall_at_k            sum_{r<=k} hit_r / n
    truncated_recall_at_k  sum_{r<=k} hit_r / min(k, n)
    precision_at_k         sum_{r<=k} hit_r / k
    ndcg_at_k              sum_{r<=k} hit_r / log2(r + 1)
                           / sum_{r<=min(k, n)} 1 / log2(r + 1)
    hit_rate_at_k          1 if any hit_r, r<=k, else 0
    mrr_at_k               1 / r for the first r<=k with a hit, else 0
    map_at_k               sum_{r<=k} hit_r precision_at_r / min(k, n)

Each function returns one float32 for each row, in [0, 1], and can be called under `jax.jit`. A
row without labels has no meaningful value; its result is 0. Exclude it from the mean::

    has_labels = labels.row_lengths() > 0
    mean = jnp.mean(ndcg_at_k(ids, labels, 20), where=has_labels)

Labels without an item number are items that the vocabulary lacks. No rank can hit them,
but they count in n, as if they were ranked after all items.

The result is NaN for a row of `labels` with an index outside `[0, items)`, and for a row that
does not fit in an overfull CSR.

Three metrics describe the whole catalogue. They take `counts: [items]`, how often each
item was recommended (`recommendation_counts`), copy it to the host, and return floats,
computed in float64::

    coverage         share of the items with counts_i > 0
    gini             sum_j (2 j - items - 1) c_j / (items sum_j c_j), with c_1 <= c_2 ...
                     the sorted counts: 0 if all items are recommended equally often,
                     near 1 if a few items get all recommendations
    mean_popularity  sum_i counts_i popularity_i / sum_i counts_i
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from sparsejax.mesh.blocks import ShardedCSR, SparseRows
from sparsejax.mesh.layout import call_on_each_device, call_with_auto_axes
from sparsejax.mesh.per_device import own_block
from sparsejax.mesh.promotion import promoting
from sparsejax.sparse import CSR

Counts = Int[Array | np.ndarray, "batch"] | None


@promoting()
def recall_at_k(
    ids: Int[Array, "batch k_max"],
    labels: SparseRows,
    k: int | None = None,
    *,
    left_out: Counts = None,
) -> Float[Array, "batch"]:
    """Share of the labels that are among the first `k` ids.

    With more than `k` labels it cannot reach 1; see `truncated_recall_at_k`.

    Args:
      ids: items by rank, -1 for an empty rank; an item occurs at most once in a row.
      labels: `[batch, items]`, indices ascending and unique within a row.
      k: number of ranks that count; by default all ranks of `ids`.
      left_out: for each row, the number of further labels that have no item number.

    Raises:
      ValueError: `k` is not in `[1, k_max]`, or the numbers of rows differ.
    """
    k = _check(ids, labels, k)
    return _hits(ids, labels, k) / jnp.maximum(_num_labels(labels, left_out), 1)


@promoting()
def truncated_recall_at_k(
    ids: Int[Array, "batch k_max"],
    labels: SparseRows,
    k: int | None = None,
    *,
    left_out: Counts = None,
) -> Float[Array, "batch"]:
    """Number of hits among the first `k` ids, divided by the largest possible, `min(k, labels)`.

    The "recall" of Liang et al., "Variational autoencoders for collaborative
    filtering" (2018). Arguments and errors: see `recall_at_k`.
    """
    k = _check(ids, labels, k)
    return _hits(ids, labels, k) / jnp.clip(_num_labels(labels, left_out), 1, k)


@promoting()
def precision_at_k(
    ids: Int[Array, "batch k_max"], labels: SparseRows, k: int | None = None
) -> Float[Array, "batch"]:
    """Share of the first `k` ranks that have a label; an empty rank has none.

    Arguments and errors: see `recall_at_k`.
    """
    k = _check(ids, labels, k)
    return _hits(ids, labels, k) / k


@promoting()
def ndcg_at_k(
    ids: Int[Array, "batch k_max"],
    labels: SparseRows,
    k: int | None = None,
    *,
    left_out: Counts = None,
) -> Float[Array, "batch"]:
    """Normalised discounted cumulative gain: hits count less at lower ranks.

    Gains are binary, the discount is `1 / log2(rank + 1)`, and the ideal puts labels on
    the first `min(k, labels)` ranks. Arguments and errors: see `recall_at_k`.
    """
    k = _check(ids, labels, k)
    ranks = jnp.arange(1, k + 1)[None, :]
    discount = 1 / jnp.log2(ranks + 1.0)
    gain = jnp.sum(is_label(ids, labels)[:, :k] * discount, axis=1)
    # The sum of a perfect ranking is added in the same order, so that its ratio is exactly 1.
    possible = ranks <= jnp.maximum(_num_labels(labels, left_out), 1)[:, None]
    return gain / jnp.sum(possible * discount, axis=1) + _nan_where_broken(labels)


@promoting()
def hit_rate_at_k(
    ids: Int[Array, "batch k_max"], labels: SparseRows, k: int | None = None
) -> Float[Array, "batch"]:
    """1 if a label is among the first `k` ids, else 0.

    With one label in each row it equals recall. It is the HR@k of leave-one-out studies.
    Arguments and errors: see `recall_at_k`.
    """
    k = _check(ids, labels, k)
    return jnp.minimum(_hits(ids, labels, k), 1)


@promoting()
def mrr_at_k(
    ids: Int[Array, "batch k_max"], labels: SparseRows, k: int | None = None
) -> Float[Array, "batch"]:
    """Reciprocal of the rank of the first label, 0 if none is among the first `k` ids.

    Its mean is the mean reciprocal rank. Arguments and errors: see `recall_at_k`.
    """
    k = _check(ids, labels, k)
    ranks = jnp.arange(1.0, k + 1)[None, :]
    best = jnp.max(is_label(ids, labels)[:, :k] / ranks, axis=1)
    return best + _nan_where_broken(labels)


@promoting()
def map_at_k(
    ids: Int[Array, "batch k_max"],
    labels: SparseRows,
    k: int | None = None,
    *,
    left_out: Counts = None,
) -> Float[Array, "batch"]:
    """Average precision: the mean of the precision at the rank of each label.

    Labels beyond rank `k` count 0. The mean is over `min(k, labels)`, the largest possible
    number of hits (some authors divide by the number of labels instead). Its mean over rows is
    the mean average precision. Arguments and errors: see `recall_at_k`.
    """
    k = _check(ids, labels, k)
    hits = is_label(ids, labels)[:, :k]
    precision = jnp.cumsum(hits, axis=1) / jnp.arange(1.0, k + 1)[None, :]
    possible = jnp.clip(_num_labels(labels, left_out), 1, k)
    return jnp.sum(hits * precision, axis=1) / possible + _nan_where_broken(labels)


# Metrics of single rows by name, in the order in which `evaluate` reports them.
METRICS: dict[str, Callable[..., Float[Array, "batch"]]] = {
    "recall": recall_at_k,
    "truncated_recall": truncated_recall_at_k,
    "ndcg": ndcg_at_k,
    "precision": precision_at_k,
    "hit_rate": hit_rate_at_k,
    "mrr": mrr_at_k,
    "map": map_at_k,
}


def recommendation_counts(
    ids: Int[Array, "batch k_max"], num_items: int, k: int | None = None
) -> Int[Array, "items"]:
    """The number of rows with each item among their first `k` ids; -1 is an empty rank.

    Counts of several batches can be added. The function can be called under `jax.jit`.
    """

    def counts(ids):
        first = ids[:, :k]
        # Ids below 0 are moved out of bounds, so that they are dropped.
        places = jnp.where(first < 0, num_items, first)
        return jnp.zeros(num_items, jnp.int32).at[places].add(1, mode="drop")

    return call_with_auto_axes(counts, ids, out_specs=P())


def coverage(counts: Int[Array | np.ndarray, "items"]) -> float:
    """Share of the items that are recommended at least once."""
    return float(np.mean(np.asarray(counts) > 0))


def gini(counts: Int[Array | np.ndarray, "items"]) -> float:
    """Gini index of the numbers of recommendations: 0 if all items have equally many, at most 1.

    It is 0 if nothing is recommended.
    """
    ordered = np.sort(np.asarray(counts)).astype(np.float64)
    n, total = len(ordered), max(ordered.sum(), 1)
    weights = 2 * np.arange(1, n + 1) - n - 1
    return float(weights @ ordered / (n * total))


def mean_popularity(
    counts: Int[Array | np.ndarray, "items"],
    popularity: Float[Array | np.ndarray, "items"],
) -> float:
    """Mean popularity of the recommended items; 0 if nothing is recommended.

    Args:
      counts: number of recommendations of each item.
      popularity: a number for each item, for example the share of rows that have it.
    """
    given = np.asarray(counts, np.float64)
    return float(given @ np.asarray(popularity, np.float64) / max(given.sum(), 1))


def is_label(
    ids: Int[Array, "batch k_max"], labels: SparseRows
) -> Bool[Array, "batch k_max"]:
    """Whether each id is among the labels of its row; -1 never is.

    A binary search in the row: `batch k_max log2(nse)` reads of `labels.indices`.
    """
    if isinstance(labels, ShardedCSR):
        return _any_block(_is_label_of_block, labels, ids)
    if labels.nse == 0:
        return jnp.zeros(ids.shape, bool)
    indices, indptr = jnp.asarray(labels.indices), jnp.asarray(labels.indptr)
    # The last rows of an overfull matrix end early.
    ends = jnp.minimum(indptr[1:], labels.nse)[:, None]
    low = jnp.broadcast_to(jnp.minimum(indptr[:-1, None], ends), ids.shape)
    high = jnp.broadcast_to(ends, ids.shape)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2  # `low + high` may exceed int32
        before = indices[middle] < ids
        searching = low < high
        return (
            jnp.where(searching & before, middle + 1, low),
            jnp.where(searching & ~before, middle, high),
        )

    low, _ = lax.fori_loop(0, labels.nse.bit_length(), halve, (low, high))
    return (ids >= 0) & (low < ends) & (indices[low] == ids)


def _num_labels(labels: SparseRows, left_out: Counts):
    """`[batch]` number of labels, including those without an item number."""
    lengths = labels.row_lengths()
    return lengths if left_out is None else lengths + left_out


def _hits(ids, labels: SparseRows, k: int):
    """`[batch]` number of labels among the first `k` ids; NaN for an invalid row."""
    # All ids are looked up before the first k are selected. So metrics at several k share the
    # look-up, which XLA then computes once.
    hits = jnp.sum(is_label(ids, labels)[:, :k], axis=1)
    return hits.astype(jnp.float32) + _nan_where_broken(labels)


def _nan_where_broken(labels: SparseRows):
    """`[batch]`: NaN for a row that is overfull or has an index out of range, otherwise 0."""
    if isinstance(labels, ShardedCSR):
        broken = _any_block(_broken, labels)
    else:
        broken = _broken(labels)
    return jnp.where(broken, jnp.nan, 0.0)


def _broken(labels: CSR) -> Bool[Array, "batch"]:
    if labels.nse == 0:
        return labels.overfull_rows()
    indices, indptr = jnp.asarray(labels.indices), jnp.asarray(labels.indptr)
    # Indices ascend. In a block, -1 replaces any invalid index.
    first, last = indices[indptr[:-1]], indices[indptr[1:] - 1]
    outside = (first < 0) | (last < 0) | (last >= labels.num_cols)
    outside &= labels.row_lengths() > 0
    return outside | labels.overfull_rows()


def _is_label_of_block(block: CSR, ids: jax.Array) -> Bool[Array, "batch k_max"]:
    ids = ids - lax.axis_index("model") * block.num_cols
    return is_label(jnp.where(ids < block.num_cols, ids, -1), block)


def _any_block(f: Callable[..., jax.Array], labels: ShardedCSR, *arrays: jax.Array):
    """Whether `f(block, rows of the arrays that belong to the block)` is true for any block."""

    def on_device(blocks, *arrays):
        return lax.psum(f(own_block(blocks), *arrays).astype(jnp.int32), "model") > 0

    rows = P("data")
    return call_on_each_device(
        on_device,
        (labels.blocks, *arrays),
        (P("data", "model"), *[rows] * len(arrays)),
        rows,
    )


def _check(ids, labels: SparseRows, k: int | None) -> int:
    batch, k_max = ids.shape
    if labels.num_rows != batch:
        raise ValueError(f"ids has {batch:,} rows but labels has {labels.num_rows:,}")
    if k is None:
        k = k_max
    if not 1 <= k <= k_max:
        raise ValueError(f"k must be in [1, {k_max}], the columns of ids; got {k}")
    return k
