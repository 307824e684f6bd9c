"""A click model whose probabilities are corrected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Calibrated(nnx.Module):
    """A click model with logits that are corrected behind it; `calibrate` makes it.

    ::

        z = slope model(dense, ids) + offset
        logit = z, or where there are knots what lies between them on straight lines

    Beyond the first and the last knot, the logit is that of the knot. `predict`,
    `evaluate` and `export_predictor` take it like the model itself, which it holds.

    >>> def same(dense, ids):
    ...     return jnp.array([-1.0, 3.0])
    >>> Calibrated(same, slope=2.0, offset=-1.0)(None, None).tolist()
    [-3.0, 5.0]

    Args:
      model: the click model.
      slope: of the line.
      offset: of the line.
      knots: pairs of a logit and the corrected one, both ascending; none by default.
    """

    kind = "clicks"

    def __init__(
        self,
        model: Any,
        *,
        slope: float = 1.0,
        offset: float = 0.0,
        knots: Sequence[tuple[float, float]] = (),
    ):
        self.model = model
        self.line = nnx.Variable(jnp.array([slope, offset], jnp.float32))
        pairs = jnp.array(knots, jnp.float32).reshape(-1, 2)
        self.knots = nnx.data(nnx.Variable(pairs) if len(knots) else None)

    def __getattr__(self, name: str) -> Any:
        # The data are compared with these of the model.
        if name in ("num_dense", "num_ids", "like"):
            return getattr(self.model, name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __call__(self, dense: Any, ids: Any) -> Float[Array, "batch"]:
        """The logit of each example, in float32."""
        slope, offset = self.line[...]
        logits: jax.Array = slope * self.model(dense, ids) + offset
        if self.knots is None:
            return logits
        before, after = self.knots[...].T
        return jnp.interp(logits, before, after)
