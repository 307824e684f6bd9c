"""Quotients and remainders of int32 numbers in GPU programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def div(x: jax.Array, n: jax.typing.ArrayLike) -> jax.Array:
    """Computes `x // n` for numbers that are not negative; `//` would take longer.

    `lax.div` takes a Python number for an int64 if 64-bit types are enabled.
    """
    return lax.div(x, jnp.int32(n))


def rem(x: jax.Array, n: jax.typing.ArrayLike) -> jax.Array:
    """Computes `x % n` for numbers that are not negative."""
    return lax.rem(x, jnp.int32(n))
