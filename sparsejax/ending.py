"""Ends a command's process at a signal, even while Python cannot run a signal handler.

A Python handler does not run until the main thread leaves a C function such as XLA's compiler. But
Python's handler in C writes the signal's number to a pipe at once. So a thread reads this pipe,
and ends the process if the main thread does not.

Only the command line calls `watch`. In any other process this module has no effect.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

_SIGNALS = signal.SIGINT, signal.SIGTERM
# Seconds for which the thread waits for the main thread to end by itself, and to remove temporary
# files.
_PATIENCE = 1.5
# Seconds for the last work of the process: removing temporary files, and giving advice.
_LAST_WORK = 0.7
_POLL = 0.1

_watched = False
_last = threading.Lock()  # the thread that holds this lock ends the process
# The thread that holds this lock may write that the process was interrupted.
_line = threading.Lock()
_said = False
_working = False
_answered = False
_kept: Callable[[], bool] | None = None
_advice: Callable[[], str] | None = None
_undo: dict[int, Callable[[], object]] = {}


def watch() -> None:
    """From now on a SIGINT or a SIGTERM ends this process within three seconds.

    Before `working` is entered, the process ends at once. While `working` is open, the main thread
    has a part of these seconds to end without help. While `keeping` is open, it has unlimited time.
    A second signal ends the process at once. The exit status is 128 plus the signal's number.
    Signals that the process ignores, as in the background of a shell, stay ignored.
    """
    global _watched
    default = signal.SIG_DFL, signal.default_int_handler
    for number in _SIGNALS:
        if signal.getsignal(number) in default:
            signal.signal(number, starting)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read,), daemon=True).start()
    _watched = True


def starting(number: int, frame: object) -> None:
    """The signal handler before the work begins. It does nothing: another thread ends the process."""


@contextlib.contextmanager
def working(advice: Callable[[], str] | None = None) -> Iterator[None]:
    """While this context is open, a signal leaves the main thread time to end.

    Args:
      advice: function that returns text, which is appended to the message about the
        interruption.
    """
    global _working, _advice
    before, _working, _advice = (_working, _advice), True, advice
    try:
        yield
    finally:
        _working, _advice = before


@contextlib.contextmanager
def keeping(is_worth: Callable[[], bool]) -> Iterator[None]:
    """While this context is open, the first signal does not end the process.

    Args:
      is_worth: function that returns whether work would be lost. If none would be, the process
        ends as it does outside of this context. It is called in another thread.
    """
    global _kept
    before, _kept = _kept, is_worth
    try:
        yield
    finally:
        _kept = before


def answered() -> None:
    """Records that the command has obeyed the first signal and now ends as usual."""
    global _answered
    _answered = True


@contextlib.contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Calls a function if a signal ends the process within the block.

    It is called in another thread, while the main thread may be anywhere in the block. It is
    not called if the block ends without a signal, normally or by an exception.
    """
    key = id(undo)
    _undo[key] = undo
    try:
        yield
    finally:
        del _undo[key]


def say_once(say: Callable[[], object]) -> None:
    """Calls a function that reports an interrupt, if none has reported it before.

    Does not return if another thread is ending the process.
    """
    global _said
    wait_if_leaving()
    with _line:
        if not (_watched and _said):
            _said = True
            say()


def wait_if_leaving() -> None:
    """Blocks until the end of the process if another thread is ending it, else returns at once.

    That thread prints the reason.
    """
    while _last.locked():
        time.sleep(_POLL)


def leave(number: int) -> None:
    """Ends the process by a signal's number, with one line on standard error.

    Returns without an effect if `watch` was not called.
    """
    if not _watched:
        return
    if not _last.acquire(blocking=False):
        wait_if_leaving()  # another thread came first, and is writing the line
    after = ""

    def last_work() -> None:
        nonlocal after
        for undo in [*reversed(_undo.values())]:
            with contextlib.suppress(Exception):
                undo()
        if _advice is not None:
            after = _advice()

    if _working:
        work = threading.Thread(target=last_work, daemon=True)
        work.start()
        work.join(_LAST_WORK)
    # The main thread may be writing the line, so this waits for the lock.
    if _line.acquire(timeout=_LAST_WORK) and not _said:
        _say(f"interrupted{after}")
    os._exit(128 + number)


def _say(line: str) -> None:
    # The main thread may hold the lock of `sys.stderr`.
    with contextlib.suppress(OSError):
        os.write(2, f"sparsejax: {line}\n".encode())


def _watch(signals: int) -> None:
    """Waits for signals, and ends the process."""
    while (first := _next(signals)) is None:
        pass
    kept, left = 0.0, _PATIENCE if _working else 0.0
    while left > 0:
        began = time.monotonic()
        if (second := _next(signals, _POLL)) is not None:
            leave(second)
        took = time.monotonic() - began
        if _answered:
            continue
        if _kept is None or not _kept():
            left -= took
        else:
            if kept < _PATIENCE <= kept + took:
                _say("told to end: saves first; a second signal ends it at once")
            kept += took
    leave(first)


def _next(signals: int, seconds: float | None = None) -> int | None:
    """The next signal that ends a process; None if none arrives for some seconds."""
    while select.select([signals], [], [], seconds)[0]:
        number = os.read(signals, 1)[0]
        if number in _SIGNALS:
            return number
    return None
