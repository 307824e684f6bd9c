"""Adds ids to the tables of a trained model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from sparsejax.embeddings.collection import EmbeddingCollection, collections_of
from sparsejax.embeddings.placement import Stack, spec_of
from sparsejax.embeddings.stores.host import HostStore
from sparsejax.embeddings.tables import STORES
from sparsejax.mesh.layout import call_with_auto_axes, jit_sharded
from sparsejax.mesh.promotion import promoting
from sparsejax.optimizers.gradients import Path
from sparsejax.optimizers.optimizer import Moved, Optimizer

# The id of categories that are rare or unknown, see `sparsejax.data.VocabularyColumn`.
UNKNOWN = 1


@promoting()
def add_ids(
    model: nnx.Module,
    added: Mapping[str, int],
    *,
    like: int = UNKNOWN,
    optimizer: Optimizer | None = None,
) -> None:
    """Adds ids after the known ids of some tables, in place.

    >>> model = build_click_model(
    ...     DLRMConfig(), num_dense=2, features={"user": 50, "item": 90}, rngs=nnx.Rngs(0)
    ... )
    >>> optimizer = Optimizer(model, optimizers.adagrad(0.01))
    >>> add_ids(model, {"user": 3}, optimizer=optimizer)
    >>> model.num_ids
    {'user': 53, 'item': 90}

    Known rows and their optimizer state do not change. A new row is a copy of the row of unknown
    categories, which the model has read for the new category so far. So predictions do not change
    until the model is trained further. A new row's optimizer state is that of a new optimizer, at
    this step.

    `data.append_features(known)` and `read_clicks(..., append=True)` give data the ids of
    such a model. Tables get new shapes, for which programs are compiled again, and may be placed
    differently on a mesh, as in a new model. During the call, memory must have room for the tables
    twice. All rows of a larger table in host memory take memory from then on.

    Args:
      model: model that has one `EmbeddingCollection` or more.
      added: numbers of new ids, by the names of tables. Collections with a table of the same
        name all get them.
      like: id whose row is copied for new ids.
      optimizer: the model's optimizer. Rows that drift are brought up to date first, as by
        `Optimizer.flush`.

    Raises:
      ValueError: no collection has such a table, it is dynamic, a number is negative, or a
        table does not have the id `like`.
    """
    collections = collections_of(model)
    _check(collections.values(), added, like)
    if optimizer is not None:
        optimizer.flush(model)
    moved: dict[Path, Moved] = {}
    hosted: list[tuple[EmbeddingCollection, Path, Stack, HostStore]] = []
    for path, collection in collections.items():
        before, kernels = collection.stacks, collection.kernels
        after = _with_more(collection, added)
        found = {}
        for stack in after:
            if stack in before:
                found[stack.name] = kernels[stack.name]
                continue
            store = STORES[stack.store]
            held = {table.name for table in stack.tables}
            sources = tuple(
                s for s in before if not held.isdisjoint(t.name for t in s.tables)
            )
            paths = tuple((*path, "kernels", source.name) for source in sources)
            if store.stages:
                (source,) = (HostStore(collection, s, path) for s in sources)
                found[stack.name] = store.new_kernel(collection, stack)
                hosted.append((collection, path, stack, source))
                # `HostStore.take` moves the state of these rows.
                moved[(*path, "kernels", stack.name)] = Moved(paths, _fresh)
                continue
            move = functools.partial(_moved, sources, stack)
            start = jnp.zeros((stack.num_rows, stack.dim), stack.dtype)
            arrays = [kernels[source.name][...] for source in sources]
            make = _compiled(functools.partial(move, like), spec_of(stack))
            kernel = make(start, *arrays)
            found[stack.name] = store.new_kernel(collection, stack, kernel)
            # Compiled for arrays with one number per row, as the state of some optimizers has.
            make = _compiled(functools.partial(move, None), spec_of(stack, 1))
            moved[(*path, "kernels", stack.name)] = Moved(paths, make)
        collection.stacks, collection.kernels = after, nnx.data(found)
    if optimizer is not None:
        optimizer.move_rows(model, moved)
    for collection, path, stack, source in hosted:
        HostStore(collection, stack, path).take(source, like, optimizer)


def _fresh(fresh: jax.Array, *before: jax.Array) -> jax.Array:
    del before
    return fresh


def _check(
    collections: Collection[EmbeddingCollection], added: Mapping[str, int], like: int
) -> None:
    """Raises ValueError for invalid arguments of `add_ids`."""
    tables = {
        table.name: table.config.num_rows
        for collection in collections
        for stack in collection.stacks
        for table in stack.tables
    }
    dynamic = {
        table.name
        for collection in collections
        for stack in collection.stacks
        for table in stack.tables
        if stack.dynamic
    }
    for name, count in added.items():
        if name not in tables:
            raise ValueError(
                f"the model has no table {name!r}; it has {sorted(tables)}"
            )
        if name in dynamic:
            raise ValueError(
                f"cannot add ids to {name!r}: a dynamic table takes new ids by itself. For "
                "more room make a larger collection, and load the rows by `load_table`"
            )
        if count < 0:
            raise ValueError(f"cannot add {count:,} ids to {name!r}: it is negative")
        if not 0 <= like < tables[name]:
            raise ValueError(
                f"like={like} is no id of {name!r}, which has {tables[name]:,}"
            )


def _with_more(
    collection: EmbeddingCollection, added: Mapping[str, int]
) -> tuple[Stack, ...]:
    """The stacks that the collection would have with more ids."""
    tables = tuple(
        (name, dataclasses.replace(table, num_rows=table.num_rows + added.get(name, 0)))
        for name, table in collection.given.tables
    )
    collection.given = dataclasses.replace(collection.given, tables=tables)
    collection.settings = dataclasses.replace(collection.settings, tables=tables)
    readers = {f.name: f.config for s in collection.stacks for f in s.features}
    features = {name: readers[name] for name in collection.names}
    return collection.settings.stacks(features)


def _compiled(make: Callable[..., jax.Array], spec: P) -> Callable[..., jax.Array]:
    return jit_sharded(
        functools.partial(call_with_auto_axes, make, out_specs=spec), spec, static=()
    )


def _moved(
    before: tuple[Stack, ...],
    after: Stack,
    like: int | None,
    start: jax.Array,
    *arrays: jax.Array,
) -> jax.Array:
    """Moves the rows of an array from former stacks into a new one.

    Args:
      before: the stacks that had its tables.
      after: new stack.
      like: id whose row new ids copy; None leaves their rows as they are in `start`.
      start: array of the new stack, with the rows that were not moved.
      arrays: one array for each former stack.
    """
    pieces = {
        (table.name, table.first_column): (stack, table, array)
        for stack, array in zip(before, arrays, strict=True)
        for table in stack.tables
    }
    found = start
    for table in after.tables:
        stack, known, array = pieces[table.name, table.first_column]
        count, size = known.config.num_rows, table.config.num_rows
        ids = jnp.arange(count, dtype=jnp.int32)
        rows = array[stack.row_of(ids, known.place)]
        found = found.at[after.row_of(ids, table.place)].set(rows, unique_indices=True)
        if like is not None and size > count:
            new = after.row_of(jnp.arange(count, size, dtype=jnp.int32), table.place)
            copied = array[stack.row_of(jnp.int32(like), known.place)]
            found = found.at[new].set(copied, unique_indices=True)
    return found
