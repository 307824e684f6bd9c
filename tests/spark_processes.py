"""Finds and kills the processes of a Spark cluster on this machine."""

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator

# A part of the command line by which each kind of process is recognized.
_WORDS = {
    "executor": "CoarseGrainedExecutorBackend",
    "worker": "pyspark.daemon",
    "child": "sparsejax.spark.child",
}


def processes_below(ancestor: int, kind: str | None = None) -> list[int]:
    """The processes that a process has started, directly or indirectly.

    Args:
      ancestor: the number of the process.
      kind: only executors, Python workers ("worker") or trainings ("child").
    """
    parents, commands = {}, {}
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_text()
            except OSError:  # the process has ended
                continue
            if state[0] != "Z":
                parents[int(folder.name)] = int(state[1])
                commands[int(folder.name)] = command

    def is_below(process: int | None) -> bool:
        while process is not None and process != ancestor:
            process = parents.get(process)
        return process is not None

    found = [p for p in parents if p != ancestor and is_below(p)]
    if kind is not None:
        found = [p for p in found if _WORDS[kind] in commands[p]]
    if kind == "worker":  # the parent of the workers has the same command line
        found = [p for p in found if _WORDS[kind] in commands.get(parents[p], "")]
    return sorted(found)


@contextlib.contextmanager
def killing(kind: str, when: Callable[[], bool]) -> Iterator[None]:
    """Kills a process of Spark as soon as a condition is true, while this context is open."""
    over, killed = threading.Event(), []

    def kill() -> None:
        while not over.wait(0.02):
            if when() and (found := processes_below(os.getpid(), kind)):
                # The process has just ended.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found[-1], signal.SIGKILL)
                    killed.append(found[-1])
                    return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert killed


def is_running(process: int) -> bool:
    """Whether a process has not ended yet."""
    with contextlib.suppress(OSError):
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
        # A process that has ended is a zombie until its parent collects it.
        return state.split()[0] != "Z"
    return False
