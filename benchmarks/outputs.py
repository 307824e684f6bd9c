"""What the benchmarks of an output layer share: its operands, on the host and in JAX."""

from __future__ import annotations

import functools

import numpy as np
from workloads import Workload, make_rows

BATCHES = 2
CHECKED = 4  # rows
_ROUNDED = 256  # a layer's kernel has a multiple of this many rows


@functools.cache
def rows_of(workload: Workload, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`make_rows`, once."""
    return make_rows(workload, seed)


@functools.cache
def host_operands(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """h `[BATCHES, batch, hidden]` and kernel, of a size that makes scores of about 1."""
    rng = np.random.default_rng(1)
    size = workload.hidden**-0.25
    rows = -(-workload.features // _ROUNDED) * _ROUNDED
    h = rng.standard_normal((BATCHES, workload.batch, workload.hidden), np.float32)
    # A block again and again, at an odd stride, so that equal rows are far apart.
    block = size * rng.standard_normal(2**24 - 37, np.float32)
    kernel = np.resize(block, rows * workload.hidden).reshape(rows, workload.hidden)
    return h * size, kernel


def jax_inputs(workload: Workload) -> list[tuple]:
    """For each batch: h, kernel, CSR; h and the kernel are bfloat16."""
    import jax
    import jax.numpy as jnp

    from sparsejax.sparse import CSR

    h, kernel = host_operands(workload)
    kernel = jnp.asarray(kernel, jnp.bfloat16)
    inputs = []
    for seed in range(BATCHES):
        indices, indptr = map(jnp.asarray, rows_of(workload, seed))
        matrix = CSR(None, indices, indptr, num_cols=workload.features)
        inputs.append((jnp.asarray(h[seed], jnp.bfloat16), kernel, matrix))
    return jax.block_until_ready(inputs)


def torch_inputs(workload: Workload, *, trained: bool) -> list[tuple]:
    """For each batch: h, kernel, and the rows and columns of its entries."""
    import torch  # pyrefly: ignore[missing-import]

    h, kernel = host_operands(workload)

    def put(array):
        placed = torch.from_numpy(array).cuda().bfloat16()
        return placed.requires_grad_(trained)

    shared, inputs = put(kernel[: workload.features]), []
    for seed in range(BATCHES):
        indices, indptr = rows_of(workload, seed)
        rows = np.repeat(np.arange(workload.batch), np.diff(indptr))
        place = [torch.from_numpy(x.astype(np.int64)).cuda() for x in (rows, indices)]
        inputs.append((put(h[seed]), shared, *place))
    return inputs


@functools.cache
def exact(workload: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of the first rows in float64, whether each item is listed, and the kernel.

    The operands are rounded to bfloat16 first.
    """
    from ml_dtypes import bfloat16

    h, kernel = host_operands(workload)
    items = workload.features
    h = h[0, :CHECKED].astype(bfloat16).astype(np.float64)
    kernel = kernel[:items].astype(bfloat16).astype(np.float32)
    parts = np.array_split(kernel, 1 + items // 2**17)
    scores = np.concatenate([h @ part.T.astype(np.float64) for part in parts], axis=1)
    indices, indptr = rows_of(workload, 0)
    listed = np.zeros(scores.shape, bool)
    for row in range(CHECKED):
        listed[row, indices[indptr[row] : indptr[row + 1]]] = True
    return scores, listed, kernel
