"""Options to measure a model, to report on it and to correct it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sparsejax.options.option import (
    ANY_FILE,
    COLUMN,
    RANKING,
    SWITCH,
    Flag,
    Options,
    option,
)

if TYPE_CHECKING:
    import numpy as np
    from flax import nnx
    from jax.typing import ArrayLike

    from sparsejax.data import SparseDataset
    from sparsejax.data.reading.histories import Unordered
    from sparsejax.data.reading.sources import Source, Sources
    from sparsejax.engine.rank.recommender import Recommender
    from sparsejax.kinds.clicks.model import ClickModel
    from sparsejax.kinds.histories.next_items import HistoryModel
    from sparsejax.kinds.kind import OfKind
    from sparsejax.optimizers.optimizer import Optimizer
    from sparsejax.runs.report import Example

    Curve = Sequence[tuple[float, float]]

RANK_BY = Flag(
    value="LABEL",
    text="Label of the next event of histories, a category or a column of numbers: rank by the "
    "probability of the item times that of the category, or times the number, given the item. With "
    "--second-stage, the label of that run by which candidates are ranked.",
)
_NAMES = "{NAME[,NAME...],FILE}"
CUTOFFS = Flag(type=str | None, value="INT[,INT...]", default="20", read="numbers")


class Counting(Options):
    """How held-out interactions count.

    Attributes:
      k: Number of recommendations that count, or several numbers, such as 5,10.
      unknown: Held-out interactions with items that were not trained on: miss counts them as
        missed; skip ignores them, and users who have only such interactions.
      unknown_users: Users without interactions that the model is shown: count ranks items for
        them, too; skip ignores them.
    """

    heading = "counting"

    k: int | Sequence[int] = option(20, CUTOFFS, kinds=RANKING, least=1)
    unknown: Literal["miss", "skip"] = option("miss", kinds=RANKING)
    unknown_users: Literal["count", "skip"] = option("count", kinds=RANKING)


class Correcting(Options):
    """How the probabilities of a click model are corrected, see `sparsejax.calibrate`.

    Attributes:
      calibrate: Examples, none of which were trained on or dropped, by which the
        probabilities are corrected: a file, a table or a data set.
      method: platt keeps the order of the examples. isotonic follows any curve that rises, and
        needs thousands of examples.
      negatives_kept: The share of the examples without a click that the training data kept.
    """

    heading = "correcting"
    only_with: ClassVar = {"method": ("calibrate",)}

    calibrate: Any = option(None, ANY_FILE, kinds=("clicks",))
    method: Literal["platt", "isotonic"] | None = option(
        None, "platt", kinds=("clicks",)
    )
    negatives_kept: float | None = option(
        None, Flag(value="SHARE", default="1"), kinds=("clicks",)
    )


class Choosing(Options):
    """Which items may be ranked.

    Attributes:
      exclude_items: Items that are not ranked, such as those sold out. Held-out interactions
        with them count as missed.
      only_items: Rank only these items.
    """

    exclude_items: Iterable[str] | np.ndarray = option(
        (), Flag(type=str | None, value=_NAMES, read="names"), kinds=RANKING
    )
    only_items: Iterable[str] | np.ndarray | None = option(
        None,
        Flag(type=str | None, value=_NAMES, default="all", read="names"),
        kinds=RANKING,
    )


class Grouping(Options):
    """Groups of clicks that are measured apart.

    Attributes:
      groups: For clicks, a column of categories: also measure the AUC within each category. For
        histories, a column of users: also measure the users of each category separately.
    """

    groups: str | None = option(None, COLUMN, kinds=("clicks", "histories"))


class Ranking(Counting, Choosing):
    """How recommendations are measured.

    Attributes:
      candidates: For each row, rank only the items that it has in this data, and its held-out
          items.
      by: "entries" also measures items with few and with many interactions apart; "kinds"
        held-out events of each kind.
    """

    candidates: Any = option(
        None,
        Flag(type=str | None, value="FILE", default="rank all items"),
        kinds=RANKING,
    )
    by: Literal["entries", "kinds"] | None = option(None, kinds=RANKING, shell=False)


class Seen(Options):
    """Items that a row already has.

    Attributes:
      exclude_seen: Do not rank the items that a row already has.
    """

    heading = "counting"

    exclude_seen: bool = option(
        True,
        Flag(
            name="keep-seen",
            gives=False,
            text="Also rank the items that a row already has, for data in which interactions "
            "repeat. Otherwise repeated interactions count as missed.",
        ),
        kinds=RANKING,
    )


class Shown(Counting, Seen):
    """The interactions that a model is shown, and the held-out interactions that it should find.

    Attributes:
      heldout: Interactions that the model should find: a file, a table or data. Rows are
        matched by name. For a click model, the examples to measure on.
      inputs: Interactions that the model is shown; by default those that it was trained on.
    """

    heldout: Any = option(None, ANY_FILE)
    inputs: Any = option(None, ANY_FILE, kinds=RANKING)

    def counted(self) -> dict[str, Any]:
        """The arguments of `sparsejax.evaluate` that decide how interactions count."""
        shared = Ranking.option_names() & self.option_names() - {"candidates"}
        found = {name: getattr(self, name) for name in shared}
        return {**found, "exclude": "inputs" if self.exclude_seen else None}


class Kept(Options):
    """Metrics of single rows.

    Attributes:
      keep_rows: Keep the metrics of each row, for `compare`.
    """

    keep_rows: bool = option(False, shell=False)


class Ranked(Shown, Ranking, Kept):
    """Options to rank items and to measure the ranking on held-out interactions."""


class Held(Ranking, Kept):
    """Options of a measurement, shared by `Run.evaluate`, `evaluate` and the command.

    Attributes:
      fold_in: Share of each row's interactions that the model is shown, in place of held-out
        interactions. It should find the others. For rows that the model was not trained on.
      seed: Seed of the choice that fold_in=... makes.
      rank_by: For histories, a label of the next event by which items are ranked, as in
        `recommend`.
    """

    only_with: ClassVar = {"seed": ("fold_in",)}

    fold_in: float | None = option(None, kinds=("items",), above=0, below=1)
    seed: int | None = option(None, "0", kinds=("items",), least=0, below=2**32)
    rank_by: str | None = option(None, RANK_BY, kinds=("histories",))


class Evaluate(Shown, Held, Grouping, Correcting, kw_only=False):
    """How well a model finds held-out interactions, or predicts clicks.

    Attributes:
      heldout: Interactions that the model should find: a file, a table or data. Rows are
        matched by name. For a click model, the examples to measure on.
      history: More interactions that the model is shown and that are not recommended.
      popularity: Interactions that popularity is counted from. Its items count as those that
        the model was trained on.
      weighted: Weigh the examples of clicks by the column of weights that the schema names.
      baselines: Also measure models without training, made from the interactions that
        popularity is counted from: nearest items (ItemKNN), and EASE if its matrices fit in
        memory.
    """

    only_with: ClassVar = {"history": ("heldout",)}

    heldout: Any = option(None, ANY_FILE)
    _: dataclasses.KW_ONLY
    history: Collection[Any] = option(
        (),
        Flag(
            type=tuple[str, ...],
            value="FILE",
            repeated=True,
            text="More interactions that the model is shown and that are not recommended. May be given several times.",
        ),
        kinds=("items",),
    )
    popularity: Any = option(
        None, Flag(type=str | None, value="FILE", default="TRAIN"), kinds=("items",)
    )
    weighted: bool = option(False, SWITCH, kinds=("clicks",))
    baselines: bool = option(False, SWITCH, kinds=RANKING)
    by: Literal["entries", "kinds"] | None = option(
        None,
        Flag(
            name="by-entries",
            gives="entries",
            text="Also measure items with few and with many interactions in TRAIN apart.",
        ),
        kinds=RANKING,
    )


class Measure(Held, kw_only=False):
    """The arguments of a call of `evaluate`.

    Attributes:
      model: A `FeedForward`, or a module with `num_features`, `num_items` and `top_k`; for
        histories a `SASRec`, or another `HistoryModel`; for clicks a click model, as `predict`
        takes it.
      inputs: `[rows, features]`, the entries that the model is shown; or several by name, see
        `fit`; or histories, without `fold_in`; or clicks, with `groups`, `optimizer` and
        `batch_size` alone.
      heldout: `[rows, items]`, the entries that it should find. Two data sets are matched by
        row name; otherwise row `i` belongs to row `i`. For histories with weights, the entries
        whose weight is positive.
      k: Cut-off, or several.
      fold_in: Share of each row's entries in `inputs`, a `SparseDataset`, that the model is
        shown, in place of `heldout`; see `SparseDataset.split`.
      features: Names of the model's features, or a data set with them. Used with `fold_in`,
        where `inputs` were read with a vocabulary of their own. Entries of other features are
        dropped after the choice, so they count as unknown.
      seed: Seed of the choice that `fold_in` makes; 0 by default.
      exclude: `[rows, items]`, the items that are never recommended to a row, see `recommend`.
        By default these are the row's items in `inputs`. Where there are several inputs, name
        one, here and below. Held-out entries that are excluded count as missed, and a warning
        gives their share. None ranks all items.
      exclude_items: Names or ids of items that are recommended to no row, such as those sold
        out. The names are those of `heldout`. The baseline excludes them, too, and "coverage"
        and "gini" are over the other items. Held-out entries of these items count as missed,
        like all excluded ones, and a warning gives their share.
      only_items: Rank only these items.
      unknown: "miss" counts held-out entries of unknown items as described above. "skip"
        ignores them, and rows that have only such entries.
      unknown_users: Rows that have no entry in `inputs`, or are not in it. "count" shows the
        model an empty row for each, as if they were in `inputs`: they are in the means. "skip"
        ignores them. "users_new" is their number.
      candidates: `[rows, items]`: for each row, rank only these items and its held-out ones,
        for example one held-out item among 100 others. Unknown items are dropped from both, and
        a warning says how many candidates are unknown. Rows are matched as those of `heldout`.
        The model also needs `item_scores`; a `HistoryModel` `item_scores(histories, ids)`, with
        `times=` if it uses them.
      popularity: `[any rows, items]`, the entries that the baseline counts, by default
        `inputs`. If the model was not trained on these rows, name the training data. With None
        there is no baseline and no "mean_popularity". This is also the training data that
        decides which items are known. With None the inputs decide, if they are excluded. With
        `fold_in` the inputs do not decide: then all items of the vocabulary are known, unless
        training data is named here.
      groups: For clicks: the name of a feature with one id an example, or `[examples]`
        numbers or text. A warning says if several categories of a feature have one id, as
        hashed ones may, and so are one group. For histories: the name of a column of users;
        "ndcg@20[plan=paid]" and "recall@20[plan=paid]" are of the users of this category.
      weighted: For clicks: weigh each example by its weight; see `ClickSchema`.
      by: "entries" measures items apart by the number of rows that have them in the training
        data, which `popularity` names: 0, 1 to 4, 5 to 9, 10 to 19, 20 and more. For each
        group there are "entries[1-4]", the number of held-out entries; "recall@20[1-4]" and
        "ndcg@20[1-4]", means over the rows with such entries, as if these alone were held
        out; and "share@20[1-4]", the share of the recommendations that are of the group.
        Items that the vocabulary lacks are in no group. "kinds" measures held-out events of
        histories apart by their kind, if it is one that the training data has:
        "recall@20[action=buy]", where the kinds are in the column "action". `Run.evaluate` and
        the command do so by default where targets are of several kinds.
      optimizer: Optimizer of the model. Pass it while rows of the weights may not be up to
        date, as in `recommend`.
      batch_size: Number of rows scored at a time; by default 512, for clicks 8192. Take fewer
        if your own model's `top_k` does not take `excluded`, and very many items are excluded.
      keep_rows: Keep the figures of each row, or of each example of clicks, for `compare`:
        the result is then a `sparsejax.metrics.Measured`.
    """

    only_with: ClassVar = {"features": ("fold_in",)}

    model: Recommender | HistoryModel | ClickModel
    inputs: Sources | OfKind
    heldout: Source | OfKind | None = option(None, kinds=RANKING)
    _: dataclasses.KW_ONLY
    features: SparseDataset | Iterable[object] | None = option(None, kinds=("items",))
    exclude: Unordered = option("inputs", kinds=RANKING)
    popularity: Unordered = option("inputs", kinds=RANKING)
    groups: str | ArrayLike | None = option(None, kinds=("clicks", "histories"))
    weighted: bool = option(False, kinds=("clicks",))
    optimizer: Optimizer | None = None
    batch_size: int | None = option(None, least=1)


class Paged(Shown, Grouping):
    """The contents of a page about a run.

    Attributes:
      titles: Titles to show for the names of items: a dict; or a file or a table with two columns,
        the name of an item and its title.
    """

    only_with: ClassVar = dict.fromkeys(
        ("k", "unknown", "unknown_users", "groups"), ("heldout",)
    )

    titles: Any = option(None, ANY_FILE, kinds=RANKING)


class _Written(Options, kw_only=False):
    """Options for the page that is written.

    Attributes:
      path: File to write. An existing file is replaced.
    """

    path: str | os.PathLike[str] = option(dataclasses.MISSING, shell=False)


class Report(Paged, _Written, kw_only=False):
    """A page about a run.

    Attributes:
      heldout: Interactions that the model should find, for metrics on the page. For a click
        model, the examples to measure on.
    """

    heldout: Any = None


class WriteReport(Options, kw_only=False):
    """The arguments of a call of `write_report`.

    Attributes:
      path: File to write. An existing file is replaced.
      model: The trained model.
      history: The list that `fit` returned; or for your own training loop a mapping from names
        to numbers for each epoch. "epoch" is 1, 2, ... if the entries do not have it.
      title: Heading of the page.
      measured: Metrics that `evaluate` returned, for any kind of data. With `keep_rows=True`
        the page also has an interval of each metric.
      calibration: Pairs of the mean predicted probability and the share of clicks, for groups
        of examples, in the order of the first number; or such pairs for each label, by name.
      examples: An `Example` for each row whose recommendations the page shows.
      similar: `{item: most similar items}`, all by name.
      settings: Settings of the training, by name.
      data: Sentences about the data of the model, such as its size and its dates.
      titles: Titles to show in place of names of items, by name.
    """

    path: str | os.PathLike[str]
    model: nnx.Module
    history: Sequence[Mapping[str, float]]
    _: dataclasses.KW_ONLY
    title: str = "Training report"
    measured: Mapping[str, float] | None = None
    calibration: Curve | Mapping[str, Curve] = ()
    examples: Sequence[Example] = ()
    similar: Mapping[str, Sequence[str]] | None = None
    settings: Mapping[str, object] | None = None
    data: Sequence[str] = ()
    titles: Mapping[str, str] | None = None
