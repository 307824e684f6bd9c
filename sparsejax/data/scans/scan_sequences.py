"""Scans histories on disk, to read them a part at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from sparsejax.data.events import tables
from sparsejax.data.events.tables import TableLayout
from sparsejax.data.files import parquet, stored
from sparsejax.data.files.columns import BY_NAME, Chosen, Column, TimeColumn
from sparsejax.data.files.entries import Entries
from sparsejax.data.files.names import FeatureNames, Names
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.files.parquet import ParquetPath
from sparsejax.data.files.stored import EVENTS
from sparsejax.data.prepared.folder import DataFolder
from sparsejax.data.scan import Group
from sparsejax.data.scans import scan_tables
from sparsejax.data.scans.scan_entries import SavedFiles, ScannedEntries
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.data.sets.events import Events, Targets, Weights, named, schema_of
from sparsejax.data.sets.sequences import Histories, SequenceDataset, no_histories
from sparsejax.sparse import as_int32


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScannedSequences(ScannedEntries[Histories]):
    """Histories on disk, of which `read` loads some rows.

    >>> table = {"user": ["ann", "ann", "bob"], "item": ["tea", "rye", "tea"]}
    >>> read_sequences(pandas.DataFrame(table)).save("histories")
    >>> scanned = scan_sequences("histories")
    >>> scanned
    ScannedSequences('histories', 2 rows, 2 features)
    >>> scanned.read(0, 1).indptr.tolist()
    [0, 2]

    `scan_sequences` returns it.

    Attributes:
      path: file, folder or address.
      feature_names: `[features]` names of the items.
      groups: row groups, in order.
      layout: columns of a table; None for saved sequences.
      chunk_rows: approximate number of rows that `fit` has on the devices at a time; None for
        as many as fit.
      events: types and categories of the columns of events, as empty `Events`; None if
        there are none.
      weights: the arguments of `with_targets`; None if all entries count alike.
    """

    kind: ClassVar[str] = "histories"

    path: Path
    feature_names: Names
    groups: tuple[Group, ...]
    layout: TableLayout | None = None
    chunk_rows: int | None = None
    events: Events | None = None
    weights: tuple[Targets, Weights] | None = None

    @property
    def _events(self) -> Events | None:
        return self.events

    def without_rows(self) -> SequenceDataset:
        """An empty data set with these items and columns of events."""
        return no_histories(self.feature_names, self.events)

    def with_targets(
        self,
        targets: str | Sequence[str] | None = None,
        *,
        weights: Mapping[str, float] | str | None = None,
    ) -> ScannedSequences:
        """Sets the weights of entries as targets, as `SequenceDataset.with_targets` does."""
        self.without_rows().with_targets(targets, weights=weights)  # checks the names
        return dataclasses.replace(self, weights=(targets, weights))

    def fingerprint(self) -> str:
        found = super().fingerprint()
        return found if self.weights is None else f"{found}-{self.weights}"

    @property
    def _columns(self) -> dict[str, np.ndarray]:
        """Empty event columns, by their names in `Entries`."""
        return {} if self.events is None else named(self.events.columns)

    def _lists(self, names: Iterable[str]) -> list[str]:
        return ["indices", *({"times"} & set(names)), *self._columns]

    def _joined(self, parts: list[Entries]) -> Histories:
        columns = {"indices": np.empty(0, np.int32), **self._columns}
        nothing = Entries(np.zeros(1, np.int64), columns)
        times = [part.columns["times"] for part in parts if "times" in part.columns]
        size, count = sum(map(len, times)), sum(len(part.indices) for part in parts)
        if (
            size not in (0, count)
            or len({part.dtype.kind == "M" for part in times}) > 1
        ):
            raise DataError.at(
                self.path,
                "some entries have times and others have none, or times of another "
                "kind; give all the same",
            )
        rows = Entries.joined([nothing, *parts])
        if self.layout is not None:
            if not times and count and self.layout.source is not None:
                self.layout.source.without_empty_times().check_order(self.path)
            rows = self._known(rows.sorted("times") if times else rows)
        elif (rows.indices < 0).any() or (rows.indices >= self.num_features).any():
            raise DataError.at(
                self.path, "is damaged: an index is not that of a feature"
            )
        events, weights = self.events, None
        if events is not None:
            found = {n: rows.columns[f"{EVENTS}{n}"] for n in events.schema.used}
            try:
                events = events.with_columns(found)
                if self.weights is not None:
                    weights = events.weights_of(*self.weights)
            except ValueError as error:
                are_damaged = self.layout is None and events is self.events
                problem = "is damaged: " * are_damaged
                raise DataError.at(self.path, f"{problem}{error}") from error
        indptr = as_int32("indptr", rows.indptr)
        times = rows.columns.get("times")
        return Histories(indptr, rows.indices, times, events, weights)

    def _decode(self, group: Group, low: int, high: int) -> Entries:
        entries = super()._decode(group, low, high)
        if self.layout is not None or self.events is None:
            return entries
        columns = {n: entries.columns[f"{EVENTS}{n}"] for n in self.events.lists}
        try:
            return entries.replaced(**named(self.events.with_room(columns)))
        except ValueError as error:
            raise group.file.changed() from error


def scan_sequences(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    time: TimeColumn = BY_NAME,
    features: FeatureNames | Iterable[object] | None = None,
    events: EventSchema | Events | None = None,
    chunk_rows: int | None = None,
) -> ScannedSequences:
    """Scans Parquet files of histories without loading their rows.

    >>> pandas.DataFrame({"items": [["tea", "rye", "tea"], []]}).to_parquet("lists.parquet")
    >>> scan_sequences("lists.parquet").read(0, 2).padded(3).tolist()
    [[0, 1, 0], [-1, -1, -1]]

    The files hold one of these:

    * a folder that `sparsejax.prepare` wrote with `histories=True`;
    * files of `SequenceDataset.save`: the quickest to read;
    * a table with a list of items on each row, perhaps with a list of times. Each row is
      a history, and a user column is not needed;
    * a table of pairs, sorted by its user column, as `scan_parquet` describes.

    Entries are sorted by time when they are read. Without times they keep the order of the
    file. A column of times that cannot be read is an error; with `time=None` the order of the
    file is used.

    Args:
      path: a file or a folder of files of one kind, or an address; see `read_parquet`.
      user: name of the column with the row's name, for a table; see `from_arrow`.
      item: name of the column with the feature's name, or with a list of names.
      time: name of the column with the time, or with a list of times; None means the order of
        the file.
      features: vocabulary of a table: names, or a data set. Without it the item column is
        read once more, as by `scan_parquet`.
      events: columns of events of a table; see `read_sequences`. They are read once more, to
        count their categories.
      chunk_rows: approximate number of rows that `fit` has on the devices at a time, in whole
        row groups; see `scan_parquet`.

    Raises:
      DataError: a file is of another kind, is damaged, or differs from the first one.
        Pairs are not sorted.
      ValueError: columns, `features` or `events` are given for saved sequences, or `chunk_rows` is
        not positive.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")
    chosen = Chosen(user, item, None, time)
    given = features if events is None else events
    if (folder := DataFolder.find(path, histories=True)) is not None:
        _check_own(path, chosen, given)
        return scan_folder(path, folder, chunk_rows)
    files = parquet.parquet_files(path)
    form = stored.form_of(parquet.first_schema(files)[1])
    if form is not None and form.ordered:
        _check_own(path, chosen, given)
        timed = lambda s: s.field("times").type if "times" in s.names else None
        saved = SavedFiles.of(files, "times", timed, form=stored.HISTORIES)
        features, _, groups, columns = saved
        return ScannedSequences(path, features, groups, None, chunk_rows, columns)
    if form is not None and form.has_rows:
        raise DataError.at(
            path,
            "is a saved SparseDataset, whose rows are not in the order of time; read it "
            "with read_sequences, and save the result",
        )
    layout = _layout(path, files, chosen, events)
    groups, names, found = scan_tables.find_rows(path, files, layout, features, events)
    return ScannedSequences(path, names, groups, layout, chunk_rows, found)


def _layout(
    path: Path,
    files: list[ParquetPath],
    chosen: Chosen,
    events: EventSchema | Events | None,
) -> TableLayout:
    """Finds the columns of a table of histories and the type of its times."""
    first, schema = parquet.first_schema(files)
    layout = tables.find_table_layout(
        first,
        schema,
        chosen,
        indicator=True,
        with_user=False,
        further=() if events is None else schema_of(events).used,
    )
    rows = parquet.first_rows(files, layout.columns)
    layout, _ = tables.settle_time(layout, chosen, rows)
    assert layout.source is not None
    layout.source.check_order(path)
    return layout


def scan_folder(
    path: Path, folder: DataFolder, chunk_rows: int | None = None
) -> ScannedSequences:
    """Scans a prepared folder of histories.

    Raises:
      DataError: a file of the folder is damaged.
    """
    document, groups = folder.manifest.events, tuple(folder.groups())
    try:
        events = None if document is None else Events.from_json(document)
    except ValueError as error:
        raise DataError.at(path, f"is damaged: {error}") from error
    return ScannedSequences(path, folder.vocabulary(), groups, None, chunk_rows, events)


def _check_own(path: Path, chosen: Chosen, given: object) -> None:
    """Raises ValueError if the caller chooses columns or a vocabulary of saved sequences."""
    if chosen or chosen.time is None or given is not None:
        raise ValueError(
            f"{shown(path)}: holds saved sequences, so it has no columns to name and "
            "has its own vocabulary; leave out user, item, time, features and events"
        )
