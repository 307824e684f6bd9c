"""Options to recommend items, and to write and serve predictors."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal

from sparsejax.options.measuring import RANK_BY, Choosing, Correcting
from sparsejax.options.option import (
    ANY_FILE,
    FILE,
    FOLDER,
    RANKING,
    Flag,
    Options,
    option,
)

if TYPE_CHECKING:
    from sparsejax.data.files.names import FeatureNames
    from sparsejax.data.reading.histories import Unordered
    from sparsejax.data.reading.sources import Sources
    from sparsejax.data.sets.item_features import ItemFeatures
    from sparsejax.engine.rank.recommender import Recommender
    from sparsejax.kinds.clicks.model import ClickModel
    from sparsejax.kinds.histories.next_items import HistoryModel
    from sparsejax.kinds.kind import OfKind
    from sparsejax.ops.row_codes import TableDtype
    from sparsejax.optimizers.optimizer import Optimizer


class InContext(Options):
    """Facts about the next event that are known before it happens.

    Attributes:
      context: For histories, values of columns that are known for the next event, for all rows; in
          Python also a frame with a row for each, see `SequenceDataset.with_context`.
    """

    context: Any = option(
        None,
        Flag(type=str | None, value="COLUMN=VALUE[,COLUMN=VALUE...]", read="values"),
        kinds=("histories",),
    )


class Recommend(Choosing, InContext, kw_only=False):
    """Options of `Run.recommend` and of the command.

    Attributes:
      users: Names of the rows to recommend to, in this order; all rows by default.
      k: Number of items for each row.
      inputs: The rows, also of new users; by default the data that the model was trained on. A
        list with a list of names of items for each row, such as `[["tea", "milk"], ["rye"]]`,
        is data, too.
      exclude_seen: Do not recommend items that a row has in the inputs.
      exclude: Also do not recommend a row's interactions here: a file, a table or data. Rows
        are matched by name; nothing is excluded for a row that is not in it. If the inputs
        are lists, give a list for each row.
      rank_by: For histories, a label of the next event: rank by the probability of the item times
        that of this category, or times this number, given the item.
    """

    users: Collection[str] | None = option(
        None,
        Flag(
            type=str | None,
            value="{NAME[,NAME...],FILE}",
            default="all rows",
            text="Only these rows, in this order: names separated by commas, or a file with one "
            "name per line.",
        ),
        kinds=RANKING,
    )
    k: int = option(10, kinds=RANKING, least=1)
    _: dataclasses.KW_ONLY
    inputs: Any = None
    exclude_seen: bool = option(
        True,
        Flag(
            name="keep-seen",
            gives=False,
            text="Also recommend what a row already has in DATA, for data in which interactions "
            "repeat.",
        ),
        Flag(name="exclude-seen", gives=True, text="Do not. This is the default."),
        kinds=RANKING,
    )
    exclude: Any = option(None, ANY_FILE, kinds=RANKING)
    rank_by: str | None = option(None, RANK_BY, kinds=("histories",))


class Rank(Choosing, kw_only=False):
    """The arguments of a call of `recommend`.

    Attributes:
      model: A `FeedForward`, or a module with `num_features`, `num_items` and `top_k`; for
        histories a `SASRec`, or another `HistoryModel`.
      inputs: `[rows, features]`; or several by name, see `fit`; or histories.
      k: Items per row. If there are fewer candidates, ids are padded with -1 at the end.
      exclude: "inputs" excludes the items that a row already has; None ranks them, too. Where
        there are several inputs, the name of one of them, or None. Or `[rows, items]`: two data
        sets are matched by row name, and a row that `exclude` lacks has nothing excluded;
        otherwise row `i` belongs to row `i`.
      exclude_items: Names or ids of items that are recommended to no row, such as those sold
        out.
      only_items: Recommend only these items.
      optimizer: The model's optimizer. Pass it while rows of the weights may not be up to date
        (see `Optimizer.flush`): they are then read as if they were up to date.
      context: For histories, columns that are known of the next event of each, such as its hour:
        a frame with a row for each history, or a dict. See `SequenceDataset.with_context`.
      rank_by: For histories whose events have labels, see `EventSchema`: the name of a category,
        also as "COLUMN=CATEGORY", or of a column of numbers. The 1,000 items of the highest
        scores are ordered by p(item) p(category | item, history), or by p(item) times the
        expected number. `Recommendations.values` has the second factor.
      batch_size: Number of rows scored at a time. Take fewer if your own model's `top_k` does
        not take `excluded`, and very many items are excluded.
    """

    model: Recommender | HistoryModel
    inputs: Sources | OfKind
    k: int = option(10, least=1)
    _: dataclasses.KW_ONLY
    exclude: Unordered = "inputs"
    optimizer: Optimizer | None = None
    context: Any = None
    rank_by: str | None = None
    batch_size: int = option(512, least=1)


class Exported(Options):
    """Abilities of a predictor, see `sparsejax.export_predictor`.

    Attributes:
      k: Largest number of items that the predictor recommends to a row.
      batch_size: Largest number of rows that the predictor scores at a time.
      table_dtype: Type in which the tables of a click model are written: int8 or float8. By
        default they stay as they are.
      unknown_ids: Vectors that ids without a row in a dynamic table read: init, the vector that
        the id's row would begin with; or zeros.
      int8: Also keep the vectors of the items in 8 bits, which a Hopper GPU reads first. The
        answers are equal, and come sooner if there are many items.
      rank_by: For histories, the label of the next event by which the predictor ranks, as in
        `recommend`.
    """

    k: int = option(10, kinds=RANKING, least=1)
    batch_size: int = option(512, least=1)
    table_dtype: TableDtype | None = option(None, shell=False, kinds=("clicks",))
    unknown_ids: Literal["init", "zeros"] | None = option(
        None, "init", kinds=("clicks",)
    )
    int8: bool = option(False, kinds=RANKING)
    rank_by: str | None = option(None, RANK_BY, kinds=("histories",))


class Export(Exported, Correcting, kw_only=False):
    """A predictor to write.

    Attributes:
      path: File to write. An existing file is replaced.
    """

    path: str | os.PathLike[str] = option(
        dataclasses.MISSING, Flag(type=pathlib.Path, value="FILE", positional=True)
    )


class Write(Exported, kw_only=False):
    """The arguments of a call of `export_predictor`.

    Attributes:
      model: A `FeedForward`, or a module with `num_features`, `num_items` and `top_k`; or
        a `SASRec`, or another `HistoryModel`. Its rows must be up to date, as they are
        after `fit` or `Optimizer.flush`. It may have several inputs; a dense one is
        float32 unless `num_features` gives its dtype.
      path: The file, which is replaced if it exists.
      k: Most items per row that the predictor can recommend; not for clicks.
      names: Names of the items, or a data set whose features they are. The file keeps
        them. For a click model the data that it was trained on.
      item_features: The content of the items that the model was built with, so that
        `Predictor.add_items` can add others: the file keeps the names of tags, and the
        kernels. By default a predictor knows nothing of content.
      table_dtype: Type of the tables of a click model: "int8" or "float8". By default they stay
        as they are.
      unknown_ids: Vectors that ids without a row in a dynamic table of a click model read:
        "init", the default, is the vector that the id's row would begin with, as in the model;
        or "zeros".
      int8: Whether a Hopper GPU also keeps the items' vectors in int8, for half as much memory
        again; for a model of items or histories with many items. The GPU reads these first, and
        finds the same items with the same scores. Other devices ignore this. The model must
        rank in bfloat16, by vectors of a multiple of 128 numbers.
      batch_size: Most rows that the predictor scores at a time.
      rank_by: For histories whose events have labels: the label by which the predictor ranks, as in
        `recommend`. Its answers then have values, too. It takes no further items, and finds no
        similar ones.
    """

    model: Recommender | HistoryModel | ClickModel
    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    names: FeatureNames | OfKind | Iterable[object] | None = None
    item_features: ItemFeatures | None = option(None, kinds=RANKING)


class Serving(Options):
    """Options of a service, for the command and for `sparsejax.serving`.

    Attributes:
      max_wait: Seconds for which a batch that is not full waits on an idle device.
      keep: Number of older versions that stay in memory, and still answer requests that name
        them.
      swap: Time at which a newer version is loaded. beside: while the older one serves, so the
        device needs room for both. drain: after the older one has answered its requests; until
        the newer one is loaded requests are answered with status 503.
      similar: Serve a second model, called similar: items like given items.
      histories: A saved data set of the users' former items: a request may then name users.
      user_features: A file with the columns of users that the model reads: a request may then name
        users. It is read again for each version.
      exclude_file: Items that are not recommended, such as those sold out: a file with a name
        on each line. It is read again when it changes.
      changes: Folder of changes that train --follow writes: the tables of a click model become
        those of the last export, without a restart.
      page: A page for a person at the address itself, with a form that asks the models.
    """

    max_wait: float = option(0.0, least=0.0)
    keep: int = option(0, least=0)
    swap: Literal["beside", "drain"] = "beside"
    similar: bool = False
    histories: str | None = option(None, FILE)
    user_features: str | None = option(None, FILE)
    exclude_file: str | None = option(None, FILE)
    changes: str | None = option(None, FOLDER)
    page: bool = True
