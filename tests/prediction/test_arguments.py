"""For every verb, an argument that does not apply to a kind of data is an error."""

import inspect

import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj

ITEMS = 6
MATRIX = scipy.sparse.csr_array(np.triu(np.ones((4, ITEMS), np.float32)))
DATA = sj.SparseDataset.from_scipy(MATRIX)
HISTORIES = sj.SequenceDataset(
    np.array([0, 3, 6]),
    np.array([0, 1, 2, 3, 4, 5]),
    np.array(["ann", "bob"]),
    np.array([str(i) for i in range(ITEMS)]),
)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> sj.ClickDataset:
    path = tmp_path_factory.mktemp("clicks") / "c.csv"
    path.write_text(
        "click,city\n" + "".join(f"{n % 2},{'abc'[n % 3]}\n" for n in range(12))
    )
    schema = sj.ClickSchema("click", ids={"city": sj.data.VocabularyColumn()})
    return sj.read_clicks(path, schema)


@pytest.fixture(scope="module")
def of_kind(clicks):
    """For each kind: its model, data, and held-out data."""
    config = sj.GRUConfig(max_length=3, width=4, blocks=1)
    layers = sj.WideDeepConfig(dim=2, hidden=(2,))
    network = sj.NetworkConfig.autoencoder((4,))
    split = HISTORIES.split_last()
    return {
        "items": (sj.build(network, DATA)[0], DATA, DATA),
        "histories": (sj.build(config, HISTORIES)[0], split.train, split.heldout),
        "clicks": (
            sj.clicks.build_click_model(
                layers, num_dense=0, features=clicks.num_ids, rngs=nnx.Rngs(0)
            ),
            clicks,
            None,
        ),
    }


# What each kind has a use for; `model` and `inputs` are given always.
ANY = {"optimizer", "batch_size", "keep_rows"}
RANKED = ANY | {
    "heldout",
    "k",
    "exclude",
    "exclude_items",
    "only_items",
    "unknown",
    "unknown_users",
    "popularity",
    "by",
}
EVALUATE = {
    "clicks": ANY | {"groups", "weighted"},
    "histories": RANKED | {"candidates", "groups", "rank_by"},
    "items": RANKED | {"fold_in", "features", "seed", "candidates"},
}
# Some value of each argument, and for `seed` and others their defaults: these count, too.
GIVEN = {
    "heldout": DATA,
    "k": 20,
    "fold_in": 0.5,
    "features": ["x"],
    "seed": 0,
    "exclude": None,
    "exclude_items": ["x"],
    "only_items": ["x"],
    "unknown": "miss",
    "unknown_users": "count",
    "candidates": DATA,
    "popularity": None,
    "groups": "city",
    "weighted": True,
    "by": "entries",
    "rank_by": "buy",
}


def names_of(verb) -> set[str]:
    return {*inspect.signature(verb).parameters} - {"model", "inputs"}


def test_the_values_are_of_all_arguments():
    assert names_of(sj.evaluate) - ANY == GIVEN.keys()


@pytest.mark.parametrize("kind", EVALUATE)
def test_evaluate_refuses_what_a_kind_has_no_use_for(kind, of_kind):
    model, data, heldout = of_kind[kind]
    of_no_use = names_of(sj.evaluate) - EVALUATE[kind]
    assert of_no_use
    for name in of_no_use:
        with pytest.raises(
            ValueError, match=f"{name} is of no use for a model of {kind}"
        ):
            sj.evaluate(model, data, **({"heldout": heldout} | {name: GIVEN[name]}))  # pyrefly: ignore


def test_none_in_place_of_none_is_no_argument(of_kind):
    model, data, _ = of_kind["clicks"]
    plain = sj.evaluate(model, data)
    assert sj.evaluate(model, data, None, fold_in=None, candidates=None) == plain


def test_a_seed_and_features_need_a_choice(of_kind):
    model, data, heldout = of_kind["items"]
    for name in ("seed", "features"):
        with pytest.raises(ValueError, match=f"{name} needs fold_in"):
            sj.evaluate(model, data, heldout, **{name: GIVEN[name]})  # pyrefly: ignore


@pytest.mark.parametrize("kind", ["items", "histories", "clicks"])
@pytest.mark.usefixtures("wrong_types")
def test_fit_refuses_a_cut_off_of_no_use(kind, of_kind):
    model, data, _ = of_kind[kind]
    optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
    wanted = {"clicks": "k is of no use for a model of clicks"}.get(
        kind, "k needs validation"
    )
    for k in (5, 20):
        with pytest.raises(ValueError, match=wanted):
            sj.fit(model, optimizer, data, num_epochs=1, k=k)
    if kind == "clicks":
        with pytest.raises(ValueError, match=wanted):
            sj.fit(model, optimizer, data, num_epochs=1, k=5, validation=data)
        with pytest.raises(ValueError, match="leave out targets"):
            sj.fit(model, optimizer, data, data, num_epochs=1)


def test_export_refuses_what_a_kind_has_no_use_for(of_kind, tmp_path):
    for kind, (model, data, _) in of_kind.items():
        name, value = ("k", 10) if kind == "clicks" else ("table_dtype", "int8")
        with pytest.raises(
            ValueError, match=f"{name} is of no use for a model of {kind}"
        ):
            sj.export_predictor(model, tmp_path / "x", names=data, **{name: value})  # pyrefly: ignore
        assert not (tmp_path / "x").exists()


def test_other_kinds_of_data_are_refused(of_kind):
    items, histories, clicks = (of_kind[k] for k in ("items", "histories", "clicks"))
    with pytest.raises(TypeError, match="ClickDataset"):
        sj.recommend(items[0], clicks[1])
    with pytest.raises(TypeError, match="SequenceDataset"):
        sj.user_vectors(items[0], histories[1])
    with pytest.raises(TypeError, match="SparseDataset"):
        sj.predict(clicks[0], DATA)  # pyrefly: ignore


def test_names_are_checked_where_items_are_numbers(of_kind):
    model = of_kind["histories"][0]
    with pytest.raises(ValueError, match="2 names were given but the model has 6"):
        sj.similar_items(model, [0], names=["a", "b"])
    found = sj.similar_items(model, ["3"], k=2, names=HISTORIES)
    np.testing.assert_array_equal(found.ids, sj.similar_items(model, [3], k=2).ids)
