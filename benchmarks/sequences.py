"""Quality and time of sequence models, with the softmax over all items and over samples.

    python benchmarks/sequences.py run --data FILE [--commit NAME]    on a GPU
    python benchmarks/sequences.py table                              anywhere

FILE has a line `user item item ...` for each user, in the order of time, such as Amazon
Beauty as S3-Rec prepares it; it may be packed (.xz). The last item of each user is the
test, the last but one validates, and all items are ranked. The recipe is the same for all
models and files. A sampled softmax has negatives that the batch shares, uniform, with the
log-q correction; it takes the same steps.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import lzma
import pathlib
import statistics
import sys
import time
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import jax
import numpy as np
from report import RESULTS, origin, table, write_section

import sparsejax as sj

_RESULTS = RESULTS / "beauty.json"
# Model, and negatives; None is the exact softmax.
VARIANTS = (
    ("hstu", None),
    ("hstu", 256),
    ("hstu", 1024),
    ("sasrec", None),
    ("gru", None),
)
BATCH, EPOCHS, K = 256, 40, 10
_TIMED = 6  # epochs
_METRICS = (f"recall@{K}", f"ndcg@{K}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=pathlib.Path, default=_RESULTS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    if arguments.action == "table":
        _write_table(json.loads(_RESULTS.read_text()))
        return
    if arguments.data is None:
        parser.error("run needs --data FILE")
    _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    data = read(arguments.data)
    results, begin, longest = [], time.perf_counter(), 0.0
    # One seed of all variants after the other, so that an early end leaves some of each.
    for seed, (model, negatives) in itertools.product(range(arguments.seeds), VARIANTS):
        left = arguments.seconds - (time.perf_counter() - begin)
        if left < longest:
            break
        result = _trained(data, model, negatives, seed, arguments.epochs)
        results.append(result)
        longest = max(longest, result["seconds"])
        report = {
            "date": datetime.date.today().isoformat(),
            "commit": arguments.commit,
            "command": "python benchmarks/sequences.py run",
            "versions": {
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
            },
            "data": f"{data.num_rows:,} users, {data.num_features:,} items, "
            f"{data.num_entries:,} events",
            "epochs": arguments.epochs,
            "results": results,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        shown = {name: value for name, value in result.items() if name != "curve"}
        print(json.dumps(shown), flush=True)


def read(file: pathlib.Path) -> sj.SequenceDataset:
    """Users and items with the names that the file gives them."""
    text = file.read_bytes()
    if file.suffix == ".xz":
        text = lzma.decompress(text)
    rows = [line.split() for line in text.decode().splitlines()]
    users = [row[0] for row in rows]
    events = np.array([item for row in rows for item in row[1:]])
    items, indices = np.unique(events, return_inverse=True)
    indptr = np.cumsum([0, *(len(row) - 1 for row in rows)])
    return sj.SequenceDataset(indptr, indices, np.array(users), items)


def _trained(
    data: sj.SequenceDataset, name: str, negatives: int | None, seed: int, epochs: int
) -> dict[str, Any]:
    before, test = data.split_last()
    train, validation = before.split_last()
    start = time.perf_counter()
    model, optimizer = _made(train, name, negatives, seed, epochs)
    history = sj.fit(
        model,
        optimizer,
        train,
        batch_size=BATCH,
        num_epochs=epochs,
        seed=seed,
        validation=validation,
        k=K,
        early_stopping=sj.EarlyStopping(patience=10),
    )
    result: dict[str, Any] = {
        "model": name,
        "negatives": negatives,
        "seed": seed,
        "epochs": len(history),
        "fit_seconds": round(time.perf_counter() - start, 2),
        "curve": [round(entry[f"ndcg@{K}"], 5) for entry in history],
    }
    for form, exclude in (("left out", before), ("kept", None)):
        found = sj.evaluate(model, before, test, k=K, exclude=exclude)
        result[f"test, seen {form}"] = [round(found[m], 5) for m in _METRICS]
    if seed == 0:
        result["epoch_seconds"] = round(_epoch_seconds(train, name, negatives), 3)
    result["seconds"] = round(time.perf_counter() - start, 2)
    return result


def _made(
    train: sj.SequenceDataset, name: str, negatives: int | None, seed: int, epochs: int
) -> tuple[Any, sj.Optimizer]:
    """A model and its optimizer. The rest of the recipe is in the configuration's defaults."""
    document = {"version": 1, "model": name, "negatives": negatives}
    config = sj.SequenceConfig.from_json(document)
    rate = sj.optimizers.schedule(
        "cosine_decay_schedule",
        init_value=2e-3,
        decay_steps=-(-train.num_rows // BATCH) * epochs,
    )
    rule = sj.optimizers.adamw(rate, b2=0.98, weight_decay=0.1)
    return sj.build(config, train, rule, seed=seed)


def _epoch_seconds(
    train: sj.SequenceDataset, name: str, negatives: int | None
) -> float:
    """Of training alone, once it is compiled."""
    model, optimizer = _made(train, name, negatives, 0, _TIMED)
    ends = []
    sj.fit(
        model,
        optimizer,
        train,
        batch_size=BATCH,
        num_epochs=_TIMED,
        log=lambda step, entry: ends.append(time.perf_counter()),
    )
    return float(np.median(np.diff(ends)))


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    body = []
    for name, negatives in VARIANTS:
        rows = [
            row
            for row in report["results"]
            if (row["model"], row["negatives"]) == (name, negatives)
        ]
        if not rows:
            continue
        cells = []
        for form in ("left out", "kept"):
            for i in range(len(_METRICS)):
                values = [row[f"test, seen {form}"][i] for row in rows]
                spread = statistics.stdev(values) if len(values) > 1 else 0
                cells.append(f"{statistics.mean(values):.4f} ± {spread:.4f}")
        seconds = [row["epoch_seconds"] for row in rows if "epoch_seconds" in row]
        softmax = "all items" if negatives is None else f"{negatives:,} sampled"
        body.append(
            [
                name,
                softmax,
                len(rows),
                *cells,
                f"{min(seconds):.2f}" if seconds else "-",
            ]
        )
    columns = ["model", "softmax over", "seeds"]
    for form in ("left out", "kept"):
        columns += [f"{metric}, seen {form}" for metric in ("R@10", "nDCG@10")]
    columns.append("an epoch, s")
    lines = [f"{origin(report)} {report['data']}.", "", *table(columns, body)]
    write_section("sequences", lines)


if __name__ == "__main__":
    main()
