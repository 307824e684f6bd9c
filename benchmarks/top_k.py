"""Times finding the best 100 items of an output layer against its peers.

    python benchmarks/top_k.py run [--commit NAME]    on a GPU
    python benchmarks/top_k.py table                  anywhere

The results are exact for float32 scores of bfloat16 operands, with the seen items excluded.
Ids are checked against a sort of float64 scores in some rows before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from outputs import CHECKED, exact, jax_inputs, torch_inputs
from report import command, reported
from timing import measure_jax, measure_torch
from workloads import OUTPUTS, Workload

_K = 100


def _measure(part: str) -> Iterator[dict]:
    measure = _measure_jax if part == "jax" else _measure_torch
    for workload in OUTPUTS[1:]:
        yield from measure(workload)


def _check(found, workload: Workload) -> None:
    """Raises ValueError if a row's best are not these, but for ties by rounding."""
    (ids, scores), (exact_scores, seen, _) = found, exact(workload)
    for row in range(CHECKED):
        allowed = np.where(seen[row], -np.inf, exact_scores[row])
        best = np.sort(allowed)[::-1][:_K]
        chosen = allowed[np.asarray(ids)[row]]
        got = np.asarray(scores, np.float64)[row]
        if len(set(np.asarray(ids)[row].tolist())) != _K:
            raise ValueError("an item comes twice")
        if np.abs(chosen - best).max() > 1e-4 or np.abs(got - best).max() > 1e-4:
            raise ValueError(f"row {row}: {np.abs(got - best).max()} off")


def _measure_jax(workload: Workload) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp

    import sparsejax as sj

    def top_k(h, kernel, exclude, implementation=None):
        return sj.top_k(h, kernel, _K, exclude=exclude, implementation=implementation)

    def plain(h, kernel, exclude):
        kernel = kernel[: exclude.num_cols]
        scores = jnp.dot(h, kernel.T, preferred_element_type=jnp.float32)
        place = exclude.row_ids(), exclude.indices
        scores = scores.at[place].set(-jnp.inf, mode="drop")
        return jax.lax.top_k(scores, _K)[::-1]

    inputs = jax_inputs(workload)
    candidates = {
        "sparsejax": top_k,
        "xla": functools.partial(top_k, implementation="xla"),
        "jax.lax.top_k": plain,
    }
    for name, function in candidates.items():
        with reported(workload.name, name):
            check = functools.partial(_check, workload=workload)
            ours = name == "sparsejax"
            found = measure_jax(function, inputs, check, kernels=ours)
            yield {"workload": workload.name, "implementation": name} | found


def _measure_torch(workload: Workload) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    def best(h, kernel, rows, columns):
        scores = torch.mm(h, kernel.T, out_dtype=torch.float32)
        scores[rows, columns] = -torch.inf
        return torch.topk(scores, _K)

    def check(found):
        scores, ids = (x.cpu().numpy() for x in found)
        _check((ids, scores), workload)

    with reported(workload.name, "torch"):
        found = measure_torch(best, torch_inputs(workload, trained=False), check)
        yield {"workload": workload.name, "implementation": "torch.topk"} | found


if __name__ == "__main__":
    command(__doc__, __file__, {"jax": {}, "torch": {}}, _measure)
