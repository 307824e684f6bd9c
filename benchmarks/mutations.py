"""Which faults the tests see: each is put into a copy of the tree, and tests run on it.

    python benchmarks/mutations.py [--output FILE] [--seconds 28800] [--each SECONDS] [--workers 1]

For each fault the quick tests run whose imports reach the file, the nearest first, until one
fails. If none does, the slow ones follow. What is left is a fault that no test sees. Results are
written as they come, so that a run may end at any time, and the next one tries the others. A fault
whose line has changed is left out, and named: choose another one like it.
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
        "grouped = jnp.where(jnp.isnan(grouped), jnp.nan, grouped)",
        "grouped = grouped * 1",
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
        "time_bias=self.time_bias[...],",
        "time_bias=self.time_bias[...][::-1],",
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
    # Chosen later: services, dynamic and host tables, content, exchange, `sj.jit`, attention,
    # and then the rest.
    (
        "sparsejax/serving/batcher.py",
        "self.count = self.count + 1 if failed else 0",
        "self.count = self.count + 1",
    ),
    (
        "sparsejax/serving/batcher.py",
        "return self._rows >= self._full_rows or self._entries >= self._full_entries",
        "return self._rows >= self._full_rows",
    ),
    (
        "sparsejax/serving/batcher.py",
        "is_late = deadline is not None and deadline <= now",
        "is_late = False",
    ),
    (
        "sparsejax/serving/batcher.py",
        "if any(start <= row < end for row in bad_rows):",
        "if any(start < row < end for row in bad_rows):",
    ),
    (
        "sparsejax/serving/changes.py",
        "if before is None or taken.checksum != before.checksum:",
        "if before is None:",
    ),
    (
        "sparsejax/serving/histories.py",
        "elif most is not None and len(last) > most:",
        "elif most is not None and len(last) > most + 1:",
    ),
    (
        "sparsejax/serving/service.py",
        "others = [each for each in before if each.name != version.name]",
        "others = [*before]",
    ),
    (
        "sparsejax/serving/service.py",
        "return allowed if seconds is None else min(allowed, seconds)",
        "return allowed",
    ),
    (
        "sparsejax/serving/service.py",
        "if self._in_hand >= self.settings.at_once:",
        "if self._in_hand > self.settings.at_once:",
    ),
    (
        "sparsejax/serving/versions.py",
        "passed = min(2 ** (trouble.times - 1) - 1, _MOST_PASSED)",
        "passed = 0",
    ),
    (
        "sparsejax/serving/questions.py",
        "scores = np.where(is_item, scores, _NO_SCORE).ravel()",
        "scores = scores.ravel()",
    ),
    (
        "sparsejax/serving/questions.py",
        "most = None if self._room is None else max(0, self._room - int(taken[row]))",
        "most = self._room",
    ),
    (
        "sparsejax/serving/engine.py",
        "return self.rows <= shape.rows and most <= shape.entries",
        "return self.rows <= shape.rows",
    ),
    (
        "sparsejax/serving/connections.py",
        "if len(self.pipeline) >= _MOST_PIPELINED:",
        "if len(self.pipeline) > 2 * _MOST_PIPELINED:",
    ),
    (
        "sparsejax/serving/connections.py",
        "if len(self.url) + len(url) > _MOST_URL:",
        "if len(url) > 2 * _MOST_URL:",
    ),
    (
        "sparsejax/serving/excluded.py",
        "if self._state() == self._facts and not self._is_bad:",
        "if self._facts is not None:",
    ),
    (
        "sparsejax/embeddings/dynamic/admission.py",
        "seen = jnp.minimum(seen + counts, MOST_COUNTED)",
        "seen = jnp.minimum(counts, MOST_COUNTED)",
    ),
    (
        "sparsejax/embeddings/dynamic/admission.py",
        "admitted &= (threshold == 0) | (seen >= threshold)",
        "admitted &= (threshold == 0) | (seen > threshold)",
    ),
    (
        "sparsejax/embeddings/dynamic/eviction.py",
        "expired = can & (last < now) & (age > most)",
        "expired = can & (last < now) & (age >= most)",
    ),
    (
        "sparsejax/embeddings/dynamic/eviction.py",
        "faded = jnp.where((lacking > 0)[:, None], number.faded(mine), mine)",
        "faded = mine",
    ),
    (
        "sparsejax/embeddings/row_numbers.py",
        'return values.at[at].add(jnp.where(counts, times, 0), mode="drop")',
        'return values.at[at].add(jnp.where(counts, 1, 0), mode="drop")',
    ),
    (
        "sparsejax/embeddings/dynamic/assignment.py",
        "missing = wanted & (found < 0)",
        "missing = wanted & (found <= 0)",
    ),
    (
        "sparsejax/embeddings/dynamic/assignment.py",
        "lacking = needed > state.index.num_free",
        "lacking = needed > state.index.num_free + 1",
    ),
    (
        "sparsejax/embeddings/dynamic/files.py",
        "return array.astype(jnp.float32) if array.dtype.itemsize == 2 else array",
        "return array",
    ),
    (
        "sparsejax/embeddings/host_slots.py",
        "start = jnp.where(filled < size, filled, hand)",
        "start = filled",
    ),
    (
        "sparsejax/embeddings/host_slots.py",
        "jnp.where(is_full, (start + window) % size, hand),",
        "hand,",
    ),
    (
        "sparsejax/embeddings/host_rows.py",
        "known = self._known[rows] & _NUMBERS > 0",
        "known = self._known[rows] >= 0",
    ),
    (
        "sparsejax/embeddings/changes.py",
        'is_seed = isinstance(node, IndexState) and path[-1] == "seed"',
        "is_seed = False",
    ),
    (
        "sparsejax/embeddings/row_codes.py",
        "scale = ((exact.max(axis=1) - low) / 255).astype(np.float32)",
        "scale = ((exact.max(axis=1) - low) / 256).astype(np.float32)",
    ),
    (
        "sparsejax/nn/content_vectors.py",
        "return lax.rsqrt(jnp.maximum(square, _MIN_NORM**2))",
        "return lax.rsqrt(square)",
    ),
    (
        "sparsejax/nn/content_vectors.py",
        "inside = (ids >= 0) & (here >= 0) & (here < size)",
        "inside = (here >= 0) & (here <= size)",
    ),
    (
        "sparsejax/nn/item_content.py",
        "none = self.entries[...] == 0",
        "none = self.entries[...] < 0",
    ),
    (
        "sparsejax/nn/item_content.py",
        "is_item = jnp.arange(len(none)) < self.items",
        "is_item = jnp.arange(len(none)) <= self.items",
    ),
    (
        "sparsejax/mesh/exchange.py",
        "count = min(mine, places(entries * share, room))",
        "count = mine",
    ),
    (
        "sparsejax/mesh/exchange.py",
        "sums = (model - 1) * slots.count * dim * size",
        "sums = model * slots.count * dim * size",
    ),
    (
        "sparsejax/mesh/exchange.py",
        "return dtype if wire is None or wire.itemsize >= dtype.itemsize else wire",
        "return dtype",
    ),
    (
        "sparsejax/mesh/exchange.py",
        "ends = jnp.where(over, x.nse + 1, ptr[1:] - ptr[0])",
        "ends = ptr[1:] - ptr[0]",
    ),
    (
        "sparsejax/engine/train/jit.py",
        "while len(self._split) >= _REMEMBERED:",
        "while False:",
    ),
    (
        "sparsejax/engine/train/jit.py",
        "if graphdef != how.graphdef or jax.tree.structure(state) != how.structure:",
        "if False:",
    ),
    (
        "sparsejax/engine/train/jit.py",
        "if number < 0 or (number >= len(by_place) and not any_place):",
        "if number < 0:",
    ),
    (
        "sparsejax/ops/history_attention.py",
        'scale = 1.0 if activation == "silu" else q.shape[2] ** -0.5',
        "scale = q.shape[2] ** -0.5",
    ),
    (
        "sparsejax/ops/history_attention.py",
        "wrong[1:] |= used[1:] < used[:-1]",
        "wrong[1:] |= used[1:] < 0",
    ),
    (
        "sparsejax/engine/train/following.py",
        "count = min(examples.num_rows - start, steps * size)",
        "count = steps * size",
    ),
    (
        "sparsejax/engine/train/following.py",
        "is_new = self._call.has_failed() or step > self._step",
        "is_new = step > self._step",
    ),
    (
        "sparsejax/engine/train/progress.py",
        "if score > self.best:",
        "if score >= self.best:",
    ),
    (
        "sparsejax/kinds/clicks/calibrate.py",
        "wanted = np.where(clicked, (ones + 1) / (ones + 2), 1 / (zeros + 2))",
        "wanted = np.where(clicked, 1.0, 0.0)",
    ),
    (
        "sparsejax/metrics/comparison.py",
        "return self.low > 0 or self.high < 0",
        "return self.low > 0",
    ),
    (
        "sparsejax/engine/rank/nearest.py",
        "array = array / np.where(norm > 0, norm, 1)",
        "array = array / norm",
    ),
    (
        "sparsejax/engine/rank/evaluation.py",
        "counts >= least if most is None else (counts >= least) & (counts <= most)",
        "counts >= least if most is None else (counts >= least) & (counts < most)",
    ),
    (
        "sparsejax/engine/rank/evaluation.py",
        'labels = known if setup.unknown == "skip" else given.heldout',
        "labels = given.heldout",
    ),
    (
        "sparsejax/runs/folders.py",
        "splits_otherwise = self.validation_split != before.validation_split",
        "splits_otherwise = False",
    ),
    (
        "sparsejax/runs/publishing.py",
        "if not found.low > 0:",
        "if not found.high > 0:",
    ),
    (
        "sparsejax/data/prepared/preparation.py",
        'return is_cut or self.duplicates == "last"',
        "return is_cut",
    ),
    (
        "sparsejax/data/sets/split.py",
        'is_held = later & ~known if repeats == "new" else later',
        "is_held = later",
    ),
    (
        "sparsejax/data/files/stored.py",
        "if file.schema_arrow.metadata.get(_CHECKSUM_KEY) == _checksum(rows):",
        "if True:",
    ),
    (
        "sparsejax/data/events/sniff.py",
        "repeated = len(set(rows)) < len(rows)  # in text a row stands on one line",
        "repeated = False",
    ),
    (
        "sparsejax/optimizers/rules/replay.py",
        "return jnp.where(moves, jnp.minimum(lag, self.steps), 0)",
        "return jnp.minimum(lag, self.steps - 1)",
    ),
    (
        "sparsejax/optimizers/rules/missed_steps.py",
        "here = (position >= 0) & (position < _CHUNK)",
        "here = position < _CHUNK",
    ),
    (
        "sparsejax/cli/train.py",
        "patience=command.patience,",
        "",
    ),
    (
        "sparsejax/cli/train.py",
        "fused=command.fused,",
        "",
    ),
    (
        "sparsejax/optimizers/rules/proximal.py",
        'sigma = (jnp.sqrt(n) - jnp.sqrt(state["n"])) / rate',
        'sigma = (jnp.sqrt(n) + jnp.sqrt(state["n"])) / rate',
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
    there = [fault for fault in FAULTS if _can_be_made(fault)]
    for name, old, _ in [fault for fault in FAULTS if fault not in there]:
        print(f"left out, as {name} has it not once any more: {old}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        futures = [
            pool.submit(_tried, fault, distances, end, arguments.each)
            for fault in there
            if fault[:2] not in tried
        ]
        for future in concurrent.futures.as_completed(futures):
            if (result := future.result()) is not None:
                found.append(result)
                arguments.output.write_text(json.dumps(found, indent=1) + "\n")
                print(result["file"], result["seen_by"], flush=True)


def _can_be_made(fault: tuple[str, str, str]) -> bool:
    """Whether the file is there, and has the text of the fault once."""
    path = _TREE / fault[0]
    return path.is_file() and path.read_text().count(fault[1]) == 1


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
