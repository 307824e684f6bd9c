"""Trains a network of the demo's size in two processes, and compares the bits.

    python benchmarks/determinism.py run [--commit NAME]    on a GPU
    python benchmarks/determinism.py table                  anywhere

Each process does 200 steps of `fit` on generated data of the demo's shape. This is done
under several flags of XLA. Every array of the model and the optimizer is compared.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section
from workloads import Workload, make_rows

_BATCH, _STEPS, _EPOCHS = 512, 50, 4
_VISITS = Workload(
    "visits",
    "the demo's visitors and areas",
    batch=_STEPS * _BATCH,
    features=294,
    hidden=128,
    entries=77_000,
    skew=0.8,
)
_FLAGS = {
    "default": "",
    "fixed": "--xla_gpu_autotune_level=0",
    "deterministic": "--xla_gpu_deterministic_ops=true",
}
_PARTS = {
    f"{name}-{run}": {"XLA_FLAGS": flags}
    for name, flags in _FLAGS.items()
    for run in (1, 2)
}


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    import jax
    import numpy as np
    from flax import nnx

    import sparsejax as sj

    def digest(leaf) -> str:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()

    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    size = _VISITS.features
    visits = sj.CSR(None, *make_rows(_VISITS, 0), num_cols=size)
    network = sj.NetworkConfig.autoencoder((_VISITS.hidden,))
    model = sj.FeedForward(network, inputs=size, outputs=size, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
    history = sj.fit(model, optimizer, visits, batch_size=_BATCH, num_epochs=_EPOCHS)
    arrays = jax.tree.leaves_with_path(nnx.state((model, optimizer)))
    # The first epoch compiles.
    rate = max(entry["examples_per_second"] for entry in history[1:])
    yield {
        "flags": part.rpartition("-")[0],
        "steps": _EPOCHS * _STEPS,
        "step_microseconds": 1e6 * _BATCH / rate,
        "loss": history[-1]["loss"],
        "sha256": {jax.tree_util.keystr(path): digest(a) for path, a in arrays},
        "versions": versions,
    }


def _write_table(report: dict) -> None:
    rows = []
    for flags, flag in _FLAGS.items():
        runs = [r for r in report["results"] if r["flags"] == flags]
        if len(runs) < 2:
            continue
        names = runs[0]["sha256"]
        alike = sum(names[name] == runs[1]["sha256"][name] for name in names)
        rows.append(
            [
                f"`{flag}`" if flag else "none",
                f"{alike} of {len(names)}",
                ", ".join(f"{r['loss']:.8f}" for r in runs),
                f"{min(r['step_microseconds'] for r in runs):.0f}",
            ]
        )
    columns = ["XLA_FLAGS", "arrays with the same bits", "losses", "us a step"]
    write_section("determinism", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
