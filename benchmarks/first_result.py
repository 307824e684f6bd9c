"""Whole commands in new processes: how long a user waits for a first result.

    python benchmarks/first_result.py run TRAIN TEST [--commit NAME] [--output FILE]
    python benchmarks/first_result.py table             anywhere

TRAIN and TEST are files that `sparsejax` reads, such as Gowalla's. `train` takes 20 epochs,
`evaluate` measures all users of TEST, `predict` recommends 20 items to each user of TRAIN.
*Cold* processes find no compiled programs. *Warm* ones find those of the same command before
them in the user's cache folder.

The parts are sums over a process: `imports` of modules, wherever they are; `tracing`,
`lowering` (to MLIR) and `compiling` as JAX reports them, without imports; `rest` is what
remains of the wall time.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import datetime
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import RESULTS, emit, origin, table, write_section

_PARTS = ("imports", "tracing", "lowering", "compiling", "rest")
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
_SHORTEST = 1e-3  # of an import: a module that is there already is found faster


def main() -> None:
    results = RESULTS / "first_result.json"
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run")
    run.add_argument("train", type=pathlib.Path)
    run.add_argument("test", type=pathlib.Path)
    run.add_argument("--commit", default="unknown")
    run.add_argument("--output", type=pathlib.Path, default=results)
    actions.add_parser("table")
    actions.add_parser("process").add_argument("words", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    match arguments.action:
        case "run":
            _run(arguments)
        case "table":
            _write_table(json.loads(results.read_text()))
        case _:
            _process(arguments.words)


def _run(arguments: argparse.Namespace) -> None:
    """Times each command twice, with a cache folder that is empty the first time."""
    found, versions = [], {}
    train, test = str(arguments.train.resolve()), str(arguments.test.resolve())
    with tempfile.TemporaryDirectory() as folder:
        for name in "cold", "warm":
            run, recommended = f"{folder}/{name}", f"{folder}/{name}.csv"
            seen = ["--k", "20", "--exclude-seen", "--out", recommended]
            for words in (
                ["train", train, "--run", run, "--epochs", "20"],
                ["evaluate", run, train, test, "--k", "20"],
                ["predict", run, train, *seen],
            ):
                result = _timed(words, {"XDG_CACHE_HOME": f"{folder}/cache/{words[0]}"})
                versions |= result.pop("versions")
                found.append({"command": words[0], "cache": name} | result)
                print(found[-1], file=sys.stderr)
    report = {
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit,
        "command": "python benchmarks/first_result.py run",
        "versions": versions,
        "cpus": len(os.sched_getaffinity(0)),
        "results": found,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def _timed(words: list[str], environment: dict[str, str]) -> dict:
    """Seconds of a process from its start to its end, and of its parts."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "process", *words],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - start
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    result["parts"]["rest"] = seconds - sum(result["parts"].values())
    return {"seconds": seconds, **result}


def _process(words: list[str]) -> None:
    """Runs one command, and says how long its parts took."""
    spans: list[tuple[float, float, str]] = []
    with _noted_imports(spans):
        import jax

        from sparsejax.cli.main import main as command

        def listen(event: str, duration_secs: float, **_: object) -> None:
            if event in _EVENTS:
                now = time.perf_counter()
                spans.append((now - duration_secs, now, _EVENTS[event]))

        jax.monitoring.register_event_duration_secs_listener(listen)
        status = command(words)
    programs = sum(part == "compiling" for _, _, part in spans)
    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    found = {"parts": _exclusive(spans), "programs": programs, "versions": versions}
    emit(found)
    sys.exit(status)


@contextlib.contextmanager
def _noted_imports(spans: list[tuple[float, float, str]]) -> Iterator[None]:
    """Within it, adds the span of each import in this thread that is in no other import."""
    ordinary, this, depth = builtins.__import__, threading.get_ident(), 0

    def noted(*arguments, **named):
        nonlocal depth
        if threading.get_ident() != this:
            return ordinary(*arguments, **named)
        start = time.perf_counter()
        depth += 1
        try:
            return ordinary(*arguments, **named)
        finally:
            depth -= 1
            end = time.perf_counter()
            if not depth and end - start > _SHORTEST:
                spans.append((start, end, "imports"))

    builtins.__import__ = noted
    try:
        yield
    finally:
        builtins.__import__ = ordinary


def _exclusive(spans: list[tuple[float, float, str]]) -> dict[str, float]:
    """Seconds of each part. A moment in several of them counts for the latest part only.

    A function is traced inside others, and GPU programs are traced while they are lowered.
    """
    seconds = dict.fromkeys((*_EVENTS.values(), "imports"), 0.0)
    moments = sorted({t for begin, end, _ in spans for t in (begin, end)})
    for begin, end in itertools.pairwise(moments):
        active = {part for b, e, part in spans if b <= begin and end <= e}
        for part in reversed(seconds):
            if part in active:
                seconds[part] += end - begin
                break
    return seconds


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    rows = [
        [
            f"`{r['command']}`",
            r["cache"],
            f"**{r['seconds']:.1f}**",
            *(f"{r['parts'].get(part, 0):.1f}" for part in _PARTS),
            r["programs"],
        ]
        for r in report["results"]
    ]
    columns = ["command", "cache", "seconds", *_PARTS, "programs"]
    write_section("first_result", [origin(report), "", *table(columns, rows)])


if __name__ == "__main__":
    main()
