"""A data set as a folder of files, which `sparsejax.prepare` writes.

::

    vocabulary.parquet              item, rows: the columns of the matrix, in their order;
                                    vocabulary-ID.parquet in a store
    train/part-ID-00000.parquet     row, indices, values, left_out: rows of the matrix
    train/part-ID-00001.parquet     ...
    test/part-ID-00000.parquet      held-out rows, if there are any
    manifest.json                   a description of the files; written last

`row` is the name of a row, `indices` are its columns in ascending order, and `values` their
values, which an indicator data set does not have. `left_out` is there if entries of items
that the vocabulary lacks were left out, and has their number for each row. Row groups have
about 2^20 entries and files about 2^26. The manifest has the version, the settings, the
number and a hash of the items, and of each file its size, its checksum, and the rows and the
entries of each row group. So a reader opens a file only to read rows of it. A folder without
a manifest is unfinished.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from sparsejax import codec
from sparsejax.data.files import arrow, stores
from sparsejax.data.files.entries import Entries
from sparsejax.data.files.names import Names, as_names, to_arrow
from sparsejax.data.files.opening import DataError, Path
from sparsejax.data.files.parquet import MANIFEST, ParquetPath, opened
from sparsejax.data.files.stores import Place
from sparsejax.data.scan import Group
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.sparse import MAX_ENTRIES

VERSION = 1
_VOCABULARIES = re.compile(r"vocabulary(-\w+)?\.parquet")

_HISTORIES = "holds prepared histories: read it with read_sequences, or scan it with scan_sequences"
_ITEMS = (
    "holds prepared rows of items, without the order of events: prepare the events with "
    "histories=True (--histories)"
)
Part = Literal["train", "test"]
_PIECE = 2**22  # bytes that are read at a time
PARTS: tuple[Part, ...] = ("train", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of a folder.

    Attributes:
      path: its path in the folder.
      size: size in bytes.
      crc32: checksum of its bytes.
      groups: number of rows and number of entries of each row group.
    """

    path: str
    size: int
    crc32: int
    groups: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        # A path leads to a file of the folder.
        if not re.fullmatch(r"(train|test)/[\w-][\w.-]*", self.path, re.ASCII):
            raise ValueError(
                f'"path" is {self.path!r}, which is not a file of a part of the folder'
            )
        if not 0 <= self.size or not 0 <= self.crc32 < 2**32:
            raise ValueError(f'"size" or "crc32" is wrong: {self.size}, {self.crc32}')
        for rows, entries in self.groups:
            if not (0 <= rows < 2**31 and 0 <= entries < 2**31):
                raise ValueError(f'"groups" has {rows} rows with {entries} entries')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts that a folder states of itself.

    >>> table = {"user": ["ann", "ann", "bob"], "item": ["tea", "rye", "tea"]}
    >>> manifest = prepare(pandas.DataFrame(table), "events")
    >>> manifest.num_rows("train"), manifest.num_entries("train"), manifest.num_items
    (2, 3, 2)

    Attributes:
      id: a hash of the entries and the settings; it is part of the names of files.
      indicator: whether every entry is 1.
      num_items: number of items, which are the columns of the matrix.
      vocabulary: a hash of the names of the items.
      train: the files of the rows to train on.
      test: the files of the held-out rows.
      left_out: number of entries that were left out of each part because the vocabulary
        lacks their items.
      skipped: number of wrong events that were left out, by the kind of fault.
      settings: how the folder was made.
      vocabulary_file: the file of the items; see `vocabulary_file`.
      repeats: number of entries after `split_time` that are not held out, because their
        rows have the items before it; see `repeats` of `prepare`.
      histories: whether rows have the order of their events and all repeats.
      events: the columns of the events of histories as `Events.to_json` has them, with their
        categories; None if there are none.
    """

    id: str
    indicator: bool
    num_items: int
    vocabulary: str
    train: tuple[DataFile, ...]
    test: tuple[DataFile, ...]
    left_out: Mapping[str, int]
    skipped: Mapping[str, int]
    settings: Mapping[str, Any]
    vocabulary_file: str
    repeats: int = 0
    histories: bool = False
    events: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not _VOCABULARIES.fullmatch(self.vocabulary_file):
            raise ValueError(
                f'"vocabulary_file" is {self.vocabulary_file!r}, which is not a file of a vocabulary'
            )
        if not 0 <= self.num_items < 2**31:
            raise ValueError(f'"num_items" must be in [0, 2^31), got {self.num_items}')
        for name in ("left_out", "skipped"):
            if min(getattr(self, name).values(), default=0) < 0:
                raise ValueError(f'"{name}" has a negative number')
        if self.repeats < 0:
            raise ValueError(f'"repeats" must be 0 or more, got {self.repeats}')

    def num_rows(self, part: Part = "train") -> int:
        """Number of rows of a part."""
        return sum(rows for file in getattr(self, part) for rows, _ in file.groups)

    def num_entries(self, part: Part = "train") -> int:
        """Number of entries of a part."""
        return sum(count for file in getattr(self, part) for _, count in file.groups)

    def __str__(self) -> str:
        parts = [
            f"{part}: {self.num_rows(part):,} rows, {self.num_entries(part):,} entries"
            + f", {count:,} of unknown items left out" * bool(count)
            + f", {self.repeats:,} repeats left out"
            * (part == "test" and self.repeats > 0)
            for part in PARTS
            if getattr(self, part)
            for count in [self.left_out.get(part, 0)]
        ]
        skipped = [f"{count:,} {what}" for what, count in self.skipped.items()]
        parts.append(f"{self.num_items:,} items")
        if skipped:
            parts.append(f"left out: {', '.join(skipped)}")
        return "; ".join(parts)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        document = {"version": VERSION, **codec.document(self)}
        if not self.histories:  # as releases before wrote it
            del document["histories"], document["events"]
        return codec.text(document, indent=1)

    @classmethod
    def from_json(cls, path: Path, text: bytes) -> Manifest:
        """Reads the text that `to_json` wrote.

        Raises:
          DataError: it is something else, or has another version.
        """
        try:
            document = codec.parse(text)
            if not isinstance(document, dict) or "version" not in document:
                raise ValueError('expected an object with a "version"')
        except ValueError as error:
            raise DataError.at(
                path, f"is not the manifest of a prepared data set: {error}"
            ) from error
        try:
            document = codec.without_version(document, VERSION, "the manifest")
        except ValueError as error:
            raise DataError.at(path, f"cannot be read: {error}") from error
        try:
            return codec.read(cls, document, "the manifest")
        except ValueError as error:
            raise DataError.at(path, f"is damaged: {error}") from error


@dataclasses.dataclass(frozen=True)
class DataFolder:
    """A part of a prepared folder.

    Attributes:
      place: the folder.
      part: "train" or "test".
      manifest: the manifest of the folder.
    """

    place: Place
    part: Part
    manifest: Manifest

    @classmethod
    def find(cls, path: Path, *, histories: bool | None = None) -> DataFolder | None:
        """The prepared folder at a path, or None if there is none.

        The path of the folder stands for its train part. The paths of `train` and `test`
        in it stand for the parts.

        Args:
          path: the path.
          histories: whether it must have histories; None if either will do.

        Raises:
          DataError: the manifest is wrong, or cannot be read; or the folder has other data.
        """
        place = Place.of(path)
        folder, name = place.parent
        candidates: list[tuple[Place, Part]] = [(place, "train")]
        candidates += [(folder, part) for part in PARTS if part == name]
        for where, part in candidates:
            text = where.below(MANIFEST).read()
            if text is not None:
                try:
                    found = Manifest.from_json(where.below(MANIFEST).path, text)
                except DataError:
                    # Other programs write files of this name, too.
                    if not any(map(_VOCABULARIES.fullmatch, where.names())):
                        continue
                    raise
                if histories not in (None, found.histories):
                    raise DataError.at(path, _HISTORIES if found.histories else _ITEMS)
                return cls(where, part, found)
        return None

    def vocabulary(self) -> Names:
        """The names of the items.

        Raises:
          DataError: the file is damaged, or belongs to another manifest.
        """
        place = self.place.below(self.manifest.vocabulary_file)
        content = place.read()
        if content is None:
            raise DataError.at(place.path, "no such file")
        with opened(place.path, pa.BufferReader(content)) as file:
            names = as_names(file.read(columns=["item"]).column(0))
        if len(names) != self.manifest.num_items:
            raise DataError.at(
                place.path,
                f"has {len(names):,} items, but {MANIFEST} states "
                f"{self.manifest.num_items:,}",
            )
        if vocabulary_hash(names) != self.manifest.vocabulary:
            raise DataError.at(place.path, "is not the vocabulary of the manifest")
        return names

    def rows(self) -> tuple[Names, np.ndarray]:
        """The names of the rows, and how many entries were left out of each."""
        names, left_out = [pa.array([], pa.large_string())], [np.empty(0, np.int32)]
        for group in self.groups():
            with group.file.open(one_group=True) as file:
                table = file.read_row_group(group.number)
            names.append(arrow.one(table.column("row")).cast(pa.large_string()))
            counts = np.zeros(len(table), np.int32)
            if "left_out" in table.column_names:
                counts = arrow.numbers(arrow.one(table.column("left_out")))
            left_out.append(counts)
        return as_names(pa.concat_arrays(names)), np.concatenate(left_out)

    def groups(self) -> list[Group]:
        """The row groups that have rows, in order."""
        found = []
        for stated in getattr(self.manifest, self.part):
            place = self.place.below(stated.path)
            file = ParquetPath(
                place.path, place.filesystem, place.inner, stated.size, stated.crc32
            )
            found += [
                Group(file, number, rows, entries)
                for number, (rows, entries) in enumerate(stated.groups)
                if rows
            ]
        return found

    def read(self) -> SparseDataset:
        """All rows, in memory.

        Raises:
          DataError: a file is missing or damaged, or there are too many entries.
        """
        groups = self.groups()
        vocabulary = self.vocabulary()
        if self.manifest.num_entries(self.part) > MAX_ENTRIES:
            raise DataError.at(
                self.place.path,
                f"more than {MAX_ENTRIES:,} entries; scan them with scan_parquet",
            )
        with concurrent.futures.ThreadPoolExecutor() as threads:
            files = {os.fspath(group.file.path): group.file for group in groups}
            if not self.place.is_remote:  # from a store they would be read twice
                list(threads.map(_check_bytes, files.values()))
            parts = list(threads.map(read_rows, groups))
        stored = {"indices", *["values"] * (not self.manifest.indicator)}
        if any(part.columns.keys() != stored for part in parts):
            raise DataError.at(
                self.place.path, f'"indicator" of {MANIFEST} does not fit the files'
            )
        rows = Entries.joined([_no_rows(), *parts])
        values = rows.columns["values"] if "values" in stored else None
        names = as_names(rows.of_rows["names"])
        try:
            matrix = rows.replaced(values=values).csr(len(vocabulary))
            return SparseDataset(matrix, names, vocabulary, rows.of_rows["left_out"])
        except ValueError as error:
            raise DataError.at(self.place.path, f"is damaged: {error}") from error


def _no_rows() -> Entries:
    # No constant of the module: pyarrow imports pandas when it makes its first array.
    return Entries(
        np.zeros(1, np.int64),
        {"indices": np.empty(0, np.int32), "values": np.empty(0, np.float32)},
        {"names": pa.array([], pa.large_string()), "left_out": np.empty(0, np.int32)},
    )


def _check_bytes(file: ParquetPath) -> None:
    """Raises DataError unless a file has the checksum that the manifest states."""
    checksum = 0
    with (
        stores.naming(file.path),
        file.filesystem.open_input_stream(file.inner) as stream,
    ):
        while piece := stream.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    if checksum != file.crc32:
        raise DataError.at(
            file.path,
            f"is damaged, or was changed: {MANIFEST} states another checksum of it",
        )


def read_rows(group: Group) -> Entries:
    """The rows of a row group, with their `names` and `left_out`.

    Raises:
      DataError: the file is missing, is damaged or was changed.
    """
    with group.file.open(one_group=True) as file:
        if group.number >= file.metadata.num_row_groups:
            raise group.file.changed()
        table = file.read_row_group(group.number).combine_chunks()
    if table.num_rows != group.rows or not _is_of_part(table.schema):
        raise group.file.changed()
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    indices = columns["indices"]
    lists = {name: columns[name] for name in ("indices", "values") if name in columns}
    lengths = indices.value_lengths()
    if any(column.null_count for column in columns.values()):
        raise group.file.changed()
    if not all(each.value_lengths().equals(lengths) for each in lists.values()):
        raise group.file.changed()
    if len(indices.flatten()) != group.entries:
        raise group.file.changed()
    left_out = np.zeros(group.rows, np.int32)
    if "left_out" in columns:
        left_out = arrow.numbers(columns["left_out"])
    return Entries.of_lengths(
        arrow.numbers(lengths),
        {name: arrow.numbers(each.flatten()) for name, each in lists.items()},
        {"names": columns["row"].cast(pa.large_string()), "left_out": left_out},
    )


def _is_of_part(schema: pa.Schema) -> bool:
    """Whether a file has the columns that `PartWriter` writes."""
    types = {field.name: field.type for field in schema}
    lists = [types.get("indices"), types.get("values", pa.list_(pa.float32()))]
    return (
        arrow.is_text(pa.nulls(0, types.get("row", pa.null())))
        and all(pa.types.is_list(found) for found in lists if found is not None)
        and [found and found.value_type for found in lists]
        == [pa.int32(), pa.float32()]
        and types.get("left_out", pa.int32()) == pa.int32()
    )


def vocabulary_file(identity: str | None) -> str:
    """The name of the file of the items.

    Args:
      identity: identity of the folder, where two may write it at a time: in a store, or
        on a cluster. So neither replaces the file of the other. None elsewhere.
    """
    return (
        "vocabulary.parquet" if identity is None else f"vocabulary-{identity}.parquet"
    )


def vocabulary_hash(names: Names) -> str:
    """A hash of the names of the items, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    encoded = to_arrow(names)
    for buffer in encoded.buffers()[1:]:
        digest.update(buffer)
    return digest.hexdigest()
