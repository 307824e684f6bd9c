"""Parses the two formats with a whole row on each line: text and adjacency.

A block of lines is parsed at a time. All its bytes are searched for separators at once, and
Arrow arrays are built from the bytes between them. So no Python object is made for an entry.
This is correct because UTF-8 never uses ASCII bytes inside a longer character.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from sparsejax.data.events.block import Cells, lists
from sparsejax.data.files.opening import (
    BLOCK_BYTES,
    ByteStream,
    Lines,
    Path,
    line_blocks,
)

_NEWLINE, _TAB, _COLON, _COMMA = b"\n\t:,"


def _separates(separators: bytes) -> np.ndarray:
    """A table `[256]` of bool: whether each byte is one of the separators."""
    found = np.zeros(256, bool)
    found[list(separators)] = True
    return found


_TEXT = _separates(b"\n\t:,")
_SPACE = _separates(b" \t\n\v\f")

# Characters of a name, and their escapes in the text form. While a block is parsed, each escape
# is replaced by a byte that UTF-8 never uses. The backslash is replaced first: in `\\,` the pair
# of backslashes is an escape, and the comma is a separator.
ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", ",": "\\,", ":": "\\:"}
_STAND_INS = bytes(range(0xF8, 0xF8 + len(ESCAPES)))
_MEANT = bytes.maketrans(_STAND_INS, "".join(ESCAPES).encode())


def adjacency_cells(
    stream: ByteStream, path: Path, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[Cells]:
    """Parses `row feature feature ...` lines, separated by spaces or TABs."""
    for lines in line_blocks(stream, path, block_bytes=block_bytes):
        yield _adjacency_cells(lines)


def _adjacency_cells(lines: Lines) -> Cells:
    data = np.frombuffer(lines.data, np.uint8)
    marks = np.flatnonzero(_SPACE[data])
    is_newline = data[marks] == _NEWLINE
    starts, ends = np.concatenate([[0], marks[:-1] + 1]), marks
    line = np.cumsum(is_newline) - is_newline
    field = np.flatnonzero(ends > starts)
    starts, ends, line = starts[field], ends[field], line[field]
    is_row = np.diff(line, prepend=-1) > 0
    columns = {
        "user": strings(data, starts[is_row], ends[is_row]),
        "item": lists(
            strings(data, starts[~is_row], ends[~is_row]),
            np.diff(np.append(np.flatnonzero(is_row), len(line))) - 1,
        ),
    }
    at = line[is_row]
    return Cells(columns, lambda row, text: lines.error(int(at[row]), text), lines.path)


def text_cells(
    stream: ByteStream, path: Path, *, indicator: bool, block_bytes: int = BLOCK_BYTES
) -> Iterator[Cells]:
    """Parses `row<TAB>feature[,value]:feature[,value]:...` lines; see `read_text`."""
    for lines in line_blocks(stream, path, block_bytes=block_bytes):
        cells, problem = _text_cells(lines, indicator=indicator)
        if problem is not None:
            line, message = problem
            # Errors in earlier lines have precedence, so these lines are checked first.
            before = lines.data.split(b"\n", line)[:line]
            whole = dataclasses.replace(lines, data=b"".join(b + b"\n" for b in before))
            if line:
                yield _text_cells(whole, indicator=indicator)[0]
            raise lines.error(line, message)
        yield cells


def _text_cells(
    lines: Lines, *, indicator: bool
) -> tuple[Cells, tuple[int, str] | None]:
    """Cells of the lines, and `(line, message)` for the first line with a wrong syntax, if any."""
    lines = _without_escapes(lines)
    data = np.frombuffer(lines.data, np.uint8)
    marks = np.flatnonzero(_TEXT[data])
    kind = data[marks]
    is_newline = kind == _NEWLINE
    line = np.cumsum(is_newline) - is_newline
    problems: list[tuple[int, str]] = []  # (line, message): the first line is reported

    def problem_where(mask: np.ndarray, lines_: np.ndarray, message: str) -> None:
        if mask.any():
            problems.append((int(lines_[np.argmax(mask)]), message))

    # The first TAB of a line ends the row's name. In the name, ':' and ',' are no separators.
    line_ends = marks[is_newline]
    line_starts = np.concatenate([[0], line_ends[:-1] + 1])
    is_tab = kind == _TAB
    tab_line = line[is_tab]
    is_first = np.diff(tab_line, prepend=-1) > 0
    name_ends = np.full(len(line_ends), -1)
    name_ends[tab_line[is_first]] = marks[is_tab][is_first]
    has_row = name_ends > line_starts
    for number in np.flatnonzero(~has_row):
        text = lines.data[line_starts[number] : line_ends[number]]
        if text.strip():
            problems.append((int(number), _no_row(text)))
            break

    # Marks are the separators after the row's name. Field i is between marks i and i + 1.
    mark = np.flatnonzero(has_row[line] & (marks >= name_ends[line]))
    marks, kind, line = marks[mark], kind[mark], line[mark]
    starts, ends = marks[:-1] + 1, marks[1:]
    left, right, line = kind[:-1], kind[1:], line[:-1]
    empty = starts == ends
    is_feature = (left == _TAB) | (left == _COLON)
    second_tab = (left == _TAB) & (starts - 1 > name_ends[line])
    ends_line = (right == _NEWLINE) | (right == _TAB)
    problem_where(
        second_tab & ~(empty & ends_line),
        line,
        "a second TAB; expected 'row<TAB>feature[,value]:feature[,value]...' "
        "(columns 'user<TAB>item<TAB>value' are the format 'pairs')",
    )
    problem_where(
        is_feature & empty & (right == _COMMA),
        line,
        "a value without a feature: there is nothing before ','",
    )
    problem_where(
        (left == _COMMA) & (right == _COMMA),
        line,
        "two commas in one entry; expected feature or feature,value",
    )
    entry = np.flatnonzero(is_feature & ~empty)
    sizes = np.bincount(line[entry], minlength=len(has_row))[has_row]
    rows = strings(data, line_starts[has_row], name_ends[has_row])
    items = strings(data, starts[entry], ends[entry])
    columns: dict[str, pa.Array] = {"user": rows, "item": lists(items, sizes)}
    if not indicator:
        has_value = np.zeros(len(entry), bool)
        before_value = right[entry] == _COMMA
        has_value[before_value] = ~empty[entry[before_value] + 1]
        position = entry[has_value] + 1
        values = strings(data, starts[position], ends[position])
        if not has_value.all():
            places = pa.array(np.cumsum(has_value) - 1, mask=~has_value)
            values = values.take(places)
        columns["value"] = lists(values, sizes)
    at = np.flatnonzero(has_row)
    cells = Cells(
        columns, lambda row, text: lines.error(int(at[row]), text), lines.path
    )
    return cells, min(problems, key=lambda problem: problem[0], default=None)


def _without_escapes(lines: Lines) -> Lines:
    """Replaces escapes by bytes that are no separators; `strings` replaces them by characters."""
    data = lines.data
    if b"\\" not in data:
        return lines
    for escape, byte in zip(ESCAPES.values(), _STAND_INS, strict=True):
        data = data.replace(escape.encode(), bytes([byte]))
    return dataclasses.replace(lines, data=data)


def _no_row(text: bytes) -> str:
    if b"\t" in text:
        return "the row has no name: the line starts with a TAB"
    return (
        "no TAB; expected 'row<TAB>feature[,value]:feature[,value]...', got "
        f"{text[:40].translate(_MEANT).decode(errors='replace')!r}"
    )


def strings(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> pa.LargeStringArray:
    """The strings `data[starts[i]:ends[i]]`, whose ranges must ascend and not touch."""
    offsets = np.concatenate([[0], np.cumsum(ends - starts)])
    steps = np.zeros(len(data) + 1, np.int8)
    steps[starts] += 1
    steps[ends] -= 1
    inside = np.cumsum(steps[:-1], dtype=np.int8).view(bool)
    text = data[inside].tobytes().translate(_MEANT)
    return pa.LargeStringArray.from_buffers(
        len(starts), pa.py_buffer(offsets), pa.py_buffer(text)
    )
