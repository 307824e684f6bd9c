"""The Open Inference Protocol over HTTP."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sparsejax.serving import logs, metrics, protocol
from sparsejax.serving.page import page
from sparsejax.serving.protocol import RefusedError
from sparsejax.serving.service import Answered, InHand, Service
from sparsejax.serving.versions import Versions

# Keys in a request's scope: its `Connection`, and whether its whole body has already arrived.
CONNECTION, IS_WHOLE = "sparsejax.connection", "sparsejax.is_whole"
_HEADER = b"inference-header-content-length"
# A header of Envoy, and thus of Istio and KServe: how long the client waits for an answer.
_DEADLINE = b"x-envoy-expected-rq-timeout-ms"
_CLOSE = {"connection": "close"}
_INFER = re.compile("/v2/models/[^/]+(/versions/[^/]+)?/infer")
_JSON = b"application/json"
# Status for requests whose client has left, as in nginx. No client receives it.
_GONE = 499


@runtime_checkable
class Connection(Protocol):
    """The client that sends a request.

    Attributes:
      asking: the task that answers, which is cancelled when the client leaves; or None.
      has_left: whether the client has left.
    """

    asking: asyncio.Task | None

    @property
    def has_left(self) -> bool: ...


# Used for the log and metrics of a refused request, which has no answer.
_NOTHING = Answered(None, 0, None, None)


class _Answer(NamedTuple):
    """Status, headers and body of an answer. Making Starlette's `Response` would take longer."""

    status_code: int
    raw_headers: list[tuple[bytes, bytes]]
    body: bytes | memoryview


def app(service: Service) -> ASGIApp:
    """The ASGI application that answers requests for a service."""

    async def live(request: Request) -> Response:
        return _json({"live": service.is_live}, 200 if service.is_live else 503)

    async def ready(request: Request) -> Response:
        return _json({"ready": service.is_ready}, 200 if service.is_ready else 503)

    async def server(request: Request) -> Response:
        return _json(service.about())

    async def model(request: Request) -> Response:
        return _json(service.about_model(_version(service, request)))

    async def model_ready(request: Request) -> Response:
        facts = {"name": _version(service, request).model, "ready": service.is_ready}
        return _json(facts, 200 if service.is_ready else 503)

    async def numbers(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)

    routes = []
    if service.settings.page:
        shown = page(service.models, service.settings.titles)

        async def person(request: Request) -> Response:
            return shown

        routes.append(Route("/", person))
    infer = _Inference(service)
    models = ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"]
    routed = Starlette(
        routes=[
            *(Route(f"{path}/infer", infer, methods=["POST"]) for path in models),
            Route("/v2", server),
            Route("/v2/health/live", live),
            Route("/v2/health/ready", ready),
            Route("/metrics", numbers),
            *routes,
            *(Route(path, model) for path in models),
            *(Route(f"{path}/ready", model_ready) for path in models),
        ],
        exception_handlers=_HANDLERS,
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette compares routes one by one. This takes a tenth of the time of a prediction.
        is_infer = scope["method"] == "POST" and _INFER.fullmatch(scope["path"])
        await (infer if is_infer else routed)(scope, receive, send)

    return answer


def admin(service: Service, versions: Versions) -> Starlette:
    """The application of the protocol's repository extension, which changes the version.

    It needs an address of its own, which only the operator can reach.
    """

    async def index(request: Request) -> Response:
        asked = await _document(request, service, ["ready"])
        found = await asyncio.to_thread(versions.index)
        only = asked.get("ready", False)
        if not isinstance(only, bool):
            raise RefusedError(422, f"ready must be true or false, got {only!r:.40}")
        kept = [each for each in found if each["state"] == "READY" or not only]
        return _json(kept)

    async def load(request: Request) -> Response:
        await _document(request, service, [])
        service.check_name(request.path_params["model"])
        await versions.load()
        return _json({})

    async def unload(request: Request) -> Response:
        await _document(request, service, [])
        service.check_name(request.path_params["model"])
        await versions.unload()
        return _json({})

    def operated(answer: Callable[[Request], Awaitable[Response]]):
        async def answered(request: Request) -> Response:
            identity = logs.request_id(request.headers.get("x-request-id", ""))
            try:
                if "origin" in request.headers:
                    raise RefusedError(
                        403, "a web page must not ask this; leave out the header Origin"
                    )
                return await answer(request)
            except Exception as error:  # noqa: BLE001 - told to the client or the log
                return _instead(error, identity)

        return answered

    model = "/v2/repository/models/{model}"
    return Starlette(
        routes=[
            Route("/v2/repository/index", operated(index), methods=["POST"]),
            Route(f"{model}/load", operated(load), methods=["POST"]),
            Route(f"{model}/unload", operated(unload), methods=["POST"]),
        ],
        exception_handlers=_HANDLERS,
    )


async def _document(
    request: Request, service: Service, known: Sequence[str]
) -> dict[str, Any]:
    """The JSON object in the body of a request; an empty dict if there is no body.

    Raises:
      RefusedError: the body is not a JSON object, or has unknown fields.
    """
    body = await _body(request.scope, request.receive, service)
    try:
        found = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise RefusedError(400, f"the request must be JSON in UTF-8: {error}") from None
    if not isinstance(found, dict):
        raise RefusedError(422, f"the request must be an object, got {found!r:.40}")
    if unknown := [name for name in found if name not in known]:
        shown = ", ".join(known) or "none"
        raise RefusedError(422, f"unknown field {unknown[0]!r:.80}; known are: {shown}")
    return found


def _json(document: Any, status: int = 200, headers: Any = None) -> Response:
    body = orjson.dumps(document)
    return Response(body, status, headers, media_type="application/json")


def _version(service: Service, request: Request):
    return service.version(*_asked(request.scope))


def _asked(scope: Scope) -> tuple[str, str | None]:
    """The model and the version named in a request's path; None if it names no version."""
    _, _, _, model, *rest = scope["path"].split("/")
    return model, rest[1] if rest[:1] == ["versions"] else None


def _refusal(error: RefusedError) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status in (408, 413):  # the rest of the body will not be read
        headers |= _CLOSE
    return _json({"error": str(error)}, error.status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _refusal(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code == 404:
        text = "unknown path; the paths of the protocol begin with /v2"
    elif error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "others").split(", ")
        allowed = ", ".join(sorted(methods))
        text = f"{request.method} is not for this path, which takes {allowed}"
    return _json({"error": text}, error.status_code, error.headers)


_HANDLERS = {HTTPException: _no_route, RefusedError: _refused}


class _Inference:
    """The ASGI application that answers prediction requests.

    It handles ASGI messages itself: Starlette's requests and responses would double the time.
    """

    def __init__(self, service: Service):
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, and counts and logs it."""
        service, begun = self._service, time.monotonic()
        headers = _headers(scope)
        identity = logs.request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        connection: Connection = scope[CONNECTION]
        connection.asking = asyncio.current_task()
        in_hand: InHand | None = None
        answer: _Answer | Response
        found = _NOTHING
        try:
            in_hand = service.begin()
            hold = functools.partial(service.hold, in_hand)
            found = await _infer(service, scope, headers, receive, hold)
            answer = found.content
        except asyncio.CancelledError:
            if not connection.has_left:
                raise
            answer = Response(status_code=_GONE)
        except Exception as error:  # noqa: BLE001 - told to the client or the log
            answer = _instead(error, identity)
        finally:
            connection.asking = None
            if in_hand is not None:
                service.end(in_hand)
        code, seconds = answer.status_code, time.monotonic() - begun
        told = [*answer.raw_headers, (b"x-request-id", identity.encode())]
        if service.draining or (code == 503 and not scope.get(IS_WHOLE)):
            told = [each for each in told if each[0] != b"connection"]
            told.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": code, "headers": told})
        await send({"type": "http.response.body", "body": answer.body})
        service.metrics.request("http", code, seconds)
        trace = headers.get(b"traceparent", b"").decode("latin-1")
        facts = {"rows": found.rows, "model": found.model, "version": found.version}
        logs.request("http", identity, trace, code=code, seconds=seconds, **facts)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The headers of a request. If a header is repeated, its first value is used."""
    return dict(reversed(scope["headers"]))


def _instead(error: Exception, identity: str) -> Response:
    """The response to a request that failed with the given error."""
    if isinstance(error, RefusedError):
        return _refusal(error)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_GONE)
    logs.error(identity, error)  # a bug
    text = f"the service failed; its log says why at request {identity}"
    return _json({"error": text}, 500)


async def _infer(
    service: Service,
    scope: Scope,
    headers: Mapping[bytes, bytes],
    receive: Receive,
    hold: Callable[[int], None],
) -> Answered[_Answer]:
    """Answers a prediction request; see `_body` for `hold`."""
    model, number = _asked(scope)
    form = service.version(model, number).form  # raises before the body is read
    wait = headers.get(_DEADLINE, b"")
    seconds = int(wait[:9]) / 1e3 if wait.isdigit() else None
    if headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
        raise RefusedError(415, "a request must not be compressed")
    body = await _body(scope, receive, service, hold)
    if (header := headers.get(_HEADER)) is not None:
        header = header.decode("latin-1")
    limits = service.settings.limits
    read = functools.partial(
        protocol.read, body, header, limits, missing=form.takes_missing
    )
    found = await service.predict(
        model,
        number,
        read,
        protocol.write,
        # JSON is parsed with Python's lock held, so parsing it in another thread would not help.
        size=0 if header is None else len(body),
        seconds=seconds,
    )
    content, json_bytes = found.content
    told = [(b"content-length", b"%d" % len(content))]
    if json_bytes is None:
        told.append((b"content-type", _JSON))
    else:
        told.append((b"content-type", b"application/octet-stream"))
        told.append((_HEADER, b"%d" % json_bytes))
    answer = _Answer(200, told, content)
    return Answered(answer, found.rows, found.model, found.version)


async def _body(
    scope: Scope,
    receive: Receive,
    service: Service,
    hold: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Reads the whole body of a request.

    Args:
      scope: ASGI scope of the request.
      receive: ASGI function that returns the parts of the body.
      service: the service whose limits apply.
      hold: function that is called with the size of each part, and may refuse it.

    Raises:
      RefusedError: the body is too large, or does not arrive in time.
    """
    most, seconds = service.settings.limits.body, service.settings.body_seconds
    stated = _headers(scope).get(b"content-length", b"0")
    if not stated.isdigit() or int(stated[:18]) > most:
        raise RefusedError(413, _too_large(most))
    if scope.get(IS_WHOLE):  # no time limit is needed
        return await _whole(receive, most, hold)
    try:
        async with asyncio.timeout(seconds):
            return await _whole(receive, most, hold)
    except TimeoutError:
        raise RefusedError(
            408, f"a request must be sent within {seconds:g} seconds"
        ) from None


async def _whole(receive: Receive, most: int, hold: Callable[[int], None]) -> bytes:
    """Receives the parts of a request's body and joins them."""
    joined, is_whole = None, False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, is_whole = message["body"], not message["more_body"]
        size = len(part) + (0 if joined is None else len(joined))
        if size > most:
            raise RefusedError(413, _too_large(most))
        hold(len(part))
        if is_whole and joined is None:
            return part  # the usual case, without a copy
            # A list of parts could take fifty times their size: a client may send single bytes.
        joined = bytearray() if joined is None else joined
        joined += part
    assert joined is not None
    return bytes(joined)


def _too_large(most: int) -> str:
    return f"a request has at most {most:,} bytes"
