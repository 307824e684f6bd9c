"""Signals that tell this process to end, and when they may interrupt it."""

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
_DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
_IMPORTER = "<frozen importlib._bootstrap>"


def is_told_to_end() -> bool:
    """Whether `note` was called, or a signal came within `noted` or `deferred`."""
    return _told_to_end


def note(number: int | None = None) -> None:
    """Tells this process to end, from now on; `number` is the signal, if there was one."""
    global _told_to_end, _number
    _told_to_end = True
    if number is not None:
        _number = number


def status() -> int:
    """The exit status of an interrupted command: 143 after a SIGTERM, otherwise 130."""
    return 128 + (signal.SIGINT if _number is None else _number)


@contextlib.contextmanager
def noted(advice: Callable[[], str] | None = None) -> Iterator[None]:
    """While this context is open, a SIGINT or a SIGTERM raises KeyboardInterrupt, and is noted.

    Python ignores exceptions in some places, such as callbacks of its garbage collector. A
    signal that comes there is not lost: it is noted, so `fit` ends. After `ending.watch`
    the process ends soon in any case.

    Args:
      advice: function that makes the end of the line that reports the interrupt, such as how to
        continue.
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

    Within `noted` the same holds for a SIGTERM. The user's own handlers stay. If a signal
    came and the block ends without an exception, KeyboardInterrupt is raised after it.

    Args:
      is_worth: whether there is work to save. A command ends at once where there is none,
        see `ending.keeping`.
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
    if threading.current_thread() is not threading.main_thread():  # it gets all signals
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


# This is the function in C. Its wrapper makes an enumeration of each handler, and a
# step asks for 64. From Python 3.13 on the wrapper does not say which function it
# wraps.
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
    """Calls the handlers of all of these signals, even if one of them raises.

    A signal that is sent once more would count as a second one, see `ending.watch`.
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
    if _is_importing(frame):  # a module in C++ that meets an exception may abort
        ending.leave(number)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False
