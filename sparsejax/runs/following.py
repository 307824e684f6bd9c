"""Trains a run on the files of a folder as they appear, and exports the changes of its tables."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sparsejax.data.files.opening import DataError, is_address
from sparsejax.data.files.parquet import files_below
from sparsejax.data.files.stores import Place
from sparsejax.embeddings.changes import export_changes
from sparsejax.embeddings.exports import Export
from sparsejax.engine.train import loop
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.engine.train.following import Feed, How, follow
from sparsejax.engine.train.job import Job
from sparsejax.kinds.reading import is_file, name_of
from sparsejax.mesh.promotion import promoting
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.training import Fit, Training
from sparsejax.runs.folders import Settings

# Seconds between two listings of a local folder, and of a store, which charges for each request.
_LOOK_SECONDS, _LOOK_SECONDS_OF_STORE = 0.5, 5.0
_EXPORT_SECONDS = 60.0
_PLAIN = (
    "its files are written anew, so that rows would be trained on twice: follow a folder of "
    "plain files, for example of the changes that it gets"
)
# Options that a stream cannot have: it has no end, hence no epochs and no held-out share.
_WITHOUT_END = (
    *("validation", "patience", "num_epochs", "warmup_epochs"),
    *("chunk_rows", "fused"),
)


def check(training: Training, directory: pathlib.Path) -> None:
    """Raises an error if arguments for following contradict each other.

    Args:
      training: settings of the training.
      directory: the folder of the run.
    """
    if not training.follow:
        return
    if getattr(training.config, "dynamic", None) is None:
        raise ValueError(
            "follow=True needs dynamic=..., the rows of the tables for ids that come later"
        )
    for name in _WITHOUT_END:
        if getattr(training, name):
            raise ValueError(
                f"{name}=... is of no use with follow=True, which trains on each file once: "
                "leave it out"
            )
    if not is_file(training.data):
        raise TypeError(
            f"follow=True needs a folder in which files appear, got {name_of(training.data)}"
        )
    path = os.fspath(training.data)
    if path.startswith("file:"):
        path = Place.of(path).inner
    if not is_address(path) and os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(
            f"{path}: follow=True needs a folder in which files appear, but this is a file"
        )
    names_in(path)  # raises an error for a kind of store that cannot be followed
    if training.decay == "cosine":
        raise ValueError(
            "decay=cosine is of no use with follow=True, which has no last epoch: leave it out"
        )
    if jax.process_count() > 1:
        raise NotImplementedError("follow=True works in one process")
    if not is_address(path):
        for place in (directory, training.changes):
            if place is not None and _has_below(path, place):
                raise ValueError(
                    f"{os.fspath(place)} is written while all files below {path} are trained "
                    "on: give a folder elsewhere"
                )


def _has_below(folder: str, place: str | os.PathLike[str]) -> bool:
    """Whether `names_in(folder)` would list files at `place`."""
    below = os.path.relpath(os.path.realpath(place), os.path.realpath(folder))
    # The relative path of a place outside the folder begins with "..", and so with a dot.
    return below == "." or not any(part[0] in "_." for part in below.split(os.sep))


@promoting()
def run(
    model: Any,
    optimizer: Optimizer,
    training: Training,
    settings: Settings,
    known: Any,
    checkpoints: Checkpoints,
    log: Callable[[int, Mapping[str, float]], None] | None,
) -> None:
    """Trains until a signal arrives; see `sparsejax.engine.train.following.follow`."""
    kind = settings.kind
    folder = os.fspath(training.data)

    def names() -> list[str] | None:
        try:
            return names_in(folder)
        except DataError as error:  # a store may answer at the next try
            training.say(f"{error}; looking again")
            return None

    def read(name: str) -> Job | None:
        data = kind.read_followed(path_in(folder, name), known, training)
        return None if data is None else kind.job(Fit(model, optimizer, data))

    changes = None
    if training.changes is not None:
        changed = pathlib.Path(training.changes)
        changes = _Changes(model, optimizer, changed, training.say)
    every = training.export_seconds
    seconds = _LOOK_SECONDS_OF_STORE if is_address(folder) else _LOOK_SECONDS
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.on_auto_axes(model, optimizer))
        stack.enter_context(loop.alone(checkpoints))
        if changes is not None:
            stack.callback(changes.settle)
        follow(
            model,
            optimizer,
            Feed(names=names, read=read, seconds=seconds),
            training.as_type(
                How,
                batch_size=settings.batch_size,
                export_seconds=_EXPORT_SECONDS if every is None else every,
                log=log,
            ),
            checkpoints,
            changes,
        )
        if changes is not None:
            changes.end()


class _Changes:
    """Exports the changes of a model; at most one export runs at a time."""

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        folder: pathlib.Path,
        say: Callable[[str], None],
    ):
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._model, self._optimizer, self._folder = model, optimizer, folder
        self._say, self._last, self._failed = say, None, False

    _last: Export | None

    def __call__(self) -> None:
        """Waits for the running export, then starts the next one."""
        self.settle()
        self._failed = False
        self._last = export_changes(self._model, self._folder, self._optimizer)

    def has_failed(self) -> bool:
        """Whether the last export has failed. An error is reported only once."""
        if self._last is not None and self._last.done():
            self.settle()
        return self._failed

    def settle(self) -> None:
        """Waits for the last export, and reports its error, such as a full disk.

        The next export includes the changes that were not written.
        """
        last, self._last = self._last, None
        try:
            if last is not None:
                last.result()
        except OSError as error:
            self._say(f"{self._folder}: {error}; the next changes have what is lacking")
            self._failed = True

    def end(self) -> None:
        """Waits for the last export, and repeats it if it failed."""
        self.settle()
        if self._failed:
            self()
            self.settle()


def names_in(folder: str) -> list[str] | None:
    """The names of the files inside a folder, sorted; None if the folder does not exist.

    Files and folders whose names begin with `_` or `.` are ignored.

    Raises:
      DataError: the folder cannot be read.
    """
    if not is_address(folder) and not os.path.isdir(folder):
        return None
    place = Place.of(folder)
    try:
        files = files_below(folder, plain=_PLAIN)
    except DataError:
        if is_address(folder) and place.names() == []:
            return None  # in a store, a folder exists only if it contains a file
        raise
    names = [os.path.relpath(file.inner, place.inner) for file in files]
    return sorted(name for name in names if name != ".")


def path_in(folder: str, name: str) -> str:
    """The path or URL of a file inside a folder."""
    if not is_address(folder):
        return os.path.join(folder, name)
    address, mark, options = folder.partition("?")
    return f"{address.rstrip('/')}/{name}{mark}{options}"
