"""Convolution and pooling of DSSTNE, compared with loops over positions."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from dsstne_networks import made

from sparsejax.sparse import CSR


def naive_windows(image, kernel, stride, padding, make):
    """Applies `make(window)` at each position of `[channels, ..., y, x]`; padding is NaN."""
    around = [(0, 0), *((n, n) for n in padding)]
    padded = np.pad(image, around, constant_values=np.nan)
    sizes = zip(padded.shape[1:], kernel, stride, strict=True)
    counts = [(size - k) // step + 1 for size, k, step in sizes]
    made = []
    for place in np.ndindex(*counts):
        starts = np.multiply(place, stride)
        ranges = (slice(i, i + k) for i, k in zip(starts, kernel, strict=True))
        made.append(make(padded[(slice(None), *ranges)].reshape(len(image), -1)))
    return np.stack(made, axis=1)  # [channels, places]


# The sizes of source, kernel, stride; and how much is added on each side.
WINDOWS = {
    "stride 1": ([6, 4, 3], [3, 3], [1, 1], [1, 1]),
    "stride 2": ([6, 4, 3], [2, 2], [2, 2], [0, 0]),
    "one dimension": ([7, 2], [3], [1], [1]),
    "three dimensions": ([5, 4, 7, 2], [3, 1, 3], [1, 1, 2], [1, 0, 0]),
    "a narrow source": ([2, 6, 3], [4, 3], [1, 1], [1, 1]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_over_two_sources(name):
    """What a window makes of each source is added."""
    size, kernel, stride, padding = WINDOWS[name]
    layer = {"Kind": "Hidden", "Source": ["x", "y"], "Kernel": kernel, "KernelStride": stride}  # fmt: skip
    network = made(
        {"Name": "x", "N": size},
        {"Name": "y", "Kind": "Input", "N": size},
        {"Name": "Max", "Type": "Pooling", "Function": "Max", **layer},
        {"Name": "Average", "Type": "Pooling", "Function": "Average", **layer},
        {"Name": "c", "Type": "Convolutional", "N": 2, "Activation": "Linear", **layer},
    )
    rng = np.random.default_rng(0)
    images = {source: rng.normal(size=(2, *reversed(size))) for source in ("x", "y")}
    given = {
        source: jnp.asarray(array, jnp.float32) for source, array in images.items()
    }
    weights = network.parameters().weights
    for function in ("Max", "Average", "c"):
        found = np.asarray(network.values(given, function, deterministic=True))
        expected = np.zeros(found.shape)
        for source, batch in images.items():
            kernels = weights["x", "c"] if source == "x" else weights["y", "c"]
            kernels = kernels.reshape(2, size[-1], -1).astype(np.float64)
            make = {
                "Max": lambda window: np.nanmax(window, axis=1),
                "Average": lambda window: np.nanmean(window, axis=1),
                "c": lambda window, k=kernels: np.nansum(window * k, axis=(1, 2)),
            }[function]
            for row, image in enumerate(batch):
                parts = naive_windows(
                    image, kernel[::-1], stride[::-1], padding[::-1], make
                )
                expected[row] += parts.ravel()
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_local_response_normalization():
    network = made(
        {"Name": "x", "N": [6, 4, 3]},
        {"Name": "p", "Kind": "Hidden", "Type": "Pooling", "Function": "LRN"},
        {"Name": "o", "N": 1},
        LRN={"k": 1.5, "n": 3, "alpha": 0.5, "beta": 0.7},
    )
    image = np.random.default_rng(0).normal(size=(2, 3, 4, 6))
    found = network.values({"x": jnp.float32(image)}, "p", deterministic=True)
    squares = np.pad(image**2, ((0, 0), (1, 1), (0, 0), (0, 0)))
    total = squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]
    expected = image * (1.5 + 0.5 / 3 * total) ** -0.7
    np.testing.assert_allclose(found, expected.reshape(2, -1), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("function", ["Maxout", "DotProduct", "Cosine"])
def test_pooling_of_whole_layers(function):
    """And the units of a layer that it skips to are added."""
    size = 4 if function == "Maxout" else 2
    network = made(
        {"Name": "x", "N": 4},
        {"Name": "y", "Kind": "Input", "N": 4},
        {"Name": "z", "Kind": "Input", "N": 4, "Sparse": True},
        {"Name": "s", "Kind": "Input", "N": size},
        {"Name": "o", "Type": "Pooling", "Function": function, "Source": ["x", "y", "z"], "Skip": "s"},
        ErrorFunction="L2",
    )  # fmt: skip
    x, y, z = np.random.default_rng(0).normal(size=(3, 5, 4))
    z[0] = 0
    skipped = np.random.default_rng(1).normal(size=(5, size))
    given = {"x": jnp.float32(x), "y": jnp.float32(y), "s": jnp.float32(skipped), "z": CSR.from_scipy(scipy.sparse.csr_array(z))}  # fmt: skip
    expected = {
        "Maxout": np.maximum(np.maximum(x, y), z),
        "DotProduct": np.stack([(x * y).sum(1), (x * z).sum(1)], 1),
    }
    lengths = [np.linalg.norm(a, axis=1) + 1e-8 for a in (x, y, z)]
    expected["Cosine"] = expected["DotProduct"] / np.stack(
        [lengths[0] * lengths[1], lengths[0] * lengths[2]], 1
    )
    np.testing.assert_allclose(
        network(given), expected[function] + skipped, rtol=1e-5, atol=1e-6
    )
