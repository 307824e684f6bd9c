"""Stores of tables give equal results: on the devices and in host memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import FeatureConfig, TableConfig
from sparsejax.embeddings.stores.static import StaticStore
from sparsejax.embeddings.stores.store import Found
from sparsejax.embeddings.tables import STORES

ROWS, BATCH = 600, 8
HOST: dict[str, Any] = {"host": True, "device_rows": 70}
FEATURES = {"user": "user", "item": FeatureConfig("item", combiner="mean")}


class Model(nnx.Module):
    """A model whose result is the sum of the rows."""

    def __init__(self, rows=ROWS, **options):
        options: dict[str, Any] = {"placement": "rows", **options}
        tables = {
            "user": TableConfig(rows, 4, **options),
            "item": TableConfig(77, 4, **options),
        }
        self.x = sj.embeddings.EmbeddingCollection(tables, FEATURES, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.x.concat(ids).sum(axis=1)


def batches(steps, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        item = rng.integers(-1, 77, (BATCH, 3)).astype(np.int32)
        yield {"user": rng.integers(0, rows, BATCH).astype(np.int32), "item": item}


@sj.jit
def step(model, optimizer, ids):
    def loss_fn(model):
        return ((model(ids) - 1) ** 2).mean()

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def trained(model, optimizer, given):
    if any(store.stages for store in model.x.stores()):
        given = model.x.staged(given, optimizer)
    return [float(step(model, optimizer, ids)) for ids in given]


def pair(rule):
    models = Model(), Model(**HOST)
    return [(model, sj.Optimizer(model, rule)) for model in models]


def rows_of(model):
    return {n: np.concatenate([*model.x.table_rows(n)]) for n in ("user", "item")}


def check_rows(*models):
    first, *others = map(rows_of, models)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


class Remote(TableConfig):
    """The configuration of a table whose rows are on a server."""

    store = "remote"


SERVER = {id: np.full(4, id * id, np.float32) for id in range(9)}


class RemoteStore(StaticStore):
    """A store that reads each id's row from a (fake) server."""

    def rows(self, batch, call):
        x, dim = batch.stacks[self.stack.name], self.stack.dim

        def asked(ids):
            return np.stack([SERVER.get(int(id), np.zeros(dim)) for id in ids])

        like = jax.ShapeDtypeStruct((x.nse, dim), np.float32)
        found = jax.pure_callback(asked, like, x.indices, vmap_method="sequential")
        sums = jax.ops.segment_sum(found, x.row_ids(), x.num_rows)
        return Found(sums.reshape(-1, self.stack.bags, dim), None)


def test_a_store_of_ones_own(monkeypatch):
    monkeypatch.setitem(STORES, "remote", RemoteStore)
    tables = {"far": Remote(9, 4), "near": TableConfig(5, 4)}
    features = {"far": "far", "near": "near"}
    x = sj.embeddings.EmbeddingCollection(tables, features, rngs=nnx.Rngs(0))
    ids = np.array([[3, 2], [8, -1]], np.int32)
    found = sj.jit(lambda x, ids: x(ids))(x, {"far": ids, "near": ids[:, 0] // 2})
    np.testing.assert_array_equal(found["far"][:, 0], [13, 64])
    np.testing.assert_array_equal(found["near"], x.table("near")[jnp.array([1, 4])])


RULE = sj.optimizers.adagrad(0.1)


def test_changes_of_tables_in_host_memory(tmp_path):
    """They are those of tables on the devices; both kinds of tables take them."""
    told = []
    for number, (model, optimizer) in enumerate(pair(RULE)):
        mine = []
        for seed in range(2):
            trained(model, optimizer, batches(2, seed=seed))
            running = sj.export_changes(model, tmp_path / str(number), optimizer)
            mine.append(running.result())
        told.append([(each.rows, each.is_base) for each in mine])
        takers = Model(), Model(**HOST)
        for taker in takers:
            sj.apply_changes(taker, tmp_path / str(number))
        check_rows(model, *takers)
    assert told[0] == told[1]
    assert [is_base for _, is_base in told[0]] == [True, False]
    assert told[0][1][0] <= 2 * 4 * BATCH
    # As after a restart, with nothing known but the folder.
    model = Model(**HOST)
    sj.apply_changes(model, tmp_path / "1")
    assert sj.export_changes(model, tmp_path / "1", None).result().rows == 0


@pytest.mark.parametrize(
    "rule", [RULE, sj.optimizers.adam(0.1)], ids=["adagrad", "adam"]
)
def test_ids_are_added_to_tables_in_host_memory(rule):
    losses = []
    models = pair(rule)
    for model, optimizer in models:
        found = trained(model, optimizer, batches(3))
        old = rows_of(model)
        sj.embeddings.add_ids(model, {"user": 50}, optimizer=optimizer)
        new = rows_of(model)
        if not rule.drifts:
            np.testing.assert_array_equal(new["user"][:ROWS], old["user"])
            np.testing.assert_array_equal(new["item"], old["item"])
        np.testing.assert_array_equal(new["user"][ROWS:], new["user"][[1] * 50])
        found += trained(model, optimizer, batches(3, ROWS + 50, seed=2))
        optimizer.flush(model)
        losses.append(found)
    assert losses[0] == losses[1]
    check_rows(*(model for model, _ in models))


@pytest.mark.parametrize(
    "options",
    [{}, {"placement": "replicated"}, {"placement": "columns"}, HOST],
    ids=["rows", "replicated", "columns", "host"],
)
def test_state_of_a_static_table(options, tmp_path):
    """A file with state is that of an optimizer, for each placement; or of some ids."""
    rule, path = sj.optimizers.adam(0.1), tmp_path / "user.parquet"
    model = Model(**options)
    optimizer = sj.Optimizer(model, rule)
    trained(model, optimizer, batches(2))
    optimizer.flush(model)
    for name in "user", "item":
        model.x.save_table(name, tmp_path / f"{name}.parquet", optimizer=optimizer)
    other = Model(**options)
    of_other = sj.Optimizer(other, rule)
    of_other.step.set_value(optimizer.step[...])
    for name in "user", "item":
        other.x.load_table(name, tmp_path / f"{name}.parquet", of_other)
    check_rows(model, other)
    more = [
        trained(*each, batches(2, seed=1))
        for each in [(model, optimizer), (other, of_other)]
    ]
    assert more[0] == more[1]
    model.x.save_table("user", path)
    fresh = Model(**options)
    before = rows_of(fresh)["user"]
    fresh.x.load_table("user", path, None)
    np.testing.assert_array_equal(rows_of(fresh)["user"], rows_of(model)["user"])
    assert not np.array_equal(before, rows_of(fresh)["user"])


def test_single_ids_are_set(tmp_path):
    model, path = Model(), tmp_path / "user.parquet"
    model.x.save_table("user", path)
    pq.write_table(pq.read_table(path).slice(5, 3), path)
    other = Model(rows=ROWS)
    other.x.set_table("user", np.zeros((ROWS, 4), np.float32))
    with pytest.raises(
        ValueError, match="3 of the 600 ids of the table 'user': give repl"
    ):
        other.x.load_table("user", path, None)
    other.x.load_table("user", path, None, replace=False)
    found, want = (rows_of(each)["user"] for each in (other, model))
    np.testing.assert_array_equal(found[5:8], want[5:8])
    assert not found[:5].any() and not found[8:].any()
    small = Model(rows=6)
    with pytest.raises(
        ValueError, match="has the id 7, but the table 'user' has 6 rows"
    ):
        small.x.load_table("user", path, None, replace=False)
