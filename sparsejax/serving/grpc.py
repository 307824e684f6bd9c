"""The Open Inference Protocol over gRPC: rows and answers are as over HTTP."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from open_inference.grpc import protocol as messages

from sparsejax.serving import logs, protocol
from sparsejax.serving.protocol import Asked, Limits, RefusedError, Tensor
from sparsejax.serving.service import Service

_CODES = {
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_MANY = 2**31 - 1
# Most concurrent calls on a connection, as many as an HTTP/2 server should allow (RFC 9113,
# 6.5.2). This bounds messages that are still arriving: the service counts messages only once
# complete.
_CALLS = 100
_LOOK = 0.5  # seconds between two checks for clients that watch the health
_SERVICE = "inference.GRPCInferenceService"
_METHODS = (
    *("ServerLive", "ServerReady", "ModelReady"),
    *("ServerMetadata", "ModelMetadata", "ModelInfer"),
)
# For each datatype, the field of a message that contains its numbers.
_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def server(service: Service) -> grpc.aio.Server:
    """A gRPC server that answers requests for a service. It has no port and is not started."""
    most = service.settings.limits.body
    options = [
        ("grpc.max_receive_message_length", most),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", _CALLS),
        # This protection would refuse random calls near the bound, without a metric or a log.
        ("grpc.http.overload_protection", 0),
        # With more pending calls, gRPC would cancel some without a metric or a log line.
        # `Service.begin` refuses them instead.
        ("grpc.server.max_pending_requests", _MANY),
        ("grpc.server.max_pending_requests_hard_limit", _MANY),
    ]
    made = grpc.aio.server(options=options)
    answers = _Answers(service)
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            _of_whole_messages(getattr(answers, name)),
            request_deserializer=_parser(getattr(messages, f"{name}Request")),
            response_serializer=getattr(messages, f"{name}Response").SerializeToString,
        )
        for name in _METHODS
    }
    handler = grpc.method_handlers_generic_handler(_SERVICE, methods)
    made.add_generic_rpc_handlers((handler, _health(service)))
    return made


def _health(service: Service) -> grpc.GenericRpcHandler:
    """The handler of gRPC's standard health service, which probes and load balancers call."""
    statuses = health_pb2.HealthCheckResponse

    def status(request: Any) -> Any:
        """The status of the server, the protocol or a model; None if the name is unknown."""
        if request.service not in {"", _SERVICE, *service.models}:
            return None
        return statuses.SERVING if service.is_ready else statuses.NOT_SERVING

    async def check(request: Any, context: Any) -> Any:
        found = status(request)
        if found is None:
            text = f"unknown service {request.service!r:.80}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return statuses(status=found)

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        last = None
        while True:
            found = status(request)
            found = statuses.SERVICE_UNKNOWN if found is None else found
            if found != last:
                yield statuses(status=found)
            if service.draining:  # otherwise this call would delay the end
                return
            last = found
            await asyncio.sleep(_LOOK)

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health",
        {
            "Check": grpc.unary_unary_rpc_method_handler(
                check,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=statuses.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                watch,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=statuses.SerializeToString,
            ),
        },
    )


def _parser(kind: Any) -> Callable[[bytes], Any]:
    """Makes a function that parses a message; for invalid bytes, it returns a `RefusedError`."""

    def parse(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            return RefusedError(400, f"the message cannot be read: {error}")

    return parse


def _of_whole_messages(method: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Wraps a method. A `RefusedError` in place of a message ends the call before the method."""

    async def answered(request: Any, context: Any) -> Any:
        if isinstance(request, RefusedError):
            await _abort(context, request)
        return await method(request, context)

    return answered


def read(request: Any, limits: Limits, missing: bool = False) -> Asked:
    """Reads an inference request. If `missing`, a number may be NaN: a missing value.

    Raises:
      RefusedError: the request is invalid or too large.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RefusedError(
            422,
            f"there are {len(request.inputs)} inputs, but {len(raw)} raw_input_contents; "
            "give one for each input, or none",
        )
    tensors: dict[str, Tensor] = {}
    for number, given in enumerate(request.inputs):
        tensor = _tensor(given, raw[number] if raw else None, limits, missing)
        if tensor.name in tensors:
            raise RefusedError(422, f"the input {tensor.name!r:.80} is given twice")
        tensors[tensor.name] = tensor
    wanted = {output.name: bool(raw) for output in request.outputs} or None
    parameters = _parameters(request.parameters)
    parameters.pop("binary_data_output", None)  # outputs have the form of the inputs
    return Asked(request.id or None, parameters, tensors, wanted, bool(raw))


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {name: each.WhichOneof("parameter_choice") for name, each in given.items()}
    return protocol.said(
        {
            name: None if kind is None else getattr(given[name], kind)
            for name, kind in kinds.items()
        }
    )


def _tensor(given: Any, raw: bytes | None, limits: Limits, missing: bool) -> Tensor:
    where, datatype = f"the input {given.name!r:.80}", given.datatype
    if datatype not in _FIELDS:
        raise RefusedError(
            422,
            f"{where}: datatype must be one of {', '.join(_FIELDS)}, got {datatype!r:.40}",
        )
    shape = protocol.checked_shape([*given.shape], where)
    if raw is not None:
        data = protocol.of_bytes(memoryview(raw), datatype, where, limits, missing)
    elif datatype == "BYTES":
        names = given.contents.bytes_contents
        found = [protocol.of_utf8(name, where) for name in names]
        data = protocol.texts(found, where, limits)
    else:
        flat = [*getattr(given.contents, _FIELDS[datatype])]
        data = protocol.numbers(flat, datatype, where, missing)
    protocol.check_count(data, shape, where)
    return Tensor(given.name, datatype, shape, data)


def write(asked: Asked, model: str, version: str, outputs: list[Tensor]) -> Any:
    """Makes the message of an answer."""
    answer = messages.ModelInferResponse(
        model_name=model, model_version=version, id=asked.id or ""
    )
    for tensor in outputs:
        facts = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        output = answer.outputs.add(**facts)
        if asked.binary:
            answer.raw_output_contents.append(protocol.to_bytes(tensor))
        elif tensor.datatype == "BYTES":
            names = (name.encode() for name in protocol.plain(tensor))
            output.contents.bytes_contents.extend(names)
        else:
            numbers = np.asarray(tensor.data).tolist()
            getattr(output.contents, _FIELDS[tensor.datatype]).extend(numbers)
    return answer


class _Answers:
    """Implements the protocol's methods, under the protocol's names."""

    def __init__(self, service: Service):
        self._service = service

    async def ServerLive(self, request, context):
        return messages.ServerLiveResponse(live=self._service.is_live)

    async def ServerReady(self, request, context):
        return messages.ServerReadyResponse(ready=self._service.is_ready)

    async def ModelReady(self, request, context):
        await self._version(request.name, request.version, context)
        return messages.ModelReadyResponse(ready=self._service.is_ready)

    async def ServerMetadata(self, request, context):
        return messages.ServerMetadataResponse(**self._service.about())

    async def ModelMetadata(self, request, context):
        version = await self._version(request.name, request.version, context)
        return messages.ModelMetadataResponse(**self._service.about_model(version))

    async def _version(self, model: str, number: str, context):
        try:
            return self._service.version(model, number or None)
        except RefusedError as error:
            await _abort(context, error)

    async def ModelInfer(self, request, context):
        begun, service, code = time.monotonic(), self._service, 200
        facts: dict[str, Any] = {"rows": 0}
        told = dict(context.invocation_metadata() or ())
        identity = logs.request_id(_text(told.get("x-request-id", "")))
        in_hand, refused, answer = None, None, None
        try:
            in_hand = service.begin()
            service.hold(in_hand, request.ByteSize())
            model, number = request.model_name, request.model_version or None
            form = service.version(model, number).form  # before the tensors are read
            found = await service.predict(
                model,
                number,
                functools.partial(
                    read, request, service.settings.limits, form.takes_missing
                ),
                write,
                size=request.ByteSize() if request.raw_input_contents else 0,
                seconds=context.time_remaining(),
            )
            answer = found.content
            facts = {"rows": found.rows, "model": found.model, "version": found.version}
        except RefusedError as error:
            refused = error
        except Exception as error:  # noqa: BLE001 - a bug, which is logged
            logs.error(identity, error)
            text = f"the service failed; its log says why at request {identity}"
            refused = RefusedError(500, text)
        except BaseException:  # the client has left
            code = 499
            raise
        finally:
            if in_hand is not None:
                service.end(in_hand)
            code, seconds = (
                refused.status if refused else code,
                time.monotonic() - begun,
            )
            service.metrics.request("grpc", code, seconds)
            trace = _text(told.get("traceparent", ""))
            logs.request("grpc", identity, trace, code=code, seconds=seconds, **facts)
        if refused is not None:
            await _abort(context, refused)
        return answer


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else ""


async def _abort(context: Any, error: RefusedError) -> NoReturn:
    code = _CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT)
    await context.abort(code, str(error))
    raise AssertionError("abort raises")
