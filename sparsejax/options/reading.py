"""Options to read files and tables, and to prepare events."""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sparsejax.options.option import ANY_FILE, RANKING, SWITCH, Flag, Options, option

if TYPE_CHECKING:
    from sparsejax.data.sets.assemble import Features
    from sparsejax.data.sets.event_schema import EventSchema
    from sparsejax.data.sets.split import Time

Column = int | str | None


class ByName(enum.Enum):
    """A choice that is made by the names of the columns."""

    BY_NAME = enum.auto()

    def __repr__(self) -> str:
        return self.name


BY_NAME = ByName.BY_NAME

# Type of the option for the column of times. With None, times are ignored: the file's order
# counts.
TimeColumn = Column | ByName

# Equal to the type in `sparsejax.data`, which is slow to import.
Format = Literal["text", "pairs", "jsonl", "adjacency", "parquet"]
FORMATS = Flag(
    type=Format | None,
    value="{text,pairs,jsonl,adjacency,parquet}",
    default="from name and content",
)
COLUMN = Flag(type=Column, value="COLUMN")


class Named(Options):
    """The columns of a table. By default their names decide on their content.

    Attributes:
      user: Column of users: its name, or its number from 0.
      item: Column of items, or of lists of items.
      value: Column of values, or of lists of values.
      time: Column of times, or of lists of times. None leaves the times out.
      indicator: Ignore the values: every entry counts 1.
      skip_bad_lines: Leave out lines that cannot be read, of clicks too. A warning counts them
        and says which they are. More than one in a hundred is an error.
    """

    heading = "columns"

    user: Column = option(None, COLUMN, kinds=RANKING)
    item: Column = option(None, COLUMN, kinds=RANKING)
    value: Column = option(None, COLUMN, kinds=("items",))
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
    indicator: bool = option(False, Flag(name="no-value", gives=True), kinds=("items",))
    skip_bad_lines: bool = option(False, SWITCH)


class Columns(Named):
    """Separators of a table, besides the names of its columns.

    Attributes:
      delimiter: Separator of the columns of a CSV file: one or two characters.
      separator: Separator of the items in a cell, if cells hold lists: ' ' or '|'.
      time_format: Format of times in the notation of strptime: '%d.%m.%Y %H:%M'.
    """

    heading = "columns"

    delimiter: str | None = option(
        None, Flag(value="TEXT", default="from the content"), kinds=RANKING
    )
    separator: str | None = option(None, Flag(value="TEXT"), kinds=RANKING)
    time_format: str | None = option(
        None, Flag(value="FORMAT", default="ISO 8601"), kinds=RANKING
    )


class Formatted(Columns):
    """The format of files, and the content of their columns.

    Attributes:
      format: Format of the files, see `sparsejax.read`.
    """

    format: Format | None = option(None, FORMATS, kinds=RANKING)


class OfUsers(Options):
    """Columns of the users, besides their events.

    Attributes:
      user_features: Columns of the users of histories: a CSV, Parquet or JSON Lines file with a
        column of users, and columns of numbers or categories; or a table, or `UserFeatures`.
        Users that it lacks have missing values. The run keeps the categories, not the table.
    """

    heading = "columns"

    user_features: Any = option(None, ANY_FILE, kinds=("histories",))


class Reading(Formatted, OfUsers):
    """Options that describe how files are read, including the columns of users."""


class Preparing(Named):
    """How events become a data set, in `prepare` here and on Spark.

    Attributes:
      time: Column with the times. It is read only if `split_time`, `split_last` or
        `duplicates="last"` needs it.
      duplicates: The value of an entry that has several events: their sum ("add"), the
        value of the latest ("last"; the largest of equally late ones), or the largest
        ("max").
      min_user: Leave out users with fewer entries, before the split. As this may make
        items rare, and the other way round, both are repeated until nothing changes.
      min_item: Leave out items with fewer users.
      features: Vocabulary to prepare against: names or a data set. By default it is the
        items, in the order of `vocabulary_order`.
      split_time: Hold out the events at or after this time, as `SparseDataset.split_at` does.
        Each part has the entries and the values of its own events. The vocabulary is then that
        of the earlier events. Later entries of other items are dropped and counted.
      repeats: With `split_time`, the treatment of an entry that has events on both sides.
        "new", the default: it is not held out, and the manifest counts it. "all": it is in both
        parts.
      split_last: Number of last entries of each row to hold out, as by
        `SparseDataset.split_last`. At equal times the greater name is later.
      split_fraction: Share of the entries that stays in train. The others are held out
        at random, as by `SparseDataset.split(fraction, seed=seed)`.
      seed: Seed of the random choice by `split_fraction`.
      skip_bad_lines: Leave out lines that cannot be read, of which at most one in a hundred may
        be bad; and of tables events without a user or an item, with a value that is not finite
        as float32, or without a time where it is needed. The manifest has their number.
    """

    only_with: ClassVar = {"repeats": ("split_time",), "seed": ("split_fraction",)}

    time: Column = option(None, COLUMN)
    duplicates: Literal["add", "last", "max"] = "add"
    min_user: int = option(1, least=1)
    min_item: int = option(1, least=1)
    features: Features = option(
        None, Flag(type=str | None, value="FILE", default="keep all")
    )
    split_time: Time | None = option(None, Flag(type=str | None, value="TIME"))
    repeats: Literal["new", "all"] | None = None
    split_last: int | None = option(None, least=1)
    split_fraction: float | None = option(None, above=0, below=1)
    seed: int = option(0, least=0, below=2**32)


class Prepare(Preparing, Formatted, kw_only=False):
    """The arguments of a call of `prepare`.

    Attributes:
      events: Files, or a table in memory; see `read`. Tables may have a list of items on
        each row.
      out: The folder to make, or an address in a store.
      histories: Keep the order and all repeats, for models of histories: `scan_sequences` and
        `read_sequences` take the folder. Users without an event are left out.
      schema: Columns of the events of histories, an `EventSchema`.
      memory: Memory that the engine may use, like "4GB"; by default 80 % of all.
    """

    only_with: ClassVar = {**Preparing.only_with, "schema": ("histories",)}

    events: Any
    out: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    histories: bool = option(False, SWITCH)
    schema: EventSchema | None = option(
        None, Flag(type=pathlib.Path | None, value="FILE")
    )
    memory: str | None = option(None, Flag(value="SIZE", default="80 % of all"))


class PrepareFrame(Preparing, kw_only=False):
    """The arguments of a call of `spark.prepare`.

    Attributes:
      frame: Any data frame, also of Spark Connect. It may have a list of items on each row.
      out: The folder to make: an address in a store, or a folder that all machines share.
      skip_bad_lines: Leave out events that are wrong. The manifest has their number.
    """

    frame: Any
    out: str | os.PathLike[str]
