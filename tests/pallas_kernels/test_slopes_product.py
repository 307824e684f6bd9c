"""Slopes and their product with the kernel: interpreted on a CPU, and on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import output_loss as mosaic
from pallas_kernels.slopes_product import slopes_product

ITEMS, START, SIZE, LIMIT = 1280, 256, 768, 1018


def function(scores, ones, listed, weights, vector):
    odds = jnp.exp(-4 * jnp.abs(scores))
    slopes = weights * jnp.where(listed, vector * scores, scores)
    return scores + ones, odds, slopes


# On a CPU there are two programs: they have a part of a tile of rows each, or tiles in turn.
@pytest.mark.parametrize(
    ("batch", "hidden", "with_bias"), [(128, 256, False), (384, 64, True)]
)
def test_slopes_product(run_program, batch, hidden, with_bias):
    rng = np.random.default_rng(batch)
    h = jnp.asarray(rng.standard_normal((batch, hidden)) / 4, jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((ITEMS, hidden)) / 4, jnp.bfloat16)
    bias = jnp.float32(rng.standard_normal(ITEMS)) if with_bias else None
    weights, vector = (jnp.float32(rng.standard_normal(batch)) for _ in range(2))
    # Of 64 rows and columns: all have weights, or not; some are labels, or none.
    h = h.at[70].set(jnp.nan)
    weights = weights.at[70].set(0)
    listed = rng.random((batch, SIZE)) < 0.1
    listed[:, 64:320] = False
    rows, columns = map(jnp.asarray, np.nonzero(listed))
    words = mosaic.label_words(rows, columns, batch, SIZE, counted=True)

    def call(h, kernel, bias, words, weights, vector, start):
        return slopes_product(
            function,
            h,
            kernel,
            bias,
            words,
            [weights, vector],
            start=start,
            size=SIZE,
            limit=LIMIT,
            with_values=with_bias,
        )

    start = jnp.int32(START)
    operands = h, kernel, bias, words, weights, vector
    values, slopes, parts = run_program(call, *operands, start)
    h, kernel, weights = (np.asarray(x, np.float64) for x in (h, kernel, weights))
    scores = h @ kernel.T + (np.asarray(bias, np.float64) if with_bias else 0)
    scores, kernel = scores[:, START : START + SIZE], kernel[START : START + SIZE]
    inside = np.arange(START, START + SIZE) < LIMIT
    want = np.where(listed, np.asarray(vector)[:, None] * scores, scores) * inside
    want = np.where(weights[:, None] != 0, weights[:, None] * want, 0)
    assert slopes.dtype == jnp.bfloat16
    slopes = slopes.astype(np.float64)
    np.testing.assert_allclose(slopes, want, rtol=2**-7, atol=1e-5)
    np.testing.assert_allclose(parts.sum(0), slopes @ kernel, rtol=1e-4, atol=1e-4)
    if with_bias:
        want = scores + 1 + np.log1p(np.exp(-4 * np.abs(scores)))
        want = np.where(inside, want, 0).sum(1)
        np.testing.assert_allclose(values.sum(0), want, rtol=1e-5, atol=1e-4)
    else:
        assert values is None


def test_the_product_of_many_odds_does_not_overflow(run_program):
    size = 18 * 128

    def call(h, kernel, words, weights):
        def function(scores, ones, listed, weights):
            return scores, ones, weights * scores

        layer = h, kernel, None, words, [weights]
        return slopes_product(function, *layer, start=0, size=size, limit=size)[0]

    h, kernel = (jnp.zeros((n, 64), jnp.bfloat16) for n in (128, size))
    words = jnp.zeros((130, size // 32), jnp.int32)
    values = run_program(call, h, kernel, words, jnp.ones(128))
    np.testing.assert_allclose(values.sum(0), size * np.log(2), rtol=1e-5)
