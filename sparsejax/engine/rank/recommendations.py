"""The recommended items of each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from sparsejax.data import SequenceDataset, SparseDataset
from sparsejax.data.files import arrow
from sparsejax.data.files.entries import offsets
from sparsejax.data.files.names import Names, as_names, to_arrow

_Data = SparseDataset | SequenceDataset


@dataclasses.dataclass(frozen=True, eq=False)
class Recommendations:
    """The best items of each row.

    >>> found = Recommendations(np.array([[2, 0]]), np.array([[1.5, 0.5]]))
    >>> found.names(["milk", "tea", "rye"])
    [['rye', 'milk']]

    Attributes:
      ids: `[rows, k]` int32 item numbers, best first. A row with fewer than `k` candidates is
          padded with -1.
      scores: `[rows, k]` float32 scores of the model; -inf if the id is -1.
      row_names: names of the rows, or None.
      item_names: names of all items, or None.
      values: `[rows, k]` float32 if items are ranked by a label of the next event: its predicted
          probability or number, 0 if the id is -1. Otherwise None.
    """

    ids: np.ndarray
    scores: np.ndarray
    row_names: Names | None = None
    item_names: Names | None = None
    values: np.ndarray | None = None

    def named(self, rows: Iterable[object], items: Iterable[object]) -> Recommendations:
        """A copy with names of the rows and of all items.

        >>> found = Recommendations(np.array([[2, 0]]), np.array([[1.5, 0.5]]))
        >>> found.named(["ann"], ["milk", "tea", "rye"]).names()
        [['rye', 'milk']]
        """
        return dataclasses.replace(
            self, row_names=as_names(rows), item_names=as_names(items)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def names(self, items: _Data | Iterable[object] | None = None) -> list[list[str]]:
        """The names of the recommended items of each row; fewer than `k` if there were too few
        candidates.

        Args:
          items: names of all items, or a data set whose features are the items; by default
              `item_names`.

        Raises:
          ValueError: there are fewer names than items, or no names are given.
        """
        known = self._item_names(items)
        if self.ids.max(initial=-1) < 0:
            return [[] for _ in self.ids]
        counts = np.sum(self.ids >= 0, axis=1)
        rows = known[self.ids].tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def to_arrow(
        self,
        users: _Data | Iterable[object] | None = None,
        items: _Data | Iterable[object] | None = None,
    ) -> pa.Table:
        """An Arrow table with a line for each recommendation, best first.

        Its columns are user, item (text), score (float32), rank (int32, from 1), and value
        (float32) if there are values. It can be converted by `table.to_pandas()` or
        `polars.from_arrow(table)`.

        >>> found = Recommendations(np.array([[2, 0]]), np.array([[1.5, 0.5]]))
        >>> found.to_arrow(["ann"], ["milk", "tea", "rye"]).to_pylist()[0]
        {'user': 'ann', 'item': 'rye', 'score': 1.5, 'rank': 1}

        Args:
          users: names of all rows, or a data set that has these rows; by default `row_names`.
          items: names of all items, or a data set whose features are the items; by default
              `item_names`.

        Raises:
          ValueError: there are not as many users as rows, or there are fewer
        """
        users = self.row_names if users is None else users
        if users is None:
            raise ValueError("the names of the rows are not known: give users")
        known = as_names(users.row_names if isinstance(users, _Data) else users)
        if len(known) != len(self):
            raise ValueError(
                f"{len(known):,} users were given for the recommendations of {len(self):,} "
                "rows"
            )
        rows, ranks = np.nonzero(self.ids >= 0)
        ids, scores = self.ids[rows, ranks], self.scores[rows, ranks]
        columns = {
            "user": to_arrow(known).take(arrow.from_numbers(rows)),
            "item": to_arrow(self._item_names(items)).take(arrow.from_numbers(ids)),
            "score": arrow.from_numbers(scores.astype(np.float32)),
            "rank": arrow.from_numbers((ranks + 1).astype(np.int32)),
        }
        if self.values is not None:
            values = self.values[rows, ranks].astype(np.float32)
            columns["value"] = arrow.from_numbers(values)
        return pa.table(columns)

    def to_lists(
        self, items: _Data | Iterable[object] | None = None
    ) -> tuple[pa.ListArray, pa.ListArray]:
        """Lists for each row: the names of its items, and their scores (float32), best first.

        >>> found = Recommendations(np.array([[2, 0]]), np.array([[1.5, 0.5]]))
        >>> names, scores = found.to_lists(["milk", "tea", "rye"])
        >>> names.to_pylist(), scores.to_pylist()
        ([['rye', 'milk']], [[1.5, 0.5]])

        Args:
          items: names of all items, or a data set whose features are the items; by default
              `item_names`.

        Raises:
          ValueError: there are fewer names than items, or no names are given.
        """
        known, is_item = self._item_names(items), self.ids >= 0
        names = to_arrow(known[self.ids[is_item]])
        scores = arrow.from_numbers(self.scores[is_item].astype(np.float32))
        ends = arrow.from_numbers(offsets(is_item.sum(axis=1)))
        return (
            pa.ListArray.from_arrays(ends, names),
            pa.ListArray.from_arrays(ends, scores),
        )

    def _item_names(self, items: _Data | Iterable[object] | None) -> Names:
        items = self.item_names if items is None else items
        if items is None:
            raise ValueError("the names of the items are not known: give items")
        known = items.feature_names if isinstance(items, _Data) else items
        known = as_names(known)
        highest = self.ids.max(initial=-1)
        if highest >= len(known):
            raise ValueError(
                f"item {highest:,} is recommended but only {len(known):,} names were "
                "given; give those of the features the model was trained on"
            )
        return known
