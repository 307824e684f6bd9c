"""The GPU program of the row update against XLA's form: interpreted on a CPU, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import row_update as mosaic
from pallas_kernels.rounding import Noise
from pallas_kernels.row_sums import Config
from sparsejax import optimizers
from sparsejax.nn.layers import SparseLinear
from sparsejax.ops import gather_sum, row_update
from sparsejax.ops.row_update import TrainedKernel
from sparsejax.ops.scatter_gradient import row_terms
from sparsejax.sparse import CSR

ROWS, HIDDEN = 20, 256  # a width for warpgroups
NARROW = (8, 24, 64, 88)  # for 2, 2, 16 and 8 lanes
# In its first step rmsprop divides a gradient by its own root. So where the terms of a
# gradient cancel, the weight moves by up to rate / sqrt(eps) of the sum's rounding error,
# which depends on the order of the terms. At the default eps of 1e-8 that is a factor of
# 1,000: a gradient of -0.00015 here has terms of 8 together, rounded to 5e-7.
EPS = 1e-4
RULES = [
    optimizers.sgd(0.1),
    optimizers.adagrad(0.1),
    optimizers.rmsprop(0.1, 0.7, EPS),
    optimizers.adadelta(50.0),
    optimizers.rmsprop(lambda count: 0.1 / (1 + count), eps=EPS),
    optimizers.lazy_adam(0.1),
    optimizers.rowwise_adagrad(0.1),
    optimizers.ftrl(0.1, l1=0.01),
]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Makes small inputs run in many programs."""
    default = mosaic.default_config

    def small(hidden, nse, by_row=False):
        threads = default(hidden, nse, by_row).threads
        return Config(entries=8, unroll=4, chunk=128, threads=threads)

    monkeypatch.setattr(mosaic, "default_config", small)


def batch(seed, *, rows=ROWS, valued=True, padding=9) -> CSR:
    """Draws skewed columns, one of which is in every row, an empty row, and invalid padding."""
    rng = np.random.default_rng(seed)
    chosen = [
        np.unique([0, *np.minimum(rng.zipf(1.3, 6), rows) - 1]) for _ in range(10)
    ]
    chosen[5] = np.zeros(0)
    indptr = np.cumsum([0, *(len(c) for c in chosen)]).astype(np.int32)
    indices = np.concatenate([*chosen, np.full(padding, 2**31 - 1)]).astype(np.int32)
    data = rng.standard_normal(len(indices), np.float32) if valued else None
    if data is not None:
        data[indptr[-1] :] = np.nan
    return jax.tree.map(jnp.asarray, CSR(data, indices, indptr, num_cols=rows))


def trained_kernel(
    rule, *, rows=ROWS, hidden=HIDDEN, dtype=jnp.float32
) -> TrainedKernel:
    rng = np.random.default_rng(1)
    w = jnp.asarray(rng.standard_normal((rows + 8, hidden)), dtype)
    last = jnp.full(rows + 8, row_update.NEVER) if rule.decays else None
    return TrainedKernel(w, rule.start(w.astype(jnp.float32)), last)


def steps(rule, trained, xs, implementation, noise=None, *, whole=False):
    """Runs some steps. Most rows are not touched in each step."""
    rng = np.random.default_rng(2)
    for count, x in zip((0, 5), xs, strict=False):
        dy = rng.standard_normal((x.num_rows, trained.w.shape[1]))
        dy = jnp.asarray(np.round(dy) if whole else dy, jnp.float32)
        terms = row_terms([x], [dy], trained.num_rows)
        trained = row_update.step_terms(
            rule,
            trained,
            terms,
            row_update.Passed(jnp.int32(count), noise),
            implementation=implementation,
        )
    return trained


@pytest.mark.parametrize(
    ("rule", "dtype", "hidden"),
    [
        *[
            pytest.param(rule, jnp.float32, hidden, marks=pytest.mark.gpu)
            for rule in RULES
            for hidden in (HIDDEN, *NARROW)
        ],
        (RULES[3], jnp.float32, HIDDEN),  # the others take long to interpret
        (RULES[4], jnp.bfloat16, HIDDEN),
        (RULES[4], jnp.bfloat16, 8),
        (RULES[6], jnp.float32, 24),
    ],
)
def test_equals_summing_first(running, rule, dtype, hidden):
    xs = [batch(seed, valued=seed != 2) for seed in (1, 2)]
    before = trained_kernel(rule, hidden=hidden, dtype=dtype)
    run = jax.jit(functools.partial(steps, rule), static_argnums=2)
    expected = run(before, xs, "xla")
    with running():
        actual = run(before, xs, "mosaic_gpu")
    np.testing.assert_array_equal(actual.last, expected.last)
    rtol = 1e-5 if dtype == jnp.float32 else 2e-2
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    assert np.abs(np.asarray(actual.w - before.w)).max() > 0.01


def test_same_random_rounding(running):
    """Sums of whole numbers are exact, so that programs differ in no bit."""
    rule, xs = optimizers.sgd(2.0**-9), [batch(1, valued=False)]
    before = trained_kernel(rule, dtype=jnp.bfloat16)
    noise = Noise(jnp.int32(7), jnp.int32(1000))
    run = functools.partial(steps, rule, whole=True)
    run = jax.jit(run, static_argnums=2)
    expected = run(before, xs, "xla", noise)
    with running():
        actual = run(before, xs, "mosaic_gpu", noise)
    np.testing.assert_array_equal(actual.w, expected.w)
    exact = run(before._replace(w=before.w.astype(jnp.float32)), xs, "xla", None)
    np.testing.assert_array_equal(expected.w, noise.rounded(exact.w, 1))
    assert (expected.w != exact.w.astype(jnp.bfloat16)).mean() > 0.03


def test_rows_not_touched_keep_their_bits(running):
    rule, x = optimizers.rmsprop(0.1), batch(0)
    before = trained_kernel(rule)
    before = before._replace(w=before.w.at[ROWS:].set(jnp.nan))
    with running():
        after = jax.jit(lambda t: steps(rule, t, [x], "mosaic_gpu"))(before)
    touched = np.unique(np.asarray(x.indices)[: int(x.indptr[-1])])
    moved = np.flatnonzero((np.asarray(after.w) != np.asarray(before.w)).any(1))
    np.testing.assert_array_equal(
        np.setdiff1d(moved, np.arange(ROWS, ROWS + 8)), touched
    )
    assert 0 < len(touched) < ROWS


def test_nothing_touched(running):
    rule = optimizers.sgd(0.1)
    x = CSR(None, jnp.zeros(5, int), jnp.zeros(4, int), num_cols=ROWS)
    trained = trained_kernel(rule)
    with running():
        after = jax.jit(lambda t: steps(rule, t, [x], "mosaic_gpu"))(trained)
    np.testing.assert_array_equal(after.w, trained.w)


@pytest.mark.parametrize(
    ("rule", "hidden", "noise"),
    [
        *[(rule, HIDDEN, None) for rule in RULES],
        *[(RULES[6], width, None) for width in NARROW],
        (RULES[1], HIDDEN, Noise(7)),
        *[(RULES[6], width, Noise(7)) for width in NARROW[1:3]],
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_lowers_for_cuda(rule, hidden, noise):
    dtype = jnp.float32 if noise is None else jnp.bfloat16
    traced = jax.jit(lambda t, x: steps(rule, t, [x], "mosaic_gpu", noise)).trace(
        trained_kernel(rule, hidden=hidden, dtype=dtype), batch(0)
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def test_errors():
    indices, w = jnp.zeros(3, jnp.int32), jnp.zeros((4, 100))
    arguments = (None, indices, jnp.zeros(2, jnp.int32), indices, None)
    with pytest.raises(ValueError, match="below 128 or of 128; got 100 and 100"):
        mosaic.row_update(lambda *_: [], [w], *arguments, jnp.zeros((2, 100)))
    with pytest.raises(
        ValueError, match="float32 or bfloat16 arrays only, got float16"
    ):
        mosaic.row_update(lambda *_: [], [w], *arguments, w.astype(jnp.float16))


@pytest.mark.parametrize(
    ("rule", "hidden"), [(RULES[2], HIDDEN), (RULES[6], HIDDEN), (RULES[2], 16)]
)
def test_fit_for_a_gpu_sums_where_it_updates(monkeypatch, rule, hidden):
    monkeypatch.setattr(gather_sum, "custom_call_can_run", lambda *_, **__: True)
    layer = SparseLinear(ROWS, hidden, rngs=nnx.Rngs(0))
    optimizer = optimizers.Optimizer(layer, rule)

    @nnx.jit
    def step(layer, optimizer, x):
        loss, grads = optimizer.value_and_grad(lambda layer: jnp.sum(layer(x)))(layer)
        optimizer.update(layer, grads)
        return loss

    text = step.trace(layer, optimizer, batch(0)).lower(lowering_platforms=("cuda",))
    # The lookup and the update, and one more for cut rows each.
    assert text.as_text().count("custom_call @mosaic_gpu") == 4


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [HIDDEN, 64, 16])
def test_same_bits_again_at_real_size(monkeypatch, hidden):
    monkeypatch.undo()
    rule, rng = optimizers.rowwise_adagrad(0.1), np.random.default_rng(0)
    # One id has many entries, most others one or two.
    ids = np.where(rng.random(100_000) < 0.1, 7, rng.integers(0, 90_000, 100_000))
    ends = np.arange(100_001, dtype=np.int32)
    x = CSR(None, jnp.asarray(ids, jnp.int32), jnp.asarray(ends), num_cols=90_000)
    trained = trained_kernel(rule, rows=90_000, hidden=hidden)
    run = jax.jit(lambda t, how: steps(rule, t, [x], how), static_argnums=1)
    expected = run(trained, "mosaic_gpu")
    for a, b in zip(expected[:2], run(trained, "xla")[:2], strict=True):
        a, b = jax.tree.map(np.asarray, (a, b))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), a, b)
    for _ in range(3):
        again = run(trained, "mosaic_gpu")
        np.testing.assert_array_equal(again.w, expected.w)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
@pytest.mark.parametrize("hidden", [16, 128])
def test_stack_of_2_33_elements(monkeypatch, hidden, implementation):
    """Its last row and others are read and moved, and nothing else is."""
    monkeypatch.undo()
    rows = 2**33 // hidden
    ids = np.array([0, 1 - 2**31 // hidden, 2**32 // hidden + 5, -1]) % rows
    x = CSR(None, jnp.asarray(ids, jnp.int32), jnp.arange(5), num_cols=rows)
    w = jax.jit(
        lambda: jnp.broadcast_to(
            (jnp.arange(rows) % 1021).astype(jnp.float32)[:, None], (rows, hidden)
        )
    )()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w):
        y = gather_sum.gather_sum(x, w, implementation)
        terms = row_terms([x], [jnp.ones_like(y)], rows)
        trained = row_update.step_terms(
            optimizers.sgd(1.0),
            TrainedKernel(w, {}, None),
            terms,
            row_update.Passed(jnp.int32(0)),
            implementation=implementation,
        )
        return y, trained.w

    y, w = step(w)
    np.testing.assert_array_equal(y, np.repeat(ids[:, None] % 1021, hidden, 1))
    moved = jax.jit(lambda w: jnp.sum(w[:, 0] != jnp.arange(rows) % 1021))(w)
    assert moved == len(ids)
    expected = np.repeat(ids[:, None] % 1021 - 1.0, hidden, 1)
    np.testing.assert_array_equal(w[jnp.asarray(ids)], expected)
