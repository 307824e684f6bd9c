"""Times gather-matmul against its peers and writes results and table.

    python benchmarks/gather_matmul.py run [--commit NAME]    on a GPU
    python benchmarks/gather_matmul.py table                  anywhere

`run` starts a process for JAX, one for JAX with its cuSPARSE flag, and one for torch
and CuPy, since they do not share a GPU's memory well. Every result is checked against
float64 on fresh random inputs before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import (
    RESULTS,
    emit,
    origin,
    reported,
    run_parts,
    table,
    write_section,
)
from timing import Time, time_jax, time_torch
from workloads import WORKLOADS, Workload, make_rows

_RESULTS = RESULTS / "gather_matmul.json"
_BATCHES = 3
_PARTS = {"jax": {}, "cusparse": {"JAX_BCOO_CUSPARSE_LOWERING": "true"}, "torch": {}}
_DENSE_LIMIT = 4e9  # bytes of a densified batch that are still tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["run", "table", "jax", "cusparse", "torch"])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=pathlib.Path, default=_RESULTS)
    parser.add_argument("--only", nargs="*", help="names of workloads")
    arguments = parser.parse_args()
    chosen = [w for w in WORKLOADS if not arguments.only or w.name in arguments.only]
    if arguments.action == "run":
        names = [workload.name for workload in chosen]
        run_parts(
            __file__, _PARTS, ["--only", *names], arguments.output, arguments.commit
        )
    elif arguments.action == "table":
        _write_table(json.loads(_RESULTS.read_text()))
    else:
        measure = _measure_torch if arguments.action == "torch" else _measure_jax
        for workload in chosen:
            for result in measure(workload, arguments.action):
                emit(result)


def _weights(workload: Workload) -> np.ndarray:
    """Random weights; a block of 2^24 numbers again and again, since some are large."""
    block = np.random.default_rng(1).standard_normal(2**24, np.float32)
    count = workload.num_cols * workload.hidden
    # An odd stride between repetitions: equal rows are never a power of two apart.
    w = np.resize(block[: 2**24 - 37], count)
    return w.reshape(workload.num_cols, workload.hidden)


def _error(actual: np.ndarray, rows: tuple, w: np.ndarray) -> float:
    """Relative error of some rows, the longest among them, against float64."""
    indices, indptr = rows
    lengths = np.diff(indptr)
    some = np.random.default_rng(2).integers(0, len(lengths), 16)
    some = np.concatenate([np.argsort(-lengths)[:2], some, [len(lengths) - 1]])
    terms = [w[indices[indptr[r] : indptr[r + 1]]].astype(np.float64) for r in some]
    expected = np.stack([term.sum(0) for term in terms])
    off = np.linalg.norm(np.asarray(actual, np.float64)[some] - expected)
    return float(off / np.linalg.norm(expected))


def _result(workload, dtype, name, time: Time, error: float, versions) -> dict:
    limit = 1e-5 if dtype == "float32" else 1e-2
    if not error < limit:
        raise ValueError(f"relative error {error}")
    itemsize = 4 if dtype == "float32" else 2
    return {
        "workload": workload.name,
        "dtype": dtype,
        "implementation": name,
        **{key: round(value, 1) for key, value in dataclasses.asdict(time).items()},
        "bytes": workload.bytes_moved(itemsize),
        "error": error,
        "versions": versions,
    }


def _measure_jax(workload: Workload, part: str) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import sparse

    from pallas_kernels import gather_matmul as kernel
    from sparsejax.ops import gather_matmul as op
    from sparsejax.sparse import CSR

    def mosaic(indices, indptr, w):
        return kernel.gather_matmul(None, indices, indptr, w, workload.num_cols)

    def xla(indices, indptr, w):
        x = CSR(None, indices, indptr, num_cols=workload.num_cols)
        return op.gather_sum(x, w, "xla")

    def bcsr(indices, indptr, w):
        ones = jnp.ones(workload.entries, w.dtype)
        shape = workload.num_rows, workload.num_cols
        return sparse.BCSR((ones, indices, indptr), shape=shape) @ w

    def take(indices, indptr, w):
        ends = jnp.searchsorted(indptr, jnp.arange(workload.entries), side="right")
        return jax.ops.segment_sum(w[indices], ends - 1, num_segments=workload.num_rows)

    candidates: dict[str, Callable] = {
        "mosaic_gpu": mosaic,
        "xla": xla,
        "take + segment_sum": take,
        "BCSR": bcsr,
    }
    if part == "cusparse":
        candidates = {"BCSR, cuSPARSE": bcsr}
    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    batches = [make_rows(workload, seed) for seed in range(_BATCHES)]
    host = _weights(workload)
    for dtype in ("float32", "bfloat16"):
        w = jnp.asarray(host, dtype)
        inputs = [(*map(jnp.asarray, batch), w) for batch in batches]
        for name, function in candidates.items():
            if dtype == "bfloat16" and name not in ("mosaic_gpu", "xla"):
                continue
            with reported(workload.name, dtype, name):
                jitted = jax.jit(function)
                error = _error(jitted(*inputs[0]), batches[0], host)
                time = time_jax(jitted, inputs)
                yield _result(workload, dtype, name, time, error, versions)


def _measure_torch(workload: Workload, part: str) -> Iterator[dict]:
    import cupy  # pyrefly: ignore[missing-import]
    import cupyx.scipy.sparse  # pyrefly: ignore[missing-import]
    import torch  # pyrefly: ignore[missing-import]

    def bag(indices, indptr, csr, w):
        return torch.nn.functional.embedding_bag(
            indices, w, indptr, mode="sum", include_last_offset=True
        )

    def matmul(indices, indptr, csr, w):
        return csr @ w

    def dense(indices, indptr, csr, w):
        return csr.to_dense().to(w.dtype) @ w

    versions = {"torch": torch.__version__, "cupy": cupy.__version__}
    batches = [make_rows(workload, seed) for seed in range(_BATCHES)]
    host = _weights(workload)
    shape = workload.num_rows, workload.num_cols
    cells = workload.num_rows * workload.num_cols
    for dtype in ("float32", "bfloat16"):
        w = torch.from_numpy(host).cuda().to(getattr(torch, dtype))
        inputs = []
        for indices, indptr in batches:
            tensors = [torch.from_numpy(a).cuda() for a in (indices, indptr)]
            ones = torch.ones(len(indices), device="cuda")
            csr = torch.sparse_csr_tensor(tensors[1], tensors[0], ones, shape)
            inputs.append((*tensors, csr, w))
        candidates: dict[str, Callable] = {"torch embedding_bag": bag}
        if dtype == "float32":
            candidates["torch CSR @ dense"] = matmul
        elif 6 * cells < _DENSE_LIMIT:
            candidates["torch dense matmul"] = dense
        for name, function in candidates.items():
            with reported(workload.name, dtype, name):
                y = function(*inputs[0]).float().cpu().numpy()
                error = _error(y, batches[0], host)
                time = time_torch(function, inputs)
                yield _result(workload, dtype, name, time, error, versions)
        if dtype == "float32":
            shared = cupy.asarray(w)
            pairs = []
            for indices, indptr in batches:
                parts = [cupy.asarray(a) for a in (indices, indptr)]
                ones = cupy.ones(len(indices), cupy.float32)
                matrix = cupyx.scipy.sparse.csr_matrix((ones, *parts), shape=shape)
                pairs.append((matrix, shared))

            def multiply(matrix, w):
                return matrix @ w

            with reported(workload.name, dtype, "CuPy"):
                error = _error(cupy.asnumpy(multiply(*pairs[0])), batches[0], host)
                time = time_torch(multiply, pairs)
                yield _result(workload, dtype, "CuPy", time, error, versions)
        del inputs, w


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    results = report["results"]
    names = list(dict.fromkeys(row["implementation"] for row in results))
    rows = []
    for workload, dtype in dict.fromkeys((r["workload"], r["dtype"]) for r in results):
        cells = {
            r["implementation"]: r
            for r in results
            if (r["workload"], r["dtype"]) == (workload, dtype)
        }
        some = next(iter(cells.values()))
        floor = 1e6 * some["bytes"] / report["ceiling_bytes_per_second"]
        ours = cells.get("mosaic_gpu", {}).get("kernel")
        texts = []
        for name in names:
            time = cells.get(name, {}).get("kernel")
            if time is None:
                texts.append("-")
            elif ours is None or name == "mosaic_gpu":
                texts.append(f"**{time:.0f}**")
            else:
                texts.append(f"{time:.0f} ({time / ours:.1f}x)")
        share = "-" if ours is None else f"{100 * floor / ours:.0f} %"
        rows.append([workload, dtype, f"{floor:.0f}", *texts, share])
    columns = ["workload", "dtype", "ceiling", *names, "share of ceiling"]
    lines = [origin(report), "", *table(columns, rows)]
    write_section("gather_matmul", lines)


if __name__ == "__main__":
    main()
