"""Times training steps of HSTU and SASRec by the length of histories, beside torch.

    python benchmarks/sequence_lengths.py run [--commit NAME]    on a GPU
    python benchmarks/sequence_lengths.py table                  anywhere

A part is a model, a form and a length; each is a process. They compile at the same time, then
measure one after the other. In the form "fit" it is `fit` that trains, with bfloat16; the
others are loops of one's own. "plain" is the loop that the documentation shows, with bfloat16;
"bfloat16" and "float32" tell the loss how many targets there are, by `max_targets`. "full" has 65,536 tokens in a batch, without the padding. The
parts "wide" have the shape of MLPerf's recommendation benchmark, all places filled, with and
without the biases of places and times. A part that is named alone says how long its first
step takes.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import numpy as np
from report import command, wait_for_turn
from timing import time_kernels, time_torch

# Places of a history, and histories of a batch.
SHAPES = {50: 1024, 200: 256, 512: 128, 1024: 64, 4096: 16, 16384: 1}
ITEMS, WIDTH, HEADS, BLOCKS, NEGATIVES = 200_000, 256, 4, 2, 1024
_DROPOUT, _TEMPERATURE, _BUCKETS = 0.4, 0.1, 128
# Of the parts "wide".
_WIDE = {"width": 512, "heads": 8, "blocks": 3}
_WIDE_LENGTH = 4096
_STEPS = 50
_FORMS = "plain", "bfloat16", "fit", "float32", "torch", "recommend"
# Of `fit`: batches of an epoch, and epochs.
_BATCHES, _EPOCHS = 32, 4


def main() -> None:
    parts = {
        f"{model}-{form}-{length}": {}
        for form in _FORMS
        for model in ("hstu", "sasrec")
        for length in SHAPES
        # Padded scores of 4,096 places squared are too many for torch.
        if length <= {"torch": 1024, "fit": 4096}.get(form, length)
    }
    parts |= {f"hstu-fit-{length}-full": {} for length in (50, 512, 4096)}
    parts |= {f"wide-{biases}": {} for biases in ("both", "none")}
    command(__doc__, __file__, parts, _measure, together=True)


def histories(length: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Items and times, lengths as logs have them; one history is full."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(length / 4), 1, batch).astype(int)
    counts = np.clip(drawn, 2 if batch > 1 else length + 1, length + 1)
    inside = np.arange(length + 1) < counts[:, None]
    items = rng.integers(0, ITEMS, inside.shape)
    times = np.cumsum(rng.exponential(3e4, inside.shape), axis=1)
    return (
        np.where(inside, items, -1).astype(np.int32),
        np.where(inside, times, 0).astype(np.float32),
    )


def _measure(part: str) -> Iterator[dict]:
    if part.startswith("wide-"):
        yield _wide(part.removeprefix("wide-"))
        return
    model, form, places, *full = part.split("-")
    length = int(places)
    batch = SHAPES[length]
    if full:
        filled = (histories(length, 4096)[0][:, 1:] >= 0).mean()
        batch = round(batch / filled)
    items, times = histories(length, batch * (_BATCHES if form == "fit" else 1))
    targets = int((items[:, 1:] >= 0).sum())
    if form == "fit":
        targets = round(targets / _BATCHES)
        found = _fit(model, items, times, batch)
    elif form == "recommend":
        batch, targets = 1, length
        found = _recommend(model, length)
    else:
        measure = _torch if form == "torch" else _ours
        found = measure(model, form, items, times, targets)
    yield {
        "model": model,
        "implementation": form,
        "length": length,
        "histories": batch,
        "targets": targets,
        "tokens_per_second": round(1e6 * targets / found["call"]),
        **found,
    }


# JAX


def _ours(model: str, form: str, items, times, targets: int) -> dict:
    from flax import nnx

    import sparsejax as sj

    plain = form == "plain"
    dtype = "bfloat16" if plain else form
    config = _config(model, dtype, items.shape[1] - 1)
    made = sj.sequence.build_sequence_model(config, items=ITEMS, rngs=nnx.Rngs(0))
    times = times if model == "hstu" else None
    return _steps(made, items, times, None if plain else -(-targets // 1024) * 1024)


def _config(
    model: str, dtype: str, length: int, width=WIDTH, heads=HEADS, blocks=BLOCKS
):
    import sparsejax as sj

    return {"hstu": sj.HSTUConfig, "sasrec": sj.SASRecConfig}[model](
        max_length=length,
        dropout=_DROPOUT,
        temperature=_TEMPERATURE,
        negatives=NEGATIVES,
        dtype=dtype,
        width=width,
        heads=heads,
        blocks=blocks,
    )


def _wide(biases: str) -> dict:
    """Counts the products of the layers and of attention, of pairs that count."""
    from flax import nnx

    import sparsejax as sj
    from sparsejax.sequence.tokens import Tokens

    class WithoutBiases(Tokens):
        def attend(self, q, k, v, *, place_bias=None, time_bias=None, **rule):
            return super().attend(q, k, v, **rule)

    class Unbiased(sj.sequence.HSTU):
        def _of_tokens(self, tokens, vectors=None, events=None):
            return super()._of_tokens(WithoutBiases(*tokens), vectors, events)

    rng, shape = np.random.default_rng(0), (SHAPES[_WIDE_LENGTH], _WIDE_LENGTH + 1)
    items = rng.integers(0, ITEMS, shape).astype(np.int32)
    times = np.cumsum(rng.exponential(3e4, shape), axis=1).astype(np.float32)
    config = _config("hstu", "bfloat16", _WIDE_LENGTH, **_WIDE)
    kind = {"both": sj.sequence.HSTU, "none": Unbiased}[biases]
    tokens, width = shape[0] * _WIDE_LENGTH, config.width
    of_layers = 3 * 5 * 2 * width**2
    of_attention = 7 * 2 * width * (_WIDE_LENGTH + 1) / 2
    made = kind(config, items=ITEMS, rngs=nnx.Rngs(0))
    found = _steps(made, items, times, -(-tokens // 1024) * 1024)
    done = tokens * config.blocks * (of_layers + of_attention)
    return {
        "model": f"wide, {biases}",
        "implementation": "bfloat16",
        "length": _WIDE_LENGTH,
        "targets": tokens,
        "tokens_per_second": round(1e6 * tokens / found["call"]),
        "tflops": round(done / found["call"] / 1e6, 1),
        **found,
    }


def _steps(made, items, times, room: int | None) -> dict:
    """Times of a training step; its kernels only with `room`, for `max_targets`."""
    import jax.numpy as jnp

    import sparsejax as sj

    made.train()
    optimizer = sj.Optimizer(made, sj.optimizers.adam(1e-3))
    given = jnp.asarray(items), None if times is None else jnp.asarray(times)
    named = {} if room is None else {"max_targets": room}

    @sj.jit
    def step(model, optimizer, items, times):
        def loss_of(model):
            return model.loss(items, times, **named)

        loss, gradients = optimizer.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    begin = time.perf_counter()
    assert float(step(made, optimizer, *given)) > 0
    first = time.perf_counter() - begin

    def call(i):
        step(made, optimizer, *given).block_until_ready()

    wait_for_turn()
    wall = _time_steps(lambda: step(made, optimizer, *given))
    if room is None:
        # The profiler would have the program compiled anew, without graphs.
        times_of = {"call": round(wall, 1), "first_seconds": round(first, 1)}
        return times_of | _of_device()
    kernels = time_kernels(call, 3)
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:10]
    return {
        "call": round(wall, 1),
        "kernel": round(sum(kernels.values()), 1),
        "first_seconds": round(first, 1),
        "kernels": {name[:60]: round(each, 1) for name, each in largest},
        **_of_device(),
    }


def _time_steps(step) -> float:
    """Microseconds of a step, of many that follow each other."""
    loss = step()
    assert float(loss) > 0
    begin = time.perf_counter()
    for _ in range(_STEPS):
        loss = step()
    assert float(loss) > 0
    return 1e6 * (time.perf_counter() - begin) / _STEPS


def _of_device() -> dict:
    import jax

    (device,) = jax.devices()
    return {
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "versions": {"jax": jax.__version__, "device": device.device_kind},
    }


def _fit(model: str, items, times, batch: int) -> dict:
    """Time of a step of `fit`, the median of epochs after the first."""
    from flax import nnx

    import sparsejax as sj

    made = sj.sequence.build_sequence_model(
        _config(model, "bfloat16", items.shape[1] - 1), items=ITEMS, rngs=nnx.Rngs(0)
    )
    kept = items >= 0
    data = sj.SequenceDataset(
        np.concatenate([[0], np.cumsum(kept.sum(1))]),
        items[kept],
        np.arange(len(items)).astype(str),
        np.arange(ITEMS).astype(str),
        times[kept].astype(np.float64) if model == "hstu" else None,
    )
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
        **_of_device(),
    }


def _recommend(model: str, length: int) -> dict:
    """Time of `recommend` for one full history."""
    from flax import nnx

    import sparsejax as sj

    made = sj.sequence.build_sequence_model(
        _config(model, "bfloat16", length), items=ITEMS, rngs=nnx.Rngs(0)
    )
    rng = np.random.default_rng(1)
    data = sj.SequenceDataset(
        np.array([0, length]),
        rng.integers(0, ITEMS, length),
        np.array(["a"]),
        np.arange(ITEMS).astype(str),
        np.cumsum(rng.exponential(3e4, length)) if model == "hstu" else None,
    )
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        found = sj.recommend(made, data, k=10, exclude=None)
        times.append(time.perf_counter() - begin)
        assert np.isfinite(found.scores).all()
        wait_for_turn()
    first, *others = times
    return {
        "call": round(1e6 * min(others), 1),
        "first_seconds": round(first, 1),
        **_of_device(),
    }


# torch


def _torch(model: str, _form: str, items, times, targets: int) -> dict:
    """As one writes it: padded, scores of HSTU by einsum, compiled, under autocast."""
    import torch  # pyrefly: ignore[missing-import]

    functional, nn = torch.nn.functional, torch.nn
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    length = items.shape[1] - 1

    def heads(x):
        return x.unflatten(2, (HEADS, -1)).transpose(1, 2)

    class Softmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x, buckets):
            q, k, v = (heads(part) for part in self.qkv(self.norm1(x)).chunk(3, 2))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = self.mixed(y.transpose(1, 2).flatten(2))
            x = x + functional.dropout(y, _DROPOUT)
            y = self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
            return x + functional.dropout(y, _DROPOUT)

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.products = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.mixed = nn.Linear(WIDTH, WIDTH)
            self.place_bias = nn.Parameter(0.02 * torch.randn(length))
            self.time_bias = nn.Parameter(torch.zeros(_BUCKETS))
            place = torch.arange(length, device="cuda")
            self.apart = (place[:, None] - place[None]).clamp(min=0)
            self.before = place[:, None] >= place[None]

        def forward(self, x, buckets):
            u, v, q, k = functional.silu(self.products(self.norm1(x))).chunk(4, 2)
            q, k, v = (heads(part) for part in (q, k, v))
            bias = self.place_bias[self.apart][None] + self.time_bias[buckets]
            scores = torch.einsum("bhtd,bhsd->bhts", q, k) + bias[:, None]
            weights = functional.silu(scores) / length * self.before
            y = torch.einsum("bhts,bhsd->bhtd", weights, v)
            y = u * self.norm2(y.transpose(1, 2).flatten(2))
            return x + self.mixed(functional.dropout(y, _DROPOUT))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            block = {"hstu": Gated, "sasrec": Softmax}[model]
            self.items = nn.Parameter(0.02 * torch.randn(ITEMS, WIDTH))
            self.places = nn.Parameter(0.02 * torch.randn(length, WIDTH))
            self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, given, times, wanted, targets, negatives):
            x = functional.embedding(given, self.items) * WIDTH**0.5 + self.places
            x, buckets = functional.dropout(x, _DROPOUT), None
            if model == "hstu":
                since = (times[:, :, None] - times[:, None]).abs().clamp(min=1)
                buckets = (since.log() / 0.301).long().clamp(max=_BUCKETS - 1)
            for block in self.blocks:
                x = block(x, buckets)
            h = functional.normalize(self.norm(x).flatten(0, 1)[wanted], dim=1)
            rows = torch.cat([targets, negatives])
            rows = functional.normalize(functional.embedding(rows, self.items), dim=1)
            own, others = rows[: len(targets)], rows[len(targets) :]
            mine = (h * own).sum(1, keepdim=True) / _TEMPERATURE
            scores = h @ others.T / _TEMPERATURE
            scores = scores.masked_fill(targets[:, None] == negatives[None], -1e30)
            scores = torch.cat([mine, scores + np.log(ITEMS / NEGATIVES)], 1).float()
            return functional.cross_entropy(scores, torch.zeros_like(targets))

    histories = torch.as_tensor(items, device="cuda").long()
    given, next_items = histories[:, :-1].clamp(min=0), histories[:, 1:].flatten()
    (wanted,) = torch.nonzero(next_items >= 0, as_tuple=True)
    shown = torch.as_tensor(times, device="cuda")[:, :-1]
    network = Network().cuda()
    rule = torch.optim.Adam(network.parameters(), 1e-3, fused=True)
    compiled = torch.compile(network, dynamic=False)

    def step():
        negatives = torch.randint(0, ITEMS, (NEGATIVES,), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(given, shown, wanted, next_items[wanted], negatives)
        loss.backward()
        rule.step()
        rule.zero_grad()
        return loss

    begin = time.perf_counter()
    assert float(step()) > 0
    first = time.perf_counter() - begin
    wait_for_turn()
    wall = _time_steps(step)
    return {
        "call": round(wall, 1),
        "kernel": round(time_torch(step, [()], rounds=3).kernel, 1),
        "first_seconds": round(first, 1),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "versions": {"torch": torch.__version__},
    }


if __name__ == "__main__":
    main()
