"""Commands cache compiled programs for later commands."""

import contextlib
import os
import pathlib
import resource
import subprocess
import sys
import threading
from collections import Counter

import jax
import pytest

from sparsejax.cli import compilation_cache
from sparsejax.cli.main import main
from sparsejax.mesh import kept_programs
from sparsejax.nn import closed_form


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, no_kept_programs) -> pathlib.Path:
    """The path of a folder for compiled programs, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return compilation_cache.folder()


@pytest.fixture
def programs():
    """Counts the programs that were requested, found and written since its last call."""
    counts = Counter()

    def count(event: str, **_: object) -> None:
        counts[event.rpartition("/")[2]] += 1

    def since() -> tuple[int, ...]:
        names = ("compile_requests_use_cache", "cache_hits", "cache_misses")
        found = tuple(counts[name] for name in names)
        counts.clear()
        return found

    jax.monitoring.register_event_listener(count)
    yield since
    jax.monitoring.unregister_event_listener(count)


@pytest.fixture
def similar(board, capsys):
    """Runs a command in which nothing is compiled yet; returns its output."""

    def call(*flags: str) -> tuple[str, str]:
        jax.clear_caches()
        assert main(["similar", board.run, "item4", *flags]) == 0
        return capsys.readouterr()

    return call


def test_programs_are_found_again(similar, programs, folder):
    before = similar("--no-compilation-cache")
    assert programs()[1:] == (0, 0) and not folder.exists()
    assert similar() == before
    asked, found, written = programs()
    assert written > 0 and asked == found + written
    assert folder.stat().st_mode & 0o077 == 0
    assert similar() == before
    assert programs() == (asked, asked, 0)
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("beside", [False, True])
def test_what_training_compiles_is_once_and_for_all(
    small, folder, tmp_path, beside, monkeypatch
):
    if beside:  # as on a GPU, programs are compiled in other threads
        monkeypatch.setattr(kept_programs, "may_compile_beside", lambda: True)
        monkeypatch.setattr(kept_programs, "_without_cache", contextlib.nullcontext)
    path, run = small[1], small[3]
    small[small.index("--linear") + 1] = "3"
    small[small.index("--optimizer") + 1] = "adam"
    ready = compilation_cache.ready_folder()
    counts = []
    for argv in (
        small,
        ["evaluate", run, path, path, "--k", "2", "--keep-seen"],
        ["predict", run, path, "--k", "2", "--out", str(tmp_path / "out.csv")],
        [*small, "--resume", "--epochs", "2"],
    ):
        jax.clear_caches()
        assert main(argv) == 0
        counts.append(len(list(ready.glob("*.program"))))
    # First the order, steps, checksums and flush of training; then the rankings of model and
    # baseline, and their metrics; then rankings without exclusions.
    assert counts == [4, 7, 8, 8]
    kept = Counter(file.name.partition("-")[0] for file in folder.glob("*-cache"))
    # Arrays made by NumPy need no programs.
    assert not {"jit_convert_element_type", "jit_broadcast_in_dim"} & kept.keys()


def test_ready_programs_are_not_traced(small, tmp_path, capsys):
    path, out = small[1], tmp_path / "out.csv"
    small[small.index("--optimizer") + 1] = "adam"
    traced = set()

    def note(event: str, duration_secs: float, **more: str | int) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traced.add(more["fun_name"])

    def results(name: str) -> tuple[str, bytes]:
        jax.clear_caches()
        traced.clear()
        run = small[3] = str(tmp_path / name)
        assert main(small) == 0
        assert main(["evaluate", run, path, path, "--k", "2", "--keep-seen"]) == 0
        assert main(["predict", run, path, "--k", "2", "--out", str(out)]) == 0
        return capsys.readouterr().out, out.read_bytes()

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        found = results("first")
        names = {"run_steps", "settle", "_ordered", "_checksums"}
        names |= {"recommended", "measured"}
        assert names <= traced
        assert results("second") == found
        assert not names & traced
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_training_is_compiled_while_a_linear_part_is_computed(small, monkeypatch):
    small[small.index("--linear") + 1] = "3"
    compute, compiled = closed_form.closed_form, threading.Event()

    def note(event: str, duration_secs: float, **more: str | int) -> None:
        if "backend_compile" in event and more["fun_name"] == "jit(run_steps)":
            compiled.set()

    def last(*arguments):
        assert compiled.wait(timeout=100)
        return compute(*arguments)

    monkeypatch.setattr(closed_form, "closed_form", last)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        assert main(small) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_a_folder_of_the_user_stays(similar, folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    try:
        similar()
        assert not folder.exists()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_damaged_programs(damage, similar, programs, folder):
    expected = similar()
    asked, _, _ = programs()
    for file in folder.glob("*-cache"):
        content = bytearray(file.read_bytes())
        if damage == "changed":
            content[len(content) // 2] ^= 1
        size = {"cut": len(content) // 2, "changed": None, "emptied": 0}[damage]
        file.write_bytes(content[:size])
    out, err = similar()
    assert out == expected.out
    # On a slow machine, a further line says how long a program has been compiling.
    assert err.count("warning:") == 1
    assert f"the compiled programs in {folder} are damaged and were removed" in err
    programs()
    for _ in range(2):
        out, err = similar()
        assert out == expected.out and "warning:" not in err
    assert programs()[1] == asked  # the last command found all programs


def test_a_folder_that_cannot_be_made(similar, tmp_path):
    (tmp_path / "cache").write_text("a file")
    out, err = similar()
    assert out and err.startswith(
        "sparsejax: warning: compiled programs are not kept: "
    )
    assert str(tmp_path / "cache") in err and err.count("\n") == 1


def test_no_room_for_programs(similar, folder):
    expected = similar()
    for file in folder.iterdir():
        file.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        out, err = similar()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out == expected.out and err.count("\n") == 1
    assert f"compiled programs are no longer kept in {folder}: OSError" in err
    similar()  # this command finds a truncated program, and removes it
    assert similar() == expected


def test_two_commands_at_once(board, folder):
    command = [sys.executable, "-m", "sparsejax", "similar", board.run, "item4"]
    both = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
        )
        for _ in range(2)
    ]
    (out, err), other = (process.communicate(timeout=300) for process in both)
    assert out and not err and other == (out, err)
    assert list(folder.glob("*-cache"))


def test_least_recently_used_programs_are_removed(similar, folder, monkeypatch):
    similar()
    sizes = [file.stat().st_size for file in folder.glob("*-cache")]
    name = "jax_compilation_cache_max_size"
    monkeypatch.setitem(compilation_cache.SETTINGS, name, max(sizes))
    for file in folder.iterdir():
        file.unlink()
    similar()
    left = [file.stat().st_size for file in folder.glob("*-cache")]
    assert 0 < sum(left) <= max(sizes) < sum(sizes)


@pytest.mark.parametrize("name", ["programs", "ready_programs"])
def test_folders_that_others_can_write_are_not_used(small, folder, name, capsys):
    shared = folder.with_name(name)
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert main(small) == 0
    told = capsys.readouterr().err
    assert f"not kept: {shared}: other users can write there (mode 777)" in told
    assert not [*shared.iterdir()] and jax.config.jax_compilation_cache_dir is None
