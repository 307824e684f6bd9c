"""The interface `Kind`, which holds all differences between items, histories and clicks.

Each kind is one class. Its methods follow the life of a model: configuration, data, training,
uses.
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

# Function that writes to a file the part of a model that is fitted on all data, including
# held-out data.
Final = Callable[[pathlib.Path], None]


@runtime_checkable
class OfKind(Protocol):
    """Data whose class names its kind, in memory or on disk. Matrices of items name none.

    `SequenceDataset`, `ClickDataset` and their scanned forms are such classes.
    """

    kind: ClassVar[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """Default settings for training a kind of model.

    Attributes:
      batch_size: number of examples in a step.
      least_epochs: least number of passes over the data.
      least_steps: least number of steps, so that few rows are passed over more often.
      optimizer: name of the optimizer's rule.
      options: options of the optimizer's rule.
      learning_rate: peak learning rate. It was chosen on held-out training entries of six data
          sets: docs/choosing.md.
      most_epochs: largest number of passes, which keeps the model from memorizing small data.
    """

    batch_size: int
    least_epochs: int
    least_steps: int
    optimizer: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float = 2e-3
    most_epochs: int = 300

    def num_epochs(self, steps: int) -> int:
        """Default number of epochs, given the number of steps in one epoch."""
        wanted = max(self.least_epochs, math.ceil(self.least_steps / steps))
        return min(wanted, self.most_epochs)

    def for_data(self, data: Any, *, continued: bool = False) -> Defaults:
        """Adapts the defaults to some data.

        Args:
          data: data to train on, or its number of examples. A stream has no examples yet.
          continued: whether an already trained model is trained further.
        """
        return self

    def of_loop(self, data: Any) -> tuple[int, int]:
        """Default batch size and number of epochs of `fit` for some data."""
        return 512, 20

    def constant_rule(self, data: Any) -> Rule:
        """The rule for `build`: with a constant learning rate, as the number of steps is not
        known.
        """
        return optimizers.get("adam", learning_rate=1e-3)


class Range(NamedTuple):
    """A range from which `tune` draws numbers.

    Attributes:
      low: smallest number.
      high: largest number.
      log: whether the logarithm is drawn uniformly.
    """

    low: float
    high: float
    log: bool = False


# Settings that `tune` draws: a range or a tuple of values for each setting's name.
Tuned = Mapping[str, Range | tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Maker[Model: nnx.Module]:
    """Makes a new model and its optimizer, without placing them on a mesh.

    Attributes:
      build: function that makes the model from random streams (`nnx.Rngs`).
    """

    build: Callable[..., Model]

    def __call__(self, *, rule: Rule, seed: int) -> tuple[Model, Optimizer]:
        model = self.build(rngs=nnx.Rngs(seed))
        return model, Optimizer(model, rule, seed=seed)


class DataSizes(NamedTuple):
    """Sizes of data that is not read, for `plan`.

    Attributes:
      rows: number of rows.
      items: number of items.
      entries: number of entries, over all rows.
      features: number of input features; None if the inputs are the items.
    """

    rows: int
    items: int
    entries: int
    features: int | None


class Measurement(NamedTuple):
    """Metrics of a run, and data for baselines.

    Attributes:
      metrics: metrics by name.
      beside: for models that rank items, a function that returns the data to measure baselines on,
          and the data to make them from.
    """

    metrics: Mapping[str, float]
    beside: Callable[[], tuple[Evaluation, SparseDataset]] | None = None


class Kind[Config: codec.Config, Data, Known](abc.ABC):
    """A kind of model and of its data.

    Functions such as `fit` and `tune` call its methods with a model and data in memory; a method
    with the name of such a function takes the same arguments. Run folders call other methods, with
    names of files, of the folder and of options.

    Attributes:
      name: name of the kind of rows: "items", "histories" or "clicks".
      about: sentence about what a model has learned, in plain words.
      numbered: plural noun for the things that have numbers in a model, such as "items" or "ids".
      ranks_items: whether the models rank items and have item vectors.
      defaults: default settings of a training.
      default_model: name of the default model for data of this kind.
      held_out: the part of the data that `tune` holds out by default.
      tuned: settings that `tune` draws, each from some sizes or from a range.
    """

    name: ClassVar[KindName]
    about: ClassVar[str]
    numbered: ClassVar[str] = "items"
    ranks_items: ClassVar[bool] = True
    defaults: ClassVar[Defaults]
    default_model: ClassVar[str] = DEFAULT_MODEL
    held_out: ClassVar[str] = ".1"
    tuned: ClassVar[Tuned] = {}

    # Methods that make and adapt configurations.

    def defaults_of(self, config: Config) -> Defaults:
        """The default training settings for a configuration."""
        return self.defaults

    @abc.abstractmethod
    def read_config(self, document: codec.Json) -> Config:
        """Makes a configuration from a JSON object."""

    def described(
        self, model: str, options: Described = BY_DEFAULT
    ) -> tuple[Config, Collection[str]]:
        """Makes a configuration from options; returns it and the names of settings that data
        decides.
        """
        return self.read_config({"version": 1, "model": model}), ()

    def with_negatives(
        self, config: Config, negatives: int | None, origin: bool
    ) -> Config:
        """Sets the number of items that the configuration's loss samples.

        Args:
          config: configuration of the model.
          negatives: number of sampled items; None for a loss over all items.
          origin: whether the configuration comes from an earlier run that is trained further.
        """
        return config

    def with_dynamic(self, config: Config, num_rows: int | None) -> Config:
        """Sets the number of rows of dynamic tables; with None the configuration is returned
        unchanged.
        """
        return config

    def suited(
        self, config: Config, training: Training, source: Source
    ) -> tuple[Config, str]:
        """Adapts the configuration to the data; returns it and a message about it."""
        return config, ""

    def suited_to_sizes(
        self, config: Config, suited: Collection[str], sizes: DataSizes
    ) -> tuple[Config, str]:
        """Adapts the configuration, as `suited` does, if only the sizes of the data are known.

        Args:
          config: configuration of the model.
          suited: names of settings that the data decides.
          sizes: the sizes of the data.
        """
        return config, ""

    def tuned_in(self, config: Config) -> dict[str, Any]:
        """The values of those settings of a configuration that `tune` draws."""
        return {name: getattr(config, name) for name in self.tuned}

    def choices(self, config: Config) -> Tuned:
        """The entries of `tuned` whose values are valid for a configuration."""
        return self.tuned

    def with_tuned(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        """A configuration in which settings that `tune` draws have new values."""
        return dataclasses.replace(config, **chosen)

    @abc.abstractmethod
    def maker(
        self, config: Config, data: Any, targets: Any = None, *, content: Any = None
    ) -> Maker:
        """Makes a `Maker` of models that fit the data, but does not keep the data. For `build`.

        `content` is the `ContentSizes` of the item content, or None.
        """

    def prepare(
        self,
        model: nnx.Module,
        data: Data,
        everything: Data | None = None,
        *,
        earlier: pathlib.Path | None = None,
    ) -> Final | None:
        """Computes the untrained parts of a new model from data. For `build`.

        Args:
          model: the new model.
          data: data to train on.
          everything: all data, including held-out data; None if nothing is held out.
          earlier: file of the part of the run that is trained further, or None.

        Returns:
          A function that writes the part fitted on all data, which a model gets after training; None
          if there is none.
        """
        return None

    def set_final(self, model: nnx.Module, path: pathlib.Path) -> None:
        """Loads the part that `Final` wrote into a trained model."""
        raise NotImplementedError

    # Methods that read the data of a run.

    def schema(self, columns: Clicks) -> Any:
        """The schema of click or event columns, if the options of a command name columns."""
        return None

    @abc.abstractmethod
    def source(self, training: Training, before: Opened | None) -> Source:
        """Reads the training data and the held-out data.

        Args:
          training: settings of the training, with its files.
          before: the earlier run that is trained further, or None.
        """

    @abc.abstractmethod
    def scanned(self, training: Training) -> Source:
        """Opens data that is read in chunks during training."""

    def followed(self, training: Training, before: Opened | None) -> Source:
        """Data for a run that follows a folder: it has columns, but no rows yet.

        Args:
          training: settings of the training, with its folder.
          before: the earlier run that is trained further, or None.
        """
        raise NotImplementedError(f"a run of {self.name} cannot follow")

    def read_followed(self, path: str, known: Known, reading: Reading) -> Data | None:
        """Reads the rows of a file in a followed folder; None if the file has no rows."""
        raise NotImplementedError(f"a run of {self.name} cannot follow")

    def is_indicator(self, data: Any) -> bool:
        """Whether the data has no values, or its values are ignored."""
        return True

    @abc.abstractmethod
    def account(self, data: Data) -> str:
        """A line of text with the size of the data."""

    @abc.abstractmethod
    def known_of(self, data: Data) -> Known:
        """The part of the data that is stored in a run folder, see `Source.known`."""

    @abc.abstractmethod
    def load_known(self, path: pathlib.Path) -> Known:
        """Reads `Source.known` from a file that holds the result of `like`."""

    @abc.abstractmethod
    def num_known(self, known: Known) -> int:
        """Number of columns of the data; for clicks the number of all ids."""

    @abc.abstractmethod
    def fingerprint_of(self, known: Known) -> str:
        """Fingerprint of `Source.known`, for a run's settings."""

    def like(self, known: Known) -> Any:
        """Data without rows, stored in a run folder. `maker` can make models from it."""
        return known

    # Methods for training.

    @abc.abstractmethod
    def examples(
        self, model: Any, inputs: Any, targets: Any, weights: ArrayLike | None
    ) -> Examples:
        """Makes the examples to train on, from data in memory. For `place`."""

    @abc.abstractmethod
    def job(self, asked: Fit) -> Job:
        """Makes the training job: examples and validation. For `fit`."""

    def suit_to_memory(
        self, model: Any, optimizer: Optimizer, data: Data, batch_size: int
    ) -> None:
        """Changes how the model trains so that it needs less memory, if memory is short.

        For `fit`.
        """
        return

    @abc.abstractmethod
    def workload(self, asked: Plan, batch: int) -> Workload:
        """The sizes that determine the memory of training. For `plan`.

        Args:
          asked: the call of `plan`.
          batch: number of rows of a step.
        """

    def tables(
        self, config: Config, rule: Rule, schema: Any, examples: str | None
    ) -> tuple[Mapping[str, Any], Mapping[str, str]] | None:
        """The tables by name, and the table of each feature, of a model with placed tables.

        For `plan`.

        The result is None for other models: they are planned by their workload.

        Args:
          config: configuration of the model.
          rule: the optimizer's rule.
          schema: schema of the data.
          examples: name of a file whose categories are counted, or None.
        """
        return None

    def columns_to_plan(
        self, schema: Any, examples: str | None, users: Any
    ) -> dict[str, Any]:
        """Arguments of `plan` that describe columns of data without placed tables.

        Args:
          schema: schema of the data.
          examples: name of a file whose categories are counted, or None.
          users: a table of users, or None.
        """
        return {}

    def metric(self, k: int, data: Any) -> str:
        """Name of the validation metric by which models of some data are compared."""
        return f"ndcg@{k}"

    @abc.abstractmethod
    def add_new(
        self, model: nnx.Module, known: Known, data: Data, optimizer: Optimizer | None
    ) -> None:
        """Extends a model, in place, by the new features of the data.

        Args:
          model: a trained model.
          known: names of the features that the model was made for, or a data set without examples
              that has them.
          data: data to train on. Its first features are those of `known`.
          optimizer: the model's optimizer, if its state is kept, else None.
        """

    def doubts(self, model: nnx.Module, source: Source, k: int) -> str | None:
        """A warning after training, if a simpler model is better than this one; else None.

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
        """The validation metrics of `fit` on held-out data, and figures of the held-out rows.

        Args:
          model: the trained model.
          source: the data, and the held-out part.
          k: cut-off of ranking metrics.
        """

    # Methods that use a trained model.

    @abc.abstractmethod
    def shown(
        self, model: Any, inputs: Any, exclude: Any
    ) -> tuple[Recommender, Inputs, Any]:
        """Prepares a ranking: the model as a recommender, its inputs, and the items to exclude.

        For `recommend`.
        """

    def ranked_by(self, ranker: Any, inputs: Any, rank_by: str) -> Recommender:
        """A recommender from `shown` that ranks by a label of the next event. For `recommend`."""
        raise ValueError(
            "rank_by is for histories, a SequenceDataset; leave it out, or give it to two stages "
            "when they are made: TwoStage(rank_by=...)"
        )

    def encoder(self, model: Any, inputs: Any) -> tuple[Any, Inputs]:
        """The model as an encoder of rows, and its inputs. For `user_vectors`."""
        encoder, shown, _ = self.shown(model, inputs, None)
        return encoder, shown

    @abc.abstractmethod
    def evaluate(self, asked: Measure) -> dict[str, float]:
        """Computes metrics on held-out data. For `evaluate`."""

    @abc.abstractmethod
    def portable(self, asked: Write) -> Any:
        """Converts the model to a function of arrays, a `Portable`. For `export_predictor`."""

    def asked_in_shell(self, command: Evaluate) -> Evaluate:
        """Converts the files named by a command to arguments of an evaluation."""
        return command

    @abc.abstractmethod
    def measured(self, asked: Evaluate, reading: Reading, run: Opened) -> Measurement:
        """Measures a run on held-out data."""

    def targets_alone(
        self, asked: Evaluate, reading: Reading, run: Opened, other: Opened
    ) -> Any:
        """The held-out data of a run that is compared with the run `other`; its targets may be a
        separate data set.
        """
        return asked.heldout

    def corrected(self, run: Opened, correcting: Correcting, reading: Reading) -> Any:
        """The model of a run, with its probabilities corrected if options ask for it."""
        return run.model()

    def read_shown(self, source: Any, reading: Reading, run: Opened) -> Any:
        """Reads the rows for which the model of a run ranks items, from a file or data."""
        raise ValueError(f"a model of {self.name} has no items to rank: use predict")

    def excluded(
        self, asked: Recommend, reading: Reading, run: Opened, shown: Any
    ) -> Any:
        """The items that must not be recommended to the given rows."""
        return

    def probabilities(self, examples: Any, reading: Reading, run: Opened) -> Any:
        """Predicted probabilities of a click, for each example."""
        raise ValueError(f"a model of {self.name} ranks items: use recommend")

    @abc.abstractmethod
    def findings(self, asked: Paged, reading: Reading, run: Opened) -> Findings:
        """Facts about a run and its data, for a report."""


# A kind is imported when it is first used.
_KINDS = {*MODELS.values()}


def kind_of(described: object) -> Kind:
    """Finds the kind of data, of a configuration or of a model.

    Its class names the kind by an attribute `kind`; without one it is of the kind "items". For
    models of user-defined classes see `kind_of_model`.

    >>> kind_of(train).name
    'items'
    """
    name = getattr(type(described), "kind", None)
    return kind_called(name if name in _KINDS else "items")


def kind_of_model(model: object) -> Kind:
    """Finds the kind of a model, also of a class without an attribute `kind`.

    A class without it is recognized by its methods. A model that ranks items has `top_k`, and
    `num_features` if it reads rows of items. A click model is only called.
    """
    if getattr(type(model), "kind", None) in _KINDS:
        return kind_of(model)
    if not hasattr(model, "top_k"):
        return kind_called("clicks")
    return kind_called("items" if hasattr(model, "num_features") else "histories")


@functools.cache
def kind_called(name: str) -> Kind:
    """The kind with this name."""
    return importlib.import_module(f"sparsejax.kinds.{name}.kind").KIND


def kind_for(model: str | None) -> Kind:
    """The kind of the model with this name; None is the default model."""
    return kind_called(MODELS[model or DEFAULT_MODEL])


def config_of(document: codec.Json) -> Any:
    """Makes a configuration from a JSON object: of a network if the object has no "model".

    Raises:
      ValueError: the document is not a configuration.
      TypeError: a value has a wrong type.
    """
    if not isinstance(document, Mapping) or "model" not in document:
        return kind_for(None).read_config(document)
    model = codec.value(str, document["model"], "the model", "model")
    if model not in MODELS:
        known = ", ".join(name for name in MODELS if name != DEFAULT_MODEL)
        raise ValueError(f'the model: "model" is {model!r}, not one of {known}')
    return kind_for(model).read_config(document)
