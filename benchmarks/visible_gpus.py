"""Times training and ranking on one GPU where one is visible, and where two are.

    python benchmarks/visible_gpus.py run [--commit NAME]     on two GPUs of one host
    python benchmarks/visible_gpus.py table                   anywhere

No mesh is set and no argument is passed that the pages do not name. Each part is a process.
*Training* trains DLRM, HSTU and SASRec with `fit`; *ranking* trains an autoencoder and ranks
with it, where the host takes part of the time. *one* sees the second GPU alone, *two* sees
both and so runs on the first. The parts run one after the other.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from report import command, reported
from workloads import clicks_to_fit, histories_to_fit

_PARTS = {
    f"{work} {visible}": {"CUDA_VISIBLE_DEVICES": devices}
    for work in ("training", "ranking")
    for visible, devices in (("one", "1"), ("two", "0,1"))
}
_EPOCHS = 4
_ITEMS, _USERS = 40_981, 29_858  # Gowalla's


def _clicks(rng: np.random.Generator) -> tuple[Any, Any, Any, int]:
    return *clicks_to_fit(rng), 65_536


def _histories(kind: str, rng: np.random.Generator) -> tuple[Any, Any, Any, int]:
    import sparsejax as sj

    made = {"hstu": sj.HSTUConfig, "sasrec": sj.SASRecConfig}[kind]
    config = made(
        max_length=200, width=256, heads=4, blocks=2, negatives=1024, dtype="bfloat16"
    )
    data = histories_to_fit(rng, 1_000_000, 32_768, "uniform")
    return config, data, sj.optimizers.adam(1e-3), 2_048


def _items(rng: np.random.Generator) -> tuple[Any, Any, Any, int]:
    import scipy.sparse

    import sparsejax as sj

    density = 1_027_370 / (_USERS * _ITEMS)
    matrix = scipy.sparse.random(
        _USERS, _ITEMS, density, "csr", dtype=np.float32, rng=rng
    )
    matrix.data[:] = 1
    config = sj.NetworkConfig.autoencoder(hidden=(256,))
    return config, sj.SparseDataset.from_scipy(matrix), sj.optimizers.adam(1e-3), 512


def _fastest(call: Callable[[], Any], times: int = 4) -> float:
    """Seconds of the fastest call. The first one compiles."""
    found = []
    for _ in range(times + 1):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def measure(part: str) -> Iterator[dict]:
    """Milliseconds of a step; or of ranking all users, and of a request of 16 rows."""
    import jax

    import sparsejax as sj

    work, visible = part.split()

    def result(name: str, milliseconds: float) -> dict:
        facts = {"visible": len(jax.devices()), "ms": round(milliseconds, 3)}
        return {"case": name, "part": visible, **facts}

    cases: dict[str, Callable[[np.random.Generator], Any]] = {"items, fit": _items}
    if work == "training":
        cases = {
            "DLRM, fit": _clicks,
            "HSTU, fit": lambda rng: _histories("hstu", rng),
            "SASRec, fit": lambda rng: _histories("sasrec", rng),
        }
    for name, make in cases.items():
        with reported(name):
            config, data, rule, batch = make(np.random.default_rng(0))
            model, optimizer = sj.build(config, data, rule)
            history = sj.fit(
                model, optimizer, data, num_epochs=_EPOCHS, batch_size=batch, seed=0
            )
            fastest = max(entry["examples_per_second"] for entry in history)
            yield result(name, 1e3 * batch / fastest)
    if work == "training":
        return
    train, heldout = data.split(0.8, seed=0)
    seconds = _fastest(lambda: sj.recommend(model, train, k=10, exclude="inputs"))
    yield result("items, recommend to all", 1e3 * seconds)
    seconds = _fastest(lambda: sj.evaluate(model, train, heldout))
    yield result("items, evaluate", 1e3 * seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "predictor")
        sj.export_predictor(model, path, k=10, batch_size=16)
        predictor = sj.load_predictor(path)
        rows = train.to_scipy()[:16]
        calls = [_fastest(lambda: predictor.recommend(rows), 20) for _ in range(5)]
    yield result("items, predictor, 16 rows", 1e3 * statistics.median(calls))


if __name__ == "__main__":
    command(__doc__, __file__, _PARTS, measure)
