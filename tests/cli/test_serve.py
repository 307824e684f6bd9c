"""The command `serve`: its start, wrong flags, and its end by a signal, at which no request is
lost.
"""

import contextlib
import json
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest
from flax import nnx
from open_inference.grpc import protocol as messages
from open_inference.grpc import service as stubs
from served import Client, tensor, until

import sparsejax as sj
from sparsejax.cli import commands, flags
from sparsejax.cli.main import main


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("served") / "films" / "1" / "model.predictor"
    path.parent.mkdir(parents=True)
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=3, outputs=3, rngs=nnx.Rngs(0))
    names = ["tea", "rye", "milk"]
    sj.export_predictor(model, path, k=2, names=names, batch_size=1)
    return path


def test_a_signal_ends_it_and_loses_nothing(file):
    folder, ports = file.parents[1], "--port 0 --grpc-port 0"
    flags = f"{ports} --admin 0 --watch 0.1 --shapes 1x256 --grace 120"
    words = ["serve", str(folder), *flags.split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "sparsejax", *words], stderr=subprocess.PIPE, text=True
    )
    lines = process.stderr
    assert lines is not None

    def event(name: str) -> dict:
        for line in lines:
            if (found := json.loads(line))["event"] == name:
                return found
        pytest.fail(f"no {name}")

    stack = contextlib.ExitStack()
    try:
        ready = event("ready")
        channel = stack.enter_context(
            grpc.insecure_channel(f"127.0.0.1:{ready['grpc_port']}")
        )
        # Each line of the log is JSON, even so.
        _say_goodbye(ready["grpc_port"], b"\n{\xff")
        stub = stubs.GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(messages.ServerReadyRequest()).ready
        client = Client(ready["port"])
        assert client.get("/v2/models/films/ready")[0] == 200
        admin = Client(ready["admin_port"])
        assert admin.ask("POST", "/v2/repository/index")[0] == 200
        shutil.copytree(file.parent, folder / "2")
        event("reload")
        until(lambda: client.get("/v2/models/films/versions/2/ready")[0] == 200)
        answers: list[int] = []
        threads = [threading.Thread(target=_ask, args=(client, answers)) for _ in "ab"]
        threads.append(threading.Thread(target=_ask_over_grpc, args=(stub, answers)))
        for thread in threads:
            thread.start()
        while event("request")["protocol"] != "grpc":
            pass
        process.send_signal(signal.SIGTERM)
        event("signal")
        assert client.get("/v2/health/ready") == (503, {"ready": False})
        for thread in threads:
            thread.join()
        assert answers == [200] * 90
        event("ended")
        assert lines.read() == ""
        assert process.wait(60) == 0
    finally:
        stack.close()
        process.kill()
        process.wait()
        lines.close()


@contextlib.contextmanager
def _serving(file: pathlib.Path) -> Iterator[tuple[subprocess.Popen, Client]]:
    """Runs a process that serves a file while the context is open; yields the process and a
    client.
    """
    words = ["-m", "sparsejax", "serve", str(file), "--name", "films"]
    words += ["--port", "0", "--shapes", "1x256"]
    process = subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.PIPE, text=True
    )
    lines = process.stderr
    assert lines is not None
    try:
        found = next(json.loads(line) for line in lines if '"ready"' in line)
        # The output is read, because the process would block on a full pipe.
        reading = threading.Thread(target=lambda: [*lines])
        reading.start()
        yield process, Client(found["port"])
        process.kill()
        reading.join()
    finally:
        process.kill()
        process.wait()
        lines.close()


def test_ten_thousand_idle_connections_and_a_kill(file):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 11_000  # number of open files in this process and in the service
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"a process may have {hard:,} files here, of {needed:,}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    asked = tensor("items", "BYTES", ["tea"])
    try:
        with _serving(file) as (process, client), contextlib.ExitStack() as stack:
            status, answer = client.infer(asked)
            assert status == 200
            idle = [
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", client.port))
                )
                for _ in range(10_000)
            ]
            assert client.infer(asked)[0] == 200
            for connection in idle:  # no request has arrived in time
                connection.settimeout(60)
                assert connection.recv(1) == b""
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
        with _serving(file) as (_, client):
            assert client.infer(asked)[1] == answer
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _ask(client: Client, answers: list[int]) -> None:
    for _ in range(30):
        status, found = client.infer(tensor("items", "BYTES", ["tea"]))
        answers.append(status)
        assert (
            found["items"]["data"] == ["rye", "milk"]
            or len(found["items"]["data"]) == 2
        )


def _say_goodbye(port: int, text: bytes) -> None:
    """Ends an HTTP/2 connection with a text, which gRPC writes to its own log."""
    frame = (8 + len(text)).to_bytes(3) + b"\7\0" + bytes(4 + 4) + b"\0\0\0\1" + text
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        settings = b"\0\0\0\4\0\0\0\0\0"
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + frame)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1024):
            pass


def _ask_over_grpc(stub, answers: list[int]) -> None:
    contents = {"bytes_contents": [b"tea"]}
    items = {"name": "items", "datatype": "BYTES", "shape": [1], "contents": contents}
    request = messages.ModelInferRequest(model_name="films", inputs=[items])
    for _ in range(30):
        # This raises an exception if the request is not answered.
        found = stub.ModelInfer(request)
        assert {*found.outputs[0].contents.bytes_contents} == {b"rye", b"milk"}
        answers.append(200)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "8"], "a shape is rows x entries, like 8x512, got '8'"),
        (["--shapes", "8x512"], "the predictor has programs of 1 rows"),
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key go together"),
        (["--max-wait", "-1"], "--max-wait must be at least 0"),
        (["--watch", "1"], "--watch is a positive number of seconds, for a folder"),
        (["--admin", "1"], "--admin is for a folder of versions"),
        (["--admin", "x:y"], "--admin is a port, or host and port like"),
        (["--keep", "1"], "goes with --watch or --admin"),
        (["--swap", "drain"], "--swap drain goes with --watch or --admin"),
        (["--name", "similar", "--similar"], "is the name of the second model"),
        (["--exclude-file", "no-such.txt"], "error: no-such.txt: "),
        (["--port", "70000"], "--port must be from 0 to 65535"),
        (
            ["--host", "no.such.host.invalid"],
            "error: no.such.host.invalid:0: cannot listen",
        ),
    ],
)
def test_wrong_flags(file, capsys, words, message):
    assert main(["serve", str(file), "--port", "0", *words]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_run_is_served(tmp_path, capsys):
    lines = "".join(f"u{u},i{i}\n" for u in range(6) for i in range(u % 2, 6, 2))
    (tmp_path / "plays.csv").write_text("user,item\n" + lines)
    run = sj.Run.train(
        tmp_path / "plays.csv", tmp_path / "run", num_epochs=1, optimizer="sgd"
    )
    command = flags.Serve(model=str(run.directory))
    with commands.exported(command) as served:
        predictor = sj.load_predictor(served.model)
        assert served.name == "run"
        found = predictor.recommend_names(["i0", "i2"])
        assert len(found) == 4 and {*found} == {"i1", "i3", "i4", "i5"}
    assert not pathlib.Path(served.model).exists()
    words = ["serve", str(run.directory), "--port", "0", "--shapes", "3x64"]
    assert main(words) == 1  # without an error the command would serve forever
    assert "has programs of 1, 8, 64, 512 rows" in capsys.readouterr().err


def test_what_is_no_predictor(tmp_path, capsys):
    path = tmp_path / "model.predictor"
    path.write_bytes(b"PK")
    assert main(["serve", str(path), "--port", "0"]) == 1
    assert "is not a predictor" in capsys.readouterr().err.splitlines()[-1]


# A service in which polling for newer versions never returns, as on a disk that does not answer.
HANGING = """
import sys, threading
from sparsejax.cli.main import main
from sparsejax.serving import versions
first = versions.found_in
def waits(folder):
    versions.found_in = hangs
    return first(folder)
def hangs(folder):
    print('{"event":"hangs"}', file=sys.stderr, flush=True)
    threading.Event().wait()
versions.found_in = waits
sys.exit(main(sys.argv[1:]))
"""


def test_a_thread_that_waits_for_ever_does_not_hold_the_process(file):
    words = ["serve", str(file.parents[1]), "--port", "0", "--shapes", "1x256"]
    words += ["--watch", "0.1", "--grace", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *words], stderr=subprocess.PIPE, text=True
    )
    lines = process.stderr
    assert lines is not None
    try:
        for line in lines:
            if '"hangs"' in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert '"event":"left"' in lines.read()
    finally:
        process.kill()
        process.wait()
        lines.close()
