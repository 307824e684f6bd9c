"""Versions of a model in a folder, and the replacement of the version that serves.

::

    films/3/model.predictor     version 3 of the model "films", in Triton's layout

The version of the highest number serves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from sparsejax.predictors.files import check_predictor
from sparsejax.predictors.versions import FILE, numbered
from sparsejax.serving.logs import log
from sparsejax.serving.protocol import RefusedError
from sparsejax.serving.service import Service, Version

# A broken version is tried again after 1, 2, 4, ... polls. At most this many polls skip it in a
# row.
_MOST_PASSED = 63


class _Found(NamedTuple):
    """A version's file, with its size, time and inode: a replaced file compares as unequal."""

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
        except OSError:  # the file is being written or removed
            continue
        times = facts.st_size, facts.st_mtime_ns, facts.st_ino
        found.append(_Found(number, path, *times))
    return found


@dataclasses.dataclass
class _Trouble:
    """A version's failures to load.

    Attributes:
      reason: text of the last error.
      times: number of failed tries.
      passed: number of polls to skip before the next try.
    """

    reason: str
    times: int = 0
    passed: float = 0


class Versions:
    """The versions in a folder. One of them serves, unless all were unloaded."""

    def __init__(self, service: Service, folder: str | os.PathLike[str]):
        self._service, self._folder = service, pathlib.Path(folder)
        self._serves: _Found | None = None
        self._bad: dict[_Found, _Trouble] = {}
        self._lock = asyncio.Lock()  # held while the version that serves is changed
        self._begun = self._unloaded = False
        self._is_gone = False  # whether the file of the version that serves was removed
        self._answer: dict[_Found, Version] = {}  # also older ones that are kept

    def first(self) -> None:
        """Loads the newest version that can be loaded.

        Raises:
          OSError: the folder cannot be read.
          ValueError: no version can be loaded; or see `Service.prepare`.
        """
        self._service.prepare()
        found = found_in(self._folder)
        for each in found:
            version = self._loaded(each)
            if version is not None:
                self._swap(each, version)
                self._begun = True
                return
        tried = "; the log says why none could be loaded" if found else ""
        raise ValueError(
            f"{self._folder}: expected a version like {self._folder}/1/{FILE}{tried}"
        )

    async def look(self) -> None:
        """Makes the newest version serve that can be loaded, unless it serves already.

        Older versions that are kept are removed when their files are.
        """
        async with self._lock:
            if not self._unloaded:
                await self._look()

    async def load(self) -> None:
        """Makes the newest version serve; also tries versions that failed before.

        Raises:
          RefusedError: the newest version cannot be loaded, or there is no version.
        """
        self._check_begun()
        async with self._lock:
            self._bad.clear()
            found = await self._look()
            self._unloaded = self._serves is None
            newest = found[0] if found else None
            if newest is None or newest != self._serves:
                reason = f"expected a version like {self._folder}/1/{FILE}"
                if newest is not None:
                    reason = f"version {newest.number}: {self._bad[newest].reason}"
                raise RefusedError(400, reason)

    async def unload(self) -> None:
        """Unloads all versions until `load` is called. They answer their waiting requests first.

        Raises:
          RefusedError: the first version is still being loaded.
        """
        self._check_begun()
        async with self._lock:
            self._unloaded, self._serves = True, None
            await self._close(self._service.unload())

    def _check_begun(self) -> None:
        if not self._begun:
            raise RefusedError(503, "the first version is being loaded", retry_after=1)

    def index(self) -> list[dict[str, Any]]:
        """The versions in the folder, in the form of the protocol's repository extension.

        Raises:
          OSError: the folder cannot be read.
        """
        stated = []
        for each in found_in(self._folder):
            trouble = self._bad.get(each)  # once: a poll may remove it
            stated.append(
                {
                    "name": self._service.name,
                    "version": str(each.number),
                    "state": "READY" if each in self._answer else "UNAVAILABLE",
                    "reason": "" if trouble is None else trouble.reason,
                }
            )
        return stated

    async def _look(self) -> list[_Found]:
        """Loads the newest version that works. Returns all versions in the folder."""
        found = await asyncio.to_thread(found_in, self._folder)
        self._bad = {file: its for file, its in self._bad.items() if file in found}
        for each in found:
            if each == self._serves:
                break
            trouble = self._bad.get(each)
            if trouble is not None and trouble.passed > 0:
                trouble.passed -= 1
                continue
            version = self._answer.get(each)  # an older version that is kept
            if version is None:
                drains = self._service.settings.swap == "drain"
                if drains and self._serves is not None:
                    if not await asyncio.to_thread(self._is_whole, each):
                        continue
                    await self._drain()
                # If this fails, the loop reloads the version that served before.
                version = await asyncio.to_thread(self._loaded, each)
                if drains:
                    gc.freeze()  # as for the first version, see `server`
            if version is not None:
                await self._close(self._swap(each, version))
                break
        gone = [its for file, its in self._answer.items() if file not in found]
        dropped = self._service.drop(gone)
        for version in dropped:
            log("removed", version=version.name)
        await self._close(dropped)
        self._tell_removed(found)
        return found

    def _tell_removed(self, found: list[_Found]) -> None:
        """Logs, once, that the serving version's file was removed."""
        is_gone = self._serves is not None and self._serves not in found
        if self._serves is not None and is_gone and not self._is_gone:
            log("removed", version=str(self._serves.number), serves=True)
        self._is_gone = is_gone

    def _swap(self, found: _Found, version: Version) -> list[Version]:
        """Lets a version serve. Returns the versions that no longer answer."""
        before = None if self._serves is None else str(self._serves.number)
        if before is not None:  # its number may be higher, if its file was removed
            log("swap", version=version.name, before=before)
        self._serves, self._answer[found] = found, version
        return self._service.swap(version)

    async def _close(self, versions: list[Version]) -> None:
        """Closes versions, after their waiting requests were answered."""
        self._answer = {
            file: its for file, its in self._answer.items() if its not in versions
        }
        for version in versions:
            await asyncio.to_thread(version.close)

    async def _drain(self) -> None:
        """Unloads the serving version after its waiting requests, to free its memory."""
        name = None if self._serves is None else str(self._serves.number)
        log("drain", version=name)
        self._serves = None
        await self._close(self._service.unload())
        gc.unfreeze()
        gc.collect()

    def _loaded(self, found: _Found) -> Version | None:
        """Loads the version in a file. If that fails, logs a line and returns None."""
        name = str(found.number)
        version = self._tried(found, lambda: self._service.made(found.path, name))
        if version is not None:
            self._bad.pop(found, None)
            self._service.metrics.reload("loaded")
            log("reload", version=name, result="loaded")
        return version

    def _is_whole(self, found: _Found) -> bool:
        """Whether a predictor file passes the checks that need no device."""

        def checked() -> bool:
            check_predictor(found.path)
            return True

        return self._tried(found, checked) is True

    def _tried[Made](self, found: _Found, make: Callable[[], Made]) -> Made | None:
        """Calls `make` for a file. If that fails, logs a line and returns None."""
        name = str(found.number)
        try:
            return make()
        # JAX raises many types of errors for files that are damaged or too large.
        except Exception as error:  # noqa: BLE001 - the older version stays
            trouble = self._bad.setdefault(found, _Trouble(""))
            trouble.reason, trouble.times = str(error)[:500], trouble.times + 1
            # A fault of the file is permanent; full memory, for example, may be gone at the next
            # poll.
            lasts = isinstance(error, ValueError)
            passed = min(2 ** (trouble.times - 1) - 1, _MOST_PASSED)
            trouble.passed = math.inf if lasts else passed
            self._service.metrics.reload("failed")
            log("reload", version=name, result="failed", error=trouble.reason)
            return None

    async def watch(self, seconds: float) -> None:
        """Polls the folder until the task is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.look()
            except OSError as error:  # the folder may become readable again
                log("reload", result="failed", error=str(error))
