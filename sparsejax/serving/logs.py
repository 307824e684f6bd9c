"""Lines of JSON on stderr. They never have what a user asked for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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


# Lines of requests of this thread, which are written together after so many seconds.
_waiting, _MOMENT = threading.local(), 0.05


def log(event: str, **facts: Any) -> None:
    """Writes a line, after those of requests of this thread."""
    write_waiting()
    _write(_line(event, facts))


def _line(event: str, facts: dict[str, Any]) -> bytes:
    line = {"time": time.time(), "event": event, **facts}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # whoever reads the log is gone
        sys.stderr.write(text.decode())
        sys.stderr.flush()


def request_id(given: str) -> str:
    """The id of a request: the one that its client gave, or a new one."""
    return given if _ID.fullmatch(given) else f"{next(_NEW) % 2**64:016x}"


def request(
    protocol: str, identity: str, trace: str, *, code: int, rows: int, seconds: float
) -> None:
    """Writes that a request was answered or refused, a moment later.

    So the lines of many requests are one call into the system.
    """
    facts: dict[str, Any] = {"protocol": protocol}
    facts["milliseconds"] = round(1e3 * seconds, 3)
    facts |= {"request_id": identity, "code": code, "rows": rows}
    if _TRACE.fullmatch(trace):
        facts["traceparent"] = trace
    lines = _lines()
    if not lines:
        asyncio.get_running_loop().call_later(_MOMENT, write_waiting)
    lines.append(_line("request", facts))


def _lines() -> list[bytes]:
    return _waiting.__dict__.setdefault("lines", [])


def write_waiting() -> None:
    """Writes the lines of requests of this thread that are not written yet."""
    lines = _lines()
    if lines:
        text = b"".join(lines)
        lines.clear()
        _write(text)


def error(identity: str, error: Exception) -> None:
    """Writes a bug that a request has met."""
    log("error", request_id=identity, error=traceback.format_exception(error))
