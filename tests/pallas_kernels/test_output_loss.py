"""The GPU programs of output_loss against float64: interpreted on a CPU, and on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import output_loss as mosaic
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


def words_of(listed, start=START):
    rows, columns = map(jnp.asarray, np.nonzero(listed))
    rows = jnp.append(rows, len(listed))  # padding is left out
    columns = jnp.append(columns, start)
    size = listed[:, start : start + SIZE].shape
    return mosaic.label_words(rows, columns - start, *size, counted=True)


def exact_scores(h, kernel, bias=0.0, scale=1.0):
    products = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64).T
    return products * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)


def test_words_hold_the_labels():
    listed = make()[-1]
    words = np.asarray(words_of(listed)).view(np.uint32)
    i = np.arange(SIZE)
    bits = words[:BATCH, 8 * (i // 256) + i % 8] >> (i % 256 // 8).astype(np.uint32) & 1
    listed = listed[:, START : START + SIZE]
    np.testing.assert_array_equal(bits, listed)
    counts = listed.reshape(-1, 64, SIZE // 64, 64).sum((1, 3))
    np.testing.assert_array_equal(words[BATCH:, : SIZE // 64], counts)


@pytest.mark.parametrize("with_layer", [False, True])
def test_slopes(run_program, with_layer):
    h, kernel, bias, scale, vector, listed = make()
    layer = (bias, scale) if with_layer else (None, None)
    # Of 64 rows and columns: all have weights, or not; some are labels, or none.
    weights = jnp.where(jnp.arange(BATCH) == 70, 0, 2 * jnp.ones(BATCH))
    h = h.at[70].set(jnp.nan)
    listed[:, 320:576] = False

    def function(scores, ones, listed, weights, vector):
        odds = [jnp.exp(-4 * jnp.abs(scores))] if with_layer else []
        slopes = weights * jnp.where(listed, vector * scores, scores)
        return scores + ones, *odds, slopes

    def call(h, kernel, bias, scale, words, weights, vector, start):
        return mosaic.slopes(
            function,
            h,
            kernel,
            bias,
            scale,
            words,
            [weights, vector],
            start=start,
            size=SIZE,
            limit=LIMIT,
        )

    words = words_of(listed)
    start = jnp.int32(START)
    operands = h, kernel, *layer, words, weights, vector
    values, slopes = run_program(call, *operands, start)
    scores = exact_scores(h, kernel, *layer if with_layer else ())
    scores = scores[:, START : START + SIZE]
    inside = np.arange(START, START + SIZE) < LIMIT
    listed = listed[:, START : START + SIZE]
    want = np.where(listed, np.asarray(vector)[:, None] * scores, scores) * inside
    want = np.where(np.arange(BATCH)[:, None] == 70, 0, 2 * want)
    assert slopes.dtype == jnp.bfloat16
    np.testing.assert_allclose(slopes.astype(np.float64), want, rtol=2**-7, atol=1e-5)
    want = scores + 1 + with_layer * np.log1p(np.exp(-4 * np.abs(scores)))
    want = np.where(inside, want, 0).reshape(BATCH, -1, COLUMNS).sum(2).T
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-4)


def test_normalise(run_program):
    h, kernel, bias, scale, _, listed = make()
    bias = bias.at[256:512].set(-jnp.inf)  # the second tile: all denied
    # Of 64 rows: no labels in the first tile, none in a half of the last one.
    listed[:, :512] = False
    listed[:64, 512:576] = False

    def call(h, kernel, bias, scale, *words):
        known = mosaic.no_scores(BATCH)
        for start, mine in zip(range(0, ITEMS, 256), words, strict=True):
            known = mosaic.normalise(
                *(h, kernel, bias, scale, mine, known),
                start=start,
                size=256,
                limit=LIMIT,
            )
        return known

    words = [words_of(listed[:, i : i + 256], 0) for i in range(0, ITEMS, 256)]
    parts = run_program(call, h, kernel, bias, scale, *words)
    scores = exact_scores(h, kernel, bias, scale)
    scores[:, LIMIT:] = -np.inf
    largest = scores.max(1)
    np.testing.assert_allclose(parts[0].max(0), largest, rtol=2e-5, atol=2e-5)
    totals = (parts[1] * np.exp(parts[0] - largest)).sum(0)
    total = np.exp(scores - largest[:, None]).sum(1)
    np.testing.assert_allclose(totals, total, rtol=2e-5)
    np.testing.assert_array_equal(parts[2].sum(0), listed.sum(1))
    found = np.where(listed, scores, 0).sum(1)  # a label may be none of the items
    np.testing.assert_allclose(parts[3].sum(0), found, rtol=2e-5, atol=2e-5)


def test_small_odds_are_not_lost(run_program):
    h, kernel, *_, listed = make()

    def call(h, kernel, words):
        def function(scores, ones, listed, weights):
            odds = jnp.where(listed, 1e-9 * ones, 3e-9)
            return jnp.zeros_like(scores), odds, weights * scores

        size = {"start": START, "size": SIZE, "limit": ITEMS}
        weights = [jnp.ones(BATCH)]
        arguments = function, h, kernel, None, None, words, weights
        values, _ = mosaic.slopes(*arguments, **size)
        return values

    values = run_program(call, h, kernel, words_of(listed))
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
