"""Ranking metrics against textbook loops and examples worked out by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from ranked_by_hand import expected

from sparsejax import metrics
from sparsejax.metrics.ranking import METRICS
from sparsejax.sparse import CSR

ITEMS = 6


def labels_of(rows, num_cols=ITEMS, nse=None):
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.concatenate([np.empty(0, np.int64), *map(sorted, rows)])
    values = np.ones(len(indices), bool)
    shape = (len(rows), num_cols)
    matrix = scipy.sparse.csr_array((values, indices, indptr), shape=shape)
    return CSR.from_scipy(matrix, nse=nse)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recall", 2 / 4),
        ("truncated_recall", 2 / 3),
        ("precision", 2 / 3),
        # ranks 1 and 3 hit: (1 + 1/2) / (1 + 1/log2(3) + 1/2)
        ("ndcg", 1.5 / (1.5 + 1 / math.log2(3))),
        ("hit_rate", 1),
        ("mrr", 1),
        ("map", (1 / 1 + 2 / 3) / 3),
    ],
)
def test_worked_example(name, value):
    ids, labels = jnp.array([[3, 1, 5]]), labels_of([{0, 2, 3, 5}])
    np.testing.assert_allclose(METRICS[name](ids, labels), [value], rtol=1e-6)


def test_the_first_hit_at_rank_two():
    ids, labels = jnp.array([[1, 3, 5]]), labels_of([{3}])
    assert metrics.hit_rate_at_k(ids, labels).tolist() == [1]
    assert metrics.mrr_at_k(ids, labels).tolist() == [1 / 2]
    assert metrics.map_at_k(ids, labels).tolist() == [1 / 2]
    assert metrics.hit_rate_at_k(ids, labels, 1).tolist() == [0]
    assert metrics.mrr_at_k(ids, labels, 1).tolist() == [0]


@pytest.mark.parametrize("name", METRICS)
def test_perfect_ranking_gives_one(name):
    ids, labels = jnp.array([[4, 0, 2], [1, 5, 3]]), labels_of([{0, 2, 4}, {1, 3, 5}])
    assert METRICS[name](ids, labels).tolist() == [1, 1]


def test_what_is_possible_depends_on_k_and_on_the_labels():
    ids = jnp.array([[0, -1, -1, -1]])  # k_max above the number of candidates
    few, many = labels_of([{0}]), labels_of([{0, 1, 2, 3, 4, 5}])
    assert metrics.recall_at_k(ids, few).tolist() == [1]
    assert metrics.truncated_recall_at_k(ids, few).tolist() == [1]
    assert metrics.precision_at_k(ids, few).tolist() == [0.25]
    assert metrics.ndcg_at_k(ids, few).tolist() == [1]
    assert metrics.truncated_recall_at_k(ids, many, 1).tolist() == [1]
    np.testing.assert_allclose(metrics.recall_at_k(ids, many, 1), [1 / 6], rtol=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_rows_without_labels_give_zero(name):
    ids = jnp.array([[0, 1], [2, 3], [-1, -1]])
    assert METRICS[name](ids, labels_of([set(), {3, 2}, {1}]))[0] == 0
    assert METRICS[name](ids, labels_of([set()] * 3)).tolist() == [0, 0, 0]


@st.composite
def rankings(draw):
    # Few different shapes, since each is compiled.
    items, batch = 40, 4
    k_max = draw(st.sampled_from([1, 10, 60]))
    k = draw(st.sampled_from([1, 3, k_max]).filter(lambda k: k <= k_max))
    number = st.integers(0, items - 1)
    rows = draw(st.lists(st.sets(number), min_size=batch, max_size=batch))
    ids = []
    for _ in rows:
        ranked = draw(st.lists(number, unique=True, max_size=k_max))
        ids.append(ranked + [-1] * (k_max - len(ranked)))
    return ids, rows, k, labels_of(rows, items, nse=batch * items)


@functools.partial(jax.jit, static_argnums=2)
def every_metric(ids, labels, k):
    return {name: metric(ids, labels, k) for name, metric in METRICS.items()}


@given(rankings())
def test_matches_the_definitions(ranking):
    ids, rows, k, labels = ranking
    for name, found in every_metric(jnp.array(ids), labels, k).items():
        wanted = [expected(name, i, row, k) for i, row in zip(ids, rows, strict=True)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=name)
        assert found.dtype == jnp.float32


def test_padding_is_not_a_label():
    labels = CSR(None, np.array([1, 4, 2, 3]), np.array([0, 1, 2]), num_cols=ITEMS)
    ids = jnp.array([[1, 2], [2, 3]])
    assert metrics.recall_at_k(ids, labels).tolist() == [1, 0]


def test_long_rows_and_item_numbers_near_the_int32_limit():
    items = 2**31 - 1  # rows x items is far beyond int32
    rng = np.random.default_rng(0)
    rows = [set(rng.integers(0, items, 3000).tolist()) | {items - 1} for _ in range(3)]
    labels = labels_of(rows, items)
    ids = [[items - 1, *sorted(row)[:8], 0] for row in rows]
    found = metrics.is_label(jnp.array(ids, jnp.int32), labels)
    np.testing.assert_array_equal(
        found, [[i in row for i in some] for some, row in zip(ids, rows, strict=True)]
    )


@pytest.mark.parametrize("name", METRICS)
def test_under_jit_with_traced_labels(name):
    ids, labels = jnp.array([[3, 1, 5], [0, 2, 1]]), labels_of([{0, 3}, {2}], nse=9)
    labels = jax.tree.map(jnp.asarray, labels)
    metric = METRICS[name]
    compiled = jax.jit(metric, static_argnums=2)(ids, labels, 2)
    np.testing.assert_allclose(compiled, metric(ids, labels, 2), rtol=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_broken_label_rows_give_nan(name):
    ids = jnp.array([[0], [1], [2], [3]])
    outside = CSR(
        None,
        jnp.array([0, 1, ITEMS, -1, 2]),
        jnp.array([0, 1, 3, 5, 5]),
        num_cols=ITEMS,
    )
    found = METRICS[name](ids, outside)
    np.testing.assert_array_equal(jnp.isnan(found), [False, True, True, False])
    overfull = CSR(None, jnp.array([0, 1]), jnp.array([0, 1, 3, 4, 4]), num_cols=ITEMS)
    found = METRICS[name](ids, overfull)
    np.testing.assert_array_equal(jnp.isnan(found), [False, True, True, True])
    assert found[0] == 1


@pytest.mark.parametrize("name", METRICS)
def test_errors_name_both_sides(name):
    ids, labels = jnp.array([[0, 1]]), labels_of([{0}, {1}])
    with pytest.raises(ValueError, match="ids has 1 rows but labels has 2"):
        METRICS[name](ids, labels)
    for k in (0, 3):
        with pytest.raises(ValueError, match=rf"k must be in \[1, 2\].*got {k}"):
            METRICS[name](ids, labels_of([{0}]), k)


# of the catalogue


def test_counts_of_recommendations():
    ids = jnp.array([[3, 0, -1], [3, 5, 1], [-1, -1, -1]])
    counts = metrics.recommendation_counts(ids, ITEMS)
    assert counts.tolist() == [1, 1, 0, 2, 0, 1]
    assert metrics.recommendation_counts(ids, ITEMS, 1).tolist() == [0, 0, 0, 2, 0, 0]


def test_catalogue_by_hand():
    counts = np.array([0, 3, 0, 1])
    assert metrics.coverage(counts) == 0.5
    # In order 0, 0, 1, 3: (-3 0 - 1 0 + 1 1 + 3 3) / (4 4)
    assert metrics.gini(counts) == 10 / 16
    popularity = np.array([0.9, 0.5, 0.1, 0.3])
    assert metrics.mean_popularity(counts, popularity) == pytest.approx(1.8 / 4)


def test_catalogue_of_extremes():
    equal, one = np.full(7, 3), np.eye(1000, dtype=int)[4] * 9
    assert metrics.gini(equal) == 0 and metrics.coverage(equal) == 1
    assert metrics.gini(one) == pytest.approx(1 - 1 / 1000)
    nothing = np.zeros(5, int)
    assert metrics.gini(nothing) == metrics.coverage(nothing) == 0
    assert metrics.mean_popularity(nothing, np.ones(5)) == 0
    # Sums beyond int32.
    many = jnp.full(10, 2**31 - 1)
    assert metrics.gini(many) == pytest.approx(0, abs=1e-12)
    assert metrics.mean_popularity(many, jnp.full(10, 0.5)) == 0.5


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any))
def test_gini_is_half_the_relative_mean_difference(counts):
    given = np.array(counts, float)
    differences = np.abs(given[:, None] - given).mean()
    expected = differences / (2 * given.mean())
    assert metrics.gini(np.array(counts)) == pytest.approx(expected, abs=1e-12)
