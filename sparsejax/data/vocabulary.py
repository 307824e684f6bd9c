"""The order of the features, such that any contiguous split of them is balanced.

On a mesh the kernels are cut into contiguous ranges of rows, one for each device. In
order of popularity the first range would hold most of the entries. So features are
dealt out like cards: the feature of popularity rank `r` goes to hand `r mod 256`. The
hands then lie in bit-reversed order (0, 128, 64, 192, ...), so that neighbours in rank
are far apart however few the devices: with the hands in their own order the first of 8
devices would hold 5.5 times the mean of the bundled data set's entries, so 1.5.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sparsejax.data.names import Names, to_arrow

# Kernels are allocated in multiples of 256 rows, whatever the mesh: a mesh axis divides
# 256, so 256 hands serve all of them.
HANDS = 256
_BIT_REVERSED = np.array([int(f"{hand:08b}"[::-1], 2) for hand in range(HANDS)])


def vocabulary_order(counts: np.ndarray, names: Names) -> np.ndarray:
    """The balanced order of features.

    Args:
      counts: `[features]` how many rows have the feature.
      names: `[features]` its name; equal counts are ranked by name (code points).

    Returns:
      `[features]` positions into `counts`: element `j` is the feature to put in column
      `j`. For a matrix: `matrix[:, order]`.
    """
    at = np.arange(len(counts))
    table = pa.table({"count": counts, "name": to_arrow(names), "at": at})
    by_rank = table.sort_by([("count", "descending"), ("name", "ascending")])
    return by_rank["at"].to_numpy()[popularity_ranks(len(counts))]


def popularity_ranks(count: int) -> np.ndarray:
    """`[count]` the rank of the feature in each column of the balanced order."""
    rank = np.arange(count)
    return np.lexsort((rank, _BIT_REVERSED[rank % HANDS]))


# Above this, the fullest device of a mesh decides how long a step takes.
MAX_IMBALANCE = 1.3


def imbalance(counts: np.ndarray, ways: int) -> float:
    """Entries of the fullest of `ways` contiguous column ranges over their mean."""
    total = counts.sum(dtype=np.int64)
    edges = np.arange(ways) * len(counts) // ways
    parts = np.add.reduceat(counts, edges, dtype=np.int64)
    return float(parts.max() * ways / total)
