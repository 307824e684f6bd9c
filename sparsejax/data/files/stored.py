"""The saved form of data sets: one Parquet file with a kind and a checksum.

The metadata of the file's schema has a key for the kind of the data, whose value is the version
of the form or a document. Columns have different lengths: shorter ones end in nulls, which take
no space. The checksum covers the whole content. `click_storage` describes the columns of clicks,
and `item_features` those of features of items.

`SparseDataset.save` writes this form. Row `i` of the table holds the `i`-th row of the
data set and, independently of it, the name of the `i`-th feature::

    row     indices  values       feature
    ann     [0, 2]   [1.0, 5.0]   milk
    bob     []       []           tea
    null    null     null         wine

An indicator data set has no `values` (list<float32>). A data set with times has `times`
(list<int64>, list<double> or list<timestamp[us]>) and `order` (list<int64>), and also
`first_times` if an entry has several events. If entries were left out, `left_out` (int32) has
their number for each row.

`SequenceDataset.save` writes this form with another key for the kind. There, indices are the
items in the order of time, and `values` and `order` are absent. `weights` (list<float32>) exist
if entries count differently as targets. Columns of events are `events/NAME`: lists of float32,
of int32, or of lists of int32 with equal lengths. Their categories are `categories/NAME`, and the
metadata has their schema. Columns of users are `users/NAME`, a number or a list for each row, with
the categories `categories/users/NAME`. A file with weights or any of these columns has version 2.
So an earlier release, which would ignore them, refuses it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparsejax.data.files import arrow, parquet
from sparsejax.data.files.entries import Entries
from sparsejax.data.files.names import Names, as_names, to_arrow
from sparsejax.data.files.opening import DataError, Path
from sparsejax.sparse import CSR, as_int32

VERSION = 1
# Version of files with histories that have weights or event columns.
_VERSION_OF_EVENTS = 2
_EVENTS_KEY = b"sparsejax.events"
EVENTS, USERS = "events/", "users/"
_CATEGORIES = "categories/"

# Number of rows in a row group, about 30 MB. A row group can be read without the others.
_GROUP_ROWS = 2**16
_CHECKSUM_KEY = b"sparsejax.dataset.crc32"

_COLUMNS = {
    "row": pa.large_string(),
    "indices": pa.list_(pa.int32()),
    "values": pa.list_(pa.float32()),
    "times": pa.list_(pa.int64()),  # or a list of another type in `_TIMES`
    "order": pa.list_(pa.int64()),
    "first_times": pa.list_(pa.int64()),  # or another type, as `times`
    "weights": pa.list_(pa.float32()),
    "left_out": pa.int32(),
    "feature": pa.large_string(),
}
_LISTS = pa.list_(pa.large_list(pa.int32()))  # type of a column of events with lists
_TIMES = (pa.int64(), pa.float64(), pa.timestamp("us"))


# Columns of entries, in their order in a file.
_ENTRIES = ("indices", "values", "times", "order", "first_times")


@dataclasses.dataclass(frozen=True)
class Form:
    """The saved form of one kind of data set.

    Attributes:
      key: key in the metadata of the schema, for the version or a document.
      has_rows: whether a file has rows of items.
      ordered: whether the items of a row are in the order of time.
      other: error text for a reader of this form that finds a file of another form.
      instead: advice for a reader of another form that finds a file of this form.
    """

    key: bytes
    has_rows: bool = False
    ordered: bool = False
    other: str = ""
    instead: str = ""

    def stated(self, schema: pa.Schema) -> bytes:
        """The value of the key in a schema's metadata: a version, or a document."""
        return (schema.metadata or {}).get(self.key, b"")

    def check(self, path: Path, schema: pa.Schema) -> None:
        """Raises DataError unless a file with this schema has this form."""
        if (found := form_of(schema)) is not self:
            instead = "" if found is None else found.instead
            raise DataError.at(path, self.other or instead or _not_saved(schema))


ITEMS = Form(b"sparsejax.dataset.version", has_rows=True)
HISTORIES = Form(
    b"sparsejax.sequences.version",
    has_rows=True,
    ordered=True,
    other="holds no saved sequences; read other files with read_sequences, and save "
    "them with SequenceDataset.save",
    instead="holds saved sequences: read it with read_sequences, or scan it with "
    "scan_sequences; to_sparse() makes a SparseDataset of them",
)
CLICKS = Form(
    b"sparsejax.clicks",
    other="is not a saved data set of clicks; for other tables, give their ClickSchema to "
    "read_clicks or scan_clicks",
)
ITEM_FEATURES = Form(
    b"sparsejax.item_features",
    other="holds no saved features of items; read other files with read_item_features",
)


class StoredRows(NamedTuple):
    """The content of a saved data set of items or histories.

    Attributes:
      entries: rows of entries. Names of columns of events begin with `EVENTS`; names of
        columns of users, which are among the columns of rows, begin with `USERS`.
      row_names: names of the rows.
      feature_names: names of the features.
      facts: JSON document about the columns of events and users; empty if there are none.
      categories: categories of these columns, by name; for users after the prefix `USERS`.
    """

    entries: Entries
    row_names: Names
    feature_names: Names
    facts: str = ""
    categories: Mapping[str, Names] = MappingProxyType({})

    @property
    def version(self) -> int:
        """The version of the form that a file with this content needs."""
        has_more = self.facts or "weights" in self.entries.columns
        return _VERSION_OF_EVENTS if has_more else VERSION


def form_of(schema: pa.Schema) -> Form | None:
    """The form of a file with this schema; None if the file is no saved data set."""
    metadata = schema.metadata or {}
    forms = ITEMS, HISTORIES, CLICKS, ITEM_FEATURES
    return next((form for form in forms if form.key in metadata), None)


def write(
    path: Path,
    form: Form,
    columns: Mapping[str, pa.Array],
    facts: bytes,
    metadata: Mapping[bytes, bytes],
    *,
    group_rows: int,
) -> None:
    """Writes a data set to a file, whole or not at all.

    Args:
      path: path of the file.
      form: kind of data set to write.
      columns: arrays by name, of any lengths.
      facts: value for the form's key in the metadata.
      metadata: further metadata.
      group_rows: number of rows of a row group.

    Raises:
      OSError: the file cannot be written.
    """
    length = max(map(len, columns.values()))
    table = pa.table(
        {
            name: pa.chunked_array([c, pa.nulls(length - len(c), c.type)])
            for name, c in columns.items()
        }
    )
    table = table.replace_schema_metadata({form.key: facts, **metadata})
    parquet.write_whole(path, table, group_rows=group_rows)


def one_file(path: Path) -> parquet.ParquetPath:
    """The Parquet file at a path.

    Raises:
      DataError: the file does not exist, or the path is a folder.
    """
    [source, *others] = parquet.parquet_files(path)
    if others or source.path != path:
        raise DataError.at(path, "is a directory; expected a file")
    return source


def checksum(leaves: Sequence[bytes]) -> int:
    """The CRC-32 checksum of a file's parts and of their lengths."""
    found = zlib.crc32(repr([len(leaf) for leaf in leaves]).encode())
    for leaf in leaves:
        found = zlib.crc32(leaf, found)
    return found


def names_as_bytes(names: Names) -> bytes:
    """The names as bytes, for a checksum."""
    return "\0".join(names.tolist()).encode()


def id_lists(flat: np.ndarray, indptr: np.ndarray, size: int) -> CSR:
    """A CSR whose rows are lists of ids, `[examples]`, in their given order.

    Args:
      flat: `[entries]` int32 ids.
      indptr: `[examples + 1]` offsets of the lists.
      size: number of different ids.
    """
    # The constructor is not called, because it requires that a row's columns ascend.
    return CSR.tree_unflatten(size, (None, flat, as_int32("indptr", indptr), None))


def write_rows(path: Path, form: Form, rows: StoredRows) -> None:
    """Writes a data set of items or histories to a file, whole or not at all.

    Raises:
      OSError: the file cannot be written.
    """
    entries = rows.entries
    ends = arrow.from_numbers(as_int32("indptr", entries.indptr))
    columns = {"row": to_arrow(rows.row_names)}
    further = [name for name in entries.columns if name.startswith(EVENTS)]
    for name in [*_ENTRIES, "weights", *further]:
        if name in entries.columns:
            leaf = entries.columns[name]
            columns[name] = pa.ListArray.from_arrays(ends, to_lists(leaf))
    columns |= {name: to_lists(leaf) for name, leaf in entries.of_rows.items()}
    columns["feature"] = to_arrow(rows.feature_names)
    for name, names in rows.categories.items():
        columns[f"{_CATEGORIES}{name}"] = to_arrow(names)
    metadata = {_CHECKSUM_KEY: _checksum(rows)}
    if rows.facts:
        metadata[_EVENTS_KEY] = rows.facts.encode()
    facts = str(rows.version).encode()
    write(path, form, columns, facts, metadata, group_rows=_GROUP_ROWS)


def to_lists(leaf: np.ndarray) -> pa.Array:
    """Converts an array to Arrow: numbers, or lists with the rows of a matrix."""
    flat = arrow.from_numbers(leaf.reshape(-1))
    if leaf.ndim < 2:
        return flat
    each = np.arange(len(leaf) + 1, dtype=np.int64) * leaf.shape[1]
    return pa.LargeListArray.from_arrays(arrow.from_numbers(each), flat)


def read_rows(path: Path, form: Form, *, events: bool = False) -> StoredRows:
    """Reads a file that `write_rows` wrote in this form.

    Args:
      path: path of the file.
      form: form that the file must have.
      events: whether the caller can use weights and columns of events. Otherwise a file
        with any of them is an error.

    Raises:
      DataError: the file is missing, has another form, or is damaged.
    """
    with one_file(path).open() as file:
        check_schema(path, file.schema_arrow, form, events=events)
        rows = _read_table(path, file)
        try:
            # Parquet has checksums for the content of pages, but none for their offsets.
            if file.schema_arrow.metadata.get(_CHECKSUM_KEY) == _checksum(rows):
                return rows
            if not form.ordered:
                rows.entries.csr(len(rows.feature_names))  # raises a more precise error
        except ValueError as error:
            raise DataError.at(path, f"is damaged: {error}") from error
        raise DataError.at(path, "is damaged: its checksum does not fit its content")


def _checksum(rows: StoredRows) -> bytes:
    entries = rows.entries
    arrays = {**entries.columns, **entries.of_rows}
    arrays["indptr"] = as_int32("indptr", entries.indptr)
    names = ["indptr", "indices", "values", "left_out", "times", "order"]
    names += ["first_times"] * ("first_times" in arrays)
    leaves = [names_as_bytes(each) for each in (rows.row_names, rows.feature_names)]
    leaves += [arrays[n].tobytes() if n in arrays else b"" for n in names]
    if rows.version == _VERSION_OF_EVENTS:
        further = [n for n in arrays if n.startswith((EVENTS, USERS))]
        leaves += [arrays[n].tobytes() for n in sorted(further)]
        leaves += [arrays["weights"].tobytes()] if "weights" in arrays else []
        leaves += [names_as_bytes(rows.categories[n]) for n in sorted(rows.categories)]
        leaves.append(rows.facts.encode())
    return f"{checksum(leaves):08x}".encode()


def check_schema(
    path: Path, schema: pa.Schema, form: Form, *, events: bool = False
) -> None:
    """Raises DataError unless `write_rows` made a file with this schema in this form.

    `read_rows` describes the arguments.
    """
    form.check(path, schema)
    if not {"row", "indices", "feature"} <= set(schema.names):
        raise DataError.at(path, _not_saved(schema))
    version = form.stated(schema).decode(errors="replace")
    if version == str(_VERSION_OF_EVENTS) and form.ordered:
        if events:
            return
        raise DataError.at(
            path,
            "has weights, or columns of events or users, which are not read here; save it "
            "without them: dataclasses.replace(data, weights=None, events=None, "
            "users=None).save(PATH)",
        )
    if version != str(VERSION):
        raise DataError.at(
            path,
            f"is a saved data set of version {version}, but this release reads version "
            f"{VERSION}; install a newer release",
        )


def facts_in(schema: pa.Schema) -> str:
    """The JSON document about the columns of events and users; empty if there are none."""
    found = (schema.metadata or {}).get(_EVENTS_KEY, b"")
    return found.decode(errors="replace")  # invalid UTF-8 fails the checksum later


def categories_in(file: pq.ParquetFile) -> dict[str, Names]:
    """The categories of columns of events and users, by name; for users after `USERS`."""
    names = [n for n in file.schema_arrow.names if n.startswith(_CATEGORIES)]
    return {
        n.removeprefix(_CATEGORIES): as_names(file.read([n]).column(0).drop_null())
        for n in names
    }


def _not_saved(schema: pa.Schema) -> str:
    """The error text for a Parquet file that is no saved data set."""
    return (
        "is Parquet, but not a saved data set: expected the columns row, indices, "
        f"values (optional) and feature, got {', '.join(schema.names)}; "
        "make one with SparseDataset.save"
    )


def _read_table(path: Path, file: pq.ParquetFile) -> StoredRows:
    types = types_in(path, file.schema_arrow)
    found: dict[str, list[pa.Array]] = {name: [] for name in types}
    lengths = [np.empty(0, np.int64)]
    for batch in file.iter_batches(columns=list(types)):
        columns = {
            name: batch.column(name).cast(type_).drop_null()
            for name, type_ in types.items()
        }
        lengths.append(arrow.numbers(columns["indices"].value_lengths()))
        for name, column in columns.items():
            of_rows = name != "feature" and not name.startswith(_CATEGORIES)
            if of_rows and len(column) != len(columns["row"]):
                raise _disagree(path, types)
            if pa.types.is_list(column.type):
                if not np.array_equal(
                    arrow.numbers(column.value_lengths()), lengths[-1]
                ):
                    raise _disagree(path, types)
                column = column.flatten()
            found[name].append(column)
    named = [n for n in found if n.startswith(_CATEGORIES)]
    row_names, feature_names, *categories = (
        as_names(pa.chunked_array(found.pop(name), types[name]))
        for name in ("row", "feature", *named)
    )
    leaves = {
        name: column_of(path, name, types[name], parts) for name, parts in found.items()
    }
    names = [n for n in leaves if n == "left_out" or n.startswith(USERS)]
    of_rows = {name: leaves.pop(name) for name in names}
    entries = Entries.of_lengths(np.concatenate(lengths), leaves, of_rows)
    facts = facts_in(file.schema_arrow)
    names = [name.removeprefix(_CATEGORIES) for name in named]
    return StoredRows(
        entries,
        row_names,
        feature_names,
        facts,
        dict(zip(names, categories, strict=True)),
    )


def column_of(
    path: Path, name: str, type_: pa.DataType, parts: Iterable[pa.Array]
) -> np.ndarray:
    """Joins the batches of a column: numbers, or lists of equal lengths as a matrix."""
    if type_ not in (_LISTS, _LISTS.value_type):
        return np.concatenate([_empty(type_), *map(arrow.numbers, parts)])
    sizes = np.concatenate(
        [np.empty(0, np.int64), *(arrow.numbers(p.value_lengths()) for p in parts)]
    )
    if (sizes != sizes[:1]).any():
        raise DataError.at(
            path, f"is damaged: lists of {name!r} differ in their length"
        )
    flat = [arrow.numbers(part.flatten()) for part in parts]
    flat = np.concatenate([np.empty(0, np.int32), *flat])
    return flat.reshape(len(sizes), int(sizes[0]) if len(sizes) else 1)


def types_in(path: Path, schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns to read from a saved data set, each with its Arrow type."""
    types = {name: type_ for name, type_ in _COLUMNS.items() if name in schema.names}
    for name in types.keys() & {"times", "first_times"}:
        found = schema.field(name).type
        inner = getattr(found, "value_type", found)
        if inner not in _TIMES:
            raise DataError.at(path, f"is damaged: {name} are {found}")
        types[name] = pa.list_(inner)
    for field in schema:
        if field.name.startswith(_CATEGORIES):
            types[field.name] = pa.large_string()
        elif field.name.startswith((EVENTS, USERS)):
            known_types = pa.list_(pa.float32()), pa.list_(pa.int32()), _LISTS
            if field.name.startswith(USERS):
                known_types = tuple(each.value_type for each in known_types)
            same = [t for t in known_types if t.equals(field.type)]
            if not same:
                raise DataError.at(path, f"is damaged: {field.name} are {field.type}")
            types[field.name] = same[0]
    return types


def _empty(type_: pa.DataType) -> np.ndarray:
    """An empty array with the dtype that a column of entries has."""
    inner = type_.value_type if pa.types.is_list(type_) else type_
    return arrow.numbers(pa.nulls(0, inner))


def _disagree(path: Path, types: Iterable[str]) -> DataError:
    columns = [name for name in types if name != "feature"]
    return DataError.at(
        path, f"is damaged: {', '.join(columns[:-1])} and {columns[-1]} do not agree"
    )
