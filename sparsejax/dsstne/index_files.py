"""DSSTNE's index files, which number the names of features or samples, and padding."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sparsejax.data.events.lines import strings
from sparsejax.data.files.names import Names, as_names, check_unique
from sparsejax.data.files.opening import DataError, Path, line_blocks, open_data
from sparsejax.data.sets.writers import check_names

_NEWLINE, _TAB = b"\n\t"
_MAX_DIGITS = 10  # indices have 32 bits
_PADDED_TO = 128  # DSSTNE's widths are multiples of this


def read_index(path: Path) -> Names:
    """Reads an index file: lines `name<TAB>number`, in any order.

    Returns:
      `[n]` the name with each number. Numbers without a name are `holes`, which get names
      of padding.

    Raises:
      DataError: a line does not have this form, a name or a number occurs twice, or more than
        half of the numbers up to the highest one, and more than 128, have no name.
    """
    names: list[Names] = []
    numbers: list[np.ndarray] = []
    first_lines: list[int] = []
    with open_data(path) as stream:
        for lines in line_blocks(stream, path):
            data = np.frombuffer(lines.data, np.uint8)
            marks = np.flatnonzero((data == _NEWLINE) | (data == _TAB))
            is_newline = data[marks] == _NEWLINE
            ends = marks[is_newline]
            starts = np.concatenate([[0], ends[:-1] + 1])
            line = np.cumsum(is_newline) - is_newline
            tabs = np.bincount(line[~is_newline], minlength=len(ends))
            is_digit = (data >= ord("0")) & (data <= ord("9"))
            if (tabs != 1).any():
                at = int(np.argmax(tabs != 1))
                text = lines.data[starts[at] : ends[at]][:40].decode(errors="replace")
                raise lines.error(at, f"expected 'name<TAB>number', got {text!r}")
            tab = marks[~is_newline]
            if (tab == starts).any():
                raise lines.error(int(np.argmax(tab == starts)), "the name is empty")
            digits = np.concatenate([[0], np.cumsum(is_digit)])
            length = ends - tab - 1
            bad = (digits[ends] - digits[tab + 1] != length) | (length == 0)
            bad |= length > _MAX_DIGITS
            if bad.any():
                at = int(np.argmax(bad))
                text = lines.data[tab[at] + 1 : ends[at]][:40].decode(errors="replace")
                problem = f"{text!r} is not a number from 0 to 2^31 - 1"
                raise lines.error(at, problem)
            names.append(as_names(strings(data, starts, tab)))
            texts = as_names(strings(data, tab + 1, ends))
            numbers.append(texts.astype(np.int64))
            first_lines.append(lines.first)
    if not numbers:
        raise DataError.at(path, "holds no names: the file is empty")
    number, name = np.concatenate(numbers), np.concatenate(names)
    order = np.argsort(number, kind="stable")
    twice = np.flatnonzero(np.diff(number[order]) == 0)
    if twice.size:
        at = order[twice[0] + 1]
        line = int(at) + first_lines[0]
        raise DataError.at(path, f"the number {number[at]} occurs twice", line=line)
    count, missing = int(number[order[-1]]) + 1, int(number[order[-1]]) + 1 - len(order)
    if missing > max(_PADDED_TO, len(order)):
        raise DataError.at(
            path,
            f"{missing:,} of the numbers 0 to {count - 1:,} have no name, which is more than "
            "half; is this an index?",
        )
    try:
        check_unique(name, "index")
    except ValueError as error:
        raise DataError.at(path, str(error)) from error
    if not missing:
        return name[order]
    made = padding_names(0, count)
    made[number] = name
    return made


def holes(names: Names) -> np.ndarray:
    """The numbers in an index that have no name, ascending."""
    return np.flatnonzero(names == padding_names(0, len(names)))


def index_text(names: Iterable[object]) -> str:
    """The content of an index file; the n-th name gets the number n. Holes are omitted.

    Raises:
      ValueError: a name occurs twice, is empty, or contains a TAB or a line end.
    """
    names = as_names(names)
    check_unique(names, "index")
    check_names("index", names, "\t\r\n\ufeff", "an index file")
    empty = set(holes(names).tolist())
    lines = (
        f"{name}\t{n}\n" for n, name in enumerate(names.tolist()) if n not in empty
    )
    return "".join(lines)


def index_names(index: Path | Iterable[object]) -> Names:
    """The names of an index, which is an index file or the names themselves."""
    if isinstance(index, str) or hasattr(index, "__fspath__"):
        return read_index(index)  # type: ignore[arg-type]
    names = as_names(index)
    check_unique(names, "index")
    return names


def padded_width(count: int) -> int:
    """The number of columns that DSSTNE allocates for `count` features: a multiple of 128."""
    return -(-count // _PADDED_TO) * _PADDED_TO


def padding_names(start: int, stop: int) -> Names:
    """Names for the columns from `start` to `stop`, which belong to no feature."""
    return as_names([f"(padding {column})" for column in range(start, stop)])


def column_names(names: Names | None, width: int) -> Names:
    """`[width]` names of columns: the features' names, then names of padding.

    Without names, columns are named by their numbers.

    Raises:
      ValueError: there are more names than columns.
    """
    if names is None:
        return as_names(range(width))
    if len(names) > width:
        raise ValueError(
            f"the index has {len(names):,} features but the data set has the width "
            f"{width:,}"
        )
    return np.concatenate([names, padding_names(len(names), width)])


def without_padding(names: Names) -> Names:
    """The names of features, without the names of padding at the end."""
    differ = np.flatnonzero(names != padding_names(0, len(names)))
    return names[: int(differ[-1]) + 1 if differ.size else 0]
