"""Times training steps of HSTU and SASRec by the length of histories, beside torch.

    python benchmarks/sequence_lengths.py run [--commit NAME]    on a GPU
    python benchmarks/sequence_lengths.py table                  anywhere

A part is a model, a form and a length; each is a process. They compile at the same time, then
measure one after the other. In the form "fit" it is `fit` that trains, with bfloat16; the
others are loops of one's own. "plain" is the loop that the documentation shows, with bfloat16;
"bfloat16" and "float32" tell the loss how many targets there are, by `max_targets`. A part that
is named alone says how long its first step takes. The parts "events" time steps with columns of
events and of users beside those of ids alone, in turns: 65,536 tokens, up to 200 in a history.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from report import command, largest, wait_for_turn
from timing import time_kernels, time_torch
from workloads import histories

# Places of a history, and histories of a batch.
SHAPES = {50: 1024, 200: 256, 512: 128, 1024: 64, 4096: 16, 16384: 1}
ITEMS, WIDTH, HEADS, BLOCKS, NEGATIVES = 200_000, 256, 4, 2, 1024
_DROPOUT, _TEMPERATURE, _STEPS = 0.4, 0.1, 50
_FORMS = "plain", "bfloat16", "fit", "float32", "torch", "recommend"
# Of the parts "events": tokens, ids of each column, and rounds.
_TOKENS, _CATEGORIES, _ROUNDS = 2**16, (1000, 100, 24), 5
# Of `fit`: batches of an epoch, and epochs.
_BATCHES, _EPOCHS = 32, 4


def _measure(part: str) -> Iterator[dict]:
    model, form, places = part.split("-")
    length = int(places)
    batch = SHAPES[length]
    items, times = histories(length, batch * (_BATCHES if form == "fit" else 1), ITEMS)
    targets = int((items[:, 1:] >= 0).sum())
    if form == "events":
        batch, targets = _TOKENS // 128, _TOKENS
        found = _events(model)
    elif form == "fit":
        targets = round(targets / _BATCHES)
        found = _fit(model, items, times, batch)
    elif form == "recommend":
        batch, targets = 1, length
        found = _recommend(model, length)
    elif form == "torch":
        found = _torch(model, items, times)
    else:
        found = _steps(model, form, items, times, targets)
    yield {
        "model": model,
        "implementation": form,
        "length": length,
        "histories": batch,
        "targets": targets,
        "tokens_per_second": round(1e6 * targets / found["call"]),
        **found,
    }


def _model(model: str, dtype: str, length: int, events=None):
    from flax import nnx

    import sparsejax as sj

    config = {"hstu": sj.HSTUConfig, "sasrec": sj.SASRecConfig}[model](
        max_length=length,
        dropout=_DROPOUT,
        temperature=_TEMPERATURE,
        negatives=NEGATIVES,
        dtype=dtype,
        width=WIDTH,
        heads=HEADS,
        blocks=BLOCKS,
    )
    sizes = {"items": ITEMS, "events": events}
    return sj.sequence.build_sequence_model(config, **sizes, rngs=nnx.Rngs(0))


def _steps(model: str, form: str, items, times, targets: int) -> dict:
    """Times of a training step; those of kernels but for the form "plain"."""
    import jax.numpy as jnp

    plain = form == "plain"
    made = _model(model, "bfloat16" if plain else form, items.shape[1] - 1)
    given = jnp.asarray(items), jnp.asarray(times) if model == "hstu" else None
    named = {} if plain else {"max_targets": -(-targets // 1024) * 1024}
    step = _step(made, *given, named)
    found = _timed(step) | _peak()
    if plain:
        # The profiler would have the program compiled anew, without graphs.
        return found
    kernels = time_kernels(lambda i: step().block_until_ready(), 3)
    return found | {
        "kernel": round(sum(kernels.values()), 1),
        "kernels": largest(kernels, 10),
    }


def _step(made, items, times, named: dict, columns: dict | None = None) -> Callable:
    """A training step of a model that is ready to be called."""
    import sparsejax as sj

    made.train()
    optimizer = sj.Optimizer(made, sj.optimizers.adam(1e-3))

    @sj.jit
    def step(model, optimizer, items, times, columns):
        def loss_of(model):
            return model.loss(items, times, **columns, **named)

        loss, gradients = optimizer.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    more = {} if columns is None else {"events": columns}
    return functools.partial(step, made, optimizer, items, times, more)


def _events(model: str) -> dict:
    """Times of steps by what they read beside ids, in turns."""
    import jax.numpy as jnp

    from sparsejax.sequence.events import Categories, EventSizes

    ids = tuple(Categories(f"c{n}", f"c{n}", n, None) for n in _CATEGORIES)
    users = EventSizes((), (Categories("plan", "plan", 100, None),))
    forms = {
        "ids": None,
        "columns": EventSizes((), ids),
        "users": EventSizes((), ids, users=users),
        "context": EventSizes((), ids, (ids[-1].name,), users),
    }
    rng = np.random.default_rng(0)
    apart = rng.integers(-72, 73, _TOKENS // 256)
    inside = np.arange(201) < 129 + np.append(apart, -apart)[:, None]
    items = jnp.asarray(np.where(inside, rng.integers(0, ITEMS, inside.shape), -1))
    times = np.where(inside, np.cumsum(rng.exponential(3e4, inside.shape), 1), 0)
    given = items, jnp.asarray(times, jnp.float32) if model == "hstu" else None
    every = {each.name: rng.integers(0, each.size, inside.shape) for each in ids}
    every["users/plan"] = rng.integers(0, 100, len(inside))
    steps = {}
    for form, sizes in forms.items():
        made, own = _model(model, "bfloat16", 200, sizes), None
        if sizes is not None:
            names = [*sizes.shapes, *sizes.user_shapes]
            own = {name: jnp.asarray(every[name]) for name in names}
        # The first item of each history is a target behind its user's place.
        targets = _TOKENS + len(inside) * ("users/plan" in (own or ()))
        steps[form] = _step(made, *given, {"max_targets": targets}, own)
    rounds = [{f: _timed(step) for f, step in steps.items()} for _ in range(_ROUNDS)]
    found = {}
    for form, step in steps.items():
        found[form] = statistics.median(each[form]["call"] for each in rounds)
        kernels = time_kernels(lambda i, step=step: step().block_until_ready(), 3)
        found[f"{form}, kernels"] = round(sum(kernels.values()), 1)
    ratios = {f: round(found[f] / found["ids"], 3) for f in forms}
    return {"call": found["ids"], "calls": found, "ratios": ratios}


def _timed(step: Callable) -> dict:
    """Seconds of the first step, and microseconds of one of many that follow each other."""
    begin = time.perf_counter()
    assert float(step()) > 0
    first = time.perf_counter() - begin
    wait_for_turn()
    assert float(step()) > 0
    begin = time.perf_counter()
    losses = [step() for _ in range(_STEPS)]
    assert float(losses[-1]) > 0
    call = 1e6 * (time.perf_counter() - begin) / _STEPS
    return {"call": round(call, 1), "first_seconds": round(first, 1)}


def _peak() -> dict:
    import jax

    memory = jax.devices()[0].memory_stats() or {}
    return {"peak_bytes": memory.get("peak_bytes_in_use")}


def _data(model: str, indptr, items, times):
    import sparsejax as sj

    return sj.SequenceDataset(
        indptr,
        items,
        np.arange(len(indptr) - 1).astype(str),
        np.arange(ITEMS).astype(str),
        times.astype(np.float64) if model == "hstu" else None,
    )


def _fit(model: str, items, times, batch: int) -> dict:
    """Time of a step of `fit`, the median of epochs after the first."""
    import sparsejax as sj

    made = _model(model, "bfloat16", items.shape[1] - 1)
    kept = items >= 0
    indptr = np.concatenate([[0], np.cumsum(kept.sum(1))])
    data = _data(model, indptr, items[kept], times[kept])
    optimizer = sj.Optimizer(made, sj.optimizers.adam(1e-3))

    def train():
        return sj.fit(made, optimizer, data, batch_size=batch, num_epochs=_EPOCHS)

    begin = time.perf_counter()
    train()
    first = time.perf_counter() - begin
    wait_for_turn()
    speeds = [epoch["examples_per_second"] for epoch in train()[1:]]
    return {
        "call": round(1e6 * batch / statistics.median(speeds), 1),
        "first_seconds": round(first, 1),
        **_peak(),
    }


def _recommend(model: str, length: int) -> dict:
    """Time of `recommend` for one full history."""
    import sparsejax as sj

    made, rng = _model(model, "bfloat16", length), np.random.default_rng(1)
    items, times = (
        rng.integers(0, ITEMS, length),
        np.cumsum(rng.exponential(3e4, length)),
    )
    data = _data(model, np.array([0, length]), items, times)
    taken = []
    for _ in range(6):
        begin = time.perf_counter()
        found = sj.recommend(made, data, k=10, exclude=None)
        taken.append(time.perf_counter() - begin)
        assert np.isfinite(found.scores).all()
        wait_for_turn()
    first, *others = taken
    return {
        "call": round(1e6 * min(others), 1),
        "first_seconds": round(first, 1),
        **_peak(),
    }


def _torch(model: str, items, times) -> dict:
    """The peer's model, compiled, under autocast."""
    import torch  # pyrefly: ignore[missing-import]
    from peers import Sequences

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    histories = torch.as_tensor(items, device="cuda").long()
    given, next_items = histories[:, :-1].clamp(min=0), histories[:, 1:].flatten()
    (wanted,) = torch.nonzero(next_items >= 0, as_tuple=True)
    shown = torch.as_tensor(times, device="cuda")[:, :-1]
    length, sizes = items.shape[1] - 1, {"width": WIDTH, "heads": HEADS}
    network = Sequences(model, ITEMS, length, dropout=_DROPOUT, **sizes).cuda()
    rule = torch.optim.Adam(network.parameters(), 1e-3, fused=True)
    compiled = torch.compile(network, dynamic=False)

    def step():
        negatives = torch.randint(0, ITEMS, (NEGATIVES,), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(given, shown, wanted, next_items[wanted], negatives)
        loss.backward()
        rule.step()
        rule.zero_grad()
        return loss.detach()

    return _timed(step) | {
        "kernel": round(time_torch(step, [()], rounds=3).kernel, 1),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


if __name__ == "__main__":
    parts = {
        f"{model}-{form}-{length}": {}
        for form in _FORMS
        for model in ("hstu", "sasrec")
        for length in SHAPES
        # Padded scores of 4,096 places squared are too many for torch.
        if length <= {"torch": 1024, "fit": 4096}.get(form, length)
    }
    parts |= {f"{model}-events-200": {} for model in ("hstu", "sasrec")}
    command(__doc__, __file__, parts, _measure, together=True)
