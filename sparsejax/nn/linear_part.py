"""A linear part of an autoencoder, computed from the data: EASE of a low rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import (
    BY_ROWS,
    jit_sharded,
    out_sharding,
    padded_rows,
    without_mesh,
)
from sparsejax.mesh.xla_options import Programs
from sparsejax.nn.config import LinearConfig
from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.ops.implementations import Implementation
from sparsejax.optimizers import gradients
from sparsejax.sparse import CSR

# The basis has some columns more than are kept, and the data is applied to it this many
# times. Then nDCG@20 on MovieLens-1M is that of an exact decomposition, to four digits.
_MORE_COLUMNS, _PRODUCTS = 64, 4

# Rows of the data whose products with the basis exist at a time.
BLOCK_ROWS = 2**16

# Cholesky decompositions in turn, and what is added to the diagonal before each, relative
# to its sum: about ten times the rounding error of float32. What the first does to small
# components the others undo.
_PASSES, _SHIFT = 3, 1e-6


# In place of 0 in a denominator.
_TINY = 1e-30


class FromData(nnx.Variable):
    """An array that is computed from the data. Optimizers do not train it."""


class LinearPart(nnx.Module):
    """Scores that are linear in the row: `s = c (x / |x|) K K^T diag(scale)`.

    ::

        A      = rows of the data, divided by their norms, and column i by n_i^popularity
        A      ~ P diag(sigma) Q^T                           of the given rank
        U      = Q diag(sigma / sqrt(sigma^2 + ridge'))      ridge' = ridge / mean |row|^2
        score  = (a U) . U_i / (1 - |U_i|^2)                 of a row `a` without item i

    n_i is the number of entries of item i, divided by its mean. The mean of the squared
    norms is over the rows that have entries. With the full rank this is the score of EASE:
    the ridge regression of each item on all others, in the closed form
    `-(a C)_i / C_ii` with `C = (A^T A + ridge' I)^-1`, as `1 - ridge' C = U U^T`. No
    `[items, items]` matrix is made. In `1 - |U_i|^2`, what the rank leaves out counts
    with the mean of the left-out `sigma^2`. Items that a row has keep their own
    contribution, so they have to be excluded from rankings.

    `K = diag(n^-popularity) U` and `scale` hold all of this. All scores together have a
    standard deviation of `weight` (over the rows and items of the data). Before
    `set_from` all scores are 0.

    Args:
      config: rank, ridge, popularity and weight.
      items: number of features, which are also the items.
    """

    def __init__(self, config: LinearConfig, items: int):
        self.config, self.items = config, items
        shape = (padded_rows(items), min(config.rank, items))
        zeros = jit_sharded(_zeros, BY_ROWS, static=(0,))(shape)
        self.kernel = FromData(zeros, **out_sharding(BY_ROWS))
        self.scale = FromData(jnp.zeros(shape[:1]))
        self.implementation: Implementation = None

    def encode(self, x: SparseRows) -> Float[Array, "batch rank"]:
        """`(x / |x|) K`, for `x: [batch, items]`."""
        return gradients.lookup(
            self.kernel, x, combiner="sqrtn", implementation=self.implementation
        )

    def set_from(self, matrix: scipy.sparse.sparray | scipy.sparse.spmatrix) -> None:
        """Computes the arrays from the data, `[rows, items]`."""
        with without_mesh():
            kernel, scale = (np.asarray(a) for a in closed_form(matrix, self.config))
        extra = len(self.scale) - len(scale)
        kernel = np.pad(
            kernel, ((0, extra), (0, self.kernel.shape[1] - kernel.shape[1]))
        )
        for variable, value in (
            (self.kernel, kernel),
            (self.scale, np.pad(scale, (0, extra))),
        ):
            variable.set_value(jax.device_put(value, variable[...].sharding))


def closed_form(
    matrix: scipy.sparse.sparray | scipy.sparse.spmatrix, config: LinearConfig
) -> tuple[Float[Array, "items rank"], Float[Array, "items"]]:
    """Kernel and scale of a `LinearPart`, on the first device.

    The decomposition is randomised: products of the sparse data with a basis of `rank`
    and some more columns, `4 * entries * rank` multiplications each, and decompositions
    of `[rank, rank]` matrices. Computed in float32. Memory: some arrays of the size of
    the result, and 65,536 rows of that width.

    >>> data = scipy.sparse.csr_array(np.eye(4) + np.eye(4, k=1))
    >>> kernel, scale = closed_form(data, LinearConfig(rank=2))
    >>> kernel.shape, scale.shape
    ((4, 2), (4,))

    Args:
      matrix: the data, `[rows, items]`.
      config: rank, ridge, popularity and weight.
    """
    data = scipy.sparse.csr_array(matrix, dtype=np.float32, copy=True)
    data.sum_duplicates()
    rows, items = CSR.from_scipy(data).shape
    norms = np.sqrt(data.multiply(data).sum(axis=1))
    counts = np.maximum(np.bincount(data.indices, minlength=items), 1)
    damping = (counts / counts.mean()) ** -config.popularity
    lengths = np.diff(data.indptr)
    data.data *= (
        np.repeat(1 / np.maximum(norms, _TINY), lengths) * damping[data.indices]
    )
    diagonal = np.bincount(data.indices, data.data.astype(np.float64) ** 2, items)
    width = min(config.rank + _MORE_COLUMNS, rows, items)
    rank = min(config.rank, width)
    if not width or not data.nnz:
        return jnp.zeros((items, rank)), jnp.zeros(items)
    blocks = _blocks(data, items)
    basis = jax.random.normal(jax.random.key(0), (items, width))
    for _ in range(_PRODUCTS):
        basis = _applied(blocks, _orthonormal[True](basis))
    basis = _orthonormal[True](basis)
    kernel, scale = _finished[True](
        basis,
        _applied(blocks, basis),
        jnp.asarray(diagonal, jnp.float32),
        jnp.asarray(damping, jnp.float32),
        config.ridge
        / max(float(np.square(norms).sum() / max(np.count_nonzero(norms), 1)), _TINY),
        rows,
        rank,
    )
    return kernel, config.weight * scale


def _blocks(data: scipy.sparse.csr_array, items: int) -> list[tuple[CSR, CSR]]:
    """Blocks of rows with their transposes, all of the same shapes."""
    rows = len(data.indptr) - 1
    size = min(BLOCK_ROWS, rows)
    starts = range(0, rows, size)
    counts = [int(data.indptr[min(s + size, rows)] - data.indptr[s]) for s in starts]
    blocks = []
    for start in starts:
        block = scipy.sparse.csr_array(data[start : start + size])
        block.resize((size, items))
        pair = (block, scipy.sparse.csr_array(block.transpose()))
        first, second = (CSR.from_scipy(part, nse=max(counts)) for part in pair)
        blocks.append((jax.device_put(first), jax.device_put(second)))
    return blocks


def _applied(
    blocks: Sequence[tuple[CSR, CSR]], basis: Float[Array, "items width"]
) -> Float[Array, "items width"]:
    """`A^T A basis`."""
    total = jnp.zeros_like(basis)
    for block in blocks:
        total = _added[True](total, basis, *block)
    return total


@Programs
def _added(total, basis, block: CSR, transposed: CSR):
    return total + gather_matmul(transposed, gather_matmul(block, basis))


@Programs
def _orthonormal(basis):
    """The same space, by Cholesky decompositions: on a CPU ten times as fast as QR."""
    for _ in range(_PASSES):
        gram = _product(basis.T, basis)
        shift = (_SHIFT * jnp.trace(gram) + _TINY) * jnp.eye(len(gram))
        factor = jnp.linalg.cholesky(gram + shift)
        basis = jax.scipy.linalg.solve_triangular(factor, basis.T, lower=True).T
    return basis


@functools.partial(Programs, static_argnames="rank")
def _finished(basis, applied, diagonal, damping, ridge, rows, rank):
    """Kernel, and the scale that gives scores a standard deviation of 1."""
    squares, turn = jnp.linalg.eigh(_product(basis.T, applied))
    squares, turn = jnp.maximum(squares[::-1][:rank], 0), turn[:, ::-1][:, :rank]
    q = _product(basis, turn)
    u = q * jnp.sqrt(squares / (squares + ridge))[None]
    left_out = jnp.maximum(diagonal - jnp.square(q) @ squares, 0)
    others = max(len(q) - rank, 1)
    rest = left_out / (ridge + jnp.sum(left_out) / others)
    # Ridge regression leaves it positive; what is left out is an estimate.
    error = jnp.maximum(1 - jnp.sum(jnp.square(u), axis=1) - rest, 0.01)
    kernel, scale = u * damping[:, None], 1 / (error * damping)
    # Rows of the data have uncorrelated `a U`, with these sums of squares.
    sums = squares * squares / (squares + ridge)
    variance = jnp.var(kernel * scale[:, None], axis=0) @ sums / rows
    return kernel, scale * jax.lax.rsqrt(jnp.maximum(variance, _TINY))


def _product(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _zeros(shape):
    return jnp.zeros(shape)
