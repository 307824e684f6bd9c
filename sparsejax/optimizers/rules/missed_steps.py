"""Applies many steps with zero gradients at once, for rules that are linear in weight and trace.

With a gradient of zero a step of sgd, momentum or nesterov, or of decoupled weight
decay, maps a weight w and its trace m to linear combinations of both. The coefficients
depend only on the learning rate. So the coefficients of many steps are
computed once for a row, not for each of its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from sparsejax.ops.implementations import computed_once

# Number of missed steps whose rates are computed together; a power of 2. Most rows have
# missed fewer.
_CHUNK = 256
# Number of lags in a table, see `Rule.lag_table`.
TABLE = 512


class Linear(NamedTuple):
    """`w -> w + ww w + wm m`, `m -> mw w + mm m`.

    `ww` is small: if 1 were added to it, digits that a thousand steps need would be lost.
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
    """`lag` equal steps: a product of powers, one for each byte of `lag`.

    Args:
      step: one step; Python floats, so that its powers have double precision.
      lag: number of steps, 0 or more.
    """
    total, unit = None, step
    for byte in range(4):
        powers = _powers(unit, 256 if byte < 3 else 128)
        digit = (lag >> 8 * byte) & 255
        chosen = Linear(*jnp.moveaxis(jnp.asarray(powers, jnp.float32)[digit], -1, 0))
        total = chosen if total is None else total.then(chosen)
        unit = Linear(*powers[-1].tolist()).then(unit)  # the combination of 256 steps
    assert total is not None
    return total


def latest(
    step: Linear | Callable[[jax.Array], Linear], count: jax.Array, most: int
) -> Linear:
    """The last 0, 1, ..., `most` steps combined, up to and including step `count`.

    Args:
      step: a step, if all are equal, or a function of a step's number.
      count: number of the last step.
      most: largest number of steps, a power of 2.
    """
    if isinstance(step, Linear):
        return Linear(*jnp.asarray(_powers(step, most + 1).T, jnp.float32))
    place = jnp.arange(most, dtype=jnp.int32)
    steps = step(jnp.maximum(count - place, 1))
    sums = _running(Linear(*(jnp.broadcast_to(c, (most,)) for c in steps)))
    before = _nothing(jnp.zeros(1))
    return Linear(*(jnp.append(b, s) for b, s in zip(before, sums, strict=True)))


def _powers(step: Linear, count: int) -> np.ndarray:
    """The step applied 0, 1, ..., times: `[count, 4]` float64."""
    sums, width = np.array([Linear()], np.float64), 1
    last = Linear(*map(np.float64, step))  # the combination of `width` steps
    with np.errstate(over="ignore", invalid="ignore"):
        while width < count:
            sums = np.concatenate([sums, np.stack(Linear(*sums.T).then(last), 1)])
            width, last = 2 * width, last.then(last)
    return sums[:count]


def _running(steps: Linear) -> Linear:
    """The combinations of the latest 1, 2, ... of these steps. The steps are in descending order.

    `associative_scan` would need half the arithmetic, but takes seconds to compile.
    """
    size, width, sums = len(steps.ww), 1, steps
    while width < size:
        # Doubling: a combination of `width` steps is joined to the `width` steps before it.
        later = Linear(*(jnp.roll(s, width) for s in sums))
        there = np.arange(size) >= width
        joined = zip(sums.then(later), sums, strict=True)
        sums = computed_once(Linear(*(jnp.where(there, j, s) for j, s in joined)))
        width *= 2
    return sums


def changing(
    step: Callable[[jax.Array], Linear], lag: Int[Array, "*rows"], count: jax.Array
) -> Linear:
    """The last `lag` steps combined, up to and including step `count`.

    Args:
      step: function that maps an array of step numbers to these steps.
      lag: number of steps, 0 or more.
      count: number of the last step.
    """
    place_in_chunk = jnp.arange(_CHUNK, dtype=jnp.int32)

    def chunk(i, carry):
        after, total = carry
        done = i * _CHUNK
        number = jnp.maximum(count - done - place_in_chunk, 1)
        steps = Linear(*(jnp.broadcast_to(c, number.shape) for c in step(number)))
        sums = _running(steps).then(after)
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
