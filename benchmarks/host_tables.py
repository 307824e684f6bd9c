"""How long a step takes whose tables are in host memory.

    python benchmarks/host_tables.py --gigabytes 64 --share .2 --compare 32

It trains a table of so many gigabytes, of which the device has a share, on batches of 65,536
examples of 26 ids, by their rank with a power law of 1.05. Before, rows of `--warm` batches come,
so that the device is full and rows leave. With `--compare` also a table of so many gigabytes that
is on the device; with `--dynamic` both are dynamic tables. With `--touched` each page of the host's
memory was written before, as after a long training. Batches are made and packed before.
"""

import argparse
import concurrent.futures
import contextlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from report import save, versions
from workloads import keys_of

import sparsejax as sj
from sparsejax.embeddings import DynamicTableConfig, FeatureConfig, TableConfig, WideIds
from sparsejax.mesh.host_buffers import in_parts

POWER = 1.05


class Sums(nnx.Module):
    """Tables, and little else: the loss is a mean over their numbers."""

    def __init__(self, table, features):
        config = FeatureConfig("ids", combiner=None, length=features)
        self.embeddings = sj.embeddings.EmbeddingCollection(
            {"ids": table}, {"ids": config}, rngs=nnx.Rngs(0)
        )

    def __call__(self, ids):
        return jnp.mean(jnp.tanh(self.embeddings.concat(ids)))


def train(model, optimizer, ids):
    if model.embeddings.indexes:
        ids = model.embeddings.assign_rows(ids, optimizer)
    loss, grads = optimizer.value_and_grad(lambda model: model(ids))(model)
    optimizer.update(model, grads)
    return loss


def ids_of(rng, rows, shape):
    """Ids whose probability falls with the power of their number, from 1."""
    u = rng.random(shape)  # in float64, else few of the seldom ids would ever come
    ids = (1 + u * ((rows + 1) ** (1 - POWER) - 1)) ** (1 / (1 - POWER))
    return np.minimum(ids.astype(np.int64) - 1, rows - 1).astype(np.int32)


def milliseconds(batches, step):
    """Time of a step."""
    start = time.perf_counter()
    losses = [step(ids) for ids in batches]
    jax.block_until_ready(losses)
    return 1e3 * (time.perf_counter() - start) / len(losses)


def measured(table, args, batches):
    """Milliseconds of a step, and what was moved."""
    model = Sums(table, args.features)
    optimizer = sj.Optimizer(model, sj.optimizers.get(args.rule, learning_rate=0.01))
    with concurrent.futures.ThreadPoolExecutor() as pool:

        def pack(ids):
            if args.dynamic:  # numbers that say nothing of their order
                ids = WideIds.of(keys_of(ids))
            return model.embeddings.pack({"ids": ids})

        packed = list(pool.map(pack, batches))
    program = sj.jit(train)
    step = lambda ids: program(model, optimizer, ids)
    if not table.host:
        last = packed[-args.steps :]
        milliseconds(last[:3], step)
        return {"ms": min(milliseconds(last, step) for _ in range(2))}
    (kernel,) = model.embeddings.kernels.values()
    ends = len(packed) - 2 * args.steps, len(packed) - args.steps
    warm, first, last = packed[: ends[0]], packed[ends[0] : ends[1]], packed[ends[1] :]
    begin = time.perf_counter()
    for _ in model.embeddings.staged(warm, optimizer):
        pass
    jax.block_until_ready(kernel[...])
    before = 1e3 * (time.perf_counter() - begin) / max(1, len(warm))
    if args.touched:
        touch(kernel.get_metadata()["host"]._arrays.values())
    found = {"ms of a batch that came before": before}
    milliseconds(model.embeddings.staged(first, optimizer), step)  # compiles
    host = kernel.get_metadata()["host"]
    before = host.bytes_moved
    taken = milliseconds(model.embeddings.staged(last, optimizer), step)
    moved = (host.bytes_moved - before) / len(last)
    # The last batch again and again: all of its rows are there.
    seen = model.embeddings.staged([last[-1]] * 10, optimizer)
    return found | {
        "ms": taken,
        "MB a step": moved / 1e6,
        "GB/s": moved / 1e6 / taken,
        "ms of a batch that was seen": milliseconds(seen, step),
    }


def touch(arrays):
    """Writes each page of some arrays, and changes nothing."""
    for array in arrays:
        numbers = array.reshape(-1)[:: 4096 // array.itemsize]

        def write(part, numbers=numbers):
            numbers[part] = numbers[part]

        in_parts(len(numbers), write)


def made(rows, count, args):
    """Batches of ids."""
    seeds = np.random.SeedSequence(0).spawn(count)
    shape = (args.batch, args.features)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        make = lambda seed: ids_of(np.random.default_rng(seed), rows, shape)
        return list(pool.map(make, seeds))


def step(args):
    rows = int(args.gigabytes * 1e9 / (4 * args.dim))
    found: dict[str, Any] = {
        "rows": rows,
        "gigabytes": args.gigabytes,
        "share": args.share,
    }
    here = int(rows * args.share)
    if args.dynamic:
        table = DynamicTableConfig(here, args.dim, host_rows=rows)
    else:
        table = TableConfig(rows, args.dim, host=True, device_rows=here)
    found["host"] = measured(table, args, made(rows, args.warm + 2 * args.steps, args))
    print(found, flush=True)
    if args.compare:
        rows = int(args.compare * 1e9 / (4 * args.dim))
        table = TableConfig(rows, args.dim, placement="rows")
        if args.dynamic:
            table = DynamicTableConfig(rows, args.dim)
        found["device"] = {"gigabytes": args.compare}
        found["device"] |= measured(table, args, made(rows, args.steps, args))
        found["ratio"] = found["device"]["ms"] / found["host"]["ms"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=64)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--warm", type=int, default=300, help="batches before")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--rule", default="rowwise_adagrad")
    parser.add_argument("--compare", type=float, help="GB of a table on the device")
    parser.add_argument("--touched", action="store_true", help="pages were written")
    parser.add_argument("--dynamic", action="store_true", help="dynamic tables")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--output", help="a JSON file")
    args = parser.parse_args()
    mesh = contextlib.nullcontext()
    if args.devices > 1:
        mesh = jax.set_mesh(sj.make_mesh(data=1, model=args.devices))
    with mesh:
        found = {"devices": args.devices, "versions": versions(), **step(args)}
    save(found, args.output)


if __name__ == "__main__":
    main()
