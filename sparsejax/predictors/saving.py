"""Writes the file of a predictor, see `archive`.

::

    predictor.json      the signature
    names.json          number of names of items and of tags, or of each vocabulary
    names/0/...         names of the first of these lists, see `names`
    answer.json         an example with its answer, see `StoredAnswer`; optional
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import export

from sparsejax import codec
from sparsejax.predictors import archive, names
from sparsejax.predictors.archive import Stored
from sparsejax.predictors.signature import Signature
from sparsejax.predictors.stored_answer import StoredAnswer

SETTINGS, ANSWER = "predictor.json", "answer.json"


def save_predictor(
    path: str | os.PathLike[str],
    signature: Signature,
    vocabularies: Mapping[str, Sequence[str]],
    *,
    programs: Iterable[tuple[int, export.Exported]],
    weights: Iterable[Stored],
    answer: StoredAnswer | None = None,
) -> None:
    """Writes a predictor; see `sparsejax.export_predictor` and `archive.save`.

    Args:
      path: path of the file.
      signature: signature of the predictor.
      vocabularies: lists of names, by the kind of thing that they name.
      programs: pairs of a number of rows and the program for it.
      weights: the weights of the signature, then the kernels of `Signature.new_items`.
      answer: answer to an example, or None.
    """
    counts = {name: len(some) for name, some in vocabularies.items()}
    documents = {SETTINGS: signature.to_json(), names.COUNTS: counts}
    if answer is not None:
        documents[ANSWER] = answer.to_json()
    others = names.parts(vocabularies)
    archive.save(path, documents, programs=programs, weights=weights, others=others)


def add_answer(path: str | os.PathLike[str], answer: StoredAnswer) -> None:
    """Writes the answer to an example into a file that no process reads yet.

    Raises:
      OSError: the file cannot be written.
    """
    with zipfile.ZipFile(path, "a") as parts:
        parts.writestr(zipfile.ZipInfo(ANSWER), codec.text(answer.to_json()))


def in_one_piece(array: jax.Array | np.ndarray) -> Stored:
    """An array that is copied to the host as one piece, or is already there."""
    like = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return Stored(like, iter([np.asarray(array)]))
