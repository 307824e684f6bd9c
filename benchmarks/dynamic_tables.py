"""How long dynamic tables take: from ids to rows, lookups, eviction, training steps.

    python benchmarks/dynamic_tables.py keys --output keys.json
    python benchmarks/dynamic_tables.py lookup
    python benchmarks/dynamic_tables.py evict
    python benchmarks/dynamic_tables.py ten

`keys` looks for a million ids in a full table; `lookup` reads batches of 65,536 examples of 26 ids from dynamic tables, all ids found, and from static
ones; `evict` frees a 32nd of all parts of a table. `ten` has the sizes of dynamicemb's own
benchmark: ten tables, 1.05 million ids a step by a power law of 1.05, 350,000 of them distinct,
128 wide; read, and trained by rules of two kinds, static tables beside. `fit_mesh.py` times a
DLRM with such tables.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from report import save, versions
from timing import time_kernels
from workloads import zipf_ids

import sparsejax as sj
from sparsejax.embeddings import DynamicTableConfig, TableConfig, WideIds
from sparsejax.embeddings.dynamic import eviction
from sparsejax.embeddings.dynamic import state as states

BATCH, FEATURES, POWER = 65_536, 26, 1.05


def seconds(call, rounds=10):
    """The least of three means; `call` returns arrays."""
    jax.block_until_ready(call())
    found = []
    for _ in range(3):
        start, result = time.perf_counter(), None
        for _ in range(rounds):
            result = call()
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / rounds)
    return min(found)


def both(call):
    """Seconds by the clock, and of the GPU's programs alone."""
    taken = seconds(call)
    kernels = time_kernels(lambda _: jax.block_until_ready(call()), 5)
    return taken, sum(kernels.values()) / 1e6


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


def ids_of(rng, names, size, width=None):
    shape = size if width is None else (size, width)
    return WideIds.of(names[rng.integers(0, len(names), shape)])


def filled(tables, features, names, chunk):
    """A collection whose tables have a row for each name, if there is room."""
    embeddings = sj.embeddings.EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(embeddings, sj.optimizers.sgd(0.1))
    for start in range(0, len(names), chunk):
        ids = WideIds.of(np.resize(names[start : start + chunk], chunk))
        batch = jax.tree.map(jnp.asarray, embeddings.pack(dict.fromkeys(features, ids)))
        jax.block_until_ready(assign(embeddings, optimizer, batch))
    return embeddings, optimizer


def keys(rows, count=2**20):
    rng = np.random.default_rng(0)
    names = rng.integers(0, 2**63, int(rows * 0.97)).astype(np.uint64)
    tables = {"id": DynamicTableConfig(rows, 64, evict=None)}
    embeddings, optimizer = filled(tables, {"id": "id"}, names, count)
    stats = embeddings.stats()["id"]
    batch = jax.tree.map(
        jnp.asarray, embeddings.pack({"id": ids_of(rng, names, count)})
    )

    times = {
        "find": both(lambda: rows_of(embeddings, batch)),
        "find and read": both(lambda: read(embeddings, batch)),
        "find or insert": both(lambda: assign(embeddings, optimizer, batch)),
        "find or insert, and read": both(
            lambda: assign_and_read(embeddings, optimizer, batch)
        ),
    }
    each = {
        name: {"seconds": t, "kernel_seconds": k, "keys_per_second": count / t}
        for name, (t, k) in times.items()
    }
    return {"rows": stats.rows, "capacity": stats.capacity, "ids": count, **each}


def lookup(rows, dim):
    rng = np.random.default_rng(0)
    names = rng.integers(0, 2**63, int(rows * 0.9)).astype(np.uint64)
    features = {f"f{i}": f"f{i}" for i in range(FEATURES)}
    tables = {name: DynamicTableConfig(rows, dim) for name in features}
    embeddings, _ = filled(tables, features, names, BATCH)
    found = {}
    # Only one collection fits at a time.
    batches = {
        kind: {name: zipf_ids(rng, BATCH, len(names), exponent) for name in features}
        for kind, exponent in (("zipf .8", 0.8), ("uniform", 0.0))
    }
    for kind, places in batches.items():
        wide = {name: WideIds.of(names[at]) for name, at in places.items()}
        batch = jax.tree.map(jnp.asarray, embeddings.pack(wide))
        taken, kernels = both(functools.partial(read, embeddings, batch))
        index = both(functools.partial(rows_of, embeddings, batch))
        found[kind] = {"dynamic": taken, "dynamic_kernels": kernels}
        found[kind] |= dict(zip(("index", "index_kernels"), index, strict=True))
    del embeddings
    tables = {name: TableConfig(rows, dim, placement="rows") for name in features}
    static = sj.embeddings.EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    for kind, places in batches.items():
        ids = {name: jnp.asarray(at) for name, at in places.items()}
        batch = static.pack(ids)
        taken, kernels = both(functools.partial(read, static, batch))
        found[kind] |= {"static": taken, "static_kernels": kernels}
        found[kind]["ratio"] = found[kind]["dynamic"] / taken
    return {"rows": rows, "dim": dim, **found}


def ten(
    rows, dim, batch=2**20 // 10, ids=2_500_000, *, names=("sgd", "lazy_adam", "adam")
):
    features = {f"f{i}": f"f{i}" for i in range(10)}
    rng, found = np.random.default_rng(0), {"rows": rows, "dim": dim}
    given = [
        {name: zipf_ids(rng, batch, ids, POWER) for name in features} for _ in range(4)
    ]
    found["distinct"] = float(
        np.mean([sum(len(np.unique(v)) for v in each.values()) for each in given])
    )
    slope = jnp.asarray(rng.standard_normal((batch, 10 * dim), np.float32))
    rules = {
        "sgd": sj.optimizers.sgd(0.1),
        "lazy_adam": sj.optimizers.lazy_adam(0.01),
        "adam": sj.optimizers.adam(0.01),
    }

    @sj.jit
    def step(embeddings, optimizer, given, slope):
        if embeddings.indexes:
            given = embeddings.assign_rows(given, optimizer)

        def loss_fn(embeddings):
            return jnp.vdot(embeddings.concat(given), slope)

        loss, grads = optimizer.value_and_grad(loss_fn)(embeddings)
        optimizer.update(embeddings, grads)
        return loss

    for kind in ("dynamic", "static"):
        if kind == "dynamic":
            tables = dict.fromkeys(features, DynamicTableConfig(rows, dim))
            named = [
                {name: WideIds.of(v.astype(np.uint64)) for name, v in each.items()}
                for each in given
            ]
        else:
            tables = dict.fromkeys(features, TableConfig(ids, dim, placement="rows"))
            named = given
        found[kind] = {}
        for rule in names:
            embeddings = sj.embeddings.EmbeddingCollection(
                tables, features, rngs=nnx.Rngs(0)
            )
            optimizer = sj.Optimizer(embeddings, rules[rule])
            batches = [
                jax.tree.map(jnp.asarray, embeddings.pack(each)) for each in named
            ]
            for _ in range(2):  # new ids, then CUDA graphs
                for each in batches:
                    jax.block_until_ready(step(embeddings, optimizer, each, slope))
            taken, kernels = both(
                lambda embeddings=embeddings, optimizer=optimizer, batches=batches: [
                    step(embeddings, optimizer, each, slope) for each in batches
                ]
            )
            found[kind][rule] = {"seconds": taken / 4, "kernel_seconds": kernels / 4}
            if rule == "sgd":
                taken, kernels = both(
                    lambda embeddings=embeddings, batches=batches: [
                        read(embeddings, each) for each in batches
                    ]
                )
                found[kind]["read"] = {
                    "seconds": taken / 4,
                    "kernel_seconds": kernels / 4,
                }
            del embeddings, optimizer, batches
    return found


def evict(rows):
    """Of a full table without vectors; the arrays are overwritten."""
    table = DynamicTableConfig(rows, 1)
    embeddings = sj.embeddings.EmbeddingCollection(
        {"id": table}, {"id": "id"}, rngs=nnx.Rngs(0)
    )
    (stack,) = embeddings.stacks
    layout, configs = states.layout_of(stack), states.configs_of(stack)

    @jax.jit
    def full(key):
        state = states.empty(stack)
        index = state.index
        words = jax.random.bits(key, index.keys.shape, jnp.uint32)
        used = index.used.at[:, : layout.sizes[0]].set(True)
        slots = jax.random.randint(key, index.slots.shape, 0, layout.sizes[0])
        last = jax.random.randint(key, state.index.used.shape, 0, 2**30)
        index = index._replace(
            keys=words, used=used, slots=slots, num_free=0 * index.num_free
        )
        return state._replace(index=index, numbers=state.numbers | {"last": last})

    def freed(state):
        needed = jnp.ones_like(state.index.num_free)
        kept = jnp.zeros_like(state.index.used)
        return eviction.evict(configs, layout, state, needed, kept, jnp.int32(2**30))

    program = jax.jit(freed, donate_argnums=0)
    taken = []
    for i in range(4):
        state = jax.block_until_ready(full(jax.random.key(i)))
        start = time.perf_counter()
        jax.block_until_ready(program(state))
        taken.append(time.perf_counter() - start)
    return {"rows": rows, "seconds": min(taken[1:])}


PARTS = {"keys": keys, "lookup": lookup, "evict": evict, "ten": ten}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--rows", type=int, help="of each table")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--output", help="a JSON file")
    args = parser.parse_args()
    rows = args.rows or {"keys": 2**24, "evict": 50_000_000}.get(args.part, 2**20)
    options = {} if args.part in ("keys", "evict") else {"dim": args.dim}
    found = PARTS[args.part](rows, **options)
    save({"part": args.part, "versions": versions(), **found}, args.output)


if __name__ == "__main__":
    main()
