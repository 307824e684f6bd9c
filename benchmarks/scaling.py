"""Trains an autoencoder of 8,000,000 items on one, two and four GPUs.

    python benchmarks/scaling.py run [--commit NAME]    on GPUs of one host
    python benchmarks/scaling.py table                  anywhere

It times what users call: `fit` under a mesh, with `fused`. The autoencoder has 8,000,000
items in and out, 256 hidden units and sigmoid cross-entropy. It is trained by RMSProp,
with 1,024 examples of 64 entries in a step, with zipf ids. Weights and state are float32;
products of the output are bfloat16. The same is done with 40,000,000 items. One GPU
cannot hold their weights and state; two can, with XLA_PYTHON_CLIENT_MEM_FRACTION=.95.
Meshes of more GPUs than there are, are left out. The work of one of four GPUs without the
collectives is also timed, on one GPU: 2,000,000 items with a quarter of the entries.
"""

from __future__ import annotations

import collections
import pathlib
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section
from timing import kernels_of_trace
from workloads import autoencoder, zipf_ids

_HIDDEN, _SKEW = 256, 0.8
_STEPS, _BATCH = 32, 1_024
# Items, entries of an example, and the sizes of the axes "data" and "model".
_PARTS = {
    "8M, 1x1": (8_000_000, 64, 1, 1),
    "8M, 1x4": (8_000_000, 64, 1, 4),
    "40M, 1x4": (40_000_000, 64, 1, 4),
    "8M, 1x2": (8_000_000, 64, 1, 2),
    "8M, 2x1": (8_000_000, 64, 2, 1),
    "40M, 1x2": (40_000_000, 64, 1, 2),
    "8M, 2x2": (8_000_000, 64, 2, 2),
    "2M, 1x1": (2_000_000, 16, 1, 1),
}


def main() -> None:
    command(__doc__, __file__, {part: {} for part in _PARTS}, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj

    items, length, data, model = _PARTS[part]
    if data * model > jax.device_count():
        return
    examples = _examples(items, length, _STEPS)
    config = autoencoder((_HIDDEN,))
    with jax.set_mesh(sj.make_mesh(data=data, model=model)):
        network = sj.FeedForward(config, inputs=items, outputs=items, rngs=nnx.Rngs(0))
        optimizer = sj.Optimizer(network, sj.optimizers.rmsprop(1e-3))
        kept = sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in jax.tree.leaves(nnx.state((network, optimizer)))
            if hasattr(leaf, "addressable_shards")
            and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        )

        def fit(epochs):
            return sj.fit(
                network,
                optimizer,
                examples,
                batch_size=_BATCH,
                num_epochs=epochs,
                fused=True,
            )

        # The first epoch compiles.
        history = fit(3)
        speed = statistics.median(e["examples_per_second"] for e in history[1:])
        peaks = [(d.memory_stats() or {}) for d in jax.devices()[: data * model]]
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                fit(1)
            kernels = _kernels(folder)
    yield {
        "items": items,
        "data": data,
        "model": model,
        "step_milliseconds": 1e3 * _BATCH / speed,
        "examples_per_second": speed,
        "weights_and_state_bytes": kept,
        "peak_bytes": max(p.get("peak_bytes_in_use", 0) for p in peaks),
        "entries": _BATCH * length * _STEPS // (data * model),
        "kernel_milliseconds": {n: 1e-6 * t / _STEPS for n, t in kernels.items()},
        "losses": [entry["loss"] for entry in history],
        "versions": {
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
        },
    }


def _examples(items: int, length: int, steps: int):
    """Rows of popular and rare items; a row has an item once."""
    import sparsejax as sj

    rng = np.random.default_rng(0)
    rows = steps * _BATCH
    ids = zipf_ids(rng, (rows, length), items, _SKEW)
    ids.sort(axis=1)
    # What a row has twice moves to the free place behind it.
    for _ in range(8):
        twice = ids[:, 1:] == ids[:, :-1]
        ids[:, 1:] += twice
        np.minimum(ids, items - 1, out=ids)
        ids.sort(axis=1)
    kept = np.concatenate([np.ones((rows, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    return sj.CSR(None, ids[kept], indptr, num_cols=items)


def _kernels(folder: str) -> dict[str, float]:
    """Nanoseconds of the first GPU, by kind of kernel."""
    totals: dict[str, float] = collections.defaultdict(float)
    for name, nanoseconds in kernels_of_trace(folder, gpu="0"):
        totals[_kind(name)] += nanoseconds
    return dict(totals)


def _kind(name: str) -> str:
    if "nccl" in name.lower():
        return "collectives"
    if "mosaic" in name.lower():
        return "our kernels"
    if re.search("gemm|cublas|cutlass|nvjet|sm90_", name, re.IGNORECASE):
        return "products"
    return "Memcpy" if "memcpy" in name.lower() else "all else"


def _write_table(report: dict) -> None:
    results = report["results"]
    # Rows that were measured later name their commit, and are compared among themselves.
    alone = {
        (r["items"], r.get("commit")): r for r in results if r["data"] * r["model"] == 1
    }
    rows = []
    for r in results:
        devices = r["data"] * r["model"]
        ratio = "-"
        if found := alone.get((r["items"], r.get("commit"))):
            one = found["step_milliseconds"]
            times = one / r["step_milliseconds"]
            ratio = f"{times:.2f}x, {100 * times / devices:.0f} %"
        spent = r["kernel_milliseconds"]
        rows.append(
            [
                f"{r['items'] / 1e6:.0f} M",
                f"{r['data']} x {r['model']}",
                f"{r['step_milliseconds']:.1f}",
                f"{r['examples_per_second']:,.0f}",
                ratio,
                f"{spent.get('collectives', 0):.2f}",
                f"{r['weights_and_state_bytes'] * devices / 1e9:.0f}",
                f"{r['peak_bytes'] / 1e9:.1f}",
                f"{r['entries']:,}",
                f"{1e7 / r['examples_per_second'] / 3600:.2f}",
                r.get("commit", report.get("commit")),
            ]
        )
    columns = [
        "items",
        "data x model",
        "ms a step",
        "examples/s",
        "to one GPU, of ideal",
        "collectives, ms",
        "weights and state, GB",
        "peak a GPU, GB",
        "entries a GPU",
        "hours, 10 M users",
        "commit",
    ]
    write_section("scaling", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
