"""Trains under JAX settings that change dtypes or random numbers, or forbid operations."""

import contextlib
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj


def rows() -> sj.SparseDataset:
    rng = np.random.default_rng(0)
    dense = (rng.random((64, 40)) < 0.2) * rng.integers(1, 4, (64, 40))
    dense[5], dense[:, 7] = 0, 0
    return sj.SparseDataset.from_scipy(scipy.sparse.csr_array(dense.astype(np.float32)))


def network() -> sj.FeedForward:
    config = sj.NetworkConfig.autoencoder(hidden=(8,), corruption=0.0)
    return sj.FeedForward(config, inputs=40, outputs=40, rngs=nnx.Rngs(0))


def losses(data: sj.SparseDataset, *, rank: bool) -> list[float]:
    """The losses of a training, of one with fused updates, and of one on a mesh."""
    found = []
    for rule, on_mesh, fused in [
        (sj.optimizers.adam(1e-2), False, False),
        (sj.optimizers.adagrad(0.1), False, True),
        (sj.optimizers.adam(1e-2), True, False),
    ]:
        mesh = contextlib.nullcontext()
        if on_mesh:  # a call sets the mesh, also without `with`
            mesh = jax.set_mesh(sj.make_mesh(data=2, model=2))
        with mesh:
            model = network()
            options = {"num_epochs": 2, "batch_size": 64, "fused": fused}
            history = sj.fit(model, sj.Optimizer(model, rule), data, **options)
            leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
            assert {str(leaf.dtype) for leaf in leaves} == {"float32"}
            if rank:
                sj.evaluate(model, data, data, k=3, exclude=None)
                assert np.isfinite(
                    sj.recommend(model, data, k=3, exclude=None).scores
                ).all()
        found.append(history[-1]["loss"])
    return found


@pytest.mark.usefixtures("symbolic_sizes")
def test_with_x64_training_is_the_same(tmp_path):
    data = rows()
    plain = losses(data, rank=False)
    with jax.enable_x64(True):
        assert losses(data, rank=True) == pytest.approx(plain, rel=1e-4)
        model = network()
        sj.export_predictor(model, tmp_path / "predictor", k=3)
        got = sj.load_predictor(tmp_path / "predictor").recommend(data)
        want = sj.recommend(model, data, k=3, exclude=None)
        np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)


def strict_loss() -> float:
    data, model = rows(), network()
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-2))
    [*_, last] = sj.fit(model, optimizer, data, num_epochs=2, batch_size=64)
    jax.config.update("jax_debug_infs", False)  # an item is denied by -inf
    sj.evaluate(model, data, data, k=3, exclude=None)
    assert np.isfinite(sj.recommend(model, data, k=3, exclude=None).scores).all()
    return last["loss"]


def test_models_train_where_nan_is_an_error_and_with_other_random_numbers():
    settings = {"JAX_DEBUG_NANS": "1", "JAX_DEBUG_INFS": "1"}
    settings |= {"JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_THREEFRY_PARTITIONABLE": "0"}
    command = [sys.executable, "-W", "error", "-c"]
    done = subprocess.run(
        [*command, "import test_modes; print(test_modes.strict_loss())"],
        env={**os.environ, **settings},
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert 0 < float(done.stdout.splitlines()[-1]) < 1000
