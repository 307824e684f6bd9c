"""A data set of items: a sparse matrix, and the names of its rows and features."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import scipy.sparse

from sparsejax.data.files import names as _names
from sparsejax.data.files import stored
from sparsejax.data.files.columns import Columns
from sparsejax.data.files.entries import Entries, Leaves, known
from sparsejax.data.files.names import Names
from sparsejax.data.sets import vocabulary
from sparsejax.data.sets.named_rows import NamedRows, check_times, checked_left_out
from sparsejax.data.sets.split import (
    Repeats,
    Time,
    check_repeats,
    cut_of,
    heldout_entries,
    heldout_last,
    parts_at,
    warn_of_repeats,
)
from sparsejax.data.sets.splits import Split, split_by_share, split_entries
from sparsejax.sparse import CSR, as_int32

# Columns of entries that a data set has, besides indices and values, if it has times.
_EVENTS = ("times", "order", "first_times")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SparseDataset(NamedRows):
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

    When two data sets are combined, rows and features are matched by their names, never by
    position. Names are unique text, in arrays of NumPy's `StringDType`: `feature_names[ids]`
    has the names for an array of ids, and `feature_names[i]` is a `str`.

    Attributes:
      matrix: `[rows, features]` CSR with NumPy leaves, without padding; `matrix.data` is None
        (indicator: every entry is 1) or float32. In a row, indices ascend and are
        unique.
      row_names: `[rows]` names of the rows.
      feature_names: `[features]` names of the features.
      left_out: `[rows]` int32 number of entries that were left out of each row because
        `feature_names` lacks their features (see `align_features`). None if there are no
        such entries. `evaluate` counts such entries of held-out data as missed.
      times: `[entries]` time of the latest event of each entry, in the order of
        `matrix.indices`: int64, float64 or datetime64[us] (in UTC if the source has a time
        zone). None if times were not read.
      order: `[entries]` int64 position in the file of each entry's latest event, which
        decides between equal times. None if `times` is None.
      columns: columns of the table from which the data set was read, by role. None if it
        was not read from a table.
      first_times: `[entries]` time of the earliest event of each entry; None if each entry
        has one event. `split_at` uses it to find entries with events on both sides.

    Raises:
      ValueError: sizes do not match, a name or an index occurs twice, a time is not
        finite, or only one of `times` and `order` is given.
    """

    _stored: ClassVar[stored.Form] = stored.ITEMS

    matrix: CSR
    row_names: Names
    feature_names: Names
    left_out: np.ndarray | None = None
    times: np.ndarray | None = None
    order: np.ndarray | None = None
    columns: Columns | None = None
    first_times: np.ndarray | None = None

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
        left_out = checked_left_out(self.left_out, matrix.num_rows)
        object.__setattr__(self, "left_out", left_out)
        _check_times(self.times, self.order, self.num_entries)
        first = self.first_times
        if first is not None:
            if self.times is None:  # a caller has removed the times
                object.__setattr__(self, "first_times", None)
            elif first.shape != self.times.shape or (first > self.times).any():
                raise ValueError(
                    "first_times must have a time for each entry, which is not later than that of times"
                )

    @property
    def num_examples(self) -> int:
        """Number of rows that a model can learn from, which are all rows."""
        return self.num_rows

    @classmethod
    def from_scipy(
        cls,
        matrix,
        *,
        row_names: Iterable[object] | None = None,
        feature_names: Iterable[object] | None = None,
    ) -> SparseDataset:
        """Makes a data set from any SciPy sparse matrix or array, `[rows, features]`.

        Columns keep their numbers. Duplicates are summed, and stored zeros stay entries.
        A boolean matrix becomes an indicator; other values become float32. Names are
        decimal numbers by default, and given ones are spelled as `from_arrow` spells them.

        A warning is given if entries are spread unevenly over the columns: if 4 or 8 devices
        have a contiguous range of columns each, one of them would hold more than 1.3 times
        the mean number of entries, and `vocabulary_order` would reduce that.

        Raises:
          TypeError: `matrix` is not SciPy sparse.
          ValueError: a value is NaN or infinite, or becomes infinite as float32; the
            message names row and column. A name is missing, or is a fraction, a boolean or
            a date.
        """
        csr = CSR.from_scipy(matrix)
        rows, features = csr.shape
        dataset = cls(
            csr,
            _names.given_names(range(rows) if row_names is None else row_names),
            _names.given_names(
                range(features) if feature_names is None else feature_names
            ),
        )
        columns = np.asarray(dataset.matrix.indices)
        vocabulary.warn_if_unbalanced(columns, dataset.feature_names)
        return dataset

    def to_scipy(self) -> scipy.sparse.csr_array:
        """The matrix as a SciPy `csr_array` of float32."""
        return self.matrix.to_scipy()

    def without_values(self) -> SparseDataset:
        """A copy with the same entries as an indicator data set; entries of value 0 remain."""
        return dataclasses.replace(
            self, matrix=dataclasses.replace(self.matrix, data=None)
        )

    def split(self, fraction: float, *, seed: int) -> Split[SparseDataset]:
        """Splits the entries of each row at random into `(train, heldout)`.

        From a row of n entries, `(1 - fraction) n` are held out, rounded half up, but one
        entry always stays in train. Both parts have all rows and features of this data
        set. The part of an entry depends on the seed, the name of its row and the names of
        the row's features only. It depends neither on the order of rows or columns nor on
        other rows. Entries that were left out before (`left_out`) are in neither part: split
        first, then align.

        Args:
          fraction: share of the entries to train on, in (0, 1).
          seed: any integer.

        Raises:
          ValueError: `fraction` is outside (0, 1), or every row is too short for an entry
            to be held out.
        """
        is_held = heldout_entries(
            np.asarray(self.matrix.indptr),
            np.asarray(self.matrix.indices),
            self.row_names,
            self.feature_names,
            fraction,
            seed,
        )
        return split_by_share(self, is_held, fraction)

    def split_last(self, n: int = 1) -> Split[SparseDataset]:
        """Holds out the last `n` entries of each row by time: `(train, heldout)`.

        One entry of each row always stays in train. So rows of up to `n` entries have
        fewer than `n` held out. If times are equal, the entry that comes later in the file
        counts as later. Both parts have all rows and features of this data set.

        An entry whose row has the feature several times is held out as a whole, at the
        time of its latest event, with a warning. `SequenceDataset.split_last` splits single
        events.

        Args:
          n: number of entries to hold out from each row.

        Raises:
          ValueError: there are no times, `n` is not positive, or no row has two entries.
        """
        indptr = np.asarray(self.matrix.indptr)
        times, order = self._known_times()
        is_held = heldout_last(indptr, times, order, n)
        if self.first_times is not None:
            repeated = is_held & (self.first_times < times)
            warn_of_repeats(int(repeated.sum()), int(is_held.sum()))
        return split_entries(self, is_held, "no row has more than one entry")

    def split_at(
        self,
        time: Time | None = None,
        *,
        fraction: float | None = None,
        repeats: Repeats = "new",
    ) -> Split[SparseDataset]:
        """Holds out all events at or after a point in time: `(train, heldout)`.

        So a model is evaluated as it will be used: on later entries. Rows and features that
        appear later have no entry in train; the result counts them. Both parts have all rows
        and features of this data set. The events of an entry are divided between the parts,
        so that train has everything that was known at that time.

        >>> table = {"user": ["ann", "ann", "bob"], "item": ["tea", "rye", "tea"]}
        >>> frame = pandas.DataFrame(table | {"time": [1, 5, 7]})
        >>> print(from_arrow(frame, time="time").split_at(5))
        held out 2 of 3 entries (66.7%), in 2 rows; new rows: 1, new features: 1

        Args:
          time: time of the split; events at or after it are held out. It is a number if times
            are numbers. For dates it is a datetime, a date or text of ISO 8601, in UTC unless
            it has a time zone.
          fraction: share of the entries to train on, in place of `time`, in (0, 1), by their
            latest events. Entries with equal times stay together, and repeats are also in
            train, so the share may differ.
          repeats: treatment of a row's feature that has events on both sides. "new": it is
            only in train; features that the row did not have before are held out, and the
            result counts the others. "all": it is in both parts.

        Raises:
          ValueError: there are no times, `time` is of another kind, or one part would be
            empty. Or entries with events on both sides have values, which were summed over
            both sides.
        """
        check_repeats(repeats)
        times, _ = self._known_times()
        if not times.size:
            raise ValueError("nothing is held out: there are no entries")
        cut: Any = cut_of(times, time, fraction)
        first = times if self.first_times is None else self.first_times
        stays, is_held = parts_at(times, first, cut, repeats)
        both = (first < cut) & (times >= cut)
        if both.any() and self.matrix.data is not None:
            raise ValueError(
                f"{int(both.sum()):,} entries have events on both sides of {cut}, and their "
                "values were added when the data was read. Read it with indicator=True "
                "(--no-value), or split data.without_values(); or prepare the file with "
                "split_time=..., which splits values, too"
            )
        parts = split_entries(self, is_held, "", stays)
        left_out = int((both & ~is_held).sum())
        # For entries with events on both sides, the times of their other events are not stored.
        # known.
        known = np.where(both, first, times)
        return Split(
            dataclasses.replace(
                parts.train, times=known[stays], first_times=first[stays]
            ),
            dataclasses.replace(
                parts.heldout,
                times=times[is_held],
                first_times=np.where(both, times, first)[is_held],
            ),
            repeats=left_out,
        )

    def match_rows(self, other: SparseDataset) -> tuple[SparseDataset, SparseDataset]:
        """Selects the rows that both data sets have, by name, in the order of this one.

        Returns:
          `(self part, other part)`: row `i` of both parts has the same name.

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

    def merge(self, *others: SparseDataset) -> SparseDataset:
        """Joins the rows of all these data sets, and merges rows with equal names.

        The result equals that of `read` for one file with the lines of all of them. Rows are
        in order of first appearance. A (row, feature) that several data sets have becomes one
        entry. Its value is the sum of their values; if only some data sets have values, the
        entries of the others count 1.

        Times are kept if all data sets have times of one type; otherwise the result has
        no times. The time of an entry is the latest one; of equally late ones the last
        data set counts.

        Args:
          *others: data sets over the same features.

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
        whole = Entries.joined(_comparable([part._entries for part in parts]))
        rows = np.repeat(row, whole.lengths)
        merged, events = _merged(rows, whole.columns, (len(names), self.num_features))
        left_out = np.bincount(row, whole.of_rows["left_out"], len(names))
        return SparseDataset(merged, names, self.feature_names, left_out, **events)

    @property
    def _manner(self) -> str:
        return "indicator" if self.matrix.data is None else "valued"

    @property
    def _entries(self) -> Entries:
        matrix = self.matrix
        return Entries.of(
            matrix.indptr,
            {"left_out": self.left_out},
            indices=matrix.indices,
            values=matrix.data,
            **{name: getattr(self, name) for name in _EVENTS},
        )

    @classmethod
    def _of(
        cls,
        entries: Entries,
        row_names: Names,
        feature_names: Names,
        columns: Columns | None = None,
    ) -> SparseDataset:
        return cls(
            entries.csr(len(feature_names)),
            row_names,
            feature_names,
            entries.of_rows.get("left_out"),
            columns=columns,
            **{name: entries.columns.get(name) for name in _EVENTS},
        )

    def _in_order(self, entries: Entries) -> Entries:
        return entries.sorted("indices")

    def _joined(self, column: np.ndarray, names: Names) -> SparseDataset:
        entries = self._entries
        columns = entries.replaced(indices=column[entries.indices]).columns
        shape = (self.num_rows, len(names))
        matrix, events = _merged(entries.row_of, columns, shape)
        return dataclasses.replace(self, matrix=matrix, feature_names=names, **events)

    def _known_times(self) -> tuple[np.ndarray, np.ndarray]:
        if self.times is None or self.order is None:
            raise ValueError("the data set has no times; read it with time=COLUMN")
        return self.times, self.order


def _merged(
    rows: np.ndarray, columns: Leaves, shape: tuple[int, int]
) -> tuple[CSR, dict[str, Any]]:
    """Merges several entries of a (row, feature) into one, with the sum of their values.

    Args:
      rows: `[entries]` row of each entry.
      columns: columns of the entries; see `Entries`.
      shape: shape of the matrix.

    Returns:
      The matrix, and the columns of times, from the latest event of each entry. If several
      events are equally late, the last one in `order` counts.
    """
    features = columns["indices"]
    values = columns.get("values", np.ones(len(features), bool))
    matrix = scipy.sparse.coo_array((values, (rows, features)), shape=shape)
    events: dict[str, Any] = {}
    if "times" in columns:
        times, order = columns["times"], columns["order"]
        earliest = columns.get("first_times", times)
        at = np.argsort(order, kind="stable")
        at = at[latest_events(rows[at], features[at], times[at])]
        _, first = events_of_pairs(rows, features, earliest)
        if first is None and "first_times" in columns:
            first = earliest[at]
        events = known(times=times[at], order=order[at], first_times=first)
    return CSR.from_scipy(matrix), events


def latest_events(
    rows: np.ndarray, columns: np.ndarray, times: np.ndarray
) -> np.ndarray:
    """The positions of the latest event of each (row, column), `[entries]` int64.

    They are in the order of rows, and of columns in a row.

    If several events are equally late, the last one counts.

    Args:
      rows: `[events]` row of each event.
      columns: `[events]` column of each event.
      times: `[events]` time of each event.
    """
    return events_of_pairs(rows, columns, times)[0]


def events_of_pairs(
    rows: np.ndarray, columns: np.ndarray, times: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The `latest_events`, and the `[entries]` earliest time of each (row, column).

    The second result is None if no (row, column) has several events.
    """
    order = np.lexsort((times, columns, rows))  # stable: equal times keep their order
    rows, columns = rows[order], columns[order]
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (np.diff(rows) != 0) | (np.diff(columns) != 0)
    latest = order[is_last]
    if is_last.all():
        return latest, None
    return latest, times[order[np.append(True, is_last[:-1])]]


def _comparable(parts: Sequence[Entries]) -> list[Entries]:
    """Gives the entries of several data sets equal columns, so that they can be concatenated.

    If only some have values, the entries of the others count 1. The result has times if all
    have times of one type.
    """
    have = [set(part.columns) for part in parts]
    types = {part.columns["times"].dtype for part in parts if "times" in part.columns}
    is_timed = all("times" in names for names in have) and len(types) == 1
    start, found = 0, []
    for part in parts:
        columns = {"indices": part.indices}
        if any("values" in names for names in have):
            ones = np.ones(len(part.indices), np.float32)
            columns["values"] = part.columns.get("values", ones).astype(np.float64)
        if is_timed:
            times, order = part.columns["times"], part.columns["order"]
            columns |= {"times": times, "order": order + start}
            start += int(order.max(initial=-1)) + 1
            if any("first_times" in names for names in have):
                columns["first_times"] = part.columns.get("first_times", times)
        left_out = part.of_rows.get("left_out", np.zeros(part.num_rows))
        found.append(Entries(part.indptr, columns, {"left_out": left_out}))
    return found


def _host(matrix: CSR) -> CSR:
    """Converts a matrix to NumPy leaves and float32 values, without padding.

    Raises:
      ValueError: a row has a column twice.
    """
    indptr = as_int32("indptr", np.asarray(matrix.indptr))
    count = int(indptr[-1])
    indices = as_int32("indices", np.asarray(matrix.indices)[:count])
    data = None
    if matrix.data is not None:
        # Values beyond float32 become infinite, and CSR raises an error that names their
        # positions.
        with np.errstate(over="ignore"):
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
    """Raises ValueError unless times and order are valid for `count` entries, or both None."""
    if times is None and order is None:
        return
    if times is None or order is None:
        raise ValueError("times and order belong together, but one of them is None")
    if times.shape != (count,) or order.shape != (count,):
        raise ValueError(
            f"there are {count:,} entries, but times has the shape {times.shape} and "
            f"order {order.shape}"
        )
    check_times(times)
    if order.dtype != np.int64:
        raise ValueError(f"order must be int64, got {order.dtype}")
