"""EASE of low rank, computed from the data by a randomised decomposition and a fitted scale."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Float

from sparsejax.mesh.layout import without_mesh
from sparsejax.mesh.xla_options import Programs
from sparsejax.nn.config import LinearConfig
from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.sparse import CSR, summed

# The basis has this many more columns than are kept, and is multiplied by the data this many
# times. With these, nDCG@20 on MovieLens-1M equals that of an exact decomposition to four digits.
_MORE_COLUMNS, _PRODUCTS = 64, 4

# With at most this many items, NumPy computes a matrix `[items, items]` (64 MB). It is decomposed
# exactly if it is at most this many times as large as the rank: LAPACK is then as fast as a
# randomised basis.
_FEW_ITEMS, _EXACT = 4096, 2

# Number of data rows whose products with the basis are in memory at a time.
BLOCK_ROWS = 2**16

# Number of arrays of the size of the basis that are in memory at a time.
_BASES = 5

# Number of successive Cholesky decompositions, and the number added to the diagonal before each,
# relative to its sum: about ten times the rounding error of float32. The later decompositions
# undo the effect of the first on small components.
_PASSES, _SHIFT = 3, 1e-6

# The factor of the scores is fitted to this many scores; its logarithm is searched in this range.
_SAMPLED_SCORES, _LOGS = 2**21, (-8.0, 8.0)

# A `csr_array`, typed as Any because its shape may be None in SciPy's stubs.
_Rows = Any

# Replaces 0 in a denominator.
_TINY = 1e-30


def closed_form(
    matrix: scipy.sparse.sparray | scipy.sparse.spmatrix, config: LinearConfig
) -> tuple[Float[np.ndarray, "items rank"], Float[np.ndarray, "items"]]:
    """Computes kernel and scale of a `LinearPart`.

    The decomposition is randomised: products of the sparse data with a basis of `rank`
    and some more columns, `4 * entries * rank` multiplications each, and decompositions
    of `[rank, rank]` matrices. It is computed in float32: by NumPy for up to 4,096 items or
    without a GPU, otherwise on the first GPU. Memory: some arrays with the size of the
    result, and 65,536 rows of that width.

    >>> data = scipy.sparse.csr_array(np.eye(4) + np.eye(4, k=1))
    >>> kernel, scale = closed_form(data, LinearConfig(rank=2))
    >>> kernel.shape, scale.shape
    ((4, 2), (4,))

    Args:
      matrix: the data, `[rows, items]`.
      config: rank, ridge, popularity and weight.
    """
    data = _Data.of(matrix, config)
    rows, items = data.rows.shape
    width = min(config.rank + _MORE_COLUMNS, rows, items)
    rank = min(config.rank, width)
    if not width or not data.rows.nnz:
        return np.zeros((items, rank), np.float32), np.zeros(items, np.float32)
    squares, q = _decomposed(data.rows, width)
    squares, q = squares[:rank], q[:, :rank]
    u = q * np.sqrt(squares / (squares + data.ridge))
    left_out = np.maximum(data.diagonal - np.square(q) @ squares, 0)
    rest = left_out / (data.ridge + left_out.sum() / max(items - rank, 1))
    # In exact ridge regression this is positive; the omitted components are only estimated.
    error = np.maximum(1 - np.square(u).sum(axis=1) - rest, 0.01)
    unit = _unit(data, squares, q, error)
    scale = config.weight * unit / (error * data.damping)
    return u * data.damping[:, None], scale.astype(np.float32)


def gpu_bytes(config: LinearConfig, rows: int, items: int, entries: int) -> int:
    """Peak bytes of GPU memory that `closed_form` needs for data of these sizes."""
    if items <= _FEW_ITEMS:
        return 0
    width = min(config.rank + _MORE_COLUMNS, rows, items)
    side = max(min(rows, BLOCK_ROWS), items)
    blocks = 16 * entries + 8 * side * -(-rows // BLOCK_ROWS)
    return blocks + 4 * width * (_BASES * side + 3 * width)


@dataclasses.dataclass(frozen=True)
class _Data:
    """The data in the form that is decomposed.

    Attributes:
      rows: `A`, rows divided by their norms and columns damped by popularity.
      damping: factors by which the columns were multiplied.
      diagonal: diagonal of `A^T A`.
      ridge: ridge in the scale of `A^T A`.
    """

    rows: _Rows
    damping: np.ndarray
    diagonal: np.ndarray
    ridge: float

    @classmethod
    def of(cls, matrix, config: LinearConfig) -> _Data:
        # Overflows become infinite values, which are reported below.
        with np.errstate(over="ignore"):
            data = summed(matrix).astype(np.float32)
        data.eliminate_zeros()
        items = CSR.from_scipy(data).shape[1]  # raises an error for invalid data
        squares = np.asarray(data.multiply(data).sum(axis=1), np.float64)
        counts = np.maximum(np.bincount(data.indices, minlength=items), 1)
        damping = (counts / counts.mean()) ** -config.popularity
        inverse = np.repeat(
            1 / np.sqrt(np.maximum(squares, _TINY)), np.diff(data.indptr)
        )
        data.data = (data.data * inverse * damping[data.indices]).astype(np.float32)
        diagonal = np.bincount(data.indices, data.data.astype(np.float64) ** 2, items)
        # If all values are 1, this is the mean of the squared norms.
        mean = data.nnz / max(np.count_nonzero(squares), 1)
        return cls(
            data,
            damping.astype(np.float32),
            diagonal.astype(np.float32),
            # The ridge is at least this: otherwise rounding errors would be divided by tiny
            # components.
            max(
                float(config.ridge / max(mean, _TINY)),
                _SHIFT * float(diagonal.max(initial=0)),
            ),
        )


def _unit(
    data: _Data,
    squares: Float[np.ndarray, "rank"],
    q: Float[np.ndarray, "items rank"],
    error: Float[np.ndarray, "items"],
) -> float:
    """The factor of the scores with which the rows of the data are most likely.

    The likelihood of an item of a row is the softmax over this item and the items that the
    row does not have. The score is computed by a regression without this row, from the row
    without this item. In a ridge regression both omissions have a closed form: with
    `g = a Q diag(1 / (sigma^2 + ridge')) Q^T` and `h = a g`, a row `a` contributes
    `ridge' g g^T / (1 - h)` to `U U^T`.
    """
    # This import takes a quarter of a second, and few commands need it.
    import scipy.optimize

    lengths = np.diff(data.rows.indptr)
    # A row that has all items has no negatives.
    several = np.flatnonzero((lengths > 1) & (lengths < len(q)))
    if not len(several):
        return 0.0
    count = min(len(several), max(_SAMPLED_SCORES // len(q), 1))
    chosen = np.random.default_rng(0).choice(several, count, replace=False)
    a = data.rows[chosen].toarray()
    own, projected = a != 0, a @ q
    g = (projected / (squares + data.ridge)) @ q.T
    h = (a * g).sum(axis=1, keepdims=True)
    z = (projected * (squares / (squares + data.ridge))) @ q.T
    left = np.maximum(1 - h, _SHIFT)
    z -= data.ridge * g * (h / left)
    less = data.ridge * g * g / left
    u_squared = np.square(q) @ (squares / (squares + data.ridge))
    scores = (z - a * (u_squared - less)) / (error + less) / data.damping
    # Rescales to the norm of a row with one entry fewer.
    scores *= np.sqrt(lengths / np.maximum(lengths - 1, 1))[chosen][:, None]
    wanted, others = scores[own], np.where(own, -np.inf, scores)
    rows = np.nonzero(own)[0]

    def cost(log: float) -> float:
        unit = np.exp(np.float32(log))
        most = others.max(axis=1)
        rest = unit * most + np.log(np.exp(unit * (others - most[:, None])).sum(axis=1))
        return float((np.logaddexp(rest[rows], unit * wanted) - unit * wanted).mean())

    return float(
        np.exp(
            scipy.optimize.minimize_scalar(
                cost, bounds=_LOGS, method="bounded", options={"xatol": 0.05}
            ).x
        )
    )


def _decomposed(
    rows: _Rows, width: int
) -> tuple[Float[np.ndarray, "width"], Float[np.ndarray, "items width"]]:
    """The `width` largest eigenvalues of `A^T A`, descending, and their eigenvectors."""
    if rows.shape[1] <= _FEW_ITEMS or jax.default_backend() == "cpu":
        return on_host(rows, width)
    with without_mesh():
        return on_device(rows, width)


def on_host(
    rows: _Rows, width: int
) -> tuple[Float[np.ndarray, "width"], Float[np.ndarray, "items width"]]:
    """`_decomposed` by NumPy and SciPy. Nothing is compiled."""
    import scipy.linalg

    items = rows.shape[1]
    if items <= _FEW_ITEMS:
        gram = (rows.T @ rows).toarray()
        if items <= _EXACT * width:
            squares, q = _descending(*np.linalg.eigh(gram))
            return squares[:width], q[:, :width]
        applied = functools.partial(np.matmul, gram)
    else:
        columns = scipy.sparse.csr_array(rows.T)
        applied = lambda basis: columns @ (rows @ basis)
    basis = np.random.default_rng(0).standard_normal((items, width), np.float32)
    options = {"overwrite_a": True, "check_finite": False}
    for _ in range(_PRODUCTS):
        # LU gives a well-conditioned basis of the same space, in a fraction of the time of QR.
        basis, _ = scipy.linalg.lu(applied(basis), permute_l=True, **options)
    basis, _ = scipy.linalg.qr(basis, mode="economic", **options)
    squares, turn = _descending(*np.linalg.eigh(basis.T @ applied(basis)))
    return squares, basis @ turn


def _descending(squares, q):
    return np.maximum(squares[::-1], 0), q[:, ::-1]


def on_device(
    rows: _Rows, width: int
) -> tuple[Float[np.ndarray, "width"], Float[np.ndarray, "items width"]]:
    """`_decomposed` by JAX, on the first device."""
    squares, q = (np.asarray(a) for a in _decompose[True](_blocks(rows), width))
    return squares, q[: rows.shape[1]]


def _blocks(data: _Rows) -> CSR:
    """Divides rows into square blocks, each with its transpose: `[blocks, 2, ...]`.

    All are square, so that one program multiplies all of them. Columns beyond the items are empty,
    and so are rows beyond the data.
    """
    rows, items = data.shape
    size = min(BLOCK_ROWS, rows)
    side = max(size, items)
    starts = range(0, rows, size)
    room = max(int(data.indptr[min(s + size, rows)] - data.indptr[s]) for s in starts)
    pairs = []
    for start in starts:
        block = scipy.sparse.csr_array(data[start : start + size])
        block.resize((side, side))
        both = block, scipy.sparse.csr_array(block.transpose())
        parts = (CSR.from_scipy(part, nse=room) for part in both)
        pairs.append(_stacked(*parts))
    return jax.device_put(_stacked(*pairs))


def _stacked(*parts: CSR) -> CSR:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *parts)


@functools.partial(Programs, static_argnames="width")
def _decompose(blocks: CSR, width: int):
    """Computes the largest eigenvalues of `A^T A` and their eigenvectors, from `_blocks`.

    It is one program, whose loops contain each product and decomposition once: its compilation
    takes most of the time of a first training.
    """

    def applied(basis):
        """Computes the product `A^T A basis`."""

        def multiply(product, part):
            return gather_matmul(part, product), None

        def add(total, block):
            return total + jax.lax.scan(multiply, basis, block)[0], None

        return jax.lax.scan(add, jnp.zeros_like(basis), blocks)[0]

    def once(_, found):
        basis = _orthonormal(found[1])
        return basis, applied(basis)

    start = jax.random.normal(jax.random.key(0), (blocks.num_cols, width))
    # The last product is used for the eigenvalues.
    basis, product = jax.lax.fori_loop(0, _PRODUCTS + 1, once, (start, start))
    squares, turn = jnp.linalg.eigh(_product(basis.T, product))
    return jnp.maximum(squares[::-1], 0), _product(basis, turn[:, ::-1])


def _orthonormal(basis: Float[Array, "items width"]) -> Float[Array, "items width"]:
    """An orthonormal basis of the space that the columns span, by Cholesky decompositions."""

    def once(_, basis):
        gram = _product(basis.T, basis)
        shift = (_SHIFT * jnp.trace(gram) + _TINY) * jnp.eye(len(gram))
        factor = jnp.linalg.cholesky(gram + shift)
        return jax.scipy.linalg.solve_triangular(factor, basis.T, lower=True).T

    return jax.lax.fori_loop(0, _PASSES, once, basis)


def _product(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
