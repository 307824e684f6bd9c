"""Blocks of the columns of click files: TSV, CSV and Parquet."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from sparsejax.data import arrow, parquet
from sparsejax.data.click_schema import ClickSchema
from sparsejax.data.columns import SourceColumn, unclear
from sparsejax.data.events import tables
from sparsejax.data.events.pair_layout import typed_header
from sparsejax.data.events.records import (
    parse_columns,
    read_records,
    record_blocks,
    split_lists,
)
from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.files import DataError, Lines, Path, head, open_data, progress_bar

# Large, so that a large vocabulary is not searched for few examples at a time.
BLOCK_BYTES = 32 * 2**20

Paths = Path | Sequence[Path]


class ClickBlock(NamedTuple):
    """Some examples as they are in a file.

    Attributes:
      columns: `[examples]` values of each column, by its name.
      error: makes the error for an example of the block, from its number and a message.
      path: the file.
    """

    columns: dict[str, pa.Array]
    error: Callable[[int, str], DataError]
    path: Path


def click_blocks(
    paths: Paths,
    schema: ClickSchema,
    names: Sequence[str] | None = None,
    *,
    labelled: bool = True,
) -> Iterator[ClickBlock]:
    """The columns of the schema, or only some of them, file by file.

    Args:
      paths: the files.
      schema: what the columns are.
      names: of the columns that are read; by default all that the schema uses.
      labelled: whether the files have labels, which are not read otherwise.

    Raises:
      DataError: a file cannot be read, lacks a column, or a line has another number of
        columns.
    """
    used = schema.used if labelled else schema.used[1:]
    names = used if names is None else names
    for path in as_paths(paths):
        if not is_parquet(path):
            yield from _text_blocks(path, schema, names, used)
            continue
        files = parquet.parquet_files(path)
        with progress_bar(path, sum(file.size for file in files)) as bar:
            for file in files:
                yield from _parquet_blocks(file, names, bar)


class ClickGroup(NamedTuple):
    """A row group of a Parquet file.

    Attributes:
      source: the file.
      number: the number of the group in the file.
      first: the number of its first row in the file.
      rows: its number of rows.
    """

    source: parquet.ParquetPath
    number: int
    first: int
    rows: int

    def block(self, names: Sequence[str], start: int, stop: int) -> ClickBlock:
        """Columns of its rows `start .. stop - 1`.

        Raises:
          DataError: the file is damaged, or was changed.
        """
        with self.source.open() as file:
            if self.number >= file.metadata.num_row_groups or not set(names) <= set(
                file.schema_arrow.names
            ):
                raise self.source.changed()
            table = file.read_row_group(self.number, columns=list(names))
        if len(table) < stop:
            raise self.source.changed()
        part = table.slice(start, stop - start)
        columns = {name: _one_array(part.column(name)) for name in names}
        return _parquet_block(self.source, columns, self.first + start)


def click_groups(source: parquet.ParquetPath) -> list[ClickGroup]:
    """The row groups of a Parquet file."""
    with source.open() as file:
        metadata = file.metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    ends = itertools.accumulate(sizes)
    each = zip(range(len(sizes)), ends, sizes, strict=True)
    return [ClickGroup(source, i, end - size, size) for i, end, size in each]


def as_paths(paths: Paths) -> list[Path]:
    """One path or several as a list.

    Raises:
      ValueError: there is none.
    """
    one = isinstance(paths, str | os.PathLike)
    found = [paths] if one else list(paths)
    if not found:
        raise ValueError("expected at least one file, got none")
    return found


def _parquet_blocks(
    source: parquet.ParquetPath, names: Sequence[str], bar: tqdm
) -> Iterator[ClickBlock]:
    path = source.path
    with source.open() as file:
        known = file.schema_arrow
        columns = [SourceColumn(f.name, i, str(f.type)) for i, f in enumerate(known)]
        _check_names(path, columns, names)
        rows = max(file.metadata.num_rows, 1)
        first = 0
        for batch in file.iter_batches(tables.BATCH_ROWS, columns=list(names)):
            columns_ = {name: batch.column(name) for name in names}
            yield _parquet_block(source, columns_, first)
            first += len(batch)
            bar.update(source.size * len(batch) / rows)


def _parquet_block(
    source: parquet.ParquetPath, columns: dict[str, pa.Array], first: int
) -> ClickBlock:
    def error(row: int, message: str) -> DataError:
        return DataError.at(source.path, f"row {first + row:,}: {message}")

    return ClickBlock(columns, error, source.path)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return pa.array([], column.type) if isinstance(found, pa.ChunkedArray) else found


@dataclasses.dataclass(frozen=True)
class _TextLayout:
    """How a text file is written.

    Attributes:
      columns: the names of its columns.
      delimiter: what separates them.
      first_line: the line of the first record behind the header, counted from 1.
      header: the text of the header, or None.
      lists: the positions of columns whose cells are lists, separated by spaces.
    """

    columns: tuple[str, ...]
    delimiter: str
    first_line: int
    header: str | None = None
    lists: frozenset[int] = frozenset()


def _text_blocks(
    path: Path, schema: ClickSchema, names: Sequence[str], used: Sequence[str]
) -> Iterator[ClickBlock]:
    layout = _layout(path, schema, used)
    places = {name: layout.columns.index(name) for name in names}
    # Categories repeat, so that a dictionary of a block is smaller than the block.
    encoded = pa.dictionary(pa.int32(), pa.string())
    types = {
        at: encoded if name in schema.ids and at not in layout.lists else pa.string()
        for name, at in places.items()
    }
    count = len(layout.columns)
    with open_data(path) as stream:
        for lines in record_blocks(
            stream,
            path,
            layout.delimiter,
            first_line=layout.first_line,
            header=layout.header,
            block_bytes=BLOCK_BYTES,
        ):
            try:
                found = parse_columns(lines, layout.delimiter, count, types)
            except pa.ArrowInvalid as cause:
                raise _wrong_record(lines, layout, cause) from cause
            found |= {at: _split(found[at]) for at in layout.lists & found.keys()}

            def error(row: int, message: str, lines: Lines = lines) -> DataError:
                line = _line_of(lines, layout, row)
                return DataError.at(path, message, line=line)

            yield ClickBlock({n: found[at] for n, at in places.items()}, error, path)


def _layout(path: Path, schema: ClickSchema, used: Sequence[str]) -> _TextLayout:
    """How a file is written, which has the columns `used`."""
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
        if schema.label not in used and len(cells) == len(names) - 1:
            names = tuple(name for name in names if name != schema.label)
        is_header = tuple(cells) == names
    else:
        names, is_header = tuple(cells), True
        columns = [SourceColumn(name, i, "text") for i, name in enumerate(names)]
        _check_names(path, columns, used, line=line)
    if not is_header:
        return _TextLayout(names, delimiter, line)
    return _TextLayout(names, delimiter, end, lines.text(line, end), lists)


def _split(texts: pa.Array) -> pa.Array:
    """Lists of what spaces separate."""
    flat, sizes = split_lists(texts)
    ends = np.append(0, np.cumsum(sizes))
    return pa.LargeListArray.from_arrays(arrow.from_numbers(ends), flat)


def _check_names(
    path: Path,
    columns: Sequence[SourceColumn],
    names: Sequence[str],
    line: int | None = None,
) -> None:
    known = [column.name for column in columns]
    for name in names:
        if known.count(name) != 1:
            problem = "there is no column" if name not in known else "there are several"
            remedy = (
                "the schema needs it; for a text file without a header, give "
                "ClickSchema(columns=...)"
            )
            unclear(path, columns, f"{problem} {name!r}", remedy, line)


def _records(lines: Lines, layout: _TextLayout) -> Iterator[tuple[int, list[str]]]:
    """Line and cells of the records that `parse_columns` does not skip."""
    for line, _, cells in read_records(lines, layout.delimiter):
        if len(cells) == len(layout.columns) or "".join(cells).strip():
            yield line, cells


def _line_of(lines: Lines, layout: _TextLayout, row: int) -> int | None:
    found = (line for i, (line, _) in enumerate(_records(lines, layout)) if i == row)
    return next(found, None)


def _wrong_record(lines: Lines, layout: _TextLayout, cause: Exception) -> DataError:
    """The error for the first record with another number of columns."""
    count = len(layout.columns)
    for line, cells in _records(lines, layout):
        if len(cells) != count:
            return DataError.at(
                lines.path,
                f"expected {count} columns ({', '.join(layout.columns[:3])}, ...), got "
                f"{len(cells)}: the line is cut, or another character separates columns",
                line=line,
            )
    return lines.error(0, f"cannot be parsed from here on: {cause}")
