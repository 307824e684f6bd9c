"""Clicks of 20 days on whose each day a tenth of the users is new: which table tells the next day?

    python benchmarks/dynamic_quality.py --seeds 5 --output benchmarks/results/dynamic_quality.json
    python benchmarks/dynamic_quality.py --zipf 1.05 --active 10000 --examples 20 --seeds 5

Users that leave do not come back, and few users make most clicks: the n-th of a day n^-zipf as many
as the first. A model is trained on each day,
once through, and measured on the next day before it is trained on that. Its users have a table
without limit, a dynamic one of 30 % of all users ever seen, one of the same size in which users
share rows by a hash, or the vocabulary of the first day, the most active ones up to that size.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import Admit, DynamicTableConfig, FeatureConfig, TableConfig
from sparsejax.metrics import clicks as metrics

DAYS, ITEMS, DIM, BATCH = 20, 1000, 8, 2048
INIT = jax.nn.initializers.normal(0.05)


class Model(nnx.Module):
    """A bias of the user and of the item, and the product of their vectors."""

    def __init__(self, table, seed):
        tables = {"user": table, "item": TableConfig(ITEMS, DIM, init=INIT)}
        self.embeddings = sj.embeddings.EmbeddingCollection(
            tables, {name: FeatureConfig(name) for name in tables}, rngs=nnx.Rngs(seed)
        )

    def __call__(self, ids):
        rows = self.embeddings(ids)
        user, item = rows["user"], rows["item"]
        return user[:, 0] + item[:, 0] + jnp.sum(user[:, 1:] * item[:, 1:], axis=1)


@sj.jit
def step(model, optimizer, ids, click):
    if model.embeddings.indexes:
        ids = model.embeddings.assign_rows(ids, optimizer)

    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(ids), click).sum()

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@sj.jit
def scored(model, optimizer, ids):
    with optimizer.reading(model):
        return model(ids)


def days(active, examples, zipf, seed):
    """For each day the users, the items, whether they were clicked; and who is there."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(4 * active).astype(np.uint64) * np.uint64(2**40 + 27)
    planted = rng.normal(size=(4 * active, DIM)) / np.sqrt(DIM) * 1.5
    items = rng.normal(size=(ITEMS, DIM)) / np.sqrt(DIM) * 1.5
    chosen = np.arange(active, dtype=float) + 1
    chosen = np.cumsum(chosen**-zipf)
    here, arrived = np.arange(active), active
    for _ in range(DAYS + 1):
        at = np.searchsorted(chosen, rng.random(examples) * chosen[-1])
        user, item = here[np.minimum(at, active - 1)], rng.integers(0, ITEMS, examples)
        logit = planted[user, 0] * 2 + items[item, 0]
        logit += np.sum(planted[user, 1:] * items[item, 1:], axis=1) * 2
        click = rng.random(examples) < 1 / (1 + np.exp(-logit))
        there = names[here]  # the most active one first
        yield names[user], item.astype(np.int32), click.astype(np.float32), there
        # As many are new, at places of all activities.
        leaving = rng.choice(active, active // 10, replace=False)
        here[leaving] = np.arange(arrived, arrived + len(leaving))
        arrived += len(leaving)


def measured(events, table, encode, seed):
    """The AUC of each day but the first, before it is trained on."""
    model = Model(table, seed)
    optimizer = sj.Optimizer(model, sj.optimizers.adagrad(0.2))
    found = []
    for day, (users, items, clicks, _) in enumerate(events):
        batches = [
            model.embeddings.pack({"user": encode(users[i]), "item": items[i]})
            for i in np.split(np.arange(len(users)), len(users) // BATCH)
        ]
        if day:
            scores = [np.asarray(scored(model, optimizer, ids)) for ids in batches]
            found.append(metrics.auc(np.concatenate(scores), clicks))
        for ids, click in zip(batches, np.split(clicks, len(batches)), strict=True):
            step(model, optimizer, ids, click)
    return found, model.embeddings.stats().get("user")


def compared(active, examples, zipf, seed):
    """The AUC of each form of table, on the stream and from the first vectors of one seed."""
    events = list(days(active, examples, zipf, seed))
    seen = np.unique(np.concatenate([users for users, *_ in events]))
    few = int(0.3 * len(seen))
    first, counts = np.unique(events[0][0], return_counts=True)
    known = np.sort(first[np.argsort(-counts, kind="stable")[:few]])

    def of_vocabulary(users):
        at = np.minimum(np.searchsorted(known, users), len(known) - 1)
        return np.where(known[at] == users, at + 1, 0).astype(np.int32)

    def hashed(users):
        mixed = users * np.uint64(0x9E3779B97F4A7C15)
        return ((mixed >> np.uint64(32)) % np.uint64(few)).astype(np.int32)

    def same(users):
        return users

    def dynamic(rows, **options):
        return DynamicTableConfig(rows, DIM, init=INIT, **options)

    def static(rows):
        return TableConfig(rows, DIM, init=INIT, placement="rows")

    forms = {
        "without limit": (dynamic(2 * len(seen), evict=None), same),
        "dynamic, lru": (dynamic(few), same),
        "hashed": (static(few), hashed),
        "vocabulary of day 1": (static(len(known) + 1), of_vocabulary),
        "dynamic, lfu": (dynamic(few, evict="lfu"), same),
        "dynamic, lru, seen twice": (dynamic(few, admit=Admit(count=2)), same),
    }
    result = {"users": len(seen), "rows": few, "auc": {}}
    print(f"zipf {zipf}, seed {seed}: {len(seen):,} users, {few:,} rows", flush=True)
    for name, (table, encode) in forms.items():
        start = time.perf_counter()
        found, stats = measured(events, table, encode, seed)
        result["auc"][name] = {
            "days 11 to 20": float(np.mean(found[10:])),
            "refused": None if stats is None else stats.refused,
            "evicted": None if stats is None else stats.evicted,
        }
        taken = time.perf_counter() - start
        print(f"{name:26} {np.mean(found[10:]):.4f}  {taken:.0f} s {stats}", flush=True)
    return result


def summed_up(runs):
    """For each form the mean of all seeds, and how far it is from tables without limit."""
    found = {}
    for name in runs[0]["auc"]:
        pairs = [
            [run["auc"][form]["days 11 to 20"] for form in (name, "without limit")]
            for run in runs
        ]
        off = np.subtract(*np.transpose(pairs))
        found[name] = {
            "mean": float(np.mean(pairs, axis=0)[0]),
            "off": float(np.mean(off)),
            "of each seed": off.tolist(),
        }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--active", type=int, default=40_000, help="users of a day")
    parser.add_argument("--examples", type=int, default=40, help="batches of a day")
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.5, 1.3, 1.2])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--output", help="a JSON file")
    args = parser.parse_args()
    sizes = args.active, args.examples * BATCH
    found = {}
    for zipf in args.zipf:
        seeds = range(args.first, args.first + args.seeds)
        runs = [compared(*sizes, zipf, seed) for seed in seeds]
        found[f"zipf {zipf}"] = {
            "active": args.active,
            "examples a day": sizes[1],
            "all": summed_up(runs),
            "seeds": runs,
        }
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
