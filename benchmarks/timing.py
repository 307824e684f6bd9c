"""Times on a GPU, measured in the same way for JAX and for torch.

The time that tables call kernel time is the sum over the GPU programs of a call, as CUPTI
records them. Call time is wall clock over calls that follow each other. Both measurements
cycle through several inputs, so no call finds exactly its own data in the cache. Times are
in microseconds.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from report import largest

_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class Time:
    """The median call time, and the median and fastest kernel time, in microseconds."""

    kernel: float
    kernel_best: float
    call: float

    def figures(self) -> dict[str, float]:
        """The times for a report."""
        return {name: round(value, 1) for name, value in vars(self).items()}


def time_jax(
    function: Callable, inputs: Sequence[tuple], *, rounds: int = _ROUNDS
) -> Time:
    """Times a jitted function over the inputs, which have equal shapes."""
    import jax
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.measure(function)
    kernel = []
    for _ in range(rounds):
        for arguments in inputs:
            _, milliseconds = measured(*arguments)
            if milliseconds is None:
                raise RuntimeError("the function launched no kernel")
            kernel.append(1e3 * milliseconds)

    def call():
        jax.block_until_ready([function(*arguments) for arguments in inputs])

    wall = _wall(call, rounds) / len(inputs)
    return Time(statistics.median(kernel), min(kernel), wall)


def time_kernels(
    call: Callable[[int], object], repeats: int, *, warm: int = 2
) -> dict[str, float]:
    """Microseconds of each kernel in a call. `call(i)` must wait until its kernels have ended."""
    import jax

    for i in range(warm):
        call(i)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(repeats):
                call(i)
        times = collections.defaultdict(float)
        for name, nanoseconds in _kernels_of_trace(folder):
            times[name] += nanoseconds / 1e3 / repeats
    return times


def time_torch(
    function: Callable, inputs: Sequence[tuple], *, rounds: int = _ROUNDS
) -> Time:
    """Times a function of CUDA tensors over the inputs."""
    import torch  # pyrefly: ignore[missing-import]
    from torch.profiler import (  # pyrefly: ignore[missing-import]
        ProfilerActivity,
        profile,
    )

    def call():
        for arguments in inputs:
            function(*arguments)
        torch.cuda.synchronize()

    call()
    kernel = []
    for _ in range(rounds):
        with profile(activities=[ProfilerActivity.CUDA]) as events:
            call()
        total = sum(event.self_device_time_total for event in events.key_averages())
        kernel.append(total / len(inputs))
    wall = _wall(call, rounds) / len(inputs)
    return Time(statistics.median(kernel), min(kernel), wall)


def measure_jax(
    function: Callable,
    inputs: Sequence[tuple],
    check: Callable,
    *,
    kernels: bool = False,
) -> dict:
    """Times a function and measures its memory, after `check` has accepted its first results.

    Args:
      function: function to compile.
      inputs: tuples of arguments, of equal shapes.
      check: function that gets the results for the first arguments. It returns their error, or
        raises an exception.
      kernels: whether the time of each kernel is reported, too.
    """
    import jax

    jitted = jax.jit(function)
    compiled = jitted.lower(*inputs[0]).compile()
    error = check(compiled(*inputs[0]))
    more = {}
    if kernels:
        call = lambda _: jax.block_until_ready(jitted(*inputs[0]))
        more["kernels"] = largest(time_kernels(call, 1), 40)
    found = time_jax(jitted, inputs).figures()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    memory = {"temporary_bytes": analysis.temp_size_in_bytes}
    return found | memory | {"error": error} | more


def measure_torch(
    function: Callable, inputs: Sequence[tuple], check: Callable, *, kept: int = 0
) -> dict:
    """Does the work of `measure_jax` for torch; `kept` is the bytes of the results, which do not
    count as temporary.
    """
    import torch  # pyrefly: ignore[missing-import]

    error = check(function(*inputs[0]))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = time_torch(function, inputs).figures()
    temporary = torch.cuda.max_memory_allocated() - before - kept
    return found | {"temporary_bytes": temporary, "error": error}


def on_host(array) -> np.ndarray:
    """Copies an array of JAX or torch to the host, as float64."""
    if hasattr(array, "detach"):
        array = array.detach().double().cpu().numpy()
    return np.asarray(array, np.float64)


def relative_error(found, expected: np.ndarray, limit: float, of: str = "") -> float:
    """The relative error of an array; raises ValueError if it exceeds a limit."""
    off = np.linalg.norm(on_host(found) - expected)
    error = float(off / np.linalg.norm(expected))
    if not error < limit:
        raise ValueError(f"{of} relative error {error}".strip())
    return error


def _kernels_of_trace(folder: str) -> Iterator[tuple[str, float]]:
    """Yields the name and nanoseconds of each kernel in a trace of `jax.profiler.trace`."""
    from jax.profiler import ProfileData

    for path in pathlib.Path(folder).rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU:"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        yield event.name, event.duration_ns


def _wall(call: Callable[[], object], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
