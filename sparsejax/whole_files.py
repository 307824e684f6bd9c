"""Files and folders that appear whole or not at all.

What is written has a hidden name beside its own, `.sparsejax-*.tmp`, until it is done.
A killed process leaves that behind; who writes into the same folder later removes it,
once nobody has written to it for an hour.
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
from collections.abc import Generator

# What opens a compressed file, by the end of its name.
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open}

# A file under construction that nothing was written to for so long has no writer.
_ABANDONED_SECONDS = 3600
# These errors come without the name of the file.
_FULL = errno.ENOSPC, errno.EFBIG, errno.EDQUOT

_Path = str | os.PathLike[str]


@contextlib.contextmanager
def whole_file(path: _Path) -> Generator[io.BufferedWriter]:
    """Opens a file for bytes, which appears at `path` when the block is done.

    It replaces a file that was there. If the block fails, nothing has changed.

    Raises:
      OSError: the file cannot be written; `check_writable` finds that earlier.
    """
    with _replacing(path) as temporary, open(temporary, "xb") as file:
        yield file


@contextlib.contextmanager
def whole_text_file(path: _Path) -> Generator[io.TextIOWrapper]:
    """As `whole_file`, for UTF-8 text.

    A name that ends in `.gz` or `.xz` gives a compressed file.
    """
    opener = COMPRESSED.get(pathlib.Path(path).suffix, open)
    with (
        _replacing(path) as temporary,
        opener(temporary, "xt", encoding="utf-8", newline="\n") as file,
    ):
        yield file


@contextlib.contextmanager
def whole_folder(path: _Path) -> Generator[pathlib.Path]:
    """A folder to write files into, which appears at `path` when the block is done.

    If the block fails, there is no folder.

    Raises:
      FileExistsError: `path` exists.
      ValueError: the folder that is to hold it does not exist.
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


def check_writable(path: _Path) -> None:
    """Checks that a file can be made here, or be replaced.

    Raises:
      ValueError: `path` is a folder or a device, or its folder does not exist.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file, so it cannot be written")
    _check_parent(path)


def check_new(path: _Path) -> None:
    """Checks that a folder can be made here.

    Raises:
      FileExistsError: `path` exists.
      ValueError: the folder that is to hold it does not exist.
    """
    path = pathlib.Path(path)
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: exists; name another folder")
    _check_parent(path)


def _check_parent(path: pathlib.Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


@contextlib.contextmanager
def _replacing(path: _Path) -> Generator[pathlib.Path]:
    """A name to write a file under, which becomes `path` when the block is done."""
    path = pathlib.Path(path).resolve()  # a link stays a link
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and (
            error.filename == os.fspath(temporary) or error.errno in _FULL
        ):  # the caller knows the file by its own name
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def _temporary(path: pathlib.Path) -> pathlib.Path:
    """A name beside `path` for what is being written; removes what was abandoned."""
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
