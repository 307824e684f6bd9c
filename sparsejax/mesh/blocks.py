"""Sparse matrices in blocks, one for each device of a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.mesh.exchange import DividedRows
from sparsejax.mesh.layout import (
    ROW_MULTIPLE,
    axis_sizes,
    call_on_each_device,
    padded_rows,
)
from sparsejax.mesh.per_device import (
    blocks_of,
    columns_between,
    gathered_columns,
    on_blocks,
    own_block,
    transpose_over_data,
)
from sparsejax.sparse import CSR, MAX_ENTRIES, Transposed, host_rows, take_rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("blocks", "transposed"),
    meta_fields=("num_cols", "spread"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedCSR:
    """A `[rows, num_cols]` sparse matrix in blocks, one for each device of a mesh.

    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> with jax.set_mesh(make_mesh(data=1, model=1)):
    ...     blocks = ShardedCSR.of(x)
    >>> blocks.shape, blocks.blocks.indices.shape
    ((2, 5), (1, 1, 2))

    Block `(d, m)` is on the device with these coordinates on the axes "data" and
    "model". It has the d-th of equal parts of the rows, and the columns that belong to
    the m-th part of a kernel; the first of these is column 0 of the block. So each device has a
    plain CSR with the entries of its own kernel rows.

    Every operation takes a `ShardedCSR` in place of a `CSR`, under `jax.set_mesh`.

    Attributes:
      blocks: a stack of matrices, its leaves `[data, model, ...]`.
      num_cols: number of columns (static).
      transposed: for each part of the columns, the entries of all rows by column, if
        they were sorted before. Its leaves are `[model, ...]`.
      spread: whether a result with one row for each row of the matrix is divided over both
        axes; otherwise over "data" only (static). See `of_rows`.
    """

    blocks: CSR
    num_cols: int = dataclasses.field(kw_only=True)
    transposed: Transposed | None = dataclasses.field(kw_only=True, default=None)
    spread: bool = dataclasses.field(kw_only=True, default=False)

    @property
    def num_rows(self) -> int:
        """Number of rows of all blocks together."""
        return self.blocks.indptr.shape[-3] * self.blocks.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, num_cols)`."""
        return self.num_rows, self.num_cols

    @property
    def nse(self) -> int:
        """Capacity: number of entries that can be stored in all blocks together."""
        data, model = self.blocks.indptr.shape[-3:-1]
        return data * model * self.blocks.nse

    @property
    def data(self) -> jax.Array | np.ndarray | None:
        """`[data, model, nse]` values, or None for an indicator matrix."""
        return self.blocks.data

    def with_data(self, data: jax.Array | None) -> ShardedCSR:
        """This matrix with other values."""
        return dataclasses.replace(
            self, blocks=dataclasses.replace(self.blocks, data=data)
        )

    @classmethod
    def of(cls, x: CSR) -> ShardedCSR:
        """Divides a matrix that each device has whole into blocks.

        Differentiable in `data`. Each block has space for all entries of `x`, because all
        may be in one block.

        Raises:
          ValueError: no mesh is set, or its axis "data" does not divide the rows.
        """
        data, model = axis_sizes()
        if x.num_rows % data:
            raise ValueError(
                f"{x.num_rows:,} rows cannot be divided by {data}, the size of the "
                'mesh\'s axis "data"'
            )
        rows, width = x.num_rows // data, padded_rows(x.num_cols) // model

        def block(x):
            first = lax.axis_index("data") * rows
            part = take_rows(x, first + jnp.arange(rows, dtype=jnp.int32), x.nse)
            cut = lax.dynamic_slice_in_dim(x.overfull_rows(), first, rows)
            return columns_between(part, lax.axis_index("model"), width, cut)

        blocks = blocks_of(block, (dataclasses.replace(x, transposed=None),), (P(),))
        return cls(blocks, num_cols=x.num_cols)

    @classmethod
    def of_rows(cls, parts: CSR) -> ShardedCSR:
        """Makes the blocks of a batch whose rows are divided over all devices.

        This is for training where every device gets its own examples, with all columns.
        The devices along "model" exchange their entries. The result of a lookup is then
        divided over all devices, like the batch. Differentiable in `data`.

        Args:
          parts: a stack of matrices, its leaves `[data, model, ...]` over both axes of
            the mesh. The rows of the batch are the rows of part (0, 0), then of (0, 1),
            ...
        """
        data, model = axis_sizes()
        if parts.indptr.ndim != 3 or parts.indptr.shape[:2] != (data, model):
            raise ValueError(
                f"expected leaves [data={data}, model={model}, n], got indptr "
                f"{parts.indptr.shape}"
            )
        width = padded_rows(parts.num_cols) // model

        blocks = on_blocks(
            lambda part: gathered_columns(part, width),
            dataclasses.replace(parts, transposed=None),
        )
        return cls(blocks, num_cols=parts.num_cols, spread=True)

    @classmethod
    def from_host(
        cls,
        matrix: CSR,
        rows: np.ndarray,
        mesh: jax.sharding.Mesh,
        *,
        nse: int | None = None,
    ) -> ShardedCSR:
        """Makes the blocks of some rows of a NumPy matrix, and copies each to its device.

        Args:
          matrix: the matrix from which rows are taken.
          rows: `[data, n]` the row numbers of each part; -1 is an empty row.
          mesh: mesh with the axes "data" and "model".
          nse: capacity of a block; by default the number of entries of the fullest
            block.

        Raises:
          ValueError: the entries of a block do not fit in `nse` or in 2^31 - 1.
        """
        parts = {d: host_rows(matrix, rows[d]) for d in parts_of_process(mesh)}
        return cls.from_parts(parts, rows.shape[1], mesh, nse=nse)

    @classmethod
    def from_parts(
        cls,
        parts: Mapping[int, CSR],
        rows: int,
        mesh: jax.sharding.Mesh,
        *,
        nse: int | Callable[[int], int] | None = None,
    ) -> ShardedCSR:
        """Makes the blocks of a matrix of which each process has the rows of its own devices.

        All processes must call this.

        Args:
          parts: a NumPy matrix of at most `rows` rows for each of `parts_of_process`.
          rows: number of rows of a part; rows that a matrix lacks are empty.
          mesh: mesh with the axes "data" and "model".
          nse: capacity of a block, or a function that computes it from the number of
            entries in the fullest block of all processes. By default it is this number.

        Raises:
          ValueError: the entries of a block do not fit in `nse` or in 2^31 - 1.
        """
        some = next(iter(parts.values()))
        shape = mesh.shape["data"], mesh.shape["model"]
        width = padded_rows(some.num_cols) // shape[1]
        places = {d: np.asarray(part.indices) // width for d, part in parts.items()}
        counts = {
            d: np.bincount(place, minlength=shape[1]) for d, place in places.items()
        }
        fullest = max(int(count.max()) for count in counts.values())
        if jax.process_count() > 1 and not isinstance(nse, int):
            everywhere = np.asarray(min(fullest, 2**31 - 1), np.int32)
            fullest = int(multihost_utils.process_allgather(everywhere).max())
        if not isinstance(nse, int):
            nse = max(fullest, 1) if nse is None else nse(fullest)
        if fullest > min(nse, MAX_ENTRIES):
            raise ValueError(
                f"a block has {fullest:,} entries, there is room for "
                f"{min(nse, MAX_ENTRIES):,}; divide the matrix over more devices"
            )

        def entries(values, index):
            d, m = (part.start or 0 for part in index[:2])
            mine = values(parts[d])[places[d] == m]
            return np.pad(mine, (0, nse - len(mine)))[None, None]

        def columns(index):
            found = entries(lambda part: np.asarray(part.indices), index)
            # Padding entries may have any values.
            return (found - (index[1].start or 0) * width).astype(np.int32)

        def indptr(index):
            d, m = (part.start or 0 for part in index[:2])
            before = np.concatenate([[0], np.cumsum(places[d] == m)])
            ends = before[np.asarray(parts[d].indptr)].astype(np.int32)
            return np.pad(ends, (0, rows + 1 - len(ends)), mode="edge")[None, None]

        def made(size, block):
            return jax.make_array_from_callback(
                (*shape, size), NamedSharding(mesh, P("data", "model")), block
            )

        data = None
        if some.data is not None:
            data = made(nse, functools.partial(entries, lambda p: np.asarray(p.data)))
        blocks = CSR(data, made(nse, columns), made(rows + 1, indptr), num_cols=width)
        return cls(blocks, num_cols=some.num_cols)

    @property
    def rows_spec(self) -> P:
        """The partition spec of an array with a row for each row of the matrix."""
        return P(("data", "model")) if self.spread else P("data")

    def sum_over_columns(self, values: jax.Array) -> jax.Array:
        """In `shard_map`: the sum over the devices along "model", divided as in `rows_spec`.

        `values` has a row for each row of a block. Sums are computed in float32.
        """
        wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        if self.spread:
            total = lax.psum_scatter(wide, "model", scatter_dimension=0, tiled=True)
        else:
            total = lax.psum(wide, "model")
        return total.astype(values.dtype)

    def take(self, rows: jax.Array, nse: int) -> ShardedCSR:
        """Takes some rows of each part for many batches, as a stack of matrices.

        Nothing moves between devices.

        Args:
          rows: `[steps, data, n]` rows for each batch, numbered from the first row of their
            part. A row that does not exist, such as -1, is empty.
          nse: capacity of a block, see `fullest`. Rows that do not fit give NaN in every
            operation.

        Returns:
          `[data * n, num_cols]` matrices; the leaves of the blocks are
          `[steps, data, model, ...]`.
        """

        def block(part, rows):
            part = own_block(part)
            taken = jax.vmap(lambda r: take_rows(part, r, nse))(rows[:, 0])
            return jax.tree.map(lambda leaf: leaf[:, None, None], taken)

        blocks = call_on_each_device(
            block,
            (dataclasses.replace(self.blocks, transposed=None), rows),
            (P("data", "model"), P(None, "data")),
            P(None, "data", "model"),
        )
        return ShardedCSR(blocks, num_cols=self.num_cols)

    def fullest(self, rows: jax.Array) -> jax.Array:
        """`[]` int32: number of entries in the fullest block that `take` makes of these rows."""

        def block(indptr, rows):
            lengths, rows = jnp.diff(indptr[0, 0]), rows[:, 0]
            lengths = lengths.at[rows].get(mode="fill", fill_value=0)
            entries = jnp.sum(jnp.where(rows >= 0, lengths, 0), axis=1)
            return lax.pmax(jnp.max(entries, initial=0), ("data", "model"))

        return call_on_each_device(
            block,
            (self.blocks.indptr, rows),
            (P("data", "model"), P(None, "data")),
            P(),
        )

    def row_lengths(self) -> jax.Array:
        """`[rows]` int32: number of entries of each row."""
        lengths = jnp.sum(jnp.diff(self.blocks.indptr), axis=-2, dtype=jnp.int32)
        return lengths.reshape(*lengths.shape[:-2], self.num_rows)

    def row_ids(self) -> jax.Array:
        """`[data, model, nse]` int32: the row of each entry; at least `rows` for padding."""
        data = self.blocks.indptr.shape[-3]
        local = jax.vmap(jax.vmap(CSR.row_ids))(self.blocks)
        first = jnp.arange(data, dtype=jnp.int32)[:, None, None] * self.blocks.num_rows
        padding = local >= self.blocks.num_rows
        return jnp.where(padding, self.num_rows, local + first)

    def column_ids(self) -> jax.Array:
        """`[data, model, nse]` int32: the column of each entry."""
        model = self.blocks.indptr.shape[-2]
        first = jnp.arange(model, dtype=jnp.int32)[:, None] * self.blocks.num_cols
        return jnp.asarray(self.blocks.indices) + first[None]

    def with_transposed(self) -> ShardedCSR:
        """This matrix, or stack of matrices, with its entries also sorted by column."""
        return dataclasses.replace(self, transposed=self.by_column())

    def by_column(self) -> Transposed:
        """For each part of the columns, the entries of all rows by column.

        They are sorted in this call, unless `transposed` has them. `order` numbers the entries
        of all blocks along "data", one block after the other.
        """
        if self.transposed is not None:
            return self.transposed
        stacked = self.blocks.indptr.ndim > 3
        lead = (None,) if stacked else ()

        def sort(blocks):
            return jax.tree.map(
                lambda leaf: jnp.expand_dims(leaf, len(lead)),
                transpose_over_data(blocks),
            )

        return call_on_each_device(
            lambda blocks: sort(own_block(blocks)),
            (dataclasses.replace(self.blocks, transposed=None),),
            (P(*lead, "data", "model"),),
            P(*lead, "model"),
        )

    def todense(self) -> jax.Array:
        """The dense `[rows, num_cols]` array, for tests and small matrices."""
        dense = jax.vmap(jax.vmap(CSR.todense))(self.blocks)
        dense = dense.transpose(0, 2, 1, 3).reshape(self.num_rows, -1)
        return dense[:, : self.num_cols]


SparseRows = CSR | ShardedCSR
"""Sparse rows, on one device or in blocks on a mesh. Every operation takes both."""

LookupRows = CSR | ShardedCSR | DividedRows
"""What a lookup and the gradient of its kernel take."""


def check_sparse_rows(x: object, num_features: int | None = None) -> None:
    """Raises TypeError unless `x` is sparse rows, ValueError if its number of columns differs."""
    if not isinstance(x, SparseRows):
        raise TypeError(
            f"expected a CSR, got {type(x).__name__}; of a SciPy matrix CSR.from_scipy "
            "makes one"
        )
    if num_features is not None and x.num_cols != num_features:
        raise ValueError(
            f"x has {x.num_cols:,} columns but the model has {num_features:,} features; "
            "read both with the same vocabulary"
        )


def check_kernel_rows(name: str, kernel: jax.Array, x: ShardedCSR) -> None:
    """Raises ValueError unless each device has the kernel rows of its block's columns."""
    rows = padded_rows(x.num_cols)
    if kernel.shape[0] != rows:
        raise ValueError(
            f"{name} has {kernel.shape[0]:,} rows; on a mesh a matrix of "
            f"{x.num_cols:,} columns needs {rows:,}, a multiple of {ROW_MULTIPLE}"
        )


def parts_of_process(mesh: jax.sharding.Mesh) -> list[int]:
    """The indices on the axis "data" at which this process has a device."""
    mine = np.vectorize(lambda device: device.process_index)(mesh.devices)
    axis = mesh.axis_names.index("data")
    here = np.moveaxis(mine == jax.process_index(), axis, 0)
    return np.flatnonzero(here.reshape(len(here), -1).any(axis=1)).tolist()
