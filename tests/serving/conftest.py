"""A tiny predictor of items with a program of four rows, and a service of it on a port."""

import pathlib
from collections.abc import Iterator

import exported_kinds
import pytest
from flax import nnx
from served import NAMES, Client, listening

import sparsejax as sj
from sparsejax.serving.engine import Shape
from sparsejax.serving.service import Service, Settings


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


@pytest.fixture(scope="session")
def settings() -> Settings:
    """Settings of the service that tests share: it has one program."""
    return Settings(shapes=(Shape(4, 256),), body_seconds=0.5)


@pytest.fixture(scope="session")
def service(file, settings) -> Iterator[Service]:
    service = Service("films", settings)
    service.load(file)
    yield service
    service.close()


@pytest.fixture(scope="session")
def port(service) -> Iterator[int]:
    with listening(service) as port:
        yield port


@pytest.fixture(scope="session")
def client(port) -> Client:
    return Client(port)


@pytest.fixture(scope="session")
def kinds(tmp_path_factory) -> pathlib.Path:
    """A folder with a predictor of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    exported_kinds.export(folder)
    return folder
