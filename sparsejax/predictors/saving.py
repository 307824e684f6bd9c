"""Writes a predictor as one file, see `archive`.

::

    predictor.json      the signature
    names.json          names of items and of tags, or the categories of each vocabulary
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import export

from sparsejax.predictors import archive
from sparsejax.predictors.archive import Stored
from sparsejax.predictors.signature import Signature

SETTINGS, NAMES = "predictor.json", "names.json"


def save_predictor(
    path: str | os.PathLike[str],
    signature: Signature,
    vocabularies: Mapping[str, Sequence[str]],
    *,
    programs: Iterable[tuple[int, export.Exported]],
    weights: Iterable[Stored],
) -> None:
    """Writes a predictor; see `sparsejax.export_predictor` and `archive.save`.

    Args:
      path: the file.
      signature: of the predictor.
      vocabularies: names, by what they are names of.
      programs: with their numbers of rows.
      weights: those of the signature, then the kernels of `Signature.new_items`.
    """
    documents = {SETTINGS: signature.to_json(), NAMES: vocabularies}
    archive.save(path, documents, programs=programs, weights=weights)


def in_one_piece(array: jax.Array | np.ndarray) -> Stored:
    """An array that is small enough to be copied to the host, or is there."""
    like = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return Stored(like, iter([np.asarray(array)]))
