"""Dispatches: their order, their sizes, and the work of one program."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from checkerboards import PLAIN, build, checkerboard, parameters
from flax import nnx

from sparsejax import optimizers, training
from sparsejax.engine.batching import close_bucket
from sparsejax.engine.train import dispatch
from sparsejax.engine.train.dispatch import epoch_order, evened, step_size
from sparsejax.engine.train.resident import Resident, Roles, home_rows
from sparsejax.mesh.layout import make_mesh
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.verbs.fit import fit
from sparsejax.verbs.recommend import recommend


def order(rows: int, epoch: int, batch_size: int, *, data: int = 1, seed: int = 0):
    """The row numbers of an epoch's batches, `[steps, batch]`."""
    key = jax.random.key(seed)
    drawn = np.asarray(epoch_order(key, epoch, rows, batch_size, data))
    assert drawn.shape[1] == data
    return drawn.reshape(len(drawn), -1)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("batch_size", [50, 64, 192])
def test_an_epoch_is_a_permutation_in_shards(rows, batch_size):
    drawn = order(rows, 0, batch_size)
    assert drawn.shape == (-(-rows // batch_size), batch_size)
    counts = (drawn >= 0).sum(axis=1)
    assert (counts[:-1] == batch_size).all() and counts.sum() == rows
    np.testing.assert_array_equal(np.sort(drawn[drawn >= 0]), np.arange(rows))
    if batch_size % 64:
        # Position p holds a row of shard p % 64.
        flat = drawn[drawn >= 0]
        np.testing.assert_array_equal(flat % 64, np.arange(rows) % 64)
    else:
        each = batch_size // 64
        shard = np.broadcast_to(np.repeat(np.arange(64), each), drawn.shape)
        np.testing.assert_array_equal(drawn[drawn >= 0] % 64, shard[drawn >= 0])
        # Entry e of a shard is trained on in step e // each, whatever the batch size.
        deep = order(rows, 0, 64).T.reshape(64, -1)
        wide = drawn.reshape(len(drawn), 64, each).transpose(1, 0, 2).reshape(64, -1)
        np.testing.assert_array_equal(wide[:, : deep.shape[1]], deep)
    if rows == 1000:
        exists = drawn >= 0
        assert (drawn != order(rows, 1, batch_size))[exists].mean() > 0.8
        assert (drawn != order(rows, 0, batch_size, seed=1))[exists].any()


@pytest.mark.parametrize("data", [1, 8])
@pytest.mark.parametrize("rows", [1, 63, 200])
@pytest.mark.parametrize("batch_size", [50, 64, 192])
def test_without_shuffling_batches_follow_the_data(rows, batch_size, data):
    if batch_size % 64 and data > 1:
        return  # no mesh divides such a batch
    key = jax.random.key(0)
    drawn = epoch_order(key, 5, rows, batch_size, data, shuffle=False)
    for step, batch in enumerate(np.asarray(drawn).reshape(len(drawn), -1)):
        last = min((step + 1) * batch_size, rows)
        assert sorted(batch[batch >= 0]) == list(range(step * batch_size, last))


@pytest.mark.parametrize("data", [2, 8, 64])
def test_a_batch_is_the_same_on_any_mesh_and_its_rows_are_at_home(data):
    expected = order(1000, 3, 128)
    parts = epoch_order(jax.random.key(0), 3, 1000, 128, data)
    local = np.asarray(Resident((), None, 1000).local(parts))
    parts = np.asarray(parts)
    np.testing.assert_array_equal(parts.reshape(len(parts), -1), expected)
    home = home_rows(1000, data)
    np.testing.assert_array_equal(np.sort(home[home >= 0]), np.arange(1000))
    for part in range(data):
        drawn, at = parts[:, part], local[:, part]
        np.testing.assert_array_equal(at < 0, drawn < 0)
        np.testing.assert_array_equal(home[part][at[at >= 0]], drawn[drawn >= 0])


@pytest.mark.parametrize(("rows", "batch_size"), [(1000, 128), (1000, 50), (999, 37)])
def test_batches_are_evened_out(rows, batch_size):
    """Each row once, in its shard, among as many, and in batches of equal loads."""
    drawn = np.random.default_rng(0).lognormal(5, 1, rows)
    lengths = np.minimum(drawn, 1000).astype(np.int32)
    found = []
    for epoch in range(2):
        key = jax.random.key(epoch)
        given = epoch_order(key, epoch, rows, batch_size, 1)
        call = jax.jit(evened, static_argnums=3)
        even = np.asarray(call(given, jnp.asarray(lengths), key, rows))[:, 0]
        given = np.asarray(given)[:, 0]
        np.testing.assert_array_equal(
            np.sort(even, axis=None), np.sort(given, axis=None)
        )
        np.testing.assert_array_equal(even >= 0, given >= 0)
        if batch_size % 64 == 0:
            exists = even >= 0
            np.testing.assert_array_equal(even[exists] % 64, given[exists] % 64)
        loads, before = (np.where(r >= 0, lengths[r], 0).sum(1) for r in (even, given))
        full = rows // batch_size
        spread, was = (np.ptp(each[:full]) / lengths.mean() for each in (loads, before))
        assert spread < 0.15 * was
        # The last batch is smaller, and its rows are like the others.
        if full < len(loads):
            mean = loads[full] / (even[full] >= 0).sum()
            assert abs(mean / lengths.mean() - 1) < 0.15
        found.append({frozenset(pair) for pair in map(tuple, even[:full, :2])})
    assert len(found[0] & found[1]) <= 2  # other rows meet in each epoch


def test_little_of_a_close_capacity_is_unused():
    counts = np.arange(1, 5000)
    rooms = np.array([close_bucket(int(n)) for n in counts])
    assert (rooms >= counts).all() and (
        rooms <= np.maximum(counts * 33 / 32 + 8, 16)
    ).all()
    assert len(set(rooms[counts > 1024])) < 80


def test_sizes_of_a_step():
    assert step_size(512, 1000, 8) == 512
    assert step_size(512, 65, 8) == step_size(512, 65, 1) == 128
    assert step_size(50, 1000, 1) == 50 and step_size(50, 20, 1) == 20
    with pytest.raises(ValueError, match="batch_size=50 must be a multiple of 64"):
        step_size(50, 20, 2)


@pytest.mark.parametrize(("shape", "fused"), [(None, True), ((2, 4), False)])
def test_a_loop_of_ones_own_has_the_bits_of_fit(shape, fused, monkeypatch):
    monkeypatch.setattr(dispatch, "steps_per_dispatch", lambda entries: 2)
    train, heldout = checkerboard(200, 20)
    weights = np.linspace(0, 2, 200)
    options: dict[str, Any] = {"batch_size": 64, "num_epochs": 2, "seed": 3}
    mesh = contextlib.nullcontext()
    if shape is not None:
        mesh = jax.set_mesh(make_mesh(data=shape[0], model=shape[1]))
    with mesh:
        model, optimizer = build(20, corruption=0.3)
        examples = training.place(train, heldout, weights=weights)
        epochs = training.Epochs(examples, **options)
        program = training.Program(model, optimizer, fused=fused)
        losses = []
        for epoch in range(2):
            total = 0.0
            for each in epochs.dispatches(epoch):
                of_steps = np.asarray(program.launch(each), np.float64)
                total += float(np.dot(of_steps, each.examples))
            losses.append(total / epochs.num_rows)
        optimizer.flush(model)
        other = build(20, corruption=0.3)
        history = fit(*other, train, heldout, weights=weights, fused=fused, **options)
    assert losses == [entry["loss"] for entry in history]
    assert parameters(model) == parameters(other[0])


def test_an_epoch_goes_on_where_it_was_left():
    train, _ = checkerboard(100, 20)
    epochs = training.Epochs(training.place(train), batch_size=4, num_epochs=2)
    whole = list(epochs.dispatches(1))
    assert [each.count for each in whole] == [16, 9]
    assert [each.is_last for each in whole] == [False, True]
    (rest,) = epochs.dispatches(1, position=16)
    assert rest.first == 16 and rest.count == 9 and rest.is_last
    np.testing.assert_array_equal(rest.rows, whole[1].rows)
    with pytest.raises(ValueError, match="epoch=2 must be from 0 to 1"):
        next(epochs.dispatches(2))


def test_a_dispatch_knows_the_next_one_of_any_epoch():
    """So that ids are sent to the devices that own their rows before an epoch begins."""
    train, _ = checkerboard(100, 20)
    epochs = training.Epochs(training.place(train), batch_size=4, num_epochs=2)
    first, last = epochs.dispatches(0)
    assert first.after and last.after
    following = first.after()
    assert following and following.rows is last.rows
    assert following.first == last.first == 16
    following = last.after()
    found = list(epochs.dispatches(1))
    assert following
    assert found[0].rows is following.rows and following.first == 0
    expected = training.Epochs(training.place(train), batch_size=4, num_epochs=2)
    np.testing.assert_array_equal(found[0].rows, next(expected.dispatches(1)).rows)
    assert found[-1].after and found[-1].after() is None


def test_even_steps():
    found = [
        dispatch.even_steps(total, 64) for total in (1, 59, 64, 65, 96, 1024, 127, 131)
    ]
    assert found == [1, 59, 64, 13, 48, 64, 64, 44]
    assert dispatch.even_steps(32, 3) == 2 and dispatch.even_steps(31, 3) == 1


@pytest.mark.parametrize("rule", [optimizers.adam(0.1), optimizers.adagrad(0.1)])
@pytest.mark.parametrize(
    ("rows", "most", "position", "steps", "full"),
    [(100, 6, 0, 5, True), (100, 6, 4, 5, False), (116, 17, 0, 15, False)],
)
def test_full_dispatches_train_the_same(
    rule, rows, most, position, steps, full, monkeypatch
):
    """Also what does not fill them: steps too many change nothing."""
    train, _ = checkerboard(rows, 20)

    def trained(fills):
        monkeypatch.setattr(dispatch, "fills_dispatches", lambda: fills)
        monkeypatch.setattr(dispatch, "steps_per_dispatch", lambda entries: most)
        model, optimizer = build(20, corruption=0.3, rule=rule)
        epochs = training.Epochs(training.place(train), batch_size=4, num_epochs=1)
        program = training.Program(model, optimizer)
        found = list(epochs.dispatches(0, position=position))
        losses = np.concatenate([program.launch(each) for each in found])
        return losses, found[0].sizes, nnx.state((model, optimizer))

    losses, sizes, state = trained(True)
    assert (sizes.steps, sizes.full, sizes.padded) == (steps, full, not full)
    expected, sizes, expected_state = trained(False)
    assert sizes.steps == most and not (sizes.full or sizes.padded)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True)
    for a, b in pairs:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


class Settings(nnx.Module):
    """A part of a model with a dict of arrays, which is not a part of the module's graph."""

    def __init__(self):
        self.arrays = nnx.data({"a": nnx.Param(jnp.ones(2))})
        self.names = {"a": 1}


def test_attributes_that_cannot_be_hashed_are_named():
    x, _ = checkerboard(16, 8)
    model, optimizer = build(8)
    model.part = Settings()  # pyrefly: ignore[missing-attribute]
    wrong = "'part.names' of the FeedForward is a dict, which cannot be hashed"
    with pytest.raises(TypeError, match=wrong):
        fit(model, optimizer, x, num_epochs=1)
    with pytest.raises(TypeError, match=wrong):
        recommend(model, x, 2, exclude=None)


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        model, optimizer = build(20)
        with pytest.raises(ValueError, match="needs Auto axes"):
            training.Program(model, optimizer)


@pytest.mark.parametrize("rule", [optimizers.adam(1e-2), optimizers.rmsprop(1e-2)])
def test_entries_sorted_ahead_train_the_same(rule, monkeypatch):
    train, _ = checkerboard(50, 20)

    def trained(ahead):
        monkeypatch.setattr(dispatch, "sorts_ahead", lambda: ahead)
        model, optimizer = build(20, rule=rule, corruption=0.3)
        fit(model, optimizer, train, batch_size=16, num_epochs=3)
        return np.asarray(model.first.kernel[...])

    expected = trained(False)
    np.testing.assert_allclose(trained(True), expected, rtol=1e-4, atol=1e-6)


def test_steps_of_a_dispatch(monkeypatch):
    assert dispatch.steps_per_dispatch(10**9) == 16
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert dispatch.steps_per_dispatch(0) == 64
    assert dispatch.steps_per_dispatch(655_360) == 12
    assert dispatch.steps_per_dispatch(10**9) == 1
    # Inputs of both parts of a batch, and a device's own targets.
    assert dispatch.entries_of_step((100, 16), 2) == 201


def test_one_capacity_for_all_epochs():
    lengths = np.random.default_rng(0).integers(0, 20, 256)
    rows = scipy.sparse.csr_array(np.arange(20) < lengths[:, None])
    epochs = training.Epochs(training.place(rows), batch_size=8, num_epochs=3)
    capacities = [d.sizes.capacities for e in range(3) for d in epochs.dispatches(e)]
    # The largest batches of the three have 120, 152 and 120.
    assert capacities == 6 * [(152,)]


class Counted(FeedForward):
    """A model that counts how often its loss is traced."""

    traces = 0

    def loss(self, *args, **kwargs):
        Counted.traces += 1
        return super().loss(*args, **kwargs)


def test_one_program_serves_all_epochs(monkeypatch):
    monkeypatch.setattr(dispatch, "steps_per_dispatch", lambda entries: 4)
    train, _ = checkerboard(300, 20)
    config = NetworkConfig.autoencoder((16,), **PLAIN)
    model = Counted(config, inputs=20, outputs=20, rngs=nnx.Rngs(0))
    epochs = training.Epochs(training.place(train), batch_size=32, num_epochs=5)
    program = training.Program(model, optimizers.Optimizer(model, optimizers.adam(0.1)))
    counts, traces = [], []
    for epoch in range(5):
        for each in epochs.dispatches(epoch):
            program.launch(each)
            counts.append(each.count)
            traces.append(Counted.traces)
    assert counts == 5 * [4, 4, 2]
    assert traces == 15 * [traces[0]] and traces[0] > 0


def test_says_what_it_takes_for_an_optimizer_and_a_model():
    model, _ = build(8)
    theirs = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    # In the tests annotations are checked before `check_modules` could.
    with pytest.raises(TypeError, match=r"sparsejax.Optimizer, as .*, got flax"):
        dispatch.check_modules(model, theirs)
    with pytest.raises(TypeError, match="Linear has no loss$"):
        Roles().check(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
