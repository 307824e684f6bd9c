"""The one rule for how close a result has to be to its float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


def eps_of_form(precision: str | None, implementation: str | None) -> float:
    """What float32 operands of a product are rounded to, as eps of that format."""
    if implementation == "mosaic_gpu":
        return 2**-7  # bfloat16
    if jax.default_backend() != "gpu" or precision == "highest":
        return 2**-23
    # Three products of bfloat16, or TF32.
    return 2**-16 if precision == "high" else 2**-10


def relative_error(dtype: DTypeLike, terms: int, eps: float | None = None) -> float:
    """Largest error of a sum of `terms` products, as a share of the sum of their sizes.

    ::

        2 eps + 2 eps(float32) sqrt(terms)

    Operands and result are rounded to `dtype` a few times, which moves the sum by at
    most that share. Its eps is taken if no other is given. The additions are made in float32 (in `dtype`, if that is finer);
    their roundings are independent, so they grow with the root of their number.
    """
    sums = jnp.promote_types(dtype, jnp.float32)
    eps = float(jnp.finfo(dtype).eps) if eps is None else eps
    return float(2 * eps + 2 * jnp.finfo(sums).eps * terms**0.5)


def tolerance(dtype: DTypeLike, terms: int) -> dict[str, float]:
    """`rtol` and `atol` for a sum of `terms` products of random numbers of about 1."""
    bound = relative_error(dtype, terms)
    return {"rtol": bound, "atol": bound * terms**0.5}


def assert_close(
    got: ArrayLike,
    want: ArrayLike,
    *,
    terms: int,
    magnitude: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    eps: float | None = None,
) -> None:
    """Asserts `got` is `want` within `relative_error`; NaN and inf must be equal.

    Args:
      got: a result.
      want: the oracle's, in float64.
      terms: how many terms were summed for an element.
      magnitude: the sum of the sizes of an element's terms, which terms that cancel
        make larger than the result: one for all, or like `want`; `abs(want)` if None.
      dtype: of the operands; that of `got` if None.
      eps: see `relative_error`.
    """
    dtype = jnp.asarray(got).dtype if dtype is None else dtype
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    magnitude = np.abs(want) if magnitude is None else np.asarray(magnitude)
    bound = np.broadcast_to(relative_error(dtype, terms, eps) * magnitude, want.shape)
    with np.errstate(invalid="ignore"):  # inf - inf
        close = np.abs(got - want) <= bound
    close |= (got == want) | (np.isnan(got) & np.isnan(want))
    if not close.all():
        worst = tuple(np.argwhere(~close)[0])
        raise AssertionError(
            f"{(~close).sum()} of {close.size} elements differ, the first at "
            f"{tuple(map(int, worst))}: {got[worst]!r}, expected {want[worst]!r} "
            f"within {bound[worst]:.3g}"
        )
