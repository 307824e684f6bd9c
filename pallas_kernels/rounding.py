"""Random rounding of numbers to bfloat16 that does not change their expectation.

Rounded to nearest, a weight of 1 never changes by a step of 0.001: the next bfloat16 number
is 0.0078 away. Rounded at random, it changes by 0.0078 in about every eighth step. ::

    x between its neighbours a < b:    b with probability (x - a) / (b - a), else a

The 16 random bits of an element are a hash of (seed, step, row, column). So they do not depend
on the order of the work, on devices or on programs. The hash is MurmurHash3_x86_32
of the words (step, row, column) with that seed, by Austin Appleby, public domain:
https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp. It takes a dozen
operations on 32-bit integers, which XLA and Mosaic GPU both have.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32


class Noise(NamedTuple):
    """The random bits of an array or of some of its rows.

    Attributes:
      seed: int32, seed of the array.
      first_row: int32, number of the first of these rows in the array.
    """

    seed: jax.typing.ArrayLike
    first_row: jax.typing.ArrayLike = 0

    def after(self, rows: jax.typing.ArrayLike) -> Noise:
        """The noise for rows that start `rows` rows later."""
        return Noise(self.seed, self.first_row + rows)

    def key(self, step: jax.typing.ArrayLike) -> Int32[Array, ""]:
        """The key of a seed and a step, for `of_rows`."""
        seed, step = jnp.asarray(self.seed, jnp.int32), jnp.asarray(step, jnp.int32)
        return _joined(seed, _mixed(step))

    def rounded(
        self,
        x: Float32[Array, "*shape"],
        step: jax.typing.ArrayLike,
        rows: Int32[Array, "*rows"] | None = None,
    ) -> BFloat16[Array, "*shape"]:
        """Rounds `x` to bfloat16, with the random bits of this step.

        Args:
          x: rows of an array; a row is one element of the first axis.
          step: number of the step.
          rows: the number of each row; by default they are in order.
        """
        if rows is None:
            rows = jnp.arange(x.shape[0], dtype=jnp.int32)
        rows = jnp.asarray(self.first_row, jnp.int32) + rows
        rows = rows.reshape(-1, *[1] * (x.ndim - 1))
        columns = jnp.zeros((1,) * x.ndim, jnp.int32)
        for axis in range(1, x.ndim):
            shape = [1] * x.ndim
            shape[axis] = x.shape[axis]
            place = lax.broadcasted_iota(jnp.int32, shape, axis)
            columns = columns * x.shape[axis] + place
        return rounded(x, of_rows(self.key(step), rows), of_columns(columns))


def of_rows(
    key: Int32[Array, "..."], rows: Int32[Array, "*shape"]
) -> Int32[Array, "*shape"]:
    """The part of the random bits that depends on rows, computed from `Noise.key` and row
    numbers.
    """
    return _joined(key, _mixed(rows))


def of_columns(columns: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The part of the random bits that depends on columns, computed from column numbers."""
    return _mixed(columns)


def rounded(
    x: Float32[Array, "*shape"], rows: Int32[Array, "..."], columns: Int32[Array, "..."]
) -> BFloat16[Array, "*shape"]:
    """Rounds `x` at random; bfloat16 numbers, infinity and NaN do not change.

    Args:
      x: numbers.
      rows: `of_rows` of the rows' numbers, which can be broadcast to the shape of `x`.
      columns: `of_columns` of the columns' numbers, which can be broadcast like `rows`.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # The neighbour nearer to zero, or the other one if this carries into the upper half.
    carried = (bits + random_bits(rows, columns)) & _word(0xFFFF0000)
    carried = lax.bitcast_convert_type(carried, jnp.float32)
    # Infinity is a bfloat16 number. A NaN might carry into the sign bit.
    return jnp.where(jnp.isnan(x), x, carried).astype(jnp.bfloat16)


def random_bits(
    rows: Int32[Array, "..."], columns: Int32[Array, "..."]
) -> Int32[Array, "..."]:
    """16 random bits for each element, in the lower half of a word; see `rounded`."""
    value = _joined(rows, columns)
    # The hash function mixes in the length of the three words, 12 bytes.
    value = value ^ 12
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = value ^ _shifted(value, shift)
        value = value * _word(factor)
    # The hash's last step, `value ^= value >> 16`, does not change the upper half.
    return _shifted(value, 16)


def _mixed(word):
    """Mixes a word before it is joined to the hash."""
    return _rotated(word * _word(0xCC9E2D51), 15) * _word(0x1B873593)


def _joined(value, mixed):
    """Joins a mixed word to the hash."""
    return _rotated(value ^ mixed, 13) * 5 + _word(0xE6546B64)


def _rotated(word, by: int):
    return (word << by) | _shifted(word, 32 - by)


def _shifted(word, by: int):
    return lax.shift_right_logical(word, jnp.full_like(word, by))


def _word(bits: int) -> int:
    """The int32 number with these bits."""
    return bits - 2**32 if bits >= 2**31 else bits
