"""Times training steps of a DLRM on one GPU, on two and on four, under three laws of ids.

    python benchmarks/dlrm_mesh.py run [--commit NAME]     on two GPUs of one host
    python benchmarks/dlrm_mesh.py table                   anywhere

The model has 26 tables of 128 columns: 4 of 5 M rows, 7 of 1 M, 15 of 20,000. An example has one
id of each. Tables are trained by row-wise Adagrad, layers by Adagrad. A step is a loop of a
person's own: `sj.jit` around `value_and_grad` and `update`. On several GPUs `ahead` sends the ids
of the batch after. *Rows* divides all tables by their rows over "model". *Narrow* is *rows* with
bfloat16 on the wire. *Copies* has all tables on both GPUs. *Large* is *rows* with 47 M rows in
each of the first four tables: 100 GB, more than an H100 has. *Dynamic* has dynamic tables of a
million rows each, and *dynamic_two* divides them. *Four* and *narrow_four* are *rows*
and *narrow* on four GPUs. The first step is timed where no compiled program is found again.
`notes/dlrm_mesh.md` predicts a step by its parts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from report import command, largest, reported
from timing import time_kernels
from workloads import DLRM_IDS, DLRM_LAYERS, click_step, click_update, keys_of, zipf_ids

if TYPE_CHECKING:
    from sparsejax.embeddings.config import Placement

_LARGE = (47_000_000,) * 4 + DLRM_IDS[4:]
_DENSE, _DIM = 13, 128
_RATE, _EPS = 0.02, 1e-8
_BATCH, _BATCHES, _STEPS, _ROUNDS, _PROFILED = 65_536, 3, 30, 3, 4
_SKEWS = 1.05, 1.2, 0.8

# The sizes of the axes "data" and "model", and the placement of tables.
_WAYS: dict[str, tuple[tuple[int, int], Placement | None]] = {
    "one": ((1, 1), None),
    "rows": ((1, 2), "rows"),
    "narrow": ((1, 2), "rows"),
    "copies": ((2, 1), "replicated"),
    "large": ((1, 2), "rows"),
    "four": ((1, 4), "rows"),
    "narrow_four": ((1, 4), "rows"),
    "dynamic": ((1, 1), None),
    "dynamic_two": ((1, 2), "rows"),
}
# A way, the batch as a multiple of 65,536, and the dtype of the layers.
_MEASURED = (
    *(f"{way} 1 float32" for way in ("one", "rows", "narrow", "copies", "large")),
    *(f"{way} 1 bfloat16" for way in ("one", "rows", "narrow")),
    *(f"{way} 2 float32" for way in ("one", "rows", "narrow")),
    *(f"{way} 2 bfloat16" for way in ("one", "narrow")),
    *(f"{way} {n} float32" for way in ("four", "narrow_four") for n in (1, 4)),
    *(f"narrow_four {n} bfloat16" for n in (1, 4)),
    *(f"{way} 1 float32" for way in ("dynamic", "dynamic_two")),
)


def _measure(part: str) -> Iterator[dict]:
    import jax

    import sparsejax as sj

    way, times, dtype = part.split()
    on_gpu = jax.default_backend() == "gpu"
    batch = int(times) * (_BATCH if on_gpu else 64)
    rows = _LARGE if way == "large" else DLRM_IDS
    if not on_gpu:
        rows = tuple(n // 10_000 + 50 for n in rows)
    (data, model), placement = _WAYS[way]
    dynamic = None
    if way.startswith("dynamic"):
        dynamic = sj.embeddings.DynamicTables(num_rows=2**20 if on_gpu else 2**10)
    mesh = None
    if data * model > 1:
        mesh = sj.make_mesh(data=data, model=model)
    made: tuple[Any, Any] = None, None
    for skew in _SKEWS:
        with (
            reported(part, str(skew)),
            jax.set_mesh(mesh) if mesh else contextlib.nullcontext(),
        ):
            plan = dict.fromkeys(_features(rows), placement) if placement else {}
            if placement == "rows":
                plan = _plan(rows, batch, data, model, skew, dynamic)
            is_new = made[0] is None or made[0] != plan
            if is_new:
                made = None, None  # its tables leave the memory
                wire = "bfloat16" if way.startswith("narrow") else None
                made = plan, _modules(rows, plan, dtype, wire, dynamic)
            embeddings = made[1][0].embeddings if dynamic else None
            batches = _batches(rows, batch, skew, mesh, embeddings)
            result = {"way": way, "batch": batch, "dtype": dtype, "zipf": skew}
            yield result | _timed(made[1], batches, mesh, is_new)


def _features(rows: tuple[int, ...]) -> dict[str, int]:
    return {f"C{i}": n for i, n in enumerate(rows, 1)}


def _plan(rows, batch: int, data: int, model: int, skew: float, dynamic):
    import sparsejax as sj

    features = _features(rows)
    static = functools.partial(sj.embeddings.TableConfig, dim=_DIM, placement="rows")
    popularity: dict[str, float | np.ndarray] = dict.fromkeys(features, skew)
    if dynamic:  # a table has room for more ids than some features have
        popularity |= {
            name: np.arange(1.0, n + 1) ** -skew
            for name, n in features.items()
            if n < dynamic.num_rows
        }
    return sj.embeddings.plan_embeddings(
        {n: dynamic.table(_DIM) if dynamic else static(r) for n, r in features.items()},
        {name: name for name in features},
        batch_size=batch,
        data=data,
        model=model,
        popularity=popularity,
        rule=sj.optimizers.rowwise_adagrad(_RATE, eps=_EPS),
    )


def _modules(rows: tuple[int, ...], plan, dtype: Any, wire, dynamic):
    import jax
    import optax
    from flax import nnx

    import sparsejax as sj

    model = sj.embeddings.DLRM(
        sj.DLRMConfig(dim=_DIM, **DLRM_LAYERS, dtype=dtype, dynamic=dynamic),
        num_dense=_DENSE,
        features=dict.fromkeys(_features(rows), 2**64) if dynamic else _features(rows),
        plan=plan,
        wire_dtype=wire,
        rngs=nnx.Rngs(0),
    )
    rule = sj.optimizers.rowwise_adagrad(_RATE, eps=_EPS)
    optimizer = sj.Optimizer(model, rule, dense=optax.adagrad(_RATE))
    jax.block_until_ready(nnx.state((model, optimizer)))
    if not dynamic:
        return model, optimizer, click_step()

    @sj.jit
    def step(model, optimizer, dense, ids, click):
        rows = model.embeddings.assign_rows(ids, optimizer)
        return click_update(model, optimizer, dense, rows, click)

    return model, optimizer, step


def _batches(rows, batch: int, skew: float, mesh, embeddings) -> list[tuple]:
    import jax
    import jax.numpy as jnp

    import sparsejax as sj

    rng, found = np.random.default_rng(0), []

    def put(array):
        if mesh is None:
            return jnp.asarray(array)
        return jax.device_put(array, jax.NamedSharding(mesh, jax.P(("data", "model"))))

    for _ in range(_BATCHES):
        ids = {n: zipf_ids(rng, batch, r, skew) for n, r in _features(rows).items()}
        if embeddings is not None:
            ids = {n: sj.embeddings.WideIds.of(keys_of(v)) for n, v in ids.items()}
            ids = ids if mesh else embeddings.pack(ids)
        ids = jax.tree.map(put, ids)
        dense = rng.standard_normal((batch, _DENSE), np.float32)
        click = (rng.random(batch) < 0.2).astype(np.float32)
        found.append((put(dense), ids, put(click)))
    return found


def _timed(modules, batches: list[tuple], mesh, is_new: bool) -> dict:
    import jax

    model, optimizer, program = modules
    given = (batches[i % _BATCHES][1] for i in itertools.count())
    ids = enumerate(given if mesh is None else model.embeddings.ahead(given))

    def step():
        i, mine = next(ids)
        dense, _, click = batches[i % _BATCHES]
        return program(model, optimizer, dense, mine, click)

    overflows = model.embeddings.overflows
    start = time.perf_counter()
    first = float(step())
    seconds = round(time.perf_counter() - start, 2)
    before, times = int(overflows[...]), []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([step() for _ in range(_STEPS)])
        times.append(1e3 * (time.perf_counter() - start) / _STEPS)
    crowded = int(overflows[...]) - before
    if not float(step()) < first:
        raise ValueError(f"the loss did not fall from {first}")
    kernels = time_kernels(lambda _: jax.block_until_ready(step()), _PROFILED)
    devices = 1 if mesh is None else mesh.size
    kernels = {name: t / devices for name, t in kernels.items()}
    milliseconds = statistics.median(times)
    cached = jax.config.jax_compilation_cache_dir or not is_new
    return {
        "milliseconds": round(milliseconds, 3),
        "examples_per_second": round(1e3 * len(batches[0][0]) / milliseconds),
        "first_step_seconds": None if cached else seconds,
        "steps_with_too_few_places": f"{crowded} of {_ROUNDS * _STEPS}",
        "loss": first,
        "table_bytes_of_a_device": sum(
            value[...].addressable_shards[0].data.nbytes
            for value in model.embeddings.kernels.values()
        ),
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "kernel_microseconds": round(sum(kernels.values()), 1),
        "kernels": largest(kernels, 30),
    }


if __name__ == "__main__":
    visible = {"one": "0", "dynamic": "0", "four": "0,1,2,3", "narrow_four": "0,1,2,3"}
    parts = {
        part: {
            "CUDA_VISIBLE_DEVICES": visible.get(part.split()[0], "0,1"),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92",
        }
        for part in _MEASURED
    }
    command(__doc__, __file__, parts, _measure)
