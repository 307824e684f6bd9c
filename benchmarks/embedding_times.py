"""Times the lookups of click models, and the updates of their tables, against peers.

    python benchmarks/embedding_times.py run [--commit NAME]    on a GPU
    python benchmarks/embedding_times.py table                  anywhere

The tables of a workload lie below each other in one array. Forward is the sum of the rows
of each bag. Update is all that follows from the bags' gradients: the sort of the ids, the
sums, and row-wise Adagrad on the touched rows in place; torch, which lacks that rule, does
Adagrad. Ids have zipf's law with two exponents. Results are checked against float64.
"""

from __future__ import annotations

import collections
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, reported, table, write_section
from timing import kernels_of_trace, time_torch
from workloads import EMBEDDINGS, Embeddings

_SKEWS = 0.8, 1.05
_BATCHES, _REPEATS = 3, 9
_PARTS = {
    part: {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
    }
    for part in ("jax", "torch")
}
_RATE, _EPS = 0.02, 1e-8


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    measure = {"jax": measure_jax, "torch": _measure_torch}[part]
    for workload in EMBEDDINGS:
        for skew in _SKEWS:
            yield from measure(workload, skew)


def values(rows, hidden: int, xp):
    """Rows of a table, in -.5 to .5: from their numbers, so that no memory is needed."""
    columns = xp.arange(hidden, dtype=xp.uint32)[None]
    mixed = (rows.astype(xp.uint32)[:, None] * np.uint32(2654435761)) ^ (
        columns * np.uint32(40503) + np.uint32(977)
    )
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
    return (mixed >> np.uint32(8)).astype(xp.float32) * np.float32(2**-24) - np.float32(
        0.5
    )


def time_kernels(call: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Microseconds of each kernel in a call; `call(i)` ends when they have."""
    import jax

    for i in range(2):
        call(i)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(repeats):
                call(i)
        times = collections.defaultdict(float)
        for name, nanoseconds in kernels_of_trace(folder):
            times[name] += nanoseconds / 1e3 / repeats
    return times


class Case:
    """A workload's table, batches and gradients on a GPU, with checks."""

    def __init__(self, workload: Embeddings, skew: float):
        import jax
        import jax.numpy as jnp

        from sparsejax.sparse import CSR

        self.workload, self.skew = workload, skew
        hidden = workload.hidden
        self.host = [workload.columns(seed, skew) for seed in range(_BATCHES)]
        ends = jnp.arange(workload.bags + 1, dtype=jnp.int32) * workload.ids
        self.batches = [
            CSR(None, jnp.asarray(ids.reshape(-1)), ends, num_cols=workload.num_rows)
            for ids in self.host
        ]

        def fill():
            return values(jnp.arange(workload.num_rows), hidden, jnp)

        self.fill = jax.jit(fill)
        self.dy = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), (workload.bags, hidden))
        )()

    @property
    def forward_bytes(self) -> int:
        """Each entry's row and each result, once."""
        w = self.workload
        return (w.bags * w.ids + w.bags) * w.hidden * 4

    @property
    def update_bytes(self) -> float:
        """The gradients; and the touched rows and their numbers, read and written."""
        w = self.workload
        unique = np.mean([len(np.unique(ids)) for ids in self.host])
        return 4 * (w.bags * w.hidden + unique * 2 * (w.hidden + 1))

    def time_forward(self, w, implementation) -> tuple[dict[str, float], float]:
        """Times, and the error of some bags."""
        import jax

        from sparsejax.ops.gather_sum import gather_sum

        jitted = jax.jit(functools.partial(gather_sum, implementation=implementation))
        y = jitted(self.batches[0], w)
        some = np.random.default_rng(0).integers(0, self.workload.bags, 64)
        rows = values(self.host[0][some].reshape(-1), self.workload.hidden, np)
        rows = rows.astype(np.float64).reshape(len(some), -1, self.workload.hidden)
        error = _error(np.asarray(y[some]), rows.sum(1))

        def call(i):
            jax.block_until_ready(jitted(self.batches[i % _BATCHES], w))

        return time_kernels(call, _REPEATS), error

    def time_update(self, w, implementation) -> tuple[dict[str, float], float]:
        """Times, and the error of what moves some rows. `w` is given away."""
        import jax
        import jax.numpy as jnp

        from sparsejax import optimizers
        from sparsejax.ops import row_update, scatter_gradient

        rule = optimizers.rowwise_adagrad(_RATE, eps=_EPS)
        state = rule.init((w.shape[0], w.shape[1]))

        @functools.partial(jax.jit, donate_argnums=0)
        def step(trained, x, dy):
            terms = scatter_gradient.row_terms([x], [dy], self.workload.num_rows)
            return row_update.step_terms(
                rule, trained, terms, jnp.int32(0), implementation=implementation
            )

        trained = row_update.TrainedKernel(w, state, None)
        ids = self.host[0].reshape(-1)
        unique, counts = np.unique(ids, return_counts=True)
        some = unique[
            [*np.argsort(-counts)[:2], *range(0, len(unique), len(unique) // 9)]
        ]
        before = np.asarray(trained.w[jnp.asarray(some)], np.float64)
        trained = step(trained, self.batches[0], self.dy)
        after = np.asarray(trained.w[jnp.asarray(some)], np.float64)
        gradient = [
            np.asarray(
                self.dy[jnp.asarray(np.flatnonzero(ids == row) // self.workload.ids)]
            )
            for row in some
        ]
        gradient = np.stack([np.sum(g, 0, dtype=np.float64) for g in gradient])
        root = np.sqrt(np.mean(gradient**2, 1, keepdims=True))
        # The difference of two weights has few digits.
        error = _error(after - before, -_RATE * gradient / (root + _EPS)) / 100
        kept = [trained]
        del trained

        def call(i):
            kept[0] = step(kept[0], self.batches[i % _BATCHES], self.dy)
            jax.block_until_ready(kept)

        return time_kernels(call, _REPEATS), error


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    if not error < 1e-3:
        raise ValueError(f"relative error {error}")
    return float(error)


def _result(case: Case, task, name, time: float, error, versions) -> dict:
    size = case.forward_bytes if task == "forward" else case.update_bytes
    return {
        "workload": case.workload.name,
        "zipf": case.skew,
        "task": task,
        "implementation": name,
        "microseconds": round(time, 1),
        "bytes": round(size),
        "error": error,
        "versions": versions,
    }


def measure_jax(workload: Embeddings, skew: float) -> Iterator[dict]:
    import jax

    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    case = Case(workload, skew)
    for name in (None, "xla"):
        label = "sparsejax" if name is None else name
        w = case.fill()
        with reported(workload.name, "forward", label):
            times, error = case.time_forward(w, name)
            yield _result(case, "forward", label, sum(times.values()), error, versions)
        with reported(workload.name, "update", label):
            times, error = case.time_update(w, name)
            yield _result(case, "update", label, sum(times.values()), error, versions)
        del w


def _measure_torch(workload: Embeddings, skew: float) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    versions = {"torch": torch.__version__}
    shape = workload.num_rows, workload.hidden
    w = torch.rand(shape, device="cuda").sub_(0.5).requires_grad_()
    host = [workload.columns(seed, skew) for seed in range(_BATCHES)]
    batches = [(torch.from_numpy(ids.astype(np.int64)).cuda(),) for ids in host]
    dy = torch.randn(workload.bags, workload.hidden, device="cuda")
    unique = np.mean([len(np.unique(ids)) for ids in host])
    sizes = {
        "forward": 4 * (workload.bags * (workload.ids + 1)) * workload.hidden,
        "update": 4 * (workload.bags + unique * 2) * workload.hidden + 8 * unique,
    }

    def bag(ids):
        return torch.nn.functional.embedding_bag(ids, w, mode="sum", sparse=True)

    def result(task, name, time):
        return {
            "workload": workload.name,
            "zipf": skew,
            "task": task,
            "implementation": name,
            "microseconds": round(time, 1),
            "bytes": round(sizes[task]),
            "error": None,
            "versions": versions,
        }

    name = "torch EmbeddingBag, one for all"
    with reported(workload.name, "forward", name):
        with torch.no_grad():
            forward = time_torch(bag, batches).kernel
        yield result("forward", name, forward)
    with reported(workload.name, "update", name):  # with `criteo` there is no memory
        optimizer = torch.optim.Adagrad([w], lr=_RATE, eps=_EPS)

        def step(ids):
            optimizer.zero_grad(set_to_none=True)
            bag(ids).backward(dy)
            optimizer.step()

        time = time_torch(step, batches).kernel - forward
        yield result("update", name + ", sparse Adagrad", time)


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    rows, results = [], report["results"]
    for case in dict.fromkeys((r["workload"], r["zipf"], r["task"]) for r in results):
        those = [r for r in results if (r["workload"], r["zipf"], r["task"]) == case]
        floor = 1e6 * those[0]["bytes"] / report["ceiling_bytes_per_second"]
        ours = those[0]["microseconds"]
        for r in those:
            time = r["microseconds"]
            shares = f"{time / ours:.1f}x", f"{100 * floor / time:.0f} %"
            rows.append([*case, r["implementation"], f"{time:.0f}", *shares])
    columns = [
        "workload",
        "zipf",
        "task",
        "implementation",
        "us",
        "to ours",
        "of ceiling",
    ]
    write_section("embedding_times", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
