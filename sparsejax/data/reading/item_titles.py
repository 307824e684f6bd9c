"""Reads titles of items, which are shown in place of items' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from sparsejax.callers import warn_caller
from sparsejax.data.events.block import is_list
from sparsejax.data.events.pieces import is_path
from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.events.source import Asked, name_of, open_source
from sparsejax.data.files import arrow
from sparsejax.data.files.columns import Chosen
from sparsejax.data.files.names import as_names
from sparsejax.data.files.opening import DataError, shown
from sparsejax.data.files.spelling import are_missing
from sparsejax.data.sets.click_files import guess_clicks


def read_titles(
    source: Any, say: Callable[[str], object] = warn_caller
) -> dict[str, str]:
    """Reads the title of each item, by the item's name. Items without a title are left out.

    Args:
      source: a mapping; or a file or a table, whose first column has the names and whose
        second one has the titles. A title may be missing.
      say: function that is called with a line of text about the number of missing titles, and
        about the number of rows that repeat another one.

    Raises:
      DataError: the source cannot be read, a name is empty, or an item has several titles.
    """
    if isinstance(source, Mapping):
        return {
            str(name): str(title)
            for name, title in source.items()
            if title not in (None, "") and str(title) != "nan"
        }
    asked = Asked(Chosen(user=0, item=1, time=None), indicator=True)
    if is_path(source) and not is_parquet(source) and guess_clicks(source) == "pairs":
        # A header, if any, is read as the title of an item that no model has.
        asked = dataclasses.replace(asked, format="pairs", header=False)
    found: dict[str, str] = {}
    empty = repeated = 0
    for cells in open_source(source, asked).cells:
        names, titles = _plain(cells.columns["user"]), _plain(cells.columns["item"])
        if is_list(titles.type):
            raise cells.error(0, "the title is a list; give each item one text")
        if (unnamed := are_missing(names)).any():
            row = int(np.argmax(unnamed))
            raise cells.error(row, "the name of the item is empty")
        named = ~are_missing(titles)
        empty += int((~named).sum())
        rows = np.flatnonzero(named)
        try:
            items = as_names(names).tolist()
            texts = as_names(titles.take(arrow.from_numbers(rows))).tolist()
        except ValueError as error:
            raise DataError.at(cells.path, str(error)) from error
        for row, title in zip(rows.tolist(), texts, strict=True):
            before = found.setdefault(items[row], title)
            if before != title:
                raise cells.error(
                    row,
                    f"item {items[row]!r} has the title {title!r}, and {before!r} before; "
                    "give each item one title",
                )
            repeated += 1
    repeated -= len(found)
    for count, what in (
        (empty, "items have no title and are shown by their names"),
        (repeated, "rows repeat the title of an item"),
    ):
        if count:
            say(f"{shown(name_of(source))}: {count:,} {what}")
    return found


def _plain(column: pa.Array) -> pa.Array:
    type_ = column.type
    return column.cast(type_.value_type) if pt.is_dictionary(type_) else column
