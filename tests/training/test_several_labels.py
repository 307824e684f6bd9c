"""Click models of several labels: schema, metrics, predictions and a service with named labels."""

import contextlib
import json

import numpy as np
import pandas
import pytest
import scipy.special
from served import Client, listening, tensor

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.serving.engine import Shape
from sparsejax.serving.service import Service, Settings

Label = sj.data.LabelColumn
USERS, ITEMS = 300, 100
PLANTED = sj.ClickSchema(
    labels={"click": Label(), "buy": Label(after="click")},
    ids={"user": sj.data.HashedColumn(USERS), "item": sj.data.HashedColumn(ITEMS)},
)
CONFIG = sj.DCNConfig(dim=4, cross=1, hidden=(16,))


def planted(seed: int, rows: int, *, slope: float = 1.0, offset: float = -5.0):
    """Two parts of a world, and the probabilities of a purchase in the second.

    Taste decides on clicks, and by a slope and an offset on purchases of clicked items.
    """
    rng = np.random.default_rng(seed)
    users, items = rng.normal(size=USERS), rng.normal(size=ITEMS)

    def drawn(rows: int):
        user, item = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
        taste = users[user] + items[item]
        of_click = scipy.special.expit(1.2 * taste - 0.5)
        of_buy = scipy.special.expit(slope * taste + offset)
        click = rng.random(rows) < of_click
        labels = np.stack([click, click & (rng.random(rows) < of_buy)], axis=1)
        ids = {"user": user.astype(np.int32), "item": item.astype(np.int32)}
        none = np.zeros((rows, 0), np.float32)
        clicks = sj.ClickDataset(labels.astype(np.float32), none, ids, PLANTED, {})
        return clicks, of_click * of_buy

    return drawn(rows)[0], *drawn(20_000)


def trained(clicks, config=CONFIG, epochs=4):
    model, optimizer = sj.build(config, clicks, sj.optimizers.adagrad(0.1))
    sj.fit(model, optimizer, clicks, batch_size=128, num_epochs=epochs)
    return model


def auc_of_purchases(train, test) -> tuple[float, float]:
    """AUC of purchases, by a model of both labels, and by a model of purchases alone."""
    y = test.labels[:, 1]
    both = sj.predict(trained(train), test)["buy"]
    alone = sj.predict(trained(train.of_label("buy")), test.of_label("buy"))
    return sj.metrics.auc(both, y), sj.metrics.auc(alone, y)


@pytest.mark.parametrize("seeds", [2, 8], ids=["two", "eight"])
def test_a_rare_label_gains_by_sharing(seeds):
    """1 % of the examples are purchases. The interval is that of the mean over seeds."""
    found = np.array(
        [auc_of_purchases(*planted(seed, 8000)[:2]) for seed in range(seeds)]
    )
    gains = found[:, 0] - found[:, 1]
    low = gains.mean() - 2 * gains.std(ddof=1) / np.sqrt(seeds)
    assert low > 0.1, (found, low)


def test_a_chain_is_unbiased_where_clicks_alone_are_not():
    """Items that are often clicked are seldom bought, once they are clicked.

    A model of purchases that is trained on clicked examples alone predicts 3.1 times as many
    purchases in all examples as there are, and its numbers follow the true ones little (their
    correlation is .17). The chain (ESMM) is right within a tenth, with a correlation of .89.
    """
    train, test, true = planted(0, 20_000, slope=-1.5, offset=-0.5)
    of_clicks = train.rows(np.flatnonzero(train.labels[:, 0])).of_label("buy")
    alone = sj.predict(trained(of_clicks, epochs=6), test.of_label("buy"))
    chain = sj.predict(trained(train, epochs=6), test)["buy"]
    assert abs(chain.mean() / true.mean() - 1) < 0.1
    assert alone.mean() / true.mean() > 2.5
    ordered = [np.corrcoef(p, true)[0, 1] for p in (chain, alone)]
    assert ordered[0] > 0.75 and ordered[1] < 0.4, ordered


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A run with three labels on a small file, and the path of that file."""
    folder = tmp_path_factory.mktemp("shop")
    rng = np.random.default_rng(0)
    rows = {
        "click": rng.integers(0, 2, 400),
        "user": rng.integers(0, 5, 400),
        "item": rng.integers(0, 7, 400),
    }
    rows["buy"] = rows["click"] * rng.integers(0, 2, 400)
    rows["minutes"] = rng.random(400).round(3)
    table = pandas.DataFrame(rows)
    table["buy"] = table["buy"].where(np.arange(400) % 5 > 0)
    table.to_csv(folder / "shop.csv", index=False)
    schema = {
        "labels": {
            "click": {},
            "buy": {"after": "click"},
            "minutes": {"loss": "squared"},
        },
        "ids": {n: {"kind": "vocabulary"} for n in ("user", "item")},
    }
    (folder / "schema.json").write_text(json.dumps(schema))
    config = sj.DLRMConfig(dim=2, top=(4,), sharing=sj.PLE(experts=1, shared=1))
    (folder / "model.json").write_text(json.dumps(config.to_json()))
    words = f"train {folder}/shop.csv --run {folder}/run --schema {folder}/schema.json "
    words += f"--config {folder}/model.json --epochs 2 --batch-size 64 --validation .2 "
    assert main([*words.split(), "--patience", "2", "--optimizer", "adagrad"]) == 0
    return folder


def test_commands_name_each_label(shop, capsys):
    capsys.readouterr()
    assert main(["evaluate", f"{shop}/run", f"{shop}/shop.csv"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"auc/click", "auc/buy", "calibration/buy", "squared_error/minutes"} <= {
        *measured
    }
    run = sj.Run.load(shop / "run")
    assert run.evaluate(str(shop / "shop.csv")) == pytest.approx(measured)
    assert "auc/click" in run.history[-1]
    assert main(["compare", *[f"{shop}/run"] * 2, f"{shop}/shop.csv"]) == 0
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert compared["auc/buy"]["difference"] == 0
    out = f"{shop}/predicted"
    for ending in (".csv", ".parquet", ".npy", ".txt"):
        assert (
            main(["predict", f"{shop}/run", f"{shop}/shop.csv", "--out", out + ending])
            == 0
        )
    found, stored = pandas.read_csv(out + ".csv"), pandas.read_parquet(out + ".parquet")
    assert list(found) == list(stored) == ["click", "buy", "minutes"]
    assert (found["buy"] <= found["click"]).all()
    np.testing.assert_array_equal(np.load(out + ".npy"), stored)
    np.testing.assert_array_equal(np.loadtxt(out + ".txt", delimiter=","), found)
    for name, values in run.predict(str(shop / "shop.csv")).items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6)
        np.testing.assert_array_equal(stored[name], values)
    page = shop / "page.html"
    assert (
        main(
            ["report", f"{shop}/run", "--test", f"{shop}/shop.csv", "--out", str(page)]
        )
        == 0
    )
    text = page.read_text()
    for part in (
        "auc/buy",
        "Calibration of click",
        "Calibration of buy",
        "squared_error/minutes",
    ):
        assert part in text
    capsys.readouterr()
    words = ["evaluate", f"{shop}/run", f"{shop}/shop.csv", "--calibrate"]
    assert main([*words, f"{shop}/shop.csv", "--method", "isotonic"]) == 0
    corrected = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert corrected["log_loss/click"] < measured["log_loss/click"]
    assert corrected["squared_error/minutes"] == measured["squared_error/minutes"]


def test_a_service_has_an_output_for_each_label(shop, tmp_path):
    path = tmp_path / "shop.predictor"
    assert main(["export", f"{shop}/run", str(path)]) == 0
    predictor = sj.load_predictor(path)
    records = {"user": ["1", "2", "9"], "item": ["3", None, "0"]}
    expected = predictor.predict_records(records)
    run = sj.Run.load(shop / "run")
    for name, values in run.predict(records).items():
        np.testing.assert_allclose(expected[name], values, rtol=1e-5)
    service = Service("films", Settings(shapes=(Shape(8, 64),)))
    service.load(path)
    asked = [tensor(n, "BYTES", [x or "" for x in data]) for n, data in records.items()]
    with contextlib.closing(service), listening(service) as port:
        client = Client(port)
        status, found = client.infer(*asked)
        assert status == 200 and list(found) == ["click", "buy", "minutes", "rows"]
        _, best = client.infer(*asked, parameters={"k": 1})
    for name, values in expected.items():
        assert found[name]["data"] == pytest.approx(values, rel=1e-5)
        assert best[name]["data"] == pytest.approx(
            [values[np.argmax(expected["click"])]]
        )
