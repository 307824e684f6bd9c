"""Clicks with a column that shares another column's table, from training to predictions."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.cli.main import main

SCHEMA = sj.ClickSchema(
    "click",
    ids={
        "item": sj.data.VocabularyColumn(),
        "seen": sj.data.VocabularyColumn(like="item"),
    },
)


def made(seed: int, first: int) -> list[dict]:
    """Draws clicks on items that the user has had before."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(300):
        seen = (first + rng.integers(0, 8, rng.integers(1, 4))).tolist()
        item = int(rng.integers(0, 8)) if rng.random() < 0.5 else seen[0]
        click = int(rng.random() < (0.9 if item in seen else 0.1))
        names = [f"i{i}" for i in seen]
        rows.append({"click": click, "item": f"i{item}", "seen": names})
    return rows


def test_gradients_of_both_columns_reach_the_one_table():
    data = sj.read_clicks(made(0, 0), SCHEMA)
    config = sj.DeepFMConfig(dim=3, hidden=(4,))

    def model(features) -> Any:
        return sj.clicks.build_click_model(
            config, num_dense=0, features=features, rngs=nnx.Rngs(0)
        )

    one, two = model(data.features), model(data.num_ids)
    assert one.num_ids == two.num_ids == data.num_ids
    assert one.like == {"seen": "item"} and two.like == {}
    for shared, apart in (
        (one.embeddings, two.embeddings),
        (one.linear.embeddings, two.linear.embeddings),
    ):
        (stack,), (other,) = shared.stacks, apart.stacks
        (kernel,), (wide,) = shared.kernels.values(), apart.kernels.values()
        count = data.num_ids["item"]
        rows = jax.random.normal(jax.random.key(1), (count, stack.dim))
        (table,) = stack.tables
        at = table.place.first
        kernel[...] = kernel[...].at[at : at + count].set(rows)
        for table in other.tables:
            at = table.place.first
            wide[...] = wide[...].at[at : at + count].set(rows)
    two.factors, two.hidden, two.linear.bias = one.factors, one.hidden, one.linear.bias

    def loss(model):
        dense = jnp.zeros((data.num_rows, 0))
        logits = model(
            dense, {name: jax.tree.map(jnp.asarray, x) for name, x in data.ids.items()}
        )
        return jnp.mean(jax.nn.softplus(logits) - data.labels * logits)

    found, expected = (nnx.value_and_grad(loss)(m) for m in (one, two))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    count = data.num_ids["item"]

    def rows(array, table):
        return np.asarray(array)[table.place.first : table.place.first + count]

    for shared, apart, path in (
        (one.embeddings, two.embeddings, ["embeddings"]),
        (one.linear.embeddings, two.linear.embeddings, ["linear", "embeddings"]),
    ):
        (ours,), (theirs,) = (
            functools.reduce(lambda g, key: g[key], path, gradient)["kernels"].values()
            for _, gradient in (found, expected)
        )
        (table,), tables = shared.stacks[0].tables, apart.stacks[0].tables
        total = sum(rows(theirs[...], each) for each in tables)
        assert np.abs(total).max() > 1e-4
        np.testing.assert_allclose(rows(ours[...], table), total, rtol=2e-5, atol=1e-8)


def test_a_model_and_data_that_do_not_share_alike():
    data = sj.read_clicks(made(0, 0), SCHEMA)
    how = {"num_dense": 0, "rngs": nnx.Rngs(0)}
    apart = sj.clicks.WideDeep(sj.WideDeepConfig(), features=data.num_ids, **how)
    with pytest.raises(ValueError, match="'seen' has the table of 'item' by the data"):
        sj.predict(apart, data)
    for like in ("user", "seen"):
        with pytest.raises(
            ValueError, match=f"reads the table of '{like}', which is no"
        ):
            features = {"item": 9, "seen": like}
            sj.clicks.WideDeep(sj.WideDeepConfig(), features=features, **how)


@pytest.mark.parametrize(
    ("model", "rule", "rate", "epochs"),
    [("deepfm", "adagrad", ".1", "10"), ("din", "adam", ".01", "40")],
)
def test_from_the_schema_to_a_predictor(
    tmp_path, monkeypatch, capsys, model, rule, rate, epochs
):
    monkeypatch.chdir(tmp_path)
    for name, seed, first in (("monday", 0, 0), ("tuesday", 1, 4), ("test", 2, 0)):
        lines = [json.dumps(row) + "\n" for row in made(seed, first)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA.to_json()))
    how = ["--epochs", epochs, "--batch-size", "64", "--decay", "none"]
    how += ["--learning-rate", rate, "--optimizer", rule]
    flags = ["--model", model, "--schema", "schema.json", *how]
    assert main(["train", "monday.jsonl", "--run", "monday", *flags]) == 0
    run = sj.Run.load("monday")
    assert run.model.like == {"seen": "item"}
    assert run.evaluate("test.jsonl")["auc"] > 0.7

    # An item that is only in Tuesday's lists gets one row, for both columns.
    more = ["train", "tuesday.jsonl", "--from", "monday", "--run", "tuesday"]
    assert main([*more, *how]) == 0
    tuesday = sj.Run.load("tuesday")
    assert run.model.num_ids == {"item": 10, "seen": 10}
    assert tuesday.model.num_ids == {"item": 14, "seen": 14}

    tuesday.export("shop.predictor")
    rows = made(2, 2)
    # Only the last of these ids are read, as there are more than a DIN reads.
    rows[0]["seen"] = ["i9"] * 20 + [f"i{i % 7}" for i in range(50)]
    records = {name: [row[name] for row in rows] for name in ("item", "seen")}
    predictor = sj.load_predictor("shop.predictor")
    assert predictor.vocabularies.keys() == {"item"}
    data = sj.read_clicks(rows, SCHEMA, features=tuesday.known)
    np.testing.assert_allclose(
        predictor.predict_records(records),
        sj.predict(tuesday.model, data),
        rtol=1e-5,
    )
    plan = ["plan", "--model", model, "--schema", "schema.json", "--examples"]
    capsys.readouterr()
    assert main([*plan, "monday.jsonl", "--memory", "1GB"]) == 0
    out = capsys.readouterr().out
    tables = [line.split("  ")[0] for line in out.splitlines() if " 10 " in line]
    linear = ["item, linear"] if model == "deepfm" else []
    assert tables == ["item", *linear]
