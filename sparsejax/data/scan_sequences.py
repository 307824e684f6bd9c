"""Histories that stay on disk and are read a part at a time."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import pyarrow as pa

from sparsejax.data import parquet, scan_tables
from sparsejax.data.columns import BY_NAME, Chosen, Column, TimeColumn
from sparsejax.data.dataset import UnknownFeaturesWarning
from sparsejax.data.entries import offsets
from sparsejax.data.events import tables
from sparsejax.data.events.tables import TableLayout
from sparsejax.data.files import DataError, Path, shown
from sparsejax.data.names import FeatureNames, Names, as_names, of_features
from sparsejax.data.parquet import ParquetPath
from sparsejax.data.scan import flat_list, list_lengths, saved_features, saved_group
from sparsejax.data.scan_tables import Group
from sparsejax.data.sequences import Histories


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedSequences:
    """Histories on disk, of which parts are read.

    >>> table = {"user": ["ann", "ann", "bob"], "item": ["tea", "rye", "tea"]}
    >>> read_sequences(pandas.DataFrame(table)).save("histories")
    >>> scanned = scan_sequences("histories")
    >>> scanned
    ScannedSequences('histories', 2 rows, 2 features)
    >>> scanned.read(0, 1).indptr.tolist()
    [0, 2]

    `scan_sequences` makes it.

    Attributes:
      path: the file, folder or address.
      feature_names: `[features]` text.
      groups: the pieces that are read as a whole, in order.
      layout: the columns of a table; None for saved sequences.
      chunk_rows: about the number of rows that `fit` has on the devices at a time; None for
        as many as fit.
    """

    kind: ClassVar[str] = "histories"

    path: Path
    feature_names: Names
    groups: tuple[Group, ...]
    layout: TableLayout | None = None
    chunk_rows: int | None = None

    def __repr__(self) -> str:
        return (
            f"ScannedSequences({os.fspath(self.path)!r}, {self.num_rows:,} rows, "
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
        """Number of entries; a row without any may count as one."""
        return sum(group.entries for group in self.groups)

    def fingerprint(self) -> str:
        """A hash of the files' metadata, not of their content."""
        return scan_tables.fingerprint(self.groups, self.layout, self.feature_names)

    def read(self, start: int, stop: int) -> Histories:
        """The histories `start .. stop - 1`, in host memory.

        Entries of items that the vocabulary lacks are left out, with a warning.

        Raises:
          DataError: a file is damaged, or was changed since it was scanned. A row of a
            table is wrong, or the times of row groups are of several kinds.
        """
        wanted = scan_tables.pieces(self.groups, start, stop)
        if self.layout is not None:
            return self._read_table(wanted, self.layout)
        parts = [self._read_group(*part) for part in wanted]
        lengths = scan_tables.joined([part[0] for part in parts], np.int64)
        indices = scan_tables.joined([part[1] for part in parts], np.int32)
        if (indices < 0).any() or (indices >= self.num_features).any():
            raise DataError.at(self.path, "is damaged: an index is no feature")
        times = self._joined_times([part[2] for part in parts], len(indices))
        return Histories(offsets(lengths), indices, times)

    def _read_group(
        self, group: Group, low: int, high: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Lengths, indices and times of some rows of a group of saved sequences."""
        with group.file.open() as file:
            names = [n for n in ("indices", "times") if n in file.schema_arrow.names]
            table = file.read_row_group(group.number, columns=names)
        lists = [
            table.column(name).drop_null().slice(low, high - low) for name in names
        ]
        if not all(pa.types.is_list(column.type) for column in lists):
            raise group.file.changed()
        lengths = [list_lengths(column) for column in lists]
        if (
            names[:1] != ["indices"]
            or len(lengths[0]) != high - low
            or not np.array_equal(lengths[0], lengths[-1])
        ):
            raise group.file.changed()
        times = None
        if len(lists) == 2:
            times = flat_list(lists[1], lists[1].type.value_type)
        return lengths[0], flat_list(lists[0], pa.int32()), times

    def _read_table(
        self, wanted: list[tuple[Group, int, int]], layout: TableLayout
    ) -> Histories:
        rows = scan_tables.read_rows(wanted, layout, self._vocabulary)
        columns, times = rows.columns, rows.times
        if times is None and len(columns) and layout.source is not None:
            layout.source.without_empty_times().check_order(self.path)
        times = self._joined_times([times], len(columns))
        indptr = offsets(rows.lengths)
        if times is not None:
            of_row = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
            in_order = np.lexsort((times, of_row))
            columns, times = columns[in_order], times[in_order]
        known = columns >= 0
        if not known.all():
            indptr = offsets(known)[indptr]
            columns = columns[known]
            times = None if times is None else times[known]
            warnings.warn(
                f"{shown(self.path)}: entries of features that are not among the "
                f"{self.num_features:,} known ones are left out",
                UnknownFeaturesWarning,
                skip_file_prefixes=(os.path.dirname(__file__),),
            )
        return Histories(indptr, columns, times)

    def _joined_times(
        self, parts: list[np.ndarray | None], count: int
    ) -> np.ndarray | None:
        """The times of all parts. All have them, of one type, or none has."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        size = sum(len(part) for part in found)
        if size != count or len({part.dtype for part in found}) > 1:
            raise DataError.at(
                self.path,
                "some entries have times and others have none, or times of another "
                "kind; give all the same",
            )
        return np.concatenate(found)

    @functools.cached_property
    def _vocabulary(self) -> scan_tables.Vocabulary:
        return scan_tables.Vocabulary(self.feature_names)


def scan_sequences(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    time: TimeColumn = BY_NAME,
    features: FeatureNames | Iterable[object] | None = None,
    chunk_rows: int | None = None,
) -> ScannedSequences:
    """Scans Parquet files of histories without keeping their rows.

    >>> pandas.DataFrame({"items": [["tea", "rye", "tea"], []]}).to_parquet("lists.parquet")
    >>> scan_sequences("lists.parquet").read(0, 2).padded(3).tolist()
    [[0, 1, 0], [-1, -1, -1]]

    The files hold one of these:

    * what `SequenceDataset.save` wrote: the quickest to read;
    * a table with a list of items on each row, perhaps with a list of times. Each row is
      a history, and a user column is not needed;
    * a table of pairs, sorted by its user column, as `scan_parquet` describes.

    Entries are sorted by time when they are read. Without times they keep the order that
    they have in the file. If there is a column of times that cannot be read, that is an
    error; `time=None` says that the order of the file is meant.

    Args:
      path: a file or a folder of files of one kind, or an address, see `read_parquet`.
      user: for a table, the column with the row's name; see `from_arrow`.
      item: the column with the feature's name, or with a list of names.
      time: the column with the time, or with a list of times; None means the order of the
        file.
      features: vocabulary to read a table against: names, or a data set. Without it the
        item column is read once more, as by `scan_parquet`.
      chunk_rows: about the number of rows that `fit` has on the devices at a time, in whole
        row groups; see `scan_parquet`.

    Raises:
      DataError: a file is of another kind, is damaged, or differs from the first one.
        Pairs are not sorted.
      ValueError: columns or `features` are given for saved sequences, or `chunk_rows` is
        not positive.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")
    files = parquet.parquet_files(path)
    first, schema = parquet.first_schema(files)
    chosen = Chosen(user, item, None, time)
    if parquet.is_sequences(schema):
        if chosen or chosen.time is None or features is not None:
            raise ValueError(
                f"{shown(path)}: holds saved sequences, so it has no columns to name and "
                "has its own vocabulary; leave out user, item, time and features"
            )
        return _saved(path, files, chunk_rows)
    if parquet.is_dataset(schema):
        raise DataError.at(
            path,
            "is a saved SparseDataset, whose rows are not in the order of time; read it "
            "with read_sequences, and save the result",
        )
    layout = tables.find_table_layout(
        first, schema, chosen, indicator=True, with_user=False
    )
    rows = parquet.first_rows(files, layout.columns)
    layout, _ = tables.settle_time(layout, chosen, rows)
    assert layout.source is not None
    layout.source.check_order(path)
    groups = scan_tables.find_groups(files, layout)
    if not groups:
        raise DataError.at(path, "holds no data: there are no rows")
    if features is None:
        names = scan_tables.find_vocabulary(files, layout)
        if not names.size:
            raise DataError.at(path, "none of the rows has a feature")
    else:
        names = of_features(features)
    return ScannedSequences(path, names, tuple(groups), layout, chunk_rows)


def _times_in(schema: pa.Schema) -> pa.DataType | None:
    """The type of the times of saved sequences; None if they have no times."""
    return schema.field("times").type if "times" in schema.names else None


def _saved(
    path: Path, files: list[ParquetPath], chunk_rows: int | None
) -> ScannedSequences:
    """Scans what `SequenceDataset.save` wrote."""
    groups: list[Group] = []
    vocabulary: pa.Array | None = None
    kinds: set[pa.DataType | None] = set()
    for file in files:
        with file.open() as opened:
            parquet.check_schema(file.path, opened.schema_arrow, sequences=True)
            kinds.add(_times_in(opened.schema_arrow))
            features = saved_features(opened)
            found = [saved_group(file, opened, n) for n in range(opened.num_row_groups)]
        if vocabulary is None:
            vocabulary = features
        elif not features.equals(vocabulary):
            raise DataError.at(
                file.path,
                "has another vocabulary than the first file; read all with one "
                "(features=), and save them again",
            )
        if len(kinds) > 1:
            raise DataError.at(
                file.path,
                "has times of another kind than the first file, or only one of the two "
                "has times; save all with the same",
            )
        groups += [group for group in found if group.rows]
    assert vocabulary is not None  # there is a file
    names = as_names(vocabulary)
    return ScannedSequences(path, names, tuple(groups), None, chunk_rows)
