"""A predictor of clicks as one file.

::

    clicks.json         version, sizes, tables and features, lists of programs and weights
    vocabularies.json   the categories of each vocabulary
    programs/..., weights/...    see `archive`
"""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import export

from sparsejax.data.click_schema import ClickSchema, VocabularyColumn, num_ids
from sparsejax.data.names import Names, as_names
from sparsejax.prediction import archive
from sparsejax.prediction.archive import Stored
from sparsejax.prediction.click_predictor import (
    ClickFeature,
    ClickPredictor,
    ClickStack,
)
from sparsejax.prediction.programs import ClickSignature

VERSION = 1
_SETTINGS, _VOCABULARIES = "clicks.json", "vocabularies.json"


def save_click_predictor(
    path: str | os.PathLike[str],
    *,
    num_dense: int,
    stacks: Sequence[ClickStack],
    schema: ClickSchema | None,
    vocabularies: Mapping[str, Names],
    programs: Iterable[tuple[int, export.Exported]],
    weights: Sequence[Stored],
) -> None:
    """Writes a predictor; see `sparsejax.export_predictor` and `archive.save`."""
    settings = {
        "version": VERSION,
        "num_dense": num_dense,
        "stacks": [dataclasses.asdict(stack) for stack in stacks],
        "schema": None if schema is None else schema.to_json(),
    }
    categories = {name: names.tolist() for name, names in vocabularies.items()}
    archive.save(
        path,
        _SETTINGS,
        settings,
        more={_VOCABULARIES: categories},
        programs=programs,
        weights=weights,
    )


def load_click_predictor(path: str | os.PathLike[str]) -> ClickPredictor:
    """Reads what `sparsejax.export_predictor` wrote of a click model.

    This needs neither Flax nor the model's code, and runs nothing that the file names, as
    `load_predictor`.

    >>> config = WideDeepConfig(dim=4, hidden=(8,))
    >>> model = WideDeep(config, num_dense=1, features={"user": 50}, rngs=nnx.Rngs(0))
    >>> export_predictor(model, "clicks.predictor", table_dtype="int8")
    >>> predictor = load_click_predictor("clicks.predictor")  # in another process
    >>> ids = {"user": np.array([7, 49], np.int32)}
    >>> predictor.predict(np.ones((2, 1)), ids).shape
    (2,)

    Args:
      path: the file, or its address in a store, see `load_predictor`.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not a predictor of clicks, is damaged, has another version, or
        does something that a predictor may not do.
    """
    with archive.opened(path) as file:
        return _ready(path, file)


def _load_same(path: str | os.PathLike[str], identity: str) -> ClickPredictor:
    """As `load_click_predictor`, if the file still has this content."""
    with archive.opened(path) as file:
        archive.check_identity(path, file, identity)
        return _ready(path, file)


def _ready(path: str | os.PathLike[str], file: io.BufferedReader) -> ClickPredictor:
    with archive.reading(path):
        settings, vocabularies, programs, weights = _read(file)
        again = archive.again(_load_same, path, file)
    compiled, on_device = archive.ready(programs, weights)
    return ClickPredictor(
        num_dense=settings.num_dense,
        stacks=settings.stacks,
        schema=settings.schema,
        vocabularies=vocabularies,
        programs=compiled,
        weights=on_device,
        again=again,
    )


@dataclasses.dataclass(frozen=True)
class ClickSettings:
    """What clicks.json says, checked.

    Attributes:
      num_dense: number of dense columns.
      stacks: see `ClickPredictor`.
      schema: see `ClickPredictor`.
      programs: numbers of rows for which there are programs.
      convention: calling convention of the programs.
      weights: shape and dtype of each array of weights.
    """

    num_dense: int
    stacks: tuple[ClickStack, ...]
    schema: ClickSchema | None
    programs: tuple[int, ...]
    convention: int
    weights: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, stated: Any) -> ClickSettings:
        """Reads the JSON object of a file.

        Raises:
          ValueError: it has another version, or `save_click_predictor` did not write it.
        """
        archive.check_version(stated, VERSION)
        stacks = tuple(map(_stack, archive.entry(stated, "stacks", list)))
        if not stacks:
            raise ValueError("the settings state no tables")
        schema = stated.get("schema")
        return cls(
            num_dense=_count(archive.entry(stated, "num_dense", int)),
            stacks=stacks,
            schema=None if schema is None else ClickSchema.from_json(schema),
            programs=archive.sizes_of_programs(stated),
            convention=archive.entry(stated, "calling_convention", int),
            weights=tuple(
                map(archive.array_of, archive.entry(stated, "weights", list))
            ),
        )

    def check(self, vocabularies: Mapping[str, Names]) -> None:
        """Raises ValueError unless the schema's ids are those of the tables."""
        if self.schema is None:
            return
        known = {
            name
            for name, column in self.schema.ids.items()
            if isinstance(column, VocabularyColumn)
        }
        if known != vocabularies.keys() or len(self.schema.dense) != self.num_dense:
            raise ValueError("the schema does not fit the vocabularies or num_dense")
        sizes = num_ids(self.schema, vocabularies)
        for feature in (f for stack in self.stacks for f in stack.features):
            if sizes.get(feature.name) != feature.num_ids:
                raise ValueError(
                    f"the schema has {sizes.get(feature.name)} ids of {feature.name!r}, but "
                    f"its table {feature.num_ids:,} rows"
                )


def _stack(stated: Any) -> ClickStack:
    bags = archive.size(archive.entry(stated, "bags", int))
    features = tuple(map(_feature, archive.entry(stated, "features", list)))
    if not features or any(f.bag + max(f.length, 1) > bags for f in features):
        raise ValueError("the settings state a stack whose features do not fit in it")
    return ClickStack(bags, features)


def _feature(stated: Any) -> ClickFeature:
    return ClickFeature(
        name=archive.entry(stated, "name", str),
        num_ids=archive.size(archive.entry(stated, "num_ids", int)),
        first=_count(archive.entry(stated, "first", int)),
        bag=_count(archive.entry(stated, "bag", int)),
        length=_count(archive.entry(stated, "length", int)),
        drop=archive.entry(stated, "drop", bool),
    )


def _count(value: int) -> int:
    return value and archive.size(value)


def _read(file: io.BufferedReader):
    length = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as parts:
        settings = ClickSettings.of(archive.read_settings(parts, _SETTINGS))
        archive.check_sizes(settings.weights, length)
        stated = archive.read_json(parts, _VOCABULARIES, length)
        if not isinstance(stated, dict) or not all(
            isinstance(names, list) and all(type(name) is str for name in names)
            for names in stated.values()
        ):
            raise ValueError(f"{_VOCABULARIES} has no lists of names")
        vocabularies = {name: as_names(names) for name, names in stated.items()}
        settings.check(vocabularies)
        signatures = {
            rows: ClickSignature(
                rows=rows,
                num_dense=settings.num_dense,
                bags=tuple(stack.bags for stack in settings.stacks),
                weights=settings.weights,
            )
            for rows in settings.programs
        }
        programs = archive.read_programs(parts, signatures, settings.convention)
        weights = archive.read_weights(parts, settings.weights)
    return settings, vocabularies, programs, weights
