"""The order of training on a mesh and off it: the same batches, each row at home."""

import jax
import numpy as np
import pytest
import scipy.sparse

from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.mesh.layout import make_mesh
from sparsejax.sparse import CSR
from sparsejax.training import resident
from sparsejax.training.resident import (
    Examples,
    Resident,
    epoch_order,
    home_rows,
    step_size,
)

SHAPES = [(1, 1), (2, 4), (8, 1)]


def order(rows: int, epoch: int, batch_size: int, *, data: int = 1, seed: int = 0):
    """`[steps, batch]`."""
    key = jax.random.key(seed)
    drawn = np.asarray(epoch_order(key, epoch, rows, batch_size, data))
    assert drawn.shape[1] == data
    return drawn.reshape(len(drawn), -1)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("batch_size", [50, 64, 192])
def test_an_epoch_is_a_permutation_in_shards(rows, batch_size):
    drawn = order(rows, 0, batch_size)
    assert drawn.shape == (-(-rows // batch_size), batch_size)
    counts = (drawn >= 0).sum(axis=1)
    assert (counts[:-1] == batch_size).all() and counts.sum() == rows
    np.testing.assert_array_equal(np.sort(drawn[drawn >= 0]), np.arange(rows))
    if batch_size % 64:
        # Position p holds a row of shard p % 64.
        flat = drawn[drawn >= 0]
        np.testing.assert_array_equal(flat % 64, np.arange(rows) % 64)
    else:
        each = batch_size // 64
        shard = np.broadcast_to(np.repeat(np.arange(64), each), drawn.shape)
        np.testing.assert_array_equal(drawn[drawn >= 0] % 64, shard[drawn >= 0])
        # Entry e of a shard is trained on in step e // each, whatever the batch size.
        deep = order(rows, 0, 64).T.reshape(64, -1)
        wide = drawn.reshape(len(drawn), 64, each).transpose(1, 0, 2).reshape(64, -1)
        np.testing.assert_array_equal(wide[:, : deep.shape[1]], deep)
    if rows == 1000:
        exists = drawn >= 0
        assert (drawn != order(rows, 1, batch_size))[exists].mean() > 0.8
        assert (drawn != order(rows, 0, batch_size, seed=1))[exists].any()


@pytest.mark.parametrize("data", [2, 8, 64])
def test_a_batch_is_the_same_on_any_mesh_and_its_rows_are_at_home(data):
    expected = order(1000, 3, 128)
    parts = epoch_order(jax.random.key(0), 3, 1000, 128, data)
    local = np.asarray(resident.Resident((), None, 1000)._local(parts))
    parts = np.asarray(parts)
    np.testing.assert_array_equal(parts.reshape(len(parts), -1), expected)
    home = home_rows(1000, data)
    np.testing.assert_array_equal(np.sort(home[home >= 0]), np.arange(1000))
    for part in range(data):
        drawn, at = parts[:, part], local[:, part]
        np.testing.assert_array_equal(at < 0, drawn < 0)
        np.testing.assert_array_equal(home[part][at[at >= 0]], drawn[drawn >= 0])


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
    """One matrix of a stack, its blocks side by side."""
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


def test_sizes_of_a_step():
    assert step_size(512, 1000, 8) == 512
    assert step_size(512, 65, 8) == step_size(512, 65, 1) == 128
    assert step_size(50, 1000, 1) == 50 and step_size(50, 20, 1) == 20
    with pytest.raises(ValueError, match="batch_size=50 must be a multiple of 64"):
        step_size(50, 20, 2)


def test_uneven_columns_are_worth_a_warning(monkeypatch):
    matrix = CSR.from_scipy(scipy.sparse.csr_array(np.tri(64, 512)))
    monkeypatch.setattr(resident, "_MANY_ENTRIES", 100)
    with (
        jax.set_mesh(make_mesh(data=1, model=4)),
        pytest.warns(
            UserWarning, match=r"4\.0 times the mean of the entries of inputs"
        ),
    ):
        Resident.of(Examples.of(matrix, None, None))
