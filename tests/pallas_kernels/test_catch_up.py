"""GPU programs that read and move rows with missed steps, compared with XLA's form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import optimizers
from sparsejax.ops import row_update
from sparsejax.ops.gather_matmul import gather_matmul
from sparsejax.ops.row_update import Passed, TrainedKernel
from sparsejax.ops.scatter_gradient import row_terms
from sparsejax.sparse import CSR

ROWS, COUNT = 24, 2000
RULES = [
    optimizers.adam(0.1),
    optimizers.adamw(lambda count: 0.1 / (1 + 1e-3 * count), weight_decay=0.01),
    optimizers.momentum(0.1),
]


def problem(rule, hidden, oldest):
    """Rows with all lags, some never touched; and a batch with duplicates and an empty row."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((ROWS, hidden)).astype(np.float32)
    state = {
        name: jnp.asarray(rng.random(w.shape, np.float32))
        for name in rule.init(w.shape)
    }
    last = COUNT - rng.integers(0, oldest, ROWS).astype(np.int32)
    last[3], last[5], last[6] = -1, COUNT, COUNT - oldest
    lengths = np.array([3, 0, 7, 1, 9, 2])
    chosen = [np.sort(rng.choice(ROWS - 2, n, replace=False)) for n in lengths]
    chosen[0] = np.array([3, 5, 6])
    indices = np.concatenate([*chosen, np.full(3, 6)]).astype(np.int32)
    data = rng.standard_normal(len(indices)).astype(np.float32)
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    x = jax.tree.map(jnp.asarray, CSR(data, indices, indptr, num_cols=ROWS))
    return TrainedKernel(jnp.asarray(w), state, jnp.asarray(last)), x


def run(rule, trained, x, implementation, *, young=False):
    count = jnp.int32(COUNT)
    table = rule.lag_table(count, jnp.float32) if young else None
    passed, how = Passed(count, table=table), {"implementation": implementation}
    y = row_update.gather_current(rule, trained, x, passed, **how)
    terms = row_terms([x], [jnp.cos(y)], trained.num_rows)
    return y, row_update.step_terms(rule, trained, terms, passed, **how)


def check(running, rule, hidden, *, oldest, young):
    trained, x = problem(rule, hidden, oldest)
    both = jax.jit(
        functools.partial(run, rule), static_argnames=("implementation", "young")
    )
    expected = both(trained, x, implementation="xla")
    with running():
        actual = both(trained, x, implementation="mosaic_gpu", young=young)
    np.testing.assert_array_equal(actual[1].last, expected[1].last)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    stale = row_update.gather_current(
        rule, trained._replace(last=jnp.full(ROWS, COUNT)), x, Passed(jnp.int32(COUNT))
    )
    assert np.abs(expected[0] - stale).max() > 0.05


@pytest.mark.parametrize(
    ("rule", "hidden"),
    [
        (RULES[0], 16),
        *[
            pytest.param(rule, hidden, marks=pytest.mark.gpu)
            for rule in RULES
            for hidden in (8, 64, 128, 256, 384)
        ],
    ],
)
def test_equals_xla(running, rule, hidden):
    check(running, rule, hidden, oldest=500, young=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_rows_that_no_table_is_for(running, rule):
    check(running, rule, 16, oldest=1900, young=False)


@pytest.mark.parametrize("hidden", [16, 256])
def test_lowers_for_cuda(hidden):
    trained, x = problem(RULES[1], hidden, 1900)
    for young in (False, True):
        traced = jax.jit(
            functools.partial(run, RULES[1], implementation="mosaic_gpu", young=young)
        ).trace(trained, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") >= 2
        assert young == ("stablehlo.while" not in text)


def test_gradient_of_the_entries():
    """As of a product with the rows as they are now."""
    trained, x = problem(RULES[0], 8, 1900)
    passed = Passed(jnp.int32(COUNT))

    def total(data):
        y = row_update.gather_current(RULES[0], trained, x.with_data(data), passed)
        return jnp.sum(jnp.sin(jnp.arange(y.size).reshape(y.shape)) * y)

    actual = jax.jit(jax.grad(total))(x.data)

    def settled(data):
        w = row_update.settle(RULES[0], trained, passed).w
        y = gather_matmul(x.with_data(data), w)
        return jnp.sum(jnp.sin(jnp.arange(6.0 * 8).reshape(6, 8)) * y)

    expected = jax.jit(jax.grad(settled))(x.data)
    used = int(x.indptr[-1])
    np.testing.assert_allclose(actual[:used], expected[:used], rtol=1e-5, atol=1e-5)
