"""Metrics of label predictions, for clicks and for events in histories."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from sparsejax import metrics
from sparsejax.data.sets.click_schema import LabelColumn

METRICS = ("auc", "log_loss", "normalized_entropy", "calibration")
# Name of the metric of numeric labels, for each loss.
OF_NUMBERS = {
    "log_loss": "log_loss",
    "squared": "squared_error",
    "quantile": "quantile_loss",
}


class Found(NamedTuple):
    """Scores, labels and weights `[examples]`; groups only if they were asked for.

    With several labels, logits and labels are `[examples, labels]`, and weights can be, too.
    """

    logits: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None
    weights: np.ndarray | None

    def of_label(self, place: int | slice = slice(None)) -> Found:
        """Selects the examples that have the label and a weight above 0."""
        logits, labels = self.logits[..., place], self.labels[..., place]
        groups, weights, there = self.groups, self.weights, ~np.isnan(labels)
        if weights is not None:
            weights = weights[:, place] if weights.ndim == 2 else weights
            there &= weights > 0
        return Found(
            logits[there],
            labels[there],
            None if groups is None else groups[there],
            None if weights is None else weights[there],
        )


def probabilities_of(logits: np.ndarray) -> np.ndarray:
    import scipy.special  # imported here, as only labels need it

    return scipy.special.expit(logits)


def of_binary(found: Found, label: str = "labels") -> dict[str, float]:
    """The metrics of a binary label. `label` is its name in warnings."""
    # In float64, probabilities near 0 or 1 are not rounded to 0 or 1.
    p = probabilities_of(found.logits.astype(np.float64))
    weights, groups = found.weights, found.groups
    log_loss = {"log_loss": metrics.log_loss(p, found.labels, weights)}
    if len(np.unique(found.labels)) == 2:
        measured = {
            "auc": metrics.auc(found.logits, found.labels, weights),
            **log_loss,
            "normalized_entropy": metrics.normalized_entropy(p, found.labels, weights),
        }
    else:
        warnings.warn(
            f"all {label} are {found.labels[0]:g}: such examples have a log loss, but no AUC "
            "and no normalized entropy",
            stacklevel=2,
        )
        measured, groups = log_loss, None
    if found.labels.any():
        measured["calibration"] = metrics.calibration(p, found.labels, weights)
    if groups is not None:
        try:
            grouped = metrics.group_auc(found.logits, found.labels, groups, weights)
            measured |= {"group_auc": grouped.auc, "groups": grouped.groups}
        except ValueError as error:
            warnings.warn(f"no group_auc of {label}: {error}", stacklevel=2)
    return measured


def errors_of(found: Found, column: LabelColumn) -> np.ndarray:
    """`[examples]` losses of a numeric label, in float64."""
    z, y = found.logits.astype(np.float64), found.labels.astype(np.float64)
    if column.is_probability:
        return np.logaddexp(0, z) - y * z
    over = y - z
    if column.quantile is None:
        return np.square(over)
    return np.maximum(column.quantile * over, (column.quantile - 1) * over)


def of_number(found: Found, column: LabelColumn) -> dict[str, float]:
    """The metrics of a numeric label: its loss, and its calibration.

    For a quantile, the calibration is the share of labels that do not exceed the prediction, which
    should equal the quantile. For other losses it is the predicted sum divided by the sum of the
    labels.
    """
    mean = np.average(errors_of(found, column), weights=found.weights)
    measured = {OF_NUMBERS[column.loss]: float(mean)}
    w = np.ones(len(found.labels)) if found.weights is None else found.weights
    z = found.logits.astype(np.float64)
    if column.quantile is not None:
        measured["share_below"] = float(w @ (found.labels <= z)) / float(w.sum())
    elif total := float(w @ found.labels):
        p = probabilities_of(z) if column.is_probability else z
        measured["calibration"] = float(w @ p) / total
    return measured


def of_label(found: Found, column: LabelColumn, name: str) -> dict[str, float]:
    """The metrics of a label, named `METRIC/NAME`.

    If no example has the label, warns and returns none.
    """
    if not len(found.labels):
        weight = "" if found.weights is None else " and a weight above 0"
        message = f"no example has the label {name!r}{weight}: it has no metrics"
        warnings.warn(message, stacklevel=2)
        return {}
    is_binary = column.loss == "binary"
    measured = (
        of_binary(found, f"labels {name!r}") if is_binary else of_number(found, column)
    )
    return {f"{metric}/{name}": x for metric, x in measured.items()}
