"""CSV and TSV files with a (user, item) pair, perhaps with a value, on each line."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from typing import NoReturn

import pyarrow as pa
import pyarrow.csv

from sparsejax.data.assemble import Block
from sparsejax.data.columns import Column, find_columns, is_header
from sparsejax.data.files import (
    BLOCK_BYTES,
    ByteStream,
    DataError,
    Path,
    decode_line,
    open_data,
)
from sparsejax.data.lines import mixed_values
from sparsejax.data.values import lengths, parse_values, trim, value_problem

DELIMITERS = "\t,;|"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How to read a file of pairs: separator, header, number of columns, which is what.

    `header` is the line of the header, counted from 1, or 0 where there is none. `value`
    is None where there is no value column, or it is to be ignored.
    """

    delimiter: str
    header: int
    num_columns: int
    user: int
    item: int
    value: int | None

    @property
    def quotes(self) -> bool:
        """Whether fields may be quoted. TAB-separated ones are not, by convention."""
        return self.delimiter != "\t"


def pair_blocks(stream: ByteStream, path: Path, layout: Layout) -> Iterator[Block]:
    """Reads the pairs; `stream` is `path` opened.

    Raises:
      DataError: with the line of the first record that is wrong.
    """
    columns = [f"column {number}" for number in range(layout.num_columns)]
    user, item = columns[layout.user], columns[layout.item]
    value = None if layout.value is None else columns[layout.value]
    encoded = pa.dictionary(pa.int32(), pa.string())
    types = {user: encoded, item: encoded} | ({value: pa.string()} if value else {})

    def on_ragged_row(row) -> str:
        return "error" if row.text.strip() else "skip"

    valued: bool | None = None
    try:
        reader = pyarrow.csv.open_csv(
            stream,
            read_options=pyarrow.csv.ReadOptions(
                column_names=columns,
                skip_rows_after_names=layout.header,  # blank ones count
                block_size=BLOCK_BYTES,
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=layout.delimiter,
                quote_char='"' if layout.quotes else False,
                newlines_in_values=layout.quotes,
                invalid_row_handler=on_ragged_row,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                strings_can_be_null=False,
            ),
        )
        for batch in reader:
            if any(
                batch[name].dictionary.index("").as_py() >= 0 for name in (user, item)
            ):
                _explain(path, layout)
            values = None
            if value and len(batch):
                texts = trim(batch[value])
                is_missing = lengths(texts) == 0
                valued = not is_missing[0] if valued is None else valued
                if (is_missing == valued).any():
                    _explain(path, layout)
                values = parse_values(texts) if valued else None
                if valued and values is None:
                    _explain(path, layout)
            yield Block(batch[user], None, batch[item], values)
    except pa.ArrowException as error:
        _explain(path, layout, error)


def find_layout(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    delimiter: str | None = None,
    header: bool | None = None,
    indicator: bool = False,
) -> Layout:
    """Settles what was left open, from the first two records; see `read_pairs`.

    Raises:
      DataError: the file is empty, or lacks a column.
      ValueError: a delimiter that is not one character, a column taken twice.
    """
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '\r\n"'):
        raise ValueError(
            f"delimiter must be one character, got {delimiter!r}; convert the file if "
            "its columns are separated by more than one"
        )
    if delimiter is None:
        delimiter = _guess_delimiter(path)
    draft = Layout(delimiter, 0, 0, 0, 1, None)
    records = _records(path, draft)
    line, first = next(records, (0, []))
    second = next(records, (0, []))[1]
    if not first:
        raise DataError.at(path, "holds no data: the file is empty")
    if len(first) < 2:
        raise DataError.at(
            path,
            f"expected at least two columns separated by {delimiter!r}, got one: "
            f"{first[0][:40]!r}",
            line=line,
        )
    if header is None:
        header = (
            any(isinstance(column, str) for column in (user, item, value))
            or is_header(first)
            or _is_number_under_text(first, second)
        )
    user_at, item_at, value_at = find_columns(
        path,
        len(first),
        first if header else None,
        user=user,
        item=item,
        value=value,
        line=line,
    )
    assert user_at is not None  # as one is looked for
    return Layout(
        delimiter,
        line if header else 0,
        len(first),
        user_at,
        item_at,
        None if indicator else value_at,
    )


def _is_number_under_text(first: list[str], second: list[str]) -> bool:
    """Whether the third column, a value, has text above its first number."""
    if min(len(first), len(second)) < 3 or not first[2].strip():
        return False
    return bool(value_problem(first[2])) and not value_problem(second[2])


def _guess_delimiter(path: Path) -> str:
    with open_data(path) as stream:
        for number, raw in enumerate(stream, 1):
            if line := decode_line(raw, path, number).strip("\r\n"):
                found = [delimiter for delimiter in DELIMITERS if delimiter in line]
                return found[0] if found else ","
    raise DataError.at(path, "holds no data: the file is empty")


def _records(path: Path, layout: Layout) -> Iterator[tuple[int, list[str]]]:
    """`(line, cells)` of each record that is not blank, in plain Python."""
    with open_data(path) as stream:
        lines = (
            decode_line(raw.removeprefix(b"\xef\xbb\xbf"), path, number)
            for number, raw in enumerate(stream, 1)
        )
        reader = csv.reader(
            lines,
            delimiter=layout.delimiter,
            quoting=csv.QUOTE_MINIMAL if layout.quotes else csv.QUOTE_NONE,
        )
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError.at(path, f"not CSV: {error}", line=line) from error
            if cells is None:
                return
            if len(cells) > 1 or "".join(cells).strip():
                yield line, cells


def _explain(path: Path, layout: Layout, cause: Exception | None = None) -> NoReturn:
    """Finds the first record that is wrong, by reading the file again, slowly."""
    valued: bool | None = None
    records = _records(path, layout)
    if layout.header:
        next(records)
    for line, cells in records:
        problem = None
        if len(cells) != layout.num_columns:
            if not layout.delimiter.join(cells).strip():
                continue  # white space, as in `pair_blocks`
            problem = (
                f"expected {layout.num_columns} columns as on the first line, got "
                f"{len(cells)}"
            )
        elif not cells[layout.user]:
            problem = "the user (row) is empty"
        elif not cells[layout.item]:
            problem = "the item (feature) is empty"
        elif layout.value is not None:
            text = cells[layout.value].strip()
            valued = bool(text) if valued is None else valued
            if bool(text) != valued:
                problem = mixed_values(valued)
            elif valued and (problem := value_problem(text)):
                problem += (
                    f" (column {layout.value} is taken for the value; choose another "
                    "with value=..., or ignore values with indicator=True)"
                )
        if problem:
            raise DataError.at(path, problem, line=line) from cause
    raise DataError.at(path, f"cannot be parsed as CSV: {cause}") from cause
