"""The places of the largest numbers against NumPy: interpreted on a CPU, and on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import selection


def test_integers_order_as_numbers_do():
    some = [-np.inf, -3e38, -1, -1e-45, 0, 1e-45, 1, 3e38, np.inf, np.nan]
    rising = np.array(some, np.float32)
    keys = np.asarray(selection.in_order(jnp.asarray(rising)))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    others = selection.in_order(jnp.float32([-0.0, -np.nan]))
    np.testing.assert_array_equal(others, keys[[4, -1]])


@pytest.mark.parametrize("count", [5, 300, 20_000])
def test_parting(run_program, count):
    rng = np.random.default_rng(4)
    numbers = rng.standard_normal((4, count)).astype(np.float32)
    numbers[0, ::2] = np.nan
    numbers[1] = rng.choice([0.0, -0.0, np.inf, -np.inf, -np.nan], count)
    numbers[2] = rng.integers(0, 3, count)
    numbers[3, 1:] = -np.inf
    keys = np.asarray(selection.in_order(jnp.asarray(numbers)))
    for k in (1, 5):
        got = run_program(lambda x, k=k: selection.parting(x, k), jnp.asarray(numbers))
        assert ((keys > got[:, None]).sum(1) <= k).all()
        assert ((keys >= got[:, None]).sum(1) >= k).all()


# The last one is put into groups of neighbours first.
@pytest.mark.parametrize(
    ("count", "k", "many"),
    [(count, k, 2**14) for count in (33, 300) for k in (1, 31, 100)] + [(300, 1, 100)],
)
def test_places_of_the_best(run_program, monkeypatch, count, k, many):
    monkeypatch.setattr(selection, "_MANY", many)
    rng = np.random.default_rng(6)
    special = [-np.inf, 0.0, -0.0, np.inf, np.nan]
    numbers = np.stack(
        [
            rng.standard_normal(count),
            rng.integers(0, 3, count),
            rng.choice(special, count),
            np.full(count, np.nan),
            np.full(count, -np.inf),
            np.eye(count)[7],
        ]
    ).astype(np.float32)
    got = run_program(lambda x: selection.best_places(x, k), jnp.asarray(numbers))
    missing = np.isnan(numbers)
    order = np.lexsort((-np.where(missing, 0, numbers), ~missing), axis=1)
    np.testing.assert_array_equal(got, np.sort(order[:, :k], axis=1))


def test_groups_within_groups(run_program):
    rng = np.random.default_rng(7)
    inner = rng.integers(0, 50, (4, 320)).astype(np.float32)
    outer = inner.reshape(4, -1, 8).max(2)

    def call(maxima, numbers):
        return selection.best_places_inside(maxima, numbers, 20)

    got = run_program(call, jnp.asarray(outer), jnp.asarray(inner))
    want = np.argsort(-inner, axis=1, stable=True)[:, :20]
    np.testing.assert_array_equal(got, np.sort(want, axis=1))
