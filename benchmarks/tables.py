"""Times tables whose ids come and go, and tables in host memory.

    python benchmarks/tables.py keys --output keys.json
    python benchmarks/tables.py ten
    python benchmarks/tables.py host --gigabytes 64 --share .2 --compare 32

`keys` looks for a million ids in a full dynamic table. `ten` has the sizes of dynamicemb's own
benchmark: ten tables, 1.05 million ids a step by a power law of 1.05, 350,000 of them distinct,
128 wide; it reads them, and trains them by two kinds of rules, and compares static tables. `host`
trains a table of `--gigabytes` in host memory, on batches of 65,536 examples of 26 ids. The device
has slots for a fraction of its rows, `--share`. First the rows of `--warm` batches are copied, so
that the device is full and rows must leave. With `--compare` a table of that size on the device is
timed, too; with `--dynamic` both are dynamic tables. Batches are made and packed in advance.
`fit_mesh.py` times a DLRM with dynamic tables.
"""

import argparse
import concurrent.futures
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from report import save, versions
from timing import time_kernels
from workloads import keys_of, zipf_ids

import sparsejax as sj
from sparsejax.embeddings import DynamicTableConfig, FeatureConfig, TableConfig, WideIds

FEATURES, DIM, POWER = 26, 128, 1.05


def both(call, rounds=10):
    """Seconds of a call by the clock, and of its GPU programs; `call` returns arrays."""
    jax.block_until_ready(call())
    found = []
    for _ in range(3):
        start = time.perf_counter()
        result = [call() for _ in range(rounds)][-1]
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / rounds)
    kernels = time_kernels(lambda _: jax.block_until_ready(call()), 5)
    return {"seconds": min(found), "kernel_seconds": sum(kernels.values()) / 1e6}


@sj.jit
def assign(embeddings, optimizer, ids):
    rows = embeddings.assign_rows(ids, optimizer)
    return [x.indices for x in rows.stacks.values()]


@sj.jit
def assign_and_read(embeddings, optimizer, ids):
    return embeddings.concat(embeddings.assign_rows(ids, optimizer))


@sj.jit
def read(embeddings, ids):
    return embeddings.concat(ids)


@sj.jit
def rows_of(embeddings, ids):
    return [store.matrix(ids).indices for store in embeddings.stores()]


@sj.jit
def step(embeddings, optimizer, ids, slope):
    if embeddings.indexes:
        ids = embeddings.assign_rows(ids, optimizer)

    def loss_fn(embeddings):
        return jnp.vdot(embeddings.concat(ids), slope)

    loss, grads = optimizer.value_and_grad(loss_fn)(embeddings)
    optimizer.update(embeddings, grads)
    return loss


def made(tables, features, rule):
    """Makes a collection of tables, and its optimizer."""
    embeddings = sj.embeddings.EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    return embeddings, sj.Optimizer(embeddings, rule)


def keys(args):
    rng, count = np.random.default_rng(0), args.batch or 2**20
    names = rng.integers(0, 2**63, int(args.rows * 0.97)).astype(np.uint64)
    tables = {"id": DynamicTableConfig(args.rows, 64, evict=None)}
    embeddings, optimizer = made(tables, {"id": "id"}, sj.optimizers.sgd(0.1))

    def packed(ids):
        batch = embeddings.pack({"id": WideIds.of(ids)})
        return jax.tree.map(jnp.asarray, batch)

    for start in range(0, len(names), count):  # each printed line has some of the names
        ids = packed(np.resize(names[start : start + count], count))
        jax.block_until_ready(assign(embeddings, optimizer, ids))
    stats = embeddings.stats()["id"]
    ids = packed(names[rng.integers(0, len(names), count)])
    times = {
        "find": both(lambda: rows_of(embeddings, ids)),
        "find and read": both(lambda: read(embeddings, ids)),
        "find or insert": both(lambda: assign(embeddings, optimizer, ids)),
        "find or insert, and read": both(
            lambda: assign_and_read(embeddings, optimizer, ids)
        ),
    }
    for each in times.values():
        each["keys_per_second"] = count / each["seconds"]
    return {"rows": stats.rows, "capacity": stats.capacity, "ids": count, **times}


def ten(args):
    features = {f"f{i}": f"f{i}" for i in range(10)}
    rng, batch = np.random.default_rng(0), (args.batch or 2**20) // 10
    ids = min(2_500_000, 5 * args.rows // 2)
    drawn = [{n: zipf_ids(rng, batch, ids, POWER) for n in features} for _ in range(4)]
    distinct = [sum(len(np.unique(v)) for v in each.values()) for each in drawn]
    found: dict[str, Any] = {"rows": args.rows, "dim": DIM}
    found |= {"distinct": float(np.mean(distinct))}
    slope = jnp.asarray(rng.standard_normal((batch, 10 * DIM), np.float32))
    rules = sj.optimizers.sgd(0.1), sj.optimizers.lazy_adam(0.01)
    for kind, table in (
        ("dynamic", DynamicTableConfig(args.rows, DIM)),
        ("static", TableConfig(ids, DIM, placement="rows")),
    ):
        named = drawn
        if kind == "dynamic":
            wide = lambda v: WideIds.of(v.astype(np.uint64))
            named = [{n: wide(v) for n, v in each.items()} for each in drawn]
        found[kind] = {}
        for rule in (*rules, sj.optimizers.adam(0.01)):
            embeddings, optimizer = made(dict.fromkeys(features, table), features, rule)
            batches = [jax.tree.map(jnp.asarray, embeddings.pack(x)) for x in named]
            train = functools.partial(step, embeddings, optimizer)

            def trained(train=train, batches=batches):
                return [train(each, slope) for each in batches]

            # The first pass assigns rows to new ids, the second records CUDA graphs.
            for _ in range(2):
                jax.block_until_ready(trained())
            found[kind][rule.name] = both(trained)
            if rule is rules[0]:
                found[kind]["read"] = both(
                    lambda e=embeddings, b=batches: [read(e, each) for each in b]
                )
            # Frees the memory for the next tables.
            del embeddings, optimizer, batches, train, trained
        for each in found[kind].values():
            each |= {name: value / len(drawn) for name, value in each.items()}
    return found


def measured(table, rows, count, args):
    """Milliseconds of a step on the last of some batches, and bytes that it moves."""
    batch = args.batch or 65_536
    config = FeatureConfig("ids", combiner=None, length=FEATURES)
    rule = sj.optimizers.rowwise_adagrad(0.01)
    embeddings, optimizer = made({"ids": table}, {"ids": config}, rule)

    def packed(seed):
        ids = zipf_ids(np.random.default_rng(seed), (batch, FEATURES), rows, POWER)
        return embeddings.pack(
            {"ids": WideIds.of(keys_of(ids)) if args.dynamic else ids}
        )

    with concurrent.futures.ThreadPoolExecutor() as pool:
        batches = list(pool.map(packed, np.random.SeedSequence(0).spawn(count)))
    slope = jnp.ones((batch, FEATURES * DIM)) / batch

    def milliseconds(batches):
        start = time.perf_counter()
        losses = [step(embeddings, optimizer, ids, slope) for ids in batches]
        jax.block_until_ready(losses)
        return 1e3 * (time.perf_counter() - start) / len(losses)

    last = batches[-args.steps :]
    if not table.host:
        milliseconds(last[:3])
        return {"ms": min(milliseconds(last) for _ in range(2))}
    (kernel,) = embeddings.kernels.values()
    warm, first = batches[: args.warm], batches[args.warm : -args.steps]
    for _ in embeddings.staged(warm, optimizer):
        pass
    jax.block_until_ready(kernel[...])
    # The first call compiles programs.
    milliseconds(embeddings.staged(first, optimizer))
    host = kernel.get_metadata()["host"]
    before = host.bytes_moved
    taken = milliseconds(embeddings.staged(last, optimizer))
    moved = (host.bytes_moved - before) / len(last) / 1e6
    # The last batch is repeated, so that all of its rows are on the device.
    seen = milliseconds(embeddings.staged([last[-1]] * 10, optimizer))
    found = {"ms": taken, "MB a step": moved, "GB/s": moved / taken}
    return found | {"ms of a batch that was seen": seen}


def host(args):
    rows, beside = (int(n * 1e9 / (4 * DIM)) for n in (args.gigabytes, args.compare))
    here = int(rows * args.share)
    if args.dynamic:
        table = DynamicTableConfig(here, DIM, host_rows=rows)
        other = DynamicTableConfig(beside, DIM) if beside else None
    else:
        table = TableConfig(rows, DIM, host=True, device_rows=here)
        other = TableConfig(beside, DIM, placement="rows") if beside else None
    found: dict[str, Any] = {"rows": rows, "gigabytes": args.gigabytes}
    found["share"] = args.share
    found["host"] = measured(table, rows, args.warm + 2 * args.steps, args)
    if other is not None:
        found["device"] = {"gigabytes": args.compare}
        found["device"] |= measured(other, beside, args.steps, args)
        found["ratio"] = found["device"]["ms"] / found["host"]["ms"]
    return found


PARTS = {"keys": keys, "ten": ten, "host": host}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--rows", type=int, help="of each table of `keys` and `ten`")
    parser.add_argument("--batch", type=int, help="ids of a step; examples of `host`")
    parser.add_argument("--gigabytes", type=float, default=64)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--warm", type=int, default=300, help="batches before")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--compare", type=float, default=0, help="GB on the device")
    parser.add_argument("--dynamic", action="store_true", help="dynamic tables")
    parser.add_argument("--output", help="a JSON file")
    args = parser.parse_args()
    args.rows = args.rows or (2**24 if args.part == "keys" else 2**20)
    found = PARTS[args.part](args)
    save({"part": args.part, "versions": versions(), **found}, args.output)


if __name__ == "__main__":
    main()
