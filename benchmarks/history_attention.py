"""Times attention within histories by their lengths, with and without biases.

    python benchmarks/history_attention.py run [--commit NAME]    on a GPU
    python benchmarks/history_attention.py table                  anywhere

Rates count only operations of pairs within a history: two products forward, five backward. Results
of some histories are checked against float64 before they are timed. A part is an
implementation with its biases and histories; each part is a process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np
from report import command, largest
from timing import relative_error, time_jax, time_kernels, time_torch

_TOKENS, _HEADS, _DIM = 65_536, 4, 64
_BATCHES = 2  # number of batches, each with its own random lengths
# The workloads on which XLA's form and torch are measured, too. Both take long to compile.
_PEERS = "128 filled", "512 filled", "512 as in logs"
# Published TFLOP/s of NVIDIA's CUTLASS kernel, forward and backward, with batch 256 and without
# biases.
_NVIDIA = {
    128: (42, 41),
    256: (80, 95),
    512: (184, 175),
    1024: (261, 263),
    4096: (418, 381),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Histories of a batch.

    Attributes:
      name: as in tables.
      length: of the longest.
      kind: "filled": all have this length; "packed": 8 to `length`, uniformly; "logs": as in
        logs, lognormal(log(length / 4), 1), cut.
    """

    name: str
    length: int
    kind: str = "filled"

    def lengths(self, seed: int) -> np.ndarray:
        rng, n = np.random.default_rng(seed), _TOKENS
        if self.kind == "filled":
            return np.full(n // self.length, self.length)
        if self.kind == "packed":
            found = rng.integers(8, self.length + 1, n)
        else:
            found = rng.lognormal(np.log(self.length / 4), 1, n)
        found = np.clip(found.astype(int), 1, self.length)
        return found[: np.searchsorted(np.cumsum(found), n, side="right")]


WORKLOADS = [
    *(Workload(f"{n:,} filled", n) for n in _NVIDIA),
    Workload("8 to 128 packed", 128, "packed"),
    Workload("512 as in logs", 512, "logs"),
    Workload("4,096 as in logs", 4096, "logs"),
]


# Parts by name: implementation, whether there are biases, and workload.
PARTS: dict[str, tuple[str, bool, Workload]] = {
    f"{implementation}-{'both' if biased else 'none'}-{workload.name.replace(' ', '-')}": (
        implementation,
        biased,
        workload,
    )
    for implementation in ("mosaic_gpu", "xla", "torch", "cudnn")
    for biased, workload in itertools.product((False, True), WORKLOADS)
    if {
        "mosaic_gpu": True,
        # cuDNN computes softmax without biases.
        "cudnn": workload.kind == "filled" and not biased,
    }.get(implementation, biased and workload.name in _PEERS)
}


def _measure(part: str) -> Iterator[dict]:
    implementation, biased, workload = PARTS[part]
    if implementation == "torch":
        yield from _measure_torch(workload)
    else:
        yield from _measure_jax(workload, biased, implementation)


@functools.cache
def _operands(seed: int) -> np.ndarray:
    shape = 4, _TOKENS, _HEADS, _DIM
    return np.random.default_rng(seed + 100).standard_normal(shape, np.float32) / 2


def make(workload: Workload, seed: int):
    """Draws q, k, v, dy, indptr, times and biases on the host."""
    rng, operands = np.random.default_rng(seed), _operands(seed)
    lengths = workload.lengths(seed)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    times = np.cumsum(rng.exponential(3e4, _TOKENS)).astype(np.float32)
    for start, end in itertools.pairwise(indptr):
        # Times start at 0, so that float32 represents them exactly to a second.
        times[start:end] -= times[start]
    biases = [
        rng.standard_normal(n).astype(np.float32) / 4 for n in (workload.length, 128)
    ]
    return *operands, indptr, times, *biases


def operations(indptr: np.ndarray) -> float:
    """Operations of one matrix product over the pairs that count."""
    lengths = np.diff(indptr).astype(np.float64)
    return float(np.sum(lengths * (lengths + 1) / 2) * 2 * _HEADS * _DIM)


def error_of(found, data, which: str) -> float:
    """The relative error of the results, or gradients, of two histories (for long ones, of one
    head).
    """
    q, k, v, dy, indptr, times, place, time = data
    wanted, given = [], []
    for history in {0, int(np.argmin(np.diff(indptr)))}:
        own = slice(indptr[history], indptr[history + 1])
        heads = slice(None) if own.stop - own.start <= 1024 else slice(1)
        x, y, z, pulled = (np.asarray(a[own, heads], np.float64) for a in (q, k, v, dy))
        n = len(x)
        scores = np.einsum("thd,shd->hts", x, y)
        apart = np.arange(n)[:, None] - np.arange(n)
        if place is not None:
            scores += place[np.clip(apart, 0, len(place) - 1)]
            since = np.maximum(times[own][:, None] - times[own][None], 1)
            bucket = np.floor(np.log(since.astype(np.float64)) / 0.301)
            scores += time[bucket.astype(int)]
        share = 1 / (1 + np.exp(-scores))
        weights = np.where(apart >= 0, scores * share, 0)
        if which == "forward":
            exact = [np.einsum("hts,shd->thd", weights, z)]
        else:
            ds = (
                np.einsum("thd,shd->hts", pulled, z)
                * share
                * (1 + scores * (1 - share))
            )
            ds = np.where(apart >= 0, ds, 0)
            exact = [
                np.einsum("hts,shd->thd", ds, y),
                np.einsum("hts,thd->shd", ds, x),
                np.einsum("hts,thd->shd", weights, pulled),
            ]
        wanted += exact
        given += [np.asarray(a[own, heads], np.float64) for a in found]
    pairs = zip(given, wanted, strict=True)
    return max(relative_error(a, b, 2e-2) for a, b in pairs)


def _measure_jax(
    workload: Workload, biased: bool, implementation: str
) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp

    from sparsejax.ops.history_attention import history_attention

    data, inputs = [], []
    for seed in range(_BATCHES):
        *operands, indptr, times, place, time = make(workload, seed)
        operands = [jnp.asarray(x, jnp.bfloat16) for x in operands]
        host = [np.asarray(x, np.float32) for x in operands]
        biases = (times, place, time) if biased else (None, None, None)
        data.append((*host, indptr, *biases))
        inputs.append(jax.device_put((*operands, indptr, *biases)))

    if implementation == "cudnn":
        yield from _measure_cudnn(workload, inputs, data)
        return

    def attend(q, k, v, indptr, times, place, time):
        return history_attention(
            q,
            k,
            v,
            indptr,
            place_bias=place,
            times=times,
            time_bias=time,
            implementation=implementation,  # pyrefly: ignore
        )

    def forward(q, k, v, dy, *others):
        return attend(q, k, v, *others)

    def backward(q, k, v, dy, indptr, times, place, time):
        def of(q, k, v, place, time):
            return attend(q, k, v, indptr, times, place, time)

        return jax.vjp(of, q, k, v, place, time)[1](dy)

    done = np.median([operations(each[4]) for each in data])
    for name, function, products in (
        ("forward", forward, 2),
        ("backward", backward, 5),
    ):
        run = jax.jit(function)
        found = run(*inputs[0])
        error = error_of(found[:3] if name == "backward" else [found], data[0], name)
        programs = time_kernels(
            lambda i: jax.block_until_ready(run(*inputs[i % _BATCHES])),  # noqa: B023
            4 * _BATCHES,
        )
        work = sum(programs.values()), products * done
        result = _result(workload, biased, implementation, name, *work, error)
        yield result | {"programs": largest(programs, 5)}


def _measure_cudnn(workload, inputs, data):
    """Times cuDNN's softmax attention on histories of equal length."""
    import jax

    def forward(q, k, v, dy, *_):
        q, k, v = (x.reshape(-1, workload.length, _HEADS, _DIM) for x in (q, k, v))
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )

    def both(q, k, v, dy, *others):
        y, pull = jax.vjp(lambda *x: forward(*x, dy, *others), q, k, v)
        return pull(dy.reshape(y.shape))

    done = operations(data[0][4])
    runs = jax.jit(forward), jax.jit(both)
    first, whole = (time_jax(run, inputs).kernel for run in runs)
    for name, time, products in (("forward", first, 2), ("backward", whole - first, 5)):
        yield _result(workload, False, "cudnn, softmax", name, time, products * done)


def _measure_torch(workload: Workload) -> Iterator[dict]:
    """Times HSTU's attention as public implementations have it: padded, with einsum, compiled by
    torch.
    """
    import torch  # pyrefly: ignore[missing-import]

    length = workload.length
    inputs = []
    for seed in range(_BATCHES):
        *operands, indptr, times, place, time = make(workload, seed)
        inside = np.arange(length) < np.diff(indptr)[:, None]
        padded = []
        for x in (*operands, times):
            whole = np.zeros((*inside.shape, *x.shape[1:]), np.float32)
            whole[inside] = x[: indptr[-1]]
            padded.append(torch.tensor(whole, device="cuda"))
        *operands, times = padded
        operands = [x.bfloat16().requires_grad_() for x in operands]
        biases = [
            torch.tensor(x, device="cuda", requires_grad=True) for x in (place, time)
        ]
        inputs.append((*operands, times, *biases))
    at = torch.arange(length, device="cuda")
    apart, before = (at[:, None] - at).clamp(min=0), (at[:, None] >= at).float()

    def attend(q, k, v, dy, times, place, time):
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k)
        since = (times[:, :, None] - times[:, None]).abs().clamp(min=1)
        bucket = (torch.log(since) / 0.301).long().clamp(0, 127)
        scores = scores + (place[apart][None] + time[bucket])[:, None]
        weights = torch.nn.functional.silu(scores) * before
        return torch.einsum("bhnm,bmhd->bnhd", weights.to(q.dtype), v)

    compiled = torch.compile(attend)

    def forward(*arguments):
        with torch.no_grad():
            compiled(*arguments)

    def both(*arguments):
        y = compiled(*arguments)
        torch.autograd.grad(y, [*arguments[:3], *arguments[5:]], arguments[3])

    done = operations(make(workload, 0)[4])
    first, whole = (time_torch(run, inputs).kernel for run in (forward, both))
    yield _result(workload, True, "torch", "forward", first, 2 * done)
    yield _result(workload, True, "torch", "backward", whole - first, 5 * done)


def _result(workload, biased, implementation, name, time, done, error=None) -> dict:
    return {
        "workload": workload.name,
        "biased": biased,
        "implementation": implementation,
        "pass": name,
        "us": round(time, 1),
        "tflops": round(float(done / time / 1e6), 1),
        "error": error,
    }


if __name__ == "__main__":
    parts = {part: {} for part in PARTS}
    command(__doc__, __file__, parts, _measure)
