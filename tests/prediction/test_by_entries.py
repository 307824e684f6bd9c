"""Metrics of items grouped by their number of entries, compared with NumPy."""

import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj

ROWS, ITEMS, K = 70, 60, 5
GROUPS = {"0": (0, 0), "1-4": (1, 4), "5-9": (5, 9), "10-19": (10, 19), "20+": (20, 99)}


def some_data():
    """Items that occur in the training data from never to often; the last item never occurs."""
    rng = np.random.default_rng(0)
    likely = np.linspace(0.5, 0, ITEMS) ** 1.5
    train = rng.random((ROWS, ITEMS)) < likely
    train[:, -5:], train[3] = False, True
    train[3, -5:] = False
    heldout = (rng.random((ROWS, ITEMS)) < 0.08) & ~train
    heldout[7] = False
    return train, heldout


def expected(ids, train, heldout):
    counts, found = train.sum(axis=0), {}
    listed = ids[heldout.any(axis=1)]
    for name, (least, most) in GROUPS.items():
        group = (counts >= least) & (counts <= most)
        wanted = heldout & group
        found[f"entries[{name}]"] = wanted.sum()
        recall, ndcg = [], []
        for row, items in zip(ids, wanted, strict=True):
            if not items.any():
                continue
            hits = items[row]
            gains = 1 / np.log2(np.arange(2, K + 2))
            recall.append(hits.sum() / items.sum())
            ndcg.append((hits * gains).sum() / gains[: items.sum()].sum())
        found[f"recall@{K}[{name}]"], found[f"ndcg@{K}[{name}]"] = (
            np.mean(recall),
            np.mean(ndcg),
        )
        found[f"share@{K}[{name}]"] = group[listed].mean()
    return found


@pytest.mark.parametrize("batch_size", [512, 16])
def test_equals_numpy(batch_size):
    train, heldout = some_data()
    config = sj.NetworkConfig.autoencoder((8,))
    model = sj.nn.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(1))
    data, others = (scipy.sparse.csr_array(x) for x in (train, heldout))
    ids = sj.recommend(model, data, k=K, exclude=data).ids
    options = {"k": K, "batch_size": batch_size}
    found = sj.evaluate(model, data, others, by="entries", **options)
    for name, value in expected(ids, train, heldout).items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    plain = sj.evaluate(model, data, others, **options)
    assert {k: v for k, v in found.items() if "[" not in k} == plain
    assert found["popularity_recall@5[0]"] == 0


def test_of_histories():
    histories = sj.read_sequences(
        [
            {"user": u, "item": (u * i) % 7, "time": i}
            for u in range(9)
            for i in range(5)
        ]
    )
    train, heldout = histories.split_last()
    model, _ = sj.build(sj.SASRecConfig(max_length=4, width=8), train)
    found = sj.evaluate(model, train, heldout, k=3, exclude=None, by="entries")
    assert sum(v for k, v in found.items() if k.startswith("entries[")) == 9
    assert sum(
        v for k, v in found.items() if k.startswith("share@3[")
    ) == pytest.approx(1)


@pytest.mark.usefixtures("wrong_types")
def test_what_cannot_be():
    train, heldout = (scipy.sparse.csr_array(x) for x in some_data())
    config = sj.NetworkConfig.autoencoder((8,))
    model = sj.nn.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="counts the entries of items in the training"):
        sj.evaluate(model, train, heldout, by="entries", popularity=None, exclude=None)
    with pytest.raises(ValueError, match='by is "entries" or "kinds" or None'):
        sj.evaluate(model, train, heldout, by="age")  # pyrefly: ignore
