"""How good recommendations are: metrics of what was held out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from jax.typing import ArrayLike

from sparsejax.data import SparseDataset
from sparsejax.data.reading.histories import Unordered
from sparsejax.data.reading.sources import Source, Sources
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.kinds.clicks.model import ClickModel
from sparsejax.kinds.histories.next_items import (
    HistoryModel,
)
from sparsejax.kinds.kind import OfKind, kind_of, refused, used
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Evaluate
from sparsejax.options.option import RANKING


@refused(
    "inputs",
    like=Evaluate,
    inputs=RANKING + ("clicks",),
    heldout=RANKING,
    features=("items",),
    exclude=RANKING,
    popularity=RANKING,
)
def evaluate(
    model: Recommender | HistoryModel | ClickModel,
    inputs: Sources | OfKind,
    heldout: Source | OfKind | None = None,
    *,
    k: int | Sequence[int] = 20,
    fold_in: float | None = None,
    features: SparseDataset | Iterable[object] | None = None,
    seed: int | None = None,
    exclude: Unordered = "inputs",
    exclude_items: Iterable[str] | np.ndarray = (),
    only_items: Iterable[str] | np.ndarray | None = None,
    unknown: Literal["miss", "skip"] = "miss",
    unknown_users: Literal["count", "skip"] = "count",
    candidates: Source | OfKind | None = None,
    popularity: Unordered = "inputs",
    groups: str | ArrayLike | None = None,
    by: Literal["entries"] | None = None,
    optimizer: Optimizer | None = None,
    batch_size: int | None = None,
    keep_rows: bool = False,
) -> dict[str, float]:
    """How well the model finds held-out items, ranking all items for each row.

    >>> measured = evaluate(model, train, heldout, k=20)
    >>> list(measured)[:3], "popularity_recall@20" in measured
    (['recall@20', 'truncated_recall@20', 'ndcg@20'], True)

    Most metrics are means over the rows with at least one held-out entry. "coverage",
    "gini" and "mean_popularity" describe the lists of all these rows together; an item's
    popularity is the share of the rows of `popularity` that have it. `sparsejax.metrics`
    defines the metrics.

    The baseline recommends the most popular items to everyone. It leaves out the same
    items as the model does, and it never recommends an item that no row has.

    An item is unknown if the training data has no entry of it. The vocabulary may have
    it or not. A held-out entry of an unknown item counts as missed, unless the vocabulary
    has the item and the model finds it. "users" is the number of rows in the means.
    "users_unknown" is the number of rows whose held-out items are all unknown.
    "entries_unknown" is the number of held-out entries of unknown items.

    To measure on rows that the model was not trained on (strong generalisation), show it
    a part of their entries, and hold out the rest::

        train, others = data.split_rows(0.9, seed=0)
        evaluate(model, others, fold_in=0.8, popularity=train)

    For histories it measures whether the held-out items are ranked high among those that may
    come next. Where items repeat, rank those that a history has, too: `exclude=None`::

        train, heldout = histories.split_last()
        evaluate(model, train, heldout, k=10)

    For a click model it measures "auc", "log_loss", "normalized_entropy" and "calibration"
    on a `ClickDataset` or `ScannedClicks`. Labels are what it should predict. `groups` adds
    "group_auc", the mean AUC within groups, and "groups", their number::

        evaluate(model, clicks, groups="user")

    Args:
      model: a `FeedForward`, or a module with `num_features`, `num_items` and `top_k`; for
        histories a `SASRec`, or another `HistoryModel`; for clicks a click model, see
        `predict`.
      inputs: `[rows, features]`, what the model is shown; or several by name, see `fit`; or
        histories, without `fold_in`; or clicks, with `groups`, `optimizer` and `batch_size` alone.
      heldout: `[rows, items]`, what it should find. Two data sets are matched by row
        name; otherwise row `i` belongs to row `i`. Of histories with weights, those entries
        whose weight is positive.
      k: cut-off, or several.
      fold_in: used in place of `heldout`. It is the share of each row's entries in
        `inputs`, a `SparseDataset`, that the model is shown; see `SparseDataset.split`.
      features: used with `fold_in`, where `inputs` were read with a vocabulary of their
        own: the names of the model's features, or a data set with them. Entries of other
        features are left out after the choice, so they count as unknown.
      seed: of the choice that `fold_in` makes; 0 by default.
      exclude: `[rows, items]`, what is never recommended, see `recommend`. The default is
        what the row has in `inputs`. Where there are several inputs, name one, here and
        below. Held-out entries that are excluded count as missed, and a warning gives
        their share. None ranks all items.
      exclude_items: names of items that nobody is recommended, such as those sold out, or
        their ids. The names are those of `heldout`. The baseline leaves them out, too, and
        "coverage" and "gini" are over the others. Held-out entries of these items count as
        missed, as those that are excluded do, and a warning gives their share.
      only_items: rank only these.
      unknown: "miss" counts held-out entries of unknown items as described above. "skip"
        leaves them out, and with them the rows that have no others.
      unknown_users: of rows that have no entry in `inputs`, or are not in it. "count" shows
        the model an empty row for each, as if they were in `inputs`: they are in the means.
        "skip" leaves them out. "users_new" is their number.
      candidates: `[rows, items]`: for each row, rank only these items and its held-out
        ones, for example one held-out item among 100 others. Unknown items are left out of
        both, and a warning says how many of these items are. Rows are matched as those
        of `heldout`. The model also needs `item_scores`; a `HistoryModel`
        `item_scores(histories, ids)`, with `times=` if it uses them.
      popularity: `[any rows, items]`, what the baseline counts, `inputs` by default. If
        the model was not trained on these rows, name the training data. None leaves out
        the baseline and "mean_popularity". This is also the training data that decides
        which items are known. With None the inputs decide, if they are excluded. With
        `fold_in` the inputs do not decide: then all items of the vocabulary are known,
        unless training data is named here.
      groups: for clicks: the name of a feature with one id an example, or `[examples]`
        numbers or text. A warning says if several categories of a feature have one id, as
        hashed ones may, and so are one group.
      by: "entries" measures items apart by the number of rows that have them in the training
        data, which `popularity` names: 0, 1 to 4, 5 to 9, 10 to 19, 20 and more. For each
        group there are "entries[1-4]", the number of held-out entries; "recall@20[1-4]" and
        "ndcg@20[1-4]", means over the rows with such entries, as if these alone were held
        out; and "share@20[1-4]", the share of the recommendations that are of the group.
        Items that the vocabulary lacks are in no group.
      optimizer: see `recommend`.
      batch_size: rows scored at a time; by default 512, of clicks 8192. Take fewer where a
        model of your own, whose `top_k` does not take `excluded`, excludes very many items.
      keep_rows: keep the figures of each row, or of each example of clicks, for `compare`:
        the result is then a `sparsejax.metrics.Measured`.

    Raises:
      FloatingPointError: a score is NaN; the message names the row.
      TypeError: `inputs`, `heldout` or `exclude` has a type that is not supported, or the
        model cannot score candidates.
      ValueError: nothing is held out, or all of it is excluded. There is no item of a name.
        No held-out row is in `inputs`, or one is not and an input is dense. A row has no
        candidates. An argument does not fit the model or another argument, or this kind of
        data has no use for it.
    """
    kind = kind_of(inputs)
    options = {
        "heldout": heldout,
        "k": k,
        "fold_in": fold_in,
        "features": features,
        "seed": seed,
        "exclude": exclude,
        "exclude_items": exclude_items,
        "only_items": only_items,
        "unknown": unknown,
        "unknown_users": unknown_users,
        "candidates": candidates,
        "popularity": popularity,
        "groups": groups,
        "by": by,
        "optimizer": optimizer,
        "keep_rows": keep_rows,
        "batch_size": kind.defaults.scored if batch_size is None else batch_size,
    }
    return kind.evaluate(model, inputs, **used(kind, evaluate, options))
