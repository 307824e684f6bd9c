"""Reads events from a data frame of Spark: gives columns one form, and finds wrong events."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from sparsejax.data.events.block import NO_ITEM, NO_TIME, NO_USER, NO_VALUE, is_list
from sparsejax.data.events.source import check_times
from sparsejax.data.events.tables import find_table_layout, inner_type
from sparsejax.data.files import arrow, lake
from sparsejax.data.files.columns import Chosen, Columns, role_of
from sparsejax.data.files.hive import Constants, of_folder
from sparsejax.data.files.opening import DataError
from sparsejax.data.files.spelling import exact_bits, is_text
from sparsejax.data.files.values import parse_times
from sparsejax.spark.workers import spark_errors, spark_type

PATH = "the frame"  # stands for the path in messages

# These faults are errors, even with `skip_bad_lines`, which drops other wrong events.
_LENGTHS = "events of rows whose lists have different lengths"
_NO_NAME = (
    "events whose user or item is a number that cannot be a name: floats must be integers "
    "that their type holds exactly (below 2^53, or 2^24 of 32 bits)"
)
# The least float64 that is converted to infinity in float32.
_TOO_LARGE = "3.4028235677973366E38D"
_PROBED = 1000  # times from which their format is guessed
_DAY = 86_400_000_000  # microseconds


@dataclasses.dataclass(frozen=True)
class FrameEvents:
    """The events of a data frame, in columns of fixed names and types.

    Attributes:
      frame: data frame with the columns `name`, `item`, `value` and `time`; the last two may
        be missing. A wrong event has a null as name; its column `item` describes the fault.
      wrong: the wrong events with their original cells and the column `problem`.
      columns: names of the source's columns that were read.
      valued: whether events have values.
      times: an array of the times' dtype, for `Cut.before`; None if events have no times.
    """

    frame: Any
    wrong: Any
    columns: Columns
    valued: bool
    times: np.ndarray | None


def frame_events(
    frame: Any, chosen: Chosen, *, indicator: bool, with_time: bool
) -> FrameEvents:
    """Finds the columns of events in a frame, converts them, and marks wrong events.

    Raises:
      DataError: a column is missing, or has a type that is not possible for its role.
      ValueError: a column has two roles.
    """
    from pyspark.sql import functions as F

    schema = _with_folders(_arrow_schema(frame.schema), frame)
    layout = find_table_layout(
        PATH, schema, chosen, indicator=indicator, with_time=with_time
    )
    check_times(PATH, layout.source, with_time)
    roles = {"user": layout.user, "item": layout.item}
    roles |= {"value": layout.value} if layout.value is not None else {}
    roles |= {"time": layout.time} if layout.time is not None else {}
    # Columns are renamed by position: names may contain dots or quotes, or differ only in case.
    plain = frame.toDF(*(f"c{i}" for i in range(len(schema))))
    plain = plain.selectExpr(
        *(f"c{schema.get_field_index(name)} AS {role}" for role, name in roles.items())
    )
    types = {role: schema.field(name).type for role, name in roles.items()}
    same_lengths = "true"
    if layout.has_lists:
        plain, same_lengths = _exploded(plain, types)
        types = {role: inner_type(type_) for role, type_ in types.items()}
    valued = "value" in types
    if valued:
        given = plain.where("value IS NOT NULL").select("value")
        valued = not (pt.is_null(types["value"]) or given.isEmpty())
    times = None
    if "time" in types:
        plain, types["time"], times = _with_times(plain, types["time"])

    user, is_user, good_user = _name("user", types["user"])
    item, is_item, good_item = _name("item", types["item"])
    problems = [(is_user, NO_USER), (is_item, NO_ITEM)]
    problems += [(same_lengths, _LENGTHS), (good_user, _NO_NAME), (good_item, _NO_NAME)]
    columns = [user, item]
    if valued:
        columns.append("CAST(value AS DOUBLE) AS value")
        is_value = f"coalesce(abs(CAST(value AS DOUBLE)) < {_TOO_LARGE}, false)"
        problems.append((is_value, NO_VALUE))
    if times is not None:
        columns.append(f"{_time(types['time'])} AS time")
        problems.append((_is_time(types["time"]), NO_TIME))
    cases = [
        f"WHEN NOT ({good}) THEN '{what}'" for good, what in problems if good != "true"
    ]
    problem = F.expr(f"CASE {' '.join(cases)} END")
    marked = plain.withColumn("problem", problem)
    clean = marked.selectExpr(*columns, "problem").selectExpr(
        "CASE WHEN problem IS NULL THEN name END AS name",
        "coalesce(problem, item) AS item",
        *["CASE WHEN problem IS NULL THEN value END AS value"] * valued,
        *["CASE WHEN problem IS NULL THEN time END AS time"] * (times is not None),
    )
    wrong = marked.where("problem IS NOT NULL")
    assert layout.source is not None
    return FrameEvents(clean, wrong, layout.source, valued, times)


def check_files(frame: Any) -> None:
    """Raises DataError if the frame reads the files of a table format without the table's log.

    `session.read.parquet(path)` on a Delta table does so: deleted rows would be read.
    """
    with contextlib.redirect_stdout(io.StringIO()) as plan:
        frame.explain("formatted")
    # In the plan, readers that use the table's log have another index than InMemoryFileIndex.
    lists = re.findall(r"Location: InMemoryFileIndex ?\[([^]]*)\]", plan.getvalue())
    roots = {root for each in lists for root in each.split(", ")}
    for root in sorted(root for root in roots if ":/" in root):
        for folder in (root, *lake.folders_above(root)):
            for kind, pattern in lake.PATTERNS.items():
                if _is_there(frame.sparkSession, f"{folder}/{pattern}"):
                    raise DataError.at(
                        folder,
                        f"is a table of {kind}, but the frame reads its files without its log, "
                        f"also those of earlier versions; read it by Spark's package for {kind}: "
                        f'session.read.format("{kind.lower()}")',
                    )


def _is_there(session: Any, pattern: str) -> bool:
    """Whether the cluster finds a file or folder whose path matches a pattern."""
    try:
        # Over Spark Connect, files are searched only when the schema is requested.
        _ = session.read.format("binaryFile").load(pattern).schema
    except spark_errors():  # nothing matches, or listing is not permitted
        return False
    return True


def count_wrong(events: FrameEvents, *, skip_bad_lines: bool) -> dict[str, int]:
    """The number of wrong events for each kind of fault.

    Raises:
      DataError: there are wrong events, and `skip_bad_lines` is false or cannot drop them.
    """
    from pyspark.sql import functions as F

    ours = ("problem", "same_lengths")
    seen = [name for name in events.wrong.columns if name not in ours]
    example = F.min(F.struct(*seen).cast("string")).alias("example")
    found = events.wrong.groupBy("problem").agg(F.count("*").alias("n"), example)
    rows = sorted(map(tuple, found.collect()))
    counts = {problem: count for problem, count, _ in rows}
    if counts and not (
        skip_bad_lines and counts.keys().isdisjoint((_LENGTHS, _NO_NAME))
    ):
        told = ", ".join(f"{count:,} {problem}" for problem, count in counts.items())
        remedy = "correct them"
        if counts.keys().isdisjoint((_LENGTHS, _NO_NAME)):
            remedy += ", or leave them out by skip_bad_lines=True"
        raise DataError.at(
            PATH,
            f"{told}; one of them has ({', '.join(seen)}) = {rows[0][2]}; {remedy}",
        )
    return counts


def _exploded(frame: Any, types: dict[str, pa.DataType]) -> tuple[Any, str]:
    """Converts rows with lists to one row for each item.

    Returns:
      The frame, and an SQL expression that is true where a row's lists are equally long.
    """
    from pyspark.sql import functions as F

    lists = [role for role, type_ in types.items() if is_list(type_)]
    single = [role for role in types if role not in lists]
    sizes = [f"coalesce(array_size({role}), 0)" for role in lists]
    same = " AND ".join(f"{sizes[0]} = {size}" for size in sizes[1:]) or "true"
    zipped = F.explode(F.arrays_zip(*lists)).alias("entry")
    frame = frame.select(*single, F.expr(same).alias("same_lengths"), zipped)
    frame = frame.select(*single, "same_lengths", *(f"entry.{role}" for role in lists))
    return frame, "same_lengths"


def _name(column: str, type_: pa.DataType) -> tuple[str, str, str]:
    """SQL expressions: the name as text, whether a name is present, and whether it is valid."""
    alias = "name" if column == "user" else column
    if is_text(type_):
        text = column if pt.is_string(type_) else f"CAST({column} AS STRING)"
        good = "true" if pt.is_string(type_) else f"is_valid_utf8({text})"
        return f"{text} AS {alias}", f"coalesce({column} <> '', false)", good
    if pt.is_decimal(type_):
        text = f"CAST({column} AS STRING)"
        if type_.scale > 0:
            text = f"regexp_replace({text}, '[.]?0+$', '')"
        return f"{text} AS {alias}", f"{column} IS NOT NULL", "true"
    if pt.is_floating(type_):
        number = f"CAST({column} AS DOUBLE)"
        good = f"rint({number}) = {number} AND abs({number}) < {2 ** exact_bits(type_)}"
        text = f"CAST(try_cast({number} AS BIGINT) AS STRING)"
        return (
            f"{text} AS {alias}",
            f"{column} IS NOT NULL AND NOT isnan({number})",
            good,
        )
    return f"CAST({column} AS STRING) AS {alias}", f"{column} IS NOT NULL", "true"


def _time(type_: pa.DataType) -> str:
    """SQL expression that converts the time to a number; dates become microseconds."""
    if pt.is_date(type_):
        return f"unix_date(time) * {_DAY}"
    if pt.is_timestamp(type_) and type_.tz is None:
        return "timestampdiff(MICROSECOND, TIMESTAMP_NTZ '1970-01-01 00:00:00', time)"
    if pt.is_timestamp(type_):
        return "unix_micros(time)"
    return f"try_cast(time AS {'DOUBLE' if _is_float(type_) else 'BIGINT'})"


def _is_float(type_: pa.DataType) -> bool:
    """Whether times of a type are read as floats. Decimals without fraction are integers."""
    return pt.is_floating(type_) or (pt.is_decimal(type_) and type_.scale > 0)


def _is_time(type_: pa.DataType) -> str:
    if pt.is_floating(type_):
        return "coalesce(abs(time) < CAST('inf' AS DOUBLE), false)"
    if pt.is_decimal(type_):
        return f"{_time(type_)} IS NOT NULL"
    return "time IS NOT NULL"


def _with_times(frame: Any, type_: pa.DataType) -> tuple[Any, pa.DataType, np.ndarray]:
    """Parses times that are text; other times stay as they are.

    Returns:
      The frame with parsed times, their Arrow type, and a small array of their NumPy dtype.
    """
    if not is_text(type_):
        is_float = _is_float(type_)
        dates = pt.is_date(type_) or pt.is_timestamp(type_)
        kind = np.dtype("datetime64[us]" if dates else "f8" if is_float else "i8")
        return frame, type_, np.zeros(1, kind)
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.functions import ArrowUDFType

    frame = frame.withColumn("time", F.col("time").cast("string"))
    probed = frame.where("trim(time) <> ''").select("time").limit(_PROBED).collect()
    found = [parse_times(pa.array([row[0]])) for row in probed]
    kinds = [(kind, times.dtype) for times, kind in filter(None, found)]
    kind, dtype = kinds[0] if kinds else ("number", np.dtype(np.int64))
    if (kind, np.dtype(np.float64)) in kinds:
        dtype = np.dtype(np.float64)
    parsed = pa.float64() if dtype == np.float64 else pa.int64()
    with warnings.catch_warnings():  # it advises to use type hints of a function
        warnings.simplefilter("ignore", UserWarning)
        parse = F.arrow_udf(
            _Parse(kind, parsed), spark_type(parsed), ArrowUDFType.SCALAR
        )
    return frame.withColumn("time", parse("time")), parsed, np.zeros(1, dtype)


@dataclasses.dataclass(frozen=True)
class _Parse:
    """Function of a task that parses times. A text that is not a time becomes null."""

    kind: str
    type: pa.DataType

    def __call__(self, texts: pa.Array) -> pa.Array:
        found = None if texts.null_count else parse_times(texts)
        if found is not None and found[1] == self.kind:
            times = found[0].view("i8") if found[0].dtype.kind == "M" else found[0]
            if times.dtype == np.int64 or pt.is_floating(self.type):
                return arrow.from_numbers(times).cast(self.type)
        if len(texts) < 2:
            return pa.nulls(len(texts), self.type)
        middle = len(texts) // 2
        # Bisection finds a few wrong times among many quickly.
        return pa.concat_arrays([self(texts[:middle]), self(texts[middle:])])


def _arrow_schema(schema: Any) -> pa.Schema:
    """Converts Spark's schema to an Arrow schema. Unsupported types become empty structs."""
    return pa.schema([(field.name, _arrow_type(field.dataType)) for field in schema])


def _with_folders(schema: pa.Schema, frame: Any) -> pa.Schema:
    """Marks columns of times whose values come from the names of folders (`of_folder`)."""
    times = [i for i, name in enumerate(schema.names) if role_of(name) == "time"]
    if len(times) < 2:
        return schema  # the files need not be listed
    folders = {path.rpartition("/")[0] + "/" for path in frame.inputFiles()}
    given = {name for folder in folders for name in Constants.of(folder).texts}
    for i in times:
        if schema.names[i] in given:
            schema = schema.set(i, of_folder(schema.field(i)))
    return schema


def _arrow_type(type_: Any) -> pa.DataType:
    name = type_.typeName()
    if name == "array":
        return pa.list_(_arrow_type(type_.elementType))
    if name == "decimal":
        return pa.decimal128(type_.precision, type_.scale)
    return _TYPES.get(name.partition("(")[0], pa.struct([]))


_TYPES = {
    "string": pa.string(),
    "varchar": pa.string(),
    "char": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "tinyint": pa.int8(),
    "short": pa.int16(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "int": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}
