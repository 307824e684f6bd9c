"""The interface between an `EmbeddingCollection` and the stores of its stacks.

A store keeps the rows of one stack of tables. The collection packs the ids of a batch, reads the
rows from each store, and joins them. A new kind of store is a subclass of `Store`, which is
registered in `tables.STORES`, and a table configuration whose `store` is its name there.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.embeddings import sok_folders
from sparsejax.embeddings.config import Unknown
from sparsejax.embeddings.dynamic import files
from sparsejax.embeddings.dynamic.files import STATE
from sparsejax.embeddings.dynamic.state import TableStats
from sparsejax.embeddings.feature_batch import FeatureBatch
from sparsejax.embeddings.host_rows import ROW, Touched
from sparsejax.embeddings.lookup import Call
from sparsejax.embeddings.placement import Stack, StackedTable, spec_of
from sparsejax.embeddings.plan import TableSettings
from sparsejax.mesh.layout import jit_sharded, out_sharding, to_host_in_pieces
from sparsejax.ops.implementations import Implementation
from sparsejax.optimizers import gradients, inplace
from sparsejax.optimizers.gradients import Path, RowParam
from sparsejax.optimizers.optimizer import Optimizer, first_state


class Found(NamedTuple):
    """The looked-up rows of a batch.

    Attributes:
      rows: `[batch, bags, dim]`.
      crowded: whether the exchange over the mesh had too little capacity; None without an
          exchange.
    """

    rows: jax.Array
    crowded: jax.Array | None


class Hosted(NamedTuple):
    """Columns in host memory.

    Attributes:
      like: arrays of all rows by column name; updates may be pending.
      read: function that copies some rows, with pending updates applied.
      drifts: whether a step can change rows that it does not touch.
      watch: function that starts marking rows that change.
    """

    like: dict[str, np.ndarray]
    read: Callable[[np.ndarray], dict[str, np.ndarray]]
    drifts: bool
    watch: Callable[[], Touched]


class Rows(NamedTuple):
    """The rows of a stack in the form for exports of changes.

    Attributes:
      columns: arrays on the devices by column name.
      keys: key of each row of dynamic tables; None for static tables.
      used: whether each row of dynamic tables has a key; None for static tables.
      hosted: further columns, in host memory.
    """

    columns: dict[str, jax.Array]
    keys: jax.Array | None = None
    used: jax.Array | None = None
    hosted: Hosted | None = None

    def arrays(self) -> dict[str, Any]:
        """All columns, in the order of files."""
        if self.hosted is None:
            return self.columns
        like = dict(self.hosted.like)
        return {ROW: like.pop(ROW), **self.columns, **like}


class Owner(nnx.Module):
    """The variables of a collection that its stores read.

    Attributes:
      stacks: groups of tables.
      names: names of the features.
      settings: settings that compiled programs depend on.
      kernels: rows of each stack.
      indexes: index and counters of each stack with dynamic tables.
      unknown: vectors that ids without a row read: "init" for their initial ones, or "zeros".
      implementation: implementation of the lookup, one of those of `sparsejax.gather_matmul`.
      seed: seed of the rows of dynamic tables.
      first: the random key of rows in host memory.
      stage: version number of the tables on the devices, if rows are in host memory.
    """

    stacks: tuple[Stack, ...]
    names: tuple[str, ...]
    settings: TableSettings
    kernels: dict[str, RowParam]
    indexes: dict[str, dict[str, nnx.Variable]]
    unknown: Unknown
    implementation: Implementation
    seed: nnx.Variable
    first: nnx.Variable
    stage: nnx.Variable


class Store(abc.ABC):
    """The rows of a stack of tables, and their state.

    It is a view: the arrays are variables of the collection, which checkpoints contain.

    Args:
      owner: collection of the tables.
      stack: stack of the collection.
      within: path of the collection in the model.
    """

    # Whether `assigned` gives rows to the new ids of a batch.
    grows: ClassVar[bool] = False
    # Whether a `Staged` copies rows to the devices before each step.
    stages: ClassVar[bool] = False

    def __init__(self, owner: Owner, stack: Stack, within: Sequence[Any] = ()):
        self.owner, self.stack = owner, stack
        self.kernel: RowParam = owner.kernels[stack.name]
        self.known: Mapping[str, nnx.Variable] = owner.indexes.get(stack.name, {})
        self.path: Path = (*within, "kernels", stack.name)

    # --- construction ---

    @classmethod
    def prepare(cls, owner: Owner, key: jax.Array) -> None:
        """Adds to a new collection the variables that all stores of this kind share."""
        del owner, key

    @classmethod
    def new_known(cls, stack: Stack) -> dict[str, nnx.Variable]:
        """Makes the variables of a new store, apart from its kernel."""
        del stack
        return {}

    @classmethod
    def new_kernel(
        cls, owner: Owner, stack: Stack, value: jax.Array | None = None
    ) -> RowParam:
        """The parameter of a stack.

        Args:
          owner: collection of the tables.
          stack: stack of the collection.
          value: the rows; by default zeros.
        """
        del owner
        if value is None:
            value = jit_sharded(_zeros, spec_of(stack), static=(0,))(stack)
        rule = {} if stack.rule is None else {"rule": stack.rule}
        metadata: dict[str, Any] = {**out_sharding(spec_of(stack)), **rule}
        return RowParam(value, **metadata)

    @classmethod
    def first_kernel(cls, owner: Owner, stack: Stack, key: jax.Array) -> RowParam:
        """The parameter of a new collection."""
        del key
        return cls.new_kernel(owner, stack)

    # The combined rows of each bag of a batch.

    @abc.abstractmethod
    def rows(self, batch: FeatureBatch, call: Call) -> Found:
        """The sums of rows of a batch, for each bag."""

    def assigned(
        self, batch: FeatureBatch, optimizer: Optimizer, clock: Any
    ) -> FeatureBatch:
        """Assigns rows to new ids of a batch; see `EmbeddingCollection.assign_rows`."""
        del optimizer, clock
        return batch

    @property
    def numbers(self) -> list[str]:
        """The names of the `RowNumber`s of each row, beside its weights and optimizer state."""
        return []

    def halve_counts(self) -> None:
        """Halves the counts of ids that have no row."""
        return

    def exported_columns(
        self, optimizer: Optimizer | None, *, state: bool
    ) -> dict[str, Any]:
        """The columns for exports of changes, which exclude the state of static tables."""
        del optimizer, state
        return self.columns(None)

    def exported(self, optimizer: Optimizer | None, *, state: bool) -> Rows:
        """The rows for exports of changes, with pending updates applied as by
        `Optimizer.flush`.
        """
        columns = self.exported_columns(optimizer, state=state)
        arrays = {name: variable[...] for name, variable in columns.items()}
        if optimizer is not None:
            w, settled = optimizer.settled_within(self.path, self.kernel)
            new = {ROW: w} | {STATE + name: array for name, array in settled.items()}
            arrays |= {name: new[name] for name in new.keys() & arrays.keys()}
        return Rows(arrays, **self._keys())

    def _keys(self) -> dict[str, Any]:
        """The arguments `keys` and `used` of `Rows`; empty for tables without keys."""
        return {n: self.known[n][...] for n in ("keys", "used") if n in self.known}

    @property
    def divided(self) -> bool:
        """Whether ids are sent over a mesh to the owners of their rows."""
        return gradients.is_divided(self.kernel)

    # --- whole tables ---

    def stats(self) -> dict[str, TableStats]:
        """The counters of tables that can grow, by table name."""
        return {}

    @abc.abstractmethod
    def ids(self, table: StackedTable) -> np.ndarray:
        """The ids of a table, ascending, in blocks that fit in the host's memory."""

    def id_blocks(self, table: StackedTable) -> Iterator[np.ndarray]:
        """The ids of a table, ascending, as many at a time as the host has room for."""
        yield self.ids(table)

    @abc.abstractmethod
    def rows_of(self, table: StackedTable, ids: np.ndarray) -> np.ndarray:
        """The row of each id; -1 for an id without a row."""

    @abc.abstractmethod
    def ids_in(
        self, pieces: tuple[StackedTable, ...], mask: np.ndarray, keys: jax.Array | None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The ids of a table in some rows, ascending, and their rows in each piece.

        Args:
          pieces: the pieces of the table.
          mask: whether each row is one of them, in at least one piece.
          keys: keys of all rows, if ids have keys.
        """

    @abc.abstractmethod
    def placed(
        self,
        path: str | os.PathLike[str],
        pieces: tuple[StackedTable, ...],
        ids: np.ndarray,
        removed: np.ndarray | None,
    ) -> list[np.ndarray]:
        """Assigns rows to ids that have none, and frees the rows of removed ids.

        Args:
          path: the file with the ids, for messages.
          pieces: the pieces of the table.
          ids: ids that must have a row, ascending.
          removed: ids that lose their row; None stands for all ids that are not in `ids`.

        Returns:
          For each piece, the rows of the ids.

        Raises:
          ValueError: there are too few rows. Nothing was changed.
        """

    @abc.abstractmethod
    def table(self, pieces: tuple[StackedTable, ...]) -> jax.Array:
        """The rows of a table in the order of ids, as one array on the devices."""

    @abc.abstractmethod
    def table_rows(self, pieces: tuple[StackedTable, ...]) -> Iterator[np.ndarray]:
        """The rows of a table in the order of ids, in blocks."""

    @abc.abstractmethod
    def set_table(self, pieces: tuple[StackedTable, ...], array: Any) -> None:
        """Replaces the rows of a table by an array, whose shape has been checked."""

    def columns(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """All columns of the rows: arrays or variables by column name."""
        found = {ROW: self.kernel}
        found |= {name: self.known[name] for name in self.numbers}
        if optimizer is not None:
            arrays = optimizer.rows_within(self.path, self.kernel)
            found |= {STATE + name: array for name, array in arrays.items()}
        return found

    def read(
        self, rows: np.ndarray, optimizer: Optimizer | None
    ) -> Iterator[dict[str, np.ndarray]]:
        """The columns of some rows, a block of rows at a time."""
        columns = self.columns(optimizer)
        for part, found in files.gathered(rows, files.flattened(columns)):
            count = part.stop - part.start
            some = (np.asarray(array)[:count] for array in found)
            yield dict(zip(columns, some, strict=True))

    def write(
        self,
        rows: np.ndarray,
        values: Mapping[str, np.ndarray],
        optimizer: Optimizer | None,
    ) -> None:
        """Replaces columns of some rows."""
        columns = self.columns(optimizer)
        for name, given in values.items():
            variable, by_parts = columns[name], files.is_number(name)

            def write(variable=variable, given=given, by_parts=by_parts):
                spec = spec_of(self.stack, 1 if by_parts else variable.ndim)
                after = files.overwritten(
                    variable[...], rows, given, spec, by_parts=by_parts
                )
                return [after], None

            inplace.overwrite([variable], write)

    def begin(
        self,
        rows: np.ndarray,
        values: Mapping[str, np.ndarray],
        optimizer: Optimizer,
        step: jax.Array,
    ) -> None:
        """Replaces columns of some rows, whose state begins after some steps."""
        rule = optimizer.rule_of(self.kernel)
        for start in range(0, len(rows), files.BLOCK):
            some = slice(start, start + files.BLOCK)
            given = {name: array[some] for name, array in values.items()}
            fresh = first_state(rule, jnp.asarray(given[ROW]), step)
            given |= {STATE + name: np.asarray(array) for name, array in fresh.items()}
            self.write(rows[some], given, optimizer)

    def _completing(
        self, table: StackedTable, read: files.Rows, *, replace: bool
    ) -> Completing:
        """A function that completes the columns of rows read from a file; see `load`."""
        del table, read, replace
        return lambda at, columns: columns

    def save(
        self,
        pieces: tuple[StackedTable, ...],
        path: pathlib.Path,
        names: Sequence[object] | None,
        optimizer: Optimizer | None,
    ) -> None:
        """Writes a table; see `EmbeddingCollection.save_table`."""
        if names is not None:
            raise ValueError(
                "names are for a static table that is written without an optimizer: leave "
                "names out"
            )
        columns = self.columns(optimizer)
        types = {n: _type_of(n, v[...], len(pieces)) for n, v in columns.items()}
        steps = None if optimizer is None else int(optimizer.step[...])
        files.save(path, types, self._blocks(pieces, optimizer), steps)

    def _blocks(
        self, pieces: tuple[StackedTable, ...], optimizer: Optimizer | None
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """The ids and columns of a table, in blocks of rows."""
        for ids in self.id_blocks(pieces[0]):
            readers = (self.read(self.rows_of(p, ids), optimizer) for p in pieces)
            start = 0
            for found in zip(*readers, strict=True):
                some = ids[start : start + len(found[0][ROW])]
                start += len(some)
                yield some, [_joined([each[n] for each in found]) for n in found[0]]

    def load(
        self,
        pieces: tuple[StackedTable, ...],
        path: pathlib.Path,
        optimizer: Optimizer | None,
        *,
        replace: bool,
    ) -> None:
        """Reads a table; see `EmbeddingCollection.load_table`."""
        read = self._opened(pieces, path, optimizer)
        for _ in read.blocks():
            pass  # reads all rows first, so that an error leaves the table unchanged
        completed = self._completing(pieces[0], read, replace=replace)
        rows = self.placed(path, pieces, read.ids, None if replace else _NO_IDS)
        shapes = {n: v.shape[1:] for n, v in self.columns(optimizer).items()}
        for at, columns in read.blocks():
            columns = completed(at, columns)
            for number, mine in enumerate(rows):
                given = {
                    name: _piece(array, number, len(pieces), shapes[name])
                    for name, array in columns.items()
                }
                if optimizer is not None and read.steps is None:
                    self.begin(mine[at], given, optimizer, optimizer.step[...])
                else:
                    self.write(mine[at], given, optimizer)

    def _opened(
        self,
        pieces: tuple[StackedTable, ...],
        path: pathlib.Path,
        optimizer: Optimizer | None,
    ) -> files.Rows:
        """Opens the rows of a file; raises ValueError if they belong to another table or step."""
        here, count = self.columns(optimizer), 0
        like = {n: _type_of(n, array[...], len(pieces)) for n, array in here.items()}
        if optimizer is not None:
            count = int(optimizer.step[...])
        if sok_folders.is_dump(path):
            rule = None if optimizer is None else optimizer.rule_of(self.kernel)
            read = sok_folders.read(path, pieces[0].name, like, rule, count)
        else:
            read = files.read(path, like, with_state=optimizer is not None)
        if read.steps not in (None, count):
            raise ValueError(
                f"{path} has the state after {read.steps:,} steps, but the optimizer has "
                f"done {count:,}: set `optimizer.step[...]`, or load a file without state"
            )
        return read

    def every_row(self) -> Iterator[np.ndarray]:
        """The rows of the kernel in their stored order, in blocks."""
        return to_host_in_pieces(self.kernel[...])


_NO_IDS = np.zeros(0, np.uint64)
# Function that completes the columns of rows read from a file, given the positions of the rows in
# this file.
Completing = Callable[[np.ndarray, dict[str, np.ndarray]], dict[str, np.ndarray]]


def _piece(
    array: np.ndarray, number: int, pieces: int, shape: tuple[int, ...]
) -> np.ndarray:
    """The part of a column that belongs to piece `number` of a table."""
    if pieces == 1:
        return array
    return np.split(array, pieces, axis=1)[number].reshape(len(array), *shape)


def with_columns(batch: FeatureBatch, name: str, columns: jax.Array) -> FeatureBatch:
    """A batch in which the matrix of one stack has new columns."""
    stacks = {**batch.stacks, name: batch.stacks[name].with_indices(columns)}
    return dataclasses.replace(batch, stacks=stacks)


def _zeros(stack: Stack) -> jax.Array:
    return jnp.zeros((stack.kernel_rows, stack.dim), stack.dtype)


def _type_of(name: str, array: Any, pieces: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a whole table's column, which is divided into `pieces`."""
    if files.is_number(name):
        return jax.ShapeDtypeStruct((1,), array.dtype)
    shape = (1, *array.shape[1:])
    if pieces > 1:
        shape = (1, pieces * math.prod(shape))
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates the columns of all pieces of a table."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1)
