"""Small shops with planted tastes: tables as CSV files."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Iterable

import numpy as np

ITEMS, LONGEST = 400, 200


def baskets(path: pathlib.Path, users: int) -> None:
    """Each user has a theme, from which most of his items come."""
    rng, themes = np.random.default_rng(0), 10
    rows: list[tuple[object, ...]] = []
    for user in range(users):
        count = min(int(rng.geometric(1 / 12)) + 3, LONGEST)
        theme = int(rng.integers(themes))
        own = theme + themes * (ITEMS // themes * rng.random(count) ** 1.5).astype(int)
        other = (ITEMS * rng.random(count) ** 2).astype(int)
        items = np.where(rng.random(count) < 0.7, own, other)
        rows += ((f"u{user}", f"i{item}") for item in np.unique(items))
    _write(path, ("user", "item"), rows)


def histories(path: pathlib.Path, users: int) -> None:
    """Each item has a successor, which follows it in two of three places."""
    rng = np.random.default_rng(0)
    successors = rng.permutation(ITEMS)
    rows: list[tuple[object, ...]] = []
    for user in range(users):
        count = LONGEST if user == 0 else min(int(rng.geometric(1 / 20)) + 3, LONGEST)
        item = int(rng.integers(ITEMS))
        for time in range(count):
            rows.append((f"u{user}", f"i{item}", time))
            follows = rng.random() < 2 / 3
            item = int(successors[item] if follows else ITEMS * rng.random() ** 2)
    _write(path, ("user", "item", "time"), rows)


def clicks(path: pathlib.Path, count: int) -> None:
    """The log odds are a number of the user, one of the item, and a slope of the price."""
    rng, ids = np.random.default_rng(0), 100
    of_user, of_item = rng.normal(0, 1.2, (2, ids))
    users, items = rng.integers(0, ids, (2, count))
    prices = rng.random(count)
    odds = of_user[users] + of_item[items] + 2 * prices - 1
    labels = rng.random(count) < 1 / (1 + np.exp(-odds))
    _write(
        path,
        ("label", "price", "user", "item"),
        (
            (int(label), f"{price:.4f}", f"u{user}", f"i{item}")
            for label, price, user, item in zip(
                labels, prices, users, items, strict=True
            )
        ),
    )


def _write(
    path: pathlib.Path, names: tuple[str, ...], rows: Iterable[tuple[object, ...]]
) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)
