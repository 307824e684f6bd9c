"""Compares plans of embedding tables with the compiled program and with collections."""

import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings.config import FeatureConfig, TableConfig
from sparsejax.kinds.clicks import planner

RULE = sj.optimizers.rowwise_adagrad(0.1)
BATCH = 1024
TABLES = {
    "big": TableConfig(60_000, 16),
    "whole": TableConfig(3_000, 16, placement="table"),
    "cut": TableConfig(2_000, 16, placement="columns"),
    "small": TableConfig(100, 16),
    "other": TableConfig(9_000, 8),
}
FEATURES = {
    "sum": "big",
    "recent": FeatureConfig("big", combiner=None, length=3),
    "whole": FeatureConfig("whole", combiner="mean"),
    "cut": "cut",
    "small": "small",
    "other": "other",
}
HOTNESS = {"sum": 4, "whole": 5}


def plan_of(tables=TABLES, features=FEATURES, **options):
    given: dict[str, Any] = {"batch_size": BATCH, "model": 8, "hotness": HOTNESS}
    given["rule"] = RULE
    return sj.plan_embeddings(tables, features, **given | options)


def kinds_of(plan):
    return {table.name: table.placement.kind for table in plan.tables}


def compiled_step(plan):
    """The compiled step of a collection that has the plan, on its mesh."""
    mesh = sj.make_mesh(data=plan.data, model=plan.model)
    with jax.set_mesh(mesh):
        rngs = nnx.Rngs(0)
        embeddings = sj.embeddings.EmbeddingCollection(
            TABLES, FEATURES, plan=plan, rngs=rngs
        )
        optimizer = sj.Optimizer(embeddings, RULE)
        graphdef, state = nnx.split((embeddings, optimizer))

        def step(state, ids):
            embeddings, optimizer = nnx.merge(graphdef, state)
            _, grads = optimizer.value_and_grad(
                lambda embeddings: jnp.sum(jnp.square(embeddings.concat(ids)))
            )(embeddings)
            optimizer.update(embeddings, grads)
            return nnx.state((embeddings, optimizer))

        lies = jax.sharding.NamedSharding(mesh, jax.P(("data", "model")))

        def shape(name):
            size = (BATCH, int(plan.hotness[name]))
            return jax.ShapeDtypeStruct(size, np.int32, sharding=lies)

        ids = {name: shape(name) for name in FEATURES}
        return jax.jit(step, donate_argnums=0).lower(state, ids).compile()


def bytes_sent(text, mesh):
    """Bytes that each device sends in a step whose ids all have places, by a ring."""
    total = 0
    kinds = "all-to-all|all-gather|all-reduce|reduce-scatter"
    for line in text.splitlines():
        found = re.search(rf"= (.*?) ({kinds})\(.*replica_groups=(\S+(?: \S+)?),", line)
        if found is None or "branch_1_fun" in line:  # the way with too few places
            continue
        result, kind, groups = found.groups()
        shapes = re.findall(r"[fsu](\d+)\[([\d,]*)\]", result)
        size = sum(
            int(bits) // 8 * math.prod(map(int, filter(None, dims.split(","))))
            for bits, dims in shapes
        )
        total += {
            "all-to-all": lambda n, size: (n - 1) / n * size,
            "all-gather": lambda n, size: (n - 1) / n * size,
            "all-reduce": lambda n, size: 2 * (n - 1) / n * size,
            "reduce-scatter": lambda n, size: (n - 1) * size,
        }[kind](devices_of(groups, mesh), size)
    return total


def devices_of(groups, mesh):
    """The number of devices in a group, in each of the forms in which XLA writes groups."""
    if groups.startswith("{{"):
        return groups.split("}")[0].count(",") + 1
    if groups.startswith("["):
        return int(groups.split("]")[0].split(",")[-1])
    axes = re.findall(r"'(\w+)'", groups.split("]")[1])
    return math.prod(mesh[axis] for axis in axes)


def test_the_compiled_program():
    """Rows and state are exact; memory and bytes sent are right to 10 %."""
    data, model = 2, 4
    plan = plan_of(data=data, model=model)
    assert {"table", "columns"} <= {*kinds_of(plan).values()}
    program = compiled_step(plan)
    device, found = plan.devices[0], program.memory_analysis()
    assert found is not None
    ids = sum(map(int, plan.hotness.values())) * BATCH * 4 // (data * model)
    kept = found.argument_size_in_bytes - ids
    assert 0 <= kept - device.tables - device.state < 64  # counters
    total = kept + found.temp_size_in_bytes
    assert device.total == pytest.approx(total, rel=0.1)
    sent = bytes_sent(program.as_text(), {"data": data, "model": model})
    assert device.sent == pytest.approx(sent, rel=0.1)
    assert sum(t.sent for t in plan.tables) == pytest.approx(device.sent, rel=1e-3)


def test_how_many_ids_differ():
    """Against draws, by counts and by Zipf's law, also of more ids than are counted singly."""
    rng = np.random.default_rng(0)
    for num_rows, zipf in (50, 0.8), (3_000, 1.2), (200_000, 1.05):
        weights = np.arange(1, num_rows + 1) ** -zipf
        share = weights / weights.sum()
        draws = [np.unique(rng.choice(num_rows, 2_000, p=share)) for _ in range(20)]
        want = np.mean([len(ids) for ids in draws])
        for popularity in zipf, 1e6 * weights:
            found = planner.distinct_ids("item", popularity, num_rows, 2_000)
            assert found == pytest.approx(want, rel=0.02)
    assert planner.distinct_ids("item", 0.0, 1, 9) == pytest.approx(1)
    counts = map(np.array, ([0, 0], [1, -1], [[1.0]], [1.0] * 51))
    wrongs: list[Any] = [-1.0, math.nan, *counts]
    for wrong in wrongs:
        with pytest.raises(
            ValueError, match="popularity of 'item' must be the exponent"
        ):
            planner.distinct_ids("item", wrong, 50, 10)


def test_what_is_popular_crosses_once():
    """A plan knows it from the law of the ids, keeps it, and a collection has it from there."""
    plain = plan_of()
    plan = plan_of(popularity={"sum": 1.2, "recent": 1.2})
    assert not plain.distinct and plain.settings(TABLES).distinct is None
    assert plan.devices[0].sent < 0.85 * plain.devices[0].sent
    assert 100 < plan.distinct["big"] < 7 * BATCH / 8 and plan.distinct["small"] == 100
    assert sj.embeddings.EmbeddingPlan.from_json(plan.to_json()) == plan
    known = plan.settings(TABLES).distinct
    assert known is not None and known.examples == BATCH // 8
    # Of twice as many examples at most twice as many; of fewer, not more.
    assert (
        known.of("big", BATCH // 4) == 2 * known.of("big", 8) == 2 * known.of("big", 1)
    )
    with pytest.raises(ValueError, match="popularity has a feature 'sums'"):
        plan_of(popularity={"sums": 1.2})


def test_a_plan_has_the_settings_of_the_exchange():
    plain, plan = plan_of(), plan_of(wire_dtype="bfloat16", exchange_room=2.0)
    assert plan_of(wire_dtype="bfloat16").devices[0].sent < plain.devices[0].sent
    given = {"wire_dtype": "bfloat16", "exchange_room": 2.0}
    assert sj.embeddings.EmbeddingPlan.from_json(plan.to_json()) == plan
    for room, want in (None, 2.0), (3.0, 3.0):
        rngs = nnx.Rngs(0)
        collection = sj.embeddings.EmbeddingCollection(
            TABLES, FEATURES, plan=plan, exchange_room=room, rngs=rngs
        )
        assert collection.settings.exchange == given | {"exchange_room": want}
        assert dict(collection.settings.tables) == TABLES
    wrong = plan.to_json() | {"exchange_room": -1.0}
    with pytest.raises(ValueError, match="exchange_room must be positive, got -1"):
        sj.embeddings.EmbeddingPlan.from_json(wrong)


def test_each_table_gets_what_is_cheapest():
    """Copies of what is small beside its ids; a balanced place for the others."""
    tables = {f"t{i}": TableConfig(1_000_000 + i, 64) for i in range(9)}
    tables["tiny"] = TableConfig(300, 64)
    features = {f"f{i}": f"t{i}" for i in range(8)}
    hotness = {name: 16 for name in features}
    features["tiny"] = "tiny"
    given: dict[str, Any] = {"batch_size": 8192, "model": 4, "rule": RULE}
    plan = sj.plan_embeddings(tables, features, hotness=hotness, **given)
    kinds = kinds_of(plan)
    assert kinds["tiny"] == "replicated"
    # 16 ids of a bag are on all four devices, if rows are divided: four sums cross, not one.
    assert {kinds[f"t{i}"] for i in range(8)} <= {"table", "columns"}
    work = [device.work for device in plan.devices]
    assert max(work) < 1.05 * np.mean(work)
    least = sum(t.memory for t in plan.tables) / 4
    assert plan.devices[0].tables + plan.devices[0].state < 1.2 * least
    by_rows = {
        name: TableConfig(table.num_rows, table.dim, placement="rows")
        for name, table in tables.items()
    }
    others = sj.plan_embeddings(by_rows, features, hotness=hotness, **given)
    assert set(kinds_of(others).values()) == {"rows"}
    assert others.devices[0].sent > 2 * plan.devices[0].sent
    # A single table that is too large for a device is divided.
    one = {"t": TableConfig(50_000_000, 63)}
    plan = sj.plan_embeddings(one, {"f": "t"}, **given)
    assert kinds_of(plan) == {"t": "rows"} and len({*plan.devices}) == 1


def test_too_little_memory():
    """A plan with less balance is found, if that is what it takes."""
    least = plan_of().devices[0].total
    assert plan_of(memory=least).devices[0].total == least
    assert plan_of(memory=least - 1).devices[0].total < least
    with pytest.raises(ValueError, match="of each device, which has 1.00 MB: .* state"):
        plan_of(memory=10**6)


def test_one_device_and_nothing_to_read():
    plan = plan_of(model=1)
    free = [name for name, table in TABLES.items() if table.placement is None]
    assert {kinds_of(plan)[name] for name in free} == {"rows"}
    assert plan.devices[0].sent == 0
    unread = TABLES | {"unread": TableConfig(7, 3)}
    assert plan_of(unread).tables[-1].entries == 0


def test_a_plan_is_text_and_json():
    plan = plan_of()
    again = sj.embeddings.EmbeddingPlan.from_json(
        json.loads(json.dumps(plan.to_json()))
    )
    assert again == plan
    lines = str(plan).splitlines()
    assert len(lines) <= 3 + len(TABLES) + plan.model
    assert all(any(line.startswith(name) for line in lines) for name in TABLES)
    for document in ({}, {"version": 2}, {"version": 1}, {"version": 1, "tables": 1}):
        with pytest.raises(ValueError, match="plan"):
            sj.embeddings.EmbeddingPlan.from_json(document)


def test_a_plan_of_other_tables():
    plan = plan_of()
    others = TABLES | {"small": TableConfig(101, 16)}
    with pytest.raises(ValueError, match="100 x 16 table 'small', .* the 101 x 16"):
        sj.embeddings.EmbeddingCollection(others, FEATURES, plan=plan, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="plan has no table 'new'"):
        plan.placements(TABLES | {"new": TableConfig(1, 1)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1020}, "positive multiple of the 8 devices, got 1020"),
        ({"batch_size": 0}, "positive multiple"),
        ({"model": 3}, "model must be a divisor"),
        ({"hotness": {"sums": 1}}, "hotness has a feature 'sums'"),
        ({"hotness": {"sum": -1}}, "hotness of 'sum' must be positive"),
        ({"features": {"a": "b"}}, "'a' reads the table 'b'"),
        ({"tables": TABLES | {"cut": TableConfig(9, 3, placement="columns")}}, "'cut'"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**options)


def test_rows_in_host_memory_are_not_on_the_devices():
    def planned(table):
        rule = sj.optimizers.sgd(0.1)
        return sj.plan_embeddings(
            {"user": table}, {"user": "user"}, batch_size=64, model=1, rule=rule
        )

    dynamic = sj.embeddings.DynamicTableConfig
    here = planned(dynamic(1024, 8))
    there = planned(dynamic(256, 8, host_rows=1024))
    index = 31 * 1024
    assert here.devices[0].tables == 32 * 1024 + index
    # Some of the rows, and which these are.
    assert there.devices[0].tables == (32 + 9) * 256 + 4 * 1024 + index
    assert [plan.tables[0].host for plan in (here, there)] == [0, 32 * 1024]
    assert here.tables[0].memory == there.tables[0].memory
    assert "in the host" in str(there) and "in the host" not in str(here)
    assert sj.embeddings.EmbeddingPlan.from_json(there.to_json()) == there
