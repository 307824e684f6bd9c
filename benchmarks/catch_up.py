"""Times training with Adam beside Adagrad: what rows that missed steps cost.

    python benchmarks/catch_up.py run [--commit NAME] [--output FILE]
    python benchmarks/catch_up.py table          anywhere

Adam also moves rows that a step does not touch. They catch up when they are read again, so
with Adagrad, which leaves them alone, the same model shows what that costs. Steps are those
of `fit`, many a dispatch. *shop* is DLRM over 26 tables with 1.2 M ids in all, 16 wide,
bottom 512-256, top 512-256, 13 numbers and one id of each table an example; ids are of a
Zipf law of exponent 1.2. *clicks* is DLRM over 8 tables of 100,000 ids each, 16 wide, batch
512, with ids of a Zipf law or all alike, for a CPU. *items* is an autoencoder of Gowalla's
shape: 29,858 users, 40,981 items, 27 entries a user, hidden 256, plain softmax.

*losses* compares 1,000 steps with the dense rule in float64: rows come back after 1, 2, 31, 32,
33, 159, 160 and 10,000 steps, each with a target and with noise in its gradient.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section
from workloads import zipf_ids

_PARTS = {name: {} for name in ("losses", "shop", "clicks", "items")}
_RULES = "adagrad", "adam"
_SECONDS = 4.0  # that are timed at least, after an epoch that is not
_STEPS, _JUMP = 1_000, 10_000
_LAGS = (0, 1, 2, 31, 32, 33, 159, 160, _JUMP)  # of the rows, of eight rows each
_EIGHT = 8


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    import jax

    from sparsejax import optimizers

    if part == "losses":
        yield from _losses()
        return
    make = {"shop": _shop, "clicks": _clicks, "items": _items}[part]
    for name, examples, batch, model in make(on_gpu=jax.default_backend() == "gpu"):
        for rule in _RULES:
            for rate in (1e-3, _cosine()):
                if callable(rate) and rule == "adagrad":
                    continue
                made = optimizers.get(rule, learning_rate=rate)
                seconds, processors, loss = _time(model, made, examples, batch)
                yield {
                    "model": name,
                    "rule": rule,
                    "learning rate": "cosine" if callable(rate) else "constant",
                    "batch": batch,
                    "step_milliseconds": round(1e3 * seconds, 3),
                    "processor_milliseconds": round(1e3 * processors, 3),
                    "examples_per_second": round(batch / seconds),
                    "loss": loss,
                    "versions": {
                        "jax": jax.__version__,
                        "device": jax.devices()[0].device_kind,
                    },
                }


def _cosine():
    from sparsejax import optimizers

    return optimizers.schedule(
        "cosine_decay_schedule", init_value=1e-3, decay_steps=100_000
    )


def _time(make_model, rule, examples, batch: int) -> tuple[float, float, float]:
    """Seconds a step, by the clock and of all processors, and the last loss.

    Of the third of the epochs with the least time of processors: the machine may be busy.
    """
    import sparsejax as sj

    model = make_model()
    optimizer = sj.Optimizer(model, rule)
    epochs = sj.training.Epochs(examples, batch_size=batch, num_epochs=1_000)
    program = sj.training.Program(model, optimizer)
    found, begin, epoch = [], None, 0
    while begin is None or len(found) < 3 or time.perf_counter() < begin + _SECONDS:
        start = time.process_time(), time.perf_counter()
        for dispatch in epochs.dispatches(epoch):
            losses = program.launch(dispatch)
        loss = float(losses[-1])  # pyrefly: ignore
        times = time.process_time() - start[0], time.perf_counter() - start[1]
        if begin is None:  # it compiled
            begin = time.perf_counter()
        else:
            found.append(times)
        epoch += 1
    best = np.mean(sorted(found)[: -(-len(found) // 3)], axis=0)
    processors, seconds = best / -(-epochs.num_rows // batch)
    return seconds, processors, loss  # pyrefly: ignore


def _losses() -> Iterator[dict]:
    """The largest differences of losses and of weights from the dense rule in float64."""
    import jax

    from sparsejax import optimizers

    forms = ["xla"] + ["mosaic_gpu"] * (jax.default_backend() == "gpu")
    rules = ("adam", 1e-3, 0.0), ("adamw", _cosine(), 0.01)
    for width, (name, rate, decay) in itertools.product((16, 256), rules):
        settings = {"weight_decay": decay} if decay else {}
        rule = optimizers.get(name, learning_rate=rate, **settings)
        problem = _returning(width)
        losses, weights = _dense_adam(problem, rule.rate, decay)
        for form in forms:
            got_losses, got_weights = _sparse_steps(rule, problem, form)
            off = np.abs(got_losses - losses) / losses
            yield {
                "model": "rows that return",
                "rule": name,
                "learning rate": "cosine" if callable(rate) else "constant",
                "width": width,
                "form": form,
                "loss_difference": float(off.max()),
                "weight_difference": float(np.abs(got_weights - weights).max()),
                "versions": {
                    "jax": jax.__version__,
                    "device": jax.devices()[0].device_kind,
                },
            }


def _returning(width: int) -> dict[str, np.ndarray]:
    """Which rows each step touches, and what pulls at them."""
    rng = np.random.default_rng(0)
    rows = len(_LAGS) * _EIGHT
    touched = np.zeros((_STEPS, rows), bool)
    for i, lag in enumerate(_LAGS):
        last = _STEPS // 2 if lag == _JUMP else lag + 1
        touched[::last, i * _EIGHT : (i + 1) * _EIGHT] = True
    # The steps between the halves touch nothing.
    counts = np.arange(_STEPS) + np.where(np.arange(_STEPS) < _STEPS // 2, 0, _JUMP)
    return {
        "touched": touched,
        "counts": counts.astype(np.int32),
        "start": rng.normal(size=(rows, width)).astype(np.float32),
        "target": rng.normal(size=(rows, width)).astype(np.float32),
        "noise": rng.normal(size=(_STEPS, width)).astype(np.float32),
    }


def _dense_adam(problem, rate, decay, b1=0.9, b2=0.999, eps=1e-8):
    """Losses and last weights, all rows moved in each step."""
    w = problem["start"].astype(np.float64)
    m, v, losses, done = np.zeros_like(w), np.zeros_like(w), [], 0
    for i, count in enumerate(problem["counts"]):
        for t in range(done + 1, count + 2):
            slope = np.zeros_like(w)
            if t == count + 1:
                mine = problem["touched"][i]
                apart = w[mine] - problem["target"][mine]
                losses.append(np.mean(apart**2))
                slope[mine] = apart + problem["noise"][i]
            m = b1 * m + (1 - b1) * slope
            v = b2 * v + (1 - b2) * slope**2
            step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
            w -= float(rate(np.float32(t))) * (step + decay * w)
        done = count + 1
    return np.array(losses), w


def _sparse_steps(rule, problem, form: Any):
    """The same, as a table that an optimizer keeps: only rows that are touched move."""
    import jax
    import jax.numpy as jnp

    from sparsejax import CSR
    from sparsejax.ops import row_update, scatter_gradient

    rows, width = problem["start"].shape
    # The rows of each step come first, the rest of the places is padding.
    order = np.argsort(~problem["touched"], axis=1, kind="stable").astype(np.int32)
    used = problem["touched"].sum(1).astype(np.int32)

    def step(trained, given):
        ids, used, count, noise = given
        indptr = jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32), used)
        x = CSR(None, ids, indptr, num_cols=rows)
        w = row_update.gather_current(rule, trained, x, count, implementation=form)
        mine = jnp.arange(rows)[:, None] < used
        apart = jnp.where(mine, w - target[ids], 0)
        loss = jnp.sum(apart**2) / (used * width)
        terms = scatter_gradient.row_terms([x], [apart + noise * mine], rows)
        trained = row_update.step_terms(
            rule, trained, terms, count, implementation=form
        )
        return trained, loss

    target = jnp.asarray(problem["target"])
    state = {
        name: jnp.zeros(array.shape, array.dtype)
        for name, array in rule.init(problem["start"].shape).items()
    }
    start = jnp.asarray(problem["start"])
    trained = row_update.TrainedKernel(start, state, jnp.full(rows, -1, jnp.int32))
    given = (order, used, problem["counts"], problem["noise"])
    trained, losses = jax.jit(lambda t, g: jax.lax.scan(step, t, g))(trained, given)
    count = jnp.int32(problem["counts"][-1] + 1)
    trained = jax.jit(lambda t, n: row_update.settle(rule, t, n))(trained, count)
    return np.asarray(losses, np.float64), np.asarray(trained.w, np.float64)


def _click_examples(rows, sizes, skew, num_dense):
    import sparsejax as sj

    rng = np.random.default_rng(0)
    ids = {
        f"f{i}": zipf_ids(rng, (rows,), n, skew)
        if skew
        else rng.integers(0, n, rows, dtype=np.int32)
        for i, n in enumerate(sizes)
    }
    schema = sj.ClickSchema(
        "click",
        {f"d{i}": sj.data.DenseColumn() for i in range(num_dense)},
        {f"f{i}": sj.data.HashedColumn(n) for i, n in enumerate(sizes)},
    )
    dense = rng.normal(size=(rows, num_dense)).astype(np.float32)
    labels = (rng.random(rows) < 0.3).astype(np.float32)
    data = sj.ClickDataset(labels, dense, ids, schema, {})
    return data.num_ids, sj.training.place(data)


def _dlrm(features, num_dense, bottom, top):
    from flax import nnx

    import sparsejax as sj

    config = sj.DLRMConfig(dim=16, bottom=bottom, top=top)
    return lambda: sj.embeddings.build_click_model(
        config, num_dense=num_dense, features=features, rngs=nnx.Rngs(0)
    )


def _shop(*, on_gpu: bool):
    rows = [int(n) for n in np.geomspace(30, 350_000, 26)]
    features, examples = _click_examples(2**19 if on_gpu else 2**12, rows, 1.2, 13)
    make = _dlrm(features, 13, (512, 256), (512, 256))
    for batch in (4_096, 65_536) if on_gpu else (256,):
        yield "shop", examples, batch, make


def _clicks(*, on_gpu: bool):
    for name, skew in (("clicks, Zipf", 1.2), ("clicks, uniform", 0)):
        features, examples = _click_examples(2**16, [100_000] * 8, skew, 4)
        yield name, examples, 512, _dlrm(features, 4, (64, 16), (64, 32))


def _items(*, on_gpu: bool):
    import scipy.sparse
    from flax import nnx

    import sparsejax as sj

    users, items = (29_858, 40_981) if on_gpu else (2_048, 2_000)
    rng = np.random.default_rng(0)
    ids = zipf_ids(rng, (users, 27), items, 0.8)
    indptr = np.arange(0, ids.size + 1, 27)
    data = np.ones(ids.size, np.float32)
    matrix = scipy.sparse.csr_array((data, ids.reshape(-1), indptr), (users, items))
    matrix.sum_duplicates()
    matrix.data[:] = 1
    examples = sj.training.place(matrix)
    config = sj.NetworkConfig.autoencoder((256,))

    def make():
        return sj.FeedForward(config, inputs=items, outputs=items, rngs=nnx.Rngs(0))

    yield "items", examples, 512, make


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    losses = [row for row in report["results"] if "loss_difference" in row]
    speeds = [row for row in report["results"] if "step_milliseconds" in row]
    lines = [origin(report)]
    if losses:
        columns = ["rule", "learning rate", "width", "form", "losses", "weights"]
        rows = [
            [row[name] for name in columns[:4]]
            + [f"{row['loss_difference']:.1e}", f"{row['weight_difference']:.1e}"]
            for row in losses
        ]
        lines += ["", *table(columns, rows)]
    if speeds:
        columns = ["model", "batch", "rule", "learning rate", "ms a step"]
        rows = [
            [
                row["model"],
                f"{row['batch']:,}",
                row["rule"],
                row["learning rate"],
                f"{row['step_milliseconds']:.2f}",
                f"{row['examples_per_second']:,}",
            ]
            for row in speeds
        ]
        lines += ["", *table([*columns, "examples a second"], rows)]
    write_section("catch_up", lines)


if __name__ == "__main__":
    main()
