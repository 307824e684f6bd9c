"""gather_matmul and its gradients against SciPy in float64."""

import functools
import itertools
import typing

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from matrices import csrs, oracle, random_csr, sizes, with_garbage
from memory import temporary_bytes
from tolerances import assert_close

from sparsejax.ops.gather_matmul import (
    Combiner,
    combined,
    data_gradient_by_gather,
    data_gradient_by_loop,
    gather_matmul,
)
from sparsejax.ops.piece_sum import by_steps
from sparsejax.sparse import CSR

compiled = jax.jit(gather_matmul, static_argnames=("combiner", "implementation"))
# On a CPU "xla" is a loop over the entries.
FORMS = {
    name: functools.partial(compiled, implementation=name)
    for name in ("xla", "xla_gpu", "cusparse")
}


@functools.partial(jax.jit, static_argnames="combiner")
def stepwise(x: CSR, w: jax.Array, combiner: Combiner = "sum") -> jax.Array:
    """Computes the product by the form for exported programs, which has no derivative."""
    return by_steps(combined(x, combiner), jnp.asarray(w))


SUMS = FORMS | {"steps": stepwise}


def scale(x: CSR, combiner: str) -> np.ndarray:
    """The factor by which a combiner multiplies each row, by its definition."""
    scales = []
    indptr = np.asarray(x.indptr)
    for start, end in itertools.pairwise(indptr):
        v = np.ones(end - start) if x.data is None else np.asarray(x.data[start:end])
        v = v.astype(np.float64)
        total = {"sum": 1, "mean": v.sum(), "sqrtn": np.sqrt((v**2).sum())}[combiner]
        scales.append(0 if total == 0 else 1 / total)
    return np.array(scales)


def weights(rows: int, hidden: int, dtype=np.float32, seed: int = 1) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((rows, hidden), np.float32)
    return w.astype(dtype)


def check(actual, x: CSR, w, factor=None) -> None:
    """Asserts that `actual` is `factor x w`."""
    dense, w = oracle(x), np.asarray(w, np.float64)[: x.num_cols]
    factor = np.ones(x.num_rows) if factor is None else factor
    terms = int(np.max(np.diff(x.indptr), initial=1))
    assert_close(
        actual,
        factor[:, None] * (dense @ w),
        terms=terms,
        magnitude=np.abs(factor)[:, None] * (sizes(x) @ np.abs(w)),
        dtype=np.float32,
    )


@pytest.mark.parametrize("form", SUMS)
@given(x=csrs(), combiner=st.sampled_from(typing.get_args(Combiner)))
def test_equals_scipy(form, x, combiner):
    w = weights(x.num_cols, hidden={7: 16, 1: 1, 40: 3}[x.num_cols])
    y = SUMS[form](x, w, combiner=combiner)
    factor = scale(x, combiner)
    # A mean divides by what may nearly cancel: compare where it is well conditioned.
    fine = np.abs(factor) * sizes(x).sum(axis=1) < 20
    check(np.where(fine[:, None], y, 0), x, w, np.where(fine, factor, 0))


@pytest.mark.parametrize("form", SUMS)
def test_very_long_row(form):
    x = random_csr(3, 5000, 0.99, seed=2)
    w = weights(5000, 2)
    check(SUMS[form](x, w), x, w)


def rows_of_lengths(lengths: list[int], seed: int, *, valued: bool = False) -> CSR:
    """Rows that repeat some of 50 columns, with some padding."""
    rng = np.random.default_rng(seed)
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    count = int(indptr[-1])
    indices = np.concatenate([np.sort(rng.integers(0, 50, n)) for n in lengths])
    data = rng.standard_normal(count).astype(np.float32) if valued else None
    host = CSR(data, indices.astype(np.int32), indptr, num_cols=50)
    return with_garbage(host, 9, rng)


# On average a row has 1, 5, 9 or 60 entries: the form for GPUs adds pieces of 4, 8, 16 or 32.
# That of exported programs adds up to 20, 64, 64, 64 or 1,024 entries in a step. To the others
# one is like another.
PIECES = {
    "4": [*[0] * 3000, 2900, *[0] * 90, 5, 4, 3],
    "8": [*[5] * 300, 8, 9, 64, 65, 72, 73],
    "16": [9] * 200,
    "32": [*[0, 31, 32, 33, 64, 65, 287, 288, 289, 0] * 9, 12_000],
    "one": [40_000],
}


@pytest.mark.parametrize(
    ("form", "pieces"),
    [
        *((form, pieces) for form in ("xla_gpu", "steps") for pieces in PIECES),
        ("xla", "32"),
        ("cusparse", "32"),
    ],
)
def test_rows_in_pieces(form, pieces):
    lengths = PIECES[pieces]
    for valued in (False, True):
        x = rows_of_lengths(lengths, seed=len(lengths), valued=valued)
        w = weights(50, 3)
        check(SUMS[form](x, w), x, w)


@pytest.mark.parametrize("form", SUMS)
def test_nan_stays_in_the_rows_that_read_it(form):
    x = rows_of_lengths([3, 0, 700, 1, 40, 90], seed=1)
    w = weights(50, 2)
    w[[0, 7]] = np.nan
    dense = oracle(x)
    reads = dense[:, [0, 7]].any(axis=1)
    y = np.asarray(SUMS[form](x, w))
    np.testing.assert_array_equal(np.isnan(y).all(axis=1), reads)
    np.testing.assert_array_equal(np.isnan(y).any(axis=1), reads)
    w[7] = np.inf
    y = np.asarray(SUMS[form](x, w))
    reads_inf = (dense[:, 7] > 0) & (dense[:, 0] == 0)
    np.testing.assert_array_equal(np.isposinf(y).all(axis=1), reads_inf)


def shapes_within(jaxpr) -> list[tuple[int, ...]]:
    """The shapes of all arrays that a traced function computes."""
    shapes = []
    for equation in jaxpr.eqns:
        shapes += [v.aval.shape for v in equation.outvars]
        for inner in jaxprs.inner(equation):
            shapes += shapes_within(inner)
    return shapes


def test_form_for_gpus_has_no_row_for_each_entry():
    """And neither a loop nor a scatter, whose order could differ from run to run."""
    nse, hidden = 100_000, 64
    x = CSR(None, jnp.zeros(nse, int), jnp.zeros(1025, int), num_cols=500)
    w = jax.ShapeDtypeStruct((500, hidden), jnp.float32)
    traced = jax.jit(FORMS["xla_gpu"]).trace(x, w)
    text = str(traced.jaxpr)
    assert "gather" in text and "scatter" not in text and "while" not in text
    largest = max(int(np.prod(shape)) for shape in shapes_within(traced.jaxpr))
    assert largest <= nse * hidden / 4


@pytest.mark.parametrize("form", SUMS)
def test_bfloat16_is_summed_in_float32(form):
    x = random_csr(4, 900, 0.9)
    w = weights(900, 3, jnp.bfloat16)
    y = SUMS[form](x, w)
    assert y.dtype == jnp.bfloat16
    # One rounding of the result; a bfloat16 sum would be off by several percent.
    np.testing.assert_allclose(
        np.asarray(y).astype(np.float64),
        oracle(x) @ w.astype(np.float64),
        rtol=2**-8,
        atol=1e-2,
    )


@pytest.mark.parametrize("form", SUMS)
def test_kernel_rows_beyond_the_columns_are_not_read(form):
    x = random_csr(4, 10)
    w = weights(16, 3)
    w[10:] = np.nan
    check(SUMS[form](x, w), x, w)


@pytest.mark.parametrize("form", SUMS)
def test_bad_entries_are_nan_in_their_row_only(form):
    indices = jnp.array([0, 3, 1, 7, -1, 2, 2], jnp.int32)
    x = CSR(None, indices, jnp.array([0, 2, 4, 5, 5, 7]), num_cols=7)
    y = np.asarray(SUMS[form](x, jnp.ones((7, 2))))
    np.testing.assert_array_equal(np.isnan(y).all(1), [False, True, True, False, False])
    np.testing.assert_array_equal(y[[0, 3, 4]], [[2, 2], [0, 0], [2, 2]])
    overfull = CSR(None, indices[:6], x.indptr, num_cols=8)
    y = np.asarray(SUMS[form](overfull, jnp.ones((8, 2))))
    assert np.isnan(y[4]).all() and not np.isnan(y[[0, 1, 3]]).any()


@pytest.mark.parametrize("form", SUMS)
def test_empty_and_zero_sized(form):
    empty = CSR(None, jnp.zeros(0, jnp.int32), jnp.zeros(4, jnp.int32), num_cols=5)
    np.testing.assert_array_equal(SUMS[form](empty, jnp.ones((5, 2))), np.zeros((3, 2)))
    no_rows = random_csr(4, 5).take(np.array([]))
    assert SUMS[form](no_rows, jnp.ones((5, 2))).shape == (0, 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("valued", [False, True])
def test_gradients_by_finite_differences(form, combiner, valued):
    x = random_csr(4, 7, 0.5, valued=valued)
    used = int(x.indptr[-1])
    w = weights(9, 3)
    dy = weights(4, 3, seed=5).astype(np.float64)

    def value(data, w):
        matrix = CSR(data, x.indices, x.indptr, num_cols=7)
        dense = oracle(matrix) @ np.asarray(w, np.float64)[:7]
        return float(np.sum(dy * scale(matrix, combiner)[:, None] * dense))

    def loss(x, w):
        y = gather_matmul(x, w, combiner=combiner, implementation=form)
        return jnp.sum(dy.astype(np.float32) * y)

    gx, gw = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(x, w)
    eps = 1e-4
    for place in [(0, 0), (3, 1), (6, 2), (8, 0)]:
        step = np.zeros(w.shape)
        step[place] = eps
        slope = (value(x.data, w + step) - value(x.data, w - step)) / (2 * eps)
        np.testing.assert_allclose(gw[place], slope, rtol=1e-3, atol=1e-4)
    assert (np.asarray(gw[7:]) == 0).all()
    if valued:
        data = np.asarray(x.data, np.float64)
        for entry in range(used):
            step = np.zeros(data.shape)
            step[entry] = eps
            slope = (value(data + step, w) - value(data - step, w)) / (2 * eps)
            np.testing.assert_allclose(gx.data[entry], slope, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(gx.data[used:], 0)


def test_data_gradient_forms_agree():
    x = random_csr(6, 20, 0.4, valued=True)
    w, dy = jnp.asarray(weights(20, 5)), jnp.asarray(weights(6, 5, seed=3))
    used = int(x.indptr[-1])
    loop = data_gradient_by_loop(x, w, dy)[:used]
    np.testing.assert_allclose(
        loop, data_gradient_by_gather(x, w, dy)[:used], rtol=1e-5, atol=1e-5
    )


def test_memory_does_not_hold_a_row_per_entry():
    hidden = 64
    w = jax.ShapeDtypeStruct((500, hidden), jnp.float32)

    def temporary(nse):
        x = CSR(None, jnp.zeros(nse, int), jnp.zeros(33, int), num_cols=500)
        return temporary_bytes(gather_matmul, x, w)

    few, many = temporary(1000), temporary(10000)
    assert many - few < 9000 * 16  # some integers for an entry, not `hidden` floats


def test_lowers_for_cuda():
    x = random_csr(4, 9)
    w = weights(9, 4)

    def value_and_gradient(x, w):
        return jax.value_and_grad(lambda w: gather_matmul(x, w).sum())(w)

    traced = jax.jit(value_and_gradient).trace(x, w)
    assert "stablehlo" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("valued", "hidden"), [(False, 16), (True, 128)])
def test_kernel_with_its_gradients(valued, hidden):
    """The same function and gradients from the GPU kernel, interpreted."""
    x = random_csr(5, 7, 0.4, valued=valued)
    w = jnp.asarray(weights(9, hidden))
    dy = jnp.asarray(weights(5, hidden, seed=2))

    def run(implementation):
        def loss(x, w):
            y = gather_matmul(x, w, combiner="sqrtn", implementation=implementation)
            return jnp.sum(y * dy), y

        differentiate = jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
        (gx, gw), y = jax.jit(differentiate)(x, w)
        return [y, gw] + ([] if gx.data is None else [gx.data[: x.indptr[-1]]])

    with plgpu.force_gpu_interpret_mode():
        results = run("mosaic_gpu")
    for result, expected in zip(results, run("xla"), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_kernel_with_its_gradients_lowers_for_cuda():
    x, w = random_csr(5, 7, 0.4), jnp.asarray(weights(9, 128))

    def value_and_gradient(x, w):
        def loss(w):
            return gather_matmul(x, w, implementation="mosaic_gpu").sum()

        return jax.value_and_grad(loss)(w)

    lowered = (
        jax.jit(value_and_gradient).trace(x, w).lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("mosaic_gpu") >= 4  # two kernels, twice


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_sharded_over_features_is_the_same(form):
    x, dy = random_csr(6, 30, 0.3), jnp.asarray(weights(6, 5, seed=2))
    w = jnp.asarray(weights(32, 5))
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("model"))

    @jax.jit
    def forward_and_backward(x, w):
        y, backward = jax.vjp(lambda w: FORMS[form](x, w), w)
        return y, backward(dy)[0]

    expected = forward_and_backward(x, w)
    sharded = forward_and_backward(x, jax.device_put(w, rows))
    for result, alone in zip(sharded, expected, strict=True):
        np.testing.assert_allclose(result, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", [None, *FORMS])
@pytest.mark.parametrize("valued", [False, True])
@pytest.mark.parametrize("rows", [0, 3])
def test_gradients_of_nothing(implementation, valued, rows):
    data = np.zeros(0, np.float32) if valued else None
    indptr = np.zeros(rows + 1, np.int32)
    x = CSR(data, np.zeros(0, np.int32), indptr, num_cols=5)

    def loss(data, w):
        y = gather_matmul(x.with_data(data), w, implementation=implementation)
        return jnp.sum(y**2)

    of_data, of_w = jax.grad(loss, argnums=(0, 1))(data, jnp.ones((5, 2)))
    np.testing.assert_array_equal(of_w, np.zeros((5, 2)))
    assert of_data is None if data is None else of_data.shape == (0,)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_combined_sums_stay_in_range(combiner):
    every, ends = np.arange(100, dtype=np.int32), np.array([0, 100], np.int32)
    long = CSR(None, every, ends, num_cols=100)
    y = gather_matmul(long, jnp.full((100, 1), 2000.0, jnp.float16), combiner=combiner)
    want = 2000 if combiner == "mean" else 20000
    np.testing.assert_allclose(np.asarray(y, np.float64), [[want]], rtol=2e-3)
    three = np.arange(3, dtype=np.int32), np.array([0, 3], np.int32)

    @jax.jit
    def first(v):
        return compiled(CSR(v, *three, num_cols=3), jnp.eye(3), combiner=combiner)[0]

    slopes = jax.jit(jax.jacrev(first))
    for size in (1e-30, 1e30, 3e38):
        v = np.array([1, 0.25, 1], np.float32) * np.float32(size)
        exact = v.astype(np.float64)
        norm = exact.sum() if combiner == "mean" else np.linalg.norm(exact)
        unit = exact / norm
        np.testing.assert_allclose(first(jnp.asarray(v)), unit, rtol=1e-6)
        if size > 1e38:  # whose inverse has no float32
            continue
        # d (v_i / |v|) / d v_j, in units of 1 / |v|
        other = np.ones(3) if combiner == "mean" else unit
        want = np.eye(3) - np.outer(unit, other)
        got = np.asarray(slopes(jnp.asarray(v)), np.float64) * norm
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
def test_kernels_that_are_no_real_numbers(dtype):
    with pytest.raises(Exception, match="cast it to a floating dtype|Float"):
        gather_matmul(random_csr(3, 5), jnp.ones((5, 2), dtype))


def test_errors():
    x = random_csr(3, 5)
    with pytest.raises(ValueError, match=r"x has 5 columns but w has shape \(4, 2\)"):
        gather_matmul(x, jnp.ones((4, 2)))
    with pytest.raises(Exception, match="combiner|max"):
        gather_matmul(x, jnp.ones((5, 2)), combiner="max")  # type: ignore
    with pytest.raises(Exception, match="implementation|cuda"):
        gather_matmul(x, jnp.ones((5, 2)), implementation="cuda")  # type: ignore


@pytest.mark.parametrize("form", FORMS)
def test_in_a_shard_map_that_checks_what_varies(form):
    """`jax.shard_map` as it is by default; each device has its own part of the rows of w."""
    x, w = random_csr(6, 9, 0.5, valued=True), jnp.arange(36.0).reshape(18, 2) / 36
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=auto)
    parts = jax.sharding.PartitionSpec("data")

    def loss(w):
        specs = {"in_specs": (jax.sharding.PartitionSpec(), parts), "out_specs": parts}
        y = jax.shard_map(FORMS[form], mesh=mesh, **specs)(x, w)
        return jnp.sum(y**2), y

    (_, y), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    dense = np.asarray(x.todense(), np.float64)
    halves = np.split(np.asarray(w, np.float64), 2)
    np.testing.assert_allclose(y, np.concatenate([dense @ h for h in halves]), 1e-5)
    expected = np.concatenate([2 * dense.T @ (dense @ h) for h in halves])
    np.testing.assert_allclose(grad, expected, 1e-5, 1e-5)
