"""Converts histories to the input arrays of a compiled program, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

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

# Names of a model's inputs. Times are an input if the model uses times and the data has them.
# Event columns are inputs whose names begin with `EVENTS`.
HISTORIES, TIMES, EVENTS = "histories", "times", "events/"

# The shape of a cell in each column that a model reads, by the column's name. Columns whose
# names begin with `CONTEXT` or `USERS` have one cell for each history.
EventShapes = Mapping[str, tuple[int, ...]]

# Type of arguments that are sets of items, such as `exclude`, if the data is histories.
Unordered = Source | SequenceDataset | str | None


def input_name(column: str) -> str:
    """The name of the input that holds a column of events."""
    return column if column.startswith((CONTEXT, USERS)) else f"{EVENTS}{column}"


def item_of(event: Any) -> Any:
    """The name of an event's item. The event is an object with an item, or the name itself.

    Raises:
      ValueError: an object has no item.
    """
    if not isinstance(event, Mapping):
        return event
    if "item" not in event:
        raise ValueError(f"an event has no item: {dict(event)!r:.80}")
    return event["item"]


def arrays_of(
    data: Histories | SequenceDataset,
    length: int,
    *,
    times: bool,
    events: EventShapes | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """The arrays of each row's last items, times and events, `[rows, length, ...]` each.

    Args:
      data: histories; with columns of events and context, if `events` names them.
      length: number of places for each row; shorter rows are padded.
      times: whether to include times.
      events: shapes of the columns of events to include, by name, or None. A cell with more
        categories than its shape allows keeps the first ones.
      columns: arrays of the columns that `events` names, if the data do not have them.
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
    """Event columns, columns of the context of the next event, and user columns, by name."""
    found = {} if data.events is None else dict(data.events.columns)
    if isinstance(data, Histories):
        return found
    found |= {
        f"{CONTEXT}{name}": column for name, column in (data.context or {}).items()
    }
    users = {} if data.users is None else data.users.columns
    return found | {f"{USERS}{name}": column for name, column in users.items()}


def _with_room(column: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads or truncates the cells of a column to `shape`."""
    if not shape:
        if column.ndim == 1:
            return column
        # An event with an empty list gets the id of a missing value.
        return np.where(column[:, 0] < 0, MISSING, column[:, 0])
    [most] = shape
    if column.ndim == 1:
        # A missing list is an empty list, also in data that has no lists.
        column = np.where(column == MISSING, -1, column)[:, None]
    column = column[:, :most]
    return np.pad(column, ((0, 0), (0, most - column.shape[1])), constant_values=-1)


def inputs_of(
    sequences: SequenceDataset,
    length: int,
    *,
    times: bool,
    events: EventShapes | None = None,
) -> Inputs:
    """The arrays of `arrays_of` as `Inputs`, with the names of the rows."""
    arrays = arrays_of(sequences, length, times=times, events=events)
    names = sequences.row_names
    return Inputs(
        {name: NamedArray("inputs", array, names) for name, array in arrays.items()},
        alone=False,
    )


def unordered(
    what: str, source: Unordered, sequences: SequenceDataset | SparseDataset
) -> SparseDataset | Source | None:
    """Converts an argument about items, such as `exclude`, to a matrix.

    Args:
      what: name of the argument.
      source: data, which may be histories; or the text "inputs", which stands for `sequences`.
      sequences: histories that the model is shown.

    Raises:
      ValueError: `source` is another text, or has other items.
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
