"""A click model whose probabilities are corrected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Calibrated(nnx.Module):
    """A click model whose logits are corrected; `calibrate` makes it.

    ::

        z = slope model(dense, ids) + offset
        logit = z without knots, else the value at z of the straight lines through the knots

    Below the first and above the last knot, the logit is constant. `predict`, `evaluate` and
    `export_predictor` accept this module like the click model inside it.

    >>> def same(dense, ids):
    ...     return jnp.array([-1.0, 3.0])
    >>> Calibrated(same, slope=2.0, offset=-1.0)(None, None).tolist()
    [-3.0, 5.0]

    Args:
      model: the click model.
      slope: factor of the model's logits.
      offset: number added to the scaled logits.
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
        if name in ("num_dense", "num_ids", "like", "labels", "beside"):
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
