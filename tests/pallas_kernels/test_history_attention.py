"""The GPU programs of history_attention: interpreted on a CPU, and on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import history_attention as mosaic

# Many in a tile, one in several, an empty end; two programs on a CPU.
LENGTHS = 1, 30, 7, 140, 20
PLACES, BUCKETS = 90, 9
INTERPRETED = jax.default_backend() != "gpu"


def make(dim=64, tokens=256, heads=1, lengths=LENGTHS, seed=0) -> Any:
    rng = np.random.default_rng(seed)
    shape = 4, tokens, heads, dim
    operands = jnp.asarray(rng.standard_normal(shape) / 2, jnp.bfloat16)
    starts = np.full(tokens, tokens, np.int32)
    ends = np.full(tokens, sum(lengths), np.int32)
    place = 0
    times = np.cumsum(np.floor(np.exp(rng.uniform(-2, 2, tokens)))).astype(np.float32)
    for n in lengths:
        starts[place : place + n] = place
        ends[place : place + n] = place + n
        place += n
    operands = operands.at[:, place:].set(jnp.nan)
    biases = [jnp.float32(rng.standard_normal(n) / 2) for n in (PLACES, BUCKETS)]
    least = np.exp(0.301 * np.arange(BUCKETS)).astype(np.float32)
    least[0] = -np.inf
    starts, ends, times = map(jnp.asarray, (starts, ends, times))
    return *operands, (starts, ends), times, *biases, least


def oracle(q, k, v, dy, spans, times, place, time, least, rule):
    """The expected results; `rule` is the activation, the scale and the divisor."""
    activation, scale, divisor = rule
    q, k, v, dy = (np.nan_to_num(np.asarray(x, np.float64)) for x in (q, k, v, dy))
    tokens = len(q)
    apart = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (apart >= 0) & (np.arange(tokens) >= np.asarray(spans[0])[:, None])
    scores = scale * np.einsum("thd,shd->hts", q, k)
    distance = np.clip(apart, 0, PLACES - 1)
    since = np.asarray(times)[:, None] - np.asarray(times)
    bucket = np.searchsorted(least, since, side="right") - 1
    if place is not None:
        scores += np.asarray(place)[distance]
    if time is not None:
        scores += np.asarray(time)[bucket]
    pulled = np.einsum("thd,shd->hts", dy, v) / divisor
    if activation == "softmax":
        weights = np.where(seen, np.exp(scores), 0)
        weights /= np.maximum(weights.sum(axis=2, keepdims=True), 1e-300)
        ds = weights * (pulled - (weights * pulled).sum(axis=2, keepdims=True))
        weights /= divisor
    else:
        share = 1 / (1 + np.exp(-scores))
        weights = np.where(seen, scores * share, 0) / divisor
        ds = np.where(seen, pulled * share * (1 + scores * (1 - share)), 0)
    found = [
        np.einsum("hts,shd->thd", weights, v),
        scale * np.einsum("hts,shd->thd", ds, k),
        scale * np.einsum("hts,thd->shd", ds, q),
        np.einsum("hts,thd->shd", weights, dy),
        np.bincount(distance.ravel(), ds.sum(0).ravel(), PLACES),
        np.bincount(bucket.ravel(), ds.sum(0).ravel(), BUCKETS),
    ]
    return found


def close(actual, want, error=1e-2):
    size = np.sqrt(np.mean(np.square(want)))
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, want, rtol=error, atol=8 * error * size)


@pytest.mark.parametrize(
    ("activation", "columns", "of_places", "of_times"),
    [
        ("silu", 128, False, False),
        ("silu", 64, True, True),
        ("softmax", 64, False, False),
        ("softmax", 64, True, True),
    ],
)
def test_forward(run_program, activation, columns, of_places, of_times):
    q, k, v, dy, spans, times, place, time, least = make(heads=1 + of_places)
    place = place if of_places else None
    timed = (times, time) if of_times else (None, None)
    # The first two histories are wrong.
    wrong = sum(LENGTHS[:2])
    spans = -1 - spans[0].at[wrong:].set(-1 - spans[0][wrong:]), spans[1]

    def call(q, k, v, spans, place, timed):
        config = mosaic.Config(columns=columns, stages=2, interpretable=INTERPRETED)
        operands: Any = (
            *spans,
            place,
            *timed,
            tuple(least.tolist()) if of_times else None,
        )
        return mosaic.attend(
            q,
            k,
            v,
            *operands,
            activation=activation,
            scale=0.5,
            divisor=3.0,
            config=config,
        )[0]

    y = run_program(call, q, k, v, spans, place, timed)
    rule = activation, 0.5, 3.0
    want = oracle(q, k, v, dy, spans, times, place, timed[1], least, rule)[0]
    assert np.all(np.isnan(y[:wrong].astype(np.float32)))
    close(y[wrong:], want[wrong:])
    assert not np.any(y[sum(LENGTHS) :])


@pytest.mark.parametrize(
    ("activation", "of_places", "of_times", "heads"),
    [
        ("silu", False, False, 1),
        ("silu", True, True, 2),  # together where there are biases
        ("softmax", True, False, 2),
        ("softmax", False, True, 3),  # one by one
    ],
)
def test_backward(run_program, activation, of_places, of_times, heads):
    q, k, v, dy, spans, times, place, time, least = make(heads=heads)
    place = place if of_places else None
    timed = (times, time) if of_times else (None, None)

    def call(q, k, v, dy, spans, place, timed):
        config = mosaic.Config(stages=2, interpretable=INTERPRETED)
        rule = {"scale": 0.5, "divisor": 3.0}
        operands: Any = (
            *spans,
            place,
            *timed,
            tuple(least.tolist()) if of_times else None,
        )
        y, norms = mosaic.attend(
            q, k, v, *operands, activation=activation, config=config, **rule
        )
        return mosaic.slopes(
            *(q, k, v, dy, *operands),
            y=y,
            norms=norms,
            of_queries=config,
            of_keys=config,
            **rule,
        )

    dq, dk, dv, dplace, dtime = run_program(call, q, k, v, dy, spans, place, timed)
    rule = activation, 0.5, 3.0
    _, *want = oracle(q, k, v, dy, spans, times, place, timed[1], least, rule)
    for found, exact in zip((dq, dk, dv), want, strict=False):
        close(found, exact)
        assert not np.any(found[sum(LENGTHS) :])
    if of_places:
        found = np.append(dplace[: PLACES - 1], dplace[PLACES - 1 :].sum())
        close(found, want[3])
    if of_times:
        close(dtime, want[4])


@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_lowers_for_cuda(activation):
    q, k, v, dy, spans, times, place, time, least = make(
        tokens=256, heads=2, lengths=(100,)
    )
    timed = times, time

    def call(q, k, v, dy):
        rule = {"scale": 0.5, "divisor": 3.0}
        operands: Any = *spans, place, *timed, tuple(least.tolist())
        y, norms = mosaic.attend(q, k, v, *operands, activation=activation, **rule)
        return y, mosaic.slopes(q, k, v, dy, *operands, y=y, norms=norms, **rule)

    lowered = jax.jit(call).trace(q, k, v, dy).lower(lowering_platforms=("cuda",))
    programs = 3 + (activation == "softmax")
    assert lowered.as_text().count("mosaic_gpu") >= programs
