"""AUC of each next day, where a click model is trained day by day and each day has new ids.

    python benchmarks/click_days.py run [--commit NAME]    on two GPUs of one host
    python benchmarks/click_days.py table                  anywhere

Clicks are drawn from a model: a weight for each id, and products of vectors of two pairs of features.
Of the ids of a day .3 are of ids that no day before had. Names are hashed into as many rows as the
first day has ids, so that ids share rows. A DLRM is trained on a day, once, by row-wise Adagrad, and
measured on the next one. *Rows* divides the tables over two GPUs; *narrow* has bfloat16 on the wire;
*tight* has places for fewer distinct rows than most batches have, so that they take the other way.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section
from workloads import zipf_ids

_ROWS = (100_000, 50_000, 20_000, 10_000, 1_000, 100)
_PAIRS = ((0, 1), (2, 3))
_DENSE, _DIM, _PLANTED, _SKEW = 4, 16, 4, 1.05
_DAYS, _EXAMPLES, _BATCH, _RATE, _NEW = 4, 2**19, 4_096, 0.02, 0.3

# Whether tables are divided, and the options of `fit`.
_FORMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "one": (False, {}),
    "rows": (True, {}),
    "narrow": (True, {"wire_dtype": "bfloat16"}),
    "tight": (True, {"exchange_room": 0.38}),
}


def main() -> None:
    parts = {
        form: {"CUDA_VISIBLE_DEVICES": "0,1" if divided else "0"}
        for form, (divided, _) in _FORMS.items()
    }
    command(__doc__, __file__, parts, _measure, _write_table)


class _Clicks:
    """Days of clicks, each drawn anew from the same weights."""

    def __init__(self):
        rng = np.random.default_rng(0)
        # The ids of the first day, then as many as a third of these for each day.
        self._known = [[n, *(n // 3,) * (_DAYS - 1)] for n in _ROWS]
        every = [sum(known) for known in self._known]
        self._biases = [rng.normal(0, 0.5, n) for n in every]
        self._vectors = [rng.normal(0, 0.6, (n, _PLANTED)) for n in every]
        self._weights = rng.normal(0, 0.3, _DENSE)

    def day(self, day: int, examples: int):
        """Dense columns, rows of the names, labels, logits, and the share of new ids."""
        rng = np.random.default_rng(day + 1)
        dense = rng.standard_normal((examples, _DENSE), np.float32)
        ids, logits = [], dense @ self._weights - 2
        for known, bias in zip(self._known, self._biases, strict=True):
            before = sum(known[:day]) or known[0]
            mine = zipf_ids(rng, examples, before, _SKEW)
            if day:
                new = before + zipf_ids(rng, examples, known[day], _SKEW)
                mine = np.where(rng.random(examples) < _NEW, new, mine)
            ids.append(mine)
            logits = logits + bias[mine]
        for a, b in _PAIRS:
            pair = self._vectors[a][ids[a]] * self._vectors[b][ids[b]]
            logits = logits + pair.sum(1)
        labels = (rng.random(examples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        rows = [_hashed(i, n) for i, n in zip(ids, _ROWS, strict=True)]
        return dense, rows, labels, logits


def _hashed(ids: np.ndarray, rows: int) -> np.ndarray:
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) % np.uint64(rows)).astype(np.int32)


def _measure(part: str) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj
    from sparsejax.data.sets.click_schema import HashedColumn

    divided, options = _FORMS[part]
    examples = _EXAMPLES if jax.default_backend() == "gpu" else 2**13
    names = [f"C{i}" for i in range(len(_ROWS))]
    features = dict(zip(names, _ROWS, strict=True))
    schema = sj.ClickSchema(
        "click",
        {f"d{i}": sj.data.DenseColumn() for i in range(_DENSE)},
        {name: HashedColumn(n) for name, n in features.items()},
    )
    clicks = _Clicks()
    drawn = [clicks.day(day, examples) for day in range(_DAYS)]
    days = [
        sj.ClickDataset(labels, dense, dict(zip(names, ids, strict=True)), schema, {})
        for dense, ids, labels, _ in drawn
    ]
    mesh: Any = contextlib.nullcontext()
    place: Any = "rows" if divided else "replicated"
    if divided:
        mesh = jax.set_mesh(sj.make_mesh(data=1, model=2))
    with mesh:
        model = sj.embeddings.DLRM(
            sj.DLRMConfig(dim=_DIM, bottom=(64,), top=(256, 64), dtype="float32"),
            num_dense=_DENSE,
            features=features,
            plan=dict.fromkeys(names, place),
            rngs=nnx.Rngs(0),
        )
        optimizer = sj.Optimizer(model, sj.optimizers.rowwise_adagrad(_RATE))
        for day in range(_DAYS - 1):
            [entry] = sj.fit(
                model,
                optimizer,
                days[day],
                validation=days[day + 1],
                batch_size=min(_BATCH, examples // 8),
                num_epochs=1,
                seed=day,
                **options,
            )
            _, _, labels, logits = drawn[day + 1]
            yield {
                "form": part,
                "day": day + 1,
                "loss": round(entry["loss"], 5),
                "auc": round(float(entry["auc"]), 5),
                "planted": round(sj.metrics.auc(logits, labels), 5),
                "steps": entry["step"],
                "overflows": entry.get("overflows"),
                "versions": {
                    "jax": jax.__version__,
                    "device": jax.devices()[0].device_kind,
                },
            }


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    rows = [
        [
            r["form"],
            r["day"],
            f"{r['loss']:.4f}",
            f"{r['auc']:.4f}",
            f"{r['planted']:.4f}",
            "-" if r["overflows"] is None else f"{r['overflows']:.0f} of {r['steps']}",
        ]
        for r in report["results"]
    ]
    columns = ["tables", "trained on day", "loss", "AUC of the next day"]
    columns += ["AUC of the planted model", "steps with too few places"]
    write_section("click_days", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
