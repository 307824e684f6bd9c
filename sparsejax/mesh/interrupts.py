"""Signals that tell this process to end, and when they may interrupt it."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_told_to_end = False


def is_told_to_end() -> bool:
    """Whether `note` was called, or a signal came within `noted` or `deferred`."""
    return _told_to_end


def note() -> None:
    """Tells this process to end, from now on."""
    global _told_to_end
    _told_to_end = True


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Within it, a SIGINT or a SIGTERM raises KeyboardInterrupt, and is noted.

    Python ignores exceptions in some places, such as callbacks of its garbage collector. A
    signal that comes there is not lost: it is noted, so `fit` ends.
    """
    global _told_to_end
    ours = {}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        ours[signal.SIGINT] = _interrupt
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        ours[signal.SIGTERM] = _interrupt
    try:
        with _handled(ours):
            yield
    finally:
        _told_to_end = False


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within it, a first SIGINT is only noted, and a second raises KeyboardInterrupt.

    Within `noted` the same holds for a SIGTERM. The user's own handlers stay. If a signal
    came and the block ends without an exception, KeyboardInterrupt is raised after it.
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
        note()
        for each in numbers:
            signal.signal(each, _interrupt)

    told = False
    try:
        with _handled(dict.fromkeys(numbers, only_note)):
            yield
    finally:
        told, _told_to_end = _told_to_end and not before, before
    if told:
        raise KeyboardInterrupt("told to end")


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Within it, signals have these handlers. Only the main thread can set handlers."""
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
    """Within it no signal handler runs. Handlers of signals that came run at its end.

    So no handler can raise, for example KeyboardInterrupt, between two statements.
    """
    if threading.current_thread() is not threading.main_thread():  # it gets all signals
        yield
        return
    handlers: dict[int, Callable[..., Any]] = {}
    came: set[int] = set()
    try:
        for number in _all_signals():
            handler = _getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: came.add(number))
        yield
    finally:
        try:
            _install(handlers)
        finally:
            _raise(came)


@functools.cache
def _all_signals() -> list[int]:
    return [int(number) for number in signal.valid_signals()]


# This is the function in C. Its wrapper makes an enumeration of each handler, and a step asks
# for 64. From Python 3.13 on the wrapper does not tell what it wraps.
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


def _raise(numbers: set[int]) -> None:
    """Sends this process all of these signals, even if a handler raises."""
    try:
        while numbers:
            signal.raise_signal(numbers.pop())
    finally:
        if numbers:
            _raise(numbers)


def _interrupt(number: int, frame: FrameType | None) -> None:
    note()
    raise KeyboardInterrupt
