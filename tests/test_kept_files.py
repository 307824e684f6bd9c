"""Files of a cache are read only if no other user can have written them."""

import os
import pathlib

import pytest

from sparsejax import kept_files


@pytest.fixture
def file(tmp_path) -> pathlib.Path:
    path = tmp_path / "kept" / "a.part"
    with kept_files.kept_file(path, 2**20) as file:
        file.write(b"content")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    return path


def read(path: pathlib.Path) -> bytes:
    with kept_files.opened_own(path) as file:
        return file.read()


def refused(file: pathlib.Path, match: str) -> None:
    with pytest.raises(PermissionError, match=match):
        read(file)
    with pytest.raises(PermissionError, match=match):
        kept_files.check_own(file.parent)
    with pytest.raises(PermissionError, match=match):
        kept_files.check_writable(file.parent)


def test_a_folder_of_ones_own(file):
    assert read(file) == b"content"
    file.chmod(0o666)  # nobody else can enter the folder
    assert read(file) == b"content"
    file.parent.chmod(0o755)
    refused(file, "a.part: other users can write there .mode 666")
    file.chmod(0o644)
    assert read(file) == b"content"
    kept_files.check_own(file.parent)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write(file, mode):
    file.parent.chmod(mode)
    refused(file, f"other users can write there .mode {mode:o}.; remove this folder")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_owner(file):
    os.chown(file, 12345, -1)
    refused(file, "a.part: its owner is the user 12345, not 0")
    os.chown(file, 0, -1)
    os.chown(file.parent, 12345, -1)
    refused(file, "its owner is the user 12345, not 0")


def test_links_and_pipes(file, tmp_path):
    (tmp_path / "other").write_bytes(b"theirs")
    file.unlink()
    file.symlink_to(tmp_path / "other")
    refused(file, "a.part is a link")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match="is not a regular file"):
        read(file)
