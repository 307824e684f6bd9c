"""Files and folders that appear and disappear whole or not at all.

A file or folder that is being written has a hidden name, `.sparsejax-*.tmp`, in the folder
of the final one. If the process is killed, it stays there. A later write into the same
folder removes it when nothing has written to it for an hour.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import lzma
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Generator, Iterable

# The functions that open a compressed file, by the end of its name.
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open}

# A hidden file or folder has no writer if nothing was written to it for this time.
_ABANDONED_SECONDS = 3600
# Errors of a full disk come without the name of the file.
_FULL = errno.ENOSPC, errno.EFBIG, errno.EDQUOT

_Path = str | os.PathLike[str]


@contextlib.contextmanager
def whole_file(path: _Path) -> Generator[io.BufferedWriter]:
    """Opens a file for bytes, which appears at `path` when the block is done.

    It replaces an existing file. If the block fails, nothing has changed.

    Raises:
      OSError: the file cannot be written. `check_writable` finds some reasons earlier.
    """
    with _replacing(path) as temporary, open(temporary, "xb") as file:
        yield file


@contextlib.contextmanager
def whole_text_file(path: _Path) -> Generator[io.TextIOWrapper]:
    """As `whole_file`, for UTF-8 text.

    The file is compressed if its name ends in `.gz` or `.xz`.
    """
    opener = COMPRESSED.get(pathlib.Path(path).suffix, open)
    with (
        _replacing(path) as temporary,
        opener(temporary, "xt", encoding="utf-8", newline="\n") as file,
    ):
        yield file


def write_together(contents: Iterable[tuple[_Path, str | bytes | memoryview]]) -> None:
    """Writes several files: all of them or none.

    They replace existing files. Text is written as by `whole_text_file`, and bytes as by
    `whole_file`. The files appear when all have been written.

    Raises:
      OSError: a file cannot be written; nothing has changed.
    """
    with contextlib.ExitStack() as stack:
        for path, content in contents:
            temporary = stack.enter_context(_replacing(path))
            opener = open
            if isinstance(content, str):
                opener = COMPRESSED.get(pathlib.Path(path).suffix, open)
                content = content.encode()
            with opener(temporary, "xb") as file:
                file.write(content)


@contextlib.contextmanager
def whole_folder(path: _Path) -> Generator[pathlib.Path]:
    """Makes a folder to write files into, which appears at `path` when the block is done.

    If the block fails, there is no folder.

    Raises:
      FileExistsError: `path` exists.
      ValueError: the parent folder does not exist.
    """
    path = pathlib.Path(path)
    check_new(path)
    temporary = _temporary(path)
    try:
        temporary.mkdir()
        yield temporary
        check_new(path)  # an empty folder would be replaced
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(path: _Path) -> None:
    """Removes a folder, if it exists. If the process is killed, it is there or not.

    Raises:
      OSError: it cannot be removed.
    """
    path = pathlib.Path(path)
    if path.exists():
        os.rename(path, temporary := _temporary(path))
        shutil.rmtree(temporary)


def check_writable(path: _Path) -> None:
    """Checks that a file can be written to `path`.

    Raises:
      ValueError: `path` is a folder or a device, or its folder does not exist.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file, so it cannot be replaced by one")
    _check_parent(path)


def check_new(path: _Path) -> None:
    """Checks that a folder can be made at `path`.

    Raises:
      FileExistsError: `path` exists.
      ValueError: the parent folder does not exist.
    """
    path = pathlib.Path(path)
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: already exists; name another folder")
    _check_parent(path)


def _check_parent(path: pathlib.Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


@contextlib.contextmanager
def _replacing(path: _Path) -> Generator[pathlib.Path]:
    """A temporary name for a file, which is renamed to `path` when the block is done."""
    path = pathlib.Path(path).resolve()  # a link stays a link
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and (
            error.filename == os.fspath(temporary)
            or (error.filename is None and error.errno in _FULL)
        ):  # the caller knows the final name of the file, not this one
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def _temporary(path: pathlib.Path) -> pathlib.Path:
    """A temporary name in the folder of `path`. Removes abandoned files from that folder."""
    for other in path.parent.glob(".sparsejax-*.tmp"):
        with contextlib.suppress(OSError):
            written = max(file.stat().st_mtime for file in [other, *other.rglob("*")])
            if time.time() - written <= _ABANDONED_SECONDS:
                continue
            if other.is_dir():
                shutil.rmtree(other)
            else:
                other.unlink()
    return path.with_name(f".sparsejax-{uuid.uuid4().hex}.tmp")
