"""Lines of JSON on stderr. They never contain the content of a request.

A thread writes them. So a service goes on if nobody reads the pipe of its log: then the lines
that have no room in memory are dropped, and counted.
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
# New ids follow a random one. To draw each would ask the kernel.
_NEW = itertools.count(secrets.randbits(64))

_MOMENT = (
    0.05  # seconds in which lines of requests are collected, to be written together
)
_MOST = 2**23  # bytes that wait


class _Writer:
    """The thread that writes lines, and those that wait for it.

    Attributes:
      dropped: number of lines for which there was no room.
    """

    def __init__(self):
        self.dropped = 0
        self._told = 0  # of the dropped ones
        self._lines: collections.deque[bytes] = collections.deque()
        self._size = 0  # bytes of these and of those that are being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_urgent = self._is_stuck = False

    def add(self, line: bytes, *, urgent: bool) -> None:
        """Lets a line be written: soon, or at once."""
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
        """Waits until all is written, if somebody reads it."""
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
    # Not by `sys.stderr`, whose lock would be held as long as nobody reads.
    with contextlib.suppress(OSError, ValueError):  # whoever read the log is gone
        try:
            file = sys.stderr.fileno()
        except (AttributeError, OSError):  # it is no file, as in a notebook
            sys.stderr.write(text.decode())
            return
        while text:
            text = text[os.write(file, text) :]


_writer = _Writer()


def dropped() -> int:
    """The number of lines that were not written, as nobody read those before."""
    return _writer.dropped


def flush(seconds: float = 1.0) -> None:
    """Waits some seconds at most until all lines are written."""
    _writer.flush(seconds)


def log(event: str, **facts: Any) -> None:
    """Writes a line, after those of requests before."""
    _writer.add(_line(event, facts), urgent=True)


def _line(event: str, facts: dict[str, Any]) -> bytes:
    line = {"time": time.time(), "event": event, **facts}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def request_id(given: str) -> str:
    """The id of a request: the one that its client gave, or a new one."""
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
    """Writes that a request was answered or refused, a moment later.

    So the lines of many requests are one call into the system.

    Args:
      protocol: protocol of the request.
      identity: identifier of the request, as `request_id` makes it.
      trace: identifier of the client's trace.
      code: the status of the answer.
      rows: number of its rows.
      seconds: time that the request took.
      model: name of the model that answered, if one did.
      version: version of the model.
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
    """Writes a bug that a request has met."""
    log("error", request_id=identity, error=traceback.format_exception(error))
