"""Reading data sets from files.

Every reader takes `features`: the data set (or the names) whose vocabulary the file is
to be read against. Read a second file, be it targets, a test set or a filter, like
this::

    train = read("train.txt")
    test = read("test.txt", features=train)

Then both have the same columns. Features that the vocabulary lacks are left out with a
warning that counts them; if all are unknown, that is an error. Without `features` the
vocabulary is what the file holds, in the order of `vocabulary_order`.

In every format: rows come in order of first appearance, and lines of the same row are
merged. A (row, feature) that occurs several times becomes one entry; values are added.
A file in which no entry has a value gives an indicator data set (`matrix.data` is
None); a file in which some have one and some do not is an error. A value of 0 is an
entry like any other. Names are kept byte for byte, spaces included. Files are UTF-8,
lines end in LF or CR LF and have at most 64 MiB, blank lines are skipped, and gzip and xz
are read directly. What is wrong with a file is raised as `DataError`, with the line's
number.

Of a table (pairs, Parquet, a frame) each column is read by its name, if that is a known
one (`columns.SYNONYMS`; compared without case, spaces, `_`, `-` and `.`, in singular or
plural, users and items also with id, key, code, no or number before or behind), or as
what the caller says. Nothing is guessed from what is left over: where it is not clear
which column is what, that is an error which lists the columns. `SparseDataset.columns`
tells which were read.

Names of users and items are text or integers. Integers that became floats, and are all
whole, are read as integers, and 16 bytes are a UUID. Times are integers, floats, dates of
Arrow or text as of ISO 8601 (UTC where there is a zone), all of one kind. Of several
events of one (row, feature) the latest gives the time, of equally late ones the last in
the file. A column whose name is known for times is left out if its first cell is no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from sparsejax.data import lines, pairs, parquet, sniff, tables
from sparsejax.data.assemble import Features, align_to, assemble
from sparsejax.data.columns import Chosen, Column
from sparsejax.data.dataset import SparseDataset
from sparsejax.data.files import DataError, Path, open_data, progress_bar, shown
from sparsejax.data.pair_layout import find_layout


def read(
    path: Path,
    *,
    format: str | None = None,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: Column = None,
    delimiter: str | None = None,
    features: Features = None,
    indicator: bool = False,
) -> SparseDataset:
    """Reads a data file in any of the formats.

    >>> read("purchases.tsv").row_names.tolist()
    ['ann', 'bob', 'eve']

    Args:
      path: the file, or a folder or an address of Parquet files.
      format: `"text"`, `"pairs"`, `"adjacency"` or `"parquet"`; by default what the
        file's name or its first lines say, see `guess_format`.
      user: the column with the row's name, of a table (pairs and parquet).
      item: the column with the feature's name.
      value: the column with the value.
      time: the column with the time.
      delimiter: what separates the columns of pairs, one or two characters.
      features: vocabulary to read against.
      indicator: ignore values, whatever they are.

    Raises:
      DataError: the file cannot be read, or its format is not clear.
      ValueError: there is no such format, or it has no columns to name.
    """
    if format is None:
        format = sniff.guess_format(path) if delimiter is None else "pairs"
    chosen = Chosen(user, item, value, time)
    if format in ("text", "adjacency") and chosen:
        raise ValueError(f"{shown(path)}: the format {format} has no columns to name")
    if format != "pairs" and delimiter is not None:
        raise ValueError(f"{shown(path)}: the format {format} has its own delimiter")
    match format:
        case "text":
            return read_text(path, features=features, indicator=indicator)
        case "pairs":
            return read_pairs(
                path,
                **vars(chosen),
                delimiter=delimiter,
                features=features,
                indicator=indicator,
            )
        case "adjacency":
            return read_adjacency(path, features=features)
        case "parquet":
            return read_parquet(
                path, **vars(chosen), features=features, indicator=indicator
            )
    raise ValueError(
        f"unknown format {format!r}; expected text, pairs, adjacency or parquet"
    )


def read_text(
    path: Path, *, features: Features = None, indicator: bool = False
) -> SparseDataset:
    """Reads DSSTNE's text form: a line for each row.

    >>> sorted(read_text("purchases.tsv").feature_names.tolist())
    ['milk', 'rye', 'tea']

    ::

        line    := row TAB entry *( ":" entry ) [ ":" ]
        entry   := feature [ "," value ]

    In a name `\\,`, `\\:`, `\\t`, `\\n`, `\\r` and `\\\\` stand for comma, colon, TAB, line
    feed, carriage return and backslash; any other backslash stands for itself. A row
    without entries is `row TAB`. Unlike in DSSTNE, lines of the same row are
    merged (there the last one wins), a missing value does not mean 0, and what does not
    fit the grammar is an error.

    Args:
      path: the file.
      features: vocabulary to read against.
      indicator: ignore values, as for files that hold `movie,timestamp`.

    Raises:
      DataError: the file cannot be read.
    """
    with open_data(path) as stream:
        blocks = lines.text_blocks(stream, path, indicator=indicator)
        return assemble(blocks, path, features=features)


def read_adjacency(path: Path, *, features: Features = None) -> SparseDataset:
    """Reads `row feature feature ...` lines, separated by spaces or TABs.

    >>> _ = pathlib.Path("rows.txt").write_text("ann milk tea\\nbob\\n")
    >>> read_adjacency("rows.txt").matrix.indptr.tolist()
    [0, 2, 2]

    A row without entries is its name alone.

    Args:
      path: the file.
      features: vocabulary to read against.

    Raises:
      DataError: the file cannot be read.
    """
    with open_data(path) as stream:
        blocks = lines.adjacency_blocks(stream, path)
        return assemble(blocks, path, features=features)


def read_pairs(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: Column = None,
    delimiter: str | None = None,
    header: bool | None = None,
    features: Features = None,
    indicator: bool = False,
) -> SparseDataset:
    """Reads CSV or TSV with a (user, item) pair, perhaps with a value, on each line.

    >>> _ = pathlib.Path("pairs.csv").write_text("user,item,rating\\nann,tea,4\\n")
    >>> read_pairs("pairs.csv").matrix.data.tolist()
    [4.0]

    Columns are given by number, from 0, or by their name in the header. By default:

    * `delimiter` is that of TAB, '::', ',', ';' and '|' by which all lines have the same
      number of columns;
    * there is a header if a column is given by name, if two cells of the first line are
      known names of columns, or if all its cells are text and one stands above nothing
      but numbers or dates;
    * without a header, and if two columns are left that are not given, the first holds
      the users and the second the items. `user::item::rating::time` of MovieLens is
      known, too. Otherwise columns must be given.

    Fields may be quoted as in RFC 4180, but not where TAB or two characters separate
    them: there a quote is an ordinary character. Quotes must be closed, and a record has
    at most 8 MiB.

    Args:
      path: the file.
      user: the column with the row's name.
      item: the column with the feature's name.
      value: the column with the value.
      time: the column with the time.
      delimiter: one or two characters.
      header: whether the first line holds the columns' names.
      features: vocabulary to read against.
      indicator: ignore values.

    Raises:
      DataError: the file cannot be read.
      ValueError: the delimiter or the columns make no sense.
    """
    layout = find_layout(
        path,
        Chosen(user, item, value, time),
        delimiter=delimiter,
        header=header,
        indicator=indicator,
    )
    with open_data(path) as stream:
        blocks = pairs.pair_blocks(stream, path, layout)
        return assemble(blocks, path, features=features, columns=layout.columns)


def read_parquet(
    path: Path,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: Column = None,
    features: Features = None,
    indicator: bool = False,
) -> SparseDataset:
    """Reads Parquet: a table as for `from_arrow`, or what `SparseDataset.save` wrote.

    >>> read("purchases.tsv").save("purchases")
    >>> read_parquet("purchases").num_rows
    3

    Args:
      path: a file; a folder, whose `.parquet` files are read in the order of their
        names, those in its folders too; or an address of either that pyarrow's file
        systems know, as `s3://bucket/purchases/`. Credentials and region come from the
        environment, as `AWS_ACCESS_KEY_ID`; `?region=` and, for a store other than
        Amazon's, `?endpoint_override=` may be added to the address.
      user: the column with the row's name.
      item: the column with the feature's name, or a list of them.
      value: the column with the value, or a list of them.
      time: the column with the time, or a list of them.
      features: vocabulary to read against; a saved data set's own by default.
      indicator: ignore values.

    Raises:
      DataError: the file cannot be read.
      ValueError: the columns make no sense.
    """
    files = parquet.parquet_files(path)
    with files[0].open() as file:
        schema = file.schema_arrow
    chosen = Chosen(user, item, value, time)
    if len(files) == 1 and parquet.is_dataset(schema):
        if chosen:
            raise ValueError(
                f"{shown(path)}: is a saved data set, so it has no columns to name"
            )
        dataset = SparseDataset.load(path)
        if indicator:
            dataset = dataset.without_values()
        return dataset if features is None else align_to(dataset, features, path)
    layout = tables.find_table_layout(
        files[0].path,
        schema,
        chosen,
        indicator=indicator,
    )
    with progress_bar(path, sum(file.size for file in files)) as bar:
        each = ((file.path, _batches(file, layout, bar)) for file in files)
        blocks = tables.table_blocks(each, layout)
        return assemble(blocks, path, features=features, columns=layout.source)


def from_arrow(
    table: Any,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    time: Column = None,
    features: Features = None,
    indicator: bool = False,
) -> SparseDataset:
    """Takes a table in memory: of polars, pandas, pyarrow, DuckDB or the like.

    Anything with Arrow's PyCapsule interface (`__arrow_c_stream__`) will do. A row of
    the table is a pair of user and item, perhaps with a value, or a user with a list of
    items, perhaps with lists of values and times, or one time for all. Columns are given
    by number, from 0, or by name, or known by their names; if there is no known name for
    the items, they are the only column of lists of text or integers.

    A null in place of a list is a row without entries; other nulls are errors, except
    where there is no value at all.

    >>> frame = pandas.DataFrame({"user": ["ann", "ann"], "item": ["tea", "rye"]})
    >>> from_arrow(frame).matrix.indptr.tolist()
    [0, 2]

    Args:
      table: the table.
      user: the column with the row's name.
      item: the column with the feature's name, or a list of them.
      value: the column with the value, or a list of them.
      time: the column with the time, or a list of them.
      features: vocabulary to read against.
      indicator: ignore values.

    Raises:
      DataError: a row is wrong, or a column has the wrong type.
      TypeError: `table` is no such table.
      ValueError: the columns make no sense.
    """
    if not hasattr(table, "__arrow_c_stream__"):
        raise TypeError(
            "expected a table with Arrow's PyCapsule interface, as of polars, pandas or "
            f"pyarrow, got {type(table).__name__}"
        )
    path = "the table"
    try:
        batches = pa.RecordBatchReader.from_stream(table)
        layout = tables.find_table_layout(
            path,
            batches.schema,
            Chosen(user, item, value, time),
            indicator=indicator,
        )
        blocks = tables.table_blocks([(path, batches)], layout)
        return assemble(blocks, path, features=features, columns=layout.source)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError.at(path, f"cannot be read: {error}") from error


def _batches(
    source: parquet.ParquetPath, layout: tables.TableLayout, bar: tqdm
) -> Iterator[pa.RecordBatch]:
    """The columns of the layout, some rows at a time."""
    with source.open() as file:
        tables.check_layout(source.path, file.schema_arrow, layout)
        rows = max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(tables.BATCH_ROWS, columns=layout.columns):
            yield batch
            bar.update(source.size * len(batch) / rows)
