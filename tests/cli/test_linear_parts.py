"""Commands cache linear parts for later commands."""

import dataclasses
import os

import numpy as np
import pytest
from run_folders import checkerboard

from sparsejax.cli.main import main
from sparsejax.nn import closed_form
from sparsejax.nn.config import LinearConfig
from sparsejax.runs import linear_parts

CONFIG = LinearConfig(rank=3)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The path of a folder for linear parts, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return linear_parts.folder()


@pytest.fixture
def computed(monkeypatch):
    """Records the linear parts that are computed."""
    computed, compute = [], closed_form.closed_form

    def noted(*arguments):
        computed.append(arguments)
        return compute(*arguments)

    monkeypatch.setattr(closed_form, "closed_form", noted)
    return computed


def found(config=CONFIG, *, fingerprint="a", keep=True):
    data = checkerboard()[0]
    return linear_parts.linear_part(data, config, fingerprint=fingerprint, keep=keep)


def same(arrays, others) -> bool:
    return all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(arrays, others, strict=True)
    )


def test_it_is_computed_once_for_data_and_settings(computed, folder):
    want = found(keep=False)
    assert not folder.exists() and same(found(), want)
    assert same(found(), want) and len(computed) == 2
    assert folder.stat().st_mode & 0o077 == 0
    found(fingerprint="b")
    found(dataclasses.replace(CONFIG, ridge=7.0))
    assert len(computed) == len(list(folder.iterdir())) + 1 == 4


@pytest.mark.parametrize("damage", ["emptied", "cut", "changed"])
def test_a_damaged_file_is_computed_anew(computed, folder, damage):
    want = found()
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    keeps = {"emptied": 0, "cut": len(content) // 2, "changed": len(content)}
    file.write_bytes(content[: keeps[damage]])
    assert same(found(), want) and len(computed) == 2
    assert same(found(), want) and len(computed) == 2


def test_the_least_recently_used_are_removed(computed, folder, monkeypatch):
    found(fingerprint="a")
    (first,) = folder.iterdir()
    monkeypatch.setattr(linear_parts, "MAX_BYTES", 2 * first.stat().st_size)
    os.utime(first, (1, 1))
    found(fingerprint="b")
    (second,) = set(folder.iterdir()) - {first}
    os.utime(second, (2, 2))
    found(fingerprint="a")
    found(fingerprint="c")
    assert first.exists() and not second.exists()
    monkeypatch.setattr(linear_parts, "MAX_BYTES", 10)
    found(fingerprint="d")
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_made(folder):
    folder.parent.parent.mkdir()
    folder.parent.write_text("")
    with pytest.warns(UserWarning, match="the linear part is not kept: .*linear_parts"):
        found()


def test_a_second_training_does_not_compute_it(small, computed, tmp_path):
    small[small.index("--linear") + 1] = "3"
    argv = list(small)
    assert main([*argv, "--no-compilation-cache"]) == 0
    for count, name in (2, "second"), (2, "third"):
        argv[argv.index("--run") + 1] = str(tmp_path / name)
        assert main(argv) == 0
        assert len(computed) == count
