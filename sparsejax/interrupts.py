"""Whether somebody has told this process to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_told_to_end = False


def is_told_to_end() -> bool:
    """Whether `note` was called, or a SIGINT came within `noted`."""
    return _told_to_end


def note() -> None:
    """From now on this process is told to end."""
    global _told_to_end
    _told_to_end = True


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Within it, `fit` ends after a SIGINT, also where its exception was lost.

    As it is where Python happens to call something whose exceptions it ignores, as the
    callbacks of its garbage collector.
    """
    global _told_to_end
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()  # which has signals
    if handler is not signal.default_int_handler or not is_main:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        _told_to_end = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    note()
    signal.default_int_handler(number, frame)
