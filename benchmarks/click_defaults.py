"""Click models by the defaults, on few and on many planted clicks, beside a logistic regression.

    python benchmarks/click_defaults.py run [--only 'plain 3000*'] [--commit NAME]
    python benchmarks/click_defaults.py table

Needs scikit-learn. Models are those of `Run.train(data, model=...)` without further settings. The
regression is fitted on the same examples, of which each category is a column; three folds choose
how much it is regularized. Both are measured on 100,000 others. Worlds:

    plain   60 and 40 categories, a dense column; the logit is a sum over columns
    pairs   1,378 categories of five columns by zipf's law, two dense columns; products of vectors
            of three pairs of columns are added to the sum

A seed is one of the world, of the data and of the model. "today" is a batch of 4,096 and one epoch
of Adam at .002, the defaults before.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section
from workloads import zipf_ids

# Categories of each column, the exponent of zipf's law, dense columns, the deviations of
# weights and of vectors, and the pairs of columns.
_WORLDS: dict[str, tuple[tuple[int, ...], float, int, float, float, tuple]] = {
    "plain": ((60, 40), 0.0, 1, 1.2, 0.0, ()),
    "pairs": ((1000, 300, 50, 20, 8), 0.7, 2, 0.5, 0.8, ((0, 1), (1, 2), (2, 3))),
}
_ROWS = {3_000: 5, 12_000: 5, 100_000: 5, 1_000_000: 1}  # with how many seeds
_MODELS = ("dlrm", "dcn")
_TEST = 100_000
_BEFORE: dict[str, Any] = {
    "batch_size": 4096,
    "num_epochs": 1,
    "optimizer": "adam",
    "learning_rate": 2e-3,
}
_PARTS = {f"{world} {rows}": {} for rows in _ROWS for world in _WORLDS}


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, _write_table)


def _planted(world: str, seed: int, rows: int) -> tuple[Any, ...]:
    """Dense columns, ids, labels, and the logits that they were drawn from."""
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

    kept = tempfile.gettempdir() + "/click_defaults"  # seeds share their programs
    jax.config.update("jax_compilation_cache_dir", kept)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    world, count = part.split()
    rows, sizes = int(count), _WORLDS[world][0]
    names = [f"C{i}" for i in range(len(sizes))]
    schema = sj.ClickSchema(
        "click",
        {f"d{i}": sj.data.DenseColumn() for i in range(_WORLDS[world][2])},
        {n: sj.data.HashedColumn(k) for n, k in zip(names, sizes, strict=True)},
    )
    for seed in range(_ROWS[rows]):
        dense, ids, labels, logits = _planted(world, seed, rows + _TEST)

        def data(part, dense=dense, ids=ids, labels=labels):
            columns = {
                n: i[part].astype(np.int32) for n, i in zip(names, ids, strict=True)
            }
            return sj.ClickDataset(labels[part], dense[part], columns, schema, {})

        train, test = data(slice(None, rows)), data(slice(rows, None))
        facts = {
            "world": world,
            "rows": rows,
            "seed": seed,
            "planted": round(sj.metrics.auc(logits[rows:], test.labels), 4),
            "regression": _regression(train, test, sizes),
            "versions": {
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
            },
        }
        for model in _MODELS:
            run = sj.Run.train(train, model=model, seed=seed)
            found = run.evaluate(test)
            result = facts | {
                "model": model,
                "batch_size": run.settings.batch_size,
                "num_epochs": run.settings.num_epochs,
                "auc": round(found["auc"], 4),
                "log_loss": round(found["log_loss"], 4),
            }
            if seed == 0:
                before = sj.Run.train(train, model=model, seed=seed, **_BEFORE)
                result["before"] = round(before.evaluate(test)["auc"], 4)
            yield result


def _regression(train: Any, test: Any, sizes: tuple[int, ...]) -> float:
    """The AUC of a logistic regression whose regularization three folds choose."""
    import scipy.sparse
    from sklearn.linear_model import (  # pyrefly: ignore[missing-import]
        LogisticRegressionCV,
    )

    import sparsejax as sj

    def columns(clicks):
        parts = [scipy.sparse.csr_matrix(clicks.dense.astype(np.float64))]
        for ids, size in zip(clicks.ids.values(), sizes, strict=True):
            n = len(ids)
            entries = (np.ones(n), ids, np.arange(n + 1))
            parts.append(scipy.sparse.csr_matrix(entries, shape=(n, size)))
        return scipy.sparse.hstack(parts, format="csr")

    strengths = [0.03, 0.1, 0.3, 1.0, 3.0]
    fitted = LogisticRegressionCV(
        Cs=strengths, cv=3, scoring="neg_log_loss", max_iter=200
    ).fit(columns(train), train.labels)
    scores = fitted.decision_function(columns(test))
    return round(sj.metrics.auc(scores, test.labels), 4)


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    lines, results = [], report["results"]
    cases = dict.fromkeys((r["world"], r["rows"], r["model"]) for r in results)
    for world, rows, model in cases:
        those = [
            r
            for r in results
            if (r["world"], r["rows"], r["model"]) == (world, rows, model)
        ]
        differences = [r["auc"] - r["regression"] for r in those]
        lines.append(
            [
                world,
                f"{rows:,}",
                model,
                f"{those[0]['batch_size']:,} x {those[0]['num_epochs']}",
                f"{those[0].get('before', float('nan')):.3f}",
                f"{statistics.mean(r['auc'] for r in those):.4f}",
                f"{statistics.mean(r['regression'] for r in those):.4f}",
                f"{statistics.mean(differences):+.4f}",
                f"{min(differences):+.4f}",
                len(those),
            ]
        )
    heads = [
        "world",
        "examples",
        "model",
        "batch x epochs",
        "AUC before, seed 0",
        "AUC",
    ]
    heads += ["regression", "difference", "worst seed", "seeds"]
    write_section("click_defaults", [*table(heads, lines), "", origin(report)])


if __name__ == "__main__":
    main()
