"""Hardware counters of our gather-matmul program, by Nsight Compute.

python benchmarks/counters.py run [--commit NAME]    on a GPU, with ncu on the PATH
python benchmarks/counters.py table                  anywhere
"""

from __future__ import annotations

import csv
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section
from workloads import BIG, H128, ML20M, make_rows

_CASES = (
    (ML20M, "float32"),
    (ML20M, "bfloat16"),
    (H128, "float32"),
    (BIG, "float32"),
    (BIG, "bfloat16"),
)
_CALLS = 2  # of which the last counts
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_STALLS = (
    "long_scoreboard",
    "lg_throttle",
    "wait",
    "short_scoreboard",
    "branch_resolving",
    "no_instruction",
    "math_pipe_throttle",
    "not_selected",
    "barrier",
    "dispatch_stall",
    "imc_miss",
)
_METRICS = {
    "microseconds": "gpu__time_duration.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "l2_bytes": "lts__t_bytes.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes_read.sum",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l1_hit_percent": "l1tex__t_sector_hit_rate.pct",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm_active_percent": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    **{f"stall_{name}": _STALL.format(name) for name in _STALLS},
}


def main() -> None:
    if sys.argv[1:] == ["kernels"]:  # what ncu runs
        _run_kernels()
    else:
        command(__doc__, __file__, {"ncu": {}}, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "ncu.csv"
        subprocess.run(
            [
                *("ncu", "--csv", "--page", "raw", "--print-units", "base"),
                *("--log-file", str(log), "--target-processes", "all"),
                *("--clock-control", "none", "--cache-control", "none"),
                *("--kernel-name", "regex:gather_matmul_sum"),
                *("--metrics", ",".join(_METRICS.values())),
                *(sys.executable, __file__, "kernels"),
            ],
            stdout=sys.stderr,
            check=True,
        )
        text = log.read_text()
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches = [row for row in csv.DictReader(lines) if row["ID"]]  # one is of units
    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    for (workload, dtype), row in zip(
        _CASES, launches[_CALLS - 1 :: _CALLS], strict=True
    ):
        counters = {
            name: float(row[metric].replace(",", ""))
            for name, metric in _METRICS.items()
            if row.get(metric)
        }
        counters["microseconds"] /= 1e3  # base units are nanoseconds
        yield {
            "workload": workload.name,
            "dtype": dtype,
            **counters,
            "versions": versions,
        }


def _run_kernels() -> None:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.gather_matmul import gather_matmul

    jitted = jax.jit(gather_matmul, static_argnums=4)
    for workload, dtype in _CASES:
        shape = workload.num_cols, workload.hidden
        w = jax.jit(
            lambda shape=shape, dtype=dtype: jax.random.normal(
                jax.random.key(0), shape, dtype
            )
        )()
        for call in range(_CALLS):
            indices, indptr = map(jnp.asarray, make_rows(workload, call))
            jitted(None, indices, indptr, w, workload.num_cols).block_until_ready()


def _write_table(report: dict) -> None:
    rows = []
    for r in report["results"]:
        stalls = {name: r.get(f"stall_{name}", 0.0) for name in _STALLS}
        worst = sorted(stalls, key=lambda name: -stalls[name])[:3]
        rows.append(
            [
                r["workload"],
                r["dtype"],
                f"{r['microseconds']:.0f}",
                f"{r['l2_percent']:.0f} %",
                f"{r['l2_hit_percent']:.0f} %",
                f"{r['dram_percent']:.0f} %",
                f"{r['l1_percent']:.0f} %",
                f"{r['issue_percent']:.0f} %",
                f"{r['warps_percent']:.0f} %",
                f"{r['sm_active_percent']:.0f} %",
                f"{r['registers']:.0f}",
                ", ".join(f"{name} {stalls[name]:.1f}" for name in worst),
            ]
        )
    columns = [
        "workload",
        "dtype",
        "us",
        "L2",
        "L2 hits",
        "DRAM",
        "L1",
        "issue slots",
        "warps",
        "SMs active",
        "registers",
        "warps stalled, for each that issues",
    ]
    write_section("counters", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
