"""Changes of a model's tables that come while it serves: a folder that is read again and again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from sparsejax import change_folders
from sparsejax.predictors.predictor import Predictor
from sparsejax.serving.logs import log
from sparsejax.serving.metrics import Metrics


class Changing:
    """The changes of a folder that `sparsejax train --follow` writes, for a service.

    A change that is missing, of another model or at a wrong place leaves the tables as
    they are, until the folder has the change that follows.

    Attributes:
      folder: folder of the changes. It may be made later.
    """

    def __init__(self, folder: str | os.PathLike[str], metrics: Metrics):
        self.folder, self._metrics = folder, metrics
        self._told = ""  # the last fault

    def check(self, predictor: Predictor) -> None:
        """Raises ValueError if a predictor can take no changes at all."""
        if predictor.signature.ranks_items:
            raise ValueError(
                f"{self.folder}: changes are for models of clicks, but this predictor is of "
                f"{predictor.signature.kind}: serve it without"
            )

    def take(self, predictor: Predictor) -> None:
        """Gives a predictor the new changes. A fault is logged once, and changes nothing."""
        before = predictor.taken.last
        try:
            if not change_folders.numbers(self.folder):
                return
            taken = predictor.apply_changes(self.folder)
        # JAX raises many kinds where memory is short, which may be free at the next look.
        except Exception as error:  # noqa: BLE001 - the tables are what they were
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
        """Looks again and again, until it is cancelled.

        Args:
          serving: function that returns the predictor that serves, if there is one.
          seconds: between two looks.
        """
        while True:
            await asyncio.sleep(seconds)
            predictor = serving()
            if predictor is not None:
                await asyncio.to_thread(self.take, predictor)
            del predictor  # one that is drained must leave the device
