"""The kernel of `top_k` against float64: interpreted on a CPU, and on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import output_loss, top_k

ITEMS, HIDDEN = 768, 128
# The second chunk of 256 items, of which the last 6 do not count.
START, SIZE, LIMIT = 256, 512, 762


@pytest.mark.parametrize("with_all", [False, True])
def test_scores_and_maxima(run_kernel, with_all):
    rng = np.random.default_rng(0)
    batch = 128
    h, kernel = (
        jnp.asarray(rng.standard_normal((rows, HIDDEN)) / 4, jnp.bfloat16)
        for rows in (batch, ITEMS)
    )
    h = h.at[3, 5].set(jnp.nan)
    bias, scale = (jnp.float32(rng.standard_normal(ITEMS)) for _ in range(2))
    bias = bias.at[400:404].set(-jnp.inf)
    listed = rng.random((batch, ITEMS)) < 0.1
    listed[5] = True
    rows, columns = map(jnp.asarray, np.nonzero(listed))
    words = output_loss.label_words(rows, columns - START, batch, SIZE)
    extras = (bias, scale, words) if with_all else (None, None, None)

    def call(*operands):
        size = {"start": START, "size": SIZE, "limit": LIMIT}
        return top_k.scores_and_maxima(*operands, **size)

    scores, maxima = run_kernel(call, h, kernel, *extras)
    want = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64).T
    if with_all:
        want = want * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)
        want[listed | np.isinf(np.asarray(bias))] = -np.inf
    want[:, LIMIT:] = -np.inf
    np.testing.assert_allclose(scores, want[:, START:], rtol=1e-5, atol=1e-5)
    # Of the scores themselves, to the bit.
    want = scores.reshape(batch, -1, top_k.GROUP).max(2)
    np.testing.assert_array_equal(maxima, want)
