"""What is served: a tiny predictor of items, with one program of four rows beside that of one."""

import pathlib

import pytest
from flax import nnx

import sparsejax as sj

NAMES = [f"item {n}" for n in range(9)]


@pytest.fixture(scope="session")
def file(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("served") / "model.predictor"
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=9, outputs=9, rngs=nnx.Rngs(0))
    sj.export_predictor(model, path, k=5, names=NAMES, batch_size=4)
    return path


@pytest.fixture(scope="session")
def predictor(file) -> sj.Predictor:
    return sj.load_predictor(file)
