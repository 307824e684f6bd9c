"""Exact nearest-neighbor search among given vectors, by brute force."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from sparsejax.engine.batching import rows_in_a_batch
from sparsejax.engine.rank.loop import check_positive
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.mesh.layout import (
    BY_ROWS,
    mesh_is_set,
    padded_rows,
    replicated,
    sharding_of,
    using_auto_axes,
)
from sparsejax.mesh.promotion import promoting
from sparsejax.ops.top_k import top_k

Metric = Literal["dot", "cosine"]


@promoting()
@using_auto_axes()
def nearest(
    queries: object,
    vectors: object,
    k: int = 10,
    *,
    metric: Metric = "dot",
    dtype: DTypeLike = jnp.float32,
    batch_size: int = 512,
) -> Recommendations:
    """The `k` vectors that score highest with each query. Exact: every pair is scored.

    ::

        dot       score = q . v
        cosine    score = q . v / (|q| |v|)      0 if one of them is 0

    Under `jax.set_mesh` the vectors are divided over the axis "model".

    >>> found = nearest([[1.0, 2.0]], [[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]], k=2)
    >>> found.ids.tolist(), found.scores.tolist()
    ([[2, 1]], [[11.0, 2.0]])

    Args:
      queries: `[n, width]` numbers.
      vectors: `[m, width]` numbers.
      k: number of vectors for each query. If there are fewer vectors, ids end with -1.
      metric: score as defined above, "dot" or "cosine".
      dtype: dtype of the operands: float32, float16 or bfloat16. Sums are computed in float32.
      batch_size: number of queries scored at a time.

    Returns:
      Ids `[n, k]`, which are row numbers of `vectors`, and their scores.

    Raises:
      ValueError: shapes do not match, there is no vector, a number is NaN or infinite (maybe only
          after conversion to `dtype`), or the metric or the dtype is unknown.
    """
    check_positive(k=k, batch_size=batch_size)
    if metric not in ("dot", "cosine"):
        raise ValueError(f'metric is "dot" or "cosine", got {metric!r}')
    if jnp.dtype(dtype) not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(f"dtype is float32, float16 or bfloat16, got {dtype}")
    ours = _operand("queries", queries, metric, dtype)
    theirs = _operand("vectors", vectors, metric, dtype)
    if ours.shape[1] != theirs.shape[1] or not len(theirs):
        raise ValueError(
            f"expected queries [n, width] and vectors [1 or more, width], got "
            f"{list(ours.shape)} and {list(theirs.shape)}"
        )
    if not len(ours):
        return Recommendations(np.empty((0, k), np.int32), np.empty((0, k), np.float32))
    missing = padded_rows(len(theirs)) - len(theirs)
    padded = np.pad(theirs, ((0, missing), (0, 0)))
    kernel = jax.device_put(padded, sharding_of(BY_ROWS))
    spec = BY_ROWS if mesh_is_set() else None
    size = rows_in_a_batch(batch_size, len(ours))
    whole = np.pad(ours, ((0, -len(ours) % size), (0, 0)))
    found = [
        jax.device_get(_nearest(batch, kernel, k, len(theirs), spec))
        for batch in whole.reshape(-1, size, whole.shape[1])
    ]
    ids, scores = (np.concatenate(parts)[: len(ours)] for parts in zip(*found))  # noqa: B905
    return Recommendations(ids, scores)


def _operand(
    what: str, vectors: object, metric: Metric, dtype: DTypeLike
) -> np.ndarray:
    array = np.asarray(vectors)
    if array.ndim != 2:
        raise ValueError(f"{what} must be [rows, width], got the shape {array.shape}")
    array = array.astype(np.float32)
    if metric == "cosine":
        # Dividing by the largest number first prevents squares from overflowing or underflowing
        # float32.
        largest = np.abs(array).max(axis=1, keepdims=True, initial=0)
        array = array / np.where(largest > 0, largest, 1)
        norm = np.linalg.norm(array, axis=1, keepdims=True)
        array = array / np.where(norm > 0, norm, 1)
    with np.errstate(over="ignore"):
        array = array.astype(dtype)
    bad = ~np.isfinite(array.astype(np.float32)).all(axis=1)
    if bad.any():
        raise ValueError(
            f"row {int(np.argmax(bad)):,} of {what} has a number that is not finite, or "
            f"too large for {jnp.dtype(dtype)}"
        )
    return array


@functools.partial(jax.jit, static_argnames=("k", "num_items", "spec"))
def _nearest(h, kernel, k: int, num_items: int, spec: P | None):
    found = top_k(
        h, kernel, k, num_items=num_items, kernel_spec=spec, precision="highest"
    )
    return replicated(found)
