"""The one rule for how close a result has to be to its float64 oracle."""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


def relative_error(dtype: DTypeLike, terms: int) -> float:
    """Largest error of a sum of `terms` products, as a share of the sum of their sizes.

    ::

        2 eps(dtype) + 2 eps(float32) sqrt(terms)

    Operands and result are rounded to `dtype` a few times, which moves the sum by at
    most that share. The additions are made in float32 (in `dtype`, if that is finer);
    their roundings are independent, so they grow with the root of their number.
    """
    sums = jnp.promote_types(dtype, jnp.float32)
    return float(2 * jnp.finfo(dtype).eps + 2 * jnp.finfo(sums).eps * terms**0.5)


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
) -> None:
    """Asserts `got` is `want` within `relative_error`; NaN and inf must be equal.

    Args:
      got: a result.
      want: the oracle's, in float64.
      terms: how many terms were summed for an element.
      magnitude: the sum of the sizes of an element's terms, which terms that cancel
        make larger than the result: one for all, or like `want`; `abs(want)` if None.
      dtype: of the operands; that of `got` if None.
    """
    dtype = jnp.asarray(got).dtype if dtype is None else dtype
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    magnitude = np.abs(want) if magnitude is None else np.asarray(magnitude)
    bound = np.broadcast_to(relative_error(dtype, terms) * magnitude, want.shape)
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
