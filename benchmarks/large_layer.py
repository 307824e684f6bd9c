"""Trains an input layer of 8,000,000 x 256 on one GPU and reports time and memory.

    python benchmarks/large_layer.py [--output FILE] [--commit NAME]

It times what users call: `fit` with RMSProp, on data that is resident on the device, for
100 steps of 8,192 examples. An example has about 64 features, with zipf ids; there are
1,000 classes. Writes `results/large_layer.json` and the table in README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib

import jax
import numpy as np
import scipy.sparse
from flax import nnx
from report import COPY_BYTES_PER_SECOND, RESULTS, origin, table, write_section
from workloads import zipf_ids

import sparsejax as sj

_FEATURES, _HIDDEN, _CLASSES = 8_000_000, 256, 1_000
_STEPS, _BATCH, _LENGTH, _SKEW = 100, 8_192, 64, 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--output", type=pathlib.Path, default=RESULTS / "large_layer.json"
    )
    arguments = parser.parse_args()
    result = _measure()
    report = {
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit,
        "command": "python benchmarks/large_layer.py",
        "versions": {
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
        },
        "result": result,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    _write_table(report)


def _data(rng: np.random.Generator) -> tuple[sj.CSR, sj.CSR]:
    """Rows of features and a class each: that of the group the first feature is in."""
    rows = _STEPS * _BATCH
    ids = zipf_ids(rng, (rows, _LENGTH), _FEATURES, _SKEW)
    ids.sort(axis=1)
    indptr = np.arange(rows + 1, dtype=np.int32) * _LENGTH
    inputs = sj.CSR(None, ids.reshape(-1), indptr, num_cols=_FEATURES)
    classes = (ids[:, 0] % _CLASSES).astype(np.int32)
    shape = rows, _CLASSES
    ones = np.ones(rows, bool)
    labels = scipy.sparse.csr_array((ones, classes, np.arange(rows + 1)), shape=shape)
    return inputs, sj.CSR.from_scipy(labels)


def _measure() -> dict:
    inputs, targets = _data(np.random.default_rng(0))
    config = sj.NetworkConfig.autoencoder(hidden=(_HIDDEN,))
    model = sj.FeedForward(config, inputs=_FEATURES, outputs=_CLASSES, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.rmsprop(1e-3))
    leaves = jax.tree.leaves(nnx.state((model, optimizer)))
    kept = sum(leaf.nbytes for leaf in leaves if hasattr(leaf, "nbytes"))
    device = jax.devices()[0]
    made = device.memory_stats()["peak_bytes_in_use"]
    history = sj.fit(model, optimizer, inputs, targets, batch_size=_BATCH, num_epochs=2)
    peak = device.memory_stats()["peak_bytes_in_use"]
    data = sum(leaf.nbytes for leaf in jax.tree.leaves((inputs, targets)))
    unique = np.mean(
        [
            len(np.unique(part))
            for part in np.split(inputs.indices, _STEPS)[:: _STEPS // 5]
        ]
    )
    entries = _BATCH * _LENGTH
    floor = (2 * entries + 4 * unique) * _HIDDEN * 4 / COPY_BYTES_PER_SECOND
    # The first epoch compiles.
    seconds = _BATCH / history[-1]["examples_per_second"]
    return {
        "step_milliseconds": 1e3 * seconds,
        "examples_per_second": history[-1]["examples_per_second"],
        "floor_milliseconds": 1e3 * floor,
        "weights_and_state_bytes": kept,
        "peak_bytes_when_made": made,
        "peak_bytes": peak,
        "data_bytes": data,
        "losses": [entry["loss"] for entry in history],
    }


def _write_table(report: dict) -> None:
    r = report["result"]
    kept = r["weights_and_state_bytes"]
    rows = [
        [
            f"{r['step_milliseconds']:.2f}",
            f"{100 * r['floor_milliseconds'] / r['step_milliseconds']:.0f} %",
            f"{r['examples_per_second']:,.0f}",
            f"{kept / 1e9:.2f}",
            f"{r['data_bytes'] / 1e9:.2f}",
            f"{r['peak_bytes'] / 1e9:.2f}",
            f"{100 * (r['peak_bytes'] / kept - 1):.1f} %",
        ]
    ]
    columns = [
        "ms a step",
        "of ceiling",
        "examples/s",
        "weights and state, GB",
        "data, GB",
        "peak, GB",
        "above weights and state",
    ]
    write_section("large_layer", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
