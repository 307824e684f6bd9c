"""The precision of products of float32 matrices."""

from __future__ import annotations

from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax

# The argument `precision` of operations and layers. It concerns float32 operands only.
#
#   "highest"       float32
#   "high"          three bfloat16 products for each product: errors of about 2^-16
#   "default", None  the fastest form that trains as well: full float32 on a CPU, TF32 on a
#                   GPU, and bfloat16 operands where an operation says so
Word = Literal["highest", "high", "default"]
Precision = Word | None

_OF_XLA = {
    "highest": lax.Precision.HIGHEST,
    # On CUDA, `Precision.HIGH` would be TF32. On a CPU, this preset is full float32.
    "high": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "default": lax.Precision.DEFAULT,
}


def check_precision(precision: str | None) -> Word:
    """Checks a precision, and returns "default" for None.

    Raises:
      ValueError: there is no such precision.
    """
    if precision is None:
        return "default"
    for word in get_args(Word):
        if precision == word:
            return word
    raise ValueError(
        f'precision is None, "highest", "high" or "default", got {precision!r}'
    )


def of_xla(
    precision: Precision, dtype: jnp.dtype
) -> lax.Precision | lax.DotAlgorithmPreset | None:
    """The precision to pass to XLA's product for operands of this dtype."""
    if dtype == jnp.float32:
        return _OF_XLA[check_precision(precision)]
    return None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
