"""Scores of content similarity that are added to the scores of a model of histories."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.nn import ContentSizes
from sparsejax.sequence import WithNeighbours, build_sequence_model, neighbours

ITEMS = 40


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    tags = (rng.random((ITEMS, 9)) < 0.3) * 1.0
    tags[[3, 7]] = 0  # nothing is known of them
    vectors = rng.standard_normal((ITEMS, 5)).astype(np.float16)
    vectors[7] = 0
    return scipy.sparse.csr_array(tags), vectors


def some_model(given, **options) -> Any:
    config = sj.SASRecConfig(
        max_length=5, width=8, heads=1, blocks=1, dropout=0.5, **options
    )
    sizes = ContentSizes.of(*given)
    model: Any = build_sequence_model(
        config, items=ITEMS, content=sizes, rngs=nnx.Rngs(0)
    )
    model.output.content.set_to(*given)
    model.output.content.set_entries(np.arange(ITEMS) % 6)
    model.eval()
    return model


HISTORIES = jnp.array([[1, 2, 3, 7, 9], [4, 7, -1, -1, -1], [3, -1, -1, -1, -1]])


def wanted(model, given, weight, recent, popularity):
    tags, vectors = (np.asarray(x, np.float64) for x in (given[0].toarray(), given[1]))

    def unit(x):
        norms = np.linalg.norm(x, axis=1, keepdims=True)
        return x / np.where(norms > 0, norms, 1)

    tags = unit(tags) * np.log(ITEMS / np.maximum((tags > 0).sum(axis=0), 1))
    content = unit(np.concatenate([unit(tags), unit(vectors)], axis=1))
    last = [[i for i in row if i >= 0][-recent:] for row in np.asarray(HISTORIES)]
    shown = unit(np.stack([content[row].sum(axis=0) for row in last]))
    every = jnp.tile(jnp.arange(ITEMS)[None], (len(HISTORIES), 1))
    scores = np.asarray(model.item_scores(HISTORIES, every), np.float64)
    counts = np.log1p(np.arange(ITEMS) % 6)
    return scores + weight * shown @ content.T - popularity * counts


@pytest.mark.parametrize("temperature", [None, 0.1])
def test_scores(given, temperature):
    model = some_model(given, temperature=temperature)
    for options in ((2.0, 3, 0.3), (0.7, 1, 0.0)):
        weight, recent, popularity = options
        ranked = WithNeighbours(
            model, weight=weight, recent=recent, popularity=popularity
        )
        want = wanted(model, given, *options)
        ids, scores = ranked.top_k(HISTORIES, ITEMS)
        np.testing.assert_allclose(scores, -np.sort(-want, axis=1), atol=2e-5)
        some = ranked.item_scores(HISTORIES, ids)
        np.testing.assert_allclose(some, scores, atol=2e-5)


def test_wide_content_is_projected(given, monkeypatch):
    monkeypatch.setattr(neighbours, "MOST_NUMBERS", 8)
    ranked = WithNeighbours(some_model(given), popularity=0)
    want = wanted(some_model(given), given, 2.0, 3, 0.0)
    every = jnp.tile(jnp.arange(ITEMS)[None], (len(HISTORIES), 1))
    found = np.asarray(ranked.item_scores(HISTORIES, every))
    errors = (found - want) / 2.0
    assert 0.005 < np.std(errors) < 0.06  # 1 / root of 512 is .044


def test_it_is_measured_and_exported_as_other_models(given, tmp_path):
    rng = np.random.default_rng(1)
    data = sj.SequenceDataset(
        np.arange(0, 61, 5),
        np.concatenate([rng.permutation(ITEMS)[:5] for _ in range(12)]).astype(
            np.int32
        ),
        np.arange(12).astype(str),
        np.arange(ITEMS).astype(str),
    )
    train, heldout = data.split_last()
    ranked = WithNeighbours(some_model(given))
    measured = sj.evaluate(ranked, train, heldout, k=10, exclude=train)
    lists = sj.recommend(ranked, train, k=10, exclude=train).ids
    hits = [i in row for i, row in zip(heldout.padded(1)[:, 0], lists, strict=True)]
    assert measured["recall@10"] == pytest.approx(np.mean(hits))
    path = tmp_path / "shop.predictor"
    sj.export_predictor(ranked, path, names=train, k=5)
    found = sj.load_predictor(path).recommend(train, k=5, exclude=train)
    assert np.array_equal(found.ids, lists[:, :5])


def test_wrong_arguments(given):
    model = some_model(given)
    wrong: list[dict[str, Any]] = [{"weight": -1}, {"popularity": -0.1}, {"recent": 0}]
    wrong += [{"weight": np.inf}, {"popularity": np.nan}]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            WithNeighbours(model, **options)
    config = sj.SASRecConfig(max_length=4, width=8, heads=1)
    bare: Any = build_sequence_model(config, items=5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="has no content of its items"):
        WithNeighbours(bare)
    ranked = WithNeighbours(model)
    with pytest.raises(NotImplementedError, match="only ranks"):
        ranked.loss(HISTORIES)
    with pytest.raises(NotImplementedError, match="add items to the model"):
        ranked.add_items(2)
