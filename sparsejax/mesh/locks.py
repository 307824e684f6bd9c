"""A folder that one process at a time works in."""

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
    """While this context is open, this process holds the folder, which is made if it is missing.

    The lock is one of the operating system (flock) on the file `.lock` in the folder. The
    file says which process holds it. The lock ends with the process, however the
    process ends; the file stays. If this made the folder, and it is empty at the end,
    it is removed. An object store has no locks: nothing is done there.

    Raises:
      BlockingIOError: another process holds the folder; the message says which.
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
            with contextlib.suppress(OSError):  # another process uses it now
                (folder / _NAME).unlink()
                folder.rmdir()
        os.close(file)  # ends the lock


def _hold(folder: pathlib.Path) -> int:
    """The descriptor of the file, locked."""
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
            with contextlib.suppress(FileNotFoundError):  # it has just ended
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
