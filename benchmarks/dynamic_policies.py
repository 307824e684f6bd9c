"""How much could another rule of eviction gain on the planted clicks of `dynamic_quality.py`?

    python benchmarks/dynamic_policies.py --seeds 5 --output benchmarks/results/dynamic_policies.json

The same streams and the same model, in NumPy alone, where a rule may know whatever it likes. A rule
gives each user who has a row a score, and those with the lowest lose theirs: of a part that is full,
a 32nd of its rows at least, as in a dynamic table. *last seen* is `evict="lru"`. *fading counts* are
clicks, of which each counts e-fold less after two days. *the likeliest to click* are those with the
highest expected number of clicks a day, from how often and how long each user was seen, from the
share of users that leave, and also from clicks before a user lost the row, which no table keeps.
*who is there* knows what no table can know: who has left, and how often each user clicks.
"""

import argparse
import json
import pathlib

import numpy as np
from dynamic_quality import BATCH, DIM, ITEMS, days

PARTS, SHARE, RATE, FIRST = 256, 32, 0.2, 0.1
LEAVE = 0.1  # of the users, each day


class Rows:
    """Vectors that Adagrad trains."""

    def __init__(self, count, rng):
        self.first = rng.normal(size=(count, DIM)) * 0.05
        self.w = self.first.copy()
        self.squares = np.full((count, DIM), FIRST)

    def add(self, ids, gradients):
        some, where = np.unique(ids, return_inverse=True)
        total = [np.bincount(where, g, len(some)) for g in gradients.T]
        total = np.stack(total, axis=1)
        self.squares[some] += total**2
        self.w[some] -= RATE * total / np.sqrt(self.squares[some] + 1e-7)


class Table:
    """Which users have a row. Time is in days."""

    def __init__(self, rng, users, rows, parts, score):
        self.part = rng.integers(0, parts, users)
        self.size, self.score = rows // parts, score
        self.used = np.zeros(parts, np.int64)
        self.has = np.zeros(users, bool)
        self.begun, self.last = np.full(users, np.inf), np.zeros(users)
        self.clicks, self.fading = np.zeros(users), np.zeros(users)
        self.there = np.zeros(users)

    def see(self, users, counts, now, rows):
        self.now = now
        self.begun[users] = np.minimum(self.begun[users], now)
        faded = np.exp((self.last[users] - now) / 2)
        self.fading[users] = self.fading[users] * faded + counts
        self.clicks[users] += counts
        self.last[users] = now
        new = users[~self.has[users]]
        for part in np.unique(self.part[new]):
            mine = new[self.part[new] == part]
            lacking = len(mine) - (self.size - self.used[part])
            if lacking > 0:
                can = np.setdiff1d(
                    np.flatnonzero(self.has & (self.part == part)), users
                )
                order = np.argsort(self.score(self, can), kind="stable")
                gone = can[order[: max(lacking, -(-self.size // SHARE))]]
                self.has[gone] = False
                self.used[part] -= len(gone)
                mine = mine[: self.size - self.used[part]]
            self.has[mine] = True
            self.used[part] += len(mine)
            rows.w[mine], rows.squares[mine] = rows.first[mine], FIRST


def likeliest(table, users):
    """Clicks a day while a user was seen, times the chance that the user is still there."""
    since = table.now - table.last[users]
    seen = table.last[users] - table.begun[users]
    rate = (table.clicks[users] + 0.5) / (np.maximum(seen, 0.02) + since / 2 + 0.5)
    silent = np.exp(-(rate + LEAVE) * since)
    left = LEAVE / (rate + LEAVE) * (1 - silent)
    return rate * silent / (silent + left)


SCORES = {
    "last seen": lambda table, users: table.last[users],
    "fading counts": lambda table, users: (
        np.log(table.fading[users]) + table.last[users] / 2
    ),
    "the likeliest to click": likeliest,
    "who is there": lambda table, users: table.there[users],
}


def auc(scores, clicks):
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    ones = clicks.sum()
    return (ranks[clicks > 0].sum() - ones * (ones + 1) / 2) / (
        ones * (len(clicks) - ones)
    )


def measured(events, rates, seed, *, rows, table=None, row_of=None):
    """The mean AUC of days 11 to 20, each before it is trained on."""
    rng = np.random.default_rng([seed, 1])
    users, items, found = Rows(rows, rng), Rows(ITEMS, rng), []

    def logits(w, v):
        return w[:, 0] + v[:, 0] + np.sum(w[:, 1:] * v[:, 1:], axis=1)

    def read(user, row):
        if table is None:
            return users.w[row]
        return np.where(table.has[user][:, None], users.w[row], users.first[row])

    for day, (user, item, click, there) in enumerate(events):
        row = user if row_of is None else row_of[user]
        if table is not None:
            table.there[:] = 0
            table.there[there] = rates
        if day > 10:
            found.append(auc(logits(read(user, row), items.w[item]), click))
        for i in range(0, len(user), BATCH):
            u, r, k = (each[i : i + BATCH] for each in (user, row, item))
            mine = np.ones(len(u), bool)
            if table is not None:
                now = day + i / len(user)
                table.see(*np.unique(u, return_counts=True), now, users)
                mine = table.has[u]
            w, v = read(u, r), items.w[k]
            slope = 1 / (1 + np.exp(-logits(w, v))) - click[i : i + BATCH]
            for array, ids, other in ((users, r, v), (items, k, w)):
                g = np.concatenate([slope[:, None], slope[:, None] * other[:, 1:]], 1)
                if array is users:
                    ids, g = ids[mine], g[mine]
                array.add(ids, g)
    return float(np.mean(found))


def compared(active, examples, zipf, seed):
    """The AUC of each rule, as a difference to tables without limit."""
    events = list(days(active, examples, zipf, seed))
    names = np.unique(np.concatenate([there for *_, there in events]))
    seen = len(np.unique(np.concatenate([users for users, *_ in events])))
    events = [
        (np.searchsorted(names, u), i, c, np.searchsorted(names, there))
        for u, i, c, there in events
    ]
    rates = (np.arange(active) + 1.0) ** -zipf
    rng = np.random.default_rng([seed, 2])
    common = events, rates, seed
    whole = measured(*common, row_of=np.arange(len(names)), rows=len(names))
    found = {"without limit": whole}
    few = int(0.3 * seen)
    found["users share rows by a hash"] = (
        measured(*common, row_of=rng.integers(0, few, len(names)), rows=few) - whole
    )
    for share, name, parts in (
        *((0.3, name, PARTS) for name in SCORES),
        *((0.3, name, 1) for name in SCORES),
        (0.4, "last seen", PARTS),
        (0.5, "last seen", PARTS),
    ):
        rows = -(-int(share * seen) // PARTS) * PARTS
        table = Table(rng, len(names), rows, parts, SCORES[name])
        key = f"{name}, {share:.0%} of the rows, {parts} parts"
        found[key] = measured(*common, table=table, rows=len(names)) - whole
    return {"users": seen, **found}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", help="a JSON file")
    args = parser.parse_args()
    runs = [compared(10_000, 20 * BATCH, 1.05, seed) for seed in range(args.seeds)]
    found = {name: float(np.mean([r[name] for r in runs])) for name in runs[0]}
    for name, mean in found.items():
        print(f"{name:50} {mean:+.5f}", flush=True)
    if args.output:
        text = json.dumps(found, indent=2) + "\n"
        pathlib.Path(args.output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
