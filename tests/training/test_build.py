"""Builds a model and its optimizer in one call."""

from typing import Any

import jax
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj

CONFIG = sj.NetworkConfig.autoencoder((8,))
ROWS = scipy.sparse.csr_array(np.eye(6, 40))


def parameters(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    "data",
    [ROWS, sj.CSR.from_scipy(ROWS), sj.SparseDataset.from_scipy(ROWS)],
    ids=["scipy", "csr", "dataset"],
)
def test_is_the_same_as_the_long_form(data):
    model, optimizer = sj.build(CONFIG, data, sj.optimizers.sgd(0.5), seed=3)
    written = sj.FeedForward(CONFIG, inputs=40, outputs=40, rngs=nnx.Rngs(3))
    for ours, theirs in zip(parameters(model), parameters(written), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert optimizer.rule == sj.optimizers.sgd(0.5)
    assert sj.build(CONFIG, data)[1].rule == sj.optimizers.adam(1e-3)


def test_other_targets():
    model, _ = sj.build(CONFIG, ROWS, targets=scipy.sparse.csr_array((6, 13)))
    assert (model.num_features, model.num_items) == (40, 13)


def test_trains_on_a_mesh():
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        model, optimizer = sj.build(CONFIG, ROWS)
        history = sj.fit(model, optimizer, ROWS, num_epochs=1, batch_size=64)
        assert not model.output.kernel[...].sharding.is_fully_replicated
    assert np.isfinite(history[0]["loss"])


def test_histories_are_for_models_of_histories():
    names = np.array(["u"]), np.arange(4).astype(str)
    histories = sj.SequenceDataset(np.array([0, 3]), np.array([1, 2, 1]), *names)
    model, _ = sj.build(sj.GRUConfig(width=4), histories)
    assert model.num_items == 4
    with pytest.raises(ValueError, match="a network does not read histories"):
        sj.build(CONFIG, histories)
    targets: Any = {"targets": ROWS}
    with pytest.raises(ValueError, match="leave out targets"):
        sj.build(sj.GRUConfig(width=4), histories, **targets)


def test_refuses_what_has_no_columns():
    with pytest.raises(TypeError, match="data must be a SparseDataset.* got list"):
        sj.build(CONFIG, [[1, 2]])
    with pytest.raises(TypeError, match="targets must be .* got ndarray"):
        sj.build(CONFIG, ROWS, targets=np.eye(6))
