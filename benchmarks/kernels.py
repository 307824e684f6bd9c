"""Times operations alone, ours and their peers'.

    python benchmarks/kernels.py run [--only 'top_k *'] [--commit NAME]    on a GPU
    python benchmarks/kernels.py table                                     anywhere

gather_matmul: sums of the matrix rows that a batch reads.
scatter_gradient: *gradient* is the summed rows of `x^T dy` that the batch touches, with the sort
of its entries; *step* is the gather-matmul, that gradient, and an Adagrad update in place.
output_loss: the loss of an output layer and its gradients in `h` and the kernel, with bfloat16
operands. The squared loss is made of Gram matrices, or "by scores".
linear_cross_entropy: the mean softmax cross-entropy of one target a row, with both gradients. The
peers are `cut-cross-entropy`, which leaves out gradients of scores whose probability is below a
threshold and is timed as it comes and with all of them, and `liger-kernel`.
top_k: the best 100 items, exact for float32 scores, with the seen items excluded.

A part is an operation and a library, and a process, since JAX and torch do not share a GPU's
memory well. Each result is checked in some rows, against float64 or, with very many classes,
against float32, before it is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from report import command, reported
from timing import (
    measure_jax,
    measure_torch,
    on_host,
    relative_error,
    time_jax,
    time_torch,
)
from workloads import BIG, ML20M, ML20M_256, OUTPUTS, WORKLOADS, Workload, make_rows

_STACK = 16  # number of steps whose entries are sorted together
_RATE, _EPS = 0.05, 1e-7
_K = 100
_ROWS_OF_OUTPUT, _CHECKED = 4, 16
_RULES = {
    "sigmoid": "sigmoid_binary_cross_entropy",
    "l2": "l2_loss",
    "softmax": "softmax_cross_entropy",
}
# Number of tokens, width and number of classes for `linear_cross_entropy`.
_CLASSES = (
    (8_192, 512, 256_000),
    (8_192, 64, 1_000_000),
    (16_384, 256, 1_000_000),
    (8_192, 2_304, 256_000),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Functions of several libraries that compute equal results from equal inputs.

    Attributes:
      names: values that are added to each result.
      inputs: tuples of arguments, of equal shapes.
      candidates: the functions by name.
      check: function that returns the error of a function's first results, or raises.
      more: microseconds that are added to the time of a candidate.
      measure: function that replaces `measure_jax` or `measure_torch`.
    """

    names: dict[str, Any]
    inputs: list[tuple]
    candidates: dict[str, Callable]
    check: Callable
    more: Mapping[str, float] = dataclasses.field(default_factory=dict)
    measure: Callable | None = None


def _measure(part: str) -> Iterator[dict]:
    name, library = part.split()
    trials, cases = _OPERATIONS[name]
    in_torch = library in ("torch", "libraries")
    for case in cases:
        for trial in trials[library](case):
            measure = trial.measure or (measure_torch if in_torch else measure_jax)
            for candidate, function in trial.candidates.items():
                ours = candidate in ("mosaic_gpu", "sparsejax")
                with reported(part, *map(str, trial.names.values()), candidate):
                    more = {"kernels": True} if ours and measure is measure_jax else {}
                    found = measure(function, trial.inputs, trial.check, **more)
                    more_time = trial.more.get(candidate, 0.0)
                    found["kernel"] = round(found["kernel"] + more_time, 1)
                    yield trial.names | {"implementation": candidate} | found


@functools.cache
def _batches(workload: Workload, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [make_rows(workload, seed) for seed in range(count)]


def _repeated(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
    """A matrix that repeats an odd count of numbers, so that equal rows are far apart."""
    block = scale * np.random.default_rng(1).standard_normal(2**24 - 37, np.float32)
    return np.resize(block, (rows, columns))


def _csr(batch: tuple[np.ndarray, np.ndarray], num_cols: int):
    import jax.numpy as jnp

    from sparsejax.sparse import CSR

    return CSR(None, *map(jnp.asarray, batch), num_cols=num_cols)


# gather_matmul


def _product(workload: Workload, dtype: str, w: np.ndarray) -> tuple[dict, Callable]:
    """The names of a trial's values, and a check of some result rows, with the longest among
    them.
    """
    ((indices, indptr), *_) = _batches(workload, 3)
    lengths = np.diff(indptr)
    some = np.random.default_rng(2).integers(0, len(lengths), 16)
    some = np.concatenate([np.argsort(-lengths)[:2], some, [len(lengths) - 1]])
    rows = (indices[indptr[row] : indptr[row + 1]] for row in some)
    expected = np.stack([w[row].sum(0, dtype=np.float64) for row in rows])
    single = dtype == "float32"
    moved = workload.bytes_moved(4 if single else 2)
    names = {"workload": workload.name, "dtype": dtype, "bytes": moved}
    return names, lambda y: relative_error(y[some], expected, 1e-5 if single else 1e-2)


def _gather_in_jax(workload: Workload) -> Iterator[Trial]:
    import jax.numpy as jnp

    from sparsejax.ops.gather_sum import gather_sum

    host = _repeated(workload.num_cols, workload.hidden)
    for dtype in ("float32", "bfloat16"):
        w = jnp.asarray(host, dtype)
        batches = _batches(workload, 3)
        inputs = [(_csr(batch, workload.num_cols), w) for batch in batches]
        implementations = ["mosaic_gpu", "xla"] + ["cusparse"] * (dtype == "float32")
        candidates: dict[str, Callable] = {
            name: functools.partial(gather_sum, implementation=name)  # pyrefly: ignore
            for name in implementations
        }
        names, check = _product(workload, dtype, host)
        yield Trial(names, inputs, candidates, check)


def _gather_in_torch(workload: Workload) -> Iterator[Trial]:
    import torch  # pyrefly: ignore[missing-import]

    def bag(indices, indptr, csr, w):
        return torch.nn.functional.embedding_bag(
            indices, w, indptr, mode="sum", include_last_offset=True
        )

    host = _repeated(workload.num_cols, workload.hidden)
    for dtype in ("float32", "bfloat16"):
        w, inputs = torch.from_numpy(host).cuda().to(getattr(torch, dtype)), []
        for batch in _batches(workload, 3):
            indices, indptr = (torch.from_numpy(a).cuda() for a in batch)
            ones = torch.ones(len(indices), device="cuda")
            shape = workload.num_rows, workload.num_cols
            csr = torch.sparse_csr_tensor(indptr, indices, ones, shape)
            inputs.append((indices, indptr, csr, w))
        candidates: dict[str, Callable] = {"torch embedding_bag": bag}
        if dtype == "float32":
            candidates["torch CSR @ dense"] = lambda _, __, csr, w: csr @ w
        names, check = _product(workload, dtype, host)
        yield Trial(names, inputs, candidates, check)


# scatter_gradient


def _touched(workload: Workload):
    """Gradients of outputs, the rows that the first batch touches, and their exact gradients."""
    rng = np.random.default_rng(1)
    dys = rng.standard_normal((4, workload.batch, workload.hidden), np.float32)
    ((indices, indptr), *_) = _batches(workload, 4)
    rows = np.repeat(np.arange(workload.batch), np.diff(indptr))
    touched, counts = np.unique(indices, return_counts=True)
    some = touched[[*np.argsort(-counts)[:2], 0, len(touched) // 2, -1]]
    dy = dys[0].astype(np.float64)
    expected = np.stack([dy[rows[indices == row]].sum(0) for row in some])

    def check(found) -> float:
        """Checks a gradient, which is either dense or consists of ids and values."""
        place, values = some, found
        if isinstance(found, tuple):
            place, values = np.searchsorted(on_host(found[0]), some), found[1]
        return relative_error(values[place], expected, 1e-5)

    return dys, some, expected, check


def _gradients_in_jax(workload: Workload) -> Iterator[Trial]:
    import jax
    import jax.numpy as jnp

    from sparsejax.ops import scatter_gradient
    from sparsejax.sparse import CSR

    num_rows = workload.features
    dys, some, expected, check = _touched(workload)
    batches = [_csr(batch, num_rows) for batch in _batches(workload, 4)]
    dys = jnp.asarray(dys)
    stacked = lambda *leaves: jnp.stack([leaves[i % 4] for i in range(_STACK)])
    stack = jax.tree.map(stacked, *batches)
    sort = jax.jit(CSR.with_transposed)

    def rows(name, x, dy):
        given = [x], [dy], num_rows
        return scatter_gradient.row_gradient(*given, implementation=name)

    def dense(x, dy):
        zeros = jnp.zeros((num_rows, workload.hidden))
        return zeros.at[x.indices].add(dy[x.row_ids()])

    names = {"workload": workload.name, "task": "gradient"}
    inputs = [(batch, dys[i]) for i, batch in enumerate(batches)]
    candidates: dict[str, Callable] = {
        f"{name}, sorted by step": functools.partial(rows, name)
        for name in ("mosaic_gpu", "cusparse", "xla")
    }
    candidates["XLA scatter-add, dense"] = dense
    yield Trial(names, inputs, candidates, check)
    # Our library can sort the entries of many steps together.
    before, name = sort(stack), "mosaic_gpu, sorted by dispatch"
    inputs = [(jax.tree.map(lambda x, i=i: x[i], before), dys[i]) for i in range(4)]
    candidates = {name: functools.partial(rows, "mosaic_gpu")}
    share = {name: time_jax(sort, [(stack,)]).kernel / _STACK}
    yield Trial(names, inputs, candidates, check, share)

    def ours(implementation, stack, i, carry):
        return _our_step(implementation, dys, num_rows, stack, i, carry)

    candidates = {
        "sparsejax": functools.partial(ours, None),
        "cusparse": functools.partial(ours, "cusparse"),
        "xla": functools.partial(ours, "xla"),
        "plain JAX, dense gradient": functools.partial(_plain_step, dys),
    }
    w = jax.random.normal(jax.random.key(0), (num_rows, workload.hidden))

    def check_step(moved) -> float:
        move = -_RATE * expected / np.sqrt(expected**2 + _EPS)
        # The difference of two nearly equal weights has few correct digits.
        return relative_error(moved[some], move, 1e-4)

    names = names | {"task": "step"}
    yield Trial(names, [(stack, w)], candidates, check_step, measure=_per_step)


def _our_step(implementation, dys, num_rows, stack, i, carry):
    import jax

    from sparsejax import optimizers
    from sparsejax.ops import gather_matmul, row_update, scatter_gradient

    w, state = carry
    x = jax.tree.map(lambda leaf: leaf[i % _STACK], stack)
    y = gather_matmul.gather_matmul(x, w, implementation=implementation)
    terms = scatter_gradient.row_terms([x], [dys[i % 4] + 0 * y], num_rows)
    after = row_update.step_terms(
        optimizers.adagrad(_RATE, 0.0, _EPS),
        row_update.TrainedKernel(w, {"sum_of_squares": state}, None),
        terms,
        row_update.Passed(i),
        implementation=implementation,
    )
    return after.w, after.state["sum_of_squares"]


def _plain_step(dys, stack, i, carry):
    import jax
    import jax.numpy as jnp

    w, state = carry
    x = jax.tree.map(lambda leaf: leaf[i % _STACK], stack)

    def loss(w):
        rows = w[x.indices]
        segments = jax.ops.segment_sum(rows, x.row_ids(), num_segments=x.num_rows)
        return jnp.sum(segments * dys[i % 4])

    gradient = jax.grad(loss)(w)
    state = state + gradient**2
    factor = jnp.where(state > 0, jax.lax.rsqrt(state + _EPS), 0)
    return w - _RATE * factor * gradient, state


def _per_step(step: Callable, inputs: list[tuple], check: Callable) -> dict:
    """Microseconds of a step inside a loop that is one program, as in training.

    This is the difference between two loops of different lengths, so that no launch time is
    included.
    """
    import jax
    import jax.numpy as jnp

    ((stack, w),) = inputs

    def sorted_as(stack):
        plain = getattr(step, "func", None) is _plain_step
        return stack if plain else stack.with_transposed()

    def first(stack, w):
        after, _ = step(sorted_as(stack), jnp.int32(0), (w, jnp.zeros_like(w)))
        return after - w

    def steps(count, stack, w, state):
        def block(_, carry):
            body = functools.partial(step, sorted_as(stack))
            return jax.lax.fori_loop(0, _STACK, body, carry)

        return jax.lax.fori_loop(0, count, block, (w, state))

    error = check(jax.jit(first)(stack, w))
    best, carry = [], (jnp.copy(w), jnp.zeros_like(w))
    for count in (1, 5):
        jitted = jax.jit(functools.partial(steps, count), donate_argnums=(1, 2))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            carry = jax.block_until_ready(jitted(stack, *carry))
            times.append(time.perf_counter() - start)
        best.append(min(times[1:]))
    microseconds = 1e6 * (best[1] - best[0]) / (4 * _STACK)
    return {"kernel": round(microseconds, 1), "error": error}


def _gradients_in_torch(workload: Workload) -> Iterator[Trial]:
    import torch  # pyrefly: ignore[missing-import]

    dys, _, _, check = _touched(workload)
    inputs = [
        tuple(torch.from_numpy(a).cuda() for a in (*batch, dy))
        for batch, dy in zip(_batches(workload, 4), dys, strict=True)
    ]
    w = torch.randn(workload.features, workload.hidden, device="cuda")
    w.requires_grad_()

    def bag(indices, indptr, dy, sparse=False):
        return torch.nn.functional.embedding_bag(
            indices, w, indptr, mode="sum", include_last_offset=True, sparse=sparse
        )

    def dense(indices, indptr, dy):
        return torch.autograd.grad(bag(indices, indptr, dy), w, dy)[0]

    def coalesced(indices, indptr, dy):
        rows = torch.autograd.grad(bag(indices, indptr, dy, True), w, dy)[0].coalesce()
        return rows.indices()[0], rows.values()

    names = {"workload": workload.name, "task": "gradient"}
    candidates = {
        "torch embedding_bag, sparse + coalesce": coalesced,
        "torch embedding_bag, dense": dense,
    }
    # The backward time is the time of forward and backward together, minus that of the forward.
    alone = dict.fromkeys(candidates, -time_torch(bag, inputs).kernel)
    yield Trial(names, inputs, candidates, check, alone)

    def stepping(sparse, **options):
        optimizer = torch.optim.Adagrad([w], lr=_RATE, eps=_EPS, **options)

        def step(indices, indptr, dy):
            optimizer.zero_grad(set_to_none=True)
            bag(indices, indptr, dy, sparse).backward(dy)
            optimizer.step()

        return step

    candidates = {
        "torch Adagrad, sparse": stepping(True),
        "torch Adagrad, dense, foreach": stepping(False, foreach=True),
    }
    yield Trial(names | {"task": "step"}, inputs, candidates, lambda _: None)


# output_loss and top_k


@functools.cache
def _operands(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Draws h `[2, batch, hidden]` and a kernel, scaled so that scores are about 1."""
    size, rows = workload.hidden**-0.25, -(-workload.features // 256) * 256
    shape = 2, workload.batch, workload.hidden
    h = size * np.random.default_rng(2).standard_normal(shape, np.float32)
    return h, _repeated(rows, workload.hidden, size)


def _outputs_in_jax(workload: Workload) -> list[tuple]:
    """The inputs of each batch: h and kernel in bfloat16, and the labels as a CSR."""
    import jax.numpy as jnp

    h, kernel = (jnp.asarray(x, jnp.bfloat16) for x in _operands(workload))
    batches = (_csr(batch, workload.features) for batch in _batches(workload, 2))
    return [(h[i], kernel, batch) for i, batch in enumerate(batches)]


def _outputs_in_torch(workload: Workload, *, trained: bool) -> list[tuple]:
    """The inputs of each batch: h, kernel, and the rows and columns of the labels."""
    import torch  # pyrefly: ignore[missing-import]

    def put(array):
        placed = torch.from_numpy(array).cuda().bfloat16()
        return placed.requires_grad_(trained)

    h, kernel = _operands(workload)
    shared, inputs = put(kernel[: workload.features]), []
    for i, (indices, indptr) in enumerate(_batches(workload, 2)):
        rows = np.repeat(np.arange(workload.batch), np.diff(indptr))
        place = [torch.from_numpy(x.astype(np.int64)).cuda() for x in (rows, indices)]
        inputs.append((put(h[i]), shared, *place))
    return inputs


@functools.cache
def _exact(workload: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scores of the first rows in float64, a mask of their labels, and the kernel.

    Operands are rounded to bfloat16 first.
    """
    from ml_dtypes import bfloat16

    h, kernel = _operands(workload)
    h = h[0, :_ROWS_OF_OUTPUT].astype(bfloat16).astype(np.float64)
    kernel = kernel[: workload.features].astype(bfloat16).astype(np.float32)
    parts = np.array_split(kernel, 1 + len(kernel) // 2**17)
    scores = np.concatenate([h @ part.T.astype(np.float64) for part in parts], axis=1)
    ((indices, indptr), *_) = _batches(workload, 2)
    listed = np.zeros(scores.shape, bool)
    for row, columns in enumerate(listed):
        columns[indices[indptr[row] : indptr[row + 1]]] = True
    return scores, listed, kernel


def _loss_trial(workload: Workload, loss: str, inputs: list, candidates: dict) -> Trial:
    """Makes a trial that checks some rows of the gradient of `h` in the first batch."""
    scores, listed, kernel = _exact(workload)
    labels = listed.astype(np.float64)
    if loss == "softmax":
        odds = np.exp(scores - scores.max(1, keepdims=True))
        slopes = labels.sum(1, keepdims=True) * odds / odds.sum(1, keepdims=True)
    else:
        slopes = 1 / (1 + np.exp(-scores)) if loss == "sigmoid" else scores
    want = ((slopes - labels).astype(np.float32) @ kernel).astype(np.float64)
    names = {"workload": workload.name, "loss": loss}
    check = lambda found: relative_error(found[1][0][:_ROWS_OF_OUTPUT], want, 2e-2)
    return Trial(names, inputs, candidates, check)


def _loss_in_jax(workload: Workload) -> Iterator[Trial]:
    import jax
    import jax.numpy as jnp
    import optax

    from sparsejax import losses
    from sparsejax.ops.output_loss import output_loss_in_chunks

    def ours(rule, implementation, form=None):
        def loss(h, kernel, labels):
            options: dict[str, Any] = {"implementation": implementation, "form": form}
            options["loss"] = losses.get(rule)
            return output_loss_in_chunks(h, kernel, None, labels, **options)

        return jax.value_and_grad(loss, (0, 1))

    def dense(loss):
        """Autodiff of a loss of dense labels, as one writes it without a library."""

        def function(h, kernel, labels):
            scores = (h @ kernel[: labels.num_cols].T).astype(jnp.float32)
            place = labels.row_ids(), labels.indices
            dense = jnp.zeros(scores.shape, jnp.float32).at[place].set(1, mode="drop")
            return getattr(optax, _RULES[loss])(scores, dense).sum()

        return jax.value_and_grad(function, (0, 1))

    inputs = _outputs_in_jax(workload)
    for loss, rule in _RULES.items():
        candidates = {name: ours(rule, name) for name in ("mosaic_gpu", "xla")}
        if loss == "l2":
            candidates["mosaic_gpu, by scores"] = ours(rule, "mosaic_gpu", "chunks")
        else:
            candidates["autodiff, dense labels"] = dense(loss)
        yield _loss_trial(workload, loss, inputs, candidates)


def _loss_in_torch(workload: Workload) -> Iterator[Trial]:
    import torch  # pyrefly: ignore[missing-import]

    functional = torch.nn.functional

    def loss_of(h, kernel, rows, columns, name):
        scores = (h @ kernel.T).float()
        dense = torch.zeros_like(scores)
        dense[rows, columns] = 1.0
        if name == "softmax":
            return -(dense * functional.log_softmax(scores, 1)).sum()
        return functional.binary_cross_entropy_with_logits(
            scores, dense, reduction="sum"
        )

    inputs = _outputs_in_torch(workload, trained=True)
    for name in ("sigmoid", "softmax"):
        loss = functools.partial(loss_of, name=name)
        losses = {"torch": loss, "torch.compile": torch.compile(loss, dynamic=False)}
        candidates = {key: _with_gradients(made) for key, made in losses.items()}
        trial = _loss_trial(workload, name, inputs, candidates)
        kept = inputs[0][1].nbytes  # bytes of the result: the gradient of the kernel
        measure = functools.partial(measure_torch, kept=kept)
        yield dataclasses.replace(trial, measure=measure)


def _with_gradients(loss: Callable) -> Callable:
    """Makes a function that returns a torch loss and its gradients with respect to two
    arguments.
    """
    import torch  # pyrefly: ignore[missing-import]

    def step(h, kernel, *others):
        found = loss(h, kernel, *others)
        return found, torch.autograd.grad(found, (h, kernel))

    return step


def _best_trial(workload: Workload, inputs: list, candidates: dict) -> Trial:
    scores, seen, _ = _exact(workload)
    allowed = np.where(seen, -np.inf, scores)
    best = np.sort(allowed)[:, ::-1][:, :_K]

    def check(found) -> None:
        """Raises ValueError if the ids of a row are not its best items, up to ties by rounding."""
        ids, got = (on_host(x[:_ROWS_OF_OUTPUT]) for x in found)
        chosen = np.take_along_axis(allowed, ids.astype(int), axis=1)
        if any(len(set(row.tolist())) != _K for row in ids):
            raise ValueError("an item comes twice")
        if (off := max(np.abs(x - best).max() for x in (chosen, got))) > 1e-4:
            raise ValueError(f"{off} off")

    return Trial({"workload": workload.name}, inputs, candidates, check)


def _best_in_jax(workload: Workload) -> Iterator[Trial]:
    import jax
    import jax.numpy as jnp

    import sparsejax as sj

    def top_k(h, kernel, exclude, implementation=None):
        return sj.top_k(h, kernel, _K, exclude=exclude, implementation=implementation)

    def plain(h, kernel, exclude):
        kernel = kernel[: exclude.num_cols]
        scores = jnp.dot(h, kernel.T, preferred_element_type=jnp.float32)
        place = exclude.row_ids(), exclude.indices
        scores = scores.at[place].set(-jnp.inf, mode="drop")
        return jax.lax.top_k(scores, _K)[::-1]

    candidates = {
        "sparsejax": top_k,
        "xla": functools.partial(top_k, implementation="xla"),
        "jax.lax.top_k": plain,
    }
    yield _best_trial(workload, _outputs_in_jax(workload), candidates)


def _best_in_torch(workload: Workload) -> Iterator[Trial]:
    import torch  # pyrefly: ignore[missing-import]

    def best(h, kernel, rows, columns):
        scores = torch.mm(h, kernel.T, out_dtype=torch.float32)
        scores[rows, columns] = -torch.inf
        return torch.topk(scores, _K)[::-1]

    inputs = _outputs_in_torch(workload, trained=False)
    yield _best_trial(workload, inputs, {"torch.topk": best})


# linear_cross_entropy


def _classes_trial(shape: tuple, inputs: tuple, candidates: dict, xp: Any) -> Trial:
    """Makes a trial that checks some rows of both gradients against float32.

    Args:
      shape: number of tokens, width and number of classes.
      inputs: h, kernel and targets.
      candidates: functions of these inputs.
      xp: `jax.numpy` or `torch`, whose products must be set to full precision.
    """
    h, kernel, targets = inputs
    dtype = str(h.dtype).removeprefix("torch.")
    if xp.__name__ == "torch":
        h, kernel = h.detach().float(), kernel.detach().float()
        sums: Callable = functools.partial(xp.logsumexp, dim=1)
    else:
        from jax.nn import logsumexp

        h, kernel = h.astype("float32"), kernel[: shape[2]].astype("float32")
        sums = functools.partial(logsumexp, axis=1)
    parts = [sums(h[i : i + 128] @ kernel.T) for i in range(0, len(h), 128)]
    lse, chosen = xp.concatenate(parts), targets[:_CHECKED]
    slopes = xp.exp(h[:_CHECKED] @ kernel.T - lse[:_CHECKED, None])
    dh = (slopes @ kernel - kernel[chosen]) / len(h)
    slopes = xp.exp(h @ kernel[chosen].T - lse[:, None])
    slopes = slopes - 1.0 * (targets[:, None] == chosen[None])
    exact = on_host(dh), on_host(slopes.T @ h / len(h))

    def check(found) -> list[float]:
        some = found[1][0][:_CHECKED], found[1][1][chosen]
        pairs = zip(some, exact, strict=True)
        return [round(relative_error(a, b, 0.5), 5) for a, b in pairs]

    names = {"shape": " x ".join(f"{n:,}" for n in shape), "dtype": dtype}
    return Trial(names, [inputs], candidates, check)


def _dtypes(shape: tuple) -> tuple[str, ...]:
    return ("bfloat16", "float32") if shape == _CLASSES[1] else ("bfloat16",)


def _classes_in_jax(shape: tuple, *, plain: bool = False) -> Iterator[Trial]:
    import jax
    import jax.numpy as jnp
    import optax

    from sparsejax.ops.linear_cross_entropy import linear_cross_entropy

    tokens, hidden, items = shape

    def dense(h, kernel, targets):
        scores = (h @ kernel[:items].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    def half(h, kernel, targets):
        ignored = jnp.arange(tokens) % 2 == 1
        targets = jnp.where(ignored, -1, targets)
        return linear_cross_entropy(h, kernel, targets, num_items=items)

    for dtype in ("bfloat16",) if plain else _dtypes(shape):
        keys = jax.random.split(jax.random.key(0), 3)
        h = jax.random.normal(keys[0], (tokens, hidden), dtype)
        rows = -(-items // 256) * 256  # number of kernel rows, padded as in a layer
        kernel = jax.random.normal(keys[1], (rows, hidden), dtype) * hidden**-0.5
        inputs = h, kernel, jax.random.randint(keys[2], (tokens,), 0, items)
        ours = functools.partial(linear_cross_entropy, num_items=items)
        losses: dict[str, Callable] = {"XLA": dense} if plain else {"sparsejax": ours}
        if dtype == "float32":
            tf32 = functools.partial(ours, implementation="xla")
            losses["linear_cross_entropy, XLA (TF32)"] = tf32
        graded = {n: jax.value_and_grad(f, (0, 1)) for n, f in losses.items()}
        with jax.default_matmul_precision("highest"):
            trial = _classes_trial(shape, inputs, graded, jnp)
        yield trial
        if not plain:  # the gradients of other variants differ, so they are not checked
            graded = {"half of the targets ignored": jax.value_and_grad(half, (0, 1))}
            yield Trial(trial.names, [inputs], graded, lambda _: None)


def _classes_in_torch(shape: tuple, *, plain: bool = False) -> Iterator[Trial]:
    import torch  # pyrefly: ignore[missing-import]

    tokens, hidden, items = shape

    def dense(h, kernel, targets):
        return torch.nn.functional.cross_entropy((h @ kernel.T).float(), targets)

    for dtype in ("bfloat16",) if plain else _dtypes(shape):
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.manual_seed(0)
        sizes = {"device": "cuda", "dtype": getattr(torch, dtype)}
        kernel = torch.randn(items, hidden, **sizes).mul_(hidden**-0.5)
        h = torch.randn(tokens, hidden, **sizes).requires_grad_()
        targets = torch.randint(0, items, (tokens,), device="cuda")
        inputs = h, kernel.requires_grad_(), targets
        losses: dict[str, Callable] = {}
        if plain:
            losses["torch.compile"] = torch.compile(dense, dynamic=False)
        for library in () if plain else (_cut_cross_entropy, _liger):
            with reported(library.__name__):
                losses |= library(shape)
        graded = {name: _with_gradients(loss) for name, loss in losses.items()}
        trial = _classes_trial(shape, inputs, graded, torch)
        torch.backends.cuda.matmul.allow_tf32 = True
        measure = functools.partial(measure_torch, kept=h.nbytes + kernel.nbytes)
        yield dataclasses.replace(trial, measure=measure)
        torch.cuda.empty_cache()


def _cut_cross_entropy(shape: tuple) -> dict[str, Callable]:
    from cut_cross_entropy import (  # pyrefly: ignore[missing-import]
        linear_cross_entropy,
    )

    exact = functools.partial(linear_cross_entropy, filter_eps=None)
    return {
        "cut-cross-entropy, exact": exact,
        "cut-cross-entropy, as it comes": linear_cross_entropy,
    }


def _liger(shape: tuple) -> dict[str, Callable]:
    from liger_kernel.ops import (  # pyrefly: ignore[missing-import]
        LigerFusedLinearCrossEntropyFunction as Function,
    )

    # By default liger-kernel takes (tokens * hidden / items) tokens at a time: one token if there
    # are many items. Larger chunks are faster: here they have 2^30 scores.
    tokens, hidden, items = shape
    size = min(tokens, 2 ** (2**30 // items).bit_length() // 2)
    factor = max(1, -(-items * size // (tokens * hidden)))
    defaults = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False)
    options = (*defaults, False, None, None, factor)
    return {"liger-kernel": lambda *given: Function.apply(*given, *options)[0]}


# For each operation, its measuring functions by library, and its cases.
_OPERATIONS: dict[str, tuple[dict[str, Callable], tuple]] = {
    "gather_matmul": ({"jax": _gather_in_jax, "torch": _gather_in_torch}, WORKLOADS),
    "scatter_gradient": (
        {"jax": _gradients_in_jax, "torch": _gradients_in_torch},
        (ML20M, ML20M_256, BIG),
    ),
    "output_loss": ({"jax": _loss_in_jax, "torch": _loss_in_torch}, OUTPUTS),
    "top_k": ({"jax": _best_in_jax, "torch": _best_in_torch}, OUTPUTS[1:]),
    "linear_cross_entropy": (
        {
            "ours": _classes_in_jax,
            "jax": functools.partial(_classes_in_jax, plain=True),
            "libraries": _classes_in_torch,
            "torch": functools.partial(_classes_in_torch, plain=True),
        },
        _CLASSES,
    ),
}


if __name__ == "__main__":
    # Without this flag, the profiler does not record kernels of a conditional in a command buffer.
    flags = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    parts = {
        f"{name} {library}": flags if name == "linear_cross_entropy" else {}
        for name, (trials, _) in _OPERATIONS.items()
        for library in trials
    }
    command(__doc__, __file__, parts, _measure, by_operation=True)
