"""The popularity baseline, which recommends the most popular items to all rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.data.reading.sources import Features
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import padded_rows
from sparsejax.ops.targets import check_item_ids, only_of_items
from sparsejax.ops.top_k import top_k
from sparsejax.sparse import CSR


def column_counts(matrix: CSR) -> np.ndarray:
    """`[num_cols]` number of entries in each column."""
    used = np.asarray(matrix.indices)[: int(matrix.indptr[-1])]
    return np.bincount(used, minlength=matrix.num_cols)


class Popularity(nnx.Module):
    """Scores every item by the number of rows that have it; ignores the input.

    An item that no row has is never recommended: a vocabulary made from these rows would lack it.

    Args:
      counts: `[items]` number, or share, of the rows that have each item.
      features: `num_features` of the models that this one is compared with.
    """

    def __init__(self, counts: np.ndarray, features: Features):
        # Ranks are stored instead of counts: float32 cannot represent all counts above 2^24.
        _, ranks = np.unique(counts, return_inverse=True)
        ranks = np.where(counts > 0, ranks, -1)
        self.ranks = nnx.Variable(jax.device_put(ranks.astype(np.float32)))
        self.num_items = len(counts)
        # A tuple, because a dict cannot be a static attribute of a compiled program.
        self.features = features if isinstance(features, int) else (*features.items(),)

    @property
    def num_features(self) -> Features:
        return self.features if isinstance(self.features, int) else dict(self.features)

    @property
    def scores(self) -> jax.Array:
        # Infinite scores are computed inside the program: `jax_debug_infs` rejects infinite
        # arguments.
        ranks = self.ranks[...]
        return jnp.where(ranks < 0, -jnp.inf, ranks)

    def top_k(
        self, x: Any, k: int, *, exclude: SparseRows | None = None, excluded=None
    ):
        some = next(iter(x.values())) if isinstance(x, dict) else x
        rows = padded_rows(self.num_items)
        h, kernel = jnp.zeros((some.shape[0], 1)), jnp.zeros((rows, 1))
        scores = self.scores
        if excluded is not None:
            scores = jnp.where(excluded, -jnp.inf, scores)
        bias = jnp.pad(scores, (0, rows - self.num_items))
        return top_k(h, kernel, k, bias=bias, exclude=exclude, num_items=self.num_items)

    def item_scores(self, x: Any, ids):
        some = next(iter(x.values())) if isinstance(x, dict) else x
        check_item_ids(ids, some.shape[0], self.num_items)
        ids = jnp.asarray(ids)
        return only_of_items(self.scores[ids], ids, self.num_items)
