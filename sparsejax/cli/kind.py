"""The differences of flags for items, for histories and for clicks: nothing else."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from sparsejax.cli import flags
from sparsejax.cli.reading import correcting_of, cutoffs_of, items_of, reading_of
from sparsejax.kinds.kind import Kind, kind_of
from sparsejax.metrics.comparison import Measured
from sparsejax.runs import kind as runs_of_kinds
from sparsejax.runs.kind import Runs
from sparsejax.runs.models import DEFAULT_MODEL, MODELS
from sparsejax.runs.options import Measuring

# Which flags say what columns of clicks hold.
CLICKS = ("schema", "label", "dense", "categories", "dynamic")
# The method of `Run` that a command calls, if it has another name; and the fields of flags
# that stand for its arguments, if they have other names.
_METHODS = {"predict": "recommend", "compare": "evaluate"}
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "inputs": ("train",),
    "heldout": ("test",),
    "indicator": ("no_value",),
    "by": ("by_entries",),
    "time": ("time", "no_time"),
    "schema": CLICKS,
}


class Range(NamedTuple):
    """Numbers that `tune` draws from.

    Attributes:
      low: the least.
      high: the largest.
      log: whether the logarithm is drawn evenly.
    """

    low: float
    high: float
    log: bool = False


# Temperatures of models whose scores are cosines.
TEMPERATURES = Range(0.03, 1.0, log=True)


class Commands(abc.ABC):
    """The parts of the commands that depend on the kind of a model.

    Attributes:
      name: of the kind.
      unused: by command the fields of its flags that the kind has no use for, beside those
        of `Runs.unused`.
      used: by command those of `Runs.unused` that its flags have a use for.
      held_out: what `tune` holds out of the data by default.
      tuned: what `tune` draws: one of some sizes, or of a range.
    """

    name: ClassVar[str]
    unused: ClassVar[Mapping[str, Collection[str]]] = {}
    used: ClassVar[Mapping[str, Collection[str]]] = {}
    held_out: ClassVar[str] = ".1"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {}

    @property
    def runs(self) -> Runs:
        """The runs of the same kind."""
        return runs_of_kinds.called(self.name)

    @property
    def kind(self) -> Kind:
        """The kind of the same name."""
        return self.runs.kind

    def check(self, command: Any) -> None:
        """Raises ValueError if a flag was given that the kind has no use for."""
        words, name = flags.flags_of(type(command)), type(command).__name__.lower()
        arguments = self.runs.unused.get(_METHODS.get(name, name), ())
        fields = [f for a in arguments for f in _FIELDS.get(a, (a,))]
        for field in [*fields, *self.unused.get(name, ())]:
            if field in command.given and field not in self.used.get(name, ()):
                raise ValueError(
                    f"{words.get(field, field.upper())} is of no use for a model of "
                    f"{self.name}: leave it out"
                )

    def described(
        self, command: flags.Train | flags.Plan
    ) -> tuple[Any, Collection[str]]:
        """The configuration that flags describe, and what of it the data decides."""
        return self.runs.described(command.kind or DEFAULT_MODEL)

    def schema(self, command: Any) -> Any:
        """The columns of clicks, if the flags say what they hold."""
        return None

    @abc.abstractmethod
    def planned(
        self, config: Any, command: flags.Plan, **how: Any
    ) -> tuple[str, bool | None]:
        """The memory that training takes, as text, and whether it fits, if that is known.

        Args:
          config: of the model.
          command: has the sizes of the data.
          how: the rule, the batch size, the mesh and the memory.
        """

    @abc.abstractmethod
    def start(self, command: flags.Tune) -> dict[str, Any]:
        """Which of `tuned` the model has, and their values in the first trial."""

    def with_flags(self, command: flags.Tune, chosen: Mapping[str, Any]) -> Any:
        """The flags of the network for some choice of what is tuned."""
        return command.network

    def choices(self, command: flags.Tune) -> Mapping[str, Range | tuple[int, ...]]:
        """`tuned`, without what the flags exclude."""
        return self.tuned

    def with_chosen(self, config: Any, chosen: Mapping[str, Any]) -> Any:
        """The configuration with some choice of what is tuned."""
        return dataclasses.replace(config, **chosen)

    def of_data(self, command: flags.Tune, config: Any) -> flags.Tune:
        """The command whose first trial has what suits the data."""
        return command

    def measuring(self, command: flags.Evaluate | flags.Compare) -> Measuring:
        """The flags of `sparsejax evaluate` or `compare`, as what they say."""
        of_evaluate = (
            "history",
            "fold_in",
            "seed",
            "popularity",
            "baselines",
            "groups",
        )
        more = {n: getattr(command, n) for n in of_evaluate if hasattr(command, n)}
        by = "entries" if getattr(command, "by_entries", False) else None
        return Measuring(
            inputs=command.train,
            heldout=command.test,
            candidates=command.candidates,
            k=cutoffs_of(command.k),
            keep_rows=isinstance(command, flags.Compare),
            correcting=correcting_of(command),
            by=by,
            **items_of(command),
            **more,
            **vars(command.counting),
            reading=reading_of(command),
        )

    @abc.abstractmethod
    def validated(self, model: Any, source: Any, k: int) -> Measured:
        """The metrics of what `tune` holds out, with the figures of its rows.

        Args:
          model: what is measured.
          source: has the data and what is held out of it.
          k: the cut-off.
        """

    @abc.abstractmethod
    def predict(self, command: flags.Predict, run: Any) -> None:
        """`sparsejax predict`."""


@functools.cache
def called(name: str) -> Commands:
    """The commands for the kind of this name."""
    return importlib.import_module(f"sparsejax.cli.{name}").COMMANDS


def commands_of(config: Any) -> Commands:
    """The commands for the kind of a configuration."""
    return called(kind_of(config).name)


def commands_for(model: str | None) -> Commands:
    """The commands for `--model`."""
    return called(MODELS[model or DEFAULT_MODEL])
