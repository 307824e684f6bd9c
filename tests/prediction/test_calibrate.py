"""Corrected probabilities of clicks."""

import dataclasses
import functools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import scipy.optimize
import scipy.special
from flax import nnx
from run_folders import parameters

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.clicks.layers import chained
from sparsejax.kinds.clicks.calibrate import isotonic, platt
from sparsejax.kinds.clicks.kind import KIND
from sparsejax.options.measuring import Correcting
from sparsejax.options.reading import Reading
from sparsejax.options.training import Training

SCHEMA = sj.ClickSchema(
    "click",
    dense={"x": sj.data.DenseColumn()},
    ids={"user": sj.data.VocabularyColumn(), "item": sj.data.HashedColumn(9)},
)


class Times(nnx.Module):
    """A click model whose logit is a multiple of the dense column."""

    kind = "clicks"

    def __init__(self, sign: float):
        self.sign = sign

    def __call__(self, dense, ids):
        return self.sign * dense[:, 0]


def drawn(rows, *, kept=1.0, seed=0):
    """Draws clicks of a known probability, and keeps only a fraction of the examples without a
    click.
    """
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < rows:
        user, item, x = int(rng.integers(8)), int(rng.integers(6)), float(rng.normal())
        click = rng.random() < scipy.special.expit((user % 3) + 0.5 * x - 3)
        if click or rng.random() < kept:
            found.append({"click": int(click), "user": user, "item": item, "x": x})
    return found


def test_platt_is_the_least_log_loss():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=300) * 2
    labels = (rng.random(300) < scipy.special.expit(0.5 * logits - 1)).astype(float)
    ones = labels.sum()
    wanted = np.where(labels > 0, (ones + 1) / (ones + 2), 1 / (302 - ones))

    def loss(w):
        z = w[0] * logits + w[1]
        return np.sum(np.logaddexp(0, z) - wanted * z)

    best = scipy.optimize.minimize(loss, [1.0, 0.0], tol=1e-10).x
    np.testing.assert_allclose(platt(logits, labels), best, rtol=1e-4)
    # Also where the line is steep, of one class, and where all logits are alike.
    steep = platt(logits, (logits > 0.1).astype(float))
    assert 5 < steep[0] < 1e3 and np.isfinite(steep).all()
    for label in (0.0, 1.0):
        slope, offset = platt(logits, np.full(300, label))
        p = scipy.special.expit(slope * logits + offset)
        np.testing.assert_allclose(p, (300 * label + 1) / 302, rtol=1e-6)
    alike = platt(np.full(300, 0.7), labels)
    assert alike[0] == 1
    p = scipy.special.expit(0.7 + alike[1])
    np.testing.assert_allclose(p, wanted.mean(), rtol=1e-6)


def test_isotonic_pools_what_falls():
    logits = np.array([3.0, 1.0, 2.0, 2.0, 0.0, 4.0])
    labels = np.array([0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    # By logit: 0 | 1 | 1 0 | 0 | 1: the shares 1, 1/2, 0 fall, and become one of 1/2.
    knots = np.array(isotonic(logits, labels))
    np.testing.assert_allclose(knots[:, 0], [0, 2, 4])
    found = scipy.special.expit(knots[:, 1])
    np.testing.assert_allclose(found, [1 / 12, 0.5, 11 / 12])
    one = isotonic(logits, np.zeros(6))
    np.testing.assert_allclose(scipy.special.expit(one[0][1]), 1 / 12)
    assert len(one) == 1


@pytest.mark.filterwarnings("ignore:predicting the share of clicks")
def test_dropped_negatives_are_corrected(tmp_path, capsys):
    """A model of data of which a fifth of the negatives was kept, on all data."""
    train = sj.read_clicks(drawn(3000, kept=0.2), SCHEMA)
    test, other = (
        sj.read_clicks(drawn(3000, seed=seed), SCHEMA, features=train)
        for seed in (1, 2)
    )
    config = sj.DLRMConfig(dim=4, bottom=(8,), top=(8,))
    how = {
        "num_epochs": 6,
        "batch_size": 64,
        "optimizer": "adam",
        "learning_rate": 0.01,
    }
    run = sj.Run.train(train, tmp_path / "run", config=config, **how)
    plain = run.evaluate(test)
    assert plain["calibration"] > 2
    sampled = run.evaluate(test, negatives_kept=0.2)
    assert abs(sampled["calibration"] - 1) < 0.12
    assert sampled["auc"] == pytest.approx(plain["auc"], abs=1e-6)
    before = run.predict(test).astype(np.float64)
    after = sj.predict(sj.calibrate(run.model, negatives_kept=0.2), test)
    odds = 0.2 * before / (1 - before)
    np.testing.assert_allclose(after, odds / (1 + odds), rtol=1e-4)

    losses = {}
    for method in ("platt", "isotonic"):
        measured = run.evaluate(test, calibrate=other, method=method)
        assert abs(measured["calibration"] - 1) < 0.12
        losses[method] = measured["log_loss"]
        assert losses[method] < plain["log_loss"] - 0.03
    # The command says the same, and the exported file predicts so.
    for name, data in (("test", test), ("other", other)):
        data.save(tmp_path / f"{name}.parquet")
    flags = ["--calibrate", str(tmp_path / "other.parquet"), "--method", "isotonic"]
    capsys.readouterr()
    argv = ["evaluate", str(tmp_path / "run"), str(tmp_path / "test.parquet"), *flags]
    assert main(argv) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["log_loss"] == losses["isotonic"]
    kept = parameters(tmp_path / "run")
    path = tmp_path / "clicks.predictor"
    assert main(["export", str(tmp_path / "run"), str(path), *flags]) == 0
    assert parameters(tmp_path / "run") == kept
    better = sj.calibrate(run.model, other, method="isotonic")
    found = sj.load_predictor(path).predict(test)
    np.testing.assert_allclose(found, sj.predict(better, test), rtol=1e-5)
    assert len(np.unique(found)) < len(np.unique(before))


@pytest.mark.usefixtures("wrong_types")
@pytest.mark.parametrize("share", [None, 0.5])
def test_examples_that_were_trained_on_are_named(share, is_here):
    clicks = sj.read_clicks(drawn(400), SCHEMA)
    config = sj.WideDeepConfig(dim=2, hidden=(2,))
    asked = Training(data=clicks, config=config, validation=share)
    source = KIND.source(asked, None)
    # Of a run folder it needs no more.
    settings = SimpleNamespace(
        data_fingerprint=source.fingerprint, validation_split=source.split
    )
    run: Any = SimpleNamespace(
        settings=settings, known=source.known, model=lambda: Times(1)
    )

    def correct(by: sj.ClickDataset) -> None:
        KIND.corrected(run, Correcting(calibrate=by), Reading())

    for data in (clicks, source.data):
        with pytest.warns(UserWarning, match=r"the data: .*calibrate=\.\.\.") as found:
            correct(data)
        assert len(found) == 1 and is_here(found[0])
    others = clicks.rows(slice(0, 300)) if share is None else source.heldout
    correct(others)  # no warning


def test_examples_of_one_class_have_a_log_loss():
    clicks = sj.read_clicks(drawn(200), SCHEMA)
    model, _ = sj.build(sj.DLRMConfig(dim=4, bottom=(4,), top=(4,)), clicks)
    for label, names in ((0, {"log_loss"}), (1, {"log_loss", "calibration"})):
        part = clicks.rows(np.flatnonzero(clicks.labels == label))
        with pytest.warns(UserWarning, match=f"all labels are {label}: .* no AUC"):
            found = sj.evaluate(model, part, groups="user", keep_rows=True)
        assert found.keys() == names
        p = sj.predict(model, part).astype(np.float64)
        right = p if label else 1 - p
        np.testing.assert_allclose(found["log_loss"], -np.log(right).mean(), rtol=1e-5)
        assert isinstance(found, sj.metrics.Measured)
        assert found.intervals().keys() == {"log_loss"}
        assert sj.compare(found, found, resamples=9).keys() == {"log_loss"}


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_examples_that_say_nothing_are_refused(method):
    x = np.linspace(-2, 2, 40)
    labels = (x + np.sin(9 * x) > 0).astype(int)
    rows = [
        {"click": int(y), "user": 1, "item": 1, "x": float(a)}
        for a, y in zip(x, labels, strict=True)
    ]
    clicks = sj.read_clicks(rows, SCHEMA)
    for label in (0, 1):
        alike = clicks.rows(np.flatnonzero(labels == label))
        for some in (alike, alike.rows(slice(0, 1))):
            text = rf"by \({some.num_rows}\) all have the label {label}, "
            with pytest.raises(ValueError, match=text):
                sj.calibrate(Times(1), some, method=method)
    # A model that turns the order of all examples is worse than chance.
    before = sj.evaluate(Times(1), clicks)["auc"]
    assert before > 0.8
    effect = {
        "platt": "turn the order of all examples, by -",
        "isotonic": "make all probabilities equal",
    }
    text = rf"would {effect[method]}.*these 40 examples .* \(AUC {1 - before:.3f}\)"
    if method == "isotonic":  # pools all if no part of the examples rises
        rows = clicks.rows(np.argsort(labels, kind="stable"))
        clicks = dataclasses.replace(rows, dense=np.sort(rows.dense, axis=0))
        text = rf"would {effect[method]}.*these 40 examples .* \(AUC 0.000\)"
    with pytest.raises(ValueError, match=text):
        sj.calibrate(Times(-1), clicks, method=method)
    sj.calibrate(Times(1), clicks, method=method)


def test_a_model_of_one_logit_gets_the_right_share():
    clicks = sj.read_clicks(drawn(50), SCHEMA)
    model = Times(0)
    found = sj.calibrate(model, clicks)
    ones = clicks.labels.sum()
    share = ones * (ones + 1) / (ones + 2) + (50 - ones) / (52 - ones)
    np.testing.assert_allclose(sj.predict(found, clicks), share / 50, rtol=1e-5)
    with pytest.raises(ValueError, match=r"make all probabilities equal.*AUC 0\.500"):
        sj.calibrate(model, clicks, method="isotonic")


class Chain(nnx.Module):
    """A model with logits of a click, of a purchase after it, and of a number; it has a table, as
    export requires.
    """

    kind, num_dense = "clicks", 3

    def __init__(self, features, labels=("click", "buy", "price")):
        self.labels, self.after = labels, (None, 0, None)[: len(labels)]
        tables = {n: sj.embeddings.TableConfig(size, 1) for n, size in features.items()}
        self.embeddings = sj.embeddings.EmbeddingCollection(
            tables, {n: n for n in tables}, rngs=nnx.Rngs(0)
        )

    def __call__(self, dense, ids):
        none = 0 * self.embeddings.concat(ids).sum(axis=1, keepdims=True)
        return chained((dense + none)[:, : len(self.labels)], self.after)


CHAIN = sj.ClickSchema(
    labels={
        "click": sj.data.LabelColumn(),
        "buy": sj.data.LabelColumn(after="click"),
        "price": sj.data.LabelColumn("squared"),
    },
    dense={n: sj.data.DenseColumn() for n in "xyz"},
    ids={"user": sj.data.HashedColumn(9)},
)


def in_chains(rows, *, seed=0, kept=1.0, schema=CHAIN):
    """Draws clicks and purchases whose logits are linear in x and y; some labels are missing."""
    rng = np.random.default_rng(seed)
    x, y, z = rng.normal(size=(3, rows))
    click = rng.random(rows) < scipy.special.expit(0.5 * x - 1)
    buy = click & (rng.random(rows) < scipy.special.expit(2 * y + 1))
    table: dict[str, Any] = {"click": click * 1.0, "buy": buy * 1.0, "price": z + 1}
    missing = rng.random(rows) < 0.1
    table = {name: np.where(missing, np.nan, values) for name, values in table.items()}
    table |= {"x": x, "y": y, "z": z, "user": np.arange(rows) % 5}
    there = click | (rng.random(rows) < kept)
    return sj.read_clicks(pandas.DataFrame(table)[there], schema)


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_each_label_is_corrected(method, tmp_path):
    """The probability after a click by the examples with a click; numbers stay as they are."""
    clicks, test = in_chains(4000, seed=2), in_chains(4000, seed=3)
    model = Chain(clicks.features)
    better = sj.calibrate(model, clicks, method=method)
    found, before = sj.predict(better, test), sj.predict(model, test)
    x, y = test.dense[:, 0], test.dense[:, 1]
    wanted = [scipy.special.expit(0.5 * x - 1), scipy.special.expit(2 * y + 1)]
    bound = {"platt": 0.05, "isotonic": 0.1}[method]
    assert np.abs(found["click"] - wanted[0]).mean() < bound
    assert np.abs(found["buy"] / found["click"] - wanted[1]).mean() < bound
    assert np.abs(before["buy"] / before["click"] - wanted[1]).mean() > 0.1
    assert (found["buy"] <= found["click"]).all()
    np.testing.assert_array_equal(found["price"], before["price"])
    measured = sj.evaluate(better, test)
    for name in ("click", "buy"):
        assert abs(measured[f"calibration/{name}"] - 1) < 0.1
    # Each is the correction of one label by the examples that it is fitted on.
    has = clicks.labels[:, 0] == 1
    alone = ~np.isnan(clicks.labels[:, 0]), has
    for place, there in enumerate(alone):
        there &= ~np.isnan(clicks.labels[:, place])
        given = (
            clicks.dense[there, place].astype(np.float64),
            clicks.labels[there, place],
        )
        if method == "platt":
            np.testing.assert_allclose(
                better.lines[place][...], platt(*given), rtol=1e-3
            )
        else:
            variable = better.knots[place]
            assert variable is not None
            knots = isotonic(*given)
            np.testing.assert_allclose(variable[...], knots, rtol=1e-3, atol=1e-3)
    sj.export_predictor(better, tmp_path / "p", names=clicks, batch_size=64)
    records = {n: test.dense[:64, i] for i, n in enumerate("xyz")}
    records |= {"user": [str(i % 5) for i in range(64)]}
    for name, p in sj.load_predictor(tmp_path / "p").predict_records(records).items():
        np.testing.assert_allclose(p, found[name][:64], rtol=1e-5, atol=1e-6)


def test_dropped_negatives_of_a_chain():
    """Examples without a click were dropped: the probabilities after a click are right."""
    labels = {n: c for n, c in CHAIN.several.items() if n != "price"}
    schema = dataclasses.replace(CHAIN, labels=labels)
    few = in_chains(8000, seed=2, kept=0.2, schema=schema)
    test = in_chains(8000, seed=3, schema=schema)
    fitted = sj.calibrate(Chain(few.features, tuple(labels)), few)
    better = sj.calibrate(fitted, negatives_kept=0.2)
    measured = [sj.evaluate(model, test) for model in (fitted, better)]
    for name in ("click", "buy"):
        assert measured[0][f"calibration/{name}"] > 1.5
        assert abs(measured[1][f"calibration/{name}"] - 1) < 0.1


def test_labels_that_cannot_be_corrected_are_named():
    clicks = in_chains(300)
    model = Chain(clicks.features)
    never = clicks.labels.copy()
    never[:, 1] = np.where(np.isnan(never[:, 1]), np.nan, 0)
    with pytest.warns(
        UserWarning, match="label 'buy' is not corrected: the examples .* label 0"
    ):
        better = sj.calibrate(model, dataclasses.replace(clicks, labels=never))
    np.testing.assert_array_equal(better.lines[1][...], [1, 0])
    none = np.full_like(clicks.labels, np.nan)
    with pytest.raises(ValueError, match="'click' is .* no examples.*'buy' is not"):
        sj.calibrate(model, dataclasses.replace(clicks, labels=none))
    free = sj.ClickSchema(labels=["click", "buy"], ids=CHAIN.ids)
    both = sj.read_clicks({"click": [1, 0], "buy": [0, 1], "user": [*"ab"]}, free)
    model, _ = sj.build(sj.WideDeepConfig(dim=2, hidden=(2,)), both)
    with pytest.raises(ValueError, match="but click, buy come after no other label"):
        sj.calibrate(model, negatives_kept=0.5)
    number = {"seconds": sj.data.LabelColumn("squared")}
    schema = sj.ClickSchema(labels=number, ids=CHAIN.ids)
    watched = sj.read_clicks({"seconds": [3, 0], "user": [*"ab"]}, schema)
    config = sj.WideDeepConfig(dim=2, hidden=(2,))
    run = sj.Run.train(watched, config=config, optimizer="sgd", num_epochs=1)
    for use in (run.evaluate, functools.partial(sj.calibrate, run.model)):
        with pytest.raises(
            ValueError, match="corrects a label with the values 0 and 1"
        ):
            use(watched, negatives_kept=0.5)


@pytest.mark.usefixtures("wrong_types")
def test_what_is_wrong_is_said(tmp_path, capsys):
    clicks = sj.read_clicks(drawn(20), SCHEMA)
    model, _ = sj.build(sj.DLRMConfig(dim=4, bottom=(4,), top=(4,)), clicks)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("give clicks=.* or negatives_kept", {}),
        ('method is "platt" or "isotonic"', {"clicks": clicks, "method": "x"}),
        (r"negatives_kept is in \(0, 1\]", {"negatives_kept": 0.0}),
        (r"negatives_kept is in \(0, 1\]", {"negatives_kept": 1.5}),
        ("no examples", {"clicks": clicks.rows(slice(0, 0))}),
    ]
    for match, options in wrong:
        with pytest.raises(ValueError, match=match):
            sj.calibrate(model, **options)
    sj.save_model(
        tmp_path / "run", model, sj.Optimizer(model, sj.optimizers.sgd(0.1)), clicks
    )
    run = sj.Run.load(tmp_path / "run")
    one = clicks.rows(slice(0, 1))
    one.save(tmp_path / "one.parquet")
    for argv in (
        ["export", str(tmp_path / "run"), str(tmp_path / "y")],
        ["evaluate", str(tmp_path / "run"), str(tmp_path / "one.parquet")],
    ):
        assert main([*argv, "--calibrate", str(tmp_path / "one.parquet")]) == 1
        assert (
            "one.parquet: the examples to correct by (1) all" in capsys.readouterr().err
        )
    assert not (tmp_path / "y").exists()
    with pytest.raises(ValueError, match="method needs calibrate, without"):
        run.export(tmp_path / "a.predictor", method="platt")
    argv = ["export", str(tmp_path / "run"), str(tmp_path / "x"), "--method", "platt"]
    assert main(argv) == 1
    assert "--method needs --calibrate, without" in capsys.readouterr().err
