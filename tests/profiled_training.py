"""Trains with profiles in between, and without: `python profiled_training.py KIND RULE CYCLES`.

On a GPU, a program that was profiled once ended the process, or gave wrong numbers. The largest
relative difference of the losses is printed.
"""

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import scipy.sparse

import sparsejax as sj

ROWS, BATCH = 25_000, 1024


def clicks(rng: np.random.Generator) -> tuple[Any, Any]:
    sizes = {"user": 30_000, "item": 5_000, "shop": 500}
    columns: dict[str, np.ndarray] = {"y": (rng.random(ROWS) < 0.2).astype(np.int8)}
    columns |= {"price": rng.standard_normal(ROWS).astype(np.float32)}
    for name, rows in sizes.items():
        columns[name] = np.minimum(rng.zipf(1.2, ROWS) - 1, rows - 1).astype(np.int32)
    ids = {name: sj.data.HashedColumn(rows) for name, rows in sizes.items()}
    schema = sj.ClickSchema("y", dense={"price": sj.data.DenseColumn()}, ids=ids)
    config = sj.DLRMConfig(dim=16, bottom=(64,), top=(64,), dtype="bfloat16")
    return config, sj.read_clicks(pa.table(columns), schema)


def histories(rng: np.random.Generator) -> tuple[Any, Any]:
    lengths = rng.integers(2, 40, 4 * BATCH)
    total = int(lengths.sum())
    events = {
        "user": np.repeat(np.arange(len(lengths)), lengths),
        "item": rng.integers(0, 50_000, total),
        "time": np.arange(total) * 60,
    }
    config = sj.HSTUConfig(
        max_length=32, width=128, heads=2, blocks=1, negatives=128, dtype="bfloat16"
    )
    return config, sj.read_sequences(pa.table(events))


def items(rng: np.random.Generator) -> tuple[Any, Any]:
    matrix = scipy.sparse.random(
        8 * BATCH, 20_000, 0.001, "csr", dtype=np.float32, rng=rng
    )
    matrix.data[:] = 1
    config = sj.NetworkConfig.autoencoder(hidden=(128,))
    return config, sj.SparseDataset.from_scipy(matrix)


def losses_of(kind: str, rule: str, profile: Callable[[Any], Any]) -> list[float]:
    """The losses of a fit, then of a profiled fit and another fit, and so on."""
    config, data = {"clicks": clicks, "histories": histories, "items": items}[kind](
        np.random.default_rng(0)
    )
    model, optimizer = sj.build(config, data, getattr(sj.optimizers, rule)(1e-3))

    def fit(seed):
        return sj.fit(
            model, optimizer, data, num_epochs=1, batch_size=BATCH, seed=seed
        )[-1]["loss"]

    if kind != "items":
        return [fit(0), *profile(fit)]
    x = sj.CSR.from_scipy(data.to_scipy()[:BATCH])

    @sj.jit
    def step(model, optimizer, x):
        loss, gradients = optimizer.value_and_grad(lambda model: model.loss(x, x))(
            model
        )
        optimizer.update(model, gradients)
        return loss

    def both(seed):
        """Trains by `fit` and by a custom loop."""
        return fit(seed) + float([step(model, optimizer, x) for _ in range(3)][-1])

    return [both(0), *profile(both)]


def main(kind: str, rule: str, cycles: int) -> float:
    """The largest difference, relative to the loss."""

    def plain(fit):
        return [fit(seed) for seed in range(1, 2 * cycles + 1)]

    def profiled(fit):
        found = []
        for seed in range(1, 2 * cycles + 1):
            if seed % 2:
                with (
                    tempfile.TemporaryDirectory() as folder,
                    jax.profiler.trace(folder),
                ):
                    found.append(fit(seed))
            else:
                found.append(fit(seed))
        return found

    expected, actual = losses_of(kind, rule, plain), losses_of(kind, rule, profiled)
    return float(np.max(np.abs(np.array(actual) / expected - 1)))


if __name__ == "__main__":
    difference = main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(f"{sys.argv[1]} {sys.argv[2]}: {difference:.1e}")
    assert difference < 1e-2, "the losses with profiles are others"
