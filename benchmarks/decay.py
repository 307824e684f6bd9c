"""Which learning rate, and how many epochs: nDCG@20 on held-out training entries.

    python benchmarks/decay.py run --data FOLDER [--commit NAME]    on a GPU
    python benchmarks/decay.py table                                anywhere

FOLDER is that of `quality.py`, whose six training sets are used. A fifth of each row's
entries is held out. Each line is one training, which is measured once, at its end: its
layers alone, and with 0.7, 1 and 1.4 times the weight of the linear part. Test data is
not read.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import quality
from report import origin, table, training_command, write_section

import sparsejax as sj

_WEIGHTS = (0.0, 0.7, 1.0, 1.4)  # of the linear part
_CONSTANT, _COSINE = ("constant", 1e-3), ("cosine", 2e-3)
# Learning rate, epochs, corruption, hidden units.
_RUNS = {
    "gowalla": [
        (_CONSTANT, 50, 0.5, 256),
        (_COSINE, 20, 0.5, 256),
        (_COSINE, 50, 0.5, 256),
        (("cosine", 1e-3), 50, 0.5, 256),
        (("cosine", 4e-3), 30, 0.5, 256),
        (_COSINE, 30, 0.7, 256),
        (_COSINE, 30, 0.25, 256),
        (_COSINE, 50, 0.25, 256),
        (_COSINE, 30, 0.0, 256),
        (_COSINE, 30, 0.5, 512),
        (_CONSTANT, 50, 0.5, 1024),
        (_COSINE, 50, 0.5, 1024),
        (_COSINE, 50, 0.25, 1024),
    ],
    "ml-1m": [
        (_CONSTANT, 20, 0.5, 256),
        (_COSINE, 20, 0.5, 256),
        (_COSINE, 30, 0.5, 256),
        (_COSINE, 60, 0.5, 256),
        (_COSINE, 30, 0.25, 256),
    ],
    "msweb": [
        (_CONSTANT, 20, 0.5, 256),
        (_COSINE, 20, 0.5, 256),
        (_COSINE, 30, 0.5, 256),
        (_COSINE, 30, 0.4, 256),
        (_COSINE, 30, 0.25, 256),
    ],
    "beauty": [
        (_CONSTANT, 20, 0.5, 256),
        (_COSINE, 20, 0.5, 256),
        (_COSINE, 30, 0.5, 256),
        (_COSINE, 30, 0.25, 256),
    ],
    "ml-20m-1024": [
        (_CONSTANT, 20, 0.5, 256),
        (_COSINE, 20, 0.5, 256),
        (_COSINE, 30, 0.5, 256),
        (_COSINE, 100, 0.5, 256),
        (_COSINE, 200, 0.5, 256),
        (_COSINE, 100, 0.25, 256),
    ],
    "generated": [
        (_COSINE, 20, 0.5, 256),
        (_COSINE, 30, 0.5, 256),
        (_COSINE, 30, 0.4, 256),
        (_COSINE, 30, 0.25, 256),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    training_command(parser, __file__, {"run": _run}, {"table": _write_table})


def _run(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    results: list[dict[str, Any]] = []
    for name, runs in _RUNS.items():
        data, _ = quality.load(arguments.data, name, 0)
        split = data.split(0.8, seed=0)
        for run in runs:
            results.append({"set": name, **_trained(split, *run)})
            yield {"results": results}, results[-1]


def _trained(
    split: sj.data.Split,
    plan: tuple[str, float],
    epochs: int,
    corruption: float,
    hidden: int,
) -> dict[str, Any]:
    train, (form, peak) = split.train, plan
    sizes = train.num_rows, train.num_features, train.num_entries
    linear, _ = sj.nn.LinearConfig.for_data(*sizes)
    config = sj.NetworkConfig.autoencoder(
        (hidden,), corruption=corruption, linear=linear
    )
    if form == "cosine":
        rule = sj.training.recipe(config, train, num_epochs=epochs, peak=peak).rule
    else:
        rule = sj.optimizers.adam(peak)
    start = time.perf_counter()
    model, optimizer = sj.build(config, train, rule)
    sj.fit(model, optimizer, train, num_epochs=epochs)
    result = {
        "rate": form,
        "peak": peak,
        "epochs": epochs,
        "corruption": corruption,
        "hidden": hidden,
        "seconds": round(time.perf_counter() - start, 1),
    }
    linear_part: Any = model.output.linear
    scale, ndcg = linear_part.scale[...], []
    for weight in _WEIGHTS:
        linear_part.scale.set_value(scale * weight)
        found = sj.evaluate(model, train, split.heldout, k=20)
        ndcg.append(round(float(found["ndcg@20"]), 5))
    return result | {"ndcg@20": ndcg}


def _write_table(report: dict) -> None:
    columns = ["set", "learning rate", "epochs", "corruption", "hidden", "layers alone"]
    columns += [f"{weight:g} x the weight" for weight in _WEIGHTS[1:]]
    body = []
    for row in report["results"]:
        rate = f"{row['rate']}, {row['peak']:g}"
        settings = (rate, row["epochs"], row["corruption"], row["hidden"])
        cells = [f"{score:.4f}" for score in row["ndcg@20"]]
        body.append([row["set"], *settings, *cells])
    write_section("decay", [origin(report), "", *table(columns, body)])


if __name__ == "__main__":
    main()
