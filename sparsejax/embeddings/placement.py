"""Which tables lie below each other in one array, and where each row lies in it.

Tables of equal width, dtype and rule that are divided over the mesh form a *stack*, and those that
are replicated form another one. A stack is one parameter, so that one lookup, one sort and one
update serve all of its tables. The rows of a divided stack are distributed in turn over 256
*hands*, virtual shards that do not depend on the mesh. A device has adjacent hands::

    hand               0   1   2  ...  63 | 64  ... 127 | 128 ... 191 | 192 ... 255
    slots from 0 on    tables placed by "rows", one below the other, dealt to all hands
    slots after these  some whole tables  | others      | others      | others

So a table that is divided by its rows has a share on every device, and so have its popular ids,
which are often the first ones. A whole table has a *range* of hands: here a quarter of them, which
lies on one device if "model" is 4 or less, and on a few neighbours if it is more. A table that is
cut by its columns is several tables here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax.embeddings.config import (
    FeatureConfig,
    Placement,
    TableConfig,
    check_placement,
)
from sparsejax.mesh.exchange import Share
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

# If the tables of one width together have at most this many numbers (4 MB in float32), they are
# replicated: their lookup then needs no exchange. All are counted together, so that they stay in
# one stack.
REPLICATED_SIZE = 2**20

# Without a plan, whole tables are distributed over this many parts of the hands. It is the usual
# number of GPUs in a host.
DEFAULT_PARTS = 8

_HAND_BITS = ROW_MULTIPLE.bit_length() - 1

# Number of rows that are initialized at a time, which bounds the memory for random bits.
_BLOCK = 8192


class Range(NamedTuple):
    """A range of adjacent hands (virtual shards).

    Attributes:
      first: number of the first hand.
      hands: number of hands: a power of 2 that divides `first`.
    """

    first: int
    hands: int


ALL_HANDS = Range(0, ROW_MULTIPLE)


def is_range(hands: Range) -> bool:
    """Whether the numbers describe a valid range of hands."""
    first, count = hands
    is_power = count > 0 and count & (count - 1) == 0
    return is_power and 0 <= first < ROW_MULTIPLE and first % count == 0


@dataclasses.dataclass(frozen=True)
class TablePlacement:
    """The placement of a table on a mesh.

    Attributes:
      kind: kind of the placement.
      ranges: ranges of hands (virtual shards) that have the rows: one range if the kind is
        "table", one range for each piece if it is "columns".
    """

    kind: Placement
    ranges: tuple[Range, ...] = ()


class Place(NamedTuple):
    """The position of a table's rows in its stack: ints, or arrays with a number for each id.

    Attributes:
      first: position of the table's id 0 among the rows of all tables that share its range.
      bits: logarithm of the number of hands of the range, to the base 2.
      hand: number of the first hand of the range.
      slot: number of the first slot of the range in each of its hands.
    """

    first: Any
    bits: Any
    hand: Any
    slot: Any


@dataclasses.dataclass(frozen=True)
class Distinct:
    """Average number of distinct rows of each table that a group of examples reads.

    Attributes:
      examples: number of examples in the group.
      rows: pairs of a table's name and its number of distinct rows.
    """

    examples: int
    rows: tuple[tuple[str, float], ...]

    def of(self, table: str, examples: int) -> float:
        """An upper bound of the number of distinct rows that `examples` examples read in a table.

        Twice as many examples read at most twice as many distinct rows.
        """
        rows = dict(self.rows).get(table, math.inf)
        return rows * max(1.0, examples / self.examples)


@dataclasses.dataclass(frozen=True)
class StackedTable:
    """A table within a stack, or a piece of a table that is cut by its columns.

    Attributes:
      name: name of the table.
      number: number of the table in the collection, from which its random keys are made.
      config: configuration of the table.
      first_column: first column of the table in this piece.
      place: position of its rows in the stack.
    """

    name: str
    number: int
    config: TableConfig
    first_column: int
    place: Place

    @functools.cached_property
    def dynamic(self) -> bool:
        """Whether ids are 64-bit keys, see `sparsejax.embeddings.dynamic`."""
        return self.config.wide_ids

    @property
    def num_ids(self) -> int:
        """An upper bound on packed ids; for a dynamic table these are positions in a batch."""
        return MAX_ENTRIES if self.dynamic else self.config.num_rows

    def owners(self, model: int) -> slice:
        """The range of devices that have rows of this table."""
        hands = ROW_MULTIPLE // model
        first = self.place.hand // hands
        return slice(first, first + max(1, (1 << self.place.bits) // hands))


@dataclasses.dataclass(frozen=True)
class StackedFeature:
    """A feature that reads a table of the stack; one for each piece of the table.

    Attributes:
      name: name of the feature.
      first_bag: number of its first bag in an example.
      table: table that it reads.
      config: configuration of the feature.
      hotness: number of ids in an example.
    """

    name: str
    first_bag: int
    table: StackedTable
    config: FeatureConfig
    hotness: float

    @functools.cached_property
    def bag_range(self) -> slice:
        """The range of this feature's bags in an example."""
        return slice(self.first_bag, self.first_bag + self.config.bags)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables of equal width, dtype and rule, concatenated and divided over the mesh or replicated.

    Attributes:
      name: name of the stack.
      dim: number of numbers in a row.
      dtype: dtype of the numbers.
      divided: whether its rows are divided over "model".
      rule: optimizer rule of its rows; None is the rule of the optimizer.
      num_rows: number of rows of the parameter, which includes padding rows.
      tables: tables in the order of the collection.
      features: features that read these tables, in the order of the collection.
      device_rows: number of rows that the parameter has on the devices, if the stack is in host
        memory, see `sparsejax.embeddings.host_rows`. None if the parameter has all rows.
      store: name of the kind of store for its rows, see `sparsejax.embeddings.stores`.
    """

    name: str
    dim: int
    dtype: np.dtype
    divided: bool
    rule: Rule | None
    num_rows: int
    tables: tuple[StackedTable, ...]
    features: tuple[StackedFeature, ...]
    device_rows: int | None = None
    store: str = "static"

    @property
    def kernel_rows(self) -> int:
        """Number of rows of the parameter's array."""
        return self.num_rows if self.device_rows is None else self.device_rows

    @functools.cached_property
    def bags(self) -> int:
        """Number of vectors in the result for each example."""
        return sum(feature.config.bags for feature in self.features)

    @functools.cached_property
    def dynamic(self) -> bool:
        """Whether the tables of this stack are dynamic: either all are, or none."""
        return self.tables[0].dynamic

    @property
    def _hand_size(self) -> int:
        return self.num_rows // ROW_MULTIPLE

    def row_of(self, ids: Any, place: Place) -> Any:
        """The row numbers of ids in the parameter; ids are NumPy or JAX arrays."""
        number = ids + place.first
        if not self.divided:
            return number
        low = number & ((1 << place.bits) - 1)
        hand = place.hand + (bit_reversed(low) >> (_HAND_BITS - place.bits))
        return hand * self._hand_size + place.slot + (number >> place.bits)

    def part_of(self, array: Any, table: StackedTable) -> Any:
        """The columns of a whole table, `[n, width]`, that belong to one of its pieces."""
        return array[:, table.first_column : table.first_column + self.dim]

    def ids_at(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The table of each row of the parameter, as its index in `tables`, and the id.

        The inverse of `row_of`. The id is -1 for a padding row.
        """
        place = Place(*(column(values) for values in zip(*self._places, strict=True)))
        rows = rows[None]
        number = rows
        if self.divided:
            slot = rows % self._hand_size - place.slot
            hand = rows // self._hand_size - place.hand
            low = bit_reversed(hand << (_HAND_BITS - place.bits))
            inside = (slot >= 0) & (hand >= 0) & (hand < 1 << place.bits)
            number = jnp.where(inside, (slot << place.bits) + low, -1)
        ids = number - place.first
        inside = (number >= 0) & (ids >= 0)
        inside &= ids < column([table.config.num_rows for table in self.tables])
        table = jnp.argmax(inside, axis=0)
        ids = jnp.max(jnp.where(inside, ids, -1), axis=0)
        return table, ids

    @property
    def _places(self) -> list[Place]:
        return [table.place for table in self.tables]

    def ids_of_owners(self, model: int) -> np.ndarray:
        """`[model]`: number of ids of an example whose rows are on each device."""
        owned = np.zeros(model)
        for feature in self.features:
            owners = feature.table.owners(model)
            owned[owners] += feature.hotness / len(owned[owners])
        return owned

    def distinct_of_owner(
        self, model: int, examples: int, known: Distinct | None
    ) -> float:
        """The largest number of distinct rows on a device that a number of examples reads."""
        owned = np.zeros(model)
        for table in dict.fromkeys(feature.table for feature in self.features):
            rows = float(table.config.num_rows)
            if known is not None:
                rows = min(rows, known.of(table.name, examples))
            owners = table.owners(model)
            owned[owners] += rows / len(owned[owners])
        return float(owned.max(initial=0))

    def share(
        self, model: int, examples: int, room: float | None, known: Distinct | None
    ) -> Share:
        """The ids of a number of examples on the device that owns most of them."""
        owned, bags = self.ids_of_owners(model), np.zeros(model, np.int64)
        for feature in self.features:
            bags[feature.table.owners(model)] += feature.config.bags
        part, most = float(owned.max() / owned.sum()), int(bags.max()) * examples
        distinct = self.distinct_of_owner(model, examples, known)
        return Share(room, part, most, distinct)


def spec_of(stack: Stack, ndim: int = 2) -> P:
    """The sharding of a stack's parameter, or of another array with a row for each of its rows."""
    if not stack.divided:
        return P()
    return BY_ROWS if ndim > 1 else P("model")


def column(values: Iterable[int]) -> jax.Array:
    """Converts values to an int32 column `[values, 1]`."""
    return jnp.asarray(list(values), jnp.int32)[:, None]


def stack_tables(
    tables: Mapping[str, TableConfig],
    features: Mapping[str, FeatureConfig],
    plan: Mapping[str, Any],
    hotness: Mapping[str, float] = types.MappingProxyType({}),
) -> tuple[Stack, ...]:
    """Groups the tables of a collection into stacks.

    Args:
      tables: configurations by name.
      features: configurations by name; each names an existing table.
      plan: placements of tables whose configuration has none, and ranges of hands.
      hotness: number of ids in an example, by feature. By default one for each of its bags.

    Raises:
      ValueError: `plan` names an unknown table or placement, pieces do not divide a width, or
        a stack has too many rows.
    """
    placements = _placements(tables, plan)
    groups: dict[tuple, list[tuple[str, Range | None]]] = {}
    for name, table in tables.items():
        kind, ranges = placements[name].kind, placements[name].ranges
        pieces = ranges or (None,) * (table.pieces if kind == "columns" else 1)
        divided = kind != "replicated"
        kept = table.store, table.host_path
        key = (table.dim // len(pieces), table.dtype, divided, table.rule, kept)
        whole = (ALL_HANDS,) if kind == "rows" else pieces
        groups.setdefault(key, []).extend((name, hands) for hands in whole)
    stacks, names = [], set()
    numbers = {name: number for number, name in enumerate(tables)}
    for (dim, dtype, divided, rule, (store, _)), members in groups.items():
        sizes = [tables[name].num_rows for name, _ in members]
        if divided:
            ranges = _ranges(sizes, [hands for _, hands in members])
            places, slots = _places(sizes, ranges)
            num_rows = padded_rows(slots * ROW_MULTIPLE)
        else:
            places = [Place(n, 0, 0, 0) for n in itertools.accumulate([0, *sizes[:-1]])]
            num_rows = padded_rows(sum(sizes))
        if num_rows > MAX_ENTRIES:
            concerned = ", ".join(dict.fromkeys(name for name, _ in members))
            raise ValueError(
                f"the tables {concerned} take {num_rows:,} rows together, more than int32 "
                "can number (2^31 - 1); give some of them another placement or rule"
            )
        stacked: dict[str, list[StackedTable]] = {}
        for (name, _), place in zip(members, places, strict=True):
            pieces = stacked.setdefault(name, [])
            first = len(pieces) * dim
            pieces.append(StackedTable(name, numbers[name], tables[name], first, place))
        reading, bags = [], 0
        for name, config in features.items():
            for piece in stacked.get(config.table, ()):
                hot = hotness.get(name, config.bags)
                reading.append(StackedFeature(name, bags, piece, config, hot))
                bags += config.bags
        how = store
        if store == "static":
            how = "rows" if divided else "replicated"
        name = f"{dim}_{dtype}_{how}"
        name += f"_{rule.name}" if rule else ""
        # Two rules may have the same name; a number makes the stack's name unique.
        while name in names:
            name += "_"
        names.add(name)
        members = tuple(itertools.chain.from_iterable(stacked.values()))
        kind = (name, dim, dtype, divided, rule, num_rows)
        wanted = sum(table.config.device_rows or 0 for table in members)
        device_rows = min(padded_rows(wanted), num_rows) if wanted else None
        stacks.append(Stack(*kind, members, tuple(reading), device_rows, store))
    return tuple(stacks)


def _placements(tables, plan) -> dict[str, TablePlacement]:
    """The placement of each table: from its configuration, from the plan, or the default."""
    planned: dict[str, TablePlacement] = {}
    for name, placement in plan.items():
        if name not in tables:
            raise ValueError(f"plan has a table {name!r}, which the collection lacks")
        if not isinstance(placement, TablePlacement):
            placement = TablePlacement(placement)
        check_placement(placement.kind)
        _check_ranges(name, placement)
        planned[name] = placement
    for name, table in tables.items():
        if table.placement not in (None, getattr(planned.get(name), "kind", None)):
            planned[name] = TablePlacement(table.placement)
    size: dict[tuple, int] = {}
    for name, table in tables.items():
        if name not in planned:
            kind = (table.dim, table.dtype, table.rule)
            size[kind] = size.get(kind, 0) + table.num_rows * table.dim
    for name, table in tables.items():
        if name not in planned:
            small = size[table.dim, table.dtype, table.rule] <= REPLICATED_SIZE
            planned[name] = TablePlacement("replicated" if small else "rows")
        if planned[name].kind == "columns":
            pieces = len(planned[name].ranges) or table.pieces
            if table.dim % pieces:
                raise ValueError(
                    f"table {name!r} has rows of {table.dim} numbers, which cannot be cut into "
                    f"{pieces} pieces of one width; choose pieces that divide {table.dim}, "
                    'or the placement "rows" or "table"'
                )
    return planned


def _check_ranges(name: str, placement: TablePlacement) -> None:
    """Raises ValueError unless tables can be placed on these ranges of hands."""
    kind, ranges = placement.kind, placement.ranges
    fitting = kind == "columns" or len(ranges) <= (kind == "table")
    if not (fitting and all(map(is_range, ranges))):
        raise ValueError(
            f"the plan of table {name!r} has the ranges of hands {ranges} for the placement "
            f"{kind!r}; take those of plan_embeddings"
        )


def _ranges(sizes: Sequence[int], given: Sequence[Range | None]) -> list[Range]:
    """The range of hands for each table: the given one, or one of `DEFAULT_PARTS` equal parts."""
    hands = ROW_MULTIPLE // DEFAULT_PARTS
    filled, found = [0] * DEFAULT_PARTS, list(given)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if found[i] is None:
            part = filled.index(min(filled))
            filled[part] += sizes[i]
            found[i] = Range(part * hands, hands)
    return [hands for hands in found if hands is not None]


def _places(sizes: Sequence[int], ranges: Sequence[Range]) -> tuple[list[Place], int]:
    """The place of each table, and the number of slots of the fullest hand.

    If two ranges overlap, one contains the other. Wider ranges are placed first, so that all hands
    of a range are equally full.
    """
    filled = np.zeros(ROW_MULTIPLE, np.int64)
    found: dict[int, Place] = {}
    for hands in sorted(set(ranges), key=lambda hands: (-hands.hands, hands.first)):
        mine = slice(hands.first, hands.first + hands.hands)
        slot, first = int(filled[mine].max()), 0
        for i, size in enumerate(sizes):
            if ranges[i] == hands:
                bits = hands.hands.bit_length() - 1
                found[i] = Place(first, bits, hands.first, slot)
                first += size
        filled[mine] = slot - (-first // hands.hands)
    return [found[i] for i in range(len(sizes))], int(filled.max())


def first_rows(stack: Stack, key: jax.Array) -> jax.Array:
    """Initial rows of a stack, `[num_rows, dim]`; each device computes its own.

    The numbers of a row depend only on the key, the table's number and the id. Padding rows are
    zero.
    """

    def made(key: jax.Array, first: jax.Array, count: int) -> jax.Array:
        block = math.gcd(count, _BLOCK)
        starts = first + jnp.arange(0, count, block, dtype=jnp.int32)

        def rows(start):
            return rows_at(stack, key, start + jnp.arange(block, dtype=jnp.int32))

        if len(starts) == 1:
            return rows(starts[0])
        return lax.map(rows, starts).reshape(count, stack.dim)

    if not (stack.divided and mesh_is_set()):
        return made(key, jnp.int32(0), stack.num_rows)
    count = rows_per_device(stack.num_rows)
    return call_on_each_device(
        lambda key: made(key, lax.axis_index("model") * count, count),
        (key,),
        (P(),),
        BY_ROWS,
    )


def rows_at(stack: Stack, key: jax.Array, rows: jax.Array) -> jax.Array:
    """`[rows, dim]`: what some rows of a stack begin with."""
    table, ids = stack.ids_at(rows)
    numbers = jnp.asarray([t.number for t in stack.tables], jnp.uint32)
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, 0))
    of_table = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
    keys = fold_in(of_table[table], ids)
    return jnp.where((ids >= 0)[:, None], drawn_rows(stack, keys, table), 0)


def drawn_rows(
    stack: Stack, keys: jax.Array, table: jax.Array | np.ndarray
) -> jax.Array:
    """Initial rows `[keys, dim]` of tables, which are given by their positions in the stack.

    Args:
      stack: stack of the tables.
      keys: a random key for each row.
      table: place of each row's table in the stack.
    """
    # A piece of a table uses its columns of the random numbers drawn for a whole row.
    first = column(t.first_column for t in stack.tables)[table]
    columns = first + jnp.arange(stack.dim, dtype=jnp.int32)[None]
    found = jnp.zeros((len(keys), stack.dim), stack.dtype)
    for config in {
        (t.config.init, t.config.dim): t.config for t in stack.tables
    }.values():
        kind = (config.init, config.dim)
        mine = np.array([(t.config.init, t.config.dim) == kind for t in stack.tables])
        drawn = _drawn(stack, config, keys, table)
        drawn = jnp.take_along_axis(drawn, columns, axis=1, mode="clip")
        found = jnp.where(jnp.asarray(mine)[table][:, None], drawn, found)
    return found


def _drawn(
    stack: Stack, config: TableConfig, keys: jax.Array, table: jax.Array | np.ndarray
) -> jax.Array:
    """Draws initial values of a whole row for each key."""
    if (init := config.init) is not None:
        shape = (1, config.dim)
        return jax.vmap(lambda key: init(key, shape, stack.dtype)[0])(keys)
    wide = accumulator(stack.dtype)
    bounds = jnp.asarray([t.config.num_rows**-0.5 for t in stack.tables], wide)

    def uniform(key):
        return jax.random.uniform(key, (config.dim,), wide, minval=-1)

    return (jax.vmap(uniform)(keys) * bounds[table][:, None]).astype(stack.dtype)
