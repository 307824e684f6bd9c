"""A model for NVIDIA's Triton: its Python backend runs the engine of the service.

`export` writes a model repository. Triton then imports `TritonPythonModel` from here,
in a process of its own, and passes it batches. Requests have the names and datatypes of
the other protocols, see `questions`, but rows are always the first dimension, as in
Triton's batches::

    items, histories    items BYTES [rows, n], padded with ""; likewise values, times, exclude
    clicks              a tensor [rows, 1] for each column of the schema
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from sparsejax.predictors.files import load_predictor
from sparsejax.predictors.predictor import Predictor
from sparsejax.predictors.versions import FILE, following
from sparsejax.serving import protocol
from sparsejax.serving.batcher import Answer, Batcher, DeviceError
from sparsejax.serving.engine import Engine, Shape, TooLargeError, check_shapes
from sparsejax.serving.protocol import Asked, Limits, RefusedError, Tensor
from sparsejax.serving.questions import Form, Question, form_of
from sparsejax.whole_files import whole_folder

_LIMITS = Limits()
_CONFIG, _MODEL = "config.pbtxt", "model.py"
# Names of inputs that each request must have, and of outputs with several numbers per row.
_NEEDED, _WIDE = {"items"}, {"items", "scores"}
_TYPES = {"BYTES": "TYPE_STRING"}
_SOURCE = '''"""Answers for Triton: the predictor beside this file, on the engine of sparsejax."""

from sparsejax.serving.triton import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def export(
    path: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    *,
    name: str,
    shapes: Sequence[Shape] = (),
) -> pathlib.Path:
    """Writes a predictor into a model repository of Triton, as a new version of a model.

    Args:
      path: path of the predictor's file.
      repository: folder of the models. It is created if it does not exist.
      name: name of the model: its folder in the repository.
      shapes: shapes for which programs are compiled, as for `Engine`.

    Returns:
      The folder of the version.

    Raises:
      OSError: a file cannot be read or written.
      ValueError: the file is no predictor, the predictor has no names or no program with
        a shape's rows, or the model has versions with other inputs or outputs.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise ValueError(
            f"the name of a model must have letters, digits and _ . - only, got {name!r}"
        )
    predictor = load_predictor(path)
    check_shapes(shapes, predictor.signature.rows)
    config = _config(name, predictor, shapes)
    model = pathlib.Path(repository) / name
    model.parent.mkdir(exist_ok=True)
    if not model.exists():
        with whole_folder(model) as folder:
            (folder / _CONFIG).write_text(config, encoding="utf-8")
            (folder / "1").mkdir()
            _fill(folder / "1", path)
        return model / "1"
    if not (model / _CONFIG).is_file():
        raise ValueError(f"{model}: is no model of Triton: it has no {_CONFIG}")
    if (model / _CONFIG).read_text(encoding="utf-8") != config:
        raise ValueError(
            f"{model / _CONFIG}: differs from that of this predictor, so one model cannot "
            "have both as versions; choose another name, or move that folder away"
        )
    version = model / str(following(model))
    with whole_folder(version) as folder:
        _fill(folder, path)
    return version


def _fill(folder: pathlib.Path, path: str | os.PathLike[str]) -> None:
    """Writes the files of a model's version into the version's folder."""
    (folder / _MODEL).write_text(_SOURCE, encoding="utf-8")
    shutil.copyfile(path, folder / FILE)


def _config(name: str, predictor: Predictor, shapes: Sequence[Shape]) -> str:
    """The text of `config.pbtxt`."""
    form, ranks = form_of(predictor), predictor.signature.ranks_items
    inputs = [
        _declared(each, wide=ranks)
        + ("optional: true " if ranks and each.name not in _NEEDED else "")
        + ("allow_ragged_batch: true " if ranks else "")
        for each in (_inputs(form) if ranks else form.inputs)
    ]
    outputs = [
        _declared(each, wide=each.name in _WIDE)
        for each in form.outputs
        if each.name != "rows"  # Triton's answer has all rows, in order
    ]
    parts = [
        f'name: "{name}"',
        'backend: "python"',
        f"max_batch_size: {_LIMITS.rows}",
        *(f"input {{ {each}}}" for each in inputs),
        *(f"output {{ {each}}}" for each in outputs),
        "dynamic_batching { }",
        # One process suffices: JAX uses the GPU itself, and Triton's tensors are in host memory.
        "instance_group { kind: KIND_CPU count: 1 }",
    ]
    if shapes:
        value = f'{{ string_value: "{" ".join(map(str, shapes))}" }}'
        parts.append(f'parameters {{ key: "shapes" value {value} }}')
    return "\n".join(parts) + "\n"


def _inputs(form: Form) -> list[Tensor]:
    """The inputs for Triton. It needs no lengths, because "" pads rows to equal length."""
    others = "lengths", "candidates"
    return [each for each in form.inputs if not each.name.endswith(others)]


def _declared(tensor: Tensor, *, wide: bool) -> str:
    """The declaration of an input or output. With `wide` it is `[rows, n]`, otherwise `[rows]`."""
    kind = _TYPES.get(tensor.datatype, f"TYPE_{tensor.datatype}")
    dims = "dims: [ -1 ]" if wide else "dims: [ 1 ] reshape { shape: [ ] }"
    return f"name: {json.dumps(tensor.name)} data_type: {kind} {dims} "


class TritonPythonModel:
    """The class that Triton's Python backend uses, with one object for each model.

    See https://github.com/triton-inference-server/python_backend for the methods.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the predictor of a version, and compiles its programs."""
        folder = pathlib.Path(args["model_repository"], args["model_version"])
        config = json.loads(args["model_config"])
        given = config.get("parameters", {}).get("shapes", {}).get("string_value", "")
        predictor = load_predictor(folder / FILE)
        self._form = form_of(predictor)
        engine = Engine(predictor, map(Shape.parse, given.split()))
        self._batcher = Batcher(engine)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answers a batch of requests. An invalid request fails alone."""
        questions = [_reading(self._form, request) for request in requests]
        with self._batcher.together():
            asked = [
                each if isinstance(each, RefusedError) else self._submitted(each)
                for each in questions
            ]
        return [self._answered(each) for each in asked]

    def finalize(self) -> None:
        """Stops the threads of the engine."""
        self._batcher.close()

    def _submitted(
        self, read: tuple[Asked, Question]
    ) -> tuple[Asked, Question, Future[Answer]] | TooLargeError:
        asked, question = read
        try:
            return asked, question, self._batcher.submit(question.given)
        except TooLargeError as error:
            return error

    def _answered(
        self, asked: tuple[Asked, Question, Future[Answer]] | Exception
    ) -> Any:
        """Waits for the answer to a request, and converts it to a Triton response."""
        import triton_python_backend_utils as triton

        if isinstance(asked, Exception):
            return triton.InferenceResponse(error=triton.TritonError(str(asked)))
        request, question, future = asked
        try:
            outputs = self._form.tensors(question, future.result())
        except (DeviceError, FloatingPointError) as error:
            return triton.InferenceResponse(error=triton.TritonError(str(error)))
        tensors = [
            triton.Tensor(each.name, _array(each))
            for each in protocol.wanted(request, outputs)
        ]
        return triton.InferenceResponse(output_tensors=tensors)


def _reading(form: Form, request: Any) -> tuple[Asked, Question] | RefusedError:
    """Converts a Triton request to rows. Returns, not raises, an error if it is refused."""
    try:
        tensors = {each.name: each for each in _tensors(request, form)}
        parameters = json.loads(request.parameters() or "{}")
        wanted = dict.fromkeys(request.requested_output_names(), True)
        asked = Asked(None, parameters, tensors, wanted or None)
        return asked, form.question(asked, _LIMITS)
    except RefusedError as error:
        return error


def _tensors(request: Any, form: Form) -> Iterator[Tensor]:
    for given in request.inputs():
        name, array = given.name(), given.as_numpy()
        where = f"the input {name!r}"
        if array.dtype.kind == "O":
            found = [protocol.of_utf8(each, where) for each in array.ravel()]
            data: Any = protocol.texts(found, where, _LIMITS)
            yield Tensor(name, "BYTES", array.shape, data)
        else:
            kind = next(
                kind for kind, its in protocol.NUMBERS.items() if array.dtype == its
            )
            data = protocol.finite(array.ravel(), where, form.takes_missing)
            yield Tensor(name, kind, array.shape, data)


def _array(tensor: Tensor) -> np.ndarray:
    """Converts an output to an array for Triton: names become objects of type bytes."""
    if tensor.datatype == "BYTES":
        names = protocol.plain(tensor)
        data = np.array([name.encode() for name in names], np.object_)
        return data.reshape(tensor.shape)
    return np.ascontiguousarray(tensor.data).reshape(tensor.shape)
