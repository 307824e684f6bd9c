"""Times the readers on a file like the ratings of MovieLens-20M.

    python benchmarks/readers.py

Makes the file (20 million pairs, 0.5 GB) and other forms of it in a temporary folder,
reads each in a process of its own, and writes `results/readers.json` and the table in
README.md.
Peak memory is the whole process's (VmHWM), with Python and JAX imported.
"""

from __future__ import annotations

import cProfile
import datetime
import functools
import json
import os
import pathlib
import pstats
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import scipy
from report import peak_host_bytes

import sparsejax as sj
from sparsejax.data.sets import writers
from sparsejax.whole_files import whole_text_file

_RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "readers.json"
_README = pathlib.Path(__file__).resolve().parent / "README.md"
_PAIRS, _USERS, _MOVIES = 20_000_263, 138_493, 26_744
_CHUNK_ROWS = 2**16
# Where the time of the first file goes: (file, function) of the profile.
_PARTS = {
    "pyarrow: CSV, values, names of each block": [("block.py", "blocks")],
    "names over all blocks": [("names.py", "add"), ("names.py", "finish")],
    "SciPy: COO to CSR, adding duplicates": [("_coo.py", "tocsr")],
    "SciPy: sorting rows in the vocabulary's order": [("sparse.py", "from_scipy")],
    "all": [("readers.py", "read")],
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = make_files(pathlib.Path(folder))
        results = {name: in_a_process("time", path) for name, path in paths.items()}
        scanned = in_a_process("scan", paths["saved data set"])
        results["saved data set, chunk by chunk"] = scanned
        parts = in_a_process("profile", paths["pairs, CSV"])
    report = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/readers.py",
        "versions": {"pyarrow": pa.__version__, "scipy": scipy.__version__},
        "cpus": os.cpu_count(),
        "pairs": _PAIRS,
        "files": results,
        "seconds_of_parts": parts,
    }
    _RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items())
    lines = [
        f"{versions}, {report['cpus']} CPUs; {report['date']}.",
        "",
        "| form | MB | wall s | CPU s | peak GB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {row['megabytes']:.0f} | {row['seconds']:.1f} | "
            f"{row['cpu_seconds']:.1f} | {row['peak_gigabytes']:.2f} |"
        )
    lines += ["", "| part of the CSV, under a profiler | wall s |", "| --- | --- |"]
    lines += [f"| {name} | {seconds:.1f} |" for name, seconds in parts.items()]
    print("\n".join(lines))
    before, _, rest = _README.read_text().partition("<!-- readers -->\n")
    _, _, after = rest.partition("<!-- end -->")
    marked = "<!-- readers -->\n" + "\n".join(lines) + "\n<!-- end -->"
    _README.write_text(before + marked + after)


def make_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Ratings with lognormal lengths of rows and zipf movies, in several forms."""
    rng = np.random.default_rng(0)
    share = rng.lognormal(0, 1.1, _USERS)
    lengths = 20 + rng.multinomial(_PAIRS - 20 * _USERS, share / share.sum())
    popularity = np.arange(1, _MOVIES + 1) ** -0.9
    movies = rng.choice(_MOVIES, _PAIRS, p=popularity / popularity.sum())
    table = pa.table(
        {
            "userId": np.repeat(np.arange(1, _USERS + 1), lengths),
            "movieId": (rng.permutation(131_262)[:_MOVIES] + 1)[movies],
            "rating": rng.integers(1, 11, _PAIRS) / 2,
            "timestamp": rng.integers(789_652_009, 1_427_784_002, _PAIRS),
        }
    )
    names = ("ratings.csv", "pairs.parquet", "text", "adjacency", "saved.parquet")
    csv, parquet, text, adjacency, saved = (folder / name for name in names)
    pyarrow.csv.write_csv(table, csv)
    pq.write_table(table, parquet)
    data = sj.read(parquet)
    data.save(saved)
    with whole_text_file(text) as file:
        writers.write_text(file, data)
    with whole_text_file(adjacency) as file:
        writers.write_adjacency(file, data.without_values())
    return {
        "pairs, CSV": csv,
        "text": text,
        "adjacency": adjacency,
        "pairs, Parquet": parquet,
        "saved data set": saved,
    }


def in_a_process(what: str, path: pathlib.Path) -> dict[str, float]:
    command = [sys.executable, __file__, what, str(path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def scanned(path: str) -> int:
    """Reads a saved data set as `fit` does; the number of its entries."""
    data, entries = sj.data.scan_parquet(path), 0
    for start in range(0, data.num_rows, _CHUNK_ROWS):
        entries += data.read(start, min(start + _CHUNK_ROWS, data.num_rows)).nse
    return entries


def timed(path: str, read=lambda path: sj.read(path).num_entries) -> dict[str, float]:
    start, cpu = time.perf_counter(), time.process_time()
    entries = read(path)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "megabytes": os.path.getsize(path) / 1e6,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_gigabytes": peak_host_bytes() / 1e9,
        "entries": entries,
    }


def profiled(path: str) -> dict[str, float]:
    with cProfile.Profile() as profile:
        sj.read(path)
    parts = dict.fromkeys(_PARTS, 0.0)
    for (file, _, function), (*_, total, _) in pstats.Stats(profile).stats.items():  # pyrefly: ignore[missing-attribute]
        for name, functions in _PARTS.items():
            if (os.path.basename(file), function) in functions:
                parts[name] += total
    return parts


if __name__ == "__main__":
    if len(sys.argv) == 3:
        functions = {
            "time": timed,
            "scan": functools.partial(timed, read=scanned),
            "profile": profiled,
        }
        print(json.dumps(functions[sys.argv[1]](sys.argv[2])))
    else:
        main()
