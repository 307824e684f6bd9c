"""Times `sparsejax.prepare` on generated events.

    python benchmarks/prepare.py --events 100000000 --memory 4GB

    python benchmarks/prepare.py --spark --events 6000000

The first makes events in a folder (text users and items, integer times; the popularity of
items falls as in a shop), prepares them in a process of its own, and writes
`results/prepare.json`, or the file of `--output`. With `--folder` the events stay there for
the next time. Seconds of a core are the processor's, of all threads; peak memory is the whole
process's (VmHWM); peak disk is what the engine spills and what it has written, without the
events, looked at each second. The load average says how busy the machine was with other work.
Under `taskset` the engine takes as many threads as it has cores.

The second needs the extra `spark` and Java. It times `sparsejax.spark.prepare` and plain SQL
of Spark that does the same (deduplicate, count, rank, join, collect lists, write) in turn, in
one session on this machine, and adds medians of three to the file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from report import peak_host_bytes

import sparsejax as sj

_RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "prepare.json"
_BLOCK = 2**20  # events that are generated at a time
_EVENTS_PER_USER, _EVENTS_PER_ITEM = 20, 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=20_000_000)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, default=_RESULTS)
    parser.add_argument("--spark", action="store_true")
    arguments = parser.parse_args()
    if arguments.spark:
        return _save(arguments.output, on_spark(arguments.events))
    with contextlib.ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / f"events-{arguments.events}.parquet"
        if not source.exists():
            make_events(source, arguments.events)
        load = os.getloadavg()[0]
        result = watched(source, arguments.memory)
        size = source.stat().st_size
        load = [load, os.getloadavg()[0]]
    report = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/prepare.py --events {arguments.events} "
        f"--memory {arguments.memory}",
        "versions": {"duckdb": duckdb.__version__, "pyarrow": pa.__version__},
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before_and_after": [round(each, 1) for each in load],
        "events": arguments.events,
        "file_bytes": size,
        **result,
        "events_per_core_second": round(arguments.events / result["core_seconds"]),
    }
    _save(arguments.output, report)


def _save(path: pathlib.Path, new: dict[str, Any]) -> None:
    """Replaces the results of one kind; those of the other kind stay."""
    old = json.loads(path.read_text()) if path.exists() else {}
    kept = {"spark": old["spark"]} if "spark" in old else {}
    report = old | new if "spark" in new else new | kept
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(new, indent=2))


def make_events(path: pathlib.Path, count: int) -> None:
    """Writes events of random users, and of items of which few are frequent."""
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


def watched(source: pathlib.Path, memory: str) -> dict[str, float]:
    """The results of `timed` in another process, and the peak of its files."""
    command = [sys.executable, __file__, "time", str(source), memory]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            time.sleep(1)
            peak = max(peak, _disk_bytes(source.parent, but=source))
        assert process.stdout is not None
        result = process.stdout.read()
    if process.returncode:
        raise SystemExit(process.returncode)
    return json.loads(result) | {"peak_disk_bytes": peak}


def _disk_bytes(folder: pathlib.Path, but: pathlib.Path) -> int:
    """What the files below a folder take on disk, without one of them."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the engine removes its files
            if path.is_file() and path != but:
                total += path.stat().st_blocks * 512
    return total


def timed(path: str, memory: str) -> dict[str, float]:
    """Prepares a file, holding out the last entry of each user."""
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
    }


def on_spark(events: int) -> dict[str, Any]:
    """Times Spark: what this package does, and plain SQL."""
    import pyspark
    from pyspark.sql import SparkSession

    # Spark would take the `python3` that it finds.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    cores = len(os.sched_getaffinity(0))
    builder = SparkSession.builder.master(f"local[{cores}]")
    settings = {
        "spark.driver.memory": "6g",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(2 * cores),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    found: dict[str, list[float]] = {}

    def measure(name: str, call: Callable[[], Any]) -> None:
        start, cpu = time.perf_counter(), _core_seconds()
        call()
        seconds, cores = time.perf_counter() - start, _core_seconds() - cpu
        found.setdefault(f"{name}seconds", []).append(round(seconds, 2))
        found.setdefault(f"{name}core_seconds", []).append(round(cores, 2))

    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "events.parquet")
        make_events(source, events)
        frame = session.read.parquet(str(source))
        for turn in range(4):
            if turn == 1:
                found.clear()  # the first one warmed up
            sql, out = f"{folder}/sql{turn}", f"{folder}/out{turn}"
            measure("sql_", functools.partial(plain_sql, frame, sql))
            measure("", functools.partial(sj.spark.prepare, frame, out))
    session.stop()
    load.append(os.getloadavg()[0])
    median = {name: float(np.median(values)) for name, values in found.items()}
    report = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/prepare.py --spark --events {events}",
        "versions": {"pyspark": pyspark.__version__, "pyarrow": pa.__version__},
        "cores": cores,
        "load_average_before_and_after": [round(each, 1) for each in load],
        "events": events,
        **median,
        "ratio": round(median["seconds"] / median["sql_seconds"], 2),
        "core_ratio": round(median["core_seconds"] / median["sql_core_seconds"], 2),
        "all": found,
        "events_per_core_second": round(events / median["core_seconds"]),
    }
    return {"spark": report}


def _core_seconds() -> float:
    """What this process, those that it has started and theirs have taken of processors."""
    parents, ticks = {}, {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            parents[process] = int(fields[1])
            ticks[process] = sum(map(int, fields[11:15]))  # with children that ended
    total, below = 0, [os.getpid()]
    while below:
        process = below.pop()
        total += ticks[process]
        below += [child for child, parent in parents.items() if parent == process]
    return total / os.sysconf("SC_CLK_TCK")


def plain_sql(frame: Any, out: str) -> None:
    """What a user of Spark would write, in the quickest form of some that were tried.

    One shuffle, by user, serves to deduplicate and to collect.
    """
    session = frame.sparkSession
    pairs = session.sql(
        "SELECT DISTINCT user, item "
        "FROM (SELECT user, item FROM {frame} DISTRIBUTE BY user)",
        frame=frame,
    ).persist()
    session.sql(
        "SELECT item, n, row_number() OVER (ORDER BY n DESC, item) - 1 AS code FROM "
        "(SELECT item, count(*) AS n FROM {pairs} GROUP BY item)",
        pairs=pairs,
    ).write.parquet(f"{out}/vocabulary")
    session.sql(
        "SELECT user AS row, sort_array(collect_list(code)) AS indices "
        "FROM {pairs} JOIN {codes} USING (item) GROUP BY user",
        pairs=pairs,
        codes=session.read.parquet(f"{out}/vocabulary"),
    ).write.parquet(f"{out}/train")
    pairs.unpersist()


if __name__ == "__main__":
    if sys.argv[1:2] == ["time"]:
        print(json.dumps(timed(*sys.argv[2:])))
    else:
        main()
