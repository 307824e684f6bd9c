"""The placement of tables on a mesh, which does not change results."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from placed_training import MESHES, Size, error, numpy_training, placed_training

import sparsejax as sj
from sparsejax.embeddings.config import FeatureConfig, TableConfig
from sparsejax.embeddings.placement import (
    Range,
    TablePlacement,
    stack_tables,
)
from sparsejax.mesh import exchange

KINDS = ["rows", "table", "columns", "replicated"]
TABLES = {
    "rows": TableConfig(300, 4, placement="rows"),
    "whole": TableConfig(70, 4, placement="table"),
    "tiny": TableConfig(1, 4, placement="table"),
    "cut": TableConfig(90, 8, placement="columns"),
    "copied": TableConfig(20, 4, placement="replicated"),
}


@contextlib.contextmanager
def mesh_of(shape):
    with jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1])):
        yield


def test_training_does_not_depend_on_the_placement():
    """Tables of every placement, on one mesh after the other, saved and restored."""
    rule = sj.optimizers.adagrad(0.3)
    size = Size(
        num_rows=(90, 40, 30, 20, 3),
        dims=(4, 4, 8, 4, 4),
        hotness=(3, 2, 4, 1, 2),
        combiners=("mean", "sum", "sum", "sum", "mean"),
        placements=("rows", "table", "columns", "replicated", "table"),
        batch=16,
        steps=6,
    )
    # On (8, 1) nothing is divided over "model".
    first, last = placed_training(size, rule, meshes=MESHES[:3])
    assert error(last, numpy_training(size, rule, first)) < 1e-6
    assert error(last, first) > 0.1


def test_training_with_ids_that_repeat(monkeypatch):
    """Rows cross once; tables of every placement, missing ids, bags without any."""
    ways = []

    def slots_for(*args, **kwargs):
        ways.append(made(*args, **kwargs))
        return ways[-1]

    made = exchange.slots_for
    monkeypatch.setattr(exchange, "slots_for", slots_for)
    size = Size(
        num_rows=(40, 16, 24, 20),
        dims=(4, 4, 8, 4),
        hotness=(2, 1, 2, 1),
        combiners=("mean", "sum", "sum", "sum"),
        placements=("rows", "table", "columns", "replicated"),
        batch=1024,
        steps=4,
    )
    rule = sj.optimizers.adagrad(0.3)
    first, last = placed_training(size, rule, meshes=[(1, 8), (2, 4)])
    assert ways and all(way.distinct for way in ways)
    assert error(last, numpy_training(size, rule, first)) < 2e-6
    assert error(last, first) > 0.1


def test_every_row_has_a_place_of_its_own():
    """And `ids_at` finds it again; whole tables are on one device, `rows` on all."""
    (stack, copied) = stack_tables(TABLES, {}, {})
    assert not copied.divided
    every = []
    for number, table in enumerate(stack.tables):
        ids = np.arange(table.config.num_rows)
        rows = stack.row_of(ids, table.place)
        every += rows.tolist()
        found, again = stack.ids_at(jnp.asarray(rows))
        np.testing.assert_array_equal(found, number)
        np.testing.assert_array_equal(again, ids)
        for model in (1, 2, 8):
            devices = np.unique(rows // (stack.num_rows // model))
            assert len(devices) == (model if table.name == "rows" else 1)
    assert len(set(every)) == len(every) and max(every) < stack.num_rows
    empty = np.setdiff1d(np.arange(stack.num_rows), every)
    assert (np.asarray(stack.ids_at(jnp.asarray(empty))[1]) == -1).all()
    on = [t.place.hand // 32 for t in stack.tables if t.name == "cut"]
    assert len(on) == 2 and on[0] != on[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_tables_under_every_placement(kind):
    """Bit for bit; sequences of cut rows are whole again, also in `concat`."""
    tables = {
        "a": TableConfig(40, 8, placement=kind, pieces=4),
        "b": TableConfig(3, 8, placement="rows"),
    }
    features = {
        "before": "b",
        "recent": FeatureConfig("a", combiner=None, length=3),
        "sum": "a",
    }
    rng = np.random.default_rng(0)
    ids = {
        "before": rng.integers(0, 3, 8).astype(np.int32),
        "recent": rng.integers(-1, 40, (8, 2)).astype(np.int32),
        "sum": rng.integers(-1, 40, (8, 2)).astype(np.int32),
    }
    plain = tables | {"a": TableConfig(40, 8)}
    rngs = nnx.Rngs(3)
    want = np.asarray(
        sj.embeddings.EmbeddingCollection(plain, features, rngs=rngs).table("a")
    )
    with mesh_of((1, 8)):
        embeddings = sj.embeddings.EmbeddingCollection(
            tables, features, rngs=nnx.Rngs(3)
        )
        np.testing.assert_array_equal(embeddings.table("a"), want)
        others = np.asarray(embeddings.table("b"))
        changed = np.arange(320, dtype=np.float32).reshape(40, 8)
        embeddings.set_table("a", changed)
        np.testing.assert_array_equal(embeddings.table("a"), changed)
        np.testing.assert_array_equal(embeddings.table("b"), others)
        got, joined = _call(embeddings, jax.tree.map(jnp.asarray, ids))
    padded = np.concatenate([changed, np.zeros((1, 8), np.float32)])  # -1
    rows = padded[np.pad(ids["recent"], ((0, 0), (0, 1)), constant_values=-1)]
    np.testing.assert_array_equal(got["recent"], rows)
    np.testing.assert_array_equal(got["sum"], padded[ids["sum"]].sum(1))
    flat = [np.asarray(got[name]).reshape(8, -1) for name in features]
    np.testing.assert_array_equal(joined, np.concatenate(flat, axis=1))


_call = nnx.jit(lambda embeddings, ids: (embeddings(ids), embeddings.concat(ids)))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"other": "rows"}, "plan has a table 'other'"),
        (
            {"cut": TablePlacement("columns", (Range(0, 64),) * 3)},
            "'cut' has rows of 8",
        ),
        ({"cut": TablePlacement("table", (Range(0, 48),))}, "ranges of hands"),
        ({"cut": TablePlacement("table", (Range(32, 64),))}, "ranges of hands"),
        ({"cut": TablePlacement("rows", (Range(0, 64),))}, "ranges of hands"),
    ],
)
def test_bad_plans(plan, message):
    tables = {"cut": TableConfig(90, 8)}
    with pytest.raises(ValueError, match=message):
        stack_tables(tables, {}, plan)


def test_widths_that_cannot_be_cut():
    table = TableConfig(90, 9, placement="columns")
    with pytest.raises(ValueError, match="'cut' has rows of 9 .* choose pieces"):
        stack_tables({"cut": table}, {}, {})
    with pytest.raises(ValueError, match="pieces must be at least 1"):
        TableConfig(90, 9, placement="columns", pieces=0)


def test_an_id_outside_is_nan_whatever_its_owner():
    """Of whole tables, more bags may ask the first device then than have ids there."""
    tables = {f"t{i}": TableConfig(40, 8, placement="table") for i in range(8)}
    features = {f"f{i}": f"t{i}" for i in range(8)}
    ids = {name: jnp.full(64, 40, jnp.int32).at[::2].set(1) for name in features}
    with mesh_of((1, 8)):
        embeddings = sj.embeddings.EmbeddingCollection(
            tables, features, rngs=nnx.Rngs(0)
        )
        got, _ = _call(embeddings, ids)
        for i, name in enumerate(features):
            row = np.asarray(embeddings.table(f"t{i}"))[1]
            assert np.isnan(got[name][1::2]).all()
            np.testing.assert_array_equal(got[name][::2], np.tile(row, (32, 1)))
