"""The work of `fit`, in a form that no longer tells kinds of models apart."""

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
    """Examples to train on, and how the model is measured.

    Attributes:
      examples: the data to train on.
      metric: the validation metric that decides which epoch is the best; None without
        validation.
      prepare: function that makes the validation data ready for batches of some size; None
        without it.
      exchange: function that makes the model ready to exchange ids of batches of some size over
        a mesh. It returns a function that counts the lookups that had too little room for them,
        if any can have.
      settings: further JSON values that a resume must repeat. A checkpoint without one takes
        any value.
      rates: function that is called before an epoch, and returns a function that is called
        after it, for further numbers of its history entry.
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
    """The metric that decides which epoch is the best.

    Args:
      stopping: may name it.
      default: name of the metric without `stopping`, or if it names none.
      known: the metrics that exist.
      what: name of the metrics' subject, for the message.

    Raises:
      ValueError: there is no such metric.
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
