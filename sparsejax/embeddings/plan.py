"""A plan of embedding tables: their placements, and figures of tables and devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import codec
from sparsejax.embeddings.config import (
    FeatureConfig,
    Placement,
    TableConfig,
    check_floating,
)
from sparsejax.embeddings.placement import (
    Distinct,
    Stack,
    TablePlacement,
    is_range,
    stack_tables,
)
from sparsejax.mesh.layout import readable_bytes

VERSION = 1
_EXCHANGE = "wire_dtype", "exchange_room"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Settings of a collection's tables that its compiled programs depend on.

    They are `EmbeddingCollection(...).settings`, for `fit` and custom loops. A plan passes them to
    the collection, and checkpoints of `fit` contain the settings of the exchange.

    >>> tables = {"item": TableConfig(1000, 8)}
    >>> embeddings = EmbeddingCollection(tables, {"item": "item"}, rngs=nnx.Rngs(0))
    >>> embeddings.settings.replaced(exchange_room=2.0).exchange
    {'wire_dtype': None, 'exchange_room': 2.0}

    Attributes:
      tables: configurations by name, with the capacity, location and placement of each table.
      placements: placements of tables whose configuration has none.
      hotness: number of ids in an example, by feature; by default one for each bag.
      wire_dtype: dtype in which sums and gradients are sent between devices; None for the dtype of
          each table.
      exchange_room: capacity for ids of each pair of devices, as a multiple of an even share; None
          for the default of `sparsejax.mesh.exchange.places`.
      distinct: number of distinct rows of each table that the examples of a device read; None if
          unknown.
    """

    tables: tuple[tuple[str, TableConfig], ...]
    placements: tuple[tuple[str, Placement | TablePlacement], ...] = ()
    hotness: tuple[tuple[str, float], ...] = ()
    wire_dtype: jax.typing.DTypeLike | None = None
    exchange_room: float | None = None
    distinct: Distinct | None = None

    def __post_init__(self) -> None:
        if self.wire_dtype is not None:
            object.__setattr__(self, "wire_dtype", jnp.dtype(self.wire_dtype))
            check_floating("wire_dtype", self.wire_dtype)
        if self.exchange_room is not None and not self.exchange_room > 0:
            raise ValueError(
                f"exchange_room must be positive, got {self.exchange_room}"
            )

    @classmethod
    def of(
        cls,
        tables: Mapping[str, TableConfig],
        plan: EmbeddingPlan | Mapping[str, Placement] | None,
        **exchange: Any,
    ) -> TableSettings:
        """The settings of a new collection; given exchange settings override those of its plan."""
        if isinstance(plan, EmbeddingPlan):
            return plan.settings(tables).replaced(**exchange)
        if plan is None or isinstance(plan, Mapping):
            placements = tuple((plan or {}).items())
            settings = cls(tables=tuple(tables.items()), placements=placements)
            return settings.replaced(**exchange)
        raise TypeError(
            "plan must be an EmbeddingPlan or a placement for each of some tables, such "
            f"as {{{next(iter(tables))!r}: 'rows'}}, got {plan!r}"
        )

    def replaced(self, **settings: Any) -> TableSettings:
        """A copy with the given settings replaced, except those that are None."""
        given = {name: value for name, value in settings.items() if value is not None}
        return dataclasses.replace(self, **given)

    def stacks(self, features: Mapping[str, FeatureConfig]) -> tuple[Stack, ...]:
        """Groups the tables into stacks, see `stack_tables`."""
        given = dict(self.tables), features, dict(self.placements), dict(self.hotness)
        return stack_tables(*given)

    @property
    def exchange(self) -> dict[str, Any]:
        """The settings of the exchange, as JSON values."""
        dtype = None if self.wire_dtype is None else jnp.dtype(self.wire_dtype).name
        return {"wire_dtype": dtype, "exchange_room": self.exchange_room}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """The figures of a table in a plan.

    Attributes:
      name: name of the table.
      num_rows: number of rows.
      dim: number of numbers in a row.
      placement: placement on the mesh.
      why: reason for the placement, in words.
      memory: bytes of its rows and their state, counted once; for a dynamic table including its
          index.
      entries: number of ids in a batch.
      sent: bytes that each device sends in a step for this table.
      host: bytes of `memory` that are in host memory.
    """

    name: str
    num_rows: int
    dim: int
    placement: TablePlacement
    why: str
    memory: int
    entries: float
    sent: int
    host: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """The figures of a device along "model" in a plan. Devices along "data" have equal figures.

    Attributes:
      tables: bytes of rows.
      state: bytes of optimizer state.
      temporary: bytes of the arrays of a step: ids, sums, and gradients of bags and of rows.
      entries: number of ids whose rows it reads.
      work: bytes of the rows that it reads.
      sent: bytes that it sends in a step: ids, sums and gradients.
    """

    tables: int
    state: int
    temporary: int
    entries: float
    work: float
    sent: int

    @property
    def total(self) -> int:
        """Total bytes of memory."""
        return self.tables + self.state + self.temporary


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingPlan:
    """Placements of tables on a mesh, for `EmbeddingCollection(tables, features, plan=plan)`.

    It can be used on every mesh, and is best on the mesh that it was made for. `print(plan)` shows
    it.

    >>> tables, sizes = {"item": TableConfig(1_000_000, 16)}, {"batch_size": 64, "model": 4}
    >>> planned = plan_embeddings(tables, {"item": "item"}, **sizes, rule=optimizers.sgd(0.1))
    >>> planned.devices[0].tables  # a quarter, with a few rows beyond those of the table
    16252928
    >>> EmbeddingPlan.from_json(planned.to_json()) == planned
    True

    Attributes:
      batch_size: number of examples in a step, on all devices.
      data: size of the mesh axis "data".
      model: size of the mesh axis "model".
      memory: memory of a device in bytes; None if unknown.
      hotness: number of ids in an example, by feature.
      distinct: number of distinct rows of each table that the examples of one device read; empty
          if unknown.
      tables: figures of each table.
      devices: figures of each device along "model".
      wire_dtype: dtype in which sums and gradients are sent between devices; None for the dtype of
          each table.
      exchange_room: capacity for ids of each pair of devices, as a multiple of an even share; None
          for the default of `EmbeddingCollection`.
    """

    batch_size: int
    data: int
    model: int
    memory: int | None
    hotness: dict[str, float]
    tables: tuple[PlannedTable, ...]
    devices: tuple[PlannedDevice, ...]
    distinct: dict[str, float] = dataclasses.field(default_factory=dict)
    wire_dtype: str | None = None
    exchange_room: float | None = None

    def settings(self, tables: Mapping[str, TableConfig]) -> TableSettings:
        """The settings of a collection of these tables.

        Raises:
          ValueError: the plan was made for other tables.
        """
        distinct, examples = None, self.batch_size // (self.data * self.model)
        if self.distinct:
            distinct = Distinct(examples, tuple(self.distinct.items()))
        return TableSettings(
            tables=tuple(tables.items()),
            placements=tuple(self.placements(tables).items()),
            hotness=tuple(self.hotness.items()),
            wire_dtype=self.wire_dtype,
            exchange_room=self.exchange_room,
            distinct=distinct,
        )

    def of_width(self, dim: int) -> EmbeddingPlan:
        """The plan for tables with the same ids and another width, none of which is cut by
        columns.
        """
        if all(table.dim == dim for table in self.tables):
            return self
        tables = []
        for table in self.tables:
            placement = table.placement
            if placement.kind == "columns":
                placement = TablePlacement("rows")
            tables.append(dataclasses.replace(table, dim=dim, placement=placement))
        return dataclasses.replace(self, tables=tuple(tables))

    def placements(
        self, tables: Mapping[str, TableConfig]
    ) -> dict[str, TablePlacement]:
        """The placement of each table.

        Raises:
          ValueError: the plan was made for other tables.
        """
        mine = {table.name: (table.num_rows, table.dim) for table in self.tables}
        others = {name: (table.num_rows, table.dim) for name, table in tables.items()}
        if mine != others:
            name = next(iter(dict(mine.items() ^ others.items())))
            raise ValueError(
                f"the plan has {_size(mine.get(name))} table {name!r}, the collection "
                f"{_size(others.get(name))}; make a plan for these tables"
            )
        return {table.name: table.placement for table in self.tables}

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {"version": VERSION, **codec.document(self)}

    @classmethod
    def from_json(cls, document: codec.Json) -> EmbeddingPlan:
        """Reads a plan from a JSON object that `to_json` made.

        Raises:
          ValueError: the object is not a plan, or has another version.
        """
        if not isinstance(document, dict) or "version" not in document:
            raise ValueError(
                f'expected a plan of "version" {VERSION}, as to_json makes it, got '
                f"{type(document).__name__}"
            )
        label = "this is no plan of to_json"
        plan = codec.read(cls, codec.without_version(document, VERSION, label), label)
        if problem := plan._problem():
            raise ValueError(f"{label}: {problem}")
        return plan

    def _problem(self) -> str:
        """A message if the plan is impossible, else ""."""
        for name in ("batch_size", "data", "model"):
            if not 1 <= getattr(self, name) < 2**31:
                return f'"{name}" must be in [1, 2^31), got {getattr(self, name)}'
        if len(self.devices) != self.model:
            return (
                f'"model" is {self.model}, but there are {len(self.devices)} "devices"'
            )
        try:
            TableSettings(tables=(), **{n: getattr(self, n) for n in _EXCHANGE})
        except (TypeError, ValueError) as error:
            return str(error)
        numbers = (*self.hotness.values(), *self.distinct.values())
        if (self.memory or 0) < 0 or min(numbers, default=0) < 0:
            return '"memory", "hotness" and "distinct" must not be negative'
        names = [table.name for table in self.tables]
        if len({*names}) < len(names):
            return 'two "tables" have one name'
        for what, figures in (("tables", self.tables), ("devices", self.devices)):
            for i, figure in enumerate(figures):
                for name, value in vars(figure).items():
                    if isinstance(value, int | float) and value < 0:
                        return f'"{what}[{i}].{name}" must not be negative, got {value}'
        for i, table in enumerate(self.tables):
            if not (1 <= table.num_rows < 2**31 and 1 <= table.dim < 2**31):
                return f'"tables[{i}]" has {table.num_rows} rows of {table.dim} numbers'
            ranges = table.placement.ranges
            if not all(is_range(r) for r in ranges):
                return (
                    f'"tables[{i}].placement.ranges" are no ranges of hands: {ranges}'
                )
        return ""

    def __str__(self) -> str:
        tables = [["table", "rows", "dim", "placement", "memory", "ids", "sent", "why"]]
        hosted = any(t.host for t in self.tables)
        if hosted:
            tables[0].insert(5, "in the host")
        for t in self.tables:
            memory, sent = readable_bytes(t.memory), readable_bytes(t.sent)
            row = [t.name, f"{t.num_rows:,}", str(t.dim), _kind(t.placement), memory]
            row += [readable_bytes(t.host)] if hosted else []
            tables.append([*row, f"{t.entries:,.0f}", sent, t.why])
        devices = [["device", "tables", "state", "temporary", "memory", "ids", "sent"]]
        numbered = itertools.groupby(range(self.model), self.devices.__getitem__)
        for d, same in numbered:  # adjacent devices with equal figures share a line
            first, last = (numbers := list(same))[0], numbers[-1]
            name = str(first) if first == last else f"{first}-{last}"
            sizes = map(readable_bytes, (d.tables, d.state, d.temporary, d.total))
            row = [name, *sizes, f"{d.entries:,.0f}", readable_bytes(d.sent)]
            devices.append(row)
        head = f"batch {self.batch_size:,}, data={self.data}, model={self.model}"
        return "\n".join([head, *_columns(tables), *_columns(devices)])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the cells of rows; returns a line for each row."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    pairs = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(cell.ljust(n) for cell, n in row).rstrip() for row in pairs]


def _kind(placement: TablePlacement) -> str:
    """The name of the placement, with the number of pieces if there are several."""
    pieces = len(placement.ranges)
    return f"{placement.kind} / {pieces}" if pieces > 1 else placement.kind


def _size(shape: tuple[int, int] | None) -> str:
    return "no" if shape is None else f"the {shape[0]:,} x {shape[1]:,}"
