"""The command `sparsejax tune`: trains with many settings, and keeps the best.

::

    trials.log        Optuna's log of all trials, from which a tuning continues

Only the validation part of the data decides. No other held-out data is read.
"""

from __future__ import annotations

import functools
import math
import pathlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sparsejax import codec
from sparsejax.callers import needing
from sparsejax.cli import flags, shell
from sparsejax.cli import train as commands_of_train
from sparsejax.data.files.opening import shown
from sparsejax.engine.train.progress import is_loss
from sparsejax.kinds.content import set_content
from sparsejax.kinds.kind import Kind, Range, kind_for, kind_of
from sparsejax.kinds.source import Source
from sparsejax.mesh import processes
from sparsejax.metrics.comparison import Measured
from sparsejax.options.models import Clicks
from sparsejax.options.reading import Reading
from sparsejax.options.training import Content, Stepping
from sparsejax.runs import training
from sparsejax.runs.folders import Folder, Settings
from sparsejax.verbs.fit import fit
from sparsejax.whole_files import whole_text_file

_TRIALS, _NETWORK = "trials.log", "network.json"
_LEARNING_RATES = Range(2e-4, 1e-2, log=True)
# Number of first trials: their settings are drawn at random, and they are not pruned.
_FIRST_TRIALS = 5
# A trial is not pruned before this epoch.
_FIRST_EPOCHS = 3
# Options that the printed training command repeats. It reads the network from a file.
_REPEATED = {
    name
    for options in (Stepping, Content, Reading, Clicks)
    for name in options.option_names()
}
_REPEATED |= {"learning_rate", "num_epochs", "seed", "content_columns", "words"}
_REPEATED |= {"targets", "weights"}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class _Enough(Exception):
    """Raised to end a trial that does not improve any more, or when the time is over."""


class _Tuning(NamedTuple):
    """Data shared by all trials.

    Attributes:
      command: the options of `tune`.
      source: the data.
      network: the network of the first trial.
      start: the settings that are tuned, with their values in the first trial.
    """

    command: flags.Tune
    source: Source
    network: Any
    start: Mapping[str, Any]

    @property
    def kind(self) -> Kind:
        """The kind of the model."""
        return kind_of(self.network)

    @property
    def metric(self) -> str:
        """The name of the metric by which trials are compared."""
        name = self.kind.metric(self.command.k, self.source.data)
        if is_loss(name):
            raise ValueError(
                f"tune looks for the highest metric, and {name} is a loss: let the first label "
                "be one with 0 and 1"
            )
        return name

    def with_chosen(self, chosen: Mapping[str, Any]) -> tuple[flags.Train, Any]:
        """Options of a training and a network, with the chosen values of the tuned settings."""
        tuned = dict(chosen)
        learning_rate = tuned.pop("learning_rate")
        return _training(self.command, learning_rate), self.kind.with_tuned(
            self.network, tuned
        )


def tune(command: flags.Tune) -> None:
    """`sparsejax tune`."""
    with needing("tune needs another package", "tune"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seconds = math.inf if command.limit is None else _seconds(command.limit)
    deadline = time.monotonic() + seconds
    kind, rate = kind_for(command.model), command.learning_rate
    command.check_kind(kind.name)
    if command.validation is None:
        command = command.replaced(validation=kind.held_out)
    if rate is None:
        rate = kind.defaults.learning_rate
    first = commands_of_train.training_of(_training(command, rate))
    source = training.source_of(first)
    network, said = kind.suited(first.config, first, source)
    if said:
        print(said, file=sys.stderr)
    start = {**kind.tuned_in(network), "learning_rate": rate}
    tuning = _Tuning(command, source, network, start)
    settings = training.settings_of(first, network, source)
    command.run.mkdir(parents=True, exist_ok=True)
    keeps = command.compilation_cache
    linear_part = training.linear_part_of(settings, source, keep=keeps)
    if linear_part is not None:  # it is equal for all trials
        linear_part = functools.cache(linear_part)

    with processes.alone_in(command.run):
        study = _opened(optuna, tuning, settings)
        while (number := _num_done(study)) < command.trials:
            if time.monotonic() > deadline and number:
                print(f"the time is over after {number} trials", file=sys.stderr)
                break
            trial = study.ask()
            chosen, began = _choice(trial, tuning), time.monotonic()
            try:
                state, score, why = _trained(
                    optuna, trial, tuning, chosen, deadline, linear_part
                )
            except Exception:  # a repeated tuning must not draw it again
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                raise
            study.tell(trial, score if state is None else None, state=state)
            took = f"{time.monotonic() - began:.0f} s"
            said = " ".join(f"{n} {_short(v)}" for n, v in trial.params.items())
            print(
                f"trial {trial.number}: {tuning.metric} {score:.4f}, {took}{why}: {said}",
                file=sys.stderr,
            )
            # No trial uses the programs of earlier ones again.
            jax.clear_caches()
        _finish(study, tuning)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*)([smhd])", text)
    if found is None:
        raise ValueError(f"--time {text}: expected a time such as 90s, 30m, 1.5h or 2d")
    return float(found[1]) * _UNITS[found[2]]


def _opened(optuna: Any, tuning: _Tuning, settings: Settings) -> Any:
    """Opens the study in a folder. Interrupted trials are queued to run first.

    Raises:
      ValueError: the folder has other files, or a tuning with other settings.
    """
    command = tuning.command
    path = command.run / _TRIALS
    others = {p.name for p in command.run.iterdir() if p.name[0] != "."}
    if others and not path.exists():
        raise ValueError(
            f"{command.run}: does not hold a tuning, but {min(others)}; name a new folder"
        )
    # A killed process may leave an incomplete line and the lock of Optuna. We have our own lock.
    if path.exists():
        whole = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(whole.rfind(b"\n") + 1)
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    journal = optuna.storages.journal
    lock = journal.JournalFileOpenLock(str(path))
    file = journal.JournalFileBackend(str(path), lock_obj=lock)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(file),
        study_name="tune",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=_FIRST_TRIALS, n_warmup_steps=_FIRST_EPOCHS
        ),
    )
    identity = codec.plain(settings.identity() | {"epochs": settings.num_epochs})
    before = study.user_attrs.setdefault("identity", identity)
    for name in [*identity, *before]:
        if before.get(name) != identity.get(name):
            raise ValueError(
                f"{command.run}: was begun with {name} {before.get(name)}, and now it is "
                f"{identity.get(name)}; name a new folder"
            )
    trials = study.get_trials(deepcopy=False)
    if not trials:
        study.set_user_attr("identity", identity)
        study.enqueue_trial(dict(tuning.start))
    states = optuna.trial.TrialState
    waiting = [_asked(trial) for trial in trials if trial.state == states.WAITING]
    for trial in trials:
        if trial.state == states.RUNNING:
            # The interrupted trial is queued again before it is marked as failed, so that it is
            # not lost if the process is killed in between. Then it is in the queue already.
            if _asked(trial) not in waiting:
                study.enqueue_trial(_asked(trial))
            study.tell(trial.number, state=states.FAIL)
    # With the earlier seed, the sampler would draw the earlier settings again.
    seed = command.seed + len(trials)
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=_FIRST_TRIALS, seed=seed
    )
    if trials:
        print(f"continues after {_num_done(study)} trials", file=sys.stderr)
    return study


def _asked(trial: Any) -> dict[str, Any]:
    """The settings of a trial, including those that are queued and not drawn yet."""
    return trial.system_attrs.get("fixed_params", {}) | trial.params


def _num_done(study: Any) -> int:
    """Number of trials that were completed or pruned, not interrupted."""
    trials = study.get_trials(deepcopy=False)
    return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in trials)


def _choice(trial: Any, tuning: _Tuning) -> dict[str, Any]:
    """Draws a value for each tuned setting of a trial."""
    chosen, tuned = {}, tuning.kind.choices(tuning.network)
    for name, start in tuning.start.items():
        choices = tuned.get(name, _LEARNING_RATES)
        if not isinstance(choices, Range):
            sizes = sorted({*choices, start})
            chosen[name] = trial.suggest_categorical(name, sizes)
            continue
        low, high = min(choices.low, start), max(choices.high, start)
        drawn = trial.suggest_float(name, low, high, log=choices.log)
        chosen[name] = start if drawn == start else _short(drawn)
    return chosen


def _short(value: float) -> float:
    """Rounds a number to three significant digits, so that it is easy to read."""
    return value if isinstance(value, int) else float(f"{value:.3g}")


def _training(command: flags.Tune, learning_rate: float) -> flags.Train:
    """Options of a training with this learning rate, but without files or network."""
    training = command.as_type(flags.Train, directory=command.run)
    return training.replaced(learning_rate=learning_rate)


def _trained(
    optuna: Any,
    trial: Any,
    tuning: _Tuning,
    chosen: Mapping[str, Any],
    deadline: float,
    linear_part: Callable[[], Sequence[np.ndarray]] | None,
) -> tuple[Any, float, str]:
    """Trains with the settings of a trial.

    Returns:
      The state of the trial, None if it is complete; the score of the epoch that `train` keeps;
      and the reason for its end, to be printed.
    """
    source = tuning.source
    command, network = tuning.with_chosen(chosen)
    settings = training.settings_of(command, network, source)
    best, best_epoch = -math.inf, 0

    def log(step: int, entry: Mapping[str, float]) -> None:
        nonlocal best, best_epoch
        score, epoch = entry[tuning.metric], int(entry["epoch"])
        trial.report(score, epoch)
        # Without --patience, the run of the best trial keeps its last epoch, so its last score
        # counts.
        if command.patience is None or score > best:
            best, best_epoch = score, epoch
            trial.set_user_attr("epoch", epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
        if epoch - best_epoch >= (command.patience or math.inf):
            raise _Enough
        if time.monotonic() > deadline:
            raise _Enough

    pruned = optuna.trial.TrialState.PRUNED
    try:
        model, optimizer = settings.build(source.known)
        tuning.kind.prepare(model, source.data)
        if source.features is not None:
            set_content(model, source.features, new=True)
        if linear_part is not None:
            model.output.linear.set_to(*linear_part())
        fit(
            model,
            optimizer,
            source.data,
            batch_size=settings.batch_size,
            num_epochs=settings.num_epochs,
            seed=command.seed,
            validation=source.heldout,
            log=log,
            k=command.k if tuning.kind.ranks_items else None,
        )
    except _Enough:
        pass
    except optuna.TrialPruned:
        return pruned, best, ", pruned"
    except FloatingPointError:
        return pruned, best, ", pruned, as the loss was not finite"
    except jax.errors.JaxRuntimeError as error:
        if "Out of memory" not in str(error):
            raise
        return pruned, best, ", pruned, as it does not fit in memory"
    return None, best, ""


def _finish(study: Any, tuning: _Tuning) -> None:
    """Writes the best network, trains its run, and prints how to train it again."""
    complete = [t for t in study.get_trials() if t.state.name == "COMPLETE"]
    if not complete:
        raise ValueError("no trial could be trained; begin with other settings")
    trial = max(complete, key=lambda t: t.value)
    command = tuning.command
    chosen, network = tuning.with_chosen(_choice(trial, tuning))
    config = command.run / _NETWORK
    with whole_text_file(config) as file:
        file.write(codec.text(network.to_json(), indent=2) + "\n")
    folder = command.run / f"trial-{trial.number}"
    print(
        f"the best is trial {trial.number}: {tuning.metric} {trial.value:.4f} in epoch "
        f"{trial.user_attrs['epoch']}; its run is trained into {folder}",
        file=sys.stderr,
    )
    commands_of_train.train(
        chosen.replaced(directory=folder, config=config, resume=folder.exists())
    )
    print(interval(tuning, folder, complete), file=sys.stderr)
    words: list[str | pathlib.Path] = ["sparsejax", "train", shown(command.data)]
    words += ["--run", "RUN", "--config", config]
    words += shell.words_of(chosen, _REPEATED)
    print(shlex.join(map(str, words)))


def interval(tuning: _Tuning, folder: pathlib.Path, trials: Sequence[Any]) -> str:
    """A line with the interval of the best trial's metric, as it depends on which rows were
    held out.
    """
    metric, k = tuning.metric, tuning.command.k
    model = Folder.of(folder).validated_model()
    measured = tuning.kind.validated(model, tuning.source, k)
    assert isinstance(measured, Measured)
    low, high = measured.intervals()[metric]
    close = sum(trial.value >= low for trial in trials) - 1
    within = "no other trial lies" if close < 1 else f"{close} other trials lie"
    within = "1 other trial lies" if close == 1 else within
    return (
        f"{metric} {measured[metric]:.4f}, 95 % interval {low:.4f} to {high:.4f}; {within} "
        "within it, where a difference may be luck"
    )
