"""The one rule for how close a result has to be to its float64 oracle."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def tolerance(dtype: DTypeLike, terms: int) -> dict[str, float]:
    """`rtol` and `atol` for a sum of `terms` products of numbers of about 1.

    Each operand is rounded once (eps), and a sum of n terms, accumulated in float32,
    wanders by about sqrt(n) roundings of its running value; 4 is the safety factor.
    """
    eps = float(jnp.finfo(dtype).eps)
    bound = 4 * eps * (1 + terms**0.5)
    return {"rtol": bound, "atol": bound * terms**0.5}
