"""An hour's stream: does a table that is full go on for long, as it should?

    python benchmarks/dynamic_stream.py --output benchmarks/results/dynamic_stream.json

10,000 steps, each of which has ids that were never seen, into a table that has been full since the
first thousand. Beside it a Python dictionary does what the documentation says: a part whose rows are
used up frees those that were seen longest ago. The ids that have a row must be the same, so none
loses its row before its time; nothing may be compiled after the first steps.
"""

import argparse
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import DynamicTableConfig, EmbeddingCollection
from sparsejax.ops import hash_index

BATCH, PARTS = 128, 256
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Model(nnx.Module):
    """Vectors of one feature."""

    def __init__(self, rows):
        tables = {"id": DynamicTableConfig(rows, 4, evict="lru")}
        self.embeddings = EmbeddingCollection(tables, {"id": "id"}, rngs=nnx.Rngs(0))


@sj.jit
def step(model, optimizer, ids, target):
    rows = model.embeddings.assign_rows(ids, optimizer)

    def loss_fn(model):
        return jnp.mean((model.embeddings.concat(rows) - target) ** 2)

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


class Exact:
    """The ids of each part, and when each was last seen."""

    def __init__(self, rows):
        self.size = rows // PARTS
        self.parts = [{} for _ in range(PARTS)]
        self.evicted = 0

    def add(self, keys, parts, now):
        size = self.size
        waiting = {}
        for key, part in dict(zip(keys, parts, strict=True)).items():
            if key in self.parts[part]:
                self.parts[part][key] = now
            else:
                waiting.setdefault(part, []).append(key)
        for part, new in waiting.items():
            rows = self.parts[part]
            if (lacking := len(rows) + len(new) - size) > 0:
                can = sorted((last, k) for k, last in rows.items() if last < now)
                for _, key in can[: max(lacking, math.ceil(size / 32))]:
                    del rows[key]
                    self.evicted += 1
            for key in sorted(new)[: size - len(rows)]:
                rows[key] = now

    def ids(self):
        return sorted(key for part in self.parts for key in part)


def measured(steps, rows=8192, checks=20):
    """The result of a stream of so many steps."""
    model, exact = Model(rows), Exact(rows)
    optimizer = sj.Optimizer(model, sj.optimizers.adam(0.01))
    rng, hits, compiled = np.random.default_rng(0), 0, []

    def told(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(told)
    most, same, warm, newest = 0, 0, 0, 0
    begun = time.perf_counter()
    for now in range(steps):
        # Some are new; the others were new lately, few of them long ago.
        fresh = 4 + now % 9
        newest += fresh
        ages = np.minimum(rng.zipf(1.2, BATCH - fresh), newest)
        keys = newest - np.concatenate([np.arange(fresh), ages]).astype(np.int64)
        keys = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        wide = sj.embeddings.WideIds.of(keys)
        table = np.zeros(BATCH, np.int32)
        parts = np.asarray(
            hash_index.part_of(hash_index.TableKeys(table, wide.high, wide.low))
        ).tolist()
        listed = keys.tolist()
        hits += sum(
            key in exact.parts[part] for key, part in zip(listed, parts, strict=True)
        )
        exact.add(listed, parts, now)
        step(model, optimizer, model.embeddings.pack({"id": keys}), np.float32(1))
        if (now + 1) % (steps // checks) == 0:
            ids = model.embeddings.ids("id")
            most = max(most, len(ids))
            same += ids.tolist() == exact.ids()
            if not warm:
                warm = len(compiled)
    stats = model.embeddings.stats()["id"]
    seen = steps * BATCH
    return {
        "steps": steps,
        "batch": BATCH,
        "ids in all": newest,
        "rows": rows,
        "most rows used": most,
        "evicted": stats.evicted,
        "refused": stats.refused,
        "hit rate": stats.found / seen,
        "hit rate of the dictionary": hits / seen,
        "evicted by the dictionary": exact.evicted,
        "checks": checks,
        "checks with the same ids": same,
        "compiled after the first check": len(compiled) - warm,
        "seconds": time.perf_counter() - begun,
    }


def main():
    from report import save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--output", help="a JSON file")
    args = parser.parse_args()
    save(measured(args.steps), args.output)


if __name__ == "__main__":
    main()
