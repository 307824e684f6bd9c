"""Compares a click model, or a single column, with simple predictions, to warn of errors."""

from __future__ import annotations

import dataclasses

import numpy as np

from sparsejax import metrics
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.kinds.clicks.model import ClickModel
from sparsejax.kinds.clicks.regression import fit_regression, regression_logits
from sparsejax.kinds.clicks.scores import Clicks, logits_of
from sparsejax.sparse import CSR

# With fewer examples the difference would not be significant.
LEAST_ROWS = 500
# Numbers of examples for fitting and for measuring: enough to detect a bad model, in a second.
_FITTED, _MEASURED = 40_000, 20_000
# A column that reaches this AUC alone probably leaks the label.
_TELLING = 0.999


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Metrics of a model and of simple predictions on the same examples.

    Attributes:
      examples: number of examples.
      log_loss: log losses of the model, of a constant prediction (the share of clicks), and of a
          logistic regression.
      auc: AUC of the model and of a logistic regression.
      errors: standard errors of the differences of the model's log loss from those of the
        constant share and of the regression.
    """

    examples: int
    log_loss: tuple[float, float, float]
    auc: tuple[float, float]
    errors: tuple[float, float]

    def warning(self, what: str) -> str | None:
        """A warning if the model is not significantly better than simple predictions; else None.

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
    """Compares a model with simple predictions.

    None if there are too few examples, or if the model was trained with another loss or other
    columns.

    The logistic regression has L2 regularization, and is fitted on at most 40,000 training
    examples. Without validation data, both are measured on other training examples. The model was
    trained on these and the regression was not: a model that is still worse has learned too
    little.

    Args:
      model: model to compare.
      train: the examples that it was trained on.
      validation: examples that it was not trained on, or None.
    """
    # Other models are trained with another loss than the log loss of the regression.
    if not train.schema.is_plain:
        return None
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
        regression_logits(fit_regression(fitted), measured),
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


def _some(clicks: Clicks, count: int, *, seed: int) -> ClickDataset:
    """At most `count` examples in random order; only the first chunk of scanned clicks is read."""
    if not isinstance(clicks, ClickDataset):
        clicks = next(clicks.chunks())
    rng = np.random.default_rng(seed)
    return clicks.rows(rng.permutation(clicks.num_rows)[:count])


def warning_of_columns(clicks: Clicks) -> str | None:
    """A warning if a single column predicts the labels almost perfectly; else None.

    A dense column is used as a score, in either direction. The score of an id is its share of
    clicks. At most 60,000 examples are used: the shares come from two thirds of them, the AUC is
    measured on the other third. So an id that occurs once predicts nothing.
    """
    if several := clicks.schema.several:
        if not isinstance(clicks, ClickDataset):
            clicks = next(clicks.chunks())
        binary = [name for name, c in several.items() if c.loss == "binary"]
        said = {name: warning_of_columns(clicks.of_label(name)) for name in binary}
        return "; ".join(f"label {n!r}: {t}" for n, t in said.items() if t) or None
    some = _some(clicks, _FITTED + _MEASURED, seed=0)
    third = some.num_rows // 3
    measured, fitted = some.rows(slice(third)), some.rows(slice(third, None))
    labels, known = measured.labels.astype(np.float64), fitted.labels
    if third < LEAST_ROWS or len(np.unique(labels)) < 2 or len(np.unique(known)) < 2:
        return None
    found = {}
    for column, name in enumerate(some.schema.dense):
        alone = metrics.auc(measured.dense[:, column], labels)
        found[name] = max(alone, 1 - alone)
    for name in some.schema.ids:
        found[name] = metrics.auc(_shares(fitted, measured, name), labels)
    telling = {name: alone for name, alone in found.items() if alone > _TELLING}
    if not telling:
        return None
    listed = ", ".join(f"{name!r} (AUC {alone:.4f})" for name, alone in telling.items())
    return (
        f"a single column orders {len(labels):,} training examples nearly as their label "
        f"does: {listed}. If it is known only after the click, the model is of no use: leave "
        "it out of the schema"
    )


def _shares(fitted: ClickDataset, measured: ClickDataset, name: str) -> np.ndarray:
    """`[examples]` scores: the mean click rate of an example's ids, each rate from `fitted`."""
    ids, rows = _entries(fitted, name)
    if not len(ids):
        return np.full(measured.num_rows, fitted.labels.mean())
    unique, where = np.unique(ids, return_inverse=True)
    share = float(fitted.labels.mean())
    clicked = np.bincount(where, fitted.labels[rows], len(unique)) + share
    shares = np.append(clicked / (np.bincount(where, minlength=len(unique)) + 1), share)
    ids, rows = _entries(measured, name)
    at = np.searchsorted(unique, ids)
    at = np.where(np.append(unique, unique[-1:])[at] == ids, at, len(unique))
    sums = np.bincount(rows, shares[at], measured.num_rows)
    counts = np.bincount(rows, minlength=measured.num_rows)
    return np.where(counts > 0, sums / np.maximum(counts, 1), share)


def _entries(clicks: ClickDataset, name: str) -> tuple[np.ndarray, np.ndarray]:
    """An array with all ids of a feature, and an array with the example number of each id."""
    ids = clicks.ids[name]
    if not isinstance(ids, CSR):
        return np.asarray(ids), np.arange(clicks.num_rows)
    lengths = np.diff(np.asarray(ids.indptr))
    return np.asarray(ids.indices)[: lengths.sum()], np.repeat(
        np.arange(clicks.num_rows), lengths
    )
