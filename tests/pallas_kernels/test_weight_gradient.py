"""The product in place against float64: interpreted on a CPU, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.weight_gradient import weight_gradient

ITEMS, START, SIZE = 1536, 256, 1024


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


# Of one block of columns and of several, of which each is stored in an odd number of parts.
@pytest.mark.parametrize(("batch", "hidden"), [(256, 192), (128, 320)])
def test_weight_gradient(run_program, batch, hidden):
    slopes, h = normal(0, batch, SIZE), normal(1, batch, hidden)
    before = normal(2, ITEMS, hidden)
    function = functools.partial(weight_gradient, with_sums=True)
    got, sums = run_program(function, slopes, h, before, jnp.int32(START))
    want = np.array(before, np.float64)
    want[START : START + SIZE] = np.asarray(slopes, np.float64).T @ np.asarray(
        h, np.float64
    )
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2**-8, atol=1e-4)
    of_slopes = np.asarray(slopes, np.float64).sum(axis=0)
    np.testing.assert_allclose(sums, of_slopes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_sums", [False, True])
def test_lowers_for_cuda(with_sums):
    operands = normal(0, 256, SIZE), normal(1, 256, 256), normal(2, ITEMS, 256)
    function = functools.partial(weight_gradient, with_sums=with_sums)
    traced = jax.jit(function).trace(*operands, jnp.int32(0))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
