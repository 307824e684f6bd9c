"""Reads and writes files and folders, on this machine or in an object store."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Generator
from typing import IO

import pyarrow as pa
import pyarrow.fs

from sparsejax.data.files.opening import DataError, Path, is_address
from sparsejax.whole_files import whole_file

_PIECE = 2**22  # bytes that are copied at a time


@dataclasses.dataclass(frozen=True)
class Place:
    """The location of a file or a folder.

    Attributes:
      path: local path or address, as messages name it.
      filesystem: Arrow's file system that contains it.
      inner: path in that file system.
    """

    path: Path
    filesystem: pa.fs.FileSystem
    inner: str

    @classmethod
    def of(cls, path: Path) -> Place:
        """The location for a local path, or for an address like `s3://bucket/folder`.

        Raises:
          DataError: the address has an unknown kind of store.
        """
        if not is_address(path):
            return cls(path, pa.fs.LocalFileSystem(), os.fspath(path))
        with naming(path):
            filesystem, inner = pa.fs.FileSystem.from_uri(os.fspath(path))
        return cls(path, filesystem, inner)

    def below(self, name: str) -> Place:
        """The location of a file or folder in this folder."""
        folder = os.fspath(self.path)
        if is_address(folder):  # drop the options, which the file system has taken
            folder = folder.partition("?")[0]
        inner = f"{self.inner.rstrip('/')}/{name}"
        return dataclasses.replace(self, path=os.path.join(folder, name), inner=inner)

    @property
    def parent(self) -> tuple[Place, str]:
        """The folder that contains this file or folder, and the name in that folder."""
        path, _, query = os.fspath(self.path).partition("?" if self.is_remote else "\0")
        path = re.sub(r"(?<=[^/])/[^/]*$", "", path.rstrip("/")) if "/" in path else "."
        inner, _, name = self.inner.rstrip("/").rpartition("/")
        path = f"{path}?{query}" if query else path
        return dataclasses.replace(self, path=path, inner=inner or "."), name

    @property
    def is_remote(self) -> bool:
        return not isinstance(self.filesystem, pa.fs.LocalFileSystem)

    def size(self) -> int | None:
        """The size of the file in bytes, or None if the file does not exist.

        Raises:
          DataError: the store does not answer.
        """
        with naming(self.path):
            info = self.filesystem.get_file_info(self.inner)
        return info.size if info.type == pa.fs.FileType.File else None

    def version(self) -> str | None:
        """A text made of the file's size and the time of its last change; None without a file.

        Raises:
          DataError: the store does not answer.
        """
        with naming(self.path):
            info = self.filesystem.get_file_info(self.inner)
        if info.type != pa.fs.FileType.File:
            return None
        return f"{info.size}-{info.mtime_ns}"

    def names(self) -> list[str]:
        """The names of files and folders in the folder; empty if it does not exist.

        Raises:
          DataError: the store does not answer.
        """
        selector = pa.fs.FileSelector(self.inner, allow_not_found=True)
        with naming(self.path):
            return [info.base_name for info in self.filesystem.get_file_info(selector)]

    def read(self) -> bytes | None:
        """The content of the file, or None if the file does not exist.

        Raises:
          DataError: the file cannot be read.
        """
        with naming(self.path):
            try:
                # Opening a stream instead would send many small requests to a store.
                with self.filesystem.open_input_file(self.inner) as file:
                    return file.read()
            except (FileNotFoundError, NotADirectoryError):
                return None

    @contextlib.contextmanager
    def writing(self) -> Generator[IO[bytes]]:
        """Opens the file for writing. It is published when this context closes without an error.

        A file for a store is written to a temporary file first, because a store would
        publish a partial file if the block failed.

        Raises:
          OSError: the file cannot be written.
        """
        if not self.is_remote:
            path = pathlib.Path(self.inner)
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            return
        # The operating system removes this file even if the process is killed.
        with tempfile.TemporaryFile() as file:
            yield file
            file.flush()
            # A single call uploads the file. If a signal interrupted a series of writes, the store
            # would publish a partial file.
            pa.fs.copy_files(
                path_of(file),
                self.inner,
                source_filesystem=pa.fs.LocalFileSystem(),
                destination_filesystem=self.filesystem,
            )

    def fetch(self, path: Path) -> None:
        """Copies the file to a local path, whole or not at all.

        Raises:
          DataError: the file cannot be read.
        """
        with (
            naming(self.path),
            whole_file(path) as file,
            self.filesystem.open_input_stream(self.inner) as stream,
        ):
            shutil.copyfileobj(stream, file, _PIECE)


@contextlib.contextmanager
def naming(path: Path, problem: str = "cannot be read") -> Generator[None]:
    """Converts errors while this context is open to a `DataError` that names the path."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        first = str(error).partition("\n")[0]
        raise DataError.at(path, f"{problem}: {first}") from error


def path_of(file: IO[bytes]) -> str:
    """A path that opens an open file again in this process, even if the file has no name."""
    return f"/proc/self/fd/{file.fileno()}"


def crc32(path: str) -> int:
    """The CRC-32 checksum of a local file."""
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return checksum
