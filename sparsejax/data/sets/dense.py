"""Dense arrays with a row for each example, and the names of the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.data.files import names as _names
from sparsejax.data.files.names import Names, RowNames


@dataclasses.dataclass(frozen=True, eq=False)
class DenseDataset:
    """An array with a row for each example, in host memory, and the rows' names.

    >>> ages = DenseDataset([31.0, 44.0], ["ann", "bob"])
    >>> ages.align_rows(["bob", "eve"], fill=-1).values
    array([44., -1.], dtype=float32)

    `fit`, `recommend` and `evaluate` take it as one of several inputs, beside a
    `SparseDataset` with the same rows in any order.

    Attributes:
      values: `[rows, ...]` numbers, with any further axes, in the dtype that JAX gives
        them.
      row_names: `[rows]` names of the rows.

    Raises:
      TypeError: `values` are not numbers.
      ValueError: a value is NaN or infinite, or does not fit in the dtype that JAX gives
        it. The numbers of rows and names differ, or a name occurs twice.
    """

    values: np.ndarray
    row_names: Names

    def __init__(self, values: object, row_names: Iterable[object]):
        array, names = dense_rows("values", values), _names.as_names(row_names)
        if len(names) != len(array):
            raise ValueError(
                f"values has {len(array):,} rows but {len(names):,} row names were given"
            )
        _names.check_unique(names, "row")
        object.__setattr__(self, "values", array)
        object.__setattr__(self, "row_names", names)

    def __repr__(self) -> str:
        shape = " x ".join(f"{size:,}" for size in self.values.shape[1:])
        return f"DenseDataset({self.num_rows:,} rows of {shape or 'one'} {self.values.dtype})"

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def align_rows(
        self, rows: RowNames | Iterable[object], *, fill: float | None = None
    ) -> DenseDataset:
        """Selects the rows with the given names, in the given order.

        Args:
          rows: names, or a data set whose row names are used.
          fill: value of all elements of a row that this data set lacks. By default such a row
            is an error.

        Raises:
          ValueError: a name is not in this data set, and `fill` is not given.
        """
        wanted = _names.of_rows(rows)
        found = _names.find_names(wanted, self.row_names)
        missing = wanted[found < 0]
        if not missing.size:
            return DenseDataset(self.values[found], wanted)
        if fill is None:
            raise ValueError(
                f"{missing.size:,} of {wanted.size:,} rows are not in the data set: "
                f"{_names.quoted(missing)}; fill=0 gives them rows of zeros"
            )
        shape = (len(wanted), *self.values.shape[1:])
        values = np.full(shape, fill, self.values.dtype)
        if values.size and values.flat[0] != fill:
            raise ValueError(f"{fill=} cannot be stored as {values.dtype}")
        values[found >= 0] = self.values[found[found >= 0]]
        return DenseDataset(values, wanted)


def dense_rows(what: str, values: object) -> np.ndarray:
    """Checks numbers `[rows, ...]` and converts them to the dtype that JAX gives them.

    Raises:
      TypeError: the values are not numbers.
      ValueError: the values are one number, or one of them is NaN, infinite or too large.
    """
    given = np.asarray(values)
    floats = jnp.issubdtype(given.dtype, jnp.floating)  # also bfloat16
    if not floats and given.dtype.kind not in "biu":
        raise TypeError(f"{what} must be real numbers, got {given.dtype}")
    if given.ndim == 0:
        raise ValueError(f"{what} must have a row for each example, got one number")
    with np.errstate(over="ignore"):
        array = given.astype(jax.dtypes.canonicalize_dtype(given.dtype), copy=False)
    bad = ~np.isfinite(array) if floats else array != given
    if bad.any():
        at = np.unravel_index(int(np.argmax(bad)), bad.shape)
        place = ", ".join(map(str, at))
        why = f", too large for {array.dtype}" if np.isfinite(given[at]) else ""
        raise ValueError(f"{what}[{place}] is {given[at]}{why}")
    return array
