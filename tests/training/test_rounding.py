"""Training with parameters in bfloat16, which are rounded at random."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

from sparsejax import optimizers
from sparsejax.mesh.layout import make_mesh
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR
from sparsejax.verbs.fit import fit
from sparsejax.verbs.plan import plan

ROWS, ITEMS = 64, 300


def network(**options: Any):
    given: dict[str, Any] = {"normalize": False, "corruption": 0.0, "temperature": None}
    given |= {"activation": "linear", "loss": "l2_loss", "param_dtype": "bfloat16"}
    return NetworkConfig.autoencoder((4,), **(given | options))


def build(rule, config, *, exact=False):
    model = FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))
    if exact:  # -1, 0 and 1
        rng = np.random.default_rng(3)
        for kernel in (model.first.kernel, model.output.kernel):
            values = np.zeros(kernel.shape)
            values[:ITEMS] = rng.integers(-1, 2, (ITEMS, 4))
            lies = kernel.get_value().sharding
            value = jax.device_put(jnp.asarray(values, kernel.dtype), lies)
            kernel.set_value(value)
    return model, Optimizer(model, rule, seed=5)


def examples():
    rng = np.random.default_rng(0)
    x = [rng.choice(ITEMS, 4, replace=False) for _ in range(ROWS)]
    rows = np.arange(0, 4 * ROWS + 1, 4)
    return scipy.sparse.csr_array(
        (np.ones(4 * ROWS), np.concatenate(x), rows), (ROWS, ITEMS)
    )


def arrays(modules):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(modules)))
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in leaves
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }


@pytest.mark.parametrize("fused", [True, False])
def test_same_bits_on_any_mesh(fused):
    """All numbers of the step are exact, in whatever order they are added."""
    # The first moves the whole first kernel, the second the rows of the batch.
    rule = optimizers.momentum(2.0**-4, momentum=0.5)
    if not fused:
        rule = optimizers.sgd(2.0**-4)

    def trained(shape, **options):
        mesh = contextlib.nullcontext()
        if shape is not None:
            mesh = jax.set_mesh(make_mesh(data=shape[0], model=shape[1]))
        with mesh:
            modules = build(rule, network(**options), exact=True)
            fit(*modules, examples(), batch_size=ROWS, num_epochs=1, fused=fused)
            return modules, arrays(modules)

    (model, optimizer), expected = trained(None)
    got = model.output.kernel[...]
    assert got.dtype == model.first.kernel.dtype == jnp.bfloat16
    noise = optimizer.noise_of(("output", "kernel"))
    assert noise is not None
    wide = trained(None, param_dtype="float32")[0][0].output.kernel[...]
    same = got == noise.rounded(wide, 1)
    # Without `fused`, the gradient itself is an array in bfloat16.
    assert same.all() if fused else same.mean() > 0.99
    assert (got != wide.astype(jnp.bfloat16)).mean() > 0.02
    for shape in [(2, 4), (1, 8)] if fused else [(2, 4)]:
        _, actual = trained(shape)
        assert actual.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(actual[name], array, err_msg=name)


def test_resumed_bit_for_bit(tmp_path):
    config = network(activation="tanh", loss="softmax_cross_entropy")

    def trained(epochs, **options):
        modules = build(optimizers.adam(1e-2), config)
        fit(*modules, examples(), batch_size=16, num_epochs=epochs, **options)
        return arrays(modules)

    expected = trained(3)
    options = {"checkpoint_dir": tmp_path / "c", "checkpoint_seconds": 0}
    trained(2, **options)
    actual = trained(3, **options, resume=True)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array, err_msg=name)
    state = {name: array.dtype for name, array in expected.items() if "nu" in name}
    assert state and set(state.values()) == {np.dtype(np.float32)}


def test_small_steps_are_not_lost():
    """Rows, and a parameter that has a dense gradient; nearest rounding loses them."""

    def moved(at_random):
        modules = build(optimizers.sgd(1e-4), network(), exact=True)
        model, optimizer = modules
        bias = model.first.bias
        assert bias is not None
        for parameter in (model.first.kernel, bias):
            parameter.set_value(jnp.ones_like(parameter.get_value()))
        if not at_random:
            optimizer.rounding = nnx.data({})
        x = CSR.from_scipy(scipy.sparse.csr_array([[1.0] * 100 + [0.0] * 200]))

        @nnx.jit
        def steps(model, optimizer):
            graphdef, state = nnx.split((model, optimizer))

            def step(_, state):
                model, optimizer = nnx.merge(graphdef, state)

                def loss_fn(model):  # each weight has the gradient 1
                    return jnp.sum(model.first(x).astype(jnp.float32))

                _, grads = optimizer.value_and_grad(loss_fn)(model)
                optimizer.update(model, grads)
                return nnx.state((model, optimizer))

            return jax.lax.fori_loop(0, 1000, step, state)

        nnx.update(modules, steps(model, optimizer))
        kernel = np.asarray(model.first.kernel[...], np.float64)
        return kernel[:100], np.asarray(bias[...], np.float64)

    kernel, bias = moved(False)
    assert (kernel == 1).all() and (bias == 1).all()
    kernel, bias = moved(True)
    p = 1e-4 * 2**8  # of a step of 2^-8
    deviation = 2**-8 * np.sqrt(1000 * p * (1 - p))
    assert abs(kernel.mean() - 0.9) < 4 * deviation / np.sqrt(kernel.size)
    assert 0.8 < kernel.std() / deviation < 1.2
    assert (np.abs(bias - 0.9) < 5 * deviation).all()


def test_half_the_memory():
    sizes = {"inputs": 40_000, "rows": 1_000, "entries": 9_000, "fused": True}
    rule = optimizers.adam(1e-3)
    half, whole = (
        plan(network(param_dtype=dtype, output_dtype="bfloat16"), rule, **sizes)
        for dtype in ("bfloat16", "float32")
    )
    kept = 4 * 4 + 4  # the hidden layers' numbers and such
    assert abs(whole.weights - 2 * half.weights) < 100 * kept
    assert abs(whole.state - half.state) < 100
    assert half.operand == 0 < whole.operand  # no copy for the products
    with pytest.raises(ValueError, match='param_dtype is "float32" or "bfloat16"'):
        network(param_dtype="float16")
    config = network()
    assert NetworkConfig.from_json(config.to_json()) == config
