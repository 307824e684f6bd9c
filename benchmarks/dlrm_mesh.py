"""Times training steps of a DLRM on one GPU, on two and on four, under three laws of ids.

    python benchmarks/dlrm_mesh.py run [--commit NAME]     on two GPUs of one host
    python benchmarks/dlrm_mesh.py table                   anywhere

The model has 26 tables of 128 columns: 4 of 5 M rows, 7 of 1 M, 15 of 20,000. An example has one
id of each. Bottom layers are 13-512-256-128, top ones 1,024-1,024-512-256-1. Tables are trained by
row-wise Adagrad, layers by Adagrad. A step is a loop of a person's own: `sj.jit` around
`value_and_grad` and `update`. On several GPUs `ahead` sends the ids of the batch after. *Rows* divides
all tables by their rows over "model". *Sums* is the same without knowing the law of the ids: a sum
crosses for each id. *Narrow* is *rows* with bfloat16 on the wire. *Copies* has all tables on both GPUs.
*Planned* is what `plan_embeddings` chooses for two devices along "model". *Large* is *rows* with 47 M
rows in each of the first four tables: 100 GB, more than an H100 has. *Four* is *rows* on four GPUs,
*narrow_four* is *narrow*. *Asked* is *rows* without `ahead`: a step learns in its midst whether ids have
too few places. *Ten* is *asked* with ten steps in a call. The first step is timed where no compiled
program is found again.

A step in float32 by its parts, predicted at 4.3 TB/s, 400 TFLOP/s and 329 GB/s between two GPUs, for
65,536 examples. On two GPUs zipf is 1.05: of the ids of a device .28 differ, so that 142,000 rows have
places at each owner, of which the other GPU gets 73 MB::

    us                                              one GPU   each of two   bytes on one GPU
    ids as one matrix                                    60            60   20 passes over 1.7 M ids
    owner: rows of distinct ids                           -            70
    rows to the other GPU                                 -           220
    rows of the bags, where the products read them      415           210   872 MB read, 906 written
    products of pairs                                   255           130   906 MB read, 191 written
    pairs, concatenation                                 95            50   400 MB
    layers, three products                            2,320         1,160   928 GFLOP
    derivative of ReLU, sums of biases' gradients       510           255   3 passes over 730 MB
    gradient of the products                            530           270   one product, 2.3 GB
    gradients of distinct ids                             -           140
    these to the other GPU                                -           220
    gradients of layers to the other GPU                  -           100
    sort, sums, row-wise Adagrad                        500           150   1.7 GB and the sort
    in all                                            4,690         3,035
    less what crosses while layers work                   -           380

What remains above that: the products of pairs and their gradient take 1,230 us on one GPU, 1.6 times what their
bytes take, and the layers some 4,000, both by programs of cuBLAS. Rows cross beside the bottom layers, and their
gradients beside the products of the layers' gradients. GPUs of one process copy them to each other, at 380 GB/s:
NCCL's programs take processors meanwhile, and products beside them took 300 us more. The kernels of each of two
GPUs then take 4,180 us in a step of 4,670 to 4,910. The rest is 190 launches, what crosses while nothing works, and
without `ahead` the host, which waits for a condition twice.

On four GPUs the same rates give 1.9 ms for 65,536 examples at 1.05: a quarter of one GPU's work (1,170),
.34 of the ids of a device differ, and 56 MB cross each way. For four times the batch 5.7 ms: one GPU's work and what
the exchange of two takes at its batch, one and a half times. Both without anything crossing while layers work.

Eight GPUs were not measured. By the plan each sends 87 MB of ids, rows and gradients at 65,536 examples and 426 MB at
eight times as many. Then a step takes what it takes on one GPU, a fifth more for the rows' two passes and the launches
as on four, and what of 426 MB does not cross beside layers (half: 600 us at 380 GB/s): 9.5 ms in float32, 55 M
examples/s. This is a prediction.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, reported
from timing import time_kernels
from workloads import DLRM_IDS, DLRM_LAYERS, click_step, click_update, zipf_ids

if TYPE_CHECKING:
    import sparsejax as sj
    from sparsejax.embeddings.config import Placement

_LARGE = (47_000_000,) * 4 + DLRM_IDS[4:]
_DENSE, _DIM = 13, 128
_RATE, _EPS = 0.02, 1e-8
_BATCH, _BATCHES, _STEPS, _ROUNDS, _PROFILED = 65_536, 3, 30, 3, 4
_SKEWS = 1.05, 1.2, 0.8

# Data and model, and how tables lie.
_WAYS: dict[str, tuple[tuple[int, int], Placement | None]] = {
    "one": ((1, 1), None),
    "rows": ((1, 2), "rows"),
    "narrow": ((1, 2), "rows"),
    "sums": ((1, 2), "rows"),
    "copies": ((2, 1), "replicated"),
    "large": ((1, 2), "rows"),
    "four": ((1, 4), "rows"),
    "narrow_four": ((1, 4), "rows"),
    "ten": ((1, 2), "rows"),
    "asked": ((1, 2), "rows"),
    "planned": ((1, 2), None),
}
# How tables lie, the batch as a multiple of 65,536, and the dtype of the layers.
_MEASURED = (
    *(f"{way} 1 float32" for way in ("one", "rows", "sums", "copies", "planned")),
    *(f"{way} 1 bfloat16" for way in ("one", "rows", "narrow")),
    "one 2 float32",
    "rows 2 float32",
    "one 2 bfloat16",
    "narrow 2 float32",
    "narrow 2 bfloat16",
    "large 1 float32",
    *(f"{way} {n} float32" for way in ("four", "narrow_four") for n in (1, 4)),
    *(f"narrow_four {n} bfloat16" for n in (1, 4)),
    *(
        f"{way} 1 {dtype}"
        for way in ("ten", "asked")
        for dtype in ("float32", "bfloat16")
    ),
)
_PARTS = {
    part: {
        "CUDA_VISIBLE_DEVICES": {"one": "0", "four": "0,1,2,3"}.get(
            part.partition(" ")[0].removeprefix("narrow_"), "0,1"
        ),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92",
    }
    for part in _MEASURED
}


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure)


def _measure(part: str) -> Iterator[dict]:
    import jax

    way, times, dtype = part.split()
    on_gpu = jax.default_backend() == "gpu"
    batch = int(times) * (_BATCH if on_gpu else 64)
    rows = _LARGE if way == "large" else DLRM_IDS
    if not on_gpu:
        rows = tuple(n // 10_000 + 50 for n in rows)
    before = None
    for skew in _SKEWS:
        with reported(part, str(skew)):
            before = _Case(way, batch, rows, dtype, skew, before)
            yield before.result()


class _Case:
    """A model on its mesh, and batches of a law of ids.

    A model of another law is used again, if its tables and their places are the same.
    """

    def __init__(self, way, batch, rows, dtype, skew, before):
        import jax
        import jax.numpy as jnp
        import optax
        from flax import nnx

        import sparsejax as sj

        self.way, self.batch, self.dtype, self.skew = way, batch, dtype, skew
        (data, model), placement = _WAYS[way]
        self.mesh = None
        if data * model > 1:
            self.mesh = sj.make_mesh(data=data, model=model)
        rule = sj.optimizers.rowwise_adagrad(_RATE, eps=_EPS)
        names = [f"C{i}" for i in range(1, len(rows) + 1)]
        features = dict(zip(names, rows, strict=True))
        tables = {
            name: sj.embeddings.TableConfig(n, _DIM, placement=placement)
            for name, n in features.items()
        }
        self.plan: sj.embeddings.EmbeddingPlan | dict[str, Placement] = {}
        if placement is not None:
            self.plan = dict.fromkeys(names, placement)
        if way not in ("one", "sums", "copies"):
            self.plan = sj.embeddings.plan_embeddings(
                tables,
                dict(zip(names, names, strict=True)),
                batch_size=batch,
                data=data,
                model=model,
                popularity=dict.fromkeys(names, skew),
                rule=rule,
            )
        if before is not None and before.plan == self.plan:
            self.modules, self._step, self.seconds = (
                before.modules,
                before._step,
                before.seconds,
            )
        else:
            if before is not None:  # its tables leave the memory
                del before.modules, before._step
            config = sj.DLRMConfig(dim=_DIM, **DLRM_LAYERS, dtype=dtype)
            with self.on_mesh():
                model = sj.embeddings.DLRM(
                    config,
                    num_dense=_DENSE,
                    features=features,
                    plan=self.plan,
                    wire_dtype="bfloat16" if way.startswith("narrow") else None,
                    rngs=nnx.Rngs(0),
                )
                optimizer = sj.Optimizer(model, rule, dense=optax.adagrad(_RATE))
            self.modules = model, optimizer
            jax.block_until_ready(nnx.state(self.modules))

            self._step = _many_steps() if way == "ten" else click_step()
            self.seconds = None
        rng = np.random.default_rng(0)

        def put(array):
            if self.mesh is None:
                return jnp.asarray(array)
            lies = jax.NamedSharding(self.mesh, jax.P(("data", "model")))
            return jax.device_put(array, lies)

        self.batches = []
        for _ in range(_BATCHES):
            ids = {n: put(zipf_ids(rng, batch, r, skew)) for n, r in features.items()}
            dense = rng.standard_normal((batch, _DENSE), np.float32)
            click = (rng.random(batch) < 0.2).astype(np.float32)
            self.batches.append((put(dense), ids, put(click)))
        self.steps = 1
        if way == "ten":
            self.steps = 10
            several = [self.batches[i % _BATCHES] for i in range(self.steps)]
            assert self.mesh is not None
            lies = jax.NamedSharding(self.mesh, jax.P(None, ("data", "model")))
            self.batches = [
                jax.tree.map(lambda *a: jax.device_put(jnp.stack(a), lies), *several)
            ]

        self._given = enumerate(self._ids())

    def on_mesh(self):
        import jax

        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh)

    def _ids(self) -> Iterator:
        """Of the batches in turn, without end."""
        ids = (self.batches[i % len(self.batches)][1] for i in itertools.count())
        if self.mesh is None or self.way in ("asked", "ten"):
            return ids
        return self.modules[0].embeddings.ahead(ids)

    def step(self):
        i, ids = next(self._given)
        dense, _, click = self.batches[i % len(self.batches)]
        model, optimizer = self.modules
        return self._step(model, optimizer, dense, ids, click)

    def result(self) -> dict:
        import jax

        overflows = self.modules[0].embeddings.overflows
        with self.on_mesh():
            start = time.perf_counter()
            first = float(self.step())
            seconds = round(time.perf_counter() - start, 2)
            if jax.config.jax_compilation_cache_dir or self.seconds is not None:
                seconds = None
            self.seconds = 0.0
            before, times = int(overflows[...]), []
            for _ in range(_ROUNDS):
                start = time.perf_counter()
                losses = [self.step() for _ in range(_STEPS)]
                jax.block_until_ready(losses)
                took = time.perf_counter() - start
                times.append(1e3 * took / _STEPS / self.steps)
            crowded = int(overflows[...]) - before
            if not float(self.step()) < first:
                raise ValueError(f"the loss did not fall from {first}")
            kernels = time_kernels(
                lambda _: jax.block_until_ready(self.step()), _PROFILED
            )
        devices = 1 if self.mesh is None else self.mesh.size
        kernels = {name: t / devices / self.steps for name, t in kernels.items()}
        largest = sorted(kernels.items(), key=lambda item: -item[1])[:30]
        milliseconds = statistics.median(times)
        placements = {}
        if not isinstance(self.plan, dict):
            placements = {t.name: t.placement.kind for t in self.plan.tables}
        return {
            "way": self.way,
            "batch": self.batch,
            "dtype": self.dtype,
            "zipf": self.skew,
            "milliseconds": round(milliseconds, 3),
            "examples_per_second": round(1e3 * self.batch / milliseconds),
            "first_step_seconds": seconds,
            "steps_with_too_few_places": f"{crowded} of {_ROUNDS * _STEPS * self.steps}",
            "loss": first,
            "placements": placements,
            "table_bytes_of_a_device": sum(
                value[...].addressable_shards[0].data.nbytes
                for value in self.modules[0].embeddings.kernels.values()
            ),
            "peak_bytes": (jax.devices()[0].memory_stats() or {}).get(
                "peak_bytes_in_use"
            ),
            "kernel_microseconds": round(sum(kernels.values()), 1),
            "kernels": [(name[:80], round(t, 1)) for name, t in largest],
            "versions": {
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
            },
        }


def _many_steps():
    """`steps(model, optimizer, dense, ids, click)` for a stack of batches: the last loss."""
    from flax import nnx

    import sparsejax as sj

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def scanned(modules, batch):
        return modules, click_update(*modules, *batch)

    return sj.jit(
        lambda *modules_and_batches: scanned(
            modules_and_batches[:2], modules_and_batches[2:]
        )[1][-1]
    )


if __name__ == "__main__":
    main()
