"""Ragged rows: several columns of entries, one row after the other.

Unknown columns are left out. So nothing asks of each column whether it is None.
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

# Arrays of one length, by name: of NumPy, and names of rows also of Arrow.
Leaves = Mapping[str, Any]


def known(**leaves: Any) -> dict[str, Any]:
    """The leaves that are not None."""
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def taken(leaves: Leaves, at: np.ndarray | slice) -> dict[str, Any]:
    """Some places of all leaves: a slice, a mask, or their numbers."""
    return {name: _taken(leaf, at) for name, leaf in leaves.items()}


def _taken(leaf: Any, at: np.ndarray | slice) -> Any:
    if not isinstance(leaf, pa.Array) or isinstance(at, slice):
        return leaf[at]
    if at.dtype == bool:
        return leaf.filter(pa.array(at))
    return leaf.take(arrow.from_numbers(at))


def joined(parts: Sequence[Leaves]) -> dict[str, Any]:
    """The leaves of all parts, one part after the other.

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
    """The entries of some rows, row by row.

    >>> entries = Entries.of([0, 1, 3], indices=np.array([5, 2, 7]), times=None)
    >>> entries.rows(np.array([1, -1])).columns
    {'indices': array([2, 7])}

    Attributes:
      indptr: `[rows + 1]`: row r has the entries `indptr[r] .. indptr[r + 1] - 1`.
      columns: `[entries]` each. `indices` are always there; `values`, `times` and others
        if they are known.
      of_rows: `[rows]` each, like `left_out` and `names`, if they are known.
    """

    indptr: np.ndarray
    columns: Leaves
    of_rows: Leaves = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, indptr: Any, of_rows: Leaves | None = None, **columns: Any) -> Self:
        """Entries of the columns that are not None."""
        return cls(np.asarray(indptr), known(**columns), known(**(of_rows or {})))

    @classmethod
    def of_lengths(
        cls, lengths: np.ndarray, columns: Leaves, of_rows: Leaves | None = None
    ) -> Self:
        """Entries of rows of these lengths."""
        return cls(np.append(0, np.cumsum(lengths)), columns, of_rows or {})

    @property
    def indices(self) -> np.ndarray:
        return self.columns["indices"]

    @property
    def num_rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def lengths(self) -> np.ndarray:
        """`[rows]` number of entries."""
        return np.diff(self.indptr)

    @property
    def row_of(self) -> np.ndarray:
        """`[entries]` the row of each."""
        return np.repeat(np.arange(self.num_rows), self.lengths)

    def replaced(self, **columns: Any) -> Self:
        """The same entries with other columns; those that are None are left out."""
        both = {**self.columns, **columns}
        return dataclasses.replace(self, columns=known(**both))

    def rows(self, rows: np.ndarray) -> Self:
        """The rows of these numbers, in this order. Row -1 is empty, and all it has is 0."""
        lengths = np.append(self.lengths, 0)[rows]
        indptr = offsets(lengths)
        before = np.repeat(self.indptr[rows] - indptr[:-1], lengths)
        entries = before + np.arange(len(before))
        of_rows = taken(self.of_rows, rows)
        for leaf in of_rows.values():
            leaf[rows < 0] = 0
        return dataclasses.replace(
            self,
            indptr=indptr,
            columns=taken(self.columns, entries),
            of_rows=of_rows,
        )

    def slice(self, start: int, stop: int) -> Self:
        """Rows `start .. stop - 1`; no entry is copied."""
        begin, end = self.indptr[start], self.indptr[stop]
        return dataclasses.replace(
            self,
            indptr=self.indptr[start : stop + 1] - begin,
            columns=taken(self.columns, slice(begin, end)),
            of_rows=taken(self.of_rows, slice(start, stop)),
        )

    def keep(self, kept: np.ndarray) -> Self:
        """All rows with those entries of which `kept: [entries]` is true."""
        indptr = offsets(kept)[self.indptr]
        columns = taken(self.columns, kept)
        return dataclasses.replace(self, indptr=indptr, columns=columns)

    def sorted(self, *keys: str) -> Self:
        """The entries of each row by some columns, the first of which counts most.

        Equal ones keep their order.
        """
        if keys == ("indices",):  # which takes less time and memory in this way
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
        """The rows that have entries."""
        is_there = self.lengths > 0
        if is_there.all():
            return self
        indptr = self.indptr[np.append(True, is_there)]
        of_rows = taken(self.of_rows, is_there)
        return dataclasses.replace(self, indptr=indptr, of_rows=of_rows)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one part after the other. There is one part or more."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls.of_lengths(
            lengths,
            joined([part.columns for part in parts]),
            joined([part.of_rows for part in parts]),
        )

    def csr(self, num_cols: int) -> CSR:
        """Indices and values as a matrix, in whose rows columns ascend."""
        indptr = as_int32("indptr", self.indptr)
        return CSR(self.columns.get("values"), self.indices, indptr, num_cols=num_cols)


def offsets(lengths: np.ndarray) -> np.ndarray:
    """`[n + 1]` int32: 0 and the running sums.

    Raises:
      ValueError: there are too many entries.
    """
    total = np.cumsum(lengths, dtype=np.int64)
    return as_int32("indptr", np.concatenate([np.zeros(1, np.int64), total]))
