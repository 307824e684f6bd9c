"""Items that are never recommended, such as sold-out ones, listed in a file that is polled."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import weakref

import numpy as np

from sparsejax.data.files.names import Names, as_names
from sparsejax.data.files.opening import DataError, lines_of
from sparsejax.engine.rank.denied import denied_items
from sparsejax.predictors.predictor import Predictor
from sparsejax.predictors.runtime import Programs
from sparsejax.serving.logs import log

_SECONDS = 1.0  # between polls


class Excluded:
    """The items in a file, with a name on each line, which no version recommends.

    Names that a model does not know are counted in a log line for each version. The
    file may be empty. It is read again when it changes.

    Attributes:
      path: path of the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the file.

        Raises:
          DataError: the file is no text.
          OSError: the file cannot be read.
        """
        self.path = path
        self._lock = threading.Lock()  # protects names and programs
        self._told: weakref.WeakKeyDictionary[Programs, Names] = (
            weakref.WeakKeyDictionary()
        )
        self._is_bad = False
        self._facts, self._names = self._read()

    def denying(self, predictor: Predictor) -> Predictor:
        """Replaces the predictor's programs by programs that can exclude items; see `tell`.

        Raises:
          ValueError: the predictor has no such programs.
        """
        if not predictor.signature.ranks_items:
            raise ValueError(
                f"{self.path}: a model of clicks recommends no items; leave the file out"
            )
        if predictor.signature.layer is None:
            raise ValueError(
                f"{self.path}: to leave items out, a service needs vectors of items, which "
                "this predictor does not have apart; export it again with this release"
            )
        programs = predictor.model.programs.denying(predictor.signature)
        model = dataclasses.replace(predictor.model, programs=programs)
        return dataclasses.replace(predictor, model=model)

    def tell(self, programs: Programs, names: Names) -> None:
        """Makes programs exclude the items, also when the file changes later.

        Args:
          programs: programs that `denying` made, or programs for similar items of that model.
          names: names of the programs' items.

        Raises:
          ValueError: all items are excluded.
        """
        with self._lock:
            programs.deny(self._denied(names))
            self._told[programs] = names

    def look(self) -> None:
        """Reads the file if it has changed. If that fails, its last content still applies."""
        try:
            with self._lock:
                if self._state() == self._facts and not self._is_bad:
                    return
                before = self._names
                facts, self._names = self._read()
                try:
                    told = list(self._told.items())
                    ids = [self._denied(names) for _, names in told]
                except ValueError:
                    self._names = before
                    raise
                for (programs, _), denied in zip(told, ids, strict=True):
                    programs.deny(denied)
                self._facts, self._is_bad = facts, False
        except (DataError, OSError, ValueError) as error:
            if not self._is_bad:  # logged once, not at each poll
                log("exclude", result="failed", error=str(error)[:500])
            self._is_bad = True
            return
        log("exclude", result="loaded", names=len(self._names))

    async def watch(self) -> None:
        """Polls the file until the task is cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            await asyncio.to_thread(self.look)

    def _state(self) -> tuple[int, ...]:
        """The file's size, modification time and inode. They differ after a change of the file."""
        facts = os.stat(self.path)
        return facts.st_size, facts.st_mtime_ns, facts.st_ino

    def _read(self) -> tuple[tuple[int, ...], np.ndarray]:
        """The state of the file before it is read, and the names that it contains."""
        state = self._state()
        lines = lines_of(self.path) if state[0] else []
        return state, as_names(dict.fromkeys(lines))

    def _denied(self, names: Names) -> np.ndarray:
        """Ids, in `names`, of the excluded items."""
        return denied_items(
            len(names), names, exclude_items=self._names, tell=_log_unknown
        )


def _log_unknown(line: str) -> None:
    log("exclude", result="unknown", message=line)
