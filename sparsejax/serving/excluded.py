"""Items that nobody is recommended, such as those sold out: a file that is read again and again."""

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

_SECONDS = 1.0  # between looks


class Excluded:
    """The items of a file, a name on each line, which no version recommends.

    Names that a model does not know are counted in a line of the log, for each version. The
    file may be empty. It is read again when it has changed.

    Attributes:
      path: path of the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the file.

        Raises:
          DataError: it holds no text.
          OSError: it cannot be read.
        """
        self.path = path
        self._lock = threading.Lock()  # of which names count, and of whom they are told
        self._told: weakref.WeakKeyDictionary[Programs, Names] = (
            weakref.WeakKeyDictionary()
        )
        self._is_bad = False
        self._facts, self._names = self._read()

    def denying(self, predictor: Predictor) -> Predictor:
        """The predictor with programs that can exclude items; see `tell`.

        Raises:
          ValueError: it has none such.
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
        """Lets programs leave the items out, from now on as the file changes.

        Args:
          programs: programs that `denying` made, or similar ones of them.
          names: names of the programs' items.

        Raises:
          ValueError: no item is left.
        """
        with self._lock:
            programs.deny(self._denied(names))
            self._told[programs] = names

    def look(self) -> None:
        """Reads the file if it has changed. If it cannot be read, its last content counts."""
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
            if not self._is_bad:  # once, not in each look
                log("exclude", result="failed", error=str(error)[:500])
            self._is_bad = True
            return
        log("exclude", result="loaded", names=len(self._names))

    async def watch(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            await asyncio.to_thread(self.look)

    def _state(self) -> tuple[int, ...]:
        """Size, time of change and inode of the file, which differ when it has changed."""
        facts = os.stat(self.path)
        return facts.st_size, facts.st_mtime_ns, facts.st_ino

    def _read(self) -> tuple[tuple[int, ...], np.ndarray]:
        """The state before the file was read, and the names in it."""
        state = self._state()
        lines = lines_of(self.path) if state[0] else []
        return state, as_names(dict.fromkeys(lines))

    def _denied(self, names: Names) -> np.ndarray:
        """The ids of the items."""
        return denied_items(
            len(names), names, exclude_items=self._names, tell=_log_unknown
        )


def _log_unknown(line: str) -> None:
    log("exclude", result="unknown", message=line)
