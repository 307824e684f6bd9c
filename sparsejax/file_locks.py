"""Locks files by the operating system (flock); a lock ends with the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import os

# Error numbers by which a file system says that it has no locks.
UNSUPPORTED = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP


def hold(path: str | os.PathLike[str], *, new: bool = True) -> int:
    """Locks a file (flock) and returns its descriptor, which holds the lock until closed.

    Args:
      path: the file.
      new: make the file, if it does not exist.

    Raises:
      BlockingIOError: another process, or another descriptor, holds the lock.
      FileNotFoundError: the file (with `new=False`) or its folder does not exist.
      OSError: the file cannot be opened; or, with `errno` among `UNSUPPORTED`, the file
        system has no locks.
    """
    while True:
        file = os.open(path, os.O_RDWR | (os.O_CREAT if new else 0), 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(file)
            raise
        if _is_at(file, path):
            return file
        os.close(file)  # the previous holder has removed the file, so this tries again


def _is_at(file: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
