"""Layers of click models."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx


class Layers(nnx.Module):
    """Linear layers with ReLU between them, and behind the last one if asked for.

    The input may have more columns than the first layer takes, if these are 0.
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
    """`layer(x)`, if columns of `x` that the layer does not have are 0.

    Zeros below its kernel cost nothing: it is cast anyway.
    """
    more = x.shape[1] - layer.in_features
    if not more:
        return layer(x)
    kernel = layer.kernel[...].astype(x.dtype)
    return with_bias(layer, x @ jnp.pad(kernel, ((0, more), (0, 0))))


def with_bias(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    """`x` with the bias of a layer, if it has one."""
    if layer.bias is None:
        return x
    bias = layer.bias[...].astype(x.dtype)
    return x + jnp.expand_dims(bias, range(x.ndim - 1))


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """ReLU whose derivative reads the result.

    Autodiff reads `x`. Then the product that makes `x` writes it, and another pass the result.
    XLA would also read `x` to find where the result is more than 0.
    """
    return jnp.maximum(x, 0)


relu.defvjp(lambda x: (relu(x),) * 2, lambda y, slope: (jnp.where(y != 0, slope, 0),))
