"""Times `fit` of models of histories on one GPU and on two, under two laws of items.

    python benchmarks/history_mesh.py run [--commit NAME]     on two GPUs of one host
    python benchmarks/history_mesh.py table                   anywhere

HSTU and SASRec have width 256, 4 heads, 2 blocks and 1,024 sampled negatives among 1,000,000
items, or the exact softmax over 200,000. Histories have lognormal lengths with a mean of 70 entries,
at most 200 of which are read. The rule is Adam, layers compute in bfloat16. A part is one process:
model, sizes of the axes "data" and "model", histories of a batch, law of the items, loss. One GPU
has no mesh and is the only one that the process sees. A part trains twice from the same seed, and
says whether both trainings end with the same bits. *Narrow* sends vectors of items and their
gradients as bfloat16; *same* is `fit(deterministic=True)`.

A step of HSTU by the bytes that a second GPU adds, predicted at 300 GB/s between two GPUs and 3 TB/s
of memory, for 2,048 histories in all. Each GPU then has 73,000 tokens, 75,000 places for distinct
items, and rows of 1 KB::

    us                                       data=2   model=2
    a step with half of the histories         5,220     5,220   measured on one GPU
    rows to the other GPU                         -       250   77 MB; half of it stays in place
    rows of tokens from those of items          100       100   75 MB read, 150 written
    gradients of distinct items                  75        75   150 MB read, 75 written
    these to the other GPU                      250       250   77 MB
    rows and Adam of the other's items          130         -   70,000 rows, three arrays
    gradients of layers                          50        50   2.6 MB
    in all                                    5,825     5,945
    to one GPU, 9,380                         1.61x     1.58x
    twice the batch: 9,380 + twice the rest   1.77x     1.73x

Before, each lookup gathered its own gradients (150 MB), all entries were sorted on both GPUs, and
at twice the batch all rows were taken for touched, so that Adam ran over all of them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, wait_for_turn, write_section

_EPOCHS, _USERS = 4, 65_536
# Loss: the number of items, and of sampled negatives.
_LOSSES = {"sampled": (1_000_000, 1024), "exact": (200_000, None)}
_CASES = (
    ("uniform", "sampled", 2048),
    ("zipf", "sampled", 2048),
    ("uniform", "exact", 512),
)
_MODELS = "hstu", "sasrec"
# Data and model, and further arguments of `fit`.
_WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "data": (2, 1, {}),
    "model": (1, 2, {}),
    "data_narrow": (2, 1, {"wire_dtype": "bfloat16"}),
    "model_narrow": (1, 2, {"wire_dtype": "bfloat16"}),
    "data_same": (2, 1, {"deterministic": True}),
}

_SHOWN = {
    "data": "data=2",
    "model": "model=2",
    "data_narrow": "data=2, narrow",
    "model_narrow": "model=2, narrow",
}


def _parts() -> Iterator[str]:
    for law, loss, batch in _CASES:
        for model in _MODELS:
            for way in _WAYS:
                if (loss == "exact" and "narrow" in way) or (
                    way == "data_same"
                    and (model, law, loss) != ("hstu", "uniform", "sampled")
                ):
                    continue
                # One GPU alone: half of the batch bounds what two can gain.
                sizes = (batch // 2, batch) if way == "one" else (batch, 2 * batch)
                yield from (f"{model} {law} {loss} {size} {way}" for size in sizes)


_PARTS = {
    part: {"CUDA_VISIBLE_DEVICES": "0" if part.endswith(" one") else "0,1"}
    for part in _parts()
}


def _histories(law: str, items: int, users: int):
    import pyarrow as pa

    import sparsejax as sj

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(50), 1, users).astype(int), 2, 201)
    total = int(lengths.sum())
    if law == "zipf":
        popular = (rng.zipf(1.05, total) * 7919) % items
    else:
        popular = rng.integers(0, items, total)
    events = {
        "user": np.repeat(np.arange(users), lengths),
        "item": popular,
        "time": np.arange(total) * 60,
    }
    return sj.read_sequences(pa.table(events))


def _measure(part: str) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj

    name, law, loss, batch, way = part.split()
    items, negatives = _LOSSES[loss]
    data, group, options = _WAYS[way]
    on_gpu = jax.default_backend() == "gpu"
    size, users, width = int(batch), _USERS, 256
    if not on_gpu:
        size, users, items, width = 64, 256, items // 1000, 16
    histories = _histories(law, items, users)
    made = {"hstu": sj.HSTUConfig, "sasrec": sj.SASRecConfig}[name]
    config = made(
        max_length=200, width=width, heads=4, negatives=negatives, dtype="bfloat16"
    )
    mesh = contextlib.nullcontext()
    if data * group > 1:
        mesh = jax.set_mesh(sj.make_mesh(data=data, model=group))

    def trained():
        model, optimizer = sj.build(config, histories, sj.optimizers.adam(1e-3))
        # The first epoch compiles.
        found = sj.fit(
            model,
            optimizer,
            histories,
            num_epochs=_EPOCHS,
            batch_size=size,
            seed=0,
            log=lambda *_: wait_for_turn(),
            **options,
        )
        return found, jax.tree.leaves(nnx.state(model, nnx.Param))

    with mesh:
        found, first = trained()
        again, second = trained()
        same = all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
    fastest = max(entry["examples_per_second"] for entry in (*found, *again))
    yield {
        "model": name,
        "law": law,
        "loss": loss,
        "batch": size,
        "way": way,
        "visible": jax.device_count(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "milliseconds": round(1e3 * size / fastest, 3),
        "losses": [round(entry["loss"], 5) for entry in found],
        "same_bits_twice": same,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
    }


def _write_table(report: Mapping) -> None:
    found = {
        (r["model"], r["law"], r["loss"], r["batch"], r["way"]): r["milliseconds"]
        for r in report["results"]
    }
    rows = []
    for law, loss, batch in _CASES:
        for model in _MODELS:

            def cell(way, size, key=(model, law, loss), batch=batch):
                one, here = (*key, batch, "one"), (*key, size, way)
                if one not in found or here not in found:
                    return "-"
                gained = found[one] * size / batch / found[here]
                return f"{found[here]:.2f}, {gained:.2f}x"

            name = {"hstu": "HSTU", "sasrec": "SASRec"}[model]
            cells = [cell("one", batch // 2), cell("one", batch)]
            for times in 1, 2:
                cells += [cell(way, times * batch) for way in _WAYS if way in _SHOWN]
            rows.append([f"{name}, {loss}, {law}", f"{batch:,}", *cells])
    columns = ["model, softmax, items", "batch", "one GPU, half", "one GPU"]
    columns += [f"{n}, {_SHOWN[w]}" for n in ("same", "twice") for w in _SHOWN]
    write_section("history_mesh", [origin(report), "", *table(columns, rows)])


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, _write_table, together=True)


if __name__ == "__main__":
    main()
