"""Requests that chance has damaged are answered or refused, and the service goes on."""

import contextlib
import copy
import http.client
import json
import random
from typing import Any

import grpc
import pytest
from open_inference.grpc import protocol as messages
from served import binary, over_grpc, prefixed, resident, tensor

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


def ask_over_http(connection, chance: random.Random) -> int:
    """The status of the answer to a damaged request."""
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
    """A message of gRPC, in which something may be wrong."""
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
    """The status of the answer to a message that may be damaged."""
    sent = message(chance)
    try:
        infer(sent)
    except grpc.RpcError as error:
        code = error.code()
        known = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
        assert code in known, (sent, error)
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("count", [150, 150_000])
def test_requests_over_both_ports(client, service, count):
    """The many ones take some ten minutes."""
    chance, statuses = random.Random(count), set()
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    before = 0
    with contextlib.closing(connection), over_grpc(service) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for number in range(count):
            if number == count // 3:  # by now all is there that is kept
                before = resident()
            statuses |= {
                ask_over_http(connection, chance),
                ask_over_grpc(infer, chance),
            }
    assert {200, 400, 422} < statuses
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} < statuses
    assert service.in_hand == 0 and service.version("films", None).batcher.waiting == 0
    assert resident() < before + 2**24  # two requests of 80 bytes each would be as much
