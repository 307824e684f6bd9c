"""Layers against NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matrices import oracle, random_csr

from sparsejax.nn.layers import (
    SparseDropout,
    SparseLinear,
    SparseOutput,
    normalize_rows,
)
from sparsejax.sparse import CSR


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_sparse_linear(combiner):
    x = random_csr(5, 9, 0.4)
    layer = SparseLinear(9, 4, combiner=combiner, rngs=nnx.Rngs(0))
    assert layer.bias is not None
    layer.bias[...] = jnp.arange(4.0)
    dense = oracle(x)
    counts = np.maximum(dense.sum(axis=1, keepdims=True), 1)
    dense /= {"sum": 1, "mean": counts, "sqrtn": np.sqrt(counts)}[combiner]
    expected = dense @ np.asarray(layer.kernel[...])[:9] + np.arange(4)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_kernels_have_zero_rows_up_to_a_multiple_of_256():
    linear = SparseLinear(300, 4, rngs=nnx.Rngs(0))
    output = SparseOutput(4, 257, rngs=nnx.Rngs(0))
    assert linear.kernel.shape == output.kernel.shape == (512, 4)
    assert output.bias is not None and output.bias.shape == (512,)
    assert (linear.kernel[300:] == 0).all() and (output.kernel[257:] == 0).all()
    assert (jnp.abs(linear.kernel[:300]).max(axis=1) > 0).all()
    assert output.scores(jnp.ones((2, 4))).shape == (2, 257)
    ids, _ = output.top_k(jnp.ones((2, 4)), 300)
    assert int(ids.max()) == 256 and (ids[:, 257:] == -1).all()


def test_dtypes():
    x = random_csr(5, 9)
    layer = SparseLinear(
        9, 4, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    assert layer.kernel.dtype == jnp.float32
    assert layer(x).dtype == jnp.bfloat16


def cosine_scores(h, kernel, bias, temperature) -> np.ndarray:
    h, kernel = np.asarray(h, np.float64), np.asarray(kernel, np.float64)
    norms = np.linalg.norm(h, axis=1)[:, None] * np.linalg.norm(kernel, axis=1)
    products = h @ kernel.T
    cosines = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
    return cosines / temperature + np.asarray(bias)


@pytest.mark.parametrize("temperature", [None, 0.2])
def test_output_scores_loss_and_top_k_agree(temperature):
    layer = SparseOutput(6, 30, temperature=temperature, rngs=nnx.Rngs(1))
    assert layer.bias is not None
    layer.bias[:30] = jnp.linspace(-1, 1, 30)
    h = jax.random.normal(jax.random.key(0), (4, 6)).at[2].set(0)  # a zero vector
    layer.kernel[5] = jnp.zeros(6)
    kernel, bias = layer.kernel[:30], layer.bias[:30]
    expected = np.asarray(h, np.float64) @ np.asarray(kernel).T + np.asarray(bias)
    if temperature is not None:
        expected = cosine_scores(h, kernel, bias, temperature)
    np.testing.assert_allclose(layer.scores(h), expected, rtol=1e-4, atol=1e-5)
    ids, scores = layer.top_k(h, 3)
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=1)[:, :3])
    np.testing.assert_allclose(scores, -np.sort(-expected)[:, :3], rtol=1e-4, atol=1e-5)
    labels = random_csr(4, 30)
    loss = layer.loss(h, labels, loss="sigmoid_binary_cross_entropy")
    wanted = np.logaddexp(0, expected).sum() - (expected * oracle(labels)).sum()
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


def test_cosine_gradient_is_finite_at_zero_and_right_elsewhere():
    layer = SparseOutput(3, 8, temperature=0.5, use_bias=False, rngs=nnx.Rngs(1))
    layer.kernel[2] = jnp.zeros(3)
    h = jax.random.normal(jax.random.key(0), (4, 3)).at[1].set(0)
    labels = random_csr(4, 8)

    kernel = layer.kernel[...]
    to_layer, to_h = nnx.grad(
        lambda layer, h: layer.loss(h, labels, loss="l2_loss"), argnums=(0, 1)
    )(layer, h)
    gradients = to_layer.kernel[...], to_h
    assert all(np.isfinite(g).all() for g in gradients)

    def value(kernel, h):
        scores = cosine_scores(h, kernel[:8], 0, 0.5)
        return 0.5 * ((scores - oracle(labels)) ** 2).sum()

    kernel, h = np.asarray(kernel, np.float64), np.asarray(h, np.float64)
    for argument, places in ((0, [(0, 1), (5, 2)]), (1, [(0, 0), (3, 2)])):
        for place in places:
            steps = [np.zeros_like(kernel), np.zeros_like(h)]
            steps[argument][place] = 1e-5
            up = value(kernel + steps[0], h + steps[1])
            down = value(kernel - steps[0], h - steps[1])
            slope = (up - down) / 2e-5
            np.testing.assert_allclose(gradients[argument][place], slope, rtol=1e-3)


def test_tied_kernels_are_one_parameter():
    output = SparseOutput(4, 20, rngs=nnx.Rngs(0))
    linear = SparseLinear(20, 4, kernel=output.kernel, rngs=nnx.Rngs(0))
    assert linear.kernel is output.kernel
    with pytest.raises(ValueError, match=r"shape \(256, 4\), expected \(512, 4\)"):
        SparseLinear(300, 4, kernel=output.kernel, rngs=nnx.Rngs(0))


def test_wrong_vocabulary():
    x = random_csr(2, 9)
    with pytest.raises(ValueError, match="x has 9 columns but the model has 10 feat"):
        SparseLinear(10, 4, rngs=nnx.Rngs(0))(x)
    with pytest.raises(ValueError, match="labels has 9 columns but the layer has 10"):
        SparseOutput(4, 10, rngs=nnx.Rngs(0)).loss(jnp.ones((2, 4)), x)
    with pytest.raises(ValueError, match="temperature must be positive"):
        SparseOutput(4, 10, temperature=0.0, rngs=nnx.Rngs(0))


def test_scores_are_of_items_alone(wrong_types):
    output, h = SparseOutput(4, 10, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    found = output.item_scores(h, jnp.array([[0, 9], [10, -1]]))
    np.testing.assert_array_equal(np.isnan(found), [[False] * 2, [True] * 2])
    np.testing.assert_allclose(found[0], output.scores(h)[0, [0, 9]], rtol=1e-6)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (np.array([[0], [10]]), ValueError, r"id 10 at \(1, 0\) is no item"),
        (np.array([1, 2]), ValueError, r"shape \(2,\); expected \(2, count\)"),
        (np.array([["a"], ["b"]]), TypeError, "an array of integers, got <U1"),
    ]
    for ids, error, message in wrong:
        with pytest.raises(error, match=message):
            output.item_scores(h, ids)


def test_normalize_rows():
    x = random_csr(6, 20, 0.3, valued=True)
    dense = oracle(x)
    norms = np.linalg.norm(dense, axis=1, keepdims=True)
    expected = dense / np.where(norms > 0, norms, 1)
    np.testing.assert_allclose(normalize_rows(x).todense(), expected, atol=1e-6)
    indicator = normalize_rows(CSR(None, x.indices, x.indptr, num_cols=20)).todense()
    np.testing.assert_allclose((indicator**2).sum(axis=1), norms[:, 0] > 0, rtol=1e-6)


def test_normalize_rows_of_any_size():
    v = np.array([2e19, 1e19, 1e-19, 2e-19, *[1.7e18] * 200, 0, 0], np.float32)
    indptr = np.array([0, 2, 4, 204, 206, 206], np.int32)
    indices = np.array([0, 1, 0, 1, *range(200), 0, 1], np.int32)
    x = CSR(v, indices, indptr, num_cols=200)
    dense = oracle(x)
    norms = np.linalg.norm(dense, axis=1, keepdims=True)
    expected = dense / np.where(norms > 0, norms, 1)
    np.testing.assert_allclose(normalize_rows(x).todense(), expected, rtol=1e-6)


def test_normalize_rows_of_a_host_matrix_under_tracing():
    x = CSR.from_scipy(random_csr(6, 20, 0.3).to_scipy())  # NumPy, values traced

    @jax.jit
    def dense():
        return normalize_rows(x).todense()

    np.testing.assert_allclose(dense(), normalize_rows(x).todense(), rtol=1e-6)


def test_dropout_of_entries():
    x = random_csr(200, 50, 0.5)
    layer = SparseDropout(0.25, rngs=nnx.Rngs(0))
    dropped = layer(x)
    used = int(x.indptr[-1])
    data = np.asarray(dropped.data)[:used]
    assert set(np.unique(data)) == {0, np.float32(4 / 3)}
    assert abs((data == 0).mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / used)
    again = np.asarray(layer(x).data)[:used]
    assert 0.3 < (again != data).mean() < 0.45  # a new draw: 2 * .25 * .75
    assert layer(x, deterministic=True) is x
    layer.deterministic = True
    assert layer(x) is x


def test_dropout_depends_on_row_and_column_not_on_storage():
    x = random_csr(9, 30, 0.5, valued=True, extra=0)
    data, indices = jnp.asarray(x.data), jnp.asarray(x.indices)
    wide = jnp.pad(data, (0, 50)), jnp.pad(indices, (0, 50))
    roomy = CSR(wide[0], wide[1], x.indptr, num_cols=30)
    first = SparseDropout(0.5, rngs=nnx.Rngs(3))(x)
    second = SparseDropout(0.5, rngs=nnx.Rngs(3))(roomy)
    np.testing.assert_array_equal(first.todense(), second.todense())


def test_gradient_through_dropped_and_normalized_entries():
    x = random_csr(5, 9, 0.5, valued=True)
    layer = SparseLinear(9, 3, use_bias=False, rngs=nnx.Rngs(0))
    drop = SparseDropout(0.5, rngs=nnx.Rngs(1))
    normalized = drop(normalize_rows(x))
    gradient = nnx.grad(lambda m: jnp.sum(m(normalized) ** 2))(layer).kernel[...]
    dense = oracle(normalized)
    kernel = np.asarray(layer.kernel[...], np.float64)
    expected = 2 * dense.T @ dense @ kernel[:9]
    np.testing.assert_allclose(gradient[:9], expected, rtol=1e-4, atol=1e-6)
