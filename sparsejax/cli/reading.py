"""The files of interactions that commands read."""

from __future__ import annotations

import concurrent.futures
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from sparsejax.cli.flags import Reading
from sparsejax.cli.wording import in_flags
from sparsejax.data import DataError, SequenceDataset, SparseDataset, read
from sparsejax.data.assemble import Features
from sparsejax.data.columns import (
    BY_NAME,
    TimeColumn,
    account_of,
    account_of_histories,
)
from sparsejax.data.files import lines_of, shown
from sparsejax.data.folder import DataFolder
from sparsejax.data.names import Names, as_names, find_names, quoted
from sparsejax.data.read_sequences import read_sequences
from sparsejax.engine.train.checkpoint import fingerprint


def read_file(
    path: str, command: Reading, *, features: Features = None, indicator: bool = False
) -> SparseDataset:
    """Reads a file of a command, and prints to stderr what was read.

    Args:
      path: the file.
      command: names the format and the columns.
      features: see `read`.
      indicator: ignore values, whatever the flags say.
    """
    data = read(
        path,
        format=command.format,
        user=command.columns.user,
        item=command.columns.item,
        value=command.columns.value,
        time=time_column(command),
        delimiter=command.columns.delimiter,
        features=features,
        indicator=indicator or command.columns.no_value,
    )
    account = str(data.columns or account_of(data.matrix))
    print(f"{shown(path)}: {in_flags(account, command)}", file=sys.stderr)
    return data


def read_histories(
    path: str, command: Reading, *, features: Names | SequenceDataset | None = None
) -> SequenceDataset:
    """Reads histories from a file of a command, and prints to stderr what was read."""
    if command.columns.value is not None:
        raise ValueError("--value: histories have no values; leave it out")
    data = read_sequences(
        path,
        format=command.format,
        user=command.columns.user,
        item=command.columns.item,
        time=time_column(command),
        delimiter=command.columns.delimiter,
        features=features,
    )
    sizes = data.num_rows, data.num_features, data.num_entries
    account = str(
        data.columns or account_of_histories(*sizes, timed=data.times is not None)
    )
    print(f"{shown(path)}: {in_flags(account, command)}", file=sys.stderr)
    return data


def time_column(command: Reading) -> TimeColumn:
    """The column that `--time` and `--no-time` choose.

    Raises:
      ValueError: both are given.
    """
    columns = command.columns
    if columns.no_time:
        if columns.time is not None:
            raise ValueError("give --time or --no-time, not both")
        return None
    return BY_NAME if columns.time is None else columns.time


def read_features(path: str) -> Features:
    """The features of a file, to read others against."""
    folder = DataFolder.find(path)
    return read(path) if folder is None else folder.vocabulary()


def meanwhile[T](call: Callable[[], T]) -> Callable[[], T]:
    """Starts a call in another thread; returns what waits for its result.

    An interrupted command does not wait for the call.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised to who asks for the result
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result


def check_heldout[Data: SparseDataset | SequenceDataset](
    path: str, heldout: Data, data: Data, data_path: str
) -> Data:
    """Held-out entries of rows of `data`; warns of rows that `data` does not have.

    Args:
      path: where they were read from, for messages.
      heldout: the entries.
      data: the data set whose rows count.
      data_path: where `data` was read from, for messages.

    Raises:
      DataError: `data` has none of the rows.
    """
    unknown = find_names(heldout.row_names, data.row_names) < 0
    if unknown.any():
        names = heldout.row_names[unknown]
        text = (
            f"{path}: {names.size:,} of {heldout.num_rows:,} rows are not in "
            f"{data_path}: {quoted(names)}"
        )
        if unknown.all():
            raise DataError(text)
        warnings.warn(f"{text}; the model is shown nothing of them", stacklevel=2)
    return heldout


def with_times(data: SparseDataset, path: str) -> SparseDataset:
    """The data set, after a check that it has times.

    Raises:
      DataError: it has no times.
    """
    if data.times is None:
        columns = data.columns
        why = (
            f": {columns.no_times}" if columns is not None and columns.no_times else ""
        )
        raise DataError.at(path, f"has no times{why}; name their column: --time COLUMN")
    return data


def fingerprint_of_heldout(heldout: SparseDataset, row_names: Names) -> str:
    """`fingerprint` of the held-out entries of known rows, each in its row."""
    found = find_names(heldout.row_names, row_names)
    rows = np.sort(found[found >= 0])
    aligned = heldout.align_rows(row_names[rows])
    left_out = [] if aligned.left_out is None else [aligned.left_out]
    return fingerprint(aligned.matrix, rows, *left_out)


def validation_share(text: str) -> float | None:
    """The share of the data that `--validation` holds out; None if it names a file."""
    if not re.fullmatch(r"[-+]?\d*\.?\d+", text):
        return None
    if not 0 < float(text) < 1:
        raise ValueError(
            f"--validation {text}: a share must be between 0 and 1; a file of this name "
            f"is written ./{text}"
        )
    return float(text)


def validation_split(text: str, data: Any) -> Any:
    """The split that `--validation` asks for; None if it names a file."""
    if text == "last":
        return data.split_last()
    share = validation_share(text)
    # Not --seed, so that models of several seeds are compared on the same entries.
    return None if share is None else data.split(1 - share, seed=0)


def some_rows[Data: SparseDataset | SequenceDataset](data: Data, users: str) -> Data:
    """The rows that `--users` names: the lines of a file, or names between commas."""
    if is_file := os.path.isfile(users):
        names = lines_of(users)
    else:
        names = users.split(",")
    wanted = as_names(dict.fromkeys(names))
    unknown = wanted[find_names(wanted, data.row_names) < 0]
    if unknown.size:
        hint = "" if is_file else f"; there is no file called {users} either"
        raise ValueError(
            f"--users: {unknown.size:,} of {wanted.size:,} names are no users of DATA: "
            f"{quoted(unknown)}; leave them out{hint}"
        )
    return cast(Data, data.align_rows(wanted))
