"""A warning names a column that reveals the label, before a model is trained on it."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

import sparsejax as sj
from sparsejax.kinds.clicks.worth import warning_of_columns

HASHED = sj.data.HashedColumn(100_000)


def table(rows=4_000):
    rng = np.random.default_rng(0)
    click = rng.integers(0, 2, rows)
    wrong = rng.random(rows) < 0.1
    return {
        "click": click,
        "price": rng.random(rows),
        "refund": np.where(click == 1, -rng.random(rows) - 1, 0),
        "hint": click + rng.normal(size=rows) / 2,
        "shop": [f"s{i}" for i in rng.integers(0, 50, rows)],
        "order": [f"o{i}" for i in range(rows)],  # of one example each
        "state": [
            f"paid {i % 7}" if c else f"open {i % 7}" for i, c in enumerate(click)
        ],
        "mostly": np.where(wrong, 1 - click, click).astype(str),
        "tags": [[f"t{i % 9}", "bought"] if c else [] for i, c in enumerate(click)],
    }


def read(columns, rows=4_000):
    dense = [name for name in ("price", "refund", "hint") if name in columns]
    ids = [name for name in columns if name not in dense]
    schema = sj.ClickSchema(
        "click",
        dense=dict.fromkeys(dense, sj.data.DenseColumn()),
        ids=dict.fromkeys(ids, HASHED),
    )
    made = table(rows)
    return sj.read_clicks(
        pa.table({name: made[name] for name in ("click", *columns)}), schema
    )


@pytest.mark.parametrize("name", ["refund", "state", "tags"])
def test_a_column_that_tells_the_label(name):
    said = warning_of_columns(read(["price", "shop", "order", name]))
    assert said and f": {name!r} (AUC 1.0000)." in said and "'shop'" not in said


def test_columns_that_do_not():
    assert (
        warning_of_columns(read(["price", "hint", "shop", "order", "mostly"])) is None
    )
    # No example has a tag but one of those that are measured, the first ones of a draw.
    tags = [[]] * 2_000
    tags[np.random.default_rng(0).permutation(2_000)[0]] = ["t"]
    rows = pa.table({"click": [0, 1] * 1_000, "tags": tags})
    schema = sj.ClickSchema("click", ids={"tags": HASHED})
    assert warning_of_columns(sj.read_clicks(rows, schema)) is None
    # Too few examples to say.
    assert warning_of_columns(read(["refund"], 900)) is None


@pytest.mark.filterwarnings("ignore:the model is worse")
def test_a_command_warns(tmp_path):
    data = pa.table({n: v for n, v in table(2_000).items() if n != "tags"})
    pa.csv.write_csv(
        data.select(["click", "price", "shop", "state"]), tmp_path / "t.csv"
    )
    schema = sj.ClickSchema(
        "click",
        dense={"price": sj.data.DenseColumn()},
        ids={"shop": HASHED, "state": HASHED},
    )
    with pytest.warns(
        UserWarning, match=r"as their label does: 'state' \(AUC 1\.0000\)"
    ):
        sj.Run.train(
            tmp_path / "t.csv",
            tmp_path / "run",
            config=sj.DLRMConfig(dim=2, bottom=(2,), top=(2,)),
            schema=schema,
            num_epochs=1,
        )
