"""The same model behind three servers: ours, LitServe, and Triton's Python backend.

    LITSERVE=FOLDER TRITON=COMMAND python benchmarks/serving_peers.py run [--commit NAME]
    python benchmarks/serving_peers.py table                  anywhere

LITSERVE is a folder that `pip install --target FOLDER litserve` has filled. TRITON starts a
tritonserver: it is called with a model repository, and listens at port 8900; its Python has
sparsejax. The model, the rows and the client are those of `serving.py` on a CPU: one row a
request, and times of arrival that are drawn ahead. The others serve it as their guides do: a
class that loads the predictor, and calls `recommend_names` or `recommend` for the requests that
the server has put into a batch of at most 64 rows. To Triton items are numbers, since its Python
backend of this age reads no text with NumPy 2; its answers have no names. "processor" are
milliseconds of all processes of a server for a request, which other work on the machine changes
less than it changes latencies.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, origin, table, write_section

# Another package of this name is a folder of tests, which a checker of types would take.
_serving = importlib.import_module("serving")
CPU, K = _serving.CPU, _serving.K

_RATES, _SECONDS = (50, 100), 8.0
_PORTS = {"ours": 8898, "litserve": 8899, "triton": 8900}
_PATHS = {"litserve": "/predict"}
_LITSERVE = """
import sys

import litserve
import sparsejax as sj


class Films(litserve.LitAPI):
    def setup(self, device):
        self.predictor = sj.load_predictor(sys.argv[1])
        self.predictor.warm_up(rows=64)

    def decode_request(self, request):
        return request["items"]

    def predict(self, rows):
        return self.predictor.recommend_names(rows, k=20)

    def encode_response(self, names):
        return {"items": names}


if __name__ == "__main__":
    api = Films(max_batch_size=64, batch_timeout=0.002)
    server = litserve.LitServer(api, accelerator="cpu", fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[2]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )
"""
_TRITON = """
import numpy as np
import sparsejax as sj
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args):
        folder = f"{args['model_repository']}/{args['model_version']}"
        self.predictor = sj.load_predictor(f"{folder}/model.predictor")
        self.predictor.warm_up(rows=64)

    def execute(self, requests):
        rows = []
        for request in requests:
            tensor = triton.get_input_tensor_by_name(request, "items")
            rows.append(np.sort(np.from_dlpack(tensor), axis=1))
        ids = np.concatenate(rows)
        ends = np.arange(len(ids) + 1) * ids.shape[1]
        x = sj.CSR(None, ids.reshape(-1), ends, num_cols=self.predictor.num_items)
        found = self.predictor.recommend(x, k=20, exclude=x)
        answers, start = [], 0
        for each in rows:
            part = slice(start, start + len(each))
            answers.append(triton.InferenceResponse([
                triton.Tensor.from_dlpack("ids", np.ascontiguousarray(found.ids[part])),
                triton.Tensor.from_dlpack("scores", np.ascontiguousarray(found.scores[part])),
            ]))
            start += len(each)
        return answers
"""
_CONFIG = """
name: "model"
backend: "python"
max_batch_size: 64
input { name: "items" data_type: TYPE_INT32 dims: [ 30 ] }
output { name: "ids" data_type: TYPE_INT32 dims: [ 20 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 20 ] }
dynamic_batching { }
instance_group { kind: KIND_CPU count: 1 }
"""


def main() -> None:
    parts = {name: {} for name in _PORTS}
    command(__doc__, __file__, parts, _measure, _write_table)


def _measure(server: str) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.predictor"
        _serving.export(path, CPU)
        words, more = _command(server, path)
        with _running(server, words, more) as pid:
            yield from asyncio.run(_loads(server, pid))


def _command(server: str, path: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """The words that start a server, and the environment variables that it needs."""
    python, port = sys.executable, str(_PORTS[server])
    if server == "ours":
        words = [python, "-m", "sparsejax", "serve", str(path), "--name", "model"]
        return [*words, "--port", port], {}
    if server == "litserve":
        sites = os.environ["LITSERVE"], *os.environ.get("PYTHONPATH", "").split(":")
        source = path.with_name("films.py")
        source.write_text(_LITSERVE)
        words = [python, str(source), str(path), port]
        return words, {"PYTHONPATH": ":".join(filter(None, sites))}
    model = path.parent / "repository" / "model"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG)
    (model / "1" / "model.py").write_text(_TRITON)
    shutil.move(path, model / "1" / path.name)
    return [*shlex.split(os.environ["TRITON"]), str(model.parent)], {}


@contextlib.contextmanager
def _running(server: str, words: Sequence[str], more: dict[str, str]) -> Iterator[int]:
    """Within it a server answers: the process that leads its group."""
    environment = {**os.environ, **more, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{_PORTS[server]}{_path(server)}",
            _bodies(server)[0],
            {"content-type": "application/json"},
        )
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(request, timeout=60).close()
                break
            if process.poll() is not None:
                raise RuntimeError(f"{server} has ended with {process.returncode}")
            time.sleep(0.5)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):  # and those that it has left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _path(server: str) -> str:
    return _PATHS.get(server, "/v2/models/model/infer")


def _bodies(server: str) -> list[bytes]:
    """Requests of one row."""
    if server == "triton":
        tensors = [
            {"name": "items", "datatype": "INT32", "shape": [1, len(row)], "data": row}
            for row in _serving.numbers(200, CPU, seed=1)
        ]
        return [json.dumps({"inputs": [each]}).encode() for each in tensors]
    rows = _serving.histories(200, CPU, seed=1)
    if server == "litserve":
        return [json.dumps({"items": row}).encode() for row in rows]
    tensors = [
        {"name": "items", "datatype": "BYTES", "shape": [len(row)], "data": row}
        for row in rows
    ]
    asked = {"parameters": {"k": K}}
    return [json.dumps({"inputs": [each], **asked}).encode() for each in tensors]


async def _loads(server: str, pid: int) -> list[dict]:
    port, path, bodies = _PORTS[server], _path(server), _bodies(server)
    await _serving.at_rate(port, bodies, 20, 3.0, path)  # first requests
    found = []
    for rate in (*_RATES, None):
        before = _processor(pid)
        if rate is None:
            times, failed = await _serving.at_once(port, bodies, _SECONDS, path=path)
        else:
            times, failed = await _serving.at_rate(port, bodies, rate, _SECONDS, path)
        spent = 1e3 * (_processor(pid) - before) / len(times)
        done = len(times) / _SECONDS if rate is None else rate
        one = {"server": server, "rate": done, "most": rate is None, "failed": failed}
        load, _, _ = os.getloadavg()
        found.append(
            one | _serving.milliseconds(times) | {"processor": spent, "load": load}
        )
    return found


def _processor(leader: int) -> float:
    """Seconds of processor time that the processes of a session have taken."""
    ticks = 0
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:  # its session
                ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _write_table(report: dict) -> None:
    rows = [
        [
            r["server"],
            f"{r['rate']:,.0f}" + " (as many as go)" * r["most"],
            f"{r['p50']:.1f}",
            f"{r['p99']:.1f}",
            str(r["failed"]),
            f"{r['processor']:.2f}",
        ]
        for r in report["results"]
    ]
    heads = "server", "requests/s", "p50 ms", "p99 ms", "failed", "processor ms"
    write_section("serving_peers", [origin(report), "", *table(heads, rows)])


if __name__ == "__main__":
    main()
