"""Batches of rows, and capacities for their entries in compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.data.reading.sources import Inputs
from sparsejax.mesh.blocks import ShardedCSR, SparseRows
from sparsejax.mesh.layout import (
    axis_sizes,
    current_mesh,
    mesh_is_set,
    padded_rows,
    parts_of_axes,
    put_rows,
)
from sparsejax.sparse import CSR, take_rows

Array = jax.Array | np.ndarray

# Matrices and arrays by input name. They are on the device, or on the host while a mesh is set.
Held = dict[str, CSR | Array]


def bucket(count: int) -> int:
    """The capacity to compile for, so that `count` entries fit into it.

    Capacities are 16, 24, 32, 40, 56, 72, 96, ...: multiples of 8, each about 1.25 times the
    previous one. So few different programs are compiled, and at most a fifth of a large capacity
    is unused.
    """
    size = 16
    while size < count:
        size = -(-size * 5 // 32) * 8
    return size


def close_bucket(count: int) -> int:
    """The capacity for a count that is nearly constant: at most 1/32 of it is unused."""
    step = max(8, 2 ** (count.bit_length() - 6))
    return max(16, -(-count // step) * step)


def largest_batch(lengths: Array, batches: Array) -> int:
    """Number of entries in the fullest batch.

    Args:
      lengths: `[rows]` entries of each row.
      batches: `[steps, batch]` rows of each batch, padded with -1.
    """
    if batches.size == 0 or lengths.size == 0:
        return 0
    # The index -1 (padding) reads the last row, so it is multiplied by 0.
    entries = lengths[batches] * (batches >= 0)
    return int(entries.sum(axis=-1).max())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of a matrix. A compiled program gathers them by `take`.

    Attributes:
      matrix: all rows, on the device. On a mesh, only the rows of the batch, in blocks.
      rows: `[batch]` row numbers; -1 is an empty row.
      nse: capacity for the entries of the batch, or of a block of it (static).
    """

    matrix: SparseRows
    rows: Array
    nse: int = dataclasses.field(metadata={"static": True})

    def take(self) -> SparseRows:
        """Gathers the rows of the batch, `[batch, num_cols]`."""
        if isinstance(self.matrix, ShardedCSR):
            return self.matrix
        return take_rows(self.matrix, jnp.asarray(self.rows), self.nse)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DenseBatch:
    """Some rows of an array. A compiled program gathers them by `take`.

    Attributes:
      array: all rows, on the device. On a mesh, only the rows of the batch.
      rows: `[batch]` row numbers; -1 takes an arbitrary row. None if `array` has only the batch's
          rows.
    """

    array: jax.Array
    rows: Array | None

    def take(self) -> jax.Array:
        """Gathers the rows of the batch, `[batch, ...]`."""
        if self.rows is None:
            return self.array
        return self.array[jnp.maximum(self.rows, 0)]


# The inputs of a model: a batch of its single input, or a batch of each input by name.
Shown = Batch | Mapping[str, Batch | DenseBatch]


def taken(shown: Shown) -> SparseRows | dict[str, SparseRows | jax.Array]:
    """Calls `take` of each input."""
    if isinstance(shown, Batch):
        return shown.take()
    return {name: batch.take() for name, batch in shown.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Rows of a matrix in batches of equal size, with a capacity for the fullest batch.

    Attributes:
      matrix: all rows, on the device; on the host if a mesh is set.
      rows: `[steps, batch]` int32 row numbers. The last batch is padded with -1.
      nse: capacity for the entries of a batch, or of a block of a batch.
      mesh: mesh on whose devices the blocks of each batch are placed, or None.
    """

    matrix: CSR
    rows: np.ndarray
    nse: int
    mesh: jax.sharding.Mesh | None = None

    @classmethod
    def of(cls, matrix: CSR, rows: np.ndarray, batch_size: int) -> Batches:
        """Divides `rows: [n]` into batches in their order; -1 is an empty row.

        Args:
          matrix: matrix from `for_batches`.
          rows: row numbers of the matrix.
          batch_size: batch size from `rows_in_a_batch`.
        """
        batches = _in_batches(rows, batch_size)
        if not mesh_is_set():
            lengths = np.diff(np.asarray(matrix.indptr))
            return cls(matrix, batches, bucket(largest_batch(lengths, batches)))
        most = _largest_block(matrix, batches, *axis_sizes())
        return cls(matrix, batches, bucket(most), jax.sharding.get_mesh())

    def __iter__(self) -> Iterator[Batch]:
        for rows in self.rows:
            matrix = self.matrix
            if self.mesh is not None:
                parts = rows.reshape(self.mesh.shape["data"], -1)
                matrix = ShardedCSR.from_host(matrix, parts, self.mesh, nse=self.nse)
            yield Batch(matrix, rows, self.nse)


@dataclasses.dataclass(frozen=True, eq=False)
class DenseBatches:
    """Rows of an array in batches of equal size.

    Attributes:
      array: all rows, on the device; on the host if a mesh is set.
      rows: `[steps, batch]` int32 row numbers. The last batch is padded with -1.
      mesh: mesh over whose axis "data" each batch is divided.
    """

    array: Array
    rows: np.ndarray
    mesh: jax.sharding.Mesh | None = None

    @classmethod
    def of(cls, array: Array, rows: np.ndarray, batch_size: int) -> DenseBatches:
        """Divides these rows into batches, see `Batches.of`."""
        return cls(array, _in_batches(rows, batch_size), current_mesh())

    def __iter__(self) -> Iterator[DenseBatch]:
        for rows in self.rows:
            if self.mesh is None:
                yield DenseBatch(jnp.asarray(self.array), rows)
            else:
                some = np.asarray(self.array)[np.maximum(rows, 0)]
                yield DenseBatch(put_rows(some, self.mesh), None)


@dataclasses.dataclass(frozen=True, eq=False)
class NamedBatches:
    """Batches of the same rows from several matrices and arrays, by name."""

    parts: Mapping[str, Batches | DenseBatches]

    def __iter__(self) -> Iterator[dict[str, Batch | DenseBatch]]:
        for batches in zip(*self.parts.values(), strict=True):
            yield dict(zip(self.parts, batches, strict=True))


def held_inputs(inputs: Inputs) -> Held:
    """Converts each matrix or array of the inputs to the form that `batches_of` takes."""
    return {
        name: for_batches(part.matrix)
        if isinstance(part.matrix, CSR)
        else for_dense_batches(part.matrix)
        for name, part in inputs.parts.items()
    }


def batches_of(
    inputs: Inputs, held: Held, rows: np.ndarray, batch_size: int
) -> Batches | NamedBatches:
    """Divides `rows: [n]` of the inputs into batches; -1 is an empty row. See `Batches.of`."""
    parts = {
        name: Batches.of(matrix, rows, batch_size)
        if isinstance(matrix, CSR)
        else DenseBatches.of(matrix, rows, batch_size)
        for name, matrix in held.items()
    }
    if not inputs.alone:
        return NamedBatches(parts)
    [alone] = parts.values()
    assert isinstance(alone, Batches)
    return alone


def _in_batches(rows: np.ndarray, batch_size: int) -> np.ndarray:
    """Reshapes `rows: [n]` to `[steps, batch]` int32, padded at the end with -1."""
    steps = -(-len(rows) // batch_size)
    missing = (0, steps * batch_size - len(rows))
    padded = np.pad(rows.astype(np.int32), missing, constant_values=-1)
    return padded.reshape(steps, batch_size)


def _largest_block(matrix: CSR, batches: np.ndarray, data: int, model: int) -> int:
    """Number of entries in the fullest block, for `batches: [steps, batch]` on a mesh."""
    parts = batches.reshape(len(batches), data, -1)
    place = matrix.indices // (padded_rows(matrix.num_cols) // model)
    most = 0
    for m in range(model):
        before = np.append(0, np.cumsum(place == m))
        most = max(most, largest_batch(np.diff(before[matrix.indptr]), parts))
    return most


def rows_in_a_batch(most: int, rows: int) -> int:
    """The batch size: `most`, or less if there are fewer `rows`.

    On a mesh it is a multiple of the number of parts into which a batch is divided.
    """
    parts = parts_of_axes()[0]
    return -(-min(most, bucket(rows)) // parts) * parts


def for_batches(matrix: CSR) -> CSR:
    """The matrix on the device; on the host if a mesh is set, as blocks are made there."""
    if mesh_is_set():
        return jax.tree.map(np.asarray, matrix)
    return on_device(matrix)


def for_dense_batches(array: np.ndarray) -> Array:
    """Places an array as `for_batches` and `on_device` do. An empty array gets one row."""
    more = [(0, bucket(len(array)) - len(array))] + [(0, 0)] * (array.ndim - 1)
    padded = np.pad(array, more)
    return padded if mesh_is_set() else jnp.asarray(padded)


def on_device(matrix: CSR) -> CSR:
    """Copies a matrix to the device. One from the host is padded to rounded sizes.

    So a compiled program can be reused for data of similar size, for example for requests to a
    service. Padding rows are empty.
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
