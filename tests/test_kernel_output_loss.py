"""The output-loss kernel against float64: interpreted on a CPU, and on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import output_loss as kernels
from pallas_kernels import score_tiles

BATCH, HIDDEN, ITEMS = 128, 320, 768
COLUMNS = score_tiles.COLUMNS
# The second chunk of 256 items, of which the last 6 do not count.
START, SIZE, LIMIT = 256, 512, 762


def make(seed=0):
    """h, kernel, bias, scale, a vector, and labels in CSR order (row, column)."""
    rng = np.random.default_rng(seed)
    h = jnp.asarray(rng.standard_normal((BATCH, HIDDEN)) / 4, jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((ITEMS, HIDDEN)) / 4, jnp.bfloat16)
    bias, scale = (jnp.float32(rng.standard_normal(ITEMS)) for _ in range(2))
    vector = jnp.float32(rng.standard_normal(BATCH))
    listed = rng.random((BATCH, ITEMS)) < 0.1
    listed[5] = True
    listed[6] = False
    return h, kernel, bias, scale, vector, listed


def words_of(listed):
    rows, columns = map(jnp.asarray, np.nonzero(listed))
    rows = jnp.append(rows, len(listed))  # padding is left out
    columns = jnp.append(columns, 300)
    return kernels.label_words(rows, columns - START, len(listed), SIZE)


def exact_scores(h, kernel, bias=0.0, scale=1.0):
    products = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64).T
    scores = products * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)
    return scores[:, START : START + SIZE]


def test_words_hold_the_labels():
    listed = make()[-1]
    words = np.asarray(words_of(listed)).view(np.uint32)
    i = np.arange(SIZE)
    bits = words[:, 8 * (i // 256) + i % 8] >> (i % 256 // 8).astype(np.uint32) & 1
    np.testing.assert_array_equal(bits, listed[:, START : START + SIZE])


@pytest.mark.parametrize("with_layer", [False, True])
def test_slopes(run_kernel, with_layer):
    h, kernel, bias, scale, vector, listed = make()
    layer = (bias, scale) if with_layer else (None, None)

    def function(scores, ones, listed, vector):
        odds = [jnp.exp(-4 * jnp.abs(scores))] if with_layer else []
        return scores + ones, *odds, jnp.where(listed, vector * scores, scores)

    def call(h, kernel, bias, scale, words, vector, start):
        return kernels.slopes(
            function,
            h,
            kernel,
            bias,
            scale,
            words,
            [vector],
            start=start,
            size=SIZE,
            limit=LIMIT,
        )

    words = words_of(listed)
    start = jnp.int32(START)
    values, slopes = run_kernel(call, h, kernel, *layer, words, vector, start)
    scores = exact_scores(h, kernel, *layer if with_layer else ())
    inside = np.arange(START, START + SIZE) < LIMIT
    listed = listed[:, START : START + SIZE]
    want = np.where(listed, np.asarray(vector)[:, None] * scores, scores) * inside
    assert slopes.dtype == jnp.bfloat16
    np.testing.assert_allclose(slopes.astype(np.float64), want, rtol=2**-7, atol=1e-5)
    want = scores + 1 + with_layer * np.log1p(np.exp(-4 * np.abs(scores)))
    want = np.where(inside, want, 0).reshape(BATCH, -1, COLUMNS).sum(2).T
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-4)


def test_normalise(run_kernel):
    h, kernel, bias, scale, _, listed = make()
    bias = bias.at[256:512].set(-jnp.inf)  # the first tile: all denied

    def call(*operands):
        size = {"start": START, "size": SIZE, "limit": LIMIT}
        return kernels.normalise(*operands, **size)

    no_label = listed & (np.arange(ITEMS) >= 512)  # of denied items
    parts = run_kernel(call, h, kernel, bias, scale, words_of(no_label))
    scores = exact_scores(h, kernel, bias, scale)
    scores[:, LIMIT - START :] = -np.inf
    scores = scores.reshape(BATCH, -1, COLUMNS).transpose(1, 0, 2)
    listed = no_label[:, START : START + SIZE].copy()
    listed = listed.reshape(BATCH, -1, COLUMNS).transpose(1, 0, 2)
    largest = scores.max(2)
    shift = np.where(np.isinf(largest), 0, largest)[..., None]
    found = np.where(listed & (scores > -np.inf), scores, 0).sum(2)
    want = largest, np.exp(scores - shift).sum(2), listed.sum(2), found
    for i, (got, exact) in enumerate(zip(parts, want, strict=True)):
        if i == 3:  # a label may be in the 6 items that do not count
            exact = np.where((listed & np.isinf(scores)).any(2), -np.inf, exact)
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-5)


def test_small_odds_are_not_lost(run_kernel):
    h, kernel, *_, listed = make()

    def call(h, kernel, words):
        def function(scores, ones, listed):
            odds = jnp.where(listed, 1e-9 * ones, 3e-9)
            return jnp.zeros_like(scores), odds, scores

        size = {"start": START, "size": SIZE, "limit": ITEMS}
        return kernels.slopes(function, h, kernel, None, None, words, [], **size)[0]

    values = run_kernel(call, h, kernel, words_of(listed))
    odds = np.where(listed[:, START : START + SIZE], 1e-9, 3e-9)
    want = np.log1p(odds).reshape(BATCH, -1, COLUMNS).sum(2).T
    np.testing.assert_allclose(values, want, rtol=2e-6)


@pytest.mark.parametrize(
    ("hidden", "items", "dtype", "message"),
    [
        (64, 256, jnp.float32, "takes bfloat16 operands, not float32"),
        (100, 256, jnp.bfloat16, "multiples of 64, not 100"),
        (64, 300, jnp.bfloat16, "a multiple of 256 rows, not 300"),
    ],
)
def test_unsupported(hidden, items, dtype, message):
    why = score_tiles.unsupported(hidden, items, jnp.dtype(dtype))
    assert why is not None and message in why
    assert score_tiles.unsupported(64, 256, jnp.dtype(jnp.bfloat16)) is None
