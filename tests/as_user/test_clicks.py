"""Each command and verb for click models, by the defaults."""

import json

import pytest
from as_user import shops

import sparsejax as sj

COLUMNS = "--label label --dense price --categories user item"


@pytest.fixture(scope="module")
def run(folder, sparsejax) -> sj.Run:
    shops.clicks(folder / "clicks.csv", 12_000)
    sparsejax(f"split clicks.csv --by rows --fraction .8 {COLUMNS} --out parts")
    sparsejax("train parts/train.parquet --run run --model dlrm")
    return sj.Run.load(folder / "run")


def test_is_better_than_the_base_rate(run, sparsejax, capsys):
    sparsejax("evaluate run parts/heldout.parquet")
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    # The planted odds have an AUC of 0.8; a constant prediction has 0.5.
    assert measured["auc"] > 0.7


@pytest.mark.parametrize("model", ["dcn", "deepfm", "wide_deep"])
def test_other_models(run, sparsejax, model):
    sparsejax(f"train parts/train.parquet --run {model} --model {model} --epochs 1")
    sparsejax(f"evaluate {model} parts/heldout.parquet --groups user")


@pytest.mark.parametrize(
    "command",
    [
        "predict run parts/heldout.parquet --out probabilities.csv",
        "report run --test parts/heldout.parquet",
        f"plan --model dlrm --examples clicks.csv {COLUMNS} --memory 4GB",
        "tune parts/train.parquet --model dlrm --trials 1 --epochs 1 --run tuned",
        "train parts/train.parquet --from run --run more --epochs 1",
        "compare run more parts/heldout.parquet",
    ],
)
def test_command(run, sparsejax, command):
    sparsejax(command)


def test_exported(run, sparsejax, serve, folder):
    sparsejax("export run shop.predictor")
    predictor = sj.load_predictor(folder / "shop.predictor")
    records = {"price": [0.5], "user": ["u1"], "item": ["i2"]}
    [probability] = predictor.predict_records(records)
    assert 0 < probability < 1
    sparsejax("export-triton shop.predictor triton --name shop")
    serve("shop.predictor", "--port", "0")


def test_verbs(run, folder):
    assert len(run.predict(str(folder / "parts" / "heldout.parquet"))) == 2400
