"""DSSTNE's losses of activations as losses of scores, against its formulas in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import losses
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.layer_definition import ACTIVATIONS, Activation
from sparsejax.dsstne.losses import activate, of_output

SCORES = np.array([-3.0, -1.0, -0.25, 0.3, 1.2, 4.0])
LABELS = np.array([1.0, 0.5, 2.0, 1.0, 3.0, 0.25])


def network(error, activation, **keys):
    layers: list[dict[str, Any]] = [
        {"N": 4},
        {"N": 4, "Activation": activation, "ELUAlpha": 1.5},
    ]
    layers[1]["Slope"] = 0.25
    return Definition.from_json({"Layers": layers, "ErrorFunction": error, **keys})


def rule_of(error, activation, *, sparse=True, ignore_zeros=False, **keys) -> Any:
    made = network(error, activation, **keys)
    return of_output(
        made, made.layer("Output1"), sparse=sparse, ignore_zeros=ignore_zeros
    )


def value_and_slope(function, x):
    return jax.jvp(function, (jnp.float32(x),), (jnp.ones(np.shape(x), jnp.float32),))


def numpy_activation(name, z):
    """An activation of `z`, and its derivative."""
    a = 1 / (1 + np.exp(-z))
    low = np.exp(np.minimum(z, 0)) - 1
    elu, elu_slope = np.where(z > 0, z, 1.5 * low), np.where(z > 0, 1, 1.5 * (low + 1))
    return {
        "Sigmoid": (a, a * (1 - a)),
        "Tanh": (np.tanh(z), 1 - np.tanh(z) ** 2),
        "Linear": (z, np.ones_like(z)),
        "RELU": (np.maximum(z, 0), 1.0 * (z > 0)),
        "LRELU": (np.where(z > 0, z, z / 4), np.where(z > 0, 1, 0.25)),
        "ELU": (elu, elu_slope),
        "SELU": (1.050701 * elu, 1.050701 * elu_slope),
        "SoftPlus": (np.log1p(np.exp(z)), a),
        "SoftSign": (z / (1 + abs(z)), 1 / (1 + abs(z)) ** 2),
    }[name]


def numpy_loss(error, a, t):
    """The loss of activations `a`, and its derivative with respect to `a`."""
    d = a - abs(t)
    d = np.where(t > 0, np.minimum(0, d), np.maximum(0, d))
    return {
        "L1": (abs(a - t), np.sign(a - t)),
        "L2": ((a - t) ** 2 / 2, a - t),
        "L2Hinge": (d**2 / 2, d),
        "Hinge": (np.maximum(0, 1 - t * a), np.where(t * a < 1, -t, 0)),
    }[error]


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "SoftMax"])
@pytest.mark.parametrize("error", ["L1", "L2", "L2Hinge", "Hinge"])
def test_losses_of_activations(error, name):
    rule = rule_of(error, name, sparse=error != "Hinge")
    a, slope = numpy_activation(name, SCORES)
    for labels in (LABELS, None):
        if labels is None:
            got = value_and_slope(rule.absent, SCORES)
            value, outer = numpy_loss(error, a, 0 * a - (error == "Hinge"))
        else:
            got = value_and_slope(lambda s: rule.listed(s, jnp.float32(LABELS)), SCORES)
            value, outer = numpy_loss(error, a, LABELS)
        np.testing.assert_allclose(got[0], value, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(got[1], outer * slope, rtol=2e-6, atol=1e-6)
    assert rule.absent(jnp.float32(-jnp.inf)) == 0  # a denied item


def test_worked_value_of_dsmce():
    rule = rule_of(
        "DataScaledMarginalCrossEntropy",
        "Sigmoid",
        ScaledMarginalCrossEntropy={"oneScale": 30, "oneTarget": 0.9},
    )
    value, slope = value_and_slope(
        lambda s: rule(s, jnp.float32(2), jnp.array(True)), 0
    )
    np.testing.assert_allclose([value, slope], [41.5888, -30], rtol=2e-6)
    value, slope = value_and_slope(
        lambda s: rule(s, jnp.float32(2), jnp.array(False)), 0
    )
    np.testing.assert_allclose([value, slope], [np.log(2), 0.5], rtol=2e-6)
    assert rule.listed(jnp.float32(3), jnp.float32(2)) == 0  # .95 is above the target
    assert rule.absent(jnp.float32(-3)) == 0


@pytest.mark.parametrize("error", ["CrossEntropy", "ScaledMarginalCrossEntropy"])
def test_any_label_counts_as_one(error):
    margins = {"oneTarget": 1, "zeroTarget": 0}
    rule = rule_of(error, "Sigmoid", ScaledMarginalCrossEntropy=margins)
    value, slope = value_and_slope(
        lambda s: rule.listed(s, jnp.float32(LABELS)), SCORES
    )
    a = 1 / (1 + np.exp(-SCORES))
    np.testing.assert_allclose(value, -np.log(a), rtol=2e-6)
    np.testing.assert_allclose(slope, a - 1, rtol=2e-6)
    value, slope = value_and_slope(rule.absent, SCORES)
    np.testing.assert_allclose(value, -np.log(1 - a), rtol=2e-6)
    np.testing.assert_allclose(slope, a, rtol=2e-6)


def test_a_dense_cross_entropy_has_its_labels():
    rule = rule_of("CrossEntropy", "Sigmoid", sparse=False)
    assert rule == losses.SigmoidBinaryCrossEntropy()


@pytest.mark.parametrize(
    ("error", "activation"),
    [("CrossEntropy", "Sigmoid"), ("L1", "Tanh"), ("L2", "Sigmoid")],
)
def test_delta_boost_is_in_the_gradient_only(error, activation):
    plain = rule_of(error, activation)
    boosted = rule_of(error, activation, DeltaBoost={"one": 30, "zero": 0.5})
    listed = np.array([True, False] * 3)

    def loss(rule):
        return lambda s: rule(s, jnp.float32(LABELS), jnp.asarray(listed))

    value, slope = value_and_slope(loss(plain), SCORES)
    same, steeper = value_and_slope(loss(boosted), SCORES)
    np.testing.assert_array_equal(same, value)
    np.testing.assert_allclose(steeper, np.where(listed, 30, 0.5) * slope, rtol=1e-6)


def test_ignore_zeros_reaches_the_rule():
    for error in ("L2", "CrossEntropy", "DataScaledMarginalCrossEntropy"):
        rule = rule_of(error, "Sigmoid", ignore_zeros=True)
        assert rule(jnp.float32(1), jnp.float32(1), jnp.array(False)) == 0


def test_softmax():
    assert rule_of("CrossEntropy", "SoftMax") == losses.SoftmaxCrossEntropy()
    got = activate(Activation(name="SoftMax"), jnp.array([[0.0, 0.0], [1e4, 0.0]]))
    np.testing.assert_allclose(got, [[0.5, 0.5], [1, 0]])


@pytest.mark.parametrize(
    ("error", "activation", "options", "message"),
    [
        ("L2", "SoftMax", {}, "no right gradient with SoftMax"),
        ("ScaledMarginalCrossEntropy", "SoftMax", {}, "SoftMax"),
        ("CrossEntropy", "Tanh", {}, "no gradient with Tanh .* use Sigmoid or SoftMax"),
        ("ScaledMarginalCrossEntropy", "Linear", {}, "use Sigmoid, or another"),
        ("DataScaledMarginalCrossEntropy", "RELU", {}, "use Sigmoid"),
        ("DataScaledMarginalCrossEntropy", "Sigmoid", {"sparse": False}, "sparse data"),
        ("Hinge", "Tanh", {}, "dense data set"),
        ("CrossEntropy", "SoftMax", {"ignore_zeros": True}, "ignore zeros"),
        ("L2", "Tanh", {"DeltaBoost": {"one": 2}}, "no notice of DeltaBoost"),
        (
            "ScaledMarginalCrossEntropy",
            "Sigmoid",
            {"DeltaBoost": {"zero": 2}},
            "oneScale",
        ),
    ],
)
def test_refused(error, activation, options, message):
    with pytest.raises(NotImplementedError, match=f"'Output1': .*{message}"):
        rule_of(error, activation, **options)
