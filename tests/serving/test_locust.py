"""Requests from twenty users, sent by Locust, a tool for load tests."""

import csv
import os
import pathlib
import subprocess
import sys

import pytest
import served

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("seconds", [15, 60])
def test_requests_of_twenty_users(port, tmp_path, seconds):
    words = [sys.executable, "-m", "locust", "--headless", "--only-summary"]
    words += ["--locustfile", str(HERE / "locustfile.py"), "--csv", str(tmp_path / "s")]
    words += ["--host", f"http://127.0.0.1:{port}"]
    words += ["--users", "20", "--spawn-rate", "20", "--run-time", f"{seconds}s"]
    shared = pathlib.Path(served.__file__).parent
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": str(shared)},
        capture_output=True,
        text=True,
        check=False,
    )
    # It ends with 1 if a request failed.
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "s_stats.csv").read_text().splitlines()
    rows = {row["Name"]: row for row in csv.DictReader(lines)}
    assert {"a row", "rows", "refused"} < rows.keys()
    assert int(rows["Aggregated"]["Request Count"]) > 100
    assert int(rows["Aggregated"]["Failure Count"]) == 0
