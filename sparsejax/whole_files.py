"""Writes files and folders atomically: they appear complete or not at all.

A file or folder that is being written has a hidden name, `.sparsejax-*.tmp`, in the folder
of the final one. Its writer holds a lock on the file `.sparsejax-*.lock` beside it. The lock
ends with the process. If the process is killed, both files stay. The next write into the
same folder removes hidden files whose lock nobody holds, however new they are. It keeps files
whose lock is held, even if they have not changed for long.

Locks that were taken on another machine, or before a restart, may be invisible here, for
example on some mounts of NFS. Files of such a writer are removed when they have not changed
for a day. Where the file system has no locks, nothing is removed.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import gzip
import io
import lzma
import os
import pathlib
import platform
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Generator, Iterable
from typing import Any

from sparsejax import ending, file_locks

# File name suffixes of compressed files.
COMPRESSED = (".gz", ".xz")

# Seconds without a change after which a file without a visible lock counts as abandoned.
_QUIET_SECONDS = 24 * 3600
# Error numbers of a full disk. These errors do not name a file.
_FULL = errno.ENOSPC, errno.EFBIG, errno.EDQUOT

_Path = str | os.PathLike[str]


def path_problem(path: _Path) -> str | None:
    """The reason why a path is not possible for any file, or None if it is possible."""
    text = os.fspath(path)
    if "\0" in text:
        return "has a NUL, which cannot be in a path"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "has half a character (a surrogate), which cannot be in a path"
    return None


def check_path(path: _Path) -> None:
    """Raises ValueError, with the path, if no file can have this path.

    The operating system's errors for such paths do not name them.
    """
    if (problem := path_problem(path)) is not None:
        shown = os.fspath(path).encode("utf-8", "backslashreplace").decode()
        raise ValueError(f"{shown.replace('\0', '\\0')}: {problem}")


def opened_regular(path: _Path) -> io.BufferedReader:
    """Opens a regular file to read bytes, and refuses all others.

    `open` would wait for ever for the writer of a pipe, and a device may have no end.

    Raises:
      OSError: the file cannot be opened.
      ValueError: `path` is a pipe, a socket or a device; see also `check_path`.
    """
    check_path(path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    # Checked before opening, because opening a device may have side effects.
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(
            errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path)
        )
    if stat.S_ISREG(mode):
        file = os.fdopen(os.open(path, flags), "rb")
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()  # between `stat` and `open`, another file has replaced it
    raise ValueError(f"{os.fspath(path)}: is not a regular file; copy it to one first")


@contextlib.contextmanager
def whole_file(path: _Path) -> Generator[io.BufferedWriter]:
    """Opens a new file for bytes, which appears at `path` when the block has ended.

    It replaces an existing file. If the block fails, an existing file stays as it was.

    Raises:
      OSError: the file cannot be written. `check_writable` finds some reasons earlier.
    """
    with _replacing(path) as temporary, open(temporary, "xb") as file:
        yield file


@contextlib.contextmanager
def whole_text_file(path: _Path) -> Generator[io.TextIOWrapper]:
    """Opens a text file (UTF-8), which appears at `path` when the block has ended.

    See `whole_file`.

    The file is compressed if its name ends in `.gz` or `.xz`.
    """
    with (
        _replacing(path) as temporary,
        _packing(temporary, path) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as file,
    ):
        yield file


@contextlib.contextmanager
def _packing(temporary: pathlib.Path, path: _Path) -> Generator[Any]:
    """Opens the file `temporary` to write bytes, which are compressed if the suffix of `path` says
    so.
    """
    suffix = pathlib.Path(path).suffix
    with open(temporary, "xb") as file:
        # The header has no time, so that equal content makes equal files.
        if suffix == ".gz":
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                yield packed
        elif suffix == ".xz":
            with lzma.open(file, "wb") as packed:
                yield packed
        else:
            yield file


def write_together(contents: Iterable[tuple[_Path, str | bytes | memoryview]]) -> None:
    """Writes several files: all of them or none, except for a kill at the very end.

    They replace existing files. Text is written as by `whole_text_file`, and bytes as by
    `whole_file`. The files are renamed after all have been written, the last one first. If
    the process is killed or the machine fails during the renames, some files are new and
    others old, because no file system replaces several files at once. Each file is complete
    even then. So a caller that is repeated must pass the same files again, whichever of them
    are new by then.

    Raises:
      OSError: a file cannot be written; nothing has changed.
    """
    with contextlib.ExitStack() as stack:
        for path, content in contents:
            temporary = stack.enter_context(_replacing(path))
            is_text = isinstance(content, str)
            with _packing(temporary, path if is_text else "") as file:
                file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_folder(
    path: _Path, *, names: Collection[str] = ()
) -> Generator[pathlib.Path]:
    """Makes a folder to write files into, which appears at `path` when the block has ended.

    If the block fails, there is no folder. A process may be killed after its folder has
    appeared. To make a repetition no error then, pass the `names` of the files that the
    block writes: an existing folder with equal content stays as it is.

    Raises:
      FileExistsError: `path` exists (see `check_new`) or has other content.
      ValueError: the parent folder does not exist.
    """
    path = pathlib.Path(path)
    check_new(path, names)
    with _hidden(path.parent, path) as temporary:
        temporary.mkdir()
        yield temporary
        check_new(path, names)  # checked because `rename` would replace an empty folder
        if not path.exists():
            os.rename(temporary, path)
        elif not _are_same(temporary, path):
            raise FileExistsError(
                f"{path}: already exists, with other content; name another folder"
            )


@contextlib.contextmanager
def temporary_folder(parent: _Path) -> Generator[pathlib.Path]:
    """Makes a hidden folder in the folder `parent`, and removes it when the block has ended.

    If the process is killed, the next write into `parent` removes it.

    Raises:
      OSError: the folder cannot be made.
    """
    with _hidden(pathlib.Path(parent), parent) as temporary:
        temporary.mkdir()
        yield temporary


def remove_folder(path: _Path) -> None:
    """Removes a folder with all files, or does nothing if it does not exist.

    If the process is killed, the folder is complete or gone.

    Raises:
      OSError: the folder cannot be removed.
    """
    path = pathlib.Path(path)
    if path.exists():
        with _hidden(path.parent, path) as temporary:
            os.rename(path, temporary)
            shutil.rmtree(temporary)


def remove_abandoned(folder: _Path) -> None:
    """Removes the hidden files and folders of writers that were killed.

    Every write into a folder calls this. Files that cannot be removed stay.
    """
    for path in pathlib.Path(folder).glob(".sparsejax-*"):
        with contextlib.suppress(OSError):
            if path.suffix == ".lock":
                _remove_if_free(path)
            elif path.suffix == ".tmp" and not path.with_suffix(".lock").exists():
                _remove_if_quiet(path)


def check_writable(path: _Path) -> None:
    """Checks that a file can be written to `path`.

    Raises:
      ValueError: `path` is a folder or a device, or its parent folder does not exist; see
        also `check_path`.
    """
    check_path(path)
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file, so it cannot be replaced by one")
    _check_parent(path)


def check_new(path: _Path, names: Collection[str] = ()) -> None:
    """Checks that a folder can be made at `path`.

    Raises:
      FileExistsError: `path` exists, and is no folder whose files are exactly `names`.
      ValueError: the parent folder does not exist.
    """
    check_path(path)
    path = pathlib.Path(path)
    is_repeated = bool(names) and path.is_dir() and {*os.listdir(path)} == {*names}
    if os.path.lexists(path) and not is_repeated:
        raise FileExistsError(f"{path}: already exists; name another folder")
    _check_parent(path)


def _are_same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two folders have equal file names with equal content."""
    files = [
        {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        for folder in (one, other)
    ]
    return files[0] == files[1] and all(
        filecmp.cmp(one / file, other / file, shallow=False) for file in files[0]
    )


def _check_parent(path: pathlib.Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


@contextlib.contextmanager
def _replacing(path: _Path) -> Generator[pathlib.Path]:
    """Yields a temporary path for a file, and renames the file to `path` when the block ends."""
    check_path(path)
    path = pathlib.Path(path).resolve()  # for a symbolic link, its target is replaced
    with _hidden(path.parent, path) as temporary:
        yield temporary
        os.replace(temporary, path)


@contextlib.contextmanager
def _hidden(folder: pathlib.Path, told: _Path) -> Generator[pathlib.Path]:
    """Yields a hidden path in a folder, which stays locked until the block ends.

    At the end, a file or folder at this path and its lock are removed. Errors about hidden files
    are raised with the path `told` instead of theirs.
    """
    temporary = folder / f".sparsejax-{uuid.uuid4().hex}.tmp"
    lock, file = temporary.with_suffix(".lock"), None
    try:
        file = _hold(lock)
        if file is not None:
            remove_abandoned(folder)
        with ending.undone_by(lambda: _give_up(temporary)):
            yield temporary
    except OSError as error:
        hidden = os.fspath(lock), os.fspath(temporary)
        # The hidden file's name is replaced, because the caller only knows the final path.
        is_full = error.filename is None and error.errno in _FULL
        if error.filename in hidden or is_full:
            raise OSError(error.errno, error.strerror, os.fspath(told)) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            _remove(temporary)
        if file is not None:
            lock.unlink(missing_ok=True)
            os.close(file)


def _give_up(temporary: pathlib.Path) -> None:
    """Removes a hidden file or folder, although its writer may still run for a moment.

    It is renamed first, so that the writer cannot publish a folder whose files are partly removed.
    """
    gone = temporary.with_name(f".sparsejax-{uuid.uuid4().hex}.tmp")
    lock = gone.with_suffix(".lock")
    with contextlib.suppress(OSError):
        os.rename(temporary.with_suffix(".lock"), lock)
    with contextlib.suppress(OSError):
        os.rename(temporary, gone)
        _remove(gone)
    with contextlib.suppress(OSError):
        lock.unlink()


def _hold(lock: pathlib.Path) -> int | None:
    """Makes and locks a new file; returns its descriptor, or None where there are no locks."""
    while True:
        try:
            file = file_locks.hold(lock)
        except BlockingIOError:
            # Another process is checking whether the file was abandoned.
            continue
        except OSError as error:
            if error.errno not in file_locks.UNSUPPORTED:
                raise
            lock.unlink(missing_ok=True)
            return None
        try:
            os.pwrite(file, _kernel().encode(), 0)
        except OSError:  # for example, because the disk is full
            lock.unlink(missing_ok=True)
            os.close(file)
            raise
        return file


def _kernel() -> str:
    """An identifier of this boot of this machine: locks that were taken in it are visible."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _remove_if_free(lock: pathlib.Path) -> None:
    """Removes a lock file that nobody holds, and the hidden file or folder that belongs to it."""
    file = file_locks.hold(lock, new=False)
    try:
        temporary = lock.with_suffix(".tmp")
        kernel = os.pread(file, 200, 0).decode(errors="replace")
        if not kernel:  # the writer was killed before it made the temporary file
            lock.unlink()
        elif kernel == _kernel() or _is_quiet(lock, temporary):
            _remove(temporary)
            lock.unlink()
    finally:
        os.close(file)


def _remove_if_quiet(path: pathlib.Path) -> None:
    if _is_quiet(path):
        _remove(path)


def _is_quiet(*paths: pathlib.Path) -> bool:
    """Whether no file at or below these paths has changed for `_QUIET_SECONDS`."""
    files = [file for path in paths for file in (path, *path.rglob("*"))]
    times = [file.stat().st_mtime for file in files if file.exists()]
    return time.time() - max(times, default=0) > _QUIET_SECONDS


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
