"""The output layer on a mesh equals the layer on one device; checks shardings, too."""

import contextlib
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import matrices
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import tolerance

from sparsejax import losses, metrics, optimizers
from sparsejax.engine.train import fused
from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.mesh.layout import make_mesh
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.layers import SparseOutput
from sparsejax.nn.models import FeedForward
from sparsejax.ops import top_k as top_k_module
from sparsejax.ops.output_loss import (
    output_loss,
    output_loss_in_chunks,
    output_loss_per_example,
    output_loss_per_example_in_chunks,
)
from sparsejax.ops.top_k import top_k, top_k_tuned
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR

SHAPES = [(2, 4), (8, 1), (1, 8)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
# The items are divided over all devices.
BY_ITEMS = P(("model", "data"))
BCE, SOFTMAX = losses.SigmoidBinaryCrossEntropy(), losses.SoftmaxCrossEntropy()
GRAM = "l2_loss by Gram matrices"  # without a scale
both_kinds = pytest.mark.parametrize("rule", [BCE, SOFTMAX], ids=str)
every_kind = pytest.mark.parametrize("rule", [BCE, SOFTMAX, GRAM], ids=str)
BATCH, ITEMS, ROWS, HIDDEN = 16, 700, 768, 5
# A device with 96 items has one chunk, one with 768 has six.
CHUNK_SCORES = 128
TUNING = top_k_module.CPU._replace(chunk_scores=CHUNK_SCORES)


def operands(dtype=jnp.float32, hidden=HIDDEN):
    """h, kernel, bias and scale; the padding has invalid values."""
    rng = np.random.default_rng(0)
    h, kernel = rng.normal(size=(BATCH, hidden)), rng.normal(size=(ROWS, hidden))
    bias, scale = rng.normal(size=ROWS), rng.uniform(0.5, 1.5, ROWS)
    weights = rng.uniform(0.5, 1.5, BATCH)
    kernel[ITEMS:], bias[3] = 1e4, -np.inf
    arrays = {"h": h, "kernel": kernel, "bias": bias, "scale": scale}
    arrays = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    return arrays | {"weights": jnp.asarray(weights, jnp.float32)}


def placed(arrays, mesh):
    """Places arrays on the mesh as layers do."""
    specs = {"h": P("data"), "weights": P("data")}
    return {
        name: jax.device_put(array, NamedSharding(mesh, specs.get(name, BY_ITEMS)))
        for name, array in arrays.items()
    }


def lies(array, spec, mesh):
    return array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


def mesh_of(shape):
    return make_mesh(data=shape[0], model=shape[1])


def assert_trees_close(got, want, terms):
    close = tolerance(jnp.float32, terms)
    same = functools.partial(np.testing.assert_allclose, **close)
    jax.tree.map(same, got, want)


# Losses


def some_labels(**options):
    return matrices.random_csr(BATCH, ITEMS, 0.02, extra=0, **options)


def blocks_of(matrix, mesh):
    host = jax.tree.map(np.asarray, matrix)
    rows = np.arange(matrix.num_rows).reshape(mesh.shape["data"], -1)
    return ShardedCSR.from_host(host, rows, mesh)


def how(rule) -> dict[str, Any]:
    if rule == GRAM:
        rule = losses.L2Loss()
        return {"loss": rule, "form": "gram", "chunk_scores": CHUNK_SCORES}
    return {"loss": rule, "chunk_scores": CHUNK_SCORES}


def loss_of(rule, arrays, labels):
    h, kernel, bias = (arrays[name] for name in ("h", "kernel", "bias"))
    options = {name: arrays.get(name) for name in ("scale", "weights")}
    options |= how(rule)
    return output_loss_in_chunks(h, kernel, bias, labels, **options)


def per_example(rule, h, kernel, labels):
    return output_loss_per_example_in_chunks(h, kernel, None, labels, **how(rule))


loss_and_gradients = jax.jit(jax.value_and_grad(loss_of, 1), static_argnums=0)


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        *(((2, 4), rule) for rule in (BCE, SOFTMAX, GRAM)),
        *(((8, 1), BCE), ((1, 8), SOFTMAX), ((8, 1), GRAM), ((1, 8), GRAM)),
    ],
    ids=str,
)
def test_loss_and_gradients(shape, rule):
    labels = some_labels(valued=shape == (2, 4))
    arrays, mesh = operands(), mesh_of(shape)
    if rule is not SOFTMAX:
        arrays["bias"] = arrays["bias"].at[3].set(0)  # of a denied label it is infinite
    if rule == GRAM:
        del arrays["scale"]
    want = loss_and_gradients(rule, arrays, labels)
    with jax.set_mesh(mesh):
        inputs = rule, placed(arrays, mesh), blocks_of(labels, mesh)
        got = loss_and_gradients(*inputs)
        again = loss_and_gradients(*inputs)
    # A loss sums 700 items of 16 rows, a gradient either.
    assert_trees_close(got, want, ITEMS * BATCH)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    for name, gradient in got[1].items():
        spec = P("data") if name in ("h", "weights") else BY_ITEMS
        assert lies(gradient, spec, mesh), name
        assert spec == P("data") or not np.asarray(gradient)[ITEMS:].any()


@every_kind
def test_loss_per_example(rule):
    labels, arrays, mesh = some_labels(), operands(), mesh_of((2, 4))

    @jax.jit
    def function(h, kernel, labels):
        values, pull = jax.vjp(
            lambda h, kernel: per_example(rule, h, kernel, labels), h, kernel
        )
        return values, pull(1 + jnp.arange(BATCH, dtype=jnp.float32) / BATCH)

    h, kernel = arrays["h"], arrays["kernel"]
    want = function(h, kernel, labels)
    with jax.set_mesh(mesh):
        got = function(h, kernel, blocks_of(labels, mesh))
    assert_trees_close(got, want, BATCH * ITEMS)
    assert lies(got[0], P("data"), mesh)


def broken():
    """Labels in which rows 1, 2 and 3 have an invalid index, or exceed the capacity."""
    indices = jnp.array([0, ITEMS, -1, 3, ITEMS - 1, 1], jnp.int32)
    indptr = jnp.array([0, 1, 2, 3, 9, 9, 9, 9, 9], jnp.int32)
    return CSR(None, indices, indptr, num_cols=ITEMS)


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)], ids=str)
@every_kind
def test_rows_that_are_broken_in_a_block_are_nan(shape, rule):
    # Rows after the overfull one do not fit either.
    expected = [False] + [True] * 7
    arrays = operands()
    h, kernel = arrays["h"][:8], arrays["kernel"]
    with jax.set_mesh(mesh_of(shape)):
        blocks = jax.jit(ShardedCSR.of)(broken())
        got = per_example(rule, h, kernel, blocks)
        _, scores = best({"h": h, "kernel": kernel, "bias": None}, blocks, 3)
    assert jnp.isnan(got).tolist() == expected
    assert jnp.isnan(scores).all(axis=1).tolist() == expected
    assert not jnp.isnan(scores[0]).any()


def test_one_wrong_index_in_the_last_block_is_seen_by_all():
    arrays, mesh = operands(), mesh_of((2, 4))
    blocks = blocks_of(matrices.random_csr(BATCH, ITEMS, 0.3, extra=0), mesh)
    indices = jnp.asarray(blocks.blocks.indices).at[1, -1, 0].set(-1)
    inner = dataclasses.replace(blocks.blocks, indices=indices)
    blocks = dataclasses.replace(blocks, blocks=inner)
    expected = [False] * 8 + [True] + [False] * 7

    @jax.jit
    def each(h, kernel, blocks):
        loss = output_loss_per_example(h, kernel, None, blocks)
        _, scores = top_k(h, kernel, 3, exclude=blocks)
        ids = jnp.zeros((BATCH, 1), jnp.int32)
        return loss, scores, metrics.recall_at_k(ids, blocks)

    with jax.set_mesh(mesh):
        got, scores, recall = each(arrays["h"], arrays["kernel"], blocks)
    assert jnp.isnan(got).tolist() == expected
    assert jnp.isnan(scores).all(axis=1).tolist() == expected
    assert jnp.isnan(recall).tolist() == expected


# Top-k


@functools.partial(jax.jit, static_argnums=2)
def best(arrays, exclude, k):
    options = {"exclude": exclude, "num_items": ITEMS, "tuning": TUNING}
    return top_k_tuned(**arrays, k=k, **options)


@every_shape
@pytest.mark.parametrize("k", [1, 130])
def test_top_k(shape, k):
    mesh, arrays = mesh_of(shape), operands()
    # Quarters: no sum rounds, so its order, which depends on the number of items of a
    # device, does not matter. Many items have the same kernel: there are ties.
    arrays = {name: jnp.round(array * 4) / 4 for name, array in arrays.items()}
    arrays["kernel"] = arrays["kernel"].at[:ITEMS].set(arrays["kernel"][5])
    del arrays["weights"]
    exclude = matrices.random_csr(BATCH, ITEMS, 0.3)
    want = best(arrays, exclude, k)
    with jax.set_mesh(mesh):
        got = best(placed(arrays, mesh), blocks_of(exclude, mesh), k)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(lies(array, P("data"), mesh) for array in got)


# What the mesh may be, and what must fit


@pytest.mark.parametrize("where", ["everywhere", "as layers have them"])
def test_on_explicit_axes(where):
    rule, labels, arrays = SOFTMAX, some_labels(), operands()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    ranked = {name: arrays[name] for name in ("h", "kernel", "bias")}
    want = loss_and_gradients(rule, arrays, labels), best(ranked, labels, 7)
    with jax.set_mesh(mesh):
        given = arrays if where == "everywhere" else placed(arrays, mesh)
        blocks = blocks_of(labels, mesh)
        ranked = {name: given[name] for name in ranked}
        got = loss_and_gradients(rule, given, blocks), best(ranked, blocks, 7)
    assert_trees_close(got[0], want[0], ITEMS * BATCH)
    (ids, scores), (wanted_ids, wanted_scores) = got[1], want[1]
    np.testing.assert_array_equal(ids, wanted_ids)
    close = tolerance(jnp.float32, HIDDEN)["rtol"]
    np.testing.assert_allclose(scores, wanted_scores, rtol=close)


@both_kinds
def test_kernel_lowers_for_cuda(rule):
    h, kernel = (
        jnp.zeros((BATCH, 64), jnp.bfloat16),
        jnp.zeros((1024, 64), jnp.bfloat16),
    )
    labels, mesh = matrices.random_csr(BATCH, 1000), mesh_of((2, 2))

    def function(h, kernel, labels):
        return output_loss(
            h, kernel, None, labels, loss=rule, implementation="mosaic_gpu"
        )

    with jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(function, (0, 1))).trace(
            h, kernel, blocks_of(labels, mesh)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


def test_what_does_not_fit_is_refused():
    arrays, mesh = operands(), mesh_of((2, 4))
    function = inspect.unwrap(output_loss)  # past the checks of its annotations
    h, kernel = arrays["h"], arrays["kernel"]
    blocks = blocks_of(some_labels(), mesh)
    with jax.set_mesh(mesh):
        with pytest.raises(
            ValueError, match="kernel has 700 rows; on a mesh .* needs 768"
        ):
            function(h, kernel[:ITEMS], None, blocks)
        with pytest.raises(ValueError, match="kernel has 1,024 rows; on a mesh"):
            more = jnp.zeros((1024, HIDDEN))
            inspect.unwrap(top_k)(h, more, 3, exclude=blocks)
        with pytest.raises(ValueError, match='the blocks lie over "model"'):
            function(h, kernel, None, blocks, kernel_spec=P("data"))
    with (
        jax.set_mesh(make_mesh(data=4, model=2)),
        pytest.raises(ValueError, match=r"in \(2, 4\) blocks but the mesh .* \(4, 2\)"),
    ):
        function(h, kernel, None, blocks)
    with pytest.raises(ValueError, match="needs a mesh"):
        function(h, kernel, None, blocks)
    labels, few = some_labels(), kernel[: ITEMS + 2]
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            ValueError, match=r"702 rows, .* over 8 devices \(model and data\)"
        ),
    ):
        function(h, few, None, labels, kernel_spec=P("model"))
    half = operands(jnp.bfloat16, hidden=64)
    with (
        jax.set_mesh(mesh),
        pytest.raises(NotImplementedError, match="multiple of 256 rows, not 96"),
    ):
        top_k(
            half["h"],
            half["kernel"],
            3,
            kernel_spec=P("model"),
            implementation="mosaic_gpu",
        )


# The layer, and updates fused into its loss


def trained(shape, fuse, rule, **options):
    """Losses, parameters and state after some steps on a mesh of this shape, trained twice."""
    config = NetworkConfig.autoencoder((8, 6), **options)
    x = matrices.random_csr(BATCH, 40, 0.2, valued=True, extra=0)
    labels, weights = some_labels(seed=2), operands()["weights"]
    mesh = None if shape is None else mesh_of(shape)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        if mesh is not None:
            x, labels = blocks_of(x, mesh), blocks_of(labels, mesh)

        @nnx.jit(donate_argnums=(0, 1))
        def step(model, optimizer, x, labels, derived):
            if fuse:
                batch = x, labels, weights, derived
                options = {"chunk_scores": CHUNK_SCORES}
                return fused.train_step(model, optimizer, *batch, **options)

            def loss(model):
                return model.loss(x, labels, weights=weights)

            value, gradients = optimizer.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value, derived

        def run():
            model = FeedForward(config, inputs=40, outputs=ITEMS, rngs=nnx.Rngs(0))
            optimizer = Optimizer(model, rule)
            derived, history = fused.derive(model) if fuse else (), []
            for _ in range(3):
                loss, derived = step(model, optimizer, x, labels, derived)
                history.append(float(loss))
            assert mesh is None or lies(model.output.kernel[...], BY_ITEMS, mesh)
            state = nnx.state((model, optimizer), nnx.Not(nnx.RngState))
            return history, jax.tree.map(np.asarray, nnx.to_pure_dict(state))

        return run(), run()


RULES = [
    (optimizers.rmsprop(1e-2), {"loss": "softmax_cross_entropy", "temperature": 0.3}),
    (optimizers.adam(1e-2), {"loss": "l2_loss"}),
]


@functools.cache
def trained_alone(case):
    rule, options = RULES[case]
    return trained(None, False, rule, **options)[0]


@pytest.mark.parametrize(
    ("shape", "fuse", "case"),
    [((2, 4), True, 0), ((2, 4), False, 0), ((1, 8), True, 0), ((8, 1), True, 1)],
    ids=str,
)
def test_training_steps(shape, fuse, case):
    rule, options = RULES[case]
    want = trained_alone(case)
    got, again = trained(shape, fuse, rule, **options)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    # Squares of gradients that nearly cancel are the least exact.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-4)
    jax.tree.map(close, got[1], want[1])


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_a_fused_step_lowers_for_cuda(shape):
    config = NetworkConfig.autoencoder(
        (64,),
        temperature=None,
        output_dtype="bfloat16",
        loss="sigmoid_binary_cross_entropy",
    )
    mesh = mesh_of(shape)
    x, labels = matrices.random_csr(BATCH, 40), matrices.random_csr(BATCH, 1000)
    with jax.set_mesh(mesh):
        model = FeedForward(config, inputs=40, outputs=1000, rngs=nnx.Rngs(0))
        model.output.implementation = "mosaic_gpu"
        optimizer = Optimizer(model, optimizers.rmsprop(1e-2))
        step = nnx.jit(fused.train_step, donate_argnums=(0, 1))
        batch = blocks_of(x, mesh), blocks_of(labels, mesh), operands()["weights"]
        traced = step.trace(model, optimizer, *batch, fused.derive(model))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The loss with its slopes and their product, and the update with its gradient.
    assert text.count("custom_call @mosaic_gpu") == 2


def test_scores_of_a_layer():
    h = operands()["h"]
    ids = jnp.asarray(np.random.default_rng(0).integers(0, ITEMS, (BATCH, 9)))

    def run(h):
        layer = SparseOutput(HIDDEN, ITEMS, temperature=0.5, rngs=nnx.Rngs(0))
        exclude = matrices.random_csr(BATCH, ITEMS, 0.3)
        scores, some = (
            nnx.jit(SparseOutput.scores)(layer, h),
            jax.jit(layer.item_scores),
        )
        best = jax.jit(layer.top_k, static_argnums=1)(h, 4, exclude=exclude)
        text = some.lower(h, ids).compile().as_text()
        return (scores, some(h, ids), best), text or ""

    want, _ = run(h)
    mesh = mesh_of((2, 4))
    with jax.set_mesh(mesh):
        h = jax.device_put(h, NamedSharding(mesh, P("data")))
        ids = jax.device_put(ids, NamedSharding(mesh, P("data")))
        got, text = run(h)
    assert_trees_close(got, want, HIDDEN)
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert not [line for line in gathers if f"{ROWS}," in line], "of the kernel"
