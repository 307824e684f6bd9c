"""Commands in child processes that end with this process. These tests need no Spark."""

import os
import pathlib
import signal
import subprocess
import sys
import time

from spark_processes import is_running, processes_below

from sparsejax.spark import child
from sparsejax.spark.child import run_command


def test_says_how_a_command_has_ended():
    ended = run_command(["train", "nothing.tsv", "--run", "run"], {})
    assert ended.status == 1
    assert ended.lines[-1] == "sparsejax: error: nothing.tsv: no such file"
    assert run_command(["oops"], {}).status == 2


def test_a_command_is_killed_with_what_started_it(tmp_path):
    # A command that does not end.
    package = tmp_path / "sparsejax"
    (package / "spark").mkdir(parents=True)
    for folder in (package, package / "spark"):
        (folder / "__init__.py").touch()
    (package / "spark" / "child.py").write_text(
        pathlib.Path(child.__file__).read_text()
    )
    begun = tmp_path / "begun"
    (package / "__main__.py").write_text(
        f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    )
    program = (
        "from sparsejax.spark.child import run_command\n"
        f"run_command(['train'], {{'PYTHONPATH': {str(tmp_path)!r}}})"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        while not begun.exists():
            assert parent.poll() is None
            time.sleep(0.05)
        [command] = processes_below(parent.pid, "child")
        assert os.getpgid(command) == command
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while is_running(command) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(command)
