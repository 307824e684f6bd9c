"""Reads data sets of items from files.

Every reader takes `features`: a data set or names, whose features become the columns of the
result. Read a second file, for example targets, a test set or a filter, like this::

    train = read("train.txt")
    test = read("test.txt", features=train)

Then both have the same columns. Entries of other features are left out, and a warning counts
them. If all features are unknown, that is an error. Without `features` the columns are the
features of the file, in the order of `vocabulary_order`.

In every format rows come in order of first appearance, and lines with equal row names are
merged. A (row, feature) that occurs several times becomes one entry, and its values are
added. If no entry of a file has a value, the result is an indicator data set
(`matrix.data` is None). If only some entries have one, that is an error. A value of 0 is
an entry like any other. Names are kept byte for byte, with their spaces. Files are UTF-8.
Lines end in LF or CR LF and have at most 64 MiB. Blank lines are skipped. gzip, xz, bzip2,
zstd and a zip of one file are read directly. A wrong file raises `DataError`, with the number
of the line.

Tables are pairs, JSON Lines, Parquet, frames and dicts. The caller names the column for a role,
or else the column is found by the known names of the role (`columns.SYNONYMS`). Names are compared
without case, spaces, `_`, `-` and `.`, in singular or plural. Names of users and items
may have id, key, code, no or number before or after them. Other columns are never
guessed: if it is not clear which column has a role, an error lists the columns.
`SparseDataset.columns` has the columns that were read.

Names of users and items are text, which stays as it is, or integers. Whole floats are read as
integers, decimals by their digits, and 16 bytes as a UUID. If a given vocabulary has only
integers, `7.0` stands for its `7`. Times are integers, floats, dates of Arrow or text of ISO
8601 (converted to UTC if it has a time zone), all of one kind. If a (row, feature) has several
events, the latest gives the time; of equally late ones the last in the file counts. A column
that is found by a known name for times is left out if its first cell is not a time; for
histories (`read_sequences`) that is an error. `time=None` leaves times out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from sparsejax.data.events.pieces import is_path
from sparsejax.data.events.source import Asked, find_format, open_source
from sparsejax.data.files import parquet, stored
from sparsejax.data.files.columns import BY_NAME, Chosen, Column, TimeColumn
from sparsejax.data.files.opening import Path, shown
from sparsejax.data.prepared.folder import DataFolder
from sparsejax.data.sets.assemble import Features, align_to, assemble
from sparsejax.data.sets.dataset import SparseDataset


def read(
    source: Path | Any,
    *,
    format: str | None = None,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: TimeColumn = BY_NAME,
    delimiter: str | None = None,
    separator: str | None = None,
    time_format: str | None = None,
    features: Features = None,
    indicator: bool = False,
    skip_bad_lines: bool = False,
) -> SparseDataset:
    """Reads a file, several files or a table in memory, in any of the formats.

    >>> read("purchases.tsv").row_names.tolist()
    ['ann', 'bob', 'eve']
    >>> read([{"user": "ann", "genres": "Drama|War"}], item="genres", separator="|").num_features
    2

    Args:
      source: a file; a folder, whose files of one format are read in the order of their
        names; a list of files; an address of Parquet files; a table as for
        `from_arrow`; or dicts or Arrow's batches, in a list or an iterator.
        Folders may be named like `dt=2024-01-01`, as by Hive: then `dt` is a column.
      format: `"text"`, `"pairs"`, `"jsonl"`, `"adjacency"` or `"parquet"`. By default the
        file's name or its first lines decide; see `guess_format`.
      user: name of the column with the row's name, for a table (pairs, jsonl and parquet).
      item: name of the column with the feature's name.
      value: name of the column with the value.
      time: name of the column with the time; None leaves times out.
      delimiter: text between the columns of pairs, one or two characters; by default it
        is guessed.
      separator: text between the items in a cell, like "|" in `Drama|War`, and between
        the values if there are several. By default a cell is one item.
      time_format: format of times that are text, for `strptime`: "%d.%m.%Y %H:%M". By
        default they are ISO 8601.
      features: vocabulary of the result: names, or a data set. None: the file's features.
      indicator: ignore values.
      skip_bad_lines: leave out lines that cannot be read, such as those with another number
        of columns, an empty name, text in place of a number, or bytes that are not UTF-8. A
        warning counts them and gives their numbers. More than one in a hundred is an error.

    Raises:
      DataError: the file cannot be read, or its format is not clear.
      ValueError: the format is unknown, columns are chosen for a format without columns, or
        `skip_bad_lines` is given for Parquet or a table in memory.
    """
    asked = Asked(
        Chosen(user, item, value, time),
        format,
        delimiter,
        indicator=indicator,
        separator=separator,
        time_format=time_format,
        skip_bad_lines=skip_bad_lines,
    )
    if is_path(source) and find_format(source, asked) == "parquet":
        return _parquet(source, asked, features)
    return _read(source, asked, features)


def _read(source: Any, asked: Asked, features: Features) -> SparseDataset:
    found = open_source(source, asked)
    blocks = found.blocks()
    return assemble(blocks, found.path, features=features, columns=found.columns)


def read_text(
    path: Path,
    *,
    features: Features = None,
    indicator: bool = False,
    skip_bad_lines: bool = False,
) -> SparseDataset:
    """Reads the text format of DSSTNE, with a line for each row.

    >>> sorted(read_text("purchases.tsv").feature_names.tolist())
    ['milk', 'rye', 'tea']

    ::

        line    := row TAB entry *( ":" entry ) [ ":" ]
        entry   := feature [ "," value ]

    In a name `\\,`, `\\:`, `\\t`, `\\n`, `\\r` and `\\\\` stand for comma, colon, TAB, line
    feed, carriage return and backslash. Any other backslash stands for itself. A row
    without entries is `row TAB`.

    Three rules differ from DSSTNE: lines with equal row names are merged (in DSSTNE the
    last one wins), a missing value does not mean 0, and text that does not fit the grammar
    is an error.

    Args:
      path: path of the file.
      features: vocabulary of the result: names, or a data set. None: the file's features.
      indicator: ignore values, for example in files that hold `movie,timestamp`.
      skip_bad_lines: leave out lines that cannot be read; see `read`.

    Raises:
      DataError: the file cannot be read.
    """
    asked = Asked(format="text", indicator=indicator, skip_bad_lines=skip_bad_lines)
    return _read(path, asked, features)


def read_adjacency(
    path: Path, *, features: Features = None, skip_bad_lines: bool = False
) -> SparseDataset:
    """Reads `row feature feature ...` lines, separated by spaces or TABs.

    >>> _ = pathlib.Path("rows.txt").write_text("ann milk tea\\nbob\\n")
    >>> read_adjacency("rows.txt").matrix.indptr.tolist()
    [0, 2, 2]

    A row without entries is a line with its name only.

    Args:
      path: path of the file.
      features: vocabulary of the result: names, or a data set. None: the file's features.
      skip_bad_lines: leave out lines that cannot be read; see `read`.

    Raises:
      DataError: the file cannot be read.
    """
    asked = Asked(format="adjacency", skip_bad_lines=skip_bad_lines)
    return _read(path, asked, features)


def read_pairs(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: TimeColumn = BY_NAME,
    delimiter: str | None = None,
    header: bool | None = None,
    features: Features = None,
    indicator: bool = False,
    skip_bad_lines: bool = False,
) -> SparseDataset:
    """Reads CSV or TSV with a (user, item) pair on each line, perhaps with value and time.

    >>> _ = pathlib.Path("pairs.csv").write_text("user,item,rating\\nann,tea,4\\n")
    >>> read_pairs("pairs.csv").matrix.data.tolist()
    [4.0]

    Columns are given by number, from 0, or by their name in the header. By default:

    * `delimiter` is TAB, '::', ',', ';' or '|': the one that gives all lines an equal
      number of columns.
    * There is a header if a column is given by name, or if two cells of the first line
      are known names of columns, or if all its cells are text and one column has only
      numbers or dates below, or if all end in a type of RecBole, like `user_id:token`.
    * Without a header, the first of two columns holds the users and the second the items;
      columns that are given for another role do not count. The columns
      `user::item::rating::time` of MovieLens are recognized, too. Otherwise columns must be
      given.

    Fields may be quoted as in RFC 4180. If TAB or two characters separate them, a quote is
    an ordinary character. Quotes must be closed, and a record has at most 8 MiB.

    Args:
      path: path of the file.
      user: name or number of the column with the row's name.
      item: name or number of the column with the feature's name.
      value: name or number of the column with the value.
      time: name or number of the column with the time; None leaves times out.
      delimiter: text between the columns, one or two characters.
      header: whether the first line holds the columns' names.
      features: vocabulary of the result: names, or a data set. None: the file's features.
      indicator: ignore values.
      skip_bad_lines: leave out lines that cannot be read; see `read`.

    Raises:
      DataError: the file cannot be read.
      ValueError: the delimiter is wrong, a column is chosen for two roles, or a column is
        chosen by name but there is no header.
    """
    asked = Asked(
        Chosen(user, item, value, time),
        "pairs",
        delimiter,
        header,
        indicator=indicator,
        skip_bad_lines=skip_bad_lines,
    )
    return _read(path, asked, features)


def read_parquet(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: TimeColumn = BY_NAME,
    features: Features = None,
    indicator: bool = False,
) -> SparseDataset:
    """Reads Parquet: a table like those of `from_arrow`, or files of `SparseDataset.save`.

    >>> read("purchases.tsv").save("purchases")
    >>> read_parquet("purchases").num_rows
    3

    Args:
      path: a file or a folder. The `.parquet` files of a folder and its subfolders are
        read in the order of their names. Either all of them or none have a column of values,
        and likewise of times. A folder that `sparsejax.prepare` wrote stands for its part
        `train`; the path of `test` in it stands for the held-out rows. It may also be an
        address that pyarrow's file systems support, like `s3://bucket/purchases/`.
        Credentials and region come from the environment, for example `AWS_ACCESS_KEY_ID`.
        `?region=` and, for a store other than Amazon's, `?endpoint_override=` may be added
        to the address.
      user: name of the column with the row's name.
      item: name of the column with the feature's name, or with a list of names.
      value: name of the column with the value, or with a list of values.
      time: name of the column with the time, or with a list of times; None leaves times out.
      features: vocabulary of the result: names, or a data set. None: the features of the
        files, or the vocabulary of a saved data set.
      indicator: ignore values.

    Raises:
      DataError: the file cannot be read.
      ValueError: a column is chosen for two roles, or columns are chosen for a saved data
        set.
    """
    chosen = Chosen(user, item, value, time)
    return _parquet(path, Asked(chosen, "parquet", indicator=indicator), features)


def _parquet(path: Path, asked: Asked, features: Features) -> SparseDataset:
    if (folder := DataFolder.find(path, histories=False)) is not None:
        return _saved(path, folder.read, asked, features)
    files = parquet.parquet_files(path)
    _, schema = parquet.first_schema(files)
    form = stored.form_of(schema)
    if form is not None and form.has_rows:
        stored.ITEMS.check(path, schema)
        if len(files) == 1:
            load = functools.partial(SparseDataset.load, path)
            return _saved(path, load, asked, features)
    return _read(path, asked, features)


def _saved(
    path: Path, load: Callable[[], SparseDataset], asked: Asked, features: Features
) -> SparseDataset:
    """Loads a saved data set by `load`, and applies the caller's arguments to it."""
    if asked.chosen:
        raise ValueError(
            f"{shown(path)}: is a saved data set, so it has no columns to name"
        )
    dataset = load()
    if asked.indicator:
        dataset = dataset.without_values()
    if asked.chosen.time is None:
        dataset = dataclasses.replace(dataset, times=None, order=None)
    return dataset if features is None else align_to(dataset, features, path)


def from_arrow(
    table: Any,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: TimeColumn = BY_NAME,
    features: Features = None,
    indicator: bool = False,
) -> SparseDataset:
    """Converts a table in memory, for example of polars, pandas, pyarrow or DuckDB.

    The table needs Arrow's PyCapsule interface (`__arrow_c_stream__`). A row of it is one
    of these:

    * a pair of user and item, perhaps with a value and a time;
    * a user with a list of items, perhaps with lists of values and times, or with one time
      for all of them.

    Columns are given by number, from 0, or by name; otherwise they are found by known names.
    If no column has a known name for items, the only column with lists of text or integers
    holds them.

    A null in place of a list is a row without entries. Other nulls are errors, unless all
    values are null.

    >>> frame = pandas.DataFrame({"user": ["ann", "ann"], "item": ["tea", "rye"]})
    >>> from_arrow(frame).matrix.indptr.tolist()
    [0, 2]

    Args:
      table: the table.
      user: name or number of the column with the row's name.
      item: name or number of the column with the feature's name, or with a list of names.
      value: name or number of the column with the value, or with a list of values.
      time: name or number of the column with the time, or with a list of times; None leaves
        times out.
      features: vocabulary of the result: names, or a data set. None: the table's features.
      indicator: ignore values.

    Raises:
      DataError: a row is wrong, or a column has the wrong type.
      TypeError: `table` does not have Arrow's PyCapsule interface.
      ValueError: a column is chosen for two roles.
    """
    if not hasattr(table, "__arrow_c_stream__"):
        raise TypeError(
            "expected a table with Arrow's PyCapsule interface, for example of polars, "
            f"pandas or pyarrow, got {type(table).__name__}"
        )
    chosen = Chosen(user, item, value, time)
    return _read(table, Asked(chosen, indicator=indicator), features)
