"""Saves a model from a custom training loop as a run."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from sparsejax.codec import Config
from sparsejax.data import ClickDataset, ItemFeatures, SequenceDataset, SparseDataset
from sparsejax.kinds.content import check_same_sizes, content_of, fitting
from sparsejax.kinds.kind import kind_of
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.runs import folders
from sparsejax.runs.folders import Settings

# Replaces the fingerprint of the data, so that `train` refuses to resume: only the user's own loop
# knows which rows come next.
_UNKNOWN = "of a loop of one's own"


def save_model(
    directory: str | os.PathLike[str],
    model: nnx.Module,
    optimizer: Optimizer,
    data: SparseDataset | SequenceDataset | ClickDataset,
    *,
    history: Sequence[Mapping[str, float]] = (),
    item_features: ItemFeatures | None = None,
) -> None:
    """Writes a model as a run folder for `Run.load` and all commands.

    `Run.train` writes such a folder itself. This function is for a model that was made by `build`
    and trained by `fit` or a custom loop.

    >>> model, optimizer = build(NetworkConfig.autoencoder((8,)), train)
    >>> history = fit(model, optimizer, train, num_epochs=1)
    >>> save_model("mine", model, optimizer, train, history=history)
    >>> run = Run.load("mine")
    >>> len(run.recommend(["train-10006"], k=2, inputs=train).names()[0])
    2

    `Run.train_more` and `train --from` can train it further, with the state of the optimizer. The
    model is not changed.

    Args:
      directory: path of the folder, which must be new or empty.
      model: a model with a configuration, such as `FeedForward`, `SASRec` or `DLRM`.
      optimizer: optimizer of the model.
      data: the training data. The folder stores its schema, and the names of its items or
          categories, but no rows.
      history: history that `fit` returned, for the report.
      item_features: content of the items, if the model has content; it is stored.

    Raises:
      FileExistsError: the folder exists and is not empty.
      TypeError: the model has no configuration, or the data is of another kind.
      ValueError: the model differs from what its configuration gives for this data; or the
          optimizer was made with `dense` or `wrt`, which a run cannot store. The model has content
          and `item_features` is missing or differs from it; or it has no content and
          `item_features` is given.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, Config):
        raise TypeError(
            f"a {type(model).__name__} has no configuration that says how to build it again: "
            "keep it by fit(..., checkpoint_dir=...), and serve it by export_predictor"
        )
    kind = kind_of(config)
    if not hasattr(data, "save") or kind_of(data) is not kind:
        raise TypeError(
            f"a {type(model).__name__} was trained on a data set of {kind.name}, got "
            f"{type(data).__name__}"
        )
    if optimizer.transformation is not None or optimizer.wrt is not nnx.Param:
        raise ValueError(
            "a run keeps the rule of an optimizer alone: make it without dense= and wrt="
        )
    features = _checked(item_features, model, data)
    known = kind.known_of(data)
    settings = Settings(
        network=config,
        optimizer=optimizer.rule,
        num_features=kind.num_known(known),
        num_epochs=max(1, len(history)),
        batch_size=kind.defaults.batch_size,
        indicator=kind.is_indicator(data),
        data=f"{data!r}",
        data_fingerprint=_UNKNOWN,
        vocabulary_fingerprint=kind.fingerprint_of(known),
        validation=None,
        validation_split=None,
        content=None if (content := content_of(model)) is None else content.sizes,
        item_features=None if features is None else features.fingerprint(),
    )
    modules = (model, optimizer)
    _check_fits(modules, settings.shapes(known))
    entries = [
        {"epoch": number} | {**entry} for number, entry in enumerate(history, start=1)
    ]
    directory = pathlib.Path(directory)
    with folders.begun(
        directory, settings, known, resume=False, features=features
    ) as checkpoints:
        step = int(optimizer.step[...])
        checkpoints.save(step, modules, {"history": entries})


def _checked(
    given: ItemFeatures | None, model: nnx.Module, data: Any
) -> ItemFeatures | None:
    """Checks items' content against the model; returns it in the order of the data's items."""
    content = content_of(model)
    if (content is None) != (given is None):
        has = "no content of its items" if content is None else "content of its items"
        remedy = "leave it out" if content is None else "give what build was given"
        raise ValueError(f"the model has {has}: item_features=...; {remedy}")
    if content is None or given is None:
        return None
    features = fitting(given, data)
    check_same_sizes(features, content.sizes)
    return features


def _check_fits(modules: tuple[Any, Optimizer], expected: tuple[Any, Any]) -> None:
    """Raises ValueError unless model and optimizer have the structure that would be restored."""
    found, wanted = (
        {
            path: leaf.get_raw_value().shape
            for path, leaf in nnx.to_flat_state(nnx.state(part))
        }
        for part in (modules, expected)
    )
    for path in [*wanted, *found]:
        if found.get(path) != wanted.get(path):
            name = ".".join(map(str, path[1:]))
            raise ValueError(
                f"the model is not what its configuration describes for this data: {name} "
                f"has the shape {found.get(path)}, expected {wanted.get(path)}"
            )
