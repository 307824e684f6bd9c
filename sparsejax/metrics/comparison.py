"""Comparison of two measurements by paired bootstrap intervals.

Let `a_i` and `b_i` be the figures of row i, such as the recalls of a user by two models. A
resample draws n of the n rows with replacement, the same rows for both models, and computes
the difference of both metrics over these rows. The interval reaches from
the quantile `(1 - c) / 2` to `(1 + c) / 2` of all resamples (the percentile method of
Efron, 1979). Luck that both models share, such as an easy user, affects both metrics and
cancels in the difference.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

_AUC = "auc"

# A function that computes the AUC from weights of the rows.
type Area = Callable[[np.ndarray], float]


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The figures of each row from which metrics were computed.

    Attributes:
      names: `[rows]` names of the rows; None if rows are identified by position only.
      means: for each metric that is a mean over rows, its figures `[rows]`.
      scores: `[rows]` scores of clicks, by which the AUC orders examples; None if there is
        no AUC.
      labels: `[rows]` labels of clicks, 0 or 1.
      parts: figures for each of several labels, by the label's name. Then the other attributes
        are empty.
    """

    names: np.ndarray | None
    means: Mapping[str, Float[np.ndarray, "rows"]]
    scores: np.ndarray | None = None
    labels: np.ndarray | None = None
    parts: Mapping[str, Rows] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_clicks(cls, logits: np.ndarray, labels: np.ndarray) -> Rows:
        """Makes figures of clicks: the log loss of each example; scores and labels for the AUC.

        Args:
          logits: `[rows]`, scores of the examples before the sigmoid.
          labels: `[rows]`, 1 for a click, else 0.
        """
        x = np.asarray(logits, np.float64)
        # -log sigmoid(x) for a click, -log sigmoid(-x) for a non-click.
        losses = np.logaddexp(0, np.where(np.asarray(labels) > 0, -x, x))
        return cls(None, {"log_loss": losses}, scores=x, labels=np.asarray(labels))

    def __len__(self) -> int:
        if self.parts:
            return max(map(len, self.parts.values()))
        return len(next(iter(self.means.values())))

    @property
    def area(self) -> Area | None:
        """The AUC as a function of weights `[rows]`; None if there is no AUC."""
        if self.scores is None or self.labels is None:
            return None
        if len(np.unique(self.labels)) < 2:
            return None
        return _area(self.scores, self.labels)


class Measured(dict[str, float]):
    """Metrics by name, together with the figures of each row.

    Attributes:
      rows: the figures of each row.
    """

    def __init__(self, metrics: Mapping[str, float], rows: Rows):
        super().__init__(metrics)
        self.rows = rows

    def intervals(
        self, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> dict[str, tuple[float, float]]:
        """The interval `(low, high)` of each metric if other rows had been measured by chance.

        >>> measured = evaluate(model, train, heldout, keep_rows=True)
        >>> low, high = measured.intervals()["recall@20"]
        >>> low < measured["recall@20"] < high
        True

        The interval is the bootstrap of `compare`, for one measurement. Even if two such intervals
        overlap, the measurements may differ: use `compare`.

        Args:
          confidence: share of the resamples inside the interval.
          resamples: number of resamples.
          seed: seed of the random resamples.

        Raises:
          ValueError: `confidence` is not between 0 and 1, or `resamples` is too small.
        """
        options = {"confidence": confidence, "resamples": resamples, "seed": seed}
        if self.rows.parts:
            return {
                f"{metric}/{name}": ends
                for name, rows in self.rows.parts.items()
                for metric, ends in Measured({}, rows).intervals(**options).items()
            }
        figures = np.stack([*self.rows.means.values()])
        areas = [] if (area := self.rows.area) is None else [area]
        ends = _quantiles(figures, areas, confidence, resamples, seed)
        names = [*self.rows.means, *([_AUC] if areas else [])]
        return {
            name: (float(low), float(high))
            for name, low, high in zip(names, *ends, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of a metric between two measurements.

    Attributes:
      first: the metric of the first measurement.
      second: the metric of the second measurement.
      low: lower end of the interval of `second - first`.
      high: upper end of the interval.
    """

    first: float
    second: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """The difference `second - first`."""
        return self.second - self.first

    @property
    def is_clear(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0


class Comparison(dict[str, Difference]):
    """A `Difference` for each metric. `print` shows a table.

    Attributes:
      rows: number of rows.
      confidence: share of the resamples inside an interval.
    """

    def __init__(
        self, found: Mapping[str, Difference], *, rows: int, confidence: float
    ):
        super().__init__(found)
        self.rows, self.confidence = rows, confidence

    def __str__(self) -> str:
        width = max(map(len, self))
        interval = f"{self.confidence:.0%} interval"
        lines = [
            f"{'':{width}}  {'first':>8}  {'second':>8}  {'change':>8}  {interval:>20}"
        ]
        for name, found in self.items():
            ends = f"[{found.low:+.4f}, {found.high:+.4f}]"
            lines.append(
                f"{name:{width}}  {found.first:>8.4f}  {found.second:>8.4f}  "
                f"{found.difference:>+8.4f}  {ends:>20}"
                f"{'' if found.is_clear else '  may be chance'}"
            )
        return "\n".join([*lines, f"paired over {self.rows:,} rows"])

    def to_json(self) -> str:
        """The differences as JSON."""
        found = {
            name: dataclasses.asdict(each) | {"difference": each.difference}
            for name, each in self.items()
        }
        return json.dumps(found)


def compare(
    first: Mapping[str, float],
    second: Mapping[str, float],
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Compares two measurements on the same rows, with paired bootstrap intervals.

    If an interval does not contain 0, the difference is larger than chance in the choice of
    rows explains. It says nothing about chance from the seed: for that, train with several seeds.

    >>> measured = evaluate(model, train, heldout, keep_rows=True)
    >>> popular = evaluate(baselines.popularity(train), train, heldout, keep_rows=True)
    >>> found = compare(popular, measured)
    >>> found["recall@20"].low > 0
    True

    The metrics that both measurements have are compared: means over rows; for clicks the log
    loss and the AUC; for several labels the metrics of each label in both. Rows are matched by
    name.

    Args:
      first: the result of `evaluate(..., keep_rows=True)` for one model.
      second: the result of `evaluate(..., keep_rows=True)` for another model, on the
        same held-out data.
      confidence: share of the resamples inside the interval.
      resamples: number of resamples.
      seed: seed of the random resamples.

    Raises:
      TypeError: a measurement has no figures of rows.
      ValueError: the rows differ, no metric is in both, or `confidence` or `resamples` is out
        of bounds.
    """
    one, other = _rows_of("first", first), _rows_of("second", second)
    options = {"confidence": confidence, "resamples": resamples, "seed": seed}
    if shared := [name for name in one.parts if name in other.parts]:
        found = {}
        for name in shared:
            pair = (Measured({}, rows.parts[name]) for rows in (one, other))
            of_label = compare(*pair, **options)
            found |= {f"{metric}/{name}": each for metric, each in of_label.items()}
        return Comparison(found, rows=len(one), confidence=confidence)
    places = _places(one, other)
    means = [name for name in one.means if name in other.means]
    if not means:
        raise ValueError("no metric is in both: measure with the same cut-offs k")
    pairs = {n: (one.means[n], other.means[n][places]) for n in means}
    changes = np.stack([b - a for a, b in pairs.values()])
    figures: dict[str, tuple[float, float]] = {
        n: (float(a.mean()), float(b.mean())) for n, (a, b) in pairs.items()
    }
    areas: list[Area] = []
    # Labels of a single class have no AUC.
    if (area := one.area) is not None and other.scores is not None:
        assert one.labels is not None
        areas = [area, _area(other.scores[places], one.labels)]
        every = np.ones(len(one))
        figures[_AUC] = areas[0](every), areas[1](every)
    by_auc = [lambda w: areas[1](w) - areas[0](w)] if areas else []
    ends = _quantiles(changes, by_auc, confidence, resamples, seed)
    found = {
        name: Difference(a, b, float(low), float(high))
        for (name, (a, b)), low, high in zip(figures.items(), *ends, strict=True)
    }
    return Comparison(found, rows=len(one), confidence=confidence)


def _quantiles(
    figures: np.ndarray,
    areas: Sequence[Area],
    confidence: float,
    resamples: int,
    seed: int,
) -> np.ndarray:
    """The ends of each metric's interval, `[2, metrics]`.

    Args:
      figures: `[means, rows]` figures of the metrics that are means.
      areas: metrics that are functions of weights of the rows.
      confidence: share of the resamples inside the interval.
      resamples: number of resamples.
      seed: seed of the random resamples.

    Raises:
      ValueError: `confidence` is not between 0 and 1, or `resamples` is too small.
    """
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(
            "confidence is between 0 and 1 and resamples at least 1, got "
            f"confidence={confidence} and resamples={resamples}"
        )
    means, count = figures.shape
    drawn = np.empty((resamples, means + len(areas)))
    rng = np.random.default_rng(seed)
    for i in range(resamples):
        weights = np.bincount(rng.integers(0, count, count), minlength=count)
        drawn[i, :means] = figures @ weights / count
        drawn[i, means:] = [area(weights) for area in areas]
    # The AUC is NaN for a resample that has a single class.
    return np.nanquantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)


def _rows_of(name: str, measured: Any) -> Rows:
    """The figures of each row in a measurement; raises TypeError if it has none."""
    if not isinstance(measured, Measured):
        raise TypeError(
            f"{name} has no figures of rows: measure by evaluate(..., keep_rows=True)"
        )
    return measured.rows


def _places(one: Rows, other: Rows) -> np.ndarray:
    """The index in `other` of each row of `one`, `[rows]`.

    Raises:
      ValueError: the rows differ.
    """
    if one.parts or other.parts:
        raise ValueError(
            f"the first was measured on the labels {list(one.parts)}, the second on "
            f"{list(other.parts)}: compare models of equal labels"
        )
    if len(one) != len(other) or (one.names is None) != (other.names is None):
        raise ValueError(
            f"the first was measured on {len(one):,} rows and the second on {len(other):,}: "
            "measure both on the same held-out data"
        )
    if one.names is None or other.names is None:
        if not _same(one.labels, other.labels):
            raise ValueError(
                "the labels differ: measure both on the same examples, in one order"
            )
        return np.arange(len(one))
    ours, theirs = (
        np.argsort(names, kind="stable") for names in (one.names, other.names)
    )
    if not np.array_equal(one.names[ours], other.names[theirs]):
        raise ValueError(
            "both were measured on other rows: measure them on the same held-out data"
        )
    places = np.empty(len(one), np.int64)
    places[ours] = theirs
    return places


def _same(labels: np.ndarray | None, others: np.ndarray | None) -> bool:
    """Whether both label arrays are equal, or both are None."""
    if labels is None or others is None:
        return labels is others
    return np.array_equal(labels, others)


def _area(scores: np.ndarray, labels: np.ndarray) -> Area:
    """Makes the function from weights `[n]` to the AUC; sorts the scores once."""
    order = np.argsort(scores, kind="stable")
    ordered, clicked = scores[order], labels[order] > 0
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))

    def area(weights: np.ndarray) -> float:
        w = weights[order].astype(np.float64)
        clicks = np.add.reduceat(np.where(clicked, w, 0), starts)
        others = np.add.reduceat(np.where(clicked, 0, w), starts)
        pairs = clicks.sum() * others.sum()
        if not pairs:
            return np.nan
        below = np.cumsum(others) - others
        return float(np.sum(clicks * (below + others / 2)) / pairs)

    return area
