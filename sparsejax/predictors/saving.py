"""Writes a predictor as one file, see `archive`.

::

    predictor.json      the signature
    names.json          how many names there are of items and of tags, or of each vocabulary
    names/0/...         the first of these lists, see `names`
    answer.json         an example with its answer, see `StoredAnswer`; not in all files
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
      path: the file.
      signature: signature of the predictor.
      vocabularies: lists of names, by the kind of thing that they name.
      programs: programs with their numbers of rows.
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
    """Writes the answer to an example into a file that nobody reads yet.

    Raises:
      OSError: the file cannot be written.
    """
    with zipfile.ZipFile(path, "a") as parts:
        parts.writestr(zipfile.ZipInfo(ANSWER), codec.text(answer.to_json()))


def in_one_piece(array: jax.Array | np.ndarray) -> Stored:
    """An array that is small enough to be copied to the host, or is there."""
    like = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return Stored(like, iter([np.asarray(array)]))
