"""Reads and writes the folder of a run, which `Run.train` and `sparsejax train` write.

::

    run.json              settings, from which model and optimizer can be built
    vocabulary.parquet    names of the features, in the model's order; for clicks schema and
    categories
    checkpoints/          see `sparsejax.engine.train.checkpoint`
    item_features.parquet content of the items; optional
    regression.npz        regression on all examples, including held-out ones; optional
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pathlib
import shutil
from collections.abc import Generator
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from sparsejax import codec, ending, optimizers
from sparsejax.data import ItemFeatures
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.kinds.kind import Final, Kind, Maker, config_of, kind_of
from sparsejax.kinds.source import Ahead
from sparsejax.kinds.threads import meanwhile
from sparsejax.mesh import kept_programs, processes
from sparsejax.mesh.layout import mesh_is_set, sharding_of
from sparsejax.nn.item_content import ContentSizes
from sparsejax.optimizers.optimizer import Optimizer, compile_flush
from sparsejax.options.training import Recorded
from sparsejax.verbs.build import new_modules, set_linear_part
from sparsejax.whole_files import whole_text_file

VERSION = 1
_SETTINGS, _VOCABULARY, _CHECKPOINTS = "run.json", "vocabulary.parquet", "checkpoints"
_FEATURES, _FINAL = "item_features.parquet", "regression.npz"
_RECORDED = Recorded.option_names()


class Settings(Recorded):
    """The settings of a run: the content of `run.json`.

    The options that it records are `Recorded`.

    Attributes:
      network: configuration of a network, or of a model of histories or clicks.
      optimizer: rule of the optimizer, with its options.
      num_features: number of features in the vocabulary, which are also the items; for clicks the
          number of ids of all columns.
      num_epochs: number of passes over the data.
      batch_size: number of rows in a step.
      indicator: whether the data has no values, or its values are ignored.
      data: name of the data's file, as it was given.
      data_fingerprint: `fingerprint` of the rows read from the file.
      vocabulary_fingerprint: `fingerprint` of the names of the features.
      validation: `fingerprint` of the held-out entries; None if no entries are held out.
      validation_split: share of the data that was held out, or "last"; None if a separate file has
          the held-out entries.
      origin: folder of the earlier run that was trained further, as it was given.
      content: sizes of the content of the items; None without content.
      item_features: `fingerprint` of the content of the items.
    """

    network: codec.Config
    optimizer: optimizers.Rule
    num_features: int
    num_epochs: int
    batch_size: int
    indicator: bool
    data: str
    data_fingerprint: str
    vocabulary_fingerprint: str
    validation: str | None
    validation_split: str | None
    origin: str | None = None
    content: ContentSizes | None = None
    item_features: str | None = None

    @property
    def kind(self) -> Kind:
        """The kind of the model."""
        return kind_of(self.network)

    def build(self, known: Any) -> tuple[Any, Optimizer]:
        """Makes a new model and its optimizer, placed on the current mesh if there is one.

        The arrays of a linear part are set to 0.

        Args:
          known: names of the features, or for clicks a data set without examples, from
            `load_run`.

        Raises:
          ValueError: the configuration is invalid.
        """
        modules = new_modules(self._maker(known), self.optimizer, seed=self.seed)
        _put_where_restored(modules)
        return modules

    def shapes(self, known: Any) -> tuple[Any, Optimizer]:
        """Like `build`, but with shapes in place of arrays. A checkpoint is restored into these.

        Args:
          known: names of the features, or for clicks a data set without examples, from
            `load_run`.

        Raises:
          ValueError: the configuration is invalid.
        """

        def placed(variable: nnx.Variable) -> nnx.Variable:
            sharding = sharding_of(variable.get_metadata().get("out_sharding", P()))
            shape = variable.get_raw_value()
            return variable.replace(
                jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
            )

        make = self._maker(known)
        modules = nnx.eval_shape(lambda: make(rule=self.optimizer, seed=self.seed))
        is_variable = lambda node: isinstance(node, nnx.Variable)
        state = jax.tree.map(placed, nnx.state(modules), is_leaf=is_variable)
        nnx.update(modules, state)
        return modules

    def _maker(self, known: Any) -> Maker:
        like = self.kind.like(known)
        options = {} if self.content is None else {"content": self.content}
        return self.kind.maker(self.network, like, **options)

    def to_json(self) -> dict[str, Any]:
        """The settings as a JSON object, which `from_json` reads."""
        document = {"version": VERSION, **_shallow_dict(self)}
        document["network"] = self.network.to_json()
        if self.content is not None:
            document["content"] = dataclasses.asdict(self.content)
        document["optimizer"] = optimizers.to_json(self.optimizer)
        return document

    @classmethod
    def from_json(cls, document: codec.Json) -> Settings:
        """Reads the document that `to_json` made.

        Raises:
          ValueError: the document is not a valid run, or has another version.
        """
        if not isinstance(document, dict) or "version" not in document:
            raise ValueError("these are not the settings of a run")
        document = codec.without_version(document, VERSION, "the settings of a run")
        if "network" in document:
            document["network"] = config_of(document["network"])
        if "optimizer" in document:
            document["optimizer"] = optimizers.from_json(document["optimizer"])
        read = codec.read(cls, document, "settings")
        for name in ("num_features", "num_epochs", "batch_size", "k"):
            if not 1 <= getattr(read, name) < 2**31:
                raise ValueError(
                    f'settings: "{name}" must be in [1, 2^31), got {getattr(read, name)}'
                )
        return read

    def check_resumes(self, before: Settings) -> None:
        """Checks that a run with the settings `before` can be resumed with these settings.

        Only `num_epochs` may differ: it may be higher.

        Raises:
          ValueError: another setting differs. The message names it.
        """
        if self.num_epochs < before.num_epochs:
            raise ValueError(
                f"cannot resume with {self.num_epochs} epochs: the run was begun with "
                f"{before.num_epochs}, which can only be raised"
            )
        if self.vocabulary_fingerprint != before.vocabulary_fingerprint:
            raise ValueError(
                f"cannot resume with other data: {self.data} has other features than "
                f"{before.data}, with which the run was begun"
            )
        other_validation = self.validation != before.validation
        # If the validation split differs, an unchanged file has other entries to train on.
        splits_otherwise = self.validation_split != before.validation_split
        if self.data_fingerprint != before.data_fingerprint and not (
            other_validation and splits_otherwise
        ):
            raise ValueError(
                f"cannot resume with other data: {self.data} has other entries than "
                f"{before.data} had when the run was begun"
            )
        if other_validation:
            raise ValueError("cannot resume with other validation data, or none")
        ours, theirs = self._settings(), before._settings()
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                if name == "decay_steps" and self.num_epochs > before.num_epochs:
                    raise ValueError(
                        f"cannot resume with {self.num_epochs} epochs: the learning rate "
                        f"of the run falls to 0 by epoch {before.num_epochs}. Train on in "
                        "a new run that goes on from this one (--from, or train_more), or "
                        "begin one with decay=none"
                    )
                raise ValueError(
                    f"cannot resume with {name} {ours.get(name)}: the run was begun "
                    f"with {theirs.get(name)}"
                )

    def described(self) -> dict[str, Any]:
        """All settings as `{name: plain value}`, for display."""
        first = ("data", "validation_split", "num_features", "num_epochs")
        found = {name: getattr(self, name) for name in first} | self._settings()
        useful = self.useful(self.kind.name, Recorded)
        return {n: v for n, v in found.items() if n in useful or n not in _RECORDED}

    def identity(self) -> dict[str, Any]:
        """The settings that identify a checkpoint: all except the number of epochs and paths."""
        names = ("vocabulary_fingerprint", "data_fingerprint", "validation")
        facts = ("num_features", *names)
        return {name: getattr(self, name) for name in facts} | self._settings()

    def _settings(self) -> dict[str, Any]:
        """The settings that must stay equal when training resumes, as plain values by name."""
        facts = ("batch_size", "indicator", "origin", "item_features")
        plain = {name: getattr(self, name) for name in facts}
        plain |= self.values_of(Recorded)
        settings = _settings_of(self.network)
        settings |= {name: value for name, value in plain.items() if value is not None}
        rule = optimizers.to_json(self.optimizer)
        settings |= {"optimizer": rule.pop("name"), **rule, "decay": "none"}
        if isinstance(rate := rule["learning_rate"], dict):
            settings["learning_rate"] = rate.get("peak_value", rate.get("init_value"))
            settings["decay"] = "cosine" if "decay_steps" in rate else "none"
            steps = ("warmup_steps", "decay_steps")
            settings |= {name: rate[name] for name in steps if name in rate}
        return settings


def _settings_of(network: Any) -> dict[str, Any]:
    if isinstance(network, codec.ModelConfig):
        settings = {"model": network.model, **_shallow_dict(network)}
        if settings.get("dynamic") is not None:
            dynamic = codec.document(settings["dynamic"])
            del dynamic["host_path"]  # the folder of files does not affect results
            settings["dynamic"] = dynamic
        return settings
    settings = {"loss": network.loss, **dict(network.loss_options)}
    settings |= {"precision": network.precision or "default"}
    for layer in network.layers:
        settings |= {f"{layer.name} {n}": v for n, v in _shallow_dict(layer).items()}
    if network.linear is not None:
        settings |= {f"linear {n}": v for n, v in vars(network.linear).items()}
    return settings


def load_run(directory: str | pathlib.Path) -> tuple[Settings, Any]:
    """Reads the settings of a run folder, and the features by which other data is read.

    These are the names of the features, or for clicks a data set without examples.

    Raises:
      ValueError: the folder is not a run folder, or is damaged.
    """
    directory = pathlib.Path(directory)
    run = load_settings(directory)
    known = run.kind.load_known(directory / _VOCABULARY)
    if (count := run.kind.num_known(known)) != run.num_features:
        raise ValueError(
            f"{directory / _SETTINGS}: states {run.num_features:,} features, but "
            f"{_VOCABULARY} has {count:,}"
        )
    if run.kind.fingerprint_of(known) != run.vocabulary_fingerprint:
        raise ValueError(
            f"{directory / _VOCABULARY}: is not the vocabulary of this run"
        )
    return run, known


@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    """A run folder that was read. It keeps no modules, so that commands can free their memory.

    Attributes:
      directory: path of the folder.
      settings: its settings.
      known: names of the features, or for clicks a data set without examples, from `load_run`.
      data: the data that the model was trained on, and the held-out part; None if not in memory.
    """

    directory: str | pathlib.Path
    settings: Settings
    known: Any
    data: Any = None

    @classmethod
    def of(cls, directory: str | pathlib.Path, data: Any = None) -> Self:
        """Reads a folder. Raises ValueError if it is not a run folder, or is damaged."""
        return cls(directory, *load_run(directory), data)

    def model(self, ahead: Ahead | None = None) -> Any:
        """The model that `load_model` returns; see `restored_modules`."""
        return self.modules(ahead)[0]

    def modules(self, ahead: Ahead | None = None) -> tuple[Any, Optimizer]:
        """The model and the optimizer; see `restored_modules`."""
        return restored_modules(self, ahead)

    def validated_model(self) -> Any:
        """The model that was measured on held-out data, without the part fitted on all data."""
        return restored_modules(self, final=False)[0]

    def item_features(self) -> ItemFeatures | None:
        """The content of the items; None if they have none.

        Raises:
          ValueError: the run has content, but the file is missing or belongs to another run.
        """
        if self.settings.content is None:
            return None
        path = pathlib.Path(self.directory) / _FEATURES
        features = ItemFeatures.load(path)
        if features.fingerprint() != self.settings.item_features:
            raise ValueError(f"{path}: is not the content of this run")
        return features

    def history(self) -> list[dict[str, float]]:
        """The history that `fit` returned."""
        progress = checkpoints_of(self.directory, self.settings).progress() or {}
        return progress.get("history", [])

    def inputs(self, method: str, inputs: Any) -> Any:
        """The data that the model reads: `inputs`, or by default the training data."""
        if inputs is not None or not self.settings.kind.ranks_items:
            return inputs
        if self.data is None:
            raise ValueError(
                f"{method} needs inputs=..., what the model is shown: the data of the "
                "training is not kept with a run"
            )
        return self.data


def load_settings(directory: pathlib.Path) -> Settings:
    """The settings of a run, without its vocabulary; raises the errors of `load_run`."""
    path = directory / _SETTINGS
    if not path.is_file():
        raise ValueError(
            f"{directory}: is not a run folder, it has no {_SETTINGS}; train a model "
            "first"
        )
    return codec.load(path, Settings.from_json)


def load_model(directory: str | pathlib.Path) -> tuple[Any, Any]:
    """Loads the trained model of a run folder and its feature names.

    With validation data this is the model of the best epoch, otherwise that of the newest
    checkpoint. A damaged checkpoint is skipped with a `CheckpointWarning`. The model is a
    `FeedForward`, or a `SequenceModel`, for which `read_sequences` reads data. For clicks it is a
    `DLRM` or another click model, and the second result is a `ClickDataset` without examples, for
    `read_clicks(path, known.schema, features=known)`.

    >>> model, names = load_model("run/")
    >>> data = read("purchases.tsv", features=names)
    >>> recommend(model, data, k=1, exclude=data).names(names)
    [['tea'], ['milk'], ...]

    Raises:
      ValueError: the folder is not a run folder, or has no readable checkpoint.
    """
    run = Folder.of(directory)
    return run.model(), run.known


def continued(
    earlier: Folder, settings: Settings, data: Any, everything: Any = None
) -> tuple[Any, Optimizer, bool, Final | None]:
    """Prepares the model of an earlier run for further training, with rows for new items or ids.

    It starts from the trained model that `load_model` returns. A linear part is computed from the
    new data.

    Args:
      earlier: the earlier run.
      settings: settings of the new run, which has at least as many features.
      data: data to train on, with the features of the new run.
      everything: all data, including held-out data; None if nothing is held out.

    Returns:
      The model; the optimizer; whether the optimizer has the state of the earlier one; and the
      result of `Kind.prepare`. The optimizer has the state if both rules are of the same kind,
      neither's learning rate depends on the step, and both losses are over all items or over
      equally many negatives.

    Raises:
      ValueError: the folder has no readable checkpoint.
    """
    directory, run, known = earlier.directory, earlier.settings, earlier.known
    model, before = run.shapes(known)
    if checkpoints_of(directory, run).restore((model, before), best=True) is None:
        raise ValueError(f"{directory}: holds no checkpoint to begin from")
    before.flush(model, deterministic=run.deterministic)
    rule, rules = settings.optimizer, (settings.optimizer, run.optimizer)
    kept = type(rule) is type(run.optimizer) and not any(
        callable(rule.learning_rate) for rule in rules
    )
    if hasattr(settings.network, "negatives"):
        negatives = settings.network.negatives
        kept &= negatives == model.config.negatives
        model.set_negatives(negatives)
    settings.kind.add_new(model, known, data, before if kept else None)
    if kept:
        before.rule = rule
    optimizer = before if kept else Optimizer(model, rule, seed=settings.seed)
    set_linear_part(model, data)
    part = pathlib.Path(directory) / _FINAL
    how = {"earlier": part if part.exists() else None}
    final = settings.kind.prepare(model, data, everything, **how)
    _put_where_restored((model, optimizer))
    return model, optimizer, kept, final


def _put_where_restored(modules: tuple[Any, Optimizer]) -> None:
    """Commits the arrays to their device, in place, as arrays restored from a checkpoint are.

    JAX compiles a program separately for committed arrays, for uncommitted arrays and for each
    mixture. With committed arrays, training, its resume and later commands share compiled
    programs. On a mesh all arrays are committed already.
    """
    if not mesh_is_set():
        nnx.update(modules, jax.device_put(nnx.state(modules), sharding_of(P())))


def restored_modules(
    opened: Folder, ahead: Ahead | None = None, *, final: bool = True
) -> tuple[Any, Optimizer]:
    """The model that `load_model` returns, and its optimizer.

    Args:
      opened: the run.
      ahead: function that lowers the program that the model will run, and returns a function that
          compiles it. If it saves time, this runs in another thread while the checkpoint is read.
          The model passed to it has shapes in place of arrays.
      final: whether the part that was fitted on all data is loaded into the model.
    """
    directory, run, known = opened.directory, opened.settings, opened.known
    checkpoints = checkpoints_of(directory, run)
    model, optimizer = run.shapes(known)
    model.eval()
    if kept_programs.may_compile_beside():
        # Threads that run Python slow each other down, so the longest lowering starts first.
        if ahead is not None:
            # This import, needed by tracing and loading, runs while files are read.
            importlib.import_module("jax.experimental.pallas.mosaic_gpu")
            meanwhile(ahead(nnx.clone(model)))
        compile_beside((model, optimizer), run)
    if checkpoints.restore((model, optimizer), best=True) is None:
        raise ValueError(
            f"{directory}: holds no checkpoint yet; train it with resume=True"
        )
    optimizer.flush(model, deterministic=run.deterministic)
    if final and (part := pathlib.Path(directory) / _FINAL).exists():
        run.kind.set_final(model, part)
    return model, optimizer


def compile_beside(modules: tuple[Any, Optimizer], run: Settings) -> None:
    """Compiles, in other threads, the programs that save and restore the modules of a run.

    The modules may have shapes in place of arrays. Call it only if
    `kept_programs.may_compile_beside` is true.
    """
    model, optimizer = modules
    for compiling in (
        *compile_flush(optimizer, model, deterministic=run.deterministic),
        Checkpoints.compile_checksums(modules),
    ):
        meanwhile(compiling)


def checkpoints_of(directory: str | pathlib.Path, run: Settings) -> Checkpoints:
    """The checkpoints of a run folder."""
    identity = run.identity()
    return Checkpoints(pathlib.Path(directory) / _CHECKPOINTS, identity=identity)


def has_checkpoints(directory: str | pathlib.Path) -> bool:
    """Whether a folder has a checkpoint from which training can resume."""
    return bool(Checkpoints(pathlib.Path(directory) / _CHECKPOINTS).steps())


@contextlib.contextmanager
def begun(
    directory: str | pathlib.Path,
    run: Settings,
    known: Any,
    *,
    resume: bool,
    features: ItemFeatures | None = None,
    final: Final | None = None,
) -> Generator[Checkpoints]:
    """Starts or resumes a run, and locks its folder against other trainings while the context is
    open.

    Makes the folder if it does not exist. If an error or an interrupt ends training before the
    first checkpoint, removes the files that it made.

    Args:
      directory: path of the folder.
      run: settings of the run.
      known: names of the features, or for clicks a data set without examples, from `load_run`.
      resume: whether to continue if the folder exists. As long as it has no checkpoint, nothing
          was trained, so its settings may be replaced.
      features: content of the items, or None.
      final: function that writes the part that is fitted on all data, or None.

    Yields:
      The checkpoints of the run.

    Raises:
      FileExistsError: the folder exists and `resume` is False.
      ValueError: the folder is not a run folder, or its run has other settings or data.
      BlockingIOError: another training uses the folder.
    """
    directory = pathlib.Path(directory)
    check = functools.partial(check_folder, directory, resume=resume)
    processes.in_first(check)
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    with processes.alone_in(directory):
        processes.in_first(check)  # another training may have ended meanwhile
        checkpoints = checkpoints_of(directory, run)
        steps, before = checkpoints.steps(), None
        if steps:
            before = load_settings(directory)
            run.check_resumes(before)

        def write(settings: Settings):
            with whole_text_file(directory / _SETTINGS) as file:
                file.write(codec.text(settings.to_json(), indent=2) + "\n")

        def make():
            run.kind.like(known).save(directory / _VOCABULARY)
            if features is not None:
                features.save(directory / _FEATURES)
            if not steps:
                # This file may exist if an earlier training was killed.
                (directory / _FINAL).unlink(missing_ok=True)
                if final is not None:
                    final(directory / _FINAL)
            write(run)

        def undo():
            """Removes the new files, unless there is a checkpoint."""
            if not processes.is_first():
                return
            if before is not None and checkpoints.steps() == steps:
                with contextlib.suppress(OSError):  # the first error is reported
                    write(before)
            if new and not checkpoints.steps():
                shutil.rmtree(directory, ignore_errors=True)
                # `rmdir` fails if another training has put files into the folder meanwhile.
                with contextlib.suppress(OSError):
                    for parent in new[1:]:
                        parent.rmdir()

        with ending.undone_by(undo):
            try:
                processes.in_first(make)
                if processes.is_true_anywhere(not (directory / _SETTINGS).is_file()):
                    raise ValueError(
                        f"{directory}: is not the same folder for all processes; name one "
                        "on a file system that they share"
                    )
                yield checkpoints
            except BaseException:
                undo()  # training was rejected, interrupted, or failed
                raise


def check_folder(directory: str | pathlib.Path, *, resume: bool) -> None:
    """Checks that a run can be started or resumed in a folder.

    Raises:
      FileExistsError: the folder exists, is not empty, and `resume` is False.
      ValueError: the folder has other files than those of a run.
    """
    directory = pathlib.Path(directory)
    if not directory.exists():
        return
    # Names that begin with a dot may be temporary files of a killed process.
    holds = set()
    if directory.is_dir():
        holds = {path.name for path in directory.iterdir() if path.name[0] != "."}
    if not resume and (holds or not directory.is_dir()):
        raise FileExistsError(
            f"{directory}: exists; to continue its training pass resume=True, otherwise "
            "name another folder"
        )
    if not directory.is_dir():
        raise ValueError(f"{directory}: is not a folder")
    other = holds - {_SETTINGS, _VOCABULARY, _CHECKPOINTS, _FEATURES, _FINAL}
    if other and not (directory / _SETTINGS).exists():
        raise ValueError(f"{directory}: is not a run folder, it holds {min(other)}")


def _shallow_dict(instance: Any) -> dict[str, Any]:
    return {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance)}
