"""The job of `fit`: data and validation, without anything specific to a kind of model."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from sparsejax.engine.train.progress import EarlyStopping
from sparsejax.engine.train.resident import Examples
from sparsejax.engine.train.streaming import Stream
from sparsejax.optimizers.optimizer import Optimizer


@runtime_checkable
class Measure(Protocol):
    """Measures a model on validation data."""

    def __call__(
        self, model: Any, *, optimizer: Optimizer, deterministic: bool
    ) -> Mapping[str, float]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Examples to train on, and the validation.

    Attributes:
      examples: the data to train on.
      metric: the validation metric that decides which epoch is the best; None without
        validation.
      prepare: function that prepares the validation data for a given batch size; None without
          validation.
      exchange: function that prepares the model to exchange ids over a mesh for a given batch
          size; None if nothing is exchanged. It returns a function that counts the lookups whose
          ids did not fit, or None if all always fit.
      settings: further JSON values that must be equal when training resumes. If a checkpoint lacks
          one, any value is accepted.
      rates: function that is called before an epoch, and returns a function that is called after
          it and returns additional numbers for its history entry.
    """

    examples: Examples | Stream
    metric: str | None
    prepare: Callable[[int], Measure] | None
    exchange: Callable[[int], Callable[[], int] | None] | None = None
    settings: Mapping[str, Any] = types.MappingProxyType({})
    rates: Callable[[], Callable[[], Mapping[str, float]]] | None = None


def metric_of(
    stopping: EarlyStopping | None, default: str, known: Sequence[str], what: str
) -> str:
    """The name of the metric that decides which epoch is the best.

    Args:
      stopping: options of early stopping, which may name a metric.
      default: name of the metric if `stopping` is None or names none.
      known: names of the existing metrics.
      what: name of the measured data, for the message.

    Raises:
      ValueError: there is no metric with this name.
    """
    metric = default
    if stopping is not None and stopping.metric is not None:
        metric = stopping.metric
    if metric not in known:
        raise ValueError(
            f"early_stopping: {what} there is no validation metric {metric!r}; there are "
            f"{', '.join(known)}"
        )
    return metric
