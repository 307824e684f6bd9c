"""Times the softmax cross-entropy of very many classes, with its gradients, and its peers.

    python benchmarks/linear_cross_entropy.py run [--commit NAME]    on a GPU
    python benchmarks/linear_cross_entropy.py table                  anywhere

`run` starts a process for each part: ours, what one writes in JAX, libraries for torch, and
what one writes in torch. All make the mean loss and its gradients in `h` and the kernel.
Each checks rows of both gradients against a dense float32 computation before it is timed.
The peers are the packages `cut-cross-entropy` and `liger-kernel`; without one, its rows are
left out. Cut cross-entropy leaves out gradients of scores whose probability is below a
threshold; it is timed as it comes, and with all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from report import command, reported
from timing import Time, kernels_of, temporary_bytes, time_jax, time_torch

# A bfloat16 matrix product on random data does this many operations a second.
_CEILING = 7.9e14
_CHECKED = 16  # rows of each gradient that are checked
_OURS, _EVERY_GRADIENT = "linear_cross_entropy", "cut-cross-entropy, exact"
_HALF = "linear_cross_entropy, half of the targets ignored"


class Shape(NamedTuple):
    tokens: int
    hidden: int
    items: int

    @property
    def rows(self) -> int:
        """Of a kernel as a layer stores it."""
        return -(-self.items // 256) * 256

    @property
    def name(self) -> str:
        return f"{self.tokens:,} x {self.hidden:,} x {self.items:,}"

    @property
    def floor(self) -> float:
        """Microseconds of four matrix products."""
        return 8e6 * self.tokens * self.hidden * self.items / _CEILING


SHAPES = (
    Shape(8_192, 512, 256_000),
    Shape(8_192, 64, 1_000_000),
    Shape(16_384, 256, 1_000_000),
    Shape(8_192, 2_304, 256_000),
    Shape(2_048, 64, 10_000_000),
    Shape(8_192, 128, 3_000_000),
    Shape(16_384, 320, 100_000),
)
_THREADS = ThreadPoolExecutor(8)
_WITH_FLOAT32 = SHAPES[1:2]


def _measure(part: str) -> Iterator[dict]:
    dtypes = [("bfloat16", SHAPES), ("float32", _WITH_FLOAT32)]
    if part in ("jax", "torch"):  # others do not fit
        dtypes = [("bfloat16", [shape for shape in SHAPES if shape.items < 2_000_000])]
    if part in ("ours", "jax"):
        measure = functools.partial(_measure_jax, part)
    else:
        measure = functools.partial(_measure_torch, part)
    cases = [(shape, dtype) for dtype, shapes in dtypes for shape in shapes]
    if part == "ours":
        futures = [
            future for case in cases for future in _programs(part, *case).values()
        ]
        wait(futures)
    for case in cases:
        yield from measure(*case)


def _result(shape, dtype, name, time: Time, temporary, errors) -> dict:
    return {
        "shape": shape.name,
        "dtype": dtype,
        "implementation": name,
        **time.figures(),
        "temporary_bytes": temporary,
        "errors": [round(float(error), 5) for error in errors],
    }


# JAX


def _ours(items: int, **options) -> Callable:
    from sparsejax.ops.linear_cross_entropy import linear_cross_entropy

    return functools.partial(linear_cross_entropy, num_items=items, **options)


def _half_ignored(items: int) -> Callable:
    """Every other place from the 16 on that are checked has no target."""
    import jax.numpy as jnp

    loss = _ours(items)

    def ignoring(h, kernel, targets):
        place = jnp.arange(len(h))
        ignored = (place % 2 == 1) & (place >= _CHECKED)
        return loss(h, kernel, jnp.where(ignored, -1, targets))

    return ignoring


def _plain(items: int) -> Callable:
    import jax.numpy as jnp
    import optax

    def loss(h, kernel, targets):
        scores = (h @ kernel[:items].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    return loss


@functools.cache
def _programs(part: str, shape: Shape, dtype: str) -> dict[str, Future]:
    """What is timed, and what it is compared with, compiled beside each other."""
    import jax

    items = shape.items
    candidates: dict[str, Callable] = {
        "ours": {_OURS: _ours(items), _HALF: _half_ignored(items)},
        "jax": {"XLA": _plain(items)},
    }[part]
    if part == "ours" and dtype == "float32":
        candidates["linear_cross_entropy, XLA (TF32)"] = _ours(
            items, implementation="xla"
        )
    arguments = [
        jax.ShapeDtypeStruct(size, kind)
        for size, kind in (
            ((shape.tokens, shape.hidden), dtype),
            ((shape.rows, shape.hidden), dtype),
            ((shape.tokens,), "int32"),
        )
    ]

    def compiled(function, options=None):
        return jax.jit(function).lower(*arguments).compile(options)

    # It runs once: no time for the choice of its products.
    quickly = {"xla_gpu_autotune_level": 0}
    exact = functools.partial(_exact_rows, items=items)
    return {"exact": _THREADS.submit(compiled, exact, quickly)} | {
        name: _THREADS.submit(compiled, jax.value_and_grad(loss, (0, 1)))
        for name, loss in candidates.items()
    }


def _measure_jax(part: str, shape: Shape, dtype: str) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp

    items = shape.items
    compiled_of = _programs(part, shape, dtype)
    wait(compiled_of.values())  # it uses the GPU
    keys = jax.random.split(jax.random.key(0), 3)

    @jax.jit
    def operands():
        h = jax.random.normal(keys[0], (shape.tokens, shape.hidden), dtype)
        kernel = jax.random.normal(keys[1], (shape.rows, shape.hidden), dtype)
        kernel = kernel * shape.hidden**-0.5
        return h, kernel, jax.random.randint(keys[2], (shape.tokens,), 0, items)

    inputs = operands()
    want = compiled_of["exact"].result()(*inputs)
    for name, future in compiled_of.items():
        if name == "exact":
            continue
        with reported(shape.name, dtype, name):
            compiled = future.result()
            temporary = temporary_bytes(compiled)
            _, (dh, dkernel) = compiled(*inputs)
            got = dh[:_CHECKED], dkernel[inputs[2][:_CHECKED]]
            errors = [
                jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
                for a, b in zip(got, want, strict=True)
            ]
            if name == _HALF:  # other gradients
                errors = []
            del dh, dkernel, got
            # Nothing fits in the cache, so that calls may have the same operands.
            time = time_jax(compiled, [inputs], rounds=3)
            more = {}
            if name == _OURS:
                more["kernels"] = kernels_of(compiled, inputs)
            yield _result(shape, dtype, name, time, temporary, errors) | more


def _exact_rows(h, kernel, targets, *, items: int):
    """Some rows of both gradients: of the first tokens, and of their targets."""
    import jax
    import jax.numpy as jnp

    h, kernel = h.astype(jnp.float32), kernel[:items].astype(jnp.float32)
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    tokens = len(h)

    def sums_of(chunk):
        return jax.nn.logsumexp(exact(chunk, kernel.T), axis=1)

    lse = jax.lax.map(sums_of, h.reshape(-1, min(128, tokens), h.shape[1])).reshape(-1)
    slopes = jnp.exp(exact(h[:_CHECKED], kernel.T) - lse[:_CHECKED, None])
    wanted = jax.nn.one_hot(targets[:_CHECKED], items, dtype=jnp.float32)
    dh = exact(slopes - wanted, kernel) / tokens
    chosen = targets[:_CHECKED]
    slopes = jnp.exp(exact(h, kernel[chosen].T) - lse[:, None])
    slopes = slopes - (targets[:, None] == chosen[None])
    return dh, exact(slopes.T, h) / tokens


# torch


def _measure_torch(part: str, shape: Shape, dtype: str) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    functional = torch.nn.functional
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    wanted = getattr(torch, dtype)
    sizes = {"device": "cuda", "dtype": wanted}
    h = torch.randn(shape.tokens, shape.hidden, **sizes).requires_grad_()
    kernel = torch.randn(shape.items, shape.hidden, **sizes).mul_(shape.hidden**-0.5)
    kernel.requires_grad_()
    targets = torch.randint(0, shape.items, (shape.tokens,), device="cuda")
    with torch.no_grad():
        torch.backends.cuda.matmul.allow_tf32 = False
        want = _exact_rows_in_torch(h, kernel, targets)
        torch.backends.cuda.matmul.allow_tf32 = True

    def dense(h, kernel, targets):
        return functional.cross_entropy((h @ kernel.T).float(), targets)

    candidates: dict[str, Callable] = {}
    if part == "libraries":
        with reported("import cut_cross_entropy"):
            candidates |= _cut_cross_entropy()
        with reported("import liger_kernel"):
            candidates |= _liger(shape)
    else:
        candidates["torch.compile"] = torch.compile(dense, dynamic=False)
    for name, loss in candidates.items():

        def step(h, kernel, targets, loss=loss):
            return torch.autograd.grad(loss(h, kernel, targets), (h, kernel))

        with reported(shape.name, dtype, name):
            inputs = h, kernel, targets
            dh, dkernel = step(*inputs)
            got = dh[:_CHECKED].float(), dkernel[targets[:_CHECKED]].float()
            errors = [
                ((a - b).norm() / b.norm()).item()
                for a, b in zip(got, want, strict=True)
            ]
            del dh, dkernel, got
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            time = time_torch(step, [inputs], rounds=2)
            temporary = torch.cuda.max_memory_allocated() - before
            # The gradients are no temporaries.
            temporary -= h.element_size() * (h.numel() + kernel.numel())
            yield _result(shape, dtype, name, time, temporary, errors)
        torch.cuda.empty_cache()


def _cut_cross_entropy() -> dict[str, Callable]:
    from cut_cross_entropy import (  # pyrefly: ignore[missing-import]
        linear_cross_entropy,
    )

    return {
        _EVERY_GRADIENT: functools.partial(linear_cross_entropy, filter_eps=None),
        "cut-cross-entropy, as it comes": linear_cross_entropy,
    }


def _liger(shape: Shape) -> dict[str, Callable]:
    from liger_kernel.ops import (  # pyrefly: ignore[missing-import]
        LigerFusedLinearCrossEntropyFunction as Function,
    )

    # Its own choice is tokens hidden / items tokens at a time: one, if there are many
    # items. Larger chunks are faster: here 2^30 scores.
    size = min(shape.tokens, 2 ** (2**30 // shape.items).bit_length() // 2)
    factor = -(-shape.items * size // (shape.tokens * shape.hidden))
    defaults = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False)

    def loss(h, kernel, targets):
        options = (*defaults, False, None, None, max(1, factor))
        return Function.apply(h, kernel, targets, *options)[0]

    return {"liger-kernel": loss}


def _exact_rows_in_torch(h, kernel, targets):
    import torch  # pyrefly: ignore[missing-import]

    h, kernel = h.float(), kernel.float()
    lse = torch.cat([torch.logsumexp(part @ kernel.T, 1) for part in h.split(128)])
    chosen = targets[:_CHECKED]
    slopes = torch.exp(h[:_CHECKED] @ kernel.T - lse[:_CHECKED, None])
    slopes[torch.arange(_CHECKED), chosen] -= 1
    dh = slopes @ kernel / len(h)
    slopes = torch.exp(h @ kernel[chosen].T - lse[:, None])
    slopes = slopes - (targets[:, None] == chosen[None]).float()
    return dh, slopes.T @ h / len(h)


if __name__ == "__main__":
    # The profiler does not see the kernels of a conditional in a command buffer.
    no_buffers = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    parts = {"ours": no_buffers, "libraries": {}, "jax": no_buffers, "torch": {}}
    command(__doc__, __file__, parts, _measure)
