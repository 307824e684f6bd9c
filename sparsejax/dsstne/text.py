"""Reading of samples in DSSTNE's text format, by DSSTNE's rules.

::

    line    := sample TAB element *( ":" element ) [ ":" ]
    element := feature [ "," value ]

`sparsejax.data.read_text` reads the same grammar by other rules. Here:

* Names are numbered in the order in which they are first seen.
* If a sample has several lines, the last one counts.
* A value that is missing is 0.
* A feature that occurs several times in a line is kept several times.
* Lines without a TAB and elements without a feature are skipped. If an element has several
  values, the first one counts.
* Backslashes are ordinary characters.

A warning counts the samples and values that were skipped or replaced. gzip and xz are read
directly.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from sparsejax.callers import warn_caller
from sparsejax.data import UnknownFeaturesWarning
from sparsejax.data.events.lines import strings
from sparsejax.data.files.names import NameEncoder, Names, as_names, quoted, to_arrow
from sparsejax.data.files.opening import (
    DataError,
    Lines,
    Path,
    line_blocks,
    open_data,
    shown,
)
from sparsejax.data.files.values import parse_values, value_problem
from sparsejax.dsstne.datasets import FileDataset, SparseRows
from sparsejax.dsstne.index_files import padded_width
from sparsejax.sparse import MAX_ENTRIES

_NEWLINE, _TAB, _COLON, _COMMA = b"\n\t:,"

_NO_TAB = "lines have no TAB and are skipped"
_SEVERAL_VALUES = "elements have several values, of which the first counts"
_NO_VALUE = "elements have no value, which counts as 0"


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """The samples that were read from a text.

    Attributes:
      rows: a row for each sample, in the order of the samples' numbers.
      features: `[n]` names of the features, by number.
      samples: `[rows]` names of the samples, by number.
    """

    rows: SparseRows
    features: Names
    samples: Names

    def dataset(self, *, width: int | None = None) -> FileDataset:
        """The data set that `generateNetCDF` writes. It has no names: index files have them.

        Args:
          width: number of columns; by default the number of features, rounded up to a
            multiple of 128.
        """
        if width is None:
            width = padded_width(len(self.features))
        return FileDataset((width,), self.rows)


def read_samples(
    path: Path,
    *,
    features: Iterable[object] = (),
    samples: Iterable[object] = (),
    new_features: bool = True,
    analog: bool = False,
) -> Samples:
    """Reads samples from a text file, or from all files of a folder in order of name.

    Subfolders and files whose name begins with `.` are skipped. Values are read only if
    `analog` is True; otherwise text after a comma is ignored.

    Args:
      path: the file or folder.
      features: names of the features that have the first numbers.
      samples: names of the samples that have the first numbers. A sample without a line gets
        an empty row.
      new_features: whether other features get the next numbers; otherwise they are
        skipped.
      analog: whether entries have values.

    Raises:
      DataError: a file cannot be read, or has no samples; a value is not a finite
        number, or a sample has an empty name.
    """
    known_features, known_samples = as_names(features), as_names(samples)
    feature_encoder, sample_encoder = NameEncoder(), NameEncoder()
    feature_encoder.add(to_arrow(known_features))
    sample_encoder.add(to_arrow(known_samples))
    lengths: list[np.ndarray] = []
    values: list[np.ndarray] = []
    counts: collections.Counter[str] = collections.Counter()
    num_entries = 0
    for lines in _blocks(path):
        block = _parse(lines, analog, counts)
        sample_encoder.add(block.samples)
        feature_encoder.add(block.features)
        lengths.append(block.lengths)
        num_entries += len(block.features)
        if num_entries > MAX_ENTRIES:
            raise DataError.at(
                path, f"more than {MAX_ENTRIES:,} entries; split the rows"
            )
        if block.values is not None:
            values.append(block.values.astype(np.float32))
    sample_names, row = sample_encoder.finish()
    feature_names, column = feature_encoder.finish()
    row, column = row[len(known_samples) :], column[len(known_features) :]
    if not row.size:
        if counts[_NO_TAB]:
            raise DataError.at(
                path,
                "no line has a TAB; expected sample<TAB>feature:feature, with values "
                "sample<TAB>feature,value:feature,value",
            )
        raise DataError.at(path, "holds no samples")
    length = np.concatenate([np.empty(0, np.int64), *lengths])
    value = np.concatenate(values) if analog else None

    # The number of the last line of each sample, or -1 if it has no line.
    last = np.full(len(sample_names), -1)
    last[row] = np.arange(len(row))
    replaced = len(row) - int(np.count_nonzero(last >= 0))
    ends = np.cumsum(length)
    if not new_features:
        is_known = column < len(known_features)
        _warn_unknown(path, column[~is_known], feature_names, len(known_features))
        kept = np.concatenate([[0], np.cumsum(is_known)])
        starts, ends = kept[ends - length], kept[ends]
        column = column[is_known]
        value = None if value is None else value[is_known]
        feature_names = known_features
    else:
        starts = ends - length
    has_line = last >= 0
    rows = SparseRows(
        np.where(has_line, starts[last], 0),
        np.where(has_line, ends[last], 0),
        column,
        value,
    )
    counts["lines are replaced by a later line of the same sample"] = replaced
    counts["samples of the index have no line and get an empty row"] = int(
        np.sum(~has_line)
    )
    for what, count in counts.items():
        if count:
            warn_caller(f"{shown(path)}: {count:,} {what}")
    return Samples(_packed(rows), feature_names, sample_names)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The samples in a block of lines, like `sparsejax.data.sets.assemble.Block`."""

    samples: pa.LargeStringArray
    lengths: np.ndarray
    features: pa.LargeStringArray
    values: np.ndarray | None


def _blocks(path: Path) -> Iterator[Lines]:
    """Yields blocks of lines of a file, or of all files in a folder."""
    files = [pathlib.Path(path)]
    if os.path.isdir(path):
        found = sorted(pathlib.Path(path).iterdir())
        files = [f for f in found if f.is_file() and not f.name.startswith(".")]
        if not files:
            raise DataError.at(path, "the folder holds no files")
    for file in files:
        with open_data(file) as stream:
            yield from line_blocks(stream, file)


def _parse(lines: Lines, analog: bool, counts: collections.Counter[str]) -> _Block:
    """Parses a block of whole lines at once. Skipped parts are counted in `counts`, by kind."""
    data = np.frombuffer(lines.data, np.uint8)
    is_mark = (data == _NEWLINE) | (data == _TAB) | (data == _COLON) | (data == _COMMA)
    marks = np.flatnonzero(is_mark)
    kind = data[marks]
    is_newline = kind == _NEWLINE
    line = np.cumsum(is_newline) - is_newline
    line_ends = marks[is_newline]
    line_starts = np.concatenate([[0], line_ends[:-1] + 1])

    # The first TAB of a line ends the sample's name. In the name, ':' and ',' are no separators.
    tab = np.flatnonzero(kind == _TAB)
    first = tab[np.diff(line[tab], prepend=-1) > 0]
    name_ends = np.full(len(line_ends), -1)
    name_ends[line[first]] = marks[first]
    has_tab = name_ends >= 0
    counts[_NO_TAB] += int(np.sum(~has_tab & (line_ends > line_starts)))
    unnamed = name_ends == line_starts
    if unnamed.any():
        at = int(np.argmax(unnamed))
        raise lines.error(at, "the sample has no name: the line starts with a TAB")

    # Later TABs are no separators. Field i is between marks i and i + 1.
    used = has_tab[line] & (marks >= name_ends[line])
    used &= (kind != _TAB) | (marks == name_ends[line])
    marks, kind, line = marks[used], kind[used], line[used]
    starts, ends = marks[:-1] + 1, marks[1:]
    left, right, line = kind[:-1], kind[1:], line[:-1]
    begins = (left == _TAB) | (left == _COLON)
    entry = np.flatnonzero(begins & (ends > starts))
    has_comma = right[entry] == _COMMA
    second = entry[has_comma] + 1  # the field after the first comma
    counts[_SEVERAL_VALUES] += int(np.sum(right[second] == _COMMA))
    values = None
    if analog:
        values = np.zeros(len(entry))
        has_value = np.zeros(len(entry), bool)
        has_value[has_comma] = ends[second] > starts[second]
        counts[_NO_VALUE] += int(np.sum(~has_value))
        at = entry[has_value] + 1
        texts = strings(data, starts[at], ends[at])
        found = parse_values(texts)
        if found is None:
            for place, text in zip(at, texts.to_pylist(), strict=True):
                if problem := value_problem(text):
                    raise lines.error(int(line[place]), problem)
        values[has_value] = found
    return _Block(
        samples=strings(data, line_starts[has_tab], name_ends[has_tab]),
        lengths=np.bincount(line[entry], minlength=len(has_tab))[has_tab],
        features=strings(data, starts[entry], ends[entry]),
        values=values,
    )


def _packed(rows: SparseRows) -> SparseRows:
    """Copies rows, so that the copies are stored in order and without gaps."""
    lengths = rows.ends - rows.starts
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if np.array_equal(rows.starts, starts) and ends[-1] == len(rows.indices):
        return rows
    at = np.repeat(rows.starts - starts, lengths) + np.arange(ends[-1])
    values = None if rows.values is None else rows.values[at]
    return SparseRows(starts, ends, rows.indices[at], values)


def _warn_unknown(path: Path, columns: np.ndarray, names: Names, known: int) -> None:
    if columns.size:
        unknown = names[np.unique(columns)]
        warn_caller(
            f"{shown(path)}: {columns.size:,} entries are left out: {unknown.size:,} "
            f"features are not among the {known:,} of the index: {quoted(unknown)}",
            UnknownFeaturesWarning,
        )
