"""Static tables on the devices: ids are the numbers of rows."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sparsejax.embeddings import table_files
from sparsejax.embeddings.feature_batch import FeatureBatch
from sparsejax.embeddings.lookup import Call, look_up
from sparsejax.embeddings.placement import Stack, StackedTable, first_rows, spec_of
from sparsejax.embeddings.stores.store import Found, Owner, Store
from sparsejax.mesh.exchange import SentKeys
from sparsejax.mesh.layout import call_with_auto_axes, jit_sharded, replicated
from sparsejax.ops import index_edits
from sparsejax.optimizers import inplace
from sparsejax.optimizers.gradients import RowParam
from sparsejax.optimizers.optimizer import Optimizer

Pieces = tuple[StackedTable, ...]
# Number of rows that are written at a time.
_BLOCK = 2**20


class StaticStore(Store):
    """Tables of `TableConfig`, whose rows are all on the devices."""

    @classmethod
    def first_kernel(cls, owner: Owner, stack: Stack, key: jax.Array) -> RowParam:
        # Compiled, so that only the result is allocated, and directly on its devices.
        make = jit_sharded(first_rows, spec_of(stack), static=(0,))
        return cls.new_kernel(owner, stack, make(stack, key))

    def rows(self, batch: FeatureBatch, call: Call) -> Found:
        name = self.stack.name
        x = batch.routes.get(name)
        x = batch.stacks[name] if x is None else x
        assert not isinstance(x, SentKeys)
        return Found(*look_up(self.stack, self.kernel, x, call))

    def ids(self, table: StackedTable) -> np.ndarray:
        raise ValueError(
            f"table {table.name!r} is not dynamic: its ids are 0 to "
            f"{table.config.num_rows - 1:,}"
        )

    def id_blocks(self, table: StackedTable) -> Iterator[np.ndarray]:
        for start in range(0, table.config.num_rows, _BLOCK):
            stop = min(start + _BLOCK, table.config.num_rows)
            yield np.arange(start, stop, dtype=np.uint64)

    def rows_of(self, table: StackedTable, ids: np.ndarray) -> np.ndarray:
        return self.stack.row_of(ids.astype(np.int64), table.place)

    def ids_in(
        self, pieces: Pieces, mask: np.ndarray, keys: jax.Array | None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        del keys
        found = [np.zeros(0, np.uint64)]
        rows = np.flatnonzero(mask).astype(np.int32)
        block = index_edits.block(len(rows))
        for start in range(0, len(rows), block):
            some = rows[start : start + block]
            which, ids = _ids_at(self.stack, np.pad(some, (0, block - len(some))))
            which, ids = (np.asarray(a)[: len(some)] for a in (which, ids))
            mine = np.isin(which, [self.stack.tables.index(p) for p in pieces])
            found.append(ids[mine & (ids >= 0)].astype(np.uint64))
        ids = np.unique(np.concatenate(found))
        return ids, [self.rows_of(piece, ids) for piece in pieces]

    def placed(
        self,
        path: str | os.PathLike[str],
        pieces: Pieces,
        ids: np.ndarray,
        removed: np.ndarray | None,
    ) -> list[np.ndarray]:
        rows = pieces[0].config.num_rows
        if len(ids) and ids[-1] >= rows:
            raise ValueError(
                f"{path} has the id {ids[-1]:,}, but the table {pieces[0].name!r} has "
                f"{rows:,} rows: make it larger"
            )
        if removed is None and len(ids) < rows:
            raise ValueError(
                f"{path} has {len(ids):,} of the {rows:,} ids of the table "
                f"{pieces[0].name!r}: give replace=False to set these rows alone"
            )
        return [self.rows_of(piece, ids) for piece in pieces]

    def table(self, pieces: Pieces) -> jax.Array:
        def read(kernel):
            found = [replicated(kernel[_all_rows(self.stack, p)]) for p in pieces]
            return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)

        return call_with_auto_axes(read, self.kernel[...], out_specs=P())

    def table_rows(self, pieces: Pieces) -> Iterator[np.ndarray]:
        return table_files.table_rows(self.stack, pieces, self.kernel[...])

    def set_table(self, pieces: Pieces, array: Any) -> None:
        spec = spec_of(self.stack)
        write = jit_sharded(_with_table, spec, static=(0, 1), donate=(2,))
        inplace.overwrite(
            [self.kernel],
            lambda: ([write(self.stack, pieces, self.kernel[...], array)], None),
        )

    def save(
        self,
        pieces: Pieces,
        path: pathlib.Path,
        names: Sequence[object] | None,
        optimizer: Optimizer | None,
    ) -> None:
        if optimizer is not None:
            super().save(pieces, path, names, optimizer)
            return
        config = pieces[0].config
        like = jax.ShapeDtypeStruct((config.num_rows, config.dim), self.stack.dtype)
        table_files.save_table(path, self.table_rows(pieces), like, names)


_ids_at = jax.jit(lambda stack, rows: stack.ids_at(rows), static_argnums=0)


def _all_rows(stack: Stack, table: StackedTable) -> jax.Array:
    """The rows of a table as an array, in the order of their shards."""
    ids = jnp.arange(table.config.num_rows, dtype=jnp.int32)
    return stack.row_of(ids, table.place)


def _with_table(
    stack: Stack, pieces: Pieces, kernel: jax.Array, array: jax.Array
) -> jax.Array:
    def written(kernel, array):
        array = array.astype(kernel.dtype)
        for piece in pieces:
            rows, mine = _all_rows(stack, piece), stack.part_of(array, piece)
            kernel = kernel.at[rows].set(mine, unique_indices=True)
        return kernel

    return call_with_auto_axes(written, kernel, array, out_specs=spec_of(stack))
