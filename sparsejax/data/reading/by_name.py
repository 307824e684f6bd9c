"""Tables whose rows belong to names: the columns of items, of users or of requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from sparsejax.data.events.block import lists
from sparsejax.data.files import arrow
from sparsejax.data.files.names import (
    Names,
    as_names,
    check_unique,
    find_names,
    quoted,
    to_arrow,
)
from sparsejax.data.files.opening import DataError, shown
from sparsejax.data.reading.item_features import whole_table
from sparsejax.data.sets.click_records import table_of
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.sequences import SequenceDataset


@dataclasses.dataclass(frozen=True, eq=False)
class ByName:
    """The columns of a table.

    Attributes:
      what: name of the table in messages.
      table: its columns, without that of the names.
      names: the name of each row; None if rows belong to rows in their order.
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
          source: the columns.
          key: column of the names.
          texts: columns of categories, which are text in CSV.
          ordered: whether the column of names may be missing.

        Raises:
          DataError: the source cannot be read, or a name is there twice.
          ValueError: there is no column of names.
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
        """Some columns of the rows with these names. Cells of unknown names are missing.

        Raises:
          ValueError: rows belong to rows in their order, and there are more or fewer. Or with
            `some` all names are unknown.
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
    """The names of the items of each row, in its order."""
    rows = data.matrix if isinstance(data, SparseDataset) else data
    indptr, indices = np.asarray(rows.indptr), np.asarray(rows.indices)
    names = to_arrow(items).take(arrow.from_numbers(indices[: indptr[-1]]))
    return lists(names, np.diff(indptr))
