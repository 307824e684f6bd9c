"""Names in a predictor's file, as bytes, with a hash index for item names.

::

    names.json          {"items": 41}: number of names in each list
    names/0/text        all names of the first list, in UTF-8
    names/0/lengths     number of bytes of each name
    names/0/shifts      array of `NameIndex`, for items only
    names/0/table       array of `NameIndex`, for items only

Reading and indexing two million names as JSON would take seconds.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sparsejax import codec
from sparsejax.data.files.name_index import NameTable
from sparsejax.data.files.names import as_names
from sparsejax.predictors import archive

COUNTS = "names.json"
ITEMS = "items"  # the list of item names in a file
_LENGTH, _TABLE = "<u4", "<i4"
_INDEX = "shifts", "table"


def parts(
    vocabularies: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays to store in a file, by part name."""
    for number, (name, some) in enumerate(vocabularies.items()):
        table = NameTable.of(as_names(some))
        where = f"names/{number}"
        yield f"{where}/text", np.frombuffer(table.encoded, np.uint8)
        yield f"{where}/lengths", np.diff(table.ends).astype(_LENGTH)
        if name == ITEMS:
            yield f"{where}/shifts", table.index.shifts
            yield f"{where}/table", table.index.table


def counts(parts: zipfile.ZipFile, length: int) -> dict[str, int]:
    """The number of names in each list of a file.

    Args:
      parts: archive of the predictor.
      length: size of the file in bytes, which bounds the size of the names.

    Raises:
      ValueError: the numbers are invalid.
    """
    document = archive.read_json(parts, COUNTS, length)
    return codec.value(dict[str, int], document, COUNTS)


def part_names(counts: Mapping[str, int]) -> set[str]:
    """Names of the parts that `read` reads."""
    return {
        f"names/{number}/{part}"
        for number, name in enumerate(counts)
        for part in ("text", "lengths", *(_INDEX if name == ITEMS else ()))
    }


def read(
    parts: zipfile.ZipFile, counts: Mapping[str, int], length: int
) -> dict[str, NameTable]:
    """Reads all names of a file.

    Args:
      parts: archive of the predictor.
      counts: number of names in each list, see `counts`.
      length: size of the file in bytes, which bounds the size of the names.

    Raises:
      ValueError: a part with names is damaged.
    """
    return {
        name: _table(parts, f"names/{number}", counts[name], length, name == ITEMS)
        for number, name in enumerate(counts)
    }


def _table(
    parts: zipfile.ZipFile, where: str, count: int, length: int, indexed: bool
) -> NameTable:
    lengths = archive.read_array(parts, f"{where}/lengths", (count,), _LENGTH)
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    text = archive.read_part(parts, f"{where}/text", length)
    if len(text) != ends[-1]:
        raise ValueError(f"{where}/text has {len(text):,} bytes, expected {ends[-1]:,}")
    if not indexed:
        return NameTable(text, ends)
    groups = 1 << count.bit_length()
    shifts = archive.read_array(parts, f"{where}/shifts", (groups,), np.uint8)
    table = archive.read_array(parts, f"{where}/table", (4 * groups,), _TABLE)
    return NameTable(text, ends, (shifts, table))
