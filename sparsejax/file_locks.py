"""Locks of the operating system on files, which end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os

# The errors of file systems without locks.
UNSUPPORTED = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP


def hold(path: str | os.PathLike[str], *, new: bool = True) -> int:
    """Locks a file (flock) and returns its descriptor, which holds the lock until closed.

    Args:
      path: the file.
      new: make the file, if there is none.

    Raises:
      BlockingIOError: somebody else holds it.
      FileNotFoundError: there is no such file, or no folder for it.
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
        os.close(file)  # who held it before has removed it


def _is_at(file: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
