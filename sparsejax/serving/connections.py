"""Connections of HTTP: who opens one and sends no request is not waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparsejax.serving.app import CONNECTION, app
from sparsejax.serving.service import Service


def configured(
    service: Service, application: Starlette | None = None, **options: Any
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
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
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

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # pyrefly: ignore
        self._wait()

    def on_headers_complete(self) -> None:
        self._stop()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
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
