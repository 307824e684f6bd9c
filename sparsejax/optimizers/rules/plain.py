"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import optax

from sparsejax.optimizers.rules.base import LinearRule, penalised
from sparsejax.optimizers.rules.missed_steps import Linear


@dataclasses.dataclass(frozen=True)
class sgd(LinearRule):
    """Stochastic gradient descent::

        w -= learning_rate (g + weight_decay w)

    `weight_decay` is the derivative of an L2 penalty, `weight_decay |w|^2 / 2`.
    """

    elementwise = True
    takes_weight_decay = True

    def dense(self):
        decay = optax.add_decayed_weights(self.weight_decay)
        return optax.chain(decay, optax.sgd(self.learning_rate))

    def catch_up(self, w, state, lag, count):
        if not self.weight_decay:
            return w, state
        return super().catch_up(w, state, lag, count)

    def after_missed(self, w, state, missed):
        return w + missed.ww * w, state

    def step(self, w, state, gradient, rate):
        return w - rate * penalised(gradient, w, self.weight_decay), state

    def missed(self, rate):
        return Linear(ww=-rate * self.weight_decay)


@dataclasses.dataclass(frozen=True)
class momentum(LinearRule):
    """Gradient descent with momentum::

        m = momentum m + g + weight_decay w
        w -= learning_rate m

    `weight_decay` is the factor of an L2 penalty, as in torch's SGD.
    """

    elementwise = True
    takes_weight_decay = True
    shrinks_state = True
    moves_weights = True
    nesterov: ClassVar[bool] = False
    below_one = ("momentum",)

    momentum: float = 0.9

    def dense(self):
        decay = optax.add_decayed_weights(self.weight_decay)
        step = optax.sgd(self.learning_rate, self.momentum, nesterov=self.nesterov)
        return optax.chain(decay, step)

    def init(self, shape):
        return {"trace": jnp.zeros(shape, jnp.float32)}

    def after_missed(self, w, state, missed):
        trace = state["trace"]
        after = missed.mm * trace
        if self.weight_decay:
            after = missed.mw * w + after
            return w + (missed.ww * w + missed.wm * trace), {"trace": after}
        return w + missed.wm * trace, {"trace": after}

    def step(self, w, state, gradient, rate):
        g = penalised(gradient, w, self.weight_decay)
        trace = g + self.momentum * state["trace"]
        update = g + self.momentum * trace if self.nesterov else trace
        return w - rate * update, {"trace": trace}

    def missed(self, rate):
        mu, decay = self.momentum, self.weight_decay
        if self.nesterov:
            return Linear(-rate * decay * (1 + mu), -rate * mu * mu, decay, mu)
        return Linear(-rate * decay, -rate * mu, decay, mu)


@dataclasses.dataclass(frozen=True)
class nesterov(momentum):
    """Nesterov's momentum.

    ::

        m = momentum m + g + weight_decay w
        w -= learning_rate (g + weight_decay w + momentum m)
    """

    nesterov = True
