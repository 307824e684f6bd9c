"""The vectors of events' columns, which are added to those of their items."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sparsejax.data.files.stored import checksum, names_as_bytes
from sparsejax.data.sets.click_schema import vocabulary_columns
from sparsejax.data.sets.event_schema import CONTEXT, USERS
from sparsejax.data.sets.events import Events

# Columns of events by name: `[..., ]` float32 of numbers; int32 ids; `[..., most]` of lists.
EventColumns = Mapping[str, jax.Array]

_init = nnx.initializers.normal(0.02)


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
    """

    dense: tuple[str, ...]
    ids: tuple[Categories, ...]
    context: tuple[str, ...] = ()
    users: EventSizes | None = None

    @classmethod
    def of_data(cls, data: Any) -> Self | None:
        """The columns of some histories' events and users; None if there are none."""
        events, users = getattr(data, "events", None), getattr(data, "users", None)
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
        schema = events.schema
        return cls(tuple(schema.dense), tuple(ids), tuple(schema.context))

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
        return f"{found}{context}{users}"

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
            x = jnp.stack([columns[name] for name in self.sizes.dense], axis=-1)
            product = jnp.matmul(x, self.numbers[...], precision="highest")
            found.append(product)
        return sum(found[1:], found[0])
