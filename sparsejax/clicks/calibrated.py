"""Click models with calibrated probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.clicks.layers import chained, conditional

Knots = Sequence[tuple[float, float]]


class Correction(NamedTuple):
    """A correction of logits. By default it changes nothing.

    Attributes:
      slope: factor of the logits.
      offset: number added to the scaled logits.
      knots: pairs (logit, corrected logit), ascending in both.
    """

    slope: float = 1.0
    offset: float = 0.0
    knots: Knots = ()


class Calibrated(nnx.Module):
    """A click model with corrected logits; `calibrate` makes it.

    ::

        z = slope model(dense, ids) + offset
        logit = z without knots, else the value at z of the straight lines through the knots

    Below the first and above the last knot, the logit is constant. `predict`, `evaluate` and
    `export_predictor` accept this module like the click model inside it. With several labels, each
    has a correction. For a label that comes after another label, it corrects the conditional
    probability given the other label, so that the label stays less probable than the other one.

    >>> def same(dense, ids):
    ...     return jnp.array([-1.0, 3.0])
    >>> Calibrated(same, slope=2.0, offset=-1.0)(None, None).tolist()
    [-3.0, 5.0]

    Args:
      model: click model.
      slope: factor of the model's logits.
      offset: number added to the scaled logits.
      knots: pairs (logit, corrected logit), ascending in both; by default there are none.
      labels: for several labels, in place of the other arguments: for each label a `Correction`,
          and the index of the earlier label that it comes after, or None.
    """

    kind = "clicks"

    def __init__(
        self,
        model: Any,
        *,
        slope: float = 1.0,
        offset: float = 0.0,
        knots: Knots = (),
        labels: Sequence[tuple[Correction, int | None]] = (),
    ):
        self.model = model
        self.after = tuple(at for _, at in labels)
        found = [each for each, _ in labels] or [Correction(slope, offset, knots)]
        self.lines = nnx.List(
            nnx.Variable(jnp.array([each.slope, each.offset], jnp.float32))
            for each in found
        )
        pairs = [
            jnp.array(c.knots, jnp.float32) if len(c.knots) else None for c in found
        ]
        self.knots = nnx.data([None if x is None else nnx.Variable(x) for x in pairs])

    def __getattr__(self, name: str) -> Any:
        # `fit` and predictors check data against these attributes of the wrapped model.
        if name in ("num_dense", "num_ids", "like", "labels", "beside"):
            return getattr(self.model, name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __call__(self, dense: Any, ids: Any) -> Float[Array, "batch *labels"]:
        """The logit of each example, in float32; `[batch, labels]` with several labels."""
        logits: jax.Array = self.model(dense, ids)
        if not self.after:
            return self._corrected(0, logits)
        each = enumerate(conditional(logits, self.after).T)
        found = jnp.stack([self._corrected(i, z) for i, z in each], axis=1)
        return chained(found, self.after)

    def _corrected(self, label: int, logits: jax.Array) -> jax.Array:
        slope, offset = self.lines[label][...]
        logits = slope * logits + offset
        if (knots := self.knots[label]) is None:
            return logits
        before, after = knots[...].T
        return jnp.interp(logits, before, after)
