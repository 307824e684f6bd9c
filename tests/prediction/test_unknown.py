"""Metrics for held-out items that were not trained on, or that a row already has.

The oracle works in names, sets and Python's floats, and shares no code with the package.
"""

import dataclasses
import math
import warnings

import jax
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from linear import Linear
from ranked_by_hand import expected

import sparsejax as sj
from sparsejax.engine.rank.evaluation import Setup, prepared_evaluation
from sparsejax.metrics.ranking import METRICS

K = 3
OPTIONS = {"k": K, "batch_size": 64}  # the same everywhere: few programs are compiled
Histories = dict[str, set[str]]


def histories_of(data: sj.SparseDataset) -> Histories:
    starts, names = data.matrix.indptr, data.feature_names
    return {
        row: {str(names[i]) for i in data.matrix.indices[starts[r] : starts[r + 1]]}
        for r, row in enumerate(data.row_names.tolist())
    }


def dataset_of(histories: Histories, items: list[str]) -> sj.SparseDataset:
    dense = [[item in history for item in items] for history in histories.values()]
    matrix = scipy.sparse.csr_array(np.array(dense, bool))
    return sj.SparseDataset.from_scipy(
        matrix, row_names=list(histories), feature_names=items
    )


def rankings(scores, shown: Histories, items: list[str], among=None):
    """For each row the items by descending score; ties stay in the order of `items`."""
    found = {}
    for row, history in shown.items():
        choice = [i for i in items if i not in history]
        if among is not None:
            choice = [item for item in choice if item in among[row]]
        score = scores(history)
        found[row] = sorted(
            (item for item in choice if score[item] > -math.inf),
            key=lambda item: (-score[item], items.index(item)),
        )
    return found


def by_hand(ranked, wanted: Histories, trained: set[str], unknown: str) -> dict:
    """Metrics by their definitions, computed one item at a time."""
    if unknown == "skip":
        wanted = {row: items & trained for row, items in wanted.items()}
    wanted = {row: items for row, items in wanted.items() if items}
    sums: dict[str, float] = {}
    for row, items in wanted.items():
        for name in METRICS:
            value = expected(name, ranked[row], items, K)
            sums[f"{name}@{K}"] = sums.get(f"{name}@{K}", 0.0) + value
    return {key: total / len(wanted) for key, total in sums.items()}


@dataclasses.dataclass(frozen=True)
class Shop:
    """Visits, some of them held out, some of those of areas that are new.

    Attributes:
      shown: what each visitor looked at before.
      wanted: what it looked at later.
      items: all areas of `shown`, in an order.
      new: the others.
    """

    shown: Histories
    wanted: Histories
    items: list[str]
    new: list[str]

    def co_visits(self) -> dict[str, dict[str, int]]:
        """For each area, the number of visitors who saw it together with each other area."""
        counts = {a: dict.fromkeys(self.items + self.new, 0) for a in self.items}
        for history in self.shown.values():
            for a in history:
                for b in history:
                    counts[a][b] += 1
        return counts

    def model(self, items: list[str], *, of_new: float = -1.0) -> Linear:
        """A model with scores by `co_visits`. An area that nobody has seen has a fixed low
        score.
        """
        counts = self.co_visits()
        weights = [[counts.get(a, {}).get(b, 0) for b in items] for a in items]
        bias = [0.0 if item in counts else of_new for item in items]
        return Linear(np.array(weights, np.float32), np.array(bias))

    def ranked(self, among=None):
        """Two rankings: by the model, and by popularity."""
        counts = self.co_visits()

        def by_model(history):
            return {b: sum(counts[a][b] for a in history) for b in self.items}

        def by_popularity(_):
            return {b: counts[b][b] for b in self.items}

        return [
            rankings(scores, self.shown, self.items, among)
            for scores in (by_model, by_popularity)
        ]

    def split(self) -> tuple[sj.SparseDataset, sj.SparseDataset]:
        """The data as if one data set was split: all areas have a column."""
        items = [*self.items[:3], *self.new, *self.items[3:]]
        return dataset_of(self.shown, items), dataset_of(self.wanted, items)

    def two_files(self) -> tuple[sj.SparseDataset, sj.SparseDataset]:
        """The data as if it came from two files; the second is read with the first one's
        vocabulary.
        """
        shown = dataset_of(self.shown, self.items)
        wanted = dataset_of(self.wanted, sorted(self.items + self.new))
        with pytest.warns(sj.data.UnknownFeaturesWarning):
            return shown, wanted.align_features(shown)


@pytest.fixture(scope="module")
def shop() -> Shop:
    """Visits from the bundled data, in which later visits of a third of the visitors get new
    names.

    All were shown as many areas, so that most tests run the same programs.
    """
    visitors = sj.datasets.msweb().test
    long = np.flatnonzero(np.diff(visitors.matrix.indptr) >= 5)[:150]
    visitors = visitors.align_rows(visitors.row_names[long])
    shown, wanted = map(histories_of, visitors.split(0.6, seed=0))
    shown = {row: set(sorted(items)[:3]) for row, items in shown.items()}
    known = set().union(*shown.values())
    for number, row in enumerate(wanted):
        if number % 3 == 0:
            wanted[row] = {f"new {item}" for item in wanted[row]}
        elif number % 5 == 0:  # one of several
            first, *others = sorted(wanted[row])
            wanted[row] = {f"new {first}", *others}
        elif number % 7 == 0:
            wanted[row] = set()
    new = sorted(set().union(*wanted.values()) - known)
    return Shop(shown, wanted, sorted(known), new)


@pytest.mark.parametrize(
    ("unknown", "route"),
    [("miss", Shop.split), ("miss", Shop.two_files), ("skip", Shop.two_files)],
)
def test_both_routes_equal_the_oracle(shop, unknown, route):
    trained = set(shop.items)
    of_model, of_popularity = (
        by_hand(ranked, shop.wanted, trained, unknown) for ranked in shop.ranked()
    )
    of_popularity = {f"popularity_{key}": v for key, v in of_popularity.items()}
    lost = [row for row, items in shop.wanted.items() if items and not items & trained]
    users = [row for row, items in shop.wanted.items() if items]
    counts = {
        "users": len(users) - len(lost) * (unknown == "skip"),
        "users_unknown": len(lost),
        "entries_unknown": sum(len(v - trained) for v in shop.wanted.values()),
    }
    assert 40 < len(lost) < counts["entries_unknown"]
    shown, heldout = route(shop)
    model = shop.model(shown.feature_names.tolist())
    found = sj.evaluate(model, shown, heldout, unknown=unknown, **OPTIONS)
    for key, value in {**of_model, **of_popularity, **counts}.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key


def test_users_whose_items_are_all_unknown_lower_the_mean(shop):
    """By as much as there are more of them: their metrics are 0."""
    shown = dataset_of(shop.shown, shop.items)
    wanted = dict(shop.wanted)
    for row in [*wanted][::2]:
        wanted[row] = {f"new {item}" for item in wanted[row]}
    only = {row: v for row, v in wanted.items() if v and not v - set(shop.items)}
    none = {row: v for row, v in wanted.items() if not v & set(shop.items)}
    both = dataset_of(only | none, sorted(set().union(*wanted.values())))
    with pytest.warns(sj.data.UnknownFeaturesWarning, match="entries are left out"):
        both = both.align_features(shown)
    model = shop.model(shop.items)
    skipped = sj.evaluate(model, shown, both, unknown="skip", **OPTIONS)
    missed = sj.evaluate(model, shown, both, **OPTIONS)
    assert missed["users"] - skipped["users"] == missed["users_unknown"] > 50
    share = skipped["users"] / missed["users"]
    for key, value in skipped.items():
        if "@" in key and not any(c in key for c in ("coverage", "gini", "mean_p")):
            assert missed[key] == pytest.approx(share * value, rel=1e-5)


@pytest.mark.parametrize(
    ("unknown", "route"),
    [("miss", Shop.split), ("skip", Shop.split), ("miss", Shop.two_files)],
)
def test_among_candidates(shop, unknown, route, is_here):
    """Unknown candidates are left out; unknown held-out items come behind all.

    They may have a column, and a model may rank them high.
    """
    rng = np.random.default_rng(0)
    everything = shop.items + shop.new
    lists = {
        row: {*rng.choice(everything, 8, replace=False), shop.items[0]}
        for row in shop.shown
    }
    among = {row: lists[row] | shop.wanted[row] for row in shop.shown}
    shown, heldout = route(shop)
    names = shown.feature_names.tolist()
    if route is Shop.two_files:
        with pytest.warns(sj.data.UnknownFeaturesWarning, match="entries are left out"):
            candidates = dataset_of(lists, everything).align_features(shown)
    else:
        candidates = dataset_of(lists, names)
    options = {"unknown": unknown, "candidates": candidates, **OPTIONS}
    model = shop.model(names, of_new=1e3)
    if route is Shop.two_files:
        found = sj.evaluate(model, shown, heldout, **options)
    else:
        total = sum(map(len, lists.values()))
        lost = sum(len(v - set(shop.items)) for v in lists.values())
        text = (
            rf"^{lost:,} of {total:,} candidates \({lost / total:.1%}\) are of items wi"
        )
        with pytest.warns(UserWarning, match=text) as told:
            found = sj.evaluate(model, shown, heldout, **options)
        assert is_here(told[0])
    of_model, of_popularity = (
        by_hand(ranked, shop.wanted, set(shop.items), unknown)
        for ranked in shop.ranked(among)
    )
    for key, value in of_model.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key
        other = of_popularity[key]
        assert found[f"popularity_{key}"] == pytest.approx(other, rel=1e-5), key


def test_what_is_in_no_list_does_not_change_what_is(shop):
    """Coverage and the like are of the lists, which are the same."""
    shown, heldout = shop.two_files()
    known = dataclasses.replace(heldout, left_out=None)
    with_some = heldout.row_names[np.diff(heldout.matrix.indptr) > 0]
    model = shop.model(shop.items)
    skipped = sj.evaluate(model, shown, heldout, unknown="skip", **OPTIONS)
    expected = sj.evaluate(model, shown, known.align_rows(with_some), **OPTIONS)
    for key, value in expected.items():
        if "@" in key:
            assert skipped[key] == value
    missed = sj.evaluate(model, shown, heldout, **OPTIONS)
    with_any = heldout.align_rows(
        [row for row, items in shop.wanted.items() if items]
    ).row_names
    everyone = dataset_of(
        {
            row: {next(i for i in shop.items if i not in shop.shown[row])}
            for row in with_any
        },
        shop.items,
    )
    lists = sj.evaluate(model, shown, everyone, **OPTIONS)
    for name in ("coverage", "gini", "mean_popularity", "popularity_gini"):
        assert missed[f"{name}@{K}"] == lists[f"{name}@{K}"]


def test_a_model_may_find_what_was_not_trained_on():
    """As one that goes by what items are: then it is no miss."""
    model = Linear(np.zeros((4, 4)), bias=[0, 1, 2, 3])
    shown = scipy.sparse.csr_array(np.array([[1, 0, 0, 0], [1, 1, 0, 0]], bool))
    heldout = scipy.sparse.csr_array(np.array([[0, 0, 0, 1], [0, 0, 1, 0]], bool))
    found = sj.evaluate(model, shown, heldout, k=1)
    assert found["recall@1"] == 1 / 2 and found["popularity_recall@1"] == 0
    assert (found["users_unknown"], found["entries_unknown"]) == (2, 2)
    # The rows that popularity is counted from are those trained on.
    some = scipy.sparse.csr_array(np.array([[0, 0, 1, 0]], bool))
    found = sj.evaluate(model, shown, heldout, k=1, popularity=some, unknown="skip")
    assert found["users"] == found["users_unknown"] == found["entries_unknown"] == 1
    # Without them the inputs are, where they are what is excluded.
    assert sj.evaluate(model, shown, heldout, popularity=None)["users_unknown"] == 2
    measured = sj.evaluate(model, shown, heldout, popularity=None, exclude=None)
    assert measured["users_unknown"] == 0


def test_inputs_that_are_folded_in_were_not_trained_on(shop):
    visitors = dataset_of(shop.wanted, shop.items)
    model = shop.model(shop.items)
    found = sj.evaluate(model, visitors, fold_in=0.5, **OPTIONS)
    assert found["entries_unknown"] == 0
    trained = dataset_of({"one": set(shop.items[:5])}, shop.items)
    found = sj.evaluate(model, visitors, fold_in=0.5, popularity=trained, **OPTIONS)
    heldout = visitors.split(0.5, seed=0)[1]
    counts = np.bincount(heldout.matrix.indices, minlength=len(shop.items))
    assert found["entries_unknown"] == counts[5:].sum() > 0


def test_what_is_folded_in_is_split_before_items_are_left_out(shop):
    visitors = dataset_of(shop.wanted, sorted(shop.items + shop.new))
    trained, model = dataset_of(shop.shown, shop.items), shop.model(shop.items)
    parts = visitors.split(0.5, seed=3)
    with pytest.warns(sj.data.UnknownFeaturesWarning):
        shown, heldout = (part.align_features(trained) for part in parts)
    expected = sj.evaluate(model, shown, heldout, popularity=trained, **OPTIONS)
    missing = histories_of(parts[1]).values()
    total = sum(len(items - {*shop.items}) for items in missing)
    assert expected["entries_unknown"] == total > 0
    options = {"fold_in": 0.5, "seed": 3, "popularity": trained, **OPTIONS}
    for features in (trained, shop.items):
        with pytest.warns(sj.data.UnknownFeaturesWarning):
            found = sj.evaluate(model, visitors, features=features, **options)
        assert found == expected
    with pytest.raises(ValueError, match="features needs fold_in"):
        sj.evaluate(model, trained, trained, features=trained)


def test_entries_left_out_before_folding_in_are_told(shop):
    visitors = shop.two_files()[1]
    with pytest.warns(UserWarning, match="before the split and are in neither"):
        sj.evaluate(shop.model(shop.items), visitors, fold_in=0.5, **OPTIONS)


def test_nothing_but_unknown_items(shop):
    shown, heldout = shop.two_files()
    rows = [
        r for r, items in shop.wanted.items() if items and not items & {*shop.items}
    ]
    heldout = heldout.align_rows(rows)
    model = shop.model(shop.items)
    found = sj.evaluate(model, shown, heldout, **OPTIONS)
    assert found[f"recall@{K}"] == found[f"ndcg@{K}"] == 0
    assert found[f"popularity_map@{K}"] == 0
    assert found["users"] == found["users_unknown"] == len(rows)
    assert found[f"coverage@{K}"] > 0
    with pytest.raises(ValueError, match="no row of heldout has an entry of a known"):
        sj.evaluate(model, shown, heldout, unknown="skip")


def test_validation_and_report_count_them_too(shop, tmp_path):
    shown, heldout = shop.two_files()
    size = shown.num_features
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
    options = {"num_epochs": 1, **OPTIONS}
    [entry] = sj.fit(model, optimizer, shown, validation=heldout, **options)
    measured = sj.evaluate(model, shown, heldout, **OPTIONS)
    name = f"recall@{K}"
    assert entry[name] == pytest.approx(measured[name], rel=1e-5)
    assert not {"users", "users_unknown", "entries_unknown"} & entry.keys()

    sj.write_report(tmp_path / "page.html", model, [], measured=measured)
    page = (tmp_path / "page.html").read_text()
    users, entries = measured["users_unknown"], measured["entries_unknown"]
    assert f"{entries:,} held-out entries are of unknown items" in page
    assert f"{users:,} users have no others" in page
    assert "users_unknown" not in page
    known = measured | {"users_unknown": 0, "entries_unknown": 0}
    sj.write_report(tmp_path / "page.html", model, [], measured=known)
    assert "unknown" not in (tmp_path / "page.html").read_text()


# repeats


@pytest.fixture
def repeating(shop) -> tuple[Histories, Histories]:
    """`(shown, wanted)`: half of the wanted areas were shown before."""
    wanted = {row: set(items) & {*shop.items} for row, items in shop.wanted.items()}
    rows = [row for row, items in wanted.items() if items]
    for row in rows[::2]:
        wanted[row] = set(sorted(shop.shown[row])[: len(wanted[row])])
    return shop.shown, {row: wanted[row] for row in rows}


def test_repeats_are_missed_and_told(shop, repeating, is_here):
    shown, wanted = repeating
    repeats = sum(len(shown[row] & items) for row, items in wanted.items())
    total = sum(map(len, wanted.values()))
    model = shop.model(shop.items)
    data, heldout = (dataset_of(part, shop.items) for part in (shown, wanted))
    with pytest.warns(UserWarning) as caught:
        found = sj.evaluate(model, data, heldout, **OPTIONS)
    [warning] = caught
    assert is_here(warning)
    text = (
        f"{repeats:,} of {total:,} held-out entries ({repeats / total:.1%}) are exclu"
    )
    assert str(warning.message).startswith(text)
    assert "exclude=None ranks them, too" in str(warning.message)
    expected = by_hand(shop.ranked()[0], wanted, set(shop.items), "miss")
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key
    # Ranked, too, they are found.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranked = sj.evaluate(model, data, heldout, **OPTIONS, exclude=None)
    assert ranked[f"recall@{K}"] > found[f"recall@{K}"] * 1.2
    # A row of another order and other rows: matched by name.
    others = dataset_of({row: shown[row] for row in [*shown][::-1]}, shop.items)
    with pytest.warns(UserWarning, match=text[:-20].replace("(", r"\(")):
        again = sj.evaluate(model, data, heldout, **OPTIONS, exclude=others)
    assert again == found


def test_a_test_that_equals_the_training_data(shop):
    data = dataset_of(shop.shown, shop.items)
    model = shop.model(shop.items)
    with pytest.raises(ValueError, match=r"all \d+ held-out entries .*: exclude=None"):
        sj.evaluate(model, data, data)
    some = data.align_rows(data.row_names[5:9])
    with pytest.raises(ValueError, match="Hold out entries that the inputs lack"):
        sj.evaluate(model, data.to_scipy(), data.without_values().to_scipy())
    with pytest.raises(ValueError, match="because their rows already have them"):
        prepared_evaluation(data, some, Setup())
    assert sj.evaluate(model, data, some, exclude=None, **OPTIONS)["users"] == 4


def test_left_out_labels_of_a_batch():
    """Functions of `sparsejax.metrics`, on a row of each kind."""
    labels = sj.CSR.from_scipy(scipy.sparse.csr_array(np.eye(3, 5, dtype=bool)))
    ids = np.array([[0, 4], [3, 1], [3, 4]])
    left_out = np.array([1, 0, 3])

    @jax.jit
    def run(ids):
        return (
            sj.metrics.recall_at_k(ids, labels, left_out=left_out),
            sj.metrics.truncated_recall_at_k(ids, labels, 1, left_out=left_out),
            sj.metrics.ndcg_at_k(ids, labels, left_out=left_out),
            sj.metrics.map_at_k(ids, labels, left_out=left_out),
        )

    second = 1 / math.log2(3)
    expected = [
        [1 / 2, 1, 0],
        [1, 0, 0],
        [1 / (1 + second), second, 0],
        [1 / 2, 1 / 2, 0],
    ]
    np.testing.assert_allclose(run(ids), expected, rtol=1e-6)
