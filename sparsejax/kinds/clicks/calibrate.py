"""Calibrates predicted click probabilities on examples that were not used for training."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from sparsejax import metrics
from sparsejax.callers import warn_caller
from sparsejax.clicks.calibrated import Calibrated, Correction
from sparsejax.clicks.layers import conditional
from sparsejax.kinds.clicks.model import ClickModel
from sparsejax.kinds.clicks.scores import Clicks, logits_of

Method = Literal["platt", "isotonic"]

# Number of bins of a calibration curve.
_BINS = 20
NOT_BINARY = (
    "negatives_kept corrects a label with the values 0 and 1 that comes after no other label, and "
    "the model has none; leave it out"
)


def calibrate(
    model: ClickModel,
    clicks: Clicks | None = None,
    *,
    method: Method = "platt",
    negatives_kept: float | None = None,
) -> Calibrated:
    """Calibrates a click model, so that its predicted probabilities match shares of clicks.

    ::

        negatives_kept=r    logit + log r: the odds before all but a share r of the examples
                            without a click were dropped from the training data
        method="platt"      a logit + b, with the least log loss on the examples (Platt 1999),
                            for labels (n_1 + 1) / (n_1 + 2) and 1 / (n_0 + 2)
        method="isotonic"   the shares of clicks that never fall as the logit rises, with the
                            least squared error (pool adjacent violators), on straight lines
                            between the mean logits of the parts

    >>> _ = pathlib.Path("clicks.csv").write_text("click,user\\n1,ann\\n0,bob\\n0,ann\\n")
    >>> clicks = read_clicks("clicks.csv", ClickSchema("click", ids={"user": HashedColumn(9)}))
    >>> model, optimizer = build(WideDeepConfig(dim=4, hidden=(8,)), clicks, optimizers.adam(0.1))
    >>> _ = fit(model, optimizer, clicks, num_epochs=9)
    >>> better = calibrate(model, clicks)
    >>> round(evaluate(better, clicks)["calibration"], 1)
    1.2

    `model` is not changed. Platt's line keeps the order of the examples, and so the AUC: a
    line that would reverse the order is an error. If all examples have the same logit, the slope
    is 1.
    Isotonic corrections need thousands of examples, and give some examples equal probabilities.

    With several labels, each binary label gets a correction, fitted on the examples that have this
    label. Predictions of other labels are not changed. A label that comes after another label is
    corrected as a conditional probability: its correction is fitted on the examples with the
    earlier label, and the result is multiplied by the corrected probability of the earlier label.
    A label whose correction cannot be fitted is not changed, and there is a warning. If no label
    can be corrected, that is an error.

    Args:
      model: a click model, or a module that is called as `model(dense, ids)`, see `ClickModel`.
      clicks: examples that the model was not trained on, none of which were dropped; or None to
        correct by `negatives_kept` alone, for labels with the values 0 and 1.
      method: how the correction is fitted on `clicks`.
      negatives_kept: the share of the examples without a click that the training data kept. With
        several labels, all but one of them must come after another one.

    Raises:
      ValueError: neither `clicks` nor `negatives_kept` is given, there are no examples, or the
          share is not valid. All examples have the same label. The model orders the examples no
          better than chance, so that the correction would reverse the order or make all
          probabilities equal.
    """
    if clicks is None and negatives_kept is None:
        raise ValueError(
            "give clicks=..., examples to correct by, or negatives_kept=..., the share of "
            "negatives in the training data"
        )
    if method not in get_args(Method):
        raise ValueError(f'method is "platt" or "isotonic", got {method!r}')
    offset = 0.0
    if negatives_kept is not None:
        if not 0 < negatives_kept <= 1:
            raise ValueError(f"negatives_kept is in (0, 1], got {negatives_kept}")
        offset = float(np.log(negatives_kept))
    names = getattr(model, "labels", ()) if clicks is None else clicks.schema.several
    if names:
        return _of_labels(model, clicks, method, tuple(names), offset)
    if clicks is None:
        return Calibrated(model, offset=offset)
    found = _fitted(*logits_of(model, clicks), method, offset)
    return Calibrated(model, **found._asdict())


def _of_labels(
    model: Any,
    clicks: Clicks | None,
    method: Method,
    names: tuple[str, ...],
    offset: float,
) -> Calibrated:
    """Fits a correction for each binary label that has enough examples."""
    several = {} if clicks is None else clicks.schema.several
    befores = [column.after for column in several.values()]
    places = [None if n is None else names.index(n) for n in befores]
    places = places or getattr(model, "after", ()) or [None] * len(names)
    binary = [n for n in names if n not in several or several[n].loss == "binary"]
    free = [
        n for n, at in zip(names, places, strict=True) if at is None and n in binary
    ]
    if offset and not free:
        raise ValueError(NOT_BINARY)
    if offset and len(free) > 1:
        raise ValueError(
            "negatives_kept is the share of the examples without the first label of a chain, "
            f"but {', '.join(free)} come after no other label: correct them by examples"
        )
    # Examples were dropped at random only if they lack the chain's first label. Labels after it
    # count only examples that have it, so they need no offset.
    found = [Correction(offset=offset * (name in free)) for name in names]
    if clicks is None:
        return Calibrated(model, labels=[*zip(found, places, strict=True)])
    logits, labels = logits_of(model, clicks)
    logits, faults = np.asarray(conditional(jnp.asarray(logits), places)), []
    for name in binary:
        i = names.index(name)
        there = ~np.isnan(labels[:, i])
        if (at := places[i]) is not None:
            there &= labels[:, at] == 1
        some = logits[there, i], labels[there, i]
        try:
            found[i] = _fitted(*some, method, found[i].offset)
        except ValueError as error:
            faults.append(f"label {name!r} is not corrected: {error}")
    if len(faults) == len(binary):
        raise ValueError("; ".join(faults) or "no label has the values 0 and 1")
    for fault in faults:
        warn_caller(fault)
    return Calibrated(model, labels=[*zip(found, places, strict=True)])


def _fitted(
    logits: np.ndarray, labels: np.ndarray, method: Method, offset: float
) -> Correction:
    """Fits a correction on `[examples]` logits, after adding `offset` to them."""
    if not len(labels):
        raise ValueError("there are no examples to correct by")
    _check_classes(labels)
    given = logits.astype(np.float64) + offset
    if method == "isotonic":
        knots = isotonic(given, labels)
        if len(knots) == 1:
            raise _useless(given, labels, "make all probabilities equal")
        return Correction(offset=offset, knots=knots)
    slope, intercept = platt(given, labels)
    if slope <= 0:
        raise _useless(given, labels, f"turn the order of all examples, by {slope:.3g}")
    return Correction(slope, slope * offset + intercept)


def _check_classes(labels: np.ndarray) -> None:
    if len(np.unique(labels)) == 1:
        raise ValueError(
            f"the examples to correct by ({len(labels):,}) all have the label {labels[0]:g}, "
            "so that all probabilities would become equal; give examples with and without "
            "clicks, in the shares of the requests that the model will serve"
        )


def _useless(logits: np.ndarray, labels: np.ndarray, effect: str) -> ValueError:
    """The error for a model that orders the examples no better than chance."""
    return ValueError(
        f"the correction would {effect}: the model orders these {len(labels):,} examples no "
        f"better than chance (AUC {metrics.auc(logits, labels):.3f}); check that their labels "
        "and columns mean the same as in training, give more examples, or train a better model"
    )


def platt(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Slope and intercept with the least log loss, found by Newton's method in float64.

    If all logits are equal, every slope fits equally well, and 1 is returned.
    """
    import scipy.special  # imported here, as nothing else in this module needs scipy

    clicked = labels > 0
    ones, zeros = int(clicked.sum()), int((~clicked).sum())
    wanted = np.where(clicked, (ones + 1) / (ones + 2), 1 / (zeros + 2))
    if np.ptp(logits) == 0:
        return 1.0, float(scipy.special.logit(wanted.mean()) - logits[0])
    x = np.stack([logits, np.ones_like(logits)])

    def loss(w: np.ndarray) -> float:
        z = w @ x
        return float(np.sum(np.logaddexp(0, z) - wanted * z))

    w = np.array([0.0, np.log((ones + 1) / (zeros + 1))])
    before = loss(w)
    for _ in range(100):
        p = scipy.special.expit(w @ x)
        slope = x @ (p - wanted)
        # If all logits are nearly equal, this keeps the matrix invertible: only the intercept is
        # fitted.
        curve = (x * (p * (1 - p))) @ x.T + 1e-12 * np.eye(2) * len(labels)
        step, size = np.linalg.solve(curve, slope), 1.0
        while size > 1e-10 and loss(w - size * step) > before:
            size /= 2
        w = w - size * step
        after = loss(w)
        if abs(before - after) <= 1e-12 * abs(before):
            break
        before = after
    return float(w[0]), float(w[1])


def isotonic(logits: np.ndarray, labels: np.ndarray) -> list[tuple[float, float]]:
    """Knots of the isotonic curve: for each part its mean logit, and the logit of its click
    share.
    """
    import scipy.optimize  # imported here, as nothing else in this module needs scipy
    import scipy.special

    values, at, counts = np.unique(logits, return_inverse=True, return_counts=True)
    shares = np.bincount(at, labels) / counts
    fitted = scipy.optimize.isotonic_regression(shares, weights=counts).x
    parts = np.cumsum(np.append(False, np.diff(fitted) > 0))
    sizes = np.bincount(parts, counts)
    middle = np.bincount(parts, counts * values) / sizes
    # A share of 0 or 1 would be a certain prediction, whose log loss is infinite if it is wrong.
    least = 0.5 / len(labels)
    share = np.clip(np.bincount(parts, counts * fitted) / sizes, least, 1 - least)
    return list(zip(middle.tolist(), scipy.special.logit(share).tolist(), strict=True))


def calibration_curve(
    probabilities: np.ndarray, labels: np.ndarray
) -> list[tuple[float, float]]:
    """Pairs (predicted share, true share) for bins of equally many examples.

    Equal predictions are put in one bin, so there may be fewer bins.

    Args:
      probabilities: `[n]` predicted probabilities of a click.
      labels: `[n]` labels, 0 or 1.
    """
    p, labels = np.asarray(probabilities, np.float64), np.asarray(labels, np.float64)
    order = np.argsort(p, kind="stable")
    p, labels = p[order], labels[order]
    ends = np.searchsorted(p, p[(np.arange(1, _BINS) * len(p)) // _BINS])
    parts = np.split(np.arange(len(p)), np.unique(ends[ends > 0]))
    return [(float(p[at].mean()), float(labels[at].mean())) for at in parts]
