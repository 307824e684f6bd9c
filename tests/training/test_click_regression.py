"""Click models with a logistic regression that is fitted before training."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import scipy.optimize
import scipy.special
from flax import nnx

import sparsejax as sj
from sparsejax.data.files.names import as_names
from sparsejax.data.files.stored import id_lists
from sparsejax.kinds.clicks.regression import (
    Regression,
    fit_regression,
    least_share,
    regression_logits,
    set_final,
    set_regression,
    set_to,
)
from sparsejax.kinds.clicks.scores import logits_of
from sparsejax.kinds.kind import kind_called
from sparsejax.options.training import Training
from sparsejax.runs.folders import Folder

SCHEMA = sj.ClickSchema(
    "click",
    {"price": sj.data.DenseColumn()},
    {
        "item": sj.data.VocabularyColumn(),
        "seen": sj.data.VocabularyColumn(like="item"),
        "user": sj.data.HashedColumn(6),
    },
)
SMALL: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom": (4,), "top": (4,)},
    "deepfm": {"hidden": (4,)},
}


def drawn(rows: int, seed: int = 0, items: int = 5) -> sj.ClickDataset:
    """Draws clicks that depend on the item, on the items that a user has seen, and on a number."""
    rng = np.random.default_rng(seed)
    price = 2 + 3 * rng.standard_normal((rows, 1)).astype(np.float32)
    item, user = rng.integers(2, 2 + items, rows), rng.integers(0, 6, rows)
    lengths = rng.integers(0, 4, rows)
    seen = rng.integers(2, 7, lengths.sum()).astype(np.int32)
    logits = 0.3 * (price[:, 0] - 2) + np.sin(3.0 * item)
    labels = (rng.random(rows) < scipy.special.expit(logits)).astype(np.float32)
    ids = {
        "item": item.astype(np.int32),
        "seen": id_lists(seen, np.append(0, np.cumsum(lengths)), 2 + items),
        "user": user.astype(np.int32),
    }
    names = as_names([f"i{n}" for n in range(items)])
    return sj.ClickDataset(labels, price, ids, SCHEMA, {"item": names})


def config_of(model: str, **options: Any) -> Any:
    document = {"version": 1, "model": model, "dim": 2, **SMALL[model], **options}
    return sj.clicks.ClickModelConfig.from_json(document)


def on(shape):
    if shape is None:
        return contextlib.nullcontext()
    return jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))


def parts(model: Any) -> list[np.ndarray]:
    """The arrays of the model's regression."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model.linear))]


@pytest.mark.parametrize(
    ("combiner", "power"), [("sum", 0), ("mean", 1), ("sqrtn", 0.5)]
)
def test_is_that_of_scipy(combiner, power):
    """Two columns share the weights of a table; lists are combined as the model does."""
    train, test = drawn(800), drawn(200, seed=1)
    rng = np.random.default_rng(2)
    tables = {"item": rng.normal(size=7), "user": rng.normal(size=6)}
    before = Regression(np.array([0.2]), -0.3, tables)

    def columns(clicks):
        lists: Any = clicks.ids["seen"]
        lengths = np.diff(lists.indptr)
        of_items = np.eye(7)[clicks.ids["item"]]
        rows = np.repeat(np.arange(clicks.num_rows), lengths)
        factor = 1 / np.maximum(lengths, 1)[rows] ** power
        np.add.at(of_items, (rows, np.asarray(lists.indices)), factor)
        dense = (clicks.dense - train.dense.mean()) / train.dense.std()
        users = np.eye(6)[clicks.ids["user"]]
        return np.concatenate([dense, of_items, users], axis=1).astype(np.float64)

    x, y = columns(train), train.labels
    for start in (None, before):
        offsets = 0.0 if start is None else regression_logits(start, train, combiner)

        def loss(w, variance, offsets=offsets):
            z = offsets + x @ w[:-1] + w[-1]
            penalty = w[:-1] @ w[:-1] / (2 * variance)
            return np.sum(np.logaddexp(0, z) - y * z) + penalty

        fitted = fit_regression(train, combiner, before=start)
        found = regression_logits(fitted, test, combiner)
        first = 0.0 if start is None else regression_logits(start, test, combiner)
        apart = []
        for variance in (0.03, 0.1, 0.3, 1.0, 3.0):
            best = scipy.optimize.minimize(loss, np.zeros(15), (variance,)).x
            wanted = first + columns(test) @ best[:-1] + best[-1]
            apart.append(np.abs(found - wanted).max())
        assert min(apart) < 0.02


def test_the_share_is_the_least_that_is_as_good():
    rng = np.random.default_rng(0)
    z = rng.normal(size=4000)
    labels = (rng.random(4000) < scipy.special.expit(z)).astype(np.float64)
    noise = 0.3 * rng.normal(size=4000)
    assert least_share(z, z + noise, labels) == 0
    assert 0.7 < least_share(np.zeros(4000), z, labels) <= 1
    assert 0.2 < least_share(np.zeros(4000), 3 * z, labels) < 0.35  # far too sure
    assert least_share(z, z, labels) == 0


@pytest.mark.parametrize(
    ("model", "shape"), [("dlrm", None), ("deepfm", (2, 4))], ids=["one", "mesh"]
)
def test_training_leaves_it_as_it_is(model, shape):
    train, validation = drawn(320), drawn(128, seed=1)
    with on(shape):
        built, optimizer = sj.build(
            config_of(model, regression=True), train, sj.optimizers.adagrad(0.05)
        )
        fitted = regression_logits(fit_regression(train), validation)
        set_to(built.share, 0.0)
        only, _ = logits_of(built, validation)
        np.testing.assert_allclose(only, fitted, atol=2e-5)
        before = parts(built)
        [kernel] = built.embeddings.kernels.values()
        start = np.asarray(kernel[...])
        history = sj.fit(
            built,
            optimizer,
            train,
            batch_size=64,
            num_epochs=2,
            validation=validation,
        )
        after = parts(built)
        for ours, theirs in zip(before, after, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert all(np.isfinite(entry["loss"]) for entry in history)
        [kernel] = built.embeddings.kernels.values()
        assert np.abs(np.asarray(kernel[...]) - start).max() > 1e-3
        # Predictions are the regression, and a share of the layers.
        share = float(built.share[...])
        last, labels = logits_of(built, validation)
        set_to(built.share, 1.0)
        whole, _ = logits_of(built, validation)
        assert np.abs(whole - only).max() > 0.05
        assert share == least_share(only, whole.astype(np.float64), labels)
        np.testing.assert_allclose(last, only + share * (whole - only), atol=1e-4)


def test_a_run_has_it_by_default(tmp_path):
    """It holds out a tenth, and goes on with new categories."""
    clicks, runs = drawn(1200), kind_called("clicks")
    suited = ("dtype", "regression")

    def begun(data, config, **options):
        asked = Training(data=data, config=config, suited=suited, **options)
        source = runs.source(asked, None)
        return runs.suited(config, asked, source)[0].regression, source.split

    config = config_of("deepfm")
    assert begun(clicks, config) == (True, ".1")
    assert begun(clicks, config, validation="0.2") == (True, "0.2")
    assert begun(clicks.rows(slice(999)), config) == (False, None)
    assert begun(clicks, config, validation=drawn(50)) == (True, None)
    rare = np.arange(1200) < 99
    few = dataclasses.replace(clicks, labels=rare.astype(np.float32))
    assert begun(few, config) == (False, None)
    # Logged clicks do not say how much layers count for relevance.
    corrected = dataclasses.replace(SCHEMA, propensity="seen_at", least_propensity=0.1)
    seen = np.full(1200, 0.5, np.float32)
    divided = dataclasses.replace(clicks, schema=corrected, propensities=seen)
    assert begun(divided, config) == (False, None)
    # A configuration of one's own is as it is.
    asked = Training(data=clicks, config=config)
    source = runs.source(asked, None)
    assert source.split is None and runs.suited(config, asked, source)[0] == config

    how: dict[str, Any] = {"batch_size": 540, "num_epochs": 1}
    run = sj.Run.train(clicks, config=config_of("deepfm", regression=True), **how)
    network: Any = run.settings.network
    assert run.settings.validation_split == ".1" and network.regression
    kept, _ = clicks.split_rows(0.9, seed=0)
    own, apart = fit_regression(kept), fit_regression(clicks)
    every = fit_regression(clicks, near=own)
    assert np.abs(own.tables["item"] - every.tables["item"]).max() > 5e-3
    assert apart.variance == every.variance
    np.testing.assert_allclose(every.tables["item"], apart.tables["item"], atol=3e-3)
    measured = Folder.of(run.directory).validated_model()
    # The examples that were held out count in the end.
    for model, expected in ((measured, own), (run.model, every)):
        weights = np.asarray(model.linear.embeddings.table("item"))[:, 0]
        np.testing.assert_allclose(weights, expected.tables["item"], atol=1e-5)
        share, alone = float(model.share[...]), regression_logits(expected, clicks)
        set_to(model.share, 0.0)
        np.testing.assert_allclose(logits_of(model, clicks)[0], alone, atol=1e-4)
        set_to(model.share, share)
    assert float(measured.share[...]) == share
    file = run.directory / "regression.npz"
    written = file.read_bytes()
    file.write_bytes(b"PK")
    with pytest.raises(ValueError, match="regression.npz: is not the regression of th"):
        sj.Run.load(run.directory).predict(clicks)
    file.write_bytes(written)
    # If nothing is held out, the regression on all examples is what new data add to.
    some, same = clicks.rows(slice(300)), np.zeros(5, np.float32)
    expected = fit_regression(some, before=every)
    for data, tables in (
        (some, expected.tables),
        (dataclasses.replace(clicks.rows(slice(5)), labels=same), every.tables),
    ):
        assert set_regression(measured, data, data, file) is None
        weights = np.asarray(measured.linear.embeddings.table("item"))[:, 0]
        np.testing.assert_allclose(weights, tables["item"], atol=1e-4)
        set_final(measured, file)
    # So it is if the few new examples, of which some are held out, have a single label.
    few = dataclasses.replace(clicks.rows(slice(5)), labels=same)
    save = set_regression(measured, few.rows(slice(4)), few, file)
    assert save is not None
    save(tmp_path / "kept.npz")
    set_final(measured, tmp_path / "kept.npz")
    weights = np.asarray(measured.linear.embeddings.table("item"))[:, 0]
    np.testing.assert_allclose(weights, every.tables["item"], atol=1e-6)
    test = drawn(4000, seed=3)
    by_regression = sj.metrics.auc(regression_logits(own, test), test.labels)
    assert run.evaluate(test)["auc"] > by_regression - 0.005
    # The weights of known categories stay near theirs, new ones get weights.
    new = drawn(1200, seed=4, items=9)
    run.train_more(new, batch_size=540)
    after = np.asarray(run.model.linear.embeddings.table("item"))[:, 0]
    assert len(after) == 11 and np.abs(after[7:]).min() > 0.01
    assert np.abs(after[2:7] - weights[2:7]).max() < 0.5
    # Examples that either run held out count in the end, and choose no share of their own.
    grown = [
        dataclasses.replace(
            each, tables={**each.tables, "item": np.pad(each.tables["item"], (0, 4))}
        )
        for each in (own, every)
    ]
    near = fit_regression(new.split_rows(0.9, seed=0)[0], before=grown[0])
    measured = Folder.of(run.directory).validated_model()
    last = fit_regression(new, before=grown[1], near=near)
    for model, expected in ((measured, near), (run.model, last)):
        weights = np.asarray(model.linear.embeddings.table("item"))[:, 0]
        np.testing.assert_allclose(weights, expected.tables["item"], atol=1e-4)
    assert np.abs(near.tables["item"] - last.tables["item"]).max() > 5e-3


def test_what_cannot_have_it(tmp_path):
    config = config_of("dlrm", regression=True)
    assert config_of("dlrm").to_json() == config_of("dlrm", regression=False).to_json()
    assert sj.clicks.ClickModelConfig.from_json(config.to_json()) == config
    with pytest.raises(TypeError, match="regression"):
        sj.DLRMConfig(regression=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dynamic tables have no ids yet"):
        sj.DLRMConfig(regression=True, dynamic=sj.clicks.DynamicTables(num_rows=512))
    clicks = drawn(40)
    clicks.save(tmp_path / "a.parquet")
    with pytest.raises(NotImplementedError, match="leave regression out"):
        sj.build(config, sj.data.scan_clicks(tmp_path / "a.parquet"))
    clicks.labels[:] = 1
    with pytest.raises(ValueError, match="of both labels, got 40 of one"):
        sj.build(config, clicks)
