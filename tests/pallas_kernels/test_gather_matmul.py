"""The GPU program of gather_matmul compared with float64: interpreted on a CPU, and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import tolerance

from pallas_kernels.gather_matmul import default_config, gather_matmul
from pallas_kernels.row_sums import Config, entries_for

SMALL = Config(entries=8, unroll=4, chunk=128)  # many programs from few entries


def narrow(threads: int) -> Config:
    """A configuration for rows that are read by `threads` lanes."""
    return dataclasses.replace(SMALL, threads=threads)


# Rows within a program, over one end of a range and over several, empty rows of all
# places, single entries.
LENGTHS = [0, 3, 0, 20, 1, 1, 0, 0, 0, 9, 40, 2, 8, 0]


@pytest.fixture
def run(running):
    """Calls the GPU program, and fails if it has a race."""

    def call(data, indices, indptr, w, num_cols, config=SMALL):
        # Programs that share columns write the same there, which counts as a race.
        shared = w.shape[1] > 128 and w.shape[1] % 128 > 0 and config == SMALL
        with running(detect_races=not shared):
            jitted = jax.jit(gather_matmul, static_argnums=4, static_argnames="config")
            y = jitted(data, indices, indptr, w, num_cols, config=config)
            return np.asarray(y).astype(np.float64)

    return call


def make(lengths, num_cols, *, valued=False, padding=5, seed=0):
    """Draws data, indices and indptr; padding has invalid values."""
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    count = indptr[-1]
    indices = rng.integers(0, num_cols, count + padding).astype(np.int32)
    indices[count:] = 2**31 - 1
    data = None
    if valued:
        data = rng.standard_normal(count + padding, np.float32)
        data[count:] = np.nan
    return data, indices, indptr


def weights(rows, hidden, dtype=np.float32):
    w = np.random.default_rng(1).standard_normal((rows, hidden), np.float32)
    return jnp.asarray(w, dtype)


def close(actual, expected, dtype, terms):
    bound = tolerance(dtype, terms)
    np.testing.assert_allclose(actual, expected, rtol=bound["rtol"], atol=bound["atol"])


def oracle(data, indices, indptr, w):
    w = np.asarray(w).astype(np.float64)
    y = np.zeros((len(indptr) - 1, w.shape[1]))
    for r in range(len(y)):
        row = slice(indptr[r], indptr[r + 1])
        values = 1 if data is None else data[row, None].astype(np.float64)
        y[r] = (values * w[indices[row]]).sum(0)
    return y


@pytest.mark.parametrize(
    ("hidden", "dtype", "valued", "config"),
    [
        (256, np.float32, False, SMALL),
        (40, jnp.bfloat16, True, SMALL),
        (200, jnp.bfloat16, False, SMALL),
        (333, np.float32, True, SMALL),
        (24, np.float32, True, narrow(2)),
        (16, np.float32, True, dataclasses.replace(narrow(4), period=12)),
        (8, jnp.bfloat16, False, narrow(1)),
        *[
            pytest.param(hidden, np.float32, True, narrow(n), marks=pytest.mark.gpu)
            for hidden, n in ((8, 2), (16, 4), (64, 16), (64, 4), (88, 8), (128, 32))
        ],
    ],
)
def test_equals_float64(run, hidden, dtype, valued, config):
    x = make(LENGTHS, 17, valued=valued)
    w = weights(20, hidden, dtype).at[17:].set(np.nan)  # rows that are never read
    y = run(*x, w, 17, config)
    close(y, oracle(*x, w), dtype, max(LENGTHS))


@pytest.mark.parametrize(
    ("lengths", "padding", "hidden"),
    [
        ([0] * 10, 200, 128),
        ([1] * 30, 200, 128),
        ([1] * 30, 0, 16),  # where rows of one length are expected, and found
        ([2, *[1] * 19, 0, *[1] * 5, 0, 0, 3], 0, 16),  # and not found
        ([100], 200, 128),
        ([100], 200, 16),
        ([0] * 200 + [70, 1] + [0] * 90, 200, 128),
    ],
)
def test_awkward_lengths(run, lengths, padding, hidden):
    x = make(lengths, 9, padding=padding)
    w = weights(9, hidden)
    config = SMALL if hidden == 128 else narrow(4)
    close(run(*x, w, 9, config), oracle(*x, w), np.float32, 100)


def test_bad_entries_are_nan_in_their_row_only(run):
    _, indices, indptr = make(LENGTHS, 17)
    w = weights(20, 128)
    bad_rows = [1, 4, 10, 12]
    for row, index in zip(bad_rows, [17, -1, 2**31 - 1, -(2**31)], strict=True):
        indices[indptr[row + 1] - 1] = index
    y = run(None, indices, indptr, w, 17)
    expected = np.zeros(len(LENGTHS), bool)
    expected[bad_rows] = True
    np.testing.assert_array_equal(np.isnan(y).all(1), expected)
    np.testing.assert_array_equal(np.isnan(y).any(1), expected)


@pytest.mark.parametrize("nse", [70, 3])  # of 84
def test_rows_that_do_not_fit_are_nan(run, nse):
    _, indices, indptr = make(LENGTHS, 17, padding=0)
    w = weights(17, 128)
    y = run(None, indices[:nse], indptr, w, 17)
    fits = indptr[1:] <= nse
    assert np.isnan(y[~fits]).all()
    exact = oracle(None, indices, indptr, w)
    close(y[fits], exact[fits], np.float32, 40)


def test_nothing_to_read(run):
    none = np.zeros(0, np.int32)
    y = run(None, none, np.array([0, 0, 2], np.int32), weights(3, 8), 3)
    np.testing.assert_array_equal(y, [[0] * 8, [np.nan] * 8])


@pytest.mark.parametrize(
    ("hidden", "dtype", "valued"),
    [
        (128, jnp.float32, False),
        (384, jnp.bfloat16, True),
        (1024, jnp.float32, False),
        (100, jnp.bfloat16, True),
        (130, jnp.bfloat16, False),
        (201, jnp.float32, True),
        (8, jnp.float32, False),
        (24, jnp.bfloat16, True),
        (64, jnp.float32, True),
    ],
)
def test_lowers_for_cuda(hidden, dtype, valued):
    shape = jax.ShapeDtypeStruct
    data = shape((1000,), jnp.float32) if valued else None
    integers = shape((1000,), jnp.int32), shape((51,), jnp.int32)
    jitted = jax.jit(gather_matmul, static_argnums=4)
    traced = jitted.trace(data, *integers, shape((20, hidden), dtype), 17)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def test_errors():
    indices, indptr = jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32)
    w = jnp.zeros((4, 128))
    with pytest.raises(ValueError, match="num_cols is 5 but w has 4 rows"):
        gather_matmul(None, indices, indptr, w, 5)
    with pytest.raises(ValueError, match="float32 or bfloat16, got float16"):
        gather_matmul(None, indices, indptr, w.astype(jnp.float16), 4)
    with pytest.raises(ValueError, match="int32, got int8"):
        gather_matmul(None, indices.astype(jnp.int8), indptr, w, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [8, 16, 64, 88, 128, 256, 1000, 1024])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_real_sizes_and_the_same_bits_again(hidden, dtype):
    rng = np.random.default_rng(3)
    lengths = [100_000, *rng.integers(0, 300, 500), *[0] * 999, *[1] * 5000]
    x = make(lengths, 5000, valued=True)
    w = weights(5000, hidden, dtype)
    jitted = jax.jit(gather_matmul, static_argnums=4)
    y = np.asarray(jitted(*x, w, 5000))
    error = y.astype(np.float64) - oracle(*x, w)
    some = tolerance(dtype, 100_000)["atol"]
    assert np.abs(error).max() < some
    for _ in range(3):
        np.testing.assert_array_equal(y, np.asarray(jitted(*x, w, 5000)))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    rows, hidden = 8_500_000, 256
    x = make([5, 0, 700, 30], rows)
    x[1][:3] = [rows - 1, 0, 2**31 // hidden]
    w = jax.jit(lambda: jax.random.normal(jax.random.key(0), (rows, hidden)))()
    y = jax.jit(gather_matmul, static_argnums=4)(*x, w, rows)
    used = np.unique(x[1][: x[2][-1]])
    place = np.searchsorted(used, x[1][: x[2][-1]])
    exact = oracle(None, place, x[2], w[jnp.asarray(used)])
    close(y, exact, np.float32, 700)
    assert default_config(hidden, 4, 735).entries < 700  # so a row was cut


def test_a_small_batch_has_short_programs():
    assert [entries_for(nse, 4096) for nse in (1, 4096 * 16, 4096 * 63, 4096 * 64)] == [
        8,
        16,
        32,
        64,
    ]
    assert entries_for(4096, 8192, most=4) == 4
