"""Finds lines that cannot be read, so that a file can be read without them.

The search is done before the file is read: lines are parsed and checked a block at a time. A
block with a fault is halved again and again, until single bad records are found. Then the file
is read with blank lines in their place, so that all other lines keep their numbers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pyarrow as pa

from sparsejax.callers import warn_caller
from sparsejax.data.events.records import has_quotes, read_records, record_blocks
from sparsejax.data.files.opening import (
    ByteStream,
    DataError,
    Lines,
    WithoutLines,
    line_blocks,
    open_data,
)

NO_LINES = (
    "skip_bad_lines=True is for files of lines, but {}; filter the rows of the table"
)
# A function that parses lines as if they were a whole file, and raises DataError if one is bad.
Attempt = Callable[[ByteStream], None]


def find_bad_lines(
    file: WithoutLines,
    attempt: Attempt,
    *,
    delimiter: str | None = None,
    first_line: int = 1,
    header: str | None = None,
) -> None:
    """Finds the lines of a file that cannot be read. They are skipped, and a warning counts them.

    Args:
      file: the file, of which some bad lines may be known.
      attempt: function that reads some lines, and raises an error if one is bad. It gets the
        lines in the order of the file, and may keep state about them, except about lines for
        which it raised an error.
      delimiter: delimiter of the columns, if records may have several lines, in quotes.
      first_line: number of the first line after the header, counted from 1.
      header: text of the header, or None.

    Raises:
      DataError: too many lines are bad, or the file cannot be read at all.
    """
    done = 1  # number of the first line that was not checked yet

    def blocks(stream: ByteStream) -> Iterator[Lines]:
        if delimiter is None:
            return line_blocks(stream, file)
        return record_blocks(
            stream,
            file,
            delimiter,
            first_line=first_line,
            header=header,
            tell=lambda text: None,  # the later reading reports this text
        )

    def look() -> None:
        nonlocal done
        with open_data(file) as stream:
            for lines in blocks(stream):
                end = lines.first + lines.data.count(b"\n")
                if end <= done:
                    continue
                for start, stop, problem in _faults(lines, attempt, delimiter):
                    file.leave_out(lines.first + start, lines.first + stop, problem)
                    file.check(end - first_line, so_far=True)
                done = end

    while True:
        try:
            look()
            break
        except DataError as error:  # for example, a quote that is not closed
            if error.line is None or error.line in file.blank or file.are_many:
                raise
            file.leave_out(error.line, error.line + 1, error.problem)
    file.check(done - first_line)
    if file.problems:
        warn_caller(file.account(done - first_line))


def _faults(
    lines: Lines, attempt: Attempt, delimiter: str | None
) -> Iterator[tuple[int, int, str]]:
    """Yields `(begin, end, problem)` for each bad record: its range of lines, counted from 0."""
    texts = lines.data.split(b"\n")[:-1]
    spans: list[tuple[int, int]] = []

    def problem(low: int, high: int) -> str | None:
        data = b"\n".join(texts[spans[low][0] : spans[high - 1][1]]) + b"\n"
        try:
            attempt(io.BytesIO(data))
        except DataError as error:
            return error.problem
        except (pa.ArrowException, OverflowError) as error:
            return str(error)
        return None

    def within(low: int, high: int) -> Iterator[tuple[int, int, str]]:
        if low == high or (found := problem(low, high)) is None:
            return
        if high - low == 1:
            yield *spans[low], found
            return
        middle = (low + high) // 2
        yield from within(low, middle)
        yield from within(middle, high)

    spans.append((0, len(texts)))
    if problem(0, 1) is None:
        return
    if delimiter is not None and has_quotes(delimiter) and b'"' in lines.data:
        records = read_records(lines, delimiter)
        spans[:] = [(at - lines.first, end - lines.first) for at, end, _ in records]
    else:
        spans[:] = [(at, at + 1) for at, text in enumerate(texts) if text.strip()]
    yield from within(0, len(spans))
