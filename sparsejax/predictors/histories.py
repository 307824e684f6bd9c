"""Predictors from histories, which return the most likely next items."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import jax
import numpy as np

from sparsejax.data.files.name_index import NameTable
from sparsejax.data.reading.histories import (
    EVENTS,
    HISTORIES,
    TIMES,
    EventShapes,
    arrays_of,
    input_name,
    inputs_of,
    item_of,
    unordered,
)
from sparsejax.data.reading.sources import (
    Inputs,
    NamedArray,
    NamedCSR,
    check_columns,
    check_same_features,
)
from sparsejax.data.sets.click_records import cells_of, record_columns
from sparsejax.data.sets.click_schema import RARE, VocabularyColumn
from sparsejax.data.sets.event_schema import CONTEXT, USERS, EventSchema
from sparsejax.data.sets.events import Events, no_events
from sparsejax.data.sets.sequences import Histories, SequenceDataset
from sparsejax.predictors.ranking import (
    NOTHING,
    Beside,
    Items,
    Known,
    NameLists,
    Numbers,
    some_of,
)
from sparsejax.predictors.runtime import Programs, Rows
from sparsejax.predictors.signature import (
    LABEL,
    Signature,
    features_of,
    reads_histories,
)
from sparsejax.sparse import CSR

BESIDE = EVENTS, USERS  # prefixes of the names of vocabularies of columns
_Input = int | tuple[int, ...] | jax.ShapeDtypeStruct  # its size, or its shape
_HOUR = 3600.0  # seconds between the items of an example


@dataclasses.dataclass(frozen=True, eq=False)
class Ordered(Items):
    """Recommends items for histories. The model reads their last items, in order.

    Attributes:
      events: event columns that the model reads, without rows; None if it reads none.
      users: user columns that the model reads, without rows; None if it reads none.
    """

    events: Events | None = None
    users: Events | None = None

    @classmethod
    def of(
        cls, signature: Signature, vocabularies: Mapping[str, NameTable]
    ) -> Callable[[Programs], Self]:
        features = features_of(signature.inputs[:-1])
        if not reads_histories(features):
            raise ValueError(f"{LABEL} has no input {HISTORIES!r}, which is a list")
        assert isinstance(features, Mapping)
        columns = columns_in(signature, features, vocabularies)
        own = {n: t for n, t in vocabularies.items() if not n.startswith(BESIDE)}
        made: Any = super().of(signature, own)
        return functools.partial(made, **columns)

    @property
    def _length(self) -> int:
        """Number of the last items of a history that the model reads."""
        assert isinstance(self.num_features, Mapping)
        return cast(jax.ShapeDtypeStruct, self.num_features[HISTORIES]).shape[0]

    @functools.cached_property
    def _shapes(self) -> EventShapes | None:
        """For each event column that the model reads, the shape of an event's value."""
        if self.events is None and self.users is None:
            return None
        assert isinstance(self.num_features, Mapping)
        return _shapes_in(self.num_features)

    @property
    def reads_times(self) -> bool:
        assert isinstance(self.num_features, Mapping)
        return TIMES in self.num_features

    def example(self) -> list[Rows]:
        ids = some_of(self.num_read)
        ordered = Histories(np.array([0, len(ids)]), ids, _HOUR * np.arange(len(ids)))
        arrays = arrays_of(ordered, self._length, times=self.reads_times)
        # The ids 0 (missing) and 1 (unknown category) are valid in each column.
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
        for what, given, own, without in (
            ("events", inputs.events, self.events, "without_events()"),
            ("users", inputs.users, self.users, "with_users(None)"),
        ):
            if given is not None and own is not None:
                own.check_like(given, "inputs")
            elif given is not None or own is not None:
                has, wanted = (
                    "none" if each is None else f"{each.schema.used}"
                    for each in (given, own)
                )
                raise ValueError(
                    f"inputs has the columns of {what} {has}, but the predictor reads "
                    f"{wanted}; leave them out, inputs.{without}, or read the data with those "
                    f"of predictor.{what}"
                )
        context = () if self.events is None else self.events.schema.context
        if context and inputs.context is None:
            raise ValueError(
                "the predictor reads what is known of the event to come: "
                f"{[*context]}; give inputs.with_context(...)"
            )
        if self.items is not None:
            names = inputs.feature_names, self.items
            both = zip(("inputs", "the predictor"), names, strict=True)
            check_same_features(*(NamedCSR(w, NOTHING, None, n) for w, n in both))
        how = {"times": self.reads_times, "events": self._shapes}
        return inputs_of(inputs, self._length, **how)

    def recommend_names(self, histories: Any, **options: Any) -> Any:
        """Names of the best items for histories of names, or of events."""
        columns = _of_records(CONTEXT, options.pop("context", None))
        columns |= _of_records(USERS, options.pop("users", None))
        events = isinstance(histories, list | tuple) and _has_events(histories)
        if events or self.events is not None:
            one = all(isinstance(part, Mapping) for part in histories)
            lists = [histories] if one else histories
            used = () if self.events is None else self.events.schema.used
            names, times, of_events = _parts_of(lists, used)
            if self.reads_times:
                if options.get("times") is not None:
                    raise ValueError("events have their times; leave out times=...")
                options["times"] = times[0] if one else times
            elif _fall(times):
                raise ValueError(
                    "the times of the events fall within a history: give the oldest event first"
                )
            columns, histories = of_events | columns, names[0] if one else names
        if columns:
            options["columns"] = columns
        return super().recommend_names(histories, **options)

    def _columns_of(
        self, lists: NameLists, columns: Mapping[str, Any] | None
    ) -> Beside | None:
        if self.events is None and self.users is None:
            return super()._columns_of(lists, columns)
        given = {n.removeprefix(EVENTS): each for n, each in (columns or {}).items()}
        rows = len(lists.indptr) - 1
        wanted = columns_read(self.events, self.users)
        if unknown := [name for name in given if name not in wanted]:
            raise ValueError(
                f"the predictor reads no column {unknown[0]!r}; it reads {wanted}"
            )
        found: dict[str, np.ndarray] = {}
        new = np.zeros(rows, np.int64)
        if self.events is not None:
            found, new = self._columns_of_events(self.events, lists, given)
            if names := self.events.schema.context:
                own = {name: given.get(f"{CONTEXT}{name}") for name in names}
                context = self.events.context_of(own, rows)
                new = new + _unknown_in(self.events, context)
                found |= {
                    f"{CONTEXT}{name}": column for name, column in context.items()
                }
        if self.users is not None:
            names = [n for n in self.users.schema.used if f"{USERS}{n}" in given]
            own = {name: given[f"{USERS}{name}"] for name in names}
            of_users = self.users.users_of(own, rows, given.get(USERS))
            new = new + _unknown_in(self.users, of_users)
            found |= {f"{USERS}{name}": column for name, column in of_users.items()}
        return Beside(found, new)

    def _columns_of_events(
        self, events: Events, lists: NameLists, given: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Event columns of the known items, and each row's number of unknown categories."""
        used, rows = events.schema.used, len(lists.indptr) - 1
        if not len(lists.names):
            return dict(events.columns), np.zeros(rows, np.int64)
        if lacks := [name for name in used if name not in given]:
            raise ValueError(
                f"the events lack the columns {lacks}, which the predictor reads: give each "
                'event as an object, such as {"item": "tea", '
                + f'"{lacks[0]}": ...'
                + "}"
            )
        found = events.read(cells_of({name: given[name] for name in used}, used), used)
        where = np.repeat(np.arange(rows), np.diff(lists.indptr))
        new = np.bincount(where, _unknown_in(events, found), rows).astype(np.int64)
        numbers = lists.numbers
        if numbers is None:
            numbers = self._columns.find(lists.names)
        return {name: column[numbers >= 0] for name, column in found.items()}, new

    def _shown(
        self, known: Known, matrix: CSR, times: np.ndarray | None, beside: Beside | None
    ) -> Inputs:
        ordered = Histories(known.indptr, known.numbers.astype(np.int32), times)
        how: dict[str, Any] = {"times": times is not None, "events": self._shapes}
        how["columns"] = None if beside is None else beside.columns
        arrays = arrays_of(ordered, self._length, **how)
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
        # The events of known items are moved to the front; the other events become padding.
        order = np.argsort(unread, axis=1, kind="stable")
        nothing = {HISTORIES: -1, TIMES: 0}
        for name, shape in (self._shapes or {}).items():
            if not name.startswith((CONTEXT, USERS)):
                nothing[input_name(name)] = -1 if shape else 0
        for name in nothing.keys() & places.keys():
            given = found[places[name]]
            over = (..., *(None,) * (given.ndim - 2))
            given = np.where(unread[over], nothing[name], given).astype(given.dtype)
            found[places[name]] = np.take_along_axis(given, order[over], axis=1)
        return found

    def _values_of(
        self,
        histories: Sequence[Sequence[str]],
        values: Numbers,
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


def _shapes_in(features: Mapping[str, _Input]) -> dict[str, tuple[int, ...]]:
    """For each event column among the inputs, the shape of an event's value."""
    found: dict[str, tuple[int, ...]] = {}
    for name, like in features.items():
        shape = like.shape if isinstance(like, jax.ShapeDtypeStruct) else ()
        if name.startswith(EVENTS):
            found[name.removeprefix(EVENTS)] = shape[1:]
        elif name.startswith((CONTEXT, USERS)):
            found[name] = shape
    return found


def columns_in(
    signature: Signature,
    features: Mapping[str, _Input],
    vocabularies: Mapping[str, NameTable],
) -> dict[str, Events | None]:
    """The columns of events and users that a file has, without rows, as arguments of `Ordered`."""
    shapes = _shapes_in(features)
    pairs = ("events", EVENTS), ("users", USERS)
    return {
        what: _columns_in(getattr(signature, what), begin, shapes, vocabularies)
        for what, begin in pairs
    }


def _columns_in(
    schema: EventSchema | None,
    begin: str,
    shapes: Mapping[str, tuple[int, ...]],
    vocabularies: Mapping[str, NameTable],
) -> Events | None:
    """Event or user columns that a file states, without rows; None if it states none.

    Raises:
      ValueError: schema, inputs and categories do not match each other.
    """
    own = {n: s for n, s in shapes.items() if n.startswith(USERS) == (begin == USERS)}
    named = {
        name.removeprefix(begin): table.names
        for name, table in vocabularies.items()
        if name.startswith(begin)
    }
    if schema is None and not own and not named:
        return None
    mark = USERS if begin == USERS else ""
    wanted: list[str] = []
    if schema is not None:
        wanted = [f"{mark}{name}" for name in schema.used]
        wanted += [f"{CONTEXT}{name}" for name in schema.context]
    if schema is None or sorted(wanted) != sorted(own):
        raise ValueError(f"{LABEL} has other columns than its schemas")
    lists = {name.removeprefix(mark): s[0] for name, s in own.items() if s}
    return no_events(schema, named, {n: s for n, s in lists.items() if n in schema.ids})


def columns_read(events: Events | None, users: Events | None) -> list[str]:
    """Names of the columns of a request, as `rows_of_names` takes them."""
    found: list[str] = []
    if events is not None:
        found = [*events.schema.used, *(f"{CONTEXT}{n}" for n in events.schema.context)]
    if users is not None:
        found += [USERS, *(f"{USERS}{name}" for name in users.schema.used)]
    return found


def _has_events(histories: Sequence[Any]) -> bool:
    """Whether histories consist of event objects: the first history that is not empty decides."""
    first = next((part for part in histories if isinstance(part, Mapping) or part), "")
    if isinstance(first, list | tuple):
        first = first[0]
    return isinstance(first, Mapping)


def _parts_of(
    histories: Sequence[Any], used: Sequence[str]
) -> tuple[list[list[str]], list[list[Any]], dict[str, list[Any]]]:
    """Converts histories of events to item names, times, and columns.

    Raises:
      TypeError: an event is not an object.
      ValueError: an event has no item.
    """
    names, times, events = [], [], []
    for history in histories:
        for event in history if isinstance(history, list | tuple) else [history]:
            if not isinstance(event, Mapping) or history is event:
                raise TypeError(
                    'an event is an object, such as {"item": "tea", "time": 3}, with a value '
                    f"for each of the columns {[*used]}, got {event!r:.80}"
                )
        names.append([item_of(event) for event in history])
        times.append([event.get("time", np.nan) for event in history])
        events += history
    columns = record_columns(events)
    missing = [None] * len(events)
    return names, times, {name: columns.get(name, missing) for name in used}


def _fall(times: Sequence[Sequence[Any]]) -> bool:
    """Whether some event is earlier than the event before it; False if times are missing."""
    try:
        pairs = (pair for each in times for pair in itertools.pairwise(each))
        return any(after < before for before, after in pairs)
    except TypeError:  # some have none, or they are of several types
        return False


def _of_records(begin: str, records: Any) -> dict[str, Any]:
    """Columns from a dict, or from a list with a dict for each history; `begin` precedes names."""
    if records is None:
        return {}
    if isinstance(records, list | tuple):
        records = record_columns(records)
    return {f"{begin}{name}": each for name, each in records.items()}


def _unknown_in(events: Events, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """The number of rare or unknown categories in each event or each history."""
    found = [
        (column == RARE).sum(axis=tuple(range(1, column.ndim)))
        for name, column in columns.items()
        if name in events.schema.ids
        and isinstance(events.schema.ids[name], VocabularyColumn)
    ]
    count = len(next(iter(columns.values())))
    return sum(found, start=np.zeros(count, np.int64))
