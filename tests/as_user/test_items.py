"""Each command and verb for models of items, by the defaults."""

import json

import pytest
from as_user import shops

import sparsejax as sj


@pytest.fixture(scope="module")
def run(folder, sparsejax) -> sj.Run:
    shops.baskets(folder / "shop.csv", 2000)
    sparsejax("split shop.csv --by random --fraction .8 --out parts")
    sparsejax("train parts/train.parquet --run run")
    return sj.Run.load(folder / "run")


def test_is_better_than_popularity(run, sparsejax, capsys):
    sparsejax("evaluate run parts/train.parquet parts/heldout.parquet --baselines")
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["ndcg@20"] > measured["popularity_ndcg@20"] > 0


@pytest.mark.parametrize(
    "command",
    [
        "predict run parts/train.parquet --out best.csv",
        "predict run parts/train.parquet --exclude-items i1,i2 --keep-seen --out all.csv",
        "report run --train parts/train.parquet --test parts/heldout.parquet",
        "similar run i3 i4",
        "vectors run --out items.npz",
        "vectors run --data parts/train.parquet --out users.npz",
        "plan --rows 2000 --entries 20000 --items 400 --memory 4GB --compile",
        "tune parts/train.parquet --trials 2 --epochs 2 --run tuned",
        "train parts/train.parquet --from run --run more --epochs 1 --validation .1",
        "compare run more parts/train.parquet parts/heldout.parquet",
        "prepare shop.csv prepared",
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
    data = sj.read(folder / "parts" / "train.parquet")
    recommended = run.recommend(["u1", "u2"], k=5, inputs=data, exclude_items=["i7"])
    assert [len(names) for names in recommended.names()] == [5, 5]
    train, heldout = data.split(0.8, seed=0)
    assert sj.recommend(run.model, train, k=5, exclude="inputs").ids.shape[1] == 5
    assert sj.evaluate(run.model, train, heldout, k=5)["recall@5"] > 0
    assert len(sj.item_vectors(run.model)) == shops.ITEMS
    assert len(sj.user_vectors(run.model, train)) == train.num_rows
