"""The bits of two processes with `fit(deterministic=True)`, and sets of XLA's options.

    python benchmarks/deterministic.py run [--commit NAME]    on a GPU
    python benchmarks/deterministic.py table                  anywhere

The network and the data are those of epoch.py; updates are fused.

Bits: two processes each make the model, do 200 steps on the first 51,200 users, and take
a digest of each array of the model and the optimizer. This is done with and without
`deterministic=True`. Then they train on, and the fastest epoch gives the time of a step.

Options: one process compiles the training program with one set of XLA's options after the
other, as `compiler_options` of this program alone, and trains epochs of all users.
"""

from __future__ import annotations

import hashlib
import inspect
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from epoch import BATCH, STEPS, make_rows, new_modules
from report import command, origin, reported, table, write_section

_BITS_STEPS = 200
_BITS = {"default": False, "deterministic": True}

# XLA's default on one GPU. A list among a program's options replaces it as a whole.
_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL"
_LOOP = {"xla_gpu_enable_command_buffer": f"{_COMMANDS},WHILE"}
_DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
_NO_TIMING = {"xla_gpu_autotune_level": 0}
_EXCLUDED = {"xla_gpu_exclude_nondeterministic_ops": True}
_SMALL = {"xla_gpu_graph_min_graph_size": 1}
_NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
# Sets that may fail are in a part of their own, at its end.
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "options": {
        "none": {},
        "no Triton": _NO_TRITON,
        "loop": _LOOP,
        "loop, no Triton": _LOOP | _NO_TRITON,
        "deterministic": _DETERMINISTIC,
        "deterministic, loop": _DETERMINISTIC | _LOOP,
        "deterministic, loop, no Triton": _DETERMINISTIC | _LOOP | _NO_TRITON,
        "none again": {},
    },
    "options, more": {
        "loop, autotune_level=0": _LOOP | _NO_TIMING,
        "autotune_level=0": _NO_TIMING,
        "autotune_level=0, exclude": _NO_TIMING | _EXCLUDED,
        "loop, min_graph_size=1": _LOOP | _SMALL,
        "loop, serialize": _LOOP
        | {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"},
        "loop, concurrent": _LOOP
        | {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
        "loop, no conditional": {
            "xla_gpu_enable_command_buffer": _LOOP[
                "xla_gpu_enable_command_buffer"
            ].replace("CONDITIONAL,", "")
        },
        "no graphs": {"xla_gpu_enable_command_buffer": ""},
        "min_graph_size=1": _SMALL,
    },
}
_PARTS = [f"{name} {run}" for name in _BITS for run in (1, 2)] + list(_OPTIONS)


def main() -> None:
    parts = {part: {} for part in _PARTS}
    command(__doc__, __file__, parts, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    import jax

    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    data = make_rows(np.random.default_rng(0))
    if part in _OPTIONS:
        results = _times(data, _OPTIONS[part])
    else:
        results = iter([_bits(data, _BITS[part.rpartition(" ")[0]])])
    for result in results:
        result = {"part": part, **result, "versions": versions}
        shown = {k: v for k, v in result.items() if k not in ("sha256", "versions")}
        print(", ".join(f"{k} {v}" for k, v in shown.items()), file=sys.stderr)
        yield result


def _bits(data, deterministic: bool) -> dict:
    import sparsejax as sj

    model, optimizer = new_modules()
    sha256 = {"made": _digests(model, optimizer)}

    def log(step, entry):
        if step == _BITS_STEPS:
            sha256["trained"] = _digests(model, optimizer)

    history = sj.fit(
        model,
        optimizer,
        data[: _BITS_STEPS * BATCH],
        batch_size=BATCH,
        num_epochs=5,
        fused=True,
        deterministic=deterministic,
        log=log,
    )
    sha256["after 5 epochs"] = _digests(model, optimizer)
    # The first epoch compiles.
    rate = max(entry["examples_per_second"] for entry in history[1:])
    return {
        "step_microseconds": 1e6 * BATCH / rate,
        "loss": history[0]["loss"],
        "digest": {when: _together(digests) for when, digests in sha256.items()},
        "sha256": sha256,
    }


def _digests(*modules) -> dict[str, str]:
    """A digest of each array of the modules."""
    import jax
    from flax import nnx

    def digest(leaf) -> str:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()

    arrays = jax.tree.leaves_with_path(nnx.state(modules))
    return {jax.tree_util.keystr(path): digest(array) for path, array in arrays}


def _together(digests: Mapping[str, str]) -> str:
    """The beginning of a digest of digests."""
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:12]


def _times(data, sets: Mapping[str, Mapping[str, Any]]) -> Iterator[dict]:

    import sparsejax as sj
    from sparsejax.engine.train import dispatch
    from sparsejax.mesh.kept_programs import Keepable

    program = dispatch.run_steps[False]
    for name, options in sets.items():
        # As `Programs` makes the program, but with these options, in its only form.
        made = Keepable(
            inspect.unwrap(program),
            static_argnames=("how", "sizes"),
            donate_argnames="state",
            compiler_options=dict(options),
        )
        vars(dispatch)["run_steps"] = {False: made}
        with reported(name):
            model, optimizer = new_modules()
            times = [time.perf_counter()]

            def log(step, entry, times=times):
                times.append(time.perf_counter())

            history = sj.fit(
                model,
                optimizer,
                data,
                batch_size=BATCH,
                num_epochs=7,
                fused=True,
                log=log,
            )
            epochs = np.diff(times).tolist()
            yield {
                "name": name,
                "options": dict(options),
                "epoch_seconds": min(epochs[1:]),
                "median_seconds": float(np.median(epochs[1:])),
                "first_seconds": epochs[0],
                "step_microseconds": 1e6 * min(epochs[1:]) / STEPS,
                "loss": history[-1]["loss"],
                "digest": _together(_digests(model, optimizer)),
            }


def _write_table(report: dict) -> None:
    results = report["results"]
    bits, times = [], []
    for name in _BITS:
        runs = [r for r in results if r["part"].rpartition(" ")[0] == name]
        if len(runs) < 2:
            continue
        alike = []
        for when, digests in runs[0]["sha256"].items():
            same = sum(d == runs[1]["sha256"][when][k] for k, d in digests.items())
            alike.append(f"{same} of {len(digests)}")
        steps = min(r["step_microseconds"] for r in runs)
        losses = ", ".join(f"{r['loss']:.8f}" for r in runs)
        bits.append([name, *alike, losses, f"{steps:.0f}"])
    for r in results:
        if "options" in r:
            given = ", ".join(f"`{k}={v}`" for k, v in r["options"].items())
            given = given.replace("xla_gpu_", "").replace(_COMMANDS, "...")
            seconds = f"{r['epoch_seconds']:.3f}", f"{r['median_seconds']:.3f}"
            times.append([given or "none", *seconds, f"{r['loss']:.6f}"])
    lines = [origin(report), ""]
    columns = ["fit", "made", "trained", "after 5 epochs", "losses", "us a step"]
    lines += table(columns, bits)
    lines += ["", "Options of the training program; `...` is XLA's own list:", ""]
    columns = ["options", "s an epoch", "median", "loss"]
    lines += table(columns, times)
    print("\n".join(lines))
    write_section("deterministic", lines)


if __name__ == "__main__":
    main()
