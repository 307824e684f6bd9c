"""Parses records of CSV and TSV files: where they end, their cells, and Arrow columns."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from sparsejax.callers import warn_caller
from sparsejax.data.events.block import Cells, lists
from sparsejax.data.files import arrow
from sparsejax.data.files.opening import (
    BLOCK_BYTES,
    ByteStream,
    DataError,
    Lines,
    Path,
    line_blocks,
    shown,
)
from sparsejax.data.files.values import lengths, trim

# A quoted field may span several lines. The limit on a record's length detects a quote that is
# never closed.
MAX_RECORD_BYTES = BLOCK_BYTES
# A delimiter of two characters is replaced by ASCII's unit separator, which text does not use.
_UNIT = "\x1f"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLayout:
    """The delimiter, columns and header of a file of records.

    Attributes:
      delimiter: text between the columns: one or two characters.
      first_line: number of the first line after the header, counted from 1.
      num_columns: number of columns of each record.
      names: names of the columns, for messages; may be empty.
      header: text of the header, or None.
      lists: positions of columns whose cells are lists, separated by spaces.
    """

    delimiter: str
    first_line: int
    num_columns: int
    names: tuple[str, ...] = ()
    header: str | None = None
    lists: frozenset[int] = frozenset()

    def uneven(self, count: int) -> str:
        """The error text for a record with another number of columns, `count`."""
        if self.names:
            return (
                f"expected {self.num_columns} columns ({', '.join(self.names[:3])}, ...), "
                f"got {count}: the line is cut, or another character separates columns"
            )
        return f"expected {self.num_columns} columns as on the first line, got {count}"


def record_cells(
    stream: ByteStream,
    path: Path,
    layout: TextLayout,
    places: Mapping[str, int],
    encoded: Collection[str],
    *,
    block_bytes: int = BLOCK_BYTES,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Cells]:
    """Parses the records of a file, a block at a time.

    Args:
      stream: the opened file.
      path: name of the file in messages.
      layout: delimiter, columns and header of the file.
      places: position of the column for each key of the result.
      encoded: keys of columns with repeated cells, which are returned as dictionaries to save
        memory.
      block_bytes: approximate size of a block in bytes.
      max_record_bytes: most bytes of a record that continues after a block.

    Raises:
      DataError: a record has another number of columns. The cells before it are yielded first.
    """
    dictionary = pa.dictionary(pa.int32(), pa.string())
    types = {
        at: dictionary if key in encoded and at not in layout.lists else pa.string()
        for key, at in places.items()
    }

    def cells(lines: Lines) -> Cells:
        found = parse_columns(lines, layout.delimiter, layout.num_columns, types)
        wanted = layout.lists & found.keys()
        found |= {at: lists(*split_lists(found[at])) for at in wanted}

        def error(row: int, message: str) -> DataError:
            records = (line for line, _ in _whole(lines, layout))
            line = next(itertools.islice(records, row, None), None)
            return DataError.at(path, message, line=line)

        return Cells({key: found[at] for key, at in places.items()}, error, path)

    for lines in record_blocks(
        stream,
        path,
        layout.delimiter,
        first_line=layout.first_line,
        header=layout.header,
        block_bytes=block_bytes,
        max_record_bytes=max_record_bytes,
    ):
        try:
            yield cells(lines)
        except pa.ArrowInvalid as cause:
            for line, found in _whole(lines, layout):
                if len(found) == layout.num_columns:
                    continue
                before = lines.text(lines.first, line)
                if before.strip():
                    data = f"{before}\n".encode()
                    yield cells(dataclasses.replace(lines, data=data))
                message = layout.uneven(len(found))
                raise DataError.at(path, message, line=line) from cause
            problem = f"cannot be parsed as CSV from here on: {cause}"
            raise lines.error(0, problem) from cause


def _whole(lines: Lines, layout: TextLayout) -> Iterator[tuple[int, list[str]]]:
    """Yields `(line, cells)` for each record that `parse_columns` reads, without blank ones."""
    for line, _, cells in read_records(lines, layout.delimiter):
        if len(cells) == layout.num_columns or layout.delimiter.join(cells).strip():
            yield line, cells


def separator(delimiter: str) -> str:
    """The character between columns in the result of `with_one_separator`."""
    return delimiter if len(delimiter) == 1 else _UNIT


def has_quotes(delimiter: str) -> bool:
    """Whether fields may be quoted; by convention not with TAB or two characters as delimiter."""
    return delimiter != "\t" and len(delimiter) == 1


def with_one_separator(lines: Lines, delimiter: str) -> bytes:
    """The bytes of the lines, with a delimiter of two characters replaced by one character."""
    if len(delimiter) == 1:
        return lines.data
    if (at := lines.data.find(_UNIT.encode())) >= 0:
        line = lines.data.count(b"\n", 0, at)
        raise lines.error(line, f"byte 0x1f in a file separated by {delimiter!r}")
    return lines.data.replace(delimiter.encode(), _UNIT.encode())


def read_records(lines: Lines, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """Yields `(line, line after the record, cells)` of each record that is not blank."""
    text = with_one_separator(lines, delimiter).decode()
    reader = csv.reader(
        (f"{line}\n" for line in text.split("\n")),
        delimiter=separator(delimiter),
        quoting=csv.QUOTE_MINIMAL if has_quotes(delimiter) else csv.QUOTE_NONE,
    )
    while True:
        line = lines.first + reader.line_num
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError.at(lines.path, f"not CSV: {error}", line=line) from error
        if cells is None:
            return
        if len(cells) > 1 or "".join(cells).strip():
            yield line, lines.first + reader.line_num, cells


def parse_columns(
    lines: Lines, delimiter: str, num_columns: int, types: Mapping[int, pa.DataType]
) -> dict[int, pa.Array]:
    """Parses the columns at some positions, counted from 0; `types` has their Arrow types.

    Records of white space are skipped.

    Raises:
      pa.ArrowInvalid: a record has another number of columns.
    """
    data = with_one_separator(lines, delimiter)
    try:
        return _columns(data, delimiter, num_columns, types)
    except pa.ArrowInvalid:
        data = _without_white_space(lines, delimiter, num_columns)
        if not data.strip():
            return {at: pa.array([], type_) for at, type_ in types.items()}
        return _columns(data, delimiter, num_columns, types)


def _without_white_space(lines: Lines, delimiter: str, num_columns: int) -> bytes:
    """Bytes of the lines, but without records that are white space, which Arrow would not skip."""
    data = with_one_separator(lines, delimiter).split(b"\n")
    kept = []
    for line, end, cells in read_records(lines, delimiter):
        record = data[line - lines.first : end - lines.first]
        if len(cells) == num_columns or delimiter.join(cells).strip():
            kept += record
    return b"\n".join([*kept, b""])


def _columns(
    data: bytes, delimiter: str, num_columns: int, types: Mapping[int, pa.DataType]
) -> dict[int, pa.Array]:
    """Implements `parse_columns` for bytes whose delimiter is one character."""
    names = [f"column {number}" for number in range(num_columns)]
    if data.startswith(b"\xef\xbb\xbf"):  # part of a name; the line end keeps it there
        data = b"\n" + data
    # Arrow's threads must not own Python objects, such as these bytes or a function: if a thread
    # released one while the interpreter shuts down, the process would abort.
    stream = pa.BufferOutputStream()
    stream.write(data)
    table = pyarrow.csv.read_csv(
        pa.BufferReader(stream.getvalue()),
        read_options=pyarrow.csv.ReadOptions(
            column_names=names,
            block_size=len(data) + 1,  # so that no record is cut
        ),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=separator(delimiter),
            quote_char='"' if has_quotes(delimiter) else False,
            newlines_in_values=has_quotes(delimiter),
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={names[at]: type_ for at, type_ in types.items()},
            include_columns=[names[at] for at in types],
            strings_can_be_null=False,
        ),
    )
    return {at: table.column(names[at]).combine_chunks() for at in types}


def record_blocks(
    stream: ByteStream,
    path: Path,
    delimiter: str,
    *,
    first_line: int,
    header: str | None = None,
    block_bytes: int = BLOCK_BYTES,
    max_record_bytes: int = MAX_RECORD_BYTES,
    tell: Callable[[str], None] = warn_caller,
) -> Iterator[Lines]:
    """Yields blocks of whole records.

    A header that is repeated inside the file, as in files that `cat` joined, is left out with
    a warning.

    Args:
      stream: the opened file.
      path: name of the file in messages.
      delimiter: text between the columns: one or two characters.
      first_line: number of the line with the first record, counted from 1.
      header: text of the header, or None.
      block_bytes: approximate size of a block in bytes.
      max_record_bytes: most bytes of a record that continues after a block.
      tell: function that is called with the text of the warning.

    Raises:
      DataError: a quote is not closed.
    """
    pending = b""
    opened: int | None = None
    has_warned = False
    for block in line_blocks(stream, path, block_bytes=block_bytes):
        data, first = block.data, block.first
        if (skipped := first_line - first) > 0:
            first += data.count(b"\n")
            if first <= first_line:
                continue
            data, first = data.split(b"\n", skipped)[-1], first_line
        first -= pending.count(b"\n")
        data = pending + data
        end, opened = len(data), None
        if has_quotes(delimiter):
            end, opened = _whole_records(Lines(data, path, first), delimiter)
        pending = data[end:]
        lines = Lines(data[:end], path, first)
        if header is not None:
            lines, again = _without_headers(lines, delimiter, header)
            if again and not has_warned:
                has_warned = True
                tell(
                    f"{shown(path)}:{again[0]}: the header stands here again, as where "
                    "files were joined; this line and others like it are left out"
                )
        if lines.data.strip():
            yield lines
        if len(pending) > max_record_bytes:
            break
    if opened is not None:
        what = "in the rest of the file" if len(pending) <= max_record_bytes else ""
        what = what or f"within {max_record_bytes:,} bytes"
        raise DataError.at(
            path, f"a quote opens here and is not closed {what}", line=opened
        )


def _whole_records(lines: Lines, delimiter: str) -> tuple[int, int | None]:
    """The end of the last whole record, and the line where a quote is still open, or None.

    A quote opens a field only as its first character. Inside a quoted field, two quotes stand
    for one.

    Raises:
      DataError: a closing quote is not at the end of its field.
    """
    data = lines.data
    if b'"' not in data:
        return len(data), None
    mark = delimiter.encode()
    array = np.frombuffer(b"\n" + data, np.uint8)
    quotes = np.flatnonzero(array == ord('"'))
    # Bytes that may precede an opening or follow a closing quote. A quote is among them, because
    # two quotes inside a field look like the end of one field and the start of another.
    outside = np.frombuffer(b'\n"' + mark, np.uint8)
    opening, closing = quotes[::2], quotes[1::2]
    around = np.append(array[opening - 1], array[closing + 1])
    if not np.isin(around, outside).all():
        return _records_by_field(lines, mark)
    if len(opening) == len(closing):
        return len(data), None
    start = int(opening[array[opening - 1] != ord('"')][-1])  # begin of the open field
    # Positions of line ends. The first one is the line end that was added before the data.
    ends = np.flatnonzero(array[:start] == ord("\n"))
    line = lines.first + len(ends) - 1
    ends = ends[np.searchsorted(quotes, ends) % 2 == 0]  # drop ends inside quotes
    return int(ends[-1]), line


def _records_by_field(lines: Lines, mark: bytes) -> tuple[int, int | None]:
    """Like `_whole_records`, but checks one field at a time: unquoted fields may have quotes."""
    data = lines.data
    opening = re.compile(rb'(?:\A|(?<=[\n%b]))"' % re.escape(mark))
    inside = re.compile(rb'(?:[^"]++|"")*+"')
    at = 0  # offset of the part that is not parsed yet
    between: list[tuple[int, int]] = []  # spans between quoted fields
    while opened := opening.search(data, at):
        between.append((at, opened.start()))
        closed = inside.match(data, opened.end())
        if closed is None:
            ends = (data.rfind(b"\n", *part) + 1 for part in reversed(between))
            line = data.count(b"\n", 0, opened.start())
            return next(filter(None, ends), 0), lines.first + line
        at = closed.end()
        if data[at : at + 1] not in (b"\n", mark):
            behind = data[at : at + 20].decode(errors="replace").partition("\n")[0]
            raise lines.error(
                data.count(b"\n", 0, opened.start()),
                f"a quote opens here and closes before {behind!r} in line "
                f"{lines.first + data.count(b'\n', 0, at)}, not at the end of a field: "
                "is a quote missing? Inside quotes, write a quote twice",
            )
    return len(data), None


def _without_headers(
    lines: Lines, delimiter: str, header: str
) -> tuple[Lines, list[int]]:
    """Replaces repetitions of the header by blank lines.

    The repeated header may be quoted or capitalized differently.

    Returns:
      The lines, and the numbers in the file of the repeated headers.
    """
    alone = Lines(f"{header}\n".encode(), lines.path, 1)
    [(_, _, wanted)] = read_records(alone, delimiter)
    wanted = _bare(wanted)
    # The cheapest check comes first: most blocks do not contain the longest cell of the header.
    lower = lines.data.lower()
    if max(wanted, key=len).encode() not in lower:
        return lines, []
    cells = (rb'[ "]*%b[ "]*' % re.escape(cell.encode()) for cell in wanted)
    again = rb"\n(?:\xef\xbb\xbf)?%b\n" % re.escape(delimiter.encode()).join(cells)
    if not re.search(again, b"\n" + lower):
        return lines, []
    found, data = [], lines.data.split(b"\n")
    for line, end, cells in read_records(lines, delimiter):
        if _bare(cells) == wanted:
            found.append(line)
            first, last = line - lines.first, end - lines.first
            data[first:last] = [b""] * (last - first)
    return dataclasses.replace(lines, data=b"\n".join(data)), found


def _bare(cells: list[str]) -> list[str]:
    """Normalizes the cells of a header: removes quotes and spaces, converts to lower case."""
    plain = [cell.removeprefix("\ufeff").strip(' "') for cell in cells]
    # `bytes.lower` changes only ASCII letters.
    return [cell.encode().lower().decode() for cell in plain]


def split_lists(
    texts: pa.Array, separator: str | None = None
) -> tuple[pa.Array, np.ndarray]:
    """Splits texts at a separator, or at spaces if it is None.

    Returns:
      The parts of all texts, without empty ones, and `[texts]` int64 numbers of parts.
    """
    texts = trim(texts)
    if separator is None or not separator.strip():
        parts = pc.call_function("utf8_split_whitespace", [texts])
    else:
        how = pc.SplitPatternOptions(separator)
        parts = pc.call_function("split_pattern", [texts], how)
    sizes = arrow.numbers(parts.value_lengths()).astype(np.int64)
    flat = trim(parts.flatten())
    given = lengths(flat) > 0  # splitting an empty text gives an empty part
    if not given.all():
        rows = np.repeat(np.arange(len(sizes)), sizes)
        sizes = np.bincount(rows[given], minlength=len(sizes))
        flat = flat.filter(pa.array(given))
    return flat, sizes
