"""Which column of a table holds the users, which the items and which the values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparsejax.data.files import DataError, Path

Column = int | str | None

# Compared without case, spaces, "_" and "-".
_USER_WORDS = {"user", "userid", "uid", "visitor", "visitorid", "customer"}
_USER_WORDS |= {"customerid", "session", "sessionid", "reviewerid", "row"}
_ITEM_WORDS = {"item", "itemid", "iid", "movie", "movieid", "product", "productid"}
_ITEM_WORDS |= {"sku", "article", "articleid", "artist", "artistid", "track", "trackid"}
_ITEM_WORDS |= {"song", "songid", "book", "bookid", "isbn", "asin", "feature"}
_VALUE_WORDS = {"value", "rating", "score", "weight", "count", "plays", "playcount"}
_VALUE_WORDS |= {"quantity", "clicks", "views", "overall"}
_TIME_WORDS = {"timestamp", "time", "date", "datetime", "ts", "unixreviewtime"}


def find_columns(
    path: Path,
    count: int,
    names: Sequence[str] | None,
    *,
    user: Column = None,
    item: Column = None,
    value: Column = None,
    users: Iterable[int] | None = None,
    items: Iterable[int] | None = None,
    values: Iterable[int] | None = None,
    with_user: bool = True,
    line: int | None = None,
) -> tuple[int | None, int, int | None]:
    """The positions of the user, the item and the value column (None: there is none).

    What is not given is the first column with such a name, otherwise the first that is
    left; the value is not looked for in columns named like a time.

    Args:
      path: what messages name.
      count: number of columns.
      names: of the columns, if they have some.
      user: a column by number or by name.
      item: the same.
      value: the same.
      users: columns that `user` is chosen from; all by default.
      items: the same for `item`.
      values: the same for `value`.
      with_user: whether a user column is looked for, if `user` does not name it.
      line: what messages name, too.

    Raises:
      DataError: there is no such column.
      ValueError: a name where columns have none, or a column is taken twice.
    """
    words = [""] * count if names is None else [_word(name) for name in names]

    def given(role: str, column: Column) -> int | None:
        if column is None:
            return None
        if isinstance(column, str):
            if names is None:
                raise ValueError(f"{role}={column!r} is a name but header=False")
            if column in names:
                return names.index(column)
            known = f"the columns are {', '.join(names)}"
            raise DataError.at(
                path, f"no column {column!r} for {role}=; {known}", line=line
            )
        if 0 <= column < count:
            return column
        message = f"no column {column} for {role}=; there are {count}, counted from 0"
        raise DataError.at(path, message, line=line)

    def chosen(wanted: set[str], among: Iterable[int] | None, *taken) -> int | None:
        among = range(count) if among is None else among
        free = [at for at in among if at not in taken]
        named = (at for at in free if {words[at], words[at].rstrip("s")} & wanted)
        return next(named, free[0] if free else None)

    user_at, item_at = given("user", user), given("item", item)
    value_at = given("value", value)
    if user_at is None and with_user:
        user_at = chosen(_USER_WORDS, users, item_at)
    if item_at is None:
        item_at = chosen(_ITEM_WORDS, items, user_at)
    if item_at is None or (user_at is None and with_user):
        known = ", ".join(names or [])
        message = (
            f"expected a user and an item column, of text or integers, got {known}"
        )
        raise DataError.at(path, message, line=line)
    if value is None:
        among = range(count) if values is None else values
        among = [at for at in among if words[at] not in _TIME_WORDS]
        value_at = chosen(_VALUE_WORDS, among, user_at, item_at)
    taken = [at for at in (user_at, item_at, value_at) if at is not None]
    if len(set(taken)) < len(taken):
        raise ValueError(
            "user, item and value must be three different columns, got "
            f"{user_at}, {item_at} and {value_at}"
        )
    return user_at, item_at, value_at


def is_header(cells: Sequence[str]) -> bool:
    """Whether cells look like the header of a file of pairs."""
    return not (_USER_WORDS | _ITEM_WORDS).isdisjoint(map(_word, cells))


def _word(cell: str) -> str:
    return cell.strip().lower().translate(str.maketrans("", "", " _-"))
