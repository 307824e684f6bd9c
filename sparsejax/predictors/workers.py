"""Parts of a prediction on several processes of this machine, one for each device.

A process is asked for one part at a time on its standard input, and answers on its standard
output, each by a line of JSON. Its device is chosen before it starts, by an address: JAX
takes all GPUs that a process can see, and keeps them. It ends when its input does, so it
does not outlive the process that asks, however that ends.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import glob
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

# How often a part is begun, if the processes that make it die.
_TRIES = 3
# Settings of JAX that the processes share with this one.
_SHARED = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_platforms",
)
# Errors that the user can do something about, by their names. Others are bugs.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ArithmeticError, MemoryError, OSError, TypeError, ValueError)
}


class Scorer:
    """A process that makes parts on one device, and keeps the predictor there."""

    def __init__(self, *, gpu: str | None = None, cores: Iterable[int]):
        """Starts the process.

        Args:
          gpu: the GPU's address, as CUDA_VISIBLE_DEVICES has it. None leaves the choice to
            JAX.
          cores: the processor's cores that it may use, which bounds its threads, too.
        """
        environment = dict(os.environ)
        # It finds the packages that this process finds.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        # JAX would take three quarters of the GPU's memory.
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        for name in _SHARED:
            value = getattr(jax.config, name)
            if value is not None:
                environment[name.upper()] = str(value)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        # The cores are chosen before libraries count them.
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
            # Ctrl-C is for this process, which ends the other one.
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asking, self._answers = self._process.stdin, self._process.stdout

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with contextlib.suppress(OSError):  # what it was asked last was not read
            self._asking.close()

    def fileno(self) -> int:
        """A file that is ready when there is an answer, or the process has died."""
        return self._answers.fileno()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(self, parts: Parts, part: int) -> None:
        """Asks for a part. `answer` must be called before another one is asked for."""
        asked = {"arguments": parts.arguments, "identity": parts.identity, "part": part}
        with contextlib.suppress(OSError):  # it has died, as `answer` will say
            print(codec.text(asked), file=self._asking, flush=True)

    def answer(self) -> bool:
        """Whether the part was written; if not, it was there. Waits for it.

        Raises:
          ChildProcessError: the process has died.
          Exception: an error that `Parts.write` raised.
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
    """Writes the parts that are missing, on processes of this machine; how many it wrote.

    If a process dies, its part is begun again by another one.

    Args:
      parts: the prediction.
      workers: number of processes, which share the cores. By default there is one for each
        GPU, or one if there is none. GPUs are dealt out to them.

    Raises:
      ChildProcessError: processes have died three times with the same part.
      ValueError: `workers` is not positive.
      Exception: an error that `Parts.write` raised. The other processes are ended.
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
    """The GPUs that processes of this machine can use. JAX is not started."""
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    # Numbers end the list where they are negative.
    found = [address.strip() for address in visible.split(",")]
    return [address for address in found if address and not address.startswith("-")]


def serve() -> None:
    """Does the work of a `Scorer`'s process, until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        try:
            answer = {"wrote": _write(**codec.parse(asked.get()))}
        except Exception as error:  # noqa: BLE001 - the asking process raises it
            kinds = [kind.__name__ for kind in type(error).__mro__]
            kind = next((name for name in kinds if name in _KINDS), "")
            message = str(error) if kind else traceback.format_exc()
            answer = {"kind": kind, "error": message}
        print(codec.text(answer), file=answers, flush=True)


def _listen(asked: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)  # nobody waits for an answer


_kept = Kept()  # the last predictor stays on the device


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
