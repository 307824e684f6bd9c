"""The training that suits most data: batch size, epochs, optimizer and learning rate."""

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
    """Data that says how many examples of it there are to train on."""

    @property
    def num_examples(self) -> int:
        """Its rows; of histories those with two entries or more."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train: arguments of `build` and of `fit`. `recipe` makes it.

    >>> recipe(NetworkConfig.autoencoder((64,)), 1_000).num_epochs  # of two steps
    100

    Attributes:
      batch_size: examples of a step.
      num_epochs: passes over the data.
      rule: the optimizer's rule. Its learning rate falls to 0 at the last step.
    """

    batch_size: int
    num_epochs: int
    rule: Rule


def steps_of_epoch(chunks: Sequence[int], batch_size: int) -> int:
    """The steps of an epoch over chunks of so many rows."""
    # `fit` says what is wrong with the rows or the size; a schedule cannot have 0 steps.
    return max(sum(math.ceil(rows / max(batch_size, 1)) for rows in chunks), 1)


def learning_rate(
    peak: float, steps: int, *, warmup: int = 0, decay: bool = True
) -> float | Schedule:
    """A learning rate that rises from 0 over `warmup` steps, and falls to 0 by the last.

    It falls along a cosine, unless `decay` is False.
    """
    steps = max(steps, 1)  # `fit` says what is wrong with the number of epochs
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
    """The training of `sparsejax train` without flags.

    >>> config = NetworkConfig.autoencoder((64,))
    >>> how = recipe(config, 100_000)
    >>> how.batch_size, how.num_epochs, how.rule.name
    (512, 30, 'adam')

    ::

        model, optimizer = build(config, train, how.rule)
        sizes = {"batch_size": how.batch_size, "num_epochs": how.num_epochs}
        fit(model, optimizer, train, **sizes)

    Args:
      config: the network, or the model of histories or of clicks.
      data: the data to train on; or its number of rows, for histories of rows with two entries
        or more.
      batch_size: number of rows in a step. By default 512, for histories 256; for clicks the
        power of 2 that is nearest to the root of the number of rows, 64 to 4,096.
      num_epochs: number of passes over the data. By default as many as 200 steps take, but at
        least 30; for histories as many as 3,500 steps take, but 40 to 300; for clicks as many
        as 1,000 steps take, but at most 10.
      peak: the learning rate of the first step; .002 by default, for clicks .005.
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
