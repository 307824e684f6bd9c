"""Reads features of items from tables and JSON."""

from __future__ import annotations

import collections
import csv
import io
import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.types as pt
import scipy.sparse

from sparsejax.callers import warn_caller
from sparsejax.data.events import json_lines
from sparsejax.data.events.block import is_list
from sparsejax.data.events.pieces import TABLE, Piece, find_pieces, is_path
from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.files import arrow, parquet, stored
from sparsejax.data.files.columns import role_of
from sparsejax.data.files.names import as_names, numbered, quoted
from sparsejax.data.files.opening import (
    DataError,
    Path,
    half_pair,
    head,
    open_data,
    shown,
)
from sparsejax.data.files.spelling import are_missing, is_name, is_text
from sparsejax.data.sets.item_features import ItemFeatures

_WORD = re.compile(r"\w+")
# A text column contains titles, not categories, if more than this share of its texts occur once.
# Columns with fewer texts are not checked: three new products may have three categories.
ONCE, FEW_TEXTS = 0.8, 20
# Some exports write a type's largest number in place of a missing number.
_LARGEST = [float(np.finfo(kind).max) for kind in (np.float32, np.float64)]
# The squares of larger float64 numbers overflow, and the squares of their inverses underflow.
_SQUARED = 1e150
# Numbers whose distance is less than this many deviations may be equal in float32.
_ALIKE = 1e-6
_EMPTY = "without any value"
_LEAVE_EMPTY = "leave the cell empty where a number is missing"
# Name of the column made from the lists of a JSON object like {"tea": [4, 7]}.
_ATTRIBUTES = "attributes"


def read_item_features(
    source: Any,
    *,
    item: str | None = None,
    columns: Collection[str] | None = None,
    tags: Collection[str] = (),
    words: Collection[str] = (),
    separator: str = "|",
) -> ItemFeatures:
    """Reads features of items from CSV, Parquet, JSON, JSON Lines, or a table in memory.

    >>> read_item_features([{"item": "tea", "price": 4.5}, {"item": "rice", "price": 2}])
    ItemFeatures(2 items, 1 tags)

    The type of a column decides its use:

    ==============================  ====================================================
    text                            a tag: `kind=drink`; with "|" in it, several
    lists of text or of integers    several tags
    true or false                   a tag, if it is true
    numbers                         a number, in units of its standard deviation
    lists of floats                 a vector; several columns of vectors are joined
    text that is named in `words`   a tag for each different word, in lower case
    titles, dates, empty columns    nothing: they are left out
    ==============================  ====================================================

    A column of text has titles if more than four in five texts occur once, among 20 or more.
    Such a tag adds nothing to the item's own embedding. `ItemFeatures.columns` has the use of
    each column, or the reason why it was left out.

    Folders named like `kind=drink`, as by Hive, give a column of text.

    A cell may be empty, and NaN counts as empty. A JSON file may also be one object with a
    list of tags for each item: `{"tea": [4, 7], "rice": [4]}`. In CSV the columns of items,
    `tags` and `words` are read as text, so that "007" and "NA" are names.

    Args:
      source: a path, or several; a data frame or another table of Arrow; or dicts.
      item: name of the column with the items; by default it is found by known names.
      columns: names of the columns to read; by default all.
      tags: names of columns to use as tags whatever their type, such as the number of a
        brand, or titles.
      words: names of columns of text whose words become tags.
      separator: text between several tags in a cell.

    Raises:
      DataError: a file or a table cannot be read, there is no column of items, or no column
        can be used. Two rows of an item differ; rows that are equal are left out, with a
        warning. A number is infinite, is the largest number of its type, or is so large that
        all other numbers are equal in comparison. Vectors differ in their lengths. The
        message names column and item.
      ValueError: a column that is named does not exist, or has a type that cannot be used;
        `columns` names a column of titles that neither `tags` nor `words` names; or an option
        is given for a file that `ItemFeatures.save` wrote.
    """
    if is_path(source) and is_parquet(source):
        with parquet.parquet_files(source)[0].open() as file:
            are_saved = stored.form_of(file.schema_arrow) is stored.ITEM_FEATURES
        if are_saved:
            for option, is_given in (
                ("item", item is not None),
                ("columns", columns is not None),
                ("tags", tags),
                ("words", words),
                ("separator", separator != "|"),
            ):
                if is_given:
                    raise ValueError(
                        f"{source}: {option}=... has no effect on what ItemFeatures.save "
                        "wrote; leave it out, or read the file that the features are from"
                    )
            return ItemFeatures.load(source)
    path, table = whole_table(source, item, (*tags, *words))
    if not len(table):
        raise DataError.at(path, "has no rows, so there is no item")
    item = _item_column(path, table, item)
    others = [n for n in table.column_names if n != item]
    others = [n for n in others if not n.startswith("__index_level_")]
    for what, given in (("columns", columns or ()), ("tags", tags), ("words", words)):
        if unknown := [name for name in given if name not in others]:
            raise ValueError(
                f"{what} has {quoted(unknown)}, but the columns are {quoted(others, count=20)}"
            )
    if columns is not None:
        others = [n for n in others if n in columns]
        for what, given in (("tags", tags), ("words", words)):
            if unread := [name for name in given if name not in others]:
                raise ValueError(
                    f"{what} has {quoted(unread)}, but only {quoted(others)} is read; name "
                    "it in columns, too"
                )
    names = one_array(table.column(item))
    if (missing := are_missing(names)).any():
        raise DataError.at(
            path,
            f"{item!r} of row {int(np.argmax(missing)):,} is empty; name each item",
        )
    try:
        items = as_names(names)
    except ValueError as error:
        raise DataError.at(path, f"column {item!r}: {error}") from error
    table, items = _once(path, table, items, others)
    read = _Read(path, items, separator)
    parts: list[_Tags] = []
    vectors: list[np.ndarray] = []
    became: dict[str, str] = {}
    chosen = {*(columns or ()), *tags, *words}
    for name in others:
        try:
            found = read.column(name, one_array(table.column(name)), tags, words)
        except DataError:
            raise
        except (ValueError, pa.ArrowException) as error:
            raise read.wrong(name, f"cannot be read: {error}") from error
        except _NoContentError as nothing:
            if nothing.is_fault and name in chosen:
                raise read.wrong(name, f"is {nothing}") from None
            became[name] = f"left out, {nothing}"
            continue
        became[name] = found.account
        if isinstance(found, _Vectors):
            vectors.append(found.vectors)
        else:
            parts.append(found)
    if not parts and not vectors:
        if not others:
            raise DataError.at(path, f"has no column but {item!r}; items need content")
        why = "; ".join(f"column {name!r} is {text}" for name, text in became.items())
        raise DataError.at(path, f"has no content of items: {why}")
    try:
        return ItemFeatures(
            item_names=items,
            tag_names=as_names([name for part in parts for name in part.names]),
            tags=_joined([part.matrix for part in parts], len(items)),
            vectors=np.concatenate(vectors, axis=1) if vectors else None,
            numbers={k: v for part in parts for k, v in part.numbers.items()},
            columns=became,
        )
    except ValueError as error:
        raise DataError.at(path, str(error)) from error


def whole_table(
    source: Any, item: str | None, texts: Collection[str]
) -> tuple[Path, pa.Table]:
    """Reads all rows and columns of a source of `read_item_features`; returns name and table.

    Args:
      source: files or a table.
      item: name of the column of items, or None.
      texts: names of further columns that are read as text from CSV.

    Raises:
      DataError: the source cannot be read, or two columns have the same name.
    """
    pieces = find_pieces(source)
    path = pieces[0].path
    tables = [_with_folders(piece, _table(piece, item, texts)) for piece in pieces]
    for piece, each in zip(pieces, tables, strict=True):
        if twice := [
            n for n, k in collections.Counter(each.column_names).items() if k > 1
        ]:
            raise DataError.at(
                piece.path,
                f"has several columns {quoted(twice)}; give each its own name",
            )
    try:
        return path, pa.concat_tables(
            tables, promote_options="default"
        ).combine_chunks()
    except pa.ArrowInvalid as error:
        raise DataError.at(path, f"files have other columns: {error}") from error


class _Tags(NamedTuple):
    account: str
    names: list[str]
    matrix: scipy.sparse.csr_array
    numbers: Mapping[str, tuple[float, float]] = {}


class _Vectors(NamedTuple):
    account: str
    vectors: np.ndarray


class _NoContentError(Exception):
    """Raised if a column cannot be used as a feature; the message states the reason.

    Attributes:
      is_fault: whether it is an error to name the column. An empty column may be named: new
        items are read with the columns of earlier items.
    """

    def __init__(self, why: str, *, is_fault: bool = False):
        super().__init__(why)
        self.is_fault = is_fault


class _Read(NamedTuple):
    """Converts columns of a table to features of items."""

    path: Path
    items: np.ndarray
    separator: str

    def wrong(
        self, column: str, problem: str, at: int | np.integer | None = None
    ) -> DataError:
        of = "" if at is None else f" of item {str(self.items[at])!r}"
        return DataError.at(self.path, f"column {column!r}{of} {problem}")

    def column(
        self, name: str, column: pa.Array, tags: Collection[str], words: Collection[str]
    ) -> _Tags | _Vectors:
        """Converts a column to tags or vectors, by its type and the caller's options."""
        type_ = column.type
        inner = type_.value_type if is_list(type_) else type_
        if pt.is_null(inner):
            raise _NoContentError(_EMPTY)
        if name in words:
            return self.words(name, column)
        if is_list(type_) and pt.is_floating(inner):
            return self.vectors(name, column)
        if pt.is_boolean(type_):
            return self.flags(name, column)
        if is_list(type_) or is_text(type_) or name in tags:
            if not is_name(inner):
                raise _NoContentError(f"{type_}, which cannot be tags", is_fault=True)
            return self.tags(name, column, asked=name in tags)
        if pt.is_integer(type_) or pt.is_floating(type_) or pt.is_decimal(type_):
            return self.numbers(name, column)
        raise _NoContentError(f"{type_}, which is no content", is_fault=True)

    def tags(self, name: str, column: pa.Array, *, asked: bool) -> _Tags:
        """Makes tags of a column: its cells, words of cells, or the elements of its lists."""
        rows = np.arange(len(column))
        text, several = is_text(column.type), is_list(column.type)
        if several:
            lengths = arrow.numbers(column.value_lengths().fill_null(0))
            rows, column = np.repeat(rows, lengths), column.flatten()
        kept = ~are_missing(column)
        rows, column = rows[kept], column.filter(pa.array(kept.tolist()))
        if pt.is_binary(column.type) or pt.is_large_binary(column.type):
            try:
                column = column.cast(pa.large_string())
            except pa.ArrowInvalid:
                raise _NoContentError(
                    "bytes that are not text, such as an image", is_fault=True
                ) from None
        found = as_names(column)
        if is_text(column.type) and self.separator:
            cut = [str(cell).split(self.separator) for cell in found]
            rows = np.repeat(rows, [len(cell) for cell in cut])
            texts = [text.strip() for cell in cut for text in cell]
            full = np.array([bool(text) for text in texts], bool)
            rows, found = rows[full], as_names([text for text in texts if text])
        several = several or len(np.unique(rows)) < len(rows)
        made = self._of(name, "=", rows, found)
        if text and not asked and len(rows) >= FEW_TEXTS:
            once = int((made.matrix.sum(axis=0) == 1).sum())
            if once > ONCE * len(rows):
                raise _NoContentError(
                    f"titles: {once:,} of {len(rows):,} texts occur once; words={name} "
                    "makes tags of their words",
                    is_fault=True,
                )
        sort = "tags" if several else "category"
        return made._replace(account=f"{sort}, {len(made.names):,} different")

    def words(self, name: str, column: pa.Array) -> _Tags:
        if not is_text(column.type):
            raise _NoContentError(f"{column.type}, which has no words", is_fault=True)
        cut = [_WORD.findall((cell or "").lower()) for cell in column.to_pylist()]
        rows = np.repeat(np.arange(len(cut)), [len(cell) for cell in cut])
        made = self._of(name, ":", rows, as_names([w for cell in cut for w in cell]))
        return made._replace(account=f"words, {len(made.names):,} different")

    def flags(self, name: str, column: pa.Array) -> _Tags:
        true = np.array([bool(cell) for cell in column.to_pylist()], bool)
        if not true.any():
            raise _NoContentError("true for no item")
        shape = len(self.items), 1
        rows = np.flatnonzero(true)
        ones = np.ones(len(rows), np.float32)
        matrix = scipy.sparse.csr_array((ones, (rows, 0 * rows)), shape=shape)
        return _Tags(f"tag, true for {len(rows):,} items", [name], matrix)

    def numbers(self, name: str, column: pa.Array) -> _Tags:
        try:
            wide = column.cast(pa.float64())
        except pa.ArrowInvalid:
            raise _NoContentError(
                f"integers beyond 2^53, as ids are; tags={name} makes tags of them",
                is_fault=True,
            ) from None
        values = arrow.numbers(wide.fill_null(math.nan))
        rows = np.flatnonzero(~np.isnan(values))
        values = values[rows]
        if not len(values):
            raise _NoContentError(_EMPTY)
        large = np.abs(values)
        if (wrong := ~np.isfinite(values) | np.isin(large, _LARGEST)).any():
            at = int(np.argmax(wrong))
            what = ", the largest number of its type" if np.isfinite(large[at]) else ""
            raise self.wrong(name, f"is {values[at]}{what}; {_LEAVE_EMPTY}", rows[at])
        top = large.max()
        unit = 1.0 if not top or 1 / _SQUARED < top < _SQUARED else top
        scaled = values / unit
        mean, deviation = float(scaled.mean()), float(scaled.std())
        shape, zeros = (len(self.items), 1), 0 * rows
        if not deviation > 1e-12 * abs(mean):
            # The value is stored, so that values of new items can be compared with it.
            units = {name: (float(values[0]), 0.0)}
            matrix = scipy.sparse.csr_array(
                (zeros.astype(np.float32), (rows, zeros)), shape=shape
            )
            account = f"number, {values[0]:g} for all items, which says nothing"
            return _Tags(account, [name], matrix, units)
        rest = scaled[large < top]
        if len(rest) and 0 < np.ptp(rest) < _ALIKE * deviation:
            at = int(np.argmax(large))
            raise self.wrong(
                name,
                f"is {values[at]:g}, and all smaller numbers are alike beside it; "
                f"{_LEAVE_EMPTY}, or give logarithms",
                rows[at],
            )
        normal = ((scaled - mean) / deviation).astype(np.float32)
        matrix = scipy.sparse.csr_array((normal, (rows, zeros)), shape=shape)
        empty = len(self.items) - len(rows)
        account = "number" + (f", of {empty:,} items empty" if empty else "")
        units = {name: (mean * unit, deviation * unit)}
        return _Tags(account, [name], matrix, units)

    def vectors(self, name: str, column: pa.Array) -> _Vectors:
        lengths = arrow.numbers(column.value_lengths().fill_null(0))
        there = lengths > 0
        if not there.any():
            raise _NoContentError(_EMPTY)
        width = int(lengths[np.argmax(there)])
        if (other := there & (lengths != width)).any():
            at = int(np.argmax(other))
            raise self.wrong(
                name, f"has {lengths[at]:,} numbers, others have {width:,}", at
            )
        flat = column.flatten()
        half = pt.is_float16(flat.type)
        if flat.null_count:
            at = int(np.argmax(arrow.numbers(flat.is_null().cast(pa.int8()))))
            raise self.wrong(
                name, "has an empty number", np.flatnonzero(there)[at // width]
            )
        given = arrow.numbers(flat).reshape(-1, width)
        made = np.zeros((len(self.items), width), np.float16 if half else np.float32)
        with np.errstate(over="ignore"):
            made[there] = given
            lengths = np.einsum("ij,ij->i", made, made, dtype=np.float32)
        if not np.isfinite(lengths).all():
            at = int(np.argmin(np.isfinite(lengths)))
            place = int(np.argmax(np.nan_to_num(np.abs(made[at]), nan=np.inf)))
            raise self.wrong(
                name,
                f"has {made[at, place]} at place {place}; leave the cell empty, or divide "
                "all vectors by the same number",
                at,
            )
        if not made.any():
            raise _NoContentError("zeros alone")
        return _Vectors(f"vector of {width:,} numbers", made)

    def _of(self, name: str, sign: str, rows: np.ndarray, texts: np.ndarray) -> _Tags:
        if not len(texts):
            raise _NoContentError(_EMPTY)
        distinct, codes = numbered(texts)
        order = np.argsort(distinct, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        shape = len(self.items), len(distinct)
        ones = np.ones(len(rows), np.float32)
        matrix = scipy.sparse.csr_array((ones, (rows, place[codes])), shape=shape)
        matrix.sum_duplicates()
        matrix.data[:] = 1
        return _Tags("", [f"{name}{sign}{text}" for text in distinct[order]], matrix)


def _once(
    path: Path, table: pa.Table, items: np.ndarray, columns: list[str]
) -> tuple[pa.Table, np.ndarray]:
    """Removes rows that repeat an earlier row; returns the other rows and their items.

    Raises:
      DataError: two rows of an item are different.
    """
    distinct, codes = numbered(items)
    if len(distinct) == len(items):
        return table, items
    _, first = np.unique(codes, return_index=True)
    again = np.setdiff1d(np.arange(len(items)), first)
    before = table.select(columns).take(arrow.from_numbers(first[codes[again]]))
    after = table.select(columns).take(arrow.from_numbers(again))
    for one, other, at in zip(
        before.to_pylist(), after.to_pylist(), again.tolist(), strict=True
    ):
        for name in columns:
            if repr(one[name]) != repr(other[name]):  # `repr`, so that NaN equals NaN
                raise DataError.at(
                    path,
                    f"item {str(items[at])!r} has several rows, whose {name!r} are "
                    f"{one[name]!r} and {other[name]!r}; give each item one row",
                )
    warn_caller(
        f"{shown(path)}: {len(again):,} rows repeat another one and were left out"
    )
    kept = np.sort(first)
    return table.take(arrow.from_numbers(kept)), items[kept]


def _joined(parts: list[scipy.sparse.csr_array], items: int) -> scipy.sparse.csr_array:
    if not parts:
        return scipy.sparse.csr_array((items, 0), dtype=np.float32)
    made = scipy.sparse.csr_array(scipy.sparse.hstack(parts), dtype=np.float32)
    made.sort_indices()
    return made


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Joins the chunks of a column; decodes dictionaries and lists of a fixed size."""
    found = arrow.one(column)
    if pt.is_dictionary(found.type):
        found = found.cast(found.type.value_type)
    if pt.is_fixed_size_list(found.type):
        # The entries of null lists, which lists of a fixed size store, are dropped by this cast.
        found = found.cast(pa.large_list(found.type.value_type))
    return found


def _item_column(path: Path, table: pa.Table, given: str | None) -> str:
    known = table.column_names
    if given is not None:
        if given not in known:
            raise ValueError(
                f"item={given!r}, but the columns are {quoted(known, count=20)}"
            )
        return given
    found = _columns_of_items(known)
    if len(found) != 1:
        what = "no column has" if not found else f"{quoted(found)} have"
        raise DataError.at(
            path,
            f"{what} a name of items; say which it is: item=COLUMN, of {quoted(known)}",
        )
    return found[0]


def _columns_of_items(known: list[str]) -> list[str]:
    """Columns whose names are typical of items; only "item" if there is such a column."""
    found = [name for name in known if role_of(name) == "item"]
    return ["item"] if "item" in found else found


def _table(
    piece: Piece, item: str | None = None, names: Collection[str] = ()
) -> pa.Table:
    """Reads all rows of a file or of a table in memory.

    Args:
      piece: the file or the table.
      item: name of the column of items, or None.
      names: further columns of a CSV file that are read as text.
    """
    path = piece.path
    if piece.table is not None:
        return piece.table.read_all()
    if piece.file is not None or is_parquet(path):
        files = [piece.file] if piece.file else parquet.parquet_files(path)
        tables = []
        for source in files:
            with source.open() as file:
                tables.append(source.whole(file))
        return pa.concat_tables(tables, promote_options="default")
    start = head(path).data.lstrip()
    if start.startswith(b"{"):
        try:
            first = json.loads(start.partition(b"\n")[0])
        # The object spans several lines, or is very long.
        except (ValueError, RecursionError):
            return _json(path)
        are_lines = any(role_of(name) in ("item", "user") for name in first)
        return _json_lines(path) if are_lines else _json(path)
    if start.startswith(b"["):
        return _json(path)
    return _csv(path, item, names)


def _with_folders(piece: Piece, table: pa.Table) -> pa.Table:
    """Adds to a file's table the columns whose values are in the names of its folders."""
    constants = piece.constants.beside(table.column_names)
    for name in constants.texts:
        # Arrow can concatenate text columns with null columns, but not dictionaries.
        cells = constants.column(name, len(table)).cast(pa.string())
        table = table.append_column(name, cells)
    return table


def _json_lines(path: Path) -> pa.Table:
    schema = json_lines.first_rows(path).schema
    cells = json_lines.json_cells(path, schema, {name: name for name in schema.names})
    return pa.concat_tables([pa.table(block.columns) for block in cells])


def _json(path: Path) -> pa.Table:
    """Reads a JSON object with a list of tags for each item, or a list of objects."""

    def with_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            [(key, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
            raise DataError.at(path, f"an object has the key {key!r} more than once")
        return found

    with open_data(path) as stream:
        try:
            found = json.load(stream, object_pairs_hook=with_keys)
        except DataError:
            raise
        except (ValueError, RecursionError) as error:
            raise DataError.at(path, f"is not JSON: {error}") from error
    if isinstance(found, list):
        if not all(isinstance(each, dict) for each in found):
            raise DataError.at(path, "is a JSON list, but not of objects")
        try:
            return _table(find_pieces(found)[0]) if found else pa.table({})
        except DataError as error:
            problem = str(error).removeprefix(f"{TABLE}: ")
            raise DataError.at(path, problem) from error
    try:
        lists = pa.array(list(found.values()))
        items = pa.array(list(found))
    except UnicodeEncodeError as error:
        raise DataError.at(path, half_pair(error)) from error
    except pa.ArrowException as error:
        raise DataError.at(path, f"has values of several types: {error}") from error
    if not is_list(lists.type):
        raise DataError.at(
            path, 'is a JSON object, but not with a list for each item: {"tea": [4, 7]}'
        )
    return pa.table({"item": items, _ATTRIBUTES: lists})


def _csv(path: Path, item: str | None, names: Collection[str]) -> pa.Table:
    start = head(path).data.lstrip(b"\n")
    first = start.partition(b"\n")[0]
    delimiter = (
        "\t"
        if b"\t" in first
        else ";"
        if first.count(b";") > first.count(b",")
        else ","
    )
    # Names are read as text, like those of events: Arrow would convert "007" to the number 7.
    if item is None:
        header = io.StringIO(start.decode("utf-8-sig"), newline="")
        items = _columns_of_items(next(csv.reader(header, delimiter=delimiter)))
    else:
        items = [item]
    with open_data(path) as stream:
        try:
            return pyarrow.csv.read_csv(
                stream,
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=delimiter, newlines_in_values=True
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys([*items, *names], pa.string()),
                    # "NA" is a text in a text column, and a missing value in a column of numbers.
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            raise DataError.at(path, f"cannot be read as CSV: {error}") from error
