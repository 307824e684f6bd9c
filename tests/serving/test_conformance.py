"""Checks each endpoint, answer and error of the Open Inference Protocol, version 2.

The schemas follow its specification, `open_inference_rest.yaml`, but allow no further members.
"""

import json

import jsonschema
import pytest
from served import tensor

TEXT, FLAG = {"type": "string"}, {"type": "boolean"}


def an_object(**members) -> dict:
    """A JSON schema of an object. A member whose name ends in `_` is optional."""
    named = {name.rstrip("_"): schema for name, schema in members.items()}
    required = [name for name in members if not name.endswith("_")]
    return {
        "type": "object",
        "properties": named,
        "required": required,
        "additionalProperties": False,
    }


def a_list(schema: dict) -> dict:
    return {"type": "array", "items": schema}


DATATYPES = ["BOOL", "FP32", "FP64", "BYTES"]
DATATYPES += [f"{u}INT{bits}" for u in ("", "U") for bits in (8, 16, 32, 64)]
DATATYPE = {"enum": DATATYPES}
PARAMETERS = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
LIVE, READY = an_object(live=FLAG), an_object(ready=FLAG)
MODEL_READY = an_object(name=TEXT, ready=FLAG)
SERVER = an_object(name=TEXT, version=TEXT, extensions=a_list(TEXT))
DESCRIBED = an_object(
    name=TEXT, datatype=DATATYPE, shape=a_list({"type": "integer", "minimum": -1})
)
MODEL = an_object(
    name=TEXT,
    versions_=a_list(TEXT),
    platform=TEXT,
    inputs=a_list(DESCRIBED),
    outputs=a_list(DESCRIBED),
)
OUTPUT = an_object(
    name=TEXT,
    shape=a_list({"type": "integer", "minimum": 0}),
    datatype=DATATYPE,
    parameters_=PARAMETERS,
    data=a_list({"type": ["string", "number"]}),
)
ANSWER = an_object(
    model_name=TEXT,
    model_version_=TEXT,
    id_=TEXT,
    parameters_=PARAMETERS,
    outputs=a_list(OUTPUT),
)
ERROR = an_object(error={"type": "string", "minLength": 10})

ITEMS = tensor("items", "BYTES", ["item 1", "item 2"])
ONE = {"inputs": [ITEMS]}
OF_MODEL = "/v2/models/films", "/v2/models/films/versions/1"
GETS = {
    "/v2/health/live": LIVE,
    "/v2/health/ready": READY,
    "/v2": SERVER,
    **dict.fromkeys(OF_MODEL, MODEL),
    **{f"{path}/ready": MODEL_READY for path in OF_MODEL},
}


def walked(client, method: str, path: str, document: object = None) -> tuple[int, dict]:
    """Sends a request and checks its schema; returns the status and the JSON of the answer."""
    body = None if document is None else json.dumps(document).encode()
    status, headers, found = client.ask(method, path, body)
    assert headers["content-type"] == "application/json"
    return status, json.loads(found)


@pytest.mark.parametrize("path", GETS)
def test_what_is_read(client, path):
    status, found = walked(client, "GET", path)
    assert status == 200
    jsonschema.validate(found, GETS[path])
    for method in ("POST", "PUT", "DELETE"):
        status, found = walked(client, method, path)
        assert status == 405
        jsonschema.validate(found, ERROR)


@pytest.mark.parametrize("path", OF_MODEL)
@pytest.mark.parametrize(
    "request_",
    [
        ONE,
        ONE | {"id": "7"},
        ONE | {"parameters": {"k": 2, "exclude_seen": False}},
        ONE | {"outputs": [{"name": "scores"}]},
        ONE | {"outputs": [{"name": "items", "parameters": {"binary_data": False}}]},
        {"inputs": [ITEMS | {"data": ["item 1", "", "item 2", ""], "shape": [2, 2]}]},
        {"inputs": [ITEMS | {"data": [["item 1", ""]], "shape": [1, 2]}]},
        {"inputs": [ITEMS, tensor("lengths", "INT32", [1, 1])]},
        {"inputs": [ITEMS, tensor("values", "FP32", [1, 0.5])]},
        {"inputs": [ITEMS | {"parameters": {}}], "parameters": {}},
    ],
)
def test_what_is_inferred(client, path, request_):
    status, found = walked(client, "POST", f"{path}/infer", request_)
    assert status == 200, found
    jsonschema.validate(found, ANSWER)
    assert (found["model_name"], found["model_version"]) == ("films", "1")
    assert found.get("id") == request_.get("id")
    wanted = request_.get("outputs", [])
    names = [each["name"] for each in found["outputs"]]
    assert names == ([each["name"] for each in wanted] or names[:4])
    for output in found["outputs"]:
        count = 1
        for size in output["shape"]:
            count *= size
        assert len(output["data"]) == count
        kind = str if output["datatype"] == "BYTES" else (int, float)
        assert all(isinstance(each, kind) for each in output["data"])


@pytest.mark.parametrize("model", ["films/versions/2", "series", "series/versions/1"])
def test_models_that_are_not_there(client, model):
    for method, end in (("GET", ""), ("GET", "/ready"), ("POST", "/infer")):
        document = ONE if method == "POST" else None
        status, found = walked(client, method, f"/v2/models/{model}{end}", document)
        assert status == 404
        jsonschema.validate(found, ERROR)


@pytest.mark.parametrize(
    "request_",
    [
        {},
        [],
        {"inputs": {}},
        *({"inputs": [ITEMS | {"datatype": each}]} for each in ("FP32", "TEXT", None)),
        *({"inputs": [ITEMS | {"shape": each}]} for each in ([3], [], None, [2, -1])),
        *({"inputs": [{**ITEMS, "data": each}]} for each in ([1, 2], "item 1", None)),
        *(
            {"inputs": [{name: ITEMS[name] for name in ITEMS if name != left_out}]}
            for left_out in ITEMS
        ),
        {"inputs": [ITEMS, ITEMS]},
        {"inputs": [ITEMS | {"name": "users"}]},
        ONE | {"outputs": [{"name": "probabilities"}]},
        ONE | {"outputs": [{}]},
        ONE | {"parameters": {"sequence_id": 1}},
        ONE | {"parameters": []},
        ONE | {"id": 7},
    ],
)
def test_what_is_refused(client, request_):
    status, found = walked(client, "POST", f"{OF_MODEL[0]}/infer", request_)
    assert status == 422
    jsonschema.validate(found, ERROR)


def test_what_is_no_request(client):
    for body in (b"", b"{", b"\xff"):
        status, _, found = client.ask("POST", f"{OF_MODEL[1]}/infer", body)
        assert status == 400
        jsonschema.validate(json.loads(found), ERROR)
    assert walked(client, "GET", f"{OF_MODEL[0]}/infer")[0] == 405
    for path in ("/v1/models/films", "/v2/models", "/v2/models/films/explain"):
        status, found = walked(client, "GET", path)
        assert status == 404
        jsonschema.validate(found, ERROR)
