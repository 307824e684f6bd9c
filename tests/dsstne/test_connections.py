"""Weights between layers of DSSTNE: initialization and sharing."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from dsstne_networks import made, rows
from flax import nnx

from sparsejax.dsstne.network import Network
from sparsejax.sparse import CSR


@pytest.mark.parametrize(
    ("scheme", "limit"),
    [
        ("Xavier", 0.5 * 3 * np.sqrt(6 / 500)),
        ("CaffeXavier", 3 * np.sqrt(3 / 200)),
        ("Uniform", 3.0),
        ("UnitBall", 3.0),
        ("Constant", 3.0),
    ],
)
def test_weights_start_in_their_range(scheme, limit):
    init = {"Scheme": scheme, "Scale": 3.0, "Bias": -0.5}
    network = made(
        {"Name": "x", "N": 300, "Sparse": True},
        {"Name": "h", "N": 200, "WeightInit": init},
        {"Name": "o", "N": 300, "WeightInit": init},
    )
    numbers = network.parameters()
    w = numbers.weights["x", "h"]
    assert 0.99 * limit < w.max() <= limit * (1 + 1e-6)
    low = {"UnitBall": 0, "Constant": 3}.get(scheme, -limit)
    assert low <= w.min() <= low + 0.01 * limit
    assert (numbers.biases["h", "o"] == -0.5).all()
    assert numbers.biases["h", "o"].shape == (300,)


def test_shared_weights_get_the_mean_gradient_and_locked_ones_none():
    layers = [
        {"Name": "x", "N": 3},
        {"Name": "h", "N": 3, "Activation": "Linear"},
        {
            "Name": "i",
            "N": 3,
            "Activation": "Linear",
            "SharedWeights": {
                "InputLayer": "h",
                "SourceInputLayer": "x",
                "SourceOutputLayer": "h",
                "Transposed": True,
            },
        },
        {"Name": "o", "N": 2, "Activation": "Linear"},
    ]
    network = made(*layers, ErrorFunction="L2")
    numbers = network.parameters()
    w, v = (numbers.weights[p].astype(np.float64) for p in (("x", "h"), ("i", "o")))
    x = np.random.default_rng(0).normal(size=(5, 3))
    np.testing.assert_allclose(
        network({"x": jnp.float32(x)}), x @ w @ w.T @ v, rtol=1e-4, atol=1e-6
    )
    last = network.definition.layers[-1]
    locked = dataclasses.replace(last.sources[0], locked=True)
    definition = dataclasses.replace(
        network.definition,
        layers=(
            *network.definition.layers[:-1],
            dataclasses.replace(last, sources=(locked,)),
        ),
    )
    network = Network(definition, parameters=numbers, rngs=nnx.Rngs(0))

    def loss(network):
        labels = CSR.from_scipy(scipy.sparse.csr_array((5, 2)))
        return network.loss({"x": jnp.float32(x)}, labels)

    grads = dict(nnx.to_flat_state(nnx.grad(loss)(network)))
    delta = (x @ w @ w.T @ v) @ v.T
    expected = (x.T @ (delta @ w) + delta.T @ (x @ w)) / 2
    found = [g[...] for g in grads.values() if g[...].shape == (3, 3)]
    np.testing.assert_allclose(found, [expected], rtol=1e-4, atol=1e-5)
    assert not any(g[...].shape == (3, 2) for g in grads.values())


def test_weights_that_sparse_inputs_and_an_output_share():
    """One kernel, of which a step reads the rows of the inputs, with the mean gradient."""
    shared = {"SourceInputLayer": "x", "SourceOutputLayer": "h"}
    network = made(
        {"Name": "x", "N": 300, "Sparse": True},
        {"Name": "y", "Kind": "Input", "N": 300, "Sparse": True},
        {"Name": "h", "Kind": "Hidden", "N": 3, "Source": ["x", "y"], "Activation": "Tanh", "SharedWeights": {"InputLayer": "y", **shared}},
        {"Name": "o", "N": 300, "Activation": "Linear", "SharedWeights": {"InputLayer": "h", "Transposed": True, **shared}},
        ErrorFunction="L2",
    )  # fmt: skip
    kernels = [v for _, v in nnx.to_flat_state(nnx.state(network)) if v[...].ndim == 2]
    assert len(kernels) == 1
    w = network.parameters().weights["x", "h"].astype(np.float64)
    x, y = (np.random.default_rng(s).random((4, 300)) < 0.02 for s in range(2))
    given = {"x": rows(*x.astype(float)), "y": rows(*y.astype(float))}
    h = np.tanh(x @ w + y @ w)
    scores = nnx.jit(lambda network: network(given))(network)
    np.testing.assert_allclose(scores, h @ w.T, rtol=1e-4, atol=1e-6)
    delta = h @ w.T - x
    behind = (delta @ w) * (1 - h**2)
    expected = (x.T @ behind + y.T @ behind + delta.T @ h) / 3
    loss_of = nnx.grad(lambda network: network.loss(given, given["x"]))
    grads = nnx.jit(loss_of)(network)
    [found] = [v[...] for _, v in nnx.to_flat_state(grads) if v[...].ndim == 2]
    np.testing.assert_allclose(found[:300], expected, rtol=1e-4, atol=1e-5)
