"""DSSTNE's own benchmark: an epoch of an autoencoder of the shape of MovieLens-20M.

    python benchmarks/epoch.py run [--commit NAME]    on a GPU
    python benchmarks/epoch.py table                  anywhere

The network has 27,278 items in and out, three hidden layers of 1,024 sigmoid units,
dropout .5 and sigmoid cross-entropy. It is trained by RMSProp with batches of 256. The
data is generated: 138,493 users with 20 million entries, zipf items, lognormal lengths.
Weights and state are float32. Products take bfloat16 operands at the output, and TF32
between.

The peers train an equal network. Plain JAX: XLA's operations, dense gradients, data on the
device, one program for many steps. Torch: embedding_bag for the inputs, batches on the device
that are cut before, the compiled step in a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import scipy.sparse
from report import command
from workloads import autoencoder

_ITEMS, _USERS, _ENTRIES, _SKEW = 27_278, 138_493, 20_000_000, 0.8
_HIDDEN, BATCH, _DROPOUT = 1_024, 256, 0.5
_RATE, _DECAY, _EPS = 1e-3, 0.9, 1e-8
STEPS = -(-_USERS // BATCH)
# XLA makes a single CUDA graph of the loop over steps, which includes the steps.
_GRAPH = "--xla_gpu_enable_command_buffer=+WHILE"


def _measure(part: str) -> Iterator[dict]:
    measure = {"sparsejax": _sparsejax, "jax": _plain_jax, "torch": _torch}
    name, *graph = part.split(", ")
    for result in measure[name](make_rows(np.random.default_rng(0))):
        yield result | {"flags": _GRAPH if graph else None}


def make_rows(
    rng: np.random.Generator,
    users: int = _USERS,
    items: int = _ITEMS,
    entries: int = _ENTRIES,
) -> scipy.sparse.csr_array:
    """Draws about 20 million entries; a row has each item at most once."""
    weights = np.arange(1, items + 1) ** -_SKEW
    weights = rng.permutation(weights / weights.sum())
    wish = rng.lognormal(0, 1, users)
    lengths = np.clip(wish / wish.sum() * entries * 1.06, 1, items / 8).astype(int)
    # Items are drawn with replacement, then duplicates are removed.
    drawn = np.searchsorted(np.cumsum(weights), rng.random(lengths.sum()))
    drawn = np.minimum(drawn, items - 1)
    pairs = np.unique(np.repeat(np.arange(users), lengths) * items + drawn)
    ends = np.searchsorted(pairs, np.arange(users + 1) * items).astype(np.int32)
    columns = (pairs % items).astype(np.int32)
    return scipy.sparse.csr_array(
        (np.ones(len(pairs), bool), columns, ends), shape=(users, items)
    )


def _result(name: str, seconds: float, loss: float, **others) -> dict:
    return {
        "implementation": name,
        "epoch_seconds": seconds,
        "step_microseconds": 1e6 * seconds / STEPS,
        "loss": loss,
        **others,
    }


# sparsejax


def new_modules(items: int = _ITEMS, hidden: tuple[int, ...] = (_HIDDEN,) * 3):
    """Makes our model of the network, and its optimizer."""
    from flax import nnx

    import sparsejax as sj

    config = autoencoder(hidden, _DROPOUT)
    model = sj.FeedForward(config, inputs=items, outputs=items, rngs=nnx.Rngs(0))
    rule = sj.optimizers.rmsprop(_RATE, _DECAY, _EPS)
    return model, sj.Optimizer(model, rule)


def _sparsejax(data: scipy.sparse.csr_array) -> Iterator[dict]:
    import jax

    for fused in (True, False):
        model, optimizer = new_modules()
        seconds, loss = _timed(model, optimizer, data, BATCH, fused=fused)
        yield _result(
            "sparsejax, fused update" if fused else "sparsejax",
            seconds,
            loss,
            peak_bytes=jax.devices()[0].memory_stats()["peak_bytes_in_use"],
        )


def _timed(model, optimizer, data, batch: int, *, fused: bool) -> tuple[float, float]:
    """Seconds of the fastest of four epochs, and the loss of the last one."""
    import sparsejax as sj

    times: list[float] = []
    history = sj.fit(
        model,
        optimizer,
        data,
        batch_size=batch,
        num_epochs=5,
        fused=fused,
        log=lambda step, entry: times.append(time.perf_counter()),
    )
    # The first epoch is omitted, because it compiles programs.
    return float(min(np.diff(times))), history[-1]["loss"]


# Plain JAX


def _plain_jax(data: scipy.sparse.csr_array) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    key = jax.random.key(0)
    sizes = [(_ITEMS, _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN)]
    sizes.append((_ITEMS, _HIDDEN))
    init = jax.nn.initializers.glorot_uniform()
    params = {
        "w": [init(k, s) for k, s in zip(jax.random.split(key, 4), sizes, strict=True)],
        "b": [jnp.zeros(n) for n in (_HIDDEN, _HIDDEN, _HIDDEN, _ITEMS)],
    }
    indptr, indices = jnp.asarray(data.indptr), jnp.asarray(data.indices)
    lengths = np.diff(data.indptr)
    rng = np.random.default_rng(0)
    order = np.resize(rng.permutation(_USERS), (STEPS, BATCH))
    nse = int(lengths[order].sum(1).max())
    optimizer = optax.rmsprop(_RATE, _DECAY, _EPS, eps_in_sqrt=True)

    def loss_fn(params, ids, rows, key):
        valid = rows < BATCH
        terms = jnp.where(valid[:, None], params["w"][0][ids], 0)
        h = jax.ops.segment_sum(terms, rows, BATCH, indices_are_sorted=True)
        for i in range(3):
            h = jax.nn.sigmoid((h if i == 0 else h @ params["w"][i]) + params["b"][i])
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), _DROPOUT, h.shape)
            h = jnp.where(keep, h / (1 - _DROPOUT), 0)
        logits = lax.dot_general(
            h.astype(jnp.bfloat16),
            params["w"][3].astype(jnp.bfloat16),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        logits = logits + params["b"][3]
        labels = jnp.zeros((BATCH, _ITEMS), jnp.bfloat16)
        labels = labels.at[rows, ids].set(1, mode="drop")
        return jnp.sum(jax.nn.softplus(logits) - labels * logits) / BATCH

    def step(carry, given):
        params, state = carry
        chosen, key = given
        ends = jnp.cumsum(indptr[chosen + 1] - indptr[chosen])
        place = jnp.arange(nse)
        rows = jnp.searchsorted(ends, place, side="right")
        row = jnp.minimum(rows, BATCH - 1)
        first = ends[row] - (indptr[chosen[row] + 1] - indptr[chosen[row]])
        ids = indices[
            jnp.clip(indptr[chosen[row]] + place - first, 0, indices.size - 1)
        ]
        loss, grads = jax.value_and_grad(loss_fn)(params, ids, rows, key)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def epoch(params, state, order, key):
        keys = jax.random.split(key, STEPS)
        (params, state), losses = lax.scan(step, (params, state), (order, keys))
        return params, state, jnp.mean(losses)

    state, order = optimizer.init(params), jnp.asarray(order, jnp.int32)
    times, loss = [], jnp.zeros(())
    for i in range(4):
        start = time.perf_counter()
        params, state, loss = epoch(params, state, order, jax.random.key(i))
        loss.block_until_ready()
        times.append(time.perf_counter() - start)
    yield _result("plain JAX", min(times[1:]), float(loss))


# torch


def _torch(data: scipy.sparse.csr_array) -> Iterator[dict]:
    import torch  # pyrefly: ignore[missing-import]

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    sizes = [(_ITEMS, _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN)]
    sizes.append((_ITEMS, _HIDDEN))
    w = [torch.nn.init.xavier_uniform_(torch.empty(s, device="cuda")) for s in sizes]
    b = [torch.zeros(n, device="cuda") for n in (_HIDDEN, _HIDDEN, _HIDDEN, _ITEMS)]
    for tensor in (*w, *b):
        tensor.requires_grad_()
    optimizer = torch.optim.RMSprop(
        [*w, *b], lr=_RATE, alpha=_DECAY, eps=_EPS, foreach=True, capturable=True
    )

    def rest(first, labels):
        h = first + b[0]
        for i in range(3):
            h = torch.sigmoid(h if i == 0 else h @ w[i] + b[i])
            h = torch.nn.functional.dropout(h, _DROPOUT)
        with torch.autocast("cuda", torch.bfloat16):
            logits = h @ w[3].T + b[3].to(torch.bfloat16)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits.float(), labels, reduction="sum"
        )
        return loss / BATCH

    order = np.resize(np.random.default_rng(0).permutation(_USERS), (STEPS, BATCH))
    lengths = np.diff(data.indptr)
    nse = int(lengths[order].sum(1).max())
    ids = np.zeros((STEPS, nse), np.int32)
    ends = np.zeros((STEPS, BATCH + 1), np.int32)
    for i, chosen in enumerate(order):
        part = scipy.sparse.csr_array(data[chosen])
        ids[i, : part.nnz], ends[i] = part.indices, part.indptr
    ids, ends = torch.from_numpy(ids).cuda(), torch.from_numpy(ends).cuda()
    given = ids[0].clone(), ends[0].clone()
    place = torch.arange(nse, device="cuda")

    def forward(ids, ends):
        # Padding would belong to the last bag, so its weight is 0.
        used = place < ends[-1]
        first = torch.nn.functional.embedding_bag(
            ids, w[0], ends[:-1], mode="sum", per_sample_weights=used.float()
        )
        rows = torch.searchsorted(ends, place, right=True, out_int32=True) - 1
        rows = torch.where(used, rows, BATCH).long()
        labels = torch.zeros(BATCH + 1, _ITEMS, device="cuda")
        labels[rows, ids.long()] = 1.0
        return rest(first, labels[:-1])

    compiled = torch.compile(forward)
    move = torch.compile(lambda: optimizer.step())

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(*given)
        loss.backward()
        move()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for i in range(STEPS):
            given[0].copy_(ids[i])
            given[1].copy_(ends[i])
            graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    yield _result("torch, compiled, CUDA graph", min(times), float(loss.detach()))


if __name__ == "__main__":
    flags = {"XLA_FLAGS": _GRAPH}
    parts = {"sparsejax": {}, "jax": {}, "torch": {}}
    parts |= {"sparsejax, graph": flags, "jax, graph": flags}
    command(__doc__, __file__, parts, _measure)
