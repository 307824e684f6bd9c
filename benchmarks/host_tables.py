"""How long a step takes whose tables are in host memory, and how fast rows move.

    python benchmarks/host_tables.py step --gigabytes 64 --share .2 --compare 32
    python benchmarks/host_tables.py copies

`step` trains a table of so many gigabytes, of which the device has a share, on batches of 65,536
examples of 26 ids, by their rank with a power law of 1.05. Before, rows of `--warm` batches come,
so that the device is full and rows leave. With `--compare` also a table of so many gigabytes that
is on the device; with `--dynamic` both are dynamic tables. With `--touched` each page of the host's
memory was written before, as after a long training. Batches are made and packed before. `digest`
is of the losses. `copies` times copies between host and device, and within the host.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from workloads import keys_of

import sparsejax as sj
from sparsejax.embeddings import DynamicTableConfig, FeatureConfig, TableConfig, WideIds
from sparsejax.embeddings.host_buffers import Buffer, arrived, in_parts, leaving

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


def compiled(args):
    return functools.partial(sj.jit, deterministic=args.deterministic)(train)


def ids_of(rng, rows, shape):
    """Ids whose probability falls with the power of their number, from 1."""
    u = rng.random(shape)  # in float64, else few of the seldom ids would ever come
    ids = (1 + u * ((rows + 1) ** (1 - POWER) - 1)) ** (1 / (1 - POWER))
    return np.minimum(ids.astype(np.int64) - 1, rows - 1).astype(np.int32)


def per_step(batches, step):
    return timed(batches, step)[0]


def timed(batches, step):
    """Seconds of a step, and the digest of the losses."""
    start, losses = time.perf_counter(), []
    for ids in batches:
        losses.append(step(ids))
    jax.block_until_ready(losses)
    seconds = (time.perf_counter() - start) / len(losses)
    return seconds, hashlib.sha256(np.stack(losses).tobytes()).hexdigest()[:16]


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
    program = compiled(args)
    step = lambda ids: program(model, optimizer, ids)
    if not table.host:
        last = packed[-args.steps :]
        per_step(last[:3], step)
        return {"ms": 1e3 * min(per_step(last, step) for _ in range(2))}
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
    per_step(model.embeddings.staged(first, optimizer), step)  # compiles
    host = kernel.get_metadata()["host"]
    before = host.bytes_moved
    seconds, digest = timed(model.embeddings.staged(last, optimizer), step)
    moved = (host.bytes_moved - before) / len(last)
    # The last batch again and again: all of its rows are there.
    seen = model.embeddings.staged([last[-1]] * 10, optimizer)
    return found | {
        "ms": 1e3 * seconds,
        "digest": digest,
        "MB a step": moved / 1e6,
        "GB/s": moved / 1e9 / seconds,
        "ms of a batch that was seen": 1e3 * per_step(seen, step),
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


def copies(args):
    """Gigabytes a second."""
    array = np.ones(2**26, np.float32)
    device = jax.devices()[0]
    found: dict[str, Any] = {}

    def seconds(call):
        call()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    on_device = jax.block_until_ready(jnp.asarray(array))
    kinds = [memory.kind for memory in device.addressable_memories()]
    found["memories"] = kinds
    size = array.nbytes / 1e9
    found["host to device"] = size / seconds(
        lambda: jax.block_until_ready(jax.device_put(array, device))
    )
    twice = jax.jit(lambda x: x + 1)
    each = seconds(lambda: jax.block_until_ready(twice(on_device)))
    found["device to host"] = size / (
        seconds(lambda: np.asarray(twice(on_device))) - each
    )
    # As rows go, whose buffers are kept.
    shape = 98_304, 128
    buffer, size = Buffer(1, shape, np.float32), 4 * math.prod(shape) / 1e9
    buffer.parts[0][...] = 1
    rows = jax.block_until_ready(buffer.sent())
    found["rows to device"] = size / seconds(
        lambda: jax.block_until_ready(buffer.sent())
    )
    found["rows to host"] = size / seconds(lambda: arrived(leaving(rows)))
    found |= moves(args.gigabytes)
    size = array.nbytes / 1e9
    if "pinned_host" in kinds:
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        here = jax.sharding.SingleDeviceSharding(device)
        held = jax.block_until_ready(jax.device_put(on_device, pinned))
        found["pinned to device"] = size / seconds(
            lambda: jax.block_until_ready(jax.device_put(held, here))
        )
        found["device to pinned"] = size / seconds(
            lambda: jax.block_until_ready(jax.device_put(on_device, pinned))
        )
        found["host to pinned"] = size / seconds(
            lambda: jax.block_until_ready(jax.device_put(array, pinned))
        )
    return found


def moves(gigabytes):
    """GB a second of rows that threads gather from a table, put back, or both at once."""
    count, dim = 98_304, 128
    table = np.zeros((int(gigabytes * 1e9 / (4 * dim)), dim), np.float32)

    def touch(part):
        table[part] = 1

    in_parts(len(table), touch)
    rng = np.random.default_rng(0)
    rounds = [rng.integers(0, len(table), (2, count)) for _ in range(12)]
    come, leave = np.ones((2, count, dim), np.float32)

    def gather(rows):
        def work(part):
            np.take(table, rows[part], axis=0, out=come[part], mode="clip")

        in_parts(count, work)

    def put(rows):
        def work(part):
            table[rows[part]] = leave[part]

        in_parts(count, work)

    def rate(*works):
        """Of each round after two."""
        with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:

            def once(rows):
                list(pool.map(lambda work, some: work(some), works, rows))

            for rows in rounds[:2]:
                once(rows)
            start = time.perf_counter()
            for rows in rounds[2:]:
                once(rows)
        seconds = (time.perf_counter() - start) / (len(rounds) - 2)
        return len(works) * come.nbytes / 1e9 / seconds

    return {
        "GB of the table in the host": gigabytes,
        "rows gathered": rate(gather),
        "rows put back": rate(put),
        "both at once": rate(gather, put),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("step", "copies"))
    parser.add_argument("--gigabytes", type=float, default=64)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--warm", type=int, default=300, help="batches before")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--rule", default="rowwise_adagrad")
    parser.add_argument(
        "--compare", type=float, help="gigabytes of a table on the device"
    )
    parser.add_argument("--output", help="a JSON file")
    parser.add_argument("--deterministic", action="store_true", help="the same bits")
    parser.add_argument(
        "--touched", action="store_true", help="each page of memory was written before"
    )
    parser.add_argument("--dynamic", action="store_true", help="dynamic tables")
    parser.add_argument("--devices", type=int, default=1, help="of `step`")
    args = parser.parse_args()
    found = {"device": jax.devices()[0].device_kind, "devices": args.devices}
    mesh = contextlib.nullcontext()
    if args.devices > 1:
        mesh = jax.set_mesh(sj.make_mesh(data=1, model=args.devices))
    with mesh:
        found |= {"step": step, "copies": copies}[args.part](args)
    print(json.dumps(found, indent=1))
    if args.output:
        with open(args.output, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
