"""Trains embedding tables under a placement on several meshes, and compares them with NumPy.

It is SparseOperationKit's test of its distributed lookups. The suite trains small tables. All of
it takes half an hour on two CPU cores::

    python tests/placed_training.py
"""

import dataclasses
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from rule_steps import numpy_step

import sparsejax as sj
from sparsejax.embeddings.config import Placement
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.ops.gather_matmul import Combiner

MESHES = [(1, 1), (1, 8), (2, 4), (8, 1)]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a training. A tuple has one value for each table; each table has one feature."""

    num_rows: tuple[int, ...] = (40_960, 8_192)
    dims: tuple[int, ...] = (128, 4)
    hotness: tuple[int, ...] = (10, 3)
    combiners: tuple[Combiner, ...] = ("mean", "sum")
    placements: tuple[Placement, ...] = ("rows", "rows")
    batch: int = 8_192
    steps: int = 100

    def tables(self):
        every = zip(self.num_rows, self.dims, self.placements, strict=True)
        return {
            f"t{i}": sj.embeddings.TableConfig(rows, dim, placement=placement)
            for i, (rows, dim, placement) in enumerate(every)
        }

    def features(self):
        return {
            f"f{i}": sj.embeddings.FeatureConfig(f"t{i}", combiner=combiner)
            for i, combiner in enumerate(self.combiners)
        }

    def batch_of(self, step):
        """Ids of a step, some of them missing, and the targets."""
        rng = np.random.default_rng(step)
        ids = {
            f"f{i}": rng.integers(-1, rows, (self.batch, hot)).astype(np.int32)
            for i, (rows, hot) in enumerate(
                zip(self.num_rows, self.hotness, strict=True)
            )
        }
        goal = rng.standard_normal((self.batch, sum(self.dims))).astype(np.float32)
        return ids, goal


def placed_training(size, rule, *, meshes=MESHES, plan=None):
    """The tables before and after training, in which each mesh trains an equal number of steps."""
    with tempfile.TemporaryDirectory() as folder:
        saved, first, last = Checkpoints(folder), None, None
        for i, (data, model) in enumerate(meshes):
            with jax.set_mesh(sj.make_mesh(data=data, model=model)):
                embeddings = sj.embeddings.EmbeddingCollection(
                    size.tables(), size.features(), plan=plan, rngs=nnx.Rngs(0)
                )
                optimizer = sj.Optimizer(embeddings, rule)
                modules = (embeddings, optimizer)
                if first is None:
                    first = tables_of(embeddings)
                else:
                    saved.restore(modules)
                every = size.steps // len(meshes)
                for step in range(i * every, (i + 1) * every):
                    ids, goal = size.batch_of(step)
                    _step(*modules, jax.tree.map(jnp.asarray, ids), jnp.asarray(goal))
                saved.save((i + 1) * every, modules, {})
                if i + 1 == len(meshes):
                    optimizer.flush(embeddings)
                    last = tables_of(embeddings)
    return first, last


@nnx.jit(donate_argnums=(0, 1))
def _step(embeddings, optimizer, ids, goal):
    def loss_fn(embeddings):
        difference = embeddings.concat(ids) - goal
        return jnp.sum(jnp.square(difference)) / 32

    _, grads = optimizer.value_and_grad(loss_fn)(embeddings)
    optimizer.update(embeddings, grads)


def tables_of(embeddings):
    """All tables as arrays, computed by one program."""
    return jax.tree.map(np.asarray, _tables(embeddings))


@nnx.jit
def _tables(embeddings):
    names = {table.name for stack in embeddings.stacks for table in stack.tables}
    return {name: embeddings.table(name) for name in sorted(names)}


def numpy_training(size, rule, first):
    """The tables after all steps, computed in float64."""
    tables = {name: table.astype(np.float64) for name, table in first.items()}
    states = {
        name: {key: np.asarray(value, np.float64) for key, value in state.items()}
        for name, state in ((n, rule.start(jnp.asarray(t))) for n, t in first.items())
    }
    for step in range(size.steps):
        ids, goal = size.batch_of(step)
        start = 0
        for i, (combiner, dim) in enumerate(
            zip(size.combiners, size.dims, strict=True)
        ):
            name, mine = f"t{i}", ids[f"f{i}"]
            used = mine >= 0
            scale = 1 / np.maximum(used.sum(1), 1) if combiner == "mean" else 1.0
            weights = used * np.reshape(scale, (-1, 1))
            ends = np.arange(size.batch + 1) * mine.shape[1]
            x = scipy.sparse.csr_array(
                (weights.ravel(), np.maximum(mine, 0).ravel(), ends),
                (size.batch, len(tables[name])),
            )
            w, state = tables[name], states[name]
            slope = (x @ w - goal[:, start : start + dim]) / 16
            rate = rule.learning_rate
            w, state = numpy_step(rule, w, state, x.T @ slope, step + 1, rate)
            if rule.name == "lazy_adam":  # rows without an id do not change
                seen = np.unique(mine[used])
                for old, new in [
                    (tables[name], w),
                    *((states[name][key], state[key]) for key in state),
                ]:
                    old[seen] = new[seen]
            else:
                tables[name], states[name] = w, state
            start += dim
    return tables


def error(got, want):
    """The largest difference relative to the largest number of its table."""
    return max(np.abs(got[n] - want[n]).max() / np.abs(want[n]).max() for n in want)


RULES = [
    sj.optimizers.sgd(1.0),
    sj.optimizers.momentum(0.5, 0.5),
    sj.optimizers.nesterov(0.5, 0.5),
    sj.optimizers.adagrad(0.1),
    sj.optimizers.rowwise_adagrad(0.1),
    sj.optimizers.ftrl(0.05, 0.5, 0.001, 0.1),
    sj.optimizers.rmsprop(0.01, 0.8),
    sj.optimizers.adadelta(1.0, 0.95, eps=1e-2),
    sj.optimizers.adam(0.01, eps=1e-3),
    sj.optimizers.adamw(0.01, eps=1e-3, weight_decay=0.1),
    sj.optimizers.adamax(0.01, eps=1e-3),
    sj.optimizers.lazy_adam(0.01, eps=1e-3),
]


def main():
    """Runs each placement with SGD, and each other rule with one placement."""
    sgd, *others = RULES
    want = None
    kinds: list[Placement] = ["rows", "table", "columns", "replicated"]
    for kind in kinds:
        size = Size(placements=(kind, kind))
        first, got = placed_training(size, sgd)
        want = numpy_training(size, sgd, first) if want is None else want
        _report("sgd", kind, error(got, want))
    for i, rule in enumerate(others):
        kind = kinds[i % 2]
        size = Size(placements=(kind, kind))
        first, got = placed_training(size, rule)
        _report(rule.name, kind, error(got, numpy_training(size, rule, first)))


def _report(rule, kind, found):
    print(f"{rule:<16}{kind:<12}{found:.1e}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
