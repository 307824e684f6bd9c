"""How a model is measured, reported on and corrected."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any, Literal

from sparsejax.options.option import RANKING, Flag, Options, option

_FILE = Flag(type=str | None, value="FILE", default="")
_NAMES = "{NAME[,NAME...],FILE}"
CUTOFFS = Flag(type=str | None, value="INT[,INT...]", default="20", read="numbers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Options):
    """How held-out interactions count that the model cannot find.

    Attributes:
      unknown: Held-out interactions with items that were not trained on: miss counts
        them as missed; skip leaves them out, and with them the users who have no others.
      unknown_users: Users who have no interactions that the model is shown: count ranks
        items for them, too; skip leaves them out.
      exclude_seen: Do not rank the items that a row already has.
    """

    heading = "counting"

    unknown: Literal["miss", "skip"] = option("miss", kinds=RANKING)
    unknown_users: Literal["count", "skip"] = option("count", kinds=RANKING)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    calibrate: Any = option(None, _FILE, kinds=("clicks",))
    method: Literal["platt", "isotonic"] | None = option(
        None, Flag(value="{platt,isotonic}", default="platt"), kinds=("clicks",)
    )
    negatives_kept: float | None = option(
        None, Flag(value="SHARE", default="1"), kinds=("clicks",)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choosing(Options):
    """Which items may be ranked.

    Attributes:
      exclude_items: Rank none of these items, such as those sold out. Held-out interactions
        with them count as missed.
      only_items: Rank only these items.
    """

    exclude_items: Collection[str] = option(
        (),
        Flag(type=str | None, value=_NAMES, default="", read="names"),
        kinds=RANKING,
    )
    only_items: Collection[str] | None = option(
        None,
        Flag(type=str | None, value=_NAMES, default="all", read="names"),
        kinds=RANKING,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping(Options):
    """Groups of clicks that are measured apart.

    Attributes:
      groups: For clicks, a column of categories: also measure the AUC within each of them.
    """

    groups: str | None = option(
        None, Flag(value="COLUMN", default=""), kinds=("clicks",)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown(Counting):
    """The interactions that a model is shown, and those that it should find.

    Attributes:
      heldout: Interactions that the model should find: a file, a table or data. Rows are
        matched by name. For a click model, the examples to measure on.
      inputs: Interactions that the model is shown; by default what it was trained on.
      k: Number of recommendations that count, or several numbers, such as 5,10.
    """

    heldout: Any = option(None, _FILE)
    inputs: Any = option(None, _FILE, kinds=RANKING)
    k: int | Sequence[int] = option(20, CUTOFFS, kinds=RANKING)

    def counted(self) -> dict[str, Any]:
        """The arguments of `sparsejax.evaluate` that say how interactions count."""
        names = ("k", "unknown", "unknown_users", "exclude_items", "only_items", "by")
        found = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return {**found, "exclude": "inputs" if self.exclude_seen else None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranked(Shown, Choosing):
    """A ranking for held-out interactions.

    Attributes:
      candidates: For each row, rank only the items that it has here, and the held-out ones.
      keep_rows: Keep the figures of each row, for `compare`.
    """

    candidates: Any = option(
        None,
        Flag(type=str | None, value="FILE", default="rank all items"),
        kinds=RANKING,
    )
    keep_rows: bool = option(False, shell=False)


@dataclasses.dataclass(frozen=True)
class Evaluate(Ranked, Grouping, Correcting):
    """How well a model finds held-out interactions, or predicts clicks.

    Attributes:
      heldout: Interactions that the model should find: a file, a table or data. Rows are
        matched by name. For a click model, the examples to measure on.
      history: More interactions that the model is shown and that are not recommended.
      fold_in: Instead of held-out interactions, for rows that the model was not trained on:
        the share of each row's interactions that the model is shown. It should find the others.
      seed: Seed of the choice that fold_in=... makes.
      popularity: Interactions that popularity is counted from. Its items count as those that
        the model was trained on.
      baselines: Also measure models without training, made of the same interactions as
        popularity: nearest items (ItemKNN), and EASE if its matrices fit in memory.
      by: "entries" also measures items with few and with many interactions apart.
    """

    heldout: Any = option(None, _FILE)
    _: dataclasses.KW_ONLY
    history: Collection[Any] = option(
        (),
        Flag(
            type=tuple[str, ...],
            value="FILE",
            default="",
            repeated=True,
            text="More interactions that the model is shown and that are not recommended. May "
            "be given several times.",
        ),
        kinds=("items",),
    )
    fold_in: float | None = option(
        None, Flag(value="FLOAT", default=""), kinds=("items",)
    )
    seed: int | None = option(None, Flag(value="INT", default="0"), kinds=("items",))
    popularity: Any = option(
        None, Flag(type=str | None, value="FILE", default="TRAIN"), kinds=("items",)
    )
    baselines: bool = option(False, Flag(gives=True), kinds=RANKING)
    by: Literal["entries"] | None = option(
        None,
        Flag(
            name="by-entries",
            gives="entries",
            text="Also measure items with few and with many interactions in TRAIN apart.",
        ),
        kinds=RANKING,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged(Shown, Grouping):
    """The contents of a page about a run.

    Attributes:
      titles: Titles to show for the names of items: a dict; or a file or a table with two columns,
        the name of an item and its title.
    """

    titles: Any = option(None, _FILE, kinds=RANKING)


@dataclasses.dataclass(frozen=True)
class _Written(Options):
    """Where a page is written.

    Attributes:
      path: File to write. An existing file is replaced.
    """

    path: str | os.PathLike[str] = option(dataclasses.MISSING, shell=False)


@dataclasses.dataclass(frozen=True)
class Report(Paged, _Written):
    """A page about a run.

    Attributes:
      heldout: Interactions that the model should find, for metrics on the page. For a click
        model, the examples to measure on.
    """

    heldout: Any = None
