"""Metrics of recommendations on held-out data."""

from __future__ import annotations

from sparsejax.kinds.kind import kind_of
from sparsejax.options.measuring import Measure
from sparsejax.options.option import verb


@verb(Measure)
def evaluate(asked: Measure) -> dict[str, float]:
    """Measures how well a model finds held-out items when it ranks all items for each row.

    >>> measured = evaluate(model, train, heldout, k=20)
    >>> list(measured)[:3], "popularity_recall@20" in measured
    (['recall@20', 'truncated_recall@20', 'ndcg@20'], True)

    Most metrics are means over the rows with at least one held-out entry. "coverage",
    "gini" and "mean_popularity" describe the lists of all these rows together; an item's
    popularity is the share of the rows of `popularity` that have it. `sparsejax.metrics`
    defines the metrics.

    The baseline recommends the most popular items to every row. It excludes the same items as the
    model does, and never recommends an item that no row has.

    An item is unknown if the training data has no entry of it, even if the vocabulary has it. A
    held-out entry of an unknown item counts as missed, unless the vocabulary has the item and the
    model finds it. "users" is the number of rows in the means. "users_unknown" is the number of
    rows whose held-out items are all unknown. "entries_unknown" is the number of held-out entries
    of unknown items.

    To measure on rows that the model was not trained on (strong generalisation), show it a part of
    their entries, and hold out the other part::

        train, others = data.split_rows(0.9, seed=0)
        evaluate(model, others, fold_in=0.8, popularity=train)

    For histories it measures whether the held-out items are ranked high among all possible next
    items. If items repeat, do not exclude items of the history: `exclude=None`::

        train, heldout = histories.split_last()
        evaluate(model, train, heldout, k=10)

    Labels of events, see `EventSchema`, are measured on the first held-out event of each row,
    given its item, by the metrics of clicks. There are "auc/action=buy" and similar metrics for
    the ten most frequent categories of a column, "auc/action" for a hashed column, and for numbers
    "squared_error/seconds", or "quantile_loss/seconds" and "share_below/seconds", the share of
    numbers that do not exceed the prediction.

    For a click model it measures "auc", "log_loss", "normalized_entropy" and "calibration" on a
    `ClickDataset` or `ScannedClicks`, whose labels the model should predict. `groups` adds
    "group_auc", the mean AUC within groups, and "groups", the number of groups::

        evaluate(model, clicks, groups="user")

    Raises:
      FloatingPointError: a score is NaN; the message names the row.
      TypeError: `inputs`, `heldout` or `exclude` has a type that is not supported, or the
        model cannot score candidates.
      ValueError: nothing is held out, or all of it is excluded. An item name is unknown. No
          held-out row is in `inputs`, or one is missing and an input is dense. A row has no
          candidates. An argument does not match the model or another argument, or does not apply
          to this kind of data.
    """
    kind = kind_of(asked.inputs)
    asked.check_kind(kind.name)
    return kind.evaluate(asked)
