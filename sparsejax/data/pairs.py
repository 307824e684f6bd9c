"""CSV and TSV files with a (user, item) pair, perhaps with more, on each line."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv

from sparsejax.data.assemble import Block
from sparsejax.data.columns import (
    SYNONYMS,
    Column,
    Columns,
    SourceColumn,
    find_columns,
    role_of,
    unclear,
)
from sparsejax.data.files import (
    BLOCK_BYTES,
    ByteStream,
    DataError,
    Lines,
    Path,
    head,
    line_blocks,
)
from sparsejax.data.lines import mixed_values
from sparsejax.data.values import (
    is_number,
    lengths,
    mixed_times,
    parse_times,
    parse_values,
    time_problem,
    trim,
    value_problem,
)

DELIMITERS = ("\t", "::", ",", ";", "|")

_USER = "the user (row) is empty"
_ITEM = "the item (feature) is empty"
_SAMPLE = 100  # records that are looked at before
_MOVIELENS = [
    ["integers"] * 2 + [rating, "integers"] for rating in ("integers", "fractions")
]

# A quoted field may have several lines. A record is not longer than this, so that a
# quote that is not closed is found.
MAX_RECORD_BYTES = BLOCK_BYTES
# What a delimiter of two characters becomes: it is made for that, and no text has it.
_UNIT = "\x1f"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How to read a file of pairs.

    Attributes:
      delimiter: one or two characters.
      first_line: where the records begin, counted from 1: behind the header.
      num_columns: of each record.
      columns: which is what.
    """

    delimiter: str
    first_line: int
    num_columns: int
    columns: Columns

    @property
    def places(self) -> dict[str, int]:
        """The position of each column that is read, by its role."""
        return {
            role: column.position
            for role in ("user", "item", "value", "time")
            if (column := getattr(self.columns, role)) is not None
        }


def pair_blocks(stream: ByteStream, path: Path, layout: Layout) -> Iterator[Block]:
    """Reads the pairs; `stream` is `path` opened.

    Raises:
      DataError: with the line of the first record that is wrong.
    """
    blocks = _record_blocks(stream, path, layout)
    valued: bool | None = None
    kind: str | None = None  # of the times; "" if there are none
    for lines in blocks:
        try:
            columns = _parse(lines, layout)
        except pa.ArrowInvalid as error:
            _explain(lines, layout, valued, kind, cause=error)
        if not len(columns["item"]):
            continue
        if missing := _num_empty(columns):
            with contextlib.suppress(DataError, pa.ArrowInvalid):
                missing += sum(_num_empty(_parse(rest, layout)) for rest in blocks)
            _explain(lines, layout, valued, kind, missing=missing)
        values = times = None
        if "value" in columns:
            texts = trim(columns["value"])
            is_missing = lengths(texts) == 0
            before, valued = valued, not is_missing[0] if valued is None else valued
            values = parse_values(texts) if valued else None
            if (is_missing == valued).any() or (valued and values is None):
                _explain(lines, layout, before, kind)
        if "time" in columns:
            texts = trim(columns["time"])
            is_missing = lengths(texts) == 0
            before = kind
            if kind is None and is_missing[0]:
                kind = ""
            found = parse_times(texts) if kind != "" else None
            if (is_missing == (kind != "")).any() or (
                kind != "" and (found is None or kind not in (None, found[1]))
            ):
                _explain(lines, layout, valued, before)
            if found is not None:
                times, kind = found
        yield Block(columns["user"], None, columns["item"], values, times)


def _parse(lines: Lines, layout: Layout) -> dict[str, pa.Array]:
    """The columns that are read, by role; names are dictionary-encoded.

    Raises:
      pa.ArrowInvalid: a record has another number of columns.
    """
    data = _with_one_separator(lines, layout.delimiter)
    try:
        return _columns(data, layout)
    except pa.ArrowInvalid:
        return _columns(_without_white_space(lines, layout), layout)


def _without_white_space(lines: Lines, layout: Layout) -> bytes:
    """The same without records that are white space, which Arrow does not skip."""
    data = _with_one_separator(lines, layout.delimiter).split(b"\n")
    kept = []
    for line, end, cells in _records(lines, layout.delimiter):
        record = data[line - lines.first : end - lines.first]
        if len(cells) == layout.num_columns or b"".join(record).strip():
            kept += record
    return b"\n".join([*kept, b""])


def _columns(data: bytes, layout: Layout) -> dict[str, pa.Array]:
    """`_parse` of lines with a separator of one character."""
    names = [f"column {number}" for number in range(layout.num_columns)]
    encoded = pa.dictionary(pa.int32(), pa.string())
    types = {
        names[at]: encoded if role in ("user", "item") else pa.string()
        for role, at in layout.places.items()
    }

    if data.startswith(b"\xef\xbb\xbf"):  # it begins a name, but Arrow would drop it
        data = b"\n" + data
    # Arrow's threads must hold nothing of Python's, neither these bytes nor a function:
    # one that lets go of it when the process ends would abort the process.
    stream = pa.BufferOutputStream()
    stream.write(data)
    table = pyarrow.csv.read_csv(
        pa.BufferReader(stream.getvalue()),
        read_options=pyarrow.csv.ReadOptions(
            column_names=names,
            block_size=len(data) + 1,  # so that no record is in two
        ),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=_separator(layout.delimiter),
            quote_char='"' if _has_quotes(layout.delimiter) else False,
            newlines_in_values=_has_quotes(layout.delimiter),
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            strings_can_be_null=False,
        ),
    )
    return {
        role: table.column(names[at]).combine_chunks()
        for role, at in layout.places.items()
    }


def _num_empty(columns: Mapping[str, pa.Array]) -> int:
    """How many users and items are empty."""
    count = 0
    for role in ("user", "item"):
        names = columns[role]
        at = names.dictionary.index("").as_py()
        if at >= 0:
            count += int(np.sum(names.indices.to_numpy() == at))
    return count


def find_layout(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: Column = None,
    delimiter: str | None = None,
    header: bool | None = None,
    indicator: bool = False,
) -> Layout:
    """Settles what was left open, from the first records; see `read_pairs`.

    Raises:
      DataError: the file is empty, or it is not clear how it is to be read.
      ValueError: a delimiter that cannot be one, a column taken twice.
    """
    if delimiter is not None and (
        not 1 <= len(delimiter) <= 2 or set(delimiter) & set('\r\n"\0')
    ):
        raise ValueError(
            "delimiter must be one or two characters, no quote and no end of a line, "
            f"got {delimiter!r}"
        )
    given: dict[str, Column] = {"user": user, "item": item}
    given |= {} if indicator else {"value": value}
    given["time"] = time
    lines = head(path)
    if delimiter is None:
        delimiter = _guess_delimiter(lines)
    records = _sample(lines, delimiter)
    if not records:
        raise lines.error(0, "holds no data: there is no record")
    (line, first), first_line = records[0], lines.first
    if len(first) < 2:
        raise DataError.at(
            path,
            f"expected at least two columns separated by {delimiter!r}, got one: "
            f"{first[0][:40]!r}",
            line=line,
        )
    if header is None:
        header = any(isinstance(column, str) for column in given.values())
        header = header or _has_header(path, records)
    below = [cells for _, cells in records]
    if header:
        below = below[1:]
        first_line = _end_of_first(lines, delimiter)
    columns = []
    for at, name in enumerate(first):
        cells = [cells[at].strip() for cells in below if len(cells) == len(first)]
        sample = next(filter(None, cells), "")
        columns.append(
            SourceColumn(name.strip() if header else None, at, _type(cells), sample)
        )
    if header:
        places = find_columns(path, columns, given, roles=list(given), line=line)
    else:
        places = _by_position(path, columns, given, delimiter, line)
    unread = [
        c.name or f"column {c.position}"
        for c in columns
        if c.position not in places.values()
    ]
    if time is None and "time" in places:
        column = columns[places["time"]]
        if column.sample and (problem := time_problem(column.sample, None)):
            del places["time"]
            unread.append(f"{column.name} ({problem})")
    found = {role: columns[at] for role, at in places.items()}
    return Layout(
        delimiter,
        first_line,
        len(first),
        Columns(
            found["user"],
            found["item"],
            found.get("value"),
            found.get("time"),
            tuple(unread),
        ),
    )


def _by_position(
    path: Path,
    columns: Sequence[SourceColumn],
    given: Mapping[str, Column],
    delimiter: str,
    line: int,
) -> dict[str, int]:
    """The columns where there is no header: two that are left are user and item.

    MovieLens' `user::item::rating::time` are known.
    """
    named = [role for role, column in given.items() if column is not None]
    places = find_columns(path, columns, given, roles=named, line=line)
    types = [column.type for column in columns]
    if not named and delimiter == "::" and types in _MOVIELENS:
        return {role: at for at, role in enumerate(SYNONYMS) if role in given}
    wanted = [role for role in ("user", "item") if role not in places]
    left = [
        column
        for column in columns
        if column.position not in places.values() and column.type != "empty"
    ]
    if wanted and (
        len(left) != len(wanted)
        or any(column.type in ("fractions", "dates") for column in left)
    ):
        problem = "without a header it is not clear which column is what"
        remedy = "name them by their numbers: user=COLUMN, item=COLUMN"
        remedy += ", and value=COLUMN or time=COLUMN if there are such"
        unclear(path, columns, problem, remedy, line)
    if wanted:
        places |= dict(zip(wanted, (column.position for column in left), strict=True))
    return places


def _type(cells: Sequence[str]) -> str:
    """What some cells are, in a word."""
    cells = [cell for cell in cells if cell]
    if not cells:
        return "empty"
    if all(map(is_number, cells)):
        numbers = [float(cell) for cell in cells]
        if any(number != int(number) for number in numbers if abs(number) < 2**53):
            return "fractions"
        return "integers"
    if all(time_problem(cell, None) is None for cell in cells):
        return "dates"
    return "text"


def _has_header(path: Path, records: Sequence[tuple[int, list[str]]]) -> bool:
    """Whether the first record is one.

    It is if two of its cells are known names of columns, or if all are text, and one has
    nothing but numbers or dates below.

    Raises:
      DataError: one cell is a known name, which may be chance.
    """
    line, first = records[0]
    known = [cell for cell in first if role_of(cell)]
    if len(known) > 1:
        return True
    below = [cells for _, cells in records[1:] if len(cells) == len(first)]
    is_text = all(_type([cell.strip()]) in ("text", "empty") for cell in first)
    for at, cell in enumerate(first):
        cells = [cells[at].strip() for cells in below]
        if is_text and cell.strip() and any(cells) and _type(cells) != "text":
            return True
    if known:
        raise DataError.at(
            path,
            f"is the first line a header, with the known name {known[0]!r}, or data? "
            f"Name the columns, as user={first[0]!r} and item={first[1]!r}, or write a "
            "header user,item",
            line=line,
        )
    return False


def _separator(delimiter: str) -> str:
    """The one character that separates columns, once there is one."""
    return delimiter if len(delimiter) == 1 else _UNIT


def _has_quotes(delimiter: str) -> bool:
    """Whether fields may be quoted: by convention not if separated by TAB or the like."""
    return delimiter != "\t" and len(delimiter) == 1


def _with_one_separator(lines: Lines, delimiter: str) -> bytes:
    """The lines with a separator of one character."""
    if len(delimiter) == 1:
        return lines.data
    if (at := lines.data.find(_UNIT.encode())) >= 0:
        line = lines.data.count(b"\n", 0, at)
        raise lines.error(line, f"byte 0x1f in a file separated by {delimiter!r}")
    return lines.data.replace(delimiter.encode(), _UNIT.encode())


def _guess_delimiter(lines: Lines) -> str:
    """The delimiter by which all records have the same number of columns.

    Raises:
      DataError: there are several.
    """
    text = lines.data.decode()
    inside = [delimiter for delimiter in DELIMITERS if delimiter in text]
    counts = {
        delimiter: {len(cells) for _, cells in _sample(lines, delimiter)}
        for delimiter in inside
    }
    even = [d for d, count in counts.items() if len(count) == 1 and count != {1}]
    if len(even) > 1 and even[0] not in ("\t", "::"):
        headed = [
            d for d in even if sum(map(bool, map(role_of, _sample(lines, d)[0][1]))) > 1
        ]
        if len(headed) != 1:
            raise lines.error(
                0,
                f"columns may be separated by {' or by '.join(map(repr, even))}; say "
                f"which: delimiter={even[0]!r}",
            )
        even = headed
    if even:
        return even[0]
    first = next(line for line in text.split("\n") if line.strip())
    return next((d for d in inside if d in first), ",")


def _sample(lines: Lines, delimiter: str) -> list[tuple[int, list[str]]]:
    """`(line, cells)` of the first records."""
    found: list[tuple[int, list[str]]] = []
    for line, _, cells in _records(lines, delimiter):
        found.append((line, cells))
        if len(found) == _SAMPLE:
            return found
    # What was read may end within quotes.
    return found[:-1] if len(found) > 2 and _has_quotes(delimiter) else found


def _end_of_first(lines: Lines, delimiter: str) -> int:
    """The line behind the first record."""
    return next(end for _, end, _ in _records(lines, delimiter))


def _records(lines: Lines, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """`(line, line behind it, cells)` of each record that is not blank, in Python."""
    text = _with_one_separator(lines, delimiter).decode()
    reader = csv.reader(
        (f"{line}\n" for line in text.split("\n")),
        delimiter=_separator(delimiter),
        quoting=csv.QUOTE_MINIMAL if _has_quotes(delimiter) else csv.QUOTE_NONE,
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


def _record_blocks(stream: ByteStream, path: Path, layout: Layout) -> Iterator[Lines]:
    """Blocks of whole records, without the header.

    Raises:
      DataError: a quote is not closed.
    """
    pending = b""
    opened: int | None = None
    for block in line_blocks(stream, path):
        data, first = block.data, block.first
        if (skipped := layout.first_line - first) > 0:
            first += data.count(b"\n")
            if first <= layout.first_line:
                continue
            data, first = data.split(b"\n", skipped)[-1], layout.first_line
        first -= pending.count(b"\n")
        data = pending + data
        end, opened = len(data), None
        if _has_quotes(layout.delimiter):
            end, opened = _whole_records(Lines(data, path, first), layout.delimiter)
        pending = data[end:]
        lines = Lines(data[:end], path, first)
        if lines.data.strip():
            yield lines
        if len(pending) > MAX_RECORD_BYTES:
            break
    if opened is not None:
        what = "in the rest of the file" if len(pending) <= MAX_RECORD_BYTES else ""
        what = what or f"within {MAX_RECORD_BYTES:,} bytes"
        raise DataError.at(
            path, f"a quote opens here and is not closed {what}", line=opened
        )


def _whole_records(lines: Lines, delimiter: str) -> tuple[int, int | None]:
    """Where the last record ends, and the line of a quote that is open behind that.

    A quote opens a field where it is its first character; within, two stand for one.

    Raises:
      DataError: behind a closing quote is something else than the end of the field.
    """
    data = lines.data
    if b'"' not in data:
        return len(data), None
    mark = delimiter.encode()
    ends = np.frombuffer(b"\n" + mark, np.uint8)
    array = np.frombuffer(b"\n" + data, np.uint8)
    quotes = np.flatnonzero(array == ord('"'))
    outside = np.append(array[quotes[::2] - 1], array[quotes[1::2] + 1])
    if len(quotes) % 2 == 0 and np.isin(outside, ends).all():
        return len(data), None  # they open and close by turns
    opening = re.compile(rb'(?:\A|(?<=[\n%b]))"' % re.escape(mark))
    inside = re.compile(rb'(?:[^"]++|"")*+"')
    record = at = 0  # where the record begins, and what is not looked at yet
    while opened := opening.search(data, at):
        record = max(record, data.rfind(b"\n", at, opened.start()) + 1)
        line = data.count(b"\n", 0, opened.start())
        closed = inside.match(data, opened.end())
        if closed is None:
            return record, lines.first + line
        at = closed.end()
        if data[at : at + 1] not in (b"\n", mark):
            behind = data[at : at + 20].decode(errors="replace").partition("\n")[0]
            raise lines.error(
                line,
                f"a quote opens here and closes before {behind!r} in line "
                f"{lines.first + data.count(b'\n', 0, at)}, not at the end of a field: "
                "is a quote missing? Within quotes, one is written twice",
            )
    return len(data), None


def _explain(
    lines: Lines,
    layout: Layout,
    valued: bool | None,
    kind: str | None,
    *,
    missing: int = 0,
    cause: Exception | None = None,
) -> NoReturn:
    """Finds the first record that is wrong, slowly; see `pair_blocks`."""
    places = layout.places
    how_often = (
        f", {missing:,} times in all: fill it in, or leave these lines out first"
    )

    def problem_of(cells: list[str]) -> str | None:
        nonlocal valued, kind
        if len(cells) != layout.num_columns:
            if not "".join(cells).strip():
                return None  # as `_without_white_space`
            return (
                f"expected {layout.num_columns} columns as on the first line, got "
                f"{len(cells)}"
            )
        if not cells[places["user"]]:
            return _USER + how_often
        if not cells[places["item"]]:
            return _ITEM + how_often
        if "value" in places:
            text = cells[places["value"]].strip()
            valued = bool(text) if valued is None else valued
            if bool(text) != valued:
                return mixed_values(valued)
            if valued and (problem := value_problem(text)):
                return (
                    f"{problem} ({layout.columns.value} is taken for the value; choose "
                    "another with value=COLUMN, or ignore values with indicator=True)"
                )
        if "time" in places:
            text = cells[places["time"]].strip()
            kind = kind if text or kind is not None else ""
            if bool(text) != (kind != ""):
                return mixed_times(kind != "")
            if kind != "":
                problem = time_problem(text, kind)
                if problem is None and kind is None:
                    _, kind = parse_times(pa.array([text])) or (None, None)
                return problem
        return None

    for line, _, cells in _records(lines, layout.delimiter):
        if problem := problem_of(cells):
            raise DataError.at(lines.path, problem, line=line) from cause
    raise lines.error(0, f"cannot be parsed as CSV from here on: {cause}") from cause
