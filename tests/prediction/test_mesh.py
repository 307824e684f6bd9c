"""Metrics, recommendations and vectors on a mesh equal those on one device."""

import dataclasses
import functools
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matrices import random_csr

import sparsejax as sj
from sparsejax import metrics
from sparsejax.mesh import layout
from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.mesh.layout import make_mesh
from sparsejax.sparse import CSR

ROWS, ITEMS = 45, 300


def matrix_of(density, seed):
    return random_csr(ROWS, ITEMS, density, seed=seed).to_scipy().astype(bool)


def test_metrics():
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(ITEMS)[:60] for _ in range(8)]).astype(np.int32)
    ids[:, 50:] = -1
    labels = random_csr(8, ITEMS, 0.1)
    # Row 5 has an item that does not exist, row 6 one below 0, the last no room.
    indices, indptr = np.array(labels.indices), np.array(labels.indptr)
    indices[indptr[6] - 1], indices[indptr[6]] = ITEMS, -1
    nse = int(indptr[-1]) - 1
    broken = CSR(None, jnp.asarray(indices[:nse]), jnp.asarray(indptr), num_cols=ITEMS)

    @jax.jit
    def run(ids, labels):
        recall = metrics.recall_at_k(ids, labels, 20)
        counts = metrics.recommendation_counts(ids, ITEMS, 20)
        return metrics.ndcg_at_k(ids, labels), recall, counts

    is_label = jax.jit(metrics.is_label)
    want = run(ids, broken)
    assert np.isnan(want[0]).tolist() == [False] * 5 + [True] * 3
    mesh = make_mesh(data=2, model=4)
    with jax.set_mesh(mesh):
        got = run(ids, jax.jit(ShardedCSR.of)(broken))
        found = is_label(ids, jax.jit(ShardedCSR.of)(labels))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(found, is_label(ids, labels))
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


class Model(sj.FeedForward):
    """A model that counts how often a program is traced from it."""

    times_traced = 0

    def top_k(self, x, k, **options):
        Model.times_traced += 1
        return super().top_k(x, k, **options)


def a_model():
    config = sj.NetworkConfig.autoencoder((8, 6), temperature=0.5)
    return Model(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))


def results(made):
    """The results of all functions that use a model, on the current mesh."""
    train = matrix_of(0.05, 1)
    new = scipy.sparse.csr_array(matrix_of(0.03, 2).toarray() & ~train.toarray())
    # A row of three has one more that is unknown, another has two.
    heldout = dataclasses.replace(
        sj.SparseDataset.from_scipy(new), left_out=np.arange(ROWS) % 3
    )
    some = {"k": 5, "batch_size": 20}
    found = sj.recommend(made, train, exclude=train, **some)
    plain = sj.recommend(made, train, 7, exclude=None)
    similar = sj.similar_items(made, [3, ITEMS - 1, 40], k=4)
    measured = sj.evaluate(made, train, heldout, **some)
    # Fewer candidates than k, and most of them held out.
    some_items = matrix_of(0.01, 3) + new
    with pytest.warns(UserWarning, match="candidates .* they are left out"):
        among = sj.evaluate(made, train, heldout, candidates=some_items, **some)
    assert measured["entries_unknown"] > ROWS and measured["users_unknown"] == 0
    return {
        "ids": (found.ids, plain.ids, similar.ids),
        "scores": (found.scores, plain.scores, similar.scores),
        "measured": (measured, among),
        "vectors": (sj.item_vectors(made), sj.user_vectors(made, train)),
    }


def test_a_model_is_used_as_on_one_device():
    want = results(a_model())
    with jax.set_mesh(make_mesh(data=2, model=4)):
        got = results(a_model())
    jax.tree.map(np.testing.assert_array_equal, got.pop("ids"), want["ids"])
    for name, value in got.items():
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, value, want[name])


@pytest.mark.parametrize(("data", "model"), [(8, 1), (1, 8)])
def test_one_program_serves_all_batches(data, model):
    matrix = scipy.sparse.csr_array(np.tri(64, ITEMS, 200, dtype=bool))
    with jax.set_mesh(make_mesh(data=data, model=model)):
        made = a_model()
        before = Model.times_traced
        found = sj.recommend(made, matrix, 3, exclude=matrix, batch_size=9)
        assert Model.times_traced == before + 1
    # The last rows have the first 264 items.
    assert found.ids[-1].min() >= 264 and len(found) == 64


def test_a_model_made_on_a_mesh_is_exported(tmp_path, symbolic_sizes):
    train = matrix_of(0.05, 1)
    with jax.set_mesh(make_mesh(data=2, model=4)):
        sj.export_predictor(a_model(), tmp_path / "file", k=5, batch_size=20)
        got = sj.load_predictor(tmp_path / "file").recommend(train, exclude=train)
    want = sj.recommend(a_model(), train, 5, exclude=train)
    np.testing.assert_array_equal(got.ids, want.ids)


def test_an_export_that_fails_leaves_the_mesh_that_is_set(
    tmp_path, symbolic_sizes, monkeypatch
):
    def full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    mesh = make_mesh(data=2, model=4)
    with jax.set_mesh(mesh):
        with pytest.raises(OSError, match="disk full"):
            sj.export_predictor(a_model(), tmp_path / "file", k=5, batch_size=20)
        assert jax.sharding.get_mesh() == mesh
    assert jax.sharding.get_mesh().empty


def test_an_array_that_processes_exchange():
    mesh = make_mesh(data=2, model=4)
    array = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
    divided = jax.device_put(array, NamedSharding(mesh, P("model")))
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        parts = list(layout.exchanged(divided, piece_elements=5 * 7))
    assert [len(part) for part in parts] == [7, 7, 7, 3]
    np.testing.assert_array_equal(np.concatenate(parts), array)
    [whole] = layout.exchanged(divided)  # not as many rows as a piece has room for
    np.testing.assert_array_equal(whole, array)
    assert (whole if whole.base is None else whole.base).size == array.size
