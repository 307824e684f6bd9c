"""What a plan of embedding tables says: their placements, and figures of tables and devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sparsejax.embeddings.config import TableConfig
from sparsejax.embeddings.placement import Range, TablePlacement
from sparsejax.mesh.layout import readable_bytes

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """What a plan says of a table.

    Attributes:
      name: of the table.
      num_rows: of the table.
      dim: numbers in a row.
      placement: how it lies on a mesh.
      why: the reason, in words.
      memory: bytes of its rows and their state, once.
      entries: ids of a batch.
      sent: its part of the bytes that each device sends in a step.
    """

    name: str
    num_rows: int
    dim: int
    placement: TablePlacement
    why: str
    memory: int
    entries: float
    sent: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """What a plan says of a device along "model". Those along "data" are alike.

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
      data: size of the axis.
      model: size of the axis.
      memory: bytes of a device that there are; None if that is not known.
      hotness: ids of an example, by feature.
      tables: what it says of each table.
      devices: what it says of each device along "model".
    """

    batch_size: int
    data: int
    model: int
    memory: int | None
    hotness: dict[str, float]
    tables: tuple[PlannedTable, ...]
    devices: tuple[PlannedDevice, ...]

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
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, document: object) -> EmbeddingPlan:
        """The plan of a JSON object, which `to_json` has made.

        Raises:
          ValueError: it is none, or of another version.
        """
        if not isinstance(document, dict) or document.get("version") != VERSION:
            raise ValueError(
                f'expected a plan of "version" {VERSION}, as to_json makes it, got '
                f"{str(document)[:60]}"
            )
        values = {key: value for key, value in document.items() if key != "version"}

        def table(table: dict[str, Any]) -> PlannedTable:
            kind, ranges = table["placement"]["kind"], table["placement"]["ranges"]
            placement = TablePlacement(kind, tuple(Range(*r) for r in ranges))
            return PlannedTable(**table | {"placement": placement})

        try:
            values["tables"] = tuple(map(table, values["tables"]))
            values["devices"] = tuple(PlannedDevice(**d) for d in values["devices"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no plan of to_json: {error}") from error

    def __str__(self) -> str:
        tables = [["table", "rows", "dim", "placement", "memory", "ids", "sent", "why"]]
        for t in self.tables:
            memory, sent = readable_bytes(t.memory), readable_bytes(t.sent)
            row = [t.name, f"{t.num_rows:,}", str(t.dim), _kind(t.placement), memory]
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
    """With the number of pieces, if there are several."""
    pieces = len(placement.ranges)
    return f"{placement.kind} / {pieces}" if pieces > 1 else placement.kind


def _size(shape: tuple[int, int] | None) -> str:
    return "no" if shape is None else f"the {shape[0]:,} x {shape[1]:,}"
