"""Loss rules, which `output_loss` and its gradient take.

An elementwise rule gives the loss of one score. `jax.jvp` takes its derivative, so a rule
always agrees with its gradient. Losses that optax has too have its names.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from sparsejax import codec


@dataclasses.dataclass(frozen=True)
class ElementwiseLoss(abc.ABC):
    """A loss that is a sum over the items of a row.

    ::

        loss_b = sum of absent(score_bi)          over items i without a label
               + sum of listed(score_bi, label)   over the labels of row b

    A rule is a frozen dataclass, because it must be hashable: it is a static argument of
    compiled programs.
    Its methods work element by element, keep the dtype of `scores`, and are
    differentiated in `scores` with `jax.jvp`.

    Attributes:
      ignore_zeros: whether only labels count; the loss of all other items is 0 (explicit
        feedback, such as ratings; DSSTNE's `SparseIgnoreZero`).
    """

    ignore_zeros: bool = dataclasses.field(default=False, kw_only=True)

    # The smallest and the largest meaningful label. Outside this range, a loss may have no
    # minimum.
    labels: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    @abc.abstractmethod
    def absent(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """The loss of items that have no label."""

    @abc.abstractmethod
    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """The loss of items with a label; without values, every label is 1."""

    def __call__(
        self,
        scores: Float[Array, "..."],
        labels: Float[Array, "..."],
        listed: Bool[Array, "..."],
    ) -> Float[Array, "..."]:
        """The loss of each score: `listed` where a label is stored, and `absent` elsewhere."""
        others = jnp.zeros_like(scores) if self.ignore_zeros else self.absent(scores)
        return jnp.where(listed, self.listed(scores, labels), others)


class _OneFormula(ElementwiseLoss):
    """A rule whose formula needs one evaluation, because no stored label equals `no_label`."""

    no_label: ClassVar[float] = 0.0

    def absent(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.listed(scores, jnp.full_like(scores, self.no_label))

    def __call__(
        self,
        scores: Float[Array, "..."],
        labels: Float[Array, "..."],
        listed: Bool[Array, "..."],
    ) -> Float[Array, "..."]:
        loss = self.listed(scores, jnp.where(listed, labels, self.no_label))
        return jnp.where(listed, loss, 0) if self.ignore_zeros else loss


@dataclasses.dataclass(frozen=True)
class SigmoidBinaryCrossEntropy(_OneFormula):
    """Every item is a yes-or-no question: `optax.sigmoid_binary_cross_entropy`.

    With s the score and t the label (0 where no label is stored)::

        loss = softplus(s) - t s = -t log(sigmoid(s)) - (1 - t) log(1 - sigmoid(s))
    """

    name: ClassVar[str] = "sigmoid_binary_cross_entropy"
    labels: ClassVar[tuple[float, float]] = (0, 1)

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        return _softplus_minus(scores, times_labels(scores, labels))


@dataclasses.dataclass(frozen=True)
class L2Loss(_OneFormula):
    """Half the squared error: `optax.l2_loss`.

    With s the score and t the label (0 where no label is stored)::

        loss = (s - t)^2 / 2
    """

    name: ClassVar[str] = "l2_loss"

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        return jnp.square(_error(scores, labels)) / 2


@dataclasses.dataclass(frozen=True)
class L1Loss(_OneFormula):
    """The absolute error.

    With s the score and t the label (0 where no label is stored)::

        loss = |s - t|
    """

    name: ClassVar[str] = "l1_loss"

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        error = _error(scores, labels)
        # `jnp.abs` is avoided, because its derivative is 1 at 0 and at NaN.
        return error * jnp.sign(error)


@dataclasses.dataclass(frozen=True)
class HingeLoss(_OneFormula):
    """Scores on the right side of a margin: `optax.hinge_loss`.

    With s the score and t the label (-1 where no label is stored)::

        loss = max(0, 1 - t s)
    """

    name: ClassVar[str] = "hinge_loss"
    no_label: ClassVar[float] = -1.0

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        return _relu(1 - times_labels(scores, labels))


@dataclasses.dataclass(frozen=True)
class L2HingeLoss(_OneFormula):
    """Half the squared error, only where the score is on the wrong side (DSSTNE's).

    With s the score and t the label (0 where no label is stored)::

        t > 0:    loss = min(0, s - t)^2 / 2      pushes s up only, to t
        t <= 0:   loss = max(0, s - |t|)^2 / 2    pushes s down only, to |t|
    """

    name: ClassVar[str] = "l2_hinge_loss"

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        error = scores - jnp.abs(labels)
        return jnp.square(_relu(jnp.where(labels > 0, -error, error))) / 2


@dataclasses.dataclass(frozen=True)
class ScaledMarginalCrossEntropy(ElementwiseLoss):
    """Cross-entropy that ignores scores which are good enough (DSSTNE's).

    With a = sigmoid(score)::

        with a label:     one_scale  * -log(a)       where a < one_target,  else 0
        without a label:  zero_scale * -log(1 - a)   where a > zero_target, else 0

    The targets are thresholds at which training stops, not soft labels: the loss aims
    at 1 and 0. With targets 1 and 0 and scales 1 it is the plain cross-entropy. As in
    DSSTNE any listed label counts as 1, whatever its value.

    Attributes:
      one_target: probability from which on an item with a label has no loss.
      zero_target: probability up to which an item without a label has no loss.
      one_scale: weight of the items with a label.
      zero_scale: weight of the items without a label.

    Raises:
      ValueError: a target outside [0, 1], or a scale that is negative or not finite.
    """

    one_target: float = 0.9  # these are DSSTNE's defaults
    zero_target: float = 0.1
    one_scale: float = 1.0
    zero_scale: float = 1.0

    name: ClassVar[str] = "scaled_marginal_cross_entropy"
    labels: ClassVar[tuple[float, float]] = (0, math.inf)

    def __post_init__(self) -> None:
        for name in ("one_target", "zero_target"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a probability in [0, 1], got {value}")
        for name in ("one_scale", "zero_scale"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    def absent(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        loss = self.zero_scale * softplus(scores)
        return jnp.where(scores <= _logit(self.zero_target), 0, loss)  # NaN stays NaN

    def listed(
        self, scores: Float[Array, "..."], labels: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        loss = self.one_scale * softplus(-scores)
        return jnp.where(scores >= _logit(self.one_target), 0, loss)

    def __call__(
        self,
        scores: Float[Array, "..."],
        labels: Float[Array, "..."],
        listed: Bool[Array, "..."],
    ) -> Float[Array, "..."]:
        if self.ignore_zeros:
            return super().__call__(scores, labels, listed)
        # Negated for labels, so that one `softplus` serves both cases.
        scores = jnp.where(listed, -scores, scores)
        scale = jnp.where(listed, self.one_scale, self.zero_scale)
        end = jnp.where(listed, -_logit(self.one_target), _logit(self.zero_target))
        loss = jnp.asarray(scale, scores.dtype) * softplus(scores)
        return jnp.where(scores <= jnp.asarray(end, scores.dtype), 0, loss)


@dataclasses.dataclass(frozen=True)
class SoftmaxCrossEntropy:
    """One distribution over all items, multinomial: `optax.softmax_cross_entropy`.

    With e `label_smoothing`, z `z_loss`, and n the number of items without excluded
    ones (score -inf)::

        lse_b  = log(sum_j exp(score_bj))
        mean_b = sum_j score_bj / n
        loss_b = sum over the labels of b of
                     t_bi (lse_b - (1 - e) score_bi - e mean_b + z lse_b^2)

    A row without labels has a loss of 0. Labels are not normalised: without values, a row
    with n labels weighs n times as much as a row with one label.

    Attributes:
      label_smoothing: share of each label that is spread over all items.
      z_loss: weight of `lse^2`, which keeps the scores near those whose exponentials sum
        to 1 (PaLM's z-loss is 1e-4).

    Raises:
      ValueError: `label_smoothing` outside [0, 1], or `z_loss` negative or not finite.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    name: ClassVar[str] = "softmax_cross_entropy"
    labels: ClassVar[tuple[float, float]] = (0, math.inf)

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                f"label_smoothing is a share in [0, 1], got {self.label_smoothing}"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(
                f"z_loss must be finite and not negative, got {self.z_loss}"
            )


LossRule = ElementwiseLoss | SoftmaxCrossEntropy

_RULES = {
    rule.name: rule
    for rule in (
        SigmoidBinaryCrossEntropy,
        L1Loss,
        L2Loss,
        HingeLoss,
        L2HingeLoss,
        ScaledMarginalCrossEntropy,
        SoftmaxCrossEntropy,
    )
}
NAMES = tuple(_RULES)


def get(loss: str | LossRule, **options: float | bool) -> LossRule:
    """The rule with this name and these options. A rule is returned as it is.

    >>> get("scaled_marginal_cross_entropy", one_target=0.95).one_target
    0.95

    Raises:
      ValueError: unknown name or option (the message lists the known ones), or a value
        that the option cannot have.
      TypeError: `loss` is neither a name nor a rule, or it is a rule and options are
        given.
    """
    if not isinstance(loss, str):
        if not isinstance(loss, LossRule):
            raise TypeError(f"a loss is a name or a rule, got {type(loss).__name__}")
        if options:
            raise TypeError(f"{loss} has its options already, got {sorted(options)}")
        return loss
    if loss not in _RULES:
        raise ValueError(f"there is no loss {loss!r}; there are {sorted(_RULES)}")
    rule = _RULES[loss]
    known = [field.name for field in dataclasses.fields(rule)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"{loss} has no option {unknown[0]!r}; it has {known or 'none'}"
        )
    values: dict[str, Any] = {}
    for field in dataclasses.fields(rule):
        if field.name not in options:
            continue
        value, is_flag = options[field.name], isinstance(field.default, bool)
        if is_flag and value not in (0, 1):
            raise ValueError(f"{loss}: {field.name} is True or False, got {value!r}")
        if not is_flag and isinstance(value, bool):
            raise ValueError(f"{loss}: {field.name} is a number, got {value!r}")
        values[field.name] = bool(value) if is_flag else value
    return rule(**values)


def to_json(rule: LossRule) -> dict[str, Any]:
    """`{"name": ..., option: value ...}`, which `from_json` reads.

    Raises:
      ValueError: `rule` is not a rule of this module, so it has no name.
    """
    name = getattr(rule, "name", "")
    if _RULES.get(name) is not type(rule):
        raise ValueError(f"{rule} has no name to be stored by; use {sorted(_RULES)}")
    return {"name": name, **dataclasses.asdict(rule)}


def from_json(document: dict[str, Any]) -> LossRule:
    """The rule that `to_json` stored.

    Raises:
      ValueError: no "name", or see `get`.
    """
    name, options = codec.read_named(document, "name", "the loss")
    return get(name, **options)


def _error(
    scores: Float[Array, "..."], labels: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`scores - labels`; 0 for an item that is excluded and has no label."""
    denied = (scores == -jnp.inf) & (labels == 0)
    return jnp.where(denied, 0, scores - labels)


def label_loss(
    name: str,
    quantile: float | None,
    scores: Float[Array, "*batch"],
    labels: Float[Array, "*batch"],
) -> Float[Array, "*batch"]:
    """The losses of a label by the name that a `LabelColumn` has; see there."""
    if name in ("binary", "log_loss"):
        log_p, log_not_p = jax.nn.log_sigmoid(scores), jax.nn.log_sigmoid(-scores)
        return -labels * log_p - (1.0 - labels) * log_not_p
    over = labels - scores
    if quantile is None:
        return jnp.square(over)
    return jnp.maximum(quantile * over, (quantile - 1) * over)


def times_labels(
    scores: Float[Array, "..."], labels: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`labels * scores`; 0 where a label is 0, also for an excluded item, with score -inf."""
    return jnp.where(labels == 0, 0, labels * scores)


def softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`log(1 + exp(x))`, without overflow in the value or in the derivative.

    The derivative shares the exponential with the value, and a polynomial replaces the
    logarithm. On a GPU these two take most of the time of an elementwise loss.
    """
    return _softplus_minus(x, 0)


def _softplus_minus(
    x: Float[Array, "..."], linear: Float[Array, "..."] | float
) -> Float[Array, "..."]:
    """`softplus(x) - linear`, exact also where the two nearly cancel."""
    # A selection, because the derivative of `maximum` at 0 does not fit the derivative of `abs`.
    return (jnp.where(x > 0, x, 0) - linear) + _log1p_exp(x)


@jax.custom_jvp
def _relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`max(0, x)`, with derivative 0 at 0. NaN stays NaN, also in the derivative."""
    return jnp.where(x <= 0, 0, x)


@_relu.defjvp
def _relu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    slope = jnp.where(x <= 0, 0, jnp.where(x > 0, 1, x))
    # `_relu(x)` is not called: in JAX 0.11.2 a Pallas program cannot contain a `custom_jvp`.
    return jnp.where(x <= 0, 0, x), slope * dx


@jax.custom_jvp
def _log1p_exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`log(1 + exp(-|x|))`"""
    return _log1p(jnp.exp(-jnp.abs(x)))


@_log1p_exp.defjvp
def _log1p_exp_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    e = jnp.exp(-jnp.abs(x))
    # A GPU has an instruction for `rsqrt`; a quotient takes about ten instructions.
    slope = jnp.where(x > 0, -e, e) * jnp.square(lax.rsqrt(1 + e))
    return _log1p(e), slope * dx


# Coefficients of log(1 + x) / x in [0, 1] by Chebyshev interpolation, highest power first.
# Including rounding, the relative error of x times this polynomial is below 2 float32 eps.
_LOG1P = (
    *(0.00512610212, -0.0290740646, 0.0775160866, -0.136022476, 0.190768807),
    *(-0.24835399, 0.333181217, -0.49999445, 0.999999966),
)


def _log1p(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`log(1 + x)` for x in [0, 1]."""
    if jnp.finfo(x.dtype).bits > 32:
        return jnp.log1p(x)
    factor = _LOG1P[0]
    for coefficient in _LOG1P[1:]:
        factor = factor * x + coefficient
    return factor * x


def _logit(probability: float) -> float:
    if probability in (0, 1):
        return -math.inf if probability == 0 else math.inf
    return math.log(probability) - math.log1p(-probability)
