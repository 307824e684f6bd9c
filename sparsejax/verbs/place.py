"""Places data on the devices, for a custom training loop."""

from __future__ import annotations

from jax.typing import ArrayLike

from sparsejax.data.reading.sources import Sources
from sparsejax.engine.train.resident import Examples, Targets
from sparsejax.kinds.histories.next_items import HistoryModel
from sparsejax.kinds.kind import OfKind, kind_of


def place(
    inputs: Sources | OfKind,
    targets: Targets = None,
    *,
    weights: ArrayLike | None = None,
    model: HistoryModel | None = None,
) -> Examples:
    """Checks training data and copies it to the device, or divides it over the current mesh.

    >>> examples = place(train)
    >>> examples.num_rows == train.num_rows
    True

    Args:
      inputs: `[rows, features]`, or several by name, or histories, or clicks, see `fit`.
      targets: `[rows, items]`, see `fit`; by default a single input is its own target.
      weights: `[rows]`, weight of each example; 1 by default.
      model: history model to train, which determines the length of histories; only for histories.

    Raises:
      TypeError: a source has an unsupported type, or histories are given without a model.
      ValueError: there are no rows, a source lacks a row, or a weight is invalid.
    """
    examples = kind_of(inputs).examples(model, inputs, targets, weights)
    examples.on_device(0, None)
    return examples
