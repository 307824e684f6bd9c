"""The model for Triton's Python backend, called as Triton calls it."""

import json
import pathlib
import re
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from served import NAMES

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.serving import triton
from sparsejax.serving.engine import Shape
from sparsejax.serving.protocol import Tensor


class _Tensor(NamedTuple):
    """Triton's tensor, which has its name and array as methods."""

    key: str
    array: np.ndarray

    def name(self) -> str:
        return self.key

    def as_numpy(self) -> np.ndarray:
        return self.array


class _Response(NamedTuple):
    output_tensors: Sequence[_Tensor] = ()
    error: str | None = None


class _Request(NamedTuple):
    tensors: list[_Tensor]
    asked: Mapping[str, Any] = types.MappingProxyType({})
    wanted: tuple[str, ...] = ("items", "scores", "lengths", "unknown")

    def inputs(self) -> list[_Tensor]:
        return self.tensors

    def parameters(self) -> str:
        return json.dumps(dict(self.asked))

    def requested_output_names(self) -> list[str]:
        return [*self.wanted]


@pytest.fixture
def backend(monkeypatch):
    """The module that Triton provides to its models."""
    backend: Any = types.ModuleType("triton_python_backend_utils")
    backend.Tensor, backend.InferenceResponse = _Tensor, _Response
    backend.TritonError = str
    monkeypatch.setitem(sys.modules, backend.__name__, backend)


def _loaded(version: pathlib.Path, parameters: dict[str, Any]) -> Any:
    """Makes and initializes a model as Triton does."""
    spaces: dict[str, Any] = {}
    exec((version / "model.py").read_text(), spaces)  # noqa: S102 - Triton imports it
    model = spaces["TritonPythonModel"]()
    args = {"model_repository": str(version.parent), "model_version": version.name}
    model.initialize(args | {"model_config": json.dumps({"parameters": parameters})})
    return model


@pytest.fixture
def model(file, tmp_path, backend):
    """A model with one shape of four rows."""
    version = triton.export(file, tmp_path, name="films", shapes=[Shape(4, 256)])
    model = _loaded(version, {"shapes": {"string_value": "4x256"}})
    yield model
    model.finalize()


def _names(*rows: list[str]) -> _Tensor:
    width = max(map(len, rows))
    filled = [[*row, *[""] * (width - len(row))] for row in rows]
    array = np.array([[name.encode() for name in row] for row in filled], np.object_)
    return _Tensor("items", array)


def _found(response: _Response) -> dict[str, np.ndarray]:
    assert response.error is None
    return {tensor.key: tensor.array for tensor in response.output_tensors}


def test_requests_of_a_batch_have_the_answers_of_the_predictor(model, predictor):
    one, other = [NAMES[0], NAMES[2]], [NAMES[5]]
    batches = []
    model._batcher._observe = batches.append
    found = [
        _found(each)
        for each in model.execute(
            [
                _Request([_names(one, other)]),
                _Request([_names(one)], {"k": 2}, ("items",)),
            ]
        )
    ]
    expected = predictor.recommend_names([one, other])
    for row, names in enumerate(expected):
        count = found[0]["lengths"][row]
        assert [name.decode() for name in found[0]["items"][row, :count]] == names
        assert (np.diff(found[0]["scores"][row, :count]) <= 0).all()
    assert found[1].keys() == {"items"}
    assert found[1]["items"].tolist() == found[0]["items"][:1, :2].tolist()
    model.finalize()
    assert [batch.rows for batch in batches] == [3]  # both requests in one batch


def test_a_bad_request_fails_alone(model):
    good = _Request([_names([NAMES[1]])])
    values = _Tensor("values", np.ones((1, 3), np.float32))
    wrong = {
        "k must be": _Request([_names([NAMES[1]])], {"k": 0}),
        "the shape of items": _Request([_names([NAMES[1]]), values]),
        "UTF-8": _Request([_Tensor("items", np.array([[b"\xff"]], np.object_))]),
        "more than the 4096 allowed": _Request([_names([NAMES[0]] * 5000)]),
        "is missing": _Request([values]),
    }
    responses = model.execute([good, *wrong.values()])
    assert _found(responses[0])["lengths"].shape == (1,)
    for expected, response in zip(wrong, responses[1:], strict=True):
        assert expected in response.error, response.error


def test_versions_of_one_model_are_asked_alike(file, tmp_path, capsys):
    repository = tmp_path / "models"
    for number in "123":
        main(["export-triton", str(file), str(repository), "--name", "films"])
        assert f"version {number} of films" in capsys.readouterr().out
    folder = repository / "films"
    config = (folder / "config.pbtxt").read_text()
    assert sorted(path.name for path in folder.iterdir()) == [
        *"123",
        "config.pbtxt",
    ]
    names = re.findall(r'^(?:in|out)put \{ name: "(\w+)"', config, re.MULTILINE)
    assert names == [
        "items",
        "values",
        "exclude",
        "items",
        "scores",
        "lengths",
        "unknown",
    ]
    with pytest.raises(ValueError, match="cannot have both as versions"):
        triton.export(file, repository, name="films", shapes=[Shape(4, 64)])
    with pytest.raises(ValueError, match="3x64.*programs of 1, 4 rows"):
        triton.export(file, repository, name="films", shapes=[Shape(3, 64)])
    (folder / "config.pbtxt").unlink()
    with pytest.raises(ValueError, match="is no model of Triton"):
        triton.export(file, repository, name="films")
    with pytest.raises(ValueError, match="letters, digits"):
        triton.export(file, repository, name="../films")
    assert sorted(path.name for path in repository.iterdir()) == ["films"]


def test_clicks_have_one_value_a_row(kinds, tmp_path, backend):
    predictor = sj.load_predictor(kinds / "clicks")
    version = triton.export(kinds / "clicks", tmp_path, name="clicks")
    config = (version.parent / "config.pbtxt").read_text()
    assert config.count("dims: [ 1 ] reshape { shape: [ ] }") == 4
    assert "optional" not in config
    model = _loaded(version, {})
    cities = np.array([b"c3", b"nowhere"], np.object_)
    users = np.array([b"u1", b"u0"], np.object_)
    ages = np.array([1.0, 2.5], np.float32)
    inputs = [_Tensor("age", ages), _Tensor("city", cities), _Tensor("user", users)]
    (response,) = model.execute([_Request(inputs, wanted=("probabilities",))])
    model.finalize()
    records = {"age": ages, "city": ["c3", "nowhere"], "user": ["u1", "u0"]}
    expected = predictor.predict_records(records)
    np.testing.assert_array_equal(_found(response)["probabilities"], expected)


def test_columns_of_clicks_may_have_any_name(kinds, monkeypatch):
    predictor = sj.load_predictor(kinds / "clicks")
    columns = [
        Tensor(name, "FP32", (-1,), None)
        for name in ("num_candidates", "dwell_lengths", "lengths")
    ]
    form = types.SimpleNamespace(inputs=columns, outputs=[])
    monkeypatch.setattr(triton, "form_of", lambda predictor: form)
    text = triton._config("clicks", predictor, ())
    assert re.findall(r'^input \{ name: "(\w+)"', text, re.MULTILINE) == [
        each.name for each in columns
    ]
