"""Profiling a training, on a GPU, by hand."""

import jax
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj


@pytest.mark.gpu
def test_trains_on_after_a_trace(tmp_path):
    """Loops within a step of Adam, in a CUDA graph, once made the next `fit` fail."""
    rng = np.random.default_rng(0)
    x = scipy.sparse.random_array((2048, 3000), density=0.005, rng=rng, format="csr")
    x.data[:] = 1

    def fit():
        config = sj.NetworkConfig.autoencoder((16,))
        model = sj.FeedForward(config, inputs=3000, outputs=3000, rngs=nnx.Rngs(0))
        optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
        sj.fit(model, optimizer, x.astype(np.float32), batch_size=64, num_epochs=2)
        return np.asarray(model.output.kernel[...])

    with jax.profiler.trace(str(tmp_path)):
        fit()
    assert np.isfinite(fit()).all()
