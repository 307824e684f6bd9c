"""The vectors of events' columns, which are added to those of their items."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from sparsejax.data.files.stored import checksum, names_as_bytes
from sparsejax.data.sets.click_schema import (
    MISSING,
    DenseColumn,
    LabelColumn,
    vocabulary_columns,
)
from sparsejax.data.sets.event_schema import CONTEXT, USERS
from sparsejax.data.sets.events import Events
from sparsejax.losses import label_loss

# Columns of events by name: `[..., ]` float32 of numbers; int32 ids; `[..., most]` of lists.
EventColumns = Mapping[str, jax.Array]

_init = nnx.initializers.normal(0.02)
# Scores of a label: each token has them.
_MOST_SCORES = 1024


@dataclasses.dataclass(frozen=True)
class Categories:
    """A column of categories.

    Attributes:
      name: name of the column.
      table: name of the column whose vectors it has: itself, or the one that it is like.
      size: number of ids.
      most: the most categories that an event has; None if each event has one.
      checksum: a checksum of the categories and their order; 0 for hashed ones.
    """

    name: str
    table: str
    size: int
    most: int | None
    checksum: int = 0


@dataclasses.dataclass(frozen=True)
class Label:
    """A column of the next event that a model predicts, given the item.

    Attributes:
      name: name of the column.
      column: loss and weight.
      first: the place of its first score.
      scores: number of scores: one for a number; for categories one for each id but that of a
        missing value, the id 0.
      dense: the column of numbers, or None.
    """

    name: str
    column: LabelColumn
    first: int
    scores: int = 1
    dense: DenseColumn | None = None

    def losses(
        self, scores: Float[Array, "events scores"], values: jax.Array
    ) -> Float[Array, "events"]:
        """The loss of each event; 0 where its label is missing.

        Args:
          scores: scores of this label.
          values: `[events]` numbers or ids, or `[events, most]` ids.
        """
        how = self.column.loss, self.column.quantile
        if self.dense is not None:
            there = ~jnp.isnan(values)
            found = label_loss(*how, scores[:, 0], jnp.where(there, values, 0))
            return jnp.where(there, found, 0)
        ids = values.reshape(len(values), -1)
        # The id 0, and -1 in a list, are no category.
        at = jnp.where(ids > MISSING, ids - 1, self.scores)
        rows = jnp.arange(len(ids))[:, None]
        has = jnp.zeros_like(scores).at[rows, at].set(1, mode="drop")
        found = jnp.sum(label_loss(*how, scores, has), axis=1)
        return jnp.where((ids > MISSING).any(axis=1), found, 0)


class RankBy(NamedTuple):
    """A label by whose expected value items are ranked.

    Attributes:
      label: the label.
      place: place of its score among those of all labels.
    """

    label: Label
    place: int

    def values(self, scores: jax.Array) -> jax.Array:
        """The probabilities or numbers that scores stand for."""
        if self.label.column.is_probability:
            return jax.nn.sigmoid(scores)
        number = self.label.dense
        if number is not None and number.log1p:
            return jnp.expm1(jnp.maximum(scores, 0))
        return scores

    def order(self, items: jax.Array, scores: jax.Array) -> jax.Array:
        """Numbers that order items by probability times value; -inf where `items` is.

        Args:
          items: `[batch, count]` scores of the items, which are logarithms of probabilities.
          scores: `[batch, count]` scores of the label.
        """
        if self.label.column.is_probability:
            return items + jax.nn.log_sigmoid(scores)
        best = jnp.max(items, axis=1, keepdims=True)
        # All are -inf where there is no item.
        p = jnp.exp(items - jnp.where(best == -jnp.inf, 0, best))
        found = p * self.values(scores)
        return jnp.where(items == -jnp.inf, -jnp.inf, found)


@dataclasses.dataclass(frozen=True)
class EventSizes:
    """The columns of events that a model reads, and their sizes.

    >>> events = [{"user": "ann", "item": "tea", "action": "view"}]
    >>> data = read_sequences(events, events=EventSchema(kind="action"))
    >>> EventSizes.of(data.events).ids
    (Categories(name='action', table='action', size=3, most=None, checksum=...),)

    Attributes:
      dense: columns of numbers.
      ids: columns of categories.
      context: names of the columns that are known of the event to come.
      users: the columns of users, or None.
      labels: the columns that are predicted of the next event.
    """

    dense: tuple[str, ...]
    ids: tuple[Categories, ...]
    context: tuple[str, ...] = ()
    users: EventSizes | None = None
    labels: tuple[Label, ...] = ()

    @classmethod
    def of_data(cls, data: Any) -> Self | None:
        """The columns of some histories' events and users; None if there are none."""
        events, users = getattr(data, "events", None), getattr(data, "users", None)
        return cls.of_both(events, users)

    @classmethod
    def of_both(cls, events: Events | None, users: Events | None) -> Self | None:
        """The columns of events and of users; None if there are none."""
        if events is None and users is None:
            return None
        own = cls((), ()) if events is None else cls.of(events)
        of_users = None if users is None else cls.of(users)
        return dataclasses.replace(own, users=of_users)

    @classmethod
    def of(cls, events: Events) -> Self:
        """The columns of some events, or of users."""
        owners = vocabulary_columns(events.schema)
        checksums = {
            name: checksum([names_as_bytes(names)])
            for name, names in events.vocabularies.items()
        }
        ids = (
            Categories(
                name,
                owners.get(name, name),
                size,
                None if events[name].ndim == 1 else events[name].shape[1],
                checksums.get(owners.get(name, name), 0),
            )
            for name, size in events.num_ids.items()
        )
        schema, labels, first = events.schema, [], 0
        for name, column in schema.several.items():
            count = events.num_ids[name] - 1 if name in schema.ids else 1
            if count > _MOST_SCORES:
                raise ValueError(
                    f"label {name!r} has {count:,} categories, and a model predicts up to "
                    f"{_MOST_SCORES:,}: give the column a min_count, or leave it out of labels"
                )
            labels.append(Label(name, column, first, count, schema.dense.get(name)))
            first += count
        dense, context = tuple(schema.dense), tuple(schema.context)
        return cls(dense, tuple(ids), context, labels=tuple(labels))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of an event's part of each column."""
        lists = {c.name: () if c.most is None else (c.most,) for c in self.ids}
        return {**dict.fromkeys(self.dense, ()), **lists}

    @property
    def request_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a history's part of each column that is known of the event to come."""
        return {f"{CONTEXT}{name}": self.shapes[name] for name in self.context}

    @property
    def user_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a user's part of each column of users."""
        shapes = {} if self.users is None else self.users.shapes
        return {f"{USERS}{name}": shape for name, shape in shapes.items()}

    @property
    def of_context(self) -> EventSizes:
        """The columns that are known of the event to come, alone."""
        dense = (name for name in self.dense if name in self.context)
        return EventSizes(
            tuple(dense), tuple(c for c in self.ids if c.name in self.context)
        )

    @property
    def without_lists(self) -> EventSizes:
        """The columns, for a comparison with others whose lists have other lengths."""
        users = None if self.users is None else self.users.without_lists
        ids = tuple(dataclasses.replace(each, most=None) for each in self.ids)
        return dataclasses.replace(self, ids=ids, users=users)

    def __str__(self) -> str:
        found = {**dict.fromkeys(self.dense, "a number")}
        found |= {each.name: f"{each.size:,} ids" for each in self.ids}
        context = f" with context={[*self.context]}" if self.context else ""
        users = "" if self.users is None else f" and users with {self.users}"
        labels = f" with labels={[each.name for each in self.labels]}"
        return f"{found}{context}{labels if self.labels else ''}{users}"

    def dtype_of(self, column: str) -> jax.typing.DTypeLike:
        """float32 for a column of numbers, by its name in the model's call, and int32 for ids."""
        dense, name = self.dense, column.removeprefix(CONTEXT)
        if column.startswith(USERS):
            dense, name = (self.users or self).dense, column.removeprefix(USERS)
        return jnp.float32 if name in dense else jnp.int32

    def check(
        self, columns: EventColumns, places: tuple[int, ...], *, request: bool
    ) -> None:
        """Raises ValueError unless these are the columns that a model was made for.

        Args:
          columns: the columns.
          places: shape of the histories. A column has this shape and the shape of one event's value.
          request: whether the context of the event to come is among them.
        """
        wanted = {n: (*places, *each) for n, each in self.shapes.items()}
        of_rows = self.user_shapes | (self.request_shapes if request else {})
        wanted |= {n: (*places[:1], *each) for n, each in of_rows.items()}
        if columns.keys() != wanted.keys():
            raise ValueError(
                f"the model reads the columns of events {[*wanted]}, got {[*columns]}"
            )
        for name, each in wanted.items():
            if (found := columns[name].shape) != each:
                what = "histories, and behind it"
                if name in of_rows:
                    what = "rows, and behind it"
                raise ValueError(
                    f"the column of events {name!r} has the shape {found}, expected "
                    f"{each}: the shape of the {what} the places of a list"
                )

    def in_training(self, columns: EventColumns) -> dict[str, jax.Array]:
        """The columns, with the context of the event behind each place but the last."""
        ahead = {f"{CONTEXT}{name}": columns[name][:, 1:] for name in self.context}
        return {**columns, **ahead}

    def in_request(
        self, columns: EventColumns, last: Int[Array, "batch"]
    ) -> dict[str, jax.Array]:
        """The columns, with the context of the event behind each place.

        Args:
          columns: the columns, whose context is that of the event to come, `[batch, ...]`.
          last: the last place of each history, behind which this event is.
        """
        found = dict(columns)
        for name in self.context:
            own, to_come = found[name], found[f"{CONTEXT}{name}"][:, None]
            is_last = jnp.arange(own.shape[1])[None] == last[:, None]
            is_last = is_last.reshape(is_last.shape + (1,) * (own.ndim - 2))
            ahead = jnp.concatenate([own[:, 1:], own[:, :1]], axis=1)
            found[f"{CONTEXT}{name}"] = jnp.where(is_last, to_come, ahead)
        return found


class EventVectors(nnx.Module):
    """The vector of an event without its item.

    ::

        C_e = sum_c  mean of T_c[id] over the event's categories of column c
            + sum_d  x_d N_d                                over the columns d of numbers

    T_c is a table with a row for each id of a column, and N_d the vector of a column of
    numbers. Both are learned.

    Args:
      sizes: the columns.
      width: numbers of a vector.
      rngs: random stream "params".
    """

    def __init__(self, sizes: EventSizes, width: int, *, rngs: nnx.Rngs):
        self.sizes = sizes
        tables = {each.table: each.size for each in sizes.ids}
        # In a list: names of columns need not be names of attributes.
        self.names = tuple(tables)
        self.tables = nnx.List(
            nnx.Param(_init(rngs.params(), (size, width), jnp.float32))
            for size in tables.values()
        )
        shape = len(sizes.dense), width
        self.numbers: nnx.Param | None = nnx.data(None)
        if sizes.dense:
            self.numbers = nnx.Param(_init(rngs.params(), shape, jnp.float32))

    def __call__(self, columns: EventColumns) -> Float[Array, "*events width"]:
        """The vectors of some events. An id that the column does not have makes NaN."""
        found: list[jax.Array] = []
        for each in self.sizes.ids:
            ids, table = columns[each.name], self.tables[self.names.index(each.table)]
            has = ids >= 0
            if each.most is not None:
                ids = jnp.where(has, ids, 0)
            # Out of range at the end, as negative numbers would count from there.
            ids = jnp.where(ids >= 0, ids, each.size)
            rows = table[...].at[ids].get(mode="fill", fill_value=jnp.nan)
            if each.most is not None:
                rows = jnp.sum(jnp.where(has[..., None], rows, 0), axis=-2)
                count = jnp.sum(has, axis=-1, keepdims=True)
                rows = rows / jnp.maximum(count, 1)
            found.append(rows)
        if self.numbers is not None:
            labels = (each for each in self.sizes.labels if each.dense is not None)
            fills = {each.name: getattr(each.dense, "missing", None) for each in labels}
            numbers = []
            for name in self.sizes.dense:
                x, fill = columns[name], fills.get(name)
                numbers.append(x if fill is None else jnp.where(jnp.isnan(x), fill, x))
            x = jnp.stack(numbers, axis=-1)
            product = jnp.matmul(x, self.numbers[...], precision="highest")
            found.append(product)
        return sum(found[1:], found[0])


class NextEvent(nnx.Module):
    """Scores of the labels of the next event, given its item.

    ::

        z(h, i) = ((h A + a) * (sqrt(width) E_i B + b)) C + c

    Here h is the hidden vector of the place before the event, and E_i the vector of the item, by
    which items are also scored. For one h, each score is a product of E_i with one vector, see
    `query`, so that the scores of many items are as cheap as their ranking.

    Args:
      sizes: the columns of events, with labels.
      width: numbers of a vector.
      rngs: random stream "params".
    """

    def __init__(self, sizes: EventSizes, width: int, *, rngs: nnx.Rngs):
        self.labels = sizes.labels
        count, ones = sum(each.scores for each in sizes.labels), nnx.initializers.ones
        # With a and b of 1, there are also sums of a term of h and a term of the item.
        self.of_history = nnx.Linear(width, width, bias_init=ones, rngs=rngs)
        self.of_item = nnx.Linear(width, width, bias_init=ones, rngs=rngs)
        self.scores = nnx.Linear(width, count, rngs=rngs)

    def __call__(
        self, h: Float[Array, "*events width"], items: Float[Array, "*events width"]
    ) -> Float[Array, "*events scores"]:
        """The scores of all labels.

        Args:
          h: hidden vectors.
          items: vectors of the items.
        """
        of_item = self.of_item(items * items.shape[-1] ** 0.5)
        return self.scores(self.of_history(h) * of_item)

    def query(
        self, h: Float[Array, "batch width"], place: int
    ) -> tuple[Float[Array, "batch width"], Float[Array, "batch"]]:
        """The vector whose product with an item's, plus the number, is one score.

        Args:
          h: hidden vectors.
          place: place of the score among those of all labels.
        """
        assert self.scores.bias is not None and self.of_item.bias is not None
        x = self.of_history(h) * self.scores.kernel[...][None, :, place]
        vector = x @ self.of_item.kernel[...].T * h.shape[-1] ** 0.5
        return vector, x @ self.of_item.bias[...] + self.scores.bias[...][place]

    def loss(
        self,
        h: Float[Array, "events width"],
        items: Float[Array, "events width"],
        is_event: Bool[Array, "events"],
        columns: EventColumns,
    ) -> Float[Array, ""]:
        """The sum over events of the losses of all labels, times their weights.

        Args:
          h: hidden vectors of the places before the events.
          items: vectors of the events' items.
          is_event: whether there is an event.
          columns: columns of the events.
        """
        scores = self(jnp.where(is_event[:, None], h, 0), items)
        total = jnp.zeros((), scores.dtype)
        for each in self.labels:
            own = scores[:, each.first : each.first + each.scores]
            losses = each.losses(own, columns[each.name])
            weight = float(each.column.weight)
            total += weight * jnp.sum(jnp.where(is_event, losses, 0))
        return total
