"""A lock on a folder, so that only one process works in it."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import socket
import warnings
from collections.abc import Iterator

from sparsejax import file_locks
from sparsejax.whole_files import check_path

_NAME = ".lock"


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """While this context is open, this process has locked the folder; it is created if missing.

    The lock is one of the operating system (flock) on the file `.lock` in the folder, which
    names the process. The lock ends with the process, however that ends; the file stays.
    If this function created the folder and it is empty at the end, the folder is removed.
    An object store has no locks: there nothing is done.

    Raises:
      BlockingIOError: another process has locked the folder; the message says which.
      OSError: the folder or the file cannot be made.
      ValueError: no file can have this path.
    """
    if "://" in os.fspath(folder):
        yield
        return
    check_path(folder)
    folder = pathlib.Path(folder)
    is_new = not folder.exists()
    file = _hold(folder)
    try:
        yield
    finally:
        if is_new and folder.is_dir() and os.listdir(folder) == [_NAME]:
            # Another process may be using the folder now.
            with contextlib.suppress(OSError):
                (folder / _NAME).unlink()
                folder.rmdir()
        os.close(file)  # releases the lock


def _hold(folder: pathlib.Path) -> int:
    """Locks the folder's lock file, and returns its descriptor."""
    path = folder / _NAME
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = file_locks.hold(path)
            break
        except FileNotFoundError:  # the folder was removed
            continue
        except BlockingIOError:
            holder = ""
            # The process that held the lock may have just ended, and removed the file.
            with contextlib.suppress(FileNotFoundError):
                holder = path.read_text(errors="replace")[:200].partition("\n")[0]
            raise BlockingIOError(
                f"{folder}: is in use by {holder or 'another process'}; wait for its "
                "end, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in file_locks.UNSUPPORTED:
                raise
            warnings.warn(
                f"{folder} is on a file system without locks ({error.strerror}): let "
                "no other process train there",
                stacklevel=4,
            )
            return os.open(path, os.O_RDWR)
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)
    return file
