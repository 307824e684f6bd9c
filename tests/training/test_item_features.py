"""Models with content of their items are built, trained, measured, saved and exported."""

from typing import Any, cast

import jax
import numpy as np
import pyarrow as pa
import pytest

import sparsejax as sj

USERS, ITEMS = 60, 30


def kind_of_item(item):
    return item % 3


@pytest.fixture(scope="module")
def features():
    """Three kinds of items, and a number. Item 29 has no content; 30 to 32 no event has."""
    return sj.read_item_features(
        [
            {"item": f"i{i}", "kind": f"k{kind_of_item(i)}", "price": float(i % 7)}
            for i in range(ITEMS + 3)
            if i != 29
        ]
    )


def events():
    """Each user has items of one kind."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), 6)
    items = 3 * rng.integers(0, ITEMS // 3, len(users)) + users % 3
    return pa.table(
        {
            "user": [f"u{u}" for u in users],
            "item": [f"i{i}" for i in items],
            "time": np.arange(len(users)),
        }
    )


def histories():
    return sj.read_sequences(events())


def items():
    return sj.read(events(), indicator=True)


SASREC = sj.SASRecConfig(max_length=6, width=8, blocks=1, heads=1, dropout=0.0)


def network(*, tied):
    return sj.NetworkConfig.autoencoder((8,), tied=tied)


CASES = {
    "sasrec": (SASREC, histories),
    "network": (network(tied=False), items),
    "tied": (network(tied=True), items),
}


@pytest.mark.parametrize("name", CASES)
def test_trained_to_the_end(tmp_path, features, name):
    """New items of a user's kind are recommended, and a predictor does the same."""
    config, read = CASES[name]
    data = read()
    data = data.align_features(features.names_after(data))
    rule = sj.optimizers.adam(0.02)
    model, optimizer = sj.build(config, data, rule, item_features=features)
    options = {"batch_size": 20, "checkpoint_dir": tmp_path / "saved"}
    losses = [
        epoch["loss"]
        for epoch in sj.fit(model, optimizer, data, num_epochs=12, **options)
    ]
    assert losses[-1] < losses[0]
    content: Any = model.output.content
    sequences = isinstance(data, sj.SequenceDataset)
    columns = data.indices if sequences else data.to_scipy().indices
    counts = np.bincount(columns, minlength=data.num_features)
    np.testing.assert_array_equal(content.entries[: data.num_features], counts)

    found = sj.recommend(model, data, k=10, exclude=None)
    new = {f"i{i}": kind_of_item(i) for i in range(ITEMS, ITEMS + 3)}
    names = data.feature_names
    users = [int(row[1:]) for row in data.row_names]
    seen = right = 0
    for user, ids in zip(users, found.ids, strict=True):
        for item in names[ids]:
            if item in new:
                seen += 1
                right += new[item] == user % 3
    assert seen and right > 0.8 * seen

    again, its = sj.build(config, data, rule, seed=3, item_features=features)
    sj.fit(again, its, data, num_epochs=12, resume=True, **options)
    vectors = sj.item_vectors(model)
    np.testing.assert_array_equal(sj.item_vectors(again), vectors)
    assert not np.allclose(
        vectors[: data.num_features], model.output.kernel[...][: data.num_features]
    )

    sj.export_predictor(model, tmp_path / "predictor", names=data, k=5)
    predictor = sj.load_predictor(tmp_path / "predictor")
    shown = sj.recommend(model, data, k=5, exclude=None)
    served = predictor.recommend(data, k=5)
    np.testing.assert_array_equal(served.ids, shown.ids)
    np.testing.assert_allclose(served.scores, shown.scores, rtol=1e-4, atol=1e-5)


def test_items_that_come_later(features):
    """`add_items`, then their content: they are recommended without training."""
    data = histories()
    known = features.align(data)
    model, optimizer = sj.build(
        SASREC, data, sj.optimizers.adam(0.02), item_features=known
    )
    sj.fit(model, optimizer, data, num_epochs=12, batch_size=20)
    before = sj.item_vectors(model)
    longer = data.align_features(features.names_after(data))
    model.add_items(longer.num_features - data.num_features, optimizer=optimizer)
    np.testing.assert_array_equal(sj.item_vectors(model)[: len(before)], before)
    new = features.align(longer).like(known)
    content: Any = model.output.content
    content.set_to(new.tags, new.vectors)
    np.testing.assert_allclose(sj.item_vectors(model)[: len(before)], before, 1e-5)
    nearest = sj.similar_items(model, ["i30"], k=3, names=longer).names(longer)[0]
    assert all(kind_of_item(int(name[1:])) == 0 for name in nearest)
    sj.fit(model, optimizer, longer, num_epochs=1, batch_size=20)


def test_what_cannot_be(features):
    data, wrong = histories(), cast(Any, {"i0": ["k0"]})
    with pytest.raises(ValueError, match="none of .* has content"):
        sj.build(
            SASREC, data, item_features=sj.read_item_features([{"item": "x", "a": "b"}])
        )
    with pytest.raises(
        TypeError, match="what sparsejax.read_item_features reads, got dict"
    ):
        sj.build(SASREC, data, item_features=wrong)
    with pytest.raises(ValueError, match="30 items without names.*content of 32"):
        sj.build(network(tied=False), items().to_scipy(), item_features=features)
    with pytest.raises(ValueError, match="item_features is of no use for clicks"):
        sj.build(sj.DLRMConfig(), None, item_features=features)
    model, optimizer = sj.build(network(tied=False), items(), item_features=features)
    with pytest.raises(NotImplementedError, match="cannot have a fused update"):
        sj.fit(model, optimizer, items(), fused=True)


def test_same_on_a_mesh(features):
    data = histories()

    def trained():
        model, optimizer = sj.build(
            SASREC, data, sj.optimizers.sgd(0.5), item_features=features
        )
        sj.fit(model, optimizer, data, num_epochs=1, batch_size=64)
        return sj.item_vectors(model)

    alone = trained()
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        np.testing.assert_allclose(trained(), alone, rtol=1e-3, atol=1e-5)


def test_two_towers(features):
    """Features of users are the input, and items have content: as the page shows."""
    purchases = items()
    groups = [f"g{int(row[1:]) % 3}" for row in purchases.row_names]
    users = sj.data.from_arrow(
        pa.table({"user": purchases.row_names.tolist(), "item": groups})
    )
    config = sj.NetworkConfig.autoencoder((8,), corruption=0.0)
    model, optimizer = sj.build(
        config,
        users,
        sj.optimizers.adam(0.05),
        targets=purchases,
        item_features=features,
    )
    sj.fit(model, optimizer, users, purchases, num_epochs=30, batch_size=20)
    found = sj.recommend(model, users, k=5, exclude=None).ids
    kinds = [
        [kind_of_item(int(name[1:])) for name in purchases.feature_names[row]]
        for row in found
    ]
    wanted = [int(row[1:]) % 3 for row in users.row_names]
    assert np.mean(np.array(kinds) == np.array(wanted)[:, None]) > 0.9
