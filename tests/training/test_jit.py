"""`jit`: a custom training step whose modules are split only once."""

import dataclasses
import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.optimizers import inplace

X = sj.CSR.from_scipy(scipy.sparse.random(8, 16, density=0.2, dtype=np.float32, rng=0))


class Net(nnx.Module):
    """A sparse layer, dropout, batch statistics, and an array that is not in a variable."""

    def __init__(self, features: int = 16, width: int = 8, *, rngs: nnx.Rngs):
        self.first = sj.SparseLinear(features, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, 4, rngs=rngs)])
        self.scale = jnp.full((), 2.0)

    def __call__(self, x):
        h = self.dropout(self.norm(jnp.tanh(self.first(x))))
        for layer in self.layers:
            h = layer(h)
        return self.scale * h


def made(**sizes):
    model = Net(rngs=nnx.Rngs(0), **sizes)
    return model, sj.Optimizer(model, sj.optimizers.adagrad(0.1))


def step(model, optimizer, x, target=1.0):
    loss, grads = optimizer.value_and_grad(
        lambda model: jnp.mean((model(x) - target) ** 2)
    )(model)
    optimizer.update(model, grads)
    return loss


jitted = sj.jit(step)


def state_of(modules):
    state = nnx.to_flat_state(nnx.state(modules, nnx.Variable))
    return {path: np.asarray(_bits(value[...])) for path, value in state}


def _bits(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def assert_same(ours, theirs):
    ours, theirs = state_of(ours), state_of(theirs)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_allclose(value, theirs[path], 1e-4, 1e-6, err_msg=str(path))


def test_equals_nnx_jit():
    ours, theirs = made(), made()
    by_flax = nnx.jit(step)
    for target in (1.0, 2.0, 3.0):
        loss = jitted(*ours, X, target=target)
        np.testing.assert_allclose(loss, by_flax(*theirs, X, target=target), rtol=1e-6)
    assert_same(ours, theirs)


def test_notices_another_mode_other_values_and_other_layers():
    model, _ = made()
    predict = sj.jit(lambda model, x: model(x))
    for change in (
        lambda: model.eval(),
        lambda: model.train(),
        lambda: setattr(model, "scale", jnp.full((), 5.0)),
        lambda: model.layers[0].kernel.set_value(jnp.ones((8, 4))),
        lambda: setattr(model.layers, "0", nnx.Linear(8, 3, rngs=nnx.Rngs(3))),
    ):
        change()
        other = nnx.clone(model)
        np.testing.assert_allclose(predict(model, X), other(X), 1e-4, 1e-6)
        assert_same(model, other)


def test_arguments_may_hold_modules_anywhere():
    calls = []

    @sj.jit(static_argnames="power", donate_argnames=("carry",))
    def total(pair, power, *, carry, rngs, also):
        calls.append(power)
        assert also is pair["b"][0]
        pair["a"][...] += carry
        noise = jax.random.uniform(rngs())
        return (pair["a"][...] + pair["b"][0].kernel[...].sum()) ** power + noise

    layer, a = nnx.Linear(2, 3, rngs=nnx.Rngs(1)), nnx.Variable(jnp.zeros(()))
    rngs, rngs_of_flax = nnx.Rngs(0), nnx.Rngs(0)
    summed = float(layer.kernel[...].sum())
    for i, power in enumerate((1, 2, 2, True)):
        carry = jnp.ones(())
        found = total({"a": a, "b": [layer]}, power, carry=carry, rngs=rngs, also=layer)
        expected = (i + 1 + summed) ** power + jax.random.uniform(rngs_of_flax())
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert carry.is_deleted()
    assert calls == [1, 2, True]
    assert total.__name__ == "total"


def test_an_optimizer_of_flax_and_a_method():
    class Trainer:
        def __init__(self):
            self.model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)

        @functools.partial(sj.jit, static_argnums=0, deterministic=True)
        def step(self, model, optimizer, x):
            loss, grads = nnx.value_and_grad(lambda model: model(x).sum())(model)
            optimizer.update(model, grads)
            return loss

    one = Trainer()
    losses = [float(one.step(one.model, one.optimizer, jnp.ones(3))) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert int(one.optimizer.step[...]) == 3


def test_what_else_holds_an_array_keeps_its_value():
    model, optimizer = made()
    jitted(model, optimizer, X)
    kernel = model.layers[0].kernel[...]
    copy, before = nnx.clone(model), np.array(kernel)
    jitted(model, optimizer, X)
    np.testing.assert_array_equal(kernel, before)
    np.testing.assert_array_equal(copy.layers[0].kernel[...], before)
    assert not np.array_equal(model.layers[0].kernel[...], before)
    address = model.first.kernel[...].unsafe_buffer_pointer()
    jitted(model, optimizer, X)
    assert model.first.kernel[...].unsafe_buffer_pointer() == address


def test_within_another_program_it_is_a_part_of_it():
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    f = sj.jit(lambda layer, x: layer(x).sum())
    slope = nnx.jit(nnx.grad(f))(layer, jnp.ones(3))
    np.testing.assert_allclose(slope.kernel[...], np.ones((3, 2)))
    with pytest.raises(ValueError, match="cannot be called within"):
        jax.jit(sj.jit(lambda x: x, deterministic=True))(1.0)


def test_modules_that_are_gone_are_forgotten():
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    f = sj.jit(lambda layer, x: layer(x))
    f(layer, jnp.ones(3))
    array = weakref.ref(layer.kernel[...])
    del layer
    gc.collect()
    assert array() is None


def test_the_oldest_of_many_modules_are_split_again(monkeypatch):
    """A step in a loop over models does not hold on to all of them."""
    layers = [nnx.Linear(1, 1, rngs=nnx.Rngs(seed)) for seed in range(40)]
    split, flattened = [], inplace.Flattened

    def noted(modules):
        split.append(modules[0])
        return flattened(modules)

    monkeypatch.setattr(inplace, "Flattened", noted)
    f = sj.jit(lambda layer, x: layer(x))

    def called(layer):
        del split[:]
        np.testing.assert_allclose(f(layer, jnp.ones(1)), layer.kernel[...][0])
        return len(split)

    assert [called(layer) for layer in layers] == [1] * 40
    assert called(layers[-1]) == 0
    assert called(layers[0]) == 1


def test_on_a_mesh():
    """A second `fit` or `jit` has the layout of the first one, and so its programs."""
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        ours, layouts = made(), []
        for _ in range(2):
            layouts.append(inplace.Flattened(ours).layout)
            jitted(*ours, X)
        assert layouts[0] == layouts[1]
        kernel = ours[0].first.kernel[...]
        assert kernel.sharding.spec[0] == "model"  # pyrefly: ignore
        assert len(ours[0].norm.bias[...].devices()) == 8  # pyrefly: ignore
        ours[1].flush(ours[0])
    alone = made()
    for _ in range(2):
        jitted(*alone, X)
    alone[1].flush(alone[0])
    assert_same(ours[0], alone[0])


def test_parameters_that_came_or_went():
    model, optimizer = made()
    jitted(model, optimizer, X)
    model.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"new is 'layers\.1\.bias'.*Make the step"):
        jitted(model, optimizer, X)
    with pytest.raises(ValueError, match="optimizer was made for another model"):
        sj.jit(step)(model, optimizer, X)


@pytest.mark.parametrize("sizes", [{"features": 300}, {"width": 4}])
def test_the_optimizer_of_another_model(sizes):
    _, optimizer = made()
    model, _ = made(**sizes)
    x = dataclasses.replace(X, num_cols=sizes.get("features", 16))
    for run in (jitted, step):
        with pytest.raises(ValueError, match="optimizer was made for another model"):
            run(model, optimizer, x)


def test_memory_that_was_donated():
    model, optimizer = made()
    jitted(model, optimizer, X)
    jax.jit(lambda state: state, donate_argnums=0)(nnx.state(model.layers))
    with pytest.raises(ValueError, match=r"'layers\.0\.bias' was donated"):
        jitted(model, optimizer, X)


def test_what_a_step_cannot_do():
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    layer.table = jnp.ones(2)  # pyrefly: ignore

    def adds(layer):
        layer.seen = nnx.Variable(jnp.ones(2))

    def replaces(layer):
        layer.table = jnp.zeros(2)

    def switches(layer):
        layer.mode = "other"

    for change, message in (
        (adds, "consists of .seen"),
        (replaces, "array that is an attribute"),
        (switches, "consists of .an attribute"),
    ):
        with pytest.raises(ValueError, match=message):
            sj.jit(change)(layer)
    with pytest.raises(TypeError, match="returns a Linear"):
        sj.jit(lambda layer: (layer, 1))(layer)
    settings = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    settings.sizes = [1, 2]  # pyrefly: ignore
    kernel = nnx.Variable(jnp.ones(2), tags={"a": 1})
    for module, where in (
        (settings, "sizes' of the Linear"),
        (kernel, "tags' of the V"),
    ):
        with pytest.raises(TypeError, match=f"'{where}.* cannot be hashed"):
            sj.jit(lambda module: 1)(module)
    with pytest.raises(TypeError, match="number 1 of .* a list cannot"):
        sj.jit(lambda layer, sizes: 1, static_argnums=1)(layer, [1])
    np.testing.assert_array_equal(layer.table, np.ones(2))  # pyrefly: ignore


@pytest.mark.usefixtures("wrong_types")
def test_arguments_of_jit():
    f = lambda x, y: x
    wrong: list[dict[str, Any]] = [
        {"static_argnums": 2},
        {"static_argnames": "z"},
        {"donate_argnums": (0, -3)},
        {"donate_argnames": ("x", "z")},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            sj.jit(f, **options)
    with pytest.raises(ValueError, match="both static and donated"):
        sj.jit(f, static_argnums=0, donate_argnames="x")
    not_a_function: Any = 3
    with pytest.raises(TypeError, match="expected a function"):
        sj.jit(not_a_function)
