"""Finds the current files of Delta Lake and Apache Iceberg tables; refuses Hudi and Paimon.

The folder of such a table also has the files of earlier versions, and a log that lists the
current ones. If all files were read as plain Parquet, deleted rows would come back, and
rewritten rows would count twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import urllib.parse
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.types as pt

from sparsejax.callers import needing
from sparsejax.data.files import stores
from sparsejax.data.files.opening import DataError
from sparsejax.data.files.stores import Place

_SPARK = "write its rows as plain Parquet by Spark, and give that folder"
# For each format, a pattern of relative paths in its folders. The first format that matches is
# used.
_FORMATS = {
    "Delta": r"_delta_log(/.*)?",
    "Iceberg": r"metadata/[^/]+\.metadata\.json",
    "Hudi": r"\.hoodie(_partition_metadata|/.*)?",
    "Paimon": r"snapshot/(LATEST|snapshot-[0-9]+)",
}
# For each format, a glob pattern of relative paths, with which a cluster finds its folders.
PATTERNS = {
    "Delta": "_delta_log",
    "Iceberg": "metadata/*.metadata.json",
    "Hudi": ".hoodie",
    "Paimon": "snapshot/snapshot-*",
}
_MARKS = "|".join(f"(?P<{kind}>{mark})" for kind, mark in _FORMATS.items())
_TABLE = re.compile(f"(?:(?P<folder>.*?)/)?(?:{_MARKS})")
_ID = b"PARQUET:field_id"  # key of a column's field ID in the schema of a file
# Features of Delta's reader that the files of a table may use without support here. Deletion
# vectors concern only some files, so each file is checked.
_DELTA_FEATURES = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
_VECTORS = "deletionVectors"


@dataclasses.dataclass(frozen=True)
class TableColumns:
    """The columns of a table, and how one of its files stores them.

    Attributes:
      schema: columns of the table.
      cells: values of columns that are in the log and are equal for all rows of the file.
      numbers: field ID of each column, which identifies it in a file; None if columns are
        identified by name.
      known: field IDs by the name of the column, for files that were written without IDs.
    """

    schema: pa.Schema
    cells: Mapping[str, pa.Scalar]
    numbers: Mapping[str, int] | None = None
    known: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def stored(self, own: pa.Schema, names: Iterable[str]) -> dict[str, str]:
        """The stored names of columns, for those columns of `names` that the file has.

        Args:
          own: schema of the file.
          names: names of columns of the table.
        """
        if self.numbers is None:
            return {n: n for n in names if n in own.names and n not in self.cells}
        numbered = {
            int(field.metadata[_ID]): field.name
            for field in own
            if field.metadata and _ID in field.metadata
        }
        if not numbered:
            numbered = {self.known[n]: n for n in own.names if n in self.known}
        found = {name: numbered.get(self.numbers[name]) for name in names}
        return {name: own_name for name, own_name in found.items() if own_name}

    def shaped[Rows: (pa.Table, pa.RecordBatch)](
        self, rows: Rows, stored: Mapping[str, str], names: Collection[str]
    ) -> Rows:
        """Converts rows of the file to the columns `names` of the table, in its types.

        Args:
          rows: rows of the file.
          stored: name in `rows` of each column that the file has.
          names: names of columns of the table. A column that neither file nor log has is
            null.
        """
        columns = []
        for name in names:
            type_ = self.schema.field(name).type
            if name in stored:
                columns.append(rows.column(stored[name]).cast(type_))
            else:
                cell = self.cells.get(name, pa.scalar(None, type_))
                columns.append(_repeated(cell, rows.num_rows, type_))
        schema = pa.schema([self.schema.field(name) for name in names])
        made: Any = type(rows)  # both types have from_arrays, but no common base class
        return made.from_arrays(columns, schema=schema)

    def texts(self, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """The columns among `names` whose value is in the log: name, and value as text."""
        return tuple((n, str(self.cells[n])) for n in names if n in self.cells)


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A Parquet file of a table.

    Attributes:
      inner: path of the file in the file system of the table.
      columns: columns of the table, and how the file stores them.
    """

    inner: str
    columns: TableColumns


def format_of(place: Place, below: Collection[str]) -> str | None:
    """The format of the table in a folder, or None if the folder is no table.

    Args:
      place: location of the folder.
      below: relative paths of all files and folders in it.

    Raises:
      DataError: the folder is a part of a table, or contains a table.
    """
    tables = _tables_in(below)
    if "" in tables:
        return tables[""]
    for name, kind in sorted(tables.items()):
        raise DataError.at(
            place.path,
            f"has {name!r} in it, a table of {kind}, whose log says which files hold; name "
            "the folder of the table, or a folder without tables",
        )
    whole = place.inner.rstrip("/") if place.is_remote else os.path.abspath(place.inner)
    for inner in folders_above(whole):
        above = Place(inner, place.filesystem, inner)
        with contextlib.suppress(DataError):  # listing it may be forbidden
            names = above.names()
            for log in {"metadata", "snapshot"}.intersection(names):
                names += [f"{log}/{name}" for name in above.below(log).names()]
            if kind := _tables_in(names).get(""):
                problem = f"is a part of {inner}, a table of {kind}; name that folder"
                break
    else:
        return None
    raise DataError.at(place.path, problem)


def folders_above(path: str) -> Iterator[str]:
    """Yields those parent folders of a path that may be the folder of a table.

    Folders between such a parent and the path are called `data`, or their names contain "=".
    """
    while "/" in path and re.search("=|^data$", os.path.basename(path)):
        yield (path := os.path.dirname(path))


def _tables_in(below: Iterable[str]) -> dict[str, str]:
    """Finds tables by relative paths of their files. Returns formats by the tables' folders."""
    found: dict[str, str] = {}
    for path in below:
        if match := _TABLE.fullmatch(path):
            folder, kind = match["folder"] or "", match.lastgroup
            assert kind is not None
            # Some tools write logs of several formats for the same data files.
            found[folder] = min(kind, found.get(folder, kind), key=list(_FORMATS).index)
    return found


def files_of(place: Place, kind: str, below: Collection[str]) -> list[TableFile]:
    """The files with the rows of the table's current version, in the order of their paths.

    Args:
      place: location of the table's folder.
      kind: format of the table, as `format_of` found it.
      below: relative paths of all files and folders in it.

    Raises:
      DataError: the table has no rows, is damaged, or uses a feature that is not supported.
      ImportError: the package that reads such tables is not installed.
    """
    if kind == "Delta":
        with _read_by("deltalake", place, kind):
            files = _delta_files(place)
    elif kind == "Iceberg":
        with _read_by("pyiceberg", place, kind):
            files = _iceberg_files(place, below)
    else:
        raise DataError.at(
            place.path, f"is a table of {kind}, which is not read; {_SPARK}"
        )
    if not files:
        raise DataError.at(place.path, f"is a table of {kind} without rows")
    return sorted(files, key=lambda file: file.inner)


@contextlib.contextmanager
def _read_by(package: str, place: Place, kind: str) -> Generator[None]:
    """Converts errors of a package that reads tables to a `DataError` that names the table."""
    text = f"{place.path}: is a table of {kind}, whose log says which files hold; to read it, "
    try:
        with needing(f"{text}{package} is needed", "lake"):
            yield
    except (DataError, ImportError):
        raise
    except Exception as error:  # for a damaged log the packages raise many classes
        first = str(error).strip().partition("\n")[0]
        raise DataError.at(
            place.path, f"is a table of {kind} that {package} cannot read: {first}"
        ) from error


def _not_read(place: Place, kind: str, what: str, remedy: str) -> DataError:
    return DataError.at(
        place.path, f"is a table of {kind} with {what}, which is not read; {remedy}"
    )


def _delta_files(place: Place) -> list[TableFile]:
    import deltalake

    with contextlib.ExitStack() as stack:
        folder = place.inner
        if place.is_remote:  # deltalake's options for stores differ from pyarrow's
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            log = place.below("_delta_log")
            os.mkdir(to := os.path.join(folder, "_delta_log"))
            with stores.naming(log.path):
                pa.fs.copy_files(
                    log.inner,
                    to,
                    source_filesystem=log.filesystem,
                    destination_filesystem=pa.fs.LocalFileSystem(),
                )
        table = deltalake.DeltaTable(os.path.abspath(folder))
        schema = pa.schema(table.schema().to_arrow())
        protocol, metadata = table.protocol(), table.metadata()
        features = {*(protocol.reader_features or ())}
        mapping = metadata.configuration.get("delta.columnMapping.mode", "none")
        if mapping != "none" or "columnMapping" in features:
            raise _not_read(place, "Delta", "columns that were renamed", _SPARK)
        if _VECTORS in features and len(pa.table(table.deletion_vectors())):
            raise _not_read(
                place,
                "Delta",
                "deletion vectors",
                "rewrite the files that have them: REORG TABLE ... APPLY (PURGE)",
            )
        if unknown := features - _DELTA_FEATURES - {_VECTORS}:
            what = f"the feature {', '.join(sorted(unknown))}"
            raise _not_read(place, "Delta", what, _SPARK)
        actions = pa.table(table.get_add_actions(flatten=True))
    cells = {
        name: actions.column(f"partition.{name}").cast(schema.field(name).type)
        for name in (metadata.partition_columns if len(actions) else ())
    }
    return [
        TableFile(
            _inner(place, urllib.parse.unquote(path)),
            TableColumns(schema, {name: column[i] for name, column in cells.items()}),
        )
        for i, path in enumerate(actions.column("path").to_pylist())
    ]


def _iceberg_files(place: Place, below: Collection[str]) -> list[TableFile]:
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.table import StaticTable
    from pyiceberg.transforms import IdentityTransform

    newest = place.below(_newest_metadata(place, below))
    address, options = os.fspath(newest.path), {}
    if place.is_remote:
        options = _store_options(place)
        address = re.sub("(?<=://)[^/@]*@", "", address)
    else:
        address = os.path.abspath(newest.inner)
    table = StaticTable.from_metadata(address, options)
    fields = table.schema().fields
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    mapping = table.name_mapping()
    known = {
        name: field.field_id
        for field in (mapping.root if mapping else ())
        for name in field.names
        if field.field_id is not None
    }
    first = {
        field.name: pa.scalar(field.initial_default, schema.field(field.name).type)
        for field in fields
        if field.initial_default is not None
    }
    files = []
    for task in table.scan().plan_files():
        if task.delete_files:
            raise _not_read(
                place,
                "Iceberg",
                "files of deleted rows",
                "rewrite its data files: CALL system.rewrite_data_files(...)",
            )
        if (form := task.file.file_format.value) != "PARQUET":
            raise _not_read(place, "Iceberg", f"files of {form}", _SPARK)
        cells = dict(first)
        spec = table.specs()[task.file.spec_id]
        for i, field in enumerate(spec.fields):
            name = table.schema().find_column_name(field.source_id)
            is_cell = isinstance(field.transform, IdentityTransform)
            if is_cell and name is not None and name in schema.names:
                cells[name] = _cell(task.file.partition[i], schema.field(name).type)
        numbers = {field.name: field.field_id for field in fields}
        columns = TableColumns(schema, cells, numbers, known)
        files.append(TableFile(_inner(place, task.file.file_path), columns))
    return files


def _newest_metadata(place: Place, below: Collection[str]) -> str:
    """The path of the metadata file with the highest version.

    Raises:
      DataError: two writers have made a file of the highest version, and only a catalog knows
        which of them is valid.
    """
    numbered = [
        (int(found[1]), path)
        for path in below
        if (found := re.fullmatch(r"metadata/v?(\d+)[-.].*metadata\.json", path))
    ]
    last = max((number for number, _ in numbered), default=None)
    newest = [path for number, path in numbered if number == last]
    if len(newest) != 1:
        raise DataError.at(
            place.path,
            f"is an Iceberg table with {len(newest)} metadata files of the last version, and "
            "only its catalog knows which one holds; read it by pyiceberg with the catalog, "
            "and give the table in place of the path",
        )
    return newest[0]


def _store_options(place: Place) -> dict[str, str]:
    """Converts options in an address, written for pyarrow, to options of pyiceberg."""
    parts = urllib.parse.urlsplit(os.fspath(place.path))
    given = dict(urllib.parse.parse_qsl(parts.query))
    scheme = given.get("scheme", "https")
    options = {
        "s3.region": given.get("region"),
        "s3.endpoint": (end := given.get("endpoint_override")) and f"{scheme}://{end}",
        "s3.access-key-id": parts.username,
        "s3.secret-access-key": parts.password,
    }
    unquote = urllib.parse.unquote
    return {name: unquote(value) for name, value in options.items() if value}


def _inner(place: Place, path: str) -> str:
    """Converts a path in a table's log to a path in the file system of the table."""
    if re.match("[a-z0-9]+:/", path):
        return re.sub("^[a-z0-9]+:(//)?", "", path)
    return path if path.startswith("/") else f"{place.inner.rstrip('/')}/{path}"


def _cell(value: Any, type_: pa.DataType) -> pa.Scalar:
    """Converts a partition's value to a scalar. Iceberg stores dates and times as integers."""
    if isinstance(value, int) and pt.is_date(type_):
        return pa.scalar(value, pa.int32()).cast(type_)
    if isinstance(value, int) and pt.is_temporal(type_):
        return pa.scalar(value, pa.int64()).cast(type_)
    return pa.scalar(value, type_)


def _repeated(cell: pa.Scalar, rows: int, type_: pa.DataType) -> pa.Array:
    if not cell.is_valid:
        return pa.nulls(rows, type_)
    return pa.repeat(cell, rows)
