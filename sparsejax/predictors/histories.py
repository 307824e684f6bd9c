"""Predictors of histories: the items that are most likely next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import jax
import numpy as np

from sparsejax.data.files.name_index import NameTable
from sparsejax.data.reading.histories import (
    HISTORIES,
    TIMES,
    arrays_of,
    inputs_of,
    unordered,
)
from sparsejax.data.reading.sources import (
    Inputs,
    NamedArray,
    NamedCSR,
    check_columns,
    check_same_features,
)
from sparsejax.data.sets.sequences import Histories, SequenceDataset
from sparsejax.predictors.ranking import NOTHING, Items, Known, some_of
from sparsejax.predictors.runtime import Programs, Rows
from sparsejax.predictors.signature import (
    LABEL,
    Signature,
    features_of,
    reads_histories,
)
from sparsejax.sparse import CSR

_HOUR = 3600.0  # in seconds, between the items of an example


class Ordered(Items):
    """Recommends to histories, whose last items a model reads in order."""

    @classmethod
    def of(
        cls, signature: Signature, vocabularies: Mapping[str, NameTable]
    ) -> Callable[[Programs], Self]:
        if not reads_histories(features_of(signature.inputs[:-1])):
            raise ValueError(f"{LABEL} has no input {HISTORIES!r}, which is a list")
        return super().of(signature, vocabularies)

    @property
    def _length(self) -> int:
        """How many items are read."""
        assert isinstance(self.num_features, Mapping)
        return cast(jax.ShapeDtypeStruct, self.num_features[HISTORIES]).shape[0]

    @property
    def reads_times(self) -> bool:
        assert isinstance(self.num_features, Mapping)
        return TIMES in self.num_features

    def example(self) -> list[Rows]:
        ids = some_of(self.num_read)
        ordered = Histories(np.array([0, len(ids)]), ids, _HOUR * np.arange(len(ids)))
        arrays = arrays_of(ordered, self._length, times=self.reads_times)
        pairs = zip(self.programs.inputs, super().example(), strict=True)
        return [arrays.get(like.name or "", other) for like, other in pairs]

    def _excluded(self, exclude: Any, inputs: Any) -> Any:
        if isinstance(inputs, SequenceDataset):
            return unordered("exclude", exclude, inputs)
        return exclude

    def _inputs(self, inputs: Any) -> Inputs:
        if isinstance(inputs, Mapping):
            return Inputs.of(inputs)
        if not isinstance(inputs, SequenceDataset):
            raise ValueError(
                "this predictor is of a model of histories; pass a SequenceDataset, as "
                f"read_sequences makes it, not a {type(inputs).__name__}"
            )
        check_columns("inputs", inputs.num_features, self.num_items, "items")
        if inputs.events is not None:
            raise ValueError(
                f"inputs has the columns of events {inputs.events.schema.used}, which the "
                "predictor does not read; leave them out: inputs.without_events()"
            )
        if self.items is not None:
            names = inputs.feature_names, self.items
            both = zip(("inputs", "the predictor"), names, strict=True)
            check_same_features(*(NamedCSR(w, NOTHING, None, n) for w, n in both))
        return inputs_of(inputs, self._length, times=self.reads_times)

    def _shown(self, known: Known, matrix: CSR, times: np.ndarray | None) -> Inputs:
        ordered = Histories(known.indptr, known.numbers.astype(np.int32), times)
        arrays = arrays_of(ordered, self._length, times=times is not None)
        parts = {name: NamedArray(name, array) for name, array in arrays.items()}
        return Inputs(parts, alone=False)

    def _matrices(self, shown: Inputs) -> list[Any]:
        found = super()._matrices(shown)
        if self.num_read == self.num_items:
            return found
        *inputs, _ = self.programs.inputs
        places = {each.name: i for i, each in enumerate(inputs)}
        ids = found[places[HISTORIES]]
        unread = (ids < 0) | (ids >= self.num_read)
        # The items that are read come first, as they do without the others.
        order = np.argsort(unread, axis=1, kind="stable")
        for name, nothing in ((HISTORIES, -1), (TIMES, 0)):
            if name in places:
                given = np.where(unread, nothing, found[places[name]])
                found[places[name]] = np.take_along_axis(given, order, axis=1)
        return found

    def _values_of(
        self,
        histories: Sequence[Sequence[str]],
        values: Sequence[Sequence[float]],
        known: Known,
    ) -> np.ndarray:
        raise ValueError("a model of histories reads no values; leave out values")

    def _check_names_suffice(self, times: object) -> None:
        self._item_names()
        if self.reads_times and times is None:
            raise ValueError(
                "the predictor also reads times; give times=, one number for each name"
            )
        if times is not None and not self.reads_times:
            raise ValueError("the predictor reads no times; leave out times")
