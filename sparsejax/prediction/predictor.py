"""A model as programs, which recommend without Flax and without the model's code."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, overload

import jax
import numpy as np

from sparsejax.data.histories import (
    HISTORIES,
    TIMES,
    Unordered,
    inputs_of,
    unordered,
)
from sparsejax.data.names import Names, quoted
from sparsejax.data.sequences import Histories, SequenceDataset
from sparsejax.data.sources import (
    Features,
    Inputs,
    NamedArray,
    NamedCSR,
    Source,
    Sources,
    check_columns,
    check_inputs,
    check_same_features,
    rows_of_inputs,
)
from sparsejax.engine.rank.loop import check_positive, collect, rows_of
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.mesh.layout import without_mesh
from sparsejax.prediction import archive
from sparsejax.sparse import CSR, host_rows

# There are programs for 1, 8, 64, ... rows. So there are few to compile, and requests that
# fill less than half of a program use smaller ones.
_ROWS_STEP = 8
# Room for this many entries a row, but at least so many in all; larger rooms are 4, 16,
# 64, ... times as large. An entry of room costs some nanoseconds.
_ENTRIES, _LEAST_ENTRIES, _ENTRIES_STEP = 64, 256, 4


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Predictor:
    """A model that `sparsejax.load_predictor` has read, ready to recommend.

    >>> export_predictor(model, "model.predictor", k=2, names=train)
    >>> predictor = load_predictor("model.predictor")
    >>> predictor.recommend(train).ids.shape
    (32711, 2)
    >>> predictor.recommend_names(["/products", "/support"])
    ['/...', '/...']

    A program is compiled when it is first needed, which takes a second or more. Call
    `warm_up` before the first request.

    Pickled, it is the path of its file: the other process loads the file itself. It does not
    work in a process that was forked from the one that has loaded it.

    Attributes:
      k: most items that can be recommended to a row.
      num_features: number of input features; with several inputs a dict, as the model
        has it.
      num_items: number of items that are scored.
      items: names of the items, or None.
      programs: for each number of rows, `(weights, inputs, exclude) -> (ids, scores)`,
        see `prediction.programs`. Each is compiled for some numbers of entries.
      weights: the first argument of the programs, on the device.
      again: loads the same file again, see `archive.again`; or None.
    """

    k: int
    num_features: Features
    num_items: int
    items: Names | None
    programs: dict[int, Callable[..., Any]]
    weights: list[jax.Array]
    again: Callable[[], Predictor] | None = None

    def __repr__(self) -> str:
        names = "without names" if self.items is None else "with names"
        return (
            f"Predictor(k={self.k}, num_features={self.num_features}, "
            f"num_items={self.num_items}, {names}, rows={sorted(self.programs)})"
        )

    def __reduce__(self):
        return archive.pickled(self.again)

    def recommend(
        self,
        inputs: Sources | SequenceDataset,
        *,
        k: int | None = None,
        exclude: Unordered = None,
    ) -> Recommendations:
        """The `k` best of all items for each row, as `sparsejax.recommend` finds them.

        The last bits of the scores may differ from those of `sparsejax.recommend`. They
        also depend on the number of rows in a call, because each program adds in its own
        order.

        Args:
          inputs: `[rows, num_features]`; or several by name; or histories, for a predictor
            of a model of histories.
          k: items per row. The default, and the most, is the `k` that the predictor was
            exported with.
          exclude: `[rows, num_items]`, what not to recommend, or the name of an input;
            see `recommend`.

        Raises:
          FloatingPointError: a score is NaN; the message names the row.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: `inputs` or `exclude` has a type that is not supported.
          ValueError: `inputs` or `exclude` does not fit the model, or they do not fit
            each other; `k` is too large.
        """
        archive.check_process()
        if isinstance(inputs, SequenceDataset):
            if exclude is inputs:
                exclude = "inputs"
            exclude = unordered("exclude", exclude, inputs)
            given = self._inputs_of(inputs)
        elif self._length is not None and not isinstance(inputs, Mapping):
            raise ValueError(
                "this predictor is of a model of histories; pass a SequenceDataset, as "
                f"read_sequences makes it, not a {type(inputs).__name__}"
            )
        else:
            given = Inputs.of(inputs)
        shown = _on_host(given)
        x = shown.rows
        if isinstance(x, NamedCSR) and self.num_items == self.num_features:
            check_same_features(
                x, NamedCSR("the predictor", x.matrix, None, self.items)
            )
        check_inputs(shown, self.num_features)
        if exclude is None:
            return self._recommend(shown, k, None, None)
        if exclude is inputs:
            exclude = "inputs"  # its name where it is the only one
        seen = _part_on_host(shown.named("exclude", cast(Source | str, exclude)))
        check_columns("exclude", seen.matrix.num_cols, self.num_items, "items")
        if shown.alone and isinstance(x, NamedCSR):
            check_same_features(x, seen)
        return self._recommend(shown, k, seen.matrix, rows_of(seen, x))

    @overload
    def recommend_names(
        self,
        histories: Sequence[str],
        *,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
    ) -> list[str]: ...

    @overload
    def recommend_names(
        self,
        histories: Sequence[Sequence[str]],
        *,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
    ) -> list[list[str]]: ...

    def recommend_names(
        self,
        histories: Sequence[str] | Sequence[Sequence[str]],
        *,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
    ) -> list[str] | list[list[str]]:
        """The names of the `k` best items for a history of names, or for several.

        >>> export_predictor(model, "model.predictor", k=2, names=train)
        >>> predictor = load_predictor("model.predictor")
        >>> predictor.recommend_names(["/products", "/support"], k=1)
        ['/...']
        >>> predictor.recommend_names([["/products"], []])
        [['/...', '/...'], ['/...', '/...']]

        A history is a set: a name that occurs twice counts once, and every entry has the
        value 1. Of a model of histories it is a list, the oldest item first, and items may
        come again with `exclude_seen=False`. Names that the predictor does not know are
        skipped. A history without any known name is treated as empty, like that of a new
        user.

        Args:
          histories: names of items, `["a", "b"]`; or a list of such lists. An empty list
            is one history.
          k: as for `recommend`.
          exclude_seen: do not recommend what the history has.
          unknown: "skip" skips unknown names; "error" raises.

        Returns:
          For each history the names of `k` items, best first; fewer if items run out.

        Raises:
          FloatingPointError: a score is NaN; the message names the row.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: a name is not a string, or a history is a string.
          ValueError: a name is unknown, and `unknown` is "error". The predictor was
            exported without names, or its inputs are not its items. `k` is too large.
        """
        archive.check_process()
        if unknown not in ("skip", "error"):
            raise ValueError(f'unknown is "skip" or "error", got {unknown!r}')
        if isinstance(histories, str):
            raise TypeError(
                f"a history is a list of names, got the string {histories!r}"
            )
        one = all(isinstance(part, str) for part in histories)
        several = cast(Sequence[Sequence[str]], [histories] if one else histories)
        known = self._numbers_of(several, unknown)
        matrix = self._matrix_of(known)
        if self._length is None:
            shown = Inputs({"inputs": NamedCSR("histories", matrix)}, alone=True)
        else:
            indptr = np.cumsum([0, *map(len, known)])
            ordered = Histories(indptr, np.fromiter(itertools.chain(*known), np.int32))
            array = ordered.padded(self._length)
            shown = Inputs({HISTORIES: NamedArray(HISTORIES, array)}, alone=False)
        rows = np.arange(matrix.num_rows)
        found = self._recommend(shown, k, matrix if exclude_seen else None, rows)
        names = self.names(found)
        return names[0] if one else names

    def names(self, found: Recommendations) -> list[list[str]]:
        """The names of the recommended items of each row.

        Raises:
          ValueError: the predictor was exported without names.
        """
        return found.names(self._item_names())

    def warm_up(self, *, max_items: int = 256, rows: int = 1) -> None:
        """Compiles and runs all programs that small requests need, before the first one.

        Args:
          max_items: most entries of a row, or of what is excluded for it.
          rows: most rows of a request.

        Raises:
          ValueError: an argument is not positive.
        """
        archive.check_process()
        check_positive(max_items=max_items, rows=rows)
        largest = max(self.programs)
        sizes = {
            s
            for n in range(1, min(rows, largest) + 1)
            for s in sizes_for(n, self.programs)
        }
        empty = [
            _NOTHING if row is None else np.zeros((0, *row.shape), row.dtype)
            for row in rows_of_inputs(self.num_features)
        ]
        for size in sorted(sizes):
            room = 0
            while room < max_items * size:
                room = _room(size, room + 1)
                jax.block_until_ready(self._run(size, empty, _NOTHING, room))
        if self.items is not None:
            _ = self._columns

    def _item_names(self) -> Names:
        if self.items is None:
            raise ValueError(
                "this predictor has no names; export it with names=..., or use "
                "found.names(...)"
            )
        return self.items

    @functools.cached_property
    def _columns(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._item_names().tolist())}

    @property
    def _length(self) -> int | None:
        """How many items are read, of a model of histories; None of another one."""
        if not isinstance(self.num_features, Mapping):
            return None
        row = self.num_features.get(HISTORIES)
        return row.shape[0] if isinstance(row, jax.ShapeDtypeStruct) else None

    def _inputs_of(self, sequences: SequenceDataset) -> Inputs:
        """The histories as the programs take them."""
        if self._length is None:
            raise ValueError(
                "this predictor is not of a model of histories; pass data.to_sparse()"
            )
        check_columns("inputs", sequences.num_features, self.num_items, "items")
        if self.items is not None:
            names = sequences.feature_names, self.items
            both = zip(("inputs", "the predictor"), names, strict=True)
            check_same_features(*(NamedCSR(w, _NOTHING, None, n) for w, n in both))
        assert isinstance(self.num_features, Mapping)
        return inputs_of(sequences, self._length, times=TIMES in self.num_features)

    def _numbers_of(
        self, histories: Sequence[Sequence[str]], unknown: Literal["skip", "error"]
    ) -> list[list[int]]:
        """The numbers of the known items of each history, in its order."""
        features = self.num_features
        if isinstance(features, Mapping) and self._length is None:
            raise ValueError(
                "the predictor has several inputs; use recommend({name: source})"
            )
        columns = self._columns
        if isinstance(features, int) and features != self.num_items:
            raise ValueError(
                f"the predictor knows the names of its {self.num_items:,} items, not "
                f"of its {features:,} features; use recommend with a matrix"
            )
        if isinstance(features, Mapping) and TIMES in features:
            raise ValueError(
                "the predictor also reads times; use recommend with a SequenceDataset"
            )
        rows: list[list[int]] = []
        missing: list[str] = []
        for history in histories:
            if isinstance(history, str) or not isinstance(history, Iterable):
                raise TypeError(
                    "expected one list of names, or a list of such lists, but one of the "
                    f"lists is {history!r}"
                )
            for name in history:
                if not isinstance(name, str):
                    raise TypeError(f"a name is a str, got {name!r}")
            rows.append([columns[name] for name in history if name in columns])
            missing += [name for name in history if name not in columns]
        if missing and unknown == "error":
            raise ValueError(
                f"{len(missing):,} of {sum(map(len, histories)):,} names are not items of "
                f"the predictor: {quoted(missing)}"
            )
        return rows

    def _matrix_of(self, histories: list[list[int]]) -> CSR:
        """`[histories, num_items]`: which items each history has."""
        rows = [sorted(set(history)) for history in histories]
        indices = np.fromiter(itertools.chain(*rows), np.int32)
        indptr = np.cumsum([0, *map(len, rows)])
        return CSR(None, indices, indptr, num_cols=self.num_items)

    def _recommend(
        self,
        shown: Inputs,
        k: int | None,
        seen: CSR | None,
        seen_rows: np.ndarray | None,
    ) -> Recommendations:
        k = self.k if k is None else k
        check_positive(k=k)
        if k > self.k:
            raise ValueError(
                f"k is {k} but the predictor was exported for k={self.k}; export it "
                "again with a larger k"
            )
        x, matrices = shown.rows, self._in_order(shown)
        sizes = sizes_for(x.num_rows, self.programs)
        starts = itertools.accumulate(sizes, initial=0)
        counts = [
            min(size, x.num_rows - start)
            for size, start in zip(sizes, starts, strict=False)
        ]

        def results() -> Iterator[Any]:
            start = 0
            for size, count in zip(sizes, counts, strict=True):
                rows = np.arange(start, start + count)
                parts = [
                    host_rows(matrix, rows) if isinstance(matrix, CSR) else matrix[rows]
                    for matrix in matrices
                ]
                unwanted = _NOTHING
                if seen is not None and seen_rows is not None:
                    unwanted = host_rows(seen, seen_rows[rows])
                sparse = [part for part in (*parts, unwanted) if isinstance(part, CSR)]
                room = _room(size, max(part.nse for part in sparse))
                yield self._run(size, parts, unwanted, room)
                start += count

        return collect(x, k, counts, results())

    def _in_order(self, shown: Inputs) -> list[CSR | np.ndarray]:
        """The inputs' matrices and arrays, in the order in which programs take them."""
        if not isinstance(self.num_features, Mapping):
            return [shown.matrix]
        return [shown.parts[name].matrix for name in self.num_features]

    def _run(
        self, size: int, parts: Sequence[CSR | np.ndarray], unwanted: CSR, room: int
    ):
        """Ids and scores of a batch. Does not wait for them."""
        dtypes = rows_of_inputs(self.num_features)
        inputs = [
            _csr_arrays(part, size, room)
            if isinstance(part, CSR)
            else _dense_rows(part, size, row)
            for part, row in zip(parts, dtypes, strict=True)
        ]
        exclude = _arrays(unwanted, size, room)
        with without_mesh():  # programs are for one device
            return self.programs[size](self.weights, inputs, exclude)


def sizes_of_programs(largest: int) -> list[int]:
    """The numbers of rows for which a predictor has programs."""
    sizes = [1]
    while sizes[-1] * _ROWS_STEP < largest:
        sizes.append(sizes[-1] * _ROWS_STEP)
    return [*sizes, largest] if largest > 1 else sizes


def sizes_for(rows: int, programs: Collection[int]) -> list[int]:
    """The sizes of the programs for a number of rows.

    All but the last are full; the last is at least half full.
    """
    sizes = []
    while rows > 0:
        fits = min((s for s in programs if rows <= s <= 2 * rows), default=None)
        size = fits or max(s for s in programs if s <= rows)
        sizes.append(size)
        rows -= size
    return sizes


_NOTHING = CSR(None, np.empty(0, np.int32), np.zeros(1, np.int32), num_cols=1)


def _room(rows: int, entries: int) -> int:
    """The smallest room for these entries. There are few sizes of rooms."""
    room = max(_LEAST_ENTRIES, _ENTRIES * rows)
    while room < entries:
        room *= _ENTRIES_STEP
    return room


def unflattened(features: Features, inputs: Sequence[Any]) -> Any:
    """The inputs of a program in the form that a model takes."""
    if isinstance(features, int):
        return CSR(*inputs[0], num_cols=features)
    return {
        name: CSR(*given, num_cols=size) if isinstance(size, int) else given
        for (name, size), given in zip(features.items(), inputs, strict=True)
    }


def _csr_arrays(matrix: CSR, rows: int, room: int) -> tuple[np.ndarray, ...]:
    data = np.ones(matrix.nse) if matrix.data is None else matrix.data
    return _padded(data, room, np.float32), *_arrays(matrix, rows, room)


def _dense_rows(
    array: np.ndarray, rows: int, row: jax.ShapeDtypeStruct | None
) -> np.ndarray:
    """The array, filled up with rows of zeros, in the dtype of the program."""
    assert row is not None
    return _padded(array.astype(row.dtype, copy=False), rows, row.dtype)


def _arrays(matrix: CSR, rows: int, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and indptr of a matrix on the host, filled up with empty rows."""
    indptr = np.asarray(matrix.indptr)
    more = (0, rows + 1 - len(indptr))
    indptr = np.pad(indptr, more, mode="edge").astype(np.int32)
    return _padded(np.asarray(matrix.indices), room, np.int32), indptr


def _padded(array, room: int, dtype) -> np.ndarray:
    padded = np.zeros((room, *np.shape(array)[1:]), dtype)
    padded[: len(array)] = array
    return padded


def _on_host(inputs: Inputs) -> Inputs:
    """The same inputs in NumPy."""
    parts = {
        name: _part_on_host(part) if isinstance(part, NamedCSR) else part
        for name, part in inputs.parts.items()
    }
    return dataclasses.replace(inputs, parts=parts)


def _part_on_host(part: NamedCSR) -> NamedCSR:
    """The same input in NumPy. A matrix that was on the device is checked."""
    matrix = part.matrix
    if isinstance(matrix.indices, np.ndarray):
        return part
    data = None if matrix.data is None else np.asarray(matrix.data)
    leaves = np.asarray(matrix.indices), np.asarray(matrix.indptr)
    return dataclasses.replace(
        part, matrix=CSR(data, *leaves, num_cols=matrix.num_cols)
    )
