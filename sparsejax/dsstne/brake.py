"""DSSTNE's brake of the steps of a training."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Brake(nnx.Module):
    """DSSTNE's brake, which scales the gradients of steps with a large error.

    With E the sum of a batch's losses and m = 0.9 m + 0.1 E, from 0: from step 101 on, a
    step with E > 2 m has no gradient, and the gradients of the 24 steps behind it are
    divided by 10.

    DSSTNE leaves the first step out, and divides the learning rate of the others. With
    SGD, Momentum and Nesterov this is the same, except that velocities and penalties of
    weights are not braked here. AdaGrad, RMSProp, AdaDelta and Adam divide gradients by
    their recent size, which sees the braked ones: their 24 steps are hardly shorter.

    Args:
      steps: number of steps after which the brake starts anew.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.count = BrakeState(jnp.zeros((), jnp.int32))
        self.mean = BrakeState(jnp.zeros((), jnp.float32))
        self.left = BrakeState(jnp.zeros((), jnp.int32))

    def __call__(self, error: Float[Array, ""]) -> Float[Array, ""]:
        """The share of the gradient that counts in this step."""
        step = self.count[...] % self.steps
        mean = 0.9 * jnp.where(step == 0, 0, self.mean[...]) + 0.1 * error
        left = jnp.where(step == 0, 0, self.left[...])
        bad = (step >= 100) & (error > 2 * mean)
        share = jnp.where(bad, 0, jnp.where(left > 0, 0.1, 1)).astype(jnp.float32)
        left = jnp.where(bad, 25, left)
        self.count[...] = self.count[...] + 1
        self.mean[...] = mean
        self.left[...] = jnp.maximum(left - 1, 0)
        return share


class BrakeState(nnx.Variable):
    """Numbers that the brake remembers."""
