"""Several labels of clicks: read, saved, scanned, split, and errors with their lines."""

import dataclasses
import functools
import json

import numpy as np
import pytest

import sparsejax as sj
from sparsejax.data.sets.click_schema import unweighted
from sparsejax.kinds.clicks.job import click_examples
from sparsejax.kinds.clicks.reading import read_like
from sparsejax.kinds.clicks.worth import warning_of_columns
from sparsejax.options.reading import Reading

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
    with pytest.raises(ValueError, match="labels has a name twice"):
        sj.ClickSchema.from_json(short | {"labels": ["click", "click"]})
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
    np.testing.assert_array_equal(price.weights, [6, 0])
    assert price.schema.weight == "v" and not price.schema.label_weights
    np.testing.assert_array_equal(price.ids["item"], [2, 2])
    with pytest.raises(ValueError, match="no label 'watch'; there are"):
        clicks.of_label("watch")


def test_one_of_several_labels_keeps_weights_and_propensities_of_its_own(tmp_path):
    labels = {**LABELS, "minutes": Label("squared", weight=0.5)}
    rows = [{**row, "minutes": 1.5, "seen": 0.5} for row in ROWS]
    schema = sj.ClickSchema(
        labels=labels, ids=SCHEMA.ids, propensity="seen", least_propensity=0.1
    )
    clicks = sj.read_clicks(rows, schema)
    expected = {"click": None, "buy": None, "price": [3, 0], "minutes": None}
    for name, weights in expected.items():
        clicks.of_label(name).save(tmp_path / "alone.parquet")
        alone = sj.ClickDataset.load(tmp_path / "alone.parquet")
        np.testing.assert_array_equal(alone.weights, weights)
        assert (alone.propensities is not None) == (labels[name].loss == "binary")
        assert (
            alone.schema.label == name and alone.schema == clicks.of_label(name).schema
        )


def test_a_missing_label_is_0_without_the_one_before():
    labels = {"click": Label(), "buy": Label(after="click"), "back": Label(after="buy")}
    schema = sj.ClickSchema(labels=labels, ids={"item": sj.data.HashedColumn(9)})
    rows = {"click": [0, 1, 1, None], "buy": [None, 0, None, None]}
    clicks = sj.read_clicks({**rows, "back": [None] * 4, "item": list("abcd")}, schema)
    nan = np.nan
    np.testing.assert_array_equal(
        clicks.labels, [[0, 0, 0], [1, 0, 0], [1, nan, nan], [nan, nan, nan]]
    )
    wrong = clicks.labels.copy()
    wrong[0, 1] = 1
    with pytest.raises(ValueError, match="'buy' is 1 where 'click', which it comes"):
        dataclasses.replace(clicks, labels=wrong)


def test_a_column_that_tells_a_label_is_named_with_it():
    rng = np.random.default_rng(0)
    buy = rng.integers(0, 2, 1600).astype(np.float32)
    labels = {"minutes": Label("squared"), "buy": Label()}
    schema = sj.ClickSchema(labels=labels, dense={"paid": sj.data.DenseColumn()})
    both = np.stack([rng.random(1600), buy], axis=1).astype(np.float32)
    clicks = sj.ClickDataset(both, buy[:, None], {}, schema, {})
    warning = warning_of_columns(clicks)
    assert warning is not None and warning.startswith("label 'buy': a single column")
    assert "'paid'" in warning


def test_data_to_train_on_has_the_weights_of_a_run():
    clicks = sj.read_clicks(ROWS, SCHEMA)
    read = functools.partial(
        read_like, known=clicks, reading=Reading(), append=True, training=True
    )
    assert read(clicks).weights is not None
    bare = dataclasses.replace(clicks, schema=unweighted(SCHEMA), weights=None)
    with pytest.raises(ValueError, match="has no weights, which the data of the run"):
        read(bare)


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


@pytest.mark.usefixtures("wrong_types")
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
        (
            lambda ids: sj.ClickSchema(labels={"a": Label(weight="v")}, ids=ids),
            "weight='v' of the only label",
        ),
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
    with pytest.warns(UserWarning, match="no example has the label 'buy'"):
        assert click_examples(empty).num_rows == 3
