"""Reads data sets on disk: row groups are read, decoded, and joined to rows."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sparsejax.data.files.parquet import ParquetPath


class Group(NamedTuple):
    """A row group of a file, and the rows of the data set that begin in it.

    Attributes:
      file: the file.
      number: index of the row group in the file.
      rows: number of rows that begin in the group.
      entries: number of entries of these rows; a row without entries counts as one.
      first: number of the table's rows in the file that come before the group.
      head: number of pairs at the begin of the group that belong to a row of an earlier group.
      tail: later groups into which the group's last row continues, each with the number of
        the row's pairs there.
    """

    file: ParquetPath
    number: int
    rows: int
    entries: int
    first: int = 0
    head: int = 0
    tail: tuple[tuple[Group, int], ...] = ()


class Scan[Rows, Part]:
    """Rows on disk, by row groups. A subclass implements `_decode` and `_joined`."""

    @property
    def _row_groups(self) -> Sequence[Group]:
        """The row groups of the data set, in order."""
        raise NotImplementedError

    def _decode(self, group: Group, low: int, high: int) -> Part:
        """Reads and decodes rows `low .. high - 1` of a row group."""
        raise NotImplementedError

    def _joined(self, parts: list[Part]) -> Rows:
        """Concatenates the rows of the parts, in order. `parts` may be empty."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for group in self._row_groups)

    def read(self, start: int, stop: int) -> Rows:
        """Reads the rows `start .. stop - 1` into host memory.

        Entries of items that the vocabulary lacks are left out, with a warning.

        Raises:
          DataError: a file is damaged, or was changed since it was scanned. A row is wrong,
            or the times of row groups are of several kinds.
          NotImplementedError: a file is text, which can be read in order only.
          ValueError: there are too many entries, or the rows are no valid examples of clicks.
        """
        wanted = pieces(self._row_groups, start, stop)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            parts = list(threads.map(lambda piece: self._decode(*piece), wanted))
        return self._joined(parts)


def pieces(
    groups: Iterable[Group], start: int, stop: int
) -> list[tuple[Group, int, int]]:
    """The groups that have some of the rows `start .. stop - 1`: `(group, low, high)` each.

    `low .. high - 1` are the wanted rows, counted from the group's first row.
    """
    wanted, first = [], 0
    for group in groups:
        low, high = max(start - first, 0), min(stop - first, group.rows)
        if low < high:
            wanted.append((group, low, high))
        first += group.rows
    return wanted


def chunk_ends(groups: Sequence[Group], rows: int) -> list[int]:
    """The ends of chunks of at least `rows` rows; a chunk ends where a group ends."""
    ends = [0]
    total = sum(group.rows for group in groups)
    for end in itertools.accumulate(group.rows for group in groups):
        if end - ends[-1] >= rows or end == total:
            ends.append(end)
    return ends[1:]
