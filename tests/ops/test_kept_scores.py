"""The softmax in three products with stored scores, compared with the other form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernels import kernel_can_run

from sparsejax import losses
from sparsejax.mesh.layout import make_mesh
from sparsejax.ops import kept_scores
from sparsejax.ops.linear_cross_entropy import linear_cross_entropy
from sparsejax.ops.output_loss import output_loss_in_chunks
from sparsejax.ops.targets import Targets

ROWS, ITEMS, PADDED = 200, 500, 512


def operands(*, far: bool):
    rng = np.random.default_rng(0)
    h = rng.normal(size=(ROWS, 64)) / 4
    kernel = rng.normal(size=(PADDED, 64)) / 4
    bias = rng.normal(size=PADDED)
    columns = rng.integers(0, ITEMS, ROWS)
    columns[4:8], columns[::3] = 299, -1  # the same in several rows; a third is ignored
    weights = rng.uniform(0.5, 2, ROWS) / ROWS
    weights[10], h[0], kernel[ITEMS:], bias[7] = 0, np.nan, 1e4, -np.inf
    columns[columns == 7] = 8
    if far:  # scores far above that of the target
        h[1], kernel[20] = 4, 4
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in (h, kernel))
    bias, weights = (jnp.asarray(x, jnp.float32) for x in (bias, weights))
    return *arrays, bias, weights, jnp.asarray(columns, jnp.int32)


def loss(h, kernel, bias, weights, columns, *, z_loss=0.0, **options):
    return output_loss_in_chunks(
        *(h, kernel, bias, Targets(columns, num_cols=ITEMS)),
        weights=weights,
        loss=losses.SoftmaxCrossEntropy(z_loss=z_loss),
        **options,
    )


# One program for each form, whatever the numbers are.
step = jax.jit(
    jax.value_and_grad(functools.partial(loss, z_loss=0.01), (0, 1, 2, 3)),
    static_argnames=("form", "implementation"),
)
every_form = pytest.mark.parametrize("form", ["kept", "twice"])


@every_form
@pytest.mark.parametrize("far", [False, True])
def test_equals_the_other_form(far, form):
    arrays = operands(far=far)
    with kernel_can_run():
        got = step(*arrays, form=form, implementation="mosaic_gpu")
    want = step(*arrays, implementation="xla")
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for mine, other in zip(got[1], want[1], strict=True):
        mine, other = (np.asarray(x, np.float64) for x in (mine, other))
        assert mine.shape == other.shape
        error = np.linalg.norm(mine - other)
        assert error < 2**-7 * np.linalg.norm(other)
    dh, dkernel, _, dweights = got[1]
    np.testing.assert_allclose(dweights, want[1][3], rtol=1e-4, atol=1e-4)
    assert not dh[::3].any() and not dkernel[ITEMS:].any() and not dweights[::3].any()


@every_form
def test_a_target_that_is_no_item_is_nan(form):
    *arrays, columns = operands(far=False)
    options = {"form": form, "implementation": "mosaic_gpu"}
    with kernel_can_run():
        value, (dh, *_) = step(*arrays, columns.at[5].set(ITEMS), **options)
    assert jnp.isnan(value) and jnp.isnan(dh[5]).all()


def test_negative_weights_and_rounded_operands_in_two_passes():
    h, kernel, bias, weights, columns = operands(far=False)
    h, kernel = h.astype(jnp.float32), kernel.astype(jnp.float32)
    weights = weights * jnp.where(jnp.arange(ROWS) % 4 == 1, -1, 1)
    arrays = h, kernel, bias, weights, columns
    with kernel_can_run():
        got = step(*arrays, form="twice", implementation="mosaic_gpu")
    want = step(*arrays, implementation="xla")
    np.testing.assert_allclose(got[0], want[0], atol=1e-4)
    for mine, other in zip(got[1][:3], want[1][:3], strict=True):
        assert np.linalg.norm(mine - other) < 2**-6 * np.linalg.norm(other)


@pytest.mark.parametrize("hidden", [64, 320])
@pytest.mark.parametrize("shape", [None, (2, 2)], ids=str)
def test_is_chosen_and_lowers_for_cuda(shape, hidden):
    h = jnp.ones((512, hidden), jnp.bfloat16)
    kernel = jnp.ones((1024, hidden), jnp.bfloat16)
    step = jax.grad(
        functools.partial(linear_cross_entropy, implementation="mosaic_gpu"), (0, 1)
    )
    if shape is None:
        traced = jax.jit(step).trace(h, kernel, jnp.zeros(512, jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    else:
        with jax.set_mesh(make_mesh(data=shape[0], model=shape[1])):
            step = functools.partial(step, kernel_spec=P(("model", "data")))
            traced = jax.jit(step).trace(h, kernel, jnp.zeros(512, jnp.int32))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Of all or half of the rows, of the items, and `normalise`, seldom; or two.
    assert text.count("custom_call @mosaic_gpu") == (4 if hidden == 64 else 2)


def test_blocks():
    rows = kept_scores.block_rows
    assert rows(8_192, 256_000, 512) == 1_664  # .85 GB
    assert rows(8_192, 256_000, 2_304) == 2_048  # 1 GB
    assert rows(2_048, 50_432, 512) == 2_048  # one block
    assert rows(16_384, 50_432, 512) == 8_192
    assert rows(8_192, 1_000_192, 512) is None  # 384 rows would be too few
    assert rows(256, 1_000_192, 512) == 256
    assert rows(26_624, 256_000, 512) == 1_664
    assert rows(26_625, 256_000, 512) is None  # 17 blocks


@every_form
def test_lowers_for_cuda_on_a_mesh(form):
    # It cannot be interpreted there: devices would share one shared memory.
    h, kernel, bias, weights, columns = operands(far=False)
    arrays = h[:128], kernel, bias, weights[:128], columns[:128]
    options = {"form": form, "implementation": "mosaic_gpu", "kernel_spec": P("model")}
    step = jax.value_and_grad(functools.partial(loss, **options), (0, 1, 2))
    with jax.set_mesh(make_mesh(data=1, model=2)):
        lowered = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert "custom_call @mosaic_gpu" in lowered.as_text()
