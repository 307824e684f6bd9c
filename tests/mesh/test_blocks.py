"""Blocks of sparse matrices on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.sharding import PartitionSpec as P

from sparsejax.mesh.blocks import ShardedCSR
from sparsejax.mesh.layout import make_mesh
from sparsejax.sparse import CSR

SHAPES = [(1, 1), (1, 8), (2, 4), (8, 1)]


@jax.jit
def dense(x):
    return x.todense()


def random_matrix(rows=16, cols=700, seed=0):
    rng = np.random.default_rng(seed)
    return (
        scipy.sparse.random_array((rows, cols), density=0.02, rng=rng)
        .tocsr()
        .astype(np.float32)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_hold_the_matrix(shape):
    matrix = random_matrix()
    x = jax.tree.map(jnp.asarray, CSR.from_scipy(matrix, nse=400))
    with jax.set_mesh(make_mesh(data=shape[0], model=shape[1])):
        blocks = jax.jit(ShardedCSR.of)(x)
        np.testing.assert_array_equal(dense(blocks), dense(x))
        np.testing.assert_array_equal(blocks.row_lengths(), x.row_lengths())
    assert blocks.blocks.indices.shape == (*shape, 400)
    assert blocks.shape == x.shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("indicator", [True, False])
def test_blocks_from_the_host_hold_the_rows(shape, indicator):
    matrix = random_matrix(40)
    x = CSR.from_scipy(matrix.astype(bool) if indicator else matrix)
    rng = np.random.default_rng(1)
    rows = rng.integers(-1, 40, (shape[0], 24 // shape[0]))
    mesh = make_mesh(data=shape[0], model=shape[1])
    blocks = ShardedCSR.from_host(x, rows, mesh)
    flat = rows.reshape(-1)
    expected = np.where(flat[:, None] >= 0, x.to_scipy().toarray()[flat], 0)
    np.testing.assert_array_equal(dense(blocks), expected)
    sharding = jnp.asarray(blocks.blocks.indices).sharding
    assert sharding.is_equivalent_to(
        jax.sharding.NamedSharding(mesh, P("data", "model")), 3
    )
    with pytest.raises(ValueError, match="there is room for 2"):
        ShardedCSR.from_host(x, rows, mesh, nse=2)


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_by_column_has_all_rows_of_each_part(shape):
    matrix = random_matrix()
    x = jax.tree.map(jnp.asarray, CSR.from_scipy(matrix))
    with jax.set_mesh(make_mesh(data=shape[0], model=shape[1])):
        sharded = jax.jit(ShardedCSR.of)(x)
        by_column = jax.jit(ShardedCSR.by_column)(sharded)

        @jax.jit
        def of_two(x):
            return jax.tree.map(lambda a: jnp.stack([a, a]), x).by_column()

        stacked = of_two(sharded)
    width = 768 // shape[1]
    entries = []
    for part in range(shape[1]):
        count = int(by_column.indptr[part, -1])
        columns = by_column.columns[part, :count] + part * width
        entries += zip(columns.tolist(), by_column.rows[part].tolist(), strict=False)
    columns, rows = matrix.tocsc().nonzero()[1], matrix.tocsc().nonzero()[0]
    assert entries == sorted(zip(columns.tolist(), rows.tolist(), strict=True))
    for one, both in zip(by_column, stacked, strict=True):
        np.testing.assert_array_equal(both, np.stack([one, one]))


def test_what_is_wrong_stays_wrong():
    indices = jnp.array([0, 9, -1, 3, 4, 1], jnp.int32)
    x = CSR(None, indices, jnp.array([0, 1, 2, 3, 4, 9], jnp.int32), num_cols=9)
    x = dataclasses.replace(x, indptr=jnp.array([0, 1, 2, 3, 9], jnp.int32))
    with jax.set_mesh(make_mesh(data=2, model=4)):
        got = dense(jax.jit(ShardedCSR.of)(x))
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), [False, True, True, True])


def test_meshes_that_cannot_be():
    with pytest.raises(ValueError, match="data must be a divisor of 64, got 3"):
        make_mesh(data=3)
    with pytest.raises(ValueError, match="needs 16 devices, there are 8"):
        make_mesh(data=2, model=8)
    x = jax.tree.map(jnp.asarray, CSR.from_scipy(random_matrix(3)))
    with pytest.raises(ValueError, match="needs a mesh"):
        ShardedCSR.of(x)
    with (
        jax.set_mesh(make_mesh(data=2)),
        pytest.raises(ValueError, match="3 rows cannot be divided by 2"),
    ):
        ShardedCSR.of(x)
