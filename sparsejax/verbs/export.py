"""Exports a model as programs that run without the model's code."""

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

    A predictor recommends without Flax and without the model's code. The file contains the
    weights, and programs for 1, 8, 64, ... rows as StableHLO for CPUs and CUDA. These compute the
    vectors of rows. `sparsejax.top_k` ranks the items when the file is used, on Hopper GPUs by its
    special program. If a model has its own `top_k`, the file contains it. The number of entries is
    dynamic. Values that depend only on the weights, like norms of item vectors, are computed at
    export. The file is renamed to `path` when it is complete.

    A model on a mesh is written for one device. With several processes, all must call this
    function, and the first one writes. No host needs memory for a whole kernel that is divided.

    >>> export_predictor(model, "model.predictor", k=10, names=train)

    A history model gives a predictor that takes a history of names, the oldest item first, or a
    `SequenceDataset`. If the model uses times and the data in `names` has times, the predictor
    reads the times of a `SequenceDataset`.

    A click model is written with its tables. If `names` are the clicks that it was trained on, the
    file also contains their schema and vocabularies, and the predictor takes records as they are.
    The model may only pass the ids on to its collections. With `table_dtype`, tables take a
    quarter of the space. Each row has its own scale. For int8 it also has an offset, and the error
    of a number is at most `(max - min) / 510` of its row. For float8 the error is at most a
    sixteenth of the number, or `max |row| / 458752` if that is more. Tables that would not become
    smaller are not converted, such as those of the linear part of `WideDeep`::

        export_predictor(model, "clicks.predictor", names=train, table_dtype="int8")

    Dynamic tables are written with the index of their ids. The predictor finds their rows, and
    assigns no rows to new ids.

    Raises:
      FloatingPointError: a weight is NaN.
      OSError: the file cannot be written.
      OtherProcessError: process 0 could not write the file; the message says why.
      ValueError: the number of names differs from the number of items. `path` cannot be a file.
          `item_features` is given for a model without content, or differs from its content. An
          argument does not apply to this kind of model, or `int8` does not apply to its output
          layer. The model contains an operation that is not allowed in a predictor, for example a
          callback into Python. For clicks: `names` do not match the tables, or a table to convert
          has a number that is not finite.
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
    """Works like `export_predictor`, and also stores the answer to an example in the file.

    To compute the answer, the file is loaded, besides the model, and a program is compiled. Runs
    and commands call this function, as their files are served. `export_predictor` stores no
    answer, so that the device needs no room for a second model. Several processes store no answer.

    Raises:
      FloatingPointError: a score is NaN or infinite.
      OSError: the file cannot be written.
      ValueError: a model or an argument is invalid, as in `export_predictor`.
    """
    path = asked.path
    options = {name: getattr(asked, name) for name in asked.given}
    if jax.process_count() > 1:
        export_predictor(**options)
        return
    check_writable(path)
    where = pathlib.Path(path).resolve()  # replaces the target of a link, not the link
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
