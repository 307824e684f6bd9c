"""Rules that divide by the root of a sum or an average of squared gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sparsejax.optimizers.rules.base import Rule, mean_of_rows, power


@dataclasses.dataclass(frozen=True)
class adagrad(Rule):
    """Adagrad.

    ::

        v += g^2                        v starts at initial_accumulator_value
        w -= learning_rate g / sqrt(v + eps)
    """

    elementwise = True
    initial_accumulator_value: float = 0.1
    eps: float = 1e-7

    def dense(self):
        return optax.adagrad(
            self.learning_rate, self.initial_accumulator_value, self.eps
        )

    def init(self, shape):
        first = self.initial_accumulator_value
        return {"sum_of_squares": jnp.full(shape, first, jnp.float32)}

    def step(self, w, state, gradient, rate):
        total = jnp.square(gradient) + state["sum_of_squares"]
        scale = jnp.where(total > 0, lax.rsqrt(total + self.eps), 0)
        return w - rate * (scale * gradient), {"sum_of_squares": total}


@dataclasses.dataclass(frozen=True)
class rowwise_adagrad(Rule):
    """Adagrad with one number for each row, as in FBGEMM and TorchRec (exact row-wise Adagrad).

    ::

        v += mean(g^2)                  of the row; v starts at initial_accumulator_value
        w -= learning_rate g / (sqrt(v) + eps)

    A row of an ordinary parameter is the part selected by one index of its first axis. So a
    bias has plain Adagrad.
    """

    by_row = True
    positive = ("eps",)
    initial_accumulator_value: float = 0.0
    eps: float = 1e-8

    def dense(self):
        def init(params):
            def of(p):
                # A slice of the parameter, so that JAX gives the state the parameter's sharding.
                places = (slice(None), *[slice(1)] * (p.ndim - 1))
                first = self.initial_accumulator_value
                return jnp.full_like(p[places[: p.ndim]], first)

            return optax.ScaleByRssState(jax.tree.map(of, params))

        def update(updates, state, params=None):
            total = jax.tree.map(self._total, updates, state.sum_of_squares)
            updates = jax.tree.map(self._scaled, updates, total)
            return updates, optax.ScaleByRssState(total)

        scale = optax.GradientTransformation(init, update)
        return optax.chain(scale, optax.scale_by_learning_rate(self.learning_rate))

    def init(self, shape):
        first = self.initial_accumulator_value
        return {"sum_of_squares": jnp.full((shape[0], 1), first, jnp.float32)}

    def step(self, w, state, gradient, rate, mean=mean_of_rows):
        total = self._total(gradient, state["sum_of_squares"], mean)
        return w - rate * self._scaled(gradient, total), {"sum_of_squares": total}

    def _total(self, gradient, total, mean=mean_of_rows):
        return mean(jnp.square(gradient)) + total

    def _scaled(self, gradient, total):
        return gradient / (jnp.sqrt(total) + self.eps)


@dataclasses.dataclass(frozen=True)
class rmsprop(Rule):
    """RMSProp.

    ::

        v = decay v + (1 - decay) g^2
        w -= learning_rate g / sqrt(v + eps)
    """

    elementwise = True
    shrinks_state = True
    below_one = ("decay",)
    positive = ("eps",)
    decay: float = 0.9
    eps: float = 1e-8

    def dense(self):
        return optax.rmsprop(self.learning_rate, self.decay, self.eps, eps_in_sqrt=True)

    def init(self, shape):
        return {"nu": jnp.zeros(shape, jnp.float32)}

    def catch_up(self, w, state, lag, count):
        return w, {"nu": state["nu"] * power(self.decay, lag)}

    def step(self, w, state, gradient, rate):
        nu = (1 - self.decay) * jnp.square(gradient) + self.decay * state["nu"]
        return w - rate * (lax.rsqrt(nu + self.eps) * gradient), {"nu": nu}


@dataclasses.dataclass(frozen=True)
class adadelta(Rule):
    """Adadelta.

    ::

        v = rho v + (1 - rho) g^2
        u = g sqrt((d + eps) / (v + eps))
        d = rho d + (1 - rho) u^2
        w -= learning_rate u
    """

    elementwise = True
    shrinks_state = True
    below_one = ("rho",)
    positive = ("eps",)
    rho: float = 0.9
    eps: float = 1e-6

    def dense(self):
        return optax.adadelta(self.learning_rate, self.rho, self.eps)

    def init(self, shape):
        return {
            "e_g": jnp.zeros(shape, jnp.float32),
            "e_x": jnp.zeros(shape, jnp.float32),
        }

    def catch_up(self, w, state, lag, count):
        factor = power(self.rho, lag)
        return w, {name: value * factor for name, value in state.items()}

    def step(self, w, state, gradient, rate):
        e_g = (1 - self.rho) * jnp.square(gradient) + self.rho * state["e_g"]
        ratio = jnp.sqrt(state["e_x"] + self.eps) / jnp.sqrt(e_g + self.eps)
        update = ratio * gradient
        e_x = (1 - self.rho) * jnp.square(update) + self.rho * state["e_x"]
        return w - rate * update, {"e_g": e_g, "e_x": e_x}
