"""Requests that chance has damaged are answered or refused, and the service goes on."""

import contextlib
import copy
import http.client
import json
import random
from typing import Any

from open_inference.grpc import protocol as messages
from served import binary, prefixed, tensor

from sparsejax.serving import grpc as over_grpc
from sparsejax.serving.protocol import Limits, RefusedError

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
    """A request without a fault."""
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
    """Each container of a document with each of its keys."""
    if isinstance(document, dict):
        keys = list(document)
    elif isinstance(document, list):
        keys = list(range(len(document)))
    else:
        return []
    inner = [place for key in keys for place in places(document[key])]
    return [(document, key) for key in keys] + inner


def damaged(chance: random.Random) -> tuple[bytes, dict[str, str]]:
    """The body of a request, and its headers."""
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


def test_requests_over_http(client, service):
    chance, statuses = random.Random(0), []
    path = "/v2/models/films/infer"
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    with contextlib.closing(connection):
        for _ in range(150):
            body, headers = damaged(chance)
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            found = answer.read()
            statuses.append(answer.status)
            assert answer.status in (200, 400, 422), (body, headers, found)
            if answer.status != 200:
                assert json.loads(found).keys() == {"error"}
    assert {200, 400, 422} == {*statuses}
    assert service.in_hand == 0 and service.version("films", None).batcher.waiting == 0


def test_messages_of_grpc():
    chance, refused, read = random.Random(0), 0, 0
    for _ in range(500):
        names = [chance.choice([b"item 1", b"", b"\xff"]) for _ in range(2)]
        inputs = [
            {
                "name": chance.choice(["items", "lengths", ""]),
                "datatype": chance.choice(["BYTES", "INT32", "FP64", "BOOL", "?"]),
                "shape": [chance.choice([2, 0, -1, 2**62])] * chance.randrange(4),
                "contents": chance.choice(
                    [{"bytes_contents": names}, {"int_contents": [1, 2]}, {}]
                ),
            }
            for _ in range(chance.randrange(3))
        ]
        raw = [
            chance.randbytes(chance.randrange(12)) for _ in range(chance.randrange(3))
        ]
        message = messages.ModelInferRequest(inputs=inputs, raw_input_contents=raw)
        try:
            over_grpc.read(message, Limits())
            read += 1
        except RefusedError as error:
            assert error.status in (400, 422)
            refused += 1
    assert refused and read
