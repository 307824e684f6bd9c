"""Weights of click examples, from a column of a file to losses and metrics."""

import json

import jax
import numpy as np
import pandas
import pytest

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.kinds.clicks.kind import KIND
from sparsejax.options.reading import Reading

SCHEMA = sj.ClickSchema(
    "click",
    {"age": sj.data.DenseColumn()},
    {"user": sj.data.HashedColumn(9)},
    weight="w",
)
CONFIG = sj.WideDeepConfig(dim=2, hidden=(3,))
ROWS = 40
USERS = np.arange(ROWS) % 3


def table(rows=ROWS) -> dict[str, list]:
    """Columns of a file, with weights from 0 to 3."""
    rng = np.random.default_rng(0)
    return {
        "click": rng.integers(0, 2, rows).tolist(),
        "age": rng.standard_normal(rows).tolist(),
        "user": rng.integers(0, 5, rows).astype(str).tolist(),
        "w": (np.arange(rows) % 4).tolist(),
    }


def fitted(clicks, config=CONFIG, **options):
    model, optimizer = sj.build(config, clicks, sj.optimizers.sgd(0.1))
    history = sj.fit(
        model, optimizer, clicks, batch_size=64, num_epochs=2, shuffle=False, **options
    )
    return sj.predict(model, clicks), [entry["loss"] for entry in history]


@pytest.mark.parametrize("shape", [None, (2, 4)], ids=["one", "mesh"])
def test_a_column_of_weights_is_weights_of_fit(tmp_path, shape):
    clicks = sj.read_clicks(table(), SCHEMA)
    clicks.save(tmp_path / "clicks.parquet")
    stored = sj.ClickDataset.load(tmp_path / "clicks.parquet")
    np.testing.assert_array_equal(stored.weights, np.arange(ROWS) % 4)
    plain = sj.read_clicks(table(), sj.ClickSchema("click", SCHEMA.dense, SCHEMA.ids))
    expected = fitted(plain, weights=np.arange(ROWS) % 4)
    assert not np.allclose(expected[0], fitted(plain)[0], atol=1e-4)
    if shape is not None:
        with_mesh = sj.make_mesh(data=shape[0], model=shape[1])
        with jax.set_mesh(with_mesh):
            found = fitted(clicks)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        return
    scanned = sj.data.scan_clicks(tmp_path / "clicks.parquet", chunk_rows=100)
    raw = tmp_path / "raw.csv"
    names = list(table())
    lines = zip(*table().values(), strict=True)
    raw.write_text(
        "\n".join([",".join(names), *(",".join(map(str, line)) for line in lines)])
    )
    for data in (clicks, stored, scanned, sj.read_clicks(raw, SCHEMA)):
        found = fitted(data)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    # Both kinds of weights are multiplied.
    twice = fitted(plain, weights=(np.arange(ROWS) % 4) ** 2)
    np.testing.assert_allclose(
        fitted(clicks, weights=np.arange(ROWS) % 4)[0], twice[0], rtol=1e-5
    )


def test_weighted_metrics_are_those_of_repeated_examples():
    clicks = sj.read_clicks(table(), SCHEMA)
    model, optimizer = sj.build(CONFIG, clicks, sj.optimizers.sgd(0.1))
    sj.fit(model, optimizer, clicks, num_epochs=1)
    repeated = clicks.rows(np.repeat(np.arange(ROWS), np.arange(ROWS) % 4))
    by = np.repeat(USERS, np.arange(ROWS) % 4)
    expected = sj.evaluate(model, repeated, groups=by)
    found = sj.evaluate(model, clicks, groups=USERS, weighted=True)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found != pytest.approx(sj.evaluate(model, clicks, groups=USERS), rel=1e-3)
    with pytest.raises(ValueError, match="leave out weighted"):
        sj.evaluate(model, clicks, weighted=True, keep_rows=True)
    bare = sj.read_clicks(table(), sj.ClickSchema("click", SCHEMA.dense, SCHEMA.ids))
    with pytest.raises(ValueError, match="have no weights"):
        sj.evaluate(model, bare, weighted=True)


def test_labels_without_a_weight_or_a_class_are_named_and_left_out():
    """Examples of weight 0 do not count, so that a label may have one class or no example."""
    rows = {"click": [1, 0, 1, 0], "buy": [1, 0, 1, 1], "left": [1, 0, 1, 0]}
    label = sj.data.LabelColumn
    schema = sj.ClickSchema(
        labels={
            "click": label(),
            "buy": label(weight="some"),
            "left": label(weight="none"),
        },
        ids={"user": sj.data.HashedColumn(9)},
    )
    rows |= {"some": [1, 0, 1, 1], "none": [0] * 4, "user": [*"abcd"]}
    clicks = sj.read_clicks(rows, schema)
    model, _ = sj.build(CONFIG, clicks)
    groups = np.array([1, 1, 2, 2])
    with pytest.warns(UserWarning) as told:
        found = sj.evaluate(model, clicks, groups=groups, weighted=True)
    said = " ".join(str(each.message) for each in told)
    assert "all labels 'buy' are 1" in said
    assert "no example has the label 'left' and a weight above 0" in said
    assert {"auc/click", "group_auc/click", "log_loss/buy"} <= {*found}
    assert not {"auc/buy", "group_auc/buy", "log_loss/left"} & {*found}
    with pytest.warns(UserWarning) as told:
        found = sj.evaluate(model, clicks, groups=np.arange(4))
    assert str(told[0].message).startswith("no group_auc of labels 'click': no group")
    assert "auc/click" in found and "group_auc/click" not in found


def test_a_regression_is_that_of_repeated_examples():
    rows = table(400)
    clicks = sj.read_clicks(rows, SCHEMA)
    config = sj.WideDeepConfig(dim=2, hidden=(3,), regression=True)
    model, _ = sj.build(config, clicks)
    repeated = clicks.rows(np.repeat(np.arange(400), np.arange(400) % 4))
    plain = sj.ClickDataset(
        repeated.labels,
        repeated.dense,
        repeated.ids,
        sj.ClickSchema("click", SCHEMA.dense, SCHEMA.ids),
        {},
    )
    other, _ = sj.build(config, plain)
    for mine, theirs in zip(
        (model.linear.bias, model.linear.embeddings.table("user")),
        (other.linear.bias, other.linear.embeddings.table("user")),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(mine[...]), theirs[...], atol=0.1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "weight 'w' is missing; expected a number that is 0 or more"),
        ("-1", "weight 'w' is -1; expected"),
        ("much", "column 'w'"),
    ],
)
def test_wrong_weights(tmp_path, value, message):
    path = tmp_path / "clicks.csv"
    more = "1,2,ann,1\n" * 300
    path.write_text(f"click,age,user,w\n1,2,ann,1\n0,3,bob,{value}\n{more}")
    with pytest.raises(sj.data.DataError, match=f":3: .*{message}"):
        sj.read_clicks(path, SCHEMA)
    with pytest.warns(UserWarning, match=":3: |line"):
        assert sj.read_clicks(path, SCHEMA, skip_bad_lines=True).num_rows == 301


def test_weights_that_say_nothing(tmp_path):
    nothing = sj.read_clicks({**table(), "w": [0] * ROWS}, SCHEMA)
    with pytest.raises(ValueError, match="all examples have the weight 0"):
        fitted(nothing)
    # One of many files that are trained on as they come is passed over.
    files = {name: tmp_path / f"{name}.parquet" for name in ("saved", "raw")}
    nothing.save(files["saved"])
    pandas.DataFrame({**table(), "w": 0}).to_parquet(files["raw"])
    for path in files.values():
        with pytest.warns(UserWarning, match=f"{path}: all examples have the weight 0"):
            assert KIND.read_followed(str(path), nothing, Reading()) is None
    with pytest.raises(ValueError, match="'age'.* have two"):
        sj.ClickSchema("click", SCHEMA.dense, SCHEMA.ids, weight="age")
    assert sj.ClickSchema.from_json(SCHEMA.to_json()) == SCHEMA


def test_the_flag(tmp_path, capsys):
    lines = list(zip(*table().values(), strict=True))
    path = tmp_path / "clicks.csv"
    path.write_text(
        "\n".join(["click,age,user,w", *(",".join(map(str, each)) for each in lines)])
    )
    bare = tmp_path / "bare.csv"
    bare.write_text(
        "\n".join(["click,age,user", *(",".join(map(str, x[:3])) for x in lines)])
    )
    config = tmp_path / "wide_deep.json"
    config.write_text(json.dumps(CONFIG.to_json()))
    run = tmp_path / "run"
    words = "--label click --dense age --categories user --weight w --epochs 1"
    assert not main(
        f"train {path} --run {run} --config {config} {words} --batch-size 8 --validation {bare}".split()
    )
    capsys.readouterr()
    assert not main(f"evaluate {run} {path} --weighted".split())
    weighted = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not main(f"evaluate {run} {bare}".split())  # which needs no weights
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) != weighted
    opened = sj.Run.load(run)
    opened.train_more(path, tmp_path / "more", num_epochs=1)
    assert sj.Run.load(tmp_path / "more").known.schema.weight == "w"
    with pytest.raises(sj.data.DataError, match="no column 'w'"):
        opened.evaluate(bare, weighted=True)
