"""Reads blocks of columns from click files and from tables in memory."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from sparsejax.data.events import json_lines, tables
from sparsejax.data.events.bad_lines import NO_LINES, find_bad_lines
from sparsejax.data.events.block import Cells, row_error
from sparsejax.data.events.pair_layout import typed_header
from sparsejax.data.events.pieces import TABLE, Piece, find_pieces, is_path
from sparsejax.data.events.records import TextLayout, read_records, record_cells
from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.files import arrow, others, parquet
from sparsejax.data.files.columns import SourceColumn, find_beside
from sparsejax.data.files.opening import (
    ByteStream,
    DataError,
    Path,
    WithoutLines,
    head,
    open_data,
    progress_bar,
)
from sparsejax.data.scan import Group
from sparsejax.data.sets.click_records import table_of
from sparsejax.data.sets.click_schema import ClickSchema

# Blocks are large, because for each block each vocabulary, which may be large, is searched once.
BLOCK_BYTES = 32 * 2**20

Paths = Path | Sequence[Path] | Any

# Remedy in the error for a file that lacks a column.
_REMEDY = "the schema needs it; for a text file without a header, give ClickSchema(columns=...)"


def click_blocks(
    paths: Paths,
    schema: ClickSchema,
    names: Sequence[str] | None = None,
    *,
    labelled: bool = True,
    served: bool = False,
    check: Callable[[Cells], None] | None = None,
) -> Iterator[Cells]:
    """Yields blocks of the columns of the schema, or of some of them, file by file.

    Args:
      paths: files, or a table in memory.
      schema: types of the columns.
      names: names of the columns to read; by default all that the schema uses.
      labelled: whether the files have labels; otherwise labels are not read.
      served: leave out columns with a fixed value, as when a model is served.
      check: function that raises an error for wrong cells. If it is given, lines with such
        cells, and lines that cannot be read, are left out.

    Raises:
      DataError: a file cannot be read, lacks a column, or has a line with another number
        of columns; or too many lines are bad.
      ValueError: `check` is given, and a source is not a file of lines.
    """
    if isinstance(paths, Mapping):
        paths = table_of(paths)
    used = schema.used if labelled else schema.inputs
    if served:
        used = [name for name in used if name not in schema.fixed]
    names = used if names is None else names
    used = list(dict.fromkeys([*used, *names]))
    as_paths(paths)  # raises an error if there are no files
    for piece in find_pieces(paths):
        if check is not None:
            own = piece.constants.own(used)
            file = without_bad_clicks(piece, schema, own, check)
            piece = dataclasses.replace(piece, path=file)
        if piece.file is not None or (piece.table is None and is_parquet(piece.path)):
            yield from _parquet_blocks(piece, list(names))
            continue
        own = piece.constants.own(names)
        needed = piece.constants.own(used)
        if piece.table is not None:
            _check_columns(piece.path, piece.table.schema, own)
            found = tables.table_cells([(piece.path, piece.table)], {n: n for n in own})
        elif guess_clicks(piece.path) == "jsonl":
            schema_ = json_lines.first_rows(piece.path).schema
            _check_columns(piece.path, schema_, own)
            found = json_lines.json_cells(piece.path, schema_, {n: n for n in own})
        else:
            found = _text_blocks(piece.path, schema, own, needed)
        yield from piece.with_constants(found, {name: name for name in names})


def without_bad_clicks(
    piece: Piece,
    schema: ClickSchema,
    names: Sequence[str],
    check: Callable[[Cells], None],
) -> WithoutLines:
    """Finds the lines of a file that cannot be read and leaves them out; a warning counts them.

    Args:
      piece: the file.
      schema: types of the columns.
      names: names of the columns that the file has.
      check: function that raises an error for wrong cells.

    Raises:
      DataError: too many lines are bad.
      ValueError: the piece is not a file of lines.
    """
    if piece.table is not None or piece.file is not None or is_parquet(piece.path):
        what = (
            "the source is in memory" if piece.table is not None else "this is Parquet"
        )
        raise ValueError(NO_LINES.format(what))
    file = WithoutLines(piece.path)
    if guess_clicks(file) == "jsonl":
        rows = json_lines.first_rows(file).schema
        _check_columns(file, rows, names)

        def parse(stream: ByteStream) -> Iterator[Cells]:
            return json_lines.stream_cells(stream, file, rows, {n: n for n in names})

        how: dict[str, Any] = {}
    else:
        layout = _layout(file, schema, names)
        places = {name: layout.names.index(name) for name in names}
        how = {"first_line": layout.first_line, "header": layout.header}
        how["delimiter"] = layout.delimiter
        layout = dataclasses.replace(layout, first_line=1, header=None)

        def parse(stream: ByteStream) -> Iterator[Cells]:
            return record_cells(stream, file, layout, places, schema.ids)

    def attempt(stream: ByteStream) -> None:
        for cells in piece.with_constants(parse(stream), {n: n for n in names}):
            check(cells)

    find_bad_lines(file, attempt, **how)
    return file


def guess_clicks(path: Path) -> str:
    """Guesses the format of a click file that is not Parquet: "jsonl", or else "pairs".

    Raises:
      DataError: the file seems to have a format that is not read.
    """
    text = head(path).data.decode()
    if problem := others.of_lines([line for line in text.split("\n") if line.strip()]):
        raise DataError.at(path, problem)
    return "jsonl" if text.lstrip().startswith("{") else "pairs"


def _check_columns(path: Path, schema: pa.Schema, names: Sequence[str]) -> None:
    columns = [SourceColumn(f.name, i, str(f.type)) for i, f in enumerate(schema)]
    find_beside(path, columns, names, remedy=_REMEDY)


def group_cells(group: Group, names: Sequence[str], start: int, stop: int) -> Cells:
    """Reads columns of the rows `start .. stop - 1` of a row group.

    Raises:
      DataError: the file is damaged, or was changed.
    """
    with group.file.open() as file:
        if group.number >= file.metadata.num_row_groups or not set(names) <= set(
            group.file.columns(file).names
        ):
            raise group.file.changed()
        table = group.file.group(file, group.number, list(names))
    if len(table) < stop:
        raise group.file.changed()
    part = table.slice(start, stop - start)
    columns = {name: arrow.one(part.column(name)) for name in names}
    error = row_error(group.file.path, group.first + start)
    return Cells(columns, error, group.file.path)


def click_groups(source: parquet.ParquetPath) -> list[Group]:
    """The row groups of a Parquet file."""
    with source.open() as file:
        metadata = file.metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    ends = itertools.accumulate(sizes)
    each = zip(range(len(sizes)), ends, sizes, strict=True)
    return [Group(source, i, size, size, end - size) for i, end, size in each]


def as_paths(paths: Paths) -> list[Path]:
    """The paths as a list; for a table in memory, a list with its name in messages.

    Raises:
      ValueError: the list of paths is empty.
    """
    if isinstance(paths, str | os.PathLike):
        return [paths]
    if isinstance(paths, list | tuple):
        if not paths:
            raise ValueError("expected at least one file, got none")
        if is_path(paths[0]):
            return list(paths)
    return [TABLE]


def _parquet_blocks(piece: Piece, names: list[str]) -> Iterator[Cells]:
    for source in [piece.file] if piece.file else parquet.parquet_files(piece.path):
        with progress_bar(source.path, source.size) as bar, source.open() as file:
            _check_columns(source.path, source.columns(file), names)
            rows = max(file.metadata.num_rows, 1)

            def batches(
                source: parquet.ParquetPath = source,
                file: pq.ParquetFile = file,
                bar: tqdm = bar,
                part: float = source.size / rows,
            ) -> Iterator[pa.RecordBatch]:
                for batch in source.batches(file, tables.BATCH_ROWS, names):
                    yield batch
                    bar.update(part * len(batch))

            columns = {name: name for name in names}
            yield from tables.table_cells([(source.path, batches())], columns)


def _text_blocks(
    path: Path, schema: ClickSchema, names: Sequence[str], used: Sequence[str]
) -> Iterator[Cells]:
    layout = _layout(path, schema, used)
    places = {name: layout.names.index(name) for name in names}
    with open_data(path) as stream:
        yield from record_cells(
            stream, path, layout, places, schema.ids, block_bytes=BLOCK_BYTES
        )


def _layout(path: Path, schema: ClickSchema, used: Sequence[str]) -> TextLayout:
    """The delimiter, columns and header of a text file, which must have the columns `used`."""
    lines = head(path)
    first_line = lines.data.decode().lstrip("\n").partition("\n")[0]
    delimiter = schema.delimiter or ("\t" if "\t" in first_line else ",")
    records = read_records(lines, delimiter)
    line, end, cells = next(records)
    cells = [cell.strip() for cell in cells]
    lists: frozenset[int] = frozenset()
    if (typed := typed_header(cells)) and not set(used) <= set(cells):
        cells = [name for name, _ in typed]
        lists = frozenset(n for n, (_, kind) in enumerate(typed) if kind == "token_seq")
    if schema.columns is not None:
        names = schema.columns
        left_out = set(schema.used) - set(used)
        if len(cells) == len(names) - len(left_out):
            names = tuple(name for name in names if name not in left_out)
        is_header = tuple(cells) == names
    else:
        names, is_header = tuple(cells), True
        columns = [SourceColumn(name, i, "text") for i, name in enumerate(names)]
        find_beside(path, columns, used, line, _REMEDY)
    return TextLayout(
        delimiter=delimiter,
        first_line=end if is_header else line,
        num_columns=len(names),
        names=names,
        header=lines.text(line, end) if is_header else None,
        lists=lists if is_header else frozenset(),
    )
