"""Finds the delimiter, the header and the columns of a file of pairs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from sparsejax.data.events.block import beside
from sparsejax.data.events.records import TextLayout, has_quotes, read_records
from sparsejax.data.files.columns import (
    BY_NAME,
    SYNONYMS,
    Chosen,
    Columns,
    SourceColumn,
    check_width,
    find_beside,
    find_columns,
    role_of,
    unclear,
)
from sparsejax.data.files.opening import DataError, Lines, Path, head
from sparsejax.data.files.values import is_number, time_problem

DELIMITERS = ("\t", "::", ",", ";", "|")

_INTEGER = re.compile("0|-?[1-9][0-9]*")
_TYPED = re.compile("(.+):(token|float|token_seq|float_seq)")
_SAMPLE = 100  # first records, from which the layout is found
_MOVIELENS = [
    ["integers"] * 2 + [rating, "integers"] for rating in ("integers", "fractions")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(TextLayout):
    """The delimiter, header and columns of a file of pairs.

    Attributes:
      columns: the columns to read, by role. Constant columns have positions after the last
        column of the file.
    """

    columns: Columns

    @property
    def places(self) -> dict[str, int]:
        """The position in the file of each column to read, by its key in `Cells.columns`."""
        return {
            key: column.position
            for key, column in columns_read(self.columns).items()
            if column.position < self.num_columns
        }


def columns_read(columns: Columns) -> dict[str, SourceColumn]:
    """The columns to read, by their keys in `Cells.columns`."""
    found = {role: getattr(columns, role) for role in SYNONYMS}
    keys = beside(c.name or "" for c in columns.beside)
    found |= dict(zip(keys, columns.beside, strict=True))
    return {key: column for key, column in found.items() if column is not None}


def find_layout(
    path: Path,
    chosen: Chosen,
    *,
    delimiter: str | None = None,
    header: bool | None = None,
    indicator: bool = False,
    constants: Mapping[str, str | None] | None = None,
    time_format: str | None = None,
    further: Sequence[str] = (),
) -> Layout:
    """Finds the layout of a file from its first records, with the rules of `read_pairs`.

    Args:
      path: path of the file.
      chosen: columns that the caller chose for roles.
      delimiter: text between the columns, one or two characters; None guesses it.
      header: whether the first line has the columns' names; None guesses it.
      indicator: ignore values.
      constants: text of each constant column, by name; None is a null.
      time_format: format of times that are text, for `strptime`; None means ISO 8601.
      further: names of columns to read that have no role.

    Raises:
      DataError: the file is empty, or it is not clear how to read it.
      ValueError: the delimiter is not possible, or a column has two roles.
    """
    if delimiter is not None and (
        not 1 <= len(delimiter) <= 2 or set(delimiter) & set('\r\n"\0')
    ):
        raise ValueError(
            "delimiter must be one or two characters, without quotes and line ends, got "
            f"{delimiter!r}"
        )
    if indicator:
        chosen = dataclasses.replace(chosen, value=None)
    roles = chosen.roles(indicator=indicator)
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
    check_width(path, len(first), line)
    typed = None if header is False else typed_header(first)
    names, lists = first, frozenset()
    if typed is not None:
        header = True
        names = [name for name, _ in typed]
        lists = frozenset(
            n for n, (_, kind) in enumerate(typed) if kind.endswith("_seq")
        )
        chosen = _without_types(chosen, first, names)
    if header is None:
        header = any(isinstance(chosen.of(role), str) for role in roles)
        header = header or bool(further)
        header = header or _has_header(path, records)
    below = [cells for _, cells in records]
    if header:
        below = [cells for cells in below[1:] if cells != first]
        first_line = _end_of_first(lines, delimiter)
    columns, are_integers = [], []
    for at, name in enumerate(names):
        cells = [cells[at].strip() for cells in below if len(cells) == len(first)]
        if at in lists:
            cells = [each for cell in cells for each in cell.split()]
        sample = next(filter(None, cells), "")
        type_ = f"lists of {_type(cells)}" if at in lists else _type(cells)
        columns.append(
            SourceColumn(name.strip() if header else None, at, type_, sample)
        )
        are_integers.append(all(map(_INTEGER.fullmatch, filter(None, cells))))
    of_folders = {
        n: t for n, t in (constants or {}).items() if not header or n not in names
    }
    constant = [
        SourceColumn(name, len(names) + i, "text", text or "", of_folder=True)
        for i, (name, text) in enumerate(of_folders.items())
    ]
    if header:
        columns += constant
        at_further = find_beside(path, columns, further, line)
        items = [n for n in sorted(lists) if typed and typed[n][1] == "token_seq"]
        places = find_columns(
            path,
            columns,
            chosen,
            roles=roles,
            item_by_type=items,
            beside=at_further,
            line=line,
        )
        _check_lists(path, columns, places, lists, line)
    else:
        known = {role_of(c.name or ""): c.position for c in constant}
        by_name = {r: at for r, at in known.items() if r in roles and not chosen.of(r)}
        wanted = [role for role in roles if role not in by_name]
        places = _by_position(path, columns, chosen, wanted, delimiter, line)
        places |= {role: at for role, at in by_name.items() if role is not None}
        columns += constant
        at_further = find_beside(path, columns, further, line)
    unread = [
        c.name or f"column {c.position}"
        for c in columns
        if c.position not in (*places.values(), *at_further)
    ]
    found = {role: columns[at] for role, at in places.items()}
    # Names are read as integers only if all of them are plain integers, unlike `7.0` and `007`.
    for role in ("user", "item"):
        if places[role] >= len(first) or not are_integers[places[role]]:
            found[role] = dataclasses.replace(found[role], type="text")
    read = Columns(
        found["user"],
        found["item"],
        found.get("value"),
        found.get("time"),
        tuple(unread),
        beside=tuple(columns[at] for at in at_further),
    )
    cell = "" if read.time is None else read.time.sample
    problem = None
    if cell and chosen.time is BY_NAME and time_format is None:
        problem = time_problem(cell, None)
    if read.time is not None and problem is not None:
        read = read.without_times(read.time, problem)
    text = lines.text(line, first_line) if header else None
    return Layout(
        delimiter=delimiter,
        first_line=first_line,
        num_columns=len(first),
        header=text,
        lists=lists,
        columns=read,
    )


def typed_header(cells: Sequence[str]) -> list[tuple[str, str]] | None:
    """The name and type of each column of a header of RecBole, like `user_id:token`.

    The result is None if a cell does not have this form.
    """
    found = [_TYPED.fullmatch(cell.strip()) for cell in cells]
    if not all(found):
        return None
    return [(each[1], each[2]) for each in found if each]


def _without_types(
    chosen: Chosen, cells: Sequence[str], names: Sequence[str]
) -> Chosen:
    """Removes types from the column names of the caller: "user_id:token" becomes "user_id"."""
    of = dict(zip([cell.strip() for cell in cells], names, strict=True))
    given = {role: chosen.of(role) for role in SYNONYMS}
    given = {role: of.get(c, c) for role, c in given.items() if isinstance(c, str)}
    return dataclasses.replace(chosen, **given)


def _check_lists(
    path: Path,
    columns: Sequence[SourceColumn],
    places: Mapping[str, int],
    lists: frozenset[int],
    line: int,
) -> None:
    """Raises DataError if users are lists, or if not all of items and values are lists or none."""
    has_lists = places["item"] in lists
    for role, at in places.items():
        # If items are lists, a row may have a single time for all of them.
        wanted = {"user": False, "item": has_lists, "value": has_lists}.get(role)
        is_list = at in lists
        if is_list != (is_list and has_lists if wanted is None else wanted):
            what = "has lists" if is_list else "has no lists"
            unlike = "" if role == "user" else ", unlike the items"
            problem = f"the column of the {role} {what}{unlike}"
            unclear(path, columns, problem, f"name another: {role}=COLUMN", line)


def _by_position(
    path: Path,
    columns: Sequence[SourceColumn],
    chosen: Chosen,
    roles: Sequence[str],
    delimiter: str,
    line: int,
) -> dict[str, int]:
    """The position of each role's column in a file without a header.

    If the caller left exactly two columns open, they are user and item. The columns
    `user::item::rating::time` of MovieLens are recognized.
    """
    named = [role for role in roles if chosen.of(role) is not None]
    places = find_columns(path, columns, chosen, roles=named, line=line)
    types = [column.type for column in columns]
    if not named and delimiter == "::" and types in _MOVIELENS:
        return {role: at for at, role in enumerate(SYNONYMS) if role in roles}
    wanted = [r for r in ("user", "item") if r not in places and r in roles]
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
        remedy += ", and value=COLUMN or time=COLUMN if there are values or times"
        unclear(path, columns, problem, remedy, line)
    if wanted:
        places |= dict(zip(wanted, (column.position for column in left), strict=True))
    return places


def _type(cells: Sequence[str]) -> str:
    """The type of the cells of a column: "empty", "integers", "fractions", "dates" or "text"."""
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
    """Whether the first record is a header.

    It is a header if two of its cells are known names of columns, or if all its cells are
    text and one column has only numbers or dates below.

    Raises:
      DataError: exactly one cell is a known name, which may be chance.
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
            f"Name the columns, for example user={first[0]!r} and item={first[1]!r}, or "
            "write a header user,item",
            line=line,
        )
    return False


def _guess_delimiter(lines: Lines) -> str:
    """The delimiter with which all records have equal numbers of columns.

    Raises:
      DataError: several delimiters have this property.
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
    """The first records, each as `(line, cells)`; `line` is the number of its first line."""
    found: list[tuple[int, list[str]]] = []
    for line, _, cells in read_records(lines, delimiter):
        found.append((line, cells))
        if len(found) == _SAMPLE:
            return found
    # The sample may end inside a quoted field, so the last record may be incomplete.
    return found[:-1] if len(found) > 2 and has_quotes(delimiter) else found


def _end_of_first(lines: Lines, delimiter: str) -> int:
    """The number of the line that follows the first record."""
    return next(end for _, end, _ in read_records(lines, delimiter))
