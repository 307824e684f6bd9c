"""What is written appears whole or not at all."""

import errno
import gzip
import lzma
import os
import resource
import shutil
import subprocess
import sys

import pytest

from sparsejax.whole_files import (
    check_new,
    check_writable,
    remove_folder,
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
    ("name", "opener"), [("d.txt", open), ("d.csv.gz", gzip.open), ("d.xz", lzma.open)]
)
def test_text_is_compressed_by_its_name(tmp_path, name, opener):
    with whole_text_file(tmp_path / name) as file:
        file.write("ä\n")
    with opener(tmp_path / name, "rb") as file:
        assert file.read() == b"\xc3\xa4\n"


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


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path):
    old, new, other = (
        tmp_path / name for name in (".sparsejax-1.tmp", ".sparsejax-2.tmp", "a.tmp")
    )
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (0, 0))
    with whole_file(tmp_path / "d"):
        pass
    # What is new may be somebody else's, who is still writing.
    assert sorted(os.listdir(tmp_path)) == [new.name, "a.tmp", "d"]


def test_what_a_killed_folder_left_is_removed_when_it_is_old(tmp_path):
    for name in ("old", "new"):
        folder = tmp_path / f".sparsejax-{name}.tmp"
        folder.mkdir()
        (folder / "train").write_bytes(b"half")
        os.utime(folder, (0, 0))
    os.utime(tmp_path / ".sparsejax-old.tmp" / "train", (0, 0))
    with whole_file(tmp_path / "d"):
        pass
    # A long file is still written into the other.
    assert sorted(os.listdir(tmp_path)) == [".sparsejax-new.tmp", "d"]


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
