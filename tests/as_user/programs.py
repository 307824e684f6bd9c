"""Processor seconds that programs take to compile, in proportion to a program that never changes.

python tests/as_user/programs.py FILE COMMAND...   writes those of a command to FILE, as JSON
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import resource
import statistics
import sys
import threading
from collections.abc import Generator

import jax
import jax.numpy as jnp

# A program may take this many times the processor seconds of the reference. On two quiet cores the
# reference takes 0.5 seconds; the largest programs, the steps of DeepFM and of wide-and-deep
# models, take 8, 15 times as many. On a busy machine some programs took half as long again.
MOST = 25

_COMPILING = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that was compiled, or read from a cache.

    Attributes:
      name: name of its function.
      processor: processor seconds of this process meanwhile, by all its threads. Programs that
        are compiled at the same time have equal shares.
      wall: seconds.
    """

    name: str
    processor: float
    wall: float


@contextlib.contextmanager
def recorded() -> Generator[list[Program]]:
    """Lists the programs that are compiled while this context is open."""
    programs: list[Program] = []
    open_ones: dict[int, float] = {}  # processor seconds so far, by thread
    lock, until = threading.Lock(), 0.0

    def count() -> None:
        nonlocal until
        now = _processor_seconds()
        for thread in open_ones:
            open_ones[thread] += (now - until) / len(open_ones)
        until = now

    def begin(event: str, value: float, **_: object) -> None:
        if event == _COMPILING:
            with lock:
                count()
                open_ones[threading.get_ident()] = 0.0

    def end(event: str, duration_secs: float, **more: str | int) -> None:
        if event == _COMPILING:
            with lock:
                count()
                processor = open_ones.pop(threading.get_ident())
            programs.append(Program(str(more["fun_name"]), processor, duration_secs))

    jax.monitoring.register_scalar_listener(begin)
    jax.monitoring.register_event_duration_secs_listener(end)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_scalar_listener(begin)
        jax.monitoring.unregister_event_duration_listener(end)


def reference_seconds() -> float:
    """Processor seconds to compile a program of a fixed size: the median of three."""

    def chain(x, weights):
        for step in range(10):
            x = jnp.tanh(x @ weights) * jnp.sin(x + step)
        return jnp.sum(x)

    seconds = []
    for rows in (16, 32, 48):  # shapes differ, so that each program is compiled
        shapes = jax.ShapeDtypeStruct((rows, 64), "float32"), jnp.zeros((64, 64))
        with recorded() as programs:
            jax.jit(jax.grad(chain)).lower(*shapes).compile()
        seconds += [program.processor for program in programs]
    return statistics.median(seconds)


def too_slow(programs: list[Program], reference: float) -> str:
    """Lists the programs that take too long to compile; empty if there are none."""
    return "\n".join(
        f"{program.name} took {program.processor:.1f} processor seconds to compile, "
        f"{program.processor / reference:.0f} times those of the reference "
        f"({reference:.2f}); at most {MOST} times are allowed"
        for program in programs
        if program.processor > MOST * reference
    )


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    from sparsejax.cli.main import main

    file, *command = sys.argv[1:]
    with recorded() as found:
        status = main(command)
    answer = {
        "reference": reference_seconds(),
        "programs": [dataclasses.asdict(program) for program in found],
    }
    pathlib.Path(file).write_text(json.dumps(answer))
    sys.exit(status)
