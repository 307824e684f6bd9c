"""Which temperature, by data set: nDCG@20 on held-out training entries.

    python benchmarks/temperature.py run --data FOLDER [--commit NAME]    on a GPU
    python benchmarks/temperature.py table                                anywhere

FOLDER is that of `quality.py`, whose six training sets are used. A fifth of each row's
entries is held out. Each line is one training with the defaults of `sparsejax train` but for
the temperature and the hidden units. It is measured at its end: its layers alone, and with
0.5, 0.7, 1 and 1.4 times the weight of the linear part. Test data is not read.
`sparsejax.nn.config.temperature_for` was chosen from these.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import quality
from report import origin, table, training_command, write_section

import sparsejax as sj

_WEIGHTS = (0.0, 0.5, 0.7, 1.0, 1.4)  # of the linear part
_TEMPERATURES = {
    "gowalla": (0.08, 0.09, 0.1, 0.115),
    "beauty": (0.1, 0.13, 0.16, 0.2, 0.25),
    "generated": (0.1, 0.13, 0.16, 0.2, 0.25),
    "ml-20m-1024": (0.1, 0.13, 0.16, 0.2),
    "ml-1m": (0.1, 0.13, 0.16, 0.2),
    "msweb": (0.1, 0.13, 0.18, 0.24, 0.32),
}
# Others than the default, each with these two temperatures (1,024: the first).
_WIDER, _FOR_WIDER = (512, 1024), (0.1, 0.13)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    training_command(parser, __file__, {"run": _run}, {"table": _write_table})


def _run(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    results: list[dict[str, Any]] = []
    for name, temperatures in _TEMPERATURES.items():
        data, _ = quality.load(arguments.data, name, 0)
        split = data.split(0.8, seed=0)
        plan = [(256, temperature) for temperature in temperatures]
        plan += [(512, temperature) for temperature in _FOR_WIDER]
        plan += [(1024, _FOR_WIDER[0])]
        for hidden, temperature in plan:
            results.append({"set": name, **_trained(split, hidden, temperature)})
            yield {"results": results}, results[-1]


def _trained(split: sj.data.Split, hidden: int, temperature: float) -> dict[str, Any]:
    train = split.train
    sizes = train.num_rows, train.num_features, train.num_entries
    config, _ = sj.NetworkConfig.for_data(
        *sizes, hidden=(hidden,), temperature=temperature
    )
    how = sj.training.recipe(config, train)
    model, optimizer = sj.build(config, train, how.rule)
    fit = {"batch_size": how.batch_size, "num_epochs": how.num_epochs}
    sj.fit(model, optimizer, train, **fit)
    linear_part: Any = model.output.linear
    scale, ndcg = linear_part.scale[...], {}
    for weight in _WEIGHTS:
        linear_part.scale.set_value(scale * weight)
        found = sj.evaluate(model, train, split.heldout, k=20, popularity=None)
        ndcg[f"{weight:g}"] = round(float(found["ndcg@20"]), 5)
    sizes = {"items": train.num_features, "entries of a row": sizes[2] / sizes[0]}
    return sizes | {"hidden": hidden, "temperature": temperature, "ndcg@20": ndcg}


def _write_table(report: dict) -> None:
    columns = ["set", "items", "entries of a row", "hidden", "temperature"]
    columns += ["layers alone", *(f"{w:g} x the weight" for w in _WEIGHTS[1:])]
    body = []
    for row in report["results"]:
        cells = [f"{row['items']:,}", f"{row['entries of a row']:.0f}"]
        scores = (row["ndcg@20"].get(f"{weight:g}") for weight in _WEIGHTS)
        body.append(
            [
                *(row["set"], *cells, row["hidden"], row["temperature"]),
                *("-" if score is None else f"{score:.4f}" for score in scores),
            ]
        )
    write_section("temperature", [origin(report), "", *table(columns, body)])


if __name__ == "__main__":
    main()
