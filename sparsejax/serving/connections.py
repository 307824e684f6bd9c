"""Connections of HTTP: who opens one and sends no request is not waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparsejax.serving.app import CONNECTION, IS_WHOLE, app
from sparsejax.serving.service import Service

_END_OF_HEAD, _CONTINUE = b"\r\n\r\n", b"HTTP/1.1 100"


def configured(
    service: Service, application: ASGIApp | None = None, **options: Any
) -> uvicorn.Config:
    """The settings of uvicorn for a service, with further ones.

    Args:
      service: whose limits connections have.
      application: that answers; by default `app` of the service.
      options: further settings.
    """
    seconds = service.settings.body_seconds

    class Connection(_Connection):
        patience = seconds

    return uvicorn.Config(
        application or app(service),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody asks for the address of a client
        **options,
    )


class _Connection(HttpToolsProtocol):
    """A connection that is closed unless the head of a request comes in time.

    Attributes:
      patience: seconds from the first byte of a request, or from the start, to its last header.
      asking: see `app.Connection`.
    """

    patience: float
    asking: asyncio.Task | None = None
    _late: asyncio.TimerHandle | None = None
    _in_head = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Together(transport))  # pyrefly: ignore
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:  # mostly the head comes at once, so that no timer is needed
            self._wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # pyrefly: ignore
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.scope[IS_WHOLE] = True  # pyrefly: ignore

    def on_response_complete(self) -> None:
        self.transport.flush()  # pyrefly: ignore
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_head = False
        self._stop()
        super().connection_lost(exc)
        if self.asking is not None:
            self.asking.cancel()

    @property
    def has_left(self) -> bool:
        """Whether the client has."""
        return self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, as all errors are answered: in JSON."""
        body = orjson.dumps({"error": "expected a request of HTTP/1.1"})
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _wait(self) -> None:
        if self._late is None:
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(self.patience, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Together:
    """A transport that sends the head of an answer with its body, as one packet.

    Each packet is a call into the system, here and where it arrives.
    """

    def __init__(self, transport: Any):
        self._transport, self._head = transport, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends bytes after the head that waits. What may be a head waits, see `flush`."""
        data, self._head = self._head + data, b""
        if data.endswith(_END_OF_HEAD) and not data.startswith(_CONTINUE):
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Sends a head that waits."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        """Closes the transport when all is sent."""
        self.flush()
        self._transport.close()
