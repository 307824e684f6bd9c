"""Guesses the format of a file."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
from typing import Literal

from sparsejax.data.events.pair_layout import DELIMITERS, typed_header
from sparsejax.data.events.pieces import find_pieces
from sparsejax.data.files import others
from sparsejax.data.files.columns import role_of
from sparsejax.data.files.opening import DataError, Path, head, is_address
from sparsejax.data.files.parquet import files_below
from sparsejax.data.files.values import is_number

Format = Literal["text", "pairs", "jsonl", "adjacency", "parquet"]

_MAGIC = b"PAR1"  # the first bytes of a Parquet file
_BY_SUFFIX: dict[str, Format] = {
    ".parquet": "parquet",
    ".csv": "pairs",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}


def guess_format(path: Path) -> Format:
    """The format of a file, by its name or by its first lines.

    >>> guess_format("purchases.tsv")
    'text'

    An address and a name that ends in `.parquet` are parquet, and so are a file that begins
    as one and a folder with such a file. The first file of another folder decides. A name
    that ends in `.csv` is pairs and one in `.jsonl` or `.ndjson` is jsonl, also with the
    ending of a compressed file behind it. For other names the first 64 KiB decide:

    * jsonl: the first line is a JSON object.
    * text: no line has two TABs, and in one line a ':' stands behind the TAB. Each row
      stands on one line, and lines differ in the first of their entries, or an entry stands
      in several places; or all entries have values. Lines of two digits like `12:30` are
      not clear. It is pairs if the first line is a header, or if items
      are like `http://shop/1`, or if all have as many ':' and begin alike, like
      `shop:tea:1`.
    * pairs: each line has the same number of fields, at least two, separated by TAB, '::',
      ',', ';' or '|'. If they are two fields with a TAB between, the second must not have
      a ',' or a space, or the first line must be a header.
    * adjacency: lines have different numbers of fields, separated by spaces, without TAB
      or ','.

    If a file could be two of these, the format is not clear.

    Raises:
      DataError: the format is not clear, so it must be named.
    """
    name = re.sub(rf"{COMPRESSED}$", "", os.fspath(path).lower())
    if is_parquet(path):
        return "parquet"
    if os.path.isdir(path):
        path = find_pieces(path)[0].path
        return guess_format(path)
    known = _BY_SUFFIX.get(os.path.splitext(name)[1])
    try:
        text = head(path).data.decode()
    except DataError:
        if known is None:
            raise
        return known  # whose reader says what is wrong
    lines = [line for line in text.split("\n") if line.strip()]
    if problem := others.of_lines(lines):
        raise DataError.at(path, problem)
    if known is not None:
        return known
    if lines[0].lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(lines[0]), dict):
                return "jsonl"
    if guess := _guess(lines):
        return guess
    raise DataError.at(
        path,
        f"the format is not clear from the first line {lines[0][:60]!r}; name it with "
        "format= (on the command line --format): text, pairs or adjacency",
    )


# How the names of compressed files end.
COMPRESSED = r"\.(gz|xz|bz2|zst|zip)"


def is_parquet(path: Path) -> bool:
    """Whether this is Parquet: by its name, its first bytes, or as an address.

    A folder is, unless it has only files of other formats.
    """
    if is_address(path):
        return True
    if os.path.isdir(path):
        files = files_below(path)
        return not files or any(f.is_parquet for f in files)
    if os.fspath(path).lower().endswith(".parquet"):
        return True
    if not os.path.isfile(path):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def _guess(lines: list[str]) -> Format | None:
    if any(typed_header(lines[0].split(d)) for d in DELIMITERS if d in lines[0]):
        return "pairs"
    if max(line.count("\t") for line in lines) == 1:
        cells = lines[0].split("\t")
        behind = [line.partition("\t")[2] for line in lines]
        if any(":" in rest for rest in behind):
            if all(_is_header([cell]) for cell in cells):
                return "pairs"
            # This could be a row "user" that has only a "book".
            return None if _is_header(cells) else _with_colons(lines)
        if _is_header(cells):
            return "pairs"
        # If each line has one feature, reading it as text would give equal rows.
        return "pairs" if all(re.fullmatch("[^, ]+", rest) for rest in behind) else None
    for delimiter in DELIMITERS:
        counts = {line.count(delimiter) for line in lines}
        if len(counts) == 1 and counts != {0}:
            return "pairs"
    fields = {len(line.split()) for line in lines}
    if len(fields) > 1 and not any("," in line or "\t" in line for line in lines):
        return "adjacency"
    return None


def _with_colons(lines: list[str]) -> Format | None:
    """The format of lines with one TAB and, in some, a ':' behind it: rows, or pairs.

    In pairs an item may have a ':', like `spotify:track:1`, `http://shop/1` or `12:30`.
    """
    rows = [line.partition("\t")[0] for line in lines]
    behind = [line.partition("\t")[2] for line in lines]
    entries = [re.split(r"(?<!\\):", rest.removesuffix(":")) for rest in behind]
    flat = [entry for each in entries for entry in each if entry]
    if all("," in entry and is_number(entry.rpartition(",")[2]) for entry in flat):
        return "text"
    repeated = len(set(rows)) < len(rows)  # in text a row stands on one line
    slashes = max(sum(e.startswith("//") for e in each) for each in entries)
    # The hours and minutes of times stand anywhere, too.
    are_clocks = all(re.fullmatch("[0-9]{2}", entry) for entry in flat)
    if not (repeated or slashes or are_clocks) and _stand_anywhere(entries):
        return "text"
    first = {each[0] for each in entries if len(each) > 1}
    sizes = {len(each) for each in entries}
    several = sum(len(each) > 1 for each in entries)
    # A text that begins all lines is a scheme, not an item, if the lines go on differently.
    has_scheme = several > 1 and len(sizes) == len(first) == 1 < len(set(behind))
    if slashes == 1 or has_scheme:
        return "pairs" if all(re.fullmatch("[^, ]+", rest) for rest in behind) else None
    is_alike = several > 1 and (len(first) == 1 or (are_clocks and len(sizes) == 1))
    is_cut = slashes or any(entry.startswith(" ") for entry in flat)
    return None if is_alike or is_cut or repeated else "text"


def _stand_anywhere(entries: list[list[str]]) -> bool:
    """Whether an entry stands in two places of lines, as items do and parts of names do not."""
    places = collections.defaultdict(set)
    for each in entries:
        for place, entry in enumerate(each):
            places[entry].add(place)
    return any(len(found) > 1 for found in places.values())


def _is_header(cells: list[str]) -> bool:
    return any(role_of(cell) in ("user", "item") for cell in cells)
