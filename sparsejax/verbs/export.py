"""Writes a model as programs that run without it."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sparsejax.callers import warn_caller
from sparsejax.kinds.kind import kind_of_model
from sparsejax.mesh.layout import replicated
from sparsejax.mesh.promotion import promoting
from sparsejax.options.option import verb
from sparsejax.options.predicting import Write
from sparsejax.predictors.files import load_predictor
from sparsejax.predictors.runtime import sizes_of_programs
from sparsejax.predictors.saving import add_answer, save_predictor
from sparsejax.predictors.signature import PLATFORMS, Array, Signature
from sparsejax.predictors.stablehlo import program
from sparsejax.predictors.stored_answer import StoredAnswer
from sparsejax.predictors.versions import FILE
from sparsejax.whole_files import check_writable, temporary_folder


@promoting()
@verb(Write)
def export_predictor(asked: Write) -> None:
    """Writes a model to a file, which `sparsejax.load_predictor` reads.

    A predictor recommends without Flax and without the model's code. The file holds the
    weights, and programs for 1, 8, 64, ... rows as StableHLO for CPUs and CUDA. They
    compute the vectors of rows; `sparsejax.top_k` ranks the items when the file is used, on
    Hopper GPUs by its program for them. A model with a `top_k` of its own has it in the file.
    The number of entries is dynamic. What depends on the weights alone, like the norms of
    the items' vectors, is computed now. The file appears at `path` whole or not at all.

    A model on a mesh is written for one device. With several processes all call this
    function and the first one writes. No host needs room for the whole of a kernel that
    is divided.

    >>> export_predictor(model, "model.predictor", k=10, names=train)

    A model of histories gives a predictor that takes a history of names, the oldest item
    first, or a `SequenceDataset`. If the model uses times and the data in `names` have them,
    the predictor reads the times of a `SequenceDataset`.

    A click model is written with its tables, and `sparsejax.load_predictor` reads it, too.
    With the clicks that it was trained on as `names`, the file also has their schema and
    vocabularies, and the predictor takes records as they are. The model may use the ids only
    by passing them on to its collections. Tables take a quarter of the room with
    `table_dtype`. Each row has a scale of its own. For int8 it also has an offset, and a
    number is off by at most `(max - min) / 510` of its row. For float8 it is off by at most
    a sixteenth, or `max |row| / 458752` if that is more. Tables that would not become
    smaller stay as they are, such as those of the linear part of `WideDeep`::

        export_predictor(model, "clicks.predictor", names=train, table_dtype="int8")

    Dynamic tables are written with the index of their ids. The predictor finds rows, and gives
    none to new ids.

    Raises:
      FloatingPointError: a weight is NaN.
      OSError: the file cannot be written.
      OtherProcessError: process 0 could not write the file; the message says why.
      ValueError: the number of names is not that of the items. `path` cannot be a file.
        `item_features` is given of a model without content, or is other content.
        This kind of model has no use for an argument, or its output layer has none for
        `int8`.
        The model does something that a predictor may not do, for example a callback into
        Python. For clicks: `names` do not fit the tables, or a table that is to become
        smaller has a number that is not finite.
    """
    kind = kind_of_model(asked.model)
    asked.check_kind(kind.name)
    _check_weights(asked.model)
    portable = kind.portable(asked)
    signature = Signature(
        **{"kind": kind.name} | portable.stated,
        weights=tuple(
            Array.of(weight.like, weight.name) for weight in portable.weights
        ),
        rows=sizes_of_programs(asked.batch_size),
        platforms=PLATFORMS,
        calling_convention=jax.config.jax_export_calling_convention_version,
        jax=jax.__version__,
    )
    made = ((n, program(signature, n, portable.function)) for n in signature.rows)
    save_predictor(
        asked.path,
        signature,
        portable.vocabularies,
        programs=made,
        weights=[*portable.weights, *portable.beside],
    )


@verb(Write)
def export_with_answer(asked: Write) -> None:
    """Does as `export_predictor`, and also writes the answer to an example into the file.

    To get the answer, the file is loaded, beside the model, and a program is compiled. Runs and
    commands call this, as their files are served. `export_predictor` does not, since it needs
    no room for a second model on the device. Several processes write no answer.

    Raises:
      FloatingPointError: a score is NaN or infinite.
      OSError: the file cannot be written.
      ValueError: a model or an argument does not fit, as in `export_predictor`.
    """
    path = asked.path
    options = {name: getattr(asked, name) for name in asked.given}
    if jax.process_count() > 1:
        export_predictor(**options)
        return
    check_writable(path)
    where = pathlib.Path(path).resolve()  # a link stays a link
    with temporary_folder(where.parent) as folder:
        made = folder / FILE
        try:
            export_predictor(**options | {"path": made})
            add_answer(made, StoredAnswer.of(load_predictor(made).model))
        except OSError as error:
            if error.filename != os.fspath(made):
                raise
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        except jax.errors.JaxRuntimeError as error:
            if not made.exists() or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            warn_caller(
                f"{path}: the device has no room for the predictor beside the model, so the "
                "file has no answer that a service could compare with its own"
            )
        os.replace(made, where)


def _check_weights(model: Any) -> None:
    """Raises FloatingPointError if a weight is NaN."""
    for path, leaf in jax.tree.leaves_with_path(nnx.state(model, nnx.Param)):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and _has_nan(leaf):
            raise FloatingPointError(
                f"the weights {jax.tree_util.keystr(path)} have NaN, so recommendations "
                "would be wrong; train again, for example with a lower learning rate"
            )


@jax.jit
def _has_nan(weights: jax.Array) -> jax.Array:
    return replicated(jnp.isnan(weights).any())
