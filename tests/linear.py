"""The smallest model that can recommend."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.ops.top_k import top_k


class Linear(nnx.Module):
    """Scores are `x weights + bias`, for `weights: [features, items]`."""

    times_traced = 0

    def __init__(self, weights, bias=None):
        self.num_features, self.num_items = weights.shape
        self.weights = nnx.Param(jnp.asarray(weights, jnp.float32))
        bias = np.zeros(self.num_items) if bias is None else bias
        self.bias = nnx.Param(jnp.asarray(bias, jnp.float32))

    def top_k(self, x, k, *, exclude=None):
        Linear.times_traced += 1
        h = gather_matmul(x, self.weights[...])
        return top_k(
            h, jnp.eye(self.num_items), k, bias=self.bias[...], exclude=exclude
        )

    def item_scores(self, x, ids):
        scores = gather_matmul(x, self.weights[...]) + self.bias[...][None, :]
        return jnp.take_along_axis(scores, ids, axis=1)
