"""Histories in `recommend` and `evaluate`, against NumPy."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj

ITEMS, LENGTH = 20, 4


@pytest.fixture(scope="module")
def model():
    config = sj.SASRecConfig(max_length=LENGTH, width=8, blocks=1)
    model = sj.sequence.SASRec(config, items=ITEMS, rngs=nnx.Rngs(0))
    model.train()  # as after `fit`: noise must be off in what follows
    return model


def made(*rows, prefix="user") -> sj.SequenceDataset:
    indptr = np.append(0, np.cumsum([len(row) for row in rows]))
    names = [f"{prefix}{r}" for r in range(len(rows))]
    items = np.array([f"item{i}" for i in range(ITEMS)])
    indices = np.array([i for row in rows for i in row], np.int32)
    return sj.SequenceDataset(indptr, indices, np.array(names), items)


def scores_of(model, histories):
    """`[rows, ITEMS]` scores for the last `LENGTH` items of each history."""
    model.eval()
    ids, scores = model.top_k(jnp.asarray(histories.padded(LENGTH)), ITEMS)
    model.train()
    found = np.zeros(scores.shape)
    np.put_along_axis(found, np.asarray(ids), np.asarray(scores), axis=1)
    return found


def test_recommendations(model):
    data = made([3, 1, 3, 8, 9, 2], [], [5])
    scores = scores_of(model, data)
    found = sj.recommend(model, data, k=6, batch_size=2, exclude=None)
    np.testing.assert_array_equal(found.ids, np.argsort(-scores, axis=1)[:, :6])
    np.testing.assert_allclose(
        found.scores, -np.sort(-scores, axis=1)[:, :6], rtol=1e-5, atol=1e-6
    )
    users, items = sj.user_vectors(model, data), sj.item_vectors(model)
    cosines = users @ items.T / np.linalg.norm(items, axis=1)
    cosines /= np.linalg.norm(users, axis=1, keepdims=True) * model.config.temperature
    some = [0, 2]  # an empty history has no vector
    np.testing.assert_allclose(cosines[some], scores[some], rtol=1e-4, atol=1e-5)
    # What a history has, also what is too old to be read.
    for row in range(3):
        scores[row, data.indices[data.indptr[row] : data.indptr[row + 1]]] = -np.inf
    for seen in (data, "inputs", data.to_sparse()):
        found = sj.recommend(model, data, k=6, exclude=seen)
        np.testing.assert_array_equal(found.ids, np.argsort(-scores, axis=1)[:, :6])
    assert found.to_arrow(data, data)["user"][0].as_py() == "user0"
    assert found.names(data)[0][0] == f"item{scores[0].argmax()}"
    # Rows are matched by name.
    other = made([2], prefix="other").to_sparse()
    with pytest.raises(ValueError, match="exclude has none of the rows of inputs"):
        sj.recommend(model, data, exclude=other)


@pytest.mark.parametrize("exclude", ["inputs", None])
def test_measures(model, exclude):
    train = made([3, 1, 3, 8, 9, 2], [4], [5, 6], [7, 0])
    heldout = made([11], [], [5], [12])  # nobody else has 11, 12; 5 was seen
    scores = scores_of(model, train)
    if exclude:
        for row in range(4):
            seen = train.indices[train.indptr[row] : train.indptr[row + 1]]
            scores[row, seen] = -np.inf
    ranks = [
        1 + np.sum(scores[row] > scores[row, item])
        for row, item in ((0, 11), (2, 5), (3, 12))
    ]
    if exclude:
        ranks[1] = ITEMS
        with pytest.warns(UserWarning, match="1 of 3 held-out entries"):
            found = sj.evaluate(model, train, heldout, k=8)
    else:
        found = sj.evaluate(model, train, heldout, k=8, exclude=None)
    ranks = np.array(ranks)
    hits = ranks <= 8
    assert found["recall@8"] == pytest.approx(hits.mean())
    assert found["ndcg@8"] == pytest.approx((hits / np.log2(1 + ranks)).mean())
    assert (found["users"], found["entries_unknown"]) == (3, 2)
    assert "popularity_ndcg@8" in found


@pytest.mark.parametrize("timed", [False, True])
def test_candidates_alone_are_ranked(timed):
    train = made([3, 1, 3, 8, 9, 2], [4], [5, 6], [7, 0])
    given = [[11, 2, 6, 10], [1], [0, 1, 19], [3, 4, 5, 6, 8]]
    heldout, candidates = made([17], [], [18], [12]), made(*given)
    config = sj.HSTUConfig(max_length=LENGTH, width=8, blocks=1)
    model: Any = sj.sequence.HSTU(config, items=ITEMS, rngs=nnx.Rngs(0))
    model.blocks[0].time_bias[...] = jnp.sin(jnp.arange(128.0))
    times = None
    if timed:
        train = dataclasses.replace(train, times=3.0 ** np.arange(11))
        times = jnp.asarray(train.padded_times(LENGTH))
    model.eval()
    histories = jnp.asarray(train.padded(LENGTH))
    ids, best = model.top_k(histories, ITEMS, times=times)
    scores = np.take_along_axis(np.asarray(best), np.argsort(ids, axis=1), axis=1)
    some = model.item_scores(histories, ids[:, 3:7], times=times)
    np.testing.assert_allclose(some, best[:, 3:7], rtol=1e-3, atol=1e-4)
    ranks = [
        1 + np.sum(scores[row, given[row]] > scores[row, item])
        for row, item in ((0, 17), (2, 18), (3, 12))
    ]
    # Items that nobody has are unknown: let the baseline's data have them.
    known = made([17, 18, 12], *given, prefix="other")
    found = sj.evaluate(
        model,
        train,
        heldout,
        k=3,
        exclude=None,
        popularity=known,
        candidates=candidates,
    )
    hits = np.array(ranks) <= 3
    assert found["recall@3"] == pytest.approx(hits.mean())
    wanted = (hits / np.log2(1 + np.array(ranks))).mean()
    assert found["ndcg@3"] == pytest.approx(wanted)
    with pytest.raises(ValueError, match="candidates are data, a list of items"):
        wrong: Any = "inputs"
        sj.evaluate(model, train, heldout, candidates=wrong)


def test_a_predictor(model, tmp_path, symbolic_sizes):
    data = made([3, 1, 3, 8, 9, 2], [], [5])
    path = tmp_path / "model.predictor"
    sj.export_predictor(model, path, k=6, names=data, batch_size=8)
    predictor = sj.load_predictor(path)
    for exclude in (None, data):
        expected = sj.recommend(model, data, k=6, exclude=exclude)
        found = predictor.recommend(data, exclude=exclude)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-6)
    # The order of the names counts, and so do repeats; unknown ones are skipped.
    names = ["item3", "item1", "new", "item3", "item8", "item9", "item2"]
    assert predictor.recommend_names(names) == predictor.names(found)[0]
    with pytest.raises(ValueError, match="reads no times; leave out times"):
        predictor.recommend_names(names, times=[0.0] * len(names))
    all_items = predictor.recommend_names([names, []], exclude_seen=False)
    expected = sj.recommend(model, data, k=6, exclude=None)
    assert all_items == predictor.names(expected)[:2]
    entries = data.indptr, data.indices, data.row_names
    with pytest.raises(ValueError, match="'item19' in inputs but 'item0' in the pred"):
        predictor.recommend(sj.SequenceDataset(*entries, data.feature_names[::-1]))
    with pytest.raises(ValueError, match="a SequenceDataset, .* not a SparseDataset"):
        predictor.recommend(data.to_sparse())
    with pytest.raises(ValueError, match="inputs has 10 columns but the model has 20"):
        predictor.recommend(sj.SequenceDataset(*entries, data.feature_names[:10]))


def test_names_with_times(tmp_path):
    data = made([3, 1, 3, 8, 9, 2], [], [5])
    data = dataclasses.replace(data, times=np.array([0, 1, 50, 60, 9000, 9001, 7]))
    config = sj.HSTUConfig(max_length=LENGTH, width=8, blocks=1)
    model: Any = sj.sequence.HSTU(config, items=ITEMS, rngs=nnx.Rngs(0))
    model.blocks[0].time_bias[...] = 30 * jnp.sin(jnp.arange(128.0))
    path = tmp_path / "model.predictor"
    sj.export_predictor(model, path, k=6, names=data, batch_size=8)
    predictor = sj.load_predictor(path)
    names = [[f"item{i}" for i in row] for row in ([3, 1, 3, 8, 9, 2], [], [5])]
    times = [[100.0, 101, 150, 160, 9100, 9101], [], [3.0]]
    expected = predictor.names(predictor.recommend(data, exclude=data))
    assert predictor.recommend_names(names, times=times) == expected
    assert predictor.recommend_names(names[0], times=times[0]) == expected[0]
    # What is not known is left out with its time.
    more = predictor.recommend_names(["tea", *names[0]], times=[0, *times[0]])
    assert more == expected[0]
    other = predictor.recommend_names(names[0], times=[*times[0][:5], 1e9])
    assert other != expected[0]
    with pytest.raises(ValueError, match="also reads times; give times="):
        predictor.recommend_names(names)
    with pytest.raises(ValueError, match="has 6 names, but its times have the shape"):
        predictor.recommend_names(names[0], times=[1.0])
    with pytest.raises(ValueError, match="there are 3 histories, and times of 1"):
        predictor.recommend_names(names, times=[[1.0]])
    for wrong in ([5.0, 4.0], [1.0, np.inf]):
        with pytest.raises(ValueError, match="finite and do not fall"):
            predictor.recommend_names(["item1", "item2"], times=wrong)


def test_wrong_arguments(model):
    data = made([3, 1], [2, 5])
    with pytest.raises(ValueError, match="give heldout, as split_last makes it"):
        sj.evaluate(model, data)
    with pytest.raises(
        ValueError, match="fold_in is of no use for a model of histories"
    ):
        sj.evaluate(model, data, fold_in=0.5)
    with pytest.raises(ValueError, match='exclude is data or "inputs", got'):
        sj.recommend(model, data, exclude="histories")
    train, heldout = data.split_last()
    renamed = sj.SequenceDataset(
        heldout.indptr, heldout.indices, heldout.row_names, data.feature_names[::-1]
    )
    with pytest.raises(ValueError, match="column 0 is 'item0' in inputs but 'item19'"):
        sj.evaluate(model, train, renamed)
    optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
    for call in (sj.recommend, lambda *given: sj.fit(given[0], optimizer, given[1])):
        with pytest.raises(TypeError, match="SASRec has no num_features"):
            call(model, data.to_sparse())
    config = sj.NetworkConfig.autoencoder((4,))
    other = sj.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError, match=r"FeedForward has no config.max_length \(other"
    ):
        sj.recommend(other, data)
