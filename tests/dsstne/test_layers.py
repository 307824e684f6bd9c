"""A layer of DSSTNE: dropout, normalization, the limit of its deltas."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from dsstne_networks import made
from flax import nnx

from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.network import Network
from sparsejax.sparse import CSR


@pytest.mark.parametrize(
    ("activation", "dropped", "kept"),
    [
        ("Sigmoid", 0.5, lambda a: a),
        ("Tanh", 0.0, lambda a: 2 * a),
        ("ELU", -0.577350, lambda a: 1.154701 * a + 0.577350),
        ("SELU", None, None),
    ],
)
def test_dropout(activation, dropped, kept):
    network = made(
        {"Name": "x", "N": 400},
        {"Name": "h", "N": 400, "Activation": activation, "pDropout": 0.5},
        {"Name": "o", "N": 1},
    )
    x = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(5, 400)), jnp.float32)}
    a = np.asarray(network.values(x, "h", deterministic=True))
    network.train()
    found = np.asarray(network.values(x, "h"))
    if activation == "SELU":  # keeps mean and variance of a standard normal SELU
        assert abs(found.mean() - a.mean()) < 0.1
        return
    is_dropped = np.isclose(found, dropped, atol=1e-6)
    assert 0.45 < is_dropped.mean() < 0.55
    np.testing.assert_allclose(
        found[~is_dropped], kept(a)[~is_dropped], rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize(
    ("activation", "dropped"),
    [("Sigmoid", 0.5), ("Tanh", 0.0), ("ELU", -0.577350)],
)
def test_dropout_of_an_output(activation, dropped):
    """The loss is of what the layer holds then."""
    network = made(
        {"Name": "x", "N": 3},
        {"Name": "o", "N": 300, "Activation": activation, "pDropout": 0.5},
        ErrorFunction="L2",
    )
    x = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)}
    labels = CSR.from_scipy(scipy.sparse.csr_array((4, 300)))
    quiet = np.asarray(network.values(x, "o", deterministic=True), np.float64)
    loss = network.loss(x, labels, deterministic=True)
    np.testing.assert_allclose(loss, (quiet**2).sum() / 2, rtol=1e-5)
    again = nnx.clone(network)
    noisy = np.asarray(network.values(x, "o", deterministic=False), np.float64)
    assert 0.4 < np.isclose(noisy, dropped, atol=1e-6).mean() < 0.6
    loss = again.loss(x, labels, deterministic=False)
    np.testing.assert_allclose(loss, (noisy**2).sum() / 2, rtol=1e-5)


def test_batch_normalization_leaves_padding_out_and_keeps_statistics():
    network = made(
        {"Name": "x", "N": 3},
        {"Name": "h", "N": 2, "Activation": "Linear", "BatchNormalization": True},
        {"Name": "o", "N": 1, "Activation": "Linear"},
        ErrorFunction="L2",
    )
    x = np.random.default_rng(0).normal(size=(4, 3))
    z = x @ network.parameters().weights["x", "h"].astype(np.float64)
    batch = {"x": jnp.asarray(np.vstack([x, np.full((1, 3), 1e3)]), jnp.float32)}
    labels = CSR.from_scipy(scipy.sparse.csr_array((5, 1)))
    weights = jnp.array([1.0, 1, 1, 1, 0])
    network.train()
    loss = network.loss(batch, labels, weights=weights)
    h = (z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5)
    out = h @ network.parameters().weights["h", "o"].astype(np.float64)
    np.testing.assert_allclose(loss, (out**2).sum() / 2, rtol=1e-4)
    kept = network.parameters().normalizations["h"]
    np.testing.assert_allclose(kept.mean, 0.1 * z.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(kept.variance, 0.9 + 0.1 * z.var(0), rtol=1e-4)


@pytest.mark.parametrize("own", [None, [3.0, 0.5, 1.0, 1.0, 2.0]])
def test_the_norm_of_deltas_is_limited(own):
    """Also with weights of examples; and the brake sees the sum of the losses."""
    w = np.ones(5) if own is None else np.array(own)
    layers: list[dict[str, Any]] = [
        {"Name": "x", "N": 3},
        {"Name": "h", "N": 2, "Activation": "Linear"},
        {"Name": "o", "N": 4, "Activation": "Linear"},
    ]
    x = np.random.default_rng(0).normal(size=(5, 3))
    labels = np.random.default_rng(1).normal(size=(5, 4))
    free = made(*layers, ErrorFunction="L2")
    layers[1]["DeltaNorm"] = 0.1
    held = Network(
        Definition.from_json({"Layers": layers, "ErrorFunction": "L2"}),
        parameters=free.parameters(),
        weighted=own is not None,
        brake_steps=9,
        rngs=nnx.Rngs(0),
    )
    weights = free.parameters().weights
    out = x @ weights["x", "h"] @ weights["h", "o"]
    delta = w[:, None] * (out - labels) @ weights["h", "o"].T
    norm = np.linalg.norm(delta, axis=1, keepdims=True)
    assert (norm > 0.1).any()
    expected = x.T @ (delta * np.minimum(1, 0.1 / norm)) / 5

    def loss(network):
        target = CSR.from_scipy(scipy.sparse.csr_array(labels))
        return network.loss({"x": jnp.float32(x)}, target, weights=jnp.float32(w / 5))

    grads = nnx.grad(loss)(held)
    found = [v[...] for path, v in nnx.to_flat_state(grads) if v[...].shape == (3, 2)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-6)
    error = (w * ((out - labels) ** 2).sum(axis=1)).sum() / 2
    assert held.brake is not None
    np.testing.assert_allclose(held.brake.mean[...], 0.1 * error, rtol=1e-5)
