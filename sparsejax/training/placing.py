"""Data on the devices, for a loop of one's own."""

from __future__ import annotations

from jax.typing import ArrayLike

from sparsejax.data.clicks import ClickDataset
from sparsejax.data.sequences import SequenceDataset
from sparsejax.data.sources import Sources
from sparsejax.prediction.next_items import HistoryModel
from sparsejax.training.clicks import click_examples
from sparsejax.training.resident import Examples, Targets
from sparsejax.training.sequences import sequence_examples


def place(
    inputs: Sources | SequenceDataset | ClickDataset,
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
      model: for histories, the model that is trained: it says how long they are.

    Raises:
      TypeError: a source has another type, or histories come without a model.
      ValueError: there are no rows, a row is missing, or a weight is wrong.
    """
    if isinstance(inputs, SequenceDataset):
        if targets is not None:
            raise ValueError("the targets of histories are their own items")
        examples = sequence_examples(model, inputs, weights)
    elif not isinstance(inputs, ClickDataset):
        examples = Examples.of(inputs, targets, weights)
    elif targets is None:
        examples = click_examples(inputs, weights)
    else:
        raise ValueError("clicks have their labels; leave out targets")
    examples.resident(0, None)
    return examples
