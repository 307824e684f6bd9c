"""The data that a kind reads from files and from a run folder, and lines about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sparsejax.data import ItemFeatures


def item_names(known: Any) -> Any:
    """The names of the items, from what a run of a model that ranks items keeps of its data."""
    return getattr(known, "feature_names", known)


# Lowers what a model will run, which has shapes in place of arrays. Returns what compiles it.
Ahead = Callable[[Any], Callable[[], object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The data to train on.

    Attributes:
      data: the rows to train on, in memory or on disk.
      everything: all rows, also held-out ones.
      chunks: number of rows in each chunk of the data.
      fingerprint: fingerprint of the data.
      known: names of the features; or a data set without rows, for clicks and for histories
        with columns of events. The run folder keeps it, so that other data can be read with the same numbers of columns.
      heldout: data to measure the model on after each epoch, or None.
      validation: fingerprint of the held-out data.
      split: description of how it was held out from the data; None if a file has it.
      features: content of the items, in the order of `known`, if it is given.
    """

    data: Any
    everything: Any
    chunks: Sequence[int]
    fingerprint: str
    known: Any
    heldout: Any = None
    validation: str | None = None
    split: str | None = None
    features: ItemFeatures | None = None


@runtime_checkable
class Opened(Protocol):
    """A run folder that is read."""

    @property
    def directory(self) -> object: ...

    @property
    def settings(self) -> Any: ...

    @property
    def known(self) -> Any: ...

    def model(self, ahead: Ahead | None = None) -> Any: ...

    def item_features(self) -> ItemFeatures | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The facts of a report about a model and its data.

    Attributes:
      model: the trained model.
      facts: texts about the data.
      measured: metrics, if something was held out.
      calibration: predicted and true shares of clicks by label, see `write_report`.
      counts: `[items]` how often each occurs; None if the model ranks no items.
      shown: the rows that the model is shown, if there are some.
      heldout: held-out entries of the rows in `shown`, if there are some.
    """

    model: Any
    facts: Sequence[str] = ()
    measured: Mapping[str, float] | None = None
    calibration: Mapping[str, Sequence[tuple[float, float]]] = dataclasses.field(
        default_factory=dict
    )
    counts: np.ndarray | None = None
    shown: Any = None
    heldout: Any = None
