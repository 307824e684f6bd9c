"""Convolution and pooling of DSSTNE against loops over places."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from dsstne_networks import made

from sparsejax.sparse import CSR


def naive_windows(image, kernel, stride, padding, make):
    """`make(window)` at each place of `[channels, y, x]`; padding is NaN."""
    channels, height, width = image.shape
    padded = np.full((channels, height + 2 * padding, width + 2 * padding), np.nan)
    padded[:, padding : padding + height, padding : padding + width] = image
    places = [range(0, n - kernel + 1, stride) for n in padded.shape[1:]]
    return np.array(
        [
            [make(padded[:, y : y + kernel, x : x + kernel]) for x in places[1]]
            for y in places[0]
        ]
    )


@pytest.mark.parametrize("function", ["Max", "Average", "LRN", "convolution"])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (2, 2)])
def test_windows(function, kernel, stride):
    layer = {"Name": "p", "Kind": "Hidden", "Type": "Pooling", "Function": function}
    layer |= {"Kernel": [kernel, kernel], "KernelStride": [stride, stride]}
    if function == "LRN":
        layer = {"Name": "p", "Kind": "Hidden", "Type": "Pooling", "Function": "LRN"}
    if function == "convolution":
        layer = layer | {"Type": "Convolutional", "N": 2, "Activation": "Linear"}
        del layer["Function"]
    network = made(
        {"Name": "x", "N": [6, 4, 3]},
        layer,
        {"Name": "o", "N": 1},
        LRN={"k": 1.5, "n": 3, "alpha": 0.5, "beta": 0.7},
    )
    rng = np.random.default_rng(0)
    image = rng.normal(size=(2, 3, 4, 6))  # [batch, channels, y, x]
    x = {"x": jnp.asarray(image, jnp.float32)}
    found = np.asarray(network.values(x, "p", deterministic=True))
    weights = None
    if function == "convolution":
        weights = network.parameters().weights["x", "p"].astype(np.float64)

    def make(window):
        if function == "Max":
            return np.nanmax(window, axis=(1, 2))
        if function == "Average":
            return np.nanmean(window, axis=(1, 2))
        return np.nansum(window * weights, axis=(1, 2, 3))

    padding = kernel // 2 if stride == 1 else 0
    for row, ours in zip(image, found, strict=True):
        if function == "LRN":
            squares = np.pad(row**2, ((1, 1), (0, 0), (0, 0)))
            total = squares[:-2] + squares[1:-1] + squares[2:]
            expected = row * (1.5 + 0.5 / 3 * total) ** -0.7
        else:
            expected = naive_windows(row, kernel, stride, padding, make)
            expected = expected.transpose(2, 0, 1)
        np.testing.assert_allclose(ours, expected.ravel(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("function", ["Maxout", "DotProduct", "Cosine"])
def test_pooling_of_whole_layers(function):
    network = made(
        {"Name": "x", "N": 4},
        {"Name": "y", "Kind": "Input", "N": 4},
        {"Name": "z", "Kind": "Input", "N": 4, "Sparse": True},
        {"Name": "o", "Type": "Pooling", "Function": function, "Source": ["x", "y", "z"]},
        ErrorFunction="L2",
    )  # fmt: skip
    x, y, z = np.random.default_rng(0).normal(size=(3, 5, 4))
    z[0] = 0
    given = {"x": jnp.float32(x), "y": jnp.float32(y), "z": CSR.from_scipy(scipy.sparse.csr_array(z))}  # fmt: skip
    expected = {
        "Maxout": np.maximum(np.maximum(x, y), z),
        "DotProduct": np.stack([(x * y).sum(1), (x * z).sum(1)], 1),
    }
    lengths = [np.linalg.norm(a, axis=1) + 1e-8 for a in (x, y, z)]
    expected["Cosine"] = expected["DotProduct"] / np.stack(
        [lengths[0] * lengths[1], lengths[0] * lengths[2]], 1
    )
    np.testing.assert_allclose(network(given), expected[function], rtol=1e-5, atol=1e-6)
