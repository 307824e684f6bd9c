"""Item-to-item weights that need no training: EASE's closed form, and nearest columns."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.mesh.layout import available_memory, device_memory
from sparsejax.sparse import CSR

Form = Literal["dense", "sparse"] | None

# How many multiplications of a dense product take as long as one multiplication of SciPy's sparse
# product. CPU: two cores, 3,706 columns. GPU: scaled by the float32 peak of an H200.
_DENSE_IS_FASTER = {"cpu": 200, "gpu": 100_000}
_CHUNK = 2**26  # number of elements in a dense chunk of rows
_BLOCK = 2**24  # most multiplications for a block of SciPy's result


def ease_weights(
    x: CSR, l2: float, *, implementation: Form = None
) -> Float[Array, "items items"]:
    """The weights of EASE (Steck, "Embarrassingly shallow autoencoders", 2019).

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[1, 1.0], [1, 0], [1, 1]]))
    >>> ease_weights(x, 1.0).tolist()
    [[0.0, 0.5], [0.666..., 0.0]]

    ::

        argmin_B |X - X B|^2 + l2 |B|^2   with B_jj = 0

        P = (X^T X + l2 I)^-1
        B_ij = -P_ij / P_jj               for i != j

    Computed in float32 by a Cholesky factor, `items^3` multiplications. Memory: four
    arrays `[items, items]`.

    Args:
      x: `[rows, items]`, on the host. Its values are used.
      l2: regularization. With a large number the weights approach mere co-occurrence.
      implementation: "dense" or "sparse", as in `gram`; None picks the faster one.

    Raises:
      MemoryError: the arrays do not fit in the memory of the device here.
      ValueError: `l2` is not positive, or too small for float32.
    """
    if not l2 > 0:
        raise ValueError(f"l2 must be positive, got {l2}")
    check_memory(x.num_cols)
    found = _ease(gram(x, implementation=implementation), jnp.float32(l2))
    if not np.isfinite(np.asarray(jnp.sum(found))):
        raise ValueError(
            f"l2={l2} is too small for float32: the matrix of products has no Cholesky "
            "factor; raise it"
        )
    return found


@functools.partial(jax.jit, donate_argnums=0)
def _ease(products: jax.Array, l2: jax.Array) -> jax.Array:
    eye = jnp.eye(len(products), dtype=products.dtype)
    factor = lax.linalg.cholesky(products + l2 * eye, symmetrize_input=False)
    inverse = lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)
    inverse = jnp.matmul(inverse.T, inverse, precision=lax.Precision.HIGHEST)
    return jnp.where(eye > 0, 0.0, -inverse / jnp.diagonal(inverse)[None])


def nearest_items(
    x: CSR, neighbours: int, *, shrink: float = 0.0, implementation: Form = None
) -> tuple[Int[Array, "items k"], Float[Array, "items k"]]:
    """For each column of `x`, the columns with the largest cosines, and these cosines.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[1, 1.0, 0], [1, 1, 1], [1, 0, 0]]))
    >>> ids, cosines = nearest_items(x, 1)
    >>> ids[:, 0].tolist(), cosines[0, 0].item()
    ([1, 0, 1], 0.816...)

    ::

        cosine_ij = x_i . x_j / (|x_i| |x_j| + shrink)

    Negative cosines are replaced by 0. Ties go to the lower column. If a column has fewer
    neighbours than k, columns with a cosine of 0 follow.

    Args:
      x: `[rows, items]`, on the host. Its values are used.
      neighbours: most neighbours of a column; k is the smaller of it and the number of items.
      shrink: number added to the denominator, which lowers cosines of columns with few entries.
      implementation: "dense" computes all cosines at once, "sparse" those of some columns
        at a time. None picks the faster one by the sizes.

    Raises:
      ValueError: `neighbours` is not positive, or `shrink` is negative.
    """
    if neighbours < 1 or not shrink >= 0:
        raise ValueError(
            f"neighbours must be at least 1 and shrink at least 0, got {neighbours} and "
            f"{shrink}"
        )
    k = min(neighbours, x.num_cols)
    if implementation is None:
        fits = bytes_needed(x.num_cols) <= _memory()
        implementation = _form(x) if fits else "sparse"
    if implementation == "dense":
        return _nearest(gram(x, implementation="dense"), jnp.float32(shrink), k)
    return _nearest_by_block(x, k, shrink)


@functools.partial(jax.jit, static_argnames="k")
def _nearest(products: jax.Array, shrink: jax.Array, k: int):
    norms = jnp.sqrt(jnp.diagonal(products))
    scale = norms[:, None] * norms[None] + shrink
    cosines = jnp.maximum(products, 0) / jnp.where(scale > 0, scale, 1)
    itself = jnp.eye(len(products), dtype=bool)
    cosines, ids = lax.top_k(jnp.where(itself, -jnp.inf, cosines), k)
    return ids, jnp.where(cosines == -jnp.inf, 0, cosines)


def _nearest_by_block(x: CSR, k: int, shrink: float):
    """Does the work of `nearest_items` on the host, in blocks of columns with few products in
    total.
    """
    items, matrix = x.num_cols, x.to_scipy().astype(np.float32)
    norms = np.sqrt(matrix.multiply(matrix).sum(axis=0)).astype(np.float32)
    by_item = scipy.sparse.csr_array(matrix.T)
    # An upper bound on the number of products of each column.
    most = by_item.astype(bool) @ np.diff(matrix.indptr)
    cuts = np.flatnonzero(np.diff(np.cumsum(np.minimum(most, items)) // _BLOCK)) + 1
    ids = np.zeros((items, k), np.int32)
    cosines = np.zeros((items, k), np.float32)
    for start, stop in zip([0, *cuts], [*cuts, items], strict=True):
        found = scipy.sparse.coo_array(by_item[start:stop] @ matrix)
        row, column = found.coords
        scale = norms[start + row] * norms[column] + np.float32(shrink)
        value = found.data / np.where(scale > 0, scale, 1)
        other = (column != start + row) & (value > 0)
        row, column, value = row[other], column[other], value[other]
        order = np.lexsort((column, -value, row))
        lengths = np.bincount(row, minlength=stop - start)
        place = np.arange(order.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept, place = order[place < k], place[place < k]
        ids[start + row[kept], place] = column[kept]
        cosines[start + row[kept], place] = value[kept]
    return jnp.asarray(ids), jnp.asarray(cosines)


def gram(x: CSR, *, implementation: Form = None) -> Float[Array, "items items"]:
    """`X^T X` in float32, on the device.

    Args:
      x: `[rows, items]`, on the host.
      implementation: "dense" multiplies dense chunks of rows on the device, "sparse" is
        SciPy's product. None picks the faster one here.
    """
    matrix = x.to_scipy().astype(np.float32)
    if (implementation or _form(x)) == "sparse":
        return jnp.asarray((matrix.T @ matrix).toarray())
    rows, items = x.shape
    size = max(1, min(rows, _CHUNK // max(items, 1)))
    total = jnp.zeros((items, items), jnp.float32)
    for start in range(0, rows, size):
        chunk = scipy.sparse.csr_array(matrix[start : start + size]).toarray()
        total = _add_products(total, np.pad(chunk, ((0, size - len(chunk)), (0, 0))))
    return total


@functools.partial(jax.jit, donate_argnums=0)
def _add_products(total: jax.Array, chunk: jax.Array) -> jax.Array:
    return total + jnp.matmul(chunk.T, chunk, precision=lax.Precision.HIGHEST)


def _form(x: CSR) -> Form:
    """The faster form of `gram` for this matrix."""
    lengths = np.diff(np.asarray(x.indptr)).astype(np.float64)
    dense = float(x.num_rows) * x.num_cols**2
    platform = jax.default_backend()
    ratio = _DENSE_IS_FASTER.get(platform, _DENSE_IS_FASTER["gpu"])
    return "dense" if dense <= ratio * float(lengths @ lengths) else "sparse"


def bytes_needed(items: int) -> int:
    """The memory in bytes that `ease_weights` needs: four float32 arrays `[items, items]`."""
    return 16 * items**2


def check_memory(items: int) -> None:
    """Raises MemoryError if arrays for this many items do not fit."""
    needed, there = bytes_needed(items), _memory()
    if needed > there:
        raise MemoryError(
            f"EASE of {items:,} items needs {needed:,} bytes, but {there:,} bytes are "
            "available; use item_knn for so many items, or keep fewer of them"
        )


def _memory() -> int:
    return device_memory() or available_memory()
