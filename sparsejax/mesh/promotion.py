"""JAX's rule for numbers of several types, within the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax


def promoting[Function: Callable[..., Any]](function: Function) -> Function:
    """The function under JAX's standard rule of types, whatever the program has chosen.

    With `jax_numpy_dtype_promotion="strict"` JAX refuses sums of numbers of two types. A
    program chooses that for its own code. Here, and in Flax and optax, they are meant.
    """

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if jax.config.jax_numpy_dtype_promotion != "strict":
            return function(*args, **kwargs)
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return cast(Function, wrapped)
