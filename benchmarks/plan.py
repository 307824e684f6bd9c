"""Compares what `plan` says with the peak memory of a GPU, in three calls of `fit`.

    python benchmarks/plan.py run [--commit NAME]    on a GPU
    python benchmarks/plan.py table                  anywhere

Each call has a process of its own. It compiles first, so that what the compiler tries out
is not in the peak. On a CPU everything is a hundredth as large, and no peak is known.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section
from workloads import autoencoder, zipf_ids

_RUNS = {
    "large_layer": "8,000,000 x 256 in, 1,000 classes, RMSProp, batch 8,192",
    "epoch": "27,278 in and out, 3 x 1,024, RMSProp, bfloat16, fused, batch 256",
    "autoencoder": "1,000,000 in and out, 256, RMSProp, bfloat16, fused, batch 1,024",
}


def main() -> None:
    command(__doc__, __file__, {run: {} for run in _RUNS}, _measure, _write_table)


def _measure(run: str) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj

    device = jax.devices()[0]
    part = 100 if device.platform == "cpu" else 1
    inputs, targets, network, options = _job(run, part)
    rule = sj.optimizers.rmsprop(1e-3)
    features = inputs.shape[1]
    items = features if targets is None else targets.shape[1]

    def peak() -> int | None:
        stats = device.memory_stats()
        return None if stats is None else stats["peak_bytes_in_use"]

    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        planned = sj.plan(
            network,
            rule,
            inputs=features,
            outputs=None if targets is None else items,
            rows=inputs.shape[0],
            entries=inputs.nnz,
            target_entries=None if targets is None else targets.nnz,
            compile=True,
            **options,
        )
        compiling = peak()
        rngs = nnx.Rngs(0)
        model = sj.FeedForward(network, inputs=features, outputs=items, rngs=rngs)
        optimizer = sj.Optimizer(model, rule)
        made = peak()
        history = sj.fit(model, optimizer, inputs, targets, num_epochs=2, **options)
    assert planned.compiled is not None
    yield {
        "run": run,
        "kept_bytes": planned.kept,
        "temporary_bytes": planned.temporary,
        "compiler_kept_bytes": planned.compiled.kept,
        "compiler_temporary_bytes": planned.compiled.temporary,
        "compiling_peak_bytes": compiling,
        "made_peak_bytes": made,
        "peak_bytes": peak(),
        "loss": history[-1]["loss"],
        "versions": {"jax": jax.__version__, "device": device.device_kind},
    }


def _job(run: str, part: int) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Inputs, targets or None, network, options of `fit`; all a `part`-th as large."""
    import sparsejax as sj

    rng = np.random.default_rng(0)
    match run:
        case "large_layer":
            features, batch = 8_000_000 // part, 8_192 // part
            inputs = _rows(rng, 100 * batch, features, 64)
            classes = rng.integers(0, 1_000, (len(inputs.indptr) - 1, 1))
            network = sj.NetworkConfig.autoencoder((256,))
            return inputs, _matrix(classes, 1_000), network, {"batch_size": batch}
        case "epoch":
            network = autoencoder((1_024,) * 3, dropout=0.5)
            data = _rows(rng, 138_493 // part, 27_278 // part, 144)
            return data, None, network, {"batch_size": 256, "fused": True}
        case _:
            network = sj.NetworkConfig.autoencoder((256,), output_dtype="bfloat16")
            data = _rows(rng, 200_000 // part, 1_000_000 // part, 50)
            return data, None, network, {"batch_size": 1_024, "fused": True}


def _rows(rng, rows: int, features: int, mean: int) -> scipy.sparse.csr_array:
    """Lengths are lognormal, with a deviation of 1.3 times the mean; ids are zipf's."""
    lengths = rng.lognormal(np.log(mean) - 0.5, 1.0, rows)
    lengths = np.clip(lengths, 1, features // 8).astype(int)
    ids = zipf_ids(rng, int(lengths.sum()), features, 0.8)
    pairs = np.unique(np.repeat(np.arange(rows), lengths) * features + ids)
    ends = np.searchsorted(pairs, np.arange(rows + 1) * features)
    ones = np.ones(len(pairs), bool)
    columns = (pairs % features).astype(np.int32)
    shape = rows, features
    return scipy.sparse.csr_array((ones, columns, ends.astype(np.int32)), shape=shape)


def _matrix(columns: np.ndarray, num_cols: int) -> scipy.sparse.csr_array:
    rows, each = columns.shape
    ends = np.arange(rows + 1) * each
    ones = np.ones(columns.size, bool)
    return scipy.sparse.csr_array((ones, columns.ravel(), ends), (rows, num_cols))


def _write_table(report: dict) -> None:
    rows = []
    for r in report["results"]:
        planned = r["kept_bytes"] + r["temporary_bytes"]
        compiler = r["compiler_kept_bytes"] + r["compiler_temporary_bytes"]
        peak, trying = r["peak_bytes"], r["compiling_peak_bytes"]
        rows.append(
            [
                _RUNS[r["run"]],
                f"{r['kept_bytes'] / 1e9:.2f}",
                f"{r['temporary_bytes'] / 1e9:.2f}",
                f"{planned / 1e9:.2f}",
                f"{compiler / 1e9:.2f}",
                "-" if trying is None else f"{trying / 1e9:.2f}",
                "-" if peak is None else f"{peak / 1e9:.2f}",
                "-" if peak is None else f"{100 * (planned / peak - 1):+.1f} %",
                r.get("commit", report.get("commit")),
            ]
        )
    columns = ["run", "kept", "temporary", "plan", "compiler", "trying out"]
    columns += ["peak", "plan to peak", "commit"]
    write_section("plan", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
