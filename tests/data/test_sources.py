"""Matching of rows between sources."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from sparsejax.data import SparseDataset
from sparsejax.data.reading.sources import Inputs, NamedCSR, aligned
from sparsejax.sparse import CSR


def matched(inputs, other) -> NamedCSR:
    return aligned(NamedCSR.of("targets", other), Inputs.of(inputs).rows)


def dataset(names, dense):
    matrix = scipy.sparse.csr_array(np.array(dense, np.float32))
    return SparseDataset.from_scipy(matrix, row_names=names)


def test_by_name():
    inputs = dataset(["ann", "bob"], [[1, 0], [0, 1]])
    other = dataset(["eve", "bob", "ann"], [[3, 3, 3], [2, 0, 2], [0, 1, 0]])
    found = matched(inputs, other)
    assert found.row_names is not None and found.row_names.tolist() == ["ann", "bob"]
    np.testing.assert_array_equal(
        found.matrix.to_scipy().toarray(), [[0, 1, 0], [2, 0, 2]]
    )
    with pytest.raises(ValueError, match="1 of 3 rows of inputs .* targets: 'eve'"):
        matched(other, inputs)


def test_by_position():
    inputs = dataset(["ann", "bob"], [[1, 0], [0, 1]])
    host = CSR.from_scipy(scipy.sparse.csr_array(np.eye(2)))
    for other in (host, jax.tree.map(jnp.asarray, host)):
        assert matched(inputs, other).matrix is other
        assert matched(other, inputs).matrix is inputs.matrix
    with pytest.raises(ValueError, match="inputs has 2 rows but targets has 3"):
        matched(inputs, scipy.sparse.csr_array(np.eye(3)))
    with pytest.raises(TypeError):
        matched(inputs, host.to_scipy().toarray())
