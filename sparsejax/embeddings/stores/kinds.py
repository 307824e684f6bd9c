"""The kinds of stores, by the names that configurations of tables give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from sparsejax.embeddings.placement import Stack
from sparsejax.embeddings.stores.dynamic import DynamicStore
from sparsejax.embeddings.stores.host import DynamicHostStore, HostStore
from sparsejax.embeddings.stores.static import StaticStore
from sparsejax.embeddings.stores.store import Owner, Store

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


def stores_of(
    owner: Owner, stacks: Sequence[Stack], within: Sequence[Any] = ()
) -> list[Store]:
    """The stores of some stacks of a collection, whose path in the model is `within`."""
    return [STORES[stack.store](owner, stack, within) for stack in stacks]
