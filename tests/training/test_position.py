"""Positions on a page: a column that only training reads; and inverse propensities."""

import contextlib
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from served import Client, listening, tensor

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.serving.engine import Shape
from sparsejax.serving.service import Service, Settings

ITEMS, PLACES = 8, 4
SEEN = 1 / np.arange(1, PLACES + 1)  # the share of visits that look at a place
RELEVANCE = np.linspace(0.2, 0.8, ITEMS)
IDS = {"item": sj.data.VocabularyColumn()}
BY_PLACE = {**IDS, "place": sj.data.VocabularyColumn(fixed="0")}


def planted(rows: int = 20_000) -> dict[str, np.ndarray]:
    """Draws clicks on a page whose first positions most often have the least relevant items."""
    rng = np.random.default_rng(0)
    item = rng.integers(0, ITEMS, rows)
    place = np.clip(item * PLACES // ITEMS + rng.integers(-1, 2, rows), 0, PLACES - 1)
    click = rng.random(rows) < SEEN[place] * RELEVANCE[item]
    return {
        "click": click.astype(int),
        "item": item.astype(str),
        "place": place.astype(str),
        "seen": SEEN[place],
    }


def probabilities(schema) -> np.ndarray:
    """The predictions for each item by a model that has only a number for each id."""
    clicks = sj.read_clicks(planted(), schema)
    config = sj.WideDeepConfig(dim=1, hidden=(1,))
    model, optimizer = sj.build(config, clicks, sj.optimizers.adagrad(0.3))
    sj.fit(model, optimizer, clicks, batch_size=512, num_epochs=4)
    every = {"item": [*map(str, range(ITEMS))], "place": ["3"] * ITEMS}
    every |= {"click": [0] * ITEMS, "seen": [1.0] * ITEMS}
    return sj.predict(model, sj.read_clicks(every, schema, features=clicks))


def test_order_is_that_of_relevance_by_propensities():
    schema = sj.ClickSchema("click", ids=IDS, propensity="seen", least_propensity=0.1)
    corrected = probabilities(schema)
    assert (np.argsort(corrected) == np.arange(ITEMS)).all(), corrected
    np.testing.assert_allclose(corrected, RELEVANCE, atol=0.08)
    plain = probabilities(sj.ClickSchema("click", ids=IDS))
    assert np.corrcoef(plain, RELEVANCE)[0, 1] < 0.5, plain


def test_order_is_that_of_relevance_by_a_column_that_only_training_reads():
    fixed = probabilities(sj.ClickSchema("click", ids=BY_PLACE))
    assert np.corrcoef(fixed, RELEVANCE)[0, 1] > 0.9, fixed


def test_propensities_divide_labels_down_to_a_bound(tmp_path):
    rows = {"click": [1, 1, 0], "item": list("aba"), "seen": [0.5, 0.01, 0.2]}
    schema = sj.ClickSchema("click", ids=IDS, propensity="seen", least_propensity=0.1)
    clicks = sj.read_clicks(rows, schema)
    clicks.save(tmp_path / "clicks.parquet")
    scanned = sj.data.scan_clicks(tmp_path / "clicks.parquet", chunk_rows=2)
    first, _ = scanned.chunks()
    for data in (clicks, sj.ClickDataset.load(tmp_path / "clicks.parquet")):
        np.testing.assert_allclose(data.trained_labels, [2, 10, 0])
    np.testing.assert_allclose(first.trained_labels, [2, 10])
    assert sj.ClickSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    labels = {"click": sj.data.LabelColumn(), "minutes": sj.data.LabelColumn("squared")}
    both = sj.read_clicks(
        {**rows, "minutes": [3, 4, 5]}, dataclasses.replace(schema, labels=labels)
    )
    np.testing.assert_allclose(both.trained_labels, [[2, 3], [10, 4], [0, 5]])
    # A step of SGD moves a bias by the mean of sigmoid(0) - click / seen.
    model, optimizer = sj.build(
        sj.WideDeepConfig(dim=1, hidden=(1,)), clicks, sj.optimizers.sgd(1.0)
    )
    p = sj.predict(model, clicks).astype(np.float64)
    sj.fit(model, optimizer, clicks, batch_size=64, num_epochs=1)
    bias = float(model.linear.bias[...])
    assert bias == pytest.approx(np.mean([2, 10, 0] - p), rel=1e-4)


@pytest.mark.parametrize(
    ("value", "message"),
    [(0, "is 0; expected a number above 0"), (1.5, "is 1.5"), (None, "is missing")],
)
def test_wrong_propensities(value, message):
    schema = sj.ClickSchema("click", ids=IDS, propensity="seen", least_propensity=0.1)
    rows = {"click": [1, 0], "item": list("ab"), "seen": [0.5, value]}
    with pytest.raises(sj.data.DataError, match=f"propensity 'seen' {message}"):
        sj.read_clicks(rows, schema)


def test_a_fixed_category_has_examples():
    ids = {**IDS, "place": sj.data.VocabularyColumn(fixed="1", min_count=2)}
    rows = {"click": [1, 0, 1], "item": list("aba"), "place": ["0", "0", "1"]}
    clicks = sj.read_clicks(rows, sj.ClickSchema("click", ids=ids))
    model, optimizer = sj.build(sj.WideDeepConfig(dim=1, hidden=(1,)), clicks)
    with pytest.raises(ValueError, match="'place' is fixed to the category '1', which"):
        sj.fit(model, optimizer, clicks)


def test_wrong_schemas():
    cases: list[tuple[Any, str]] = [
        ({"propensity": "seen"}, "go together"),
        ({"least_propensity": 0.1}, "go together"),
        ({"propensity": "seen", "least_propensity": 0.0}, "above 0"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            sj.ClickSchema("click", ids=IDS, **options)
    with pytest.raises(ValueError, match="labels with 0 and 1"):
        sj.ClickSchema(
            labels={"minutes": sj.data.LabelColumn("squared")},
            ids=IDS,
            propensity="seen",
            least_propensity=0.1,
        )
    with pytest.raises(ValueError, match="would read nothing"):
        sj.ClickSchema("click", ids={"place": sj.data.HashedColumn(9, fixed="1")})


def test_only_training_reads_a_fixed_column(tmp_path, capsys):
    rng = np.random.default_rng(0)
    columns = {
        "click": rng.integers(0, 2, 200),
        "item": rng.integers(0, 5, 200),
        "place": rng.integers(1, 4, 200),
        "height": rng.random(200).round(3),
    }
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "train.csv").write_text("\n".join([",".join(columns), *lines]))
    bare = [line.rsplit(",", 2)[0] for line in lines]
    (tmp_path / "bare.csv").write_text("\n".join(["click,item", *bare]))
    schema = {
        "label": "click",
        "dense": {"height": {"fixed": 0.25}},
        "ids": {
            "item": {"kind": "vocabulary"},
            "place": {"kind": "vocabulary", "fixed": "1"},
        },
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    config = sj.WideDeepConfig(dim=2, hidden=(2,))
    (tmp_path / "model.json").write_text(json.dumps(config.to_json()))
    words = f"train {tmp_path}/train.csv --run {tmp_path}/run --schema {tmp_path}/schema.json"
    words += (
        f" --config {tmp_path}/model.json --epochs 2 --batch-size 64 --validation .2"
    )
    assert main([*words.split(), "--optimizer", "adagrad"]) == 0
    run = sj.Run.load(tmp_path / "run")
    # The fixed values count, whatever a file or a data set has.
    found = run.evaluate(str(tmp_path / "bare.csv"))
    assert run.evaluate(str(tmp_path / "train.csv")) == found
    read = sj.read_clicks(tmp_path / "train.csv", run.known.schema, features=run.known)
    assert len(np.unique(np.asarray(read.ids["place"]))) == 3
    assert sj.evaluate(run.model, read) == pytest.approx(found)
    expected = run.predict({"item": ["1", "3"]})
    shown = {
        "item": ["1", "3"],
        "place": ["1", "1"],
        "height": [0.25] * 2,
        "click": [0, 1],
    }
    as_shown = sj.read_clicks(shown, run.known.schema, features=run.known)
    np.testing.assert_array_equal(sj.predict(run.model, as_shown), expected)
    path = tmp_path / "shop.predictor"
    assert main(["export", str(tmp_path / "run"), str(path)]) == 0
    predictor = sj.load_predictor(path)
    np.testing.assert_allclose(
        predictor.predict_records({"item": ["1", "3"]}), expected, rtol=1e-6
    )
    np.testing.assert_allclose(
        predictor.predict(read)[:9], sj.predict(run.model, read)[:9], rtol=1e-5
    )
    service = Service("films", Settings(shapes=(Shape(8, 64),)))
    service.load(path)
    with contextlib.closing(service), listening(service) as port:
        status, answer = Client(port).infer(tensor("item", "BYTES", ["1", "3"]))
        assert status == 200
        assert answer["probabilities"]["data"] == pytest.approx(expected, rel=1e-6)
    # Training goes on with what it reads.
    run.train_more(str(tmp_path / "train.csv"), tmp_path / "more", num_epochs=1)
