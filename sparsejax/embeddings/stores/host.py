"""Stores of tables in host memory, static and dynamic, with some rows on the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax import row_files
from sparsejax.embeddings import table_files
from sparsejax.embeddings.dynamic import files, vectors
from sparsejax.embeddings.dynamic.assignment import (
    Assign,
    Number,
    Trained,
    begin,
    find,
    numbers,
)
from sparsejax.embeddings.dynamic.files import STATE
from sparsejax.embeddings.feature_batch import WRONG, FeatureBatch
from sparsejax.embeddings.host_rows import ROW, HostRows
from sparsejax.embeddings.lookup import Call, look_up
from sparsejax.embeddings.placement import Stack
from sparsejax.embeddings.stores.dynamic import DynamicStore
from sparsejax.embeddings.stores.static import Pieces, StaticStore
from sparsejax.embeddings.stores.store import (
    Found,
    Hosted,
    Owner,
    Rows,
    Store,
    with_columns,
)
from sparsejax.mesh.layout import to_host
from sparsejax.ops.hash_index import TableKeys
from sparsejax.optimizers import inplace
from sparsejax.optimizers.gradients import RowParam
from sparsejax.optimizers.optimizer import Optimizer, first_state
from sparsejax.sparse import CSR


class HostedStore(Store):
    """Rows in host memory; the kernel has slots that rows use in turn."""

    stages: ClassVar[bool] = True

    def __init__(self, owner: Owner, stack: Stack, within: Sequence[Any] = ()):
        super().__init__(owner, stack, within)
        self._first = owner.first

    @classmethod
    def prepare(cls, owner: Owner, key: jax.Array) -> None:
        super().prepare(owner, key)
        # `first` is the random key of initial rows. `stage` is the version number of the tables on
        # the devices.
        owner.first = nnx.Variable(key)
        owner.stage = nnx.Variable(jnp.zeros((), jnp.int32))

    @classmethod
    def new_kernel(
        cls, owner: Owner, stack: Stack, value: jax.Array | None = None
    ) -> RowParam:
        kernel = super().new_kernel(owner, stack, value)
        kernel.set_metadata(host=HostRows(stack, owner.first))
        return kernel

    @classmethod
    def first_kernel(cls, owner: Owner, stack: Stack, key: jax.Array) -> RowParam:
        return cls.new_kernel(owner, stack)

    @property
    def host(self) -> HostRows:
        """The rows in host memory. Not for use inside compiled programs."""
        host = self.kernel.get_metadata()["host"]
        # A collection made inside a compiled program has a traced key, which is replaced here.
        host.key = self._first
        return host

    def attached(
        self, optimizer: Optimizer | None, *, reading: bool = False
    ) -> HostRows:
        """The rows, connected with the state in an optimizer; without one the state is kept."""
        host, state, rule = self.host, None, None
        if optimizer is not None:
            state = optimizer.rows_within(self.path, self.kernel)
            rule = optimizer.rule_of(self.kernel)
        host.attach(self.kernel, state, rule, reading=reading)
        return host

    def _current(self, batch: FeatureBatch) -> CSR:
        """The matrix of a batch. Its columns become NaN if its rows may have left the devices."""
        if batch.stage is None:
            raise self.not_staged()
        x = batch.stacks[self.stack.name]
        columns = jnp.asarray(x.indices)
        columns = jnp.where(self.owner.stage[...] == batch.stage, columns, WRONG)
        return x.with_indices(columns)

    def not_staged(self) -> ValueError:
        """The matrix of a batch; rows that may no longer be on the devices are read as NaN."""
        return ValueError(
            f"{self.named()} in host memory, and a batch needs its rows on the "
            "devices: take batches of `embeddings.staged(batches, optimizer)`"
        )

    def named(self) -> str:
        """The names of the tables, as the beginning of a sentence."""
        names = ", ".join(dict.fromkeys(table.name for table in self.stack.tables))
        return f"the tables {names} are"

    def numbered(
        self, batch: FeatureBatch, optimizer: Optimizer | None, ahead: int
    ) -> FeatureBatch:
        """Replaces the ids of a batch by row numbers; new ids get a row.

        Args:
          batch: a batch that `pack` made.
          optimizer: optimizer that trains the model; without one, no rows are assigned.
          ahead: number of steps before the step of the batch.
        """
        del optimizer, ahead
        return batch

    def begun(self, batch: FeatureBatch, optimizer: Optimizer) -> None:
        """Initializes the new rows of a batch, which are on the devices."""

    def begun_on_host(
        self, batch: FeatureBatch, optimizer: Optimizer, ahead: int
    ) -> None:
        """Initializes new rows of a batch on the host, if they were not copied to the devices."""

    def exported(self, optimizer: Optimizer | None, *, state: bool) -> Rows:
        settled = None
        if optimizer is not None:
            settled = optimizer.host_settler_within(self.path, self.kernel)
        host = self.attached(optimizer, reading=True)
        like = self.exported_columns(optimizer, state=state)
        here = {n: like.pop(n)[...] for n in self.numbers}

        def read(rows: np.ndarray) -> dict[str, np.ndarray]:
            found = host.current(rows, settled)
            return {name: found[name.removeprefix(STATE)] for name in like}

        hosted = Hosted(like, read, host.drifts, host.watch)
        return Rows(here, **self._keys(), hosted=hosted)

    # --- whole tables ---

    def columns(self, optimizer: Optimizer | None) -> dict[str, Any]:
        found = super().columns(optimizer)
        arrays = self.attached(optimizer, reading=True).arrays()
        return {
            name: array if files.is_number(name) else arrays[name.removeprefix(STATE)]
            for name, array in found.items()
        }

    def read(
        self, rows: np.ndarray, optimizer: Optimizer | None
    ) -> Iterator[dict[str, np.ndarray]]:
        columns = self.columns(optimizer)
        known = {
            n: to_host(columns[n][...]).reshape(-1)
            for n in columns
            if files.is_number(n)
        }
        for start in range(0, len(rows), _BLOCK):
            some = rows[start : start + _BLOCK]
            found = self.host.current(some, None)
            yield {
                name: known[name][some]
                if name in known
                else row_files.in_file(found[name.removeprefix(STATE)])
                for name in columns
            }

    def write(
        self,
        rows: np.ndarray,
        values: Mapping[str, np.ndarray],
        optimizer: Optimizer | None,
    ) -> None:
        here = {n: array for n, array in values.items() if files.is_number(n)}
        there = {n.removeprefix(STATE): a for n, a in values.items() if n not in here}
        self.attached(optimizer).put(rows, there)
        super().write(rows, here, optimizer)

    def every_row(self) -> Iterator[np.ndarray]:
        rows, dim = self.stack.num_rows, self.stack.dim
        array = self.host.arrays().get(ROW, np.zeros((rows, dim), self.stack.dtype))
        count = max(1, table_files.BLOCK_NUMBERS // dim)
        return (array[start : start + count] for start in range(0, rows, count))


# Number of rows that are copied at a time.
_BLOCK = 65_536


class HostStore(HostedStore, StaticStore):
    """Tables of `TableConfig(..., host=True)`."""

    def rows(self, batch: FeatureBatch, call: Call) -> Found:
        order = batch.rows.get(self.stack.name)
        return Found(
            *look_up(self.stack, self.kernel, self._current(batch), call, order=order)
        )

    def table(self, pieces: Pieces) -> jax.Array:
        raise ValueError(
            f"table {pieces[0].name!r} is in host memory: read it by `table_rows` or "
            "`save_table`"
        )

    def table_rows(self, pieces: Pieces) -> Iterator[np.ndarray]:
        (table,) = pieces
        count = max(1, table_files.BLOCK_NUMBERS // self.stack.dim)
        rows, host = table.config.num_rows, self.host
        for start in range(0, rows, count):
            ids = np.arange(start, min(start + count, rows), dtype=np.int32)
            yield host.read(self.stack.row_of(ids, table.place))

    def set_table(self, pieces: Pieces, array: Any) -> None:
        (table,) = pieces
        ids = np.arange(table.config.num_rows, dtype=np.int32)
        rows = self.stack.row_of(ids, table.place)
        self.attached(None).put(rows, {ROW: np.asarray(array)})

    def take(self, other: HostStore, like: int, optimizer: Optimizer | None) -> None:
        """Copies all rows of a store whose tables have fewer ids.

        Args:
          other: store with tables of the same names.
          like: id whose row is copied for new ids.
          optimizer: optimizer that trains the rows.
        """
        host = self.attached(optimizer)
        before = {table.name: table for table in other.stack.tables}
        for table in self.stack.tables:
            known = before[table.name]
            count, size = known.config.num_rows, table.config.num_rows
            for start in range(0, size, _BLOCK):
                ids = np.arange(start, min(start + _BLOCK, size), dtype=np.int32)
                old = ids[ids < count]
                rows, there = self.rows_of(table, old), other.rows_of(known, old)
                host.take(other.host, rows, there)
                if size == count:
                    continue
                # Rows are copied as values, because the random initial values may depend on the
                # table's size.
                host.put(rows, {ROW: other.host.read(there)})
                new = self.rows_of(table, ids[ids >= count])
                w = other.host.read(other.rows_of(known, np.full(len(new), like)))
                values = {ROW: w}
                if optimizer is not None:
                    rule, step = optimizer.rule_of(self.kernel), optimizer.step[...]
                    state = first_state(rule, jnp.asarray(w), step)
                    values |= {name: to_host(array) for name, array in state.items()}
                host.put(new, values)
        # Slots of the old collection become invalid: batches staged earlier read NaN.
        other.host.forget_slots()


class DynamicHostStore(HostedStore, DynamicStore):
    """Tables of `DynamicTableConfig(..., host_rows=...)`."""

    assign: ClassVar[type[Assign]] = Number

    def matrix(self, batch: FeatureBatch) -> CSR:
        return self._current(batch)

    def assigned(
        self, batch: FeatureBatch, optimizer: Optimizer, clock: Any
    ) -> FeatureBatch:
        name = self.stack.name
        if name not in batch.stacks:
            return batch
        if clock is not None:
            raise ValueError(
                f"{self.named()} in host memory, whose rows come before the step: "
                "their clock is the number of steps, leave clock out"
            )
        if batch.stage is None:
            raise self.not_staged()
        if name in batch.new:
            how, moment = self.assigning(optimizer)
            slots, new = (
                jnp.asarray(batch.stacks[name].indices),
                jnp.asarray(batch.new[name]),
            )
            trained = self.trained(optimizer)
            after = how.begin(trained, slots, batch.keys[name], new, moment)
            self.set_trained(after, optimizer)
        return batch

    def numbered(
        self, batch: FeatureBatch, optimizer: Optimizer | None, ahead: int
    ) -> FeatureBatch:
        name, known = self.stack.name, self.known
        if name not in batch.stacks:
            return batch
        x, keys = batch.stacks[name], batch.keys[name]
        if optimizer is None:
            return with_columns(batch, name, _find(self.stack, self.index, x, keys))
        how, moment = self.assigning(optimizer, ahead=ahead)

        def program():
            state, *found = numbers(how, self.state, None, x, keys, moment)
            arrays = state.arrays()
            return [arrays[name] for name in known], found

        new, columns = inplace.overwrite(list(known.values()), program)
        batch = dataclasses.replace(batch, new={**batch.new, name: new})
        return with_columns(batch, name, columns)

    def begun(self, batch: FeatureBatch, optimizer: Optimizer) -> None:
        name = self.stack.name
        if name not in batch.stacks:
            return
        state = optimizer.rows_within(self.path, self.kernel)
        how, moment = self.assigning(optimizer)

        def program():
            before = {n: v.get_raw_value() for n, v in state.items()}
            after = begin(
                how,
                Trained(self.kernel.get_raw_value(), before),
                batch.stacks[name].indices,
                batch.keys[name],
                batch.new[name],
                moment,
            )
            return [after.w, *(after.arrays[each] for each in state)], None

        inplace.overwrite([self.kernel, *state.values()], program)

    def begun_on_host(
        self, batch: FeatureBatch, optimizer: Optimizer, ahead: int
    ) -> None:
        name = self.stack.name
        if name not in batch.new:
            return
        new = np.flatnonzero(np.asarray(batch.new[name]))
        rows = np.asarray(batch.stacks[name].indices)[new]
        keys = [np.asarray(word)[new] for word in batch.keys[name]]
        how, moment = self.assigning(optimizer, ahead=ahead)
        for start in range(0, len(rows), vectors.BLOCK):
            some = slice(start, start + vectors.BLOCK)
            here = TableKeys(*(np.resize(word[some], vectors.BLOCK) for word in keys))
            w = vectors.drawn(self.stack, moment.seed, here)
            values = {ROW: w, **first_state(how.rule, w, moment.step)}
            count = len(rows[some])
            self.host.put(
                rows[some], {n: to_host(array)[:count] for n, array in values.items()}
            )


_find = jax.jit(find, static_argnums=0)
