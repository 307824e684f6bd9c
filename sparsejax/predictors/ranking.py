"""Predictors of items, which recommend the best items to each row."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import jax
import numpy as np

from sparsejax.data.files.name_index import NameTable, Places
from sparsejax.data.files.names import Names, quoted
from sparsejax.data.reading.sources import (
    Features,
    Inputs,
    NamedCSR,
    check_columns,
    check_inputs,
    check_same_features,
)
from sparsejax.engine.rank.denied import denied_items, rows_at_a_time, with_denied
from sparsejax.engine.rank.loop import check_positive, collect, rows_of
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.predictors.names import ITEMS
from sparsejax.predictors.new_items import TAGS
from sparsejax.predictors.runtime import Entries, Programs, Rows, room_for
from sparsejax.predictors.signature import (
    LABEL,
    Array,
    Signature,
    features_of,
    of_ranking,
)
from sparsejax.sparse import CSR, host_rows

Numbers = Sequence[Sequence[float]] | Sequence[np.ndarray]

# The least capacity for entries: so many for each row, and so many for all rows together.
_ENTRIES, _LEAST_ENTRIES = 64, 256
_NO_PLACES = np.empty(0, np.int64)
NOTHING = CSR(None, np.empty(0, np.int32), np.zeros(1, np.int32), num_cols=1)


class NameLists(NamedTuple):
    """Histories of names, concatenated.

    Attributes:
      names: names of all histories.
      indptr: places at which histories begin and end.
      numbers: item numbers of the names, -1 for unknown ones, if they are already known; else
          None.
    """

    names: Sequence[str]
    indptr: np.ndarray
    numbers: np.ndarray | None = None

    @classmethod
    def of(cls, histories: Sequence[Sequence[str]]) -> NameLists:
        """Concatenates histories.

        Raises:
          TypeError: a history is not a list, or a name is not a string.
        """
        for history in histories:
            if isinstance(history, str) or not isinstance(history, Iterable):
                raise TypeError(
                    "expected one list of names, or a list of such lists, but one of the "
                    f"lists is {history!r}"
                )
        names = [*itertools.chain(*histories)]
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"a name is a str, got {name!r}")
        return cls(names, np.cumsum([0, *map(len, histories)]))

    def lists(self) -> list[Sequence[str]]:
        """The histories as separate lists of names."""
        return [self.names[a:b] for a, b in itertools.pairwise(self.indptr.tolist())]


class Known(NamedTuple):
    """Item numbers of the known names in histories.

    Attributes:
      numbers: item numbers of all histories, concatenated.
      indptr: offsets at which histories begin and end.
    """

    numbers: np.ndarray
    indptr: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """For each item number, the number of its history."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))


class Beside(NamedTuple):
    """Event columns and context columns of histories.

    Attributes:
      columns: event columns of the known items, and context columns of the histories, whose names
          begin with `context/`.
      unknown: `[histories]` number of unknown categories in each history.
    """

    columns: Mapping[str, np.ndarray]
    unknown: np.ndarray


def unflattened(features: Features, inputs: Sequence[Any]) -> Any:
    """Converts the list of inputs of a program to the form that a model takes."""
    if isinstance(features, int):
        return CSR(*inputs[0], num_cols=features)
    return {
        name: CSR(*given, num_cols=size) if isinstance(size, int) else given
        for (name, size), given in zip(features.items(), inputs, strict=True)
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Items:
    """Recommends items to rows of matrices and arrays; see `Predictor` for its methods.

    Attributes:
      has: description of the requests that it answers, for messages.
      programs: programs of the predictor.
      k: largest number of items for a row.
      num_features: number of input features; with several inputs a dict.
      num_items: number of items.
      num_read: number of items that the programs know. Later items were added: they are
          recommended, but ignored in inputs.
      table: names of the items, with an index, or None.
      items: names of the items as an array.
    """

    has: ClassVar[str] = "recommend"

    programs: Programs
    k: int
    num_features: Features
    num_items: int
    num_read: int
    table: NameTable | None
    items: Names | None

    @classmethod
    def of(
        cls, signature: Signature, vocabularies: Mapping[str, NameTable]
    ) -> Callable[[Programs], Self]:
        """A function that makes this object from programs. `of_ranking` made their signature.

        Raises:
          ValueError: the signature is of another kind, or the file has other lists of names.
        """
        if not signature.inputs or not signature.outputs or signature.stacks:
            raise ValueError(f"{LABEL} is not that of a recommender")
        *inputs, exclude = signature.inputs
        k, num_items = (
            max(s.shape, default=0) for s in (signature.outputs[0], exclude)
        )
        features, table = features_of(inputs), vocabularies.get(ITEMS)
        items = None if table is None else table.names
        values = len(signature.outputs) == 3
        wanted = of_ranking(features, num_items, k, values=values)
        if wanted != {name: getattr(signature, name) for name in wanted}:
            raise ValueError(f"{LABEL} is not that of a recommender")
        if vocabularies.keys() - {ITEMS, TAGS}:
            raise ValueError(f"there are names of {sorted(vocabularies)}, not of items")
        if items is not None and len(items) != num_items:
            raise ValueError(f"{len(items):,} names were given for {num_items:,} items")
        num_read = num_items - signature.added
        if features == num_read:
            features = num_items
        facts = {"k": k, "num_items": num_items, "num_read": num_read}
        facts |= {"num_features": features, "table": table, "items": items}
        return functools.partial(cls, **facts)

    def __str__(self) -> str:
        names = "without names" if self.items is None else "with names"
        return (
            f"k={self.k}, num_features={self.num_features}, num_items={self.num_items}, "
            f"{names}"
        )

    def recommend(
        self, inputs: Any, *, k: int | None, exclude: Any, **which: Any
    ) -> Recommendations:
        """Recommends the best items to each row."""
        denied = denied_items(self.num_items, self.items, **which)
        if exclude is inputs:
            exclude = "inputs"  # the name of a single input
        exclude = self._excluded(exclude, inputs)
        shown = _on_host(self._inputs(inputs))
        x = shown.rows
        if isinstance(x, NamedCSR) and self.num_items == self.num_features:
            own = NamedCSR("the predictor", x.matrix, None, self.items)
            check_same_features(x, own)
        check_inputs(shown, self.num_features)
        if exclude is None:
            return self._recommend(shown, k, None, None, denied)
        seen = _part_on_host(shown.named("exclude", exclude))
        check_columns("exclude", seen.matrix.num_cols, self.num_items, "items")
        if shown.alone and isinstance(x, NamedCSR):
            check_same_features(x, seen)
        return self._recommend(shown, k, seen.matrix, rows_of(seen, x), denied)

    def recommend_names(
        self,
        histories: Sequence[str] | Sequence[Sequence[str]],
        *,
        k: int | None,
        exclude_seen: bool,
        unknown: Literal["skip", "error"],
        times: Sequence[float] | Numbers | None,
        columns: Mapping[str, Any] | None = None,
        **which: Any,
    ) -> list[str] | list[list[str]]:
        """Recommends items to histories of names; returns their names."""
        if unknown not in ("skip", "error"):
            raise ValueError(f'unknown is "skip" or "error", got {unknown!r}')
        if isinstance(histories, str):
            raise TypeError(
                f"a history is a list of names, got the string {histories!r}"
            )
        one = all(isinstance(part, str) for part in histories)
        several = cast(Sequence[Sequence[str]], [histories] if one else histories)
        self._check_names_suffice(times)
        lists = NameLists.of(several)
        beside = self._columns_of(lists, columns)
        known = self._known_of(lists)
        if unknown == "error" and len(known.numbers) < len(lists.names):
            missing = [name for name in lists.names if name not in self._columns]
            raise ValueError(
                f"{len(missing):,} of {len(lists.names):,} names are not items of "
                f"the predictor: {quoted(missing)}"
            )
        matrix = self._matrix_of(known)
        rows, at = np.arange(matrix.num_rows), None
        if times is not None:
            given = cast(Numbers, [times] if one else times)
            at = self._times_of(several, given)
        shown = self._shown(known, matrix, at, beside)
        seen = matrix if exclude_seen else None
        denied = denied_items(self.num_items, self.items, **which)
        found = self._recommend(shown, k, seen, rows, denied)
        names = self.names(found)
        return names[0] if one else names

    def names(self, found: Recommendations) -> list[list[str]]:
        """The names of the recommended items."""
        return found.names(self._item_names())

    def extended(
        self,
        signature: Signature,
        vocabularies: Mapping[str, Names],
        weights: Sequence[jax.Array],
    ) -> Self:
        """A copy with additional items, see `new_items.extended`."""
        programs = Programs.of(signature, self.programs.code, weights)
        tables = {name: NameTable.of(some) for name, some in vocabularies.items()}
        return type(self).of(signature, tables)(programs)

    def warm_up(self, *, rows: int, max_items: int | None) -> None:
        """Compiles and runs all programs for requests with up to this many rows and entries."""
        max_items = 256 if max_items is None else max_items
        check_positive(max_items=max_items, rows=rows)
        nothing = self.programs.nothing
        for size in self.programs.sizes_up_to(rows):
            room = 0
            while room < max_items * size:
                room = self.room(size, room + 1)
                jax.block_until_ready(self.programs.run(size, nothing, room))
        if self.items is not None:
            _ = self._columns

    def room(self, rows: int, entries: int) -> int:
        """The capacity for entries to run a program with, see `Programs.run`."""
        return room_for(entries, max(_LEAST_ENTRIES, _ENTRIES * rows))

    @property
    def first(self) -> Items:
        """The stage that reads the items of a row; for a single stage, this object."""
        return self

    @property
    def reads_times(self) -> bool:
        """Whether a history must have the times of its items."""
        return False

    def rows_of_names(
        self,
        histories: NameLists | Sequence[Sequence[str]],
        *,
        times: Numbers | None = None,
        values: Numbers | None = None,
        exclude: NameLists | Sequence[Sequence[str]] | None = None,
        exclude_seen: bool = True,
        only: NameLists | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> tuple[list[Rows], np.ndarray]:
        """Converts histories of names to inputs of the programs; returns also unknown counts.

        The counts `[histories]` include unknown names in `exclude` and `only`, and unknown
        categories of events.

        Args:
          histories: names of the items of each history.
          times: time of each name, for a predictor that reads times.
          values: value of each name, for an item model; 1 by default.
          exclude: for each history, names of further items to exclude.
          exclude_seen: whether the items of a history are excluded from its recommendations.
          only: for each history, names of the only items to rank. The result is then for
              `Programs.only`.
          columns: for a predictor that reads event columns, the values of each column for all
              names, concatenated. `context/NAME` is a column with a value for each history, and so
              is `users/NAME`. "users/" is an `Events` of known users, in which these columns
              replace others.

        Raises:
          TypeError: a name is not a string, or a history is a string.
          ValueError: a name is unknown, and `unknown` is "error"; or values or times do not match
              the names, are not finite, or a value is given for a repeated name.
        """
        self._check_names_suffice(times)
        asked = _as_lists(histories)
        known = self._known_of(asked)
        matrix = self._matrix_of(known)
        at = None if times is None else self._times_of(asked.lists(), times)
        beside = self._columns_of(asked, columns)
        valued = matrix
        if values is not None:
            data = self._values_of(asked.lists(), values, known)
            valued = dataclasses.replace(matrix, data=data)
        shown = self._shown(known, valued, at, beside)
        unwanted = [known] * exclude_seen
        unknown = _lengths(asked.indptr) - _lengths(known.indptr)
        if beside is not None:
            unknown = unknown + beside.unknown
        if exclude is not None:
            further = _as_lists(exclude)
            unwanted.append(self._known_of(further))
            known_of_further = _lengths(unwanted[-1].indptr)
            unknown = unknown + _lengths(further.indptr) - known_of_further
        if not exclude_seen or exclude is not None:
            matrix = self._matrix_of(*unwanted, rows=matrix.num_rows)
        if only is not None:
            candidates = self._known_of(only)
            unknown = unknown + _lengths(only.indptr) - _lengths(candidates.indptr)
            matrix = self._without(self._matrix_of(candidates), matrix)
        return [*self._matrices(shown), matrix], unknown

    def example(self) -> list[Rows]:
        """An input row with a few items, for `StoredAnswer`."""
        return [_example_of(each) for each in self.programs.inputs]

    def rows_of_items(self, names: Sequence[str]) -> tuple[list[Rows], np.ndarray]:
        """Converts item names to inputs of `similar_programs`; returns also a mask of unknown
        names.

        The first item takes the place of an unknown one.
        """
        numbers = self._columns.find(names).astype(np.int32)
        unknown = numbers < 0
        numbers = np.where(unknown, 0, numbers)
        own = Entries(None, numbers, np.arange(len(numbers) + 1))
        return [numbers, own], unknown

    def _item_names(self) -> Names:
        if self.items is None:
            raise ValueError(
                "this predictor has no names; export it with names=..., or use "
                "found.names(...)"
            )
        return self.items

    @functools.cached_property
    def _columns(self) -> Places:
        self._item_names()
        assert self.table is not None  # without names, such requests are rejected
        return Places(self.table.index)

    def _excluded(self, exclude: Any, inputs: Any) -> Any:
        """Converts the argument `exclude` of a call whose argument `inputs` is also given."""
        return exclude

    def _inputs(self, inputs: Any) -> Inputs:
        """Converts the argument `inputs` of a call."""
        if hasattr(inputs, "to_sparse"):
            raise ValueError(
                "this predictor is not of a model of histories; pass data.to_sparse()"
            )
        return Inputs.of(inputs)

    def _columns_of(
        self, lists: NameLists, columns: Mapping[str, Any] | None
    ) -> Beside | None:
        """The event columns of histories; None if there are none.

        Raises:
          ValueError: columns are given, but the model reads none.
        """
        if columns is not None:
            raise ValueError("the predictor reads no columns of events; leave them out")
        return None

    def _shown(
        self, known: Known, matrix: CSR, times: np.ndarray | None, beside: Beside | None
    ) -> Inputs:
        """Converts the known items of histories to the inputs of the model."""
        return Inputs({"inputs": NamedCSR("histories", matrix)}, alone=True)

    def _check_names_suffice(self, times: object) -> None:
        """Raises ValueError if the model reads more than names, and times if these are given."""
        if times is not None:
            raise ValueError("the predictor reads no times; leave out times")
        if isinstance(self.num_features, Mapping):
            raise ValueError(
                "the predictor has several inputs; use recommend({name: source})"
            )
        self._item_names()
        if self.num_features != self.num_items:
            raise ValueError(
                f"the predictor knows the names of its {self.num_items:,} items, not "
                f"of its {self.num_features:,} features; use recommend with a matrix"
            )

    def _known_of(self, lists: NameLists) -> Known:
        """Item numbers of the known names of each history, in the order of the names."""
        if lists.numbers is not None:
            numbers = lists.numbers.astype(np.int64)
        else:
            numbers = self._columns.find(lists.names)
        is_known = numbers >= 0
        if is_known.all():
            return Known(numbers, lists.indptr)
        before = np.concatenate([[0], np.cumsum(is_known)])
        return Known(numbers[is_known], before[lists.indptr])

    def _times_of(
        self, histories: Sequence[Sequence[str]], times: Numbers
    ) -> np.ndarray:
        """Times of the known items of all histories, in one array."""
        if isinstance(times, str) or len(times) != len(histories):
            raise ValueError(
                f"there are {len(histories):,} histories, and times of {len(times):,}"
            )
        kept: list[float] = []
        for names, given in zip(histories, times, strict=True):
            found = np.asarray(given, np.float64)
            if found.shape != (len(names),):
                raise ValueError(
                    f"a history has {len(names):,} names, but its times have the shape "
                    f"{found.shape}; give one number for each name"
                )
            if not np.isfinite(found).all() or (np.diff(found) < 0).any():
                raise ValueError(
                    "times are finite and do not fall within a history: sort its names "
                    f"by time; got {found.tolist()}"
                )
            kept += found[self._columns.find(names) >= 0].tolist()
        return np.array(kept, np.float64)

    def _values_of(
        self,
        histories: Sequence[Sequence[str]],
        values: Numbers,
        known: Known,
    ) -> np.ndarray:
        """Values of the known items, in the order of the entries of `_matrix_of`."""
        columns, found = self._columns, []
        counts = np.diff(known.indptr).tolist()
        for names, given, count in zip(histories, values, counts, strict=True):
            if len(given) != len(names) or not np.isfinite(given).all():
                raise ValueError(
                    f"a history has {len(names):,} names; give a finite value for each of "
                    f"them, not {len(given):,} values with {quoted(given)}"
                )
            pairs = zip(columns.find(names).tolist(), given, strict=True)
            row = {place: value for place, value in pairs if place >= 0}
            if len(row) < count:
                raise ValueError(
                    "a name comes twice in a history with values; give it once, with the "
                    "value of both"
                )
            found += [row[number] for number in sorted(row)]
        return np.array(found, np.float32)

    def _matrix_of(self, *known: Known, rows: int | None = None) -> CSR:
        """Indicator matrix `[histories, num_items]` of the items that are in any of `known`.

        Args:
          known: item numbers of histories. If several are given, their rows are merged.
          rows: number of histories; by default that of the first of `known`.
        """
        rows = len(known[0].indptr) - 1 if rows is None else rows
        # Most requests have one row, for which each call of NumPy counts.
        if rows == 1:
            firsts, keys = [], [each.numbers for each in known]
        else:
            firsts = [each.rows * self.num_items for each in known]
            pairs = zip(firsts, known, strict=True)
            keys = [first + each.numbers for first, each in pairs]
        places = keys[0] if len(keys) == 1 else np.concatenate([_NO_PLACES, *keys])
        # np.unique would take several times as long as this sort.
        places = np.sort(places)
        is_again = places[1:] == places[:-1]
        has_again = is_again.any()
        if has_again:
            places = places[np.concatenate([[True], ~is_again])]
        if rows == 1:
            indices, indptr = places.astype(np.int32), np.array([0, len(places)])
        elif len(known) == 1 and not has_again:  # usually: rows are complete
            indices, indptr = (places - firsts[0]).astype(np.int32), known[0].indptr
        else:
            indptr = np.searchsorted(places, np.arange(rows + 1) * self.num_items)
            indices = (places % self.num_items).astype(np.int32)
        # The CSR is valid by construction, so it is made without validation.
        return CSR.tree_unflatten(self.num_items, (None, indices, indptr, None))

    def _without(self, matrix: CSR, unwanted: CSR) -> CSR:
        """The entries of `matrix` that are not in `unwanted`; both are results of `_matrix_of`."""
        keys, others = (
            np.repeat(np.arange(each.num_rows), np.diff(each.indptr)) * self.num_items
            + each.indices
            for each in (matrix, unwanted)
        )
        kept = ~np.isin(keys, others)
        before = np.concatenate([[0], np.cumsum(kept)])
        indices, indptr = matrix.indices[kept], before[matrix.indptr]
        return CSR(None, indices, indptr, num_cols=self.num_items)

    def _recommend(
        self,
        shown: Inputs,
        k: int | None,
        seen: CSR | None,
        seen_rows: np.ndarray | None,
        denied: np.ndarray,
    ) -> Recommendations:
        k = self.k if k is None else k
        check_positive(k=k)
        if k > self.k:
            raise ValueError(
                f"k is {k} but the predictor was exported for k={self.k}; export it "
                "again with a larger k"
            )
        x, matrices = shown.rows, self._matrices(shown)
        most, programs, entered = max(1, x.num_rows), self.programs, denied
        if denied.size and programs.can_deny:
            programs, entered = programs.without(denied), denied[:0]
        if entered.size:
            most = min(most, rows_at_a_time(entered, seen, self.num_items))
        batches = [
            (size, slice(start + part.start, start + part.stop))
            for start in range(0, x.num_rows, most)
            for size, part in programs.batches(min(most, x.num_rows - start))
        ]

        def results() -> Iterator[Any]:
            for size, part in batches:
                rows = np.arange(part.start, part.stop)
                given = [
                    host_rows(matrix, rows) if isinstance(matrix, CSR) else matrix[rows]
                    for matrix in matrices
                ]
                unwanted = NOTHING
                if seen is not None and seen_rows is not None:
                    unwanted = host_rows(seen, seen_rows[rows])
                if entered.size:
                    if seen is None:
                        unwanted = host_rows(NOTHING, np.full(len(rows), -1))
                    unwanted = with_denied(unwanted, entered, self.num_items)
                given.append(unwanted)
                entries = max(each.nse for each in given if isinstance(each, CSR))
                yield programs.run(size, given, self.room(size, entries))

        counts = [part.stop - part.start for _, part in batches]
        return collect(x, k, counts, results())

    def _matrices(self, shown: Inputs) -> list[Any]:
        """The inputs in the order of the programs' inputs, without the excluded items."""
        *inputs, _ = self.programs.inputs
        found = [shown.parts[each.name or "inputs"].matrix for each in inputs]
        if self.num_read == self.num_items:
            return found
        own = (self.num_read,)
        return [
            self._read(matrix) if like.sparse and like.shape == own else matrix
            for like, matrix in zip(inputs, found, strict=True)
        ]

    def _read(self, matrix: Any) -> CSR:
        """Removes columns of items that are new and that the programs do not read."""
        kept = matrix.indices < self.num_read
        before = np.concatenate([[0], np.cumsum(kept)])
        data = None if matrix.data is None else matrix.data[kept]
        columns, indptr = matrix.indices[kept], before[matrix.indptr]
        return CSR(data, columns, indptr, num_cols=self.num_read)


def _lengths(indptr: np.ndarray) -> np.ndarray:
    """The number of entries in each row. `np.diff` takes five times as long for a few rows."""
    return indptr[1:] - indptr[:-1]


def some_of(count: int) -> np.ndarray:
    """Up to three numbers in `[0, count)`: at most a third of `count`, but at least one."""
    return np.linspace(0, count - 1, max(1, min(3, count // 3))).astype(np.int32)


def _example_of(like: Array) -> Rows:
    """An example of a row, for an input."""
    if like.sparse:
        ids = some_of(like.shape[-1])
        return Entries(None, ids, np.array([0, len(ids)]))
    # An integer dtype rounds these numbers to 0 or 1.
    numbers = np.linspace(0, 1, math.prod(like.shape))
    return numbers.reshape(1, *like.shape).astype(like.like.dtype)


def _as_lists(histories: NameLists | Sequence[Sequence[str]]) -> NameLists:
    return histories if isinstance(histories, NameLists) else NameLists.of(histories)


def _on_host(inputs: Inputs) -> Inputs:
    """Copies inputs to the host, as NumPy arrays."""
    parts = {
        name: _part_on_host(part) if isinstance(part, NamedCSR) else part
        for name, part in inputs.parts.items()
    }
    return dataclasses.replace(inputs, parts=parts)


def _part_on_host(part: NamedCSR) -> NamedCSR:
    """Copies an input to NumPy arrays on the host. A matrix from the device is validated."""
    matrix = part.matrix
    if isinstance(matrix.indices, np.ndarray):
        return part
    data = None if matrix.data is None else np.asarray(matrix.data)
    leaves = np.asarray(matrix.indices), np.asarray(matrix.indptr)
    return dataclasses.replace(
        part, matrix=CSR(data, *leaves, num_cols=matrix.num_cols)
    )
