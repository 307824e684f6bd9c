"""The differences between items, histories and clicks: nothing else differs.

A kind is one class. Its methods stand in the order of a model's life: its configuration, its data,
its training, its uses.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import math
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from flax import nnx
from jax.typing import ArrayLike

from sparsejax import codec, optimizers
from sparsejax.data import SparseDataset
from sparsejax.data.reading.sources import Inputs
from sparsejax.engine.rank.evaluation import Evaluation
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train.footprint import Workload
from sparsejax.engine.train.job import Job
from sparsejax.engine.train.resident import Examples
from sparsejax.kinds.models import DEFAULT_MODEL, MODELS
from sparsejax.kinds.source import Findings, Opened, Source
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.options.measuring import Correcting, Evaluate, Measure, Paged
from sparsejax.options.models import BY_DEFAULT, Clicks, Described
from sparsejax.options.option import KindName
from sparsejax.options.planning import Plan
from sparsejax.options.predicting import Recommend, Write
from sparsejax.options.reading import Reading
from sparsejax.options.training import Fit, Training


@runtime_checkable
class OfKind(Protocol):
    """Data whose class says its kind, in memory or on disk. Matrices of items say none.

    `SequenceDataset`, `ClickDataset` and what scans them are such classes.
    """

    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """Settings with which a kind of model is trained, unless others are asked for.

    Attributes:
      batch_size: examples of a step.
      least_epochs: smallest number of passes over the data.
      least_steps: smallest number of steps: few rows take more epochs.
      optimizer: name of the optimizer's rule.
      options: options of this rule.
      learning_rate: learning rate at its highest. It was chosen on held-out training entries of
        six data sets: docs/choosing.md.
      most_epochs: largest number of passes. With more, little data would be learned by heart.
    """

    batch_size: int
    least_epochs: int
    least_steps: int
    optimizer: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float = 2e-3
    most_epochs: int = 300

    def num_epochs(self, steps: int) -> int:
        """Epochs, if one has so many steps."""
        wanted = max(self.least_epochs, math.ceil(self.least_steps / steps))
        return min(wanted, self.most_epochs)

    def for_data(self, data: Any, *, continued: bool = False) -> Defaults:
        """The settings for some data.

        Args:
          data: data to train on, or its number of examples. A stream has none yet.
          continued: whether a trained model is trained on.
        """
        return self

    def of_loop(self, data: Any) -> tuple[int, int]:
        """Batch size and epochs of `fit` for some data."""
        return 512, 20

    def constant_rule(self, data: Any) -> Rule:
        """The rule of `build`, which does not know how long a training will be."""
        return optimizers.get("adam", learning_rate=1e-3)


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


# The settings that `tune` draws.
Tuned = Mapping[str, Range | tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Maker[Model: nnx.Module]:
    """Makes a new model and its optimizer, not placed on a mesh.

    Attributes:
      build: function that makes the model, given random streams.
    """

    build: Callable[..., Model]

    def __call__(self, *, rule: Rule, seed: int) -> tuple[Model, Optimizer]:
        model = self.build(rngs=nnx.Rngs(seed))
        return model, Optimizer(model, rule, seed=seed)


class DataSizes(NamedTuple):
    """The sizes of data that is not read, for `plan`.

    Attributes:
      rows: number of rows.
      items: number of items.
      entries: number of entries, over all rows.
      features: number of input features, if they are not the items.
    """

    rows: int
    items: int
    entries: int
    features: int | None


class Measurement(NamedTuple):
    """The metrics of a run.

    Attributes:
      metrics: the metrics.
      beside: function that returns the data on which baselines are measured, and the data that
        they are made of, if the model ranks items.
    """

    metrics: Mapping[str, float]
    beside: Callable[[], tuple[Evaluation, SparseDataset]] | None = None


class Kind[Config: codec.Config, Data, Known](abc.ABC):
    """A kind of model and of its data.

    Verbs call it to work with a model and with data in memory. Runs call it where they have
    names: names of files, of a run folder, of options. Arguments of a method that is called
    like a verb are those of the verb.

    Attributes:
      name: name of the kind of rows: "items", "histories" or "clicks".
      about: sentence on what a model has learned, in plain words.
      numbered: word for the columns of the data, in messages.
      ranks_items: whether the models have items to rank, and vectors of them.
      defaults: default settings of a training.
      default_model: name of the model that data of this kind trains by default.
      held_out: the part of the data that `tune` holds out by default.
      tuned: the settings that `tune` draws: one of some sizes, or of a range.
    """

    name: ClassVar[KindName]
    about: ClassVar[str]
    numbered: ClassVar[str] = "items"
    ranks_items: ClassVar[bool] = True
    defaults: ClassVar[Defaults]
    default_model: ClassVar[str] = DEFAULT_MODEL
    held_out: ClassVar[str] = ".1"
    tuned: ClassVar[Tuned] = {}

    # The configuration.

    def defaults_of(self, config: Config) -> Defaults:
        """The defaults of a configuration."""
        return self.defaults

    @abc.abstractmethod
    def read_config(self, document: codec.Json) -> Config:
        """The configuration of a JSON object."""

    def described(
        self, model: str, options: Described = BY_DEFAULT
    ) -> tuple[Config, Collection[str]]:
        """The configuration that options describe, and its settings that data decides."""
        return self.read_config({"version": 1, "model": model}), ()

    def with_negatives(
        self, config: Config, negatives: int | None, origin: bool
    ) -> Config:
        """The configuration with a loss over so many items.

        Args:
          config: the configuration.
          negatives: number of items; None for all items.
          origin: whether it is that of a run that is trained on.
        """
        return config

    def with_dynamic(self, config: Config, num_rows: int | None) -> Config:
        """The configuration with dynamic tables of so many rows; None leaves it as it is."""
        return config

    def suited(
        self, config: Config, training: Training, source: Source
    ) -> tuple[Config, str]:
        """The configuration as it suits the data, and what to say about it."""
        return config, ""

    def suited_to_sizes(
        self, config: Config, suited: Collection[str], sizes: DataSizes
    ) -> tuple[Config, str]:
        """The configuration as `suited` makes it for data of which only the sizes are known.

        Args:
          config: the configuration.
          suited: its settings that the data decides.
          sizes: the sizes of the data.
        """
        return config, ""

    def tuned_in(self, config: Config) -> dict[str, Any]:
        """The settings of a configuration that `tune` draws, with their values."""
        return {name: getattr(config, name) for name in self.tuned}

    def choices(self, config: Config) -> Tuned:
        """`tuned`, without the values that do not go with a configuration."""
        return self.tuned

    def with_tuned(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        """The configuration with other values of the settings that `tune` draws."""
        return dataclasses.replace(config, **chosen)

    @abc.abstractmethod
    def maker(
        self, config: Config, data: Any, targets: Any = None, *, content: Any = None
    ) -> Maker:
        """A maker of models that fit the data, of which it keeps nothing. For `build`.

        `content` are the `ContentSizes` of what is known of the items.
        """

    def prepare(self, model: nnx.Module, data: Data) -> None:
        """Computes the parts of a model that are not trained, before it is. For `build`."""
        return

    def save_final(self, path: pathlib.Path, config: Config, source: Source) -> None:
        """Writes a part that a trained model gets at last, made of all data, if it has one."""
        return

    def set_final(self, model: nnx.Module, path: pathlib.Path) -> None:
        """Gives a trained model the part that `save_final` wrote."""
        raise NotImplementedError

    # The data of a run.

    def schema(self, columns: Clicks) -> Any:
        """The columns of clicks or of events, if the options of a command name them."""
        return None

    @abc.abstractmethod
    def source(self, training: Training, before: Opened | None) -> Source:
        """All of the data, and what is held out.

        Args:
          training: settings of the training, with its files.
          before: the run that is trained on, if there is one.
        """

    @abc.abstractmethod
    def scanned(self, training: Training) -> Source:
        """Data that is read in chunks while training."""

    def followed(self, training: Training, before: Opened | None) -> Source:
        """The data of a run that follows: it has no rows yet, only columns.

        Args:
          training: settings of the training, with its folder.
          before: the run that is trained on, if there is one.
        """
        raise NotImplementedError(f"a run of {self.name} cannot follow")

    def read_followed(self, path: str, known: Known, reading: Reading) -> Data | None:
        """The rows of a file of a run that follows; None if it has none."""
        raise NotImplementedError(f"a run of {self.name} cannot follow")

    def is_indicator(self, data: Any) -> bool:
        """Whether data of items has no values, see `Source.indicator`."""
        return True

    @abc.abstractmethod
    def account(self, data: Data) -> str:
        """How large the data is."""

    @abc.abstractmethod
    def known_of(self, data: Data) -> Known:
        """The part of the data that a run folder keeps, see `Source.known`."""

    @abc.abstractmethod
    def load_known(self, path: pathlib.Path) -> Known:
        """Reads from a file of `like` what a run folder keeps to read other data by."""

    @abc.abstractmethod
    def num_known(self, known: Known) -> int:
        """The number of known features, see `Source.num_features`."""

    @abc.abstractmethod
    def fingerprint_of(self, known: Known) -> str:
        """The fingerprint of `Source.known` in a run's settings."""

    def like(self, known: Known) -> Any:
        """Data without rows, to which `maker` makes models fit. A run folder keeps it."""
        return known

    # Training.

    @abc.abstractmethod
    def examples(
        self, model: Any, inputs: Any, targets: Any, weights: ArrayLike | None
    ) -> Examples:
        """The examples to train on, from data in memory. For `place`."""

    @abc.abstractmethod
    def job(self, asked: Fit) -> Job:
        """The examples to train on, and how the model is measured. For `fit`."""

    def suit_to_memory(
        self, model: Any, optimizer: Optimizer, data: Data, batch_size: int
    ) -> None:
        """Makes training take less memory, where it does not fit otherwise. For `fit`."""
        return

    @abc.abstractmethod
    def workload(self, asked: Plan, batch: int) -> Workload:
        """The sizes on which the memory of training depends. For `plan`.

        Args:
          asked: the call of `plan`.
          batch: number of rows of a step.
        """

    def tables(
        self, config: Config, rule: Rule, schema: Any, examples: str | None
    ) -> tuple[Mapping[str, Any], Mapping[str, str]] | None:
        """The tables and the features of a model whose tables are placed, for `plan`.

        None is for other models, which are planned by their workload.

        Args:
          config: the configuration.
          rule: the optimizer's rule.
          schema: the columns of the data.
          examples: a file whose categories are counted.
        """
        return None

    def columns_to_plan(
        self, schema: Any, examples: str | None, users: Any
    ) -> dict[str, Any]:
        """Arguments of `plan` for the columns of data that has no tables to place.

        Args:
          schema: the columns of the data.
          examples: a file whose categories are counted.
          users: a table of users, or None.
        """
        return {}

    def metric(self, k: int, data: Any) -> str:
        """The validation metric that decides for a model of some data."""
        return f"ndcg@{k}"

    @abc.abstractmethod
    def add_new(
        self, model: nnx.Module, known: Known, data: Data, optimizer: Optimizer | None
    ) -> None:
        """Makes a model of what is known fit data that begins with it, in place.

        Args:
          model: a trained model.
          known: names of the features, or the data set without examples, that the model was
            made for.
          data: data to train on. Its features begin with those of `known`.
          optimizer: the optimizer of the model, if its state is kept.
        """

    def doubts(self, model: nnx.Module, source: Source, k: int) -> str | None:
        """A warning after training if something simpler is better than the model, or None.

        Args:
          model: the trained model.
          source: the data that the model was trained on, and the held-out part.
          k: cut-off of ranking metrics.
        """
        return None

    @abc.abstractmethod
    def validated(
        self, model: nnx.Module, source: Source, k: int
    ) -> Mapping[str, float]:
        """The metrics of held-out data, as `fit` measures them, with the figures of its rows.

        Args:
          model: the trained model.
          source: the data, and the held-out part.
          k: cut-off of ranking metrics.
        """

    # Uses of a model.

    @abc.abstractmethod
    def shown(
        self, model: Any, inputs: Any, exclude: Any
    ) -> tuple[Recommender, Inputs, Any]:
        """A model that ranks items, its inputs, and what to exclude. For `recommend`."""

    def ranked_by(self, ranker: Any, inputs: Any, rank_by: str) -> Recommender:
        """The result of `shown`, ranking by a label of the next event. For `recommend`."""
        raise ValueError(
            "rank_by is for histories, a SequenceDataset; leave it out, or give it to two stages "
            "when they are made: TwoStage(rank_by=...)"
        )

    def encoder(self, model: Any, inputs: Any) -> tuple[Any, Inputs]:
        """A model that makes vectors of rows, and its inputs. For `user_vectors`."""
        encoder, shown, _ = self.shown(model, inputs, None)
        return encoder, shown

    @abc.abstractmethod
    def evaluate(self, asked: Measure) -> dict[str, float]:
        """Metrics of what was held out. For `evaluate`."""

    @abc.abstractmethod
    def portable(self, asked: Write) -> Any:
        """The model as a function of arrays, a `Portable`. For `export_predictor`."""

    def asked_in_shell(self, command: Evaluate) -> Evaluate:
        """The measurement that the files of a command ask for."""
        return command

    @abc.abstractmethod
    def measured(self, asked: Evaluate, reading: Reading, run: Opened) -> Measurement:
        """The metrics of a run."""

    def targets_alone(
        self, asked: Evaluate, reading: Reading, run: Opened, other: Opened
    ) -> Any:
        """The held-out data of another run that is compared with a run, which may have targets."""
        return asked.heldout

    def corrected(self, run: Opened, correcting: Correcting, reading: Reading) -> Any:
        """The model of a run, which may be corrected."""
        return run.model()

    def read_shown(self, source: Any, reading: Reading, run: Opened) -> Any:
        """The rows of a file or of data that the model of a run is shown, to rank items."""
        raise ValueError(f"a model of {self.name} has no items to rank: use predict")

    def excluded(
        self, asked: Recommend, reading: Reading, run: Opened, shown: Any
    ) -> Any:
        """The items that a run is not to recommend to the rows that it is shown."""
        return

    def probabilities(self, examples: Any, reading: Reading, run: Opened) -> Any:
        """The probability of a click of each example."""
        raise ValueError(f"a model of {self.name} ranks items: use recommend")

    @abc.abstractmethod
    def findings(self, asked: Paged, reading: Reading, run: Opened) -> Findings:
        """The facts of a report about a run and its data."""


# A kind is imported when it is first used.
_KINDS = {*MODELS.values()}


def kind_of(described: object) -> Kind:
    """The kind of data, of a configuration or of a model.

    Their class says it by an attribute `kind`; what says nothing is of items. A module of
    one's own that says nothing is told by how it is called, see `kind_of_model`.

    >>> kind_of(train).name
    'items'
    """
    name = getattr(type(described), "kind", None)
    return kind_called(name if name in _KINDS else "items")


def kind_of_model(model: object) -> Kind:
    """`kind_of`, of models also by their methods: a class of one's own need not say its kind.

    What ranks items has `top_k`, and `num_features` if it reads rows of items. What predicts
    clicks is only called.
    """
    if getattr(type(model), "kind", None) in _KINDS:
        return kind_of(model)
    if not hasattr(model, "top_k"):
        return kind_called("clicks")
    return kind_called("items" if hasattr(model, "num_features") else "histories")


@functools.cache
def kind_called(name: str) -> Kind:
    """The kind of this name."""
    return importlib.import_module(f"sparsejax.kinds.{name}.kind").KIND


def kind_for(model: str | None) -> Kind:
    """The kind of the models of this name; None is the default model."""
    return kind_called(MODELS[model or DEFAULT_MODEL])


def config_of(document: codec.Json) -> Any:
    """The configuration of a JSON object: of a network if it names no "model".

    Raises:
      ValueError: the document is something else.
      TypeError: a value is of a wrong type.
    """
    if not isinstance(document, Mapping) or "model" not in document:
        return kind_for(None).read_config(document)
    model = codec.value(str, document["model"], "the model", "model")
    if model not in MODELS:
        known = ", ".join(name for name in MODELS if name != DEFAULT_MODEL)
        raise ValueError(f'the model: "model" is {model!r}, not one of {known}')
    return kind_for(model).read_config(document)
