"""Parquet files: a data set as one of them, and opening any.

The form that `SparseDataset.save` writes:

Row `i` of the table holds the `i`-th row and, beside it, the name of the `i`-th feature;
the shorter of the two is filled up with nulls, which cost nothing::

    row     indices  values       feature
    ann     [0, 2]   [1.0, 5.0]   milk
    bob     []       []           tea
    null    null     null         wine

`values` (list<float32>) is missing from an indicator data set, and `left_out` (int32)
from most: how many entries a row had of features that are not among these. The schema's
metadata gives the version of this form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from sparsejax.data.files import DataError, Path, check_regular, is_address, replacing
from sparsejax.data.names import Names, as_names, to_arrow
from sparsejax.sparse import CSR

VERSION = 1

# Rows that can be read without the others: some 30 MB.
_GROUP_ROWS = 2**16
_VERSION_KEY = b"sparsejax.dataset.version"
_COLUMNS = {
    "row": pa.large_string(),
    "indices": pa.list_(pa.int32()),
    "values": pa.list_(pa.float32()),
    "left_out": pa.int32(),
    "feature": pa.large_string(),
}
_OPTIONAL = {"values", "left_out"}


def write_parquet(
    path: Path,
    matrix: CSR,
    row_names: Names,
    feature_names: Names,
    left_out: np.ndarray | None,
) -> None:
    """Writes what a data set consists of: a host CSR without padding, names, counts.

    The file appears at once and whole, or not at all.

    Raises:
      OSError: the file cannot be written.
    """
    offsets = pa.array(np.asarray(matrix.indptr), pa.int32())
    columns: dict[str, pa.Array] = {"row": to_arrow(row_names)}
    for name, leaf in (("indices", matrix.indices), ("values", matrix.data)):
        if leaf is not None:
            entries = pa.array(np.asarray(leaf), _COLUMNS[name].value_type)
            columns[name] = pa.ListArray.from_arrays(offsets, entries)
    if left_out is not None:
        columns["left_out"] = pa.array(left_out, _COLUMNS["left_out"])
    columns["feature"] = to_arrow(feature_names)
    length = max(len(row_names), len(feature_names))
    table = pa.table(
        {
            name: pa.chunked_array(
                [column, pa.nulls(length - len(column), column.type)]
            )
            for name, column in columns.items()
        }
    ).replace_schema_metadata({_VERSION_KEY: str(VERSION).encode()})

    with replacing(path) as temporary, open(temporary, "xb") as file:
        pq.write_table(
            table,
            file,
            row_group_size=_GROUP_ROWS,
            compression="zstd",
            write_page_checksum=True,
        )
        file.flush()
        os.fsync(file.fileno())


def read_parquet(path: Path) -> tuple[CSR, Names, Names, np.ndarray | None]:
    """`(matrix, row_names, feature_names, left_out)` of a file by `write_parquet`.

    Raises:
      DataError: the file is missing, is not such a file, or is damaged.
    """
    files = parquet_files(path)
    if files[0].path != path:
        raise DataError.at(path, "is a directory; expected a file")
    with files[0].open() as file:
        check_schema(path, file.schema_arrow)
        return _read_table(path, file)


def is_dataset(schema: pa.Schema) -> bool:
    """Whether a file of this schema was made by `write_parquet`."""
    return _VERSION_KEY in (schema.metadata or {})


@dataclasses.dataclass(frozen=True)
class ParquetPath:
    """Where a Parquet file is.

    Attributes:
      path: what messages call it.
      filesystem: where it is.
      inner: its path there.
      size: in bytes.
    """

    path: Path
    filesystem: pa.fs.FileSystem
    inner: str
    size: int

    @contextlib.contextmanager
    def open(self) -> Generator[pq.ParquetFile]:
        """The file, opened. What fails in the block is raised as `DataError`."""
        try:
            with (
                self.filesystem.open_input_file(self.inner) as stream,
                pq.ParquetFile(stream, page_checksum_verification=True) as file,
            ):
                yield file
        except (pa.ArrowException, OSError) as error:
            message = f"is not a Parquet file, or is damaged: {_first_line(error)}"
            raise DataError.at(self.path, message) from error


def parquet_files(path: Path) -> list[ParquetPath]:
    """A Parquet file, or those in a folder and its folders, in the order of their names.

    Files and folders whose names start with `_` or `.` are passed over, as Spark does.

    Args:
      path: local, or an address that pyarrow knows, as `s3://bucket/folder`.

    Raises:
      DataError: there is none, or the store cannot be reached.
    """
    if not is_address(path) and not os.path.isdir(path):
        check_regular(path)
    try:
        if is_address(path):
            filesystem, inner = pa.fs.FileSystem.from_uri(os.fspath(path))
        else:
            filesystem, inner = pa.fs.LocalFileSystem(), os.fspath(path)
        info = filesystem.get_file_info(inner)
        if info.type == pa.fs.FileType.File:
            return [ParquetPath(path, filesystem, inner, info.size)]
        if info.type == pa.fs.FileType.NotFound:
            raise DataError.at(path, "no such file")
        selector = pa.fs.FileSelector(inner, recursive=True)
        found = filesystem.get_file_info(selector)
    except (pa.ArrowException, OSError) as error:
        raise DataError.at(path, f"cannot be read: {_first_line(error)}") from error
    folder = os.fspath(path)
    if is_address(path):
        folder = folder.partition("?")[0]
    files = []
    for info in sorted(found, key=lambda info: info.path):
        below = os.path.relpath(info.path, inner)
        hidden = any(part[0] in "_." for part in below.split("/"))
        if (
            info.type == pa.fs.FileType.File
            and not hidden
            and info.path.endswith(".parquet")
        ):
            files.append(
                ParquetPath(
                    os.path.join(folder, below), filesystem, info.path, info.size
                )
            )
    if not files:
        raise DataError.at(path, "is a directory without a .parquet file")
    return files


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def check_schema(path: Path, schema: pa.Schema) -> None:
    """Raises DataError unless a file of this schema was made by `write_parquet`."""
    version = (schema.metadata or {}).get(_VERSION_KEY, b"").decode(errors="replace")
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
            f"is a saved data set of version {version}; this release reads version "
            f"{VERSION}, a newer one is needed",
        )


def _read_table(
    path: Path, file: pq.ParquetFile
) -> tuple[CSR, Names, Names, np.ndarray | None]:
    missing = _OPTIONAL - set(file.schema_arrow.names)
    valued = "values" not in missing
    names: dict[str, list[pa.Array]] = {"row": [], "feature": []}
    lengths = [np.zeros(1, np.int64)]
    indices, values = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    left_out = [np.empty(0, np.int32)]
    for batch in file.iter_batches(columns=[n for n in _COLUMNS if n not in missing]):
        columns = {
            name: batch.column(name).cast(_COLUMNS[name]).drop_null()
            for name in batch.schema.names
        }
        for name, parts in names.items():
            parts.append(columns[name])
        rows = len(columns["row"])
        lengths.append(columns["indices"].value_lengths().to_numpy())
        indices.append(columns["indices"].flatten().to_numpy())
        if valued:
            values.append(columns["values"].flatten().to_numpy())
        if "left_out" in columns:
            left_out.append(columns["left_out"].to_numpy())
        if any(len(columns[name]) != rows for name in columns if name != "feature") or (
            valued and len(values[-1]) != len(indices[-1])
        ):
            raise DataError.at(path, "is damaged: row, indices and values do not agree")
    indptr = np.cumsum(np.concatenate(lengths))
    row_names, feature_names = (
        as_names(pa.chunked_array(parts, pa.large_string())) for parts in names.values()
    )
    try:
        matrix = CSR(
            np.concatenate(values) if valued else None,
            np.concatenate(indices),
            indptr.astype(np.int32),
            num_cols=len(feature_names),
        )
    except ValueError as error:
        raise DataError.at(path, f"is damaged: {error}") from error
    counts = None if "left_out" in missing else np.concatenate(left_out)
    return matrix, row_names, feature_names, counts
