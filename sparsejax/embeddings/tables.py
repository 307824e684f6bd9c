"""Whole tables of a collection: as arrays, as files, and their changes."""

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

# The kinds of stores, by the names that configurations of tables give.
STORES: dict[str, type[Store]] = {
    "static": StaticStore,
    "dynamic": DynamicStore,
    "host": HostStore,
    "dynamic_host": DynamicHostStore,
}


def make_stores(owner: Owner, stacks: Sequence[Stack], key: jax.Array) -> None:
    """Gives a new collection the variables of its stores."""
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
    """How the ids of some stores are sent ahead, by default of all."""
    stores = tables.stores() if stores is None else stores
    stacks = tuple(store.stack for store in stores)
    features = {feature.name for stack in stacks for feature in stack.features}
    names = tuple(name for name in tables.names if name in features)
    divided = tuple(store.divided for store in stores)
    return Sender(names, stacks, divided, tables.settings)


class Tables(Owner):
    """The tables of an `EmbeddingCollection`, without the features that read them."""

    def stats(self) -> dict[str, TableStats]:
        """Counts what became of the ids of each dynamic table, since it was made."""
        found: dict[str, TableStats] = {}
        for store in self.stores():
            found |= store.stats()
        return found

    def ids(self, name: str) -> np.ndarray:
        """`[ids]` uint64: the ids of a dynamic table that have a row, ascending."""
        store, pieces = self._table(name)
        return store.ids(pieces[0])

    def halve_counts(self) -> None:
        """Halves how often ids without a row were seen, for `Admit(count=...)`.

        Called now and then, it forgets ids that come seldom.
        """
        for store in self.stores():
            store.halve_counts()

    def table(self, name: str) -> Float[jax.Array, "rows dim"]:
        """The rows of a table, in the order of ids.

        Rules under which rows drift need `optimizer.flush(model)` before.
        """
        store, pieces = self._table(name)
        return store.table(pieces)

    def set_table(self, name: str, array: Any) -> None:
        """Replaces the rows of a table.

        Args:
          name: name of the table.
          array: `[num_rows, dim]`, in the order of ids.

        Raises:
          ValueError: there is no such table, or the shape is wrong.
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
        """Writes the rows of a table in the order of ids, some rows at a time.

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
          name: name of the table. If rows drift under its rule, call `optimizer.flush(model)`
            before.
          path: the file, which is replaced if it exists.
          names: names of the ids, in the order of ids; not for a dynamic table. If there are
            fewer names than ids, they belong to the last ids: `ClickDataset.vocabularies` begin
            with id 2.
          optimizer: an optimizer whose state of the rows is written, too; only for a dynamic
            table.
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
        """Replaces the ids and rows of a table by those of a file of `save_table`.

        The mesh may be another, and a dynamic table may have more rows or fewer. An error
        leaves the table as it is. The file is read some rows at a time, twice: the host needs
        room for the ids.

        Args:
          name: name of the table.
          path: a Parquet file with the columns `id` and `row`. Without `count` and `last` ids
            were seen once, at 0. Or a folder that `sok.dump` of SparseOperationKit wrote, or
            such a folder and the name of a table that it has: "folder/user_0".
          optimizer: the optimizer that trains the model. If the file has the state of an
            optimizer, this one must have done as many steps. If it has none, the rows have the
            state of a new optimizer. With None the state is not touched: for a model that is
            not trained.
          replace: whether ids that the file does not have lose their rows. Ids that had a row
            already keep their `count` and `last`, if the file has none.
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
        """Writes what has changed in the tables since the last export into a folder.

        `sparsejax.export_changes` does so for a whole model, whose other layers change, too.

        Args:
          folder: folder that collects the exports; it is created if it does not exist.
          optimizer: the optimizer that trains the model. With None the rows are written as they
            are.
          state: write the optimizer state of the rows of dynamic tables, too. Under most rules
            it changes in each step for each row, so that each export has all rows.
          within: the path of this collection in the model, if the model has several collections
            with dynamic tables of one width.
        """
        parts = self.parts(within=within)
        values = {"seed": self.seed[...]} if self.indexes else {}
        path = pathlib.Path(folder)
        return exports.export(self, path, parts, values, optimizer, state=state)

    def parts(self, *, prefix: str = "", within: Sequence[Any] = ()) -> list[Part]:
        """The stacks in the form that exports of changes take.

        Args:
          prefix: path of this collection, with which the names of tables begin.
          within: the path of this collection in the model, if the model has several collections
            with dynamic tables of one width.
        """
        return [Part(prefix, store) for store in self.stores(within)]

    def table_rows(self, name: str) -> Iterator[np.ndarray]:
        """The rows of a table in the order of ids, some at a time: `[n, dim]` on the host.

        With several processes all have to take all of them.
        """
        store, pieces = self._table(name)
        return store.table_rows(pieces)

    def stores(self, within: Sequence[Any] = ()) -> list[Store]:
        """The stores of the stacks; `within` is as in `assign_rows`."""
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
