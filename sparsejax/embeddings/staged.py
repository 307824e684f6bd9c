"""Copies rows of tables in host memory to the devices before a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.embeddings import feature_batch
from sparsejax.embeddings.feature_batch import FeatureBatch, Ids
from sparsejax.embeddings.host_rows import Coming, HostRows, set_number
from sparsejax.embeddings.stores.host import HostedStore
from sparsejax.embeddings.stores.store import Store
from sparsejax.embeddings.tables import Tables
from sparsejax.mesh import interrupts
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR


class LookedUp(NamedTuple):
    """A batch whose rows were looked up and marked as used.

    Attributes:
      batch: batch of some collections. Its arrays may have further leading axes.
      rows: looked-up rows of the batch in each stack in host memory, by the stack's name.
    """

    batch: FeatureBatch
    rows: dict[str, Coming]


class Staged:
    """Copies rows for all collections of a model, which share the ids of a batch.

    Args:
      stores: stores of all stacks of these collections; some have rows in host memory.
      optimizer: the optimizer that trains the model; None if rows are only read.
    """

    def __init__(self, stores: Iterable[Store], optimizer: Optimizer | None):
        self._all = list(stores)
        self._stores = [store for store in self._all if isinstance(store, HostedStore)]
        self.optimizer = optimizer
        # If tables can grow, earlier steps must have started before new ids get rows.
        self._waits = any(store.grows for store in self._stores)

    @classmethod
    def of(cls, model: Any, optimizer: Optimizer | None) -> Staged | None:
        """Makes it for all tables of a model; None if the model has no tables in host memory.

        Raises:
          NotImplementedError: two collections have tables of equal width.
        """
        stores = [
            store
            for path, node in nnx.iter_graph(model)
            if isinstance(node, Tables)
            for store in node.stores(tuple(path))
        ]
        if not any(store.stages for store in stores):
            return None
        names = [store.stack.name for store in stores]
        if len(set(names)) < len(names):
            raise NotImplementedError(
                "a model with tables in host memory has several collections with tables of "
                f"the same width and dtype ({', '.join(names)}): put them into one"
            )
        return cls(stores, optimizer)

    def packed(self, ids: Mapping[str, Ids]) -> FeatureBatch:
        """Packs the ids of a batch, NumPy arrays, for all collections."""
        stacks, keys = {}, {}
        for owner in {id(store.owner): store.owner for store in self._all}.values():
            mine = {name: ids[name] for name in owner.names}
            batch = feature_batch.pack(owner.stacks, mine)
            stacks |= batch.stacks
            keys |= batch.keys
        return FeatureBatch(stacks, keys)

    def brought(self, ids: Mapping[str, Ids]) -> FeatureBatch:
        """Copies the rows of a batch, which are only read, to the devices."""
        return self._bring(self._look_up(self._numbered(self.packed(ids))))

    def numbered(self, batches: Sequence[FeatureBatch]) -> list[FeatureBatch]:
        """Assigns rows to new ids of packed batches, and replaces ids by row numbers."""
        return [self._numbered(batch, step) for step, batch in enumerate(batches)]

    def begin_on_host(self, batches: Sequence[FeatureBatch]) -> None:
        """Initializes new rows of batches on the host, if their steps will not run."""
        if self.optimizer is not None:
            for step, batch in enumerate(batches):
                for store in self._stores:
                    store.begun_on_host(batch, self.optimizer, step)

    def steps(self, batches: Sequence[FeatureBatch], room: int) -> FeatureBatch:
        """Combines numbered batches to one, with a first axis of `room` steps.

        The last step is repeated as padding.

        Raises:
          NoRoomError: their rows do not fit on the devices together.
        """
        whole = jax.tree.map(_stacked, *batches)
        found = self._bring(self._look_up(whole))
        count = len(batches)
        number = np.minimum(np.arange(room), count - 1)
        stage = np.full(count, found.stage)
        return jax.tree.map(
            lambda leaf: leaf[number], dataclasses.replace(found, stage=stage)
        )

    def each[Batch](
        self,
        batches: Iterable[Batch],
        packed: Callable[[Any], FeatureBatch],
        names: frozenset[str],
    ) -> Iterator[Batch]:
        """Yields batches after their rows were copied; see `EmbeddingCollection.staged`.

        Args:
          batches: trees, each of which contains ids.
          packed: function that packs ids.
          names: names of the features.
        """

        is_ids = functools.partial(_is_ids, names)

        def look_up(batch: Batch) -> Any:
            _check_once(names, batch)

            def look(node):
                if not is_ids(node):
                    return node
                found = packed(node)
                if found.stage is not None:
                    raise ValueError(
                        "the rows of this batch are on the devices already"
                    )
                return LookedUp(found, {}) if self._waits else self._look_up(found)

            return jax.tree.map(look, batch, is_leaf=is_ids)

        def bring(node: Any) -> Any:
            if not isinstance(node, LookedUp):
                return node
            return self._begun(node.batch) if self._waits else self._bring(node)

        coming = map(look_up, batches)
        looked = next(coming, None)
        while looked is not None:
            staged = jax.tree.map(
                bring, looked, is_leaf=lambda node: isinstance(node, LookedUp)
            )
            looked, error = None, None
            # The look-up starts before the step of this batch, so that the devices need not wait
            # for it.
            try:
                looked = next(coming, None)
            except Exception as raised:  # noqa: BLE001 - raised after this batch
                error = raised
            yield staged
            if error is not None:
                raise error

    def _begun(self, batch: FeatureBatch) -> FeatureBatch:
        """Copies the rows of a batch, and initializes new ones."""
        # An interrupt here could leave an assigned row uninitialized.
        with interrupts.uninterrupted():
            batch = self._numbered(batch)
            try:
                found = self._bring(self._look_up(batch))
                if self.optimizer is None:
                    return found
                for store in self._stores:
                    store.begun(found, self.optimizer)
                return dataclasses.replace(found, new={})
            except Exception:
                self.begin_on_host([batch])
                raise

    def _numbered(self, batch: FeatureBatch, step: int = 0) -> FeatureBatch:
        for store in self._stores:
            batch = store.numbered(batch, self.optimizer, step)
        return batch

    def _look_up(self, batch: FeatureBatch) -> LookedUp:
        """Starts the look-up for `_bring`, without waiting for the devices."""
        training = self.optimizer is not None
        rows = {
            name: host.look(_columns_of(batch.stacks[name]), training=training)
            for name, host in self._hosts().items()
            if name in batch.stacks  # no feature reads the other stacks
        }
        return LookedUp(batch, rows)

    def _bring(self, looked: LookedUp) -> FeatureBatch:
        """Copies the rows of a batch from host memory.

        Raises:
          NoRoomError: there are too many rows. Some may have been copied.
        """
        hosts = self._hosts()
        stacks, rows, moved = dict(looked.batch.stacks), {}, False
        try:
            for name, mine in looked.rows.items():
                x, host = stacks[name], hosts[name]
                slots, columns, left = host.bring(mine)
                moved |= left
                shape = np.shape(x.indices)
                width = host.stack.kernel_rows
                stacks[name] = x.with_indices(slots.reshape(shape), width)
                rows[name] = columns.reshape(shape)
        finally:  # after an error, rows of other stacks may already have left the devices
            number = _numbered_anew(hosts, moved=moved)
        return dataclasses.replace(
            looked.batch, stacks=stacks, stage=np.asarray(number, np.int32), rows=rows
        )

    def _hosts(self) -> dict[str, HostRows]:
        """The rows in host memory of each stack, with their optimizer state."""
        found = {}
        for store in self._stores:
            host = found[store.stack.name] = store.attached(self.optimizer)
            # The value of `stage` may come from a checkpoint, so it is read now.
            if host.number is None:
                host.number = store.owner.stage
                host.last_number = int(store.owner.stage[...])
        return found


def _is_ids(names: frozenset[str], node: Any) -> bool:
    """Whether a node of a tree is the ids of a batch."""
    of_names = isinstance(node, Mapping) and node.keys() == names
    return of_names or isinstance(node, FeatureBatch)


def _check_once(names: frozenset[str], batch: Any) -> None:
    is_ids = functools.partial(_is_ids, names)
    found = sum(map(is_ids, jax.tree.leaves(batch, is_leaf=is_ids)))
    if found != 1:
        raise ValueError(
            f"a batch has ids of the features {sorted(names)} {found} times, expected "
            "once: as a dictionary with an entry for each feature, or as `pack` makes them"
        )


def _numbered_anew(hosts: Mapping[str, HostRows], *, moved: bool) -> int:
    """The version number of the tables on the devices; a new one if rows were removed."""
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
    return number


def _columns_of(x: CSR) -> jax.Array | np.ndarray:
    """The columns of a matrix as an array; for dynamic tables they stay on the devices."""
    return x.indices if isinstance(x.indices, jax.Array) else np.asarray(x.indices)


def _stacked(*leaves: Any) -> Any:
    """Stacks arrays; device arrays are stacked on the devices."""
    xp = jnp if isinstance(leaves[0], jax.Array) else np
    return xp.stack(leaves)
