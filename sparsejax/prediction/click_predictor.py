"""A click model as programs, which score without Flax and without the model's code."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import scipy.special
from jaxtyping import Float

from sparsejax.data.click_records import examples_of
from sparsejax.data.click_schema import ClickSchema
from sparsejax.data.clicks import ClickDataset
from sparsejax.data.names import Names
from sparsejax.engine.rank.loop import check_positive
from sparsejax.mesh.layout import without_mesh
from sparsejax.prediction import archive
from sparsejax.prediction.predictor import sizes_for
from sparsejax.sparse import CSR, as_int32, host_rows

# Larger rooms for ids are so many times as large as smaller ones.
_ROOM_STEP = 4

Ids = np.ndarray | CSR


@dataclasses.dataclass(frozen=True)
class ClickFeature:
    """Ids that a stack of tables is read by.

    Attributes:
      name: of the feature.
      num_ids: of its table.
      first: the row of its id 0 in the stack.
      bag: its first bag among the bags of an example.
      length: number of its bags if it stays in order; 0 if it is one bag.
      drop: whether ids outside the table are left out; else they are an error.
    """

    name: str
    num_ids: int
    first: int
    bag: int
    length: int
    drop: bool


@dataclasses.dataclass(frozen=True)
class ClickStack:
    """Tables that lie below each other.

    Attributes:
      bags: of an example.
      features: that read them.
    """

    bags: int
    features: tuple[ClickFeature, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ClickPredictor:
    """A click model that `sparsejax.load_click_predictor` has read, ready to predict.

    >>> _ = pathlib.Path("clicks.csv").write_text("click,user\\n1,ann\\n0,bob\\n0,ann\\n")
    >>> schema = ClickSchema("click", ids={"user": VocabularyColumn()})
    >>> clicks = read_clicks("clicks.csv", schema)
    >>> config = WideDeepConfig(dim=4, hidden=(8,))
    >>> model = WideDeep(config, num_dense=0, features=clicks.num_ids, rngs=nnx.Rngs(0))
    >>> export_predictor(model, "clicks.predictor", names=clicks)
    >>> predictor = load_click_predictor("clicks.predictor")
    >>> predictor.predict(clicks).shape
    (3,)
    >>> predictor.predict_records({"user": ["bob", None]}).shape
    (2,)

    A program is compiled when it is first needed, which takes a second or more. Call
    `warm_up` before the first request. It is pickled as `Predictor` is.

    Attributes:
      num_dense: number of dense columns.
      stacks: how the ids of features become rows of the tables.
      schema: what the columns of records are; None if the file has none.
      vocabularies: for each `VocabularyColumn` its categories.
      programs: for each number of rows, `(weights, dense, ids) -> logits`, see
        `prediction.programs`.
      weights: the first argument of the programs, on the device.
      again: loads the same file again, see `archive.again`; or None.
    """

    num_dense: int
    stacks: tuple[ClickStack, ...]
    schema: ClickSchema | None
    vocabularies: Mapping[str, Names]
    programs: dict[int, Callable[..., Any]]
    weights: list[jax.Array]
    again: Callable[[], ClickPredictor] | None = None

    def __repr__(self) -> str:
        schema = "without schema" if self.schema is None else "with schema"
        features = sum(len(stack.features) for stack in self.stacks)
        return (
            f"ClickPredictor(num_dense={self.num_dense}, features={features}, {schema}, "
            f"rows={sorted(self.programs)})"
        )

    def __reduce__(self):
        return archive.pickled(self.again)

    def predict(
        self,
        clicks: ClickDataset | np.ndarray,
        ids: Mapping[str, Ids] | None = None,
    ) -> Float[np.ndarray, "examples"]:
        """The probability of a click of each example, as `sparsejax.predict_clicks`.

        On a CPU the bits are those of `predict_clicks`, if both score as many examples at a
        time. Else the last bits may differ.

        Args:
          clicks: a data set; or dense columns `[n, num_dense]`, with `ids`. A data set has
            the ids that its own vocabulary gives: read it with that of the training data.
          ids: for each feature int32 `[n]` or `[n, m]`, where -1 is none, or a `CSR` without
            values.

        Raises:
          FloatingPointError: a probability is NaN; the message names the example.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: ids are not int32.
          ValueError: features are missing or unknown, shapes do not fit, or an id is outside
            its table.
        """
        archive.check_process()
        if isinstance(clicks, ClickDataset):
            if ids is not None:
                raise ValueError("a data set has ids: leave out ids")
            dense, ids = clicks.dense, clicks.ids
        elif ids is None:
            raise ValueError("dense columns need ids: predict(dense, ids)")
        else:
            dense = np.asarray(clicks, np.float32)
        if dense.ndim != 2 or dense.shape[1] != self.num_dense:
            raise ValueError(
                f"dense must be [n, {self.num_dense}], got the shape {dense.shape}"
            )
        self._check(ids, len(dense))
        found = np.empty(len(dense), np.float32)
        sizes = sizes_for(len(dense), self.programs)
        starts = itertools.accumulate(sizes, initial=0)
        parts = [
            slice(a, min(a + n, len(dense)))
            for a, n in zip(starts, sizes, strict=False)
        ]
        results = [
            self._logits(
                size,
                dense[part],
                {n: _rows(i, part) for n, i in ids.items()},
                part.start,
            )
            for size, part in zip(sizes, parts, strict=True)
        ]
        for part, result in zip(parts, results, strict=True):
            found[part] = np.asarray(result)[: part.stop - part.start]
        if np.isnan(found).any():
            raise FloatingPointError(
                f"the model gives NaN for example {int(np.isnan(found).argmax()):,}; its "
                "weights or the numbers of the example are not finite"
            )
        return scipy.special.expit(found)

    def predict_records(self, records: Any) -> Float[np.ndarray, "examples"]:
        """The probability of a click of each record, from what its columns hold.

        Columns are read as `read_clicks` reads those of a file, with the vocabularies of the
        training data. A category that was rare there, or did not occur, has the id of rare
        ones.

        Args:
          records: an Arrow table, or a dict of lists or arrays, by the names of columns.
            Labels are not needed; other columns are not read.

        Raises:
          FloatingPointError: see `predict`.
          TypeError: the records are no columns.
          ValueError: a column is missing or has a value that it may not have, or the
            predictor has no schema.
        """
        archive.check_process()
        if self.schema is None:
            raise ValueError(
                "this predictor has no schema; export it with names=train, or use predict"
            )
        return self.predict(*examples_of(records, self.schema, self.vocabularies))

    def warm_up(self, *, rows: int = 1) -> None:
        """Compiles and runs all programs for requests of up to so many rows.

        Lists that are longer than one id on average may need further programs.

        Raises:
          ValueError: `rows` is not positive.
        """
        archive.check_process()
        check_positive(rows=rows)
        names = {f.name for stack in self.stacks for f in stack.features}
        largest = max(self.programs)
        for size in {
            s
            for n in range(1, min(rows, largest) + 1)
            for s in sizes_for(n, self.programs)
        }:
            dense = np.zeros((size, self.num_dense), np.float32)
            none = dict.fromkeys(names, np.full(size, -1, np.int32))
            jax.block_until_ready(self._logits(size, dense, none))

    def _check(self, ids: Mapping[str, Ids], rows: int) -> None:
        """Raises unless there are ids of each feature, of the right types and shapes."""
        names = {f.name for stack in self.stacks for f in stack.features}
        if ids.keys() != names:
            missing, unknown = names - ids.keys(), ids.keys() - names
            what = f"lack {sorted(missing)}" if missing else f"have {sorted(unknown)}"
            raise ValueError(f"the features are {sorted(names)}, but the ids {what}")
        for name, each in ids.items():
            flat = each.indices if isinstance(each, CSR) else each
            if getattr(flat, "dtype", None) != np.int32:
                raise TypeError(
                    f"ids of feature {name!r} must be arrays of int32 or a CSR"
                )
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

    def _logits(
        self, size: int, dense: np.ndarray, ids: Mapping[str, Ids], first: int = 0
    ) -> jax.Array:
        """Logits of a batch, whose first example has this number. Does not wait for them."""
        packed = [_packed(stack, size, ids, first) for stack in self.stacks]
        room = max(size * stack.bags for stack in self.stacks)
        while room < max(len(indices) for indices, _ in packed):
            room *= _ROOM_STEP
        padded = [
            (np.pad(indices, (0, room - len(indices))), indptr)
            for indices, indptr in packed
        ]
        dense = np.pad(dense, [(0, size - len(dense)), (0, 0)])
        with without_mesh():  # programs are for one device
            return self.programs[size](self.weights, dense, padded)


def _rows(ids: Ids, part: slice) -> Ids:
    if isinstance(ids, CSR):
        return host_rows(ids, np.arange(part.start, part.stop))
    return np.asarray(ids[part])


def _packed(
    stack: ClickStack, rows: int, ids: Mapping[str, Ids], first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the stack for each bag: indices and indptr of a matrix."""
    bags, places = [], []
    for feature in stack.features:
        example, position, found = _entries(ids[feature.name])
        if feature.length and (position >= feature.length).any():
            wrong = first + int(example[np.argmax(position >= feature.length)])
            raise ValueError(
                f"feature {feature.name!r}, example {wrong:,}: a list of more than "
                f"{feature.length} ids; cut it"
            )
        outside = (found < 0) | (found >= feature.num_ids)
        if outside.any():
            if not feature.drop:
                at = int(np.argmax(outside))
                raise ValueError(
                    f"feature {feature.name!r}, example {first + example[at]:,}: there is no id "
                    f"{found[at]}; ids are below {feature.num_ids:,}"
                )
            example, position, found = (a[~outside] for a in (example, position, found))
        bag = feature.bag + (position if feature.length else 0)
        bags.append(example * stack.bags + bag)
        places.append(found + feature.first)
    bag, place = np.concatenate(bags), np.concatenate(places)
    order = np.argsort(bag, kind="stable")
    counts = np.bincount(bag, minlength=rows * stack.bags)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return as_int32("ids", place[order]), as_int32("indptr", indptr)


def _entries(ids: Ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Example, place in its list, and id of each id that is one."""
    if isinstance(ids, CSR):
        indptr = np.asarray(ids.indptr)
        example = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        position = np.arange(len(example)) - indptr[example]
        return example, position, np.asarray(ids.indices)[: len(example)]
    lists = ids.reshape(len(ids), ids.shape[1] if ids.ndim == 2 else 1)
    example, position = np.nonzero(lists != -1)
    return example, position, lists[example, position]
