"""Writes data sets as text files, and arrays of numbers as files of several formats."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from sparsejax.data.events.lines import ESCAPES
from sparsejax.data.files import arrow, parquet
from sparsejax.data.files.names import Names, as_names
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.whole_files import whole_file, whole_text_file

_GROUP_ROWS = 2**18
_ESCAPED = str.maketrans(ESCAPES)
_ESCAPED_ROW = {char: text for char, text in _ESCAPED.items() if chr(char) not in ",:"}


def write_text(file: io.TextIOWrapper, data: SparseDataset) -> None:
    """Writes a data set in the text format of DSSTNE, which can hold empty rows and values.

    It cannot hold times; a warning says so.

    Names are escaped as `sparsejax.data.read_text` reads them.

    Raises:
      ValueError: a name is empty or contains a zero byte, or the name of a row contains a
        byte order mark.
    """
    _warn_of_times(data, "text")
    row_names = escaped("row", data.row_names)
    feature_names = escaped("feature", data.feature_names)
    data = dataclasses.replace(data, row_names=row_names, feature_names=feature_names)
    for row, features, values in _rows(data):
        if values is not None:
            features = (f"{f},{v}" for f, v in zip(features, values, strict=True))
        file.write(f"{row}\t{':'.join(features)}\n")


def escaped(what: str, names: Names) -> Names:
    """Escapes names for the text format.

    Raises:
      ValueError: the text format cannot hold a name.
    """
    is_row = what == "row"
    check_names(what, names, "\ufeff" if is_row else "", "text")
    escapes = _ESCAPED_ROW if is_row else _ESCAPED
    return as_names([name.translate(escapes) for name in names.tolist()])


def write_adjacency(file: io.TextIOWrapper, data: SparseDataset) -> None:
    """Writes `row feature feature ...` lines, see `sparsejax.data.read_adjacency`.

    They cannot hold times; a warning says so.

    Raises:
      ValueError: the entries have values, or a name is empty or contains white space.
    """
    if data.matrix.data is not None:
        raise ValueError(
            "the format adjacency cannot hold values but the data has some; choose text, "
            "pairs or parquet, or ignore the values (indicator=True)"
        )
    _warn_of_times(data, "adjacency")
    for what, names in (("row", data.row_names), ("feature", data.feature_names)):
        check_names(what, names, " \t\v\f\r\n\ufeff", "adjacency")
    file.writelines(" ".join((row, *rest)) + "\n" for row, rest, _ in _rows(data))


def write_pairs(
    file: io.TextIOWrapper, data: SparseDataset, *, delimiter: str = "\t"
) -> None:
    """Writes a header, and a line for each entry; see `sparsejax.data.read_pairs`.

    If there are times, the entries of a row come in the order of their events, which shows
    the order of entries with equal times. If the delimiter is not TAB, fields are quoted
    where it is necessary. Rows without entries cannot be written; a warning counts them.

    Raises:
      ValueError: a name is empty or contains a line end, or a TAB if that is the delimiter.
        Or a time is a date before the year 0 or after 9999, which text cannot hold.
    """
    forbidden = "\t\r\n" if delimiter == "\t" else "\r\n"
    for what, names in (("row", data.row_names), ("feature", data.feature_names)):
        check_names(what, names, forbidden, "pairs")
    empty = int(np.sum(np.diff(data.matrix.indptr) == 0))
    if empty:
        warnings.warn(
            f"{empty:,} of {data.num_rows:,} rows have no entries and are left out: the "
            "format pairs cannot hold them",
            stacklevel=2,
        )
    valued, timed = data.matrix.data is not None, data.times is not None
    header = ["user", "item", *["value"] * valued, *["time"] * timed]
    write = _record_writer(file, delimiter)
    write([header])
    times, places = _times(data) if timed else ([], None)
    start = 0
    for row, features, values in _rows(data, places):
        end = start + len(features)
        columns = [[row] * len(features), features]
        columns += [] if values is None else [values]
        columns += [times[start:end]] if timed else []
        write(zip(*columns, strict=True))
        start = end


def _times(data: SparseDataset) -> tuple[list[str], np.ndarray]:
    """Times as text, and `[entries]` numbers of their entries, both sorted by row and event."""
    times, order = data.times, data.order
    assert times is not None and order is not None
    rows = np.repeat(np.arange(data.num_rows), np.diff(data.matrix.indptr))
    places = np.lexsort((order, rows))
    times = times[places]
    if times.dtype.kind != "M":  # `repr` has all digits of a float
        return list(map(repr, times.tolist())), places
    years = times.astype("datetime64[Y]").astype(np.int64) + 1970
    if ((years < 0) | (years > 9999)).any():
        raise ValueError(
            "pairs cannot hold dates before the year 0 or after 9999; choose parquet"
        )
    unit: Any = next(
        (u for u in ("D", "s") if (times == times.astype(f"M8[{u}]")).all()), "us"
    )
    return np.datetime_as_string(times, unit=unit, casting="unsafe").tolist(), places


def _warn_of_times(data: SparseDataset, format: str) -> None:
    if data.times is not None:
        warnings.warn(
            f"the times are left out: the format {format} cannot hold them; choose pairs "
            "or parquet",
            stacklevel=3,
        )


def _record_writer(
    file: io.TextIOWrapper, delimiter: str
) -> Callable[[Iterable[Iterable[str]]], object]:
    if delimiter != "\t":
        return csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows
    # The csv module would quote names that contain a quote, but in files separated by TAB, a quote
    # is an ordinary character.
    return lambda records: file.writelines("\t".join(r) + "\n" for r in records)


def save_numbers(
    path: str, name: str, numbers: np.ndarray | Mapping[str, np.ndarray]
) -> None:
    """Writes numbers atomically, in the format that the suffix of the file's name selects.

    ::

        .npy       an array, [n] or [n, columns]
        .parquet   a table with these columns
        .csv       a header with the names, and a line for each row
        others     a line for each row, without a header

    Text is compressed if the name ends in `.gz` or `.xz`.

    Args:
      path: path of the file, which is replaced if it exists.
      name: name of the column, if `numbers` is one array.
      numbers: array `[n]`, or several such columns by name.

    Raises:
      OSError: the file cannot be written.
    """
    columns = numbers if isinstance(numbers, Mapping) else {name: numbers}
    match pathlib.Path(path.removesuffix(".gz").removesuffix(".xz")).suffix:
        case ".npy" if path.endswith(".npy"):
            whole = np.stack([*columns.values()], axis=1)
            with whole_file(path) as file:
                np.save(file, whole if columns is numbers else whole[:, 0])
        case ".parquet" if path.endswith(".parquet"):
            table = pa.table({n: arrow.from_numbers(x) for n, x in columns.items()})
            parquet.write_whole(path, table, group_rows=_GROUP_ROWS)
        case ending:
            with whole_text_file(path) as file:
                lines = csv.writer(file, lineterminator="\n")
                if ending == ".csv":
                    lines.writerow(columns)
                lines.writerows(zip(*columns.values(), strict=True))


def _rows(
    data: SparseDataset, places: np.ndarray | None = None
) -> Iterator[tuple[str, list[str], list[str] | None]]:
    """Yields each row: its name, the names of its features, and their values as text or None.

    `places: [entries]` are the positions of the entries in the order to write; by default
    0, 1, 2, ...
    """
    matrix, names = data.matrix, data.feature_names
    indices, floats = np.asarray(matrix.indices), matrix.data
    if places is not None:
        indices = indices[places]
        floats = None if floats is None else np.asarray(floats)[places]
    ends = np.asarray(matrix.indptr[1:]).tolist()
    start = 0
    for row, end in zip(data.row_names.tolist(), ends, strict=True):
        values = None
        if floats is not None:
            # `str` writes the shortest decimal that is read as an equal float32.
            shortest = map(str, floats[start:end])
            values = [text.removesuffix(".0") for text in shortest]
        yield row, names[indices[start:end]].tolist(), values
        start = end


def check_names(what: str, names: Names, forbidden: str, format: str) -> None:
    """Raises ValueError if a name is empty, or has a `forbidden` character or a zero byte."""
    # Readers reject zero bytes, and drop a byte order mark at the start of a file.
    separator = re.compile(f"[{re.escape(forbidden)}\0]")
    for name in names.tolist():
        if not name:
            raise ValueError(f"a {what} has an empty name, which {format} cannot hold")
        if found := separator.search(name):
            raise ValueError(
                f"the {what} name {name!r} contains {found[0]!r}, which {format} "
                "cannot hold in a name; rename it"
            )
