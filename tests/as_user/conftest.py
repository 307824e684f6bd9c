"""The environment of a user: XLA's optimizations, one device, and empty caches.

`make test-as-user` uses this file instead of the conftest.py of the other tests.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

# This must run before JAX is imported. Workers of xdist have separate caches.
for _name in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
    del os.environ[_name]
_cache = tempfile.TemporaryDirectory(prefix="sparsejax-as-user-")
os.environ["XDG_CACHE_HOME"] = _cache.name

import pytest
from as_user import programs
from as_user.programs import Program

from sparsejax.cli.main import main

RECORD = (
    # The name of a test's property: its programs, and the seconds of the reference.
    "programs"
)


@pytest.fixture(scope="session")
def compiled() -> Iterator[tuple[list[Program], float]]:
    """All programs of this process, and the processor seconds of the reference."""
    reference = programs.reference_seconds()
    with programs.recorded() as found:
        yield found, reference


@pytest.fixture(autouse=True)
def _compiles_in_time(compiled, request) -> Iterator[None]:
    """Fails after a test whose programs take too long to compile."""
    found, reference = compiled
    yield
    own = list(found)
    found.clear()
    note(request.node, own, reference)


def note(node: pytest.Item, own: list[Program], reference: float) -> None:
    """Adds a test's programs to the summary, and checks their compilation times."""
    record = {
        "reference": reference,
        "programs": [dataclasses.asdict(program) for program in own],
    }
    node.user_properties.append((RECORD, json.dumps(record)))
    if wrong := programs.too_slow(own, reference):
        pytest.fail(wrong, pytrace=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """The folder in which the commands of a module run."""
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def sparsejax(folder, compiled) -> Callable[..., None]:
    """A function that runs a command in the folder."""

    def call(*words: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert main([word for part in words for word in part.split()]) == 0

    return call


@pytest.fixture
def serve(folder, request) -> Callable[..., None]:
    """A function that starts a service in a separate process and waits until it is ready; the
    service is ended after the test.
    """

    def call(*words: str) -> None:
        file = folder / "served.json"
        recorder = [sys.executable, programs.__file__, str(file), "serve", *words]
        process = subprocess.Popen(
            recorder, stderr=subprocess.PIPE, text=True, cwd=folder
        )
        assert process.stderr is not None
        with process.stderr as lines:
            try:
                said = next(line for line in lines if '"ready"' in line)
                assert json.loads(said)["event"] == "ready"
                process.terminate()
                lines.read()
                assert process.wait(60) == 0
            finally:
                process.kill()
                process.wait()
        answer = json.loads(file.read_text())
        own = [Program(**each) for each in answer["programs"]]
        assert own
        note(request.node, own, answer["reference"])

    return call


def pytest_unconfigure() -> None:
    """Removes the cache."""
    _cache.cleanup()


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints for each test how many programs it compiled, and which took longest."""
    terminalreporter.section("programs, processor seconds to compile, the longest")
    for report in itertools.chain(*terminalreporter.stats.values()):
        if getattr(report, "when", None) != "teardown":
            continue
        for name, text in report.user_properties:
            if name != RECORD:
                continue
            record = json.loads(text)
            own = sorted(record["programs"], key=lambda each: -each["processor"])
            total = sum(each["processor"] for each in own)
            longest = ", ".join(
                f"{each['name']} {each['processor']:.1f}" for each in own[:3]
            )
            test = report.nodeid.rpartition("/")[2]
            terminalreporter.write_line(
                f"{test}: {len(own)}, {total:.1f} s (reference "
                f"{record['reference']:.2f}), {longest}"
            )
