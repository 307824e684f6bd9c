"""`coarse_top_k` against a full sort, and its bounds against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import matrices
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import kernel_can_run

from sparsejax.ops import coarse_top_k as module
from sparsejax.ops.coarse_top_k import CoarseItems, coarse_top_k
from sparsejax.ops.top_k import top_k_tuned
from sparsejax.sparse import CSR

BATCH, ITEMS, ROWS, HIDDEN, K = 5, 1000, 1024, 128, 3


def full_sort(scores, k):
    """Ids and scores by descending score, then ascending id; the id is -1 if only -inf is left."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(scores, order, axis=1)
    return np.where(found == -np.inf, -1, order), found


def operands(*, with_all: bool) -> tuple[Any, ...]:
    """h, kernel, bias, scale, exclude, and the scores in float64."""
    rng = np.random.default_rng(0)
    h, kernel = (
        jnp.asarray(rng.standard_normal((rows, HIDDEN)), jnp.bfloat16)
        for rows in (BATCH, ROWS)
    )
    h = h.at[1].set(0)  # a row of zeros, as what fills up a batch
    kernel = kernel.at[700].set(kernel[20])  # a tie
    scores = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64)[:ITEMS].T
    exclude = matrices.random_csr(BATCH, ITEMS)
    bias = scale = None
    if with_all:
        bias, scale = (
            jnp.asarray(rng.standard_normal(ROWS), jnp.float32) for _ in range(2)
        )
        bias = bias.at[90:120].set(-jnp.inf)
        scores *= np.asarray(scale, np.float64)[:ITEMS]
        scores += np.asarray(bias, np.float64)[:ITEMS]
    seen = CSR(None, exclude.indices, exclude.indptr, num_cols=ITEMS)
    scores[matrices.oracle(seen) != 0] = -np.inf
    return h, kernel, bias, scale, seen, scores


def found(h, kernel, bias, scale, seen, *, k=K, implementation):
    coarse = CoarseItems.of(kernel, scale)
    options = {"scale": scale, "exclude": seen, "implementation": implementation}
    with kernel_can_run():
        return coarse_top_k(h, kernel, k, bias=bias, coarse=coarse, **options)


@pytest.fixture
def in_chunks(monkeypatch):
    """Sets chunks of 512 items in the GPU program, the size of its tiles; else of 256."""
    for name in ("CPU", "GPU"):
        small = getattr(module, name)._replace(chunk_scores=320)
        monkeypatch.setattr(module, name, small)

    def whole(*operands, implementation, **options):
        return top_k_tuned(*operands, implementation="xla", **options)

    # What is traced for answers that are not proved; to interpret it takes long.
    monkeypatch.setattr(module, "top_k_tuned", whole)
    jax.clear_caches()


@pytest.mark.parametrize("with_all", [False, True])
def test_equals_a_full_sort(with_all):
    *given, scores = operands(with_all=with_all)
    ids, got, whole = found(*given, implementation="xla")
    want_ids, want = full_sort(scores, K)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not whole


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_chunks_are_joined(implementation, in_chunks):
    *given, scores = operands(with_all=True)
    ids, got, whole = found(*given, implementation=implementation)
    want_ids, want = full_sort(scores, K)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not whole


@pytest.mark.parametrize("k", [200, 1100])
def test_where_all_items_are_candidates_or_run_out(k):
    *given, scores = operands(with_all=True)
    ids, _, whole = found(*given, k=k, implementation="xla")
    want = np.pad(
        full_sort(scores, k)[0], ((0, 0), (0, max(0, k - ITEMS))), constant_values=-1
    )
    np.testing.assert_array_equal(ids, want)
    assert not whole


def test_many_items_of_zeros_are_no_reason_to_read_all():
    h, kernel, bias, scale, seen, _ = operands(with_all=False)
    kernel = kernel.at[100:].set(0)
    scores = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64)[:ITEMS].T
    scores[matrices.oracle(seen) != 0] = -np.inf
    ids, got, whole = found(h, kernel, bias, scale, seen, implementation="xla")
    want_ids, want = full_sort(scores, K)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not whole


@pytest.mark.parametrize("bad", ["ties", "nan", "outside"])
def test_what_is_not_proved_is_answered_by_all_items(bad):
    h, kernel, bias, scale, seen, scores = operands(with_all=False)
    if bad == "ties":
        # All scores of a row are within its margin, and some are equal.
        kernel = jnp.ones_like(kernel).at[::7, 3].set(1.0078125)
        scores = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64)[:ITEMS].T
        scores[matrices.oracle(seen) != 0] = -np.inf
    elif bad == "nan":
        h = h.at[2, 5].set(jnp.nan)
    else:
        kernel = kernel.at[3, 3].set(jnp.inf)
    ids, got, whole = found(h, kernel, bias, scale, seen, implementation="xla")
    assert whole
    want = module.top_k_tuned(
        h, kernel, bias, K, exclude=seen, num_items=ITEMS, tuning=module.CPU
    )
    np.testing.assert_array_equal(ids, want[0])
    np.testing.assert_array_equal(got, want[1])
    if bad == "ties":
        np.testing.assert_array_equal(ids, full_sort(scores, K)[0])


@given(
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.0, 1.0, 8.0, 30.0]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_no_score_is_above_its_bound(seed, spread, dtype):
    """Also of vectors whose numbers are of many sizes, and of single numbers."""
    rng = np.random.default_rng(seed)

    def drawn(rows):
        sizes = 2.0 ** rng.normal(0, spread, (rows, 16)).clip(-100, 60)
        made = rng.standard_normal((rows, 16)) * sizes * (rng.random((rows, 16)) < 0.5)
        return jnp.asarray(made, dtype)

    h, kernel = drawn(6), drawn(32)
    scale = jnp.asarray(rng.standard_normal(32), jnp.float32)
    coarse = CoarseItems.of(kernel, scale)
    bounds = module._Bounds.of(h, coarse)
    margin, unit = (np.asarray(x)[:, None] for x in bounds.margins)
    products = (
        np.asarray(bounds.values, np.float32) @ np.asarray(coarse.values, np.float32).T
    )
    bound = (products + margin) * unit * np.asarray(coarse.scale)
    exact, x, factor = (np.asarray(a, np.float64) for a in (h, kernel, scale))
    assert (exact @ x.T * factor <= bound).all()
    in_float32 = np.asarray(h, np.float32) @ np.asarray(kernel, np.float32).T
    assert (in_float32 * np.asarray(scale) <= bound).all()


def test_kernel_lowers_for_cuda():
    *given, _ = operands(with_all=True)

    def function(h, kernel, bias, scale, seen):
        coarse = CoarseItems.of(kernel, scale)
        return coarse_top_k(
            h,
            kernel,
            K,
            bias=bias,
            coarse=coarse,
            scale=scale,
            exclude=seen,
            implementation="mosaic_gpu",
        )

    text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "xi8>" in text and "custom_call @mosaic_gpu" in text


def test_what_the_kernel_cannot_do():
    *given, _ = operands(with_all=False)
    h, kernel, *rest = given
    with pytest.raises(
        NotImplementedError, match='multiples of 128, not 64; use "xla"'
    ):
        found(h[:, :64], kernel[:, :64], *rest, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [64, 200])
def test_same_bits_as_top_k_at_real_sizes(batch):
    rng = np.random.default_rng(1)
    h, kernel = (
        jnp.asarray(rng.standard_normal((rows, 256)), jnp.bfloat16)
        for rows in (batch, 300_032)
    )
    seen = matrices.random_csr(batch, 300_000, 0.001)
    seen = CSR(None, seen.indices, seen.indptr, num_cols=300_000)
    coarse = CoarseItems.of(kernel, None)
    ids, scores, whole = coarse_top_k(
        h,
        kernel,
        100,
        coarse=coarse,
        scale=None,
        exclude=seen,
        implementation="mosaic_gpu",
    )
    want = module.top_k_tuned(
        h,
        kernel,
        None,
        100,
        exclude=seen,
        num_items=300_000,
        implementation="mosaic_gpu",
        tuning=module.GPU,
    )
    assert not whole
    np.testing.assert_array_equal(ids, want[0])
    np.testing.assert_array_equal(scores, want[1])
