"""The differences of commands for items, for histories and for clicks: nothing else."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from sparsejax import codec
from sparsejax.cli import flags
from sparsejax.kinds.kind import Kind, kind_called, kind_of

# Which columns of a table of interactions hold what.
COLUMNS = ("user", "item", "value", "time", "no_value", "no_time", "delimiter")
# How held-out items count, and which are ranked.
COUNTING = ("unknown", "unknown_users", "keep_seen")
# Which columns of a table of clicks hold what.
CLICKS = ("schema", "label", "dense", "categories")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The data to train on.

    Attributes:
      data: the rows, in memory or on disk.
      chunks: number of rows in each chunk of the data.
      fingerprint: of the data.
      num_features: columns of the data; of clicks all ids.
      known: what the run folder keeps to read other data by: the names of the features; of
        clicks a data set without examples.
      indicator: whether the data has no values, or its values are ignored.
      heldout: what to measure on after each epoch, if there is anything.
      validation: `fingerprint` of what is held out.
      split: how it was chosen from the data, unless a file has it.
    """

    data: Any
    chunks: Sequence[int]
    fingerprint: str
    num_features: int
    known: Any
    indicator: bool
    heldout: Any = None
    validation: str | None = None
    split: str | None = None


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
      unused: by command the fields of its flags that the kind has no use for.
      held_out: what `tune` holds out of the data by default.
      tuned: what `tune` draws: one of some sizes, or of a range.
    """

    name: ClassVar[str]
    unused: ClassVar[Mapping[str, Collection[str]]] = {}
    held_out: ClassVar[str] = ".1"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {}

    @property
    def kind(self) -> Kind:
        """The kind of the same name."""
        return kind_called(self.name)

    def check(self, command: Any) -> None:
        """Raises ValueError if a flag was given that the kind has no use for."""
        words = flags.flags_of(type(command))
        for name in self.unused.get(type(command).__name__.lower(), ()):
            if name in command.given:
                raise ValueError(
                    f"{words.get(name, name.upper())} is of no use for a model of "
                    f"{self.name}: leave it out"
                )

    def metric(self, k: int) -> str:
        """The validation metric that decides."""
        return f"ndcg@{k}"

    @abc.abstractmethod
    def read_config(self, document: object) -> Any:
        """The configuration of a JSON object."""

    def described(self, command: flags.Train | flags.Plan) -> Any:
        """The configuration that flags describe, without what depends on the data."""
        return self.read_config({"version": 1, "model": command.kind})

    def negatives(self, config: Any, command: flags.Train | flags.Plan) -> Any:
        """The configuration with the loss that the flags name."""
        return config

    @abc.abstractmethod
    def source(self, command: flags.Train, before: Any) -> Source:
        """All of the data, and what is held out.

        Args:
          command: names the files.
          before: what the run of `--from` knows, see `Source.known`; else None.
        """

    @abc.abstractmethod
    def scanned(self, command: flags.Train) -> Source:
        """Data that is read in chunks while training."""

    def suited(
        self, config: Any, command: flags.Train, source: Source
    ) -> tuple[Any, str]:
        """The configuration as it suits the data, and what to say about it."""
        return config, ""

    @abc.abstractmethod
    def account(self, data: Any) -> str:
        """How large the data is."""

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

    def with_chosen(self, config: Any, chosen: Mapping[str, Any]) -> Any:
        """The configuration with some choice of what is tuned."""
        return dataclasses.replace(config, **chosen)

    def of_data(self, command: flags.Tune, config: Any) -> flags.Tune:
        """The command whose first trial has what suits the data."""
        return command

    @abc.abstractmethod
    def save_known(self, path: pathlib.Path, known: Any) -> None:
        """Writes what a run folder keeps to read other data by."""

    @abc.abstractmethod
    def load_known(self, path: pathlib.Path) -> Any:
        """Reads what `save_known` wrote."""

    @abc.abstractmethod
    def num_known(self, known: Any) -> int:
        """The number of known features, see `Source.num_features`."""

    @abc.abstractmethod
    def fingerprint_of(self, known: Any) -> str:
        """The fingerprint of `Source.known` in a run's settings."""

    def like(self, known: Any) -> Any:
        """Data without rows, to which `Kind.maker` makes models fit."""
        return known

    @abc.abstractmethod
    def evaluate(self, command: flags.Evaluate, run: Opened) -> Mapping[str, float]:
        """`sparsejax evaluate`."""

    @abc.abstractmethod
    def predict(self, command: flags.Predict, run: Opened) -> None:
        """`sparsejax predict`."""

    def user_vectors(self, command: flags.Vectors, run: Opened) -> tuple[Any, Any]:
        """The vectors of the rows of `--data`, and their names."""
        raise NotImplementedError(
            f"--data: a model of {self.name} has vectors of items only; leave it out"
        )

    @abc.abstractmethod
    def report(self, command: flags.Report, run: Opened) -> dict[str, Any]:
        """Arguments of `write_report` that depend on the data."""


class Opened(Protocol):
    """A run folder that a command reads, see `run.Folder`."""

    @property
    def settings(self) -> Any: ...

    @property
    def known(self) -> Any: ...

    def model(self) -> Any: ...


@functools.cache
def called(name: str) -> Commands:
    """The commands for the kind of this name."""
    return importlib.import_module(f"sparsejax.cli.{name}").COMMANDS


def commands_of(config: Any) -> Commands:
    """The commands for the kind of a configuration."""
    return called(kind_of(config).name)


def commands_for(model: str | None) -> Commands:
    """The commands for `--model`."""
    return called(flags.MODELS[model or flags.DEFAULT_MODEL])


def config_of(document: object) -> Any:
    """The configuration of a JSON object: of a network if it names no "model".

    Raises:
      ValueError: the document is something else.
      TypeError: a value is of a wrong type.
    """
    if not isinstance(document, Mapping) or "model" not in document:
        return called("items").read_config(document)
    model = codec.value(str, document["model"], "the model", "model")
    if model not in flags.MODELS:
        known = ", ".join(name for name in flags.MODELS if name != flags.DEFAULT_MODEL)
        raise ValueError(f'the model: "model" is {model!r}, not one of {known}')
    return called(flags.MODELS[model]).read_config(document)
