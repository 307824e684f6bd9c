"""HTTP connections with limits on heads, waiting requests and time."""

from __future__ import annotations

import asyncio
import select
from typing import Any

import httptools
import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sparsejax.serving.app import CONNECTION, IS_WHOLE, app
from sparsejax.serving.service import Service

# Most bytes of a head and of a URL, and most headers, as in common servers and proxies. Prediction
# requests need 1 % of this.
_MOST_HEAD, _MOST_URL, _MOST_HEADERS = 2**16, 2**13, 100
# Most requests that a client may send on one connection before the first is answered.
_MOST_PIPELINED = 100
# After a refusal, the client's bytes are read for this many seconds, and at most this many bytes.
# Without reading them, the system would reset the connection, and the client would lose the
# answer.
_LINGER, _MOST_LINGERED = 1.0, 2**24
_ALIVE = 0.05  # seconds between checks whether a client has left
_END_OF_HEAD, _CONTINUE = b"\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"
_INVALID = "expected a request of HTTP/1.1"
_LARGE_HEAD = f"the head of a request has at most {_MOST_HEAD:,} bytes"


def configured(
    service: Service, application: ASGIApp | None = None, **options: Any
) -> uvicorn.Config:
    """The settings of uvicorn for a service.

    Args:
      service: the service whose limits apply to connections.
      application: the application that answers; by default `app` of the service.
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
        proxy_headers=False,  # the address of a client is not used
        **options,
    )


class _RefusedHeadError(Exception):
    """Raised to stop the parser when the head of a request is refused."""


class _Connection(HttpToolsProtocol):
    """A connection that is closed if the head of a request does not arrive in time.

    A head that is too large gets the status 431 or 414. An offer to use another protocol
    (`Upgrade`) is ignored. A client that has closed its sending side, but still reads, gets its
    answer.

    Attributes:
      patience: most seconds from a request's first byte, or from the start, to its last header.
      asking: the task that answers a request, as in `app.Connection`.
    """

    patience: float
    asking: asyncio.Task | None = None
    _late: asyncio.TimerHandle | None = None
    _in_head = True
    _head = 0  # bytes of the complete headers
    _progress = True  # whether the parser completed a head, or found a part of a body
    # Bytes since the last progress, for example of an incomplete head, trailer or chunk extension.
    _silent = 0
    # Status and text of a refusal. Once it is set, no further request is read.
    _refusal: tuple[int, str] | None = None
    _lingered = 0  # bytes that arrived after the refusal was sent
    _has_ended = False  # whether the client has ended sending

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Together(transport))  # pyrefly: ignore
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refusal is not None:
            self._lingered += len(data)
            if self._lingered > _MOST_LINGERED:
                self.transport.close()
            return
        while data and self._refusal is None and not self.transport.is_closing():
            piece, data = data[:_MOST_HEAD], data[_MOST_HEAD:]
            self._progress = False
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(400, _INVALID)
                else:
                    data = self._declined() + piece[offer.args[0] :] + data
                continue
            except httptools.HttpParserError:
                self._refuse(*self._refusal or (400, _INVALID))
                return
            self._silent = 0 if self._progress else self._silent + len(piece)
            if self._silent >= _MOST_HEAD:
                self._refuse(431, _LARGE_HEAD)
        if self._in_head:  # often the head arrives at once: no timer is needed
            self._wait()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MOST_PIPELINED:
            text = f"at most {_MOST_PIPELINED} requests of a connection may wait"
            self._stop_parser(429, text)
        super().on_message_begin()
        self.scope[CONNECTION] = self  # pyrefly: ignore
        self._in_head = self._progress = True
        self._head = 0

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > _MOST_URL:
            self._stop_parser(414, f"an address has at most {_MOST_URL:,} bytes")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer after a chunked body, which is ignored
            return
        self._head += len(name) + len(value)
        if self._head > _MOST_HEAD:
            self._stop_parser(431, _LARGE_HEAD)
        if len(self.headers) >= _MOST_HEADERS:
            self._stop_parser(431, f"a request has at most {_MOST_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._progress = True
        if self.parser.should_upgrade():  # the head is parsed again, see `_declined`
            return
        self._in_head = False
        self._stop()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._progress = True

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        if self._in_head:
            return
        super().on_message_complete()
        self.scope[IS_WHOLE] = True  # pyrefly: ignore

    def on_response_complete(self) -> None:
        self.transport.flush()  # pyrefly: ignore
        super().on_response_complete()
        if not self._is_asked:
            if self._refusal is not None:
                self._send_refusal()
            elif self._has_ended:
                self.transport.close()

    def eof_received(self) -> bool | None:  # pyrefly: ignore
        """Handles the end of a client's sending. Returns whether the connection stays open."""
        is_plain = self.scheme == "http"  # TLS has no half-closed connections
        if self._refusal or not (is_plain and self._is_asked) or self.cycle.more_body:
            return None
        self._has_ended = True
        # These bytes provoke a reset if the client has left. Clients of HTTP/1.1 ignore a status
        # 100, which HTTP/1.0 does not have.
        cycle = self.cycle
        if cycle.scope["http_version"] == "1.1" and not (
            self.pipeline or cycle.response_started
        ):
            self.transport.write(_CONTINUE)
        self._look_for_client()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_head = False
        self._stop()
        super().connection_lost(exc)
        if self.asking is not None:
            self.asking.cancel()

    @property
    def has_left(self) -> bool:
        """Whether the client has left."""
        return self.transport.is_closing()

    @property
    def _is_asked(self) -> bool:
        """Whether some request has not been answered completely."""
        return bool(self.pipeline) or (
            self.cycle is not None and not self.cycle.response_complete
        )

    def _declined(self) -> bytes:
        """Makes a new parser, and returns the current head without its `Upgrade` header for it.

        After this header, httptools would not read a body, but a server may ignore the offer
        (RFC 9110, 7.8).
        """
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [n + b": " + v for n, v in self.headers if n != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join(lines) + _END_OF_HEAD

    def _look_for_client(self) -> None:
        """Closes the connection if the client has left, and has not only ended sending.

        The two cases differ only after something was sent: a client that has left answers with a
        reset.
        """
        if not self._is_asked or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # POLLHUP or POLLERR
            self.transport.abort()
            return
        asyncio.get_running_loop().call_later(_ALIVE, self._look_for_client)

    def _stop_parser(self, status: int, text: str) -> None:
        """Stops the parser by an error, and stores the refusal of its request."""
        self._refusal = status, text
        raise _RefusedHeadError

    def _refuse(self, status: int, text: str) -> None:
        """Stops reading requests. The current one is refused once earlier ones are answered."""
        self._refusal = status, text
        self._stop()
        cycle = self.cycle
        if not self._is_asked:
            self._send_refusal()
        elif cycle.more_body and not (self.pipeline or cycle.response_started):
            # The application stops answering this request. Otherwise it would also refuse it, as
            # the rest of its body is missing.
            cycle.disconnected = True
            cycle.message_event.set()
            self._send_refusal()

    def _send_refusal(self) -> None:
        """Sends the refusal as JSON, like every error, and closes the connection soon after."""
        assert self._refusal is not None
        status, text = self._refusal
        body = orjson.dumps({"error": text})
        head = (
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        )
        self.transport.write(
            STATUS_LINE[status] + head + b"%d" % len(body) + _END_OF_HEAD + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
            asyncio.get_running_loop().call_later(_LINGER, self.transport.close)
        else:
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
    """A transport that sends the head and body of an answer in one packet.

    Each packet costs a system call at the sender and one at the receiver.
    """

    def __init__(self, transport: Any):
        self._transport, self._head = transport, b""
        self._has_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends a delayed head and `data`; if `data` ends like a head, it is delayed itself."""
        data, self._head = self._head + data, b""
        if self._has_ended or self._transport.is_closing():
            return  # a refusal was sent last; or the client has left while requests waited
        if data.endswith(_END_OF_HEAD) and not data.startswith(_CONTINUE):
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Sends the delayed head of an answer, if there is one."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def write_eof(self) -> None:
        """Closes the sending side: later writes are ignored."""
        self.flush()
        self._has_ended = True
        self._transport.write_eof()

    def close(self) -> None:
        """Closes the transport after all written bytes are sent."""
        self.flush()
        self._transport.close()
