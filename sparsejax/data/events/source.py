"""The one way from a source to blocks of events, whatever they become."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from sparsejax.data import parquet
from sparsejax.data.columns import Chosen, Columns
from sparsejax.data.events import lines, sniff, tables
from sparsejax.data.events.block import Block, Cells, Check, Wrong
from sparsejax.data.events.pair_layout import find_layout
from sparsejax.data.events.records import record_cells
from sparsejax.data.files import (
    ByteStream,
    DataError,
    Path,
    open_data,
    progress_bar,
    shown,
)

# Formats of lines of text, whose events are not left out one by one.
LINES = ("text", "pairs", "adjacency")

_AHEAD = 4  # batches that are read while others are at work


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request to read a source.

    Attributes:
      chosen: the columns.
      format: of a file; by default its name or its first lines decide.
      delimiter: of pairs.
      header: whether the first line of pairs has names of columns; None if it decides.
      indicator: ignore values.
      with_time: read times.
      needs_time: whether a source without times is an error.
      wrong: where faults of tables are counted. By default the first one is an error.
      skips: see `Check`.
    """

    chosen: Chosen = dataclasses.field(default_factory=Chosen)
    format: str | None = None
    delimiter: str | None = None
    header: bool | None = None
    indicator: bool = False
    with_time: bool = True
    needs_time: bool = False
    wrong: Wrong | None = None
    skips: bool = True


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of events that is open.

    Attributes:
      path: what messages name.
      columns: the columns that are read; None if the source has none.
      cells: of these columns, by role.
      check: checks them.
    """

    path: Path
    columns: Columns | None
    cells: Iterator[Cells]
    check: Check

    def blocks(self) -> Iterator[Block]:
        """The events, to be read once.

        Raises:
          DataError: a row is wrong, or the source cannot be read.
        """
        try:
            yield from self.check.blocks(self.cells)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError.at(self.path, f"cannot be read: {error}") from error


def find_format(source: Any, asked: Asked) -> str:
    """The format of a source; "table" of one in memory.

    Raises:
      DataError: it is not clear.
      TypeError: the source is neither a path nor a table.
      ValueError: there is no such format, or it has no use for what is asked.
    """
    if hasattr(source, "__arrow_c_stream__"):
        return "table"
    if not isinstance(source, str) and not hasattr(source, "__fspath__"):
        raise TypeError(
            "expected a path, an address, or a table with Arrow's PyCapsule interface, for "
            f"example of polars, pandas or pyarrow, got {type(source).__name__}"
        )
    format = asked.format
    if format is None:
        is_clear = asked.delimiter is None
        format = sniff.guess_format(source) if is_clear else "pairs"
    if format not in _DECODERS or format == "table":
        raise ValueError(
            f"unknown format {format!r}; expected text, pairs, adjacency or parquet"
        )
    if format in ("text", "adjacency") and asked.chosen:
        raise ValueError(f"{shown(source)}: the format {format} has no columns to name")
    if format != "pairs" and asked.delimiter is not None:
        raise ValueError(f"{shown(source)}: the format {format} has its own delimiter")
    return format


def open_source(source: Any, asked: Asked) -> Source:
    """Opens a file, a folder, an address, or a table in memory.

    Raises:
      DataError: it cannot be read.
      TypeError: it is neither a path nor a table.
      ValueError: a column is chosen for two roles, or by name where there are no names, or
        something is asked that the format does not have.
    """
    return _DECODERS[find_format(source, asked)](source, asked)


def check_times(path: Path, columns: Columns | None, with_time: bool) -> None:
    """Raises DataError if times are needed, but there is no column of them."""
    if with_time and (columns is None or columns.time is None):
        why = (
            f": {columns.no_times}" if columns is not None and columns.no_times else ""
        )
        raise DataError.at(path, f"has no column of times{why}; name it: time=COLUMN")


def _text(path: Path, asked: Asked) -> Source:
    indicator = asked.indicator
    return _lines(
        path, asked, lambda file: lines.text_cells(file, path, indicator=indicator)
    )


def _adjacency(path: Path, asked: Asked) -> Source:
    return _lines(path, asked, lambda file: lines.adjacency_cells(file, path))


def _lines(
    path: Path, asked: Asked, parse: Callable[[ByteStream], Iterator[Cells]]
) -> Source:
    """A file with a whole row on each line."""
    if asked.needs_time:
        raise DataError.at(path, f"the format {find_format(path, asked)} has no times")
    return Source(path, None, _streamed(path, parse), Check(encoded=False))


def _pairs(path: Path, asked: Asked) -> Source:
    chosen = asked.chosen
    if not asked.with_time:
        chosen = dataclasses.replace(chosen, time=None)
    layout = find_layout(
        path,
        chosen,
        delimiter=asked.delimiter,
        header=asked.header,
        indicator=asked.indicator,
    )
    check_times(path, layout.columns, asked.needs_time)
    names = ("user", "item")
    cells = _streamed(
        path, lambda file: record_cells(file, path, layout, layout.places, names)
    )
    return Source(path, layout.columns, cells, Check(layout.columns, encoded=False))


def _streamed(
    path: Path, parse: Callable[[ByteStream], Iterator[Cells]]
) -> Iterator[Cells]:
    with open_data(path) as stream:
        yield from parse(stream)


def _parquet(path: Path, asked: Asked) -> Source:
    files = parquet.parquet_files(path)
    first, schema = parquet.first_schema(files)
    parquet.check_no_part(first, schema)
    layout = _table_layout(first, schema, asked)
    rows = parquet.first_rows(files, layout.columns)
    layout, _ = tables.settle_time(layout, asked.chosen, rows)

    # An engine is slow, and events need not fit in memory.
    read = _batches if asked.wrong is None else _ahead

    def parts() -> Iterator[tuple[Path, Iterator[pa.RecordBatch]]]:
        with progress_bar(path, sum(file.size for file in files)) as bar:
            for file in files:
                yield file.path, read(file, layout, bar)

    return _typed(path, layout, parts(), asked)


def _table(table: Any, asked: Asked) -> Source:
    path: Path = "the table"
    try:
        reader = pa.RecordBatchReader.from_stream(table)
        layout = _table_layout(path, reader.schema, asked)
        layout, rows = tables.settle_time(layout, asked.chosen, reader)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError.at(path, f"cannot be read: {error}") from error
    return _typed(path, layout, [(path, rows)], asked)


def _table_layout(path: Path, schema: pa.Schema, asked: Asked) -> tables.TableLayout:
    return tables.find_table_layout(
        path,
        schema,
        asked.chosen,
        indicator=asked.indicator,
        with_time=asked.with_time,
    )


def _typed(
    path: Path,
    layout: tables.TableLayout,
    parts: Iterable[tuple[Path, Iterable[pa.RecordBatch]]],
    asked: Asked,
) -> Source:
    """A source of columns with types."""
    check_times(path, layout.source, asked.needs_time)
    cells = tables.table_cells(parts, layout.roles)
    check = Check(layout.source, layout.roles, wrong=asked.wrong, skips=asked.skips)
    return Source(path, layout.source, cells, check)


def _batches(
    file: parquet.ParquetPath,
    layout: tables.TableLayout,
    bar: tqdm,
    *,
    by_group: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Some rows at a time; with `by_group` no more than a row group is held."""
    with file.open(one_group=by_group) as opened:
        tables.check_layout(file.path, opened, layout)
        rows = max(opened.metadata.num_rows, 1)
        groups = [[group] for group in range(opened.num_row_groups)]
        for group in groups if by_group else [None]:
            for batch in opened.iter_batches(
                tables.BATCH_ROWS, row_groups=group, columns=layout.columns
            ):
                yield batch
                bar.update(file.size * len(batch) / rows)


def _ahead(
    file: parquet.ParquetPath, layout: tables.TableLayout, bar: tqdm
) -> Iterator[pa.RecordBatch]:
    """The same by groups. A few batches are read ahead, however slow the consumer is."""
    batches = _batches(file, layout, bar, by_group=True)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        ahead = collections.deque(
            thread.submit(next, batches, None) for _ in range(_AHEAD)
        )
        while (batch := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, batches, None))
            yield batch


# One line for each format: what opens it.
_DECODERS: dict[str, Callable[[Any, Asked], Source]] = {
    "text": _text,
    "adjacency": _adjacency,
    "pairs": _pairs,
    "parquet": _parquet,
    "table": _table,
}
