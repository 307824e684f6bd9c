"""Sparse matrices for tests: ordinary ones, and awkward ones from hypothesis."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from hypothesis import strategies as st

from sparsejax.sparse import CSR


def with_garbage(matrix: CSR, extra: int, rng: np.random.Generator) -> CSR:
    """Copies a matrix to the device, and adds `extra` padding entries with invalid values."""
    count = int(matrix.indptr[-1])
    indices = rng.integers(-(2**31), 2**31, count + extra).astype(np.int32)
    indices[:count] = matrix.indices[:count]
    data = None
    if matrix.data is not None:
        data = np.full(count + extra, np.nan, np.float32)
        data[:count] = matrix.data[:count]
    leaves = (data, indices, matrix.indptr)
    data, indices, indptr = jax.tree.map(jnp.asarray, leaves)
    return CSR(data, indices, indptr, num_cols=matrix.num_cols)


def random_csr(
    rows: int,
    cols: int,
    density: float = 0.2,
    *,
    valued: bool = False,
    extra: int = 7,
    seed: int = 0,
) -> CSR:
    """A random CSR on the device with garbage in its padding."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, cols)) < density
    dense = np.where(mask, rng.standard_normal((rows, cols)), 0) if valued else mask
    host = CSR.from_scipy(scipy.sparse.csr_array(dense))
    return with_garbage(host, extra, rng)


@jax.jit
def dense(matrix: CSR) -> jax.Array:
    """`matrix.todense()`, compiled once for each shape."""
    return matrix.todense()


def oracle(matrix: CSR) -> np.ndarray:
    """The matrix as a dense float64 array, computed by SciPy."""
    return matrix.to_scipy().astype(np.float64).toarray()


def sizes(matrix: CSR) -> np.ndarray:
    """`oracle` of the absolute values, to which rounding errors of sums are relative."""
    parts = matrix.to_scipy()  # SciPy's own `abs` would add up duplicates first
    data = np.abs(parts.data, dtype=np.float64)
    positive = scipy.sparse.csr_array(
        (data, parts.indices, parts.indptr), shape=parts.shape
    )
    return positive.toarray()


@st.composite
def csrs(
    draw: st.DrawFn,
    *,
    rows: int | None = None,
    cols: int | None = None,
    unique: bool = False,
) -> CSR:
    """Awkward matrices, with or without values: empty rows, duplicate ids, one column, a very long
    row, a capacity far above the number of entries, invalid values in the padding.
    """
    # Only a few shapes, because each is compiled; the content varies.
    shapes = [
        shape
        for shape in ((1, 7), (5, 1), (5, 40))
        if rows in (None, shape[0]) and cols in (None, shape[1])
    ]
    num_rows, num_cols = draw(st.sampled_from(shapes))
    longest = num_cols if unique else 50
    lengths = draw(
        st.lists(
            st.one_of(st.just(0), st.integers(0, min(4, longest)), st.just(longest)),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = [
        np.sort(rng.choice(num_cols, size=n, replace=not unique)) for n in lengths
    ]
    indices = np.concatenate([*chosen, np.zeros(0)]).astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    data = None
    if draw(st.booleans()):
        data = rng.standard_normal(len(indices)).astype(np.float32)
    host = CSR(data, indices, indptr, num_cols=num_cols)
    count = len(indices)
    capacity = 60 if num_rows == 1 else 400
    return with_garbage(host, capacity - count, rng)
