"""Requests as clients of other servers send them, and gRPC's standard health service."""

import asyncio
import json
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from open_inference.grpc import protocol as messages
from served import over_grpc, tensor

from sparsejax.serving import server
from sparsejax.serving.grpc import server as grpc_server
from sparsejax.serving.service import Service, Settings

ITEMS = tensor("items", "BYTES", ["item 3", "item 1"])
# As `InferenceRequest.dict()` of MLServer and its codecs write them.
STATED = {
    "nulls of the request": {"id": None, "parameters": None, "outputs": None},
    "nulls of an input": {"inputs": [ITEMS | {"parameters": None}]},
    "null parameters": {"parameters": {"k": None, "content_type": None}},
    "null size": {"inputs": [ITEMS | {"parameters": {"binary_data_size": None}}]},
    "content_type of an input": {
        "inputs": [
            ITEMS | {"parameters": {"content_type": "str", "headers": {"a": "b"}}}
        ]
    },
    "content_type of the request": {"parameters": {"content_type": "pd"}},
    "content_type of an output": {
        "outputs": [
            {"name": name, "parameters": {"content_type": "np", "binary_data": None}}
            for name in ("items", "scores", "lengths", "unknown")
        ]
    },
    "no outputs": {"outputs": []},
}


@pytest.mark.parametrize("case", STATED)
def test_what_other_clients_add_is_passed_over(client, case):
    request = {"inputs": [ITEMS]} | STATED[case]
    expected = client.infer(ITEMS)
    assert client.infer(*request.pop("inputs"), **request) == expected


@pytest.mark.parametrize("wrong", [[], "", 0, False])
def test_parameters_are_an_object(client, wrong):
    body = json.dumps({"inputs": [ITEMS], "parameters": wrong}).encode()
    status, _, answer = client.ask("POST", "/v2/models/films/infer", body)
    assert status == 422 and b"parameters must be an object" in answer


def test_parameters_over_grpc(service):
    stated = {"content_type": messages.InferParameter(string_param="str")}
    contents = {"bytes_contents": [b"item 3"]}
    items = {"name": "items", "datatype": "BYTES", "shape": [1], "contents": contents}
    with over_grpc(service) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        request = messages.ModelInferRequest(
            model_name="films", inputs=[items], parameters=stated
        )
        assert infer(request.SerializeToString())


def test_the_standard_health_service(file):
    service = Service("films", Settings())
    health = health_pb2.HealthCheckRequest
    found = health_pb2.HealthCheckResponse
    with over_grpc(service) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        names = "", "films", "inference.GRPCInferenceService"
        for name in names:
            assert stub.Check(health(service=name)).status == found.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watched = stub.Watch(health(service="films"))
        unknown = stub.Watch(health(service="other"))
        assert next(watched).status == found.NOT_SERVING
        assert next(unknown).status == found.SERVICE_UNKNOWN
        unknown.cancel()
        service.load(file)
        assert next(watched).status == found.SERVING
        for name in names:
            assert stub.Check(health(service=name)).status == found.SERVING
        service.draining = True
        assert [each.status for each in watched] == [found.NOT_SERVING]
    service.close()


def test_many_calls_at_once_are_answered_or_refused(service, monkeypatch):
    """None of them is cancelled by gRPC itself, and all are counted."""
    few = Service("films", Settings(at_once=8))
    monkeypatch.setattr(few, "_version", service.version("films", None))
    contents = {"bytes_contents": [b"item 3"]}
    items = {"name": "items", "datatype": "BYTES", "shape": [1], "contents": contents}
    request = messages.ModelInferRequest(model_name="films", inputs=[items])
    data, ports, count = request.SerializeToString(), [], 150

    async def ask() -> list[str]:
        made = grpc_server(few)
        ports.append(made.add_insecure_port("127.0.0.1:0"))
        await made.start()
        channels = [
            # Each with a connection of its own.
            grpc.aio.insecure_channel(
                f"127.0.0.1:{ports[0]}", [("grpc.use_local_subchannel_pool", 1)]
            )
            for _ in range(10)
        ]

        async def one(channel) -> str:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            try:
                await call(data, timeout=60)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        found = await asyncio.gather(*(one(c) for c in channels for _ in range(count)))
        for channel in channels:
            await channel.close()
        await made.stop(0)
        return found

    found = asyncio.run(ask())
    assert {*found} <= {"OK", "RESOURCE_EXHAUSTED"} and found.count("OK") > 0
    text = few.metrics.text().decode()
    counted = {
        code: int(float(line.rpartition(" ")[2]))
        for code in ("200", "429")
        for line in text.splitlines()
        if line.startswith(f'sparsejax_requests_total{{code="{code}"')
    }
    assert counted.get("200", 0) == found.count("OK")
    assert counted.get("429", 0) == found.count("RESOURCE_EXHAUSTED")
    few.metrics.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_all_addresses_are_of_both_families():
    with pytest.MonkeyPatch.context() as patch:
        bound: list[socket.socket] = []

        async def serve(_, sockets):
            bound.extend(sockets)
            for host in ("127.0.0.1", "::1"):
                port = sockets[0].getsockname()[1]
                socket.create_connection((host, port), timeout=60).close()
            sockets[0].close()
            raise RuntimeError("seen")

        patch.setattr("uvicorn.Server.serve", serve)
        patch.setattr(Service, "load", lambda *_: None)
        with pytest.raises(RuntimeError, match="seen"):
            server.run("none", "films", Settings(), server.Address(host="::", port=0))
    assert bound
