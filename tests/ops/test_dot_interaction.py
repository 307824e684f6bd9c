"""dot_interaction and its gradient against NumPy in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import kernel_can_run

import sparsejax as sj
from sparsejax.ops import implementations
from sparsejax.ops.dot_interaction import blank_vectors, dot_interaction

# Examples, vectors, blank ones of them, width; and the form.
CASES = [
    (3, 4, 0, 5, "xla"),
    (3, 7, 2, 5, "xla"),
    (4, 16, 0, 16, "mosaic_gpu"),
    (2, 32, 5, 16, "mosaic_gpu"),
]


def make(batch, vectors, blank, dim):
    rng = np.random.default_rng(vectors)
    rows = rng.standard_normal((batch, vectors, dim))
    rows[:, 1 : 1 + blank] = 0
    count = (vectors - blank) * (vectors - blank - 1) // 2
    slopes = rng.standard_normal((batch, dim + count))
    return [np.asarray(jnp.bfloat16(x), np.float64) for x in (rows, slopes)]


def oracle(rows, slopes, blank):
    """The results, and the gradients of the vectors; that of the first vector is separate."""
    _, vectors, dim = rows.shape
    pairs = itertools.combinations([0, *range(1 + blank, vectors)], 2)
    found, gradient = [rows[:, 0]], np.zeros_like(rows)
    for k, (i, j) in enumerate(pairs):
        found.append(np.sum(rows[:, i] * rows[:, j], axis=1)[:, None])
        gradient[:, i] += slopes[:, dim + k, None] * rows[:, j]
        gradient[:, j] += slopes[:, dim + k, None] * rows[:, i]
    return np.concatenate(found, axis=1), gradient, slopes[:, :dim]


def run(rows, slopes, blank, form):
    """Computes the results of `oracle` by an implementation; further columns are 0."""
    dtype = jnp.bfloat16 if form == "mosaic_gpu" else jnp.float32
    rows, slopes = jnp.asarray(rows, dtype), jnp.asarray(slopes, dtype)

    @jax.jit
    def both(rows, slopes):
        def call(rows, first):
            return dot_interaction(rows, first, blank=blank, implementation=form)

        found, pull = jax.vjp(call, rows, rows[:, 0])
        more = found.shape[1] - slopes.shape[1]
        slopes = jnp.pad(slopes, ((0, 0), (0, more)), constant_values=9)
        return found, pull(slopes)

    with kernel_can_run():
        found, (of_rows, of_first) = both(rows, slopes)
    assert not np.any(found[:, slopes.shape[1] :])
    return [
        np.asarray(x, np.float64)
        for x in (found[:, : slopes.shape[1]], of_rows, of_first)
    ]


@pytest.mark.parametrize(("batch", "vectors", "blank", "dim", "form"), CASES)
def test_equals_the_oracle(batch, vectors, blank, dim, form):
    """Blank vectors have no pairs, and no gradient."""
    rows, slopes = make(batch, vectors, blank, dim)
    bound = 2**-7 if form == "mosaic_gpu" else 1e-5
    want = oracle(rows, slopes, blank)
    for found, exact in zip(run(rows, slopes, blank, form), want, strict=True):
        np.testing.assert_allclose(found, exact, rtol=bound, atol=bound)


def test_without_a_first_vector():
    rows, _ = make(4, 16, 0, 16)
    want = oracle(rows, np.zeros((4, 136)), 0)[0][:, 16:]
    with kernel_can_run():
        for form, count in (("xla", 120), ("mosaic_gpu", 128)):
            found = jax.jit(dot_interaction, static_argnames="implementation")(
                jnp.bfloat16(rows), None, implementation=form
            )
            assert found.shape == (4, count)
            np.testing.assert_allclose(
                np.asarray(found[:, :120], np.float64), want, rtol=2**-7, atol=2**-7
            )


@pytest.mark.parametrize(
    ("batch", "vectors", "dim", "dtype", "fault"),
    [
        (4, 16, 16, "float32", "bfloat16 vectors, not float32"),
        (4, 24, 16, "bfloat16", "16, 32, 48 or 64 vectors of an example, not 24"),
        (4, 16, 24, "bfloat16", "a multiple of 16 numbers up to 256, not 24"),
        (6, 16, 16, "bfloat16", "a multiple of 4 examples, not 6"),
    ],
)
def test_what_the_program_does_not_take(monkeypatch, batch, vectors, dim, dtype, fault):
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)
    rows = jnp.zeros((batch, vectors, dim), dtype)
    assert dot_interaction(rows, None).shape == (batch, vectors * (vectors - 1) // 2)
    with pytest.raises(NotImplementedError, match=fault):
        dot_interaction(rows, None, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("dtype", "form", "blank"),
    [("float32", "xla_gpu", 1), ("float32", None, 0), ("bfloat16", None, 5)],
)
def test_how_many_vectors_products_are_fast_with(dtype, form, blank):
    """A CPU would multiply blank vectors for nothing."""
    assert blank_vectors(jnp.zeros((4, 16), dtype), 27, form) == blank


def test_lowers_for_cuda_on_a_mesh(monkeypatch):
    """Each device makes the products of its own examples."""
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        for batch, programs in ((16, 2), (8, 0)):
            blank = blank_vectors(jnp.zeros((batch, 16), "bfloat16"), 27)
            assert blank == 5  # also a multiple of 8
            rows = jax.ShapeDtypeStruct((batch, 27 + blank, 16), "bfloat16")
            first = jax.ShapeDtypeStruct((batch, 16), "bfloat16")

            def loss(rows, first, blank=blank):
                return jnp.sum(dot_interaction(rows, first, blank=blank)[:, 1:])

            made = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(rows, first)
            text = made.lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("custom_call @mosaic_gpu") == programs, batch
