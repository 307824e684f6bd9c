"""Data on the devices, for a loop of one's own."""

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
    """Checks data to train on and copies it to the device, or over the mesh that is set.

    >>> examples = place(train)
    >>> examples.num_rows == train.num_rows
    True

    Args:
      inputs: `[rows, features]`, or several by name, or histories, or clicks, see `fit`.
      targets: `[rows, items]`, see `fit`; a single input itself by default.
      weights: `[rows]`, weight of each example; 1 by default.
      model: the history model that is trained, which has the length of histories; only for
        histories.

    Raises:
      TypeError: a source has another type, or histories come without a model.
      ValueError: there are no rows, a row is missing, or a weight is wrong.
    """
    examples = kind_of(inputs).examples(model, inputs, targets, weights)
    examples.on_device(0, None)
    return examples
