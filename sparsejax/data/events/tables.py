"""Reads typed tables, from Parquet or in memory: with pairs, or lists of items, in each row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from sparsejax.data.events.block import (
    NO_NAME,
    Block,
    Cells,
    Check,
    beside,
    flat,
    is_list,
    row_error,
)
from sparsejax.data.events.json_lines import is_within
from sparsejax.data.files.columns import (
    BY_NAME,
    SYNONYMS,
    Chosen,
    Columns,
    SourceColumn,
    find_beside,
    find_columns,
)
from sparsejax.data.files.hive import is_of_folder
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.files.parquet import ParquetPath
from sparsejax.data.files.spelling import (
    are_missing,
    as_integers_or_text,
    is_name,
    is_number,
    is_text,
)
from sparsejax.data.files.values import plain_text, time_problem

# Number of rows in which the first time is searched.
_PROBED = 100

# Rows that are parsed at a time.
BATCH_ROWS = 2**18


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """The names of the columns to read, by role.

    Attributes:
      user: name of the column with the rows' names; None if it is not needed.
      item: name of the column with the items.
      value: name of the column with the values, or None.
      has_lists: whether each row of the table is a row of the data set, with lists in its
        cells.
      time: name of the column with the times, or None.
      source: names and types of these columns, for messages. It is ignored when two layouts
        are compared.
      path: path of the file in which the columns were found.
      optional: name of the column, or None, for each of the roles value and time in which a
        column was searched.
      further: names of the columns to read that have no role.
    """

    user: str | None
    item: str
    value: str | None
    has_lists: bool
    time: str | None = None
    source: Columns | None = dataclasses.field(default=None, compare=False)
    # Excluded from `repr`, because fingerprints of data contain the `repr` of a layout.
    path: Path = dataclasses.field(default="", compare=False, repr=False)
    optional: Mapping[str, str | None] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    further: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @property
    def roles(self) -> dict[str, str]:
        """The names of the columns to read, by their keys in `Cells.columns`."""
        names = {role: getattr(self, role) for role in SYNONYMS}
        names = {role: name for role, name in names.items() if name is not None}
        return names | beside(self.further)

    @property
    def columns(self) -> list[str]:
        """The names of all columns to read."""
        return list(self.roles.values())


def find_table_layout(
    path: Path,
    schema: pa.Schema,
    chosen: Chosen,
    *,
    indicator: bool = False,
    with_user: bool = True,
    with_time: bool = True,
    further: Sequence[str] = (),
) -> TableLayout:
    """Finds the columns of a table from their names and types; see `from_arrow`.

    Args:
      path: name of the file in messages.
      schema: names and types of the table's columns.
      chosen: columns that the caller chose for roles.
      indicator: ignore values.
      with_user: read the user column of a table of lists. If False, it may be missing.
      with_time: read times.
      further: names of columns to read that have no role.

    Raises:
      DataError: a column is missing or not clear, or its type is not possible for its role.
      ValueError: a column has two roles.
    """
    # pandas writes an index without a name as a column with this prefix.
    known = [f for f in schema if not f.name.startswith("__index_level_")]
    columns = [
        SourceColumn(
            f.name, i, str(f.type), of_folder=is_of_folder(f), within=is_within(f)
        )
        for i, f in enumerate(known)
    ]
    at_further = find_beside(path, columns, further)
    lists = [
        i
        for i, field in enumerate(known)
        if i not in at_further
        and is_list(field.type)
        and is_name(inner_type(field.type))
        and not pt.is_floating(inner_type(field.type))  # embeddings are lists of floats
    ]
    roles = ["item"] if indicator else ["item", "value"]
    how = {"item_by_type": lists, "beside": at_further}
    at = find_columns(path, columns, chosen, roles=["item"], **how)
    has_lists = is_list(known[at["item"]].type)
    with_user = with_user or not has_lists
    if with_user or chosen.user is not None:
        roles = ["user", *roles]
    if with_time and chosen.time is not None:
        roles.append("time")
    at = find_columns(path, columns, chosen, roles=roles, **how)
    read = {*at.values(), *at_further}
    unread = [c.name or "" for c in columns if c.position not in read]
    not_times = None
    is_found = chosen.time is BY_NAME and "time" in at
    if is_found and not _is_time(inner_type(known[at["time"]].type)):
        not_times = columns[at.pop("time")]
    if not with_user:
        at.pop("user", None)
    for role, place in at.items():
        _check_type(path, columns[place], known[place].type, role, has_lists)
    found = {role: columns[place] for role, place in at.items()}
    names = {role: known[place].name for role, place in at.items()}
    for name in names.values():
        if schema.names.count(name) > 1:
            raise DataError.at(path, f"there are several columns {name!r}")
    source = Columns(
        found.get("user"),
        found["item"],
        found.get("value"),
        found.get("time"),
        tuple(unread),
        beside=tuple(columns[place] for place in at_further),
    )
    if not_times is not None:
        source = source.without_times(not_times, f"{not_times.type} is not a time")
    return TableLayout(
        names.get("user"),
        names["item"],
        names.get("value"),
        has_lists,
        names.get("time"),
        source,
        path,
        {role: names.get(role) for role in ("value", "time") if role in roles},
        tuple(further),
    )


def settle_time(
    layout: TableLayout, chosen: Chosen, batches: Iterable[pa.RecordBatch]
) -> tuple[TableLayout, Iterator[pa.RecordBatch]]:
    """Drops the column of times from a layout if its first cell is text but no time.

    A column of times that the caller chose is kept.

    Args:
      layout: layout that `find_table_layout` found.
      chosen: columns that the caller chose for roles.
      batches: batches of the table. Those up to the first one with rows are read here.

    Returns:
      The layout, and an iterator over all batches.
    """
    rest = iter(batches)
    if layout.time is None or chosen.time is not BY_NAME:
        return layout, rest
    seen = []
    for batch in rest:
        seen.append(batch)
        if len(batch):
            cells = plain_text(flat(batch.column(layout.time).slice(0, _PROBED)))
            if pt.is_large_string(cells.type) or pt.is_large_binary(cells.type):
                given = (cell for cell in cells.to_pylist() if cell and cell.strip())
                cell = next(given, None)
                if cell is not None and (problem := time_problem(cell, None)):
                    source = layout.source
                    assert source is not None and source.time is not None
                    source = source.without_times(source.time, problem)
                    layout = dataclasses.replace(layout, time=None, source=source)
            break
    return layout, itertools.chain(seen, rest)


def _check_type(
    path: Path, column: SourceColumn, type_: pa.DataType, role: str, has_lists: bool
) -> None:
    """Raises DataError if a column's type does not suit its role."""
    suits, what = {
        "user": (is_name, "text or integers"),
        "item": (is_name, "text or integers"),
        "value": (_is_value, "numbers"),
        "time": (_is_time, "numbers, dates or text of ISO 8601"),
    }[role]
    # If items are lists, a row may have a single time for all of them.
    in_list = has_lists and role != "user" and (role != "time" or is_list(type_))
    if in_list != is_list(type_) or not suits(inner_type(type_)):
        wanted = f"lists of {what}" if in_list else what
        others = ", or indicator=True" if role == "value" else ""
        raise DataError.at(
            path,
            f"column {column.name!r} is read as the {role}, which is {wanted}, but it is "
            f"{type_}; convert it, or choose another with {role}=COLUMN{others}",
        )


def check_layout(place: ParquetPath, file: pq.ParquetFile, layout: TableLayout) -> None:
    """Raises DataError unless a file has the same columns as the first file.

    Args:
      place: location of the file.
      file: the opened file.
      layout: layout of the first file.
    """
    path, schema = place.path, place.columns(file)
    # If the file has no column of items, `find_table_layout` below raises a better error.
    optional = layout.optional.items() if layout.item in schema.names else ()
    for role, name in optional:
        has_other = name is not None
        if has_other and name not in schema.names:
            _differ(role, name, layout.path, path)
        elif not has_other and (name := _named_for(role, path, schema, layout)):
            _differ(role, name, path, layout.path)
    again = find_table_layout(
        path,
        schema,
        Chosen(layout.user, layout.item, layout.value, layout.time),
        indicator=layout.value is None,
        with_user=layout.user is not None,
        with_time=layout.time is not None,
        further=layout.further,
    )
    if again.has_lists != layout.has_lists and file.metadata.num_rows:
        has = "lists" if again.has_lists else "no lists"
        raise DataError.at(path, f"has {has}, unlike the first file")


def _named_for(
    role: str, path: Path, schema: pa.Schema, layout: TableLayout
) -> str | None:
    """The name of a column of the file that is a known name for the role, or None."""
    found = find_table_layout(
        path,
        schema,
        Chosen(layout.user, layout.item, None, BY_NAME if role == "time" else None),
        indicator=role != "value",
        with_user=layout.user is not None,
        further=layout.further,
    )
    return found.optional[role]


def _differ(role: str, name: str, having: Path, lacking: Path) -> NoReturn:
    """Raises an error about a column that only one of two files has."""
    ignore = {
        "value": "ignore values: indicator=True",
        "time": "leave times out: time=None",
    }
    raise DataError.at(
        lacking,
        f"has no column of the {role}, but {shown(having)} has {name!r}; give all files the "
        f"same columns, or {ignore[role]}",
    )


def table_blocks(
    tables: Iterable[tuple[Path, Iterable[pa.RecordBatch]]],
    layout: TableLayout,
    *,
    first: int = 0,
    valued: bool | None = None,
    encoded: bool = True,
) -> Iterator[Block]:
    """Parses and checks tables with equal layouts, one after the other.

    Args:
      tables: batches of each table, with the table's name in messages.
      layout: columns to read.
      first: number of the first row of each table, for messages.
      valued: True if all entries must have a value. None if either all or none must.
      encoded: convert features to text in dictionaries. If False, they keep their type.

    Raises:
      DataError: a row is wrong; the message has the number of the first one.
    """
    check = Check(layout.source, layout.roles, encoded=encoded, valued=valued)
    return check.blocks(table_cells(tables, layout.roles, first=first))


def table_cells(
    tables: Iterable[tuple[Path, Iterable[pa.RecordBatch]]],
    names: Mapping[str, str],
    *,
    first: int = 0,
) -> Iterator[Cells]:
    """Yields the cells of tables, at most `BATCH_ROWS` rows at a time.

    Args:
      tables: batches of each table, with the table's name in messages.
      names: name of the column for each key of the result.
      first: number of the first row of each table, for messages.
    """
    for path, batches in tables:
        row = first
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.slice(start, BATCH_ROWS)
                columns = {key: part.column(name) for key, name in names.items()}
                yield Cells(columns, row_error(path, row), path)
                row += len(part)


def plain_names(column: pa.ChunkedArray, path: Path) -> pa.Array:
    """Converts a column of names to one array of integers or bytes, which can be ordered."""
    if pt.is_decimal(column.type):  # as text, decimals would have another order
        return column.combine_chunks()
    chunks = []
    for chunk in column.chunks:
        names, wrong, problem = as_integers_or_text(chunk)
        if wrong.any():
            raise DataError.at(path, f"a column of names {problem}")
        chunks.append(names)
    type_ = chunks[0].type if chunks else column.type
    if pt.is_dictionary(type_):
        type_ = type_.value_type
    if not pt.is_integer(type_):
        type_ = pa.large_binary()
    elif type_ != pa.uint64():
        type_ = pa.int64()
    return pa.chunked_array([c.cast(type_) for c in chunks], type_).combine_chunks()


def check_users(users: pa.Array, path: Path, first: int) -> None:
    """Raises DataError if a row has no user; `first` is the number of the first row."""
    missing = are_missing(users)
    if missing.any():
        row = first + int(np.argmax(missing))
        raise DataError.at(path, f"row {row:,}: {NO_NAME['user']}")


def inner_type(type_: pa.DataType) -> pa.DataType:
    """The type of an entry: the type of a list's values, or of the column."""
    return type_.value_type if is_list(type_) else type_


def _is_value(type_: pa.DataType) -> bool:
    return is_number(type_.value_type if pt.is_dictionary(type_) else type_)


def _is_time(type_: pa.DataType) -> bool:
    if pt.is_dictionary(type_):
        type_ = type_.value_type
    is_date = pt.is_timestamp(type_) or pt.is_date(type_)
    return is_number(type_) or is_text(type_) or is_date
