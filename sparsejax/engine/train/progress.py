"""How far a training has come, and when that is saved."""

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

# `Estimate`: how long is looked, and from when on training takes long.
_LEAST_SECONDS, _LONG_SECONDS = 10, 1800
# Metrics of which a lower value is better.
_LOSSES = frozenset(
    {"log_loss", "normalized_entropy", "squared_error", "quantile_loss"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when a validation metric has not become better for some epochs.

    >>> EarlyStopping(metric="recall@20", patience=3).restore_best
    True

    A line on stderr says when training stopped and which epoch was the best.

    Attributes:
      metric: a key of the validation metrics, such as "recall@20". Higher is better, except
        for "log_loss", "normalized_entropy", "squared_error" and "quantile_loss". By default "ndcg@k", with the `k` of `fit`;
        for clicks "auc". Of several labels "auc/buy" is that of the label "buy", and the
        default is that of the first.
      patience: epochs without a new best before training stops.
      restore_best: end with model and optimizer as they were after the best epoch, also
        if training was not stopped. They come from its checkpoint if there is a
        `checkpoint_dir`, else from a copy in the host's memory. The copy is made after
        each epoch that is the best so far.
    """

    metric: str | None = None
    patience: int = 5
    restore_best: bool = True

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")


def is_loss(metric: str) -> bool:
    """Whether less is better of a metric, which may have the name of a label behind it."""
    return metric.partition("/")[0] in _LOSSES


@dataclasses.dataclass
class Progress:
    """How far a training has come: the part of a checkpoint beside the arrays.

    Attributes:
      settings: settings that must not change when the training is resumed.
      epoch: epochs done.
      position: steps done in the epoch that follows these.
      step: steps done in all.
      loss_sum: sum of the losses of this epoch's examples so far.
      examples: number of this epoch's examples so far.
      best: the highest score of an epoch: its metric, or minus a loss.
      best_epoch: the epoch with the highest score, counted from 1; 0 before the first.
      waited: epochs since the best one.
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
        """Counts steps: the loss of each, and how many examples it had."""
        self.loss_sum += float(np.dot(losses.astype(np.float64), examples))
        self.examples += int(examples.sum())
        self.position += len(losses)
        self.step += len(losses)

    def end_epoch(self, examples_per_second: float) -> dict[str, float]:
        """The history entry of the epoch that has ended, to which metrics can be added."""
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
        """The score of an epoch if it is the best so far; decides whether to stop."""
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
        """Why training ended, and which epoch the model is of."""
        metric, why = self.settings["metric"], ""
        if self.stopped:
            moved = "fallen" if is_loss(metric) else "risen"
            why = f", as {metric} has not {moved} for {stopping.patience} epochs"
        best = "no epoch"
        if self.best_epoch:  # else the metric was always NaN
            best = f"epoch {self.best_epoch} ({metric} {self._sign * self.best:.4f})"
        return (
            f"training ended after epoch {self.epoch}{why}; {best} was the best, the "
            f"model is that of epoch {kept}"
        )


class Estimate:
    """Says once how long a training will take, if that is half an hour or more.

    The first dispatch also waits for the compiler, so time counts from its end. Nothing is
    said before ten seconds of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._said = clock, False
        self._began: tuple[float, int] | None = None

    def after(self, done: int, total: int) -> str | None:
        """The line to print when so many examples, of all epochs, are done, or None."""
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
    """Saves checkpoints of modules, if there is a folder for them.

    Args:
      checkpoints: checkpoints of the folder; None if nothing is saved.
      modules: NNX modules.
      seconds: seconds since the last save after which it is time to save.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, modules: tuple[Any, ...], seconds: float
    ):
        self.checkpoints, self._modules = checkpoints, modules
        self._seconds, self._saved = seconds, time.monotonic()
        self._saved_step = 0

    def has_unsaved(self, progress: Progress) -> bool:
        """Whether steps have ended that no checkpoint has, and one will have them."""
        return self.checkpoints is not None and progress.step > self._saved_step

    def save(self, progress: Progress, score: float | None = None) -> None:
        """Saves modules and progress; `score` is the epoch's if it is the best so far."""
        if self.checkpoints is not None:
            record = dataclasses.asdict(progress)
            self.checkpoints.save(progress.step, self._modules, record, score=score)
            self._saved, self._saved_step = time.monotonic(), progress.step

    def is_due(self) -> bool:
        """Whether it is time to save."""
        # The clock of one process decides, because all have to save together.
        waits = self.checkpoints is not None and processes.is_first()
        return waits and time.monotonic() - self._saved >= self._seconds

    def resume(self, progress: Progress) -> Progress:
        """Loads the newest sound checkpoint into the modules and returns its progress.

        Returns `progress` itself if there is no checkpoint.

        Raises:
          ValueError: the checkpoint has other settings than `progress`.
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
        """Loads the best epoch's checkpoint into the modules and returns its epoch.

        If it is damaged, that is the checkpoint of another epoch. Returns None if there
        is no folder, or no checkpoint in it.
        """
        if self.checkpoints is None:
            return None
        record = self.checkpoints.restore(self._modules, best=True)
        return None if record is None else record["epoch"]
