"""Click models by the defaults, on few and on many planted clicks, beside a logistic regression.

    python benchmarks/click_defaults.py run [--only 'plain 3000*'] [--commit NAME]
    python benchmarks/click_defaults.py table

Models are trained by `Run.train(data, model=...)` without further settings. The regression is the
library's, fitted on all examples, so on a tenth more than the model. A test compares the
regression with SciPy's. Both are measured on 100,000 other examples. Worlds:

    plain   60 and 40 categories, a dense column; the logit is a sum over columns
    pairs   1,378 categories of five columns by zipf's law, two dense columns; products of vectors
            of three pairs of columns are added to the sum
    many    63,370 categories of six columns, in the same way

One seed is used for the world, for the data and for the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from report import command, grouped, print_means
from workloads import zipf_ids

# For each world: number of categories of each column, exponent of zipf's law, number of dense
# columns, standard deviations of weights and of vectors, and pairs of columns.
_WORLDS: dict[str, tuple[tuple[int, ...], float, int, float, float, tuple]] = {
    "plain": ((60, 40), 0.0, 1, 1.2, 0.0, ()),
    "many": (
        (50_000, 8_000, 4_000, 1_200, 150, 20),
        *(0.9, 2, 0.5, 0.8),
        ((0, 1), (1, 2), (2, 3)),
    ),
    "pairs": ((1000, 300, 50, 20, 8), 0.7, 2, 0.5, 0.8, ((0, 1), (1, 2), (2, 3))),
}
_ROWS = 3_000, 12_000, 100_000, 1_000_000
_MODELS = "dlrm", "dcn"
_SEEDS, _TEST = 5, 100_000
_NAMES = "world", "rows", "model"


def _planted(world: str, seed: int, rows: int) -> tuple[Any, ...]:
    """Draws dense columns, ids and labels; returns them with the logits of the labels."""
    sizes, skew, dense_columns, weight, vector, pairs = _WORLDS[world]
    rng = np.random.default_rng(seed)
    biases = [rng.normal(0, weight, n) for n in sizes]
    vectors = [rng.normal(0, vector, (n, 4)) for n in sizes]
    weights = rng.normal(0, 0.6, dense_columns)
    dense = rng.standard_normal((rows, dense_columns), np.float32)
    if skew:
        ids = [zipf_ids(rng, rows, n, skew) for n in sizes]
    else:
        ids = [rng.integers(0, n, rows) for n in sizes]
    logits = dense @ weights - 1
    for each, bias in zip(ids, biases, strict=True):
        logits = logits + bias[each]
    for a, b in pairs:
        logits = logits + (vectors[a][ids[a]] * vectors[b][ids[b]]).sum(1)
    labels = rng.random(rows) < 1 / (1 + np.exp(-logits))
    return dense, ids, labels.astype(np.float32), logits


def _measure(part: str) -> Iterator[dict]:
    import jax

    import sparsejax as sj
    from sparsejax.kinds.clicks.regression import fit_regression, regression_logits

    # All seeds use one cache of compiled programs.
    kept = tempfile.gettempdir() + "/click_defaults"
    jax.config.update("jax_compilation_cache_dir", kept)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    world, count, model = part.split()
    rows, sizes = int(count), _WORLDS[world][0]
    names = [f"C{i}" for i in range(len(sizes))]
    schema = sj.ClickSchema(
        "click",
        {f"d{i}": sj.data.DenseColumn() for i in range(_WORLDS[world][2])},
        {n: sj.data.HashedColumn(k) for n, k in zip(names, sizes, strict=True)},
    )
    for seed in range(_SEEDS):
        dense, ids, labels, logits = _planted(world, seed, rows + _TEST)

        def data(part, dense=dense, ids=ids, labels=labels):
            columns = {
                n: i[part].astype(np.int32) for n, i in zip(names, ids, strict=True)
            }
            return sj.ClickDataset(labels[part], dense[part], columns, schema, {})

        train, test = data(slice(None, rows)), data(slice(rows, None))
        run = sj.Run.train(train, model=model, seed=seed)
        found = run.evaluate(test)
        regression = regression_logits(fit_regression(train), test)
        yield {
            "world": world,
            "rows": rows,
            "model": model,
            "seed": seed,
            "planted": round(sj.metrics.auc(logits[rows:], test.labels), 4),
            "regression": round(sj.metrics.auc(regression, test.labels), 4),
            "batch_size": run.settings.batch_size,
            "num_epochs": run.settings.num_epochs,
            "share": round(float(run.model.share[...]), 3),
            "auc": round(found["auc"], 4),
            "log_loss": round(found["log_loss"], 4),
        }


def _write_table(report: dict) -> None:
    """Prints the mean over seeds, and the worst difference from the regression."""
    for result in report["results"]:
        result["difference"] = result["auc"] - result["regression"]
    print_means(report, *_NAMES)
    for key, some in grouped(report["results"], *_NAMES):
        print(*key, f"worst {min(r['difference'] for r in some):+.4f}")


if __name__ == "__main__":
    parts = {
        f"{world} {rows} {model}": {}
        for rows in reversed(_ROWS)
        for world in _WORLDS
        for model in _MODELS
    }
    command(__doc__, __file__, parts, _measure, _write_table)
