"""Times gather-matmul against its peers, and over shapes.

    python benchmarks/gather_matmul.py run [--commit NAME]    on a GPU
    python benchmarks/gather_matmul.py table                  anywhere

JAX and torch (with CuPy) each run in a process of their own, since they do not share a GPU's
memory well. Another process measures over shapes; the default choice of an implementation
is based on these measurements. Every result is checked against float64 before it is timed.
`table` also draws the plots.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, reported, table, write_section
from timing import Time, time_jax, time_torch
from workloads import (
    HIDDEN_SHAPES,
    LENGTH_SHAPES,
    SHAPES,
    WORKLOADS,
    Workload,
    make_rows,
)

_BATCHES = 3
_PARTS = {"jax": {}, "torch": {}, "shapes": {}}
Cases = dict[tuple[str, str], dict[str, dict]]
_DENSE_LIMIT = 4e9  # bytes of a densified batch that are still tried


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    measures = {"torch": _measure_torch, "shapes": _measure_shape}
    for workload in SHAPES if part == "shapes" else WORKLOADS:
        yield from measures.get(part, _measure_jax)(workload)


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


def _implementations(workload: Workload) -> dict[str, Callable]:
    """Ours, for entries of value 1."""
    names = "mosaic_gpu", "xla"
    return {name: functools.partial(_product, workload, name) for name in names}


def _product(workload: Workload, implementation, indices, indptr, w):
    from sparsejax.ops.gather_sum import gather_sum
    from sparsejax.sparse import CSR

    x = CSR(None, indices, indptr, num_cols=workload.num_cols)
    return gather_sum(x, w, implementation)


def _measure_jax(workload: Workload) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import sparse

    from sparsejax.sparse import CSR

    ours = _implementations(workload)

    def bcsr(indices, indptr, w):
        ones = jnp.ones(workload.entries, w.dtype)
        shape = workload.num_rows, workload.num_cols
        return sparse.BCSR((ones, indices, indptr), shape=shape) @ w

    def take(indices, indptr, w):
        ends = jnp.searchsorted(indptr, jnp.arange(workload.entries), side="right")
        return jax.ops.segment_sum(w[indices], ends - 1, num_segments=workload.num_rows)

    def take_sorted(indices, indptr, w):
        x = CSR(None, indices, indptr, num_cols=workload.num_cols)
        return jax.ops.segment_sum(
            w[indices],
            x.row_ids(),
            num_segments=workload.num_rows,
            indices_are_sorted=True,
        )

    candidates: dict[str, Callable] = {
        **ours,
        "cusparse": functools.partial(_product, workload, "cusparse"),
        "take + segment_sum": take,
        "take + sorted segment_sum": take_sorted,
        "BCSR": bcsr,
    }
    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    batches = [make_rows(workload, seed) for seed in range(_BATCHES)]
    for dtype in ("float32", "bfloat16"):
        w = _jax_weights(workload, dtype)
        inputs = [(*map(jnp.asarray, batch), w) for batch in batches]
        for name, function in candidates.items():
            if dtype == "bfloat16" and name not in ours:
                continue
            with reported(workload.name, dtype, name):
                jitted = jax.jit(function)
                error = _error(jitted(*inputs[0]), batches[0], workload.hidden)
                time = time_jax(jitted, inputs)
                yield _result(workload, dtype, name, time, error, versions)


def _measure_shape(workload: Workload) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp

    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    batches = [make_rows(workload, seed) for seed in range(_BATCHES)]
    for dtype in ("float32", "bfloat16"):
        w = _jax_weights(workload, dtype)
        inputs = [(*map(jnp.asarray, batch), w) for batch in batches]
        for name, function in _implementations(workload).items():
            with reported(workload.name, dtype, name):
                jitted = jax.jit(function)
                error = _error(jitted(*inputs[0]), batches[0], workload.hidden)
                time = time_jax(jitted, inputs, rounds=2)
                yield _result(workload, dtype, name, time, error, versions)


def _measure_torch(workload: Workload) -> Iterator[dict]:
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
    block = torch.from_numpy(_block()).cuda()
    shape = workload.num_rows, workload.num_cols
    cells = workload.num_rows * workload.num_cols
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
        elif 6 * cells < _DENSE_LIMIT:
            candidates["torch dense matmul"] = dense
        for name, function in candidates.items():
            with reported(workload.name, dtype, name):
                y = function(*inputs[0]).float().cpu().numpy()
                error = _error(y, batches[0], workload.hidden)
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
                error = _error(
                    cupy.asnumpy(multiply(*pairs[0])), batches[0], workload.hidden
                )
                time = time_torch(multiply, pairs)
                yield _result(workload, dtype, "CuPy", time, error, versions)
        del inputs, w


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md, and draws the plots."""
    cases = _by_case(report["results"])
    compared = {workload.name for workload in WORKLOADS}
    names = list(dict.fromkeys(r["implementation"] for r in report["results"]))
    rows = []
    for (workload, dtype), cells in cases.items():
        if workload not in compared:
            continue
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
    _write_choice(cases)
    ceiling = report["ceiling_bytes_per_second"]
    _plot("hidden", {w.hidden: w for w in HIDDEN_SHAPES}, cases, ceiling)
    lengths = {w.entries // w.batch: w for w in LENGTH_SHAPES}
    _plot("entries a row", lengths, cases, ceiling)


def _by_case(results: Sequence[dict]) -> Cases:
    """Results of the implementations for each workload and dtype."""
    cases: Cases = {}
    for r in results:
        cases.setdefault((r["workload"], r["dtype"]), {})[r["implementation"]] = r
    return cases


def _write_choice(cases: Cases) -> None:
    """What `implementation=None` picks, and how much slower than the best that is."""
    from sparsejax.ops.gather_sum import mosaic_fits

    about = {w.name: w for w in (*WORKLOADS, *SHAPES)}
    rows = []
    for (name, dtype), cells in cases.items():
        if not {"mosaic_gpu", "xla"} <= cells.keys():
            continue
        w, ours = about[name], {n: cells[n]["kernel"] for n in ("mosaic_gpu", "xla")}
        fits = mosaic_fits(w.num_cols, w.hidden, w.entries)
        choice = "mosaic_gpu" if fits else "xla"
        rows.append(
            [
                f"{w.num_cols:,} x {w.hidden:,}",
                f"{w.num_rows:,}",
                f"{w.entries:,}",
                dtype,
                *(f"{time:.0f}" for time in ours.values()),
                choice,
                f"{100 * (ours[choice] / min(ours.values()) - 1):.0f} %",
            ]
        )
    columns = ["w", "rows", "entries", "dtype", "mosaic_gpu", "xla", "choice", "off"]
    write_section("choice", table(columns, rows))


def _plot(
    label: str, workloads: Mapping[int, Workload], cases: Cases, ceiling: float
) -> None:
    """Bandwidth of both implementations over one number of a shape."""
    workloads = {n: w for n, w in workloads.items() if (w.name, "float32") in cases}
    if not workloads:  # not measured
        return
    import matplotlib  # pyrefly: ignore[missing-import]
    from matplotlib import pyplot  # pyrefly: ignore[missing-import]

    # The same file from the same results, with text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for dtype, line in (("float32", "-"), ("bfloat16", "--")):
        for name, colour in (("mosaic_gpu", "C0"), ("xla", "C1")):
            points = {
                place: cases[w.name, dtype][name]
                for place, w in workloads.items()
                if name in cases.get((w.name, dtype), {})
            }
            rates = [r["bytes"] / r["kernel"] / 1e6 for r in points.values()]
            text = f"{name}, {dtype}"
            axes.plot([*points], rates, line, marker=".", color=colour, label=text)
    axes.axhline(ceiling / 1e12, color="0.5", linestyle=":", label="device copy")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0)
    axes.set_xlabel(label)
    axes.set_ylabel("TB/s")
    axes.legend(fontsize="small")
    name = "gather_matmul_" + label.replace(" ", "_")
    figure.savefig(_HERE / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
