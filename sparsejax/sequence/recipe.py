"""How to train a model of histories: one recipe for all data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsejax import optimizers
from sparsejax.data.sequences import SequenceDataset
from sparsejax.optimizers.rules import Rule

# Found on the validation of Amazon Beauty; steps and lengths also on that of MovieLens. See
# benchmarks/README.md.
_BATCH, _STEPS, _LEAST_EPOCHS, _MOST_EPOCHS = 256, 3500, 40, 300
LEARNING_RATE, _DECAY, _B2 = 2e-3, 0.1, 0.98  # the rate is that of the first step
_LENGTHS, _CUT = (50, 100, 200), 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceRecipe:
    """How to train a model of histories. `sparsejax train` does it so by default.

    >>> recipe = SequenceRecipe.for_rows([22_363])
    >>> recipe.num_epochs, recipe.batch_size, recipe.max_length
    (40, 256, 50)

    ::

        recipe = SequenceRecipe.for_data(train)
        config = HSTUConfig(max_length=recipe.max_length)
        model, optimizer = build(config, train, recipe.rule)
        epochs, batch_size = recipe.num_epochs, recipe.batch_size
        fit(model, optimizer, train, num_epochs=epochs, batch_size=batch_size)

    The rule is AdamW. Its learning rate falls along a cosine, from 0.002 to 0 at the last
    step, so that the last epoch needs no validation to be among the best.

    Attributes:
      rule: how parameters move.
      batch_size: histories a step.
      num_epochs: passes over the data: as many as 3,500 steps take, but 40 to 300.
      max_length: for the configuration of the model. Of 50, 100 and 200 the least from
        which 5 % of the entries or less are cut off, or else 200.
    """

    rule: Rule
    batch_size: int
    num_epochs: int
    max_length: int = _LENGTHS[0]

    @classmethod
    def for_data(cls, data: SequenceDataset, **options: Any) -> SequenceRecipe:
        """That for histories in memory; `options` are those of `for_rows`."""
        lengths = np.diff(data.indptr)
        recipe = cls.for_rows([int(np.sum(lengths > 1))], **options)
        for max_length in _LENGTHS:
            # A window has one entry more, which is a target only.
            cut = np.maximum(lengths - max_length - 1, 0).sum()
            if cut <= _CUT * lengths.sum():
                break
        return dataclasses.replace(recipe, max_length=max_length)

    @classmethod
    def for_rows(
        cls,
        rows: Sequence[int],
        *,
        batch_size: int | None = None,
        num_epochs: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
    ) -> SequenceRecipe:
        """That for a number of histories, with the shortest `max_length`.

        Args:
          rows: histories with two entries or more, of each chunk that is read by itself.
          batch_size: instead of 256.
          num_epochs: instead of what suits the data.
          learning_rate: at the beginning, instead of 0.002.
          weight_decay: instead of 0.1.
        """
        batch_size = _BATCH if batch_size is None else batch_size
        # Without rows to train on, `fit` says so; a schedule cannot have 0 steps.
        steps = max(sum(math.ceil(n / max(batch_size, 1)) for n in rows), 1)
        if num_epochs is None:
            wanted = math.ceil(_STEPS / steps)
            num_epochs = min(max(wanted, _LEAST_EPOCHS), _MOST_EPOCHS)
        rate = optimizers.schedule(
            "cosine_decay_schedule",
            init_value=LEARNING_RATE if learning_rate is None else learning_rate,
            decay_steps=max(steps * num_epochs, 1),
        )
        decay = _DECAY if weight_decay is None else weight_decay
        rule = optimizers.adamw(rate, b2=_B2, weight_decay=decay)
        return cls(rule=rule, batch_size=batch_size, num_epochs=num_epochs)
