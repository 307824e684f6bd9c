"""The second model of a service, which finds items similar to given items."""

import contextlib

import numpy as np
import pytest
from flax import nnx
from served import NAMES, Client, listening, tensor

import sparsejax as sj
from sparsejax.predictors.similar import similar_programs
from sparsejax.serving.engine import Engine, Shape
from sparsejax.serving.service import Service, Settings

SHAPES = Shape(1, 256), Shape(4, 256)


@pytest.fixture(scope="module")
def model() -> sj.FeedForward:
    config = sj.NetworkConfig.autoencoder((4,), temperature=0.2)
    model = sj.FeedForward(config, inputs=9, outputs=9, rngs=nnx.Rngs(0))
    model.output.kernel[3] = 0.0
    return model


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("similar") / "model.predictor"
    sj.export_predictor(model, path, k=5, names=NAMES, batch_size=4)
    return path


@pytest.fixture(scope="module")
def client(path):
    service = Service("films", Settings(shapes=SHAPES, similar=True))
    service.load(path)
    with contextlib.closing(service), listening(service) as port:
        yield Client(port)


def ask(client: Client, names: list[str], **parameters):
    items = tensor("items", "BYTES", names)
    return client.infer(items, model="similar", parameters=parameters)


def test_the_answer_is_that_of_similar_items(client, model):
    status, found = ask(client, [*NAMES, "no such item"], k=3)
    assert status == 200
    expected = sj.similar_items(model, NAMES, 3, names=NAMES)
    assert found["lengths"]["data"] == [3] * 9 + [0]
    assert found["unknown"]["data"] == [0] * 9 + [1]
    scores = np.array(found["scores"]["data"]).reshape(9, 3)
    np.testing.assert_allclose(scores, expected.scores, rtol=1e-5, atol=1e-6)
    names = np.array(found["items"]["data"]).reshape(9, 3)
    for row, wanted, cosines in zip(
        names, expected.names(NAMES), expected.scores, strict=True
    ):
        if len({*np.round(cosines, 5)}) == 3:  # else ties may come in another order
            assert row.tolist() == wanted


def test_the_model_has_metadata_of_its_own(client):
    status, about = client.get("/v2/models/similar")
    assert (status, about["name"], about["versions"]) == (200, "similar", ["1"])
    assert [each["name"] for each in about["inputs"]] == ["items"]
    assert client.get("/v2/models/similar/ready") == (
        200,
        {"name": "similar", "ready": True},
    )


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ([], {}, "expected the input 'items'"),
        ([tensor("items", "FP32", [1.0])], {}, "must have datatype BYTES"),
        ([tensor("items", "BYTES", ["a"], [1, 1])], {}, "expected the input 'items'"),
        ([tensor("items", "BYTES", ["a"])], {"k": 6}, "k must be a whole number"),
        (
            [tensor("items", "BYTES", ["a"])],
            {"exclude_seen": False},
            "unknown parameter 'exclude_seen'",
        ),
    ],
)
def test_what_it_cannot_be_asked(client, inputs, parameters, message):
    status, found = client.infer(*inputs, model="similar", parameters=parameters)
    assert status == 422 and message in found


def test_vectors_that_are_not_finite_are_left_out(model, tmp_path):
    kernel = np.array(model.output.kernel[...])
    try:
        model.output.kernel[5] = np.inf
        sj.export_predictor(model, tmp_path / "p", k=9, names=NAMES, batch_size=1)
    finally:
        model.output.kernel[...] = kernel
    predictor = sj.load_predictor(tmp_path / "p")
    programs = similar_programs(predictor.signature, predictor.model.programs)
    engine = Engine(predictor, [SHAPES[0]], programs=programs)
    given, unknown = predictor.model.rows_of_items([NAMES[0]])
    ids, scores = engine.run(SHAPES[0], engine.packed(SHAPES[0], [given]))
    assert not unknown.any()
    assert {*ids[0].tolist()} == {*range(1, 9)} - {5} | {-1}
    assert np.abs(scores[ids >= 0]).max() < 1.0001


def test_models_without_vectors_or_with_one_name(kinds):
    service = Service("films", Settings(similar=True))
    with contextlib.closing(service), pytest.raises(ValueError, match="needs vectors"):
        service.load(kinds / "clicks")
    with pytest.raises(ValueError, match="is the name of the second model"):
        Service("similar", Settings(similar=True))
