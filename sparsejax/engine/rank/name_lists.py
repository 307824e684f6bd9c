"""Converts histories, lists of names in Arrow memory, to rows of a matrix."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa

from sparsejax.data.files import arrow
from sparsejax.data.files.entries import offsets
from sparsejax.data.files.names import find_texts, quoted
from sparsejax.sparse import CSR


def matrix_of_histories(
    histories: pa.ListArray | pa.LargeListArray,
    items: pa.LargeStringArray,
    *,
    unknown: Literal["skip", "error"] = "skip",
) -> CSR:
    """`[histories, items]` matrix with an entry 1 for each item of a history.

    An item that occurs twice in a history is one entry. A null history is empty, and a null name
    is unknown.

    Args:
      histories: lists of names.
      items: names of the columns.
      unknown: "skip" ignores names that are not in `items`; "error" raises an error.

    Raises:
      ValueError: a name is unknown, and `unknown` is "error".
    """
    lengths = arrow.numbers(histories.value_lengths().fill_null(0))
    names = histories.flatten().cast(pa.large_string())
    columns = find_texts(names, items)
    known = columns >= 0
    if unknown == "error" and not known.all():
        missing = names.filter(pa.array(~known))
        raise ValueError(
            f"{len(missing):,} of {len(names):,} names are not items of the predictor: "
            f"{quoted(missing)}"
        )
    rows = np.repeat(np.arange(len(lengths)), lengths)[known]
    # Sorted by row and column, without duplicates.
    pairs = np.unique(rows * np.int64(len(items)) + columns[known])
    rows, columns = np.divmod(pairs, len(items)) if len(items) else (pairs, pairs)
    indptr = offsets(np.bincount(rows, minlength=len(lengths)))
    return CSR(None, columns.astype(np.int32), indptr, num_cols=len(items))
