"""Splits a source of events into pieces: files, or tables in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from sparsejax.data.events.block import Cells
from sparsejax.data.files import parquet
from sparsejax.data.files.hive import NO_CONSTANTS, Constants
from sparsejax.data.files.opening import DataError, Path, half_pair, is_address

_ROWS = 2**16  # dicts that become a batch of Arrow at a time
TABLE = "the table"  # stands for the path in messages about data in memory


@dataclasses.dataclass(frozen=True)
class Piece:
    """One file, or one table in memory.

    Attributes:
      path: name of the file or the table in messages.
      table: a reader of the table; None for a file.
      file: the opened location of a Parquet file; None for other pieces.
      constants: columns whose values are in the names of the file's folders.
    """

    path: Path
    table: pa.RecordBatchReader | None = None
    file: parquet.ParquetPath | None = None
    constants: Constants = NO_CONSTANTS

    def with_constants(
        self, parts: Iterable[Cells], names: Mapping[str, str]
    ) -> Iterator[Cells]:
        """Adds the constant columns to the cells of this piece.

        Args:
          parts: cells of the piece, without the constant columns.
          names: name of the column for each key of the cells.
        """
        wanted = {k: name for k, name in names.items() if name in self.constants.texts}
        for cells in parts:
            rows = len(next(iter(cells.columns.values())))
            further = {
                key: self.constants.column(name, rows) for key, name in wanted.items()
            }
            yield cells._replace(columns=cells.columns | further)


def is_path(source: Any) -> bool:
    return isinstance(source, str | os.PathLike)


def find_pieces(source: Any) -> list[Piece]:
    """Finds the files of a path or a list of paths, or makes a reader of a table in memory.

    Raises:
      DataError: a file does not exist, or a table cannot be read.
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
    """Converts Arrow's errors while this context is open to a `DataError` that names the table."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise DataError.at(TABLE, half_pair(error)) from error
    except (pa.ArrowException, OverflowError) as error:
        raise DataError.at(TABLE, f"cannot be read: {error}") from error


def _of_path(path: Path) -> list[Piece]:
    """A piece for a file; for a folder, a piece for each file below it, in the order of names."""
    if not is_address(path) and not os.path.isdir(path):
        return [Piece(path)]
    files = parquet.files_below(path)
    if any(file.is_parquet for file in files):
        files = [file for file in files if file.is_parquet]
    if not files:
        raise DataError.at(path, "is a directory without a file that is not empty")
    return [
        Piece(
            file.path, file=file if file.is_parquet else None, constants=file.constants
        )
        for file in parquet.with_same_constants(files)
    ]


def _of_records(records: Iterator[Any]) -> pa.RecordBatchReader:
    """Makes a reader from an iterator of dicts, of Arrow batches or of Arrow tables."""
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
        columns = [_column(n, [record.get(n) for record in chunk]) for n in names]
        yield pa.record_batch(columns, names=list(map(str, names)))


def _column(name: Any, cells: list[Any]) -> pa.Array:
    try:
        try:
            return pa.array(cells)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            # pandas stores a missing text as NaN, which is read as null.
            return pa.array(cells, from_pandas=True)
    except UnicodeEncodeError as error:
        raise DataError.at(TABLE, f"column {name!r} {half_pair(error)}") from error
    except (pa.ArrowException, OverflowError) as error:
        raise DataError.at(TABLE, f"column {name!r} cannot be read: {error}") from error


def _of_batches(records: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    for each in records:
        if hasattr(each, "__arrow_c_stream__"):
            yield from pa.RecordBatchReader.from_stream(each)
        else:
            yield pa.record_batch(each)
