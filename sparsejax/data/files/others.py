"""Recognizes formats that are not read, for errors that name the format and a remedy."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Collection

_AS_CSV = "write CSV with a header"
_AS_LINES = "write one JSON object on each line (.jsonl), for example by jq -c '.[]'"
_AS_OBJECTS = 'write objects, like {"user": "ann", "item": "tea"}, or CSV'
_AS_TABLE = "read it by {}, and give the table in place of the path"
_AS_MATRIX = "read it by {}, and give the matrix to SparseDataset.from_scipy"

# For each unsupported binary format: a pattern of its first bytes, its name, and the remedy.
_BINARY = (
    (rb"\x93NUMPY", "a NumPy array (.npy)", _AS_TABLE.format("numpy.load")),
    (rb"\x80[\x02-\x05]", "a pickle", "load it, and give the table in it"),
    (rb"SQLite format 3\0", "an SQLite database", _AS_CSV + " (sqlite3 -csv -header)"),
    (rb"ARROW1\0", "Feather or Arrow", _AS_TABLE.format("pyarrow.feather.read_table")),
    (rb"FEA1\0", "Feather", _AS_TABLE.format("pyarrow.feather.read_table")),
    (rb"\xff{4}", "a stream of Arrow", _AS_TABLE.format("pyarrow.ipc.open_stream")),
    (rb"ORC[^\w,;|\t ]", "ORC", _AS_TABLE.format("pyarrow.orc.read_table")),
    (rb"Obj\x01", "Avro", "write Parquet"),
    (rb"\x89HDF", "HDF5", _AS_TABLE.format("pandas.read_hdf or h5py")),
    (rb"%PDF-", "a PDF", _AS_CSV),
    (rb"\xd0\xcf\x11\xe0", "an old Excel workbook (.xls)", _AS_CSV),
    (rb".{257}ustar[\0 ]", "a tar archive", "unpack it, and name the folder"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16", "convert it to UTF-8 (iconv -f UTF-16)"),
    (rb"RD[ABX][23]\n", "data of R", _AS_CSV + " (write.csv)"),
)


def of_bytes(first: bytes) -> str | None:
    """The error text for a file with these first bytes; None if it may be text."""
    for magic, what, remedy in _BINARY:
        if re.match(magic, first, re.DOTALL):
            return f"seems to be {what}, which is not read; {remedy}"
    return None


def of_names(names: Collection[str]) -> str | None:
    """The error text for a zip archive with these file names; None if it is not recognized."""
    if "[Content_Types].xml" in names:
        return f"seems to be an Excel workbook (.xlsx), which is not read; {_AS_CSV}"
    if names and all(name.endswith(".npy") for name in names):
        if "indptr.npy" in names:
            remedy = _AS_MATRIX.format("scipy.sparse.load_npz")
        else:
            remedy = "load it by numpy.load, and give a table of its arrays"
        return f"seems to be arrays of NumPy (.npz), which are not read; {remedy}"
    return None


# Patterns of unsupported text formats: for every line, or for the first line.
_LIBSVM = re.compile(r"[^\s:]+( qid:\d+)?( \d+(:\d+)?:[-+.\deE]+)+ *(#.*)?")
# A tag may be the name of an item, like <unk>. Then the line has other cells after it.
_TAGS = "html|head|body|title|table|div|h1|pre|script"
_MARKUP = rf"<([!?]|({_TAGS})[ />]|[a-zA-Z][\w:.-]*( [^<>]*)?/?>(<|$)|\w+( \w+=|$))"
_TOML = r"\[\[?[\w.-]*[a-zA-Z_][\w.-]*\]\]?$"
_FIRST = (
    (r"%%MatrixMarket", "Matrix Market (.mtx)", _AS_MATRIX.format("scipy.io.mmread")),
    (_MARKUP, "HTML or XML", _AS_CSV),
    (_TOML, "TOML or INI", _AS_CSV),
    (r"---$|-\s+[\"']?\w+[\"']?:(\s|$)", "YAML", _AS_LINES),
    (r"-\[ RECORD 1 \]", "a table of psql", _AS_CSV),
    (r"[┌╔╭┏│║┃]", "a table as a program prints it", _AS_CSV),
    (r"\\[a-zA-Z]+\{", "LaTeX", _AS_CSV),
    (r"\{$", "JSON over several lines", _AS_LINES),
)
_ARFF = re.compile(r"@(relation|attribute)\s", re.IGNORECASE)
# The patterns match more than the keywords: an item may be called "insert into the blank".
_SQL_NAME = r"\s+(if\s+(not\s+)?exists\s+)?(\"[^\"]+\"|`[^`]+`|[^\s(,;]+)\s*"
_SQL = re.compile(
    rf"insert\s+into{_SQL_NAME}(\(|(values|select)\b|$)"
    rf"|create\s+table{_SQL_NAME}(\(|as\b|$)"
    rf"|drop\s+table{_SQL_NAME}(cascade\s*)?(;|$)"
    r"|copy\s.*\sfrom\s+stdin\b",
    re.IGNORECASE,
)
_RULE = re.compile(r"[ |+:-]*-{2,}[ |+:-]*")
# This pattern is used only for the second line: '-' may also stand for a missing cell.
_SHORT_RULE = re.compile(r"\|?( *:?-+:? *\|)+( *:?-+:? *)?")
# Number of lines in which an SQL statement, or the rule below a table's header, is searched.
_NEAR = 20


def of_lines(lines: list[str]) -> str | None:
    """The error text for a file of these lines; None if it may be data.

    Args:
      lines: first lines of the file that are not blank.
    """
    found = _of_lines(lines)
    return found and f"seems to be {found[0]}, which is not read; {found[1]}"


def _of_lines(lines: list[str]) -> tuple[str, str] | None:
    first = lines[0].strip()
    if first == "[" or first.startswith(("[{", "[ ")):
        return "a JSON array", _AS_LINES
    if first.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(first), list):
                if len(lines) == 1 and found and isinstance(found[0], list):
                    return "a JSON array", _AS_OBJECTS
                return "a JSON array on each line", _AS_OBJECTS
        if first.startswith("[[") and not re.match(_TOML, first):
            return "a JSON array", _AS_OBJECTS
    for form, what, remedy in _FIRST:
        if re.match(form, first):
            return what, remedy
    if any(map(_ARFF.match, lines)):
        return "ARFF", "write its data as CSV with a header"
    if any(map(_SQL.match, lines[:_NEAR])):
        return "SQL", _AS_CSV
    if first.startswith("+-") and _RULE.fullmatch(first):
        return "a table as a database prints it", _AS_CSV
    for above, line in itertools.pairwise(lines[:_NEAR]):
        # A table with a single column has no '|'. Its rule must then be the second line.
        rule = line.strip()
        if (_RULE.fullmatch(rule) and ("|" in above or above is lines[0])) or (
            _SHORT_RULE.fullmatch(rule) and above is lines[0]
        ):
            if above.strip().startswith("|"):
                return "a table of markdown", _AS_CSV
            remedy = r"write CSV (psql: \copy (SELECT ...) TO 'events.csv' CSV HEADER)"
            return "a table of psql or markdown", remedy
    if all(map(_LIBSVM.fullmatch, lines)):
        return "libsvm", _AS_MATRIX.format("sklearn.datasets.load_svmlight_file")
    # In a TSV file with an index, the first cell of the header is also empty, but a TAB follows.
    is_indented = first != lines[0].rstrip() and "\t" not in lines[0]
    if len(lines) > 1 and is_indented and _are_numbered(lines):
        return "a printed data frame", "write CSV by its to_csv, or give the frame"
    return None


def _are_numbered(lines: list[str]) -> bool:
    """Whether lines after the header begin with 0, 1, ... and have one more cell than it."""
    cells = [line.split() for line in lines[:_NEAR]]
    numbers = [each[0] for each in cells[1:]]
    return numbers == list(map(str, range(len(numbers)))) and all(
        len(each) == len(cells[0]) + 1 for each in cells[1:]
    )
