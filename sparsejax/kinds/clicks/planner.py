"""Chooses the placement of a collection's tables on a mesh, and estimates its costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike, DTypeLike

from sparsejax.embeddings.config import FeatureConfig, TableConfig, feature_configs
from sparsejax.embeddings.host_slots import ROW_BYTES, SLOT_BYTES
from sparsejax.embeddings.placement import Stack, stack_tables
from sparsejax.embeddings.plan import (
    EmbeddingPlan,
    PlannedDevice,
    PlannedTable,
    TableSettings,
)
from sparsejax.kinds.clicks import search
from sparsejax.kinds.clicks.search import Placed, Problem, sent_for
from sparsejax.mesh import exchange
from sparsejax.mesh.layout import check_axis_sizes, device_memory, readable_bytes
from sparsejax.optimizers.rules import Rule

# Bytes of temporary arrays per id, made by sorts and gathers.
_ENTRY = 48

# Zipf's law is evaluated for each of the most frequent ids; rarer ids are grouped.
_RANKS = 2**16


def plan_embeddings(
    tables: Mapping[str, TableConfig],
    features: Mapping[str, str | FeatureConfig],
    *,
    batch_size: int,
    data: int = 1,
    model: int = 1,
    hotness: Mapping[str, float] | None = None,
    popularity: Mapping[str, float | ArrayLike] | None = None,
    rule: Rule,
    memory: int | None = None,
    wire_dtype: DTypeLike | None = None,
    exchange_room: float | None = None,
) -> EmbeddingPlan:
    """Chooses placements of a collection's tables on a mesh. No arrays are made.

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

    Bytes sent are exact for a program whose batch has capacity for the ids of `hotness`, as are
    bytes of tables and state. Temporary arrays are estimated for XLA's programs. Layers and the
    batch itself are not counted.

    Args:
      tables: configurations by name. Tables that have a placement keep it.
      features: features by name, as `EmbeddingCollection` takes them.
      batch_size: examples of a step, on all devices.
      data: number of devices that replicate the tables.
      model: number of devices over which tables are divided.
      hotness: capacity for ids in an example, by feature. By default 1, and `length` for a feature
          whose ids are kept in order.
      popularity: frequencies of a feature's ids, by feature: the count of each id, `[n]`, or the
          exponent of Zipf's law. A row that several ids of a batch read is then sent once. By
          default all ids of a device are distinct.
      rule: rule of the optimizer.
      memory: bytes of memory of a device; by default the memory that JAX may use of the first
          device here, if known.
      wire_dtype: dtype in which sums and gradients are sent between devices, such as bfloat16; by
          default the dtype of each table. A collection takes it from the plan.
      exchange_room: capacity for ids of each pair of devices, as a multiple of an even share; 1.5
          by default. A collection takes it from the plan.

    Raises:
      ValueError: the memory is too small, the mesh cannot be made or does not divide the batch, or
          a name is unknown.
    """
    check_axis_sizes(data, model)
    if batch_size < 1 or batch_size % (data * model):
        raise ValueError(
            f"batch_size must be a positive multiple of the {data * model} devices, got "
            f"{batch_size}"
        )
    configs = feature_configs(features, tables)
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
    distinct = _distinct(
        tables, configs, hotness, popularity or {}, batch_size // (data * model)
    )
    wire = TableSettings(
        tables=(), wire_dtype=wire_dtype, exchange_room=exchange_room
    ).exchange
    problem = Problem(
        dict(tables), configs, hotness, rule, batch_size, data, model, distinct, **wire
    )
    # raises an error for widths that cannot be cut
    stack_tables(problem.tables, configs, {})
    kept = memory  # memory for rows and state
    for _ in range(2):
        best = search.best(problem, kept)
        placements = {name: p.placement(model) for name, p in best.placed.items()}
        stacks = stack_tables(problem.tables, configs, placements, hotness)
        devices, sent = _figures(problem, stacks)
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
        distinct=distinct,
        tables=tuple(
            _table(problem, name, best.placed[name], sent[name]) for name in tables
        ),
        devices=devices,
        **wire,
    )


def _distinct(
    tables, features, hotness, popularity: Mapping[str, Any], examples: int
) -> dict[str, float]:
    """Average number of distinct rows of each table that `examples` examples read."""
    if not popularity:
        return {}
    rows = dict.fromkeys(tables, 0.0)
    for name, config in features.items():
        num_rows, ids = tables[config.table].num_rows, hotness[name] * examples
        found = min(ids, num_rows)
        if name in popularity:
            found = distinct_ids(name, popularity[name], num_rows, ids)
        rows[config.table] = min(num_rows, rows[config.table] + found)
    if unknown := popularity.keys() - features.keys():
        raise ValueError(
            f"popularity has a feature {min(unknown)!r}; there are {sorted(features)}"
        )
    return rows


def distinct_ids(
    name: str, popularity: float | ArrayLike, num_rows: int, count: float
) -> float:
    """Average number of distinct ids among `count` ids of a feature.

    ::

        sum over ids i of  1 - (1 - p_i)^count

    Raises:
      ValueError: `popularity` is neither a number nor a count for each id of the table.
    """
    given = np.asarray(popularity, np.float64)
    sound = np.isfinite(given).all() and (given >= 0).all()
    if given.ndim == 0 and sound:
        # Ranks beyond the first 65,536 are grouped; the ids of a group have equal frequencies.
        edges = np.arange(1, min(num_rows, _RANKS) + 2, dtype=np.float64)
        if num_rows > _RANKS:
            more = np.geomspace(_RANKS + 1, num_rows + 1, _RANKS // 16)
            edges = np.concatenate([edges, more[1:]])
        sizes = np.diff(edges)
        given = np.sqrt(edges[:-1] * (edges[1:] - 1)) ** -given
    elif given.ndim == 1 and sound and 0 < len(given) <= num_rows and given.any():
        sizes = np.ones(len(given))
    else:
        raise ValueError(
            f"popularity of {name!r} must be the exponent of Zipf's law, or how often each "
            f"of its up to {num_rows:,} ids occurs, got {popularity!r}"
        )
    share = np.minimum(given / np.sum(sizes * given), 1 - 1e-15)
    return float(np.sum(sizes * -np.expm1(count * np.log1p(-share))))


class _Figures(NamedTuple):
    """Memory of each device for the stacks of a collection, and bytes sent.

    Attributes:
      devices: memory of each device along "model".
      sent: bytes that each device sends in a step for each table, by the table's name.
    """

    devices: tuple[PlannedDevice, ...]
    sent: dict[str, float]


def _figures(problem: Problem, stacks: Sequence[Stack]) -> _Figures:
    rows = state = sent = temporary = 0
    entries, work = np.zeros(problem.model), np.zeros(problem.model)
    of_table = dict.fromkeys(problem.tables, 0.0)
    for stack in stacks:
        own = stack.kernel_rows // (problem.model if stack.divided else 1)
        row = stack.dim * stack.dtype.itemsize
        rows += own * row
        if stack.device_rows is not None:  # which rows are there
            rows += own * SLOT_BYTES + stack.num_rows // problem.model * ROW_BYTES
        for table in stack.tables:
            parts = problem.model if stack.divided else 1
            rows += table.config.num_rows * table.config.index_bytes // parts
        state += own * problem.state(stack.rule, stack.dim)
        if not stack.features:
            continue
        ids = sum(feature.hotness for feature in stack.features)
        owned = np.full(problem.model, ids / problem.model)
        if stack.divided:
            owned = stack.ids_of_owners(problem.model)
        entries += owned * problem.batch / problem.data
        work += owned * problem.batch / problem.data * row
        crossing = sent_for(
            problem,
            bags=stack.bags,
            ids=ids,
            dim=stack.dim,
            dtype=stack.dtype,
            weighted=any(problem.is_weighted(table.name) for table in stack.tables),
            share=stack.share(problem.model, *problem.known()),
            replicated_rows=None if stack.divided else stack.num_rows,
        )
        sent += crossing.total
        temporary = max(temporary, _temporary(problem, stack, ids, crossing))
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
        for i in range(problem.model)
    )
    return _Figures(tuple(devices), of_table)


def _temporary(problem: Problem, stack: Stack, ids: float, sent: exchange.Sent) -> int:
    """Bytes of the temporary arrays that a step needs for a stack.

    The program reserves memory for a step in which all devices gather all ids, see `exchange`.
    Our GPU programs do not store the sum of gradients for each row.
    """
    row, devices = stack.dim * 4, problem.data * problem.model  # sums are in float32
    bags = problem.batch * stack.bags
    # the gradient of all rows is summed over the devices
    if not stack.divided and devices > 1 and not sent.ids:
        return 2 * stack.num_rows * row + bags // devices * row
    entries = math.ceil(ids * problem.batch)
    own = stack.kernel_rows // (problem.model if stack.divided else 1)
    # bags of the devices along "model", and bags of all devices
    of_bags = bags // problem.data + bags
    return (of_bags + min(entries, own)) * row + _ENTRY * entries


def _table(problem: Problem, name: str, placed: Placed, sent: float) -> PlannedTable:
    table = problem.tables[name]
    dim = table.dim // max(1, len(placed.parts))
    row = dim * np.dtype(table.dtype).itemsize + problem.state(table.rule, dim)
    host = table.num_rows * row if table.host else 0
    row += table.index_bytes
    return PlannedTable(
        name=name,
        num_rows=table.num_rows,
        dim=table.dim,
        placement=placed.placement(problem.model),
        why=_why(problem, name, placed),
        memory=table.num_rows * row * max(1, len(placed.parts)),
        entries=problem.ids(name) * problem.batch,
        sent=round(sent),
        host=host,
    )


def _why(problem: Problem, name: str, placed: Placed) -> str:
    if problem.tables[name].placement is not None:
        return "given"
    if problem.data * problem.model == 1:
        return "one device"
    if not problem.ids(name):
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
