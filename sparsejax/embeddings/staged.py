"""Steps of a model, and its answers, whose tables are in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.embeddings.collection import (
    EmbeddingCollection,
    begin_on_host,
    bring_rows,
    collections_of,
    look_up_rows,
    with_numbers,
)
from sparsejax.embeddings.feature_batch import FeatureBatch, Ids
from sparsejax.optimizers.gradients import Path
from sparsejax.optimizers.optimizer import Optimizer


@dataclasses.dataclass(frozen=True, eq=False)
class Staged:
    """Brings rows for all collections of a model, which are given the same ids.

    Attributes:
      collections: by their paths in the model.
      optimizer: that trains the model; None if rows are only read.
    """

    collections: Mapping[Path, EmbeddingCollection]
    optimizer: Optimizer | None

    @classmethod
    def of(cls, model: Any, optimizer: Optimizer | None) -> Staged | None:
        """None if the model has no tables in host memory.

        Raises:
          NotImplementedError: two collections have tables of one width.
        """
        found = collections_of(model)
        stacks = [stack for node in found.values() for stack in node.stacks]
        if all(stack.device_rows is None for stack in stacks):
            return None
        names = [stack.name for stack in stacks]
        if len(set(names)) < len(names):
            raise NotImplementedError(
                "a model with tables in host memory has several collections with tables of "
                f"the same width and dtype ({', '.join(names)}): put them into one"
            )
        return cls(found, optimizer)

    def packed(self, ids: Mapping[str, Ids]) -> FeatureBatch:
        """The ids of a batch, NumPy arrays, for all collections."""
        stacks, keys = {}, {}
        for collection in self.collections.values():
            batch = collection.pack({name: ids[name] for name in collection.names})
            stacks |= batch.stacks
            keys |= batch.keys
        return FeatureBatch(stacks, keys)

    def brought(self, ids: Mapping[str, Ids]) -> FeatureBatch:
        """A batch, which is only read, whose rows are on the devices now."""
        packed = self.packed(ids)
        return self._brought(with_numbers(self.collections, packed, None))

    def _brought(self, batch: FeatureBatch) -> FeatureBatch:
        looked = look_up_rows(self.collections, batch, self.optimizer)
        return bring_rows(self.collections, looked, self.optimizer)

    def numbered(self, batches: Sequence[FeatureBatch]) -> list[FeatureBatch]:
        """Batches of the next steps, which were packed, whose new ids have rows."""
        return [
            with_numbers(self.collections, batch, self.optimizer, ahead=step)
            for step, batch in enumerate(batches)
        ]

    def begin_on_host(self, batches: Sequence[FeatureBatch]) -> None:
        """Begins the new rows of batches of the next steps, which will not come."""
        for step, batch in enumerate(batches):
            begin_on_host(self.collections, batch, self.optimizer, ahead=step)

    def steps(self, batches: Sequence[FeatureBatch], room: int) -> FeatureBatch:
        """Batches with numbers as one, with an axis of `room` steps before the others.

        Steps behind the last one repeat it.

        Raises:
          NoRoomError: their rows do not fit together.
        """
        whole = jax.tree.map(_stacked, *batches)
        found = self._brought(whole)
        count = len(batches)
        number = np.minimum(np.arange(room), count - 1)
        stage = np.full(count, found.stage)
        return jax.tree.map(
            lambda leaf: leaf[number], dataclasses.replace(found, stage=stage)
        )


def _stacked(*leaves: Any) -> Any:
    """Arrays as one; those of the devices stay there."""
    xp = jnp if isinstance(leaves[0], jax.Array) else np
    return xp.stack(leaves)
