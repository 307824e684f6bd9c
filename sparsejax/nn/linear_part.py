"""A linear part of an autoencoder, computed from the data: EASE of low rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import BY_ROWS, jit_sharded, out_sharding, padded_rows
from sparsejax.nn.closed_form import closed_form
from sparsejax.nn.config import LinearConfig
from sparsejax.ops.implementations import Implementation
from sparsejax.optimizers import gradients, growth


class FromData(nnx.Variable):
    """An array that is computed from the data, and that optimizers do not train."""


class LinearPart(nnx.Module):
    """Scores that are linear in the row: `s = c (x / |x|) K K^T diag(scale)`.

    ::

        A      = rows of the data, divided by their norms, and column i by n_i^popularity
        A      ~ P diag(sigma) Q^T                           of the given rank
        U      = Q diag(sigma / sqrt(sigma^2 + ridge'))      ridge' = ridge / entries of a row
        score  = (a U) . U_i / (1 - |U_i|^2)                 of a row `a` without item i

    n_i is the number of entries of item i, divided by its mean. The mean of the entries
    is over the non-empty rows. With the full rank this is the score of EASE:
    the ridge regression of each item on all others, in the closed form
    `-(a C)_i / C_ii` with `C = (A^T A + ridge' I)^-1`, as `1 - ridge' C = U U^T`. No
    `[items, items]` matrix is made. In `1 - |U_i|^2`, the components beyond the rank
    are estimated by the mean of the omitted `sigma^2`. Items of the row have their own
    contribution in their scores, so they have to be excluded from rankings.

    `K = diag(n^-popularity) U` and `scale` contain all of this. `c` is `weight` times the
    factor with which the softmax of these scores gives held-out entries of rows
    the highest likelihood. Before `set_from` all scores are 0.

    Args:
      config: rank, ridge, popularity and weight.
      items: number of features, which are also the items.
    """

    def __init__(self, config: LinearConfig, items: int):
        self.config, self.items = config, items
        shape = (padded_rows(items), min(config.rank, items))
        zeros = jit_sharded(jnp.zeros, BY_ROWS, static=(0,))(shape)
        self.kernel = FromData(zeros, **out_sharding(BY_ROWS))
        self.scale = FromData(jnp.zeros(shape[:1]))
        self.implementation: Implementation = None

    def encode(self, x: SparseRows) -> Float[Array, "batch rank"]:
        """`(x / |x|) K`, for `x: [batch, items]`."""
        return gradients.lookup(
            self.kernel, x, combiner="sqrtn", implementation=self.implementation
        )

    def add_items(self, count: int) -> None:
        """Adds items after the known items, in place; their scores are 0.

        With fewer items than the rank, the kernel also gets wider.
        """
        for variable in (self.kernel, self.scale):
            growth.add_rows(variable, self.items, count, zeros=True)
        self.items += count
        rank = min(self.config.rank, self.items)
        growth.add_columns(self.kernel, rank - self.kernel.shape[1])

    def set_from(self, matrix: scipy.sparse.sparray | scipy.sparse.spmatrix) -> None:
        """Computes the arrays from the data, `[rows, items]`."""
        self.set_to(*closed_form(matrix, self.config))

    def set_to(
        self, kernel: Float[np.ndarray, "items rank"], scale: Float[np.ndarray, "items"]
    ) -> None:
        """Sets the arrays that `closed_form` has computed."""
        extra = len(self.scale) - len(scale)
        kernel = np.pad(
            kernel, ((0, extra), (0, self.kernel.shape[1] - kernel.shape[1]))
        )
        for variable, value in (
            (self.kernel, kernel),
            (self.scale, np.pad(scale, (0, extra))),
        ):
            # An array that is committed to a device makes all arrays computed from it committed,
            # and these need other programs: the training program would be compiled twice.
            before = variable[...]
            place = before.sharding if before.committed else None
            variable.set_value(jax.device_put(value, place))
