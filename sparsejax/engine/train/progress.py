"""The progress of a training, and when checkpoints are saved."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.mesh import processes

# `Estimate`: the time before the first estimate, and the shortest duration that is reported.
_LEAST_SECONDS, _LONG_SECONDS = 10, 1800
# Metrics for which lower values are better.
_LOSSES = frozenset(
    {"log_loss", "normalized_entropy", "squared_error", "quantile_loss"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stops training when a validation metric has not improved for some epochs.

    >>> EarlyStopping(metric="recall@20", patience=3).restore_best
    True

    A line on stderr says when training stopped and which epoch was the best.

    Attributes:
      metric: key of a validation metric, such as "recall@20". Higher is better, except for
          "log_loss", "normalized_entropy", "squared_error" and "quantile_loss". The default is
          "ndcg@k", with the `k` of `fit`, and for clicks "auc". With several labels, "auc/buy" is
          the metric of the label "buy", and the default is the metric of the first label.
      patience: number of epochs without improvement after which training stops.
      restore_best: whether model and optimizer are set to their state after the best epoch, even
          if training was not stopped early. The state comes from the best checkpoint if there is a
          `checkpoint_dir`, else from a copy in host memory that is made after each best epoch so
          far.
    """

    metric: str | None = None
    patience: int = 5
    restore_best: bool = True

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")


def is_loss(metric: str) -> bool:
    """Whether lower values of a metric are better. The name may end with the name of a label."""
    return metric.partition("/")[0] in _LOSSES


@dataclasses.dataclass
class Progress:
    """The progress of a training: the part of a checkpoint besides the arrays.

    Attributes:
      settings: settings that must not change when the training is resumed.
      epoch: number of completed epochs.
      position: number of completed steps in the current epoch.
      step: total number of completed steps.
      loss_sum: sum of the losses of this epoch's examples so far.
      examples: number of this epoch's examples so far.
      best: highest score of an epoch so far: its metric, or its negated loss.
      best_epoch: the epoch with the highest score, counted from 1; 0 before the first.
      waited: number of epochs since the best one.
      stopped: whether early stopping has ended the training.
      history: the history that `fit` returns.
    """

    settings: dict[str, Any]
    epoch: int = 0
    position: int = 0
    step: int = 0
    loss_sum: float = 0.0
    examples: int = 0
    best: float = -math.inf
    best_epoch: int = 0
    waited: int = 0
    stopped: bool = False
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def add(self, losses: np.ndarray, examples: np.ndarray) -> None:
        """Adds completed steps: the loss and the number of examples of each."""
        self.loss_sum += float(np.dot(losses.astype(np.float64), examples))
        self.examples += int(examples.sum())
        self.position += len(losses)
        self.step += len(losses)

    def end_epoch(self, examples_per_second: float) -> dict[str, float]:
        """Makes the history entry of the epoch that has ended. Metrics can be added to it."""
        self.epoch += 1
        entry = {
            "epoch": self.epoch,
            "step": self.step,
            "loss": self.loss_sum / self.examples,
            "examples_per_second": examples_per_second,
        }
        self.history.append(entry)
        self.position, self.loss_sum, self.examples = 0, 0.0, 0
        return entry

    def judge(
        self, entry: Mapping[str, float], stopping: EarlyStopping | None
    ) -> float | None:
        """Decides whether to stop; returns the score of the epoch if it is the best so far,
        else None.
        """
        score = self._sign * entry[self.settings["metric"]]
        if score > self.best:
            self.best, self.best_epoch, self.waited = score, self.epoch, 0
            return self.best
        self.waited += 1
        if stopping is not None:
            self.stopped = self.waited >= stopping.patience
        return None

    @property
    def _sign(self) -> int:
        return -1 if is_loss(self.settings["metric"]) else 1

    def outcome(self, stopping: EarlyStopping, kept: int) -> str:
        """A text on why training ended, and from which epoch the model is."""
        metric, why = self.settings["metric"], ""
        if self.stopped:
            moved = "fallen" if is_loss(metric) else "risen"
            why = f", as {metric} has not {moved} for {stopping.patience} epochs"
        best = "no epoch"
        if self.best_epoch:  # if it is 0, the metric was NaN in all epochs
            best = f"epoch {self.best_epoch} ({metric} {self._sign * self.best:.4f})"
        return (
            f"training ended after epoch {self.epoch}{why}; {best} was the best, the "
            f"model is that of epoch {kept}"
        )


class Estimate:
    """Reports once how long the training will take, if that is half an hour or more.

    Time is measured from the end of the first dispatch, which includes compilation, for at least
    ten seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._said = clock, False
        self._began: tuple[float, int] | None = None

    def after(self, done: int, total: int) -> str | None:
        """The line to print when `done` of `total` examples of all epochs were processed, or
        None.
        """
        now = self._clock()
        if self._began is None:
            self._began = now, done
            return None
        began, before = self._began
        if self._said or now - began < _LEAST_SECONDS:
            return None
        self._said = True
        left = (now - began) / (done - before) * (total - done)
        if left < _LONG_SECONDS:
            return None
        return f"at this speed training takes about {tqdm.format_interval(left)} more"


class Saver:
    """Saves checkpoints of modules, if there is a folder for checkpoints.

    Args:
      checkpoints: checkpoints of the folder; None if none are saved.
      modules: NNX modules.
      seconds: number of seconds after the last save at which the next one is due.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, modules: tuple[Any, ...], seconds: float
    ):
        self.checkpoints, self._modules = checkpoints, modules
        self._seconds, self._saved = seconds, time.monotonic()
        self._saved_step = 0

    def has_unsaved(self, progress: Progress) -> bool:
        """Whether completed steps are in no checkpoint yet, and checkpoints are saved."""
        return self.checkpoints is not None and progress.step > self._saved_step

    def save(self, progress: Progress, score: float | None = None) -> None:
        """Saves modules and progress. `score` is given if the epoch is the best so far."""
        if self.checkpoints is not None:
            record = dataclasses.asdict(progress)
            self.checkpoints.save(progress.step, self._modules, record, score=score)
            self._saved, self._saved_step = time.monotonic(), progress.step

    def is_due(self) -> bool:
        """Whether a checkpoint is due."""
        # All processes must save at one time, so the clock of process 0 decides.
        waits = self.checkpoints is not None and processes.is_first()
        return waits and time.monotonic() - self._saved >= self._seconds

    def resume(self, progress: Progress) -> Progress:
        """Loads the newest undamaged checkpoint into the modules and returns its progress.

        Returns `progress` if there is no checkpoint.

        Raises:
          ValueError: the settings of the checkpoint differ from those in `progress`.
        """
        assert self.checkpoints is not None
        record = self.checkpoints.restore(self._modules)
        self._saved = time.monotonic()
        if record is None:
            return progress
        before = type(progress)(**record)
        for name, value in progress.settings.items():
            if before.settings.setdefault(name, value) != value:
                what = "other data" if name == "data" else f"{name} {value!r}"
                raise ValueError(
                    f"cannot resume with {what}: the training in "
                    f"{self.checkpoints.directory} has {name} {before.settings[name]!r}"
                )
        self.checkpoints.delete_after(before.step)
        self._saved_step = before.step
        return before

    def restore_best(self) -> int | None:
        """Loads the checkpoint of the best epoch into the modules and returns the epoch.

        If it is damaged, another epoch's checkpoint is loaded. Returns None if there is no folder,
        or no checkpoint in it.
        """
        if self.checkpoints is None:
            return None
        record = self.checkpoints.restore(self._modules, best=True)
        return None if record is None else record["epoch"]
