"""A data set: a sparse matrix, and the names of its rows and features."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
import scipy.sparse

from sparsejax.data import names as _names
from sparsejax.data import parquet, vocabulary
from sparsejax.data.columns import Columns
from sparsejax.data.files import DataError, Path
from sparsejax.data.names import Names, RowNames
from sparsejax.data.split import (
    Time,
    as_time,
    heldout_entries,
    heldout_last,
    heldout_rows,
    time_of_share,
)
from sparsejax.sparse import CSR

_WAYS = (4, 8)
# With fewer entries than this in a part, what looks like imbalance may be chance.
_MIN_ENTRIES_PER_PART = 256


class UnknownFeaturesWarning(UserWarning):
    """Some entries were left out because the vocabulary lacks their feature."""


@dataclasses.dataclass(frozen=True, eq=False)
class SparseDataset:
    """Rows of sparse features, in host memory, with names.

    >>> matrix = scipy.sparse.csr_array([[1, 0, 1], [0, 0, 0], [0, 1, 0.0]])
    >>> data = SparseDataset.from_scipy(
    ...     matrix, row_names=["ann", "bob", "eve"], feature_names=["milk", "tea", "wine"]
    ... )
    >>> data.num_rows, data.num_features
    (3, 3)

    ::

        SparseDataset        row_names          feature_names
          matrix [ 1 . 1 ]     "ann"       "milk" "tea" "wine"
                 [ . . . ]     "bob"
                 [ . 1 . ]     "eve"

    Rows and features are identified by their names wherever two data sets meet, never
    by position. Names are text, unique, in arrays of NumPy's `StringDType`:
    `feature_names[ids]` names the features of an array of ids, and `feature_names[i]`
    is a `str`.

    Attributes:
      matrix: `[rows, features]`, NumPy leaves, no padding; `matrix.data` is None
        (indicator: every entry is 1) or float32. In a row, indices ascend and are
        unique.
      row_names: `[rows]` text.
      feature_names: `[features]` text.
      left_out: `[rows]` int32, how many more entries each row had, of features that
        these are not (see `align_features`), or None if there were none. `evaluate`
        counts those of held-out data as missed.
      times: `[entries]` when each entry was seen last, in the order of
        `matrix.indices`: int64, float64 or datetime64[us] (UTC where the source has a
        zone). None where times were not read.
      order: `[entries]` int64, the position of that event in its file, which decides
        between equal times. None where `times` is.
      columns: which columns of a table this was read from, and as what; None where it
        was not read from a table.

    Raises:
      ValueError: the sizes do not agree, a name or an index occurs twice, a time is not
        finite, or only one of `times` and `order` is given.
    """

    matrix: CSR
    row_names: Names
    feature_names: Names
    left_out: np.ndarray | None = None
    times: np.ndarray | None = None
    order: np.ndarray | None = None
    columns: Columns | None = None

    def __post_init__(self) -> None:
        matrix = _host(self.matrix)
        object.__setattr__(self, "matrix", matrix)
        for what, count in (("row", matrix.num_rows), ("feature", matrix.num_cols)):
            given = _names.as_names(getattr(self, f"{what}_names"))
            if len(given) != count:
                raise ValueError(
                    f"the matrix has {count:,} {what}s but {len(given):,} {what} names "
                    "were given"
                )
            _names.check_unique(given, what)
            object.__setattr__(self, f"{what}_names", given)
        left_out = self.left_out
        if left_out is not None:
            left_out = np.asarray(left_out, np.int32)
            if left_out.shape != (matrix.num_rows,) or left_out.min(initial=0) < 0:
                raise ValueError(
                    f"left_out must be a count for each of the {matrix.num_rows:,} rows"
                )
            object.__setattr__(self, "left_out", left_out if left_out.any() else None)
        _check_times(self.times, self.order, self.num_entries)

    def __repr__(self) -> str:
        kind = "indicator" if self.matrix.data is None else "valued"
        return (
            f"SparseDataset({self.num_rows:,} rows, {self.num_features:,} features, "
            f"{self.num_entries:,} entries, {kind})"
        )

    @property
    def num_rows(self) -> int:
        return self.matrix.num_rows

    @property
    def num_features(self) -> int:
        return self.matrix.num_cols

    @property
    def num_entries(self) -> int:
        return self.matrix.nse

    @classmethod
    def from_scipy(
        cls,
        matrix,
        *,
        row_names: Iterable[object] | None = None,
        feature_names: Iterable[object] | None = None,
    ) -> SparseDataset:
        """Takes any SciPy sparse matrix or array, `[rows, features]`.

        Columns keep their numbers. Duplicates are summed, stored zeros stay entries,
        a boolean matrix becomes an indicator, other values become float32. Names are
        decimal numbers by default.

        Warns if the entries are spread over the columns so unevenly that, of 4 or 8
        devices with a contiguous part each, one would hold more than 1.3 times its
        share, and `vocabulary_order` would do better.

        Raises:
          TypeError: `matrix` is not SciPy sparse.
          ValueError: a value is NaN or infinite (also: as float32); the message names
            row and column.
        """
        csr = CSR.from_scipy(matrix)
        rows, features = csr.shape
        dataset = cls(
            csr,
            _names.as_names(range(rows) if row_names is None else row_names),
            _names.as_names(
                range(features) if feature_names is None else feature_names
            ),
        )
        _warn_if_unbalanced(dataset)
        return dataset

    def to_scipy(self) -> scipy.sparse.csr_array:
        """The matrix as a SciPy `csr_array` of float32."""
        return self.matrix.to_scipy()

    def save(self, path: Path) -> None:
        """Writes the data set as one Parquet file, whole or not at all.

        Raises:
          OSError: the file cannot be written; nothing is left behind.
        """
        parts = {name: getattr(self, name) for name in parquet.Parts._fields}
        parquet.write_parquet(path, parquet.Parts(**parts))

    @classmethod
    def load(cls, path: Path) -> SparseDataset:
        """Reads what `save` wrote, exactly.

        Raises:
          DataError: the file is missing, is something else, or is damaged.
        """
        parts = parquet.read_parquet(path)
        try:
            return cls(**parts._asdict())
        except ValueError as error:
            raise DataError.at(path, f"is damaged: {error}") from error

    def without_values(self) -> SparseDataset:
        """The same entries as an indicator data set (also entries of value 0)."""
        return dataclasses.replace(
            self, matrix=dataclasses.replace(self.matrix, data=None)
        )

    def split(self, fraction: float, *, seed: int) -> Split:
        """Splits the entries of each row at random into `(train, heldout)`.

        Of a row of n entries, `(1 - fraction) n` are held out, rounded half up, but one
        always stays in train. Both parts have all rows and features of this data set.
        Where an entry goes depends on the seed, on the name of its row and on the names
        of the row's features, not on the order of rows or columns nor on other rows.
        What was left out before (`left_out`) is in neither: split first, then align.

        Args:
          fraction: share of the entries to train on, in (0, 1).
          seed: any integer.

        Raises:
          ValueError: `fraction` is outside (0, 1), or no row is long enough for anything
            to be held out.
        """
        is_held = heldout_entries(
            self.matrix, self.row_names, self.feature_names, fraction, seed
        )
        longest = np.diff(self.matrix.indptr).max(initial=0)
        return self._split(
            is_held,
            f"{1 - fraction:.3g} of each row is to be, rounded, but the longest row has "
            f"{longest:,} entries; hold out a larger share",
        )

    def split_last(self, n: int = 1) -> Split:
        """Holds out the last `n` entries of each row by time: `(train, heldout)`.

        One entry always stays in train, so that a row of n entries or fewer has fewer
        held out, and a row of one entry none. Of equal times the later is that which
        comes later in the file. Both parts have all rows and features of this data set.

        Args:
          n: entries of each row.

        Raises:
          ValueError: there are no times, or `n` is not positive, or no row has two
            entries.
        """
        indptr = np.asarray(self.matrix.indptr)
        is_held = heldout_last(indptr, *self._known_times(), n)
        return self._split(is_held, "no row has more than one entry")

    def split_at(
        self, time: Time | None = None, *, fraction: float | None = None
    ) -> Split:
        """Holds out all entries from a point in time on: `(train, heldout)`.

        So a model is tried as it will be used, on what it could not have seen. Rows and
        features that appear later have no entry in train; the result counts them. Both
        parts have all rows and features of this data set.

        >>> table = {"user": ["ann", "ann", "bob"], "item": ["tea", "rye", "tea"]}
        >>> frame = pandas.DataFrame(table | {"time": [1, 5, 7]})
        >>> print(from_arrow(frame, time="time").split_at(5))
        held out 2 of 3 entries (66.7%), in 2 rows; new rows: 1, new features: 1

        Args:
          time: entries at or after it are held out. A number where times are numbers;
            where they are dates a datetime, a date or text as of ISO 8601. A date without
            a time zone is taken as UTC.
          fraction: instead, the share of the entries to train on, in (0, 1), as nearly as
            entries of the same time allow, which are not parted.

        Raises:
          ValueError: there are no times, `time` is of another kind, or one part would be
            empty.
        """
        times, _ = self._known_times()
        if not times.size:
            raise ValueError("nothing is held out: there are no entries")
        if time is not None and fraction is None:
            cut = as_time(time, times)
        elif fraction is not None and time is None:
            cut = time_of_share(times, fraction)
        else:
            raise ValueError("pass either a time or a fraction")
        is_held = times >= cut
        span = f"the times are from {times.min()} to {times.max()}, the cut is {cut}"
        if is_held.all():
            raise ValueError(f"everything is held out, nothing to train on: {span}")
        return self._split(is_held, span)

    def split_rows(self, fraction: float, *, seed: int) -> Split:
        """Splits the rows at random into `(train, heldout)`, to measure on unseen rows.

        `(1 - fraction) num_rows` rows are held out, rounded half up, but one always
        stays in train. Both parts keep the order of rows and have all features. Which
        rows are held out depends on the seed and on their names, not on their order nor
        on what is in them.

        Args:
          fraction: share of the rows to train on, in (0, 1).
          seed: any integer.

        Raises:
          ValueError: `fraction` is outside (0, 1), or there are too few rows for one to
            be held out.
        """
        is_held = heldout_rows(self.row_names, fraction, seed)
        if not is_held.any():
            raise ValueError(
                f"nothing is held out: {1 - fraction:.3g} of the rows are to be, "
                f"rounded, but there are {self.num_rows:,}; hold out a larger share"
            )
        parts = (self._rows(np.flatnonzero(part)) for part in (~is_held, is_held))
        return Split(*parts)

    def match_rows(self, other: SparseDataset) -> tuple[SparseDataset, SparseDataset]:
        """The rows that both data sets have, by name, in this one's order.

        Returns:
          `(self part, other part)`: row `i` of one has the name of row `i` of the other.

        Raises:
          ValueError: no name occurs in both.
        """
        found = _names.find_names(self.row_names, other.row_names)
        rows = np.flatnonzero(found >= 0)
        if not rows.size:
            raise ValueError(
                "the two data sets have no row name in common: one has "
                f"{_names.quoted(self.row_names)}, the other "
                f"{_names.quoted(other.row_names)}"
            )
        return self._rows(rows), other._rows(found[rows])

    def align_rows(
        self,
        rows: RowNames | Iterable[object],
        *,
        missing: Literal["error", "empty"] = "error",
    ) -> SparseDataset:
        """The rows of the given names, in the given order.

        Args:
          rows: names, or a data set whose row names are meant.
          missing: what a name that is not in this data set becomes: an error, or an
            empty row. (`match_rows` leaves it out.)

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
                f'{_names.quoted(absent)}; missing="empty" makes empty rows of them'
            )
        return self._rows(found, wanted)

    def merge(self, *others: SparseDataset) -> SparseDataset:
        """The rows of all these data sets: one history out of several.

        It is what `read` would make of their lines in one file. Rows of the same name
        become one, in order of first appearance. What several of them have becomes one
        entry; values are added, and where only some data sets have values, the entries
        of the others count 1. Times are not kept.

        Args:
          *others: over the same features.

        Raises:
          ValueError: the features differ.
        """
        if not others:
            return self
        parts = (self, *others)
        for other in others:
            if not np.array_equal(self.feature_names, other.feature_names):
                raise ValueError(
                    "the data sets have different features; read them with the same "
                    "vocabulary (features=...), or use align_features"
                )
        encoder = _names.NameEncoder()
        for part in parts:
            encoder.add(_names.to_arrow(part.row_names))
        names, row = encoder.finish()
        lengths = np.concatenate([np.diff(part.matrix.indptr) for part in parts])
        columns = np.concatenate([part.matrix.indices for part in parts])
        data = np.ones(len(columns), bool)
        if any(part.matrix.data is not None for part in parts):
            data = np.concatenate([part.to_scipy().data for part in parts])
            data = data.astype(np.float64)
        left_out = [
            np.zeros(part.num_rows) if part.left_out is None else part.left_out
            for part in parts
        ]
        entries = (data, (np.repeat(row, lengths), columns))
        shape = (len(names), self.num_features)
        return SparseDataset(
            CSR.from_scipy(scipy.sparse.coo_array(entries, shape=shape)),
            names,
            self.feature_names,
            np.bincount(row, np.concatenate(left_out), len(names)).astype(np.int32),
        )

    def align_features(
        self, features: SparseDataset | Iterable[object]
    ) -> SparseDataset:
        """The same rows over another data set's features, in its order.

        Entries of features that are not among the given ones are left out, a warning
        says how many, and `left_out` keeps the number of each row.

        Args:
          features: names, or a data set whose feature names are meant.

        Raises:
          ValueError: there are entries, and all are of unknown features.
        """
        aligned, unknown = align_features(self, features)
        if unknown:
            warnings.warn(unknown, UnknownFeaturesWarning, stacklevel=2)
        return aligned

    def _rows(self, rows: np.ndarray, names: Names | None = None) -> SparseDataset:
        """Some rows; -1 is an empty one, for which `names` gives the names of all."""
        indptr = np.asarray(self.matrix.indptr)
        lengths = np.append(np.diff(indptr), 0)[rows]
        taken = _offsets(lengths)
        entries = np.repeat(indptr[rows] - taken[:-1], lengths)
        entries += np.arange(len(entries))
        return self._take(
            entries,
            taken,
            row_names=self.row_names[rows] if names is None else names,
            left_out=None
            if self.left_out is None
            else np.append(self.left_out, 0)[rows],
        )

    def _known_times(self) -> tuple[np.ndarray, np.ndarray]:
        if self.times is None or self.order is None:
            raise ValueError("the data set has no times; read it with time=COLUMN")
        return self.times, self.order

    def _split(self, is_held: np.ndarray, why_nothing: str) -> Split:
        """The parts, all rows and features in both."""
        if not is_held.any():
            raise ValueError(f"nothing is held out: {why_nothing}")
        return Split(self._entries(~is_held), self._entries(is_held))

    def _entries(self, keep: np.ndarray) -> SparseDataset:
        return self._take(keep, _offsets(keep)[self.matrix.indptr])

    def _take(
        self,
        entries: np.ndarray,
        indptr: np.ndarray,
        *,
        indices: np.ndarray | None = None,
        row_names: Names | None = None,
        feature_names: Names | None = None,
        left_out: np.ndarray | None = None,
    ) -> SparseDataset:
        """Chosen entries with what belongs to each, as rows that begin at `indptr`.

        `indices`, `row_names` and `feature_names` are this data set's by default.
        """
        features = self.feature_names if feature_names is None else feature_names
        if indices is None:
            indices = np.asarray(self.matrix.indices)[entries]
        data, times, order = (
            None if each is None else np.asarray(each)[entries]
            for each in (self.matrix.data, self.times, self.order)
        )
        return SparseDataset(
            CSR(data, indices, indptr, num_cols=len(features)),
            self.row_names if row_names is None else row_names,
            features,
            left_out,
            times,
            order,
            self.columns,
        )


class Split(NamedTuple):
    """Two parts of a data set, made by its methods `split`, `split_last`, ...

    >>> split = read("purchases.tsv").split(0.5, seed=0)
    >>> train, heldout = split
    >>> print(split)
    held out 3 of 6 entries (50.0%), in 3 rows; new rows: 0, new features: 1

    Rows and features are new if they have entries held out and none in train: a model
    that learns from `train` knows nothing of them.

    Attributes:
      train: the entries to train on.
      heldout: all others, over the same features.
    """

    train: SparseDataset
    heldout: SparseDataset

    @property
    def new_rows(self) -> int:
        """Number of rows that have entries held out and none in train."""
        known, held = (part.row_names[_lengths(part) > 0] for part in self)
        return int(np.sum(_names.find_names(held, known) < 0))

    @property
    def new_features(self) -> int:
        """Number of features that have entries held out and none in train."""
        known, held = (np.unique(part.matrix.indices) for part in self)
        return len(np.setdiff1d(held, known, assume_unique=True))

    def __str__(self) -> str:
        entries = self.train.num_entries + self.heldout.num_entries
        rows = np.sum(_lengths(self.heldout) > 0)
        return (
            f"held out {self.heldout.num_entries:,} of {entries:,} entries "
            f"({self.heldout.num_entries / max(entries, 1):.1%}), in {rows:,} rows; "
            f"new rows: {self.new_rows:,}, new features: {self.new_features:,}"
        )


def align_features(
    dataset: SparseDataset, features: SparseDataset | Iterable[object]
) -> tuple[SparseDataset, str | None]:
    """`SparseDataset.align_features`, with the warning's text returned instead."""
    if isinstance(features, SparseDataset):
        wanted = features.feature_names
    else:
        wanted = _names.as_names(features)
        _names.check_unique(wanted, "feature")
    column = _names.find_names(dataset.feature_names, wanted)
    matrix = dataset.matrix
    columns = column[matrix.indices]
    known = columns >= 0
    left_out = dataset.num_entries - int(known.sum())
    message = None
    if left_out:
        unknown = dataset.feature_names[column < 0]
        if left_out == dataset.num_entries:
            raise ValueError(
                f"all {left_out:,} entries are of features that the vocabulary lacks: "
                f"{_names.quoted(unknown)}; it has {_names.quoted(wanted)}"
            )
        message = (
            f"{left_out:,} of {dataset.num_entries:,} entries are left out: "
            f"{unknown.size:,} features are not among the {wanted.size:,} known ones: "
            f"{_names.quoted(unknown)}"
        )
    counts = np.diff(matrix.indptr)
    indptr = _offsets(known)[matrix.indptr]
    counts -= np.diff(indptr)
    if dataset.left_out is not None:
        counts += dataset.left_out
    shape = (dataset.num_rows, wanted.size)
    # Which entries are kept, in the order of their new columns.
    kept = (np.flatnonzero(known), columns[known], indptr)
    sorted_ = scipy.sparse.csr_array(kept, shape=shape)
    sorted_.sort_indices()
    aligned = dataset._take(
        sorted_.data,
        indptr,
        indices=sorted_.indices,
        feature_names=wanted,
        left_out=counts,
    )
    return aligned, message


def _host(matrix: CSR) -> CSR:
    """The matrix with NumPy leaves, float32 values, no padding; rows must be sets."""
    indptr = np.asarray(matrix.indptr, np.int32)
    count = int(indptr[-1])
    indices = np.asarray(matrix.indices, np.int32)[:count]
    data = None
    if matrix.data is not None:
        with np.errstate(
            over="ignore"
        ):  # becomes inf, which CSR reports with its place
            data = np.asarray(matrix.data)[:count].astype(np.float32, copy=False)
    host = CSR(data, indices, indptr, num_cols=matrix.num_cols)
    same = np.diff(indices) == 0
    starts = indptr[1:-1]
    same[starts[(starts > 0) & (starts < count)] - 1] = False
    if same.any():
        entry = int(np.flatnonzero(same)[0])
        row = int(np.searchsorted(indptr, entry, side="right")) - 1
        raise ValueError(
            f"row {row} has column {indices[entry]} twice; CSR.from_scipy sums them"
        )
    return host


def _check_times(
    times: np.ndarray | None, order: np.ndarray | None, count: int
) -> None:
    """Raises ValueError unless both are right for so many entries, or both are None."""
    if times is None and order is None:
        return
    if times is None or order is None:
        raise ValueError("times and order belong together, but one of them is None")
    if times.shape != (count,) or order.shape != (count,):
        raise ValueError(
            f"there are {count:,} entries, but times {times.shape} and order "
            f"{order.shape}"
        )
    if times.dtype not in (np.int64, np.float64, "datetime64[us]"):
        raise ValueError(
            f"times must be int64, float64 or datetime64[us], got {times.dtype}"
        )
    if order.dtype != np.int64:
        raise ValueError(f"order must be int64, got {order.dtype}")
    if not np.isfinite(times).all():
        raise ValueError(f"entry {np.argmin(np.isfinite(times)):,} has no finite time")


def _lengths(dataset: SparseDataset) -> np.ndarray:
    """`[rows]` number of entries."""
    return np.diff(dataset.matrix.indptr)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """`[n + 1]` int32: 0 and the running sums."""
    total = np.cumsum(lengths, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), total]).astype(np.int32)


def _warn_if_unbalanced(dataset: SparseDataset) -> None:
    columns, entries = dataset.num_features, dataset.num_entries
    if columns < vocabulary.HANDS or entries < max(_WAYS) * _MIN_ENTRIES_PER_PART:
        return
    counts = np.bincount(dataset.matrix.indices, minlength=columns)
    ways = max(_WAYS, key=lambda ways: vocabulary.imbalance(counts, ways))
    given = vocabulary.imbalance(counts, ways)
    if given <= vocabulary.MAX_IMBALANCE:
        return
    order = vocabulary.vocabulary_order(counts, dataset.feature_names)
    balanced = vocabulary.imbalance(counts[order], ways)
    if math.isclose(given, balanced) or given < balanced:
        return
    warnings.warn(
        f"on {ways} devices one would hold {given:.2f} times its share of the entries "
        f"({balanced:.2f} times in balanced order); reorder the columns: "
        "matrix[:, sparsejax.data.vocabulary_order(counts, feature_names)]",
        stacklevel=3,
    )
