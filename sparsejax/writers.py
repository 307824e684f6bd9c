"""Text files of interactions and of recommendations, written whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import json
import lzma
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax.data import SparseDataset
from sparsejax.data.files import replacing
from sparsejax.data.lines import ESCAPES
from sparsejax.data.names import Names, as_names
from sparsejax.recommendations import Recommendations

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_TABLES = (".csv", ".parquet", ".jsonl")
# Rows whose recommendations are written at a time.
_TABLE_ROWS = 2**16
_ESCAPED = str.maketrans(ESCAPES)
_ESCAPED_ROW = {char: text for char, text in _ESCAPED.items() if chr(char) not in ",:"}


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Generator[io.TextIOWrapper]:
    """Opens a UTF-8 text file that appears at `path` when the block is done.

    It replaces a file that was there; if the block fails, nothing has changed. A name
    that ends in `.gz` or `.xz` gives a compressed file.

    Raises:
      OSError: the file cannot be written.
      ValueError: see `check_writable`.
    """
    check_writable(path)
    opener = _OPENERS.get(pathlib.Path(path).suffix, open)
    with (
        replacing(path) as temporary,
        opener(temporary, "xt", encoding="utf-8", newline="\n") as file,
    ):
        yield file


def check_writable(path: str | os.PathLike[str]) -> None:
    """Looks whether a file can be made here, or be replaced.

    Raises:
      ValueError: `path` is a folder, a device or the like, or its folder is not there.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file, so it cannot be written")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


def save_recommendations(
    path: str | os.PathLike[str], rows: Names, found: Recommendations, items: Names
) -> None:
    """Writes what is recommended, best first; the file's name says in which form.

    ::

        .csv       user,item,score,rank: a line for each recommendation, under a header
        .parquet   the same as columns
        .jsonl     {"user": "ann", "items": ["tea"], "scores": [2.5]} for each row
        others     see `write_recommendations`

    The file appears at once and whole, or not at all, and all but `.parquet` compressed
    where `.gz` or `.xz` follows.

    Raises:
      OSError: the file cannot be written.
      ValueError: see `check_writable` and `check_recommendation_names`.
    """
    check_recommendation_names(path, rows, items)
    ending = _ending(path)
    if ending == ".parquet":
        _write_recommendation_table(path, rows, found, items)
        return
    with whole_file(path) as file:
        match ending:
            case ".csv":
                lines = csv.writer(file, lineterminator="\n")
                lines.writerow(("user", "item", "score", "rank"))
                for row, names, scores in _recommended(rows, found, items):
                    for rank, each in enumerate(zip(names, scores, strict=True), 1):
                        lines.writerow((row, *each, rank))
            case ".jsonl":
                for row, names, scores in _recommended(rows, found, items):
                    numbers = [
                        float(str(score)) for score in scores
                    ]  # not 0.1000000015
                    line = {"user": row, "items": names, "scores": numbers}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            case _:
                write_recommendations(file, rows, found, items)


def write_recommendations(
    file: io.TextIOWrapper | TextIO, rows: Names, found: Recommendations, items: Names
) -> None:
    """Writes `row<TAB>item,score:item,score...` lines, best first.

    A row without candidates has nothing behind its TAB. Names are escaped as
    `sparsejax.read_text` reads them. Scores have six digits.

    Raises:
      ValueError: a name is empty or holds a zero byte.
    """
    rows, items = _escaped("row", rows), _escaped("item", items)
    for row, names, scores in _recommended(rows, found, items):
        entries = (f"{n},{score:.6g}" for n, score in zip(names, scores, strict=True))
        file.write(f"{row}\t{':'.join(entries)}\n")


def check_recommendation_names(
    path: str | os.PathLike[str], rows: Names, items: Names
) -> None:
    """Looks for names that a file of recommendations cannot hold.

    Raises:
      ValueError: in the text form a name is empty or holds a zero byte.
    """
    if _ending(path) not in _TABLES:
        _check_names("row", rows, "\ufeff", "text")
        _check_names("item", items, "", "text")


def _ending(path: str | os.PathLike[str]) -> str:
    """What a file's name says of its form."""
    path = pathlib.Path(path)
    return path.with_suffix("").suffix if path.suffix in _OPENERS else path.suffix


def _recommended(
    rows: Names, found: Recommendations, items: Names
) -> Iterator[tuple[str, list[str], np.ndarray]]:
    """The name of each row, its items' names and their scores, float32."""
    counts = np.sum(found.ids >= 0, axis=1).tolist()
    for row, ids, scores, count in zip(
        rows.tolist(), found.ids, found.scores, counts, strict=True
    ):
        yield row, items[ids[:count]].tolist(), scores[:count]


def _write_recommendation_table(
    path: str | os.PathLike[str], rows: Names, found: Recommendations, items: Names
) -> None:
    def table(start: int) -> pa.Table:
        part = slice(start, start + _TABLE_ROWS)
        some = Recommendations(found.ids[part], found.scores[part])
        return some.to_arrow(rows[part], items)

    check_writable(path)
    with (
        replacing(path) as temporary,
        open(temporary, "xb") as file,
        pq.ParquetWriter(file, table(len(found)).schema, compression="zstd") as writer,
    ):
        for start in range(0, len(found), _TABLE_ROWS):
            writer.write_table(table(start))


def write_text(file: io.TextIOWrapper, data: SparseDataset) -> None:
    """Writes DSSTNE's text form, see `sparsejax.read_text`; it holds rows and values.

    Names are escaped as `sparsejax.read_text` reads them.

    Raises:
      ValueError: a name is empty or holds a zero byte, or a byte order mark begins it.
    """
    row_names = _escaped("row", data.row_names)
    feature_names = _escaped("feature", data.feature_names)
    data = dataclasses.replace(data, row_names=row_names, feature_names=feature_names)
    for row, features, values in _rows(data):
        if values is not None:
            features = (f"{f},{v}" for f, v in zip(features, values, strict=True))
        file.write(f"{row}\t{':'.join(features)}\n")


def _escaped(what: str, names: Names) -> Names:
    """The names as the text form has them.

    Raises:
      ValueError: it cannot hold one.
    """
    is_row = what == "row"
    _check_names(what, names, "\ufeff" if is_row else "", "text")
    table = _ESCAPED_ROW if is_row else _ESCAPED
    return as_names([name.translate(table) for name in names.tolist()])


def write_adjacency(file: io.TextIOWrapper, data: SparseDataset) -> None:
    """Writes `row feature feature ...` lines, see `sparsejax.read_adjacency`.

    Raises:
      ValueError: the entries have values, or a name is empty or contains white space.
    """
    if data.matrix.data is not None:
        raise ValueError(
            "the format adjacency holds no values but the data has some; choose text, "
            "pairs or parquet, or leave the values out (indicator=True)"
        )
    for what, names in (("row", data.row_names), ("feature", data.feature_names)):
        _check_names(what, names, " \t\v\f\r\n\ufeff", "adjacency")
    file.writelines(" ".join((row, *rest)) + "\n" for row, rest, _ in _rows(data))


def write_pairs(
    file: io.TextIOWrapper, data: SparseDataset, *, delimiter: str = "\t"
) -> None:
    """Writes a line for each entry, under a header; see `sparsejax.read_pairs`.

    With another delimiter than TAB, fields are quoted where that is needed. A warning
    counts rows without entries, which cannot be written.

    Raises:
      ValueError: a name is empty or contains a line end or, without quotes, a TAB.
    """
    forbidden = "\t\r\n" if delimiter == "\t" else "\r\n"
    for what, names in (("row", data.row_names), ("feature", data.feature_names)):
        _check_names(what, names, forbidden, "pairs")
    empty = int(np.sum(np.diff(data.matrix.indptr) == 0))
    if empty:
        warnings.warn(
            f"{empty:,} of {data.num_rows:,} rows have no entries and are left out: the "
            "format pairs cannot hold them",
            stacklevel=2,
        )
    valued = data.matrix.data is not None
    header = ("user", "item", "value") if valued else ("user", "item")
    write = _record_writer(file, delimiter)
    write([header])
    for row, features, values in _rows(data):
        if values is None:
            write((row, feature) for feature in features)
        else:
            entries = zip(features, values, strict=True)
            write((row, feature, value) for feature, value in entries)


def _record_writer(
    file: io.TextIOWrapper, delimiter: str
) -> Callable[[Iterable[Iterable[str]]], object]:
    if delimiter != "\t":
        return csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows
    # The csv module would quote names that contain a quote, which TAB-separated files
    # take as they are.
    return lambda records: file.writelines("\t".join(r) + "\n" for r in records)


def _rows(
    data: SparseDataset,
) -> Iterator[tuple[str, list[str], list[str] | None]]:
    """The name of each row, its features' names and their values as text."""
    matrix, names = data.matrix, data.feature_names
    ends = np.asarray(matrix.indptr[1:]).tolist()
    start = 0
    for row, end in zip(data.row_names.tolist(), ends, strict=True):
        values = None
        if matrix.data is not None:
            # The shortest decimal that is read as the same float32.
            shortest = map(str, matrix.data[start:end])
            values = [text.removesuffix(".0") for text in shortest]
        yield row, names[matrix.indices[start:end]].tolist(), values
        start = end


def _check_names(what: str, names: Names, forbidden: str, format: str) -> None:
    # Readers take a file with zero bytes for no text, and drop a byte order mark.
    separator = re.compile(f"[{re.escape(forbidden)}\0]")
    for name in names.tolist():
        if not name:
            raise ValueError(f"a {what} has an empty name, which {format} cannot hold")
        if found := separator.search(name):
            raise ValueError(
                f"the {what} name {name!r} contains {found[0]!r}, which {format} "
                "cannot hold in a name; rename it"
            )
