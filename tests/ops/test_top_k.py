"""`top_k` against a full sort."""

import contextlib
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import matrices
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import kernel_can_run
from memory import temporary_bytes

import sparsejax as sj
from sparsejax.ops import top_k as module
from sparsejax.ops.top_k import Tuning, select, top_k, top_k_tuned
from sparsejax.sparse import CSR


def full_sort(scores, k):
    """The ranking by definition: NaN first, then descending score, then ascending id."""
    batch, items = scores.shape
    ids = np.full((batch, k), -1, np.int32)
    best = np.full((batch, k), -np.inf)
    for b, row in enumerate(scores):
        number = np.where(np.isnan(row), 0, row)
        order = np.lexsort((np.arange(items), -number, ~np.isnan(row)))
        order = order[row[order] != -np.inf][:k]
        ids[b, : len(order)], best[b, : len(order)] = order, row[order]
    return ids, best


def by_score(scores, k, tuning=module.CPU):
    """Calls `top_k` on an array of scores: h selects a column of the kernel."""
    scores = np.asarray(scores, np.float32)
    options = {"num_items": scores.shape[1], "tuning": tuning}
    one_hot = jnp.eye(len(scores), dtype=jnp.float32)
    finite = np.where(np.isfinite(scores), scores, 0)
    if (finite == scores).all():
        return top_k_tuned(one_hot, jnp.asarray(scores.T), None, k, **options)
    # 0 * inf is NaN, so rows with infinities go one by one, with the scores as bias.
    h = jnp.zeros((1, 1))
    kernel = jnp.zeros((scores.shape[1], 1))
    rows = [top_k_tuned(h, kernel, jnp.asarray(row), k, **options) for row in scores]
    return tuple(jnp.concatenate(parts) for parts in zip(*rows, strict=True))


def check(scores, k, **options):
    got_ids, got = by_score(scores, k, **options)
    want_ids, want = full_sort(np.asarray(scores, np.float32), k)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_ids, want_ids)
    assert got_ids.dtype == jnp.int32 and got.dtype == jnp.float32


# One chunk or many, without groups, with them, and with groups of groups.
FINE = Tuning(chunk_scores=256, group=4, small_group=4, many=0, direct=8, chunk_items=1)
TUNINGS = [
    module.CPU._replace(chunk_items=1),
    module.GPU._replace(chunk_scores=2**21, chunk_items=1),
    FINE,
    FINE._replace(direct=1000),
    Tuning(chunk_scores=1, group=5, small_group=3, many=10, direct=6, chunk_items=1),
]
every_tuning = pytest.mark.parametrize("tuning", TUNINGS, ids=range(len(TUNINGS)))


@pytest.mark.parametrize("k", [1, 5, 40, 700])
@every_tuning
def test_random_scores(tuning, k):
    rng = np.random.default_rng(0)
    check(rng.standard_normal((4, 701)), k, tuning=tuning)


@pytest.mark.parametrize("k", [1, 5, 40])
@every_tuning
def test_ties_go_to_the_lower_id(tuning, k):
    rng = np.random.default_rng(1)
    # All of one shape, which compiles once.
    check(rng.integers(0, 3, (4, 701)), k, tuning=tuning)
    check(rng.integers(0, 100, (4, 701)), k, tuning=tuning)
    # The best one of each group of 4 is the same, but at different places.
    places = np.eye(4)[rng.integers(0, 4, (2, 176))].reshape(2, 704)[:, :701]
    check(np.concatenate([np.ones((2, 701)), places]), k, tuning=tuning)
    falling = -np.arange(701.0)
    check([np.zeros(701), falling, -falling, np.floor(falling / 7)], k, tuning=tuning)


@every_tuning
def test_zeros_of_both_signs_are_equal(tuning):
    rng = np.random.default_rng(2)
    signs = jnp.float32(rng.choice([-1, 1], 700))
    options = {"scale": signs, "num_items": 700, "tuning": tuning}
    ids, scores = top_k_tuned(jnp.zeros((1, 1)), jnp.ones((700, 1)), None, 9, **options)
    np.testing.assert_array_equal(ids[0], np.arange(9))
    assert (scores == 0).all()


@every_tuning
def test_special_values(tuning):
    rng = np.random.default_rng(3)
    values = [-np.inf, -1, 0, 1, np.inf, np.nan]
    scores = rng.choice(values, (2, 300), p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.05])
    for k in (3, 30, 299):
        check(scores, k, tuning=tuning)


@every_tuning
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_special_value_everywhere(tuning, value):
    check(np.full((1, 300), value), 5, tuning=tuning)


@pytest.mark.parametrize("items", [5_000, 70_000])
def test_one_nan_among_many_items(items):
    scores = np.random.default_rng(0).standard_normal((2, items))
    for place in (0, 7, items // 2, items - 1):
        scores[1, place] = np.nan
        check(scores, 5)
        scores[1, place] = 0


def test_nan_of_either_sign_comes_first():
    nan = np.float32(np.nan)
    scores = jnp.array([1, nan, np.inf, -nan, 2], jnp.float32)
    signs = np.signbit(np.asarray(scores))
    assert signs[1] != signs[3]
    ids, got = top_k(jnp.zeros((1, 1)), jnp.zeros((5, 1)), 3, bias=scores)
    assert list(ids[0]) == [1, 3, 2]
    np.testing.assert_array_equal(got[0], [nan, nan, np.inf])
    # inf - inf has the sign that sorts last.
    ids, _ = top_k(
        jnp.full((1, 2), jnp.inf), jnp.float32([[1, 1], [1, -1], [-1, -1]]), 3
    )
    assert list(ids[0]) == [1, 0, -1]


@given(
    items=st.sampled_from([1, 3, 127, 129, 300, 1000]),
    levels=st.sampled_from([1, 2, 10, 10**6]),
    k=st.sampled_from([1, 4, 131]),
    tuning=st.sampled_from(TUNINGS),
    seed=st.integers(0, 2**32 - 1),
)
def test_adversarial_sizes(items, levels, k, tuning, seed):
    # The selection itself, as compiling `top_k` for each example is slow.
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, (2, items)).astype(np.float32)
    ids, best = select(jnp.asarray(scores), k, tuning)
    want_ids, want = full_sort(scores, k)
    np.testing.assert_array_equal(best, want[:, :items])
    np.testing.assert_array_equal(ids, want_ids[:, :items])


def layer(batch=6, items=500, hidden=8, extra_rows=12, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        # Halves of small integers: every score is exact in float32.
        return jnp.asarray(rng.integers(-8, 9, shape) / 2, dtype)

    h, kernel = normal(batch, hidden), normal(items + extra_rows, hidden)
    return h, kernel, normal(items + extra_rows), jnp.abs(normal(items + extra_rows))


@every_tuning
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_projection_scale_bias_exclusion_and_padding(tuning, dtype):
    h, kernel, bias, scale = layer(dtype=dtype)
    exclude = matrices.random_csr(6, 500, 0.3)
    options = {"scale": scale, "exclude": exclude, "num_items": 500, "tuning": tuning}
    ids, scores = top_k_tuned(h, kernel, bias, 20, **options)
    exact = [np.asarray(x, np.float64) for x in (h, kernel, bias, scale)]
    want = (exact[0] @ exact[1].T * exact[3] + exact[2])[:, :500]
    seen = matrices.oracle(exclude) != 0
    want_ids, want = full_sort(np.where(seen, -np.inf, want), 20)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(scores, want)
    assert scores.dtype == jnp.float32


@given(exclude=matrices.csrs(unique=True))
def test_awkward_exclusion(exclude):
    batch, items = exclude.shape
    h, kernel, bias, _ = layer(batch, items, hidden=2)
    ids, scores = top_k(h, kernel, 3, bias=bias, exclude=exclude)
    exact = [np.asarray(x, np.float64) for x in (h, kernel, bias)]
    want = (exact[0] @ exact[1].T + exact[2])[:, :items]
    seen = matrices.oracle(dataclasses.replace(exclude, data=None)) != 0
    want_ids, want = full_sort(np.where(seen, -np.inf, want), 3)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(scores, want)


def test_explicit_zeros_exclude_too():
    exclude = CSR(jnp.zeros(1), jnp.int32([0]), jnp.int32([0, 1]), num_cols=2)
    ids, _ = top_k(jnp.ones((1, 1)), jnp.float32([[2], [1]]), 1, exclude=exclude)
    assert ids[0, 0] == 1


def test_exclusion_and_denial_win_over_nan():
    kernel = jnp.ones((5, 1))
    exclude = CSR(None, jnp.int32([0, 2]), jnp.int32([0, 2, 2]), num_cols=5)
    bias = jnp.float32([0, 0, 0, -jnp.inf, 0])
    h = jnp.float32([[jnp.nan], [jnp.inf]])
    ids, scores = top_k(h, kernel, 5, bias=bias, exclude=exclude)
    assert ids.tolist() == [[1, 4, -1, -1, -1], [0, 1, 2, 4, -1]]
    assert jnp.isnan(scores[0, :2]).all()
    np.testing.assert_array_equal(scores[0, 2:], -np.inf)
    np.testing.assert_array_equal(scores[1], [np.inf] * 4 + [-np.inf])


def test_a_score_of_zero_has_a_gradient():
    def best(h):
        return top_k(h, jnp.float32([[1.0, 1.0], [-3.0, 2.0]]), 1)[1].sum()

    np.testing.assert_array_equal(jax.grad(best)(jnp.float32([[1, -1]])), [[1, 1]])


def test_all_items_excluded():
    exclude = CSR.from_scipy(matrices.random_csr(3, 40, 1.0).to_scipy())
    h, kernel, bias, _ = layer(3, 40)
    ids, scores = top_k(
        h, kernel, 50, bias=bias, exclude=jax.tree.map(jnp.asarray, exclude)
    )
    assert (ids == -1).all() and (scores == -jnp.inf).all()


@pytest.mark.parametrize("bad", [-1, 6, 7, 2**31 - 1])
def test_broken_exclusion_gives_nan(bad):
    h, kernel, bias, _ = layer(3, 6, extra_rows=2)
    exclude = CSR(None, jnp.int32([1, bad, 2]), jnp.int32([0, 1, 2, 3]), num_cols=6)
    _, scores = top_k(h, kernel, 2, bias=bias, exclude=exclude)
    assert jnp.isnan(scores).all(1).tolist() == [False, True, False]
    exclude = CSR(None, jnp.int32([1, 4, 2]), jnp.int32([0, 1, 4, 4]), num_cols=6)
    _, scores = top_k(h, kernel, 2, bias=bias, exclude=exclude)
    assert jnp.isnan(scores).all(1).tolist() == [False, True, True]


def test_num_items_leaves_padding_rows_out():
    kernel = jnp.arange(8.0)[:, None]
    ids, _ = top_k(jnp.ones((1, 1)), kernel, 3, num_items=6)
    assert ids.tolist() == [[5, 4, 3]]
    ids, _ = top_k(jnp.ones((1, 1)), kernel, 9)
    assert ids.tolist() == [[7, 6, 5, 4, 3, 2, 1, 0, -1]]


def test_memory_does_not_grow_with_the_number_of_items():
    def temporaries(items):
        shapes = [(256, 4), (items, 4), (items,)]
        operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return temporary_bytes(lambda h, k, bias: top_k(h, k, 10, bias=bias), *operands)

    few, many = temporaries(2**14), temporaries(2**17)
    assert 0 < few < 2**26
    assert many - few < 8 * (2**17 - 2**14) * 4


@pytest.mark.parametrize(
    ("shape", "axes", "batch"),
    [
        ((2, 4), ("data", "model"), 8),
        ((2, 4), ("data", "model"), 3),
        ((8,), ("model",), 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_spec", [True, False], ids=["shard_map", "partitioner"])
def test_sharded_by_items_equals_unsharded(shape, axes, batch, with_spec):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    # Ties, and more padding than a device has rows.
    operands = layer(batch, 900, hidden=2, extra_rows=124)
    exclude = matrices.random_csr(batch, 900, 0.3)
    spec = P("model") if with_spec else None
    tuning = FINE._replace(chunk_scores=8 * 128)
    options = {"k": 130, "exclude": exclude, "num_items": 900, "tuning": tuning}

    @jax.jit
    def function(h, kernel, bias, scale):
        return top_k_tuned(h, kernel, bias, scale=scale, kernel_spec=spec, **options)

    h, kernel, bias, scale = operands
    want = top_k_tuned(h, kernel, bias, scale=scale, **options)
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
    rows = "data" if "data" in axes and batch % 2 == 0 else None
    sharded = [
        jax.device_put(x, NamedSharding(mesh, P(axis)))
        for x, axis in zip(operands, [rows, *["model"] * 3], strict=True)
    ]
    with jax.set_mesh(mesh):
        got = function(*sharded)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_wrong_arguments_are_refused():
    function = inspect.unwrap(top_k)  # past the checks of its annotations
    h, kernel, bias, _ = layer(3, 30, extra_rows=2)
    exclude = matrices.random_csr(3, 30)
    for k in (0, -1, 2.0, "3"):
        with pytest.raises(ValueError, match="k must be an integer and at least 1"):
            function(h, kernel, k, bias=bias)
    assert function(h, kernel, np.int64(2), bias=bias)[0].shape == (3, 2)
    with pytest.raises(ValueError, match="exclude has 30 columns but num_items is 31"):
        function(h, kernel, 1, bias=bias, exclude=exclude, num_items=31)
    with pytest.raises(
        ValueError, match="exclude has 33 columns but the kernel has 32"
    ):
        function(
            h, kernel, 1, bias=bias, exclude=dataclasses.replace(exclude, num_cols=33)
        )
    with pytest.raises(ValueError, match="exclude has 3 rows but h has 2"):
        function(h[:2], kernel, 1, bias=bias, exclude=exclude)
    for num_items in (0, 33):
        with pytest.raises(ValueError, match="num_items must be between 1 and"):
            function(h, kernel, 1, bias=bias, num_items=num_items)
    with pytest.raises(TypeError, match="cast one"):
        function(h.astype(jnp.bfloat16), kernel, 1, bias=bias)
    with pytest.raises(ValueError, match="bias has shape"):
        function(h, kernel, 1, bias=bias[:3])
    with pytest.raises(ValueError, match='"cusparse" or "mosaic_gpu", got'):
        function(h, kernel, 1, bias=bias, implementation="triton")
    with pytest.raises(ValueError, match='"high" or "default", got \'tf32\''):
        function(h, kernel, 1, bias=bias, precision="tf32")


# The kernel, under the same function


def whole_numbers(batch, items, *, hidden=64, extra_rows=0, seed=0):
    """Operands whose scores are small integers: exact, and with many ties."""
    rng = np.random.default_rng(seed)
    h = rng.integers(-2, 3, (batch, hidden)) * (rng.random((batch, hidden)) < 0.2)
    kernel = rng.integers(-2, 3, (items + extra_rows, hidden))
    return jnp.asarray(h, jnp.bfloat16), jnp.asarray(kernel, jnp.bfloat16)


@pytest.mark.parametrize(
    ("k", "plain", "again"),
    [
        (5, False, False),
        (800, True, False),
        (1, True, True),
        (5, False, True),
        (800, True, True),
    ],
)
def test_kernel_equals_a_full_sort(k, plain, again):
    # Two chunks, with a k of 5. With 800, one that is no whole number of wide tiles.
    tuning = module.CPU._replace(chunk_scores=1, whole=0, written=0 if again else 2**20)
    items = 700 if k == 800 else 500
    h, kernel = whole_numbers(5, items, extra_rows=-items % 256)
    h = h.at[1].set(0)
    want = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64)[:items].T
    exclude = bias = scale = None
    if not plain:
        h = h.at[3, 5].set(jnp.nan)
        rng = np.random.default_rng(1)
        scale, bias = (jnp.float32(rng.integers(-3, 4, 512)) for _ in range(2))
        bias = bias.at[90:120].set(-jnp.inf)
        want = want * np.asarray(scale)[:items] + np.asarray(bias)[:items]
        want[3] = np.nan
        exclude = matrices.random_csr(5, items)
        denied = matrices.oracle(dataclasses.replace(exclude, data=None)) != 0
        want[denied | (np.arange(items) // 30 == 3)] = -np.inf
    with kernel_can_run():
        ids, scores = top_k_tuned(
            h,
            kernel,
            bias,
            k,
            scale=scale,
            exclude=exclude,
            num_items=items,
            implementation="mosaic_gpu",
            tuning=tuning,
        )
    want_ids, want = full_sort(want, k)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(scores, want)


@pytest.mark.parametrize("kernel_spec", [None, P("model")])
@pytest.mark.parametrize("again", [False, True])
def test_kernel_lowers_for_cuda(kernel_spec, again):
    tuning = module.CPU._replace(written=0 if again else 2**20)
    h, kernel = whole_numbers(4, 1024)
    exclude = matrices.random_csr(4, 1024)
    mesh = contextlib.nullcontext()
    if kernel_spec is not None:
        mesh = jax.set_mesh(sj.make_mesh(data=2, model=2))
    with mesh:

        def function(h, kernel, bias, exclude):
            return top_k_tuned(
                h,
                kernel,
                bias,
                3,
                scale=bias,
                exclude=exclude,
                num_items=1024,
                kernel_spec=kernel_spec,
                implementation="mosaic_gpu",
                tuning=tuning,
            )

        traced = jax.jit(function).trace(h, kernel, jnp.ones(1024), exclude)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


def test_what_the_kernel_cannot_do():
    h, kernel = whole_numbers(4, 300)
    with pytest.raises(NotImplementedError, match='multiple of 256 rows.* use "xla"'):
        top_k(h, kernel, 3, implementation="mosaic_gpu")
    h, kernel = (x.astype(jnp.float32) for x in whole_numbers(4, 256))
    with pytest.raises(NotImplementedError, match='float32; use "xla"'):
        top_k(h, kernel, 3, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 100, 2048])
def test_kernel_equals_xla_at_real_sizes(k):
    items = 300_000
    h, kernel = whole_numbers(700, items, hidden=256, extra_rows=32)
    exclude = matrices.random_csr(700, items, 0.001)
    results = [
        top_k(h, kernel, k, exclude=exclude, implementation=implementation)
        for implementation in ("xla", "mosaic_gpu")
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
