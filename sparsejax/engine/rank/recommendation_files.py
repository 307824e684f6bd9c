"""Writes recommendations to files."""

from __future__ import annotations

import io
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparsejax.data.files import arrow
from sparsejax.data.files.names import Names, as_names, to_arrow
from sparsejax.data.sets.writers import check_names, escaped
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.whole_files import (
    COMPRESSED,
    check_writable,
    whole_file,
    whole_text_file,
)

_NOT_TEXT = (".csv", ".parquet", ".jsonl")


def save_recommendations(
    path: str | os.PathLike[str],
    rows: Names,
    found: Recommendations,
    items: Names,
    *,
    rows_at_a_time: int = 2**16,
) -> None:
    """Writes recommendations, best first, in the format given by the file name's ending.

    ::

        .csv       user,item,score,rank: a line for each recommendation, under a header
        .parquet   a table with the same columns
        .jsonl     {"user": "ann", "items": ["tea"], "scores": [2.5]} for each row
        others     see `write_recommendations`

    The file is renamed into place when it is complete. All formats but `.parquet` are compressed
    if the name ends in `.gz` or `.xz`.

    Args:
      path: the file, which is replaced if it exists.
      rows: names of the rows.
      found: the recommended items of each row.
      items: names of all items.
      rows_at_a_time: number of rows that are converted to text at a time, and that form a row
          group of a `.parquet` file.

    Raises:
      OSError: the file cannot be written.
      ValueError: this format cannot store the names, or the number of names differs from the
          number of rows or items.
    """
    check_writable(path)
    check_recommendation_names(path, rows, items)
    ending = _ending(path)
    if ending == ".parquet":
        tables = _tables(rows, found, items, rows_at_a_time)
        first = next(tables)
        with (
            whole_file(path) as file,
            pq.ParquetWriter(file, first.schema, compression="zstd") as writer,
        ):
            for table in itertools.chain([first], tables):
                writer.write_table(table)
        return
    with whole_text_file(path) as file:
        match ending:
            case ".csv":
                rows, items = _quoted(rows), _quoted(items)
                more = "" if found.values is None else ",value"
                file.write(f"user,item,score,rank{more}\n")
                for table in _tables(rows, found, items, rows_at_a_time):
                    file.write(_csv_lines(table))
            case ".jsonl":
                for row, names, *figures in _recommended(rows, found, items):
                    named = zip(("scores", "values"), figures, strict=False)
                    # The shortest digits of the float32: 0.1, not 0.1000000015.
                    of_items = {n: [float(str(x)) for x in xs] for n, xs in named}
                    line = {"user": row, "items": names, **of_items}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            case _:
                write_recommendations(file, rows, found, items)


def write_recommendations(
    file: io.TextIOWrapper | TextIO, rows: Names, found: Recommendations, items: Names
) -> None:
    """Writes `row<TAB>item,score:item,score...` lines, best first.

    If a row has no recommendations, nothing follows its TAB. Names are escaped as
    `sparsejax.data.read_text` expects. Scores have six digits.

    Raises:
      ValueError: a name is empty or contains a zero byte.
    """
    rows, items = escaped("row", rows), escaped("item", items)
    for row, names, *figures in _recommended(rows, found, items):
        lines = zip(names, *figures, strict=True)
        entries = (",".join([n, *(f"{x:.6g}" for x in some)]) for n, *some in lines)
        file.write(f"{row}\t{':'.join(entries)}\n")


def check_recommendation_names(
    path: str | os.PathLike[str], rows: Names, items: Names
) -> None:
    """Checks that the format of a file of recommendations can store the names.

    Raises:
      ValueError: the format is text, and a name is empty or contains a zero byte.
    """
    if _ending(path) not in _NOT_TEXT:
        check_names("row", rows, "\ufeff", "text")
        check_names("item", items, "", "text")


def _ending(path: str | os.PathLike[str]) -> str:
    """The file name ending that states the format, after removing a compression ending such as
    `.gz`.
    """
    path = pathlib.Path(path)
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def _recommended(
    rows: Names, found: Recommendations, items: Names
) -> Iterator[tuple[Any, ...]]:
    """Yields for each row its name, the names of its items, their scores and, if requested,
    further values.
    """
    counts = np.sum(found.ids >= 0, axis=1).tolist()
    figures = [x for x in (found.scores, found.values) if x is not None]
    for row, ids, count, *own in zip(
        rows.tolist(), found.ids, counts, *figures, strict=True
    ):
        yield row, items[ids[:count]].tolist(), *(x[:count] for x in own)


def _tables(
    rows: Names, found: Recommendations, items: Names, rows_at_a_time: int
) -> Iterator[pa.Table]:
    """Yields tables with some rows of the recommendations each, at least one table."""
    for start in range(0, max(len(found), 1), rows_at_a_time):
        part = slice(start, start + rows_at_a_time)
        values = None if found.values is None else found.values[part]
        some = Recommendations(found.ids[part], found.scores[part], values=values)
        yield some.to_arrow(rows[part], items)


def _quoted(names: Names) -> Names:
    """Puts names in quotes where CSV needs quotes."""
    quoted = (
        '"' + name.replace('"', '""') + '"' if re.search('[,"\r\n]', name) else name
        for name in names.tolist()
    )
    return as_names(quoted)


def _csv_lines(table: pa.Table) -> str:
    """The rows of a table as CSV lines. Scores have the fewest digits that restore the float32."""
    text = pa.large_string()
    columns = [column.cast(text) for column in table.combine_chunks().columns]
    empty, comma, end = to_arrow(np.array(["", ",", "\n"], np.dtypes.StringDType()))
    rows = pc.call_function("binary_join_element_wise", [*columns, comma])
    lines = pc.call_function("binary_join_element_wise", [rows, empty, end])
    ends = arrow.from_numbers(np.array([0, len(lines)]))
    whole = pa.LargeListArray.from_arrays(ends, lines.combine_chunks())
    return pc.call_function("binary_join", [whole, empty])[0].as_py()
