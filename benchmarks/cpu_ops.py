"""Times the sparse operations on a CPU beside SciPy's.

    python benchmarks/cpu_ops.py

Prints a table and writes `results/cpu_ops.json`. Times are medians in milliseconds. Calls
alternate between the two, so that both meet the same disturbances.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

import sparsejax as sj
from sparsejax.ops import scatter_gradient

_RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "cpu_ops.json"
# A batch of an autoencoder's input layer on MovieLens-20M: zipf features, lognormal
# lengths.
_BATCH, _FEATURES, _HIDDEN, _MEAN_LENGTH = 512, 26_744, 256, 139
_CALLS = 41


def main() -> None:
    rng = np.random.default_rng(0)
    popularity = np.arange(1, _FEATURES + 1) ** -0.8
    popularity /= popularity.sum()
    lengths = rng.lognormal(np.log(_MEAN_LENGTH) - 0.5, 1.0, _BATCH).astype(int) + 1
    lengths = np.minimum(lengths, _FEATURES // 4)
    columns = [rng.choice(_FEATURES, n, replace=False, p=popularity) for n in lengths]
    rows = np.repeat(np.arange(_BATCH), lengths)
    values = rng.standard_normal(len(rows), np.float32)
    places = (rows, np.concatenate(columns))
    matrix = scipy.sparse.coo_array((values, places), shape=(_BATCH, _FEATURES)).tocsr()
    w = rng.standard_normal((_FEATURES, _HIDDEN), np.float32)
    dy = rng.standard_normal((_BATCH, _HIDDEN), np.float32)

    x = jax.tree.map(jnp.asarray, sj.CSR.from_scipy(matrix))
    forward = jax.jit(sj.gather_matmul)
    dense = jax.jit(lambda x, dy: scatter_gradient.dense_gradient(x, dy, _FEATURES))
    touched = jax.jit(lambda x, dy: scatter_gradient.row_gradient([x], [dy], _FEATURES))
    on_device = jnp.asarray(w), jnp.asarray(dy)

    def scatter(pair):
        ids, sums = map(np.asarray, pair)
        result = np.zeros((_FEATURES + 1, _HIDDEN), np.float32)
        result[ids] = sums
        return result[:-1]

    cases = {
        "x @ w": (lambda: forward(x, on_device[0]), lambda: matrix @ w, np.asarray),
        "x.T @ dy, dense": (
            lambda: dense(x, on_device[1]),
            lambda: matrix.T @ dy,
            np.asarray,
        ),
        "x.T @ dy, touched rows": (
            lambda: touched(x, on_device[1]),
            lambda: matrix.T @ dy,
            scatter,
        ),
    }
    results = {}
    for name, (ours, theirs, as_dense) in cases.items():
        np.testing.assert_allclose(as_dense(ours()), theirs(), rtol=1e-3, atol=1e-3)
        results[name] = dict(zip(("ours", "scipy"), medians(ours, theirs), strict=True))
    report = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/cpu_ops.py",
        "versions": {"jax": jax.__version__, "scipy": scipy.__version__},
        "cpus": os.cpu_count(),
        "shape": [_BATCH, _FEATURES, _HIDDEN],
        "entries": matrix.nnz,
        "milliseconds": results,
    }
    _RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{matrix.nnz:,} entries; ms")
    for name, times in results.items():
        ratio = times["scipy"] / times["ours"]
        print(
            f"{name:24} ours {times['ours']:6.2f}  SciPy {times['scipy']:6.2f}  "
            f"{ratio:.2f}x"
        )


def medians(*functions) -> list[float]:
    """Median milliseconds of functions that are called in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(_CALLS):
        for function, mine in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            mine.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(mine) for mine in times]


if __name__ == "__main__":
    main()
