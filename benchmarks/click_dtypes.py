"""Quality of click models whose layers, or tables too, are in bfloat16: AUC on planted clicks.

    python benchmarks/click_dtypes.py run [--commit NAME]    on a GPU
    python benchmarks/click_dtypes.py table                  anywhere

Clicks are drawn from a model: a weight for each id, products of vectors of three pairs of features,
and weights of four dense columns. There are 2^20 examples to train on and 2^18 others to measure.
Ids follow zipf's law with exponent 1.05. Models are trained by Adam for three epochs with batches
of 4,096; the AUC is that of the best epoch. A seed is one of the data and of the model.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section
from workloads import zipf_ids

_ROWS = (100_000, 50_000, 20_000, 10_000, 5_000, 1_000, 1_000, 500, 100, 20)
_PAIRS = ((0, 1), (2, 3), (4, 5))
_DENSE, _DIM, _PLANTED, _SKEW, _SEEDS = 4, 16, 4, 1.05, 5
_TRAIN, _TEST, _BATCH, _EPOCHS, _RATE = 2**20, 2**18, 4_096, 3, 2e-3

# The dtypes of layers and of tables.
_FORMS = {
    "float32": ("float32", "float32"),
    "bfloat16 layers": ("bfloat16", "float32"),
    "bfloat16 layers and tables": ("bfloat16", "bfloat16"),
}
_MODELS = ("dlrm", "dcn")
_PARTS = {f"{model} {form}": {} for model in _MODELS for form in _FORMS}


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, _write_table)


def _planted(seed: int, rows: int):
    """Dense columns, ids, labels, and the logits that they were drawn from."""
    rng = np.random.default_rng(seed)
    biases = [rng.normal(0, 0.5, n) for n in _ROWS]
    vectors = [rng.normal(0, 0.6, (n, _PLANTED)) for n in _ROWS]
    weights = rng.normal(0, 0.3, _DENSE)
    dense = rng.standard_normal((rows, _DENSE), np.float32)
    ids = [zipf_ids(rng, rows, n, _SKEW) for n in _ROWS]
    logits = dense @ weights - 2
    for i, bias in zip(ids, biases, strict=True):
        logits = logits + bias[i]
    for a, b in _PAIRS:
        logits = logits + (vectors[a][ids[a]] * vectors[b][ids[b]]).sum(1)
    labels = rng.random(rows) < 1 / (1 + np.exp(-logits))
    return dense, ids, labels.astype(np.float32), logits


def _measure(part: str) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj
    from sparsejax.data.sets.click_schema import HashedColumn

    kind, _, form = part.partition(" ")
    layers, tables = _FORMS[form]
    small = jax.default_backend() != "gpu"
    train, test = (_TRAIN // 256, _TEST // 256) if small else (_TRAIN, _TEST)
    names = [f"C{i}" for i in range(len(_ROWS))]
    features = dict(zip(names, _ROWS, strict=True))
    schema = sj.ClickSchema(
        "click",
        {f"d{i}": sj.data.DenseColumn() for i in range(_DENSE)},
        {name: HashedColumn(n) for name, n in features.items()},
    )
    options: dict[str, Any] = {"dim": _DIM, "dtype": layers}
    if kind == "dlrm":
        config: Any = sj.DLRMConfig(bottom=(64,), top=(256, 64), **options)
    else:
        config = sj.DCNConfig(hidden=(256, 64), **options)
    make: Any = {"dlrm": sj.embeddings.DLRM, "dcn": sj.embeddings.DCN}[kind]
    for seed in range(1 if small else _SEEDS):
        dense, ids, labels, logits = _planted(seed, train + test)

        def data(part, dense=dense, ids=ids, labels=labels):
            columns = {n: i[part] for n, i in zip(names, ids, strict=True)}
            return sj.ClickDataset(labels[part], dense[part], columns, schema, {})

        model = make(config, num_dense=_DENSE, features=features, rngs=nnx.Rngs(seed))
        if tables != "float32":
            model.embeddings = sj.embeddings.EmbeddingCollection(
                {
                    n: sj.embeddings.TableConfig(r, _DIM, dtype=tables)
                    for n, r in features.items()
                },
                dict(zip(names, names, strict=True)),
                rngs=nnx.Rngs(seed),
            )
        optimizer = sj.Optimizer(model, sj.optimizers.adam(_RATE))
        history = sj.fit(
            model,
            optimizer,
            data(slice(None, train)),
            validation=data(slice(train, None)),
            batch_size=_BATCH,
            num_epochs=_EPOCHS,
            seed=seed,
        )
        found = [round(float(entry["auc"]), 5) for entry in history]
        yield {
            "model": kind,
            "form": form,
            "seed": seed,
            "auc": max(found),
            "aucs": found,
            "planted": round(sj.metrics.auc(logits[train:], labels[train:]), 5),
            "examples_per_second": round(history[-1]["examples_per_second"]),
            "versions": {
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
            },
        }


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    rows, results = [], report["results"]
    for model, form in dict.fromkeys((r["model"], r["form"]) for r in results):
        those = [r for r in results if (r["model"], r["form"]) == (model, form)]
        base = {
            r["seed"]: r["auc"]
            for r in results
            if r["model"] == model and r["form"] == "float32"
        }
        aucs = [r["auc"] for r in those]
        apart = [r["auc"] - base[r["seed"]] for r in those]
        rows.append(
            [
                model,
                form,
                len(those),
                f"{statistics.mean(aucs):.4f}",
                f"{statistics.mean(apart):+.5f}",
                f"{min(apart):+.5f}",
                f"{statistics.mean(r['planted'] for r in those):.4f}",
            ]
        )
    columns = ["model", "form", "seeds", "AUC", "to float32", "worst seed", "planted"]
    write_section("click_dtypes", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
