"""Data sets of histories: the events of each row in the order of time, with repeats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from sparsejax import codec
from sparsejax.data.files import names as _names
from sparsejax.data.files import stored
from sparsejax.data.files.columns import Columns
from sparsejax.data.files.entries import Entries, offsets
from sparsejax.data.files.names import Names
from sparsejax.data.files.opening import DataError, Path
from sparsejax.data.sets.dataset import SparseDataset, events_of_pairs
from sparsejax.data.sets.events import (
    Events,
    UserFeatures,
    checked_weights,
    named,
    of_stated,
    stated,
)
from sparsejax.data.sets.named_rows import NamedRows, check_times, checked_left_out
from sparsejax.data.sets.split import (
    Repeats,
    Time,
    are_known,
    check_repeats,
    cut_of,
    heldout_entries,
    parts_at,
)
from sparsejax.data.sets.splits import Split, split_by_share, split_entries
from sparsejax.sparse import CSR, as_int32


class Histories(NamedTuple):
    """Histories without names, concatenated.

    >>> Histories(np.array([0, 3, 3]), np.array([5, 2, 5])).padded(2).tolist()
    [[2, 5], [-1, -1]]

    Attributes:
      indptr: `[rows + 1]` int32 offsets: row r has the entries `indptr[r] .. indptr[r + 1] - 1`.
      indices: `[entries]` int32 feature of each entry, the oldest of a row first.
      times: `[entries]` times, or None.
      events: columns of the events, or None.
      weights: `[entries]` float32 weight of each entry as a target, or None.
    """

    indptr: np.ndarray
    indices: np.ndarray
    times: np.ndarray | None = None
    events: Events | None = None
    weights: np.ndarray | None = None

    def padded(self, length: int) -> np.ndarray:
        """`[rows, length]` int32: the last `length` entries of each row, padded with -1.

        The oldest entry comes first and the padding last, so that with causal attention no
        entry attends to the padding.

        Raises:
          ValueError: `length` is not positive.
        """
        is_entry, entries = self._last(length)
        rows = np.full(is_entry.shape, -1, np.int32)
        rows[is_entry] = as_int32("indices", self.indices[entries])
        return rows

    def padded_times(self, length: int) -> np.ndarray:
        """`[rows, length]` float32: times of `padded`, relative to the row's last entry.

        They are 0 or less, and in seconds if times are dates. The padding is 0.

        >>> times = np.array([3, 5, 4])
        >>> Histories(np.array([0, 2, 3]), np.array([5, 2, 5]), times).padded_times(2).tolist()
        [[-2.0, 0.0], [0.0, 0.0]]

        Raises:
          ValueError: `length` is not positive, or there are no times.
        """
        if self.times is None:
            raise ValueError("there are no times; read the data with time=COLUMN")
        is_entry, entries = self._last(length)
        last = np.repeat(self.indptr[1:] - 1, is_entry.sum(axis=1))
        since = self.times[entries] - self.times[last]
        if since.dtype.kind == "m":
            since = since / np.timedelta64(1, "s")
        rows = np.zeros(is_entry.shape, np.float32)
        rows[is_entry] = since
        return rows

    def padded_column(
        self, column: np.ndarray, length: int, *, fill: float = 0
    ) -> np.ndarray:
        """`[rows, length, ...]`: a column of the entries, arranged as by `padded`.

        `SequenceDataset.padded_column` describes the arguments.
        """
        is_entry, entries = self._last(length)
        found = np.full((*is_entry.shape, *column.shape[1:]), fill, column.dtype)
        found[is_entry] = column[entries]
        return found

    def _last(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays `[rows, length]`: a mask of the entries in `padded`, and entry numbers."""
        if length < 1:
            raise ValueError(f"length must be 1 or more, got {length}")
        kept = np.minimum(np.diff(self.indptr), length)
        place = np.arange(length)
        is_entry = place < kept[:, None]
        entries = (self.indptr[1:] - kept)[:, None] + place
        return is_entry, entries[is_entry]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SequenceDataset(NamedRows):
    """Histories in host memory, with names: the events of each row in their order.

    >>> table = {"user": ["ann", "bob", "ann", "ann"], "item": ["tea", "rye", "rye", "tea"]}
    >>> data = read_sequences(pandas.DataFrame(table | {"time": [3, 5, 1, 9]}))
    >>> data
    SequenceDataset(2 rows, 2 features, 4 entries, times)
    >>> data.feature_names[data.indices[data.indptr[0] : data.indptr[1]]].tolist()
    ['rye', 'tea', 'tea']

    `read_sequences` makes it from files and tables, and `from_sparse` from a
    `SparseDataset` that has times. A row may have no entries. Rows and features have names
    as in `SparseDataset`.

    Attributes:
      indptr: `[rows + 1]` int32 offsets: row r has the entries `indptr[r] .. indptr[r + 1] - 1`.
      indices: `[entries]` int32 feature of each entry, the oldest of a row first.
      row_names: `[rows]` names of the rows.
      feature_names: `[features]` names of the features.
      times: `[entries]` int64, float64 or datetime64[us] (in UTC if the source has a time
        zone). They do not decrease within a row. None if they are unknown.
      left_out: `[rows]` int32 number of entries that were left out of each row because
        `feature_names` lacks their features. None if there are none.
      columns: columns of the table from which the data set was read, by role. None if it
        was not read from a table.
      weights: `[entries]` float32 weight of each entry as a target of the loss; 0 for an
        entry that is only an input. None: each has the weight 1. See `with_targets`.
      events: columns of the events, see `EventSchema`. None if there are none.
      context: columns `[rows, ...]` of what is known of the next event, by name, for a model
        that recommends; see `with_context`. None if they are unknown. Selections and saved
        files do not contain it.
      users: columns of the users, with a cell for each row; see `with_users`. None if there
        are none.

    Raises:
      ValueError: sizes do not match, an index is not that of a feature, a name occurs twice,
        a time is not finite or earlier than the one before it, or a weight is negative or
        not finite.
    """

    kind: ClassVar[str] = "histories"
    _stored: ClassVar[stored.Form] = stored.HISTORIES

    indptr: np.ndarray
    indices: np.ndarray
    row_names: Names
    feature_names: Names
    times: np.ndarray | None = None
    left_out: np.ndarray | None = None
    columns: Columns | None = None
    weights: np.ndarray | None = None
    events: Events | None = None
    context: Mapping[str, np.ndarray] | None = None
    users: Events | None = None

    def __post_init__(self) -> None:
        def put(name: str, value) -> None:
            object.__setattr__(self, name, value)

        for name in ("indptr", "indices"):
            given = np.asarray(getattr(self, name))
            if given.ndim != 1 or given.dtype.kind not in "iu":
                raise ValueError(
                    f"{name} must be integers of one dimension, got "
                    f"{given.dtype}{list(given.shape)}"
                )
            # Other integers become int64, because int32 might overflow before the checks below.
            put(name, given if given.dtype == np.int32 else given.astype(np.int64))
        for what in ("row", "feature"):
            put(f"{what}_names", _names.as_names(getattr(self, f"{what}_names")))
            _names.check_unique(getattr(self, f"{what}_names"), what)
        ends = self.indptr
        if len(ends) != len(self.row_names) + 1:
            raise ValueError(
                f"indptr must have one number more than there are row names, got "
                f"{len(ends):,} and {len(self.row_names):,}"
            )
        if ends[0] != 0 or ends[-1] != len(self.indices) or (np.diff(ends) < 0).any():
            raise ValueError(
                f"indptr must rise from 0 to the {len(self.indices):,} entries"
            )
        wrong = (self.indices < 0) | (self.indices >= self.num_features)
        if wrong.any():
            entry = int(np.argmax(wrong))
            raise ValueError(
                f"entry {entry:,} is feature {self.indices[entry]}, but there are "
                f"{self.num_features:,} features"
            )
        for name in ("indptr", "indices"):
            put(name, as_int32(name, getattr(self, name)))
        if self.times is not None:
            self._check_times(self.times)
        put("left_out", checked_left_out(self.left_out, self.num_rows))
        if self.weights is not None:
            put("weights", checked_weights(self.weights, self.num_entries))
        if self.events is not None and len(self.events) != self.num_entries:
            raise ValueError(
                f"there are {self.num_entries:,} entries, but columns of "
                f"{len(self.events):,} events"
            )
        if self.users is not None and len(self.users) != self.num_rows:
            raise ValueError(
                f"there are {self.num_rows:,} rows, but columns of {len(self.users):,} users"
            )
        for name, column in (self.context or {}).items():
            if len(column) != self.num_rows:
                raise ValueError(
                    f"there are {self.num_rows:,} rows, but the context {name!r} has "
                    f"{len(column):,}: give it for these rows, with_context(...)"
                )

    def _check_times(self, times: np.ndarray) -> None:
        if times.shape != self.indices.shape:
            raise ValueError(
                f"there are {self.num_entries:,} entries, but times has the shape "
                f"{times.shape}"
            )
        check_times(times)
        falls = times[1:] < times[:-1]
        starts = self.indptr[1:-1]
        falls[starts[(starts > 0) & (starts < len(times))] - 1] = False
        if falls.any():
            entry = int(np.argmax(falls)) + 1
            row = int(np.searchsorted(self.indptr, entry, side="right")) - 1
            raise ValueError(
                f"row {row} has the time {times[entry]} after {times[entry - 1]}; sort "
                "the entries of each row by time, as read_sequences does"
            )

    @property
    def num_examples(self) -> int:
        """Number of rows that a model can learn from; see `are_examples`."""
        return int(np.sum(self.are_examples))

    @property
    def are_examples(self) -> np.ndarray:
        """`[rows]` bool: whether a model can learn from a row.

        The row needs an entry after its first one, with a positive weight if there are
        weights. If there are columns of users, the first entry suffices.
        """
        first = int(self.users is None)
        if self.weights is None:
            return np.diff(self.indptr) > first
        before = np.append(0, np.cumsum(self.weights > 0))
        start, end = self.indptr[:-1], self.indptr[1:]
        return before[end] > before[np.minimum(start + first, end)]

    @property
    def histories(self) -> Histories:
        """The histories without names and columns of events."""
        return Histories(self.indptr, self.indices, self.times)

    def padded(self, length: int) -> np.ndarray:
        """`[rows, length]` int32: the last `length` entries of each row, padded with -1.

        See `Histories.padded`.
        """
        return self.histories.padded(length)

    def padded_times(self, length: int) -> np.ndarray:
        """`[rows, length]` float32: times of `padded`; see `Histories.padded_times`."""
        return self.histories.padded_times(length)

    def padded_column(
        self, column: np.ndarray, length: int, *, fill: float = 0
    ) -> np.ndarray:
        """`[rows, length, ...]`: a column of the entries, arranged as by `padded`.

        Args:
          column: `[entries, ...]` array, such as `weights`, or a column of `events`.
          length: number of places for each row.
          fill: number for the padding.

        Raises:
          ValueError: `length` is not positive, or the column has another length.
        """
        if len(column) != self.num_entries:
            raise ValueError(
                f"the column has {len(column):,} entries, not {self.num_entries:,}"
            )
        return self.histories.padded_column(column, length, fill=fill)

    # Methods for targets and event columns.

    def with_targets(
        self,
        targets: str | Sequence[str] | None = None,
        *,
        weights: Mapping[str, float] | str | None = None,
    ) -> SequenceDataset:
        """Sets the weights of entries, so that only some events are targets.

        >>> events = [{"user": "ann", "item": "tea", "action": "view"}]
        >>> events += [{"user": "ann", "item": "tea", "action": "purchase"}]
        >>> data = read_sequences(events, events=EventSchema(kind="action"))
        >>> data.with_targets("purchase").weights.tolist()
        [0.0, 1.0]
        >>> data.with_targets(weights={"purchase": 1, "view": 0.1}).weights.tolist()
        [0.10000000149011612, 1.0]

        The other events stay as inputs of a model. The loss of a batch is the mean of the
        losses of its targets, weighted by these weights. `evaluate` and the validation of
        `fit` count only held-out entries with a positive weight.

        Args:
          targets: kind or kinds of events that are targets; None: all kinds.
          weights: weight of each kind of event, where a kind that is not named has 0; or the
            name of a column of numbers, whose values in `events` (after `log1p`) are the
            weights. None: each target has the weight 1.

        Raises:
          ValueError: both arguments are None; the events have no kinds, or not these; a
            weight is negative or not finite; or no event is a target.
        """
        if targets is None and weights is None:
            raise ValueError("give targets=..., weights=... or both")
        events = self._known_events("so there are no kinds and no weights", "...")
        found = events.weights_of(targets, weights)
        if self.num_entries and not found.any():
            raise ValueError("no event is a target with a positive weight")
        return dataclasses.replace(self, weights=found)

    def only_targets(self) -> SequenceDataset:
        """Selects the entries with a positive weight, or all if there are no weights."""
        if self.weights is None:
            return self
        return self._with(self._entries.keep(self.weights > 0))

    def of_kinds(self, *kinds: str) -> SequenceDataset:
        """Selects the events of the given kinds.

        >>> events = [{"user": "ann", "item": "tea", "action": "view"}]
        >>> events += [{"user": "ann", "item": "rye", "action": "purchase"}]
        >>> data = read_sequences(events, events=EventSchema(kind="action"))
        >>> data.of_kinds("purchase").num_entries
        1

        Raises:
          ValueError: the events have no kinds, or not these.
        """
        events = self._known_events("so there are no kinds", "kind=COLUMN")
        return self._with(self._entries.keep(events.are_of(*kinds)))

    @property
    def kinds(self) -> dict[str, int]:
        """The number of events of each kind that the training data has; empty without kinds."""
        if self.events is None:
            return {}
        found = {k: int(self.events.are_of(k).sum()) for k in self.events.kinds}
        return {kind: count for kind, count in found.items() if count}

    def without_rows(self) -> SequenceDataset:
        """An empty data set with these items and columns of events and users."""
        none = np.zeros(0, np.int32)
        events, users = (
            None if each is None else each.taken(none)
            for each in (self.events, self.users)
        )
        found = no_histories(self.feature_names, events)
        return dataclasses.replace(found, users=users)

    def without_events(self) -> SequenceDataset:
        """Removes the columns of events and the context; weights and users stay."""
        return dataclasses.replace(self, events=None, context=None)

    def with_users(self, users: UserFeatures | None) -> SequenceDataset:
        """Adds columns of users, matched by name to the rows; None removes them.

        Raises:
          ValueError: a user is unknown, and a column of numbers has no value for missing
            ones.
        """
        found = None if users is None else users.of(self.row_names)
        return dataclasses.replace(self, users=found)

    def with_context(self, context: Any) -> SequenceDataset:
        """Adds the context: columns that are known before the next event of each history.

        >>> events = [{"user": "ann", "item": "tea", "hour": 9}]
        >>> schema = EventSchema(ids={"hour": HashedColumn(25)}, context=["hour"])
        >>> data = read_sequences(events, events=schema)
        >>> data.with_context({"hour": 9}).context["hour"] == data.events["hour"]
        array([ True])

        Args:
          context: the columns that `EventSchema.context` names: a table or frame with a row for
            each history, by the names in its column `user`, or without one in their order; or a
            list of dicts; or a dict of lists, in which a single value counts
            for all histories. Cells may be missing, as in the events, and dicts may lack columns.

        Raises:
          DataError: a cell has a value that its column does not allow.
          ValueError: the events have no such columns, or the number of rows differs.
          TypeError: `context` is no table.
        """
        lack = "so nothing is known of an event to come"
        events = self._known_events(lack, "..., context=...")
        found = events.context_of(self._by_name(context), self.num_rows)
        return dataclasses.replace(self, context=found)

    def _by_name(self, table: Any) -> Any:
        """Sorts a table in the order of the histories if it has a column "user"."""
        is_table = hasattr(table, "__arrow_c_stream__")
        if not is_table or "user" not in (table := pa.table(table)).column_names:
            return table
        users = _names.as_names(table.column("user"))
        _names.check_unique(users, "user")
        at = _names.find_names(self.row_names, users)
        if (at < 0).any():
            absent = _names.quoted(self.row_names[at < 0])
            raise ValueError(f"context has no row for the users {absent}")
        return table.take(at)

    def _known_events(self, lack: str, asked: str) -> Events:
        if self.events is None:
            raise ValueError(
                f"the histories have no columns of events, {lack}; read them with "
                f"events=EventSchema({asked})"
            )
        return self.events

    def with_context_of(self, heldout: SequenceDataset) -> SequenceDataset:
        """Sets the context of each history to that of its first event in held-out data.

        A history without an event there gets missing values.

        Raises:
          ValueError: the held-out data have no columns of events, or other ones.
        """
        if self.events is None or not self.events.schema.context:
            return self
        if heldout.events is None:
            raise ValueError(
                "the held-out data have no columns of events, so the context of the event to "
                "come is not known; read them with events=train.events"
            )
        self.events.check_like(heldout.events, "the held-out data")
        row = _names.find_names(self.row_names, heldout.row_names)
        has = np.append(np.diff(heldout.indptr), 0)[row] > 0
        first = heldout.indptr[row[has]]
        found = {}
        for name in self.events.schema.context:
            column, number = heldout.events[name], self.events.schema.dense.get(name)
            fill = -1 if column.ndim == 2 else (number and number.missing) or 0
            found[name] = np.full((len(row), *column.shape[1:]), fill, column.dtype)
            found[name][has] = column[first]
        return dataclasses.replace(self, context=found)

    # Methods that convert from and to other data sets.

    @classmethod
    def from_sparse(cls, data: SparseDataset) -> SequenceDataset:
        """Makes histories from the entries of each row, in the order of their times.

        A `SparseDataset` has one entry for each (row, feature), at the time of its latest
        event, so earlier repeats are lost. Values are left out.

        Raises:
          ValueError: the data set has no times.
        """
        if data.times is None or data.order is None:
            raise ValueError(
                "the data set has no times, so the order is not known; read it with "
                "time=COLUMN"
            )
        entries = data._entries.sorted("times", "order")
        return cls(
            entries.indptr,
            entries.indices,
            data.row_names,
            data.feature_names,
            entries.columns["times"],
            data.left_out,
            data.columns,
        )

    def to_sparse(self) -> SparseDataset:
        """Makes a data set with one entry of value 1 for each (row, feature).

        It equals the result of `read` with `indicator=True`. If there are times, an entry has
        the time of its latest event. Weights and columns of events are left out.
        """
        # The entries of a row are sorted by time, so their positions serve as times.
        place = np.arange(self.num_entries)
        rows = self._entries.row_of
        latest, first = events_of_pairs(rows, self.indices, place)
        counts = np.bincount(rows[latest], minlength=self.num_rows)
        events = {}
        if self.times is not None:
            events = {"times": self.times[latest], "order": place[latest]}
            if first is not None:
                events["first_times"] = self.times[first]
        return SparseDataset(
            CSR(
                None, self.indices[latest], offsets(counts), num_cols=self.num_features
            ),
            self.row_names,
            self.feature_names,
            self.left_out,
            columns=self.columns,
            **events,
        )

    # Methods that split histories into train and heldout.

    def split_last(
        self, n: int = 1, *, repeats: Repeats = "all"
    ) -> Split[SequenceDataset]:
        """Holds out the last `n` entries of each row: `(train, heldout)`.

        One entry of each row always stays in train. So from a row of one entry nothing is
        held out. Both parts have all rows and features.

        If there are weights, only entries with a positive weight are held out: the last `n`
        targets of each row. Other entries after the first held-out one are in neither part,
        because a model must not see them.

        Args:
          n: number of entries to hold out from each row.
          repeats: treatment of an entry whose feature the row also has in train: "new" leaves
            it out of both parts, "all" holds it out. Here "all" is the default, because the
            next entry of a row may be a repeat. With "new" a row may have fewer than `n` held
            out.

        Raises:
          ValueError: `n` is not positive, no row has two entries, or "new" leaves no held-out
            entry.
        """
        if n < 1:
            raise ValueError(f"n must be 1 or more, got {n}")
        lengths = np.diff(self.indptr)
        first_held = self.indptr[1:] - np.minimum(n, np.maximum(lengths - 1, 0))
        is_held = np.arange(self.num_entries) >= np.repeat(first_held, lengths)
        check_repeats(repeats)
        stays, why_nothing = ~is_held, "no row has more than one entry"
        behind = None
        if self.weights is not None:
            is_held, stays = self._last_targets(n)
            behind = ~(is_held | stays)
            why_nothing = "no row has an entry before one with a positive weight"
        if repeats == "new" and is_held.any():
            is_held = is_held & ~self._are_known(~stays)
            why_nothing = "the last entries of all rows are repeats"
        return split_entries(self, is_held, why_nothing, stays, behind)

    def _last_targets(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Masks `[entries]` of each row's last `n` targets, and of the entries before these."""
        assert self.weights is not None
        row = self._entries.row_of
        is_target = self.weights > 0
        is_target[self.indptr[:-1][np.diff(self.indptr) > 0]] = False
        up_to = np.cumsum(is_target)
        of_rows = np.append(0, up_to)[self.indptr[1:]]
        is_held = is_target & (of_rows[row] - up_to < n)
        first = np.full(self.num_rows, self.num_entries)
        np.minimum.at(first, row[is_held], np.flatnonzero(is_held))
        return is_held, np.arange(self.num_entries) < first[row]

    def split_at(
        self,
        time: Time | None = None,
        *,
        fraction: float | None = None,
        repeats: Repeats = "new",
    ) -> Split[SequenceDataset]:
        """Holds out all entries at or after a point in time: `(train, heldout)`.

        Rows that begin later have an empty history in train. The parts have the same
        features in each row as the parts of `SparseDataset.split_at`.

        Args:
          time: time of the split, of the type of `times`; entries at or after it are held
            out.
          fraction: share of the entries before the split, in place of
            `time`.
          repeats: "new" leaves later entries whose feature the row has in train out of both
            parts, and the result counts them. "all" holds out every later entry.

        Raises:
          ValueError: there are no times, `time` is of another kind, or one part would be
            empty.
        """
        if self.times is None:
            raise ValueError("the data set has no times; read it with time=COLUMN")
        check_repeats(repeats)
        if not self.times.size:
            raise ValueError("nothing is held out: there are no entries")
        times, cut = self.times, cut_of(self.times, time, fraction)
        known = self._are_known(times >= cut)
        stays, is_held = parts_at(times, times, cut, repeats, known)
        return split_entries(self, is_held, "", stays)

    def _are_known(self, is_held: np.ndarray) -> np.ndarray:
        """`[entries]` bool: whether the row has the feature in an entry that is not held out."""
        return are_known(self._entries.row_of, self.indices, is_held, self.num_features)

    def split(self, fraction: float, *, seed: int) -> Split[SequenceDataset]:
        """Splits the entries of each row at random into `(train, heldout)`.

        `SparseDataset.split` describes the rule. Each repeat of an item is drawn
        independently. Entries that stay in train keep their order. To predict the next entry,
        use `split_last` or `split_at`.

        Raises:
          ValueError: `fraction` is outside (0, 1), or every row is too short for an entry
            to be held out.
        """
        rows = self._entries.row_of
        order = np.lexsort((self.indices, rows))  # stable: repeats keep their order
        begins = np.ones(len(order), bool)
        begins[1:] = (np.diff(rows[order]) != 0) | (np.diff(self.indices[order]) != 0)
        place = np.arange(len(order))
        occurrences = np.empty(len(order), np.int64)
        occurrences[order] = place - np.maximum.accumulate(np.where(begins, place, 0))
        is_held = heldout_entries(
            self.indptr,
            self.indices,
            self.row_names,
            self.feature_names,
            fraction,
            seed,
            occurrences=occurrences,
        )
        return split_by_share(self, is_held, fraction)

    @property
    def _manner(self) -> str:
        manner = "no times" if self.times is None else "times"
        if self.weights is not None:
            manner += ", weights"
        if self.events is not None:
            manner += f", events with {', '.join(self.events.schema.used)}"
        if self.users is not None:
            manner += f", users with {', '.join(self.users.schema.used)}"
        return manner

    def save(self, path: Path) -> None:
        facts, categories, entries = {}, {}, self._entries
        if (events := self.events) is not None:
            facts = stated(events)
            categories = dict(events.vocabularies)
        if (users := self.users) is not None:
            facts["users"] = stated(users)
            begin = stored.USERS
            categories |= {
                f"{begin}{n}": some for n, some in users.vocabularies.items()
            }
            own = {f"{begin}{name}": column for name, column in users.columns.items()}
            entries = dataclasses.replace(entries, of_rows={**entries.of_rows, **own})
        text = codec.text(facts) if facts else ""
        names = self.row_names, self.feature_names
        rows = stored.StoredRows(entries, *names, text, categories)
        stored.write_rows(path, self._stored, rows)

    @classmethod
    def load(cls, path: Path) -> SequenceDataset:
        rows = stored.read_rows(path, cls._stored, events=True)
        try:
            events, users, entries = None, None, rows.entries
            facts = codec.parse(rows.facts) if rows.facts else {}
            # If there are no entries or rows, only the document contains the width of lists.
            if "schema" in facts:
                events = of_stated(facts, rows.categories)
                if not len(entries.indices):
                    entries = entries.replaced(**named(events.columns))
            if "users" in facts:
                users = of_stated(facts["users"], rows.categories, stored.USERS)
                if entries.num_rows:
                    found = {
                        n: entries.of_rows[f"{stored.USERS}{n}"] for n in users.columns
                    }
                    users = users.with_columns(found)
            data = _dataset(entries, rows.row_names, rows.feature_names, events)
            return dataclasses.replace(data, users=users)
        except (ValueError, KeyError) as error:
            raise DataError.at(path, f"is damaged: {error}") from error

    @property
    def _entries(self) -> Entries:
        return Entries.of(
            self.indptr,
            {"left_out": self.left_out},
            indices=self.indices,
            times=self.times,
            weights=self.weights,
            **named({} if self.events is None else self.events.columns),
        )

    @classmethod
    def _of(
        cls,
        entries: Entries,
        row_names: Names,
        feature_names: Names,
        columns: Columns | None = None,
    ) -> SequenceDataset:
        return _dataset(entries, row_names, feature_names, None, columns)

    def _with(
        self,
        entries: Entries,
        row_names: Names | None = None,
        feature_names: Names | None = None,
    ) -> SequenceDataset:
        rows = self.row_names if row_names is None else row_names
        features = self.feature_names if feature_names is None else feature_names
        found = _dataset(entries, rows, features, self.events, self.columns)
        return dataclasses.replace(found, users=self.users)

    def _rows(self, rows: np.ndarray, names: Names | None = None) -> SequenceDataset:
        if self.users is None:
            return super()._rows(rows, names)
        found = dataclasses.replace(self, users=None)._rows(rows, names)
        return dataclasses.replace(found, users=self.users.rows(rows))

    def _in_order(self, entries: Entries) -> Entries:
        return entries

    def _joined(self, column: np.ndarray, names: Names) -> SequenceDataset:
        entries = self._entries.replaced(indices=column[self.indices])
        return self._with(entries, feature_names=names)


def no_histories(feature_names: Names, events: Events | None) -> SequenceDataset:
    """An empty data set with these items and columns of events."""
    none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return SequenceDataset(start, none, feature_names[:0], feature_names, events=events)


def _dataset(
    entries: Entries,
    row_names: Names,
    feature_names: Names,
    events: Events | None,
    columns: Columns | None = None,
) -> SequenceDataset:
    """Makes a data set from entries, and `Events` from the event columns among them.

    Args:
      entries: all entries, including event columns.
      row_names: names of the rows.
      feature_names: names of the features.
      events: events that have the schema and vocabularies of these columns, or None.
      columns: columns of the table from which the entries were read, or None.
    """
    if events is not None:
        names = events.schema.used
        found = {n: entries.columns[f"{stored.EVENTS}{n}"] for n in names}
        events = events.with_columns(found)
    return SequenceDataset(
        entries.indptr,
        entries.indices,
        row_names,
        feature_names,
        entries.columns.get("times"),
        entries.of_rows.get("left_out"),
        columns,
        entries.columns.get("weights"),
        events,
    )


SequenceSplit = Split  # an older name of this class
