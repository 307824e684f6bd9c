"""Opens a source of any format, and yields its events as blocks."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from sparsejax.data.events import json_lines, lines, sniff, tables
from sparsejax.data.events.bad_lines import NO_LINES, find_bad_lines
from sparsejax.data.events.block import Block, Cells, Check, Wrong, lists
from sparsejax.data.events.pair_layout import Layout, columns_read, find_layout
from sparsejax.data.events.pieces import TABLE, Piece, find_pieces, is_path
from sparsejax.data.events.records import record_cells, split_lists
from sparsejax.data.files import parquet
from sparsejax.data.files.columns import SYNONYMS, Chosen, Columns
from sparsejax.data.files.opening import (
    ByteStream,
    DataError,
    Path,
    WithoutLines,
    is_address,
    open_data,
    progress_bar,
    shown,
)
from sparsejax.data.files.spelling import is_text
from sparsejax.data.files.values import parse_times, plain_text

# Formats in which `skip_bad_lines` drops whole lines instead of single events.
LINES = ("text", "pairs", "adjacency")

_AHEAD = 4  # batches that are prefetched


@dataclasses.dataclass(frozen=True)
class Asked:
    """The arguments for reading a source.

    Attributes:
      chosen: columns that the caller chose for roles.
      format: format of a file; by default its name or its first lines decide.
      delimiter: text between the columns of pairs.
      header: whether the first line of pairs has the columns' names; None guesses it.
      indicator: ignore values.
      with_time: read times.
      needs_time: whether a source without times is an error.
      wrong: counter for faults in tables. None: the first fault is an error.
      skips: whether events after a wrong one are yielded. Otherwise they are only checked
        and counted.
      separator: text between the parts of cells that are lists.
      time_format: format of times that are text, for `strptime`.
      skip_bad_lines: whether lines of text that cannot be read are left out.
      further: names of columns to read that have no role; see `Block.beside`.
      check_further: function that raises an error for wrong cells of these columns; used with
        `skip_bad_lines`.
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
    separator: str | None = None
    time_format: str | None = None
    skip_bad_lines: bool = False
    further: Sequence[str] = ()
    check_further: Callable[[Cells], None] | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened source of events.

    Attributes:
      path: name of the source in messages.
      columns: columns to read; None for formats without columns.
      cells: cells of these columns, by role.
      check: check of the cells.
    """

    path: Path
    columns: Columns | None
    cells: Iterator[Cells]
    check: Check

    def blocks(self) -> Iterator[Block]:
        """Yields the checked events; can be called once.

        Raises:
          DataError: a row is wrong, or the source cannot be read.
        """
        try:
            yield from self.check.blocks(self.cells)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError.at(self.path, f"cannot be read: {error}") from error


def find_format(source: Any, asked: Asked) -> str:
    """Finds the format of a source; a source in memory has the format "table".

    Raises:
      DataError: the format is not clear.
      TypeError: the source has a type that is not supported.
      ValueError: the format is unknown, or an argument has no effect in it.
    """
    if not is_path(first := _first(source)):
        if asked.format is not None or asked.delimiter is not None:
            given = "format" if asked.format is not None else "delimiter"
            raise ValueError(f"{given} is for files, but the source is in memory")
        if asked.skip_bad_lines:
            raise ValueError(NO_LINES.format("the source is in memory"))
        return "table"
    format = asked.format
    if format is None:
        is_clear = asked.delimiter is None
        lines = WithoutLines(first) if asked.skip_bad_lines else first
        format = sniff.guess_format(lines) if is_clear else "pairs"
    if format not in _DECODERS or format == "table":
        raise ValueError(
            f"unknown format {format!r}; expected text, pairs, jsonl, adjacency or parquet"
        )
    if format in ("text", "adjacency"):
        if asked.chosen:
            problem = "has no columns to name"
        elif asked.separator is not None or asked.time_format is not None:
            problem = "has no columns with lists or times"
        elif asked.further:
            problem = "has no columns of events"
        else:
            problem = ""
        if problem:
            raise ValueError(f"{shown(first)}: the format {format} {problem}")
    if asked.skip_bad_lines and format == "parquet":
        raise ValueError(NO_LINES.format(f"{shown(first)} is Parquet"))
    if format != "pairs" and asked.delimiter is not None:
        raise ValueError(f"{shown(first)}: the format {format} has its own delimiter")
    return format


def _first(source: Any) -> Any:
    """The first path of a list of paths; any other source unchanged."""
    if isinstance(source, list | tuple) and source and is_path(source[0]):
        return source[0]
    return source


def name_of(source: Any) -> Path:
    """The name of a source in messages."""
    if not is_path(first := _first(source)):
        return TABLE
    return first if first is source or len(source) == 1 else f"{shown(first)}, ..."


def open_source(source: Any, asked: Asked) -> Source:
    """Opens a path, a list of paths, or a table in memory; see `find_pieces`.

    Raises:
      DataError: the source cannot be read.
      TypeError: the source has a type that is not supported.
      ValueError: a column is chosen for two roles, or by name in a source without names, or
        an argument has no effect in the format.
    """
    format = find_format(source, asked)
    if format != "parquet" and is_path(source) and is_address(source):
        pieces = [Piece(source)]  # opening it raises an error with a remedy
    else:
        pieces = find_pieces(source)
    found = _DECODERS[format](name_of(source), pieces, asked)
    if asked.separator is None:
        return found
    cells = (_with_lists(cells, asked.separator) for cells in found.cells)
    return dataclasses.replace(found, cells=cells)


def _plain_type(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _with_lists(cells: Cells, separator: str) -> Cells:
    """Splits text cells at a separator, so that they become lists."""
    columns = dict(cells.columns)
    for role, column in cells.columns.items():
        if role == "user" or not is_text(_plain_type(column.type)):
            continue
        texts = plain_text(column)
        if role != "item":  # a cell may be one value or time for all items of a row
            how = pc.MatchSubstringOptions(separator)
            if not pc.call_function("match_substring", [texts], how).true_count or (
                role == "time" and parse_times(texts) is not None
            ):
                continue
        columns[role] = lists(*split_lists(texts.fill_null(""), separator))
    return cells._replace(columns=columns)


def check_times(path: Path, columns: Columns | None, with_time: bool) -> None:
    """Raises DataError if times are needed, but the source has no column of times."""
    if with_time and (columns is None or columns.time is None):
        why = (
            f": {columns.no_times}" if columns is not None and columns.no_times else ""
        )
        raise DataError.at(path, f"has no column of times{why}; name it: time=COLUMN")


def _files(open_one: Callable[[Piece, Asked], Source]) -> _Decoder:
    """Converts a function that opens one file to one that opens several files of equal columns."""

    def open_all(path: Path, pieces: list[Piece], asked: Asked) -> Source:
        first = open_one(pieces[0], asked)

        def cells() -> Iterator[Cells]:
            yield from first.cells
            for piece in pieces[1:]:
                found = open_one(piece, asked)
                if (theirs := _names(found)) != (ours := _names(first)):
                    raise DataError.at(
                        piece.path,
                        f"has the columns {theirs}, but {shown(first.path)} has {ours}; "
                        "give all files the same columns",
                    )
                yield from found.cells

        return dataclasses.replace(first, path=path, cells=cells())

    return open_all


def _names(source: Source) -> str:
    found = {role: getattr(source.columns, role, None) for role in SYNONYMS}
    return ", ".join(
        f"{role} = {column.name or column.position}"
        for role, column in found.items()
        if column is not None
    )


def _text(piece: Piece, asked: Asked) -> Source:
    indicator, path = asked.indicator, piece.path
    return _lines(
        path, asked, lambda file: lines.text_cells(file, path, indicator=indicator)
    )


def _adjacency(piece: Piece, asked: Asked) -> Source:
    path = piece.path
    return _lines(path, asked, lambda file: lines.adjacency_cells(file, path))


def _lines(
    path: Path, asked: Asked, parse: Callable[[ByteStream], Iterator[Cells]]
) -> Source:
    """Opens a file in a format whose lines are whole rows."""
    if asked.needs_time:
        raise DataError.at(path, f"the format {find_format(path, asked)} has no times")
    check = Check(encoded=False)
    if asked.skip_bad_lines:
        path = _without_bad_lines(WithoutLines(path), asked, parse, check)
    return Source(path, None, _streamed(path, parse), check)


def _without_bad_lines(
    file: WithoutLines,
    asked: Asked,
    parse: Callable[[ByteStream], Iterator[Cells]],
    check: Check | None,
    **layout: Any,
) -> WithoutLines:
    """Returns the file without the lines for which `parse` or `check` raises an error."""
    state = check

    def attempt(stream: ByteStream) -> None:
        nonlocal state
        cells = parse(stream)
        if asked.separator is not None:
            separator = asked.separator
            cells = (_with_lists(some, separator) for some in cells)
        if state is None:
            collections.deque(cells, maxlen=0)
            return
        trial = dataclasses.replace(state)  # dropped if it sees a bad line
        for block in trial.blocks(cells):
            if block.beside is not None and asked.check_further is not None:
                asked.check_further(block.beside)
        state = trial

    find_bad_lines(file, attempt, **layout)
    if asked.wrong is not None:
        for kind, lines in file.kinds().items():
            asked.wrong.counts[kind] += len(lines)
            if asked.wrong.first is None:
                asked.wrong.first = f"line {lines[0]:,} of {shown(file)}"
    return file


def _pairs(piece: Piece, asked: Asked) -> Source:
    chosen, path = asked.chosen, piece.path
    if not asked.with_time:
        chosen = dataclasses.replace(chosen, time=None)
    if asked.skip_bad_lines:
        path = WithoutLines(path)
    layout = find_layout(
        path,
        chosen,
        delimiter=asked.delimiter,
        header=asked.header,
        indicator=asked.indicator,
        constants=piece.constants.texts,
        time_format=asked.time_format,
        further=asked.further,
    )
    columns = layout.columns
    check_times(path, columns, asked.needs_time)
    encoded = ("user", "item") if asked.separator is None else ("user",)
    read = columns_read(columns)
    names = {key: c.name or "" for key, c in read.items() if key not in layout.places}
    check = Check(columns, encoded=False, time_format=asked.time_format)

    def parse(file: ByteStream, layout: Layout = layout) -> Iterator[Cells]:
        cells = record_cells(file, path, layout, layout.places, encoded)
        return piece.with_constants(cells, names) if names else cells

    if isinstance(path, WithoutLines):
        behind = dataclasses.replace(layout, first_line=1, header=None)
        path = _without_bad_lines(
            path,
            asked,
            lambda file: parse(file, behind),
            check,
            delimiter=layout.delimiter,
            first_line=layout.first_line,
            header=layout.header,
        )
    return Source(path, columns, _streamed(path, parse), check)


def _streamed(
    path: Path, parse: Callable[[ByteStream], Iterator[Cells]]
) -> Iterator[Cells]:
    with open_data(path) as stream:
        yield from parse(stream)


def _jsonl(piece: Piece, asked: Asked) -> Source:
    path = WithoutLines(piece.path) if asked.skip_bad_lines else piece.path
    head = json_lines.first_rows(path)
    constants = piece.constants.beside(head.schema.names)
    piece = dataclasses.replace(piece, constants=constants)
    layout = _table_layout(path, constants.schema(head.schema), asked)
    rows = (constants.added(batch, layout.columns) for batch in head.to_batches())
    layout, _ = _settled(layout, asked, rows)
    names = {role: name for role, name in layout.roles.items() if constants.own([name])}

    def parse(file: ByteStream) -> Iterator[Cells]:
        cells = json_lines.stream_cells(file, path, head.schema, names)
        return piece.with_constants(cells, layout.roles)

    if isinstance(path, WithoutLines):
        check = None
        if asked.wrong is None:  # otherwise wrong events are counted during the reading
            check = _typed(path, layout, iter(()), asked).check
        path = _without_bad_lines(path, asked, parse, check)
    return _typed(path, layout, _streamed(path, parse), asked)


def _parquet(path: Path, pieces: list[Piece], asked: Asked) -> Source:
    files = [p.file or parquet.parquet_files(p.path)[0] for p in pieces]
    first, schema = parquet.first_schema(files)
    parquet.check_no_part(first, schema)
    layout = _table_layout(first, schema, asked)
    rows = parquet.first_rows(files, layout.columns)
    layout, _ = _settled(layout, asked, rows)
    # For `prepare`, row groups are read one by one in a thread: its events need not fit in memory,
    # and its engine is slower than the reader.
    read = _batches if asked.wrong is None else _ahead

    def cells() -> Iterator[Cells]:
        with progress_bar(path, sum(file.size for file in files)) as bar:
            for file in files:
                batches = read(file, layout, bar)
                yield from tables.table_cells([(file.path, batches)], layout.roles)

    return _typed(path, layout, cells(), asked)


def _table(path: Path, pieces: list[Piece], asked: Asked) -> Source:
    [piece] = pieces
    assert piece.table is not None
    try:
        layout = _table_layout(path, piece.table.schema, asked)
        layout, rows = _settled(layout, asked, piece.table)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError.at(path, f"cannot be read: {error}") from error
    return _typed(path, layout, tables.table_cells([(path, rows)], layout.roles), asked)


def _table_layout(path: Path, schema: pa.Schema, asked: Asked) -> tables.TableLayout:
    return tables.find_table_layout(
        path,
        schema,
        asked.chosen,
        indicator=asked.indicator,
        with_time=asked.with_time,
        further=asked.further,
    )


def _settled(
    layout: tables.TableLayout, asked: Asked, batches: Iterable[pa.RecordBatch]
) -> tuple[tables.TableLayout, Iterable[pa.RecordBatch]]:
    if asked.time_format is not None:  # so the column holds times, whatever its cells
        return layout, batches
    return tables.settle_time(layout, asked.chosen, batches)


def _typed(
    path: Path, layout: tables.TableLayout, cells: Iterator[Cells], asked: Asked
) -> Source:
    """Makes a source from cells of columns that have types."""
    check_times(path, layout.source, asked.needs_time)
    check = Check(
        layout.source,
        layout.roles,
        wrong=asked.wrong,
        skips=asked.skips,
        time_format=asked.time_format,
    )
    return Source(path, layout.source, cells, check)


def _batches(
    file: parquet.ParquetPath,
    layout: tables.TableLayout,
    bar: tqdm,
    *,
    by_group: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yields batches of a file. With `by_group`, row groups are read one at a time."""
    with file.open(one_group=by_group) as opened:
        tables.check_layout(file, opened, layout)
        rows = max(opened.metadata.num_rows, 1)
        groups = [[group] for group in range(opened.num_row_groups)]
        for group in groups if by_group else [None]:
            for batch in file.batches(opened, tables.BATCH_ROWS, layout.columns, group):
                yield batch
                bar.update(file.size * len(batch) / rows)


def _ahead(
    file: parquet.ParquetPath, layout: tables.TableLayout, bar: tqdm
) -> Iterator[pa.RecordBatch]:
    """Yields batches of a file, row group by row group. A thread prefetches a few batches."""
    batches = _batches(file, layout, bar, by_group=True)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        ahead = collections.deque(
            thread.submit(next, batches, None) for _ in range(_AHEAD)
        )
        while (batch := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, batches, None))
            yield batch


_Decoder = Callable[[Path, list[Piece], Asked], Source]

# The function that opens a source, for each format.
_DECODERS: dict[str, _Decoder] = {
    "text": _files(_text),
    "adjacency": _files(_adjacency),
    "pairs": _files(_pairs),
    "jsonl": _files(_jsonl),
    "parquet": _parquet,
    "table": _table,
}
