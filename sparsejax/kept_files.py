"""A cache of files in a folder of the user, with a bound in bytes and LRU eviction.

The files are trusted: programs in them are executed. So neither the folder nor a file in it
may belong to another user or be writable by others.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import stat
import tempfile
from collections.abc import Generator

from sparsejax.whole_files import opened_regular, whole_file


@contextlib.contextmanager
def kept_file(path: pathlib.Path, max_bytes: int) -> Generator[io.BufferedWriter]:
    """Opens a new file for bytes, which appears at `path` when the block has ended.

    Then files with the same suffix in its folder are removed, least recently used first,
    until the remaining ones have at most `max_bytes` in all. A reader calls `os.utime` to
    mark a file as used.

    Raises:
      OSError: the file cannot be written.
    """
    check_writable(path.parent)
    with whole_file(path) as file:
        yield file
    size = 0
    others = path.parent.glob(f"*{path.suffix}")
    for other in sorted(others, key=_last_used, reverse=True):
        with contextlib.suppress(OSError):  # another process has removed the file
            size += other.stat().st_size
            if size > max_bytes:
                other.unlink()


def check_writable(path: pathlib.Path) -> None:
    """Makes a folder that only the user can read, if it does not exist, and checks it.

    Raises:
      OSError: files cannot be made in it, or other users can write there.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(path)
    with tempfile.TemporaryFile(dir=path):
        pass


def check_own(path: pathlib.Path) -> None:
    """Checks that a folder and all its entries belong to this user.

    Raises:
      PermissionError: the folder or a file in it has another owner, is a link, or can be
        written by others.
      OSError: the folder cannot be read.
    """
    if fault := _fault(path.stat()):
        raise _not_own(path, fault)
    # In a folder that only its owner may enter, nobody else can reach a file.
    is_closed = not stat.S_IMODE(path.stat().st_mode) & 0o077
    for entry in [*os.scandir(path)]:
        # Another process has removed the file.
        with contextlib.suppress(FileNotFoundError):
            facts = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(facts.st_mode):
                raise _not_own(path, f"{entry.name} is a link")
            if fault := _fault(facts, is_closed=is_closed):
                raise _not_own(path, f"{entry.name}: {fault}")


@contextlib.contextmanager
def opened_own(path: pathlib.Path) -> Generator[io.BufferedReader]:
    """Opens a file to read bytes, if only this user can have written it.

    Raises:
      OSError: the file cannot be read; or the folder or the file is not safe, as in `check_own`.
      ValueError: `path` is no regular file.
    """
    folder = path.parent.stat()
    if fault := _fault(folder):
        raise _not_own(path.parent, fault)
    is_closed = not stat.S_IMODE(folder.st_mode) & 0o077
    if path.is_symlink():
        raise _not_own(path.parent, f"{path.name} is a link")
    with opened_regular(path) as file:
        # The open file is checked, because the file at `path` could be replaced after a check.
        if fault := _fault(os.fstat(file.fileno()), is_closed=is_closed):
            raise _not_own(path.parent, f"{path.name}: {fault}")
        yield file


def _fault(facts: os.stat_result, *, is_closed: bool = False) -> str | None:
    """The reason why another user might have written a file or folder; None if none could."""
    if facts.st_uid != os.geteuid():
        return f"its owner is the user {facts.st_uid}, not {os.geteuid()}"
    if facts.st_mode & 0o022 and not is_closed:
        return f"other users can write there (mode {stat.S_IMODE(facts.st_mode):o})"
    return None


def _not_own(path: pathlib.Path, fault: str) -> PermissionError:
    text = f"{fault}; remove this folder, it is made again so that only you can write there"
    return PermissionError(errno.EPERM, text, str(path))


def _last_used(path: pathlib.Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
