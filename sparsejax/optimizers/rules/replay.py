"""Catches up a row with the steps that it has missed under Adam, without repeating them.

In a missed step t, the k-th after step s, the gradient is zero. It moves a weight by::

    m f_k / (sqrt(v) d_k + eps)      f_k = rate_t b1^k / (1 - b1^t),  d_k^2 = b2^k / (1 - b2^t)

where m and v are the moments after step s. The sum of many such steps has no closed form. But
each term is a smooth function of `log d`, whatever the moments are: its nearest poles are at a
distance of pi. So all steps t of the last five hundred share a few values D_j of d, and
polynomial interpolation distributes each step over these values::

    sum over k of f_k / (sqrt(v) d_k + eps)  =  sum over j of F_j / (sqrt(v') D_j + eps)

`v' = b2^lag v` is the moment brought up to date, so the D_j are common to all rows. The F_j
depend on the lag only: `Replay.table` has them for all lags, and is made once a step. Few rows
have missed more steps than the table has; `Replay.repeated` repeats their steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from sparsejax.ops.implementations import computed_once
from sparsejax.ops.row_update import LagTable

# Numbers of nodes D_j. With 14 the sums are exact to 1e-8, also in the first five hundred steps,
# in which `1 - b2^t` changes much. With 7 they are exact to 1e-9 if `log d` has a range of at most
# 0.9.
_MANY, _FEW, _NARROW = 14, 7, 0.9
# Number of lags in a table, a power of 2. Over these lags, b2 alone gives `log d` a range of at
# most 1.3.
_MOST_LAGS, _RANGE = 512, 1.3
_BLOCK = 128  # number of lags in a block
# Number of missed steps that are repeated together.
_TOGETHER = 32


@dataclasses.dataclass(frozen=True)
class Replay:
    """How rows catch up with missed steps of Adam.

    Attributes:
      b1: factor that shrinks the first moment.
      b2: factor that shrinks the second moment.
      eps: number added to the root of the second moment.
      ahead: step t divides by `1 - b1^(t + ahead)`.
    """

    b1: float
    b2: float
    eps: float
    ahead: int = 0

    @property
    def steps(self) -> int:
        """The number of missed steps that count; further steps change less than rounding.

        A missed step moves a weight by about `(b1 / sqrt(b2))^k` of the first one, as
        the first moment shrinks with b1 and the root of the second with sqrt(b2). So
        this share of the whole movement is left after k steps, and it falls below
        float32's half eps, 2^-24, after 159 steps at the defaults.
        """
        if self.b1 == 0:
            return 0
        return math.ceil(math.log(2**-24) / math.log(self.b1 / math.sqrt(self.b2)))

    @property
    def lags(self) -> int:
        """The largest lag of the table."""
        fits = max(1, int(2 * _RANGE / -math.log(self.b2)))
        return min(_MOST_LAGS, 1 << (fits.bit_length() - 1))

    def owed(self, moment: jax.Array, lag: jax.Array) -> jax.Array:
        """The number of missed steps, for each row, that must be applied.

        It is 0 for rows that were never touched: their lag is the largest, but they have no
        moment.
        """
        moves = jnp.any(moment != 0, axis=1, keepdims=True)
        return jnp.where(moves, jnp.minimum(lag, self.steps), 0)

    def table(
        self,
        rate: Callable[[jax.Array], Any],
        count: jax.Array,
        kept: Float[Array, "lags"] | None,
        dtype: DTypeLike,
    ) -> LagTable:
        """The table after `count` steps.

        Args:
          rate: function that returns the learning rate of a step (from 1).
          count: number of steps.
          kept: for 0, 1, ... of the latest steps, the fraction of a weight that remains after
            their weight decay; None if there is no decay.
          dtype: float32, or float64.

        Returns:
          `by_lag` has for each lag `b1^lag`, `b2^lag` and the F_j. `shared` has the D_j, then
          1 if only the first seven are used, else 0.
        """
        lags = self.lags
        i = np.arange(lags)  # number of steps before the last one
        t = jnp.asarray(count, jnp.int32) - jnp.asarray(i, jnp.int32)
        number = jnp.maximum(t, 1)
        factor = jnp.asarray(rate(number), dtype) / self._rest(self.b1, number, dtype)
        factor = jnp.where(t >= 1, factor, 0)
        if kept is not None:
            factor = factor * kept
        # Rounded to float32, because the dense rule multiplies by these numbers in each step.
        shrunk = np.array([self.b1, self.b2], np.float32).astype(np.float64)
        half = jnp.asarray(-0.5 * math.log(shrunk[1]) * i, dtype)
        log_d = half - 0.5 * jnp.log(self._rest(self.b2, number, dtype))
        high = jnp.max(jnp.where(t >= 1, log_d, log_d[0]))
        middle, radius = (high + log_d[0]) / 2, (high - log_d[0]) / 2
        x = (log_d - middle) / jnp.maximum(radius, 1e-6)
        x = jnp.minimum(jnp.maximum(x, -1), 1)
        # Chebyshev polynomials at each step, times a factor that is divided out at the nodes
        # below. With this factor, the interpolation is equally exact at both ends.
        base = [factor * jnp.exp(-log_d / 2)]
        base.append(base[0] * x)
        while len(base) < _MANY:
            base.append(computed_once(2 * x * base[-1] - base[-2]))
        sums = self._shrinking_sums(jnp.stack(base, 1))
        few = 2 * radius <= _NARROW
        to_nodes = jnp.where(few, _interpolation(_FEW), _interpolation(_MANY))
        places = jnp.where(few, _places(_FEW), _places(_MANY))
        nodes = jnp.exp((middle + radius * places).astype(dtype))
        weights = jnp.dot(sums, to_nodes.astype(dtype), precision=lax.Precision.HIGHEST)
        weights = jnp.pad(weights * jnp.sqrt(nodes)[None], ((1, 0), (0, 0)))
        lag = np.arange(lags + 1)[:, None]
        powers = shrunk[None] ** lag
        by_lag = jnp.concatenate([jnp.asarray(powers, dtype), weights], 1)
        return LagTable(by_lag, jnp.append(nodes, few.astype(dtype)))

    def sum_of(
        self, root: jax.Array, weights: Sequence[jax.Array], shared: Sequence[jax.Array]
    ) -> jax.Array:
        """The factor of `m`: the sum over the missed steps, from the table.

        Args:
          root: square root of the second moments, brought up to date.
          weights: the row's `F_j`.
          shared: the table's numbers that apply to all rows.
        """

        def terms(first, last):
            return sum(
                weights[j] / (root * shared[j] + self.eps) for j in range(first, last)
            )

        total, few = terms(0, _FEW), shared[_MANY]
        return lax.cond(few <= 0, lambda: total + terms(_FEW, _MANY), lambda: total)

    def repeated(
        self,
        root: jax.Array,
        lag: jax.Array,
        owed: jax.Array,
        count: jax.Array,
        rate: Callable[[jax.Array], Any],
        weight_decay: float,
    ) -> jax.Array:
        """The factor of `m`, summed step by step, for any lag.

        Args:
          root: `[rows, hidden]`, square root of the second moments after the row's last
            step.
          lag: `[rows, 1]`, number of missed steps.
          owed: `[rows, 1]`, number of these steps to repeat.
          count: number of steps done, including the missed ones.
          rate: function that returns the learning rate of a step.
          weight_decay: factor of the weight decay.
        """
        dtype, start = root.dtype, count - lag
        place = np.arange(1, _TOGETHER + 1)[None]
        of_b1, of_b2 = (
            jnp.asarray(np.float64(base) ** place, dtype) for base in (self.b1, self.b2)
        )

        def some(i, total):
            first = i * _TOGETHER
            k = first + jnp.asarray(place, jnp.int32)
            number = jnp.broadcast_to(start + k, (start.shape[0], _TOGETHER))
            before = jnp.asarray(first, dtype)
            rates = jnp.asarray(rate(number), dtype)
            shrunk = jnp.exp(before * _log(self.b1)) * of_b1
            factor = rates * shrunk / self._rest(self.b1, number, dtype)
            factor = jnp.where(k <= owed, factor, 0).astype(dtype)
            shrunk = jnp.exp(before * _log(self.b2)) * of_b2
            d = jnp.sqrt(shrunk / self._rest(self.b2, number, dtype))
            decay = jnp.where(k <= owed, rates * weight_decay, 0)
            for j in range(_TOGETHER):
                if weight_decay:
                    total = total - decay[:, j : j + 1] * total
                total = total + factor[:, j : j + 1] / (
                    root * d[:, j : j + 1] + self.eps
                )
            return total

        rounds = -(-jnp.max(owed, initial=0) // _TOGETHER)
        return lax.fori_loop(0, rounds, some, jnp.zeros_like(root))

    def _rest(self, base: float, number: jax.Array, dtype: DTypeLike) -> jax.Array:
        """`1 - base^(number + ahead)`, computed without cancellation if base is nearly 1."""
        return -jnp.expm1((number + self.ahead).astype(dtype) * _log(base))

    def _shrinking_sums(self, terms: Float[Array, "lags n"]) -> jax.Array:
        """`sum over i < l of b1^(l - i) terms[i]` for l from 1.

        It is computed by matrix products: XLA would fuse passes over the terms, and repeat them.
        """
        if not self.b1:
            return jnp.zeros_like(terms)
        lags, n = terms.shape
        size = min(_BLOCK, lags)
        i, block = np.arange(size), np.arange(lags // size)

        def power(exponents):
            return jnp.asarray(
                np.where(exponents > 0, self.b1 ** np.maximum(exponents, 0.0), 0),
                terms.dtype,
            )

        times = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        within = power(i[:, None] - i[None] + 1)
        sums = times("ik,bkn->bin", within, terms.reshape(-1, size, n))
        # The sums of earlier blocks, shrunk by the steps since then. The latest of these is not
        # shrunk yet.
        shrunk = power((block[:, None] - block[None] - 1) * size + 1) / self.b1
        before = times("bc,cn->bn", shrunk, sums[:, -1])
        sums = sums + power(i + 1)[None, :, None] * before[:, None]
        return sums.reshape(lags, n)


def _log(base: float) -> float:
    return math.log(base) if base else -math.inf


def _places(count: int) -> np.ndarray:
    """Chebyshev nodes; the last one is repeated as padding."""
    points = np.cos((np.arange(count) + 0.5) * np.pi / count)
    return np.pad(points, (0, _MANY - count), mode="edge")


def _interpolation(count: int) -> np.ndarray:
    """The matrix that converts sums of Chebyshev polynomials to weights of the points."""
    degree, place = np.arange(count)[:, None], np.arange(count) + 0.5
    matrix = np.cos(degree * place * np.pi / count) * (2 / count)
    matrix[0] /= 2
    return np.pad(matrix, (0, _MANY - count))
