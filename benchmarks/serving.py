"""A service of a predictor: its device alone, and whole requests over HTTP.

    python benchmarks/serving.py run [--commit NAME] [--output FILE]
    python benchmarks/serving.py table                  anywhere

The model is an untrained autoencoder of 256 hidden units, with cosines and a temperature. On a
CPU it has as many items as Gowalla; on a GPU a million, in bfloat16. Rows have 30 items, which
are not recommended; k is 20 of the 100 that the predictor was exported with.

"engine" is the time of packed batches on the device, with the copies of the outputs; "device" is
the time without them, of batches that wait for each other on the device. "read" is the time in
which a program adds up the numbers of each row of the kernel, which it has to read. "large" does the same with
ten million items, and "huge" with a hundred million, on a GPU; the latter are made there, without a
file. "ready" is the time to load and compile, and "loaded" that to load. "rest"
starts `sparsejax serve` and sends requests of one row over connections that stay open. Their
times of arrival are drawn ahead (exponential gaps), and latency counts from then on, so a
service that falls behind shows it. "spent" is what the service itself says of these requests, on
average: of a whole one, of waiting for a batch, of packing and on the device. The client works on the same machine: on two cores it takes
part of what it measures. "most" sends as fast as answers come, over 64 connections; on a GPU
four processes send. "grpc" sends requests of 256 rows, with names as bytes, over 16 calls. "cold" is
a start without compiled programs on disk; the service finds those of "engine" there.

"stages-50" and "stages-200" are two stages on a CPU: DIN ranks 500 of 100,000 items by histories of
50 and 200. The service has the first two processors of this process, and the client the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import selectors
import subprocess
import sys
import tempfile
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command

_HIDDEN, _LENGTH, _MOST, K, _CONNECTIONS = 256, 30, 100, 20, 64
# Number of concurrent gRPC calls, and of rows in each call.
_CALLS, _ROWS_OF_CALL = 16, 256
_PATH = "/v2/models/model/infer"


class Case(NamedTuple):
    """A predictor to serve, and the requests sent to it.

    Attributes:
      items: number of items.
      dtype: dtype of the kernel.
      rows: numbers of rows of the batches on the device.
      rates: rates of requests, in requests per second.
      seconds: duration of each rate.
      clients: number of processes that send a request as soon as they have an answer.
      length: number of items in a row.
    """

    items: int
    dtype: str
    rows: tuple[int, ...]
    rates: tuple[int, ...]
    seconds: float
    clients: int
    length: int = _LENGTH


CPU = Case(40_981, "float32", (1, 8, 16, 64), (50, 100, 200), 20.0, 1)
_GPU = Case(1_000_000, "bfloat16", (1, 8, 64, 256, 1024), (200, 1000), 8.0, 4)
_LARGE = Case(10_000_000, "bfloat16", (1, 64, 1024), (), 0.0, 0)
_HUGE = Case(100_000_000, "bfloat16", (64,), (), 0.0, 0)
_STAGES = {
    f"stages-{length}": Case(100_000, "float32", (1,), (50,), 20.0, 1, length)
    for length in (50, 200)
}


def main() -> None:
    if sys.argv[1:2] == ["client"]:
        _run(_client(**json.loads(sys.argv[2])))
        return
    parts = {part: {} for part in ("usual", "large", "huge", *_STAGES)}
    command(__doc__, __file__, parts, _measure)


def _run(asking: Coroutine[Any, Any, Any]) -> Any:
    """Runs a client. With `epoll`, asyncio's default, it would send up to a millisecond late."""
    select = selectors.SelectSelector
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(select())
    ) as runner:
        return runner.run(asking)


def _measure(part: str) -> Iterator[dict]:
    import jax

    if part in _STAGES:
        yield from _of_stages(part, _STAGES[part])
        return
    usual = CPU if jax.default_backend() == "cpu" else _GPU
    case = {"usual": usual, "large": _LARGE, "huge": _HUGE}[part]
    if usual is CPU and case is not CPU:
        return
    for result in _of_case(part, case):
        yield {"items": case.items} | result


def _of_case(part: str, case: Case) -> Iterator[dict]:
    import jax

    import sparsejax as sj

    if part == "huge":
        began = time.perf_counter()
        predictor = _on_device(case)
        yield from _engine(part, case, lambda: predictor, began)
        yield from _engine(part, case, lambda: _with_int8(predictor))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.predictor"
        began = time.perf_counter()
        export(path, case)
        seconds = {"exported": time.perf_counter() - began}
        jax.clear_caches()
        for result in _engine(
            "engine" if part == "usual" else part, case, lambda: sj.load_predictor(path)
        ):
            yield result | seconds | {"bytes": path.stat().st_size}
        if part == "usual":
            yield from _of_service(path, case)


def _model(case: Case, temperature: float | None) -> Any:
    from flax import nnx

    import sparsejax as sj

    size, half = case.items, case.dtype == "bfloat16"
    config = sj.NetworkConfig.autoencoder(
        (_HIDDEN,), temperature=temperature, param_dtype=case.dtype, tied=half
    )
    return sj.FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))


def export(path: pathlib.Path, case: Case) -> None:
    import sparsejax as sj

    model = _model(case, 0.1)
    names = [f"item {i}" for i in range(case.items)] if case.rates else None
    sj.export_predictor(model, path, k=_MOST, names=names, batch_size=max(case.rows))


def _of_stages(part: str, case: Case) -> Iterator[dict]:
    """Measures two stages: an untrained GRU of width 16 finds candidates, and an untrained DIN
    ranks them.
    """
    from flax import nnx

    import sparsejax as sj
    from sparsejax.data.files.names import as_names
    from sparsejax.kinds.histories.next_items import NextItems
    from sparsejax.kinds.stages import Stages
    from sparsejax.predictors import signature
    from sparsejax.predictors.stages import IDS, Requests

    items, names = case.items, as_names(f"item {i}" for i in range(case.items))
    config = sj.GRUConfig(max_length=case.length, width=16)
    first = sj.sequence.build_sequence_model(config, items=items, rngs=nnx.Rngs(0))
    ranks = sj.DINConfig(
        dim=16, length=case.length, attention=(80, 40), hidden=(64, 32)
    )
    sizes = {"user": items, "item": items + 2, "had": "item"}
    second = sj.clicks.build_click_model(
        ranks, num_dense=0, features=sizes, rngs=nnx.Rngs(1)
    )
    ids = {"user": sj.data.HashedColumn(items), "had": sj.data.VocabularyColumn()}
    requests = Requests(
        feature_names=names,
        stages=signature.Stages(history="had", lengths={"user": 1, "had": case.length}),
        schema=sj.ClickSchema("click", ids=ids),
        vocabularies={"had": names},
    )
    both = Stages(
        NextItems(first, times=False),
        second,
        candidates=500,
        items={f"{IDS}item": 2 + np.arange(items, dtype=np.int32)[:, None]},
        requests=requests.inputs,
    )
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.predictor"
        sj.export_predictor(both, path, k=K, names=requests, batch_size=1)
        os.sched_setaffinity(0, cores[:2])
        with _service(path) as (ports, _):
            os.sched_setaffinity(0, cores[2:] or cores)
            for result in _run(_loads(ports["port"], case, user="u7")):
                yield result | {"part": part}


def _on_device(case: Case) -> Any:
    """Makes a predictor of random numbers on the device, without a copy on the host."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax import lax

    from sparsejax.kinds.kind import kind_of_model
    from sparsejax.options.predicting import Write
    from sparsejax.predictors.files import model_of
    from sparsejax.predictors.predictor import Predictor
    from sparsejax.predictors.runtime import Programs
    from sparsejax.predictors.signature import PLATFORMS, Array, Signature
    from sparsejax.predictors.stablehlo import program

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def drawn(shape, dtype):
        # A hash of positions is one program, which needs no other array of this size.
        word = jnp.uint32(2654435769) * lax.broadcasted_iota(jnp.uint32, shape, 0)
        if len(shape) > 1:
            column = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
            word = word + jnp.uint32(2246822507) * column
        for shift, factor in ((16, 2246822507), (13, 3266489909), (16, 1)):
            word = (word ^ (word >> shift)) * jnp.uint32(factor)
        return (word.astype(jnp.int32).astype(jnp.float32) / 2.0**34).astype(dtype)

    # Only shapes are made: the initial values for cosines would need as much memory again.
    model = nnx.eval_shape(lambda: _model(case, None))
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param):
            node.set_value(drawn(node.shape, node.dtype))
        elif isinstance(node, nnx.RngState):
            is_key = isinstance(node, nnx.RngKey)
            node.set_value(jax.random.key(0) if is_key else jnp.uint32(0))
    kind = kind_of_model(model)
    portable = kind.portable(Write(model, "", k=_MOST))
    weights = [weight.like for weight in portable.weights]
    signature = Signature(
        kind=kind.name,
        **portable.stated,
        weights=tuple(Array.of(weight, None) for weight in weights),
        rows=(max(case.rows),),
        platforms=PLATFORMS,
        calling_convention=jax.config.jax_export_calling_convention_version,
        jax=jax.__version__,
    )
    made = {n: program(signature, n, portable.function) for n in signature.rows}
    runtime = Programs.of(signature, made, weights)
    return Predictor(signature=signature, model=model_of(signature, {})(runtime))


def _with_int8(predictor: Any) -> Any:
    """The predictor with an int8 copy of its items, which it reads first."""
    from sparsejax.predictors.files import model_of
    from sparsejax.predictors.predictor import Predictor
    from sparsejax.predictors.runtime import Programs

    layer = dataclasses.replace(predictor.signature.layer, int8=True)
    signature = dataclasses.replace(predictor.signature, layer=layer)
    code = predictor.model.programs.code
    runtime = Programs.of(signature, code, predictor.weights)
    return Predictor(signature=signature, model=model_of(signature, {})(runtime))


def numbers(count: int, case: Case, seed: int = 0) -> list[list[int]]:
    """Draws rows of distinct items; popular items are drawn more often."""
    rng = np.random.default_rng(seed)
    weights = np.cumsum(1 / np.arange(1, case.items + 1))
    drawn = rng.random((count, 2 * case.length)) * weights[-1]
    rows = np.searchsorted(weights, drawn).tolist()
    return [[*dict.fromkeys(row)][: case.length] for row in rows]


def histories(count: int, case: Case, seed: int = 0) -> list[list[str]]:
    return [[f"item {i}" for i in row] for row in numbers(count, case, seed)]


def _engine(
    part: str, case: Case, load: Callable[[], Any], began: float | None = None
) -> Iterator[dict]:
    import jax
    import jax.numpy as jnp

    import sparsejax as sj
    from sparsejax.mesh.xla_options import DETERMINISTIC
    from sparsejax.serving.engine import Engine, Shape

    began = time.perf_counter() if began is None else began
    predictor = load()
    jax.block_until_ready(predictor.weights)
    loaded = time.perf_counter() - began
    room = predictor.model.room
    # With many items only one program is compiled, as compilation takes longest.
    alone = [Shape(rows, room(rows, 1)) for rows in case.rows] if not case.rates else ()
    engine = Engine(predictor, alone)
    seconds = {"loaded": loaded, "ready": time.perf_counter() - began}
    # A sum over all rows would copy a kernel whose rows XLA has to pad. XLA would also copy it to
    # time programs and choose one.
    total = jax.jit(
        lambda kernel: jnp.sum(kernel, axis=1, dtype=jnp.float32),
        compiler_options=DETERMINISTIC,
    )
    kernel = max(predictor.weights, key=lambda weight: weight.size)
    read = _queued(lambda: total(kernel)) * 1e3
    for rows in case.rows:
        lists = [sorted(row) for row in numbers(rows, case)]
        indptr = np.cumsum([0, *map(len, lists)])
        x = sj.CSR(
            None, np.concatenate(lists).astype(np.int32), indptr, num_cols=case.items
        )
        pieces = engine.pieces([x, x])
        times, calls = [], []
        for size, each in pieces:
            shape = engine.shape_for(size)
            assert shape is not None
            calls.append((shape, each))
        for _ in range(60):
            began = time.perf_counter()
            for shape, each in calls:
                engine.run(shape, engine.packed(shape, [each]))
            times.append(time.perf_counter() - began)
        found = {"part": part, "rows": rows, "batches": len(pieces), "read": read}
        if predictor.signature.layer.int8:
            found["int8"] = True
        if len(calls) == 1 and jax.default_backend() != "cpu":
            ((shape, each),) = calls
            packed = jax.device_put(engine.packed(shape, [each]))
            found["device"] = (
                _queued(lambda s=shape, p=packed: engine.started(s, p)) * 1e3
            )
        yield found | seconds | milliseconds(times)


def _queued(call: Callable[[], object]) -> float:
    """Seconds of a call on the device, if many calls are queued there."""
    import jax

    jax.block_until_ready(call())
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready([call() for _ in range(20)])
        best = min(best, (time.perf_counter() - began) / 20)
    return best


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        name: float(np.percentile(seconds, share)) * 1e3
        for name, share in (("p50", 50), ("p99", 99))
    }


def _of_service(path: pathlib.Path, case: Case) -> Iterator[dict]:
    with _service(path) as (ports, ready):
        for result in _run(_loads(ports["port"], case)):
            yield result | {"ready": ready}
        before = _sums(ports["port"])
        called = _of_clients(ports["grpc_port"], case, case.clients, grpc=True)
        times, failed = _run(called)
        rate = len(times) / case.seconds
        found = {"part": "grpc", "rate": rate, "rows": rate * _ROWS_OF_CALL}
        found |= {"failed": failed, "ready": ready} | milliseconds(times)
        yield found | _spent(before, _sums(ports["port"]))
    with tempfile.TemporaryDirectory() as empty:
        kept = {"JAX_COMPILATION_CACHE_DIR": empty}
        with _service(path, kept) as (_, ready):
            yield {"part": "cold", "ready": ready}


@contextlib.contextmanager
def _service(
    path: pathlib.Path, more: Mapping[str, str] | None = None
) -> Iterator[tuple[dict[str, int], float]]:
    """Runs a service while this context is open; yields its ports, and the seconds until it was
    ready.

    Args:
      path: file of the predictor.
      more: additional environment variables.
    """
    words = [sys.executable, "-m", "sparsejax", "serve", str(path), "--name", "model"]
    paths = [str(_HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= more or {}
    said = path.with_name("log")
    began = time.perf_counter()
    with said.open("w") as log:
        service = subprocess.Popen(
            [*words, "--port", "0", "--grpc-port", "0"],
            stderr=log,
            stdout=log,
            env=environment,
        )
    try:
        while len(found := re.findall(r'"(\w*port)":\s*(\d+)', said.read_text())) < 2:
            if service.poll() is not None:
                raise RuntimeError(said.read_text())
            time.sleep(0.02)
        ports = {name: int(port) for name, port in found}
        while not _is_ready(ports["port"]):
            time.sleep(0.02)
        yield ports, time.perf_counter() - began
    finally:
        service.terminate()
        service.wait()


async def _loads(port: int, case: Case, **columns: str) -> list[dict]:
    found = []
    for rate in case.rates:
        before = _sums(port)
        times, failed = await _of_clients(port, case, 1, rate=rate, columns=columns)
        one = {"part": "rest", "rate": rate, "failed": failed}
        found.append(one | milliseconds(times) | _spent(before, _sums(port)))
    before = _sums(port)
    times, failed = await _of_clients(port, case, case.clients, columns=columns)
    done = len(times) / case.seconds
    one = {"part": "most", "rate": done, "failed": failed}
    return [*found, one | milliseconds(times) | _spent(before, _sums(port))]


def _sums(port: int) -> dict[str, float]:
    """The sums and counts in the metrics that the service reports."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(
        r"^sparsejax_(\w+_(?:sum|count))(?:{[^}]*})? (\S+)", text, re.MULTILINE
    )
    return {name: float(value) for name, value in found}


def _spent(before: dict[str, float], after: dict[str, float]) -> dict:
    """The average time that requests spent in each stage, in milliseconds, and the rows of a
    batch.
    """
    mean = {
        name: (after[f"{name}_sum"] - before[f"{name}_sum"])
        / max(after[f"{name}_count"] - before[f"{name}_count"], 1.0)
        for name in ("request_seconds", "queue_seconds", "packing_seconds")
        + ("device_seconds", "batch_rows")
    }
    rows = {"batch": mean.pop("batch_rows")}
    spent = {name.removesuffix("_seconds"): 1e3 * each for name, each in mean.items()}
    return {"spent": spent | rows}


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready"):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def _body(history: list[str], columns: Mapping[str, str]) -> bytes:
    lists = {"items": history} | {name: [cell] for name, cell in columns.items()}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": data}
        for name, data in lists.items()
    ]
    return json.dumps({"inputs": inputs, "parameters": {"k": K}}).encode()


class _Connection:
    """A connection that stays open for many requests."""

    def __init__(self, port: int):
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> bool:
        """Sends a request; returns whether the status of the answer was 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = (
            f"POST {_PATH} HTTP/1.1\r\nhost: localhost\r\n"
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


async def requests(
    port: int,
    bodies: list[bytes],
    seconds: float,
    connections: int = _CONNECTIONS,
    rate: float | None = None,
) -> tuple[list[float], int]:
    """Sends requests; returns their latencies, and how many of them failed.

    With a rate, requests arrive at random times, and a latency counts from the arrival. Without
    one, each connection sends a request as soon as it has received an answer.
    """
    times: list[float] = []
    failed, began, next_body = 0, time.perf_counter(), itertools.cycle(bodies)
    gaps: Any = ()
    if rate is not None:
        gaps = np.random.default_rng(2).exponential(1 / rate, int(rate * seconds))
    arrivals = iter((began + np.cumsum(gaps)).tolist())

    def next_start() -> float:
        """Returns the time of the next request, or infinity after the last."""
        now = time.perf_counter()
        if rate is not None:
            return next(arrivals, math.inf)
        return now if now < began + seconds else math.inf

    async def ask_on() -> None:
        nonlocal failed
        connection = _Connection(port)
        while (start := next_start()) < math.inf:
            if (early := start - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            failed += not await connection.ask(next(next_body))
            times.append(time.perf_counter() - start)
        await connection.close()

    await asyncio.gather(*(ask_on() for _ in range(connections)))
    return times, failed


async def _of_clients(
    port: int, case: Case, count: int, **how: Any
) -> tuple[list[float], int]:
    """Latencies of requests that other processes send, and how many requests failed.

    In this process, Python's garbage collector visits all objects of JAX. On one host this took
    153 ms, in which no answer is read.

    Args:
      port: port of the service.
      case: the requests.
      count: number of processes, which share the connections.
      how: arguments of `_client`.
    """
    facts = {"port": port, "case": case, "seconds": case.seconds, **how}
    clients = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "client"),
            json.dumps(facts | {"count": count, "seed": seed}),
            stdout=asyncio.subprocess.PIPE,
        )
        for seed in range(1, count + 1)
    ]
    said = [json.loads((await client.communicate())[0]) for client in clients]
    return [time for times, _ in said for time in times], sum(n for _, n in said)


async def _client(
    port: int,
    case: Case,
    seconds: float,
    count: int,
    seed: int,
    rate: float | None = None,
    columns: Mapping[str, str] = types.MappingProxyType({}),
    grpc: bool = False,
) -> None:
    """Sends requests or gRPC calls, and prints their latencies."""
    case = Case(*case)
    if grpc:
        found = await _calls(port, case, seconds, _CALLS // count)
    else:
        bodies = [_body(history, columns) for history in histories(200, case, seed)]
        # The client's own first requests are slow, so they are not measured.
        await requests(port, bodies, 1.0, rate=20)
        connections = _CONNECTIONS // count
        found = await requests(port, bodies, seconds, connections, rate)
    print(json.dumps(found))


async def _calls(
    port: int, case: Case, seconds: float, count: int
) -> tuple[list[float], int]:
    """Makes gRPC calls one after the other on each of several tasks; returns latencies and
    failures.
    """
    import grpc
    from open_inference.grpc import protocol as messages

    def request(seed: int) -> bytes:
        rows = histories(_ROWS_OF_CALL, case, seed)
        names = [name.encode() for row in rows for name in row]
        lengths = np.array([len(row) for row in rows], np.int32)
        made = messages.ModelInferRequest(model_name="model")
        made.parameters["k"].int64_param = K
        made.inputs.add(name="items", datatype="BYTES", shape=[len(names)])
        made.inputs.add(name="lengths", datatype="INT32", shape=[len(rows)])
        prefixed = (len(name).to_bytes(4, "little") + name for name in names)
        made.raw_input_contents.extend([b"".join(prefixed), lengths.tobytes()])
        return made.SerializeToString()

    requests = [request(seed) for seed in range(8)]
    times: list[float] = []
    failed = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        await ask(requests[0])
        began = time.perf_counter()

        async def ask_on(number: int) -> None:
            nonlocal failed
            while (sent := time.perf_counter()) < began + seconds:
                try:
                    await ask(requests[number % len(requests)])
                except grpc.RpcError:
                    failed += 1
                times.append(time.perf_counter() - sent)

        await asyncio.gather(*map(ask_on, range(count)))
    return times, failed


if __name__ == "__main__":
    main()
