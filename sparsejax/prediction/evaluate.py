"""How good recommendations are: metrics of what was held out."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
from jax.typing import ArrayLike

from sparsejax.data import SparseDataset
from sparsejax.data.clicks import ClickDataset
from sparsejax.data.names import find_names
from sparsejax.data.scan_clicks import ScannedClicks
from sparsejax.data.sequences import SequenceDataset
from sparsejax.data.sources import Inputs, Source, Sources
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.prediction.arguments import kind_of, refused
from sparsejax.prediction.click_scores import ClickModel, evaluate_clicks
from sparsejax.prediction.evaluation import INSIDE, Evaluation, Setup, prepare
from sparsejax.prediction.histories import Unordered, unordered
from sparsejax.prediction.next_items import (
    HistoryModel,
    NextItems,
    has_times,
    shown_of,
)
from sparsejax.prediction.recommender import Recommender


# `groups` of items and histories have no metric; `seed` and `features` go with `fold_in`.
@refused(
    "inputs",
    kind_of,
    {
        "clicks": (
            "heldout",
            "k",
            "fold_in",
            "features",
            "seed",
            "exclude",
            "unknown",
            "unknown_users",
            "candidates",
            "popularity",
        ),
        "histories": ("fold_in", "features", "seed", "candidates", "groups"),
        "items": ("groups",),
    },
)
def evaluate(
    model: Recommender | HistoryModel | ClickModel,
    inputs: Sources | SequenceDataset | ClickDataset | ScannedClicks,
    heldout: Source | SequenceDataset | None = None,
    *,
    k: int | Sequence[int] = 20,
    fold_in: float | None = None,
    features: SparseDataset | Iterable[object] | None = None,
    seed: int | None = None,
    exclude: Unordered = "inputs",
    unknown: Literal["miss", "skip"] = "miss",
    unknown_users: Literal["count", "skip"] = "count",
    candidates: Source | None = None,
    popularity: Unordered = "inputs",
    groups: str | ArrayLike | None = None,
    optimizer: Optimizer | None = None,
    batch_size: int | None = None,
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

    Of histories it measures whether the held-out items are ranked high among those that may
    come next. Where items repeat, rank those that a history has, too: `exclude=None`::

        train, heldout = histories.split_last()
        evaluate(model, train, heldout, k=10)

    Of a click model it measures "auc", "log_loss", "normalized_entropy" and "calibration"
    on a `ClickDataset` or `ScannedClicks`. Labels are what it should predict. `groups` adds
    "group_auc", the mean AUC within groups, and "groups", their number::

        evaluate(model, clicks, groups="user")

    Args:
      model: a `FeedForward`, or a module with `num_features`, `num_items` and `top_k`; for
        histories a `SASRec`, or another `HistoryModel`; for clicks a click model, see
        `predict_clicks`.
      inputs: `[rows, features]`, what the model is shown; or several by name, see `fit`; or
        histories, without `fold_in` and `candidates`; or clicks, with `groups`,
        `optimizer` and `batch_size` alone.
      heldout: `[rows, items]`, what it should find. Two data sets are matched by row
        name; otherwise row `i` belongs to row `i`.
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
      unknown: "miss" counts held-out entries of unknown items as described above. "skip"
        leaves them out, and with them the rows that have no others.
      unknown_users: of rows that have no entry in `inputs`, or are not in it. "count" shows
        the model an empty row for each, as if they were in `inputs`: they are in the means.
        "skip" leaves them out. "users_new" is their number.
      candidates: `[rows, items]`: for each row, rank only these items and its held-out
        ones, for example one held-out item among 100 others. Rows are matched as those
        of `heldout`. The model also needs `item_scores`.
      popularity: `[any rows, items]`, what the baseline counts, `inputs` by default. If
        the model was not trained on these rows, name the training data. None leaves out
        the baseline and "mean_popularity". This is also the training data that decides
        which items are known. With None the inputs decide, if they are excluded. With
        `fold_in` the inputs do not decide: then all items of the vocabulary are known,
        unless training data is named here.
      groups: for clicks: the name of a feature with one id an example, or `[examples]`
        numbers or text.
      optimizer: see `recommend`.
      batch_size: rows scored at a time; by default 512, of clicks 8192.

    Raises:
      FloatingPointError: a score is NaN; the message names the row.
      TypeError: `inputs`, `heldout` or `exclude` has a type that is not supported, or the
        model cannot score candidates.
      ValueError: nothing is held out, or all of it is excluded. No held-out row is in
        `inputs`, or one is not and an input is dense. A row has no candidates. An argument
        does not fit the model or another argument, or this kind of data has no use for it.
    """
    if isinstance(inputs, ClickDataset | ScannedClicks):
        return evaluate_clicks(
            cast(ClickModel, model),
            inputs,
            groups=groups,
            optimizer=optimizer,
            batch_size=8192 if batch_size is None else batch_size,
        )
    rows = 512 if batch_size is None else batch_size
    if isinstance(inputs, SequenceDataset):
        if heldout is None:
            raise ValueError("give heldout, as split_last makes it")
        options: dict[str, Any] = {"k": k, "exclude": exclude, "unknown": unknown}
        options["unknown_users"] = unknown_users
        options |= {"popularity": popularity, "batch_size": rows}
        prepared = prepared_sequences(model, inputs, heldout, **options)
        return prepared.run(
            NextItems(model, times=has_times(model, inputs)), optimizer=optimizer
        )
    if not isinstance(model, Recommender):
        raise TypeError(
            "items are ranked by a FeedForward, or a module with num_features, num_items and "
            f"top_k; got {type(model).__name__}. A click model takes a ClickDataset, a "
            "model of histories a SequenceDataset"
        )
    prepared = prepared_for(
        inputs,
        cast(Source | None, heldout),
        fold_in=fold_in,
        features=features,
        seed=seed,
        k=k,
        exclude=exclude,
        unknown=unknown,
        unknown_users=unknown_users,
        candidates=candidates,
        popularity=popularity,
        batch_size=rows,
    )
    return prepared.run(model, optimizer=optimizer)


def prepared_sequences(
    model: Any,
    inputs: SequenceDataset,
    heldout: Source | SequenceDataset,
    *,
    exclude: Unordered = "inputs",
    popularity: Unordered = "inputs",
    **setup: Any,
) -> Evaluation:
    """What `evaluate` does with histories before it runs the model, a `NextItems`.

    Arguments and errors are those of `evaluate`; `setup` are attributes of `Setup`.
    """
    chosen = Setup(
        exclude=unordered("exclude", exclude, inputs),
        popularity=unordered("popularity", popularity, inputs),
        **setup,
    )
    wanted = unordered("heldout", heldout, inputs)
    assert wanted is not None
    return prepare(shown_of(model, _with_new_rows(inputs, heldout)), wanted, chosen)


def _with_new_rows(
    inputs: SequenceDataset, heldout: Source | SequenceDataset
) -> SequenceDataset:
    """The inputs, with an empty history for each row that only `heldout` has."""
    if not isinstance(heldout, SparseDataset | SequenceDataset):
        return inputs
    names = heldout.row_names
    new = names[find_names(names, inputs.row_names) < 0]
    if not len(new) or len(new) == len(names):
        return inputs
    more = (0, len(new))
    left_out = inputs.left_out
    return dataclasses.replace(
        inputs,
        indptr=np.pad(inputs.indptr, more, mode="edge"),
        row_names=np.concatenate([inputs.row_names, new]),
        left_out=None if left_out is None else np.pad(left_out, more),
    )


def prepared_for(
    inputs: Sources,
    heldout: Source | None = None,
    *,
    fold_in: float | None = None,
    features: SparseDataset | Iterable[object] | None = None,
    seed: int | None = None,
    **setup: Any,
) -> Evaluation:
    """What `evaluate` does before it runs the model, so that several can be measured.

    Arguments and errors are those of `evaluate`; `setup` are attributes of `Setup`.
    """
    chosen = Setup(**setup, trained_on_inputs=fold_in is None)
    if fold_in is not None:
        inputs, heldout = _folded_in(inputs, heldout, fold_in, seed or 0, features)
    elif seed is not None:
        raise ValueError("seed is used only with fold_in: leave it out")
    elif features is not None:
        raise ValueError(
            "features is used only with fold_in; for other data call align_features"
        )
    elif heldout is None:
        raise ValueError("give heldout, or fold_in=... to hold out a part of inputs")
    return prepare(inputs, heldout, chosen)


def _folded_in(
    inputs: Sources | Inputs,
    heldout: Source | None,
    fold_in: float,
    seed: int,
    features: SparseDataset | Iterable[object] | None,
) -> tuple[SparseDataset, SparseDataset]:
    if heldout is not None:
        raise ValueError("give heldout or fold_in, not both: fold_in splits the inputs")
    if isinstance(inputs, Mapping):
        raise ValueError(
            "fold_in splits a single input; with several inputs, split one of them by "
            "shown, heldout = data.split(...)"
        )
    if not isinstance(inputs, SparseDataset):
        raise TypeError(
            "fold_in chooses entries by their names, so inputs must be a SparseDataset, "
            f"got {type(inputs).__name__}"
        )
    if inputs.left_out is not None:
        warnings.warn(
            f"{inputs.left_out.sum():,} entries of inputs were left out before the split "
            "and are in neither part; read inputs without features=..., and pass "
            "features=... to evaluate",
            skip_file_prefixes=INSIDE,
        )
    shown, rest = inputs.split(fold_in, seed=seed)
    if features is None:
        return shown, rest
    if not isinstance(features, SparseDataset):
        features = list(features)
    return shown.align_features(features), rest.align_features(features)
