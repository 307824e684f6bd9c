"""Several labels of clicks: read, saved, scanned, split, and errors with their lines."""

import dataclasses
import json

import numpy as np
import pytest

import sparsejax as sj

Label = sj.data.LabelColumn
LABELS = {
    "click": Label(),
    "buy": Label(after="click"),
    "price": Label("squared", weight="v"),
}
SCHEMA = sj.ClickSchema(
    labels=LABELS, ids={"item": sj.data.VocabularyColumn()}, weight="w"
)
OTHER: list = ["other"]
ROWS = [
    {"click": 1, "buy": 1, "price": 2.5, "item": "tea", "w": 2, "v": 3},
    {"click": 0, "buy": 0, "price": None, "item": "cup", "w": 1, "v": 1},
    {"click": None, "buy": 1, "price": -1.0, "item": "tea", "w": 0.5, "v": 0},
]
EXPECTED = [[1, 1, 2.5], [0, 0, np.nan], [np.nan, 1, -1]]
WEIGHTS = [[2, 2, 6], [1, 1, 1], [0.5, 0.5, 0]]


def csv(rows=ROWS) -> str:
    lines = [["" if x is None else str(x) for x in row.values()] for row in rows]
    return "\n".join(map(",".join, [list(rows[0]), *lines])) + "\n"


def same(clicks, labels=EXPECTED, weights=WEIGHTS):
    np.testing.assert_array_equal(clicks.labels, np.array(labels, np.float32))
    np.testing.assert_array_equal(clicks.weights, np.array(weights, np.float32))


def test_labels_and_weights_are_read_as_they_are(tmp_path):
    path = tmp_path / "clicks.csv"
    path.write_text(csv())
    clicks = sj.read_clicks(path, SCHEMA)
    same(clicks)
    same(sj.read_clicks(ROWS, SCHEMA))
    assert repr(clicks) == (
        "ClickDataset(3 examples, 50.0 % click, 66.7 % buy, 0 dense, 1 features)"
    )
    clicks.save(tmp_path / "clicks.parquet")
    same(sj.ClickDataset.load(tmp_path / "clicks.parquet"))
    for scanned in (
        sj.data.scan_clicks(path, SCHEMA, chunk_rows=2),
        sj.data.scan_clicks(tmp_path / "clicks.parquet", chunk_rows=2),
    ):
        first, second = scanned.chunks()
        same(first, EXPECTED[:2], WEIGHTS[:2])
        same(second, EXPECTED[2:], WEIGHTS[2:])
    # Files to predict on need neither labels nor weights.
    bare = tmp_path / "bare.csv"
    bare.write_text("item\ntea\n")
    schema = sj.ClickSchema.from_json(json.loads(json.dumps(SCHEMA.to_json())))
    assert schema == SCHEMA
    short = {"labels": ["click", "buy"], "ids": SCHEMA.to_json()["ids"]}
    assert list(sj.ClickSchema.from_json(short).several) == ["click", "buy"]
    assert sj.ClickSchema(labels=["click"], ids=SCHEMA.ids) == sj.ClickSchema(
        "click", ids=SCHEMA.ids
    )


def test_one_of_several_labels():
    clicks = sj.read_clicks(ROWS, SCHEMA)
    buy = clicks.of_label("buy")
    assert buy.schema.label == "buy" and not buy.schema.several
    np.testing.assert_array_equal(buy.labels, [1, 0, 1])
    np.testing.assert_array_equal(buy.weights, [2, 1, 0.5])
    price = clicks.of_label("price")
    np.testing.assert_array_equal(price.labels, [[2.5], [-1]])
    np.testing.assert_array_equal(price.weights, [[6], [0]])
    np.testing.assert_array_equal(price.ids["item"], [2, 2])
    with pytest.raises(ValueError, match="no label 'watch'; there are"):
        clicks.of_label("watch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"click": 2}, "label 'click' is 2; expected 0 or 1"),
        ({"click": 0.5}, "label 'click' is 0.5; expected 0 or 1"),
        ({"click": 0, "buy": 1}, "'buy' is 1, but 'click', which it comes after, is 0"),
        ({"price": "much"}, "column 'price'"),
        ({"v": -1}, "weight 'v' is -1; expected a number that is 0 or more"),
        ({"v": None}, "weight 'v' is missing"),
    ],
)
def test_wrong_lines(tmp_path, change, message):
    path = tmp_path / "clicks.csv"
    path.write_text(csv([*ROWS, {**ROWS[0], **change}]))
    with pytest.raises(sj.data.DataError, match=f":5: .*{message}"):
        sj.read_clicks(path, SCHEMA)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ids: sj.ClickSchema(ids=ids), "name the column of labels"),
        (lambda ids: sj.ClickSchema("buy", labels=LABELS, ids=ids), "whose first"),
        (lambda ids: sj.ClickSchema(labels=["a", "a"], ids=ids), "different names"),
        (
            lambda ids: sj.ClickSchema(labels={"a": Label(after="b")}, ids=ids),
            "'a' comes after 'b', which is no label",
        ),
        (lambda ids: sj.ClickSchema(labels=["item", "a"], ids=ids), "two"),
        (lambda ids: Label("quantile"), "quantile=... goes with"),
        (lambda ids: Label("squared", quantile=0.5), "quantile=... goes with"),
        (lambda ids: Label("quantile", quantile=1.0), "between 0 and 1"),
        (lambda ids: Label("squared", after="a"), "is for loss"),
        (lambda ids: Label(weight=-1.0), "0 or more"),
        (lambda ids: Label(*OTHER), "loss is one of"),
    ],
)
def test_wrong_schemas(make, message):
    with pytest.raises(ValueError, match=message):
        make(SCHEMA.ids)


def test_a_data_set_checks_its_labels():
    clicks = sj.read_clicks(ROWS, SCHEMA)
    for labels, message in (
        (clicks.labels[:, 0], "labels must have shape"),
        (np.where(clicks.labels == 1, 2, clicks.labels), "'click' do not fit its loss"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(clicks, labels=labels)
    none = clicks.labels.copy()
    none[:, 1] = np.nan
    empty = dataclasses.replace(clicks, labels=none)
    model, optimizer = sj.build(sj.DCNConfig(dim=2, cross=1, hidden=(2,)), empty)
    with pytest.raises(ValueError, match="no example has the label 'buy'"):
        sj.fit(model, optimizer, empty)
