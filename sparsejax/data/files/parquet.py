"""Finds, opens and writes Parquet files of any content."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Generator, Iterable, Iterator

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from sparsejax.data.files import lake, stores
from sparsejax.data.files.hive import NO_CONSTANTS, Constants
from sparsejax.data.files.opening import (
    DataError,
    Path,
    check_regular,
    is_address,
    shown,
)
from sparsejax.whole_files import whole_file

_FEW = 100

# Name of the file in a prepared folder that lists its parts. The schema of each part stores the
# identity of its folder under the key.
MANIFEST = "manifest.json"
PART_KEY = b"sparsejax.folder"


def write_whole(path: Path, table: pa.Table, *, group_rows: int) -> None:
    """Writes a table to a Parquet file with checksums, whole or not at all."""
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


@dataclasses.dataclass(frozen=True)
class ParquetPath:
    """The location of a Parquet file, with facts about its content.

    Attributes:
      path: path in messages.
      filesystem: Arrow's file system that contains the file.
      inner: path of the file in that file system.
      size: size in bytes.
      crc32: CRC-32 checksum of the file; None if no manifest states it.
      constants: columns whose values are in the names of the file's folders.
      table: columns of the table to which the file belongs, for example of Delta Lake; None
        for a plain file.
    """

    path: Path
    filesystem: pa.fs.FileSystem
    inner: str
    size: int
    crc32: int | None = None
    constants: Constants = NO_CONSTANTS
    table: lake.TableColumns | None = None

    @contextlib.contextmanager
    def open(self, *, one_group: bool = False) -> Generator[pq.ParquetFile]:
        """Opens the file. Read errors while this context is open become `DataError`.

        With `one_group` the caller reads only one row group, and the group's columns are
        requested together. If a manifest lists the file, its footer is cached for the file's
        other groups.
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
            with footer.lock:  # only one of several threads reads the footer
                if keeps and footer.metadata is None:
                    with opened(self.path, stream) as file:
                        footer.metadata = file.metadata
            with opened(
                self.path, stream, pre_buffer=one_group, metadata=footer.metadata
            ) as file:
                yield file

    def columns(self, file: pq.ParquetFile) -> pa.Schema:
        """The schema of the opened file, with the columns in the names of its folders."""
        if self.table is not None:
            return self.table.schema
        return self._beside(file).schema(file.schema_arrow)

    def group(self, file: pq.ParquetFile, number: int, names: list[str]) -> pa.Table:
        """Reads columns of a row group of the opened file."""
        if self.table is not None:
            stored = self.table.stored(file.schema_arrow, names)
            rows = file.read_row_group(number, columns=list(stored.values()))
            return self.table.shaped(rows, stored, names)
        constants = self._beside(file)
        table = file.read_row_group(number, columns=constants.own(names))
        return constants.added(table, names)

    def batches(
        self,
        file: pq.ParquetFile,
        rows: int,
        names: list[str],
        groups: list[int] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Reads columns of the opened file, or of some row groups, `rows` rows at a time."""
        if self.table is not None:
            stored = self.table.stored(file.schema_arrow, names)
            own = list(stored.values())
            for batch in file.iter_batches(rows, row_groups=groups, columns=own):
                yield self.table.shaped(batch, stored, names)
            return
        constants = self._beside(file)
        own = constants.own(names)
        for batch in file.iter_batches(rows, row_groups=groups, columns=own):
            yield constants.added(batch, names)

    def whole(self, file: pq.ParquetFile) -> pa.Table:
        """Reads all rows of the opened file, without the columns in the names of folders."""
        if self.table is None:
            return file.read()
        names = self.table.schema.names
        stored = self.table.stored(file.schema_arrow, names)
        return self.table.shaped(file.read(list(stored.values())), stored, names)

    def stored_name(self, file: pq.ParquetFile, name: str) -> str | None:
        """The name under which the opened file stores a column; None if it lacks the column."""
        if self.table is not None:
            return self.table.stored(file.schema_arrow, [name]).get(name)
        return name if name in file.schema_arrow.names else None

    def cells(self, names: Iterable[str]) -> tuple[tuple[str, str | None], ...]:
        """The constant columns among `names`, which the file itself lacks: name and value."""
        if self.table is not None:
            return self.table.texts(names)
        texts = self.constants.texts
        return tuple((name, texts[name]) for name in names if name in texts)

    @property
    def is_parquet(self) -> bool:
        """Whether the file is Parquet by its name, or by the log of its table."""
        return self.table is not None or self.inner.endswith(".parquet")

    def _beside(self, file: pq.ParquetFile) -> Constants:
        return self.constants.beside(file.schema_arrow.names)

    def changed(self) -> DataError:
        """An error for a file that was changed, or that differs from its description."""
        return DataError.at(
            self.path, "is damaged, or was changed since it was scanned"
        )


@dataclasses.dataclass
class _Footer:
    """A cache for the metadata of a file; they are None until they are read."""

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
    """Opens a stream as Parquet. Read errors while this context is open become `DataError`.

    If `metadata` is given, the footer is not read.
    """
    try:
        with pq.ParquetFile(
            stream,
            metadata=metadata,
            page_checksum_verification=True,
            pre_buffer=pre_buffer,
            # Nanoseconds would overflow for times before 1677 or after 2262.
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
    """The Parquet file at a path, or those in a folder and its subfolders; see `files_below`.

    Raises:
      DataError: no such file exists, or the store cannot be reached.
    """
    files = files_below(path)
    if len(files) == 1 and files[0].path == path:
        return files
    files = [file for file in files if file.is_parquet]
    if not files:
        raise DataError.at(
            path, "is a directory without a .parquet file that is not empty"
        )
    return with_same_constants(files)


def files_below(path: Path, *, plain: str | None = None) -> list[ParquetPath]:
    """The file at a path, or those in a folder and its subfolders, in the order of their names.

    Files and folders whose names start with `_` or `.` are skipped, as in Spark. Files of 0
    bytes are skipped, too. For a Delta or an Iceberg table, the result is the files of its
    current version, with the table's columns.

    Args:
      path: local path, or an address that pyarrow supports, like `s3://bucket/folder`.
      plain: reason, for the message, why the folder must not be a table; None if it may be
        one.

    Raises:
      DataError: no such file exists, or the store cannot be reached. Or the folder is a part
        of a table, or a table of a format that is not read.
      ImportError: the folder is a table, and the package that reads it is not installed.
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
    below = {os.path.relpath(info.path, inner): info for info in found}
    if (kind := lake.format_of(place, below)) is not None:
        if plain is not None:
            raise DataError.at(path, f"is a table of {kind}; {plain}")
        return _of_table(place, kind, below)
    folder = os.fspath(path)
    if is_address(path):
        folder = folder.partition("?")[0]
    files = []
    for info in sorted(found, key=lambda info: info.path):
        below = os.path.relpath(info.path, inner)
        hidden = any(part[0] in "_." for part in below.split("/"))
        # Files without bytes are skipped: Spark, `touch` and interrupted uploads leave them.
        if info.type == pa.fs.FileType.File and info.size and not hidden:
            whole = os.path.join(folder, below)
            file = ParquetPath(whole, filesystem, info.path, info.size)
            files.append(dataclasses.replace(file, constants=Constants.of(below)))
    return files


def _of_table(
    place: stores.Place, kind: str, below: dict[str, pa.fs.FileInfo]
) -> list[ParquetPath]:
    """The files with the current rows of a lake table, and their sizes; see `lake.files_of`."""
    filesystem, sizes = place.filesystem, {i.path: i.size for i in below.values()}
    files = []
    for file in lake.files_of(place, kind, below):
        if (size := sizes.get(file.inner)) is None:  # the file is outside the folder
            with stores.naming(place.path):
                size = filesystem.get_file_info(file.inner).size
        name = os.path.relpath(file.inner, place.inner)
        path = file.inner if name.startswith("..") else place.below(name).path
        if size is None:
            raise DataError.at(path, "is missing, though the log of the table names it")
        found = ParquetPath(path, filesystem, file.inner, size, table=file.columns)
        files.append(found)
    return files


def with_same_constants(files: list[ParquetPath]) -> list[ParquetPath]:
    """Drops the constant columns of a folder's files, unless all files have equal ones."""
    if len({frozenset(file.constants.texts) for file in files}) > 1:  # no partitions
        return [dataclasses.replace(file, constants=NO_CONSTANTS) for file in files]
    return files


def first_schema(files: Iterable[ParquetPath]) -> tuple[Path, pa.Schema]:
    """The path and schema of the first file with rows, or of the first file if none has rows.

    In a file without rows, a column of lists or text may lack its type: pandas writes such
    files.
    """
    found = None
    for file in files:
        with file.open() as opened:
            if opened.metadata.num_rows:
                return file.path, file.columns(opened)
            found = found or (file.path, file.columns(opened))
    assert found is not None  # `parquet_files` finds one or more
    return found


def first_rows(
    files: Iterable[ParquetPath], columns: list[str]
) -> Generator[pa.RecordBatch]:
    """Yields small batches of the files' rows, for callers that need only the first rows."""
    for file in files:
        with file.open() as opened:
            yield from file.batches(opened, _FEW, columns)


def check_no_part(path: Path, schema: pa.Schema) -> None:
    """Raises DataError if the schema is that of a part of a prepared folder."""
    if PART_KEY in (schema.metadata or {}):
        raise DataError.at(
            path,
            f"is a part of a prepared data set, which is read as a whole: name its folder. "
            f"If that has no {MANIFEST}, preparing it was not finished; do it again",
        )
