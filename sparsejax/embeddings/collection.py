"""EmbeddingCollection: many tables and features, read by few lookups."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from sparsejax.embeddings import feature_batch, table_files
from sparsejax.embeddings.config import (
    FeatureConfig,
    Placement,
    TableConfig,
    Unknown,
    check_floating,
    feature_configs,
)
from sparsejax.embeddings.dynamic import admission, changes, files, vectors
from sparsejax.embeddings.dynamic import state as dynamic
from sparsejax.embeddings.dynamic.assignment import (
    Assign,
    Moment,
    Trained,
    assign,
    assign_at_owners,
    begin,
    find,
    find_at_owners,
    numbers,
)
from sparsejax.embeddings.dynamic.changes import Export, Part
from sparsejax.embeddings.dynamic.state import TableStats
from sparsejax.embeddings.feature_batch import WRONG, FeatureBatch, Ids
from sparsejax.embeddings.host_rows import ROW, Coming, HostRows, set_number
from sparsejax.embeddings.lookup import Sender, Wire, check_mesh, look_up, sent
from sparsejax.embeddings.placement import (
    Distinct,
    Stack,
    StackedFeature,
    StackedTable,
    first_rows,
    stack_tables,
)
from sparsejax.embeddings.plan import EmbeddingPlan
from sparsejax.mesh import interrupts
from sparsejax.mesh.exchange import SentKeys
from sparsejax.mesh.layout import (
    BY_ROWS,
    call_with_auto_axes,
    jit_sharded,
    out_sharding,
    replicated,
    to_host,
)
from sparsejax.ops import index_edits
from sparsejax.ops.hash_index import TableKeys
from sparsejax.ops.implementations import Implementation, check_implementation
from sparsejax.optimizers import gradients, inplace
from sparsejax.optimizers.gradients import Path, RowParam
from sparsejax.optimizers.optimizer import Optimizer, first_state
from sparsejax.sparse import CSR


class EmbeddingCollection(nnx.Module):
    """Tables of embeddings, and features that read them.

    >>> tables = {"item": TableConfig(1000, 8), "user": TableConfig(500, 4)}
    >>> features = {
    ...     "user": "user",
    ...     "item": "item",
    ...     "recent": FeatureConfig("item", combiner=None, length=3),
    ... }
    >>> embeddings = EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    >>> ids = {
    ...     "user": jnp.array([7, 8]),
    ...     "item": jnp.array([[1, 2], [3, -1]]),
    ...     "recent": jnp.array([[5, 6], [9, -1]]),
    ... }
    >>> embeddings.concat(ids).shape, embeddings.num_outputs
    ((2, 36), 36)
    >>> jax.tree.map(jnp.shape, embeddings(ids))
    {'item': (2, 8), 'recent': (2, 3, 8), 'user': (2, 4)}

    Tables of one width, dtype and rule lie below each other in one `RowParam`, a *stack*.
    Those that are replicated have a stack of their own. However many tables a stack has, a step
    reads it by one lookup, sorts the ids once, and updates the touched rows once.
    `sparsejax.Optimizer` and `sparsejax.value_and_grad` treat it as the kernel of a
    `SparseLinear`.

    Ids of a feature are an int32 array, `[batch]` or `[batch, n]`, where -1 stands for no id,
    or a `CSR` `[batch, num_rows]` of the ids, whose data are weights. Lists of ids in any
    order are `WideIds.ragged(ids, offsets, weights)`. An id counts as often as
    it occurs. Without ids a feature is zero, whatever the combiner.

    On a mesh rows of large tables are divided over "model", and batches over "data". A seed
    gives the same tables on every mesh, and a checkpoint fits every mesh.

    Args:
      tables: by name.
      features: by name; a string is short for `FeatureConfig(table)`.
      dtype: of the results; that of the tables by default.
      plan: of `plan_embeddings`, or a placement for each of some tables whose configuration
        has none. By default tables of one width, dtype and rule are replicated if they have
        up to 2^20 numbers together, and else divided by rows.
      wire_dtype: in which sums and gradients cross between devices, such as bfloat16; they are
        added in float32. By default the dtype of the table.
      exchange_room: for how many ids there are places between each pair of devices, as a
        multiple of an even share. By default 1.5, and more for few ids.
      implementation: see `sparsejax.gather_matmul`.
      rngs: random streams.

    Attributes:
      overflows: `[]` int32 variable: in how many lookups the devices of a mesh had too few
        places for the ids that they exchange, and all gathered all of them. Results are the
        same.

    Raises:
      ValueError: there is no feature, a feature or `plan` names an unknown table, the plan
        is one of other tables, pieces do not divide a width, or `exchange_room` is not
        positive.
      TypeError: `wire_dtype` is not floating, or has 8 bits, or `plan` has another type.
    """

    def __init__(
        self,
        tables: Mapping[str, TableConfig],
        features: Mapping[str, str | FeatureConfig],
        *,
        dtype: jax.typing.DTypeLike | None = None,
        plan: EmbeddingPlan | Mapping[str, Placement] | None = None,
        wire_dtype: jax.typing.DTypeLike | None = None,
        exchange_room: float | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        check_implementation(implementation)
        configs = feature_configs(features, tables)
        if not configs:
            raise ValueError("a collection needs at least one feature")
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.implementation: Implementation = implementation
        distinct = None
        if isinstance(plan, EmbeddingPlan):
            placements, hotness = plan.placements(tables), plan.hotness
            distinct = plan.distinct_rows()
        elif plan is None or isinstance(plan, Mapping):
            placements, hotness = plan or {}, {}
        else:
            raise TypeError(
                "plan must be an EmbeddingPlan or a placement for each of some tables, such "
                f"as {{{next(iter(tables))!r}: 'rows'}}, got {plan!r}"
            )
        self.stacks = stack_tables(tables, configs, placements, hotness)
        # For `add_ids`. Tuples, as a module's attributes are hashed.
        self.asked = tuple(placements.items()), tuple(hotness.items())
        self.given = self.wire = _wire(wire_dtype, exchange_room, distinct)
        self.names = tuple(configs)
        # Ids without a row read their first vector; in a predictor it may be zeros.
        self.unknown: Unknown = "init"
        key = rngs.params()
        self.overflows = nnx.Variable(jnp.zeros((), jnp.int32))
        hosts = {}
        if any(stack.device_rows is not None for stack in self.stacks):
            # Rows are made by it later; and the number of the state of the devices' tables.
            self.first = nnx.Variable(key)
            self.stage = nnx.Variable(jnp.zeros((), jnp.int32))
            hosts = {
                stack.name: HostRows(stack, self.first)
                for stack in self.stacks
                if stack.device_rows is not None
            }
        self.kernels = nnx.data(
            {s.name: _kernel(s, key, hosts.get(s.name)) for s in self.stacks}
        )
        changing = [stack for stack in self.stacks if stack.dynamic]
        self.indexes = nnx.data({s.name: _index(s) for s in changing})
        if changing:
            self.seed = IndexState(jax.random.bits(key, (2,), jnp.uint32))

    def __call__(self, ids: Mapping[str, Ids] | FeatureBatch) -> dict[str, jax.Array]:
        """Looks up the rows of each feature for a batch.

        Returns:
          `{feature: [batch, dim]}`, and `[batch, length, dim]` for a feature without combiner:
          zero where there is no id. An id that its table does not have, and that is neither
          found on the host nor dropped, makes its row NaN.
        """
        rows = self._rows(ids)
        return {
            name: _whole(rows[stack.name], parts)
            for name, (stack, parts) in zip(self.names, self._features(), strict=True)
        }

    def concat(
        self, ids: Mapping[str, Ids] | FeatureBatch
    ) -> Float[Array, "batch outputs"]:
        """`[batch, num_outputs]`: the features one after the other, in their order.

        Nothing is copied if all tables are in one stack.
        """
        rows = self._rows(ids)
        found = []
        for (stack, alone), features in itertools.groupby(
            self._features(), lambda feature: (feature[0], _must_be_joined(feature[1]))
        ):
            of_stack = rows[stack.name]
            if alone:
                found += [_whole(of_stack, parts) for _, parts in features]
            else:  # they follow each other
                parts = [part for _, parts in features for part in parts]
                bags = slice(parts[0].bag_range.start, parts[-1].bag_range.stop)
                found.append(of_stack[:, bags])
        found = [part.reshape(len(part), math.prod(part.shape[1:])) for part in found]
        return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)

    def joined(
        self,
        first: Float[Array, "batch dim"],
        ids: Mapping[str, Ids] | FeatureBatch,
        *,
        blank: int = 0,
    ) -> Float[Array, "batch vectors dim"]:
        """`first`, `blank` zeros, and the vectors of all features, whose tables are as wide.

        Rows of a single stack are written where they stay: nothing is copied.
        """
        batch, dim = first.shape
        if [stack.dim for stack in self.stacks] == [dim]:
            rows = self._rows(ids, blank=1 + blank, dtype=first.dtype, after=first)
            return _with_first(*rows.values(), first)
        rows = self.concat(ids).astype(first.dtype).reshape(batch, -1, dim)
        # A sum takes a third of a concatenation's time on a GPU.
        behind = jnp.pad(rows, ((0, 0), (1 + blank, 0), (0, 0)))
        more = behind.shape[1] - 1
        return behind + jnp.pad(first[:, None], ((0, 0), (0, more), (0, 0)))

    def pack(
        self,
        ids: Mapping[str, Ids],
        *,
        nse: Mapping[str, int] | None = None,
    ) -> FeatureBatch:
        """The ids of a batch as one matrix for each stack, which calls take in place of ids.

        A call does it itself. An input pipeline can do it ahead: NumPy arrays give NumPy
        arrays.

        Args:
          ids: of each feature.
          nse: by the name of a stack, how many ids there is room for; by default for as many
            as the arguments have room. One program serves all batches of one `nse`. An id
            of a table that is cut by columns counts once for each piece.

        Raises:
          ValueError: a feature is missing or unknown; shapes do not fit. If all ids are NumPy
            arrays: an id is outside its table, a list is too long, or there is too little
            room. (If they are not, rows that this concerns are NaN. If there is too little
            room, these are all rows from the first one that does not fit.)
          TypeError: ids are not int32.
        """
        return feature_batch.pack(self.stacks, ids, nse=nse)

    def ahead(
        self, batches: Iterable[Mapping[str, Ids] | FeatureBatch]
    ) -> Iterator[FeatureBatch]:
        """Sends the ids of each batch to the owners of their rows while the step before works.

        ::

            with jax.set_mesh(mesh):
                ids = model.embeddings.ahead(ids for dense, ids, clicks in batches)
                for (dense, _, clicks), ids in zip(batches, ids):
                    step(model, optimizer, dense, ids, clicks)

        A step on several devices waits twice, in the middle of its work, for whether the ids
        have places enough (`exchange_room`), unless the batch says so. Then it does not wait,
        and the other way of a step is not compiled, until the first batch that has too few.
        The ids of others are sorted as often as without, and the numbers are the same. Ids of
        dynamic tables are sent once each, if they repeat, and a device looks at its own alone.

        Args:
          batches: the ids of each. One more is taken than is given, so where they come from
            an iterator, `itertools.tee` gives the other arrays. Arrays have to stay as they are
            until their batch is given.

        Raises:
          NotImplementedError: there are tables in host memory.
          TypeError: see `pack`.
          ValueError: see `pack`.
        """
        sender = sender_of(self)
        if sender is None:
            raise NotImplementedError(
                "ahead is not for tables in host memory, whose rows are brought before the "
                "step: take batches of `embeddings.staged(batches, optimizer)`"
            )

        def answered(ids, batch, crowded):
            return self._packed(ids) if crowded else batch  # waits for the answer

        waiting = collections.deque()
        for ids in batches:
            if not isinstance(ids, FeatureBatch):
                ids = feature_batch.checked(sender.stacks, ids)
            batch, crowded = sent[False](sender, ids)
            crowded.copy_to_host_async()
            waiting.append((ids, batch, crowded))
            if len(waiting) > 1:
                yield answered(*waiting.popleft())
        for each in waiting:
            yield answered(*each)

    def assign_rows(
        self,
        ids: Mapping[str, Ids] | FeatureBatch,
        optimizer: Optimizer,
        *,
        clock: jax.typing.ArrayLike | None = None,
        within: Sequence[Any] = (),
    ) -> FeatureBatch:
        """Gives new ids of dynamic tables a row, and finds those of the others.

        ::

            @sj.jit
            def step(model, optimizer, dense, ids, clicks):
                rows = model.embeddings.assign_rows(ids, optimizer)
                def loss_fn(model):
                    return loss(model(dense, rows), clicks)
                value, grads = optimizer.value_and_grad(loss_fn)(model)
                optimizer.update(model, grads)
                return value

            for dense, ids, clicks in batches:
                step(model, optimizer, dense, model.embeddings.pack(ids), clicks)

        A new row begins with a vector that depends on the seed, the table and the id alone,
        and with the state of a new optimizer. An id without a row has this vector too, and
        no gradient. The rows and all that is known of them depend on the batches alone: not
        on the order of ids in a batch, nor on the mesh. See docs/dynamic_tables.md.

        Args:
          ids: of each feature, or what `pack` made of them.
          optimizer: that trains the model.
          clock: the time, an integer that fits into int32 and does not fall. By default
            the number of steps that the optimizer has done. With a clock of your own, rows of earlier batches
            of the same step are not protected: do not accumulate gradients with it.
          within: the path of this collection in the model, if the model has several
            collections with dynamic tables of one width.

        Returns:
          The batch for the model, until rows are assigned again.

        Raises:
          ValueError: there are no dynamic tables; the batch has its rows already; the
            optimizer does not train these tables; tables are in host memory, and `staged`
            has not brought the rows, or there is a clock, which they do not have. Or the
            clock does not fit into int32.
        """
        if not self.indexes:
            raise ValueError(
                "assign_rows is for dynamic tables (DynamicTableConfig), of which this "
                "collection has none; the model takes the ids themselves"
            )
        batch = self._packed(ids)
        if batch.assigned:
            raise ValueError("these ids have their rows already: assign them once")
        step = optimizer.step[...]
        now = step if clock is None else dynamic.clock_of(clock)
        stacks, routes = dict(batch.stacks), dict(batch.routes)
        for stack in self.stacks:
            if not stack.dynamic or stack.name not in stacks.keys() | routes.keys():
                continue
            kernel = self.kernels[stack.name]
            path = (*within, "kernels", stack.name)
            arrays = optimizer.rows_within(path, kernel)
            known = self.indexes[stack.name]
            how = Assign(stack, optimizer.rule_of(kernel), clock is None)
            if stack.device_rows is not None:
                if clock is not None:
                    raise ValueError(
                        f"{_tables_of(stack)} in host memory, whose rows come before the step: "
                        "their clock is the number of steps, leave clock out"
                    )
                if batch.stage is None:
                    raise ValueError(_not_staged(stack))
                if stack.name not in batch.new:
                    continue
                trained = how.begin(
                    Trained(kernel[...], {n: v[...] for n, v in arrays.items()}),
                    jnp.asarray(stacks[stack.name].indices),
                    batch.keys[stack.name],
                    jnp.asarray(batch.new[stack.name]),
                    Moment(self.seed[...], now, step),
                )
                kernel.set_value(trained.w)
                for name, variable in arrays.items():
                    variable.set_value(trained.arrays[name])
                continue
            before = (
                _state(known),
                Trained(kernel[...], {n: v[...] for n, v in arrays.items()}),
            )
            moment = Moment(self.seed[...], now, step)
            if isinstance(keys_sent := routes.get(stack.name), SentKeys):
                check_mesh(keys_sent.rows.parts)
                after = assign_at_owners(how, *before, keys_sent, moment)
                state, trained, routes[stack.name] = after
            else:
                x = jax.tree.map(jnp.asarray, stacks[stack.name])
                keys = jax.tree.map(jnp.asarray, batch.keys[stack.name])
                state, trained, columns = assign(how, *before, x, keys, moment)
                stacks[stack.name] = _with_columns(x, columns)
            _set_state(known, state)
            kernel.set_value(trained.w)
            for name, variable in arrays.items():
                variable.set_value(trained.arrays[name])
        return dataclasses.replace(batch, stacks=stacks, routes=routes, assigned=True)

    def staged[Batch](
        self,
        batches: Iterable[Batch],
        optimizer: Optimizer | None = None,
        *,
        within: Sequence[Any] = (),
    ) -> Iterator[Batch]:
        """Batches whose rows have come from host memory to the devices.

        ::

            for dense, ids, clicks in model.embeddings.staged(batches, optimizer):
                step(model, optimizer, dense, ids, clicks)

        Rows that have to leave for them go back to the host after their last update. While
        the devices work on a batch, the host prepares the next one, which is taken from
        `batches` before. Use a batch before you take the next one: later it may read NaN, as
        its rows may have left.

        New ids of dynamic tables in host memory get their rows here, if there is an optimizer,
        once the step of the batch before has begun.

        On a CPU losses have the same bits as those of tables that are on the devices, see
        docs/host_tables.md.

        Args:
          batches: each is the ids of all features, or what `pack` made of them, or a tuple,
            list or dictionary that has them somewhere. Ids are arrays of the host.
          optimizer: that trains the model on these batches. Without it rows are only read.
          within: see `assign_rows`.

        Raises:
          ValueError: a batch has no ids of this collection; it has ids of more rows than
            there is room for on the devices; the model is a copy of another one.
        """
        if all(stack.device_rows is None for stack in self.stacks):
            raise ValueError(
                "staged is for tables in host memory (host=True, or host_rows), of which this "
                "collection has none; the model takes the ids themselves"
            )

        own = {tuple(within): self}
        waits = any(map(_is_hosted, self.stacks))

        def look_up(batch: Batch) -> Any:
            found = 0

            def look(node):
                nonlocal found
                if not self._is_ids(node):
                    return node
                found += 1
                if not isinstance(node, FeatureBatch):
                    node = jax.tree.map(np.asarray, node)
                packed = self._packed(node)
                if packed.stage is not None:
                    raise ValueError(
                        "the rows of this batch are on the devices already"
                    )
                if waits:  # new ids get rows when the steps before have begun
                    return LookedUp(packed, {})
                return look_up_rows(own, packed, optimizer)

            looked = jax.tree.map(look, batch, is_leaf=self._is_ids)
            if found != 1:
                raise ValueError(
                    f"a batch has ids of the features {sorted(self.names)} {found} times, "
                    "expected once: as a dictionary with an entry for each feature, or as "
                    "`pack` makes them"
                )
            return looked

        def is_looked_up(node: Any) -> bool:
            return isinstance(node, LookedUp)

        def bring(node: Any) -> Any:
            if not is_looked_up(node):
                return node
            if not waits:
                return bring_rows(own, node, optimizer)
            with interrupts.uninterrupted():  # no row is given that does not begin
                batch = with_numbers(own, node.batch, optimizer)
                try:
                    looked = look_up_rows(own, batch, optimizer)
                    found = bring_rows(own, looked, optimizer)
                    return begin_rows(own, found, optimizer)
                except Exception:
                    begin_on_host(own, batch, optimizer)
                    raise

        coming = map(look_up, batches)
        looked = next(coming, None)
        while looked is not None:
            staged = jax.tree.map(bring, looked, is_leaf=is_looked_up)
            looked, error = None, None
            try:  # before the step of this batch, so that the devices need not wait for it
                looked = next(coming, None)
            except Exception as raised:  # noqa: BLE001 - this batch comes first
                error = raised
            yield staged
            if error is not None:
                raise error

    def _is_ids(self, node: Any) -> bool:
        if isinstance(node, FeatureBatch):
            return True
        return isinstance(node, Mapping) and node.keys() == set(self.names)

    def stats(self) -> dict[str, TableStats]:
        """Counts what became of the ids of each dynamic table, since it was made."""
        found: dict[str, TableStats] = {}
        for stack in self.stacks:
            if stack.dynamic:
                known = self.indexes[stack.name]
                totals = to_host(known["totals"][...])
                num_free = to_host(known["num_free"][...])
                found |= dynamic.stats(stack, totals, num_free)
        return found

    def ids(self, name: str) -> np.ndarray:
        """`[ids]` uint64: the ids of a dynamic table that have a row, ascending."""
        stack, table = self._dynamic_table(name)
        ids, _ = dynamic.rows_of(stack, table, *self._used_and_keys(stack))
        return ids

    def halve_counts(self) -> None:
        """Halves how often ids without a row were seen, for `Admit(count=...)`.

        Called now and then, it forgets ids that come seldom.
        """
        for known in self.indexes.values():
            known["sketch"].set_value(admission.halved(known["sketch"][...]))

    def expect(
        self,
        distinct: Distinct | None,
        *,
        wire_dtype: jax.typing.DTypeLike | None = None,
        exchange_room: float | None = None,
    ) -> None:
        """Says what the exchange has room for, as `fit` does, which has seen the ids.

        What an earlier call said is forgotten.

        Args:
          distinct: how many rows of each table the examples of a device ask for; that of
            the plan by default.
          wire_dtype: that which the collection was made with by default.
          exchange_room: the same.
        """
        told = _wire(wire_dtype, exchange_room, distinct)
        self.wire = Wire(
            told.dtype or self.given.dtype,
            told.room or self.given.room,
            told.distinct or self.given.distinct,
        )

    @property
    def num_outputs(self) -> int:
        """Numbers that `concat` gives for an example."""
        return sum(stack.dim * stack.bags for stack in self.stacks)

    def table(self, name: str) -> Float[Array, "rows dim"]:
        """The rows of a table, in the order of ids.

        Rules under which rows drift need `optimizer.flush(model)` before.
        """
        stack, pieces = self._static_table(name, "ask `ids`, and call the collection")
        if stack.device_rows is not None:
            raise ValueError(
                f"table {name!r} is in host memory: read it by `table_rows` or `save_table`"
            )
        kernel = self.kernels[stack.name][...]
        read = functools.partial(_table_rows, stack, pieces)
        return call_with_auto_axes(read, kernel, out_specs=P())

    def set_table(self, name: str, array: Any) -> None:
        """Replaces the rows of a table.

        Args:
          name: of the table.
          array: `[num_rows, dim]`, in the order of ids.

        Raises:
          ValueError: there is no such table, or the shape is another.
        """
        stack, pieces = self._static_table(name, "call `load_table`")
        expected = (pieces[0].config.num_rows, pieces[0].config.dim)
        if np.shape(array) != expected:
            raise ValueError(
                f"table {name!r} is {expected[0]:,} x {expected[1]:,}, got an array of the "
                f"shape {np.shape(array)}"
            )
        kernel = self.kernels[stack.name]
        if stack.device_rows is not None:
            host = host_of(kernel)
            host.attach(kernel, None, None)
            ids = np.arange(expected[0], dtype=np.int32)
            rows = stack.row_of(ids, pieces[0].place)
            host.put(rows, {ROW: np.asarray(array)})
            return
        write = jit_sharded(_with_table, spec_of(stack), static=(0, 1), donate=(2,))
        inplace.overwrite(
            [kernel], lambda: ([write(stack, pieces, kernel[...], array)], None)
        )

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
          name: of the table. Under a rule whose rows drift, `optimizer.flush(model)` before.
          path: the file, which is replaced if it exists.
          names: what ids stand for, in their order. If these are fewer than ids, they are
            of the last ones: those of `ClickDataset.vocabularies` begin with id 2. Not of
            a dynamic table.
          optimizer: of which the state of rows is written, too; of a dynamic table.
          within: see `assign_rows`.

        Raises:
          OSError: the file cannot be written.
          OtherProcessError: process 0 could not write the file; the message says why.
          ValueError: there is no such table, `path` has another ending or cannot be a file,
            there are more names than rows, an argument is for tables of the other kind, or
            rows in host memory have the state of another optimizer.
        """
        stack, pieces = self._table(name)
        if stack.dynamic:
            if names is not None:
                raise ValueError("a dynamic table has ids of its own: leave names out")
            used, keys = self._used_and_keys(stack)
            ids, rows = dynamic.rows_of(stack, pieces[0], used, keys)
            variables = self._columns(stack, optimizer, within)
            arrays: dict[str, jax.Array | np.ndarray] = {
                column: variable[...]
                if column not in files.BY_PARTS
                else files.flat(variable[...])
                for column, variable in variables.items()
            }
            if stack.device_rows is not None:
                arrays |= self._arrays_on_host(stack, optimizer, within, reading=True)
            steps = None if optimizer is None else int(optimizer.step[...])
            files.save(path, ids, rows, arrays, steps)
            return
        if optimizer is not None:
            raise ValueError(
                f"table {name!r} is not dynamic: its file has no state, leave optimizer out"
            )
        shape = (pieces[0].config.num_rows, pieces[0].config.dim)
        like = jax.ShapeDtypeStruct(shape, stack.dtype)
        table_files.save_table(path, self.table_rows(name), like, names)

    def load_table(
        self,
        name: str,
        path: str | os.PathLike[str],
        optimizer: Optimizer | None,
        *,
        within: Sequence[Any] = (),
    ) -> None:
        """Replaces the ids and rows of a dynamic table by those of a file of `save_table`.

        The mesh may be another, and the table may have more rows or fewer. An error leaves
        the table as it is. The host needs room for the file.

        Args:
          name: of the table.
          path: a Parquet file with the columns `id` and `row`. Without `count` and `last` ids
            were seen once, at 0.
          optimizer: that trains the model, which must have done as many steps as that whose
            state is in the file. If the file has none, the rows have the state of a new
            optimizer. With None the state is not touched: for a model that is not trained.
          within: see `assign_rows`.

        Raises:
          OSError: the file cannot be read.
          ValueError: there is no such dynamic table; the file has rows of another width or
            dtype, an id twice, numbers that are not finite, more ids than there is room for,
            or the state of another rule or after other steps.
        """
        stack, table = self._dynamic_table(name)
        variables = self._columns(stack, optimizer, within)
        like = {
            column: jax.ShapeDtypeStruct(
                (stack.num_rows,) if column in files.BY_PARTS else variable.shape,
                variable.dtype,
            )
            for column, variable in variables.items()
        }
        with_state = optimizer is not None
        read = files.read(path, like, with_state=with_state)
        columns = dict(read.columns)
        columns.setdefault("count", np.ones(len(read.ids), np.int32))
        columns.setdefault("last", np.zeros(len(read.ids), np.int32))
        if optimizer is not None:
            rule, step = (
                optimizer.rule_of(self.kernels[stack.name]),
                optimizer.step[...],
            )
            if read.steps is None:
                fresh = files.in_blocks(
                    lambda rows: first_state(rule, jnp.asarray(rows), step),
                    columns[ROW],
                )
                columns |= {files.STATE + n: array for n, array in fresh.items()}
            elif read.steps != int(step):
                raise ValueError(
                    f"{path} has the state after {read.steps:,} steps, but the optimizer has "
                    f"done {int(step):,}: set `optimizer.step[...]`, or load a file without "
                    "state"
                )
        values = {}
        if stack.device_rows is not None:
            for column in self._arrays_on_host(stack, optimizer, within):
                values[column.removeprefix(files.STATE)] = columns[column]
        known = self.indexes[stack.name]
        here = dynamic.rows_of(stack, table, *self._used_and_keys(stack))
        index, rows = index_edits.changed(
            path,
            dynamic.layout_of(stack),
            stack.tables.index(table),
            name,
            _state(known).index,
            here,
            ids=read.ids,
            removed=None,
        )
        _set_state(known, _state(known)._replace(index=index))
        if stack.device_rows is not None:
            host_of(self.kernels[stack.name]).put(rows, values)
            variables = {name: variables[name] for name in files.BY_PARTS}
        for column, variable in variables.items():
            write = functools.partial(
                files.overwritten,
                rows=rows,
                values=columns[column],
                by_parts=column in files.BY_PARTS,
            )
            _overwrite(variable, write)

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
          folder: see there.
          optimizer: the same.
          state: the same.
          within: see `assign_rows`.
        """
        parts = self.parts(within=within)
        return changes.export(
            self, pathlib.Path(folder), parts, self._seed(), optimizer, state=state
        )

    def parts(self, *, prefix: str = "", within: Sequence[Any] = ()) -> list[Part]:
        """The stacks, as exports of changes take them.

        Args:
          prefix: of the names of tables.
          within: see `assign_rows`.

        Raises:
          NotImplementedError: rows of static tables are in host memory.
        """
        if any(s.device_rows is not None and not s.dynamic for s in self.stacks):
            raise NotImplementedError(
                "changes of static tables in host memory are not exported: save_table "
                "writes them"
            )
        return [
            Part(
                prefix,
                stack,
                self.kernels[stack.name],
                self.indexes.get(stack.name, {}),
                (*within, "kernels", stack.name),
                host_of(self.kernels[stack.name]) if _is_hosted(stack) else None,
            )
            for stack in self.stacks
        ]

    def _seed(self) -> dict[str, jax.Array]:
        return {"seed": self.seed[...]} if self.indexes else {}

    def table_rows(self, name: str) -> Iterator[np.ndarray]:
        """The rows of a table in the order of ids, some at a time: `[n, dim]` on the host.

        With several processes all have to take all of them.
        """
        stack, pieces = self._static_table(name, "call `save_table`")
        adopt_rows(self)
        return rows_in_order(stack, pieces, self.kernels[stack.name])

    def _features(self) -> list[tuple[Stack, list[StackedFeature]]]:
        """All features with their stacks, in the order in which they were given.

        A feature has a part for each piece of its table.
        """
        found: dict[str, tuple[Stack, list[StackedFeature]]] = {}
        for stack in self.stacks:
            for part in stack.features:
                found.setdefault(part.name, (stack, []))[1].append(part)
        return [found[name] for name in self.names]

    def _table(self, name: str) -> tuple[Stack, tuple[StackedTable, ...]]:
        """The stack and the pieces of a table."""
        names = [table.name for stack in self.stacks for table in stack.tables]
        if name not in names:
            raise ValueError(
                f"there is no table {name!r}; there are {sorted({*names})}"
            )
        for stack in self.stacks:
            if pieces := tuple(table for table in stack.tables if table.name == name):
                break
        return stack, pieces

    def _used_and_keys(self, stack: Stack) -> tuple[np.ndarray, np.ndarray]:
        known = self.indexes[stack.name]
        return to_host(known["used"][...]), to_host(known["keys"][...])

    def _columns(
        self, stack: Stack, optimizer: Optimizer | None, within: Sequence[Any]
    ) -> dict[str, nnx.Variable]:
        """The variables that have something for each row, by their column of a file."""
        kernel = self.kernels[stack.name]
        found: dict[str, nnx.Variable] = {ROW: kernel}
        found |= {name: self.indexes[stack.name][name] for name in files.BY_PARTS}
        if optimizer is not None:
            arrays = optimizer.rows_within((*within, "kernels", stack.name), kernel)
            found |= {files.STATE + name: array for name, array in arrays.items()}
        return found

    def _arrays_on_host(
        self,
        stack: Stack,
        optimizer: Optimizer | None,
        within: Sequence[Any],
        *,
        reading: bool = False,
    ) -> dict[str, np.ndarray]:
        """The arrays of rows in host memory, by their column of a file."""
        kernel, path = self.kernels[stack.name], (*within, "kernels", stack.name)
        host = host_of(kernel)
        host.attach_within(path, kernel, optimizer, reading=reading)
        return {
            name if name == ROW else files.STATE + name: array
            for name, array in host.arrays().items()
            if name == ROW or optimizer is not None
        }

    def _dynamic_table(self, name: str) -> tuple[Stack, StackedTable]:
        stack, pieces = self._table(name)
        if not stack.dynamic:
            raise ValueError(
                f"table {name!r} is not dynamic: its ids are 0 to "
                f"{pieces[0].config.num_rows - 1:,}"
            )
        return stack, pieces[0]

    def _static_table(
        self, name: str, instead: str
    ) -> tuple[Stack, tuple[StackedTable, ...]]:
        stack, pieces = self._table(name)
        if stack.dynamic:
            raise ValueError(
                f"table {name!r} is dynamic, its rows have no order of ids: {instead}"
            )
        return stack, pieces

    def _packed(self, ids: Mapping[str, Ids] | FeatureBatch) -> FeatureBatch:
        batch = ids if isinstance(ids, FeatureBatch) else self.pack(ids)
        read = {stack.name for stack in self.stacks if stack.features}
        packed = batch.stacks.keys() | batch.routes.keys()
        if not read <= packed:
            raise ValueError(
                f"the batch is packed for the stacks {sorted(packed)}, but this "
                f"collection has {sorted(read)}; pack it by the collection that reads it"
            )
        return batch

    def _found(self, batch: FeatureBatch) -> FeatureBatch:
        """A batch whose ids have the rows that they have now."""
        stacks, routes = dict(batch.stacks), dict(batch.routes)
        for stack in self.stacks:
            if not _is_found_in_steps(stack):
                continue
            index = _index_of(self.indexes[stack.name])
            how = {"implementation": self.implementation}
            if isinstance(keys_sent := routes.get(stack.name), SentKeys):
                check_mesh(keys_sent.rows.parts)
                routes[stack.name] = find_at_owners(stack, index, keys_sent, **how)
            elif stack.name in stacks:
                x = jax.tree.map(jnp.asarray, stacks[stack.name])
                keys = jax.tree.map(jnp.asarray, batch.keys[stack.name])
                columns = find(stack, index, x, keys, **how)
                stacks[stack.name] = _with_columns(x, columns)
        return dataclasses.replace(batch, stacks=stacks, routes=routes, assigned=True)

    def _current(self, stack: Stack, x: CSR, stage: Any) -> CSR:
        """The matrix of a stack in host memory, or NaN if its rows may have left."""
        if stage is None:
            raise ValueError(_not_staged(stack))
        columns = jnp.asarray(x.indices)
        columns = jnp.where(self.stage[...] == stage, columns, WRONG)
        return _with_columns(x, columns)

    def _rows(
        self,
        ids: Mapping[str, Ids] | FeatureBatch,
        *,
        blank: int = 0,
        dtype: jax.typing.DTypeLike | None = None,
        after: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """`[batch, bags, dim]` of each stack; see `look_up`."""
        batch = self._packed(ids)
        if not batch.assigned and any(map(_is_found_in_steps, self.stacks)):
            if gradients.is_differentiating():
                warnings.warn(
                    "a loss reads dynamic tables without assign_rows: new ids will not be "
                    "learned. Call model.embeddings.assign_rows(ids, optimizer) before the "
                    "loss, and give the model what it returns",
                    stacklevel=2,
                )
            batch = self._found(batch)
        rows, crowded = {}, []
        reads_first = self.unknown == "init"
        for stack in self.stacks:
            if not stack.features:
                continue
            x = batch.routes.get(stack.name)
            if x is None:
                x = batch.stacks[stack.name]
                if stack.device_rows is not None:
                    x = self._current(stack, x, batch.stage)
            found, flag = look_up(
                stack,
                self.kernels[stack.name],
                x,
                wire=self.wire,
                keys=batch.keys.get(stack.name),
                seed=self.seed[...] if stack.dynamic and reads_first else None,
                order=batch.rows.get(stack.name),
                blank=blank,
                dtype=self.dtype if dtype is None else dtype,
                after=after,
                implementation=self.implementation,
            )
            rows[stack.name] = found
            crowded += [] if flag is None else [flag]
        if crowded:
            # In a program that Flax does not know, such as jax.jit, state cannot change.
            with contextlib.suppress(errors.TraceContextError):
                self.overflows[...] += sum(flag.astype(jnp.int32) for flag in crowded)
        return rows


def _tables_of(stack: Stack) -> str:
    """The tables of a stack, as a sentence begins."""
    names = ", ".join(dict.fromkeys(table.name for table in stack.tables))
    return f"the tables {names} are"


def _not_staged(stack: Stack) -> str:
    return (
        f"{_tables_of(stack)} in host memory, and a batch needs its rows on the "
        "devices: take batches of `embeddings.staged(batches, optimizer)`"
    )


def _wire(
    dtype: jax.typing.DTypeLike | None, room: float | None, distinct: Distinct | None
) -> Wire:
    kind = None if dtype is None else jnp.dtype(dtype)
    if kind is not None:
        check_floating("wire_dtype", kind)
    if room is not None and not room > 0:
        raise ValueError(f"exchange_room must be positive, got {room}")
    return Wire(kind, room, distinct)


def spec_of(stack: Stack) -> P:
    """How the parameter of a stack is divided over a mesh."""
    return BY_ROWS if stack.divided else P()


def _kernel(stack: Stack, key: jax.Array, host: HostRows | None) -> RowParam:
    """The parameter of a stack."""
    # Compiled, so that only the result is allocated, on the devices where it belongs.
    value = jit_sharded(first_rows, spec_of(stack), static=(0,))(stack, key)
    return kernel_of(stack, value, host)


def kernel_of(stack: Stack, value: jax.Array, host: HostRows | None = None) -> RowParam:
    """The parameter of a stack, of its rows."""
    metadata: dict[str, Any] = out_sharding(spec_of(stack))
    if stack.rule is not None:
        metadata["rule"] = stack.rule
    if host is not None:
        metadata["host"] = host
    return RowParam(value, **metadata)


def sender_of(collection: EmbeddingCollection) -> Sender | None:
    """How its ids are sent ahead; None if rows are in host memory."""
    stacks = tuple(collection.stacks)
    if any(stack.device_rows is not None for stack in stacks):
        return None
    kernels = [collection.kernels[stack.name] for stack in stacks]
    divided = tuple(map(gradients.is_divided, kernels))
    return Sender(collection.names, stacks, divided, collection.wire)


def collections_of(model: Any) -> dict[Path, EmbeddingCollection]:
    """The collections of a model, by their paths."""
    return {
        tuple(path): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, EmbeddingCollection)
    }


def _is_hosted(stack: Stack) -> bool:
    """Whether it has dynamic tables in host memory."""
    return stack.dynamic and stack.device_rows is not None


def _is_found_in_steps(stack: Stack) -> bool:
    """Whether it has dynamic tables on the devices, whose rows a step finds."""
    return stack.dynamic and stack.device_rows is None


def _hosted(
    collections: Mapping[Path, EmbeddingCollection], batch: FeatureBatch
) -> Iterator[tuple[Path, EmbeddingCollection, Stack]]:
    """The stacks of dynamic tables in host memory that a batch has ids of."""
    for path, collection in collections.items():
        for stack in collection.stacks:
            if _is_hosted(stack) and stack.name in batch.stacks:
                yield (*path, "kernels", stack.name), collection, stack


def _assigning(
    collection: EmbeddingCollection, stack: Stack, optimizer: Optimizer, ahead: int = 0
) -> tuple[Assign, Moment]:
    """How ids of dynamic tables in host memory get rows, some steps ahead, and when."""
    step = optimizer.step[...] + jnp.int32(ahead)
    how = Assign(stack, optimizer.rule_of(collection.kernels[stack.name]), True)
    return how, Moment(collection.seed[...], step, step)


def with_numbers(
    collections: Mapping[Path, EmbeddingCollection],
    batch: FeatureBatch,
    optimizer: Optimizer | None,
    *,
    ahead: int = 0,
) -> FeatureBatch:
    """A batch whose ids of dynamic tables in host memory have the numbers of their rows.

    New ones get a row. It is to begin by `begin_rows`, `begin_on_host`, or in a step by
    `assign_rows`.

    Args:
      collections: by their paths in the model, or the ends of these.
      batch: as `pack` made it.
      optimizer: that trains the model on it; without it rows are only found.
      ahead: how many steps come before that of the batch.
    """
    stacks, new = dict(batch.stacks), dict(batch.new)
    for _, collection, stack in _hosted(collections, batch):
        x, keys = stacks[stack.name], batch.keys[stack.name]
        known = collection.indexes[stack.name]
        if optimizer is None:
            columns = _find(stack, _index_of(known), x, keys)
        else:
            how, moment = _assigning(collection, stack, optimizer, ahead)

            def program(known=known, how=how, x=x, keys=keys, moment=moment):
                state, *found = numbers(how, _state(known), x, keys, moment)
                arrays = _arrays_of(state)
                return [arrays[name] for name in known], found

            columns, new[stack.name] = inplace.overwrite(list(known.values()), program)
        stacks[stack.name] = _with_columns(x, columns)
    return dataclasses.replace(batch, stacks=stacks, new=new)


def begin_rows(
    collections: Mapping[Path, EmbeddingCollection],
    batch: FeatureBatch,
    optimizer: Optimizer | None,
) -> FeatureBatch:
    """A batch whose new rows, which are on the devices, have begun. Takes the same."""
    if optimizer is None:
        return batch
    for path, collection, stack in _hosted(collections, batch):
        kernel = collection.kernels[stack.name]
        state = optimizer.rows_within(path, kernel)
        how, moment = _assigning(collection, stack, optimizer)
        x = batch.stacks[stack.name]

        def program(
            kernel=kernel, state=state, how=how, moment=moment, x=x, stack=stack
        ):
            before = {n: v.get_raw_value() for n, v in state.items()}
            after = begin(
                how,
                Trained(kernel.get_raw_value(), before),
                x.indices,
                batch.keys[stack.name],
                batch.new[stack.name],
                moment,
            )
            return [after.w, *(after.arrays[name] for name in state)], None

        inplace.overwrite([kernel, *state.values()], program)
    return dataclasses.replace(batch, new={})


def begin_on_host(
    collections: Mapping[Path, EmbeddingCollection],
    batch: FeatureBatch,
    optimizer: Optimizer | None,
    *,
    ahead: int = 0,
) -> None:
    """Begins the new rows of a batch that did not come to the devices. See `with_numbers`."""
    for _, collection, stack in _hosted(collections, batch):
        if optimizer is None or stack.name not in batch.new:
            continue
        kernel = collection.kernels[stack.name]
        new = np.flatnonzero(np.asarray(batch.new[stack.name]))
        rows = np.asarray(batch.stacks[stack.name].indices)[new]
        keys = [np.asarray(word)[new] for word in batch.keys[stack.name]]
        rule, step = optimizer.rule_of(kernel), optimizer.step[...] + jnp.int32(ahead)
        for start in range(0, len(rows), vectors.BLOCK):
            some = slice(start, start + vectors.BLOCK)
            here = TableKeys(*(np.resize(word[some], vectors.BLOCK) for word in keys))
            w = vectors.drawn(stack, collection.seed[...], here)
            values = {ROW: w, **first_state(rule, w, step)}
            count = len(rows[some])
            host_of(kernel).put(
                rows[some], {n: to_host(array)[:count] for n, array in values.items()}
            )


class LookedUp(NamedTuple):
    """A batch whose rows were looked up, and which are now in use.

    Attributes:
      batch: of some collections, with any axes before those of its arrays.
      rows: the rows of each stack in host memory that it has.
    """

    batch: FeatureBatch
    rows: dict[str, Coming]


def look_up_rows(
    collections: Mapping[Path, EmbeddingCollection],
    batch: FeatureBatch,
    optimizer: Optimizer | None,
) -> LookedUp:
    """Begins `bring_rows`, and does not wait for the devices. Takes the same."""
    hosts = _hosts(collections, optimizer)
    training = optimizer is not None
    rows = {
        name: host.look(_columns_of(batch.stacks[name]), training=training)
        for name, host in hosts.items()
        if name in batch.stacks  # else no feature reads it
    }
    return LookedUp(batch, rows)


def _columns_of(x: CSR) -> jax.Array | np.ndarray:
    """The columns of a matrix; those of dynamic tables are on the devices."""
    return x.indices if isinstance(x.indices, jax.Array) else np.asarray(x.indices)


def bring_rows(
    collections: Mapping[Path, EmbeddingCollection],
    looked: LookedUp,
    optimizer: Optimizer | None,
) -> FeatureBatch:
    """A batch whose rows have come from host memory, see `EmbeddingCollection.staged`.

    Args:
      collections: by their paths in the model, or the ends of these.
      looked: what `look_up_rows` found.
      optimizer: that trains the model on it.

    Raises:
      NoRoomError: there are too many rows. Some may have come.
    """
    hosts = _hosts(collections, optimizer)
    stacks, rows, moved = dict(looked.batch.stacks), {}, False
    try:
        for name, mine in looked.rows.items():
            x, host = stacks[name], hosts[name]
            slots, columns, left = host.bring(mine)
            moved |= left
            shape = np.shape(x.indices)
            leaves = (x.data, slots.reshape(shape), x.indptr, None)
            stacks[name] = CSR.tree_unflatten(host.stack.kernel_rows, leaves)
            rows[name] = columns.reshape(shape)
    finally:  # rows of one stack may have left, and those of another not fit
        variables = {id(host.number): host.number for host in hosts.values()}
        numbers = {
            max(h.last_number for h in hosts.values() if id(h.number) == each)
            for each in variables
        }
        number = max(numbers)
        if moved or len(numbers) > 1:
            number += 1
            for variable in variables.values():
                assert variable is not None
                set_number(variable, number)
        for host in hosts.values():
            host.last_number = number
    return dataclasses.replace(
        looked.batch, stacks=stacks, stage=np.asarray(number, np.int32), rows=rows
    )


def _hosts(
    collections: Mapping[Path, EmbeddingCollection], optimizer: Optimizer | None
) -> dict[str, HostRows]:
    """The rows in host memory of each stack, which move with the optimizer's state."""
    found = {}
    for path, collection in collections.items():
        adopt_rows(collection)
        for stack in collection.stacks:
            if stack.device_rows is None:
                continue
            kernel = collection.kernels[stack.name]
            host = found[stack.name] = host_of(kernel)
            host.attach_within((*path, "kernels", stack.name), kernel, optimizer)
            if host.number is None:  # it may come from a checkpoint
                host.number = collection.stage
                host.last_number = int(collection.stage[...])
    return found


def host_of(kernel: RowParam) -> HostRows:
    """The rows of a parameter that are in host memory."""
    return kernel.get_metadata()["host"]


def adopt_rows(collection: EmbeddingCollection) -> None:
    """Lets rows in host memory begin with the random numbers of their collection.

    If a program has made it, they have those of the program's trace until then.
    """
    for stack in collection.stacks:
        if stack.device_rows is not None:
            host_of(collection.kernels[stack.name]).key = collection.first


def rows_in_order(
    stack: Stack, pieces: tuple[StackedTable, ...], kernel: RowParam
) -> Iterator[np.ndarray]:
    """The rows of a static table, see `EmbeddingCollection.table_rows`."""
    if stack.device_rows is None:
        return table_files.table_rows(stack, pieces, kernel[...])
    return _rows_of_host(stack, pieces[0], host_of(kernel))


def _rows_of_host(
    stack: Stack, table: StackedTable, host: HostRows
) -> Iterator[np.ndarray]:
    count = max(1, table_files.BLOCK_NUMBERS // stack.dim)
    rows = table.config.num_rows
    for start in range(0, rows, count):
        ids = np.arange(start, min(start + count, rows), dtype=np.int32)
        yield host.read(stack.row_of(ids, table.place))


def every_row(kernel: RowParam) -> Iterator[np.ndarray]:
    """The rows of a stack of dynamic tables in host memory, as they lie."""
    host = host_of(kernel)
    rows, dim = host.stack.num_rows, host.stack.dim
    array = host.arrays().get(ROW, np.zeros((rows, dim), host.stack.dtype))
    count = max(1, table_files.BLOCK_NUMBERS // dim)
    return (array[start : start + count] for start in range(0, rows, count))


class IndexState(nnx.Variable):
    """Knowledge about the ids of dynamic tables."""


def _index(stack: Stack) -> dict[str, IndexState]:
    """Which ids of a stack have rows: none."""
    by_parts = P("model")
    state = jit_sharded(dynamic.empty, by_parts, static=(0,))(stack)
    arrays = _arrays_of(state)
    metadata: dict[str, Any] = out_sharding(by_parts)
    return {name: IndexState(array, **metadata) for name, array in arrays.items()}


def _state(known: Mapping[str, nnx.Variable]) -> dynamic.State:
    index = _index_of(known)
    arrays = {name: known[name][...] for name in known if name not in index._fields}
    return dynamic.State(index=index, **arrays)


def _index_of(known: Mapping[str, nnx.Variable]) -> dynamic.Index:
    return dynamic.Index(*(known[name][...] for name in dynamic.Index._fields))


def _arrays_of(state: dynamic.State) -> dict[str, jax.Array]:
    found = {**state.index._asdict(), **state._asdict()}
    del found["index"]
    return found


def _set_state(known: Mapping[str, nnx.Variable], state: dynamic.State) -> None:
    for name, array in _arrays_of(state).items():
        known[name].set_value(array)


_find = jax.jit(find, static_argnums=0)


def _overwrite(variable: nnx.Variable, write: Callable[[jax.Array], jax.Array]) -> None:
    inplace.overwrite([variable], lambda: ([write(variable[...])], None))


def _with_columns(x: CSR, columns: jax.Array) -> CSR:
    return CSR.tree_unflatten(x.num_cols, (x.data, columns, x.indptr, None))


def _must_be_joined(parts: Sequence[StackedFeature]) -> bool:
    """Whether its numbers do not lie behind each other: a sequence of pieces of rows."""
    return len(parts) > 1 and parts[0].config.length is not None


def _whole(rows: jax.Array, parts: Sequence[StackedFeature]) -> jax.Array:
    """The rows of a feature for a batch, from `[batch, bags, dim]` of its stack."""
    pieces = [rows[:, part.bag_range] for part in parts]
    whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)
    return whole if parts[0].config.length else whole[:, 0]


@jax.custom_vjp
def _with_first(rows: jax.Array, first: jax.Array) -> jax.Array:
    """`rows`, whose first bag becomes `first`."""
    return rows.at[:, 0].set(first)


# The first bag has no ids, so nothing reads its gradient, and it need not be zero.
_with_first.defvjp(
    lambda rows, first: (_with_first(rows, first), None),
    lambda _, slope: (slope, slope[:, 0]),
)


def _rows_of(stack: Stack, table: StackedTable) -> jax.Array:
    """Where the rows of a table lie."""
    ids = jnp.arange(table.config.num_rows, dtype=jnp.int32)
    return stack.row_of(ids, table.place)


def _table_rows(
    stack: Stack, pieces: tuple[StackedTable, ...], kernel: jax.Array
) -> jax.Array:
    found = [replicated(kernel[_rows_of(stack, piece)]) for piece in pieces]
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)


def _with_table(
    stack: Stack, pieces: tuple[StackedTable, ...], kernel: jax.Array, array: jax.Array
) -> jax.Array:
    def written(kernel, array):
        array = array.astype(kernel.dtype)
        for piece in pieces:
            mine = array[:, piece.first_column : piece.first_column + stack.dim]
            rows = _rows_of(stack, piece)
            kernel = kernel.at[rows].set(mine, unique_indices=True)
        return kernel

    return call_with_auto_axes(written, kernel, array, out_specs=spec_of(stack))
