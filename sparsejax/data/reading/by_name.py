"""Reads tables whose rows belong to names: features of items, of users or of requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from sparsejax.data.events.block import encoded_names, is_list, lists
from sparsejax.data.events.pieces import TABLE
from sparsejax.data.files import arrow
from sparsejax.data.files.names import (
    NameEncoder,
    Names,
    as_names,
    check_unique,
    find_names,
    quoted,
    to_arrow,
)
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.files.spelling import (
    are_missing,
    as_integers_or_text,
    is_name,
    is_number,
    is_text,
)
from sparsejax.data.reading.item_features import FEW_TEXTS, ONCE, one_array, whole_table
from sparsejax.data.sets.click_files import Paths, as_paths, click_blocks
from sparsejax.data.sets.click_records import table_of
from sparsejax.data.sets.click_schema import ClickSchema, DenseColumn, VocabularyColumn
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.data.sets.events import EventReader, Events, UserFeatures
from sparsejax.data.sets.sequences import SequenceDataset


@dataclasses.dataclass(frozen=True, eq=False)
class ByName:
    """A table whose rows belong to names, or to rows of the inputs in their order.

    Attributes:
      what: name of the table in messages.
      table: columns of the table, without the column of names.
      names: name of each row; None if the rows belong to rows of the inputs in their order.
    """

    what: str
    table: pa.Table
    names: Names | None

    @classmethod
    def read(
        cls, source: Any, key: str, texts: Collection[str], *, ordered: bool = False
    ) -> ByName:
        """Reads a file, a table, dicts of rows, or a dict of columns.

        Args:
          source: file, table or dicts.
          key: name of the column of names.
          texts: names of the columns of categories, which are read from CSV as text.
          ordered: whether the column of names may be missing.

        Raises:
          DataError: the source cannot be read, or a name occurs twice.
          ValueError: the column of names is missing.
        """
        if isinstance(source, Mapping):
            source = table_of(source)
        path, table = whole_table(source, key, [*texts, key])
        what = shown(path)
        if key not in table.column_names:
            if ordered:
                return cls(what, table, None)
            raise ValueError(
                f"{what}: has no column {key!r}, by whose names its rows are found; it has "
                f"{table.column_names}"
            )
        try:
            names = as_names(table.column(key).combine_chunks())
            check_unique(names, key)
        except ValueError as error:
            raise DataError.at(path, f"column {key!r}: {error}") from error
        return cls(what, table.drop_columns([key]), names)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self.table.column_names

    def of(
        self, names: Names, columns: Collection[str], *, some: bool = False
    ) -> dict[str, pa.Array]:
        """Selects columns for the rows with these names. Cells of unknown names are null.

        Raises:
          ValueError: the table has no names, and another number of rows. Or, with `some`, all
            names are unknown.
        """
        if self.names is None and len(self.table) != len(names):
            raise ValueError(
                f"{self.what}: has {len(self.table):,} rows for {len(names):,} rows of inputs; "
                "give one for each, in their order, or a column with their names"
            )
        found = {n: self.table.column(n).combine_chunks() for n in columns}
        if self.names is not None:
            at = find_names(names, self.names)
            if some and len(names) and at.max() < 0:
                raise ValueError(
                    f"{self.what}: has a row for none of {quoted(names)}; it has rows for "
                    f"{quoted(self.names)}"
                )
            places = pa.array(at, mask=at < 0)
            found = {name: column.take(places) for name, column in found.items()}
        return found


def lists_of(data: SparseDataset | SequenceDataset, items: Names) -> pa.Array:
    """The names of each row's items as a list array, in the order of the row."""
    rows = data.matrix if isinstance(data, SparseDataset) else data
    indptr, indices = np.asarray(rows.indptr), np.asarray(rows.indices)
    names = to_arrow(items).take(arrow.from_numbers(indices[: indptr[-1]]))
    return lists(names, np.diff(indptr))


def read_user_features(
    source: Paths, schema: EventSchema | Events | None = None, *, user: str = "user"
) -> UserFeatures:
    """Reads a table of users, for `read_sequences(users=...)`.

    >>> users = [{"user": "ann", "plan": "paid", "age": 31}, {"user": "bob", "plan": None}]
    >>> age = DenseColumn(missing=40.0)
    >>> schema = EventSchema(ids={"plan": VocabularyColumn()}, dense={"age": age})
    >>> found = read_user_features(users, schema)
    >>> found.columns["plan"].tolist(), found.columns["age"].tolist()
    ([2, 0], [31.0, 40.0])

    A user that the table lacks gets missing values in all columns.

    Without a schema the types of the columns decide. Columns of text, booleans, or lists of
    texts or integers are categories. Columns of numbers have `log1p` if no number is negative;
    the mean replaces missing ones. Dates and empty columns are left out, and so are columns of
    20 or more texts of which over four in five occur once.

    Args:
      source: files or a table in memory, as for `read_clicks`.
      schema: types of the columns, without kinds and context; or `train.users`, so that
        categories get the ids of the training data, and others count as unknown. None: the
        types of the columns decide, as described above.
      user: name of the column with the names of the users.

    Raises:
      DataError: the table cannot be read, lacks a column, names a user twice, or lacks a name.
      ValueError: the schema has kinds, context or labels.
    """
    if isinstance(source, Mapping):
        source = table_of(source)
    if schema is None:
        path, table = whole_table(source, user, ())
        schema = _schema_of(path, table, user)
        source = table if path is TABLE else source  # a stream can be read only once
    reader, names = EventReader(schema), NameEncoder()
    own = reader.schema
    if own.kind is not None or own.context or own.several:
        raise ValueError(
            "users have no kind, no context and no labels: leave them out of the schema"
        )
    columns, path = ClickSchema(user, own.dense, own.ids), as_paths(source)[0]
    for cells in click_blocks(source, columns, [user, *own.used], labelled=False):
        found = cells.columns[user]
        texts, wrong, problem = as_integers_or_text(found)
        if (missing := are_missing(found)).any():
            wrong, problem = missing, "is empty: each user has a name"
        if wrong.any():
            raise cells.error(int(np.argmax(wrong)), f"column {user!r} {problem}")
        names.add(encoded_names(texts, cells.path))
        reader.take(cells)
    distinct, codes = names.finish()
    if len(distinct) < len(codes):
        twice = distinct[np.argmax(np.bincount(codes) > 1)]
        raise DataError.at(path, f"column {user!r} has {twice!r} twice")
    return UserFeatures(distinct, reader.events(path).taken(np.argsort(codes)))


def _schema_of(path: Path, table: pa.Table, user: str) -> EventSchema:
    """Makes a schema of user columns from the types of a table's columns.

    Raises:
      DataError: the column of users is missing, or no other column can be used.
    """
    if user not in table.column_names:
        raise DataError.at(
            path,
            f"has no column {user!r} with the names of users; it has {table.column_names}",
        )
    dense, ids = {}, {}
    for name in table.column_names:
        column = one_array(table.column(name))
        inner = column.type.value_type if is_list(column.type) else column.type
        if name == user or name.startswith("__index_level_") or pt.is_null(inner):
            continue
        if is_number(column.type):
            if (found := _column_of(column)) is not None:
                dense[name] = found
        elif is_text(column.type) and _are_titles(column):
            continue
        elif pt.is_boolean(inner) or (is_name(inner) and not pt.is_floating(inner)):
            ids[name] = VocabularyColumn()
    if not dense and not ids:
        raise DataError.at(path, f"has no column of numbers or categories but {user!r}")
    return EventSchema(dense=dense, ids=ids)


def _column_of(column: pa.Array) -> DenseColumn | None:
    """The `DenseColumn` for a column of numbers; None if none of its numbers is finite."""
    numbers = arrow.numbers(column.cast(pa.float64(), safe=False).drop_null())
    if not len(numbers := numbers[np.isfinite(numbers)]):
        return None
    log1p = bool(numbers.min() >= 0)
    return DenseColumn(log1p, float(np.mean(np.log1p(numbers) if log1p else numbers)))


def _are_titles(column: pa.Array) -> bool:
    """Whether the texts of a column are no categories, because most of them occur only once."""
    counts = arrow.numbers(column.drop_null().value_counts().field("counts"))
    count = int(counts.sum())
    return count >= FEW_TEXTS and int((counts == 1).sum()) > ONCE * count
