"""Updates of kernel rows, compared with NumPy. test_optimizers.py tests the rules themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matrices import csrs

from pallas_kernels.rounding import Noise
from sparsejax import optimizers
from sparsejax.ops import row_update
from sparsejax.ops.row_update import Passed, TrainedKernel
from sparsejax.sparse import CSR

touched_rows = jax.jit(row_update.touched_rows, static_argnums=1)


# On a CPU the rows of the first two are counted and those of the last are sorted.
@pytest.mark.parametrize(
    ("num_rows", "sorted_ahead"),
    [(64, False), (900, True), (10_000, False), (10_000, True)],
)
@given(x=csrs(rows=5, cols=40))
def test_touched_rows(num_rows, sorted_ahead, x):
    if sorted_ahead:
        x = jax.jit(CSR.with_transposed)(x)
    ids, slots = touched_rows(x, num_rows)
    count = int(x.indptr[-1])
    used = np.asarray(x.indices)[:count]
    capacity = min(x.nse, num_rows)
    unique = np.unique(used)
    padding = np.full(capacity - len(unique), num_rows)
    np.testing.assert_array_equal(ids, np.r_[unique, padding])
    np.testing.assert_array_equal(np.asarray(ids)[slots[:count]], used)
    assert (np.asarray(slots)[count:] == capacity).all()


@pytest.mark.parametrize("num_rows", [5, 100])
def test_an_index_out_of_range_touches_nothing(num_rows):
    indices = jnp.array([4, 3, -1, 5, 2**31 - 1, 3])
    x = CSR(None, indices, jnp.array([0, 6]), num_cols=5)
    ids, slots = row_update.touched_rows(x, num_rows)
    capacity = min(6, num_rows)
    np.testing.assert_array_equal(ids, [3, 4, *[num_rows] * (capacity - 2)])
    np.testing.assert_array_equal(slots, [1, 0, *[capacity] * 3, 0])


@pytest.mark.parametrize("num_rows", [20, 400])
def test_rows_that_were_behind_are_brought_up_to_date(num_rows):
    """And only they are written. On a CPU a block has up to 128 rows."""
    rule = optimizers.adam(0.1)
    rng = np.random.default_rng(0)
    arrays = jnp.asarray(rng.random((3, num_rows, 2)), jnp.float32)
    last = np.array([-1, 50, *rng.integers(0, 50, num_rows - 2)], np.int32)
    last[7] = 50
    trained = TrainedKernel(
        arrays[0], {"mu": arrays[1], "nu": arrays[2]}, jnp.asarray(last)
    )
    close = {"rtol": 1e-5, "atol": 1e-6}
    count = jnp.int32(50)
    lag = np.where(last >= 0, 50 - last, 0)[:, None]
    caught_up = jax.jit(rule.catch_up)
    w, state = caught_up(trained.w, trained.state, jnp.asarray(lag), count)
    settled = jax.jit(functools.partial(row_update.settle, rule))(
        trained, Passed(count)
    )
    np.testing.assert_allclose(settled.w, w, **close)
    np.testing.assert_allclose(settled.state["mu"], state["mu"], **close)
    np.testing.assert_array_equal(settled.last, np.where(last >= 0, 50, -1))

    used = np.array([1, 4, 7, 12, *range(19, num_rows)])
    ids = jnp.array([*used, num_rows, num_rows])
    gradient = jnp.asarray(rng.random((len(ids), 2)), jnp.float32)

    @jax.jit
    def run(trained, ids, gradient):
        current = row_update.current_rows(rule, trained, ids, Passed(count))
        step = row_update.step_rows(rule, trained, ids, gradient, Passed(count))
        return current, step

    rows, after = run(trained, ids, gradient)
    rows, w, state = jax.tree.map(np.asarray, (rows, w, state))
    np.testing.assert_allclose(rows[: len(used)], w[used], **close)
    moved, moments = jax.jit(rule.step)(
        w[used],
        jax.tree.map(lambda a: a[used], state),
        np.asarray(gradient)[: len(used)],
        rule.numbers(count + 1),
    )
    before = {"w": trained.w, **trained.state}
    for name, got in {"w": after.w, **after.state}.items():
        expected = np.array(before[name])
        expected[used] = {"w": moved, **moments}[name]
        np.testing.assert_allclose(got, expected, **close)
    last[used] = 51
    np.testing.assert_array_equal(after.last, last)


@pytest.mark.parametrize("name", ["rowwise_adagrad", "adamw"])
def test_on_a_mesh(name):
    """Rows spread over eight devices give the same numbers."""
    rule = optimizers.get(name, learning_rate=0.1)
    rng = np.random.default_rng(0)
    shape = 40, 3
    state = {
        n: jnp.asarray(rng.random(a.shape, np.float32))
        for n, a in rule.init(shape).items()
    }
    last = jnp.asarray(rng.integers(0, 30, 40, np.int32)) if rule.decays else None
    trained = TrainedKernel(jnp.asarray(rng.random(shape, np.float32)), state, last)
    ids = jnp.array([0, 4, 5, 17, 38, 39, 40, 40])
    gradient = jnp.asarray(rng.random((8, 3), np.float32))

    def run(trained):
        passed = Passed(jnp.int32(30))
        rows = row_update.current_rows(rule, trained, ids, passed)
        after = row_update.step_rows(rule, trained, ids, gradient, passed)
        settled = row_update.settle(rule, after, Passed(jnp.int32(31)))
        return rows[:6], after, settled

    expected = jax.jit(run)(trained)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("model"))
    spread = jax.jit(run, out_shardings=(None, by_rows, by_rows))(
        jax.device_put(trained, by_rows)
    )
    for a, b in zip(jax.tree.leaves(spread), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_missed_steps_are_rounded_once():
    """So a row's expectation is that of float32, however many steps it has missed."""
    rule, count, rows = optimizers.momentum(0.1, weight_decay=0.01), jnp.int32(40), 300
    rng = np.random.default_rng(0)
    arrays = jnp.asarray(rng.normal(size=(2, rows, 8)), jnp.float32)
    w, last = arrays[0].astype(jnp.bfloat16), jnp.asarray(rng.integers(0, 41, rows))
    noise, state = Noise(jnp.int32(7)), {"trace": arrays[1]}
    ids = jnp.asarray(np.r_[rng.permutation(rows)[:50], [rows] * 3], jnp.int32)

    @jax.jit
    def run(trained, noise):
        passed = Passed(count, noise)
        settle = row_update.settle(rule, trained, passed)
        read = row_update.current_rows(rule, trained, ids, passed)
        slopes = jnp.ones((len(ids), 8))
        step = row_update.step_rows(rule, trained, ids, slopes, passed)
        return settle, read, step

    last = last.astype(jnp.int32)
    wide, *_ = run(TrainedKernel(w.astype(jnp.float32), state, last), None)
    settled, read, stepped = run(TrainedKernel(w, state, last), noise)
    *_, wide_step = run(settled._replace(w=settled.w.astype(jnp.float32)), None)
    np.testing.assert_array_equal(settled.w, noise.rounded(wide.w, count))
    some = np.asarray(ids[:50])
    np.testing.assert_array_equal(read[:50], settled.w[some])
    np.testing.assert_array_equal(
        stepped.w[some], noise.rounded(wide_step.w[some], count + 1, ids[:50])
    )
    trace, expected = (after.state["trace"][some] for after in (stepped, wide_step))
    np.testing.assert_array_equal(trace, expected)
    still = np.asarray(last) == 40
    np.testing.assert_array_equal(settled.w[still], w[still])


@pytest.mark.parametrize("beyond", [0, 1])
def test_rows_that_a_table_is_for(beyond):
    """Only they come up to date in a program without the repetition of old steps."""
    rule = optimizers.adamw(0.1, weight_decay=0.1)
    count = rule.table_lags + 50
    rng = np.random.default_rng(0)
    w, mu, nu = rng.random((3, 9, 4), np.float32)
    oldest = 50 - beyond
    last = jnp.asarray([*range(count - 7, count), oldest, row_update.NEVER], jnp.int32)
    trained = TrainedKernel(jnp.asarray(w), {"mu": mu, "nu": nu}, last)
    assert row_update.are_young(rule, last, jnp.int32(count)) == (not beyond)
    settle = jax.jit(row_update.settle, static_argnums=0, static_argnames="young")
    want, got = (
        settle(rule, trained, Passed(jnp.int32(count)), young=young)
        for young in (False, True)
    )
    np.testing.assert_array_equal(got.last, want.last)
    same = np.all(np.isclose(got.w, want.w, rtol=1e-6, atol=0), axis=1)
    assert same[np.arange(9) != 7].all() and same[7] == (not beyond)
    # A table that is given is used, and one of other steps has other numbers.
    for steps in (0, 100):
        table = rule.lag_table(jnp.int32(count + steps), jnp.float32)
        got = settle(rule, trained, Passed(jnp.int32(count), table=table))
        assert np.allclose(got.w[:7], want.w[:7], rtol=1e-6, atol=0) == (not steps)
    # Within a program nobody can tell.
    jax.eval_shape(
        lambda last: row_update.are_young(rule, last, jnp.int32(1)) and 1 / 0, last
    )
