"""Items that are recommended to nobody, and lists of the only items that may be recommended."""

import contextlib
import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.engine.rank import denied as module
from sparsejax.engine.rank import loop
from sparsejax.predictors import ranking

ROWS, ITEMS = 23, 19
ONLY, WITHOUT = ["item3", "item7", "item8", "item18"], ["item8", "item0"]


@pytest.fixture(scope="module")
def data() -> sj.SparseDataset:
    """Data in which one row is empty, and one has all items."""
    rng = np.random.default_rng(0)
    dense = rng.random((ROWS, ITEMS)) < 0.3
    dense[4], dense[9] = False, True
    names = [f"item{i}" for i in range(ITEMS)]
    matrix = scipy.sparse.csr_array(dense)
    return sj.SparseDataset.from_scipy(
        matrix, row_names=[f"row{r}" for r in range(ROWS)], feature_names=names
    )


class Own(sj.nn.FeedForward):
    """A model whose `top_k` can exclude items only in each row."""

    def top_k(self, x, k, *, exclude=None):  # pyrefly: ignore[bad-override]
        return super().top_k(x, k, exclude=exclude)


def built(data, kind=sj.nn.FeedForward):
    config = sj.NetworkConfig.autoencoder((8,))
    return kind(config, inputs=ITEMS, outputs=data.num_features, rngs=nnx.Rngs(0))


def no_entries(*arguments):
    raise AssertionError("items are left out of all rows at once")


def oracle(model, data, k, allowed, *, seen):
    every = sj.recommend(model, data, ITEMS, batch_size=8, exclude=None)
    scores = np.full((ROWS, ITEMS), -np.inf)
    np.put_along_axis(scores, every.ids, every.scores, axis=1)
    scores[:, [i for i in range(ITEMS) if i not in allowed]] = -np.inf
    if seen:
        scores[data.to_scipy().toarray() != 0] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    return np.where(best == -np.inf, -1, order)


def counting(given: list[int]):
    """A replacement of `with_denied` that records the numbers of entries."""

    def counted(*arguments):
        found = module.with_denied(*arguments)
        given.append(found.nse)
        return found

    return counted


@pytest.mark.parametrize(
    ("shape", "seen", "kind"),
    [
        (None, False, sj.nn.FeedForward),
        (None, True, sj.nn.FeedForward),
        (None, False, Own),
        (None, True, Own),
        ((2, 4), True, sj.nn.FeedForward),
        ((2, 4), True, Own),
    ],
)
def test_the_best_of_those_that_are_allowed(data, shape, seen, kind, monkeypatch):
    monkeypatch.setattr(module, "_TABLE", 3 * ITEMS)  # three rows at a time
    monkeypatch.setattr(module, "_ENTRIES", 7 * ITEMS)  # seven rows in a batch
    if kind is not Own:
        monkeypatch.setattr(loop, "with_denied", no_entries)
    mesh = contextlib.nullcontext()
    if shape is not None:
        mesh = jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))
    with mesh:
        model = built(data, kind)
        exclude = data if seen else None
        for only, ids in ((ONLY, {3, 7, 18}), (np.array([18, 2, 8]), {18, 2})):
            found = sj.recommend(
                model,
                data,
                5,
                exclude=exclude,
                only_items=only,
                exclude_items=WITHOUT,
                batch_size=8,
            )
            expected = oracle(model, data, 5, ids, seen=seen)
            np.testing.assert_array_equal(found.ids, expected)


@pytest.mark.parametrize("kind", [sj.nn.FeedForward, Own])
def test_predictors(data, tmp_path, monkeypatch, kind):
    model = built(data, kind)
    sj.export_predictor(model, tmp_path / "a.predictor", k=5, names=data, batch_size=8)
    predictor = sj.load_predictor(tmp_path / "a.predictor")
    for exclude in (None, data):
        ours, theirs = (
            each(inputs=data, exclude=exclude, only_items=ONLY, exclude_items=WITHOUT)
            for each in (
                predictor.recommend,
                lambda **how: sj.recommend(model, k=5, **how),
            )
        )
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        if kind is not Own:
            monkeypatch.setattr(ranking, "with_denied", no_entries)
            continue
        with monkeypatch.context() as patch:
            patch.setattr(module, "_ENTRIES", 5 * ITEMS)  # five rows in a batch
            given: list[int] = []
            patch.setattr(ranking, "with_denied", counting(given))
            cut = predictor.recommend(
                data, exclude=exclude, only_items=ONLY, exclude_items=WITHOUT
            )
        np.testing.assert_array_equal(cut.ids, ours.ids)
        assert max(given) <= 5 * ITEMS and len(given) > 3
    if kind is Own:
        return
    # A service leaves others out, too.
    model = predictor.model
    programs = model.programs.denying(predictor.signature)
    programs.deny(np.array([18]))
    both = dataclasses.replace(
        predictor, model=dataclasses.replace(model, programs=programs)
    )
    assert both.recommend_names([[]], only_items=ONLY) == [
        [
            name
            for name in predictor.recommend_names([], only_items=ONLY)
            if name != "item18"
        ]
    ]
    some = predictor.recommend_names(
        [["item3"], []], only_items=ONLY, exclude_items=["item7"]
    )
    assert [sorted(names) for names in some] == [
        ["item18", "item8"],
        ["item18", "item3", "item8"],
    ]
    assert set(predictor.recommend_names(["item3"], only_items=["item3", "item1"])) == {
        "item1"
    }


def test_baselines(data):
    train = data.without_values()
    for model in (
        sj.baselines.popularity(train),
        sj.baselines.item_knn(train),
        sj.baselines.ease(train),
    ):
        found = sj.recommend(model, data, 5, exclude=None, only_items=ONLY)
        assert {*found.ids.reshape(-1).tolist()} - {-1} <= {3, 7, 8, 18}
        every = sj.recommend(model, data, ITEMS, exclude=None).ids
        for row, ids in zip(every, found.ids, strict=True):
            wanted = [i for i in row.tolist() if i in (3, 7, 8, 18)]
            assert ids[ids >= 0].tolist() == wanted


def measured_by_hand(scores, heldout, k):
    """Some metrics computed by NumPy from `[rows, items]` scores; -inf marks items that are not
    ranked.
    """
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    listed = np.take_along_axis(scores, order, axis=1) > -np.inf
    hits = np.take_along_axis(heldout, order, axis=1) & listed
    wanted = heldout.sum(axis=1)
    gains = 1 / np.log2(np.arange(k) + 2.0)
    ideal = np.cumsum(gains)[np.minimum(np.maximum(wanted, 1), k) - 1]
    rows = {
        "recall": hits.sum(axis=1) / np.maximum(wanted, 1),
        "ndcg": hits @ gains / ideal,
        "mrr": (hits / np.arange(1, k + 1)).max(axis=1),
    }
    found = {name: values[wanted > 0].mean() for name, values in rows.items()}
    given = np.unique(order[listed & (wanted > 0)[:, None]])
    found["coverage"] = given.size / np.isfinite(scores).any(axis=0).sum()
    return {f"{name}@{k}": value for name, value in found.items()}


@pytest.mark.parametrize("shape", [None, (2, 4)])
def test_evaluate_ranks_what_is_recommended(data, shape, monkeypatch):
    """For models of each kind, the baseline, and candidates."""
    rng = np.random.default_rng(1)
    seen = data.to_scipy().toarray() != 0
    wanted = (rng.random(seen.shape) < 0.3) & ~seen
    among = rng.random(seen.shape) < 0.4
    among[:, 7] = True  # no row is without candidates
    heldout, candidates = (
        sj.SparseDataset.from_scipy(
            scipy.sparse.csr_array(chosen),
            row_names=data.row_names,
            feature_names=data.feature_names,
        )
        for chosen in (wanted, among)
    )
    allowed = np.isin(np.arange(ITEMS), [3, 7, 18])
    lost = wanted[:, ~allowed].sum()
    options = {"only_items": ONLY, "exclude_items": WITHOUT}
    warned = rf"^{lost} of {wanted.sum()} held-out entries .* count as missed"
    mesh = contextlib.nullcontext()
    if shape is not None:
        mesh = jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))
    with mesh:
        for kind in (sj.nn.FeedForward, Own):
            model = built(data, kind)
            every = sj.recommend(model, data, ITEMS, exclude=None)
            scores = np.empty((ROWS, ITEMS))
            np.put_along_axis(scores, every.ids, every.scores, axis=1)
            scores = np.where(allowed & ~seen, scores, -np.inf)
            with monkeypatch.context() as patch:
                if kind is not Own:
                    patch.setattr(loop, "with_denied", no_entries)
                with pytest.warns(match=warned):
                    found = sj.evaluate(
                        model, data, heldout, k=2, batch_size=8, **options
                    )
            expected = measured_by_hand(scores, wanted, 2)
            assert {n: found[n] for n in expected} == pytest.approx(expected, abs=1e-6)
            popular = np.where(scores > -np.inf, seen.sum(axis=0), -np.inf)
            for name, value in measured_by_hand(popular, wanted, 2).items():
                assert found[f"popularity_{name}"] == pytest.approx(value, abs=1e-6)
            if shape is not None or kind is Own:
                continue
            with pytest.warns(match=warned):
                found = sj.evaluate(
                    model, data, heldout, k=2, candidates=candidates, **options
                )
            scores = np.where(among | wanted, scores, -np.inf)
            expected = measured_by_hand(scores, wanted, 2)
            for name in ("recall@2", "ndcg@2", "mrr@2"):
                assert found[name] == pytest.approx(expected[name], abs=1e-6)


def test_histories():
    events = [
        {"user": f"u{u}", "item": f"item{(u * i) % ITEMS}"}
        for u in range(9)
        for i in range(12)
    ]
    every = [{"user": "all", "item": f"item{i}"} for i in range(ITEMS)]
    histories = sj.read_sequences(every + events)
    rows, names = histories.to_sparse().to_scipy().toarray(), histories.feature_names
    config = sj.SASRecConfig(max_length=4, width=8, blocks=1, heads=1)
    next_items = sj.sequence.SASRec(config, items=ITEMS, rngs=nnx.Rngs(0))
    found = sj.recommend(next_items, histories, 9, exclude=histories, only_items=ONLY)
    for row, ids in enumerate(found.ids):
        had = set(names[rows[row] != 0].tolist())
        assert set(names[ids[ids >= 0]].tolist()) == set(ONLY) - had
    train, heldout = histories.split_last()
    wanted = heldout.to_sparse().to_scipy().toarray() != 0
    scores = np.full(wanted.shape, -np.inf)
    some = sj.recommend(next_items, train, ITEMS, exclude=None, only_items=ONLY)
    rank = np.where(some.ids >= 0, -np.arange(ITEMS)[None], -np.inf)
    np.put_along_axis(scores, np.where(some.ids >= 0, some.ids, 0), rank, axis=1)
    scores[:, ~np.isin(names, ONLY)] = -np.inf
    expected = measured_by_hand(scores, wanted, 3)
    with pytest.warns(match="leaves out: they cannot be found"):
        measured = sj.evaluate(
            next_items, train, heldout, k=3, exclude=None, only_items=ONLY
        )
    assert {n: measured[n] for n in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.usefixtures("wrong_types")
def test_what_is_wrong_is_said(data):
    model = built(data)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("exclude_items has the id 19, but there are 19", {"exclude_items": [3, 19]}),
        ("exclude_items has the id -1", {"exclude_items": [-1]}),
        ("no item is left", {"only_items": []}),
        ("no item is left", {"only_items": np.zeros(0, np.int32)}),
        ("no item is left", {"only_items": ["item1"], "exclude_items": ["item1"]}),
    ]
    for message, options in wrong:
        with pytest.raises(ValueError, match=message):
            sj.recommend(model, data, exclude=None, **options)
    with pytest.raises(ValueError, match="the items here have none: give their ids"):
        sj.recommend(model, data.matrix, only_items=["item1"], exclude=None)
    config = sj.GRUConfig(max_length=4, width=8, blocks=1)
    gru = sj.sequence.GRU(config, items=ITEMS, rngs=nnx.Rngs(0))
    names: tuple[Any, ...] = (["item5", "item7"], [["item5"]], np.array(["item5"]))
    for each in (model, gru):
        for given in names:
            with pytest.raises(TypeError, match=r"of names\..*run\.recommend.*_names"):
                sj.recommend(each, given, exclude=None)
    with pytest.raises(
        ValueError, match="held-out entries are of items that exclude_i"
    ):
        lone = scipy.sparse.csr_array(np.eye(ROWS, ITEMS, k=-20, dtype=np.float32))
        sj.evaluate(model, data.matrix, lone, exclude_items=np.arange(ITEMS - 1))
    with pytest.raises(TypeError, match="only_items is a list of names, got the text"):
        sj.recommend(model, data, only_items="item1", exclude=None)


def test_names_of_items_that_never_sold_are_counted_everywhere_alike(data, tmp_path):
    """A shop's list of sold-out items has some that no model knows."""
    model, heldout = built(data), data.split(0.5, seed=0).heldout
    sj.export_predictor(model, tmp_path / "predictor", names=data)
    predictor = sj.load_predictor(tmp_path / "predictor")
    rows = [["item1"], ["item2", "item5"]]
    calls = {
        "recommend": lambda **which: (
            sj.recommend(model, data, exclude=None, **which).ids
        ),
        "evaluate": lambda **which: [
            *sj.evaluate(model, data, heldout, exclude=None, **which).values()
        ],
        "baseline": lambda **which: (
            sj.recommend(sj.baselines.popularity(data), data, exclude=None, **which).ids
        ),
        "predictor": lambda **which: predictor.recommend(data, **which).ids,
        "names": lambda **which: predictor.recommend_names(rows, **which),
    }
    lists = {
        "exclude_items": ["never", "item3", "sold", "item0"],
        "only_items": [*(f"item{i}" for i in range(4, ITEMS)), "never", "sold"],
    }
    for name, call in calls.items():
        for which, names in lists.items():
            known = [each for each in names if each.startswith("item")]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*held-out entries")
                wanted = call(**{which: known})
            with pytest.warns(UserWarning) as told:
                found = call(**{which: names})
            said = [str(w.message) for w in told if "held-out" not in str(w.message)]
            wanted_line = (
                f"{which}: 2 of {len(names)} names are not items of the model, and have "
                "no effect: 'never', 'sold'"
            )
            assert said == [wanted_line], name
            np.testing.assert_array_equal(found, wanted)
