"""The protocol of click models."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class ClickModel(Protocol):
    """A model that predicts clicks: an `nnx.Module`, called as `model(dense, ids)`.

    `dense` is `[batch, columns]` float32, and `ids` a dict with the ids of each feature: int32
    `[batch]`, or a `CSR` of lists, or `WideIds` of 64 bits. The model returns logits `[batch]`, or
    `[batch, labels]` with several labels. `DLRM` and the other click models are such modules, and
    `EmbeddingCollection` takes such ids. If tables are in host memory, and in `fit` with dynamic
    tables, `ids` is a `FeatureBatch`, which has row numbers in place of ids: the model can only
    pass it to its collections.

    If the model has an attribute `num_dense`, the number of dense columns, or `num_ids`, the
    number of ids by feature, data is checked against these first.
    """

    def __call__(self, dense: Any, ids: Any) -> jax.Array: ...
