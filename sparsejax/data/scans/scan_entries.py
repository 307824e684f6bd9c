"""Reads rows of entries on disk: from saved data sets, tables and prepared folders."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax import codec
from sparsejax.callers import warn_caller
from sparsejax.data.events.tables import TableLayout
from sparsejax.data.files import arrow, stored
from sparsejax.data.files.entries import Entries
from sparsejax.data.files.names import Names, as_names
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.files.parquet import ParquetPath
from sparsejax.data.scan import Group, Scan
from sparsejax.data.scans import scan_tables
from sparsejax.data.sets.events import Events, of_stated
from sparsejax.data.sets.named_rows import UnknownFeaturesWarning


class ScannedEntries[Rows](Scan[Rows, Entries]):
    """Rows of entries on disk. A subclass is a dataclass with the fields declared below."""

    @property
    def _events(self) -> Events | None:
        """Types and categories of the event columns to read, as empty `Events`, or None."""
        return None

    if TYPE_CHECKING:

        @property
        def path(self) -> Path: ...
        @property
        def groups(self) -> tuple[Group, ...]: ...
        @property
        def layout(self) -> TableLayout | None: ...
        @property
        def feature_names(self) -> Names: ...

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({os.fspath(self.path)!r}, {self.num_rows:,} rows, "
            f"{self.num_features:,} features)"
        )

    @property
    def num_features(self) -> int:
        return len(self.feature_names)

    @property
    def num_entries(self) -> int:
        """Number of entries. In files without a manifest an empty row counts as one entry."""
        return sum(group.entries for group in self._row_groups)

    def fingerprint(self) -> str:
        """A hash of the files' metadata, not of their content."""
        digest = hashlib.blake2b(digest_size=16)
        if self.layout is not None:
            names = self.feature_names.tolist()
            digest.update(repr((self.layout, names)).encode())
        if self._events is not None:
            digest.update(codec.text(self._events.to_json()).encode())
        for group in self._row_groups:
            file = group.file
            facts = (file.size, group.number, group.rows, group.entries)
            if file.crc32 is not None:
                facts = (*facts, file.crc32)
            if self.layout is not None:
                facts += file.cells(self.layout.columns)
            digest.update(repr(facts).encode())
        return digest.hexdigest()

    @property
    def _row_groups(self) -> Sequence[Group]:
        return self.groups

    @functools.cached_property
    def _vocabulary(self) -> scan_tables.Vocabulary:
        return scan_tables.Vocabulary(self.feature_names)

    def _lists(self, names: Iterable[str]) -> list[str]:
        """Selects the names of the columns to read among `names`, the columns of a saved file."""
        raise NotImplementedError

    def _decode(self, group: Group, low: int, high: int) -> Entries:
        if self.layout is not None:
            return scan_tables.read_rows(
                group, low, high, self.layout, self._vocabulary, self._events
            )
        with group.file.open(one_group=True) as file:
            schema = file.schema_arrow
            names = self._lists(schema.names)
            if not set(names) <= set(schema.names):
                raise group.file.changed()
            types = stored.types_in(group.file.path, schema)
            table = file.read_row_group(group.number, columns=names)
        lists = {}
        for name in names:
            column = table.column(name).drop_null().slice(low, high - low)
            if not pa.types.is_list(column.type):
                raise group.file.changed()
            lists[name] = arrow.one(column.cast(types[name]))
        lengths = [arrow.numbers(column.value_lengths()) for column in lists.values()]
        if len(lengths[0]) != high - low or any(
            not np.array_equal(lengths[0], other) for other in lengths[1:]
        ):
            raise group.file.changed()
        columns = {
            name: stored.column_of(group.file.path, name, types[name], [each.flatten()])
            for name, each in lists.items()
        }
        return Entries.of_lengths(lengths[0], columns)

    def _known(self, entries: Entries) -> Entries:
        """Drops entries of unknown features, with a warning."""
        is_known = entries.indices >= 0
        if is_known.all():
            return entries
        warn_caller(
            f"{shown(self.path)}: entries of features that are not among the "
            f"{self.num_features:,} known ones are left out",
            UnknownFeaturesWarning,
        )
        return entries.keep(is_known)


class SavedFiles(NamedTuple):
    """Files of saved data sets that are read as one data set.

    Attributes:
      features: vocabulary, equal in all files.
      kind: type of the values or the times, equal in all files.
      groups: row groups that have rows, in order.
      events: types and categories of the columns of events, as empty `Events`, or None.
    """

    features: Names
    kind: Any
    groups: tuple[Group, ...]
    events: Events | None

    @classmethod
    def of(
        cls,
        files: Iterable[ParquetPath],
        what: str,
        typed: Callable[[pa.Schema], Any],
        form: stored.Form,
    ) -> SavedFiles:
        """Opens the files, checks that they match, and reads their vocabulary.

        Args:
          files: files of one or several saved data sets.
          what: "values" or "times", for messages.
          typed: function that returns the type of the values or times in a file's schema.
          form: kind of data set to read.

        Raises:
          DataError: a file has another kind, or differs from the first one.
        """
        groups: list[Group] = []
        columns: list[Events | None] = []
        first: tuple[pa.Array, Any] | None = None
        for file in files:
            with file.open() as opened:
                schema = opened.schema_arrow
                columns.append(_events_in(file.path, opened, form))
                names = opened.read(columns=["feature"]).column("feature")
                features = arrow.one(names.cast(pa.large_string()).drop_null())
                found = [_group(file, opened, n) for n in range(opened.num_row_groups)]
            first = first or (features, typed(schema))
            problems = {
                "has another vocabulary than the first file; read all with one (features=, "
                "or sparsejax convert --features), and save them again": features.equals(
                    first[0]
                ),
                f"has {what} of another kind than the first file, or only one of the two "
                f"has {what}; save all with the same": typed(schema) == first[1],
                "has other columns of events than the first file, or other categories; "
                "read all with events=train.events, and save them again": _are_alike(
                    columns[0], columns[-1]
                ),
            }
            for problem, is_right in problems.items():
                if not is_right:
                    raise DataError.at(file.path, problem)
            groups += [group for group in found if group.rows]
        assert first is not None  # `files` is not empty
        events = columns[0]
        for other in columns[1:]:
            if events is not None and other is not None:
                # The joined `Events` has room for the longest list of any file.
                events = events.joined(other)
        return cls(as_names(first[0]), first[1], tuple(groups), events)


def _events_in(path: Path, file: pq.ParquetFile, form: stored.Form) -> Events | None:
    """Types and categories of a saved file's event columns, as empty `Events`, or None."""
    schema = file.schema_arrow
    try:
        facts = codec.parse(stored.facts_in(schema) or "{}")
        are_events = "schema" in facts and "users" not in facts
        are_events &= "weights" not in schema.names
        stored.check_schema(path, schema, form, events=are_events)
        return of_stated(facts, stored.categories_in(file)) if are_events else None
    except DataError:
        raise
    except (ValueError, KeyError) as error:
        raise DataError.at(path, f"is damaged: {error}") from error


def _are_alike(events: Events | None, others: Events | None) -> bool:
    """Whether the event columns of two files have equal ids for equal categories."""
    if events is None or others is None:
        return events is others
    return events.has_ids_of(others)


def _group(file: ParquetPath, opened: pq.ParquetFile, number: int) -> Group:
    """A row group with its numbers of rows and entries, read from metadata where possible.

    Rows with null names follow the last row of the data set, and are not counted.
    """
    group = opened.metadata.row_group(number)
    columns = {
        group.column(i).path_in_schema.partition(".")[0]: group.column(i)
        for i in range(group.num_columns)
    }
    statistics = columns["row"].statistics
    if statistics is not None and statistics.has_null_count:
        missing = statistics.null_count
    else:
        missing = opened.read_row_group(number, columns=["row"]).column(0).null_count
    # In `num_values`, Parquet counts each null list after the last row as one value.
    entries = columns["indices"].num_values - missing
    return Group(file, number, group.num_rows - missing, entries)
