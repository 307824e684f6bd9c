"""The exchange of a click model's ids over a mesh in `fit`.

The capacities of the exchange are chosen from the training data. The ids of a dispatch are sent
before its steps start, so that the steps know whether all ids fit. Otherwise, with several GPUs,
the host would wait for this answer twice in each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.clicks.models import gives_ids_as_they_are
from sparsejax.data.scans.scan_clicks import ScannedClicks
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.embeddings.collection import EmbeddingCollection, collections_of
from sparsejax.embeddings.feature_batch import FeatureBatch
from sparsejax.embeddings.lookup import Sender
from sparsejax.embeddings.placement import Distinct
from sparsejax.embeddings.tables import sender_of
from sparsejax.engine.train import dispatch as dispatching
from sparsejax.engine.train.resident import Dispatch, Resident, Sizes
from sparsejax.mesh.layout import axis_sizes, mesh_is_set, parts_of_axes, replicated
from sparsejax.mesh.xla_options import Programs
from sparsejax.sparse import CSR, host_rows

# At most this many samples of a batch's size are drawn to count distinct ids.
_PARTS = 4


def exchange_of(
    model: Any,
    clicks: ClickDataset | ScannedClicks,
    wire_dtype: jax.typing.DTypeLike | None,
    exchange_room: float | None,
) -> tuple[Callable[[int], Callable[[], int] | None] | None, dict[str, Any]]:
    """Makes `Job.exchange`, and the exchange settings that must be equal when training resumes.

    Raises:
      ValueError: an exchange argument is given although no table is divided over a mesh.
    """
    collections = list(collections_of(model).values())
    divided = mesh_is_set() and any(
        stack.divided for found in collections for stack in found.stacks
    )
    given = {"wire_dtype": wire_dtype, "exchange_room": exchange_room}
    if not divided:
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} is of no use here: it is for an EmbeddingCollection whose "
                    "tables are divided over the mesh that is set; leave it out"
                )
        return None, {}
    exchanges = [found.given.replaced(**given).exchange for found in collections]
    settings = exchanges[0]
    if any(other != settings for other in exchanges):
        settings = {"exchange": exchanges}

    def begun(batch_size: int) -> Callable[[], int] | None:
        data, devices = axis_sizes()
        examples = max(1, batch_size // (data * devices))
        parts = _some_ids(clicks, examples)
        for found in collections:
            found.expect(_distinct(found, parts, examples), **given)
        if devices == 1:
            return None
        return lambda: sum(int(found.overflows[...]) for found in collections)

    return begun, settings


def _some_ids(
    clicks: ClickDataset | ScannedClicks, examples: int
) -> list[dict[str, np.ndarray]]:
    """Draws up to `_PARTS` random samples of `examples` examples.

    Returns:
      A dictionary for each sample: the ids of each feature, by the feature's name.
    """
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
    """Expected number of distinct rows of each table in `examples` examples.

    None if the data lacks a feature of the model.
    """
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


class IdsAhead:
    """The `Staging` of click models whose ids are exchanged between the devices of a mesh.

    If dispatches are launched asynchronously, the ids of the next dispatch are sent before the
    steps of the current one start, also at the end of an epoch. So the host need not wait to
    learn whether all ids fit.
    """

    def __init__(self, senders: tuple[Sender, ...], deterministic: bool):
        self._senders, self._sent = senders, _sent[deterministic]
        self._next: _Asked | None = None

    @classmethod
    def of(cls, model: Any, deterministic: bool) -> IdsAhead | None:
        """Makes the staging; None if no ids are exchanged, or if the model itself needs the ids.

        A user-defined model needs them, as it may change ids before they are looked up.
        """
        if parts_of_axes()[1] == 1:
            return None
        senders = [sender_of(found) for found in collections_of(model).values()]
        names = [stack.name for sender in senders for stack in sender.stacks]
        if (
            not gives_ids_as_they_are(model)
            or not any(any(sender.by_rows) for sender in senders)
            or len(set(names)) < len(names)  # the batch stores ids by stack name
        ):
            return None
        return cls(tuple(senders), deterministic)

    def parts(self, dispatch: Dispatch) -> Iterator[tuple[int, FeatureBatch | None]]:
        asked, self._next = self._next, None
        where = dispatch.rows, dispatch.first
        if asked is None or asked.rows is not where[0] or asked.first != where[1]:
            asked = self._asked(dispatch)
        if dispatch.after is not None and dispatching.launches_ahead():
            following = dispatch.after()
            self._next = None if following is None else self._asked(following)
        # If some ids did not fit, each step exchanges its ids itself. Reading `crowded` blocks
        # until the device has computed it.
        yield dispatch.count, None if asked.crowded else asked.batch

    def _asked(self, dispatch: Dispatch) -> _Asked:
        where = dispatch.rows, dispatch.first
        batch, crowded = self._sent(
            self._senders, dispatch.data, *where, dispatch.count, dispatch.sizes
        )
        crowded.copy_to_host_async()  # the copy arrives before the steps start
        return _Asked(*where, batch, crowded)


class _Asked(NamedTuple):
    """Ids of a dispatch that were exchanged, and whether some of them did not fit."""

    rows: jax.Array
    first: int
    batch: FeatureBatch
    crowded: jax.Array


@functools.partial(Programs, static_argnames=("senders", "sizes"))
def _sent(
    senders: tuple[Sender, ...],
    data: Resident,
    rows: jax.Array,
    first: jax.Array,
    count: jax.Array,
    sizes: Sizes,
) -> tuple[FeatureBatch, jax.Array]:
    """Exchanges ids of steps `first .. first + count - 1`. Axis 0 of the result is the step."""
    numbers = first + jnp.minimum(jnp.arange(sizes.steps), count - 1)
    rows = rows[numbers]
    batches = data.take(rows, sizes.capacities)
    exists = (rows >= 0).reshape(len(rows), -1)

    def of_step(i):
        used = [jax.tree.map(lambda leaf: leaf[i], batch) for batch in batches]
        (_, ids), _ = data.roles.of(used)
        batch, flags = FeatureBatch({}), []
        for sender in senders:
            mine = {name: ids[name] for name in sender.names}
            found, crowded = sender.sent(mine, exists[i])
            batch = FeatureBatch(
                batch.stacks | found.stacks,
                batch.keys | found.keys,
                routes=batch.routes | found.routes,
            )
            flags.append(crowded)
        return batch, jnp.any(jnp.stack(flags))

    batch, crowded = lax.map(of_step, jnp.arange(sizes.steps))
    return batch, replicated(jnp.any(crowded))
