"""Trains autoencoders from disk, a chunk at a time, and from resident data.

    python benchmarks/streaming.py run [--commit NAME]    on a GPU
    python benchmarks/streaming.py table                  anywhere

One autoencoder has 8,000,000 items in and out, as in scaling.py. The other has the shape
of MovieLens-20M; its steps are a hundred times as fast. Both use RMSProp, sigmoid
cross-entropy, zipf ids and `fit(..., fused=True)`, on a file in a temporary folder. The
first epoch compiles. The epochs after it are timed; each of them reads all of the file
again. Peak host memory is that of a process (VmHWM) in which the data was not made. On a
CPU all data is one chunk, only to see that the program runs.
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
from typing import NamedTuple

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, peak_host_bytes, table, write_section
from workloads import autoencoder, zipf_ids

_SKEW, _EPOCHS = 0.8, 4


class _Workload(NamedTuple):
    """A chunk is whole row groups, of 65,536 rows in a saved data set."""

    items: int
    hidden: tuple[int, ...]
    rows: int
    entries: int  # drawn for a row
    batch: int
    chunk: int


_WORKLOADS = {
    "8M": _Workload(8_000_000, (256,), 2**17, 64, 1_024, 2**16),
    "ml20m": _Workload(27_278, (1_024,) * 3, 2**19, 144, 256, 2**17),
}
_SOURCES = {
    "resident": "resident",
    "saved": "saved data set, chunk by chunk",
    "lists": "table of lists of integers, chunk by chunk",
}


def main() -> None:
    parts = {f"{name}, {source}": {} for name in _WORKLOADS for source in _SOURCES}
    command(__doc__, __file__, parts, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj

    name, source = part.split(", ")
    work = _WORKLOADS[name]
    device = jax.devices()[0]
    if device.platform == "cpu":
        work = work._replace(
            items=work.items // 100, hidden=(8,), rows=work.rows // 100
        )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "data.parquet")
        spawned = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as other:
            other.submit(_write, path, source, work).result()
        if source == "resident":
            data, read = sj.SparseDataset.load(path), None
        else:
            names = np.arange(work.items) if source == "lists" else None
            data = sj.data.scan_parquet(path, features=names, chunk_rows=work.chunk)
            read = _entries_read_per_second(data, work.chunk)
        config = autoencoder(work.hidden)
        rngs = nnx.Rngs(0)
        network = sj.FeedForward(
            config, inputs=work.items, outputs=work.items, rngs=rngs
        )
        optimizer = sj.Optimizer(network, sj.optimizers.rmsprop(1e-3))
        history = sj.fit(
            network,
            optimizer,
            data,
            batch_size=work.batch,
            num_epochs=_EPOCHS,
            fused=True,
        )
        speeds = [entry["examples_per_second"] for entry in history[1:]]
        memory = device.memory_stats() or {}
        yield {
            "workload": name,
            "source": source,
            **work._asdict(),
            "entries": data.num_entries / data.num_rows,
            "file_bytes": os.path.getsize(path),
            "examples_per_second": statistics.median(speeds),
            "slowest_and_fastest_epoch": [min(speeds), max(speeds)],
            "entries_read_per_second": read,
            "peak_host_bytes": peak_host_bytes(),
            "peak_device_bytes": memory.get("peak_bytes_in_use"),
            "losses": [entry["loss"] for entry in history],
            "versions": {"jax": jax.__version__, "device": device.device_kind},
        }


def _write(path: str, source: str, work: _Workload) -> None:
    """Rows of popular and rare items, sorted; an item that a row has twice counts once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import sparsejax as sj

    rng = np.random.default_rng(0)
    ids = zipf_ids(rng, (work.rows, work.entries), work.items, _SKEW)
    ids.sort(axis=1)
    kept = np.diff(ids, axis=1, prepend=-1) != 0
    indptr = np.append(0, np.cumsum(kept.sum(axis=1))).astype(np.int32)
    if source == "lists":
        lists = pa.ListArray.from_arrays(indptr, ids[kept])
        found = pa.table({"items": lists})
        pq.write_table(found, path, row_group_size=2**16)
        return
    matrix = sj.CSR(None, ids[kept], indptr, num_cols=work.items)
    names = np.arange(work.rows), np.arange(work.items)
    sj.SparseDataset(matrix, *names).save(path)


def _entries_read_per_second(data, chunk: int) -> float:
    """All chunks one after the other, for the second time, so from the page cache."""
    speeds = []
    for _ in range(2):
        entries, start = 0, time.perf_counter()
        for first in range(0, data.num_rows, chunk):
            entries += data.read(first, min(first + chunk, data.num_rows)).nse
        speeds.append(entries / (time.perf_counter() - start))
    return speeds[-1]


def _write_table(report: dict) -> None:
    results = report["results"]
    resident = {
        r["workload"]: r["examples_per_second"]
        for r in results
        if r["source"] == "resident"
    }
    rows = []
    for r in results:
        speed, read = r["examples_per_second"], r["entries_read_per_second"]
        rows.append(
            [
                r["workload"],
                _SOURCES[r["source"]],
                f"{speed:,.0f}",
                f"{speed / resident[r['workload']]:.3f}",
                f"{1e3 * r['batch'] / speed:.2f}",
                f"{speed * r['entries'] / 1e6:.1f}",
                "-" if read is None else f"{read / 1e6:.1f}",
                f"{r['file_bytes'] / 1e6:.0f}",
                f"{r['peak_host_bytes'] / 1e9:.2f}",
            ]
        )
    columns = [
        "autoencoder",
        "data",
        "examples/s",
        "of resident",
        "ms a step",
        "M entries/s trained on",
        "M entries/s read alone",
        "MB on disk",
        "peak host GB",
    ]
    write_section("streaming", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
