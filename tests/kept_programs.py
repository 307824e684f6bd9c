"""The folder in which JAX keeps compiled programs between sessions of tests."""

import pathlib
import zlib

import filelock


def bound(folder: pathlib.Path, max_bytes: int) -> None:
    """Removes programs: those that were cut off, and the least recently used beyond a size.

    JAX never writes a program again while its file is there. Tests kill processes, and
    one that was killed while it wrote would make all later sessions warn. Only what is
    newer than the last look is read.
    """
    if not folder.is_dir():
        return
    looked = folder / "looked"
    with filelock.FileLock(folder / "lock"):
        before = looked.stat().st_mtime if looked.exists() else 0.0
        looked.touch()
        kept = []
        for file in folder.glob("*-cache"):
            status = file.stat()
            if status.st_mtime >= before and not _is_whole(file):
                file.unlink()
            else:
                used = max(status.st_atime, status.st_mtime)
                kept.append((used, status.st_size, file))
        excess = sum(size for _, size, _ in kept) - max_bytes
        for _, size, file in sorted(kept):
            if excess <= 0:
                break
            file.unlink()
            excess -= size


def _is_whole(file: pathlib.Path) -> bool:
    """False for what JAX compressed by zlib and did not write to its end."""
    content = file.read_bytes()
    if content[:1] != b"\x78":  # of zlib; with zstd JAX looks for itself
        return bool(content)
    stream = zlib.decompressobj()
    try:
        stream.decompress(content)
    except zlib.error:
        return False
    return stream.eof
