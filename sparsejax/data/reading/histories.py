"""Histories as the inputs of a program: arrays by name. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
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
from sparsejax.data.sets.click_schema import MISSING
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.event_schema import CONTEXT, USERS
from sparsejax.data.sets.sequences import Histories, SequenceDataset

# Names of the inputs. There are times if the model uses them and the data have them. Columns
# of events have names that begin with `EVENTS`.
HISTORIES, TIMES, EVENTS = "histories", "times", "events/"

# The shape that a model takes of an event's part of each column, by name. Columns whose names begin
# with `CONTEXT` or `USERS` have one cell for each history.
EventShapes = Mapping[str, tuple[int, ...]]

# Types of `exclude` and the like where the data are histories.
Unordered = Source | SequenceDataset | str | None


def input_name(column: str) -> str:
    """The name of the input that has a column of events."""
    return column if column.startswith((CONTEXT, USERS)) else f"{EVENTS}{column}"


def arrays_of(
    data: Histories | SequenceDataset,
    length: int,
    *,
    times: bool,
    events: EventShapes | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """The last items of each row, and their times and events, each `[rows, length, ...]`.

    Args:
      data: histories; with columns of events, and the context, if these are wanted.
      length: number of places.
      times: whether times are wanted.
      events: shapes of the columns of events that are wanted, or None. Where an event has more
        categories than there is room for, the first ones are taken.
      columns: the columns that `events` names, where the data do not have them.
    """
    arrays = {HISTORIES: data.padded(length)}
    if times:
        arrays[TIMES] = data.padded_times(length)
    if events is not None:
        if columns is None:
            columns = _columns_of(data)
        for name, shape in events.items():
            column, fill = _with_room(columns[name], shape), -1 if shape else 0
            if not name.startswith((CONTEXT, USERS)):
                column = data.padded_column(column, length, fill=fill)
            arrays[input_name(name)] = column
    return arrays


def _columns_of(data: Histories | SequenceDataset) -> dict[str, np.ndarray]:
    """The columns of the events, of what is known of those to come, and of the users."""
    found = {} if data.events is None else dict(data.events.columns)
    if isinstance(data, Histories):
        return found
    found |= {
        f"{CONTEXT}{name}": column for name, column in (data.context or {}).items()
    }
    users = {} if data.users is None else data.users.columns
    return found | {f"{USERS}{name}": column for name, column in users.items()}


def _with_room(column: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A column with `shape` numbers for each event."""
    if not shape:
        if column.ndim == 1:
            return column
        # An event without a category has that of a missing value.
        return np.where(column[:, 0] < 0, MISSING, column[:, 0])
    [most] = shape
    if column.ndim == 1:
        # A list that is missing is empty, also where no event has a list.
        column = np.where(column == MISSING, -1, column)[:, None]
    column = column[:, :most]
    more = (0, most - column.shape[1])
    return np.pad(column, ((0, 0), more), constant_values=-1)


def inputs_of(
    sequences: SequenceDataset,
    length: int,
    *,
    times: bool,
    events: EventShapes | None = None,
) -> Inputs:
    """`arrays_of` with the names of the rows."""
    arrays = arrays_of(sequences, length, times=times, events=events)
    names = sequences.row_names
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
