"""Times gradients of touched rows, and updates with them, against their peers.

    python benchmarks/scatter_gradient.py run [--commit NAME]    on a GPU
    python benchmarks/scatter_gradient.py table                  anywhere

There are two tasks. *gradient*: the summed rows of `x^T dy` that the batch touches,
including the sort of its entries. *step*: the gather-matmul, that gradient, and an Adagrad
update of the kernel in place. Everything is checked against float64 before it is timed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
from report import command, reported
from workloads import BIG, ML20M, ML20M_256, Workload, make_rows

_WORKLOADS = ML20M, ML20M_256, BIG
_BATCHES = 4
_STACK = 16  # steps whose entries are sorted at once
_RATE, _EPS = 0.05, 1e-7


def _measure(part: str) -> Iterator[dict]:
    measure = _measure_torch if part == "torch" else _measure_jax
    for workload in _WORKLOADS:
        yield from measure(workload)


class _Case:
    """Batches of a workload, and what has to come out."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.batches = [make_rows(workload, seed) for seed in range(_BATCHES)]
        rng = np.random.default_rng(1)
        shape = _BATCHES, workload.batch, workload.hidden
        self.dys = rng.standard_normal(shape, np.float32)
        self.touched = [np.unique(indices) for indices, _ in self.batches]

    @property
    def gradient_bytes(self) -> float:
        """The rows of `dy` gathered, the touched rows written once."""
        unique = np.mean([len(touched) for touched in self.touched])
        return (self.workload.entries + unique) * self.workload.hidden * 4

    @property
    def step_bytes(self) -> float:
        """Two gathers, and the touched rows of kernel and state read and written."""
        unique = np.mean([len(touched) for touched in self.touched])
        return (2 * self.workload.entries + 4 * unique) * self.workload.hidden * 4

    def expected(self, which: int) -> tuple[np.ndarray, np.ndarray]:
        """Some touched rows of a batch, the fullest among them, and their gradients."""
        indices, indptr = self.batches[which]
        rows = np.repeat(np.arange(self.workload.batch), np.diff(indptr))
        touched, counts = np.unique(indices, return_counts=True)
        some = touched[[*np.argsort(-counts)[:2], 0, len(touched) // 2, -1]]
        dy = self.dys[which].astype(np.float64)
        return some, np.stack([dy[rows[indices == row]].sum(0) for row in some])

    def check(self, which: int, rows: Callable[[np.ndarray], np.ndarray]) -> float:
        """Relative error of some rows of a gradient; `rows` looks them up."""
        some, expected = self.expected(which)
        off = np.linalg.norm(np.asarray(rows(some), np.float64) - expected)
        error = float(off / np.linalg.norm(expected))
        if not error < 1e-5:
            raise ValueError(f"relative error {error}")
        return error


def _result(case: _Case, task, name, time: float, error) -> dict:
    size = case.gradient_bytes if task == "gradient" else case.step_bytes
    return {
        "workload": case.workload.name,
        "task": task,
        "implementation": name,
        "microseconds": round(time, 1),
        "bytes": round(size),
        "error": error,
    }


def _measure_jax(workload: Workload) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp
    from jax import lax
    from timing import time_jax

    from sparsejax import optimizers
    from sparsejax.ops import gather_matmul, row_update, scatter_gradient
    from sparsejax.sparse import CSR

    case = _Case(workload)
    num_rows = workload.features
    batches = [
        CSR(None, jnp.asarray(indices), jnp.asarray(indptr), num_cols=num_rows)
        for indices, indptr in case.batches
    ]
    dys = jnp.asarray(case.dys)
    stack = jax.tree.map(
        lambda *leaves: jnp.stack([leaves[i % _BATCHES] for i in range(_STACK)]),
        *batches,
    )
    inputs = [(batch, dys[i]) for i, batch in enumerate(batches)]

    def lookup(ids, values, some):
        return np.asarray(values)[np.searchsorted(np.asarray(ids), some)]

    # The gradient. Ours sorts the entries of many steps at once.
    sort = jax.jit(CSR.with_transposed)
    sorted_ahead = sort(stack)
    share = time_jax(sort, [(stack,)]).kernel / _STACK
    ahead = [
        (jax.tree.map(lambda leaf, i=i: leaf[i], sorted_ahead), dys[i])
        for i in range(_BATCHES)
    ]

    def rows(implementation, x, dy):
        return scatter_gradient.row_gradient(
            [x], [dy], num_rows, implementation=implementation
        )

    for name, implementation, given, extra in (
        ("mosaic_gpu, sorted by dispatch", "mosaic_gpu", ahead, share),
        ("mosaic_gpu, sorted by step", "mosaic_gpu", inputs, 0.0),
        ("cusparse, sorted by dispatch", "cusparse", ahead, share),
        ("cusparse, sorted by step", "cusparse", inputs, 0.0),
        ("xla, sorted by dispatch", "xla", ahead, share),
        ("xla, sorted by step", "xla", inputs, 0.0),
    ):
        with reported(workload.name, "gradient", name):
            jitted = jax.jit(functools.partial(rows, implementation))
            error = case.check(0, functools.partial(lookup, *jitted(*given[0])))
            time = time_jax(jitted, given).kernel + extra
            yield _result(case, "gradient", name, time, error)

    def dense(x, dy):
        zeros = jnp.zeros((num_rows, workload.hidden))
        return zeros.at[x.indices].add(dy[x.row_ids()])

    with reported(workload.name, "gradient", "XLA scatter-add, dense"):
        jitted = jax.jit(dense)
        error = case.check(0, lambda some: jitted(*inputs[0])[jnp.asarray(some)])
        time = time_jax(jitted, inputs).kernel
        yield _result(case, "gradient", "XLA scatter-add, dense", time, error)

    # The whole step, in a loop that is one program, as training is.
    rule = optimizers.adagrad(_RATE, 0.0, _EPS)
    w = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), (num_rows, workload.hidden))
    )()

    def ours(implementation, fused, stack, i, carry):
        w, state = carry
        x = jax.tree.map(lambda leaf: leaf[i % _STACK], stack)
        y = gather_matmul.gather_matmul(x, w, implementation=implementation)
        dy = dys[i % _BATCHES] + 0 * y
        trained = row_update.TrainedKernel(w, {"sum_of_squares": state}, None)
        terms = scatter_gradient.row_terms([x], [dy], num_rows)
        passed = row_update.Passed(i)
        if fused:
            after = row_update.step_terms(
                rule, trained, terms, passed, implementation=implementation
            )
        else:
            after = row_update.step_rows(
                rule, trained, terms.ids(), terms.values(), passed
            )
        return after.w, after.state["sum_of_squares"]

    def plain(stack, i, carry):
        w, state = carry
        x = jax.tree.map(lambda leaf: leaf[i % _STACK], stack)

        def loss(w):
            segments = jax.ops.segment_sum(
                w[x.indices], x.row_ids(), num_segments=workload.batch
            )
            return jnp.sum(segments * dys[i % _BATCHES])

        gradient = jax.grad(loss)(w)
        state = state + gradient**2
        factor = jnp.where(state > 0, lax.rsqrt(state + _EPS), 0)
        return w - _RATE * factor * gradient, state

    for name, step, sorts in (
        ("sparsejax", functools.partial(ours, None, True), True),
        ("sparsejax, gradient apart", functools.partial(ours, None, False), True),
        ("cusparse", functools.partial(ours, "cusparse", True), True),
        ("xla", functools.partial(ours, "xla", True), True),
        ("plain JAX, dense gradient", plain, False),
    ):

        def steps(count, stack, w, state, step=step, sorts=sorts):
            def block(_, carry):
                given = stack.with_transposed() if sorts else stack
                body = functools.partial(step, given)
                return lax.fori_loop(0, _STACK, body, carry)

            return lax.fori_loop(0, count, block, (w, state))

        with reported(workload.name, "step", name):
            error = _check_step(case, step, stack, sorts, w)
            time = _per_step(steps, stack, jnp.copy(w), jnp.zeros_like(w))
            yield _result(case, "step", name, time, error)


def _check_step(case: _Case, step, stack, sorts, w) -> float:
    """Relative error of what the first step moves."""
    import jax
    import jax.numpy as jnp

    some, gradient = case.expected(0)
    given = stack.with_transposed() if sorts else stack

    def moved(stack, w):
        after, _ = step(stack, jnp.int32(0), (w, jnp.zeros_like(w)))
        return (after - w)[jnp.asarray(some)]

    expected = -_RATE * gradient / np.sqrt(gradient**2 + _EPS)
    off = np.linalg.norm(np.asarray(jax.jit(moved)(given, w), np.float64) - expected)
    error = float(off / np.linalg.norm(expected))
    if not error < 1e-4:  # the difference of two weights has few digits
        raise ValueError(f"relative error {error}")
    return error


def _per_step(steps, stack, *carry) -> float:
    """Microseconds of a step: of two loops the difference, so no launch is in it."""
    import jax

    best = []
    for count in (1, 5):
        jitted = jax.jit(functools.partial(steps, count), donate_argnums=(1, 2))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            carry = jax.block_until_ready(jitted(stack, *carry))
            times.append(time.perf_counter() - start)
        best.append(min(times[1:]))
    return 1e6 * (best[1] - best[0]) / (4 * _STACK)


def _measure_torch(workload: Workload) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]
    from timing import time_torch

    case = _Case(workload)
    batches = [
        tuple(torch.from_numpy(a).cuda() for a in (*batch, dy))
        for batch, dy in zip(case.batches, case.dys, strict=True)
    ]
    generator = torch.Generator("cuda").manual_seed(0)
    shape = workload.features, workload.hidden
    w = torch.randn(shape, device="cuda", generator=generator).requires_grad_()

    def bag(indices, indptr, sparse):
        return torch.nn.functional.embedding_bag(
            indices, w, indptr, mode="sum", include_last_offset=True, sparse=sparse
        )

    def forward(indices, indptr, dy):
        return bag(indices, indptr, False)

    def dense(indices, indptr, dy):
        return torch.autograd.grad(bag(indices, indptr, False), w, dy)[0]

    def coalesced(indices, indptr, dy):
        return torch.autograd.grad(bag(indices, indptr, True), w, dy)[0].coalesce()

    def check_dense() -> float:
        gradient = dense(*batches[0])
        return case.check(0, lambda some: gradient[torch.from_numpy(some)].cpu())

    def check_sparse() -> float:
        gradient = coalesced(*batches[0])
        ids = gradient.indices()[0].cpu().numpy()
        values = gradient.values().cpu().numpy()
        return case.check(0, lambda some: values[np.searchsorted(ids, some)])

    # Of forward and backward together, the forward is taken off.
    alone = time_torch(forward, batches).kernel
    for name, function, check in (
        ("torch embedding_bag, sparse + coalesce", coalesced, check_sparse),
        ("torch embedding_bag, dense", dense, check_dense),
    ):
        with reported(workload.name, "gradient", name):
            error = check()
            time = time_torch(function, batches).kernel - alone
            yield _result(case, "gradient", name, time, error)

    for sparse in (True, False):
        name = "torch Adagrad, " + ("sparse" if sparse else "dense, foreach")
        with reported(workload.name, "step", name):
            options = {} if sparse else {"foreach": True}
            optimizer = torch.optim.Adagrad([w], lr=_RATE, eps=_EPS, **options)

            def step(indices, indptr, dy, sparse=sparse, optimizer=optimizer):
                optimizer.zero_grad(set_to_none=True)
                bag(indices, indptr, sparse).backward(dy)
                optimizer.step()

            time = time_torch(step, batches).kernel
            yield _result(case, "step", name, time, None)


if __name__ == "__main__":
    command(__doc__, __file__, {"jax": {}, "torch": {}}, _measure)
