"""Adapts models of histories to the interface `Recommender`: rows in, ranked items out."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from sparsejax.data.files.names import quoted
from sparsejax.data.reading.histories import (
    HISTORIES,
    TIMES,
    EventShapes,
    input_name,
    inputs_of,
)
from sparsejax.data.reading.sources import Inputs, check_columns
from sparsejax.data.sets.click_records import cells_of
from sparsejax.data.sets.click_schema import MISSING, RARE, vocabulary_of
from sparsejax.data.sets.event_schema import CONTEXT, USERS
from sparsejax.data.sets.events import Events
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.engine.rank.recommender import can_deny
from sparsejax.mesh.blocks import SparseRows
from sparsejax.nn.item_content import with_vectors
from sparsejax.sequence.events import EventSizes, RankBy

# `rank_by` ranks this many items with the highest scores again, by their expected value.
CANDIDATES = 1000


@runtime_checkable
class HistoryModel(Protocol):
    """A model of histories that `fit`, `recommend` and `evaluate` can use.

    It is an `nnx.Module`, such as `SASRec`, a `SequenceModel`. Histories are `[batch, length]`
    int32, padded at the end with -1, the oldest item first. If the model has a true attribute
    `uses_times` and the data has times, both methods also get `times=`, `[batch, length]` float32,
    see `Histories.padded_times`. If the data has weights, `loss` also gets `weights=`, `[batch,
    length]` float32: the weight of each position as a target.
    """

    @property
    def config(self) -> Any:
        """Configuration with an attribute `max_length`: the largest number of items that the
        model reads.
        """
        ...

    @property
    def num_items(self) -> int:
        """Number of items that the model reads and scores."""
        ...

    def loss(self, *histories: Any, **times: Any) -> jax.Array:
        """`loss(histories)`: the mean loss of the next item over all positions that have one.

        Histories have up to `max_length + 1` positions.
        """
        ...

    def top_k(self, *histories: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        """`top_k(histories, k, exclude=None)`: ids and scores `[batch, k]` of the items with the
        highest scores. Histories have up to `max_length` positions.
        """
        ...


def check_history_model(model: Any) -> None:
    """Raises TypeError if a model is not a model of histories."""
    lacks = [
        name
        for name in ("loss", "top_k", "num_items", "config")
        if not hasattr(model, name)
    ]
    if not lacks and not hasattr(model.config, "max_length"):
        lacks = ["config.max_length"]
    if lacks:
        raise TypeError(
            "a SequenceDataset needs a model of histories, such as sparsejax.sequence.SASRec; "
            f"{type(model).__name__} has no {' and no '.join(lacks)} (other models take "
            "data.to_sparse())"
        )


def has_times(model: Any, data: Any) -> bool:
    """Whether the data's times are passed to the model."""
    return data.times is not None and bool(getattr(model, "uses_times", False))


def event_shapes(model: Any) -> EventShapes | None:
    """The event columns that a model reads, with the shape of a single event's value in each.

    They include columns known for the next event, see `CONTEXT`, and user columns, see `USERS`.
    The result is None if the model reads no columns.
    """
    if (events := getattr(model, "events", None)) is None:
        return None
    sizes = events.sizes
    return sizes.shapes | sizes.request_shapes | sizes.user_shapes


def check_events(model: Any, data: Any, what: str = "inputs") -> None:
    """Raises ValueError if the event columns of the data differ from those that the model reads.

    Args:
      model: a model of histories.
      data: histories.
      what: name of the data, for messages.
    """
    wanted = getattr(getattr(model, "events", None), "sizes", None)
    given = EventSizes.of_data(data)
    if wanted is None and given is None:
        return
    if wanted is None:
        raise ValueError(
            f"{what} has the columns of events {given}, which the model does not "
            "read: make the model with build(config, data), or leave the columns out: "
            "data.without_events().with_users(None)"
        )
    given = EventSizes((), ()) if given is None else given
    if wanted.shapes and not given.shapes:
        raise ValueError(
            f"the model reads the columns of events {wanted}, but {what} has "
            "none; read the data with events=train.events"
        )
    if (given.users is None) != (wanted.users is None):
        has, reads = (each.users or "none" for each in (given, wanted))
        remedy = "give" if given.users is None else "leave out"
        raise ValueError(
            f"{what} has the columns of users {has}, but the model reads {reads}; {remedy} "
            "user_features=..., in Python see data.with_users"
        )
    # Columns may differ in the length of their lists.
    if given.without_lists != wanted.without_lists:
        raise ValueError(
            f"{what} has the columns of events {given}, but the model reads {wanted}, or their "
            "categories have other ids; read the data with events=train.events, and users with "
            "read_user_features(..., train.users)"
        )


class NextItems(nnx.Module):
    """A model of histories as a `Recommender`. Its inputs are a dict of arrays.

    It is used in compiled programs, in which it disables dropout.

    Args:
      model: model of histories.
      times: whether times are passed to the model.
      rank_by: label of the next event by which items are ranked. With None they are ranked by
          scores.
    """

    def __init__(self, model: Any, *, times: bool, rank_by: RankBy | None = None):
        self.model, self.times, self.rank_by = model, times, rank_by

    @property
    def trained(self) -> Any:
        """The module that the optimizer trains."""
        return self.model

    @property
    def num_features(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.model.config.max_length,)
        rows = {HISTORIES: jax.ShapeDtypeStruct(shape, jnp.int32)}
        if self.times:
            rows[TIMES] = jax.ShapeDtypeStruct(shape, jnp.float32)
        shapes = event_shapes(self.model) or {}
        for name, each in shapes.items():
            dtype = self.model.events.sizes.dtype_of(name)
            places = () if name.startswith((CONTEXT, USERS)) else shape
            rows[input_name(name)] = jax.ShapeDtypeStruct((*places, *each), dtype)
        return rows

    @property
    def num_items(self) -> int:
        return self.model.num_items

    @property
    def output(self) -> Any:
        """The output layer of the wrapped `SequenceModel`."""
        return self.model.output

    def encode(self, x: Any, *, deterministic: bool | None = None) -> jax.Array:
        """Vector of each history, before the product with item vectors, from the
        `SequenceModel`.
        """
        self.model.eval()
        return with_vectors(self.model).last(x[HISTORIES], **self._beside(x))

    def queries(self, x: Any) -> jax.Array:
        """Vectors whose products with item vectors `top_k` ranks, from the `SequenceModel`."""
        self.model.eval()
        return self.model.queries(x[HISTORIES], **self._beside(x))

    @property
    def denies(self) -> bool:
        """Whether the model's `top_k` accepts a mask of items that are excluded in all rows."""
        return can_deny(self.model)

    def top_k(self, x: Any, k: int, *, exclude: SparseRows | None = None, **options):
        self.model.eval()
        if self.rank_by is not None:
            return self._top_k_by(self.rank_by, x, k, exclude=exclude, **options)
        options |= self._beside(x)
        return self.model.top_k(x[HISTORIES], k, exclude=exclude, **options)

    def _top_k_by(self, by: RankBy, x: Any, k: int, **options: Any):
        """Ranks the `CANDIDATES` items with highest scores by a label, and returns the best `k`.

        Returns:
          Ids, scores and label values, each `[batch, k]`.
        """
        model = with_vectors(self.model)
        h = model.last(x[HISTORIES], **self._beside(x))
        count = min(model.num_items, max(k, CANDIDATES))
        ids, scores = model.output.top_k(h, count, **options)
        of_label = _scores_by(model, by, h, ids)
        values = jnp.where(ids < 0, 0, by.values(of_label))
        order = by.order(scores, of_label)
        # NaN ranks first, as in `top_k`, so that the caller notices it.
        _, at = jax.lax.top_k(order, min(k, count))
        found = [jnp.take_along_axis(a, at, axis=1) for a in (ids, scores, values)]
        room = ((0, 0), (0, k - min(k, count)))
        fills = zip(found, (-1, -jnp.inf, 0), strict=True)
        return tuple(jnp.pad(a, room, constant_values=fill) for a, fill in fills)

    def item_scores(self, x: Any, ids: Any):
        self.model.eval()
        if self.rank_by is None:
            return self.model.item_scores(x[HISTORIES], ids, **self._beside(x))
        model = with_vectors(self.model)
        h = model.last(x[HISTORIES], **self._beside(x))
        scores = model.output.item_scores(h, ids)
        return self.rank_by.order(scores, _scores_by(model, self.rank_by, h, ids))

    def label_scores(self, x: Any, ids: jax.Array) -> jax.Array:
        """`[batch, scores]` scores of all labels, if the next events have the items `[batch]`."""
        self.model.eval()
        model = with_vectors(self.model)
        h = model.last(x[HISTORIES], **self._beside(x))
        return model.next_event(h, model.output.rows(ids))

    def _beside(self, x: Any) -> dict[str, Any]:
        """Keyword arguments of the model other than the histories, such as times."""
        given = {"times": x[TIMES]} if self.times else {}
        if (shapes := event_shapes(self.model)) is not None:
            given["events"] = {name: x[input_name(name)] for name in shapes}
        return given


def _scores_by(model: Any, by: RankBy, h: jax.Array, ids: jax.Array) -> jax.Array:
    """`[batch, count]` scores of a label for events with the given items; an id may be -1."""
    vector, number = model.next_event.query(h, by.place)
    rows = model.output.rows(ids.reshape(-1)).reshape(*ids.shape, -1)
    product = jnp.einsum("bw,bcw->bc", vector, rows, precision="highest")
    return product + number[:, None]


def rank_by_of(model: Any, events: Events | None, name: str) -> RankBy:
    """Finds a label by name: a numeric column, a category, or `COLUMN=CATEGORY`.

    Raises:
      ValueError: there is no label with this name, or there are several.
    """
    head = getattr(model, "next_event", None)
    if head is None or events is None:
        raise ValueError(
            f"rank_by={name!r} needs a model of histories whose events have labels: "
            "EventSchema(labels=...)"
        )
    found, known = [], []
    for label in head.labels:
        if label.dense is not None:
            known.append(label.name)
            if name == label.name:
                found.append(RankBy(label, label.first))
            continue
        names = vocabulary_of(events.schema, label.name, events.vocabularies)
        categories = [] if names is None else names.tolist()
        known += categories
        column, _, category = name.partition("=")
        if column != label.name or not category:
            category = name if name in categories else ""
        if not category:
            continue
        cells = cells_of({label.name: [category]}, [label.name])
        place = int(events.read(cells, [label.name])[label.name].reshape(-1)[0])
        if place != MISSING and (names is None or place != RARE):
            found.append(RankBy(label, label.first + place - 1))
    if len(found) != 1:
        how = "is not a label" if not found else "is a label of several columns"
        raise ValueError(
            f"rank_by={name!r} {how} of the next event; these are {quoted(known)}, and "
            "COLUMN=CATEGORY names a category of one column"
        )
    return found[0]


def shown_of(model: Any, sequences: SequenceDataset) -> Inputs:
    """The last entries of each row, as many as the model reads.

    Raises:
      TypeError: the model is not a model of histories.
      ValueError: the data differs from the model in its number of items or event columns, or lacks
          the context of the next event.
    """
    check_history_model(model)
    check_columns("inputs", sequences.num_features, model.num_items, "items")
    check_events(model, sequences)
    times, events = has_times(model, sequences), event_shapes(model)
    if events and sequences.context is None and model.events.sizes.context:
        raise ValueError(
            "the model reads what is known of the event to come: "
            f"{[*model.events.sizes.context]}; give context=..., or data.with_context(...)"
        )
    return inputs_of(sequences, model.config.max_length, times=times, events=events)
