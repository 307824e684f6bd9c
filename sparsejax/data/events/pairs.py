"""CSV and TSV files with a (user, item) pair on each line, perhaps with value and time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NoReturn

import numpy as np
import pyarrow as pa

from sparsejax.data import arrow
from sparsejax.data.columns import about_times
from sparsejax.data.events.block import Block
from sparsejax.data.events.lines import mixed_values
from sparsejax.data.events.pair_layout import Layout
from sparsejax.data.events.records import (
    MAX_RECORD_BYTES,
    parse_columns,
    read_records,
    record_blocks,
    split_lists,
)
from sparsejax.data.files import BLOCK_BYTES, ByteStream, DataError, Lines, Path
from sparsejax.data.values import (
    lengths,
    mixed_times,
    parse_times,
    parse_values,
    time_problem,
    trim,
    value_problem,
)

_USER = "the user (row) is empty"
_ITEM = "the item (feature) is empty"
_LENGTHS = "the numbers of {}s and of items differ"


def pair_blocks(
    stream: ByteStream,
    path: Path,
    layout: Layout,
    *,
    block_bytes: int = BLOCK_BYTES,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Block]:
    """Parses the pairs of a file in blocks.

    Args:
      stream: the file, opened.
      path: the file that messages name.
      layout: how to read it.
      block_bytes: see `record_blocks`.
      max_record_bytes: see `record_blocks`.

    Raises:
      DataError: a record is wrong; the message has the line of the first one.
    """
    blocks = record_blocks(
        stream,
        path,
        layout.delimiter,
        first_line=layout.first_line,
        header=layout.header,
        block_bytes=block_bytes,
        max_record_bytes=max_record_bytes,
    )
    valued: bool | None = None
    kind: str | None = None  # of the times so far; "" if entries have none
    for lines in blocks:
        try:
            columns = _parse(lines, layout)
        except pa.ArrowInvalid as error:
            _explain(lines, layout, valued, kind, cause=error)
        if not len(columns["item"]):
            continue
        sizes = None
        if layout.has_lists:
            try:
                columns, sizes = _flat(columns, layout)
            except pa.ArrowInvalid as error:
                _explain(lines, layout, valued, kind, cause=error)
        if missing := _num_empty(columns):
            with contextlib.suppress(DataError, pa.ArrowInvalid):
                missing += sum(_num_empty(_parse(rest, layout)) for rest in blocks)
            _explain(lines, layout, valued, kind, missing=missing)
        values = times = None
        if "value" in columns and len(columns["item"]):
            texts = trim(columns["value"])
            is_missing = lengths(texts) == 0
            before, valued = valued, not is_missing[0] if valued is None else valued
            values = parse_values(texts) if valued else None
            if (is_missing == valued).any() or (valued and values is None):
                _explain(lines, layout, before, kind)
        if "time" in columns and len(columns["item"]):
            texts = trim(columns["time"])
            is_missing = lengths(texts) == 0
            before = kind
            if kind is None and is_missing[0]:
                kind = ""
            found = parse_times(texts) if kind != "" else None
            if (is_missing == (kind != "")).any() or (
                kind != "" and (found is None or kind not in (None, found[1]))
            ):
                _explain(lines, layout, valued, before)
            if found is not None:
                times, kind = found
        yield Block(columns["user"], sizes, columns["item"], values, times)


def _flat(
    columns: Mapping[str, pa.Array], layout: Layout
) -> tuple[dict[str, pa.Array], np.ndarray]:
    """The entries of cells that are lists, and the number of items of each record.

    Raises:
      pa.ArrowInvalid: lists of a record have different lengths.
    """
    found: dict[str, pa.Array] = {"user": columns["user"]}
    sizes = np.zeros(0, np.int64)
    for role in ("item", "value", "time"):
        if role not in columns:
            continue
        texts = columns[role]
        if layout.places[role] not in layout.lists:  # one time for all items
            rows = np.repeat(np.arange(len(texts)), sizes)
            found[role] = texts.take(arrow.from_numbers(rows))
            continue
        found[role], counts = split_lists(texts)
        if role == "item":
            sizes = counts
            found[role] = found[role].dictionary_encode()
        elif not np.array_equal(counts, sizes):
            raise pa.ArrowInvalid(_LENGTHS.format(role))
    return found, sizes


def _parse(lines: Lines, layout: Layout) -> dict[str, pa.Array]:
    """The columns that are read, by role; names are dictionary-encoded.

    Raises:
      pa.ArrowInvalid: a record has another number of columns.
    """
    encoded = pa.dictionary(pa.int32(), pa.string())
    types = {
        at: encoded
        if role in ("user", "item") and at not in layout.lists
        else pa.string()
        for role, at in layout.places.items()
    }
    found = parse_columns(lines, layout.delimiter, layout.num_columns, types)
    return {role: found[at] for role, at in layout.places.items()}


def _num_empty(columns: Mapping[str, pa.Array]) -> int:
    """Number of empty users and items."""
    count = 0
    for role in ("user", "item"):
        names = columns[role]
        if not pa.types.is_dictionary(names.type):  # lists, which have no empty names
            continue
        at = names.dictionary.index("").as_py()
        if at >= 0:
            count += int(np.sum(arrow.numbers(names.indices) == at))
    return count


def _explain(
    lines: Lines,
    layout: Layout,
    valued: bool | None,
    kind: str | None,
    *,
    missing: int = 0,
    cause: Exception | None = None,
) -> NoReturn:
    """Finds the first record that is wrong, slowly, and raises the error for it.

    Args:
      lines: the block with the record.
      layout: how to read it.
      valued: whether earlier entries had values; None if there were no entries.
      kind: of the times of earlier entries, as in `pair_blocks`.
      missing: how many users and items of the file are empty.
      cause: Arrow's error, if it could not parse the block.
    """
    places = layout.places
    how_often = f", {missing:,} times in all: fill it in, or remove these lines first"

    def problem_of(cells: list[str]) -> str | None:
        nonlocal valued, kind
        if len(cells) != layout.num_columns:
            if not "".join(cells).strip():
                return None  # as `parse_columns`
            return (
                f"expected {layout.num_columns} columns as on the first line, got "
                f"{len(cells)}"
            )
        if not cells[places["user"]]:
            return _USER + how_often
        if not (cells[places["item"]] or layout.has_lists):
            return _ITEM + how_often
        size = len(cells[places["item"]].split()) if layout.has_lists else 1

        def texts_of(role: str) -> list[str]:
            if role not in places:
                return []
            text = cells[places[role]].strip()
            return text.split() if places[role] in layout.lists else [text] * size

        for role in ("value", "time"):
            if role in places and len(texts_of(role)) != size:
                return _LENGTHS.format(role)
        for text in texts_of("value"):
            valued = bool(text) if valued is None else valued
            if bool(text) != valued:
                return mixed_values(valued)
            if valued and (problem := value_problem(text)):
                return (
                    f"{problem} ({layout.columns.value} is read as the value; choose "
                    "another with value=COLUMN, or ignore values with indicator=True)"
                )
        for text in texts_of("time"):
            kind = kind if text or kind is not None else ""
            if bool(text) != (kind != ""):
                return mixed_times(kind != "")
            if kind != "":
                problem = time_problem(text, kind)
                if problem is None and kind is None:
                    _, kind = parse_times(pa.array([text])) or (None, None)
                if problem:
                    return f"{problem} {about_times(layout.columns)}"
        return None

    for line, _, cells in read_records(lines, layout.delimiter):
        if problem := problem_of(cells):
            raise DataError.at(lines.path, problem, line=line) from cause
    raise lines.error(0, f"cannot be parsed as CSV from here on: {cause}") from cause
