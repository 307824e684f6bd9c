"""Times `sparsejax.prepare` on generated events.

    python benchmarks/prepare.py --events 100000000 --memory 4GB

It makes events in a folder (text users and items, integer times; the popularity of items falls
as in a shop), prepares them in a separate process, and writes `results/prepare.json`, or the file
that `--output` names. With `--folder` the events are kept for the next run. Processor seconds are
summed over all threads; peak memory is that of the whole process (VmHWM). The load average shows
how busy the machine was with other work. Under `taskset` the engine uses as many threads as it has
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from report import RESULTS, peak_host_bytes, save, versions

import sparsejax as sj

_BLOCK = 2**20  # number of events that are generated at a time
_EVENTS_PER_USER, _EVENTS_PER_ITEM = 20, 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=20_000_000)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "prepare.json")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / f"events-{arguments.events}.parquet"
        if not source.exists():
            make_events(source, arguments.events)
        load = os.getloadavg()[0]
        # A separate process, so that its peak memory is that of `prepare` alone.
        words = [sys.executable, __file__, "time", str(source), arguments.memory]
        result = json.loads(subprocess.check_output(words))
        size = source.stat().st_size
        load = [load, os.getloadavg()[0]]
    report = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/prepare.py --events {arguments.events} "
        f"--memory {arguments.memory}",
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before_and_after": [round(each, 1) for each in load],
        "events": arguments.events,
        "file_bytes": size,
        **result,
        "events_per_core_second": round(arguments.events / result["core_seconds"]),
    }
    save(report, arguments.output)


def make_events(path: pathlib.Path, count: int) -> None:
    """Writes events of random users. A few of the items are frequent."""
    rng = np.random.default_rng(0)
    users, items = count // _EVENTS_PER_USER + 1, count // _EVENTS_PER_ITEM + 1
    fields = {"user": pa.string(), "item": pa.string(), "time": pa.int64()}
    unfinished = path.with_suffix(".tmp")
    with pq.ParquetWriter(unfinished, pa.schema(list(fields.items()))) as writer:
        for start in range(0, count, _BLOCK):
            size = min(_BLOCK, count - start)
            user = rng.integers(0, users, size)
            item = (items * rng.random(size) ** 3).astype(np.int64)
            columns = [_named("user-", user), _named("item-", item)]
            writer.write_table(
                pa.table([*columns, np.arange(start, start + size)], list(fields))
            )
    unfinished.rename(path)


def _named(prefix: str, numbers: np.ndarray) -> pa.Array:
    texts = pa.array(numbers).cast(pa.string())
    return pc.call_function("binary_join_element_wise", [pa.scalar(prefix), texts, ""])


def timed(path: str, memory: str) -> dict[str, Any]:
    """Times `prepare` on a file, which holds out the last entry of each user."""
    start, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory(dir=pathlib.Path(path).parent) as folder:
        out = pathlib.Path(folder, "prepared")
        manifest = sj.prepare(path, out, split_last=1, memory=memory)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "core_seconds": round(time.process_time() - cpu, 2),
        "peak_bytes": peak_host_bytes(),
        "entries": manifest.num_entries("train") + manifest.num_entries("test"),
        "rows": manifest.num_rows("train"),
        "items": manifest.num_items,
        "versions": versions(),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["time"]:
        print(json.dumps(timed(*sys.argv[2:])))
    else:
        main()
