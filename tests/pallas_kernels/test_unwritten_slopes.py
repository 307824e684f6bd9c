"""The product with score gradients that are not written to memory."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import kernel_can_run

from pallas_kernels.output_loss import Targets
from pallas_kernels.slopes_product import slopes_product


@pytest.mark.parametrize("limit", [300, 0])  # three of four tiles; none
def test_tiles_beyond_the_limit_are_left_out(limit):
    rng = np.random.default_rng(0)
    h, kernel = (
        jnp.asarray(rng.normal(size=(512, 64)) / 4, jnp.bfloat16) for _ in range(2)
    )
    kernel = kernel.at[384:].set(jnp.nan)  # of the fourth tile
    labels = Targets(jnp.full(512, -1, jnp.int32), jnp.zeros((8, 8), jnp.int32))

    def exponentials(scores, labels, listed, weights):
        e = jnp.exp(scores)
        return e, e

    options = {"start": 0, "size": 512, "limit": limit, "with_slopes": False}
    with kernel_can_run():
        sums, slopes, product = slopes_product(
            exponentials, h, kernel, None, labels, [jnp.ones(512)], **options
        )
    assert slopes is None and sums is not None
    h, kernel = (np.asarray(x, np.float64) for x in (h, kernel[:limit]))
    e = np.exp(h @ kernel.T)
    np.testing.assert_allclose(sums.sum(0), e.sum(1), rtol=1e-5)
    np.testing.assert_allclose(product.sum(0), e @ kernel, rtol=2**-7, atol=0.1)
