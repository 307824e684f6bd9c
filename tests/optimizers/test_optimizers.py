"""Row-sparse optimizers compared with dense optimizers of optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparsejax import optimizers
from sparsejax.mesh.layout import make_mesh
from sparsejax.nn.layers import SparseLinear
from sparsejax.optimizers import gradients, row_gradient
from sparsejax.optimizers import optimizer as optimizer_module
from sparsejax.optimizers.gradients import RowParam
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.row_gradient import RowGradient, RowSums
from sparsejax.sparse import CSR

FEATURES, HIDDEN, BATCH = 1000, 4, 8


def cosine(rate):
    return optimizers.schedule(
        "cosine_decay_schedule", init_value=rate, decay_steps=300
    )


RULES = [
    optimizers.sgd(0.1),
    optimizers.sgd(cosine(0.05), weight_decay=0.1),
    optimizers.momentum(0.02, weight_decay=0.1),
    optimizers.nesterov(cosine(0.05)),
    optimizers.adagrad(0.1),
    optimizers.rowwise_adagrad(0.1),
    optimizers.rmsprop(0.01),
    optimizers.adadelta(1.0, eps=1e-4),
    optimizers.ftrl(0.5, l1=1e-3, l2=0.1),
    optimizers.adam(0.01),
    optimizers.adamw(cosine(0.01), weight_decay=0.1),
    optimizers.adamax(cosine(0.01)),
]


class Net(nnx.Module):
    """A model with two features that share a kernel, and ordinary parameters."""

    def __init__(self, features=FEATURES, hidden=HIDDEN):
        make = functools.partial(SparseLinear, features, hidden, rngs=nnx.Rngs(0))
        self.first = make()
        self.second = make(kernel=self.first.kernel)
        self.out = nnx.Linear(hidden, 3, rngs=nnx.Rngs(1))

    def __call__(self, x, x2):
        return self.out(nnx.tanh(self.first(x) + self.second(x2)))


def loss_fn(model, x, x2, labels):
    return jnp.mean((model(x, x2) - labels) ** 2)


def random_ids(seed, nse, features=FEATURES):
    """`[nse]` skewed ids: a few are in every batch, most are rare."""
    u = np.random.default_rng(seed).random(nse)
    return (features * u**4).astype(np.int32)


def matrix(ids, seed=0):
    """Eight rows with these ids, an empty one, and padding."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(ids), BATCH - 2))
    indptr = np.r_[0, cuts, cuts[-1], len(ids)].astype(np.int32)
    padding = np.full(3, -7, np.int32)
    indices = jnp.asarray(np.r_[ids, padding])
    return CSR(None, indices, jnp.asarray(indptr), num_cols=FEATURES)


def stack(batches):
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *batches)


def make_batches(steps, nse=9):
    """Batches with a leading step axis."""
    seeds = np.random.SeedSequence(5).generate_state(2 * steps)
    x, x2 = (
        stack([matrix(random_ids(s, nse), s) for s in part])
        for part in (seeds[:steps], seeds[steps:])
    )
    labels = jax.random.normal(jax.random.key(1), (steps, BATCH, 3))
    return x, x2, labels


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def run_steps(graphdef, step, state, batches):
    def body(state, batch):
        modules = nnx.merge(graphdef, state, copy=True)
        loss = step(*modules, *batch)
        return nnx.state(modules), loss

    return jax.lax.scan(body, state, batches)


def train(modules, step, batches):
    """Runs many steps in one program, which donates the state."""
    graphdef, state = nnx.split(modules)
    state, losses = run_steps(graphdef, step, state, batches)
    nnx.update(modules, state)
    return losses


def row_step(model, optimizer, *batch, loss_fn=loss_fn, **options):
    loss, grads = optimizer.value_and_grad(loss_fn, **options)(model, *batch)
    optimizer.update(model, grads)
    return loss


def dense_step(model, optimizer, *batch, loss_fn=loss_fn):
    loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
    optimizer.update(model, grads)
    return loss


def make(rule, model=None):
    model = Net() if model is None else model
    return model, Optimizer(model, rule)


def make_twin(rule):
    model = Net()
    return model, nnx.Optimizer(model, rule.dense(), wrt=nnx.Param)


def kernel(model):
    return np.asarray(model.first.kernel[...])


# Gradients of about 0.1 are rounded differently from the twin's, by some 1e-8. Where one
# is near zero, rmsprop and adam multiply that by up to 100 (learning_rate / sqrt(eps)).
CLOSE = {"rtol": 1e-6, "atol": 5e-6}


# Without state, with state that does not move a row, and with what moves rows later: decay,
# velocity, both. `test_rules` has the arithmetic of all.
@pytest.mark.parametrize(
    "rule", [RULES[i] for i in (0, 1, 3, 5, 6, 8, 10)], ids=lambda rule: rule.name
)
def test_equals_its_dense_twin(rule):
    (model, optimizer), twin = make(rule), make_twin(rule)
    batches = make_batches(200)
    losses = train((model, optimizer), row_step, batches)
    expected = train(twin, dense_step, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    stale = np.abs(kernel(model) - kernel(twin[0])).max()
    optimizer.flush(model)
    moved = np.abs(kernel(model) - kernel(Net())).max()
    assert moved > 0.05, "the test would see nothing"
    assert (stale > 1e-3) == rule.drifts
    np.testing.assert_allclose(kernel(model), kernel(twin[0]), **CLOSE)
    np.testing.assert_allclose(model.out.kernel, twin[0].out.kernel, **CLOSE)
    assert int(optimizer.step[...]) == 200
    assert not kernel(model)[FEATURES:].any()
    for array in optimizer.rows["first/kernel"].values():
        assert array.dtype in (jnp.float32, jnp.int32)


@pytest.mark.parametrize("rule", RULES[-3:], ids=lambda rule: rule.name)
def test_rows_that_were_idle_for_long(rule):
    often, once = np.arange(6), np.arange(6, 30)
    full, few = (matrix(np.r_[ids, often]) for ids in (once, np.resize(often, 24)))
    x = stack([full, *[few] * 330, full])
    labels = jax.random.normal(jax.random.key(1), (332, BATCH, 3))
    (model, optimizer), twin = make(rule), make_twin(rule)
    losses = train((model, optimizer), row_step, (x, x, labels))
    expected = train(twin, dense_step, (x, x, labels))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    last = np.asarray(optimizer.rows["first/kernel"]["last_step"][...])
    # Decay moves a row from the start on, others from the first touch.
    assert set(last) == {0 if rule.weight_decay else -1, 332}
    optimizer.flush(model)
    np.testing.assert_allclose(kernel(model), kernel(twin[0]), **CLOSE)


@pytest.mark.parametrize("rule", [RULES[6], RULES[-1]], ids=lambda rule: rule.name)
def test_dense_gradients_and_large_batches(rule):
    """A kernel is updated by rows and as a whole in turn, as a batch's size has it."""

    def penalised(model, *batch):
        return loss_fn(model, *batch) + 1e-3 * jnp.sum(model.first.kernel[...] ** 2)

    def mixed(loss_fns, first, second):
        def run(model, optimizer, small, large):
            return first(model, optimizer, *small), second(model, optimizer, *large)

        return run

    (model, optimizer), twin = make(rule), make_twin(rule)
    batches = make_batches(20), make_batches(20, nse=200)
    assert optimizer_module.updates_whole(1024, 2 * 200)
    allowed = functools.partial(row_step, loss_fn=penalised, dense="allow")

    def rows(model, optimizer, small, large):
        each = row_step(model, optimizer, *small), row_step(model, optimizer, *large)
        return *each, allowed(model, optimizer, *small)

    def dense(model, optimizer, small, large):
        each = [dense_step(model, optimizer, *b) for b in (small, large)]
        last = dense_step(model, optimizer, *small, loss_fn=penalised)
        return *each, last

    losses = train((model, optimizer), rows, batches)
    expected = train(twin, dense, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    optimizer.flush(model)
    np.testing.assert_allclose(kernel(model), kernel(twin[0]), **CLOSE)


def test_whole_kernels_use_the_tables_that_were_made_ahead(monkeypatch):
    """Then no step has the repetition of old steps, which takes long to compile."""
    rule, repeated = optimizers.adamw(cosine(0.1), weight_decay=0.1), []
    catch_up = type(rule).catch_up

    def noted(self, *args):
        repeated.append(args)
        return catch_up(self, *args)

    monkeypatch.setattr(type(rule), "catch_up", noted)
    batch = jax.tree.map(lambda leaf: leaf[0], make_batches(1, nse=200))

    def steps(model, optimizer):
        with optimizer.ahead(model, 2):
            row_step(model, optimizer, *batch)
            row_step(model, optimizer, *batch)

    nnx.eval_shape(steps, *make(rule))
    assert len(repeated) == 2  # before the first step, for each of two platforms
    repeated.clear()
    nnx.eval_shape(row_step, *make(rule), *batch)
    assert len(repeated) == 2


def test_a_whole_kernel_has_a_dense_gradient_only_if_its_rows_drift():
    batch = jax.tree.map(lambda leaf: leaf[0], make_batches(1, nse=200))

    def gradients_of(model, optimizer):
        return optimizer.value_and_grad(loss_fn)(model, *batch)[1]

    for rule in (RULES[0], RULES[1], RULES[6], RULES[-1]):
        grads = nnx.eval_shape(gradients_of, *make(rule))
        is_rows = isinstance(grads["first"]["kernel"].get_value(), RowGradient)
        assert is_rows != rule.drifts


def test_reading_equals_flushing():
    model, optimizer = make(optimizers.adam(0.01))
    batches = make_batches(6)
    for _ in range(5):
        train((model, optimizer), row_step, batches)
    x, x2, _ = jax.tree.map(lambda leaf: leaf[4], batches)

    @nnx.jit
    def evaluate(model, optimizer):
        with optimizer.reading(model):
            return model(x, x2)

    forward = nnx.jit(Net.__call__)
    before = jax.tree.leaves(jax.tree.map(np.array, nnx.state((model, optimizer))))
    scores, stale = evaluate(model, optimizer), forward(model, x, x2)
    after = jax.tree.leaves(nnx.state((model, optimizer)))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    optimizer.flush(model)
    current = forward(model, x, x2)
    np.testing.assert_allclose(scores, current, rtol=1e-5, atol=1e-7)
    again = evaluate(model, optimizer)
    np.testing.assert_allclose(again, current, rtol=1e-5, atol=1e-7)
    assert np.abs(stale - current).max() > 1e-4


def test_reading_around_a_compiled_function_is_an_error():
    model, optimizer = make(optimizers.adam(0.01))
    x, x2, _ = jax.tree.map(lambda leaf: leaf[0], make_batches(1))
    forward = nnx.jit(Net.__call__)
    forward(model, x, x2)  # there is a trace that reads rows as they are
    unknown = pytest.raises(ValueError, match=r"within `reading`.* not the model's")
    with unknown, optimizer.reading(model):
        forward(model, x, x2)
    with Optimizer(model, optimizers.sgd(0.1)).reading(model):
        forward(model, x, x2)


def test_a_copy_within_the_loss_is_an_error():
    model, optimizer = make(optimizers.adam(0.01))
    teacher = Net()
    x, x2, _ = jax.tree.map(lambda leaf: leaf[0], make_batches(1))

    def distilled(model, teacher):
        old = jax.lax.stop_gradient(nnx.clone(model)(x, x2))
        return loss_fn(model, x, x2, old + teacher(x, x2))

    with pytest.raises(ValueError, match=r"within the loss .* not the model's"):
        optimizer.value_and_grad(distilled)(model, teacher)

    def taught(model, teacher):
        return loss_fn(model, x, x2, teacher(x, x2))

    def gradients_of(model, optimizer, teacher):
        return optimizer.value_and_grad(taught)(model, teacher)[1]

    grads = nnx.eval_shape(gradients_of, model, optimizer, teacher)
    assert isinstance(grads["first"]["kernel"].get_value(), RowGradient)


def test_clipped_and_accumulated_gradients():
    rule = optimizers.adam(0.01)
    clip = optax.clip_by_global_norm(0.1)
    (model, optimizer), twin_model = make(rule), Net()
    twin = nnx.Optimizer(twin_model, optax.chain(clip, rule.dense()), wrt=nnx.Param)
    batches = make_batches(40)
    halves = jax.tree.map(lambda leaf: leaf.reshape(20, 2, *leaf.shape[1:]), batches)

    def rows(model, optimizer, *micro):
        graphdef, state = nnx.split((model, optimizer))

        def one(_, batch):
            model, optimizer = nnx.merge(graphdef, state, copy=True)
            return None, optimizer.value_and_grad(loss_fn)(model, *batch)[1]

        grads = row_gradient.accumulate(jax.lax.scan(one, None, micro)[1])
        optimizer.update(model, row_gradient.clip_by_global_norm(grads, 0.1))

    def dense(model, optimizer, *micro):
        def total(model):
            parts = [jax.tree.map(lambda leaf, i=i: leaf[i], micro) for i in range(2)]
            return sum(loss_fn(model, *part) for part in parts)

        optimizer.update(model, nnx.grad(total)(model))

    train((model, optimizer), rows, halves)
    train((twin_model, twin), dense, halves)
    optimizer.flush(model)
    np.testing.assert_allclose(kernel(model), kernel(twin_model), **CLOSE)


@pytest.mark.parametrize("own", [optimizers.ftrl(0.5), optimizers.adam(0.01)])
def test_a_rule_of_its_own_and_another_for_ordinary_parameters(own):
    """Against optax, with a transformation for each part. One of the rules drifts."""

    class Two(nnx.Module):
        def __init__(self):
            make = functools.partial(SparseLinear, FEATURES, HIDDEN, rngs=nnx.Rngs(0))
            self.first, self.second = make(use_bias=False), make(use_bias=False)
            self.first.kernel = RowParam(self.first.kernel[...], rule=own)
            self.out = nnx.Linear(HIDDEN, 3, rngs=nnx.Rngs(1))

        def __call__(self, x, x2):
            return self.out(nnx.tanh(self.first(x) + self.second(x2)))

    model, twin_model = Two(), Two()
    rule, dense = optimizers.rowwise_adagrad(0.1), optax.adamw(0.02, weight_decay=0.1)
    optimizer = Optimizer(model, rule, dense=dense)
    kernels: list[Any] = [model.first.kernel, model.second.kernel]
    assert [optimizer.rule_of(kernel) for kernel in kernels] == [own, rule]
    parts: Any = {"first": own.dense(), "second": rule.dense(), "out": dense}
    labels = {name: name for name in parts}
    split = optax.partition(parts, lambda params: nnx.State(labels))
    twin = nnx.Optimizer(twin_model, split, wrt=nnx.Param)
    batches = make_batches(40)
    losses = train((model, optimizer), row_step, batches)
    expected = train((twin_model, twin), dense_step, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

    @nnx.jit
    def evaluate(model, optimizer, x, x2):
        with optimizer.reading(model):
            return model(x, x2)

    x, x2, _ = jax.tree.map(lambda leaf: leaf[0], batches)
    current = twin_model(x, x2)
    np.testing.assert_allclose(evaluate(model, optimizer, x, x2), current, rtol=1e-4)
    optimizer.flush(model)
    for one, other in (
        (model.first, twin_model.first),
        (model.second, twin_model.second),
    ):
        np.testing.assert_allclose(one.kernel[...], other.kernel[...], **CLOSE)
    np.testing.assert_allclose(model.out.kernel, twin_model.out.kernel, **CLOSE)
    assert ("last_step" in optimizer.rows["first/kernel"]) == own.decays
    with pytest.raises(NotImplementedError, match="with dense=.* leave fused out"):
        optimizer.state_of([("out", "kernel")])


@pytest.mark.usefixtures("symbolic_sizes")  # without checks of annotations
def test_a_rule_is_no_transformation():
    rule: Any = optimizers.adam(0.1)
    with pytest.raises(TypeError, match=r"got the rule adam; .* or adam\(...\).dense"):
        Optimizer(Net(), optimizers.sgd(0.1), dense=rule)


def test_lazy_adam_leaves_untouched_rows_alone():
    """Against NumPy: moments and weights of a row change in its own steps only."""
    rule = optimizers.lazy_adam(0.01)
    model, optimizer = make(rule)
    w = kernel(model).astype(np.float64)
    mu, nu = np.zeros_like(w), np.zeros_like(w)

    @nnx.jit
    def step(model, optimizer, x, slope):
        def loss_fn(model):
            return jnp.sum(slope * model.first(x))

        _, grads = optimizer.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)

    for t in range(1, 8):
        x = matrix(random_ids(t, 9, features=40), t)
        slope = np.random.default_rng(t).normal(size=(BATCH, HIDDEN))
        step(model, optimizer, x, jnp.float32(slope))
        g = x.to_scipy().toarray().T @ slope
        rows = np.unique(np.asarray(x.indices)[: int(x.indptr[-1])])
        mu[rows] = 0.9 * mu[rows] + 0.1 * g[rows]
        nu[rows] = 0.999 * nu[rows] + 0.001 * g[rows] ** 2
        root = np.sqrt(nu[rows] / (1 - 0.999**t)) + 1e-8
        w[rows] -= 0.01 * mu[rows] / (1 - 0.9**t) / root
    optimizer.flush(model)
    np.testing.assert_allclose(kernel(model), w, rtol=1e-4, atol=1e-5)
    assert np.abs(kernel(model) - kernel(Net())).max() > 0.03
    assert "last_step" not in optimizer.rows["first/kernel"]


def test_state_is_complete():
    """A run that is stopped, stored and gone on with ends with the same bits."""
    rule = RULES[-1]
    batches = make_batches(12)
    first, second = (
        jax.tree.map(lambda leaf, h=half: leaf[h], batches)
        for half in (slice(0, 6), slice(6, 12))
    )
    unbroken = make(rule)
    for part in (first, second):
        train(unbroken, row_step, part)
    broken, restored = make(rule), make(rule)
    train(broken, row_step, first)
    assert nnx.graphdef(broken) == nnx.graphdef(restored)
    assert hash(nnx.graphdef(broken)) == hash(nnx.graphdef(restored))
    pure = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(broken)))
    state = nnx.state(restored)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(restored, state)
    train(restored, row_step, second)
    for a, b in zip(
        jax.tree.leaves(nnx.state(unbroken)),
        jax.tree.leaves(nnx.state(restored)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_under_nnx_jit_with_donation():
    model, optimizer = make(optimizers.adam(0.01))
    twin = make(optimizers.adam(0.01))
    step = nnx.jit(row_step, donate_argnums=(0, 1))
    batches = make_batches(6)
    for i in range(6):
        step(model, optimizer, *jax.tree.map(lambda leaf, i=i: leaf[i], batches))
    train(twin, row_step, batches)
    np.testing.assert_allclose(kernel(model), kernel(twin[0]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("rule", "features"),
    [
        (optimizers.adagrad(0.1), 30_000),
        (optimizers.momentum(cosine(0.05), weight_decay=0.1), 30_000),
        (optimizers.adam(0.1), 30_000),
        (optimizers.adam(0.1), 120_000),
    ],
    ids=["adagrad", "momentum", "adam", "adam, large"],
)
def test_updates_are_in_place(rule, features):

    def both():
        model = Net(features, 64)
        return model, Optimizer(model, rule)

    graphdef, state = nnx.split(nnx.eval_shape(both))
    indices, indptr = np.zeros(300, np.int32), np.zeros(9, np.int32)
    x = CSR(None, jnp.asarray(indices), jnp.asarray(indptr), num_cols=features)

    def body(state, _):
        modules = nnx.merge(graphdef, state, copy=True)
        return nnx.state(modules), row_step(*modules, x, x, jnp.ones((8, 3)))

    run = jax.jit(lambda s: jax.lax.scan(body, s, None, length=3), donate_argnums=0)
    memory = run.lower(state).compile().memory_analysis()
    assert memory is not None
    kernel = -(-features // 256) * 256 * 64 * 4
    arrays = 1 + len(rule.init((1, 1)))
    assert memory.alias_size_in_bytes >= arrays * kernel
    touched = 2 * x.nse * 64 * 4
    ranks = 5 * 4 * features  # some [num_rows] integers at most
    assert memory.temp_size_in_bytes < 8 * touched + ranks + 2**17
    assert memory.temp_size_in_bytes < kernel / 2


def test_whole_parameters_wait_for_rows_and_not_for_their_numbers():
    """Those that the mesh divides do not wait."""
    with jax.set_mesh(make_mesh(model=2)):
        by_rows = {"out_sharding": ("model", None)}
        model = nnx.Dict(
            rows=RowParam(jnp.full((4, 3), jnp.nan), **by_rows),
            whole=nnx.Param(jnp.ones(3)),
            divided=nnx.Param(jnp.ones((2, 2)), **by_rows),
        )
        optimizer = Optimizer(model, optimizers.sgd(0.5))

        @nnx.jit
        def step(model, optimizer):
            def loss_fn(model):
                return 3 * (model.whole[...].sum() + model.divided[...].sum())

            optimizer.update(model, optimizer.value_and_grad(loss_fn)(model)[1])

        step(model, optimizer)
        for moved in model.whole[...], model.divided[...]:
            np.testing.assert_array_equal(moved, -0.5)
        assert model.divided[...].addressable_shards[0].data.shape == (1, 2)


def test_errors_of_update():
    model, optimizer = make(optimizers.momentum(0.02, weight_decay=0.1))
    batches = make_batches(6)
    batch = jax.tree.map(lambda leaf: leaf[0], batches)
    rows = nnx.jit(gradients.grad(loss_fn))(model, *batch)
    with pytest.raises(ValueError, match="use optimizer.value_and_grad, not sparsejax"):
        optimizer.update(model, rows)
    with pytest.raises(ValueError, match="no gradient of 'first.kernel'"):
        optimizer.update(model, nnx.State({"out": rows["out"]}))
    other = RowSums(jnp.zeros(0, jnp.int32), jnp.zeros((0, HIDDEN)), 7)
    with pytest.raises(ValueError, match=r"shape \(7, 4\), the kernel \(1024, 4\)"):
        optimizer.update(model, nnx.State({"first": {"kernel": other}}))
    with pytest.raises(ValueError, match="made for another model: it has no state of"):
        Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optimizers.adam(1)).flush(model)

    # Dense gradients are right as long as no row is behind.
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    dense = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    update(model, optimizer, dense)
    assert not np.isnan(kernel(model)).any()
    train((model, optimizer), row_step, batches)
    with pytest.raises(ValueError, match="rows that are not up to date"):
        optimizer.update(model, dense)
    update(model, optimizer, dense)
    assert np.isnan(kernel(model)).any()


def test_paths_whose_parts_have_slashes_are_not_mixed_up():
    model = nnx.Dict()
    model["a/b"] = nnx.Param(jnp.zeros(2))
    model["a"] = nnx.Dict(b=nnx.Param(jnp.zeros(2)))
    model["a~1b"] = nnx.Param(jnp.zeros(2))
    optimizer = optimizers.Optimizer(model, optimizers.adam(1.0))

    def loss(model):
        return jnp.sum(model["a/b"][...] + 2 * model["a"]["b"] - model["a~1b"])

    _, grads = optimizer.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    for parameter, moved in (
        (model["a/b"], -1),
        (model["a"]["b"], -1),
        (model["a~1b"], 1),
    ):
        np.testing.assert_allclose(parameter[...], [moved, moved], rtol=1e-4)
