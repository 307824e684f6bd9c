"""The vectors of events' columns, which are added to those of their items."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.data.files.stored import checksum, names_as_bytes
from sparsejax.data.sets.click_schema import vocabulary_columns
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
    """

    dense: tuple[str, ...]
    ids: tuple[Categories, ...]

    @classmethod
    def of(cls, events: Events) -> Self:
        """The columns of some events."""
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
        return cls(tuple(events.schema.dense), tuple(ids))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of an event's part of each column."""
        lists = {c.name: () if c.most is None else (c.most,) for c in self.ids}
        return {**dict.fromkeys(self.dense, ()), **lists}


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
        """The vectors of some events. An id that the column does not have makes NaN.

        Raises:
          ValueError: these are other columns.
        """
        self.check(columns)
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

    def check(
        self, columns: EventColumns, places: tuple[int, ...] | None = None
    ) -> None:
        """Raises ValueError unless these are the columns that the model was made for.

        Args:
          columns: the columns.
          places: shape of the histories, to which an event's part of each column is added.
            None: shapes are not checked.
        """
        if columns.keys() != self.sizes.shapes.keys():
            raise ValueError(
                f"the model reads the columns of events {[*self.sizes.shapes]}, got "
                f"{[*columns]}"
            )
        for name, each in self.sizes.shapes.items():
            found = columns[name].shape
            if places is not None and found != (*places, *each):
                raise ValueError(
                    f"the column of events {name!r} has the shape {found}, expected "
                    f"{(*places, *each)}: the shape of the histories, and behind it the "
                    "places of a list"
                )
