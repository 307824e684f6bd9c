"""Optimizer rules alone, compared with NumPy in float64 and with optax."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rule_steps import numpy_step

from sparsejax import optimizers
from sparsejax.optimizers import rules, schedules
from sparsejax.optimizers.rules import missed_steps
from sparsejax.optimizers.rules.missed_steps import Linear
from sparsejax.optimizers.rules.replay import Replay

WARMUP = optimizers.schedule(
    "warmup_cosine_decay_schedule",
    init_value=0.0,
    peak_value=0.02,
    warmup_steps=30,
    decay_steps=1500,
    end_value=1e-3,
)
RULES = [
    optimizers.sgd(0.01),
    optimizers.sgd(0.01, weight_decay=0.1),
    optimizers.momentum(0.01),
    optimizers.momentum(0.01, 0.8, weight_decay=0.1),
    optimizers.nesterov(0.01, 0.95),
    optimizers.nesterov(0.01, weight_decay=0.1),
    optimizers.adagrad(0.01),
    optimizers.rowwise_adagrad(0.01),
    optimizers.ftrl(0.05, 0.5, 0.2, 0.1),
    optimizers.rmsprop(0.01, 0.8),
    optimizers.adadelta(1.0, 0.95, eps=1e-2),
    optimizers.adam(0.01, b1=0.8, b2=0.99, eps=1e-3),
    # Powers of 0.999 would show how it is rounded, here as in optax.
    optimizers.adamw(0.01, b1=0.875, b2=1 - 2**-9, weight_decay=0.1),
    # In some steps u is eps, which shrinks no further.
    optimizers.adamax(0.01, b1=0.8, b2=0.9, eps=0.3),
]
RULES += [
    dataclasses.replace(rule, learning_rate=WARMUP)
    for rule in RULES
    if rule.name != "ftrl"
]


def rule_id(rule):
    decay = "-decay" if rule.weight_decay else ""
    schedule = "-schedule" if callable(rule.learning_rate) else ""
    return rule.name + decay + schedule


every_rule = pytest.mark.parametrize("rule", RULES, ids=rule_id)


def numpy_rate(rule, t):
    """The learning rate of step `t`, from 1."""
    if not callable(rule.learning_rate):
        return rule.learning_rate
    t -= 1
    if t < 30:
        return 0.02 * t / 30
    share = min((t - 30) / (1500 - 30), 1)
    return 1e-3 + (0.02 - 1e-3) * (1 + np.cos(np.pi * share)) / 2


def random_state(rule, w, rng):
    """Random optimizer state, as it may be in the middle of a training."""
    state = {}
    if rule.name == "ftrl":
        n = rng.random(w.shape)
        slope = (rule.beta + np.sqrt(n)) / rule.learning_rate + rule.l2
        return {"z": -w * slope - np.sign(w) * rule.l1, "n": n}
    for name, array in rule.init(w.shape).items():
        values = rng.normal(size=array.shape)
        state[name] = values if name in ("trace", "mu") else values**2 + 0.01
    return state


def float32(tree):
    return jax.tree.map(jnp.float32, tree)


@every_rule
def test_catch_up_is_what_dense_steps_do(rule):
    rng = np.random.default_rng(0)
    lags = np.array([0, 1, 2, 5, 60, 140, 256, 257, 400, 1000])
    count = 1010
    w = rng.normal(size=(len(lags), 3))
    state = random_state(rule, w, rng)
    lag = jnp.asarray(lags)[:, None]
    catch_up = jax.jit(rule.catch_up)
    got, after = catch_up(jnp.float32(w), float32(state), lag, jnp.asarray(count))
    before = w.copy()
    for i, lag in enumerate(lags):
        row = w[i : i + 1], {name: array[i : i + 1] for name, array in state.items()}
        for t in range(count - lag + 1, count + 1):
            row = numpy_step(rule, *row, np.zeros((1, 3)), t, numpy_rate(rule, t))
        w[i] = row[0][0]
        for name, array in row[1].items():
            state[name][i] = array[0]
    np.testing.assert_allclose(got, w, rtol=2e-6, atol=1e-6)
    for name, array in after.items():
        # Where the trace follows the weights it is what is left of larger numbers.
        np.testing.assert_allclose(array, state[name], rtol=1e-4, atol=1e-7)
    assert (np.abs(w - before).max() > 0.05) == rule.drifts
    shrunk = any(
        (np.asarray(after[n])[-1] != float32(state[n])[0]).any() for n in after
    )
    assert rule.decays == (rule.drifts or (shrunk and rule.shrinks_state))


@pytest.mark.parametrize("count", [40, 514, 30_000])
@pytest.mark.parametrize(
    "rule",
    [
        optimizers.adam(WARMUP),
        # Powers of 0.999 would show how it is rounded, here as in optax.
        optimizers.adamw(WARMUP, b1=0.875, b2=1 - 2**-9, weight_decay=0.1),
        optimizers.momentum(WARMUP, weight_decay=0.1),
    ],
    ids=rule_id,
)
def test_the_table_is_what_dense_steps_do(rule, count):
    rng = np.random.default_rng(0)
    lags = np.array([0, 1, 2, 31, 32, 33, 159, 160, rule.table_lags])
    lags = np.minimum(lags, count - 1)
    w = rng.normal(size=(len(lags), 4))
    state = random_state(rule, w, rng)
    if "nu" in state:
        state["nu"] *= [[1e-12, 1e-4, 1, 1e4]]  # a root beside eps, and far from it
        state["mu"] *= np.sqrt(state["nu"])

    @jax.jit
    def caught_up(w, state, count):
        table = rule.lag_table(count, jnp.float32)
        numbers = [column[:, None] for column in table.by_lag[lags].T]
        return rule.catch_up_by_table(w, state, numbers, list(table.shared))

    got, after = caught_up(jnp.float32(w), float32(state), jnp.asarray(count))
    for i, lag in enumerate(lags):
        row = w[i : i + 1], {name: array[i : i + 1] for name, array in state.items()}
        before = row[0].copy()
        for t in range(count - lag + 1, count + 1):
            row = numpy_step(rule, *row, np.zeros((1, 4)), t, numpy_rate(rule, t))
        moved, exact = np.asarray(got[i], np.float64) - before, row[0] - before
        np.testing.assert_allclose(moved, exact, rtol=3e-6, atol=3e-7)
        for name, array in after.items():
            np.testing.assert_allclose(array[i], row[1][name][0], 2e-5, 1e-7)


@every_rule
def test_steps_equal_numpy_and_optax(rule):
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(40, 5, 3)) * (rng.random((40, 5, 1)) < 0.5)
    first = rng.normal(size=(5, 3))
    first[3] = 0
    w = jnp.float32(first)
    state = rule.start(w)
    expected = first, jax.tree.map(np.float64, state)
    dense = rule.dense()
    twin = jnp.float32(first)
    twin_state = dense.init(twin)

    @jax.jit
    def step(w, state, twin, twin_state, g, count):
        w, state = rule.step(w, state, g, rule.numbers(count))
        updates, twin_state = dense.update(g, twin_state, twin)
        return w, state, optax.apply_updates(twin, updates), twin_state

    for i, g in enumerate(gradients):
        count = jnp.asarray(i + 1)
        w, state, twin, twin_state = step(
            w, state, twin, twin_state, jnp.float32(g), count
        )
        expected = numpy_step(rule, *expected, g, i + 1, numpy_rate(rule, i + 1))
    assert np.abs(first - expected[0]).max() > 0.02
    np.testing.assert_allclose(w, twin, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(w, expected[0], rtol=1e-5, atol=3e-6)
    for name, array in state.items():
        np.testing.assert_allclose(array, expected[1][name], rtol=1e-5, atol=1e-6)


def matrix(step):
    return np.array([[1 + step.ww, step.wm], [step.mw, step.mm]], np.float64)


@pytest.mark.parametrize(
    "step",
    [
        Linear(-1e-5, -0.009, 1e-3, 0.9),
        Linear(-1e-3, 0.0, 0.0, 0.0),
        Linear(-0.3, -0.5, 0.6, 0.5),  # complex eigenvalues
    ],
)
def test_missed_steps(step):
    """Constant or changing, they are the product of so many 2 x 2 matrices."""
    lag = jnp.array([0, 1, 2, 3, 255, 256, 257, 511, 513, 3000])
    same = missed_steps.constant(step, lag)
    alike = missed_steps.changing(lambda t: step, lag, jnp.asarray(5000))

    def growing(t):
        share = 1 + t / 5000
        return Linear(step.ww * share, step.wm * share, step.mw, step.mm)

    other = missed_steps.changing(growing, lag, jnp.asarray(5000))
    for i, k in enumerate(lag.tolist()):
        power = np.linalg.matrix_power(matrix(step), k)
        product = np.eye(2)
        for t in range(5001 - k, 5001):
            product = matrix(growing(t)) @ product
        for got, expected in ((same, power), (alike, power), (other, product)):
            one = matrix(Linear(*(np.float64(part[i]) for part in got)))
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)


def test_decay_keeps_the_digits_of_a_long_time():
    """1 - 1e-7 is 1 in float32; a million such steps are not."""
    lag, count = jnp.array([[1_000_000]]), jnp.asarray(1_000_000)
    w = jnp.ones((1, 1))
    for rate in (1e-4, lambda count: 1e-4):
        rule = optimizers.sgd(rate, weight_decay=1e-3)
        got, _ = rule.catch_up(w, {}, lag, count)
        np.testing.assert_allclose(got, np.exp(-0.1), rtol=1e-5)


def test_replay_goes_on_while_it_matters():
    assert Replay(0.9, 0.999, 1e-8).steps == 159
    assert Replay(0.0, 0.999, 1e-8).steps == 0
    for b1, b2 in ((0.9, 0.999), (0.5, 0.9), (0.8, 0.99)):
        replay = Replay(b1, b2, 1e-8)
        k = np.arange(1, 2000)
        for start in (1, 20, 10_000):
            correction = np.sqrt(1 - b2 ** (start + k)) / (1 - b1 ** (start + k))
            moves = (b1 / b2**0.5) ** k * correction
            left = moves[replay.steps :].sum() / moves.sum()
            assert left < 16 * 2**-24, (b1, b2, start)


def test_replay_owes_the_steps_that_count_to_rows_with_a_moment():
    replay = Replay(0.9, 0.999, 1e-8)
    lag = np.array([[0], [7], [158], [159], [160], [2**31 - 1], [9]], np.int32)
    moment = np.array([[0.0, 1e-30]] * 6 + [[0.0, 0.0]], np.float32)
    owed = replay.owed(jnp.asarray(moment), jnp.asarray(lag))
    np.testing.assert_array_equal(owed[:, 0], [0, 7, 158, 159, 159, 159, 0])


def test_rows_of_ordinary_parameters_under_rowwise_adagrad():
    rule = optimizers.rowwise_adagrad(0.1, 0.5, 1e-3)
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "filter": (2, 3, 5), "bias": (3,), "scale": ()}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    g = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    dense = rule.dense()
    updates: Any = dense.update(float32(g), dense.init(params), params)[0]
    for name, axes in (("kernel", 1), ("filter", (1, 2)), ("bias", ()), ("scale", ())):
        total = 0.5 + np.mean(g[name] ** 2, axis=axes, keepdims=True)
        expected = -0.1 * g[name] / (np.sqrt(total) + 1e-3)
        np.testing.assert_allclose(updates[name], expected, rtol=1e-5)


def test_ftrl_keeps_initial_weights_and_makes_others_zero():
    rule = optimizers.ftrl(0.1, l1=0.5)
    w = jnp.float32([[0.3, -0.2, 0, 1e-3]])
    state = rule.start(w)
    for g, expected in ((0.0, w), (1e-6, w)):
        moved, _ = rule.step(w, state, jnp.full_like(w, g), 0.1)
        np.testing.assert_allclose(moved, expected, atol=1e-6)
        assert not moved[0, 2]
    # A weight that the penalty holds at 0 leaves it when its gradients add up to l1.
    w, state = jnp.zeros((1, 1)), rule.init((1, 1))
    found = []
    for _ in range(4):
        w, state = rule.step(w, state, jnp.full((1, 1), 0.2), 0.1)
        found.append(float(w[0, 0]))
    assert found[:2] == [0, 0] and found[2] < 0 and found[3] < found[2]
    with pytest.raises(NotImplementedError, match="not a schedule"):
        optimizers.ftrl(WARMUP)
    with pytest.raises(ValueError, match="beta must be positive"):
        optimizers.ftrl(0.1, 0.0)


def test_a_gradient_too_small_to_square():
    for name in rules.NAMES:
        rule = optimizers.get(name, learning_rate=0.1)
        for g in (0.0, 1e-30):
            gradient = jnp.full((2, 3), g, jnp.float32)
            numbers = rule.numbers(jnp.asarray(1))
            w, state = rule.step(
                jnp.zeros((2, 3)), rule.init((2, 3)), gradient, numbers
            )
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((w, state)))


def test_schedules_are_those_of_optax():
    count = jnp.arange(12)
    options = {
        "constant_schedule": {"value": 0.1},
        "cosine_decay_schedule": {"init_value": 0.1, "decay_steps": 8},
        "cosine_onecycle_schedule": {"transition_steps": 8, "peak_value": 0.1},
        "exponential_decay": {
            "init_value": 0.1,
            "transition_steps": 3,
            "decay_rate": 0.5,
            "staircase": True,
        },
        "linear_onecycle_schedule": {"transition_steps": 8, "peak_value": 0.1},
        "linear_schedule": {
            "init_value": 0.1,
            "end_value": 0.0,
            "transition_steps": 8,
        },
        "polynomial_schedule": {
            "init_value": 0.1,
            "end_value": 0.0,
            "power": 2,
            "transition_steps": 8,
        },
        "warmup_constant_schedule": {
            "init_value": 0.0,
            "peak_value": 0.1,
            "warmup_steps": 3,
        },
        "warmup_cosine_decay_schedule": {
            "init_value": 0.0,
            "peak_value": 0.1,
            "warmup_steps": 3,
            "decay_steps": 8,
        },
        "warmup_exponential_decay_schedule": {
            "init_value": 0.0,
            "peak_value": 0.1,
            "warmup_steps": 3,
            "transition_steps": 2,
            "decay_rate": 0.5,
        },
    }
    assert set(options) == set(schedules.NAMES)
    for name, some in options.items():
        schedule = optimizers.schedule(name, **some)
        theirs = getattr(optax.schedules, name)(**some)
        rule = optimizers.adamw(schedule)
        expected = [theirs(i) for i in range(12)]
        rates = jax.jit(rule.rate)(count[:, None] + 1)
        np.testing.assert_allclose(rates[:, 0], expected, rtol=1e-5, atol=1e-8)
        for i in (0, 5):
            np.testing.assert_allclose(rule.rate(i + 1), expected[i], rtol=1e-5)
        again = optimizers.from_json(json.loads(json.dumps(optimizers.to_json(rule))))
        assert again == rule and hash(again) == hash(rule)


def test_errors_of_schedules():
    for name, options, error, message in (
        ("cosine", {}, ValueError, "unknown schedule 'cosine'; known: constant_"),
        ("linear_schedule", {"rate": 1}, ValueError, "its options are init_value"),
        ("constant_schedule", {"value": "1"}, TypeError, "value must be a number"),
        ("constant_schedule", {"value": float("inf")}, ValueError, "must be finite"),
    ):
        with pytest.raises(error, match=message):
            optimizers.schedule(name, **options)
    with pytest.raises(ValueError, match='expected an object with a "schedule"'):
        optimizers.from_json({"name": "sgd", "learning_rate": {"value": 1}})
    with pytest.raises(TypeError, match="JSON cannot hold; make it with"):
        optimizers.to_json(optimizers.sgd(lambda count: 0.1))
    with pytest.raises(
        TypeError, match="must map the number of steps done to a number"
    ):
        optimizers.sgd(lambda count: jnp.zeros(3))


def test_errors_of_options():
    with pytest.raises(TypeError, match="learning_rate must be a number, got True"):
        optimizers.sgd(True)
    for options, message in (
        ({"learning_rate": -1}, "must be finite and not negative, got -1"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"learning_rate": 1, "b1": 1}, "b1 must be below 1, got 1"),
        ({"learning_rate": 1, "eps": 0}, "eps must be positive, got 0"),
        ({"learning_rate": 1, "b1": 0.999, "b2": 0.99}, r"b1 must be below sqrt\(b2\)"),
        ({"learning_rate": 1, "momentum": 1}, "options learning_rate, .*b1, b2, eps"),
        ({}, "and learning_rate is needed; got none"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizers.get("adam", **options)
    with pytest.raises(ValueError, match="momentum must be below 1"):
        optimizers.momentum(0.1, 1.0)
    with pytest.raises(ValueError, match="known: sgd, momentum, nesterov, adagrad"):
        optimizers.get("magic", learning_rate=1)
    with pytest.raises(ValueError, match='expected an object with a "name"'):
        optimizers.from_json({"learning_rate": 1})


@pytest.mark.parametrize(
    "name",
    [
        "adagrad",
        "rowwise_adagrad",
        "ftrl",
        "rmsprop",
        "adadelta",
        "adam",
        "adamax",
        "lazy_adam",
    ],
)
def test_an_l2_penalty_within_an_adaptive_rule_is_refused(name):
    with pytest.raises(NotImplementedError, match=f"weight_decay of {name} .* adamw"):
        optimizers.get(name, learning_rate=0.1, weight_decay=0.01)


@every_rule
def test_json(rule):
    document = json.loads(json.dumps(optimizers.to_json(rule)))
    again = optimizers.from_json(document)
    assert again == rule and hash(again) == hash(rule)
    assert dataclasses.replace(rule, learning_rate=0.5) != rule


@pytest.mark.usefixtures("symbolic_sizes")  # without checks of annotations
def test_numbers_of_numpy():
    rate: Any = np.float32(1e-3)
    rule = optimizers.adam(rate)
    assert type(rule.learning_rate) is float
    assert optimizers.from_json(optimizers.to_json(rule)) == rule
