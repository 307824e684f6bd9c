"""Times training steps of click models with several labels beside compiled torch.

    python benchmarks/sharing.py run [--commit NAME]     on a GPU, with torch
    python benchmarks/sharing.py table                   anywhere

*same* takes 20 steps of SGD in float32 from the same weights with both, on the host, for a shared
bottom, MMoE and PLE with the labels click and buy, where buy is a chain behind click (ESMM).
Other parts time a step of Adam, in a loop of one's own, with layers in bfloat16 on a GPU and in
float32 on a CPU: eight features of 100,000 ids, vectors of 16 numbers, the layers 256 and 128
of a bottom or an expert, towers of 64.
"""

from __future__ import annotations

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

# With more ids torch's Adam, which updates all rows, would hide the layers.
IDS, DIM, DENSE, FEATURES = 100_000, 16, 4, 8
_BATCH_SIZES, _CPU_BATCH = (4096, 65_536), 512
_HIDDEN, _TOWER = (256, 128), (64,)
_SHARINGS = "shared_bottom", "mmoe", "ple"
_STEPS, _BATCHES = 40, 4


def main() -> None:
    names = list(itertools.product(("ours", "torch"), _SHARINGS))
    parts = {f"{f}-{s}-{b}": {} for b in _BATCH_SIZES for f, s in names}
    on_host = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    parts |= {f"{f}-{s}-{_CPU_BATCH}": on_host for f, s in names}
    parts["same"] = on_host
    command(__doc__, __file__, parts, _measure, together=True)


def _measure(part: str) -> Iterator[dict]:
    if part == "same":
        for sharing in _SHARINGS:
            yield {"form": "same", "sharing": sharing, **_same(sharing)}
        return
    form, sharing, batch = part.split("-")
    rng = np.random.default_rng(0)
    batches = [_batch(rng, int(batch), IDS) for _ in range(_BATCHES)]
    found = (_ours if form == "ours" else _torch)(sharing, batches)
    yield {"form": form, "sharing": sharing, "batch": int(batch)} | found


def _batch(rng: np.random.Generator, batch: int, ids: int) -> tuple:
    dense = rng.standard_normal((batch, DENSE)).astype(np.float32)
    found = rng.integers(0, ids, (FEATURES, batch)).astype(np.int32)
    click = rng.integers(0, 2, batch)
    labels = np.stack([click, click * rng.integers(0, 2, batch)], axis=1)
    return dense, found, labels.astype(np.float32)


def _model(sharing: str, dtype: Any, ids: int) -> Any:
    from flax import nnx

    import sparsejax as sj

    kinds = {"shared_bottom": sj.SharedBottom, "mmoe": sj.MMoE, "ple": sj.PLE}
    # One cross layer, so that a torch model of these few lines has the same equations.
    config = sj.DCNConfig(
        dim=DIM,
        cross=1,
        hidden=_HIDDEN,
        dtype=dtype,
        sharing=kinds[sharing](tower=_TOWER),
    )
    return sj.embeddings.build_click_model(
        config,
        num_dense=DENSE,
        features={f"f{i}": ids for i in range(FEATURES)},
        labels={"click": None, "buy": "click"},
        rngs=nnx.Rngs(0),
    )


def _step_of_ours():
    import optax

    import sparsejax as sj

    @sj.jit
    def step(model, optimizer, dense, ids, labels):
        def loss_fn(model):
            named = {f"f{i}": row for i, row in enumerate(ids)}
            losses = optax.sigmoid_binary_cross_entropy(model(dense, named), labels)
            return losses.sum(axis=1).mean()

        loss, grads = optimizer.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return step


def _ours(sharing: str, batches) -> dict:
    import jax

    import sparsejax as sj

    device = jax.devices()[0]
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    model = _model(sharing, dtype, IDS)
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


def _torch_model(sharing: str, ids: int):
    import torch  # pyrefly: ignore[missing-import]

    nn = torch.nn

    def layers(*sizes, end=False):
        made = []
        for a, b in itertools.pairwise(sizes):
            made += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*(made if end else made[:-1]))

    class Stacks(nn.Module):
        """Stacks of layers of equal sizes, by batched products."""

        def __init__(self, count, *sizes, end=False):
            super().__init__()
            pairs = list(itertools.pairwise(sizes))
            self.end = end
            self.kernels = nn.ParameterList(
                torch.randn(count, a, b) / a**0.5 for a, b in pairs
            )
            self.biases = nn.ParameterList(torch.zeros(count, 1, b) for _, b in pairs)

        def forward(self, x):
            for i, (w, b) in enumerate(zip(self.kernels, self.biases, strict=True)):
                x = torch.matmul(x, w) + b
                if self.end or i < len(self.kernels) - 1:
                    x = torch.relu(x)
            return x

    size = DENSE + FEATURES * DIM

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(ids, DIM) for _ in range(FEATURES))
            self.cross = nn.Linear(size, size)
            self.towers = Stacks(2, _HIDDEN[-1], *_TOWER, 1)
            if sharing == "shared_bottom":
                self.bottom = layers(size, *_HIDDEN, end=True)
            else:
                experts, each = (4, 4) if sharing == "mmoe" else (6, 4)
                self.experts = Stacks(experts, size, *_HIDDEN, end=True)
                self.gates = Stacks(2, size, each)

        def forward(self, dense, ids):
            rows = [t(i) for t, i in zip(self.tables, ids, strict=True)]
            x = torch.cat([dense, *rows], -1)
            x = x * self.cross(x) + x
            if sharing == "shared_bottom":
                x = self.bottom(x).expand(2, -1, -1)
            else:
                y, g = self.experts(x), self.gates(x).softmax(-1)
                # PLE: two experts of each label, and two shared ones behind them.
                mine = (
                    [y, y] if sharing == "mmoe" else [torch.cat([y[:2], y[4:]]), y[2:]]
                )
                mixed = [
                    torch.einsum("be,ebh->bh", g[i], m) for i, m in enumerate(mine)
                ]
                x = torch.stack(mixed)
            click, buy = -self.towers(x)[..., 0].float()
            both = torch.logsumexp(torch.stack([click, buy, click + buy]), 0)
            return -torch.stack([click, both], 1)

    return Model()


def _loss_of(model):
    import torch  # pyrefly: ignore[missing-import]

    def loss(dense, ids, labels):
        logits = model(dense, ids)
        losses = torch.nn.functional.binary_cross_entropy_with_logits
        return 2 * losses(logits, labels)

    return loss


def _torch(sharing: str, batches) -> dict:
    import torch  # pyrefly: ignore[missing-import]

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.set_float32_matmul_precision("high")
    model = _torch_model(sharing, IDS).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    batches = [[torch.from_numpy(a).to(device) for a in batch] for batch in batches]
    batches = [(dense, ids.long(), labels) for dense, ids, labels in batches]
    compiled = torch.compile(_loss_of(model))

    def step(batch):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            loss = compiled(*batch)
        loss.backward()
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


def _same(sharing: str) -> dict:
    """The largest relative difference of the losses of 20 steps of SGD."""
    import jax
    import torch  # pyrefly: ignore[missing-import]

    import sparsejax as sj

    ids, rate = 500, 0.1
    dense, found, labels = _batch(np.random.default_rng(1), 256, ids)
    ours, theirs = _model(sharing, "float32", ids), _torch_model(sharing, ids)

    def copied(ours, theirs):
        value = np.asarray(ours[...]).reshape(theirs.shape)
        theirs.copy_(torch.from_numpy(value.copy()))

    with torch.no_grad():
        for i, table in enumerate(theirs.tables):
            rows = np.asarray(ours.embeddings.table(f"f{i}")).copy()
            table.weight.copy_(torch.from_numpy(rows))
        pairs = [(ours.cross[0], theirs.cross)]
        top = ours.hidden
        stacks = [(top.towers, theirs.towers)]
        if sharing == "shared_bottom":
            linear = [m for m in theirs.bottom if isinstance(m, torch.nn.Linear)]
            pairs += zip(top.bottom.layers, linear, strict=True)
        else:
            level = top if sharing == "mmoe" else top.levels[0]
            stacks += [(level.experts, theirs.experts), (level.gates, theirs.gates)]
        for mine, other in pairs:
            kernel = np.asarray(mine.kernel[...]).T.copy()
            other.weight.copy_(torch.from_numpy(kernel))
            copied(mine.bias, other.bias)
        for mine, other in stacks:
            for name in ("kernels", "biases"):
                for a, b in zip(getattr(mine, name), getattr(other, name), strict=True):
                    copied(a, b)
    optimizer, step = sj.Optimizer(ours, sj.optimizers.sgd(rate)), _step_of_ours()
    batch = jax.device_put((dense, found, labels))
    mine = [float(step(ours, optimizer, *batch)) for _ in range(20)]
    sgd, loss_of = torch.optim.SGD(theirs.parameters(), lr=rate), _loss_of(theirs)
    there = (
        torch.from_numpy(dense),
        torch.from_numpy(found).long(),
        torch.from_numpy(labels),
    )
    losses = []
    for _ in range(20):
        sgd.zero_grad()
        loss = loss_of(*there)
        loss.backward()
        sgd.step()
        losses.append(float(loss.detach()))
    difference = np.abs(np.subtract(mine, losses)) / np.abs(losses)
    return {"losses": [mine[0], mine[-1]], "difference": float(difference.max())}


if __name__ == "__main__":
    main()
