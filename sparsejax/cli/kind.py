"""The differences of flags for items, for histories and for clicks: nothing else."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from sparsejax.cli import flags
from sparsejax.kinds.kind import Kind, kind_called, kind_of
from sparsejax.kinds.models import DEFAULT_MODEL, MODELS
from sparsejax.options.measuring import Evaluate


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
      held_out: what `tune` holds out of the data by default.
      tuned: what `tune` draws: one of some sizes, or of a range.
    """

    name: ClassVar[str]
    held_out: ClassVar[str] = ".1"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {}

    @property
    def kind(self) -> Kind:
        """The kind of the same name."""
        return kind_called(self.name)

    def described(
        self, command: flags.Train | flags.Plan
    ) -> tuple[Any, Collection[str]]:
        """The configuration that flags describe, and what of it the data decides."""
        return self.kind.described(command.model or DEFAULT_MODEL)

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

    def with_flags(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The flags of the network for some choice of what is tuned."""
        return {}

    def choices(self, command: flags.Tune) -> Mapping[str, Range | tuple[int, ...]]:
        """`tuned`, without what the flags exclude."""
        return self.tuned

    def with_chosen(self, config: Any, chosen: Mapping[str, Any]) -> Any:
        """The configuration with some choice of what is tuned."""
        return dataclasses.replace(config, **chosen)

    def of_data(self, command: flags.Tune, config: Any) -> flags.Tune:
        """The command whose first trial has what suits the data."""
        return command

    def measuring(self, command: Evaluate) -> Evaluate:
        """The measurement that `sparsejax evaluate` or `compare` asks for."""
        return command

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
