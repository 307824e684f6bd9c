"""Whether somebody has told this process to end, and when it may be told so."""

from __future__ import annotations

import contextlib
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
    """From now on this process is told to end."""
    global _told_to_end
    _told_to_end = True


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Within it, a SIGINT or a SIGTERM raises KeyboardInterrupt, and is noted.

    So `fit` ends also where Python lost the exception, because the signal came while
    it called something whose exceptions it ignores, as a callback of its garbage
    collector.
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

    A SIGTERM, too, within `noted`. Handlers of the user's own stay. If the block ends
    without an exception after a signal came, KeyboardInterrupt is raised behind it.
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
    """Signals have these handlers; only the main thread can set any."""
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
    """Within it no handler of a signal runs; those of signals that came run at its end.

    So no exception of theirs, as KeyboardInterrupt, comes between two statements.
    """
    if threading.current_thread() is not threading.main_thread():  # which has signals
        yield
        return
    handlers: dict[int, Callable[..., Any]] = {}
    came: set[int] = set()
    try:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: came.add(number))
        yield
    finally:
        try:
            _install(handlers)
        finally:
            _raise(came)


def _install(handlers: dict[int, Callable[..., Any]]) -> None:
    """Installs them all, also where one that is installed already raises meanwhile."""
    try:
        while handlers:
            number = next(iter(handlers))
            signal.signal(number, handlers[number])
            del handlers[number]
    finally:
        if handlers:
            _install(handlers)


def _raise(numbers: set[int]) -> None:
    """Sends this process all of these signals, also where a handler raises."""
    try:
        while numbers:
            signal.raise_signal(numbers.pop())
    finally:
        if numbers:
            _raise(numbers)


def _interrupt(number: int, frame: FrameType | None) -> None:
    note()
    raise KeyboardInterrupt
