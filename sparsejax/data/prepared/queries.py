"""SQL queries with which engines turn events into sorted entries.

Tables and their columns::

    events   name (of the user), item, value, time     one for each event
    pairs    name, item, value, time, first            one for each user and item
             name, item, value, time, later_value, later_time     if a time splits them
    items    item, n                                   the most frequent first
    codes    item, code                                the column of each item
    people   name, number                              users in pseudo-random order

The text is equal for all engines, except for the phrases of a `Dialect`. Columns `value`,
`time` and `first` (the time of the earliest event) exist only if they are needed. If a time
splits the events, `value` and `time` belong to the events before it, and `later_value` and
`later_time` to the other events. They are null if a pair has no such events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The SQL phrases that engines spell differently, as format strings.

    Attributes:
      total: sum of `{value}`, with the engine's smallest rounding errors.
      latest: the `{value}` of the greatest pair of `{time}` and `{value}`.
      largest: the greatest `{value}`.
      hash: hash of `{}`, for a pseudo-random order.
    """

    total: str
    latest: str
    largest: str
    hash: str


# Sums are cast to float32, as in the files. Spark adds in an arbitrary order, so float64 sums
# would differ in their last bits between computations.
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
    """The query for entries: one row for each user and item of a table.

    Args:
      dialect: functions and types of the engine's SQL.
      events: name of the table, or the subquery that `single` makes.
      duplicates: rule for the value of an entry with several events: "add", "last" or "max".
      valued: whether events have values.
      timed: whether events have times.
      sides: whether a time splits the events.
    """
    merge = {"add": dialect.total, "last": dialect.latest, "max": dialect.largest}[
        duplicates
    ]
    columns = ["name", "item"]
    for side in ["", "later_"] if sides else [""]:
        value, time = f"{side}value", f"{side}time"
        merged = merge.format(value=value, time=time)
        columns += [f"{merged} AS {value}"] * valued
        columns += [f"max({time}) AS {time}"] * timed
    columns += ["min(first) AS first"] * (timed and not sides)
    return f"SELECT {', '.join(columns)} FROM {events} GROUP BY name, item"


def single(events: str, *, valued: bool, timed: bool, before: float | None) -> str:
    """The subquery that selects events with the columns of pairs: a pair for each event.

    Args:
      events: name of the table.
      valued: whether events have values.
      timed: whether events have times.
      before: time that splits the events, or None.
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
    """The query that adds `bucket` to a table: a number that all rows of a user share."""
    return (
        f"SELECT *, {DUCKDB.hash.format('name')} >> {64 - bits} AS bucket FROM {table}"
    )


def content(
    dialect: Dialect, table: str, *, valued: bool, timed: bool, sides: bool
) -> str:
    """The query for the number of pairs and a hash over all of them.

    Values are hashed as float32, because a sum's last bits may differ between computations.
    """
    columns = ["name", "item"]
    for side in ["", "later_"] if sides else [""]:
        columns += [f"TRY_CAST({side}value AS FLOAT)"] * valued
        columns += [f"{side}time"] * timed
    hashed = dialect.hash.format(", ".join(columns))
    return f"SELECT count(*), bit_xor({hashed}) FROM {table}"


def frequent(table: str, column: str, least: int, *, repeats: bool = False) -> str:
    """The query for pairs whose `column`, user or item, occurs in at least `least` pairs.

    With `repeats`, users have items several times, and count once for each item.
    """
    which = "DISTINCT name" if repeats and column == "item" else "*"
    return (
        f"SELECT * FROM {table} WHERE {column} IN (SELECT {column} FROM {table} "
        f"GROUP BY {column} HAVING count({which}) >= {least})"
    )


def items(table: str, *, sides: bool, repeats: bool = False) -> str:
    """The query for all items with their count `n`, the most frequent first.

    `n` counts the pairs; with `sides`, the pairs with events before the time of the split;
    with `repeats`, where a user may have an item several times, the users.
    """
    which = "time" if sides else "DISTINCT name" if repeats else "*"
    return (
        f"SELECT item, count({which}) AS n FROM {table} GROUP BY item "
        "ORDER BY n DESC, item"
    )


def facts(*, valued: bool, timed: bool, sides: bool) -> dict[str, str]:
    """SQL expressions for facts about an entry, by column name, over the table `pairs`.

    They are written, or decide to which part the entry belongs. `repeated` is 1 if the entry
    has earlier events than the latest one, `earlier` and `later` if it has events before and
    after the time of the split; otherwise they are 0.
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
    # SQL reads a bare `inf` as the name of a column.
    literal = f"CAST('{time}' AS DOUBLE)" if isinstance(time, float) else f"{time}"
    return f"{column} < {literal}"


def people(dialect: Dialect, table: str) -> str:
    """The query for users, numbered from 0 in pseudo-random order."""
    order = f"{dialect.hash.format('name')}, name"
    return (
        f"SELECT name, row_number() OVER (ORDER BY {order}) - 1 AS number "
        f"FROM (SELECT DISTINCT name FROM {table})"
    )


def names() -> str:
    """The query for the users' names in the order of their numbers."""
    return "SELECT name FROM people ORDER BY number"


def histories(table: str, columns: Sequence[str]) -> str:
    """The query for events with numbers of users and items, sorted by user and time."""
    order = ["number", *["time"] * ("time" in columns), "place"]
    return (
        f"SELECT number, code, {', '.join([*columns, 'place'])} FROM {table} "
        f"JOIN people USING (name) JOIN codes USING (item) ORDER BY {', '.join(order)}"
    )


def entries(table: str, *, valued: bool, timed: bool, sides: bool) -> str:
    """The SQL query for a table's entries, sorted by the user's number, then the item's code.

    Each row has both numbers and the columns of `facts` for these flags.
    """
    found = facts(valued=valued, timed=timed, sides=sides)
    more = "".join(f", {fact} AS {name}" for name, fact in found.items())
    return (
        f"SELECT number, code{more} FROM {table} JOIN people USING (name) "
        "JOIN codes USING (item) ORDER BY number, code"
    )
