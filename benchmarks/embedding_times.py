"""Times the lookups of click models, and the updates of their tables, against peers.

    python benchmarks/embedding_times.py run [--commit NAME]    on a GPU
    python benchmarks/embedding_times.py table                  anywhere

The tables of a workload lie below each other in one array. Forward is the sum of the rows
of each bag. Update is all that follows from the bags' gradients: the sort of the ids, the
sums, and row-wise Adagrad on the touched rows in place; torch, which lacks that rule, does
Adagrad. Ids have zipf's law with two exponents. Results are checked against float64.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Iterator

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, reported, table, write_section
from timing import time_kernels, time_torch
from workloads import EMBEDDINGS, Embeddings

_SKEWS = 0.8, 1.05
_BATCHES, _REPEATS = 3, 9
# So that the table of 105 GB, which is made several times, finds its place again.
_MEMORY = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
}
_PARTS = {f"{peer} {w.name}": _MEMORY for w in EMBEDDINGS for peer in ("jax", "torch")}
_RATE, _EPS = 0.02, 1e-8


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    peer, name = part.split(maxsplit=1)
    (workload,) = (w for w in EMBEDDINGS if w.name == name)
    yield from {"jax": measure_jax, "torch": measure_torch}[peer](workload)


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


class Case:
    """A workload's table and gradients on a GPU."""

    def __init__(self, workload: Embeddings):
        import jax
        import jax.numpy as jnp

        self.workload, hidden = workload, workload.hidden

        def fill():
            return values(jnp.arange(workload.num_rows), hidden, jnp)

        self.fill = jax.jit(fill)
        self.dy = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), (workload.bags, hidden))
        )()

    def forward(self, implementation) -> Callable:
        """Jitted: batch and table to sums."""
        import jax

        from sparsejax.ops.gather_sum import gather_sum

        return jax.jit(functools.partial(gather_sum, implementation=implementation))

    def update(self, implementation) -> Callable:
        """Jitted: the table with its state, which is given away, and batch, to the next."""
        import jax
        import jax.numpy as jnp

        from sparsejax.ops import row_update, scatter_gradient

        @functools.partial(jax.jit, donate_argnums=0)
        def step(trained, x, dy):
            terms = scatter_gradient.row_terms([x], [dy], self.workload.num_rows)
            return row_update.step_terms(
                _rule(), trained, terms, jnp.int32(0), implementation=implementation
            )

        return lambda trained, x: step(trained, x, self.dy)


class Batches:
    """Batches of a workload, and checks of what is computed from the first one."""

    def __init__(self, workload: Embeddings, skew: float):
        self.workload, self.skew = workload, skew
        self.host = [workload.columns(seed, skew) for seed in range(_BATCHES)]
        self.unique, self.counts = np.unique(self.host[0], return_counts=True)

    def on_gpu(self) -> list:
        import jax.numpy as jnp

        from sparsejax.sparse import CSR

        w = self.workload
        ends = jnp.arange(w.bags + 1, dtype=jnp.int32) * w.ids
        return [
            CSR(None, jnp.asarray(ids.reshape(-1)), ends, num_cols=w.num_rows)
            for ids in self.host
        ]

    def bytes(self, task: str) -> int:
        """Forward: each entry's row and each result, once. Update: the gradients; and the
        touched rows and their numbers, read and written.
        """
        w = self.workload
        if task == "forward":
            return (w.bags * w.ids + w.bags) * w.hidden * 4
        return 4 * (w.bags * w.hidden + len(self.unique) * 2 * (w.hidden + 1))

    def check_forward(self, y) -> float:
        """The error of some bags."""
        some = np.random.default_rng(0).integers(0, self.workload.bags, 64)
        rows = values(self.host[0][some].reshape(-1), self.workload.hidden, np)
        rows = rows.astype(np.float64).reshape(len(some), -1, self.workload.hidden)
        return _error(np.asarray(y[some]), rows.sum(1), 1e-5)

    def check_update(self, w, dy) -> float:
        """The error of what moved some rows of a new table."""
        import jax.numpy as jnp

        step = max(1, len(self.unique) // 9)
        some = self.unique[
            [*np.argsort(-self.counts)[:2], *range(0, len(self.unique), step)]
        ]
        before = values(some, self.workload.hidden, np).astype(np.float64)
        bags = [np.nonzero(self.host[0] == row)[0] for row in some]
        gradient = [np.asarray(dy[jnp.asarray(b)]).sum(0, np.float64) for b in bags]
        gradient = np.stack(gradient)
        root = np.sqrt(np.mean(gradient**2, 1, keepdims=True))
        after = np.asarray(w[jnp.asarray(some)], np.float64)
        # The difference of two weights has few digits.
        return _error(after - before, -_RATE * gradient / (root + _EPS), 1e-4)


def _rule():
    from sparsejax import optimizers

    return optimizers.rowwise_adagrad(_RATE, eps=_EPS)


def _error(actual: np.ndarray, expected: np.ndarray, limit: float) -> float:
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    if not error < limit:
        raise ValueError(f"relative error {error}")
    return float(error)


def _result(batches: Batches, task, name, time: float, error, versions) -> dict:
    return {
        "workload": batches.workload.name,
        "zipf": batches.skew,
        "task": task,
        "implementation": name,
        "microseconds": round(time, 1),
        "bytes": batches.bytes(task),
        "error": error,
        "versions": versions,
    }


def measure_jax(workload: Embeddings) -> Iterator[dict]:
    import jax

    from sparsejax.ops.row_update import TrainedKernel

    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    case = Case(workload)
    drawn = [(batches, batches.on_gpu()) for batches in map(_drawn(workload), _SKEWS)]
    for implementation in (None, "xla"):
        name = "sparsejax" if implementation is None else implementation
        w = case.fill()
        forward, update = case.forward(implementation), case.update(implementation)
        for batches, xs in drawn:
            with reported(workload.name, "forward", name):
                error = batches.check_forward(forward(xs[0], w))
                time = _time(functools.partial(_forward, forward, xs, w))
                yield _result(batches, "forward", name, time, error, versions)
        del w
        for batches, xs in drawn:
            with reported(workload.name, "update", name):
                w = case.fill()
                kept = [TrainedKernel(w, _rule().init(w.shape), None)]
                del w
                _update(update, xs, kept, 0)
                error = batches.check_update(kept[0].w, case.dy)
                time = _time(functools.partial(_update, update, xs, kept))
                del kept
                yield _result(batches, "update", name, time, error, versions)


def _time(call: Callable[[int], None]) -> float:
    return sum(time_kernels(call, _REPEATS).values())


def _forward(forward, xs, w, i: int) -> None:
    forward(xs[i % _BATCHES], w).block_until_ready()


def _update(update, xs, kept: list, i: int) -> None:
    """Replaces what is in `kept`, so that nothing else holds the table."""
    kept[0] = update(kept[0], xs[i % _BATCHES])
    kept[0].w.block_until_ready()


def _drawn(workload: Embeddings) -> Callable[[float], Batches]:
    return functools.partial(Batches, workload)


def measure_torch(workload: Embeddings) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    versions = {"torch": torch.__version__}
    name = "torch EmbeddingBag"
    shape = workload.num_rows, workload.hidden
    w = torch.rand(shape, device="cuda").sub_(0.5).requires_grad_()
    dy = torch.randn(workload.bags, workload.hidden, device="cuda")

    def bag(ids):
        return torch.nn.functional.embedding_bag(ids, w, mode="sum", sparse=True)

    def step(ids, optimizer):
        optimizer.zero_grad(set_to_none=True)
        bag(ids).backward(dy)
        optimizer.step()

    for batches in map(_drawn(workload), _SKEWS):
        inputs = [
            (torch.from_numpy(ids.astype(np.int64)).cuda(),) for ids in batches.host
        ]
        with reported(workload.name, "forward", name), torch.no_grad():
            forward = time_torch(bag, inputs).kernel
            yield _result(batches, "forward", name, forward, None, versions)
        with reported(workload.name, "update", name):  # `criteo` leaves no memory
            optimizer = torch.optim.Adagrad([w], lr=_RATE, eps=_EPS)
            pairs = [(*ids, optimizer) for ids in inputs]
            time = time_torch(step, pairs).kernel - forward
            yield _result(batches, "update", name, time, None, versions)
        w.grad = None


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
