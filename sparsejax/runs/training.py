"""Trains a model into a run folder."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from sparsejax import optimizers
from sparsejax.callers import warn_caller
from sparsejax.engine.train.dispatch import Dispatch, Epochs, Program
from sparsejax.engine.train.progress import EarlyStopping
from sparsejax.kinds.content import set_content, sizes_of
from sparsejax.kinds.kind import Defaults, Final, kind_of
from sparsejax.kinds.reading import name_of
from sparsejax.kinds.source import Source
from sparsejax.kinds.threads import meanwhile
from sparsejax.mesh import kept_programs, processes
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.training import Exact, Recorded, Saved, Training
from sparsejax.runs import folders, following, linear_parts
from sparsejax.runs.folders import Folder, Settings
from sparsejax.verbs.fit import fit
from sparsejax.verbs.place import place
from sparsejax.verbs.recipe import learning_rate, steps_of_epoch

# A model learns little in fewer steps.
_FEW_STEPS = 100

# Function that is called after an epoch with the number of epochs, the step and the metrics.
Log = Callable[[int, int, Mapping[str, float]], None]


def train(
    directory: pathlib.Path,
    training: Training,
    *,
    log: Log | None = None,
    summary: Callable[[str, Any], None] | None = None,
) -> Source:
    """Trains a model into a folder, and returns the data that it was trained on.

    Args:
      directory: folder of the run, which is new, empty, or resumed.
      training: model, data and settings of the training.
      log: function that is called after each epoch.
      summary: function that is called with a sentence about the size of the data, and with the
          model.
    """
    check = functools.partial(folders.check_folder, directory, resume=training.resume)
    processes.in_first(check)
    kind = kind_of(training.config)
    training = _with_targets_of_origin(training)
    following.check(training, directory)
    stopping = None
    if training.patience is not None:
        stopping = EarlyStopping(patience=training.patience)
    # Each file counts as an epoch. A stream has no last step at which the learning rate could be
    # 0.
    if training.follow:
        training = training.replaced(num_epochs=1, decay="none")
    source = source_of(training)
    config, chosen = kind.suited(training.config, training, source)
    restored = training.resume and folders.has_checkpoints(directory)
    if restored and training.suited:
        begun = folders.load_settings(directory).network
        if config != (kept := _with_dtype_of(begun, config)):
            config, chosen = kept, ""
    if chosen:
        training.say(chosen)
    settings = settings_of(training, config, source)
    steps = steps_of_epoch(source.chunks, settings.batch_size)
    if training.num_epochs is None and settings.num_epochs * steps < _FEW_STEPS:
        training.say(
            f"an epoch has {steps} steps, and {settings.num_epochs} is the default here, which "
            "is little to learn from: give a smaller batch_size, or more by num_epochs=..."
        )
    if restored and source.features is not None:
        # If the model was trained further, its capacity for tags may be larger than its content.
        content = folders.load_settings(directory).content
        if content is None:
            raise ValueError(
                "cannot resume with item_features=...: the run was begun without"
            )
        settings = dataclasses.replace(settings, content=content)
    final = None
    if training.origin is None or restored:
        linear_part = None
        if not restored:
            linear_part = linear_part_of(settings, source, keep=training.keep_linear)
        computed = None if linear_part is None else meanwhile(linear_part)
        dispatch = None if computed is None else _first_dispatch(settings, source)
        model, optimizer = settings.build(source.known)
        if not restored:
            final = kind.prepare(model, source.data, source.everything)
        if source.features is not None:
            set_content(model, source.features, new=True)
        if dispatch is not None:
            _compile_meanwhile(training, model, optimizer, dispatch())
        # These threads lower programs and slow down other Python threads, so they start this late.
        if kept_programs.may_compile_beside():
            folders.compile_beside((model, optimizer), settings)
        if computed is not None:
            model.output.linear.set_to(*computed())
    else:
        model, optimizer, final = _continued(training, settings, source)
        if source.features is not None:
            set_content(model, source.features, new=False)
            content = model.output.content.sizes
            settings = dataclasses.replace(settings, content=content)
    measures = source.heldout is not None and kind.ranks_items
    with folders.begun(
        directory,
        settings,
        source.known,
        resume=training.resume,
        features=source.features,
        final=final,
    ) as checkpoints:
        if summary is not None:
            account = kind.account(source.data)
            if training.follow:
                account = (
                    f"{name_of(training.data)}: files are trained on as they appear"
                )
            summary(account, model)
        told = None if log is None else functools.partial(log, settings.num_epochs)
        if training.follow:
            following.run(
                model, optimizer, training, settings, source.known, checkpoints, told
            )
            return source
        fit(
            model,
            optimizer,
            source.data,
            batch_size=settings.batch_size,
            fused=training.fused,
            num_epochs=settings.num_epochs,
            validation=source.heldout,
            k=training.k if measures else None,
            early_stopping=stopping,
            checkpoint_dir=checkpoints,
            **training.values_of(Exact) | training.values_of(Saved) | {"log": told},
        )
    doubts = kind.doubts(model, source, training.k)
    if doubts is not None and processes.is_first():
        warn_caller(doubts)
    return source


def _with_targets_of_origin(training: Training) -> Training:
    """Copies targets and weights from the earlier run, if the training states none."""
    given = training.targets, training.weights
    if training.origin is None or given != (None, None):
        return training
    before = folders.load_settings(pathlib.Path(training.origin))
    return training.replaced(targets=before.targets, weights=before.weights)


def _with_dtype_of(begun: Any, config: Any) -> Any:
    """The configuration of a resumed run, if the new configuration differs only in its dtype.

    The user did not choose this dtype: it was chosen for the device, which may have changed.
    """
    if type(begun) is not type(config) or not hasattr(config, "dtype"):
        return config
    same = dataclasses.replace(config, dtype=begun.dtype)
    return same if same == begun else config


def source_of(training: Training) -> Source:
    """Reads or scans the training data and the held-out data."""
    kind = kind_of(training.config)
    if training.chunk_rows is not None:
        if training.origin is not None:
            raise ValueError(
                "a run that goes on from another one needs all of the data; leave out "
                "chunk_rows"
            )
        return kind.scanned(training)
    before = None if training.origin is None else Folder.of(training.origin)
    if training.follow:
        return kind.followed(training, before)
    return kind.source(training, before)


def rule_of(
    training: Training, defaults: Defaults, steps: int, epochs: int
) -> optimizers.Rule:
    """Makes the optimizer's rule, with a schedule for the steps that `fit` will do.

    Args:
      training: settings, with the name of the optimizer.
      defaults: values for settings that `training` does not have.
      steps: number of steps in an epoch.
      epochs: number of epochs.

    Raises:
      ValueError: the optimizer does not take these options.
    """
    name, options = named_rule(training.optimizer, defaults)
    if training.weight_decay is not None:
        options["weight_decay"] = training.weight_decay
    peak = training.learning_rate
    peak = defaults.learning_rate if peak is None else peak
    # raises an error for unknown options
    optimizers.get(name, learning_rate=peak, **options)
    decays = training.decay in (None, "cosine")
    is_number = 0 <= training.warmup_epochs < math.inf
    warmup = round(training.warmup_epochs * steps) if is_number else 0
    if not is_number or (decays and warmup and warmup >= epochs * steps):
        raise ValueError(
            f"warmup_epochs={training.warmup_epochs} must be 0 or more, and with "
            f"decay=cosine below the {epochs} epochs"
        )
    rate = learning_rate(peak, epochs * steps, warmup=warmup, decay=decays)
    return optimizers.get(name, learning_rate=rate, **options)


def named_rule(name: str | None, defaults: Defaults) -> tuple[str, dict[str, Any]]:
    """The name and options of the named optimizer, or of the default one."""
    name = name or defaults.optimizer
    return name, dict(defaults.options) if name == defaults.optimizer else {}


def settings_of(training: Training, config: Any, source: Source) -> Settings:
    """Makes the settings to store in `run.json`."""
    kind, continued = kind_of(config), training.origin is not None
    defaults = kind.defaults_of(config).for_data(source.data, continued=continued)
    epochs, batch_size = training.num_epochs, training.batch_size
    if batch_size is None:
        batch_size = defaults.batch_size
    steps = steps_of_epoch(source.chunks, batch_size)
    if epochs is None:
        epochs = defaults.num_epochs(steps)
    return Settings(
        network=config,
        optimizer=rule_of(training, defaults, steps, epochs),
        num_features=kind.num_known(source.known),
        num_epochs=epochs,
        batch_size=batch_size,
        **training.values_of(Recorded),
        indicator=kind.is_indicator(source.everything),
        data=name_of(training.data),
        data_fingerprint=source.fingerprint,
        vocabulary_fingerprint=kind.fingerprint_of(source.known),
        validation=source.validation,
        validation_split=source.split,
        origin=None if training.origin is None else str(training.origin),
        content=None if source.features is None else sizes_of(source.features),
        item_features=None
        if source.features is None
        else source.features.fingerprint(),
    )


def linear_part_of(
    settings: Settings, source: Source, *, keep: bool
) -> Callable[[], linear_parts.Arrays] | None:
    """A function that reads or computes the linear part; None if the network has none."""
    linear = getattr(settings.network, "linear", None)
    if linear is None:
        return None
    return functools.partial(
        linear_parts.linear_part,
        source.data,
        linear,
        fingerprint=settings.data_fingerprint,
        keep=keep,
    )


def _first_dispatch(
    settings: Settings, source: Source
) -> Callable[[], Dispatch] | None:
    """Function that returns the first dispatch of the training, to compile its program.

    None if there is no linear part to compute, or if programs are not kept. If programs may be
    compiled in parallel, another thread prepares the dispatch.
    """
    linear: Any = getattr(settings.network, "linear", None)
    if not kept_programs.are_kept() or linear_parts.is_kept(
        source.data, linear, fingerprint=settings.data_fingerprint
    ):
        return None

    def first() -> Dispatch:
        epochs = Epochs(
            place(source.data),
            batch_size=settings.batch_size,
            num_epochs=settings.num_epochs,
            seed=settings.seed,
        )
        return next(epochs.dispatches(0))

    return meanwhile(first) if kept_programs.may_compile_beside() else first


def _compile_meanwhile(
    training: Training, model: Any, optimizer: Optimizer, dispatch: Dispatch
) -> None:
    """Compiles the training program while another thread computes the linear part.

    The values of the linear part do not affect the program.
    """
    program = Program(
        model, optimizer, fused=training.fused, deterministic=training.deterministic
    )
    program.compile_ahead(dispatch)


def _continued(
    training: Training, settings: Settings, source: Source
) -> tuple[Any, Optimizer, Final | None]:
    """Loads the earlier run to train it further.

    Returns:
      Its model, extended by new items; its optimizer; and the function that writes the part fitted
      on all data.
    """
    assert training.origin is not None
    earlier = Folder.of(training.origin)
    before = earlier.settings
    model, optimizer, kept, final = folders.continued(
        earlier, settings, source.data, source.everything
    )
    added = settings.num_features - before.num_features
    what = "goes on with its state" if kept else "begins anew"
    training.say(
        f"{training.origin}: {before.num_features:,} {before.kind.numbered} are known, "
        f"{added:,} are new; the optimizer {what}"
    )
    return model, optimizer, final
