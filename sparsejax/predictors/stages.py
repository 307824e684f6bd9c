"""Predictors of two stages: one model finds candidates, another model ranks them.

The second stage also reads columns. Item columns are stored in the file. The other columns are in
each request, and are program inputs whose names begin with `SECOND`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.data.files.name_index import NameTable
from sparsejax.data.files.names import Names
from sparsejax.data.reading.histories import EVENTS, HISTORIES, TIMES, input_name
from sparsejax.data.reading.sources import Inputs, NamedArray, NamedCSR
from sparsejax.data.sets.click_columns import ColumnReader
from sparsejax.data.sets.click_records import cells_of, check_lengths, examples_of
from sparsejax.data.sets.click_schema import ClickSchema, KeyColumn, vocabularies_of
from sparsejax.data.sets.event_schema import CONTEXT, USERS
from sparsejax.data.sets.events import Events
from sparsejax.data.sets.sequences import Histories
from sparsejax.engine.rank.denied import denied_items
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.predictors.histories import BESIDE, Ordered, columns_in, columns_read
from sparsejax.predictors.ranking import Items, NameLists
from sparsejax.predictors.runtime import Programs, Rows
from sparsejax.predictors.signature import (
    LABEL,
    Array,
    Signature,
    Stages,
    features_of,
    reads_histories,
)
from sparsejax.sparse import CSR
from sparsejax.wide_ids import WideIds

ITEMS = "items"  # the column of a record with the item names of its row
INPUTS = "inputs"  # name of the single input of a first stage without input names
SECOND = "second/"
DENSE, IDS = f"{SECOND}dense", f"{SECOND}ids/"
COLUMN = "column/"  # prefix of vocabulary names in a file


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """The columns of requests, and their conversion to inputs of the programs.

    Attributes:
      feature_names: names of the items.
      stages: conversion of columns to inputs.
      schema: types of the columns, including the history; None if there are none.
      vocabularies: categories of each `VocabularyColumn`.
      events: event columns that the first stage reads, without rows; None if it reads none.
      users: user columns that the first stage reads, without rows; None if it reads none.
    """

    feature_names: Names
    stages: Stages
    schema: ClickSchema | None
    vocabularies: Mapping[str, Names]
    events: Events | None = None
    users: Events | None = None

    def __post_init__(self) -> None:
        known = {} if self.schema is None else vocabularies_of(self.schema)
        ids = {} if self.schema is None else self.schema.ids
        stages, named = self.stages, {None, *ids}
        if (
            known.keys() != self.vocabularies.keys()
            or ids.keys() != stages.lengths.keys()
            or not named >= {stages.history, *stages.beside, *stages.beside.values()}
        ):
            raise ValueError("the schema fits no such vocabularies, lengths, histories")

    @functools.cached_property
    def reader(self) -> ColumnReader | None:
        """The reader of the columns, or None if there are none."""
        if self.schema is None:
            return None
        return ColumnReader(self.schema, self.vocabularies, few=True)

    @property
    def columns(self) -> list[str]:
        """Names of the columns of a request, besides the items of its row."""
        if self.schema is None:
            return []
        used = [*self.schema.dense, *self.schema.ids]
        return [name for name in used if name != self.stages.history]

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The inputs of a program by name, with the shape and dtype of a row of each."""
        if self.schema is None:
            return {}
        found = {}
        if self.schema.dense:
            shape = (len(self.schema.dense),)
            found[DENSE] = jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, column in self.schema.ids.items():
            is_key = isinstance(column, KeyColumn)  # its ids are two words
            width = 2 if is_key else self.stages.lengths[name]
            found[f"{IDS}{name}"] = jax.ShapeDtypeStruct((width,), jnp.int32)
        return found

    def arrays(
        self, columns: Mapping[str, Any], histories: Sequence[Sequence[str]] | Any
    ) -> dict[str, np.ndarray]:
        """Converts columns of some rows to inputs.

        Args:
          columns: values of the `columns` by name.
          histories: names of the items of each row; or an Arrow array of lists.

        Raises:
          DataError: a column has an invalid value.
          ValueError: a column is missing or unknown, columns differ in length, or a list is too
              long.
        """
        if unknown := columns.keys() - {*self.columns}:
            raise ValueError(
                f"unknown column {min(unknown)!r}; a request has {self.columns}, and its items"
            )
        if self.schema is None:
            return {}
        if self.stages.history is not None:
            lists = histories if hasattr(histories, "type") else [*map(list, histories)]
            columns = {**columns, self.stages.history: lists}
        dense, ids = examples_of(columns, self.schema, self.vocabularies, self.reader)
        if len(dense) != len(histories):
            raise ValueError(
                f"there are {len(histories):,} rows, but columns of {len(dense):,}"
            )
        found, stages = {DENSE: dense} if self.schema.dense else {}, self.stages
        for name, of in stages.beside.items():
            check_lengths(ids, of, name)
        for name, each in ids.items():
            cut = stages.beside.get(name, name) == stages.history
            found[f"{IDS}{name}"] = padded(name, each, stages.lengths[name], cut=cut)
        return found


def padded(
    name: str, ids: np.ndarray | CSR | WideIds, length: int, *, cut: bool = False
) -> np.ndarray:
    """Ids of a column as int32 `[rows, length]`, padded with -1; 64-bit ids as two words each.

    Args:
      name: name of the column, for messages.
      ids: ids made by `examples_of`.
      length: capacity for a list.
      cut: whether only the last `length` ids of longer lists are used; otherwise they are an
          error.
    """
    if isinstance(ids, CSR):
        lists = Histories(np.asarray(ids.indptr), np.asarray(ids.indices))
        longest = int(np.diff(lists.indptr).max(initial=0))
        if longest > length and not cut:
            raise ValueError(
                f"column {name!r} has a list of {longest:,} categories, more than the "
                f"{length:,} that are read: cut it"
            )
        return lists.padded(length)
    if isinstance(ids, WideIds) or ids.dtype.itemsize == 8:
        wide = ids if isinstance(ids, WideIds) else WideIds.of(ids)
        return np.stack([wide.low, wide.high], axis=1).view(np.int32)
    return np.pad(ids[:, None], ((0, 0), (0, length - 1)), constant_values=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Staged(Items):
    """Ranks the candidates of a first stage; see `Predictor` for its methods.

    Attributes:
      requests: columns of requests, with their conversion to inputs.
    """

    has: ClassVar[str] = "recommend and recommend_records"
    recommend_names: ClassVar[None] = None  # type: ignore[assignment]

    requests: Requests

    @classmethod
    def of(
        cls, signature: Signature, vocabularies: Mapping[str, NameTable]
    ) -> Callable[[Programs], Self]:
        own = {n: table for n, table in vocabularies.items() if n.startswith(COLUMN)}
        beside = {n: table for n, table in vocabularies.items() if n.startswith(BESIDE)}
        rest = {n: t for n, t in vocabularies.items() if n not in own | beside}
        if signature.stages is None or ITEMS not in rest:
            raise ValueError(f"{LABEL} is not that of two stages with names of items")
        made: Any = super().of(dataclasses.replace(signature, stages=None), rest)
        found = [x for x in signature.inputs if (x.name or "").startswith(SECOND)]
        first = features_of(signature.inputs[: -1 - len(found)])
        if not isinstance(first, Mapping):
            raise ValueError(f"{LABEL} has other inputs of the first stage")
        requests = Requests(
            feature_names=rest[ITEMS].names,
            stages=signature.stages,
            schema=signature.schema,
            vocabularies={n.removeprefix(COLUMN): t.names for n, t in own.items()},
            **columns_in(signature, first, beside),
        )
        wanted = [Array.of(like, name) for name, like in requests.inputs.items()]
        if found != wanted or [*signature.inputs[-1 - len(wanted) : -1]] != wanted:
            raise ValueError(f"{LABEL} has other inputs than its schema")
        if not (
            {n for n in first if not n.startswith((*BESIDE, CONTEXT))}
            <= {HISTORIES, TIMES}
            if reads_histories(first)
            else first == {INPUTS: made.keywords["num_items"]}
        ):
            raise ValueError(f"{LABEL} has other inputs of the first stage")
        return functools.partial(made, requests=requests)

    @functools.cached_property
    def first(self) -> Items:
        inputs = self.programs.inputs[: -1 - len(self.requests.inputs)]
        exclude = self.programs.inputs[-1]
        features: Any = features_of(inputs)
        is_ordered = reads_histories(features)
        programs = dataclasses.replace(self.programs, inputs=(*inputs, exclude))
        columns = {"events": self.requests.events, "users": self.requests.users}
        return (Ordered if is_ordered else Items)(
            **columns if is_ordered else {},
            programs=programs,
            k=self.k,
            num_features=features if is_ordered else features[INPUTS],
            num_items=self.num_items,
            num_read=self.num_items,
            table=self.table,
            items=self.items,
        )

    @property
    def reads_times(self) -> bool:
        return self.first.reads_times

    @functools.cached_property
    def _of_first(self) -> list[str]:
        """Names of the first stage's event and user columns in records and requests."""
        read = columns_read(self.requests.events, self.requests.users)
        return [input_name(name) for name in read if name != USERS]

    def rows_of_names(
        self,
        histories: NameLists | Sequence[Sequence[str]],
        *,
        columns: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[list[Rows], np.ndarray]:
        """Rows for the first stage, to which the other columns of a request are added, by name."""
        if not isinstance(histories, NameLists):
            histories = NameLists.of(histories)
        columns = columns or {}
        if self._of_first:
            known = {*self._of_first, USERS}
            options["columns"] = {n: x for n, x in columns.items() if n in known}
            columns = {n: x for n, x in columns.items() if n not in known}
        (*given, exclude), unknown = self.first.rows_of_names(histories, **options)
        arrays = self.requests.arrays(columns, histories.lists())
        return [*given, *arrays.values(), exclude], unknown

    def recommend_records(
        self, records: Any, *, k: int | None, exclude_seen: bool, **which: Any
    ) -> Recommendations:
        """Recommends the best items to each record."""
        times = ["times"] * self.reads_times
        names = [ITEMS, *times, *self._of_first, *self.requests.columns]
        found = dict(cells_of(records, names).columns)
        lists, *numbers = (
            [cell or [] for cell in found.pop(name).to_pylist()]
            for name in (ITEMS, *times)
        )
        for name in self._of_first:
            found[name] = found[name].to_pylist()
            if name.startswith(EVENTS):
                found[name] = _of_events(name, found[name], lists)
        options: dict[str, Any] = {"times": numbers[0]} if numbers else {}
        options |= {"exclude_seen": exclude_seen, "columns": found}
        given, _ = self.rows_of_names(lists, **options)
        *parts, seen = (
            NamedArray("records", each)
            if isinstance(each, np.ndarray)
            else NamedCSR("records", cast(CSR, each))
            for each in given
        )
        names = [like.name or "" for like in self.programs.inputs[:-1]]
        shown = Inputs(dict(zip(names, parts, strict=True)), alone=False)
        denied = denied_items(self.num_items, self.items, **which)
        rows = np.arange(len(lists))
        return self._recommend(shown, k, cast(CSR, seen.matrix), rows, denied)

    def example(self) -> list[Rows]:
        *given, exclude = self.first.example()
        wanted = self.requests.inputs.values()
        arrays = [np.zeros((1, *like.shape), like.dtype) for like in wanted]
        return [*given, *arrays, exclude]


def _of_events[T](
    name: str, cells: Sequence[Sequence[T] | None], lists: Sequence[Sequence[str]]
) -> list[T]:
    """Concatenates the cells of all rows' events, given as a list for each row."""
    found = [cell or [] for cell in cells]
    if [*map(len, found)] != [*map(len, lists)]:
        raise ValueError(
            f"{name!r} must be lists with a value for each of a row's items"
        )
    return [*itertools.chain(*found)]
