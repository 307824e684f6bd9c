"""Parquet files: writing and reading a saved data set, and opening files of any content.

`SparseDataset.save` writes this form. Row `i` of the table holds the `i`-th row of the
data set and, beside it, the name of the `i`-th feature. The shorter of the two is filled
up with nulls, which take no room::

    row     indices  values       feature
    ann     [0, 2]   [1.0, 5.0]   milk
    bob     []       []           tea
    null    null     null         wine

An indicator data set has no `values` (list<float32>). If the data set has times, there are
`times` (list<int64>, list<double> or list<timestamp[us]>) and `order` (list<int64>), and
`first_times` if an entry has several events. If
entries were left out, `left_out` (int32) has their number for each row. The schema's
metadata has the version of this form, and a checksum of the whole content.

`SequenceDataset.save` writes the same with another key of the version. There indices are
the items in the order of time, and there is neither `values` nor `order`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import zlib
from collections.abc import Generator, Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from sparsejax.data import arrow, stores
from sparsejax.data.files import DataError, Path, check_regular, is_address, shown
from sparsejax.data.names import Names, as_names, to_arrow
from sparsejax.sparse import CSR, as_int32
from sparsejax.whole_files import whole_file

VERSION = 1

# Rows of a row group, which can be read without the others: some 30 MB.
_GROUP_ROWS = 2**16
_FEW = 100
_VERSION_KEY = b"sparsejax.dataset.version"
_SEQUENCES_KEY = b"sparsejax.sequences.version"
_CHECKSUM_KEY = b"sparsejax.dataset.crc32"

# The file of a prepared folder that lists its parts, and the key of each part's schema,
# with the identity of its folder.
MANIFEST = "manifest.json"
PART_KEY = b"sparsejax.folder"
_COLUMNS = {
    "row": pa.large_string(),
    "indices": pa.list_(pa.int32()),
    "values": pa.list_(pa.float32()),
    "times": pa.list_(pa.int64()),  # or a list of another type in `_TIMES`
    "order": pa.list_(pa.int64()),
    "first_times": pa.list_(pa.int64()),  # or as `times`
    "left_out": pa.int32(),
    "feature": pa.large_string(),
}
_TIMES = (pa.int64(), pa.float64(), pa.timestamp("us"))


class Parts(NamedTuple):
    """The parts of a data set that a file has; they are arguments of `SparseDataset`."""

    matrix: CSR
    row_names: Names
    feature_names: Names
    left_out: np.ndarray | None = None
    times: np.ndarray | None = None
    order: np.ndarray | None = None
    first_times: np.ndarray | None = None


def id_lists(flat: np.ndarray, indptr: np.ndarray, size: int) -> CSR:
    """Lists of ids, `[examples]`, that keep their order.

    Args:
      flat: `[entries]` int32.
      indptr: `[examples + 1]` where each list begins.
      size: number of ids that there are.
    """
    # Not the constructor, which wants ascending columns.
    leaves = (None, flat, as_int32("indptr", indptr), None)
    return CSR.tree_unflatten(size, leaves)


def write_parquet(path: Path, parts: Parts, *, sequences: bool = False) -> None:
    """Writes a data set, whole or not at all.

    The matrix has NumPy leaves without padding. `sequences` says that it has `id_lists`.

    Raises:
      OSError: the file cannot be written.
    """
    matrix = parts.matrix
    offsets = arrow.from_numbers(as_int32("indptr", np.asarray(matrix.indptr)))
    leaves = (matrix.indices, matrix.data, parts.times, parts.order, parts.first_times)
    lists = {
        name: pa.ListArray.from_arrays(offsets, arrow.from_numbers(np.asarray(leaf)))
        for name, leaf in zip(
            ("indices", "values", "times", "order", "first_times"), leaves, strict=True
        )
        if leaf is not None
    }
    columns = {"row": to_arrow(parts.row_names), **lists}
    if parts.left_out is not None:
        columns["left_out"] = arrow.from_numbers(parts.left_out)
    columns["feature"] = to_arrow(parts.feature_names)
    length = max(len(parts.row_names), len(parts.feature_names))
    table = pa.table(
        {
            name: pa.chunked_array(
                [column, pa.nulls(length - len(column), column.type)]
            )
            for name, column in columns.items()
        }
    )
    key = _SEQUENCES_KEY if sequences else _VERSION_KEY
    metadata = {key: str(VERSION).encode(), _CHECKSUM_KEY: _checksum(parts)}
    table = table.replace_schema_metadata(metadata)

    write_whole(path, table, group_rows=_GROUP_ROWS)


def write_whole(path: Path, table: pa.Table, *, group_rows: int) -> None:
    """Writes a table to a file with checksums, whole or not at all."""
    with whole_file(path) as file:
        pq.write_table(
            table,
            file,
            row_group_size=group_rows,
            compression="zstd",
            write_page_checksum=True,
        )
        file.flush()
        os.fsync(file.fileno())


def read_parquet(path: Path, *, sequences: bool = False) -> Parts:
    """Reads a file that `write_parquet` wrote with the same `sequences`.

    Raises:
      DataError: the file is missing, is not such a file, or is damaged.
    """
    files = parquet_files(path)
    if files[0].path != path:
        raise DataError.at(path, "is a directory; expected a file")
    with files[0].open() as file:
        check_schema(path, file.schema_arrow, sequences=sequences)
        parts = _read_table(path, file, sequences)
        # Pages have checksums of their own, but the records of their places do not.
        if file.schema_arrow.metadata.get(_CHECKSUM_KEY) != _checksum(parts):
            raise DataError.at(
                path, "is damaged: its checksum does not fit its content"
            )
        return parts


def _checksum(parts: Parts) -> bytes:
    """A checksum of the content of a file and of the list of its parts."""
    matrix = parts.matrix
    arrays = [matrix.indptr, matrix.indices, matrix.data, *parts[3:6]]
    arrays += [] if parts.first_times is None else [parts.first_times]
    leaves = ["\0".join(names.tolist()).encode() for names in parts[1:3]]
    leaves += [b"" if each is None else np.asarray(each).tobytes() for each in arrays]
    checksum = zlib.crc32(repr([len(leaf) for leaf in leaves]).encode())
    for leaf in leaves:
        checksum = zlib.crc32(leaf, checksum)
    return f"{checksum:08x}".encode()


def is_dataset(schema: pa.Schema) -> bool:
    """Whether a file of this schema was made by `SparseDataset.save`."""
    return _VERSION_KEY in (schema.metadata or {})


def is_sequences(schema: pa.Schema) -> bool:
    """Whether a file of this schema was made by `SequenceDataset.save`."""
    return _SEQUENCES_KEY in (schema.metadata or {})


@dataclasses.dataclass(frozen=True)
class ParquetPath:
    """The place of a Parquet file.

    Attributes:
      path: the path that messages name.
      filesystem: the file system with the file.
      inner: the path of the file in that file system.
      size: in bytes.
      crc32: checksum of its bytes, if a manifest has it.
    """

    path: Path
    filesystem: pa.fs.FileSystem
    inner: str
    size: int
    crc32: int | None = None

    @contextlib.contextmanager
    def open(self, *, one_group: bool = False) -> Generator[pq.ParquetFile]:
        """Opens the file. Errors of reading within the block become `DataError`.

        With `one_group` only one row group is read, and its columns are asked for together.
        If the file is of a manifest, its footer is kept for its other groups.
        """
        facts = os.fspath(self.path), self.size, self.crc32
        keeps = one_group and self.crc32 is not None
        footer = _footer(*facts) if keeps else _Footer()
        with (
            stores.naming(self.path, "is not a Parquet file, or is damaged"),
            self.filesystem.open_input_file(self.inner) as stream,
        ):
            if stream.size() != self.size:
                raise self.changed()
            with footer.lock:  # one of several threads reads it
                if keeps and footer.metadata is None:
                    with opened(self.path, stream) as file:
                        footer.metadata = file.metadata
            with opened(
                self.path, stream, pre_buffer=one_group, metadata=footer.metadata
            ) as file:
                yield file

    def changed(self) -> DataError:
        """The error for a file that is not what it was, or was said to be."""
        return DataError.at(
            self.path, "is damaged, or was changed since it was scanned"
        )


@dataclasses.dataclass
class _Footer:
    """The metadata of a file, once it was read."""

    metadata: pq.FileMetaData | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@functools.lru_cache(maxsize=256)
def _footer(path: str, size: int, crc32: int) -> _Footer:
    return _Footer()


@contextlib.contextmanager
def opened(
    path: Path,
    stream: pa.NativeFile,
    *,
    pre_buffer: bool = False,
    metadata: pq.FileMetaData | None = None,
) -> Generator[pq.ParquetFile]:
    """Opens a stream. Errors of reading within the block become `DataError`.

    With the metadata of the file its footer is not read.
    """
    try:
        with pq.ParquetFile(
            stream,
            metadata=metadata,
            page_checksum_verification=True,
            pre_buffer=pre_buffer,
            # As nanoseconds, times before 1677 and after 2262 would wrap.
            coerce_int96_timestamp_unit="us",
        ) as file:
            yield file
    except MemoryError as error:
        raise MemoryError(
            f"{shown(path)}: a part of it takes more memory than there is ({error}). Equal "
            "cells take hardly any room in Parquet: write smaller row groups, or shorter "
            "texts and lists"
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0]
        message = f"is not a Parquet file, or is damaged: {first}"
        raise DataError.at(path, message) from error


def parquet_files(path: Path) -> list[ParquetPath]:
    """A Parquet file, or those in a folder and its subfolders; see `files_below`.

    Raises:
      DataError: there is no such file, or the store cannot be reached.
    """
    files = files_below(path)
    if len(files) == 1 and files[0].path == path:
        return files
    files = [file for file in files if file.inner.endswith(".parquet")]
    if not files:
        raise DataError.at(path, "is a directory without a .parquet file")
    return files


def files_below(path: Path) -> list[ParquetPath]:
    """A file, or those in a folder and its subfolders, in the order of their names.

    Files and folders whose names start with `_` or `.` are skipped, as in Spark.

    Args:
      path: a local path, or an address that pyarrow knows, like `s3://bucket/folder`.

    Raises:
      DataError: there is no such file, or the store cannot be reached.
    """
    if not is_address(path) and not os.path.isdir(path):
        check_regular(path)
    place = stores.Place.of(path)
    filesystem, inner = place.filesystem, place.inner
    with stores.naming(path):
        info = filesystem.get_file_info(inner)
        if info.type == pa.fs.FileType.File:
            return [ParquetPath(path, filesystem, inner, info.size)]
        if info.type == pa.fs.FileType.NotFound:
            raise DataError.at(path, "no such file")
        selector = pa.fs.FileSelector(inner, recursive=True)
        found = filesystem.get_file_info(selector)
    folder = os.fspath(path)
    if is_address(path):
        folder = folder.partition("?")[0]
    files = []
    for info in sorted(found, key=lambda info: info.path):
        below = os.path.relpath(info.path, inner)
        hidden = any(part[0] in "_." for part in below.split("/"))
        if info.type == pa.fs.FileType.File and not hidden:
            files.append(
                ParquetPath(
                    os.path.join(folder, below), filesystem, info.path, info.size
                )
            )
    return files


def first_schema(files: Iterable[ParquetPath]) -> tuple[Path, pa.Schema]:
    """The first file with rows (or if there is none, the first one), and its columns.

    Where there are no rows, a column of lists or of text may have no type, as from pandas.
    """
    found = None
    for file in files:
        with file.open() as opened:
            if opened.metadata.num_rows:
                return file.path, opened.schema_arrow
            found = found or (file.path, opened.schema_arrow)
    assert found is not None  # `parquet_files` finds one or more
    return found


def first_rows(
    files: Iterable[ParquetPath], columns: list[str]
) -> Generator[pa.RecordBatch]:
    """The rows of files, a few at a time, for who needs only the first of them."""
    for file in files:
        with file.open() as opened:
            yield from opened.iter_batches(_FEW, columns=columns)


def check_no_part(path: Path, schema: pa.Schema) -> None:
    """Raises DataError if a file of this schema is a part of a prepared folder."""
    if PART_KEY in (schema.metadata or {}):
        raise DataError.at(
            path,
            f"is a part of a prepared data set, which is read as a whole: name its folder. "
            f"If that has no {MANIFEST}, preparing it was not finished; do it again",
        )


def check_schema(path: Path, schema: pa.Schema, *, sequences: bool = False) -> None:
    """Raises DataError unless a file of this schema was made by `write_parquet`."""
    key = _SEQUENCES_KEY if sequences else _VERSION_KEY
    version = (schema.metadata or {}).get(key, b"").decode(errors="replace")
    if is_sequences(schema) and not sequences:
        raise DataError.at(
            path,
            "holds saved sequences: read it with read_sequences, or scan it with "
            "scan_sequences; to_sparse() makes a SparseDataset of them",
        )
    if sequences and not version:
        raise DataError.at(
            path,
            "holds no saved sequences; read other files with read_sequences, and save "
            "them with SequenceDataset.save",
        )
    if not version or not {"row", "indices", "feature"} <= set(schema.names):
        raise DataError.at(
            path,
            "is Parquet, but not a saved data set: expected the columns row, indices, "
            f"values (optional) and feature, got {', '.join(schema.names)}; "
            "make one with SparseDataset.save",
        )
    if version != str(VERSION):
        raise DataError.at(
            path,
            f"is a saved data set of version {version}, but this release reads version "
            f"{VERSION}; install a newer release",
        )


def _read_table(path: Path, file: pq.ParquetFile, sequences: bool) -> Parts:
    types = _types(path, file.schema_arrow)
    found: dict[str, list[pa.Array]] = {name: [] for name in types}
    lengths = [np.zeros(1, np.int64)]
    for batch in file.iter_batches(columns=list(types)):
        columns = {
            name: batch.column(name).cast(type_).drop_null()
            for name, type_ in types.items()
        }
        lengths.append(arrow.numbers(columns["indices"].value_lengths()))
        for name, column in columns.items():
            if name != "feature" and len(column) != len(columns["row"]):
                raise _disagree(path, types)
            if pa.types.is_list(column.type):
                if not np.array_equal(
                    arrow.numbers(column.value_lengths()), lengths[-1]
                ):
                    raise _disagree(path, types)
                column = column.flatten()
            found[name].append(column)
    row_names, feature_names = (
        as_names(pa.chunked_array(found.pop(name), types[name]))
        for name in ("row", "feature")
    )
    leaves = {
        name: np.concatenate(
            [_empty(types[name]), *(arrow.numbers(each) for each in parts)]
        )
        for name, parts in found.items()
    }
    size = len(feature_names)
    try:
        indptr = as_int32("indptr", np.cumsum(np.concatenate(lengths)))
        matrix = (
            id_lists(leaves.pop("indices"), indptr, size)
            if sequences
            else CSR(
                leaves.pop("values", None),
                leaves.pop("indices"),
                indptr,
                num_cols=size,
            )
        )
    except ValueError as error:
        raise DataError.at(path, f"is damaged: {error}") from error
    return Parts(matrix, row_names, feature_names, **leaves)


def _types(path: Path, schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns that a saved data set has, and the type as which each is read."""
    types = {name: type_ for name, type_ in _COLUMNS.items() if name in schema.names}
    for name in types.keys() & {"times", "first_times"}:
        found = schema.field(name).type
        inner = getattr(found, "value_type", found)
        if inner not in _TIMES:
            raise DataError.at(path, f"is damaged: {name} are {found}")
        types[name] = pa.list_(inner)
    return types


def _empty(type_: pa.DataType) -> np.ndarray:
    """An empty array of the type of an entry."""
    inner = type_.value_type if pa.types.is_list(type_) else type_
    return arrow.numbers(pa.nulls(0, inner))


def _disagree(path: Path, types: Iterable[str]) -> DataError:
    columns = [name for name in types if name != "feature"]
    return DataError.at(
        path, f"is damaged: {', '.join(columns[:-1])} and {columns[-1]} do not agree"
    )
