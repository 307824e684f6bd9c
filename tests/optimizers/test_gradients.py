"""Row gradients against nnx.value_and_grad, and NumPy in float64."""

import concurrent.futures
import copy
import dataclasses
import functools
import operator
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from flax import nnx
from hypothesis import given, settings
from matrices import csrs, oracle, random_csr, sizes
from tolerances import assert_close

from sparsejax.mesh.layout import make_mesh
from sparsejax.nn.layers import SparseLinear
from sparsejax.ops import scatter_gradient
from sparsejax.optimizers import gradients, row_gradient
from sparsejax.optimizers.gradients import RowParam, lookup, value_and_grad
from sparsejax.optimizers.row_gradient import RowGradient, RowSums, RowTerms
from sparsejax.sparse import CSR

FEATURES, HIDDEN = 50, 4


class Net(nnx.Module):
    """A model with two lookups, in one kernel if they are tied."""

    def __init__(self, *, tied=False):
        make = functools.partial(SparseLinear, FEATURES, HIDDEN, rngs=nnx.Rngs(0))
        self.first = make()
        self.second = make(kernel=self.first.kernel if tied else None)
        self.out = nnx.Linear(HIDDEN, 3, rngs=nnx.Rngs(1))

    def __call__(self, x, x2):
        return self.out(nnx.relu(self.first(x) + self.second(x2)))


class NoisyNet(Net):
    """A model that also has batch statistics and noise."""

    def __init__(self, *, tied):
        super().__init__(tied=tied)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=nnx.Rngs(2))
        self.dropout = nnx.Dropout(0.3, rngs=nnx.Rngs(3))

    def __call__(self, x, x2):
        h = self.dropout(self.norm(self.first(x))) + self.second(x2)
        return self.out(nnx.relu(h))


class Layer(nnx.Module):
    """A layer that has only a kernel."""

    def __init__(self, rows=64, hidden=3):
        values = jax.random.normal(jax.random.key(0), (rows, hidden))
        self.kernel = RowParam(values)

    def __call__(self, x, **options):
        return lookup(self.kernel, x, **options)


def mean_loss(model, x, x2):
    return jnp.mean((model(x, x2) - 1) ** 2)


def linear_loss(layer, x):
    return jnp.sum(layer(x) ** 2)


def penalised_loss(model, x, x2):
    return mean_loss(model, x, x2) + 0.1 * jnp.sum(model.first.kernel[...] ** 2)


@pytest.fixture(scope="module")
def batch():
    return random_csr(16, FEATURES), random_csr(16, FEATURES, valued=True, seed=1)


def rows_of(loss, *, has_aux=False, **options):
    """`value_and_grad(loss)` as one compiled program."""
    return nnx.jit(value_and_grad(loss, has_aux=has_aux, **options))


def dense_of(loss, **options):
    return nnx.jit(nnx.value_and_grad(loss, **options))


def is_rows(leaf):
    return isinstance(leaf, RowGradient)


def dense(grads):
    """Converts each RowGradient to an array."""
    return jax.tree.map(
        lambda g: g.todense() if is_rows(g) else g, grads, is_leaf=is_rows
    )


def assert_same(got, want, rtol=1e-5, atol=2e-6):
    got, want = dense(got), dense(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def check_form(g: RowGradient):
    ids, values = np.asarray(g.ids), np.asarray(g.values)
    used = ids < g.num_rows
    assert ids.dtype == np.int32 and (np.diff(ids[used]) > 0).all()
    assert (
        (ids[~used] == g.num_rows).all()
        and not used[np.argmin(used) :].any()
        or (used.all())
    )
    assert (values[~used] == 0).all()


@pytest.mark.parametrize("tied", [False, True])
def test_equals_nnx(batch, tied):
    def loss(model, x, x2):
        value = mean_loss(model, x, x2)
        return value, {"twice": 2 * value}

    def rows(model, *args):
        return value_and_grad(loss, has_aux=True)(model, *args)

    def plain(model, *args):
        return nnx.value_and_grad(loss, has_aux=True)(model, *args)

    model, twin = NoisyNet(tied=tied), NoisyNet(tied=tied)
    (value, aux), grads = nnx.jit(rows)(model, *batch)
    (expected, _), expected_grads = nnx.jit(plain)(twin, *batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(aux["twice"], 2 * value)
    assert_same(grads, expected_grads)
    kernels = [
        grads[n]["kernel"][...] for n in ("first", "second") if "kernel" in grads[n]
    ]
    assert len(kernels) == 2 - tied
    for g in kernels:
        assert isinstance(g, RowGradient) and g.shape == (256, HIDDEN)
        check_form(g)
    # Noise was drawn and statistics were moved once, not twice.
    for kind in (nnx.BatchStat, nnx.RngCount):
        assert_same(nnx.state(model, kind), nnx.state(twin, kind))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_finite_differences(combiner):
    x = random_csr(6, FEATURES, 0.1, valued=True)
    assert x.data is not None
    x = dataclasses.replace(x, data=jnp.abs(x.data) + 0.5)

    class Weighted(Layer):
        def __init__(self):
            super().__init__()
            self.data = nnx.Param(x.data)

    def loss_fn(model):
        values = dataclasses.replace(x, data=model.data[...])
        return jnp.sum(jnp.sin(model(values, combiner=combiner)))

    model = Weighted()
    grads = rows_of(loss_fn)(model)[1]
    count = int(x.indptr[-1])
    w = np.asarray(model.kernel[...], np.float64)
    data = np.asarray(model.data[...], np.float64)

    def loss(w, data):
        matrix = x.to_scipy().astype(np.float64)
        matrix.data = data[:count]
        a = matrix.toarray()
        norm = {"sum": 1, "mean": a.sum(1), "sqrtn": np.sqrt((a**2).sum(1))}[combiner]
        y = a @ w[:FEATURES]
        y = y / (
            np.broadcast_to(norm, len(y))[:, None] + (np.abs(a).sum(1) == 0)[:, None]
        )
        return np.sin(y).sum()

    def slope(array, index):
        step = np.zeros_like(array)
        step[index] = 1e-6
        shifted = [
            (w + s, data) if array is w else (w, data + s) for s in (step, -step)
        ]
        return (loss(*shifted[0]) - loss(*shifted[1])) / 2e-6

    got = np.asarray(grads["kernel"][...].todense())
    wanted = [[slope(w, (i, j)) for j in range(3)] for i in range(64)]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    got = np.asarray(grads["data"][...])
    wanted = [slope(data, (i,)) for i in range(count)]
    np.testing.assert_allclose(got[:count], wanted, rtol=1e-4, atol=1e-5)


@nnx.jit
def rows_of_linear(layer, x):
    return value_and_grad(linear_loss)(layer, x)


@settings(max_examples=30)
@given(csrs(rows=5, cols=40))
def test_awkward_matrices(x):
    layer = Layer()
    g = rows_of_linear(layer, x)[1]["kernel"][...]
    w = np.asarray(layer.kernel[...], np.float64)
    a, size = np.zeros((2, 64, 5))
    a[:40], size[:40] = oracle(x).T, sizes(x).T
    check_form(g)
    magnitude = 2 * size @ (size.T @ np.abs(w))
    assert_close(g.todense(), 2 * a @ (a.T @ w), terms=250, magnitude=magnitude)


def test_a_kernel_that_is_read_elsewhere(batch):
    message = r"kernel 'first.kernel' \(256 x 4\) is also read outside lookups"
    with pytest.raises(ValueError, match=message):
        value_and_grad(penalised_loss)(Net(), *batch)
    value, grads = rows_of(penalised_loss, dense="allow")(Net(), *batch)
    expected, expected_grads = dense_of(penalised_loss)(Net(), *batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_same(grads, expected_grads)
    assert isinstance(grads["first"]["kernel"][...], jax.Array)
    assert isinstance(grads["second"]["kernel"][...], RowGradient)


def test_uses_without_a_gradient_are_allowed():
    def loss(layer):
        size = jnp.sum(jax.lax.stop_gradient(layer.kernel[...]) ** 2)
        return linear_loss(layer, x) * size

    x, layer = random_csr(6, 20), Layer()
    grads = value_and_grad(loss)(layer)[1]  # under no jit
    assert isinstance(grads["kernel"][...], RowGradient)
    assert_same(grads, nnx.grad(loss)(layer))


INNER = {
    "jit": lambda m, x: jax.jit(lambda x: linear_loss(m, x))(x),
    "vmap": lambda m, x: jnp.sum(jax.vmap(lambda _: linear_loss(m, x))(jnp.ones(2))),
    "scan": lambda m, x: jax.lax.scan(
        lambda c, _: (c + linear_loss(m, x), None), 0.0, None, length=2
    )[0],
    "remat": lambda m, x: jax.checkpoint(lambda x: linear_loss(m, x))(x),
    "nnx.jit": nnx.jit(linear_loss),
    "nnx.remat": nnx.remat(linear_loss),
    "nnx.clone": lambda m, x: linear_loss(nnx.clone(m), x),
}


@pytest.mark.parametrize("name", INNER)
def test_a_lookup_that_the_recorder_cannot_see(name):
    x, layer = random_csr(6, 20), Layer()
    if name == "nnx.jit":
        INNER[name](layer, x)  # it already has a trace from outside
    with pytest.raises(ValueError, match="inside jit, scan, vmap or remat within"):
        value_and_grad(INNER[name])(layer, x)
    if name in ("jit", "nnx.jit", "nnx.clone"):
        grads = rows_of(INNER[name], dense="allow")(layer, x)[1]
        assert_same(grads, dense_of(INNER[name])(layer, x)[1])


def test_a_transformation_of_another_part_is_allowed(batch):
    def loss(model, x, x2):
        h = model.first(x) + model.second(x2)
        return jnp.sum(nnx.remat(lambda out, h: out(h))(model.out, h) ** 2)

    grads = jax.eval_shape(value_and_grad(loss), Net(), *batch)[1]
    assert isinstance(grads["first"]["kernel"][...], RowGradient)


def test_arguments():
    x, layer = random_csr(6, 20), Layer()

    def loss(layer, x, power, *, scale, signed, name, rngs):
        assert isinstance(signed, bool) and name == "a"
        noise = jax.random.normal(rngs.noise(), ())
        return scale * jnp.sum(layer(x) ** power) + noise

    rngs = nnx.Rngs(noise=3)
    options = {"scale": 0.5, "signed": True, "name": "a"}
    value, grads = value_and_grad(loss)(layer, x, 2, **options, rngs=rngs)
    noise = jax.random.normal(nnx.Rngs(noise=3).noise(), ())
    np.testing.assert_allclose(value, 0.5 * linear_loss(layer, x) + noise, rtol=1e-6)
    assert int(rngs.noise.count[...]) == 1
    whole = gradients.grad(linear_loss)(layer, x)
    assert_same(jax.tree.map(lambda g: 2 * g, grads, is_leaf=is_rows), whole)
    with_aux = gradients.grad(lambda m: (linear_loss(m, x), "aux"), has_aux=True)
    assert with_aux(layer)[1] == "aux"
    with pytest.raises(TypeError, match=r"not a tuple; several .* nnx.List"):
        value_and_grad(lambda pair: 0.0)((layer, layer))
    with pytest.raises(TypeError, match="must be a module, not a RowParam"):
        value_and_grad(lookup)(layer.kernel, x)


def test_unused_and_frozen_kernels(batch):
    def loss(model, x, x2):
        return jnp.sum(model.out(model.first(x)) ** 2)

    grads = rows_of(loss)(Net(), *batch)[1]
    unused = grads["second"]["kernel"][...]
    assert isinstance(unused, RowGradient) and unused.values.shape == (0, HIDDEN)
    assert_same(grads, dense_of(loss)(Net(), *batch)[1])

    def only_first(path, variable):
        return isinstance(variable, nnx.Param) and path[0] == "first"

    grads = jax.eval_shape(value_and_grad(loss, wrt=only_first), Net(), *batch)[1]
    assert set(grads) == {"first"}


def test_a_teacher_is_not_differentiated(batch):
    model, teacher = Net(), Net(tied=True)

    def loss(model, x, x2):
        return jnp.mean((model(x, x2) - 2 * teacher(x, x2)) ** 2)

    grads = rows_of(loss)(model, *batch)[1]
    assert_same(grads, dense_of(loss)(model, *batch)[1])


def test_lookups_of_a_kernel_are_counted():
    """The first pass over the loss does not know yet how many there are."""
    found, x, other = [], random_csr(4, 5), RowParam(jnp.ones((5, 2)))
    model = nnx.Dict(once=RowParam(jnp.ones((5, 2))), twice=RowParam(jnp.ones((5, 2))))

    def loss_fn(model):
        kernels = model.once, model.twice, other
        found.append([gradients.is_read_once(kernel) for kernel in kernels])
        read = model.once, model.twice, model.twice
        return sum(lookup(kernel, x).sum() for kernel in read)

    jax.eval_shape(value_and_grad(loss_fn), model)
    assert found == [[False] * 3, [True, False, False]]


def test_a_mesh_need_not_divide_the_rows_that_are_asked_for():
    ids = np.array([3, -1, 0, 3, 4])
    with jax.set_mesh(make_mesh(data=8, model=1)):
        layer = SparseLinear(5, 3, rngs=nnx.Rngs(0))
        w = np.asarray(layer.kernel[...])

        @nnx.jit
        def step(layer):
            def loss(layer):
                rows = gradients.rows_of(layer.kernel, jnp.asarray(ids))
                return jnp.sum(rows**2), rows

            return value_and_grad(loss, has_aux=True)(layer)

        (_, found), grads = step(layer)
        slope = np.asarray(grads["kernel"][...].todense())
    np.testing.assert_array_equal(found, np.where(ids[:, None] < 0, 0, w[ids]))
    times = np.bincount(ids[ids >= 0], minlength=len(w))
    np.testing.assert_allclose(slope, 2 * w * times[:, None], rtol=1e-6)


def test_matrices_without_entries():
    layer = SparseLinear(20, 3, rngs=nnx.Rngs(0))
    layer.bias = nnx.Param(jnp.ones(3))
    for nse in (0, 5):
        x = CSR(None, np.zeros(nse, np.int32), np.zeros(5, np.int32), num_cols=20)
        value, grads = rows_of_linear(layer, x)
        assert float(value) == 12 and not grads["kernel"][...].todense().any()
        np.testing.assert_array_equal(grads["bias"][...], [8, 8, 8])


def test_rows_that_do_not_fit_are_nan():
    layer = SparseLinear(20, 3, rngs=nnx.Rngs(0))
    full = random_csr(6, 20, 0.5)
    short = jax.jit(lambda x: x.take(jnp.arange(6), nse=5))(full)
    value, grads = rows_of_linear(layer, short)
    assert np.isnan(value) and np.isnan(row_gradient.global_norm(grads))


def test_threads_do_not_share_a_recorder():
    x = random_csr(6, 20)
    expected = rows_of_linear(Layer(), x)
    together = threading.Barrier(2)

    def meeting_loss(layer):
        together.wait(60)  # each has begun to record before any goes on
        return linear_loss(layer, x)

    def work(hidden):
        return rows_of(meeting_loss)(Layer(hidden=hidden))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        (value, grads), _ = pool.map(work, [3, 5])
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    assert_same(grads, expected[1])


def test_after_an_error_lookups_are_ordinary():
    x, layer = random_csr(6, 20), SparseLinear(20, 3, rngs=nnx.Rngs(0))

    def loss(layer):
        layer(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        value_and_grad(loss)(layer)
    grads = nnx.grad(linear_loss)(layer, x)
    assert isinstance(grads["kernel"][...], jax.Array)
    with pytest.raises(TypeError, match="scalar-output"):
        value_and_grad(lambda layer: layer(x))(layer)


def test_derivatives_of_a_row_gradient_are_refused():
    x, layer = random_csr(6, 20), SparseLinear(20, 3, rngs=nnx.Rngs(0))

    def outer(layer):
        return value_and_grad(linear_loss)(layer, x)[0]

    for transform in (nnx.grad, value_and_grad):
        with pytest.raises(NotImplementedError, match="cannot be differentiated"):
            jax.eval_shape(transform(outer), layer)

    def with_other(layer):  # inside the loss, but about another model
        inner = SparseLinear(20, 3, rngs=nnx.Rngs(1))
        return linear_loss(layer, x) + 0 * value_and_grad(linear_loss)(inner, x)[0]

    got = rows_of(with_other)(layer)[1]
    assert_same(got, dense_of(linear_loss)(layer, x)[1])


def make_rows(ids, num_rows=9, capacity=5, seed=0, current=False):
    values = np.random.default_rng(seed).normal(size=(capacity, 3)).astype(np.float32)
    values[len(ids) :] = 0
    padded = [*ids, *[num_rows] * (capacity - len(ids))]
    ids = jnp.asarray(padded, jnp.int32)
    return RowSums(ids, jnp.asarray(values), num_rows, current)


def make_terms(num_rows=9, seed=0) -> RowTerms:
    """The gradient terms of `make_rows([0, 3, 8])` before they are summed."""
    values = np.zeros((4, 9), np.float32)
    values[:, [0, 3, 8]] = np.random.default_rng(seed).normal(size=(4, 3))
    x = CSR.from_scipy(scipy.sparse.csr_array(values))
    dy = np.random.default_rng(seed + 1).normal(size=(4, 3)).astype(np.float32)
    return RowTerms(scatter_gradient.row_terms([x], [jnp.asarray(dy)], num_rows))


def test_arithmetic():
    a, b = make_rows([0, 3, 8], current=True), make_rows([2, 3], seed=1)
    total = a + b
    check_form(total)
    assert total.ids.shape == (9,) and not total.current  # at most num_rows
    assert (a + a).current
    np.testing.assert_allclose(total.todense(), a.todense() + b.todense())
    array = np.ones((9, 3), np.float32)
    for sum_ in (a + array, array + a, a + jnp.asarray(array), jnp.asarray(array) + a):
        np.testing.assert_allclose(sum_, a.todense() + 1)
    for scaled in (2 * a, a * 2, a * jnp.float32(2), np.float32(2) * a):
        np.testing.assert_allclose(scaled.todense(), 2 * a.todense())
        np.testing.assert_array_equal(scaled.ids, a.ids)
    np.testing.assert_allclose((a / 4).todense(), a.todense() / 4)
    np.testing.assert_array_equal((-a).todense(), -a.todense())
    np.testing.assert_allclose((a - b).todense(), a.todense() - b.todense(), atol=1e-7)
    np.testing.assert_allclose(a - array, a.todense() - 1)
    np.testing.assert_allclose(array - a, 1 - a.todense())
    assert a.shape == (9, 3) and a.dtype == jnp.float32
    with pytest.raises(TypeError):
        a + np.ones((3, 3), np.float32)
    with pytest.raises(TypeError):
        a * np.ones(3)
    with pytest.raises(ValueError, match="of one kernel"):
        a + make_rows([1], num_rows=8)
    with pytest.raises(ValueError, match="at least one"):
        row_gradient.merge([])
    nothing = make_rows([], capacity=0)
    np.testing.assert_allclose((nothing + nothing).todense(), 0)


_OURS = (
    "RowGradient, .* sparsejax.optimizers.accumulate, sparsejax.optimizers.global_norm"
)
_MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def _on_two_devices(reduce):
    return jax.shard_map(
        lambda g: jax.tree.map(lambda leaf: reduce(leaf, "data"), g),
        mesh=_MESH,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )


@pytest.mark.parametrize(
    "use",
    {
        "tree.map add": lambda g: jax.tree.map(jnp.add, g, g),
        "optax.tree.add": lambda g: optax.tree.add(g, g),
        "tree.map scale": lambda g: jax.tree.map(lambda leaf: 2 * leaf, g),
        "numpy scale": lambda g: jax.tree.map(lambda leaf: np.float32(2) * leaf, g),
        "optax.tree.scale": lambda g: optax.tree.scale(0.5, g),
        "negate": lambda g: jax.tree.map(jnp.negative, g),
        "divide": lambda g: jax.tree.map(lambda leaf: leaf / 3, g),
        "mask": lambda g: jax.tree.map(lambda leaf: leaf * (leaf > 0), g),
        "clip": lambda g: jax.tree.map(lambda leaf: jnp.clip(leaf, -1, 1), g),
        "moving mean": lambda g: optax.incremental_update(g, g, 0.1),
        "norm": jax.jit(optax.tree.norm),
        "clip_by_global_norm": jax.jit(
            lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())
        ),
        "sgd": jax.jit(lambda g: optax.sgd(0.1).update(g, optax.sgd(0.1).init(g))),
        "adam": jax.jit(lambda g: optax.adam(0.1).update(g, optax.adam(0.1).init(g))),
        "sum of leaves": jax.jit(lambda g: sum(map(jnp.sum, jax.tree.leaves(g)))),
        "mean of a stack": jax.jit(
            lambda g: jax.tree.map(lambda leaf: jnp.mean(jnp.stack([leaf] * 2), 0), g)
        ),
        "vmap": jax.vmap(lambda g: jax.tree.map(jnp.add, g, g)),
        "psum": _on_two_devices(jax.lax.psum),
        "pmean": _on_two_devices(jax.lax.pmean),
        "compiled psum": jax.jit(_on_two_devices(jax.lax.psum)),
    }.items(),
    ids=lambda use: use[0],
)
@pytest.mark.parametrize("kind", ["sums", "terms"])
def test_arithmetic_leaf_by_leaf_is_refused(use, kind):
    g = make_rows([0, 3, 8], num_rows=2000)
    if kind == "terms":
        g = make_terms(num_rows=2000)
    if use[0] == "vmap":
        g = jax.tree.map(lambda leaf: leaf[None], g)
    with pytest.raises(TypeError, match=_OURS):
        use[1]({"kernel": g})


def test_leaf_by_leaf_nothing_else_moves_the_ids():
    g = make_rows([0, 3, 8])
    with pytest.raises(NotImplementedError):  # JAX's own message
        optax.tree.norm(g)
    for call in (
        lambda leaf: leaf.astype(jnp.bfloat16),
        lambda leaf: jnp.asarray(leaf, jnp.float32),
        np.asarray,
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            jax.tree.map(call, g)


@pytest.mark.parametrize("make", [lambda: make_rows([0, 3, 8]), make_terms])
def test_a_row_gradient_is_passed_whole(make):
    g = make()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), g)
    through = [
        jax.jit(lambda g: g)(g),
        jax.jit(lambda g: g, donate_argnums=0)(jax.tree.map(jnp.copy, g)),
        jax.lax.scan(lambda g, _: (g, None), g, length=2)[0],
        jax.lax.cond(True, lambda: g, lambda: jax.tree.map(jnp.copy, g)),
        jax.tree.map(lambda a, b: jnp.where(True, a, b), g, jax.tree.map(jnp.copy, g)),
        jax.tree.map(lambda leaf: leaf[1], jax.vmap(lambda g: g)(stacked)),
        jax.tree.map(
            lambda leaf: leaf[0], jax.lax.scan(lambda c, g: (c, g), 0, stacked)[1]
        ),
        jax.shard_map(lambda g: g, mesh=_MESH, in_specs=jax.P(), out_specs=jax.P())(g),
        jax.device_put(g, jax.NamedSharding(_MESH, jax.P())),
        copy.deepcopy(g),
        pickle.loads(pickle.dumps(g)),
    ]
    for got in through:
        assert type(got) is type(g)
        check_form(got)
        np.testing.assert_array_equal(got.ids, g.ids)
        np.testing.assert_array_equal(got.todense(), g.todense())
    added: Any = optax.apply_updates({"kernel": jnp.ones((9, 3))}, {"kernel": g})
    np.testing.assert_array_equal(added["kernel"], 1 + g.todense())


def test_terms_are_summed_by_arithmetic():
    terms, others = make_terms(), make_terms(seed=5)
    sums = terms.summed()
    assert type(sums) is RowSums and sums.summed() is sums
    check_form(sums)
    assert (sums.shape, sums.dtype) == (terms.shape, terms.dtype) == ((9, 3), "float32")
    x = terms.terms
    expected = np.zeros((9, 3))
    entries = np.asarray(x.data)[:, None] * np.asarray(x.dy)[x.by_column.rows]
    np.add.at(expected, np.asarray(x.by_column.columns), entries)
    total = expected + np.asarray(others.todense())
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), terms, others)
    for got, want in [
        (terms.todense(), expected),
        ((terms + others).todense(), total),
        (row_gradient.accumulate(stacked).todense(), total),
        ((2 * terms - terms / 2).todense(), 1.5 * expected),
        (terms + np.ones((9, 3), np.float32), 1 + expected),
        (row_gradient.global_norm(terms), np.linalg.norm(expected)),
        (
            row_gradient.clip_by_global_norm(terms, 0.5).todense(),
            expected * 0.5 / np.linalg.norm(expected),
        ),
    ]:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_flattening_adds_no_terms():
    terms = make_terms().terms

    def leaves(dy):
        return jax.tree.leaves(RowTerms(terms._replace(dy=dy)))

    program = jax.make_jaxpr(leaves)(terms.dy).jaxpr
    assert program.outvars[-1] is program.invars[0]  # dy itself
    assert {e.primitive.name for e in program.eqns} <= {
        "bitcast_convert_type",
        "broadcast_in_dim",
        "random_wrap",
    }


def test_gradients_of_micro_batches_are_accumulated():
    layer = SparseLinear(20, 3, rngs=nnx.Rngs(0))
    parts = [random_csr(6, 20, seed=s, extra=4) for s in range(3)]
    nse = max(x.nse for x in parts)
    parts = [x.take(jnp.arange(6), nse=nse) for x in parts]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    graphdef, state = nnx.split(layer)

    @jax.jit
    def run(state, stacked):
        def one(_, x):
            model = nnx.merge(graphdef, state, copy=True)
            return None, value_and_grad(linear_loss)(model, x)[1]

        return row_gradient.accumulate(jax.lax.scan(one, None, stacked)[1])

    got = run(state, stacked)
    dense_gradient = dense_of(linear_loss)
    each = [dense_gradient(layer, x)[1] for x in parts]
    expected = jax.tree.map(lambda *g: functools.reduce(operator.add, g), *each)
    check_form(got["kernel"][...])
    assert_same(got, expected)


def test_norm_and_clipping_are_those_of_the_dense_gradient(batch):
    grads = rows_of(mean_loss)(Net(tied=True), *batch)[1]
    norm = row_gradient.global_norm(grads)
    np.testing.assert_allclose(norm, optax.tree.norm(dense(grads)), rtol=1e-6)
    for bound in (0.5 * norm, 2 * norm):
        clip = optax.clip_by_global_norm(bound)
        expected = clip.update(dense(grads), clip.init(dense(grads)))[0]
        assert_same(row_gradient.clip_by_global_norm(grads, bound), expected)


@pytest.mark.parametrize("features", [20_000, 200_000])
def test_memory_is_that_of_the_touched_rows(features):
    layer = nnx.eval_shape(lambda: SparseLinear(features, 64, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(layer)
    x = random_csr(16, 300, 0.1)
    x = CSR(None, x.indices, x.indptr, num_cols=features)

    def loss_and_rows(state, x):
        value, grads = value_and_grad(linear_loss)(nnx.merge(graphdef, state), x)
        return value, grads["kernel"][...].values

    compiled = jax.jit(loss_and_rows).lower(state, x).compile()
    touched = x.nse * 64 * 4
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * touched + 2**16
