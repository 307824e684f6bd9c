"""The exchange of a click model's ids over a mesh, planned from what `fit` trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparsejax.data.scans.scan_clicks import ScannedClicks
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.embeddings.collection import EmbeddingCollection, collections_of
from sparsejax.embeddings.placement import Distinct
from sparsejax.mesh.layout import axis_sizes, mesh_is_set
from sparsejax.sparse import CSR, host_rows

# Parts of batches in which distinct ids are counted.
_PARTS = 4


def exchange_of(
    model: Any,
    clicks: ClickDataset | ScannedClicks,
    wire_dtype: jax.typing.DTypeLike | None,
    exchange_room: float | None,
) -> Callable[[int], Callable[[], int] | None] | None:
    """`Job.exchange`.

    Raises:
      ValueError: an argument of the exchange is given where there is none.
    """
    collections = list(collections_of(model).values())
    divided = mesh_is_set() and any(
        stack.divided for found in collections for stack in found.stacks
    )
    if not divided:
        given = {"wire_dtype": wire_dtype, "exchange_room": exchange_room}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} is of no use here: it is for an EmbeddingCollection whose "
                    "tables are divided over the mesh that is set; leave it out"
                )
        return None

    def begun(batch_size: int) -> Callable[[], int] | None:
        data, devices = axis_sizes()
        examples = max(1, batch_size // (data * devices))
        parts = _some_ids(clicks, examples)
        for found in collections:
            found.expect(
                _distinct(found, parts, examples),
                wire_dtype=wire_dtype,
                exchange_room=exchange_room,
            )
        if devices == 1:
            return None
        return lambda: sum(int(found.overflows[...]) for found in collections)

    return begun


def _some_ids(
    clicks: ClickDataset | ScannedClicks, examples: int
) -> list[dict[str, np.ndarray]]:
    """The ids of each feature, of so many examples, a few times."""
    if isinstance(clicks, ScannedClicks):
        clicks = clicks.read(0, min(clicks.num_rows, _PARTS * examples))
    order = np.random.default_rng(0).permutation(clicks.num_rows)
    parts = [order[i * examples : (i + 1) * examples] for i in range(_PARTS)]

    def ids(values: Any, rows: np.ndarray) -> np.ndarray:
        if isinstance(values, CSR):
            mine = host_rows(values, rows)
            return np.asarray(mine.indices)[: int(mine.indptr[-1])]
        return np.asarray(values)[rows]

    return [
        {name: ids(values, rows) for name, values in clicks.ids.items()}
        for rows in parts
        if len(rows) == examples or rows is parts[0]
    ]


def _distinct(
    collection: EmbeddingCollection, parts: list[dict[str, np.ndarray]], examples: int
) -> Distinct | None:
    """How many rows of each table so many examples ask for; None if ids have other names."""
    features: dict[str, set[str]] = {}
    for stack in collection.stacks:
        for feature in stack.features:
            features.setdefault(feature.table.name, set()).add(feature.name)
    if not set(collection.names) <= parts[0].keys():
        return None

    def rows(names: set[str]) -> float:
        counts = [
            len(np.unique(np.concatenate([part[name].reshape(-1) for name in names])))
            for part in parts
        ]
        return float(np.mean(counts))

    return Distinct(examples, tuple((t, rows(names)) for t, names in features.items()))
