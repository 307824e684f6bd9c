"""Which tables lie below each other in one array, and where each row lies in it.

Tables of one width, dtype, placement and rule form a *stack*. It is one parameter, so that one
lookup, one sort and one update serve all of them::

    stacked rows    0 1 2 ... | 0 1 2 ... | 0 1 2 ...         tables below each other
    dealt           stacked row g goes to hand g mod 256, as its g // 256-th row

A device has neighbouring hands. So each has its share of every table, and of the popular ids,
which are often the first ones. The 256 hands do not depend on the mesh.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax.embeddings.config import (
    FeatureConfig,
    Initializer,
    Placement,
    TableConfig,
    check_placement,
)
from sparsejax.mesh.layout import (
    BY_ROWS,
    ROW_MULTIPLE,
    bit_reversed,
    call_on_each_device,
    mesh_is_set,
    padded_rows,
    rows_per_device,
)
from sparsejax.ops.item_chunks import accumulator
from sparsejax.optimizers.rules import Rule
from sparsejax.sparse import MAX_ENTRIES

# Up to so many numbers (4 MB in float32), tables of one width lie on every device: their lookup
# then needs no exchange. They are counted together, so that they stay one stack.
REPLICATED_SIZE = 2**20

_HAND_BITS = ROW_MULTIPLE.bit_length() - 1

# Rows that are made at a time, which bounds the memory for their random bits.
_BLOCK = 8192


@dataclasses.dataclass(frozen=True)
class StackedTable:
    """A table within a stack.

    Attributes:
      name: of the table.
      number: its place among all tables of the collection; names its random numbers.
      first: the stacked row of its id 0.
      config: of the table.
    """

    name: str
    number: int
    first: int
    config: TableConfig


@dataclasses.dataclass(frozen=True)
class StackedFeature:
    """A feature whose table is in a stack.

    Attributes:
      name: of the feature.
      first_bag: its first bag among the bags of an example.
      table: its table.
      config: of the feature.
    """

    name: str
    first_bag: int
    table: StackedTable
    config: FeatureConfig

    @property
    def bag_range(self) -> slice:
        """Its bags among those of an example."""
        return slice(self.first_bag, self.first_bag + self.config.bags)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables of one width, dtype, placement and rule.

    Attributes:
      name: of the stack.
      dim: numbers in a row.
      dtype: of the numbers.
      placement: how its rows lie on a mesh.
      rule: how its rows are trained; None is the rule of the optimizer.
      tables: in the order of the collection.
      features: those that read these tables, in the order of the collection.
    """

    name: str
    dim: int
    dtype: np.dtype
    placement: Placement
    rule: Rule | None
    tables: tuple[StackedTable, ...]
    features: tuple[StackedFeature, ...]

    @property
    def bags(self) -> int:
        """Rows of the result for each example."""
        return sum(feature.config.bags for feature in self.features)

    @property
    def used_rows(self) -> int:
        """Rows of all tables."""
        last = self.tables[-1]
        return last.first + last.config.num_rows

    @property
    def num_rows(self) -> int:
        """Rows of the parameter, which has rows beyond those of the tables."""
        return padded_rows(self.used_rows)

    @property
    def divided(self) -> bool:
        """Whether its rows are divided over "model"."""
        return self.placement == "rows"

    def place(self, stacked: Any) -> Any:
        """Where stacked rows lie in the parameter; arrays of NumPy or JAX."""
        if not self.divided:
            return stacked
        hand_size = self.num_rows // ROW_MULTIPLE
        hand = bit_reversed(stacked & (ROW_MULTIPLE - 1))
        return hand * hand_size + (stacked >> _HAND_BITS)

    def stacked(self, place: jax.Array) -> jax.Array:
        """The stacked rows at these places: the inverse of `place`."""
        if not self.divided:
            return place
        hand_size = self.num_rows // ROW_MULTIPLE
        return place % hand_size * ROW_MULTIPLE + bit_reversed(place // hand_size)


def stack_tables(
    tables: Mapping[str, TableConfig],
    features: Mapping[str, FeatureConfig],
    plan: Mapping[str, Placement],
) -> tuple[Stack, ...]:
    """The stacks of a collection.

    Args:
      tables: by name.
      features: by name; their tables exist.
      plan: placements of tables whose configuration has none.

    Raises:
      ValueError: `plan` names an unknown table or placement, or a stack has too many rows.
    """
    placements = _placements(tables, plan)
    groups: dict[tuple, list[str]] = {}
    for name, table in tables.items():
        key = (table.dim, table.dtype, placements[name], table.rule)
        groups.setdefault(key, []).append(name)
    stacks, names = [], set()
    numbers = {name: number for number, name in enumerate(tables)}
    for (dim, dtype, placement, rule), members in groups.items():
        sizes = [tables[name].num_rows for name in members]
        if padded_rows(sum(sizes)) > MAX_ENTRIES:
            raise ValueError(
                f"the tables {', '.join(members)} have {sum(sizes):,} rows together, "
                "more than int32 can number (2^31 - 1); give some of them another "
                "placement or rule"
            )
        firsts = itertools.accumulate([0, *sizes[:-1]])
        stacked = {
            name: StackedTable(name, numbers[name], first, tables[name])
            for name, first in zip(members, firsts, strict=True)
        }
        readers = {n: f for n, f in features.items() if f.table in stacked}
        bags = itertools.accumulate([0, *(f.bags for f in readers.values())])
        name = f"{dim}_{dtype}_{placement}" + (f"_{rule.name}" if rule else "")
        while name in names:  # two rules of one name
            name += "_"
        names.add(name)
        reading = tuple(
            StackedFeature(feature, bag, stacked[config.table], config)
            for (feature, config), bag in zip(readers.items(), bags, strict=False)
        )
        kind = (name, dim, dtype, placement, rule)
        stacks.append(Stack(*kind, tuple(stacked.values()), reading))
    return tuple(stacks)


def _placements(tables, plan) -> dict[str, Placement]:
    """The placement of each table."""
    for name, placement in plan.items():
        if name not in tables:
            raise ValueError(f"plan has a table {name!r}, which the collection lacks")
        check_placement(placement)
    given = {name: t.placement or plan.get(name) for name, t in tables.items()}
    size: dict[tuple, int] = {}
    for name, table in tables.items():
        if given[name] is None:
            kind = (table.dim, table.dtype, table.rule)
            size[kind] = size.get(kind, 0) + table.num_rows * table.dim

    def chosen(table: TableConfig) -> Placement:
        small = size[table.dim, table.dtype, table.rule] <= REPLICATED_SIZE
        return "replicated" if small else "rows"

    return {name: given[name] or chosen(table) for name, table in tables.items()}


def first_rows(stack: Stack, key: jax.Array) -> jax.Array:
    """`[num_rows, dim]`: the rows that a stack begins with; each device makes its own.

    The numbers of a row depend on the key, the table's number and the id alone. Rows beyond
    those of the tables are zero.
    """

    def made(key: jax.Array, first: jax.Array, count: int) -> jax.Array:
        block = math.gcd(count, _BLOCK)
        starts = first + jnp.arange(0, count, block, dtype=jnp.int32)

        def rows(start):
            return _rows_at(stack, key, start + jnp.arange(block, dtype=jnp.int32))

        if len(starts) == 1:
            return rows(starts[0])
        return lax.map(rows, starts).reshape(count, stack.dim)

    if not (stack.divided and mesh_is_set()):
        return made(key, jnp.int32(0), stack.num_rows)
    count = rows_per_device(stack.num_rows)
    return call_on_each_device(
        lambda key: made(key, lax.axis_index("model") * count, count),
        key,
        in_specs=(P(),),
        out_specs=BY_ROWS,
    )


def _rows_at(stack: Stack, key: jax.Array, places: jax.Array) -> jax.Array:
    stacked = stack.stacked(places)
    firsts = jnp.asarray([table.first for table in stack.tables], jnp.int32)
    table = jnp.searchsorted(firsts, stacked, side="right") - 1
    ids = stacked - firsts[table]
    numbers = jnp.asarray([t.number for t in stack.tables], jnp.uint32)
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, 0))
    of_table = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
    keys = fold_in(of_table[table], ids)
    rows = jnp.zeros((len(places), stack.dim), stack.dtype)
    for init in dict.fromkeys(t.config.init for t in stack.tables):
        mine = np.array([t.config.init is init for t in stack.tables])
        rows = jnp.where(
            jnp.asarray(mine)[table][:, None], _drawn(init, stack, keys, table), rows
        )
    return jnp.where((stacked < stack.used_rows)[:, None], rows, 0)


def _drawn(
    init: Initializer | None, stack: Stack, keys: jax.Array, table: jax.Array
) -> jax.Array:
    """A row for each key."""
    if init is not None:
        shape = (1, stack.dim)
        return jax.vmap(lambda key: init(key, shape, stack.dtype)[0])(keys)
    wide = accumulator(stack.dtype)
    bounds = jnp.asarray([t.config.num_rows**-0.5 for t in stack.tables], wide)

    def uniform(key):
        return jax.random.uniform(key, (stack.dim,), wide, minval=-1)

    return (jax.vmap(uniform)(keys) * bounds[table][:, None]).astype(stack.dtype)
