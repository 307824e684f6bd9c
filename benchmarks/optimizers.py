"""Compares row-sparse optimizers with their dense twins, in float32.

    python benchmarks/optimizers.py

Writes `results/optimizers.json` and the table in README.md. It needs no GPU and takes
some minutes. The model has two lookups in one kernel, and ordinary parameters. Its twin is
plain JAX and optax. Ids are skewed. After 200 steps most rows are not touched for 1,000
steps, and then some of them are touched again.
"""

from __future__ import annotations

import datetime
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from report import RESULTS, origin, table, write_section

import sparsejax as sj
from sparsejax.optimizers.rules import Rule

_RESULTS = RESULTS / "optimizers.json"
_FEATURES, _HIDDEN, _OUT, _BATCH, _LENGTH = 3_000, 16, 3, 16, 8
_BUSY, _IDLE, _BACK = 200, 1_000, 20
_STEPS = _BUSY + _IDLE + _BACK
_COLUMNS = (
    "rule",
    "weight decay",
    "learning rate",
    "largest movement",
    "largest difference",
    "relative difference",
    "ours to float64",
    "twin to float64",
)


def main() -> None:
    batches = _batches(np.random.default_rng(0))
    results = []
    for rule in _rules():
        result = _compare(rule, batches)
        results.append(result)
        print(json.dumps(result), flush=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/optimizers.py",
        "versions": {
            "jax": jax.__version__,
            "optax": optax.__version__,
            "device": jax.devices()[0].device_kind,
        },
        "kernel": [_FEATURES, _HIDDEN],
        "steps": {"busy": _BUSY, "idle": _IDLE, "back": _BACK},
        "results": results,
    }
    _RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    _write_table(report)


def _rules() -> list[Rule]:
    o = sj.optimizers

    def cosine(rate: float):
        return o.schedule(
            "warmup_cosine_decay_schedule",
            init_value=0.0,
            peak_value=rate,
            warmup_steps=50,
            decay_steps=_STEPS,
        )

    rules: list[Rule] = []
    for linear in (o.sgd, o.momentum, o.nesterov):
        rate = 0.1 if linear is o.sgd else 0.02
        rules += [linear(rate), linear(rate, weight_decay=0.01)]
        rules += [linear(cosine(rate)), linear(cosine(rate), weight_decay=0.01)]
    for adaptive, rate in (
        (o.adagrad, 0.1),
        (o.rowwise_adagrad, 0.1),
        (o.rmsprop, 0.003),
        (o.adadelta, 1.0),
        (o.adam, 0.003),
    ):
        rules += [adaptive(rate), adaptive(cosine(rate))]
    rules += [o.adamw(rate, weight_decay=0.1) for rate in (0.003, cosine(0.003))]
    return rules


def _batches(rng: np.random.Generator):
    """Ids of both lookups and labels, with a leading step axis."""
    popularity = np.arange(1, _FEATURES + 1) ** -1.0
    ids = []
    for steps, features in ((_BUSY, 2_500), (_IDLE, 100), (_BACK, 2_500)):
        p = popularity[:features] / popularity[:features].sum()
        shape = (steps, 2, _BATCH * _LENGTH)
        ids.append(rng.choice(features, shape, p=p).astype(np.int32))
    labels = rng.standard_normal((_STEPS, _BATCH, _OUT))
    return np.concatenate(ids), labels


class _Net(nnx.Module):
    def __init__(self):
        make = functools.partial(sj.SparseLinear, _FEATURES, _HIDDEN, use_bias=False)
        self.first = make(rngs=nnx.Rngs(0))
        self.second = make(kernel=self.first.kernel, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(_HIDDEN, _OUT, rngs=nnx.Rngs(1))

    def __call__(self, x, x2):
        return self.out(nnx.tanh(self.first(x) + self.second(x2)))


def _train_rows(rule: Rule, batches) -> np.ndarray:
    model = _Net()
    optimizer = sj.Optimizer(model, rule)
    graphdef, state = nnx.split((model, optimizer))
    indptr = jnp.arange(0, _BATCH * _LENGTH + 1, _LENGTH, dtype=jnp.int32)

    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        ids, labels = batch
        x, x2 = (sj.CSR(None, part, indptr, num_cols=_FEATURES) for part in ids)

        def loss_fn(model):
            return jnp.mean((model(x, x2) - labels) ** 2)

        loss, grads = optimizer.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    state, _ = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches)
    nnx.update((model, optimizer), state)
    optimizer.flush(model)
    return np.asarray(model.first.kernel[...])[:_FEATURES]


def _train_dense(rule: Rule, batches, dtype) -> np.ndarray:
    model, dense = _Net(), rule.dense()
    params = {
        "first": model.first.kernel[...][:_FEATURES],
        "out": model.out.kernel[...],
        "bias": np.zeros(_OUT),
    }
    params = jax.tree.map(lambda p: jnp.asarray(np.asarray(p), dtype), params)

    def loss_fn(params, ids, labels):
        rows = params["first"][ids.reshape(2, _BATCH, _LENGTH)]
        h = jnp.tanh(jnp.sum(rows, axis=(0, 2)))
        return jnp.mean((h @ params["out"] + params["bias"] - labels) ** 2)

    def step(carry, batch):
        params, state = carry
        ids, labels = batch
        grads = jax.grad(loss_fn)(params, ids, labels.astype(dtype))
        updates, state = dense.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = params, dense.init(params)
    (params, _), _ = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(start, batches)
    return np.asarray(params["first"])


def _compare(rule: Rule, batches) -> dict:
    ids, labels = batches
    ours = _train_rows(rule, (ids, labels.astype(np.float32)))
    twin = _train_dense(rule, (ids, labels.astype(np.float32)), jnp.float32)
    with jax.enable_x64(True):
        exact = _train_dense(rule, (ids, labels.astype(np.float32)), jnp.float64)
    start = np.asarray(_Net().first.kernel[...])[:_FEATURES]
    moved = np.linalg.norm(exact - start)
    return {
        "name": rule.name,
        "weight_decay": rule.weight_decay,
        "schedule": callable(rule.learning_rate),
        "largest_movement": float(np.abs(exact - start).max()),
        "largest_difference": float(np.abs(ours - twin).max()),
        "relative_difference": float(np.linalg.norm(ours - twin) / moved),
        "ours_from_float64": float(np.linalg.norm(ours - exact) / moved),
        "twin_from_float64": float(np.linalg.norm(twin - exact) / moved),
    }


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    rows = [
        [
            row["name"],
            f"{row['weight_decay']:g}",
            "schedule" if row["schedule"] else "constant",
            f"{row['largest_movement']:.2f}",
            f"{row['largest_difference']:.1e}",
            f"{row['relative_difference']:.1e}",
            f"{row['ours_from_float64']:.1e}",
            f"{row['twin_from_float64']:.1e}",
        ]
        for row in report["results"]
    ]
    write_section("optimizers", [origin(report), "", *table(_COLUMNS, rows)])


if __name__ == "__main__":
    main()
