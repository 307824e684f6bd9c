"""Requests with random damage are answered or refused, and the service continues.

The test for a release takes ten minutes, and sends requests to a service in a separate process:
`pytest tests/serving/test_fuzz.py -k alone`.
"""

import collections
import contextlib
import copy
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from open_inference.grpc import protocol as messages
from served import binary, grpc_listening, prefixed, resident, tensor

NASTY = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        10**30,
        1e308,
        -0.0,
        "",
        "\0",
        "item 1",
    ),
    *(
        "é" * 2000,
        [],
        [[]],
        [[[]]],
        {},
        {"a": 1},
        ["item 1"] * 3,
        [1, "a", None],
        [2**40],
    ),
    *(
        "BYTES",
        "INT32",
        "FP32",
        "FP64",
        "BOOL",
        "UINT64",
        "items",
        "lengths",
        "exclude",
        "candidates",
        "candidates_lengths",
    ),
]


def request_(chance: random.Random) -> dict[str, Any]:
    """A valid request, drawn at random."""
    names = [f"item {chance.randrange(12)}" for _ in range(6)]
    inputs = [tensor("items", "BYTES", names, chance.choice([[6], [2, 3]]))]
    if inputs[0]["shape"] == [6] and chance.random() < 0.5:
        inputs.append(tensor("lengths", "INT32", [4, 0, 2]))
    if chance.random() < 0.3:
        inputs.append(tensor("values", "FP32", [1.5] * 6, inputs[0]["shape"]))
    if chance.random() < 0.3:
        inputs.append(tensor("exclude", "BYTES", names[:2]))
    outputs = [{"name": "items", "parameters": {"binary_data": chance.random() < 0.5}}]
    parameters = {"k": chance.randrange(1, 6), "exclude_seen": chance.random() < 0.5}
    return {"id": "a", "inputs": inputs, "parameters": parameters, "outputs": outputs}


def places(document: Any) -> list[tuple[Any, Any]]:
    """All pairs of a container in a document and one of its keys."""
    if isinstance(document, dict):
        keys = list(document)
    elif isinstance(document, list):
        keys = list(range(len(document)))
    else:
        return []
    inner = [place for key in keys for place in places(document[key])]
    return [(document, key) for key in keys] + inner


def damaged(chance: random.Random) -> tuple[bytes, dict[str, str]]:
    """A randomly damaged request: its body and its headers."""
    document = request_(chance)
    for _ in range(chance.randrange(3)):
        container, key = chance.choice(places(document))
        if chance.random() < 0.3:
            del container[key]
        else:
            container[key] = copy.deepcopy(chance.choice(NASTY))
    body, headers = json.dumps(document).encode(), {}
    if chance.random() < 0.3:
        facts = {"name": "items", "datatype": "BYTES", "shape": [chance.randrange(3)]}
        names = [
            chance.choice([b"item 1", b"", b"\xff", b"x" * 2000]) for _ in range(2)
        ]
        body, size = binary([(facts, prefixed(*names))])
        headers["Inference-Header-Content-Length"] = str(
            size + chance.choice([0, 0, 0, 1])
        )
    if chance.random() < 0.4:
        at = chance.randrange(len(body))
        body = body[:at] + chance.randbytes(chance.randrange(4)) + body[at + 1 :]
    return body, headers


def ask_over_http(connection, chance: random.Random) -> int:
    """Sends a damaged request; returns the status of the answer."""
    body, headers = damaged(chance)
    connection.request("POST", "/v2/models/films/infer", body, headers)
    answer = connection.getresponse()
    found = answer.read()
    assert answer.status in (200, 400, 422), (body, headers, found)
    if answer.status != 200:
        assert json.loads(found).keys() == {"error"}
    return answer.status


ITEMS = {
    "name": "items",
    "datatype": "BYTES",
    "shape": [1],
    "contents": {"bytes_contents": [b"item 1"]},
}


def message(chance: random.Random) -> bytes:
    """A gRPC message that may be damaged."""
    if chance.random() < 0.2:
        made = messages.ModelInferRequest(model_name="films", inputs=[ITEMS])
        return made.SerializeToString()
    names = [chance.choice([b"item 1", b"", b"\xff"]) for _ in range(2)]
    inputs = [
        {
            "name": chance.choice(["items", "items", "lengths", ""]),
            "datatype": chance.choice(["BYTES", "BYTES", "INT32", "FP64", "BOOL", "?"]),
            "shape": [chance.choice([2, 2, 0, -1, 2**62])]
            * chance.choice([1, 1, 0, 3]),
            "contents": chance.choice(
                [{"bytes_contents": names}, {"int_contents": [1, 2]}, {}]
            ),
        }
        for _ in range(chance.randrange(3))
    ]
    raw = [chance.randbytes(chance.randrange(12)) for _ in range(chance.randrange(3))]
    made = messages.ModelInferRequest(
        model_name="films", inputs=inputs, raw_input_contents=raw
    ).SerializeToString()
    if chance.random() < 0.2:
        at = chance.randrange(len(made))
        made = made[:at] + chance.randbytes(chance.randrange(4)) + made[at + 1 :]
    return made


def ask_over_grpc(infer, chance: random.Random) -> grpc.StatusCode:
    """Sends a message that may be damaged; returns the status of the answer."""
    sent = message(chance)
    try:
        infer(sent)
    except grpc.RpcError as error:
        code = error.code()
        known = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
        assert code in known, (sent, error)
        return code
    return grpc.StatusCode.OK


_GOOD = {"inputs": [tensor("items", "BYTES", ["item 1", "item 5"])]}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def broken_http(chance: random.Random) -> bytes:
    """Bytes that are not valid HTTP, or end too early."""
    body = json.dumps(request_(chance)).encode()
    line = chance.choice(
        [b"POST /v2/models/films/infer HTTP/1.1", b"GET /v2 HTTP/1.1", b"PUT / HTTP/9"]
    )
    size = chance.choice([b"%d" % len(body), b"%d" % (len(body) + 9), b"-1", b"1e3"])
    headers = chance.sample(
        [
            b"host: a",
            b"content-length: " + size,
            b"transfer-encoding: chunked",
            b"upgrade: h2c\r\nconnection: upgrade",
            b"expect: 100-continue",
            b"connection: close",
            b"x: " + b"y" * chance.choice([10, 70_000]),
            b"\r\n".join(b"h%d: a" % n for n in range(chance.choice([3, 300]))),
            chance.randbytes(9),
        ],
        chance.randrange(6),
    )
    if chance.random() < 0.3:
        body = (
            b"%x\r\n" % chance.choice([len(body), 3, 2**70]) + body + b"\r\n0\r\n\r\n"
        )
    sent = b"\r\n".join([line, *headers]) + b"\r\n\r\n" + body
    sent *= chance.choice([1, 1, 1, 3])
    return sent[: chance.randrange(len(sent))] if chance.random() < 0.3 else sent


def broken_http2(chance: random.Random) -> bytes:
    """Random frames of HTTP/2, usually after a valid beginning."""
    sent = _PREFACE if chance.random() < 0.8 else chance.randbytes(24)
    sent += b"\0\0\0\4\0\0\0\0\0"  # empty settings
    for _ in range(chance.randrange(9)):
        content = chance.randbytes(chance.choice([0, 1, 4, 8, 40]))
        stated = len(content) if chance.random() < 0.8 else chance.randrange(2**24)
        kind, flags = chance.randrange(11), chance.randrange(256)
        sent += stated.to_bytes(3) + bytes([kind, flags])
        sent += struct.pack(">I", chance.choice([0, 1, 3, 2**31 - 1])) + content
    return sent


def break_in(port: int, sent: bytes, chance: random.Random) -> None:
    """Sends bytes, then disconnects: at once, by a reset, or after an answer."""
    with (
        contextlib.suppress(ConnectionError, TimeoutError),
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
    ):
        connection.sendall(sent)
        match chance.randrange(4):
            case 0:
                linger = struct.pack("ii", 1, 0)  # so it is reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            case 1:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(0.1)
                connection.recv(2**16)
            case 2:
                connection.settimeout(0.02)
                connection.recv(2**16)


def descriptors(process: int) -> int:
    """Number of files and sockets that a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))


def memory(process: int) -> int:
    """Bytes of memory that a process uses."""
    if process == os.getpid():
        return resident()
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    found = re.search(r"^VmRSS:\s*(\d+) kB", status, re.MULTILINE)
    assert found
    return 1024 * int(found[1])


class Fuzzer:
    """Sends random requests to a service.

    Attributes:
      counts: of requests, by what became of them.
    """

    def __init__(self, port: int, channel: grpc.Channel, grpc_port: int, seed: int):
        self._port, self._grpc_port = port, grpc_port
        self._infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        self._chance = random.Random(seed)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.counts: collections.Counter[Any] = collections.Counter()
        self._expected = self._good()

    def close(self) -> None:
        self._connection.close()

    def turn(self) -> None:
        """Sends a request of each kind."""
        chance = self._chance
        self.counts[ask_over_http(self._connection, chance)] += 1
        self.counts[ask_over_grpc(self._infer, chance)] += 1
        if chance.random() < 0.3:
            break_in(self._port, broken_http(chance), chance)
            self.counts["broken HTTP"] += 1
        if chance.random() < 0.3:
            break_in(self._grpc_port, broken_http2(chance), chance)
            self.counts["broken HTTP/2"] += 1
        if chance.random() < 0.2:
            call = self._infer.future(message(chance), timeout=chance.random() / 100)
            if chance.random() < 0.5:
                call.cancel()
            self.counts["cancelled or late"] += 1
            with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
                call.result()
        if chance.random() < 0.1:
            # Scores have the last bits of the program that a batch of this size runs.
            for found, wanted in zip(self._good(), self._expected, strict=True):
                data = wanted["data"]
                assert found == wanted | {"data": found["data"]}
                is_text = any(isinstance(each, str) for each in data)
                assert found["data"] == (data if is_text else pytest.approx(data))
            self.counts["right answers"] += 1

    def _good(self) -> list[dict[str, Any]]:
        """Sends a valid request; returns the outputs in the answer."""
        body = json.dumps(_GOOD).encode()
        self._connection.request("POST", "/v2/models/films/infer", body)
        answer = self._connection.getresponse()
        found = answer.read()
        assert answer.status == 200, found
        return json.loads(found)["outputs"]


def fuzz(
    port: int, grpc_port: int, process: int, goes_on: Callable[[int], float], seed: int
) -> collections.Counter[Any]:
    """Asks a service whose memory and descriptors must not grow.

    Args:
      port: of HTTP.
      grpc_port: of gRPC.
      process: that answers.
      goes_on: of the number of turns, the share of the work that is done.
      seed: of the requests.
    """
    with (
        grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        contextlib.closing(Fuzzer(port, channel, grpc_port, seed)) as fuzzer,
    ):
        turns, opened, held = 0, 0, 0
        while (done := goes_on(turns)) < 1:
            if not held and done >= 1 / 3:  # by now all is there that is kept
                opened, held = descriptors(process), memory(process)
            fuzzer.turn()
            turns += 1
        counts = fuzzer.counts
        until = time.monotonic() + 30  # the service hears a moment later who has left
        while descriptors(process) > opened and time.monotonic() < until:
            time.sleep(0.05)
        now = memory(process)
        print(f"{turns} turns; memory {held} -> {now}; {dict(counts)}")
        assert descriptors(process) <= opened
        # A 20th of what two requests of 80 bytes would be in each turn of the long test.
        assert now < held + 2**24
    assert {200, 400, 422} < counts.keys()
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} < counts.keys()
    assert counts["broken HTTP"] and counts["broken HTTP/2"] and counts["right answers"]
    return counts


def test_requests_over_both_ports(client, service):
    with grpc_listening(service) as port:
        fuzz(client.port, port, os.getpid(), lambda turns: turns / 500, seed=0)
    assert service.in_hand == 0 and service.version("films", None).batcher.waiting == 0


def test_a_service_alone(file, tmp_path):
    """It takes ten minutes."""
    argv = f"serve {file} --name films --port 0 --grpc-port 0".split()
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "sparsejax", *argv], stderr=errors
        )
    events: list[dict[str, Any]] = []
    try:
        while '"ready"' not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        ready = json.loads(log.read_text().splitlines()[-1])
        begun = time.monotonic()
        fuzz(
            ready["port"],
            ready["grpc_port"],
            process.pid,
            lambda turns: (time.monotonic() - begun) / 600,
            seed=time.time_ns(),
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        events = [json.loads(line) for line in log.read_text().splitlines()]
    finally:
        process.kill()
        process.wait()
    assert not [event for event in events if event["event"] == "error"]
