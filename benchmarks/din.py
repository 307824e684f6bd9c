"""Times training steps of DIN beside compiled torch, and compares losses.

    python benchmarks/din.py run [--commit NAME]     on a GPU, with torch
    python benchmarks/din.py table                   anywhere

*same* takes 20 steps of SGD in float32 from the same weights with both, on the host. Other
parts time a step of Adam, in a loop of one's own, with layers in bfloat16 on a GPU and in
float32 on a CPU: users and items of a million ids, vectors of 16 numbers, histories that are
filled by a uniform share of their places, the layers 80 and 40 that weigh them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

import numpy as np
from report import command, wait_for_turn

IDS, DIM, DENSE = 1_000_000, 16, 4
_SHAPES = ((4096, 50), (4096, 200), (65_536, 50), (65_536, 200))
_CPU_SHAPES = ((512, 50),)
_ATTENTION, _HIDDEN = (80, 40), (64, 32)
_STEPS, _BATCHES = 40, 4


def main() -> None:
    parts = {
        f"{form}-{batch}-{length}": {}
        for batch, length in _SHAPES
        for form in ("ours", "torch")
    }
    on_host = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    for batch, length in _CPU_SHAPES:
        parts |= {f"{form}-{batch}-{length}": on_host for form in ("ours", "torch")}
    parts["same"] = on_host
    command(__doc__, __file__, parts, _measure, together=True)


def _batch(rng: np.random.Generator, batch: int, length: int, ids: int) -> tuple:
    filled = rng.integers(0, length + 1, (batch, 1))
    had = rng.integers(0, ids, (batch, length))
    had = np.where(np.arange(length) < filled, had, -1)
    dense = rng.standard_normal((batch, DENSE)).astype(np.float32)
    user, item = rng.integers(0, ids, (2, batch))
    click = rng.integers(0, 2, batch).astype(np.float32)
    return dense, *(a.astype(np.int32) for a in (user, item, had)), click


def _measure(part: str) -> Iterator[dict]:
    if part == "same":
        yield _same() | {"versions": _versions()}
        return
    form, batch, length = part.split("-")
    rng = np.random.default_rng(0)
    batches = [_batch(rng, int(batch), int(length), IDS) for _ in range(_BATCHES)]
    found = (_ours if form == "ours" else _torch)(batches)
    shape = {"form": form, "batch": int(batch), "length": int(length)}
    yield shape | found | {"versions": _versions()}


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "torch")}


def _model(length: int, dtype: Any, ids: int) -> Any:
    from flax import nnx

    import sparsejax as sj

    config = sj.DINConfig(
        dim=DIM, length=length, attention=_ATTENTION, hidden=_HIDDEN, dtype=dtype
    )
    return sj.embeddings.build_click_model(
        config,
        num_dense=DENSE,
        features={"user": ids, "item": ids, "had": "item"},
        rngs=nnx.Rngs(0),
    )


def _step_of_ours():
    import optax

    import sparsejax as sj

    @sj.jit
    def step(model, optimizer, dense, user, item, had, click):
        def loss_fn(model):
            logits = model(dense, {"user": user, "item": item, "had": had})
            return optax.sigmoid_binary_cross_entropy(logits, click).mean()

        loss, grads = optimizer.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return step


def _ours(batches) -> dict:
    import jax

    import sparsejax as sj

    device = jax.devices()[0]
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    model = _model(batches[0][3].shape[1], dtype, IDS)
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
    step, batches = _step_of_ours(), jax.device_put(batches)
    start = time.perf_counter()
    step(model, optimizer, *batches[0]).block_until_ready()
    first = time.perf_counter() - start

    wait_for_turn()

    def run():
        losses = [step(model, optimizer, *batches[i % _BATCHES]) for i in range(_STEPS)]
        losses[-1].block_until_ready()

    return {"ms": _fastest(run), "first_step": first, "device": device.device_kind}


def _fastest(run) -> float:
    """Milliseconds of a step, of the fastest of five runs. A run more warms up."""
    found = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return 1e3 * min(found[1:]) / _STEPS


def _torch_model(ids: int):
    import torch  # pyrefly: ignore[missing-import]

    nn = torch.nn

    def layers(*sizes):
        made = []
        for a, b in itertools.pairwise(sizes):
            made += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*made[:-1])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = nn.Embedding(ids, DIM)
            self.item = nn.Embedding(ids, DIM)
            self.attention = layers(4 * DIM, *_ATTENTION, 1)
            self.hidden = layers(DENSE + 3 * DIM, *_HIDDEN, 1)

        def forward(self, dense, user, item, had):
            there = (had >= 0)[..., None]
            history = self.item(had.clamp(min=0)) * there
            candidate = self.item(item)
            both = candidate[:, None].expand_as(history)
            unit = [history, both, history - both, history * both]
            weights = self.attention(torch.cat(unit, -1))
            summed = (weights * history).sum(1)
            x = torch.cat([dense, self.user(user), candidate, summed], -1)
            return self.hidden(x)[:, 0]

    return Model()


def _torch(batches) -> dict:
    import torch  # pyrefly: ignore[missing-import]

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.set_float32_matmul_precision("high")
    model = _torch_model(IDS).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    batches = [[torch.from_numpy(a).to(device) for a in batch] for batch in batches]
    batches = [[d, *(a.long() for a in ids), y] for d, *ids, y in batches]

    @torch.compile
    def loss_of(dense, user, item, had, click):
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            logits = model(dense, user, item, had)
        return torch.nn.functional.binary_cross_entropy_with_logits(
            logits.float(), click
        )

    def step(batch):
        optimizer.zero_grad()
        loss_of(*batch).backward()
        optimizer.step()

    start = time.perf_counter()
    step(batches[0])
    if on_gpu:
        torch.cuda.synchronize()
    first = time.perf_counter() - start

    wait_for_turn()

    def run():
        for i in range(_STEPS):
            step(batches[i % _BATCHES])
        if on_gpu:
            torch.cuda.synchronize()

    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    return {"ms": _fastest(run), "first_step": first, "device": name}


def _same() -> dict:
    """The largest relative difference of the losses of 20 steps of SGD."""
    import jax
    import torch  # pyrefly: ignore[missing-import]

    import sparsejax as sj

    ids, rate = 500, 0.1
    batch = _batch(np.random.default_rng(1), 256, 20, ids)
    ours = _model(20, "float32", ids)
    theirs = _torch_model(ids)
    with torch.no_grad():
        for name in ("user", "item"):
            table = np.asarray(ours.embeddings.table(name)).copy()
            theirs.get_submodule(name).weight.copy_(torch.from_numpy(table))
        for mine, other in (
            (ours.attention[0], theirs.attention),
            (ours.hidden, theirs.hidden),
        ):
            linear = [m for m in other if isinstance(m, torch.nn.Linear)]
            for a, b in zip(mine.layers, linear, strict=True):
                b.weight.copy_(torch.from_numpy(np.asarray(a.kernel[...]).T.copy()))
                b.bias.copy_(torch.from_numpy(np.asarray(a.bias[...]).copy()))
    optimizer = sj.Optimizer(ours, sj.optimizers.sgd(rate))
    step = _step_of_ours()
    mine = [float(step(ours, optimizer, *jax.device_put(batch))) for _ in range(20)]
    sgd = torch.optim.SGD(theirs.parameters(), lr=rate)
    dense, *named, click = (torch.from_numpy(a) for a in batch)
    found = []
    for _ in range(20):
        sgd.zero_grad()
        logits = theirs(dense, *(a.long() for a in named))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, click)
        loss.backward()
        sgd.step()
        found.append(float(loss.detach()))
    difference = np.abs(np.subtract(mine, found)) / np.abs(found)
    return {
        "form": "same",
        "losses": [mine[0], mine[-1]],
        "difference": float(difference.max()),
    }


if __name__ == "__main__":
    main()
