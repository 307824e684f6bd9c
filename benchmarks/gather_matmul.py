"""Times gather-matmul against its peers.

    python benchmarks/gather_matmul.py run [--commit NAME]    on a GPU
    python benchmarks/gather_matmul.py table                  anywhere

JAX and torch each run in a process of their own, since they do not share a GPU's
memory well. Every result is checked against float64 before it is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
from report import command, reported
from timing import measure_jax, measure_torch
from workloads import WORKLOADS, Workload, make_rows

_BATCHES = 3
_PARTS = {"jax": {}, "torch": {}}


def _measure(part: str) -> Iterator[dict]:
    measure = {"jax": _measure_jax, "torch": _measure_torch}[part]
    for workload in WORKLOADS:
        yield from measure(workload)


@functools.cache
def _block() -> np.ndarray:
    """What the weights repeat, since some are large.

    Its odd length keeps equal rows from being a power of two apart.
    """
    return np.random.default_rng(1).standard_normal(2**24 - 37, np.float32)


def _jax_weights(workload: Workload, dtype: str):
    import jax
    import jax.numpy as jnp

    shape = workload.num_cols, workload.hidden
    repeat = jax.jit(jnp.resize, static_argnums=1)
    return repeat(jnp.asarray(_block(), dtype), shape)


def _error(actual: np.ndarray, rows: tuple, hidden: int) -> float:
    """Relative error of some rows, the longest among them, against float64."""
    indices, indptr = rows
    lengths = np.diff(indptr)
    some = np.random.default_rng(2).integers(0, len(lengths), 16)
    some = np.concatenate([np.argsort(-lengths)[:2], some, [len(lengths) - 1]])
    expected = []
    for row in some:
        ids = indices[indptr[row] : indptr[row + 1]].astype(np.int64)
        places = ids[:, None] * hidden + np.arange(hidden)
        terms = _block()[places % len(_block())]
        expected.append(terms.sum(0, dtype=np.float64))
    off = np.linalg.norm(np.asarray(actual, np.float64)[some] - expected)
    return float(off / np.linalg.norm(expected))


def _checked(workload: Workload, dtype: str, rows: tuple) -> Callable:
    """Function that returns the error of a product, or raises."""

    def check(found) -> float:
        error = _error(np.asarray(found), rows, workload.hidden)
        if not error < (1e-5 if dtype == "float32" else 1e-2):
            raise ValueError(f"relative error {error}")
        return error

    return check


def _named(workload: Workload, dtype: str, name: str) -> dict:
    moved = workload.bytes_moved(4 if dtype == "float32" else 2)
    names = {"workload": workload.name, "dtype": dtype, "implementation": name}
    return names | {"bytes": moved}


def _product(workload: Workload, implementation, indices, indptr, w):
    from sparsejax.ops.gather_sum import gather_sum
    from sparsejax.sparse import CSR

    x = CSR(None, indices, indptr, num_cols=workload.num_cols)
    return gather_sum(x, w, implementation)


def _measure_jax(workload: Workload) -> Iterator[dict]:
    import jax.numpy as jnp

    names = "mosaic_gpu", "xla", "cusparse"
    candidates = {name: functools.partial(_product, workload, name) for name in names}
    batches = [make_rows(workload, seed) for seed in range(_BATCHES)]
    for dtype in ("float32", "bfloat16"):
        w = _jax_weights(workload, dtype)
        inputs = [(*map(jnp.asarray, batch), w) for batch in batches]
        for name, function in candidates.items():
            if dtype == "bfloat16" and name == "cusparse":
                continue
            with reported(workload.name, dtype, name):
                check = _checked(workload, dtype, batches[0])
                found = measure_jax(function, inputs, check)
                yield _named(workload, dtype, name) | found


def _measure_torch(workload: Workload) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    def bag(indices, indptr, csr, w):
        return torch.nn.functional.embedding_bag(
            indices, w, indptr, mode="sum", include_last_offset=True
        )

    def matmul(indices, indptr, csr, w):
        return csr @ w

    batches = [make_rows(workload, seed) for seed in range(_BATCHES)]
    block = torch.from_numpy(_block()).cuda()
    shape = workload.num_rows, workload.num_cols
    for dtype in ("float32", "bfloat16"):
        size = workload.num_cols * workload.hidden
        w = block.to(getattr(torch, dtype)).repeat(-(-size // len(block)))[:size]
        w = w.view(workload.num_cols, workload.hidden)
        inputs = []
        for indices, indptr in batches:
            tensors = [torch.from_numpy(a).cuda() for a in (indices, indptr)]
            ones = torch.ones(len(indices), device="cuda")
            csr = torch.sparse_csr_tensor(tensors[1], tensors[0], ones, shape)
            inputs.append((*tensors, csr, w))
        candidates: dict[str, Callable] = {"torch embedding_bag": bag}
        if dtype == "float32":
            candidates["torch CSR @ dense"] = matmul
        for name, function in candidates.items():
            with reported(workload.name, dtype, name):
                check = _checked(workload, dtype, batches[0])
                found = measure_torch(
                    function, inputs, lambda y, c=check: c(y.float().cpu().numpy())
                )
                yield _named(workload, dtype, name) | found
        del inputs, w


if __name__ == "__main__":
    command(__doc__, __file__, _PARTS, _measure)
