"""Times and quality of each precision of float32 products in an output layer.

    python benchmarks/precision.py run [--commit NAME]                on a GPU
    python benchmarks/precision.py quality FOLDER [--seeds N] [--commit NAME]
    python benchmarks/precision.py table                              anywhere

`run` times the loss with its gradients in `h` and the kernel, and the best 100 items, in
each form that a GPU has. Errors are against float64 in some rows: of the gradient of `h`,
and of the best scores. torch is compared with TF32. `quality` trains on Gowalla with the
defaults of `sparsejax train`, as `quality.py` does, in each form.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from output_loss import RULES, error_of, measure_torch
from outputs import CHECKED, exact, jax_inputs, temporary_bytes
from report import (
    RESULTS,
    emit,
    origin,
    reported,
    run_parts,
    table,
    write_section,
)
from timing import time_jax
from workloads import OUTPUTS, Workload

_TIMES, _QUALITY = RESULTS / "precision.json", RESULTS / "precision_quality.json"
_K, _EPOCHS = 100, 50

# Name, dtype of the operands, options.
_ROUNDED = "bfloat16 operands"
_LOSS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("highest", "float32", {"precision": "highest"}),
    ("high", "float32", {"precision": "high"}),
    ("default, XLA", "float32", {"precision": "default", "implementation": "xla"}),
    ("default, ours", "float32", {"implementation": "mosaic_gpu"}),
    (_ROUNDED, "bfloat16", {}),
)
_TOP_K = (*_LOSS[:2], ("default, XLA", "float32", {}), _LOSS[-1])
_SHAPES = {workload.name: workload for workload in OUTPUTS[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    run, quality = actions.add_parser("run"), actions.add_parser("quality")
    quality.add_argument("folder", type=pathlib.Path)
    quality.add_argument("--seeds", type=int, default=5)
    for action, output in ((run, _TIMES), (quality, _QUALITY)):
        action.add_argument("--commit", default="unknown")
        action.add_argument("--output", type=pathlib.Path, default=output)
    for name in ("table", *_SHAPES, "torch"):
        actions.add_parser(name)
    arguments = parser.parse_args()
    match arguments.action:
        case "run":
            parts: dict[str, dict[str, str]] = {
                name: {} for name in (*_SHAPES, "torch")
            }
            run_parts(__file__, parts, arguments.output, arguments.commit)
        case "quality":
            report = _quality(arguments.folder, arguments.seeds)
            report["commit"] = arguments.commit
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        case "table":
            _write_table()
        case part:
            for result in _torch() if part == "torch" else _measure(_SHAPES[part]):
                emit(result)


def _measure(workload: Workload) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp

    import sparsejax as sj

    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    inputs = {dtype: jax_inputs(workload, dtype) for dtype in ("float32", "bfloat16")}
    jnp.dot(jnp.ones((64, 64)), jnp.ones((64, 64))).block_until_ready()  # loads cuBLAS

    def one(task: str, name: str, dtype: str, function: Callable, error: Callable):
        start = time.perf_counter()
        lowered = jax.jit(function).lower(*inputs[dtype][0])
        middle = time.perf_counter()
        compiled = lowered.compile()
        seconds = middle - start, time.perf_counter() - middle
        off = error(compiled(*inputs[dtype][0]))
        timed = time_jax(jax.jit(function), inputs[dtype])
        print(workload.name, task, name, timed, off, seconds, file=sys.stderr)
        return {
            "workload": workload.name,
            "task": task,
            "form": name,
            **{key: round(us, 1) for key, us in dataclasses.asdict(timed).items()},
            "error": off,
            "lowering_seconds": round(seconds[0], 2),
            "compiling_seconds": round(seconds[1], 2),
            "temporary_bytes": temporary_bytes(compiled),
            "versions": versions,
        }

    def loss_of(loss: str, options: dict[str, Any]):
        def total(h, kernel, labels):
            return sj.output_loss(h, kernel, None, labels, loss=RULES[loss], **options)

        return jax.value_and_grad(total, (0, 1))

    def best_of(options: dict[str, Any]):
        def best(h, kernel, exclude):
            return sj.top_k(h, kernel, None, _K, exclude=exclude, **options)

        return best

    for loss in ("sigmoid", "softmax"):
        for name, dtype, options in _LOSS:
            with reported(workload.name, loss, name):

                def of_gradient(made, loss=loss):
                    return error_of(made[1][0], loss, workload, dtype="float32")

                yield one(loss, name, dtype, loss_of(loss, options), of_gradient)
    for name, dtype, options in _TOP_K:
        with reported(workload.name, "top_k", name):

            def of_scores(made):
                return _error_of_best(made, workload)

            yield one("top_k", name, dtype, best_of(options), of_scores)


def _error_of_best(found, workload: Workload) -> float:
    """The largest error of a best score, as a share of the scores' standard deviation."""
    scores, seen, _ = exact(workload, "float32")
    allowed = np.where(seen, -np.inf, scores)
    best = -np.sort(-allowed, axis=1)[:, :_K]
    return float(np.abs(np.asarray(found[1])[:CHECKED] - best).max() / scores.std())


def _torch() -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    torch.set_float32_matmul_precision("high")  # TF32
    for workload in _SHAPES.values():
        for result in measure_torch(workload, "float32"):
            form = f"{result.pop('implementation')}, TF32"
            yield {**result, "task": result.pop("loss"), "form": form}


def _quality(folder: pathlib.Path, seeds: int) -> dict:
    import jax

    import sparsejax as sj

    train = sj.read(folder / "train.txt.xz")
    test = sj.read(folder / "test.txt.xz", features=train)
    results = []
    for name, dtype, options in _LOSS:
        config = sj.NetworkConfig.autoencoder(
            precision=options.get("precision"),
            output_dtype="bfloat16" if dtype == "bfloat16" else None,
        )
        for seed in range(seeds):
            model, optimizer = sj.build(config, train, seed=seed)
            model.output.implementation = options.get("implementation")
            start = time.perf_counter()
            sj.fit(model, optimizer, train, num_epochs=_EPOCHS, seed=seed)
            seconds = time.perf_counter() - start
            # All are ranked alike.
            model.output.implementation, model.output.precision = None, "highest"
            measured = sj.evaluate(model, train, test, k=20, optimizer=optimizer)
            result = {"form": name, "seed": seed, "seconds": round(seconds, 2)}
            results.append(result | {m: measured[m] for m in ("recall@20", "ndcg@20")})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/precision.py quality FOLDER",
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "results": results,
    }


def _write_table() -> None:
    """Puts both reports between the marks in README.md."""
    report = json.loads(_TIMES.read_text())
    rows = [
        [
            row["workload"],
            row["task"],
            row["form"],
            f"{row['kernel']:,.0f}",
            f"{row['error']:.0e}",
            *(
                f"{row[key]:.1f}" if key in row else "-"
                for key in ("lowering_seconds", "compiling_seconds")
            ),
            f"{row['temporary_bytes'] / 2**20:,.0f} MiB",
        ]
        for row in report["results"]
    ]
    columns = ["workload", "", "form", "us", "error", "lowering, s", "compiling, s"]
    lines = [origin(report), "", *table([*columns, "temporary"], rows), ""]
    report = json.loads(_QUALITY.read_text())
    rows = []
    for name in dict.fromkeys(row["form"] for row in report["results"]):
        mine = [row for row in report["results"] if row["form"] == name]
        values = [[row[metric] for row in mine] for metric in ("recall@20", "ndcg@20")]
        texts = [
            f"{statistics.mean(x):.5f} ± {statistics.stdev(x):.5f}" for x in values
        ]
        rows.append([name, *texts, f"{min(row['seconds'] for row in mine):.1f}"])
    columns = ["form", "recall@20", "nDCG@20", "seconds of training"]
    lines += [f"Gowalla, {_EPOCHS} epochs, mean ± standard deviation of seeds; "]
    lines[-1] += origin(report)
    write_section("precision", [*lines, "", *table(columns, rows)])


if __name__ == "__main__":
    main()
