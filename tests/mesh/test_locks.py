"""Only one process at a time works in a folder."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys

import pytest

from sparsejax.mesh.locks import locked

HOLD = """
import sys
from sparsejax.mesh.locks import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(folder) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    process = holding(tmp_path / "run")
    for _ in range(2):
        with (
            pytest.raises(BlockingIOError) as refused,
            locked(tmp_path / "run"),
        ):
            raise AssertionError("not alone")
        assert re.fullmatch(
            rf".*run: is in use by process {process.pid} on \S+ since 20[-0-9]+ [0-9:]+ "
            "UTC; wait for its end, or name another folder",
            str(refused.value),
        )
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with locked(tmp_path / "run"):
        assert f"process {os.getpid()} on" in (tmp_path / "run" / ".lock").read_text()


def test_also_within_one_process(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(BlockingIOError, match=f"process {os.getpid()}"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path):
    with locked(tmp_path / "a"):
        pass
    assert not (tmp_path / "a").exists()
    with locked(tmp_path / "a"):
        (tmp_path / "a" / "file").touch()
    assert (tmp_path / "a" / "file").exists()


def test_a_folder_that_is_removed_while_the_lock_is_taken(tmp_path, monkeypatch):
    """By a holder that failed: a lock on its file would lock nothing."""
    flock, files = fcntl.flock, []

    def removed_first(file, how):
        files.append(file)
        if len(files) == 1:
            (tmp_path / "a" / ".lock").unlink()
            (tmp_path / "a").rmdir()
        return flock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with locked(tmp_path / "a"):
        assert len(files) == 2
        with pytest.raises(BlockingIOError), locked(tmp_path / "a"):
            pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with (
        pytest.warns(UserWarning, match="without locks .No locks available"),
        locked(tmp_path),
    ):
        pass


def test_an_object_store_has_no_locks():
    with locked("gs://bucket/run"):
        pass
