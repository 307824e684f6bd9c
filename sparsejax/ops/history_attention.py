"""Causal attention within histories of any length. Histories are concatenated."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import history_attention as mosaic
from sparsejax.mesh.layout import vary_alike, vary_over, varying_axes
from sparsejax.ops.implementations import (
    HOPPER,
    Implementation,
    check_implementation,
    custom_call_can_run,
)
from sparsejax.ops.item_chunks import accumulator
from sparsejax.ops.precision import Precision, check_precision, of_xla
from sparsejax.sparse import segment_ids

Activation = Literal["silu", "softmax"]

# Logarithm of the ratio between neighbouring time buckets, as HSTU's authors chose it.
TIME_RATIO = 0.301
_NONE = 2**30  # larger than the index of any token
# The most entries of a block, and the most scores computed at a time, on a GPU. On a CPU blocks
# are small, as most histories are short, and as many are computed at a time as its caches hold.
_GPU_BLOCK, _GPU_SCORES = 128, 2**26
_CPU_BLOCK, _CPU_SCORES = 64, 2**17


def history_attention(
    q: Float[Array, "tokens heads dim"],
    k: Float[Array, "tokens heads dim"],
    v: Float[Array, "tokens heads dim"],
    indptr: jax.Array | np.ndarray,
    *,
    activation: Activation = "silu",
    scale: float | None = None,
    divisor: float = 1.0,
    place_bias: Float[Array, "places"] | None = None,
    times: jax.Array | np.ndarray | None = None,
    time_bias: Float[Array, "buckets"] | None = None,
    implementation: Implementation = None,
    precision: Precision = None,
) -> Float[Array, "tokens heads dim"]:
    """Each entry of a history attends to itself and to the entries before it.

    >>> q = k = v = jnp.ones((5, 1, 2))
    >>> y = history_attention(q, k, v, jnp.array([0, 3, 3, 4]), divisor=4)
    >>> [round(float(x), 3) for x in y[:, 0, 0]]  # silu(2) / 4 of 1, 2, 3, and 1 entries
    [0.44, 0.881, 1.321, 0.44, 0.0]

    History r has the entries `indptr[r]` to `indptr[r + 1] - 1`, oldest first. For its
    entries s <= t and each head::

        a_ts = scale q_t . k_s + place_bias[t - s] + time_bias[bucket(t, s)]
        y_t  = sum_s silu(a_ts) v_s / divisor        "silu", as in HSTU
        y_t  = sum_s softmax_s(a_ts) v_s / divisor   "softmax"

        bucket(t, s) = log(times_t - times_s) / 0.301, rounded down

    The last number of each bias also applies to all larger distances. Times that differ
    by less than 1 are in the first bucket. Products of `q` and `k` and all sums are
    float32 (float64 for float64); the factors of `v` are rounded to its dtype.

    Nothing of the size of a history squared is stored, neither here nor in the derivative:
    memory grows with the number of tokens. It is differentiable in reverse mode in `q`,
    `k`, `v` and both biases, once. The gradient of `place_bias` is a sum over diagonals. The
    gradient of `time_bias` is made of differences of prefix sums, as the buckets of an entry
    follow each other. No two devices or threads add to the same number, so two runs give
    equal bits.

    Entries from `indptr[-1]` on are padding: their results are 0, and their values
    change no other result. A number in a history that is not finite spoils the later results
    of this history, and may spoil those of its neighbours. On a mesh call the function in a
    `jax.shard_map`, in which each device has histories of its own and their `indptr`.

    Args:
      q: queries.
      k: keys.
      v: values.
      indptr: `[histories + 1]` integers, ascending from 0. If the last is more than
        `tokens`, that is an error in a NumPy array, and otherwise the results of a
        history that does not fit are NaN.
      activation: "silu" or "softmax".
      scale: factor of the products `q . k`; by default 1 for "silu" and `dim^-1/2` for
        "softmax".
      divisor: number by which the results are divided. `HSTU` passes its `max_length`.
      place_bias: a number for each distance t - s, shared by all heads.
      times: `[tokens]`, ascending within a history. In a NumPy array times that go back, or
        that are not finite, are an error; elsewhere the results of that history are NaN.
      time_bias: a number for each bucket of time differences, shared by all heads.
      implementation: "mosaic_gpu" are GPU programs for Hopper: bfloat16 and heads of 64
        numbers; "xla" is made of XLA's operations, on a CPU some blocks of 64 entries at
        a time; "xla_gpu" is the form for GPUs, which takes many blocks at once. None chooses
        the fastest one here.
      precision: precision of the products of float32 operands, as in `output_loss`.

    Raises:
      ValueError: shapes do not match, an unknown activation or implementation, only one of
        `times` and `time_bias`, or wrong numbers in a NumPy array (see the arguments).
      TypeError: the dtypes differ or are not real floating, or `indptr` does not have
        integers.
      NotImplementedError: an implementation that this operation does not have.
    """
    check_implementation(implementation)
    if implementation == "cusparse":
        raise NotImplementedError(
            "history_attention has no form 'cusparse'; take None, \"mosaic_gpu\", "
            '"xla" or "xla_gpu"'
        )
    precision = check_precision(precision)
    _check(q, k, v, indptr, activation, divisor, place_bias, times, time_bias)
    if scale is None:
        scale = 1.0 if activation == "silu" else q.shape[2] ** -0.5
    if 0 in q.shape:
        return jnp.zeros_like(v)
    sums = accumulator(q.dtype)
    times = None if times is None else jnp.asarray(times, sums)
    spans = _spans(jnp.asarray(indptr), times, len(q))
    place_bias, time_bias = (
        None if bias is None else bias.astype(sums) for bias in (place_bias, time_bias)
    )
    rule = Rule(activation, float(scale), float(divisor))
    if implementation is None and custom_call_can_run(HOPPER):
        implementation = None if _unsupported(q) else "mosaic_gpu"
    if implementation == "mosaic_gpu" and (why := _unsupported(q)):
        raise NotImplementedError(f"the GPU program {why}")
    q, k, v, spans, times, biases = vary_alike(
        q, k, v, spans, times, Biases(place_bias, time_bias)
    )
    return _attention(q, k, v, biases, spans, times, rule, implementation, precision)


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule that turns scores into weights, see `history_attention`."""

    activation: Activation
    scale: float
    divisor: float


@dataclasses.dataclass(frozen=True)
class _Form:
    """How XLA's operations divide the work into blocks.

    Attributes:
      block: number of entries in a block.
      chunk: number of blocks that are computed together.
      scatter: whether the gradient of each pair is added to its bucket by a scatter. This is
        fast with one thread; on a GPU it is slow, and the order of additions is not fixed.
    """

    block: int
    chunk: int
    scatter: bool

    @classmethod
    def of_cpu(cls, heads: int) -> _Form:
        chunk = max(1, _CPU_SCORES // (heads * _CPU_BLOCK**2))
        return cls(_CPU_BLOCK, chunk, scatter=True)

    @classmethod
    def of_gpu(cls, heads: int) -> _Form:
        chunk = max(1, _GPU_SCORES // (heads * _GPU_BLOCK**2))
        return cls(_GPU_BLOCK, chunk, scatter=False)


class Biases(NamedTuple):
    """The biases that are added to the scores."""

    place: Float[Array, "places"] | None
    time: Float[Array, "buckets"] | None


def time_thresholds(buckets: int) -> np.ndarray:
    """`[buckets]` float32: the smallest difference of times in each bucket.

    They are rounded up, so that a float32 difference reaches one if and only if it reaches
    the exact number: all implementations agree on all buckets.
    """
    exact = np.exp(TIME_RATIO * np.arange(buckets, dtype=np.float64))
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    rounded = np.where(
        rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded
    )
    rounded[:1] = -np.inf
    return rounded.astype(np.float32)


def scores_at_once(
    tokens: int, heads: int, dim: int, dtype: jax.typing.DTypeLike
) -> int:
    """The number of scores that exist at once on a GPU.

    The GPU programs write no scores: where they compute the attention, the number is 0.
    """
    if custom_call_can_run(HOPPER, divided=True):
        q = jax.ShapeDtypeStruct((mosaic.TILE, heads, dim), dtype)
        if mosaic.unsupported(q) is None:
            return 0
    form = _Form.of_gpu(heads)
    return heads * min(-(-tokens // form.block), form.chunk) * form.block**2


def _check(q, k, v, indptr, activation, divisor, place_bias, times, time_bias) -> None:
    """Raises the errors that `history_attention` documents."""
    if activation not in get_args(Activation):
        raise ValueError(f'activation is "silu" or "softmax", got {activation!r}')
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"divisor is a number above 0, got {divisor}")
    if q.ndim != 3 or not q.shape == k.shape == v.shape:
        raise ValueError(
            "expected q, k and v [tokens, heads, dim] of one shape, got "
            f"{q.shape}, {k.shape} and {v.shape}"
        )
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast them to one "
            "floating dtype, as bfloat16"
        )
    if indptr.ndim != 1 or not len(indptr):
        raise ValueError(
            f"indptr has shape {indptr.shape}; it is [histories + 1], and begins with 0"
        )
    if not jnp.issubdtype(indptr.dtype, jnp.integer):
        raise TypeError(f"indptr is {indptr.dtype}; its numbers are integers")
    if (times is None) != (time_bias is None):
        raise ValueError("times and time_bias go together: give both or neither")
    for name, bias in {"place_bias": place_bias, "time_bias": time_bias}.items():
        if bias is not None and (bias.ndim != 1 or not len(bias)):
            raise ValueError(f"{name} has shape {bias.shape}; it is one row of numbers")
        if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"{name} is {bias.dtype}; cast it to float32")
    if times is not None and times.shape != q.shape[:1]:
        raise ValueError(
            f"times has shape {times.shape}; one for each token: {q.shape[:1]}"
        )
    if isinstance(indptr, np.ndarray):
        _check_numbers(indptr, times, len(q))


def _check_numbers(indptr: np.ndarray, times, tokens: int) -> None:
    """Raises ValueError for wrong numbers in NumPy arrays."""
    if indptr[0] != 0 or np.any(np.diff(indptr) < 0):
        raise ValueError("indptr must ascend from 0")
    if indptr[-1] > tokens:
        raise ValueError(
            f"the histories have {indptr[-1]:,} entries but q has {tokens:,} tokens; "
            "make room for all entries, or cut histories"
        )
    if not isinstance(times, np.ndarray):
        return
    used = times[: indptr[-1]]
    wrong = ~np.isfinite(used)
    wrong[1:] |= used[1:] < used[:-1]
    inside = np.zeros(len(used) + 1, bool)
    inside[indptr[:-1]] = True  # the previous time belongs to another history
    wrong &= ~inside[:-1] | ~np.isfinite(used)
    if np.any(wrong):
        place = int(np.argmax(wrong))
        raise ValueError(
            f"times[{place:,}] is {times[place]}; times are finite and ascend within a "
            "history: sort the entries by time"
        )


class _Spans(NamedTuple):
    """The history of each token.

    Attributes:
      starts: the first entry of the history; `_NONE` for padding; -1 minus the entry where the
        result is NaN.
      ends: the entry after the history's last; for padding, the first padding entry.
    """

    starts: Int[Array, "tokens"]
    ends: Int[Array, "tokens"]


def _spans(
    indptr: Int[Array, "histories_plus_1"], times: jax.Array | None, tokens: int
) -> _Spans:
    place = jnp.arange(tokens, dtype=jnp.int32)
    indptr = indptr.astype(jnp.int32)
    last = max(len(indptr) - 2, 0)
    # The number of the last history that has begun. On a GPU the search is fused into another
    # program, while counting launches several. XLA's fusions for a CPU copy each step of a
    # search into all later steps: for 24,576 histories 15 steps took 37 s to compile (jax 0.12.0).
    history = lax.platform_dependent(
        indptr,
        cpu=lambda indptr: segment_ids(indptr[:-1], tokens),
        default=lambda indptr: jnp.searchsorted(
            indptr[1:-1], place, side="right", method="scan_unrolled"
        ),
    )
    starts, ends = indptr[history], indptr[jnp.minimum(history + 1, len(indptr) - 1)]
    inside = (place >= starts) & (place < ends)
    wrong = ends > tokens
    if times is not None:
        back = (times < jnp.roll(times, 1)) & (place > starts)
        bad = inside & (back | ~jnp.isfinite(times))
        # Only the entries of invalid histories are written, so that few writes wait for each
        # other.
        found = jnp.zeros(last + 1, jnp.int32)
        found = found.at[jnp.where(bad, history, last + 1)].max(1, mode="drop")
        wrong |= found[history] > 0
    starts = jnp.where(wrong, -1 - starts, starts)
    return _Spans(jnp.where(inside, starts, _NONE), ends)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _attention(
    q: Float[Array, "tokens heads dim"],
    k: Float[Array, "tokens heads dim"],
    v: Float[Array, "tokens heads dim"],
    biases: Biases,
    spans: _Spans,
    times: Float[Array, "tokens"] | None,
    rule: Rule,
    implementation: Implementation,
    precision: Precision,
) -> Float[Array, "tokens heads dim"]:
    operands = q, k, v, biases, spans, times
    return _attend(operands, rule, implementation, precision)[0]


def _forward(q, k, v, biases, spans, times, rule, implementation, precision):
    operands = q, k, v, biases, spans, times
    y, norms = _attend(operands, rule, implementation, precision)
    return y, (operands, y if rule.activation == "softmax" else None, norms)


def _backward(rule, implementation, precision, residuals, dy):
    operands, y, norms = residuals
    return *_slopes(operands, y, norms, dy, rule, implementation, precision), None, None


_attention.defvjp(_forward, _backward)


def _attend(operands, rule, implementation, precision):
    """Computes the result, and for softmax the logarithm of each entry's sum of exponentials."""
    if implementation == "mosaic_gpu":
        q, k, v, *others = _for_program(operands)
        tokens = len(operands[0])
        y, norms = mosaic.attend(q, k, v, *others, **dataclasses.asdict(rule))
        return vary_over((y[:tokens], norms), varying_axes(operands))

    def attend(form, *operands):
        return _Blocks.of(operands, form).attend(rule, precision)

    return _by_platform(attend, implementation, operands)


def _slopes(operands, y, norms, dy, rule, implementation, precision):
    """The gradients of q, k, v and the biases."""
    if implementation == "mosaic_gpu":
        q, k, v, *others = _for_program(operands)
        tokens, biases = len(dy), operands[3]
        dq, dk, dv, place, time = mosaic.slopes(
            *(q, k, v, _padded(dy, 0), *others),
            y=None if y is None else _padded(y, 0),
            norms=norms,
            scale=rule.scale,
            divisor=rule.divisor,
        )
        if place is not None:
            place = _clipped(place, len(biases.place))
        found = *(x[:tokens] for x in (dq, dk, dv)), Biases(place, time)
        return vary_over(found, varying_axes(operands))

    def slopes(form, *arguments):
        *operands, y, norms, dy = arguments
        return _Blocks.of(operands, form).slopes(y, norms, dy, rule, precision)

    return _by_platform(slopes, implementation, (*operands, y, norms, dy))


def _unsupported(q: jax.Array) -> str | None:
    """The reason why the GPU program cannot process `q`; None if it can. Any number of tokens is
    supported.
    """
    return mosaic.unsupported(_padded(q, 0))


def _for_program(operands) -> Any:
    """Converts the operands to the form that the GPU programs require."""
    q, k, v, (place, time), (starts, ends), times = operands
    ends = jnp.pad(ends, (0, -len(ends) % mosaic.TILE), mode="edge")
    q, k, v = (_padded(x, 0) for x in (q, k, v))
    thresholds = None
    if time is not None:
        times = _padded(times, 0)
        thresholds = tuple(time_thresholds(len(time)).tolist())
    starts = _padded(starts, _NONE)
    return q, k, v, starts, ends, place, times, time, thresholds


def _padded(x: jax.Array, fill) -> jax.Array:
    """Appends `fill` up to a multiple of the number of tokens in the GPU program's tile."""
    more = -len(x) % mosaic.TILE
    pad = ((0, more), *[(0, 0)] * (x.ndim - 1))
    return jnp.pad(x, pad, constant_values=fill) if more else x


def _by_platform(function, implementation, operands):
    """Calls `function` with the `_Form` for this platform."""
    heads = operands[0].shape[1]
    cpu, gpu = (
        functools.partial(function, form)
        for form in (_Form.of_cpu(heads), _Form.of_gpu(heads))
    )
    if implementation == "xla_gpu":
        return gpu(*operands)
    return lax.platform_dependent(*operands, cpu=cpu, default=gpu)


class _Blocks(NamedTuple):
    """The operands, divided into blocks of entries; several blocks make a chunk.

    The blocks of a chunk are computed together: first each with itself, then each with
    the block before it, and so on, until no history reaches further back.

    Attributes:
      q, k, v: `[chunks * chunk, heads, block, dim]`; `k` and `v` have `chunk` more blocks
        before.
      place: `[blocks, block]`: index of each query among the entries.
      first: the first entry that a query attends to; an index after all entries if there is none.
      wrong: whether the result is NaN.
      times: times of the queries.
      times_before: times of the keys, with `chunk` more blocks before.
      depth: `[chunks]`: the most blocks that a block of the chunk attends to.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    place: jax.Array
    first: jax.Array
    wrong: jax.Array
    times: jax.Array | None
    times_before: jax.Array | None
    depth: jax.Array
    biases: Biases
    tokens: int
    block: int
    chunk: int
    scatter: bool

    @classmethod
    def of(cls, operands, form: _Form) -> _Blocks:
        q, k, v, biases, (starts, _), times = operands
        tokens, block = len(q), form.block
        blocks = -(-tokens // block)
        chunk = min(blocks, form.chunk)
        blocks = -(-blocks // chunk) * chunk
        none = blocks * block  # an index after all entries
        inside = (starts >= 0) & (starts < tokens)
        first = jnp.where(inside, starts, none)

        def rows(x, fill, before=0):
            x = jnp.pad(x, (0, none - tokens), constant_values=fill)
            x = x.reshape(blocks, block)
            return jnp.pad(x, ((before, 0), (0, 0)))

        def matrices(x, before=0):
            # Padding may have any values, and 0 * NaN would be NaN.
            x = jnp.where(inside[:, None, None], x, 0)
            return _in_blocks(x, block, blocks, before)

        first = rows(first, none)
        place = jnp.arange(none, dtype=jnp.int32).reshape(blocks, block)
        reach = jnp.arange(blocks) + 1 - jnp.min(first, axis=1) // block
        depth = jnp.max(jnp.maximum(reach, 0).reshape(-1, chunk), axis=1)
        return cls(
            matrices(q),
            matrices(k, chunk),
            matrices(v, chunk),
            place,
            first,
            rows(starts < 0, False),
            None if times is None else rows(times, 0),
            None if times is None else rows(times, 0, chunk),
            depth.astype(jnp.int32),
            biases,
            tokens,
            block,
            chunk,
            form.scatter,
        )

    def attend(self, rule: Rule, precision: Precision):
        """The result, and for softmax the logarithms of the sums, as `_attend` returns them."""
        sums, axes = accumulator(self.q.dtype), self.axes()
        einsum = _einsum(precision, self.q.dtype, sums)
        softmax = rule.activation == "softmax"
        rows = (self.chunk, self.q.shape[1], self.block, 1)

        def of_chunk(c):
            q, wrong = self.queries(self.q, c), self.queries(self.wrong, c)

            def step(d, carry):
                y, largest, total = carry
                v = self.keys(self.v, c, d)
                scores, seen = self.scores(q, c, d, rule, einsum)
                if softmax:
                    scores = jnp.where(seen, scores, -jnp.inf)
                    top = jnp.maximum(largest, jnp.max(scores, axis=3, keepdims=True))
                    shift = jnp.where(top == -jnp.inf, 0, top)
                    weights = jnp.exp(scores - shift)
                    less = jnp.exp(largest - shift)
                    total = less * total + jnp.sum(weights, axis=3, keepdims=True)
                    y, largest = less * y, top
                else:
                    weights = jnp.where(seen, jax.nn.silu(scores), 0)
                y += einsum("chqk,chkd->chqd", weights.astype(v.dtype), v)
                return y, largest, total

            zeros = jnp.zeros(q.shape, sums), jnp.zeros(rows, sums) - jnp.inf
            start = vary_over((*zeros, jnp.zeros(rows, sums)), axes)
            y, largest, total = lax.fori_loop(0, self.depth[c], step, start)
            if softmax:
                nobody = total == 0
                total = jnp.where(nobody, 1, total)
                y, largest = y / total, jnp.where(nobody, 0, largest)
            y = jnp.where(wrong[:, None, :, None], jnp.nan, y / rule.divisor)
            norms = largest + jnp.log(total) if softmax else None
            return y.astype(self.q.dtype), norms

        y, norms = lax.map(of_chunk, jnp.arange(len(self.depth)))
        return self.in_tokens(y), None if norms is None else self.in_tokens(norms)

    def slopes(self, y, norms, dy, rule: Rule, precision: Precision):
        """The gradients of q, k, v and the biases."""
        sums, axes, dtype = accumulator(self.q.dtype), self.axes(), self.q.dtype
        einsum = _einsum(precision, dtype, sums)
        softmax = rule.activation == "softmax"
        nothing = self.wrong.reshape(-1)[: self.tokens] | (
            self.first.reshape(-1)[: self.tokens] >= self.first.size
        )
        dy = jnp.where(nothing[:, None, None], 0, dy)
        inner = None
        if softmax:
            inner = jnp.sum(jnp.where(dy == 0, 0, dy.astype(sums) * y), axis=2)
            inner, norms = (
                _in_blocks(x, self.block, len(self.q))
                for x in (inner[..., None], norms)
            )
        dy = (dy / rule.divisor).astype(dtype)
        dy = _in_blocks(dy, self.block, len(self.q))
        place, time = self.biases
        size = len(self.place) * self.block

        def of_chunk(c, carry):
            q, out = self.queries(self.q, c), self.queries(dy, c)

            def step(d, carry):
                dq, dk, dv, diagonals, in_time = carry
                k, v = self.keys(self.k, c, d), self.keys(self.v, c, d)
                scores, seen = self.scores(q, c, d, rule, einsum)
                pulled = einsum("chqd,chkd->chqk", out, v)
                if softmax:
                    weights = jnp.exp(scores - self.queries(norms, c))
                    ds = weights * (pulled - self.queries(inner, c))
                else:
                    share = jax.nn.sigmoid(scores)
                    weights = scores * share
                    ds = pulled * (share + weights * (1 - share))
                weights, ds = (jnp.where(seen, x, 0) for x in (weights, ds))
                small = ds.astype(dtype)
                dv = self.add(
                    dv, c, d, einsum("chqk,chqd->chkd", weights.astype(dtype), out)
                )
                dk = self.add(dk, c, d, einsum("chqk,chqd->chkd", small, q))
                dq += einsum("chqk,chkd->chqd", small, k)
                if place is not None:
                    found = _diagonal_sums(jnp.sum(ds, axis=(0, 1)))
                    at = d * self.block
                    found += lax.dynamic_slice_in_dim(diagonals, at, len(found))
                    diagonals = lax.dynamic_update_slice_in_dim(diagonals, found, at, 0)
                if time is not None:
                    in_time = self.add_by_time(in_time, jnp.sum(ds, axis=1), c, d)
                return dq, dk, dv, diagonals, in_time

            zeros = vary_over(jnp.zeros(q.shape, sums), axes)
            dq, *carry = lax.fori_loop(0, self.depth[c], step, (zeros, *carry))
            return tuple(carry), (rule.scale * dq).astype(dtype)

        carry = (
            jnp.zeros(self.k.shape, sums),
            jnp.zeros(self.k.shape, sums),
            None if place is None else jnp.zeros(size + self.block, sums),
            None if time is None else jnp.zeros(len(time), sums),
        )
        chunks = jnp.arange(len(self.depth))
        carry = vary_over(carry, axes)
        (dk, dv, diagonals, in_time), dq = lax.scan(
            lambda carry, c: of_chunk(c, carry), carry, chunks
        )
        dk, dv = (self.in_tokens(x[self.chunk :]) for x in (rule.scale * dk, dv))
        found = Biases(
            None
            if place is None
            else _clipped(diagonals[self.block - 1 :], len(place)),
            None if time is None else self.by_time(in_time),
        )
        return self.in_tokens(dq), dk.astype(dtype), dv.astype(dtype), found

    def axes(self) -> frozenset[str]:
        """The axes of a mesh over which the operands vary."""
        return varying_axes((self.q, self.k, self.v, self.first, self.biases))

    def queries(self, x, c):
        """Selects the blocks of chunk c."""
        return lax.dynamic_slice_in_dim(x, c * self.chunk, self.chunk)

    def keys(self, x, c, d):
        """Selects the blocks that are d blocks before those of chunk c."""
        return lax.dynamic_slice_in_dim(x, (c + 1) * self.chunk - d, self.chunk)

    def add(self, x, c, d, found):
        """Adds `found` to the blocks that `keys` selects."""
        at = (c + 1) * self.chunk - d
        return lax.dynamic_update_slice_in_dim(x, self.keys(x, c, d) + found, at, 0)

    def scores(self, q, c, d, rule: Rule, einsum):
        """The scores `[chunk, heads, block, block]`, and a mask of the pairs within causal
        histories.
        """
        place, first = self.queries(self.place, c), self.queries(self.first, c)
        scores = rule.scale * einsum("chqd,chkd->chqk", q, self.keys(self.k, c, d))
        inside = jnp.arange(self.block, dtype=jnp.int32)
        apart = d * self.block + inside[:, None] - inside[None]
        if self.biases.place is not None:
            at = jnp.clip(apart, 0, len(self.biases.place) - 1)
            scores += self.biases.place[at][None, None]
        if self.biases.time is not None:
            bias = self.biases.time[self.buckets(c, d, len(self.biases.time))]
            scores += bias[:, None]
        key = place[:, :, None] - apart[None]
        seen = (key >= first[:, :, None]) & (apart >= 0)[None]
        return scores, seen[:, None]

    def since(self, c, d) -> Float[Array, "chunk block block"]:
        """Time differences: times of the queries minus times of the keys."""
        times, before = self.queries(self.times, c), self.keys(self.times_before, c, d)
        return times[:, :, None] - before[:, None]

    def buckets(self, c, d, count: int) -> Int[Array, "chunk block block"]:
        """The time bucket of each pair that the mask of `scores` selects; else any bucket."""
        since = self.since(c, d)
        guess = jnp.log(jnp.maximum(since, 1)) / TIME_RATIO
        guess = jnp.clip(guess, 0, count - 1).astype(jnp.int32)
        least = jnp.asarray(np.append(time_thresholds(count), np.inf), since.dtype)
        guess += (since >= least[guess + 1]).astype(jnp.int32)
        return guess - (since < least[guess]).astype(jnp.int32)

    def add_by_time(self, sums, ds, c, d) -> Float[Array, "buckets"]:
        """Adds the gradients of pairs, `[chunk, block, block]`, to sums that `by_time` reads."""
        if self.scatter:
            return sums.at[self.buckets(c, d, len(sums))].add(ds)
        return sums + self.suffix_sums(ds, len(sums), c, d)

    def by_time(self, sums) -> Float[Array, "buckets"]:
        """The gradient of each bucket's bias, from the sums that `add_by_time` made."""
        return sums if self.scatter else sums - jnp.append(sums[1:], 0)

    def suffix_sums(self, ds, count: int, c, d) -> Float[Array, "buckets"]:
        """For each bucket, the sum of `ds` over all pairs in this bucket or a later one."""
        times, before = self.queries(self.times, c), self.keys(self.times_before, c, d)
        place, first = self.queries(self.place, c), self.queries(self.first, c)
        least = jnp.asarray(time_thresholds(count), times.dtype)
        origin = place[:, :1] - d * self.block  # index of the first key of each block
        # Keys from `low` up to `high` count. The oldest come first.
        low = jnp.clip(first - origin, 0, self.block)
        high = jnp.clip(place + 1 - origin, 0, self.block)
        shape = *low.shape, count
        low, high = (
            vary_over(jnp.broadcast_to(x[..., None], shape), self.axes())
            for x in (jnp.minimum(low, high), high)
        )

        def old(at):
            key = jnp.take_along_axis(
                before[:, None], jnp.minimum(at, self.block - 1), axis=2
            )
            return times[..., None] - key >= least[None, None]

        for _ in range(self.block.bit_length()):
            middle = (low + high) // 2
            later = (low < high) & old(middle)
            low, high = (
                jnp.where(later, middle + 1, low),
                jnp.where(later, high, middle),
            )
        sums = jnp.pad(jnp.cumsum(ds, axis=2), ((0, 0), (0, 0), (1, 0)))
        return jnp.sum(jnp.take_along_axis(sums, low, axis=2), axis=(0, 1))

    def in_tokens(self, x):
        """Joins blocks, or chunks of blocks, to an array `[tokens, heads, dim]`."""
        x = x.reshape(-1, *x.shape[-3:])
        x = jnp.swapaxes(x, 1, 2)
        return x.reshape(-1, *x.shape[2:])[: self.tokens]


def _in_blocks(x, block: int, blocks: int, before: int = 0):
    """Divides `[tokens, heads, n]` into `[before + blocks, heads, block, n]`."""
    x = jnp.pad(x, ((before * block, blocks * block - len(x)), (0, 0), (0, 0)))
    return jnp.swapaxes(x.reshape(-1, block, *x.shape[1:]), 1, 2)


def _einsum(precision: Precision, dtype, sums):
    return functools.partial(
        jnp.einsum, precision=of_xla(precision, dtype), preferred_element_type=sums
    )


def _diagonal_sums(x: Float[Array, "n n"]) -> Float[Array, "2*n"]:
    """The sums of the elements on each diagonal, column - row = n - 1, ..., 1 - n; then 0."""
    n = len(x)
    # The array is read in rows that are one element shorter. So each row is shifted by one column
    # more than the row before, and diagonals become columns.
    x = jnp.pad(x[:, ::-1], ((0, 0), (0, n))).reshape(-1)
    sums = jnp.sum(x[: n * (2 * n - 1)].reshape(n, 2 * n - 1), axis=0)
    return jnp.append(sums, 0)


def _clipped(sums: Float[Array, "distances"], places: int) -> Float[Array, "places"]:
    """The gradient of a bias whose last element applies to all larger distances."""
    sums = jnp.pad(sums, (0, max(0, places - len(sums))))
    # Without the barrier XLA fuses this sum with later operations, and each thread of the
    # program computes the sum again.
    rest = lax.optimization_barrier(jnp.sum(sums[places - 1 :]))
    return jnp.append(sums[: places - 1], rest)
