"""Finds the columns of a table that hold the users, the items, the values and the times."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from sparsejax.data.files.opening import DataError, Path
from sparsejax.options.reading import BY_NAME, Column, TimeColumn
from sparsejax.sparse import CSR

# Known column names for each role. The comparison ignores case, white space, "_", "-", "." and a
# plural "s". A word for a key may be added to names of users and items: `id_user`, `ItemID`,
# `product_code`.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "user": (
        *("user", "uid", "customer", "account", "visitor", "client", "buyer"),
        *("session", "member", "subscriber", "shopper", "consumer", "reviewer"),
        *("reader", "listener", "viewer", "player", "person", "profile"),
    ),
    "item": (
        *("item", "iid", "product", "sku", "stockcode", "article", "asin", "isbn"),
        *("movie", "film", "video", "show", "anime", "track", "song", "artist"),
        *("album", "podcast", "book", "game", "app", "news", "page", "recipe"),
        *("restaurant", "business", "venue", "hotel", "listing"),
    ),
    "value": (
        *("value", "rating", "score", "star", "weight", "count", "quantity", "qty"),
        *("play", "playcount", "click", "view", "listen", "overall", "preference"),
        *("frequency", "strength"),
    ),
    "time": (
        *("time", "timestamp", "ts", "date", "datetime", "createdat", "createdon"),
        *("eventtime", "eventdate", "eventtimestamp", "orderdate", "ordertime"),
        *("orderedat", "purchasedate", "purchasetime", "purchasedat", "invoicedate"),
        *("transactiondate", "reviewtime", "unixreviewtime", "unixtime", "dt"),
    ),
}
_KEYS = ("id", "key", "code", "no", "number")
_ROLE_OF = {word: role for role, words in SYNONYMS.items() for word in words}

# Words that are combined to names of times, like `order_timestamp` and `clicked_at`. Such names
# count only if no column has a name of `SYNONYMS` for times.
_DONE = (
    *("order", "event", "purchase", "buy", "click", "view", "visit", "watch", "listen"),
    *(
        "play",
        "rating",
        "rate",
        "review",
        "transaction",
        "session",
        "create",
        "invoice",
    ),
    *("interaction", "action", "request", "log", "checkout", "payment", "add", "read"),
)
_PAST = ("ed", "d", "")
_TIMES = {
    done + past + time
    for done in _DONE
    for past in _PAST
    for time in ("time", "timestamp", "date", "datetime", "ts", "at", "on", "dt")
}

# Names of columns in which low values often express a dislike.
_OPINIONS = {"rating", "score", "star", "overall", "preference"}


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The columns that the caller chose for roles, by number or by name.

    For a role that is None, a column is searched by its known names. Times are different:
    None leaves times out, and `BY_NAME` searches their column.

    Attributes:
      user: column with the rows' names.
      item: column with the items.
      value: column with the values.
      time: column with the times.
    """

    user: Column = None
    item: Column = None
    value: Column = None
    time: TimeColumn = BY_NAME

    def __bool__(self) -> bool:
        return any(self.of(role) is not None for role in SYNONYMS)

    def of(self, role: str) -> Column:
        """The column that was chosen for a role, or None."""
        column = getattr(self, role)
        return None if column is BY_NAME else column

    def roles(self, *, indicator: bool = False) -> list[str]:
        """The roles for which a column is used or searched."""
        left_out = {"value"} if indicator else set()
        left_out |= {"time"} if self.time is None else set()
        return [role for role in SYNONYMS if role not in left_out]


_SHOWN = 100  # most columns that a message lists
# Names of columns that usually contain 1 for a click and 0 for none.
_LABELS = {"label", "labels", "click", "clicks", "clicked", "is_click", "is_clicked"}
# Most columns of a file: the header of a small compressed file could otherwise take minutes.
_MAX_COLUMNS = 2**16


@dataclasses.dataclass(frozen=True)
class SourceColumn:
    """A column of a source table, with facts for messages.

    Attributes:
      name: name of the column in the table; None if the table has no names.
      position: position of the column, counted from 0.
      type: type of the cells, in a word or two.
      sample: one of the cells, for messages; "" if no cell was read.
      of_folder: whether the column comes from the name of a folder, such as `dt=2024-01-01`.
      within: whether the column is a key of a nested JSON object.
    """

    name: str | None
    position: int
    type: str
    sample: str = dataclasses.field(default="", compare=False)
    of_folder: bool = dataclasses.field(default=False, compare=False)
    within: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        called = f"column {self.position}" if self.name is None else self.name
        return f"{called} ({self.type})"


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a table that were read, by role.

    >>> _ = pathlib.Path("bought.csv").write_text("customer,sku,price\\nann,tea,3\\n")
    >>> print(read("bought.csv").columns)
    user = customer (text), item = sku (text); not read: price; 1 rows, 1 items, 1 \
entries; every entry counts 1

    Commands print the text of this object when they read a file.

    Attributes:
      user: column with the rows' names; None if it is not needed.
      item: column with the items, or with lists of items.
      value: column with the values, or None.
      time: column with the times, or None.
      unread: names of the other columns, some with the reason why they are not read.
      account: numbers of rows, items and entries, and the use of values, as text.
      no_times: reason why no times were read although a column was chosen or found for them;
        "" if there is no such column.
      beside: columns without a role that were read, such as those of an
        `EventSchema`.
    """

    user: SourceColumn | None
    item: SourceColumn
    value: SourceColumn | None = None
    time: SourceColumn | None = None
    unread: tuple[str, ...] = ()
    account: str = ""
    no_times: str = ""
    beside: tuple[SourceColumn, ...] = ()

    def __str__(self) -> str:
        roles = [
            f"{role} = {column}"
            for role in SYNONYMS
            if (column := getattr(self, role)) is not None
        ]
        parts = [", ".join(roles)]
        if self.beside:
            parts.append(f"columns of events: {', '.join(map(str, self.beside))}")
        if self.unread:
            hint = _hint_of_clicks(self.unread, " (")
            parts.append(f"not read: {', '.join(self.unread)}{hint}{')' * bool(hint)}")
        return "; ".join([*parts, self.account] if self.account else parts)

    def without_times(self, column: SourceColumn, problem: str) -> Columns:
        """Removes the column of times; `problem` is the reason."""
        called = column.name or f"column {column.position}"
        return dataclasses.replace(
            self,
            time=None,
            unread=(*self.unread, f"{called} ({problem})"),
            no_times=f"{called!r} is the column of times, but {problem}",
        )

    def without_empty_times(self) -> Columns:
        """Removes the column of times, if there is one, because all its cells are empty."""
        if self.time is None:
            return self
        return self.without_times(self.time, "none of its cells has a time")

    def check_order(self, path: Path) -> None:
        """Raises DataError if there is a column of times that could not be read."""
        if self.no_times:
            raise DataError.at(
                path,
                f"the order was not read: {self.no_times}; convert it, name another column: "
                "time=COLUMN, or say that the order of the file is meant: time=None",
            )

    def accounted(self, matrix: CSR) -> Columns:
        """Adds a text (see `account_of`) about the entries that were read."""
        name = "" if self.value is None else self.value.name or ""
        is_opinion = not _forms(name).isdisjoint(_OPINIONS)
        account = account_of(matrix, is_opinion=is_opinion)
        return dataclasses.replace(self, account=account)


def account_of(matrix: CSR, *, is_opinion: bool = False) -> str:
    """A text with the numbers of rows, items and entries, and the use of the values.

    Args:
      matrix: matrix on the host, without padding.
      is_opinion: whether low values may be dislikes.
    """
    use = "every entry counts 1"
    if matrix.data is not None and len(matrix.data):
        low, high = np.min(matrix.data), np.max(matrix.data)
        spread = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        use = f"values of {spread} are weights"
        if is_opinion and low != high:
            use += ", so that the lowest is a weak like and not a dislike"
        use += " (with indicator=True every entry counts 1)"
    rows, items = matrix.shape
    return f"{rows:,} rows, {items:,} items, {matrix.nse:,} entries; {use}"


def account_of_histories(rows: int, items: int, entries: int, *, timed: bool) -> str:
    """A text with the numbers of histories, items and entries, and the source of their order."""
    return (
        f"{rows:,} histories of {items:,} items, {entries:,} entries in the order of "
        f"{'time' if timed else 'the file'}"
    )


def about_times(columns: Columns) -> str:
    """Advice for the end of an error about a wrong time."""
    return (
        f"({columns.time} is read as the time; choose another with time=COLUMN, or leave "
        "times out: time=None)"
    )


def about_values(columns: Columns) -> str:
    """Advice for the end of an error about a wrong value."""
    return (
        f"({columns.value} is read as the value; choose another with value=COLUMN, or "
        "ignore values with indicator=True)"
    )


def role_of(name: str) -> str | None:
    """The role for which a column's name is known, or None."""
    if (role := _known_role(name)) is None and _TIMES & _forms(_bare_name(name)):
        return "time"
    return role


def _known_role(name: str) -> str | None:
    """The role of a name by `SYNONYMS`, also if a table's name precedes it: `orders.user_id`."""
    for each in (name, _bare_name(name)):
        for word in _forms(each):
            if word in _ROLE_OF:
                return _ROLE_OF[word]
    return None


def _bare_name(name: str) -> str:
    """Removes a table's name from a column name, as exports of Hive and databases have it."""
    return re.sub(r"^\w+\.(?=\w+$)", "", name.strip())


def _forms(name: str) -> set[str]:
    """Spellings of a name to look up: in the singular, and without a word for a key."""
    word = "".join(c for c in name.lower() if c not in "_-." and not c.isspace())
    forms = {word, word.removesuffix("s")}
    for key in _KEYS:
        for end in (key, f"{key}s"):
            bare = {word.removesuffix(end)} | {word.removeprefix(key)}
            bare |= {form.removesuffix("s") for form in bare}
            forms |= {form for form in bare if _ROLE_OF.get(form) in ("user", "item")}
    return forms


def find_columns(
    path: Path,
    columns: Sequence[SourceColumn],
    chosen: Chosen,
    *,
    roles: Sequence[str] = tuple(SYNONYMS),
    item_by_type: Sequence[int] = (),
    beside: Sequence[int] = (),
    line: int | None = None,
) -> dict[str, int]:
    """Finds the position of each role's column.

    A role gets the column that the caller chose for it, otherwise the one whose name is known
    for it. Two columns with known names are an error, with two exceptions. A column of times
    in the file has precedence over one in the names of its folders. A key of a line's own
    JSON object has precedence over one of a nested object. User and item must have a column
    if they are among the roles; other roles without a column are left out.

    Args:
      path: name of the file in messages.
      columns: columns of the table.
      chosen: columns that the caller chose for roles.
      roles: roles to find columns for.
      item_by_type: positions of columns whose type allows only items. One of them is the
        column of items if no name is known.
      beside: positions of columns that have no role, whatever their names.
      line: number of the line in messages.

    Raises:
      DataError: a chosen column does not exist, or it is not clear which column has a role.
      ValueError: a column is chosen by name but the table has no names, or a column has
        two roles.
    """
    check_width(path, len(columns), line)
    at = {
        role: _position(path, columns, role, column, line)
        for role in roles
        if (column := chosen.of(role)) is not None
    }
    taken = [*at.values(), *beside]
    if len(set(taken)) < len(taken):
        described = ", ".join(f"{role} is {place}" for role, place in at.items())
        if of_events := [p for p in beside if p in at.values()]:
            described += f", and {of_events} are columns of events"
        raise ValueError(
            f"{path}: each role needs a column of its own, but {described}"
        )
    known = [None if c.name is None else role_of(c.name) for c in columns]
    surely = [None if c.name is None else _known_role(c.name) for c in columns]
    for role in roles:
        if role in at:
            continue
        found = [i for i, r in enumerate(known) if r == role and i not in taken]
        own = [i for i in found if not columns[i].of_folder]
        if own and role == "time":  # more exact than a folder's day
            found = own
        if outer := [i for i in found if not columns[i].within]:
            found = outer
        if sure := [i for i in found if surely[i] == role]:
            found = sure
        if not found and role == "item":
            found = [i for i in item_by_type if known[i] is None and i not in taken]
        if len(found) == 1:
            at[role] = found[0]
        elif found:
            names = " or ".join(repr(columns[i].name) for i in found[:_SHOWN])
            remedy = f"name it: {role}=COLUMN"
            remedy += ", or ignore values: indicator=True" * (role == "value")
            remedy += ", or leave times out: time=None" * (role == "time")
            problem = f"which column is the {role}, {names}"
            unclear(path, columns, problem, remedy, line)
        elif role in ("user", "item"):
            problem = f"no column has a name that is known for the {role}"
            remedy = f"name it: {role}=COLUMN, by its name or its number from 0"
            remedy += _hint_of_clicks([column.name for column in columns], "; or, ")
            unclear(path, columns, problem, remedy, line)
        elif role == "time" and (times := [i for i in beside if surely[i] == role]):
            name = columns[times[0]].name
            problem = f"{name!r} is a column of events, so that events have no time"
            remedy = "name another column, time=COLUMN, or take the order of the file"
            unclear(path, columns, problem, f"{remedy}, time=None", line)
    return at


def find_beside(
    path: Path,
    columns: Sequence[SourceColumn],
    names: Sequence[str],
    line: int | None = None,
    remedy: str = "it is a column of events",
) -> list[int]:
    """The positions of the columns with these names, which have no role.

    Raises:
      DataError: no column, or more than one, has such a name.
      ValueError: the columns have no names.
    """
    known = [column.name for column in columns]
    if names and columns and all(name is None for name in known):
        raise ValueError(f"{path}: columns have no names, so there is no {names[0]!r}")
    for name in names:
        if known.count(name) != 1:
            problem = "there is no column" if name not in known else "there are several"
            unclear(path, columns, f"{problem} {name!r}", remedy, line)
    return [known.index(name) for name in names]


def _hint_of_clicks(names: Iterable[str | None], before: str) -> str:
    """Advice to train a click model, if a column name is typical of labels; otherwise ""."""
    for name in names:
        if name is not None and name.lower() in _LABELS:
            return f"{before}if {name!r} has 1 for a click and 0 for none, train model='dlrm'"
    return ""


def check_width(path: Path, count: int, line: int | None = None) -> None:
    """Raises DataError if a table has too many columns."""
    if count > _MAX_COLUMNS:
        raise DataError.at(
            path,
            f"has {count:,} columns, but at most {_MAX_COLUMNS:,} are read; write only "
            "those that are needed",
            line=line,
        )


def unclear(
    path: Path,
    columns: Sequence[SourceColumn],
    problem: str,
    remedy: str,
    line: int | None = None,
) -> NoReturn:
    """Raises a DataError with a problem, its remedy, and a list of the columns."""
    listed = ", ".join(map(_described, columns[:_SHOWN]))
    if (more := len(columns) - _SHOWN) > 0:
        listed += f" and {more:,} more"
    message = f"{problem}; {remedy}. The columns are: {listed}"
    raise DataError.at(path, message, line=line)


def _described(column: SourceColumn) -> str:
    name = "" if column.name is None else f" {column.name!r}"
    sample = f", like {column.sample[:30]!r}" if column.sample else ""
    return f"{column.position}{name} ({column.type}{sample})"


def _position(
    path: Path,
    columns: Sequence[SourceColumn],
    role: str,
    column: int | str,
    line: int | None,
) -> int:
    """The position of the column that the caller chose by its number or name."""
    if isinstance(column, int):
        if 0 <= column < len(columns):
            return column
        problem = f"there is no column {column}"
    else:
        names = [known.name for known in columns]
        if all(name is None for name in names):
            raise ValueError(
                f"{role}={column!r} is a name, but with header=False columns have none; "
                "give its number from 0"
            )
        match names.count(column):
            case 1:
                return names.index(column)
            case 0:
                problem = f"there is no column {column!r}"
            case _:
                problem = f"there are several columns {column!r}"
    remedy = f"name another: {role}=COLUMN, by its name or its number from 0"
    unclear(path, columns, problem, remedy, line)
