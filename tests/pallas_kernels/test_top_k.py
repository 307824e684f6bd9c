"""The GPU programs of `top_k` against float64: interpreted on a CPU, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import output_loss, top_k

BATCH, ITEMS, HIDDEN = 128, 768, 128
# The second chunk of 256 items, of which the last 6 do not count.
START, SIZE, LIMIT = 256, 512, 762


def make(with_all, hidden=HIDDEN):
    """h, kernel, bias, scale, words, and the scores."""
    rng = np.random.default_rng(0)
    h, kernel = (
        jnp.asarray(rng.standard_normal((rows, hidden)) / 4, jnp.bfloat16)
        for rows in (BATCH, ITEMS)
    )
    h = h.at[3, 5].set(jnp.nan)
    want = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64).T
    extras = None, None, None
    if with_all:
        bias, scale = (jnp.float32(rng.standard_normal(ITEMS)) for _ in range(2))
        bias = bias.at[400:404].set(-jnp.inf)
        listed = rng.random((BATCH, ITEMS)) < 0.1
        listed[64:, START : START + 128] = False  # a tile without any
        listed[5] = True
        rows, columns = map(jnp.asarray, np.nonzero(listed))
        place = rows, columns - START, BATCH, SIZE
        words = output_loss.label_words(*place, counted=True)
        extras = bias, scale, words
        want = want * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)
        want[listed | np.isinf(np.asarray(bias))] = -np.inf
    want[:, LIMIT:] = -np.inf
    return h, kernel, *extras, want[:, START : START + SIZE]


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize("with_all", [False, True])
def test_maxima(run_program, with_all, with_scores):
    *operands, want = make(with_all)

    def call(*operands):
        size = {"start": START, "size": SIZE, "limit": LIMIT}
        return top_k.maxima(*operands, **size, with_scores=with_scores)

    maxima, more = run_program(call, *operands)
    if with_scores:
        np.testing.assert_allclose(more, want, rtol=1e-5, atol=1e-5)
        # Of the scores themselves, to the bit.
        want = more.reshape(BATCH, -1, top_k.GROUP).max(2)
        np.testing.assert_array_equal(maxima, want)
        return
    want = want.reshape(BATCH, -1, top_k.GROUP).max(2)
    np.testing.assert_allclose(maxima, want, rtol=1e-5, atol=1e-5)
    want = maxima.reshape(BATCH, -1, top_k.BLOCK // top_k.GROUP).max(2)
    np.testing.assert_array_equal(more, want)


def test_label_bits():
    rng = np.random.default_rng(0)
    listed = rng.random((5, SIZE)) < 0.3
    rows, columns = map(jnp.asarray, np.nonzero(listed))
    words = output_loss.label_words(rows, columns, 5, SIZE)
    columns = rng.integers(0, SIZE, (5, 40)).astype(np.int32)
    got = top_k.has_label(words, jnp.asarray(columns))
    np.testing.assert_array_equal(got, np.take_along_axis(listed, columns, 1))


@pytest.mark.parametrize(("hidden", "with_all"), [(192, True), (256, False)])
def test_scores_of_groups(run_program, hidden, with_all, monkeypatch):
    if with_all:  # two programs a row
        monkeypatch.setattr(top_k, "num_programs", lambda: 20)
    h, kernel, *extras, want = make(with_all, hidden)
    batch, count = 11, 6
    rng = np.random.default_rng(2)
    groups = rng.integers(0, SIZE // top_k.GROUP, (batch, count))
    groups[:, 0] = SIZE // top_k.GROUP - 1

    def call(*operands):
        return top_k.scores_of_groups(*operands, start=START, limit=LIMIT)

    got = run_program(call, h, kernel, *extras, jnp.asarray(groups, jnp.int32))
    places = groups[:, :, None] * top_k.GROUP + np.arange(top_k.GROUP)
    want = np.take_along_axis(want[:batch], places.reshape(batch, -1), axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("with_all", [False, True])
@pytest.mark.parametrize("hidden", [64, 192, 256, 1024])
def test_both_programs_make_the_same_bits(hidden, with_all):
    rng = np.random.default_rng(3)
    h, kernel, bias, scale, words, _ = make(with_all, hidden)
    # Sums that depend on the order.
    h, kernel = (
        x * jnp.asarray(2.0 ** rng.integers(-8, 9, x.shape), jnp.bfloat16)
        for x in (h, kernel)
    )
    groups = np.tile(np.arange(SIZE // top_k.GROUP, dtype=np.int32), (BATCH, 1))
    groups = jnp.asarray(rng.permuted(groups, axis=1))
    options = {"start": START, "limit": LIMIT}

    def call(h, kernel, bias, scale, words):
        layer = h, kernel, bias, scale, words
        again = top_k.scores_of_groups(*layer, groups, **options)
        made = [
            top_k.maxima(*layer, **options, size=SIZE, with_scores=x)[0]
            for x in (False, True)
        ]
        return again.reshape(BATCH, -1, top_k.GROUP).max(2), *made

    got, *wanted = jax.jit(call)(h, kernel, bias, scale, words)
    for want in wanted:
        want = np.take_along_axis(np.asarray(want), np.asarray(groups), axis=1)
        np.testing.assert_array_equal(got, want)
