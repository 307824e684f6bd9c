"""A layer of DSSTNE: dropout, normalization, and the limit of its deltas."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from dsstne_networks import made
from flax import nnx

from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.network import Network
from sparsejax.dsstne.network_files import Parameters
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


@pytest.mark.parametrize(
    ("at", "own"),
    [("h", None), ("h", [3.0, 0.5, 1.0, 1.0, 2.0]), ("o", [3.0, 0.5, 1.0, 1.0, 2.0])],
)
def test_the_norm_of_deltas_is_limited(at, own):
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
    layers[1 if at == "h" else 2]["DeltaNorm"] = 0.1
    held = Network(
        Definition.from_json({"Layers": layers, "ErrorFunction": "L2"}),
        parameters=free.parameters(),
        weighted=own is not None,
        brake_steps=9,
        rngs=nnx.Rngs(0),
    )
    weights = free.parameters().weights
    out = x @ weights["x", "h"] @ weights["h", "o"]

    def limited(delta, name):
        if name != at:
            return delta
        norm = np.linalg.norm(delta, axis=1, keepdims=True)
        assert (norm > 0.1).any()
        return delta * np.minimum(1, 0.1 / norm)

    delta = limited(w[:, None] * (out - labels), "o")
    expected = x.T @ limited(delta @ weights["h", "o"].T, "h") / 5

    def loss(network):
        target = CSR.from_scipy(scipy.sparse.csr_array(labels))
        return network.loss({"x": jnp.float32(x)}, target, weights=jnp.float32(w / 5))

    grads = nnx.grad(loss)(held)
    found = [v[...] for path, v in nnx.to_flat_state(grads) if v[...].shape == (3, 2)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-6)
    error = (w * ((out - labels) ** 2).sum(axis=1)).sum() / 2
    assert held.brake is not None
    np.testing.assert_allclose(held.brake.mean[...], 0.1 * error, rtol=1e-5)


def test_denoising():
    """In training half of the entries of a sparse input are dropped, others doubled."""
    layers: list[dict[str, Any]] = [
        {"Name": "x", "N": 300, "Sparse": True},
        {"Name": "h", "N": 300, "Activation": "Linear"},
        {"Name": "o", "N": 1},
    ]
    numbers = {("x", "h"): np.eye(300), ("h", "o"): np.ones((300, 1))}
    parameters = Parameters(
        numbers, {pair: np.zeros(array.shape[1]) for pair, array in numbers.items()}
    )
    network = made(*layers, Denoising={"p": 0.5}, parameters=parameters)
    rng = np.random.default_rng(0)
    x = np.where(rng.random((4, 300)) < 0.5, rng.uniform(1, 2, (4, 300)), 0)
    given = CSR.from_scipy(scipy.sparse.csr_array(x))
    quiet = network.values(given, "h", deterministic=True)
    np.testing.assert_allclose(quiet, x, rtol=1e-6)
    noisy = np.asarray(network.values(given, "h", deterministic=False))
    stays = noisy != 0
    np.testing.assert_allclose(noisy[stays], 2 * x[stays], rtol=1e-6)
    assert 0.4 < stays[x != 0].mean() < 0.6
    again = np.asarray(network.values(given, "h", deterministic=False))
    assert ((again != 0) != stays).any()
    # Dense data have no denoising, as in DSSTNE.
    [first, *others] = network.definition.layers
    assert first.denoising
    dense = dataclasses.replace(
        network.definition, layers=(dataclasses.replace(first, sparse=False), *others)
    )
    network = Network(dense, parameters=parameters, rngs=nnx.Rngs(0))
    found = network.values({"x": jnp.float32(x)}, "h", deterministic=False)
    np.testing.assert_allclose(found, x, rtol=1e-6)
