"""One request to a predictor: a history of a few items in, ten items out.

    python benchmarks/request.py run [--commit NAME] [--output FILE]
    python benchmarks/request.py table                  anywhere

The model is an untrained autoencoder of 256 hidden units, with cosines and a temperature.
It has as many items as MovieLens-1M, or as Gowalla. A predictor file is written and
loaded. Then come 300 requests of one row, with histories of 1 to 385 items, which are not
recommended. They are cold the first time after loading, and warm when the same ones come
again. If there is `Predictor.warm_up`, the file is loaded once more, and the same requests
come after it. "rows" are warm requests of several rows, the fastest of ten, because other
work on the machine only adds to times. `results/request_before.json` is of the commit
before the programs for one row.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import scipy.sparse

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import RESULTS, command, origin, table, write_section

_SIZES = {"3.7 k items": 3_706, "40 k items": 40_981}
_REQUESTS, _LONGEST, _ROWS = 300, 385, (1, 2, 8, 64)


def main() -> None:
    command(__doc__, __file__, {size: {} for size in _SIZES}, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj

    items = _SIZES[part]
    config = sj.NetworkConfig.autoencoder(hidden=(256,), temperature=0.1)
    model = sj.FeedForward(config, inputs=items, outputs=items, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, _LONGEST + 1, _REQUESTS)
    requests = [_histories(rng, [length], items) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "predictor")
        start = time.perf_counter()
        sj.export_predictor(model, path, k=10, names=range(items))
        seconds = {"export": time.perf_counter() - start}
        start = time.perf_counter()
        predictor = sj.load_predictor(path)
        seconds["load"] = time.perf_counter() - start
        warmed = hasattr(predictor, "warm_up")
        times = {"cold": _milliseconds(predictor, requests)}
        times["warm"] = _milliseconds(predictor, requests)
        if warmed:
            jax.clear_caches()
            predictor = sj.load_predictor(path)
            start = time.perf_counter()
            predictor.warm_up(max_items=_LONGEST)
            seconds["warm_up"] = time.perf_counter() - start
            times["cold after warm_up"] = _milliseconds(predictor, requests)
        rows = {}
        for count in _ROWS:
            x = _histories(rng, np.full(count, 50), items)
            rows[count] = min(_milliseconds(predictor, [x] * 11)[1:])
        device = jax.devices()[0]
        yield {
            "items": items,
            "file_bytes": os.path.getsize(path),
            "seconds": seconds,
            "milliseconds": {name: _summary(t) for name, t in times.items()},
            "milliseconds_by_rows": rows,
            "versions": {"jax": jax.__version__, "device": device.device_kind},
        }


def _histories(rng, lengths, items: int) -> scipy.sparse.csr_array:
    ids = [rng.choice(items, length, replace=False) for length in lengths]
    indptr = np.append(0, np.cumsum(lengths))
    entries = np.ones(indptr[-1], bool), np.concatenate(ids), indptr
    return scipy.sparse.csr_array(entries, shape=(len(lengths), items))


def _milliseconds(predictor, requests) -> list[float]:
    times = []
    for x in requests:
        start = time.perf_counter()
        predictor.recommend(x, exclude=x)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _summary(times: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "least": min(times),
        "p50": p50,
        "p99": p99,
        "most": max(times),
        "longer_than_100": sum(t > 100 for t in times),
    }


def _write_table(report: dict) -> None:
    before = json.loads((RESULTS / "request_before.json").read_text())
    reports = {"before": before, "after": report}
    lines, times, by_rows = [], [], []
    for name, part in reports.items():
        lines += [f"{name.capitalize()}: {origin(part)}", ""]
        for r in part["results"]:
            items = f"{r['items']:,}"
            for state, t in r["milliseconds"].items():
                shown = [f"{t[key]:,.1f}" for key in ("least", "p50", "p99", "most")]
                times.append([items, name, state, *shown, t["longer_than_100"]])
            least = [f"{t:.1f}" for t in r["milliseconds_by_rows"].values()]
            by_rows.append([items, name, *least])
    columns = [
        "items",
        "",
        "300 requests",
        "least ms",
        "p50",
        "p99",
        "most",
        "> 100 ms",
    ]
    counts = [f"{count} rows, ms" for count in _ROWS]
    lines += [*table(columns, sorted(times)), ""]
    lines += table(["items", "", *counts], sorted(by_rows))
    write_section("request", lines)


if __name__ == "__main__":
    main()
