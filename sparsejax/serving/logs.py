"""Lines of JSON on stderr. They never have what a user asked for."""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import sys
import time
import traceback
from typing import Any

import orjson

_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
# New ids follow a random one. To draw each would ask the kernel.
_NEW = itertools.count(secrets.randbits(64))


def log(event: str, **facts: Any) -> None:
    """Writes a line."""
    line = {"time": time.time(), "event": event, **facts}
    text = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE).decode()
    with contextlib.suppress(OSError):  # whoever reads the log is gone
        sys.stderr.write(text)
        sys.stderr.flush()


def request_id(given: str) -> str:
    """The id of a request: the one that its client gave, or a new one."""
    return given if _ID.fullmatch(given) else f"{next(_NEW) % 2**64:016x}"


def request(
    protocol: str, identity: str, trace: str, *, code: int, rows: int, seconds: float
) -> None:
    """Writes that a request was answered or refused."""
    facts: dict[str, Any] = {"request_id": identity, "code": code, "rows": rows}
    if _TRACE.fullmatch(trace):
        facts["traceparent"] = trace
    log("request", protocol=protocol, milliseconds=round(1e3 * seconds, 3), **facts)


def error(identity: str, error: Exception) -> None:
    """Writes a bug that a request has met."""
    log("error", request_id=identity, error=traceback.format_exception(error))
