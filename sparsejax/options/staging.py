"""Options of two stages: one run finds candidates, and a second one ranks them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from sparsejax.options.measuring import Choosing, Kept, Shown
from sparsejax.options.option import ANY_FILE, COLUMN, SWITCH, Flag, Options, option
from sparsejax.options.predicting import Recommend

if TYPE_CHECKING:
    from sparsejax.runs.run import Run


class Joining(Options):
    """Sources of the columns of the second stage: each column has one source.

    Attributes:
      item_columns: Columns of items, by their names: a file, a table or dicts.
      user_columns: Columns of users, by their names: a file, a table or dicts.
      request_columns: Columns that come with each request.
      item_as: Column that gets the name of an item. In item_columns it contains the names.
      user_as: Column that gets the name of a row. In user_columns it contains the names.
      history_as: Column that gets the list of the items of a row. By default the column
        whose `like` is the column of the items.
      rank_by: Label by which candidates are ranked, if there are several; by default the first.
        Or in Python a factor for each of some labels, whose predictions are added:
        {"click": 1, "buy": 20}.
      lengths: For columns of lists, how many categories are read. By default a history has the
        length that DIN reads, else 200, and other columns have 1.
    """

    heading = "stages"

    item_columns: Any = option(None, ANY_FILE)
    user_columns: Any = option(None, ANY_FILE)
    request_columns: Collection[str] = option(
        (), Flag(type=tuple[str, ...] | None, value="COLUMN")
    )
    item_as: str = option("item", Flag(value="COLUMN"))
    user_as: str = option("user", Flag(value="COLUMN"))
    history_as: str | None = option(None, COLUMN)
    rank_by: str | Mapping[str, float] | None = option(
        None, Flag(type=str | None, value="LABEL")
    )
    lengths: Mapping[str, int] | None = option(None, shell=False)


class Join(Joining, kw_only=False):
    """Two runs that are combined to one model.

    Attributes:
      retrieval: Run of items or histories, which finds the candidates.
      ranking: Run of clicks, which ranks the candidates.
      candidates: Number of candidates for each row.
    """

    retrieval: Run
    ranking: Run
    candidates: int = option(500, least=1)


class Requested(Options):
    """The columns that come with requests.

    Attributes:
      requests: The columns that `request_columns` names: a file, a table or dicts. Rows are matched
        by the column of users, or else by their order.
    """

    requests: Any = option(None, ANY_FILE)


class RecommendJoined(Recommend, Requested, kw_only=False):
    """Options of recommendations by two stages."""


class Alone(Requested):
    """Measurements of single stages.

    Attributes:
      ranking_alone: Also rank all items by the second stage alone. This takes longer by the
        ratio of all items to candidates.
    """

    ranking_alone: bool = option(False, SWITCH)


class EvaluateJoined(Shown, Choosing, Kept, Alone, kw_only=False):
    """How well two stages find held-out interactions.

    Attributes:
      heldout: Interactions that the stages should find: a file, a table or data. Rows are matched
        by name.
    """

    heldout: Any = option(dataclasses.MISSING, ANY_FILE)


class ExportJoined(Options, kw_only=False):
    """A predictor of two stages to write.

    Attributes:
      path: File to write. An existing file is replaced.
      k: Largest number of items that the predictor recommends to a row.
      batch_size: Largest number of rows that the predictor scores at a time. By default the
        candidates of all rows are about 8,000.
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    k: int = option(10, least=1)
    batch_size: int | None = option(None, least=1)
