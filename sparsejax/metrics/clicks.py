"""Metrics of clicks, from a score and a label (0 or 1) for each example.

Let s be scores, p probabilities, y labels and w weights (1 by default). Sums over examples::

    auc                 sum_ij w_i w_j ([s_i > s_j] + [s_i = s_j] / 2) / sum_ij w_i w_j
                        over all pairs of a click i and a non-click j
    log_loss            - sum w (y log p + (1 - y) log(1 - p)) / sum w
    normalized_entropy  log_loss / (- m log m - (1 - m) log(1 - m)),
                        where m = sum w y / sum w is the share of clicks
    calibration         sum w p / sum w y

All functions copy their arguments to the host, compute in float64, and return floats. They
raise `ValueError` for NaN, labels other than 0 and 1, and negative weights. `BinnedAuc` does
not copy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class GroupAuc(NamedTuple):
    """The mean AUC of groups.

    Attributes:
      auc: mean AUC, weighted by the numbers of examples in the groups.
      groups: number of groups in the mean.
      left_out: number of groups with one class only, which have no AUC.
    """

    auc: float
    groups: int
    left_out: int


def auc(
    scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """Area under the ROC curve: the share of pairs (click, non-click) in the right order.

    It is computed exactly, by one sort. A pair with equal scores counts half. Scores may be any
    numbers that increase with the probability of a click, such as logits.

    >>> metrics.auc([0.1, 0.4, 0.4, 0.8], [0, 0, 1, 1])
    0.875

    Args:
      scores: `[n]`, a score for each example.
      labels: `[n]`, 1 for a click, else 0.
      weights: `[n]`, weights of the examples, not negative. None is 1 for each.

    Raises:
      ValueError: all labels with a weight above 0 are of one class, or a value is invalid.
    """
    scores, labels, weights = _checked("scores", scores, labels, weights)
    one_group = np.zeros(len(scores), np.int64)
    ordered, pairs = _pairs_of_groups(scores, labels, weights, one_group)
    if not len(pairs) or not pairs[0]:
        raise ValueError(
            f"the AUC needs both classes, but of {len(labels):,} labels "
            f"{int(labels.sum()):,} are clicks (examples of weight 0 do not count)"
        )
    return float(ordered[0] / pairs[0])


def group_auc(
    scores: ArrayLike,
    labels: ArrayLike,
    groups: ArrayLike,
    weights: ArrayLike | None = None,
) -> GroupAuc:
    """The AUC in each group, such as a user, and the weighted mean of these ("GAUC").

    `sum_g n_g auc_g / sum_g n_g`, where n_g is the number of examples (impressions) of the
    group, or the sum of their weights (Zhu et al., "Optimized cost per click in Taobao
    display advertising", 2017). Unlike `auc`, it does not depend on how scores of different
    groups compare. Groups with one class only are omitted from the mean and counted.

    >>> metrics.group_auc([0.1, 0.9, 0.5, 0.4, 0.3], [0, 1, 0, 1, 1], list("aabbc"))
    GroupAuc(auc=0.5, groups=2, left_out=1)

    Args:
      scores: `[n]`, a score for each example.
      labels: `[n]`, 1 for a click, else 0.
      groups: `[n]`, the group of each example: a number or text.
      weights: `[n]`, weights of the examples, not negative. None is 1 for each.

    Raises:
      ValueError: no group has both classes, or a value is invalid.
    """
    scores, labels, weights = _checked("scores", scores, labels, weights)
    names, numbers = np.unique(_vector("groups", groups, scores), return_inverse=True)
    ordered, pairs = _pairs_of_groups(scores, labels, weights, numbers)
    has_both = pairs > 0
    if not has_both.any():
        raise ValueError(
            f"no group of {len(names):,} has both classes, so none has an AUC"
        )
    sizes = np.bincount(numbers, weights, len(names))[has_both]
    mean = np.average(ordered[has_both] / pairs[has_both], weights=sizes)
    return GroupAuc(float(mean), int(has_both.sum()), int((~has_both).sum()))


def log_loss(
    probabilities: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """The mean binary cross-entropy, in nats.

    Probabilities are limited to [eps, 1 - eps], where eps is that of the array's dtype. So the
    largest loss of an example is 16 in float32 and 36 in float64.

    >>> round(metrics.log_loss([0.5, 0.25], [1, 0]), 4)
    0.4904

    Args:
      probabilities: `[n]`, probability of a click for each example, in [0, 1].
      labels: `[n]`, 1 for a click, else 0.
      weights: `[n]`, weights of the examples, not negative. None is 1 for each.

    Raises:
      ValueError: a value is invalid, or there are no examples.
    """
    p, labels, weights = _checked_probabilities(probabilities, labels, weights)
    given = np.asarray(probabilities).dtype
    eps = np.finfo(given if given.kind == "f" else np.float64).eps
    right = np.clip(np.where(labels == 1, p, 1 - p), eps, 1 - eps)
    return float(np.average(-np.log(right), weights=weights))


def normalized_entropy(
    probabilities: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """The log loss, divided by that of a model that always predicts the share of clicks.

    Values below 1 are better than that model. Unlike `log_loss`, values for data with different
    shares of clicks can be compared (He et al., "Practical lessons from predicting clicks on ads
    at Facebook", 2014). Arguments: see `log_loss`.

    >>> round(metrics.normalized_entropy([0.5, 0.25], [1, 0]), 4)
    0.7075

    Raises:
      ValueError: all labels are of one class, so that the divisor is 0, or a
        value is invalid.
    """
    loss = log_loss(probabilities, labels, weights)
    _, labels, weights = _checked_probabilities(probabilities, labels, weights)
    share = float(np.average(labels, weights=weights))
    if not 0 < share < 1:
        raise ValueError(
            f"the normalized entropy needs both classes, but all labels are {share:g}"
        )
    return loss / float(-share * np.log(share) - (1 - share) * np.log1p(-share))


def calibration(
    probabilities: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """The number of predicted clicks divided by that of clicks: above 1, too many are predicted.

    Arguments: see `log_loss`.

    >>> metrics.calibration([0.5, 0.25], [1, 0])
    0.75

    Raises:
      ValueError: there is no click, or a value is invalid.
    """
    p, labels, weights = _checked_probabilities(probabilities, labels, weights)
    if not (clicks := weights @ labels):
        raise ValueError("the calibration needs at least one click among the labels")
    return float(weights @ p / clicks)


def _pairs_of_groups(scores, labels, weights, groups) -> tuple[np.ndarray, np.ndarray]:
    """Two sums for each group: the weights of correctly ordered pairs, and the weights of all
    pairs.
    """
    if not len(scores):
        return np.empty(0), np.empty(0)
    order = np.lexsort((scores, groups))
    scores, groups = scores[order], groups[order]
    clicks = (weights * labels)[order]
    others = (weights * (1 - labels))[order]

    # A cell consists of the examples of a group that have equal scores.
    begins_group = np.append(True, groups[1:] != groups[:-1])
    begins_cell = begins_group | np.append(True, scores[1:] != scores[:-1])
    cells = np.flatnonzero(begins_cell)
    clicks, others = np.add.reduceat(clicks, cells), np.add.reduceat(others, cells)
    first = np.flatnonzero(begins_group[cells])  # first cell of each group
    group = np.cumsum(begins_group[cells]) - 1  # group of each cell
    below = np.cumsum(others) - others
    below -= below[first][group]
    ordered = np.add.reduceat(clicks * (below + others / 2), first)
    return ordered, np.add.reduceat(clicks, first) * np.add.reduceat(others, first)


def _checked_probabilities(probabilities, labels, weights):
    p, labels, weights = _checked("probabilities", probabilities, labels, weights)
    wrong = (p < 0) | (p > 1)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"probabilities must be in [0, 1], but example {at:,} has {p[at]:g}; of "
            "logits, take the sigmoid first"
        )
    if not weights.sum():
        raise ValueError("expected at least one example with a weight above 0")
    return p, labels, weights


def _checked(
    name: str, scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Checks scores, labels and weights, and returns them as float64 arrays `[n]`."""
    found = _vector(name, scores).astype(np.float64)
    clicks = _vector("labels", labels, found).astype(np.float64)
    given = np.ones_like(found)
    if weights is not None:
        given = _vector("weights", weights, found).astype(np.float64)
    for what, values, wrong, wanted in (
        (name, found, np.isnan(found), "must not be NaN"),
        ("labels", clicks, (clicks != 0) & (clicks != 1), "must be 0 or 1"),
        (
            "weights",
            given,
            ~(np.isfinite(given) & (given >= 0)),
            "must be finite and not negative",
        ),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"{what} {wanted}, but example {at:,} has {values[at]:g}")
    return found, clicks, given


def _vector(name: str, values: ArrayLike, like: np.ndarray | None = None) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (like is not None and array.shape != like.shape):
        wanted = "one dimension" if like is None else f"shape {like.shape}"
        raise ValueError(f"{name} must have {wanted}, got shape {array.shape}")
    return array
