"""CSR, a sparse matrix in compressed sparse rows with a static capacity."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

Array = jax.Array | np.ndarray

MAX_ENTRIES = 2**31 - 1  # the largest number in `indptr` and `indices`, which are int32


class Transposed(NamedTuple):
    """The entries of a matrix by column: its transpose, without the empty columns.

    Attributes:
      columns: `[nse]` int32: the column of each entry. They ascend, or equal ones are
        neighbours in another order, which does not change sums but in rounding. Entries that
        do not count (padding, out of range) have `num_cols`, so they are at the end.
      rows: `[nse]` int32, the row of each entry; rows ascend within a column.
      order: `[nse]` int32, the place of each entry in the matrix.
      indptr: `[capacity + 1]` int32, where the u-th column that occurs starts;
        `capacity` is the smaller of `nse` and `num_cols`.
    """

    columns: jax.Array
    rows: jax.Array
    order: jax.Array
    indptr: jax.Array

    @classmethod
    def of(cls, columns: jax.Array, rows: jax.Array, num_cols: int) -> Transposed:
        """Sorts entries, given the column (`num_cols` if it does not count) and row of each.

        With a leading axis it does so for a stack of matrices, in one sort. On a GPU that
        is far quicker than one sort for each.
        """
        if columns.ndim == 1:
            stack = cls.of(columns[None], rows[None], num_cols)
            return jax.tree.map(lambda a: a[0], stack)
        stack, nse = columns.shape
        positions = jnp.broadcast_to(jnp.arange(nse, dtype=jnp.int32), (stack, nse))
        if stack * (num_cols + 1) <= 2**32 and columns.size < 2**31:
            firsts = jnp.arange(stack, dtype=jnp.uint32)[:, None]
            key = firsts * jnp.uint32(num_cols + 1) + columns.astype(jnp.uint32)
            entries = jnp.arange(columns.size, dtype=jnp.int32)
            key, order = lax.sort_key_val(key.reshape(-1), entries, is_stable=True)
            rows = rows.reshape(-1)[order].reshape(stack, nse)
            order = order.reshape(stack, nse) - firsts.astype(jnp.int32) * nse
            columns = key.reshape(stack, nse) - firsts * jnp.uint32(num_cols + 1)
            columns = columns.astype(jnp.int32)
        else:
            columns, order = lax.sort_key_val(columns, positions, is_stable=True)
            rows = jnp.take_along_axis(rows, order, axis=1)
        used = columns < num_cols
        first, number = _numbered(columns, num_cols)
        capacity = min(nse, num_cols)
        # All positions differ, also those to be dropped, so that XLA's deterministic operations do
        # not change the scatter. Otherwise they would take a position out of range in one matrix
        # as a position in the next matrix, whose first column would be lost.
        dropped = capacity + 1 + positions
        slot = jnp.where(first, number, dropped)
        count = jnp.sum(used, axis=1, dtype=jnp.int32)[:, None]
        indptr = jnp.broadcast_to(count, (stack, capacity + 1))
        each = jnp.arange(stack, dtype=jnp.int32)[:, None]
        indptr = indptr.at[each, slot].set(positions, mode="drop", unique_indices=True)
        return cls(columns, rows.astype(jnp.int32), order, indptr)

    def numbers(self, num_cols: int) -> jax.Array:
        """`[nse]`: for each entry, the index of its column among the columns with entries.

        An entry that does not count has the number of the last column. As in `of`, so
        that both are one operation of XLA.
        """
        return _numbered(self.columns[None], num_cols)[1][0]

    def ends(self) -> jax.Array:
        """`[nse]`: at the last entry of each column the column, -1 at all other entries."""
        column = self.columns
        following = jnp.concatenate([column[1:], jnp.full(1, -1, jnp.int32)])
        position = jnp.arange(column.shape[0], dtype=jnp.int32)
        is_last = (position < self.indptr[-1]) & (column != following)
        return jnp.where(is_last, column, -1)

    def distinct(self, padding: int) -> jax.Array:
        """`[capacity]`: the columns that occur, ascending, padded with `padding`."""
        starts = self.indptr[:-1]
        columns = self.columns.at[starts].get(mode="clip")
        return jnp.where(starts < self.indptr[-1], columns, padding)


def _numbered(columns: jax.Array, num_cols: int) -> tuple[jax.Array, jax.Array]:
    """A mask of where each distinct valid column begins, and the number of each entry's column,
    `[stack, nse]`.
    """
    before = jnp.pad(columns, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    first = (columns < num_cols) & (columns != before)
    return first, sums_so_far(first) - 1


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class CSR:
    """A `[rows, num_cols]` sparse matrix in compressed sparse row form.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[1, 0, 2.0], [0, 0, 0]]), nse=4)
    >>> x.shape, x.nse, x.indptr.tolist()
    ((2, 3), 4, [0, 2, 2])

    Row `r` holds the entries `indptr[r] .. indptr[r + 1] - 1`::

        matrix            indptr   0   2 2     5      nse = 7
        [ a . b . ]                |   | |     |
        [ . . . . ]       indices  0 2   0 1 3 * *    * = padding
        [ c d . e ]       data     a b   c d e * *

    The capacity `nse` is static, so one compiled program serves every batch that fits
    in it. Entries at or beyond `indptr[-1]` are padding, which no operation reads. Indices ascend within a row; where a row means a set (labels,
    items to exclude) they are also unique. `CSR.from_scipy` ensures both.

    NumPy leaves are checked when the object is made. JAX arrays are not, because looking
    at them would wait for the device. Operations are safe without the check: an index
    outside `[0, num_cols)` makes its row NaN, and nothing is read out of bounds. In an
    *overfull* CSR (`indptr[-1] > nse`, see `take`) the rows that do not fit are NaN.

    A CSR is a pytree: it can be a jit argument, a scan carry, or an `nnx` argument. A
    leading axis on every leaf, as `jax.lax.scan` and `jax.vmap` use it, makes it a
    stack of matrices.

    Attributes:
      data: `[nse]` values, or None for an indicator matrix (every entry is 1).
      indices: `[nse]` int32, the column of each entry.
      indptr: `[rows + 1]` int32, where each row starts.
      num_cols: number of columns (static).
      transposed: entries in the order of their columns, if they were sorted ahead of
        time, see `with_transposed`.

    Raises:
      ValueError: NumPy leaves that are not a CSR; the message names row and column.
    """

    data: Array | None
    indices: Array
    indptr: Array
    num_cols: int = dataclasses.field(kw_only=True)
    transposed: Transposed | None = dataclasses.field(kw_only=True, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.indices, np.ndarray) and isinstance(self.indptr, np.ndarray):
            _check(self)

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        names = ("data", "indices", "indptr", "transposed")
        return [(key(name), getattr(self, name)) for name in names], self.num_cols

    @classmethod
    def tree_unflatten(cls, num_cols, leaves) -> CSR:
        # The constructor's checks are skipped: leaves may be tracers, shapes, or anything that
        # tree.map returned.
        self = object.__new__(cls)
        names = ("data", "indices", "indptr", "transposed", "num_cols")
        for name, value in zip(names, (*leaves, num_cols), strict=True):
            object.__setattr__(self, name, value)
        return self

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.indptr.shape[-1] - 1

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, num_cols)`."""
        return self.num_rows, self.num_cols

    @property
    def nse(self) -> int:
        """Capacity: number of entries that can be stored, padding included."""
        return self.indices.shape[-1]

    def with_data(self, data: Array | None) -> CSR:
        """The same entries with other values. None makes an indicator."""
        return dataclasses.replace(self, data=data)

    def with_indices(self, indices: Array, num_cols: int | None = None) -> CSR:
        """The same rows and values with other columns, which are not checked."""
        width = self.num_cols if num_cols is None else num_cols
        return CSR.tree_unflatten(width, (self.data, indices, self.indptr, None))

    def row_lengths(self) -> jax.Array:
        """`[rows]` int32: number of entries of each row."""
        return jnp.diff(self.indptr)

    def row_ids(self) -> jax.Array:
        """`[nse]` int32: the row of each entry; `rows` for padding."""
        return segment_ids(self.indptr, self.nse)

    def column_ids(self) -> jax.Array:
        """`[nse]` int32: the column of each entry; arbitrary for padding."""
        return jnp.asarray(self.indices)

    def columns(self, *, padding: int) -> jax.Array:
        """`[nse]` int32: the column of each entry; `padding` if it does not count."""
        position = jnp.arange(self.nse, dtype=jnp.int32)
        columns = jnp.asarray(self.indices)
        used = (position < jnp.asarray(self.indptr)[-1]) & (columns >= 0)
        used &= columns < self.num_cols
        return jnp.where(used, columns, padding).astype(jnp.int32)

    def overfull_rows(self) -> jax.Array:
        """`[rows]` bool: rows whose entries do not all fit in the capacity."""
        return jnp.asarray(self.indptr)[1:] > self.nse

    @classmethod
    def from_scipy(cls, matrix, *, nse: int | None = None) -> CSR:
        """Makes a host (NumPy) CSR from any SciPy sparse matrix or array.

        Rows are sorted and duplicates summed, in float64. A boolean matrix becomes an
        indicator.

        Args:
          matrix: SciPy sparse, `[rows, cols]`.
          nse: capacity; the number of entries by default.

        Raises:
          TypeError: `matrix` is not SciPy sparse, or complex.
          ValueError: a value is NaN or infinite, or becomes so in float32; the entries do
            not fit in `nse`; the numbers of columns or entries do not fit in int32;
            `matrix` is a vector.
        """
        if not scipy.sparse.issparse(matrix):
            raise TypeError(
                f"expected a SciPy sparse matrix, got {type(matrix).__name__}; "
                "wrap a dense array in scipy.sparse.csr_array(...)"
            )
        if matrix.ndim != 2:
            raise ValueError(f"expected a matrix, got the shape {matrix.shape}")
        if np.issubdtype(matrix.dtype, np.complexfloating):
            raise TypeError("values must be real, got complex ones")
        csr = summed(matrix)
        data = None
        if csr.dtype != np.bool_:
            is_float = np.issubdtype(matrix.dtype, np.floating)
            with np.errstate(over="ignore"):  # infinite values are found below
                dtype = matrix.dtype if is_float else np.float32
                data = csr.data.astype(dtype, copy=False)
        indices, indptr = csr.indices, csr.indptr
        if indptr[-1] > MAX_ENTRIES:
            raise ValueError(
                f"{indptr[-1]:,} entries do not fit in int32 offsets (2^31 - 1); "
                "split the rows over several devices"
            )
        nse = int(indptr[-1]) if nse is None else nse
        if nse < indptr[-1]:
            raise ValueError(f"{indptr[-1]:,} entries do not fit in nse={nse:,}")
        pad = (0, nse - len(indices))
        return cls(
            None if data is None else np.pad(data, pad),
            np.pad(as_int32("indices", indices), pad),
            as_int32("indptr", indptr),
            num_cols=matrix.shape[1],
        )

    def to_scipy(self) -> scipy.sparse.csr_array:
        """The same matrix as a SciPy `csr_array`, without the padding.

        Raises:
          ValueError: it is overfull, or a column is outside.
        """
        indptr = np.asarray(self.indptr)
        count = int(indptr[-1])
        if count > self.nse:
            raise ValueError(f"overfull CSR: {count:,} entries, capacity {self.nse:,}")
        indices: np.ndarray = np.asarray(self.indices)[:count]
        outside = indices[(indices < 0) | (indices >= self.num_cols)]
        if outside.size:
            raise ValueError(f"column {outside[0]} is outside [0, {self.num_cols})")
        data: np.ndarray = np.ones(count, np.float32)
        if self.data is not None:
            data = np.asarray(self.data)[:count]
        return scipy.sparse.csr_array((data, indices, indptr), shape=self.shape)

    def todense(self) -> jax.Array:
        """The dense `[rows, num_cols]` array, for tests and small matrices."""
        values = jnp.ones(self.nse) if self.data is None else jnp.asarray(self.data)
        rows = self.row_ids()
        inside = (self.indices >= 0) & (self.indices < self.num_cols)
        dense = jnp.zeros(self.shape, values.dtype)
        dense = dense.at[jnp.where(inside, rows, self.num_rows), self.indices].add(
            values, mode="drop"
        )
        bad = jnp.zeros(self.num_rows, bool).at[rows].max(~inside, mode="drop")
        return jnp.where((bad | self.overfull_rows())[:, None], jnp.nan, dense)

    def take(self, rows: ArrayLike, *, nse: int | None = None) -> CSR:
        """The CSR of the given rows, in the given order.

        Differentiable in `data`. Reads `2 len(rows)` offsets and `nse` entries.

        Args:
          rows: `[n]` integers in `[0, num_rows)`.
          nse: capacity of the result; the exact count by default, which needs concrete
            `rows` and `indptr`.

        Raises:
          ValueError: outside of tracing, if a row does not exist or the rows do not fit
            in `nse`. Under tracing nothing can be raised: a row that does not exist is
            empty, and rows that do not fit give NaN in every operation.
        """
        rows = jnp.asarray(rows)
        if rows.ndim != 1 or not (
            rows.size == 0 or jnp.issubdtype(rows.dtype, jnp.integer)
        ):
            raise ValueError(
                f"rows must be a vector of integers, got {rows.dtype}{list(rows.shape)}"
            )
        rows = rows.astype(jnp.int32)
        concrete = not any(isinstance(a, jax.core.Tracer) for a in (rows, self.indptr))
        if concrete:
            host = np.asarray(rows)
            bad = host[(host < 0) | (host >= self.num_rows)]
            if bad.size:
                raise ValueError(f"row {bad[0]} does not exist: shape is {self.shape}")
            ptr = np.asarray(self.indptr, np.int64)
            needed = int(np.sum(ptr[host + 1] - ptr[host]))
            nse = needed if nse is None else nse
            if needed > nse:
                raise ValueError(f"the rows hold {needed:,} entries but nse={nse:,}")
        elif nse is None:
            raise ValueError("take needs nse=... when it is traced (inside jax.jit)")
        return take_rows(self, rows, nse)

    def transpose(self) -> CSR:
        """The `[num_cols, rows]` transpose, with the same capacity.

        A stable sort of the entries by column: within a column, rows ascend. Entries
        outside the columns or the capacity are left out.
        """
        by_column = self.by_column()
        indptr = jnp.searchsorted(by_column.columns, jnp.arange(self.num_cols + 1))
        indptr = indptr.astype(jnp.int32)
        data = None if self.data is None else jnp.asarray(self.data)[by_column.order]
        return CSR(data, by_column.rows, indptr, num_cols=self.num_rows)

    def with_transposed(self) -> CSR:
        """This matrix, or stack of matrices, with its entries also sorted by column.

        A row gradient begins with this sort. It depends on the indices only, so it can
        be done for many steps at once, and stays valid when `data` is replaced.
        """
        return dataclasses.replace(self, transposed=self.by_column())

    def by_column(self) -> Transposed:
        """The entries by column. They are sorted now, unless `transposed` has them."""
        if self.transposed is not None:
            return self.transposed

        def entries(x: CSR):
            return x.columns(padding=self.num_cols), x.row_ids()

        for _ in range(jnp.ndim(self.indices) - 1):
            entries = jax.vmap(entries)
        columns, rows = entries(self)
        return Transposed.of(columns, rows, self.num_cols)


def take_rows(matrix: CSR, rows: jax.Array, nse: int) -> CSR:
    """`CSR.take` without checks; a row outside `[0, num_rows)` is empty.

    An entry that is missing in an overfull matrix gets the column -1, which makes its
    row NaN.
    """
    exists = (rows >= 0) & (rows < matrix.num_rows)
    rows = jnp.where(exists, rows, 0)
    indptr = jnp.asarray(matrix.indptr)
    starts = indptr[rows]
    lengths = jnp.where(exists, indptr[rows + 1] - starts, 0)
    zero = jnp.zeros(1, jnp.int32)
    taken = jnp.concatenate([zero, sums_so_far(lengths)])
    if matrix.nse == 0 or rows.size == 0:  # there are no entries or rows to read
        lacking = jnp.full(nse, -1, jnp.int32)
        data = None if matrix.data is None else jnp.zeros(nse, matrix.data.dtype)
        return CSR(data, lacking, taken, num_cols=matrix.num_cols)
    positions = jnp.arange(nse, dtype=jnp.int32)
    row = segment_ids(taken, nse)
    # Padding reads some row, whose value is not used.
    row = jnp.minimum(row, rows.shape[0] - 1)
    source = starts[row] + positions - taken[row]
    lacking = source >= matrix.nse
    source = jnp.clip(source, 0, matrix.nse - 1)
    data = None if matrix.data is None else jnp.asarray(matrix.data)[source]
    indices = jnp.where(lacking, -1, jnp.asarray(matrix.indices)[source])
    return CSR(data, indices, taken, num_cols=matrix.num_cols)


def host_rows(matrix: CSR, rows: np.ndarray) -> CSR:
    """These rows of a NumPy matrix, in this order; -1 is an empty row."""
    ptr = np.asarray(matrix.indptr, np.int64)
    lengths = np.where(rows >= 0, ptr[rows + 1] - ptr[rows], 0)
    ends = np.cumsum(lengths)
    at = np.repeat(ptr[rows] - (ends - lengths), lengths) + np.arange(lengths.sum())
    data = None if matrix.data is None else np.asarray(matrix.data)[at]
    indices = np.asarray(matrix.indices)[at]
    indptr = np.concatenate([[0], ends])
    # The constructor would check every entry again.
    return CSR.tree_unflatten(matrix.num_cols, (data, indices, indptr, None))


def with_room(matrix: CSR, nse: int) -> CSR:
    """A NumPy matrix whose capacity is `nse` entries."""
    more = (0, nse - matrix.nse)
    data = None if matrix.data is None else np.pad(matrix.data, more)
    indptr = matrix.indptr.astype(np.int32)
    leaves = (data, np.pad(matrix.indices, more), indptr, None)
    return CSR.tree_unflatten(matrix.num_cols, leaves)


def unit_rows(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """The rows of a SciPy matrix, each divided by its norm; an empty row stays empty."""
    lengths = np.diff(matrix.indptr)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    data = np.asarray(matrix.data, np.float64)
    norms = np.sqrt(np.bincount(row_of, data**2, minlength=len(lengths)))
    data = data / np.where(norms > 0, norms, 1)[row_of]
    return scipy.sparse.csr_array((data, matrix.indices, matrix.indptr), matrix.shape)


def segment_ids(indptr: ArrayLike, size: int) -> jax.Array:
    """`[size]` int32: for each position the r with `indptr[r] <= position < indptr[r + 1]`.

    Counting the ends passed is quicker than a binary search for each position: on an
    H200, 4 us against 38 for half a million positions in 1,024 segments.
    """
    ends = jnp.asarray(indptr)[1:]
    return sums_so_far(jnp.zeros(size, jnp.int32).at[ends].add(1, mode="drop"))


@jax.jit
def sums_so_far(counts: jax.Array) -> jax.Array:
    """`jnp.cumsum(counts, axis=-1)` in int32.

    No mesh divides the last axis. Each number of a sum that XLA divides is a step of a loop
    on a GPU: 1.7 million took 5 seconds (jax 0.11.2).
    """
    counts, axis = jnp.asarray(counts, jnp.int32), jnp.ndim(counts) - 1
    mesh = jax.sharding.get_abstract_mesh()
    is_divided_by_types = any(kind != AxisType.Auto for kind in mesh.axis_types)
    if mesh.empty or mesh.manual_axes or is_divided_by_types:
        return lax.cumsum(counts, axis)
    spec = jax.P(*[jax.P.UNCONSTRAINED] * axis, None)
    sums = lax.cumsum(lax.with_sharding_constraint(counts, spec), axis)
    return lax.with_sharding_constraint(sums, spec)


def as_int32(what: str, values: np.ndarray) -> np.ndarray:
    """Integers of any width as int32.

    Raises:
      ValueError: one does not fit. It would become another number.
    """
    if values.dtype == np.int32:
        return values
    bounds = np.iinfo(np.int32)
    outside = (values < bounds.min) | (values > bounds.max)
    if outside.any():
        raise ValueError(
            f"{what} has the number {values[outside][0]:,}, which does not fit in int32"
        )
    return values.astype(np.int32)


def summed(
    matrix: scipy.sparse.sparray | scipy.sparse.spmatrix,
) -> scipy.sparse.csr_array:
    """The matrix with sorted rows, and without duplicates: these are added in float64.

    In the type of the matrix, sums of uint8 would wrap and sums of float32 be rounded.
    A boolean matrix stays one.
    """
    is_bool = matrix.dtype == np.bool_  # pyrefly: ignore
    if is_bool or matrix.format in ("csr", "csc"):  # pyrefly: ignore
        csr = scipy.sparse.csr_array(matrix, copy=True)
        if not (is_bool or csr.has_canonical_format):
            csr.data = csr.data.astype(np.float64)
    else:
        # Conversion of other formats to bool would lose duplicates, which must be added.
        csr = scipy.sparse.csr_array(matrix.astype(np.float64))  # pyrefly: ignore
    csr.sum_duplicates()  # this sorts the columns, too
    return csr


def _check(csr: CSR) -> None:
    """Raises ValueError if NumPy leaves are not a CSR."""
    if csr.num_cols > MAX_ENTRIES:
        raise ValueError(
            f"{csr.num_cols:,} columns do not fit in int32 indices (2^31 - 1)"
        )
    indices, indptr = np.asarray(csr.indices), np.asarray(csr.indptr)
    if indices.ndim > 1 or indptr.ndim > 1:
        return  # A stack of matrices. Each was checked when it was made.
    for name, array in (("indices", indices), ("indptr", indptr)):
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name} must be integers, got {array.dtype}")
    if indptr.size == 0 or indptr[0] != 0:
        raise ValueError("indptr must start with 0 and have rows + 1 elements")
    # Compared without a difference, which may overflow.
    falling = np.flatnonzero(indptr[1:] < indptr[:-1])
    if falling.size:
        r = falling[0]
        raise ValueError(
            f"indptr falls from {indptr[r]} to {indptr[r + 1]} at row {r}; "
            "it must not decrease"
        )
    count = int(indptr[-1])
    if count > indices.size:
        raise ValueError(f"indptr ends at {count} but there are {indices.size} indices")
    used = indices[:count]

    def place(entry) -> str:
        row = int(np.searchsorted(indptr, entry, side="right")) - 1
        return f"row {row}, column {indices[entry]}"

    if count and (used.min() < 0 or used.max() >= csr.num_cols):
        outside = np.flatnonzero((used < 0) | (used >= csr.num_cols))
        raise ValueError(
            f"{place(outside[0])}: the column is outside [0, {csr.num_cols})"
        )
    descending = used[1:] < used[:-1]
    starts = indptr[1:-1]
    descending[starts[(starts > 0) & (starts < count)] - 1] = False
    if descending.any():
        entry = int(np.flatnonzero(descending)[0]) + 1
        raise ValueError(
            f"{place(entry)} follows column {indices[entry - 1]}: indices must ascend "
            "within a row; CSR.from_scipy sorts them"
        )
    data = csr.data
    # Values may be traced although the indices are not.
    if not isinstance(data, np.ndarray):
        return
    if data.shape != indices.shape:
        raise ValueError(f"data has shape {data.shape}, indices {indices.shape}")
    dtype = jax.dtypes.canonicalize_dtype(data.dtype)
    with np.errstate(over="ignore"):
        on_device = data[:count].astype(dtype, copy=False)
    bad = np.flatnonzero(~np.isfinite(on_device))
    if bad.size:
        raise ValueError(f"{place(bad[0])}: the value is {on_device[bad[0]]}")
