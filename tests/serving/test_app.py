"""The protocol over real sockets: answers are bitwise those of `recommend`, errors state what was
expected.
"""

import contextlib
import json
import pathlib
import re
import socket
from importlib.metadata import metadata

import numpy as np
import pytest
import uvicorn
import yaml
from served import Client, binary, listening, prefixed, tensor, until, working

import sparsejax as sj
from sparsejax.cli import flags
from sparsejax.cli.main import main
from sparsejax.serving import logs, server
from sparsejax.serving import service as serving_service
from sparsejax.serving.engine import Shape
from sparsejax.serving.protocol import Limits
from sparsejax.serving.service import Service, Settings

INFER = "/v2/models/films/infer"
ITEMS = tensor("items", "BYTES", ["item 3", "unheard", "jalapeño"])


@pytest.fixture(scope="module")
def expected(predictor) -> tuple[list[list[str]], np.ndarray]:
    """Names and scores for three rows: one with items 3 and 8, one with item 1, one empty."""
    ids, indptr = np.array([3, 8, 1], np.int32), np.array([0, 2, 3, 3, 3])
    x = sj.CSR(None, ids, indptr, num_cols=9)
    found = predictor.recommend(x, exclude=x)  # four rows: the program that serves
    return predictor.names(found)[:3], found.scores[:3]


def test_health_and_metadata(client):
    assert client.get("/v2/health/live") == (200, {"live": True})
    assert client.get("/v2/health/ready") == (200, {"ready": True})
    for path in ("/v2/models/films/ready", "/v2/models/films/versions/1/ready"):
        assert client.get(path) == (200, {"name": "films", "ready": True})
    status, about = client.get("/v2")
    assert status == 200 and about["name"] == "sparsejax"
    assert about["extensions"] == ["binary_tensor_data"]
    status, about = client.get("/v2/models/films")
    assert client.get("/v2/models/films/versions/1") == (200, about)
    assert about["versions"] == ["1"]
    names = ["items", "lengths", "values", "exclude", "exclude_lengths"]
    names += ["candidates", "candidates_lengths"]
    assert [each["name"] for each in about["inputs"]] == names
    names = ["items", "scores", "lengths", "unknown"]
    assert [each["name"] for each in about["outputs"]] == names


def test_requests_of_the_page(client):
    docs = pathlib.Path(__file__).parents[2] / "docs"
    pages = [docs / name for name in ("serving.md", "serving_reference.md")]
    text = "".join(page.read_text() for page in pages)
    requests = re.findall(r"model/infer -d '(.*?)'\n", text, re.DOTALL)
    assert len(requests) == 2
    for body in requests:
        assert client.ask("POST", INFER, body.encode())[0] == 200


def test_manifests_of_the_page_ask_what_the_service_answers(client, capsys):
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs" / "serving.md").read_text()
    image = re.search(r"```dockerfile\n(.*?)```", page, re.DOTALL)
    assert image
    extra = re.search(r"/sparsejax\[(\w+)\]", image[1])
    assert extra and extra[1] in metadata("sparsejax").get_all("Provides-Extra", [])
    entry = re.search(r"ENTRYPOINT (.*)", image[1])
    assert entry
    words = json.loads(entry[1])
    assert words[:2] == ["sparsejax", "serve"] and f"COPY films {words[2]}" in image[1]
    # All flags are known, but here is no such folder.
    assert main([*words[1:], "--host", "127.0.0.1", "--port", "0"]) == 1
    assert words[2] in capsys.readouterr().err.splitlines()[-1]
    port = int(words[words.index("--port") + 1])
    pods = {}
    for path in re.findall(r"\.\./(examples/kubernetes/\S+)", page):
        manifest = yaml.safe_load((root / path).read_text())
        spec, kind = manifest["spec"], (manifest["apiVersion"], manifest["kind"])
        pods[kind] = spec.get("predictor") or spec["template"]["spec"]
        if "selector" in spec:
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"] == labels
            # Longer than --grace.
            assert pods[kind]["terminationGracePeriodSeconds"] > flags.Serve.grace
    assert {*pods} == {
        ("apps/v1", "Deployment"),
        ("serving.kserve.io/v1beta1", "InferenceService"),
    }
    for pod in pods.values():
        (container,) = pod["containers"]
        ports = {each.get("name"): each["containerPort"] for each in container["ports"]}
        assert [*ports.values()] == [port]
        probes = [container[name]["httpGet"] for name in container if "Probe" in name]
        assert probes
        for probe in probes:
            assert ports.get(probe["port"], probe["port"]) == port
            assert client.get(probe["path"])[0] == 200


def test_one_row(client, expected):
    names, scores = expected
    status, found = client.infer(ITEMS)
    assert status == 200
    assert found["items"]["data"] == names[0]
    np.testing.assert_array_equal(np.float32(found["scores"]["data"]), scores[0])
    assert found["unknown"]["data"] == [1] and found["lengths"]["data"] == [5]


def test_several_rows_flat_and_padded(client, expected):
    names, scores = expected
    rows = [*ITEMS["data"], "item 1"]
    flat = tensor("items", "BYTES", rows), tensor("lengths", "INT32", [3, 1, 0])
    _, found = client.infer(*flat, parameters={"k": 2})
    assert found["items"]["data"] == [name for row in names for name in row[:2]]
    assert found["items"]["shape"] == [6]
    assert found["lengths"]["data"] == [2, 2, 2]
    np.testing.assert_array_equal(
        np.float32(found["scores"]["data"]), scores[:, :2].ravel()
    )
    table = [*rows, "", "", "", "", ""]
    _, found = client.infer(tensor("items", "BYTES", table, [3, 3]))
    assert found["items"]["shape"] == [3, 5]
    assert found["items"]["data"] == [name for row in names for name in row]
    nested = [table[:3], table[3:6], table[6:]]
    assert client.infer(tensor("items", "BYTES", nested, [3, 3]))[1] == found


def test_what_is_excluded(client):
    given = tensor("items", "BYTES", ["item 3"])
    _, found = client.infer(given, tensor("exclude", "BYTES", ["item 0", "unheard"]))
    assert not {"item 0", "item 3"} & {*found["items"]["data"]}
    many = tensor("items", "BYTES", ["item 1"] * 2, [2, 1])
    others = tensor("exclude", "BYTES", [f"item {n}" for n in range(2, 8)])
    counts = tensor("exclude_lengths", "INT64", [6, 0])
    _, found = client.infer(many, others, counts, parameters={"exclude_seen": False})
    assert found["lengths"]["data"] == [3, 5]
    assert sorted(found["items"]["data"][:5]) == [
        "",
        "",
        "item 0",
        "item 1",
        "jalapeño",
    ]
    assert found["scores"]["data"][3] == np.finfo(np.float32).min


def test_values_count(client, predictor):
    given = tensor("items", "BYTES", ["item 3", "item 1"])
    _, found = client.infer(given, tensor("values", "FP64", [2.5, 1]))
    x = sj.CSR(
        np.array([1, 2.5], np.float32),
        np.array([1, 3], np.int32),
        np.array([0, 2, 2, 2, 2]),
        num_cols=9,
    )
    scores = predictor.recommend(x, exclude=x).scores[0]
    np.testing.assert_array_equal(np.float32(found["scores"]["data"]), scores)


def test_binary_tensors(client, expected):
    names, scores = expected
    items = {"name": "items", "datatype": "BYTES", "shape": [4]}
    lengths = {"name": "lengths", "datatype": "INT32", "shape": [3]}
    rows = [*ITEMS["data"], "item 1"]
    body, size = binary(
        [
            (items, prefixed(*(name.encode() for name in rows))),
            (lengths, np.array([3, 1, 0], np.int32).tobytes()),
        ],
        id="ours",
        outputs=[
            {"name": "scores", "parameters": {"binary_data": True}},
            {"name": "lengths"},
            {"name": "items", "parameters": {"binary_data": True}},
        ],
    )
    headers = {"Inference-Header-Content-Length": str(size)}
    status, headers, answer = client.ask("POST", INFER, body, headers)
    assert status == 200 and headers["content-type"] == "application/octet-stream"
    end = int(headers["inference-header-content-length"])
    found = json.loads(answer[:end])
    assert found["id"] == "ours" and found["model_version"] == "1"
    assert [each["name"] for each in found["outputs"]] == ["scores", "lengths", "items"]
    assert found["outputs"][0]["parameters"] == {"binary_data_size": 60}
    rest = answer[end:]
    np.testing.assert_array_equal(np.frombuffer(rest[:60], "<f4"), scores.ravel())
    flat = [name.encode() for row in names for name in row]
    assert rest[60:] == prefixed(*flat)


def test_all_outputs_are_binary_unless_one_says_otherwise(client, expected):
    names, scores = expected
    request = {"inputs": [ITEMS], "parameters": {"binary_data_output": True}}
    plain = {"name": "lengths", "parameters": {"binary_data": False}}
    for wanted in ({}, {"outputs": [{"name": "items"}, {"name": "scores"}, plain]}):
        body = json.dumps(request | wanted).encode()
        status, headers, answer = client.ask("POST", INFER, body)
        assert status == 200 and headers["content-type"] == "application/octet-stream"
        end = int(headers["inference-header-content-length"])
        found = json.loads(answer[:end])["outputs"]
        assert ["data" in each for each in found] == [False, False, bool(wanted)] + [
            False
        ] * (not wanted)
        texts = prefixed(*(name.encode() for name in names[0]))
        assert answer[end:].startswith(texts + scores[0].tobytes())


def test_no_rows_and_no_known_names(client):
    empty = tensor("items", "BYTES", []), tensor("lengths", "INT32", [])
    status, found = client.infer(*empty)
    assert status == 200
    assert all(each["data"] == [] for each in found.values())
    nobody = client.infer(tensor("items", "BYTES", []))[1]["items"]["data"]
    _, found = client.infer(tensor("items", "BYTES", ["never", "heard"]))
    assert found["items"]["data"] == nobody and found["unknown"]["data"] == [2]


WRONG = {
    "no JSON": (b"{", 400, "must be JSON in UTF-8"),
    "no UTF-8": (b'{"inputs": "\xff"}', 400, "must be JSON in UTF-8"),
    "NaN": (b'{"inputs": [NaN]}', 400, "must be JSON"),
    "half a pair": (b'{"id": "\\ud800"}', 400, "must be JSON"),
    "deep": (b"[" * 100_000, 400, "must be JSON"),
    "a list": (b"[]", 422, "the request must be an object"),
    "nothing": (b"{}", 422, "inputs must be a list, got None"),
    "a number": ({"inputs": [1]}, 422, r"inputs\[0\] must be an object"),
    "no input": ({"inputs": []}, 422, "the input 'items' is missing"),
    "unknown": (
        {"inputs": [tensor("itmes", "BYTES", [])]},
        422,
        "knows items, lengths",
    ),
    "twice": ({"inputs": [ITEMS, ITEMS]}, 422, "'items' is given twice"),
    "parameter": (
        {"inputs": [ITEMS], "parameters": {"K": 1}},
        422,
        "unknown parameter 'K'; this model knows k, exclude_seen, timeout",
    ),
    "output": (
        {"inputs": [ITEMS], "outputs": [{"name": "x"}]},
        422,
        "unknown output 'x'",
    ),
    **{
        f"k {k!r}": ({"inputs": [ITEMS], "parameters": {"k": k}}, 422, "from 1 to 5")
        for k in (0, 6, 1.0, True, "2", 10**30)
    },
    "seen": (
        {"inputs": [ITEMS], "parameters": {"exclude_seen": 1}},
        422,
        "true or false",
    ),
    "type": (
        {"inputs": [tensor("items", "TEXT", [])]},
        422,
        "one of BYTES, BOOL, INT8",
    ),
    "no type": ({"inputs": [{"name": "items", "datatype": []}]}, 422, "must be text"),
    "numbers": ({"inputs": [tensor("items", "INT32", [3])]}, 422, "datatype BYTES"),
    "no text": (
        {"inputs": [tensor("items", "BYTES", [3])]},
        422,
        "must be text, got 3",
    ),
    "shape": ({"inputs": [tensor("items", "BYTES", ["a"], [2])]}, 422, "2 elements"),
    "negative": ({"inputs": [tensor("items", "BYTES", [], [-1])]}, 422, r"\[n\] or"),
    "huge": ({"inputs": [tensor("items", "BYTES", [], [10**40])]}, 422, r"\[n\] or"),
    "cube": (
        {"inputs": [tensor("items", "BYTES", ["a"], [1, 1, 1])]},
        422,
        r"\[n\] or",
    ),
    "ragged": (
        {"inputs": [tensor("items", "BYTES", [["a"], ["a", "b"]], [2, 1])]},
        422,
        r"shape \[2, 1\], or be flat",
    ),
    **{
        f"lengths {some}": (
            {"inputs": [ITEMS, tensor("lengths", "INT64", some)]},
            422,
            "lengths.*with the sum 3",
        )
        for some in ([1], [4], [-1, 4], [2**62, 2**62], [])
    },
    "length": (
        {"inputs": [ITEMS, tensor("lengths", "INT32", [2**40])]},
        422,
        "INT32 can",
    ),
    "fraction": (
        {"inputs": [ITEMS, tensor("lengths", "INT32", [3.0])]},
        422,
        "INT32 can",
    ),
    "floats": (
        {"inputs": [ITEMS, tensor("lengths", "FP32", [3.0])]},
        422,
        "datatype INT32",
    ),
    "two forms": (
        {
            "inputs": [
                tensor("items", "BYTES", ["a"], [1, 1]),
                tensor("lengths", "INT32", [1]),
            ]
        },
        422,
        "leave out 'lengths'",
    ),
    "values": (
        {"inputs": [ITEMS, tensor("values", "FP32", [1])]},
        422,
        "shape of items",
    ),
    "infinite": (
        {"inputs": [ITEMS, tensor("values", "FP32", [1, 2, 1e39])]},
        422,
        "must be finite",
    ),
    "again": (
        {
            "inputs": [
                tensor("items", "BYTES", ["item 1"] * 2),
                tensor("values", "FP32", [1, 2]),
            ]
        },
        422,
        "comes twice",
    ),
    "excluded": (
        {
            "inputs": [
                tensor("items", "BYTES", ["a", "b"], [2, 1]),
                tensor("exclude", "BYTES", ["a"]),
            ]
        },
        422,
        "exclude_lengths, one number for each row",
    ),
    "alone": (
        {"inputs": [ITEMS, tensor("exclude_lengths", "INT32", [0])]},
        422,
        "needs the input 'exclude'",
    ),
    "long name": (
        {"inputs": [tensor("items", "BYTES", ["é" * 600])]},
        422,
        "1200 bytes",
    ),
    "names": ({"inputs": [tensor("items", "BYTES", ["a"] * 5000)]}, 422, "5000 names"),
    "rows": (
        {"inputs": [tensor("items", "BYTES", ["a"] * 2000, [2000, 1])]},
        422,
        "2000 rows in a request, more than the 1024",
    ),
    "timeout": (
        {"inputs": [ITEMS], "parameters": {"timeout": -1}},
        422,
        "microseconds",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_are_told_what_was_expected(client, case):
    body, expected, message = WRONG[case]
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, headers, answer = client.ask("POST", INFER, body)
    error = json.loads(answer)["error"]
    assert status == expected, error
    assert re.search(message, error), error
    assert headers["content-type"] == "application/json" and len(error) < 600


@pytest.mark.parametrize(
    ("data", "datatype", "shape", "message"),
    [
        (b"\3\0\0", "BYTES", [1], "within the length"),
        (b"\3\0\0\0ab", "BYTES", [1], "within a name"),
        (b"\377\377\377\377ab", "BYTES", [1], "4294967295 bytes"),
        (prefixed(b"\xff\xfe"), "BYTES", [1], "in UTF-8"),
        (prefixed(b"a"), "BYTES", [2], "2 elements, but 1"),
        (b"\0" * 3, "INT32", [1], "no whole number of INT32"),
        (np.array([np.nan], np.float32).tobytes(), "FP32", [1], "finite"),
        (np.array([1e300]).tobytes(), "FP64", [1], "finite"),
    ],
)
def test_wrong_binary_data(client, data, datatype, shape, message):
    facts = {"name": "items", "datatype": datatype, "shape": shape}
    body, size = binary([(facts, data)])
    headers = {"Inference-Header-Content-Length": str(size)}
    status, _, answer = client.ask("POST", INFER, body, headers)
    assert status == 422 and re.search(message, json.loads(answer)["error"]), answer


def test_wrong_sizes_of_binary_data(client):
    body, size = binary([({"name": "items", "datatype": "BYTES", "shape": [0]}, b"")])
    for header in ("-1", "x", str(len(body) + 1), "9" * 30, "9" * 5000, "²"):
        headers = {"Inference-Header-Content-Length": header}
        status, _, answer = client.ask("POST", INFER, body, headers)
        assert status == 400 and b"Inference-Header" in answer, header
    headers = {"Inference-Header-Content-Length": str(size)}
    status, _, answer = client.ask("POST", INFER, body + b"more", headers)
    assert status == 400 and b"4 bytes follow" in answer
    short = body.replace(b'_size": 0', b'_size": 9')
    status, _, answer = client.ask("POST", INFER, short, headers)
    assert status == 400 and b"0 bytes are left" in answer


def test_paths_and_methods(client):
    for path, expected in {
        "/no-such": "paths of the protocol",
        "/v2/models/other": "unknown model 'other'; this service has 'films'",
        "/v2/models/films/versions/2": "unknown version '2'",
        "/v2/models/films/versions/2/ready": "unknown version '2'",
    }.items():
        status, answer = client.get(path)
        assert status == 404 and expected in answer["error"]
    assert client.get(INFER)[0] == 405
    status, _, answer = client.ask("POST", "/v2", b"{}")
    assert status == 405 and "takes GET, HEAD" in json.loads(answer)["error"]
    body = json.dumps({"inputs": [ITEMS]}).encode()
    status, _, _ = client.ask("POST", "/v2/models/films/versions/1/infer", body)
    assert status == 200
    status, _, _ = client.ask("POST", INFER, body, {"content-encoding": "gzip"})
    assert status == 415


def test_request_ids_and_traces_are_logged_but_no_items(client, capfd):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = json.dumps({"inputs": [ITEMS]}).encode()
    headers = {"x-request-id": "abc-1", "traceparent": trace}
    _, headers, _ = client.ask("POST", INFER, body, headers)
    assert headers["x-request-id"] == "abc-1"
    _, headers, _ = client.ask("POST", INFER, b"{}", {"x-request-id": "a b\tc"})
    assert re.fullmatch("[0-9a-f]{16}", headers["x-request-id"])
    text = ""

    def lines() -> dict[str, dict]:
        nonlocal text  # of tests before, too, since lines are written a moment later
        text += capfd.readouterr().err
        return {
            (it := json.loads(line))["request_id"]: it for line in text.splitlines()
        }

    until(lambda: {"abc-1", headers["x-request-id"]} <= lines().keys())
    found, refused = (lines()[name] for name in ("abc-1", headers["x-request-id"]))
    assert found["traceparent"] == trace
    assert (found["code"], refused["code"]) == (200, 422)
    assert (found["model"], found["version"]) == ("films", "1")
    assert "version" not in refused
    assert "item" not in text


def test_an_exception_loses_no_lines(monkeypatch, capfd):
    async def fail(_, sockets):
        sockets[0].close()
        logs.request("http", "last-1", "", code=200, rows=1, seconds=0.1)
        raise RuntimeError("no more")

    monkeypatch.setattr(uvicorn.Server, "serve", fail)
    monkeypatch.setattr(Service, "load", lambda *_: None)
    with pytest.raises(RuntimeError, match="no more"):
        server.run("none", "films", Settings(), server.Address(port=0))
    assert '"request_id":"last-1"' in capfd.readouterr().err


def test_metrics(client):
    def number(name: str) -> float:
        text = client.ask("GET", "/metrics")[2].decode()
        found = re.search(rf"^{re.escape(name)} (.*)", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    before = number("sparsejax_unknown_names_total")
    compiled = number("sparsejax_compilations_total")
    answered = 'sparsejax_requests_total{code="200",protocol="http"}'
    client.infer(ITEMS)
    count = number(answered)
    client.infer(ITEMS)
    assert number(answered) == count + 1
    assert number("sparsejax_unknown_names_total") == before + 2
    assert number("sparsejax_compilations_total") == compiled
    assert number('sparsejax_model_version{model="films",version="1"}') == 1
    assert number("sparsejax_batch_rows_sum") >= 2


def raw(port: int, data: bytes) -> bytes:
    """Sends bytes, then closes the sending side; returns all that the service answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(2**16):
            found += part
        return found


def head(length: int) -> bytes:
    return (
        f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()
    )


def test_a_head_comes_with_its_body_or_alone(port):
    body = json.dumps({"inputs": [ITEMS]}).encode()
    asking = head(len(body)).replace(b"host: x", b"host: x\r\nexpect: 100-continue")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"HEAD /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
        found = connection.recv(2**16)
        assert found.startswith(b"HTTP/1.1 200") and found.endswith(b"\r\n\r\n")
        connection.sendall(asking)
        assert connection.recv(2**16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        found = connection.recv(2**16)
        assert found.startswith(b"HTTP/1.1 200") and found.endswith(b"}")


def test_nothing_follows_a_refusal(client, port, monkeypatch):
    """A request that waits for 100 Continue, and is refused before it is read."""
    bugs: list[tuple[str, Exception]] = []
    monkeypatch.setattr(logs, "error", lambda *bug: bugs.append(bug))
    expecting = b"expect: 100-continue\r\ntransfer-encoding: chunked"
    asking = head(0).replace(b"content-length: 0", expecting) + b"no length\r\n"
    answer = raw(port, asking)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"\r\n\r\n") == 1
    assert client.infer(ITEMS)[0] == 200
    assert not bugs


def test_slow_senders_are_not_waited_for(port):
    answer = raw(port, head(100) + b"{")
    assert answer.startswith(b"HTTP/1.1 408") and b"within 0.5 seconds" in answer


def test_connections_without_a_request_are_closed(client, port):
    for sent in (b"", b"POST /v2", head(0)[:-2], b"GET /v2 HTTP/1.1\r\n\r\nGET "):
        answer = raw(port, sent)
        assert answer.count(b"HTTP/1.1") == sent.count(b"GET /")
    many = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    assert client.infer(ITEMS)[0] == 200
    for connection in many:
        connection.settimeout(60)
        assert connection.recv(1) == b""
        connection.close()


def test_large_bodies_are_not_read(port):
    answer = raw(port, head(10**12))
    assert answer.startswith(b"HTTP/1.1 413") and b"at most 8,388,608 bytes" in answer
    chunks = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
    begin = head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(begin)
        for _ in range(9):
            connection.sendall(chunks)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_broken_http(client, port):
    answer = raw(port, b"\x16\x03\x01 not HTTP\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and answer.endswith(b'of HTTP/1.1"}')
    whole = json.dumps({"inputs": [ITEMS]}).encode()
    # And then the client leaves, or says that it sends no more.
    for sent in (b"", b"POST", head(5) + b"ab", head(len(whole)) + whole):
        socket.create_connection(("127.0.0.1", port)).close()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
    assert client.infer(ITEMS)[0] == 200


@pytest.fixture
def held(service, monkeypatch):
    """A service whose queue accepts three rows and three requests at a time."""
    held = Service("films", Settings(max_rows=3, at_once=3, limits=Limits(body=2**16)))
    version = service.version("films", None)
    monkeypatch.setattr(held, "_version", version)
    monkeypatch.setattr(version.batcher, "_max_rows", 3)
    return held


def test_who_leaves_costs_no_device_time(held, service, client):
    body = json.dumps({"inputs": [ITEMS]}).encode()
    batcher = service.version("films", None).batcher
    ask = lambda: client.infer(ITEMS)
    with listening(held) as port, working(service, ask):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head(len(body)) + body)
            until(lambda: batcher.waiting == 1)
            before = _rows(service)  # batches of tests before are counted by now
        until(lambda: held.in_hand == 0)
    ask()  # after all that waited
    until(lambda: _rows(service) >= before + 2)
    assert _rows(service) == before + 2


def test_busy_late_and_draining(held, service, client):
    body = json.dumps({"inputs": [ITEMS]}).encode()
    asked = head(len(body)) + body
    alone = asked.replace(b"host: x", b"connection: close")
    batcher = service.version("films", None).batcher
    with (
        listening(held) as port,
        working(service, lambda: client.infer(ITEMS)) as may_end,
        contextlib.ExitStack() as stack,
    ):
        address = "127.0.0.1", port
        body = json.dumps({"inputs": [ITEMS], "parameters": {"timeout": 1000}}).encode()
        late = head(len(body)).replace(b"host: x", b"connection: close") + body
        assert raw(port, late).startswith(b"HTTP/1.1 504")
        waiting = [
            stack.enter_context(socket.create_connection(address)) for _ in range(2)
        ]
        for connection in waiting:
            connection.sendall(asked)
        until(lambda: batcher.waiting == 3)
        answer = raw(port, alone)
        assert answer.startswith(b"HTTP/1.1 429") and b"retry-after: 1" in answer
        assert b"3 rows wait already, of 3 that may" in answer
        held.draining = True
        assert raw(port, b"GET /v2/health/ready HTTP/1.0\r\n\r\n").count(b" 503 ")
        may_end.set()
        for connection in waiting:  # finished, and told to close
            assert b"200 OK" in (answer := connection.recv(2**16))
            assert b"connection: close" in answer


@pytest.mark.parametrize(("own", "header"), [(30, b"50"), (0.05, b"30000")])
def test_the_smaller_limit_of_time_counts(service, client, monkeypatch, own, header):
    """The service has one, and the header that Envoy sets another."""
    held = Service("films", Settings(timeout=own))
    monkeypatch.setattr(held, "_version", service.version("films", None))
    body = json.dumps({"inputs": [ITEMS]}).encode()
    said = b"connection: close\r\nx-envoy-expected-rq-timeout-ms: " + header
    with listening(held) as port, working(service, lambda: client.infer(ITEMS)):
        answer = raw(port, head(len(body)).replace(b"host: x", said) + body)
    assert answer.startswith(b"HTTP/1.1 504")
    held.metrics.close()


@pytest.mark.parametrize("many", [0, 2**30])
def test_large_requests_are_read_in_another_thread(client, service, monkeypatch, many):
    """With the same answers, refusals and deadlines; so are large answers written."""
    monkeypatch.setattr(serving_service, "_MANY", many)
    monkeypatch.setattr(serving_service, "_MANY_NAMES", many)
    status, found = client.infer(ITEMS, parameters={"k": 1})
    assert status == 200 and found["items"]["shape"] == [1]
    status, error = client.infer(ITEMS, parameters={"k": 0})
    assert status == 422 and "k must be a whole number from 1" in error
    status, error = client.infer(ITEMS, parameters={"timeout": 1})
    assert status == 504 and "within its time" in error
    monkeypatch.setattr(service.version("films", None).form, "question", None)
    assert client.infer(ITEMS)[0] == 500  # a bug
    until(lambda: service.in_hand == 0)


def test_a_device_that_is_lost_ends_the_life_of_a_service(client, service, monkeypatch):
    version = service.version("films", None)

    def lost(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(version.batcher.engine, "started", lost)
        for n in range(3):
            assert client.get("/v2/health/live")[0] == 200
            status, error = client.infer(ITEMS)
            assert status == 503 and "device lost" in error
            until(lambda n=n: version.batcher.failures == n + 1)
        assert client.get("/v2/health/live") == (503, {"live": False})
        assert client.get("/v2/health/ready")[0] == 503
    assert client.infer(ITEMS)[0] == 200
    until(lambda: client.get("/v2/health/live")[0] == 200)


def test_a_bug_is_told_in_the_log_alone(client, service, monkeypatch, capfd):
    def broken(*_):
        raise KeyError("oops")

    monkeypatch.setattr(service.version("films", None).form, "question", broken)
    status, error = client.infer(ITEMS)
    assert status == 500 and "oops" not in error
    logs.flush()
    assert "oops" in capfd.readouterr().err


def test_no_file_no_service(tmp_path):
    service = Service("films", Settings())
    with listening(service) as port, pytest.raises(OSError, match="none"):
        assert raw(port, b"GET /v2/health/live HTTP/1.0\r\n\r\n").count(b"200 OK")
        answer = raw(port, b"GET /v2/models/films HTTP/1.0\r\n\r\n")
        assert b" 503 " in answer and b"is not loaded" in answer
        service.load(tmp_path / "none")
    service.close()


def _rows(service: Service) -> float:
    found = re.search(
        r"^sparsejax_batch_rows_sum (.*)", service.metrics.text().decode(), re.MULTILINE
    )
    assert found
    return float(found[1])


def test_clicks_with_missing_values(kinds):
    """null is what None is for predict_records; an empty category is missing, too.

    Lists are filled up.
    """
    records = {"age": [1.0, 2.5], "city": ["c3", None], "user": [None, "u1"]}
    service = Service("films", Settings(shapes=(Shape(1, 4),)))
    service.load(kinds / "clicks")
    with contextlib.closing(service), listening(service) as port:
        client = Client(port)
        kinds_of = {"age": "FP32", "city": "BYTES", "user": "BYTES"}
        asked = [tensor(n, kinds_of[n], [*data]) for n, data in records.items()]
        status, found = client.infer(*asked)
        assert status == 200
        asked[1]["data"][1] = asked[2]["data"][0] = ""
        assert client.infer(*asked) == (status, found)
        asked[0]["data"][1] = None  # the schema has no number for it
        status, error = client.infer(*asked)
        assert status == 422 and "age" in error and "row 1" in error
        asked[0] = tensor("age", "FP32", [1.0, 2.5])
        rows = [["", "c3", "c1"], ["", None, ""]]  # lists, filled up
        asked[1] = {"name": "city", "datatype": "BYTES", "shape": [2, 3], "data": rows}
        status_of_lists, lists = client.infer(*asked)
        assert status_of_lists == 200
        numbers = [
            tensor("age", "FP32", [1.0]),
            tensor("city", "INT64", [1, 2], [1, 2]),
        ]
        status, error = client.infer(*numbers, tensor("user", "INT64", [1, 2], [1, 2]))
        assert status == 422 and "'city' must have datatype BYTES" in error
        asked[0]["shape"] = [2, 1]
        assert client.infer(*asked) == (status_of_lists, lists)
        asked[0]["shape"] = [1, 2]
        status, error = client.infer(*asked)
        assert status == 422 and "[n, m]" in error and "'age': [1, 2]" in error
    predictor = sj.load_predictor(kinds / "clicks")
    expected = predictor.predict_records(records)
    assert found["probabilities"]["data"] == pytest.approx(expected, rel=1e-6)
    expected = predictor.predict_records(records | {"city": [["c3", "c1"], []]})
    assert lists["probabilities"]["data"] == pytest.approx(expected, rel=1e-6)


def test_names_may_not_be_null(client):
    status, error = client.infer(tensor("items", "BYTES", ["item 1", None]))
    assert status == 422 and "must be text, got None" in error
