"""Reads and writes folders of numbered changes to a model's embedding tables.

::

    changes/00000007/manifest.json   a description, and the checksum of each file
                     0.parquet       rows of the first table: id, row, ...
                     0.removed       ids of that table whose rows were removed, as uint64
                     values          all other arrays of the model, concatenated

The first change is a *base*: it has all rows. A later one may be a base, too. Each manifest has
the checksum of the previous manifest. So a change that is missing, belongs to another base, or
was renamed is detected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparsejax import codec, row_files
from sparsejax.whole_files import opened_regular, remove_folder, whole_folder

_VERSION = 1
_MANIFEST, _VALUES = "manifest.json", "values"
_NAME = re.compile(r"[0-9]{8}")
_LABEL = "the manifest of changes"
_PIECE = 2**24  # bytes that are read at a time
_MOST_MANIFEST = 2**26  # bytes; far more than the manifest of a thousand tables has


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: one number, or a list of numbers, for each row.

    Attributes:
      name: name of the column; "row" is the embedding vector.
      dtype: dtype of the numbers in files.
      width: length of the list in each row; 0 for a single number.
    """

    name: str
    dtype: str
    width: int


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose changed rows are exported.

    Attributes:
      name: name of the table, with the path of its collection in the model.
      num_rows: number of rows, so that ids are smaller; 0 for a dynamic table, in which any
        number may be an id.
      columns: columns of the table's files.
    """

    name: str
    num_rows: int
    columns: tuple[Column, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array of the model that is no table, which each change stores as a whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a change."""

    name: str
    bytes: int
    checksum: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of one change, stored in its folder.

    Attributes:
      number: number of the change's folder.
      base: checksum of the manifest of the change's base; None if the change is a base.
      previous: checksum of the previous manifest; None for the very first change.
      steps: number of steps that the optimizer has done; None if there was no
        optimizer.
      tables: tables of the model.
      rows: number of rows in the change, for each table.
      removed: number of ids that the change removes, for each table.
      values: arrays of the model that are no tables.
      files: names, sizes and checksums of the folder's files.
    """

    number: int
    base: str | None
    previous: str | None
    steps: int | None
    tables: tuple[Table, ...]
    rows: tuple[int, ...]
    removed: tuple[int, ...]
    values: tuple[Value, ...]
    files: tuple[File, ...]


@dataclasses.dataclass(frozen=True)
class Changes:
    """A summary of the changes that one export has written.

    >>> tables = {"user": DynamicTableConfig(1000, 2)}
    >>> embeddings = EmbeddingCollection(tables, {"user": "user"}, rngs=nnx.Rngs(0))
    >>> written = embeddings.export_changes("of all tables", None).result()
    >>> written.number, written.is_base, written.removed
    (0, True, 0)

    Attributes:
      number: number of the change's folder.
      is_base: whether the export has all rows, not only changed ones.
      rows: number of exported rows.
      removed: number of removed ids.
      steps: number of steps that the optimizer had done; None if there was no
        optimizer.
      base: checksum of the manifest of the base to which the changes belong.
      checksum: checksum of the change's manifest.
    """

    number: int
    is_base: bool
    rows: int
    removed: int
    steps: int | None
    base: str
    checksum: str


@dataclasses.dataclass(frozen=True)
class Content:
    """The changed rows and removed ids of one table.

    Attributes:
      ids: ids of the rows, uint64, ascending.
      columns: arrays with an entry for each row, by the name of the column.
      removed: ids whose rows were removed, ascending.
    """

    ids: np.ndarray
    columns: dict[str, np.ndarray]
    removed: np.ndarray


@dataclasses.dataclass(frozen=True)
class Link:
    """A change on disk, of which the manifest has been read.

    Attributes:
      path: folder of the change.
      manifest: the manifest in the folder.
      checksum: checksum of the manifest.
    """

    path: pathlib.Path
    manifest: Manifest
    checksum: str

    @property
    def changes(self) -> Changes:
        """The summary of this change for users."""
        told = self.manifest
        return Changes(
            number=told.number,
            is_base=told.base is None,
            rows=sum(told.rows),
            removed=sum(told.removed),
            steps=told.steps,
            base=told.base or self.checksum,
            checksum=self.checksum,
        )

    def content(self, number: int) -> Content:
        """Reads the changes of one table, given by its index in the manifest.

        Raises:
          OSError: a file cannot be read.
          ValueError: a file is missing, cut off, or altered, or has numbers that are not finite.
        """
        files = {file.name: file for file in self.manifest.files}
        table = self.manifest.tables[number]
        path = self.path / f"{number}.parquet"
        try:
            ids, columns = row_files.read(self._content(files, path.name))
        except row_files.NotRowsError as error:
            raise ValueError(f"{path} {error}") from None
        gone = b""
        if f"{number}.removed" in files:
            gone = self._content(files, f"{number}.removed")
        removed = np.frombuffer(gone, "<u8").astype(np.uint64)
        stated = self.manifest.rows[number], self.manifest.removed[number]
        wanted = {c.name: (c.dtype, c.width) for c in table.columns}
        found = {
            name: (each.dtype.name, each.shape[1] if each.ndim > 1 else 0)
            for name, each in columns.items()
        }
        if (len(ids), len(removed)) != stated or found != wanted:
            raise ValueError(
                f"{path} does not have what {_MANIFEST} states of table {table.name!r}"
            )
        for name, column in columns.items():
            if not is_finite(column):
                raise ValueError(
                    f"{path}: table {table.name!r} has numbers that are not finite, in "
                    f"{name!r}; export into a new folder"
                )
        return Content(ids, columns, removed)

    def values(self) -> dict[str, np.ndarray]:
        """Reads the arrays that are not tables, by name; raises the errors of `content`."""
        files = {file.name: file for file in self.manifest.files}
        content, start, found = self._content(files, _VALUES), 0, {}
        for value in self.manifest.values:
            dtype = jnp.dtype(value.dtype)
            stop = start + int(np.prod(value.shape, dtype=np.int64)) * dtype.itemsize
            array = np.frombuffer(content[start:stop], dtype)
            found[value.name] = array.reshape(value.shape)
            start = stop
            if not is_finite(array):
                raise ValueError(
                    f"{self.path / _VALUES}: '{value.name}' has numbers that are not "
                    "finite; wait for the next export"
                )
        return found

    def _content(self, files: Mapping[str, File], name: str) -> bytes:
        path = self.path / name
        if name not in files:
            raise ValueError(f"{path} is not among the files of {_MANIFEST}")
        file = files[name]
        try:
            with opened_regular(path) as opened:
                size = os.fstat(opened.fileno()).st_size
                # A file of another size is rejected without being read.
                content = opened.read(file.bytes) if size == file.bytes else b""
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing; expected a file of {file.bytes:,} bytes: copy it again"
            ) from None
        if size != file.bytes:
            raise ValueError(
                f"{path} has {size:,} bytes, expected {file.bytes:,}: it was cut "
                "off or altered, copy it again"
            )
        if _checksum(content) != file.checksum:
            raise ValueError(
                f"{path} was altered: its checksum is {_checksum(content)}, expected "
                f"{file.checksum}; copy it again"
            )
        return content


def is_finite(array: np.ndarray) -> bool:
    """Whether all numbers of an array are finite; true for integers."""
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(
        np.isfinite(array).all()
    )


def numbers(folder: str | os.PathLike[str]) -> list[int]:
    """The numbers of the changes in a folder, ascending; empty if the folder does not exist."""
    folder = pathlib.Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if _NAME.fullmatch(name))


def chain(folder: str | os.PathLike[str], after: Changes | None = None) -> list[Link]:
    """Lists the changes to apply, in order.

    They are those from the last base on, or, given `after`, those that follow it.

    Raises:
      OSError: a file cannot be read.
      ValueError: there are no changes; one is missing, was renamed, or belongs to another
        base; or a manifest was altered. The message names the file.
    """
    folder = pathlib.Path(folder)
    found = numbers(folder)
    if not found:
        raise ValueError(
            f"{folder} has no changes: expected folders such as {_name(0)}, which "
            "export_changes writes"
        )
    links = _behind(folder, found, after) if after else _newest(folder, found)
    for one, other in itertools.pairwise(links):
        _check_follows(other, one.changes)
    return links


def _newest(folder: pathlib.Path, found: Sequence[int], after: int = -1) -> list[Link]:
    """Reads the manifests from the last base behind `after` to the newest change."""
    links: list[Link] = []
    for number in range(found[-1], after, -1):
        if number not in found:
            raise _missing(folder, number, found)
        links.insert(0, read(folder, number))
        if links[0].manifest.base is None:
            break
    return links


def _behind(folder: pathlib.Path, found: Sequence[int], after: Changes) -> list[Link]:
    """Reads the manifests after `after`; if there are bases among them, only those from the last
    base on.
    """
    if found[-1] < after.number:
        raise ValueError(
            f"{folder} has changes up to {_name(found[-1])}, but number {after.number} was "
            "taken already: this is another folder, or an older copy of it"
        )
    if after.number in found:
        here = read(folder, after.number)
        if here.checksum != after.checksum:
            raise ValueError(
                f"{here.path} is of another base, or was altered: its checksum is "
                f"{here.checksum}, expected {after.checksum}, which was taken before"
            )
    links = _newest(folder, found, after.number)
    if links and links[0].manifest.number == after.number + 1:
        _check_follows(links[0], after)
    return links


def _missing(folder: pathlib.Path, number: int, found: Sequence[int]) -> ValueError:
    return ValueError(
        f"{folder / _name(number)} is missing: there is {_name(found[-1])}, which needs it. "
        "Copy it, or export into a new folder"
    )


def _check_follows(link: Link, before: Changes) -> None:
    told = link.manifest
    if told.previous != before.checksum or told.base not in (None, before.base):
        raise ValueError(
            f"{link.path} does not follow {_name(before.number)}: it follows the manifest "
            f"with the checksum {told.previous}, expected {before.checksum}. It is of "
            "another base, or one of the two was altered"
        )


def read(folder: pathlib.Path, number: int) -> Link:
    """Reads the manifest of a change.

    Raises:
      OSError: the manifest cannot be read.
      ValueError: the manifest is missing, was altered, or has another number.
    """
    path = folder / _name(number)
    try:
        with opened_regular(path / _MANIFEST) as file:
            content = file.read(_MOST_MANIFEST)
    except FileNotFoundError:
        raise ValueError(
            f"{path / _MANIFEST} is missing: copy the whole folder again"
        ) from None
    try:
        document = codec.value(dict[str, Any], codec.parse(content), _LABEL)
        checksum = document.pop("checksum", None)
        if checksum != _checksum(codec.text(document).encode()):
            raise ValueError("was cut off or altered: its checksum is another")
        rest = codec.without_version(document, _VERSION, _LABEL)
        manifest = codec.read(Manifest, rest, _LABEL)
    except ValueError as error:
        raise ValueError(f"{path / _MANIFEST}: {error}; copy it again") from None
    if manifest.number != number:
        raise ValueError(
            f"{path} has the changes of number {manifest.number}, expected {number}: they "
            "were copied to another name"
        )
    return Link(path, manifest, checksum)


def write(
    folder: str | os.PathLike[str],
    previous: Link | None,
    *,
    is_base: bool,
    steps: int | None,
    tables: Mapping[Table, tuple[Iterable[tuple[np.ndarray, list]], np.ndarray]],
    values: Mapping[str, np.ndarray],
) -> Link:
    """Writes the next change atomically.

    Args:
      folder: existing folder that holds all changes.
      previous: last change in the folder, or None if there is none.
      is_base: whether the change has all rows.
      steps: number of steps that the optimizer has done; None if there is no optimizer.
      tables: for each table, blocks of rows as `row_files.write` takes them, and the removed
        ids.
      values: arrays of the model that are no tables, by name.

    Raises:
      OSError: a file cannot be written; nothing has changed.
    """
    folder = pathlib.Path(folder)
    number = 0 if previous is None else previous.manifest.number + 1
    path = folder / _name(number)
    with whole_folder(path) as temporary:
        rows = []
        for i, (table, (pieces, removed)) in enumerate(tables.items()):
            counted = _Counted(pieces)
            with open(temporary / f"{i}.parquet", "xb") as file:
                row_files.write(file, _types(table), counted)
            rows.append(counted.rows)
            if len(removed):
                (temporary / f"{i}.removed").write_bytes(removed.astype("<u8").data)
        with open(temporary / _VALUES, "xb") as file:
            file.writelines(
                np.ascontiguousarray(value).tobytes() for value in values.values()
            )
        base = None if is_base or previous is None else previous.changes.base
        manifest = Manifest(
            number=number,
            base=base,
            previous=None if previous is None else previous.checksum,
            steps=steps,
            tables=tuple(tables),
            rows=tuple(rows),
            removed=tuple(len(removed) for _, removed in tables.values()),
            values=tuple(
                Value(name, jnp.dtype(v.dtype).name, v.shape)
                for name, v in values.items()
            ),
            files=tuple(_described(each) for each in sorted(temporary.iterdir())),
        )
        document = {"version": _VERSION} | codec.document(manifest)
        checksum = _checksum(codec.text(document).encode())
        text = codec.text(document | {"checksum": checksum}, indent=1)
        (temporary / _MANIFEST).write_text(text)
    return Link(path, manifest, checksum)


class _Counted:
    """Iterates over blocks of rows, and counts the rows meanwhile."""

    def __init__(self, pieces: Iterable[tuple[np.ndarray, list]]):
        self._pieces, self.rows = pieces, 0

    def __iter__(self):
        for ids, arrays in self._pieces:
            self.rows += len(ids)
            yield ids, arrays


def remove_before_base(folder: str | os.PathLike[str], link: Link) -> None:
    """Removes the changes before the base of a change.

    Folders that cannot be removed stay.
    """
    folder = pathlib.Path(folder)
    try:
        found = numbers(folder)
        while link.manifest.base is not None and link.manifest.number - 1 in found:
            link = read(folder, link.manifest.number - 1)
    except (OSError, ValueError):  # for a damaged manifest, its reader raises the error
        return
    for each in found:
        if each < link.manifest.number:
            with contextlib.suppress(OSError):
                remove_folder(folder / _name(each))


def merged(contents: Iterable[Content]) -> Content:
    """Combines consecutive changes of a table into one; later rows replace earlier ones."""
    first, *others = contents
    ids, columns, gone = first.ids, first.columns, first.removed
    for each in others:
        kept = ~_has(each.ids, ids) & ~_has(each.removed, ids)
        gone = np.concatenate([gone[~_has(each.removed, gone)], each.removed])
        gone = np.sort(gone[~_has(each.ids, gone)])
        ids = np.concatenate([ids[kept], each.ids])
        order = np.argsort(ids)
        ids = ids[order]
        columns = {
            name: np.concatenate([array[kept], each.columns[name]])[order]
            for name, array in columns.items()
        }
    return Content(ids, columns, gone)


def _has(ids: np.ndarray, some: np.ndarray) -> np.ndarray:
    """A mask over `some` that marks the numbers found in `ids`, which are ascending."""
    if not len(ids):
        return np.zeros(len(some), bool)
    place = np.minimum(np.searchsorted(ids, some), len(ids) - 1)
    return ids[place] == some


def _types(table: Table):
    return {
        column.name: row_files.type_of(
            np.empty((0, column.width) if column.width else 0, column.dtype)
        )
        for column in table.columns
    }


def _described(path: pathlib.Path) -> File:
    whole, size = hashlib.blake2b(digest_size=16), 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            whole.update(piece)
            size += len(piece)
    return File(path.name, size, whole.hexdigest())


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _name(number: int) -> str:
    return f"{number:08d}"
