"""Histories as the inputs of a program: arrays by name. Knows no model."""

from __future__ import annotations

from typing import cast

import numpy as np

from sparsejax.data.reading.sources import (
    Inputs,
    NamedArray,
    NamedCSR,
    Source,
    check_columns,
    check_same_features,
)
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.sequences import Histories, SequenceDataset

# Names of the inputs. There are times if the model uses them and the data have them.
HISTORIES, TIMES = "histories", "times"

# Types of `exclude` and the like where the data are histories.
Unordered = Source | SequenceDataset | str | None


def arrays_of(
    data: Histories | SequenceDataset, length: int, *, times: bool
) -> dict[str, np.ndarray]:
    """The last items of each row, and with `times` their times, each `[rows, length]`."""
    arrays = {HISTORIES: data.padded(length)}
    if times:
        arrays[TIMES] = data.padded_times(length)
    return arrays


def inputs_of(sequences: SequenceDataset, length: int, *, times: bool) -> Inputs:
    """`arrays_of` with the names of the rows."""
    arrays, names = arrays_of(sequences, length, times=times), sequences.row_names
    return Inputs(
        {name: NamedArray("inputs", array, names) for name, array in arrays.items()},
        alone=False,
    )


def unordered(
    what: str, source: Unordered, sequences: SequenceDataset
) -> SparseDataset | Source | None:
    """An argument about items, such as `exclude`, as a matrix.

    Args:
      what: the name of the argument.
      source: data, perhaps histories; or "inputs", which are `sequences`.
      sequences: the histories that the model is shown.

    Raises:
      ValueError: it is another text, or has other items.
    """
    if source is None:
        return None
    if isinstance(source, str):
        if source != "inputs":
            raise ValueError(f'{what} is data or "inputs", got {source!r}')
        source = sequences
    if isinstance(source, SequenceDataset):
        matrix = source.to_sparse()
    else:
        matrix = cast(Source, source)
    given = NamedCSR.of(what, matrix)
    check_columns(what, given.matrix.num_cols, sequences.num_features, "items")
    inputs = NamedCSR("inputs", given.matrix, None, sequences.feature_names)
    check_same_features(inputs, given)
    return matrix
