"""Runs the command `sparsejax` in a child process that ends with the task that started it.

A task of Spark ends when it is done, when it fails, or when its executor is killed. Its Python
process then ends, often by SIGKILL. With `PR_SET_PDEATHSIG` the kernel then kills the child.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_KEPT_LINES = 20
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclasses.dataclass(frozen=True)
class Ended:
    """The exit status of a command, and its last messages.

    Attributes:
      status: exit status of the command; negative if a signal has killed it.
      lines: last lines that the command has printed to standard error.
    """

    status: int
    lines: tuple[str, ...]


def run_command(argv: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Runs `sparsejax ARGV` and waits for its end.

    The command has a process group of its own. It is killed when this function raises, and
    when this process ends. Its messages are also printed to this process's standard error,
    which Spark keeps in the executor's logs.

    Args:
      argv: the command's arguments.
      environment: environment variables of the command, besides those of this process.
    """
    # The command can import all that this process can import, including files sent by Spark.
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    said: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(os.getpid()), *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **paths, **environment},
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None  # because stderr=PIPE
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                said.append(line.rstrip())
            return Ended(process.wait(), tuple(said))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Lets the kernel kill this process as soon as its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv.pop(1)))
    runpy.run_module("sparsejax", run_name="__main__", alter_sys=True)
