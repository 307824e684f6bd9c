"""Scans Parquet tables on disk: finds where rows begin, and reads some rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from sparsejax.data.events import tables
from sparsejax.data.events.block import Block, Cells, encoded_names
from sparsejax.data.events.tables import TableLayout
from sparsejax.data.files import spelling
from sparsejax.data.files.entries import Entries, joined, known
from sparsejax.data.files.names import FeatureNames, Names, of_features, to_arrow
from sparsejax.data.files.opening import DataError, Path
from sparsejax.data.files.parquet import ParquetPath
from sparsejax.data.scan import Group
from sparsejax.data.sets.click_columns import Counter
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.data.sets.events import EventCounter, Events, named
from sparsejax.data.sets.vocabulary import vocabulary_order

# Integer items are looked up in an array if its size is at most the first number plus the second
# number for each name.
_MOST_PLACES, _PLACES_PER_NAME = 2**22, 8


class Vocabulary:
    """Maps items to columns: integers by an array, other items by a hash table."""

    def __init__(self, names: Names):
        self._names = to_arrow(names)
        self._has_only_digits = spelling.has_only_digits(self._names)
        self._column_of: np.ndarray | None = None
        numbers = _integers(self._names)
        if numbers is not None and len(numbers):
            self._first = numbers.min()
            size = int(numbers.max()) - int(self._first) + 1
            if size <= _MOST_PLACES + _PLACES_PER_NAME * len(numbers):
                self._column_of = np.full(size, -1, np.int32)
                self._column_of[numbers - self._first] = np.arange(len(numbers))

    def find(self, items: pa.Array, path: Path) -> np.ndarray:
        """`[n]` int32: the column of each item, -1 if it has no column."""
        if (
            self._column_of is None
            or not pt.is_integer(items.type)
            or items.type == pa.uint64()
        ):
            items = encoded_names(items, path)
            # This calls pc.index_in, which type checkers do not know.
            lookup = pc.SetLookupOptions(value_set=self._names)
            known = items.dictionary
            if self._has_only_digits:
                known = spelling.without_point_zero(known)
            found = pc.call_function("index_in", [known], lookup)
            return found.fill_null(-1).to_numpy()[items.indices.to_numpy()]
        place = items.to_numpy().astype(np.int64) - self._first
        columns = self._column_of.take(place, mode="clip")
        columns[place != np.clip(place, 0, len(self._column_of) - 1)] = -1
        return columns


def _integers(names: pa.Array) -> np.ndarray | None:
    """Converts names to int64 numbers; None if one of them is not a plain integer."""
    try:
        numbers = names.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    return numbers.to_numpy() if numbers.cast(names.type).equals(names) else None


def find_rows(
    path: Path,
    files: Sequence[ParquetPath],
    layout: TableLayout,
    features: FeatureNames | Iterable[object] | None,
    events: EventSchema | Events | None = None,
) -> tuple[tuple[Group, ...], Names, Events | None]:
    """Finds the row groups of a table, its vocabulary, and its columns of events.

    Returns:
      The groups; the names of `features`, or by default of the table's items; and the columns
      of events with their categories, or None if `events` is None.

    Raises:
      DataError: there are no rows, or none of them has an item and `features` is None; see
        also `find_groups`.
    """
    groups = find_groups(files, layout)
    if not groups:
        raise DataError.at(path, "holds no data: there are no rows")
    counter = None if events is None else EventCounter(events)
    names = None if features is None else of_features(features)
    if names is None or counter is not None:
        take = None if counter is None else counter.take
        found = find_vocabulary(files, layout, take)
        names = found if names is None else names
    if not names.size and features is None:
        raise DataError.at(path, "none of the rows has a feature")
    return tuple(groups), names, None if counter is None else counter.finish()


def find_groups(files: Iterable[ParquetPath], layout: TableLayout) -> list[Group]:
    """The row groups in which rows begin. For a table of pairs, this reads the user column.

    Raises:
      DataError: a file has other columns, or its pairs are not sorted by user.
    """
    groups: list[Group] = []
    last = None
    for file in files:
        with file.open() as opened:
            tables.check_layout(file, opened, layout)
            metadata = opened.metadata
            item = file.stored_name(opened, layout.item)
        first = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            found = Group(file, number, group.num_rows, group.num_rows, first)
            first += group.num_rows
            if layout.has_lists:
                entries = sum(
                    group.column(i).num_values
                    for i in range(group.num_columns)
                    if group.column(i).path_in_schema.startswith(f"{item}.")
                )
                groups.append(found._replace(entries=entries))
            elif group.num_rows:
                found, last = _group_of_pairs(found, layout, last)
                if found.head:
                    before = groups[-1]
                    groups[-1] = before._replace(
                        entries=before.entries + found.head,
                        tail=(*before.tail, (found, found.head)),
                    )
                if found.rows:
                    groups.append(found)
    return [group for group in groups if group.rows]


def _group_of_pairs(group: Group, layout: TableLayout, last: Any) -> tuple[Group, Any]:
    """Counts the users whose first pair is in a group. Returns the group and its last user.

    `last` is the last user of the previous group, or None.
    """
    assert layout.user is not None
    file = group.file
    users = tables.plain_names(_read(group, [layout.user]).column(0), file.path)
    tables.check_users(users, file.path, group.first)
    is_new = _is_new(users)
    before = users[:-1]
    if last is not None:
        before = pa.concat_arrays([_like(last, users, file), before])
    falls = _compare("less", users[len(users) - len(before) :], before)
    if falls.any():
        at = int(np.argmax(falls))
        row = group.first + at + len(users) - len(before)
        raise DataError.at(
            file.path,
            f"row {row:,}: the user comes before the user of the row above in the order "
            f"of {users.type}; pairs must be sorted by the column {layout.user!r} to be "
            "scanned: sort them, or read the file and save the data set",
        )
    if last is not None:
        is_new[0] = users[0].as_py() != last
    begins = np.flatnonzero(is_new)
    head = int(begins[0]) if begins.size else len(users)
    group = group._replace(rows=len(begins), entries=len(users) - head, head=head)
    return group, users[-1].as_py()


def _like(user: Any, users: pa.Array, file: ParquetPath) -> pa.Array:
    try:
        return pa.array([user], users.type)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError.at(
            file.path, "has users of another type than the file before"
        ) from error


def _compare(how: str, a: pa.Array, b: pa.Array) -> np.ndarray:
    return pc.call_function(how, [a, b]).to_numpy(zero_copy_only=False)


def _is_new(users: pa.Array) -> np.ndarray:
    """`[pairs]` bool: whether a pair's user differs from the user of the previous pair."""
    return np.append(True, _compare("not_equal", users[1:], users[:-1]))


def read_rows(
    group: Group,
    low: int,
    high: int,
    layout: TableLayout,
    vocabulary: Vocabulary,
    events: Events | None = None,
) -> Entries:
    """Reads the rows `low .. high - 1` of a group, with columns of events.

    A row may have an item twice. Items that the vocabulary lacks have the index -1.

    Raises:
      DataError: a row is wrong; the message has the number of the first one. Or the file
        was changed.
    """
    read = _read_lists if layout.has_lists else _read_pairs
    lengths, blocks = read(group, low, high, layout)
    parts = [
        known(
            indices=vocabulary.find(block.features, group.file.path),
            values=block.values,
            times=block.times,
            **_columns_of(block, events),
        )
        for block in blocks
    ]
    columns = {"indices": np.empty(0, np.int32)} | joined(parts)
    return Entries.of_lengths(lengths, columns)


def _columns_of(block: Block, events: Events | None) -> dict[str, np.ndarray]:
    """The event columns of a block, by their names in `Entries`."""
    if events is None or block.beside is None:
        return {}
    found = events.read(block.beside, events.schema.used)
    try:
        return named(events.with_room(found))
    except ValueError as error:
        raise DataError.at(
            block.beside.path, "was changed since it was scanned: a list is longer now"
        ) from error


def _read_lists(group: Group, low: int, high: int, layout: TableLayout):
    """Reads rows of a table of lists. Returns their numbers of entries, and blocks of entries."""
    table = _read(group, layout.columns)
    if table.num_rows != group.rows:
        raise group.file.changed()
    blocks = _blocks(table.slice(low, high - low), layout, group, low)
    found = [block.lengths for block in blocks if block.lengths is not None]
    return np.concatenate([np.empty(0, np.int64), *found]), blocks


def _read_pairs(group: Group, low: int, high: int, layout: TableLayout):
    """`_read_lists` for a table of pairs. Its last row may continue in later row groups."""
    table = _read(group, layout.columns)
    begins = np.flatnonzero(
        _is_new(tables.plain_names(table.column(layout.user), group.file.path))
    )
    begins = begins[begins >= group.head]
    if len(begins) != group.rows or begins[0] != group.head:
        raise group.file.changed()
    ends = np.append(begins, table.num_rows)
    lengths, (begin, end) = np.diff(ends[low : high + 1]), ends[[low, high]].tolist()
    blocks = _blocks(table.slice(begin, end - begin), layout, group, begin)
    for other, count in group.tail if high == group.rows else ():
        blocks += _blocks(_read(other, layout.columns, count), layout, other, 0)
        lengths[-1] += count
    return lengths, blocks


def _read(group: Group, columns: list[str], rows: int | None = None) -> pa.Table:
    """Reads columns of a row group, or of its first `rows` rows."""
    file, number = group.file, group.number
    with file.open() as opened:
        if number >= opened.metadata.num_row_groups or not set(columns) <= set(
            file.columns(opened).names
        ):
            raise file.changed()
        if rows is None:
            return file.group(opened, number, columns)
        found, here = [], 0
        for batch in file.batches(opened, rows, columns, [number]):
            found.append(batch)
            here += len(batch)
            if here >= rows:
                return pa.Table.from_batches(found).slice(0, rows)
    raise file.changed()


def _blocks(
    table: pa.Table, layout: TableLayout, group: Group, first: int
) -> list[Block]:
    """Converts rows of a group to checked blocks. `first` is the number of the first row.

    If the table has a column of values, each entry must have a value.
    """
    entries = dataclasses.replace(layout, user=None)
    batches = [(group.file.path, table.to_batches())]
    first += group.first
    return list(
        tables.table_blocks(batches, entries, first=first, valued=True, encoded=False)
    )


def find_vocabulary(
    files: Iterable[ParquetPath],
    layout: TableLayout,
    take: Callable[[Cells], None] | None = None,
) -> Names:
    """The names of all items, in the order of `vocabulary_order`.

    The items are read once, and the distinct names are kept in memory. `take` is called with
    the cells of the columns of events.

    Raises:
      DataError: a file has other columns, or an item is missing.
    """
    items = dataclasses.replace(layout, user=None, value=None, time=None)
    counter, type_ = Counter(), None
    for file in files:
        with file.open() as opened:
            tables.check_layout(file, opened, layout)
            batches = file.batches(opened, tables.BATCH_ROWS, items.columns)
            for block in tables.table_blocks(
                [(file.path, batches)], items, encoded=False
            ):
                if take is not None and block.beside is not None:
                    take(block.beside)
                features = pa.chunked_array([block.features])
                names = tables.plain_names(features, file.path)
                if names.type != (type_ := type_ or names.type):
                    raise DataError.at(
                        file.path, "has items of another type than the first file"
                    )
                names, counts = pc.call_function("value_counts", [names]).flatten()
                if not pt.is_integer(names.type):
                    names = names.cast(pa.large_string())
                counter.add_counts(names, counts)
    names, counts = counter.counts()
    return names[vocabulary_order(counts, names)] if len(names) else names
