"""Maintains the folder in which JAX caches compiled programs between test sessions."""

import pathlib
import zlib

import filelock


def bound(folder: pathlib.Path, max_bytes: int) -> None:
    """Removes truncated programs, and the least recently used ones beyond a total size.

    JAX never rewrites a program while its file exists. Tests kill processes, and a process killed
    while it writes would leave a file about which all later sessions warn. Only files newer than
    the last call are read.
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
    """Whether a file was written to its end; always true if JAX did not compress it by zlib."""
    content = file.read_bytes()
    # The first byte of zlib's format. With zstd, JAX checks the file itself.
    if content[:1] != b"\x78":
        return bool(content)
    stream = zlib.decompressobj()
    try:
        stream.decompress(content)
    except zlib.error:
        return False
    return stream.eof
