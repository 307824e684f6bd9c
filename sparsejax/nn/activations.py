"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The function of `jax.nn` with this name; "linear" is the identity.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in ACTIVATIONS:
        raise ValueError(
            f"unknown activation {name!r}; known: {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "celu": jax.nn.celu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "linear": jax.nn.identity,
    "mish": jax.nn.mish,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
    "tanh": jnp.tanh,
}
