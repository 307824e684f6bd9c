"""Batches of rows with held-out entries, and compiled programs that measure models on them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import metrics
from sparsejax.engine.batching import Array, Batch, Batches, NamedBatches, Shown, taken
from sparsejax.engine.rank.loop import each
from sparsejax.engine.rank.recommender import merged, recommended
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import replicated
from sparsejax.mesh.xla_options import Programs
from sparsejax.metrics.ranking import METRICS

# Metrics that also count held-out entries of unknown items.
_WITH_LEFT_OUT = {
    name
    for name, metric in METRICS.items()
    if "left_out" in inspect.signature(metric).parameters
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RankingTask:
    """A batch of rows, with the held-out items that a model should rank high.

    Attributes:
      shown: inputs of the model.
      exclude: items that must not be recommended, or None.
      labels: held-out items of each row.
      left_out: `[batch]` number of held-out entries without an item number, or None.
      candidates: `[batch, count]` ids to rank. They ascend in each row, and -1 stands for no item.
          None ranks all items.
    """

    shown: Shown
    exclude: Batch | None
    labels: Batch
    left_out: Array | None
    candidates: Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class Tasks:
    """An iterable of `RankingTask`s.

    Each attribute has all batches of the attribute named so there.

    Attributes:
      shown: batches of the inputs of the model.
      exclude: batches of items that must not be recommended, or None.
      labels: batches of held-out items.
      left_out: `[steps, batch]` number of held-out entries without an item number, or None.
      candidates: `[steps, batch, count]` ids to rank, or None.
    """

    shown: Batches | NamedBatches
    exclude: Batches | None
    labels: Batches
    left_out: np.ndarray | None
    candidates: np.ndarray | None

    def __iter__(self) -> Iterator[RankingTask]:
        for parts in zip(
            self.shown,
            each(self.exclude),
            self.labels,
            each(self.left_out),
            each(self.candidates),
            strict=False,
        ):
            yield RankingTask(*parts)


def ranked(
    graphdef,
    state,
    task: RankingTask,
    k: int,
    denied: Array | None = None,
    *,
    deterministic: bool,
) -> tuple[Array, ...]:
    """Ids and scores, `[batch, k]`, of the items that a model from `split` recommends for a task.

    If `denied`, `[items]` bool, is given, `can_deny` must be true of the model. The candidates of
    a task do not include such items.
    """
    if task.candidates is None:
        return recommended[deterministic](
            graphdef, state, task.shown, task.exclude, k, denied
        )
    return _ranked_among[deterministic](
        graphdef, state, task.shown, task.exclude, task.candidates, k
    )


# A separate program, so that models and baselines share it.
@functools.partial(Programs, static_argnames="ks", donate_argnames="counts")
def measured(
    found: tuple[Array, ...],
    labels: Batch,
    left_out: Array | None,
    counts: Array,
    ks: tuple[int, ...],
):
    """Metrics of each row, and how often each item is recommended.

    `measured[True]` is the deterministic form, `measured[False]` the default, see `Programs`.

    Args:
      found: result of `ranked`, with at least `max(ks)` columns.
      labels: held-out items of each row.
      left_out: `[batch]` number of held-out entries without an item number, or None.
      counts: `[len(ks), items]` int32 recommendation counts of the earlier batches.
      ks: the cut-offs.

    Returns:
      Metrics `[len(ks) * len(METRICS), batch]`, NaN for a row with a NaN score; and `counts`,
      increased by these recommendations.
    """
    ids, scores, *_ = found
    wanted = labels.take()
    values = [value for k in ks for value in _values(ids, wanted, left_out, k)]
    bad = jnp.isnan(scores).any(axis=1)
    # Padding rows of the last batch have no labels.
    lengths = wanted.row_lengths()
    lengths = lengths if left_out is None else lengths + left_out
    ids = jnp.where(lengths[:, None] > 0, ids, -1)
    num_items = counts.shape[1]
    counts += jnp.stack([metrics.recommendation_counts(ids, num_items, k) for k in ks])
    values = jnp.where(bad[None, :], jnp.nan, jnp.stack(values))
    return replicated((values, counts))


def _values(ids, labels: SparseRows, left_out: Array | None, k: int):
    """The `METRICS` of each row, each an array `[batch]`, in the order of `METRICS`."""
    further = {"left_out": left_out}
    return [
        metric(ids, labels, k, **(further if name in _WITH_LEFT_OUT else {}))
        for name, metric in METRICS.items()
    ]


@functools.partial(Programs, static_argnames=("graphdef", "k"))
def _ranked_among(
    graphdef, state, shown: Shown, exclude: Batch | None, candidates: Array, k: int
):
    """Ranks only the `candidates: [batch, count]`; returns ids and scores as `recommended` does.

    Candidates ascend in each row, and -1 stands for no item.
    """
    candidates = jnp.asarray(candidates)
    valid = candidates >= 0
    if exclude is not None:
        valid &= ~metrics.is_label(candidates, exclude.take())
    with merged(graphdef, state) as model:
        scores = model.item_scores(taken(shown), jnp.maximum(candidates, 0))
    scores = jnp.where(valid, scores, -jnp.inf)
    room = max(k - candidates.shape[1], 0)
    # Among items with equal scores, the lowest id comes first.
    best, at = jax.lax.top_k(scores, k - room)
    ids = jnp.take_along_axis(candidates, at, axis=1)
    ids = jnp.where(best == -jnp.inf, -1, ids)
    best = jnp.where(jnp.isnan(scores).any(axis=1, keepdims=True), jnp.nan, best)
    fill = ((0, 0), (0, room))
    return replicated(
        (
            jnp.pad(ids, fill, constant_values=-1),
            jnp.pad(best, fill, constant_values=-jnp.inf),
        )
    )
