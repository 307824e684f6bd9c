"""Metrics of clicks against pairs counted one by one, and figures worked out by hand."""

import math

import numpy as np
import pytest

from sparsejax import metrics


def count_pairs(scores, labels, weights):
    """The AUC by its definition, over all pairs."""
    click, other = labels == 1, labels == 0
    s, t = scores[click][:, None], scores[other][None, :]
    pairs = weights[click][:, None] * weights[other][None, :]
    return float((pairs * ((s > t) + (s == t) / 2)).sum() / pairs.sum())


def examples(seed, n=700, distinct=40):
    """Scores with many ties, labels that follow them, and weights."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-distinct, distinct, n) * (6 / distinct)
    labels = (rng.random(n) < 1 / (1 + np.exp(-scores))).astype(np.int32)
    return scores, labels, rng.random(n) * 3


@pytest.mark.parametrize("distinct", [1, 2, 40, 10**9])
def test_auc_counts_pairs(distinct):
    scores, labels, weights = examples(distinct, distinct=distinct)
    ones = np.ones_like(weights)
    got = metrics.auc(scores, labels)
    assert abs(got - count_pairs(scores, labels, ones)) < 1e-12
    got = metrics.auc(scores, labels, weights)
    assert abs(got - count_pairs(scores, labels, weights)) < 1e-12
    copies = np.random.default_rng(0).integers(0, 3, len(scores))
    repeated = np.repeat(scores, copies), np.repeat(labels, copies)
    got = metrics.auc(scores, labels, copies)
    assert abs(got - metrics.auc(*repeated)) < 1e-12


def test_auc_of_float32_has_the_ties_of_float32():
    scores = np.array([1, 1 + 1e-9, 2], np.float32)
    assert metrics.auc(scores, [False, True, True]) == 0.75
    assert metrics.auc([1, 1 + 1e-9, 2], [0, 1, 1]) == 1
    assert metrics.auc([-np.inf, 0.0, -0.0, np.inf], [0, 0, 1, 1]) == 0.875


def test_auc_of_groups():
    scores, labels, weights = examples(3)
    users = np.random.default_rng(1).zipf(1.5, len(scores)).astype(str)
    for w in (None, weights):
        each = np.ones_like(scores) if w is None else w
        total = mean = left_out = 0.0
        for user in set(users):
            mine = users == user
            if len(set(labels[mine])) < 2:
                left_out += 1
                continue
            size = each[mine].sum()
            total += size
            mean += size * count_pairs(scores[mine], labels[mine], each[mine])
        got = metrics.group_auc(scores, labels, users, w)
        assert abs(got.auc - mean / total) < 1e-12
        assert got.left_out == left_out > 5
        assert got.groups + got.left_out == len(set(users)) > 20


def test_log_loss_and_its_normalization():
    rng = np.random.default_rng(0)
    p, labels, weights = rng.random(50), rng.integers(0, 2, 50), rng.random(50)
    losses = np.array(
        [-math.log(q if y else 1 - q) for q, y in zip(p, labels, strict=True)]
    )
    assert metrics.log_loss(p, labels) == pytest.approx(losses.mean(), rel=1e-12)
    weighted = (weights * losses).sum() / weights.sum()
    assert metrics.log_loss(p, labels, weights) == pytest.approx(weighted, rel=1e-12)
    share = (weights @ labels) / weights.sum()
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    got = metrics.normalized_entropy(p, labels, weights)
    assert got == pytest.approx(weighted / entropy, rel=1e-12)
    constant = np.full(50, labels.mean())
    assert metrics.normalized_entropy(constant, labels) == pytest.approx(1, rel=1e-12)
    got = metrics.calibration(p, labels, weights)
    assert got == pytest.approx((weights @ p) / (weights @ labels), rel=1e-12)
    # A sure mistake costs what the dtype can tell from 1.
    assert metrics.log_loss(np.ones(1, np.float32), [0]) == pytest.approx(
        23 * math.log(2)
    )
    assert metrics.log_loss([1.0], [0]) == pytest.approx(52 * math.log(2))
    assert metrics.log_loss([1, 0], [1, 0]) == pytest.approx(0, abs=1e-15)


def test_errors():
    for function, arguments, message in (
        (metrics.auc, ([0.1, 0.2], [1, 1]), "of 2 labels 2 are clicks"),
        (metrics.auc, ([], []), "needs both classes, but of 0 labels"),
        (metrics.auc, ([0.1, 0.2], [1, 0], [1, 0]), "examples of weight 0 do not"),
        (metrics.auc, ([0.1, np.nan], [1, 0]), "scores must not be NaN, .* example 1"),
        (
            metrics.auc,
            ([0.1, 0.2], [1, 2]),
            "labels must be 0 or 1, .* example 1 has 2",
        ),
        (metrics.auc, ([0.1, 0.2], [1, np.nan]), "labels must be 0 or 1"),
        (metrics.auc, ([0.1, 0.2], [1, 0], [1, -1]), "weights must be finite and not"),
        (
            metrics.auc,
            ([[0.1]], [1]),
            r"scores must have one dimension, got .*\(1, 1\)",
        ),
        (metrics.auc, ([0.1], [1, 0]), r"labels must have shape \(1,\), got .*\(2,\)"),
        (metrics.group_auc, ([1, 2], [0, 1], [1, 2]), "no group of 2 has both classes"),
        (metrics.group_auc, ([1, 2], [0, 1], [1]), r"groups must have shape \(2,\)"),
        (metrics.log_loss, ([0.5, 1.5], [0, 1]), r"in \[0, 1\], but example 1 has 1.5"),
        (metrics.log_loss, ([], []), "at least one example"),
        (
            metrics.normalized_entropy,
            ([0.5], [1]),
            "both classes, but all labels are 1",
        ),
        (metrics.calibration, ([0.5], [0]), "at least one click"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
