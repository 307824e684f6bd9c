"""Recommendations, and predictors that are written."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from sparsejax.options.measuring import Choosing, Correcting
from sparsejax.options.option import RANKING, Flag, Options, option

if TYPE_CHECKING:
    from sparsejax.embeddings.row_codes import TableDtype


@dataclasses.dataclass(frozen=True)
class Recommend(Choosing):
    """A question for recommendations.

    Attributes:
      users: Only these rows, in this order; all rows by default.
      k: Number of items for each row.
      inputs: The rows, also of new users; by default what the model was trained on. Lists
        of names of items will do, such as `[["tea", "milk"], ["rye"]]`, in their order.
      exclude_seen: Do not recommend what a row has in the inputs.
      exclude: Also do not recommend a row's interactions here: a file, a table or data. Rows
        are matched by name; nothing is excluded for a row that is not in it.
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
    k: int = option(10, kinds=RANKING)
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
    exclude: Any = option(
        None, Flag(type=str | None, value="FILE", default=""), kinds=RANKING
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported(Options):
    """The abilities of a predictor, see `sparsejax.export_predictor`.

    Attributes:
      k: Largest number of items that the predictor recommends to a row.
      batch_size: Largest number of rows that the predictor scores at a time.
      table_dtype: For clicks, the type in which tables are written, see `export_predictor`.
      unknown_ids: For dynamic tables, what an id without a row reads: init is the vector that it
        would begin with.
      int8: On a Hopper GPU items are also held in 8 bits, which are read first: the answers are the
        same, and come sooner where there are many items.
    """

    k: int = option(10, kinds=RANKING)
    batch_size: int = 512
    table_dtype: TableDtype | None = option(None, shell=False, kinds=("clicks",))
    unknown_ids: Literal["init", "zeros"] | None = option(
        None, Flag(value="{init,zeros}", default="init"), kinds=("clicks",)
    )
    int8: bool = option(False, kinds=RANKING)


@dataclasses.dataclass(frozen=True)
class Export(Exported, Correcting):
    """A predictor to write.

    Attributes:
      path: File to write. An existing file is replaced.
    """

    path: str | os.PathLike[str] = option(
        dataclasses.MISSING, Flag(type=pathlib.Path, value="FILE", positional=True)
    )
