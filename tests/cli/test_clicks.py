"""Click models on the command line, from a file to probabilities."""

import json
import pathlib

import numpy as np
import pandas
import pytest
import scipy.special
from run_folders import kill_in_training, parameters

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.kinds.clicks.calibrate import calibration_curve

USERS, ITEMS = 12, 9
COLUMNS = ["--label", "click", "--dense", "x", "y", "--categories", "user", "item"]
NAMED = "train TRAIN --run x --model dcn --label click --categories user"
MODEL = {"version": 1, "model": "dlrm", "dim": 4, "bottom": [8], "top": [16]}


@pytest.fixture(scope="session")
def clicks(tmp_path_factory) -> pathlib.Path:
    """A run trained on clicks of a known model, and that model's logits for the test data."""
    folder = tmp_path_factory.mktemp("clicks")
    rng = np.random.default_rng(0)
    of_users, of_items = rng.normal(size=USERS), rng.normal(size=ITEMS)

    def write(name: str, rows: int) -> np.ndarray:
        user, item = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
        x, y = rng.normal(size=(2, rows)).round(3)
        logits = of_users[user] + of_items[item] + 0.7 * x - 0.7 * y - 1
        drawn = rng.random(rows) < scipy.special.expit(logits)
        columns = zip(x, drawn.astype(int), user, item, y, strict=True)
        lines = [f"{a}\t{c}\tu{u}\ti{i}\t{b}\n" for a, c, u, i, b in columns]
        (folder / name).write_text("x\tclick\tuser\titem\ty\n" + "".join(lines))
        return logits

    write("train.tsv", 12_000)
    np.save(folder / "logits.npy", write("test.tsv", 4_000))
    (folder / "dlrm.json").write_text(json.dumps(MODEL))
    assert main(train(folder)) == 0
    return folder


def train(folder: pathlib.Path, *more: str, out: str = "run") -> list[str]:
    argv = ["train", str(folder / "train.tsv"), "--run", str(folder / out), *COLUMNS]
    argv += ["--config", str(folder / "dlrm.json"), "--model", "dlrm", "--epochs", "6"]
    argv += ["--validation", ".1", "--patience", "6", "--optimizer", "adagrad"]
    argv += ["--learning-rate", "1"]
    return [*argv, "--batch-size", "256", *more]


def files(folder: pathlib.Path) -> list[str]:
    return [str(folder / name) for name in ("run", "test.tsv")]


def test_the_auc_is_that_of_the_model_that_drew_the_clicks(clicks, capsys):
    capsys.readouterr()
    assert main(["evaluate", *files(clicks), "--groups", "user"]) == 0
    out = capsys.readouterr().out.splitlines()
    measured = json.loads(out[-1])
    assert out[0].split() == ["auc", f"{measured['auc']:.6g}"]

    model, known = sj.load_model(clicks / "run")
    test = sj.read_clicks(clicks / "test.tsv", known.schema, features=known)
    planted = sj.metrics.auc(np.load(clicks / "logits.npy"), test.labels)
    assert abs(measured["auc"] - planted) < 0.005 < planted - 0.7
    assert measured["groups"] == USERS
    assert measured == sj.evaluate(model, test, groups="user")

    # A saved data set must be read like the file that it was made from.
    test.save(clicks / "test.parquet")
    assert main(["evaluate", str(clicks / "run"), str(clicks / "test.parquet")]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again == {name: measured[name] for name in again}


def test_probabilities(clicks, capsys):
    model, known = sj.load_model(clicks / "run")
    test = sj.read_clicks(clicks / "test.tsv", known.schema, features=known)
    wanted = sj.predict(model, test)
    ends = (".npy", ".csv", ".txt", ".parquet")
    out = {end: str(clicks / f"out{end}") for end in ends}
    for path in out.values():
        assert main(["predict", *files(clicks), "--out", path]) == 0
    np.testing.assert_array_equal(np.load(out[".npy"]), wanted)
    text = pathlib.Path(out[".txt"]).read_text()
    assert pathlib.Path(out[".csv"]).read_text() == "probability\n" + text
    np.testing.assert_array_equal(np.array(text.split(), np.float32), wanted)
    table = pandas.read_parquet(out[".parquet"])
    assert [*table.columns] == ["probability"]
    np.testing.assert_array_equal(table["probability"], wanted)


def test_examples_without_labels(clicks, tmp_path, capsys):
    """Who asks for probabilities does not know them. Labels are not read if there are any."""
    run, out = str(clicks / "run"), tmp_path / "out.npy"
    table = pandas.read_csv(clicks / "test.tsv", sep="\t").head(50)
    _, known = sj.load_model(clicks / "run")
    label, found = known.schema.label, {}
    unknown = table.assign(**{label: "?"})
    for name, examples in {
        "all": table,
        "none": table.drop(columns=label),
        "unknown": unknown,
    }.items():
        examples.to_csv(path := tmp_path / f"{name}.tsv", sep="\t", index=False)
        assert main(["predict", run, str(path), "--out", str(out)]) == 0
        found[name] = np.load(out)
    assert len(found["all"]) == 50
    said = capsys.readouterr().err
    assert "none.tsv: 50 examples\n" in said and "% clicks" not in said
    np.testing.assert_array_equal(found["none"], found["all"])
    np.testing.assert_array_equal(found["unknown"], found["all"])
    assert main(["evaluate", run, str(tmp_path / "none.tsv")]) == 1


def test_export(clicks):
    path = str(clicks / "clicks.predictor")
    assert main(["export", str(clicks / "run"), path, "--batch-size", "64"]) == 0
    model, known = sj.load_model(clicks / "run")
    records = {"x": [0.5, 1], "y": [0, 2], "user": ["u1", "new"], "item": ["i3", None]}
    found = sj.load_predictor(path).predict_records(records)
    (clicks / "two.csv").write_text("click,x,y,user,item\n0,.5,0,u1,i3\n0,1,2,new,\n")
    two = sj.read_clicks(clicks / "two.csv", known.schema, features=known)
    np.testing.assert_allclose(found, sj.predict(model, two), rtol=1e-5)


def test_report(clicks, capsys):
    run, test = files(clicks)
    page = str(clicks / "page.html")
    argv = ["report", run, "--test", test, "--groups", "user", "--out", page]
    assert main(argv) == 0
    text = pathlib.Path(page).read_text()
    for shown in ("best auc", "group_auc", "share of clicks over predicted", "dlrm"):
        assert shown in text
    assert "<dt>k</dt>" not in text and "Recommendations" not in text
    assert main(["report", run, "--groups", "user"]) == 1
    assert "--groups needs --test" in capsys.readouterr().err


def test_the_calibration_curve_has_parts_of_equal_size():
    rng = np.random.default_rng(0)
    p = rng.random(40_000)
    labels = rng.random(40_000) < p**2
    points = np.array(calibration_curve(p, labels))
    middle = (np.arange(20) + 0.5) / 20
    np.testing.assert_allclose(points[:, 0], middle, atol=0.01)
    np.testing.assert_allclose(points[:, 1], middle**2, atol=0.03)
    # Equal predictions are not separated, and with few examples each is its own part.
    same = calibration_curve(np.full(5, 0.25), np.array([0, 0, 1, 0, 0]))
    assert same == [(0.25, pytest.approx(0.2))]
    assert calibration_curve(np.array([0.9, 0.1]), np.array([1, 0])) == [
        (0.1, 0.0),
        (0.9, 1.0),
    ]


def test_plan(clicks, tmp_path, capsys):
    argv = ["plan", "--model", "deepfm", "--mesh", "data=1,model=2"]
    learned = [*argv, *COLUMNS, "--memory", "1GB"]
    assert main([*learned, "--examples", str(clicks / "train.tsv")]) == 0
    out = capsys.readouterr().out.splitlines()
    tables = {line.split("  ")[0]: line.split()[:4] for line in out[2:6]}
    assert tables["user"][1:3] == [str(USERS + 2), "16"]
    assert tables["item, linear"][2:4] == [str(ITEMS + 2), "1"]
    assert main(learned) == 1
    assert "the categories of user, item are to be counted" in capsys.readouterr().err
    schema = {"label": "click", "ids": {"user": {"kind": "hashed", "size": 2000}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    hashed = [*argv, "--schema", str(tmp_path / "schema.json"), "--memory"]
    assert main([*hashed, "1GB"]) == 0
    assert main([*hashed, "10kB"]) == 1
    assert "the tables need" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:the model is worse than")
def test_tune(clicks, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    argv = ["tune", str(clicks / "train.tsv"), "--model", "dlrm", *COLUMNS]
    argv += ["--trials", "1", "--epochs", "1", "--batch-size", "512"]
    assert main(argv) == 0
    said = capsys.readouterr()
    assert "the best is trial 0: auc 0." in said.err
    again = said.out.split()
    assert again[-len(COLUMNS) :] == COLUMNS
    network = json.loads((tmp_path / "tuned" / "network.json").read_text())
    assert network == {"version": 1, "model": "dlrm", "regression": True}
    again[again.index("RUN")] = str(tmp_path / "again")
    assert main(again[1:]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("evaluate RUN TEST TRAIN", "one file: leave out"),
        ("evaluate RUN TEST --k 20", "--k is of no use for a model of clicks"),
        ("evaluate RUN TEST --keep-seen", "--keep-seen is of no use"),
        ("evaluate RUN TEST --groups color", "groups names the feature 'color'"),
        ("compare RUN RUN TEST --k 5", "--k is of no use for a model of clicks"),
        ("predict RUN TEST --out x --exclude-seen", "--keep-seen is of no use"),
        ("predict RUN TEST --out x --keep-seen", "--keep-seen is of no use"),
        ("predict RUN TEST --out x --k 10", "--k is of no use for a model of clicks"),
        ("export RUN x --k 10", "--k is of no use for a model of clicks"),
        ("report RUN --train TEST", "--train is of no use for a model of clicks"),
        ("vectors RUN --out x.npy", "a model of clicks has no items"),
        ("similar RUN tea", "a model of clicks has no items"),
        ("plan --model dlrm", "name the columns: --schema FILE, or --examples"),
        ("plan --model dlrm --items 5", "--items is of no use for a model of clicks"),
        ("plan --items 5", "name the sizes of the data: --rows is missing"),
        ("plan --items 5 --label a", "--label is of no use for a model of items"),
        ("train TRAIN --run x --model dcn", "name the columns of this file: --schema"),
        ("train TRAIN --run x --model dcn --dense x", "name the column of labels"),
        ("train TRAIN --run x --model dcn --label click", "at least one column"),
        (
            "train TRAIN --run x --model dcn --schema s.json --label click",
            "leave out --label",
        ),
        ("train TRAIN --run x --model dcn --schema s.json", "s.json: not a schema"),
        (
            "train TRAIN --run x --model dcn --user user",
            "--user is of no use for a model of clicks",
        ),
        ("train TRAIN --run x --model dcn --k 20", "--k is of no use for a model of"),
        ("train TRAIN --run x --model dcn --hidden 8", "is for --model autoencoder"),
        (
            f"{NAMED} --validation last",
            "--validation last is of no use for clicks",
        ),
        (
            f"{NAMED} --chunk-rows 9 --validation .1",
            "--validation .1 needs all of the data",
        ),
        ("train TRAIN --run x --label click", "--label is of no use for a model of"),
        ("tune TRAIN --model dcn --hidden 8", "--hidden is for --model autoencoder"),
        ("tune TRAIN --model dcn --k 3", "--k is of no use for a model of clicks"),
        (f"{NAMED} --run RUN --resume --epochs 6", "cannot resume with other data"),
    ],
)
def test_wrong_arguments(clicks, tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.json").write_text("{}")
    places = {name: str(clicks / name.lower()) for name in ("RUN",)}
    places |= {name: str(clicks / f"{name.lower()}.tsv") for name in ("TRAIN", "TEST")}
    assert main([places.get(word, word) for word in argv.split()]) == 1
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"s.json"}


def test_other_columns_than_those_of_the_run(clicks, tmp_path, capsys):
    (tmp_path / "c.csv").write_text("click,user\n1,u1\n0,u2\n")
    run, path = str(clicks / "run"), tmp_path / "saved.parquet"
    assert main(["evaluate", run, str(tmp_path / "c.csv")]) == 1
    assert "there is no column 'x'" in capsys.readouterr().err
    schema = sj.ClickSchema("click", ids={"user": sj.data.VocabularyColumn()})
    sj.read_clicks(tmp_path / "c.csv", schema).save(path)
    assert main(["evaluate", run, str(path)]) == 1
    assert "has other columns or categories" in capsys.readouterr().err


def test_saved_clicks_are_read_while_training(clicks, tmp_path, capsys):
    _, known = sj.load_model(clicks / "run")
    data = sj.read_clicks(clicks / "train.tsv", known.schema, features=known)
    data.rows(slice(3000)).save(tmp_path / "train.parquet")
    argv = ["train", str(tmp_path / "train.parquet"), "--model", "wide_deep"]
    argv += ["--run", str(tmp_path / "run"), "--chunk-rows", "1000"]
    argv += ["--validation", str(clicks / "test.tsv"), "--batch-size", "512"]
    assert main(argv) == 0
    said = capsys.readouterr().err
    assert (
        "auc 0." in said and "an epoch has 6 steps, and 10 is the default here" in said
    )
    assert "give a smaller --batch-size, or more by --epochs" in said
    assert main(["evaluate", str(tmp_path / "run"), str(clicks / "test.tsv")]) == 0


def test_a_killed_run_goes_on_to_the_bit(clicks):
    often = "--checkpoint-seconds", "0"
    argv = train(clicks, *often, out="killed")
    assert kill_in_training(argv, clicks / "killed") < 6 * 43
    assert main([*argv, "--resume"]) == 0
    assert parameters(clicks / "killed") == parameters(clicks / "run")
