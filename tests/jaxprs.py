"""Finds the functions inside traced functions."""

from collections.abc import Iterator
from typing import Any

import jax


def inner(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation calls."""
    for value in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")
    ):
        found = getattr(value, "jaxpr", value)
        if hasattr(found, "eqns"):
            yield found
