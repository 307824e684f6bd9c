"""The product in place against float64: interpreted on a CPU, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kernel_gradient import kernel_gradient

ITEMS, START, SIZE = 1536, 256, 1024


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


# Of one block of columns and of several, of which each is stored in an odd number of parts.
@pytest.mark.parametrize(("batch", "hidden"), [(256, 192), (128, 320)])
def test_kernel_gradient(run_kernel, batch, hidden):
    slopes, h = normal(0, batch, SIZE), normal(1, batch, hidden)
    before = normal(2, ITEMS, hidden)
    start = jnp.int32(START)
    got = run_kernel(kernel_gradient, slopes, h, before, start).astype(np.float64)
    want = np.array(before, np.float64)
    want[START : START + SIZE] = np.asarray(slopes, np.float64).T @ np.asarray(
        h, np.float64
    )
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)


def test_lowers_for_cuda():
    operands = normal(0, 256, SIZE), normal(1, 256, 256), normal(2, ITEMS, 256)
    traced = jax.jit(kernel_gradient).trace(*operands, jnp.int32(0))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
