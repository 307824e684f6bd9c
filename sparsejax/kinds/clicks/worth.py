"""Whether a click model is better than simple predictions of the same examples."""

from __future__ import annotations

import dataclasses

import numpy as np

from sparsejax import metrics
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.kinds.clicks.model import ClickModel
from sparsejax.kinds.clicks.regression import fit_regression, regression_logits
from sparsejax.kinds.clicks.scores import Clicks, logits_of

# With fewer examples the figures say too little.
LEAST_ROWS = 500
# Examples that are fitted and measured: enough to see a bad model, in about a second.
_FITTED, _MEASURED = 40_000, 20_000


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
    """At most so many examples in random order; of scanned ones, of the first chunk."""
    if not isinstance(clicks, ClickDataset):
        clicks = next(clicks.chunks())
    rng = np.random.default_rng(seed)
    return clicks.rows(rng.permutation(clicks.num_rows)[:count])
