"""Data read from files and from a run folder, and texts about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sparsejax.data import ItemFeatures


def item_names(known: Any) -> Any:
    """Names of the items, from `Source.known` of a run whose model ranks items."""
    return getattr(known, "feature_names", known)


# Function that lowers a program from shapes instead of arrays, and returns a function that
# compiles it.
Ahead = Callable[[Any], Callable[[], object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Data to train on.

    Attributes:
      data: the rows to train on, in memory or on disk.
      everything: all rows, including held-out rows.
      chunks: number of rows in each chunk of the data.
      fingerprint: fingerprint of the data.
      known: names of the features; or a data set without rows, for clicks and for histories with
          event columns. It is stored in the run folder, so that other data can be read with equal
          numbers of columns.
      heldout: held-out data, measured after each epoch, or None.
      validation: fingerprint of the held-out data.
      split: description of how data was held out; None if it comes from a separate file.
      features: content of the items, in the order of `known`, or None.
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
    """A run folder that was read."""

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
    """Facts about a model and its data, for a report.

    Attributes:
      model: the trained model.
      facts: texts about the data.
      measured: metrics on held-out data; empty without such data.
      calibration: predicted and true shares of clicks for each label, see `write_report`.
      counts: `[items]` occurrences of each item; None if the model ranks no items.
      shown: rows that recommendations are shown for, or None.
      heldout: held-out entries of the rows in `shown`, or None.
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
