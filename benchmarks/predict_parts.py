"""Times prediction in parts against `Predictor.recommend`, and what killed processes cost.

    python benchmarks/predict_parts.py --rows 300000

Makes a prepared folder and an autoencoder that is not trained, in a temporary folder. Then

1. `Predictor.recommend` for all rows, which are in memory, in a process that has compiled
   its programs; only these calls count;
2. `sparsejax predict --part` for the same rows as one part: all that the command does, from
   its start to its end. Medians of three, in turn with those of 1;
3. 1,000 parts by `write_parts` while ten of its processes are killed.

Writes `results/predict_parts.json`, or the file of `--output`. Seconds of cores are the processor's, of all threads.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from flax import nnx

import sparsejax as sj
from sparsejax.data.files.entries import Entries
from sparsejax.data.files.stores import Place
from sparsejax.data.prepared import folder_files
from sparsejax.data.prepared.folder import (
    DataFolder,
    Manifest,
    read_rows,
    vocabulary_file,
    vocabulary_hash,
)
from sparsejax.predictors import workers
from sparsejax.predictors.parts import Parts

_RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "predict_parts.json"
_HIDDEN, _K, _ROW_ENTRIES = 64, 10, 20
_GROUP_ROWS = 2**20 // (_ROW_ENTRIES + 1)  # as `prepare` makes them
_PARTS, _KILLS = 1000, 10
_TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--output", type=pathlib.Path, default=_RESULTS)
    arguments = parser.parse_args()
    output = vars(arguments).pop("output")
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        predictor, data = make(pathlib.Path(folder), "task", **vars(arguments))
        script = [sys.executable, __file__, "recommend", predictor, data]
        command = [sys.executable, "-m", "sparsejax", "predict", predictor, data]
        command += ["--parts", "1", "--part", "0", "--k", str(_K), "--exclude-seen"]
        command += ["--no-compilation-cache", "--out"]
        runs: dict[str, list[dict[str, float]]] = {"recommend": [], "task": []}
        for turn in range(_TURNS):
            runs["recommend"].append(json.loads(subprocess.check_output(script)))
            out = f"{folder}/out{turn}"
            task = functools.partial(subprocess.run, [*command, out], check=True)
            runs["task"].append(timed(task))
        recommend, task = (
            {name: statistics.median(run[name] for run in found) for name in found[0]}
            for found in runs.values()
        )
        small = {"rows": arguments.rows // 10, "items": arguments.items}
        _, data = make(
            pathlib.Path(folder), "parts", group_rows=small["rows"] // _PARTS, **small
        )
        undisturbed = with_kills(predictor, data, f"{folder}/undisturbed", 0)
        killed = with_kills(predictor, data, f"{folder}/killed", _KILLS)
    load.append(os.getloadavg()[0])
    report = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/predict_parts.py --rows {arguments.rows} "
        f"--items {arguments.items}",
        "versions": {"jax": jax.__version__, "pyarrow": pa.__version__},
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before_and_after": [round(each, 1) for each in load],
        **vars(arguments),
        "hidden": _HIDDEN,
        "recommend": recommend,
        "task": task,
        "all": runs,
        "share_of_recommend": {
            name: round(recommend[name] / task[name], 3) for name in task
        },
        "parts": {"rows": small["rows"], "undisturbed": undisturbed, "killed": killed},
    }
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def make(
    folder: pathlib.Path,
    name: str,
    rows: int,
    items: int,
    group_rows: int = _GROUP_ROWS,
) -> tuple[str, str]:
    """Writes a predictor and a prepared folder of random rows."""
    rng = np.random.default_rng(0)
    names = np.arange(items).astype("T")
    predictor = folder / "model.predictor"
    if not predictor.exists():
        config = sj.NetworkConfig.autoencoder(hidden=(_HIDDEN,))
        model = sj.FeedForward(config, inputs=items, outputs=items, rngs=nnx.Rngs(0))
        sj.export_predictor(model, predictor, k=_K, names=names)
    steps = rng.integers(1, items // _ROW_ENTRIES, (rows, _ROW_ENTRIES))
    columns = steps.cumsum(axis=1).astype(np.int32).reshape(-1)
    indptr = np.arange(rows + 1) * _ROW_ENTRIES
    users = pa.array(np.arange(rows)).cast(pa.large_string())
    data = Place.of(folder / name)
    folder_files.GROUP_ENTRIES = group_rows * (_ROW_ENTRIES + 1)
    with folder_files.part_writer(data, "train", name) as writer:
        writer.add(Entries(indptr, {"indices": columns}, {"names": users}))
    manifest = Manifest(
        id=name,
        indicator=True,
        num_items=items,
        vocabulary=vocabulary_hash(names),
        train=tuple(writer.files),
        test=(),
        left_out={},
        skipped={},
        settings={},
        vocabulary_file=vocabulary_file(None),
    )
    folder_files.finish(data, manifest, names, np.zeros(items, np.int64))
    return str(predictor), str(folder / name)


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds that a call takes, and seconds of cores, those of child processes too."""
    start, cpu = time.perf_counter(), sum(os.times()[:4])
    call()
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "core_seconds": round(sum(os.times()[:4]) - cpu, 2),
    }


def recommend_alone(path: str, data: str) -> dict[str, float]:
    """Only the calls of `recommend`, for the rows of each row group."""
    predictor, folder = sj.load_predictor(path), DataFolder.find(data)
    assert folder is not None
    matrices = []
    for rows in map(read_rows, folder.groups()):
        indptr = np.append(0, np.cumsum(rows.lengths))
        size = folder.manifest.num_items
        matrices.append(sj.CSR(None, rows.indices, indptr, num_cols=size))
    few = matrices[0].take(np.arange(2000), nse=2000 * _ROW_ENTRIES)
    predictor.recommend(few, k=_K, exclude=few)
    return timed(lambda: [predictor.recommend(x, k=_K, exclude=x) for x in matrices])


def with_kills(predictor: str, data: str, out: str, kills: int) -> dict[str, Any]:
    """What many parts take while processes that make them are killed."""
    begun: collections.Counter[int] = collections.Counter()
    doomed = set(random.Random(0).sample(range(_PARTS), kills))
    parts = Parts.of(predictor, data, out, count=_PARTS, k=_K, exclude_seen=True)

    class Doomed(workers.Scorer):
        def ask(self, parts: Parts, part: int) -> None:
            super().ask(parts, part)
            begun[part] += 1
            if part in doomed:
                doomed.remove(part)
                time.sleep(0.02)  # somewhere in the middle of the part
                os.kill(self.pid, signal.SIGKILL)

    scorer, workers.Scorer = workers.Scorer, Doomed
    try:
        found = timed(lambda: workers.write_parts(parts))
    finally:
        workers.Scorer = scorer
    parts.finish()
    again = sum(begun.values()) - _PARTS
    return {"kills": kills, **found, "parts_begun_again": again}


if __name__ == "__main__":
    if sys.argv[1:2] == ["recommend"]:
        print(json.dumps(recommend_alone(*sys.argv[2:])))
    else:
        main()
