"""Whether a click model is better than simple predictions of the same examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse

from sparsejax import metrics
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.kinds.clicks.model import ClickModel
from sparsejax.kinds.clicks.scores import Clicks, logits_of
from sparsejax.sparse import CSR

# With fewer examples the figures say too little.
LEAST_ROWS = 500
# Examples that are fitted and measured: enough to see a bad model, in about a second.
_FITTED, _MEASURED = 40_000, 20_000
# Variances of the weights of the regression, of which held-out examples choose one.
_VARIANCES = 0.1, 1.0
_ITERATIONS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Figures of a model and of simple predictions, on the same examples.

    Attributes:
      examples: number of examples.
      log_loss: of the model, of a constant share of clicks, and of a logistic regression.
      auc: of the model, and of a logistic regression.
      errors: standard errors: of the differences of the model's log loss from those of the
        constant share and of the regression.
    """

    examples: int
    log_loss: tuple[float, float, float]
    auc: tuple[float, float]
    errors: tuple[float, float]

    def warning(self, what: str) -> str | None:
        """A sentence if the model is no better, by more than chance; else None.

        Args:
          what: kind of the examples, such as "validation".
        """
        own, constant, linear = self.log_loss
        advice = "; the defaults suit most data, else try another learning_rate, batch_size, "
        advice += "num_epochs or weight_decay, or give rare categories no id: min_count"
        of = f"on {self.examples:,} {what} examples"
        if self.auc[0] < self.auc[1] and own > linear + 2 * self.errors[1]:
            return (
                f"the model is worse than a logistic regression of the same columns {of}: AUC "
                f"{self.auc[0]:.3f} and {self.auc[1]:.3f}, log loss {own:.4f} and {linear:.4f}"
                f"{advice}"
            )
        if own > constant + 2 * self.errors[0]:
            return (
                f"the model is worse than predicting the share of clicks for all {of}: log loss "
                f"{own:.4f} and {constant:.4f}{advice}"
            )
        return None


def compared(
    model: ClickModel, train: Clicks, validation: Clicks | None
) -> Comparison | None:
    """A model beside simple predictions; None if there are too few examples to say.

    The logistic regression has L2 regularization, and is fitted on at most 40,000 of the
    training examples. Without validation data, the model is measured on others of the
    training examples, which it has seen and the regression has not: if it is worse even so,
    it has learned too little.

    Args:
      model: the model.
      train: the examples that it was trained on.
      validation: examples that it was not trained on, or None.
    """
    fitted = _some(train, _FITTED + (_MEASURED if validation is None else 0), seed=0)
    if validation is None:
        third = fitted.num_rows // 3
        measured = fitted.rows(slice(third))
        fitted = fitted.rows(slice(third, None))
    else:
        measured = _some(validation, _MEASURED, seed=1)
    if measured.num_rows < LEAST_ROWS or fitted.num_rows < LEAST_ROWS:
        return None
    labels = measured.labels.astype(np.float64)
    if len(np.unique(labels)) < 2 or len(np.unique(fitted.labels)) < 2:
        return None
    share = float(fitted.labels.mean())
    scores = [
        logits_of(model, measured)[0].astype(np.float64),
        np.full(len(labels), np.log(share / (1 - share))),
        regression(fitted, measured),
    ]
    losses = [np.logaddexp(0, z) - labels * z for z in scores]
    differences = [losses[0] - losses[1], losses[0] - losses[2]]
    root = np.sqrt(len(labels))
    return Comparison(
        examples=len(labels),
        log_loss=(losses[0].mean(), losses[1].mean(), losses[2].mean()),
        auc=(metrics.auc(scores[0], labels), metrics.auc(scores[2], labels)),
        errors=(differences[0].std() / root, differences[1].std() / root),
    )


def regression(train: ClickDataset, test: ClickDataset) -> np.ndarray:
    """`[examples]` logits of `test` by a logistic regression that is fitted on `train`.

    Dense columns are standardized. Each category that `train` has is a column. A fifth of
    `train` chooses how much weights are regularized.
    """
    at, mean, deviation = _places(train)
    x, y = _matrix(train, at, mean, deviation), train.labels.astype(np.float64)
    chooses = np.arange(len(y)) % 5 == 0
    best, chosen = np.inf, _VARIANCES[0]
    for variance in _VARIANCES:
        w = _fitted(x[~chooses], y[~chooses], variance)
        z = x[chooses] @ w[:-1] + w[-1]
        loss = np.mean(np.logaddexp(0, z) - y[chooses] * z)
        if loss < best:
            best, chosen = loss, variance
    w = _fitted(x, y, chosen)
    return _matrix(test, at, mean, deviation) @ w[:-1] + w[-1]


def _fitted(x: Any, y: np.ndarray, variance: float) -> np.ndarray:
    """Weights and intercept of the least penalized log loss."""
    import scipy.optimize  # only this needs it
    import scipy.special

    xt = x.T.tocsr()

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        weights, z = w[:-1], x @ w[:-1] + w[-1]
        error = scipy.special.expit(z) - y
        value = np.sum(np.logaddexp(0, z) - y * z) + weights @ weights / (2 * variance)
        return value, np.append(xt @ error + weights / variance, error.sum())

    first = np.zeros(x.shape[1] + 1)
    options = {"maxiter": _ITERATIONS}
    return scipy.optimize.minimize(
        loss, first, jac=True, method="L-BFGS-B", options=options
    ).x


def _some(clicks: Clicks, count: int, *, seed: int) -> ClickDataset:
    """At most so many examples in random order; of scanned ones, of the first chunk."""
    if not isinstance(clicks, ClickDataset):
        clicks = next(clicks.chunks())
    rng = np.random.default_rng(seed)
    return clicks.rows(rng.permutation(clicks.num_rows)[:count])


def _places(
    train: ClickDataset,
) -> tuple[Mapping[str, np.ndarray], np.ndarray, np.ndarray]:
    """The ids of each feature, sorted; means and deviations of dense columns."""
    known = {name: np.unique(_entries(ids)[1]) for name, ids in train.ids.items()}
    dense = train.dense.astype(np.float64)
    deviation = dense.std(axis=0)
    return known, dense.mean(axis=0), np.where(deviation > 0, deviation, 1)


def _entries(ids: np.ndarray | CSR) -> tuple[np.ndarray, np.ndarray]:
    """The example and the id of each entry of a feature."""
    if not isinstance(ids, CSR):
        return np.arange(len(ids)), np.asarray(ids)
    indptr = np.asarray(ids.indptr)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return rows, np.asarray(ids.indices)[: indptr[-1]]


def _matrix(
    clicks: ClickDataset,
    known: Mapping[str, np.ndarray],
    mean: np.ndarray,
    deviation: np.ndarray,
) -> Any:
    """`[examples, columns]` CSR: standardized dense columns, then a column for each known id."""
    parts = [scipy.sparse.csr_array((clicks.dense - mean) / deviation)]
    for name, ids in clicks.ids.items():
        rows, found = _entries(ids)
        names = known[name]
        place = np.minimum(np.searchsorted(names, found), max(len(names) - 1, 0))
        is_known = names[place] == found if len(names) else np.zeros(len(found), bool)
        entries = (np.ones(int(is_known.sum())), (rows[is_known], place[is_known]))
        shape = (clicks.num_rows, len(names))
        parts.append(scipy.sparse.csr_array(entries, shape=shape))
    return scipy.sparse.hstack(parts, format="csr")
