"""Versions of a model in a folder, and how a newer one takes the place of the one that serves.

::

    films/3/model.predictor     the version 3 of the model films, as Triton has it

The version of the highest number serves.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
from typing import NamedTuple

from sparsejax.predictors.versions import FILE, numbered
from sparsejax.serving.logs import log
from sparsejax.serving.service import Service, Version


class _Found(NamedTuple):
    """A file as it is now: a file that is replaced is another one."""

    number: int
    path: pathlib.Path
    size: int
    written: int
    inode: int


def found_in(folder: pathlib.Path) -> list[_Found]:
    """The versions in a folder, the newest first."""
    found = []
    for number in numbered(folder):
        path = folder / str(number) / FILE
        try:
            facts = path.stat()
        except OSError:  # it is being written, or being removed
            continue
        times = facts.st_size, facts.st_mtime_ns, facts.st_ino
        found.append(_Found(number, path, *times))
    return found


class Versions:
    """The versions in a folder, of which one serves."""

    def __init__(self, service: Service, folder: str | os.PathLike[str]):
        self._service, self._folder = service, pathlib.Path(folder)
        self._serves: _Found | None = None
        self._bad: set[_Found] = set()
        self._answer: dict[_Found, Version] = {}  # also those that are kept

    def first(self) -> None:
        """Loads the newest version that can be loaded.

        Raises:
          OSError: the folder cannot be read.
          ValueError: there is no such version.
        """
        found = found_in(self._folder)
        for each in found:
            version = self._loaded(each)
            if version is not None:
                self._swap(each, version)
                return
        tried = "; the log says why none could be loaded" if found else ""
        raise ValueError(
            f"{self._folder}: expected a version like {self._folder}/1/{FILE}{tried}"
        )

    async def look(self) -> None:
        """Lets the newest version serve that can be loaded, unless it does already.

        Versions that are kept end with their files.
        """
        found = await asyncio.to_thread(found_in, self._folder)
        self._bad &= {*found}
        for each in found:
            if each == self._serves:
                break
            if each in self._bad:
                continue
            version = self._answer.get(each)  # it is kept
            if version is None:
                version = await asyncio.to_thread(self._loaded, each)
            if version is not None:
                await self._close(self._swap(each, version))
                break
        gone = [its for file, its in self._answer.items() if file not in found]
        await self._close(self._service.drop(gone))

    def _swap(self, found: _Found, version: Version) -> list[Version]:
        """Lets a version serve, and gives those that do not answer any more."""
        self._serves, self._answer[found] = found, version
        return self._service.swap(version)

    async def _close(self, versions: list[Version]) -> None:
        """Ends versions. They answer what they have."""
        self._answer = {
            file: its for file, its in self._answer.items() if its not in versions
        }
        for version in versions:
            await asyncio.to_thread(version.close)

    def _loaded(self, found: _Found) -> Version | None:
        """The version of a file; None if it cannot be loaded, which is told."""
        name, metrics = str(found.number), self._service.metrics
        try:
            version = self._service.made(found.path, name)
        # JAX raises many kinds for a file that is damaged or too large.
        except Exception as error:  # noqa: BLE001 - the older version goes on
            # A fault of the file stays. Memory, say, may be free at the next look.
            if isinstance(error, ValueError):
                self._bad.add(found)
            metrics.reload("failed")
            log("reload", version=name, result="failed", error=str(error)[:500])
            return None
        metrics.reload("loaded")
        log("reload", version=name, result="loaded")
        return version

    async def watch(self, seconds: float) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.look()
            except OSError as error:  # of the folder, which may come back
                log("reload", result="failed", error=str(error))
