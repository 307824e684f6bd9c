"""A data set as stored in a DSSTNE file, and its form for a model."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy.sparse

from sparsejax.data import DenseDataset, SparseDataset
from sparsejax.data.files.names import Names
from sparsejax.data.sets.dense import dense_rows
from sparsejax.dsstne.index_files import column_names, without_padding
from sparsejax.mesh.layout import available_memory
from sparsejax.sparse import CSR, MAX_ENTRIES

# Largest ratio of an array's bytes to its compressed bytes in the file. Deflate, which NetCDF
# uses, exceeds it only for equal bytes: its highest ratio is 1,032.
_MAX_RATIO = 1000
# Bytes of memory per name of a column, and per entry when the entries of rows are sorted.
_NAME, _SORTING = 128, 48
# Even for smaller files, the limit on columns without names is that of a file with so many bytes.
_FREE_STORED = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class SparseRows:
    """Sparse rows: row `r` has the entries `starts[r] .. ends[r] - 1`.

    Rows may be anywhere in the arrays, in any order, and may overlap. An index may occur several
    times in a row.

    Attributes:
      starts: `[rows]` integers.
      ends: `[rows]` integers.
      indices: `[entries]` integers, the column of each entry.
      values: `[entries]` numbers, or None (indicator: every entry is 1).
    """

    starts: np.ndarray
    ends: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Classes:
    """Rows of zeros with a single 1 (Boolean data that is not sparse).

    Attributes:
      ids: `[rows]` integers, the column of the 1.
    """

    ids: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class FileDataset:
    """A data set as it is stored in a DSSTNE file.

    Attributes:
      size: width, or width and height, or width, height and length of an example. Their
        product is the number of columns.
      rows: the distinct examples: sparse rows, classes, or a dense array
        `[rows, width]`, `[rows, height, width]` or `[rows, length, height, width]`.
      index: `[examples]` integers, the row of each example (Indexed); None if example `i`
        is row `i`.
      weights: the weight of each example, or of each row if there are as many weights as
        rows (Weighted); None if they are all 1.
      ignore_zeros: whether only listed entries count in a loss (SparseIgnoreZero); see the
        `ignore_zeros` of losses.
      feature_names: `[up to columns]` text, or None.
      row_names: `[examples]` text, or None.
    """

    size: tuple[int, ...]
    rows: SparseRows | Classes | np.ndarray
    index: np.ndarray | None = None
    weights: np.ndarray | None = None
    ignore_zeros: bool = False
    feature_names: Names | None = None
    row_names: Names | None = None

    @property
    def columns(self) -> int:
        """Number of columns: width x height x length."""
        return math.prod(self.size)

    @property
    def is_sparse(self) -> bool:
        """Whether rows are stored as entries, rather than as a number for each column."""
        return isinstance(self.rows, SparseRows | Classes)

    @property
    def num_unique(self) -> int:
        """Number of rows in the file; several examples may share one."""
        match self.rows:
            case SparseRows(starts=starts):
                return len(starts)
            case Classes(ids=ids):
                return len(ids)
            case rows:
                return len(rows)

    @property
    def num_examples(self) -> int:
        return self.num_unique if self.index is None else len(self.index)

    def example_weights(self) -> np.ndarray | None:
        """`[examples]` float32, for `fit(weights=)`; None if all are 1."""
        if self.weights is None:
            return None
        weights = np.asarray(self.weights, np.float32)
        if self.index is not None and len(weights) == self.num_unique:
            return weights[self.index]
        return weights

    @classmethod
    def of(
        cls,
        source: SparseDataset | DenseDataset | np.ndarray,
        *,
        weights: np.ndarray | None = None,
        ignore_zeros: bool = False,
    ) -> FileDataset:
        """Makes a data set of a file from data in memory.

        64-bit integers become 32-bit integers, since DSSTNE reads no others, and
        booleans become 0 and 1. A dense row has one to three axes.

        Raises:
          TypeError: `source` has another type.
          ValueError: the data cannot be written in this form.
        """
        if isinstance(source, SparseDataset):
            matrix = source.matrix
            data = None if matrix.data is None else np.asarray(matrix.data)
            indptr = np.asarray(matrix.indptr)
            indices = np.asarray(matrix.indices)
            entries = SparseRows(indptr[:-1], indptr[1:], indices, data)
            return cls(
                (source.num_features,),
                entries,
                weights=weights,
                ignore_zeros=ignore_zeros,
                feature_names=without_padding(source.feature_names),
                row_names=source.row_names,
            )
        names = source.row_names if isinstance(source, DenseDataset) else None
        if names is None and not isinstance(source, np.ndarray):
            raise TypeError(
                "expected a SparseDataset, a DenseDataset or a NumPy array, got "
                f"{type(source).__name__}"
            )
        values = source.values if isinstance(source, DenseDataset) else source
        values = dense_rows("the array", values)
        if values.dtype.kind == "b":
            values = values.astype(np.int32)
        if values.dtype.kind == "f" and values.dtype.itemsize < 4:
            values = values.astype(np.float32)
        if not 2 <= values.ndim <= 4:
            raise ValueError(
                "a row of a dense data set has one to three axes, got the shape "
                f"{values.shape}"
            )
        size = tuple(reversed(values.shape[1:]))
        return cls(size, values, weights=weights, row_names=names)

    def source(
        self,
        *,
        target: bool = False,
        feature_names: Names | None = None,
        row_names: Names | None = None,
    ) -> SparseDataset | DenseDataset | np.ndarray:
        """Converts the examples to data that `fit` and `recommend` accept.

        Sparse rows and classes become a `SparseDataset`. Entries in one row and column are
        merged to an indicator, or to their sum. Dense rows become float32, and with names a
        `DenseDataset`. DSSTNE scales bytes: the type UChar to `x / 256`, in
        dense inputs to `x / 256 - 0.5`, and the type Char to `x / 128`.

        Args:
          target: whether a model should predict this data set; otherwise it is an input.
          feature_names: names of the first columns; by default the names in the file.
            Other columns are padding. Without any names, columns are named by their numbers.
          row_names: names of the examples; by default the names in the file. Without
            any names, sparse rows are named by their numbers.

        Raises:
          ValueError: there are more names than columns, or another number of names than
            examples; or the data would take too much memory.
        """
        features = self.feature_names if feature_names is None else feature_names
        names = self.row_names if row_names is None else row_names
        if names is not None and len(names) != self.num_examples:
            raise ValueError(
                f"the index has {len(names):,} samples but the data set has "
                f"{self.num_examples:,} examples; give the index that was written with it"
            )
        found = self.examples(target=target)
        if isinstance(found, np.ndarray):
            return found if names is None else DenseDataset(found, names)
        if features is None or len(features) < self.columns:
            stored = max(found.indices.nbytes, _FREE_STORED)
            check_memory("the names of the columns", _NAME * self.columns, stored)
        columns = column_names(features, self.columns)
        if names is None:
            names = column_names(None, self.num_examples)
        return SparseDataset(found, names, columns)

    def examples(self, *, target: bool = False) -> CSR | np.ndarray:
        """The examples of `source` without names, which take memory: a `CSR` or an array."""
        if isinstance(self.rows, np.ndarray):
            return self._dense(self.rows, target)
        return self._matrix()

    def _dense(self, rows: np.ndarray, target: bool) -> np.ndarray:
        stored = rows.nbytes
        if self.index is not None:
            stored += self.index.nbytes
        check_memory("the examples", 4 * self.num_examples * self.columns, stored)
        if self.index is not None:
            rows = rows[self.index]
        with np.errstate(over="ignore"):
            values = rows.astype(np.float32) * _scale(rows.dtype)
        if rows.dtype == np.uint8 and not target:
            values -= np.float32(0.5)
        return values

    def _matrix(self) -> CSR:
        if isinstance(self.rows, Classes):
            ids = self.rows.ids if self.index is None else self.rows.ids[self.index]
            indptr = np.arange(len(ids) + 1, dtype=np.int32)
            return CSR(None, ids.astype(np.int32), indptr, num_cols=self.columns)
        assert isinstance(self.rows, SparseRows)
        indices, values = self.rows.indices, self.rows.values
        starts = self.rows.starts.astype(np.int64)
        lengths = self.rows.ends.astype(np.int64) - starts
        stored = self.rows.starts.nbytes * 2 + indices.nbytes
        if self.index is not None:
            starts, lengths = starts[self.index], lengths[self.index]
            stored += self.index.nbytes
        # The sum is in float64: rows may overlap, so int64 could overflow.
        total = lengths.sum(dtype=np.float64)
        if total > MAX_ENTRIES:
            raise ValueError(
                f"the rows have {total:,.0f} entries, which do not fit in int32 offsets "
                "(2^31 - 1)"
            )
        check_memory("the rows", 4 * int(total), stored)
        check_fits("sorting the rows", _SORTING * int(total))
        ends = np.cumsum(lengths)
        indptr = np.concatenate([[0], ends])
        if not np.array_equal(starts, indptr[:-1]):
            at = np.repeat(starts - indptr[:-1], lengths) + np.arange(int(total))
            indices = indices[at]
            values = None if values is None else values[at]
        indices = indices[: int(total)].astype(np.int32)
        if values is None:
            data = np.ones(int(total), bool)
        else:
            data = values[: int(total)].astype(np.float64) * _scale(values.dtype)
        shape = (self.num_examples, self.columns)
        # `from_scipy` sorts the entries of a row, and adds up entries in the same column.
        matrix = CSR.from_scipy(
            scipy.sparse.csr_array((data, indices, indptr), shape=shape)
        )
        if matrix.data is None:
            return matrix
        return matrix.with_data(np.asarray(matrix.data, np.float32))


def _scale(dtype: np.dtype) -> np.float32:
    """The factor by which DSSTNE multiplies values with this dtype."""
    return np.float32({"u1": 1 / 256, "i1": 1 / 128}.get(dtype.str[1:], 1))


def check_memory(what: str, needed: int, stored: int) -> None:
    """Raises ValueError if data stored in `stored` bytes would need too much memory."""
    if needed > _MAX_RATIO * stored:
        raise ValueError(
            f"{what} would take {needed:,} bytes of memory, over {_MAX_RATIO:,} times "
            f"the {stored:,} bytes that are stored"
        )
    check_fits(what, needed)


def check_fits(what: str, needed: int) -> None:
    """Raises ValueError if the machine has less than `needed` bytes of free memory."""
    available = available_memory()
    if needed > available:
        raise ValueError(
            f"{what} would take {needed:,} bytes, but of the machine's memory {available:,} "
            "bytes are available"
        )


def find_problem(dataset: FileDataset, n: int) -> str | None:
    """The fault of the `n`-th data set of a file, with the variable's name; None without fault."""
    sizes = [*zip(("width", "height", "length"), dataset.size, strict=False)]
    if not 1 <= len(dataset.size) <= 3:
        return f"dimensions{n} is {len(dataset.size)}; expected 1 to 3"
    for name, size in sizes:
        if size < 1:
            return f"{name}{n} is {size}; expected at least 1"
    if dataset.columns > MAX_ENTRIES:
        product = " x ".join(f"{name}{n}" for name, _ in sizes)
        return (
            f"{product} is {dataset.columns:,}; at most 2^31 - 1 columns are supported"
        )
    rows = dataset.rows
    if isinstance(rows, SparseRows):
        problem = _sparse_problem(rows, dataset.columns, n)
    elif isinstance(rows, Classes):
        problem = _range_problem(f"data{n}", rows.ids, dataset.columns, "columns")
    else:
        problem = _finite_problem(f"data{n}", rows.reshape(-1))
        if rows.shape[1:] != tuple(reversed(dataset.size)):
            problem = f"data{n} has the shape {rows.shape}, the size is {dataset.size}"
    if problem is not None:
        return problem
    if dataset.num_examples == 0 or dataset.num_unique == 0:
        return f"examplesDim{n} is 0: the data set has no examples"
    if dataset.index is not None:
        problem = _range_problem(
            f"index{n}", dataset.index, dataset.num_unique, "unique examples"
        )
    if problem is None and dataset.weights is not None:
        found, counts = len(dataset.weights), {dataset.num_examples, dataset.num_unique}
        if found not in counts:
            return (
                f"dataWeight{n} has {found:,} weights for {dataset.num_examples:,} "
                "examples"
            )
        problem = _finite_problem(f"dataWeight{n}", dataset.weights)
    names = () if dataset.feature_names is None else dataset.feature_names
    if problem is None and len(names) > dataset.columns:
        return (
            f"indToFeature{n} has {len(names):,} names for {dataset.columns:,} columns"
        )
    return problem


def _sparse_problem(rows: SparseRows, columns: int, n: int) -> str | None:
    count = len(rows.indices)
    if count == 0:
        return f"sparseDataDim{n} is 0: the data set has no entries"
    if len(rows.ends) != len(rows.starts):
        return (
            f"sparseEnd{n} has {len(rows.ends):,} rows but sparseStart{n} has "
            f"{len(rows.starts):,}"
        )
    for name, places in (("sparseStart", rows.starts), ("sparseEnd", rows.ends)):
        outside = (places < 0) | (places > count)
        if outside.any():
            at = int(np.argmax(outside))
            return (
                f"{name}{n}[{at}] is {places[at]}, outside the {count:,} entries of "
                f"sparseIndex{n}"
            )
    falling = rows.starts > rows.ends
    if falling.any():
        at = int(np.argmax(falling))
        return (
            f"sparseEnd{n}[{at}] is {rows.ends[at]}, before sparseStart{n}[{at}], which "
            f"is {rows.starts[at]}"
        )
    problem = _range_problem(f"sparseIndex{n}", rows.indices, columns, "columns")
    if problem is None and rows.values is not None:
        if len(rows.values) != count:
            return (
                f"sparseData{n} has {len(rows.values):,} values but sparseIndex{n} has "
                f"{count:,} entries"
            )
        problem = _finite_problem(f"sparseData{n}", rows.values)
    return problem


def _range_problem(name: str, ids: np.ndarray, count: int, what: str) -> str | None:
    outside = (ids < 0) | (ids >= count)
    if not outside.any():
        return None
    at = int(np.argmax(outside))
    return f"{name}[{at}] is {ids[at]}, outside the {count:,} {what}"


def _finite_problem(name: str, values: np.ndarray) -> str | None:
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32, copy=False))
    if finite.all():
        return None
    at = int(np.argmin(finite))
    return f"{name}[{at}] is {values[at]}, which is no finite float32"
