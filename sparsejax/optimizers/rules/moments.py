"""Adam and related rules."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import optax
from jax import lax

from sparsejax.optimizers.rules.base import (
    Rule,
    check_below_one,
    check_positive,
    penalised,
    power,
)
from sparsejax.optimizers.rules.missed_steps import Linear


@dataclasses.dataclass(frozen=True)
class _Moments(Rule):
    """What adam and related rules have in common."""

    elementwise = True
    shrinks_state = True
    moves_weights = True
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        super().__post_init__()
        check_below_one(b1=self.b1, b2=self.b2)
        check_positive(eps=self.eps)
        if self.b1**2 >= self.b2:
            raise ValueError(
                f"b1 must be below sqrt(b2), got b1={self.b1}, b2={self.b2}: rows that "
                "are not touched would drift ever faster"
            )

    @property
    def max_replay(self) -> int:
        """Missed steps that are replayed; what further ones add is lost in rounding.

        A missed step moves a weight by about `(b1 / sqrt(b2))^k` of the first one, as
        the first moment shrinks with b1 and the root of the second with sqrt(b2). So
        this share of the whole movement is left after k steps, and it falls below
        float32's half eps, 2^-24, after 159 steps at the defaults.
        """
        if self.b1 == 0:
            return 0
        ratio = self.b1 / math.sqrt(self.b2)
        return math.ceil(math.log(2**-24) / math.log(ratio))

    def dense(self):
        return optax.adamw(
            self.learning_rate,
            self.b1,
            self.b2,
            self.eps,
            weight_decay=self.weight_decay,
        )

    def init(self, shape):
        return {
            "mu": jnp.zeros(shape, jnp.float32),
            "nu": jnp.zeros(shape, jnp.float32),
        }

    def catch_up(self, w, state, lag, count):
        mu, root = state["mu"], jnp.sqrt(state["nu"])
        start = count - lag
        # Rows that were never touched, whose lag is the longest, have nothing to replay.
        moves = jnp.any(mu != 0, axis=1, keepdims=True)
        owed = jnp.where(moves, jnp.minimum(lag, self.max_replay), 0)

        # Of the weights' type, even if 64-bit types are enabled.
        b1, b2 = jnp.asarray(self.b1, w.dtype), jnp.asarray(self.b2, w.dtype)

        # In the k-th missed step, number start + k, the moments are mu b1^k and
        # nu b2^k. So all missed steps together need one root, and each one division.
        def missed(k, total):
            k = k + 1
            rate = self.rate(start + k)
            factor = rate * b1**k / (1 - b1 ** (start + k))
            factor = jnp.where(k <= owed, factor, 0).astype(w.dtype)
            shrink = jnp.sqrt(b2**k / (1 - b2 ** (start + k)))
            if self.weight_decay:
                decay = jnp.where(k <= owed, rate * self.weight_decay, 0)
                total = total - decay * total
            return total + factor / (root * shrink + self.eps)

        total = lax.fori_loop(0, jnp.max(owed), missed, jnp.zeros_like(w))
        if self.weight_decay:
            total = total + self.all_missed(lag - owed, count).ww * total
            w = w + self.all_missed(lag, count).ww * w
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
class adam(_Moments):
    """::

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        w -= learning_rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)    in step t

    Raises:
      ValueError: b1 is not below sqrt(b2).
    """


@dataclasses.dataclass(frozen=True)
class adamw(_Moments):
    """As `adam`, and each step also takes `learning_rate weight_decay w` off a weight.

    The decay is decoupled: the moments do not see it.
    """

    takes_weight_decay = True
    weight_decay: float = dataclasses.field(default=1e-4, kw_only=True)


@dataclasses.dataclass(frozen=True)
class lazy_adam(adam):
    """As `adam`, but rows that a step does not touch stay as they are, moments too.

    The results are not Adam's. It is the rule of torch's SparseAdam, and of LazyAdam in
    TensorFlow Addons. Ordinary parameters have plain Adam.
    """

    shrinks_state = False
    moves_weights = False

    def catch_up(self, w, state, lag, count):
        return w, state
