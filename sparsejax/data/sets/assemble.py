"""Joins the parsed blocks of a file into a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from sparsejax.callers import warn_caller
from sparsejax.data.events.block import Block
from sparsejax.data.files.columns import Columns
from sparsejax.data.files.names import NameEncoder, Names
from sparsejax.data.files.opening import DataError, Path, shown
from sparsejax.data.sets.dataset import SparseDataset, events_of_pairs
from sparsejax.data.sets.named_rows import (
    NamedRows,
    UnknownFeaturesWarning,
    align_features,
)
from sparsejax.data.sets.vocabulary import vocabulary_order
from sparsejax.sparse import CSR, MAX_ENTRIES, as_int32

Features = SparseDataset | Iterable[object] | None


def assemble(
    blocks: Iterable[Block],
    path: Path,
    *,
    features: Features,
    columns: Columns | None = None,
) -> SparseDataset:
    """Joins the blocks of one file into a data set.

    Rows come in order of first appearance, and lines with equal row names are merged. Several
    entries of one (row, feature) become one entry. Its value is the sum of their values,
    added in float64. Its time is the latest time; of equally late entries the last in
    the file counts. With `features` the result has these features in their order.
    Otherwise it has the features of the file, in the order of `vocabulary_order`.

    Args:
      blocks: blocks of the file. Either all or none have values, and either all or none
        have times.
      path: name of the file in messages.
      features: vocabulary to align the result to, or None.
      columns: columns of the table, for the result's account of what was read.

    Raises:
      DataError: there are no rows, no features, too many entries, or only unknown
        features.
    """
    row_names, rows, feature_names, codes, found, times = encode(
        blocks, path, has_vocabulary=features is not None
    )
    data = np.ones(len(codes), bool) if found is None else found
    del found
    shape = (row_names.size, feature_names.size)
    matrix = scipy.sparse.coo_array((data, (rows, codes)), shape=shape).tocsr()
    del data
    if features is None:
        counts = np.bincount(matrix.indices, minlength=feature_names.size)
        order = vocabulary_order(counts, feature_names)
        column = np.empty_like(order)
        column[order] = np.arange(order.size)
        matrix.indices = column[matrix.indices].astype(np.int32)
        matrix.has_sorted_indices = False
        feature_names = feature_names[order]
        if times is not None:
            codes = column[codes]
    order = first = None
    if times is not None:
        order, first = events_of_pairs(rows, codes, times)
        times = times[order]
    del rows, codes  # these are the largest arrays in memory
    try:
        dataset = SparseDataset(
            CSR.from_scipy(matrix),
            row_names,
            feature_names,
            times=times,
            order=order,
            first_times=first,
        )
    except ValueError as error:  # a sum of finite values may be infinite
        with np.errstate(over="ignore"):
            finite = np.isfinite(matrix.data.astype(np.float32))
        if finite.all():
            raise DataError.at(path, str(error)) from error
        at = np.argmin(finite)
        row = row_names[np.searchsorted(matrix.indptr, at, side="right") - 1]
        feature = feature_names[matrix.indices[at]]
        problem = (
            f"the values of {str(row)!r} and {str(feature)!r} have too large a sum"
        )
        raise DataError.at(path, problem) from error
    if features is not None:
        dataset = align_to(dataset, features, path)
    if columns is not None:
        if times is None:
            columns = columns.without_empty_times()
        read = columns.accounted(dataset.matrix)
        dataset = dataclasses.replace(dataset, columns=read)
    return dataset


class Encoded(NamedTuple):
    """The entries of a file as numbers, in the order of the file.

    Attributes:
      row_names: `[rows]` names of rows, in order of first appearance.
      rows: `[entries]` row number of each entry.
      feature_names: `[features]` names of features, in order of first appearance.
      features: `[entries]` feature number of each entry.
      values: `[entries]` float64 values, or None.
      times: `[entries]` times, or None.
    """

    row_names: Names
    rows: np.ndarray
    feature_names: Names
    features: np.ndarray
    values: np.ndarray | None
    times: np.ndarray | None


def encode(
    blocks: Iterable[Block], path: Path, *, has_vocabulary: bool = False
) -> Encoded:
    """Joins the blocks of one file and numbers its names; `assemble` describes the order.

    Raises:
      DataError: there are no rows, too many entries, or no features and no vocabulary.
    """
    row_encoder, feature_encoder = NameEncoder(), NameEncoder()
    lengths: list[np.ndarray] = []
    values: list[np.ndarray] = []
    dates: list[np.ndarray] = []
    num_entries = 0
    for block in blocks:
        row_encoder.add(block.rows)
        feature_encoder.add(block.features)
        num_entries += len(block.features)
        if num_entries > MAX_ENTRIES:
            raise DataError.at(
                path, f"more than {MAX_ENTRIES:,} entries; split the file by rows"
            )
        if block.lengths is not None:
            lengths.append(as_int32("a list", block.lengths))
        if block.values is not None:
            values.append(block.values)
        if block.times is not None:
            dates.append(block.times)
    row_names, rows = row_encoder.finish()
    feature_names, codes = feature_encoder.finish()
    if not row_names.size:
        raise DataError.at(path, "holds no data: the file is empty")
    if not feature_names.size and not has_vocabulary:
        raise DataError.at(path, "none of the rows has a feature")
    if lengths:
        rows = np.repeat(rows, np.concatenate(lengths))
    return Encoded(
        row_names,
        rows,
        feature_names,
        codes,
        np.concatenate(values) if values else None,
        np.concatenate(dates) if dates else None,
    )


def align_to[Data: NamedRows](dataset: Data, features: Any, path: Path) -> Data:
    """Aligns a data set to other features; warnings and errors name the file.

    Args:
      dataset: data set to align.
      features: names, or a data set whose feature names are used.
      path: name of the file in messages.

    Raises:
      DataError: all entries have unknown features.
    """
    try:
        aligned, unknown = align_features(dataset, features)
    except ValueError as error:
        raise DataError.at(path, str(error)) from error
    if unknown:
        warn_caller(f"{shown(path)}: {unknown}", UnknownFeaturesWarning)
    return aligned
