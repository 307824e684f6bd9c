"""EmbeddingCollection: many tables and features, read by few lookups."""

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
      tables: configuration of each table, by the table's name.
      features: configuration of each feature, by the feature's name; a string is short for
        `FeatureConfig(table)`.
      dtype: dtype of the results; by default the dtype of the tables.
      plan: a plan made by `plan_embeddings`, or a placement for each of some tables whose
        configuration has none. By default tables of one width, dtype and rule are replicated if
        they have up to 2^20 numbers together, and else divided by rows.
      wire_dtype: dtype in which sums and gradients cross between devices, such as bfloat16;
        they are added in float32. By default the dtype of the table.
      exchange_room: places for ids between each pair of devices, as a multiple of an even
        share. By default 1.5, and more for few ids.
      implementation: implementation of the lookup, one of those of `sparsejax.gather_matmul`.
        None picks the fastest one for the device.
      rngs: random streams.

    Attributes:
      settings: settings that compiled programs depend on, a `TableSettings`.
      overflows: `[]` int32 variable: number of lookups in which the devices of a mesh had too
        few places for the ids that they exchange. Each device then gathered all ids. The
        results are equal.

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
        self.settings = self.given = TableSettings.of(
            tables, plan, wire_dtype=wire_dtype, exchange_room=exchange_room
        )
        self.stacks = self.settings.stacks(configs)
        self.names = tuple(configs)
        # Ids without a row read their first vector; in a predictor it may be zeros.
        self.unknown: Unknown = "init"
        key = rngs.params()
        self.overflows = nnx.Variable(jnp.zeros((), jnp.int32))
        make_stores(self, self.stacks, key)

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
        self, ids: Mapping[str, Ids], *, nse: Mapping[str, int] | None = None
    ) -> FeatureBatch:
        """Packs the ids of a batch into one matrix for each stack, for calls to take.

        A call packs ids itself. An input pipeline can do it earlier: NumPy arrays give NumPy
        arrays.

        Args:
          ids: ids of each feature, by the feature's name.
          nse: number of ids that there is room for in each stack, by the stack's name; by
            default as many as the arguments have room for. One program serves all batches of
            one `nse`. An id of a table that is cut by columns counts once for each piece.

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
        """Sends the ids of the next batch to the devices with their rows before its step begins.

        ::

            with jax.set_mesh(mesh):
                ids = model.embeddings.ahead(ids for dense, ids, clicks in batches)
                for (dense, _, clicks), ids in zip(batches, ids):
                    step(model, optimizer, dense, ids, clicks)

        Without it, a step on several devices waits twice for whether the exchange has places
        for all ids (`exchange_room`). A batch of this iterator says so beforehand. If it has
        too few places, the batch is packed instead, and its step exchanges all ids. The first
        such batch compiles that step. Results are equal. Each device sends an id of a dynamic
        table once, and looks up its own ids alone. Ids of tables in host memory are packed:
        `staged(ahead(batches), optimizer)` brings their rows.

        Args:
          batches: the ids of each batch. The iterator takes one batch more than it has
            returned: if the other arrays come from the same iterator, use `itertools.tee`.
            Do not change the arrays of a batch before it is returned.

        Raises:
          TypeError: ids are not int32.
          ValueError: a feature is missing or unknown; shapes do not fit; or, if all ids are
            NumPy arrays, an id is outside its table or a list is too long.
        """
        stores = [store for store in self.stores() if not store.stages]
        sender = sender_of(self, stores)
        held = [stack for stack in self.stacks if stack not in sender.stacks]
        later = {feature.name for stack in held for feature in stack.features}

        def answered(ids, batch, crowded):
            return self._packed(ids) if crowded else batch  # waits for the answer

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
          ids: ids of each feature, by the feature's name, or the batch that `pack` made of
            them.
          optimizer: the optimizer that trains the model.
          clock: the time, an integer that fits into int32 and does not fall. By default
            the number of steps that the optimizer has done. With a clock of your own, rows of
            earlier batches of a step are not protected: do not accumulate gradients with it.
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
          batches: ids of all features; or a batch that `pack` made; or a tuple, list or
            dictionary that has one of these somewhere. Ids are arrays of the host.
          optimizer: the optimizer that trains the model on these batches. Without it rows are
            only read.
          within: the path of this collection in the model, if the model has several collections
            with dynamic tables of one width.

        Raises:
          ValueError: a batch has no ids of this collection; it has ids of more rows than
            there is room for on the devices; the model is a copy of another one.
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
        """Sets the room of the exchange, as `fit` does, which has seen the ids.

        Arguments of an earlier call are forgotten.

        Args:
          distinct: average number of different rows of each table that the examples of a device
            read; by default that of the plan.
          wire_dtype: dtype in which sums and gradients cross between devices; by default the
            one that the collection was made with.
          exchange_room: places for ids between each pair of devices, as a multiple of an even
            share; by default the number that the collection was made with.
        """
        self.settings = self.given.replaced(
            distinct=distinct, wire_dtype=wire_dtype, exchange_room=exchange_room
        )

    @property
    def num_outputs(self) -> int:
        """Numbers that `concat` gives for an example."""
        return sum(stack.dim * stack.bags for stack in self.stacks)

    def _features(self) -> list[tuple[Stack, list[StackedFeature]]]:
        """All features with their stacks, in the order in which they were given.

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
        """`[batch, bags, dim]` of each stack; see `look_up`."""
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
            # In a program that Flax does not know, such as jax.jit, state cannot change.
            with contextlib.suppress(errors.TraceContextError):
                self.overflows[...] += sum(flag.astype(jnp.int32) for flag in crowded)
        return {name: each.rows for name, each in found.items()}


def _of_candidates(requests: jax.Array, candidates: jax.Array) -> jax.Array:
    """The bags of candidates, with those of their requests. A bag is zero in one of the two."""
    of_request = candidates.reshape(len(requests), -1, *requests.shape[1:])
    return (requests[:, None] + of_request).reshape(candidates.shape)


def collections_of(model: Any) -> dict[Path, EmbeddingCollection]:
    """The collections of a model, by their paths."""
    return {
        tuple(path): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, EmbeddingCollection)
    }


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
