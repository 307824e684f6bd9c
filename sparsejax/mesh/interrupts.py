"""Signals that ask this process to end, and the times at which they may interrupt it."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from sparsejax import ending

_told_to_end = False
_number: int | None = None
_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_IMPORTER = "<frozen importlib._bootstrap>"


def is_told_to_end() -> bool:
    """Whether `note` was called, or a signal was caught by `noted` or `deferred`."""
    return _told_to_end


def note(number: int | None = None) -> None:
    """Requests the end of this process; `number` is the signal, if there was one."""
    global _told_to_end, _number
    _told_to_end = True
    if number is not None:
        _number = number


def status() -> int:
    """The exit status of an interrupted command: 143 after a SIGTERM, otherwise 130."""
    return 128 + (signal.SIGINT if _number is None else _number)


@contextlib.contextmanager
def noted(advice: Callable[[], str] | None = None) -> Iterator[None]:
    """While this context is open, SIGINT and SIGTERM raise KeyboardInterrupt, and are noted.

    Python ignores exceptions in some places, such as callbacks of its garbage collector. A
    signal is not lost there: it is noted, so `fit` ends. After `ending.watch` the process
    ends soon in any case.

    Args:
      advice: function that returns the end of the line that reports the interrupt, such as a
        command that continues the run.
    """
    global _told_to_end, _number
    _number = None
    ours = {}
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) in (default, ending.starting):
            ours[number] = _interrupt
    try:
        with _handled(ours), ending.working(advice):
            yield
    finally:
        _told_to_end = False


@contextlib.contextmanager
def deferred(is_worth: Callable[[], bool]) -> Iterator[None]:
    """Only notes a first SIGINT, while this context is open; a second raises KeyboardInterrupt.

    Inside `noted`, SIGTERM is treated in this way, too. The user's own handlers stay. If a
    signal came and the block ends without an exception, KeyboardInterrupt is raised after it.

    Args:
      is_worth: function that returns whether there is work to save. If not, a command ends at
        once, see `ending.keeping`.
    """
    global _told_to_end
    before = _told_to_end
    known = (signal.default_int_handler, _interrupt)
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) in known
    ]

    def only_note(number: int, frame: FrameType | None) -> None:
        note(number)
        for each in numbers:
            signal.signal(each, _interrupt)

    told = False
    try:
        with _handled(dict.fromkeys(numbers, only_note)), ending.keeping(is_worth):
            yield
    finally:
        told, _told_to_end = _told_to_end and not before, before
    if told:
        raise KeyboardInterrupt("told to end")


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Sets handlers while this context is open. Only the main thread can set them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, h) for number, h in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays all signal handlers until this context is closed.

    So no handler can raise, for example KeyboardInterrupt, between two statements.
    """
    # Python runs signal handlers in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {}
    came: set[int] = set()
    try:
        for number in _all_signals():
            handler = _getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: came.add(number))
        yield
    finally:
        before = dict(handlers)
        try:
            _install(handlers)
        finally:
            _handle(came, before)


@functools.cache
def _all_signals() -> list[int]:
    return [int(number) for number in signal.valid_signals()]


# `signal.getsignal` in C. Its Python wrapper makes an enumeration of each handler, and a
# step calls it 64 times. From Python 3.13 on the wrapper has no `__wrapped__`.
_getsignal = getattr(signal, "_signal", signal).getsignal


def _install(handlers: dict[int, Callable[..., Any]]) -> None:
    """Installs all handlers, even if one of them runs and raises meanwhile."""
    try:
        while handlers:
            number = next(iter(handlers))
            signal.signal(number, handlers[number])
            del handlers[number]
    finally:
        if handlers:
            _install(handlers)


def _handle(numbers: set[int], handlers: dict[int, Callable[..., Any]]) -> None:
    """Calls the handlers of all these signals, even if one of them raises.

    The handlers are called directly: a signal sent again would count as a second one, see
    `ending.watch`.
    """
    try:
        while numbers:
            number = numbers.pop()
            handlers[number](number, sys._getframe())
    finally:
        if numbers:
            _handle(numbers, handlers)


def _interrupt(number: int, frame: FrameType | None) -> None:
    note(number)
    # A C++ module may abort if an exception is raised while it is imported.
    if _is_importing(frame):
        ending.leave(number)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False
