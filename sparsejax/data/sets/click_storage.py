"""The Parquet format of a saved data set of clicks.

A row of the table is an example. Its columns are `label`, or `label/NAME` for each of several
labels, `dense/NAME` and `ids/NAME` (int32, or a list of int32; uint64 for a `KeyColumn`).
Optional columns are `time`, `weight` (or `weight/NAME` for each label) and `propensity`. In
addition there are columns with the vocabularies, `vocabulary/NAME`. Shorter columns end in
nulls, which take no space. The schema's metadata is a JSON object with the `ClickSchema`, the
number of examples, the sizes of the vocabularies, and a checksum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax import codec
from sparsejax.data.files import arrow, stored
from sparsejax.data.files.names import Names, as_names, to_arrow
from sparsejax.data.files.opening import DataError, Path
from sparsejax.data.files.stored import id_lists
from sparsejax.data.sets.click_schema import (
    ClickSchema,
    KeyColumn,
    num_ids,
    unweighted,
    vocabularies_of,
    without_propensity,
)
from sparsejax.sparse import CSR

_VERSION = 1
# Parts of a data set that are optional.
BESIDE = ("times", "weights", "propensities")
_TIME, _PROPENSITY = "time", "propensity"
# Number of rows in a row group. A row group can be read without the others.
_GROUP_ROWS = 2**18

Ids = np.ndarray | CSR


class ClickParts(NamedTuple):
    """The arrays, schema and vocabularies of a `ClickDataset`."""

    labels: np.ndarray
    dense: np.ndarray
    ids: Mapping[str, Ids]
    schema: ClickSchema
    vocabularies: Mapping[str, Names]
    times: np.ndarray | None = None
    weights: np.ndarray | None = None
    propensities: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Facts:
    """Metadata of a saved file, stored as JSON with a version.

    Attributes:
      schema: types of the columns; in JSON the document of the schema.
      rows: number of examples.
      vocabularies: number of categories in each vocabulary, by name.
      crc32: CRC-32 checksum of the whole content.
    """

    schema: Any
    rows: int
    vocabularies: Mapping[str, int]
    crc32: int


def write_clicks(path: Path, parts: ClickParts) -> None:
    """Writes a data set to a file, whole or not at all.

    Raises:
      OSError: the file cannot be written.
    """
    if parts.propensities is None:
        parts = parts._replace(schema=without_propensity(parts.schema))
    if parts.weights is None and _weight_columns(parts.schema):
        parts = parts._replace(schema=unweighted(parts.schema), propensities=None)
    columns = _apart(_label_columns(parts.schema), parts.labels)
    if parts.times is not None:
        columns[_TIME] = pa.array(parts.times)
    if parts.propensities is not None:
        columns[_PROPENSITY] = pa.array(parts.propensities)
    if parts.weights is not None:
        columns |= _apart(_weight_columns(parts.schema), parts.weights)
    for i, name in enumerate(parts.schema.dense):
        columns[f"dense/{name}"] = pa.array(np.ascontiguousarray(parts.dense[:, i]))
    for name, ids in parts.ids.items():
        columns[f"ids/{name}"] = (
            pa.ListArray.from_arrays(pa.array(ids.indptr), pa.array(ids.indices))
            if isinstance(ids, CSR)
            else pa.array(ids)
        )
    for name, names in parts.vocabularies.items():
        columns[f"vocabulary/{name}"] = to_arrow(names)
    facts = Facts(
        schema=parts.schema.to_json(),
        rows=len(parts.labels),
        vocabularies={name: len(v) for name, v in parts.vocabularies.items()},
        crc32=_checksum(parts),
    )
    text = codec.text({"version": _VERSION, **codec.document(facts)})
    stored.write(
        path, stored.CLICKS, columns, text.encode(), {}, group_rows=_GROUP_ROWS
    )


def read_saved(path: Path) -> ClickParts:
    """Reads a file that `write_clicks` wrote.

    Raises:
      DataError: the file is missing, has another format, or is damaged.
    """
    with stored.one_file(path).open() as file:
        facts = facts_of(path, file.schema_arrow)
        table = file.read()
    try:
        vocabularies = {
            name: _names_of(name, size, table[_vocabulary(name)])
            for name, size in facts.vocabularies.items()
        }
        columns = {
            name: table[name].slice(0, facts.rows).combine_chunks()
            for name in stored_columns(facts.schema)
        }
        parts = stored_examples(columns, facts.schema, vocabularies)
        if _TIME in table.column_names:
            times = table[_TIME].slice(0, facts.rows).combine_chunks().to_numpy()
            parts = parts._replace(times=times)
        if len(parts.labels) != facts.rows:
            raise ValueError(f"{len(parts.labels):,} examples, not {facts.rows:,}")
    except (ValueError, KeyError, pa.ArrowException) as error:
        raise DataError.at(path, f"is damaged: {error}") from error
    if _checksum(parts) != facts.crc32:
        raise DataError.at(path, "is damaged: its checksum does not fit its content")
    return parts


def facts_of(path: Path, schema: pa.Schema) -> Facts:
    """Reads and checks the metadata in the schema of a saved file.

    Raises:
      DataError: the file was not written by `write_clicks`, or by another version of it.
    """
    stored.CLICKS.check(path, schema)
    try:
        facts = codec.parse(stored.CLICKS.stated(schema))
        facts = codec.without_version(facts, _VERSION, "its metadata")
        read = codec.read(Facts, facts, "its metadata")
        click_schema = ClickSchema.from_json(read.schema)
        _check_facts(read, click_schema, schema)
    except ValueError as error:
        raise DataError.at(path, str(error)) from error
    return dataclasses.replace(read, schema=click_schema)


def _check_facts(stated: Facts, clicks: ClickSchema, schema: pa.Schema) -> None:
    """Raises ValueError if a file's metadata, schema and columns contradict each other."""
    if not 0 <= stated.rows < 2**63 or not 0 <= stated.crc32 < 2**32:
        raise ValueError('its metadata: "rows" or "crc32" is wrong')
    numbered = vocabularies_of(clicks).keys()
    if numbered != stated.vocabularies.keys():
        raise ValueError('its metadata: "vocabularies" are not those of its "schema"')
    for name, size in stated.vocabularies.items():
        if not 0 <= size < 2**31:
            raise ValueError(f'its metadata: "vocabularies.{name}" is {size}')
    types = {field.name: field.type for field in schema}
    keys = {f"ids/{n}" for n, c in clicks.ids.items() if isinstance(c, KeyColumn)}
    for name in [*stored_columns(clicks), *map(_vocabulary, numbered)]:
        found, kind = types.get(name), name.partition("/")[0]
        if kind == "ids" and found is not None and pa.types.is_list(found):
            found = found.value_type
        is_right = {
            "label": pa.types.is_floating,
            "weight": pa.types.is_floating,
            _PROPENSITY: pa.types.is_floating,
            "dense": pa.types.is_floating,
            "ids": pa.types.is_uint64 if name in keys else pa.types.is_int32,
            "vocabulary": lambda type_: arrow.is_text(pa.nulls(0, type_)),
        }[kind]
        if found is None or not is_right(found):
            raise ValueError(f"is damaged: its column {name!r} is {found}")


def _vocabulary(name: str) -> str:
    """The name of the column that contains the categories of a feature."""
    return f"vocabulary/{name}"


def _names_of(name: str, size: int, column: pa.ChunkedArray) -> Names:
    """Reads the categories of a feature. In a file, nulls pad their column to all rows."""
    found = column.slice(0, size)
    if len(found) != size or found.null_count:
        raise ValueError(f"{_vocabulary(name)} does not have the {size:,} names stated")
    return as_names(found)


def stored_columns(schema: ClickSchema) -> list[str]:
    """The names of the columns with examples, without the vocabularies."""
    targets = [*_label_columns(schema), *_weight_columns(schema)]
    targets += [] if schema.propensity is None else [_PROPENSITY]
    dense = [f"dense/{name}" for name in schema.dense]
    return [*targets, *dense, *[f"ids/{name}" for name in schema.ids]]


def _label_columns(schema: ClickSchema) -> list[str]:
    return [f"label/{name}" for name in schema.several] or ["label"]


def _weight_columns(schema: ClickSchema) -> list[str]:
    if schema.label_weights:
        return [f"weight/{name}" for name in schema.several]
    return [] if schema.weight is None else ["weight"]


def _apart(names: list[str], array: np.ndarray) -> dict[str, pa.Array]:
    """Splits an array `[n]`, or `[n, columns]`, into Arrow arrays by column name."""
    parts = [array] if array.ndim == 1 else np.ascontiguousarray(array.T)
    return {name: pa.array(part) for name, part in zip(names, parts, strict=True)}


def stored_vocabularies(
    path: Path, file: pq.ParquetFile, facts: Facts
) -> dict[str, Names]:
    """Reads the vocabularies of a file, by column.

    Raises:
      DataError: the file does not have the categories or examples that its metadata states.
    """
    found = {}
    try:
        for name, size in facts.vocabularies.items():
            column = file.read(columns=[_vocabulary(name)]).column(0)
            found[name] = _names_of(name, size, column)
        if file.metadata.num_rows < facts.rows:
            raise ValueError(f"{file.metadata.num_rows:,} examples, not {facts.rows:,}")
    except ValueError as error:
        raise DataError.at(path, f"is damaged: {error}") from error
    return found


def stored_examples(
    columns: Mapping[str, pa.Array],
    schema: ClickSchema,
    vocabularies: Mapping[str, Names],
) -> ClickParts:
    """Builds examples from a file's columns. After the last example, labels are null."""
    names = _label_columns(schema)
    rows = len(columns[names[0]]) - columns[names[0]].null_count

    def numbers(name: str) -> np.ndarray:
        return columns[name].slice(0, rows).to_numpy()

    ids: dict[str, Ids] = {}
    for name, size in num_ids(schema, vocabularies).items():
        column = columns[f"ids/{name}"].slice(0, rows)
        if not pa.types.is_list(column.type):
            ids[name] = column.to_numpy()
            continue
        indptr = np.append(0, np.cumsum(column.value_lengths().to_numpy()))
        ids[name] = id_lists(column.flatten().to_numpy(), indptr, size)
    dense = [numbers(f"dense/{name}") for name in schema.dense]
    empty = np.empty((rows, 0), np.float32)

    def joined(names: list[str], single: bool) -> np.ndarray:
        return numbers(names[0]) if single else np.stack([*map(numbers, names)], axis=1)

    labels, weights = joined(names, not schema.several), None
    if by := _weight_columns(schema):
        weights = joined(by, not schema.label_weights)
    seen = None if schema.propensity is None else numbers(_PROPENSITY)
    dense = np.stack(dense, axis=1) if dense else empty
    return ClickParts(labels, dense, ids, schema, vocabularies, None, weights, seen)


def _checksum(parts: ClickParts) -> int:
    leaves = [parts.labels.tobytes(), parts.dense.tobytes()]
    beside = (getattr(parts, name) for name in BESIDE)
    leaves += [array.tobytes() for array in beside if array is not None]
    for ids in parts.ids.values():
        arrays = (ids.indptr, ids.indices) if isinstance(ids, CSR) else (ids,)
        leaves += [np.asarray(array).tobytes() for array in arrays]
    leaves += map(stored.names_as_bytes, parts.vocabularies.values())
    return stored.checksum(leaves)
