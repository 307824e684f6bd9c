"""EmbeddingCollection: many tables and features, read by a few lookups."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, nnx
from jaxtyping import Array, Float

from sparsejax.embeddings import feature_batch
from sparsejax.embeddings.config import (
    FeatureConfig,
    Placement,
    TableConfig,
    Unknown,
    feature_configs,
)
from sparsejax.embeddings.feature_batch import FeatureBatch, Ids
from sparsejax.embeddings.lookup import Call, sent
from sparsejax.embeddings.placement import Distinct, Stack, StackedFeature
from sparsejax.embeddings.plan import EmbeddingPlan, TableSettings
from sparsejax.embeddings.staged import Staged
from sparsejax.embeddings.tables import STORES, Tables, make_stores, sender_of
from sparsejax.ops.implementations import Implementation, check_implementation
from sparsejax.optimizers.gradients import Path
from sparsejax.optimizers.optimizer import Optimizer


class EmbeddingCollection(Tables):
    """Embedding tables, and features that read them.

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

    Tables with equal width, dtype and rule are concatenated in one `RowParam`, a *stack*.
    Replicated tables form a separate stack. However many tables a stack has, a step reads it by
    one lookup, sorts the ids once, and updates the touched rows once. `sparsejax.Optimizer` and
    `sparsejax.value_and_grad` treat it as the kernel of a `SparseLinear`.

    Ids of a feature are an int32 array, `[batch]` or `[batch, n]`, where -1 stands for no id, or a
    `CSR` `[batch, num_rows]` whose columns are ids and whose values are weights. Lists of ids in
    any order are given as `WideIds.ragged(ids, offsets, weights)`. A repeated id counts each time.
    A feature without ids gives zeros, with any combiner.

    On a mesh, rows of large tables are divided over "model", and batches over "data". A seed gives
    equal tables on every mesh, and a checkpoint can be restored on every mesh.

    Args:
      tables: configuration of each table, by the table's name.
      features: configuration of each feature, by the feature's name; a string is short for
        `FeatureConfig(table)`.
      dtype: dtype of the results; by default the dtype of the tables.
      plan: plan made by `plan_embeddings`, or placements by table name for tables whose
          configuration has none. By default tables of equal width, dtype and rule are replicated
          if they have at most 2^20 numbers together, and divided by rows otherwise.
      wire_dtype: dtype in which sums and gradients are sent between devices, such as bfloat16;
          they are added in float32. By default the dtype of the table.
      exchange_room: capacity for ids between each pair of devices, as a multiple of an even share.
          By default 1.5, and more for few ids.
      implementation: implementation of the lookup, as in `sparsejax.gather_matmul`. None chooses
          the fastest one for the device.
      rngs: random streams.

    Attributes:
      settings: settings that compiled programs depend on, a `TableSettings`.
      overflows: `[]` int32 variable: number of lookups in which the exchange between devices had
          too little capacity for the ids. Each device then gathered all ids. The results are
          equal.

    Raises:
      ValueError: there is no feature, a feature or `plan` names an unknown table, the plan belongs
          to other tables, the number of pieces does not divide a width, or `exchange_room` is not
          positive.
      TypeError: `wire_dtype` is not a floating dtype of at least 16 bits, or `plan` has a wrong
          type.
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
        self.settings = self.given = TableSettings.of(
            tables, plan, wire_dtype=wire_dtype, exchange_room=exchange_room
        )
        self.stacks = self.settings.stacks(configs)
        self.names = tuple(configs)
        # Ids without a row read their initial vector, or zeros if a predictor chooses so.
        self.unknown: Unknown = "init"
        key = rngs.params()
        self.overflows = nnx.Variable(jnp.zeros((), jnp.int32))
        make_stores(self, self.stacks, key)

    def __call__(self, ids: Mapping[str, Ids] | FeatureBatch) -> dict[str, jax.Array]:
        """Looks up the rows of each feature for a batch.

        Returns:
          `{feature: [batch, dim]}`, and `[batch, length, dim]` for a feature without combiner,
          with zeros where there is no id. An id outside its table makes its row NaN, unless it is
          detected on the host or dropped.
        """
        rows = self._rows(ids)
        return {
            name: _whole(rows[stack.name], parts)
            for name, (stack, parts) in zip(self.names, self._features(), strict=True)
        }

    def concat(
        self, ids: Mapping[str, Ids] | FeatureBatch
    ) -> Float[Array, "batch outputs"]:
        """Concatenates the vectors of all features, in their order: `[batch, num_outputs]`.

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
            else:  # the bags of these features are adjacent in the stack
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
        """Stacks `first`, `blank` zero vectors, and the vectors of all features, which have one
        width.

        Rows of a single stack are looked up into their final place: nothing is copied.
        """
        batch, dim = first.shape
        if [stack.dim for stack in self.stacks] == [dim]:
            rows = self._rows(ids, blank=1 + blank, dtype=first.dtype, after=first)
            return _with_first(*rows.values(), first)
        rows = self.concat(ids).astype(first.dtype).reshape(batch, -1, dim)
        # On a GPU, adding two padded arrays takes a third of the time of a concatenation.
        behind = jnp.pad(rows, ((0, 0), (1 + blank, 0), (0, 0)))
        more = behind.shape[1] - 1
        return behind + jnp.pad(first[:, None], ((0, 0), (0, more), (0, 0)))

    def pack(
        self, ids: Mapping[str, Ids], *, nse: Mapping[str, int] | None = None
    ) -> FeatureBatch:
        """Packs the ids of a batch into one matrix for each stack, as input of a call.

        A call packs ids itself. An input pipeline can pack them earlier: NumPy arrays are packed
        into NumPy arrays.

        Args:
          ids: ids of each feature, by the feature's name.
          nse: capacity for ids in each stack, by the stack's name; by default that of the
              arguments. One program serves all batches of equal `nse`. An id of a table that is
              cut by columns counts once for each piece.

        Raises:
          ValueError: a feature is missing or unknown, or shapes do not match. If all ids are NumPy
              arrays: an id is outside its table, a list is too long, or the capacity is too small.
              (For other arrays, affected rows are NaN instead. With too small a capacity, these
              are all rows from the first one that does not fit.)
          TypeError: ids are not int32.
        """
        return feature_batch.pack(self.stacks, ids, nse=nse)

    def ahead(
        self, batches: Iterable[Mapping[str, Ids] | FeatureBatch]
    ) -> Iterator[FeatureBatch]:
        """Sends the ids of the next batch to the devices that own their rows, before its step
        starts.

        ::

            with jax.set_mesh(mesh):
                ids = model.embeddings.ahead(ids for dense, ids, clicks in batches)
                for (dense, _, clicks), ids in zip(batches, ids):
                    step(model, optimizer, dense, ids, clicks)

        Otherwise a step on several devices waits twice to learn whether the exchange has capacity
        for all ids (`exchange_room`). A batch from this iterator already contains the answer. If
        the capacity is too small, the batch is packed instead, and its step exchanges all ids. The
        first such batch compiles that step. Results are equal. Each device sends an id of a
        dynamic table once, and looks up only its own ids. Ids of tables in host memory are packed:
        `staged(ahead(batches), optimizer)` copies their rows to the devices.

        Args:
          batches: ids of each batch. The iterator takes one more batch than it has returned: if
              the other arrays come from the same iterator, use `itertools.tee`. Do not change the
              arrays of a batch before it is returned.

        Raises:
          TypeError: ids are not int32.
          ValueError: a feature is missing or unknown; shapes do not match; or, if all ids are
              NumPy arrays, an id is outside its table or a list is too long.
        """
        stores = [store for store in self.stores() if not store.stages]
        sender = sender_of(self, stores)
        held = [stack for stack in self.stacks if stack not in sender.stacks]
        later = {feature.name for stack in held for feature in stack.features}

        def answered(ids, batch, crowded):
            # Reading the flag `crowded` waits for the device.
            return self._packed(ids) if crowded else batch

        waiting = collections.deque()
        for ids in batches:
            rest, mine = FeatureBatch({}), ids
            if not isinstance(ids, FeatureBatch):
                if later:
                    rest = feature_batch.pack(held, {n: ids[n] for n in later})
                given = {n: value for n, value in ids.items() if n not in later}
                mine = feature_batch.checked(sender.stacks, given)
            batch, crowded = sent[False](sender, mine)
            crowded.copy_to_host_async()
            batch = dataclasses.replace(
                batch, stacks=batch.stacks | rest.stacks, keys=batch.keys | rest.keys
            )
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
        """Assigns rows of dynamic tables to new ids, and finds the rows of known ids.

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

        A new row starts with a vector that depends only on the seed, the table and the id, and
        with the state of a new optimizer. An id without a row reads this vector, too, but gets no
        gradient. Rows and their counts depend only on the batches, not on the order of ids in a
        batch or on the mesh. See docs/dynamic_tables.md.

        Args:
          ids: ids of each feature, by the feature's name, or a batch made from them by `pack`.
          optimizer: optimizer that trains the model.
          clock: current time, an int32 that never decreases. By default the number of steps that
              the optimizer has done. With a custom clock, rows of earlier batches of a step can be
              evicted: do not accumulate gradients with it.
          within: path of this collection in the model, needed if several collections have dynamic
              tables of equal width.

        Returns:
          The batch to pass to the model. It is valid until rows are assigned again.

        Raises:
          ValueError: there are no dynamic tables; the batch already has rows; the optimizer does
              not train these tables; or the clock does not fit into int32. For tables in host
              memory: the batch did not come from `staged`, or a clock is given.
        """
        if not self.indexes:
            raise ValueError(
                "assign_rows is for dynamic tables (DynamicTableConfig), of which this "
                "collection has none; the model takes the ids themselves"
            )
        batch = self._packed(ids)
        if batch.assigned:
            raise ValueError("these ids have their rows already: assign them once")
        for store in self.stores(within):
            batch = store.assigned(batch, optimizer, clock)
        return dataclasses.replace(batch, assigned=True)

    def staged[Batch](
        self,
        batches: Iterable[Batch],
        optimizer: Optimizer | None = None,
        *,
        within: Sequence[Any] = (),
    ) -> Iterator[Batch]:
        """Yields batches whose rows were copied from host memory to the devices.

        ::

            for dense, ids, clicks in model.embeddings.staged(batches, optimizer):
                step(model, optimizer, dense, ids, clicks)

        Rows that must make room for them are copied back to the host after their last update.
        While the devices process a batch, the host prepares the next one, which it has already
        taken from `batches`. Use a batch before you request the next one: later it may read NaN,
        as its rows may have been replaced.

        If there is an optimizer, new ids of dynamic tables in host memory are assigned rows here,
        after the step of the previous batch has started.

        On a CPU, losses are bitwise equal to those of tables on the devices, see
        docs/host_tables.md.

        Args:
          batches: ids of all features; or batches made by `pack`; or tuples, lists or dictionaries
              that contain one of these. Ids are NumPy arrays.
          optimizer: optimizer that trains the model on these batches. Without it, rows are only
              read.
          within: path of this collection in the model, needed if several collections have dynamic
              tables of equal width.

        Raises:
          ValueError: a batch has no ids of this collection; its rows do not fit on the devices; or
              the model is a copy of another one.
        """
        stores = self.stores(within)
        if not any(store.stages for store in stores):
            raise ValueError(
                "staged is for tables in host memory (host=True, or host_rows), of which this "
                "collection has none; the model takes the ids themselves"
            )
        return Staged(stores, optimizer).each(
            batches, self._packed_on_host, frozenset(self.names)
        )

    def _packed_on_host(self, ids: Mapping[str, Ids] | FeatureBatch) -> FeatureBatch:
        if not isinstance(ids, FeatureBatch):
            ids = jax.tree.map(np.asarray, ids)
        return self._packed(ids)

    def expect(
        self,
        distinct: Distinct | None,
        *,
        wire_dtype: jax.typing.DTypeLike | None = None,
        exchange_room: float | None = None,
    ) -> None:
        """Sets the capacity of the exchange from statistics of the ids, as `fit` does.

        Each call replaces the arguments of earlier calls.

        Args:
          distinct: average number of distinct rows of each table that the examples of a device
              read; by default the number in the plan.
          wire_dtype: dtype in which sums and gradients are sent between devices; by default the
              dtype given to the collection.
          exchange_room: capacity for ids between each pair of devices, as a multiple of an even
              share; by default the number given to the collection.
        """
        self.settings = self.given.replaced(
            distinct=distinct, wire_dtype=wire_dtype, exchange_room=exchange_room
        )

    @property
    def num_outputs(self) -> int:
        """Width of the result of `concat`."""
        return sum(stack.dim * stack.bags for stack in self.stacks)

    def _features(self) -> list[tuple[Stack, list[StackedFeature]]]:
        """All features in their original order, each with its stack, and with a part for each
        piece of its table.

        A feature has a part for each piece of its table.
        """
        found: dict[str, tuple[Stack, list[StackedFeature]]] = {}
        for stack in self.stacks:
            for part in stack.features:
                found.setdefault(part.name, (stack, []))[1].append(part)
        return [found[name] for name in self.names]

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

    def _rows(
        self,
        ids: Mapping[str, Ids] | FeatureBatch,
        *,
        blank: int = 0,
        dtype: jax.typing.DTypeLike | None = None,
        after: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Looks up the rows of each stack, `[batch, bags, dim]`; see `look_up`."""
        if isinstance(ids, feature_batch.CandidateBatch):
            both = (ids.requests, ids.candidates)
            parts = (self._rows(each, blank=blank, dtype=dtype) for each in both)
            return jax.tree.map(_of_candidates, *parts)
        batch = self._packed(ids)
        dtype = self.dtype if dtype is None else dtype
        call = Call(self.settings, blank, dtype, after, self.implementation)
        found = {
            stack.name: STORES[stack.store](self, stack).rows(batch, call)
            for stack in self.stacks
            if stack.features
        }
        crowded = [each.crowded for each in found.values() if each.crowded is not None]
        if crowded:
            # In a transformation other than Flax's, such as jax.jit, the counter cannot be
            # updated.
            with contextlib.suppress(errors.TraceContextError):
                self.overflows[...] += sum(flag.astype(jnp.int32) for flag in crowded)
        return {name: each.rows for name, each in found.items()}


def _of_candidates(requests: jax.Array, candidates: jax.Array) -> jax.Array:
    """Merges the bags of candidates with those of their requests. Each bag is zero in one of the
    two arrays.
    """
    of_request = candidates.reshape(len(requests), -1, *requests.shape[1:])
    return (requests[:, None] + of_request).reshape(candidates.shape)


def collections_of(model: Any) -> dict[Path, EmbeddingCollection]:
    """The collections of a model, by their paths in it."""
    return {
        tuple(path): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, EmbeddingCollection)
    }


def _must_be_joined(parts: Sequence[StackedFeature]) -> bool:
    """Whether the vectors of a feature must be joined: it has no combiner, and its table is cut
    into pieces by columns.
    """
    return len(parts) > 1 and parts[0].config.length is not None


def _whole(rows: jax.Array, parts: Sequence[StackedFeature]) -> jax.Array:
    """The vectors of a feature, joined from `[batch, bags, dim]` of its stack."""
    pieces = [rows[:, part.bag_range] for part in parts]
    whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)
    return whole if parts[0].config.length else whole[:, 0]


@jax.custom_vjp
def _with_first(rows: jax.Array, first: jax.Array) -> jax.Array:
    """Replaces the first bag of `rows` by `first`."""
    return rows.at[:, 0].set(first)


# The first bag has no ids, so nothing reads its gradient, which need not be set to zero.
_with_first.defvjp(
    lambda rows, first: (_with_first(rows, first), None),
    lambda _, slope: (slope, slope[:, 0]),
)
