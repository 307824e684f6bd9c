"""The SQL by which engines turn events into sorted entries.

Tables and their columns::

    events   name (of the user), item, value, time     one for each event
    pairs    name, item, value, time, first            one for each user and item
    items    item, n                                   the most frequent first
    codes    item, code                                the column of each item
    people   name, number                              users in pseudo-random order

The text is the same for all engines, except for what a `Dialect` has. `value`, `time` and
`first` (the time of the earliest event) are there if they are needed.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The phrases that engines spell differently.

    Attributes:
      total: the sum of `{}` with as few rounding errors as the engine can.
      latest: the `value` of the greatest pair of `time` and `value`.
      largest: the greatest `value`.
      hash: a hash of `{}` for a pseudo-random order.
    """

    total: str
    latest: str
    largest: str
    hash: str


# Sums are float32 as in the files: in float64 they would differ in the last bits from one
# computation to the next, as Spark adds in no fixed order.
SPARK = Dialect(
    total="CAST(sum({}) AS FLOAT)",
    latest="CAST(max_by(value, struct(time, value)) AS FLOAT)",
    largest="CAST(max(value) AS FLOAT)",
    hash="xxhash64({})",
)
DUCKDB = Dialect(
    total="fsum({})",
    latest="arg_max(value, (time, value))",
    largest="max(value)",
    hash="hash({})",
)


def pairs(
    dialect: Dialect, events: str, duplicates: str, *, valued: bool, timed: bool
) -> str:
    """The entries: one for each user and item of the table of events or of pairs."""
    value = {
        "add": dialect.total.format("value"),
        "last": dialect.latest,
        "max": dialect.largest,
    }[duplicates]
    columns = ["name", "item"]
    columns += [f"{value} AS value"] * valued + [
        "max(time) AS time",
        "min(first) AS first",
    ] * timed
    return f"SELECT {', '.join(columns)} FROM {events} GROUP BY name, item"


def with_first(events: str) -> str:
    """The events with times as pairs of one event each."""
    return f"(SELECT *, time AS first FROM {events})"


def in_buckets(table: str, bits: int) -> str:
    """Events or pairs with the number of a bucket, `bucket`, that has all of a user."""
    return (
        f"SELECT *, {DUCKDB.hash.format('name')} >> {64 - bits} AS bucket FROM {table}"
    )


def content(dialect: Dialect, table: str, *, valued: bool, timed: bool) -> str:
    """The number of pairs and a hash of them.

    Values count as float32, because a sum's last bits may differ from time to time.
    """
    columns = ["name", "item"]
    columns += ["TRY_CAST(value AS FLOAT)"] * valued + ["time"] * timed
    hashed = dialect.hash.format(", ".join(columns))
    return f"SELECT count(*), bit_xor({hashed}) FROM {table}"


def frequent(table: str, column: str, least: int) -> str:
    """The pairs whose user (or item) has at least so many pairs."""
    return (
        f"SELECT * FROM {table} WHERE {column} IN "
        f"(SELECT {column} FROM {table} GROUP BY {column} HAVING count(*) >= {least})"
    )


def items(table: str, before: float | None) -> str:
    """All items. `n` counts the pairs, or those before a time."""
    which = "" if before is None else f" FILTER (WHERE {_is_before('time', before)})"
    return (
        f"SELECT item, count(*){which} AS n FROM {table} GROUP BY item "
        "ORDER BY n DESC, item"
    )


def is_repeated(before: float | None) -> str:
    """Whether an entry of the table `pairs`, if it is held out, has earlier events: 0 or 1.

    Args:
      before: the time of the split; None if the last entries of rows are held out.
    """
    earlier = "first < time" if before is None else _is_before("first", before)
    return f"CAST({earlier} AS TINYINT)"


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


def entries(
    table: str, *, valued: bool, timed: bool, before: float | None = None
) -> str:
    """The entries as numbers, sorted by user and column. `before` as of `is_repeated`."""
    more = ", value" * valued
    more += f", time, {is_repeated(before)} AS repeated" * timed
    return (
        f"SELECT number, code{more} FROM {table} JOIN people USING (name) "
        "JOIN codes USING (item) ORDER BY number, code"
    )
