"""Processes that wait in operations which never end, while one of them is lost."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import sys, threading
import sparsejax as sj
number = int(sys.argv[1])
sj.join_processes(sys.argv[2], num_processes=3, process_id=number)
print("joined", flush=True)
how = sys.stdin.readline().strip()
if how == "fail":
    raise ValueError("this process has failed")
if how == "wait":
    threading.Event().wait()  # as an operation on a GPU does
"""


@pytest.fixture
def three():
    """Three connected processes that wait for a command."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert "joined\n" in iter(process.stdout.readline, "")
    yield started
    for process in started:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen, word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


@pytest.mark.parametrize("lost", [0, 2])
def test_the_others_of_a_killed_process_end(three, lost):
    for process in three:
        tell(process, "wait")
    three[lost].send_signal(signal.SIGKILL)
    for i in {0, 1, 2} - {lost}:
        _, error = three[i].communicate(timeout=90)  # JAX's heartbeats take longer
        assert three[i].returncode == 1
        assert error.endswith("sparsejax: error: another process was lost\n")


def test_the_others_of_a_process_that_fails_end(three):
    tell(three[0], "wait")
    tell(three[2], "wait")
    tell(three[1], "fail")
    for i in 0, 2:
        _, error = three[i].communicate(timeout=90)  # JAX's heartbeats take longer
        assert three[i].returncode == 1
        assert error.endswith("sparsejax: error: another process was lost\n")
    _, error = three[1].communicate(timeout=90)
    assert three[1].returncode != 0 and "this process has failed" in error


def test_processes_that_end_are_not_lost(three):
    tell(three[1], "end")
    tell(three[0], "end")
    time.sleep(8)  # longer than a process may run after another was lost
    assert three[2].poll() is None
    tell(three[2], "end")
    for process in three:
        _, error = process.communicate(timeout=90)
        assert process.returncode == 0, error
