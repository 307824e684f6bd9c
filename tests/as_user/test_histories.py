"""Each command and verb for models of histories, by the defaults but for fewer epochs."""

import json

import pytest
from as_user import shops

import sparsejax as sj

# The default is 300 epochs, which take minutes. Program sizes do not depend on it.
EPOCHS = 12


@pytest.fixture(scope="module")
def run(folder, sparsejax) -> sj.Run:
    shops.histories(folder / "shop.csv", 600)
    sparsejax("split shop.csv --by last --histories --out parts")
    sparsejax(f"train parts/train.parquet --run run --model sasrec --epochs {EPOCHS}")
    return sj.Run.load(folder / "run")


def test_is_better_than_popularity(run, sparsejax, capsys):
    sparsejax("evaluate run parts/train.parquet parts/heldout.parquet --baselines")
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["ndcg@20"] > 2 * measured["popularity_ndcg@20"] > 0


@pytest.mark.parametrize("model", ["hstu", "gru"])
def test_other_models(run, sparsejax, model):
    sparsejax(f"train parts/train.parquet --run {model} --model {model} --epochs 1")
    sparsejax(f"evaluate {model} parts/train.parquet parts/heldout.parquet")


@pytest.mark.parametrize(
    "command",
    [
        "predict run parts/train.parquet --out best.csv",
        "predict run parts/train.parquet --exclude-items i1,i2 --keep-seen --out all.csv",
        "report run --train parts/train.parquet --test parts/heldout.parquet",
        "similar run i3 i4",
        "vectors run --out items.npz",
        "vectors run --data parts/train.parquet --out users.npz",
        "plan --model hstu --rows 600 --entries 12000 --items 400 --memory 4GB --compile",
        "tune parts/train.parquet --model gru --trials 1 --epochs 1 --run tuned",
        "train parts/train.parquet --from run --run more --epochs 1",
        "compare run more parts/train.parquet parts/heldout.parquet",
    ],
)
def test_command(run, sparsejax, command):
    sparsejax(command)


def test_exported(run, sparsejax, serve, folder):
    sparsejax("export run shop.predictor")
    predictor = sj.load_predictor(folder / "shop.predictor")
    assert len(predictor.recommend_names([["i3", "i4"]], k=5)[0]) == 5
    sparsejax("export-triton shop.predictor triton --name shop")
    serve("shop.predictor", "--port", "0")


def test_verbs(run, folder):
    data = sj.read_sequences(folder / "parts" / "train.parquet")
    recommended = run.recommend(["u1", "u2"], k=5, inputs=data, exclude_items=["i7"])
    assert [len(names) for names in recommended.names()] == [5, 5]
    assert sj.recommend(run.model, data, k=5, exclude="inputs").ids.shape[1] == 5
    assert len(sj.user_vectors(run.model, data)) == data.num_rows
    assert len(sj.item_vectors(run.model)) == shops.ITEMS
    train, heldout = data.split_last(1)
    assert sj.evaluate(run.model, train, heldout, exclude=None)["recall@20"] > 0
