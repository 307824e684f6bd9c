"""Copies a run folder to an object store, because a training needs a local folder.

::

    run.json, vocabulary.parquet    the files of the folder
    checkpoints/300/...             the files of a checkpoint
    checkpoints/300.json            their sizes and checksums; it is written last

A checkpoint without its JSON file is incomplete, and is not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import threading
import traceback
import zlib
from collections.abc import Generator

from sparsejax import codec
from sparsejax.data.files.opening import DataError, Path, is_address
from sparsejax.data.files.stores import Place, crc32
from sparsejax.whole_files import whole_folder

_CHECKPOINTS = "checkpoints"
_SECONDS = 2  # interval between checks for a new checkpoint


def fetch_run(run: Path, folder: str | os.PathLike[str]) -> None:
    """Copies a run from a store, where `train` has kept it, to a local folder.

    The folder can be passed to `sparsejax.load_model`, `sparsejax export` and other commands.

    ::

        sj.spark.fetch_run("s3://bucket/run", "run")

    Args:
      run: address of the run.
      folder: path of the folder to make.

    Raises:
      DataError: there is no run, or it is damaged.
      FileExistsError: the folder exists and has other content than this run.
    """
    if not is_address(run):
        raise ValueError(f"{run} is no address of a store; use the folder as it is")
    place = Place.of(run)
    with whole_folder(folder, names=place.names()) as new:
        copy = RunCopy(new, place)
        copy.fetch()
        if not (new / _CHECKPOINTS).exists():
            raise DataError.at(run, "has no checkpoint of a run")


@dataclasses.dataclass
class RunCopy:
    """A local run folder and its copy in a store.

    Attributes:
      folder: folder on this machine.
      place: folder in the store.
    """

    folder: pathlib.Path
    place: Place
    _saved: dict[str, int] = dataclasses.field(default_factory=dict)

    def fetch(self) -> None:
        """Copies all files and complete checkpoints from the store to the local folder.

        Raises:
          DataError: a checkpoint is damaged, or the store cannot be read.
        """
        self.folder.mkdir(exist_ok=True)
        checkpoints = self._checkpoints
        for step in self._steps_there():
            stated = checkpoints.below(_list(step)).read()
            if stated is None:
                continue  # it was removed since, because there are newer checkpoints
            target = self.folder / _CHECKPOINTS / step
            for name, (size, checksum) in _stated(checkpoints, step, stated).items():
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                file = checkpoints.below(f"{step}/{name}")
                file.fetch(path)
                if path.stat().st_size != size or crc32(os.fspath(path)) != checksum:
                    raise DataError.at(
                        file.path, "is damaged: its checksum is another one"
                    )
        for name in self.place.names():
            file = self.place.below(name)
            if file.size() is not None:
                file.fetch(self.folder / name)

    def save(self) -> None:
        """Copies new files and checkpoints to the store, and removes old checkpoints there.

        Raises:
          OSError: the store refuses a file.
          DataError: the store cannot be read.
        """
        for path in self.folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                content = path.read_bytes()
                checksum = zlib.crc32(content)
                if self._saved.get(path.name) != checksum:
                    with self.place.below(path.name).writing() as file:
                        file.write(content)
                    self._saved[path.name] = checksum
        here = self._steps_here()
        for step in sorted(here - self._steps_there(), key=int):
            # The training may delete an old checkpoint while it is copied.
            with contextlib.suppress(FileNotFoundError):
                self._save_checkpoint(step)
        if here:
            self._remove_but(here)

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """While this context is open, a thread copies new checkpoints. At its end all are copied.

        Raises:
          OSError: the last copies cannot be written.
        """
        end = threading.Event()

        def keep() -> None:
            while not end.wait(_SECONDS):
                try:
                    self.save()
                except (OSError, ValueError):  # the store failed; it is tried again
                    traceback.print_exc()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
        self.save()

    @property
    def _checkpoints(self) -> Place:
        return self.place.below(_CHECKPOINTS)

    def _steps_here(self) -> set[str]:
        folder = self.folder / _CHECKPOINTS
        if not folder.is_dir():
            return set()
        # Orbax renames a checkpoint to a decimal number when it is complete.
        return {path.name for path in folder.iterdir() if path.name.isdecimal()}

    def _steps_there(self) -> set[str]:
        names = self._checkpoints.names()
        steps = {name.removesuffix(".json") for name in names if name.endswith(".json")}
        return {step for step in steps if step.isdecimal()}

    def _remove_but(self, steps: set[str]) -> None:
        """Removes all checkpoints except those of `steps` from the store, even incomplete ones."""
        for name in sorted(self._checkpoints.names(), reverse=True):  # JSON files first
            step = name.removesuffix(".json")
            if step.isdecimal() and step not in steps:
                place = self._checkpoints.below(name)
                if name == step:
                    place.filesystem.delete_dir(place.inner)
                else:
                    place.filesystem.delete_file(place.inner)

    def _save_checkpoint(self, step: str) -> None:
        folder, to = self.folder / _CHECKPOINTS / step, self._checkpoints
        stated = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                stated[name] = path.stat().st_size, crc32(os.fspath(path))
                with path.open("rb") as file, to.below(f"{step}/{name}").writing() as o:
                    shutil.copyfileobj(file, o)
        # If no file was deleted by the training meanwhile, the copy is complete.
        if folder.is_dir() and all((folder / name).is_file() for name in stated):
            with to.below(_list(step)).writing() as file:
                file.write(codec.text(stated).encode())


def _stated(checkpoints: Place, step: str, text: bytes) -> dict[str, tuple[int, int]]:
    """Sizes and checksums of a checkpoint's files, by path. Rejects paths outside its folder."""
    place = checkpoints.below(_list(step))
    try:
        found = codec.value(dict[str, tuple[int, int]], codec.parse(text), "the list")
        for name in found:
            path = pathlib.PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(f"{name!r} is no file of the checkpoint")
    except ValueError as error:
        raise DataError.at(place.path, f"is damaged: {error}") from error
    return found


def _list(step: str) -> str:
    return f"{step}.json"
