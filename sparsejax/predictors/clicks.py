"""Predictors of clicks, which return the probability of a click for each example."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import scipy.special

from sparsejax.data.files.name_index import NameTable
from sparsejax.data.files.names import Names
from sparsejax.data.sets.click_columns import ColumnReader
from sparsejax.data.sets.click_records import check_lengths, examples_of
from sparsejax.data.sets.click_schema import (
    ClickSchema,
    KeyColumn,
    LabelColumn,
    num_ids,
    vocabularies_of,
)
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.engine.rank.loop import check_positive
from sparsejax.ops.index_edits import rows_in
from sparsejax.predictors.changes import layout_of
from sparsejax.predictors.runtime import Entries, Programs, Rows, room_for
from sparsejax.predictors.signature import LABEL, ClickStack, Signature, of_clicks
from sparsejax.sparse import CSR, as_int32, host_rows
from sparsejax.wide_ids import WideIds, joined

Ids = np.ndarray | CSR | WideIds


@dataclasses.dataclass(frozen=True, eq=False)
class Clicks:
    """Predicts clicks; see `Predictor` for its methods.

    Attributes:
      has: description of the requests that it answers, for messages.
      programs: programs of the predictor.
      num_dense: number of dense columns.
      stacks: stacks of tables, with the mapping from ids of features to rows.
      schema: types of the columns of records; None if the file has no schema.
      vocabularies: categories of each `VocabularyColumn`.
    """

    has: ClassVar[str] = "predict and predict_records"

    programs: Programs
    num_dense: int
    stacks: tuple[ClickStack, ...]
    schema: ClickSchema | None
    vocabularies: Mapping[str, Names]

    @classmethod
    def of(
        cls, signature: Signature, vocabularies: Mapping[str, NameTable]
    ) -> Callable[[Programs], Clicks]:
        """A function that makes this object from programs. `of_clicks` made their signature.

        Raises:
          ValueError: the signature is of another kind, or the ids of the schema do not match the
              tables.
        """
        stacks, schema = signature.stacks, signature.schema
        names = {name: table.names for name, table in vocabularies.items()}
        num_dense = sum(signature.inputs[0].shape) if signature.inputs else 0
        wanted = of_clicks(num_dense, stacks, schema)
        if not stacks or wanted != {name: getattr(signature, name) for name in wanted}:
            raise ValueError(f"{LABEL} is not that of a click model")
        if schema is not None:
            _check_schema(schema, num_dense, stacks, names)
        facts = {"num_dense": num_dense, "stacks": stacks, "schema": schema}
        return functools.partial(cls, vocabularies=names, **facts)

    def __str__(self) -> str:
        schema = "without schema" if self.schema is None else "with schema"
        features = sum(len(stack.features) for stack in self.stacks)
        return f"num_dense={self.num_dense}, features={features}, {schema}"

    def predict(
        self, clicks: ClickDataset | np.ndarray, ids: Mapping[str, Ids] | None
    ) -> Any:
        """Predicts the probability of a click for each example, or each label."""
        if isinstance(clicks, ClickDataset):
            if ids is not None:
                raise ValueError("a data set has ids: leave out ids")
            clicks = clicks.as_served()
            dense, ids = clicks.dense, clicks.ids
        elif ids is None:
            raise ValueError(
                "dense columns need ids: predict(dense, ids); columns by their names go to "
                "predict_records"
            )
        else:
            dense = np.asarray(clicks, np.float32)
        if dense.ndim != 2 or dense.shape[1] != self.num_dense:
            raise ValueError(
                f"dense must be [n, {self.num_dense}], got the shape {dense.shape}"
            )
        ids = self._checked(ids, len(dense))
        found = np.empty(
            (len(dense), *([len(self.labels)] * bool(self.labels))), np.float32
        )
        # New weights may arrive during the batches, but all examples must use equal weights.
        programs = self.programs.steady()
        batches = programs.batches(len(dense))
        results = [
            self._logits(
                programs,
                size,
                dense[part],
                {name: _rows(each, part) for name, each in ids.items()},
                part.start,
            )
            for size, part in batches
        ]
        for (_, part), result in zip(batches, results, strict=True):
            found[part] = np.asarray(result)[: part.stop - part.start]
        if (wrong := np.isnan(found).any(axis=(*range(1, found.ndim),))).any():
            raise FloatingPointError(
                f"the model gives NaN for example {int(wrong.argmax()):,}; its "
                "weights or the numbers of the example are not finite"
            )
        return self.predictions(found)

    @property
    def labels(self) -> dict[str, LabelColumn]:
        """The types of several labels, by name; empty if there is only one."""
        return {} if self.schema is None else self.schema.several

    def predictions(self, scores: np.ndarray) -> Any:
        """Converts logits `[n]` to probabilities, or logits `[n, labels]` to predictions by
        label.
        """
        if not self.labels:
            return scipy.special.expit(scores)
        by_label = np.ascontiguousarray(scores.T)
        return {
            name: scipy.special.expit(z) if column.is_probability else z
            for (name, column), z in zip(self.labels.items(), by_label, strict=True)
        }

    def predict_records(self, records: Any) -> Any:
        """Predicts the probability of a click for each record, or each label."""
        return self.predict(*self._examples_of(records))

    def rows_of_records(self, records: Any) -> list[Rows]:
        """Converts records to inputs of the programs, see `predict_records`."""
        dense, ids = self._examples_of(records)
        ids = self._checked(ids, len(dense))
        packed = (_packed(stack, len(dense), ids, 0) for stack in self.stacks)
        return [dense, *packed]

    def example(self) -> list[Rows]:
        """A row of input for `StoredAnswer`, with an id of each table."""
        dense = np.linspace(0, 1, self.num_dense, dtype=np.float32)[None]
        ids: dict[str, Ids] = {}
        for stack in self.stacks:
            for feature in stack.features:
                if stack.dynamic:
                    ids[feature.name] = self._known_id(stack, feature.first)
                else:
                    ids[feature.name] = np.array([feature.num_ids // 2], np.int32)
        checked = self._checked(ids, 1)
        return [dense, *(_packed(stack, 1, checked, 0) for stack in self.stacks)]

    def _known_id(self, stack: ClickStack, first: int) -> np.ndarray:
        """An id that has a row in a dynamic table; 0 if the table is empty."""
        signature = self.programs.signature
        assert signature is not None
        places = {each.name: i for i, each in enumerate(signature.weights)}
        tables = [table.first for table in stack.tables]
        used, keys = (
            self.programs.weights[places[f"{stack.index}.{name}"]]
            for name in ("used", "keys")
        )
        mask = np.asarray(used)
        rows = rows_in(layout_of(stack, mask), tables.index(first), mask)[:1]
        low, high = np.asarray(keys.reshape(-1, 2)[rows]).T
        return joined(low, high) if len(rows) else np.zeros(1, np.int64)

    def room(self, rows: int, entries: int) -> int:
        """The capacity for entries to run a program with, see `Programs.run`."""
        return room_for(entries, rows * max(stack.bags for stack in self.stacks))

    def warm_up(self, *, rows: int, max_items: int | None) -> None:
        """Compiles and runs all programs for requests of up to `rows` rows."""
        if max_items is not None:
            raise ValueError("max_items is of no use for clicks: leave it out")
        check_positive(rows=rows)
        for size in self.programs.sizes_up_to(rows):
            dense = np.zeros((size, self.num_dense), np.float32)
            none = dict.fromkeys(self._names, np.full(size, -1, np.int32))
            none = self._checked(none, size)
            jax.block_until_ready(self._logits(self.programs, size, dense, none))

    def _examples_of(self, records: Any) -> tuple[np.ndarray, Mapping[str, Ids]]:
        if self.schema is None:
            raise ValueError(
                "this predictor has no schema; export it with names=train, or use predict"
            )
        return examples_of(records, self.schema, self.vocabularies, self.reader)

    @functools.cached_property
    def reader(self) -> ColumnReader:
        """The reader of records, which converts their columns."""
        assert self.schema is not None  # without a schema, records are rejected
        return ColumnReader(self.schema, self.vocabularies, few=True)

    @property
    def _names(self) -> set[str]:
        return {f.name for stack in self.stacks for f in stack.features}

    def _checked(self, ids: Mapping[str, Ids], rows: int) -> dict[str, Ids]:
        """Checks the ids of each feature, and converts ids of dynamic tables to `WideIds`.

        Raises:
          TypeError: ids have an unsupported type.
          ValueError: features are missing or unknown, or shapes do not match.
        """
        names = self._names
        if ids.keys() != names:
            missing, unknown = names - ids.keys(), ids.keys() - names
            what = f"lack {sorted(missing)}" if missing else f"have {sorted(unknown)}"
            raise ValueError(f"the features are {sorted(names)}, but the ids {what}")
        dynamic = {f.name for s in self.stacks if s.dynamic for f in s.features}
        sizes = {f.name: f.num_ids for s in self.stacks for f in s.features}
        found = dict(ids)
        for name, each in ids.items():
            if name in dynamic:
                found[name] = _wide(name, each, rows)
                continue
            wrong = f"ids of feature {name!r} must be arrays of int32, a CSR or WideIds"
            if isinstance(each, WideIds):
                found[name] = each = jax.tree.map(np.asarray, each).narrow(sizes[name])
            flat = each.indices if isinstance(each, CSR) else each
            if getattr(flat, "dtype", None) != np.int32:
                raise TypeError(wrong)
            if isinstance(each, CSR) and each.data is not None:
                raise ValueError(
                    f"ids of feature {name!r} have weights; predictors take none"
                )
            if not isinstance(each, CSR) and flat.ndim not in (1, 2):
                raise ValueError(
                    f"ids of feature {name!r} must be [n] or [n, m], got the shape "
                    f"{flat.shape}"
                )
            if each.shape[0] != rows:
                raise ValueError(
                    f"feature {name!r} has {each.shape[0]:,} examples, but dense has {rows:,}"
                )
        for feature in (f for stack in self.stacks for f in stack.features if f.beside):
            check_lengths(found, feature.beside, feature.name)
        return found

    def _logits(
        self,
        programs: Programs,
        size: int,
        dense: np.ndarray,
        ids: Mapping[str, Ids],
        first: int = 0,
    ) -> jax.Array:
        """Starts to compute the logits of a batch. `first` is the number of its first example."""
        packed = [_packed(stack, size, ids, first) for stack in self.stacks]
        room = self.room(size, max(len(entries.indices) for entries in packed))
        (found,) = programs.run(size, [dense, *packed], room)
        return found


def _check_schema(
    schema: ClickSchema,
    num_dense: int,
    stacks: Sequence[ClickStack],
    vocabularies: Mapping[str, Names],
) -> None:
    """Raises ValueError if the ids of the schema do not match the tables."""
    known = vocabularies_of(schema).keys()
    if known != vocabularies.keys() or len(schema.dense) != num_dense:
        raise ValueError("the schema does not fit the vocabularies or num_dense")
    sizes = num_ids(schema, vocabularies)
    dynamic = {f.name for stack in stacks if stack.dynamic for f in stack.features}
    for feature in (f for stack in stacks for f in stack.features):
        is_key = isinstance(schema.ids.get(feature.name), KeyColumn)
        if is_key != (feature.name in dynamic):
            raise ValueError(
                f"the ids of {feature.name!r} have 64 bits in the schema or in its table, "
                "but not in both"
            )
        if not is_key and sizes.get(feature.name) != feature.num_ids:
            raise ValueError(
                f"the schema has {sizes.get(feature.name)} ids of {feature.name!r}, but "
                f"its table {feature.num_ids:,} rows"
            )


def _rows(ids: Ids, part: slice) -> Ids:
    if isinstance(ids, CSR):
        return host_rows(ids, np.arange(part.start, part.stop))
    if not isinstance(ids, WideIds):
        return np.asarray(ids[part])
    if ids.offsets is None:
        present = None if ids.present is None else ids.present[part]
        return WideIds(ids.low[part], ids.high[part], present)
    offsets = ids.offsets[part.start : part.stop + 1]
    of_part = slice(offsets[0], offsets[-1])
    return WideIds(ids.low[of_part], ids.high[of_part], offsets=offsets - offsets[0])


def _wide(name: str, ids: Any, rows: int) -> WideIds:
    """Converts ids of a dynamic table to `WideIds` on the host."""
    try:
        found = ids if isinstance(ids, WideIds) else WideIds.of(ids)
    except (TypeError, ValueError) as error:
        raise type(error)(f"feature {name!r}: {error}") from None
    if found.weights is not None:
        raise ValueError(f"ids of feature {name!r} have weights; predictors take none")
    found = jax.tree.map(np.asarray, found)
    count = len(found.low) if found.offsets is None else len(found.offsets) - 1
    if count != rows or found.low.ndim not in (1, 2):
        raise ValueError(
            f"ids of feature {name!r} must be [n] or [n, m] with n={rows:,}, as dense has; "
            f"got {count:,} examples, and ids of the shape {found.low.shape}"
        )
    return found


def _packed(
    stack: ClickStack, rows: int, ids: Mapping[str, Ids], first: int
) -> Entries:
    """Sparse matrix with a row for each bag; its columns are row numbers or ids of the stack."""
    bags, places = [], []
    for feature in stack.features:
        example, position, found = _entries(ids[feature.name])
        if feature.last:
            ends = np.zeros(rows, np.int64)
            np.maximum.at(ends, example, position + 1)
            position = position - np.maximum(ends - feature.length, 0)[example]
            kept = position >= 0
            example, position, found = (a[kept] for a in (example, position, found))
        if feature.length and (position >= feature.length).any():
            wrong = first + int(example[np.argmax(position >= feature.length)])
            raise ValueError(
                f"feature {feature.name!r}, example {wrong:,}: a list of more than "
                f"{feature.length} ids; cut it"
            )
        outside = (found < 0) | (found >= feature.num_ids)
        if outside.any() and not stack.dynamic:
            if not feature.drop:
                at = int(np.argmax(outside))
                raise ValueError(
                    f"feature {feature.name!r}, example {first + example[at]:,}: there is no id "
                    f"{found[at]}; ids are below {feature.num_ids:,}"
                )
            example, position, found = (a[~outside] for a in (example, position, found))
        bag = feature.bag + (position if feature.length else 0)
        bags.append(example * stack.bags + bag)
        places.append(found if stack.dynamic else found + feature.first)
    bag, place = np.concatenate(bags), np.concatenate(places)
    order = np.argsort(bag, kind="stable")
    counts = np.bincount(bag, minlength=rows * stack.bags)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    if stack.dynamic:
        words = WideIds.of(place[order])
        low, high = np.asarray(words.low), np.asarray(words.high)
        return Entries(high, low.view(np.int32), as_int32("indptr", indptr))
    return Entries(None, as_int32("ids", place[order]), as_int32("indptr", indptr))


def _entries(ids: Ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of examples, positions in their lists, and ids, of all ids that are not missing."""
    if isinstance(ids, CSR):
        indptr = np.asarray(ids.indptr)
        example = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        position = np.arange(len(example)) - indptr[example]
        return example, position, np.asarray(ids.indices)[: len(example)]
    if isinstance(ids, WideIds):
        values = joined(np.asarray(ids.low), np.asarray(ids.high))
        if ids.offsets is not None:
            offsets = np.asarray(ids.offsets)
            example = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            return example, np.arange(len(example)) - offsets[example], values
        there = np.ones(values.shape, bool) if ids.present is None else ids.present
    else:
        values, there = ids, ids != -1
    shape = len(values), values.shape[1] if values.ndim == 2 else 1
    example, position = np.nonzero(there.reshape(shape))
    return example, position, values.reshape(shape)[example, position]
