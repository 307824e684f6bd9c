"""Matrices as users hand them over, and which row of one belongs to which of another."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.sparse

from sparsejax.data import SparseDataset
from sparsejax.data.names import Names, examples, find_names
from sparsejax.sparse import CSR

Source = SparseDataset | CSR | scipy.sparse.sparray | scipy.sparse.spmatrix


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A source as a CSR, with its names if it has some.

    Attributes:
      what: what messages call it: the name of the argument.
      matrix: `[rows, features]`, on the host or the device.
      row_names: `[rows]`, or None.
      feature_names: `[features]`, or None.
    """

    what: str
    matrix: CSR
    row_names: Names | None = None
    feature_names: Names | None = None

    @classmethod
    def of(cls, what: str, source: Source) -> Table:
        """Takes a source.

        Raises:
          TypeError: it is none.
        """
        if isinstance(source, SparseDataset):
            return cls(what, source.matrix, source.row_names, source.feature_names)
        if isinstance(source, CSR):
            return cls(what, source)
        if scipy.sparse.issparse(source):
            return cls(what, CSR.from_scipy(source))
        raise TypeError(
            f"{what} is a SparseDataset, a CSR or a SciPy sparse matrix, got "
            f"{type(source).__name__}"
        )

    @property
    def num_rows(self) -> int:
        return self.matrix.num_rows

    def label(self, row: int) -> str:
        """The row's number, with its name if it has one, for a message."""
        name = "" if self.row_names is None else f" ({self.row_names[row]!r})"
        return f"row {row:,}{name} of {self.what}"

    def labels(self, rows: np.ndarray) -> str:
        """The first few of these rows, for a message."""
        return examples(rows if self.row_names is None else self.row_names[rows])


def find_rows(wanted: Table, among: Table) -> np.ndarray:
    """`[wanted rows]`: the row of `among` for each row of `wanted`, -1 if missing.

    By name if both have names; otherwise row `i` belongs to row `i`.

    Raises:
      ValueError: matched by position, and the numbers of rows differ.
    """
    if wanted.row_names is not None and among.row_names is not None:
        if wanted.row_names is among.row_names:
            return np.arange(wanted.num_rows)
        return find_names(wanted.row_names, among.row_names)
    if wanted.num_rows != among.num_rows:
        raise ValueError(
            f"{wanted.what} has {wanted.num_rows:,} rows but {among.what} has "
            f"{among.num_rows:,}; give the same rows, or data sets for both, whose rows "
            "are matched by name"
        )
    return np.arange(wanted.num_rows)


def matched(inputs: Source, other: Source, what: str) -> Source:
    """`other` with a row for each row of `inputs`, in the same order.

    Args:
      inputs: `[rows, features]`.
      other: `[other rows, items]`.
      what: what messages call `other`.

    Raises:
      ValueError: a row is missing, or the numbers of rows differ.
    """
    x, y = Table.of("inputs", inputs), Table.of(what, other)
    missing = np.flatnonzero(find_rows(x, y) < 0)
    if missing.size:
        raise ValueError(
            f"{missing.size:,} of {x.num_rows:,} rows of inputs are not in {what}: "
            f"{x.labels(missing)}"
        )
    if isinstance(inputs, SparseDataset) and isinstance(other, SparseDataset):
        return other.align_rows(inputs)
    return other


def check_columns(what: str, columns: int, expected: int, kind: str) -> None:
    """Raises ValueError if `what` has not the columns that the model has `kind`."""
    if columns != expected:
        raise ValueError(
            f"{what} has {columns:,} columns but the model has {expected:,} {kind}; "
            "read both with the same vocabulary"
        )


def check_same_features(a: Table, b: Table) -> None:
    """Raises ValueError if two tables have as many features but not the same."""
    ours, theirs = a.feature_names, b.feature_names
    if ours is None or theirs is None or ours is theirs or len(ours) != len(theirs):
        return
    different = np.flatnonzero(ours != theirs)
    if different.size:
        at = different[0]
        raise ValueError(
            f"column {at:,} is {ours[at]!r} in {a.what} but {theirs[at]!r} in {b.what}; "
            "read both with the same vocabulary"
        )
