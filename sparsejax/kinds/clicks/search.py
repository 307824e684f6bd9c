"""The search for the best placement of embedding tables.

A step takes as long as its busiest device, which reads and updates rows, and sends ids, sums and
gradients. The search starts from two choices: every table divided by rows, and every table whole
on the device with the least work. From each of them it moves one table at a time to a cheaper
placement. The better result is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from sparsejax.embeddings.config import FeatureConfig, Placement, TableConfig
from sparsejax.embeddings.placement import Distinct, Range, TablePlacement
from sparsejax.mesh import exchange
from sparsejax.mesh.layout import ROW_MULTIPLE, padded_rows
from sparsejax.optimizers.rules import Rule
from sparsejax.sparse import MAX_ENTRIES

# Costs are in bytes that NVLink of an H200 (450 GB/s) sends in the same time. The first cost is
# for each id that a device looks up, the second for each byte of its row. A lookup, sort and
# update of 1.7 million ids takes 504 us with rows of 64 bytes, and 780 us with rows of 256 bytes:
# "narrow" in benchmarks/results/embedding_times.json.
_ID, _BYTE = 109, 0.38

# Whole and replicated tables may need more memory than divided rows would: by this share, and by
# this number of bytes.
_SPARE = 0.1, 2**26

# Least number of columns of a piece of a table.
_NARROWEST = 8


@dataclasses.dataclass(frozen=True)
class Problem:
    """A collection and a mesh to plan for."""

    tables: dict[str, TableConfig]
    features: dict[str, FeatureConfig]
    hotness: dict[str, float]
    rule: Rule
    batch: int
    data: int
    model: int
    distinct: dict[str, float]
    wire_dtype: jax.typing.DTypeLike | None = None
    exchange_room: float | None = None

    @property
    def examples(self) -> int:
        """Number of examples of a device."""
        return self.batch // (self.data * self.model)

    def known(self) -> tuple[int, float | None, Distinct | None]:
        """Further arguments of `Stack.share`."""
        rows = tuple(self.distinct.items())
        known = Distinct(self.examples, rows) if rows else None
        return self.examples, self.exchange_room, known

    @functools.cached_property
    def readers(self) -> dict[str, list[str]]:
        """The names of the features that read each table."""
        found: dict[str, list[str]] = {name: [] for name in self.tables}
        for name, config in self.features.items():
            found[config.table].append(name)
        return found

    def ids(self, table: str) -> float:
        """Number of ids of an example that are looked up in a table."""
        return sum(self.hotness[name] for name in self.readers[table])

    def bags(self, table: str) -> int:
        """Number of bags of an example that are made from a table."""
        return sum(self.features[name].bags for name in self.readers[table])

    def is_weighted(self, table: str) -> bool:
        """Whether ids of a table are exchanged with weights."""
        combiners = [self.features[name].combiner for name in self.readers[table]]
        return any(combiner in ("mean", "sqrtn") for combiner in combiners)

    def state(self, rule: Rule | None, dim: int) -> int:
        """Bytes of optimizer state for a row."""
        rule = rule or self.rule
        arrays = jax.eval_shape(lambda: rule.init((2, dim)))
        size = sum(4 * math.prod(array.shape[1:]) for array in arrays.values())
        return size + 4 * rule.decays  # number of the row's last step


class Placed(NamedTuple):
    """A placement for a table.

    Attributes:
      kind: kind of the placement.
      parts: number of the device of each piece.
    """

    kind: Placement
    parts: tuple[int, ...] = ()

    def placement(self, model: int) -> TablePlacement:
        """Converts this placement to a `TablePlacement` on `model` devices."""
        hands = ROW_MULTIPLE // model
        ranges = tuple(Range(part * hands, hands) for part in self.parts)
        return TablePlacement(self.kind, ranges)


class Load:
    """Rows, ids and bags of a stack's tables, added up, and their cost."""

    def __init__(
        self, problem: Problem, dim: int, dtype: np.dtype, divided: bool, rule
    ):
        self.problem, self.dim, self.divided = problem, dim, divided
        self.row = dim * dtype.itemsize
        self.row_and_state = self.row + problem.state(rule, dim)
        self.dtype = dtype
        # Each array has a sum for the tables of each device; its last element is the sum for
        # tables that are divided over all devices or replicated.
        zeros = np.zeros((4, problem.model + 1))
        self.rows, self.ids, self.bags, self.distinct = zeros
        self.weighted = 0
        self._cost: tuple[np.ndarray, float] | None = None

    def add(self, name: str, parts: Sequence[int], sign: int) -> None:
        """Adds a table, in pieces on these devices or on all devices; with `sign` -1 removes
        it.
        """
        for part in parts or (-1,):
            self.rows[part] += sign * self.problem.tables[name].num_rows
            self.ids[part] += sign * self.problem.ids(name)
            self.bags[part] += sign * self.problem.bags(name)
            rows = self.problem.tables[name].num_rows
            if self.problem.ids(name):
                self.distinct[part] += sign * self.problem.distinct.get(name, rows)
        self.weighted += sign * self.problem.is_weighted(name)
        self._cost = None

    @property
    def num_rows(self) -> int:
        """Number of rows of the parameter."""
        if not self.divided:
            return padded_rows(int(self.rows[-1]))
        hands = ROW_MULTIPLE // self.problem.model
        slots = math.ceil(self.rows[-1] / ROW_MULTIPLE)
        slots += math.ceil(max(self.rows[:-1]) / hands)
        return padded_rows(slots * ROW_MULTIPLE)

    def cost(self) -> tuple[np.ndarray, float]:
        """The cost of a step on each device, in bytes sent, and the bytes of memory per device."""
        if self._cost is None:
            problem = self.problem
            if not self.rows.any():
                return np.zeros(problem.model), 0.0
            batch = problem.batch / problem.data
            even = self.ids[-1] / problem.model
            owned = np.array([even]) if not self.divided else self.ids[:-1] + even
            sent = sent_for(
                problem,
                bags=int(self.bags.sum()),
                ids=float(self.ids.sum()),
                dim=self.dim,
                dtype=self.dtype,
                weighted=self.weighted > 0,
                share=exchange.Share(
                    problem.exchange_room,
                    float(owned.max() / (self.ids.sum() or 1.0)),
                    int(self.bags[-1] + max(self.bags[:-1])) * problem.examples,
                    self.distinct[-1] / problem.model + max(self.distinct[:-1]),
                ),
                replicated_rows=None if self.divided else self.num_rows,
            )
            work = owned * batch * (_ID + self.row * _BYTE)
            if not self.divided and sent.ids == 0:  # the whole gradient is summed
                work += self.num_rows * self.row * _BYTE
            memory = self.num_rows * self.row_and_state
            memory /= problem.model if self.divided else 1
            self._cost = np.broadcast_to(work, problem.model) + sent.total, memory
        return self._cost


def sent_for(
    problem: Problem,
    *,
    bags: int,
    ids: float,
    dim: int,
    dtype: np.dtype,
    weighted: bool,
    share: exchange.Share,
    replicated_rows: int | None,
) -> exchange.Sent:
    """Bytes that each device sends for a stack. Sizes are for one example."""
    if not bags:
        return exchange.Sent(0, 0, 0)
    return exchange.bytes_sent(
        bags * problem.batch,
        math.ceil(ids * problem.batch),
        dim,
        data=problem.data,
        model=problem.model,
        wire_dtype=problem.wire_dtype or dtype,
        share=share,
        weighted=weighted,
        replicated_rows=replicated_rows,
    )


class Choice:
    """A placement of all tables, and its cost, which is updated when a table is moved."""

    def __init__(self, problem: Problem, limit: float):
        self.problem, self.limit = problem, limit
        self.placed: dict[str, Placed] = {}
        self.loads: dict[tuple, Load] = {}
        # For whole tables and pieces, on each device: elements read in a step, elements stored.
        self.whole = np.zeros((2, problem.model))

    def put(self, name: str, placed: Placed) -> None:
        """Places a table, or moves it if it was placed before."""
        if name in self.placed:
            self._add(name, self.placed[name], -1)
        self._add(name, placed, 1)
        self.placed[name] = placed

    def _add(self, name: str, placed: Placed, sign: int) -> None:
        table = self.problem.tables[name]
        dim = table.dim // max(1, len(placed.parts))
        key = (dim, np.dtype(table.dtype), placed.kind != "replicated", table.rule)
        if key not in self.loads:
            self.loads[key] = Load(self.problem, *key)
        self.loads[key].add(name, placed.parts, sign)
        for part in placed.parts:
            size = np.array([self.problem.ids(name), table.num_rows])
            self.whole[:, part] += sign * size * dim

    def least_busy(self, count: int) -> tuple[int, ...]:
        """The `count` devices with the least work for whole tables."""
        order = np.lexsort(self.whole[::-1]).tolist()
        return tuple(order[i % len(order)] for i in range(count))

    def costs(self) -> np.ndarray:
        """The cost of a step on each device."""
        return np.sum([load.cost()[0] for load in self.loads.values()], axis=0)

    def memory(self) -> float:
        """Bytes of memory that a device needs."""
        return sum(load.cost()[1] for load in self.loads.values())

    def cost(self) -> tuple[float, float, float]:
        """The cost to minimize. In this order, it compares lacking memory, the cost of the busiest
        device, and the cost of all devices.
        """
        costs = self.costs()
        return max(0.0, self.memory() - self.limit), costs.max(), costs.sum()

    def take_best(self, name: str) -> None:
        """Moves a table to the cheapest placement; it is not moved if none is cheaper."""
        costs, options = [], [self.placed[name], *_options(self, name)]
        for placed in options:
            self.put(name, placed)
            costs.append(self.cost())
        self.put(name, options[costs.index(min(costs))])


def best(problem: Problem, memory: int | None) -> Choice:
    """Finds the better of two choices."""
    kinds: dict[str, Placement] = {}
    for name, table in problem.tables.items():
        if (kind := table.placement or _copied(problem, name)) is not None:
            kinds[name] = kind
    # The tables with the most ids and columns are placed first.
    names = sorted(
        problem.tables, key=lambda n: -problem.ids(n) * problem.tables[n].dim
    )

    def begun(kind: Placement, limit: float) -> Choice:
        choice = Choice(problem, limit)
        for name in names:
            own = kinds.get(name, kind)
            pieces = {"columns": problem.tables[name].pieces, "table": 1}.get(own, 0)
            choice.put(name, Placed(own, choice.least_busy(pieces)))
        return choice

    by_rows = begun("rows", math.inf)
    part, least = _SPARE
    limit = by_rows.memory() + max(by_rows.memory() * part, least)
    limit = limit if memory is None else min(limit, memory)
    choices = []
    for kind in ("rows", "table") if problem.model > 1 else ("rows",):
        choice = begun(kind, limit)
        free = [name for name in names if name not in kinds]
        for name in reversed(free):  # tables that are read least need not be whole
            if choice.cost()[0]:
                choice.take_best(name)
        for name in free * 2:
            choice.take_best(name)
        choices.append(choice)
    return min(choices, key=Choice.cost)


def _copied(problem: Problem, name: str) -> Literal["replicated"] | None:
    """Whether all devices should have a copy of a table.

    Returns:
      "replicated" if summing the gradient of all rows costs less than exchanging ids, else None.
    """
    table, entries = problem.tables[name], problem.ids(name) * problem.batch
    if problem.data * problem.model == 1 or not entries:
        return None
    if not exchange.adds_all(padded_rows(table.num_rows), math.floor(entries)):
        return None
    if not problem.distinct:
        # The popularity of ids is unknown. A table alone would be assumed to send each row at most
        # once, so each table gets an unlimited number of distinct rows.
        distinct = dict.fromkeys(problem.tables, float(MAX_ENTRIES))
        problem = dataclasses.replace(problem, distinct=distinct)
    costs = []
    for kind in ("replicated", "rows"):
        choice = Choice(problem, math.inf)
        choice.put(name, Placed(kind))
        costs.append(choice.cost())
    return "replicated" if costs[0] < costs[1] else None


def _options(choice: Choice, name: str) -> list[Placed]:
    """Possible placements of a table whose rows are now divided over all devices."""
    found, pieces, dim = [Placed("rows")], 2, choice.problem.tables[name].dim
    if choice.problem.model == 1:
        return found
    choice.put(name, found[0])  # removes the work of the table itself
    found.append(Placed("table", choice.least_busy(1)))
    while pieces <= choice.problem.model:
        if dim % pieces == 0 and dim // pieces >= _NARROWEST:
            found.append(Placed("columns", choice.least_busy(pieces)))
        pieces *= 2
    return found
