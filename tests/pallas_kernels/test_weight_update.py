"""The step within the product against float64: interpreted on a CPU, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rounding import Noise
from pallas_kernels.weight_update import fits, weight_update
from sparsejax import optimizers
from sparsejax.ops.row_update import place_of, step_of_arrays

ITEMS, START, SIZE = 640, 128, 384


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def moved(rule, slopes, h, w, state, operand, start, count, noise=None):
    step, scalars = step_of_arrays(rule, state, count)
    arrays = [w, *state.values()]
    return weight_update(
        step,
        slopes,
        h,
        arrays,
        operand,
        start,
        scalars,
        place=place_of(noise, count),
        with_sums=True,
    )


# Of one block of columns and of several.
@pytest.mark.parametrize(
    ("rule", "batch", "hidden"),
    [
        (optimizers.sgd(lambda count: 1e-2 / count), 128, 192),
        (optimizers.adamw(1e-2), 64, 320),
    ],
    ids=["sgd", "adamw"],
)
def test_weight_update(run_program, rule, batch, hidden):
    slopes, h = normal(0, batch, SIZE), normal(1, batch, hidden)
    slopes, h = slopes.astype(jnp.bfloat16), h.astype(jnp.bfloat16)
    w = normal(2, ITEMS, hidden)
    state = {
        name: jnp.abs(normal(3 + i, ITEMS, hidden))
        for i, name in enumerate(rule.init((1, 1)))
    }
    operand = w.astype(jnp.bfloat16)
    count = jnp.int32(3)
    arguments = slopes, h, w, state, operand, jnp.int32(START), count
    arrays, copy, sums = run_program(functools.partial(moved, rule), *arguments)
    rows = slice(START, START + SIZE)
    gradient = np.asarray(slopes, np.float64).T @ np.asarray(h, np.float64)
    with jax.enable_x64(True):
        old = [np.asarray(x, np.float64)[rows] for x in (w, *state.values())]
        numbers = rule.numbers(jnp.float64(3))
        new, new_state = rule.step(
            old[0], dict(zip(state, old[1:], strict=True)), gradient, numbers
        )
    for got, before, after in zip(
        arrays, (w, *state.values()), (new, *new_state.values()), strict=True
    ):
        want = np.array(before, np.float64)
        want[rows] = after
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert np.abs(want - np.asarray(before))[rows].max() > 1e-2
    np.testing.assert_array_equal(copy, arrays[0].astype(jnp.bfloat16))
    of_slopes = np.asarray(slopes, np.float64).sum(axis=0)
    np.testing.assert_allclose(sums, of_slopes, rtol=1e-5, atol=1e-5)


def test_random_rounding(run_program):
    """Products of small whole numbers are exact, so that there is one right answer."""
    rule, hidden = optimizers.sgd(2.0**-9), 128
    slopes, h = jnp.round(normal(0, 64, SIZE)), jnp.round(normal(1, 64, hidden))
    w = normal(2, ITEMS, hidden).astype(jnp.bfloat16).at[START + 9, 5].set(jnp.nan)
    noise, half = Noise(jnp.int32(7), jnp.int32(1000)), jnp.bfloat16
    arguments = slopes.astype(half), h.astype(half), w, {}, None, jnp.int32(START)
    function = functools.partial(moved, rule)
    (got,), *_ = run_program(function, *arguments, jnp.int32(3), noise)
    rows = slice(START, START + SIZE)
    exact = np.array(w, np.float32)
    exact[rows] -= 2.0**-9 * (np.asarray(slopes).T @ np.asarray(h))
    want = np.asarray(noise.rounded(jnp.asarray(exact), 3), np.float32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)
    assert (got != exact.astype(half))[rows].mean() > 0.1


def test_many_arrays_of_both_widths(run_program):
    slopes = normal(0, 64, SIZE).astype(jnp.bfloat16)
    h = normal(1, 64, 128).astype(jnp.bfloat16)
    dtypes = [jnp.bfloat16, jnp.float32, jnp.bfloat16, *[jnp.float32] * 5]
    arrays = [normal(2 + i, ITEMS, 128).astype(x) for i, x in enumerate(dtypes)]

    def update(old, gradient, scalars):
        return [x + (i + scalars[0]) * gradient for i, x in enumerate(old)]

    def function(*arrays):
        return weight_update(update, slopes, h, arrays, None, START, [jnp.float32(2)])

    got, copy, sums = run_program(function, *arrays)
    rows = slice(START, START + SIZE)
    gradient = np.asarray(slopes, np.float64).T @ np.asarray(h, np.float64)
    for i, (x, before) in enumerate(zip(got, arrays, strict=True)):
        want = np.array(before, np.float64)
        want[rows] += (i + 2) * gradient
        rtol = 1e-2 if x.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(x.astype(np.float64), want, rtol=rtol, atol=1e-3)
    assert copy is None and sums is None


def test_refuses_arrays_beyond_shared_memory():
    assert fits(256, 32) and fits(64, 40)
    assert not fits(256, 34) and not fits(100, 4)
    slopes, h = jnp.zeros((64, SIZE), jnp.bfloat16), jnp.zeros((64, 256), jnp.bfloat16)
    arrays = [jnp.zeros((ITEMS, 256))] * 9
    with pytest.raises(ValueError, match="36 bytes an element do not fit"):
        weight_update(lambda old, *_: old, slopes, h, arrays, None, 0)


@pytest.mark.parametrize("noise", [None, Noise(7)], ids=["float32", "bfloat16"])
def test_lowers_for_cuda(noise):
    rule = optimizers.adadelta(1.0)
    shape = ITEMS, 256
    state = rule.init(shape)
    slopes, h = jnp.zeros((64, SIZE), jnp.bfloat16), jnp.zeros((64, 256), jnp.bfloat16)
    w = normal(0, *shape).astype(jnp.float32 if noise is None else jnp.bfloat16)
    arguments = slopes, h, w, state, None, jnp.int32(0), jnp.int32(1), noise
    traced = jax.jit(functools.partial(moved, rule)).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
