"""Which faults the tests see: each is put into a copy of the tree, and tests run on it.

    python benchmarks/mutations.py [--output FILE] [--seconds 28800] [--each SECONDS] [--workers 1]

For each fault the quick tests run whose imports reach the file, the nearest first, until one
fails. If none does, the slow ones follow. What is left is a fault that no test sees. Results are
written as they come, so that a run may end at any time, and the next one tries the others.
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
# A file, what stands there once, and what takes its place.
FAULTS = [
    (
        "sparsejax/sparse.py",
        "lacking = source >= matrix.nse",
        "lacking = source > matrix.nse",
    ),
    (
        "sparsejax/sparse.py",
        "used &= columns < self.num_cols",
        "used &= columns <= self.num_cols",
    ),
    (
        "sparsejax/sparse.py",
        "return jnp.asarray(self.indptr)[1:] > self.nse",
        "return jnp.asarray(self.indptr)[1:] > self.nse + 1",
    ),
    (
        "sparsejax/losses.py",
        "return jnp.where(scores >= _logit(self.one_target), 0, loss)",
        "return jnp.where(scores >= _logit(self.zero_target), 0, loss)",
    ),
    (
        "sparsejax/losses.py",
        "return jnp.square(_relu(jnp.where(labels > 0, -error, error))) / 2",
        "return jnp.square(_relu(jnp.where(labels >= 0, -error, error))) / 2",
    ),
    (
        "sparsejax/metrics/ranking.py",
        "return _hits(ids, labels, k) / jnp.clip(_num_labels(labels, left_out), 1, k)",
        "return _hits(ids, labels, k) / jnp.maximum(_num_labels(labels, left_out), 1)",
    ),
    (
        "sparsejax/metrics/clicks.py",
        "ordered = np.add.reduceat(clicks * (below + others / 2), first)",
        "ordered = np.add.reduceat(clicks * (below + others), first)",
    ),
    (
        "sparsejax/metrics/binned_auc.py",
        "high=self.high + other.high + (low >> _LOW_BITS),",
        "high=self.high + other.high,",
    ),
    (
        "sparsejax/mesh/exchange.py",
        "first = ((owner != before[0]) | (bag != before[1])) & (owner < model)",
        "first = ((owner != before[0]) & (bag != before[1])) & (owner < model)",
    ),
    (
        "sparsejax/mesh/exchange.py",
        "column = jnp.where(wrong, -1, column - owner * width)",
        "column = jnp.where(wrong, 0, column - owner * width)",
    ),
    (
        "sparsejax/mesh/blocks.py",
        "padding = local >= self.blocks.num_rows",
        "padding = local > self.blocks.num_rows",
    ),
    (
        "sparsejax/ops/top_k.py",
        "return jnp.where(jnp.isnan(grouped).any(axis=2), jnp.nan, largest)",
        "return largest",
    ),
    (
        "sparsejax/ops/top_k.py",
        "width = k if size < here else max(0, k - size)",
        "width = k if size <= here else max(0, k - size)",
    ),
    (
        "sparsejax/ops/row_update.py",
        "state, jnp.where(trained.last == NEVER, NEVER, count)",
        "state, count + 0 * trained.last",
    ),
    (
        "sparsejax/ops/row_update.py",
        "return jnp.where(last == NEVER, 0, count - last)",
        "return jnp.where(last == NEVER, 0, count - last - 1)",
    ),
    (
        "sparsejax/ops/gram_loss.py",
        "moments = _moments(jnp.where(used, wide, 0), weights)",
        "moments = _moments(wide, weights)",
    ),
    (
        "sparsejax/ops/linear_cross_entropy.py",
        "size = min(len(targets), max(1, -(-len(wanted) // step)) * step)",
        "size = min(len(targets), max(1, len(wanted) // step) * step)",
    ),
    (
        "sparsejax/ops/scatter_gradient.py",
        "return jnp.where(ids < num_cols, ids, num_rows), values",
        "return ids, values",
    ),
    (
        "pallas_kernels/selection.py",
        "upper = n >= count",
        "upper = n > count",
    ),
    (
        "pallas_kernels/output_loss.py",
        "scores = jnp.where(inside, scores, -jnp.inf)",
        "scores = scores",
    ),
    (
        "pallas_kernels/gather_matmul.py",
        "row = first + i * 8",
        "row = first + i * 4",
    ),
    (
        "sparsejax/optimizers/rules/adaptive.py",
        'e_g = (1 - self.rho) * jnp.square(gradient) + self.rho * state["e_g"]',
        'e_g = self.rho * jnp.square(gradient) + (1 - self.rho) * state["e_g"]',
    ),
    (
        "sparsejax/optimizers/rules/plain.py",
        "return Linear(-rate * decay * (1 + mu), -rate * mu * mu, decay, mu)",
        "return Linear(-rate * decay * (1 + mu), -rate * mu, decay, mu)",
    ),
    (
        "sparsejax/optimizers/rules/moments.py",
        "return Linear(ww=-rate * self.weight_decay)",
        "return Linear(ww=rate * self.weight_decay)",
    ),
    (
        "sparsejax/optimizers/gradients.py",
        "used = ids >= 0",
        "used = ids > 0",
    ),
    (
        "sparsejax/nn/sampled.py",
        "others = jnp.where(counted, others + stands_for[None], -jnp.inf)",
        "others = jnp.where(counted, others - stands_for[None], -jnp.inf)",
    ),
    (
        "sparsejax/nn/closed_form.py",
        "scores = (z - a * (u_squared - less)) / (error + less) / data.damping",
        "scores = (z - a * (u_squared + less)) / (error + less) / data.damping",
    ),
    (
        "sparsejax/nn/layers.py",
        "scores = scores * scale[ids]",
        "scores = scores",
    ),
    (
        "sparsejax/sequence/hstu.py",
        "return bias + self.time_bias[...][jnp.minimum(bucket, _BUCKETS - 1)][:, None]",
        "return bias + self.time_bias[...][jnp.minimum(bucket + 1, _BUCKETS - 1)][:, None]",
    ),
    (
        "sparsejax/embeddings/placement.py",
        "inside = (number >= 0) & (ids >= 0)",
        "inside = number >= 0",
    ),
    (
        "sparsejax/embeddings/lookup.py",
        "bag = x.row_ids() % stack.bags",
        "bag = x.row_ids() // stack.bags",
    ),
    (
        "sparsejax/embeddings/table_files.py",
        "count = min(rows, max(1, BLOCK_NUMBERS // dim))",
        "count = min(rows, max(1, BLOCK_NUMBERS // dim)) - 0 if rows < 2 else min(rows - 1, max(1, BLOCK_NUMBERS // dim))",
    ),
    (
        "sparsejax/data/sets/split.py",
        "first_held = indptr[1:] - np.minimum(n, np.maximum(lengths - 1, 0))",
        "first_held = indptr[1:] - np.minimum(n, lengths)",
    ),
    (
        "sparsejax/data/sets/split.py",
        "return distinct[1 + np.argmin(np.abs(before - fraction * len(times)))]",
        "return distinct[np.argmin(np.abs(before - fraction * len(times)))]",
    ),
    (
        "sparsejax/data/sets/click_columns.py",
        'kept = np.flatnonzero((counts >= min_count) & (names != ""))',
        'kept = np.flatnonzero((counts > min_count) & (names != ""))',
    ),
    (
        "sparsejax/data/sets/sequences.py",
        "first_held = self.indptr[1:] - np.minimum(n, np.maximum(lengths - 1, 0))",
        "first_held = self.indptr[1:] - np.minimum(n, lengths)",
    ),
    (
        "sparsejax/engine/batching.py",
        "missing = (0, steps * batch_size - len(rows))",
        "missing = (steps * batch_size - len(rows), 0)",
    ),
    (
        "sparsejax/engine/rank/tasks.py",
        "valid = candidates >= 0",
        "valid = candidates > 0",
    ),
    (
        "sparsejax/engine/rank/evaluation.py",
        "users_unknown=int(np.sum((total > 0) & (num_known == 0))),",
        "users_unknown=int(np.sum(num_known == 0)),",
    ),
    (
        "sparsejax/engine/train/resident.py",
        "return shard * each + shard.clip(max=more)",
        "return shard * each + more",
    ),
    (
        "sparsejax/kinds/histories/job.py",
        "histories = jnp.where(weights[:, None] > 0, histories, -1)",
        "histories = histories",
    ),
    (
        "sparsejax/engine/train/progress.py",
        "return waits and time.monotonic() - self._saved >= self._seconds",
        "return time.monotonic() - self._saved >= self._seconds",
    ),
    (
        "sparsejax/dsstne/rules.py",
        'velocity = self.mu * state["velocity"] - numbers * gradient',
        'velocity = self.mu * state["velocity"] + numbers * gradient',
    ),
    (
        "sparsejax/dsstne/layers.py",
        "ids = jnp.where(scores == -jnp.inf, -1, ids)",
        "ids = ids",
    ),
    (
        "sparsejax/dsstne/text.py",
        "second = entry[has_comma] + 1  # the field behind the first comma",
        "second = entry[has_comma]",
    ),
    (
        "sparsejax/cli/tune.py",
        "if epoch - best_epoch >= (command.patience or math.inf):",
        "if epoch - best_epoch > (command.patience or math.inf):",
    ),
]


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
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        futures = [
            pool.submit(_tried, fault, distances, end, arguments.each)
            for fault in FAULTS
            if fault[:2] not in tried
        ]
        for future in concurrent.futures.as_completed(futures):
            if (result := future.result()) is not None:
                found.append(result)
                arguments.output.write_text(json.dumps(found, indent=1) + "\n")
                print(result["file"], result["seen_by"], flush=True)


def _distances() -> dict[pathlib.Path, dict[pathlib.Path, int]]:
    """For each file of tests, how many imports lead from it to each file."""
    folders = ("sparsejax", "pallas_kernels", "tests")
    files = [path for folder in folders for path in (_TREE / folder).rglob("*.py")]
    names = {}
    for path in files:
        parts = path.relative_to(_TREE).with_suffix("").parts
        names[".".join(part for part in parts if part != "__init__")] = path
        if parts[0] == "tests":
            names.setdefault(path.stem, path)  # tests import each other so
    imports = {
        path: {names[name] for name in _imported(path) if name in names}
        for path in files
    }
    return {
        path: _reached(path, imports) for path in files if path.name.startswith("test_")
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


def _tried(
    fault: tuple[str, str, str], distances: dict, end: float, each: float
) -> dict | None:
    """The fault with the test that sees it, if one does; None if all time is over.

    If the time for one fault is over, it has the tier in which that was.
    """
    name, old, new = fault
    text = (_TREE / name).read_text()
    if text.count(old) != 1:
        raise ValueError(f"{name} must have this once: {old}")
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
        left_out = shutil.ignore_patterns(".*", "results", "__pycache__")
        shutil.copytree(_TREE, copy, ignore=left_out)
        (copy / name).write_text(text.replace(old, new))
        # To collect all tests takes longer than to run those of the file itself.
        parts = tests[:2], tests[2:]
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
                        "PYTHONPATH": str(copy),
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
