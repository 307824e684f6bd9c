"""Times a training step of SASRec over a million items, and how much of it the softmax is.

    python benchmarks/sequence_step.py run [--commit NAME]    on a GPU
    python benchmarks/sequence_step.py table                  anywhere

The step has the loss, its gradients and a dense Adam. The model has 2 blocks of width 256
and histories of 50 places, all with a next item. In torch the same layers are compiled and
run under autocast to bfloat16; the loss is that of the package `cut-cross-entropy`, or the
softmax over 256 sampled negatives.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, reported, table, write_section
from timing import time_kernels, time_torch

ITEMS, WIDTH, BLOCKS, LENGTH, BATCH = 1_000_000, 256, 2, 50, 256
NEGATIVES = 256
_STEPS = 10
_OURS = "exact"


def main() -> None:
    command(__doc__, __file__, {"jax": {}, "torch": {}}, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    yield from _measure_jax() if part == "jax" else _measure_torch()


def _result(name: str, kernel: float, call: float, versions: dict, **more) -> dict:
    return {
        "implementation": name,
        "kernel": round(kernel, 1),
        "call": round(call, 1),
        "tokens_per_second": round(1e6 * BATCH * LENGTH / call),
        **more,
        "versions": versions,
    }


# JAX


def _measure_jax() -> Iterator[dict]:
    import jax
    import optax
    from flax import nnx

    import sparsejax as sj

    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    config = sj.SASRecConfig(
        max_length=LENGTH, width=WIDTH, blocks=BLOCKS, dropout=0.2, temperature=None
    )
    keys = jax.random.split(jax.random.key(0), 3)
    histories = jax.random.randint(keys[0], (BATCH, LENGTH + 1), 0, ITEMS)
    sampler = sj.nn.NegativeSampler.uniform(ITEMS)
    rule = optax.adam(1e-3)

    def sampled(model, histories, step):
        negatives, log_q = sampler.sample(jax.random.fold_in(keys[1], step), NEGATIVES)
        return sj.nn.sampled_cross_entropy(
            model(histories[:, :-1]),
            model.output.kernel[...],
            histories[:, 1:],
            negatives,
            log_q=log_q,
        )

    def exact(model, histories, step):
        return model.loss(histories)

    losses: dict[str, Callable] = {_OURS: exact, f"{NEGATIVES} sampled": sampled}
    for name, loss in losses.items():
        with reported(name):
            model = sj.sequence.SASRec(config, items=ITEMS, rngs=nnx.Rngs(0))
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            del model

            @functools.partial(jax.jit, donate_argnums=(0, 1))
            def step(params, state, rest, step, graph=graph, loss=loss):
                def value(params):
                    model = nnx.merge(graph, params, rest, copy=True)
                    return loss(model, histories, step)

                value, gradients = jax.value_and_grad(value)(params)
                updates, state = rule.update(gradients, state, params)
                return optax.apply_updates(params, updates), state, value

            carry = [params, rule.init(params)]
            del params

            def call(i, carry=carry, step=step, rest=rest):
                *carry[:], value = step(*carry, rest, i)
                assert value.block_until_ready() > 0

            kernels = time_kernels(call, _STEPS)
            begin = time.perf_counter()
            for i in range(_STEPS):
                call(i)
            wall = 1e6 * (time.perf_counter() - begin) / _STEPS
            more: dict[str, Any] = {}
            if name == _OURS:
                more["output"] = round(_output_alone(carry[0], histories), 1)
            largest = sorted(kernels.items(), key=lambda item: -item[1])[:12]
            more["kernels"] = {name[:40]: round(each, 1) for name, each in largest}
            del carry, call
            yield _result(name, sum(kernels.values()), wall, versions, **more)


def _output_alone(params, histories) -> float:
    """Kernel time of the loss and its gradients, of given hidden vectors."""
    import jax

    import sparsejax as sj

    h = jax.random.normal(jax.random.key(2), (BATCH, LENGTH, WIDTH))
    targets, kernel = histories[:, 1:], params["output"]["kernel"][...]

    @jax.jit
    def both(h, kernel, targets):
        def loss(h, kernel):
            return sj.linear_cross_entropy(h, kernel, targets, num_items=ITEMS)

        return jax.value_and_grad(loss, (0, 1))(h, kernel)

    def call(i):
        jax.block_until_ready(both(h, kernel, targets))

    return sum(time_kernels(call, _STEPS).values())


# torch


def _measure_torch() -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    functional, nn = torch.nn.functional, torch.nn
    versions = {"torch": torch.__version__}
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            parts = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 2, -1)
            q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = self.mixed(y.transpose(1, 2).reshape(x.shape))
            x = x + functional.dropout(y, 0.2)
            y = self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
            return x + functional.dropout(y, 0.2)

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            x = functional.dropout(x + self.places, 0.2)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    histories = torch.randint(0, ITEMS, (BATCH, LENGTH + 1), device="cuda")
    given, targets = histories[:, :-1], histories[:, 1:].reshape(-1)

    def sampled(h, items):
        negatives = torch.randint(0, ITEMS, (NEGATIVES,), device="cuda")
        mine = (h * functional.embedding(targets, items)).sum(1, keepdim=True)
        others = h @ functional.embedding(negatives, items).T
        others = others.masked_fill(targets[:, None] == negatives[None], -1e30)
        others = others + torch.log(torch.tensor(ITEMS / NEGATIVES))
        scores = torch.cat([mine, others], 1).float()
        return functional.cross_entropy(scores, torch.zeros_like(targets))

    losses: dict[str, Callable] = {f"torch, {NEGATIVES} sampled": sampled}
    with reported("import cut_cross_entropy"):
        from cut_cross_entropy import (  # pyrefly: ignore[missing-import]
            linear_cross_entropy,
        )

        def cut(h, items, **options):
            h, items = h.bfloat16(), items.bfloat16()
            return linear_cross_entropy(h, items, targets, **options)

        losses["torch, cut-cross-entropy, exact"] = functools.partial(
            cut, filter_eps=None
        )
        losses["torch, cut-cross-entropy, as it comes"] = cut
    for name, loss in losses.items():
        with reported(name):
            items = nn.Parameter(0.02 * torch.randn(ITEMS, WIDTH, device="cuda"))
            backbone = Backbone().cuda()
            rule = torch.optim.Adam([items, *backbone.parameters()], fused=True)
            compiled = torch.compile(backbone, dynamic=False)

            def step(items, compiled=compiled, rule=rule, loss=loss):
                with torch.autocast("cuda", torch.bfloat16):
                    h = compiled(functional.embedding(given, items))
                    value = loss(h.reshape(-1, WIDTH), items)
                value.backward()
                rule.step()
                rule.zero_grad()
                return value

            for _ in range(2):
                step(items)
            took = time_torch(step, [(items,)], rounds=3)
            yield _result(name, took.kernel, took.call, versions)
            del items, backbone, rule, compiled, step
            torch.cuda.empty_cache()


def _write_table(report: dict) -> None:
    """Puts the results between the marks in README.md."""
    rows = {row["implementation"]: row for row in report["results"]}
    body = [
        [
            name,
            f"{row['kernel'] / 1e3:.2f}",
            f"{row['call'] / 1e3:.2f}",
            f"{row['tokens_per_second'] / 1e3:,.0f}",
            f"{row['output'] / row['kernel']:.0%}" if "output" in row else "-",
        ]
        for name, row in rows.items()
    ]
    columns = [
        "loss",
        "kernels of a step, ms",
        "step, ms",
        "1,000 tokens a second",
        "share of the output layer alone",
    ]
    write_section("sequence_step", [origin(report), "", *table(columns, body)])


if __name__ == "__main__":
    main()
