"""The state of a stack of dynamic tables: index, numbers and counters of its ids."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, UInt8, UInt32

from sparsejax.embeddings.config import DynamicTableConfig
from sparsejax.embeddings.dynamic import admission
from sparsejax.embeddings.placement import Stack, StackedTable
from sparsejax.embeddings.row_numbers import BUILT_IN, RowNumber, policy
from sparsejax.mesh.layout import to_host
from sparsejax.ops import hash_index, index_edits
from sparsejax.ops.hash_index import PARTS, Index, Layout

# Positions of a table's counters, in the order of `TableStats`. The first three counters are
# increased for each occurrence of an id in a batch; the last two count rows.
FOUND, WAITING, REFUSED, INSERTED, EVICTED = range(5)
_TOTALS = 5


class State(NamedTuple):
    """Arrays of 256 parts, or of those parts that are on a device.

    Attributes:
      index: hash index from key to row.
      numbers: arrays of the `RowNumber`s of each row, by name.
      sketch: approximate counts of keys without a row; of width 1 if no policy reads them.
      totals: counters of each table, each stored as two 32-bit words.
    """

    index: Index
    numbers: dict[str, Array]
    sketch: UInt8[Array, "parts depth width"]
    totals: UInt32[Array, "parts tables numbers 2"]

    def arrays(self) -> dict[str, jax.Array]:
        """All arrays by name, including those of the index."""
        others = {"sketch": self.sketch, "totals": self.totals}
        return {**self.index._asdict(), **self.numbers, **others}

    @classmethod
    def of(cls, arrays: Mapping[str, jax.Array]) -> State:
        """Makes a state from the result of `arrays`."""
        given = dict(arrays)
        index = Index(*(given.pop(name) for name in Index._fields))
        sketch, totals = given.pop("sketch"), given.pop("totals")
        return cls(index, given, sketch, totals)


class IndexState(nnx.Variable):
    """An array of the state of dynamic tables."""


@dataclasses.dataclass(frozen=True)
class TableStats:
    """Counters for the ids of a dynamic table since it was made.

    >>> table = DynamicTableConfig(1000, 2)
    >>> embeddings = EmbeddingCollection({"user": table}, {"user": "user"}, rngs=nnx.Rngs(0))
    >>> embeddings.stats()["user"].capacity
    1024

    Attributes:
      capacity: number of rows of the table.
      rows: number of rows that have an id.
      found: number of ids in batches that had a row.
      waiting: number of ids in batches that got no row because the table's `Admit` did not admit
          them.
      refused: number of ids in batches that were admitted, but found no free row.
      inserted: number of times that a row was given to an id.
      evicted: number of times that a row was taken from an id.
    """

    capacity: int
    rows: int
    found: int
    waiting: int
    refused: int
    inserted: int
    evicted: int


def layout_of(stack: Stack) -> Layout:
    """The layout of the index of a stack."""
    return Layout(
        rows=stack.num_rows // PARTS,
        firsts=tuple(table.place.first // PARTS for table in stack.tables),
        sizes=tuple(table.config.num_rows // PARTS for table in stack.tables),
    )


def configs_of(stack: Stack) -> list[DynamicTableConfig]:
    """The configurations of a stack's tables."""
    return [cast(DynamicTableConfig, table.config) for table in stack.tables]


def policies_of(stack: Stack) -> list[RowNumber]:
    """The numbers that are eviction policies of a stack's tables."""
    found = (policy(config.evict) for config in configs_of(stack))
    return [number for number in found if number is not None]


def numbers_of(stack: Stack) -> list[RowNumber]:
    """The numbers stored for each row, in the order of files."""
    found = {number.name: number for number in BUILT_IN}
    for number in policies_of(stack):
        if found.setdefault(number.name, number) != number:
            raise ValueError(
                f"tables of one width have two numbers {number.name!r}: {number} and "
                f"{found[number.name]}; give one of them another name"
            )
    return [*found.values()]


def empty(stack: Stack) -> State:
    """The state in which no key has a row."""
    layout, configs = layout_of(stack), configs_of(stack)
    return State(
        index=hash_index.empty(layout),
        numbers={
            number.name: jnp.zeros((PARTS, layout.rows), number.dtype)
            for number in numbers_of(stack)
        },
        sketch=admission.empty(configs),
        totals=jnp.zeros((PARTS, len(configs), _TOTALS, 2), jnp.uint32),
    )


def clock_of(clock: Any) -> jax.Array:
    """Converts the clock given by a caller to int32.

    Raises:
      TypeError: the clock is not an integer, or is traced with a dtype that may not fit.
      ValueError: the clock does not fit into int32.
    """
    if isinstance(clock, jax.core.Tracer):
        if clock.shape or not np.can_cast(clock.dtype, np.int32):
            raise TypeError(
                f"clock is one number of int32, got {clock.dtype}{[*clock.shape]}: convert "
                "it before the step, where numbers that do not fit can be seen"
            )
        return clock.astype(jnp.int32)
    try:
        number = operator.index(clock)
    except TypeError:
        raise TypeError(f"clock is an integer, an int32, got {clock!r}") from None
    if not -(2**31) <= number < 2**31:
        raise ValueError(
            f"clock={number:,} does not fit into int32 (-2^31 to 2^31 - 1): count in a larger "
            "unit, or from a later time, such as the hours since the first event"
        )
    return jnp.asarray(number, jnp.int32)


def counted(state: State, kind: int, added: Int[Array, "parts tables"]) -> State:
    """Adds `added` to the counter `kind` of each table."""
    low = state.totals[:, :, kind, 0]
    more = low + added.astype(jnp.uint32)
    carried = (more < low).astype(jnp.uint32)
    totals = state.totals.at[:, :, kind, 0].set(more)
    return state._replace(totals=totals.at[:, :, kind, 1].add(carried))


def stats(
    stack: Stack, totals: np.ndarray, num_free: np.ndarray
) -> dict[str, TableStats]:
    """The counters of each table, by table name."""
    words = totals.astype(np.uint64).sum(axis=0)
    numbers = words[..., 0] + (words[..., 1] << np.uint64(32))
    found = {}
    for table, row, free in zip(
        stack.tables, numbers.tolist(), num_free.sum(axis=0).tolist(), strict=True
    ):
        rows = table.config.num_rows
        found[table.name] = TableStats(rows, rows - free, *row)
    return found


def ids_and_rows(
    stack: Stack, table: StackedTable, known: Mapping[str, nnx.Variable]
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a table in ascending order, and the kernel row of each."""
    used, keys = (to_host(known[name][...]) for name in ("used", "keys"))
    number = stack.tables.index(table)
    return index_edits.rows_of(layout_of(stack), number, used, keys)


def rows_of(
    stack: Stack,
    table: StackedTable,
    known: Mapping[str, nnx.Variable],
    ids: np.ndarray,
) -> np.ndarray:
    """The row of each id of a table; -1 for an id without a row."""
    here, rows = ids_and_rows(stack, table, known)
    if not len(here):
        return np.full(len(ids), -1, np.int32)
    place = np.minimum(np.searchsorted(here, ids), len(here) - 1)
    return np.where(here[place] == ids, rows[place], -1)
