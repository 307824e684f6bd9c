"""Writes the files of a prepared folder, from entries that are sorted by user.

Whatever sorts them, an engine here or on a cluster, gives batches of sorted entries to
`rows_of`, splits the rows by a `Split`, and writes them by `PartWriter`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax.data import arrow
from sparsejax.data.files import shown
from sparsejax.data.folder import DataFile, Manifest, Part
from sparsejax.data.names import Names, to_arrow
from sparsejax.data.parquet import MANIFEST, PART_KEY
from sparsejax.data.stores import Place, crc32, path_of
from sparsejax.sparse import as_int32

# Entries of a row group, which is read as a whole, and of a file.
GROUP_ENTRIES, FILE_ENTRIES = 2**20, 2**26


@dataclasses.dataclass(frozen=True)
class SortedEntries:
    """Some entries, those of a user one after the other, in ascending columns.

    Attributes:
      users: `[entries]` int64: ascending numbers of the users.
      columns: `[entries]` int32; -1 if the vocabulary lacks the item.
      values: `[entries]` float64, or None.
      times: `[entries]` int64 or float64, or None.
      keys: `[entries]` int64, what a split needs to know of the items, or None.
      repeated: `[entries]` int8, see `queries.is_repeated`, or None.
    """

    users: np.ndarray
    columns: np.ndarray
    values: np.ndarray | None
    times: np.ndarray | None
    keys: np.ndarray | None = None
    repeated: np.ndarray | None = None

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> SortedEntries:
        """The entries of a batch: its columns `number`, `code`, and the others that it has.

        They are `value`, `time`, `key` and `repeated`.
        """

        def column(name: str) -> np.ndarray | None:
            found = name in batch.schema.names
            return arrow.numbers(batch.column(name)) if found else None

        users, columns = column("number"), column("code")
        assert users is not None and columns is not None
        more = [column(name) for name in ("value", "time", "key", "repeated")]
        return cls(users, columns, *more)

    def slice(self, start: int, stop: int) -> SortedEntries:
        """Entries `start .. stop - 1`."""
        leaves: list[Any] = []
        for leaf in self._leaves():
            leaves.append(None if leaf is None else leaf[start:stop])
        return SortedEntries(*leaves)

    @staticmethod
    def joined(parts: list[SortedEntries]) -> SortedEntries:
        """The entries of all parts, one after the other."""
        leaves: list[Any] = []
        for pieces in zip(*(part._leaves() for part in parts), strict=True):
            leaves.append(None if pieces[0] is None else np.concatenate(pieces))
        return SortedEntries(*leaves)

    def _leaves(self) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows in memory.

    Attributes:
      names: `[rows]` text.
      indptr: `[rows + 1]` int64, where each row begins.
      indices: `[entries]` int32.
      values: `[entries]` float32, or None.
      left_out: `[rows]` int32, entries of items that the vocabulary lacks; or None.
    """

    names: pa.Array
    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None
    left_out: np.ndarray | None

    def slice(self, start: int, stop: int) -> Rows:
        """Rows `start .. stop - 1`."""
        begin, end = self.indptr[start], self.indptr[stop]
        return Rows(
            self.names.slice(start, stop - start),
            self.indptr[start : stop + 1] - begin,
            self.indices[begin:end],
            None if self.values is None else self.values[begin:end],
            None if self.left_out is None else self.left_out[start:stop],
        )

    def table(self) -> pa.Table:
        """The columns of a file."""
        offsets = arrow.from_numbers(as_int32("indptr", self.indptr))
        columns = {"row": self.names}
        for name, leaf in (("indices", self.indices), ("values", self.values)):
            if leaf is not None:
                flat = arrow.from_numbers(leaf)
                columns[name] = pa.ListArray.from_arrays(offsets, flat)
        if self.left_out is not None:
            columns["left_out"] = arrow.from_numbers(self.left_out)
        return pa.table(columns)


def whole_users(batches: Iterable[SortedEntries]) -> Iterator[SortedEntries]:
    """The same entries in batches that end where a user ends."""
    waiting: list[SortedEntries] = []
    for batch in batches:
        if not len(batch.users):
            continue
        # Where the last user of the batch begins.
        begin = int(np.searchsorted(batch.users, batch.users[-1]))
        if waiting and (begin or batch.users[0] != waiting[-1].users[-1]):
            yield SortedEntries.joined([*waiting, batch.slice(0, begin)])
            waiting = []
        elif begin:
            yield batch.slice(0, begin)
        waiting.append(batch.slice(begin, len(batch.users)))
    if waiting:
        yield SortedEntries.joined(waiting)


def rows_of(
    entries: SortedEntries, chosen: np.ndarray, names: pa.Array, *, with_left_out: bool
) -> Rows:
    """The rows of whole users that have chosen entries.

    Args:
      entries: of whole users.
      chosen: `[entries]` bool.
      names: `[users]` the names of the users of these entries, in order.
      with_left_out: count entries that the vocabulary lacks. Otherwise there are none.
    """
    is_new = np.diff(entries.users, prepend=-1) != 0
    user = (np.cumsum(is_new) - 1)[chosen]
    columns = entries.columns[chosen]
    values = None if entries.values is None else entries.values[chosen]
    there = np.bincount(user, minlength=len(names))
    rows = np.flatnonzero(there)
    left_out = None
    if with_left_out:
        known = columns >= 0
        user, columns = user[known], columns[known]
        values = None if values is None else values[known]
        counts = np.bincount(user, minlength=len(names))
        left_out = as_int32("left_out", (there - counts)[rows])
        there = counts
    return Rows(
        names if len(rows) == len(names) else names.take(arrow.from_numbers(rows)),
        np.append(0, np.cumsum(there[rows])),
        columns,
        None if values is None else values.astype(np.float32),
        left_out,
    )


def write_rows(
    users: Iterable[tuple[SortedEntries, pa.Array, np.ndarray]],
    folder: Place,
    identity: str,
    with_left_out: Mapping[Part, bool],
    *,
    numbers: range | None = None,
) -> dict[Part, PartWriter]:
    """Writes whole users to the parts of a folder.

    Args:
      users: entries, the names of their users, and `[entries]` bool: those of test.
      folder: the folder.
      identity: of the folder.
      with_left_out: the parts to write; for each whether it counts entries that the
        vocabulary lacks.
      numbers: of the files; by default all from 0.

    Returns:
      For each part what was written.
    """
    with contextlib.ExitStack() as stack:
        writers = {
            part: stack.enter_context(part_writer(folder, part, identity, numbers))
            for part in with_left_out
        }
        for entries, names, is_held in users:
            for part, writer in writers.items():
                chosen = is_held if part == "test" else ~is_held
                counted = with_left_out[part]
                writer.add(rows_of(entries, chosen, names, with_left_out=counted))
                if entries.repeated is not None:
                    writer.repeated += int(np.sum(entries.repeated[chosen]))
    return writers


@contextlib.contextmanager
def part_writer(
    folder: Place, part: Part, identity: str, numbers: range | None = None
) -> Generator[PartWriter]:
    """Writes rows to the files of a part, which are complete when the block is done."""
    with contextlib.ExitStack() as stack:
        writer = PartWriter(folder, part, identity, stack, numbers)
        yield writer
        writer.finish()


class PartWriter:
    """See `part_writer`.

    Attributes:
      files: what was written.
      left_out: number of entries of items that the vocabulary lacks.
      repeated: number of entries that have other events before the split; of test.
    """

    def __init__(
        self,
        folder: Place,
        part: Part,
        identity: str,
        stack: contextlib.ExitStack,
        numbers: range | None = None,
    ):
        """`stack` has the file that is open. Files have `numbers`, by default all from 0."""
        self._numbers = range(sys.maxsize) if numbers is None else numbers
        self._folder, self._part, self._identity = folder, part, identity
        self._stack = stack
        self._waiting: list[Rows] = []
        self._num_waiting = self._num_written = 0
        self._file: IO[bytes] | None = None
        self._groups: list[tuple[int, int]] = []
        self.files: list[DataFile] = []
        self.left_out = self.repeated = 0

    def add(self, rows: Rows) -> None:
        """Takes the next rows."""
        if rows.left_out is not None:
            self.left_out += int(rows.left_out.sum())
        # A row without entries takes room, too.
        ends = rows.indptr[1:] + np.arange(1, len(rows.indptr))
        start = 0
        while start < len(ends):
            room = GROUP_ENTRIES - self._num_waiting
            begin = ends[start - 1] if start else 0
            # At least one row, even if it is too long.
            stop = max(int(np.searchsorted(ends, begin + room, "right")), start + 1)
            full = stop < len(ends) or ends[stop - 1] - begin >= room
            self._waiting.append(rows.slice(start, stop))
            self._num_waiting += int(ends[stop - 1] - begin)
            if full:
                self._write_waiting()
            start = stop

    def finish(self) -> None:
        """Writes what waits."""
        self._write_waiting()
        self._finish_file()

    def _write_waiting(self) -> None:
        """Writes what waits as a row group."""
        if not self._waiting:
            return
        table = pa.concat_tables(rows.table() for rows in self._waiting)
        entries = sum(len(rows.indices) for rows in self._waiting)
        self._waiting, self._num_waiting = [], 0
        if self._file is None:
            place = self._place()
            self._file = self._stack.enter_context(place.writing())
            schema = table.schema.with_metadata({PART_KEY: self._identity.encode()})
            self._writer = pq.ParquetWriter(
                self._file,
                schema,
                compression="zstd",
                use_dictionary=False,
                write_page_checksum=True,
            )
        self._writer.write_table(table, row_group_size=len(table))
        self._groups.append((len(table), entries))
        self._num_written += entries
        if self._num_written >= FILE_ENTRIES:
            self._finish_file()

    def _place(self) -> Place:
        return self._folder.below(self._name())

    def _name(self) -> str:
        number = self._numbers[len(self.files)]
        return f"{self._part}/part-{self._identity}-{number:05}.parquet"

    def _finish_file(self) -> None:
        if self._file is None:
            return
        self._writer.close()
        self.files.append(_written(self._file, self._name(), tuple(self._groups)))
        self._stack.close()
        self._file, self._groups, self._num_written = None, [], 0


def _write_vocabulary(file: Place, names: Names, rows: np.ndarray) -> None:
    """Writes the file of the items, with the number of rows that have each."""
    table = pa.table({"item": to_arrow(names), "rows": arrow.from_numbers(rows)})
    with file.writing() as opened:
        pq.write_table(table, opened, compression="zstd", write_page_checksum=True)


def finish(folder: Place, manifest: Manifest, names: Names, rows: np.ndarray) -> None:
    """Writes the vocabulary and the manifest, which makes a folder complete.

    Raises:
      FileExistsError: the folder is complete meanwhile, with other content.
    """
    _check_no_other(folder, manifest)
    _write_vocabulary(folder.below(manifest.vocabulary_file), names, rows)
    _check_no_other(folder, manifest)
    with folder.below(MANIFEST).writing() as file:
        file.write(manifest.to_json().encode())


def _check_no_other(folder: Place, manifest: Manifest) -> None:
    place = folder.below(MANIFEST)
    text = place.read()
    if text is not None and Manifest.from_json(place.path, text).id != manifest.id:
        raise FileExistsError(
            f"{shown(folder.path)}: another preparation has finished there meanwhile; "
            "name another folder"
        )


def _written(
    file: IO[bytes], name: str, groups: tuple[tuple[int, int], ...]
) -> DataFile:
    """The manifest's record of a file that is open and complete."""
    file.flush()
    size = file.tell()
    return DataFile(path=name, size=size, crc32=crc32(path_of(file)), groups=groups)
