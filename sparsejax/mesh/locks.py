"""A folder that one process at a time works in."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import pathlib
import socket
import warnings
from collections.abc import Iterator

_NAME = ".lock"
# The errors of file systems without locks.
_UNSUPPORTED = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Within it, this process holds the folder, which is made if it does not exist.

    The lock is one of the operating system (flock) on the file `.lock` in the folder. The
    file says who holds it. The lock ends with the process, however the process ends; the
    file stays. If this made the folder, and it is empty at the end, it is removed. An
    object store has no locks: nothing is done there.

    Raises:
      BlockingIOError: another process holds the folder; the message says which.
      OSError: the folder or the file cannot be made.
    """
    if "://" in os.fspath(folder):
        yield
        return
    folder = pathlib.Path(folder)
    is_new = not folder.exists()
    file = _hold(folder)
    try:
        yield
    finally:
        if is_new and folder.is_dir() and os.listdir(folder) == [_NAME]:
            with contextlib.suppress(OSError):  # another process uses it now
                (folder / _NAME).unlink()
                folder.rmdir()
        os.close(file)  # ends the lock


def _hold(folder: pathlib.Path) -> int:
    """The descriptor of the file, locked."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the folder was removed
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace").partition("\n")[0]
            os.close(file)
            raise BlockingIOError(
                f"{folder}: is in use by {holder or 'another process'}; wait for its "
                "end, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(file)
                raise
            warnings.warn(
                f"{folder} is on a file system without locks ({error.strerror}): let "
                "no other process train there",
                stacklevel=4,
            )
            return file
        if _is_at(file, folder / _NAME):
            break
        os.close(file)  # the process that held it before has removed it
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)
    return file


def _is_at(file: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
