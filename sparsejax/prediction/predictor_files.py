"""A predictor as one file.

::

    predictor.json      version, sizes, lists of the programs and weights
    items.json          names of the items, or null
    programs/..., weights/...    see `archive`
"""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from sparsejax.data.names import Names, as_names
from sparsejax.data.sources import Features, dense_row, rows_of_inputs
from sparsejax.mesh.layout import to_host_in_pieces
from sparsejax.prediction import archive
from sparsejax.prediction.archive import Stored
from sparsejax.prediction.predictor import Predictor
from sparsejax.prediction.programs import Signature

VERSION = 2
_SETTINGS, _ITEMS = "predictor.json", "items.json"


def save_predictor(
    path: str | os.PathLike[str],
    *,
    k: int,
    num_features: Features,
    num_items: int,
    items: Sequence[str] | None,
    programs: Iterable[tuple[int, export.Exported]],
    weights: Sequence[jax.Array],
) -> None:
    """Writes a predictor; see `sparsejax.export_predictor` and `archive.save`."""
    settings = {
        "version": VERSION,
        "k": k,
        "num_items": num_items,
        "inputs": _stated_inputs(num_features),
    }
    archive.save(
        path,
        _SETTINGS,
        settings,
        more={_ITEMS: items},
        programs=programs,
        weights=[Stored(weight, to_host_in_pieces(weight)) for weight in weights],
    )


def load_predictor(path: str | os.PathLike[str]) -> Predictor:
    """Reads what `sparsejax.export_predictor` wrote.

    This needs neither Flax nor the model's code. It runs nothing that the file names:
    programs consist of arithmetic alone. JAX reads the programs of releases that are up
    to six months older.

    >>> export_predictor(model, "model.predictor", k=2, names=train)
    >>> predictor = load_predictor("model.predictor")  # in another process
    >>> predictor.names(predictor.recommend(train, exclude=train))
    [['/...', '/...'], ...]

    Args:
      path: the file, or its address in a store, like `s3://bucket/model.predictor`. It is
        then copied once to the cache folder of the user, where later calls find it as
        long as it does not change. The processes of a host wait for the first copy.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not a predictor, is damaged, has another version, or does
        something that a predictor may not do.
    """
    with archive.opened(path) as file:
        return _ready(path, file)


def load_same_predictor(path: str | os.PathLike[str], identity: str) -> Predictor:
    """As `load_predictor`, if the file still has the content of a `predictor_identity`.

    Raises:
      OSError: the file cannot be read.
      ValueError: it has other content.
    """
    with archive.opened(path) as file:
        archive.check_identity(path, file, identity)
        return _ready(path, file)


class Kept:
    """The last predictor that was asked for, which several parts use."""

    def __init__(self):
        self._identity: str | None = None
        self._predictor: Predictor | None = None

    def load(self, path: str | os.PathLike[str], identity: str) -> Predictor:
        """`load_same_predictor`, unless it is the one that is kept."""
        if self._predictor is None or self._identity != identity:
            self._predictor = None  # before its successor takes memory
            self._predictor = load_same_predictor(path, identity)
            self._identity = identity
        return self._predictor


def _ready(path: str | os.PathLike[str], file: io.BufferedReader) -> Predictor:
    with archive.reading(path):
        settings, items, programs, weights = _read(file)
        again = archive.again(load_same_predictor, path, file)
    compiled, on_device = archive.ready(programs, weights)
    return Predictor(
        k=settings.k,
        num_features=settings.num_features,
        num_items=settings.num_items,
        items=items,
        programs=compiled,
        weights=on_device,
        again=again,
    )


def predictor_identity(path: str | os.PathLike[str]) -> str:
    """A hash of a predictor's content, by the checksums of its parts.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a predictor.
    """
    with archive.opened(path) as file:
        return archive.identity(path, file)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What predictor.json says, checked.

    Attributes:
      k: most items for a row.
      num_features: number of input features; with several inputs a dict, as the model
        has it.
      num_items: number of items.
      programs: numbers of rows for which there are programs.
      convention: calling convention of the programs.
      weights: shape and dtype of each array of weights.
    """

    k: int
    num_features: Features
    num_items: int
    programs: tuple[int, ...]
    convention: int
    weights: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, stated: Any) -> Settings:
        """Reads the JSON object of a file.

        Raises:
          ValueError: it has another version, or `save_predictor` did not write it.
        """
        archive.check_version(stated, VERSION)
        inputs = archive.entry(stated, "inputs", list)
        return cls(
            k=archive.size(archive.entry(stated, "k", int)),
            num_features=_features(inputs),
            num_items=archive.size(archive.entry(stated, "num_items", int)),
            programs=archive.sizes_of_programs(stated),
            convention=archive.entry(stated, "calling_convention", int),
            weights=tuple(
                map(archive.array_of, archive.entry(stated, "weights", list))
            ),
        )


def _stated_inputs(features: Features) -> list[dict[str, Any]]:
    """The JSON for the inputs of a model."""
    if isinstance(features, int):
        return [{"num_features": features}]
    return [
        {"name": name, "num_features": size}
        if isinstance(size, int)
        else {"name": name, **archive.stated_array(dense_row(size))}
        for name, size in features.items()
    ]


def _features(stated: list[Any]) -> Features:
    """Reads what `_stated_inputs` returned."""
    if len(stated) == 1 and isinstance(stated[0], dict) and "name" not in stated[0]:
        return archive.size(archive.entry(stated[0], "num_features", int))
    features: dict[str, int | jax.ShapeDtypeStruct] = {}
    for one in stated:
        name = archive.entry(one, "name", str)
        if "num_features" in one:
            features[name] = archive.size(archive.entry(one, "num_features", int))
        else:
            features[name] = archive.array_of(one)
    if not stated or len(features) != len(stated):
        raise ValueError(
            f"{_SETTINGS} states {len(stated)} inputs, but not a name of its own for each"
        )
    return features


def _read(
    file: io.BufferedReader,
) -> tuple[Settings, Names | None, dict[int, export.Exported], Sequence[np.ndarray]]:
    length = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as parts:
        if "clicks.json" in parts.namelist():
            raise ValueError("it predicts clicks: use sparsejax.load_click_predictor")
        settings = Settings.of(archive.read_settings(parts, _SETTINGS))
        archive.check_sizes(settings.weights, length)
        items = archive.read_json(parts, _ITEMS, length)
        if items is not None and (
            not isinstance(items, list)
            or len(items) != settings.num_items
            or not all(type(name) is str for name in items)
        ):
            raise ValueError(f"{_ITEMS} does not have {settings.num_items:,} names")
        signatures = {
            rows: Signature(
                rows=rows,
                k=settings.k,
                weights=settings.weights,
                inputs=rows_of_inputs(settings.num_features),
            )
            for rows in settings.programs
        }
        programs = archive.read_programs(parts, signatures, settings.convention)
        weights = archive.read_weights(parts, settings.weights)
    return settings, None if items is None else as_names(items), programs, weights
