"""Writes the files of a prepared folder from entries that are sorted by user.

An engine, on this machine or on a cluster, sorts the entries. `write_rows` takes batches of
them, puts each user's entries into the parts of the folder, and writes them by `PartWriter`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax.data.files import arrow
from sparsejax.data.files.entries import Entries, Leaves, joined, taken
from sparsejax.data.files.names import Names, to_arrow
from sparsejax.data.files.opening import shown
from sparsejax.data.files.parquet import MANIFEST, PART_KEY
from sparsejax.data.files.stored import EVENTS, to_lists
from sparsejax.data.files.stores import Place, crc32, path_of
from sparsejax.data.prepared.folder import DataFile, Manifest, Part
from sparsejax.sparse import as_int32

# Most entries of a row group, which is read as a whole, and most entries of a file.
GROUP_ENTRIES, FILE_ENTRIES = 2**20, 2**26


# Names of columns in an engine's batches, and their names in `Entries`.
_COLUMNS = {
    "number": "users",
    "code": "indices",
    "value": "values",
    "later_value": "later_values",
    "time": "latest",
    "key": "keys",
    "repeated": "repeated",
    "earlier": "earlier",
    "later": "later",
}


# Columns of entries in a file, besides event columns.
_STORED = ("indices", "values", "times")


def leaves_of(batch: pa.RecordBatch) -> Leaves:
    """The columns of a batch of entries as NumPy arrays, by name.

    The entries of a user are consecutive: `users` are ascending numbers, and the `indices` of
    a user ascend. There may be `keys` (numbers of the items by which a split chooses) and the
    columns that `queries.facts` names.
    """
    return {
        name: arrow.numbers(batch.column(column))
        for column, name in _COLUMNS.items()
        if column in batch.schema.names
    }


def whole_users(batches: Iterable[Leaves]) -> Iterator[Entries]:
    """Joins batches of `leaves_of` so that each ends at the end of a user.

    Yields entries with a row for each user. `of_rows["users"]` has the users' numbers.
    """
    waiting: list[Leaves] = []
    for batch in batches:
        users = batch["users"]
        if not len(users):
            continue
        # Further entries of the last user may be in the next batch.
        begin = int(np.searchsorted(users, users[-1]))
        if waiting and (begin or users[0] != waiting[-1]["users"][-1]):
            yield _by_user(joined([*waiting, taken(batch, slice(0, begin))]))
            waiting = []
        elif begin:
            yield _by_user(taken(batch, slice(0, begin)))
        waiting.append(taken(batch, slice(begin, None)))
    if waiting:
        yield _by_user(joined(waiting))


def _by_user(leaves: dict[str, np.ndarray]) -> Entries:
    users = leaves.pop("users")
    starts = np.flatnonzero(np.diff(users, prepend=-1))
    return Entries(np.append(starts, len(users)), leaves, {"users": users[starts]})


def rows_of(
    entries: Entries, chosen: np.ndarray, names: pa.Array, *, with_left_out: bool
) -> Entries:
    """Selects the chosen entries of each user, in the form that `PartWriter` takes.

    Users without a chosen entry are left out.

    Args:
      entries: entries of whole users.
      chosen: `[entries]` bool: whether an entry is in the result.
      names: `[users]` names of the users of these entries, in order.
      with_left_out: whether some entries have unknown items (-1), to be dropped and counted.
    """
    columns = entries.columns.items()
    stored = {n: x for n, x in columns if n in _STORED or n.startswith(EVENTS)}
    rows = Entries(entries.indptr, stored, {"names": names}).keep(chosen)
    rows = rows.without_empty_rows()
    if with_left_out:
        there, rows = rows.lengths, rows.keep(rows.indices >= 0)
        left_out = as_int32("left_out", there - rows.lengths)
        rows = dataclasses.replace(rows, of_rows={**rows.of_rows, "left_out": left_out})
    if "values" in stored:
        rows = rows.replaced(values=rows.columns["values"].astype(np.float32))
    return rows


def _table(rows: Entries) -> pa.Table:
    """Converts rows to a table with the columns that files have."""
    ends = arrow.from_numbers(as_int32("indptr", rows.indptr))
    columns = {"row": rows.of_rows["names"]}
    for name, leaf in rows.columns.items():
        columns[name] = pa.ListArray.from_arrays(ends, to_lists(leaf))
    if "left_out" in rows.of_rows:
        columns["left_out"] = arrow.from_numbers(rows.of_rows["left_out"])
    return pa.table(columns)


def write_rows(
    users: Iterable[tuple[Entries, pa.Array, Mapping[Part, np.ndarray]]],
    folder: Place,
    identity: str,
    with_left_out: Mapping[Part, bool],
    *,
    numbers: range | None = None,
) -> dict[Part, PartWriter]:
    """Writes whole users to the parts of a folder.

    Args:
      users: batches of whole users: entries, names of the users, and for each part a mask
        `[entries]` of the part's entries. An entry may be in both parts.
      folder: location of the folder.
      identity: identity of the folder, which is in the names of files.
      with_left_out: the parts to write, each with whether some of its entries have unknown
        items, to be counted.
      numbers: numbers for the names of files; by default 0, 1, 2, ...

    Returns:
      The writer of each part, with descriptions of the files that it has written.
    """
    with contextlib.ExitStack() as stack:
        writers = {
            part: stack.enter_context(part_writer(folder, part, identity, numbers))
            for part in with_left_out
        }
        for entries, names, chosen in users:
            for part, writer in writers.items():
                rows, columns = entries, entries.columns
                if part == "test" and "later_values" in columns:
                    rows = entries.replaced(values=columns["later_values"])
                counted = with_left_out[part]
                writer.add(rows_of(rows, chosen[part], names, with_left_out=counted))
                if "repeated" in columns:
                    writer.repeated += int(columns["repeated"][chosen[part]].sum())
                elif "later" in columns:
                    writer.repeated += int(
                        (columns["earlier"] & columns["later"]).sum()
                    )
    return writers


@contextlib.contextmanager
def part_writer(
    folder: Place, part: Part, identity: str, numbers: range | None = None
) -> Generator[PartWriter]:
    """Yields a writer for a part. Its files are complete when this context has closed."""
    with contextlib.ExitStack() as stack:
        writer = PartWriter(folder, part, identity, stack, numbers)
        yield writer
        writer.finish()


class PartWriter:
    """Writes the rows of one part into row groups and files; see `part_writer`.

    Attributes:
      files: descriptions of the files that were written.
      left_out: number of entries with items that the vocabulary lacks.
      repeated: number of entries of the part test that have other events before the split,
        including those that are not held out for this reason.
    """

    def __init__(
        self,
        folder: Place,
        part: Part,
        identity: str,
        stack: contextlib.ExitStack,
        numbers: range | None = None,
    ):
        """`stack` closes open files; `numbers` (default 0, 1, ...) are for their names."""
        self._numbers = range(sys.maxsize) if numbers is None else numbers
        self._folder, self._part, self._identity = folder, part, identity
        self._stack = stack
        self._waiting: list[Entries] = []
        self._num_waiting = self._num_written = 0
        self._file: IO[bytes] | None = None
        self._groups: list[tuple[int, int]] = []
        self.files: list[DataFile] = []
        self.left_out = self.repeated = 0

    def add(self, rows: Entries) -> None:
        """Adds rows with `indices` and `names`, perhaps `values` and `left_out`."""
        if "left_out" in rows.of_rows:
            self.left_out += int(rows.of_rows["left_out"].sum())
        # A row counts as its entries plus 1, because an empty row also takes space.
        ends = rows.indptr[1:] + np.arange(1, len(rows.indptr))
        start = 0
        while start < len(ends):
            room = GROUP_ENTRIES - self._num_waiting
            begin = ends[start - 1] if start else 0
            # Take at least one row, even if it is longer than a group.
            stop = max(int(np.searchsorted(ends, begin + room, "right")), start + 1)
            full = stop < len(ends) or ends[stop - 1] - begin >= room
            self._waiting.append(rows.slice(start, stop))
            self._num_waiting += int(ends[stop - 1] - begin)
            if full:
                self._write_waiting()
            start = stop

    def finish(self) -> None:
        """Writes the rows that are still in memory, and completes the last file."""
        self._write_waiting()
        self._finish_file()

    def _write_waiting(self) -> None:
        """Writes the buffered rows as a row group."""
        if not self._waiting:
            return
        table = pa.concat_tables(map(_table, self._waiting))
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
    """Writes the vocabulary's file: each item, and the number of rows that contain it."""
    table = pa.table({"item": to_arrow(names), "rows": arrow.from_numbers(rows)})
    with file.writing() as opened:
        pq.write_table(table, opened, compression="zstd", write_page_checksum=True)


def finish(folder: Place, manifest: Manifest, names: Names, rows: np.ndarray) -> None:
    """Completes a folder: writes the vocabulary, then the manifest.

    Raises:
      FileExistsError: another call has completed the folder with other content.
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
    """Describes a file for the manifest, after its last byte was written."""
    file.flush()
    size = file.tell()
    return DataFile(path=name, size=size, crc32=crc32(path_of(file)), groups=groups)
