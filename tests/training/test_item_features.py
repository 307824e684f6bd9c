"""Models with item content are built, trained, measured, saved and exported."""

import pickle
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.nn import ItemContent

USERS, ITEMS = 60, 30


def kind_of_item(item):
    return item % 3


@pytest.fixture(scope="module")
def features():
    """Features of items: three kinds and a number. Item 29 has no content; items 30 to 32 have no
    events.
    """
    return sj.read_item_features(
        [
            {"item": f"i{i}", "kind": f"k{kind_of_item(i)}", "price": float(i % 7)}
            for i in range(ITEMS + 3)
            if i != 29
        ]
    )


def events():
    """Events in which each user has items of a single kind."""
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


def network(*, tied, **options):
    return sj.NetworkConfig.autoencoder((8,), tied=tied, **options)


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
    # Adagrad's programs compile in half the time of Adam's.
    model, optimizer = sj.build(
        SASREC, data, sj.optimizers.adagrad(0.1), item_features=known
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


SERVED = {
    **CASES,
    "linear": (network(tied=True, linear=sj.nn.LinearConfig(rank=4)), items),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_predictor_takes_new_items(tmp_path, features, name):
    """They are recommended as by a model that gets them, and the file keeps them."""
    config, read = SERVED[name]
    data = read()
    known = features.align(data)
    model, optimizer = sj.build(
        config, data, sj.optimizers.adagrad(0.1), item_features=known
    )
    sj.fit(model, optimizer, data, num_epochs=6, batch_size=20)
    path = tmp_path / "predictor"
    sj.export_predictor(model, path, names=data, k=8, item_features=known)
    predictor = sj.load_predictor(path)
    with pytest.warns(UserWarning, match="1 of 4 new items were left out.*'i99'"):
        longer = predictor.add_items(
            sj.read_item_features(
                [
                    *(
                        {"item": f"i{i}", "kind": f"k{i % 3}"}
                        for i in range(28, ITEMS + 3)
                    ),
                    {"item": "i99", "kind": "other"},
                ]
            )
        )
    assert predictor.num_items == ITEMS and longer.num_items == ITEMS + 3
    new = sj.read_item_features(
        [{"item": f"i{i}", "kind": f"k{i % 3}"} for i in range(ITEMS, ITEMS + 3)]
    )
    more = data.align_features(new.names_after(data))
    model.add_items(3)
    of_new, of_known = new.align(more).like(known), known.align(more)
    content: Any = model.output.content
    content.set_to(cast(Any, of_new.tags + of_known.tags), None)

    wanted = sj.recommend(model, more, k=8, exclude=more)
    assert (wanted.ids >= ITEMS).any()

    def check(predictor):
        found = predictor.recommend(more, exclude=more)
        np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-4, atol=1e-5)
        differ = found.ids != wanted.ids
        near = np.abs(np.diff(wanted.scores, prepend=9, append=-9)) < 1e-4
        assert not (differ & ~(near[:, 1:] | near[:, :-1])).any()

    check(longer)
    # In a history they are skipped, and not recommended again.
    names = ["i3", "i30", "i0"]
    without = longer.recommend_names(["i3", "i0"])
    with_new = longer.recommend_names(names)
    rest = [each for each in without if each != "i30"]
    assert with_new[: len(rest)] == rest and "i30" not in with_new
    if name == "sasrec":
        place = {each: i for i, each in enumerate(more.feature_names.tolist())}
        asked = sj.SequenceDataset(
            np.array([0, 4]),
            np.array([place[each] for each in ("i30", "i3", "i31", "i0")]),
            more.row_names[:1],
            more.feature_names,
        )
        found = longer.names(longer.recommend(asked, exclude=asked))[0]
        rest = [each for each in with_new if each != "i31"]
        assert found[: len(rest)] == rest

    predictor.save(path)
    longer.save(tmp_path / "longer")
    again = sj.load_predictor(tmp_path / "longer")
    answers = sj.load_predictor(path).answer, again.answer
    assert None not in answers and answers[0] != answers[1] and longer.answer is None
    check(again)
    check(pickle.loads(pickle.dumps(again)))
    last = again.add_items(sj.read_item_features([{"item": "i40", "kind": "k1"}]))
    assert last.num_items == ITEMS + 4 and last.items[-1] == "i40"
    found = last.recommend_names(["i1", "i4"], only_items=["i31", "i40"])
    assert set(found) == {"i31", "i40"}

    with pytest.raises(ValueError, match="has all of these 2 items"):
        again.add_items(
            sj.read_item_features(
                [{"item": "i1", "kind": "k1"}, {"item": "i30", "kind": "k0"}]
            )
        )
    with pytest.raises(ValueError, match="no tag .* is one that the model knows"):
        again.add_items(sj.read_item_features([{"item": "i50", "kind": "other"}]))
    # Both the library and a check of types name it.
    with pytest.raises(TypeError, match="item_features"):
        again.add_items(cast(Any, {"i50": ["k1"]}))
    with pytest.raises(TypeError, match="was not loaded from a file"):
        pickle.dumps(last)


def test_new_items_by_vectors(tmp_path):
    """With vectors of float16, in bfloat16 and with a temperature."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((ITEMS + 2, 3)).astype(np.float16)
    features = sj.read_item_features(
        pa.table(
            {
                "item": [f"i{i}" for i in range(ITEMS + 2)],
                "text": pa.array(list(vectors), pa.list_(pa.float16())),
            }
        )
    )
    data = items()
    config = sj.NetworkConfig.autoencoder((8,), temperature=0.2, param_dtype="bfloat16")
    known = features.align(data)
    model, _ = sj.build(config, data, item_features=known)
    sj.export_predictor(model, tmp_path / "p", names=data, item_features=known)
    longer = sj.load_predictor(tmp_path / "p").add_items(features)
    more = data.align_features(features.names_after(data))
    model.add_items(2)
    content: Any = model.output.content
    content.set_to(None, features.align(more).vectors)
    wanted = sj.recommend(model, more, exclude=None)
    found = longer.recommend(more)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=2e-2, atol=2e-2)
    assert np.mean(found.ids == wanted.ids) > 0.9
    with pytest.raises(ValueError, match="have vectors of 0 numbers"):
        longer.add_items(sj.read_item_features([{"item": "i50", "kind": "k1"}]))


def test_predictors_that_take_no_new_items(tmp_path, features):
    data = items()
    known = features.align(data)
    model, _ = sj.build(network(tied=False), data, item_features=known)
    plain, _ = sj.build(network(tied=False), data)
    path = tmp_path / "predictor"
    sj.export_predictor(model, path, names=data)
    with pytest.raises(ValueError, match="export it with item_features"):
        sj.load_predictor(path).add_items(features)
    with pytest.raises(ValueError, match="was not built with content"):
        sj.export_predictor(plain, path, names=data, item_features=known)
    with pytest.raises(ValueError, match="item_features needs the names"):
        sj.export_predictor(model, path, item_features=known)
    other = sj.read_item_features([{"item": "i1", "kind": "k1"}])
    with pytest.raises(ValueError, match="has 1 tags .* was made for 4 and 0"):
        sj.export_predictor(model, path, names=data, item_features=other)


@pytest.mark.usefixtures("wrong_types")
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
    with pytest.raises(
        ValueError, match="item_features is of no use for a model of clicks"
    ):
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


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_made_once_for_many_batches(monkeypatch, features, name):
    config, read = CASES[name]
    data = read()
    model, optimizer = sj.build(config, data, item_features=features.align(data))
    sj.fit(model, optimizer, data, num_epochs=1, batch_size=20)
    histories = isinstance(data, sj.SequenceDataset)
    shown = (
        jnp.asarray(data.padded(6)) if histories else sj.CSR.from_scipy(data.to_scipy())
    )
    _, wanted = model.top_k(cast(Any, shown), 5)
    calls, vectors = [], ItemContent.vectors_with

    def counted(self, *arguments, **options):
        calls.append(arguments)
        return vectors(self, *arguments, **options)

    monkeypatch.setattr(ItemContent, "vectors_with", counted)
    jax.clear_caches()
    how: dict[str, Any] = {"k": 5, "batch_size": 16, "exclude": None}
    found = sj.recommend(model, data, optimizer=optimizer, **how)
    np.testing.assert_allclose(found.scores, wanted, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1
    before = sj.evaluate(model, data, data, **how)
    with jax.set_mesh(sj.make_mesh(data=2, model=2)):
        again, _ = sj.build(config, data, item_features=features.align(data))
        nnx.update(again, nnx.state(model))
        on_mesh = sj.evaluate(again, data, data, exclude=None, k=5, batch_size=16)
    assert on_mesh == pytest.approx(before, rel=1e-3)
