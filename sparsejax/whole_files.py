"""Files and folders that appear and disappear whole or not at all.

A file or folder that is being written has a hidden name, `.sparsejax-*.tmp`, in the folder
of the final one. Its writer holds a lock on `.sparsejax-*.lock` beside it, which ends with
the process. If that is killed, both stay. The next write into the same folder removes
files that nobody holds, however new they are, and none that are held, however long
their writer is quiet.

A lock that was taken elsewhere, by another machine or before a restart, may not be seen
here, as on some mounts of NFS. Files of such a writer are removed when it has been
quiet for a day. Where the file
system has no locks nothing is removed.
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

# Ends of the names of files that are compressed.
COMPRESSED = (".gz", ".xz")

# A file without a lock that can be seen here has no writer if it was quiet so long.
_QUIET_SECONDS = 24 * 3600
# Errors of a full disk come without the name of the file.
_FULL = errno.ENOSPC, errno.EFBIG, errno.EDQUOT

_Path = str | os.PathLike[str]


def path_problem(path: _Path) -> str | None:
    """Says why no file can have a path; None if one can."""
    text = os.fspath(path)
    if "\0" in text:
        return "has a NUL, which cannot be in a path"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "has half a character (a surrogate), which cannot be in a path"
    return None


def check_path(path: _Path) -> None:
    """Raises ValueError if no file can have a path; the system's errors do not name it."""
    if (problem := path_problem(path)) is not None:
        shown = os.fspath(path).encode("utf-8", "backslashreplace").decode()
        raise ValueError(f"{shown.replace('\0', '\\0')}: {problem}")


def opened_regular(path: _Path) -> io.BufferedReader:
    """Opens a regular file to read bytes.

    `open` would wait for ever for the writer of a pipe, and a device may have no end.

    Raises:
      OSError: it cannot be opened.
      ValueError: it is a pipe, a socket or a device; or see `check_path`.
    """
    check_path(path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    mode = os.stat(path).st_mode  # to open a device may do something
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(
            errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path)
        )
    if stat.S_ISREG(mode):
        file = os.fdopen(os.open(path, flags), "rb")
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()  # it was replaced meanwhile
    raise ValueError(f"{os.fspath(path)}: is not a regular file; copy it to one first")


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
    """Opens a `whole_file` for UTF-8 text.

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
    """Opens a file for bytes that are compressed as the name of `path` says."""
    suffix = pathlib.Path(path).suffix
    with open(temporary, "xb") as file:
        if suffix == ".gz":  # the same content is the same file, whenever it is written
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                yield packed
        elif suffix == ".xz":
            with lzma.open(file, "wb") as packed:
                yield packed
        else:
            yield file


def write_together(contents: Iterable[tuple[_Path, str | bytes | memoryview]]) -> None:
    """Writes several files: all of them or none, unless it is killed at the very end.

    They replace existing files. Text is written as by `whole_text_file`, and bytes as by
    `whole_file`. The files appear when all have been written, the last one first. Each is
    whole. A process that is killed while they appear, or a machine that fails then, leaves
    new files beside old ones: no file system replaces several at once. So a caller must
    give the same files again when it is repeated, whichever of them are new by then.

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
    """Makes a folder to write files into, which appears at `path` when the block is done.

    If the block fails, there is no folder. A process may be killed after its folder has
    appeared. So that repeating it is no error, give the `names` of the files that the
    block writes:
    a folder of the same content then stays as it is.

    Raises:
      FileExistsError: `path` exists, see `check_new`, or has other content.
      ValueError: the parent folder does not exist.
    """
    path = pathlib.Path(path)
    check_new(path, names)
    with _hidden(path.parent, path) as temporary:
        temporary.mkdir()
        yield temporary
        check_new(path, names)  # an empty folder would be replaced
        if not path.exists():
            os.rename(temporary, path)
        elif not _are_same(temporary, path):
            raise FileExistsError(
                f"{path}: already exists, with other content; name another folder"
            )


@contextlib.contextmanager
def temporary_folder(parent: _Path) -> Generator[pathlib.Path]:
    """Makes a hidden folder in another folder, and removes it when the block is done.

    If the process is killed, the next write into the other folder removes it.

    Raises:
      OSError: it cannot be made.
    """
    with _hidden(pathlib.Path(parent), parent) as temporary:
        temporary.mkdir()
        yield temporary


def remove_folder(path: _Path) -> None:
    """Removes a folder, if it exists. If the process is killed, it is there or not.

    Raises:
      OSError: it cannot be removed.
    """
    path = pathlib.Path(path)
    if path.exists():
        with _hidden(path.parent, path) as temporary:
            os.rename(path, temporary)
            shutil.rmtree(temporary)


def remove_abandoned(folder: _Path) -> None:
    """Removes the hidden files and folders of writers that were killed.

    Every write into a folder does so. Files that cannot be removed stay.
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
      ValueError: `path` is a folder or a device, or its folder does not exist; or see
        `check_path`.
    """
    check_path(path)
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file, so it cannot be replaced by one")
    _check_parent(path)


def check_new(path: _Path, names: Collection[str] = ()) -> None:
    """Checks that a folder can be made at `path`.

    Raises:
      FileExistsError: `path` exists, and is no folder of just these `names`.
      ValueError: the parent folder does not exist.
    """
    check_path(path)
    path = pathlib.Path(path)
    is_repeated = bool(names) and path.is_dir() and {*os.listdir(path)} == {*names}
    if os.path.lexists(path) and not is_repeated:
        raise FileExistsError(f"{path}: already exists; name another folder")
    _check_parent(path)


def _are_same(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two folders have the same files with the same content."""
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
    """A temporary name for a file, which is renamed to `path` when the block is done."""
    check_path(path)
    path = pathlib.Path(path).resolve()  # a link stays a link
    with _hidden(path.parent, path) as temporary:
        yield temporary
        os.replace(temporary, path)


@contextlib.contextmanager
def _hidden(folder: pathlib.Path, told: _Path) -> Generator[pathlib.Path]:
    """A hidden name in a folder, which is locked for the block.

    At the end of the block, the file of this name and the lock are removed. Errors of
    it name the path `told`.
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
        if error.filename in hidden or (
            error.filename is None and error.errno in _FULL
        ):  # the caller knows the final name, not these
            raise OSError(error.errno, error.strerror, os.fspath(told)) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            _remove(temporary)
        if file is not None:
            lock.unlink(missing_ok=True)
            os.close(file)


def _give_up(temporary: pathlib.Path) -> None:
    """Removes a hidden file or folder, whose writer goes on for a moment.

    It takes another name first: a folder of which a part is removed must not appear.
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
    """Makes and locks a file for a name that is new; None if there are no locks."""
    while True:
        try:
            file = file_locks.hold(lock)
        except BlockingIOError:  # another process looks whether it was abandoned
            continue
        except OSError as error:
            if error.errno not in file_locks.UNSUPPORTED:
                raise
            lock.unlink(missing_ok=True)
            return None
        try:
            os.pwrite(file, _kernel().encode(), 0)
        except OSError:  # as the disk is full
            lock.unlink(missing_ok=True)
            os.close(file)
            raise
        return file


def _kernel() -> str:
    """The name of this machine's run since its last start: it sees its own locks."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _remove_if_free(lock: pathlib.Path) -> None:
    """Removes a lock that nobody holds, and the file that it protects."""
    file = file_locks.hold(lock, new=False)
    try:
        temporary = lock.with_suffix(".tmp")
        kernel = os.pread(file, 200, 0).decode(errors="replace")
        if not kernel:  # its writer was killed before it made the temporary file
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
    """Whether nothing was written there for long."""
    files = [file for path in paths for file in (path, *path.rglob("*"))]
    times = [file.stat().st_mtime for file in files if file.exists()]
    return time.time() - max(times, default=0) > _QUIET_SECONDS


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
