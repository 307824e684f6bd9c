"""Defaults of click models by the number of examples, and warnings about bad models."""

import dataclasses
import math
import pathlib
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
from flax import nnx

import sparsejax as sj
from sparsejax.kinds.clicks.regression import (
    fit_regression,
    regression_logits,
)
from sparsejax.kinds.clicks.worth import compared
from sparsejax.kinds.kind import kind_called
from sparsejax.options.measuring import Evaluate
from sparsejax.options.reading import Reading
from sparsejax.options.training import Training
from sparsejax.runs.training import settings_of
from sparsejax.sparse import CSR

CONFIG = sj.WideDeepConfig(dim=2, hidden=(4,))


def drawn(rows: int, seed: int = 0) -> sj.ClickDataset:
    """Draws clicks that depend on a user, on tags and on a number."""
    rng = np.random.default_rng(seed)
    schema = sj.ClickSchema(
        "click",
        dense={"price": sj.data.DenseColumn()},
        ids={"user": sj.data.HashedColumn(12), "tags": sj.data.HashedColumn(9)},
    )
    user = rng.integers(0, 12, rows).astype(np.int32)
    price = 5 + 3 * rng.standard_normal((rows, 1)).astype(np.float32)
    has = rng.random((rows, 9)) < 0.2
    tags = np.nonzero(has)[1].astype(np.int32)
    indptr = np.append(0, np.cumsum(has.sum(1))).astype(np.int32)
    of_tags = has @ np.where(np.arange(9) < 4, -0.7, 0.6)
    logits = np.sin(np.arange(12))[user] + of_tags + 0.4 * (price[:, 0] - 5)
    labels = (rng.random(rows) < scipy.special.expit(logits)).astype(np.float32)
    ids = {"user": user, "tags": CSR(None, tags, indptr, num_cols=9)}
    return sj.ClickDataset(labels, price, ids, schema, {})


def lists_of(clicks: sj.ClickDataset) -> Any:
    return clicks.ids["tags"]


class Scaled(nnx.Module):
    """A model whose logit is a multiple of a dense column."""

    kind = "clicks"

    def __init__(self, factor: float, offset: float = 0.0):
        self.factor, self.offset = factor, offset

    def __call__(self, dense, ids):
        return self.factor * dense[:, 0] + self.offset


@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs", "decay"),
    [
        (1, 64, 10, 5.0),
        (1_000, 64, 10, 5.0),
        (3_000, 64, 10, 5.0),
        (12_000, 128, 10, 4.0),
        (100_000, 256, 3, 2.0),
        (1_000_000, 1024, 2, 0.92),
        (10_000_000, 4096, 1, 0.43),
        (4_000_000_000, 4096, 1, 0.058),
    ],
)
def test_batch_epochs_and_decay_follow_from_the_rows(rows, batch_size, epochs, decay):
    how = sj.training.recipe(CONFIG, rows)
    assert (how.batch_size, how.num_epochs) == (batch_size, epochs)
    steps = epochs * math.ceil(rows / batch_size)
    rate = sj.optimizers.schedule(
        "cosine_decay_schedule", init_value=5e-3, decay_steps=steps
    )
    assert how.rule == sj.optimizers.adamw(rate, weight_decay=decay)


def test_everything_that_trains_takes_the_same_defaults():
    """`recipe`, runs, `fit` and `build`; a trained model and a stream have no decay."""
    clicks, runs = drawn(1100), kind_called("clicks")
    how = sj.training.recipe(CONFIG, clicks)
    assert (how.batch_size, how.num_epochs) == (64, 10)
    source = runs.source(Training(data=clicks, config=CONFIG), None)
    settings = settings_of(Training(data=clicks, config=CONFIG), CONFIG, source)
    assert settings.batch_size == how.batch_size
    assert (settings.num_epochs, settings.optimizer) == (how.num_epochs, how.rule)
    model, optimizer = sj.build(CONFIG, clicks)
    assert optimizer.rule == sj.optimizers.adamw(2e-3, weight_decay=5.0)
    # Whoever names a batch or a number of epochs gets it.
    some = clicks.rows(slice(40))
    assert len(sj.fit(model, optimizer, some, num_epochs=2)) == 2
    assert int(optimizer.step[...]) == 2
    assert len(sj.fit(model, optimizer, some, batch_size=40)) == 10
    assert int(optimizer.step[...]) == 2 + 10

    more = Training(
        data=clicks, config=CONFIG, origin=pathlib.Path("before"), decay="none"
    )
    settings = settings_of(more, CONFIG, source)
    assert (settings.batch_size, settings.num_epochs) == (64, 1)
    assert settings.optimizer == sj.optimizers.adamw(2e-3, weight_decay=0.0)
    stream = Training(data="d", config=CONFIG, follow=True, num_epochs=1, decay="none")
    none = dataclasses.replace(source, data=clicks.rows(slice(0)), chunks=[1])
    settings = settings_of(stream, CONFIG, none)
    assert (settings.batch_size, settings.num_epochs) == (4096, 1)
    assert settings.optimizer == sj.optimizers.adamw(2e-3, weight_decay=0.0)
    named = Training(
        data=clicks,
        config=CONFIG,
        optimizer="adagrad",
        batch_size=50,
        learning_rate=1.0,
    )
    settings = settings_of(named, CONFIG, source)
    assert (settings.batch_size, settings.optimizer.name) == (50, "adagrad")
    # Other kinds are as they were.
    for kind in ("items", "histories"):
        defaults = kind_called(kind).defaults
        assert defaults.for_data(3) is defaults and defaults.of_loop(3) == (512, 20)
    # Many rare categories need more decay.
    rare: dict[str, Any] = {**clicks.ids} | {"user": np.arange(1100, dtype=np.int32)}
    schema = sj.ClickSchema(
        "click",
        clicks.schema.dense,
        {**clicks.schema.ids, "user": sj.data.HashedColumn(1100)},
    )
    many = sj.ClickDataset(clicks.labels, clicks.dense, rare, schema, {})
    decay = kind_called("clicks").defaults.for_data(many).options["weight_decay"]
    assert decay == pytest.approx(6 * math.sqrt((1100 + 9) / 1100), abs=0.06)


def test_the_regression_is_that_of_all_columns():
    """Of standardized dense columns, users, and how often a tag is in a list."""
    train, test = drawn(3000), drawn(300, seed=1)

    def columns(clicks):
        dense = (clicks.dense - train.dense.mean()) / train.dense.std()
        users = np.eye(12)[clicks.ids["user"]]
        tags = np.zeros((clicks.num_rows, 9))
        lists: Any = clicks.ids["tags"]
        rows = np.repeat(np.arange(clicks.num_rows), np.diff(lists.indptr))
        np.add.at(tags, (rows, lists.indices), 1)
        return np.concatenate([dense, users, tags], axis=1).astype(np.float64)

    x, y = columns(train), train.labels.astype(np.float64)

    def loss(w, variance):
        z = x @ w[:-1] + w[-1]
        return np.sum(np.logaddexp(0, z) - y * z) + w[:-1] @ w[:-1] / (2 * variance)

    found = regression_logits(fit_regression(train), test)
    wanted = [
        columns(test) @ best[:-1] + best[-1]
        for variance in (0.03, 0.1, 0.3, 1.0, 3.0)
        for best in [scipy.optimize.minimize(loss, np.zeros(23), (variance,)).x]
    ]
    assert min(np.abs(found - each).max() for each in wanted) < 0.02
    # Categories that the training data lack, and lists without an entry, count nothing.
    none = train.rows(np.flatnonzero(np.diff(lists_of(train).indptr) == 0))
    assert np.isfinite(regression_logits(fit_regression(none), test)).all()


@pytest.mark.parametrize("with_validation", [False, True])
def test_a_model_that_is_worse_than_simple_predictions_is_named(with_validation):
    clicks = drawn(3000)
    validation = drawn(900, seed=1) if with_validation else None
    what = "validation" if with_validation else "training"

    def said(model):
        found = compared(model, clicks, validation)
        assert found is not None
        assert found.examples == (900 if with_validation else 1000)
        return found.warning(what)

    # The right weight of the price alone is worse than all columns.
    text = said(Scaled(0.4, -2.0)) or ""
    assert (
        f"worse than a logistic regression of the same columns on {'900' if with_validation else '1,000'} {what} ex"
        in text
    )
    # Too sure, though in the right order.
    better, _ = sj.build(sj.WideDeepConfig(dim=2, hidden=(8,)), clicks)
    optimizer = sj.Optimizer(better, sj.optimizers.adam(0.02))
    sj.fit(better, optimizer, clicks, batch_size=256, num_epochs=12)
    assert said(better) is None
    assert compared(better, clicks.rows(slice(700)), None) is None  # too few to say
    clicks.labels[:] = 1
    assert compared(better, clicks, validation) is None


def test_a_run_warns_once_after_training():
    clicks = drawn(1800)
    options = {"config": CONFIG, "batch_size": 1800, "num_epochs": 1}
    with pytest.warns(UserWarning, match="worse than a logistic regression") as told:
        run = sj.Run.train(clicks, **options)
    assert len(told) == 1 and "num_epochs" in str(told[0].message)
    # After one step the model says some .5, and nine of ten examples are clicks.
    labels = (np.arange(1800) % 10 > 0).astype(np.float32)
    others = sj.ClickDataset(labels, clicks.dense, clicks.ids, clicks.schema, {})
    with pytest.warns(UserWarning, match="share of clicks for all examples is as good"):
        run.evaluate(others)


@pytest.mark.usefixtures("wrong_types")
def test_categories_that_share_an_id_are_told(tmp_path, is_here):
    """They are one group. A file has the categories themselves."""
    rng = np.random.default_rng(0)
    user, price = rng.integers(0, 40, 1000), rng.normal(size=1000)
    columns = {"click": (rng.random(1000) < 0.5).astype(int).tolist()}
    columns |= {"user": [f"u{u}" for u in user], "price": price.tolist()}
    path = tmp_path / "c.csv"
    lines = [
        "click,user,price",
        *(f"{a},{b},{c}" for a, b, c in zip(*columns.values(), strict=True)),
    ]
    path.write_text("\n".join(lines))
    dense, model = {"price": sj.data.DenseColumn()}, Scaled(1.0)
    wanted = sj.metrics.group_auc(price, np.array(columns["click"]), user)
    assert wanted.groups == 40
    for column, text in (
        (
            sj.data.HashedColumn(100),
            r"to 99 ids, of which 3\d occur: .* about \d\d categories",
        ),
        (sj.data.HashedColumn(9), "to 8 ids, and all of them occur"),
        (
            sj.data.VocabularyColumn(min_count=25),
            r"\d+ of 1,000 examples have a category wi",
        ),
    ):
        schema = sj.ClickSchema("click", dense, {"user": column})
        clicks = sj.read_clicks(str(path), schema)
        with pytest.warns(UserWarning, match=text) as told:
            found = sj.evaluate(model, clicks, groups="user")
        assert len(told) == 1 and is_here(told[0])
        assert found["groups"] < 40
        measuring = Evaluate(heldout=str(path), groups="user")
        run: Any = SimpleNamespace(known=clicks.rows(slice(0)), model=lambda: model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "predicting the share")
            exact = kind_called("clicks").measured(measuring, Reading(), run).metrics
        assert exact["groups"] == 40
        assert exact["group_auc"] == pytest.approx(wanted.auc, abs=1e-6)
    schema = sj.ClickSchema("click", dense, {"user": sj.data.VocabularyColumn()})
    clicks = sj.read_clicks(str(path), schema)
    assert sj.evaluate(model, clicks, groups="user")["groups"] == 40
