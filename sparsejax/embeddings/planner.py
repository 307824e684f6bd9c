"""Where the tables of a collection should lie on a mesh, and what that costs.

A step takes as long as the busiest device, which reads and updates rows, and sends ids, sums and
gradients. The planner begins with every table divided by its rows, and with every table whole on
the device with the least work. From each of the two it goes on, one table at a time, to what costs
less; it keeps the better end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from sparsejax.embeddings.config import FeatureConfig, Placement, TableConfig
from sparsejax.embeddings.placement import (
    Range,
    Stack,
    TablePlacement,
    stack_tables,
)
from sparsejax.mesh import exchange
from sparsejax.mesh.layout import (
    ROW_MULTIPLE,
    check_axis_sizes,
    device_memory,
    padded_rows,
    readable_bytes,
)
from sparsejax.optimizers.rules import Rule

VERSION = 1

# How long an id takes on the device that has its row, and a byte of this row, as bytes that NVLink
# of an H200 sends meanwhile, 450 GB/s. A lookup, sort and update of 1.7 million ids takes 504 us
# with rows of 64 bytes, 780 us with rows of 256: "narrow" in benchmarks/embedding_times.py.
_ID, _BYTE = 109, 0.38

# Whole and replicated tables may take so much more memory than rows would: a part of it, bytes.
_SPARE = 0.1, 2**26

# Bytes of the numbers that sorts and gathers of ids make for each of them.
_ENTRY = 48

# Rows are not cut into narrower pieces.
_NARROWEST = 8


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


def plan_embeddings(
    tables: Mapping[str, TableConfig],
    features: Mapping[str, str | FeatureConfig],
    *,
    batch_size: int,
    data: int = 1,
    model: int = 1,
    hotness: Mapping[str, float] | None = None,
    rule: Rule,
    memory: int | None = None,
) -> EmbeddingPlan:
    """Places the tables of a collection on a mesh. No arrays are made.

    >>> tables = {"item": TableConfig(10_000_000, 64), "city": TableConfig(1000, 64)}
    >>> rule = optimizers.rowwise_adagrad(0.02)
    >>> features = {"item": "item", "city": "city"}
    >>> planned = plan_embeddings(
    ...     tables, features, batch_size=8192, model=4, hotness={"item": 20}, rule=rule
    ... )
    >>> {table.name: table.placement.kind for table in planned.tables}
    {'item': 'rows', 'city': 'replicated'}

    It balances the rows that devices read and send, and their memory. A table is replicated if
    its gradients are cheaper to add up than its ids to exchange. The others are divided by rows,
    whole, or cut by columns, whichever costs the busiest device less. What a step costs is an
    estimate for GPUs of one host, from bytes sent, ids, and bytes of their rows.

    Bytes sent are exact for a program whose batch has room for the ids of `hotness`, as are those
    of tables and state. Temporary arrays are an estimate, of XLA's form. Layers and the batch
    itself are not counted.

    Args:
      tables: by name. Those with a placement keep it.
      features: by name, as `EmbeddingCollection` takes them.
      batch_size: examples of a step, on all devices.
      data: devices that repeat the tables.
      model: devices over which tables are divided.
      hotness: ids of an example that there is room for, by feature. By default 1, and `length`
        for a feature in order.
      rule: of the optimizer.
      memory: bytes of a device; by default what JAX may take of the first device here, if
        that is known.

    Raises:
      ValueError: the memory does not suffice, the mesh cannot be made or does not divide the
        batch, or a name is unknown.
    """
    check_axis_sizes(data, model)
    if batch_size < 1 or batch_size % (data * model):
        raise ValueError(
            f"batch_size must be a positive multiple of the {data * model} devices, got "
            f"{batch_size}"
        )
    configs = {
        name: FeatureConfig(f) if isinstance(f, str) else f
        for name, f in features.items()
    }
    for name, config in configs.items():
        if config.table not in tables:
            raise ValueError(
                f"feature {name!r} reads the table {config.table!r}, but the tables are "
                f"{sorted(tables)}"
            )
    hotness = {} if hotness is None else dict(hotness)
    for name, hot in hotness.items():
        if name not in configs:
            raise ValueError(
                f"hotness has a feature {name!r}; there are {sorted(configs)}"
            )
        if not (math.isfinite(hot) and hot > 0):
            raise ValueError(f"hotness of {name!r} must be positive, got {hot}")
    hotness = {name: float(hotness.get(name, f.bags)) for name, f in configs.items()}
    memory = device_memory() if memory is None else memory
    job = _Job(dict(tables), configs, hotness, rule, batch_size, data, model)
    stack_tables(job.tables, configs, {})  # raises for widths that cannot be cut
    kept = memory  # for rows and state
    for _ in range(2):
        best = _best(job, kept)
        placements = {name: _placement(job, p) for name, p in best.placed.items()}
        stacks = stack_tables(job.tables, configs, placements, hotness)
        devices, sent = _figures(job, stacks)
        needed = devices[0].total
        if memory is None or needed <= memory:
            break
        kept = memory - devices[0].temporary
    if memory is not None and needed > memory:
        rows, state, temporary = map(
            readable_bytes, (devices[0].tables, devices[0].state, devices[0].temporary)
        )
        raise ValueError(
            f"the tables need {readable_bytes(needed)} of each device, which has "
            f"{readable_bytes(memory)}: {rows} for rows, {state} for the state of "
            f'{rule.name}, {temporary} during a step; take more devices along "model", '
            "bfloat16, or a rule with less state"
        )
    return EmbeddingPlan(
        batch_size=batch_size,
        data=data,
        model=model,
        memory=memory,
        hotness=hotness,
        tables=tuple(
            _table(job, name, best.placed[name], sent[name]) for name in tables
        ),
        devices=devices,
    )


@dataclasses.dataclass(frozen=True)
class _Job:
    """What is planned."""

    tables: dict[str, TableConfig]
    features: dict[str, FeatureConfig]
    hotness: dict[str, float]
    rule: Rule
    batch: int
    data: int
    model: int

    @functools.cached_property
    def readers(self) -> dict[str, list[str]]:
        """The features of each table."""
        found: dict[str, list[str]] = {name: [] for name in self.tables}
        for name, config in self.features.items():
            found[config.table].append(name)
        return found

    def ids(self, table: str) -> float:
        """Of an example."""
        return sum(self.hotness[name] for name in self.readers[table])

    def bags(self, table: str) -> int:
        """Of an example."""
        return sum(self.features[name].bags for name in self.readers[table])

    def is_weighted(self, table: str) -> bool:
        """Whether ids are exchanged with weights."""
        combiners = [self.features[name].combiner for name in self.readers[table]]
        return any(combiner in ("mean", "sqrtn") for combiner in combiners)

    def state(self, rule: Rule | None, dim: int) -> int:
        """Bytes of state of a row."""
        rule = rule or self.rule
        arrays = jax.eval_shape(lambda: rule.init((2, dim)))
        size = sum(4 * math.prod(array.shape[1:]) for array in arrays.values())
        return size + 4 * rule.decays  # the step of its last update


class _Placed(NamedTuple):
    """A choice for a table.

    Attributes:
      kind: of placement.
      parts: the device of each piece.
    """

    kind: Placement
    parts: tuple[int, ...] = ()


def _placement(job: _Job, placed: _Placed) -> TablePlacement:
    hands = ROW_MULTIPLE // job.model
    ranges = tuple(Range(part * hands, hands) for part in placed.parts)
    return TablePlacement(placed.kind, ranges)


class _Load:
    """The tables of a stack, added up."""

    def __init__(self, job: _Job, dim: int, dtype: np.dtype, divided: bool, rule):
        self.job, self.dim, self.divided = job, dim, divided
        self.row = dim * dtype.itemsize
        self.row_and_state = self.row + job.state(rule, dim)
        self.dtype = dtype
        # Of tables that are divided by rows or replicated, and of those of each device.
        self.rows, self.ids, self.bags = (np.zeros(job.model + 1) for _ in range(3))
        self.weighted = 0
        self._cost: tuple[np.ndarray, float] | None = None

    def add(self, name: str, parts: Sequence[int], sign: int) -> None:
        """A table, in pieces on these devices, or on all; or takes it away."""
        for part in parts or (-1,):
            self.rows[part] += sign * self.job.tables[name].num_rows
            self.ids[part] += sign * self.job.ids(name)
            self.bags[part] += sign * self.job.bags(name)
        self.weighted += sign * self.job.is_weighted(name)
        self._cost = None

    @property
    def num_rows(self) -> int:
        """Of the parameter."""
        if not self.divided:
            return padded_rows(int(self.rows[-1]))
        hands = ROW_MULTIPLE // self.job.model
        slots = math.ceil(self.rows[-1] / ROW_MULTIPLE)
        slots += math.ceil(max(self.rows[:-1]) / hands)
        return padded_rows(slots * ROW_MULTIPLE)

    def cost(self) -> tuple[np.ndarray, float]:
        """What a step costs each device, in bytes sent, and bytes of memory."""
        if self._cost is None:
            job = self.job
            if not self.rows.any():
                return np.zeros(job.model), 0.0
            batch = job.batch / job.data
            even = self.ids[-1] / job.model
            owned = np.array([even]) if not self.divided else self.ids[:-1] + even
            sent = _sent(
                job,
                bags=int(self.bags.sum()),
                ids=float(self.ids.sum()),
                dim=self.dim,
                dtype=self.dtype,
                weighted=self.weighted > 0,
                owned=owned,
                owner_bags=int(self.bags[-1] + max(self.bags[:-1])),
                replicated_rows=None if self.divided else self.num_rows,
            )
            work = owned * batch * (_ID + self.row * _BYTE)
            if not self.divided and sent.ids == 0:  # the gradient is added as a whole
                work += self.num_rows * self.row * _BYTE
            memory = self.num_rows * self.row_and_state
            memory /= job.model if self.divided else 1
            self._cost = np.broadcast_to(work, job.model) + sent.total, memory
        return self._cost


def _sent(
    job: _Job, *, bags, ids, dim, dtype, weighted, owned, owner_bags, replicated_rows
) -> exchange.Sent:
    """Bytes that each device sends for a stack. Sizes are those of an example."""
    if ids == 0:
        return exchange.Sent(0, 0, 0)
    return exchange.bytes_sent(
        bags * job.batch,
        math.ceil(ids * job.batch),
        dim,
        data=job.data,
        model=job.model,
        wire_dtype=dtype,
        weighted=weighted,
        share=float(owned.max() / ids),
        owner_rows=owner_bags * job.batch // (job.data * job.model),
        replicated_rows=replicated_rows,
    )


class _Choice:
    """A placement of all tables, and its cost. Each choice changes it."""

    def __init__(self, job: _Job, limit: float):
        self.job, self.limit = job, limit
        self.placed: dict[str, _Placed] = {}
        self.loads: dict[tuple, _Load] = {}
        # Of whole tables and pieces, on each device: numbers read, and numbers kept.
        self.whole = np.zeros((2, job.model))

    def put(self, name: str, placed: _Placed) -> None:
        """Places a table, also one that is placed already."""
        if name in self.placed:
            self._add(name, self.placed[name], -1)
        self._add(name, placed, 1)
        self.placed[name] = placed

    def _add(self, name: str, placed: _Placed, sign: int) -> None:
        table = self.job.tables[name]
        dim = table.dim // max(1, len(placed.parts))
        key = (dim, table.dtype, placed.kind != "replicated", table.rule)
        if key not in self.loads:
            self.loads[key] = _Load(self.job, *key)
        self.loads[key].add(name, placed.parts, sign)
        for part in placed.parts:
            size = np.array([self.job.ids(name), table.num_rows])
            self.whole[:, part] += sign * size * dim

    def least_busy(self, count: int) -> tuple[int, ...]:
        """Devices with the least work of whole tables, for this many pieces."""
        order = np.lexsort(self.whole[::-1]).tolist()
        return tuple(order[i % len(order)] for i in range(count))

    def costs(self) -> np.ndarray:
        """Of each device."""
        return np.sum([load.cost()[0] for load in self.loads.values()], axis=0)

    def memory(self) -> float:
        """Of each device."""
        return sum(load.cost()[1] for load in self.loads.values())

    def cost(self) -> tuple[float, float, float]:
        """What is to be least: what memory lacks, the busiest device, and all devices."""
        costs = self.costs()
        return max(0.0, self.memory() - self.limit), costs.max(), costs.sum()

    def take_best(self, name: str) -> None:
        """Moves a table to what costs least; it stays where nothing costs less."""
        costs, options = [], [self.placed[name], *_options(self, name)]
        for placed in options:
            self.put(name, placed)
            costs.append(self.cost())
        self.put(name, options[costs.index(min(costs))])


def _best(job: _Job, memory: int | None) -> _Choice:
    """The better one of two choices."""
    kinds: dict[str, Placement] = {}
    for name, table in job.tables.items():
        if (kind := table.placement or _copied(job, name)) is not None:
            kinds[name] = kind
    # The largest work first.
    names = sorted(job.tables, key=lambda n: -job.ids(n) * job.tables[n].dim)

    def begun(kind: Placement, limit: float) -> _Choice:
        choice = _Choice(job, limit)
        for name in names:
            own = kinds.get(name, kind)
            pieces = {"columns": job.tables[name].pieces, "table": 1}.get(own, 0)
            choice.put(name, _Placed(own, choice.least_busy(pieces)))
        return choice

    by_rows = begun("rows", math.inf)
    part, least = _SPARE
    limit = by_rows.memory() + max(by_rows.memory() * part, least)
    limit = limit if memory is None else min(limit, memory)
    choices = []
    for kind in ("rows", "table") if job.model > 1 else ("rows",):
        choice = begun(kind, limit)
        free = [name for name in names if name not in kinds]
        for name in reversed(free):  # what is read least need not be whole
            if choice.cost()[0]:
                choice.take_best(name)
        for name in free * 2:
            choice.take_best(name)
        choices.append(choice)
    return min(choices, key=_Choice.cost)


def _copied(job: _Job, name: str) -> Literal["replicated"] | None:
    """ "replicated" if the gradient of all rows is cheaper to add up than ids to exchange."""
    table, entries = job.tables[name], job.ids(name) * job.batch
    if job.data * job.model == 1 or not entries:
        return None
    if not exchange.adds_all(padded_rows(table.num_rows), math.floor(entries)):
        return None
    costs = []
    for kind in ("replicated", "rows"):
        choice = _Choice(job, math.inf)
        choice.put(name, _Placed(kind))
        costs.append(choice.cost())
    return "replicated" if costs[0] < costs[1] else None


def _options(choice: _Choice, name: str) -> list[_Placed]:
    """Where a table of divided rows could be."""
    found, pieces, dim = [_Placed("rows")], 2, choice.job.tables[name].dim
    if choice.job.model == 1:
        return found
    choice.put(name, found[0])  # its own work does not count
    found.append(_Placed("table", choice.least_busy(1)))
    while pieces <= choice.job.model:
        if dim % pieces == 0 and dim // pieces >= _NARROWEST:
            found.append(_Placed("columns", choice.least_busy(pieces)))
        pieces *= 2
    return found


class _Figures(NamedTuple):
    """Of the stacks that a collection makes.

    Attributes:
      devices: of the plan.
      sent: by table, its part of the bytes that each device sends.
    """

    devices: tuple[PlannedDevice, ...]
    sent: dict[str, float]


def _figures(job: _Job, stacks: Sequence[Stack]) -> _Figures:
    rows = state = sent = temporary = 0
    entries, work = np.zeros(job.model), np.zeros(job.model)
    of_table = dict.fromkeys(job.tables, 0.0)
    for stack in stacks:
        own = stack.num_rows // (job.model if stack.divided else 1)
        row = stack.dim * stack.dtype.itemsize
        rows += own * row
        state += own * job.state(stack.rule, stack.dim)
        if not stack.features:
            continue
        ids = sum(feature.hotness for feature in stack.features)
        owned = np.full(job.model, ids / job.model)
        if stack.divided:
            owned = stack.ids_of_owners(job.model)
        entries += owned * job.batch / job.data
        work += owned * job.batch / job.data * row
        weighted = (f.config.combiner in ("mean", "sqrtn") for f in stack.features)
        crossing = _sent(
            job,
            bags=stack.bags,
            ids=ids,
            dim=stack.dim,
            dtype=stack.dtype,
            weighted=any(weighted),
            owned=owned,
            owner_bags=stack.bags_of_owner(job.model),
            replicated_rows=None if stack.divided else stack.num_rows,
        )
        sent += crossing.total
        temporary = max(temporary, _temporary(job, stack, ids, crossing))
        for feature in stack.features:
            part = crossing.ids * feature.hotness / ids
            part += (crossing.total - crossing.ids) * feature.config.bags / stack.bags
            of_table[feature.table.name] += part
    devices = (
        PlannedDevice(
            tables=rows,
            state=state,
            temporary=temporary,
            entries=float(entries[i]),
            work=float(work[i]),
            sent=sent,
        )
        for i in range(job.model)
    )
    return _Figures(tuple(devices), of_table)


def _temporary(job: _Job, stack: Stack, ids: float, sent: exchange.Sent) -> int:
    """Bytes of the arrays that a step makes for a stack.

    They are those of a step in which all devices gather all ids, see `exchange`: the program
    keeps room for it. Our GPU programs do without the sums of the gradients by row.
    """
    row, devices = stack.dim * 4, job.data * job.model  # sums are in float32
    bags = job.batch * stack.bags
    if not stack.divided and devices > 1 and not sent.ids:  # added up as a whole
        return 2 * stack.num_rows * row + bags // devices * row
    entries = math.ceil(ids * job.batch)
    own = stack.num_rows // (job.model if stack.divided else 1)
    of_bags = bags // job.data + bags  # of the devices along "model", and of all
    return (of_bags + min(entries, own)) * row + _ENTRY * entries


def _table(job: _Job, name: str, placed: _Placed, sent: float) -> PlannedTable:
    table = job.tables[name]
    dim = table.dim // max(1, len(placed.parts))
    row = dim * table.dtype.itemsize + job.state(table.rule, dim)
    return PlannedTable(
        name=name,
        num_rows=table.num_rows,
        dim=table.dim,
        placement=_placement(job, placed),
        why=_why(job, name, placed),
        memory=table.num_rows * row * max(1, len(placed.parts)),
        entries=job.ids(name) * job.batch,
        sent=round(sent),
    )


def _why(job: _Job, name: str, placed: _Placed) -> str:
    if job.tables[name].placement is not None:
        return "given"
    if job.data * job.model == 1:
        return "one device"
    if not job.ids(name):
        return "no feature reads it"
    match placed.kind:
        case "replicated":
            return "adding up its gradients costs less than exchanging its ids"
        case "table":
            return "a bag has one owner, and devices stay balanced"
        case "columns":
            return "a bag has few owners, and whole it would keep one busy"
        case _:
            return "an equal share on each device"


def _kind(placement: TablePlacement) -> str:
    """With the number of pieces, if there are several."""
    pieces = len(placement.ranges)
    return f"{placement.kind} / {pieces}" if pieces > 1 else placement.kind


def _size(shape: tuple[int, int] | None) -> str:
    return "no" if shape is None else f"the {shape[0]:,} x {shape[1]:,}"
