"""Models without training, compared with their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from matrices import random_csr

import sparsejax as sj
from sparsejax import baselines
from sparsejax.ops.item_weights import ease_weights, gram, nearest_items
from sparsejax.sparse import CSR

FORMS = ["dense", "sparse", None]


def awkward(items: int = 7, *, values: bool = False) -> CSR:
    """Data with empty rows, a row with every item, and an item that no row has; or with one
    item.
    """
    rng = np.random.default_rng(0)
    dense = (rng.random((25, items)) < 0.3).astype(np.float64)
    dense[[0, 9]] = 0
    if items > 2:
        dense[:, 2] = 0
    dense[3] = 1
    if values:
        dense *= rng.normal(size=dense.shape)
    elif items > 2:
        dense[3, 2] = 0
    return CSR.from_scipy(scipy.sparse.csr_array(dense))


def ease_oracle(x: np.ndarray, l2: float) -> np.ndarray:
    p = np.linalg.inv(x.T @ x + l2 * np.eye(x.shape[1]))
    b = -p / np.diag(p)
    np.fill_diagonal(b, 0)
    return b


def knn_oracle(x: np.ndarray, k: int, shrink: float) -> np.ndarray:
    """The cosines of each item with its k nearest items, and 0 elsewhere: `[items, items]`."""
    norms = np.linalg.norm(x, axis=0)
    scale = np.outer(norms, norms) + shrink
    products = np.maximum(x.T @ x, 0)
    cosines = np.divide(products, scale, out=np.zeros_like(scale), where=scale > 0)
    kept = np.zeros_like(cosines)
    for i, row in enumerate(cosines):
        order = [j for j in np.argsort(-row, kind="stable") if j != i][:k]
        kept[i, order] = row[order]
    return kept


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("items", [1, 7])
def test_ease_is_the_closed_form(items, form):
    x = awkward(items, values=True)
    dense = x.to_scipy().toarray().astype(np.float64)
    np.testing.assert_allclose(gram(x, implementation=form), dense.T @ dense, atol=1e-5)
    found = ease_weights(x, 0.7, implementation=form)
    np.testing.assert_allclose(found, ease_oracle(dense, 0.7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("items", "k", "shrink"), [(1, 3, 0), (7, 3, 2.5), (7, 9, 0)])
@pytest.mark.parametrize("values", [False, True])
def test_nearest_items(monkeypatch, items, k, shrink, form, values):
    # Small, so that there are several blocks.
    monkeypatch.setattr("sparsejax.ops.item_weights._BLOCK", 40)
    x = awkward(items, values=values)
    ids, cosines = nearest_items(x, k, shrink=shrink, implementation=form)
    found = np.zeros((items, items))
    np.add.at(found, (np.arange(items)[:, None], np.asarray(ids)), cosines)
    expected = knn_oracle(x.to_scipy().toarray().astype(np.float64), k, shrink)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def models(train: CSR) -> dict[str, tuple]:
    """Each baseline with its weights from items to items."""
    dense = train.to_scipy().toarray().astype(np.float64)
    return {
        "ease": (baselines.ease(train, l2=3.0), ease_oracle(dense, 3.0)),
        "item_knn": (
            baselines.item_knn(train, neighbours=2, shrink=1.0),
            knn_oracle(dense, 2, 1.0),
        ),
    }


@pytest.mark.parametrize("name", ["ease", "item_knn"])
def test_they_recommend_as_other_models_do(name):
    train, shown = awkward(), awkward(values=True)
    model, weights = models(train)[name]
    scores = shown.to_scipy().toarray() @ weights
    scores[shown.to_scipy().toarray() != 0] = -np.inf
    found = sj.recommend(model, shown, 9, exclude=shown)
    expected = -np.sort(-scores, axis=1)
    np.testing.assert_allclose(found.scores[:, :7], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.ids[:, 7:], -1)
    assert (found.ids[3] == -1).all()  # this row has every item
    empty = found.ids[0, :7]
    # Among equal scores, the lower number comes first.
    np.testing.assert_array_equal(empty, np.arange(7))
    # Among candidates, and beside popularity, in which each item has an entry: one without
    # ranks behind all candidates.
    heldout = random_csr(25, 7, 0.3, seed=5)
    every = CSR.from_scipy(scipy.sparse.csr_array(np.ones((25, 7))))
    among, all_items = (
        sj.evaluate(
            model, shown, heldout, k=3, exclude=None, popularity=every, candidates=c
        )
        for c in (every, None)
    )
    assert among == pytest.approx(all_items)
    assert all_items["coverage@3"] > 0


@pytest.mark.parametrize("name", ["ease", "item_knn", "popularity"])
def test_scores_of_some_items(name, wrong_types):
    x = awkward()
    known = models(x) | {"popularity": (baselines.popularity(x), None)}
    model, weights = known[name]
    ids = np.resize(np.arange(7), (25, 3))
    found = model.item_scores(x, jnp.asarray(ids).at[4].set(jnp.array([7, -1, 2**30])))
    assert np.isnan(found).any(axis=1).tolist() == [row == 4 for row in range(25)]
    found = np.asarray(model.item_scores(x, ids))
    if weights is not None:
        every = x.to_scipy().toarray() @ weights
        expected = np.take_along_axis(every, ids, axis=1)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    for wrong, error, message in (
        (ids + 1, ValueError, "id 7 at .* is no item: ids are in"),
        (ids[:3], ValueError, r"shape \(3, 3\); expected \(25, count\)"),
        (ids.astype(float), TypeError, "array of integers, got float64"),
        ([[0]], TypeError, "array of integers, got list"),
    ):
        with pytest.raises(error, match=message):
            model.item_scores(x, wrong)
    if weights is None:
        return
    narrow = random_csr(25, 6, 0.3)
    with pytest.raises(ValueError, match="x has 6 columns but the model has 7 feat"):
        model.item_scores(narrow, ids)
    scipys = x.to_scipy()
    for call in (
        lambda: model(scipys),
        lambda: model.top_k(scipys, 2),
        lambda: model.top_k(x, 2, exclude=scipys),
        lambda: model.item_scores(scipys, ids),
    ):
        with pytest.raises(TypeError, match="expected a CSR, got .*of a SciPy matrix"):
            call()


def test_popularity_is_what_evaluate_compares_with():
    train, heldout = awkward(), random_csr(25, 7, 0.5, seed=5)
    model = baselines.popularity(train)
    measured = sj.evaluate(model, train, heldout, k=3, exclude=None)
    for name in ("ndcg@3", "gini@3", "mean_popularity@3"):
        assert measured[name] == measured[f"popularity_{name}"]


@pytest.mark.parametrize("name", ["ease", "item_knn"])
def test_on_a_mesh(name):
    rows = [*range(24)]
    train = awkward()
    shown = CSR.from_scipy(awkward(values=True).to_scipy()[rows])
    model, _ = models(train)[name]
    alone = sj.recommend(model, shown, 4, exclude=shown)
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        found = sj.recommend(model, shown, 4, exclude=shown)
    np.testing.assert_array_equal(found.ids, alone.ids)
    np.testing.assert_allclose(found.scores, alone.scores, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused():
    wide = CSR.from_scipy(scipy.sparse.csr_array((3, 10_000_000), dtype=bool))
    with pytest.raises(MemoryError, match="needs 1,600,000,000,000,000 bytes, but"):
        baselines.ease(wide)
    for l2 in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="l2 must be positive"):
            baselines.ease(awkward(), l2=l2)
    same = CSR.from_scipy(scipy.sparse.csr_array(np.full((9, 2), 1e6)))
    with pytest.raises(ValueError, match="too small for float32"):
        baselines.ease(same, l2=1e-9)
    with pytest.raises(ValueError, match="neighbours must be at least 1"):
        baselines.item_knn(awkward(), neighbours=0)
