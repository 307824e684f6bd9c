"""The AUC from histograms, compared with the exact AUC."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sparsejax import metrics
from sparsejax.mesh.layout import make_mesh

update = jax.jit(metrics.BinnedAuc.update)


def examples(n=4096):
    rng = np.random.default_rng(0)
    scores = 2 * rng.normal(size=n).astype(np.float32)
    labels = rng.random(n) < 1 / (1 + np.exp(2 - scores))
    return scores, labels.astype(np.float32)


@pytest.mark.parametrize("bins", [1, 7, 2**16])
def test_the_exact_one_is_within_the_bound(bins):
    scores, labels = examples()
    binned = metrics.BinnedAuc.empty(-3.0, 3.0, bins=bins)  # not all scores fit
    for part in np.split(np.arange(4096), 4):
        binned = update(binned, scores[part], labels[part])
    assert binned.counts().sum() == 4096
    exact = metrics.auc(scores, labels)
    found = binned.result()
    assert abs(found.auc - exact) <= found.error + 1e-12
    low, high = {1: (0.5, 0.5), 7: (0.04, 0.2), 2**16: (0.001, 0.01)}[bins]
    assert low <= found.error <= high
    edges = np.clip(np.floor((scores + 3) * (bins / 6)), 0, bins - 1)
    assert found.auc == pytest.approx(metrics.auc(edges, labels), abs=1e-9)


def test_what_does_not_count():
    scores, labels = examples(64)
    where = np.arange(64) % 3 > 0
    padded = np.where(where, scores, np.nan)
    empty = metrics.BinnedAuc.empty()
    alone = update(empty, scores[where], labels[where])
    np.testing.assert_array_equal(
        update(empty, padded, labels, where=where).counts(), alone.counts()
    )
    for wrong in ((padded, labels), (scores, labels + 0.5 * ~where)):
        with pytest.raises(ValueError, match="22 examples have a score that is NaN"):
            update(empty, *wrong).result()
    with pytest.raises(ValueError, match="of 64 examples 0 are clicks"):
        update(empty, scores, labels * 0).result()


def test_counts_beyond_31_bits_add_up():
    start = metrics.BinnedAuc.empty(0.0, 1.0, bins=2)
    many = jnp.array([[2**20 - 1, 5], [7, 2**20 - 1]], jnp.int32)
    full = metrics.BinnedAuc(many, many * 0 + 2**20, jnp.int32(0), 0.0, 1.0)
    one = update(start, np.array([0.1, 0.9]), np.array([0, 1]))
    both = full + one
    expected = 2**40 + np.array([[2**20, 5], [7, 2**20]])
    np.testing.assert_array_equal(both.counts(), expected)
    again = update(full, np.array([0.1, 0.9]), np.array([0, 1]))
    np.testing.assert_array_equal(again.counts(), expected)
    with pytest.raises(ValueError, match="histograms with other bins"):
        full + metrics.BinnedAuc.empty(0.0, 1.0, bins=3)


@pytest.mark.parametrize("bounds", [(1.0, 1.0, 4), (0.0, np.inf, 4), (0.0, 1.0, 0)])
def test_errors(bounds):
    start, stop, bins = bounds
    with pytest.raises(ValueError, match="must be"):
        metrics.BinnedAuc.empty(start, stop, bins=bins)


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(explicit):
    scores, labels = examples(1024)
    empty = metrics.BinnedAuc.empty(bins=64)
    expected = update(empty, scores, labels).counts()
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = (
        jax.make_mesh((4, 2), ("data", "model"), kinds)
        if explicit
        else make_mesh(data=4, model=2)
    )
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, P("data"))
        batch = jax.device_put((scores, labels), rows)
        empty = jax.device_put(empty, jax.NamedSharding(mesh, P()))
        np.testing.assert_array_equal(update(empty, *batch).counts(), expected)
        if explicit:
            return

        @jax.jit
        @functools.partial(
            jax.shard_map, in_specs=P("data"), out_specs=P(), check_vma=False
        )
        def by_hand(scores, labels):
            return jax.lax.psum(empty_on_host.update(scores, labels), "data")

        empty_on_host = metrics.BinnedAuc.empty(bins=64)
        np.testing.assert_array_equal(by_hand(*batch).counts(), expected)
