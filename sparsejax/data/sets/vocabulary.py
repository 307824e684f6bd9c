"""Orders features so that contiguous ranges of them have about equal numbers of entries.

On a mesh, kernels are cut into contiguous ranges of rows, one for each device. In order of
popularity the first range would hold most of the entries. So features are distributed
round robin: the feature of popularity rank `r` goes to group `r mod 256`. The groups
then come in bit-reversed order (0, 128, 64, 192, ...). So neighbours in rank are far
apart, even on few devices. For the bundled data set and 8 devices, the first device
holds 1.5 times the mean number of entries; with the groups in their own order it would
hold 5.5 times the mean.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pyarrow as pa

from sparsejax.data.files import arrow
from sparsejax.data.files.names import Names, find_names, to_arrow
from sparsejax.mesh.layout import ROW_MULTIPLE, bit_reversed

# On each mesh, the size of an axis divides 256, and kernels have a multiple of 256 rows. So 256
# groups of rows suit all meshes.
_HANDS = ROW_MULTIPLE

# Higher imbalance causes a warning: a step takes as long as its fullest device.
MAX_IMBALANCE = 1.3
# Numbers of devices for which the balance is checked.
_WAYS = (4, 8)
# With fewer entries per device, an imbalance may be chance.
_MIN_ENTRIES_PER_PART = 256


def vocabulary_order(counts: np.ndarray, names: Names | None = None) -> np.ndarray:
    """Orders features by popularity, in the balanced order of this module.

    >>> vocabulary_order(np.array([3, 9, 5, 1]))
    array([1, 0, 2, 3])

    Args:
      counts: `[features]` number of rows that have the feature.
      names: `[features]` names of the features. Features of equal counts are ordered by name
        (by code points); without names, by their positions.

    Returns:
      `[features]` positions in `counts`: element `j` is the feature of column `j`. So
      `matrix[:, order]` reorders a matrix.
    """
    at = arrow.from_numbers(np.arange(len(counts)))
    ties = at if names is None else to_arrow(names)
    table = pa.table({"count": arrow.from_numbers(counts), "name": ties, "at": at})
    by_rank = table.sort_by([("count", "descending"), ("name", "ascending")])
    by_rank = arrow.numbers(by_rank["at"].combine_chunks())
    return by_rank[popularity_ranks(len(counts))]


def popularity_ranks(count: int) -> np.ndarray:
    """`[count]`: for each column of the balanced order, the popularity rank of its feature."""
    rank = np.arange(count)
    return np.lexsort((rank, bit_reversed(rank % _HANDS)))


def appended(known: Names, others: Names) -> Names:
    """Concatenates the known features and the new ones among `others`, each in their order."""
    return np.concatenate([known, others[find_names(others, known) < 0]])


def warn_if_appended_unbalanced(indices: np.ndarray, names: Names) -> None:
    """Warns the caller's caller if features appended at the end have too many entries."""
    remedy = ", as new features are at the end: for long trainings on a mesh, train a new model"
    _warn_if_unbalanced(indices, names, remedy)


def hand_starts(count: int) -> np.ndarray:
    """`[256]`: the first column of each of the 256 groups of features.

    The feature of popularity rank `r` has the column
    `hand_starts(count)[r % 256] + r // 256`.
    """
    hands = np.arange(_HANDS)
    sizes = (count - hands + _HANDS - 1) // _HANDS
    order = np.argsort(bit_reversed(hands))
    starts = np.empty(_HANDS, np.int64)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    return starts


def imbalance(counts: np.ndarray, ways: int) -> float:
    """The largest number of entries in one of `ways` column ranges, divided by the mean."""
    total = counts.sum(dtype=np.int64)
    edges = np.arange(ways) * len(counts) // ways
    parts = np.add.reduceat(counts, edges, dtype=np.int64)
    return float(parts.max() * ways / total)


def warn_if_unbalanced(indices: np.ndarray, names: Names) -> None:
    """Warns the caller's caller if the balanced order would spread entries more evenly.

    Args:
      indices: `[entries]` column of each entry.
      names: `[features]` names of the columns.
    """
    remedy = "matrix[:, sparsejax.data.vocabulary_order(counts, feature_names)]"
    _warn_if_unbalanced(indices, names, f"; reorder the columns: {remedy}")


def _warn_if_unbalanced(indices: np.ndarray, names: Names, remedy: str) -> None:
    if found := _unbalanced(indices, names):
        ways, given, balanced = found
        warnings.warn(
            f"on {ways} devices one would hold {given:.2f} times its share of the entries "
            f"({balanced:.2f} times in balanced order){remedy}",
            stacklevel=4,
        )


def _unbalanced(indices: np.ndarray, names: Names) -> tuple[int, float, float] | None:
    """A number of devices, its imbalance, and that of a balanced order; None without a warning."""
    if len(names) < _HANDS or len(indices) < max(_WAYS) * _MIN_ENTRIES_PER_PART:
        return None
    counts = np.bincount(indices, minlength=len(names))
    ways = max(_WAYS, key=lambda ways: imbalance(counts, ways))
    given = imbalance(counts, ways)
    if given <= MAX_IMBALANCE:
        return None
    balanced = imbalance(counts[vocabulary_order(counts, names)], ways)
    if math.isclose(given, balanced) or given < balanced:
        return None
    return ways, given, balanced
