"""A service of a predictor: its device alone, and whole requests over HTTP.

    python benchmarks/serving.py run [--commit NAME] [--output FILE]
    python benchmarks/serving.py table                  anywhere

The model is an untrained autoencoder of 256 hidden units, with cosines and a temperature, and
has as many items as Gowalla. Rows have 30 items, which are not recommended; k is 20 of the 100
that the predictor was exported with.

"engine" is the time of packed batches on the device, with the copies of the outputs. "rest"
starts `sparsejax serve` and sends requests of one row over connections that stay open. Their
times of arrival are drawn ahead (exponential gaps), and latency counts from then on, so a
service that falls behind shows it. The client works on the same machine: on two cores it takes
part of what it measures. "most" sends as fast as answers come, over 64 connections.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section

_ITEMS, _HIDDEN, _LENGTH, _MOST, _K = 40_981, 256, 30, 100, 20
_ROWS, _RATES, _SECONDS, _CONNECTIONS = (1, 8, 16, 64), (50, 100, 200), 20.0, 64


def main() -> None:
    command(__doc__, __file__, {"engine": {}, "rest": {}}, _measure, _write_table)


def _measure(part: str) -> Iterator[dict]:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.predictor"
        _export(path)
        versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        for result in _engine(path) if part == "engine" else _rest(path):
            yield result | {"versions": versions}


def _export(path: pathlib.Path) -> None:
    from flax import nnx

    import sparsejax as sj

    config = sj.NetworkConfig.autoencoder((_HIDDEN,), temperature=0.1)
    model = sj.FeedForward(config, inputs=_ITEMS, outputs=_ITEMS, rngs=nnx.Rngs(0))
    names = np.char.add("item ", np.arange(_ITEMS).astype(str))
    sj.export_predictor(model, path, k=_MOST, names=names)


def _histories(count: int, seed: int = 0) -> list[list[str]]:
    """Rows of distinct items, the popular ones more often."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, _ITEMS + 1)
    weights /= weights.sum()
    drawn = (rng.choice(_ITEMS, 2 * _LENGTH, p=weights) for _ in range(count))
    return [
        [f"item {i}" for i in dict.fromkeys(ids.tolist())][:_LENGTH] for ids in drawn
    ]


def _engine(path: pathlib.Path) -> Iterator[dict]:
    import sparsejax as sj
    from sparsejax.serving.engine import Engine

    began = time.perf_counter()
    engine = Engine(sj.load_predictor(path))
    ready = time.perf_counter() - began
    for rows in _ROWS:
        given, _ = engine.predictor.model.rows_of_names(_histories(rows))
        pieces = engine.pieces(given)
        times = []
        for _ in range(60):
            began = time.perf_counter()
            for size, part in pieces:
                shape = engine.shape_for(size)
                assert shape is not None
                engine.run(shape, engine.packed(shape, [part]))
            times.append(time.perf_counter() - began)
        found = {"part": "engine", "rows": rows, "batches": len(pieces)}
        yield found | {"ready": ready} | _milliseconds(times)


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        name: float(np.percentile(seconds, share)) * 1e3
        for name, share in (("p50", 50), ("p99", 99))
    }


def _rest(path: pathlib.Path) -> list[dict]:
    words = [sys.executable, "-m", "sparsejax", "serve", str(path), "--name", "model"]
    environment = os.environ | {"PYTHONPATH": str(_HERE.parent)}
    said = path.with_name("log")
    began = time.perf_counter()
    with said.open("w") as log:
        service = subprocess.Popen(
            [*words, "--port", "0"], stderr=log, stdout=log, env=environment
        )
    try:
        while not (found := re.search(r'"port":\s*(\d+)', said.read_text())):
            time.sleep(0.02)
        port = int(found[1])
        while not _is_ready(port):
            time.sleep(0.02)
        ready = {"ready": time.perf_counter() - began}
        return [each | ready for each in asyncio.run(_loads(port))]
    finally:
        service.terminate()
        service.wait()


async def _loads(port: int) -> list[dict]:
    bodies = [_body(history) for history in _histories(200, seed=1)]
    await _at_rate(port, bodies, 20, 2.0)  # the client's own first requests
    found = []
    for rate in _RATES:
        times, failed = await _at_rate(port, bodies, rate, _SECONDS)
        one = {"part": "rest", "rate": rate, "failed": failed}
        found.append(one | _milliseconds(times))
    times, failed = await _at_once(port, bodies, _SECONDS)
    done = len(times) / _SECONDS
    one = {"part": "most", "rate": done, "failed": failed}
    return [*found, one | _milliseconds(times)]


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready"):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def _body(history: list[str]) -> bytes:
    items = {"name": "items", "datatype": "BYTES", "shape": [len(history)]}
    document = {"inputs": [items | {"data": history}], "parameters": {"k": _K}}
    return json.dumps(document).encode()


class _Connection:
    """One connection that stays open."""

    def __init__(self, port: int):
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> bool:
        """Whether the answer was 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = (
            "POST /v2/models/model/infer HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        heads = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", heads, re.IGNORECASE)
        assert length is not None
        await reader.readexactly(int(length[1]))
        return heads.startswith(b"HTTP/1.1 200")

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()


async def _at_rate(
    port: int, bodies: list[bytes], rate: float, seconds: float
) -> tuple[list[float], int]:
    """Latencies of requests that arrive by chance, and how many were no success."""
    rng = np.random.default_rng(2)
    arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    free: asyncio.Queue[_Connection] = asyncio.Queue()
    connections = [_Connection(port) for _ in range(_CONNECTIONS)]
    for connection in connections:
        free.put_nowait(connection)
    times: list[float] = []
    failed = 0

    async def one(body: bytes, due: float) -> None:
        nonlocal failed
        connection = await free.get()
        failed += not await connection.ask(body)
        times.append(time.perf_counter() - due)
        free.put_nowait(connection)

    began, asked = time.perf_counter(), []
    for arrival, body in zip(arrivals, itertools.cycle(bodies), strict=False):
        due = began + arrival
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asked.append(asyncio.create_task(one(body, due)))
    await asyncio.gather(*asked)
    for connection in connections:
        await connection.close()
    return times, failed


async def _at_once(
    port: int, bodies: list[bytes], seconds: float
) -> tuple[list[float], int]:
    """Latencies where each connection asks again as soon as it has an answer."""
    times: list[float] = []
    failed, end, next_body = 0, time.perf_counter() + seconds, itertools.cycle(bodies)

    async def ask_on() -> None:
        nonlocal failed
        connection = _Connection(port)
        while (began := time.perf_counter()) < end:
            failed += not await connection.ask(next(next_body))
            times.append(time.perf_counter() - began)
        await connection.close()

    await asyncio.gather(*(ask_on() for _ in range(_CONNECTIONS)))
    return times, failed


def _write_table(report: dict) -> None:
    results = report["results"]
    engine = [
        [str(r["rows"]), str(r["batches"]), f"{r['p50']:.1f}", f"{r['p99']:.1f}"]
        for r in results
        if r["part"] == "engine"
    ]
    rest = [
        [
            f"{r['rate']:,.0f}" + (" (as many as go)" if r["part"] == "most" else ""),
            f"{r['p50']:.1f}",
            f"{r['p99']:.1f}",
            str(r["failed"]),
        ]
        for r in results
        if r["part"] != "engine"
    ]
    lines = [origin(report), ""]
    lines += [*table(["rows", "batches", "p50 ms", "p99 ms"], engine), ""]
    lines += table(["requests/s", "p50 ms", "p99 ms", "failed"], rest)
    write_section("serving", lines)


if __name__ == "__main__":
    main()
