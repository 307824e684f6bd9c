"""A signal ends a command at once, at any stage of its work."""

import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from sparsejax.cli.compiling import told_if_long

# A C function that no Python handler can interrupt, such as XLA's compiler. Without the thread
# that ends the process, it would run for many minutes.
_IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


def ended(
    program: str, folder: os.PathLike[str], answered: str = ""
) -> tuple[int, list[str]]:
    """Runs a program; returns its exit status, and the lines that it wrote to standard error.

    Once it has written the line `answered`, it reads a line from standard input.
    """
    begin = (
        "import hashlib, os, signal, sys, time; "
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "tell = lambda name: os.kill(os.getpid(), getattr(signal, name))\n"
    )
    end = "\nfrom sparsejax.cli.entry import run\nrun()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", begin + program + end, "convert", "in.csv", "out.csv"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    assert process.stdin is not None and process.stderr is not None
    limit, lines = threading.Timer(300, process.kill), []
    limit.start()
    with process:
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if lines[-1] == answered:
                print(file=process.stdin, flush=True)
    limit.cancel()
    return process.returncode, lines


@pytest.mark.parametrize(
    ("module", "name", "status"), [("tyro", "SIGINT", 130), ("jax", "SIGTERM", 143)]
)
def test_while_modules_are_imported(tmp_path, module, name, status):
    program = f"""
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            tell({name!r})
            {_IN_C}

sys.meta_path.insert(0, Finder())
"""
    assert ended(program, tmp_path) == (status, ["sparsejax: interrupted"])


def test_while_a_function_in_c_runs(tmp_path):
    """What was begun is removed, though the main thread does not come to it."""
    program = f"""
from sparsejax import whole_files
from sparsejax.cli import commands

def convert(command):
    with whole_files.whole_folder("new") as folder:
        (folder / "half").write_text("half")
        with whole_files.whole_file("file") as file:
            file.write(b"half")
            tell("SIGTERM")
            {_IN_C}

commands.convert = convert
"""
    assert ended(program, tmp_path) == (143, ["sparsejax: interrupted"])
    assert not os.listdir(tmp_path)


def test_work_that_would_be_lost_is_saved_first(tmp_path):
    program = """
from sparsejax.cli import commands
from sparsejax.mesh import interrupts

def convert(command):
    with interrupts.deferred(lambda: True):
        with interrupts.uninterrupted():  # it is not the second signal at its end
            tell("SIGTERM")
        sys.stdin.readline()
        print("saved", file=sys.stderr)
        MORE

commands.convert = convert
"""
    waits = "sparsejax: told to end: saves first; a second signal ends it at once"
    said = [waits, "saved", "sparsejax: interrupted"]
    assert ended(program.replace("MORE", ""), tmp_path, waits) == (143, said)
    twice = program.replace("MORE", f"tell('SIGINT'); {_IN_C}")
    assert ended(twice, tmp_path, waits) == (130, said)


def test_a_long_compilation_is_told():
    told: list[float] = []
    x = jnp.ones((8, 8))

    @jax.jit
    def program(x):
        for i in range(100):
            x = jnp.sort(jnp.sin(x) @ x, axis=i % 2)
        # The value changes, so that the program is in no cache.
        return x + time.time_ns() % 1e6

    with told_if_long(told.append, after=0.02):
        time.sleep(0.1)
        assert not told
        program(x)
    assert told


def test_signals_are_handled_before_slow_modules_are_imported():
    code = "import sys; had = {*sys.modules}; import sparsejax.cli.entry; "
    code += "print(*{*sys.modules} - had)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    slow = {"ast", "importlib.metadata", "jax", "lazy_loader", "numpy", "re"}
    assert not slow & {*done.stdout.split()}
