"""Splits a data set into two parts, by entries, rows or items."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Self

import numpy as np

from sparsejax.data.files.names import find_names
from sparsejax.data.sets.split import heldout_names

# This is no generic NamedTuple, because beartype does not check those.
_Parts = collections.namedtuple("_Parts", ("train", "heldout"))


class Split[T](_Parts):
    """The two parts of a data set that its methods `split`, `split_last`, ... return.

    >>> split = read("purchases.tsv").split(0.5, seed=0)
    >>> train, heldout = split
    >>> print(split)
    held out 3 of 6 entries (50.0%), in 3 rows; new rows: 0, new features: 1

    Rows and features are new if they have held-out entries but no entry in train: a model
    learns nothing about them from `train`. For clicks, a row is an example and occurs once,
    and the features are the ids of all columns.

    Attributes:
      train: the rows or entries to train on.
      heldout: the held-out rows or entries, over the same features.
      repeats: number of later entries that are in neither part, because their row has the
        same feature in `train`; see `split_at`.
    """

    train: T  # pyrefly: ignore[bad-override]
    heldout: T  # pyrefly: ignore[bad-override]
    # The default is needed by methods of NamedTuple that do not call __new__, such as _replace.
    repeats: int = 0

    def __new__(cls, train: T, heldout: T, *, repeats: int = 0) -> Self:
        self = super().__new__(cls, train, heldout)
        self.repeats = repeats
        return self

    @property
    def new_rows(self) -> int:
        """Number of rows that have held-out entries but no entry in train."""
        train, heldout = self._untyped()
        if not hasattr(train, "row_names"):
            return heldout.num_rows
        known, held = (p.row_names[p._entries.lengths > 0] for p in (train, heldout))
        return int(np.sum(find_names(held, known) < 0))

    @property
    def new_features(self) -> int:
        """Number of features that have held-out entries but no entry in train."""
        known, held = map(_features, self)
        return sum(np.setdiff1d(h, k).size for k, h in zip(known, held, strict=True))

    def __str__(self) -> str:
        parts = self._untyped()
        train, heldout = (getattr(p, "num_entries", p.num_rows) for p in parts)
        share = f"{heldout / max(train + heldout, 1):.1%}"
        if not hasattr(self.train, "row_names"):
            return f"held out {heldout:,} of {train + heldout:,} examples ({share})"
        rows = np.sum(parts[1]._entries.lengths > 0)
        return (
            f"held out {heldout:,} of {train + heldout:,} entries ({share}), in {rows:,} "
            f"rows; new rows: {self.new_rows:,}, new features: {self.new_features:,}"
            + f"; repeats left out: {self.repeats:,}"
            * bool(self.repeats)
        )

    def _untyped(self) -> tuple[Any, ...]:
        return tuple(self)


def _features(part: Any) -> list[np.ndarray]:
    """The features of all entries, as one array; for clicks, an array of ids for each column."""
    if hasattr(part, "ids"):
        return [getattr(ids, "indices", ids) for ids in part.ids.values()]
    return [part._entries.indices]


def split_entries[T](
    data: T,
    is_held: np.ndarray,
    why_nothing: str,
    stays: np.ndarray | None = None,
    behind: np.ndarray | None = None,
) -> Split[T]:
    """Splits a data set by entries. Both parts have all rows and features.

    Args:
      data: the data set to split.
      is_held: `[entries]` bool: whether an entry is held out.
      why_nothing: explanation for the error if no entry is held out.
      stays: `[entries]` bool: whether an entry is in train; by default all others are. An
        entry may be in both parts, or in neither: then it counts as a repeat.
      behind: `[entries]` bool: entries in neither part that are not repeats.

    Raises:
      ValueError: no entry is held out.
    """
    if not is_held.any():
        raise ValueError(f"nothing is held out: {why_nothing}")
    stays = ~is_held if stays is None else stays
    whole: Any = data
    # `left_out` counts entries of whole rows, so it is wrong for the parts.
    entries = dataclasses.replace(whole._entries, of_rows={})
    left_out = ~(stays | is_held)
    repeats = int(np.sum(left_out if behind is None else left_out & ~behind))
    train, heldout = (whole._with(entries.keep(part)) for part in (stays, is_held))
    return Split(train, heldout, repeats=repeats)


def split_by_share[T](data: T, is_held: np.ndarray, fraction: float) -> Split[T]:
    """Calls `split_entries` with the error text for a split by a share of each row's entries."""
    whole: Any = data
    longest = whole._entries.lengths.max(initial=0)
    return split_entries(
        data,
        is_held,
        f"the longest row has {longest:,} entries, too few to hold out "
        f"{1 - fraction:.3g} of them; hold out a larger share",
    )


def split_rows[T](data: T, fraction: float, seed: int) -> Split[T]:
    """Splits a data set by rows. Both parts have all features; rows keep their order.

    Raises:
      ValueError: `fraction` is outside (0, 1), or there are too few rows.
    """
    whole: Any = data
    is_held = heldout_names(whole.row_names, fraction, seed)
    check_held(is_held, "rows", fraction)
    return Split(*(whole._rows(np.flatnonzero(part)) for part in (~is_held, is_held)))


def split_items[T](data: T, fraction: float, seed: int) -> Split[T]:
    """Holds out the entries of some items. Both parts have all rows and features.

    Raises:
      ValueError: `fraction` is outside (0, 1), or a part would have no entries.
    """
    whole: Any = data
    item_is_held = heldout_names(whole.feature_names, fraction, seed)
    check_held(item_is_held, "features", fraction)
    is_held = item_is_held[whole._entries.indices]
    if is_held.all():
        raise ValueError(
            "everything is held out, nothing to train on: the "
            f"{int(np.sum(~item_is_held)):,} features that stay have no entries"
        )
    return split_entries(
        data,
        is_held,
        f"the {int(np.sum(item_is_held)):,} features to hold out have no entries",
    )


def check_held(is_held: np.ndarray, what: str, fraction: float) -> None:
    """Raises ValueError if the mask holds out nothing."""
    if not is_held.any():
        raise ValueError(
            f"nothing is held out: {len(is_held):,} {what} are too few to hold out "
            f"{1 - fraction:.3g} of them; hold out a larger share"
        )
