"""Connections: headers of any size, offers of other protocols, half-closed connections, delayed
bodies.
"""

import json
import re
import socket
import threading

import pytest
from served import listening, resident, tensor, until, working

from sparsejax.serving.protocol import Limits
from sparsejax.serving.service import Service, Settings

INFER = "/v2/models/films/infer"
BODY = json.dumps({"inputs": [tensor("items", "BYTES", ["item 3"])]}).encode()
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n"
OFFER = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)


def post(*headers: bytes, length: int = len(BODY), version: str = "1.1") -> bytes:
    """The header of a request."""
    line = f"POST {INFER} HTTP/{version}\r\nhost: x\r\ncontent-length: {length}\r\n"
    return line.encode() + b"".join(headers) + b"\r\n"


def asked(port: int, *parts: bytes, ends: bool = False) -> bytes:
    """Sends parts of a request; returns all that a service answers until it closes the
    connection.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(2**16):
            found += part
        return found


CHUNKED = f"POST {INFER} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LARGE = {
    "one header": (LIVE + b"a: " + b"x" * 2**16 + b"\r\n\r\n", b"431"),
    "one header without end": (LIVE + b"a: " + b"x" * 2**18, b"431"),
    "a name without end": (LIVE + b"x" * 2**18, b"431"),
    "many headers": (LIVE + b"a: b\r\n" * 100 + b"\r\n", b"431"),
    "several large headers": (
        LIVE + b"".join(b"a: %s\r\n" % (b"x" * 2**14) for _ in range(4)) + b"\r\n",
        b"431",
    ),
    "address": (b"GET /" + b"x" * 2**13 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"414"),
    "address without end": (b"GET /" + b"x" * 2**18, b"414"),
    "trailers": (CHUNKED.encode() + b"0\r\na: " + b"x" * 2**18, b"431"),
    "many trailers": (CHUNKED.encode() + b"0\r\n" + b"a: b\r\n" * 50_000, b"431"),
    "extension of a chunk": (CHUNKED.encode() + b"1;a=" + b"x" * 2**18, b"431"),
    "an offer": (LIVE + OFFER + b"a: " + b"x" * 2**16 + b"\r\n\r\n", b"431"),
}


@pytest.mark.parametrize("case", LARGE)
def test_large_heads_are_refused(port, case):
    sent, status = LARGE[case]
    found = asked(port, sent)
    *_, last = re.split(rb"(?=HTTP/1\.1 \d)", found)
    assert last.startswith(b"HTTP/1.1 " + status), found
    assert (
        b"connection: close" in last
        and b"at most"
        in json.dumps(json.loads(last.partition(b"\r\n\r\n")[2])).encode()
    )


def test_heads_below_the_limits_are_answered(port):
    close = b"connection: close\r\n"
    many = b"".join(b"a%d: %s\r\n" % (n, b"x" * 600) for n in range(97))
    assert asked(port, LIVE + close + many + b"\r\n").startswith(b"HTTP/1.1 200")
    long = b"GET /v2?" + b"x" * 8000 + b" HTTP/1.1\r\nhost: x\r\n" + close + b"\r\n"
    assert asked(port, long).startswith(b"HTTP/1.1 200")
    # Bodies in chunks of a byte, with trailers, are no heads.
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\na: b\r\n\r\n"
    head = CHUNKED.encode().replace(b"host: x", b"host: x\r\nconnection: close")
    assert asked(port, head, chunks).startswith(b"HTTP/1.1 200")


def test_a_flood_of_headers_takes_no_memory_and_nobody_waits(client, port):
    client.infer(tensor("items", "BYTES", ["item 1"]))
    before, ended = resident(), threading.Event()

    def flood() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(LIVE)
            try:
                while not ended.is_set():
                    connection.sendall(b"a: b\r\n" * 10_000)
            except OSError:  # the service has closed the connection
                ended.set()

    thread = threading.Thread(target=flood)
    thread.start()
    for _ in range(20):
        assert client.infer(tensor("items", "BYTES", ["item 1"]))[0] == 200
    assert ended.wait(60)
    thread.join()
    assert resident() < before + 2**24


def test_requests_that_wait_on_a_connection_are_bounded(port):
    close = LIVE + b"connection: close\r\n\r\n"
    found = asked(port, (LIVE + b"\r\n") * 50 + close)
    assert found.count(b"HTTP/1.1 200") == 51
    found = asked(port, (LIVE + b"\r\n") * 3000)
    answers = re.findall(rb"HTTP/1\.1 (\d+)", found)
    assert answers == [b"200"] * 101 + [b"429"]  # the first one does not wait


def test_what_is_no_http_is_told_after_the_answers_before(port):
    found = asked(port, post() + BODY + b"what is this?\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d+)", found) == [b"200", b"400"]


@pytest.mark.parametrize("offer", [OFFER, OFFER.replace(b"h2c", b"websocket")])
def test_an_offer_of_another_protocol_is_ignored(port, offer):
    close = b"connection: close\r\n"
    requests = post(offer) + BODY, post(offer) + BODY[:9], BODY[9:], LIVE + offer
    found = asked(port, *requests, b"\r\n", post(close) + BODY)
    assert re.findall(rb"HTTP/1\.1 (\d+)", found) == [b"200"] * 4
    assert found.count(b'"scores"') == 3


def test_an_offer_with_a_body_in_chunks(port):
    begin = CHUNKED.encode().replace(b"host: x\r\n", b"host: x\r\n" + OFFER)
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    found = asked(port, begin, chunk, LIVE + b"connection: close\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d+)", found) == [b"200"] * 2
    assert b'"scores"' in found


def test_no_tunnel(port):
    found = asked(
        port, b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n"
    )
    assert found.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_sends_no_more_is_answered(port, version):
    found = asked(port, post(version=version) + BODY, ends=True)
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", found)
    assert statuses[-1] == b"200" and b'"scores"' in found
    # By the first answer the service learns whether the client has left.
    assert {*statuses[:-1]} <= ({b"100"} if version == "1.1" else set())
    found = asked(port, (post(version="1.1") + BODY) * 3, ends=True)
    assert found.count(b'"scores"') == 3
    assert asked(port, post() + BODY[:-1], ends=True) == b""  # it will never be whole


@pytest.mark.parametrize("coding", [b"", b"Identity", b"identity "])
def test_no_coding_is_none(port, coding):
    headers = b"content-encoding: " + coding + b"\r\nconnection: close\r\n"
    assert asked(port, post(headers) + BODY).startswith(b"HTTP/1.1 200")


def test_bodies_that_are_held_are_bounded(service, monkeypatch):
    settings = Settings(limits=Limits(body=2**16), held=2**17, body_seconds=300)
    held = Service("films", settings)
    monkeypatch.setattr(held, "_version", service.version("films", None))
    size = 2**16 - 100
    with listening(held) as port:
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        for connection in slow:
            connection.settimeout(60)
            connection.sendall(post(length=size) + b" " * (size - 1))
        until(lambda: held.in_hand == 2)
        live = asked(port, LIVE + b"connection: close\r\n\r\n")
        assert live.startswith(b"HTTP/1.1 200")
        found = asked(port, post(length=300) + b" " * 299)
        assert found.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in found
        assert b"of 131,072 that may be held" in found
        for connection in slow:
            connection.sendall(b" ")
            assert connection.recv(2**16).startswith(b"HTTP/1.1 400")
            connection.close()
        close = b"connection: close\r\n"
        found = asked(port, post(close, length=300) + b" " * 300)
        assert found.startswith(b"HTTP/1.1 400")  # there is room again


def test_who_leaves_while_several_requests_wait(client, port, service, caplog):
    ask = lambda: client.infer(tensor("items", "BYTES", ["item 1"]))
    with working(service, ask):
        assert asked(port, (post() + BODY) * 2 + post() + BODY[:-1], ends=True) == b""
    assert client.infer(tensor("items", "BYTES", ["item 1"]))[0] == 200
    assert service.in_hand == 0 and not caplog.records
