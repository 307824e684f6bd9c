"""JSON lines on stderr. They never contain the content of a request.

A thread writes them. So a service continues even if nobody reads the pipe of its log: then
lines that do not fit in memory are dropped and counted.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import re
import secrets
import sys
import threading
import time
import traceback
from typing import Any

import orjson

_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
# New ids count up from a random number, because each random number would need a system call.
_NEW = itertools.count(secrets.randbits(64))

# Log lines of requests are collected for this many seconds, and then written together.
_MOMENT = 0.05
_MOST = 2**23  # most bytes of lines that wait


class _Writer:
    """Writes log lines in a thread of its own.

    Attributes:
      dropped: number of lines that were dropped because too many bytes were waiting.
    """

    def __init__(self):
        self.dropped = 0
        self._told = 0  # number of dropped lines that was logged
        self._lines: collections.deque[bytes] = collections.deque()
        self._size = 0  # bytes of waiting lines and of those that are being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_urgent = self._is_stuck = False

    def add(self, line: bytes, *, urgent: bool) -> None:
        """Queues a line. It is written soon, or immediately if it is urgent."""
        with self._changed:
            if self._size + len(line) > _MOST:
                self.dropped += 1
                return
            is_first = not self._size
            self._size += len(line)
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="log", daemon=True
                )
                self._thread.start()
            if urgent and not self._is_urgent:
                self._is_urgent = is_first = True
            if is_first:
                self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Waits until all lines are written, but at most `seconds`."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            if not self._is_stuck:
                is_done = self._changed.wait_for(lambda: not self._size, seconds)
                self._is_stuck = not is_done

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                if not self._is_urgent:
                    self._changed.wait_for(lambda: self._is_urgent, _MOMENT)
                self._is_urgent = False
                dropped, self._told = self.dropped - self._told, self.dropped
                lines = [*self._lines]
                self._lines.clear()
            if dropped:
                lines.append(_line("log", {"dropped": dropped}))
            _write(b"".join(lines))
            with self._changed:
                self._size = sum(map(len, self._lines))
                self._is_stuck = False
                self._changed.notify_all()


def _write(text: bytes) -> None:
    # `sys.stderr` is not used: its lock would be held while the pipe is full.
    with contextlib.suppress(OSError, ValueError):  # the reader of the log is gone
        try:
            file = sys.stderr.fileno()
        except (AttributeError, OSError):  # `sys.stderr` is no file, as in a notebook
            sys.stderr.write(text.decode())
            return
        while text:
            text = text[os.write(file, text) :]


_writer = _Writer()


def dropped() -> int:
    """The number of lines that were dropped because nobody read the log."""
    return _writer.dropped


def flush(seconds: float = 1.0) -> None:
    """Waits for at most `seconds` until all lines are written."""
    _writer.flush(seconds)


def log(event: str, **facts: Any) -> None:
    """Writes a line at once, after the waiting lines of requests."""
    _writer.add(_line(event, facts), urgent=True)


def _line(event: str, facts: dict[str, Any]) -> bytes:
    line = {"time": time.time(), "event": event, **facts}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def request_id(given: str) -> str:
    """The id of a request: the id that its client gave, otherwise a new id."""
    return given if _ID.fullmatch(given) else f"{next(_NEW) % 2**64:016x}"


def request(
    protocol: str,
    identity: str,
    trace: str,
    *,
    code: int,
    rows: int,
    seconds: float,
    model: str | None = None,
    version: str | None = None,
) -> None:
    """Logs that a request was answered or refused, with a short delay.

    So the lines of many requests are written in one system call.

    Args:
      protocol: protocol of the request.
      identity: identifier of the request, as `request_id` makes it.
      trace: identifier of the client's trace.
      code: status of the answer.
      rows: number of rows of the request.
      seconds: time that the request took.
      model: name of the model that answered, or None.
      version: version of the model, or None.
    """
    facts: dict[str, Any] = {"protocol": protocol}
    facts["milliseconds"] = round(1e3 * seconds, 3)
    facts |= {"request_id": identity, "code": code, "rows": rows}
    if version is not None:
        facts |= {"model": model, "version": version}
    if _TRACE.fullmatch(trace):
        facts["traceparent"] = trace
    _writer.add(_line("request", facts), urgent=False)


def error(identity: str, error: Exception) -> None:
    """Logs a bug that occurred in a request."""
    log("error", request_id=identity, error=traceback.format_exception(error))
