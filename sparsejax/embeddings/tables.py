"""Access to whole tables of a collection: as arrays, as files, and as changes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from sparsejax.embeddings import exports
from sparsejax.embeddings.dynamic.state import TableStats
from sparsejax.embeddings.exports import Export, Part
from sparsejax.embeddings.lookup import Sender
from sparsejax.embeddings.placement import Stack, StackedTable
from sparsejax.embeddings.stores.dynamic import DynamicStore
from sparsejax.embeddings.stores.host import DynamicHostStore, HostStore
from sparsejax.embeddings.stores.static import StaticStore
from sparsejax.embeddings.stores.store import Owner, Store
from sparsejax.optimizers.optimizer import Optimizer

# The kinds of stores, by the name in table configurations.
STORES: dict[str, type[Store]] = {
    "static": StaticStore,
    "dynamic": DynamicStore,
    "host": HostStore,
    "dynamic_host": DynamicHostStore,
}


def make_stores(owner: Owner, stacks: Sequence[Stack], key: jax.Array) -> None:
    """Adds the variables of all stores to a new collection."""
    for kind in dict.fromkeys(stack.store for stack in stacks):
        STORES[kind].prepare(owner, key)
    kernels, indexes = {}, {}
    for stack in stacks:
        store = STORES[stack.store]
        kernels[stack.name] = store.first_kernel(owner, stack, key)
        if known := store.new_known(stack):
            indexes[stack.name] = known
    owner.kernels, owner.indexes = nnx.data(kernels), nnx.data(indexes)


def sender_of(tables: Tables, stores: Sequence[Store] | None = None) -> Sender:
    """A `Sender` for the ids of some stores, by default of all."""
    stores = tables.stores() if stores is None else stores
    stacks = tuple(store.stack for store in stores)
    features = {feature.name for stack in stacks for feature in stack.features}
    names = tuple(name for name in tables.names if name in features)
    divided = tuple(store.divided for store in stores)
    return Sender(names, stacks, divided, tables.settings)


class Tables(Owner):
    """The tables of an `EmbeddingCollection`, without the features that read them."""

    def stats(self) -> dict[str, TableStats]:
        """The counters of each dynamic table since it was made."""
        found: dict[str, TableStats] = {}
        for store in self.stores():
            found |= store.stats()
        return found

    def ids(self, name: str) -> np.ndarray:
        """`[ids]` uint64: the ids of a dynamic table that have a row, ascending."""
        store, pieces = self._table(name)
        return store.ids(pieces[0])

    def halve_counts(self) -> None:
        """Halves the counts of ids without a row, for `Admit(count=...)`.

        If it is called regularly, rare ids are forgotten.
        """
        for store in self.stores():
            store.halve_counts()

    def table(self, name: str) -> Float[jax.Array, "rows dim"]:
        """The rows of a table, in the order of ids.

        If rows have pending updates under their rule, call `optimizer.flush(model)` first.
        """
        store, pieces = self._table(name)
        return store.table(pieces)

    def set_table(self, name: str, array: Any) -> None:
        """Replaces the rows of a table.

        Args:
          name: name of the table.
          array: `[num_rows, dim]`, in the order of ids.

        Raises:
          ValueError: the table does not exist, or the shape is wrong.
        """
        store, pieces = self._table(name)
        expected = (pieces[0].config.num_rows, pieces[0].config.dim)
        if np.shape(array) != expected:
            raise ValueError(
                f"table {name!r} is {expected[0]:,} x {expected[1]:,}, got an array of the "
                f"shape {np.shape(array)}"
            )
        store.set_table(pieces, array)

    def save_table(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        names: Sequence[object] | None = None,
        optimizer: Optimizer | None = None,
        within: Sequence[Any] = (),
    ) -> None:
        """Writes the rows of a table to a file, in the order of ids.

        ::

            .parquet    columns `id`, `name` if there are names, `row` (a list of fixed size)
            .npy        the array `[num_rows, dim]`

        Of a dynamic table `.parquet` has the columns `id` (uint64), `row`, `count` (how often
        the id was seen), `last` (when, by the clock of `assign_rows`) and, with `optimizer`,
        one for each array of its state. `load_table` reads it.

        The file appears whole or not at all. Neither the host nor a device needs room for
        the whole table. With several processes all call this and the first one writes.
        Numbers are float32, those of a float64 table float64.

        >>> tables = {"user": TableConfig(4, 2)}
        >>> embeddings = EmbeddingCollection(tables, {"user": "user"}, rngs=nnx.Rngs(0))
        >>> embeddings.save_table("user.parquet", "user.parquet")
        Traceback (most recent call last):
        ValueError: there is no table 'user.parquet'; there are ['user']
        >>> embeddings.save_table("user", "user.parquet", names=["ann", "bob"])

        Args:
          name: name of the table. If its rows have pending updates, call `optimizer.flush(model)`
              first.
          path: path of the file, which is replaced if it exists.
          names: names of the ids, in the order of ids; not for a dynamic table. If there are
            fewer names than ids, they belong to the last ids: `ClickDataset.vocabularies` begin
            with id 2.
          optimizer: optimizer whose state of the rows is written, too; only for a dynamic table.
          within: the path of this collection in the model, if the model has several collections
            with dynamic tables of one width.

        Raises:
          OSError: the file cannot be written.
          OtherProcessError: process 0 could not write the file; the message says why.
          ValueError: there is no such table, `path` has another ending or cannot be a file,
            there are more names than rows, an argument is for tables of the other kind, or
            rows in host memory have the state of another optimizer.
        """
        store, pieces = self._table(name, within)
        store.save(pieces, pathlib.Path(path), names, optimizer)

    def load_table(
        self,
        name: str,
        path: str | os.PathLike[str],
        optimizer: Optimizer | None,
        *,
        replace: bool = True,
        within: Sequence[Any] = (),
    ) -> None:
        """Replaces the ids and rows of a table by the content of a file from `save_table`.

        The mesh may differ, and a dynamic table may have another number of rows. After an error
        the table is unchanged. The file is read in blocks, twice: the host needs memory for the
        ids.

        Args:
          name: name of the table.
          path: path of a Parquet file with the columns `id` and `row`. Without `count` and `last`,
              ids count as seen once, at time 0. Or path of a folder that `sok.dump` of
              SparseOperationKit wrote, optionally followed by the name of a table in it:
              "folder/user_0".
          optimizer: optimizer that trains the model. If the file has optimizer state, this
              optimizer must have done equally many steps. If it has none, rows get the state of a
              new optimizer. With None the state is not changed: for a model that is not trained.
          replace: whether ids that are not in the file lose their rows. Ids that had a row already
              keep their `count` and `last`, if the file has none.
          within: the path of this collection in the model, if the model has several collections
            with dynamic tables of one width.

        Raises:
          OSError: the file cannot be read.
          ValueError: there is no such table; the file has rows of another width or dtype, an
            id twice, numbers that are not finite, more ids than there is room for, too few
            for a static table, or the state of another rule or after other steps; or it is
            damaged.
        """
        store, pieces = self._table(name, within)
        store.load(pieces, pathlib.Path(path), optimizer, replace=replace)

    def export_changes(
        self,
        folder: str | os.PathLike[str],
        optimizer: Optimizer | None,
        *,
        state: bool = False,
        within: Sequence[Any] = (),
    ) -> Export:
        """Writes the changes of the tables since the last export into a folder.

        For a whole model, whose other layers change, too, use `sparsejax.export_changes`.

        Args:
          folder: folder that collects the exports; it is created if it does not exist.
          optimizer: optimizer that trains the model. With None, rows are written without pending
              updates.
          state: whether to write the optimizer state of the rows of dynamic tables, too. Under
              most rules each step changes the state of every row, so that each export has all
              rows.
          within: the path of this collection in the model, if the model has several collections
            with dynamic tables of one width.
        """
        parts = self.parts(within=within)
        values = {"seed": self.seed[...]} if self.indexes else {}
        path = pathlib.Path(folder)
        return exports.export(self, path, parts, values, optimizer, state=state)

    def parts(self, *, prefix: str = "", within: Sequence[Any] = ()) -> list[Part]:
        """A `Part` for each stack, from which `export_changes` writes the stack.

        Args:
          prefix: path of this collection, with which the names of tables begin.
          within: the path of this collection in the model, if the model has several collections
            with dynamic tables of one width.
        """
        return [Part(prefix, store) for store in self.stores(within)]

    def table_rows(self, name: str) -> Iterator[np.ndarray]:
        """The rows of a table in the order of ids, in blocks `[n, dim]` on the host.

        With several processes, each must iterate over all blocks.
        """
        store, pieces = self._table(name)
        return store.table_rows(pieces)

    def stores(self, within: Sequence[Any] = ()) -> list[Store]:
        """The stores of the stacks; for `within` see `assign_rows`."""
        return [STORES[stack.store](self, stack, within) for stack in self.stacks]

    def _table(
        self, name: str, within: Sequence[Any] = ()
    ) -> tuple[Store, tuple[StackedTable, ...]]:
        """The store and the pieces of a table."""
        for store in self.stores(within):
            if pieces := tuple(t for t in store.stack.tables if t.name == name):
                return store, pieces
        names = {table.name for stack in self.stacks for table in stack.tables}
        raise ValueError(f"there is no table {name!r}; there are {sorted(names)}")
