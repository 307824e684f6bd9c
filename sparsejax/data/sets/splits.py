"""The two parts of a data set, and how entries and rows are put into them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self

import numpy as np

from sparsejax.data.files.names import find_names
from sparsejax.data.sets.split import heldout_names


class _Parts[T](NamedTuple):
    train: T
    heldout: T


class Split[T](_Parts[T]):
    """Two parts of a data set, made by its methods `split`, `split_last`, ...

    >>> split = read("purchases.tsv").split(0.5, seed=0)
    >>> train, heldout = split
    >>> print(split)
    held out 3 of 6 entries (50.0%), in 3 rows; new rows: 0, new features: 1

    Rows and features are new if they have held-out entries but no entry in train. A model
    that learns from `train` knows nothing of them. Examples of clicks are rows that occur
    once, and their features are the ids of all columns.

    Attributes:
      train: the rows or entries to train on.
      heldout: the held-out rows or entries, over the same features.
      repeats: number of later entries that are in neither part, because their rows have
        the features in `train`; see `split_at`.
    """

    repeats: int = 0  # for what NamedTuple makes without __new__, as _replace does

    def __new__(cls, train: T, heldout: T, *, repeats: int = 0) -> Self:
        self = super().__new__(cls, train, heldout)
        self.repeats = repeats
        return self

    @property
    def new_rows(self) -> int:
        """Number of rows that have held-out entries but no entry in train."""
        parts: Any = self
        if not hasattr(parts.train, "row_names"):
            return parts.heldout.num_rows
        known, held = (p.row_names[p._entries.lengths > 0] for p in parts)
        return int(np.sum(find_names(held, known) < 0))

    @property
    def new_features(self) -> int:
        """Number of features that have held-out entries but no entry in train."""
        known, held = map(_features, self)
        new = (np.setdiff1d(h, k).size for k, h in zip(known, held, strict=True))
        return sum(new)

    def __str__(self) -> str:
        train, heldout = self._sizes()
        share = f"{heldout / max(train + heldout, 1):.1%}"
        if not hasattr(self.train, "row_names"):
            return f"held out {heldout:,} of {train + heldout:,} examples ({share})"
        parts: Any = self
        rows = np.sum(parts.heldout._entries.lengths > 0)
        return (
            f"held out {heldout:,} of {train + heldout:,} entries ({share}), in {rows:,} "
            f"rows; new rows: {self.new_rows:,}, new features: {self.new_features:,}"
            + f"; repeats left out: {self.repeats:,}"
            * bool(self.repeats)
        )

    def _sizes(self) -> list[int]:
        """The numbers of entries, or of examples of clicks."""
        parts: Any = self
        return [getattr(p, "num_entries", p.num_rows) for p in parts]


def _features(part: Any) -> list[np.ndarray]:
    """Numbers of the features of all entries; for clicks, the ids of each column."""
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
    """The two parts of entries. Both have all rows and features.

    Args:
      data: the whole.
      is_held: `[entries]` bool: the entries that are held out.
      why_nothing: text of the error if nothing is held out.
      stays: `[entries]` bool: those to train on; by default all others. Entries may be in
        both parts, or in neither: repeats.
      behind: `[entries]` bool: entries that are in neither part and are not repeats.

    Raises:
      ValueError: nothing is held out.
    """
    if not is_held.any():
        raise ValueError(f"nothing is held out: {why_nothing}")
    stays = ~is_held if stays is None else stays
    whole: Any = data
    # Neither part has the entries that were left out before.
    entries = dataclasses.replace(whole._entries, of_rows={})
    left_out = ~(stays | is_held)
    repeats = int(np.sum(left_out if behind is None else left_out & ~behind))
    train, heldout = (whole._with(entries.keep(part)) for part in (stays, is_held))
    return Split(train, heldout, repeats=repeats)


def split_by_share[T](data: T, is_held: np.ndarray, fraction: float) -> Split[T]:
    """`split_entries`, of which a share of each row stays."""
    whole: Any = data
    longest = whole._entries.lengths.max(initial=0)
    return split_entries(
        data,
        is_held,
        f"the longest row has {longest:,} entries, too few to hold out "
        f"{1 - fraction:.3g} of them; hold out a larger share",
    )


def split_rows[T](data: T, fraction: float, seed: int) -> Split[T]:
    """The two parts of rows, which keep their order, over all features.

    Raises:
      ValueError: `fraction` is outside (0, 1), or there are too few rows.
    """
    whole: Any = data
    is_held = heldout_names(whole.row_names, fraction, seed)
    check_held(is_held, "rows", fraction)
    return Split(*(whole._rows(np.flatnonzero(part)) for part in (~is_held, is_held)))


def split_items[T](data: T, fraction: float, seed: int) -> Split[T]:
    """The entries of some items, and of all others, over all rows and features.

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
    """Raises ValueError if none of these is held out."""
    if not is_held.any():
        raise ValueError(
            f"nothing is held out: {len(is_held):,} {what} are too few to hold out "
            f"{1 - fraction:.3g} of them; hold out a larger share"
        )
