"""Work in other threads, beside what a command does."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable


def meanwhile[T](call: Callable[[], T]) -> Callable[[], T]:
    """Starts a call in another thread; returns what waits for its result.

    An interrupted command does not wait for the call.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised to who asks for the result
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result
