"""Default training settings: batch size, epochs, optimizer and learning rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from sparsejax import optimizers
from sparsejax.codec import ModelConfig
from sparsejax.kinds.kind import kind_of
from sparsejax.nn.config import NetworkConfig
from sparsejax.optimizers.rules import Rule
from sparsejax.optimizers.schedules import Schedule, schedule


@runtime_checkable
class HasExamples(Protocol):
    """Data with a number of training examples."""

    @property
    def num_examples(self) -> int:
        """Number of rows; for histories, of rows with at least two entries."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Arguments of `build` and `fit` that suit some data, made by `recipe`.

    >>> recipe(NetworkConfig.autoencoder((64,)), 1_000).num_epochs  # of two steps
    100

    Attributes:
      batch_size: number of examples in a step.
      num_epochs: number of passes over the data.
      rule: rule of the optimizer. Its learning rate falls to 0 at the last step.
    """

    batch_size: int
    num_epochs: int
    rule: Rule


def steps_of_epoch(chunks: Sequence[int], batch_size: int) -> int:
    """Number of steps in an epoch, given the number of rows in each chunk."""
    # `fit` raises errors for wrong sizes, but before that, a schedule needs at least one step.
    return max(sum(math.ceil(rows / max(batch_size, 1)) for rows in chunks), 1)


def learning_rate(
    peak: float, steps: int, *, warmup: int = 0, decay: bool = True
) -> float | Schedule:
    """A learning rate that rises from 0 over `warmup` steps, and falls to 0 by the last.

    It falls along a cosine, unless `decay` is False.
    """
    steps = max(steps, 1)  # `fit` reports an invalid number of epochs
    if not decay and not warmup:
        return peak
    if not warmup:
        return schedule("cosine_decay_schedule", init_value=peak, decay_steps=steps)
    rise = {"init_value": 0.0, "peak_value": peak, "warmup_steps": warmup}
    if not decay:
        return schedule("warmup_constant_schedule", **rise)
    return schedule("warmup_cosine_decay_schedule", **rise, decay_steps=steps)


def recipe(
    config: NetworkConfig | ModelConfig,
    data: HasExamples | int,
    *,
    batch_size: int | None = None,
    num_epochs: int | None = None,
    peak: float | None = None,
) -> Recipe:
    """The default training settings of `sparsejax train`.

    >>> config = NetworkConfig.autoencoder((64,))
    >>> how = recipe(config, 100_000)
    >>> how.batch_size, how.num_epochs, how.rule.name
    (512, 30, 'adam')

    ::

        model, optimizer = build(config, train, how.rule)
        sizes = {"batch_size": how.batch_size, "num_epochs": how.num_epochs}
        fit(model, optimizer, train, **sizes)

    Args:
      config: configuration of a network, or of a model of histories or clicks.
      data: data to train on, or its number of rows; for histories the number of rows with at least
          two entries.
      batch_size: number of rows in a step. By default 512, for histories 256; for clicks the
        power of 2 that is nearest to the root of the number of rows, 64 to 4,096.
      num_epochs: number of passes over the data. By default as many as 200 steps take, but at
        least 30; for histories as many as 3,500 steps take, but 40 to 300; for clicks as many
        as 1,000 steps take, but at most 10.
      peak: highest learning rate; by default .002, for clicks .005.
    """
    rows = data if isinstance(data, int) else data.num_examples
    defaults = kind_of(config).defaults_of(config).for_data(data)
    if batch_size is None:
        batch_size = defaults.batch_size
    if peak is None:
        peak = defaults.learning_rate
    steps = steps_of_epoch([rows], batch_size)
    if num_epochs is None:
        num_epochs = defaults.num_epochs(steps)
    rate = learning_rate(peak, steps * num_epochs)
    rule = optimizers.get(defaults.optimizer, learning_rate=rate, **defaults.options)
    return Recipe(batch_size=batch_size, num_epochs=num_epochs, rule=rule)
