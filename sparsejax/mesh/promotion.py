"""JAX's standard type promotion for the package, whatever promotion the caller has set."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import jax


@contextlib.contextmanager
def promoting() -> Generator[None]:
    """Sets JAX's standard type promotion while this context is open.

    With `jax_numpy_dtype_promotion="strict"` JAX refuses sums of numbers of two types. A
    program sets that for its own code. In this package, Flax and optax such sums are intended.
    It is also a decorator.
    """
    if jax.config.jax_numpy_dtype_promotion != "strict":
        yield
        return
    with jax.numpy_dtype_promotion("standard"):
        yield
