"""Compares training with fused updates of the output layer with training without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels import kernel_can_run
from matrices import random_csr
from memory import temporary_bytes

from pallas_kernels import weight_update
from sparsejax import losses, optimizers
from sparsejax.engine.train import fused
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.ops.targets import Targets
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR
from sparsejax.verbs.fit import fit

ITEMS = 300  # so that there are padding rows and, with small chunks, several chunks


def build(
    rule, *, hidden=(8,), loss="softmax_cross_entropy", temperature=0.3, **options
):
    config = NetworkConfig.autoencoder(
        hidden=hidden, loss=loss, temperature=temperature, **options
    )
    model = FeedForward(config, inputs=40, outputs=ITEMS, rngs=nnx.Rngs(0))
    return model, Optimizer(model, rule)


def trained(fused, rule, **options):
    """Parameters, optimizer state and losses after two epochs."""
    model, optimizer = build(rule, **options)
    x = random_csr(50, 40, 0.2, valued=True, seed=1)
    labels = random_csr(50, ITEMS, 0.05, seed=2)
    weights = np.linspace(0, 2, 50, dtype=np.float32)
    history = fit(
        model,
        optimizer,
        x.to_scipy(),
        labels.to_scipy(),
        weights=weights,
        batch_size=16,
        num_epochs=2,
        fused=fused,
    )
    return nnx.state((model, optimizer)), [entry["loss"] for entry in history]


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (optimizers.rmsprop(1e-2), {"hidden": (8, 6)}),
        (optimizers.adam(lambda count: 1e-2 / (1 + count)), {"loss": "l2_loss"}),
        (
            optimizers.momentum(1e-2, weight_decay=0.1),
            {"loss": "sigmoid_binary_cross_entropy", "temperature": None},
        ),
        (optimizers.rowwise_adagrad(1e-2), {"temperature": None}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_equals_the_update_after_the_loss(rule, options):
    (actual, losses), (expected, expected_losses) = (
        trained(which, rule, **options) for which in (True, False)
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    before = nnx.state(build(rule, **options))
    moved = 0.0
    for a, b, start in zip(
        *(jax.tree.leaves(tree) for tree in (actual, expected, before)), strict=True
    ):
        if jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-6)
            moved = max(moved, float(jnp.abs(b - start).max()))
        elif jnp.issubdtype(b.dtype, jnp.integer):
            np.testing.assert_array_equal(a, b)
    assert moved > 1e-3


@pytest.mark.parametrize(
    ("frozen", "message"),
    [("output", "output.kernel and output.bias"), ("bias", "not train output.bias")],
)
def test_a_frozen_output_is_refused(frozen, message):
    model, _ = build(optimizers.sgd(0.5))
    wrt = nnx.All(nnx.Param, lambda path, _: frozen not in path)
    optimizer = Optimizer(model, optimizers.adam(1e-2), wrt=wrt)
    with pytest.raises(NotImplementedError, match=message):
        fused.check(model, optimizer)


def test_one_target_a_row():
    x, targets = random_csr(6, 40, seed=1), np.array([5, -1, 299, 0, 7, 7], np.int32)
    kept = targets >= 0
    indptr = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    matrix = jax.tree.map(jnp.asarray, CSR(None, targets[kept], indptr, num_cols=ITEMS))
    columns = Targets(jnp.asarray(targets), num_cols=ITEMS)
    weights = jnp.asarray(kept / 5, jnp.float32)
    step = nnx.jit(fused.train_step)
    results = []
    for labels, given in ((matrix, weights), (columns, jnp.full(6, 1 / 5))):
        model, optimizer = build(optimizers.adam(1e-2))
        loss, _ = step(model, optimizer, x, labels, given, fused.derive(model))
        results.append((loss, nnx.state((model, optimizer), nnx.Param)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *results
    )


def test_operands_of_another_dtype_follow_the_kernel():
    model, optimizer = build(optimizers.sgd(0.5))
    model.output.dtype = jnp.bfloat16
    x, labels = random_csr(6, 40, seed=1), random_csr(6, ITEMS, seed=2)
    derived = fused.derive(model)
    before = model.output.kernel[...]
    step = nnx.jit(fused.train_step)
    _, derived = step(model, optimizer, x, labels, jnp.full(6, 1 / 6), derived)
    expected = fused.derive(model)
    assert derived.operand is not None and derived.scale is not None
    assert expected.scale is not None
    assert derived.operand.dtype == jnp.bfloat16
    np.testing.assert_array_equal(derived.operand, expected.operand)
    np.testing.assert_allclose(derived.scale, expected.scale, rtol=1e-6)
    assert jnp.abs(model.output.kernel[...] - before).max() > 1e-4


def one_step(rule, implementation, dtype):
    """The result of a fused step, and the state before it."""
    config = NetworkConfig.autoencoder(
        hidden=(64,), temperature=None, output_dtype=dtype
    )
    model = FeedForward(config, inputs=40, outputs=ITEMS, rngs=nnx.Rngs(0))
    model.output.implementation = implementation
    optimizer = Optimizer(model, rule)
    x, labels = random_csr(9, 40, seed=1), random_csr(9, ITEMS, seed=2)
    weights = jnp.full(9, 1 / 9)
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def run(state, x, labels):
        model, optimizer = nnx.merge(graphdef, state)
        derived = fused.derive(model)
        loss, derived = fused.train_step(model, optimizer, x, labels, weights, derived)
        return loss, derived, nnx.state((model, optimizer))

    with kernel_can_run():
        return run(state, x, labels), state


@functools.cache
def one_step_of_xla(rule, dtype):
    return one_step(rule, "xla", dtype)


# Adam's step works element by element, row-wise Adagrad's does not. The programs round
# float32 operands.
@pytest.mark.parametrize(
    ("rule", "fits", "dtype"),
    [
        (optimizers.adam(1e-2), True, "bfloat16"),
        (optimizers.adam(1e-2), False, "bfloat16"),
        (optimizers.rowwise_adagrad(1e-2), True, "bfloat16"),
        (optimizers.sgd(1e-2), True, "float32"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_equals_with_kernels(rule, fits, dtype, monkeypatch):
    if not fits:
        monkeypatch.setattr(weight_update, "fits", lambda hidden, itemsize: False)
        monkeypatch.setattr(weight_update, "weight_update", None)

    actual, before = one_step(rule, "mosaic_gpu", dtype)
    expected, _ = one_step_of_xla(rule, dtype)
    leaves = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    for a, b in leaves:
        if jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_allclose(
                a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-2, atol=1e-5
            )
    kernel = actual[2][0]["output"]["kernel"][...]
    if dtype == "bfloat16":
        np.testing.assert_array_equal(actual[1].operand, kernel.astype(jnp.bfloat16))
    else:
        assert actual[1].operand is None
    moved = jnp.abs(kernel - before[0]["output"]["kernel"][...])
    assert moved[:ITEMS].max() > 1e-3 and moved[ITEMS:].max() == 0


def test_no_gradient_of_the_kernels_size():
    def temporary(items):
        config = NetworkConfig.autoencoder(hidden=(64,), temperature=None)

        def build():
            model = FeedForward(config, inputs=40, outputs=items, rngs=nnx.Rngs(0))
            return model, Optimizer(model, optimizers.rmsprop(1e-2))

        graphdef, state = nnx.split(nnx.eval_shape(build))

        def step(state, x, labels):
            model, optimizer = nnx.merge(graphdef, state, copy=True)
            derived = fused.derive(model)
            weights = jnp.ones(x.num_rows)
            fused.train_step(model, optimizer, x, labels, weights, derived)
            return nnx.state((model, optimizer))

        # So many scores that none are kept.
        x, labels = random_csr(256, 40, seed=1), random_csr(256, items, 1e-4, seed=2)
        return temporary_bytes(step, state, x, labels, donate_argnums=0)

    few, many = 262_144, 524_288  # both several chunks
    assert temporary(many) - temporary(few) < (many - few) * 64 * 4 / 8


def test_refused():
    rule = optimizers.rmsprop(1e-2)
    config = NetworkConfig.autoencoder(hidden=(8,), tied=True)
    model = FeedForward(config, inputs=40, outputs=40, rngs=nnx.Rngs(0))
    data = random_csr(9, 40).to_scipy()
    with pytest.raises(NotImplementedError, match="shared with first.kernel"):
        fit(model, Optimizer(model, rule), data, fused=True)

    class Own(nnx.Module):
        loss_rule = losses.get("l2_loss")

        def loss(self, x, labels, weights=None):
            return jnp.zeros(())

    with pytest.raises(NotImplementedError, match="Own lacks some of them"):
        fused.check(Own(), Optimizer(Own(), rule))
