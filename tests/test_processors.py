"""The processors of this process, where the system says which ones they are and elsewhere."""

import os

from sparsejax import processors


def test_a_system_that_tells_and_one_that_does_not(monkeypatch):
    if hasattr(os, "sched_getaffinity"):
        assert processors.usable() == sorted(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert processors.usable() == list(range(os.cpu_count() or 1))
    processors.keep_to([0])
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors.usable() == [0]
