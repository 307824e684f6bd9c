"""Does a training on rows in host memory end with the same bits, however often it is killed?

    python benchmarks/host_kills.py --output benchmarks/results/host_kills.json

A DLRM with a dynamic table, a tenth of whose rows are on the device at a time, trains on clicks of
more users than the table has rows. So rows come, are written back and are taken from users all the
time, and a checkpoint is written after each epoch. Processes that train it get `kill -9` at random
moments, again and again, and the next one resumes. In the end the losses, the ids and their rows
must be those of a training that nobody killed, on a device that has all rows. Several trainings go
on beside each other; every other one has its rows in files.
"""

import argparse
import concurrent.futures
import hashlib
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
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import DLRMConfig, DynamicTables

EXAMPLES, BATCH, EPOCHS, HOST_ROWS, ROWS = 4096, 64, 30, 2560, 256
SCHEMA = sj.ClickSchema(
    "click", {"age": sj.data.DenseColumn()}, {"user": sj.data.KeyColumn()}
)


def clicks():
    rng = np.random.default_rng(0)
    user = np.minimum(rng.zipf(1.2, EXAMPLES), 10**9) + rng.integers(0, 2000, EXAMPLES)
    names = user.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    columns = {
        "click": (user + rng.integers(0, 3, EXAMPLES)) % 2,
        "age": rng.random(EXAMPLES),
        "user": names,
    }
    return sj.read_clicks(pa.table(columns), SCHEMA)


def train(kind, folder, result):
    """The training of a process; it goes on where the one before was."""
    tables = DynamicTables(num_rows=ROWS, host_rows=HOST_ROWS)
    if kind == "device":
        tables = DynamicTables(num_rows=HOST_ROWS)
    if kind == "files":
        tables = DynamicTables(num_rows=ROWS, host_rows=HOST_ROWS, host_path=folder)
    data = clicks()
    config = DLRMConfig(dim=8, bottom=(8,), top=(8,), dynamic=tables)
    model: Any = sj.embeddings.build_click_model(
        config, num_dense=1, features=data.num_ids, rngs=nnx.Rngs(0)
    )
    optimizer = sj.Optimizer(model, sj.optimizers.adagrad(0.05))

    def begun(_):
        pathlib.Path(folder, "begun").touch()

    history = sj.fit(
        model,
        optimizer,
        data,
        batch_size=BATCH,
        num_epochs=EPOCHS,
        checkpoint_dir=pathlib.Path(folder, "run"),
        checkpoint_seconds=0.0,
        resume=True,
        after_epoch=begun,
    )
    file = pathlib.Path(folder, "user.parquet")
    model.embeddings.save_table("user", file)
    stats = model.embeddings.stats()["user"]
    found = {
        "losses": [epoch["loss"] for epoch in history],
        "rows": hashlib.sha256(file.read_bytes()).hexdigest(),
        "evicted": stats.evicted,
    }
    pathlib.Path(result).write_text(json.dumps(found), encoding="utf-8")


def one(kind, kills, seed, folder):
    """What came of a training after so many kills."""
    rng, result = np.random.default_rng(seed), folder / "result.json"
    begun, done, cut = folder / "begun", 0, 0
    while True:
        begun.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, __file__, "--train", kind, str(folder), str(result)],
            env=os.environ
            | {
                "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
        )
        while done < kills and process.poll() is None and not begun.exists():
            time.sleep(0.005)
        if done == kills:
            if process.wait():
                raise RuntimeError(f"{kind}, seed {seed}: the last process has failed")
            break
        time.sleep(rng.random())
        if process.poll() is None:
            done += 1
            process.kill()
        process.wait()
        # What orbax writes last.
        steps = [p for p in (folder / "run").iterdir() if p.name.isdigit()]
        cut += any(not (p / "_CHECKPOINT_METADATA").exists() for p in steps)
        if result.exists():
            break  # it has trained all
    found = json.loads(result.read_text(encoding="utf-8"))
    return {"kind": kind, "kills": done, "within a checkpoint": cut, **found}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each training")
    parser.add_argument("--trainings", type=int, default=6)
    parser.add_argument("--output", help="a JSON file")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(*args.train)
    with tempfile.TemporaryDirectory() as base:
        folders = [pathlib.Path(base, str(i)) for i in range(args.trainings + 1)]
        for folder in folders:
            folder.mkdir()
        kinds = ["device", *["memory", "files"] * args.trainings]
        whole = one(kinds[0], 0, 0, folders[0])
        with concurrent.futures.ThreadPoolExecutor(args.trainings) as pool:
            killed = [
                *pool.map(
                    one,
                    kinds[1:],
                    [args.kills] * args.trainings,
                    range(1, 99),
                    folders[1:],
                )
            ]
    same = [
        run["losses"] == whole["losses"] and run["rows"] == whole["rows"]
        for run in killed
    ]
    kept = "kind", "kills", "within a checkpoint", "evicted"
    found = {
        "steps": EPOCHS * EXAMPLES // BATCH,
        "kills": sum(run["kills"] for run in killed),
        "within a checkpoint": sum(run["within a checkpoint"] for run in killed),
        "losses, ids and rows are those of the device": all(same),
        "trainings": [{name: run[name] for name in kept} for run in killed],
    }
    text = json.dumps(found, indent=2)
    print(text)
    if args.output:
        pathlib.Path(args.output).write_text(text + "\n", encoding="utf-8")
    if not all(same):
        sys.exit(1)


if __name__ == "__main__":
    main()
