"""Training under settings of JAX that change types, random numbers or what is refused."""

import json
import os
import subprocess
import sys

import pytest

_SCRIPT = """
import json, pathlib, sys, tempfile, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, numpy as np, scipy.sparse
from flax import nnx
import sparsejax as sj

rng = np.random.default_rng(0)
dense = (rng.random((64, 40)) < 0.2) * rng.integers(1, 4, (64, 40))
dense[5], dense[:, 7] = 0, 0
data = sj.SparseDataset.from_scipy(scipy.sparse.csr_array(dense.astype(np.float32)))
config = sj.NetworkConfig.autoencoder(hidden=(8,), corruption=0.0)

def run(rule, **options):
    model = sj.FeedForward(config, inputs=40, outputs=40, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, rule)
    history = sj.fit(model, optimizer, data, num_epochs=2, batch_size=64, **options)
    dtypes = {str(a.dtype) for a in jax.tree.leaves(nnx.state(model, nnx.Param))}
    assert dtypes == {"float32"}, dtypes
    if "losses" not in sys.argv:
        jax.config.update("jax_debug_infs", False)  # an item is denied by -inf
        sj.evaluate(model, data, data, k=3, exclude=None)
        found = sj.recommend(model, data, k=3)
        assert np.isfinite(found.scores).all()
    return history[-1]["loss"]

losses = [run(sj.optimizers.adam(1e-2))]
if "more" in sys.argv or "losses" in sys.argv:
    losses.append(run(sj.optimizers.adagrad(0.1), fused=True))
    with jax.set_mesh(sj.make_mesh(data=2, model=2)):
        losses.append(run(sj.optimizers.adam(1e-2)))
if "more" in sys.argv:
    model = sj.FeedForward(config, inputs=40, outputs=40, rngs=nnx.Rngs(0))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "predictor"
        sj.export_predictor(model, path, k=3)
        got = sj.load_predictor(path).recommend(data)
        want = sj.recommend(model, data, k=3)
        np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)
print(json.dumps([float(loss) for loss in losses]))
"""


def _losses(*arguments: str, **settings: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "4", **settings},
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_with_x64_training_is_the_same():
    plain = _losses("losses")
    assert _losses("more", JAX_ENABLE_X64="1") == pytest.approx(plain, rel=1e-4)


def test_models_train_where_nan_is_an_error_and_with_other_random_numbers():
    settings = {"JAX_DEBUG_NANS": "1", "JAX_DEBUG_INFS": "1"}
    settings |= {"JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_THREEFRY_PARTITIONABLE": "0"}
    assert 0 < _losses(**settings)[0] < 1000
