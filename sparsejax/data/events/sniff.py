"""Guesses the format of a file from its name or its first lines."""

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
    """Guesses the format of a file by its name or its first lines.

    >>> guess_format("purchases.tsv")
    'text'

    An address is parquet, and so is a name that ends in `.parquet`, a file that begins with
    the bytes of Parquet, and a folder with such a file. In another folder the first file
    decides. A name that ends in `.csv` is pairs, and one in `.jsonl` or `.ndjson` is jsonl,
    also if a suffix of compression follows. For other names the first 64 KiB decide:

    * jsonl: the first line is a JSON object.
    * text: no line has two TABs, and at least one line has a ':' after the TAB. Each row has
      one line. In addition, lines differ in their first entries, or an entry stands in
      several places, or all entries have values. Entries of two digits like `12:30` are not
      clear. The format is pairs instead if the first line is a header, or if items look
      like `http://shop/1`, or if all have equally many ':' and an equal begin, like
      `shop:tea:1`.
    * pairs: each line has the same number of fields, at least two, separated by TAB, '::',
      ',', ';' or '|'. If there are two fields with a TAB between, the second must not have
      a ',' or a space, or the first line must be a header.
    * adjacency: lines have different numbers of fields, separated by spaces, without TAB
      or ','.

    If several of these are possible, the format is not clear.

    Raises:
      DataError: the format is not clear, so the caller must name it.
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
        return known  # the reader of this format describes the problem
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


# A pattern that matches the suffixes of compressed files.
COMPRESSED = r"\.(gz|xz|bz2|zst|zip)"


def is_parquet(path: Path) -> bool:
    """Whether a path is Parquet: by its name, by its first bytes, or because it is an address.

    A folder is Parquet unless it has only files of other formats.
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
            # Ambiguous: the first line may be a header, or a row "user" with an item "book".
            return None if _is_header(cells) else _with_colons(lines)
        if _is_header(cells):
            return "pairs"
        # If each line has a single feature, both formats give equal rows.
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
    """Decides between the formats text and pairs for lines with one TAB, some with ':' after it.

    In the format pairs, an item may contain ':', like `spotify:track:1`, `http://shop/1` or
    `12:30`.
    """
    rows = [line.partition("\t")[0] for line in lines]
    behind = [line.partition("\t")[2] for line in lines]
    entries = [re.split(r"(?<!\\):", rest.removesuffix(":")) for rest in behind]
    flat = [entry for each in entries for entry in each if entry]
    if all("," in entry and is_number(entry.rpartition(",")[2]) for entry in flat):
        return "text"
    repeated = len(set(rows)) < len(rows)  # in the text format a row has one line
    slashes = max(sum(e.startswith("//") for e in each) for each in entries)
    # The two numbers of a time like `12:30` may occur at both positions, unlike parts of a name.
    are_clocks = all(re.fullmatch("[0-9]{2}", entry) for entry in flat)
    if not (repeated or slashes or are_clocks) and _stand_anywhere(entries):
        return "text"
    first = {each[0] for each in entries if len(each) > 1}
    sizes = {len(each) for each in entries}
    several = sum(len(each) > 1 for each in entries)
    # If all lines begin with the same part and then differ, this part is a URI scheme, no item.
    has_scheme = several > 1 and len(sizes) == len(first) == 1 < len(set(behind))
    if slashes == 1 or has_scheme:
        return "pairs" if all(re.fullmatch("[^, ]+", rest) for rest in behind) else None
    is_alike = several > 1 and (len(first) == 1 or (are_clocks and len(sizes) == 1))
    is_cut = slashes or any(entry.startswith(" ") for entry in flat)
    return None if is_alike or is_cut or repeated else "text"


def _stand_anywhere(entries: list[list[str]]) -> bool:
    """Whether an entry occurs at two positions of lines: items do, and parts of names do not."""
    places = collections.defaultdict(set)
    for each in entries:
        for place, entry in enumerate(each):
            places[entry].add(place)
    return any(len(found) > 1 for found in places.values())


def _is_header(cells: list[str]) -> bool:
    return any(role_of(cell) in ("user", "item") for cell in cells)
