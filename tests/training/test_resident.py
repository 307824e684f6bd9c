"""Training data on the devices, and the batches that are taken from it."""

import jax
import numpy as np
import pytest
import scipy.sparse

from sparsejax.engine.train import resident
from sparsejax.engine.train.dispatch import epoch_order
from sparsejax.engine.train.resident import Examples, Resident
from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.mesh.layout import make_mesh
from sparsejax.sparse import CSR

SHAPES = [(1, 1), (2, 4), (8, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_on_a_mesh(shape):
    rng = np.random.default_rng(0)
    x = scipy.sparse.random_array((300, 700), density=0.02, rng=rng).tocsr()
    y = scipy.sparse.random_array((300, 90), density=0.05, rng=rng) > 0
    weights = rng.random(300)
    examples = Examples.of(x, y, weights)
    with jax.set_mesh(make_mesh(data=shape[0], model=shape[1])):
        data = Resident.of(examples)
        rows = epoch_order(jax.random.key(0), 0, 300, 128, shape[0])
        needed = [int(n) for n in jax.jit(Resident.needed)(data, rows)]
        take = jax.jit(lambda d, r: (d.take(r, tuple(needed)), d.means(r)))
        taken, means = take(data, rows)
    flat = np.asarray(rows).reshape(len(rows), -1)
    for matrix, stack, room in zip((x, y), taken, needed, strict=True):
        ends = np.asarray(stack.blocks.indptr)[..., -1]
        assert ends.shape == (len(rows), *shape) and ends.max() == room
        for i, drawn in enumerate(flat):
            dense = np.where(drawn[:, None] >= 0, matrix.toarray()[drawn], 0)
            np.testing.assert_allclose(dense_of(stack, i), dense, rtol=1e-6)
    exists = flat >= 0
    expected = np.where(exists, weights[flat], 0) / exists.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(means, expected, rtol=1e-6)


def dense_of(stack: ShardedCSR, step: int) -> np.ndarray:
    """One matrix of a stack, with its blocks next to each other."""
    blocks = jax.tree.map(lambda leaf: np.asarray(leaf)[step], stack.blocks)
    data, model = blocks.indptr.shape[:2]
    dense = np.block(
        [
            [
                jax.tree.map(lambda leaf, d=d, m=m: leaf[d, m], blocks)
                .to_scipy()
                .toarray()
                for m in range(model)
            ]
            for d in range(data)
        ]
    )
    return dense[:, : stack.num_cols]


def test_the_fingerprint_knows_no_mesh():
    x = scipy.sparse.csr_array(np.tri(5, 4))
    before = Examples.of(x, None, np.ones(5)).fingerprint()
    with jax.set_mesh(make_mesh(data=2, model=2)):
        examples = Examples.of(x, None, np.ones(5))
        Resident.of(examples)
        assert examples.fingerprint() == before
    assert Examples.of(x, None, None).fingerprint() != before
    assert Examples.of(2 * x, None, np.ones(5)).fingerprint() != before


def test_uneven_columns_are_worth_a_warning(monkeypatch):
    matrix = CSR.from_scipy(scipy.sparse.csr_array(np.tri(64, 512)))
    monkeypatch.setattr(resident, "MANY_ENTRIES", 100)
    with (
        jax.set_mesh(make_mesh(data=1, model=4)),
        pytest.warns(
            UserWarning, match=r"4\.0 times the mean of the entries of inputs"
        ),
    ):
        Resident.of(Examples.of(matrix, None, None))
