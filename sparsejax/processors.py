"""The processors that this process may use."""

from __future__ import annotations

import os


def usable() -> list[int]:
    """The numbers of the processors that this process may use, in order.

    Only Linux says which ones they are; elsewhere they are all processors of the machine.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def keep_to(processors: list[int]) -> None:
    """Lets this process use only some processors, where the system can do so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)
