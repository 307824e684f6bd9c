"""Paired bootstrap intervals of differences."""

import numpy as np
import pytest
import scipy.stats

from sparsejax import metrics


def measured(names, **figures) -> metrics.Measured:
    means = {name: np.asarray(values, float) for name, values in figures.items()}
    names = None if names is None else np.array(names, np.dtypes.StringDType())
    rows = metrics.Rows(names, means)
    return metrics.Measured({n: float(v.mean()) for n, v in means.items()}, rows)


def of_clicks(logits, labels) -> metrics.Measured:
    return metrics.Measured(
        {}, metrics.Rows.of_clicks(*map(np.asarray, (logits, labels)))
    )


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(0)
    one, other = rng.beta(1, 3, (2, 400))
    other = np.where(rng.random(400) < 0.7, one, other)  # rows are alike for both
    names = [f"u{i}" for i in range(400)]
    order = rng.permutation(400)
    shuffled = measured([names[i] for i in order], recall=other[order])
    found = metrics.compare(measured(names, recall=one), shuffled, resamples=4000)
    interval = scipy.stats.bootstrap(
        (one, other),
        lambda a, b, axis: np.mean(b - a, axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert found["recall"].difference == pytest.approx(other.mean() - one.mean())
    width = interval.high - interval.low
    np.testing.assert_allclose(
        [found["recall"].low, found["recall"].high], interval, atol=width / 15
    )
    # Unpaired, the luck of the rows would not cancel.
    spread = 2 * 1.96 * np.sqrt((one.var() + other.var()) / 400)
    assert width < 0.8 * spread
    # The seed is fixed.
    again = metrics.compare(measured(names, recall=one), shuffled, resamples=4000)
    assert again == found


def test_auc_of_resamples_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    labels = (rng.random(60) < 0.4).astype(np.float32)
    one, other = (rng.normal(size=60).round(1) + s * labels for s in (0.4, 2))
    found = metrics.compare(
        of_clicks(one, labels), of_clicks(other, labels), resamples=200
    )
    assert list(found) == ["log_loss", "auc"]
    drawn, rng = [], np.random.default_rng(0)
    for _ in range(200):
        weights = np.bincount(rng.integers(0, 60, 60), minlength=60)
        a, b = (metrics.auc(s, labels, weights) for s in (one, other))
        drawn.append(b - a)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert found["auc"].low == pytest.approx(low)
    assert found["auc"].high == pytest.approx(high)
    assert found["auc"].is_clear and found["auc"].first == metrics.auc(one, labels)
    back = metrics.compare(
        of_clicks(other, labels), of_clicks(one, labels), resamples=200
    )["auc"]
    assert back.high < 0 and back.is_clear
    p = 1 / (1 + np.exp(-other))
    assert found["log_loss"].second == pytest.approx(metrics.log_loss(p, labels))


def test_the_same_model_differs_by_nothing():
    one = measured(["a", "b", "c"], recall=[0, 1, 1], ndcg=[0, 0.5, 1])
    found = metrics.compare(one, one)
    assert [(d.low, d.high, d.is_clear) for d in found.values()] == [(0, 0, False)] * 2
    assert "may be chance" in str(found) and "paired over 3 rows" in str(found)


def test_what_cannot_be_compared():
    one = measured(["a", "b"], recall=[0, 1])
    with pytest.raises(TypeError, match="keep_rows=True"):
        metrics.compare({"recall": 0.5}, one)
    with pytest.raises(ValueError, match="2 rows and the second on 3"):
        metrics.compare(one, measured(["a", "b", "c"], recall=[0, 1, 1]))
    with pytest.raises(ValueError, match="on other rows"):
        metrics.compare(one, measured(["a", "c"], recall=[0, 1]))
    with pytest.raises(ValueError, match="same cut-offs"):
        metrics.compare(one, measured(["a", "b"], ndcg=[0, 1]))
    with pytest.raises(ValueError, match="labels differ"):
        metrics.compare(of_clicks([0, 1], [0, 1]), of_clicks([0, 1], [1, 0]))
    parts = {"click": of_clicks([0, 1], [0, 1]).rows}
    several = metrics.Measured({}, metrics.Rows(None, {}, parts=parts))
    with pytest.raises(ValueError, match="compare models of equal labels"):
        metrics.compare(several, of_clicks([0, 1], [0, 1]))
    with pytest.raises(ValueError, match="confidence=1"):
        metrics.compare(one, one, confidence=1)
