"""Parses JSON Lines: a JSON object on each line, whose values may be lists or objects.

The key `id` inside an object `track` becomes the column `track.id`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.types as pt

from sparsejax.data.events.block import Cells, is_list
from sparsejax.data.files.opening import (
    ByteStream,
    DataError,
    Lines,
    Path,
    WithoutLines,
    half_pair,
    head,
    line_blocks,
    open_data,
)

# Most levels of nested lists and objects. Arrow's parser recurses for each level, so a deeply
# nested line would overflow the stack and end the process. Events need three levels.
_LEVELS = 64
# Change of the nesting level by each byte, for JSON whose strings have been removed.
_CHANGES = np.zeros(256, np.int8)
_CHANGES[[*b"[{"]], _CHANGES[[*b"]}"]] = 1, -1
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')
# Key in a field's metadata. Its value is the path of JSON keys of a column in a nested object.
_KEYS = b"sparsejax_keys"


def is_within(field: pa.Field) -> bool:
    """Whether a column is a key of a nested object, not of the line's own object."""
    return _KEYS in (field.metadata or {})


def first_rows(path: Path) -> pa.Table:
    """Parses the first rows of a file, whose types decide the columns.

    If `path` is a `WithoutLines`, bad lines among these rows are left out.
    """
    lines = head(path)
    while True:
        try:
            found = _parsed(lines, None).schema
            break
        except DataError as error:
            if not isinstance(path, WithoutLines) or error.line is None:
                raise
            if error.line in path.blank or path.are_many:
                raise
            path.leave_out(error.line, error.line + 1, error.problem)
            lines = head(path)
    schema = pa.schema([pa.field(f.name, _plain(f.type)) for f in found])
    return _columns(_parsed(lines, schema))


def json_cells(
    path: Path, schema: pa.Schema, names: Mapping[str, str]
) -> Iterator[Cells]:
    """Opens a file and yields its cells; see `stream_cells`."""
    with open_data(path) as stream:
        yield from stream_cells(stream, path, schema, names)


def stream_cells(
    stream: ByteStream, path: Path, schema: pa.Schema, names: Mapping[str, str]
) -> Iterator[Cells]:
    """Yields the cells of a file, a block at a time.

    Args:
      stream: the opened file.
      path: name of the file in messages.
      schema: columns that `first_rows` found.
      names: name of the column for each key of the result.

    Raises:
      DataError: a line is no object, or a cell has another type.
    """
    columns = [schema.field(name) for name in dict.fromkeys(names.values())]
    wanted = pa.schema(_objects_of(columns))
    for lines in line_blocks(stream, path):
        if not lines.data.strip():
            continue
        table = _columns(_parsed(lines, wanted)).combine_chunks()
        cells = {
            key: table.column(name).chunk(0)
            if len(table)
            else pa.nulls(0, schema.field(name).type)
            for key, name in names.items()
        }

        def error(row: int, message: str, lines: Lines = lines) -> DataError:
            found = (at for at, _ in _objects(lines))
            return lines.error(next(itertools.islice(found, row, None)), message)

        yield Cells(cells, error, path)


def _plain(type_: pa.DataType) -> pa.DataType:
    """The type to read a column as. Timestamps are read as text: a text may only look like one."""
    if is_list(type_):
        return pa.list_(_plain(type_.value_type))
    if pt.is_struct(type_):
        return pa.struct([pa.field(f.name, _plain(f.type)) for f in type_])
    return pa.string() if pt.is_timestamp(type_) else type_


def _columns(table: pa.Table) -> pa.Table:
    """Turns keys of nested objects into columns, which are marked for `is_within`."""
    found: dict[str, tuple[pa.Field, pa.ChunkedArray]] = {}
    for name, cells in zip(table.column_names, table.columns, strict=True):
        for keys, part in _within((name,), cells):
            field = pa.field(".".join(keys), part.type)
            if len(keys) == 1:
                found[field.name] = field, part
            else:  # a top-level column with this name has precedence
                field = field.with_metadata({_KEYS: json.dumps(keys).encode()})
                found.setdefault(field.name, (field, part))
    return pa.table(
        [part for _, part in found.values()],
        pa.schema([field for field, _ in found.values()]),
    )


def _within(
    keys: tuple[str, ...], cells: pa.ChunkedArray
) -> Iterator[tuple[tuple[str, ...], pa.ChunkedArray]]:
    """Yields a column, or the columns inside a struct, with null where the struct is null."""
    if not pt.is_struct(cells.type):
        yield keys, cells
        return
    for field, part in zip(cells.type, cells.flatten(), strict=True):
        yield from _within((*keys, field.name), part)


def _objects_of(columns: Iterable[pa.Field]) -> list[pa.Field]:
    """The nested fields of a line's object, rebuilt from columns that `_columns` flattened."""
    tree: dict[str, Any] = {}
    for column in columns:
        *outer, last = [column.name]
        if is_within(column):
            *outer, last = json.loads(column.metadata[_KEYS])
        at = tree
        for key in outer:
            at = at.setdefault(key, {})
        at[last] = column.type
    return _fields(tree)


def _fields(tree: Mapping[str, Any]) -> list[pa.Field]:
    return [
        pa.field(name, pa.struct(_fields(inner)) if isinstance(inner, dict) else inner)
        for name, inner in tree.items()
    ]


def _objects(lines: Lines) -> Iterator[tuple[int, bytes]]:
    each = enumerate(lines.data.split(b"\n"))
    return ((at, line) for at, line in each if line.strip())


def _check_levels(lines: Lines) -> None:
    """Raises DataError if lists and objects are nested too deeply for the parser."""
    for at, line in _objects(lines):
        few = line.count(b"[") + line.count(b"{") <= _LEVELS
        if (
            not few
            and _depth(line) > _LEVELS
            and _depth(_TEXT.sub(b"", line)) > _LEVELS
        ):
            raise lines.error(
                at, f"has lists or objects within each other, more than {_LEVELS} deep"
            )


def _depth(line: bytes) -> int:
    changes = _CHANGES[np.frombuffer(line, np.uint8)]
    return int(np.cumsum(changes, dtype=np.int32).max(initial=0))


def _parsed(lines: Lines, schema: pa.Schema | None) -> pa.Table:
    _check_levels(lines)
    options = pa.json.ParseOptions(
        explicit_schema=schema,
        unexpected_field_behavior="infer" if schema is None else "ignore",
    )
    size = pa.json.ReadOptions(use_threads=False, block_size=len(lines.data) + 1)
    try:
        table = pa.json.read_json(pa.BufferReader(lines.data), size, options)
    except pa.ArrowInvalid as error:
        raise _wrong(lines, schema, error) from error
    if len(table) != sum(1 for _ in _objects(lines)):
        raise _wrong(lines, schema, None)
    return table


def _wrong(
    lines: Lines, schema: pa.Schema | None, cause: Exception | None
) -> DataError:
    """The error for the first line that cannot be parsed, or has another type than before."""
    types: dict[str, pa.DataType] = (
        {} if schema is None else {field.name: field.type for field in schema}
    )
    for at, line in _objects(lines):
        try:
            record = json.loads(line)
        except ValueError as error:
            return lines.error(at, f"is not JSON: {error}")
        if not isinstance(record, dict):
            what = 'a JSON object on each line, like {"user": "ann", "item": "tea"}'
            return lines.error(at, f"expected {what}, got {line[:40].decode()!r}")
        for name in record:
            cell = record[name]
            try:
                first = types.setdefault(name, _plain(pa.array([cell]).type))
                if pt.is_null(first):
                    types.pop(name)
                pa.array([cell], None if pt.is_null(first) else first)
            except UnicodeEncodeError as error:
                return lines.error(at, f"{name!r} {half_pair(error)}")
            except (pa.ArrowException, OverflowError):
                return lines.error(
                    at,
                    f"{name!r} is {cell!r}, but it is {types.get(name)} in the lines before; "
                    "give all cells of a column one type",
                )
    return lines.error(0, f"cannot be parsed as JSON Lines from here on: {cause}")
