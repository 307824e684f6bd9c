"""Models of equal sizes share compiled programs: the second model compiles nothing."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import scipy.sparse
from dsstne_networks import made as made_network
from flax import nnx

import sparsejax as sj

ITEMS = 60
DENSE = {"Name": "x", "N": 5}, {"Name": "h", "N": 3}, {"Name": "o", "N": 4}
MODELS: dict[str, Callable[[], Any]] = {
    "feed-forward": lambda: sj.FeedForward(
        sj.NetworkConfig.autoencoder((8, 4)), inputs=60, outputs=60, rngs=nnx.Rngs(0)
    ),
    **{
        config.model: lambda config=config: sj.sequence.build_sequence_model(
            config, items=ITEMS, rngs=nnx.Rngs(0)
        )
        for config in (
            sj.SASRecConfig(max_length=4, width=8, blocks=1),
            sj.HSTUConfig(max_length=4, width=8, blocks=1, negatives=3),
            sj.GRUConfig(max_length=4, width=8, blocks=1),
        )
    },
    **{
        config.model: lambda config=config: sj.clicks.build_click_model(
            config, num_dense=2, features={"user": 9, "item": 5}, rngs=nnx.Rngs(0)
        )
        for config in (
            sj.DLRMConfig(dim=4, bottom=(4,), top=(4,)),
            sj.DCNConfig(dim=4, hidden=(4,)),
            sj.DeepFMConfig(dim=4, hidden=(4,)),
            sj.WideDeepConfig(dim=4, hidden=(4,)),
        )
    },
    "dsstne": lambda: made_network(*DENSE),
    "dsstne-sparse": lambda: made_network(
        {"Name": "x", "N": 9, "Sparse": True},
        {"Name": "h", "N": 3},
        {"Name": "o", "N": 9},
    ),
}


@pytest.fixture
def compiled():
    """Counts programs that were compiled, or read from a cache on disk."""
    count = [0]

    def listen(event, *_, **__):
        count[0] += "backend_compile" in event

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count[0]
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("name", MODELS)
def test_a_second_model_compiles_nothing(name, compiled):
    MODELS[name]()
    before = compiled()
    MODELS[name]()
    assert compiled() == before


@pytest.mark.parametrize("name", ["feed-forward", "sasrec", "hstu", "gru"])
def test_items_that_are_added_to_a_second_model_compile_nothing(name, compiled):
    def grow():
        model = MODELS[name]()
        optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
        model.add_items(3, optimizer=optimizer)

    grow()
    before = compiled()
    grow()
    assert compiled() == before


@pytest.mark.parametrize("name", ["feed-forward", "gru"])
def test_training_a_second_model_compiles_nothing(name, compiled):
    histories = sj.SequenceDataset(
        np.array([0, 6, 12]),
        np.arange(12),
        np.array(["ann", "bob"]),
        np.array([str(i) for i in range(ITEMS)]),
    )
    data = histories if name == "gru" else scipy.sparse.csr_array(np.eye(9, ITEMS))

    def train():
        model = MODELS[name]()
        optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.1))
        sj.fit(model, optimizer, data, num_epochs=1, batch_size=4)
        sj.recommend(model, data, 2, exclude=None)

    train()
    before = compiled()
    train()
    assert compiled() == before
