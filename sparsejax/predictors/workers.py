"""Computes parts of a prediction in several processes on this machine, one for each device.

Each request is a line of JSON with one part on a process's standard input; the answer is a line on
its standard output. Its device is chosen before it starts, through an environment variable: JAX
reserves all GPUs that a process can see. The process ends when its input is closed, so it ends
with its parent process, however that ends.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import glob
import itertools
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

import jax

from sparsejax import codec, processors
from sparsejax.predictors.files import Kept
from sparsejax.predictors.parts import Parts

# How often a part is computed at most, if its process dies.
_TRIES = 3
# Settings of JAX that child processes get from this process.
_SHARED = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_platforms",
)
# Errors that a user can correct, by the name of their class. Other errors are bugs.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ArithmeticError, MemoryError, OSError, TypeError, ValueError)
}


class Scorer:
    """A process that computes parts on one device, and keeps the predictor there."""

    def __init__(self, *, gpu: str | None = None, cores: Iterable[int]):
        """Starts the process.

        Args:
          gpu: identifier of the GPU for CUDA_VISIBLE_DEVICES. None lets JAX choose.
          cores: processor cores that it may use, which also bounds its threads.
        """
        environment = dict(os.environ)
        # The child process can import all packages that this process can import.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        # By default JAX would reserve three quarters of the GPU's memory.
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        for name in _SHARED:
            value = getattr(jax.config, name)
            if value is not None:
                environment[name.upper()] = str(value)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        # The cores are restricted before any library counts them.
        start = (
            f"from {processors.__name__} import keep_to; keep_to({sorted(cores)}); "
            f"from {__name__} import serve; serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            # Only this process receives Ctrl-C. It then ends the child process.
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asking, self._answers = self._process.stdin, self._process.stdout

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with contextlib.suppress(OSError):  # its last request was not read
            self._asking.close()

    def fileno(self) -> int:
        """A file descriptor that is readable when an answer has come or the process has died."""
        return self._answers.fileno()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, parts: Parts, part: int) -> None:
        """Sends a request for a part. Call `answer` before the next request."""
        asked = {"arguments": parts.arguments, "identity": parts.identity, "part": part}
        with contextlib.suppress(OSError):  # it has died, which `answer` reports
            print(codec.text(asked), file=self._asking, flush=True)

    def answer(self) -> bool:
        """Waits for the answer; returns whether the part was written, not found complete.

        Raises:
          ChildProcessError: the process died.
          Exception: an error raised by `Parts.write`.
        """
        line = self._answers.readline()
        if not line.endswith("\n"):
            status = self._process.wait()
            how = f"ended with status {status}"
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            raise ChildProcessError(f"the process {self.pid} {how}")
        answer = codec.parse(line)
        if "error" in answer:
            raise _KINDS.get(answer["kind"], RuntimeError)(answer["error"])
        return answer["wrote"]


def write_parts(parts: Parts, *, workers: int | None = None) -> int:
    """Computes the missing parts in processes on this machine; returns the number of parts
    written.

    If a process dies, another one computes its part again.

    Args:
      parts: description of the prediction.
      workers: number of processes, which share the cores. By default there is one for each GPU, or
          one if there is none. GPUs are assigned to them in turn.

    Raises:
      ChildProcessError: processes died three times while computing the same part.
      ValueError: `workers` is not positive.
      Exception: an error raised by `Parts.write`. The other processes are terminated.
    """
    gpus = gpu_addresses()
    if workers is None:
        workers = max(len(gpus), 1)
    if workers < 1:
        raise ValueError(f"workers must be 1 or more, got {workers}")
    waiting = collections.deque(parts.missing())
    workers = min(workers, len(waiting))
    cores = processors.usable()
    begun: collections.Counter[int] = collections.Counter()
    wrote = 0
    with contextlib.ExitStack() as stack:

        def started(seat: int) -> Scorer:
            share = cores[seat::workers] or [cores[seat % len(cores)]]
            gpu = gpus[seat % len(gpus)] if gpus else None
            scorer = Scorer(gpu=gpu, cores=share)
            stack.callback(scorer.close)
            return scorer

        free = [(seat, started(seat)) for seat in range(workers)]
        busy: dict[Scorer, tuple[int, int]] = {}
        while waiting or busy:
            while waiting and free:
                seat, scorer = free.pop()
                part = waiting.popleft()
                begun[part] += 1
                scorer.ask(parts, part)
                busy[scorer] = seat, part
            answering, _, _ = select.select(list(busy), [], [])
            for scorer in answering:
                seat, part = busy.pop(scorer)
                try:
                    wrote += scorer.answer()
                except ChildProcessError as lost:
                    if begun[part] == _TRIES:
                        raise ChildProcessError(
                            f"part {part} was begun {_TRIES} times, but each time the "
                            f"process died: {lost}. SIGKILL mostly means too little "
                            "memory: use fewer workers or more parts"
                        ) from lost
                    waiting.appendleft(part)
                    scorer = started(seat)
                free.append((seat, scorer))
    return wrote


def gpu_addresses() -> list[str]:
    """Identifiers of the GPUs that processes on this machine can use, found without starting
    JAX.
    """
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    # CUDA ignores a negative number and all that follow it.
    found = (address.strip() for address in visible.split(","))
    found = itertools.takewhile(lambda address: not address.startswith("-"), found)
    return [address for address in found if address]


def serve() -> None:
    """Runs the loop of a `Scorer`'s process, until its input is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not be taken for an answer
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        try:
            answer = {"wrote": _write(**codec.parse(asked.get()))}
        except Exception as error:  # noqa: BLE001 - raised in the requesting process
            kinds = [kind.__name__ for kind in type(error).__mro__]
            kind = next((name for name in kinds if name in _KINDS), "")
            message = str(error) if kind else traceback.format_exc()
            answer = {"kind": kind, "error": message}
        print(codec.text(answer), file=answers, flush=True)


def _listen(asked: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)  # no process waits for an answer any more


_kept = Kept()  # keeps the last predictor on the device


def _write(arguments: dict[str, Any], identity: str, part: int) -> bool:
    parts = _parts(codec.text(arguments), identity)
    return parts.write(
        part, lambda: _kept.load(arguments["predictor"], parts.predictor)
    )


@functools.lru_cache(maxsize=1)
def _parts(arguments: str, identity: str) -> Parts:
    found = Parts.of(**codec.parse(arguments))
    if found.identity != identity:
        raise ValueError(
            "the predictor or the data was changed meanwhile; repeat the command"
        )
    return found
