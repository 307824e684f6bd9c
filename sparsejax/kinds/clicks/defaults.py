"""Default training settings of click models."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sparsejax import optimizers
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.kinds.kind import Defaults
from sparsejax.optimizers.rules import Rule

# A constant learning rate, used for training without a schedule, for training a trained model
# further, and for models with a regression, whose layers have little left to learn.
_CONSTANT_RATE = 2e-3
# Batch sizes are at least 64, because on a mesh they must be multiples of 64.
_LEAST_BATCH, _MOST_DECAY, _DECAY_BESIDE = 64, 8.0, 0.5
# Categories are counted only in data with at most this many examples, as counting takes time.
_COUNTED = 200_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickDefaults(Defaults):
    """Defaults that depend on the number of examples and on the number of categories.

    ::

        batch size    the power of 2 that is nearest to sqrt(examples), 64 to 4,096
        epochs        as many as 1,000 steps take, at most 10
        weight decay  the larger one of 4 (12,000 / examples)^(1/3), at most 5,
                      and 6 (categories / examples)^(1/2), at most 8

    For a model with a regression the weight decay is .5, and the learning rate .002: with larger
    values the layers do not learn what the regression has not explained.

    Without weight decay, a model memorizes a small data set, and is then worse than a logistic
    regression. The formulas were chosen by the AUC on held-out examples: docs/clicks.md.

    Attributes:
      beside_regression: whether the model has a regression. Held-out examples then decide how much
          the layers are weighted.
    """

    beside_regression: bool = False

    def for_data(self, data: Any, *, continued: bool = False) -> Defaults:
        # Data of another kind has no `num_rows`; `build` raises the error for it.
        rows = data if isinstance(data, int) else getattr(data, "num_rows", 0)
        if not rows:  # a stream: weight decay would forget rare categories
            return dataclasses.replace(self, learning_rate=_CONSTANT_RATE)
        size = 2 ** round(math.log2(rows) / 2)
        size = min(max(size, _LEAST_BATCH), self.batch_size)
        if continued:  # weight decay would forget what was learned in earlier trainings
            rate = _CONSTANT_RATE
            return dataclasses.replace(self, batch_size=size, learning_rate=rate)
        rate = self.learning_rate
        if self.beside_regression:
            rate, decay = _CONSTANT_RATE, _DECAY_BESIDE
        else:
            decay = min(4 * (12_000 / rows) ** (1 / 3), 5)
            if isinstance(data, ClickDataset) and rows <= _COUNTED:
                rare = 6 * (data.num_used_ids / rows) ** 0.5
                decay = max(decay, min(rare, _MOST_DECAY))
        return dataclasses.replace(
            self,
            batch_size=size,
            least_steps=1_000,
            learning_rate=rate,
            options={"weight_decay": float(f"{decay:.2g}")},
        )

    def of_loop(self, data: Any) -> tuple[int, int]:
        found = self.for_data(data)
        steps = math.ceil(data.num_rows / found.batch_size)
        return found.batch_size, found.num_epochs(max(steps, 1))

    def constant_rule(self, data: Any) -> Rule:
        options = self.for_data(data).options
        rate = _CONSTANT_RATE
        return optimizers.get(self.optimizer, learning_rate=rate, **options)
