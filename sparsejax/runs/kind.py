"""The differences of runs of items, of histories and of clicks: nothing else."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from sparsejax import codec
from sparsejax.data import ItemFeatures
from sparsejax.data.files.names import Names
from sparsejax.kinds.kind import Kind, kind_called, kind_of
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Correcting, Evaluate, Paged
from sparsejax.options.predicting import Export, Exported, Recommend
from sparsejax.options.reading import Reading
from sparsejax.options.training import Training
from sparsejax.runs.models import DEFAULT_MODEL, MODELS

# Lowers what a model will run, which has shapes in place of arrays. Returns what compiles it.
Ahead = Callable[[Any], Callable[[], object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The data to train on.

    Attributes:
      data: the rows to train on, in memory or on disk.
      everything: all rows, also what is held out of them.
      chunks: number of rows in each chunk of the data.
      fingerprint: of the data.
      num_features: columns of the data; of clicks all ids.
      known: what the run folder keeps to read other data by: the names of the features; of
        clicks a data set without examples.
      indicator: whether the data has no values, or its values are ignored.
      heldout: what to measure on after each epoch, if there is anything.
      validation: `fingerprint` of what is held out.
      split: how it was chosen from the data, unless a file has it.
      features: content of the items, in the order of `known`, if it is given.
    """

    data: Any
    everything: Any
    chunks: Sequence[int]
    fingerprint: str
    num_features: int
    known: Any
    indicator: bool
    heldout: Any = None
    validation: str | None = None
    split: str | None = None
    features: ItemFeatures | None = None


class Runs(abc.ABC):
    """The parts of runs that depend on the kind of the model.

    Attributes:
      name: of the kind.
      numbered: what the columns of the data are, in messages.
      ranks_items: whether the models have items to rank, and vectors of them.
    """

    name: ClassVar[str]
    numbered: ClassVar[str] = "items"
    ranks_items: ClassVar[bool] = True

    @property
    def kind(self) -> Kind:
        """The kind of the same name."""
        return kind_called(self.name)

    def metric(self, k: int) -> str:
        """The validation metric that decides."""
        return f"ndcg@{k}"

    @abc.abstractmethod
    def read_config(self, document: object) -> Any:
        """The configuration of a JSON object."""

    def described(self, model: str) -> tuple[Any, Collection[str]]:
        """The configuration of a model without options, and what of it data decides."""
        return self.read_config({"version": 1, "model": model}), ()

    def with_negatives(self, config: Any, negatives: int | None, origin: bool) -> Any:
        """The configuration with a loss over so many items.

        Args:
          config: the configuration.
          negatives: how many; None for all of them.
          origin: whether it is that of a run that is trained on.
        """
        return config

    def with_dynamic(self, config: Any, num_rows: int | None) -> Any:
        """The configuration with dynamic tables of so many rows; None leaves it as it is."""
        return config

    @abc.abstractmethod
    def source(self, training: Training, before: Any) -> Source:
        """All of the data, and what is held out.

        Args:
          training: names the files.
          before: what the run that is trained on knows, see `Source.known`; else None.
        """

    @abc.abstractmethod
    def scanned(self, training: Training) -> Source:
        """Data that is read in chunks while training."""

    def followed(self, training: Training, before: Any) -> Source:
        """The data of a run that follows: it has no rows yet, only columns.

        Args:
          training: names the folder.
          before: what the run that is trained on knows, see `Source.known`; else None.
        """
        raise NotImplementedError(f"a run of {self.name} cannot follow")

    def read_followed(self, path: str, known: Any, reading: Reading) -> Any:
        """The rows of a file of a run that follows; None if it has none."""
        raise NotImplementedError(f"a run of {self.name} cannot follow")

    def suited(
        self, config: Any, training: Training, source: Source
    ) -> tuple[Any, str]:
        """The configuration as it suits the data, and what to say about it."""
        return config, ""

    def doubts(self, model: Any, source: Source, k: int) -> str | None:
        """A warning after training if something simpler is better than the model, or None.

        Args:
          model: the trained model.
          source: what it was trained on, and what was held out.
          k: the cut-off of metrics of rankings.
        """
        return None

    @abc.abstractmethod
    def account(self, data: Any) -> str:
        """How large the data is."""

    @abc.abstractmethod
    def known_of(self, data: Any) -> Any:
        """The part of the data that a run folder keeps, see `Source.known`."""

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

    @abc.abstractmethod
    def add_new(
        self, model: Any, known: Any, data: Any, optimizer: Optimizer | None
    ) -> None:
        """Makes a model of what is known fit data that begins with it, in place.

        Args:
          model: the model.
          known: what it knows, see `Source.known`.
          data: to train on.
          optimizer: the model's, if it is kept.
        """

    def like(self, known: Any) -> Any:
        """Data without rows, to which `Kind.maker` makes models fit."""
        return known

    @abc.abstractmethod
    def evaluate(
        self, measuring: Evaluate, reading: Reading, run: Opened
    ) -> Mapping[str, float]:
        """The metrics of a run.

        Args:
          measuring: what is measured.
          reading: how files are read.
          run: the run.
        """

    @abc.abstractmethod
    def recommend(
        self,
        recommending: Recommend,
        reading: Reading,
        run: Opened,
        check: Callable[[Names], None] | None = None,
        hint: str = "",
    ) -> tuple[Any, Any]:
        """The names of rows, and their recommendations; or None, and probabilities.

        Args:
          recommending: what is recommended.
          reading: how files are read.
          run: by which run.
          check: called with the names of rows before the model is.
          hint: what to say after an error about these names.
        """

    def corrected(self, run: Opened, correcting: Correcting, reading: Reading) -> Any:
        """The model of a run, which may be corrected."""
        return run.model()

    def export(self, asked: Export, reading: Reading, run: Opened) -> None:
        """Writes the predictor of a run."""
        from sparsejax.verbs.export import export_with_answer

        model = self.corrected(run, asked, reading)
        if getattr(model, "uses_times", False):
            reading.say(
                "note: the predictor recommends without times; export_predictor in Python, "
                "with the data as names, makes one that reads them"
            )
        export_with_answer(
            model,
            asked.path,
            names=run.known,
            item_features=run.item_features(),
            **asked.useful(self.name, Exported),
        )

    def user_vectors(self, inputs: Any, reading: Reading, run: Opened) -> Any:
        """The vectors of the rows of some data, and their names."""
        raise NotImplementedError(
            f"data=...: a model of {self.name} has vectors of items only; leave it out"
        )

    @abc.abstractmethod
    def report(self, measuring: Paged, reading: Reading, run: Opened) -> dict[str, Any]:
        """Arguments of `write_report` that depend on the data."""


@runtime_checkable
class Opened(Protocol):
    """A run folder that is read, see `folders.Folder`."""

    @property
    def settings(self) -> Any: ...

    @property
    def known(self) -> Any: ...

    def model(self, ahead: Ahead | None = None) -> Any: ...

    def item_features(self) -> ItemFeatures | None: ...


@functools.cache
def called(name: str) -> Runs:
    """The runs of the kind of this name."""
    return importlib.import_module(f"sparsejax.runs.{name}").RUNS


def runs_of(config: Any) -> Runs:
    """The runs of the kind of a configuration."""
    return called(kind_of(config).name)


def config_of(document: object) -> Any:
    """The configuration of a JSON object: of a network if it names no "model".

    Raises:
      ValueError: the document is something else.
      TypeError: a value is of a wrong type.
    """
    if not isinstance(document, Mapping) or "model" not in document:
        return called("items").read_config(document)
    model = codec.value(str, document["model"], "the model", "model")
    if model not in MODELS:
        known = ", ".join(name for name in MODELS if name != DEFAULT_MODEL)
        raise ValueError(f'the model: "model" is {model!r}, not one of {known}')
    return called(MODELS[model]).read_config(document)
