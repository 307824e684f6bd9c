"""Answers over gRPC equal those over HTTP."""

import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
from open_inference.grpc import protocol as messages
from open_inference.grpc import service as stubs
from served import over_grpc, prefixed, tensor, until, working

from sparsejax.serving import logs
from sparsejax.serving.batcher import ClosedError

ROWS = ["item 3", "unheard", "jalapeño", "item 1"]


@pytest.fixture(scope="module")
def channel(service) -> Iterator[grpc.Channel]:
    with over_grpc(service) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel) -> stubs.GRPCInferenceServiceStub:
    return stubs.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady", "ModelMetadata"])
def test_bytes_that_are_no_message(channel, method):
    ask = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    with pytest.raises(grpc.RpcError) as refused:
        ask(b"\n\x05films*\xff")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message cannot be read" in str(refused.value.details())


def asked(*inputs: dict, **facts) -> messages.ModelInferRequest:
    return messages.ModelInferRequest(model_name="films", inputs=inputs, **facts)


def given(name: str, datatype: str, data: list | None = None, **facts) -> dict:
    """An input whose data is in the message, or without data if that is raw."""
    if data is None:
        return {"name": name, "datatype": datatype, **facts}
    field = {
        "BYTES": "bytes_contents",
        "INT32": "int_contents",
        "FP32": "fp32_contents",
    }
    contents = {field[datatype]: data}
    facts = {"shape": [len(data)]} | facts
    return {"name": name, "datatype": datatype, "contents": contents, **facts}


NAMES = [name.encode() for name in ROWS]


def test_health_and_metadata(stub, service):
    assert stub.ServerLive(messages.ServerLiveRequest()).live
    assert stub.ServerReady(messages.ServerReadyRequest()).ready
    assert stub.ModelReady(messages.ModelReadyRequest(name="films", version="1")).ready
    assert stub.ServerMetadata(messages.ServerMetadataRequest()).name == "sparsejax"
    about = stub.ModelMetadata(messages.ModelMetadataRequest(name="films"))
    assert [each.name for each in about.inputs][:2] == ["items", "lengths"]
    assert [*about.versions] == ["1"] and [*about.inputs[0].shape] == [-1]


@pytest.mark.parametrize("raw", [False, True])
def test_answers_are_those_of_http(stub, client, raw):
    lengths = [3, 1, 0]
    status, expected = client.infer(
        tensor("items", "BYTES", ROWS),
        tensor("lengths", "INT32", lengths),
        parameters={"k": 2, "exclude_seen": False},
    )
    assert status == 200
    parameters = {"k": {"int64_param": 2}, "exclude_seen": {"bool_param": False}}
    if raw:
        found = stub.ModelInfer(
            asked(
                given("items", "BYTES", shape=[4]),
                given("lengths", "INT32", shape=[3]),
                parameters=parameters,
                raw_input_contents=[
                    prefixed(*NAMES),
                    np.array(lengths, np.int32).tobytes(),
                ],
            )
        )
        items, scores, counts, unknown = found.raw_output_contents
        scores = np.frombuffer(scores, np.float32)
        counts, unknown = (np.frombuffer(each, np.int32) for each in (counts, unknown))
        assert items == prefixed(*(n.encode() for n in expected["items"]["data"]))
    else:
        inputs = given("items", "BYTES", NAMES), given("lengths", "INT32", lengths)
        found = stub.ModelInfer(asked(*inputs, parameters=parameters, id="ours"))
        assert found.id == "ours" and found.model_version == "1"
        items, scores, counts, unknown = (each.contents for each in found.outputs)
        texts = [name.decode() for name in items.bytes_contents]
        assert texts == expected["items"]["data"]
        scores = np.array(scores.fp32_contents, np.float32)
        counts, unknown = counts.int_contents, unknown.int_contents
    names = [each.name for each in found.outputs]
    assert names == ["items", "scores", "lengths", "unknown"]
    assert [*found.outputs[0].shape] == [6]
    np.testing.assert_array_equal(
        scores, np.array(expected["scores"]["data"], np.float32)
    )
    assert [*counts] == expected["lengths"]["data"]
    assert [*unknown] == expected["unknown"]["data"] == [1, 0, 0]


def test_models_that_are_not_there(stub):
    for request in (
        messages.ModelReadyRequest(name="series"),
        messages.ModelReadyRequest(name="films", version="7"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelReady(request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "unknown" in str(caught.value.details())


def test_wanted_outputs(stub):
    wanted = [{"name": "lengths"}]
    found = stub.ModelInfer(asked(given("items", "BYTES", NAMES), outputs=wanted))
    assert [each.name for each in found.outputs] == ["lengths"]


ITEMS = given("items", "BYTES", NAMES)


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (asked(), "INVALID_ARGUMENT", "'items' is missing"),
        (asked(ITEMS, model_version="7"), "NOT_FOUND", "unknown version '7'"),
        (asked(ITEMS, ITEMS), "INVALID_ARGUMENT", "given twice"),
        (
            asked(given("items", "BYTES", NAMES, shape=[5])),
            "INVALID_ARGUMENT",
            "5 elem",
        ),
        (asked(given("items", "TEXT", shape=[1])), "INVALID_ARGUMENT", "one of BOOL"),
        (asked(given("items", "BYTES", [b"\xff"])), "INVALID_ARGUMENT", "UTF-8"),
        (
            asked(ITEMS, parameters={"k": {"bool_param": True}}),
            "INVALID_ARGUMENT",
            "k must be a whole",
        ),
        (asked(ITEMS, outputs=[{"name": "x"}]), "INVALID_ARGUMENT", "unknown output"),
        (
            asked(ITEMS, raw_input_contents=[b"", b""]),
            "INVALID_ARGUMENT",
            "one for each",
        ),
        (
            asked(ITEMS, given("values", "FP32", [1.0, 2.0, np.nan, 1.0])),
            "INVALID_ARGUMENT",
            "finite",
        ),
    ],
)
def test_wrong_requests(stub, request_, code, message):
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request_)
    assert caught.value.code() is grpc.StatusCode[code]
    assert message in str(caught.value.details())


def test_large_messages_and_deadlines(stub, service):
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(asked(ITEMS, id="x" * 2**23))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with (
        working(service, lambda: stub.ModelInfer(asked(ITEMS))),
        pytest.raises(grpc.RpcError) as caught,
    ):
        stub.ModelInfer(asked(ITEMS), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_further_calls_of_a_connection_wait_with_the_client(stub, service, monkeypatch):
    engine = service.version("films", None).batcher.engine
    fetched, may_go_on = engine.fetched, threading.Event()

    def waiting(*given):
        may_go_on.wait()
        return fetched(*given)

    monkeypatch.setattr(engine, "fetched", waiting)
    try:
        calls = [stub.ModelInfer.future(asked(ITEMS)) for _ in range(120)]
        until(lambda: service.in_hand >= 100)
        time.sleep(0.2)
        assert service.in_hand == 100
    finally:
        may_go_on.set()
    answers = [call.result() for call in calls]
    assert all(answer == answers[0] for answer in answers)


def test_the_inputs_decide_whether_an_answer_is_raw(stub):
    """Over HTTP the parameter does, which clients may send here, too."""
    parameters = {"binary_data_output": {"bool_param": True}}
    found = stub.ModelInfer(asked(ITEMS, parameters=parameters))
    assert not found.raw_output_contents and found.outputs[0].contents.bytes_contents


def test_one_bad_row_fails_its_own_request(stub, service, monkeypatch):
    batcher = service.version("films", None).batcher
    expected = stub.ModelInfer(asked(ITEMS))
    fetched, batches = batcher.engine.fetched, []

    def with_nan(shape, found):
        outputs = [array.copy() for array in fetched(shape, found)]
        outputs[1][1] = np.nan
        batches.append(shape)
        return outputs

    with (
        working(service, lambda: stub.ModelInfer(asked(ITEMS))) as may_end,
        monkeypatch.context() as patch,
    ):
        patch.setattr(batcher.engine, "fetched", with_nan)
        calls = [stub.ModelInfer.future(asked(ITEMS)) for _ in range(2)]
        until(lambda: batcher.waiting == 2)
        may_end.set()
        good, bad = sorted(
            calls, key=lambda call: call.code() is not grpc.StatusCode.OK
        )
    assert good.result() == expected and len(batches) == 1
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "NaN" in str(bad.details())


def test_many_at_once_and_the_end(stub, client, service, monkeypatch):
    def refused() -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(asked(ITEMS))
        return caught.value.code(), str(caught.value.details())

    with monkeypatch.context() as patch:
        patch.setattr(service, "_in_hand", service.settings.at_once)
        code, text = refused()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1024 requests are in hand already" in text
        status, error = client.infer(tensor("items", "BYTES", ROWS))
        assert (status, error) == (429, text)
        assert service.in_hand == 1024  # who is refused is not counted
    with monkeypatch.context() as patch:
        patch.setattr(service, "draining", True)
        assert not stub.ServerReady(messages.ServerReadyRequest()).ready
        assert not stub.ModelReady(messages.ModelReadyRequest(name="films")).ready
        assert stub.ModelInfer(asked(ITEMS)).model_name == "films"
        closed = ClosedError("this service ends")
        batcher = service.version("films", None).batcher
        patch.setattr(batcher, "ask", Mock(side_effect=closed))
        assert refused() == (grpc.StatusCode.UNAVAILABLE, "this service ends")
    assert service.in_hand == 0


def test_bugs_and_lost_devices(stub, service, monkeypatch, capfd):
    version = service.version("films", None)

    def broken(*_):
        raise KeyError("oops")

    with monkeypatch.context() as patch:
        patch.setattr(version.form, "question", broken)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(asked(ITEMS))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    logs.flush()
    assert "oops" not in str(caught.value.details())
    assert "oops" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(version.batcher.engine, "started", broken)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(asked(ITEMS))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stub.ModelInfer(asked(ITEMS)).model_name == "films"
