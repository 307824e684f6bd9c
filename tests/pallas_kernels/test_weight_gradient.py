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


# Of one block of columns and of several, of which each is stored in an odd number of parts,
# or as float32 in an even one.
@pytest.mark.parametrize(
    ("batch", "hidden", "dtype"),
    [(256, 192, jnp.bfloat16), (128, 320, jnp.bfloat16), (128, 320, jnp.float32)],
)
def test_weight_gradient(run_program, batch, hidden, dtype):
    slopes, h = normal(0, batch, SIZE), normal(1, batch, hidden)
    before = normal(2, ITEMS, hidden).astype(dtype)
    function = functools.partial(weight_gradient, with_sums=True)
    got, sums = run_program(function, slopes, h, before, jnp.int32(START))
    want = np.array(before, np.float64)
    want[START : START + SIZE] = np.asarray(slopes, np.float64).T @ np.asarray(
        h, np.float64
    )
    np.testing.assert_allclose(
        got.astype(np.float64), want, rtol=jnp.finfo(dtype).eps / 2, atol=1e-4
    )
    of_slopes = np.asarray(slopes, np.float64).sum(axis=0)
    np.testing.assert_allclose(sums, of_slopes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("with_sums", "dtype"),
    [(False, jnp.bfloat16), (True, jnp.bfloat16), (True, jnp.float32)],
)
def test_lowers_for_cuda(with_sums, dtype):
    operands = normal(0, 256, SIZE), normal(1, 256, 256)
    gradient = normal(2, ITEMS, 256).astype(dtype)
    function = functools.partial(weight_gradient, with_sums=with_sums)
    traced = jax.jit(function).trace(*operands, gradient, jnp.int32(0))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
