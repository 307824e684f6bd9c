"""Vectors of event columns, which are added to item vectors."""

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

# Event columns by name: float32 numbers `[...]`, int32 ids `[...]`, or int32 lists `[..., most]`.
EventColumns = Mapping[str, jax.Array]

_init = nnx.initializers.normal(0.02)
# Largest number of scores of a label. All of them are computed for each token.
_MOST_SCORES = 1024


@dataclasses.dataclass(frozen=True)
class Categories:
    """A column of categories.

    Attributes:
      name: name of the column.
      table: name of the column whose vectors it uses: its own, or that of its attribute `like`.
      size: number of ids.
      most: largest number of categories in an event; None if each event has one.
      checksum: checksum of the categories and their order; 0 for hashed ones.
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
      column: loss and weight of the label.
      first: index of its first score.
      scores: number of scores: one for a number; for categories one for each id except 0, the id
          of a missing value.
      dense: index of the column of numbers, or None.
    """

    name: str
    column: LabelColumn
    first: int
    scores: int = 1
    dense: DenseColumn | None = None

    def losses(
        self, scores: Float[Array, "events scores"], values: jax.Array
    ) -> Float[Array, "events"]:
        """The loss of each event; 0 if its label is missing.

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
        # Id 0 means no category, and so does -1 in a list.
        at = jnp.where(ids > MISSING, ids - 1, self.scores)
        rows = jnp.arange(len(ids))[:, None]
        has = jnp.zeros_like(scores).at[rows, at].set(1, mode="drop")
        found = jnp.sum(label_loss(*how, scores, has), axis=1)
        return jnp.where((ids > MISSING).any(axis=1), found, 0)


class RankBy(NamedTuple):
    """A label by whose expected value items are ranked.

    Attributes:
      label: the label.
      place: index of its score among those of all labels.
    """

    label: Label
    place: int

    def values(self, scores: jax.Array) -> jax.Array:
        """Converts scores to probabilities or numbers."""
        if self.label.column.is_probability:
            return jax.nn.sigmoid(scores)
        number = self.label.dense
        if number is not None and number.log1p:
            return jnp.expm1(jnp.maximum(scores, 0))
        return scores

    def order(self, items: jax.Array, scores: jax.Array) -> jax.Array:
        """Values by which items are ordered: probability times label value; -inf where `items` is.

        Args:
          items: `[batch, count]` item scores, which are log probabilities up to a constant.
          scores: `[batch, count]` scores of the label.
        """
        if self.label.column.is_probability:
            return items + jax.nn.log_sigmoid(scores)
        best = jnp.max(items, axis=1, keepdims=True)
        # For a row without items, all scores are -inf.
        p = jnp.exp(items - jnp.where(best == -jnp.inf, 0, best))
        return jnp.where(items == -jnp.inf, -jnp.inf, p * self.values(scores))


@dataclasses.dataclass(frozen=True)
class EventSizes:
    """The event columns that a model reads, and their sizes.

    >>> events = [{"user": "ann", "item": "tea", "action": "view"}]
    >>> data = read_sequences(events, events=EventSchema(kind="action"))
    >>> EventSizes.of(data.events).ids
    (Categories(name='action', table='action', size=3, most=None, checksum=...),)

    Attributes:
      dense: columns of numbers.
      ids: columns of categories.
      context: names of the columns that are known for the next event.
      users: the user columns, or None.
      labels: the columns that are predicted for the next event.
    """

    dense: tuple[str, ...]
    ids: tuple[Categories, ...]
    context: tuple[str, ...] = ()
    users: EventSizes | None = None
    labels: tuple[Label, ...] = ()

    @classmethod
    def of_data(cls, data: Any) -> Self | None:
        """The event and user columns of histories; None if there are none."""
        events, users = getattr(data, "events", None), getattr(data, "users", None)
        return cls.of_both(events, users)

    @classmethod
    def of_both(cls, events: Events | None, users: Events | None) -> Self | None:
        """Combines event columns and user columns; None if there are none."""
        if events is None and users is None:
            return None
        own = cls((), ()) if events is None else cls.of(events)
        of_users = None if users is None else cls.of(users)
        return dataclasses.replace(own, users=of_users)

    @classmethod
    def of(cls, events: Events) -> Self:
        """The names and sizes of the columns in a data set's events or users."""
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
        """The shape of a single event's value in each column."""
        lists = {c.name: () if c.most is None else (c.most,) for c in self.ids}
        return {**dict.fromkeys(self.dense, ()), **lists}

    @property
    def request_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a single history's value in each column that is known for the next
        event.
        """
        return {f"{CONTEXT}{name}": self.shapes[name] for name in self.context}

    @property
    def user_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a single user's value in each user column."""
        shapes = {} if self.users is None else self.users.shapes
        return {f"{USERS}{name}": shape for name, shape in shapes.items()}

    @property
    def of_context(self) -> EventSizes:
        """Only the columns that are known for the next event."""
        dense = (name for name in self.dense if name in self.context)
        return EventSizes(
            tuple(dense), tuple(c for c in self.ids if c.name in self.context)
        )

    @property
    def without_lists(self) -> EventSizes:
        """A copy without the lengths of lists, to compare columns that differ only in these."""
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
        """The dtype of a column, by its name in a call of the model: float32 for numbers, int32
        for ids.
        """
        dense, name = self.dense, column.removeprefix(CONTEXT)
        if column.startswith(USERS):
            dense, name = (self.users or self).dense, column.removeprefix(USERS)
        return jnp.float32 if name in dense else jnp.int32

    def check(
        self, columns: EventColumns, places: tuple[int, ...], *, request: bool
    ) -> None:
        """Raises ValueError unless the columns match those that the model was made for.

        Args:
          columns: arrays by column name.
          places: shape of the histories. A column has this shape followed by the shape of an
              event's value.
          request: whether the columns include the context of the next event.
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
        """Adds to each position but the last the context of the event after it."""
        ahead = {f"{CONTEXT}{name}": columns[name][:, 1:] for name in self.context}
        return {**columns, **ahead}

    def in_request(
        self, columns: EventColumns, last: Int[Array, "batch"]
    ) -> dict[str, jax.Array]:
        """Adds to each position the context of the event after it.

        Args:
          columns: columns, whose context `[batch, ...]` is that of the next event.
          last: last position of each history; the next event comes after it.
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
    """Computes vectors of events from event columns, to be added to item vectors.

    ::

        C_e = sum_c  mean of T_c[id] over the event's categories of column c
            + sum_d  x_d N_d                                over the columns d of numbers

    T_c is a table with a row for each id of column c, and N_d is the vector of a column of
    numbers. Both are trained.

    Args:
      sizes: the columns and their sizes.
      width: width of the vectors.
      rngs: random stream "params".
    """

    def __init__(self, sizes: EventSizes, width: int, *, rngs: nnx.Rngs):
        self.sizes = sizes
        tables = {each.table: each.size for each in sizes.ids}
        # The tables are in a list, because column names may not be valid attribute names.
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
        """The vectors of events. An id outside its table gives NaN."""
        found: list[jax.Array] = []
        for each in self.sizes.ids:
            ids, table = columns[each.name], self.tables[self.names.index(each.table)]
            has = ids >= 0
            if each.most is not None:
                ids = jnp.where(has, ids, 0)
            # Negative ids become out of range, because a negative index would count from the end.
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

    Here h is the hidden vector of the position before the event, and E_i is the item vector, which
    is also used to score items. For one h, each score is a product of E_i with one vector, see
    `query`, so scores of many items cost as little as ranking them.

    Args:
      sizes: the event columns, including labels.
      width: width of the vectors.
      rngs: random stream "params".
    """

    def __init__(self, sizes: EventSizes, width: int, *, rngs: nnx.Rngs):
        self.labels = sizes.labels
        count, ones = sum(each.scores for each in sizes.labels), nnx.initializers.ones
        # Initial values of a and b are 1, so that a score also has a term of h alone and a term of
        # the item alone.
        self.of_history = nnx.Linear(width, width, bias_init=ones, rngs=rngs)
        self.of_item = nnx.Linear(width, width, bias_init=ones, rngs=rngs)
        self.scores = nnx.Linear(width, count, rngs=rngs)

    def __call__(
        self, h: Float[Array, "*events width"], items: Float[Array, "*events width"]
    ) -> Float[Array, "*events scores"]:
        """The scores of all labels.

        Args:
          h: hidden vectors.
          items: item vectors.
        """
        of_item = self.of_item(items * items.shape[-1] ** 0.5)
        return self.scores(self.of_history(h) * of_item)

    def query(
        self, h: Float[Array, "batch width"], place: int
    ) -> tuple[Float[Array, "batch width"], Float[Array, "batch"]]:
        """The vector and the number for which `vector . E_i + number` is one score.

        Args:
          h: hidden vectors.
          place: index of the score among those of all labels.
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
        """The sum over events of the weighted losses of all labels.

        Args:
          h: hidden vectors of the positions before the events.
          items: vectors of the events' items.
          is_event: mask, False for padding.
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
