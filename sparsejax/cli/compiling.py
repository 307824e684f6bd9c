"""Reports programs that take long to compile."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType

# JAX reports a compilation only at its end. So the stacks of all threads are searched for the
# compiler's function. If a later JAX renames it, no compilation is reported.
_FILE, _FUNCTION = os.path.join("jax", "_src", "compiler.py"), "backend_compile"


@contextlib.contextmanager
def told_if_long(
    say: Callable[[float], object], *, after: float = 5.0
) -> Generator[None]:
    """Calls `say` once for each program that compiles for long, while this context is open.

    Args:
      say: function that is called in another thread with the number of seconds since the
          compilation began.
      after: number of seconds of compilation after which it is called.
    """
    ended = threading.Event()

    def look() -> None:
        began: dict[int, float] = {}  # start times, by the `id` of the function's frame
        told: set[int] = set()
        while not ended.wait(after / 10):
            now, running = time.monotonic(), _compilations()
            began = {frame: began.get(frame, now) for frame in running}
            told &= running
            for frame in running - told:
                if (took := now - began[frame]) >= after:
                    told.add(frame)
                    say(took)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _compilations() -> set[int]:
    """The `id` of each frame of this function, in all threads, that is compiling a program."""
    found = set()
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if code.co_name.startswith(_FUNCTION) and code.co_filename.endswith(_FILE):
                found.add(id(frame))
                break
            frame = frame.f_back
    return found
