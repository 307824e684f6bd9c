"""A run: a model with its optimizer, its vocabulary, its history and its data."""

from __future__ import annotations

import functools
import inspect
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from sparsejax.codec import ModelConfig
from sparsejax.data import ClickDataset, SequenceDataset, SparseDataset
from sparsejax.data.files.columns import BY_NAME, Column, TimeColumn
from sparsejax.data.reading.item_titles import read_titles
from sparsejax.data.sets.click_schema import ClickSchema
from sparsejax.embeddings.config import Unknown
from sparsejax.embeddings.row_codes import TableDtype
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.kinds.kind import kind_of, used
from sparsejax.mesh import processes
from sparsejax.nn.config import NetworkConfig
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.runs import folders, kind, training
from sparsejax.runs.folders import Folder, Settings
from sparsejax.runs.kind import CORRECTING, Ahead, Runs, Source
from sparsejax.runs.models import DEFAULT_MODEL, MODELS
from sparsejax.runs.options import (
    Correcting,
    Measuring,
    Reading,
    Recommending,
    Training,
)
from sparsejax.runs.reading import is_file
from sparsejax.verbs.export import export_with_answer
from sparsejax.verbs.vectors import similar_items
from sparsejax.whole_files import whole_folder

_Path = str | os.PathLike[str]
# Arguments of `Run.train` that a run which goes on has already.
_OF_MODEL = "model", "config", "schema", "dynamic"
# The model of clicks that is trained unless another one is named.
_OF_CLICKS = "dlrm"
# Arguments of `Run.train` and `Run.load` that say how files are read.
_READING = (
    *("format", "user", "item", "value", "time"),
    *("delimiter", "separator", "time_format", "indicator", "skip_bad_lines"),
)


class Run:
    """A trained model with all that belongs to it, by names: one call is one command.

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

    `Run.train` does what `sparsejax train` does, to the bit, and its folder is that of the
    command: each reads what the other wrote. To write a loop of your own, use `build`, `fit`
    and the others.
    """

    def __init__(self, kept: _Kept, reading: Reading):
        """Use `train` or `load`."""
        self._kept, self._reading = kept, reading

    def __repr__(self) -> str:
        model = getattr(self.settings.network, "model", DEFAULT_MODEL)
        return (
            f"Run({model}, {self.settings.num_features:,} features, "
            f"{len(self.history)} epochs, {str(self.directory)!r})"
        )

    @classmethod
    def train(
        cls,
        data: Any,
        directory: _Path | None = None,
        *,
        model: str | None = None,
        config: NetworkConfig | ModelConfig | None = None,
        schema: ClickSchema | None = None,
        dynamic: int | None = None,
        validation: Any = None,
        k: int | None = None,
        patience: int | None = None,
        negatives: int | None = None,
        optimizer: str | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        warmup_epochs: float = 0.0,
        decay: Literal["cosine", "none"] | None = None,
        batch_size: int | None = None,
        num_epochs: int | None = None,
        chunk_rows: int | None = None,
        follow: bool = False,
        changes: _Path | None = None,
        export_seconds: float | None = None,
        item_features: Any = None,
        fused: bool = False,
        deterministic: bool = False,
        seed: int = 0,
        checkpoint_seconds: float = 30.0,
        resume: bool = False,
        format: str | None = None,
        user: Column = None,
        item: Column = None,
        value: Column = None,
        time: TimeColumn = BY_NAME,
        delimiter: str | None = None,
        separator: str | None = None,
        time_format: str | None = None,
        indicator: bool = False,
        skip_bad_lines: bool = False,
        log: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> Run:
        """Trains a model, by the settings that suit most data.

        Args:
          data: a file, a folder or an address, see `read`; a table of polars, pandas or
            Arrow; or a data set. Histories are a `SequenceDataset`, or what
            `read_sequences` takes; clicks a `ClickDataset`, or what `read_clicks` takes.
          directory: a new folder for the run. Without one the run is kept in a temporary
            folder until it is saved.
          model: "autoencoder" learns which items go together, and is the default. It sees
            neither order nor repeats, also of histories. "sasrec",
            "hstu" and "gru" learn what comes next in histories. "dlrm", the default for
            clicks, "dcn", "deepfm" and "wide_deep" predict clicks.
          config: the configuration of the model, in place of one that suits the data.
          schema: what the columns of a file of clicks are.
          dynamic: of clicks with a `KeyColumn`, how many rows the dynamic table of each has. A
            `config` also says which ids they keep, see `DynamicTables`.
          validation: what to measure after each epoch: a file or data of held-out entries; a
            share to hold out of the data, such as .1; or "last", the last entry of each row
            by time. The model is then that of the best epoch.
          k: cut-off of the validation metrics of items; 20 by default.
          patience: stop when nDCG, or of clicks AUC, has not risen for so many epochs.
          negatives: of histories, the loss is over so many items, drawn for each batch.
          optimizer: name of the optimizer, see `sparsejax.optimizers.get`.
          learning_rate: the highest learning rate; .002 by default, of clicks .005.
          weight_decay: of `adamw`, `sgd`, `momentum` and `nesterov`; of clicks by default
            4 (12,000 / examples)^(1/3), but at most 5; up to 8 for many rare categories.
          warmup_epochs: epochs over which the learning rate rises.
          decay: "cosine", the default, lets the learning rate fall to 0 at the last epoch;
            "none" keeps it, as `follow` does.
          batch_size: rows a step; 512 by default, of histories 256, of clicks the power of 2
            that is nearest to the root of the number of examples, 64 to 4,096.
          num_epochs: passes over the data; by default as `sparsejax.training.recipe` has it.
          chunk_rows: read a Parquet file while training, so many rows at a time.
          follow: of clicks with dynamic tables: train on each file of a folder or a store once,
            in the order of their names, and on those that come later, until Ctrl-C (of the
            command also SIGTERM). Then the run is returned. The learning rate stays.
          changes: with `follow`, folder to which `export_changes` writes what has changed.
          export_seconds: between two exports of changes; 60 by default.
          item_features: what the items are: a file or a table, see `read_item_features`, or
            `ItemFeatures`. Items that are in no event are recommended, too.
          fused: see `fit`; so are `deterministic`, `seed`, `checkpoint_seconds` and `log`.
          resume: go on from the last checkpoint in `directory`.
          format: of files, see `read`; so are `user`, `item`, `value`, `time`, `delimiter`,
            `separator`, `time_format`, `indicator` and `skip_bad_lines`. The methods of the
            run read further files alike.

        Raises:
          DataError: a file cannot be read.
          FileExistsError: the directory exists, and holds something.
          ValueError: settings do not go together, or are of no use for this kind of model.
        """
        given = {n: v for n, v in locals().items() if n not in ("cls", "data", "log")}
        if config is None:
            name = _model_of(data, model, schema)
            config, suited = kind.called(MODELS[name]).described(name)
        else:
            suited = ()
            _check_config(config, model)
        return cls._trained(given, data, config, suited, None, log)

    @classmethod
    def _trained(
        cls,
        given: Mapping[str, Any],
        data: Any,
        config: Any,
        suited: Collection[str],
        origin: pathlib.Path | None,
        log: Callable[[int, Mapping[str, float]], None] | None,
    ) -> Run:
        """A new run, by arguments of `train`; of those left out the defaults count."""
        runs = kind.runs_of(config)
        options = _changed("train", given)
        runs.check("train", options.keys())
        _check_columns(data, options.keys())
        reading = Reading(**{n: options.pop(n) for n in _READING if n in options})
        directory = options.pop("directory", None)
        for name in ("model", "config"):
            options.pop(name, None)
        config = runs.with_negatives(
            config, options.pop("negatives", None), origin is not None
        )
        config = runs.with_dynamic(config, options.pop("dynamic", None))
        asked = Training(
            data=data,
            config=config,
            suited=suited,
            origin=origin,
            reading=reading,
            **options,
        )
        owned = directory is None
        if owned:
            _check_temporary(asked)
            directory = tempfile.mkdtemp(prefix="sparsejax-run-")
        report = None if log is None else (lambda _, step, entry: log(step, entry))
        try:
            source = training.train(pathlib.Path(directory), asked, log=report)
            opened = Folder.of(directory)
        except BaseException:
            if owned:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        return cls(_Kept(opened, _shown(source), owned=owned), reading)

    @classmethod
    def load(
        cls,
        directory: _Path,
        *,
        format: str | None = None,
        user: Column = None,
        item: Column = None,
        value: Column = None,
        time: TimeColumn = BY_NAME,
        delimiter: str | None = None,
        separator: str | None = None,
        time_format: str | None = None,
        indicator: bool = False,
        skip_bad_lines: bool = False,
    ) -> Run:
        """A run that `save`, `train` or `sparsejax train` has written.

        Its data is not there: what the model is shown is given as `inputs`.

        Args:
          directory: the folder.
          format: how the methods of the run read files, see `read`; so are the others.

        Raises:
          ValueError: this is not a run folder, or it is damaged.
        """
        given = {n: v for n, v in locals().items() if n in _READING}
        return cls(_Kept(Folder.of(pathlib.Path(directory))), Reading(**given))

    def save(self, directory: _Path) -> None:
        """Writes the run to a folder, whole or not at all.

        Args:
          directory: the folder, which must be new.

        Raises:
          FileExistsError: it exists.
        """
        directory = pathlib.Path(directory)

        def copy() -> None:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(directory) as new:
                shutil.copytree(self.directory, new, dirs_exist_ok=True)

        processes.in_first(copy)

    def train_more(
        self, data: Any, directory: _Path | None = None, **options: Any
    ) -> None:
        """Trains the model on: this run becomes that of the new training.

        Items, and categories of clicks, that the model does not know are added behind those
        that it knows, and no known row moves before training. A new category of clicks begins
        as a copy of the unknown one. The optimizer goes on with its state if it is of the same
        kind and its learning rate is constant, else it begins anew. The folder of the run so
        far stays as it is.

        Args:
          data: as for `train`; columns of clicks are those of the run. It should hold all
            interactions that count: what only earlier data had is gradually forgotten.
          directory: as for `train`.
          options: arguments of `train`, except `model`, `config`, `schema` and `dynamic`. Files
            are read as before, unless columns are named.

        Raises:
          TypeError: `train` has no such argument.
          ValueError: see `train`.
        """
        for name in options:
            if name not in _defaults("train") or name in _OF_MODEL:
                raise TypeError(f"train_more() has no argument {name!r}")
        log = options.pop("log", None)
        given = {"directory": directory, **options}
        if is_file(data):
            given = self._reading.columns() | given
        config = self.settings.network
        new = Run._trained(given, data, config, (), self.directory, log)
        self._kept, self._reading = new._kept, new._reading

    @property
    def directory(self) -> pathlib.Path:
        """The folder of the run. If none was named, it is removed with the run."""
        return pathlib.Path(self._kept.opened.directory)

    @property
    def settings(self) -> Settings:
        """How the model was trained."""
        return self._kept.settings

    @property
    def model(self) -> Any:
        """The model, ready for use."""
        return self._kept.modules[0]

    @property
    def optimizer(self) -> Optimizer:
        """The model's optimizer, as it was after training."""
        return self._kept.modules[1]

    @property
    def history(self) -> list[dict[str, float]]:
        """An entry for each epoch, as `fit` returned it."""
        return self._kept.opened.history()

    @property
    def known(self) -> Any:
        """The names of the items; of clicks a `ClickDataset` without examples."""
        return self._kept.known

    @property
    def _runs(self) -> Runs:
        return self.settings.runs

    def evaluate(
        self,
        heldout: Any = None,
        *,
        inputs: Any = None,
        history: Collection[Any] = (),
        fold_in: float | None = None,
        seed: int | None = None,
        candidates: Any = None,
        popularity: Any = None,
        baselines: bool = False,
        groups: str | None = None,
        by: Literal["entries"] | None = None,
        k: int | Sequence[int] | None = None,
        unknown: Literal["miss", "skip"] = "miss",
        unknown_users: Literal["count", "skip"] = "count",
        exclude_seen: bool = True,
        exclude_items: Collection[str] = (),
        only_items: Collection[str] | None = None,
        keep_rows: bool = False,
        calibrate: Any = None,
        method: Literal["platt", "isotonic"] | None = None,
        negatives_kept: float | None = None,
    ) -> Mapping[str, float]:
        """How well the model finds held-out items, or predicts clicks; see `evaluate`.

        Args:
          heldout: a file, a table or data that the model should find; of clicks the examples
            to measure on.
          inputs: what the model is shown; by default what it was trained on.
          history: more of what it is shown.
          fold_in: in place of `heldout`, see `evaluate`.
          seed: see `evaluate`; so are `candidates`, `unknown` and `unknown_users`.
          popularity: what the baseline counts, by default `inputs`.
          baselines: also measure nearest items and EASE.
          groups: of clicks, a column of categories: also measure the AUC within each.
          by: "entries" measures items with few and with many entries apart, see `evaluate`.
          k: cut-off, or several; 20 by default.
          exclude_seen: do not rank what a row has in `inputs`.
          exclude_items: names of items that nobody is recommended, see `evaluate`.
          only_items: names of the only items that are ranked.
          keep_rows: keep the figures of each row, for `compare`.
          calibrate: of clicks, examples by which the probabilities are corrected first, see
            `calibrate`; so are `method` and `negatives_kept`.

        Raises:
          ValueError: see `evaluate`; or `inputs` are needed.
        """
        given = {n: v for n, v in locals().items() if n != "self"}
        inputs = self._inputs("evaluate", inputs)
        return self._runs.evaluate(
            self._measuring("evaluate", given, inputs), self._kept
        )

    def recommend(
        self,
        users: Sequence[str] | None = None,
        k: int = 10,
        *,
        inputs: Any = None,
        exclude_seen: bool = True,
        exclude: Any = None,
        exclude_items: Collection[str] = (),
        only_items: Collection[str] | None = None,
    ) -> Recommendations:
        """The best items for rows, with their names: see `Recommendations.names`.

        >>> run = Run.train(train, num_epochs=1)
        >>> found = run.recommend(["train-10006", "train-10008"], k=3)
        >>> [len(names) for names in found.names()]
        [3, 3]

        Args:
          users: names of rows, in any order; all rows by default.
          k: items a row.
          inputs: the rows, also of new users; by default what the model was trained on. Lists
            of names of items will do, such as `[["tea", "milk"], ["rye"]]`, in their order.
          exclude_seen: do not recommend what a row has in `inputs`.
          exclude: a file, a table or data: do not recommend what a row has there.
          exclude_items: names of items that nobody is recommended, such as those sold out.
          only_items: names of the only items that are recommended.

        Raises:
          ValueError: there is no such row, or `inputs` are needed; the model is of clicks,
            for which there is `predict`.
        """
        if self._runs.name == "clicks":
            raise ValueError("a model of clicks has no items to rank: use predict")
        recommending = Recommending(
            inputs=self._inputs("recommend", inputs),
            users=[users] if isinstance(users, str) else users,
            k=k,
            keep_seen=not exclude_seen,
            exclude=exclude,
            exclude_items=exclude_items,
            only_items=only_items,
            reading=self._reading,
        )
        rows, found = self._runs.recommend(recommending, self._kept)
        return found.named(rows, self.known)

    def predict(self, examples: Any) -> np.ndarray:
        """The probability of a click of each example, `[examples]` float32.

        Args:
          examples: a file of the same columns, which needs no labels; or a `ClickDataset`.

        Raises:
          ValueError: the model is not of clicks.
        """
        if self._runs.name != "clicks":
            raise ValueError(f"a model of {self._runs.name} ranks items: use recommend")
        recommending = Recommending(inputs=examples, reading=self._reading)
        return self._runs.recommend(recommending, self._kept)[1]

    def similar(self, items: Sequence[str], k: int = 10) -> Recommendations:
        """The most similar items of each item, with their names and cosines.

        Args:
          items: names of items.
          k: similar items for each.

        Raises:
          ValueError: there is no such item, or the model is of clicks.
        """
        if self._runs.name == "clicks":
            raise ValueError("a model of clicks has no items")
        items = [items] if isinstance(items, str) else items
        found = similar_items(self.model, items, k, names=self.known)
        return found.named(items, self.known)

    def report(
        self,
        path: _Path,
        heldout: Any = None,
        *,
        inputs: Any = None,
        groups: str | None = None,
        k: int | Sequence[int] | None = None,
        unknown: Literal["miss", "skip"] = "miss",
        unknown_users: Literal["count", "skip"] = "count",
        exclude_seen: bool = True,
        titles: Any = None,
    ) -> None:
        """Writes an HTML page about the run, see `write_report`.

        Args:
          path: the file.
          heldout: as for `evaluate`, whose metrics the page then shows; so are the others.
          titles: what to show for the names of items: a dict; or a file or a table, whose
            first column has the names and whose second one has the titles.
        """
        given = {n: v for n, v in locals().items() if n not in ("self", "path")}
        from sparsejax.runs.report import write_report

        if inputs is None and self._runs.name != "clicks":
            inputs = self._kept.data
        measuring = self._measuring("report", given, inputs)
        write_report(
            path,
            history=self.history,
            title=self.settings.data,
            settings=self.settings.described(),
            titles=None if titles is None else read_titles(titles),
            **self._runs.report(measuring, self._kept),
        )

    def export(
        self,
        path: _Path,
        *,
        k: int | None = None,
        table_dtype: TableDtype | None = None,
        unknown_ids: Unknown | None = None,
        int8: bool = False,
        batch_size: int = 512,
        calibrate: Any = None,
        method: Literal["platt", "isotonic"] | None = None,
        negatives_kept: float | None = None,
    ) -> None:
        """Writes a predictor, see `export_predictor`. It knows the names of the items.

        The file also has an example with its answer, which a service compares with its own.

        Args:
          path: the file.
          k: of items, the most that are recommended to a row; 10 by default.
          table_dtype: of clicks, see `export_predictor`; so is `unknown_ids`.
          int8: of items and histories, see `export_predictor`.
          batch_size: most rows that are scored at a time.
          calibrate: of clicks, examples by which the probabilities are corrected, see
            `calibrate`; so are `method` and `negatives_kept`.
        """
        given = {n: v for n, v in locals().items() if n not in ("self", "path")}
        changed = _changed("export", given)
        self._runs.check("export", changed.keys())
        correcting = Correcting(**_part_of(changed, CORRECTING))
        export_with_answer(
            self._runs.corrected(self._kept, correcting, self._reading),
            path,
            names=self.known,
            item_features=self._kept.opened.item_features(),
            batch_size=batch_size,
            table_dtype=table_dtype,
            unknown_ids=unknown_ids,
            **used(
                self._runs.kind,
                "export_predictor",
                {"k": 10 if k is None else k, "int8": int8},
            ),
        )

    def _measuring(
        self, method: str, given: Mapping[str, Any], inputs: Any
    ) -> Measuring:
        """The arguments of a method, with the `inputs` that are meant."""
        options = _changed(method, given)
        self._runs.check(method, options.keys())
        keep_seen = not options.pop("exclude_seen", True)
        options["inputs"] = inputs
        options.pop("titles", None)
        correcting = Correcting(**_part_of(options, CORRECTING))
        how = {"keep_seen": keep_seen, "correcting": correcting}
        rest = {n: v for n, v in options.items() if n not in CORRECTING}
        return Measuring(**rest, **how, reading=self._reading)

    def _inputs(self, method: str, inputs: Any) -> Any:
        """The data that the model is shown, if that is not the examples to measure on."""
        if inputs is not None or self._runs.name == "clicks":
            return inputs
        if self._kept.data is None:
            raise ValueError(
                f"{method} needs inputs=..., what the model is shown: the data of the "
                "training is not kept with a run"
            )
        return self._kept.data


class _Kept:
    """An opened folder, which restores its modules once.

    Attributes:
      opened: the folder.
      data: what the model was trained on, and what was held out of it; or None.
    """

    def __init__(self, opened: Folder, data: Any = None, *, owned: bool = False):
        self.opened, self.data = opened, data
        self.settings, self.known = opened.settings, opened.known
        if owned:
            directory = os.fspath(opened.directory)
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    @functools.cached_property
    def modules(self) -> tuple[Any, Optimizer]:
        """The model and the optimizer."""
        directory = self.opened.directory
        return folders.restored_modules(directory, self.settings, self.known)

    def model(self, ahead: Ahead | None = None) -> Any:
        """The model that `load_model` returns. Nothing is compiled ahead."""
        return self.modules[0]


def _model_of(data: Any, model: str | None, schema: ClickSchema | None) -> str:
    """The name of the model that is meant.

    Raises:
      ValueError: there is no model of this name.
    """
    if model is None:
        of_clicks = schema is not None or kind_of(data).name == "clicks"
        return _OF_CLICKS if of_clicks else DEFAULT_MODEL
    if model not in MODELS:
        raise ValueError(f"model={model!r} is not one of {', '.join(MODELS)}")
    return model


def _check_config(config: Any, model: str | None) -> None:
    """Raises an error for what is no configuration, or is that of another model."""
    if not isinstance(config, NetworkConfig | ModelConfig):
        raise TypeError(
            "config is a NetworkConfig, or the configuration of another model, got "
            f"{type(config).__name__}"
        )
    found = getattr(config, "model", DEFAULT_MODEL)
    if model not in (None, found):
        raise ValueError(f"model={model!r}: config describes {found}; leave one out")


def _check_columns(data: Any, given: Collection[str]) -> None:
    """Raises ValueError where data that has been read comes with how to read a file."""
    if is_file(data):
        return
    is_table = hasattr(data, "__arrow_c_stream__")
    of_files = "format", "delimiter", "skip_bad_lines"
    unused = of_files if is_table else set(_READING) - {"indicator"}
    for name in _READING:
        if name in given and name in unused:
            what = "a table" if is_table else "a data set, which has been read"
            raise ValueError(f"{name} is of no use for {what}: leave it out")


def _check_temporary(training: Training) -> None:
    """Raises ValueError where a run needs a folder with a name."""
    if training.resume:
        raise ValueError("resume=True needs the directory of the run")
    if jax.process_count() > 1:
        raise ValueError(
            "name the directory of the run: several processes share it on one file system"
        )


def _shown(source: Source) -> Any:
    """The data that a run shows its model later: the data, unless it is on disk."""
    in_memory = SparseDataset | SequenceDataset | ClickDataset
    return source.everything if isinstance(source.everything, in_memory) else None


@functools.cache
def _defaults(method: str) -> dict[str, Any]:
    """The arguments of a method of `Run`, and their defaults."""
    parameters = inspect.signature(getattr(Run, method)).parameters
    return {name: found.default for name, found in parameters.items()}


def _part_of(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The options of these names."""
    return {name: value for name, value in options.items() if name in names}


def _changed(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not what they are by default."""
    defaults = _defaults(method)

    def is_default(name: str, value: Any) -> bool:
        default = defaults[name]
        plain = isinstance(value, str | float | int | tuple)
        return value is default or (plain and value == default)

    return {n: v for n, v in given.items() if not is_default(n, v)}
