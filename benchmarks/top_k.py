"""Times finding the best 100 items of an output layer against its peers.

    python benchmarks/top_k.py run [--commit NAME]    on a GPU
    python benchmarks/top_k.py table                  anywhere

The results are exact for float32 scores of bfloat16 operands, with the seen items excluded.
Ids are checked against a sort of float64 scores in some rows before anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
from outputs import (
    BATCHES,
    CHECKED,
    exact,
    host_operands,
    jax_inputs,
    kernel_times,
    rows_of,
    temporary_bytes,
)
from report import command, reported
from timing import Time, time_jax, time_torch
from workloads import OUTPUTS, Workload

_K = 100


def _measure(part: str) -> Iterator[dict]:
    measure = _measure_jax if part == "jax" else _measure_torch
    for workload in OUTPUTS[1:]:
        yield from measure(workload)


def _check(ids, scores, workload: Workload) -> None:
    """Raises ValueError if a row's best are not these, but for ties by rounding."""
    exact_scores, seen, _ = exact(workload)
    for row in range(CHECKED):
        allowed = np.where(seen[row], -np.inf, exact_scores[row])
        best = np.sort(allowed)[::-1][:_K]
        chosen = allowed[np.asarray(ids)[row]]
        got = np.asarray(scores, np.float64)[row]
        if len(set(np.asarray(ids)[row].tolist())) != _K:
            raise ValueError("an item comes twice")
        if np.abs(chosen - best).max() > 1e-4 or np.abs(got - best).max() > 1e-4:
            raise ValueError(f"row {row}: {np.abs(got - best).max()} off")


def _result(workload, name, time: Time, temporary, **more) -> dict:
    return {
        "workload": workload.name,
        "implementation": name,
        **{key: round(value, 1) for key, value in dataclasses.asdict(time).items()},
        "temporary_bytes": temporary,
        **more,
    }


def _measure_jax(workload: Workload) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp

    import sparsejax as sj

    def ours(h, kernel, exclude, implementation=None):
        return sj.top_k(h, kernel, _K, exclude=exclude, implementation=implementation)

    def plain(h, kernel, exclude):
        kernel = kernel[: exclude.num_cols]
        scores = jnp.dot(h, kernel.T, preferred_element_type=jnp.float32)
        place = exclude.row_ids(), exclude.indices
        scores = scores.at[place].set(-jnp.inf, mode="drop")
        return jax.lax.top_k(scores, _K)[::-1]

    inputs = jax_inputs(workload)
    candidates = {
        "sparsejax": ours,
        "xla": functools.partial(ours, implementation="xla"),
        "jax.lax.top_k": plain,
    }
    for name, function in candidates.items():
        with reported(workload.name, name):
            jitted = jax.jit(function)
            compiled = jitted.lower(*inputs[0]).compile()
            temporary = temporary_bytes(compiled)
            ids, scores = compiled(*inputs[0])
            _check(ids, scores, workload)
            more = {}
            if name == "sparsejax":
                more["kernels"] = kernel_times(jitted, inputs[0])
            time = time_jax(jitted, inputs)
            yield _result(workload, name, time, temporary, **more)


def _measure_torch(workload: Workload) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    h, kernel = host_operands(workload)
    kernel = torch.from_numpy(kernel[: workload.features]).cuda().bfloat16()
    inputs = []
    for seed in range(BATCHES):
        indices, indptr = rows_of(workload, seed)
        rows = np.repeat(np.arange(workload.batch), np.diff(indptr))
        place = [torch.from_numpy(x.astype(np.int64)).cuda() for x in (rows, indices)]
        inputs.append((torch.from_numpy(h[seed]).cuda().bfloat16(), kernel, *place))

    def best(h, kernel, rows, columns):
        scores = torch.mm(h, kernel.T, out_dtype=torch.float32)
        scores[rows, columns] = -torch.inf
        return torch.topk(scores, _K)

    with reported(workload.name, "torch"):
        scores, ids = (x.cpu().numpy() for x in best(*inputs[0]))
        _check(ids, scores, workload)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        time = time_torch(best, inputs)
        temporary = torch.cuda.max_memory_allocated() - before
        yield _result(workload, "torch.topk", time, temporary)


if __name__ == "__main__":
    command(__doc__, __file__, {"jax": {}, "torch": {}}, _measure)
