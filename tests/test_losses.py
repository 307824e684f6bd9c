"""The loss rules by themselves: values, derivatives, names and JSON."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tolerances import assert_close

from sparsejax import losses

SCORES = np.concatenate([np.linspace(-30, 30, 241), [-1e4, -100, 0, 100, 1e4]])
LABELS = np.resize([1.0, 0.0, 0.3, -2.0, 1.0], SCORES.shape)


def sigmoid(s):
    return np.exp(-np.logaddexp(0, -s))


def cross_entropy(s, t):
    return np.logaddexp(0, s) - t * s, sigmoid(s) - t


def squared(s, t):
    return (s - t) ** 2 / 2, s - t


def absolute(s, t):
    return np.abs(s - t), np.sign(s - t)


def hinge(s, t):
    return np.maximum(0, 1 - t * s), np.where(t * s < 1, -t, 0)


def squared_hinge(s, t):
    """DSSTNE's formulas."""
    d = s - np.abs(t)
    d = np.where(t > 0, np.minimum(0, d), np.maximum(0, d))
    return d**2 / 2, d


def marginal(s, t, *, one_target, zero_target, one_scale, zero_scale, **_):
    """DSSTNE's formulas, on the probability; t says only whether there is a label."""
    a = sigmoid(s)
    value = np.where(
        t, one_scale * np.logaddexp(0, -s), zero_scale * np.logaddexp(0, s)
    )
    slope = np.where(t, one_scale * -sigmoid(-s), zero_scale * a)
    on = np.where(t, a < one_target, a > zero_target)
    return np.where(on, value, 0), np.where(on, slope, 0)


MARGINAL = losses.ScaledMarginalCrossEntropy(
    one_target=0.8, zero_target=0.15, one_scale=30.0, zero_scale=2.0
)


def marginal_listed(s, t):
    return marginal(s, np.full_like(s, True), **dataclasses.asdict(MARGINAL))


def marginal_absent(s):
    return marginal(s, np.full_like(s, False), **dataclasses.asdict(MARGINAL))


CASES = [
    (losses.SigmoidBinaryCrossEntropy(), cross_entropy, lambda s: cross_entropy(s, 0)),
    (losses.L2Loss(), squared, lambda s: squared(s, 0)),
    (losses.L1Loss(), absolute, lambda s: absolute(s, 0)),
    (losses.HingeLoss(), hinge, lambda s: hinge(s, -1)),
    (losses.L2HingeLoss(), squared_hinge, lambda s: squared_hinge(s, 0)),
    (MARGINAL, marginal_listed, marginal_absent),
]


@pytest.mark.parametrize(("rule", "listed", "absent"), CASES)
def test_values_and_derivatives_are_the_formulas(rule, listed, absent):
    scores, labels = jnp.float32(SCORES), jnp.float32(LABELS)
    exact_labels = np.float64(labels)
    ones = jnp.ones_like(scores)
    got = jax.jvp(lambda s: rule.listed(s, labels), (scores,), (ones,))
    # Terms of about |s| and |t s| cancel; each is an exponential, so a few roundings.
    size = 1 + np.abs(SCORES) + np.abs(LABELS * SCORES)
    for g, w in zip(got, listed(SCORES, exact_labels), strict=True):
        assert_close(g, w, terms=4, magnitude=np.maximum(np.abs(w), size))
    got = jax.jvp(rule.absent, (scores,), (ones,))
    for g, w in zip(got, absent(SCORES), strict=True):
        # Relative even where it is tiny: most items are that.
        tiny = np.finfo(np.float32).tiny / np.finfo(np.float32).eps
        assert_close(g, w, terms=16, magnitude=np.maximum(np.abs(w), tiny))


@pytest.mark.parametrize(("rule", "listed", "absent"), CASES)
def test_oracle_derivatives_are_finite_differences(rule, listed, absent):
    s = np.linspace(-4.03, 4.03, 50)  # clear of the thresholds
    t = np.resize([1.0, 0.0, 0.3, -2.0], s.shape)
    step = 1e-6
    for function in (lambda s: listed(s, t), absent):
        difference = (function(s + step)[0] - function(s - step)[0]) / (2 * step)
        np.testing.assert_allclose(function(s)[1], difference, rtol=1e-6, atol=1e-7)


def test_confident_items_with_a_label_keep_a_precise_loss():
    # log(1 + exp(-30)) would be 0 if it were the difference of 30 and 30.
    rule = losses.SigmoidBinaryCrossEntropy()
    score, one = jnp.float32(30.0), jnp.float32(1.0)
    value, slope = jax.jvp(lambda s: rule.listed(s, one), (score,), (one,))
    assert_close(value, np.exp(-30), terms=16)
    assert_close(slope, -np.exp(-30), terms=16)


def test_rules_equal_optax():
    s, t = jnp.float32(np.linspace(-9, 9, 30)), jnp.float32(np.linspace(0, 1, 30))
    rule = losses.SigmoidBinaryCrossEntropy()
    want = optax.sigmoid_binary_cross_entropy(s, t)
    np.testing.assert_allclose(rule.listed(s, t), want, rtol=2e-6, atol=1e-6)
    want = optax.sigmoid_binary_cross_entropy(s, jnp.zeros_like(t))
    np.testing.assert_allclose(rule.absent(s), want, rtol=2e-6)
    np.testing.assert_array_equal(losses.L2Loss().listed(s, t), optax.l2_loss(s, t))
    sign = jnp.where(t > 0.5, 1.0, -1.0)
    want = optax.hinge_loss(s, sign)
    np.testing.assert_array_equal(losses.HingeLoss().listed(s, sign), want)


def test_marginal_targets_are_where_training_stops():
    rule = losses.ScaledMarginalCrossEntropy()  # 0.9 and 0.1, at a score of +-2.197
    scores = jnp.float32([2.1, 2.2, 2.3])
    ones = jnp.ones_like(scores)
    slopes = jax.jvp(lambda s: rule.listed(s, ones), (scores,), (ones,))[1]
    np.testing.assert_array_equal(slopes < 0, [True, False, False])
    slopes = jax.jvp(rule.absent, (-scores,), (ones,))[1]
    np.testing.assert_array_equal(slopes > 0, [True, False, False])


def test_marginal_with_targets_one_and_zero_is_cross_entropy():
    rule = losses.ScaledMarginalCrossEntropy(one_target=1.0, zero_target=0.0)
    plain = losses.SigmoidBinaryCrossEntropy()
    scores = jnp.float32(SCORES)
    ones = jnp.ones_like(scores)
    np.testing.assert_array_equal(rule.absent(scores), plain.absent(scores))
    np.testing.assert_allclose(
        rule.listed(scores, ones), plain.listed(scores, ones), rtol=1e-6
    )


@pytest.mark.parametrize("rule", [case[0] for case in CASES])
def test_nan_scores_cost_nan(rule):
    nan = jnp.float32(jnp.nan)
    for function in (rule.absent, lambda s: rule.listed(s, jnp.float32(1))):
        value, slope = jax.jvp(function, (nan,), (jnp.float32(1),))
        assert jnp.isnan(value) and jnp.isnan(slope)


def test_denied_items_cost_nothing():
    every = [rule for rule, *_ in CASES]
    for rule in every:
        got = jax.jvp(rule.absent, (jnp.float32(-jnp.inf),), (jnp.float32(1),))
        assert got == (0, 0)


@pytest.mark.parametrize("rule", [case[0] for case in CASES])
def test_ignored_zeros_cost_nothing(rule):
    scores, labels = jnp.float32(SCORES), jnp.float32(LABELS)
    listed = jnp.resize(jnp.array([True, False, False]), scores.shape)
    want = jnp.where(listed, rule.listed(scores, labels), rule.absent(scores))
    np.testing.assert_array_equal(rule(scores, labels, listed), want)
    ignoring = dataclasses.replace(rule, ignore_zeros=True)
    got = ignoring(scores, labels, listed)
    np.testing.assert_array_equal(got, jnp.where(listed, want, 0))


RULES = [*(case[0] for case in CASES), losses.SoftmaxCrossEntropy()]


@pytest.mark.parametrize("rule", RULES)
def test_get_and_json_bring_a_rule_back(rule):
    document = losses.to_json(rule)
    assert losses.from_json(document) == rule
    assert hash(losses.from_json(document)) == hash(rule)
    name = document.pop("name")
    assert losses.get(name, **document) == rule
    assert losses.get(rule) is rule


def test_marginal_as_json():
    assert losses.to_json(losses.ScaledMarginalCrossEntropy(one_scale=30.0)) == {
        "name": "scaled_marginal_cross_entropy",
        "one_target": 0.9,
        "zero_target": 0.1,
        "one_scale": 30.0,
        "zero_scale": 1.0,
        "ignore_zeros": False,
    }


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match="no loss 'l3_loss'.*'l2_loss'"):
        losses.get("l3_loss")
    with pytest.raises(ValueError, match="no option 'margin'.*'one_target'"):
        losses.get("scaled_marginal_cross_entropy", margin=1.0)
    with pytest.raises(ValueError, match="no option 'margin'.*'z_loss'"):
        losses.get("softmax_cross_entropy", margin=1.0)
    ignoring = losses.get("l2_loss", ignore_zeros=True)
    assert ignoring == losses.L2Loss(ignore_zeros=True)
    assert losses.get("l2_loss", ignore_zeros=1) == ignoring
    with pytest.raises(ValueError, match="ignore_zeros is True or False, got 0.5"):
        losses.get("l2_loss", ignore_zeros=0.5)
    with pytest.raises(ValueError, match="one_target is a number, got True"):
        losses.get("scaled_marginal_cross_entropy", one_target=True)
    with pytest.raises(TypeError, match="has its options already"):
        losses.get(losses.L2Loss(), margin=1.0)
    with pytest.raises(ValueError, match='the loss: expected an object with a "name"'):
        losses.from_json({"one_target": 0.9})


@pytest.mark.parametrize(
    "options",
    [{"one_target": 1.5}, {"zero_target": -0.1}, {"one_scale": -1.0}]
    + [{"zero_scale": float("inf")}, {"one_target": float("nan")}],
)
def test_marginal_refuses_impossible_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        losses.ScaledMarginalCrossEntropy(**options)


def test_a_rule_of_ones_own_has_no_json():
    @dataclasses.dataclass(frozen=True)
    class Quartic(losses.ElementwiseLoss):
        def absent(self, scores):
            return scores**4

        def listed(self, scores, labels):
            return (scores - labels) ** 4

    assert losses.get(Quartic()) == Quartic()
    with pytest.raises(ValueError, match="no name to be stored by"):
        losses.to_json(Quartic())
