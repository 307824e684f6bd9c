"""Predictors of models with dynamic tables: they find the rows of ids, and assign no rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import (
    DynamicTableConfig,
    EmbeddingCollection,
    FeatureConfig,
    TableConfig,
    WideIds,
)
from sparsejax.wide_ids import joined

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

BATCH = 8
TABLES = {
    "user": DynamicTableConfig(2048, 4, init=nnx.initializers.uniform(0.5)),
    "tag": DynamicTableConfig(1024, 4, init=nnx.initializers.normal(0.5)),
    "hour": TableConfig(24, 4),
}
FEATURES = {
    "tags": FeatureConfig("tag", combiner="mean"),
    "user": "user",
    "seen": FeatureConfig("user", combiner=None, length=3),
    "hour": "hour",
}


class Clicks(nnx.Module):
    num_dense = 2

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embeddings = EmbeddingCollection(TABLES, FEATURES, rngs=rngs)
        self.layers = nnx.Linear(self.embeddings.num_outputs + 2, 1, rngs=rngs)

    def __call__(self, dense, ids):
        rows = self.embeddings.concat(ids)
        return self.layers(jnp.concatenate([dense, 3 * rows], axis=1))[:, 0]


@sj.jit
def assign(model, optimizer, ids):
    model.embeddings.assign_rows(ids, optimizer)


def batch(rng, rows, first=0) -> tuple[np.ndarray, dict[str, Any]]:
    """Draws ids from `first` on, which use all 64 bits."""
    spread = np.uint64(0x9E3779B97F4A7C15)

    def some(most, *shape):
        return rng.integers(first, first + most, shape).astype(np.uint64) * spread

    lengths = rng.integers(0, 4, rows)
    ids = {
        "tags": WideIds.ragged(some(40, lengths.sum()), np.append(0, lengths.cumsum())),
        "user": np.ma.masked_array(some(99, rows), rng.random(rows) < 0.1),
        "seen": np.ma.masked_array(some(99, rows, 3), rng.random((rows, 3)) < 0.3),
        "hour": rng.integers(0, 24, rows).astype(np.int32),
    }
    return rng.random((rows, 2), np.float32), ids


@pytest.fixture(scope="module")
def model():
    model, rng = Clicks(), np.random.default_rng(0)
    optimizer = sj.Optimizer(model, sj.optimizers.adam(0.1))
    for _ in range(4):
        assign(model, optimizer, model.embeddings.pack(batch(rng, 64)[1]))
    for kernel in model.embeddings.kernels.values():  # as if they were trained
        kernel[...] += jnp.asarray(rng.random(kernel.shape), kernel.dtype)
    return model


@pytest.fixture(scope="module")
def predictor(model, tmp_path_factory, symbolic_sizes):
    path = tmp_path_factory.mktemp("dynamic") / "a.predictor"
    sj.export_predictor(model, path, batch_size=BATCH)
    return sj.load_predictor(path)


# A program: operation by operation, each would be compiled.
logits_of = sj.jit(lambda model, dense, ids: model(dense, ids))


def of_model(model, dense, ids):
    logits = logits_of(model, dense, model.embeddings.pack(ids))
    return scipy.special.expit(np.asarray(logits))


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_ids_have_the_rows_of_the_model_and_new_ones_what_they_would_begin_with(
    model, predictor
):
    dense, ids = batch(np.random.default_rng(1), 21)  # several programs
    before = jax.tree.map(np.asarray, nnx.state(model))
    close(predictor.predict(dense, ids), of_model(model, dense, ids))
    new = batch(np.random.default_rng(2), 21, first=90)  # some of them are known
    close(predictor.predict(*new), of_model(model, *new))
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


def test_the_example_of_a_file_has_ids_with_rows(predictor):
    """So its answer depends on the index and on the rows."""
    dense, *given = predictor.model.example()
    dynamic = [each for each in given if each.data is not None]
    low = np.concatenate([each.indices.view(np.uint32) for each in dynamic])
    high = np.concatenate([each.data for each in dynamic])
    rng, known = np.random.default_rng(0), set()
    for _ in range(4):
        ids = batch(rng, 64)[1]
        tags = np.asarray(ids["tags"].low), np.asarray(ids["tags"].high)
        known |= {*joined(*tags).tolist()}
        for name in ("user", "seen"):
            known |= {*ids[name].compressed().tolist()}
    assert len(low) == 3 and dense.shape == (1, 2)
    assert {*joined(low, high).tolist()} <= known


def test_ids_without_a_row_can_read_zeros_and_rows_have_fewer_bits(model, tmp_path):
    dense, ids = batch(np.random.default_rng(3), 9, first=10**6)
    ids = ids | {"tags": np.zeros((9, 1), np.uint64)}  # id 0 is known
    none = np.full(9, -1)
    without = ids | {"user": none, "seen": none[:, None]}
    path = tmp_path / "a.predictor"
    sj.export_predictor(
        model, path, table_dtype="int8", unknown_ids="zeros", batch_size=1
    )
    found = sj.load_predictor(path).predict(dense, ids)
    np.testing.assert_allclose(found, of_model(model, dense, without), atol=0.01)
    assert not np.allclose(found, of_model(model, dense, ids), atol=0.01)


def test_a_model_on_a_mesh_gives_the_same_file(tmp_path):
    dense, ids = batch(np.random.default_rng(5), 64)
    found = []
    for mesh in (sj.make_mesh(data=1, model=1), sj.make_mesh(data=2, model=4)):
        with jax.set_mesh(mesh):
            model = Clicks()
            optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
            assign(model, optimizer, model.embeddings.pack(ids))
            sj.export_predictor(model, tmp_path / "a.predictor", batch_size=BATCH)
        found.append(sj.load_predictor(tmp_path / "a.predictor").predict(dense, ids))
    close(*found)


def test_what_does_not_fit(model, predictor, tmp_path, wrong_types):
    path = tmp_path / "a.predictor"
    with pytest.raises(ValueError, match='unknown_ids is "init" or "zeros"'):
        sj.export_predictor(model, path, unknown_ids="no")  # pyrefly: ignore
    config = sj.clicks.WideDeepConfig(dim=4, hidden=(8,))
    static = sj.clicks.WideDeep(
        config, num_dense=0, features={"user": 9}, rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="has no dynamic tables: leave it out"):
        sj.export_predictor(static, path, unknown_ids="zeros")
    dense, ids = batch(np.random.default_rng(6), 3)
    with pytest.raises(
        TypeError, match="feature 'user': ids of dynamic tables are int"
    ):
        predictor.predict(dense, ids | {"user": np.zeros(3)})
    with pytest.raises(ValueError, match="feature 'user': id -5 is negative"):
        predictor.predict(dense, ids | {"user": np.full(3, -5)})
    with pytest.raises(ValueError, match=r"with n=3, as dense has; got 2 examples"):
        predictor.predict(dense, ids | {"user": np.zeros(2, np.int64)})
    lists = WideIds.ragged(np.arange(3), np.arange(4), np.ones(3))
    with pytest.raises(ValueError, match="'tags' have weights; predictors take none"):
        predictor.predict(dense, ids | {"tags": lists})
    long = WideIds.ragged(np.arange(4), np.array([0, 4, 4, 4]))
    with pytest.raises(ValueError, match="a list of more than 3 ids"):
        predictor.predict(dense, ids | {"seen": long})
