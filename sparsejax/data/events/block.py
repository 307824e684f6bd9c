"""Checks cells, which decoders of all formats yield, and makes blocks of events of them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from sparsejax.data.files import arrow
from sparsejax.data.files.columns import Columns, about_times, about_values
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.files.spelling import (
    are_missing,
    as_integers_or_text,
    without_views,
)
from sparsejax.data.files.values import (
    are_no_times,
    find_time_problem,
    lengths,
    mixed_times,
    parse_formatted,
    parse_times,
    parse_values,
    plain_text,
    trim,
    value_problem,
)

# Problems of an event, in the order in which they are checked.
NO_USER, NO_ITEM = "events without a user", "events without an item"
NO_VALUE = "events whose value is null or not finite as float32"
NO_TIME = "events whose time is null or is not a time"


# Prefix of keys in `Cells.columns` that stand for columns without a role. The column's name
# follows.
_BESIDE = "beside/"


def beside(names: Iterable[str]) -> dict[str, str]:
    """The names of columns without a role, by their keys in `Cells.columns`."""
    return {f"{_BESIDE}{name}": name for name in names}


class Cells(NamedTuple):
    """Rows of a source, as a decoder yields them, before they are checked.

    Attributes:
      columns: `[rows]` cells of each column, by its role; otherwise by its name. A column may
        hold lists.
      error: function that makes the error for a row, from the row's number in `columns` and a
        message.
      path: name of the source in messages.
    """

    columns: dict[str, pa.Array]
    error: Callable[[int, str], DataError]
    path: Path


def row_error(path: Path, first: int) -> Callable[[int, str], DataError]:
    """Makes `Cells.error` for a table whose cells begin at the row number `first`."""
    return lambda row, message: DataError.at(path, f"row {first + row:,}: {message}")


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of a part of a source, checked.

    Attributes:
      rows: `[lines]` name of the row on each line.
      lengths: `[lines]` int number of entries on each line; None if each has one.
      features: `[entries]` names of features, line after line.
      values: `[entries]` float64, or None.
      times: `[entries]` int64, float64 or datetime64[us], or None.
      beside: `[entries]` cells of the columns without a role, by name; None if no such
        columns are read. They are not checked.
    """

    rows: pa.Array
    lengths: np.ndarray | None
    features: pa.Array
    values: np.ndarray | None
    times: np.ndarray | None = None
    beside: Cells | None = None

    def as_events(self) -> Block:
        """Converts the block to one entry on each line, with names as text."""
        rows = self.rows
        if self.lengths is not None:
            lines = np.repeat(np.arange(len(rows)), self.lengths)
            rows = rows.take(arrow.from_numbers(lines))
        text = pa.large_string()
        rows, features = rows.cast(text), self.features.cast(text)
        return Block(rows, None, features, self.values, self.times, self.beside)


@dataclasses.dataclass
class Wrong:
    """A counter of wrong events.

    Attributes:
      counts: number of wrong events, by the kind of fault.
      first: description of the first wrong event, for a message.
    """

    counts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    first: str | None = None

    def __str__(self) -> str:
        counts = [f"{count:,} {what}" for what, count in self.counts.items()]
        return f"{', '.join(counts)}; the first is {self.first}"


@dataclasses.dataclass
class _Faults:
    """The first fault in a block of rows.

    Attributes:
      row: first row with a fault, or None.
      problem: text of the fault, for a message.
      missing: role of the name that is missing in that row, or None.
    """

    entries: _Entries
    row: int | None = None
    problem: str = ""
    missing: str | None = None

    def look(
        self,
        wrong: np.ndarray,
        problem: str,
        *,
        by_row: bool = False,
        missing: str | None = None,
    ) -> None:
        """Records `problem` at the first true element of `wrong`, if it is before the known fault.

        `wrong` is `[entries]`, or `[rows]` if `by_row`.
        """
        if not wrong.any():
            return
        at = int(np.argmax(wrong))
        row = at if by_row else self.entries.row(at)
        if self.row is None or row < self.row:
            self.row, self.problem, self.missing = row, problem, missing


@dataclasses.dataclass
class Check:
    """The check of events in all formats, which is strict or counts faults.

    If it is strict, the first row with a fault raises an error. Otherwise wrong events are
    left out and counted in `wrong`.

    Attributes:
      columns: columns that were read, for messages; None for formats without columns.
      names: name of each role's column, for messages; None for lines of text.
      encoded: convert names to text in dictionaries. If False, they keep their type.
      wrong: counter of faults; None if the check is strict.
      skips: yield the events after a wrong one, too. Otherwise they are only counted.
      valued: whether entries have values. None before the first entry.
      kind: kind of the times, "" if entries have none. None before the first entry.
      time_format: format of times that are text, for `strptime`; None means ISO 8601.
    """

    columns: Columns | None = None
    names: Mapping[str, str] | None = None
    encoded: bool = True
    wrong: Wrong | None = None
    skips: bool = True
    valued: bool | None = None
    kind: str | None = None
    time_format: str | None = None

    def blocks(self, parts: Iterable[Cells]) -> Iterator[Block]:
        """Checks cells, some rows at a time, and yields them as blocks.

        Raises:
          DataError: a row is wrong; the message has its number or its line.
        """
        rest = iter(parts)
        for cells in rest:
            if self.wrong is not None:
                block = self._counted(cells, self.wrong)
                if self.skips or not self.wrong.counts:
                    yield block
                continue
            block, faults = self._strict(cells)
            if faults.row is not None:
                problem = faults.problem
                if faults.missing is not None:
                    problem += self._how_often(faults.missing, cells, rest)
                raise cells.error(faults.row, problem)
            if self.encoded:
                rows = encoded_names(block.rows, cells.path)
                features = encoded_names(block.features, cells.path)
                block = dataclasses.replace(block, rows=rows, features=features)
            yield block

    def _strict(self, cells: Cells) -> tuple[Block, _Faults]:
        """Makes a block from cells, and finds faults. With a fault, the block must not be used."""
        entries = _Entries.of(cells)
        faults = _Faults(entries)
        users = self._names("user", entries.user, faults)
        items = self._names("item", entries.item, faults)
        columns = {}
        for role in ("value", "time"):
            unlike = entries.unlike(role)
            problem = f"the numbers of {role}s and of items differ"
            faults.look(unlike, problem, by_row=True)
            columns[role] = None if unlike.any() else entries.column(role)
        values = times = None
        if (column := columns["value"]) is not None and len(column):
            values = self._values(column, faults)
        if (column := columns["time"]) is not None and len(column):
            times = self._times(column, faults)
        users = pa.nulls(entries.num_rows, pa.string()) if users is None else users
        assert items is not None
        beside = entries.beside(faults)
        return Block(users, entries.sizes, items, values, times, beside), faults

    def _names(
        self, role: str, names: pa.Array | None, faults: _Faults
    ) -> pa.Array | None:
        if names is None:
            return None
        by_row, is_text = role == "user", self.names is None
        problem = (_EMPTY if is_text else NO_NAME)[role]
        faults.look(are_missing(names), problem, by_row=by_row, missing=role)
        names, wrong, problem = as_integers_or_text(names)
        faults.look(wrong, f"column {self._name(role)!r} {problem}", by_row=by_row)
        return names

    def _values(self, column: pa.Array, faults: _Faults) -> np.ndarray | None:
        column, missing = _trimmed(column)
        if self.valued is None:
            self.valued = not bool(missing[0])
        mixed = missing == self.valued
        faults.look(mixed, mixed_values(self.valued))
        if not self.valued:
            return None
        if mixed.any():  # values before this one may have a fault, which comes first
            column = column[: int(np.argmax(mixed))]
        if not _is_text(column):
            values = column.cast(pa.float64(), safe=False)
            values = values.to_numpy(zero_copy_only=False)
            faults.look(~_are_finite(values), "a value is not finite as float32")
            return values
        values = parse_values(column)
        if values is None:
            about = "" if self.columns is None else f" {about_values(self.columns)}"
            for at, text in enumerate(column.to_pylist()):
                if problem := value_problem(text):
                    faults.look(np.arange(at + 1) == at, problem + about)
                    break
        return values

    def _times(self, column: pa.Array, faults: _Faults) -> np.ndarray | None:
        column, missing = _trimmed(column)
        kind = "" if self.kind is None and missing[0] else self.kind
        mixed = missing == (kind != "")
        faults.look(mixed, mixed_times(kind != ""))
        self.kind = kind
        if mixed.any():
            column = column[: int(np.argmax(mixed))]
        if kind == "" or not len(column):
            return None
        if self.time_format is not None and _is_text(column):
            times, is_time = parse_formatted(column, self.time_format)
            problem = f"does not have the format {self.time_format!r}"
            if not is_time.all():
                at = int(np.argmin(is_time))
                problem = f"time {column[at].as_py()!r} {problem}"
                faults.look(~is_time, problem)
            return times
        found = parse_times(column)
        if found is None or kind not in (None, found[1]):
            at, problem = find_time_problem(column, kind)
            if self.columns is not None:
                problem += f" {about_times(self.columns)}"
            faults.look(np.arange(len(column)) == at, problem)
            return None
        times, self.kind = found
        return times

    def _name(self, role: str) -> str | None:
        if self.names is not None:
            return self.names.get(role)
        column = None if self.columns is None else getattr(self.columns, role)
        return None if column is None else column.name

    def _how_often(self, role: str, cells: Cells, rest: Iterator[Cells]) -> str:
        """Text for an error: how many names are missing in `cells` and `rest`, and the remedy."""
        # In text files, the user edits whole lines, so lines without a user or an item are
        # counted. In tables, the user fills in one column, so only this column is counted.
        roles = ("user", "item") if self.names is None else (role,)

        def missing(cells: Cells) -> int:
            columns = (cells.columns.get(role) for role in roles)
            return sum(
                int(are_missing(flat(c)).sum()) for c in columns if c is not None
            )

        count = missing(cells)
        with contextlib.suppress(DataError, pa.ArrowException):
            count += sum(map(missing, rest))
        if self.names is None:
            remedy = "fill it in, or remove these lines first"
        else:
            name = self._name(role)
            remedy = f"fill in the column {name!r}, or remove these rows first"
        return f", {count:,} times in all: {remedy}"

    def _counted(self, cells: Cells, counts: Wrong) -> Block:
        """Makes a block with one event in each row. Drops wrong events, and counts them."""
        entries = _Entries.of(cells)
        users, items = entries.each(entries.user), entries.item
        assert users is not None
        items = without_views(items)
        keep = np.ones(len(items), bool)

        def leave_out(wrong: np.ndarray, what: str, column: pa.Array) -> None:
            wrong = wrong & keep
            if not wrong.any():
                return
            at = int(np.argmax(wrong))
            counts.counts[what] += int(wrong.sum())
            if counts.first is None:
                is_text = what == NO_TIME and column[at].is_valid
                if is_text and self.time_format is None:
                    cell = find_time_problem(column[at : at + 1], self.kind)[1]
                else:
                    cell = repr(column[at].as_py())
                row, path = entries.row(at), shown(cells.path)
                place = str(cells.error(row, "")).removeprefix(f"{path}: ")
                place = place.removesuffix(": ")
                counts.first = f"{place} of {path}, with {cell}"
            keep[wrong] = False

        leave_out(are_missing(users), NO_USER, users)
        leave_out(are_missing(items), NO_ITEM, items)
        columns = {}
        for role in ("value", "time"):
            if (unlike := entries.unlike(role)).any():
                row = int(np.argmax(unlike))
                item, name = self._name("item"), self._name(role)
                problem = f"the lists of {item!r} and {name!r} have different lengths"
                raise cells.error(row, problem)
            columns[role] = entries.column(role)
        values = times = None
        column = columns["value"]
        if column is not None and self._are_valued(column, keep, entries):
            values = arrow.filled(column.cast(pa.float64(), safe=False), np.nan)
            values = arrow.numbers(values)
            leave_out(~_are_finite(values), NO_VALUE, column)
        if (column := columns["time"]) is not None:
            times, is_time = self._some_times(column)
            leave_out(~is_time, NO_TIME, column)
        faults = _Faults(entries)
        beside = entries.beside(faults)
        if faults.row is not None:
            raise cells.error(faults.row, faults.problem)
        if not keep.all():
            chosen = pa.array(keep)
            users, items = users.filter(chosen), items.filter(chosen)
            values = None if values is None else values[keep]
            times = None if times is None else times[keep]
            beside = None if beside is None else _kept(beside, keep)
        names = []
        for role, each in (("user", users), ("item", items)):
            each, wrong, problem = as_integers_or_text(each)
            if wrong.any():
                problem = f"column {self._name(role)!r} {problem}"
                raise DataError.at(cells.path, problem)
            try:
                names.append(each.cast(pa.large_string()))
            except pa.ArrowInvalid as error:
                raise _not_text(cells.path, error) from error
        return Block(names[0], None, names[1], values, times, beside)

    def _are_valued(
        self, column: pa.Array, keep: np.ndarray, entries: _Entries
    ) -> bool:
        """Whether events have values; they have none if all values of the first batch are null."""
        given = keep & ~_are_null(column)
        if self.valued is None and keep.any():
            self.valued = bool(given.any())
        if self.valued is False and given.any():
            row = entries.row(int(np.argmax(given)))
            raise entries.cells.error(row, mixed_values(False))
        return bool(self.valued)

    def _some_times(self, column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """`[n]` times and `[n]` bool: whether a cell is a time. The time of other cells is 0."""
        if self.time_format is not None and _is_text(column):
            return parse_formatted(column, self.time_format)
        is_time = ~are_no_times(column)
        given = np.flatnonzero(is_time)
        found = self._parsed(column.take(arrow.from_numbers(given)))
        type_ = next((times.dtype for times in found if times is not None), np.int64)
        times = np.zeros(len(column), type_)
        start = 0
        for part in found:
            if part is None:  # this cell is not a time
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
        """Times of consecutive parts of a column; a single cell that is not a time gives None."""
        if not len(column):
            return []
        found = parse_times(column)
        if found is not None and self.kind in (None, found[1]):
            self.kind = found[1]
            return [found[0]]
        if len(column) == 1:
            return [None]
        middle = len(column) // 2
        # Bisection finds a few wrong times among many quickly.
        return self._parsed(column[:middle]) + self._parsed(column[middle:])


def _kept(cells: Cells, keep: np.ndarray) -> Cells:
    """Selects rows where `keep: [rows]` is true. Errors still name the original row numbers."""
    rows, chosen = np.flatnonzero(keep), pa.array(keep)
    columns = {name: column.filter(chosen) for name, column in cells.columns.items()}
    return Cells(columns, lambda at, text: cells.error(int(rows[at]), text), cells.path)


_EMPTY = {"user": "the user (row) is empty", "item": "the item (feature) is empty"}
# Messages for tables: unlike a text file, they may contain null.
NO_NAME = {
    "user": "the user (row) is empty or null",
    "item": "an item (feature) is empty or null",
}


@dataclasses.dataclass(frozen=True)
class _Entries:
    """The entries of rows: one entry for each row, or one for each element of a row's list.

    Attributes:
      cells: cells of the rows.
      user: `[rows]` names of users, or None.
      item: `[entries]` names of items.
      sizes: `[rows]` int64 number of entries; None if each row has one.
    """

    cells: Cells
    user: pa.Array | None
    item: pa.Array
    sizes: np.ndarray | None

    @classmethod
    def of(cls, cells: Cells) -> _Entries:
        items = cells.columns["item"]
        sizes = list_lengths(items) if is_list(items.type) else None
        user = cells.columns.get("user")
        user = None if user is None else without_views(user)
        return cls(cells, user, flat(items), sizes)

    @property
    def num_rows(self) -> int:
        return len(self.item) if self.sizes is None else len(self.sizes)

    def row(self, entry: int) -> int:
        """The number of the row that contains an entry."""
        if self.sizes is None:
            return entry
        return int(np.searchsorted(np.cumsum(self.sizes), entry, side="right"))

    def each(self, column: pa.Array | None) -> pa.Array | None:
        """Repeats each cell of a column for all entries of its row: `[rows]` to `[entries]`."""
        if self.sizes is None or column is None:
            return column
        rows = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return column.take(arrow.from_numbers(rows))

    def unlike(self, role: str) -> np.ndarray:
        """`[rows]` bool: whether a row's list for `role` has another length than its items."""
        column = self.cells.columns.get(role)
        if column is None or self.sizes is None or not is_list(column.type):
            return np.zeros(self.num_rows, bool)
        return list_lengths(column) != self.sizes

    def beside(self, faults: _Faults) -> Cells | None:
        """Columns without a role, each with a cell for each entry; None if there are none.

        In a row with a list of items, a cell that is no list counts for all items.
        """
        columns = {}
        for key, column in self.cells.columns.items():
            if not key.startswith(_BESIDE):
                continue
            name = key.removeprefix(_BESIDE)
            if self.sizes is not None and is_list(column.type):
                problem = f"the numbers of {name!r} and of items differ"
                faults.look(self.unlike(key), problem, by_row=True)
                column = column.flatten()
            else:
                column = self.each(column)
            columns[name] = column

        def error(entry: int, message: str) -> DataError:
            return self.cells.error(self.row(entry), message)

        return Cells(columns, error, self.cells.path) if columns else None

    def column(self, role: str) -> pa.Array | None:
        """`[entries]` values or times. One cell may count for all entries of a row."""
        if (column := self.cells.columns.get(role)) is None:
            return None
        if is_list(column.type):
            column = column.flatten()
        else:
            column = self.each(column)
            assert column is not None
        return column if _is_text(column) else plain_text(column)


def _is_text(column: pa.Array) -> bool:
    return pt.is_string(column.type) or pt.is_large_string(column.type)


def _trimmed(column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Strips white space from text; returns it with `[n]` bool: whether a cell is missing."""
    if not _is_text(column):
        return column, _are_null(column)
    column = trim(arrow.filled(column, ""))
    return column, lengths(column) == 0


def _are_null(column: pa.Array) -> np.ndarray:
    return arrow.numbers(column.is_null())


def _are_finite(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32))


def mixed_values(valued: bool) -> str:
    """The error text for an entry with a value after entries without, or the reverse."""
    entry, earlier = ("no value", "one") if valued else ("a value", "none")
    return (
        f"an entry has {entry} but earlier entries have {earlier}; give all entries a "
        "value or none, or ignore the values with indicator=True"
    )


def encoded_names(names: pa.Array, path: Path) -> pa.DictionaryArray:
    """Encodes names as a dictionary of distinct texts, in order of first appearance."""
    if pt.is_dictionary(names.type):  # it may contain unused names
        codes = names.indices.dictionary_encode()
        distinct = without_views(names.dictionary).take(codes.dictionary)
    else:
        codes = without_views(names).dictionary_encode()
        distinct = codes.dictionary
    try:
        return pa.DictionaryArray.from_arrays(
            codes.indices, distinct.cast(pa.large_string())
        )
    except pa.ArrowInvalid as error:
        raise _not_text(path, error) from error


def _not_text(path: Path, error: Exception) -> DataError:
    return DataError.at(path, f"a name is not valid UTF-8: {error}")


def flat(column: pa.Array) -> pa.Array:
    """The entries of a column: its cells, or the elements of its lists."""
    return column.flatten() if is_list(column.type) else column


def list_lengths(lists: pa.Array) -> np.ndarray:
    """`[rows]` length of each list; a null counts as empty."""
    lengths = pc.call_function("list_value_length", [lists])
    return arrow.numbers(arrow.filled(lengths, 0)).astype(np.int64)


def is_list(type_: pa.DataType) -> bool:
    kinds = (pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view)
    return any(kind(type_) for kind in (*kinds, pt.is_large_list_view))


def lists(entries: pa.Array, sizes: np.ndarray) -> pa.LargeListArray:
    """Makes `[rows]` lists from their elements and `sizes: [rows]`."""
    ends = np.append(0, np.cumsum(sizes, dtype=np.int64))
    return pa.LargeListArray.from_arrays(arrow.from_numbers(ends), entries)
