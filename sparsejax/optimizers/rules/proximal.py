"""FTRL-Proximal, in which weights are a function of the state."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax.optimizers.rules.base import Rule


class FtrlState(NamedTuple):
    """The state of all ordinary parameters, by the name of the array."""

    z: optax.Params
    n: optax.Params


@dataclasses.dataclass(frozen=True)
class ftrl(Rule):
    """FTRL-Proximal (McMahan et al., "Ad click prediction", 2013), for sparse weights.

    ::

        z += g - (sqrt(n + g^2) - sqrt(n)) / learning_rate w
        n += g^2                                             n starts at 0
        w = -(z - clip(z, -l1, l1)) / ((beta + sqrt(n)) / learning_rate + l2)

    A weight is exactly 0 while `|z| <= l1`. `learning_rate` is the paper's alpha. The penalty
    is `l1 |w| + l2 w^2 / 2` in all steps together, not in each.

    The paper starts with `w = z = 0`. Here z starts such that the formula gives the initial
    weights: a first step does not erase them. So set the weights of a model, for example to
    trained ones, before you make its `Optimizer`.

    Raises:
      NotImplementedError: the learning rate is a function. The sums in z need a constant alpha.
    """

    elementwise = True
    positive = ("learning_rate", "beta")
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if callable(self.learning_rate):
            raise NotImplementedError(
                "ftrl needs a number as learning_rate, not a schedule: its rate falls by "
                "itself, for each weight, and z depends on learning_rate"
            )

    def dense(self):
        def part(params, rows, name):
            """Selects the array `name` from the dict of each parameter."""
            return jax.tree.map(lambda _, row: row[name], params, rows)

        def init(params):
            states = jax.tree.map(self.start, params)
            return FtrlState(part(params, states, "z"), part(params, states, "n"))

        def update(updates, state, params=None):
            if params is None:
                raise ValueError("ftrl needs the parameters: update(g, state, params)")

            def one(w, z, n, g):
                new, state = self.step(w, {"z": z, "n": n}, g, self.learning_rate)
                return {"update": new - w, **state}

            moved = jax.tree.map(one, params, state.z, state.n, updates)
            z, n = part(params, moved, "z"), part(params, moved, "n")
            return part(params, moved, "update"), FtrlState(z, n)

        return optax.GradientTransformation(init, update)

    def init(self, shape):
        return self.start(jnp.zeros(shape, jnp.float32))

    def start(self, w):
        # The formula of w, solved for z. Where w is 0, any z in [-l1, l1] is a solution.
        slack = jnp.where(w > 0, -self.l1, jnp.where(w < 0, self.l1, 0))
        n = jnp.zeros_like(w)
        return {"z": (slack - w * self._stiffness(n)).astype(w.dtype), "n": n}

    def step(self, w, state, gradient, rate):
        n = state["n"] + jnp.square(gradient)
        sigma = (jnp.sqrt(n) - jnp.sqrt(state["n"])) / rate
        z = state["z"] + gradient - sigma * w
        beyond = z - jnp.minimum(jnp.maximum(z, -self.l1), self.l1)
        return -beyond / self._stiffness(n), {"z": z, "n": n}

    def _stiffness(self, n):
        return (self.beta + jnp.sqrt(n)) / self.rate(1) + self.l2
