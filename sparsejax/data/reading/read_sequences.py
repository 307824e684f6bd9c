"""Reads histories from files and tables into memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.sparse

from sparsejax.data.events.pieces import is_path
from sparsejax.data.events.source import Asked, find_format, name_of, open_source
from sparsejax.data.files import parquet, stored
from sparsejax.data.files.columns import (
    BY_NAME,
    Chosen,
    Column,
    TimeColumn,
    account_of_histories,
)
from sparsejax.data.files.entries import offsets
from sparsejax.data.files.names import FeatureNames
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.prepared.folder import DataFolder
from sparsejax.data.scans.scan_sequences import scan_folder
from sparsejax.data.sets.assemble import align_to, encode
from sparsejax.data.sets.dataset import SparseDataset
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.data.sets.events import EventReader, Events, UserFeatures
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.data.sets.vocabulary import vocabulary_order

Vocabulary = FeatureNames | Iterable[object] | None


def read_sequences(
    source: Path | Any,
    *,
    format: str | None = None,
    user: Column = None,
    item: Column = None,
    time: TimeColumn = BY_NAME,
    delimiter: str | None = None,
    separator: str | None = None,
    time_format: str | None = None,
    features: Vocabulary = None,
    events: EventSchema | Events | None = None,
    users: UserFeatures | None = None,
    skip_bad_lines: bool = False,
) -> SequenceDataset:
    """Reads the events of each user in the order of time; repeated items are kept.

    >>> table = {"user": ["ann", "ann", "ann"], "item": ["tea", "rye", "tea"]}
    >>> frame = pandas.DataFrame(table | {"date": ["2024-03-01", "2024-01-01", "2024-02-01"]})
    >>> read_sequences(frame).times.astype("datetime64[D]").astype(str).tolist()
    ['2024-01-01', '2024-02-01', '2024-03-01']

    It takes the formats of `read`. Users come in order of first appearance, and items have
    the column numbers that `read` gives them. Events with equal times keep their order in the
    file. If there are no times, the order of the file is the history: of pairs, of a list in
    each row, or of the items on a line. Values are ignored. A column of times that cannot be
    read is an error; with `time=None` the order of the file is used.

    Files of `SparseDataset.save` are read if they have times; see
    `SequenceDataset.from_sparse`.

    Events may have further columns: a kind, numbers, categories. `events` gives the types of
    these columns by the classes of `ClickSchema`:

    >>> frame = pandas.DataFrame(table | {"action": ["view", "buy", "view"], "price": [2, 3, None]})
    >>> price = DenseColumn(log1p=True, missing=0.0)
    >>> schema = EventSchema(kind="action", dense={"price": price})
    >>> read_sequences(frame, events=schema)
    SequenceDataset(1 rows, 2 features, 3 entries, no times, events with price, action)

    Args:
      source: files, or a table in memory; see `read`.
      format: `"text"`, `"pairs"`, `"jsonl"`, `"adjacency"` or `"parquet"`; see `read`.
      user: name of the column with the row's name, for a table.
      item: name of the column with the feature's name, or with a list of names.
      time: name of the column with the time, or with a list of times; None means the order of
        the file.
      delimiter: text between the columns of pairs, one or two characters; by default it
        is guessed.
      separator: text between the items in a cell, like "|" in `Drama|War`. By default a
        cell is one item.
      time_format: format of times that are text, for `strptime`: "%d.%m.%Y %H:%M". By
        default they are ISO 8601.
      features: vocabulary of items: names, or a data set. Entries of other items are left
        out, with a warning.
      events: types of the columns of events; or `train.events`, so that categories get the
        ids of the training data, and others count as unknown. If a row has lists of items,
        such a column has a list of equal length, or one value for all items.
      users: features of the users, read by `read_user_features`, matched by name.
      skip_bad_lines: leave out lines that cannot be read; see `read`.

    Raises:
      DataError: the file cannot be read, a time is missing or cannot be read, times have
        several kinds, or a column of events is missing or has a cell that its type forbids.
      TypeError: `events` has another type.
      ValueError: the format is unknown, or columns are chosen for a format without columns.
    """
    reader = None if events is None else EventReader(events)
    chosen = Chosen(user, item, None, time)
    asked = Asked(
        chosen,
        format,
        delimiter,
        indicator=True,
        separator=separator,
        time_format=time_format,
        skip_bad_lines=skip_bad_lines,
        further=() if reader is None else reader.schema.used,
        check_further=None if reader is None else reader.check,
    )
    data = None
    if is_path(source) and find_format(source, asked) == "parquet":
        data = _saved(source, chosen, events)
    if data is None:
        data = _read(source, asked, reader)
    path = name_of(source)
    if users is not None:
        data = data.with_users(users)
    if features is None:
        return _accounted(data)
    return _accounted(align_to(data, features, path))


def _accounted(data: SequenceDataset) -> SequenceDataset:
    if data.columns is None:
        return data
    sizes = data.num_rows, data.num_features, data.num_entries
    account = account_of_histories(*sizes, timed=data.times is not None)
    columns = dataclasses.replace(data.columns, account=account)
    return dataclasses.replace(data, columns=columns)


def _saved(
    path: Path, chosen: Chosen, events: EventSchema | Events | None
) -> SequenceDataset | None:
    """Reads a saved data set or a prepared folder. Returns None for any other path."""
    if (folder := DataFolder.find(path, histories=True)) is not None:
        scanned = scan_folder(path, folder)
        names, left_out = folder.rows()
        found = scanned.read(0, scanned.num_rows)
        data = SequenceDataset(
            found.indptr,
            found.indices,
            names,
            scanned.feature_names,
            found.times,
            left_out,
            events=found.events,
        )
        return _own(path, data, chosen, events)
    files = parquet.parquet_files(path)
    _, schema = parquet.first_schema(files)
    form = stored.form_of(schema)
    if form is not None and form.has_rows and len(files) == 1:
        if form.ordered:
            return _own(path, SequenceDataset.load(path), chosen, events)
        _check_own(path, chosen, events)
        if events is not None:
            raise DataError.at(path, "has no columns of events")
        if chosen.time is None:
            raise ValueError(
                f"{shown(path)}: is a saved SparseDataset, which has no order but that of "
                "its times; leave out time=None"
            )
        try:
            return SequenceDataset.from_sparse(SparseDataset.load(path))
        except DataError:
            raise
        except ValueError as error:
            raise DataError.at(path, str(error)) from error
    return None


def _check_own(path: Path, chosen: Chosen, events: EventSchema | Events | None) -> None:
    if chosen:
        raise ValueError(
            f"{shown(path)}: is a saved data set, so it has no columns to name"
        )
    if isinstance(events, EventSchema):
        raise ValueError(
            f"{shown(path)}: is a saved data set, whose columns of events are those "
            "that it was saved with; leave out events"
        )


def _own(
    path: Path,
    data: SequenceDataset,
    chosen: Chosen,
    events: EventSchema | Events | None,
) -> SequenceDataset:
    """Applies the caller's arguments to saved histories: ids of `events`, or removal of times."""
    _check_own(path, chosen, events)
    if isinstance(events, Events):
        if data.events is None:
            raise DataError.at(path, "has no columns of events")
        own = data.events.like(events, shown(path))
        data = dataclasses.replace(data, events=own)
    return data if chosen.time is not None else dataclasses.replace(data, times=None)


def _read(source: Any, asked: Asked, reader: EventReader | None) -> SequenceDataset:
    opened = open_source(source, asked)
    path, columns = opened.path, opened.columns
    if columns is not None:
        columns.check_order(path)
    blocks = opened.blocks()
    found = encode(blocks if reader is None else reader.taking(blocks), path)
    events = None if reader is None else reader.events(path)
    if columns is not None and found.times is None:
        columns = columns.without_empty_times()
        columns.check_order(path)
    shape = (found.row_names.size, found.feature_names.size)
    ones = np.ones(len(found.features), bool)
    once = scipy.sparse.coo_array((ones, (found.rows, found.features)), shape=shape)
    counts = np.bincount(once.tocsr().indices, minlength=shape[1])
    order = vocabulary_order(counts, found.feature_names)
    column = np.empty(len(order), np.int32)
    column[order] = np.arange(len(order))
    keys = (found.rows,) if found.times is None else (found.times, found.rows)
    in_order = np.lexsort(keys)  # stable: events with equal times keep their order
    return SequenceDataset(
        offsets(np.bincount(found.rows, minlength=shape[0])),
        column[found.features[in_order]],
        found.row_names,
        found.feature_names[order],
        None if found.times is None else found.times[in_order],
        columns=columns,
        events=None if events is None else events.taken(in_order),
    )
