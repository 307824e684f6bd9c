"""DSSTNE's "brake", which lowers the learning rate: alone and in `fit`."""

import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.dsstne import rules
from sparsejax.dsstne.brake import Brake
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.network import Network


def test_the_brake():
    """After 100 steps of error 1, 2.2 goes on, and 2.3 is skipped and brakes 24 steps."""
    for error, share, after in ((2.2, 1.0, 1.0), (2.3, 0.0, 0.1)):
        brake = Brake(1000)
        assert [float(brake(jnp.float32(1))) for _ in range(100)] == [1.0] * 100
        assert float(brake(jnp.float32(error))) == share
        shares = [float(brake(jnp.float32(1))) for _ in range(25)]
        np.testing.assert_allclose(shares, [after] * 24 + [1.0])
    brake = Brake(101)  # and it starts anew
    for _ in range(101):
        brake(jnp.float32(1))
    assert float(brake(jnp.float32(100))) == 1


def test_the_brake_counts_the_steps_of_fit():
    definition = Definition.from_json(
        {
            "Layers": [
                {"N": 9, "Sparse": True},
                {"N": 2, "pDropout": 0.1, "BatchNormalization": True},
                {"N": 9},
            ]
        }
    )
    network = Network(definition, brake_steps=4, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(network, rules.SGD(0.1))
    data = scipy.sparse.csr_array(np.eye(9, dtype=bool))
    sj.fit(network, optimizer, data, batch_size=3, num_epochs=4)
    assert network.brake is not None and int(network.brake.count[...]) == 12
    assert (network.parameters().normalizations["Hidden1"].mean != 0).all()
