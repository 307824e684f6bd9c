"""Rows in batches, and how much room a compiled program gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.sparse import CSR, take_rows

Array = jax.Array | np.ndarray


def bucket(count: int) -> int:
    """The capacity to compile for, so that `count` entries fit.

    One of 16, 24, 32, 40, 56, 72, 96, ...: multiples of 8, each about 1.25 times the
    one before. Few different programs are compiled, whatever the counts, and at most a
    fifth of a large capacity is unused.
    """
    size = 16
    while size < count:
        size = -(-size * 5 // 32) * 8
    return size


def batch_sizes(largest: int) -> list[int]:
    """Every `min(largest, bucket(rows))`: the sizes that batches of rows come in."""
    sizes = [bucket(1)]
    while sizes[-1] < largest:
        sizes.append(bucket(sizes[-1] + 1))
    return [*sizes[:-1], min(largest, sizes[-1])]


def largest_batch(lengths: Array, batches: Array) -> int:
    """Number of entries in the fullest batch.

    Args:
      lengths: `[rows]` entries of each row.
      batches: `[steps, batch]` rows of each batch; -1 is none.
    """
    if batches.size == 0 or lengths.size == 0:
        return 0
    entries = lengths[batches] * (batches >= 0)  # -1 reads some row, times 0
    return int(entries.sum(axis=-1).max())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of a matrix, to be taken inside a compiled program.

    Attributes:
      matrix: all rows, on the device.
      rows: `[batch]`; -1 makes an empty row.
      nse: room for their entries (static).
    """

    matrix: CSR
    rows: Array
    nse: int = dataclasses.field(metadata={"static": True})

    def take(self) -> CSR:
        """`[batch, num_cols]`."""
        return take_rows(self.matrix, jnp.asarray(self.rows), self.nse)


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Rows of a matrix in batches of one size, with room for the fullest of them.

    Attributes:
      matrix: all rows, on the device.
      rows: `[steps, batch]` int32, -1 where there is none, as at the end of the last.
      nse: room for the entries of a batch.
    """

    matrix: CSR
    rows: np.ndarray
    nse: int

    @classmethod
    def of(cls, matrix: CSR, rows: np.ndarray, batch_size: int) -> Batches:
        """Batches of `rows: [n]` in their order; -1 is an empty row."""
        steps = -(-len(rows) // batch_size)
        missing = (0, steps * batch_size - len(rows))
        padded = np.pad(rows.astype(np.int32), missing, constant_values=-1)
        batches = padded.reshape(steps, batch_size)
        lengths = np.diff(np.asarray(matrix.indptr))
        return cls(matrix, batches, bucket(largest_batch(lengths, batches)))

    def __iter__(self) -> Iterator[Batch]:
        return (Batch(self.matrix, rows, self.nse) for rows in self.rows)


def on_device(matrix: CSR) -> CSR:
    """The matrix on the device, with room to spare if it comes from the host.

    Rounded sizes let a compiled program serve other data too, as it comes in the
    requests to a service. Rows that are added are empty.
    """
    if isinstance(matrix.indices, jax.Array):
        return jax.tree.map(jnp.asarray, matrix)
    more = (0, bucket(matrix.nse) - matrix.nse)
    data = matrix.data
    if data is not None:
        data = jnp.asarray(np.pad(np.asarray(data), more), jnp.float32)
    indices = np.pad(np.asarray(matrix.indices), more)
    more = (0, bucket(matrix.num_rows) - matrix.num_rows)
    indptr = np.pad(np.asarray(matrix.indptr), more, mode="edge")
    return CSR(
        data,
        jnp.asarray(indices, jnp.int32),
        jnp.asarray(indptr, jnp.int32),
        num_cols=matrix.num_cols,
    )
