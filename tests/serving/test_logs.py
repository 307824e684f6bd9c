"""The log never blocks a service, neither if nobody reads the log, nor if its reader has ended."""

import json
import os
import sys

from sparsejax.serving import logs


def request(number: int) -> None:
    logs.request("http", f"n-{number}", "", code=200, rows=1, seconds=0.1)


def test_nobody_reads_the_log(monkeypatch):
    logs.flush()
    before = logs.dropped()
    reading, writing = os.pipe()
    with os.fdopen(reading) as read, os.fdopen(writing, "w") as write:
        monkeypatch.setattr(sys, "stderr", write)
        count = 100_000  # some 15 MB, far above what a pipe and the queue hold
        for number in range(count):
            request(number)
        lost = logs.dropped() - before
        assert 0 < lost < count
        logs.flush(0.1)  # waits no longer for who does not read
        found = [json.loads(next(read)) for _ in range(count - lost)]
        order = [int(each["request_id"].removeprefix("n-")) for each in found]
        assert order[:10_000] == [*range(10_000)] and order == sorted(order)
        logs.log("after")
        last = [json.loads(next(read)) for _ in range(2)]
        assert {each["event"] for each in last} == {"after", "log"}
        assert sum(each.get("dropped", 0) for each in last) == lost
        logs.flush()


def test_the_reader_of_the_log_has_left(monkeypatch, capfd):
    logs.flush()
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patch, os.fdopen(writing, "w") as write:
        patch.setattr(sys, "stderr", write)
        request(1)
        logs.log("more")
        logs.flush()
    request(2)
    logs.flush()
    assert '"n-2"' in capfd.readouterr().err
