"""DSSTNE's brake, which shortens training steps when the error jumps."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Brake(nnx.Module):
    """DSSTNE's brake, which scales the gradients of steps with a large error.

    With E the sum of a batch's losses and m = 0.9 m + 0.1 E, from 0: from step 101 on, a
    step with E > 2 m has no gradient, and the gradients of the 24 steps after it are
    divided by 10.

    DSSTNE skips the first of these steps, and divides the learning rate in the others. With
    SGD, Momentum and Nesterov this is equivalent, except that here velocities and weight
    penalties are not scaled. AdaGrad, RMSProp, AdaDelta and Adam divide gradients by
    their recent size, which includes the scaled gradients: their 24 steps are hardly shorter.

    Args:
      steps: number of steps after which the brake is reset.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.count = BrakeState(jnp.zeros((), jnp.int32))
        self.mean = BrakeState(jnp.zeros((), jnp.float32))
        self.left = BrakeState(jnp.zeros((), jnp.int32))

    def __call__(self, error: Float[Array, ""]) -> Float[Array, ""]:
        """The factor of the gradient in this step. `error` is the sum of the batch's losses."""
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
    """Numbers that the brake keeps from step to step."""
