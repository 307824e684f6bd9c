"""A run: a model with its optimizer, its vocabulary, its history and its data."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from sparsejax.codec import Config
from sparsejax.data import ClickDataset, SequenceDataset, SparseDataset
from sparsejax.data.sets.click_schema import ClickSchema
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.kinds.kind import Kind, kind_called, kind_of
from sparsejax.kinds.models import DEFAULT_MODEL, MODELS
from sparsejax.kinds.reading import is_file, users_in
from sparsejax.kinds.source import Ahead, Source, item_names
from sparsejax.mesh import processes
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.measuring import Evaluate, Report
from sparsejax.options.option import takes
from sparsejax.options.predicting import Export, Recommend
from sparsejax.options.reading import Reading
from sparsejax.options.training import Load, Train, Training, TrainMore
from sparsejax.runs import uses
from sparsejax.runs.folders import Folder, Settings
from sparsejax.runs.training import train
from sparsejax.verbs.vectors import similar_items
from sparsejax.whole_files import whole_folder

_Path = str | os.PathLike[str]


class Run:
    """A trained model with its data and names. Each method does the work of a command.

    >>> run = Run.train(train, num_epochs=2)
    >>> run.recommend(["train-10006"], k=2).names()
    [['/...', '/...']]
    >>> run.evaluate(heldout, k=10)["recall@10"] > 0.5
    True

    ::

        run = sj.Run.train("plays.csv")
        run.evaluate("later.csv"); run.recommend(["ann"], k=10); run.similar(["tea"])
        run.report("report.html"); run.export("shop.predictor"); run.save("runs/monday")
        run = sj.Run.load("runs/monday"); run.train_more("tuesday.csv")

    `Run.train` gives results bitwise equal to those of `sparsejax train`, and they use the same
    folders: each reads what the other wrote. For a custom training loop, use `build`, `fit` and
    the other functions.
    """

    def __init__(self, kept: _Kept, reading: Reading):
        """Not for direct use: call `Run.train` or `Run.load`."""
        self._kept, self._reading = kept, reading

    def __repr__(self) -> str:
        model = getattr(self.settings.network, "model", DEFAULT_MODEL)
        return (
            f"Run({model}, {self.settings.num_features:,} features, "
            f"{len(self.history)} epochs, {str(self.directory)!r})"
        )

    @classmethod
    @takes(Train)
    def train(cls, asked: Train) -> Run:
        """Trains a model with default settings that suit most data.

        Raises:
          DataError: a file cannot be read.
          FileExistsError: the directory exists and is not empty.
          ValueError: settings contradict each other, or do not apply to this kind of model.
        """
        if asked.config is None:
            name = _model_of(asked.data, asked.model, asked.schema)
            config, suited = kind_called(MODELS[name]).described(name)
        else:
            config, suited = asked.config, ()
            _check_config(config, asked.model)
        return cls._trained(asked.as_type(Training, config=config, suited=suited))

    @classmethod
    def _trained(cls, training: Training) -> Run:
        """Trains a model, and returns its run."""
        kind = kind_of(training.config)
        training.check_kind(kind.name)
        _check_columns(training)
        before = None if training.origin is None else Folder.of(training.origin).known
        training = _with_table(training, before)
        config = kind.with_negatives(
            training.config, training.negatives, training.origin is not None
        )
        config = kind.with_dynamic(config, training.dynamic)
        directory, log = training.directory, training.log
        owned = directory is None
        if owned:
            _check_temporary(training)
            directory = tempfile.mkdtemp(prefix="sparsejax-run-")
        report = None if log is None else (lambda _, step, entry: log(step, entry))
        try:
            source = train(
                pathlib.Path(directory), training.replaced(config=config), log=report
            )
            kept = _Kept.of(os.fspath(directory), _shown(source))
        except BaseException:
            if owned:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        if owned:
            weakref.finalize(kept, shutil.rmtree, directory, ignore_errors=True)
        return cls(kept, training.as_type(Reading))

    @classmethod
    @takes(Load)
    def load(cls, asked: Load) -> Run:
        """Loads a run that `save`, `train` or `sparsejax train` wrote.

        The training data is not loaded: pass the data that the model should read as `inputs`.

        Raises:
          ValueError: the folder is not a run folder, or is damaged.
        """
        folder = _Kept.of(pathlib.Path(asked.directory))
        asked.check_kind(folder.settings.kind.name)
        return cls(folder, _with_table(asked.as_type(Reading), folder.known))

    def save(self, directory: _Path) -> None:
        """Copies the run to a folder, which is renamed into place when complete.

        Args:
          directory: path of the folder, which must not exist.

        Raises:
          FileExistsError: the folder exists.
        """
        directory = pathlib.Path(directory)

        def copy() -> None:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(directory) as new:
                shutil.copytree(self.directory, new, dirs_exist_ok=True)

        processes.in_first(copy)

    @takes(TrainMore)
    def train_more(self, asked: TrainMore) -> None:
        """Continues the training. Afterwards this object is the run of the new training.

        Items, and categories of clicks, that the model does not know are added after the known
        ones, and known rows are not changed before training. A new category of clicks starts as a
        copy of the unknown category. The optimizer keeps its state if it is of the same kind and
        its learning rate is constant; otherwise it starts anew. The folder of the earlier run is
        not changed.

        The columns of clicks and events, targets and weights are those of the earlier run, unless
        others are given. The data should contain all interactions that count: interactions that
        only earlier data had are gradually forgotten. Files are read as before, unless columns are
        named.

        Raises:
          ValueError: settings contradict each other, or do not apply to this kind of model.
        """
        if is_file(asked.data):
            names = self._reading.given - asked.given
            before = {name: getattr(self._reading, name) for name in names}
            asked = asked.replaced(**before).noting(given=asked.given | names)
        training = asked.as_type(
            Training, config=self.settings.network, origin=self.directory
        )
        new = Run._trained(training)
        self._kept, self._reading = new._kept, new._reading

    @property
    def directory(self) -> pathlib.Path:
        """The folder of the run. A temporary folder is removed with this object."""
        return pathlib.Path(self._kept.directory)

    @property
    def settings(self) -> Settings:
        """The settings with which the model was trained."""
        return self._kept.settings

    @property
    def model(self) -> Any:
        """The trained model."""
        return self._kept.model()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the model, with its state after training."""
        return self._kept.modules()[1]

    @property
    def history(self) -> list[dict[str, float]]:
        """The training history, an entry for each epoch, as `fit` returned it."""
        return self._kept.history()

    @property
    def known(self) -> Any:
        """The names of the items; for clicks, and histories with event columns, a data set without
        rows.
        """
        return self._kept.known

    @property
    def _kind(self) -> Kind:
        return self.settings.kind

    @takes(Evaluate)
    def evaluate(self, asked: Evaluate) -> Mapping[str, float]:
        """Measures how well the model finds held-out items, or predicts clicks; see `evaluate`.

        Raises:
          ValueError: `inputs` are needed, or nothing is held out. An argument does not match the
              model or another argument, or does not apply to this kind of data.
        """
        asked.check_kind(self._kind.name)
        asked = asked.replaced(inputs=self._kept.inputs("evaluate", asked.inputs))
        return uses.measured(asked, self._reading, self._kept)

    @takes(Recommend)
    def recommend(self, asked: Recommend) -> Recommendations:
        """Recommends items to rows; names are included, see `Recommendations.names`.

        >>> run = Run.train(train, num_epochs=1)
        >>> found = run.recommend(["train-10006", "train-10008"], k=3)
        >>> [len(names) for names in found.names()]
        [3, 3]

        Raises:
          ValueError: a row name is unknown, `inputs` are needed, or the model is of clicks, for
              which there is `predict`.
        """
        users = [asked.users] if isinstance(asked.users, str) else asked.users
        asked = asked.replaced(
            inputs=self._kept.inputs("recommend", asked.inputs), users=users
        )
        rows, found = uses.recommended(asked, self._reading, self._kept)
        return found.named(rows, item_names(self.known))

    def predict(self, examples: Any) -> Any:
        """Predicts the probability of a click for each example, `[examples]` float32.

        With several labels, returns a dict with the predictions of each label, see
        `sparsejax.predict`.

        Args:
          examples: a file with the same columns, labels being optional; or a `ClickDataset`.

        Raises:
          ValueError: the model is not of clicks.
        """
        return self._kind.probabilities(examples, self._reading, self._kept)

    def similar(self, items: Sequence[str], k: int = 10) -> Recommendations:
        """Finds the most similar items of each item, with their names and cosines.

        Args:
          items: names of items.
          k: number of similar items for each item.

        Raises:
          ValueError: an item is unknown, or the model is of clicks.
        """
        if not self._kind.ranks_items:
            raise ValueError("a model of clicks has no items")
        items = [items] if isinstance(items, str) else items
        found = similar_items(self.model, items, k, names=self.known)
        return found.named(items, item_names(self.known))

    @takes(Report)
    def report(self, asked: Report) -> None:
        """Writes an HTML page about the run, see `write_report`."""
        asked.check_kind(self._kind.name)
        if asked.inputs is None and self._kind.ranks_items:
            asked = asked.replaced(inputs=self._kept.data)
        title, about = self.settings.data, (asked, self._reading, self._kept)
        uses.report(asked.path, title, *about)

    @takes(Export)
    def export(self, asked: Export) -> None:
        """Writes a predictor, including the names of the items, see `export_predictor`.

        The file also contains an example with its answer, which a service compares with its own
        answer.
        """
        asked.check_kind(self._kind.name)
        uses.export(asked, self._reading, self._kept)


class _Kept(Folder):
    """A run folder that restores its model and optimizer only once."""

    def modules(self, ahead: Ahead | None = None) -> tuple[Any, Optimizer]:
        if "_modules" not in vars(self):
            vars(self)["_modules"] = super().modules(ahead)
        return vars(self)["_modules"]


def _model_of(
    data: Any, model: str | None, schema: ClickSchema | EventSchema | None
) -> str:
    """The name of the model to train: the given one, or the default for the data.

    Raises:
      ValueError: the model name is unknown.
    """
    if model is None:
        if isinstance(schema, EventSchema):
            raise ValueError(
                "schema=EventSchema(...) is for models of histories, which read columns of "
                "events: give model='sasrec', 'hstu' or 'gru', or a configuration of one"
            )
        return kind_of(data if schema is None else schema).default_model
    if model not in MODELS:
        raise ValueError(f"model={model!r} is not one of {', '.join(MODELS)}")
    return model


def _check_config(config: Any, model: str | None) -> None:
    """Raises an error if `config` is no configuration, or is the configuration of another model
    than `model`.
    """
    if not isinstance(config, Config):
        raise TypeError(
            "config is a NetworkConfig, or the configuration of another model, got "
            f"{type(config).__name__}"
        )
    found = getattr(config, "model", DEFAULT_MODEL)
    if model not in (None, found):
        raise ValueError(f"model={model!r}: config describes {found}; leave one out")


def _check_columns(training: Training) -> None:
    """Raises ValueError if options for reading a file are given with data in memory."""
    if is_file(training.data):
        return
    is_table = hasattr(training.data, "__arrow_c_stream__")
    of_files = {"format", "delimiter", "skip_bad_lines"}
    names = Reading.option_names()
    for name in sorted(
        training.given
        & (of_files if is_table else names - {"indicator", "user_features"})
    ):
        what = "a table" if is_table else "a data set, which has been read"
        raise ValueError(f"{name} is of no use for {what}: leave it out")


def _with_table[T: Reading](options: T, known: Any) -> T:
    """Options whose table of users has been read, with known categories having their ids."""
    if (given := options.user_features) is None:
        return options
    users = users_in(given, getattr(known, "users", None), options)
    return options.replaced(user_features=users)


def _check_temporary(training: Training) -> None:
    """Raises ValueError if a training needs a folder that the caller must name."""
    if training.resume:
        raise ValueError("resume=True needs the directory of the run")
    if jax.process_count() > 1:
        raise ValueError(
            "name the directory of the run: several processes share it on one file system"
        )


def _shown(source: Source) -> Any:
    """The training data for later recommendations; None if it is on disk."""
    in_memory = SparseDataset | SequenceDataset | ClickDataset
    return source.everything if isinstance(source.everything, in_memory) else None
