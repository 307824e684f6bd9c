"""Adam and related rules."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sparsejax.optimizers.rules.base import Rule, penalised, power
from sparsejax.optimizers.rules.missed_steps import Linear
from sparsejax.optimizers.rules.replay import Replay


@dataclasses.dataclass(frozen=True)
class _Moments(Rule):
    """Base class of rules that divide a mean gradient by the size of recent gradients; has their
    state.
    """

    elementwise = True
    shrinks_state = True
    moves_weights = True
    below_one = ("b1", "b2")
    positive = ("eps",)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        super().__post_init__()
        name, bound = self._bound
        if self.b1 >= bound:
            raise ValueError(
                f"b1 must be below {name}, got b1={self.b1}, b2={self.b2}: rows that "
                "are not touched would drift ever faster"
            )

    @property
    def _bound(self) -> tuple[str, float]:
        """The upper bound of `b1`: its formula and its value."""
        raise NotImplementedError

    def init(self, shape):
        return {
            "mu": jnp.zeros(shape, jnp.float32),
            "nu": jnp.zeros(shape, jnp.float32),
        }


@dataclasses.dataclass(frozen=True)
class _Squares(_Moments):
    """Base class of adam, adamw and lazy_adam, in which `nu` is a mean of squared gradients."""

    @property
    def _bound(self) -> tuple[str, float]:
        return "sqrt(b2)", math.sqrt(self.b2)

    @property
    def _replay(self) -> Replay:
        return Replay(self.b1, self.b2, self.eps)

    @property
    def table_lags(self) -> int:
        return self._replay.lags

    def dense(self):
        return optax.adamw(
            self.learning_rate,
            self.b1,
            self.b2,
            self.eps,
            weight_decay=self.weight_decay,
        )

    def lag_table(self, count, dtype):
        if not self.weight_decay:
            return self._replay.table(self.rate, count, None, dtype)
        lost = self.latest_missed(count, self.table_lags).ww.astype(dtype)
        table = self._replay.table(self.rate, count, 1 + lost[:-1], dtype)
        by_lag = jnp.concatenate([lost[:, None], table.by_lag], 1)
        return table._replace(by_lag=by_lag)

    def catch_up_by_table(self, w, state, numbers, shared):
        if self.weight_decay:
            w, numbers = w + numbers[0] * w, numbers[1:]
        of_mu, of_nu = numbers[0], numbers[1]
        mu, nu = state["mu"], state["nu"] * of_nu
        total = self._replay.sum_of(jnp.sqrt(nu), numbers[2:], shared)
        return w - mu * total, {"mu": mu * of_mu, "nu": nu}

    def catch_up(self, w, state, lag, count):
        mu, decay = state["mu"], self.weight_decay
        owed = self._replay.owed(mu, lag)
        root = jnp.sqrt(state["nu"])
        total = self._replay.repeated(root, lag, owed, count, self.rate, decay)
        if decay:
            lags = jnp.concatenate([lag - owed, lag], 1)
            lost = self.all_missed(lags, count).ww
            total = total + lost[:, :1] * total
            w = w + lost[:, 1:] * w
        state = {
            "mu": mu * power(self.b1, lag),
            "nu": state["nu"] * power(self.b2, lag),
        }
        return w - mu * total, state

    def numbers(self, count):
        return self.rate(count), 1 - self.b1**count, 1 - self.b2**count

    def step(self, w, state, gradient, numbers):
        rate, mu_total, nu_total = numbers
        mu = (1 - self.b1) * gradient + self.b1 * state["mu"]
        nu = (1 - self.b2) * jnp.square(gradient) + self.b2 * state["nu"]
        mean = mu / mu_total
        root = jnp.sqrt(nu / nu_total)
        update = penalised(mean / (root + self.eps), w, self.weight_decay)
        return w - rate * update, {"mu": mu, "nu": nu}

    def missed(self, rate):
        return Linear(ww=-rate * self.weight_decay)


@dataclasses.dataclass(frozen=True)
class adam(_Squares):
    """::

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        w -= learning_rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)    in step t

    Raises:
      ValueError: b1 is not below sqrt(b2).
    """


@dataclasses.dataclass(frozen=True)
class adamw(_Squares):
    """Like `adam`; each step also subtracts `learning_rate weight_decay w` from a weight.

    The decay is decoupled: it does not affect the moments.
    """

    takes_weight_decay = True
    weight_decay: float = dataclasses.field(default=1e-4, kw_only=True)


@dataclasses.dataclass(frozen=True)
class lazy_adam(adam):
    """Like `adam`, but a step does not change rows that it does not touch, or their moments.

    The results differ from Adam's. It is the rule of torch's SparseAdam, and of LazyAdam in
    TensorFlow Addons. Ordinary parameters have plain Adam.
    """

    shrinks_state = False
    moves_weights = False
    table_lags = 0

    def catch_up(self, w, state, lag, count):
        return w, state


# Number of missed steps of adamax that are repeated together.
_TOGETHER = 32


@dataclasses.dataclass(frozen=True)
class adamax(_Moments):
    """Adam with the largest recent gradient in place of the mean of squares.

    ::

        m = b1 m + (1 - b1) g
        u = max(b2 u, |g| + eps)
        w -= learning_rate (m / (1 - b1^t)) / u                        in step t

    Rows that a step does not touch are brought up to date by repeating the missed
    steps, with the defaults at most 159 of them. Further steps change less than
    rounding.

    Raises:
      ValueError: b1 is not below b2.
    """

    @property
    def _bound(self) -> tuple[str, float]:
        return "b2", self.b2

    def dense(self):
        return optax.adamax(self.learning_rate, self.b1, self.b2, self.eps)

    def catch_up(self, w, state, lag, count):
        mu, nu = state["mu"], state["nu"]
        # Rows that were never touched do not change, although their lag is the largest.
        moves = jnp.any(mu != 0, axis=1, keepdims=True)
        owed = jnp.where(moves, jnp.minimum(lag, self._steps), 0)
        first = count - lag

        def some(i, total):
            k = i * _TOGETHER + 1 + jnp.arange(_TOGETHER)[None]
            t = jnp.maximum(first + k, 1)
            factor = self.rate(t) * power(self.b1, k) / self._rest(t, nu.dtype)
            factor = jnp.where(k <= owed, factor, 0).astype(nu.dtype)
            shrunk = power(self.b2, k).astype(nu.dtype)
            for j in range(_TOGETHER):
                largest = jnp.maximum(nu * shrunk[:, j : j + 1], self.eps)
                total = total + factor[:, j : j + 1] / largest
            return total

        rounds = -(-jnp.max(owed, initial=0) // _TOGETHER)
        total = lax.fori_loop(0, rounds, some, jnp.zeros_like(nu))
        state = {
            "mu": mu * power(self.b1, lag),
            "nu": jnp.maximum(
                nu * power(self.b2, lag), jnp.where(lag > 0, self.eps, 0)
            ),
        }
        return w - mu * total, state

    def numbers(self, count):
        return self.rate(count), 1 - self.b1**count

    def step(self, w, state, gradient, numbers):
        rate, total = numbers
        mu = (1 - self.b1) * gradient + self.b1 * state["mu"]
        nu = jnp.maximum(self.b2 * state["nu"], jnp.abs(gradient) + self.eps)
        return w - rate * (mu / total / nu), {"mu": mu, "nu": nu}

    @property
    def _steps(self) -> int:
        """The number of missed steps that matter: each moves a weight by at most b1 / b2 of the
        previous one.
        """
        if not self.b1:
            return 0
        return math.ceil(math.log(2**-24) / math.log(self.b1 / self.b2))

    def _rest(self, t: jax.Array, dtype) -> jax.Array:
        """Computes `1 - b1^t` without cancellation."""
        log = math.log(self.b1) if self.b1 else -math.inf
        return -jnp.expm1(t.astype(dtype) * log)
