"""Folders with a prepared data set, which `sparsejax.prepare` writes.

::

    vocabulary.parquet              item, rows: the columns of the matrix, in their order;
                                    vocabulary-ID.parquet in a store
    train/part-ID-00000.parquet     row, indices, values, left_out: rows of the matrix
    train/part-ID-00001.parquet     ...
    test/part-ID-00000.parquet      held-out rows, if there are any
    manifest.json                   a description of the files; written last

`row` is the name of a row, `indices` are its columns in ascending order, and `values` are the
values of its entries. An indicator data set has no `values`. `left_out` exists if entries of
unknown items were left out, and has their number for each row. Row groups have about 2^20
entries and files about 2^26. The manifest has the version, the settings, the number of items
and a hash of their names. For each file it has the size, the checksum, and the numbers of rows
and entries of each row group. So a reader opens a file only to read its rows. A folder without
a manifest is incomplete.
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
    """The description of a file with rows, in the manifest.

    Attributes:
      path: relative path of the file in the folder.
      size: size in bytes.
      crc32: CRC-32 checksum of the file.
      groups: number of rows and number of entries of each row group.
    """

    path: str
    size: int
    crc32: int
    groups: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        # The pattern excludes paths that lead out of the folder.
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
    """The description of a prepared folder, stored in it as `manifest.json`.

    >>> table = {"user": ["ann", "ann", "bob"], "item": ["tea", "rye", "tea"]}
    >>> manifest = prepare(pandas.DataFrame(table), "events")
    >>> manifest.num_rows("train"), manifest.num_entries("train"), manifest.num_items
    (2, 3, 2)

    Attributes:
      id: a hash of the entries and the settings; it is part of the names of files.
      indicator: whether every entry is 1.
      num_items: number of items, which are the columns of the matrix.
      vocabulary: a hash of the names of the items.
      train: files of the rows to train on.
      test: files of the held-out rows.
      left_out: number of entries left out of each part because the vocabulary lacks their
        items.
      skipped: number of wrong events that were left out, by the kind of fault.
      settings: settings of `prepare` that made the folder.
      vocabulary_file: name of the file with the items; see `vocabulary_file`.
      repeats: number of entries after `split_time` that are not held out, because their
        rows have the items before it; see `repeats` of `prepare`.
      histories: whether rows are histories: events in their order, with all repeats.
      events: the columns of events in histories with their categories, as the document of
        `Events.to_json`; None if there are none.
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
        """Number of rows in a part."""
        return sum(rows for file in getattr(self, part) for rows, _ in file.groups)

    def num_entries(self, part: Part = "train") -> int:
        """Number of entries in a part."""
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
        if not self.histories:  # earlier releases did not write these keys
            del document["histories"], document["events"]
        return codec.text(document, indent=1)

    @classmethod
    def from_json(cls, path: Path, text: bytes) -> Manifest:
        """Reads the text that `to_json` wrote.

        Raises:
          DataError: the text is no manifest, or has another version.
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
      place: location of the folder.
      part: "train" or "test".
      manifest: manifest of the folder.
    """

    place: Place
    part: Part
    manifest: Manifest

    @classmethod
    def find(cls, path: Path, *, histories: bool | None = None) -> DataFolder | None:
        """Opens the prepared folder at a path; None if there is no prepared folder.

        The path of the folder stands for its train part. The paths of the subfolders `train`
        and `test` stand for those parts.

        Args:
          path: path or address.
          histories: whether the folder must have histories; None if both kinds are accepted.

        Raises:
          DataError: the manifest is damaged or cannot be read, or the folder has the other
            kind of data.
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
                    # Another program may have written this manifest.json.
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
        """The names of the rows, and the number of entries that were left out of each row."""
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
        """Reads all rows of the part into memory.

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
            if not self.place.is_remote:  # this check would download the files twice
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
    # A module constant would make an array at import, for which pyarrow imports pandas.
    return Entries(
        np.zeros(1, np.int64),
        {"indices": np.empty(0, np.int32), "values": np.empty(0, np.float32)},
        {"names": pa.array([], pa.large_string()), "left_out": np.empty(0, np.int32)},
    )


def _check_bytes(file: ParquetPath) -> None:
    """Raises DataError if a file's checksum differs from the manifest's."""
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
    """Reads the rows of a row group, with their `names` and `left_out`.

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
    """Whether a file's schema has the columns and types that `PartWriter` writes."""
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
    """The name of the file with the items.

    Args:
      identity: identity of the folder, if two calls may write the folder at the same time: in
        a store, or on a cluster. Then neither replaces the other's file. Otherwise None.
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
