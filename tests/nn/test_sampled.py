"""Sampled losses: their expectations, computed over all possible samples."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.nn.sampled import (
    NegativeSampler,
    sample_with_batch,
    sampled_cross_entropy,
)

ITEMS, HIDDEN = 5, 3
TARGETS = jnp.array([[2, -1], [0, 4]])


def make():
    rng = np.random.default_rng(0)
    h = rng.normal(size=(2, 2, HIDDEN))
    h[0, 1] = np.nan  # where there is no target
    kernel, bias = rng.normal(size=(ITEMS, HIDDEN)), rng.normal(size=ITEMS)
    weights = rng.uniform(0.5, 2, (2, 2))
    return tuple(jnp.float32(x) for x in (h, kernel, bias, weights))


def table_of(sampler: NegativeSampler) -> np.ndarray:
    """The probability of each item, computed from the table that `sample` reads."""
    kept = np.asarray(sampler.kept, np.float64)
    moved = np.bincount(np.asarray(sampler.alias), 1 - kept, minlength=len(kept))
    return (kept + moved) / len(kept)


@pytest.mark.parametrize(
    "targets", [[[0, 0, 3], [5, -1, 9]], [[-1, -1, -1], [-1, -1, -1]], [[2]]], ids=str
)
def test_draws_with_the_batch_stand_for_all_items(targets):
    """The sum over all items is that over draws on average, whatever the targets are."""
    items, count, times = 7, 6, 20_000
    values = jnp.arange(1.0, items + 1) ** 2

    def total(key):
        ids, log_q = sample_with_batch(key, jnp.array(targets), items, count)
        used = ids != -1
        of_each = values[ids] / (jnp.sum(used) * jnp.exp(log_q))
        return jnp.sum(jnp.where(used, of_each, 0)), ids

    totals, ids = jax.vmap(total)(jax.random.split(jax.random.key(0), times))
    error = np.std(totals) / times**0.5
    assert abs(np.mean(totals) - np.sum(values)) < 4 * error
    assert (ids[:, :3] >= 0).all()  # 9 and -1 are no items
    assert set(np.unique(ids[:, 3:])) <= {*np.ravel(targets), -1} - {9}


def test_draws_with_the_batch_depend_on_its_targets_alone():
    """Not on their places, nor on the room for them: meshes and chunks place them otherwise."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 50, 40)
    key, found = jax.random.key(3), []
    for room in (40, 64, 120):
        places = rng.permutation(room)[:40]
        batch = np.full(room, -1)
        batch[places] = targets
        found.append(sample_with_batch(key, jnp.array(batch.reshape(4, -1)), 50, 31))
    for ids, log_q in found[1:]:
        np.testing.assert_array_equal(ids, found[0][0])
        np.testing.assert_array_equal(log_q, found[0][1])
    ids, log_q = map(np.asarray, found[0])
    share = np.bincount(targets, minlength=50) / 40
    np.testing.assert_allclose(
        np.exp(log_q), (16 / 50 + 15 * share[ids]) / 31, rtol=1e-5
    )
    assert np.isin(ids[16:], targets).all()  # none is lost to padding


@pytest.mark.parametrize(
    "counts",
    [[3], [1, 1, 1], [0, 5, 0], [8, 1, 0, 1], range(200), [1e9, *[1e-3] * 50], [2, 7]],
    ids=str,
)
def test_a_table_has_the_probabilities(counts):
    sampler = NegativeSampler.by_popularity(np.array(counts))
    q = np.array(counts) / np.sum(counts)
    np.testing.assert_allclose(table_of(sampler), q, rtol=1e-5, atol=1e-7)
    with np.errstate(divide="ignore"):
        want = np.log(q)
    np.testing.assert_allclose(np.asarray(sampler.log_q), want, rtol=1e-6, atol=1e-6)


def test_draws_have_the_probabilities():
    counts = np.array([8, 1, 0, 1, 6])
    for sampler, q in (
        (NegativeSampler.by_popularity(counts, power=0.5), counts**0.5),
        (NegativeSampler.uniform(5), np.ones(5)),
    ):
        q = q / q.sum()
        ids, log_q = sampler.sample(jax.random.key(1), 20_000)
        share = np.bincount(ids, minlength=5) / 20_000
        np.testing.assert_allclose(share, q, atol=5 * (0.25 / 20_000) ** 0.5)
        np.testing.assert_allclose(log_q, np.log(q[np.asarray(ids)]), rtol=1e-5)
        assert (share[q == 0] == 0).all()


def expectation(loss, of):
    """The mean of the loss and its gradients (or of `of` of the loss) over all pairs of
    negatives.
    """
    h, kernel, bias, weights = make()
    sampler = NegativeSampler.by_popularity(np.array([5, 1, 2, 1, 3]))
    pairs = jnp.array(list(itertools.product(range(ITEMS), repeat=2)))
    log_q = jnp.asarray(sampler.log_q)[pairs]

    def one(h, kernel, bias, weights, pair, log_q):
        options = {"log_q": log_q, "loss": loss, "bias": bias, "weights": weights}
        return of(sampled_cross_entropy(h, kernel, TARGETS, pair, **options))

    both = jax.value_and_grad(one, (0, 1, 2, 3))
    each = jax.jit(jax.vmap(both, (None,) * 4 + (0, 0)))
    values = each(h, kernel, bias, weights, pairs, log_q)
    odds = jnp.exp(log_q.sum(axis=1))
    return jax.tree.map(lambda x: jnp.tensordot(odds, x, 1), values)


def exact(loss_of_scores):
    h, kernel, bias, weights = make()

    def mean(h, kernel, bias, weights):
        kept = (TARGETS >= 0).reshape(-1)
        rows = jnp.where(kept[:, None], h.reshape(-1, HIDDEN), 0)
        scores = rows @ kernel.T + bias[None]
        each = loss_of_scores(scores, jax.nn.one_hot(TARGETS.reshape(-1), ITEMS))
        given = jnp.where(kept, weights.reshape(-1), 0)
        return jnp.sum(given * each) / jnp.sum(given)

    return jax.value_and_grad(mean, (0, 1, 2, 3))(h, kernel, bias, weights)


def test_sigmoid_is_unbiased():
    def over_all_items(scores, labels):
        return optax.sigmoid_binary_cross_entropy(scores, labels).sum(axis=1)

    got, want = expectation("sigmoid", lambda x: x), exact(over_all_items)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want
    )


def test_the_sum_of_softmax_is_unbiased_and_its_logarithm_too_small():
    h, kernel, bias, _ = make()
    one_row, q = h[1, 1], np.array([5, 1, 2, 1, 3]) / 12
    scores = np.asarray(kernel @ one_row + bias, np.float64)
    sums, logarithms = [], []

    @jax.jit
    def loss_of(chosen, log_q):
        given = one_row[None], kernel, TARGETS[1, 1:], chosen
        return sampled_cross_entropy(*given, log_q=log_q, bias=bias)

    for pair in itertools.product(range(ITEMS), repeat=2):
        chosen = np.array(pair, np.int32)
        odds, log_q = np.prod(q[chosen]), np.log(q[chosen]).astype(np.float32)
        loss = np.asarray(loss_of(chosen, log_q), np.float64)
        sums.append(odds * np.exp(loss + scores[4]))
        logarithms.append(odds * loss)
    want = np.exp(scores).sum()
    assert sum(sums) == pytest.approx(want, rel=1e-5)
    assert 0 < sum(logarithms) < np.log(want) - scores[4]


def test_without_log_q_it_is_a_choice_among_the_sample():
    h, kernel, *_ = make()
    negatives = jnp.array([1, 3, 3, -1, 4])
    got = jax.jit(sampled_cross_entropy)(h[1], kernel, TARGETS[1], negatives)
    scores = np.asarray(h[1], np.float64) @ np.asarray(kernel, np.float64).T
    want = [
        np.log(np.exp(scores[0, [0, 1, 3, 3, 4]]).sum()) - scores[0, 0],
        np.log(np.exp(scores[1, [4, 1, 3, 3]]).sum()) - scores[1, 4],
    ]
    np.testing.assert_allclose(got, sum(want) / 2, rtol=1e-6)


def test_the_gradient_has_the_touched_rows():
    h, kernel, _, weights = make()

    class Vectors(nnx.Module):
        def __init__(self):
            self.kernel = sj.optimizers.RowParam(jnp.concatenate([kernel, kernel]))

    def loss(model, kernel=None):
        kernel = model.kernel if kernel is None else kernel
        negatives, log_q = jnp.array([7, 2, 7]), jnp.log(jnp.array([0.1, 0.3, 0.1]))
        return sampled_cross_entropy(
            h, kernel, TARGETS, negatives, log_q=log_q, weights=weights
        )

    model = Vectors()
    value, gradients = sj.value_and_grad(loss)(model)
    rows = gradients["kernel"][...]
    want, dense = jax.value_and_grad(lambda kernel: loss(None, kernel))(
        model.kernel[...]
    )
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert isinstance(rows, sj.optimizers.RowGradient)
    assert set(rows.ids.tolist()) <= {0, 2, 4, 7, 10}
    np.testing.assert_allclose(rows.todense(), dense, rtol=1e-5, atol=1e-6)


def test_edges():
    h, kernel, *_ = make()
    negatives = jnp.array([1, 3])
    loss = jax.value_and_grad(sampled_cross_entropy, (0, 1))
    for array in jax.tree.leaves(loss(h, kernel, jnp.full((2, 2), -1), negatives)):
        np.testing.assert_array_equal(array, jnp.zeros_like(array))
    assert np.isnan(sampled_cross_entropy(h, kernel, TARGETS + 1, negatives))
    none = sampled_cross_entropy(h[1], kernel, TARGETS[1], jnp.zeros(0, jnp.int32))
    assert none == 0  # there is no other choice
    unchecked = inspect.unwrap(sampled_cross_entropy)
    for match, arguments, options in (
        ("is no item", (h, kernel, np.full((2, 2), 5), negatives), {}),
        ('loss is "softmax"', (h, kernel, TARGETS, negatives), {"loss": "l2"}),
        ("log_q has shape", (h, kernel, TARGETS, negatives), {"log_q": jnp.ones(3)}),
        ("weights has", (h, kernel, TARGETS, negatives), {"weights": jnp.ones(4)}),
        ("expected h", (h, kernel[:, :2], TARGETS, negatives), {}),
    ):
        with pytest.raises(ValueError, match=match):
            unchecked(*arguments, **options)
    for counts in ([], [0, 0], [-1, 2], [np.nan], [[1, 2]]):
        with pytest.raises(ValueError, match="counts"):
            NegativeSampler.by_popularity(np.array(counts))
    with pytest.raises(ValueError, match="an item to draw"):
        NegativeSampler.uniform(0)


@pytest.mark.usefixtures("wrong_types")
def test_products_of_bfloat16():
    """Operands and slopes are rounded, to 8 bits; sums are not."""
    rng = np.random.default_rng(0)
    h, kernel = (jnp.float32(rng.normal(size=(n, 16))) for n in (40, 60))
    targets, negatives = jnp.arange(40), jnp.arange(10, 60)

    def found(h, kernel, **options):
        loss = functools.partial(sampled_cross_entropy, **options)
        return jax.value_and_grad(loss, (0, 1))(h, kernel, targets, negatives)

    @jax.jit
    def both(h, kernel):
        return found(h, kernel), found(h, kernel, dtype="bfloat16")

    (exact, of_exact), (rounded, of_rounded) = both(h, kernel)
    assert 0 < abs(rounded / exact - 1) < 2**-8
    for got, expected in zip(of_rounded, of_exact, strict=True):
        assert got.dtype == jnp.float32
        error = jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)
        assert 2**-11 < error < 2**-7
    # Without anything to round but slopes, the losses are equal.
    h, kernel = (jnp.float32(jnp.bfloat16(x)) for x in (h, kernel))
    (exact, _), (rounded, _) = both(h, kernel)
    np.testing.assert_allclose(rounded, exact, rtol=1e-6)
    with pytest.raises(ValueError, match='dtype is "bfloat16" or None'):
        found(h, kernel, dtype="float16")
