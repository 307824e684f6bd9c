"""Dynamic tables in `fit` for click models: assigns rows to new ids and counts assignments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Bool

from sparsejax.callers import warn_caller
from sparsejax.embeddings.collection import collections_of
from sparsejax.embeddings.feature_batch import FeatureBatch, without_examples
from sparsejax.mesh import processes
from sparsejax.optimizers.optimizer import Optimizer

# If more than this share of the ids gets no row, `fit` warns.
_MANY_REFUSED = 0.001
_NUMBERS = "found", "waiting", "refused", "inserted", "evicted"
_RATES = "found", "inserted", "refused", "evicted"


def assigned(
    model: Any,
    optimizer: Optimizer,
    ids: Mapping[str, Any] | FeatureBatch,
    exists: Bool[Array, "batch"],
) -> FeatureBatch:
    """Assigns rows to new ids. Returns the ids of the batch for all collections of a model.

    A `FeatureBatch` is already packed and has no ids of padding examples. It is given if some
    tables are in host memory, or if the ids were exchanged over the mesh.

    Args:
      model: model whose dynamic tables are read by the ids.
      optimizer: the optimizer that trains it.
      ids: ids of each feature, one for each example, or a `FeatureBatch`.
      exists: `[batch]` bool: which examples exist. Ids of the others get no row.

    Raises:
      ValueError: two collections have stacks of one name.
    """
    if isinstance(ids, FeatureBatch):
        stacks, routes = dict(ids.stacks), dict(ids.routes)
        for path, node in collections_of(model).items():
            if node.indexes:
                found = node.assign_rows(ids, optimizer, within=path)
                for all_of, mine in (stacks, found.stacks), (routes, found.routes):
                    names = all_of.keys() & node.indexes.keys()
                    all_of |= {name: mine[name] for name in names}
        return dataclasses.replace(
            ids, stacks=stacks, routes=routes, new={}, assigned=True
        )
    stacks, keys = {}, {}
    for path, node in collections_of(model).items():
        batch = node.pack({name: ids[name] for name in node.names})
        if node.indexes:
            batch = without_examples(batch, exists)
            batch = node.assign_rows(batch, optimizer, within=path)
        if both := stacks.keys() & batch.stacks.keys():
            raise ValueError(
                f"two collections of the model have a stack {min(both)!r}; beside dynamic "
                "tables, give their tables different widths"
            )
        stacks |= batch.stacks
        keys |= batch.keys
    return FeatureBatch(stacks, keys, assigned=True)


def rates_of(model: Any) -> Callable[[], Callable[[], dict[str, float]]] | None:
    """Makes `Job.rates` for dynamic tables: it counts new, waiting and refused ids of an epoch."""
    collections = [node for node in collections_of(model).values() if node.indexes]
    if not collections:
        return None
    warned = False

    def stats() -> dict[str, int]:
        """Statistics, summed over all dynamic tables."""
        tables = [table for node in collections for table in node.stats().values()]
        return {name: sum(getattr(t, name) for t in tables) for name in _NUMBERS}

    def begun() -> Callable[[], dict[str, float]]:
        before = stats()

        def ended() -> dict[str, float]:
            nonlocal warned
            after = stats()
            more = {name: after[name] - before[name] for name in _NUMBERS}
            ids = sum(more[name] for name in _NUMBERS if name != "evicted")
            if more["refused"] > _MANY_REFUSED * ids and not warned:
                warned = True
                if processes.is_first():
                    warn_caller(
                        f"dynamic tables have no room for {more['refused']:,} of {ids:,} "
                        "ids, which are not learned: make the tables larger, or let them "
                        'evict, evict="lru"'
                    )
            return {name: more[name] / max(ids, 1) for name in _RATES}

        return ended

    return begun
