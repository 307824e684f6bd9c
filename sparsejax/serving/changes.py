"""Changes of a model's tables while it serves: a folder is polled for new changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from sparsejax import change_folders
from sparsejax.predictors.predictor import Predictor
from sparsejax.serving.logs import log
from sparsejax.serving.metrics import Metrics


class Changing:
    """Applies to a predictor the changes that `sparsejax train --follow` writes to a folder.

    If a change is missing, is for another model or is out of order, the tables do not change,
    until the folder has the change that follows theirs.

    Attributes:
      folder: folder of the changes. It may be created later.
    """

    def __init__(self, folder: str | os.PathLike[str], metrics: Metrics):
        self.folder, self._metrics = folder, metrics
        self._told = ""  # the last fault that was logged

    def check(self, predictor: Predictor) -> None:
        """Raises ValueError if a predictor cannot be changed while it serves."""
        if predictor.signature.ranks_items:
            raise ValueError(
                f"{self.folder}: changes are for models of clicks, but this predictor is of "
                f"{predictor.signature.kind}: serve it without"
            )

    def take(self, predictor: Predictor) -> None:
        """Applies new changes to a predictor. A fault is logged once, and changes nothing."""
        before = predictor.taken.last
        try:
            if not change_folders.numbers(self.folder):
                return
            taken = predictor.apply_changes(self.folder)
        # JAX raises many types if memory is short; the next poll may find enough.
        except Exception as error:  # noqa: BLE001 - the tables are unchanged
            reason = str(error)[:500]
            self._metrics.changes("refused")
            if reason != self._told:
                log("changes", result="refused", error=reason)
            self._told = reason
            return
        self._told = ""
        if before is None or taken.checksum != before.checksum:
            self._metrics.changes("taken")
            self._metrics.change(taken.number)
            log("changes", result="taken", number=taken.number, steps=taken.steps)

    async def watch(
        self, serving: Callable[[], Predictor | None], seconds: float = 1.0
    ) -> None:
        """Polls the folder until the task is cancelled.

        Args:
          serving: function that returns the predictor that serves, or None.
          seconds: time between two polls.
        """
        while True:
            await asyncio.sleep(seconds)
            predictor = serving()
            if predictor is not None:
                await asyncio.to_thread(self.take, predictor)
            del predictor  # a reference would keep a drained predictor on the device
