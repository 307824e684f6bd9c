"""Which weight of the linear part, by data set: held-out training entries.

    python benchmarks/linear_weight.py run --data FOLDER [--commit NAME]    on a GPU
    python benchmarks/linear_weight.py table                                anywhere

FOLDER is that of `quality.py`, whose six training sets are used, whole and in parts: some of
the rows, or some of the entries, so that there are sets with long and short rows, and with
many and few entries of an item. A fifth of each row's entries is held out. Each line is one
training with the defaults of `sparsejax train`, measured at its end with several weights.
Test data is not read. `sparsejax.nn.LinearConfig.for_data` was chosen from these.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import numpy as np
import quality
import scipy.sparse
from report import origin, table, training_command, write_section

import sparsejax as sj

_WEIGHTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
_METRICS = ("recall@20", "ndcg@20")
# Rows and share of the entries that are kept; None is all.
_PARTS: dict[str, tuple[tuple[int | None, float], ...]] = {
    "msweb": ((None, 1), (None, 0.6), (3_000, 1)),
    "beauty": ((None, 1), (6_000, 1)),
    "ml-20m-1024": ((None, 1), (None, 0.4)),
    "ml-1m": ((None, 1), (None, 0.3), (None, 0.1), (1_000, 1)),
    "generated": ((None, 1), (5_000, 1)),
    "gowalla": ((None, 1),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    training_command(parser, __file__, {"run": _run}, {"table": _write_table})


def _run(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    results: list[dict[str, Any]] = []
    for name, parts in _PARTS.items():
        data, _ = quality.load(arguments.data, name, 0)
        for rows, share in parts:
            split = _part(data, rows, share).split(0.8, seed=0)
            results.append({"set": name, "rows kept": rows, "share": share})
            results[-1] |= _trained(split)
            yield {"results": results}, results[-1]


def _part(data: sj.SparseDataset, rows: int | None, share: float) -> sj.SparseDataset:
    """Some rows, and of them some entries; then what has two entries, and its items."""
    if rows is None and share == 1:
        return data
    rng = np.random.default_rng(0)
    # A copy, without a type: SciPy's stubs say that it cannot be indexed.
    matrix: Any = scipy.sparse.csr_array(data.to_scipy(), copy=True)
    if rows is not None:
        matrix = matrix[np.sort(rng.choice(matrix.shape[0], rows, replace=False))]
    matrix.data[rng.random(matrix.nnz) >= share] = 0
    matrix.eliminate_zeros()
    matrix = matrix[np.diff(matrix.indptr) > 1]
    matrix = matrix[:, np.unique(matrix.indices)]
    order = sj.data.vocabulary_order(np.bincount(matrix.indices))
    return sj.SparseDataset.from_scipy(matrix[:, order])


def _trained(split: sj.data.Split) -> dict[str, Any]:
    train = split.train
    sizes = train.num_rows, train.num_features, train.num_entries
    config, _ = sj.NetworkConfig.for_data(*sizes)
    assert config.linear is not None
    chosen = config.linear.weight
    linear = dataclasses.replace(config.linear, weight=1.0)
    config = dataclasses.replace(config, linear=linear)
    how = sj.training.recipe(config, train)
    model, optimizer = sj.build(config, train, how.rule)
    fit = {"batch_size": how.batch_size, "num_epochs": how.num_epochs}
    sj.fit(model, optimizer, train, **fit)
    part: Any = model.output.linear
    scale, measured = part.scale[...], {}
    for weight in _WEIGHTS:
        part.scale.set_value(scale * weight)
        found = sj.evaluate(model, train, split.heldout, k=20, popularity=None)
        measured[f"{weight:g}"] = [round(float(found[m]), 5) for m in _METRICS]
    entries = {"of a row": sizes[2] / sizes[0], "of an item": sizes[2] / sizes[1]}
    return {"entries": entries, "chosen": chosen, "by weight": measured}


def _write_table(report: dict) -> None:
    columns = ["set", "entries of a row", "of an item", "chosen"]
    columns += [f"{weight:g}" for weight in _WEIGHTS]
    body = []
    for row in report["results"]:
        name = row["set"]
        if row["rows kept"] is not None:
            name += f", {row['rows kept']:,} rows"
        if row["share"] < 1:
            name += f", {row['share']:.0%} of the entries"
        found = [row["by weight"][f"{weight:g}"] for weight in _WEIGHTS]
        best = [max(each) for each in zip(*found, strict=True)]
        shown = (
            " / ".join(f"**{v:.4f}**" if v == b else f"{v:.4f}" for v, b in pairs)
            for pairs in (zip(each, best, strict=True) for each in found)
        )
        counts = (f"{row['entries'][of]:.0f}" for of in ("of a row", "of an item"))
        body.append([name, *counts, row["chosen"], *shown])
    write_section("linear_weight", [origin(report), "", *table(columns, body)])


if __name__ == "__main__":
    main()
