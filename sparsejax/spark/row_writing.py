"""Writes the rows of a prepared folder in the tasks of Spark."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparsejax import codec
from sparsejax.data.files import arrow
from sparsejax.data.files.entries import Entries, Leaves
from sparsejax.data.files.stores import Place
from sparsejax.data.prepared.folder import DataFile, Part
from sparsejax.data.prepared.folder_files import leaves_of, whole_users, write_rows
from sparsejax.data.prepared.preparation import Cut

_BLOCK = 2**18  # entries that a task sorts into rows at a time

WRITTEN = pa.schema(
    {"parts": pa.string(), "entries": pa.int64(), "checksum": pa.int64()}
)


@dataclasses.dataclass(frozen=True)
class _Written:
    """The files of a part that a task has written, and counts; see `Found`."""

    files: tuple[DataFile, ...]
    left_out: int
    repeated: int


_Parts = Mapping[Part, _Written]


@dataclasses.dataclass(frozen=True)
class Write:
    """A function of a task that writes the rows of its partition.

    Attributes:
      out: path or address of the folder.
      identity: identity of the folder.
      cut: the split of entries into train and test.
      counted: parts to write; see `write_rows`.
      num_tasks: number of partitions.
    """

    out: str
    identity: str
    cut: Cut
    counted: Mapping[Part, bool]
    num_tasks: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        # Tasks never use the same file number: a number modulo the number of tasks is its
        # partition.
        numbers = range(task.partitionId(), 2**31, self.num_tasks)
        sums: list[tuple[int, int]] = []
        writers = write_rows(
            self._users(_summed(batches, sums)),
            Place.of(self.out),
            self.identity,
            self.counted,
            numbers=numbers,
        )
        parts = {
            part: _Written(tuple(writer.files), writer.left_out, writer.repeated)
            for part, writer in writers.items()
        }
        count, checksum = (sum(each) for each in zip((0, 0), *sums, strict=True))
        found = [[codec.text(parts)], [count], [checksum]]
        yield pa.record_batch(found, schema=WRITTEN)

    def _users(
        self, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[tuple[Entries, pa.Array, Mapping[Part, np.ndarray]]]:
        waiting: list[pa.Array] = []  # names of users that were read but not yielded
        first = 0  # number of the first of these users
        for entries in whole_users(_numbered_users(_blocks(batches), waiting)):
            count = int(entries.of_rows["users"][-1]) + 1 - first
            first += count
            names = pa.concat_arrays(waiting)
            waiting[:] = [names[count:]]
            names = names[:count]
            keys = entries.columns.get("keys")
            if keys is not None and self.cut.fraction is not None:
                keys = keys.view(np.uint64)
            yield entries, names, self.cut.parts(entries, names, keys)


def _summed(
    batches: Iterator[pa.RecordBatch], sums: list[tuple[int, int]]
) -> Iterator[pa.RecordBatch]:
    """Yields batches without their hashes. Appends each batch's count and hash sum to `sums`."""
    for batch in batches:
        hashes = arrow.numbers(batch.column("hash"))
        sums.append((len(hashes), int(hashes.sum(dtype=np.int64))))
        yield batch.drop_columns("hash")


def _blocks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins batches, so that each but the last has at least `_BLOCK` rows."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= _BLOCK:
            yield pa.concat_batches(waiting)
            waiting = []
    if waiting:
        yield pa.concat_batches(waiting)


def _numbered_users(
    blocks: Iterator[pa.RecordBatch], names: list[pa.Array]
) -> Iterator[Leaves]:
    """Yields entries whose users are numbered from 0. Appends the users' names to `names`."""
    number, last = -1, None
    for block in blocks:
        if not len(block):
            continue
        column = block.column("name").cast(pa.large_string())
        differ = pc.call_function("not_equal", [column[1:], column[:-1]])
        is_new = np.append(column[0].as_py() != last, differ.to_numpy(False))
        names.append(column.filter(pa.array(is_new)))
        users = number + np.cumsum(is_new, dtype=np.int64)
        number, last = int(users[-1]), column[-1].as_py()
        numbers = pa.array(users)
        yield leaves_of(block.append_column("number", numbers))


@dataclasses.dataclass(frozen=True)
class Found:
    """The files that all tasks wrote, with counts.

    Attributes:
      files: descriptions of the files of each part, sorted by path.
      left_out: number of entries with unknown items, for each part.
      entries: number of entries that the tasks received.
      checksum: sum of the hashes of these entries.
      repeated: number of entries of the part test whose user and item also have an event
        before the split.
    """

    files: Mapping[Part, tuple[DataFile, ...]]
    left_out: Mapping[Part, int]
    entries: int
    checksum: int
    repeated: int

    @classmethod
    def of(cls, rows: list[Any]) -> Found:
        """Combines the rows that tasks returned, whose schema is `WRITTEN`."""
        files: dict[Part, list[DataFile]] = {"train": [], "test": []}
        left_out: dict[Part, int] = {"train": 0, "test": 0}
        repeated = 0
        for text, *_ in rows:
            written = codec.value(_Parts, codec.parse(text), "what a task has written")
            for part, some in written.items():
                left_out[part] += some.left_out
                repeated += some.repeated if part == "test" else 0
                files[part] += some.files
        in_order = {
            part: tuple(sorted(some, key=lambda file: file.path))
            for part, some in files.items()
        }
        entries, checksum = (sum(row[place] for row in rows) for place in (1, 2))
        return cls(in_order, left_out, entries, checksum, repeated)
