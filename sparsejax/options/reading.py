"""How files and tables are read."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

from sparsejax.options.option import RANKING, Flag, Options, option

Column = int | str | None


class ByName(enum.Enum):
    """A choice that is left to the names of the columns."""

    BY_NAME = enum.auto()

    def __repr__(self) -> str:
        return self.name


BY_NAME = ByName.BY_NAME

# The column of times. None leaves times out: then the order of the file is meant.
TimeColumn = Column | ByName

# As `sparsejax.data` has them, to read.
Format = Literal["text", "pairs", "jsonl", "adjacency", "parquet"]
FORMATS = Flag(
    type=Format | None,
    value="{text,pairs,jsonl,adjacency,parquet}",
    default="from name and content",
)
COLUMN = Flag(type=Column, value="COLUMN", default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(Options):
    """The columns of a table. By default their names say what they hold.

    Attributes:
      user: Column of users: its name, or its number from 0.
      item: Column of items, or of lists of items.
      value: Column of values, or of lists of values.
      time: Column of times, or of lists of times. None leaves the times out.
      delimiter: Separator of the columns of a CSV file: one or two characters.
      separator: Separator of the items in a cell, if cells hold lists: ' ' or '|'.
      time_format: Format of times, as of strptime: '%d.%m.%Y %H:%M'.
      indicator: Ignore the values: every entry counts 1.
      skip_bad_lines: Leave out lines that cannot be read, of clicks too. A warning counts them
        and says which they are. More than one in a hundred is an error.
    """

    heading = "columns"

    user: Column = option(None, COLUMN, kinds=RANKING)
    item: Column = option(None, COLUMN, kinds=RANKING)
    value: Column = option(None, COLUMN, kinds=RANKING)
    time: TimeColumn = option(
        BY_NAME,
        COLUMN,
        Flag(
            name="no-time",
            gives=None,
            text="Leave the times out. Histories are then in the order of the file.",
        ),
        kinds=RANKING,
    )
    delimiter: str | None = option(
        None, Flag(value="TEXT", default="from the content"), kinds=RANKING
    )
    separator: str | None = option(None, Flag(value="TEXT", default=""), kinds=RANKING)
    time_format: str | None = option(
        None, Flag(value="FORMAT", default="ISO 8601"), kinds=RANKING
    )
    indicator: bool = option(False, Flag(name="no-value", gives=True), kinds=RANKING)
    skip_bad_lines: bool = option(False, Flag(gives=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(Columns):
    """The format of files, and what their columns hold.

    Attributes:
      format: Format of the files, see `sparsejax.read`.
    """

    format: Format | None = option(None, FORMATS, kinds=RANKING)
