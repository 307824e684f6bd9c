"""The search for the best placement of embedding tables.

A step takes as long as the busiest device, which reads and updates rows, and sends ids, sums and
gradients. The search begins with every table divided by its rows, and with every table whole on
the device with the least work. From each of the two it goes on, one table at a time, to what costs
less. The better end is taken.
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

# How long an id takes on the device that has its row, and a byte of this row, as bytes that NVLink
# of an H200 sends meanwhile, 450 GB/s. A lookup, sort and update of 1.7 million ids takes 504 us
# with rows of 64 bytes, 780 us with rows of 256: "narrow" in benchmarks/results/embedding_times.json.
_ID, _BYTE = 109, 0.38

# Whole and replicated tables may take so much more memory than rows would: a part of it, bytes.
_SPARE = 0.1, 2**26

# Rows are not cut into narrower pieces.
_NARROWEST = 8


@dataclasses.dataclass(frozen=True)
class Problem:
    """A collection on a mesh that is planned."""

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

    def known(self) -> tuple[int, Distinct | None]:
        """Examples of a device, and of how many rows they have ids."""
        examples = self.batch // (self.data * self.model)
        if not self.distinct:
            return examples, None
        return examples, Distinct(examples, tuple(self.distinct.items()))

    @functools.cached_property
    def readers(self) -> dict[str, list[str]]:
        """The features of each table."""
        found: dict[str, list[str]] = {name: [] for name in self.tables}
        for name, config in self.features.items():
            found[config.table].append(name)
        return found

    def ids(self, table: str) -> float:
        """Ids of an example in a table."""
        return sum(self.hotness[name] for name in self.readers[table])

    def bags(self, table: str) -> int:
        """Bags of an example in a table."""
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


class Placed(NamedTuple):
    """A choice for a table.

    Attributes:
      kind: kind of the placement.
      parts: the device of each piece.
    """

    kind: Placement
    parts: tuple[int, ...] = ()

    def placement(self, model: int) -> TablePlacement:
        """The placement on this many devices."""
        hands = ROW_MULTIPLE // model
        ranges = tuple(Range(part * hands, hands) for part in self.parts)
        return TablePlacement(self.kind, ranges)


class Load:
    """The tables of a stack, added up."""

    def __init__(
        self, problem: Problem, dim: int, dtype: np.dtype, divided: bool, rule
    ):
        self.problem, self.dim, self.divided = problem, dim, divided
        self.row = dim * dtype.itemsize
        self.row_and_state = self.row + problem.state(rule, dim)
        self.dtype = dtype
        # Sums over tables that are divided or replicated, and over those of each device.
        zeros = np.zeros((4, problem.model + 1))
        self.rows, self.ids, self.bags, self.distinct = zeros
        self.weighted = 0
        self._cost: tuple[np.ndarray, float] | None = None

    def add(self, name: str, parts: Sequence[int], sign: int) -> None:
        """A table, in pieces on these devices, or on all; or takes it away."""
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
        """Rows of the parameter."""
        if not self.divided:
            return padded_rows(int(self.rows[-1]))
        hands = ROW_MULTIPLE // self.problem.model
        slots = math.ceil(self.rows[-1] / ROW_MULTIPLE)
        slots += math.ceil(max(self.rows[:-1]) / hands)
        return padded_rows(slots * ROW_MULTIPLE)

    def cost(self) -> tuple[np.ndarray, float]:
        """The costs of a step for each device, in bytes sent, and bytes of memory."""
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
                owned=owned,
                owner_bags=int(self.bags[-1] + max(self.bags[:-1])),
                distinct=self.distinct[-1] / problem.model + max(self.distinct[:-1]),
                replicated_rows=None if self.divided else self.num_rows,
            )
            work = owned * batch * (_ID + self.row * _BYTE)
            if not self.divided and sent.ids == 0:  # the gradient is added as a whole
                work += self.num_rows * self.row * _BYTE
            memory = self.num_rows * self.row_and_state
            memory /= problem.model if self.divided else 1
            self._cost = np.broadcast_to(work, problem.model) + sent.total, memory
        return self._cost


def sent_for(
    problem: Problem,
    *,
    bags,
    ids,
    dim,
    dtype,
    weighted,
    owned,
    owner_bags,
    distinct,
    replicated_rows,
) -> exchange.Sent:
    """Bytes that each device sends for a stack. Sizes are those of an example."""
    if not bags:
        return exchange.Sent(0, 0, 0)
    return exchange.bytes_sent(
        bags * problem.batch,
        math.ceil(ids * problem.batch),
        dim,
        data=problem.data,
        model=problem.model,
        wire_dtype=problem.wire_dtype or dtype,
        room=problem.exchange_room,
        weighted=weighted,
        share=float(owned.max() / ids),
        owner_rows=owner_bags * problem.batch // (problem.data * problem.model),
        distinct=distinct,
        replicated_rows=replicated_rows,
    )


class Choice:
    """A placement of all tables, and its cost. Each choice changes it."""

    def __init__(self, problem: Problem, limit: float):
        self.problem, self.limit = problem, limit
        self.placed: dict[str, Placed] = {}
        self.loads: dict[tuple, Load] = {}
        # Figures of whole tables and pieces on each device: numbers read, and kept.
        self.whole = np.zeros((2, problem.model))

    def put(self, name: str, placed: Placed) -> None:
        """Places a table, also one that is placed already."""
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
        """Devices with the least work of whole tables, for this many pieces."""
        order = np.lexsort(self.whole[::-1]).tolist()
        return tuple(order[i % len(order)] for i in range(count))

    def costs(self) -> np.ndarray:
        """The costs of a step for each device."""
        return np.sum([load.cost()[0] for load in self.loads.values()], axis=0)

    def memory(self) -> float:
        """Bytes of memory of each device."""
        return sum(load.cost()[1] for load in self.loads.values())

    def cost(self) -> tuple[float, float, float]:
        """The numbers to make least: what memory lacks, the busiest device, all devices."""
        costs = self.costs()
        return max(0.0, self.memory() - self.limit), costs.max(), costs.sum()

    def take_best(self, name: str) -> None:
        """Moves a table to what costs least; it stays where nothing costs less."""
        costs, options = [], [self.placed[name], *_options(self, name)]
        for placed in options:
            self.put(name, placed)
            costs.append(self.cost())
        self.put(name, options[costs.index(min(costs))])


def best(problem: Problem, memory: int | None) -> Choice:
    """The better one of two choices."""
    kinds: dict[str, Placement] = {}
    for name, table in problem.tables.items():
        if (kind := table.placement or _copied(problem, name)) is not None:
            kinds[name] = kind
    # The largest work first.
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
        for name in reversed(free):  # what is read least need not be whole
            if choice.cost()[0]:
                choice.take_best(name)
        for name in free * 2:
            choice.take_best(name)
        choices.append(choice)
    return min(choices, key=Choice.cost)


def _copied(problem: Problem, name: str) -> Literal["replicated"] | None:
    """ "replicated" if the gradient of all rows is cheaper to add up than ids to exchange."""
    table, entries = problem.tables[name], problem.ids(name) * problem.batch
    if problem.data * problem.model == 1 or not entries:
        return None
    if not exchange.adds_all(padded_rows(table.num_rows), math.floor(entries)):
        return None
    if not problem.distinct:
        # Alone, all its rows might cross once. Beside tables of any popularity they do not.
        distinct = dict.fromkeys(problem.tables, float(MAX_ENTRIES))
        problem = dataclasses.replace(problem, distinct=distinct)
    costs = []
    for kind in ("replicated", "rows"):
        choice = Choice(problem, math.inf)
        choice.put(name, Placed(kind))
        costs.append(choice.cost())
    return "replicated" if costs[0] < costs[1] else None


def _options(choice: Choice, name: str) -> list[Placed]:
    """Where a table of divided rows could be."""
    found, pieces, dim = [Placed("rows")], 2, choice.problem.tables[name].dim
    if choice.problem.model == 1:
        return found
    choice.put(name, found[0])  # its own work does not count
    found.append(Placed("table", choice.least_busy(1)))
    while pieces <= choice.problem.model:
        if dim % pieces == 0 and dim // pieces >= _NARROWEST:
            found.append(Placed("columns", choice.least_busy(pieces)))
        pieces *= 2
    return found
