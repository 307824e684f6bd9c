"""Trains an autoencoder from disk, a chunk at a time, and from resident data.

    python benchmarks/streaming.py run [--commit NAME] [--items N] [--rows N] ...
    python benchmarks/streaming.py table                  anywhere

By default the autoencoder of scaling.py on one GPU: 8,000,000 items in and out, 256
hidden units, RMSProp, sigmoid cross-entropy, 1,024 examples a step of 64 entries each,
zipf ids, `fit(..., fused=True)`. 262,144 examples in a temporary folder; a chunk is
65,536 of them, a row group of a saved data set. On a CPU, to see that it works:

    ... --items 5000 --rows 131072 --entries 8 --hidden 8 --batch 4096

Epochs after the first, which compiles, are timed: they read all of the files again. Peak
host memory is that of a process (VmHWM) in which the data was not made.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, peak_host_bytes, table, write_section
from workloads import autoencoder, zipf_ids

_SKEW, _EPOCHS = 0.8, 4
_SIZES = {
    "items": 8_000_000,
    "rows": 2**18,
    "entries": 64,
    "hidden": 256,
    "batch": 1_024,
    "chunk": 2**16,
}
_PARTS = {
    "resident": "resident",
    "saved": "saved data set, chunk by chunk",
    "lists": "table of lists of integers, chunk by chunk",
}


def main() -> None:
    parts = {part: {} for part in _PARTS}
    command(__doc__, __file__, parts, _measure, _write_table, options=_SIZES)


def _measure(part: str, **sizes: int) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj

    items, batch = sizes["items"], sizes["batch"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "data.parquet")
        spawned = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as other:
            other.submit(_write, path, part, sizes).result()
        if part == "resident":
            data, read = sj.SparseDataset.load(path), None
        else:
            names = np.arange(items) if part == "lists" else None
            data = sj.scan_parquet(path, features=names, chunk_rows=sizes["chunk"])
            read = _entries_read_per_second(data, sizes["chunk"])
        config = autoencoder((sizes["hidden"],))
        network = sj.FeedForward(config, inputs=items, outputs=items, rngs=nnx.Rngs(0))
        optimizer = sj.Optimizer(network, sj.optimizers.rmsprop(1e-3))
        history = sj.fit(
            network, optimizer, data, batch_size=batch, num_epochs=_EPOCHS, fused=True
        )
        speeds = [entry["examples_per_second"] for entry in history[1:]]
        memory = jax.devices()[0].memory_stats() or {}
        yield {
            "part": part,
            **sizes,
            "file_bytes": os.path.getsize(path),
            "examples_per_second": statistics.median(speeds),
            "slowest_and_fastest_epoch": [min(speeds), max(speeds)],
            "entries_read_per_second": read,
            "peak_host_bytes": peak_host_bytes(),
            "peak_device_bytes": memory.get("peak_bytes_in_use"),
            "losses": [entry["loss"] for entry in history],
            "versions": {
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
            },
        }


def _write(path: str, part: str, sizes: dict[str, int]) -> None:
    """Rows of popular and rare items, sorted; an item that a row has twice counts once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import sparsejax as sj

    rows, items = sizes["rows"], sizes["items"]
    rng = np.random.default_rng(0)
    ids = zipf_ids(rng, (rows, sizes["entries"]), items, _SKEW)
    ids.sort(axis=1)
    kept = np.diff(ids, axis=1, prepend=-1) != 0
    indptr = np.append(0, np.cumsum(kept.sum(axis=1))).astype(np.int32)
    if part == "lists":
        lists = pa.ListArray.from_arrays(indptr, ids[kept])
        found = pa.table({"items": lists})
        pq.write_table(found, path, row_group_size=sizes["chunk"])
        return
    matrix = sj.CSR(None, ids[kept], indptr, num_cols=items)
    sj.SparseDataset(matrix, np.arange(rows), np.arange(items)).save(path)


def _entries_read_per_second(data, chunk: int) -> float:
    """All chunks one after the other, by one thread, with the file in the page cache."""
    entries, start = 0, time.perf_counter()
    for first in range(0, data.num_rows, chunk):
        entries += data.read(first, min(first + chunk, data.num_rows)).nse
    return entries / (time.perf_counter() - start)


def _write_table(report: dict) -> None:
    results = report["results"]
    resident = {r["part"]: r["examples_per_second"] for r in results}.get("resident")
    rows = []
    for r in results:
        speed, read = r["examples_per_second"], r["entries_read_per_second"]
        rows.append(
            [
                _PARTS[r["part"]],
                f"{speed:,.0f}",
                f"{speed / resident:.3f}" if resident else "-",
                f"{1e3 * r['batch'] / speed:.1f}",
                f"{speed * r['entries'] / 1e6:.1f}",
                "-" if read is None else f"{read / 1e6:.1f}",
                f"{r['file_bytes'] / 1e6:.0f}",
                f"{r['peak_host_bytes'] / 1e9:.2f}",
            ]
        )
    columns = [
        "data",
        "examples/s",
        "of resident",
        "ms a step",
        "M entries/s trained on",
        "M entries/s read alone",
        "MB on disk",
        "peak host GB",
    ]
    first = results[0]
    about = (
        f"{first['items']:,} items, {first['hidden']:,} hidden units, "
        f"{first['rows']:,} examples of {first['entries']} entries, "
        f"{first['batch']:,} a step, {first['chunk']:,} a chunk."
    )
    lines = [origin(report), "", about, "", *table(columns, rows)]
    write_section("streaming", lines)


if __name__ == "__main__":
    main()
