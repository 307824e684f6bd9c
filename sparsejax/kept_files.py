"""Files in a folder of the user's cache: whole, bounded in all, the least recently used removed."""

from __future__ import annotations

import contextlib
import io
import pathlib
import tempfile
from collections.abc import Generator

from sparsejax.whole_files import whole_file


@contextlib.contextmanager
def kept_file(path: pathlib.Path, max_bytes: int) -> Generator[io.BufferedWriter]:
    """Opens a file for bytes, which appears at `path` when the block is done.

    Then files of the same suffix are removed, until those in its folder have `max_bytes`
    at most: first those that were not used for longest. `os.utime` says that one is used.

    Raises:
      OSError: the file cannot be written.
    """
    check_writable(path.parent)
    with whole_file(path) as file:
        yield file
    size = 0
    others = path.parent.glob(f"*{path.suffix}")
    for other in sorted(others, key=_last_used, reverse=True):
        with contextlib.suppress(OSError):  # another process has removed it
            size += other.stat().st_size
            if size > max_bytes:
                other.unlink()


def check_writable(path: pathlib.Path) -> None:
    """Makes a folder that only the user can read, if it does not exist.

    Raises:
      OSError: files cannot be made in it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass


def _last_used(path: pathlib.Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
