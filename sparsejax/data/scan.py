"""A saved data set that stays on disk, of which a part at a time is read."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax.data import parquet
from sparsejax.data.files import DataError, Path
from sparsejax.data.names import Names, as_names
from sparsejax.data.parquet import ParquetPath
from sparsejax.sparse import CSR


class _Group(NamedTuple):
    """A row group of a file, with the rows of the data set that it holds."""

    file: ParquetPath
    number: int
    rows: int
    entries: int  # empty rows count as one


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedDataset:
    """Rows of sparse features on disk, of which `fit` reads a chunk at a time.

    >>> read("purchases.tsv").save("purchases")
    >>> scan_parquet("purchases")
    ScannedDataset('purchases', 3 rows, 3 features)

    Made by `scan_parquet`. In many processes each reads the rows that its devices
    train on.

    Attributes:
      path: the file, folder or address.
      feature_names: `[features]` text.
      indicator: whether every entry is 1.
      chunk_rows: rows of a chunk, about; None for what fits the devices.
      groups: the pieces that are read as a whole, in order.
    """

    path: Path
    feature_names: Names
    indicator: bool
    chunk_rows: int | None
    groups: tuple[_Group, ...]

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
        return len(self.feature_names)

    @property
    def num_entries(self) -> int:
        """Number of entries; rows without any count as one."""
        return sum(group.entries for group in self.groups)

    def read(self, start: int, stop: int) -> CSR:
        """Rows `start .. stop - 1`, in host memory.

        Raises:
          DataError: a file is damaged, or was changed since it was scanned.
        """
        parts, first = [], 0
        for group in self.groups:
            low, high = max(start - first, 0), min(stop - first, group.rows)
            if low < high:
                parts.append(self._read_group(group, low, high))
            first += group.rows
        lengths = [np.zeros(1, np.int64), *(part[0] for part in parts)]
        indices = [np.empty(0, np.int32), *(part[1] for part in parts)]
        values = None
        if not self.indicator:
            values = np.concatenate([np.empty(0, np.float32), *(p[2] for p in parts)])
        indptr = np.cumsum(np.concatenate(lengths))
        if indptr[-1] > np.iinfo(np.int32).max:
            raise ValueError(
                f"{indptr[-1]:,} entries do not fit in int32 offsets (2^31 - 1); scan "
                "with a smaller chunk_rows"
            )
        try:
            return CSR(
                values,
                np.concatenate(indices),
                indptr.astype(np.int32),
                num_cols=self.num_features,
            )
        except ValueError as error:
            raise DataError.at(self.path, f"is damaged: {error}") from error

    def _read_group(self, group: _Group, low: int, high: int):
        """Lengths, indices and values of some rows of a group."""
        changed = DataError.at(
            group.file.path, "is damaged, or was changed since it was scanned"
        )
        columns = ["indices"] if self.indicator else ["indices", "values"]
        with group.file.open() as file:
            if not set(columns) <= set(file.schema_arrow.names):
                raise changed
            table = file.read_row_group(group.number, columns=columns)
        lists = [
            table.column(name).drop_null().slice(low, high - low) for name in columns
        ]
        lengths = [_lengths(column) for column in lists]
        if len(lengths[0]) != high - low or any(
            not np.array_equal(lengths[0], other) for other in lengths[1:]
        ):
            raise changed
        indices = _flat(lists[0], pa.int32())
        values = None if self.indicator else _flat(lists[1], pa.float32())
        return lengths[0], indices, values

    def fingerprint(self) -> str:
        """A hash of what the files say of themselves; they are not read."""
        digest = hashlib.blake2b(digest_size=16)
        for group in self.groups:
            facts = (group.file.size, group.number, group.rows, group.entries)
            digest.update(repr(facts).encode())
        return digest.hexdigest()


def scan_parquet(path: Path, *, chunk_rows: int | None = None) -> ScannedDataset:
    """Looks at a saved data set without reading its rows, for `fit` to read in chunks.

    >>> read("purchases.tsv").save("purchases")
    >>> scan_parquet("purchases").num_rows
    3

    For data that is larger than the memory of the devices, or of a host. While `fit`
    trains on a chunk it reads the next. Chunks come in another order in each epoch, and
    so do the rows within a chunk, but rows of different chunks are not mixed: shuffle
    the rows once, when the files are written.

    Args:
      path: what `SparseDataset.save` or `sparsejax convert` wrote, or a folder of such
        files that have the same vocabulary (`convert --features`); also an address, see
        `read_parquet`.
      chunk_rows: rows that are on the devices at a time, about, in whole row groups (of
        65,536 rows). By default all, if they take less than a quarter of the memory of
        the devices that training uses, or as many as take an eighth of it.

    Raises:
      DataError: a file is something else, or damaged, or has another vocabulary.
      ValueError: `chunk_rows` is not positive.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")
    groups: list[_Group] = []
    vocabulary: pa.Array | None = None
    valued = False
    for file in parquet.parquet_files(path):
        with file.open() as opened:
            parquet.check_schema(file.path, opened.schema_arrow)
            features = _features(opened)
            has_values = "values" in opened.schema_arrow.names
            found = [
                _group(file, opened, number) for number in range(opened.num_row_groups)
            ]
        if vocabulary is None:
            vocabulary, valued = features, has_values
        elif not features.equals(vocabulary) or has_values != valued:
            raise DataError.at(
                file.path,
                "has another vocabulary than the first file, or only one of them has "
                "values; write all with the same (sparsejax convert --features)",
            )
        groups += [group for group in found if group.rows]
    assert vocabulary is not None  # there is a file
    return ScannedDataset(
        path, as_names(vocabulary), not valued, chunk_rows, tuple(groups)
    )


def _features(file: pq.ParquetFile) -> pa.Array:
    names = file.read(columns=["feature"]).column("feature")
    return names.cast(pa.large_string()).drop_null().combine_chunks()


def _group(file: ParquetPath, opened: pq.ParquetFile, number: int) -> _Group:
    """From the metadata, where it tells; the names of rows are null behind the last."""
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
    # The lists that are null, behind the last row, count too.
    entries = columns["indices"].num_values - missing
    return _Group(file, number, group.num_rows - missing, entries)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    parts = [chunk.value_lengths().to_numpy() for chunk in column.chunks]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _flat(column: pa.ChunkedArray, dtype: pa.DataType) -> np.ndarray:
    parts = [chunk.flatten().cast(dtype).to_numpy() for chunk in column.chunks]
    return np.concatenate([np.zeros(0, dtype.to_pandas_dtype()), *parts])
