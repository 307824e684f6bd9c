"""Popularity, ItemKNN and EASE as models."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sparsejax.data.reading.sources import NamedCSR, Source
from sparsejax.engine.rank.popularity import Popularity, column_counts
from sparsejax.mesh.blocks import SparseRows, check_sparse_rows
from sparsejax.mesh.layout import padded_rows
from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.ops.item_weights import ease_weights, nearest_items
from sparsejax.ops.targets import check_item_ids, only_of_items
from sparsejax.sparse import CSR


def popularity(train: Source) -> Popularity:
    """Recommends the items with the most entries to everyone.

    >>> found = recommend(baselines.popularity(train), train, k=2, exclude=None)
    >>> found.names(train)[0]
    ['/...', '/...']

    Args:
      train: `[rows, items]`.

    Raises:
      TypeError: `train` has a type that is not supported.
    """
    matrix = _host(train)
    return Popularity(column_counts(matrix), matrix.num_cols)


def item_knn(
    train: Source, *, neighbours: int = 100, shrink: float = 10.0
) -> NearestItems:
    """Recommends the items that are nearest to the items of the row.

    >>> measured = evaluate(baselines.item_knn(train), train, heldout)
    >>> measured["ndcg@20"] > measured["popularity_ndcg@20"]
    True

    ::

        score_j = sum_i x_i cosine_ij      over the items i with j among their nearest

    With `cosine_ij = x_i . x_j / (|x_i| |x_j| + shrink)` of the columns of `train`. For
    millions of items: memory is `2 items neighbours` numbers, and `[batch, items]`.

    Args:
      train: `[rows, items]`. Values count.
      neighbours: number of the nearest items that count for each item. Published values
        are between 20 and 1,000.
      shrink: the larger, the less do items with few entries count. Values between 0 and
        100 are worth a try: it matters much on sparse data.

    Raises:
      TypeError: `train` has a type that is not supported.
      ValueError: `neighbours` is not positive, or `shrink` is negative.
    """
    return NearestItems(*nearest_items(_host(train), neighbours, shrink=shrink))


def ease(train: Source, *, l2: float = 500.0) -> ItemWeights:
    """EASE (Steck 2019): a linear model from items to items, in closed form.

    >>> model = baselines.ease(train, l2=200.0)
    >>> model.num_items, evaluate(model, train, heldout)["recall@20"] > 0.7
    (294, True)

    ::

        B = argmin |X - X B|^2 + l2 |B|^2   with B_jj = 0
        score_j = sum_i x_i B_ij

    It is hard to beat where each row has many entries. It takes `16 items^2` bytes, and
    time in proportion to `items^3`.

    Args:
      train: `[rows, items]`. Values count.
      l2: the regularisation. Published values are between 200 and 1,000.

    Raises:
      MemoryError: there are too many items for the memory here.
      TypeError: `train` has a type that is not supported.
      ValueError: `l2` is not positive, or too small for float32.
    """
    return ItemWeights(ease_weights(_host(train), l2))


class _FromItemToItem(nnx.Module):
    """A model that has all scores of a batch at once.

    Attributes:
      num_features: number of input features.
      num_items: number of items that are scored.
    """

    num_features: int
    num_items: int

    def __call__(self, x: SparseRows) -> Float[Array, "batch items"]:
        """All scores."""
        check_sparse_rows(x, self.num_features)
        return self._scores(x)

    def _scores(self, x: SparseRows) -> Float[Array, "batch items"]:
        raise NotImplementedError

    def top_k(
        self,
        x: SparseRows,
        k: int,
        *,
        exclude: SparseRows | None = None,
        excluded: Bool[Array, "items"] | None = None,
    ) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
        """Ids and scores of the `k` best items of each row, as `sparsejax.top_k`."""
        scores = self(x)
        if excluded is not None:
            scores = jnp.where(excluded[None], -jnp.inf, scores)
        if exclude is not None:
            check_sparse_rows(exclude)
            place = (exclude.row_ids(), exclude.column_ids())
            scores = scores.at[place].set(-jnp.inf, mode="drop")
        scores, ids = lax.top_k(scores, min(k, self.num_items))
        ids = jnp.where(scores == -jnp.inf, -1, ids)
        more = ((0, 0), (0, k - ids.shape[1]))
        return (
            jnp.pad(ids, more, constant_values=-1),
            jnp.pad(scores, more, constant_values=-jnp.inf),
        )

    def item_scores(
        self, x: SparseRows, ids: Int[Array, "batch count"]
    ) -> Float[Array, "batch count"]:
        """Scores of the items `ids` of each row, NaN for a number that is no item."""
        scores = self(x)
        check_item_ids(ids, len(scores), self.num_items)
        ids = jnp.asarray(ids)
        some = jnp.take_along_axis(scores, ids, axis=1, mode="clip")
        return only_of_items(some, ids, self.num_items)


class ItemWeights(_FromItemToItem):
    """Scores are `x weights`.

    Args:
      weights: `[features, items]`.
    """

    def __init__(self, weights: Float[Array | np.ndarray, "features items"]):
        self.num_features, self.num_items = weights.shape
        more = padded_rows(self.num_features) - self.num_features
        weights = jnp.pad(jnp.asarray(weights, jnp.float32), ((0, more), (0, 0)))
        self.kernel = nnx.Variable(weights)

    def _scores(self, x: SparseRows) -> Float[Array, "batch items"]:
        return gather_matmul(x, self.kernel[...])


class NearestItems(_FromItemToItem):
    """Scores are `x weights`, for weights with `k` entries in each row.

    Args:
      ids: the columns of these entries.
      weights: their values.
    """

    def __init__(
        self, ids: Int[Array, "items k"], weights: Float[Array, "items k"]
    ) -> None:
        self.num_features = self.num_items = len(ids)
        self.ids, self.weights = nnx.Variable(ids), nnx.Variable(weights)

    def _scores(self, x: SparseRows) -> Float[Array, "batch items"]:
        rows, columns = x.row_ids(), x.column_ids()
        weights = self.weights[...].at[columns].get(mode="clip")
        if x.data is not None:
            weights *= jnp.asarray(x.data, jnp.float32)[..., None]
        ids = self.ids[...].at[columns].get(mode="clip")
        scores = jnp.zeros((x.num_rows, self.num_items), jnp.float32)
        # Padding has a row that does not exist.
        return scores.at[rows[..., None], ids].add(weights, mode="drop")


BASELINES: dict[str, Callable[[Source], _FromItemToItem]] = {
    "item_knn": item_knn,
    "ease": ease,
}
"""What `sparsejax evaluate --baselines` compares with, beside popularity."""


def _host(train: Source) -> CSR:
    return jax.tree.map(np.asarray, NamedCSR.of("train", train).matrix)
