"""Rows of different lengths, stored as flat columns of entries with offsets of the rows.

Columns that are unknown are absent, not None. So no code must check each column for None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import scipy.sparse

from sparsejax.data.files import arrow
from sparsejax.sparse import CSR, as_int32

# NumPy arrays of equal length, by name. Names of rows may also be an Arrow array.
Leaves = Mapping[str, Any]


def known(**leaves: Any) -> dict[str, Any]:
    """The named arrays that are not None, as a dict."""
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def taken(leaves: Leaves, at: np.ndarray | slice) -> dict[str, Any]:
    """Indexes all leaves by a slice, a mask, or an array of positions."""
    return {name: _taken(leaf, at) for name, leaf in leaves.items()}


def _taken(leaf: Any, at: np.ndarray | slice) -> Any:
    if not isinstance(leaf, pa.Array) or isinstance(at, slice):
        return leaf[at]
    if at.dtype == bool:
        return leaf.filter(pa.array(at))
    return leaf.take(arrow.from_numbers(at))


def joined(parts: Sequence[Leaves]) -> dict[str, Any]:
    """Concatenates each leaf over all parts.

    A part without entries may lack a leaf.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _joined([p[name] for p in parts if name in p]) for name in names}


def _joined(leaves: Sequence[Any]) -> Any:
    if len(leaves) == 1:
        return leaves[0]
    if isinstance(leaves[0], pa.Array):
        return pa.concat_arrays(leaves)
    return np.concatenate(leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """Rows of different lengths: flat columns of entries, and where each row begins.

    >>> entries = Entries.of([0, 1, 3], indices=np.array([5, 2, 7]), times=None)
    >>> entries.rows(np.array([1, -1])).columns
    {'indices': array([2, 7])}

    Attributes:
      indptr: `[rows + 1]` offsets: row r has the entries `indptr[r] .. indptr[r + 1] - 1`.
      columns: arrays `[entries]` by name. `indices` is always present; `values`, `times` and
        others only if they are known.
      of_rows: arrays `[rows]` by name, such as `left_out` and `names`, if they are known.
    """

    indptr: np.ndarray
    columns: Leaves
    of_rows: Leaves = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, indptr: Any, of_rows: Leaves | None = None, **columns: Any) -> Self:
        """Makes entries from offsets and columns; columns that are None are left out."""
        return cls(np.asarray(indptr), known(**columns), known(**(of_rows or {})))

    @classmethod
    def of_lengths(
        cls, lengths: np.ndarray, columns: Leaves, of_rows: Leaves | None = None
    ) -> Self:
        """Makes entries from the number of entries of each row, and columns."""
        return cls(np.append(0, np.cumsum(lengths)), columns, of_rows or {})

    @property
    def indices(self) -> np.ndarray:
        return self.columns["indices"]

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def lengths(self) -> np.ndarray:
        """`[rows]` number of entries in each row."""
        return np.diff(self.indptr)

    @property
    def row_of(self) -> np.ndarray:
        """`[entries]` row number of each entry."""
        return np.repeat(np.arange(self.num_rows), self.lengths)

    def replaced(self, **columns: Any) -> Self:
        """Replaces or adds columns; a column that is None is removed."""
        both = {**self.columns, **columns}
        return dataclasses.replace(self, columns=known(**both))

    def rows(self, rows: np.ndarray) -> Self:
        """Selects rows by number, in this order. Row -1 is empty, with 0 in columns of rows."""
        lengths = np.append(self.lengths, 0)[rows]
        indptr = offsets(lengths)
        before = np.repeat(self.indptr[rows] - indptr[:-1], lengths)
        entries = before + np.arange(len(before))
        of_rows = taken(self.of_rows, rows)
        for leaf in of_rows.values():
            leaf[rows < 0] = 0
        return dataclasses.replace(
            self, indptr=indptr, columns=taken(self.columns, entries), of_rows=of_rows
        )

    def slice(self, start: int, stop: int) -> Self:
        """Selects the rows `start .. stop - 1` without copying entries."""
        begin, end = self.indptr[start], self.indptr[stop]
        return dataclasses.replace(
            self,
            indptr=self.indptr[start : stop + 1] - begin,
            columns=taken(self.columns, slice(begin, end)),
            of_rows=taken(self.of_rows, slice(start, stop)),
        )

    def keep(self, kept: np.ndarray) -> Self:
        """Keeps all rows, but only the entries for which `kept: [entries]` is true."""
        indptr = offsets(kept)[self.indptr]
        columns = taken(self.columns, kept)
        return dataclasses.replace(self, indptr=indptr, columns=columns)

    def sorted(self, *keys: str) -> Self:
        """Sorts the entries of each row by some columns, the first of which is the primary key.

        The sort is stable.
        """
        if keys == ("indices",):  # SciPy's sort takes less time and memory
            places = np.arange(len(self.indices)), self.indices, self.indptr
            shape = (self.num_rows, int(self.indices.max(initial=0)) + 1)
            matrix = scipy.sparse.csr_array(places, shape=shape, copy=True)
            matrix.sort_indices()
            order = matrix.data
        else:
            order = np.lexsort(
                (*(self.columns[key] for key in reversed(keys)), self.row_of)
            )
        return dataclasses.replace(self, columns=taken(self.columns, order))

    def without_empty_rows(self) -> Self:
        """Removes the rows without entries."""
        is_there = self.lengths > 0
        if is_there.all():
            return self
        indptr = self.indptr[np.append(True, is_there)]
        of_rows = taken(self.of_rows, is_there)
        return dataclasses.replace(self, indptr=indptr, of_rows=of_rows)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenates the rows of all parts, of which there must be at least one."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls.of_lengths(
            lengths,
            joined([part.columns for part in parts]),
            joined([part.of_rows for part in parts]),
        )

    def csr(self, num_cols: int) -> CSR:
        """The matrix of indices and values; indices must ascend in each row."""
        indptr = as_int32("indptr", self.indptr)
        return CSR(self.columns.get("values"), self.indices, indptr, num_cols=num_cols)


def offsets(lengths: np.ndarray) -> np.ndarray:
    """The offsets of rows, `[n + 1]` int32: 0 and the running sums of their lengths.

    Raises:
      ValueError: the sum does not fit in int32.
    """
    total = np.cumsum(lengths, dtype=np.int64)
    return as_int32("indptr", np.concatenate([np.zeros(1, np.int64), total]))
