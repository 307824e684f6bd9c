"""What a training step of an embedding collection consists of. Needs no GPU.

    python benchmarks/embeddings.py lowered    operations, with 1, 26 and 260 tables
    python benchmarks/embeddings.py traffic    bytes that a device sends, of 8 on a CPU

`lowered` lowers a step for CUDA, and fails if it has more kernels, sorts or collectives with
more tables. `traffic` compiles a step for 8 CPU devices, adds up what its collectives send, and
fails if that is not within 10 % of what `sparsejax.mesh.exchange.bytes_sent` predicts. It
counts a step in which all ids have places. With a law of the ids, rows cross once for each
distinct id. `embedding_times.py` has times.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import table

import sparsejax as sj
from sparsejax.embeddings.placement import Distinct
from sparsejax.embeddings.planner import distinct_ids
from sparsejax.mesh.exchange import bytes_sent

_TABLES = 1, 26, 260
# Of all tables together: so many rows for an id that forms of an operation stay the same.
_IDS, _ROWS = 260 * 8, 260 * 160
_COUNTED = {
    "our programs": "stablehlo.custom_call @mosaic_gpu",
    **{
        name: f'"stablehlo.{name}"'
        for name in (
            "gather",
            "scatter",
            "sort",
            "while",
            "case",
            "all_to_all",
            "all_gather",
            "all_reduce",
            "reduce_scatter",
        )
    },
}
_TYPE = re.compile(r"\b[a-z]+(\d*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)|branch_computations=\{%?([\w.\-]+)"
    r"|false_computation=%?([\w.\-]+)"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["lowered", "traffic"])
    action = parser.parse_args().action
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print("\n".join({"lowered": lowered, "traffic": traffic}[action]()))


class _Features(nnx.Module):
    """A collection with one id for each feature."""

    def __init__(self, tables: int, rows: int, dim: int, placement: Any, **options):
        configs = {
            f"t{i}": sj.embeddings.TableConfig(rows, dim, placement=placement)
            for i in range(tables)
        }
        features = {f"f{i}": f"t{i}" for i in range(tables)}
        self.embeddings = sj.embeddings.EmbeddingCollection(
            configs, features, rngs=nnx.Rngs(0), **options
        )


def _traced(model: _Features, batch: int):
    """A step: lookup, gradient, row-wise Adagrad."""
    optimizer = sj.Optimizer(model, sj.optimizers.rowwise_adagrad(0.1))
    graphdef, state = nnx.split((model, optimizer))

    def step(state, ids):
        model, optimizer = nnx.merge(graphdef, state)

        def loss_fn(model):
            return jnp.sum(model.embeddings.concat(ids) ** 2)

        loss, grads = optimizer.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss, nnx.state((model, optimizer))

    ids = {name: np.zeros(batch, np.int32) for name in model.embeddings.names}
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        spec = jax.NamedSharding(mesh, jax.P(("data", "model")))
        ids = jax.tree.map(lambda array: jax.device_put(array, spec), ids)
    return jax.jit(step, donate_argnums=0).trace(state, ids)


def _mesh(shape: tuple[int, int] | None):
    if shape is None:
        return contextlib.nullcontext()
    return jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))


def lowered() -> list[str]:
    """A table of the operations of a step."""
    rows = []
    for shape in None, (1, 8), (2, 4):
        found = []
        for tables in _TABLES:
            with _mesh(shape):
                model = _Features(
                    tables, _ROWS // tables, 16, "rows", implementation="mosaic_gpu"
                )
                step = _traced(model, _IDS // tables)
                text = step.lower(lowering_platforms=("cuda",)).as_text()
            counts = [text.count(mark) for mark in _COUNTED.values()]
            name = "one device" if shape is None else f"{shape[0]} x {shape[1]}"
            rows.append([name, str(tables), *map(str, counts)])
            found.append(counts)
        if any(counts != found[0] for counts in found):
            raise ValueError(f"a step has more operations with more tables: {found}")
    return table(["mesh", "tables", *_COUNTED], rows)


def traffic() -> list[str]:
    """A table of the bytes that a device sends in a step, counted and predicted."""
    rows, tables, batch = [], 26, 4096
    cases = [
        ((1, 8), 16, "rows", None, None),
        ((1, 8), 16, "rows", None, 1.2),
        ((1, 8), 128, "rows", None, None),
        ((1, 8), 128, "rows", None, 1.2),
        ((1, 8), 128, "rows", "bfloat16", None),
        ((1, 8), 128, "rows", "bfloat16", 1.2),
        ((2, 4), 128, "rows", None, None),
        ((2, 4), 128, "rows", None, 1.2),
        ((2, 4), 128, "rows", "bfloat16", None),
        ((8, 1), 16, "rows", None, None),
        ((2, 4), 16, "replicated", None, None),
    ]
    for shape, dim, placement, wire, zipf in cases:
        with _mesh(shape):
            model = _Features(tables, 1000, dim, placement, wire_dtype=wire)
            stack, known = model.embeddings.stacks[0], None
            examples = batch // math.prod(shape)
            if zipf is not None:
                each = distinct_ids("t", zipf, 1000, examples)
                rows_of = tuple((f"t{i}", each) for i in range(tables))
                known = Distinct(examples, rows_of)
                model.embeddings.expect(known)
            text = _traced(model, batch).lower().compile().as_text()
        entries = tables * batch
        replicated = stack.num_rows if placement == "replicated" else None
        sent = bytes_sent(
            entries,
            entries,
            dim,
            data=shape[0],
            model=shape[1],
            wire_dtype=wire or jnp.float32,
            distinct=stack.distinct_of_owner(shape[1], examples, known),
            replicated_rows=replicated,
        )
        counted = counted_bytes(text or "")
        mesh, wire = f"{shape[0]} x {shape[1]}", wire or "float32"
        share = counted / sent.total
        parts = (f"{part:,}" for part in (*sent, sent.total, counted))
        case = [mesh, str(dim), placement, wire, str(zipf or "-")]
        rows.append([*case, *parts, f"{share:.3f}"])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        if not 0.9 < share < 1.1:
            raise ValueError(f"counted {counted:,}, predicted {sent.total:,}")
    names = ["ids", "sums", "gradients", "predicted", "counted", "counted / predicted"]
    return table(["mesh", "dim", "placement", "on the wire", "zipf", *names], rows)


def counted_bytes(text: str) -> int:
    """Bytes that a device sends in a compiled program, with ids that all have places.

    A ring is assumed. Of a conditional the first branch counts, which is the one of false.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)

    def sent(name: str) -> float:
        total = 0.0
        for line in computations[name]:
            if found := _COLLECTIVE.search(line):
                total += _sent_by(found[2], _size(found[1]), _group(line))
            else:
                called = (next(filter(None, m)) for m in _CALLED.findall(line))
                total += sum(sent(other) for other in called)
        return total

    return round(sent(entry))


def _sent_by(operation: str, size: float, group: int) -> float:
    """What one device sends, given the bytes of its result."""
    others = group - 1
    return {
        "all-to-all": size * others / group,
        "all-gather": size * others / group,
        "all-reduce": size * 2 * others / group,
        "reduce-scatter": size * others,
        "collective-permute": size,
    }[operation]


def _size(types: str) -> float:
    """Bytes of a type, or of a tuple of types."""
    return sum(
        int(bits or 8) / 8 * math.prod(int(n) for n in shape.split(",") if n)
        for bits, shape in _TYPE.findall(types)
    )


def _group(line: str) -> int:
    """How many devices take part together: as axes of a mesh, or listed."""
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", found[2]))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1
    raise ValueError(f"no groups of devices: {line}")


if __name__ == "__main__":
    main()
