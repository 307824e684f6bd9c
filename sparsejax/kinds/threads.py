"""Runs work in background threads."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable


def meanwhile[T](call: Callable[[], T]) -> Callable[[], T]:
    """Starts a call in another thread, and returns a function that waits for its result.

    If the command is interrupted, it does not wait for the call.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised to the waiting thread
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result
