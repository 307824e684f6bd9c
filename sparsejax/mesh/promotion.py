"""JAX's rule for numbers of several types, within the package."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import jax


@contextlib.contextmanager
def promoting() -> Generator[None]:
    """Sets JAX's standard type promotion in this context, whatever the program has chosen.

    With `jax_numpy_dtype_promotion="strict"` JAX refuses sums of numbers of two types. A
    program chooses that for its own code. Here, and in Flax and optax, they are meant. It is
    also a decorator.
    """
    if jax.config.jax_numpy_dtype_promotion != "strict":
        yield
        return
    with jax.numpy_dtype_promotion("standard"):
        yield
