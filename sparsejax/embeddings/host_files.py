"""Stores rows in host memory as files. Each file has a piece of the rows; a save writes only
changed pieces.

A piece has the rows in adjacent slots of all 256 hands (virtual shards). Rows are distributed over
the hands in turn, so these rows have adjacent ids, and popular ids are in few pieces. The name of
a file contains the digest of its content. So files are never changed, and checkpoints share them.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from sparsejax.mesh.layout import ROW_MULTIPLE
from sparsejax.whole_files import whole_file

# Approximate bytes of a piece, and largest number of pieces.
_PIECE_BYTES, _MOST_PIECES = 2**22, 4096


class AlteredError(OSError):
    """The content of a file differs from what was written."""


class Pieces:
    """The pieces of the rows of a stack.

    Args:
      arrays: arrays `[num_rows, ...]` by name.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = dict(arrays)
        some = next(iter(self.arrays.values()))
        self.hand = len(some) // ROW_MULTIPLE
        row = sum(a.dtype.itemsize * a[0].size for a in self.arrays.values())
        least = -(-self.hand // _MOST_PIECES)
        self.slots = max(least, _PIECE_BYTES // (ROW_MULTIPLE * row), 1)
        self.count = -(-self.hand // self.slots)
        self.changed = np.ones(self.count, bool)
        # The folder of the last save, and the file of each piece there; none for a piece whose
        # rows were never seen.
        self._folder: pathlib.Path | None = None
        self._names: dict[int, str] = {}
        kinds = {n: [a.dtype.str, *a.shape[1:]] for n, a in self.arrays.items()}
        self._header = (
            json.dumps({"rows": len(some), "arrays": kinds}, sort_keys=True) + "\n"
        ).encode()

    def note(self, rows: np.ndarray) -> None:
        """Marks rows as changed."""
        self.changed[rows % self.hand // self.slots] = True

    def save(self, folder: str | os.PathLike[str]) -> list[str]:
        """Writes the changed pieces. Returns the file names of all pieces."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self._folder != folder:
            self._folder, self._names, self.changed[:] = folder, {}, True
        for piece in np.flatnonzero(self.changed).tolist():
            parts = [np.ascontiguousarray(part) for part in self._views(piece).values()]
            if parts[0].any():
                name = _name(piece, self._header, *parts)
                if not _is_sound(folder / name, piece):
                    with whole_file(folder / name) as file:
                        file.write(self._header)
                        file.writelines(part.data for part in parts)
                self._names[piece] = name
            self.changed[piece] = False
        return sorted(self._names.values())

    def load(self, folder: str | os.PathLike[str], names: list[str]) -> None:
        """Replaces all rows by the content of files that `save` wrote.

        Raises:
          ValueError: a file belongs to other tables or another optimizer. No row was replaced.
          AlteredError: a file was altered.
          OSError: a file cannot be read.
        """
        folder = pathlib.Path(folder)
        known = {int(name.partition("-")[0]): name for name in names}
        for name in known.values():
            self._check_header(folder / name)
        for piece in range(self.count):
            views = self._views(piece)
            if piece not in known:
                first = next(iter(views.values()))
                if first.any():
                    first[...] = 0
                continue
            path = folder / known[piece]
            data = path.read_bytes()
            start = len(self._header)
            size = start + sum(view.nbytes for view in views.values())
            if path.name != _name(piece, data) or len(data) != size:
                raise AlteredError(f"{path} was altered")
            for view in views.values():
                part = np.frombuffer(data, view.dtype, view.size, start)
                view[...] = part.reshape(view.shape)
                start += view.nbytes
        self._folder, self._names = folder, known
        self.changed[:] = False

    def _check_header(self, path: pathlib.Path) -> None:
        with path.open("rb") as file:
            if file.read(len(self._header)) == self._header:
                return
        if not _is_sound(path, int(path.name.partition("-")[0])):
            raise AlteredError(f"{path} was altered")
        with path.open("rb") as file:
            found = file.readline(300).decode(errors="replace").strip()
        raise ValueError(
            f"{path} has other rows: {found}, expected {self._header.decode().strip()}"
        )

    def _views(self, piece: int) -> dict[str, np.ndarray]:
        start = piece * self.slots
        return {
            name: a.reshape(ROW_MULTIPLE, self.hand, *a.shape[1:])[
                :, start : start + self.slots
            ]
            for name, a in sorted(self.arrays.items())
        }


def _name(piece: int, *parts: bytes | np.ndarray) -> str:
    """The name of a file, with a digest of its content."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return f"{piece}-{digest.hexdigest()}"


def _is_sound(path: pathlib.Path, piece: int) -> bool:
    """Whether a file exists and has the content that was written."""
    try:
        return path.name == _name(piece, path.read_bytes())
    except OSError:
        return False
