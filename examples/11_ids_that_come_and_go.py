"""Clicks of users who come and go: a dynamic table takes each new one, and forgets old ones.

Each day a tenth of the users leaves for good, and as many are new. The model is measured on a day
before it is trained on it. A vocabulary of the first day knows fewer users from day to day. The dynamic
table takes all of them, and those who were not seen for longest make room.

Run: python examples/11_ids_that_come_and_go.py
"""

import numpy as np
import pyarrow as pa

import sparsejax as sj

USERS, ITEMS = 2000, 50


def days(count: int, rows: int):
    """Examples of each day, by names; clicks are drawn from a known model."""
    rng = np.random.default_rng(0)
    users, first_free = np.arange(USERS), USERS
    taste, worth = rng.normal(size=100 * USERS), rng.normal(size=ITEMS)
    for _ in range(count):
        user, item = rng.choice(users, rows), rng.integers(0, ITEMS, rows)
        chance = 1 / (1 + np.exp(-2 * taste[user] - worth[item]))
        yield {
            "click": (rng.random(rows) < chance).astype(int),
            "user": [f"user {u}" for u in user],
            "item": [f"item {i}" for i in item],
        }
        gone = rng.choice(USERS, USERS // 10, replace=False)
        users[gone] = np.arange(first_free, first_free + len(gone))
        first_free += len(gone)


def main(num_days: int = 10, rows: int = 20_000) -> dict[str, list[float]]:
    """Trains both models day by day, and returns the AUC of each next day."""
    kinds = {"dynamic": sj.data.KeyColumn(), "fixed": sj.data.VocabularyColumn()}
    tables = sj.clicks.DynamicTables(num_rows=3072, evict="lru")
    models, first = {}, {}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number, examples in enumerate(days(num_days, rows)):
        for name, column in kinds.items():
            schema = sj.ClickSchema("click", ids={"user": column, "item": column})
            known = first.get(name)
            clicks = sj.read_clicks(pa.table(examples), schema, features=known)
            if known is None:
                first[name] = clicks
                config = sj.DLRMConfig(
                    dim=8, dynamic=tables if name == "dynamic" else None
                )
                models[name] = sj.build(config, clicks, sj.optimizers.adam(0.01))
            else:
                auc = sj.evaluate(models[name][0], clicks)["auc"]
                found[name].append(auc)
            model, optimizer = models[name]
            sj.fit(model, optimizer, clicks, batch_size=256, num_epochs=1)
        if number:
            print(
                f"day {number}:", {name: round(a[-1], 4) for name, a in found.items()}
            )
    model = models["dynamic"][0]
    print(model.embeddings.stats()["user"])
    return found


if __name__ == "__main__":
    main()
