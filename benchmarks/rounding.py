"""Parameters stored in bfloat16: their quality on Gowalla, and what rounding costs on a GPU.

    python benchmarks/rounding.py quality --data FOLDER [--seeds N] [--commit NAME]
    python benchmarks/rounding.py time [--commit NAME]
    python benchmarks/rounding.py table

FOLDER is that of `quality.py`. With each seed the defaults of `sparsejax train` are trained
for 50 epochs on `train`, and measured once on `test`: with parameters in float32, and in
bfloat16 that is rounded at random (as `Optimizer` does it) or to nearest. `time` sums the
GPU programs that update rows, by CUPTI.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import origin, table, training_command, write_section

_METRIC = "ndcg@20"
# Name, options of the network, and whether bfloat16 is rounded at random.
_FORMS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("float32", {}, True),
    ("float32, bfloat16 operands", {"output_dtype": "bfloat16"}, True),
    ("bfloat16, rounded at random", {"param_dtype": "bfloat16"}, True),
    ("bfloat16, rounded to nearest", {"param_dtype": "bfloat16"}, False),
)
_REPEATS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    training_command(
        parser,
        __file__,
        {"quality": _run, "time": _run},
        {"table": _write_table},
        without_data=["time"],
    )


def _run(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    found = _times(small=arguments.small)
    if arguments.action == "quality":
        found = _quality(arguments.data, arguments.seeds, arguments.epochs)
    results = []
    for result in found:
        results.append(result)
        yield {"results": results}, result


def _quality(folder: pathlib.Path, seeds: int, epochs: int) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj

    train = sj.read(folder / "train.txt.xz")
    test = sj.read(folder / "test.txt.xz", features=train)
    for seed in range(seeds):
        for form, options, at_random in _FORMS:
            config = sj.NetworkConfig.autoencoder(**options)
            model, optimizer = sj.build(config, train, seed=seed)
            if not at_random:
                optimizer.rounding = nnx.data({})
            start = time.perf_counter()
            history = sj.fit(model, optimizer, train, num_epochs=epochs, seed=seed)
            seconds = time.perf_counter() - start
            measured = sj.evaluate(model, train, test, k=20, optimizer=optimizer)
            yield {
                "form": form,
                "seed": seed,
                "epochs": epochs,
                _METRIC: measured[_METRIC],
                "recall@20": measured["recall@20"],
                "loss": history[-1]["loss"],
                "weights_bytes": _bytes(nnx.state(model, nnx.Param), jax),
                "state_bytes": _bytes(nnx.state(optimizer, nnx.OptState), jax),
                "seconds": seconds,
            }


def _bytes(state, jax) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def _times(*, small: bool) -> Iterator[dict]:
    import dataclasses

    from workloads import BIG, ML20M

    rows: tuple = (ML20M, BIG)
    outputs = [(256, 2**17, 256), (1024, 2**17, 256)]
    if small:
        rows = (
            dataclasses.replace(
                ML20M, batch=8, features=300, hidden=128, entries=60, name="small"
            ),
        )
        outputs = [(64, 256, 128)]
    for workload in rows:
        yield from _time_rows(workload, small=small)
    for batch, items, hidden in outputs:
        yield from _time_fused(batch, items, hidden, small=small)


def _time_rows(workload, *, small: bool) -> Iterator[dict]:
    """The row update of `sparsejax.ops`: gradients summed, rows and state moved."""
    import jax
    import jax.numpy as jnp
    from workloads import make_rows

    from pallas_kernels.rounding import Noise
    from sparsejax import optimizers
    from sparsejax.ops import row_update
    from sparsejax.ops.scatter_gradient import row_terms
    from sparsejax.sparse import CSR

    indices, indptr = map(jnp.asarray, make_rows(workload, 0))
    x = CSR(None, indices, indptr, num_cols=workload.features)
    x = jax.jit(CSR.with_transposed)(x)
    num_rows = -(-workload.features // 256) * 256
    shape = num_rows, workload.hidden
    rule = optimizers.rmsprop(1e-3)
    for dtype, at_random in _STORED:
        w = jax.jit(
            lambda dtype=dtype: jax.random.normal(jax.random.key(0), shape, dtype)
        )()
        dy = jax.random.normal(jax.random.key(1), (workload.batch, workload.hidden))
        dy = dy.astype(dtype)
        last = jnp.full(num_rows, row_update.NEVER)
        trained = row_update.TrainedKernel(w, rule.init(shape), last)
        noise = Noise(jnp.int32(7)) if at_random else None

        @jax.jit
        def step(trained, x, dy, noise):
            terms = row_terms([x], [dy], trained.num_rows)
            return row_update.step_terms(
                rule,
                trained,
                terms,
                jnp.int32(3),
                noise=noise,
                implementation="mosaic_gpu",
            )

        yield {
            "operation": "row update",
            "shape": workload.name,
            "stored": _name(dtype, at_random),
            "microseconds": _kernel_time(
                step, (trained, x, dy, noise), "row_update", small=small
            ),
        }


def _time_fused(batch: int, items: int, hidden: int, *, small: bool) -> Iterator[dict]:
    """The GPU program that makes the output's gradient and moves rows and state."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.rounding import Noise
    from pallas_kernels.weight_update import weight_update
    from sparsejax import optimizers
    from sparsejax.ops.row_update import place_of, step_of_arrays

    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    slopes, h = normal(0, batch, items), normal(1, batch, hidden)
    for rule in (optimizers.rmsprop(1e-3), optimizers.adam(1e-3)):
        for dtype, at_random in _STORED:
            w = normal(2, items, hidden).astype(dtype)
            # With weights in float32 there is a copy in bfloat16 for the products.
            operand = w.astype(jnp.bfloat16) if dtype == "float32" else None
            noise = Noise(jnp.int32(7)) if at_random else None

            @jax.jit
            def step(slopes, h, w, state, operand, noise, rule=rule):
                move, scalars = step_of_arrays(rule, state, jnp.int32(4))
                return weight_update(
                    move,
                    slopes,
                    h,
                    [w, *state.values()],
                    operand,
                    0,
                    scalars,
                    place=place_of(noise, jnp.int32(4)),
                )

            arguments = slopes, h, w, rule.init((items, hidden)), operand, noise
            yield {
                "operation": f"fused update, {rule.name}",
                "shape": f"{batch} x {items:,} x {hidden}",
                "stored": _name(dtype, at_random),
                "microseconds": _kernel_time(
                    step, arguments, "weight_update", small=small
                ),
            }


_STORED = (("float32", False), ("bfloat16", False), ("bfloat16", True))


def _name(dtype: str, at_random: bool) -> str:
    if dtype == "float32":
        return dtype
    return f"{dtype}, rounded {'at random' if at_random else 'to nearest'}"


def _kernel_time(run, arguments: tuple, name: str, *, small: bool) -> float:
    """Median microseconds of the kernels of a call whose name has `name` in it.

    Arrays are not donated here, so XLA copies them first: such copies are left out.
    """
    if small:  # a CPU lowers it and has no such times
        import jax

        jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
        return float("nan")
    from outputs import kernel_times

    found = []
    for _ in range(_REPEATS):
        times = kernel_times(run, arguments)
        ours = [us for kernel, us in times.items() if name in kernel]
        if not ours:
            raise RuntimeError(f"no kernel has {name} in its name: {list(times)}")
        found.append(sum(ours))
    return statistics.median(found)


def _write_table(report: dict) -> None:
    quality, times = report["quality"], report["time"]
    rows = []
    for form in dict.fromkeys(r["form"] for r in quality["results"]):
        ours = [r for r in quality["results"] if r["form"] == form]
        values = [r[_METRIC] for r in ours]
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        rows.append(
            [
                form,
                f"{statistics.mean(values):.4f}{spread}",
                len(values),
                f"{statistics.mean(r['loss'] for r in ours):.4f}",
                f"{ours[0]['weights_bytes'] / 1e6:.1f}",
                f"{ours[0]['state_bytes'] / 1e6:.1f}",
            ]
        )
    columns = ["parameters", "nDCG@20", "seeds", "loss", "weights, MB", "state, MB"]
    lines = [
        *table(columns, rows),
        "",
        f"Mean ± standard deviation of the seeds. {origin(quality)}",
        "",
    ]
    rows = [
        [r["operation"], r["shape"], r["stored"], f"{r['microseconds']:.0f}"]
        for r in times["results"]
    ]
    lines += table(["operation", "shape", "parameters", "us"], rows)
    write_section("rounding", [*lines, "", origin(times)])


if __name__ == "__main__":
    main()
