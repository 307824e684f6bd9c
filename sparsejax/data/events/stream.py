"""Events of a table or a file as one stream of checked batches, for an engine to group."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from sparsejax.data import arrow, parquet, spelling
from sparsejax.data.columns import Chosen, Columns
from sparsejax.data.events import lines, pairs, sniff, tables
from sparsejax.data.events.block import Block
from sparsejax.data.events.lines import mixed_values
from sparsejax.data.events.pair_layout import find_layout
from sparsejax.data.events.tables import BATCH_ROWS, TableLayout
from sparsejax.data.files import DataError, Path, open_data, shown
from sparsejax.data.names import Names, to_arrow
from sparsejax.data.parquet import ParquetPath
from sparsejax.data.values import (
    are_no_times,
    find_time_problem,
    parse_times,
    plain_text,
)

# Faults of an event, in the order in which they are looked for.
NO_USER, NO_ITEM = "events without a user", "events without an item"
NO_VALUE = "events whose value is null or not finite as float32"
NO_TIME = "events whose time is null or no time"

_AHEAD = 4  # batches that are read while the engine works


@dataclasses.dataclass
class Wrong:
    """Faults of events.

    Attributes:
      counts: number of wrong events, by what is wrong.
      first: the first one, for a message.
    """

    counts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    first: str | None = None

    def __str__(self) -> str:
        counts = [f"{count:,} {what}" for what, count in self.counts.items()]
        return f"{', '.join(counts)}; the first is {self.first}"


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some events.

    Attributes:
      users: `[n]` large_string.
      items: `[n]` large_string.
      values: `[n]` float64, or None.
      times: `[n]` int64, float64 or datetime64[us], or None.
    """

    users: pa.Array
    items: pa.Array
    values: np.ndarray | None
    times: np.ndarray | None


class Events:
    """Events, to be read once, by one reader or by several in turn.

    Attributes:
      path: what messages name.
      columns: the columns of the table, if it is one.
      valued: whether events have values.
      times: the times of the first events, or None.
      has_no_times: whether there are events, but the first have no times.
      wrong: what is wrong with the events that were read so far.
      vocabulary: items are spelled like these names, if they are given.
    """

    vocabulary: Names | None = None

    def __init__(
        self,
        path: Path,
        batches: Iterator[Batch],
        wrong: Wrong,
        columns: Columns | None,
    ):
        self.path, self.columns, self.wrong = path, columns, wrong
        self._error: BaseException | None = None
        first = next((batch for batch in batches if len(batch.users)), None)
        self._batches = itertools.chain([] if first is None else [first], batches)
        self.valued = first is not None and first.values is not None
        self.times = None if first is None else first.times
        self.has_no_times = first is not None and self.times is None

    def reader(self, most: int | None = None) -> pa.RecordBatchReader:
        """The next batches, with the columns `name` (of the user), `item`, `value`, `time`.

        The last two may be missing. Dates are in microseconds.

        Args:
          most: how many events to read, up to a whole batch; by default all that are left.
        """
        fields = {"name": pa.large_string(), "item": pa.large_string()}
        if self.valued:
            fields["value"] = pa.float64()
        if self.times is not None:
            is_float = self.times.dtype == np.float64
            fields["time"] = pa.float64() if is_float else pa.int64()
        schema = pa.schema(list(fields.items()))
        return pa.RecordBatchReader.from_batches(schema, self._read(schema, most))

    def are_left(self) -> bool:
        """Whether there are events that no reader has given yet."""
        first = next((batch for batch in self._batches if len(batch.users)), None)
        if first is not None:
            self._batches = itertools.chain([first], self._batches)
        return first is not None

    def check(self) -> None:
        """Raises the error that ended the stream, if one did."""
        if self._error is not None:
            raise self._error

    def _read(self, schema: pa.Schema, most: int | None) -> Iterator[pa.RecordBatch]:
        count = 0
        try:
            while most is None or count < most:
                if (batch := next(self._batches, None)) is None:
                    break
                count += len(batch.users)
                columns = [batch.users, self._spelled(batch.items)]
                if batch.values is not None:
                    columns.append(arrow.from_numbers(batch.values))
                if batch.times is not None:
                    columns.append(arrow.from_numbers(self._as_numbers(batch.times)))
                yield pa.record_batch(columns, schema=schema)
        except BaseException as error:
            self._error = error  # the engine would only pass on its text
            raise

    def _spelled(self, items: pa.Array) -> pa.Array:
        return spelling.without_point_zero(items) if self._has_only_digits else items

    @functools.cached_property
    def _has_only_digits(self) -> bool:
        known = self.vocabulary
        return known is not None and spelling.has_only_digits(to_arrow(known))

    def _as_numbers(self, times: np.ndarray) -> np.ndarray:
        assert self.times is not None
        if times.dtype == self.times.dtype:
            return times.view(np.int64) if times.dtype.kind == "M" else times
        if times.dtype == np.int64 and self.times.dtype == np.float64:
            return times.astype(np.float64)
        raise DataError.at(
            self.path,
            f"the first times are {self.times.dtype}, later ones {times.dtype}; give "
            "all times in one form",
        )


def events_of(
    source: Any,
    *,
    chosen: Chosen,
    format: str | None,
    delimiter: str | None,
    indicator: bool,
    with_time: bool,
    skip_bad: bool,
) -> Events:
    """The events of a file, a folder, an address, or of a table in memory.

    Args:
      source: as `sparsejax.prepare` takes it.
      chosen: the columns.
      format: of a file; see `read`.
      delimiter: of pairs.
      indicator: ignore values.
      with_time: times are needed.
      skip_bad: leave out wrong events. Otherwise the first one ends the stream, and all
        that follow are only counted.

    Raises:
      DataError: the events cannot be read.
      TypeError: `source` is neither a path nor a table.
      ValueError: a column is chosen for two roles, or by name where there are no names.
    """
    if hasattr(source, "__arrow_c_stream__"):
        path: Path = "the table"
        try:
            reader = pa.RecordBatchReader.from_stream(source)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError.at(path, f"cannot be read: {error}") from error
        find = tables.find_table_layout
        layout = find(
            path, reader.schema, chosen, indicator=indicator, with_time=with_time
        )
        layout, rows = tables.settle_time(layout, chosen, reader)
        check_times(path, layout.source, with_time)
        wrong = Wrong()
        cleaner = _Cleaner(layout, wrong, skip_bad)
        batches = cleaner.batches([(path, rows)])
        return Events(path, batches, wrong, layout.source)
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        raise TypeError(
            "events is a path, an address or a table with Arrow's PyCapsule interface, got "
            f"{type(source).__name__}"
        )
    path = source
    if format is None:
        format = sniff.guess_format(path) if delimiter is None else "pairs"
    if format != "parquet":
        if skip_bad:
            raise ValueError(
                f"{shown(path)}: skip_bad=True is for Parquet and tables in memory; the "
                f"format {format} has no other way than to correct the file"
            )
        return _text_events(path, format, chosen, delimiter, indicator, with_time)
    files = parquet.parquet_files(path)
    first, schema = parquet.first_schema(files)
    parquet.check_no_part(first, schema)
    if parquet.is_dataset(schema):
        raise DataError.at(
            path,
            "is a saved data set, not a table of events; it needs no preparing: train on "
            "it, or give the events that it was made from",
        )
    layout = tables.find_table_layout(
        first, schema, chosen, indicator=indicator, with_time=with_time
    )
    rows = parquet.first_rows(files, layout.columns)
    layout, _ = tables.settle_time(layout, chosen, rows)
    check_times(path, layout.source, with_time)
    wrong = Wrong()
    cleaner = _Cleaner(layout, wrong, skip_bad)
    batches = cleaner.batches((file.path, _scanned(file, layout)) for file in files)
    return Events(path, batches, wrong, layout.source)


def check_times(path: Path, columns: Columns | None, with_time: bool) -> None:
    """Raises DataError if times are needed, but there is no column of them."""
    if with_time and (columns is None or columns.time is None):
        why = (
            f": {columns.no_times}" if columns is not None and columns.no_times else ""
        )
        raise DataError.at(path, f"has no column of times{why}; name it: time=COLUMN")


def _scanned(file: ParquetPath, layout: TableLayout) -> Iterator[pa.RecordBatch]:
    """The columns of the layout. A few batches are read ahead, however slow the engine is."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        batches = _batches(file, layout)
        ahead = collections.deque(
            thread.submit(next, batches, None) for _ in range(_AHEAD)
        )
        while (batch := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, batches, None))
            yield batch


def _batches(file: ParquetPath, layout: TableLayout) -> Iterator[pa.RecordBatch]:
    with file.open(one_group=True) as opened:
        tables.check_layout(file.path, opened, layout)
        # One row group at a time: the bytes of all that are asked for would be kept.
        for group in range(opened.num_row_groups):
            yield from opened.iter_batches(
                BATCH_ROWS, row_groups=[group], columns=layout.columns
            )


def _text_events(
    path: Path,
    format: str,
    chosen: Chosen,
    delimiter: str | None,
    indicator: bool,
    with_time: bool,
) -> Events:
    """The events of a file of another format than Parquet."""
    if format != "pairs" and (chosen or delimiter is not None):
        raise ValueError(f"{shown(path)}: the format {format} has no columns to name")
    columns = None
    match format:
        case "pairs":
            if not with_time:
                chosen = dataclasses.replace(chosen, time=None)
            layout = find_layout(
                path, chosen, delimiter=delimiter, header=None, indicator=indicator
            )
            columns = layout.columns
            check_times(path, columns, with_time)
            parse = lambda stream: pairs.pair_blocks(stream, path, layout)
        case "text" | "adjacency" if with_time:
            raise DataError.at(path, f"the format {format} has no times")
        case "text":
            parse = lambda stream: lines.text_blocks(stream, path, indicator=indicator)
        case "adjacency":
            parse = lambda stream: lines.adjacency_blocks(stream, path)
        case _:
            raise ValueError(
                f"unknown format {format!r}; expected text, pairs, adjacency or parquet"
            )

    def batches() -> Iterator[Batch]:
        with open_data(path) as stream:
            for block in parse(stream):
                yield _of_block(block, with_time)

    events = Events(path, batches(), Wrong(), columns)
    if columns is not None and events.has_no_times:
        check_times(path, columns.without_empty_times(), with_time)
    return events


def _of_block(block: Block, with_time: bool) -> Batch:
    users = block.rows
    if block.lengths is not None:
        rows = np.repeat(np.arange(len(users)), block.lengths)
        users = users.take(arrow.from_numbers(rows))
    times = block.times if with_time else None
    return Batch(_as_text(users), _as_text(block.features), block.values, times)


def _as_text(names: pa.Array) -> pa.Array:
    return names.cast(pa.large_string())


@dataclasses.dataclass
class _Cleaner:
    """Checks the events of tables, and counts the wrong ones."""

    layout: TableLayout
    wrong: Wrong
    skip_bad: bool
    kind: str | None = None
    valued: bool | None = None

    def batches(
        self, sources: Iterable[tuple[Path, Iterable[pa.RecordBatch]]]
    ) -> Iterator[Batch]:
        for path, found in sources:
            first = 0
            for batch in found:
                for start in range(0, len(batch), BATCH_ROWS):
                    part = batch.slice(start, BATCH_ROWS)
                    clean = self._clean(part, path, first + start)
                    if self.skip_bad or not self.wrong.counts:
                        yield clean
                first += len(batch)

    def _clean(self, batch: pa.RecordBatch, path: Path, first: int) -> Batch:
        layout = self.layout
        items, rows = batch.column(layout.item), np.arange(len(batch))
        users = spelling.without_views(batch.column(layout.user))
        lengths = None
        if layout.has_lists:
            lengths = tables.list_lengths(items)
            rows, items = np.repeat(rows, lengths), items.flatten()
            users = users.take(arrow.from_numbers(rows))

        items = spelling.without_views(items)

        def entries_of(name: str | None) -> pa.Array | None:
            """A column, one for each event."""
            if name is None:
                return None
            column = plain_text(batch.column(name))
            if lengths is None:
                return column
            if not tables.is_list(column.type):
                return column.take(arrow.from_numbers(rows))
            if not np.array_equal(tables.list_lengths(column), lengths):
                differs = tables.list_lengths(column) != lengths
                raise DataError.at(
                    path,
                    f"row {first + int(np.argmax(differs)):,}: the lists of "
                    f"{layout.item!r} and {name!r} have different lengths",
                )
            return plain_text(column.flatten())

        keep = np.ones(len(items), bool)

        def leave_out(is_wrong: np.ndarray, what: str, column: pa.Array) -> None:
            is_wrong = is_wrong & keep
            if not is_wrong.any():
                return
            at = int(np.argmax(is_wrong))
            self.wrong.counts[what] += int(is_wrong.sum())
            if self.wrong.first is None:
                is_time = what == NO_TIME and column[at].is_valid
                cell = (
                    find_time_problem(column[at : at + 1], self.kind)[1]
                    if is_time
                    else repr(column[at].as_py())
                )
                self.wrong.first = (
                    f"row {first + int(rows[at]):,} of {shown(path)}, with {cell}"
                )
            keep[is_wrong] = False

        leave_out(tables.are_missing(users), NO_USER, users)
        leave_out(tables.are_missing(items), NO_ITEM, items)
        values = times = None
        column = entries_of(layout.value)
        if column is not None and self._are_valued(column, keep, path, first, rows):
            values = column.cast(pa.float64(), safe=False).fill_null(np.nan)
            values = values.to_numpy(zero_copy_only=False)
            with np.errstate(over="ignore"):
                finite = np.isfinite(values.astype(np.float32))
            leave_out(~finite, NO_VALUE, column)
        if (column := entries_of(layout.time)) is not None:
            times, is_time = self._times(column)
            leave_out(~is_time, NO_TIME, column)
        if not keep.all():
            chosen = pa.array(keep)
            users, items = users.filter(chosen), items.filter(chosen)
            values = None if values is None else values[keep]
            times = None if times is None else times[keep]
        names = (
            self._names(users, path, layout.user),
            self._names(items, path, layout.item),
        )
        return Batch(*names, values, times)

    def _are_valued(
        self,
        column: pa.Array,
        keep: np.ndarray,
        path: Path,
        first: int,
        rows: np.ndarray,
    ) -> bool:
        """Whether events have values: they have none if those of the first batch are null."""
        given = keep & column.is_valid().to_numpy(zero_copy_only=False)
        if self.valued is None and keep.any():
            self.valued = bool(given.any())
        if self.valued is False and given.any():
            raise DataError.at(
                path,
                f"row {first + int(rows[np.argmax(given)]):,}: {mixed_values(False)}",
            )
        return bool(self.valued)

    def _names(self, names: pa.Array, path: Path, column: str | None) -> pa.Array:
        names, is_wrong, problem = spelling.as_integers_or_text(names)
        if is_wrong.any():
            raise DataError.at(path, f"column {column!r} {problem}")
        try:
            return _as_text(names)
        except pa.ArrowInvalid as error:
            raise DataError.at(path, f"a name is not valid UTF-8: {error}") from error

    def _times(self, column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """The times, and `[n]` bool whether each is a time. If not, it is 0."""
        is_time = ~are_no_times(column)
        given = np.flatnonzero(is_time)
        found = self._parsed(column.take(arrow.from_numbers(given)))
        type_ = next((times.dtype for times in found if times is not None), np.int64)
        times = np.zeros(len(column), type_)
        start = 0
        for part in found:
            if part is None:  # this one is no time
                is_time[given[start]] = False
                start += 1
                continue
            end = start + len(part)
            if part.dtype != times.dtype and times.dtype.kind == "i":
                times = times.astype(part.dtype)
            times[given[start:end]] = part
            start = end
        return times, is_time

    def _parsed(self, column: pa.Array) -> list[np.ndarray | None]:
        """The times in pieces, one after the other; None for a cell that is no time."""
        if not len(column):
            return []
        found = parse_times(column)
        if found is not None and self.kind in (None, found[1]):
            self.kind = found[1]
            return [found[0]]
        if len(column) == 1:
            return [None]
        middle = len(column) // 2
        # Halves, so that few wrong times among many are found quickly.
        return self._parsed(column[:middle]) + self._parsed(column[middle:])
