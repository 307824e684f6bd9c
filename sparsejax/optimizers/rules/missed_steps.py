"""Many steps without a gradient at once, of rules that are linear in weight and trace.

With a gradient of zero a step of sgd, momentum or nesterov, or of decoupled weight
decay, takes a weight w and its trace m to a linear combination of both. Its coefficients
depend only on the learning rate. The coefficients of many steps are therefore computed
once for a row, not for each of its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

# Missed steps whose rates are worked out together; a power of two. Most rows have
# missed fewer.
_CHUNK = 256


class Linear(NamedTuple):
    """`w -> w + ww w + wm m`, `m -> mw w + mm m`.

    `ww` is small: added to 1 it would lose the digits that a thousand steps need.
    """

    ww: Any = 0.0
    wm: Any = 0.0
    mw: Any = 0.0
    mm: Any = 1.0

    def then(self, later: Linear) -> Linear:
        """This step followed by `later`."""
        return Linear(
            self.ww + later.ww + later.ww * self.ww + later.wm * self.mw,
            self.wm + later.ww * self.wm + later.wm * self.mm,
            later.mw + later.mw * self.ww + later.mm * self.mw,
            later.mw * self.wm + later.mm * self.mm,
        )


def constant(step: Linear, lag: Int[Array, "*rows"]) -> Linear:
    """`lag` steps that are all the same: the power of a matrix, by squaring.

    Args:
      step: Python floats, so that its powers are of double precision.
      lag: number of steps, 0 or more.
    """
    powers = []
    for _ in range(31):
        powers.append(step)
        step = step.then(step)
    powers_of_two = np.asarray(powers, np.float32)

    def bit(i, total):
        chosen = (lag >> i) & 1 == 1
        longer = total.then(Linear(*jnp.asarray(powers_of_two)[i]))
        return jax.tree.map(lambda a, b: jnp.where(chosen, a, b), longer, total)

    bits = 32 - lax.clz(jnp.max(lag, initial=0))
    return lax.fori_loop(0, bits, bit, _nothing(lag))


def changing(
    step: Callable[[jax.Array], Linear], lag: Int[Array, "*rows"], count: jax.Array
) -> Linear:
    """The `lag` steps before and including number `count`.

    Args:
      step: maps an array of step numbers to these steps.
      lag: number of steps, 0 or more.
      count: number of the last one.
    """

    place_in_chunk = jnp.arange(_CHUNK, dtype=jnp.int32)

    # The latest step comes first. A sum of 2^i steps is joined to the one before it.
    # `associative_scan` would need half the arithmetic, but take seconds to compile.
    def double(i, sums):
        later = jax.tree.map(lambda s: jnp.roll(s, 1 << i), sums)
        there = place_in_chunk >= 1 << i
        joined = sums.then(later)
        return jax.tree.map(lambda j, s: jnp.where(there, j, s), joined, sums)

    def chunk(i, carry):
        after, total = carry
        done = i * _CHUNK
        number = jnp.maximum(count - done - place_in_chunk, 1)
        steps = Linear(*(jnp.broadcast_to(c, number.shape) for c in step(number)))
        sums = lax.fori_loop(0, _CHUNK.bit_length() - 1, double, steps).then(after)
        position = lag - 1 - done
        here = (position >= 0) & (position < _CHUNK)
        total = jax.tree.map(
            lambda s, t: jnp.where(here, s.at[position].get(mode="clip"), t),
            sums,
            total,
        )
        return jax.tree.map(lambda s: s[-1], sums), total

    chunks = -(-jnp.max(lag, initial=0) // _CHUNK)
    start = _nothing(jnp.zeros((), jnp.int32)), _nothing(lag)
    return lax.fori_loop(0, chunks, chunk, start)[1]


def _nothing(like: jax.Array) -> Linear:
    return Linear(*(jnp.full(like.shape, value, jnp.float32) for value in Linear()))
