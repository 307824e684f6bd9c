"""Guesses the format of a file."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Literal

from sparsejax.data.columns import role_of
from sparsejax.data.files import DataError, Path, head, is_address
from sparsejax.data.pair_layout import DELIMITERS

Format = Literal["text", "pairs", "adjacency", "parquet"]

_MAGIC = b"PAR1"  # the first bytes of a Parquet file
_BY_SUFFIX: dict[str, Format] = {".parquet": "parquet", ".csv": "pairs"}


def guess_format(path: Path) -> Format:
    """The format of a file, by its name or by its first lines.

    A folder, an address and a name that ends in `.parquet` are parquet, and so is a file
    that begins as one. A name that ends
    in `.csv` is pairs, also with `.gz` or `.xz` behind it. For other names the first 64
    KiB decide:

    * text: no line has two TABs, and in one line a ':' stands behind the TAB. Only if both
      cells of the first line are known names of columns, this is pairs with a header.
    * pairs: each line has the same number of fields, at least two, separated by TAB, '::',
      ',', ';' or '|'. If they are two fields with a TAB between, the second must not have
      a ',' or a space, or the first line must be a header.
    * adjacency: lines have different numbers of fields, separated by spaces, without TAB
      or ','.

    If a file could be two of these, the format is not clear.

    Raises:
      DataError: the format is not clear, so it must be named.
    """
    name = re.sub(r"\.(gz|xz)$", "", os.fspath(path).lower())
    if is_parquet(path):
        return "parquet"
    if known := _BY_SUFFIX.get(os.path.splitext(name)[1]):
        return known
    lines = [line for line in head(path).data.decode().split("\n") if line.strip()]
    if guess := _guess(lines):
        return guess
    raise DataError.at(
        path,
        f"the format is not clear from the first line {lines[0][:60]!r}; name it with "
        "format= (on the command line --format): text, pairs or adjacency",
    )


def is_parquet(path: Path) -> bool:
    """Whether this is Parquet: by its name, its first bytes, or as a folder or address."""
    if is_address(path) or os.path.isdir(path):
        return True
    if os.fspath(path).lower().endswith(".parquet"):
        return True
    if not os.path.isfile(path):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def _guess(lines: list[str]) -> Format | None:
    if max(line.count("\t") for line in lines) == 1:
        cells = lines[0].split("\t")
        behind = [line.partition("\t")[2] for line in lines]
        if any(":" in rest for rest in behind):
            if all(_is_header([cell]) for cell in cells):
                return "pairs"
            # This could be a row "user" that has only a "book".
            return None if _is_header(cells) else "text"
        if _is_header(cells):
            return "pairs"
        # If each line has one feature, reading it as text would give the same.
        return "pairs" if all(re.fullmatch("[^, ]+", rest) for rest in behind) else None
    for delimiter in DELIMITERS:
        counts = {line.count(delimiter) for line in lines}
        if len(counts) == 1 and counts != {0}:
            return "pairs"
    fields = {len(line.split()) for line in lines}
    if len(fields) > 1 and not any("," in line or "\t" in line for line in lines):
        return "adjacency"
    return None


def _is_header(cells: list[str]) -> bool:
    return any(role_of(cell) in ("user", "item") for cell in cells)
