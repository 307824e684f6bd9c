"""Services on ports, and clients of them."""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import gc
import http.client
import json
import pathlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
import uvicorn
import uvloop

from sparsejax.serving.connections import configured
from sparsejax.serving.grpc import server as grpc_server
from sparsejax.serving.service import Service

NAMES = [*(f"item {n}" for n in range(8)), "jalapeño"]  # names of the items


@contextlib.contextmanager
def listening(
    service: Service, *, beside: Callable[[], Coroutine] | None = None
) -> Iterator[int]:
    """Runs a service on a port in a thread while the context is open; `beside` runs in its event
    loop.
    """
    server = uvicorn.Server(configured(service))

    async def serve() -> None:
        other = asyncio.ensure_future(beside()) if beside is not None else None
        await server.serve(sockets=[bound])
        if other is not None:
            other.cancel()

    def run() -> None:
        with asyncio.Runner(
            loop_factory=uvloop.new_event_loop
        ) as runner:  # as the command configures it
            runner.run(serve())

    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=run)
        thread.start()
        while not server.started:
            time.sleep(0.001)
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def grpc_listening(service: Service) -> Iterator[int]:
    """Runs a service over gRPC on a port, in a thread, while the context is open."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    stop, ports = asyncio.Event(), list[int]()

    async def serve() -> None:
        server = grpc_server(service)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(60)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextlib.contextmanager
def over_grpc(service: Service) -> Iterator[grpc.Channel]:
    """Runs a service over gRPC in a thread while the context is open; yields a channel to it."""
    with (
        grpc_listening(service) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield channel


@contextlib.contextmanager
def working(service: Service, ask: Callable[[], object]) -> Iterator[threading.Event]:
    """Keeps the device busy with a request until the event is set, so that further requests
    wait.
    """
    engine = service.version("films", None).batcher.engine
    fetched, begun, may_end = engine.fetched, threading.Event(), threading.Event()

    def waiting(*given):
        begun.set()
        assert may_end.wait(300)
        return fetched(*given)

    with (
        pytest.MonkeyPatch.context() as patch,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        patch.setattr(engine, "fetched", waiting)
        first = pool.submit(ask)
        try:
            assert begun.wait(300)
            yield may_end
        finally:
            may_end.set()
        first.result(300)


def until(condition: Callable[[], object]) -> None:
    """Waits until a condition is true, with a long timeout for busy machines."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def resident() -> int:
    """Bytes of memory that this process uses, without freed memory."""
    gc.collect()
    # Returns freed memory to the system; otherwise the result would depend on earlier tests.
    ctypes.CDLL(None).malloc_trim(0)
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"^VmRSS:\s*(\d+) kB", status, re.MULTILINE)
    assert found
    return 1024 * int(found[1])


class Client:
    """A client of one service."""

    def __init__(self, port: int):
        self.port = port

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Sends a request; returns status, headers and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()

    def get(self, path: str) -> tuple[int, Any]:
        """Sends a GET request; returns status and JSON of the answer."""
        status, _, body = self.ask("GET", path)
        return status, json.loads(body)

    def infer(
        self, *inputs: dict, model: str = "films", **request: Any
    ) -> tuple[int, Any]:
        """Sends an inference request; returns the status, and the outputs by name or the error."""
        body = json.dumps({"inputs": inputs, **request}).encode()
        status, _, answer = self.ask("POST", f"/v2/models/{model}/infer", body)
        found = json.loads(answer)
        if status != 200:
            return status, found["error"]
        return status, {each["name"]: each for each in found["outputs"]}


def tensor(
    name: str, datatype: str, data: list, shape: list[int] | None = None
) -> dict:
    """An input tensor in the protocol's JSON."""
    shape = [len(data)] if shape is None else shape
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def prefixed(*names: bytes) -> bytes:
    """Names in the protocol's binary form."""
    return b"".join(struct.pack("<I", len(name)) + name for name in names)


def binary(inputs: list[tuple[dict, bytes]], **request: Any) -> tuple[bytes, int]:
    """The body of a request with binary inputs, and the number of bytes of its JSON part."""
    described = [
        {**facts, "parameters": {"binary_data_size": len(data)}}
        for facts, data in inputs
    ]
    text = json.dumps({"inputs": described, **request}).encode()
    return text + b"".join(data for _, data in inputs), len(text)
