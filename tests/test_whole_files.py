"""What is written appears whole or not at all."""

import contextlib
import errno
import fcntl
import gzip
import lzma
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from sparsejax.mesh.locks import locked
from sparsejax.whole_files import (
    check_new,
    check_writable,
    opened_regular,
    remove_abandoned,
    remove_folder,
    temporary_folder,
    whole_file,
    whole_folder,
    whole_text_file,
    write_together,
)


@pytest.mark.parametrize("kind", [whole_file, whole_text_file])
def test_a_file_is_whole_or_as_it_was(tmp_path, kind):
    path = tmp_path / "d.txt"
    path.write_text("old")
    half, whole = ("half", "new") if kind is whole_text_file else (b"half", b"new")
    with pytest.raises(ZeroDivisionError), kind(path) as file:
        file.write(half)
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["d.txt"] and path.read_text() == "old"
    with kind(path) as file:
        file.write(whole)
        file.flush()
        assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["d.txt"] and path.read_text() == "new"


@pytest.mark.parametrize(
    ("name", "problem"),
    [("a\0b", r"a\\0b: has a NUL"), ("a\ud800", r"a\\ud800: has half a character")],
)
@pytest.mark.parametrize(
    "use",
    [check_new, check_writable, opened_regular, whole_file, whole_folder, locked],
)
def test_a_path_that_no_file_can_have(tmp_path, name, problem, use):
    with pytest.raises(ValueError, match=problem), use(tmp_path / name):
        pass


def test_a_folder_is_no_file_to_read(tmp_path):
    with pytest.raises(IsADirectoryError, match=re.escape(repr(str(tmp_path)))):
        opened_regular(tmp_path)


@pytest.mark.parametrize(
    ("name", "opener"), [("d.txt", open), ("d.csv.gz", gzip.open), ("d.xz", lzma.open)]
)
def test_text_is_compressed_by_its_name(tmp_path, name, opener):
    with whole_text_file(tmp_path / name) as file:
        file.write("ä\n")
    with opener(tmp_path / name, "rb") as file:
        assert file.read() == b"\xc3\xa4\n"


@pytest.mark.parametrize("name", ["d.csv.gz", "d.xz", "d.txt"])
def test_the_same_text_is_the_same_bytes(tmp_path, monkeypatch, name):
    written = []
    for now in (1e9, 2e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        with whole_text_file(tmp_path / name) as file:
            file.write("a\n")
        once = (tmp_path / name).read_bytes()
        write_together([(tmp_path / name, "a\n")])
        written.append((once, (tmp_path / name).read_bytes()))
    assert written[0] == written[1]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    link, path = tmp_path / "link", tmp_path / "folder" / "d"
    link.symlink_to(path)
    with whole_file(link) as file:
        file.write(b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "d.txt"
    with pytest.raises(OSError, match="d.txt") as caught, whole_text_file(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_told_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "missing" / "d.txt"
    with pytest.raises(FileNotFoundError) as caught, whole_file(path):
        raise AssertionError("begun")
    assert caught.value.filename == str(path)


def test_a_new_folder_is_whole_or_not_there(tmp_path):
    out = tmp_path / "parts"
    with pytest.raises(ZeroDivisionError), whole_folder(out) as folder:
        (folder / "train").write_bytes(b"half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with whole_folder(out) as folder:
        (folder / "train").write_bytes(b"whole")
        assert not out.exists()
    assert os.listdir(tmp_path) == ["parts"] and os.listdir(out) == ["train"]
    with (
        pytest.raises(FileExistsError, match="parts: already exists"),
        whole_folder(out),
    ):
        raise AssertionError("begun")
    late = tmp_path / "late"
    with (
        pytest.raises(FileExistsError, match="late: already exists"),
        whole_folder(late),
    ):
        late.mkdir()
    with (
        pytest.raises(ValueError, match="there is no folder"),
        whole_folder(late / "x/y"),
    ):
        raise AssertionError("begun")
    assert sorted(os.listdir(tmp_path)) == ["late", "parts"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train": b"whole", "in/it": b"x"}, None),
        ({"train": b"other", "in/it": b"x"}, "parts: already exists, with other cont"),
        ({"train": b"whole"}, "parts: already exists, with other cont"),
        ({"train": b"whole", "in/it": b"x", "more": b""}, "parts: already exists; na"),
        ({}, "parts: already exists; name another folder"),
    ],
)
def test_a_folder_of_the_same_content_stays(tmp_path, content, message):
    out = tmp_path / "parts"
    (out / "in").mkdir(parents=True)
    for name, text in content.items():
        (out / name).write_bytes(text)
    if not content:
        (out / "in").rmdir()
    before = [*out.rglob("*")]
    outcome = contextlib.nullcontext()
    if message is not None:
        outcome = pytest.raises(FileExistsError, match=message)
    with outcome, whole_folder(out, names=["train", "in"]) as folder:
        (folder / "in").mkdir()
        (folder / "train").write_bytes(b"whole")
        (folder / "in/it").write_bytes(b"x")
    assert [*out.rglob("*")] == before and os.listdir(tmp_path) == ["parts"]


WAYS = {
    "file": whole_file,
    "text": whole_text_file,
    "folder": whole_folder,
    "temporary": lambda path: temporary_folder(path.parent),
}


def make_old(folder):
    for path in [*folder.rglob("*")]:
        os.utime(path, (0, 0))


@pytest.mark.parametrize("way", WAYS)
def test_what_somebody_writes_stays_however_long_he_is_quiet(tmp_path, way):
    with WAYS[way](tmp_path / "d") as mine:
        make_old(tmp_path)
        with whole_file(tmp_path / "other"):
            pass
        make_old(tmp_path)
        remove_abandoned(tmp_path)
        if isinstance(mine, pathlib.Path):
            (mine / "part").write_bytes(b"new")
    left = {"other"} if way == "temporary" else {"other", "d"}
    assert {*os.listdir(tmp_path)} == left


KILLED = """
import os, pathlib, signal, sys
from sparsejax import whole_files
way, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if way == "removal":
    whole_files.shutil.rmtree = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    whole_files.remove_folder(folder / "whole")
kind = getattr(whole_files, way)
with kind(folder if way == "temporary_folder" else folder / "d") as opened:
    if isinstance(opened, pathlib.Path):
        (opened / "inner").mkdir()
        (opened / "inner" / "part").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_killed_is_removed_by_the_next_write(tmp_path):
    (tmp_path / "whole").mkdir()
    for way in ("removal", "whole_file", "whole_folder", "temporary_folder"):
        arguments = [sys.executable, "-c", KILLED, way, str(tmp_path)]
        assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
        left = {path.suffix for path in tmp_path.glob(".sparsejax-*")}
        assert left == {".tmp", ".lock"}, way  # of this one only
        assert len(os.listdir(tmp_path)) == 2
    with whole_file(tmp_path / "e"):
        pass
    assert os.listdir(tmp_path) == ["e"]


def test_an_empty_lock_is_removed_unless_it_is_held(tmp_path):
    """Its writer was killed before there was more than the lock."""
    left, held = (tmp_path / f".sparsejax-{n}.lock" for n in "12")
    left.touch()
    with open(held, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_abandoned(tmp_path)
        assert os.listdir(tmp_path) == [held.name]
    remove_abandoned(tmp_path)
    assert not os.listdir(tmp_path)


def test_what_another_machine_left_is_removed_when_it_was_quiet_for_a_day(tmp_path):
    for name, hours in (("1", 23), ("2", 25), ("3", 25), ("4", 25)):
        folder = tmp_path / f".sparsejax-{name}.tmp"
        folder.mkdir()
        (folder / "part").write_bytes(b"half")
        (tmp_path / f".sparsejax-{name}.lock").write_text("another machine")
        then = time.time() - hours * 3600
        for path in (folder, folder / "part", folder.with_suffix(".lock")):
            os.utime(path, (then, then))
    os.utime(tmp_path / ".sparsejax-3.tmp" / "part")  # a long file is still written
    with open(tmp_path / ".sparsejax-4.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # and this is seen to be held
        remove_abandoned(tmp_path)
    numbers = {name.split("-")[1].split(".")[0] for name in os.listdir(tmp_path)}
    assert numbers == {"1", "3", "4"}


def test_what_earlier_releases_left_is_removed_when_it_was_quiet_for_a_day(tmp_path):
    old, new, other = (
        tmp_path / name for name in (".sparsejax-1.tmp", ".sparsejax-2.tmp", "a.tmp")
    )
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (0, 0))
    with whole_file(tmp_path / "d"):
        pass
    assert sorted(os.listdir(tmp_path)) == [new.name, "a.tmp", "d"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / ".sparsejax-1.tmp").touch()
    make_old(tmp_path)  # nobody can say whose it is
    with whole_file(tmp_path / "d") as file:
        file.write(b"new")
    assert sorted(os.listdir(tmp_path)) == [".sparsejax-1.tmp", "d"]


def test_a_lock_that_is_looked_at_while_it_is_taken(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def looked_at(file, how):
        calls.append(file)
        if len(calls) == 1:  # another process holds it, and then removes it
            raise BlockingIOError
        if len(calls) == 2:
            for path in tmp_path.glob("*.lock"):
                path.unlink()
        return flock(file, how)

    monkeypatch.setattr(fcntl, "flock", looked_at)
    with whole_file(tmp_path / "d"):
        assert len([*tmp_path.glob("*.lock")]) == 1
    assert os.listdir(tmp_path) == ["d"]


def test_checks_come_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    check_new(tmp_path / "new")
    with pytest.raises(ValueError, match="is not a file"):
        check_writable(tmp_path)
    with pytest.raises(ValueError, match="is not a file"):
        check_writable("/dev/null")
    for check in (check_writable, check_new):
        with pytest.raises(ValueError, match="there is no folder .*missing"):
            check(tmp_path / "missing" / "d")
    with pytest.raises(FileExistsError, match="exists; name another folder"):
        check_new(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


def test_it_needs_nothing_but_python():
    code = (
        "import sys, sparsejax.whole_files; "
        "assert not {'jax', 'numpy', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_is_removed_whole(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("x")
    remove_folder(folder)
    assert list(tmp_path.iterdir()) == []
    remove_folder(folder)  # there is nothing to do
    # Killed in the middle, it is gone all the same.
    (folder / "inner").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(folder)
    assert not folder.exists()


def interrupt(path):
    raise KeyboardInterrupt


def test_several_files_are_written_together_or_not_at_all(tmp_path):
    old, new, text = tmp_path / "old", tmp_path / "new", tmp_path / "text.gz"
    old.write_bytes(b"as it was")
    with pytest.raises(OSError, match="none") as raised:
        write_together([(old, b"x"), (new, b"x"), (tmp_path / "no" / "none", "x")])
    assert raised.value.filename == str(tmp_path / "no" / "none")
    assert [*tmp_path.iterdir()] == [old] and old.read_bytes() == b"as it was"
    # A full disk: the error names the file that did not fit.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="new") as raised:
            write_together([(old, b"x"), (new, bytes(20_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(new)
    assert [*tmp_path.iterdir()] == [old] and old.read_bytes() == b"as it was"
    write_together([(old, b"one"), (new, memoryview(b"two")), (text, "drei\xe4\n")])
    assert old.read_bytes() == b"one" and new.read_bytes() == b"two"
    assert gzip.decompress(text.read_bytes()).decode() == "drei\xe4\n"
    assert len([*tmp_path.iterdir()]) == 3
