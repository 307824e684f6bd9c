"""The Open Inference Protocol, version 2: JSON and binary tensors, as names and arrays.

A request is read and checked completely before anything is computed for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from sparsejax.data.files.name_index import EncodedNames, NameTable

# NumPy's dtypes, by the protocol's datatypes of numbers.
NUMBERS = {
    "BOOL": "bool",
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "FP32": "float32",
    "FP64": "float64",
}
_MOST_DIMENSIONS = 2
_LENGTH = struct.Struct("<I")


class RefusedError(Exception):
    """A request is not answered. The message says what a request should have.

    Attributes:
      status: HTTP status.
      retry_after: seconds after which the client may try again, or None.
    """

    def __init__(self, status: int, message: str, *, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest requests that a service takes.

    Attributes:
      body: most bytes of a request.
      rows: most rows of a request.
      names: most names in a row, known or unknown.
      name: most bytes of a name.
    """

    body: int = 2**23
    rows: int = 1024
    names: int = 4096
    name: int = 1024


class Vocabulary:
    """Names from which the names in an answer are taken, as text or as binary data.

    Args:
      table: table of the names.

    Attributes:
      index: index from a name to its id.
    """

    def __init__(self, table: NameTable):
        self._names = table.names
        self.index = table.index

    def texts(self, ids: np.ndarray) -> list[str]:
        """The names of some ids; -1 is an empty name."""
        if (ids >= 0).all():
            return self._names[ids].tolist()
        return np.where(ids >= 0, self._names[ids], "").tolist()

    def prefixed(self, ids: np.ndarray) -> bytes:
        """The names of some ids as binary data: each follows its length in four bytes."""
        return self.index.prefixed(ids)


class Chosen(NamedTuple):
    """Names in an answer, given by their ids.

    Attributes:
      vocabulary: all names.
      ids: ids of the chosen names; -1 is an empty name.
    """

    vocabulary: Vocabulary
    ids: np.ndarray


class Tensor(NamedTuple):
    """A named array of a request or an answer.

    Data with the datatype BYTES are a flat sequence of text in a request, `Chosen` in an answer.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any


class Asked(NamedTuple):
    """A request after it was read.

    Attributes:
      id: identifier that the answer repeats; or None.
      parameters: parameters of the whole request.
      tensors: tensors of the request, by name.
      outputs: for each wanted output, whether it is binary; None for all outputs.
      binary: whether outputs are binary by default.
    """

    id: str | None
    parameters: dict[str, Any]
    tensors: dict[str, Tensor]
    outputs: dict[str, bool] | None = None
    binary: bool = False


def read(
    body: bytes, header: str | None, limits: Limits, *, missing: bool = False
) -> Asked:
    """Reads the body of an inference request.

    Args:
      body: JSON, followed by binary data.
      header: value of the HTTP header `Inference-Header-Content-Length`: bytes of the
        JSON.
      limits: largest sizes of requests.
      missing: whether an element may be null. A tensor with one has a list as data.

    Raises:
      RefusedError: the body is invalid or too large.
    """
    text, rest = body, memoryview(b"")
    if header is not None:
        # Python cannot convert text with thousands of digits to a number.
        is_number = header.isascii() and header.isdigit() and len(header) < 20
        if not (is_number and int(header) <= len(body)):
            raise RefusedError(
                400,
                "Inference-Header-Content-Length must be the bytes of the JSON, at most "
                f"{len(body)} in this request, got {header[:40]!r}",
            )
        text, rest = body[: int(header)], memoryview(body)[int(header) :]
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RefusedError(400, f"the request must be JSON in UTF-8: {error}") from None
    request = _expect(document, dict, "the request")
    parameters = _parameters(request, "parameters")
    asked = request.get("id")
    tensors: dict[str, Tensor] = {}
    for number, given in enumerate(_expect(request.get("inputs"), list, "inputs")):
        where = f"inputs[{number}]"
        one = _expect(given, dict, where)
        tensor, rest = _tensor(one, where, rest, limits, missing)
        if tensor.name in tensors:
            raise RefusedError(422, f"the input {tensor.name!r} is given twice")
        tensors[tensor.name] = tensor
    if len(rest):
        raise RefusedError(
            400, f"{len(rest)} bytes follow the binary data of the last input"
        )
    binary = parameters.pop("binary_data_output", False)
    binary = _expect(binary, bool, "parameters.binary_data_output")
    outputs = None
    # As in gRPC, all outputs are wanted if the list is missing, null or empty.
    if (stated := request.get("outputs")) not in (None, []):
        outputs = dict(_outputs(_expect(stated, list, "outputs"), binary))
    identity = None if asked is None else _expect(asked, str, "id")
    return Asked(identity, parameters, tensors, outputs, binary)


def _outputs(outputs: list, binary: bool) -> Iterator[tuple[str, bool]]:
    for number, wanted in enumerate(outputs):
        where = f"outputs[{number}]"
        output = _expect(wanted, dict, where)
        options = _parameters(output, f"{where}.parameters")
        if unknown := sorted(options.keys() - {"binary_data"}):
            raise RefusedError(
                422,
                f"{where}: unknown parameter {unknown[0]!r}; only binary_data is known",
            )
        own = _expect(options.get("binary_data", binary), bool, f"{where}.binary_data")
        yield _expect(output.get("name"), str, f"{where}.name"), own


def _parameters(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The parameters of a request or a tensor, without those that `said` drops."""
    stated = given.get("parameters")
    return said({} if stated is None else _expect(stated, dict, where))


def said(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request without those that have no meaning here.

    Clients of MLServer and Seldon write null for parameters that they do not set, and
    put their own encoding of data into `content_type` and `headers`.
    """
    return {
        name: each
        for name, each in parameters.items()
        if each is not None and name not in _OF_CLIENTS
    }


_OF_CLIENTS = "content_type", "headers"
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false"}


def _expect(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        shown = repr(value)[:40]
        raise RefusedError(422, f"{what} must be {_KINDS[kind]}, got {shown}")
    return value


def _tensor(
    given: dict, where: str, rest: memoryview, limits: Limits, missing: bool
) -> tuple[Tensor, memoryview]:
    """Reads an input. Returns it, and the binary data that remains for later inputs."""
    name = _expect(given.get("name"), str, f"{where}.name")
    where = f"the input {name[:80]!r}"
    datatype = _expect(given.get("datatype"), str, f"{where}: datatype")
    if datatype != "BYTES" and datatype not in NUMBERS:
        known = ", ".join(["BYTES", *NUMBERS])
        raise RefusedError(
            422, f"{where}: datatype must be one of {known}, got {datatype!r:.40}"
        )
    shape = checked_shape(_expect(given.get("shape"), list, f"{where}: shape"), where)
    options = _parameters(given, f"{where}: parameters")
    if unknown := sorted(options.keys() - {"binary_data_size"}):
        raise RefusedError(
            422,
            f"{where}: unknown parameter {unknown[0]!r:.40}; only binary_data_size is known",
        )
    size = options.get("binary_data_size")
    if size is None:
        flat = list(_flat(given.get("data"), shape, where))
        found = [each for each in flat if each is not None] if missing else flat
        if datatype == "BYTES":
            data = texts(found, where, limits)
        else:
            data = numbers(found, datatype, where, missing)
        if len(found) < len(flat):
            known = iter(data)
            data = [None if each is None else next(known) for each in flat]
        check_count(data, shape, where)
        return Tensor(name, datatype, shape, data), rest
    if given.get("data") is not None:
        raise RefusedError(422, f"{where} has data and binary_data_size; leave one out")
    if type(size) is not int or not 0 <= size <= len(rest):
        raise RefusedError(
            400,
            f"{where}: binary_data_size is {size!r:.40}, but {len(rest)} bytes are left "
            "after the JSON and the inputs before",
        )
    data = of_bytes(rest[:size], datatype, where, limits, missing)
    check_count(data, shape, where)
    return Tensor(name, datatype, shape, data), rest[size:]


def checked_shape(shape: Sequence[Any], where: str) -> tuple[int, ...]:
    """Checks that a shape has one or two dimensions.

    Raises:
      RefusedError: the shape has another form.
    """
    are_sizes = all(type(size) is int and 0 <= size < 2**31 for size in shape)
    if not are_sizes or not 1 <= len(shape) <= _MOST_DIMENSIONS:
        raise RefusedError(
            422, f"{where}: the shape must be [n] or [rows, n], got {[*shape]!r:.60}"
        )
    return tuple(shape)


def check_count(data: Any, shape: tuple[int, ...], where: str) -> None:
    """Raises RefusedError unless the data has as many elements as the shape."""
    if len(data) != math.prod(shape):
        raise RefusedError(
            422,
            f"{where} has the shape {list(shape)}, which are {math.prod(shape)} elements, "
            f"but {len(data)} are given",
        )


def _flat(data: Any, shape: tuple[int, ...], where: str) -> Sequence[Any]:
    """The elements of data from JSON, which may be flat or nested like the shape."""
    rows = _expect(data, list, f"{where}: data")
    if len(shape) == 1 or not rows or not isinstance(rows[0], list):
        return rows
    wrong = [row for row in rows if not isinstance(row, list) or len(row) != shape[1]]
    if wrong or len(rows) != shape[0]:
        raise RefusedError(
            422, f"{where}: data must have the shape {list(shape)}, or be flat"
        )
    return [*itertools.chain(*rows)]


def texts(flat: Sequence[Any], where: str, limits: Limits) -> list[str]:
    """Checks that a JSON list has text within `Limits.name`, and returns it."""
    for text in flat:
        if type(text) is not str:
            raise RefusedError(
                422, f"{where}: elements of BYTES must be text, got {text!r:.40}"
            )
        # A character has at most four bytes in UTF-8, so short texts need not be encoded.
        if 4 * len(text) > limits.name and len(text.encode()) > limits.name:
            _refuse_name(len(text.encode()), where, limits)
    return [*flat]


def _refuse_name(count: int, where: str, limits: Limits) -> None:
    raise RefusedError(
        422, f"{where}: a name has {count} bytes, more than the {limits.name} allowed"
    )


def numbers(
    flat: Sequence[Any], datatype: str, where: str, missing: bool = False
) -> np.ndarray:
    """Converts a list to an array of numbers.

    Raises:
      RefusedError: an element does not fit the datatype, or is not finite.
    """
    kind = np.dtype(NUMBERS[datatype])
    allowed = {"b": {bool}, "f": {int, float}}.get(kind.kind, {int})
    wrong = [value for value in flat if type(value) not in allowed]
    if not wrong and kind.kind in "iu":
        info = np.iinfo(kind)
        wrong = [value for value in flat if not info.min <= value <= info.max]
    if wrong:
        raise RefusedError(
            422, f"{where}: an element of {datatype} cannot be {wrong[0]!r:.40}"
        )
    with np.errstate(over="ignore"):
        found = np.array(flat, np.float64 if kind.kind == "f" else kind)
        return finite(found, where, missing)


def finite(given: np.ndarray, where: str, missing: bool = False) -> np.ndarray:
    """Checks that numbers are finite. If `missing`, they may be NaN: a missing number.

    Raises:
      RefusedError: a number is not finite in float32.
    """
    most = 0
    if given.dtype.kind == "f":
        sizes = np.abs(given)
        most = np.fmax.reduce(sizes, initial=0) if missing else sizes.max(initial=0)
    if not most <= np.finfo(np.float32).max:  # also true for NaN
        raise RefusedError(
            422, f"{where}: numbers must be finite, and within those of float32"
        )
    return given


def of_bytes(
    data: memoryview, datatype: str, where: str, limits: Limits, missing: bool = False
) -> Any:
    """The elements of binary data. If `missing`, NaN stands for a missing number.

    Raises:
      RefusedError: the data are incomplete, not UTF-8, not finite, or too long.
    """
    if datatype == "BYTES":
        found = _encoded(bytes(data))
        if found is None or (found.ends - found.starts).max(initial=0) > limits.name:
            return [*_prefixed(data, where, limits)]
        return found
    kind = np.dtype(NUMBERS[datatype]).newbyteorder("<")
    if len(data) % kind.itemsize:
        raise RefusedError(
            422,
            f"{where}: {len(data)} bytes are no whole number of {datatype}, which has "
            f"{kind.itemsize} bytes",
        )
    if datatype == "BOOL":
        return np.frombuffer(data, np.uint8) != 0
    return finite(np.frombuffer(data, kind), where, missing)


def _encoded(data: bytes) -> EncodedNames | None:
    """Parses the data of `_prefixed` much faster.

    Returns None if a text has 256 bytes or more, or if the data is wrong. `_prefixed` then parses
    it, or describes the fault.
    """
    if not data:
        nothing = np.empty(0, np.int64)
        return EncodedNames(data, nothing, nothing)
    every = np.frombuffer(data, np.uint8)
    is_zero = every == 0
    # Names rarely contain zero bytes, so three zeros in a row probably belong to a length.
    at = np.flatnonzero(is_zero[1:-2] & is_zero[2:-1] & is_zero[3:])
    after = at + _LENGTH.size + every[at]
    if len(at) and not (after[:-1] == at[1:]).all():
        at = at[_reached(at, after)]
        after = at + _LENGTH.size + every[at]
    if not len(at) or at[0] or (after[:-1] != at[1:]).any() or after[-1] != len(data):
        return None
    if not data.isascii():
        texts = every.copy()
        texts[at[:, None] + np.arange(_LENGTH.size)] = 0  # separates the texts
        try:
            texts.tobytes().decode()
        except UnicodeDecodeError:
            return None
    return EncodedNames(data, at + _LENGTH.size, after)


def _reached(at: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Follows the lengths from the first position, and marks all positions on the way.

    Args:
      at: positions of possible lengths, ascending.
      after: for each position, the end of a text that begins there.
    """
    step = np.searchsorted(at, after)
    is_place = at[np.minimum(step, len(at) - 1)] == after
    step = np.append(np.where(is_place, step, len(at)), len(at))
    reached = np.zeros(len(step), bool)
    reached[0] = True
    for _ in range(len(step).bit_length()):  # the length of steps doubles each time
        reached[step[reached]] = True
        step = step[step]
    return reached[:-1]


def _prefixed(data: memoryview, where: str, limits: Limits) -> Iterator[str]:
    """Yields texts from data in which each text follows its length in four bytes."""
    at = 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise RefusedError(
                422, f"{where}: the data end within the length of a name"
            )
        (count,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if count > limits.name:
            _refuse_name(count, where, limits)
        if at + count > len(data):
            raise RefusedError(422, f"{where}: the data end within a name")
        yield of_utf8(bytes(data[at : at + count]), where)
        at += count


def of_utf8(name: bytes, where: str) -> str:
    """Decodes a name.

    Raises:
      RefusedError: the name is not UTF-8.
    """
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise RefusedError(
            422, f"{where}: a name must be in UTF-8, but has {error.reason}"
        ) from None


def write(
    asked: Asked, model: str, version: str, outputs: Sequence[Tensor]
) -> tuple[bytes, int | None]:
    """The body of an answer, and the bytes of its JSON if binary data follow (else None)."""
    shown, parts = [], []
    for output in outputs:
        facts: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": output.shape,
        }
        own = asked.binary if asked.outputs is None else asked.outputs[output.name]
        if own:
            part = to_bytes(output)
            facts["parameters"] = {"binary_data_size": len(part)}
            parts.append(part)
        else:
            facts["data"] = plain(output)
        shown.append(facts)
    document: dict[str, Any] = {"model_name": model, "model_version": version}
    if asked.id is not None:
        document["id"] = asked.id
    document["outputs"] = shown
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not parts:
        return body, None
    return b"".join([body, *parts]), len(body)


def to_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor as the protocol's binary data."""
    if isinstance(tensor.data, Chosen):
        return tensor.data.vocabulary.prefixed(tensor.data.ids)
    return np.ascontiguousarray(tensor.data).tobytes()


def plain(tensor: Tensor) -> Any:
    """The elements of an answer's tensor: an array, or a list of texts."""
    if isinstance(tensor.data, Chosen):
        return tensor.data.vocabulary.texts(tensor.data.ids)
    return tensor.data


def wanted(asked: Asked, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs that a request wants, in order."""
    if asked.outputs is None:
        return [*outputs.values()]
    return [outputs[name] for name in asked.outputs]
