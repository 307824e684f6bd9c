"""A data set that stays on disk and is read a part at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse

from sparsejax.data import parquet, scan_tables
from sparsejax.data.assemble import Features
from sparsejax.data.columns import Chosen, Column
from sparsejax.data.dataset import UnknownFeaturesWarning
from sparsejax.data.events import tables
from sparsejax.data.events.tables import TableLayout
from sparsejax.data.files import DataError, Path, shown
from sparsejax.data.folder import DataFolder
from sparsejax.data.names import Names, as_names, of_features, quoted
from sparsejax.data.parquet import ParquetPath
from sparsejax.data.scan_tables import Group
from sparsejax.sparse import CSR, MAX_ENTRIES


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedDataset:
    """Rows of sparse features on disk, which `fit` reads a chunk at a time.

    >>> read("purchases.tsv").save("purchases")
    >>> scan_parquet("purchases")
    ScannedDataset('purchases', 3 rows, 3 features)

    `scan_parquet` makes it. With several processes, each reads the rows that its devices
    train on.

    Attributes:
      path: the file, folder or address.
      vocabulary: `[features]` text, or the prepared folder that has it.
      indicator: whether every entry is 1.
      chunk_rows: about the number of rows of a chunk; None for as many as fit the devices.
      groups: the pieces that are read as a whole, in order.
      layout: the columns of a table; None for a saved data set.
    """

    path: Path
    vocabulary: Names | DataFolder
    indicator: bool
    chunk_rows: int | None
    groups: tuple[Group, ...]
    layout: TableLayout | None = None

    def __repr__(self) -> str:
        return (
            f"ScannedDataset({os.fspath(self.path)!r}, {self.num_rows:,} rows, "
            f"{self.num_features:,} features)"
        )

    @property
    def num_rows(self) -> int:
        return sum(group.rows for group in self.groups)

    @property
    def num_features(self) -> int:
        if isinstance(self.vocabulary, DataFolder):
            return self.vocabulary.manifest.num_items
        return len(self.vocabulary)

    @functools.cached_property
    def feature_names(self) -> Names:
        """`[features]` text. Those of a prepared folder are read when they are needed.

        Raises:
          DataError: their file is damaged.
        """
        if isinstance(self.vocabulary, DataFolder):
            return self.vocabulary.vocabulary()
        return self.vocabulary

    @property
    def num_entries(self) -> int:
        """Number of entries. In files without a manifest an empty row counts as one."""
        return sum(group.entries for group in self.groups)

    def read(self, start: int, stop: int) -> CSR:
        """Rows `start .. stop - 1`, in host memory.

        Entries of items that the vocabulary lacks are left out, with a warning.

        Raises:
          DataError: a file is damaged, or was changed since it was scanned. A row of a
            table is wrong; the message has its number.
        """
        wanted = scan_tables.pieces(self.groups, start, stop)
        if self.layout is not None:
            return self._read_table(wanted)[0]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            parts = list(threads.map(lambda part: self._read_group(*part), wanted))
        lengths = scan_tables.joined([part[0] for part in parts], np.int64)
        indices = scan_tables.joined([part[1] for part in parts], np.int32)
        values = None
        if not self.indicator:
            found = [part[2] for part in parts if part[2] is not None]
            values = scan_tables.joined(found, np.float32)
        indptr = np.append(0, np.cumsum(lengths))
        _check_entries(int(indptr[-1]))
        try:
            return CSR(
                values,
                indices,
                indptr.astype(np.int32),
                num_cols=self.num_features,
            )
        except ValueError as error:
            raise DataError.at(self.path, f"is damaged: {error}") from error

    def _read_table(self, parts: list[tuple[Group, int, int]]) -> tuple[CSR, float]:
        """Rows of a table, and the share of their entries that the vocabulary has."""
        assert self.layout is not None
        rows = scan_tables.read_rows(parts, self.layout, self._vocabulary)
        _check_entries(len(rows.columns))
        columns = rows.columns
        indptr = np.append(0, np.cumsum(rows.lengths))
        data = np.ones(len(columns), bool) if rows.values is None else rows.values
        known, share = columns >= 0, 1.0
        if not known.all():
            share = float(known.mean())
            indptr = np.append(0, np.cumsum(known))[indptr]
            columns, data = columns[known], data[known]
            warnings.warn(
                f"{shown(self.path)}: entries of features that are not among the "
                f"{self.num_features:,} known ones are left out",
                UnknownFeaturesWarning,
                skip_file_prefixes=(os.path.dirname(__file__),),
            )
        shape = (len(rows.lengths), self.num_features)
        # With int64 offsets SciPy would make the indices int64, too.
        arrays = data, columns, indptr.astype(np.int32)
        matrix = scipy.sparse.csr_array(arrays, shape=shape)
        matrix.sum_duplicates()  # this also sorts
        with np.errstate(
            over="ignore"
        ):  # too large a value becomes inf; CSR reports it
            values = None if self.indicator else matrix.data.astype(np.float32)
        try:
            arrays = values, matrix.indices, matrix.indptr
            return CSR(*arrays, num_cols=self.num_features), share
        except ValueError as error:  # a sum of finite values need not be finite
            raise DataError.at(self.path, str(error)) from error

    @functools.cached_property
    def _vocabulary(self) -> scan_tables.Vocabulary:
        return scan_tables.Vocabulary(self.feature_names)

    def _read_group(self, group: Group, low: int, high: int):
        """Lengths, indices and values of some rows of a group."""
        columns = ["indices"] if self.indicator else ["indices", "values"]
        with group.file.open(one_group=True) as file:
            if not set(columns) <= set(file.schema_arrow.names):
                raise group.file.changed()
            table = file.read_row_group(group.number, columns=columns)
        lists = [
            table.column(name).drop_null().slice(low, high - low) for name in columns
        ]
        lengths = [list_lengths(column) for column in lists]
        if len(lengths[0]) != high - low or any(
            not np.array_equal(lengths[0], other) for other in lengths[1:]
        ):
            raise group.file.changed()
        indices = flat_list(lists[0], pa.int32())
        values = None if self.indicator else flat_list(lists[1], pa.float32())
        return lengths[0], indices, values

    def fingerprint(self) -> str:
        """A hash of the files' metadata, not of their content."""
        return scan_tables.fingerprint(self.groups, self.layout, self.feature_names)


def scan_parquet(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    features: Features = None,
    indicator: bool = False,
    chunk_rows: int | None = None,
) -> ScannedDataset:
    """Scans Parquet files without keeping their rows, so that `fit` reads them in chunks.

    >>> read("purchases.tsv").save("purchases")
    >>> scan_parquet("purchases").num_rows
    3

    Use it for data that is larger than the memory of the devices or of a host. While `fit`
    trains on a chunk, it reads the next one. Each epoch has another order of the chunks
    and of the rows within each chunk. Rows of different chunks are not mixed: shuffle the
    rows once, when you write the files.

    The files hold one of these:

    * a folder that `sparsejax.prepare` wrote. Only its manifest is read at first, however
      many files it has, and its rows are shuffled already;
    * what `SparseDataset.save` or `sparsejax convert` wrote: the quickest to read;
    * a table with a list of items on each row, as `from_arrow` takes it. Each row is an
      example: rows of the same user are not merged, and a user column is not needed;
    * a table of pairs, sorted by its user column: integers by size, text by its bytes,
      as databases do. That column is read once, to find where users begin.

    Args:
      path: a file or a folder of files of one kind, or an address, see `read_parquet`.
        Saved files of one folder must have the same vocabulary (`convert --features`).
      user: for a table, the column with the row's name; see `from_arrow`.
      item: the column with the feature's name, or with a list of names.
      value: the column with the value, or with a list of values.
      features: vocabulary to read a table against. Without it the item column is read
        once more, and the vocabulary is its items. They have the order of `read`, except
        that an item counts twice if a user has it twice.
      indicator: ignore values.
      chunk_rows: about the number of rows that are on the devices at a time, in whole row
        groups (a saved data set has groups of 65,536 rows). By default it is all rows, if
        they take less than a quarter of the memory of the devices that training uses,
        otherwise as many as take an eighth of it.

    Raises:
      DataError: a file is of another kind, is damaged, or differs from the first one.
        Pairs are not sorted.
      ValueError: `chunk_rows` is not positive. Columns or `features` are given for a saved
        data set.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")
    chosen = Chosen(user, item, value)
    if (folder := DataFolder.find(path)) is not None:
        _check_own(path, chosen, features)
        return ScannedDataset(
            path,
            folder,
            indicator or folder.manifest.indicator,
            chunk_rows,
            tuple(folder.groups()),
        )
    files = parquet.parquet_files(path)
    first, schema = parquet.first_schema(files)
    parquet.check_no_part(first, schema)
    if parquet.is_dataset(schema) or parquet.is_sequences(schema):
        _check_own(path, chosen, features)
        return _saved(path, files, indicator, chunk_rows)
    layout = tables.find_table_layout(
        first,
        schema,
        chosen,
        indicator=indicator,
        with_user=False,
        with_time=False,
    )
    groups = scan_tables.find_groups(files, layout)
    if not groups:
        raise DataError.at(path, "holds no data: there are no rows")
    names = _names(features)
    if names is None:
        names = scan_tables.find_vocabulary(files, layout)
        if not names.size:
            raise DataError.at(path, "none of the rows has a feature")
    valued = layout.value is not None
    scanned = ScannedDataset(path, names, not valued, chunk_rows, tuple(groups), layout)
    if features is not None:
        # This also finds other mistakes early.
        _, share = scanned._read_table([(groups[0], 0, groups[0].rows)])
        if share == 0:
            raise DataError.at(
                path,
                "all entries of the first row group are of features that the vocabulary "
                f"lacks; it has {quoted(names)}",
            )
    return scanned


def _check_own(path: Path, chosen: Chosen, features: Features) -> None:
    """Raises ValueError if the caller chooses what a saved data set has."""
    if chosen or features is not None:
        raise ValueError(
            f"{shown(path)}: is a saved data set, so it has no columns to name and "
            "has its own vocabulary; leave out user, item, value and features"
        )


def _names(features: Features) -> Names | None:
    """The names of a vocabulary that the caller gives, or None."""
    return None if features is None else of_features(features)


def _saved(
    path: Path, files: list[ParquetPath], indicator: bool, chunk_rows: int | None
) -> ScannedDataset:
    """Scans what `SparseDataset.save` wrote."""
    groups: list[Group] = []
    vocabulary: pa.Array | None = None
    valued = False
    for file in files:
        with file.open() as opened:
            parquet.check_schema(file.path, opened.schema_arrow)
            features = saved_features(opened)
            has_values = "values" in opened.schema_arrow.names
            found = [
                saved_group(file, opened, number)
                for number in range(opened.num_row_groups)
            ]
        if vocabulary is None:
            vocabulary, valued = features, has_values
        elif not features.equals(vocabulary) or has_values != valued:
            raise DataError.at(
                file.path,
                "has another vocabulary than the first file, or only one of them has "
                "values; write all with one vocabulary (sparsejax convert --features)",
            )
        groups += [group for group in found if group.rows]
    assert vocabulary is not None  # there is a file
    indicator = indicator or not valued
    return ScannedDataset(
        path, as_names(vocabulary), indicator, chunk_rows, tuple(groups)
    )


def _check_entries(count: int) -> None:
    if count > MAX_ENTRIES:
        raise ValueError(
            f"{count:,} entries do not fit in int32 offsets (2^31 - 1); scan with a "
            "smaller chunk_rows"
        )


def saved_features(file: pq.ParquetFile) -> pa.Array:
    names = file.read(columns=["feature"]).column("feature")
    return names.cast(pa.large_string()).drop_null().combine_chunks()


def saved_group(file: ParquetPath, opened: pq.ParquetFile, number: int) -> Group:
    """A row group, from the metadata if it has the numbers.

    Behind the last row, the names of rows are null.
    """
    group = opened.metadata.row_group(number)
    columns = {
        group.column(i).path_in_schema.partition(".")[0]: group.column(i)
        for i in range(group.num_columns)
    }
    statistics = columns["row"].statistics
    if statistics is not None and statistics.has_null_count:
        missing = statistics.null_count
    else:
        missing = opened.read_row_group(number, columns=["row"]).column(0).null_count
    # The lists that are null behind the last row count, too.
    entries = columns["indices"].num_values - missing
    return Group(file, number, group.num_rows - missing, entries)


def list_lengths(column: pa.ChunkedArray) -> np.ndarray:
    parts = [chunk.value_lengths().to_numpy() for chunk in column.chunks]
    return scan_tables.joined(parts, np.int64)


def flat_list(column: pa.ChunkedArray, dtype: pa.DataType) -> np.ndarray:
    parts = [chunk.flatten().cast(dtype).to_numpy() for chunk in column.chunks]
    return scan_tables.joined(parts, dtype.to_pandas_dtype())
