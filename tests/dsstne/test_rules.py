"""DSSTNE's update rules compared with its formulas in float64."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsejax.dsstne import rules

# After two steps from w = 1 with a slope of .5; alpha .1, lambda .01, mu .9, mu1 .999.
WORKED = [
    (rules.SGD(0.1, weight_decay=0.01), 0.8980510),
    (rules.Momentum(0.1, 0.9, weight_decay=0.01), 0.8521510),
    (rules.Nesterov(0.1, 0.9, weight_decay=0.01), 0.7650741),
    (rules.AdaGrad(0.1, weight_decay=0.01), 0.8293587),
    (rules.RMSProp(0.1, 0.9, weight_decay=0.01), 0.4550336),
    (rules.AdaDelta(0.9, weight_decay=0.01), 0.9998275),
    (rules.Adam(0.1, 0.9, 0.999, weight_decay=0.01), 0.8397434),
]
worked = pytest.mark.parametrize(("rule", "end"), WORKED, ids=lambda x: str(x)[:8])

ROW_SPARSE = [
    *(rule for rule, _ in WORKED[:3]),
    *(dataclasses.replace(rule, weight_decay=0.0) for rule, _ in WORKED),
    rules.Nesterov(rules.Decay(0.1, 0.3), 0.8, weight_decay=0.05),
    rules.Adam(rules.Decay(0.1, 0.3), 0.5, 0.9),
]


@pytest.mark.parametrize(
    ("rule", "arrays", "of_rows"),
    [
        (rules.SGD(0.1), 2, 1),
        (rules.SGD(0.1, l1=0.1), 2, 2),
        (rules.Momentum(0.1, 0.9), 3, 2),
        (rules.AdaDelta(0.9), 4, 3),
        (rules.Adam(0.1, 0.9, 0.999), 4, 3),
        (rules.Adam(0.1, 0.9, 0.5), 4, 4),
    ],
)
def test_the_memory_of_weights_gradient_and_state(rule, arrays, of_rows):
    assert len(rule.init((2, 3))) == arrays - 2
    assert rule.memory((20, 30), rows_only=False) == arrays * 4 * 600
    assert rule.memory((20, 30), rows_only=True) == of_rows * 4 * 600


@worked
def test_worked_values_by_rows_and_dense(rule, end):
    g = jnp.full((2, 3), 0.5)
    w, state = jnp.ones((2, 3)), rule.init((2, 3))
    for t in (1, 2):
        w, state = rule.step(w, state, g, rule.numbers(t))
    np.testing.assert_allclose(w, end, atol=2e-7)

    params: Any = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    slopes = {"w": g, "b": g[0]}
    dense = rule.dense()
    kept = dense.init(params)
    for _ in range(2):
        updates, kept = dense.update(slopes, kept, params)
        params = cast(Any, optax.apply_updates(params, updates))
    np.testing.assert_allclose(params["w"], end, atol=2e-7)

    # A bias has no penalty.
    plain = dataclasses.replace(rule, weight_decay=0.0)
    b, state = jnp.ones((1, 1)), plain.init((1, 1))
    for t in (1, 2):
        b, state = plain.step(b, state, jnp.full((1, 1), 0.5), plain.numbers(t))
    np.testing.assert_allclose(params["b"], b[0, 0], atol=2e-7)
    assert rule.row_sparse == (rule.name in ("SGD", "Momentum", "Nesterov"))


def test_l1_is_of_weights_only():
    rule = rules.SGD(0.1, l1=0.5)
    params = {"w": jnp.array([[2.0, -2.0, 0.0]]), "b": jnp.array([2.0])}
    dense = rule.dense()
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates: Any = dense.update(zeros, dense.init(params), params)[0]
    np.testing.assert_allclose(updates["w"], [[-0.05, 0.05, 0]], atol=1e-8)
    np.testing.assert_array_equal(updates["b"], [0])


@pytest.mark.parametrize("rule", ROW_SPARSE, ids=lambda r: r.name)
def test_rows_that_catch_up_are_those_of_the_dense_rule(rule):
    rng = np.random.default_rng(0)
    touched = rng.random((40, 4)) < 0.15
    touched[:, 0] = False  # a row that is never touched
    touched[0, 3] = True
    first = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    slopes = jnp.asarray(rng.normal(size=(40, 4, 3)), jnp.float32)
    dense = rule.dense()
    twin: Any = first
    kept = dense.init(first)
    w, state, last = first, rule.init((4, 3)), np.zeros(4, int)

    @jax.jit
    def step(twin, kept, w, state, mine, g, lag, t):
        g = jnp.where(mine, g, 0)
        updates, kept = dense.update(g, kept, twin)
        twin = cast(Any, optax.apply_updates(twin, updates))
        now, current = rule.catch_up(w, state, lag, t - 1)
        new, after = rule.step(now, current, g, rule.numbers(t))
        w = jnp.where(mine, new, w)
        state = {name: jnp.where(mine, after[name], state[name]) for name in state}
        return twin, kept, w, state, (now, current)

    for t in range(1, 41):
        mine, lag = touched[t - 1][:, None], (t - 1 - last)[:, None]
        twin, kept, w, state, _ = step(
            twin, kept, w, state, mine, slopes[t - 1], lag, t
        )
        last[touched[t - 1]] = t
    # All rows as they are before the next step.
    mine, lag = touched[0][:, None], (40 - last)[:, None]
    w, state = step(twin, kept, w, state, mine, slopes[0], lag, 41)[-1]
    assert np.abs(twin - first).max() > 1e-4
    np.testing.assert_allclose(w, twin, rtol=1e-5, atol=2e-6)
    for name, array in state.items():
        np.testing.assert_allclose(array, getattr(kept, name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        rules.SGD(0.1, l1=0.1),
        rules.RMSProp(0.1, 0.9, weight_decay=0.1),
        rules.Adam(0.1, 0.5, 0.0),
    ],
    ids=lambda r: r.name,
)
def test_what_cannot_be_row_sparse_says_so(rule):
    assert not rule.row_sparse and rule.decays
    w = jnp.ones((2, 3))
    with pytest.raises(NotImplementedError, match=r"make the kernel an nnx\.Param"):
        rule.catch_up(w, rule.init(w.shape), jnp.ones((2, 1), int), 1)


def test_numbers_out_of_range():
    with pytest.raises(ValueError, match="mu must be below 1"):
        rules.Momentum(0.1, 1.0)
    with pytest.raises(ValueError, match="l1 must be finite and not negative"):
        rules.SGD(0.1, l1=-1.0)
    with pytest.raises(TypeError, match="learning_rate"):
        rules.AdaDelta(0.9, learning_rate=0.1)  # pyrefly: ignore[unexpected-keyword]
