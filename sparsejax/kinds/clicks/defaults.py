"""Settings with which click models are trained, unless others are asked for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sparsejax import optimizers
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.kinds.kind import Defaults
from sparsejax.optimizers.rules import Rule

# Where the learning rate does not fall, a trained model is trained on, or a regression has
# learned most already.
_CONSTANT_RATE = 2e-3
# On a mesh batches are multiples of 64.
_LEAST_BATCH, _MOST_DECAY, _DECAY_BESIDE = 64, 8.0, 0.5
# With more examples the categories are not counted, which would take seconds.
_COUNTED = 200_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickDefaults(Defaults):
    """Settings that depend on the number of examples, and on that of categories.

    ::

        batch size    the power of 2 that is nearest to sqrt(examples), 64 to 4,096
        epochs        as many as 1,000 steps take, at most 10
        weight decay  the larger one of 4 (12,000 / examples)^(1/3), at most 5,
                      and 6 (categories / examples)^(1/2), at most 8

    Beside a regression the weight decay is .5, and the learning rate .002: with more of both
    the layers never begin to learn what the regression leaves.

    Without weight decay, few examples are learned by heart: a model is then worse than a
    logistic regression. They were chosen by the AUC on other examples: docs/clicks.md.

    Attributes:
      beside_regression: whether the model has a regression. Held-out examples then decide how
        much the layers count.
    """

    beside_regression: bool = False

    def for_data(self, data: Any, *, continued: bool = False) -> Defaults:
        # `build` says what is wrong with data of another kind.
        rows = data if isinstance(data, int) else getattr(data, "num_rows", 0)
        if not rows:  # of a stream: weight decay would forget what is rare
            return dataclasses.replace(self, learning_rate=_CONSTANT_RATE)
        size = 2 ** round(math.log2(rows) / 2)
        size = min(max(size, _LEAST_BATCH), self.batch_size)
        if continued:  # weight decay would forget what the model has learned before
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
