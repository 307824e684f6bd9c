"""Times training steps of HSTU and SASRec by the length of histories, beside torch.

    python benchmarks/sequence_lengths.py run [--commit NAME]    on a GPU
    python benchmarks/sequence_lengths.py table                  anywhere

The parts "wide" have the shape of MLPerf's recommendation benchmark, all places filled, with
and without the biases of places and times. Each process measures one model at one length. A
first `run` compiles; its caches serve the next one, if JAX_COMPILATION_CACHE_DIR is set.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import numpy as np
from report import command, origin, table, write_section
from timing import time_kernels, time_torch

# Places of a history, and histories of a batch.
SHAPES = {50: 1024, 200: 256, 512: 128, 1024: 64, 4096: 16, 16384: 1}
ITEMS, WIDTH, HEADS, BLOCKS, NEGATIVES = 200_000, 256, 4, 2, 1024
_DROPOUT, _TEMPERATURE, _BUCKETS = 0.4, 0.1, 128
# Of the parts "wide".
_WIDE = {"width": 512, "heads": 8, "blocks": 3}
_WIDE_LENGTH = 4096
_STEPS = 10
_FORMS = "bfloat16", "float32", "torch"


def main() -> None:
    parts = {
        f"{model}-{form}-{length}": {}
        for form in _FORMS
        for model in ("hstu", "sasrec")
        for length in SHAPES
        # Padded scores of 4,096 places squared are too many for torch.
        if not (form == "torch" and length > 1024)
    }
    parts |= {f"wide-{biases}": {} for biases in ("both", "none")}
    command(__doc__, __file__, parts, _measure, _write_table)


def histories(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Items and times of a batch, lengths as logs have them; one history is full."""
    rng, batch = np.random.default_rng(0), SHAPES[length]
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
    model, form, length = part.split("-")
    items, times = histories(int(length))
    targets = int((items[:, 1:] >= 0).sum())
    measure = _torch if form == "torch" else _ours
    found = measure(model, form, items, times, targets)
    yield {
        "model": model,
        "implementation": form,
        "length": int(length),
        "targets": targets,
        "tokens_per_second": round(1e6 * targets / found["call"]),
        **found,
    }


# JAX


def _ours(model: str, dtype: str, items, times, targets: int) -> dict:
    from flax import nnx

    import sparsejax as sj

    config = _config(model, dtype, items.shape[1] - 1)
    made = sj.sequence.build_sequence_model(config, items=ITEMS, rngs=nnx.Rngs(0))
    found = _steps(made, items, times if model == "hstu" else None, targets)
    return found | {"recommend": round(_recommend(made, config.max_length), 1)}


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
        def _of_tokens(self, tokens):
            return super()._of_tokens(WithoutBiases(*tokens))

    rng, shape = np.random.default_rng(0), (SHAPES[_WIDE_LENGTH], _WIDE_LENGTH + 1)
    items = rng.integers(0, ITEMS, shape).astype(np.int32)
    times = np.cumsum(rng.exponential(3e4, shape), axis=1).astype(np.float32)
    config = _config("hstu", "bfloat16", _WIDE_LENGTH, **_WIDE)
    kind = {"both": sj.sequence.HSTU, "none": Unbiased}[biases]
    tokens, width = shape[0] * _WIDE_LENGTH, config.width
    of_layers = 3 * 5 * 2 * width**2
    of_attention = 7 * 2 * width * (_WIDE_LENGTH + 1) / 2
    made = kind(config, items=ITEMS, rngs=nnx.Rngs(0))
    found = _steps(made, items, times, tokens)
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


def _steps(made, items, times, targets: int) -> dict:
    """Times of a training step."""
    import jax
    import jax.numpy as jnp

    import sparsejax as sj

    made.train()
    optimizer = sj.Optimizer(made, sj.optimizers.adam(1e-3))
    given = jnp.asarray(items), None if times is None else jnp.asarray(times)
    room = -(-targets // 1024) * 1024

    @sj.jit
    def step(model, optimizer, items, times):
        def loss_of(model):
            return model.loss(items, times, max_targets=room)

        loss, gradients = optimizer.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    begin = time.perf_counter()
    loss = step(made, optimizer, *given)
    assert float(loss) > 0
    first = time.perf_counter() - begin

    def call(i):
        step(made, optimizer, *given).block_until_ready()

    call(0)
    begin = time.perf_counter()
    for _ in range(_STEPS):
        loss = step(made, optimizer, *given)
    assert float(loss) > 0
    wall = 1e6 * (time.perf_counter() - begin) / _STEPS
    stats = jax.devices()[0].memory_stats() or {}
    kernels = time_kernels(call, 3)
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:10]
    return {
        "call": round(wall, 1),
        "kernel": round(sum(kernels.values()), 1),
        "first_seconds": round(first, 1),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "kernels": {name[:60]: round(each, 1) for name, each in largest},
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
    }


def _recommend(model, length: int) -> float:
    """Microseconds of `recommend` for one full history, a call after the first."""
    import sparsejax as sj

    rng = np.random.default_rng(1)
    data = sj.SequenceDataset(
        np.array([0, length]),
        rng.integers(0, ITEMS, length),
        np.array(["a"]),
        np.arange(ITEMS).astype(str),
        np.cumsum(rng.exponential(3e4, length)),
    )
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        found = sj.recommend(model, data, k=10, exclude=None)
        times.append(1e6 * (time.perf_counter() - begin))
        assert np.isfinite(found.scores).all()
    return min(times[1:])


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
    step()
    took = time_torch(step, [()], rounds=_STEPS)
    return {
        "call": round(took.call, 1),
        "kernel": round(took.kernel, 1),
        "first_seconds": round(first, 1),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "versions": {"torch": torch.__version__},
    }


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    wide = [row for row in report["results"] if "tflops" in row]
    found = {
        (row["model"], row["length"], row["implementation"]): row
        for row in report["results"]
        if "tflops" not in row
    }
    body = []
    for model, length in dict.fromkeys(key[:2] for key in found):
        rows = [found.get((model, length, form)) for form in _FORMS]
        first = next(row for row in rows if row)
        filled = first["targets"] / (length * SHAPES[length])
        cells = [model, f"{length:,} x {SHAPES[length]:,}", f"{filled:.0%}"]
        for row in rows:
            cells += ["-"] * 3 if row is None else _cells(row)
        asked = (rows[0] or {}).get("recommend")
        cells.append("-" if asked is None else f"{asked / 1e3:.1f}")
        body.append(cells)
    columns = ["model", "places x histories", "filled"]
    for form in _FORMS:
        columns += [f"{form}: ms", "M tokens/s", "GiB"]
    columns.append("bfloat16: recommend, ms")
    lines = [origin(report), "", *table(columns, body)]
    if wide:
        columns = ["3 layers, width 512, 8 heads", "ms", "M tokens/s", "GiB", "TFLOP/s"]
        body = [[row["model"], *_cells(row), f"{row['tflops']:.0f}"] for row in wide]
        lines += ["", *table(columns, body)]
    write_section("sequence_lengths", lines)


def _cells(row: dict) -> list[str]:
    return [
        f"{row['call'] / 1e3:.1f}",
        f"{row['tokens_per_second'] / 1e6:.2f}",
        f"{(row['peak_bytes'] or 0) / 2**30:.1f}",
    ]


if __name__ == "__main__":
    main()
