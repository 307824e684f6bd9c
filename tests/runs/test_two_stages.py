"""Two runs as one model, against the click model on the joined table."""

import functools

import numpy as np
import pytest

import sparsejax as sj

WORDS, KEYS = sj.data.VocabularyColumn, sj.data.KeyColumn
ITEMS = [f"i{n}" for n in range(12)]
# An item without a row, and one that no run knows.
ABOUT = [
    {"item": name, "price": float(n), "tags": [f"t{n % 3}"] * (n % 3), "weight": 1.0}
    for n, name in enumerate(ITEMS[:-1])
] + [{"item": "other", "price": 3.0, "tags": ["t9"], "weight": 2.0}]
USERS = {"user": ["ann", "bob", "eve"], "age": [30.0, 40.0, None]}
COLUMNS = {"item_columns": ABOUT, "user_columns": USERS, "request_columns": ["device"]}


@functools.cache
def histories() -> sj.SequenceDataset:
    """Rows of 0 to 7 items, some of them twice."""
    rng = np.random.default_rng(0)
    rows = [
        {"user": user, "item": rng.choice(ITEMS, n).tolist(), "time": [*range(n)]}
        for user, n in (("ann", 7), ("bob", 2), ("eve", 1), ("new", 4))
    ]
    return sj.read_sequences(rows, features=np.array(ITEMS, np.dtypes.StringDType()))


@functools.cache
def retrieval(kind: str) -> sj.Run:
    data = histories()
    if kind == "items":
        config = sj.NetworkConfig.autoencoder(hidden=(3,))
        return sj.Run.train(data.to_sparse(), config=config, num_epochs=1, seed=1)
    config = sj.GRUConfig(max_length=4, width=4)
    return sj.Run.train(data, config=config, num_epochs=1, seed=1)


@functools.cache
def ranking(kind: str) -> sj.Run:
    rng = np.random.default_rng(1)
    rows = [
        {
            "click": n % 2,
            "item": ITEMS[rng.integers(10)],
            "had": rng.choice(ITEMS, n % 6).tolist(),
            "user": ("ann", "bob", "eve")[n % 3],
            "device": ("phone", "tablet")[n % 2],
            "tags": [f"t{m}" for m in range(n % 3)],
            "price": n / 7,
            "age": n / 3,
        }
        for n in range(60)
    ]
    dense = {name: sj.data.DenseColumn(missing=0.5) for name in ("age", "price")}
    ids = {"user": WORDS(), "had": WORDS(like="item"), "item": WORDS()}
    ids |= {"tags": WORDS(), "device": sj.data.HashedColumn(30)}
    if kind == "keys":
        del ids["had"]
        ids |= {"item": KEYS(), "device": KEYS()}
        config = sj.DLRMConfig(dim=4, bottom=(4,), top=(4,))
        options = {"dynamic": 200}
    else:
        config = sj.DINConfig(dim=4, length=3, attention=(3,), hidden=(4,))
        options = {}
        if kind == "sums":
            config = sj.WideDeepConfig(dim=4, hidden=(4,), combiner="mean")
    data = sj.read_clicks(rows, sj.ClickSchema("click", dense, ids))
    options |= {"optimizer": "adagrad", "learning_rate": 0.03, "num_epochs": 1}
    return sj.Run.train(data, config=config, **options)


@pytest.mark.parametrize(
    ("first", "second"),
    [("items", "din"), ("histories", "sums"), ("histories", "keys")],
)
def test_scores_are_the_probabilities_of_the_joined_table(first, second) -> None:
    one, other, data = retrieval(first), ranking(second), histories()
    both = sj.TwoStage(one, other, candidates=5, **COLUMNS)
    device = ["phone", None, "desk", "tablet"]
    found = both.recommend(k=5, requests={"device": device})
    candidates = one.recommend(k=5).names()
    about = {each["item"]: each for each in ABOUT}
    ages = dict(zip(*USERS.values(), strict=True))
    names = [str(name) for name in data.row_names]
    for row, (user, wanted) in enumerate(zip(names, candidates, strict=True)):
        had = data.indices[data.indptr[row] : data.indptr[row + 1]]
        had = [ITEMS[n] for n in (np.unique(had) if first == "items" else had)]
        if second == "sums":
            had = had[-200:]
        records = [
            {
                "item": item,
                "user": user,
                "had": had,
                "device": device[row],
                "age": ages.get(user),
                "price": about.get(item, {}).get("price"),
                "tags": about.get(item, {}).get("tags"),
            }
            for item in wanted
        ]
        scores = other.predict(records)
        order = np.argsort(-scores, kind="stable")
        assert found.names()[row] == [wanted[n] for n in order]
        np.testing.assert_allclose(found.scores[row][: len(order)], scores[order], rtol=2e-6)
