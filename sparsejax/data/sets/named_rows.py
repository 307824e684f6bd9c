"""The base class of data sets of items and of histories: rows of entries, with names."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np

from sparsejax.data.files import names as _names
from sparsejax.data.files import stored
from sparsejax.data.files.columns import Columns
from sparsejax.data.files.entries import Entries
from sparsejax.data.files.names import FeatureNames, Names, RowNames
from sparsejax.data.files.opening import DataError, Path
from sparsejax.data.sets import splits, vocabulary
from sparsejax.data.sets.splits import Split
from sparsejax.sparse import MAX_ENTRIES


class UnknownFeaturesWarning(UserWarning):
    """Some entries were left out because the vocabulary lacks their features."""


class NamedRows:
    """The base of `SparseDataset` and `SequenceDataset`: rows of entries, with names.

    A subclass is a dataclass with the fields declared below. It implements `_entries` and
    `_of`, and the order of entries in a row by `_in_order` and `_joined`.
    """

    _stored: ClassVar[stored.Form]

    if TYPE_CHECKING:

        @property
        def row_names(self) -> Names: ...
        @property
        def feature_names(self) -> Names: ...
        @property
        def columns(self) -> Columns | None: ...

    @property
    def num_rows(self) -> int:
        return len(self.row_names)

    @property
    def num_features(self) -> int:
        return len(self.feature_names)

    @property
    def num_entries(self) -> int:
        return len(self._entries.indices)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.num_rows:,} rows, {self.num_features:,} features, "
            f"{self.num_entries:,} entries, {self._manner})"
        )

    def save(self, path: Path) -> None:
        """Writes the data set as one Parquet file, whole or not at all.

        Raises:
          OSError: the file cannot be written; no partial file remains.
        """
        rows = stored.StoredRows(self._entries, self.row_names, self.feature_names)
        stored.write_rows(path, self._stored, rows)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file that `save` wrote; the result equals the saved data set.

        Raises:
          DataError: the file is missing, is not a saved data set, or is damaged.
        """
        rows = stored.read_rows(path, cls._stored)
        try:
            return cls._of(rows.entries, rows.row_names, rows.feature_names)
        except ValueError as error:
            raise DataError.at(path, f"is damaged: {error}") from error

    def split_rows(self, fraction: float, *, seed: int) -> Split[Self]:
        """Splits the rows at random into `(train, heldout)`, to evaluate on unseen rows.

        `(1 - fraction) num_rows` rows are held out, rounded half up, but one row always
        stays in train. Both parts keep the order of rows and have all features. Which
        rows are held out depends on the seed and on the rows' names only, not on their order
        or their entries.

        Args:
          fraction: share of the rows to train on, in (0, 1).
          seed: any integer.

        Raises:
          ValueError: `fraction` is outside (0, 1), or there are too few rows for one to
            be held out.
        """
        return splits.split_rows(self, fraction, seed)

    def split_items(self, fraction: float, *, seed: int) -> Split[Self]:
        """Splits the features at random into `(train, heldout)`, to evaluate on new items.

        `(1 - fraction) num_features` features are held out with all their entries, rounded
        half up, but one feature always stays in train. So a model that learns from `train`
        sees no entries of them, at most their `ItemFeatures`. Both parts have all rows and
        features of this data set. Which features are held out depends on the seed and on the
        features' names only, not on their order or their entries.

        >>> table = {"user": ["ann", "ann", "bob"], "item": ["tea", "rye", "tea"]}
        >>> print(from_arrow(pandas.DataFrame(table)).split_items(0.5, seed=0))
        held out 1 of 3 entries (33.3%), in 1 rows; new rows: 0, new features: 1

        Args:
          fraction: share of the features to train on, in (0, 1).
          seed: any integer.

        Raises:
          ValueError: `fraction` is outside (0, 1), there are too few features for one to be
            held out, or one part would be empty.
        """
        return splits.split_items(self, fraction, seed)

    def align_rows(
        self,
        rows: RowNames | Iterable[object],
        *,
        missing: Literal["error", "empty"] = "error",
    ) -> Self:
        """Selects the rows with the given names, in the given order.

        Args:
          rows: names, or a data set whose row names are used.
          missing: treatment of a name that is not in this data set. "error" raises an error;
            "empty" makes an empty row. (`SparseDataset.match_rows` leaves such names
            out.)

        Raises:
          ValueError: a name is not in this data set and `missing` is "error".
        """
        if missing not in ("error", "empty"):
            raise ValueError(f'missing is "error" or "empty", got {missing!r}')
        wanted = _names.of_rows(rows)
        found = _names.find_names(wanted, self.row_names)
        absent = wanted[found < 0]
        if not absent.size:
            return self._rows(found)
        if missing == "error":
            raise ValueError(
                f"{absent.size:,} of {wanted.size:,} rows are not in the data set: "
                f'{_names.quoted(absent)}; missing="empty" makes empty rows for them'
            )
        return self._rows(found, wanted)

    def align_features(self, features: FeatureNames | Iterable[object]) -> Self:
        """Changes the columns of this data set to the given features, in their order.

        Entries of other features are left out. A warning counts them, and `left_out` has
        their number for each row.

        Args:
          features: names, or a data set whose feature names are used.

        Raises:
          ValueError: all entries have unknown features.
        """
        aligned, unknown = align_features(self, features)
        if unknown:
            warnings.warn(unknown, UnknownFeaturesWarning, stacklevel=2)
        return aligned

    def append_features(self, features: FeatureNames | Iterable[object]) -> Self:
        """Changes the columns to the given features, followed by the new ones of this data set.

        >>> data = SparseDataset.from_scipy(
        ...     scipy.sparse.csr_array([[1, 1]]), feature_names=["new", "tea"]
        ... )
        >>> data.append_features(["milk", "tea"]).feature_names.tolist()
        ['milk', 'tea', 'new']

        So the columns of a model that was trained on the given features keep their numbers;
        see `FeedForward.add_items`. No entry is left out. A warning is given if the new
        features have so many entries that the work on a mesh would be unbalanced.

        Args:
          features: names, or a data set whose feature names are used.
        """
        names = _names.of_features(features)
        spelled = self._spelled_like(names)
        longer = vocabulary.appended(names, spelled.feature_names)
        appended, _ = align_features(spelled, longer)
        vocabulary.warn_if_appended_unbalanced(appended._entries.indices, longer)
        return appended

    @property
    def _manner(self) -> str:
        """The form of the entries as shown by `repr`, for example "indicator"."""
        raise NotImplementedError

    @property
    def _entries(self) -> Entries:
        raise NotImplementedError

    @classmethod
    def _of(
        cls,
        entries: Entries,
        row_names: Names,
        feature_names: Names,
        columns: Columns | None = None,
    ) -> Self:
        """Makes a data set from entries and names."""
        raise NotImplementedError

    def _in_order(self, entries: Entries) -> Entries:
        """Restores the order of the entries of each row after features were renumbered."""
        raise NotImplementedError

    def _joined(self, column: np.ndarray, names: Names) -> Self:
        """Merges features: `column` has the new number of each feature, `names` the new names."""
        raise NotImplementedError

    def _with(
        self,
        entries: Entries,
        row_names: Names | None = None,
        feature_names: Names | None = None,
    ) -> Self:
        """Makes a data set from other entries. Names default to those of this data set."""
        rows = self.row_names if row_names is None else row_names
        features = self.feature_names if feature_names is None else feature_names
        return self._of(entries, rows, features, self.columns)

    def _rows(self, rows: np.ndarray, names: Names | None = None) -> Self:
        """Selects rows by their numbers; -1 adds an empty row. `names` name the selected rows."""
        names = self.row_names[rows] if names is None else names
        return self._with(self._entries.rows(rows), names)

    def _spelled_like(self, vocabulary_: Names) -> Self:
        """Spells feature names like a vocabulary, and merges features of equal names."""
        names = _names.spelled_like(self.feature_names, vocabulary_)
        if names is self.feature_names:
            return self
        names, column = _names.numbered(names)
        if len(names) == self.num_features:
            return self._with(self._entries, feature_names=names)
        return self._joined(column, names)


def align_features[Data: NamedRows](
    dataset: Data, features: FeatureNames | Iterable[object]
) -> tuple[Data, str | None]:
    """`NamedRows.align_features`, which returns the text of the warning in place of giving it."""
    wanted = _names.of_features(features)
    dataset = dataset._spelled_like(wanted)
    column = _names.find_names(dataset.feature_names, wanted)
    entries = dataset._entries
    columns = column[entries.indices]
    is_known = columns >= 0
    message = _about_unknown(is_known, dataset.feature_names[column < 0], wanted)
    aligned = dataset._in_order(entries.replaced(indices=columns).keep(is_known))
    counts = entries.lengths - aligned.lengths + entries.of_rows.get("left_out", 0)
    aligned = dataclasses.replace(aligned, of_rows={"left_out": counts})
    return dataset._with(aligned, feature_names=wanted), message


def _about_unknown(known: np.ndarray, unknown: Names, wanted: Names) -> str | None:
    """Text of a warning about entries with unknown features; None if all are known.

    Args:
      known: `[entries]` bool: whether the vocabulary has the entry's feature.
      unknown: names of the features that the vocabulary lacks.
      wanted: names of the vocabulary.

    Raises:
      ValueError: all entries have unknown features.
    """
    left_out = len(known) - int(known.sum())
    if not left_out:
        return None
    if left_out == len(known):
        raise ValueError(
            f"all {left_out:,} entries are of features that the vocabulary lacks: "
            f"{_names.quoted(unknown)}; it has {_names.quoted(wanted)}"
        )
    return (
        f"{left_out:,} of {len(known):,} entries are left out: "
        f"{unknown.size:,} features are not among the {wanted.size:,} known ones: "
        f"{_names.quoted(unknown)}"
    )


def checked_left_out(left_out: object, num_rows: int) -> np.ndarray | None:
    """Checks counts of entries that were left out of each row; None if all are 0.

    Returns:
      `[rows]` int32.

    Raises:
      ValueError: `left_out` is not a count for each row.
    """
    if left_out is None:
        return None
    given = np.asarray(left_out)
    with np.errstate(invalid="ignore"):
        whole = given.astype(np.int64)
    wrong = (whole != given) | (whole < 0) | (whole > MAX_ENTRIES)
    if given.shape != (num_rows,) or wrong.any():
        raise ValueError(f"left_out must be a count for each of the {num_rows:,} rows")
    return whole.astype(np.int32) if whole.any() else None


def check_times(times: np.ndarray) -> None:
    """Raises ValueError unless all times are finite and have one of the dtypes of times."""
    if times.dtype not in (np.int64, np.float64, "datetime64[us]"):
        raise ValueError(
            f"times must be int64, float64 or datetime64[us], got {times.dtype}"
        )
    if not np.isfinite(times).all():
        raise ValueError(f"entry {np.argmin(np.isfinite(times)):,} has no finite time")
