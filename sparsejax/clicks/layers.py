"""Layers of click models."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx


class Layers(nnx.Module):
    """Linear layers with ReLU between them, and optionally after the last one.

    The input may have more columns than the first layer, if these are 0.
    """

    def __init__(
        self,
        inputs: int,
        sizes: Sequence[int],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        end: bool = False,
    ):
        self.end = end
        self.layers = nnx.List(
            nnx.Linear(a, b, dtype=dtype, rngs=rngs)
            for a, b in zip((inputs, *sizes), sizes, strict=False)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = linear(layer, x)
            x = x if i == last and not self.end else relu(x)
        return x


def linear(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    """Applies `layer` to `x`, whose additional columns must be 0.

    The kernel is padded with zeros as it is cast, which costs nothing.
    """
    more = x.shape[1] - layer.in_features
    if not more:
        return layer(x)
    kernel = layer.kernel[...].astype(x.dtype)
    return with_bias(layer, x @ jnp.pad(kernel, ((0, more), (0, 0))))


def with_bias(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    """Adds the bias of a layer to `x`, if it has one."""
    if layer.bias is None:
        return x
    bias = layer.bias[...].astype(x.dtype)
    return x + jnp.expand_dims(bias, range(x.ndim - 1))


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """ReLU whose derivative is computed from its result.

    Autodiff would read `x`. Then `x` would have to be written by the product, and the result by
    another pass.
    """
    return jnp.maximum(x, 0)


relu.defvjp(lambda x: (relu(x),) * 2, lambda y, slope: (jnp.where(y != 0, slope, 0),))
