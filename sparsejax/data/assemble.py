"""From parsed blocks of a file to a data set."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import scipy.sparse

from sparsejax.data.dataset import (
    SparseDataset,
    UnknownFeaturesWarning,
    align_features,
)
from sparsejax.data.files import DataError, Path, shown
from sparsejax.data.names import NameEncoder
from sparsejax.data.vocabulary import vocabulary_order
from sparsejax.sparse import CSR, MAX_ENTRIES

Features = SparseDataset | Iterable[object] | None


@dataclasses.dataclass(frozen=True)
class Block:
    """What was read from a part of a file.

    Attributes:
      rows: `[lines]` the row name on each line.
      lengths: `[lines]` int, how many entries each line has; None if one each.
      features: `[entries]` feature names, line after line.
      values: `[entries]` float64, or None.
    """

    rows: pa.Array
    lengths: np.ndarray | None
    features: pa.Array
    values: np.ndarray | None


def assemble(
    blocks: Iterable[Block], path: Path, *, features: Features
) -> SparseDataset:
    """Brings the blocks of one file together.

    Rows come in order of first appearance; lines of the same row are merged. Several
    entries of one (row, feature) become one, their values are added in float64. The
    features are those of `features` in its order, or those found, in the order of
    `vocabulary_order`.

    Raises:
      DataError: no rows, no features, too many entries, or only unknown features.
    """
    row_encoder, feature_encoder = NameEncoder(), NameEncoder()
    lengths: list[np.ndarray] = []
    values: list[np.ndarray] = []
    num_entries = 0
    for block in blocks:
        row_encoder.add(block.rows)
        feature_encoder.add(block.features)
        num_entries += len(block.features)
        if num_entries > MAX_ENTRIES:
            raise DataError.at(
                path,
                f"more than {MAX_ENTRIES:,} entries; split the file by rows",
            )
        if block.lengths is not None:
            lengths.append(block.lengths.astype(np.int32))
        if block.values is not None:
            values.append(block.values)
    row_names, rows = row_encoder.finish()
    feature_names, columns = feature_encoder.finish()
    if not row_names.size:
        raise DataError.at(path, "holds no data: the file is empty")
    if not feature_names.size and features is None:
        raise DataError.at(path, "none of the rows has a feature")
    if lengths:
        rows = np.repeat(rows, np.concatenate(lengths))
    data = np.concatenate(values) if values else np.ones(num_entries, bool)
    shape = (row_names.size, feature_names.size)
    matrix = scipy.sparse.coo_array((data, (rows, columns)), shape=shape).tocsr()
    del rows, columns, data, values  # the larger part of what is held
    if features is None:
        counts = np.bincount(matrix.indices, minlength=feature_names.size)
        order = vocabulary_order(counts, feature_names)
        column = np.empty_like(order)
        column[order] = np.arange(order.size)
        matrix.indices = column[matrix.indices].astype(np.int32)
        matrix.has_sorted_indices = False
        feature_names = feature_names[order]
    try:
        dataset = SparseDataset(CSR.from_scipy(matrix), row_names, feature_names)
    except ValueError as error:  # a sum of finite values need not be finite
        with np.errstate(over="ignore"):
            finite = np.isfinite(matrix.data.astype(np.float32))
        if finite.all():
            raise DataError.at(path, str(error)) from error
        at = np.argmin(finite)
        row = row_names[np.searchsorted(matrix.indptr, at, side="right") - 1]
        feature = feature_names[matrix.indices[at]]
        problem = f"the values of {str(row)!r} and {str(feature)!r} are too large a sum"
        raise DataError.at(path, problem) from error
    return dataset if features is None else align_to(dataset, features, path)


def align_to(
    dataset: SparseDataset, features: SparseDataset | Iterable[object], path: Path
) -> SparseDataset:
    """`SparseDataset.align_features`, with a warning and an error that name the file.

    Raises:
      DataError: there are entries, and all are of unknown features.
    """
    try:
        aligned, unknown = align_features(dataset, features)
    except ValueError as error:
        raise DataError.at(path, str(error)) from error
    if unknown:
        warnings.warn(
            f"{shown(path)}: {unknown}",
            UnknownFeaturesWarning,
            skip_file_prefixes=(
                os.path.dirname(__file__),
            ),  # blame the reader's caller
        )
    return aligned
