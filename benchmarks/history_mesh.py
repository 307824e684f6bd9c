"""Times `fit` of models of histories on one GPU and on several.

    CUDA_VISIBLE_DEVICES=0   python benchmarks/history_mesh.py MODEL 1 1 BATCH FILE
    CUDA_VISIBLE_DEVICES=0,1 python benchmarks/history_mesh.py MODEL DATA GROUP BATCH FILE

MODEL is hstu or sasrec, DATA and GROUP are the sizes of the axes "data" and "model"; `1 1` sets
no mesh. With `--negatives 0` the softmax is over all items. A line of JSON with milliseconds of a
step, of the fastest epoch, is added to FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

import jax
import numpy as np
import pyarrow as pa

import sparsejax as sj


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("hstu", "sasrec"))
    parser.add_argument("data", type=int)
    parser.add_argument("group", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=65_536)
    parser.add_argument("--zipf", type=float, help="of the items; uniform by default")
    parser.add_argument("--negatives", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(50), 1, given.users).astype(int), 2, 201)
    total = int(lengths.sum())
    if given.zipf:
        items = (rng.zipf(given.zipf, total) * 7919) % given.items
    else:
        items = rng.integers(0, given.items, total)
    histories = sj.read_sequences(
        pa.table(
            {
                "user": np.repeat(np.arange(given.users), lengths),
                "item": items,
                "time": np.arange(total) * 60,
            }
        )
    )
    made = {"hstu": sj.HSTUConfig, "sasrec": sj.SASRecConfig}[given.model]
    config = made(
        max_length=200,
        width=given.width,
        heads=4,
        negatives=given.negatives or None,
        dtype="bfloat16",
    )
    devices = given.data * given.group
    mesh = contextlib.nullcontext()
    if devices > 1:
        chosen = jax.devices()[:devices]
        mesh = jax.set_mesh(
            sj.make_mesh(data=given.data, model=given.group, devices=chosen)
        )
    with mesh:
        model, optimizer = sj.build(config, histories, sj.optimizers.adam(1e-3))
        found = sj.fit(
            model, optimizer, histories, num_epochs=4, batch_size=given.batch, seed=0
        )
    fastest = max(entry["examples_per_second"] for entry in found)
    row = {name: value for name, value in vars(given).items() if name != "file"} | {
        "visible": jax.device_count(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "device": jax.devices()[0].device_kind,
        "ms": round(1e3 * given.batch / fastest, 3),
        "losses": [round(entry["loss"], 5) for entry in found],
    }
    print(json.dumps(row))
    with given.file.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
