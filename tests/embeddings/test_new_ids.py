"""A trained click model gets more ids."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj

BEFORE, ADDED = {"user": 30, "item": 20}, {"user": 3, "item": 600}
AFTER = {name: BEFORE[name] + ADDED[name] for name in BEFORE}
RULES = {
    "adam": sj.optimizers.adamw(0.05, weight_decay=0.1),
    "rowwise": sj.optimizers.rowwise_adagrad(0.05),
}


def built(features, plan, rule):
    config = sj.WideDeepConfig(dim=4, hidden=(4,))
    model = sj.clicks.WideDeep(
        config, num_dense=2, features=features, plan=plan, rngs=nnx.Rngs(0)
    )
    return model, sj.Optimizer(model, rule)


def collections(model):
    return [model.embeddings, model.linear.embeddings]


def batch(seed):
    rng = np.random.default_rng(seed)
    ids = {n: rng.integers(0, k, 8).astype(np.int32) for n, k in BEFORE.items()}
    return rng.standard_normal((8, 2)).astype(np.float32), ids


@sj.jit
def step(model, optimizer, dense, ids):
    def loss_fn(model):
        return jnp.mean((model(dense, ids) - dense[:, 0]) ** 2)

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


# A whole program: operation by operation, each would be one for all devices.
predict = sj.jit(lambda model, dense, ids: model(dense, ids))


@pytest.mark.parametrize(
    ("placement", "rule", "shape"),
    [
        ("replicated", "adam", None),
        ("rows", "rowwise", None),
        ("table", "rowwise", (2, 4)),
        ("mixed", "adam", (1, 8)),
    ],
)
def test_a_model_goes_on_as_if_it_had_had_them(placement, rule, shape):
    mesh = contextlib.nullcontext()
    if shape is not None:
        mesh = jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))
    plan = dict.fromkeys(BEFORE, placement)
    if placement == "mixed":
        plan = {"user": "replicated", "item": "rows"}
    with mesh:
        model, optimizer = built(BEFORE, plan, RULES[rule])
        other, other_optimizer = built(AFTER, plan, RULES[rule])
        for ours, theirs in zip(*map(collections, (model, other)), strict=True):
            for name, count in BEFORE.items():
                table = np.array(theirs.table(name))
                table[:count] = ours.table(name)
                theirs.set_table(name, table)
        ordinary = nnx.All(nnx.Param, nnx.Not(sj.optimizers.RowParam))
        nnx.update(other, jax.tree.map(jnp.copy, nnx.state(model, ordinary)))
        for seed in range(3):
            step(model, optimizer, *batch(seed))
            step(other, other_optimizer, *batch(seed))
        optimizer.flush(model)
        other_optimizer.flush(other)
        predicted = np.asarray(predict(model, *batch(9)))
        tables = [
            {n: np.asarray(c.table(n)) for n in BEFORE} for c in collections(model)
        ]

        model.add_ids(ADDED, optimizer=optimizer)

        assert model.num_ids == AFTER
        np.testing.assert_array_equal(predict(model, *batch(9)), predicted)
        for collection, known in zip(collections(model), tables, strict=True):
            for name, count in BEFORE.items():
                found = np.asarray(collection.table(name))
                np.testing.assert_array_equal(found[:count], known[name])
                copies = np.broadcast_to(known[name][1], found[count:].shape)
                np.testing.assert_array_equal(found[count:], copies)
        for seed in range(3, 6):
            ours = step(model, optimizer, *batch(seed))
            theirs = step(other, other_optimizer, *batch(seed))
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        optimizer.flush(model)
        other_optimizer.flush(other)
        for ours, theirs in zip(*map(collections, (model, other)), strict=True):
            for name, count in BEFORE.items():
                pair = (np.asarray(c.table(name))[:count] for c in (ours, theirs))
                np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-7)
        # Each new id is learned apart.
        dense, ids = batch(0)
        first = model.embeddings.table("user")[30:]
        step(model, optimizer, dense, ids | {"user": np.full(8, 31, np.int32)})
        optimizer.flush(model)
        moved = np.abs(np.asarray(model.embeddings.table("user")[30:] - first)).max(
            axis=1
        )
        assert moved[1] > 10 * max(moved[0], moved[2])


def test_tables_may_come_to_lie_elsewhere():
    """Small tables are replicated, and large ones are divided."""
    tables = {"user": sj.embeddings.TableConfig(9, 8, dtype=jnp.bfloat16)}
    model = nnx.Dict(
        x=sj.embeddings.EmbeddingCollection(tables, {"u": "user"}, rngs=nnx.Rngs(0))
    )
    optimizer = sj.Optimizer(model, sj.optimizers.adagrad(0.05))
    before = np.asarray(model.x.table("user"))
    (seed,) = optimizer.rounding.values()
    assert [stack.divided for stack in model.x.stacks] == [False]
    sj.embeddings.add_ids(model, {"user": 2**17}, like=4, optimizer=optimizer)
    assert [stack.divided for stack in model.x.stacks] == [True]
    after = np.asarray(model.x.table("user"))
    np.testing.assert_array_equal(after[:9], before)
    assert (after[9:] == before[4]).all() and len(after) == 9 + 2**17
    assert [*optimizer.rounding.values()] == [seed]
    (state,) = optimizer.rows.values()
    (kernel,) = model.x.kernels.values()
    assert all(len(array) == len(kernel) for array in state.values())


def test_pieces_of_rows():
    tables = {"user": sj.embeddings.TableConfig(9, 8, placement="columns", pieces=4)}
    model = sj.embeddings.EmbeddingCollection(tables, {"u": "user"}, rngs=nnx.Rngs(0))
    before = np.asarray(model.table("user"))
    sj.embeddings.add_ids(model, {"user": 300})
    after = np.asarray(model.table("user"))
    np.testing.assert_array_equal(after[:9], before)
    assert (after[9:] == before[1]).all() and len(after) == 309


def test_a_dynamic_table_stays_as_it_is():
    tables = {
        "user": sj.embeddings.DynamicTableConfig(1024, 2),
        "item": sj.embeddings.TableConfig(9, 2),
    }
    features = {name: name for name in tables}
    model = sj.embeddings.EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adagrad(0.1))
    ids = {"user": np.arange(20), "item": np.zeros(20, np.int32)}
    model.assign_rows(ids, optimizer)
    with pytest.raises(ValueError, match="'user': a dynamic table takes new ids"):
        sj.embeddings.add_ids(model, {"user": 300}, optimizer=optimizer)
    before = jax.tree.map(np.asarray, (model(ids), model.ids("user")))
    sj.embeddings.add_ids(model, {"item": 4}, optimizer=optimizer)
    after = model(ids), model.ids("user")
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_what_cannot_be_added_is_said():
    model, _ = built(BEFORE, {}, RULES["adam"])
    with pytest.raises(ValueError, match=r"no table 'shop'; it has \['item', 'user'\]"):
        model.add_ids({"shop": 1})
    with pytest.raises(ValueError, match="cannot add -1 ids to 'user'"):
        model.add_ids({"user": -1})
    with pytest.raises(ValueError, match="like=30 is no id of 'user', which has 30"):
        sj.embeddings.add_ids(model, {"user": 1}, like=30)
    for rule in RULES.values():
        model, _ = built(BEFORE, {}, rule)
        _, optimizer = built(AFTER, {}, rule)
        with pytest.raises(ValueError, match="optimizer was made for another model"):
            model.add_ids({"user": 1}, optimizer=optimizer)
        assert model.num_ids == BEFORE
