"""Reads events as one stream of checked blocks, which an engine groups."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from sparsejax.data.events.block import Block, Cells, Wrong
from sparsejax.data.events.pieces import find_pieces
from sparsejax.data.events.source import (
    LINES,
    Asked,
    check_times,
    find_format,
    name_of,
    open_source,
)
from sparsejax.data.files import arrow, parquet, spelling, stored
from sparsejax.data.files.columns import Chosen, Columns
from sparsejax.data.files.names import Names, to_arrow
from sparsejax.data.files.opening import DataError, Path
from sparsejax.options.reading import Prepare


class Events:
    """A stream of events that can be read once, by one reader or by several in turn.

    Attributes:
      path: name of the source in messages.
      columns: columns of the table; None if the source is no table.
      valued: whether events have values.
      times: times of the first block of events, or None.
      has_no_times: whether there are events, but the first block has no times.
      wrong: faults of the events that were read so far.
      vocabulary: names whose spelling items get, or None.
      take: function that is called with the cells of further columns of each block, or None.
      beside: names of the further columns, by their keys in the batches of `reader`.
    """

    vocabulary: Names | None = None
    take: Callable[[Cells], object] | None = None

    def __init__(
        self, path: Path, blocks: Iterator[Block], wrong: Wrong, columns: Columns | None
    ):
        self.path, self.columns, self.wrong = path, columns, wrong
        self._error: BaseException | None = None
        each = (block.as_events() for block in blocks)
        first = next((block for block in each if len(block.rows)), None)
        self._blocks = itertools.chain([] if first is None else [first], each)
        self.valued = first is not None and first.values is not None
        self.times = None if first is None else first.times
        self.has_no_times = first is not None and self.times is None
        cells = None if first is None else first.beside
        found = {} if cells is None else cells.columns
        self.beside = {f"beside{i}": name for i, name in enumerate(found)}
        self._types = {name: _plain(column.type) for name, column in found.items()}
        self._place = 0

    def reader(self, most: int | None = None) -> pa.RecordBatchReader:
        """A reader of the next batches, with the columns `name` (user), `item`, `value`, `time`.

        The last two may be missing. Dates are in microseconds. If `take` is set, batches also
        have `place`, the number of the event, and the columns of `beside`.

        Args:
          most: number of events to read, rounded up to a whole batch; by default all.
        """
        fields = {"name": pa.large_string(), "item": pa.large_string()}
        if self.valued:
            fields["value"] = pa.float64()
        if self.times is not None:
            is_float = self.times.dtype == np.float64
            fields["time"] = pa.float64() if is_float else pa.int64()
        if self.take is not None:
            fields["place"] = pa.int64()
            fields |= {key: self._types[name] for key, name in self.beside.items()}
        schema = pa.schema(list(fields.items()))
        return pa.RecordBatchReader.from_batches(schema, self._read(schema, most))

    def are_left(self) -> bool:
        """Whether the stream has events that no reader has read yet."""
        first = next((block for block in self._blocks if len(block.rows)), None)
        if first is not None:
            self._blocks = itertools.chain([first], self._blocks)
        return first is not None

    def check(self) -> None:
        """Raises the error that ended the stream, if one did."""
        if self._error is not None:
            raise self._error

    def _read(self, schema: pa.Schema, most: int | None) -> Iterator[pa.RecordBatch]:
        count = 0
        try:
            while most is None or count < most:
                if (block := next(self._blocks, None)) is None:
                    break
                count += len(block.rows)
                columns = [block.rows, self._spelled(block.features)]
                if block.values is not None:
                    columns.append(arrow.from_numbers(block.values))
                if block.times is not None:
                    columns.append(arrow.from_numbers(self._as_numbers(block.times)))
                columns += self._beside(block)
                yield pa.record_batch(columns, schema=schema)
        except BaseException as error:
            self._error = error  # an engine keeps only the text of the error
            raise

    def _beside(self, block: Block) -> list[pa.Array]:
        """Arrays with a number for each event of the block, and its columns without a role."""
        if self.take is None:
            return []
        places = np.arange(self._place, self._place + len(block.rows))
        self._place += len(places)
        found = [arrow.from_numbers(places)]
        if block.beside is not None:
            self.take(block.beside)
            columns = block.beside.columns
            found += [columns[n].cast(self._types[n]) for n in self.beside.values()]
        return found

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


def _plain(type_: pa.DataType) -> pa.DataType:
    """The type that a column has in the batches for an engine."""
    if pa.types.is_dictionary(type_):
        return type_.value_type
    return pa.large_string() if pa.types.is_null(type_) else type_


def events_of(options: Prepare, chosen: Chosen, *, with_time: bool) -> Events:
    """Opens the source that the options of `prepare` name; see `open_source`.

    With `skip_bad_lines` wrong events, and lines that cannot be read, are left out. Otherwise
    the first wrong event ends the stream, and wrong events after it are only counted.

    Args:
      options: options of `prepare`.
      chosen: roles of the columns.
      with_time: whether times are needed.

    Raises:
      DataError: the events cannot be read.
      TypeError: the source is neither a path nor a table.
      ValueError: a column is chosen for two roles, or by name where there are no names.
    """
    source, wrong = options.events, Wrong()
    asked = Asked(
        chosen,
        options.format,
        options.delimiter,
        indicator=options.indicator or options.histories,
        with_time=with_time or options.histories,
        needs_time=with_time,
        wrong=wrong,
        skips=options.skip_bad_lines,
        further=() if options.schema is None else options.schema.used,
        separator=options.separator,
        time_format=options.time_format,
    )
    format = find_format(source, asked)
    if format in LINES or format == "jsonl":
        asked = dataclasses.replace(asked, skip_bad_lines=options.skip_bad_lines)
    if format == "parquet":
        files = find_pieces(source)
        _, schema = parquet.first_schema(
            f.file or parquet.parquet_files(f.path)[0] for f in files
        )
        if stored.form_of(schema) is not None:
            raise DataError.at(
                name_of(source),
                "is a saved data set, not a table of events; it needs no preparing: train "
                "on it, or give the events that it was made from",
            )
    found = open_source(source, asked)
    events = Events(found.path, found.blocks(), wrong, found.columns)
    if found.columns is not None and events.has_no_times:
        columns = found.columns.without_empty_times()
        check_times(found.path, columns, with_time)
        if options.histories:
            columns.check_order(found.path)
    return events
