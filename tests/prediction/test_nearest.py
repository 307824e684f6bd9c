"""The nearest vectors, against a full sort in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax as sj


def expected(queries, vectors, k, metric):
    q, v = np.asarray(queries, np.float64), np.asarray(vectors, np.float64)
    if metric == "cosine":
        q, v = (
            a / np.maximum(np.linalg.norm(a, axis=1)[:, None], 1e-30) for a in (q, v)
        )
    scores = q @ v.T
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return ids, np.take_along_axis(scores, ids, axis=1)


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("meshed", [False, True])
def test_all_pairs_are_scored(metric, meshed):
    rng = np.random.default_rng(0)
    # Small integers: no rounding, so ties have an order.
    queries = rng.integers(-3, 4, (70, 5)).astype(np.float32)
    vectors = rng.integers(-3, 4, (300, 5)).astype(np.float32)
    queries[3] = vectors[7] = 0
    mesh = sj.make_mesh(data=1, model=8 if meshed else 1)
    with jax.set_mesh(mesh):
        found = sj.nearest(queries, vectors, 9, metric=metric, batch_size=32)
    ids, scores = expected(queries, vectors, 9, metric)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-6)
    if metric == "dot":
        np.testing.assert_array_equal(found.ids, ids)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    rng = np.random.default_rng(0)
    queries, vectors = rng.normal(size=(2, 20, 8))
    found = sj.nearest(queries, vectors, 3, dtype=dtype)
    rounded = [np.asarray(a, dtype).astype(np.float64) for a in (queries, vectors)]
    ids, scores = expected(rounded[0], rounded[1], 3, "dot")
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)


def test_few_vectors_and_no_queries():
    found = sj.nearest(np.ones((1, 2)), np.ones((3, 2)), 5)
    assert found.ids.tolist() == [[0, 1, 2, -1, -1]]
    assert np.isneginf(found.scores[0, 3:]).all()
    assert sj.nearest(np.ones((0, 2)), np.ones((3, 2)), 5).ids.shape == (0, 5)
    large = sj.nearest([[1e30, 0]], [[1e30, 1e30]], 1, metric="cosine")
    np.testing.assert_allclose(large.scores, [[0.5**0.5]], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [[1.0]]), "queries must be"),
        (([[1.0]], np.ones((0, 1))), "1 or more"),
        (([[1.0]], [[1.0, 2.0]]), r"\[1, 1\] and \[1, 2\]"),
        (([[1.0]], [[np.nan]]), "row 0 of vectors"),
        (([[1.0]], [[1.0]], 0), "k must be at least 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sj.nearest(*arguments)
    with pytest.raises(ValueError, match="float16"):
        sj.nearest([[1.0]], [[1e6]], dtype=jnp.float16)
