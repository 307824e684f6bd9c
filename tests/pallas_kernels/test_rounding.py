"""Random rounding: its bits compared with MurmurHash3 in plain Python, and its distribution."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.rounding import Noise, of_columns, of_rows, random_bits

LOW, HIGH = 1.0, 1 + 2**-7  # bfloat16 numbers beside each other


def murmur3(data: bytes, seed: int) -> int:
    """MurmurHash3_x86_32 of data that consists of whole words."""

    def rotated(x, by):
        return (x << by | x >> 32 - by) % 2**32

    value = seed
    for (word,) in struct.iter_unpack("<I", data):
        word = rotated(word * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        value = (rotated(value ^ word, 13) * 5 + 0xE6546B64) % 2**32
    value ^= len(data)
    value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
    value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
    return value ^ value >> 16


def bits(rows, columns, *, seed=1, step=3):
    """Random bits of `[rows, columns]`, from 0 to 2^16 - 1."""
    rows = jnp.arange(rows, dtype=jnp.int32)[:, None]
    columns = jnp.arange(columns, dtype=jnp.int32)[None]
    key = Noise(seed).key(step)
    return np.asarray(random_bits(of_rows(key, rows), of_columns(columns)))


def test_bits_are_those_of_murmur3():
    # Published: https://stackoverflow.com/a/31929528
    assert murmur3(b"\xff\xff\xff\xff", 0) == 0x76293B50
    assert murmur3(b"\x21\x43\x65\x87", 0x5082EDEE) == 0x2362F9DE
    for seed, step, row, column in [(0, 1, 2, 3), (-5, 10**6, 2**31 - 1, 1023)]:
        words = (np.array([seed, step, row, column]) % 2**32).astype("<u4")
        expected = murmur3(words[1:].tobytes(), int(words[0])) >> 16
        of_row = of_rows(Noise(seed).key(step), jnp.int32(row))
        got = random_bits(of_row, of_columns(jnp.int32(column)))
        assert int(got) == expected


@pytest.mark.parametrize("sign", [1, -1])
def test_expectation_stays(sign):
    """Also where the exponent changes between the neighbours, and far from 1."""
    rng = np.random.default_rng(0)
    pieces = [rng.uniform(LOW, HIGH, 9), [2 - 2**-9, 3e30, 1e-30, 1e-40, 0.1]]
    x = sign * np.concatenate(pieces).astype(np.float32)
    draws = 2**16
    many = jnp.broadcast_to(x, (draws, len(x)))
    got = np.asarray(Noise(7).rounded(many, 1), np.float64)
    below = (x.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    above = ((x.view(np.uint32) & 0xFFFF0000) + 2**16).view(np.float32)
    spacing = above.astype(np.float64) - below
    up = got != below
    np.testing.assert_array_equal(got, np.where(up, below + spacing, below))
    p = (x - below) / spacing
    deviation = (up.mean(axis=0) - p) / np.sqrt(p * (1 - p) / draws)
    assert np.abs(deviation).max() < 4


def test_what_bfloat16_has_stays():
    rng = np.random.default_rng(0)
    exact = rng.integers(0, 2**16, 10_000).astype(np.uint32) << 16
    more = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    x = np.concatenate([exact.view(np.float32), more])[:, None]
    got = np.asarray(Noise(7).rounded(jnp.asarray(x), 1), np.float32)
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))
    # No other NaN becomes a number.
    broken = lax.bitcast_convert_type(jnp.int32(0x7F800001), jnp.float32)
    assert jnp.isnan(Noise(7).rounded(jnp.full((99, 1), broken), 1)).all()


def chi_square(numbers, kinds: int) -> float:
    """The deviation of counts from equal counts, in standard deviations of random counts."""
    counts = np.bincount(numbers.ravel(), minlength=kinds)
    expected = numbers.size / kinds
    statistic = np.sum((counts - expected) ** 2) / expected
    return (statistic - (kinds - 1)) / np.sqrt(2 * (kinds - 1))


def test_bits_are_even_and_neighbours_independent():
    first = bits(512, 512)
    assert chi_square(first, 2**16) < 4
    neighbours = {
        "row": (first[1:], first[:-1]),
        "column": (first[:, 1:], first[:, :-1]),
        "diagonal": (first[1:, 1:], first[:-1, :-1]),
        "swapped": (first, first.T),
        "step": (bits(512, 512, step=4), first),
        "seed": (bits(512, 512, seed=2), first),
        "step and seed": (bits(512, 512, step=1, seed=3), first),
    }
    for name, (a, b) in neighbours.items():
        # The upper bits decide between neighbours that are far apart from x.
        pairs = (a >> 12) * 16 + (b >> 12)
        if name == "swapped":
            pairs = pairs[np.triu_indices(512, 1)]
        assert chi_square(pairs, 256) < 4, name
        assert chi_square((a ^ b) & 255, 256) < 4 or name == "swapped", name


def test_number_of_a_row_is_that_in_its_array():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 3, 2)), jnp.float32)
    whole = Noise(7).rounded(x, 5)
    np.testing.assert_array_equal(Noise(7).after(6).rounded(x[6:], 5), whole[6:])
    some = jnp.int32([3, 1])
    np.testing.assert_array_equal(Noise(7).rounded(x[some], 5, some), whole[some])
    # Columns of an array with more axes are those of `[rows, columns]`.
    flat = Noise(7).rounded(x.reshape(8, 6), 5)
    np.testing.assert_array_equal(whole.reshape(8, 6), flat)
    assert (Noise(7).rounded(x, 6) != whole).any()


def test_same_bits_where_compiled():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 40)), jnp.float32)
    compiled = jax.jit(lambda seed, step: Noise(seed).rounded(x, step))
    with jax.disable_jit():
        expected = Noise(7).rounded(x, 5)
    np.testing.assert_array_equal(compiled(jnp.int32(7), jnp.int32(5)), expected)


def test_small_steps_are_not_lost():
    """Rounded to nearest, ones stay ones for ever."""

    def moved(at_random):
        def step(i, w):
            new = w.astype(jnp.float32) - 1e-4
            return Noise(3).rounded(new, i) if at_random else new.astype(w.dtype)

        return lax.fori_loop(0, 1000, step, jnp.ones((32, 32), jnp.bfloat16))

    assert (moved(False) == 1).all()
    got = np.asarray(moved(True), np.float64)
    # Of each weight, a step of 2^-8 with probability 1e-4 / 2^-8.
    p = 1e-4 * 2**8
    deviation = 2**-8 * np.sqrt(1000 * p * (1 - p))
    assert abs(got.mean() - 0.9) < 4 * deviation / 32
    assert 0.8 < got.std() / deviation < 1.2
