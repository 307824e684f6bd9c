"""Layers, gradients and optimizers on a mesh equal those on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from matrices import oracle, random_csr, sizes, with_garbage
from tolerances import assert_close

import sparsejax as sj
from sparsejax import optimizers
from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.nn.layers import SparseLinear

FEATURES, HIDDEN, BATCH = 700, 6, 16


def mesh_of(shape, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(axis_type,) * 2)


def random_x(seed=0, *, valued=False):
    """Draws sparse rows. All batches have one capacity, so that they share one program."""
    x = random_csr(BATCH, FEATURES, 0.03, valued=valued, extra=0, seed=seed)
    return with_garbage(x, 400 - len(x.indices), np.random.default_rng(seed))


def random_w(seed=1):
    w = np.random.default_rng(seed).standard_normal((768, HIDDEN))
    w[FEATURES:] = 0
    return jnp.asarray(w, jnp.float32)


@pytest.mark.parametrize(
    ("shape", "combiner", "axis_type"),
    [
        ((2, 4), "sum", AxisType.Auto),
        ((2, 4), "sqrtn", AxisType.Explicit),
        ((8, 1), "mean", AxisType.Auto),
        ((1, 8), "sqrtn", AxisType.Auto),
    ],
)
def test_gather_matmul(shape, combiner, axis_type):
    x, w = random_x(valued=True), random_w()
    c = jnp.asarray(np.random.default_rng(2).standard_normal((BATCH, HIDDEN)))

    def loss(data, w, spec):
        y = sj.gather_matmul(x.with_data(data), w, combiner=combiner, kernel_spec=spec)
        return jnp.sum(y * c), y

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    data = np.abs(np.asarray(x.data)) + np.float32(0.5)
    (_, y), (ddata, dw) = jax.jit(functools.partial(grad, spec=None))(data, w)
    mesh = mesh_of(shape, axis_type)
    with jax.set_mesh(mesh):
        spread = jax.device_put(w, jax.NamedSharding(mesh, P("model", None)))
        run = jax.jit(functools.partial(grad, spec=P("model", None)))
        (_, got), (got_ddata, got_dw) = run(data, spread)
    used = int(x.indptr[-1])
    np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_dw, dw, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_ddata[:used], ddata[:used], rtol=1e-5, atol=1e-5)
    assert got.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("data")), 2)
    assert got_dw.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("model")), 2)


def test_gather_matmul_against_the_oracle_on_a_mesh():
    x, w = random_x(valued=True), random_w()
    with jax.set_mesh(mesh_of((4, 2))):
        run = jax.jit(functools.partial(sj.gather_matmul, kernel_spec=P("model")))
        y = run(x, w)
    w64 = np.asarray(w, np.float64)[:FEATURES]
    magnitude = sizes(x) @ np.abs(w64)
    assert_close(y, oracle(x) @ w64, terms=FEATURES, magnitude=magnitude)


class Net(nnx.Module):
    """Two features that share a table, noise in between, and ordinary parameters."""

    def __init__(self):
        make = functools.partial(SparseLinear, FEATURES, HIDDEN, rngs=nnx.Rngs(0))
        self.noise = sj.SparseDropout(0.3, rngs=nnx.Rngs(3))
        self.first = make()
        self.second = make(kernel=self.first.kernel, combiner="mean")
        self.out = nnx.Linear(HIDDEN, 3, rngs=nnx.Rngs(1))

    def __call__(self, x, x2):
        x = self.noise(sj.nn.normalize_rows(x))
        return self.out(nnx.tanh(self.first(x) + self.second(x2)))


def loss_fn(model, x, x2):
    return jnp.mean((model(x, x2) - 1) ** 2)


def batches(count):
    return [(random_x(2 * i), random_x(2 * i + 1, valued=True)) for i in range(count)]


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, x, x2):
    loss, grads = optimizer.value_and_grad(loss_fn)(model, x, x2)
    optimizer.update(model, sj.optimizers.clip_by_global_norm(grads, 0.5))
    return loss


def trained(rule):
    """The loss of each step and the final parameters, on the current mesh."""
    model = Net()
    optimizer = optimizers.Optimizer(model, rule)
    losses = [step(model, optimizer, *batch) for batch in batches(4)]
    optimizer.flush(model)
    kernel = model.first.kernel[...]
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return np.asarray(losses), state, kernel.sharding


RULES = [
    optimizers.rmsprop(0.01),
    optimizers.rowwise_adagrad(0.1),
    optimizers.adamw(
        optimizers.schedule("cosine_decay_schedule", init_value=0.01, decay_steps=30),
        weight_decay=0.1,
    ),
]


@functools.cache
def trained_on(shape, name):
    """Trains by the named rule on a mesh of this shape; None is one device."""
    rule = next(rule for rule in RULES if rule.name == name)
    if shape is None:
        return trained(rule)
    with jax.set_mesh(mesh_of(shape)):
        return trained(rule)


@pytest.mark.parametrize(
    ("shape", "rule"),
    [((8, 1), RULES[0]), ((1, 8), RULES[1]), ((2, 4), RULES[2])],
    ids=lambda value: getattr(value, "name", None),
)
def test_training_in_a_flax_loop(shape, rule):
    losses, params, _ = trained_on(None, rule.name)
    got_losses, got_params, sharding = trained_on(shape, rule.name)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
        got_params,
        params,
    )
    kernels_lie = jax.NamedSharding(mesh_of(shape), P("model"))
    assert sharding.is_equivalent_to(kernels_lie, 2)


def test_twice_on_one_mesh_gives_the_same_bits():
    first = trained_on((2, 4), RULES[2].name)
    with jax.set_mesh(mesh_of((2, 4))):
        second = trained(RULES[2])
    np.testing.assert_array_equal(first[0], second[0])
    jax.tree.map(np.testing.assert_array_equal, first[1], second[1])


@functools.cache
def row_gradients(shape=None):
    """The row gradients of each of three batches, and their sum over the batches."""

    @jax.jit
    def combined(parts):
        total = parts[0] + parts[1] + parts[2]
        stacked = jax.tree.map(lambda *g: jnp.stack(g), *[parts[0]] * 3)
        return (
            total,
            sj.optimizers.accumulate(stacked),
            sj.optimizers.global_norm(total),
        )

    def run():
        layer = SparseLinear(FEATURES, HIDDEN, rngs=nnx.Rngs(0))
        c = jnp.arange(BATCH * HIDDEN, dtype=jnp.float32).reshape(BATCH, HIDDEN) / 99

        @nnx.jit
        def one(layer, x):
            return sj.grad(lambda layer: jnp.sum(layer(x) * c))(layer)["kernel"][...]

        parts = [one(layer, x) for x, _ in batches(3)]
        return parts, *combined(parts)

    if shape is None:
        return run()
    with jax.set_mesh(mesh_of(shape)):
        return run()


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_row_gradients(shape):
    dense = jax.jit(lambda gradient: gradient.todense())
    parts, total, thrice, norm = row_gradients()
    got_parts, got_total, got_thrice, got_norm = row_gradients(shape)
    for got, want in zip(
        [*got_parts, got_total, got_thrice], [*parts, total, thrice], strict=True
    ):
        np.testing.assert_allclose(dense(got), dense(want), rtol=1e-5, atol=1e-5)
        ids = np.asarray(got.ids)
        ids = ids[ids < got.num_rows]
        assert len(ids) == len(np.unique(ids)) == np.sum(np.asarray(want.ids) < 768)
    np.testing.assert_allclose(got_norm, norm, rtol=1e-5)


def encoded():
    """A deep model on the current mesh, and its result for a batch."""
    config = sj.NetworkConfig.autoencoder((16, 16, 8), dropout=0.5)
    model = sj.FeedForward(config, inputs=700, outputs=700, rngs=nnx.Rngs(0))
    model.train()
    x = random_x()
    return model, np.asarray(nnx.jit(lambda model, x: model.encode(x))(model, x))


@pytest.fixture(scope="module")
def encoded_alone():
    return encoded()[1]


@pytest.mark.parametrize(
    ("shape", "axis_type"),
    [((2, 4), AxisType.Explicit), ((4, 2), AxisType.Auto)],
)
def test_hidden_layers(encoded_alone, shape, axis_type):
    mesh = mesh_of(shape, axis_type)
    with jax.set_mesh(mesh):
        sharded, got = encoded()
    np.testing.assert_allclose(got, encoded_alone, rtol=1e-5, atol=1e-6)
    lies = [layer.kernel[...].sharding for layer in sharded.rest]
    specs = P(None, "model"), P("model")
    for sharding, spec in zip(lies, specs, strict=True):
        assert sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)


def batch_over_all_devices(x, shape, mesh):
    """A batch in which each device has its own rows, as if each had its own data loader."""
    host = jax.tree.map(np.asarray, x)
    rows = BATCH // (shape[0] * shape[1])
    take = jax.jit(lambda x, rows: x.take(rows, nse=64))
    parts = [take(host, first + np.arange(rows)) for first in range(0, BATCH, rows)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves).reshape(*shape, -1), *parts)
    return jax.device_put(stacked, jax.NamedSharding(mesh, P("data", "model")))


@pytest.mark.parametrize(
    ("shape", "rule"),
    [((2, 4), RULES[2]), ((1, 8), RULES[0])],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_device_brings_examples_of_its_own(shape, rule):
    x, c = random_x(valued=True), random_w()[:BATCH]

    def trained(make):
        layer = SparseLinear(FEATURES, HIDDEN, rngs=nnx.Rngs(0))
        optimizer = optimizers.Optimizer(layer, rule)

        @nnx.jit
        def step(layer, optimizer, x):
            x = make(x)

            def loss(layer):
                y = layer(x)
                return jnp.sum(y * c), y

            (_, y), grads = optimizer.value_and_grad(loss, has_aux=True)(layer)
            optimizer.update(layer, grads)
            return y

        return lambda x: (step(layer, optimizer, x), layer.kernel[...])

    run = trained(lambda x: x)
    expected = [run(x) for _ in range(2)]
    mesh = mesh_of(shape)
    with jax.set_mesh(mesh):
        parts = batch_over_all_devices(x, shape, mesh)
        run = trained(ShardedCSR.of_rows)
        got = [run(parts) for _ in range(2)]
    for (y, kernel), (want_y, want_kernel) in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, want_y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(kernel, want_kernel, rtol=1e-4, atol=1e-5)
        everywhere = jax.NamedSharding(mesh, P(("data", "model")))
        assert y.sharding.is_equivalent_to(everywhere, 2)


def test_rows_that_are_wrong_stay_wrong_in_exchange():
    shape = (2, 4)
    with jax.set_mesh(mesh_of(shape)):
        indices = np.tile(np.array([5, 300, 690, 0], np.int32), (*shape, 1))
        indices[1, 2, 0] = FEATURES
        indptr = np.tile(np.array([0, 2, 3], np.int32), (*shape, 1))
        indptr[0, 1] = [0, 1, 9]  # does not fit
        parts = sj.CSR.tree_unflatten(FEATURES, (None, indices, indptr, None))
        blocks = jax.jit(ShardedCSR.of_rows)(jax.tree.map(jnp.asarray, parts))
        dense = np.asarray(jax.jit(ShardedCSR.todense)(blocks))
    bad = np.isnan(dense).any(axis=1)
    assert np.flatnonzero(bad).tolist() == [3, 12]
    assert dense[~bad].sum(axis=1).tolist() == [2, 1, 1, *[2, 1] * 4, 1, 2, 1]


def test_errors_on_a_mesh():
    x, w = random_x(), random_w()
    with pytest.raises(ValueError, match="needs a mesh"):
        sj.gather_matmul(x, w, kernel_spec=P("model"))
    with jax.set_mesh(mesh_of((2, 4))):
        lookup = functools.partial(sj.gather_matmul, kernel_spec=P("data"))
        with pytest.raises(ValueError, match='lie over "model"'):
            jax.eval_shape(lookup, x, w)
        lookup = functools.partial(sj.gather_matmul, kernel_spec=P("model"))
        with pytest.raises(ValueError, match="700 columns needs 768"):
            jax.eval_shape(lookup, x, w[:FEATURES])
        layer = SparseLinear(FEATURES, HIDDEN, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="needs a mesh"):
        layer(x)
