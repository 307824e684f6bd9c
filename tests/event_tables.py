"""Random events, and the expected result of preparing them."""

import collections
import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
from contents import Contents, contents

import sparsejax as sj


def entries(data: sj.SparseDataset) -> Contents:
    """The values by row and item, of rows that have entries."""
    return {row: found for row, found in contents(data).items() if found}


@contextlib.contextmanager
def repeats() -> Iterator[list[str]]:
    """Collects warnings about entries that `split_last` holds out with all of their events, while
    the context is open.
    """
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    texts = [str(each.message) for each in caught]
    told += [text for text in texts if "also have earlier events" in text]


def frequent(table, min_user, min_item):
    """The rows of a table whose users and items are frequent, found one by one."""
    pairs = set(zip(table["user"], table["item"], strict=True))
    while True:
        users = collections.Counter(user for user, _ in pairs)
        items = collections.Counter(item for _, item in pairs)
        kept = {
            (u, i) for u, i in pairs if users[u] >= min_user and items[i] >= min_item
        }
        if kept == pairs:
            break
        pairs = kept
    at = [n for n, p in enumerate(zip(*table.values(), strict=True)) if p[:2] in pairs]
    return {name: [column[n] for n in at] for name, column in table.items()}


# Two names of one kind differ in few code points; integers have many ties.
texts = st.text(
    st.one_of(st.sampled_from("aé\U0001f600 ,:\t"), st.characters(codec="utf-8")),
    min_size=1,
    max_size=4,
).filter(lambda name: "\0" not in name)
names = st.one_of(
    st.lists(texts, min_size=1, max_size=8, unique=True),
    st.lists(st.integers(-30, 200), min_size=1, max_size=8, unique=True),
)


@st.composite
def tables(draw):
    """Draws events, with values that can be added without rounding."""
    users, items = draw(names), draw(names)
    events = draw(
        st.lists(
            st.tuples(
                st.sampled_from(users),
                st.sampled_from(items),
                st.integers(-20, 20).map(lambda n: n / 8),
                st.integers(0, 5),
            ),
            min_size=1,
            max_size=60,
        )
    )
    columns = zip(*events, strict=True)
    return dict(zip(("user", "item", "value", "time"), map(list, columns), strict=True))


def many_events() -> pa.Table:
    """Events with a user who has most items, an item of a third of the users, and values that can
    be added without rounding.
    """
    rng = np.random.default_rng(0)
    item = rng.integers(0, 1500, 6000)
    item[rng.random(6000) < 1 / 3] = 7
    user = rng.integers(0, 400, 6000)
    user[:1500], item[:1500] = 3, np.arange(1500)
    value, when = rng.integers(1, 9, 6000) / 2, rng.permutation(6000)
    table = {"user": user, "item": item, "value": value, "when": when}
    return pa.table(table)


def expected(table: dict[str, list], kind: str, *, indicator: bool) -> Any:
    """The options for a kind of preparation, the expected parts, and the expected number of
    repeats.
    """

    def read(keep: Callable[[tuple], bool], **options) -> sj.SparseDataset:
        events = [e for e in zip(*table.values(), strict=True) if keep(e)]
        columns = map(list, zip(*events, strict=True))
        some = pa.table(dict(zip(table, columns, strict=False)))
        return sj.data.from_arrow(some, indicator=indicator, **options)

    whole = read(lambda event: True)
    if kind not in ("new", "all"):
        return *_expected(whole, kind), 0
    # Each part is read separately, so it has the values of its own events.
    events = list(zip(*table.values(), strict=True))
    earlier, later = ({e[:2] for e in events if (e[3] < 3) == side} for side in (1, 0))
    known = earlier if kind == "new" else set()
    train = read(lambda event: event[3] < 3)
    names = whole.feature_names
    heldout = read(lambda e: e[3] >= 3 and e[:2] not in known, features=names)
    options = {"split_time": 3} | ({"repeats": "all"} if kind == "all" else {})
    heldout = heldout.align_features(train.feature_names)
    return options, train, heldout, len(known & later)


def _expected(whole: sj.SparseDataset, kind: str):
    match kind:
        case "fraction":
            return {"split_fraction": 0.5, "seed": 3}, *whole.split(0.5, seed=3)
        case "last":
            # Among events at equal times, the one with the greater name is later.
            rank = np.argsort(np.argsort(whole.feature_names))
            order = rank[whole.matrix.indices].astype(np.int64)
            ranked = dataclasses.replace(whole, order=order)
            return {"split_last": 2}, *ranked.split_last(2)
        case "features":
            known = [*whole.feature_names[::2].tolist(), "no such item"]
            return {"features": known}, whole.align_features(known), None
    return {}, whole, None
