"""Reads files and tables for runs, and accepts data sets that are already read."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from sparsejax.data import (
    DataError,
    SequenceDataset,
    SparseDataset,
    read,
    read_user_features,
)
from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.files import stored
from sparsejax.data.files.columns import account_of, account_of_histories
from sparsejax.data.files.names import Names, as_names, find_names, quoted
from sparsejax.data.files.opening import shown
from sparsejax.data.files.parquet import first_schema, parquet_files
from sparsejax.data.reading.histories import item_of
from sparsejax.data.reading.read_sequences import read_sequences
from sparsejax.data.sets.assemble import Features
from sparsejax.data.sets.click_schema import ClickSchema, vocabularies_of
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.data.sets.events import Events, UserFeatures
from sparsejax.data.sets.sequences import no_histories
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.kinds.source import item_names
from sparsejax.options.reading import Formatted, Reading
from sparsejax.options.training import Training


def dates_of(data: Any) -> list[str]:
    """The first and the last date of the data; empty if it has no dates."""
    times = getattr(data, "times", None)
    if times is None or not len(times) or times.dtype.kind != "M":
        return []
    first, last = (np.datetime_as_string(t, "D") for t in (times.min(), times.max()))
    return [f"{first} to {last}"]


def read_file(
    source: Any, reading: Reading, *, features: Features = None, indicator: bool = False
) -> SparseDataset:
    """Reads rows of items from a file or a table; a data set is returned as it is.

    Args:
      source: the file, the table or the data set.
      reading: settings of reading: format and columns.
      features: names of the columns, or a data set with these names. With None, names are taken
          from the source.
      indicator: whether values are ignored, even if `reading` does not ask for it.
    """
    indicator = indicator or reading.indicator
    if (rows := _baskets(source)) is not None:
        return read(rows, features=features, indicator=True)
    if isinstance(source, SparseDataset):
        data = source if features is None else source.align_features(features)
        return data.without_values() if indicator else data
    if _has_histories(source):
        silent = reading.replaced(value=None, user_features=None)
        silent = silent.noting(told=lambda _: None)
        histories = read_histories(source, silent)
        data = histories.to_sparse()
        reading.say(
            f"{name_of(source)}: histories, whose order and repeats this model does not see: "
            f"{histories.num_entries:,} events, {data.num_entries:,} entries"
        )
        return data if features is None else data.align_features(features)
    options = _options(source, reading) | {"indicator": indicator}
    data = read(source, features=features, **options)
    account = str(data.columns or account_of(data.matrix))
    if data.columns and data.times is None and reading.time is not None:
        account += "; no times"
    reading.say(f"{name_of(source)}: {account}")
    return data


def _baskets(source: Any) -> list[dict[str, Any]] | None:
    """Rows made from lists of item names or event objects; None if the source has another form."""
    if not are_baskets(source):
        return None
    return [
        {"user": str(n), "item": [item_of(event) for event in history]}
        for n, history in enumerate(source)
    ]


def are_baskets(source: Any) -> bool:
    """Whether a source is a list of histories, whose rows have numbers in place of names."""
    is_list = isinstance(source, list | tuple) and len(source) > 0
    return is_list and all(isinstance(each, list | tuple) for each in source)


def _events_in(
    source: Sequence[Sequence[Any]], events: EventSchema | Events | None
) -> list[dict[str, Any]]:
    """A row for each event of histories that are lists of objects. Absent columns are missing."""
    flat = [
        (str(n), event if isinstance(event, Mapping) else {"item": event})
        for n, history in enumerate(source)
        for event in history
    ]
    schema = events.schema if isinstance(events, Events) else events
    names = [] if schema is None else schema.used
    if any("time" in event for _, event in flat):
        names = [*names, "time"]
    return [
        {"user": user, "item": item_of(event)} | {n: event.get(n) for n in names}
        for user, event in flat
    ]


def _has_histories(source: Any) -> bool:
    """Whether a source is a `SequenceDataset`, or a file that one was saved to."""
    return isinstance(source, SequenceDataset) or is_saved(source, stored.HISTORIES)


def is_saved(source: Any, form: stored.Form) -> bool:
    """Whether a source is a file that contains a saved data set of the given form."""
    if not is_file(source) or not is_parquet(source):
        return False
    return stored.form_of(first_schema(parquet_files(source))[1]) is form


def read_histories(
    source: Any,
    reading: Reading,
    *,
    features: Names | SequenceDataset | None = None,
    events: EventSchema | Events | None = None,
    users: Events | None = None,
) -> SequenceDataset:
    """Reads histories from a file or a table; a data set is aligned to the given items.

    Args:
      source: the file, the table or the data set.
      reading: settings of reading: format, columns, and the table of users.
      features: item names, or data that has items and maybe columns of events and users.
      events: event columns, unless `features` has them.
      users: user columns whose categories keep their ids, unless `features` has them.

    Raises:
      ValueError: the user columns differ from these, or cannot be found by name.
    """
    users, of_run = getattr(features, "users", users), features is not None
    found = _read_histories(source, reading, features, events)
    if users is not None and of_run and are_baskets(source):
        # These rows have numbers as names. In the table, such a number may be the name of another
        # user.
        nobody = users.rows(np.full(found.num_rows, -1))
        return dataclasses.replace(found, users=nobody)
    if reading.user_features is not None and not of_run and are_baskets(source):
        raise ValueError(
            "user_features=... is joined by the names of users, which lists of items do not "
            "have: give the events as a table, or leave it out"
        )
    return _with_users(found, reading, users, of_run=of_run)


def _with_users(
    data: SequenceDataset, reading: Reading, known: Events | None, *, of_run: bool
) -> SequenceDataset:
    """Adds to histories the columns of their users.

    Args:
      data: histories, which may have user columns already.
      reading: settings of reading, including the table of users.
      known: user columns that a model reads; None if it reads none.
      of_run: whether the histories are for an existing model.

    Raises:
      ValueError: the user columns differ from those that the model reads.
    """
    if (given := reading.user_features) is None:
        if data.users is None or (known is None and not of_run):
            return data
        own = None if known is None else data.users.like(known, "the data")
        return dataclasses.replace(data, users=own)
    if known is None and of_run:
        raise ValueError(
            "user_features=...: the model reads no columns of users; leave it out"
        )
    return data.with_users(users_in(given, known, reading))


def users_in(
    given: Any, known: EventSchema | Events | None, reading: Reading
) -> UserFeatures:
    """Reads user columns from a file or a table; known categories keep their ids."""
    if isinstance(given, UserFeatures):
        if not isinstance(known, Events):
            return given
        return dataclasses.replace(
            given, columns=given.columns.like(known, "the table")
        )
    user = reading.user if isinstance(reading.user, str) else "user"
    found = read_user_features(given, known, user=user)
    columns = ", ".join(found.columns.schema.used)
    reading.say(f"{name_of(given)}: {len(found.user_names):,} users, with {columns}")
    return found


def _read_histories(
    source: Any,
    reading: Reading,
    features: Names | SequenceDataset | None,
    events: EventSchema | Events | None,
) -> SequenceDataset:
    if events is None:
        events = getattr(features, "events", None)
    if isinstance(source, SequenceDataset):
        source = _with_events(source, events)
        return source if features is None else source.align_features(features)
    if (rows := _baskets(source)) is not None:
        names = [row["user"] for row in rows]
        if features is not None and not any(source):
            known = (
                events.taken(np.zeros(0, int)) if isinstance(events, Events) else None
            )
            nothing = no_histories(as_names(item_names(features)), known)
            return nothing.align_rows(names, missing="empty")
        if any(isinstance(e, Mapping) for history in source for e in history):
            rows = _events_in(source, events)
            data = read_sequences(rows, features=features, events=events)
            return data.align_rows(names, missing="empty")
        return read_sequences(rows, features=features, events=events)
    if isinstance(source, SparseDataset):
        raise ValueError(
            "a SparseDataset has lost the order and the repeats of its events: read the "
            "file by read_sequences for a model of histories"
        )
    options = _options(source, reading)
    del options["value"], options["indicator"]
    data = read_sequences(source, features=features, events=events, **options)
    if features is not None and events is None:  # the columns of a saved data set
        data = data.without_events()
    sizes = data.num_rows, data.num_features, data.num_entries
    account = str(
        data.columns or account_of_histories(*sizes, timed=data.times is not None)
    )
    if data.events is not None and data.columns is None:
        account += f"; columns of events: {', '.join(data.events.schema.used)}"
    reading.say(f"{name_of(source)}: {account}")
    return data


def _with_events(
    data: SequenceDataset, events: EventSchema | Events | None
) -> SequenceDataset:
    """Converts the categories of a data set to the ids of `events`.

    Raises:
      ValueError: the data set has other event columns.
    """
    if isinstance(events, EventSchema):
        raise ValueError(
            "schema is of no use for a data set, which has one: leave it out"
        )
    if events is None or data.events is None:
        return data
    return dataclasses.replace(data, events=data.events.like(events, "the data"))


def stated_schema[T](training: Training, type_: type[T]) -> T | None:
    """The schema that is given to a training, or None.

    Raises:
      TypeError: the schema has another type.
    """
    schema = training.schema
    if schema is not None and not isinstance(schema, type_):
        raise TypeError(f"schema is of {type_.__name__} here, got {schema!r:.80}")
    return schema


def check_columns_of_run(command: Any, columns: Collection[str]) -> None:
    """Raises ValueError if --from names a run with columns and flags also describe columns."""
    if command.given & columns:
        raise ValueError(
            "--from takes the columns of its run: leave out --schema, --label, --kind, --dense, "
            "--categories, --user-schema, --weight, --dynamic and --delimiter, or --from"
        )


def check_counted(schema: ClickSchema | EventSchema) -> None:
    """Raises ValueError if categories must be counted and no file of --examples is given."""
    if learned := [*vocabularies_of(schema)]:
        raise ValueError(
            f"the categories of {', '.join(learned[:3])} are to be counted: name a file of "
            "--examples, or give the columns hashed ids"
        )


def _options(source: Any, reading: Reading) -> dict[str, Any]:
    """Keyword arguments for `read` that describe the source's format."""
    skips = skips_bad_lines(source, reading)
    return reading.values_of(Formatted) | {"skip_bad_lines": skips}


def skips_bad_lines(source: Any, reading: Reading) -> bool:
    """Whether bad lines of a source are skipped: it must be a file of lines."""
    return reading.skip_bad_lines and is_file(source) and not is_parquet(source)


def is_file(source: Any) -> bool:
    """Whether data is given as a path or a URL."""
    return isinstance(source, str | os.PathLike)


def name_of(source: Any) -> str:
    """The name of data in messages and settings."""
    if is_file(source):
        return shown(source)
    return "the table" if hasattr(source, "__arrow_c_stream__") else "the data"


def check_heldout[Data: SparseDataset | SequenceDataset](
    path: Any, heldout: Data, data: Data, data_path: Any
) -> Data:
    """Held-out entries of rows of `data`, with a warning about rows that `data` lacks.

    Args:
      path: name of the held-out data's source, for messages.
      heldout: held-out entries.
      data: data set that contains the rows.
      data_path: name of the source of `data`, for messages.

    Raises:
      DataError: `data` has none of the rows.
    """
    unknown = find_names(heldout.row_names, data.row_names) < 0
    if unknown.any():
        names = heldout.row_names[unknown]
        text = (
            f"{name_of(path)}: {names.size:,} of {heldout.num_rows:,} rows are not in "
            f"{name_of(data_path)}: {quoted(names)}"
        )
        if unknown.all():
            raise DataError(text)
        warnings.warn(f"{text}; the model is shown nothing of them", stacklevel=2)
    return heldout


def with_times(data: SparseDataset, path: Any) -> SparseDataset:
    """Checks that a data set has times, and returns it.

    Raises:
      DataError: the data set has no times.
    """
    if data.times is None:
        columns = data.columns
        why = (
            f": {columns.no_times}" if columns is not None and columns.no_times else ""
        )
        raise DataError.at(
            name_of(path), f"has no times{why}; name their column: time=..."
        )
    return data


def fingerprint_of_heldout(heldout: SparseDataset, row_names: Names) -> str:
    """Fingerprint of held-out entries, aligned to known rows."""
    found = find_names(heldout.row_names, row_names)
    rows = np.sort(found[found >= 0])
    aligned = heldout.align_rows(row_names[rows])
    left_out = [] if aligned.left_out is None else [aligned.left_out]
    return fingerprint(aligned.matrix, rows, *left_out)


def validation_share(validation: Any) -> float | None:
    """The share of the data to hold out; None if `validation` is not a number.

    Raises:
      ValueError: the number is not a valid share.
    """
    if isinstance(validation, str):
        if not re.fullmatch(r"[-+]?\d*\.?\d+", validation):
            return None
        if not 0 < float(validation) < 1:
            raise ValueError(
                f"validation={validation}: a share must be between 0 and 1; a file of "
                f"this name is written ./{validation}"
            )
    elif isinstance(validation, int | float):
        if not 0 < validation < 1:
            raise ValueError(
                f"validation={validation}: a share must be between 0 and 1"
            )
    else:
        return None
    return float(validation)


def is_last(validation: Any) -> bool:
    """Whether `validation` asks to hold out the last entry of each row."""
    return isinstance(validation, str) and validation == "last"


def validation_split(validation: Any, data: Any) -> Any:
    """Splits data as `validation` asks; None if `validation` is a separate data set."""
    if is_last(validation):
        return data.split_last()
    share = validation_share(validation)
    # The seed is fixed and not the run's: runs with different seeds are then compared on the same
    # entries.
    return None if share is None else data.split(1 - share, seed=0)


def split_name(validation: Any) -> str:
    """The text for a share, or "last", in the settings of a run."""
    return validation if isinstance(validation, str) else f"{validation:g}".lstrip("0")


def some_rows[Data: SparseDataset | SequenceDataset](
    data: Data, rows: Collection[str], hint: str = ""
) -> Data:
    """The rows with these names, in this order.

    Args:
      data: data set that has the rows.
      rows: names of the rows to select.
      hint: advice to append to an error about the names.

    Raises:
      ValueError: there is no row of a name.
    """
    wanted = as_names(dict.fromkeys(rows))
    unknown = wanted[find_names(wanted, data.row_names) < 0]
    if unknown.size:
        raise ValueError(
            f"users=...: {unknown.size:,} of {wanted.size:,} names are no rows of the data: "
            f"{quoted(unknown)}; leave them out{hint}. For new users give what they had: "
            "recommend(inputs=...) in Python, a file of it as DATA in a shell"
        )
    return cast(Data, data.align_rows(wanted))
