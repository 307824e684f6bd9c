"""The pieces that a source consists of: files, or tables in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import urllib.parse
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from sparsejax.data.events.block import Cells
from sparsejax.data.files import arrow, parquet
from sparsejax.data.files.opening import DataError, Path, is_address

_ROWS = 2**16  # dicts that become a table at a time
_HIVE = re.compile(r"([^=]+)=(.*)")
_NULL = "__HIVE_DEFAULT_PARTITION__"
TABLE = "the table"  # what messages name


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file, or a table in memory.

    Attributes:
      path: what messages name.
      table: a reader of the table, or None.
      file: the place of a Parquet file; None of other files.
      constants: columns that all rows have alike: those in the names of Hive's folders,
        like `dt=2024-01-01`.
    """

    path: Path
    table: pa.RecordBatchReader | None = None
    file: parquet.ParquetPath | None = None
    constants: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    def with_constants(
        self, parts: Iterable[Cells], names: Mapping[str, str]
    ) -> Iterator[Cells]:
        """The cells of the piece with those of its constants.

        Args:
          parts: cells without them.
          names: the name of the column for each key of the cells.
        """
        wanted = {key: n for key, n in names.items() if n in self.constants}
        for cells in parts:
            rows = len(next(iter(cells.columns.values())))
            further = {
                key: _repeated(self.constants[name], rows)
                for key, name in wanted.items()
            }
            yield cells._replace(columns=cells.columns | further)

    def beside(self, names: Collection[str]) -> Piece:
        """The piece without constants of which a file has a column of its own."""
        left = {n: text for n, text in self.constants.items() if n not in names}
        return dataclasses.replace(self, constants=left)

    def schema(self, own: pa.Schema) -> pa.Schema:
        """The columns of the piece, from those of its file or table."""
        for name in self.constants:
            own = own.append(pa.field(name, _CONSTANT))
        return own

    def batch(self, own: pa.RecordBatch) -> pa.RecordBatch:
        """Some rows of the piece, from those of its file or table."""
        for name, text in self.constants.items():
            own = own.append_column(name, _repeated(text, len(own)))
        return own

    def own(self, names: Iterable[str]) -> list[str]:
        """The columns of these that the file or table has itself."""
        return [name for name in names if name not in self.constants]


_CONSTANT = pa.dictionary(pa.int32(), pa.string())


def _repeated(text: str | None, rows: int) -> pa.Array:
    codes = arrow.from_numbers(np.zeros(rows, np.int32))
    return pa.DictionaryArray.from_arrays(codes, pa.array([text], pa.string()))


def is_path(source: Any) -> bool:
    return isinstance(source, str | os.PathLike)


def find_pieces(source: Any) -> list[Piece]:
    """The pieces of a path, of a list of paths, or of a table in memory.

    Raises:
      DataError: there is no such file, or a table cannot be read.
      TypeError: the source is something else.
    """
    if is_path(source):
        return _of_path(source)
    if hasattr(source, "__arrow_c_stream__"):
        with _naming():
            return [Piece(TABLE, pa.RecordBatchReader.from_stream(source))]
    if isinstance(source, list | tuple) and source and all(map(is_path, source)):
        return [piece for path in source for piece in _of_path(path)]
    if isinstance(source, list | tuple | Iterator):
        with _naming():
            return [Piece(TABLE, _of_records(iter(source)))]
    raise TypeError(
        "expected a path or a list of paths, an address, a table with Arrow's PyCapsule "
        "interface, for example of polars, pandas or pyarrow, or dicts, got "
        f"{type(source).__name__}"
    )


@contextlib.contextmanager
def _naming() -> Generator[None]:
    """Turns errors of Arrow within the block into a `DataError` of the table."""
    try:
        yield
    except (pa.ArrowException, OverflowError) as error:
        raise DataError.at(TABLE, f"cannot be read: {error}") from error


def _of_path(path: Path) -> list[Piece]:
    """A file, or those in a folder and its subfolders in the order of their names."""
    if not is_address(path) and not os.path.isdir(path):
        return [Piece(path)]
    files = parquet.files_below(path)
    if any(_is_parquet(file) for file in files):
        files = [file for file in files if _is_parquet(file)]
    else:
        files = [file for file in files if file.size]  # as Spark writes empty ones
    if not files:
        raise DataError.at(path, "is a directory without a .parquet file or another")
    pieces = [
        Piece(
            file.path,
            file=file if _is_parquet(file) else None,
            constants=_constants(os.fspath(file.path)[len(os.fspath(path)) :]),
        )
        for file in files
    ]
    if (
        len({frozenset(piece.constants) for piece in pieces}) > 1
    ):  # these are not Hive's
        pieces = [dataclasses.replace(piece, constants={}) for piece in pieces]
    return pieces


def _is_parquet(file: parquet.ParquetPath) -> bool:
    return file.inner.endswith(".parquet")


def _constants(below: str) -> dict[str, str | None]:
    """The columns in the names of folders: `dt=2024-01-01/part-0` gives `dt`."""
    folders = below.split("/")[:-1]
    found = [match.groups() for each in folders if (match := _HIVE.fullmatch(each))]
    plain = urllib.parse.unquote
    return {plain(k): None if v == _NULL else plain(v) for k, v in found}


def _of_records(records: Iterator[Any]) -> pa.RecordBatchReader:
    """A reader of dicts, or of Arrow's batches and tables."""
    first = next(records, None)
    if first is None:
        raise DataError.at(TABLE, "holds no data: there is no record")
    records = itertools.chain([first], records)
    if isinstance(first, Mapping):
        batches = _of_dicts(records)
    elif hasattr(first, "__arrow_c_array__") or hasattr(first, "__arrow_c_stream__"):
        batches = _of_batches(records)
    else:
        raise TypeError(
            "expected paths, dicts like {'user': 'ann', 'item': 'tea'} or batches of "
            f"Arrow, got {type(first).__name__}"
        )
    head = next(batches)
    return pa.RecordBatchReader.from_batches(
        head.schema, (b.cast(head.schema) for b in itertools.chain([head], batches))
    )


def _of_dicts(records: Iterator[Any]) -> Iterator[pa.RecordBatch]:
    names: list[str] | None = None
    while chunk := list(itertools.islice(records, _ROWS)):
        for record in chunk:
            if not isinstance(record, Mapping):
                kind = type(record).__name__
                raise TypeError(f"expected only dicts, got {kind}")
        names = names or list(dict.fromkeys(k for record in chunk for k in record))
        columns = [pa.array([record.get(n) for record in chunk]) for n in names]
        yield pa.record_batch(columns, names=list(map(str, names)))


def _of_batches(records: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    for each in records:
        if hasattr(each, "__arrow_c_stream__"):
            yield from pa.RecordBatchReader.from_stream(each)
        else:
            yield pa.record_batch(each)
