"""Properties of all sequence models; HSTU and GRU are compared with their formulas in NumPy."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from memory import temporary_bytes

import sparsejax as sj
from sparsejax.mesh.layout import dealt
from sparsejax.ops import implementations
from sparsejax.sequence.tokens import Dropout, Tokens

ITEMS = 11
HISTORIES = jnp.array([[7, 3, 7, 9, 2], [5, 1, -1, -1, -1], [-1, -1, -1, -1, -1]])
TIMES = jnp.array([[0, 0.5, 40, 9000, 9001], [0, 3e8, 0, 0, 0], [0, 0, 0, 0, 0]])
CONFIGS = {
    "sasrec": sj.SASRecConfig(max_length=5, width=8, dropout=0.3, temperature=0.5),
    "hstu": sj.HSTUConfig(max_length=5, width=8, dropout=0.3),
    "gru": sj.GRUConfig(max_length=5, width=8, dropout=0.3, temperature=0.5),
}


@pytest.fixture(params=CONFIGS)
def model(request) -> sj.sequence.SequenceModel:
    """A model without dropout, whose vectors are long enough for scores to differ."""
    made = sj.sequence.build_sequence_model(
        CONFIGS[request.param], items=ITEMS, rngs=nnx.Rngs(0)
    )
    made.output.kernel[...] *= 20
    made.eval()
    return made


def matrix(layer) -> np.ndarray:
    return np.asarray(layer.kernel[...], np.float64)


def bias(layer) -> np.ndarray:
    return np.asarray(layer.bias[...], np.float64)


def norm(x, layer):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * np.asarray(layer.scale[...]) + np.asarray(layer.bias[...])


def silu(x):
    return x / (1 + np.exp(-x))


def of_items(model, items):
    return np.asarray(model.output.kernel[...], np.float64)[items]


def hstu(
    model: sj.sequence.HSTU, items: np.ndarray, times: np.ndarray | None
) -> np.ndarray:
    """Hidden vectors `[length, width]` of one history without padding."""
    n = len(items)
    x = np.sqrt(8) * of_items(model, items) + np.asarray(model.places[...])[:n]
    for block in model.blocks:
        y, heads = norm(x, block.norm1), []
        u, v, q, k = (
            silu(y @ matrix(layer))
            for layer in (block.gates, block.values, block.queries, block.keys)
        )
        place, time = np.asarray(block.place_bias[...]), np.asarray(block.time_bias)
        for part in np.split(np.arange(8), 2):
            made = np.zeros((n, len(part)))
            for t in range(n):
                for s in range(t + 1):
                    score = q[t, part] @ k[s, part] + place[t - s]
                    if times is not None:
                        apart = max(abs(times[t] - times[s]), 1)
                        score += time[min(int(np.log(apart) / 0.301), 127)]
                    made[t] += silu(score) / 5 * v[s, part]
            heads.append(made)
        gated = u * norm(np.concatenate(heads, 1), block.norm2)
        x = x + gated @ matrix(block.mixed) + bias(block.mixed)
    return norm(x, model.norm)


def gru(model: sj.sequence.GRU, items: np.ndarray, times: None) -> np.ndarray:
    """Hidden vectors `[length, width]` of one history without padding."""
    x = of_items(model, items)
    for block in model.blocks:
        h, states = np.zeros(8), []
        for one in x:
            inputs = one @ matrix(block.inputs) + bias(block.inputs)
            gates = inputs[:16] + h @ matrix(block.gates)
            r, z = np.split(1 / (1 + np.exp(-gates)), 2)
            of_h = h @ matrix(block.new) + bias(block.new)
            h = (1 - z) * np.tanh(inputs[16:] + r * of_h) + z * h
            states.append(h)
        x = np.array(states)
    return x


def all_scores(model, h):
    kernel = of_items(model, np.arange(ITEMS))
    if (temperature := model.config.temperature) is not None:
        h = h / np.linalg.norm(h, axis=1, keepdims=True)
        kernel = kernel / np.linalg.norm(kernel, axis=1, keepdims=True) / temperature
    return h @ kernel.T


@pytest.mark.parametrize(
    ("name", "oracle", "times"),
    [("hstu", hstu, None), ("hstu", hstu, TIMES), ("gru", gru, None)],
)
def test_the_formula(name, oracle, times):
    model: Any = sj.sequence.build_sequence_model(
        CONFIGS[name], items=ITEMS, rngs=nnx.Rngs(0)
    )
    model.output.kernel[...] *= 20
    for block in model.blocks:  # so that biases count
        for _, variable in nnx.iter_graph(block):
            if isinstance(variable, nnx.Param) and variable[...].ndim == 1:
                noise = np.random.default_rng(1).normal(size=variable[...].shape)
                variable[...] += jnp.asarray(noise, jnp.float32)
    model.eval()

    @nnx.jit
    def answers(model, histories, times):
        ranked = model.top_k(histories, 3, times=times)
        last = model.last(histories, times)
        return model(histories, times), model.loss(histories, times), last, *ranked

    found, loss, last, ids, scores = answers(model, HISTORIES, times)
    losses = []
    for r, row in enumerate(np.asarray(HISTORIES)[:2]):
        row = row[row >= 0]
        given = None if times is None else np.asarray(times)[r]
        h = oracle(model, row, given)
        np.testing.assert_allclose(found[r, : len(row)], h, rtol=1e-3, atol=1e-4)
        of_all, targets = all_scores(model, h[:-1]), (np.arange(len(row) - 1), row[1:])
        losses += (np.log(np.exp(of_all).sum(1)) - of_all[targets]).tolist()
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-4)
    wanted = all_scores(model, np.asarray(last, np.float64))
    np.testing.assert_array_equal(ids, np.argsort(-wanted, axis=1)[:, :3])
    np.testing.assert_allclose(scores, -np.sort(-wanted)[:, :3], rtol=1e-3, atol=1e-4)


def test_what_comes_later_changes_nothing(model):
    early = model(HISTORIES, TIMES)[:, :3]
    other = HISTORIES.at[0, 3:].set(jnp.array([1, -1]))
    np.testing.assert_array_equal(model(other, TIMES.at[:, 3:].add(7))[:, :3], early)
    # So padding of any length changes nothing either.
    short = model(HISTORIES[:, :3], TIMES[:, :3])
    np.testing.assert_allclose(short, early, rtol=1e-5, atol=1e-6)
    if model.uses_times:
        # Until it is trained with times.
        np.testing.assert_array_equal(model(HISTORIES), model(HISTORIES, TIMES))
        for block in model.blocks:
            block.time_bias[...] = jnp.arange(128.0)
        assert (model(HISTORIES) != model(HISTORIES, TIMES)).any()
        moved = model(HISTORIES, TIMES + 64)
        np.testing.assert_array_equal(moved, model(HISTORIES, TIMES))


def test_targets_alone_go_to_the_output(model):
    whole = model.loss(HISTORIES, TIMES)
    for size in (5, 7):
        packed = model.loss(HISTORIES, TIMES, max_targets=size)
        np.testing.assert_allclose(packed, whole, rtol=1e-6)
    assert jnp.isnan(model.loss(HISTORIES, TIMES, max_targets=4))
    assert model.loss(HISTORIES[2:], max_targets=4) == 0


def test_gradients(model):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss(params):
        return nnx.merge(graph, params, rest).loss(HISTORIES, TIMES, max_targets=6)

    gradients = jax.grad(loss)(params)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))
    direction, size = jax.tree.map(jnp.sign, gradients), 2e-4

    def moved(sign):
        return loss(jax.tree.map(lambda p, d: p + sign * size * d, params, direction))

    slope = (moved(1) - moved(-1)) / (2 * size)
    wanted = sum(jnp.sum(jnp.abs(g)) for g in jax.tree.leaves(gradients))
    np.testing.assert_allclose(slope, wanted, rtol=0.02)


def test_awkward_histories(model):
    @nnx.jit
    def answers(model, histories):
        _, scores = model.top_k(histories, 2, times=TIMES)
        return model.loss(histories, TIMES), scores

    for unknown in (ITEMS, -2):
        loss, scores = answers(model, HISTORIES.at[1, 0].set(unknown))
        assert jnp.isnan(loss)
        np.testing.assert_array_equal(jnp.isnan(scores).all(1), [False, True, False])
    assert nnx.jit(lambda model: model.loss(HISTORIES[2:]))(model) == 0
    with pytest.raises(ValueError, match=r"have 6 places, but max_length is 5"):
        model(jnp.zeros((1, 6), int))
    with pytest.raises(ValueError, match="histories of two places or more"):
        model.loss(HISTORIES[:, :1])


@pytest.mark.parametrize("name", CONFIGS)
def test_eight_devices_do_what_one_does(name):
    def gradients():
        model = sj.sequence.build_sequence_model(
            CONFIGS[name], items=600, rngs=nnx.Rngs(0)
        )
        model.eval()
        histories = jnp.tile(HISTORIES, (4, 1)) * 53
        histories = jnp.where(histories < 0, -1, histories)
        times = jnp.tile(TIMES, (4, 1))

        @nnx.jit
        def both(model):
            def loss(model):
                packed = model.loss(histories, times, max_targets=30)
                return model.loss(histories) + packed

            return nnx.value_and_grad(loss)(model)

        return model, *both(model)

    _, loss, one = gradients()
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        model, on_mesh, eight = gradients()
        assert len(model.output.kernel[...].sharding.device_set) == 8
    np.testing.assert_allclose(on_mesh, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(eight), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_dropout_does_not_depend_on_room_or_mesh(name):
    def loss(room, mesh=None):
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            model = sj.sequence.build_sequence_model(
                CONFIGS[name], items=ITEMS, rngs=nnx.Rngs(0)
            )
            loss = nnx.jit(lambda model: model.loss(*given, max_targets=room))
            return float(loss(model)), float(loss(model))

    given = [jnp.tile(x, (4, 1)) for x in (HISTORIES, TIMES)]
    first, second = loss(20)
    assert first != pytest.approx(second, rel=1e-3)
    np.testing.assert_allclose(loss(300), [first, second], rtol=1e-5)
    on_mesh = loss(24, sj.make_mesh(data=4, model=2))
    np.testing.assert_allclose(on_mesh, [first, second], rtol=1e-5)
    # Each part of a mesh has its share of the room.
    assert np.isnan(loss(16, sj.make_mesh(data=4, model=2))).all()


@pytest.mark.parametrize("rate", [0.3, 0.999, 1e-7])
def test_dropout_keeps_numbers_as_they_are_on_average(rate):
    tokens = Tokens.spread(jnp.zeros((400, 100), jnp.int32))
    ones = jnp.ones((40_000, 7))

    def dropped(x):
        return Dropout(rate, rngs=nnx.Rngs(0))(x, tokens)

    @jax.jit
    def both(x):
        found, pull = jax.vjp(dropped, x)
        return found, pull(x)[0]

    found, pulled = both(ones)
    keep = round((1 - rate) * 2**16) / 2**16  # what 16 bits can tell apart
    kept = np.asarray(found) > 0
    np.testing.assert_allclose(found, np.where(kept, 1 / keep, 0), rtol=1e-6)
    np.testing.assert_allclose(pulled, found)
    # Neither a number nor a pair of them, from one word or two, is kept more often.
    for many, wanted in [(kept, keep), (kept[:, 1:] & kept[:, :-1], keep**2)]:
        off = 5 * np.sqrt(wanted * (1 - wanted) / len(many))
        np.testing.assert_allclose(many.mean(axis=0), wanted, atol=off)


def test_parts_of_a_mesh_have_as_many_places():
    lengths = np.arange(64) // 11  # all long ones are of the last part
    shown = jnp.asarray(np.where(np.arange(6) <= lengths[:, None], 3, -1))
    room = int(lengths.sum())

    def loss():
        config = dataclasses.replace(CONFIGS["sasrec"], dropout=0.0)
        model = sj.sequence.build_sequence_model(config, items=ITEMS, rngs=nnx.Rngs(0))
        loss = nnx.jit(
            lambda model, places: model.loss(shown, max_targets=places),
            static_argnums=1,
        )
        # Places for which a part has no room make it NaN.
        return [float(loss(model, places)) for places in (room + 8, room - 9)]

    one, too_few = loss()
    assert np.isnan(too_few)
    with jax.set_mesh(sj.make_mesh(data=4, model=2)):
        on_mesh, too_few = loss()
    assert np.isnan(too_few)
    assert on_mesh == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(("count", "parts"), [(4, 4), (12, 3), (64, 2), (8, 1)])
def test_loads_are_dealt_evenly(count, parts):
    loads = np.random.default_rng(count).integers(0, 50, count)
    found = np.asarray(dealt(jnp.asarray(loads), parts))
    assert found.shape == (parts, count // parts)
    np.testing.assert_array_equal(np.sort(found.ravel()), np.arange(count))
    sums = loads[found].sum(axis=1)
    assert sums.max() - sums.min() <= loads.max()


@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_long_histories_take_no_memory_for_pairs(name):
    def bytes_of(length):
        config = dataclasses.replace(CONFIGS[name], max_length=length, dropout=0.0)
        model = sj.sequence.build_sequence_model(config, items=ITEMS, rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        histories = jnp.zeros((1, length + 1), int)

        def loss(params):
            made = nnx.merge(graph, params, rest, copy=True)
            return made.loss(histories, 0.0 * histories, max_targets=length)

        return temporary_bytes(jax.grad(loss), params)

    few, many = bytes_of(1024), bytes_of(4096)
    assert many < 6 * few


def test_times_that_go_back():
    model: Any = sj.sequence.build_sequence_model(
        CONFIGS["hstu"], items=ITEMS, rngs=nnx.Rngs(0)
    )
    model.eval()
    for block in model.blocks:
        block.time_bias[...] = jnp.sin(jnp.arange(128.0))
    back = TIMES.at[0, 2].set(-7)
    same = TIMES.at[0, 2].set(0.5)
    np.testing.assert_array_equal(model(HISTORIES, back), model(HISTORIES, same))
    broken = model(HISTORIES, TIMES.at[0, 2].set(jnp.nan))
    assert jnp.isnan(broken[0]).all() and jnp.isfinite(broken[1:]).all()


def test_a_long_max_length_does_not_weaken_short_histories():
    found = []
    for length, divisor in ((5, None), (5, 5), (16384, 5.0), (16384, None)):
        config = sj.HSTUConfig(max_length=length, width=8, divisor=divisor)
        model: Any = sj.sequence.HSTU(config, items=ITEMS, rngs=nnx.Rngs(0))
        model.eval()
        for block in model.blocks:  # the random ones differ with their number
            block.place_bias[...] = jnp.sin(jnp.arange(length))
            for layer in (block.values, block.queries, block.keys, block.gates):
                layer.kernel[...] = jnp.sin(jnp.arange(64.0)).reshape(8, 8)
            block.mixed.kernel[...] = jnp.cos(jnp.arange(64.0)).reshape(8, 8)
        model.places[...] = jnp.zeros((length, 8))
        kernel = model.output.kernel[...]
        vectors = 0.01 * jnp.cos(jnp.arange(float(kernel.size)))
        model.output.kernel[...] = vectors.reshape(kernel.shape)
        found.append(np.asarray(model(HISTORIES, TIMES)[:2]))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5, atol=1e-6)
    assert np.abs(found[3] - found[0]).max() > 1e-3


@pytest.mark.parametrize("config", [sj.HSTUConfig(), sj.SASRecConfig()])
def test_the_dtype_that_suits_a_device(config, monkeypatch):
    lengths = np.array([9])
    assert config.suited_to_lengths(lengths) == config
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)
    assert config.suited_to_lengths(lengths).dtype == "bfloat16"
    given = dataclasses.replace(config, dtype="float32")
    assert given.suited_to_lengths(lengths) == given
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 8.0)
    assert config.suited_to_lengths(lengths) == config


@pytest.mark.usefixtures("wrong_types")
def test_the_divisor_of_a_configuration():
    old = sj.sequence.SequenceConfig.from_json(
        {"version": 1, "model": "hstu", "max_length": 200}
    )
    assert isinstance(old, sj.HSTUConfig) and old.divisor is None
    assert sj.HSTUConfig().suited_to_lengths(np.array([9])).divisor is None
    assert sj.HSTUConfig().suited_to_lengths(np.array([80])).divisor == 50
    given = sj.HSTUConfig(divisor=7.0).suited_to_lengths(np.array([80]))
    assert given.divisor == 7 and given.max_length == 100
    with pytest.raises(ValueError, match="divisor must be positive, got 0"):
        sj.HSTUConfig(divisor=0)
    with pytest.raises(TypeError, match="divisor must be a number, got '5'"):
        sj.HSTUConfig(divisor="5")  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_bfloat16(name):
    losses: list[float] = []
    config: Any = CONFIGS[name]
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(config, dtype=dtype)
        model = sj.sequence.build_sequence_model(config, items=ITEMS, rngs=nnx.Rngs(0))
        model.output.kernel[...] *= 20
        model.eval()
        assert model(HISTORIES, TIMES).dtype == jnp.float32
        loss, gradients = nnx.value_and_grad(
            lambda model: model.loss(HISTORIES, TIMES, max_targets=8)
        )(model)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(gradients))
        losses.append(float(loss))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    with pytest.raises(ValueError, match='dtype is "float32" or "bfloat16", got'):
        dataclasses.replace(config, dtype="float16")


def test_a_step_lowers_for_cuda():
    config = dataclasses.replace(CONFIGS["hstu"], width=64)
    model = sj.sequence.build_sequence_model(config, items=600, rngs=nnx.Rngs(0))
    model.output.implementation = "mosaic_gpu"
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        made = nnx.merge(graph, params, rest, copy=True)
        return made.loss(HISTORIES, TIMES, max_targets=8)

    traced = jax.jit(jax.grad(loss)).trace(params)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_as_json(name):
    config = CONFIGS[name]
    derived: Any = type("Derived", (type(config),), {})  # it has no name of its own
    assert sj.sequence.SequenceConfig.from_json(config.to_json()) == config
    assert type(derived.from_json(config.to_json())) is derived
    made = sj.sequence.build_sequence_model(config, items=3, rngs=nnx.Rngs(0))
    assert type(made).__name__.lower() == name


def test_a_configuration_of_no_model():
    with pytest.raises(TypeError, match="HSTUConfig or GRUConfig, got SequenceConfig"):
        sj.sequence.build_sequence_model(
            sj.sequence.SequenceConfig(), items=3, rngs=nnx.Rngs(0)
        )
    with pytest.raises(ValueError, match="not one of sasrec, hstu, gru"):
        sj.sequence.SequenceConfig.from_json({"version": 1, "model": "rnn"})
