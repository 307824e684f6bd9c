"""Times DLRM on MLPerf's tables: lookup, update of the tables, and whole training steps.

    python benchmarks/dlrm.py run [--commit NAME]    on a GPU; rows are cut if it is small
    python benchmarks/dlrm.py table                  anywhere

The tables are the 26 of MLPerf's DLRM: 204 M rows of 128, 105 GB in float32. `criteo` has
one id of each table in an example and a batch of 65,536, `dcnv2` the 214 ids of MLPerf's
multi-hot data and a batch of 16,384. *Lookup* makes `[batch, 26 * 128]` of packed ids.
*Update* starts with the gradient of that array: it sorts the ids, sums the gradients of each
row, and applies row-wise Adagrad in place. *Step* is a training step of MLPerf's DLRM from ids to
updated parameters, with bfloat16 layers. FBGEMM's table-batched embedding gets the ids in its
own form, and the layers of its step are torch's.
`notes/dlrm.md` predicts a step by its parts.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import numpy as np
from report import command, largest, reported
from timing import relative_error, time_kernels, time_torch
from workloads import CRITEO_IDS, CRITEO_ROWS, click_step, zipf_ids

_SKEWS = 0.8, 1.05
_BATCHES, _REPEATS, _STEPS = 3, 9, 30
_DENSE, _DIM = 13, 128
_BOTTOM, _TOP = (512, 256), (1024, 1024, 512, 256)
_RATE, _EPS = 0.02, 1e-8
# The tables take three quarters of an H200's memory, so JAX preallocates nearly all of it.
_MEMORY = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
}
_PARTS = {
    f"{peer} {workload}": _MEMORY
    for peer in ("jax", "fbgemm", "torch")
    for workload in ("criteo", "dcnv2")
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables of 128 columns, and the number of ids that an example has for each table."""

    name: str
    rows: tuple[int, ...]
    ids: tuple[int, ...]
    batch: int

    @classmethod
    def called(cls, name: str, memory: int | None) -> Workload:
        """The workload with this name. Its tables are cut to take at most 0.85 of the memory.

        Without a memory, as on a CPU, all sizes are tiny, to test the program.
        """
        batch, ids = 65_536, (1,) * len(CRITEO_ROWS)
        if name == "dcnv2":
            batch, ids = 16_384, CRITEO_IDS
        if memory is None:
            return cls(name, tuple(min(n, 500) for n in CRITEO_ROWS), ids, 256)
        most = max(CRITEO_ROWS)
        while sum(min(n, most) for n in CRITEO_ROWS) * _DIM * 4 > 0.85 * memory:
            # Steps by a factor of 2 are large, so that all libraries get equal tables.
            most //= 2
        return cls(name, tuple(min(n, most) for n in CRITEO_ROWS), ids, batch)

    def draw(self, seed: int, skew: float) -> list[np.ndarray]:
        """Draws `[batch, n]` int32 ids for each table."""
        rng = np.random.default_rng(seed)
        pairs = zip(self.rows, self.ids, strict=True)
        return [zipf_ids(rng, (self.batch, n), rows, skew) for rows, n in pairs]

    def bytes(self, task: str, ids: list[np.ndarray]) -> int | None:
        """Bytes that a task must move. Lookup: the row of each id and each result, once. Update:
        the gradients; and the touched rows and their numbers, read and written.
        """
        bags = self.batch * len(self.rows)
        if task == "lookup":
            return 4 * _DIM * (sum(i.size for i in ids) + bags)
        touched = sum(len(np.unique(i)) for i in ids)
        return (
            4 * (bags * _DIM + 2 * touched * (_DIM + 1)) if task == "update" else None
        )


def _measure(part: str) -> Iterator[dict]:
    peer, name = part.split()
    measure = {"jax": _measure_jax, "fbgemm": _measure_fbgemm, "torch": _measure_torch}
    yield from measure[peer](name)


def _result(workload: Workload, skew, task, name, times, ids) -> dict:
    kernels, call = times
    result = {
        "workload": workload.name,
        "rows": sum(workload.rows),
        "batch": workload.batch,
        "zipf": skew,
        "task": task,
        "implementation": name,
        "microseconds": round(sum(kernels.values()), 1),
        "bytes": workload.bytes(task, ids),
    }
    if task == "step":
        result["call_microseconds"] = round(call, 1)
        result["examples_per_second"] = round(1e6 * workload.batch / call)
        result["kernels"] = largest(kernels, 20)
    return result


def _measure_jax(name: str) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import sparsejax as sj
    from sparsejax.mesh.layout import device_memory

    memory = device_memory() if jax.default_backend() == "gpu" else None
    workload = Workload.called(name, memory)
    config = sj.DLRMConfig(dim=_DIM, bottom=_BOTTOM, top=_TOP, dtype="bfloat16")
    names = [f"C{i}" for i in range(1, len(workload.rows) + 1)]
    features = dict(zip(names, workload.rows, strict=True))
    model = sj.clicks.DLRM(
        config, num_dense=_DENSE, features=features, rngs=nnx.Rngs(0)
    )
    rule = sj.optimizers.rowwise_adagrad(_RATE, eps=_EPS)
    drawn = {
        skew: [workload.draw(seed, skew) for seed in range(_BATCHES)] for skew in _SKEWS
    }

    def on_device(ids):
        squeezed = (i[:, 0] if i.shape[1] == 1 else i for i in ids)
        return dict(zip(names, map(jnp.asarray, squeezed), strict=True))

    def packed(skew):
        pack = jax.jit(model.embeddings.pack)
        return [pack(on_device(ids)) for ids in drawn[skew]]

    def look_up(skew):
        # `nnx.jit` would return copies of the tables.
        graphdef, state = nnx.split(model.embeddings)
        concat = jax.jit(lambda state, b: nnx.merge(graphdef, state).concat(b))
        batches = packed(skew)
        _check_lookup(model.embeddings, concat(state, batches[0]), drawn[skew][0])
        return _timed(lambda i: concat(state, batches[i % _BATCHES]))

    @sj.jit
    def updated(embeddings, optimizer, batch, dy):
        # The gradient does not depend on the value of the loss, so XLA removes the lookup.
        _, grads = optimizer.value_and_grad(lambda e: jnp.sum(e.concat(batch) * dy))(
            embeddings
        )
        optimizer.update(embeddings, grads)
        return optimizer.step[...]

    def update(skew):
        embeddings, batches = model.embeddings, packed(skew)
        shape = workload.batch, embeddings.num_outputs
        dy = jax.random.normal(jax.random.key(0), shape)
        optimizer = sj.Optimizer(embeddings, rule)
        some, before = _some_rows(embeddings, names, drawn[skew][0])
        updated(embeddings, optimizer, batches[0], dy)
        after = _some_rows(embeddings, names, drawn[skew][0])[1]
        _check_update(after - before, some, drawn[skew][0], dy)
        return _timed(
            lambda i: updated(embeddings, optimizer, batches[i % _BATCHES], dy)
        )

    optimizer = sj.Optimizer(model, rule, dense=optax.adagrad(_RATE))
    step = click_step()

    def train(skew):
        rng = np.random.default_rng(0)
        dense = jnp.asarray(rng.standard_normal((workload.batch, _DENSE)), jnp.float32)
        click = jnp.asarray(rng.random(workload.batch) < 0.2, jnp.float32)
        batches = [on_device(ids) for ids in drawn[skew]]

        def call(i):
            return step(model, optimizer, dense, batches[i % _BATCHES], click)

        first, times = call(0), _timed(call, _STEPS)
        # Training on one batch ten times must reduce its loss.
        if not float(call(0)) < float(first):
            raise ValueError(f"the loss did not fall from {first}")
        return times

    tasks = {"lookup": look_up, "update": update, "step": train}
    for (task, measure), skew in itertools.product(tasks.items(), _SKEWS):
        with reported(name, task, "sparsejax"):
            ids = drawn[skew][0]
            times = measure(skew)
            yield _result(workload, skew, task, "sparsejax", times, ids)


def _timed(call, steps: int = 0) -> tuple[dict[str, float], float]:
    """Microseconds of each GPU kernel of a call, and of a call when `steps` calls follow each
    other.
    """
    import jax

    kernels = time_kernels(lambda i: jax.block_until_ready(call(i)), _REPEATS)
    start = time.perf_counter()
    last = [call(i) for i in range(steps)][-1:]
    jax.block_until_ready(last)
    return kernels, 1e6 * (time.perf_counter() - start) / max(steps, 1)


def _some_rows(embeddings, names, ids) -> tuple[list, np.ndarray]:
    """Rows that the first batch touches: the table and the id of each, and their numbers."""
    (stack,) = embeddings.stacks
    some = [
        (t, int(ids[t][b, 0])) for t, b in ((0, 0), (0, 7), (9, 1), (5, 0), (20, 3))
    ]
    places = {found.name: found.place for found in stack.tables}
    places = [stack.row_of(np.int32(row), places[names[t]]) for t, row in some]
    rows = embeddings.kernels[stack.name][...][np.asarray(places)]
    return some, np.asarray(rows, np.float64)


def _check_lookup(embeddings, y, ids) -> None:
    """Checks the lookup of the first examples in tables that are small enough to be read whole."""
    (stack,) = embeddings.stacks
    first = np.asarray(y[:64], np.float64).reshape(-1, len(ids), _DIM)
    for t, found in enumerate(stack.tables):
        if found.config.num_rows <= 10**5:
            rows = np.asarray(embeddings.table(found.name), np.float64)
            expected = rows[ids[t][:64]].sum(1)
            relative_error(first[:, t], expected, 1e-5, f"lookup of {found.name}:")


def _check_update(moved, some, ids, dy) -> None:
    """Checks by how much the first step of row-wise Adagrad moved these rows."""
    for (t, row), found in zip(some, moved, strict=True):
        bag, count = np.unique(np.nonzero(ids[t] == row)[0], return_counts=True)
        mine = np.asarray(dy[bag, t * _DIM : (t + 1) * _DIM], np.float64)
        gradient = (mine * count[:, None]).sum(0)
        root = np.sqrt(np.mean(gradient**2))
        # The difference of two nearly equal weights has few correct digits.
        move = -_RATE * gradient / (root + _EPS)
        relative_error(found, move, 1e-4, f"update of {t}, {row}:")


def _by_table(workload: Workload, ids: list[np.ndarray]):
    """Converts ids to the form of FBGEMM and `EmbeddingBag`: ids table by table, and offsets."""
    import torch  # pyrefly: ignore[missing-import]

    flat = np.concatenate([i.reshape(-1) for i in ids]).astype(np.int64)
    lengths = np.repeat(workload.ids, workload.batch)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return torch.from_numpy(flat).cuda(), torch.from_numpy(ends).cuda()


def _measure_fbgemm(name: str) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    workload = Workload.called(name, torch.cuda.mem_get_info()[0])
    tables = _fbgemm_tables(workload)
    dy = torch.randn(workload.batch, len(workload.rows) * _DIM, device="cuda")

    def updated(flat, ends):
        tables(flat, ends).backward(dy)

    for skew in _SKEWS:
        drawn = [workload.draw(seed, skew) for seed in range(_BATCHES)]
        inputs = [_by_table(workload, ids) for ids in drawn]
        found = {}
        for task, call in (("lookup", tables), ("update", updated)):
            with reported(name, task, "FBGEMM TBE"):
                found[task] = time_torch(call, inputs).kernel
                if task == "update":  # the call for the update includes the lookup
                    found[task] -= found["lookup"]
                times = {"": found[task]}, 0.0
                yield _result(workload, skew, task, "FBGEMM TBE", times, drawn[0])
    del dy
    if name != "criteo":
        return
    step = _torch_step(workload, tables)
    for skew in _SKEWS:
        drawn = [workload.draw(seed, skew) for seed in range(_BATCHES)]
        inputs = [_by_table(workload, ids) for ids in drawn]
        with reported(name, "step"):
            found = time_torch(step, inputs)
            times, label = (
                ({"": found.kernel}, found.call),
                "FBGEMM TBE, torch compiled",
            )
            yield _result(workload, skew, "step", label, times, drawn[0])


def _fbgemm_tables(workload: Workload):
    from fbgemm_gpu.split_embedding_configs import (  # pyrefly: ignore[missing-import]
        EmbOptimType,
        SparseType,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # pyrefly: ignore[missing-import]
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # pyrefly: ignore[missing-import]
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    places = EmbeddingLocation.DEVICE, ComputeDevice.CUDA
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, _DIM, *places) for rows in workload.rows],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=_RATE,
        eps=_EPS,
        weights_precision=SparseType.FP32,
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,  # FBGEMM's own benchmark uses this, too
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    return tables


def _torch_step(workload: Workload, tables):
    """Makes a training step of an equal DLRM, with torch's layers in bfloat16."""
    import torch  # pyrefly: ignore[missing-import]
    from peers import DLRM

    model = DLRM(_DENSE, len(workload.rows), _DIM, _BOTTOM, _TOP).cuda()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=_RATE, foreach=True)
    dense = torch.randn(workload.batch, _DENSE, device="cuda")
    click = (torch.rand(workload.batch, device="cuda") < 0.2).float()

    @torch.compile
    def loss_fn(rows):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(dense, rows.view(workload.batch, -1, _DIM))
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, click)

    def step(flat, ends):
        optimizer.zero_grad(set_to_none=True)
        loss_fn(tables(flat, ends)).backward()
        optimizer.step()

    return step


def _measure_torch(name: str) -> Iterator[dict]:
    """Times `embedding_bag` on a single table with all rows. Adagrad would exceed the memory."""
    import torch  # pyrefly: ignore[missing-import]

    workload = Workload.called(name, torch.cuda.mem_get_info()[0])
    w = torch.empty(sum(workload.rows), _DIM, device="cuda").uniform_(-0.01, 0.01)
    firsts = list(itertools.accumulate(workload.rows, initial=0))[:-1]

    def look_up(flat, ends):
        return torch.nn.functional.embedding_bag(flat, w, ends, mode="sum")

    for skew in _SKEWS:
        drawn = [workload.draw(seed, skew) for seed in range(_BATCHES)]
        below = [[i + first for i, first in zip(d, firsts, strict=True)] for d in drawn]
        inputs = [_by_table(workload, ids) for ids in below]
        inputs = [(flat, ends[:-1]) for flat, ends in inputs]
        label = "one torch EmbeddingBag"
        with reported(name, "lookup", label), torch.no_grad():
            times = {"": time_torch(look_up, inputs).kernel}, 0.0
            yield _result(workload, skew, "lookup", label, times, drawn[0])


if __name__ == "__main__":
    command(__doc__, __file__, _PARTS, _measure)
