"""Dynamic tables on the devices: 64-bit ids get a row when they are first seen."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from sparsejax.embeddings.dynamic import admission, files, vectors
from sparsejax.embeddings.dynamic import state as states
from sparsejax.embeddings.dynamic.assignment import (
    Assign,
    Moment,
    Trained,
    assign,
    assign_at_owners,
    find,
    find_at_owners,
)
from sparsejax.embeddings.dynamic.state import IndexState, State, TableStats
from sparsejax.embeddings.feature_batch import FeatureBatch
from sparsejax.embeddings.lookup import Call, check_mesh, look_up, made
from sparsejax.embeddings.placement import Stack, StackedTable
from sparsejax.embeddings.stores.store import (
    Completing,
    Found,
    Owner,
    Store,
    with_columns,
)
from sparsejax.mesh.exchange import DividedRows, SentKeys
from sparsejax.mesh.layout import (
    call_with_auto_axes,
    jit_sharded,
    out_sharding,
    to_host,
)
from sparsejax.ops import index_edits
from sparsejax.ops.hash_index import Index, TableKeys
from sparsejax.optimizers import gradients
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR


class DynamicStore(Store):
    """Tables of `DynamicTableConfig`, whose rows are on the devices."""

    grows: ClassVar[bool] = True
    # Class that assigns rows to new ids.
    assign: ClassVar[type[Assign]] = Assign

    @classmethod
    def prepare(cls, owner: Owner, key: jax.Array) -> None:
        owner.seed = IndexState(jax.random.bits(key, (2,), jnp.uint32))

    @classmethod
    def new_known(cls, stack: Stack) -> dict[str, nnx.Variable]:
        by_parts = P("model")
        state = jit_sharded(states.empty, by_parts, static=(0,))(stack)
        metadata = out_sharding(by_parts)
        return {n: IndexState(a, **metadata) for n, a in state.arrays().items()}

    @property
    def state(self) -> State:
        """The state of the index and the counters."""
        return State.of({name: v[...] for name, v in self.known.items()})

    def set_state(self, state: State) -> None:
        """Replaces the state of the index and the counters."""
        for name, array in state.arrays().items():
            self.known[name].set_value(array)

    @property
    def index(self) -> Index:
        """The index from ids to rows, the only part of the state that a predictor has."""
        return Index(*(self.known[name][...] for name in Index._fields))

    # The index from ids to rows. A predictor needs no other part of the state.

    def matrix(self, batch: FeatureBatch) -> CSR | DividedRows | SentKeys:
        """The matrix of a batch, whose columns are row numbers of the kernel."""
        x = batch.routes.get(self.stack.name)
        x = batch.stacks[self.stack.name] if x is None else x
        if batch.assigned or isinstance(x, DividedRows):
            return x
        if gradients.is_differentiating():
            warnings.warn(
                "a loss reads dynamic tables without assign_rows: new ids will not be "
                "learned. Call model.embeddings.assign_rows(ids, optimizer) before the "
                "loss, and give the model what it returns",
                stacklevel=2,
            )
        how = {"implementation": self.owner.implementation}
        if isinstance(x, SentKeys):
            check_mesh(x.rows.parts)
            return find_at_owners(self.stack, self.index, x, **how)
        x, keys = self._given(batch)
        return x.with_indices(find(self.stack, self.index, x, keys, **how))

    def _given(self, batch: FeatureBatch) -> tuple[CSR, TableKeys]:
        """The packed matrix of a batch, and the keys of its ids, as JAX arrays."""
        name = self.stack.name
        return jax.tree.map(jnp.asarray, (batch.stacks[name], batch.keys[name]))

    def rows(self, batch: FeatureBatch, call: Call) -> Found:
        x, name = self.matrix(batch), self.stack.name
        seed = self.owner.seed[...] if self.owner.unknown == "init" else None
        if isinstance(x, SentKeys):
            x = vectors.beside_owned(self.stack, x, seed)
            return Found(*look_up(self.stack, self.kernel, x, call))

        def apart(x, keys, order):
            order = None if order is None else jnp.asarray(order)
            # All ids of a bag have the same combiner factor.
            return vectors.apart(made(self.stack, call.blank, x), keys, order)

        x, keys = jax.tree.map(jnp.asarray, (x, batch.keys[name]))
        order = batch.rows.get(name)
        x, guests, order = call_with_auto_axes(apart, x, keys, order, out_specs=P())
        beside = functools.partial(vectors.with_guests, self.stack), guests, seed
        beside = None if seed is None else beside
        more = {"made": True, "order": order, "beside": beside}
        return Found(*look_up(self.stack, self.kernel, x, call, **more))

    def assigned(
        self, batch: FeatureBatch, optimizer: Optimizer, clock: Any
    ) -> FeatureBatch:
        how, moment = self.assigning(optimizer, clock=clock)
        before = self.state, self.trained(optimizer)
        name = self.stack.name
        route = batch.routes.get(name)
        if isinstance(route, SentKeys):
            check_mesh(route.rows.parts)
            state, trained, route = assign_at_owners(how, *before, route, moment)
            batch = dataclasses.replace(batch, routes={**batch.routes, name: route})
        elif name in batch.stacks:
            x, keys = self._given(batch)
            state, trained, columns = assign(how, *before, x, keys, moment)
            batch = with_columns(batch, name, columns)
        else:
            return batch
        self.set_state(state)
        self.set_trained(trained, optimizer)
        return batch

    def assigning(
        self, optimizer: Optimizer, *, ahead: int = 0, clock: Any = None
    ) -> tuple[Assign, Moment]:
        """The object that assigns rows, and the numbers of the step that is `ahead` steps
        later.
        """
        step = optimizer.step[...]
        if ahead:
            step = step + jnp.int32(ahead)
        now = step if clock is None else states.clock_of(clock)
        how = self.assign(self.stack, optimizer.rule_of(self.kernel), clock is None)
        return how, Moment(self.owner.seed[...], now, step)

    def trained(self, optimizer: Optimizer) -> Trained:
        """The kernel with the state of the optimizer."""
        arrays = optimizer.rows_within(self.path, self.kernel)
        return Trained(self.kernel[...], {n: v[...] for n, v in arrays.items()})

    def set_trained(self, trained: Trained, optimizer: Optimizer) -> None:
        """Replaces the kernel and the state of the optimizer."""
        self.kernel.set_value(trained.w)
        arrays = optimizer.rows_within(self.path, self.kernel)
        for name, variable in arrays.items():
            variable.set_value(trained.arrays[name])

    def halve_counts(self) -> None:
        """Halves the counts of ids that have no row."""
        sketch = self.known["sketch"]
        sketch.set_value(admission.halved(sketch[...]))

    # --- whole tables ---

    @property
    def numbers(self) -> list[str]:
        return [number.name for number in states.numbers_of(self.stack)]

    def exported_columns(
        self, optimizer: Optimizer | None, *, state: bool
    ) -> dict[str, Any]:
        return self.columns(optimizer if state else None)

    def stats(self) -> dict[str, TableStats]:
        totals, num_free = (to_host(self.known[n][...]) for n in ("totals", "num_free"))
        return states.stats(self.stack, totals, num_free)

    def ids(self, table: StackedTable) -> np.ndarray:
        return states.ids_and_rows(self.stack, table, self.known)[0]

    def rows_of(self, table: StackedTable, ids: np.ndarray) -> np.ndarray:
        return states.rows_of(self.stack, table, self.known, ids)

    def ids_in(
        self, pieces: tuple[StackedTable, ...], mask: np.ndarray, keys: jax.Array | None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        assert keys is not None
        number = self.stack.tables.index(pieces[0])
        rows = index_edits.rows_in(states.layout_of(self.stack), number, mask)
        ids = files.keys_at(keys, rows)
        order = np.argsort(ids)
        return ids[order], [rows[order]]

    def placed(
        self,
        path: str | os.PathLike[str],
        pieces: tuple[StackedTable, ...],
        ids: np.ndarray,
        removed: np.ndarray | None,
    ) -> list[np.ndarray]:
        (table,) = pieces
        index, rows = index_edits.changed(
            path,
            states.layout_of(self.stack),
            self.stack.tables.index(table),
            table.name,
            self.index,
            states.ids_and_rows(self.stack, table, self.known),
            ids=ids,
            removed=removed,
        )
        for name, array in index._asdict().items():
            self.known[name].set_value(array)
        return [rows]

    def _completing(
        self, table: StackedTable, read: files.Rows, *, replace: bool
    ) -> Completing:
        numbers = states.numbers_of(self.stack)
        missing = [n.name for n in numbers if n.name not in read.names]
        before = np.full(len(read.ids), -1)
        # Ids that already had a row keep their `last` time.
        if missing and not replace:
            before = self.rows_of(table, read.ids)
        known = {name: to_host(self.known[name][...]).reshape(-1) for name in missing}

        def completed(at, columns):
            given = {n.name: n.loaded(columns.get(n.name), len(at)) for n in numbers}
            for name in missing:
                old = known[name][before[at]]
                given[name] = np.where(before[at] >= 0, old, given[name])
            return columns | given

        return completed

    def table(self, pieces: tuple[StackedTable, ...]) -> jax.Array:
        raise self._without_order(pieces, "ask `ids`, and call the collection")

    def table_rows(self, pieces: tuple[StackedTable, ...]) -> Any:
        raise self._without_order(pieces, "call `save_table`")

    def set_table(self, pieces: tuple[StackedTable, ...], array: Any) -> None:
        raise self._without_order(pieces, "call `load_table`")

    def _without_order(
        self, pieces: tuple[StackedTable, ...], instead: str
    ) -> ValueError:
        return ValueError(
            f"table {pieces[0].name!r} is dynamic, its rows have no order of ids: {instead}"
        )
