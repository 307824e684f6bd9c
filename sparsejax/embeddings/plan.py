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
    """The settings of the tables of a collection that its compiled programs depend on.

    `EmbeddingCollection(...).settings` has them: for `fit` and loops of your own. A plan gives
    them to the collection, and checkpoints of `fit` contain those of the exchange.

    >>> tables = {"item": TableConfig(1000, 8)}
    >>> embeddings = EmbeddingCollection(tables, {"item": "item"}, rngs=nnx.Rngs(0))
    >>> embeddings.settings.replaced(exchange_room=2.0).exchange
    {'wire_dtype': None, 'exchange_room': 2.0}

    Attributes:
      tables: the configurations by name: their capacity, where their rows are, and placements.
      placements: placements of tables whose configuration has none.
      hotness: ids of an example, by feature; one for each bag by default.
      wire_dtype: dtype of sums and gradients that cross between devices; None for that of
        each table.
      exchange_room: places for ids of each pair of devices, as a multiple of an even share;
        None for the default of `sparsejax.mesh.exchange.places`.
      distinct: how many rows of each table the examples of a device have ids of; None if that
        is not known.
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
        """The settings of a new collection; those of the exchange go before its plan."""
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
        """The settings with those that are given, and are not None, in place of theirs."""
        given = {name: value for name, value in settings.items() if value is not None}
        return dataclasses.replace(self, **given)

    def stacks(self, features: Mapping[str, FeatureConfig]) -> tuple[Stack, ...]:
        """The stacks of the tables, see `stack_tables`."""
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
      num_rows: number of its rows.
      dim: numbers in a row.
      placement: how it is placed on a mesh.
      why: the reason, in words.
      memory: bytes of its rows and their state, counted once; for a dynamic table with its
        index.
      entries: number of ids in a batch.
      sent: its part of the bytes that each device sends in a step.
      host: bytes of `memory` that are in the memory of the host.
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
    """The figures of a device along "model" in a plan. Those along "data" are alike.

    Attributes:
      tables: bytes of rows.
      state: bytes of the state of the optimizer.
      temporary: bytes of the arrays of a step: ids, sums, and gradients of bags and of rows.
      entries: ids whose rows it reads.
      work: bytes of these rows.
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
        """Bytes of memory."""
        return self.tables + self.state + self.temporary


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingPlan:
    """Where tables lie on a mesh: `EmbeddingCollection(tables, features, plan=plan)`.

    It runs on every mesh, and is best on the one that it was made for. `print(plan)` shows it.

    >>> tables, sizes = {"item": TableConfig(1_000_000, 16)}, {"batch_size": 64, "model": 4}
    >>> planned = plan_embeddings(tables, {"item": "item"}, **sizes, rule=optimizers.sgd(0.1))
    >>> planned.devices[0].tables  # a quarter, with a few rows beyond those of the table
    16252928
    >>> EmbeddingPlan.from_json(planned.to_json()) == planned
    True

    Attributes:
      batch_size: examples of a step, on all devices.
      data: size of the mesh axis "data".
      model: size of the mesh axis "model".
      memory: memory of a device in bytes; None if it is not known.
      hotness: number of ids in an example, by feature.
      distinct: number of different rows of each table that the examples of one device read;
        empty if that is not known.
      tables: figures of each table.
      devices: figures of each device along "model".
      wire_dtype: dtype of sums and gradients that cross between devices; None for the dtype of
        each table.
      exchange_room: places for ids of each pair of devices, as a multiple of an even share;
        None for the default of `EmbeddingCollection`.
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
        """The plan for tables of the same ids and another width, which are not cut."""
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
        """The plan of a JSON object, which `to_json` has made.

        Raises:
          ValueError: it is no plan, or of another version.
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
        """The fault that makes the plan impossible, or ""."""
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
        for d, same in numbered:  # neighbours that are alike
            first, last = (numbers := list(same))[0], numbers[-1]
            name = str(first) if first == last else f"{first}-{last}"
            sizes = map(readable_bytes, (d.tables, d.state, d.temporary, d.total))
            row = [name, *sizes, f"{d.entries:,.0f}", readable_bytes(d.sent)]
            devices.append(row)
        head = f"batch {self.batch_size:,}, data={self.data}, model={self.model}"
        return "\n".join([head, *_columns(tables), *_columns(devices)])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the cells below each other."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    pairs = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(cell.ljust(n) for cell, n in row).rstrip() for row in pairs]


def _kind(placement: TablePlacement) -> str:
    """The kind, with the number of pieces, if there are several."""
    pieces = len(placement.ranges)
    return f"{placement.kind} / {pieces}" if pieces > 1 else placement.kind


def _size(shape: tuple[int, int] | None) -> str:
    return "no" if shape is None else f"the {shape[0]:,} x {shape[1]:,}"
