"""Steps of a model, and its answers, whose tables are in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sparsejax.embeddings.collection import (
    EmbeddingCollection,
    bring_rows,
    collections_of,
    look_up_rows,
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
        if any(stack.dynamic for stack in stacks):
            raise NotImplementedError(
                "this model has tables in host memory and dynamic ones: such models are "
                "trained and read in loops of your own, by `embeddings.staged`"
            )
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
        """A batch whose rows are on the devices now."""
        return self._brought(self.packed(ids))

    def _brought(self, batch: FeatureBatch) -> FeatureBatch:
        looked = look_up_rows(self.collections, batch, self.optimizer)
        return bring_rows(self.collections, looked, self.optimizer)

    def steps(self, batches: Sequence[FeatureBatch], room: int) -> FeatureBatch:
        """Batches, which were packed, as one with an axis of `room` steps before the others.

        Steps behind the last one repeat it.

        Raises:
          NoRoomError: their rows do not fit together.
        """
        whole = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        found = self._brought(whole)
        count = len(batches)
        number = np.minimum(np.arange(room), count - 1)
        stage = np.full(count, found.stage)
        return jax.tree.map(
            lambda leaf: leaf[number], dataclasses.replace(found, stage=stage)
        )
