"""Converts tables and dicts in memory, without labels, to the inputs of a click model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sparsejax.data.events.block import Cells
from sparsejax.data.files import arrow
from sparsejax.data.files.names import Names
from sparsejax.data.files.opening import DataError
from sparsejax.data.files.stored import id_lists
from sparsejax.data.sets.click_columns import (
    ColumnReader,
    dense_of,
    warn_of_lists,
    with_fixed,
)
from sparsejax.data.sets.click_schema import RARE, ClickSchema, num_ids
from sparsejax.data.sets.click_storage import Ids
from sparsejax.sparse import CSR
from sparsejax.wide_ids import WideIds

# Text that replaces a file's path in messages.
_RECORDS = "records"


def examples_of(
    records: pa.Table
    | pa.RecordBatch
    | Mapping[str, Any]
    | Sequence[Mapping[str, Any]],
    schema: ClickSchema,
    vocabularies: Mapping[str, Names],
    reader: ColumnReader | None = None,
) -> tuple[np.ndarray, dict[str, Ids]]:
    """Converts records to numbers and ids, by the rules of `read_clicks`.

    Args:
      records: columns by name: arrays, lists, or a table; or a list with a dict for each
        example. Labels are not needed. None and NaN are missing values.
      schema: types of the columns.
      vocabularies: categories of the training data; other categories get the id of
        rare ones.
      reader: reader of these columns, to reuse it over many calls; by default a new one.

    Returns:
      Dense columns `[n, d]` float32, and the ids of each feature as in a `ClickDataset`.

    Raises:
      DataError: a column has a value that its type does not allow.
      ValueError: a column is missing, or columns have different lengths.
      TypeError: the records are neither columns nor a list of dicts.
    """
    asked = [name for name in schema.inputs if name not in schema.fixed]
    block = with_fixed(cells_of(records, asked), schema)
    if reader is None:
        reader = ColumnReader(schema, vocabularies)
    sizes, ids, unknown = num_ids(schema, vocabularies), {}, False
    found = reader.categories(block)
    for name, (flat, lengths) in reader.numbered(found).items():
        unknown |= bool((flat == RARE).any())
        if lengths is not None:
            flat = id_lists(flat, np.append(0, np.cumsum(lengths)), sizes[name])
        ids[name] = flat
    if unknown:  # the check takes time, which a service need not spend otherwise
        warn_of_lists(found, schema, vocabularies)
    return dense_of(block, schema.dense), ids


def cells_of(records: Any, names: Sequence[str]) -> Cells:
    """The cells of the named columns of records; see `examples_of`."""
    if isinstance(records, list | tuple):
        records = record_columns(records)
    elif not isinstance(records, pa.Table | pa.RecordBatch | Mapping) and hasattr(
        records, "__arrow_c_stream__"
    ):
        records = pa.table(records)
    if isinstance(records, pa.Table | pa.RecordBatch):
        known = records.column_names
    elif isinstance(records, Mapping):
        known = list(records)
    else:
        raise TypeError(
            "records are a table, a dict of lists or arrays, or a list of dicts; got "
            f"{type(records).__name__}"
        )
    if missing := [name for name in names if name not in known]:
        raise ValueError(
            f"the records lack the columns {missing}; they have {list(known)}"
        )
    columns = {name: _array(name, records[name]) for name in names}
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"columns of the records differ in their lengths: {sizes}")

    def error(row: int, message: str) -> DataError:
        return DataError.at(_RECORDS, f"row {row:,}: {message}")

    return Cells(columns, error, _RECORDS)


def check_lengths(ids: Mapping[str, Ids | WideIds], history: str, beside: str) -> None:
    """Raises ValueError if both features have lists, and their lengths differ in an example."""
    lengths = []
    for x in (ids.get(history), ids.get(beside)):
        if isinstance(x, CSR):
            lengths.append(np.diff(x.indptr))
        elif isinstance(x, np.ndarray) and x.ndim == 1:
            lengths.append(np.ones(len(x)))
    if len(lengths) == 2 and (wrong := lengths[0] != lengths[1]).any():
        row = int(wrong.argmax())
        raise ValueError(
            f"example {row:,}: {lengths[0][row]:.0f} ids in {history!r}, but "
            f"{lengths[1][row]:.0f} in {beside!r}, which is beside it: give each id one"
        )


def table_of(columns: Mapping[str, Any]) -> pa.Table:
    """Makes a table of columns by name: arrays, lists, or arrays of Arrow.

    Raises:
      DataError: Arrow cannot convert a column, or columns have different lengths.
    """
    found = {str(name): _array(str(name), each) for name, each in columns.items()}
    sizes = {name: len(column) for name, column in found.items()}
    if len(set(sizes.values())) > 1:
        raise DataError.at(_RECORDS, f"columns differ in their lengths: {sizes}")
    return pa.table(found)


def record_columns(records: Sequence[Any]) -> dict[str, list[Any]]:
    """Converts a list with a dict for each example to columns; a missing key becomes None.

    Raises:
      TypeError: an element is no dict.
    """
    for record in records:
        if not isinstance(record, Mapping):
            raise TypeError(
                f"records are dicts, one an example; got {type(record).__name__} among them"
            )
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def _array(name: str, values: Any) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return arrow.one(values)
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, str | bytes):  # Arrow would take each character as a row
        raise TypeError(
            f"records: column {name!r}: expected a list of cells, one for each row, got the "
            f"text {values!r:.80}"
        )
    try:
        try:
            found = pa.array(values, from_pandas=True)
        # Arrow converts integers beyond int64 only if the type is given.
        except OverflowError:
            found = pa.array(values, pa.uint64())
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
        problem = " ".join(str(error).split())
        raise DataError.at(_RECORDS, f"column {name!r}: {problem}") from error
    assert isinstance(found, pa.Array)
    return found
