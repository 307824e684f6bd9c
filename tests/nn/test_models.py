"""FeedForward models as built from a NetworkConfig."""

import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from matrices import oracle, random_csr

from sparsejax.nn.activations import ACTIVATIONS
from sparsejax.nn.config import HiddenConfig, InputConfig, NetworkConfig, OutputConfig
from sparsejax.nn.models import FeedForward
from sparsejax.sparse import CSR

PLAIN: dict[str, Any] = {
    "activation": "relu",
    "normalize": False,
    "corruption": 0.0,
    "temperature": None,
}


def build(hidden=(6,), inputs=12, outputs=12, **options) -> FeedForward:
    config = NetworkConfig.autoencoder(hidden, **(PLAIN | options))
    return FeedForward(config, inputs=inputs, outputs=outputs, rngs=nnx.Rngs(0))


def test_is_the_network_it_says():
    model = build((6, 5), outputs=7, activation="tanh", normalize=True)
    x = random_csr(4, 12, 0.4)
    h = oracle(x)
    norms = np.linalg.norm(h, axis=1, keepdims=True)
    h = h / np.where(norms > 0, norms, 1)
    h = np.tanh(h @ np.asarray(model.first.kernel[:12]))
    h = np.tanh(h @ np.asarray(model.rest[0].kernel[...]))
    labels, weights = random_csr(4, 7, seed=1), jnp.array([1.0, 0, 2, 1])

    @nnx.jit
    def used(model, x, labels):
        loss = model.loss(x, labels, weights=weights)
        return model.encode(x), model(x), model.top_k(x, 3)[0], loss

    encoded, scored, ids, loss = used(model, x, labels)
    np.testing.assert_allclose(encoded, h, rtol=1e-5, atol=1e-6)
    scores = h @ np.asarray(model.output.kernel[:7]).T
    np.testing.assert_allclose(scored, scores, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(ids, np.argsort(-scores, axis=1)[:, :3])
    log_softmax = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    expected = -np.asarray(weights) @ (log_softmax * oracle(labels)).sum(axis=1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert (model.num_features, model.num_items) == (12, 7)


def test_hidden_layers_in_bfloat16():
    layers = (
        InputConfig(),
        *(HiddenConfig(name=n, size=8, dtype="bfloat16") for n in ("a", "b")),
        OutputConfig(),
    )
    config = NetworkConfig(layers=layers)
    assert NetworkConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    model = FeedForward(config, inputs=12, outputs=12, rngs=nnx.Rngs(0))
    x = random_csr(4, 12, 0.4)

    def rounded(y):
        return np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64)

    first = rounded(np.maximum(rounded(oracle(x) @ model.first.kernel[:12]), 0))
    second = np.maximum(rounded(first @ rounded(model.rest[0].kernel[...])), 0)
    h = model.encode(x)
    assert h.dtype == jnp.bfloat16
    # A sum may be rounded to a neighbour.
    np.testing.assert_allclose(np.asarray(h, np.float64), second, rtol=2**-6, atol=1e-3)
    assert np.abs(second).max() > 0.1
    loss, grads = nnx.jit(nnx.value_and_grad(lambda m: m.loss(x, x)))(model)
    assert loss.dtype == jnp.float32
    leaves = jax.tree.leaves(grads)
    assert all(g.dtype == jnp.float32 and np.isfinite(g).all() for g in leaves)


def test_precision_of_all_products():
    config = NetworkConfig.autoencoder((8, 8), precision="highest")
    model = FeedForward(config, inputs=12, outputs=12, rngs=nnx.Rngs(0))

    def used(model, x):
        return model.loss(x, x), model.top_k(x, 3), model.output.scores(model.encode(x))

    traced = nnx.jit(used).lower(model, random_csr(4, 12, 0.4))
    products = [
        x for x in traced.as_text().splitlines() if "stablehlo.dot_general" in x
    ]
    # The hidden layer's, which is shared or made three times, and each of the output's.
    assert len(products) >= 4
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products)


def test_noise_is_for_training_only():
    model = build((64,), corruption=0.5, dropout=0.5)
    x = random_csr(8, 12, 0.6)
    silent = nnx.jit(lambda model: model.encode(x, deterministic=True))
    encode = nnx.jit(lambda model: model.encode(x))
    quiet = np.asarray(silent(model))
    np.testing.assert_array_equal(quiet, silent(model))
    assert np.abs(encode(model) - quiet).max() > 0
    assert np.abs(np.subtract(encode(model), encode(model))).max() > 0
    model.eval()
    np.testing.assert_array_equal(encode(model), quiet)
    model.train()
    assert np.abs(encode(model) - quiet).max() > 0
    np.testing.assert_array_equal(model.top_k(x, 2)[0], model.top_k(x, 2)[0])


def test_tied():
    model = build((6,), tied=True)
    assert model.first.kernel is model.output.kernel
    kernels = [p for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)]
    assert sum("kernel" in p for p in kernels) == 1
    x = random_csr(4, 12, 0.4)

    def loss(kernel):
        h = jax.nn.relu(x.todense() @ kernel[:12])
        return -jnp.sum(jax.nn.log_softmax(h @ kernel[:12].T) * x.todense())

    expected = jax.jit(jax.grad(loss))(model.output.kernel[...])
    gradient_of = nnx.jit(nnx.grad(lambda m: m.loss(x, x)))
    gradients = jax.tree.leaves(gradient_of(model))
    (gradient,) = (g for g in gradients if g.shape == expected.shape)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="as many items as features, got 9 and 12"):
        build((6,), outputs=9, tied=True)


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown activation 'sine'; known: celu"):
        build(activation="sine")
    with pytest.raises(ValueError, match="l3_loss"):
        build(loss="l3_loss")


def test_every_activation_runs():
    x = random_csr(3, 12)
    for name in ACTIVATIONS:
        assert build(activation=name).encode(x).shape == (3, 6)


@pytest.mark.parametrize("name", ["tanh", "relu", "linear"])
def test_a_model_can_be_pickled(name):
    model = build((4, 3), activation=name)
    again = pickle.loads(pickle.dumps(model))
    x = random_csr(4, 12, 0.4)
    np.testing.assert_array_equal(
        again(x, deterministic=True), model(x, deterministic=True)
    )


def test_a_scipy_matrix_is_refused(wrong_types):
    config = NetworkConfig.autoencoder((3,))
    model = FeedForward(config, inputs=5, outputs=5, rngs=nnx.Rngs(0))
    matrix: Any = scipy.sparse.csr_array(np.eye(2, 5, dtype=np.float32))
    x, ids = CSR.from_scipy(matrix), jnp.zeros((2, 1), jnp.int32)
    for call in (
        model,
        model.encode,
        lambda rows: model.top_k(rows, 1),
        lambda rows: model.top_k(x, 1, exclude=rows),
        lambda rows: model.item_scores(rows, ids),
        lambda rows: model.loss(x, rows),
    ):
        with pytest.raises(
            TypeError, match="expected a CSR, got csr_array; of a SciPy"
        ):
            call(matrix)
