"""Times whole commands in new processes, as a user waits for a first result.

    python benchmarks/first_result.py compare BASE [TRAIN TEST] [--turns 3] [--epochs 1]
                                      [--save BEFORE NOW]
    python benchmarks/first_result.py table             anywhere

TRAIN and TEST are files that `sparsejax` reads, such as Gowalla's; the bundled data if none is
given. `evaluate` measures all users of TEST, `predict` recommends 20 items to each user of
TRAIN. *Cold* processes find no compiled programs. *Warm* processes find the programs that a cold
one has cached in the user's cache folder.

`compare` runs the commands of BASE, a commit or a folder with another tree, and of the working
tree in turns. It ends with status 1 if one of them takes more than 1.1 times as long as
that of BASE: the quickest of its turns counts, which other work on the machine delays least.
With `--save` the quickest times are saved under the names of two commits, for `table`.

The parts are sums over a process: `imports` of modules, wherever they are; `tracing`,
`lowering` (to MLIR) and `compiling` as JAX reports them, without imports; `rest` is what
remains of the wall time.
"""

from __future__ import annotations

import argparse
import builtins
import compileall
import contextlib
import gc
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

from report import RESULTS, emit, print_results, versions, write_report

_PARTS = ("imports", "tracing", "lowering", "compiling", "rest")
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
# Seconds of the shortest import that counts: importing a loaded module takes less.
_SHORTEST = 1e-3
# `compare` fails if a command takes more than this many times as long as before.
_SLOWER = 1.1
_PACKAGES = "sparsejax", "pallas_kernels"
_SAVED = RESULTS / "first_result_before.json", RESULTS / "first_result.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("table")
    compare = actions.add_parser("compare")
    compare.add_argument("base", metavar="BASE")
    compare.add_argument("files", type=pathlib.Path, nargs="*", metavar="FILE")
    compare.add_argument("--turns", type=int, default=3)
    compare.add_argument("--epochs", type=int, default=1)
    compare.add_argument("--save", nargs=2, metavar=("BEFORE", "NOW"))
    process = actions.add_parser("process")
    process.add_argument("tree")
    process.add_argument("words", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    match arguments.action:
        case "table":
            for report in (json.loads(path.read_text()) for path in _SAVED):
                report["results"] = [r | r["parts"] for r in report["results"]]
                print_results(report)
        case "compare":
            if len(arguments.files) not in (0, 2):
                parser.error("compare takes TRAIN and TEST, or neither")
            sys.exit(_compare(arguments))
        case _:
            _process(arguments.tree, arguments.words)


def _compare(arguments: argparse.Namespace) -> int:
    """Measures the commands of both trees in turns, and compares them by `verdict`."""
    here = _HERE.parent
    found: dict[str, tuple[list[dict], list[dict]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        base = pathlib.Path(arguments.base)
        if not base.is_dir():
            base = pathlib.Path(folder, "base")
            git = ["git", "-C", str(here), "worktree"]
            add = [*git, "add", "--quiet", "--detach", str(base), arguments.base]
            subprocess.run(add, check=True)
            remove = [*git, "remove", "--force", str(base)]
            stack.callback(subprocess.run, remove, check=True)
        for tree, name in itertools.product((base, here), _PACKAGES):
            # Bytecode is compiled before, as pip does.
            compileall.compile_dir(tree / name, quiet=2)
        train, test = arguments.files or _bundled(pathlib.Path(folder))
        for _ in range(arguments.turns):
            for number, tree in enumerate((base, here)):
                for r in _commands(tree, train, test, epochs=arguments.epochs):
                    name = f"{r['command']} {r['cache']}"
                    found.setdefault(name, ([], []))[number].append(r)
    names = arguments.save or ()
    for number, (path, commit) in enumerate(zip(_SAVED, names, strict=False)):
        quickest = [min(r[number], key=lambda r: r["seconds"]) for r in found.values()]
        (first, *_) = [r.pop("versions") for r in quickest]
        more = {"cpus": len(os.sched_getaffinity(0)), "turns": arguments.turns}
        line = "first_result.py compare"
        write_report(path, line, commit, quickest, versions=first, **more)
    return verdict(
        {
            name: ([r["seconds"] for r in before], [r["seconds"] for r in now])
            for name, (before, now) in found.items()
        }
    )


def verdict(seconds: dict[str, tuple[list[float], list[float]]]) -> int:
    """Prints seconds and ratio of each command in both trees; returns 1 if one is slower.

    Args:
      seconds: for each command the seconds of its turns, in BASE and in the working tree.
    """
    status = 0
    print(f"{'':<16}{'base':>8}{'here':>8}{'ratio':>8}")
    for name, trees in seconds.items():
        before, after = map(min, trees)
        ratio = after / before
        slower = "  slower" if ratio > _SLOWER else ""
        status |= bool(slower)
        print(f"{name:<16}{before:>8.2f}{after:>8.2f}{ratio:>8.2f}{slower}")
    return status


def _bundled(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the bundled data to two files. The second has a fifth of the entries of each row."""
    import sparsejax as sj

    paths = folder / "train.parquet", folder / "test.parquet"
    for data, path in zip(
        sj.datasets.msweb().train.split(0.8, seed=0), paths, strict=True
    ):
        data.save(path)
    return paths


def _commands(
    tree: pathlib.Path, train: pathlib.Path, test: pathlib.Path, *, epochs: int
) -> Iterator[dict]:
    """Runs each command of a tree, cold and then warm; yields measurements by `_timed`."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = str(train.resolve()), str(test.resolve())
        for name in "cold", "warm":
            run, recommended = f"{folder}/{name}", f"{folder}/{name}.csv"
            seen = ["--k", "20", "--exclude-seen", "--out", recommended]
            for words in (
                ["train", first, "--run", run, "--epochs", str(epochs)],
                ["evaluate", run, first, second, "--k", "20"],
                ["predict", run, first, *seen],
            ):
                cache = {"XDG_CACHE_HOME": f"{folder}/cache/{words[0]}"}
                yield {"command": words[0], "cache": name, **_timed(tree, words, cache)}


def _timed(tree: pathlib.Path, words: list[str], environment: dict[str, str]) -> dict:
    """Runs a process; returns its seconds from start to end, and the seconds of its parts."""
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **environment,
    }
    # Users usually do not set this variable, so bytecode is cached.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "process", str(tree), *words]
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(words)} in {tree} has failed:\n{done.stderr}")
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    result["parts"]["rest"] = seconds - sum(result["parts"].values())
    return {"seconds": seconds, **result}


def _process(tree: str, words: list[str]) -> None:
    """Runs one command of a tree as its users do, and prints how long its parts took."""
    sys.path.insert(0, tree)
    spans: list[tuple[float, float, str]] = []
    with _noted_imports(spans):
        gc.disable()  # the command, too, disables garbage collection while it imports
        import jax

        from sparsejax.cli import main as entry

        def listen(event: str, duration_secs: float, **_: object) -> None:
            if event in _EVENTS:
                now = time.perf_counter()
                spans.append((now - duration_secs, now, _EVENTS[event]))

        jax.monitoring.register_event_duration_secs_listener(listen)
        gc.enable()
        status = entry.main(words)
    programs = sum(part == "compiling" for _, _, part in spans)
    found = {"parts": exclusive(spans), "programs": programs, "versions": versions()}
    emit(found)
    # An earlier commit may have no `entry.end`.
    getattr(entry, "end", sys.exit)(status)


@contextlib.contextmanager
def _noted_imports(spans: list[tuple[float, float, str]]) -> Iterator[None]:
    """While this context is open, records the time span of each outermost import in this
    thread.
    """
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


def exclusive(spans: list[tuple[float, float, str]]) -> dict[str, float]:
    """The seconds of each part. A moment that is in several parts counts for the latest one.

    For example, a function is traced inside others, and GPU programs are traced while they are
    lowered.
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


if __name__ == "__main__":
    main()
