"""Finds faults that no test detects: puts each fault into a copy of the tree, and runs tests.

    python benchmarks/mutations.py [--output FILE] [--seconds 28800] [--each SECONDS] [--workers 1]

The faults are in `faults.json`. For each fault, the quick tests whose imports reach the file run,
the nearest first, until one fails. If none fails, the slow tests run. If none of these fails, no
test detects the fault. Each result is written at once, so a run may be stopped at any time, and the
next run tries the other faults. A fault whose line has changed is skipped, and named: replace it by
a similar one.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

_TREE = pathlib.Path(__file__).resolve().parent.parent
# Each fault is a list: a file, a text that it contains once, and the replacement.
FAULTS = json.loads((_TREE / "benchmarks" / "faults.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    results = _TREE / "benchmarks" / "results" / "mutations.json"
    parser.add_argument("--output", type=pathlib.Path, default=results)
    parser.add_argument("--seconds", type=float, default=28_800)
    parser.add_argument("--each", type=float, default=28_800, help="for one fault")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    distances = _distances()
    found: list[dict] = []
    if arguments.output.exists():
        found = json.loads(arguments.output.read_text())
    tried = {(result["file"], result["old"]) for result in found}
    there = [fault for fault in FAULTS if _can_be_made(fault)]
    for name, old, _ in [fault for fault in FAULTS if fault not in there]:
        print(f"left out, as {name} has it not once any more: {old}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        futures = [
            pool.submit(_tried, fault, distances, end, arguments.each)
            for fault in there
            if tuple(fault[:2]) not in tried
        ]
        for future in concurrent.futures.as_completed(futures):
            if (result := future.result()) is not None:
                found.append(result)
                arguments.output.write_text(json.dumps(found, indent=1) + "\n")
                print(result["file"], result["seen_by"], flush=True)


def _can_be_made(fault: list[str]) -> bool:
    """Whether the file exists, and contains the fault's text exactly once."""
    path = _TREE / fault[0]
    return path.is_file() and path.read_text().count(fault[1]) == 1


def _distances() -> dict[pathlib.Path, dict[pathlib.Path, int]]:
    """For each test file, the number of imports in the shortest chain from it to each other
    file.
    """
    folders = ("sparsejax", "pallas_kernels", "tests")
    files = [path for folder in folders for path in (_TREE / folder).rglob("*.py")]
    names = {}
    for path in files:
        parts = path.relative_to(_TREE).with_suffix("").parts
        names[".".join(part for part in parts if part != "__init__")] = path
        if parts[0] == "tests":
            # Test files import each other by this name.
            names.setdefault(path.stem, path)
    imports = {
        path: {names[name] for name in _imported(path) if name in names}
        for path in files
    }
    return {
        path: _reached(path, imports)
        for path in files  # `as_user` is excluded, because its fixtures differ
        if path.name.startswith("test_") and path.parent.name != "as_user"
    }


def _imported(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def _reached(start: pathlib.Path, imports: dict) -> dict[pathlib.Path, int]:
    found, queue = {start: 0}, collections.deque([start])
    while queue:
        path = queue.popleft()
        for target in imports[path] - found.keys():
            found[target] = found[path] + 1
            queue.append(target)
    return found


def _tried(fault: list[str], distances: dict, end: float, each: float) -> dict | None:
    """Returns the fault with the first test that detects it, if any; None if all time is over.

    If the time for this fault is over, the result names the tier of tests that was running.
    """
    name, old, new = fault
    text = (_TREE / name).read_text()
    target = _TREE / name
    reached = {p: d[target] for p, d in distances.items() if target in d}

    def order(path: pathlib.Path) -> tuple:
        other = path.stem != f"test_{target.stem}"
        return other, path.parent.name != target.parent.name, reached[path], path

    tests = [str(p.relative_to(_TREE)) for p in sorted(reached, key=order)]
    result: dict[str, Any] = {
        "file": name,
        "old": old,
        "new": new,
        "seen_by": None,
        "tier": None,
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "tree")
        # Compiled modules are copied too: Python checks them by the time and size of their source.
        left_out = shutil.ignore_patterns(".*", "results")
        shutil.copytree(_TREE, copy, ignore=left_out)
        (copy / name).write_text(text.replace(old, new))
        # The nearest tests run first, because collecting all tests takes longer than running the
        # nearest.
        parts = tests[:2], tests[2:16], tests[16:]
        tiers = "not slow and not release", "slow or release"
        for tier, some in ((tier, part) for tier in tiers for part in parts):
            left = end - time.monotonic()
            spent = time.monotonic() - start
            if left <= 0:
                return None
            command = ["pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
            try:
                done = subprocess.run(
                    [sys.executable, "-m", *command, "-m", tier, *some],
                    cwd=copy,
                    env={
                        **os.environ,
                        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                        "PYTHONPATH": f"{copy}:{os.environ.get('PYTHONPATH', '')}",
                    },
                    capture_output=True,
                    text=True,
                    timeout=max(1, min(left, each - spent)),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    return None
                result["tier"] = f"{tier}: the time was over"
                break
            lines = done.stdout.splitlines()
            seen = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
            if seen:
                result |= {"seen_by": seen[0].split(" - ")[0], "tier": tier}
                break
    return result | {"seconds": round(time.monotonic() - start, 1)}


if __name__ == "__main__":
    main()
