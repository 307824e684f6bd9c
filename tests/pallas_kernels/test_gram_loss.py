"""The gradient from small matrices against float64: interpreted on a CPU, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gram_loss import squared_gradient

ITEMS, START, SIZE = 768, 128, 512


def operands(hidden):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    kernel, outer = (normal(n, hidden, dtype=jnp.bfloat16) for n in (ITEMS, hidden))
    vectors = [normal(hidden) for _ in range(3)]
    bias, of_labels = normal(ITEMS), normal(ITEMS)
    # Two items are denied, and one of them is a label.
    bias = bias.at[jnp.array([START + 3, START + 70])].set(-jnp.inf)
    of_labels = of_labels.at[START + 70].set(jnp.inf)
    return kernel, outer, *vectors, bias, of_labels, jnp.float32(3.5)


def gradient(*arrays, start, dtype):
    return squared_gradient(*arrays, start=start, size=SIZE, dtype=jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("hidden", "dtype"), [(256, jnp.bfloat16), (64, jnp.float32)], ids=str
)
def test_squared_gradient(run_program, hidden, dtype):
    arrays = operands(hidden)
    function = functools.partial(gradient, start=START, dtype=dtype)
    got, dbias = run_program(function, *arrays)
    exact = [np.asarray(x, np.float64)[START:][:SIZE] for x in arrays[:1] + arrays[5:7]]
    kernel, bias, of_labels = exact
    outer, centre, total, rest = (np.asarray(x, np.float64) for x in arrays[1:5])
    denied = np.isinf(bias)
    bias = np.where(denied, 0, bias)
    want_bias = kernel @ total + 3.5 * bias - of_labels
    want = kernel @ outer + np.outer(kernel @ centre + bias, rest)
    with np.errstate(invalid="ignore"):
        want += np.outer(want_bias, centre)
    want[3], want_bias[3] = 0, 0
    assert not np.isfinite(got[70].astype(np.float64)).any() and dbias[70] == -np.inf
    kept = np.arange(SIZE) != 70
    rtol = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=2e-4)
    close(got.astype(np.float64)[kept], want[kept])
    np.testing.assert_allclose(dbias[kept], want_bias[kept], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_lowers_for_cuda(dtype):
    function = functools.partial(gradient, start=jnp.int32(0), dtype=dtype)
    traced = jax.jit(function).trace(*operands(256))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
