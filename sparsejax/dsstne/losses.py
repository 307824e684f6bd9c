"""DSSTNE's losses, which are functions of activations, rewritten as functions of scores.

An output layer's scores are its sums before the activation. `of_output` returns the rule
that `output_loss` takes. Gradients are derivatives of the value, except for `DeltaBoost`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sparsejax import losses
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.layer_definition import Activation, LayerDefinition
from sparsejax.losses import ElementwiseLoss, LossRule


@dataclasses.dataclass(frozen=True)
class OfActivations(ElementwiseLoss):
    """A loss on activations, rewritten as a loss on scores::

        absent(score)        = loss.absent(activation(score))
        listed(score, label) = loss.listed(activation(score), label)

    A score of -inf without a label has no loss: the item is excluded.

    Attributes:
      loss: the loss of an activation.
        activation: any activation except SoftMax.
    """

    loss: ElementwiseLoss
    activation: Activation

    def absent(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        loss = self.loss.absent(activate(self.activation, scores))
        return jnp.where(scores == -jnp.inf, 0, loss)

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        return self.loss.listed(activate(self.activation, scores), labels)


@dataclasses.dataclass(frozen=True)
class Boosted(ElementwiseLoss):
    """A loss whose value does not change, but whose gradients have factors (`DeltaBoost`).

    Attributes:
      loss: the loss whose gradients are multiplied.
      one: factor of the gradients at items with a label.
      zero: factor of the gradients at items without one.
    """

    loss: ElementwiseLoss
    one: float = 1.0
    zero: float = 1.0

    def absent(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        return with_slope(self.loss.absent(scores), self.zero)

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        return with_slope(self.loss.listed(scores, labels), self.one)


@dataclasses.dataclass(frozen=True)
class ListedCrossEntropy(ElementwiseLoss):
    """The sigmoid cross-entropy that takes any label to be 1, as DSSTNE does.

    With a = sigmoid(score)::

        with a label:     -log(a)
        without a label:  -log(1 - a)
    """

    def absent(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        return losses.softplus(scores)

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        return losses.softplus(-scores)


@dataclasses.dataclass(frozen=True)
class DataScaledMarginalCrossEntropy(losses.ScaledMarginalCrossEntropy):
    """The scaled marginal cross-entropy whose labels are weights.

    With a = sigmoid(score) and t the label::

        with a label:     one_scale  * t * -log(a)   where a < one_target,  else 0
        without a label:  zero_scale * -log(1 - a)   where a > zero_target, else 0
    """

    name: ClassVar[str] = "data_scaled_marginal_cross_entropy"

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        loss = super().listed(scores, labels)
        return losses.times_labels(loss, labels.astype(loss.dtype))

    def __call__(
        self,
        scores: Float[Array, "..."],
        labels: Float[Array, "..."],
        listed: Bool[Array, "..."],
    ) -> Float[Array, "..."]:
        # The base class has a shorter form, which ignores the values of labels.
        return ElementwiseLoss.__call__(self, scores, labels, listed)


def of_units(rule: LossRule) -> LossRule:
    """Rewrites a loss on scores as a loss on activations.

    Raises:
      NotImplementedError: the loss is defined on scores only.
    """
    if isinstance(rule, Boosted):
        inner = of_units(rule.loss)
        assert isinstance(inner, ElementwiseLoss)
        return dataclasses.replace(rule, loss=inner)
    if isinstance(rule, OfActivations):
        return dataclasses.replace(rule, activation=Activation(name="Linear"))
    raise NotImplementedError(f"{type(rule).__name__} is a loss of scores")


def activate(
    activation: Activation, scores: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Applies a layer's activation to its sums; SoftMax is over the last axis.

    At 0 the derivatives of RELU and LRELU are the left-sided ones, as in DSSTNE.
    """
    alpha, scale = activation.elu_alpha, activation.selu_lambda
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "Sigmoid": jax.nn.sigmoid,
        "Tanh": jnp.tanh,
        "Linear": lambda x: x,
        "RELU": lambda x: jnp.where(x <= 0, 0, x),
        "LRELU": lambda x: jnp.where(x <= 0, activation.slope * x, x),
        "ELU": lambda x: _elu(x, alpha),
        "SELU": lambda x: scale * _elu(x, alpha),
        "SoftPlus": losses.softplus,
        "SoftSign": lambda x: x / (1 + jnp.abs(x)),
        "SoftMax": lambda x: jax.nn.softmax(x, axis=-1),
    }
    return functions[activation.name](scores)


def of_output(
    network: Definition,
    layer: LayerDefinition,
    *,
    sparse: bool = True,
    ignore_zeros: bool = False,
) -> LossRule:
    """The loss of an output layer as a function of its scores before the activation.

    >>> from sparsejax.dsstne.keys import parse
    >>> text = '{"Layers": [{"N": 4}, {"N": 4}], "ErrorFunction": "L1"}'
    >>> network = Definition.from_json(parse(text))
    >>> of_output(network, network.layer("Output1")).loss
    L1Loss(ignore_zeros=False)

    CrossEntropy with SoftMax is `SoftmaxCrossEntropy`. The labels of a row with n labels
    without values are 1 / n; labels with values are used as they are. If examples have
    weights, each label is 1.

    Args:
      network: description of the network, with the error function and its numbers.
      layer: an output.
      sparse: whether the data set of the targets is sparse. If so, it has labels at some
        items; a dense data set has a label at every item.
      ignore_zeros: whether only items with labels have a loss, as in `ElementwiseLoss`;
        the data set's SparseIgnoreZero.

    Raises:
      NotImplementedError: DSSTNE has no gradient for this error function with this
        activation or this data, or ignores DeltaBoost; or the output has SoftMax and
        dropout.
    """
    activation, error = layer.activation, network.error_function
    if activation is None:  # a pooling layer
        activation = Activation(name="Linear")
    label = f"layer {layer.name!r}: the error function {error}"
    if activation.name == "SoftMax":
        if error != "CrossEntropy":
            raise NotImplementedError(
                f"{label} has no right gradient with SoftMax in DSSTNE; use "
                "CrossEntropy, or another activation"
            )
        _refuse_boost(network, f"{label} with SoftMax")
        if layer.dropout:
            raise NotImplementedError(
                f"layer {layer.name!r}: pDropout after SoftMax is not supported: what is "
                "dropped has the probability 0, so its loss is not finite; leave it out"
            )
        if ignore_zeros:
            raise NotImplementedError(
                f"{label} with SoftMax is a distribution over all items, so a data set "
                "cannot ignore zeros; use Sigmoid"
            )
        return losses.SoftmaxCrossEntropy()
    if error in _OF_SCORES:
        if activation.name != "Sigmoid":
            others = " or SoftMax" if error == "CrossEntropy" else ""
            raise NotImplementedError(
                f"{label} has no gradient with {activation.name} in DSSTNE; use "
                f"Sigmoid{others}, or another error function"
            )
        return _of_scores(network, label, sparse=sparse, ignore_zeros=ignore_zeros)
    if error == "Hinge" and sparse:
        raise NotImplementedError(
            f"{label} needs a dense data set of targets, 1 and -1; use L2Hinge"
        )
    rule = OfActivations(
        _OF_ACTIVATIONS[error](), activation, ignore_zeros=ignore_zeros
    )
    boosts = error == "L1" or (activation.name == "Sigmoid" and error != "Hinge")
    if not boosts:
        _refuse_boost(network, f"{label} with {activation.name}")
    return _boosted(network, rule)


_OF_ACTIVATIONS: dict[str, Callable[[], ElementwiseLoss]] = {
    "L1": losses.L1Loss,
    "L2": losses.L2Loss,
    "L2Hinge": losses.L2HingeLoss,
    "Hinge": losses.HingeLoss,
}
# Losses after a sigmoid that are computed from scores, so that they do not overflow.
_OF_SCORES = (
    "CrossEntropy",
    "ScaledMarginalCrossEntropy",
    "DataScaledMarginalCrossEntropy",
)


def _of_scores(
    network: Definition, label: str, *, sparse: bool, ignore_zeros: bool
) -> ElementwiseLoss:
    if network.error_function == "CrossEntropy":
        if sparse:
            rule = ListedCrossEntropy(ignore_zeros=ignore_zeros)
        else:
            rule = losses.SigmoidBinaryCrossEntropy(ignore_zeros=ignore_zeros)
        return _boosted(network, rule)
    _refuse_boost(network, label)
    kind = losses.ScaledMarginalCrossEntropy
    if network.error_function == "DataScaledMarginalCrossEntropy":
        if not sparse:
            raise NotImplementedError(f"{label} needs a sparse data set of targets")
        kind = DataScaledMarginalCrossEntropy
    return kind(**dataclasses.asdict(network.margins), ignore_zeros=ignore_zeros)


def _boosted(network: Definition, rule: ElementwiseLoss) -> ElementwiseLoss:
    boost = network.delta_boost
    if boost.one == boost.zero == 1:
        return rule
    return Boosted(rule, boost.one, boost.zero, ignore_zeros=rule.ignore_zeros)


def _refuse_boost(network: Definition, label: str) -> None:
    boost = network.delta_boost
    if not boost.one == boost.zero == 1:
        raise NotImplementedError(
            f"{label}: DSSTNE takes no notice of DeltaBoost here; leave it out, or use "
            "oneScale and zeroScale of ScaledMarginalCrossEntropy"
        )


def _elu(x: Float[Array, "..."], alpha: float) -> Float[Array, "..."]:
    # For positive x, exp(x) may overflow, and 0 * inf in the gradient is NaN: so expm1 gets 0.
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def with_slope(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Returns `x`; its gradient is multiplied by `factor`."""
    return x


@with_slope.defjvp
def _with_slope_jvp(factor, primals, tangents):
    (x,), (dx,) = primals, tangents
    return x, factor * dx
