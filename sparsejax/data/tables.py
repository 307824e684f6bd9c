"""Tables with types, as in Parquet files and in memory: pairs, or a list on each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from sparsejax.data.assemble import Block
from sparsejax.data.columns import Column, find_columns
from sparsejax.data.files import DataError, Path
from sparsejax.data.lines import mixed_values

# Rows that are taken at a time: see `files.BLOCK_BYTES`.
BATCH_ROWS = 2**18

_NO_USER = "the user (row) is empty or null"


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """The names of the columns that are read; None where there is none, or no need."""

    user: str | None
    item: str
    value: str | None
    has_lists: bool

    @property
    def columns(self) -> list[str]:
        """All of them."""
        names = (self.user, self.item, self.value)
        return [name for name in names if name is not None]


def find_table_layout(
    path: Path,
    schema: pa.Schema,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    indicator: bool = False,
    with_user: bool = True,
) -> TableLayout:
    """Settles what was left open, from names and types; see `readers.from_arrow`.

    Without `with_user` a table of lists need not have a user column, and it is not read.

    Raises:
      DataError: a column is missing, or has a type that it cannot have.
      ValueError: a column is taken twice.
    """
    # What pandas stores of an index that nobody named.
    known = [f for f in schema if not f.name.startswith("__index_level_")]
    names = [field.name for field in known]
    lists = [at for at, field in enumerate(known) if _is_list(field.type)]
    flat = [at for at in range(len(known)) if at not in lists]
    if item is None:
        has_lists = bool(lists)
    else:
        has_lists = item in lists or item in [names[at] for at in lists]
    entries = lists if has_lists else flat
    with_user = with_user or not has_lists
    user_at, item_at, value_at = find_columns(
        path,
        len(known),
        names,
        user=user,
        item=item,
        value=value,
        users=[at for at in flat if _is_name(known[at].type)],
        items=[at for at in entries if _is_name(_inner(known[at].type))],
        values=[at for at in entries if _is_number(_inner(known[at].type))],
        with_user=with_user,
    )
    if indicator:
        value_at = None
    if not with_user:
        user_at = None
    for role, at, in_list, suits, what in (
        ("user", user_at, False, _is_name, "text or integers"),
        ("item", item_at, has_lists, _is_name, "text or integers"),
        ("value", value_at, has_lists, _is_number, "numbers"),
    ):
        if at is None:
            continue
        found = known[at].type
        if names.count(names[at]) > 1:
            raise DataError.at(path, f"there are several columns {names[at]!r}")
        if in_list != _is_list(found) or not suits(_inner(found)):
            wanted = f"lists of {what}" if in_list else what
            raise DataError.at(
                path,
                f"column {names[at]!r} is taken for the {role}, which is {wanted}, but "
                f"it is {found}; convert it, or choose another with {role}=...",
            )
    user_name, value_name = (
        None if at is None else names[at] for at in (user_at, value_at)
    )
    return TableLayout(user_name, names[item_at], value_name, has_lists)


def check_layout(path: Path, schema: pa.Schema, layout: TableLayout) -> None:
    """Raises DataError unless a file has the columns that the first one has."""
    again = find_table_layout(
        path,
        schema,
        user=layout.user,
        item=layout.item,
        value=layout.value,
        indicator=layout.value is None,
        with_user=layout.user is not None,
    )
    if again.has_lists != layout.has_lists:
        raise DataError.at(path, "has lists, or has none, unlike other files")


def table_blocks(
    tables: Iterable[tuple[Path, Iterable[pa.RecordBatch]]],
    layout: TableLayout,
    *,
    first: int = 0,
    valued: bool | None = None,
    encoded: bool = True,
) -> Iterator[Block]:
    """Reads tables of one layout, one after the other; each has a name for messages.

    Rows are counted from `first` there. With `valued` all entries must have a value,
    else all or none. If not `encoded`, features have the type that they have there.

    Raises:
      DataError: names the first row that is wrong, counted from 0 in its table.
    """
    for path, batches in tables:
        row = first
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.slice(start, BATCH_ROWS)
                block, valued = _block(part, layout, valued, path, row, encoded)
                yield block
                row += len(part)


def _block(
    batch: pa.RecordBatch,
    layout: TableLayout,
    valued: bool | None,
    path: Path,
    first: int,
    encoded: bool,
) -> tuple[Block, bool | None]:
    """Some rows; `valued` says whether earlier entries had values, if any."""
    entries = {
        name: batch.column(name) for name in layout.columns if name != layout.user
    }
    lengths, num_values = None, None
    if layout.has_lists:
        lengths = _lengths(entries[layout.item])
        if layout.value is not None:
            num_values = _lengths(entries[layout.value])
        entries = {name: column.flatten() for name, column in entries.items()}

    def check(wrong: np.ndarray, problem: str) -> None:
        """Raises for the first row that is wrong."""
        if wrong.any():
            row = first + int(np.argmax(wrong))
            raise DataError.at(path, f"row {row:,}: {problem}")

    def check_entries(wrong: np.ndarray, problem: str) -> None:
        """Raises for the row of the first entry that is wrong."""
        if lengths is not None and wrong.any():
            entry = int(np.argmax(wrong))
            row = np.searchsorted(np.cumsum(lengths), entry, side="right")
            wrong = np.arange(len(lengths)) == row
        check(wrong, problem)

    if num_values is not None:
        check(num_values != lengths, "it has not as many values as items")
    users, items = pa.nulls(len(batch), pa.string()), entries[layout.item]
    if layout.user is not None:
        users = batch.column(layout.user)
        check(_is_missing(users), _NO_USER)
    check_entries(_is_missing(items), "an item (feature) is empty or null")
    values = None
    if layout.value is not None and len(items):
        column = entries[layout.value]
        is_missing = column.is_null().to_numpy(zero_copy_only=False)
        valued = not is_missing[0] if valued is None else valued
        check_entries(is_missing == valued, mixed_values(valued))
        if valued:
            values = column.cast(pa.float64(), safe=False).to_numpy()
            with np.errstate(over="ignore"):
                finite = np.isfinite(values.astype(np.float32))
            check_entries(~finite, "a value is not finite as float32")
    if encoded:
        items = encoded_names(items, path)
    return Block(encoded_names(users, path), lengths, items, values), valued


def encoded_names(names: pa.Array, path: Path) -> pa.DictionaryArray:
    """The distinct names in order of appearance, as text."""
    if pt.is_dictionary(names.type):  # which may hold names that do not appear
        codes = names.indices.dictionary_encode()
        distinct = _plain(names.dictionary).take(codes.dictionary)
    else:
        codes = _plain(names).dictionary_encode()
        distinct = codes.dictionary
    try:
        return pa.DictionaryArray.from_arrays(
            codes.indices, distinct.cast(pa.large_string())
        )
    except pa.ArrowInvalid as error:
        raise DataError.at(path, f"a name is not valid UTF-8: {error}") from error


def plain_names(column: pa.ChunkedArray) -> pa.Array:
    """A column of names as one array of integers or bytes, which have an order."""
    type_ = column.type
    if pt.is_dictionary(type_):
        type_ = type_.value_type
    if not pt.is_integer(type_):
        type_ = pa.large_binary()
    elif type_ != pa.uint64():
        type_ = pa.int64()
    return column.cast(type_).combine_chunks()


def check_users(users: pa.Array, path: Path, first: int) -> None:
    """Raises DataError if a row, of which `first` is the number of the first, has none."""
    missing = _is_missing(users)
    if missing.any():
        row = first + int(np.argmax(missing))
        raise DataError.at(path, f"row {row:,}: {_NO_USER}")


def _is_missing(names: pa.Array) -> np.ndarray:
    """`[n]` bool: where a name is empty or null."""
    missing = names.is_null(nan_is_null=False).to_numpy(zero_copy_only=False)
    if pt.is_dictionary(names.type):
        at = names.indices.fill_null(0)
        empty = _is_empty(names.dictionary)
        return missing | (empty[at.to_numpy()] if empty.any() else False)
    return missing | _is_empty(names)


def _is_empty(names: pa.Array) -> np.ndarray:
    if pt.is_integer(names.type):
        return np.zeros(len(names), bool)
    lengths = pc.call_function("binary_length", [_plain(names)])
    return lengths.fill_null(0).to_numpy() == 0


def _plain(names: pa.Array) -> pa.Array:
    """The same in a type that all of Arrow's functions take."""
    is_view = pt.is_string_view(names.type) or pt.is_binary_view(names.type)
    return names.cast(pa.large_binary()) if is_view else names


def _lengths(lists: pa.Array) -> np.ndarray:
    """`[rows]` how long each list is; null is empty."""
    lengths = pc.call_function("list_value_length", [lists])
    return lengths.fill_null(0).to_numpy().astype(np.int64)


def _is_list(type_: pa.DataType) -> bool:
    kinds = (pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view)
    return any(kind(type_) for kind in (*kinds, pt.is_large_list_view))


def _inner(type_: pa.DataType) -> pa.DataType:
    """The type of an entry: that of a list's values."""
    return type_.value_type if _is_list(type_) else type_


def _is_name(type_: pa.DataType) -> bool:
    if pt.is_dictionary(type_):
        type_ = type_.value_type
    kinds = (pt.is_integer, pt.is_string, pt.is_large_string, pt.is_string_view)
    binary = (pt.is_binary, pt.is_large_binary, pt.is_binary_view)
    return any(kind(type_) for kind in (*kinds, *binary))


def _is_number(type_: pa.DataType) -> bool:
    return any(kind(type_) for kind in (pt.is_integer, pt.is_floating, pt.is_decimal))
