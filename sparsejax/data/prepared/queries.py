"""The SQL by which engines turn events into sorted entries.

Tables and their columns::

    events   name (of the user), item, value, time     one for each event
    pairs    name, item, value, time, first            one for each user and item
             name, item, value, time, later_value, later_time     if a time splits them
    items    item, n                                   the most frequent first
    codes    item, code                                the column of each item
    people   name, number                              users in pseudo-random order

The text is one for all engines, except for the parts that a `Dialect` has. `value`,
`time` and `first` (the time of the earliest event) are there if they are needed. Where
a time splits the events, `value` and `time` belong to the events before it, and
`later_value` and `later_time` to the others: null where there are none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The phrases that engines spell differently.

    Attributes:
      total: the sum of `{value}` with as few rounding errors as the engine can.
      latest: the `{value}` of the greatest pair of `{time}` and `{value}`.
      largest: the greatest `{value}`.
      hash: a hash of `{}` for a pseudo-random order.
    """

    total: str
    latest: str
    largest: str
    hash: str


# Sums are float32 as in the files: in float64 they would differ in the last bits from one
# computation to the next, as Spark adds in no fixed order.
SPARK = Dialect(
    total="CAST(sum({value}) AS FLOAT)",
    latest="CAST(max_by({value}, struct({time}, {value})) AS FLOAT)",
    largest="CAST(max({value}) AS FLOAT)",
    hash="xxhash64({})",
)
DUCKDB = Dialect(
    total="fsum({value})",
    latest="arg_max({value}, ({time}, {value}))",
    largest="max({value})",
    hash="hash({})",
)


def pairs(
    dialect: Dialect,
    events: str,
    duplicates: str,
    *,
    valued: bool,
    timed: bool,
    sides: bool,
) -> str:
    """The entries: one for each user and item of the table of events or of pairs.

    Args:
      dialect: functions and types of the engine's SQL.
      events: the table, as `single` makes it.
      duplicates: the value of an entry with several events: "add", "last" or "max".
      valued: whether there are values.
      timed: whether there are times.
      sides: whether a time splits the events.
    """
    merge = {
        "add": dialect.total,
        "last": dialect.latest,
        "max": dialect.largest,
    }[duplicates]
    columns = ["name", "item"]
    for side in ["", "later_"] if sides else [""]:
        value, time = f"{side}value", f"{side}time"
        merged = merge.format(value=value, time=time)
        columns += [f"{merged} AS {value}"] * valued
        columns += [f"max({time}) AS {time}"] * timed
    columns += ["min(first) AS first"] * (timed and not sides)
    return f"SELECT {', '.join(columns)} FROM {events} GROUP BY name, item"


def single(events: str, *, valued: bool, timed: bool, before: float | None) -> str:
    """The events as pairs of one event each.

    Args:
      events: the table.
      valued: whether there are values.
      timed: whether there are times.
      before: the time that splits the events, if one does.
    """
    if before is None:
        return f"(SELECT *, time AS first FROM {events})" if timed else events
    columns = ["name", "item"]
    earlier = _is_before("time", before)
    for side, here in (("", earlier), ("later_", f"NOT ({earlier})")):
        for column in ["value"] * valued + ["time"]:
            columns.append(f"CASE WHEN {here} THEN {column} END AS {side}{column}")
    return f"(SELECT {', '.join(columns)} FROM {events})"


def in_buckets(table: str, bits: int) -> str:
    """Events or pairs with the number of a bucket, `bucket`, that has all of a user."""
    return (
        f"SELECT *, {DUCKDB.hash.format('name')} >> {64 - bits} AS bucket FROM {table}"
    )


def content(
    dialect: Dialect, table: str, *, valued: bool, timed: bool, sides: bool
) -> str:
    """The number of pairs and a hash of them.

    Values count as float32, because a sum's last bits may differ from time to time.
    """
    columns = ["name", "item"]
    for side in ["", "later_"] if sides else [""]:
        columns += [f"TRY_CAST({side}value AS FLOAT)"] * valued
        columns += [f"{side}time"] * timed
    hashed = dialect.hash.format(", ".join(columns))
    return f"SELECT count(*), bit_xor({hashed}) FROM {table}"


def frequent(table: str, column: str, least: int) -> str:
    """The pairs whose user (or item) has at least so many pairs."""
    return (
        f"SELECT * FROM {table} WHERE {column} IN "
        f"(SELECT {column} FROM {table} GROUP BY {column} HAVING count(*) >= {least})"
    )


def items(table: str, *, sides: bool, repeats: bool = False) -> str:
    """All items. `n` counts the pairs, or those with events before the time of the split.

    With `repeats`, users have items several times, and `n` counts the users.
    """
    which = "time" if sides else "DISTINCT name" if repeats else "*"
    return (
        f"SELECT item, count({which}) AS n FROM {table} GROUP BY item "
        "ORDER BY n DESC, item"
    )


def facts(*, valued: bool, timed: bool, sides: bool) -> dict[str, str]:
    """The columns of an entry of the table `pairs` that are written or decide on its part.

    `repeated`, `earlier` and `later` are 0 or 1: whether it has earlier events than the
    latest, and whether it has events before and after the time of the split.
    """
    if not sides:
        found = {"value": "value"} if valued else {}
        repeated = "CAST(first < time AS TINYINT)"
        return found | ({"time": "time", "repeated": repeated} if timed else {})
    values = ["value", "later_value"] * valued
    found = {name: f"coalesce({name}, 0)" for name in values}
    for side, time in (("earlier", "time"), ("later", "later_time")):
        found[side] = f"CAST({time} IS NOT NULL AS TINYINT)"
    return found


def _is_before(column: str, time: float) -> str:
    # "inf" would be the name of a column.
    literal = f"CAST('{time}' AS DOUBLE)" if isinstance(time, float) else f"{time}"
    return f"{column} < {literal}"


def people(dialect: Dialect, table: str) -> str:
    """The users, numbered from 0 in pseudo-random order."""
    order = f"{dialect.hash.format('name')}, name"
    return (
        f"SELECT name, row_number() OVER (ORDER BY {order}) - 1 AS number "
        f"FROM (SELECT DISTINCT name FROM {table})"
    )


def names() -> str:
    """The names of the users by their numbers."""
    return "SELECT name FROM people ORDER BY number"


def histories(table: str, columns: Sequence[str]) -> str:
    """The events as numbers with further columns, sorted by user and time."""
    order = ["number", *["time"] * ("time" in columns), "place"]
    return (
        f"SELECT number, code, {', '.join([*columns, 'place'])} FROM {table} "
        f"JOIN people USING (name) JOIN codes USING (item) ORDER BY {', '.join(order)}"
    )


def entries(table: str, *, valued: bool, timed: bool, sides: bool) -> str:
    """The entries as numbers with their `facts`, sorted by user and column."""
    found = facts(valued=valued, timed=timed, sides=sides)
    more = "".join(f", {fact} AS {name}" for name, fact in found.items())
    return (
        f"SELECT number, code{more} FROM {table} JOIN people USING (name) "
        "JOIN codes USING (item) ORDER BY number, code"
    )
