"""Products of pairs of vectors and their gradient: interpreted on a CPU, and on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dot_interaction as mosaic


def make(batch, vectors, dim, count):
    """Vectors, gradients, and columns to compute: a 0, two elements, then some pairs."""
    rng = np.random.default_rng(vectors)
    rows = rng.standard_normal((batch, vectors, dim))
    pairs = rng.permutation(np.flatnonzero(np.triu(np.ones((vectors, vectors)), 1)))
    places = np.full(mosaic.columns_for(count + 3, vectors), -1)
    places[1:3] = -2 - 5, -2 - (dim - 1)
    places[3 : count + 3] = pairs[:count]
    slopes = rng.standard_normal((batch, len(places)))
    return jnp.bfloat16(rows), places, jnp.bfloat16(slopes)


# Four examples a tile, two, and one that does not fill it; a program has one tile, or three
# and two.
@pytest.mark.parametrize(
    ("batch", "vectors", "dim", "count"),
    [(8, 16, 48, 100), (22, 32, 16, 351), (2, 48, 128, 500), (3, 64, 64, 2016)],
)
def test_products_and_slopes(run_program, monkeypatch, batch, vectors, dim, count):
    monkeypatch.setattr(mosaic, "_MOST_PROGRAMS", 2)
    rows, places, slopes = make(batch, vectors, dim, count)
    used = np.flatnonzero(places >= 0)
    first, second = np.divmod(places[used], vectors)
    columns = np.full((vectors, vectors), -1)
    columns[first, second] = columns[second, first] = used

    def call(rows, slopes):
        found = mosaic.products(rows, jnp.int32(places))
        return found, mosaic.slopes_of_rows(rows, slopes, jnp.int32(columns))

    found, gradient = run_program(call, rows, slopes)
    assert found.dtype == gradient.dtype == jnp.bfloat16
    rows, slopes = (np.asarray(x, np.float64) for x in (rows, slopes))
    want = np.zeros(slopes.shape)
    want[:, 1], want[:, 2] = rows[:, 0, 5], rows[:, 0, -1]
    want[:, used] = np.sum(rows[:, first] * rows[:, second], axis=2)
    bound = {"rtol": 2**-8, "atol": 1e-4}
    np.testing.assert_allclose(found.astype(np.float64), want, **bound)
    want = np.zeros(rows.shape)
    for k, i, j in zip(used, first, second, strict=True):
        want[:, i] += slopes[:, k, None] * rows[:, j]
        want[:, j] += slopes[:, k, None] * rows[:, i]
    np.testing.assert_allclose(gradient.astype(np.float64), want, **bound)
