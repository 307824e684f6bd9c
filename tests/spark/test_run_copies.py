"""Copies of a run folder in an object store. These tests need no Spark."""

import pathlib

import pytest

import sparsejax as sj
from sparsejax.data.files.stores import Place
from sparsejax.spark.run_copies import RunCopy


def write(folder: pathlib.Path, step: int, text: str) -> None:
    path = folder / "checkpoints" / f"{step}" / "arrays" / "0"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def files(folder: pathlib.Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


@pytest.mark.parametrize("in_store", [True, False])
def test_copies_are_those_of_the_folder(bucket, tmp_path, in_store):
    folder = tmp_path / "run"
    folder.mkdir()
    address = "/copies".join(bucket) if in_store else str(tmp_path / "copies")
    place = Place.of(address)
    copy = RunCopy(folder, place)
    for settings, new, old in (("a", 10, None), ("b", 30, None), ("b", 50, 10)):
        (folder / "run.json").write_text(settings)
        write(folder, new, f"at {new}")
        if old is not None:
            (folder / f"checkpoints/{old}/arrays/0").unlink()
            (folder / f"checkpoints/{old}/arrays").rmdir()
            (folder / f"checkpoints/{old}").rmdir()
        copy.save()
    # A checkpoint that was being copied when its task was killed.
    with place.below("checkpoints/40/arrays/0").writing() as file:
        file.write(b"half")
    fetched = RunCopy(tmp_path / "fetched", place)
    fetched.fetch()
    assert files(tmp_path / "fetched") == files(folder)
    fetched.save()
    names = set(place.below("checkpoints").names())
    assert names == {"30", "50", "30.json", "50.json"}

    with place.below("checkpoints/50/arrays/0").writing() as file:
        file.write(b"changed")
    with pytest.raises(sj.DataError, match="checkpoints/50/arrays/0.*: is damaged"):
        RunCopy(tmp_path / "again", place).fetch()


def test_fetch_run_again_after_a_kill(tmp_path):
    """Its folder has appeared, whole, and the process was killed before it ended."""
    place, out = Place.of(str(tmp_path / "store")), tmp_path / "run"
    write(tmp_path / "local", 10, "at 10")
    (tmp_path / "local/run.json").write_text("a")
    RunCopy(tmp_path / "local", place).save()
    for _ in range(2):
        sj.spark.fetch_run(f"file://{tmp_path}/store", out)
        assert files(out) == files(tmp_path / "local")
    (out / "checkpoints/10/arrays/0").write_text("to 10")
    with pytest.raises(FileExistsError, match="run: already exists, with other"):
        sj.spark.fetch_run(f"file://{tmp_path}/store", out)
    (out / "run.json").unlink()
    with pytest.raises(FileExistsError, match="run: already exists; name another"):
        sj.spark.fetch_run(f"file://{tmp_path}/store", out)


def test_fetch_run_needs_a_run(bucket, tmp_path):
    with pytest.raises(sj.DataError, match="has no checkpoint"):
        sj.spark.fetch_run("/nothing".join(bucket), tmp_path / "run")
    with pytest.raises(ValueError, match="is no address"):
        sj.spark.fetch_run(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()
