"""Lines that cannot be read: which they are, so that a file is read without them.

They are found before the file is read: its lines are parsed and checked a block at a time. A
block with a fault is halved again and again, until the faults stand alone. Then the file is
read as always, with blank lines in their place, so that all others keep their numbers.
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
# Reads some lines as if they were a file; raises DataError if one is bad.
Attempt = Callable[[ByteStream], None]


def find_bad_lines(
    file: WithoutLines,
    attempt: Attempt,
    *,
    delimiter: str | None = None,
    first_line: int = 1,
    header: str | None = None,
) -> None:
    """Leaves the lines of a file out that cannot be read. A warning counts them.

    Args:
      file: the file, of which some bad lines may be known.
      attempt: function that reads some lines. It is called with later lines after earlier ones,
        and may remember the lines that it has read, if it forgets those for which it raised an
        error.
      delimiter: delimiter of the columns, if records may have several lines, in quotes.
      first_line: the line behind the header, counted from 1.
      header: the text of the header, or None.

    Raises:
      DataError: too many lines are bad, or the whole file is.
    """
    done = 1  # the line up to which all is known

    def blocks(stream: ByteStream) -> Iterator[Lines]:
        if delimiter is None:
            return line_blocks(stream, file)
        return record_blocks(
            stream,
            file,
            delimiter,
            first_line=first_line,
            header=header,
            tell=lambda text: None,  # said when the file is read
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
        except DataError as error:  # a quote that is not closed where it should be
            if error.line is None or error.line in file.blank or file.are_many:
                raise
            file.leave_out(error.line, error.line + 1, error.problem)
    file.check(done - first_line)
    if file.problems:
        warn_caller(file.account(done - first_line))


def _faults(
    lines: Lines, attempt: Attempt, delimiter: str | None
) -> Iterator[tuple[int, int, str]]:
    """`(begin, end, problem)` of each bad record of a block, by lines from 0."""
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
